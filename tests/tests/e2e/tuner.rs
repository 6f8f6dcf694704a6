//! The tuner in a real agent, over real pods: its held settings are shown, and after a kill -9 during
//! enforcement the next start restores every setting, even with the tuner off.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::collections::BTreeMap;

use crate::node::{Node, installed};
use beelet_tests::agent::{Agent, Options};
use beelet_tests::cgroup_values::pod_path;
use beelet_tests::containerd::Containerd;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{manifests, require, requires};
use serde_json::{Value, json};

/// Number of kills: normally, and with `BEELET_LONG`.
const ROUNDS: (u32, u32) = (5, 100);
/// Files that the tuner may write, on either version.
const FILES: [&str; 7] = [
    "cpu.idle",
    "cpu.shares",
    "cpu.cfs_quota_us",
    "cpu.cfs_burst_us",
    "cpu.weight",
    "cpu.max",
    "cpu.max.burst",
];
const BEST_EFFORT: &str = "/kubepods/besteffort";

fn options(containerd: &Containerd, mode: &str) -> Options {
    // The tuner tightens at each tick and never loosens: trouble is certain, and the test is about the
    // tuner's end.
    let tuner = json!({
        "mode": mode, "interval": "100ms", "hotTicks": 1, "calmTicks": 10_000, "cpuWaitPerMille": 1, "quietPercent": 0,
        "helplessSteps": 0, "cpuCaps": "always",
    });
    installed(containerd).beelet("tuner", tuner)
}

/// Returns the current values of these cgroups' files that the tuner may set.
fn values(node: &Node, cgroups: &[String]) -> BTreeMap<String, String> {
    let root = node.containerd.cgroup();
    let read = |cgroup: &String, file: &str| {
        let dir = root.folder(file.split('.').next()?, cgroup)?;
        let value = std::fs::read_to_string(dir.join(file)).ok()?;
        Some((format!("{cgroup} {file}"), value.trim().to_owned()))
    };
    cgroups.iter().flat_map(|cgroup| FILES.iter().filter_map(move |file| read(cgroup, file))).collect()
}

fn json_of(node: &Node, arguments: &[&str]) -> Vec<Value> {
    let (code, text, errors) = node.cli(arguments);
    assert_eq!(code, Some(0), "{errors}");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Waits until the tuner holds a cap, which is its last step.
fn wait_until_held(node: &Node) -> Vec<Value> {
    wait_for("the tuner to cap the hog", PATIENCE, || {
        let status = json_of(node, &["tune", "status", "-o", "json"]).remove(0);
        let held = status["held"].as_array().unwrap().clone();
        if held.iter().any(|one| one["setting"] == "cpu.max") { Ok(held) } else { Err(status) }
    })
    .unwrap()
}

#[test]
fn held_settings_are_shown_and_restored_after_kill_9_even_with_the_tuner_off() {
    require!(containerd, psi);
    let mut node = Node::start(|options| options.beelet("tuner", json!({ "mode": "off" })));
    let cpus = std::thread::available_parallelism().unwrap().get();
    // A server with more threads than there are CPUs always waits.
    let (waiting, hog) = ((cpus + 1).to_string(), cpus.to_string());
    let server = manifests::pod("server", &["/bin/testapp", "hog", "busy", &waiting]);
    node.apply(&manifests::with_resources(server, ("100m", ""), ("", "")));
    node.apply(&manifests::pod("hog", &["/bin/testapp", "hog", "busy", &hog]));
    let running = |name: &str| node.wait(name, "to run", |pod| pod.phase() == "Running").uid().to_owned();
    let cgroups = [
        BEST_EFFORT.to_owned(),
        pod_path("BestEffort", &running("hog")),
        pod_path("Burstable", &running("server")),
    ];
    let base = values(&node, &cgroups);
    assert!(base.len() >= 6, "{base:?}");
    assert!(node.cli(&["tune", "status"]).1.starts_with("Tuner:    off"));

    let rounds = if requires::long().is_ok() { ROUNDS.1 } else { ROUNDS.0 };
    for round in 0..rounds {
        node.agent.terminate().unwrap();
        node.agent = Agent::start(options(&node.containerd, "enforce")).unwrap();
        let held = wait_until_held(&node);
        if round == 0 {
            is_shown(&node, &held);
        }
        node.agent.kill9();
        assert_ne!(
            values(&node, &cgroups),
            base,
            "round {round}: no setting is held: the test shows nothing"
        );
        node.agent = Agent::start(options(&node.containerd, "off")).unwrap();
        // The API answers before the agent has checked the cgroups.
        let journal = node.agent.dir().join("state/tuner.json");
        wait_for(&format!("the owner's values to be back in round {round}"), PATIENCE, || {
            let now = values(&node, &cgroups);
            if now == base && !journal.exists() { Ok(()) } else { Err(format!("{now:?}, not {base:?}")) }
        })
        .unwrap();
    }
    for name in ["server", "hog"] {
        let pod = node.wait(name, "to run on", |pod| pod.phase() == "Running");
        assert_eq!(pod.container("main").unwrap().restart_count, 0);
    }
}

/// Checks the output for people and for programs, which must have the owner's value and the reason.
fn is_shown(node: &Node, held: &[Value]) {
    let first =
        held.iter().find(|one| one["setting"] == "cpu.idle" || one["setting"] == "cpu.weight").unwrap();
    assert_eq!((first["cgroup"].as_str(), first["value"].as_str()), (Some(BEST_EFFORT), Some("1")));
    assert!(!first["ownersValue"].as_str().unwrap().is_empty(), "{first}");
    assert!(first["reason"].as_str().unwrap().contains("default/server-"), "{first}");
    let (_, text, _) = node.cli(&["tune", "status"]);
    assert!(text.starts_with("Tuner:    enforce, last round"), "{text}");
    assert!(text.contains("waits for a CPU") && text.contains(BEST_EFFORT), "{text}");
    let steps = json_of(node, &["tune", "history", "-o", "json"]);
    let (idle, cap) = (&steps[0], &steps[1]);
    assert_eq!((&idle["outcome"], &idle["to"], &idle["from"]), (&json!("done"), &json!("1"), &Value::Null));
    assert_eq!(cap["setting"], "cpu.max", "{steps:?}");
    let (_, text, _) = node.cli(&["tune", "history"]);
    assert!(text.contains("owner's") && text.contains("BestEffort pods"), "{text}");
}
