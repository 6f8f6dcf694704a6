//! A probe of a container: its target, its schedule and its results.

use std::{net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use beelet_policy::probe::{
    EdgePolicy, Outcome, ProbeKind, ProbeParams, ProbeResult, ProbeState,
    listener::{QueueWatch, Sighting, Verdict},
    settings::{self, Connections, ExecMode, TcpMode},
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::task::AbortHandle;

use super::{
    Settings,
    answer::Answer,
    ask::Question,
    hot::HotState,
    ids::Key,
    kept::Slot,
    metrics::Metrics,
    target::{Target, TargetError, Timing},
    timetable::{on_grid, phase},
};
use beelet_base::clock::monotonic_ns;
use beelet_bpf::{CheckTarget, CheckedNetns};
use beelet_model::{pod::ContainerKind, table::PodName};
use beelet_state::events::Object;

/// Result of a check, for the user.
#[derive(Clone, Debug)]
pub(super) struct ProbeRecord {
    pub outcome: Outcome,
    pub detail: String,
}

/// Source of a probe's answers.
#[derive(Clone, Debug)]
pub(super) enum Method {
    /// Unknown before the container runs.
    Undecided,
    /// The application or the runtime, with the reason if the kernel should answer but can't.
    Ask(Option<String>),
    /// The kernel, in this namespace.
    Kernel(Arc<CheckedNetns>),
}

/// Announcement of an edge, until a check confirms it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hint {
    /// A listener opened.
    Opened,
    /// The listener with this cookie closed.
    Closed(u64),
    /// Edges may have been missed.
    Missed,
    /// A listener closed, and the container may be exiting.
    Gone,
}

#[derive(Debug)]
pub(super) struct Worker {
    pub key: Key,
    /// Kind of the container in the pod's spec.
    pub of: ContainerKind,
    pub name: PodName,
    pub hot: HotState,
    pub state: ProbeState,
    pub target: Target,
    /// Timeout of an answer.
    pub timeout: Duration,
    /// The container instance under the probe; `None` between two instances.
    pub container_id: Option<String>,
    pub ip: Option<IpAddr>,
    /// True if the node's configuration or the pod's annotations ask the kernel to answer this probe.
    wants_kernel: bool,
    /// The pod's runtime class, unless an annotation asks for the kernel: such a pod's sockets may be in a
    /// network stack that the pod's network namespace does not have (gVisor, Kata).
    runtime_class: Option<String>,
    /// True once the kernel has had a listener on the port in the pod's network namespace. Before that, the
    /// absence of a listener may only mean that the pod's sockets are somewhere else.
    pub has_seen_listener: bool,
    /// Checks of a stalled listener that count as successes.
    pub tolerated: Tolerated,
    method: Method,
    /// Time between two checks, as requested by the pod.
    period: Duration,
    /// Time of the next allowed request to the application if the kernel can't answer.
    asks_from: Duration,
    /// The namespace for which the method was chosen; `None` for the host's own.
    pub netns: Option<PathBuf>,
    /// Edge to be judged by the next check, with its time in `CLOCK_MONOTONIC` nanoseconds.
    pub edge: Option<(Hint, u64)>,
    /// Number of checks of the edge that came too early.
    pub rechecks: u8,
    pub in_flight: bool,
    /// The task of the check in flight.
    pub asking: Option<AbortHandle>,
    /// Number of changes of the handler or the timeout: answers to an earlier question don't count.
    pub revision: u64,
    /// The source of these settings.
    made_of: Settled,
    /// True if the helper should run the command.
    direct: bool,
    /// Place for a connection that the server keeps open, if the settings allow it.
    kept: Option<Slot>,
    canary_every: Duration,
    /// Result of the last check.
    pub last: Option<ProbeRecord>,
    pub since: Option<Timestamp>,
    /// Invalid annotations.
    pub problems: Vec<String>,
}

/// Checks that found a stalled listener and count as successes, because a connection would have succeeded:
/// the failures that a stricter `QueueRule` would have seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tolerated {
    /// Number of these checks.
    pub checks: u64,
    /// Number of times that `failureThreshold` of these checks occurred in a row.
    pub failures: u64,
    /// Time of the most recent one, on the clock of `ProbeState`.
    pub last: Option<Duration>,
    in_a_row: u32,
}

/// The part of a pod's spec that decides a probe's settings.
#[derive(Clone, Debug, PartialEq)]
struct Settled {
    probe: core::Probe,
    /// True if the container has a startup probe for which this probe waits.
    waits: bool,
    annotations: [Option<String>; 2],
}

impl Settled {
    fn of(pod: &core::Pod, container: &core::Container, kind: ProbeKind, probe: &core::Probe) -> Self {
        let all = pod.metadata.annotations.as_ref();
        let annotation = |name: &str| all.and_then(|all| all.get(name)).cloned();
        Self {
            probe: probe.clone(),
            waits: container.startup_probe.is_some() && kind != ProbeKind::Startup,
            annotations: settings::annotations_of(&container.name).map(|name| annotation(&name)),
        }
    }
}

/// Extent of a change of a running container's probe (KEP-6318).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Only thresholds, delays or the like.
    Counting,
    /// The time between two checks, at least.
    Period,
    /// The handler or the timeout: answers in flight are for another question.
    Question,
}

impl Tolerated {
    /// Counts one look at `now`. Returns true if the probe would have failed the container with it.
    fn count(&mut self, now: Duration, is_stalled: bool, threshold: u32) -> bool {
        if !is_stalled {
            self.in_a_row = 0;
            return false;
        }
        self.checks = self.checks.saturating_add(1);
        self.last = Some(now);
        self.in_a_row = self.in_a_row.saturating_add(1);
        let fails = self.in_a_row == threshold;
        self.failures = self.failures.saturating_add(fails.into());
        fails
    }
}

impl Worker {
    /// Makes a probe that has seen no container yet.
    pub(super) fn new(
        pod: &core::Pod,
        container: &core::Container,
        key: Key,
        probe: &core::Probe,
        node: &Settings,
        metrics: &Metrics,
    ) -> Result<Self, TargetError> {
        let annotations = pod.metadata.annotations.clone().unwrap_or_default();
        let (own, mut problems) = settings::read(&annotations, &container.name, key.kind);
        let target = Target::of(probe, container, own.protocols)?;
        let made_of = Settled::of(pod, container, key.kind, probe);
        let waits = made_of.waits;
        let edge_policy: EdgePolicy = own.edge_policy.unwrap_or(node.edge_policy);
        let params = ProbeParams::from_probe(probe, waits, edge_policy);
        let mode = own.mode.unwrap_or(if node.tcp_by_kernel { TcpMode::Kernel } else { TcpMode::Connect });
        let name = PodName::of(pod);
        let canary = own.canary.unwrap_or(node.canary);
        let queue_rule = settings::queue_rule(key.kind, &own, node.queue_rule, canary);
        let class = pod.spec.as_ref().and_then(|spec| spec.runtime_class_name.clone());
        let timing = Timing::of(probe, &own);
        let wants_kernel = mode == TcpMode::Kernel && matches!(target, Target::Tcp { host: None, .. });
        let period = settings::period(timing.period, wants_kernel);
        if period != timing.period {
            problems.push(format!(
                "the annotations' period of {} ms is only for tcpSocket probes that the kernel answers; the probe \
                 runs once per second",
                timing.period.as_millis()
            ));
        }
        Ok(Self {
            hot: HotState {
                steady: None,
                due: None,
                regular: Duration::ZERO,
                period,
                canary_due: Duration::MAX,
                queues: QueueWatch::new(queue_rule),
                tally: metrics.of_probe(&key, &name),
                looked: (Duration::ZERO, Duration::ZERO),
            },
            state: ProbeState::new(key.kind, &params),
            timeout: timing.timeout,
            container_id: None,
            ip: None,
            wants_kernel,
            runtime_class: class.filter(|class| !class.is_empty() && own.mode != Some(TcpMode::Kernel)),
            has_seen_listener: false,
            tolerated: Tolerated::default(),
            period: timing.period,
            asks_from: Duration::ZERO,
            method: Method::Undecided,
            netns: None,
            edge: None,
            rechecks: 0,
            in_flight: false,
            asking: None,
            revision: 0,
            made_of,
            direct: own.exec.unwrap_or(node.exec) == ExecMode::Direct,
            kept: (own.connections.unwrap_or(node.connections) == Connections::Reuse).then(Slot::default),
            canary_every: if key.kind == ProbeKind::Liveness { canary } else { Duration::ZERO },
            last: None,
            since: None,
            problems,
            target,
            of: ContainerKind::of(pod, &container.name),
            name,
            key,
        })
    }

    /// Returns true if the probe is the one that this container of the pod has now.
    pub(super) fn is_of(&self, pod: &core::Pod, container: &core::Container, probe: &core::Probe) -> bool {
        let Settled { probe: known, waits, annotations } = &self.made_of;
        let all = pod.metadata.annotations.as_ref();
        // Called at every change of the pod's status: nothing is copied.
        known == probe
            && *waits == (container.startup_probe.is_some() && self.key.kind != ProbeKind::Startup)
            && (all.is_none() && annotations.iter().all(Option::is_none)
                || settings::annotations_of(&container.name)
                    .iter()
                    .zip(annotations)
                    .all(|(name, known)| all.and_then(|all| all.get(name)) == known.as_ref()))
    }

    /// Takes over the settings of `new`, which was made for the same container and has not run. Results,
    /// counts and the container stay, as KEP-6318 demands. The caller schedules the next check.
    pub(super) fn reconfigure(&mut self, new: Self) -> Change {
        let other_question = new.target != self.target
            || new.timeout != self.timeout
            || (new.wants_kernel, new.direct) != (self.wants_kernel, self.direct);
        let other_period = new.period != self.period;
        self.state.reconfigure(new.state.params(), other_question);
        (self.target, self.timeout, self.period) = (new.target, new.timeout, new.period);
        (self.wants_kernel, self.direct, self.kept) = (new.wants_kernel, new.direct, new.kept);
        (self.runtime_class, self.problems, self.made_of) = (new.runtime_class, new.problems, new.made_of);
        self.hot.queues = new.hot.queues;
        self.hot.period = settings::period(self.period, self.in_kernel().is_some());
        if self.canary_every != new.canary_every {
            self.canary_every = new.canary_every;
            self.hot.canary_due = if self.canary_every.is_zero() {
                Duration::MAX
            } else {
                now().saturating_add(self.canary_every)
            };
        }
        if other_question {
            self.revision = self.revision.wrapping_add(1);
            self.in_flight = false;
            self.edge = None;
            if let Some(asking) = self.asking.take() {
                asking.abort();
            }
            Change::Question
        } else if other_period {
            Change::Period
        } else {
            Change::Counting
        }
    }

    /// Returns true if the helper should run the command.
    pub(super) fn wants_direct(&self) -> bool {
        self.direct && matches!(self.target, Target::Exec { .. })
    }

    /// Returns true if the kernel should answer when possible.
    pub(super) fn wants_kernel(&self) -> bool {
        self.wants_kernel
    }

    /// The pod's runtime class, where that keeps the kernel from answering.
    pub(super) fn runtime_class(&self) -> Option<&str> {
        self.runtime_class.as_deref()
    }

    /// Sets the source of answers and returns the previous one. Other sources than the kernel are asked less
    /// often.
    pub(super) fn choose(&mut self, method: Method) -> Method {
        let before = std::mem::replace(&mut self.method, method);
        self.has_seen_listener = false;
        self.hot.period = settings::period(self.period, self.in_kernel().is_some());
        before
    }

    /// Judges the port by what a lookup at `at` found, and counts a stall that the probe's rule tolerates.
    /// The second value is true if a stricter rule would have failed the container with this check.
    pub(super) fn judge(&mut self, at: Duration, sighting: Sighting) -> (Verdict, bool) {
        self.has_seen_listener |= matches!(sighting, Sighting::Listening(_));
        let verdict = self.hot.queues.judge(at, self.timeout, sighting);
        let is_stalled = verdict == Verdict::Listening && self.hot.queues.is_stalled(at, self.timeout);
        let threshold = self.state.params().failure_threshold;
        (verdict, self.tolerated.count(at, is_stalled, threshold))
    }

    /// Returns the source of answers.
    pub(super) fn method(&self) -> &Method {
        &self.method
    }

    /// Returns true if a check at `now` that the kernel can't answer may ask the application instead: as
    /// often as if the kernel never answered.
    pub(super) fn may_ask(&mut self, now: Duration) -> bool {
        let may = now >= self.asks_from;
        if may && self.hot.period < settings::SHORTEST_ASKED {
            self.asks_from = now.saturating_add(settings::SHORTEST_ASKED);
        }
        may
    }

    /// Returns the namespace and the port, if the kernel answers.
    pub(super) fn in_kernel(&self) -> Option<(&Arc<CheckedNetns>, u16)> {
        match (&self.method, &self.target) {
            (Method::Kernel(netns), Target::Tcp { port, .. }) => Some((netns, *port)),
            _ => None,
        }
    }

    /// Returns the name of the probe's mode.
    pub(super) fn mode(&self) -> &'static str {
        match self.in_kernel() {
            Some((netns, _)) if netns.is_numbered() => "kernel",
            Some(_) => "sock_diag",
            None if self.wants_direct() => "direct",
            None => self.target.mode(),
        }
    }

    /// Continues with a container whose probe succeeded before the agent's restart.
    pub(super) fn resume(&mut self, started_at: Duration) {
        let kind = self.state.kind();
        self.state = ProbeState::resume(kind, self.state.params(), started_at, ProbeResult::Success);
    }

    /// Starts with another container instance.
    pub(super) fn start(&mut self, id: String, now: Duration) {
        self.container_id = Some(id);
        if let Some(kept) = &mut self.kept {
            *kept = Slot::default();
        }
        self.hot.queues.reset();
        if !self.canary_every.is_zero() {
            // The application gets one interval before its first canary, and the canaries of a node are
            // spread.
            let first = self.canary_every.saturating_add(phase(&self.key, self.canary_every / 4));
            self.hot.canary_due = now.saturating_add(first);
        }
    }

    /// Plans the first check of a container that started at `started_at`, and returns its time. Readiness and
    /// startup probes should succeed as early as possible. A liveness probe can only do harm, so a container
    /// gets one period before the first check, and an application with a failure threshold of one isn't
    /// killed while it still starts. (The kubelet's first check comes at a random moment of the first
    /// period.) Containers from before the agent's start are checked at an offset of their own in the first
    /// period, but at once by the kernel, whose checks are cheap, so that a wrong state is corrected soon.
    pub(super) fn plan(&mut self, started_at: Duration, now: Duration, taken_over: bool) -> Duration {
        let (initial, period) = (self.state.params().initial_delay, self.hot.period);
        let liveness = self.key.kind == ProbeKind::Liveness;
        let at = started_at.saturating_add(if liveness { initial.max(period) } else { initial });
        let spread = now.saturating_add(phase(&self.key, period));
        let kernel = self.in_kernel().is_some();
        let first = if taken_over && !kernel || liveness && at <= now { at.max(spread) } else { at.max(now) };
        self.hot.regular = if kernel { on_grid(first.max(spread), period) } else { first };
        first.min(self.hot.regular)
    }

    /// Returns true if the probe sends canaries at all: the kernel must be able to check that they are
    /// accepted.
    pub(super) fn sends_canaries(&self) -> bool {
        !self.canary_every.is_zero() && self.in_kernel().is_some_and(|(netns, _)| netns.is_numbered())
    }

    /// Returns true if this check is a canary, and then plans the next one.
    pub(super) fn takes_canary(&mut self, now: Duration) -> bool {
        let due = self.sends_canaries() && now >= self.hot.canary_due;
        if due {
            self.hot.canary_due = now.saturating_add(self.canary_every);
        }
        due
    }

    /// The object of the probe's events: its container.
    pub(super) fn object(&self) -> Object {
        Object::Pod {
            name: self.name.clone(),
            uid: self.key.uid.to_string(),
            container: Some(self.key.container.to_string()),
            kind: self.of,
        }
    }

    /// Builds the request to the application or the runtime; `None` without a container.
    pub(super) fn question(&self) -> Option<Question> {
        Some(Question {
            target: self.target.clone(),
            pod_ip: self.ip,
            container_id: self.container_id.clone()?,
            within: self.timeout,
            direct: self.wants_direct(),
            kept: self.kept.clone(),
        })
    }

    /// Returns the target of a lookup.
    pub(super) fn place(&self) -> Option<CheckTarget> {
        let (netns, port) = self.in_kernel()?;
        netns.target((self.ip?, port).into(), None)
    }

    /// Returns true if a success by the kernel at `now` or later would change nothing, until another event.
    pub(super) fn is_steady(&self, now: Duration) -> bool {
        self.state.is_steady(now) && self.edge.is_none() && !self.in_flight && !self.hot.queues.has_waiting()
    }

    /// Counts and records the result of a check.
    pub(super) fn count(&mut self, answer: &Answer, latency: Duration) {
        self.hot.tally.count(answer.outcome, latency);
        self.keep(answer, latency);
    }

    /// Records the result of a check or an edge.
    pub(super) fn keep(&mut self, answer: &Answer, latency: Duration) {
        self.hot.looked = (now(), latency);
        let same = |last: &ProbeRecord| last.outcome == answer.outcome && last.detail == answer.detail;
        if !self.last.as_ref().is_some_and(same) {
            self.last = Some(ProbeRecord { outcome: answer.outcome, detail: answer.detail.clone() });
        }
    }
}

/// Returns the time on the clock of `ProbeState`: `CLOCK_MONOTONIC`, as in the kernel's edges.
pub(super) fn now() -> Duration {
    Duration::from_nanos(monotonic_ns())
}
