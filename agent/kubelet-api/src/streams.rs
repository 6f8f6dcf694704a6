//! Commands, attachments and ports: the runtime's streaming server provides a stream, and after the upgrade
//! bytes are copied unchanged. SPDY and WebSocket are opaque here.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use beelet_base::clock::After as _;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use beelet_proto::cri;

use crate::App;
use crate::containers::{Failure, Target, ended, has_terminal};
use crate::logs::Pairs;

/// Maximum concurrent streams; further requests are rejected.
pub(crate) const STREAMS: usize = 512;
/// Maximum time for the runtime's streaming server to accept and to answer.
const CONNECT: Duration = Duration::from_secs(30);
/// Maximum bytes of the runtime's error.
const REFUSAL_MAX: usize = 64 << 10;
/// Bytes per copy.
const CHUNK: usize = 32 << 10;
/// Time for a stream to finish after its container or one of its sides has ended, because an exit code may be
/// in flight.
const LINGER: Duration = Duration::from_secs(10);

/// Parts of a path with their names.
pub(crate) type Parts = Path<Vec<(String, String)>>;

/// Returns the target of a path: `{namespace}/{pod}[/{uid}][/{container}]`.
pub(crate) fn target(Path(parts): Parts) -> Target {
    let mut target = Target::default();
    for (name, value) in parts {
        match name.as_str() {
            "namespace" => target.namespace = value,
            "pod" => target.pod = value,
            "uid" => target.uid = Some(value),
            _ => target.container = value,
        }
    }
    target
}

/// Requested streams of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    tty: bool,
    stdin: bool,
    stdout: bool,
    stderr: bool,
}

impl Wanted {
    /// Parses a query, as NewOptions in k8s.io/kubelet/pkg/cri/streaming/remotecommand does.
    fn read(pairs: &[(String, String)]) -> Result<Self, Failure> {
        let flag = |name: &str| pairs.iter().any(|(key, value)| key == name && value == "1");
        let (tty, stdin, stdout) = (flag("tty"), flag("input"), flag("output"));
        // A terminal has a single output.
        let stderr = flag("error") && !tty;
        if !stdin && !stdout && !stderr {
            let sentence = "you must specify at least 1 of stdin, stdout, stderr";
            return Err(Failure::new(StatusCode::BAD_REQUEST, sentence));
        }
        Ok(Self { tty, stdin, stdout, stderr })
    }
}

fn values(pairs: &[(String, String)], name: &str) -> Vec<String> {
    pairs.iter().filter(|(key, _)| key == name).map(|(_, value)| value.clone()).collect()
}

pub(crate) async fn exec(
    State(app): State<App>,
    path: Parts,
    Query(pairs): Query<Pairs>,
    request: Request,
) -> Result<Response, Failure> {
    let upgrade = Upgrade::of(&app, request)?;
    let wanted = Wanted::read(&pairs)?;
    let target = target(path);
    let (name, entry) = target.find(&app.table.borrow())?;
    let id = target.running(&entry.pod)?.to_owned();
    let Wanted { tty, stdin, stdout, stderr } = wanted;
    let cmd = values(&pairs, "command");
    let url = app
        .runtime
        .streams
        .exec(cri::ExecRequest { container_id: id.clone(), cmd, tty, stdin, stdout, stderr })
        .await?;
    let end = ended(app.table.clone(), name, entry.pod.metadata.uid.clone(), Some(id));
    upgrade.pass(&app, &url, end).await
}

pub(crate) async fn attach(
    State(app): State<App>,
    path: Parts,
    Query(pairs): Query<Pairs>,
    request: Request,
) -> Result<Response, Failure> {
    let upgrade = Upgrade::of(&app, request)?;
    let Wanted { stdin, stdout, stderr, .. } = Wanted::read(&pairs)?;
    let target = target(path);
    let (name, entry) = target.find(&app.table.borrow())?;
    let id = target.running(&entry.pod)?.to_owned();
    // The container's creation decided whether it has a terminal.
    let tty = has_terminal(&entry.pod, &target.container);
    let request = cri::AttachRequest { container_id: id.clone(), stdin, tty, stdout, stderr: stderr && !tty };
    let url = app.runtime.streams.attach(request).await?;
    let end = ended(app.table.clone(), name, entry.pod.metadata.uid.clone(), Some(id));
    upgrade.pass(&app, &url, end).await
}

pub(crate) async fn port_forward(
    State(app): State<App>,
    path: Parts,
    Query(pairs): Query<Pairs>,
    request: Request,
) -> Result<Response, Failure> {
    let upgrade = Upgrade::of(&app, request)?;
    // With SPDY each stream names its port.
    let ports = if upgrade.is_websocket() { ports(&values(&pairs, "port"))? } else { Vec::new() };
    let target = target(path);
    let (name, entry) = target.find(&app.table.borrow())?;
    let uid = entry.pod.metadata.uid.clone();
    let ready = cri::PodSandboxState::SandboxReady as i32;
    let sandboxes = app.runtime.sandboxes.of_pod(uid.as_deref().unwrap_or_default()).await?;
    let newest = sandboxes.into_iter().filter(|one| one.state == ready).max_by_key(|one| one.created_at);
    let Some(sandbox) = newest else {
        let sentence = format!("failed to find sandbox for pod {name}: the pod is not running");
        return Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, sentence));
    };
    let url = app.runtime.streams.port_forward(&sandbox.id, ports).await?;
    upgrade.pass(&app, &url, ended(app.table.clone(), name, uid, None)).await
}

/// Parses ports, as NewV4Options in k8s.io/kubelet/pkg/cri/streaming/portforward does.
fn ports(values: &[String]) -> Result<Vec<i32>, Failure> {
    let wrong = |sentence: String| Failure::new(StatusCode::BAD_REQUEST, sentence);
    let texts: Vec<&str> = values.iter().flat_map(|value| value.split(',')).collect();
    if texts.is_empty() {
        return Err(wrong("query parameter \"port\" is required".to_owned()));
    }
    let port = |text: &&str| match text.parse::<u16>() {
        Ok(port @ 1..) => Ok(i32::from(port)),
        _ => Err(wrong(format!("port {text:?} must be 1 to 65535"))),
    };
    texts.iter().map(port).collect()
}

/// An accepted request for a stream.
struct Upgrade {
    method: http::Method,
    headers: HeaderMap,
    client: OnUpgrade,
    room: OwnedSemaphorePermit,
}

impl Upgrade {
    fn of(app: &App, mut request: Request) -> Result<Self, Failure> {
        let asks = request.headers().get_all(header::CONNECTION).iter();
        let asks = asks.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
        let asks = asks.into_iter().any(|word| word.trim().eq_ignore_ascii_case("upgrade"));
        let Some(client) = request.extensions_mut().remove::<OnUpgrade>().filter(|_| asks) else {
            return Err(Failure::new(StatusCode::BAD_REQUEST, "Upgrade request required"));
        };
        let full = |_| {
            let sentence =
                format!("the limit of {STREAMS} streams is reached: close some, or try again later");
            Failure::new(StatusCode::SERVICE_UNAVAILABLE, sentence)
        };
        let room = Arc::clone(&app.streams).try_acquire_owned().map_err(full)?;
        Ok(Self { method: request.method().clone(), headers: request.headers().clone(), client, room })
    }

    fn is_websocket(&self) -> bool {
        self.headers
            .get(header::UPGRADE)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
    }

    /// Forwards the request to the runtime's streaming server and, after its agreement, copies bytes both
    /// ways until one side, or `end`, has ended.
    async fn pass(
        self,
        app: &App,
        url: &str,
        end: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Response, Failure> {
        let Self { method, headers, client, room } = self;
        let trouble = |cause: String| {
            Failure::new(
                StatusCode::BAD_GATEWAY,
                format!("the container runtime's streaming server: {cause}"),
            )
        };
        let asked = timeout(CONNECT, ask(url, method, &headers)).await;
        let late = |_| Err(format!("no answer within {} s", CONNECT.as_secs()));
        let mut answer = asked.unwrap_or_else(late).map_err(trouble)?;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            let status = answer.status();
            let said = timeout(CONNECT, Limited::new(answer.into_body(), REFUSAL_MAX).collect()).await;
            let said = said.ok().and_then(Result::ok).map(http_body_util::Collected::to_bytes);
            let said = said.unwrap_or_default();
            return Ok((status, Body::from(said)).into_response());
        }
        let runtime = hyper::upgrade::on(&mut answer);
        let (idle, shutdown) = (app.config.stream_idle_timeout, app.shutdown.clone());
        app.tasks.spawn(async move {
            let _room = room;
            let stream = async {
                match tokio::try_join!(client, runtime) {
                    Ok((client, runtime)) => copy(client, runtime, idle).await,
                    Err(error) => tracing::debug!("a stream's upgrade failed: {error}"),
                }
            };
            tokio::select! {
                () = stream => {}
                () = async { end.await; sleep(LINGER).await } => {}
                () = shutdown.cancelled() => {}
            }
        });
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        *response.headers_mut() = answer.headers().clone();
        Ok(response)
    }
}

/// Sends the head of the request to the runtime's URL.
async fn ask(
    url: &str,
    method: http::Method,
    headers: &HeaderMap,
) -> Result<http::Response<hyper::body::Incoming>, String> {
    let rest =
        url.strip_prefix("http://").ok_or_else(|| format!("is at {url}, and only http:// is supported"))?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let socket = TcpStream::connect(host).await.map_err(|error| format!("{host}: {error}"))?;
    let _ = socket.set_nodelay(true);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket))
        .await
        .map_err(|error| error.to_string())?;
    // The connection ends with the upgrade or with the answer.
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!("the container runtime's streaming server: {error}");
        }
    });
    let mut request = http::Request::builder()
        .method(method)
        .uri(format!("/{path}"))
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    *request.headers_mut() = headers.clone();
    // The runtime must not receive the client's credentials or the headers of its body.
    for name in [header::AUTHORIZATION, header::COOKIE, header::CONTENT_LENGTH, header::TRANSFER_ENCODING] {
        request.headers_mut().remove(name);
    }
    let host = host.parse().map_err(|_| format!("{host:?} is not a host"))?;
    request.headers_mut().insert(header::HOST, host);
    sender.send_request(request).await.map_err(|error| error.to_string())
}

/// Copies both ways until both sides have ended, one has failed, or no bytes have moved for `idle`.
async fn copy(client: Upgraded, runtime: Upgraded, idle: Duration) {
    let (from_client, to_client) = tokio::io::split(TokioIo::new(client));
    let (from_runtime, to_runtime) = tokio::io::split(TokioIo::new(runtime));
    copy_streams((from_client, to_client), (from_runtime, to_runtime), idle).await;
}

async fn copy_streams<C: AsyncRead + AsyncWrite, R: AsyncRead + AsyncWrite>(
    client: (ReadHalf<C>, WriteHalf<C>),
    runtime: (ReadHalf<R>, WriteHalf<R>),
    idle: Duration,
) {
    let began = Instant::now();
    let moved = AtomicU64::new(0);
    let upwards = one_way(client.0, runtime.1, began, &moved);
    let downwards = one_way(runtime.0, client.1, began, &moved);
    let silent = async {
        loop {
            let last = began.after(Duration::from_millis(moved.load(Ordering::Relaxed)));
            if last.elapsed() >= idle {
                return tracing::debug!("closing a stream after {} s without traffic", idle.as_secs());
            }
            sleep_until(last.after(idle)).await;
        }
    };
    let both = async {
        tokio::pin!(upwards, downwards);
        // A client that has finished sending may still read. The runtime's end finishes the session.
        let done = tokio::select! {
            sent = &mut upwards => match sent {
                Ok(()) => downwards.await,
                Err(error) => Err(error),
            },
            received = &mut downwards => match received {
                Ok(()) => timeout(LINGER, upwards).await.unwrap_or(Ok(())),
                Err(error) => Err(error),
            },
        };
        if let Err(error) = done {
            tracing::debug!("a stream failed: {error}");
        }
    };
    tokio::select! {
        () = both => {}
        () = silent => {}
    }
}

async fn one_way<C: AsyncRead, R: AsyncWrite>(
    mut from: ReadHalf<C>,
    mut to: WriteHalf<R>,
    began: Instant,
    moved: &AtomicU64,
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    loop {
        let count = match from.read(&mut chunk).await {
            Ok(count) => count,
            // TLS without a close notification is an end, too.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            Err(error) => return Err(error),
        };
        if count == 0 {
            return to.shutdown().await;
        }
        to.write_all(&chunk[..count]).await?;
        to.flush().await?;
        let now = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        moved.store(now, Ordering::Relaxed);
    }
}

/// Returns the permits for streams.
pub(crate) fn room() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(STREAMS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(all: &[(&str, &str)]) -> Pairs {
        all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_terminal_has_one_output_and_somebody_must_listen_or_speak() {
        let read = |all: &[(&str, &str)]| Wanted::read(&pairs(all)).ok();
        let none = Wanted { tty: false, stdin: false, stdout: false, stderr: false };
        assert_eq!(
            read(&[("output", "1"), ("error", "1")]),
            Some(Wanted { stdout: true, stderr: true, ..none })
        );
        let all = [("output", "1"), ("error", "1"), ("tty", "1"), ("input", "1")];
        assert_eq!(read(&all), Some(Wanted { tty: true, stdin: true, stdout: true, stderr: false }));
        assert_eq!(read(&[("output", "true")]), None);
        assert_eq!(read(&[("tty", "1"), ("error", "1")]), None);
    }

    #[test]
    fn ports_are_numbers_of_ports() {
        let check = |values: &[&str], expected: Option<&[i32]>| {
            let values: Vec<String> = values.iter().map(ToString::to_string).collect();
            assert_eq!(ports(&values).ok().as_deref(), expected, "{values:?}");
        };
        check(&["80"], Some(&[80]));
        check(&["80,443", "53"], Some(&[80, 443, 53]));
        check(&[], None);
        check(&["0"], None);
        check(&["65536"], None);
        check(&["http"], None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_half_that_has_ended_is_told_and_a_silent_stream_ends() {
        let (client, client_end) = tokio::io::duplex(64);
        let (runtime, runtime_end) = tokio::io::duplex(64);
        let idle = Duration::from_secs(60);
        let copying = tokio::spawn(async move {
            copy_streams(tokio::io::split(client_end), tokio::io::split(runtime_end), idle).await;
        });
        let (mut client_reads, mut client_writes) = tokio::io::split(client);
        let (mut runtime_reads, mut runtime_writes) = tokio::io::split(runtime);
        client_writes.write_all(b"in").await.unwrap();
        client_writes.shutdown().await.unwrap();
        let mut text = String::new();
        runtime_reads.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "in");
        // The client has finished sending and still reads.
        runtime_writes.write_all(b"out").await.unwrap();
        let mut three = [0; 3];
        client_reads.read_exact(&mut three).await.unwrap();
        assert_eq!(&three, b"out");
        // Both sides are silent, and neither closes the stream.
        copying.await.unwrap();
        assert_eq!(client_reads.read(&mut three).await.unwrap(), 0);
    }
}
