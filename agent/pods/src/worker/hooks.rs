//! Lifecycle hooks: commands, HTTP requests and pauses after the start and before the stop of a container,
//! with the kubelet's semantics (pkg/kubelet/lifecycle/handlers.go). A hook may run twice if the agent is
//! killed while the hook runs.

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

/// User agent of HTTP hooks: the kubelet's, which some applications accept without a login.
const USER_AGENT: &str = "kube-lifecycle/1.36";
/// Extra run time of a command after its hook's timeout. The command ends with its container at the latest.
const LEFT_ALONE: Duration = Duration::from_secs(60);
/// Most characters of a failed command's stderr in an error.
const STDERR_MAX: usize = 500;

/// The container of a hook.
#[derive(Clone, Copy)]
pub(super) struct Subject<'a> {
    /// The container's spec.
    pub spec: &'a core::Container,
    /// The runtime's identifier.
    pub id: &'a str,
    /// The pod's address.
    pub pod_ip: Option<&'a str>,
}

/// Runs a hook for at most `within`. A command that takes longer keeps running until its container ends, as
/// under the kubelet. Returns the downgrade from HTTPS to HTTP, if one was necessary.
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
            .unwrap_or_else(|_| Err(format!("timed out after {:.1} s", within.as_secs_f64()))),
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
        // Dropping the call would end the command.
        let call = tokio::spawn(async move { runtime.containers.exec_sync(&id, command, most).await });
        let output = call.await.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
        return match output.exit_code {
            0 => Ok(None),
            code => Err(format!("command {shown:?} exited with code {code}{}", suffix(&output.stderr))),
        };
    }
    if let Some(sleep) = &handler.sleep {
        tokio::time::sleep(bounds::seconds(sleep.seconds)).await;
        return Ok(None);
    }
    if let Some(http) = &handler.http_get {
        return get(http, subject).await;
    }
    Err("the hook has neither `exec` nor `httpGet` nor `sleep`".to_owned())
}

/// Formats a command's stderr as one line after a colon; empty if the command printed nothing.
fn suffix(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let line: String = words.chars().take(STDERR_MAX).collect();
    if line.is_empty() { line } else { format!(": {line}") }
}

/// Address of an HTTPS hook that answered by HTTP only, and was repeated by HTTP.
#[derive(Debug, PartialEq)]
pub(super) struct Downgraded(String);

impl fmt::Display for Downgraded {
    /// Writes the kubelet's message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request to HTTPS lifecycle hook {} got HTTP response, retry with HTTP succeeded", self.0)
    }
}

/// Sends the hook's request. As under the kubelet, any response is a success, and only a failed request is an
/// error. Redirects are followed within the host. A hook with scheme HTTPS that answers by HTTP is repeated
/// by HTTP, without credentials.
async fn get(action: &core::HTTPGetAction, subject: Subject<'_>) -> Result<Option<Downgraded>, String> {
    let host = action.host.as_deref().filter(|host| !host.is_empty()).or(subject.pod_ip);
    let host = host.ok_or("the pod has no IP address yet")?;
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
                    "HTTPS lifecycle hook answered by HTTP, retrying with HTTP: {cause}"
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

/// Failure of a request.
struct Broken {
    cause: String,
    /// The response was not the beginning of a TLS handshake.
    speaks_http: bool,
}

impl<E: fmt::Display> From<E> for Broken {
    fn from(error: E) -> Self {
        Broken { cause: error.to_string(), speaks_http: false }
    }
}

/// Sends the request and waits for any response. Returns the location of a redirect.
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

/// Returns true if the hook's scheme is HTTPS.
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

/// Sends the request over a stream and waits for any response. Returns the location of a redirect.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: Request<Empty<Bytes>>,
) -> Result<Option<String>, hyper::Error> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with this function on every path.
    let _driver = AbortOnDropHandle::new(tokio::spawn(connection));
    let response = sender.send_request(request).await?;
    let location = response.headers().get(http::header::LOCATION);
    let location = location.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let location = location.filter(|_| is_redirect(response.status().as_u16()));
    // Reading one frame of the body lets short responses end cleanly.
    let _ = response.into_body().frame().await;
    Ok(location)
}

/// Resolves a port by its number, or by its name in the container's spec.
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

    /// Answers one request, and returns the request.
    async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> String {
        let mut request = vec![0; 4096];
        let read = stream.read(&mut request).await.unwrap();
        stream.write_all(b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n").await.unwrap();
        // The client may have closed the connection already.
        let _ = stream.shutdown().await;
        String::from_utf8_lossy(&request[..read]).into_owned()
    }

    #[tokio::test]
    async fn https_accepts_any_certificate_and_falls_back_to_http_without_credentials() {
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
        // A server without TLS gets the request again by HTTP, without credentials.
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
        let expected = format!(
            "request to HTTPS lifecycle hook 127.0.0.1:{port} got HTTP response, retry with HTTP succeeded"
        );
        assert_eq!(downgraded.to_string(), expected);
        // The listener is closed.
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
    async fn any_response_is_a_success() {
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
        // The listener is closed.
        let error = get(&action, subject).await.unwrap_err();
        assert!(error.starts_with(&format!("GET http://127.0.0.1:{port}/stop?now: ")), "{error}");
        assert!(get(&action, Subject { pod_ip: None, ..subject }).await.is_err());
    }
}
