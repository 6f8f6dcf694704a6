//! Effects of the values: CPU time is shared, memory is throttled and protected without kills, and nothing is
//! left after a pod's end. The tests run on the real kernel, under a cgroup root of their own, with the
//! machine's cgroup version.
#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use beelet_cgroups::{Adjust, CgroupError, Cgroups, Files, Version, kill, memory, stats};
use beelet_policy::resources::cgroups::{
    CgroupConfig, CgroupVersion, CpuWeightFormula, NodeAmounts, node_cgroups, pod_cgroup,
};
use beelet_tests::guards::{CgroupRoot, Mount, Process};
use beelet_tests::{require, requires, workdir};
use beelet_units::cgroup_driver::CgroupDriver;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

/// Time limit of one wait. The three waits of a test fit into the 300 s that the test has in an emulated
/// guest.
const PATIENCE: Duration = Duration::from_secs(90);
/// CPU time over which a share is measured: long enough that one slice of the scheduler hardly counts.
const SHARED_SECONDS: f64 = 12.0;
/// Largest error of the share of a pod with requests, relative to the share.
const SHARE_ERROR: f64 = 0.05;
/// CPU time that a BestEffort pod may get beyond its share, as a fraction of all time. The pod always gets
/// some: its slices are as long as those of others, but rare.
const BEST_EFFORT_ERROR: f64 = 0.02;
const MIB: u64 = 1 << 20;

fn setup(name: &str) -> (CgroupRoot, Cgroups) {
    let root = CgroupRoot::new(&workdir::unique(name)).unwrap();
    let cgroups = Cgroups::discover(root.path(), CgroupDriver::Cgroupfs).unwrap();
    (root, cgroups)
}

/// Starts a process in the cgroup `path`, in every hierarchy, from its first instruction on.
fn process_in(root: &CgroupRoot, path: &str, program: &str) -> Process {
    let join: String = root
        .dirs()
        .iter()
        .map(|dir| format!("echo $$ > {}/cgroup.procs && ", dir.join(&path[1..]).display()))
        .collect();
    let script = format!("{join}{program}");
    Process(Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).spawn().unwrap())
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited for {what}");
        // Counters of cgroups send no events.
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn files(values: &[(&str, String)]) -> Files {
    values.iter().map(|(file, value)| ((*file).to_owned(), value.clone())).collect()
}

fn memory_limit(cgroups: &Cgroups, bytes: u64) -> Files {
    let file = if cgroups.paths.version() == Version::V2 { "memory.max" } else { "memory.limit_in_bytes" };
    files(&[(file, bytes.to_string())])
}

/// Returns a program that allocates and keeps this many MiB.
fn eater(mebibytes: u64) -> String {
    // The memory is a variable of the shell; the loop keeps the shell running.
    format!("x=$(head -c {} /dev/zero | tr '\\0' x); while :; do sleep 1; done", mebibytes * MIB)
}

// ---- CPU ----

fn pods() -> Vec<Pod> {
    let pod = |name: &str, resources: serde_json::Value| {
        serde_json::from_value(json!({
            "metadata": {"name": name, "uid": name},
            "spec": {"containers": [{"name": "main", "resources": resources}]},
        }))
        .unwrap()
    };
    let guaranteed = json!({"cpu": "1", "memory": "64Mi"});
    vec![
        pod("guaranteed", json!({"requests": guaranteed, "limits": guaranteed})),
        pod("burstable", json!({"requests": {"cpu": "500m"}})),
        pod("besteffort", json!({})),
    ]
}

/// Returns the weight of each pod, from the files of the cgroups that compete: kubepods' children.
fn weights(cgroups: &Cgroups) -> [f64; 3] {
    let file = if cgroups.paths.version() == Version::V2 { "cpu.weight" } else { "cpu.shares" };
    let of = |path: &str| cgroups.read(path, file).unwrap().parse::<f64>().unwrap();
    [of("/kubepods/podguaranteed"), of("/kubepods/burstable"), of("/kubepods/besteffort")]
}

fn share_cpu_time(formula: CpuWeightFormula, expected: Option<[f64; 3]>) {
    let (root, cgroups) = setup("beelet-cgroup-shares");
    let version = if cgroups.paths.version() == Version::V2 { CgroupVersion::V2 } else { CgroupVersion::V1 };
    let node = NodeAmounts { memory_capacity: 0, allocatable_millis: 2000, allocatable_memory: 1 << 33 };
    // Quotas are off: they would limit a pod by something other than its share.
    let config = CgroupConfig {
        cpu_cfs_quota: false,
        cpu_weight_formula: formula,
        ..CgroupConfig::new(version, node)
    };
    let pods = pods();
    let mut wanted: BTreeMap<String, Files> = BTreeMap::new();
    wanted.extend(node_cgroups(&pods, &config).unwrap().map(|cgroup| (cgroup.path, cgroup.files)));
    wanted.extend(pods.iter().map(|pod| pod_cgroup(pod, &config).unwrap()).map(|one| (one.path, one.files)));
    cgroups.ensure_all(&wanted).unwrap();
    let weights = weights(&cgroups);
    if let Some(expected) = expected {
        assert_eq!(weights, expected);
    }
    let paths =
        ["/kubepods/podguaranteed", "/kubepods/burstable/podburstable", "/kubepods/besteffort/podbesteffort"];
    // All processes run on one CPU, so that they compete.
    let mut first = rustix::thread::CpuSet::new();
    first.set(0);
    let busy: Vec<Process> =
        paths.iter().map(|path| process_in(&root, path, "while :; do :; done")).collect();
    let used = || paths.map(|path| stats::cpu(&cgroups, path).unwrap().used_ns as f64 / 1e9);
    wait_until("all of them to run", || used().iter().all(|seconds| *seconds > 0.0));
    // The affinity is set only now: a process that joins a cgroup with a cpuset may run on all of its CPUs
    // again (before Linux 6.2).
    for child in &busy {
        let pid = rustix::process::Pid::from_child(&child.0);
        rustix::thread::sched_setaffinity(Some(pid), &first).unwrap();
    }
    let before = used();
    let since = || [0, 1, 2].map(|n| used()[n] - before[n]);
    wait_until("enough CPU time", || since().iter().sum::<f64>() >= SHARED_SECONDS);
    let (used, all) = (since(), weights.iter().sum::<f64>());
    let total: f64 = used.iter().sum();
    let shares = used.map(|seconds| seconds / total);
    let wanted = weights.map(|weight| weight / all);
    eprintln!("weights {weights:?}: {shares:.4?} of the CPU time, expected {wanted:.4?}");
    for n in [0, 1] {
        let error = (shares[n] / wanted[n] - 1.0).abs();
        assert!(error <= SHARE_ERROR, "{}: {} of the time, not {}", paths[n], shares[n], wanted[n]);
    }
    assert!(shares[2] > 0.0, "the BestEffort pod got no CPU time");
    assert!(shares[2] <= wanted[2] + BEST_EFFORT_ERROR, "{}: {} of the time", paths[2], shares[2]);
}

#[test]
fn cpu_time_is_shared_as_the_kubelets_weights_say() {
    require!(root);
    let (_root, cgroups) = setup("beelet-cgroup-version");
    let v1 = cgroups.paths.version() != Version::V2;
    share_cpu_time(
        CpuWeightFormula::Kubelet,
        Some(if v1 { [1024.0, 512.0, 2.0] } else { [39.0, 20.0, 1.0] }),
    );
}

#[test]
fn cpu_time_is_shared_exactly_by_requests_with_proportional_weights() {
    require!(root);
    let (_root, cgroups) = setup("beelet-cgroup-version");
    let v1 = cgroups.paths.version() != Version::V2;
    share_cpu_time(CpuWeightFormula::Proportional, (!v1).then_some([100.0, 50.0, 1.0]));
}

// ---- Memory ----

fn only_on_v2(file: &str) -> requires::Missing {
    let what = format!("cgroup version 1 has no {file}");
    requires::Missing { what, remedy: "boot a kernel with version 2: cargo xtask vm".to_owned() }
}

#[test]
fn a_memory_limit_below_the_usage_kills_no_process_and_is_written_later() {
    require!(root);
    let (root, cgroups) = setup("beelet-cgroup-fits");
    let pod = "/kubepods/burstable/podfits";
    cgroups.ensure(pod, &memory_limit(&cgroups, 256 * MIB)).unwrap();
    let mut eater = process_in(&root, pod, &eater(32));
    wait_until("the memory to be used", || memory::of(&cgroups, pod).unwrap().usage > 32 * MIB);
    let tight = BTreeMap::from([(pod.to_owned(), memory_limit(&cgroups, 8 * MIB))]);
    let report = cgroups.adjust(&tight, Adjust::All);
    assert!(report.changed.is_empty(), "{report:?}");
    match cgroups.paths.version() {
        Version::V2 => assert!(matches!(report.failed[..], [CgroupError::WouldKill { .. }]), "{report:?}"),
        _ => assert!(report.failed[0].to_string().contains("more than that is in use"), "{report:?}"),
    }
    assert!(eater.0.try_wait().unwrap().is_none(), "the process was killed");
    assert_eq!(memory::of(&cgroups, pod).unwrap().limit, Some(256 * MIB));
    // Only values that leave more room may be written at this step, so this call changes nothing.
    assert!(cgroups.adjust(&tight, Adjust::Wider).failed.is_empty());
    drop(eater);
    wait_until("the smaller limit to fit", || cgroups.adjust(&tight, Adjust::All).failed.is_empty());
    assert_eq!(memory::of(&cgroups, pod).unwrap().limit, Some(8 * MIB));
}

#[test]
fn memory_high_throttles_without_kills() {
    require!(root);
    let (root, cgroups) = setup("beelet-cgroup-high");
    if cgroups.paths.version() != Version::V2 {
        requires::skip(&only_on_v2("memory.high"));
        return;
    }
    let pod = "/kubepods/burstable/podhigh";
    cgroups.ensure(pod, &files(&[("memory.high", (16 * MIB).to_string())])).unwrap();
    let mut eater = process_in(&root, pod, &eater(64));
    let events = |name: &str| -> u64 {
        let text = cgroups.read(pod, "memory.events").unwrap();
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap()
    };
    wait_until("the process to be throttled", || events("high ") > 0);
    assert_eq!(events("oom_kill "), 0);
    assert!(eater.0.try_wait().unwrap().is_none(), "the process ended");
}

/// Returns a block device whose pages can be read into the page cache, if the kernel has one.
fn block_device() -> Option<&'static str> {
    let _ = Command::new("modprobe").arg("null_blk").stderr(Stdio::null()).status();
    ["/dev/nullb0"].into_iter().find(|device| fs::metadata(device).is_ok())
}

#[test]
fn memory_min_protects_a_pods_page_cache_from_neighbours() {
    require!(root);
    let (root, cgroups) = setup("beelet-cgroup-min");
    if cgroups.paths.version() != Version::V2 {
        requires::skip(&only_on_v2("memory.min"));
        return;
    }
    let Some(device) = block_device() else {
        let what = "the kernel has no null_blk device, whose pages could be cached".to_owned();
        requires::skip(&requires::Missing { what, remedy: "modprobe null_blk".to_owned() });
        return;
    };
    // The kernel drops a device's cached pages when the last user closes the device.
    let _open = fs::File::open(device).unwrap();
    let (safe, bare, hog) =
        ("/kubepods/podsafe", "/kubepods/burstable/podbare", "/kubepods/besteffort/podhog");
    // A pod's ancestors must grant its protection too.
    let min = |mebibytes: u64| files(&[("memory.min", (mebibytes * MIB).to_string())]);
    let mut kubepods = min(48);
    kubepods.insert("memory.max".to_owned(), (96 * MIB).to_string());
    cgroups.ensure("/kubepods", &kubepods).unwrap();
    cgroups.ensure(safe, &min(48)).unwrap();
    cgroups.ensure(bare, &Files::new()).unwrap();
    cgroups.ensure(hog, &Files::new()).unwrap();
    let cached = |pod: &str| -> u64 {
        let text = cgroups.read(pod, "memory.stat").unwrap();
        text.lines().find_map(|line| line.strip_prefix("file ")?.parse().ok()).unwrap()
    };
    // Each pod reads 24 MiB of its own part of the device.
    for (pod, skip) in [(safe, 0), (bare, 1000)] {
        let read = format!("exec dd if={device} of=/dev/null bs=1M count=24 skip={skip} 2>/dev/null");
        assert!(process_in(&root, pod, &read).0.wait().unwrap().success());
        assert!(cached(pod) >= 20 * MIB, "{pod} has cached {}", cached(pod));
    }
    let before = cached(safe);
    // The neighbour permanently takes all memory but 8 MiB, without a file behind it and without swap. A
    // neighbour that only reads files once would lose its own pages first: multi-generational LRU takes the
    // coldest.
    let folder = tempfile::tempdir().unwrap();
    let memory = Mount::tmpfs(&folder.path().join("memory"), 64 * MIB).unwrap();
    let swap = root.dir("memory").unwrap().join(&hog[1..]).join("memory.swap.max");
    if swap.exists() {
        fs::write(swap, "0").unwrap();
    }
    let fill = format!("exec dd if=/dev/zero of={}/all bs=1M count=64 2>/dev/null", memory.path().display());
    assert!(process_in(&root, hog, &fill).0.wait().unwrap().success());
    assert!(cached(safe) >= before * 9 / 10, "protected: {} of {before} left", cached(safe));
    assert!(cached(bare) < 12 * MIB, "not protected, but still cached: {}", cached(bare));
}

// ---- The end ----

#[test]
fn the_end_of_a_pod_that_keeps_forking_leaves_nothing() {
    require!(root);
    let (root, cgroups) = setup("beelet-cgroup-end");
    let pod = "/kubepods/besteffort/podforks";
    cgroups.ensure(&format!("{pod}/c1"), &Files::new()).unwrap();
    let mut parent = process_in(
        &root,
        &format!("{pod}/c1"),
        "while :; do for i in 1 2 3 4 5; do sleep 100 & done; sleep 0.01; done",
    );
    wait_until("the pod to fork", || cgroups.pids(pod).unwrap().len() > 10);
    let killed = crate::destroyed(&cgroups, pod, PATIENCE);
    parent.0.wait().unwrap();
    assert!(root.dirs().iter().all(|dir| !dir.join(&pod[1..]).exists()));
    assert!(killed.iter().all(|pid| !fs::exists(format!("/proc/{pid}/exe")).unwrap_or(false)), "{killed:?}");
    // A second call has nothing to do, and only pods can be destroyed.
    assert!(kill::destroy(&cgroups, pod).unwrap().is_empty());
    assert!(matches!(kill::destroy(&cgroups, "/kubepods/besteffort"), Err(CgroupError::NotAPod(_))));
}
