//! Faults during a hand-over: agents that are killed, a runtime that restarts, a machine that reboots.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use beelet_tests::cluster::{Cluster, condition};
use beelet_tests::guards::Process;
use beelet_tests::kubelet;
use beelet_tests::require;
use beelet_tests::workdir::{PATIENCE, wait_for};
use serde_json::Value;

use super::agents::until_driven;
use super::kinds::{Kind, Then};
use super::scene::{Scene, Task, tasks};
use super::{asserts, given, objects, uids};

/// Starts a node with few pods under a kubelet.
fn start() -> Option<(Scene, Vec<String>)> {
    let mut scene = Scene::start(&given()?);
    objects::create(&scene);
    for number in 0..4 {
        let pod = scene.facts.serving(number);
        scene.run(Kind { pod, then: Then::Serves });
    }
    let mut names = scene.serving();
    names.push(objects::write_static(&scene, "static0"));
    names.iter().for_each(|name| scene.until_ready(name));
    Some((scene, names))
}

/// Waits for an event of an agent's start.
fn until(scene: &Scene, what: &str, happened: impl Fn() -> bool) {
    let happened = || if happened() { Ok(()) } else { Err("not yet".to_owned()) };
    wait_for(what, PATIENCE, happened).unwrap_or_else(|error| panic!("{error:#}\n{}", scene.agents.logs()));
}

/// Starts beelet, and kills it at an event of its start.
fn kill_beelet_at(scene: &Scene, what: &str, happened: impl Fn() -> bool) {
    scene.agents.beelet.run("start");
    until(scene, what, happened);
    scene.agents.beelet.kill9();
}

/// Asserts that all processes run on, also while no agent runs.
fn assert_processes(scene: &Scene, before: &BTreeMap<String, Task>, what: &str) {
    assert_eq!(tasks(&scene.containerd), *before, "{what}\n{}", scene.agents.logs());
}

#[test]
fn agents_killed_at_each_step_of_a_hand_over_cost_no_pod_anything() {
    require!(containerd, bpf, apiserver);
    let Some((scene, names)) = start() else { return };
    let before = tasks(&scene.containerd);
    let known = uids(&scene, &names);
    let log = |word: &str| scene.agents.beelet_log().matches(word).count();

    scene.agents.kubelet.kill9();
    assert_processes(&scene, &before, "the kubelet was killed");
    kill_beelet_at(&scene, "beelet to be executed", || true);
    assert_processes(&scene, &before, "beelet was killed as it started");
    kill_beelet_at(&scene, "the first adoption", || log("adopting the pod of a kubelet") > 0);
    assert_processes(&scene, &before, "beelet was killed at the first adoption");
    kill_beelet_at(&scene, "the record", || scene.agents.refused.record("adopted").is_some());
    assert_processes(&scene, &before, "beelet was killed after its record");
    kill_beelet_at(&scene, "the socket", || {
        std::os::unix::net::UnixStream::connect(scene.agents.refused.socket()).is_ok()
    });
    assert_processes(&scene, &before, "beelet was killed when it answered");

    // Back, although beelet never completed its start.
    scene.agents.kubelet.run("start");
    scene.agents.kubelet.kill9();
    assert_processes(&scene, &before, "the kubelet was killed as it started");
    scene.agents.kubelet.run("start");
    until_driven(&scene.containerd);
    scene.agents.kubelet.kill9();
    assert_processes(&scene, &before, "the kubelet was killed when it drove the runtime");

    // The command itself is killed between the stop of the one agent and the start of the other.
    scene.agents.kubelet.run("start");
    until_driven(&scene.containerd);
    let mut command = scene.agents.handover_command();
    let command = command.arg("--from-kubelet").stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut command = Process(command);
    let lines = BufReader::new(command.0.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.starts_with("starting beelet")));
    drop(command);
    assert_processes(&scene, &before, "the command was killed");
    scene.agents.must_handover(&["--from-kubelet"]);
    asserts::same(&scene, &before, "under beelet");
    let mut command = scene.agents.handover_command();
    let arguments = scene.agents.to_kubelet();
    let command = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut command = Process(command);
    let lines = BufReader::new(command.0.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.starts_with("stopping beelet")));
    drop(command);
    assert_processes(&scene, &before, "the command was killed on the way back");
    scene.agents.must_handover(&scene.agents.to_kubelet());
    names.iter().for_each(|name| scene.until_ready(name));
    asserts::same(&scene, &before, "under the kubelet");
    scene.agents.kubelet.kill9();
    scene.agents.must_handover(&["--from-kubelet"]);
    names.iter().for_each(|name| scene.until_ready(name));
    asserts::same(&scene, &before, "under beelet at the end");
    assert_eq!(uids(&scene, &names), known, "a pod was replaced");
}

#[test]
fn a_runtime_that_restarts_during_a_hand_over_costs_no_pod_anything() {
    require!(containerd, bpf, apiserver);
    let Some((mut scene, names)) = start() else { return };
    let before = tasks(&scene.containerd);
    // While no agent runs.
    scene.agents.kubelet.run("stop");
    scene.containerd.restart().unwrap();
    // While the next agent starts.
    scene.containerd.kill9();
    scene.agents.beelet.run("start");
    until(&scene, "beelet to start", || !scene.agents.beelet_log().is_empty());
    scene.containerd.resume().unwrap();
    scene.agents.must_handover(&["--from-kubelet"]);
    // After its start.
    scene.containerd.restart().unwrap();
    names.iter().for_each(|name| scene.until_ready(name));
    asserts::same(&scene, &before, "under beelet");
    scene.agents.beelet.run("stop");
    scene.containerd.restart().unwrap();
    scene.agents.must_handover(&scene.agents.to_kubelet());
    scene.containerd.restart().unwrap();
    names.iter().for_each(|name| scene.until_ready(name));
    asserts::same(&scene, &before, "under the kubelet");
}

#[test]
fn a_reboot_between_two_agents_starts_each_container_once_again() {
    require!(containerd, bpf, apiserver);
    let Some((mut scene, names)) = start() else { return };
    let known = uids(&scene, &names);
    let reboot = |scene: &mut Scene| {
        scene.containerd.reboot().unwrap();
        kubelet::share_root(&scene.containerd).unwrap();
        scene.containerd.resume().unwrap();
        assert!(tasks(&scene.containerd).is_empty());
    };
    let until_again = |scene: &Scene, count: u64| {
        for name in &names {
            let again = |pod: &Value| {
                let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
                (condition(pod, "Ready") && restarts.as_u64() == Some(count)).then_some(())
            };
            scene.until(&format!("{name} to run again"), &Cluster::pod(name), again);
        }
        assert_eq!(uids(scene, &names), known, "a pod was replaced");
        assert_eq!(tasks(&scene.containerd).len(), names.len(), "a container runs twice");
        let hooks = "x\n".repeat(usize::try_from(count).unwrap() + 1);
        // The hook runs beside the container's first probes.
        let have_run = || {
            let text = scene.inside("web0", "/data/hooks");
            if text.as_ref() == Some(&hooks) { Ok(()) } else { Err(format!("{text:?}")) }
        };
        wait_for("the hook to have run again", PATIENCE, have_run).unwrap();
        assert_eq!(scene.inside("web0", "/word/pass").as_deref(), Some("sesame"));
    };
    scene.agents.kubelet.kill9();
    reboot(&mut scene);
    scene.agents.beelet.run("start");
    until_again(&scene, 1);
    scene.agents.beelet.kill9();
    reboot(&mut scene);
    scene.agents.kubelet.run("start");
    until_again(&scene, 2);
    let before = tasks(&scene.containerd);
    scene.agents.must_handover(&["--from-kubelet"]);
    assert_processes(&scene, &before, "after the reboots");
}
