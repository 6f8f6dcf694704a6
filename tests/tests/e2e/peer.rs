//! The agent and a kubelet: the values that both write to cgroups for the same pods, with the cgroup driver
//! of the tests' containerd.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use crate::node::installed;
use beelet_cri::Runtime;
use beelet_proto::cri;
use beelet_tests::agent::{self, Agent};
use beelet_tests::cgroup_values::pod_path;
use beelet_tests::containerd::{Containerd, block_on};
use beelet_tests::guards::CgroupRoot;
use beelet_tests::kubelet::{self, Kubelet};
use beelet_tests::pods::Watch;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{manifests, require, requires};
use serde_json::json;

/// Values of cgroup files, by the cgroup's owner and the file's name.
type Values = BTreeMap<(String, &'static str), String>;

/// Files per controller that a pod's resources determine. The runtime writes the others, or they differ
/// between kubelets (memory.oom.group, pids.max, memory.min).
const FILES: &[(&str, &[&str])] = &[
    ("cpu", &["cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.weight", "cpu.max"]),
    ("memory", &["memory.limit_in_bytes", "memory.max"]),
];

/// Returns the pods with their names and QoS classes: those of examples/ that use the test's image, and one
/// with the resources of redis.
fn pods() -> Vec<(&'static str, &'static str, String)> {
    let redis = manifests::pod("redis", &["/bin/sh", "-c", "exec sleep 100000"]);
    let redis = manifests::with_resources(redis, ("100m", "64Mi"), ("", "128Mi"));
    vec![
        ("orders", "Guaranteed", include_str!("../../../examples/orders.yaml").to_owned()),
        ("web", "Burstable", include_str!("../../../examples/web.yaml").to_owned()),
        ("redis", "Burstable", redis.to_string()),
        ("batch", "BestEffort", include_str!("../../../examples/batch.yaml").to_owned()),
    ]
}

fn read(root: &CgroupRoot, what: &str, path: &str, into: &mut Values) {
    for (controller, files) in FILES {
        let folder = root.folder(controller, path).unwrap();
        for file in *files {
            if let Ok(text) = std::fs::read_to_string(folder.join(file)) {
                into.insert((what.to_owned(), *file), text.trim().to_owned());
            }
        }
    }
}

/// Returns true if the labels belong to that static pod, on either node.
fn is_of(labels: &HashMap<String, String>, name: &str) -> bool {
    let pod = labels.get("io.kubernetes.pod.name");
    pod.is_some_and(|pod| [agent::NODE, kubelet::NODE].iter().any(|node| *pod == format!("{name}-{node}")))
}

/// Returns the values of everything below the root, once all pods run.
fn values(containerd: &Containerd) -> Result<Values, String> {
    let endpoint = containerd.endpoint();
    let (sandboxes, containers) = block_on(async move {
        let runtime = Runtime::new(&endpoint, Duration::from_secs(30))?;
        Ok((runtime.sandboxes.list(None).await?, runtime.containers.list(None).await?))
    })
    .map_err(|error| format!("{error:#}"))?;
    let root = containerd.cgroup();
    let mut found = Values::new();
    for (what, path) in
        [("pods", "/kubepods"), ("burstable", "/kubepods/burstable"), ("besteffort", "/kubepods/besteffort")]
    {
        read(root, what, path, &mut found);
    }
    for (name, class, _) in pods() {
        let sandbox = sandboxes.iter().find(|one| is_of(&one.labels, name));
        let sandbox = sandbox.ok_or(format!("{name} has no sandbox"))?;
        let runs = |one: &&cri::Container| {
            is_of(&one.labels, name) && one.state() == cri::ContainerState::ContainerRunning
        };
        let container = containers.iter().find(runs).ok_or(format!("{name} does not run"))?;
        let pod = pod_path(class, &sandbox.labels["io.kubernetes.pod.uid"]);
        read(root, name, &pod, &mut found);
        read(root, &format!("{name}'s sandbox"), &format!("{pod}/{}", sandbox.id), &mut found);
        read(root, &format!("{name}'s container"), &format!("{pod}/{}", container.id), &mut found);
    }
    Ok(found)
}

/// Returns the differences between the two, one per line.
fn apart(ours: &Values, theirs: &Values) -> Vec<String> {
    let keys: BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
    let differs = keys.into_iter().filter(|key| ours.get(*key) != theirs.get(*key));
    let line = |key: &(String, &str)| {
        format!("{} {}: ours {:?}, the kubelet's {:?}", key.0, key.1, ours.get(key), theirs.get(key))
    };
    differs.map(line).collect()
}

#[test]
fn the_examples_get_the_values_that_a_kubelet_writes() {
    require!(containerd);
    let binary = match kubelet::given() {
        Ok(binary) => binary,
        Err(missing) => return requires::skip(&missing),
    };
    let ours = {
        let containerd = Containerd::start_for_test().unwrap();
        let options = installed(&containerd).kubelet("evictionHard", json!({ "memory.available": "1Mi" }));
        let agent = Agent::start(options).unwrap();
        for (name, _, manifest) in pods() {
            agent.apply(&format!("{name}.yaml"), manifest).unwrap();
        }
        let ready = |name: &str| {
            let found = |watch: &Watch| watch.pod(name).filter(|pod| pod.ready()).map(drop);
            agent.until(&format!("{name} to be ready"), found).unwrap();
        };
        pods().iter().for_each(|(name, ..)| ready(name));
        values(&containerd).unwrap()
    };
    for ((what, file), value) in &ours {
        println!("{what} {file}: {value}");
    }
    let containerd = Containerd::start_for_test().unwrap();
    let mut kubelet = Kubelet::start(&binary, &containerd).unwrap();
    for (name, _, manifest) in pods() {
        kubelet.apply_text(name, &manifest).unwrap();
    }
    // The kubelet writes the values of its QoS classes once per minute.
    wait_for("the kubelet's values to equal the agent's", PATIENCE * 2, || {
        assert!(!kubelet.has_ended(), "the kubelet ended:\n{}", kubelet.log());
        match values(&containerd).map(|theirs| apart(&ours, &theirs)) {
            Ok(apart) if apart.is_empty() => Ok(()),
            Ok(apart) => Err(apart.join("\n")),
            Err(error) => Err(format!("{error}\n{}", kubelet.log())),
        }
    })
    .unwrap();
}
