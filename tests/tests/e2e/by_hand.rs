//! Checks that a person would do by hand: the order of a pod's containers, their ends, the published events,
//! and a port of the machine.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::node::{Node, container, script};
use beelet_tests::agent::Control;
use beelet_tests::containerd::Containerd;
use beelet_tests::guards::Process;
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{require, requires};
use serde_json::{Value, json};

/// Returns the pod with a folder of the machine at `/shared` in all of its containers. Files in the folder
/// outlive the containers.
fn sharing(mut pod: Value, folder: &Path) -> Value {
    std::fs::create_dir_all(folder).unwrap();
    pod["spec"]["volumes"] = json!([{ "name": "shared", "hostPath": { "path": folder } }]);
    for kind in ["initContainers", "containers"] {
        for container in pod["spec"][kind].as_array_mut().into_iter().flatten() {
            container["volumeMounts"] = json!([{ "name": "shared", "mountPath": "/shared" }]);
        }
    }
    pod
}

fn shared(node: &Node) -> PathBuf {
    node.containerd.dir().join("shared")
}

/// Returns a container that runs until SIGTERM and then writes its name to the log.
fn until_stopped(name: &str) -> Value {
    container(
        name,
        &format!("trap 'echo {name} >> /shared/log; exit 0' TERM; while true; do sleep 0.05; done"),
    )
}

#[test]
fn init_containers_run_one_after_the_other() {
    require!(containerd);
    let node = Node::start(|options| options);
    let mut pod = script("web", "cat /shared/log");
    // If the containers ran at the same time, the later ones would end first.
    let init =
        |name: &str, pause: &str| container(name, &format!("sleep {pause}; echo {name} >> /shared/log"));
    pod["spec"]["initContainers"] = json!([init("first", "0.6"), init("second", "0.3"), init("third", "0")]);
    node.apply(&sharing(pod, &shared(&node)));
    assert_eq!(node.output("web"), "first\nsecond\nthird\n");
}

#[test]
fn sidecars_are_stopped_after_the_others_and_in_reverse() {
    require!(containerd);
    let node = Node::start(|options| options);
    let sidecar = |name: &str| {
        let mut container = until_stopped(name);
        container["restartPolicy"] = json!("Always");
        container
    };
    let mut pod = script("web", "");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(30);
    pod["spec"]["containers"] = json!([until_stopped("main")]);
    pod["spec"]["initContainers"] = json!([sidecar("one"), sidecar("two")]);
    node.apply(&sharing(pod, &shared(&node)));
    node.wait("web", "to be ready", PodView::ready);
    node.remove("web");
    node.wait_gone("web");
    assert_eq!(std::fs::read_to_string(shared(&node).join("log")).unwrap(), "main\ntwo\none\n");
}

#[test]
fn a_pre_stop_command_ends_before_its_container_is_stopped() {
    require!(containerd);
    let node = Node::start(|options| options);
    let mut pod = script("web", "");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(30);
    pod["spec"]["containers"] = json!([until_stopped("main")]);
    pod["spec"]["containers"][0]["lifecycle"] = json!({ "preStop": { "exec": { "command": ["/bin/sh", "-c", "sleep 0.5; echo hook >> /shared/log"] } } });
    node.apply(&sharing(pod, &shared(&node)));
    node.wait("web", "to be ready", PodView::ready);
    node.remove("web");
    node.wait_gone("web");
    assert_eq!(std::fs::read_to_string(shared(&node).join("log")).unwrap(), "hook\nmain\n");
}

#[test]
fn a_container_that_ignores_sigterm_has_its_grace_period_and_is_killed() {
    require!(containerd);
    let node = Node::start(|options| options);
    let mut pod = script("deaf", "trap 'echo heard' TERM; while true; do sleep 0.05; done");
    // A failed pod keeps the last states of its containers.
    pod["spec"]["activeDeadlineSeconds"] = json!(2);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(4);
    node.apply(&pod);
    let pod = node.wait("deaf", "to fail", |pod| pod.phase() == "Failed" && ended(pod).is_some());
    let (code, reason, seconds) = ended(&pod).unwrap();
    assert_eq!((code, reason.as_str()), (137, "Error"));
    // Both times are in whole seconds.
    assert!(seconds >= 5, "the container ran for {seconds} s, with a grace period of 4");
    assert_eq!(node.log(&pod, "main", 0), "heard\n");
}

/// Returns the exit code of `main`, the reason, and the seconds that `main` ran.
fn ended(pod: &PodView) -> Option<(i32, String, i64)> {
    let ended = pod.container("main")?.state.clone()?.terminated?;
    let ran = ended.finished_at?.0.duration_since(ended.started_at?.0);
    Some((ended.exit_code, ended.reason?, ran.as_secs()))
}

#[test]
fn a_container_over_its_memory_limit_is_restarted_and_reported() {
    require!(containerd);
    let node = Node::start(|options| options);
    let pod = manifests::pod("hungry", &["/bin/testapp", "serve", "--control", &CONTROL.to_string()]);
    node.apply(&manifests::with_resources(pod, ("", "32Mi"), ("", "32Mi")));
    let pod = node.wait("hungry", "to be ready", PodView::ready);
    // The connection ends with the program, so the answer is missing.
    let _ = Control::connect(pod.ip().unwrap(), CONTROL).unwrap().send("hold 64");
    let last = |pod: &PodView| pod.container("main")?.last_state.clone()?.terminated;
    let pod = node.wait("hungry", "to be restarted", |pod| pod.restarts() == 1 && pod.ready());
    let ended = last(&pod).unwrap();
    assert_eq!((ended.exit_code, ended.reason.as_deref()), (137, Some("OOMKilled")));
    if let Err(missing) = requires::bpf() {
        requires::skip(&missing);
        return;
    }
    let message = ended.message.unwrap_or_default();
    assert!(
        message.contains("for want of memory") && message.contains("the container's memory limit is 32Mi"),
        "{message}"
    );
    // Most of the 32 MiB belonged to the process when it was killed.
    let own = message.split("it had ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    assert!((16..=32).contains(&own.unwrap()), "{message}");
    let (code, events, error) = node.cli(&["events", "--for", "hungry-testnode"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(events.contains("OOMKilling") && events.contains("for want of memory"), "{events}");
}

#[test]
fn events_are_watched_as_they_come() {
    require!(containerd);
    let node = Node::start(|options| options);
    let watching = node.agent.cli(&["events", "--watch"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut watching = Process(watching);
    let lines = BufReader::new(watching.0.stdout.take().unwrap()).lines();
    let (sender, lines_here) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        // The loop ends with the command, or with the test.
        let _ = lines.map_while(Result::ok).try_for_each(|line| sender.send(line));
    });
    node.apply(&script("web", "exit 0"));
    for wanted in ["Created container: main", "Started container main"] {
        let mut seen = Vec::new();
        while !seen.last().is_some_and(|line: &String| line.contains(wanted) && line.contains("web")) {
            let line = lines_here.recv_timeout(PATIENCE);
            seen.push(line.unwrap_or_else(|error| panic!("{error}: {wanted} is missing in {seen:#?}")));
        }
    }
    drop(watching);
    reader.join().unwrap();
}

/// The rules that the portmap plugin makes once for all pods. Rules that did not exist before are removed on
/// drop.
struct PortmapRules {
    there_before: bool,
}

impl PortmapRules {
    fn guard() -> Self {
        Self { there_before: !Self::list().is_empty() }
    }

    fn run(arguments: &str) -> String {
        let output = Command::new("sh").args(["-c", &format!("iptables -w 30 -t nat {arguments}")]).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
    }

    fn list() -> Vec<String> {
        let of_plugin = |line: &&str| line.contains("CNI-HOSTPORT-") || line.contains("CNI-DN-");
        Self::run("-S").lines().filter(of_plugin).map(ToOwned::to_owned).collect()
    }
}

impl Drop for PortmapRules {
    fn drop(&mut self) {
        if self.there_before {
            return;
        }
        let rules = Self::list();
        for rule in rules.iter().filter_map(|line| line.strip_prefix("-A ")) {
            Self::run(&format!("-D {rule}"));
        }
        for chain in rules.iter().filter_map(|line| line.strip_prefix("-N ")) {
            Self::run(&format!("-X {chain}"));
        }
    }
}

#[test]
fn a_host_port_leads_to_the_pod_while_it_runs() {
    require!(containerd, portmap);
    let _rules = PortmapRules::guard();
    let mut containerd = Containerd::start_for_test().unwrap();
    let file = containerd.dir().join("net.d/10-beelet.conflist");
    let mut network: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let portmap = json!({ "type": "portmap", "capabilities": { "portMappings": true } });
    network["plugins"].as_array_mut().unwrap().push(portmap);
    std::fs::write(&file, network.to_string()).unwrap();
    containerd.restart().unwrap();
    let node = Node::on(containerd, |options| options);
    let port = std::net::TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
    let ports = json!([{ "containerPort": PORT, "hostPort": port }]);
    node.apply(&manifests::with(manifests::serving("web"), "ports", ports));
    let pod = node.wait("web", "to be ready", PodView::ready);
    // The address is the machine's own on the pods' network.
    let machine = format!("{}.1", pod.ip().unwrap().rsplit_once('.').unwrap().0);
    let connect = || TcpStream::connect((machine.as_str(), port)).map(drop);
    wait_for("the machine's port to lead to the pod", PATIENCE, connect).unwrap();
    node.remove("web");
    node.wait_gone("web");
    connect().unwrap_err();
}
