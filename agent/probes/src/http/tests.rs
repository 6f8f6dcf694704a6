use beelet_policy::probe::Outcome;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use tokio_rustls::TlsAcceptor;

use super::*;
use beelet_base::tls;

const LONG: Duration = Duration::from_secs(30);

fn plain(path: &str, headers: &[(&str, &str)]) -> Get {
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Get { tls: false, http2: false, path: path.to_owned(), headers }
}

/// Serves one connection after the other with `replies`, in order, and returns the requests.
async fn serve(listener: TcpListener, replies: Vec<String>, acceptor: Option<TlsAcceptor>) -> Vec<String> {
    let mut requests = Vec::new();
    for reply in replies {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream: Pin<Box<dyn Stream>> = match &acceptor {
            Some(acceptor) => Box::pin(acceptor.accept(stream).await.unwrap()),
            None => Box::pin(stream),
        };
        let mut request = vec![0; 4096];
        let read = stream.read(&mut request).await.unwrap();
        // The client may have closed the connection.
        let _ = stream.write_all(reply.as_bytes()).await;
        let _ = stream.shutdown().await;
        requests.push(String::from_utf8_lossy(&request[..read]).into_owned());
    }
    requests
}

async fn run(get_this: &Get, replies: &[&str]) -> (Answer, Vec<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let replies = replies.iter().map(|reply| reply.replace("PORT", &port.to_string())).collect();
    let server = tokio::spawn(serve(listener, replies, None));
    let answer = get(get_this, "127.0.0.1", port, &tls::settings().unwrap(), LONG, None).await;
    (answer, server.await.unwrap())
}

fn reply(status: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nhi")
}

#[tokio::test]
async fn a_status_from_200_to_399_is_a_success() {
    for (status, outcome, warning) in [
        ("200 OK", Outcome::Success, false),
        ("204 No Content", Outcome::Success, false),
        ("302 Found", Outcome::Success, true),
        ("304 Not Modified", Outcome::Success, true),
        ("399 Odd", Outcome::Success, true),
        ("400 Bad", Outcome::Failure, false),
        ("404 Not Found", Outcome::Failure, false),
        ("500 Broken", Outcome::Failure, false),
    ] {
        let (answer, _) = run(&plain("/", &[]), &[&reply(status)]).await;
        assert_eq!((answer.outcome, answer.warning), (outcome, warning), "{status}: {}", answer.detail);
    }
}

#[tokio::test]
async fn an_answer_that_is_not_http_is_a_failure() {
    for reply in ["", "220 smtp ready\r\n"] {
        assert_eq!(run(&plain("/", &[]), &[reply]).await.0.outcome, Outcome::Failure, "{reply:?}");
    }
}

#[tokio::test]
async fn the_request_has_the_probes_headers() {
    let (_, requests) = run(&plain("/healthz?x=1", &[("X-Probe", "yes")]), &[&reply("200 OK")]).await;
    let request = requests[0].to_lowercase();
    assert!(requests[0].starts_with("GET /healthz?x=1 HTTP/1.1\r\n"), "{request}");
    assert!(request.contains("x-probe: yes\r\n"), "{request}");
    assert!(request.contains("user-agent: kube-probe/") && request.contains("accept: */*"), "{request}");
    let own = plain("/", &[("Host", "app.example"), ("Accept", ""), ("User-Agent", "me")]);
    let request = run(&own, &[&reply("200 OK")]).await.1[0].to_lowercase();
    assert!(request.contains("host: app.example\r\n"), "{request}");
    assert!(request.contains("user-agent: me\r\n") && !request.contains("accept"), "{request}");
}

#[tokio::test]
async fn an_invalid_header_is_the_probes_own_error() {
    let bad = plain("/", &[("no spaces here", "x")]);
    let answer = get(&bad, "127.0.0.1", 1, &tls::settings().unwrap(), LONG, None).await;
    assert_eq!(answer.outcome, Outcome::Error);
}

#[tokio::test]
async fn redirects_are_followed_on_the_host_only() {
    let to =
        |location: &str| format!("HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n");
    let own = plain("/a/b?c=1", &[("Host", "app.example"), ("X-Probe", "yes")]);
    let (answer, requests) =
        run(&own, &[&to("next#part"), &to("http://127.0.0.1:PORT/last?d=2"), &reply("200 OK")]).await;
    assert_eq!((answer.outcome, answer.warning), (Outcome::Success, false), "{}", answer.detail);
    assert_eq!(answer.detail, "hi");
    assert!(requests[1].starts_with("GET /a/next HTTP/1.1\r\n"), "{}", requests[1]);
    assert!(requests[1].contains("app.example") && requests[1].contains("yes"), "{}", requests[1]);
    assert!(requests[2].starts_with("GET /last?d=2 HTTP/1.1\r\n"), "{}", requests[2]);
    assert!(!requests[2].contains("app.example") && requests[2].contains("yes"), "{}", requests[2]);

    let (answer, _) = run(&plain("/", &[]), &[&to("http://elsewhere.example/")]).await;
    assert_eq!((answer.outcome, answer.warning), (Outcome::Success, true), "{}", answer.detail);
    let (answer, _) = run(&plain("/", &[]), &[&to("/missing"), &reply("404 Not Found")]).await;
    assert_eq!(answer.detail, "HTTP probe failed with statuscode: 404");
    let round = to("/");
    let (answer, _) = run(&plain("/", &[]), &[round.as_str(); MAX_REDIRECTS + 1]).await;
    assert!(answer.detail.ends_with("stopped after 10 redirects"), "{}", answer.detail);
}

#[tokio::test]
async fn the_body_is_read_up_to_the_limit() {
    let endless = format!("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{}", "x".repeat(100_000));
    let (answer, _) = run(&plain("/", &[]), &[&endless]).await;
    assert_eq!((answer.outcome, answer.detail.len()), (Outcome::Success, MAX_OUTPUT));
    let broken = "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhal";
    assert_eq!(run(&plain("/", &[]), &[broken]).await.0.outcome, Outcome::Failure);
}

#[tokio::test]
async fn https_is_not_verified() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let acceptor = beelet_testing::tls::acceptor();
    let server = tokio::spawn(serve(listener, vec![reply("200 OK")], Some(acceptor)));
    let secure = Get { tls: true, ..plain("/", &[]) };
    let answer = get(&secure, "127.0.0.1", port, &tls::settings().unwrap(), LONG, None).await;
    assert_eq!((answer.outcome, answer.detail.as_str()), (Outcome::Success, "hi"));
    assert!(server.await.unwrap()[0].starts_with("GET / HTTP/1.1\r\n"));
}

#[tokio::test]
async fn an_answer_that_does_not_come_is_a_failure() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let answer =
        get(&plain("/", &[]), "127.0.0.1", port, &tls::settings().unwrap(), Duration::from_millis(50), None)
            .await;
    assert_eq!(answer.outcome, Outcome::Failure);
    assert!(answer.detail.contains("no answer within 0.05 s"), "{}", answer.detail);
}

/// Serves any number of requests per connection until the client closes it; counts the connections.
async fn serve_kept(listener: TcpListener, status: Arc<std::sync::Mutex<&'static str>>) -> usize {
    let mut connections = 0;
    while let Ok(Ok((mut stream, _))) = timeout(Duration::from_secs(2), listener.accept()).await {
        connections += 1;
        let status = Arc::clone(&status);
        tokio::spawn(async move {
            let mut request = vec![0; 4096];
            while let Ok(1..) = stream.read(&mut request).await {
                let status = *status.lock().unwrap();
                if stream.write_all(reply(status).as_bytes()).await.is_err() {
                    return;
                }
            }
        });
    }
    connections
}

#[tokio::test]
async fn a_kept_connection_serves_ten_checks_and_never_decides_a_failure() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let status = Arc::new(std::sync::Mutex::new("200 OK"));
    let server = tokio::spawn(serve_kept(listener, Arc::clone(&status)));
    let (tls, slot, request) = (tls::settings().unwrap(), Slot::default(), plain("/", &[]));
    let ask = || get(&request, "127.0.0.1", port, &tls, LONG, Some(&slot));
    for _ in 0..20 {
        assert_eq!(ask().await.outcome, Outcome::Success);
    }
    *status.lock().unwrap() = "500 Broken";
    let failed = ask().await;
    assert_eq!(failed.detail, "HTTP probe failed with statuscode: 500");
    *status.lock().unwrap() = "200 OK";
    assert_eq!(ask().await.outcome, Outcome::Success);
    // Two for twenty checks. The failure had a fresh one, since ten checks were over, and so had the last.
    assert_eq!(server.await.unwrap(), 4);
}

#[tokio::test]
async fn a_server_that_closes_kept_connections_is_asked_on_a_fresh_one() {
    let ok = reply("200 OK");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = tokio::spawn(serve(listener, vec![ok.clone(), ok.clone(), ok], None));
    let (tls, slot, request) = (tls::settings().unwrap(), Slot::default(), plain("/", &[]));
    for _ in 0..3 {
        let answer = get(&request, "127.0.0.1", port, &tls, LONG, Some(&slot)).await;
        assert_eq!(answer, Answer::success("hi"));
    }
    assert!(server.await.unwrap().iter().all(|request| !request.contains("onnection: close")));
}

#[tokio::test]
async fn a_server_of_http2_without_tls_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let seen = Arc::new(std::sync::Mutex::new(None));
        let service = hyper::service::service_fn(|request: Request<Incoming>| {
            *seen.lock().unwrap() = Some((request.version(), request.uri().clone()));
            async { Ok::<_, std::convert::Infallible>(Response::new(Empty::<Bytes>::new())) }
        });
        let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service)
            .await;
        seen.lock().unwrap().clone().unwrap()
    });
    let request = Get { http2: true, ..plain("/healthz", &[("Connection", "close"), ("Host", "x")]) };
    let answer = get(&request, "127.0.0.1", port, &tls::settings().unwrap(), LONG, None).await;
    assert_eq!(answer.outcome, Outcome::Success, "{answer:?}");
    let (version, uri) = server.await.unwrap();
    assert_eq!(version, http::Version::HTTP_2);
    assert_eq!(uri.to_string(), format!("http://127.0.0.1:{port}/healthz"));
}
