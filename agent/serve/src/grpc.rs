//! gRPC on unix sockets that only the agent's own user may use: mode 0600, and the peer must be root or the
//! agent's user.

use futures::future::BoxFuture;
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};
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

/// Maximum concurrent requests per connection to the agent's own socket.
pub(crate) const MAX_STREAMS: u32 = 64;
/// Maximum concurrent requests per connection of a third-party client.
const MAX_STREAMS_OTHERS: u32 = 16;
/// Maximum connections of third-party clients. Further connections wait in the kernel's queue.
const MAX_CONNECTIONS_OTHERS: usize = 256;
/// Maximum connections per process among these. Further connections of the process are closed at once, so
/// that it cannot block other processes.
const MAX_CONNECTIONS_PEER: usize = 64;

/// Send buffer per connection in bytes, so that a list of some hundred pods is written at once. With the
/// kernel's usual 208 KiB the agent and its client had to wait for each other many times.
const SEND_BUFFER: usize = 2 << 20;

/// A bound socket that listens but does not serve yet.
#[derive(Debug)]
pub struct Listener {
    /// The listening socket.
    pub listener: UnixListener,
    /// The socket's file, removed on drop.
    pub socket: Socket,
}

/// Creates the socket at `path` with access for its owner only.
///
/// # Errors
/// Another process serves the socket, `path` is not a socket, or the directory is not writable.
pub async fn bind(path: &Path) -> anyhow::Result<Listener> {
    let (listener, socket) = Socket::bind(path).await?;
    Ok(Listener { listener, socket })
}

/// Serves `services` until `shutdown`, then removes the socket.
///
/// # Errors
/// The server failed; the failure of one connection does not count.
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

/// Serves third-party clients at the kubelet's socket paths: device plugins that register, and monitors that
/// read pod resources. Accepts any `:authority`, because these clients send the socket's path.
///
/// # Errors
/// As for [`serve`].
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

/// A connection's permit among all, and its share of the limit of its process.
type Place = (OwnedSemaphorePermit, Arc<()>);
type Connection = AnyAuthority<UnixStream, Place>;

fn connections_of_others(listener: UnixListener) -> impl Stream<Item = io::Result<Connection>> {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS_OTHERS));
    let peers = HashMap::<i32, Weak<()>>::new();
    stream::unfold((listener, connections, peers), |(listener, connections, mut peers)| async move {
        let permit = Arc::clone(&connections).acquire_owned().await.map_err(io::Error::other);
        let accepted = match permit {
            Ok(permit) => {
                let (stream, own) = accept_of(&listener, &mut peers).await;
                Ok(AnyAuthority::new(stream, (permit, own)))
            }
            Err(error) => Err(error),
        };
        Some((accepted, (listener, connections, peers)))
    })
}

/// Accepts the next connection of a process below its limit.
async fn accept_of(listener: &UnixListener, peers: &mut HashMap<i32, Weak<()>>) -> (UnixStream, Arc<()>) {
    loop {
        let stream = accept(listener).await;
        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid()).unwrap_or(0);
        peers.retain(|_, own| own.strong_count() > 0);
        let own = peers.get(&pid).and_then(Weak::upgrade).unwrap_or_default();
        // The count includes this connection.
        if Arc::strong_count(&own) <= MAX_CONNECTIONS_PEER {
            peers.insert(pid, Arc::downgrade(&own));
            return (stream, own);
        }
        tracing::debug!("process {pid} already has {MAX_CONNECTIONS_PEER} connections: closing another one");
    }
}

/// Accepts the next connection. After an error (usually out of file descriptors) other connections must close
/// before a retry makes sense; tonic would end the server on an error.
async fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Without CAP_NET_ADMIN answers are only slower.
                let _ = set_socket_send_buffer_size_force(&stream, SEND_BUFFER);
                return stream;
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

/// Rejects other users. The socket's mode already does, unless its mode was changed.
#[allow(clippy::result_large_err)] // tonic's own signature of an interceptor
pub fn only_the_owner(request: Request<()>) -> Result<Request<()>, Status> {
    let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
    match peer.map(|peer| peer.uid()) {
        Some(uid) if uid == 0 || uid == geteuid().as_raw() => Ok(request),
        Some(uid) => {
            tracing::warn!("rejected a process of user {uid} on the gRPC socket");
            Err(Status::permission_denied("only root may use this agent; run the command as root"))
        }
        None => Err(Status::permission_denied("the peer's credentials are unknown")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_process_that_opens_many_connections_has_a_part_of_them() {
        let path = std::env::temp_dir().join(format!("beelet-serve-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let (mut peers, mut open) = (HashMap::new(), Vec::new());
        for _ in 0..MAX_CONNECTIONS_PEER {
            let client = UnixStream::connect(&path).await.unwrap();
            open.push((client, accept_of(&listener, &mut peers).await));
        }
        let refused = UnixStream::connect(&path).await.unwrap();
        let waiting = tokio::spawn(async move { accept_of(&listener, &mut peers).await });
        refused.readable().await.unwrap();
        assert_eq!(refused.try_read(&mut [0]).unwrap(), 0, "closed");
        open.pop();
        let next = UnixStream::connect(&path).await.unwrap();
        waiting.await.unwrap();
        drop(next);
        std::fs::remove_file(&path).unwrap();
    }
}
