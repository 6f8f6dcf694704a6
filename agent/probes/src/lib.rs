//! Probes: when to look at a container, how, and what changed. `policy::probe` says what an answer means for
//! the container's state; this crate keeps the timetable, looks, and sends what changed to the pods' manager.
//! It never restarts anything itself.
//!
//! One task, on a thread of its own, owns all probes. A timetable holds when each looks next. A probe that
//! waits for an answer (HTTP, gRPC, a command, a connection) runs beside it, bounded; what the kernel knows
//! is read on the spot, for all that are due together. A listener that comes or goes reaches the task as an
//! edge, between two looks.

mod alarm;
mod answer;
mod ask;
mod canary;
mod exec;
mod grpc;
mod handle;
mod hot;
pub mod http;
mod ids;
mod listening;
mod manager;
mod metrics;
mod stragglers;
mod target;
mod tcp;
mod timetable;
mod view;
mod worker;
mod workers;

use std::time::Duration;

use beelet_policy::probe::{EdgePolicy, listener::QueueRule};

pub use handle::{AskError, Commands, Explained, Handle, LookView, ProbeView, ToleratedView, Wanted, handle};
pub use manager::{Parts, Probes};
pub use metrics::Metrics;

/// How probes behave on this node, unless a pod's annotations say otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whether tcpSocket probes are answered by the kernel where it can.
    pub tcp_by_kernel: bool,
    /// What a listener's coming and going does to readiness.
    pub edge_policy: EdgePolicy,
    /// How often a liveness probe in kernel mode sends a connection; zero: never.
    pub canary: Duration,
    /// The state of the accept queues that fails liveness and startup probes in kernel mode.
    pub queue_rule: QueueRule,
}
