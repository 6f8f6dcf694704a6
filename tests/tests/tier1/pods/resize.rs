//! Tests of manifests that change only in cpu and memory: their pods run on, and their cgroups are updated.

use std::path::PathBuf;

use beelet_tests::cri::{Asked, Op};
use serde_json::{Value, json};

use beelet_pods::qos_tree::Level;

use super::node::{Node, View, pod, until_file, with};

pub(crate) fn sized(cpu: &str, memory: &str) -> Value {
    let mut pod = pod("web");
    pod["spec"]["containers"][0]["resources"] =
        json!({"requests": {"cpu": cpu, "memory": "64Mi"}, "limits": {"memory": memory}});
    pod
}

/// Creates the container's cgroup in both hierarchies, as a runtime would; returns its path.
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

/// Returns the CPU shares and the memory limits of all calls that update a container.
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
    // The container was never restarted.
    assert_eq!(node.containers("web"), "main/0+");
    // The first manifest is the same pod as well.
    node.apply(&sized("100m", "128Mi"));
    until_file(container.join("cpu.shares"), "102").await;
    assert_eq!(node.containers("web"), "main/0+");
}

/// Returns the actual and the allocated CPU of the pod's container from its status, and the conditions about
/// a resize.
fn status(pod: &View) -> (String, String, Vec<String>) {
    let container = pod.container("main");
    let cpu = |list: Option<
        std::collections::BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>,
    >| {
        list.and_then(|mut list| list.remove("cpu")).map(|quantity| quantity.0).unwrap_or_default()
    };
    let conditions = pod.0.pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let resizes = conditions.filter(|one| one.type_.starts_with("PodResize")).map(|one| {
        format!(
            "{} {}: {}",
            one.type_,
            one.reason.as_deref().unwrap_or_default(),
            one.message.as_deref().unwrap_or_default()
        )
    });
    let in_force = container.resources.and_then(|resources| resources.requests);
    (cpu(in_force), cpu(container.allocated_resources), resizes.collect())
}

fn is_done(cpu: &str) -> impl Fn(&View) -> bool + '_ {
    move |pod| status(pod) == (cpu.to_owned(), cpu.to_owned(), Vec::new())
}

#[tokio::test]
async fn a_resize_without_room_is_deferred_until_a_pod_is_removed() {
    let other = with(
        pod("other"),
        "containers",
        json!([{
            "name": "main", "image": super::node::IMAGE, "resources": {"requests": {"cpu": "3"}},
        }]),
    );
    let node = Node::with(&[other, sized("100m", "128Mi")]).await;
    node.until_ready("other").await;
    let old = node.until_ready("web").await;
    make_container_cgroup(&node, &old);
    node.until_pod("web", "to report its resources", is_done("100m")).await;

    node.apply(&sized("2", "128Mi"));
    let why = "Node didn't have enough resource: cpu, requested: 2000, used: 3000, capacity: 4000";
    let condition = format!("PodResizePending Deferred: {why}");
    let waits = |pod: &View| status(pod).2 == [condition.as_str()];
    let waiting = node.until_pod("web", "to wait for room", waits).await;
    assert_eq!((request(&waiting), status(&waiting).0), ("100m".to_owned(), "100m".to_owned()));
    let event = format!("ResizeDeferred: {why}; the pod keeps its current cpu and memory");
    assert!(node.events().contains(&event), "{:?}", node.events());

    node.remove("other");
    let new = node.until_pod("web", "to be resized", is_done("2")).await;
    assert_eq!((new.uid(), node.containers("web").as_str()), (old.uid(), "main/0+"));
    // The request exceeds the node, so no removal of a pod makes room for it.
    node.apply(&sized("5", "128Mi"));
    let never =
        |pod: &View| status(pod).2.iter().any(|text| text.starts_with("PodResizePending Infeasible: "));
    node.until_pod("web", "to have an infeasible resize", never).await;
    node.apply(&sized("2", "128Mi"));
    node.until_pod("web", "to have its manifest's resources", is_done("2")).await;
}

fn other(name: &str, cpu: &str, priority: Option<&str>) -> Value {
    let resources = json!({"requests": {"cpu": cpu}});
    let main = json!({"name": "main", "image": super::node::IMAGE, "resources": resources});
    let mut other = with(pod(name), "containers", json!([main]));
    if let Some(class) = priority {
        other["spec"]["priorityClassName"] = json!(class);
    }
    other
}

fn is_deferred(pod: &View) -> bool {
    status(pod).2.iter().any(|text| text.starts_with("PodResizePending Deferred: "))
}

#[tokio::test]
async fn a_resize_that_waits_has_its_room_when_a_pod_ends_by_itself() {
    let batch = with(other("batch", "3", None), "restartPolicy", json!("Never"));
    let node = Node::with(&[batch, other("grows", "1", None)]).await;
    node.until_ready("batch").await;
    node.until_ready("grows").await;
    node.apply(&other("grows", "3", None));
    node.until_pod("grows", "to wait for room", is_deferred).await;
    // The manifest stays, and the pod stays as Succeeded.
    node.cri.exit(&node.cri.container("batch-n1", "main").unwrap().id, 0);
    node.until_pod("grows", "to be resized", |pod| request(pod) == "3").await;
    assert_eq!(node.containers("grows"), "main/0+");
}

#[tokio::test]
async fn of_two_deferred_resizes_the_more_important_pod_comes_first_after_those_that_shrink() {
    // The order of the names must not matter.
    for (low, high) in [("a", "z"), ("z", "a")] {
        let critical = Some("system-node-critical");
        let pods = [other("room", "2", None), other(low, "1", None), other(high, "1", critical)];
        let node = Node::with(&pods).await;
        for name in ["room", low, high] {
            node.until_ready(name).await;
        }
        node.apply(&other(low, "2", None));
        node.until_pod(low, "to wait for room", is_deferred).await;
        node.apply(&other(high, "2", critical));
        node.until_pod(high, "to wait for room", is_deferred).await;
        // Another pod shrinks, which frees room for one of the resizes.
        node.apply(&other("room", "1", None));
        node.until_pod(high, "to be resized", |pod| request(pod) == "2").await;
        let low = node.until_pod(low, "to remain deferred", is_deferred).await;
        assert_eq!(request(&low), "1");
    }
}

#[tokio::test]
async fn amounts_that_the_cgroups_refuse_are_not_reported_as_actual() {
    let node = Node::with(&[sized("100m", "128Mi")]).await;
    let old = node.until_ready("web").await;
    let container = make_container_cgroup(&node, &old);
    until_file(container.join("cpu.shares"), "102").await;
    // A folder in the file's place cannot be written.
    std::fs::remove_file(container.join("cpu.shares")).unwrap();
    std::fs::create_dir(container.join("cpu.shares")).unwrap();
    node.apply(&sized("500m", "128Mi"));
    let stuck = |pod: &View| {
        status(pod).2.iter().any(|text| text.starts_with("PodResizeInProgress Error: default/web-n1"))
    };
    let pod = node.until_pod("web", "to have the error of its resize", stuck).await;
    assert_eq!((status(&pod).0.as_str(), status(&pod).1.as_str()), ("100m", "500m"));
    std::fs::remove_dir(container.join("cpu.shares")).unwrap();
    std::fs::write(container.join("cpu.shares"), "102").unwrap();
    node.until_pod("web", "to be resized", is_done("500m")).await;
    until_file(container.join("cpu.shares"), "512").await;
}

#[tokio::test]
async fn a_new_agent_resizes_running_pods() {
    let mut node = Node::with(&[sized("100m", "128Mi")]).await;
    let old = node.until_ready("web").await;
    let container = make_container_cgroup(&node, &old);
    node.kill().await;
    node.apply(&sized("300m", "128Mi"));
    node.start().await;
    let new = node.until_pod("web", "to have the new request", is_done("300m")).await;
    assert_eq!((new.uid(), request(&new)), (old.uid(), "300m".to_owned()));
    until_file(container.join("cpu.shares"), "307").await;
    // The pod stays the same after another kill.
    node.kill_and_start().await;
    let again = node.until_pod("web", "to be ready", |pod| pod.ready() && request(pod) == "300m").await;
    assert_eq!(again.uid(), old.uid());
    assert_eq!(node.containers("web"), "main/0+");
}

#[tokio::test]
async fn a_manifest_with_other_changes_is_another_pod() {
    let node = Node::with(&[sized("100m", "128Mi")]).await;
    let old = node.until_ready("web").await;
    node.apply(&with(sized("200m", "128Mi"), "hostname", "other".into()));
    node.until_pod("web", "to be another", |pod| pod.uid() != old.uid() && pod.ready()).await;
    node.until_nothing_is_left(&old).await;
}

#[tokio::test]
async fn foreign_changes_of_cgroup_values_are_reverted() {
    let node = Node::with(&[sized("100m", "128Mi")]).await;
    let pod = node.until_ready("web").await;
    let dir = node.path(&format!("cgroup/cpu/kubepods/burstable/pod{}", pod.uid()));
    until_file(dir.join("cpu.shares"), "102").await;
    until_file(node.path("cgroup/cpu/kubepods/burstable/cpu.shares"), "102").await;
    // Before its first comparison the agent cannot know a value's earlier state.
    node.until_cgroups_compared().await;
    let tampered =
        [(Level::Pod, dir.join("cpu.shares")), (Level::Node, node.path("cgroup/cpu/kubepods/cpu.shares"))];
    for (level, file) in tampered {
        let before = std::fs::read_to_string(&file).unwrap();
        // The file is replaced atomically, as the kernel sets a value: the agent would also correct an empty
        // file.
        let new = node.path("tampered");
        std::fs::write(&new, "5").unwrap();
        std::fs::rename(new, &file).unwrap();
        until_file(file, &before).await;
        // The agent counts the correction after the write.
        node.until_drifted(level).await;
    }
    assert_eq!((node.drifted(Level::Pod), node.drifted(Level::Node)), (1, 1));
}

#[tokio::test]
async fn a_container_is_restarted_in_place_for_a_resize_if_its_policy_requires_it() {
    let sized = |cpu: &str, memory: &str| {
        let mut pod = sized(cpu, memory);
        // The stopped container exits with 0, which must not end the pod.
        pod["spec"]["restartPolicy"] = json!("OnFailure");
        pod["spec"]["containers"][0]["resizePolicy"] =
            json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
        pod
    };
    let node = Node::with(&[sized("100m", "128Mi")]).await;
    let old = node.until_ready("web").await;
    node.cri.change(|world| world.stops_well = true);
    let container = make_container_cgroup(&node, &old);
    until_file(container.join("cpu.shares"), "102").await;
    // CPU changes without a restart.
    node.apply(&sized("500m", "128Mi"));
    until_file(container.join("cpu.shares"), "512").await;
    assert_eq!(node.containers("web"), "main/0+");
    node.apply(&sized("500m", "256Mi"));
    let restarted = |pod: &View| pod.ready() && pod.restarts()["main"] == 1 && status(pod).2.is_empty();
    let new = node.until_pod("web", "to run with its new limit", restarted).await;
    assert_eq!((new.uid(), node.containers("web").as_str()), (old.uid(), "main/0- main/1+"));
    let made = node.cri.container("web-n1", "main").unwrap();
    assert_eq!(made.config.linux.unwrap().resources.unwrap().memory_limit_in_bytes, 256 << 20);
    let limits = new.container("main").resources.unwrap().limits.unwrap();
    assert_eq!(limits["memory"].0, "256Mi");
    let event = "Killing: Container main resize requires restart";
    assert!(node.events().iter().any(|text| text == event), "{:?}", node.events());
    assert_eq!(node.done(&[Op::RunPodSandbox]), 1);
}

#[tokio::test]
async fn pod_level_resources_change_in_place() {
    let shared = |cpu: &str| {
        let mut pod = pod("web");
        pod["spec"]["resources"] = json!({"limits": {"cpu": cpu, "memory": "256Mi"}});
        pod
    };
    let node = Node::with(&[shared("500m")]).await;
    let pod = node.until_ready("web").await;
    let status = pod.0.pod.status.as_ref().unwrap();
    assert_eq!(status.qos_class.as_deref(), Some("Guaranteed"));
    assert_eq!(status.allocated_resources.as_ref().unwrap()["cpu"].0, "500m");
    let folder = node.path(&format!("cgroup/cpu/kubepods/pod{}", pod.uid()));
    until_file(folder.join("cpu.cfs_quota_us"), "50000").await;
    let memory = node.path(&format!("cgroup/memory/kubepods/pod{}", pod.uid()));
    until_file(memory.join("memory.limit_in_bytes"), &(256 << 20).to_string()).await;
    node.apply(&shared("700m"));
    until_file(folder.join("cpu.cfs_quota_us"), "70000").await;
    assert_eq!(node.containers("web"), "main/0+");
    node.until_pod("web", "to report its actual resources", |pod| {
        let status = pod.0.pod.status.as_ref().unwrap();
        let limit = status.resources.as_ref().unwrap().limits.as_ref().unwrap()["cpu"].0.clone();
        let conditions = status.conditions.iter().flatten();
        limit == "700m" && !conditions.into_iter().any(|one| one.type_ == "PodResizeInProgress")
    })
    .await;
}
