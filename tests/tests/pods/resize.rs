//! Pods whose manifests change in cpu and memory only: they go on running, and their cgroups follow.

use std::path::PathBuf;

use beelet_tests::cri::Asked;
use serde_json::{Value, json};

use beelet::pods::qos_tree::Level;

use crate::node::{Node, View, pod, with};

pub(crate) fn sized(cpu: &str, memory: &str) -> Value {
    let mut pod = pod("web");
    pod["spec"]["containers"][0]["resources"] =
        json!({"requests": {"cpu": cpu, "memory": "64Mi"}, "limits": {"memory": memory}});
    pod
}

/// Where a runtime would have made the container's cgroup, made now, in both hierarchies.
pub(crate) fn make_container_cgroup(node: &Node, pod: &View) -> PathBuf {
    let id = node.cri.world().container("web-n1", "main").unwrap().id.clone();
    let of = |hierarchy: &str| node.path(&format!("cgroup/{hierarchy}/kubepods/burstable/pod{}", pod.uid()));
    for hierarchy in ["cpu", "memory"] {
        let dir = of(hierarchy).join(&id);
        std::fs::create_dir(&dir).unwrap();
        for file in std::fs::read_dir(of(hierarchy)).unwrap().flatten().filter(|file| file.path().is_file()) {
            std::fs::copy(file.path(), dir.join(file.file_name())).unwrap();
        }
    }
    of("cpu").join(id)
}

pub(crate) async fn until_file(path: PathBuf, content: &str) {
    let waited = tokio::time::timeout(beelet_tests::cri::PATIENCE, async {
        // Files can't be waited for.
        while std::fs::read_to_string(&path).unwrap_or_default() != content {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    });
    if waited.await.is_err() {
        panic!("{} is {:?}, not {content:?}", path.display(), std::fs::read_to_string(&path));
    }
}

/// The CPU shares and the memory limit that the runtime was asked to change a container to.
fn updates(node: &Node) -> Vec<(i64, i64)> {
    let asked = node.cri.calls().into_iter().filter_map(|call| match call.asked {
        Asked::UpdateContainerResources(request) => request.linux,
        _ => None,
    });
    asked.map(|linux| (linux.cpu_shares, linux.memory_limit_in_bytes)).collect()
}

fn request(pod: &View) -> String {
    let resources = pod.0.pod.spec.as_ref().unwrap().containers[0].resources.clone().unwrap();
    resources.requests.unwrap()["cpu"].0.clone()
}

#[tokio::test]
async fn a_running_pod_is_resized_in_place() {
    let node = Node::with(&[sized("100m", "128Mi")]).await;
    let old = node.until_ready("web").await;
    let container = make_container_cgroup(&node, &old);
    let pod_dir = container.parent().unwrap().to_owned();
    until_file(container.join("cpu.shares"), "102").await;
    node.apply(&sized("500m", "256Mi"));
    let new = node.until_pod("web", "to have the new request", |pod| request(pod) == "500m").await;
    assert_eq!(new.uid(), old.uid());
    until_file(pod_dir.join("cpu.shares"), "512").await;
    until_file(container.join("cpu.shares"), "512").await;
    let memory = pod_dir.to_string_lossy().replace("cgroup/cpu", "cgroup/memory");
    until_file(PathBuf::from(memory).join("memory.limit_in_bytes"), &(256 << 20).to_string()).await;
    assert_eq!(updates(&node).last(), Some(&(512, 256 << 20)), "{}", node.cri.transcript());
    // The same container, never restarted.
    assert_eq!(node.containers("web"), "main/0+");
    // And back: the first manifest is this pod as well.
    node.apply(&sized("100m", "128Mi"));
    until_file(container.join("cpu.shares"), "102").await;
    assert_eq!(node.containers("web"), "main/0+");
}

#[tokio::test]
async fn an_agent_that_was_away_resizes_what_it_finds() {
    let mut node = Node::with(&[sized("100m", "128Mi")]).await;
    let old = node.until_ready("web").await;
    let container = make_container_cgroup(&node, &old);
    node.kill().await;
    node.apply(&sized("300m", "128Mi"));
    node.start().await;
    let new = node.until_pod("web", "to have the new request", |pod| request(pod) == "300m").await;
    assert_eq!(new.uid(), old.uid());
    until_file(container.join("cpu.shares"), "307").await;
    // Killed again after it: still the same pod.
    node.kill_and_start().await;
    let again = node.until_pod("web", "to be ready", |pod| pod.ready() && request(pod) == "300m").await;
    assert_eq!(again.uid(), old.uid());
    assert_eq!(node.containers("web"), "main/0+");
}

#[tokio::test]
async fn a_manifest_that_changes_in_more_is_another_pod() {
    let node = Node::with(&[sized("100m", "128Mi")]).await;
    let old = node.until_ready("web").await;
    node.apply(&with(sized("200m", "128Mi"), "hostname", "other".into()));
    node.until_pod("web", "to be another", |pod| pod.uid() != old.uid() && pod.ready()).await;
    node.until_nothing_is_left(&old).await;
}

#[tokio::test]
async fn values_that_somebody_else_changed_are_set_right_again() {
    let node = Node::with(&[sized("100m", "128Mi")]).await;
    let pod = node.until_ready("web").await;
    let dir = node.path(&format!("cgroup/cpu/kubepods/burstable/pod{}", pod.uid()));
    until_file(dir.join("cpu.shares"), "102").await;
    until_file(node.path("cgroup/cpu/kubepods/burstable/cpu.shares"), "102").await;
    for file in [dir.join("cpu.shares"), node.path("cgroup/cpu/kubepods/cpu.shares")] {
        let before = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, "5").unwrap();
        until_file(file, &before).await;
    }
    assert_eq!((node.drifted(Level::Pod), node.drifted(Level::Node)), (1, 1));
}
