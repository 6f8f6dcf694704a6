//! The tuner's control law: which cgroup settings to tighten, and which to give back, so that the pods that
//! asked for something get it in time.
//!
//! Protected are Guaranteed and Burstable pods. When one of them waits too long for a CPU or stalls for
//! memory, what was promised nothing is squeezed first (BestEffort), then what uses more than it requested
//! (Burstable, never below its request): of both first the turn, then the time. Each tick takes one step;
//! when they are well again, it is given back in the reverse order. A pod that waits for its own threads is
//! not helped by that: after some steps without a gain ([`Help`]) they are given back as well, and so is
//! memory to a pod that does nothing but reclaim without it ([`Standstill`]). The shape is the one of
//! Koordinator's and Katalyst's suppression of best-effort pods, with hysteresis in time ([`Ladder`])
//! instead of bare thresholds.
//!
//! Decides and says why; must never read or write a cgroup, nor know which file of which version a [`Knob`]
//! is.

pub mod reclaim;
pub mod scheduler;

mod help;
mod ladder;
mod round;
mod standstill;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

pub use help::Help;
pub use ladder::{Heat, Ladder};
pub use standstill::Standstill;

use crate::resources::qos::QosClass;

/// How far the tuner goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TunerMode {
    /// It measures nothing.
    Off,
    /// It says what it would do.
    Advise,
    /// It changes cgroups.
    Enforce,
}

/// On which kernels CPU use is capped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuCaps {
    /// Where a cap harms nobody else ([`Supports::harmless_caps`]), and there is no [`KnobKind::Idle`],
    /// beside which it gains nothing (measured: docs/tuner.md).
    #[default]
    Auto,
    /// Everywhere.
    Always,
}

/// Bounds, step sizes and patience. Percentages are of 100, permilles of 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Law {
    /// A container may wait for a CPU this much of the time (PSI `some`, or run-queue wait of all its tasks),
    /// beyond what its own quota takes.
    pub cpu_wait_permille: u32,
    /// The 99th percentile of its single waits, in microseconds, where it is measured.
    pub cpu_wait_p99_us: u64,
    /// A container may stall for memory this much of the time (PSI `some`, or time in reclaim).
    pub memory_stall_permille: u32,
    /// A container may be held back by its own CPU quota this much of the time before it is lent a burst.
    pub throttled_permille: u32,
    /// All is well only below this part of a bound; between it and the bound nothing changes.
    pub release_percent: u32,
    /// Ticks above a bound before a step, and below what an idle pod requests before it has its turn again.
    pub hot_ticks: u32,
    /// Ticks below [`Law::release_percent`] before a step back. Doubles while steps back turn out to be too
    /// early.
    pub calm_ticks: u32,
    /// How much of a CPU cap one step takes away.
    pub cpu_step_percent: u32,
    /// Where there are CPU caps at all.
    pub cpu_caps: CpuCaps,
    /// How much of a `memory.high` one step takes away.
    pub memory_step_percent: u32,
    /// What BestEffort pods together keep of the node's CPUs.
    pub best_effort_floor_percent: u32,
    /// What any pod keeps of memory, in bytes.
    pub memory_floor: u64,
    /// Less use of the node's CPUs than this is not worth squeezing, and BestEffort pods that use less get
    /// cpu.idle back.
    pub quiet_percent: u32,
    /// How much of its quota a throttled container may burst by; 0: never.
    pub burst_percent: u32,
    /// So many steps without a gain for the one who complains: the last ones are given back, and no more are
    /// made for it; 0: each goes to its end, helpful or not.
    pub helpless_steps: u32,
    /// How much less a container must wait or stall for steps to have helped it.
    pub gain_percent: u32,
    /// Ticks after which a container that could not be helped is tried again.
    pub retry_ticks: u32,
    /// Ticks that a pod may stand still for memory that was taken from it; then it is given back. 0: any
    /// number.
    pub standstill_ticks: u32,
}

impl Default for Law {
    fn default() -> Self {
        Self {
            cpu_wait_permille: 50,
            cpu_wait_p99_us: 5_000,
            memory_stall_permille: 20,
            throttled_permille: 50,
            release_percent: 50,
            hot_ticks: 2,
            calm_ticks: 10,
            cpu_step_percent: 25,
            cpu_caps: CpuCaps::Auto,
            memory_step_percent: 10,
            best_effort_floor_percent: 10,
            memory_floor: 64 << 20,
            quiet_percent: 2,
            burst_percent: 100,
            helpless_steps: 3,
            gain_percent: 10,
            retry_ticks: 1200,
            standstill_ticks: 20,
        }
    }
}

/// A setting of one cgroup that the tuner may hold. Prints as `cpu.idle of /kubepods/besteffort`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Knob {
    /// The cgroup, e.g. `/kubepods/besteffort`.
    pub cgroup: String,
    /// Which of its settings.
    pub kind: KnobKind,
}

/// What a knob sets, and the unit of its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum KnobKind {
    /// 1: runs only when nothing else wants the CPU (`SCHED_IDLE` for a group, kernel 5.15).
    Idle,
    /// A CPU weight, as version 2 counts it: 1 is the least, in place of [`KnobKind::Idle`] where there is
    /// none.
    Weight,
    /// Millicores, as a quota.
    CpuCap,
    /// Bytes above which allocations are slowed down and reclaimed (cgroup v2).
    MemoryHigh,
    /// Microseconds that a quota may be exceeded by, saved in earlier periods (kernel 5.14).
    Burst,
}

/// What this kernel and this cgroup version offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Supports {
    /// [`KnobKind::Idle`].
    pub idle: bool,
    /// A [`KnobKind::CpuCap`] stops no thread within the kernel, as it does before Linux 6.18, where
    /// caps make others wait longer (measured: docs/tuner.md).
    pub harmless_caps: bool,
    /// [`KnobKind::MemoryHigh`].
    pub memory_high: bool,
    /// [`KnobKind::Burst`].
    pub burst: bool,
    /// [`KnobKind::Weight`] and [`KnobKind::Idle`] of pods: theirs is the tuner's owner's to set.
    pub weights: bool,
}

/// A node at one tick. Rates are averages since the tick before.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observed {
    /// The node's CPUs in millicores.
    pub cpus: u64,
    /// The cgroup of all BestEffort pods.
    pub best_effort: String,
    /// What they use together, in millicores.
    pub best_effort_used: u64,
    /// What can be set here.
    pub supports: Supports,
    /// The pods with running containers.
    pub pods: Vec<PodSample>,
}

/// One pod at one tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSample {
    /// `namespace/name`, for the reasons.
    pub name: String,
    /// Its class: Guaranteed and Burstable are protected, BestEffort and Burstable may be squeezed.
    pub class: QosClass,
    /// Its cgroup.
    pub cgroup: String,
    /// Millicores it requests.
    pub cpu_request: u64,
    /// Millicores it uses; None at the first tick.
    pub cpu_used: Option<u64>,
    /// Whether a cap can be put on the pod. On version 1 the kernel refuses one below a container's own
    /// quota.
    pub can_cap: bool,
    /// Microseconds of CPU a period that all its containers together are limited to.
    pub quota_us: Option<u64>,
    /// Bytes it requests.
    pub memory_request: u64,
    /// Bytes it is charged with.
    pub memory_used: u64,
    /// Bytes it really needs: less what it could give back at once.
    pub working_set: u64,
    /// How much of the time all its tasks that could have done something stood still for memory.
    pub memory_still_permille: Option<u32>,
    /// Its part of the growth that made others reclaim, in permille, as its threads freed pages lately.
    /// `None`: not measured.
    pub memory_growth_permille: Option<u32>,
    /// Its running containers.
    pub containers: Vec<ContainerSample>,
}

/// One running container at one tick. What isn't measured is None and decides nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerSample {
    /// Its name in the pod.
    pub name: String,
    /// Its cgroup.
    pub cgroup: String,
    /// How much of the time its tasks waited for a CPU.
    pub cpu_wait_permille: Option<u32>,
    /// The 99th percentile of single waits, in microseconds.
    pub cpu_wait_p99_us: Option<u64>,
    /// How much of the time its own quota held it back.
    pub throttled_permille: Option<u32>,
    /// How much of the time it stalled for memory.
    pub memory_stall_permille: Option<u32>,
    /// It is so near its own memory limit that its stalls are of its own making.
    pub at_memory_limit: bool,
    /// Microseconds of CPU a period that it is limited to.
    pub quota_us: Option<u64>,
    /// The pods that had the CPUs while it waited, by their cgroups, each with its share of the wait in
    /// permille. The rest was its own quota's, the machine's, or nobody knows whose. `None`: not measured.
    pub held_by: Option<BTreeMap<String, u32>>,
}

/// What the tuner carries from tick to tick. Losing it costs some ticks, nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct State {
    /// How far along CPU trouble is.
    pub cpu: Ladder,
    /// The same for memory.
    pub memory: Ladder,
    /// The same for each container that its own quota throttles, by its cgroup.
    pub throttled: BTreeMap<String, Ladder>,
    /// Whether taking CPU from others has helped those for whom it was, by the container's cgroup.
    pub cpu_help: BTreeMap<String, Help>,
    /// The same for memory.
    pub memory_help: BTreeMap<String, Help>,
    /// Pods that stand still for memory that was taken from them, or did, by their cgroups.
    pub standstill: BTreeMap<String, Standstill>,
    /// Pods that are idle and get less than they request, by their cgroups: for how many ticks in a row.
    pub falling_short: BTreeMap<String, u32>,
    /// Pods that got less than they request while they were idle, by their cgroups: the ticks since.
    pub fell_short: BTreeMap<String, u32>,
    /// What is set otherwise than its owner would, and to what.
    pub held: BTreeMap<Knob, u64>,
}

impl State {
    /// Returns true if nothing is held that takes from anybody, and nothing is known of whom that has helped:
    /// then a container that doesn't suffer and is lent no burst makes no difference to a decision.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        self.held.keys().all(|knob| knob.kind == KnobKind::Burst)
            && self.cpu_help.is_empty()
            && self.memory_help.is_empty()
    }

    /// Returns true if nothing calls for this setting now: of a burst the ladders of the containers in its
    /// cgroup say so, of all others the node's.
    #[must_use]
    pub fn is_calm_for(&self, knob: &Knob) -> bool {
        match knob.kind {
            KnobKind::Burst => {
                let is_within = |cgroup: &str| Path::new(cgroup).starts_with(&knob.cgroup);
                self.throttled.iter().all(|(cgroup, ladder)| ladder.is_calm() || !is_within(cgroup))
            }
            KnobKind::Idle | KnobKind::Weight | KnobKind::CpuCap | KnobKind::MemoryHigh => {
                self.cpu.is_calm() && self.memory.is_calm()
            }
        }
    }
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunerStep {
    /// What is changed.
    pub knob: Knob,
    /// What the tuner held it at; None: its owner's value stood.
    pub from: Option<u64>,
    /// What it is to be; None: the owner's value again.
    pub to: Option<u64>,
    /// Why, in words for a person.
    pub reason: String,
}

/// What comes of one tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// To be carried to the next tick.
    pub state: State,
    /// What to change, in this order.
    pub steps: Vec<TunerStep>,
    /// How things stand, in words, even when nothing is to be done: the worst of CPU, then of memory.
    pub findings: Vec<String>,
}

/// One tick. `blocked` are knobs that must be left alone, because somebody else set them.
#[must_use]
pub fn decide(law: &Law, state: &State, seen: &Observed, blocked: &BTreeSet<Knob>) -> Decision {
    round::Round::new(law, state, seen, blocked).decide()
}

#[cfg(test)]
mod tests;
