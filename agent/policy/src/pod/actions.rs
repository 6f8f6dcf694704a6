//! The output of a decision about a pod.

use std::{collections::BTreeMap, time::Duration};

use beelet_units::moment::Moment;

/// The reason for stopping a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KillReason {
    /// The liveness probe failed.
    Liveness,
    /// The startup probe failed.
    Startup,
    /// The runtime does not know the container's state.
    Unknown,
    /// The postStart hook failed.
    PostStartHook,
    /// The container was created from another definition than the pod's current one.
    Redefined,
    /// A rule requires a restart of all containers of the pod.
    RestartAll,
    /// The container gets other amounts of cpu or memory, and its resizePolicy requires a restart.
    Resized,
    /// A user requested the restart.
    Requested,
}

impl KillReason {
    /// Returns true if a container stopped for this reason is restarted, unless its restart policy is Never.
    pub fn is_for_a_restart(self) -> bool {
        matches!(self, Self::Liveness | Self::Startup | Self::Requested)
    }

    /// Returns true if a probe condemned the container.
    pub fn is_of_probe(self) -> bool {
        matches!(self, Self::Liveness | Self::Startup)
    }

    /// Returns the text that follows the container's name in an event; the kubelet's.
    pub fn message(self) -> &'static str {
        match self {
            Self::Liveness => "failed liveness probe, will be restarted",
            Self::Startup => "failed startup probe, will be restarted",
            Self::Unknown => "is in unknown state, try killing it before restart",
            Self::PostStartHook => "failed postStart hook",
            Self::Redefined => "definition changed, will be restarted",
            Self::Resized => "resize requires restart",
            Self::RestartAll => "will be restarted with all containers of its pod",
            Self::Requested => "is restarted on request",
        }
    }
}

/// A container to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kill {
    /// The runtime's identifier.
    pub id: String,
    /// The name in the pod's spec.
    pub name: String,
    /// The reason.
    pub reason: KillReason,
}

/// A container to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The name in the pod's spec.
    pub name: String,
    /// Restart count of the new container.
    pub attempt: u32,
    /// Delay before this start, to be stored with the container.
    pub restart_delay: Duration,
    /// Id of a container that was created for this attempt but not started yet.
    pub created: Option<String>,
    /// Round of the container, to be stored with it.
    pub round: u32,
}

/// The back-off of a container that should run but does not yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The full delay.
    pub delay: Duration,
    /// End of the delay.
    pub until: Moment,
}

/// The outcome of a pod that has nothing left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every container ended with exit code 0.
    Succeeded,
    /// At least one container ended with another exit code.
    Failed,
}

/// A postStart hook to run in a container that is already running: the agent stopped before it knew the
/// hook's result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// The runtime's identifier of the container.
    pub id: String,
    /// The name in the pod's spec.
    pub name: String,
}

/// The actions to take now, in this order: kill, stop sandboxes, create a sandbox, remove, run hooks, start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actions {
    /// Containers to stop.
    pub kill: Vec<Kill>,
    /// Sandboxes to stop with all their running containers; they stay listed.
    pub stop_sandboxes: Vec<String>,
    /// Attempt number of the sandbox to create. No container starts before it runs.
    pub create_sandbox: Option<u32>,
    /// Dead containers that are no longer needed.
    pub remove_containers: Vec<String>,
    /// Stopped sandboxes without containers.
    pub remove_sandboxes: Vec<String>,
    /// Hooks to run before any start.
    pub post_start: Vec<Hook>,
    /// Containers to start, one after the other: one with a postStart hook delays the later ones until the
    /// hook has finished.
    pub start: Vec<Start>,
    /// Containers that wait for their restart delay to pass.
    pub backoff: BTreeMap<String, Backoff>,
    /// Set once the pod has nothing left to do.
    pub outcome: Option<Outcome>,
    /// Set once no container of a pod with an outcome runs: its volumes and its cgroup can be released.
    /// Repeating the release is harmless.
    pub release: bool,
}

impl Actions {
    /// Returns true if there is nothing to do before a change or [`Actions::wake_at`].
    pub fn is_idle(&self) -> bool {
        self.only_makes() && self.create_sandbox.is_none() && self.start.is_empty()
    }

    /// Returns true if the only actions are the creation of a sandbox or of containers.
    pub fn only_makes(&self) -> bool {
        self.kill.is_empty()
            && self.stop_sandboxes.is_empty()
            && self.remove_containers.is_empty()
            && self.remove_sandboxes.is_empty()
            && self.post_start.is_empty()
    }

    /// Returns the time for the next decision in the absence of changes.
    pub fn wake_at(&self) -> Option<Moment> {
        self.backoff.values().map(|b| b.until).min()
    }
}
