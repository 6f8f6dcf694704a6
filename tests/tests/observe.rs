//! The observer against a runtime in memory: what it asks, what it never asks, and what others see of it.

#![allow(clippy::unwrap_used)] // a test's helpers may panic as the test itself may

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use beelet::api::client::Client;
use beelet::kernel::Mode;
use beelet::node::observe::{Options, run_until};
use beelet_proto::cri as proto;
use beelet_tests::cri::{Container, FakeCri, Op, PATIENCE, Sandbox};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The calls that an observer may make.
const MAY_ASK: [Op; 5] =
    [Op::Version, Op::ListPodSandbox, Op::ListContainers, Op::PodSandboxStatus, Op::ContainerStatus];

/// An observer on a runtime, without kernel programs.
struct Node {
    cri: FakeCri,
    socket: PathBuf,
    shutdown: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
    _dir: tempfile::TempDir,
}

impl Node {
    fn start(cri: FakeCri) -> Node {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("run/beelet.sock");
        let options = Options {
            runtime_endpoint: cri.endpoint(),
            node_name: "n".into(),
            cgroup_root: "/".into(),
            socket: socket.clone(),
            listen: None,
            bpf: Mode::Off,
            bpffs: dir.path().join("bpf"),
            pin_name: "none".into(),
            keep_pins: false,
            interval: Duration::from_millis(100),
            most: 100,
            pod_uid: false,
            image_gc: None,
        };
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(run_until(options, shutdown.clone()));
        Node { cri, socket, shutdown, task, _dir: dir }
    }

    /// Waits until the pods, by name and phase, are these.
    async fn wait_for(&self, expected: &[(&str, &str)]) {
        let seen = async {
            let mut client = loop {
                match Client::connect(&self.socket).await {
                    Ok(client) => break client,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            };
            let mut watch = client.watch().await.unwrap();
            let mut table = beelet::pods::table::PodTable::default();
            while let Some(event) = watch.next().await.unwrap() {
                event.apply(&mut table);
                let pods: Vec<(String, String)> = table
                    .pods
                    .iter()
                    .map(|(name, entry)| {
                        (name.name.clone(), entry.pod.status.clone().unwrap().phase.unwrap())
                    })
                    .collect();
                let all = pods.len() == expected.len()
                    && pods
                        .iter()
                        .zip(expected)
                        .all(|(pod, expected)| (pod.0.as_str(), pod.1.as_str()) == *expected);
                if all {
                    return;
                }
            }
        };
        let waited = tokio::time::timeout(PATIENCE, seen).await;
        assert!(waited.is_ok(), "waited for {expected:?}\n{}", self.cri.transcript());
    }
}

/// A pod with one container, as a kubelet would have made it.
fn add(cri: &FakeCri, pod: &str, running: bool) {
    let labels: HashMap<String, String> = [
        ("io.kubernetes.pod.name", pod),
        ("io.kubernetes.pod.namespace", "default"),
        ("io.kubernetes.pod.uid", pod),
        ("io.kubernetes.container.name", "main"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into();
    cri.change(|world| {
        let sandbox = Sandbox {
            id: format!("sandbox-of-{pod}"),
            config: proto::PodSandboxConfig { labels: labels.clone(), ..Default::default() },
            state: if running {
                proto::PodSandboxState::SandboxReady
            } else {
                proto::PodSandboxState::SandboxNotready
            },
            created_at: 1,
            ip: "10.0.0.1".into(),
            info: serde_json::Value::Null,
            runtime_handler: String::new(),
        };
        world.sandboxes.insert(sandbox.id.clone(), sandbox);
        let container = Container {
            id: format!("container-of-{pod}"),
            sandbox_id: format!("sandbox-of-{pod}"),
            config: proto::ContainerConfig { labels, ..Default::default() },
            state: if running {
                proto::ContainerState::ContainerRunning
            } else {
                proto::ContainerState::ContainerExited
            },
            created_at: 1,
            started_at: 1,
            finished_at: i64::from(!running),
            exit_code: 0,
            reason: String::new(),
            image_ref: String::new(),
            log_path: String::new(),
            resources: None,
            pid: 0,
        };
        world.containers.insert(container.id.clone(), container);
    });
}

fn remove(cri: &FakeCri, pod: &str) {
    cri.change(|world| {
        world.containers.remove(&format!("container-of-{pod}"));
        world.sandboxes.remove(&format!("sandbox-of-{pod}"));
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn an_observer_shows_foreign_pods_and_asks_for_lists_and_statuses_alone() {
    let cri = FakeCri::start();
    cri.change(|world| world.streams_events = true);
    add(&cri, "web", true);
    add(&cri, "job", false);
    let node = Node::start(cri);
    node.wait_for(&[("job", "Succeeded"), ("web", "Running")]).await;
    // Nothing tells of this one (it has no cgroup): the next list does.
    add(&node.cri, "late", true);
    remove(&node.cri, "job");
    node.wait_for(&[("late", "Running"), ("web", "Running")]).await;
    let asked: Vec<Op> = node.cri.calls().iter().map(beelet_tests::cri::Call::op).collect();
    assert!(asked.iter().all(|op| MAY_ASK.contains(op)), "{}", node.cri.transcript());
    node.shutdown.cancel();
    tokio::time::timeout(PATIENCE, node.task).await.unwrap().unwrap().unwrap();
    assert!(!node.socket.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_observer_outlives_its_runtime() {
    let cri = FakeCri::start();
    add(&cri, "web", true);
    let node = Node::start(cri);
    node.wait_for(&[("web", "Running")]).await;
    node.cri.crash();
    add(&node.cri, "after", true);
    node.cri.come_back();
    node.wait_for(&[("after", "Running"), ("web", "Running")]).await;
    node.shutdown.cancel();
    tokio::time::timeout(PATIENCE, node.task).await.unwrap().unwrap().unwrap();
}
