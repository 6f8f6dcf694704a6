//! Which files of which cgroup version a knob is.

use beelet_policy::tuner::{Knob, KnobKind, Supports};

use beelet_base::kernel_release;
use beelet_cgroups::{Cgroups, Version};

/// One file that a knob takes from its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    /// The file.
    pub(super) file: &'static str,
    /// What is written; None: nothing, but nothing else may write it meanwhile.
    pub(super) value: Option<String>,
}

impl Setting {
    fn new(file: &'static str, value: &impl ToString) -> Self {
        Self { file, value: Some(value.to_string()) }
    }
}

/// The kernel takes no shorter quota, in microseconds.
const SHORTEST_QUOTA: u64 = 1000;

/// The files of `knob`, and what they are to hold for `value`. They are given back in the same order.
pub(super) fn settings(cgroups: &Cgroups, knob: &Knob, value: u64) -> Vec<Setting> {
    let v2 = cgroups.version() == Version::V2;
    let weight = if v2 { "cpu.weight" } else { "cpu.shares" };
    match knob.kind {
        // While a cgroup is idle the kernel refuses a weight, and it forgets the one there was
        // (kernel/sched/fair.c, `sched_group_set_idle`): it is written again once the cgroup is not idle any
        // more, and so comes after it.
        KnobKind::Idle => vec![Setting::new("cpu.idle", &value), Setting { file: weight, value: None }],
        KnobKind::Weight if v2 => vec![Setting::new(weight, &value)],
        // The kubelet's formula backwards: weights 1 to 10,000 onto shares 2 to 262,144.
        KnobKind::Weight => {
            vec![Setting::new(weight, &(2 + (value.clamp(1, 10_000) - 1) * 262_142 / 9999))]
        }
        KnobKind::CpuCap => {
            let quota = |period: u64| (value * period / 1000).max(SHORTEST_QUOTA);
            let number = |file| cgroups.read(&knob.cgroup, file).and_then(|text| text.parse::<u64>().ok());
            if v2 {
                let period = cgroups.owners_value(&knob.cgroup, "cpu.max");
                let period = period.and_then(|max| max.split(' ').nth(1)?.parse().ok()).unwrap_or(100_000);
                vec![Setting::new("cpu.max", &format!("{} {period}", quota(period)))]
            } else {
                vec![Setting::new("cpu.cfs_quota_us", &quota(number("cpu.cfs_period_us").unwrap_or(100_000)))]
            }
        }
        KnobKind::MemoryHigh => vec![Setting::new("memory.high", &value)],
        KnobKind::Burst => vec![Setting::new(burst_file(cgroups), &value)],
    }
}

/// The knob that a file belongs to, by itself: the weight that is held beside `cpu.idle` is one of its own
/// here.
pub(super) fn kind_of(file: &str) -> Option<KnobKind> {
    Some(match file {
        "cpu.idle" => KnobKind::Idle,
        "cpu.weight" | "cpu.shares" => KnobKind::Weight,
        "cpu.max" | "cpu.cfs_quota_us" => KnobKind::CpuCap,
        "memory.high" => KnobKind::MemoryHigh,
        "cpu.max.burst" | "cpu.cfs_burst_us" => KnobKind::Burst,
        _ => return None,
    })
}

/// From this release on, a thread that its quota stops runs on until it leaves the kernel ("sched/fair:
/// Switch to task based throttle model").
const STOPS_OUTSIDE: (u32, u32) = (6, 18);

/// What this machine offers, by the files that the cgroup of BestEffort pods has, and the kernel's release.
pub(super) fn supports(cgroups: &Cgroups, best_effort: &str) -> Supports {
    let has = |file: &str| cgroups.read(best_effort, file).is_some();
    Supports {
        idle: has("cpu.idle"),
        harmless_caps: kernel_release::running() >= STOPS_OUTSIDE,
        memory_high: cgroups.version() == Version::V2 && has("memory.high"),
        burst: has(burst_file(cgroups)),
        weights: true,
    }
}

fn burst_file(cgroups: &Cgroups) -> &'static str {
    if cgroups.version() == Version::V2 { "cpu.max.burst" } else { "cpu.cfs_burst_us" }
}

/// The quota of a cgroup in microseconds per period; None: it has none.
pub(super) fn quota(cgroups: &Cgroups, cgroup: &str) -> Option<u64> {
    let file = if cgroups.version() == Version::V2 { "cpu.max" } else { "cpu.cfs_quota_us" };
    // `max` and `-1` are no numbers.
    cgroups.owners_value(cgroup, file)?.split(' ').next()?.parse().ok()
}
