//! The pod lifecycle event generator: finds out what happened to sandboxes and containers, and sends it to
//! the pods' manager. It never acts on a pod and never decides; what a change means is the worker's to see.
//!
//! Three sources say that a container has ended: the kernel (its first process exited: known within a
//! millisecond, on any runtime), the runtime's event stream (where it has one), and the [`relist`]. The first
//! two only start a wait for the runtime's own word, in [`exits`]: until the runtime says EXITED, what else
//! was in the container may hold the pod's ports, and only that word allows a restart. Whatever the sources
//! say twice is acted on once, because a worker looks at attempts, not at messages. While the first two are
//! trusted, the relist becomes rare.

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

/// Hints on their way to [`exits`]. While that channel is full the kernel's edges wait in their own, which
/// counts what it loses and reports it.
pub const HINTS: usize = 1024;

/// Something that may be a container's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExitHint {
    /// A process ended, by the kernel's word.
    Exited {
        /// Its id on the host.
        pid: u32,
        /// When, `CLOCK_MONOTONIC` nanoseconds.
        at_ns: u64,
    },
    /// The kernel killed a process for want of memory, by its own word.
    OomKilled {
        /// The container's cgroup2 id; 0 if unknown.
        cgroup_id: u64,
        /// The process.
        kill: OomKill,
    },
    /// A container or sandbox ended, by the runtime's word.
    Stopped {
        /// The runtime's identifier.
        id: String,
    },
    /// Something may have been missed.
    Lost,
}

/// Hands the kernel's edges on as hints, until `shutdown`.
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

/// How much the relist is needed: what the other sources know of themselves. Clones share it.
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

    /// Returns true if the kernel is expected to tell of every exit.
    pub(crate) fn is_kernel_trusted(&self) -> bool {
        self.0.kernel.load(Ordering::Relaxed)
    }

    /// Returns true if the runtime streams its events now.
    pub(crate) fn is_streaming(&self) -> bool {
        self.0.stream.load(Ordering::Relaxed)
    }

    /// The kernel reports exits, or it turned out that it doesn't.
    pub fn set_kernel(&self, trusted: bool) {
        self.0.kernel.store(trusted, Ordering::Relaxed);
    }

    fn set_streaming(&self, streaming: bool) {
        self.0.stream.store(streaming, Ordering::Relaxed);
        if !streaming {
            self.nudge();
        }
    }

    /// Something happened that only a relist can tell.
    pub(crate) fn nudge(&self) {
        self.0.nudge.notify_one();
    }

    /// Waits for a [`Pace::nudge`].
    async fn nudged(&self) {
        self.0.nudge.notified().await;
    }
}
