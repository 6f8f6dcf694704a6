//! The files of a knob in each cgroup version.

use beelet_policy::tuner::{Knob, KnobKind, Supports};

use beelet_base::kernel_release;
use beelet_cgroups::{Cgroups, Version, held};

/// A file that a knob changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    /// The file.
    pub(super) file: &'static str,
    /// The value to write; `None` to only keep other writers off.
    pub(super) value: Option<String>,
}

impl Setting {
    fn new(file: &'static str, value: &impl ToString) -> Self {
        Self { file, value: Some(value.to_string()) }
    }
}

/// The shortest quota in the kernel, in microseconds.
const SHORTEST_QUOTA: u64 = 1000;

/// Returns the files of `knob`, and their contents for `value`, in the order of restoring them.
pub(super) fn settings(cgroups: &Cgroups, knob: &Knob, value: u64) -> Vec<Setting> {
    let v2 = cgroups.paths.version() == Version::V2;
    let weight = if v2 { "cpu.weight" } else { "cpu.shares" };
    match knob.kind {
        // The kernel refuses a weight while a cgroup is idle, and drops the earlier one (kernel/sched/fair.c,
        // `sched_group_set_idle`): the weight is rewritten once the cgroup is no longer idle, and so comes
        // second.
        KnobKind::Idle => vec![Setting::new("cpu.idle", &value), Setting { file: weight, value: None }],
        KnobKind::Weight if v2 => vec![Setting::new(weight, &value)],
        // The kubelet's formula inverted: weights 1 to 10,000 map to shares 2 to 262,144.
        KnobKind::Weight => {
            vec![Setting::new(weight, &(2 + (value.clamp(1, 10_000) - 1) * 262_142 / 9999))]
        }
        KnobKind::CpuCap => {
            let quota = |period: u64| (value * period / 1000).max(SHORTEST_QUOTA);
            let number = |file| cgroups.read(&knob.cgroup, file).and_then(|text| text.parse::<u64>().ok());
            if v2 {
                let period = held::owners_value(cgroups, &knob.cgroup, "cpu.max");
                let period = period.and_then(|max| max.split(' ').nth(1)?.parse().ok()).unwrap_or(100_000);
                vec![Setting::new("cpu.max", &format!("{} {period}", quota(period)))]
            } else {
                vec![Setting::new("cpu.cfs_quota_us", &quota(number("cpu.cfs_period_us").unwrap_or(100_000)))]
            }
        }
        KnobKind::MemoryHigh => vec![Setting::new("memory.high", &value)],
        KnobKind::Burst => vec![Setting::new(burst_file(cgroups), &value)],
        KnobKind::DiskWeight => disk_weight(cgroups, &knob.cgroup, value).into_iter().collect(),
    }
}

/// Returns the knob of a single file: the weight that is held with `cpu.idle` counts as a knob of its own.
pub(super) fn kind_of(file: &str) -> Option<KnobKind> {
    Some(match file {
        "cpu.idle" => KnobKind::Idle,
        "cpu.weight" | "cpu.shares" => KnobKind::Weight,
        "cpu.max" | "cpu.cfs_quota_us" => KnobKind::CpuCap,
        "memory.high" => KnobKind::MemoryHigh,
        "cpu.max.burst" | "cpu.cfs_burst_us" => KnobKind::Burst,
        "io.weight" | "io.bfq.weight" | "blkio.bfq.weight" => KnobKind::DiskWeight,
        _ => return None,
    })
}

/// First release in which a throttled thread runs on until it leaves the kernel ("sched/fair: Switch to task
/// based throttle model").
const STOPS_OUTSIDE: (u32, u32) = (6, 18);

/// Returns the machine's features, from the files in the cgroup of BestEffort pods and the kernel's release.
pub(super) fn supports(cgroups: &Cgroups, best_effort: &str) -> Supports {
    let has = |file: &str| cgroups.read(best_effort, file).is_some();
    Supports {
        idle: has("cpu.idle"),
        harmless_caps: kernel_release::running() >= STOPS_OUTSIDE,
        memory_high: cgroups.paths.version() == Version::V2 && has("memory.high"),
        burst: has(burst_file(cgroups)),
        disk_weight: disk_weight(cgroups, best_effort, 1).is_some(),
        weights: true,
    }
}

/// Returns the file of a weight for disks, with its content: iocost's on version 2, or BFQ's. `None` if the
/// kernel has neither.
fn disk_weight(cgroups: &Cgroups, cgroup: &str, weight: u64) -> Option<Setting> {
    let files: &[_] = match cgroups.paths.version() {
        Version::V2 => &["io.weight", "io.bfq.weight"],
        Version::V1 | Version::Hybrid => &["blkio.bfq.weight"],
    };
    let file = files.iter().find(|file| cgroups.read(cgroup, file).is_some())?;
    // Version 2 shows the weight of all devices as a line of its own.
    let content = if file.starts_with("io.") { format!("default {weight}") } else { weight.to_string() };
    Some(Setting::new(file, &content))
}

fn burst_file(cgroups: &Cgroups) -> &'static str {
    if cgroups.paths.version() == Version::V2 { "cpu.max.burst" } else { "cpu.cfs_burst_us" }
}

/// Returns the quota of a cgroup in microseconds per period; `None` without a quota.
pub(super) fn quota(cgroups: &Cgroups, cgroup: &str) -> Option<u64> {
    let file = if cgroups.paths.version() == Version::V2 { "cpu.max" } else { "cpu.cfs_quota_us" };
    // `max` and `-1` do not parse.
    held::owners_value(cgroups, cgroup, file)?.split(' ').next()?.parse().ok()
}
