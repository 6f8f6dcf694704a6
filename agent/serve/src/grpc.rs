//! A gRPC socket that only the agent's own user may use.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use futures::stream;
use rustix::process::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tonic::service::{InterceptorLayer, Routes};
use tonic::transport::Server;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

use crate::socket::Socket;

/// The socket, listening, but not answering yet.
#[derive(Debug)]
pub struct Listener {
    /// What accepts.
    pub listener: UnixListener,
    /// The socket's file, removed when this is dropped.
    pub socket: Socket,
}

/// Makes the socket at `path`, reachable by its owner only.
///
/// # Errors
/// Another process serves it, something else is at `path`, or the folder cannot be written.
pub async fn bind(path: &Path) -> anyhow::Result<Listener> {
    let (listener, socket) = Socket::bind(path).await?;
    Ok(Listener { listener, socket })
}

/// Serves all of `services` until `shutdown`, then removes the socket.
///
/// # Errors
/// The server fails as a whole; a failed connection is only its own.
pub async fn serve(listener: Listener, services: Routes, shutdown: CancellationToken) -> anyhow::Result<()> {
    let incoming = stream::unfold(listener.listener, |listener| async move {
        let accepted = accept(&listener).await;
        Some((std::io::Result::Ok(accepted), listener))
    });
    let served = Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .layer(InterceptorLayer::new(only_the_owner))
        .add_routes(services)
        .serve_with_incoming_shutdown(incoming, shutdown.cancelled_owned())
        .await;
    drop(listener.socket);
    served.context("the gRPC server failed")
}

/// The next connection. Where none can be accepted (out of file descriptors, mostly) others must end before another try makes
/// sense; tonic would take the error for the end of the server.
pub(crate) async fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!("a connection can't be accepted: {error}");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

/// The socket's mode keeps others out already; this also holds where somebody changed it.
#[allow(clippy::result_large_err)] // tonic's own signature of an interceptor
pub fn only_the_owner(request: Request<()>) -> Result<Request<()>, Status> {
    let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
    match peer.map(|peer| peer.uid()) {
        Some(uid) if uid == 0 || uid == geteuid().as_raw() => Ok(request),
        Some(uid) => {
            tracing::warn!("a process of user {uid} was refused on the gRPC socket");
            Err(Status::permission_denied("only root may ask this agent; run the command as root"))
        }
        None => Err(Status::permission_denied("the peer's credentials are unknown")),
    }
}

/// Requests at a time on one connection.
pub const MAX_STREAMS: u32 = 64;
