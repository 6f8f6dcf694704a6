//! Clients of other people's servers on unix sockets: plugins.

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

/// Time that a plugin gets to take a connection: the kubelet's.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// No connection to a plugin.
#[derive(Debug, thiserror::Error)]
#[error("failed to dial plugin at {}: {why}", .socket.display())]
pub struct DialError {
    /// Its socket.
    pub socket: PathBuf,
    /// Why.
    pub why: String,
}

/// A channel to a unix socket. It dials again at the next call after the connection broke.
///
/// # Errors
/// Nobody answers there.
pub async fn dial(socket: &Path) -> Result<Channel, DialError> {
    dial_linked(socket, &Link::default()).await
}

/// A channel as of [`dial`], whose connections `link` counts.
///
/// # Errors
/// Nobody answers there.
pub async fn dial_linked(socket: &Path, link: &Link) -> Result<Channel, DialError> {
    let (path, link): (PathBuf, Link) = (socket.to_owned(), link.clone());
    let connector = tower::service_fn(move |_: Uri| {
        let (path, link) = (path.clone(), link.clone());
        async move {
            let stream = UnixStream::connect(path).await?;
            Ok::<_, io::Error>(TokioIo::new(Linked { stream, _held: link.hold() }))
        }
    });
    // A socket's path is no authority: servers in other languages refuse it too.
    let endpoint = Endpoint::from_static("http://localhost").connect_timeout(CONNECT_TIMEOUT);
    let dialled = tokio::time::timeout(CONNECT_TIMEOUT, endpoint.connect_with_connector(connector)).await;
    let why = match dialled {
        Ok(Ok(channel)) => return Ok(channel),
        Ok(Err(error)) => cause(&error),
        Err(_) => "it didn't answer in time".to_owned(),
    };
    Err(DialError { socket: socket.to_owned(), why })
}

/// Says whether a channel is connected, and when that changes. Clones are of the same.
#[derive(Clone, Debug, Default)]
pub struct Link {
    open: Arc<AtomicUsize>,
    changed: Arc<Notify>,
}

impl Link {
    /// One that wakes whoever waits for `changed`.
    #[must_use]
    pub fn waking(changed: Arc<Notify>) -> Self {
        Self { open: Arc::default(), changed }
    }

    /// Returns true while the other side has a connection open.
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

/// One connection, counted.
struct Held(Link);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
        self.0.changed.notify_one();
    }
}

/// A connection that is counted while it lasts.
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

/// The last cause, which is what a person wants to know.
#[must_use]
pub fn cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
