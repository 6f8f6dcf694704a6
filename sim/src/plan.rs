//! A plan: everything that happens to a node from outside, in order of time. A seed makes a plan; the
//! shrinker makes shorter ones.

use std::fmt;
use std::time::Duration;

use beelet_tests::apiserver::Verb;
use beelet_tests::cri::Op;
use clap::ValueEnum;
use fastrand::Rng;

use crate::shapes::Pod;

/// Quiet time at the end of a plan, in which the node must converge: more than the judge requires.
const QUIET: Duration = Duration::from_secs(700);

/// Kind of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    /// Static pods only.
    Standalone,
    /// Pods of an API server.
    Cluster,
    /// Both.
    Mixed,
}

/// Something that happens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    /// A user creates a pod, or writes its manifest.
    Create(Pod),
    /// A user deletes a pod with this grace period (None: the pod's own), or removes its manifest.
    Delete { pod: String, grace: Option<u64> },
    /// A user changes the CPU of a pod's first container.
    Resize { pod: String, cpu: u64 },
    /// A process ends.
    Exit { pod: String, container: usize, code: i32, oom: bool },
    /// The probes of a container fail for these seconds.
    Sick { pod: String, container: usize, seconds: u64 },
    /// The sandbox of a pod loses its own process.
    SandboxDies { pod: String },
    /// Calls to the runtime are disturbed.
    Fault(Fault),
    /// Requests to the API server are disturbed.
    ApiFault(ApiFault),
    /// The API server breaks all connections, and refuses new ones for these seconds.
    ApiServerAway { seconds: u64 },
    /// The API server ends all watches, regularly or by breaking their connections; it may have discarded its
    /// history.
    WatchesEnd { broken: bool, compacted: bool },
    /// The runtime restarts, and is away for these seconds.
    RuntimeRestarts { seconds: u64 },
    /// The agent is killed at its n-th changing call from now, before or after the effect, and starts again
    /// after these seconds.
    Kill { calls: u64, after_effect: bool, seconds: u64 },
    /// The agent is killed now, wherever it waits, and starts again after these seconds.
    KillNow { seconds: u64 },
    /// The wall clock steps by these seconds.
    ClockSteps { seconds: i64 },
    /// The machine reboots, and is away for these seconds.
    Reboot { seconds: u64 },
}

/// Disturbance of calls to the runtime.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fault {
    /// The disturbed call; None: all.
    pub(crate) op: Option<Op>,
    pub(crate) kind: FaultKind,
    pub(crate) seconds: u64,
    /// Part of the disturbed calls, in percent.
    pub(crate) percent: u64,
}

/// Kind of a disturbance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// Up to these milliseconds more.
    Slow(u64),
    /// An error, without the effect.
    FailBefore,
    /// An error after the effect.
    FailAfter,
    /// No answer, without the effect.
    Hang,
}

/// Disturbance of requests to the API server.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiFault {
    /// The disturbed operation; None: all.
    pub(crate) verb: Option<Verb>,
    pub(crate) kind: ApiFaultKind,
    pub(crate) seconds: u64,
    /// Part of the disturbed requests, in percent.
    pub(crate) percent: u64,
}

impl ApiFault {
    /// Returns the time for which the fault disturbs the node, in seconds: a slow request of its last moment
    /// ends later.
    pub(crate) fn lasts(&self) -> u64 {
        match self.kind {
            ApiFaultKind::Slow(milliseconds) => self.seconds + milliseconds / 1000 + 1,
            ApiFaultKind::Throttle(seconds) => self.seconds + seconds,
            _ => self.seconds,
        }
    }
}

/// Kind of a disturbance of the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ApiFaultKind {
    /// These milliseconds more.
    Slow(u64),
    /// This HTTP status, without the effect.
    Refuse(u16),
    /// The status 429, with these seconds of `Retry-After`.
    Throttle(u64),
    /// A broken connection, without the effect.
    Drop,
    /// A broken connection after the effect.
    LoseReply,
}

/// A plan.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) scenario: Scenario,
    /// Actions in order of time.
    pub(crate) actions: Vec<(Duration, Action)>,
    /// End of the simulation.
    pub(crate) end: Duration,
    /// True if the runtime streams its events.
    pub(crate) streams: bool,
    /// True if the kernel reports exits.
    pub(crate) kernel: bool,
    /// Number of tasks that the async runtime polls between two looks at timers and the main task: another
    /// number is another order of ready tasks.
    pub(crate) event_interval: u32,
}

impl Plan {
    /// Makes the plan of a seed.
    pub(crate) fn of(seed: u64, scenario: Scenario, length: Duration, pods: usize) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut maker = Maker { made: Vec::new(), number: 0, scenario, most: pods };
        let mut actions = Vec::new();
        let mut at = Duration::from_secs(1);
        while at < length {
            actions.push((at, maker.action(&mut rng)));
            // Bursts and pauses.
            let gap = match rng.u8(0..4) {
                0 => rng.u64(1..200),
                1..=2 => rng.u64(200..20_000),
                _ => rng.u64(20_000..90_000),
            };
            at += Duration::from_millis(gap);
        }
        let event_interval = *rng.choice(&[1, 3, 7, 61]).unwrap_or(&61);
        let (streams, kernel) = (rng.bool(), rng.bool());
        Self { seed, scenario, actions, end: length + QUIET, streams, kernel, event_interval }
    }

    /// Returns the time of the last disturbance's end.
    pub(crate) fn faults_end(&self) -> Duration {
        self.actions.iter().map(|(at, action)| *at + action.lasts()).max().unwrap_or_default()
    }
}

/// Makes actions on the pods that it has made.
struct Maker {
    made: Vec<Pod>,
    number: usize,
    scenario: Scenario,
    most: usize,
}

const DISTURBED: [Option<Op>; 12] = [
    None,
    Some(Op::RunPodSandbox),
    Some(Op::StopPodSandbox),
    Some(Op::RemovePodSandbox),
    Some(Op::CreateContainer),
    Some(Op::StartContainer),
    Some(Op::StopContainer),
    Some(Op::RemoveContainer),
    Some(Op::ListContainers),
    Some(Op::ListPodSandbox),
    Some(Op::ContainerStatus),
    Some(Op::ExecSync),
];

const DISTURBED_VERBS: [Option<Verb>; 7] = [
    None,
    Some(Verb::Get),
    Some(Verb::List),
    Some(Verb::Watch),
    Some(Verb::Create),
    Some(Verb::Patch),
    Some(Verb::Delete),
];

impl Maker {
    fn action(&mut self, rng: &mut Rng) -> Action {
        let full = self.made.len() >= self.most;
        let kind = rng.u8(0..100);
        if self.made.is_empty() || !full && kind < 35 {
            return self.create(rng);
        }
        let place = rng.usize(0..self.made.len());
        let pod = self.made[place].name.clone();
        let container = rng.usize(0..self.made[place].containers.len());
        match kind {
            0..50 => {
                let gone = self.made.swap_remove(place);
                let grace = (!gone.is_static && rng.f64() < 0.4).then(|| rng.u64(0..20));
                Action::Delete { pod, grace }
            }
            50..60 if !self.made[place].is_static => Action::Resize { pod, cpu: 50 * rng.u64(1..30) },
            50..70 => {
                let oom = rng.f64() < 0.3;
                let code = if oom { 137 } else { *rng.choice(&[0, 0, 1, 1, 2, 137, 255]).unwrap_or(&1) };
                Action::Exit { pod, container, code, oom }
            }
            70..76 => Action::Sick { pod, container, seconds: rng.u64(5..120) },
            76..79 => Action::SandboxDies { pod },
            79..85 if self.scenario != Scenario::Standalone => Self::disturb_api_server(rng),
            79..91 => Action::Fault(Self::fault(rng)),
            91..93 => Action::RuntimeRestarts { seconds: rng.u64(1..20) },
            93 => Action::ClockSteps { seconds: rng.i64(-3600..3600) },
            94..99 => {
                let seconds = if rng.bool() { 0 } else { rng.u64(1..120) };
                if rng.u8(0..3) == 0 {
                    return Action::KillNow { seconds };
                }
                Action::Kill { calls: rng.u64(0..8), after_effect: rng.bool(), seconds }
            }
            _ => Action::Reboot { seconds: rng.u64(10..90) },
        }
    }

    fn create(&mut self, rng: &mut Rng) -> Action {
        let is_static = match self.scenario {
            Scenario::Standalone => true,
            Scenario::Cluster => false,
            Scenario::Mixed => rng.bool(),
        };
        self.number += 1;
        let pod = Pod::random(rng, self.number, is_static);
        self.made.push(pod.clone());
        Action::Create(pod)
    }

    fn disturb_api_server(rng: &mut Rng) -> Action {
        match rng.u8(0..10) {
            0..=1 => return Action::ApiServerAway { seconds: rng.u64(1..90) },
            2..=3 => return Action::WatchesEnd { broken: rng.bool(), compacted: rng.bool() },
            _ => {}
        }
        let verb = rng.choice(&DISTURBED_VERBS).copied().flatten();
        let kind = match rng.u8(0..8) {
            0..=2 => ApiFaultKind::Slow(rng.u64(100..40_000)),
            3 => ApiFaultKind::Refuse(*rng.choice(&[403, 409, 500, 503]).unwrap_or(&500)),
            4 => ApiFaultKind::Throttle(rng.u64(1..10)),
            5 => ApiFaultKind::Drop,
            _ => ApiFaultKind::LoseReply,
        };
        let percent = *rng.choice(&[10, 30, 60, 100]).unwrap_or(&30);
        Action::ApiFault(ApiFault { verb, kind, seconds: rng.u64(1..60), percent })
    }

    fn fault(rng: &mut Rng) -> Fault {
        let op = rng.choice(&DISTURBED).copied().flatten();
        let kind = match rng.u8(0..8) {
            0..=2 => FaultKind::Slow(rng.u64(100..8_000)),
            3..=4 => FaultKind::FailBefore,
            5..=6 => FaultKind::FailAfter,
            _ => FaultKind::Hang,
        };
        Fault { op, kind, seconds: rng.u64(1..60), percent: *rng.choice(&[10, 30, 60, 100]).unwrap_or(&30) }
    }
}

impl Action {
    /// Returns the time for which the action disturbs the node.
    fn lasts(&self) -> Duration {
        Duration::from_secs(match self {
            Self::Fault(Fault { seconds, .. })
            | Self::ApiServerAway { seconds }
            | Self::Sick { seconds, .. }
            | Self::RuntimeRestarts { seconds }
            | Self::Kill { seconds, .. }
            | Self::KillNow { seconds }
            | Self::Reboot { seconds } => *seconds,
            Self::ApiFault(fault) => fault.lasts(),
            _ => 0,
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create(pod) => {
                let containers: Vec<String> = pod.containers.iter().map(ToString::to_string).collect();
                let kind = if pod.is_static { "manifest" } else { "pod" };
                write!(f, "create {kind} {} {:?} grace {} s", pod.name, pod.restart, pod.grace)?;
                if let Some(deadline) = pod.deadline {
                    write!(f, " deadline {deadline} s")?;
                }
                write!(f, ": {}", containers.join("; "))
            }
            other => write!(f, "{other:?}"),
        }
    }
}

impl fmt::Display for crate::shapes::Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}m", self.name, self.cpu)?;
        match self.lives {
            Some((seconds, code)) => write!(f, " ends after {seconds} s with {code}")?,
            None => write!(f, " runs")?,
        }
        match self.stops {
            Some(seconds) => write!(f, ", stops in {seconds} s")?,
            None => write!(f, ", ignores SIGTERM")?,
        }
        for (kind, period, failures) in &self.probes {
            write!(f, ", {kind:?} every {period} s x{failures}")?;
        }
        if self.hook {
            write!(f, ", preStop")?;
        }
        Ok(())
    }
}
