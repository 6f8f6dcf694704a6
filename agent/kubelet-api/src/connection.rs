//! Connections, closed if the client is too slow, sends too much, is silent for too long, or is a stranger
//! whose place another client needs.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use beelet_base::room::{Limits, Place};

use crate::Bound;
use crate::metrics::Metrics;
use crate::tls::Keyring;

/// Connection limits. Strangers are in the handshake, in the first request, or rejected.
pub(crate) const ROOM: Limits = Limits { known: 1024, strangers: 256 };
/// Time limits for the handshake, and for the head of a request including the wait for it.
const HANDSHAKE: Duration = Duration::from_secs(10);
const HEAD: Duration = Duration::from_secs(30);
/// Maximum bytes of a request's head.
const HEAD_MAX: usize = 128 << 10;
/// Time limit for an answer other than a stream or a log.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// A connection without traffic for this time is closed, unless it waits for a container.
const SILENCE: Duration = Duration::from_secs(120);
/// TCP keep-alive: idle time, interval and number of probes.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(15), 9);
/// Time for connections to finish when the server shuts down.
const FAREWELL: Duration = Duration::from_secs(1);

/// The client's side of a connection.
pub(crate) struct Peer {
    /// Presented certificates, the client's own first. Not verified yet.
    pub(crate) certificates: Vec<CertificateDer<'static>>,
    pub(crate) address: SocketAddr,
    pub(crate) keyring: Arc<Keyring>,
    pub(crate) place: Arc<Place>,
    patient: AtomicBool,
    /// Notified whenever all pending bytes have been written.
    written: Arc<Notify>,
}

impl Peer {
    /// Allows silence from now on, because the connection waits for a container.
    pub(crate) fn allow_silence(&self) {
        self.patient.store(true, Ordering::Relaxed);
    }

    /// Waits until all bytes of an answer so far have been written, for bodies, which are polled on the
    /// connection's own task. Later bytes start a new TLS record.
    pub(crate) async fn has_written(&self) {
        self.written.notified().await;
    }
}

pub(crate) async fn serve(server: Bound, shutdown: CancellationToken) {
    let Bound { port, keyring, router, metrics } = server;
    let tasks = TaskTracker::new();
    loop {
        let (stream, address, place) = tokio::select! {
            accepted = port.accept("the kubelet's API") => accepted,
            () = shutdown.cancelled() => break,
        };
        let (keyring, router, metrics) = (Arc::clone(&keyring), router.clone(), metrics.clone());
        let (shutdown, place) = (shutdown.clone(), Arc::new(place));
        tasks.spawn(async move {
            let connection = answer(stream, address, keyring, router, &metrics, &place);
            tokio::select! {
                biased;
                // The request that has already arrived is served, even if another connection has taken the
                // place.
                () = connection => {}
                () = place.taken() => { metrics.failed_connections.inc(); }
                () = async { shutdown.cancelled().await; sleep(FAREWELL).await } => {}
            }
        });
    }
    tasks.close();
    let _ = timeout(FAREWELL * 2, tasks.wait()).await;
}

async fn answer(
    stream: TcpStream,
    address: SocketAddr,
    keyring: Arc<Keyring>,
    router: Router,
    metrics: &Metrics,
    place: &Arc<Place>,
) {
    // A typed key must not wait for the next one, and an unreachable client must not hold resources.
    let _ = stream.set_nodelay(true);
    let (idle, interval, retries) = KEEPALIVE;
    let keepalive = TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(retries);
    let _ = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
    let Some(server) = keyring.newest().await.server else {
        metrics.failed_connections.inc();
        return tracing::debug!(
            "the kubelet's API: no TLS with {address}: the certificate has not been signed yet"
        );
    };
    let acceptor = TlsAcceptor::from(server);
    let tls = match timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(tls)) => tls,
        Ok(Err(error)) => {
            metrics.failed_connections.inc();
            return tracing::debug!("the kubelet's API: no TLS with {address}: {error}");
        }
        Err(_) => {
            metrics.failed_connections.inc();
            return tracing::debug!("the kubelet's API: {address} is too slow for TLS");
        }
    };
    let certificates = tls.get_ref().1.peer_certificates().unwrap_or_default();
    let certificates = certificates.iter().map(|one| one.clone().into_owned()).collect();
    let (moved, written) = (Arc::new(AtomicU64::new(0)), Arc::new(Notify::new()));
    let io = TokioIo::new(Watched { io: tls, moved: Arc::clone(&moved), written: Arc::clone(&written) });
    let (place, patient) = (Arc::clone(place), AtomicBool::new(false));
    let peer = Arc::new(Peer { certificates, address, keyring, place, patient, written });
    let router = router.layer(Extension(Arc::clone(&peer)));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_MAX)
        .serve_connection(io, TowerToHyperService::new(router))
        .with_upgrades();
    tokio::select! {
        served = connection => if let Err(error) = served {
            metrics.failed_connections.inc();
            tracing::debug!("the kubelet's API: the connection of {address} failed: {error}");
        },
        () = silence(&moved, &peer) => {
            metrics.failed_connections.inc();
            tracing::debug!("the kubelet's API: {address} was silent for too long");
        }
    }
}

/// Returns after [`SILENCE`] without traffic.
async fn silence(moved: &AtomicU64, peer: &Peer) {
    let mut before = moved.load(Ordering::Relaxed);
    loop {
        sleep(SILENCE).await;
        let now = moved.load(Ordering::Relaxed);
        if now == before && !peer.patient.load(Ordering::Relaxed) {
            return;
        }
        before = now;
    }
}

/// Counts transferred bytes and notifies when all bytes have been written.
struct Watched<T> {
    io: T,
    moved: Arc<AtomicU64>,
    written: Arc<Notify>,
}

impl<T: AsyncRead + Unpin> AsyncRead for Watched<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buffer);
        self.moved.fetch_add((buffer.filled().len() - before) as u64, Ordering::Relaxed);
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Watched<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        if let Poll::Ready(Ok(count)) = &written {
            self.moved.fetch_add(*count as u64, Ordering::Relaxed);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        if flushed.is_ready() {
            self.written.notify_waiters();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
