//! Many pods on a real containerd, all at once and over and over. They must leave nothing.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use crate::node::installed;
use beelet_tests::agent::Agent;
use beelet_tests::containerd::Containerd;
use beelet_tests::pods::PodView;
use beelet_tests::traces::{Held, Traces};
use beelet_tests::{manifests, require};
use std::time::{Duration, Instant};

fn file(n: usize) -> String {
    format!("many{n}.yaml")
}

fn apply(agent: &Agent, n: usize) {
    let pod = manifests::pod(&format!("many{n}"), &["/bin/testapp", "pause"]);
    agent.apply(&file(n), pod.to_string()).unwrap();
}

/// Waits until `done` is true for the node's pods. The limit is longer than for one pod: a small machine
/// starts some five per second, and fewer while it is busy.
fn wait(agent: &Agent, what: &str, pods: usize, done: impl Fn(&[PodView]) -> bool + Send + Sync) {
    let deadline = Instant::now() + Duration::from_secs(120 + 10 * pods as u64);
    loop {
        let views: Vec<PodView> = agent.inspect(|watch| watch.pods.values().cloned().collect()).unwrap();
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
    wait(agent, "all pods to be removed", pods, <[PodView]>::is_empty);
}

#[test]
fn a_hundred_and_ten_pods_start_at_once_and_go_without_a_trace() {
    require!(containerd);
    let containerd = Containerd::start_for_test().unwrap();
    let agent = Agent::start(installed(&containerd)).unwrap();
    // The first pod creates the traces that all pods share: the bridge and the node's cgroups.
    apply(&agent, 0);
    until_ready(&agent, 1);
    agent.remove(&file(0)).unwrap();
    until_gone(&agent, 1);
    let before = Traces::of(&containerd, &agent).unwrap();
    (0..110).for_each(|n| apply(&agent, n));
    until_ready(&agent, 110);
    let there = Traces::of(&containerd, &agent).unwrap();
    let (leases, interfaces) = before.network();
    assert_eq!(there.network(), (leases + 110, interfaces + 110));
    let restarts: i32 = agent.inspect(|watch| watch.pods.values().map(PodView::restarts).sum()).unwrap();
    assert_eq!(restarts, 0);
    (0..110).for_each(|n| agent.remove(&file(n)).unwrap());
    until_gone(&agent, 110);
    before.wait_as_before(&containerd, &agent).unwrap();
}

#[test]
fn five_hundred_pods_come_and_go_and_nothing_grows() {
    require!(long, containerd);
    let containerd = Containerd::start_for_test().unwrap();
    let agent = Agent::start(installed(&containerd)).unwrap();
    let round = |number: usize| {
        let names = number * 20..(number + 1) * 20;
        names.clone().for_each(|n| apply(&agent, n));
        until_ready(&agent, 20);
        names.for_each(|n| agent.remove(&file(n)).unwrap());
        until_gone(&agent, 20);
    };
    // The agent's caches and event log fill first.
    (0..5).for_each(round);
    let traces = Traces::of(&containerd, &agent).unwrap();
    let before = Held::by(&agent).unwrap();
    (5..25).for_each(round);
    traces.wait_as_before(&containerd, &agent).unwrap();
    let now = Held::by(&agent).unwrap();
    assert!(now.files() <= before.files() + 4, "left open: {}", before.opened(&now));
    assert!(
        now.resident * 10 <= before.resident * 11,
        "{} KiB at first, {} at the end",
        before.resident,
        now.resident
    );
}
