//! Pods with devices of a plugin in a process of its own: what containers get, who has to wait, and what survives what.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use beelet_proto::cri;
use beelet_tests::cri::{Asked, Op};
use beelet_tests::device_plugin::SamplePlugin;
use beelet_tests::workdir::{self, PATIENCE};
use serde_json::{Value, json};

use crate::node::{CHANGES, InWrite, Node, Settings, View, container, pod, with};

const RESOURCE: &str = "example.com/sample";
const PLUGIN: &str = env!("CARGO_BIN_EXE_sample_device_plugin");

/// A node whose pods may have devices, and wait so long for them.
async fn node(wait: u64, pods: &[Value]) -> Node {
    let settings = Settings { plugin_wait: Some(Duration::from_secs(wait)), ..Settings::default() };
    let node = Node::with_settings(settings, pods).await;
    until_socket(&node);
    node
}

fn until_socket(node: &Node) {
    let socket = node.path("kubelet/device-plugins/kubelet.sock");
    let there = || if socket.exists() { Ok(()) } else { Err("it isn't there") };
    workdir::wait_for("the registration socket", PATIENCE, there).unwrap();
}

fn plugin(node: &Node, arguments: &[&str]) -> SamplePlugin {
    SamplePlugin::registered(Path::new(PLUGIN), &node.path("kubelet/device-plugins"), arguments).unwrap()
}

/// A container that asks for so many devices.
fn wanting(name: &str, count: u32) -> Value {
    let mut container = container(name);
    container["resources"] = json!({ "limits": { RESOURCE: count } });
    container
}

fn pod_wanting(name: &str, count: u32) -> Value {
    with(pod(name), "containers", json!([wanting("main", count)]))
}

/// How the newest container of a pod was created.
fn config(node: &Node, pod: &str, container: &str) -> cri::ContainerConfig {
    let name = format!("{pod}-n1");
    node.cri.container(&name, container).unwrap_or_else(|| panic!("{pod} has no {container}")).config
}

fn env(config: &cri::ContainerConfig, name: &str) -> Option<String> {
    config.envs.iter().find(|env| env.key == name).map(|env| env.value.clone())
}

/// The devices that a container was started with, from what the plugin put into its environment.
fn given(node: &Node, pod: &str) -> BTreeSet<String> {
    let devices = env(&config(node, pod, "main"), "SAMPLE_DEVICES").unwrap_or_default();
    devices.split(',').map(str::to_owned).collect()
}

/// The devices that the ledger says a pod holds.
fn held(node: &Node, pod: &View) -> BTreeSet<String> {
    let held = node.devices().held_by(&pod.uid());
    held.into_values()
        .flat_map(std::collections::BTreeMap::into_values)
        .flat_map(std::collections::BTreeMap::into_keys)
        .collect()
}

/// (capacity, allocatable)
async fn until_capacity(node: &Node, capacity: usize, allocatable: usize) {
    let mut changes = node.devices().node();
    let of =
        |amounts: &std::collections::BTreeMap<String, usize>| amounts.get(RESOURCE).copied().unwrap_or(0);
    let reached = changes.wait_for(|n| (of(&n.capacity), of(&n.allocatable)) == (capacity, allocatable));
    let reached = tokio::time::timeout(PATIENCE, reached).await;
    assert!(reached.is_ok(), "{:?}", node.devices().node().borrow());
}

/// The status of a pod's container, once it has one.
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

fn failed(pod: &View) -> bool {
    pod.phase() == "Failed"
        && pod.0.pod.status.as_ref().and_then(|s| s.reason.as_deref()) == Some("UnexpectedAdmissionError")
}

fn message(pod: &View) -> String {
    pod.0.pod.status.as_ref().and_then(|s| s.message.clone()).unwrap_or_default()
}

#[tokio::test]
async fn a_container_gets_what_its_plugin_says() {
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
    // Each further start is told to the plugin too, and needs no new allocation.
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 1);
    node.until_pod("web", "to run again", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    assert_eq!(plugin.hear("prestart").unwrap(), "a b");
    assert_eq!(plugin.heard("allocate "), Vec::<String>::new());
}

#[tokio::test]
async fn a_plugins_preference_and_health_are_heeded() {
    let node = node(300, &[]).await;
    let mut plugin = plugin(&node, &["--preferred", "--devices", "a b c"]);
    until_capacity(&node, 3, 3).await;
    plugin.tell("prefer c").unwrap();
    node.apply(&pod_wanting("web", 1));
    let web = node.until_ready("web").await;
    assert_eq!(given(&node, "web"), BTreeSet::from(["c".to_owned()]));
    assert_eq!(plugin.hear("preferred").unwrap(), "1 of a b c");
    plugin.tell("devices a b !c").unwrap();
    until_capacity(&node, 3, 2).await;
    node.until_pod("web", "to be told", |pod| health(pod) == ["c: Unhealthy"]).await;
    assert_eq!(held(&node, &web), BTreeSet::from(["c".to_owned()]));
}

#[tokio::test]
async fn a_pod_without_enough_devices_is_refused_and_runs_when_there_are() {
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
    assert!(node.cri.sandbox("second-n1").is_none(), "it was started for nothing");
    node.remove("first");
    node.until_nothing_is_left(&first).await;
    node.until_ready("second").await;
    assert_eq!(given(&node, "second").len(), 1);
}

#[tokio::test]
async fn a_plugin_that_fails_ends_the_pod_and_everything_is_given_back() {
    let node = node(300, &[]).await;
    let mut plugin = plugin(&node, &["--devices", "a b"]);
    until_capacity(&node, 2, 2).await;
    plugin.tell("allocate fail the firmware is gone").unwrap();
    node.apply(&pod_wanting("web", 2));
    let web = node.until_pod("web", "to be refused", failed).await;
    assert!(message(&web).contains("the firmware is gone"), "{}", message(&web));
    assert_eq!(held(&node, &web), BTreeSet::new());
    plugin.tell("allocate empty").unwrap();
    node.apply(&pod_wanting("other", 2));
    let other = node.until_pod("other", "to be refused", failed).await;
    assert!(message(&other).contains("no containers return in allocation response"), "{}", message(&other));
    plugin.tell("allocate ok").unwrap();
    node.apply(&pod_wanting("third", 2));
    node.until_ready("third").await;
    assert_eq!(given(&node, "third").len(), 2);
}

#[tokio::test]
async fn a_plugin_that_does_not_let_a_container_start_is_asked_again() {
    let node = node(300, &[]).await;
    let mut plugin = plugin(&node, &["--pre-start"]);
    until_capacity(&node, 2, 2).await;
    plugin.tell("prestart fail it is warming up").unwrap();
    node.apply(&pod_wanting("web", 1));
    let web = node.until_pod("web", "to wait", |pod| waits_for(pod, "CreateContainerConfigError")).await;
    assert!(web.waiting("main").unwrap().1.contains("it is warming up"));
    plugin.tell("prestart ok").unwrap();
    node.until_ready("web").await;
}

#[tokio::test]
async fn what_only_an_init_container_needs_is_free_again_when_it_has_ended() {
    let node = node(300, &[]).await;
    let _plugin = plugin(&node, &["--devices", "a b c"]);
    until_capacity(&node, 3, 3).await;
    let web = with(pod("web"), "containers", json!([wanting("main", 1)]));
    node.apply(&with(web, "initContainers", json!([wanting("init", 3)])));
    let web = node.until_ready("web").await;
    let released = || match held(&node, &web).len() {
        1 => Ok(()),
        count => Err(format!("it holds {count}")),
    };
    workdir::wait_for("the release", PATIENCE, released).unwrap();
    node.apply(&pod_wanting("other", 2));
    node.until_ready("other").await;
    assert!(given(&node, "web").is_disjoint(&given(&node, "other")));
}

#[tokio::test]
async fn a_plugin_that_is_killed_and_upgraded_takes_nothing_from_anybody() {
    let node = node(300, &[]).await;
    let old = plugin(&node, &["--devices", "a b"]);
    until_capacity(&node, 2, 2).await;
    node.apply(&pod_wanting("web", 1));
    let web = node.until_ready("web").await;
    let before = held(&node, &web);
    old.kill9();
    until_capacity(&node, 2, 0).await;
    node.until_pod("web", "to be told", |pod| health(pod).iter().any(|h| h.ends_with("Unknown"))).await;
    // The new version has another socket, and one device more.
    let newer = plugin(&node, &["--devices", "a b c", "--socket", "v2.sock"]);
    until_capacity(&node, 3, 3).await;
    node.until_pod("web", "to be told", |pod| health(pod).iter().any(|h| h.ends_with(": Healthy"))).await;
    assert_eq!(held(&node, &web), before);
    assert_eq!(node.cri.count(Op::StopContainer), 0);
    // Killed and started again at the same place it is followed even before it registers.
    newer.kill9();
    until_capacity(&node, 3, 0).await;
    let _again = plugin(&node, &["--devices", "a b c", "--socket", "v2.sock"]);
    until_capacity(&node, 3, 3).await;
    node.apply(&pod_wanting("other", 2));
    node.until_ready("other").await;
    assert!(given(&node, "other").is_disjoint(&before));
}

#[tokio::test]
async fn a_plugin_is_found_in_the_registry_and_gone_with_its_socket() {
    let node = node(300, &[]).await;
    let registry = node.path("kubelet/plugins_registry");
    let there = || if registry.exists() { Ok(()) } else { Err("it isn't there") };
    workdir::wait_for("the registry", PATIENCE, there).unwrap();
    let plugin = SamplePlugin::registered(Path::new(PLUGIN), &registry, &["--registry"]).unwrap();
    until_capacity(&node, 2, 2).await;
    node.apply(&pod_wanting("web", 1));
    node.until_ready("web").await;
    plugin.quit().unwrap();
    until_capacity(&node, 2, 0).await;
}

#[tokio::test]
async fn running_pods_keep_their_devices_over_a_restart_whatever_the_plugin_does() {
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
    // Nobody says so, but the node had two devices and will have them again.
    until_capacity(&node, 2, 2).await;
    assert_eq!(held(&node, &web), before);
    assert_eq!(node.done(&CHANGES), changes, "{}", node.cri.transcript());
    // A container of it that ends is started again without the plugin, as under the kubelet.
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
    assert_eq!(node.devices().waiting().len(), 2);
    let _late = plugin(&node, &["--devices", "a b"]);
    node.until_ready("web").await;
    node.until_ready("new").await;
    assert_eq!(given(&node, "web"), before, "it got others than before");
    assert!(given(&node, "new").is_disjoint(&before));
    assert_eq!(node.devices().waiting(), []);
}

#[tokio::test]
async fn a_pod_does_not_wait_for_ever_and_runs_when_the_plugin_comes_after_all() {
    let mut node = node(300, &[]).await;
    let first = plugin(&node, &["--deaf"]);
    until_capacity(&node, 2, 2).await;
    node.apply(&pod_wanting("web", 1));
    node.until_ready("web").await;
    node.kill().await;
    first.kill9();
    node.cri.reboot();
    node.settings.plugin_wait = Some(Duration::from_secs(1));
    node.start().await;
    until_socket(&node);
    node.until_pod("web", "to be refused", failed).await;
    let _late = plugin(&node, &[]);
    node.until_ready("web").await;
}

#[tokio::test]
async fn a_pod_that_is_there_before_its_plugin_ever_was_waits_too() {
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
        std::fs::write(node.store.file().path(), damage).unwrap();
        node.start().await;
        until_socket(&node);
        plugin.hear("registered").unwrap();
        until_capacity(&node, 3, 3).await;
        assert_eq!(held(&node, &web), before, "{damage:?}");
    }
    node.apply(&pod_wanting("other", 1));
    node.until_ready("other").await;
    assert!(given(&node, "other").is_disjoint(&before));
    let names = std::fs::read_dir(node.path("kubelet/device-plugins")).unwrap();
    let set_aside = |name: &std::ffi::OsString| name.to_string_lossy().contains("checkpoint.corrupt-");
    assert_eq!(names.map(|entry| entry.unwrap().file_name()).filter(set_aside).count(), 3);
}

#[tokio::test]
async fn plugins_that_misbehave_hurt_only_themselves() {
    let node = node(300, &[]).await;
    let mut many = plugin(&node, &["--resource", "example.com/many", "--socket", "many.sock"]);
    let mut good = plugin(&node, &["--devices", "a b"]);
    many.tell("many 100000").unwrap();
    let mut changes = node.devices().node();
    let there = changes.wait_for(|node| node.capacity.get("example.com/many") == Some(&100_000));
    tokio::time::timeout(PATIENCE, there).await.unwrap().unwrap();
    // Twice the same device, and one without a name.
    good.tell("devices a a b @1").unwrap();
    until_capacity(&node, 3, 3).await;
    // One that answers with anything but HTTP/2.
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
async fn registrations_are_refused_in_the_kubelets_words() {
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
    // Its own socket is no plugin's.
    check("v1beta1", "kubelet.sock", RESOURCE, "is the agent's own").await;
}

/// Where the agent is killed while a pod gets its devices.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kill {
    /// The plugin was asked, and says nothing yet.
    InAllocate,
    /// The plugin has answered; the checkpoint isn't written.
    BeforeCheckpoint,
    /// The checkpoint is written; nobody knows.
    AfterCheckpoint,
    /// At a call to the runtime after that.
    At(Op),
}

async fn converges_after(kill: Kill) {
    let mut node = node(300, &[]).await;
    let mut plugin = plugin(&node, &["--devices", "a b c"]);
    until_capacity(&node, 3, 3).await;
    let mut call = None;
    match kill {
        Kill::InAllocate => plugin.tell("allocate hold").unwrap(),
        Kill::BeforeCheckpoint => node.store.stop_at(InWrite::Before),
        Kill::AfterCheckpoint => node.store.stop_at(InWrite::After),
        Kill::At(op) => call = Some(node.cri.on(op).hold()),
    }
    node.apply(&pod_wanting("web", 2));
    match kill {
        Kill::InAllocate => drop(plugin.hear("allocate").unwrap()),
        Kill::BeforeCheckpoint | Kill::AfterCheckpoint => node.store.until_reached().await,
        Kill::At(_) => call.as_ref().unwrap().reached().await,
    }
    node.kill_in_write().await;
    drop(call);
    node.cri.heal();
    plugin.tell("allocate ok").unwrap();
    plugin.tell("go").unwrap();
    node.start().await;
    let web = node.until_ready("web").await;
    let given_to_web = given(&node, "web");
    assert_eq!(held(&node, &web), given_to_web, "{kill:?}");
    assert_eq!(given_to_web.len(), 2, "{kill:?}");
    assert_eq!(node.containers("web"), "main/0+", "{kill:?}");
    // What it doesn't have is there for others, and nothing more.
    node.apply(&pod_wanting("other", 1));
    node.until_ready("other").await;
    assert!(given(&node, "other").is_disjoint(&given_to_web), "{kill:?}");
    node.apply(&pod_wanting("third", 1));
    node.until_pod("third", "to be refused", failed).await;
    let asked = node.cri.calls();
    let created =
        asked.iter().filter(|call| matches!(call.asked, Asked::CreateContainer(_)) && call.succeeded());
    assert_eq!(created.count(), 2, "{kill:?}");
}

#[tokio::test]
async fn killed_anywhere_between_allocation_and_start_the_agent_gives_no_device_twice() {
    for kill in [
        Kill::InAllocate,
        Kill::BeforeCheckpoint,
        Kill::AfterCheckpoint,
        Kill::At(Op::RunPodSandbox),
        Kill::At(Op::CreateContainer),
        Kill::At(Op::StartContainer),
    ] {
        converges_after(kill).await;
    }
}
