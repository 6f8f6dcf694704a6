//! The sockets of the runtime, which its services share.

use std::sync::Arc;
use std::time::Duration;

use super::channel::Socket;
use super::metrics::Metrics;

/// The sockets, the deadline of calls and the metrics.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) runtime: Arc<Socket>,
    pub(super) images: Arc<Socket>,
    pub(super) request_timeout: Duration,
    pub(super) metrics: Metrics,
}
