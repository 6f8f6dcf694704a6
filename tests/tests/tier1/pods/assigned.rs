//! Tests of pods that an API server assigns to the node: identified by their UID, changed while they run,
//! deleted in two steps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use beelet_model::desired::Desired;
use beelet_model::objects::{Objects, Services};
use beelet_model::request::Request;
use beelet_model::table::{PodName, PodTable};
use beelet_tests::cri::{Asked, Op};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::node::{IMAGE, Node, Settings, View, container, containers, pod, view};

pub(super) const UID: &str = "7d5f41d6-0000-4000-8000-000000000001";
const OTHER: &str = "7d5f41d6-0000-4000-8000-000000000002";

/// Returns a pod as the API server has it.
pub(super) fn assigned(uid: &str) -> Value {
    let mut pod = pod("api-n1");
    pod["metadata"]["namespace"] = json!("default");
    pod["metadata"]["uid"] = json!(uid);
    pod["metadata"]["generation"] = json!(1);
    pod["metadata"]["annotations"] = json!({"kubernetes.io/config.source": "api"});
    pod["spec"]["nodeName"] = json!("n1");
    pod
}

pub(super) fn desired(pods: &[Value]) -> Arc<Desired> {
    let read = |pod: &Value| {
        let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
        (PodName::of(&pod), Arc::new(pod))
    };
    let mut objects = Objects::default();
    // The API server has listed no services; without this list its pods wait.
    objects.services = Some(Services::new(Vec::new()));
    let pods: BTreeMap<PodName, Arc<Pod>> = pods.iter().map(read).collect();
    let status = |pod: &Arc<Pod>| Some((pod.metadata.uid.clone()?, Arc::new(pod.status.clone()?)));
    let earlier_statuses = Arc::new(pods.values().filter_map(status).collect());
    Arc::new(Desired { pods, objects: Arc::new(objects), earlier_statuses, ..Desired::default() })
}

fn unread() -> Arc<Desired> {
    Arc::new(Desired { api_unread: true, ..Desired::default() })
}

pub(super) async fn node_with(pods: &[Value]) -> (Node, watch::Sender<Arc<Desired>>) {
    let (source, receiver) = watch::channel(desired(pods));
    let mut node = Node::new(Settings::default());
    node.sources.push(receiver);
    node.start().await;
    (node, source)
}

/// Returns the grace periods with which containers were stopped, in seconds.
fn stops(node: &Node) -> Vec<i64> {
    let asked = node.cri.calls().into_iter().filter_map(|call| match call.asked {
        Asked::StopContainer(request) => Some(request.timeout),
        _ => None,
    });
    asked.collect()
}

fn deleted(mut pod: Value, grace: i64) -> Value {
    pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
    pod
}

fn is_cleared(pod: &View) -> bool {
    pod.0.cleared
}

#[tokio::test]
async fn a_deleted_pod_ends_within_its_grace_and_stays_until_its_object_is_removed() {
    let (node, source) = node_with(&[assigned(UID)]).await;
    let pod = node.until_ready("api").await;
    assert_eq!(pod.0.pod.status.as_ref().unwrap().observed_generation, Some(1));
    source.send_replace(desired(&[deleted(assigned(UID), 3)]));
    let gone = node.until_pod("api", "to have released everything", is_cleared).await;
    assert!(gone.0.ending && gone.terminating());
    assert_eq!((stops(&node), node.containers("api").as_str()), (vec![3], ""));
    assert!(gone.container("main").state.unwrap().terminated.is_some());
    // The pod does not start again while its object exists.
    node.until_relisted().await;
    assert_eq!(node.done(&[Op::RunPodSandbox]), 1);
    source.send_replace(desired(&[]));
    node.until_nothing_is_left(&gone).await;
}

fn end(pod: &View, grace: Option<Duration>) -> Request {
    let (reason, message) = ("Evicted".to_owned(), "The node was low on resource: memory.".to_owned());
    Request::Fail { uid: pod.uid(), reason, message, grace }
}

#[tokio::test]
async fn a_pod_with_any_grace_period_is_evicted_and_its_end_hastened() {
    for grace in [i64::MAX, 1_000_000_000_000, 0, -1] {
        let mut pod = assigned(UID);
        pod["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        let (node, _source) = node_with(&[pod]).await;
        let pod = node.until_ready("api").await;
        let held = node.cri.on(Op::StopContainer).hold();
        node.request(end(&pod, None)).await;
        held.reached().await;
        node.request(end(&pod, Some(Duration::from_secs(u64::MAX)))).await;
        node.request(end(&pod, Some(Duration::from_secs(1)))).await;
        held.release();
        node.until_pod("api", "to have released everything", is_cleared).await;
        let stops = stops(&node);
        assert!(stops.iter().all(|seconds| (0..=366 * 24 * 3600).contains(seconds)), "{grace}: {stops:?}");
    }
}

#[tokio::test]
async fn a_critical_pod_preempts_a_pod_with_any_grace_period() {
    for grace in [i64::MAX, 1_000_000_000_000, 0, -1] {
        let mut large = assigned(UID);
        large["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        large["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "3"}});
        let (node, _source) = node_with(&[large]).await;
        node.until_ready("api").await;
        let mut critical = pod("critical");
        critical["spec"]["priorityClassName"] = json!("system-node-critical");
        critical["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "3"}});
        node.apply(&critical);
        node.until_ready("critical").await;
        let preempted = node.until_pod("api", "to have released everything", is_cleared).await;
        assert_eq!(preempted.0.pod.status.as_ref().unwrap().reason.as_deref(), Some("Preempting"));
        assert!(stops(&node).iter().all(|seconds| (0..=366 * 24 * 3600).contains(seconds)), "{grace}");
    }
}

#[tokio::test]
async fn a_deletion_with_a_longer_grace_slows_no_end_down() {
    let (mut node, source) = node_with(&[assigned(UID)]).await;
    let pod = node.until_ready("api").await;
    let held = node.cri.on(Op::StopContainer).hold();
    node.request(end(&pod, None)).await;
    held.reached().await;
    source.send_replace(desired(&[deleted(assigned(UID), 300)]));
    node.until_pod("api", "to be terminating", View::terminating).await;
    let record = node.path("state/pods.json");
    let written = || {
        let text = std::fs::read_to_string(&record).unwrap_or_default();
        if text.contains("Evicted") { Ok(()) } else { Err("the record lacks the eviction") }
    };
    beelet_tests::workdir::wait_for("the record", beelet_tests::workdir::PATIENCE, written).unwrap();
    // The next agent starts with both grace periods.
    node.kill_and_start().await;
    held.release();
    node.until_pod("api", "to have released everything", is_cleared).await;
    assert!(stops(&node).iter().all(|seconds| *seconds <= 30), "{:?}", stops(&node));
}

#[tokio::test]
async fn another_image_ends_the_back_off_of_a_container_that_crashed() {
    let (node, source) = node_with(&[assigned(UID)]).await;
    node.cri.add_to_registry("registry.example/other:1");
    node.until_ready("api").await;
    for restarts in 1..=2 {
        let main = node.cri.container("api-n1", "main").unwrap();
        node.cri.exit(&main.id, 1);
        if restarts == 1 {
            node.until_pod("api", "to be restarted", |pod| {
                pod.restarts()["main"] == 1 && pod.running("main")
            })
            .await;
        }
    }
    node.until_pod("api", "to back off", |pod| pod.waits_for("main", "CrashLoopBackOff")).await;
    let mut changed = assigned(UID);
    changed["spec"]["containers"][0]["image"] = json!("registry.example/other:1");
    source.send_replace(desired(&[changed]));
    node.until_pod("api", "to run the other image", |pod| pod.restarts()["main"] == 2 && pod.running("main"))
        .await;
    let annotations = node.cri.container("api-n1", "main").unwrap().config.annotations;
    assert_eq!(annotations[beelet_model::labels::RESTART_DELAY], "0");
}

#[tokio::test]
async fn other_amounts_end_the_back_off_of_a_container_that_crashed() {
    let sized = |cpu: &str| {
        let mut pod = assigned(UID);
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu}});
        pod
    };
    let (node, source) = node_with(&[sized("100m")]).await;
    node.until_ready("api").await;
    for restarts in 1..=2 {
        let main = node.cri.container("api-n1", "main").unwrap();
        node.cri.exit(&main.id, 1);
        if restarts == 1 {
            let again = |pod: &View| pod.restarts()["main"] == 1 && pod.running("main");
            node.until_pod("api", "to be restarted", again).await;
        }
    }
    node.until_pod("api", "to back off", |pod| pod.waits_for("main", "CrashLoopBackOff")).await;
    source.send_replace(desired(&[sized("200m")]));
    let again = |pod: &View| pod.restarts()["main"] == 2 && pod.running("main");
    node.until_pod("api", "to run with other amounts", again).await;
    let annotations = node.cri.container("api-n1", "main").unwrap().config.annotations;
    assert_eq!(annotations[beelet_model::labels::RESTART_DELAY], "0");
}

#[tokio::test]
async fn a_corrected_image_is_pulled_at_once() {
    let mut wrong = assigned(UID);
    wrong["spec"]["containers"][0]["image"] = json!("registry.example/wrnog:1");
    let (node, source) = node_with(&[wrong]).await;
    node.cri.add_to_registry("registry.example/right:1");
    let tried = || node.cri.count(Op::PullImage);
    // The next attempt is due in 20 s.
    node.until_pod("api", "to back off", |pod| pod.waits_for("main", "ImagePullBackOff") && tried() == 2)
        .await;
    let mut right = assigned(UID);
    right["spec"]["containers"][0]["image"] = json!("registry.example/right:1");
    let corrected = std::time::Instant::now();
    source.send_replace(desired(&[right]));
    node.until_ready("api").await;
    assert!(
        corrected.elapsed() < Duration::from_secs(15),
        "the agent waited for the back-off of the other image"
    );
}

#[tokio::test]
async fn a_pod_deleted_by_force_is_stopped() {
    let (node, source) = node_with(&[assigned(UID)]).await;
    let pod = node.until_ready("api").await;
    source.send_replace(desired(&[]));
    node.until_nothing_is_left(&pod).await;
}

#[tokio::test]
async fn a_pod_deleted_while_it_starts_never_runs() {
    let (source, receiver) = watch::channel(desired(&[assigned(UID)]));
    let mut node = Node::new(Settings::default());
    node.sources.push(receiver);
    let held = node.cri.on(Op::CreateContainer).hold();
    node.start().await;
    held.reached().await;
    source.send_replace(desired(&[deleted(assigned(UID), 3)]));
    node.until_pod("api", "to be terminating", View::terminating).await;
    held.release();
    node.until_pod("api", "to have released everything", is_cleared).await;
    assert_eq!(node.containers("api"), "");
    assert_eq!(node.done(&[Op::StartContainer]), 0);
}

#[tokio::test]
async fn a_pod_waits_for_the_end_of_its_namesake() {
    let (node, source) = node_with(&[assigned(UID)]).await;
    node.until_ready("api").await;
    let held = node.cri.on(Op::StopContainer).hold();
    source.send_replace(desired(&[assigned(OTHER)]));
    held.reached().await;
    assert_eq!(node.done(&[Op::RunPodSandbox]), 1);
    held.release();
    let new = node.until_pod("api", "to be the new one", |pod| pod.uid() == OTHER && pod.ready()).await;
    assert!(!new.terminating());
}

#[tokio::test]
async fn after_a_kill_running_pods_are_left_alone_until_the_api_server_answers() {
    let (mut node, source) = node_with(&[assigned(UID)]).await;
    let pod = node.until_ready("api").await;
    source.send_replace(unread());
    node.kill_and_start().await;
    node.until_relisted().await;
    assert!(!node.is_complete());
    assert_eq!(node.containers("api"), "main/0+");
    source.send_replace(desired(&[assigned(UID)]));
    let same = node.until_ready("api").await;
    assert_eq!((same.uid(), node.containers("api").as_str()), (pod.uid(), "main/0+"));
    assert_eq!(node.done(&[Op::StopContainer]), 0);
    // The pod is stopped if the API server does not list it.
    source.send_replace(unread());
    node.kill_and_start().await;
    source.send_replace(desired(&[]));
    node.until_nothing_is_left(&pod).await;
}

/// Returns a pod that requests these CPUs.
fn requesting(mut pod: Value, cpu: &str) -> Value {
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu}});
    pod
}

#[tokio::test]
async fn a_running_pod_holds_its_room_until_the_api_server_answers() {
    let running = requesting(assigned(UID), "3");
    let (mut node, source) = node_with(std::slice::from_ref(&running)).await;
    let old = node.until_ready("api").await;
    let is_refused = |pod: &View| pod.0.pod.status.as_ref().unwrap().reason.as_deref() == Some("OutOfcpu");
    let record = node.path("state/pods.json");
    let is_written = || match std::fs::read_to_string(&record) {
        Ok(text) if text.contains(r#""cpu":"3""#) => Ok(()),
        _ => Err("the record lacks the amounts"),
    };
    beelet_tests::workdir::wait_for("the record", beelet_tests::workdir::PATIENCE, is_written).unwrap();
    node.kill().await;
    source.send_replace(unread());
    node.apply(&requesting(pod("new"), "2"));
    node.start().await;
    let new = node.until_pod("new", "to be known", |_| true).await;
    node.until_relisted().await;
    assert_eq!(node.containers("new"), "", "the pods of the API server hold the room");
    assert_ne!(new.phase(), "Failed");
    source.send_replace(desired(std::slice::from_ref(&running)));
    node.until_pod("new", "to be refused", is_refused).await;
    node.until_ready("api").await;
    // A pod that is no longer wanted holds its room until its end.
    node.remove("new");
    node.kill().await;
    source.send_replace(unread());
    node.start().await;
    node.until_relisted().await;
    let stop = node.cri.on(Op::StopContainer).hold();
    source.send_replace(desired(&[]));
    stop.reached().await;
    node.apply(&requesting(pod("next"), "2"));
    node.until_pod("next", "to be known", |_| true).await;
    node.until_relisted().await;
    assert_eq!(node.containers("next"), "");
    stop.release();
    node.until_nothing_is_left(&old).await;
    node.until_ready("next").await;
}

#[tokio::test]
async fn after_a_reboot_a_pod_that_waits_for_its_objects_makes_no_runtime_calls() {
    let (mut node, source) = node_with(&[assigned(UID)]).await;
    node.until_ready("api").await;
    node.kill().await;
    node.cri.reboot();
    // The API server has not listed the services yet.
    let complete = desired(&[assigned(UID)]);
    source.send_replace(Arc::new(Desired { objects: Arc::default(), ..(*complete).clone() }));
    node.start().await;
    node.until_pod("api", "to be known", |pod| !pod.running("main")).await;
    node.until_relisted().await;
    assert_eq!(node.done(&[Op::StopPodSandbox]), 0, "{}", node.cri.transcript());
    source.send_replace(complete);
    node.until_ready("api").await;
    assert_eq!(node.done(&[Op::StopPodSandbox, Op::RunPodSandbox]), 3);
}

/// The pod's status does not show the wait: the pod runs, and its sidecar has ended.
#[tokio::test]
async fn a_sidecar_that_ended_while_its_pod_waited_for_its_objects_runs_again() {
    let mut with_sidecar = assigned(UID);
    let mut sidecar = container("proxy");
    sidecar["restartPolicy"] = json!("Always");
    with_sidecar["spec"]["initContainers"] = json!([sidecar]);
    let (mut node, source) = node_with(&[with_sidecar.clone()]).await;
    node.until_ready("api").await;
    node.kill().await;
    node.cri.exit(&node.cri.container("api-n1", "proxy").unwrap().id, 1);
    // The API server has not listed the services yet.
    let complete = desired(&[with_sidecar]);
    source.send_replace(Arc::new(Desired { objects: Arc::default(), ..(*complete).clone() }));
    node.start().await;
    node.until_pod("api", "to be known", |pod| !pod.running("proxy")).await;
    node.until_relisted().await;
    assert!(node.containers("api").contains("proxy/0-"), "{}", node.cri.transcript());
    source.send_replace(complete);
    node.until_pod("api", "to have its sidecar back", |pod| pod.running("proxy")).await;
    assert_eq!(node.done(&[Op::RunPodSandbox]), 1);
}

#[tokio::test]
async fn another_image_restarts_the_container_in_its_sandbox() {
    let (node, source) = node_with(&[assigned(UID)]).await;
    node.until_ready("api").await;
    node.cri.add_image("busybox:1.37");
    let mut changed = assigned(UID);
    changed["metadata"]["generation"] = json!(2);
    changed["spec"]["containers"][0]["image"] = json!("busybox:1.37");
    source.send_replace(desired(&[changed]));
    let new = node.until_pod("api", "to run again", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    assert_eq!(new.0.pod.status.as_ref().unwrap().observed_generation, Some(2));
    assert_eq!(node.done(&[Op::RunPodSandbox]), 1);
    assert!(node.events().iter().any(|event| event.contains("definition changed, will be restarted")));
}

#[tokio::test]
async fn another_image_leaves_an_init_container_alone_that_runs() {
    let prepared = |image: &str, label: &str| {
        let mut pod = assigned(UID);
        pod["metadata"]["labels"] = json!({"is": label});
        pod["spec"]["initContainers"] = json!([container("prepare")]);
        pod["spec"]["initContainers"][0]["image"] = json!(image);
        pod
    };
    let (node, source) = node_with(&[prepared(IMAGE, "old")]).await;
    node.cri.add_image("busybox:1.37");
    node.cri.wait_until("the init container", |world| containers(world, "api") == "prepare/0+").await;
    source.send_replace(desired(&[prepared("busybox:1.37", "new")]));
    let label = |pod: &View| pod.0.pod.metadata.labels.as_ref().is_some_and(|all| all["is"] == "new");
    node.until_pod("api", "to have its new label", label).await;
    node.until_relisted().await;
    assert_eq!((node.containers("api").as_str(), stops(&node)), ("prepare/0+", Vec::new()));
    node.cri.exit(&node.cri.container("api-n1", "prepare").unwrap().id, 0);
    node.until_ready("api").await;
    assert_eq!(node.containers("api"), "main/0+ prepare/0-");
}

#[tokio::test]
async fn metadata_and_a_deadline_change_without_a_restart() {
    let (node, source) = node_with(&[assigned(UID)]).await;
    node.until_ready("api").await;
    let mut changed = assigned(UID);
    changed["metadata"]["labels"] = json!({"tier": "new"});
    source.send_replace(desired(&[changed.clone()]));
    let label = |pod: &View| pod.0.pod.metadata.labels.as_ref().is_some_and(|all| all.contains_key("tier"));
    node.until_pod("api", "to have the label", label).await;
    assert_eq!(node.containers("api"), "main/0+");
    changed["spec"]["activeDeadlineSeconds"] = json!(1);
    source.send_replace(desired(&[changed]));
    let failed = |pod: &View| pod.phase() == "Failed" && is_cleared(pod);
    let ended = node.until_pod("api", "to be past its deadline", failed).await;
    assert_eq!(ended.0.pod.status.as_ref().unwrap().reason.as_deref(), Some("DeadlineExceeded"));
    assert!(!ended.terminating());
}

#[tokio::test]
async fn a_resize_waits_for_room_and_other_changes_do_not_wait_for_it() {
    let sized = |cpu: &str, label: &str| {
        let mut pod = assigned(UID);
        pod["metadata"]["labels"] = json!({"is": label});
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu, "memory": "64Mi"}});
        pod
    };
    let (node, source) = node_with(&[sized("100m", "a")]).await;
    node.until_ready("api").await;
    source.send_replace(desired(&[sized("64", "b")]));
    let label = |pod: &View| pod.0.pod.metadata.labels.as_ref().is_some_and(|all| all["is"] == "b");
    let pod = node.until_pod("api", "to have the label", label).await;
    let conditions = pod.0.pod.status.as_ref().unwrap().conditions.clone().unwrap();
    let pending = conditions.iter().find(|one| one.type_ == "PodResizePending").unwrap();
    assert_eq!(pending.reason.as_deref(), Some("Infeasible"));
    source.send_replace(desired(&[sized("200m", "c")]));
    node.until_pod("api", "to have the new request", |pod| {
        let resources = pod.0.pod.spec.as_ref().unwrap().containers[0].resources.clone().unwrap();
        resources.requests.unwrap()["cpu"].0 == "200m"
    })
    .await;
    assert_eq!(node.containers("api"), "main/0+");
}

/// A new agent must not apply the resize either: the pod would run with, and be accounted for, amounts that
/// exceed the node.
#[tokio::test]
async fn a_resize_without_room_waits_over_a_restart_of_the_agent_and_over_a_reboot() {
    let sized = |cpu: &str| {
        let mut pod = assigned(UID);
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu, "memory": "64Mi"}});
        pod
    };
    let has = |pod: &View, cpu: &str, pending: bool| {
        let resources = pod.0.pod.spec.as_ref().unwrap().containers[0].resources.clone().unwrap();
        let mut conditions = pod.0.pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let waits = conditions.any(|one| one.type_ == "PodResizePending");
        resources.requests.unwrap()["cpu"].0 == cpu && waits == pending
    };
    let (mut node, source) = node_with(&[sized("100m")]).await;
    node.until_ready("api").await;
    source.send_replace(desired(&[sized("64")]));
    node.until_pod("api", "to wait for room", |pod| has(pod, "100m", true)).await;
    node.kill_and_start().await;
    node.until_pod("api", "to wait still", |pod| has(pod, "100m", true) && pod.ready()).await;
    node.kill().await;
    node.cri.reboot();
    node.start().await;
    node.until_pod("api", "to run as before", |pod| {
        has(pod, "100m", true) && pod.ready() && pod.restarts()["main"] == 1
    })
    .await;
    source.send_replace(desired(&[sized("200m")]));
    node.until_pod("api", "to have the new request", |pod| has(pod, "200m", false)).await;
    assert_eq!(node.containers("api"), "main/0- main/1+");
}

#[tokio::test]
async fn a_pod_that_has_ended_in_the_api_server_never_starts() {
    let mut ended = assigned(UID);
    ended["status"] = json!({"phase": "Succeeded"});
    let (node, source) = node_with(&[ended.clone()]).await;
    node.until_pod("api", "to have ended", |pod| pod.phase() == "Succeeded").await;
    node.until_relisted().await;
    assert_eq!(node.cri.count(Op::RunPodSandbox), 0);
    source.send_replace(desired(&[deleted(ended, 3)]));
    let gone = node.until_pod("api", "to have released everything", is_cleared).await;
    assert_eq!(gone.phase(), "Succeeded");
    source.send_replace(desired(&[]));
    let none = |table: &PodTable| view(table, "api").is_none().then_some(());
    node.until("the pod's removal", none).await;
}

#[tokio::test]
async fn a_running_pod_that_another_client_marks_failed_is_stopped() {
    let (node, source) = node_with(&[assigned(UID)]).await;
    node.until_ready("api").await;
    let mut ended = assigned(UID);
    ended["status"] = json!({"phase": "Failed", "reason": "NodeLost", "message": "the node was away"});
    source.send_replace(desired(&[ended]));
    let failed = |pod: &View| pod.phase() == "Failed" && is_cleared(pod);
    let pod = node.until_pod("api", "to have ended", failed).await;
    assert_eq!(pod.0.pod.status.as_ref().unwrap().reason.as_deref(), Some("NodeLost"));
    assert_eq!(node.containers("api"), "");
}

#[tokio::test]
async fn a_pod_is_ready_on_the_node_too_once_its_gates_are_open() {
    let gated = |open: Option<&str>| {
        let mut pod = assigned(UID);
        pod["spec"]["readinessGates"] = json!([{"conditionType": "example.com/fed"}]);
        if let Some(open) = open {
            pod["status"] = json!({"conditions": [{"type": "example.com/fed", "status": open}]});
        }
        pod
    };
    let (node, source) = node_with(&[gated(None)]).await;
    let condition = |pod: &View, kind: &str| {
        let all = pod.0.pod.status.as_ref()?.conditions.clone()?;
        all.into_iter().find(|one| one.type_ == kind)
    };
    let held = |pod: &View| {
        let ready = condition(pod, "Ready");
        pod.running("main")
            && ready.is_some_and(|one| one.reason.as_deref() == Some("ReadinessGatesNotReady"))
    };
    let first = node.until_pod("api", "to wait for its gate", held).await;
    assert!(condition(&first, "ContainersReady").unwrap().status == "True" && !first.ready());
    source.send_replace(desired(&[gated(Some("False"))]));
    let shown = |pod: &View| condition(pod, "example.com/fed").is_some_and(|one| one.status == "False");
    let still = node.until_pod("api", "to have the condition of its gate", shown).await;
    let since = |pod: &View| condition(pod, "Ready").unwrap().last_transition_time;
    assert_eq!(since(&still), since(&first));
    source.send_replace(desired(&[gated(Some("True"))]));
    node.until_ready("api").await;
}
