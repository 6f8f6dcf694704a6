//! One probe of one container: what it looks at, when, and what it has found.

use std::{net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use beelet_policy::probe::{
    EdgePolicy, Outcome, ProbeKind, ProbeParams, ProbeResult, ProbeState,
    listener::{QueueWatch, Sighting, Verdict},
    settings::{self, TcpMode},
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;

use super::{
    Settings,
    answer::Answer,
    ask::Question,
    hot::HotState,
    ids::Key,
    metrics::Metrics,
    target::{Target, TargetError, Timing},
    timetable::{on_grid, phase},
};
use beelet_base::clock::monotonic_ns;
use beelet_bpf::{CheckTarget, CheckedNetns};
use beelet_model::{pod::ContainerKind, table::PodName};
use beelet_state::events::Object;

/// What a look found, for people.
#[derive(Clone, Debug)]
pub(super) struct ProbeRecord {
    pub outcome: Outcome,
    pub detail: String,
}

/// What answers.
#[derive(Clone, Debug)]
pub(super) enum Method {
    /// Not known before the container runs.
    Undecided,
    /// The application, or the runtime. The sentence says why not the kernel, where it was to answer.
    Ask(Option<String>),
    /// The kernel, in that namespace.
    Kernel(Arc<CheckedNetns>),
}

/// What an edge announced, until a look confirms it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hint {
    /// A listener came.
    Opened,
    /// The listener with this cookie went.
    Closed(u64),
    /// Edges may have been missed.
    Missed,
    /// A listener is gone, and the container may be ending.
    Gone,
}

#[derive(Debug)]
pub(super) struct Worker {
    pub key: Key,
    /// Which of the pod's lists its container is in.
    pub of: ContainerKind,
    pub name: PodName,
    pub hot: HotState,
    pub state: ProbeState,
    pub target: Target,
    /// The longest wait for an answer.
    pub timeout: Duration,
    /// The container instance under the probe; `None` between two instances.
    pub container_id: Option<String>,
    pub ip: Option<IpAddr>,
    /// True if the kernel should answer, by the node's configuration and the annotations.
    wants_kernel: bool,
    /// The pod's runtime class, unless an annotation asks for the kernel: such a pod's sockets may be in a
    /// network stack that the pod's network namespace does not have (gVisor, Kata).
    runtime_class: Option<String>,
    /// True once the kernel has had a listener on the port in the pod's network namespace. Before that, the
    /// absence of a listener may only mean that the pod's sockets are somewhere else.
    pub has_seen_listener: bool,
    /// Looks at a stalled listener that count as successes.
    pub tolerated: Tolerated,
    method: Method,
    /// The time between two looks that the pod wants.
    period: Duration,
    /// When something else may be asked where the kernel can't say.
    asks_from: Duration,
    /// The namespace that the way was chosen for; `None` for the host's own.
    pub netns: Option<PathBuf>,
    /// An edge that is to be judged by the next look, and when it came, `CLOCK_MONOTONIC` nanoseconds.
    pub edge: Option<(Hint, u64)>,
    /// How often that look has come too early.
    pub rechecks: u8,
    pub in_flight: bool,
    canary_every: Duration,
    /// What the last look found.
    pub last: Option<ProbeRecord>,
    pub since: Option<Timestamp>,
    /// What of the annotations can't be read.
    pub problems: Vec<String>,
}

/// Looks that found a stalled listener and count as successes, since a connection would have succeeded: the
/// failures that a stricter `QueueRule` would have seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tolerated {
    /// Looks.
    pub looks: u64,
    /// Times that `failureThreshold` such looks came in a row.
    pub failures: u64,
    /// The last one, on the clock of `ProbeState`.
    pub last: Option<Duration>,
    in_a_row: u32,
}

impl Tolerated {
    /// Counts one look at `now`. Returns true if the probe would have failed the container with it.
    fn count(&mut self, now: Duration, is_stalled: bool, threshold: u32) -> bool {
        if !is_stalled {
            self.in_a_row = 0;
            return false;
        }
        self.looks = self.looks.saturating_add(1);
        self.last = Some(now);
        self.in_a_row = self.in_a_row.saturating_add(1);
        let fails = self.in_a_row == threshold;
        self.failures = self.failures.saturating_add(fails.into());
        fails
    }
}

impl Worker {
    /// A probe that has seen no container yet; why not, if it can't be run.
    pub(super) fn new(
        pod: &core::Pod,
        container: &core::Container,
        key: Key,
        probe: &core::Probe,
        node: &Settings,
        metrics: &Metrics,
    ) -> Result<Self, TargetError> {
        let target = Target::of(probe, container)?;
        let annotations = pod.metadata.annotations.clone().unwrap_or_default();
        let (own, mut problems) = settings::read(&annotations, &container.name, key.kind);
        let waits = container.startup_probe.is_some() && key.kind != ProbeKind::Startup;
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
                 looks once per second",
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

    /// Returns true if the kernel should answer, could it.
    pub(super) fn wants_kernel(&self) -> bool {
        self.wants_kernel
    }

    /// The pod's runtime class, where that keeps the kernel from answering.
    pub(super) fn runtime_class(&self) -> Option<&str> {
        self.runtime_class.as_deref()
    }

    /// Sets what answers from now on, and returns what did before. The longer minimum period holds for
    /// everything but the kernel.
    pub(super) fn choose(&mut self, method: Method) -> Method {
        let before = std::mem::replace(&mut self.method, method);
        self.has_seen_listener = false;
        self.hot.period = settings::period(self.period, self.in_kernel().is_some());
        before
    }

    /// Judges the port by what a lookup at `at` found, and counts a stall that the probe's rule tolerates.
    /// The second value is true if a stricter rule would have failed the container with this look.
    pub(super) fn judge(&mut self, at: Duration, sighting: Sighting) -> (Verdict, bool) {
        self.has_seen_listener |= matches!(sighting, Sighting::Listening(_));
        let verdict = self.hot.queues.judge(at, self.timeout, sighting);
        let is_stalled = verdict == Verdict::Listening && self.hot.queues.is_stalled(at, self.timeout);
        let threshold = self.state.params().failure_threshold;
        (verdict, self.tolerated.count(at, is_stalled, threshold))
    }

    /// What was chosen to answer.
    pub(super) fn method(&self) -> &Method {
        &self.method
    }

    /// Returns true if a look at `now` that the kernel can't answer may ask instead: as often as if the
    /// kernel never could.
    pub(super) fn may_ask(&mut self, now: Duration) -> bool {
        let may = now >= self.asks_from;
        if may && self.hot.period < settings::SHORTEST_ASKED {
            self.asks_from = now.saturating_add(settings::SHORTEST_ASKED);
        }
        may
    }

    /// The port and the namespace, where the kernel answers.
    pub(super) fn in_kernel(&self) -> Option<(&Arc<CheckedNetns>, u16)> {
        match (&self.method, &self.target) {
            (Method::Kernel(netns), Target::Tcp { port, .. }) => Some((netns, *port)),
            _ => None,
        }
    }

    /// What answers, in a word.
    pub(super) fn mode(&self) -> &'static str {
        match self.in_kernel() {
            Some((netns, _)) if netns.is_numbered() => "kernel",
            Some(_) => "sock_diag",
            None => self.target.mode(),
        }
    }

    /// Goes on with a container that was fine before the agent's restart.
    pub(super) fn resume(&mut self, started_at: Duration) {
        let kind = self.state.kind();
        self.state = ProbeState::resume(kind, self.state.params(), started_at, ProbeResult::Success);
    }

    /// Another container instance runs.
    pub(super) fn start(&mut self, id: String, now: Duration) {
        self.container_id = Some(id);
        self.hot.queues.reset();
        if !self.canary_every.is_zero() {
            // The application gets one interval before its first canary, and the canaries of a node are
            // spread.
            let first = self.canary_every.saturating_add(phase(&self.key, self.canary_every / 4));
            self.hot.canary_due = now.saturating_add(first);
        }
    }

    /// The time of the first look at a container that started at `started_at`. Readiness and startup want
    /// good news at once. Liveness can only bring bad news, so a container gets one period before the first
    /// of it, and an application that fails on its first failure isn't killed while it still starts. (The
    /// kubelet's first look comes at a random moment of the first period.) What ran before this agent did is
    /// asked at a moment of its own in the first period; the kernel, which it costs nothing, at once, so that
    /// nothing wrong is said for long.
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

    /// Returns true if canaries go to this probe's target at all: the kernel must be able to say whether they
    /// are accepted.
    pub(super) fn sends_canaries(&self) -> bool {
        !self.canary_every.is_zero() && self.in_kernel().is_some_and(|(netns, _)| netns.is_numbered())
    }

    /// Returns true if this look is to be a canary; if so, the next one is planned.
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

    /// What to ask, and of which container.
    pub(super) fn question(&self) -> Option<Question> {
        Some(Question {
            target: self.target.clone(),
            pod_ip: self.ip,
            container_id: self.container_id.clone()?,
            within: self.timeout,
        })
    }

    /// The target of a lookup.
    pub(super) fn place(&self) -> Option<CheckTarget> {
        let (netns, port) = self.in_kernel()?;
        netns.target((self.ip?, port).into(), None)
    }

    /// Returns true if a success of the kernel's at `now` or later, until anything else happens, would change
    /// nothing.
    pub(super) fn is_steady(&self, now: Duration) -> bool {
        self.state.is_steady(now) && self.edge.is_none() && !self.in_flight && !self.hot.queues.has_waiting()
    }

    /// Keeps what a look found, and counts it.
    pub(super) fn count(&mut self, answer: &Answer, latency: Duration) {
        self.hot.tally.count(answer.outcome, latency);
        self.keep(answer, latency);
    }

    /// Keeps what a look or an edge found.
    pub(super) fn keep(&mut self, answer: &Answer, latency: Duration) {
        self.hot.looked = (now(), latency);
        let same = |last: &ProbeRecord| last.outcome == answer.outcome && last.detail == answer.detail;
        if !self.last.as_ref().is_some_and(same) {
            self.last = Some(ProbeRecord { outcome: answer.outcome, detail: answer.detail.clone() });
        }
    }
}

/// The clock of `ProbeState`: `CLOCK_MONOTONIC`, the kernel's edges' own.
pub(super) fn now() -> Duration {
    Duration::from_nanos(monotonic_ns())
}
