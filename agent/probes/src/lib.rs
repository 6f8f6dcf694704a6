//! Probes: runs the checks of containers and publishes changed results. `policy::probe` decides how an answer
//! changes the container's state; this crate keeps the timetable, runs the checks, and sends changes to the
//! pods' manager. Must never restart a container itself.
//!
//! A single task, on a thread of its own, owns all probes. A timetable has the time of each probe's next
//! check. Probes that wait for an answer (HTTP, gRPC, a command, a connection) run concurrently, in limited
//! numbers; answers of the kernel are read at once, for all due probes together. The opening or closing of a
//! listener reaches the task as an edge, between two checks.

mod alarm;
mod answer;
mod ask;
mod canary;
mod direct;
mod exec;
mod grpc;
mod handle;
mod hot;
pub mod http;
mod ids;
mod kept;
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

use beelet_policy::probe::{
    EdgePolicy,
    listener::QueueRule,
    settings::{Connections, ExecMode},
};

pub use handle::{
    AskError, CheckView, Commands, Explained, Handle, ProbeView, ToleratedView, Wanted, handle,
};
pub use manager::{Parts, Probes};
pub use metrics::Metrics;

/// The node's defaults for probes, which a pod's annotations can override.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// True if the kernel answers tcpSocket probes when possible.
    pub tcp_by_kernel: bool,
    /// Effect of a listener's opening and closing on readiness.
    pub edge_policy: EdgePolicy,
    /// Period of the canary connections of liveness probes in kernel mode; zero turns them off.
    pub canary: Duration,
    /// The state of the accept queues that fails liveness and startup probes in kernel mode.
    pub queue_rule: QueueRule,
    /// The part of the node that runs commands.
    pub exec: ExecMode,
    /// Connections of httpGet and grpc probes.
    pub connections: Connections,
}
