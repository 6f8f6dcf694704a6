//! One httpGet probe: one connection, one request; a status from 200 to 399 is a success.

use std::{net::SocketAddr, time::Duration};

use http_body_util::{BodyExt, Empty};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};
use tokio_util::task::AbortOnDropHandle;

use super::tcp::Answer;

/// What applications see as the client.
const USER_AGENT: &str = concat!("beelet-probe/", env!("CARGO_PKG_VERSION"));

/// Asks for `path` and says what came back.
pub(super) async fn get(
    host: &str,
    address: SocketAddr,
    path: &str,
    headers: &[(String, String)],
    within: Duration,
) -> Answer {
    match timeout(within, exchange(host, address, path, headers)).await {
        Ok(Ok(status)) if (200..400).contains(&status) => Answer::success(format!("HTTP status {status}")),
        Ok(Ok(status)) => Answer::failure(format!("HTTP probe failed with status {status}")),
        Ok(Err(Broken::Request(error))) => Answer::error(error),
        Ok(Err(Broken::Answer(error))) => Answer::failure(format!("GET http://{address}{path}: {error}")),
        Err(_) => Answer::failure(format!(
            "GET http://{address}{path}: no answer within {} s",
            within.as_secs_f64()
        )),
    }
}

/// Where it broke.
enum Broken {
    /// The probe itself is wrong: says nothing about the application.
    Request(String),
    /// The application did not answer as it should.
    Answer(String),
}

async fn exchange(
    host: &str,
    address: SocketAddr,
    path: &str,
    headers: &[(String, String)],
) -> Result<u16, Broken> {
    let answer = |e: &dyn std::fmt::Display| Broken::Answer(e.to_string());
    let mut request = Request::get(path);
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        request = request.header("Host", format!("{bracketed}:{}", address.port()));
    }
    for (name, default) in [("User-Agent", USER_AGENT), ("Accept", "*/*"), ("Connection", "close")] {
        if !headers.iter().any(|(given, _)| given.eq_ignore_ascii_case(name)) {
            request = request.header(name, default);
        }
    }
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let request = request
        .body(Empty::<Bytes>::new())
        .map_err(|e| Broken::Request(format!("the probe's request: {e}")))?;
    let stream = TcpStream::connect(address).await.map_err(|e| answer(&e))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| answer(&e))?;
    // Ends with this function, however it is left.
    let _driver = AbortOnDropHandle::new(tokio::spawn(connection));
    let response = sender.send_request(request).await.map_err(|e| answer(&e))?;
    let status = response.status().as_u16();
    // The body says nothing; one piece of it is read so that short answers end cleanly.
    let _ = response.into_body().frame().await;
    Ok(status)
}

#[cfg(test)]
mod tests {
    use beelet_policy::probe::Outcome;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    /// Serves one connection with `reply` and gives the request it saw.
    async fn check(reply: &'static str, headers: &[(String, String)], expect: Outcome) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let read = stream.read(&mut request).await.unwrap();
            stream.write_all(reply.as_bytes()).await.unwrap();
            String::from_utf8_lossy(&request[..read]).into_owned()
        });
        let answer = get("127.0.0.1", address, "/healthz?x=1", headers, Duration::from_secs(30)).await;
        assert_eq!(answer.outcome, expect, "{reply:?}: {}", answer.detail);
        server.await.unwrap()
    }

    #[tokio::test]
    async fn a_status_from_200_to_399_is_a_success() {
        for status in ["200 OK", "204 No Content", "302 Found", "399 Odd"] {
            let reply: &'static str = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").leak();
            check(reply, &[], Outcome::Success).await;
        }
        for status in ["400 Bad", "404 Not Found", "500 Broken"] {
            let reply: &'static str = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").leak();
            check(reply, &[], Outcome::Failure).await;
        }
    }

    #[tokio::test]
    async fn what_is_not_http_is_a_failure() {
        check("", &[], Outcome::Failure).await;
        check("220 smtp ready\r\n", &[], Outcome::Failure).await;
    }

    #[tokio::test]
    async fn the_request_has_the_probes_headers() {
        let reply = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        let request = check(reply, &[("X-Probe".to_owned(), "yes".to_owned())], Outcome::Success).await;
        assert!(request.starts_with("GET /healthz?x=1 HTTP/1.1\r\n"), "{request}");
        assert!(request.contains("x-probe: yes"), "{request}");
        assert!(request.to_lowercase().contains("user-agent: beelet-probe/"), "{request}");
        let own_host = check(reply, &[("Host".to_owned(), "app.example".to_owned())], Outcome::Success).await;
        assert!(own_host.to_lowercase().contains("host: app.example\r\n"), "{own_host}");
    }

    #[tokio::test]
    async fn a_header_that_is_none_is_the_probes_own_error() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let bad = [("no spaces here".to_owned(), "x".to_owned())];
        let answer = get("127.0.0.1", address, "/", &bad, Duration::from_secs(30)).await;
        assert_eq!(answer.outcome, Outcome::Error);
    }
}
