//! A real containerd hangs: SIGSTOP stops it as a debugger would, so its socket still accepts connections
//! that are never answered. Then containerd continues. (For a containerd that is stopped, killed and
//! restarted, see restarts.rs; for other faults around the agent, tier1/hostile/.)

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::time::{Duration, Instant};

use crate::node::Node;
use beelet_tests::agent::{Control, Options};
use beelet_tests::containerd::Containerd;
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::{require, workdir};

fn identity(pod: &PodView) -> (String, Vec<(Option<String>, i32)>) {
    let containers = pod.containers().iter().map(|one| (one.container_id.clone(), one.restart_count));
    (pod.uid().to_owned(), containers.collect())
}

/// Lets containerd hang for `time`, while the pods continue.
fn hangs(containerd: Containerd, time: Duration) {
    let node = Node::on(containerd, |options: Options| options.http().unwrap());
    for name in ["web", "crashes", "goes"] {
        node.apply(&manifests::serving(name));
    }
    node.apply(&manifests::answering("http"));
    let ready = |name: &str| node.wait(name, "to be ready", PodView::ready);
    let [web, http, crashes, goes] = ["web", "http", "crashes", "goes"].map(ready);
    let mut control = Control::connect(web.ip().unwrap(), CONTROL).unwrap();
    let mut doomed = Control::connect(crashes.ip().unwrap(), CONTROL).unwrap();

    let began = Instant::now();
    let hanging = node.containerd.hang().unwrap();
    // Reports of the kernel need no containerd: readiness, and the end of a process.
    control.send(&format!("close {PORT}")).unwrap();
    node.wait("web", "to be not ready", |pod| !pod.ready());
    control.send(&format!("open {PORT}")).unwrap();
    node.wait("web", "to be ready again", PodView::ready);
    // Changes of manifests are noticed during the hang, and wait.
    node.apply(&manifests::serving("late"));
    node.wait("late", "to be known", |pod| pod.phase() == "Pending");
    node.remove("goes");
    let _ = doomed.send("exit 3"); // the process may end before it answers
    while began.elapsed() < time {
        let (status, _) = node.agent.get("/metrics").unwrap();
        assert_eq!(status, 200);
        let listed = node.agent.cli(&["get", "pods"]).output().unwrap();
        assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
        for (name, before) in [("web", &web), ("http", &http)] {
            let now = node.wait(name, "to be known", |_| true);
            assert!(now.ready() && identity(&now) == identity(before), "{name}: {now:?}");
        }
        std::thread::park_timeout(Duration::from_millis(500));
    }

    drop(hanging);
    node.wait("late", "to be ready", PodView::ready);
    node.wait("crashes", "to run again", |pod| pod.ready() && pod.restarts() == 1);
    node.wait_gone("goes");
    for (name, before) in [("web", &web), ("http", &http)] {
        let now = node.wait(name, "to be ready", PodView::ready);
        assert_eq!(identity(&now), identity(before), "{name}");
    }
    workdir::wait_for("the agent to report itself healthy", workdir::PATIENCE, || {
        let answer = node.agent.get("/healthz").map_err(|error| format!("{error:#}"))?;
        if answer.0 == 200 { Ok(()) } else { Err(format!("{answer:?}")) }
    })
    .unwrap();
    assert_ne!(goes.uid(), "");
    let log = node.agent.log();
    assert!(!log.contains("panicked at"), "{log}");
}

#[test]
fn a_containerd_that_hangs_for_a_while_costs_no_pod_anything() {
    require!(containerd, bpf);
    hangs(Containerd::start_for_test().unwrap(), Duration::from_secs(20));
}

#[test]
fn a_containerd_that_hangs_for_longer_than_calls_may_take_costs_no_pod_anything() {
    require!(containerd, bpf, long);
    hangs(Containerd::start_for_test().unwrap(), Duration::from_secs(150));
}

#[test]
fn a_containerd_2_that_hangs_for_a_minute_costs_no_pod_anything() {
    require!(containerd_2, bpf, long);
    hangs(Containerd::start_version_2_for_test().unwrap(), Duration::from_secs(60));
}
