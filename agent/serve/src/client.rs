//! Clients of plugins, which are servers on unix sockets.

use std::{
    io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
    sync::Notify,
};
use tonic::transport::{Channel, Endpoint, Uri};

/// Maximum time for a plugin to accept a connection, as in the kubelet.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A failed connection to a plugin.
#[derive(Debug, thiserror::Error)]
#[error("failed to dial plugin at {}: {why}", .socket.display())]
pub struct DialError {
    /// Socket of the plugin.
    pub socket: PathBuf,
    /// Cause of the failure.
    pub why: String,
}

/// Opens a channel to a unix socket. After a broken connection, the next call dials again.
///
/// # Errors
/// No process answers there.
pub async fn dial(socket: &Path) -> Result<Channel, DialError> {
    dial_linked(socket, &Link::default()).await
}

/// Opens a channel as [`dial`] does; `link` counts its connections.
///
/// # Errors
/// No process answers there.
pub async fn dial_linked(socket: &Path, link: &Link) -> Result<Channel, DialError> {
    let endpoint = endpoint();
    let connecting = endpoint.connect_with_connector(connector(socket, link));
    let dialled = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
    let why = match dialled {
        Ok(Ok(channel)) => return Ok(channel),
        Ok(Err(error)) => cause(&error),
        Err(_) => "timed out".to_owned(),
    };
    Err(DialError { socket: socket.to_owned(), why })
}

/// Returns a channel to a unix socket, which the first call opens; `link` counts its connections.
#[must_use]
pub fn lazy(socket: &Path, link: &Link) -> Channel {
    endpoint().connect_with_connector_lazy(connector(socket, link))
}

/// A socket's path is not a valid authority, and servers in other languages reject it too.
fn endpoint() -> Endpoint {
    Endpoint::from_static("http://localhost").connect_timeout(CONNECT_TIMEOUT)
}

fn connector(
    socket: &Path,
    link: &Link,
) -> impl tower::Service<Uri, Response = TokioIo<Linked>, Error = io::Error, Future: Send> + Send + 'static {
    let (path, link): (PathBuf, Link) = (socket.to_owned(), link.clone());
    tower::service_fn(move |_: Uri| {
        let (path, link) = (path.clone(), link.clone());
        async move {
            let stream = UnixStream::connect(path).await?;
            Ok(TokioIo::new(Linked { stream, _held: link.hold() }))
        }
    })
}

/// Connection state of a channel, with notification of changes. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Link {
    open: Arc<AtomicUsize>,
    changed: Arc<Notify>,
}

impl Link {
    /// Returns a link that notifies `changed`.
    #[must_use]
    pub fn waking(changed: Arc<Notify>) -> Self {
        Self { open: Arc::default(), changed }
    }

    /// Returns true while a connection is open.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }

    fn hold(self) -> Held {
        self.open.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_one();
        Held(self)
    }
}

/// A counted connection.
struct Held(Link);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
        self.0.changed.notify_one();
    }
}

/// A connection that is counted until it is dropped.
struct Linked {
    stream: UnixStream,
    _held: Held,
}

impl AsyncRead for Linked {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Linked {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Returns the innermost cause of an error, the most useful one for a message.
#[must_use]
pub fn cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
