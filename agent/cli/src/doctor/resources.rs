//! Checks of the kernel's features for memory and disks that settings of the configuration use.

use std::{fs, path::Path};

use beelet_base::machine_memory;
use beelet_cgroups::{Cgroups, Trial, Version, reclaim};
use beelet_policy::{eviction::EvictionSwap, resources::cgroups::SwapBehavior, tuner::TunerMode};
use beelet_units::cgroup_driver::CgroupDriver;

use super::{Finding, Patient};

/// Swap and reclaim on request.
pub(super) fn memory(patient: &Patient) -> Vec<Finding> {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let swap = machine_memory::meminfo(&meminfo, "SwapTotal").unwrap_or(0);
    let (config, beelet) = (&patient.config, &patient.config.beelet);
    let wants_reclaim =
        beelet.tuner.reclaim != TunerMode::Off || beelet.eviction_swap == EvictionSwap::Counted;
    let wants_swap = config.swap_behavior == SwapBehavior::LimitedSwap;
    let mut findings = vec![judge_swap(swap, wants_swap)];
    if let Some((is_v2, has)) = trial(patient, reclaim::is_supported) {
        findings.push(judge_reclaim(is_v2, has, wants_reclaim));
    }
    findings
}

fn judge_swap(total: u64, wanted: bool) -> Finding {
    match total {
        0 if wanted => Finding::degraded(
            "swap",
            "the machine has no swap, and the configuration sets `memorySwap.swapBehavior: LimitedSwap`",
            "no memory of a pod can be swapped",
            "make swap, e.g. `mkswap` and `swapon` on zram or a disk",
        ),
        0 => Finding::ok("swap", "none"),
        total => Finding::ok("swap", format!("{} MiB", total >> 20)),
    }
}

fn judge_reclaim(is_v2: bool, has: bool, wanted: bool) -> Finding {
    let why = if is_v2 { "Linux is older than 5.19" } else { "cgroup version 1 lacks it" };
    match (has, wanted) {
        (true, _) => Finding::ok("reclaim on request", "memory.reclaim"),
        (false, false) => Finding::ok("reclaim on request", format!("not used ({why})")),
        (false, true) => Finding::degraded(
            "reclaim on request",
            format!("memory.reclaim is missing: {why}"),
            "`tuner.reclaim` takes no cold memory, and `evictionSwap` changes only the order of eviction",
            "run Linux 5.19 or newer with `systemd.unified_cgroup_hierarchy=1`",
        ),
    }
}

/// Weights of disks.
pub(super) fn disks(patient: &Patient) -> Vec<Finding> {
    let wanted = patient.config.beelet.tuner.law.best_effort_disk_weight > 0;
    let files = ["io.weight", "io.bfq.weight", "blkio.bfq.weight"];
    let ask = |cgroups: &Cgroups, cgroup: &str| {
        (files.iter().any(|file| cgroups.read(cgroup, file).is_some()), is_costed(cgroups))
    };
    let Some((_, (has, is_costed))) = trial(patient, ask) else { return Vec::new() };
    vec![judge_disks(has, is_costed, &weighted(Path::new("/sys/block")), wanted)]
}

/// Returns true if iocost is on for some disk. Only cgroup2's root has the file.
fn is_costed(cgroups: &Cgroups) -> bool {
    let unified = cgroups.paths.hierarchies().iter().find(|hierarchy| hierarchy.is_v2);
    let text = unified.and_then(|unified| fs::read_to_string(unified.mount.join("io.cost.qos")).ok());
    text.is_some_and(|text| text.contains("enable=1"))
}

fn judge_disks(has_file: bool, is_costed: bool, bfq: &[String], wanted: bool) -> Finding {
    let check = "disk weights";
    if has_file && is_costed {
        return Finding::ok(check, "iocost is on");
    }
    if has_file && !bfq.is_empty() {
        return Finding::ok(check, format!("BFQ schedules {}", bfq.join(" ")));
    }
    let (detail, remedy) = if has_file {
        ("no disk is scheduled by BFQ, and iocost is off", "echo bfq > /sys/block/DISK/queue/scheduler")
    } else {
        (
            "the kernel has neither iocost nor BFQ with cgroups, or the module `bfq` is not loaded",
            "run a kernel with `CONFIG_BLK_CGROUP_IOCOST=y` or `CONFIG_BFQ_GROUP_IOSCHED=y`, and `modprobe bfq`",
        )
    };
    if !wanted {
        return Finding::ok(check, format!("not used ({detail})"));
    }
    Finding::degraded(check, detail, "`tuner.bestEffortDiskWeight` has no effect", remedy)
}

/// Returns the disks that BFQ schedules.
fn weighted(block: &Path) -> Vec<String> {
    let entries = fs::read_dir(block).into_iter().flatten().flatten();
    let is_bfq =
        |dir: &Path| fs::read_to_string(dir.join("queue/scheduler")).is_ok_and(|text| text.contains("[bfq]"));
    let mut disks: Vec<String> = entries
        .filter(|entry| is_bfq(&entry.path()))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    disks.sort();
    disks
}

/// Returns true as the first value on cgroup v2, and the answer for a new cgroup; `None` if none can be made,
/// which the check of cgroups reports.
fn trial<T>(patient: &Patient, ask: impl Fn(&Cgroups, &str) -> T) -> Option<(bool, T)> {
    let cgroups = Cgroups::discover(&patient.config.cgroup_root, CgroupDriver::Cgroupfs).ok()?;
    let name = format!("beelet-doctor-ask-{}", std::process::id());
    let trial = Trial::make(&cgroups, &name).ok()?;
    let answer = ask(&cgroups, &format!("/{name}"));
    trial.remove().ok()?;
    Some((cgroups.paths.version() == Version::V2, answer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn a_missing_feature_matters_only_if_a_setting_uses_it() {
        let check = |finding: Finding, state: State, text: &str| {
            assert!(finding.state == state && finding.detail.contains(text), "{}", finding.detail);
        };
        check(judge_swap(0, false), State::Ok, "none");
        check(judge_swap(0, true), State::Degraded, "no swap");
        check(judge_swap(5 << 20, true), State::Ok, "5 MiB");
        check(judge_reclaim(true, true, true), State::Ok, "memory.reclaim");
        check(judge_reclaim(false, false, false), State::Ok, "cgroup version 1");
        check(judge_reclaim(true, false, true), State::Degraded, "older than 5.19");
        let bfq = ["vda".to_owned()];
        check(judge_disks(true, true, &[], true), State::Ok, "iocost");
        check(judge_disks(true, false, &bfq, true), State::Ok, "vda");
        check(judge_disks(true, false, &[], true), State::Degraded, "no disk");
        check(judge_disks(false, false, &bfq, true), State::Degraded, "neither");
        check(judge_disks(false, false, &bfq, false), State::Ok, "not used");
    }

    #[test]
    fn disks_are_found_by_their_scheduler() {
        let dir = tempfile::tempdir().unwrap();
        for (disk, text) in [("sda", "none [bfq]"), ("sdb", "[none] bfq")] {
            fs::create_dir_all(dir.path().join(disk).join("queue")).unwrap();
            fs::write(dir.path().join(disk).join("queue/scheduler"), text).unwrap();
        }
        assert_eq!(weighted(dir.path()), ["sda"]);
        assert_eq!(weighted(&dir.path().join("none")), Vec::<String>::new());
    }
}
