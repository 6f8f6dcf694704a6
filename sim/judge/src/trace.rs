//! The facts of a simulated node, in the words of Kubernetes' API and of CRI. The simulation records them
//! where they happen: at the users, in the runtime, in the published status. None of them comes from the
//! agent's own reasoning.

use std::collections::BTreeSet;
use std::time::Duration;

/// A fact and its time since the start of the simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Time since the start.
    pub at: Duration,
    /// The fact.
    pub fact: Fact,
}

/// A fact.
#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A pod's object exists from now on with this spec: created, or changed by a resize.
    Wanted(Pod),
    /// The deletion of a pod began, with this grace period in seconds.
    Deleting {
        /// UID of the pod.
        uid: String,
        /// Grace period in seconds.
        grace: u64,
    },
    /// A pod's object or manifest is gone.
    Unwanted {
        /// UID of the pod.
        uid: String,
    },
    /// The agent's process started.
    AgentStarted,
    /// The simulation killed the agent.
    AgentKilled,
    /// The agent ended by itself.
    AgentFailed {
        /// The agent's error.
        why: String,
    },
    /// The agent may not hear from the API server for these seconds.
    ApiServerDisturbed {
        /// Seconds.
        seconds: u64,
    },
    /// The wall clock stepped by these seconds.
    ClockStepped {
        /// Seconds; negative for a step back.
        seconds: i64,
    },
    /// The machine rebooted: all processes ended.
    Rebooted,
    /// The last fault is over; from now on the node must converge.
    FaultsEnded,
    /// A sandbox runs.
    SandboxRan {
        /// Id of the sandbox.
        sandbox: String,
        /// UID of its pod.
        uid: String,
    },
    /// A sandbox no longer runs.
    SandboxStopped {
        /// Id of the sandbox.
        sandbox: String,
    },
    /// A sandbox is removed, with all its containers.
    SandboxRemoved {
        /// Id of the sandbox.
        sandbox: String,
    },
    /// A container was created.
    Created {
        /// Id of the container.
        container: String,
        /// Id of its sandbox.
        sandbox: String,
        /// Name in the pod's spec.
        name: String,
        /// Devices that the container receives.
        devices: BTreeSet<String>,
    },
    /// A container's process started.
    Started {
        /// Id of the container.
        container: String,
        /// Time at which the agent requested the start.
        asked: Duration,
    },
    /// The agent requested the stop of a container.
    StopAsked {
        /// Id of the container.
        container: String,
        /// Grace period in seconds.
        grace: i64,
    },
    /// A container's process ended.
    Exited {
        /// Id of the container.
        container: String,
        /// Exit code.
        code: i32,
        /// Cause of the end.
        by: End,
    },
    /// A container is removed.
    Removed {
        /// Id of the container.
        container: String,
    },
    /// The amount of CPU in force for a container, in thousandths.
    Cpu {
        /// Id of the container.
        container: String,
        /// Requested CPU in thousandths.
        milli: u64,
    },
    /// A container answered a probe.
    Probed {
        /// Id of the container.
        container: String,
        /// Kind of the probe.
        kind: ProbeKind,
        /// True for a success.
        passed: bool,
    },
    /// The agent published a pod's status.
    Status(Status),
    /// At the end of the simulation, the API server has this status of a pod.
    Stored(Status),
    /// At the end of the simulation, the API server has this condition of the Node.
    Node {
        /// True if the condition `Ready` is true.
        ready: bool,
    },
    /// At the end of the simulation, something of a pod is left on the machine.
    Left {
        /// UID of the pod.
        uid: String,
        /// The rest.
        place: String,
    },
}

/// Cause of a process's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The process ended by itself.
    Itself,
    /// The kernel's OOM killer.
    Oom,
    /// The stop of its container: SIGTERM, or SIGKILL after the grace period.
    Stop,
    /// The end of its sandbox or the removal of its container, without a stop.
    Force,
    /// A reboot of the machine, or the end of the sandbox's own process.
    Machine,
}

/// Kind of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProbeKind {
    /// Startup probe.
    Startup,
    /// Liveness probe.
    Liveness,
    /// Readiness probe.
    Readiness,
}

/// Restart policy of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// After any end.
    Always,
    /// After a failure.
    OnFailure,
    /// Never.
    Never,
}

/// A pod as its users want it.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    /// UID.
    pub uid: String,
    /// Name.
    pub name: String,
    /// Restart policy.
    pub restart: Restart,
    /// `terminationGracePeriodSeconds`.
    pub grace: u64,
    /// `activeDeadlineSeconds`.
    pub deadline: Option<u64>,
    /// Containers in the order of their start.
    pub containers: Vec<Container>,
}

/// Role of a container in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Init container that runs to its end.
    Init,
    /// Init container with `restartPolicy: Always` (KEP-753).
    Sidecar,
    /// A container of the pod's own list.
    Main,
}

/// A container of a pod's spec.
#[derive(Clone, Debug, PartialEq)]
pub struct Container {
    /// Name.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Requested CPU in thousandths.
    pub cpu: u64,
    /// Number of requested devices.
    pub devices: u64,
    /// `failureThreshold` by kind of probe.
    pub probes: Vec<(ProbeKind, u32)>,
}

/// A pod's published status.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// UID of the pod.
    pub uid: String,
    /// Phase.
    pub phase: String,
    /// `status.reason`.
    pub reason: Option<String>,
    /// Statuses of the containers.
    pub containers: Vec<ContainerStatus>,
}

impl Status {
    /// Returns true for a pod that has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.phase == "Failed" || self.phase == "Succeeded"
    }
}

/// A container's published status.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerStatus {
    /// Name.
    pub name: String,
    /// Id of the newest container, without the runtime's prefix.
    pub id: Option<String>,
    /// State.
    pub state: State,
    /// Restart count.
    pub restarts: u32,
    /// Readiness.
    pub ready: bool,
}

/// A container's published state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Waiting, with its reason.
    Waiting(String),
    /// Running.
    Running,
    /// Terminated, with its exit code.
    Terminated(i32),
}
