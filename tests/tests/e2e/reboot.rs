//! The machine reboots: no earlier container runs, and the contents of memory are lost.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::collections::BTreeSet;
use std::path::Path;

use crate::node::{Node, script};
use anyhow::Result;
use beelet_proto::cri;
use beelet_state::{Loaded, State};
use beelet_tests::containerd::{Containerd, Cri, block_on};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{guards, manifests, require};
use serde_json::{Value, json};

/// Gives the records in a state folder the id of an earlier boot.
fn date_back(dir: &Path) {
    let mut records = Vec::new();
    let state = State::open(dir).unwrap();
    for file in std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path()) {
        if file.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let Loaded::Value { value, same_boot: true } = state.load::<Value>(&name).unwrap() else { continue };
        records.push((name, value));
    }
    drop(state);
    assert!(records.iter().any(|(name, _)| name == "pods"), "no record of pods in {}", dir.display());
    let state = State::open_in_boot(dir, "the boot before").unwrap();
    records.into_iter().for_each(|(name, value)| state.store(&name, &value).unwrap());
}

/// Returns the numbers of the runtime's sandboxes and containers: all, and the running ones.
fn counts(containerd: &Containerd) -> [(usize, usize); 2] {
    let socket = containerd.socket();
    let counted = block_on(async {
        let mut cri = Cri::connect(&socket).await?;
        let sandboxes = cri.runtime.list_pod_sandbox(cri::ListPodSandboxRequest { filter: None }).await?;
        let sandboxes = sandboxes.into_inner().items;
        let containers = cri.runtime.list_containers(cri::ListContainersRequest { filter: None }).await?;
        let containers = containers.into_inner().containers;
        let ready = sandboxes.iter().filter(|one| one.state() == cri::PodSandboxState::SandboxReady).count();
        let running =
            containers.iter().filter(|one| one.state() == cri::ContainerState::ContainerRunning).count();
        Result::Ok([(sandboxes.len(), ready), (containers.len(), running)])
    });
    counted.unwrap()
}

/// Returns the pods that have a cgroup, from the folders' names.
fn cgroups_of_pods(dir: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        // A slice's name begins with those of its ancestors, and its own part has no dashes.
        let own = name.strip_suffix(".slice").and_then(|slice| slice.rsplit('-').next());
        match own.unwrap_or(&name).strip_prefix("pod") {
            Some(uid) => drop(found.insert(uid.replace('_', "-"))),
            None => found.extend(cgroups_of_pods(&entry.path())),
        }
    }
    found
}

#[test]
fn after_a_reboot_the_same_pods_run_again_and_nothing_is_left_of_those_before() {
    require!(containerd);
    reboots(Containerd::start_for_test().unwrap());
    if let Err(missing) = beelet_tests::requires::containerd_2() {
        beelet_tests::requires::skip(&missing);
        return;
    }
    reboots(Containerd::start_version_2_for_test().unwrap());
}

fn reboots(containerd: Containerd) {
    let mut node = Node::on(containerd, |options| options);
    node.apply(&manifests::serving("web"));
    let mut keeper = script("keeper", "echo started >> /v/log; echo x > /m/log; exec sleep 100000");
    keeper["spec"]["restartPolicy"] = json!("Always");
    keeper["spec"]["volumes"] =
        json!([{ "name": "disk", "emptyDir": {} }, { "name": "ram", "emptyDir": { "medium": "Memory" } }]);
    keeper["spec"]["containers"][0]["volumeMounts"] =
        json!([{ "name": "disk", "mountPath": "/v" }, { "name": "ram", "mountPath": "/m" }]);
    node.apply(&keeper);
    // This pod's manifest is removed before the machine is back.
    node.apply(&manifests::pod("leaving", &["/bin/testapp", "pause"]));
    let before = ["web", "keeper", "leaving"].map(|name| node.wait(name, "to be ready", PodView::ready));
    assert_eq!(node.containerd.leases().len(), 3);

    node.agent.kill9();
    node.containerd.reboot().unwrap();
    assert_eq!(guards::processes_below(&node.containerd.cgroup().dir("pids").unwrap()), []);
    date_back(&node.agent.dir().join("state"));
    node.agent.remove("pod-leaving.yaml").unwrap();
    node.containerd.resume().unwrap();
    assert_eq!(
        counts(&node.containerd).map(|(_, runs)| runs),
        [0, 0],
        "a container runs before the agent's start"
    );
    node.agent.resume().unwrap();

    for (name, before) in [("web", &before[0]), ("keeper", &before[1])] {
        let again = |pod: &PodView| pod.ready() && pod.restarts() == 1;
        let pod = node.wait(name, "to run again", again);
        assert_eq!(pod.uid(), before.uid(), "{name}");
    }
    node.wait_gone("leaving");
    let log = node.folder(&before[1]).join("volumes/disk/log");
    node.wait_file(&log, |text| text == "started\nstarted\n");
    // Each pod has a running sandbox and container and the dead ones from before; one address, one cgroup,
    // one folder.
    wait_for("the remains of before to be removed", PATIENCE, || {
        let found = (counts(&node.containerd), node.containerd.leases().len());
        if found == ([(4, 2), (4, 2)], 2) { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .unwrap();
    let wanted: BTreeSet<String> = before[..2].iter().map(|pod| pod.uid().to_owned()).collect();
    for dir in node.containerd.cgroup().dirs() {
        let found = cgroups_of_pods(&dir);
        assert!(found.is_subset(&wanted), "{}: {found:?}, not {wanted:?}", dir.display());
    }
    let folders = std::fs::read_dir(node.agent.dir().join("pods")).unwrap().flatten();
    let folders: BTreeSet<String> = folders.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    assert_eq!(folders, wanted);
    let ram = node.folder(&before[1]).join("volumes/ram");
    assert_eq!(node.mounts_below(&node.agent.dir().join("pods")), [ram]);
}
