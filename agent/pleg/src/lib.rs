//! The pod lifecycle event generator: detects changes of sandboxes and containers, and sends them to the
//! pods' manager. Must never act on a pod nor decide; the pod's worker interprets a change.
//!
//! Three sources report that a container has ended: the kernel (its first process exited: known within a
//! millisecond, with any runtime), the runtime's event stream (if it has one), and the [`relist`]. The first
//! two only start a wait for the runtime's confirmation, in [`exits`]: until the runtime reports EXITED,
//! other processes of the container may hold the pod's ports, and only that state allows a restart. A
//! duplicate report has no effect, because a worker compares attempts, not messages. While the first two
//! sources are trusted, the relist becomes rare.

pub mod exits;
pub mod relist;
pub mod stream;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use beelet_base::work::Work;
use beelet_bpf::{Edge, Edges, OomKill};

/// Capacity of the channel of hints to [`exits`]. While it is full the kernel's edges wait in their own
/// channel, which counts and reports its losses.
pub const HINTS: usize = 1024;

/// A hint of a container's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExitHint {
    /// The kernel reported the exit of a process.
    Exited {
        /// Pid on the host.
        pid: u32,
        /// Time of the exit, `CLOCK_MONOTONIC` nanoseconds.
        at_ns: u64,
    },
    /// The kernel reported an OOM kill.
    OomKilled {
        /// The container's cgroup2 id; 0 if unknown.
        cgroup_id: u64,
        /// The process.
        kill: OomKill,
    },
    /// The runtime reported the end of a container or sandbox.
    Stopped {
        /// The runtime's identifier.
        id: String,
    },
    /// Events may have been missed.
    Lost,
}

/// Forwards the kernel's edges as hints, until `shutdown`.
pub fn forward(edges: Edges, hints: mpsc::Sender<ExitHint>, shutdown: CancellationToken) -> Work {
    Box::pin(async move {
        loop {
            let edge = tokio::select! {
                () = shutdown.cancelled() => return,
                edge = edges.recv() => edge,
            };
            let hint = match edge {
                Edge::ContainerExited { pid, at_ns, .. } => ExitHint::Exited { pid, at_ns },
                Edge::OomKill { cgroup_id, kill, .. } => ExitHint::OomKilled { cgroup_id, kill },
                Edge::Lost => ExitHint::Lost,
                _ => continue,
            };
            if hints.send(hint).await.is_err() {
                return;
            }
        }
    })
}

/// Trust in the other sources, which determines the relist's period. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Pace(Arc<PaceState>);

#[derive(Debug, Default)]
struct PaceState {
    kernel: AtomicBool,
    stream: AtomicBool,
    nudge: Notify,
}

impl Pace {
    /// Returns true if exits are expected to be known without a relist.
    pub(crate) fn is_trusted(&self) -> bool {
        self.is_kernel_trusted() || self.is_streaming()
    }

    /// Returns true if the kernel is expected to report every exit.
    pub(crate) fn is_kernel_trusted(&self) -> bool {
        self.0.kernel.load(Ordering::Relaxed)
    }

    /// Returns true if the runtime streams its events now.
    pub(crate) fn is_streaming(&self) -> bool {
        self.0.stream.load(Ordering::Relaxed)
    }

    /// Sets whether the kernel is trusted to report every exit.
    pub fn set_kernel(&self, trusted: bool) {
        self.0.kernel.store(trusted, Ordering::Relaxed);
    }

    fn set_streaming(&self, streaming: bool) {
        self.0.stream.store(streaming, Ordering::Relaxed);
        if !streaming {
            self.nudge();
        }
    }

    /// Requests a relist.
    pub(crate) fn nudge(&self) {
        self.0.nudge.notify_one();
    }

    /// Waits for a [`Pace::nudge`].
    async fn nudged(&self) {
        self.0.nudge.notified().await;
    }
}
