//! Fields of a pod's spec that no other test covers, one short pod for each, on a real containerd: their
//! effect in the runtime, or the message that refuses them.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::{fs, path::Path};

use crate::node::{Node, check_lines, container, script};
use beelet_tests::containerd::Containerd;
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{images, require};
use serde_json::{Value, json};

fn with(mut pod: Value, field: &str, value: Value) -> Value {
    pod["spec"][field] = value;
    pod
}

/// Returns the pod with one field of its only container replaced.
fn with_main(mut pod: Value, field: &str, value: Value) -> Value {
    pod["spec"]["containers"][0][field] = value;
    pod
}

/// Returns the pod with a volume that its container has at `/data`.
fn with_volume(pod: Value, volume: Value, mount: Value) -> Value {
    let (mut volume, mut mount) = (volume, mount);
    volume["name"] = json!("data");
    mount["name"] = json!("data");
    mount["mountPath"] = json!("/data");
    with(with_main(pod, "volumeMounts", json!([mount])), "volumes", json!([volume]))
}

/// Waits for an event of a pod with these words, or for the pod's end. Returns true for the event.
fn refused(node: &Node, pod: &str, words: &str) -> bool {
    wait_for(&format!("{pod} to end, or to be refused with {words:?}"), PATIENCE, || {
        let events = node.cli(&["events"]).1;
        if events.lines().any(|line| line.contains(pod) && line.contains(words)) {
            return Ok(true);
        }
        match node.cli(&["wait", pod, "--for=ended", "--timeout", "1s"]).0 {
            Some(0) => Ok(false),
            _ => Err(events),
        }
    })
    .unwrap()
}

#[test]
fn names_folders_and_other_plain_fields_are_taken() {
    require!(containerd);
    let node = Node::start(|options| options);
    let pod = with(script("named", "hostname; pwd"), "hostnameOverride", json!("whole.name.test"));
    let pod = with(pod, "os", json!({"name": "linux"}));
    let pod = with(pod, "preemptionPolicy", json!("Never"));
    let context =
        json!({"fsGroup": 4000, "fsGroupChangePolicy": "OnRootMismatch", "seLinuxChangePolicy": "Recursive"});
    let pod = with(pod, "securityContext", context);
    node.apply(&with_main(pod, "workingDir", json!("/tmp")));
    check_lines(&node.output("named"), &["whole.name.test", "/tmp"]);
}

#[test]
fn a_variable_is_taken_from_a_file_of_an_init_container() {
    require!(containerd);
    let node = Node::start(|options| options);
    let mut writer = container("writer", "echo \"COLOR='deep red'\" > /data/vars.env");
    writer["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    let variable = json!([{"name": "SHADE", "valueFrom": {"fileKeyRef":
        {"volumeName": "data", "path": "vars.env", "key": "COLOR"}}}]);
    let pod = with_main(script("vars", "echo shade: $SHADE"), "env", variable);
    let pod = with(pod, "initContainers", json!([writer]));
    node.apply(&with(pod, "volumes", json!([{"name": "data", "emptyDir": {}}])));
    check_lines(&node.output("vars"), &["shade: deep red"]);
}

#[test]
fn huge_pages_are_mounted_where_the_machine_has_some() {
    require!(containerd);
    let Some(_pages) = Pages::reserve(4) else {
        eprintln!("this kernel can't reserve huge pages of 2 MiB; the test shows nothing");
        return;
    };
    let node = Node::start(|options| options);
    let amounts = json!({"memory": "32Mi", "hugepages-2Mi": "4Mi"});
    let pod =
        with_main(script("huge", "grep ' /data ' /proc/mounts"), "resources", json!({"limits": amounts}));
    node.apply(&with_volume(pod, json!({"emptyDir": {"medium": "HugePages"}}), json!({})));
    let text = node.output("huge");
    assert!(text.contains("hugetlbfs") && text.contains("pagesize=2M"), "{text}");
    let (_, described, _) = node.cli(&["describe", "node"]);
    assert!(described.contains("hugepages-2Mi"), "{described}");
}

/// Huge pages that are reserved until the drop.
struct Pages(String);

impl Pages {
    const FILE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

    fn reserve(count: u64) -> Option<Self> {
        let before = fs::read_to_string(Self::FILE).ok()?;
        let here: u64 = before.trim().parse().ok()?;
        let pages = Pages(before);
        fs::write(Self::FILE, (here + count).to_string()).ok()?;
        let now: u64 = fs::read_to_string(Self::FILE).ok()?.trim().parse().ok()?;
        (now >= here + count).then_some(pages)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // A failure can't be reported here.
        let _ = fs::write(Self::FILE, self.0.trim());
    }
}

#[test]
fn features_of_newer_runtimes_work_or_are_refused() {
    require!(containerd_2);
    let node = Node::on(Containerd::start_version_2_for_test().unwrap(), |options| options);
    let groups = script("groups", "id -G");
    let context = json!({"runAsUser": 1000, "runAsGroup": 1000, "supplementalGroups": [2000], "supplementalGroupsPolicy": "Strict"});
    node.apply(&with(groups, "securityContext", context));
    let readonly = script("readonly", "touch /data/x || echo read-only");
    let mount = json!({"readOnly": true, "recursiveReadOnly": "IfPossible"});
    node.apply(&with_volume(readonly, json!({"emptyDir": {}}), mount));
    let stopped = with(script("signal", "true"), "os", json!({"name": "linux"}));
    node.apply(&with_main(stopped, "lifecycle", json!({"stopSignal": "SIGUSR1"})));
    let users = with(
        script("users", "cat /proc/self/uid_map; touch /data/x && stat -c %u /data/x"),
        "hostUsers",
        json!(false),
    );
    node.apply(&with_volume(users, json!({"emptyDir": {}}), json!({})));
    check_lines(&node.output("groups"), &["1000 2000"]);
    check_lines(&node.output("readonly"), &["read-only"]);
    if refused(&node, "signal", "containerd 2.3") {
        assert!(
            node.waiting("signal", "main", "CreateContainerConfigError").contains("lifecycle.stopSignal")
        );
    }
    if refused(&node, "users", "does not support user namespaces") {
        return;
    }
    let text = node.output("users");
    let map: Vec<&str> = text.lines().next().unwrap_or_default().split_whitespace().collect();
    assert_eq!((map[0], map[2]), ("0", "65536"), "{text}");
    assert!(map[1].parse::<u32>().unwrap() >= 65_536, "{text}");
    check_lines(&text, &["0"]);
}

#[test]
fn a_debugger_sees_the_processes_of_its_target() {
    require!(containerd);
    let node = Node::start(|options| options);
    node.apply(&script("web", "sleep 1000077"));
    node.wait("web", "to run", |pod| pod.phase() == "Running");
    let look = "ps | grep -q '[s]leep 1000077' && echo seen";
    let arguments = ["debug", "web", "--image", images::APP, "--target", "main", "--", "/bin/sh", "-c", look];
    let (code, out, err) = node.cli(&arguments);
    assert_eq!(code, Some(0), "{out}\n{err}");
    let ended = |pod: &PodView| {
        let all = pod.pod.status.as_ref().and_then(|status| status.ephemeral_container_statuses.as_ref());
        let one = all.into_iter().flatten().find(|one| one.name == "debugger");
        one.and_then(|one| one.state.as_ref()?.terminated.as_ref()).is_some()
    };
    let pod = node.wait("web", "to have its debugger ended", ended);
    assert_eq!(node.log(&pod, "debugger", 0), "seen\n");
    assert_eq!(pod.phase(), "Running");
}

#[test]
fn invalid_fields_are_refused_with_their_line() {
    require!(containerd);
    let node = Node::start(|options| options);
    let file = node.agent.dir().join("refused.yaml");
    let check = |pod: &Value, words: &str| {
        fs::write(&file, pod.to_string()).unwrap();
        let (code, out, err) = node.cli(&["apply", "--dry-run", "-f", path(&file)]);
        assert!(code != Some(0) && err.contains(words), "{out}\n{err}");
    };
    check(
        &with(script("a", "true"), "schedulingGates", json!([{"name": "a.test/b"}])),
        "spec.schedulingGates",
    );
    let windows = json!({"windowsOptions": {"runAsUserName": "x"}});
    check(&with(script("a", "true"), "securityContext", windows), "are for nodes of Windows");
    let unmasked = with_main(script("a", "true"), "securityContext", json!({"procMount": "Unmasked"}));
    check(&unmasked, "only if spec.hostUsers is false");
    check(
        &with(with(script("a", "true"), "hostUsers", json!(false)), "hostPID", json!(true)),
        "spec.hostPID",
    );
    let pages = json!({"limits": {"hugepages-2Mi": "3Mi", "cpu": "1"}});
    check(&with_main(script("a", "true"), "resources", pages), "multiple of the page size");
}

fn path(file: &Path) -> &str {
    file.to_str().unwrap()
}
