//! TCP probes of real pods whose listener is not a socket of the pod's own network namespace.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use crate::node::Node;
use beelet_tests::manifests::{self, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{guards, require};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::Command;

/// Checks of a probe after which the pod counts as left alone: a kernel's wrong answer fails the first three.
const CHECKS: usize = 5;

/// Returns a pod that listens on `port`, with readiness and liveness probes of [`PORT`] every second. The
/// annotation asks for the kernel's answers.
fn pod(name: &str, port: u16) -> Value {
    let port = port.to_string();
    let pod = manifests::pod(name, &["/bin/testapp", "serve", "--tcp", &port]);
    let probe = json!({ "tcpSocket": { "port": PORT }, "periodSeconds": 1, "timeoutSeconds": 30 });
    let mut pod = manifests::with(pod, "readinessProbe", probe.clone());
    pod["metadata"]["annotations"] = json!({ "beelet.dev/probes": "mode=kernel" });
    manifests::with(pod, "livenessProbe", probe)
}

/// Returns the probes of a pod, as `probe ls` lists them.
fn probes(node: &Node, name: &str) -> Vec<Value> {
    let (code, out, error) = node.cli(&["probe", "ls", "-o", "json"]);
    assert_eq!(code, Some(0), "{error}");
    let all: Vec<Value> = serde_json::from_str(&out).unwrap();
    all.into_iter().filter(|probe| probe["pod"].as_str().is_some_and(|pod| pod.starts_with(name))).collect()
}

/// Checks that both probes connect, have succeeded [`CHECKS`] times, and that no container was restarted.
fn stays_ready(node: &Node, name: &str) {
    node.wait(name, "to be ready", PodView::ready);
    let mut checks: [BTreeSet<String>; 2] = Default::default();
    let connecting = wait_for("both probes to connect again and again", PATIENCE, || {
        let all = probes(node, name);
        for (times, probe) in checks.iter_mut().zip(&all).filter(|(_, probe)| probe["mode"] == "connect") {
            times.extend(probe["last"]["at"].as_str().map(str::to_owned));
        }
        let enough = checks.iter().all(|times| times.len() >= CHECKS);
        if enough { Ok(all) } else { Err(format!("{all:#?}")) }
    })
    .unwrap();
    for probe in connecting {
        assert_eq!(probe["result"], "success", "{probe:#}");
        assert!(probe["fallback"].is_string(), "{probe:#}");
    }
    let pod = node.wait(name, "to be ready", PodView::ready);
    assert_eq!(pod.restarts(), 0, "{}", pod.name());
}

#[test]
fn a_pod_that_redirects_its_port_is_ready_and_never_restarted() {
    require!(containerd, bpf, portmap);
    let node = Node::start(|options| options);
    node.apply(&pod("web", PORT + 1));
    node.wait("web", "to run", |pod| pod.phase() == "Running");
    let cgroups = node.containerd.cgroup().dirs();
    let processes: Vec<_> = cgroups.iter().flat_map(|dir| guards::processes_below(dir)).collect();
    let process = processes.first().unwrap().as_raw_nonzero();
    let rule = format!("-A PREROUTING -p tcp --dport {PORT} -j REDIRECT --to-ports {}", PORT + 1);
    let mut words = vec!["--net".to_owned(), format!("--target={process}"), "iptables".into(), "-w".into()];
    words.extend(["-t".to_owned(), "nat".into()].into_iter().chain(rule.split(' ').map(str::to_owned)));
    let output = Command::new("nsenter").args(words).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    stays_ready(&node, "web");
}
