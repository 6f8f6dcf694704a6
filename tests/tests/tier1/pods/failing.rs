//! Tests of pods that fail permanently: evicted, refused, past their deadline. They release everything and
//! stay `Failed`.

use std::time::Duration;

use beelet_model::request::Request;
use beelet_tests::cri::{Asked, CHANGES, Op};
use serde_json::json;

use super::node::{Node, View, container, of_everything, pod, with};

fn evict(pod: &View, grace: Option<u64>) -> Request {
    Request::Fail {
        uid: pod.uid(),
        reason: "Evicted".to_owned(),
        message: "The node was low on resource: memory.".to_owned(),
        grace: grace.map(Duration::from_secs),
    }
}

fn reason(pod: &View) -> Option<String> {
    pod.0.pod.status.as_ref()?.reason.clone()
}

async fn until_failed(node: &Node, expected: &str) -> View {
    let failed = |pod: &View| pod.phase() == "Failed" && reason(pod).as_deref() == Some(expected);
    let cleared = |pod: &View| failed(pod) && pod.0.cleared;
    node.until_pod("web", &format!("to have failed and released everything: {expected}"), cleared).await
}

/// Returns a pod's files and cgroups, without its logs.
fn holdings(node: &Node, uid: &str) -> Vec<std::path::PathBuf> {
    let logs = node.path("logs");
    let of_pod = |path: &std::path::PathBuf| path.to_string_lossy().contains(uid) && !path.starts_with(&logs);
    node.files().into_iter().filter(of_pod).collect()
}

#[tokio::test]
async fn an_evicted_pod_releases_everything_and_stays_failed_until_a_retry() {
    let mut node = Node::with(&[of_everything("web")]).await;
    let web = node.until_ready("web").await;
    node.request(evict(&web, Some(1))).await;
    let failed = until_failed(&node, "Evicted").await;
    assert_eq!(failed.uid(), web.uid());
    assert!(failed.container("a").state.unwrap().terminated.is_some(), "{:?}", failed.0.pod.status);
    assert!(node.cri.world().sandboxes.is_empty() && node.cri.world().containers.is_empty());
    assert_eq!(holdings(&node, &web.uid()), Vec::<std::path::PathBuf>::new());
    assert!(node.path(&format!("logs/default_web-n1_{}", web.uid())).exists(), "its logs were removed");
    // The pod stays failed across a restart, and causes no further calls.
    node.until_relisted().await;
    let changes = node.done(&CHANGES);
    node.kill_and_start().await;
    node.until_relisted().await;
    assert_eq!(until_failed(&node, "Evicted").await.0.pod.status, failed.0.pod.status);
    let looks = node.cri.count(Op::ListPodSandbox);
    node.until_relisted().await;
    assert!(node.cri.count(Op::ListPodSandbox) <= looks + 3, "the agent inspects the pod again and again");
    assert_eq!(node.done(&CHANGES), changes, "{}", node.cri.transcript());
    // A retry is a new start.
    node.request(Request::Retry { uid: web.uid() }).await;
    let again = node.until_ready("web").await;
    assert_eq!((reason(&again), again.uid()), (None, web.uid()));
    assert!(again.restarts().values().all(|count| *count == 0), "{:?}", again.restarts());
    node.kill_and_start().await;
    node.until_ready("web").await;
    node.remove("web");
    node.until_nothing_is_left(&again).await;
}

/// A replacement of the pod must not wait for a volume that hangs.
#[tokio::test]
async fn an_evicted_pod_fails_when_it_has_stopped_and_keeps_its_room_until_it_is_removed() {
    let wanting = |name: &str| {
        let mut main = container("main");
        main["resources"] = json!({"requests": {"cpu": "3"}});
        with(pod(name), "containers", json!([main]))
    };
    let node = Node::with(&[wanting("web")]).await;
    let web = node.until_ready("web").await;
    let held = node.cri.on(Op::RemovePodSandbox).hold();
    node.request(evict(&web, Some(1))).await;
    held.reached().await;
    let failed = node.until_pod("web", "to have failed", |pod| pod.phase() == "Failed").await;
    assert!(failed.0.stopped && !failed.0.cleared, "{:?}", failed.0);
    assert_eq!(reason(&failed).as_deref(), Some("Evicted"));
    assert!(failed.container("main").state.unwrap().terminated.is_some(), "{:?}", failed.0.pod.status);
    node.apply(&wanting("other"));
    node.until_pod("other", "to be known", |_| true).await;
    node.until_relisted().await;
    assert_eq!(node.cri.count(Op::RunPodSandbox), 1, "{}", node.cri.transcript());
    held.release();
    until_failed(&node, "Evicted").await;
    node.until_ready("other").await;
}

#[tokio::test]
async fn a_changed_manifest_lets_an_evicted_pod_run_again() {
    let node = Node::with(&[pod("web")]).await;
    let web = node.until_ready("web").await;
    node.request(evict(&web, None)).await;
    until_failed(&node, "Evicted").await;
    node.apply(&with(pod("web"), "hostname", "other".into()));
    let again = node.until_ready("web").await;
    assert_ne!(again.uid(), web.uid());
    node.until_nothing_is_left(&web).await;
}

#[tokio::test]
async fn a_pod_that_is_refused_before_it_runs_has_no_containers() {
    let node = Node::with(&[]).await;
    let held = node.cri.on(Op::RunPodSandbox).hold();
    node.apply(&pod("web"));
    held.reached().await;
    let web = node.until_pod("web", "to be known", |_| true).await;
    node.request(Request::Fail {
        uid: web.uid(),
        reason: "NodePorts".to_owned(),
        message: "Node didn't have free ports for the requested pod ports".to_owned(),
        grace: None,
    })
    .await;
    let failed = until_failed(&node, "NodePorts").await;
    held.release();
    assert!(failed.0.pod.status.as_ref().unwrap().container_statuses.is_none());
    node.until_relisted().await;
    node.cri.wait_until("the removal of a late sandbox", |world| world.sandboxes.is_empty()).await;
    assert_eq!(node.cri.count(Op::CreateContainer), 0, "{}", node.cri.transcript());
}

#[tokio::test]
async fn a_started_termination_continues_after_a_kill() {
    let mut node = Node::with(&[of_everything("web")]).await;
    let web = node.until_ready("web").await;
    let held = node.cri.on(Op::StopPodSandbox).hold();
    node.request(evict(&web, Some(1))).await;
    held.reached().await;
    let ending = node.until_pod("web", "to have the reason of its end", |pod| reason(pod).is_some()).await;
    assert_ne!(ending.phase(), "Failed", "the pod may still run");
    // The record is written soon, but not at once.
    let record = node.path("state/pods.json");
    let written = || {
        let text = std::fs::read_to_string(&record).unwrap_or_default();
        if text.contains("Evicted") { Ok(()) } else { Err("the record lacks the eviction") }
    };
    beelet_tests::workdir::wait_for("the record", beelet_tests::workdir::PATIENCE, written).unwrap();
    node.kill_and_start().await;
    drop(held);
    until_failed(&node, "Evicted").await;
    assert!(node.cri.world().sandboxes.is_empty(), "{}", node.cri.transcript());
}

#[tokio::test]
async fn a_second_end_hastens_the_first_and_a_retry_waits_for_it() {
    let node = Node::with(&[with(pod("web"), "terminationGracePeriodSeconds", json!(600))]).await;
    let web = node.until_ready("web").await;
    let held = node.cri.on(Op::StopContainer).when(|asked| timeout(asked) == Some(600)).hold();
    node.request(evict(&web, None)).await;
    held.reached().await;
    node.request(Request::Retry { uid: web.uid() }).await;
    node.request(evict(&web, Some(5))).await;
    until_failed(&node, "Evicted").await;
    let stops: Vec<i64> = node.cri.calls().iter().filter_map(|call| timeout(&call.asked)).collect();
    assert_eq!(stops, [600, 5], "{}", node.cri.transcript());
    // The second eviction cancels the earlier retry; a retry during the termination counts.
    let held = node.cri.on(Op::RemovePodSandbox).hold();
    node.request(Request::Retry { uid: web.uid() }).await;
    let web = node.until_ready("web").await;
    node.request(evict(&web, Some(5))).await;
    held.reached().await;
    node.request(Request::Retry { uid: web.uid() }).await;
    held.release();
    node.until_pod("web", "to run again", |pod| pod.ready() && reason(pod).is_none()).await;
}

fn timeout(asked: &Asked) -> Option<i64> {
    match asked {
        Asked::StopContainer(request) => Some(request.timeout),
        _ => None,
    }
}

#[tokio::test]
async fn a_pod_past_its_deadline_fails() {
    let mut node = Node::with(&[]).await;
    node.apply(&with(pod("web"), "activeDeadlineSeconds", json!(3)));
    let web = node.until_pod("web", "to be known", |_| true).await;
    let started = web.0.pod.status.as_ref().unwrap().start_time.clone().unwrap().0.as_second();
    // The deadline continues while the agent is away.
    node.kill_and_start().await;
    let failed = until_failed(&node, "DeadlineExceeded").await;
    let message = failed.0.pod.status.as_ref().unwrap().message.clone();
    assert_eq!(message.as_deref(), Some("Pod was active on the node longer than the specified deadline"));
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    assert!(now >= u64::try_from(started).unwrap() + 3, "the pod ended too early");
    assert!(node.cri.world().sandboxes.is_empty());
}
