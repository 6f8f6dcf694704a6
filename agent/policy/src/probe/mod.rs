//! Decisions on probe results: thresholds, initial delay, startup gating, and the hold after a failed
//! liveness probe.
//!
//! [`ProbeState`] is the kubelet's probe worker (`pkg/kubelet/prober/worker.go`) without its clock and its
//! goroutine: the daemon feeds it outcomes and kernel edges as they come, `plan probe` feeds it ticks. Must
//! never run a probe, read a clock or decide *when* to probe next.
//!
//! Times are [`Duration`]s since an origin of the caller's choice (the daemon: its monotonic clock).

pub mod listener;
mod row;
pub mod settings;

use std::time::Duration;

use k8s_openapi::api::core::v1::Probe;
use serde::{Deserialize, Serialize};

use self::row::{Published, Row};

/// The purpose of a probe, which decides its initial value and the effect of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeKind {
    /// Restarts a container that stopped working. Successful until proven otherwise.
    Liveness,
    /// Decides whether a container may receive traffic. Failed until proven otherwise.
    Readiness,
    /// Holds back the other two until the container has started.
    Startup,
}

impl ProbeKind {
    /// Returns the kind's name on the command line and in annotations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Liveness => "liveness",
            Self::Readiness => "readiness",
            Self::Startup => "startup",
        }
    }

    /// Returns the kind's name in the kubelet's events and metrics.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
            Self::Startup => "Startup",
        }
    }

    /// Returns the value published for a new container before any outcome counts.
    #[must_use]
    pub const fn initial(self) -> ProbeResult {
        match self {
            Self::Liveness => ProbeResult::Success,
            Self::Readiness => ProbeResult::Failure,
            Self::Startup => ProbeResult::Unknown,
        }
    }
}

/// The result of one run of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The container gave the expected answer.
    Success,
    /// The container gave another answer, or none in time.
    Failure,
    /// The probe itself could not run: the outcome says nothing about the container and does not count.
    Error,
}

/// The published state of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeResult {
    /// Unknown (startup probes only).
    Unknown,
    /// Alive, ready or started.
    Success,
    /// Not alive, ready or started.
    Failure,
}

/// The effect of a kernel edge on readiness (the configuration's `edgePolicy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EdgePolicy {
    /// *Not listening* makes the container not ready at once, since traffic would be refused; *listening*
    /// makes it ready at once if the success threshold is one.
    #[default]
    Immediate,
    /// An edge counts as an outcome towards the thresholds.
    Threshold,
}

/// The part of a probe's settings that decides its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeParams {
    /// Time that the container must have run before outcomes count.
    pub initial_delay: Duration,
    /// Consecutive successes required for success; 0 counts as 1.
    pub success_threshold: u32,
    /// Consecutive failures required for failure; 0 counts as 1.
    pub failure_threshold: u32,
    /// True if the container has a startup probe for which this (liveness or readiness) probe waits.
    pub waits_for_startup: bool,
    /// Effect of kernel edges (readiness only).
    pub edge_policy: EdgePolicy,
}

impl ProbeParams {
    /// Reads the settings of a probe, with the API's defaults for a field that is absent or 0: one success,
    /// three failures. Negative numbers, which the API refuses, count as absent.
    #[must_use]
    pub fn from_probe(probe: &Probe, waits_for_startup: bool, edge_policy: EdgePolicy) -> Self {
        let positive = |n: Option<i32>, default: u32| match u32::try_from(n.unwrap_or(0)) {
            Ok(0) | Err(_) => default,
            Ok(n) => n,
        };
        Self {
            initial_delay: Duration::from_secs(positive(probe.initial_delay_seconds, 0).into()),
            success_threshold: positive(probe.success_threshold, 1),
            failure_threshold: positive(probe.failure_threshold, 3),
            waits_for_startup,
            edge_policy,
        }
    }
}

/// A change of the published state, or its first value for a new container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transition {
    /// Time of the change: the `now` of the call that caused it.
    pub at: Duration,
    /// The new state.
    pub result: ProbeResult,
    /// The container must be restarted: a liveness or startup probe failed past its threshold.
    pub restart: bool,
}

/// The reason why no outcome counts at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suspension {
    /// The container is not running.
    NotRunning,
    /// The pod is being deleted, or was terminated for good.
    Deleted,
    /// The probe failed, or the startup probe succeeded: suspended until a new container runs.
    Settled,
    /// The container has not run for its initial delay.
    InitialDelay,
    /// The startup probe has not succeeded.
    Startup,
}

impl std::fmt::Display for Suspension {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NotRunning => "the container is not running",
            Self::Deleted => "the pod is terminating",
            Self::Settled => "settled until a new container runs",
            Self::InitialDelay => "the initial delay has not passed",
            Self::Startup => "the startup probe has not succeeded yet",
        })
    }
}

/// The container under the probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    /// No container seen yet.
    Absent,
    /// Running since this time.
    Running(Duration),
    /// Ended; no new container yet.
    Stopped,
    /// The pod is terminating, and the probe's results no longer matter.
    Deleted,
}

/// The container under the probe, and whether outcomes count at present.
#[derive(Debug, Clone)]
pub struct Gate {
    subject: Subject,
    on_hold: bool,
    startup_succeeded: bool,
    /// The initial delay of the current container: a change after its first outcome has no effect.
    delay: Duration,
    /// True once an outcome of the current container has counted.
    has_counted: bool,
}

impl Gate {
    /// Returns true once an outcome of the current container has counted.
    #[must_use]
    pub const fn has_counted(&self) -> bool {
        self.has_counted
    }

    /// Records the success of the container's startup probe: opens the gate of a liveness or readiness probe.
    pub fn startup_succeeded(&mut self) {
        self.startup_succeeded = true;
    }

    /// Returns the reason why an outcome at `now` would not count; `None` if it would.
    fn held(&self, now: Duration, kind: ProbeKind, waits_for_startup: bool) -> Option<Suspension> {
        let started_at = match self.subject {
            Subject::Running(started_at) => started_at,
            Subject::Deleted => return Some(Suspension::Deleted),
            Subject::Absent | Subject::Stopped => return Some(Suspension::NotRunning),
        };
        if self.on_hold {
            Some(Suspension::Settled)
        } else if now.saturating_sub(started_at) < self.delay {
            Some(Suspension::InitialDelay)
        } else if waits_for_startup && !self.startup_succeeded && kind != ProbeKind::Startup {
            Some(Suspension::Startup)
        } else {
            None
        }
    }
}

/// The state of one probe of one container, over all restarts of that container.
///
/// ```
/// use std::time::Duration;
/// use beelet_policy::probe::{Outcome, ProbeKind, ProbeParams, ProbeResult, ProbeState};
///
/// let params = ProbeParams {
///     initial_delay: Duration::ZERO, success_threshold: 1, failure_threshold: 2,
///     waits_for_startup: false, edge_policy: Default::default(),
/// };
/// let mut state = ProbeState::new(ProbeKind::Liveness, &params);
/// let second = Duration::from_secs;
/// assert_eq!(state.container_started(second(5), second(5)).map(|t| t.result), Some(ProbeResult::Success));
/// assert_eq!(state.record(second(10), Outcome::Failure), None);
/// assert!(state.record(second(20), Outcome::Failure).is_some_and(|t| t.restart));
/// assert!(!state.due(second(30)), "on hold until the new container runs");
/// ```
#[derive(Debug, Clone)]
pub struct ProbeState {
    kind: ProbeKind,
    params: ProbeParams,
    /// Decides whether outcomes count at present.
    pub gate: Gate,
    published: Published,
    /// Deliberately kept over a restart of the container, as in the kubelet.
    row: Row,
}

impl ProbeState {
    /// Creates a probe whose container has not been seen yet.
    #[must_use]
    pub fn new(kind: ProbeKind, params: &ProbeParams) -> Self {
        Self {
            kind,
            params: params.clone(),
            gate: Gate {
                subject: Subject::Absent,
                on_hold: false,
                startup_succeeded: false,
                delay: params.initial_delay,
                has_counted: false,
            },
            published: Published(kind.initial()),
            row: Row { last: Outcome::Success, length: 0 },
        }
    }

    /// Applies changed settings of a running pod's probe; `other_question` is true if the handler or the
    /// timeout has changed. The published state stays as it is. The run of equal outcomes starts again if
    /// a threshold, the handler or the timeout has changed (KEP-6318, "Kubelet Behavior").
    pub fn reconfigure(&mut self, params: &ProbeParams, other_question: bool) {
        let thresholds = |params: &ProbeParams| (params.success_threshold, params.failure_threshold);
        if other_question || thresholds(&self.params) != thresholds(params) {
            self.row.length = 0;
        }
        if !self.gate.has_counted {
            self.gate.delay = params.initial_delay;
        }
        self.params = params.clone();
    }

    /// Resumes a probe from the state of an earlier agent, so that nothing flips.
    #[must_use]
    pub fn resume(
        kind: ProbeKind,
        params: &ProbeParams,
        started_at: Duration,
        published: ProbeResult,
    ) -> Self {
        let settled = kind == ProbeKind::Startup && published == ProbeResult::Success;
        let new = Self::new(kind, params);
        let gate = Gate { subject: Subject::Running(started_at), on_hold: settled, ..new.gate };
        Self { gate, published: Published(published), ..new }
    }

    /// Returns the kind of probe.
    #[must_use]
    pub const fn kind(&self) -> ProbeKind {
        self.kind
    }

    /// Returns the published state.
    #[must_use]
    pub const fn published(&self) -> ProbeResult {
        self.published.0
    }

    /// Returns the settings in force.
    #[must_use]
    pub const fn params(&self) -> &ProbeParams {
        &self.params
    }

    /// Records that a container runs since `started_at`, the first one or one after a restart. Ends a hold
    /// and always publishes the first value (the new container had no value before). The startup gate closes;
    /// the run of equal outcomes carries over. Returns `None` only while the pod is being deleted.
    pub fn container_started(&mut self, now: Duration, started_at: Duration) -> Option<Transition> {
        if self.gate.subject == Subject::Deleted {
            return None;
        }
        self.gate.subject = Subject::Running(started_at);
        self.gate.on_hold = false;
        self.gate.startup_succeeded = false;
        self.gate.delay = self.params.initial_delay;
        self.gate.has_counted = false;
        self.published = Published(self.kind.initial());
        Some(self.published.transition(now, false))
    }

    /// Records the container's end: not ready, not started, and no outcome counts until the next container
    /// runs. The restart policy decides on a restart, so the transition requests none.
    pub fn container_stopped(&mut self, now: Duration) -> Option<Transition> {
        if !matches!(self.gate.subject, Subject::Running(_)) {
            return None;
        }
        self.gate.subject = Subject::Stopped;
        self.published.change(now, ProbeResult::Failure, false)
    }

    /// Records the pod's deletion or permanent end: liveness and startup probes end in success, so that
    /// nothing restarts the container during its graceful termination; readiness continues.
    pub fn pod_deleted(&mut self, now: Duration) -> Option<Transition> {
        if self.kind == ProbeKind::Readiness {
            return None;
        }
        let seen = self.gate.subject != Subject::Absent;
        self.gate.subject = Subject::Deleted;
        if seen { self.published.change(now, ProbeResult::Success, false) } else { None }
    }

    /// Returns true if an outcome at `now` would count. A caller skips the probe otherwise.
    #[must_use]
    pub fn due(&self, now: Duration) -> bool {
        self.held(now).is_none()
    }

    /// Returns the reason why an outcome at `now` would not count; `None` if it would.
    #[must_use]
    pub fn held(&self, now: Duration) -> Option<Suspension> {
        self.gate.held(now, self.kind, self.params.waits_for_startup)
    }

    /// Returns true if successes change nothing from `now` until another of these methods is called:
    /// [`Self::record`] need not receive them.
    #[must_use]
    pub fn is_steady(&self, now: Duration) -> bool {
        self.published.0 == ProbeResult::Success
            && self.row.last == Outcome::Success
            && self.row.length >= self.params.success_threshold.max(1)
            && self.due(now)
    }

    /// Records an outcome. Returns the resulting change of state, if any.
    pub fn record(&mut self, now: Duration, outcome: Outcome) -> Option<Transition> {
        if outcome == Outcome::Error || !self.due(now) {
            return None;
        }
        self.gate.has_counted = true;
        if self.row.add(outcome, &self.params) { self.settle(now, outcome) } else { None }
    }

    /// Records that the kernel saw a listener appear on (`true`) or disappear from (`false`) the probed port.
    /// [`EdgePolicy`] decides the effect; liveness and startup probes always keep their thresholds. An edge
    /// before the initial delay or the startup probe's success does not count.
    pub fn edge(&mut self, now: Duration, listening: bool) -> Option<Transition> {
        let outcome = if listening { Outcome::Success } else { Outcome::Failure };
        let at_once = self.kind == ProbeKind::Readiness
            && self.params.edge_policy == EdgePolicy::Immediate
            && (!listening || self.params.success_threshold <= 1);
        if !at_once || !self.due(now) {
            return self.record(now, outcome);
        }
        // The edge acts as the last of a full row: undoing it takes a new row.
        self.gate.has_counted = true;
        let length = if listening { 1 } else { self.params.failure_threshold.max(1) };
        self.row = Row { last: outcome, length };
        self.settle(now, outcome)
    }

    /// Publishes an outcome that has met its threshold.
    fn settle(&mut self, now: Duration, outcome: Outcome) -> Option<Transition> {
        let failed = outcome == Outcome::Failure;
        let result = if failed { ProbeResult::Failure } else { ProbeResult::Success };
        if self.kind == ProbeKind::Startup || (self.kind == ProbeKind::Liveness && failed) {
            // Suspends the probe until a new container runs.
            self.gate.on_hold = true;
            self.row.length = 0;
        }
        self.published.change(now, result, failed && self.kind != ProbeKind::Readiness)
    }
}

#[cfg(test)]
mod tests;
