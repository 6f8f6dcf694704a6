//! Pods with devices of a plugin that runs in a process of its own: the settings of containers, waiting pods,
//! and recovery from restarts of the plugin, the agent and the machine.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use beelet_proto::cri;
use beelet_tests::cri::{CHANGES, Op};
use beelet_tests::device_plugin::SamplePlugin;
use beelet_tests::workdir::{self, PATIENCE};
use serde_json::{Value, json};

use super::node::{Node, Settings, View, container, pod, with};

pub(crate) const RESOURCE: &str = "example.com/sample";
pub(crate) const PLUGIN: &str = env!("CARGO_BIN_EXE_sample_device_plugin");

/// Starts a node whose pods may have devices and wait `wait` seconds for them.
pub(crate) async fn node(wait: u64, pods: &[Value]) -> Node {
    let settings = Settings { plugin_wait: Some(Duration::from_secs(wait)), ..Settings::default() };
    let node = Node::with_settings(settings, pods).await;
    until_socket(&node);
    node
}

pub(crate) fn until_socket(node: &Node) {
    let socket = node.path("kubelet/device-plugins/kubelet.sock");
    let there = || if socket.exists() { Ok(()) } else { Err("the socket is missing") };
    workdir::wait_for("the registration socket", PATIENCE, there).unwrap();
}

pub(crate) fn plugin(node: &Node, arguments: &[&str]) -> SamplePlugin {
    SamplePlugin::registered(Path::new(PLUGIN), &node.path("kubelet/device-plugins"), arguments).unwrap()
}

/// Returns a container that requests `count` devices.
pub(crate) fn wanting(name: &str, count: u32) -> Value {
    wanting_of(RESOURCE, name, count)
}

pub(crate) fn wanting_of(resource: &str, name: &str, count: u32) -> Value {
    let mut container = container(name);
    container["resources"] = json!({ "limits": { resource: count } });
    container
}

pub(crate) fn pod_wanting(name: &str, count: u32) -> Value {
    with(pod(name), "containers", json!([wanting("main", count)]))
}

/// Returns the configuration with which the newest container of a pod was created.
pub(crate) fn config(node: &Node, pod: &str, container: &str) -> cri::ContainerConfig {
    let name = format!("{pod}-n1");
    node.cri.container(&name, container).unwrap_or_else(|| panic!("{pod} has no {container}")).config
}

pub(crate) fn env(config: &cri::ContainerConfig, name: &str) -> Option<String> {
    config.envs.iter().find(|env| env.key == name).map(|env| String::from_utf8(env.value.clone()).unwrap())
}

/// Returns the devices that a container was started with, from the environment variable that the plugin sets.
pub(crate) fn given(node: &Node, pod: &str) -> BTreeSet<String> {
    let devices = env(&config(node, pod, "main"), "SAMPLE_DEVICES").unwrap_or_default();
    devices.split(',').map(str::to_owned).collect()
}

/// Returns the devices that the ledger holds for a pod.
pub(crate) fn held(node: &Node, pod: &View) -> BTreeSet<String> {
    let held = node.devices().view().held_by(&pod.uid());
    held.into_values()
        .flat_map(std::collections::BTreeMap::into_values)
        .flat_map(std::collections::BTreeMap::into_keys)
        .collect()
}

/// Waits until the node has this capacity and this allocatable number of devices.
pub(crate) async fn until_capacity(node: &Node, capacity: usize, allocatable: usize) {
    until_capacity_of(node, RESOURCE, capacity, allocatable).await;
}

pub(crate) async fn until_capacity_of(node: &Node, resource: &str, capacity: usize, allocatable: usize) {
    let mut changes = node.devices().node();
    let of =
        |amounts: &std::collections::BTreeMap<String, usize>| amounts.get(resource).copied().unwrap_or(0);
    let reached = changes.wait_for(|n| (of(&n.capacity), of(&n.allocatable)) == (capacity, allocatable));
    let reached = tokio::time::timeout(PATIENCE, reached).await;
    assert!(reached.is_ok(), "{:?}", node.devices().node().borrow());
}

/// Returns the status of a pod's container, if it has one.
fn main_of(pod: &View) -> Option<k8s_openapi::api::core::v1::ContainerStatus> {
    let status = pod.0.pod.status.as_ref()?;
    status.container_statuses.iter().flatten().find(|c| c.name == "main").cloned()
}

fn waits_for(pod: &View, reason: &str) -> bool {
    let waiting = main_of(pod).and_then(|main| main.state?.waiting?.reason);
    waiting.as_deref() == Some(reason)
}

fn health(pod: &View) -> Vec<String> {
    let statuses = main_of(pod).and_then(|main| main.allocated_resources_status).unwrap_or_default();
    let resources = statuses.into_iter().flat_map(|status| status.resources.unwrap_or_default());
    resources.map(|r| format!("{}: {}", r.resource_id, r.health.unwrap_or_default())).collect()
}

pub(crate) fn failed(pod: &View) -> bool {
    pod.phase() == "Failed"
        && pod.0.pod.status.as_ref().and_then(|s| s.reason.as_deref()) == Some("UnexpectedAdmissionError")
}

/// Waits until the pods' durable record contains a word.
fn until_recorded(node: &Node, word: &str) {
    let record = node.path("state/pods.json");
    let written = || {
        let text = std::fs::read_to_string(&record).unwrap_or_default();
        if text.contains(word) { Ok(()) } else { Err("the record lacks the word") }
    };
    workdir::wait_for("the record", PATIENCE, written).unwrap();
}

/// Returns the names of the checkpoints that were set aside.
fn set_aside(node: &Node) -> BTreeSet<String> {
    let names = std::fs::read_dir(node.path("kubelet/device-plugins")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("checkpoint.corrupt-")).collect()
}

fn message(pod: &View) -> String {
    pod.0.pod.status.as_ref().and_then(|s| s.message.clone()).unwrap_or_default()
}

#[tokio::test]
async fn a_container_gets_its_plugins_settings() {
    let node = node(300, &[]).await;
    let arguments =
        ["--device", "/dev/null:/dev/sample", "--mount", "/tmp:/opt/sample", "--cdi", "example.com/c=x"];
    let mut plugin = plugin(&node, &[&arguments[..], &["--pre-start", "--devices", "a b@1 !c"]].concat());
    until_capacity(&node, 3, 2).await;
    let mut own = wanting("main", 2);
    own["env"] = json!([{ "name": "OWN", "value": "yes" }]);
    node.apply(&with(pod("web"), "containers", json!([own])));
    let web = node.until_ready("web").await;
    let config = config(&node, "web", "main");
    assert_eq!(env(&config, "SAMPLE_DEVICES").as_deref(), Some("a,b"));
    assert_eq!(env(&config, "OWN").as_deref(), Some("yes"));
    assert_eq!(config.annotations["sample.beelet.dev/devices"], "a,b");
    let nodes: Vec<_> =
        config.devices.iter().map(|d| (&*d.host_path, &*d.container_path, &*d.permissions)).collect();
    assert_eq!(nodes, [("/dev/null", "/dev/sample", "rw")]);
    assert!(
        config
            .mounts
            .iter()
            .any(|m| m.host_path == "/tmp" && m.container_path == "/opt/sample" && m.readonly)
    );
    assert_eq!(config.cdi_devices[0].name, "example.com/c=x");
    assert_eq!(plugin.hear("allocate").unwrap(), "a b");
    assert_eq!(plugin.hear("prestart").unwrap(), "a b");
    assert_eq!(health(&web), ["a: Healthy", "b: Healthy"]);
    // The plugin is notified of each further start, which needs no new allocation.
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 1);
    node.until_pod("web", "to run again", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    assert_eq!(plugin.hear("prestart").unwrap(), "a b");
    assert_eq!(plugin.heard("allocate "), Vec::<String>::new());
}

#[tokio::test]
async fn a_plugins_preference_and_health_are_respected() {
    let node = node(300, &[]).await;
    let mut plugin = plugin(&node, &["--preferred", "--devices", "a b c"]);
    until_capacity(&node, 3, 3).await;
    plugin.run("prefer c").unwrap();
    node.apply(&pod_wanting("web", 1));
    let web = node.until_ready("web").await;
    assert_eq!(given(&node, "web"), BTreeSet::from(["c".to_owned()]));
    assert_eq!(plugin.hear("preferred").unwrap(), "1 of a b c");
    plugin.run("devices a b !c").unwrap();
    until_capacity(&node, 3, 2).await;
    node.until_pod("web", "to report the device's health", |pod| health(pod) == ["c: Unhealthy"]).await;
    assert_eq!(held(&node, &web), BTreeSet::from(["c".to_owned()]));
}

#[tokio::test]
async fn a_pod_without_enough_devices_is_refused_and_runs_later() {
    let node = node(300, &[]).await;
    let _plugin = plugin(&node, &["--devices", "a b"]);
    until_capacity(&node, 2, 2).await;
    node.apply(&pod_wanting("first", 2));
    let first = node.until_ready("first").await;
    node.apply(&pod_wanting("second", 1));
    let second = node.until_pod("second", "to be refused", failed).await;
    assert_eq!(
        message(&second),
        "Allocate failed due to requested number of devices unavailable for example.com/sample. Requested: 1, \
         Available: 0, which is unexpected"
    );
    assert!(node.cri.sandbox("second-n1").is_none(), "a sandbox was started for a refused pod");
    node.remove("first");
    node.until_nothing_is_left(&first).await;
    node.until_ready("second").await;
    assert_eq!(given(&node, "second").len(), 1);
}

#[tokio::test]
async fn a_refused_pod_is_admitted_or_refused_again_after_a_restart() {
    let mut node = node(300, &[]).await;
    let mut plugin = plugin(&node, &["--devices", "a b"]);
    until_capacity(&node, 2, 2).await;
    node.apply(&pod_wanting("first", 2));
    let first = node.until_ready("first").await;
    node.apply(&pod_wanting("second", 1));
    let refused = node.until_pod("second", "to be refused", failed).await;
    until_recorded(&node, "UnexpectedAdmissionError");
    // The agent refuses the unchanged pod again, after it has waited for the plugin to register.
    node.kill().await;
    node.start().await;
    until_socket(&node);
    assert_eq!(plugin.hear("registered").unwrap(), "");
    until_capacity(&node, 2, 2).await;
    let again = node.until_pod("second", "to be refused again", failed).await;
    assert_eq!(again.uid(), refused.uid());
    until_recorded(&node, "UnexpectedAdmissionError");
    // A pod that was refused before the restart runs when devices are free after it.
    node.kill().await;
    node.remove("first");
    node.start().await;
    node.until_nothing_is_left(&first).await;
    node.until_ready("second").await;
    assert_eq!(given(&node, "second").len(), 1);
}

#[tokio::test]
async fn a_plugin_that_fails_ends_the_pod_and_all_devices_are_released() {
    let node = node(300, &[]).await;
    let mut plugin = plugin(&node, &["--devices", "a b"]);
    until_capacity(&node, 2, 2).await;
    plugin.run("allocate fail the firmware is gone").unwrap();
    node.apply(&pod_wanting("web", 2));
    let web = node.until_pod("web", "to be refused", failed).await;
    assert!(message(&web).contains("the firmware is gone"), "{}", message(&web));
    assert_eq!(held(&node, &web), BTreeSet::new());
    plugin.run("allocate empty").unwrap();
    node.apply(&pod_wanting("other", 2));
    let other = node.until_pod("other", "to be refused", failed).await;
    assert!(message(&other).contains("no containers return in allocation response"), "{}", message(&other));
    plugin.run("allocate ok").unwrap();
    node.apply(&pod_wanting("third", 2));
    node.until_ready("third").await;
    assert_eq!(given(&node, "third").len(), 2);
}

#[tokio::test]
async fn a_failed_pre_start_call_is_retried() {
    let node = node(300, &[]).await;
    let mut plugin = plugin(&node, &["--pre-start"]);
    until_capacity(&node, 2, 2).await;
    plugin.run("prestart fail it is warming up").unwrap();
    node.apply(&pod_wanting("web", 1));
    let web = node.until_pod("web", "to wait", |pod| waits_for(pod, "CreateContainerConfigError")).await;
    assert!(web.waiting("main").unwrap().1.contains("it is warming up"));
    plugin.run("prestart ok").unwrap();
    node.until_ready("web").await;
}

#[tokio::test]
async fn devices_of_an_init_container_are_free_after_its_end() {
    let node = node(300, &[]).await;
    let _plugin = plugin(&node, &["--devices", "a b c"]);
    until_capacity(&node, 3, 3).await;
    let web = with(pod("web"), "containers", json!([wanting("main", 1)]));
    node.apply(&with(web, "initContainers", json!([wanting("init", 3)])));
    let web = node.until_ready("web").await;
    let released = || match held(&node, &web).len() {
        1 => Ok(()),
        count => Err(format!("the pod holds {count} devices")),
    };
    workdir::wait_for("the release", PATIENCE, released).unwrap();
    node.apply(&pod_wanting("other", 2));
    node.until_ready("other").await;
    assert!(given(&node, "web").is_disjoint(&given(&node, "other")));
}

#[tokio::test]
async fn a_kill_and_upgrade_of_a_plugin_affects_no_pod() {
    let node = node(300, &[]).await;
    let old = plugin(&node, &["--devices", "a b"]);
    until_capacity(&node, 2, 2).await;
    node.apply(&pod_wanting("web", 1));
    let web = node.until_ready("web").await;
    let before = held(&node, &web);
    old.kill9();
    until_capacity(&node, 2, 0).await;
    node.until_pod("web", "to report unknown health", |pod| {
        health(pod).iter().any(|h| h.ends_with("Unknown"))
    })
    .await;
    // The new version has another socket and one more device.
    let newer = plugin(&node, &["--devices", "a b c", "--socket", "v2.sock"]);
    until_capacity(&node, 3, 3).await;
    node.until_pod("web", "to report healthy devices", |pod| {
        health(pod).iter().any(|h| h.ends_with(": Healthy"))
    })
    .await;
    assert_eq!(held(&node, &web), before);
    assert_eq!(node.cri.count(Op::StopContainer), 0);
    // A plugin that is killed and restarted at the same path is followed even before it registers.
    newer.kill9();
    until_capacity(&node, 3, 0).await;
    let _again = plugin(&node, &["--devices", "a b c", "--socket", "v2.sock"]);
    until_capacity(&node, 3, 3).await;
    node.apply(&pod_wanting("other", 2));
    node.until_ready("other").await;
    assert!(given(&node, "other").is_disjoint(&before));
}

#[tokio::test]
async fn a_plugin_is_found_in_the_registry_and_removed_with_its_socket() {
    let node = node(300, &[]).await;
    let registry = node.path("kubelet/plugins_registry");
    let there = || if registry.exists() { Ok(()) } else { Err("the registry is missing") };
    workdir::wait_for("the registry", PATIENCE, there).unwrap();
    let plugin = SamplePlugin::registered(Path::new(PLUGIN), &registry, &["--registry"]).unwrap();
    until_capacity(&node, 2, 2).await;
    node.apply(&pod_wanting("web", 1));
    node.until_ready("web").await;
    plugin.quit().unwrap();
    until_capacity(&node, 2, 0).await;
}

#[tokio::test]
async fn silent_sockets_in_the_registry_delay_no_plugin() {
    let node = node(300, &[]).await;
    let registry = node.path("kubelet/plugins_registry");
    let there = || if registry.exists() { Ok(()) } else { Err("the registry is missing") };
    workdir::wait_for("the registry", PATIENCE, there).unwrap();
    // No process accepts connections at these sockets. If the agent asked them one after the other, the wait
    // would exceed the test's deadline.
    let silent = |n: u32| registry.join(format!("a-silent-{n:02}.sock"));
    let listeners: Vec<_> =
        (0..15).map(|n| std::os::unix::net::UnixListener::bind(silent(n)).unwrap()).collect();
    let _plugin = SamplePlugin::registered(Path::new(PLUGIN), &registry, &["--registry"]).unwrap();
    until_capacity(&node, 2, 2).await;
    drop(listeners);
}

#[tokio::test]
async fn running_pods_keep_their_devices_over_a_restart_without_the_plugin() {
    let mut node = node(300, &[]).await;
    let plugin = plugin(&node, &["--devices", "a b", "--deaf"]);
    until_capacity(&node, 2, 2).await;
    node.apply(&pod_wanting("web", 1));
    let web = node.until_ready("web").await;
    let before = held(&node, &web);
    node.kill().await;
    plugin.kill9();
    let changes = node.done(&CHANGES);
    node.start().await;
    node.until_ready("web").await;
    node.until_relisted().await;
    // No plugin has registered, but the node had two devices and will have them again.
    until_capacity(&node, 2, 2).await;
    assert_eq!(held(&node, &web), before);
    assert_eq!(node.done(&CHANGES), changes, "{}", node.cri.transcript());
    // A container with devices that ends is started again without the plugin, as under the kubelet.
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 1);
    node.until_pod("web", "to run again", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    assert_eq!(given(&node, "web"), before);
}

#[tokio::test]
async fn after_a_reboot_a_pod_waits_for_its_late_plugin() {
    let mut node = node(300, &[]).await;
    let first = plugin(&node, &["--devices", "a b", "--deaf"]);
    until_capacity(&node, 2, 2).await;
    node.apply(&pod_wanting("web", 1));
    let web = node.until_ready("web").await;
    let before = held(&node, &web);
    node.kill().await;
    first.kill9();
    node.cri.reboot();
    node.apply(&pod_wanting("new", 1));
    node.start().await;
    until_socket(&node);
    for name in ["web", "new"] {
        let waiting = node.until_pod(name, "to wait", |pod| waits_for(pod, "WaitingForDevices")).await;
        assert!(matches!(waiting.phase().as_str(), "Pending" | "Running"), "{:?}", waiting.0.pod.status);
    }
    until_capacity(&node, 2, 2).await;
    assert_eq!(node.devices().view().waiting().len(), 2);
    // The dead sandbox is stopped once, before its successor, not at each inspection by the worker.
    node.until_relisted().await;
    assert_eq!(node.done(&[Op::StopPodSandbox]), 0);
    let _late = plugin(&node, &["--devices", "a b"]);
    node.until_ready("web").await;
    node.until_ready("new").await;
    assert_eq!(given(&node, "web"), before, "the pod has other devices than before");
    assert!(given(&node, "new").is_disjoint(&before));
    assert_eq!(node.devices().view().waiting(), []);
}

#[tokio::test]
async fn after_a_reboot_of_a_full_node_an_init_container_has_its_pods_devices_again() {
    let mut node = node(300, &[]).await;
    let first = plugin(&node, &["--devices", "a"]);
    until_capacity(&node, 1, 1).await;
    let web = with(pod("web"), "containers", json!([wanting("main", 1)]));
    node.apply(&with(web, "initContainers", json!([wanting("init", 1)])));
    let web = node.until_ready("web").await;
    let holders = || match node.devices().view().held_by(&web.uid()).len() {
        1 => Ok(()),
        count => Err(format!("{count} containers hold the device")),
    };
    workdir::wait_for("the init container's release", PATIENCE, holders).unwrap();
    node.kill().await;
    first.kill9();
    node.cri.reboot();
    node.start().await;
    until_socket(&node);
    let _second = plugin(&node, &["--devices", "a"]);
    let web = node.until_ready("web").await;
    assert_eq!(held(&node, &web), BTreeSet::from(["a".to_owned()]));
    let init = env(&config(&node, "web", "init"), "SAMPLE_DEVICES");
    assert_eq!((init.as_deref(), given(&node, "web")), (Some("a"), BTreeSet::from(["a".to_owned()])));
    assert_eq!(node.containers("web"), "init/0- init/1- main/0- main/1+");
}

#[tokio::test]
async fn a_pod_that_ends_by_itself_frees_devices_for_a_refused_pod() {
    let node = node(300, &[]).await;
    let _plugin = plugin(&node, &["--devices", "a"]);
    until_capacity(&node, 1, 1).await;
    node.apply(&with(pod_wanting("job", 1), "restartPolicy", json!("Never")));
    node.until_ready("job").await;
    node.apply(&pod_wanting("other", 1));
    node.until_pod("other", "to be refused", failed).await;
    node.cri.exit(&node.cri.container("job-n1", "main").unwrap().id, 0);
    node.until_ready("other").await;
}

#[tokio::test]
async fn a_pod_that_waited_too_long_for_its_plugin_runs_when_the_plugin_registers() {
    // Without any wait the pod fails as under the kubelet.
    for wait in [1, 0] {
        let mut node = node(300, &[]).await;
        let first = plugin(&node, &["--deaf"]);
        until_capacity(&node, 2, 2).await;
        node.apply(&pod_wanting("web", 1));
        node.until_ready("web").await;
        node.kill().await;
        first.kill9();
        node.cri.reboot();
        node.settings.plugin_wait = Some(Duration::from_secs(wait));
        node.start().await;
        until_socket(&node);
        node.until_pod("web", "to be refused", failed).await;
        let _late = plugin(&node, &[]);
        node.until_ready("web").await;
    }
}

#[tokio::test]
async fn a_pod_waits_for_a_plugin_that_never_registered_before() {
    let node = node(300, &[pod_wanting("web", 1)]).await;
    let waiting = node.until_pod("web", "to wait", |pod| waits_for(pod, "WaitingForDevices")).await;
    assert!(waiting.waiting("main").unwrap().1.contains("has not registered yet"));
    let _plugin = plugin(&node, &[]);
    node.until_ready("web").await;
    assert_eq!(given(&node, "web").len(), 1);
}

#[tokio::test]
async fn a_damaged_checkpoint_is_set_aside_and_rebuilt_from_the_containers() {
    let mut node = node(300, &[]).await;
    let mut plugin = plugin(&node, &["--devices", "a b c"]);
    until_capacity(&node, 3, 3).await;
    node.apply(&pod_wanting("web", 2));
    let web = node.until_ready("web").await;
    let before = held(&node, &web);
    for damage in [&b""[..], b"{\"Data\":", b"\xff\xfe"] {
        node.kill().await;
        let earlier = set_aside(&node);
        std::fs::write(node.store.file().path(), damage).unwrap();
        node.start().await;
        until_socket(&node);
        plugin.hear("registered").unwrap();
        until_capacity(&node, 3, 3).await;
        assert_eq!(held(&node, &web), before, "{damage:?}");
        let moved: Vec<String> = set_aside(&node).difference(&earlier).cloned().collect();
        assert_eq!(moved.len(), 1, "{damage:?}: {moved:?}");
        let events = node.events();
        let has = |reason: &str, words: &str| {
            events.iter().any(|event| event.starts_with(reason) && event.contains(words))
        };
        assert!(has("DeviceCheckpointCorrupt: ", &moved[0]), "{damage:?}: {events:?}");
        assert!(has("DeviceCheckpointRebuilt: ", "devices of 1 pods"), "{damage:?}: {events:?}");
    }
    node.apply(&pod_wanting("other", 1));
    node.until_ready("other").await;
    assert!(given(&node, "other").is_disjoint(&before));
    assert_eq!(set_aside(&node).len(), 3);
}

#[tokio::test]
async fn plugins_that_misbehave_affect_only_themselves() {
    let node = node(300, &[]).await;
    let mut many = plugin(&node, &["--resource", "example.com/many", "--socket", "many.sock"]);
    let mut good = plugin(&node, &["--devices", "a b"]);
    many.run("many 100000").unwrap();
    let mut changes = node.devices().node();
    let there = changes.wait_for(|node| node.capacity.get("example.com/many") == Some(&100_000));
    tokio::time::timeout(PATIENCE, there).await.unwrap().unwrap();
    // The list has the same device twice, and one without a name.
    good.run("devices a a b @1").unwrap();
    until_capacity(&node, 3, 3).await;
    // This plugin answers with bytes that are not HTTP/2.
    let garbage = node.path("kubelet/device-plugins/garbage.sock");
    let listener = std::os::unix::net::UnixListener::bind(&garbage).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = std::io::Write::write_all(&mut &stream, &[0x5a; 4096]);
        }
    });
    let kubelet = node.path("kubelet/device-plugins/kubelet.sock");
    let refused = register(&kubelet, "v1beta1", "garbage.sock", "example.com/garbage").await;
    assert!(refused.is_err(), "{refused:?}");
    node.apply(&pod_wanting("web", 1));
    node.until_ready("web").await;
}

#[tokio::test]
async fn a_plugin_that_hangs_delays_only_pods_that_request_its_devices() {
    const OTHER: &str = "example.com/other";
    let mut node = node(300, &[]).await;
    let mut hangs = plugin(&node, &["--devices", "a b c"]);
    let mut other = plugin(&node, &["--resource", OTHER, "--socket", "other.sock", "--devices", "x y"]);
    until_capacity(&node, 3, 3).await;
    until_capacity_of(&node, OTHER, 2, 2).await;
    hangs.run("allocate hang").unwrap();
    node.apply(&pod_wanting("stuck", 1));
    assert_eq!(hangs.hear("allocate").unwrap(), "a");
    // Three more pods: for the same plugin, for both plugins, for the other plugin.
    node.apply(&pod_wanting("behind", 1));
    let both = json!([wanting("main", 1), wanting_of(OTHER, "second", 1)]);
    node.apply(&with(pod("both"), "containers", both));
    for name in ["goes-on", "goes-on-too"] {
        node.apply(&with(pod(name), "containers", json!([wanting_of(OTHER, "main", 1)])));
        node.until_ready(name).await;
        other.hear("allocated").unwrap();
    }
    let stuck = node.until_pod("stuck", "to exist", |_| true).await;
    assert_eq!(stuck.phase(), "Pending");
    assert!(node.cri.sandbox("stuck-n1").is_none() && node.cri.sandbox("behind-n1").is_none());
    assert_eq!(
        hangs.heard("allocate "),
        Vec::<String>::new(),
        "the agent made the next call before the first was answered"
    );
    // Workers don't wait for a pod that is no longer wanted, and the agent doesn't wait for a plugin.
    node.remove("stuck");
    assert_eq!(hangs.hear("allocate").unwrap(), "a");
    node.stop().await;
    hangs.run("allocate ok").unwrap();
    node.start().await;
    until_socket(&node);
    node.until_ready("behind").await;
    let both = node.until_pod("both", "to be refused", failed).await;
    assert!(message(&both).contains(OTHER), "{}", message(&both));
    assert_eq!(given(&node, "behind").len(), 1);
}

async fn register(socket: &Path, version: &str, endpoint: &str, resource: &str) -> Result<(), String> {
    use beelet_proto::deviceplugin::{RegisterRequest, registration_client::RegistrationClient};
    let channel = beelet_tests::containerd::connect(socket).await.unwrap();
    let request = RegisterRequest {
        version: version.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: resource.to_owned(),
        options: None,
    };
    let answer = RegistrationClient::new(channel).register(request).await;
    answer.map(drop).map_err(|status| status.message().to_owned())
}

#[tokio::test]
async fn registrations_are_refused_with_the_kubelets_messages() {
    let node = node(300, &[]).await;
    let kubelet = node.path("kubelet/device-plugins/kubelet.sock");
    let check = async |version, endpoint, resource, expected: &str| {
        let refused = register(&kubelet, version, endpoint, resource).await.unwrap_err();
        assert!(refused.contains(expected), "{refused}");
    };
    check("v2", "x.sock", RESOURCE, "requested API version \"v2\" is not supported by kubelet").await;
    check("v1beta1", "x.sock", "gpu", "the ResourceName \"gpu\" is invalid").await;
    check("v1beta1", "../../etc/passwd", RESOURCE, "without '..'").await;
    check("v1beta1", "nothing.sock", RESOURCE, "No such file").await;
    // The agent's own socket is not a plugin's.
    check("v1beta1", "kubelet.sock", RESOURCE, "is the agent's own").await;
}
