//! The agent's cgroup writer on the real kernel: under a root of the test's own, in whichever version the machine has.
#![allow(clippy::unwrap_used)] // a helper of tests may fail as the tests may

use std::collections::BTreeMap;
use std::process::Command;

use beelet::cgroups::{CgroupError, Cgroups, Files, Version};
use beelet::config::CgroupDriver;
use beelet_tests::guards::{CgroupRoot, Process};
use beelet_tests::{require, workdir};
use cgroups_rs::fs::{Cgroup, cpu::CpuController, hierarchies, memory::MemController};

const POD: &str = "/kubepods/burstable/pod1f2e";
const NEIGHBOUR: &str = "/kubepods/burstable/pod1f2f";

fn setup(name: &str) -> (CgroupRoot, Cgroups) {
    let root = CgroupRoot::new(&workdir::unique(name)).unwrap();
    let cgroups = Cgroups::discover(root.path(), CgroupDriver::Cgroupfs).unwrap();
    (root, cgroups)
}

/// CPU (millicores of quota; None: no limit), and memory in bytes, as files of this machine's version.
fn limits(cgroups: &Cgroups, millis: Option<u64>, memory: Option<u64>) -> Files {
    let amount =
        |value: Option<u64>, none: &str| value.map_or_else(|| none.to_owned(), |value| value.to_string());
    let quota = millis.map(|millis| millis * 100);
    let files = if cgroups.version() == Version::V2 {
        vec![("cpu.max", format!("{} 100000", amount(quota, "max"))), ("memory.max", amount(memory, "max"))]
    } else {
        vec![
            ("cpu.cfs_quota_us", amount(quota, "-1")),
            ("cpu.cfs_period_us", "100000".to_owned()),
            ("memory.limit_in_bytes", amount(memory, "-1")),
        ]
    };
    files.into_iter().map(|(file, value)| (file.to_owned(), value)).collect()
}

/// A process in the cgroup `path`, in every hierarchy.
fn process_in(root: &CgroupRoot, path: &str) -> Process {
    let child = Process(Command::new("sleep").arg("1000").spawn().unwrap());
    for dir in root.dirs() {
        let procs = dir.join(&path[1..]).join("cgroup.procs");
        std::fs::write(&procs, child.0.id().to_string()).unwrap();
    }
    child
}

/// What another library reads of CPU quota in microseconds and memory limit in bytes; -1: no limit.
fn seen_by_cgroups_rs(cgroups: &Cgroups, path: &str) -> (i64, i64) {
    let cgroup = Cgroup::load(hierarchies::auto(), cgroups.cri_parent(path).trim_start_matches('/'));
    let cpu: &CpuController = cgroup.controller_of().unwrap();
    let memory: &MemController = cgroup.controller_of().unwrap();
    (cpu.cfs_quota().unwrap(), memory.memory_stat().limit_in_bytes)
}

#[test]
fn values_are_held_as_another_library_reads_them() {
    require!(root);
    let (_root, cgroups) = setup("beelet-cgroup-values");
    cgroups.ensure(POD, &limits(&cgroups, Some(500), Some(128 << 20))).unwrap();
    assert!(cgroups.exists(POD));
    assert_eq!(seen_by_cgroups_rs(&cgroups, POD), (50_000, 128 << 20));
    // Again: nothing to do. Then without limits.
    cgroups.ensure(POD, &limits(&cgroups, Some(500), Some(128 << 20))).unwrap();
    cgroups.ensure(POD, &limits(&cgroups, None, None)).unwrap();
    let (quota, memory) = seen_by_cgroups_rs(&cgroups, POD);
    assert_eq!(quota, -1);
    assert!(!(0..i64::MAX / 4096 * 4096).contains(&memory), "{memory}");
    assert_eq!(cgroups.list_pods().unwrap(), [POD]);
}

#[test]
fn the_runtime_may_put_a_process_into_every_hierarchy_of_a_new_pod() {
    require!(root);
    let (root, cgroups) = setup("beelet-cgroup-join");
    cgroups.ensure(POD, &Files::new()).unwrap();
    let child = process_in(&root, POD);
    assert_eq!(cgroups.pids(POD).unwrap(), [child.0.id()]);
    if let Some(dir) = cgroups.cgroup2_path(POD) {
        assert!(
            std::fs::read_to_string(dir.join("cgroup.procs")).unwrap().contains(&child.0.id().to_string())
        );
        assert!(cgroups.cgroup_id(POD).is_some());
    }
}

#[test]
fn limits_of_parent_and_child_move_together_in_both_directions() {
    require!(root);
    let (_root, cgroups) = setup("beelet-cgroup-order");
    // On version 1 the kernel refuses any step in which the child's share of CPU exceeds its parent's.
    for (parent, child) in [(1000, 500), (250, 100), (100, 100), (2000, 2000), (2000, 100), (50, 50)] {
        let wanted: BTreeMap<String, Files> = [
            ("/kubepods/burstable".to_owned(), limits(&cgroups, Some(parent), Some(parent << 20))),
            (POD.to_owned(), limits(&cgroups, Some(child), Some(child << 20))),
        ]
        .into();
        cgroups.ensure_all(&wanted).unwrap();
        assert_eq!(seen_by_cgroups_rs(&cgroups, POD), (child as i64 * 100, (child as i64) << 20));
    }
}

#[test]
fn a_share_larger_than_the_parents_is_an_error_that_explains_itself() {
    require!(root);
    let (_root, cgroups) = setup("beelet-cgroup-share");
    if cgroups.version() == Version::V2 {
        return; // version 2 has no such rule: the tighter limit holds
    }
    cgroups.ensure("/kubepods/burstable", &limits(&cgroups, Some(100), None)).unwrap();
    let error = cgroups.ensure(POD, &limits(&cgroups, Some(200), None)).unwrap_err().to_string();
    assert!(error.contains("cannot have a larger share of CPU than its parent"), "{error}");
}

#[test]
fn a_pods_remains_are_killed_and_its_neighbours_are_not() {
    require!(root);
    let (root, cgroups) = setup("beelet-cgroup-kill");
    for pod in [POD, NEIGHBOUR] {
        cgroups.ensure(&format!("{pod}/container"), &Files::new()).unwrap();
    }
    let mut left = process_in(&root, &format!("{POD}/container"));
    let mut other = process_in(&root, &format!("{NEIGHBOUR}/container"));

    let error = cgroups.remove(POD).unwrap_err();
    assert!(matches!(&error, CgroupError::NotEmpty { pids, .. } if *pids == [left.0.id()]), "{error}");
    assert!(cgroups.exists(POD), "a refused removal removes nothing");

    assert_eq!(cgroups.kill_remaining(POD).unwrap(), [left.0.id()]);
    assert!(!left.0.wait().unwrap().success());
    cgroups.remove(POD).unwrap();
    cgroups.remove(POD).unwrap();
    assert!(root.dirs().iter().all(|dir| !dir.join(&POD[1..]).exists()));

    assert!(other.0.try_wait().unwrap().is_none(), "the neighbour was killed");
    assert_eq!(cgroups.list_pods().unwrap(), [NEIGHBOUR]);
    assert!(matches!(cgroups.kill_remaining("/kubepods/burstable"), Err(CgroupError::NotAPod(_))));
    assert!(other.0.try_wait().unwrap().is_none(), "a path that is no pod's killed something");
}
