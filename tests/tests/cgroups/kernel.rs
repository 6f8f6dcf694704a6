//! The agent's cgroup writer on the real kernel: under a cgroup root of the test's own, with the machine's
//! cgroup version.
#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::collections::BTreeMap;
use std::process::Command;

use beelet_cgroups::{Adjust, CgroupError, Cgroups, Files, Version, kill, search};
use beelet_policy::resources::cgroups::{
    CgroupConfig, CgroupValues, CgroupVersion, MemoryQos, MemoryReservationPolicy, NodeAmounts,
    container_cgroup, node_cgroups, pod_cgroup,
};
use beelet_tests::guards::{CgroupRoot, Process};
use beelet_tests::{require, requires, workdir};
use beelet_units::cgroup_driver::CgroupDriver;
use cgroups_rs::fs::{Cgroup, cpu::CpuController, hierarchies, memory::MemController};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

const POD: &str = "/kubepods/burstable/pod1f2e";
const NEIGHBOUR: &str = "/kubepods/burstable/pod1f2f";

fn setup(name: &str) -> (CgroupRoot, Cgroups) {
    let root = CgroupRoot::new(&workdir::unique(name)).unwrap();
    let cgroups = Cgroups::discover(root.path(), CgroupDriver::Cgroupfs).unwrap();
    (root, cgroups)
}

/// Returns a CPU quota (millicores; `None`: no limit) and a memory limit (bytes) as files of the machine's
/// cgroup version.
fn limits(cgroups: &Cgroups, millis: Option<u64>, memory: Option<u64>) -> Files {
    let amount =
        |value: Option<u64>, none: &str| value.map_or_else(|| none.to_owned(), |value| value.to_string());
    let quota = millis.map(|millis| millis * 100);
    let files = if cgroups.paths.version() == Version::V2 {
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

/// Starts a process in the cgroup `path`, in every hierarchy.
fn process_in(root: &CgroupRoot, path: &str) -> Process {
    let child = Process(Command::new("sleep").arg("1000").spawn().unwrap());
    for dir in root.dirs() {
        let procs = dir.join(&path[1..]).join("cgroup.procs");
        std::fs::write(&procs, child.0.id().to_string()).unwrap();
    }
    child
}

/// Returns the CPU quota in microseconds and the memory limit in bytes as another library reads them; -1: no
/// limit.
fn seen_by_cgroups_rs(cgroups: &Cgroups, path: &str) -> (i64, i64) {
    let cgroup = Cgroup::load(hierarchies::auto(), cgroups.paths.cri_parent(path).trim_start_matches('/'));
    let cpu: &CpuController = cgroup.controller_of().unwrap();
    let memory: &MemController = cgroup.controller_of().unwrap();
    (cpu.cfs_quota().unwrap(), memory.memory_stat().limit_in_bytes)
}

#[test]
fn values_are_held_as_another_library_reads_them() {
    require!(root);
    let (_root, cgroups) = setup("beelet-cgroup-values");
    cgroups.ensure(POD, &limits(&cgroups, Some(500), Some(128 << 20))).unwrap();
    assert!(cgroups.paths.exists(POD));
    assert_eq!(seen_by_cgroups_rs(&cgroups, POD), (50_000, 128 << 20));
    // The second call has nothing to do. The third one removes the limits.
    cgroups.ensure(POD, &limits(&cgroups, Some(500), Some(128 << 20))).unwrap();
    cgroups.ensure(POD, &limits(&cgroups, None, None)).unwrap();
    let (quota, memory) = seen_by_cgroups_rs(&cgroups, POD);
    assert_eq!(quota, -1);
    assert!(!(0..i64::MAX / 4096 * 4096).contains(&memory), "{memory}");
    assert_eq!(search::pods(&cgroups).unwrap(), [POD]);
}

#[test]
fn the_runtime_may_put_a_process_into_every_hierarchy_of_a_new_pod() {
    require!(root);
    let (root, cgroups) = setup("beelet-cgroup-join");
    cgroups.ensure(POD, &Files::new()).unwrap();
    let child = process_in(&root, POD);
    assert_eq!(cgroups.pids(POD).unwrap(), [child.0.id()]);
    if let Some(dir) = cgroups.paths.cgroup2_path(POD) {
        assert!(
            std::fs::read_to_string(dir.join("cgroup.procs")).unwrap().contains(&child.0.id().to_string())
        );
        assert!(cgroups.paths.cgroup_id(POD).is_some());
    }
}

#[test]
fn limits_of_parent_and_child_move_together_in_both_directions() {
    require!(root);
    let (_root, cgroups) = setup("beelet-cgroup-order");
    // On version 1 the kernel refuses any step in which the child's CPU quota exceeds its parent's.
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
    if cgroups.paths.version() == Version::V2 {
        let what = "cgroup version 2 has no such rule: the tighter limit holds".to_owned();
        requires::skip(&requires::Missing { what, remedy: "use a machine with version 1".to_owned() });
        return;
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
    assert!(cgroups.paths.exists(POD), "the refused removal removed the cgroup");

    assert_eq!(kill::remaining(&cgroups, POD).unwrap(), [left.0.id()]);
    assert!(!left.0.wait().unwrap().success());
    cgroups.remove(POD).unwrap();
    cgroups.remove(POD).unwrap();
    assert!(root.dirs().iter().all(|dir| !dir.join(&POD[1..]).exists()));

    assert!(other.0.try_wait().unwrap().is_none(), "the neighbour was killed");
    assert_eq!(search::pods(&cgroups).unwrap(), [NEIGHBOUR]);
    assert!(matches!(kill::remaining(&cgroups, "/kubepods/burstable"), Err(CgroupError::NotAPod(_))));
    assert!(other.0.try_wait().unwrap().is_none(), "a path that is not a pod's killed a process");
}

// ---- Every file of a set of pods ----

/// Returns one pod of each QoS class, with one container each.
fn pods() -> [Pod; 3] {
    let pod = |name: &str, resources: serde_json::Value| {
        serde_json::from_value(json!({
            "metadata": {"name": name, "uid": name},
            "spec": {"containers": [{"name": "main", "resources": resources}]},
        }))
        .unwrap()
    };
    let (small, large) = (json!({"cpu": "1", "memory": "64Mi"}), json!({"cpu": "1", "memory": "128Mi"}));
    [
        pod("guaranteed", json!({"requests": small, "limits": small})),
        pod("burstable", json!({"requests": {"cpu": "500m", "memory": "64Mi"}, "limits": large})),
        pod("besteffort", json!({})),
    ]
}

/// Returns the values that the agent would hold for the pods on a node of 2 CPUs and 8 GiB, with every
/// setting on that has a file.
fn wanted(version: Version) -> BTreeMap<String, Files> {
    let version = if version == Version::V2 { CgroupVersion::V2 } else { CgroupVersion::V1 };
    let node =
        NodeAmounts { memory_capacity: 1 << 33, allocatable_millis: 2000, allocatable_memory: 1 << 33 };
    let config = CgroupConfig {
        qos_reserved_memory_percent: Some(50),
        memory_qos: Some(MemoryQos {
            throttling_factor: Some(0.9),
            reservation: MemoryReservationPolicy::TieredReservation,
        }),
        pod_pids_limit: Some(1000),
        ..CgroupConfig::new(version, node)
    };
    let pods = pods();
    let mut all: Vec<CgroupValues> = node_cgroups(&pods, &config).unwrap().into();
    for pod in &pods {
        all.push(pod_cgroup(pod, &config).unwrap());
        let containers = &pod.spec.as_ref().unwrap().containers;
        all.extend(containers.iter().map(|container| container_cgroup(pod, container, &config).unwrap()));
    }
    all.into_iter().map(|cgroup| (cgroup.path, cgroup.files)).collect()
}

/// Expected values, derived by hand from docs/cgroups.md and KEPs 2254 and 2570: `file=value` of each cgroup.
const HELD_V2: &[(&str, &str)] = &[
    ("/kubepods", "cpu.weight=79 memory.max=8589934592 memory.min=134217728"),
    ("/kubepods/besteffort", "cpu.weight=1 memory.max=8522825728"),
    ("/kubepods/besteffort/podbesteffort", "cpu.weight=1 pids.max=1000"),
    ("/kubepods/besteffort/podbesteffort/main", "cpu.max=max 100000 cpu.weight=1 memory.low=0 memory.min=0"),
    ("/kubepods/burstable", "cpu.weight=20 memory.low=67108864 memory.max=8556380160"),
    (
        "/kubepods/burstable/podburstable",
        "cpu.max=100000 100000 cpu.weight=20 memory.low=67108864 memory.max=134217728 pids.max=1000",
    ),
    (
        "/kubepods/burstable/podburstable/main",
        "cpu.max=100000 100000 cpu.weight=59 memory.high=127504384 memory.low=67108864 memory.max=134217728",
    ),
    (
        "/kubepods/podguaranteed",
        "cpu.max=100000 100000 cpu.weight=39 memory.max=67108864 memory.min=67108864 pids.max=1000",
    ),
    (
        "/kubepods/podguaranteed/main",
        "cpu.max=100000 100000 cpu.weight=100 memory.max=67108864 memory.min=67108864",
    ),
];
const HELD_V1: &[(&str, &str)] = &[
    ("/kubepods", "cpu.shares=2048 memory.limit_in_bytes=8589934592"),
    ("/kubepods/besteffort", "cpu.shares=2 memory.limit_in_bytes=8522825728"),
    ("/kubepods/besteffort/podbesteffort", "cpu.shares=2 pids.max=1000"),
    ("/kubepods/besteffort/podbesteffort/main", "cpu.cfs_period_us=100000 cpu.shares=2"),
    ("/kubepods/burstable", "cpu.shares=512 memory.limit_in_bytes=8556380160"),
    (
        "/kubepods/burstable/podburstable",
        "cpu.cfs_period_us=100000 cpu.cfs_quota_us=100000 cpu.shares=512 memory.limit_in_bytes=134217728 \
         pids.max=1000",
    ),
    (
        "/kubepods/burstable/podburstable/main",
        "cpu.cfs_period_us=100000 cpu.cfs_quota_us=100000 cpu.shares=512 memory.limit_in_bytes=134217728",
    ),
    (
        "/kubepods/podguaranteed",
        "cpu.cfs_period_us=100000 cpu.cfs_quota_us=100000 cpu.shares=1024 memory.limit_in_bytes=67108864 \
         pids.max=1000",
    ),
    (
        "/kubepods/podguaranteed/main",
        "cpu.cfs_period_us=100000 cpu.cfs_quota_us=100000 cpu.shares=1024 memory.limit_in_bytes=67108864",
    ),
];

/// Returns the current contents of these cgroups' files, in the form of [`HELD_V2`].
fn held(cgroups: &Cgroups, wanted: &BTreeMap<String, Files>) -> Vec<(String, String)> {
    let line = |(path, files): (&String, &Files)| {
        let read = |file: &String| format!("{file}={}", cgroups.read(path, file).unwrap_or_default());
        (path.clone(), files.keys().map(read).collect::<Vec<_>>().join(" "))
    };
    wanted.iter().map(line).collect()
}

/// Returns another value that the kernel accepts for this file; `None` for a file that changes with another
/// one.
fn foreign(file: &str, value: &str) -> Option<String> {
    match file {
        "cpu.cfs_period_us" => None,
        "cpu.cfs_quota_us" => Some("-1".to_owned()),
        "cpu.max" if value.starts_with("max") => Some("50000 100000".to_owned()),
        "cpu.max" => Some("max 100000".to_owned()),
        _ => {
            let step = if file.starts_with("memory.") { 4096 } else { 1 };
            Some((value.parse::<u64>().unwrap() + step).to_string())
        }
    }
}

#[test]
fn every_file_of_a_set_of_pods_has_its_value_also_after_foreign_changes() {
    require!(root);
    let (root, cgroups) = setup("beelet-cgroup-all");
    if !cgroups.paths.controllers().contains("pids") {
        let what = "no hierarchy has the pids controller".to_owned();
        requires::skip(&requires::Missing { what, remedy: "mount it, or boot with version 2".to_owned() });
        return;
    }
    let wanted = wanted(cgroups.paths.version());
    cgroups.ensure_all(&wanted).unwrap();
    let table = if cgroups.paths.version() == Version::V2 { HELD_V2 } else { HELD_V1 };
    let expected: Vec<_> =
        table.iter().map(|(path, files)| ((*path).to_owned(), (*files).to_owned())).collect();
    assert_eq!(held(&cgroups, &wanted), expected);

    for (path, files) in &wanted {
        for (file, value) in files {
            let Some(other) = foreign(file, value) else { continue };
            let dir = root.dir(file.split('.').next().unwrap()).unwrap().join(&path[1..]);
            std::fs::write(dir.join(file), &other).unwrap();
            assert_ne!(held(&cgroups, &wanted), expected, "{path}: {file} the change had no effect");
            let report = cgroups.adjust(&wanted, Adjust::All);
            assert!(report.failed.is_empty(), "{path} {file}: {report:?}");
            let changed: Vec<&str> = report.changed.iter().map(|change| change.cgroup.as_str()).collect();
            assert_eq!(changed, [path], "{file}: {report:?}");
            assert_eq!(held(&cgroups, &wanted), expected, "{path}: {file}");
        }
    }
    let again = cgroups.adjust(&wanted, Adjust::All);
    assert!(again.changed.is_empty() && again.failed.is_empty(), "{again:?}");
}
