//! Many pods on a real containerd: all at once, and over and over. Nothing may be left of them.

#![allow(clippy::unwrap_used)] // a test's helpers may panic as the test itself may

use beelet_tests::agent::{Agent, Options};
use beelet_tests::containerd::Containerd;
use beelet_tests::pods::PodView;
use beelet_tests::{guards, manifests, require};
use std::path::Path;
use std::time::{Duration, Instant};

/// What pods can leave behind.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    cgroups: usize,
    processes: usize,
    mounts: usize,
    interfaces: usize,
    /// Addresses that the network plugin has given away.
    leases: usize,
    /// Of pods that the agent's durable records know.
    uids: usize,
    files: Vec<std::path::PathBuf>,
}

impl Traces {
    fn of(containerd: &Containerd, agent: &Agent) -> Traces {
        let root = containerd.cgroup();
        let mounts = guards::mounts().unwrap();
        let links = guards::ip(&["-o", "link", "show", "master", &containerd.bridge()]).unwrap_or_default();
        let mut files: Vec<_> =
            ["pods", "logs"].iter().flat_map(|one| entries(&agent.dir().join(one))).collect();
        files.sort();
        Traces {
            cgroups: root
                .dirs()
                .iter()
                .map(|dir| entries(dir).iter().filter(|path| path.is_dir()).count())
                .sum(),
            processes: root.dirs().iter().map(|dir| guards::processes_below(dir).len()).sum(),
            mounts: mounts.iter().filter(|mount| mount.path.starts_with(containerd.dir())).count(),
            interfaces: links.lines().count(),
            leases: containerd.leases().len(),
            uids: records(agent),
            files,
        }
    }
}

/// How many pods the agent has records of on disk.
fn records(agent: &Agent) -> usize {
    agent.record("pods").unwrap().as_object().unwrap().len()
}

/// Everything below a folder.
fn entries(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(entries(&entry.path()));
        }
        found.push(entry.path());
    }
    found
}

fn file(n: usize) -> String {
    format!("many{n}.yaml")
}

fn apply(agent: &Agent, n: usize) {
    let pod = manifests::pod(&format!("many{n}"), &["/bin/testapp", "pause"]);
    agent.apply(&file(n), pod.to_string()).unwrap();
}

/// Waits until the pods of the node are as `done` says. Longer than for one pod: a small machine starts some five a
/// second, and less while it is busy.
fn wait(agent: &Agent, what: &str, pods: usize, done: impl Fn(&[PodView]) -> bool + Send + Sync) {
    let deadline = Instant::now() + Duration::from_secs(120 + 10 * pods as u64);
    loop {
        let views: Vec<PodView> = agent.look(|watch| watch.pods.values().cloned().collect()).unwrap();
        if done(&views) {
            return;
        }
        let ready = views.iter().filter(|pod| pod.ready()).count();
        assert!(Instant::now() < deadline, "waited for {what}; there are {}, {ready} ready", views.len());
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn until_ready(agent: &Agent, pods: usize) {
    wait(agent, "all pods to be ready", pods, |all| all.len() == pods && all.iter().all(PodView::ready));
}

fn until_gone(agent: &Agent, pods: usize) {
    wait(agent, "all pods to be gone", pods, <[PodView]>::is_empty);
}

/// Where traces go a moment after the pods: the runtime's own cleaning up.
fn assert_no_trace(containerd: &Containerd, agent: &Agent, before: &Traces) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let now = Traces::of(containerd, agent);
        if now == *before {
            return;
        }
        assert!(Instant::now() < deadline, "before {before:#?}, now {now:#?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn a_hundred_and_ten_pods_start_at_once_and_go_without_a_trace() {
    require!(containerd);
    let containerd = Containerd::start_for_test().unwrap();
    let agent = Agent::start(Options::on(&containerd)).unwrap();
    // The first pod makes what all share: the bridge, the cgroups of the node.
    apply(&agent, 0);
    until_ready(&agent, 1);
    agent.remove(&file(0)).unwrap();
    until_gone(&agent, 1);
    let before = Traces::of(&containerd, &agent);
    (0..110).for_each(|n| apply(&agent, n));
    until_ready(&agent, 110);
    let there = Traces::of(&containerd, &agent);
    assert_eq!((there.leases, there.interfaces), (before.leases + 110, before.interfaces + 110));
    let restarts: i32 = agent.look(|watch| watch.pods.values().map(PodView::restarts).sum()).unwrap();
    assert_eq!(restarts, 0);
    (0..110).for_each(|n| agent.remove(&file(n)).unwrap());
    until_gone(&agent, 110);
    assert_no_trace(&containerd, &agent, &before);
}

/// Open files and resident KiB of the agent.
fn held(agent: &Agent) -> (usize, u64) {
    let pid = agent.pid().unwrap();
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    (files, beelet_tests::machine::resident_kib(pid).unwrap())
}

#[test]
fn five_hundred_pods_come_and_go_and_nothing_grows() {
    require!(long, containerd);
    let containerd = Containerd::start_for_test().unwrap();
    let agent = Agent::start(Options::on(&containerd)).unwrap();
    let round = |number: usize| {
        let names = number * 20..(number + 1) * 20;
        names.clone().for_each(|n| apply(&agent, n));
        until_ready(&agent, 20);
        names.for_each(|n| agent.remove(&file(n)).unwrap());
        until_gone(&agent, 20);
    };
    // Its caches and the event log fill at first.
    (0..5).for_each(round);
    let traces = Traces::of(&containerd, &agent);
    let (files, resident) = held(&agent);
    (5..25).for_each(round);
    assert_no_trace(&containerd, &agent, &traces);
    let (files_now, resident_now) = held(&agent);
    assert!(files_now <= files + 4, "{files} open files at first, {files_now} at the end");
    assert!(resident_now * 10 <= resident * 11, "{resident} KiB at first, {resident_now} at the end");
}
