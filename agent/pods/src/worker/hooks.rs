//! Lifecycle hooks: commands, HTTP requests and pauses around a container's life, with the meaning that the
//! kubelet gives them (pkg/kubelet/lifecycle/handlers.go). A hook may run twice if the agent is killed while
//! it runs.

use std::{fmt, io, time::Duration};

use http_body_util::{BodyExt, Empty};
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::util::intstr::IntOrString};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{self, pki_types::ServerName},
};
use tokio_util::task::AbortOnDropHandle;
use tracing::info;

use beelet_base::redirect::{MAX_REDIRECTS, Place, is_redirect};
use beelet_base::tls;
use beelet_cri::Runtime;
use beelet_units::bounds;

/// What applications see as the client: the kubelet's name, which some let pass without a login.
const USER_AGENT: &str = "kube-lifecycle/1.36";
/// How long a command that is waited for no longer may go on at most: it ends with its container.
const LEFT_ALONE: Duration = Duration::from_secs(60);
/// As much of a failed command's words as an error repeats.
const SAID_MAX: usize = 500;

/// The container a hook is for.
#[derive(Clone, Copy)]
pub(super) struct Subject<'a> {
    /// Its spec.
    pub spec: &'a core::Container,
    /// The runtime's identifier.
    pub id: &'a str,
    /// The pod's address.
    pub pod_ip: Option<&'a str>,
}

/// Runs a hook to its end, for no longer than `within`. A command that takes longer is not stopped: its
/// container has its last seconds yet, and it ends with that, as under the kubelet. Returns what the pod is
/// to be warned of, if anything. An error is a sentence.
pub(super) async fn run(
    runtime: &Runtime,
    handler: &core::LifecycleHandler,
    subject: Subject<'_>,
    within: Option<Duration>,
) -> Result<Option<Downgraded>, String> {
    let work = handle(runtime, handler, subject, within.unwrap_or(Duration::ZERO));
    match within {
        None => work.await,
        Some(within) => timeout(within, work)
            .await
            .unwrap_or_else(|_| Err(format!("it did not end within {} s", within.as_secs_f64()))),
    }
}

async fn handle(
    runtime: &Runtime,
    handler: &core::LifecycleHandler,
    subject: Subject<'_>,
    within: Duration,
) -> Result<Option<Downgraded>, String> {
    if let Some(exec) = &handler.exec {
        let command = exec.command.clone().unwrap_or_default();
        let shown = command.join(" ");
        let (runtime, id) = (runtime.clone(), subject.id.to_owned());
        let most = if within.is_zero() { within } else { within.saturating_add(LEFT_ALONE) };
        // A call that is dropped ends the command.
        let call = tokio::spawn(async move { runtime.exec_sync(&id, command, most).await });
        let output = call.await.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
        return match output.exit_code {
            0 => Ok(None),
            code => Err(format!("the command {shown:?} exited with {code}{}", said(&output.stderr))),
        };
    }
    if let Some(sleep) = &handler.sleep {
        tokio::time::sleep(bounds::seconds(sleep.seconds)).await;
        return Ok(None);
    }
    if let Some(http) = &handler.http_get {
        return get(http, subject).await;
    }
    Err("it says neither exec nor httpGet nor sleep".to_owned())
}

/// `: what it said`, on one line, or nothing.
fn said(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(SAID_MAX).collect();
    if line.is_empty() { line } else { format!(": {line}") }
}

/// A hook that was to be asked by HTTPS answers by HTTP only, and was asked so: the port's address.
#[derive(Debug, PartialEq)]
pub(super) struct Downgraded(String);

impl fmt::Display for Downgraded {
    /// The kubelet's words.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request to HTTPS lifecycle hook {} got HTTP response, retry with HTTP succeeded", self.0)
    }
}

/// The kubelet asks, and takes any answer: only one that can't be asked has failed. Redirects are followed
/// within the host, and one that was to be asked by HTTPS and answers by HTTP is asked again so. No
/// credentials go from HTTPS to HTTP.
async fn get(action: &core::HTTPGetAction, subject: Subject<'_>) -> Result<Option<Downgraded>, String> {
    let host = action.host.as_deref().filter(|host| !host.is_empty()).or(subject.pod_ip);
    let host = host.ok_or("the pod has no address to ask yet")?;
    let port = port(&action.port, subject.spec)?;
    let path = action.path.as_deref().filter(|path| !path.is_empty()).unwrap_or("/");
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    let mut place = Place { tls: is_https(action), port, path, own_host: true };
    let mut downgraded = None;
    for _ in 0..=MAX_REDIRECTS {
        let asked = ask(action, host, &place).await;
        let reply = match asked {
            Err(Broken { speaks_http: true, cause }) if place.tls => {
                info!(
                    host,
                    port = place.port,
                    "a hook's HTTPS request was answered by HTTP, it is made so: {cause}"
                );
                place.tls = false;
                downgraded = Some(Downgraded(place.authority(host)));
                continue;
            }
            Err(Broken { cause, .. }) => return Err(format!("GET {}: {cause}", place.url(host))),
            Ok(reply) => reply,
        };
        let next = reply.map(|location| place.next(host, &location)).transpose();
        match next.map_err(|error| error.to_string())?.flatten() {
            Some(next) => place = next,
            None => return Ok(downgraded),
        }
    }
    Err(format!("GET {}: stopped after {MAX_REDIRECTS} redirects", place.url(host)))
}

/// Why there was no answer.
struct Broken {
    cause: String,
    /// What should have been the beginning of a TLS handshake was not.
    speaks_http: bool,
}

impl<E: fmt::Display> From<E> for Broken {
    fn from(error: E) -> Self {
        Broken { cause: error.to_string(), speaks_http: false }
    }
}

/// Asks, and waits for any answer; where it leads on, if it does.
async fn ask(action: &core::HTTPGetAction, host: &str, place: &Place) -> Result<Option<String>, Broken> {
    let request = request(action, host, place)?;
    let stream = TcpStream::connect((host, place.port)).await?;
    if !place.tls {
        return Ok(exchange(stream, request).await?);
    }
    let name = ServerName::try_from(host.to_owned())?;
    let connector = TlsConnector::from(tls::settings()?);
    let no_tls = |error: &io::Error| {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        matches!(inner, Some(rustls::Error::InvalidMessage(_)))
    };
    let stream = connector
        .connect(name, stream)
        .await
        .map_err(|error| Broken { speaks_http: no_tls(&error), cause: error.to_string() })?;
    Ok(exchange(stream, request).await?)
}

/// Whether the pod wants it asked by HTTPS.
fn is_https(action: &core::HTTPGetAction) -> bool {
    action.scheme.as_deref().is_some_and(|scheme| scheme.eq_ignore_ascii_case("HTTPS"))
}

fn is_named(header: &core::HTTPHeader, name: &str) -> bool {
    header.name.eq_ignore_ascii_case(name)
}

fn request(
    action: &core::HTTPGetAction,
    host: &str,
    place: &Place,
) -> Result<Request<Empty<Bytes>>, http::Error> {
    let mut request = Request::get(&place.path);
    let in_the_clear = is_https(action) && !place.tls;
    let headers = action.http_headers.iter().flatten().filter(|header| {
        (place.own_host || !is_named(header, "Host")) && !(in_the_clear && is_named(header, "Authorization"))
    });
    let given = |name: &str| headers.clone().any(|header| is_named(header, name));
    let authority = place.authority(host);
    for (name, value) in [("Host", authority.as_str()), ("User-Agent", USER_AGENT), ("Connection", "close")] {
        if !given(name) {
            request = request.header(name, value);
        }
    }
    for header in headers {
        request = request.header(&header.name, &header.value);
    }
    request.body(Empty::new())
}

/// Asks, and waits for any answer; the Location of a redirect.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: Request<Empty<Bytes>>,
) -> Result<Option<String>, hyper::Error> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Ends with this function, however it is left.
    let _driver = AbortOnDropHandle::new(tokio::spawn(connection));
    let response = sender.send_request(request).await?;
    let location = response.headers().get(http::header::LOCATION);
    let location = location.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let location = location.filter(|_| is_redirect(response.status().as_u16()));
    // One piece of the body is read so that short answers end cleanly.
    let _ = response.into_body().frame().await;
    Ok(location)
}

/// A port by its number, or by the name that the container gives it.
fn port(port: &IntOrString, container: &core::Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            let named = ports.find(|p| p.name.as_ref() == Some(name)).map(|p| p.container_port);
            named.or_else(|| name.parse().ok())
        }
    };
    let number = number.and_then(|number| u16::try_from(number).ok()).filter(|number| *number > 0);
    number.ok_or_else(|| format!("container {} has no port {port:?}", container.name))
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    fn container() -> core::Container {
        serde_json::from_value(serde_json::json!({
            "name": "main", "ports": [{"name": "web", "containerPort": 8080}]
        }))
        .unwrap()
    }

    #[test]
    fn ports_are_numbers_or_names() {
        let check = |given: IntOrString, expect: Option<u16>| {
            assert_eq!(port(&given, &container()).ok(), expect, "{given:?}");
        };
        check(IntOrString::Int(80), Some(80));
        check(IntOrString::String("web".to_owned()), Some(8080));
        check(IntOrString::String("81".to_owned()), Some(81));
        check(IntOrString::String("db".to_owned()), None);
        check(IntOrString::Int(0), None);
        check(IntOrString::Int(70_000), None);
    }

    /// Answers one request; what it was.
    async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> String {
        let mut request = vec![0; 4096];
        let read = stream.read(&mut request).await.unwrap();
        stream.write_all(b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n").await.unwrap();
        // The client may have heard enough.
        let _ = stream.shutdown().await;
        String::from_utf8_lossy(&request[..read]).into_owned()
    }

    #[tokio::test]
    async fn by_https_any_certificate_will_do_and_http_without_credentials() {
        let acceptor = beelet_testing::tls::acceptor();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            answer(acceptor.accept(stream).await.unwrap()).await
        });
        let action = core::HTTPGetAction {
            port: IntOrString::Int(port.into()),
            scheme: Some("HTTPS".to_owned()),
            http_headers: Some(vec![core::HTTPHeader {
                name: "authorization".to_owned(),
                value: "Bearer secret".to_owned(),
            }]),
            ..Default::default()
        };
        let spec = container();
        let subject = Subject { spec: &spec, id: "c", pod_ip: Some("127.0.0.1") };
        assert_eq!(get(&action, subject).await.unwrap(), None);
        let asked = server.await.unwrap();
        assert!(asked.starts_with("GET / HTTP/1.1\r\n") && asked.contains("secret"), "{asked}");
        // One that speaks no TLS is asked again by HTTP, but gets no credentials in the clear.
        let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = plain.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            answer(plain.accept().await.unwrap().0).await;
            answer(plain.accept().await.unwrap().0).await
        });
        let action = core::HTTPGetAction { port: IntOrString::Int(port.into()), ..action };
        let downgraded = get(&action, subject).await.unwrap().unwrap();
        let asked = server.await.unwrap();
        assert!(asked.starts_with("GET / HTTP/1.1\r\n") && !asked.contains("secret"), "{asked}");
        let said = format!(
            "request to HTTPS lifecycle hook 127.0.0.1:{port} got HTTP response, retry with HTTP succeeded"
        );
        assert_eq!(downgraded.to_string(), said);
        // Nobody listens there any more.
        let error = get(&action, subject).await.unwrap_err();
        assert!(error.starts_with(&format!("GET https://127.0.0.1:{port}/: ")), "{error}");
    }

    #[tokio::test]
    async fn redirects_are_followed_within_the_host() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let mut asked = Vec::new();
            for location in ["/drain/", "http://elsewhere.example/"] {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 4096];
                let read = stream.read(&mut request).await.unwrap();
                let text = String::from_utf8_lossy(&request[..read]).into_owned();
                asked.push(text.lines().next().unwrap_or_default().to_owned());
                let reply = format!("HTTP/1.1 301 M\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n");
                stream.write_all(reply.as_bytes()).await.unwrap();
            }
            asked
        });
        let action = core::HTTPGetAction {
            port: IntOrString::Int(port.into()),
            path: Some("/drain".to_owned()),
            ..Default::default()
        };
        let spec = container();
        get(&action, Subject { spec: &spec, id: "c", pod_ip: Some("127.0.0.1") }).await.unwrap();
        assert_eq!(server.await.unwrap(), ["GET /drain HTTP/1.1", "GET /drain/ HTTP/1.1"]);
    }

    #[tokio::test]
    async fn any_answer_to_a_request_will_do() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move { answer(listener.accept().await.unwrap().0).await });
        let action = core::HTTPGetAction {
            port: IntOrString::Int(port.into()),
            path: Some("stop?now".to_owned()),
            http_headers: Some(vec![core::HTTPHeader { name: "X-A".to_owned(), value: "b".to_owned() }]),
            ..Default::default()
        };
        let spec = container();
        let subject = Subject { spec: &spec, id: "c", pod_ip: Some("127.0.0.1") };
        get(&action, subject).await.unwrap();
        let request = server.await.unwrap();
        assert!(request.starts_with("GET /stop?now HTTP/1.1\r\n"), "{request}");
        assert!(request.contains("x-a: b\r\n") && request.contains("kube-lifecycle/"), "{request}");
        // Nobody listens there any more.
        let error = get(&action, subject).await.unwrap_err();
        assert!(error.starts_with(&format!("GET http://127.0.0.1:{port}/stop?now: ")), "{error}");
        assert!(get(&action, Subject { pod_ip: None, ..subject }).await.is_err());
    }
}
