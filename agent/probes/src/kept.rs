//! Connections that a server keeps open between two checks of an httpGet or grpc probe.
//!
//! A kept connection can only save a handshake, not change a verdict to a failure: every check that does not
//! succeed on it is repeated on a fresh one, with the probe's whole timeout, and only that result counts.
//! After [`MOST`] checks the connection is closed, so a server that no longer accepts connections fails the
//! probe after at most as many checks.

use std::{net::SocketAddr, sync::Arc};

use beelet_proto::health::health_client::HealthClient;
use http_body_util::Empty;
use hyper::{body::Bytes, client::conn::http1::SendRequest};
use tokio::sync::Mutex;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;

/// Maximum number of checks on one connection.
const MOST: u32 = 10;

/// An open connection.
#[derive(Debug)]
pub(super) enum Connection {
    /// HTTP/1.1, with the task that drives it.
    Http(SendRequest<Empty<Bytes>>, AbortOnDropHandle<()>),
    /// gRPC.
    Grpc(HealthClient<Channel>),
}

#[derive(Debug)]
struct Open {
    connection: Connection,
    address: SocketAddr,
    checks: u32,
}

/// The kept connection of one probe, if any. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot {
    open: Arc<Mutex<Option<Open>>>,
}

/// Permission to keep a connection again.
#[derive(Debug)]
pub(super) struct Turn {
    address: SocketAddr,
    checks: u32,
}

impl Slot {
    /// Takes the connection to `address` out, if it may serve another check.
    pub(super) async fn claim(&self, address: SocketAddr) -> Option<(Connection, Turn)> {
        let Open { connection, address: to, checks } = self.open.lock().await.take()?;
        let may = to == address && checks < MOST;
        may.then_some((connection, Turn { address, checks }))
    }

    /// Keeps the connection of a check that succeeded.
    pub(super) async fn keep(&self, connection: Connection, turn: Turn) {
        let checks = turn.checks.saturating_add(1);
        *self.open.lock().await = Some(Open { connection, address: turn.address, checks });
    }
}

impl Turn {
    /// Permission for a fresh connection.
    pub(super) const fn first(address: SocketAddr) -> Self {
        Self { address, checks: 0 }
    }
}
