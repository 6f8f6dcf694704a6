//! The sockets of the runtime, which its services share.

use std::sync::Arc;
use std::time::Duration;

use super::channel::Socket;
use super::metrics::Metrics;
use super::ours::Ours;

/// The sockets, the deadline of calls, the metrics, and the objects that are the agent's.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) runtime: Arc<Socket>,
    pub(super) images: Arc<Socket>,
    pub(super) request_timeout: Duration,
    pub(super) metrics: Metrics,
    pub(super) ours: Ours,
}
