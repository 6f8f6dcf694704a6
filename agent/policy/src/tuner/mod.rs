//! The tuner's control law: the cgroup settings to tighten and to relax, so that pods get the resources that
//! they requested in time.
//!
//! Guaranteed and Burstable pods are protected. If one of them waits too long for a CPU or stalls for memory,
//! the tuner first restricts pods without requests (BestEffort), then pods above their request (Burstable,
//! never below it): of both first their turn, then their CPU time. Each tick takes one step; once the
//! protected pods are well again, the steps are reverted in reverse order. Steps do not help a pod that waits
//! for its own threads: after some steps without a gain ([`Help`]) they are reverted, too. Memory returns to
//! a pod that without it does nothing but reclaim ([`Standstill`]). The shape is that of Koordinator's and
//! Katalyst's suppression of best-effort pods, with hysteresis in time ([`Ladder`]) instead of bare
//! thresholds.
//!
//! Decides and gives reasons; must never read or write a cgroup, nor know the file of a [`Knob`] in either
//! cgroup version.

pub mod cold;
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

/// The tuner's level of intervention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TunerMode {
    /// The tuner does not measure anything.
    Off,
    /// The tuner reports the changes that it would make.
    Advise,
    /// The tuner changes cgroups.
    Enforce,
}

/// The kernels on which CPU use is capped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuCaps {
    /// Only if a cap harms no other pod ([`Supports::harmless_caps`]) and the kernel lacks
    /// [`KnobKind::Idle`], in addition to which a cap gains nothing (measured: docs/tuner.md).
    #[default]
    Auto,
    /// On all kernels.
    Always,
}

/// Bounds, step sizes and patience. Percentages are of 100, permilles of 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Law {
    /// Maximum share of time that a container may wait for a CPU (PSI `some`, or run-queue wait of all its
    /// tasks), in excess of its own quota's throttling.
    pub cpu_wait_permille: u32,
    /// Maximum 99th percentile of the container's single waits, in microseconds, if measured.
    pub cpu_wait_p99_us: u64,
    /// Maximum share of time that a container may stall for memory (PSI `some`, or time in reclaim).
    pub memory_stall_permille: u32,
    /// Maximum share of time that a container may be throttled by its own CPU quota before it gets a burst.
    pub throttled_permille: u32,
    /// Share of a bound below which all is well; between that and the bound nothing changes.
    pub release_percent: u32,
    /// Ticks above a bound before a step, and ticks below its request before an idle pod gets its turn back.
    pub hot_ticks: u32,
    /// Ticks below [`Law::release_percent`] before a step back. Doubles while steps back turn out to be too
    /// early.
    pub calm_ticks: u32,
    /// Reduction of a CPU cap per step.
    pub cpu_step_percent: u32,
    /// Kernels with CPU caps.
    pub cpu_caps: CpuCaps,
    /// Reduction of a `memory.high` per step.
    pub memory_step_percent: u32,
    /// Share of the node's CPUs that BestEffort pods keep together.
    pub best_effort_floor_percent: u32,
    /// Memory that any pod keeps, in bytes.
    pub memory_floor: u64,
    /// Share of the node's CPUs below which usage is not worth restricting; BestEffort pods that use less are
    /// no longer idle.
    pub quiet_percent: u32,
    /// Burst of a throttled container, as a share of its quota; 0 for none.
    pub burst_percent: u32,
    /// Steps without a gain for the complaining container after which the last ones are reverted and no more
    /// are taken for it; 0 takes all steps to their end, helpful or not.
    pub helpless_steps: u32,
    /// Minimum reduction of a container's wait or stall that counts as help.
    pub gain_percent: u32,
    /// Ticks after which the tuner tries again to help a container that could not be helped.
    pub retry_ticks: u32,
    /// Ticks that a pod may stand still for memory that was taken from it before it gets the memory back; 0
    /// for no limit.
    pub standstill_ticks: u32,
    /// Weight of BestEffort pods' requests to disks while the tuner runs, below the default of 100; 0 leaves
    /// the owner's weight.
    pub best_effort_disk_weight: u32,
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
            best_effort_disk_weight: 0,
        }
    }
}

/// A setting of one cgroup that the tuner may hold. Prints as `cpu.idle of /kubepods/besteffort`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Knob {
    /// The cgroup, e.g. `/kubepods/besteffort`.
    pub cgroup: String,
    /// The setting.
    pub kind: KnobKind,
}

/// A kind of setting, and the unit of its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum KnobKind {
    /// 1: the cgroup runs only if no other one needs the CPU (`SCHED_IDLE` for a group, kernel 5.15).
    Idle,
    /// A CPU weight on the scale of version 2: 1 is the lowest, in place of [`KnobKind::Idle`] on kernels
    /// that lack it.
    Weight,
    /// Millicores, as a quota.
    CpuCap,
    /// Bytes above which allocations are slowed down and reclaimed (cgroup v2).
    MemoryHigh,
    /// Microseconds by which a quota may be exceeded, saved in earlier periods (kernel 5.14).
    Burst,
    /// A weight of the cgroup's requests to disks; 100 is the kernel's default.
    DiskWeight,
}

/// Features of this kernel and this cgroup version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Supports {
    /// [`KnobKind::Idle`].
    pub idle: bool,
    /// True if a [`KnobKind::CpuCap`] stops no thread within the kernel. Before Linux 6.18 a cap does, and
    /// makes others wait longer (measured: docs/tuner.md).
    pub harmless_caps: bool,
    /// [`KnobKind::MemoryHigh`].
    pub memory_high: bool,
    /// [`KnobKind::Burst`].
    pub burst: bool,
    /// [`KnobKind::DiskWeight`]: iocost or BFQ is part of the kernel.
    pub disk_weight: bool,
    /// [`KnobKind::Weight`] and [`KnobKind::Idle`] of pods: true if this agent owns the pods' cgroups, and
    /// they have an effect.
    pub weights: bool,
}

/// A node at one tick. Rates are averages since the previous tick.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observed {
    /// The node's CPUs in millicores.
    pub cpus: u64,
    /// The cgroup of all BestEffort pods.
    pub best_effort: String,
    /// Millicores that BestEffort pods use together.
    pub best_effort_used: u64,
    /// Settings that this node supports.
    pub supports: Supports,
    /// The pods with running containers.
    pub pods: Vec<PodSample>,
}

/// A pod at one tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSample {
    /// `namespace/name`, for the reasons.
    pub name: String,
    /// The pod's class: Guaranteed and Burstable are protected, BestEffort and Burstable may be restricted.
    pub class: QosClass,
    /// The pod's cgroup.
    pub cgroup: String,
    /// Requested millicores.
    pub cpu_request: u64,
    /// Used millicores; `None` at the first tick.
    pub cpu_used: Option<u64>,
    /// True if the pod can be capped. On version 1 the kernel refuses a cap below a container's own quota.
    pub can_cap: bool,
    /// Microseconds of CPU per period that limit all its containers together.
    pub quota_us: Option<u64>,
    /// Requested bytes.
    pub memory_request: u64,
    /// Charged bytes.
    pub memory_used: u64,
    /// Bytes in real use: without those that the pod could release at once.
    pub working_set: u64,
    /// Share of time in which all non-idle tasks of the pod stalled for memory.
    pub memory_still_permille: Option<u32>,
    /// The pod's share of the growth that made others reclaim, in permille, by the pages that its threads
    /// freed recently. `None`: not measured.
    pub memory_growth_permille: Option<u32>,
    /// The pod's running containers.
    pub containers: Vec<ContainerSample>,
}

/// A running container at one tick. Values not measured are `None` and decide nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerSample {
    /// The container's name in the pod.
    pub name: String,
    /// The container's cgroup.
    pub cgroup: String,
    /// Share of time in which its tasks waited for a CPU.
    pub cpu_wait_permille: Option<u32>,
    /// The 99th percentile of single waits, in microseconds.
    pub cpu_wait_p99_us: Option<u64>,
    /// Share of time in which its own quota throttled it.
    pub throttled_permille: Option<u32>,
    /// Share of time in which it stalled for memory.
    pub memory_stall_permille: Option<u32>,
    /// True if the container is close enough to its own memory limit to cause its stalls itself.
    pub at_memory_limit: bool,
    /// Microseconds of CPU per period that limit the container.
    pub quota_us: Option<u64>,
    /// The pods that used the CPUs while the container waited, by their cgroups, each with its share of the
    /// wait in permille. The rest is due to the container's own quota, the machine, or an unknown cause.
    /// `None`: not measured.
    pub held_by: Option<BTreeMap<String, u32>>,
}

/// The tuner's state between ticks. Losing it costs some ticks, nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct State {
    /// Progress of CPU trouble.
    pub cpu: Ladder,
    /// Progress of memory trouble.
    pub memory: Ladder,
    /// Progress of throttling of each container by its own quota, by its cgroup.
    pub throttled: BTreeMap<String, Ladder>,
    /// Effect of CPU steps on the containers that they were for, by the container's cgroup.
    pub cpu_help: BTreeMap<String, Help>,
    /// Effect of memory steps likewise.
    pub memory_help: BTreeMap<String, Help>,
    /// Pods that stand still, or recently did, for memory that was taken from them, by their cgroups.
    pub standstill: BTreeMap<String, Standstill>,
    /// Idle pods that get less than they request, by their cgroups: the number of consecutive ticks.
    pub falling_short: BTreeMap<String, u32>,
    /// Pods that got less than they request while idle, by their cgroups: the ticks since.
    pub fell_short: BTreeMap<String, u32>,
    /// Values of the settings that the tuner holds.
    pub held: BTreeMap<Knob, u64>,
}

impl State {
    /// Returns true if no held setting restricts any pod, and no effect of steps is being measured: a
    /// container that does not suffer and has no burst then makes no difference to a decision.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        self.held.keys().all(|knob| matches!(knob.kind, KnobKind::Burst | KnobKind::DiskWeight))
            && self.cpu_help.is_empty()
            && self.memory_help.is_empty()
    }

    /// Returns true if nothing requires this setting now: the ladders of the containers in its cgroup decide
    /// for a burst, the node's ladders for all others.
    #[must_use]
    pub fn is_calm_for(&self, knob: &Knob) -> bool {
        match knob.kind {
            KnobKind::Burst => {
                let is_within = |cgroup: &str| Path::new(cgroup).starts_with(&knob.cgroup);
                self.throttled.iter().all(|(cgroup, ladder)| ladder.is_calm() || !is_within(cgroup))
            }
            // Held for as long as the tuner runs.
            KnobKind::DiskWeight => false,
            KnobKind::Idle | KnobKind::Weight | KnobKind::CpuCap | KnobKind::MemoryHigh => {
                self.cpu.is_calm() && self.memory.is_calm()
            }
        }
    }
}

/// A change of a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunerStep {
    /// The setting.
    pub knob: Knob,
    /// Value held before; `None` for the owner's value.
    pub from: Option<u64>,
    /// New value; `None` for the owner's value.
    pub to: Option<u64>,
    /// Explanation for users.
    pub reason: String,
}

/// The result of one tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// State for the next tick.
    pub state: State,
    /// Changes to make, in this order.
    pub steps: Vec<TunerStep>,
    /// Explanations of the node's condition, even without a step: the worst of CPU, then of memory.
    pub findings: Vec<String>,
}

/// Decides one tick. `blocked` are knobs to leave alone, because another process set them.
#[must_use]
pub fn decide(law: &Law, state: &State, seen: &Observed, blocked: &BTreeSet<Knob>) -> Decision {
    round::Round::new(law, state, seen, blocked).decide()
}

#[cfg(test)]
mod tests;
