//! gRPC for other people's clients, on unix sockets that are where the kubelet has them: device plugins that register,
//! monitors that ask for pod resources. Every `:authority` is taken; otherwise the same rules as on our own socket: mode
//! 0600, and the peer must be root or the agent's own user.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::stream;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tonic::service::{InterceptorLayer, Routes};
use tonic::transport::Server;

use super::authority::AnyAuthority;
use super::grpc::{self, Listener, only_the_owner};

/// Connections at a time. One more waits in the kernel's queue until another has ended.
const MAX_CONNECTIONS: usize = 256;
/// Requests at a time on one connection.
const MAX_STREAMS: u32 = 16;

type Connection = AnyAuthority<UnixStream, OwnedSemaphorePermit>;

/// Serves all of `services` until `shutdown`, then removes the socket.
///
/// # Errors
/// The server fails as a whole; a failed connection is only its own.
pub async fn serve(listener: Listener, services: Routes, shutdown: CancellationToken) -> anyhow::Result<()> {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let incoming = stream::unfold((listener.listener, connections), |(listener, connections)| async move {
        let accepted = accept(&listener, &connections).await;
        Some((accepted, (listener, connections)))
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

async fn accept(listener: &UnixListener, connections: &Arc<Semaphore>) -> std::io::Result<Connection> {
    let permit = Arc::clone(connections).acquire_owned().await.map_err(std::io::Error::other)?;
    Ok(AnyAuthority::new(grpc::accept(listener).await, permit))
}
