//! Devices of real pods on a real containerd: the containers' view of them, and plugins by other authors.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::node::{installed, on_every_containerd};
use beelet_tests::agent::Agent;
use beelet_tests::containerd::Containerd;
use beelet_tests::device_plugin::SamplePlugin;
use beelet_tests::guards::Process;
use beelet_tests::manifests;
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{self, PATIENCE, wait_for};
use beelet_tests::{require, requires};
use serde_json::{Value, json};

const PLUGIN: &str = env!("CARGO_BIN_EXE_sample_device_plugin");
const RESOURCE: &str = "example.com/sample";

/// An agent on a containerd of its own. The agent is dropped first.
struct Node {
    agent: Agent,
    containerd: Containerd,
}

fn start() -> Node {
    start_on(Containerd::start_for_test().unwrap())
}

fn start_on(containerd: Containerd) -> Node {
    let agent = Agent::start(installed(&containerd)).unwrap();
    let node = Node { agent, containerd };
    node.until_plugins_can_register();
    node
}

impl Node {
    fn plugins(&self) -> PathBuf {
        self.agent.dir().join("kubelet/device-plugins")
    }

    fn until_plugins_can_register(&self) {
        let socket = self.plugins().join("kubelet.sock");
        let there = || if socket.exists() { Ok(()) } else { Err("the socket is missing") };
        wait_for("the registration socket", PATIENCE, there).unwrap();
    }

    /// Starts a pod that requests devices, runs `says` and stays.
    fn apply(&self, name: &str, resource: &str, count: u32, says: &str) {
        let script = format!("{says}; echo done; exec sleep 3600");
        let pod = manifests::pod(name, &["/bin/sh", "-c", &script]);
        let pod = manifests::with(pod, "resources", json!({ "limits": { resource: count } }));
        self.agent.apply(&format!("{name}.yaml"), pod.to_string()).unwrap();
    }

    fn ready(&self, name: &str) -> PodView {
        let what = format!("{name} to be ready");
        self.agent.until(&what, |watch| watch.pod(name).filter(|pod| pod.ready()).cloned()).unwrap()
    }

    /// Returns the output of the pod's container, once it is complete.
    fn output_of(&self, pod: &PodView) -> String {
        let name = pod.pod.metadata.name.clone().unwrap();
        let log = self.agent.dir().join(format!("logs/default_{name}_{}/main/0.log", pod.uid()));
        let complete = || {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            if text.contains("done") { Ok(text) } else { Err(text) }
        };
        wait_for("the container's output", PATIENCE, complete).unwrap()
    }

    /// Returns the output of `beelet devices -o json`.
    fn devices(&self) -> Value {
        let output = self.agent.cli(&["devices", "-o", "json"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns the devices of a resource that the agent reports for `pod`.
    fn held_by(&self, pod: &str) -> Vec<String> {
        let all = self.devices();
        let devices =
            all["resources"].as_array().unwrap().iter().flat_map(|r| r["devices"].as_array().unwrap());
        let name = format!("{pod}-{}", beelet_tests::agent::NODE);
        let of_pod = |d: &&Value| d["holders"].as_array().unwrap().iter().any(|h| h["pod"] == *name);
        devices.filter(of_pod).map(|d| d["id"].as_str().unwrap().to_owned()).collect()
    }

    fn until_health(&self, resource: &str, expected: &str) {
        let well = || {
            let all = self.devices();
            let of_resource = all["resources"].as_array().unwrap().iter().find(|r| r["name"] == *resource);
            let first = of_resource.map(|r| r["devices"][0]["health"].clone());
            if first.as_ref().is_some_and(|health| health == expected) {
                Ok(())
            } else {
                Err(all.to_string())
            }
        };
        wait_for(&format!("{resource} to be {expected}"), PATIENCE, well).unwrap();
    }
}

fn sample(node: &Node, more: &[&str]) -> SamplePlugin {
    let shown = node.agent.dir().join("shown");
    workdir::write(&shown.join("hello"), "hello from the plugin\n").unwrap();
    let mount = format!("{}:/opt/sample", shown.display());
    let all =
        [&["--device", "/dev/null:/dev/sample", "--mount", &mount, "--devices", "a b"][..], more].concat();
    SamplePlugin::registered(Path::new(PLUGIN), &node.plugins(), &all).unwrap()
}

const LOOK: &str = "echo \"got $SAMPLE_DEVICES\"; test -c /dev/sample && echo node; echo x > /dev/sample && echo written; \
                    cat /opt/sample/hello";

#[test]
fn a_real_pod_sees_its_device_node_its_environment_and_its_mounts() {
    require!(containerd);
    on_every_containerd(|containerd| {
        let node = start_on(containerd);
        let _plugin = sample(&node, &[]);
        node.apply("web", RESOURCE, 1, LOOK);
        let web = node.ready("web");
        let text = node.output_of(&web);
        for expected in ["got a\n", "node\n", "written\n", "hello from the plugin\n"] {
            assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
        }
        assert_eq!(node.held_by("web"), ["a"]);
        // A pod that requests no device sees nothing of the device.
        let look = "test -c /dev/sample || echo none";
        let plain =
            manifests::pod("plain", &["/bin/sh", "-c", &format!("{look}; echo done; exec sleep 3600")]);
        node.agent.apply("plain.yaml", plain.to_string()).unwrap();
        assert!(node.output_of(&node.ready("plain")).contains("none"));
        let table = node.agent.cli(&["get", "node"]).output().unwrap();
        let table = String::from_utf8_lossy(&table.stdout).into_owned();
        assert!(table.lines().any(|l| l.split_whitespace().eq([RESOURCE, "2", "2", "1", "1"])), "{table}");
    });
}

#[test]
fn a_pod_keeps_its_device_across_restarts_of_plugin_and_agent() {
    require!(containerd);
    let mut node = start();
    let plugin = sample(&node, &[]);
    node.apply("web", RESOURCE, 1, LOOK);
    let before = node.ready("web");
    let id = before.container("main").unwrap().container_id.clone();
    let held = node.held_by("web");
    plugin.kill9();
    node.until_health(RESOURCE, "Unknown");
    node.agent.kill9();
    node.agent.resume().unwrap();
    node.until_plugins_can_register();
    let mut newer = sample(&node, &["--socket", "v2.sock"]);
    node.until_health(RESOURCE, "Healthy");
    newer.run("devices !a b").unwrap();
    node.until_health(RESOURCE, "Unhealthy");
    node.apply("other", RESOURCE, 1, LOOK);
    assert!(node.output_of(&node.ready("other")).contains("got b\n"));
    let after = node.ready("web");
    let main = after.container("main").unwrap();
    assert_eq!((main.restart_count, &main.container_id), (0, &id));
    assert_eq!(node.held_by("web"), held);
    let health = &main.allocated_resources_status.as_ref().unwrap()[0].resources.as_ref().unwrap()[0];
    assert_eq!(health.health.as_deref(), Some("Unhealthy"));
}

#[test]
fn cdi_devices_of_a_plugin_are_in_the_container() {
    require!(containerd_2);
    let node = start_on(Containerd::start_version_2_for_test().unwrap());
    let spec = json!({
        "cdiVersion": "0.6.0",
        "kind": "example.com/class",
        "devices": [{ "name": "one", "containerEdits": {
            "env": ["BY_CDI=from the specification"],
            "deviceNodes": [{ "path": "/dev/by-cdi", "hostPath": "/dev/null" }],
        }}],
    });
    workdir::write(&node.containerd.cdi_dir().join("example.json"), spec.to_string()).unwrap();
    let _plugin = sample(&node, &["--cdi", "example.com/class=one"]);
    let look = "echo \"cdi: $BY_CDI\"; test -c /dev/by-cdi && echo cdi node; echo x > /dev/by-cdi && echo cdi written; \
                echo \"got $SAMPLE_DEVICES\"";
    node.apply("web", RESOURCE, 1, look);
    let text = node.output_of(&node.ready("web"));
    for expected in ["cdi: from the specification\n", "cdi node\n", "cdi written\n", "got a\n"] {
        assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
    }
}

#[test]
fn killed_while_a_plugin_allocates_the_agent_shares_no_device() {
    require!(containerd);
    let mut node = start();
    let mut plugin = sample(&node, &[]);
    plugin.run("allocate hold").unwrap();
    node.apply("web", RESOURCE, 1, LOOK);
    assert_eq!(plugin.hear("allocate").unwrap(), "a");
    node.agent.kill9();
    // The plugin would answer only now.
    plugin.run("allocate ok").unwrap();
    plugin.run("go").unwrap();
    node.agent.resume().unwrap();
    plugin.hear("registered").unwrap();
    let web = node.ready("web");
    node.apply("other", RESOURCE, 1, LOOK);
    let other = node.ready("other");
    let held = [node.held_by("web"), node.held_by("other")];
    let mut all = held.concat();
    all.sort();
    assert_eq!(all, ["a", "b"]);
    for (pod, held) in [&web, &other].into_iter().zip(&held) {
        assert!(node.output_of(pod).contains(&format!("got {}\n", held.join(","))), "{held:?}");
    }
    node.apply("third", RESOURCE, 1, LOOK);
    let refused =
        |pod: &PodView| pod.pod.status.as_ref().is_some_and(|s| s.phase.as_deref() == Some("Failed"));
    node.agent
        .until("third to be refused", |watch| watch.pod("third").filter(|pod| refused(pod)).cloned())
        .unwrap();
}

#[test]
fn pod_resources_are_served_at_the_kubelets_socket() {
    require!(containerd);
    use beelet_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
    use beelet_proto::podresources::{
        AllocatableResourcesRequest, GetPodResourcesRequest, ListPodResourcesRequest,
    };
    use beelet_proto::podresources_v1alpha1 as v1alpha1;
    let node = start();
    let _plugin = sample(&node, &["--devices", "a@1 b@0 !c"]);
    node.apply("web", RESOURCE, 2, LOOK);
    node.ready("web");
    let socket = node.agent.dir().join("kubelet/pod-resources/kubelet.sock");
    beelet_tests::containerd::block_on(async {
        let mut client = PodResourcesListerClient::new(beelet_tests::containerd::connect(&socket).await?);
        let listed = client.list(ListPodResourcesRequest {}).await?.into_inner().pod_resources;
        assert_eq!(listed.len(), 1);
        let main = &listed[0].containers[0];
        let one = |d: &beelet_proto::podresources::ContainerDevices| {
            (d.resource_name.clone(), d.device_ids.join(","), d.topology.as_ref().map(|t| t.nodes[0].id))
        };
        let expected =
            [(RESOURCE.to_owned(), "a".to_owned(), Some(1)), (RESOURCE.to_owned(), "b".to_owned(), Some(0))];
        assert_eq!(main.devices.iter().map(one).collect::<Vec<_>>(), expected);
        let allocatable =
            client.get_allocatable_resources(AllocatableResourcesRequest {}).await?.into_inner();
        assert_eq!(allocatable.devices.len(), 2);
        let name =
            |name: &str| GetPodResourcesRequest { pod_name: name.into(), pod_namespace: "default".into() };
        let got = client.get(name(&listed[0].name)).await?.into_inner().pod_resources.unwrap();
        assert_eq!(got, listed[0]);
        let missing = client.get(name("nobody")).await.unwrap_err();
        assert_eq!(missing.code(), tonic::Code::NotFound);
        let channel = beelet_tests::containerd::connect(&socket).await?;
        let mut older = v1alpha1::pod_resources_lister_client::PodResourcesListerClient::new(channel);
        let listed = older.list(v1alpha1::ListPodResourcesRequest {}).await?.into_inner().pod_resources;
        let ids = listed[0].containers[0].devices.iter().flat_map(|d| d.device_ids.clone());
        assert_eq!(ids.collect::<Vec<_>>(), ["a", "b"]);
        anyhow::Ok(())
    })
    .unwrap();
}

#[test]
fn metrics_have_the_kubelets_names() {
    require!(containerd);
    let containerd = Containerd::start_for_test().unwrap();
    let agent = Agent::start(installed(&containerd).http().unwrap()).unwrap();
    let node = Node { agent, containerd };
    node.until_plugins_can_register();
    let _plugin = sample(&node, &[]);
    node.apply("web", RESOURCE, 1, LOOK);
    node.ready("web");
    let (status, text) = node.agent.get("/metrics").unwrap();
    assert_eq!(status, 200);
    for line in [
        "kubelet_device_plugin_registration_total{resource_name=\"example.com/sample\"} 1",
        "kubelet_device_plugin_alloc_duration_seconds_count{resource_name=\"example.com/sample\"} 1",
        "beelet_device_capacity{resource_name=\"example.com/sample\"} 2",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
}

/// A child process whose standard output is read line by line.
struct Foreign {
    child: Process,
    lines: BufReader<std::process::ChildStdout>,
}

impl Foreign {
    fn start(command: &mut Command) -> Self {
        let mut child: Child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Foreign { child: Process(child), lines }
    }

    fn until_printed(&mut self, beginning: &str) {
        let mut line = String::new();
        while !line.starts_with(beginning) {
            line.clear();
            assert_ne!(
                self.lines.read_line(&mut line).unwrap(),
                0,
                "the program never printed {beginning:?}"
            );
        }
    }
}

#[test]
fn a_plugin_on_pythons_grpc_registers_and_serves() {
    require!(containerd, python_grpc);
    let node = start();
    let python = requires::python_with_grpc().unwrap();
    let script = workdir::repository().join("tests/plugins/device_plugin.py");
    let mut plugin = Foreign::start(Command::new(python).arg(script).arg(node.plugins()).args([
        "example.com/python",
        "one",
        "two",
    ]));
    plugin.until_printed("registered");
    node.until_health("example.com/python", "Healthy");
    node.apply(
        "web",
        "example.com/python",
        2,
        "echo \"got $PYTHON_DEVICES\"; test -c /dev/python && echo node",
    );
    let text = node.output_of(&node.ready("web"));
    assert!(text.contains("got one,two\n") && text.contains("node\n"), "{text}");
    drop(plugin.child);
    node.until_health("example.com/python", "Unknown");
}

#[test]
fn kubernetes_own_sample_plugin_registers_and_serves() {
    require!(containerd, device_plugin);
    let node = start();
    // The plugin knows only the kubelet's own path of the folder: its mount namespace has the test's folder
    // there.
    let script = "mount --make-rprivate / && mount -t tmpfs none /var/lib && mkdir -p /var/lib/kubelet/device-plugins && \
                  mount --bind \"$1\" /var/lib/kubelet/device-plugins && exec \"$0\"";
    let log = node.agent.dir().join("foreign.log");
    let log = std::fs::File::create(log).unwrap();
    let plugin = Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .arg(requires::given_device_plugin().unwrap())
        .arg(node.plugins())
        .env("PLUGIN_SOCK_DIR", "/var/lib/kubelet/device-plugins/")
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let plugin = Process(plugin);
    node.until_health("example.com/resource", "Healthy");
    node.apply("web", "example.com/resource", 1, "ls /tmp");
    let text = node.output_of(&node.ready("web"));
    assert!(text.contains("Dev-"), "{text}");
    assert_eq!(node.held_by("web").len(), 1);
    drop(plugin);
    node.until_health("example.com/resource", "Unknown");
    // The plugin shows these files to containers.
    for name in ["Dev-1", "Dev-2"] {
        let _ = std::fs::remove_file(Path::new("/tmp").join(name));
    }
}
