//! gRPC on unix sockets that only the agent's own user may use: mode 0600, and the peer must be root or that
//! user.

use futures::future::BoxFuture;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::stream::{self, Stream};
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tonic::service::{InterceptorLayer, Routes};
use tonic::transport::Server;
use tonic::transport::server::{Connected, UdsConnectInfo};
use tonic::{Request, Status};

use crate::authority::AnyAuthority;
use crate::socket::Socket;

/// Requests at a time on one connection to our own socket.
pub(crate) const MAX_STREAMS: u32 = 64;
/// Requests at a time on one connection of other people's clients.
const MAX_STREAMS_OTHERS: u32 = 16;
/// Connections of other people's clients at a time. One more waits in the kernel's queue until another has
/// ended.
const MAX_CONNECTIONS_OTHERS: usize = 256;

/// What may wait in a connection for its client, in bytes: a list of some hundred pods is written at once.
/// With the kernel's usual 208 KiB the agent and its client had to wait for each other's turn many times.
const SEND_BUFFER: usize = 2 << 20;

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
pub fn serve(
    listener: Listener,
    services: Routes,
    shutdown: CancellationToken,
) -> BoxFuture<'static, anyhow::Result<()>> {
    Box::pin(async move {
        let Listener { listener, socket } = listener;
        serve_all(connections(listener), MAX_STREAMS, services, socket, shutdown).await
    })
}

/// The same for other people's clients, at sockets that are where the kubelet has them: device plugins that
/// register, and monitors that ask for pod resources. Any bytes are taken for an `:authority`: such clients
/// send the socket's path.
///
/// # Errors
/// As [`serve`].
pub fn serve_others(
    listener: Listener,
    services: Routes,
    shutdown: CancellationToken,
) -> BoxFuture<'static, anyhow::Result<()>> {
    Box::pin(async move {
        let Listener { listener, socket } = listener;
        serve_all(connections_of_others(listener), MAX_STREAMS_OTHERS, services, socket, shutdown).await
    })
}

async fn serve_all<C>(
    incoming: impl Stream<Item = io::Result<C>>,
    streams: u32,
    services: Routes,
    socket: Socket,
    shutdown: CancellationToken,
) -> anyhow::Result<()>
where
    C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let served = Server::builder()
        .max_concurrent_streams(streams)
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .layer(InterceptorLayer::new(only_the_owner))
        .add_routes(services)
        .serve_with_incoming_shutdown(incoming, shutdown.cancelled_owned())
        .await;
    drop(socket);
    served.context("the gRPC server failed")
}

fn connections(listener: UnixListener) -> impl Stream<Item = io::Result<UnixStream>> {
    stream::unfold(listener, |listener| async move {
        let accepted = accept(&listener).await;
        Some((Ok(accepted), listener))
    })
}

type Connection = AnyAuthority<UnixStream, OwnedSemaphorePermit>;

fn connections_of_others(listener: UnixListener) -> impl Stream<Item = io::Result<Connection>> {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS_OTHERS));
    stream::unfold((listener, connections), |(listener, connections)| async move {
        let permit = Arc::clone(&connections).acquire_owned().await.map_err(io::Error::other);
        let accepted = match permit {
            Ok(permit) => Ok(AnyAuthority::new(accept(&listener).await, permit)),
            Err(error) => Err(error),
        };
        Some((accepted, (listener, connections)))
    })
}

/// The next connection. Where none can be accepted (out of file descriptors, mostly) others must end before
/// another try makes sense; tonic would take the error for the end of the server.
async fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Without it (no CAP_NET_ADMIN) answers are only slower.
                let _ = set_socket_send_buffer_size_force(&stream, SEND_BUFFER);
                return stream;
            }
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
