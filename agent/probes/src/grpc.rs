//! A grpc probe: a single call of gRPC's health service (grpc.health.v1) on a connection of its own.

use std::{net::SocketAddr, time::Duration};

use beelet_proto::health::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tokio::time::timeout;
use tonic::{Code, Status, transport::Endpoint};

use super::{
    answer::{Answer, MAX_OUTPUT},
    http::USER_AGENT,
};

/// Failure to get a status.
enum Broken {
    Connect(String),
    Call(Status),
}

/// Asks for the health of `service`; the empty name stands for the whole server.
pub(super) async fn check(address: SocketAddr, service: &str, within: Duration) -> Answer {
    let seconds = within.as_secs_f64();
    match timeout(within, call(address, service)).await {
        Ok(Ok(status)) => match ServingStatus::try_from(status) {
            Ok(ServingStatus::Serving) => Answer::success("service healthy"),
            Ok(status) => {
                Answer::failure(format!("service unhealthy (responded with {:?})", status.as_str_name()))
            }
            Err(_) => Answer::failure(format!("service unhealthy (responded with \"{status}\")")),
        },
        Ok(Err(Broken::Connect(error))) => {
            Answer::failure(format!("error: failed to connect service {:?}: {error}", address.to_string()))
        }
        Ok(Err(Broken::Call(status))) if status.code() == Code::Unimplemented => Answer::failure(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message()
        )),
        Ok(Err(Broken::Call(status))) => Answer::failure(format!(
            "error: health rpc probe failed: {:?}: {}",
            status.code(),
            status.message()
        )),
        Err(_) => Answer::failure(format!("timeout: health rpc did not complete within {seconds} s")),
    }
}

async fn call(address: SocketAddr, service: &str) -> Result<i32, Broken> {
    let connect = |error: tonic::transport::Error| {
        let mut cause: &dyn std::error::Error = &error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        Broken::Connect(cause.to_string())
    };
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(connect)?;
    let channel = endpoint.user_agent(USER_AGENT).map_err(connect)?.connect().await.map_err(connect)?;
    let mut client = HealthClient::new(channel).max_decoding_message_size(MAX_OUTPUT);
    let request = HealthCheckRequest { service: service.to_owned() };
    let response = client.check(request).await.map_err(Broken::Call)?;
    Ok(response.into_inner().status)
}

#[cfg(test)]
mod tests {
    use beelet_policy::probe::Outcome;
    use beelet_proto::health::{
        HealthCheckResponse,
        health_server::{Health, HealthServer},
    };
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::{Request, Response, transport::Server};

    use super::*;

    /// Knows the services `good`, `bad` and `hangs`.
    struct App;

    #[tonic::async_trait]
    impl Health for App {
        async fn check(
            &self,
            request: Request<HealthCheckRequest>,
        ) -> Result<Response<HealthCheckResponse>, Status> {
            let status = match request.into_inner().service.as_str() {
                "" | "good" => ServingStatus::Serving,
                "bad" => ServingStatus::NotServing,
                "hangs" => std::future::pending().await,
                _ => return Err(Status::not_found("unknown service")),
            };
            Ok(Response::new(HealthCheckResponse { status: status.into() }))
        }

        type WatchStream = tokio_stream::Empty<Result<HealthCheckResponse, Status>>;

        async fn watch(
            &self,
            _request: Request<HealthCheckRequest>,
        ) -> Result<Response<Self::WatchStream>, Status> {
            Err(Status::unimplemented("not here"))
        }
    }

    #[tokio::test]
    async fn the_health_service_decides() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server::builder().add_service(HealthServer::new(App));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let long = Duration::from_secs(30);
        let test = |service: &'static str, within| async move { check(address, service, within).await };
        assert_eq!(test("", long).await, Answer::success("service healthy"));
        assert_eq!(test("good", long).await.outcome, Outcome::Success);
        let bad = test("bad", long).await;
        assert_eq!(bad, Answer::failure("service unhealthy (responded with \"NOT_SERVING\")"));
        let unknown = test("other", long).await;
        assert!(
            unknown.outcome == Outcome::Failure && unknown.detail.contains("unknown service"),
            "{unknown:?}"
        );
        let late = test("hangs", Duration::from_millis(200)).await;
        assert!(late.outcome == Outcome::Failure && late.detail.starts_with("timeout: "), "{late:?}");
    }

    #[tokio::test]
    async fn a_server_without_the_service_is_a_failure_and_so_is_none() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = tonic::service::Routes::default();
        let server = tokio::spawn(
            Server::builder().add_routes(routes).serve_with_incoming(TcpListenerStream::new(listener)),
        );
        let answer = check(address, "", Duration::from_secs(30)).await;
        assert!(answer.detail.contains("does not implement"), "{answer:?}");
        assert_eq!(answer.outcome, Outcome::Failure);
        server.abort();
        let _ = server.await;
        let answer = check(address, "", Duration::from_secs(30)).await;
        assert_eq!(answer.outcome, Outcome::Failure, "{answer:?}");
    }
}
