//! A grpc probe: a single call of gRPC's health service (grpc.health.v1), on a connection of its own or on
//! one that the server has kept open (`kept.rs`).

use std::{net::SocketAddr, sync::Arc, time::Duration};

use beelet_proto::health::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, pki_types::ServerName},
};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint, Uri},
};
use tower::service_fn;

use super::{
    answer::{Answer, MAX_OUTPUT},
    http::{Stream, USER_AGENT},
    kept::{Connection, Slot, Turn},
    tcp,
};

/// Failure to get a status.
enum Broken {
    Connect(String),
    Call(Status),
}

/// Asks for the health of `service`; the empty name stands for the whole server. `tls` has the settings of a
/// probe that speaks TLS (KEP-4939).
pub(super) async fn check(
    address: SocketAddr,
    service: &str,
    tls: Option<&Arc<ClientConfig>>,
    within: Duration,
    kept: Option<&Slot>,
) -> Answer {
    let seconds = within.as_secs_f64();
    if let Some(slot) = kept
        && let Ok(Some(answer)) = timeout(within, again(address, service, slot)).await
    {
        return answer;
    }
    match timeout(within, call(address, service, tls, kept)).await {
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

/// Asks on the kept connection. Returns only a success; anything else closes the connection.
async fn again(address: SocketAddr, service: &str, slot: &Slot) -> Option<Answer> {
    let (Connection::Grpc(mut client), turn) = slot.claim(address).await? else { return None };
    let status = ask(&mut client, service).await.ok()?;
    if status != i32::from(ServingStatus::Serving) {
        return None;
    }
    slot.keep(Connection::Grpc(client), turn).await;
    Some(Answer::success("service healthy"))
}

async fn ask(client: &mut HealthClient<Channel>, service: &str) -> Result<i32, Status> {
    let request = HealthCheckRequest { service: service.to_owned() };
    Ok(client.check(request).await?.into_inner().status)
}

async fn call(
    address: SocketAddr,
    service: &str,
    tls: Option<&Arc<ClientConfig>>,
    kept: Option<&Slot>,
) -> Result<i32, Broken> {
    let connect = |error: tonic::transport::Error| {
        let mut cause: &dyn std::error::Error = &error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        Broken::Connect(cause.to_string())
    };
    let mut endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(connect)?;
    if tls.is_some()
        && let Ok(origin) = format!("https://{address}").parse()
    {
        endpoint = endpoint.origin(origin);
    }
    let (tls, is_kept) = (tls.map(with_http2), kept.is_some());
    let opener = service_fn(move |_: Uri| open(address, tls.clone(), is_kept));
    let endpoint = endpoint.user_agent(USER_AGENT).map_err(connect)?;
    let channel = endpoint.connect_with_connector(opener).await.map_err(connect)?;
    let mut client = HealthClient::new(channel).max_decoding_message_size(MAX_OUTPUT);
    let status = ask(&mut client, service).await.map_err(Broken::Call)?;
    if let Some(slot) = kept.filter(|_| status == i32::from(ServingStatus::Serving)) {
        slot.keep(Connection::Grpc(client), Turn::first(address)).await;
    }
    Ok(status)
}

/// Returns the settings with the protocol that gRPC requires.
fn with_http2(settings: &Arc<ClientConfig>) -> Arc<ClientConfig> {
    let mut settings = (**settings).clone();
    settings.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(settings)
}

/// Opens a connection. A connection that is kept leaves no TIME_WAIT: no request is lost when it is closed.
async fn open(
    address: SocketAddr,
    tls: Option<Arc<ClientConfig>>,
    is_kept: bool,
) -> std::io::Result<TokioIo<std::pin::Pin<Box<dyn Stream>>>> {
    let stream = TcpStream::connect(address).await?;
    if is_kept {
        tcp::hang_up(&stream);
    }
    Ok(TokioIo::new(match tls {
        Some(tls) => Box::pin(TlsConnector::from(tls).connect(ServerName::from(address.ip()), stream).await?),
        None => Box::pin(stream),
    }))
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
        let test =
            |service: &'static str, within| async move { check(address, service, None, within, None).await };
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
        let answer = check(address, "", None, Duration::from_secs(30), None).await;
        assert!(answer.detail.contains("does not implement"), "{answer:?}");
        assert_eq!(answer.outcome, Outcome::Failure);
        server.abort();
        let _ = server.await;
        let answer = check(address, "", None, Duration::from_secs(30), None).await;
        assert_eq!(answer.outcome, Outcome::Failure, "{answer:?}");
    }

    #[tokio::test]
    async fn a_server_may_speak_tls_and_keep_the_connection() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = beelet_testing::tls::acceptor();
        let (count, mut connections) = tokio::sync::watch::channel(0);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                count.send_modify(|count| *count += 1);
                let Ok(stream) = acceptor.accept(stream).await else { continue };
                let routes = tonic::service::Routes::new(HealthServer::new(App)).prepare();
                let service = hyper_util::service::TowerToHyperService::new(routes);
                let server = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
                tokio::spawn(async move { server.serve_connection(TokioIo::new(stream), service).await });
            }
        });
        let (tls, slot, long) =
            (beelet_base::tls::settings().unwrap(), Slot::default(), Duration::from_secs(30));
        for _ in 0..15 {
            let answer = check(address, "", Some(&tls), long, Some(&slot)).await;
            assert_eq!(answer, Answer::success("service healthy"));
        }
        assert_eq!(*connections.borrow_and_update(), 2, "ten checks per connection");
        // Without TLS the same server fails.
        assert_eq!(check(address, "", None, Duration::from_secs(2), None).await.outcome, Outcome::Failure);
    }
}
