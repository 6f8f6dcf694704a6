//! The input of a decision about a pod: the runtime's state and the verdicts of probes.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use jiff::Timestamp;

use super::KillReason;

/// The runtime's state of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// All sandboxes, in any order.
    pub sandboxes: Vec<Sandbox>,
    /// All containers, dead ones included, in any order.
    pub containers: Vec<Container>,
}

/// A pod sandbox, as the runtime has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sandbox {
    /// The runtime's identifier.
    pub id: String,
    /// Index of the sandbox among the pod's, from 0.
    pub attempt: u32,
    /// True if the runtime reports the sandbox as ready: its namespaces and its network exist.
    pub ready: bool,
}

/// A container, as the runtime has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// The runtime's identifier.
    pub id: String,
    /// The name in the pod's spec.
    pub name: String,
    /// Number of earlier starts of the container: its restart count.
    pub attempt: u32,
    /// The sandbox of the container.
    pub sandbox_id: String,
    /// The container's state.
    pub state: ContainerState,
    /// Delay before the container's start; the next delay follows from it.
    pub restart_delay: Duration,
    /// Number of earlier restarts of all containers of the pod together.
    pub round: u32,
}

/// A container's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerState {
    /// Created but never started.
    Created,
    /// Running since `started_at`.
    Running {
        /// Start time.
        started_at: Timestamp,
    },
    /// Ended.
    Exited {
        /// Exit code of the container's first process.
        exit_code: i32,
        /// Start time; `None` if the container never started.
        started_at: Option<Timestamp>,
        /// End time.
        finished_at: Timestamp,
    },
    /// Unknown to the runtime. The container is stopped and replaced.
    Unknown,
}

/// Results of probes and hooks for the pod's running containers, by the runtime's container identifiers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdicts {
    /// Containers whose startup probe succeeded, or that have none.
    pub started: BTreeSet<String>,
    /// Containers whose postStart hook has finished. Those without a hook may be missing.
    pub hooked: BTreeSet<String>,
    /// Containers condemned by a failed liveness or startup probe or a failed postStart hook, or that no
    /// longer match the pod's spec. The latter are restarted regardless of their exit code.
    pub condemned: BTreeMap<String, KillReason>,
    /// Containers whose restart was requested: their restart delay counts as over, and the next one starts
    /// from zero.
    pub hurried: BTreeSet<String>,
    /// Exit codes to assume, by container name, if the runtime has lost a container: those that ran may have
    /// been killed. Those that never ran are missing.
    pub last_codes: BTreeMap<String, i32>,
}

/// Exit code of a container whose end is unknown (the kubelet's ContainerStatusUnknown).
pub const UNKNOWN_EXIT: i32 = 137;

/// Returns the newest container of each name.
pub(super) fn newest(observed: &Observed) -> BTreeMap<&str, &Container> {
    let mut newest: BTreeMap<&str, &Container> = BTreeMap::new();
    for container in &observed.containers {
        let slot = newest.entry(&container.name).or_insert(container);
        if (container.attempt, &container.id) > (slot.attempt, &slot.id) {
            *slot = container;
        }
    }
    newest
}
