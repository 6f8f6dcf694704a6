//! Tests of manifests that are changed, removed, restored and damaged while their pods run.

use beelet_model::desired::Desired;
use beelet_model::labels::ANNOTATION_HASH;
use beelet_tests::cri::{Asked, CHANGES, Op};
use serde_json::json;

use super::assigned::{UID, assigned, desired, node_with};
use super::node::{Node, View, of_everything, pod, until_seen, view, with};

/// Returns the calls that change the runtime's state, from number `first` on, stops with their grace period.
fn changes(node: &Node, first: usize) -> Vec<String> {
    let name = |call: beelet_tests::cri::Call| match &call.asked {
        Asked::StopContainer(request) => Some(format!("StopContainer {}", request.timeout)),
        other if CHANGES.contains(&other.op()) => Some(format!("{:?}", other.op())),
        _ => None,
    };
    node.cri.calls().into_iter().skip(first).filter_map(name).collect()
}

const REPLACED: [&str; 7] = [
    "StopContainer 7",
    "StopPodSandbox",
    "RemoveContainer",
    "RemovePodSandbox",
    "RunPodSandbox",
    "CreateContainer",
    "StartContainer",
];

#[tokio::test]
async fn a_changed_manifest_replaces_its_pod_after_the_old_ones_end() {
    let node = Node::with(&[pod("web")]).await;
    let old = node.until_ready("web").await;
    let first = node.cri.calls().len();
    node.apply(&with(pod("web"), "hostname", "other".into()));
    node.until_pod("web", "to be another", |pod| pod.uid() != old.uid() && pod.ready()).await;
    assert_eq!(changes(&node, first), REPLACED, "{}", node.cri.transcript());
    node.until_nothing_is_left(&old).await;
}

#[tokio::test]
async fn a_manifest_that_changes_under_the_same_uid_replaces_its_pod_too() {
    let with_uid = |hostname: &str| {
        let mut pod = with(pod("web"), "hostname", hostname.into());
        pod["metadata"]["uid"] = "my-own-uid".into();
        pod
    };
    let hostname = |pod: &View| pod.0.pod.spec.as_ref().unwrap().hostname.clone();
    let mut node = Node::with(&[with_uid("one")]).await;
    node.until_ready("web").await;
    let first = node.cri.calls().len();
    node.apply(&with_uid("two"));
    let is_two = |pod: &View| pod.ready() && hostname(pod).as_deref() == Some("two");
    node.until_pod("web", "to be another", |pod| is_two(pod) && !pod.terminating()).await;
    assert_eq!(changes(&node, first), REPLACED, "{}", node.cri.transcript());
    // The same holds for a change while the agent is away.
    node.kill().await;
    node.apply(&with_uid("three"));
    let first = node.cri.calls().len();
    node.start().await;
    node.until_pod("web", "to be a third", |pod| hostname(pod).as_deref() == Some("three") && pod.ready())
        .await;
    assert_eq!(changes(&node, first), REPLACED, "{}", node.cri.transcript());
}

#[tokio::test]
async fn a_copy_of_a_manifest_leaves_the_running_pod_alone_after_a_restart_too() {
    let mut node = Node::with(&[pod("web")]).await;
    let web = node.until_ready("web").await;
    let first = node.cri.calls().len();
    let text = std::fs::read_to_string(node.manifest("web")).unwrap();
    let rejection = |table: &beelet_model::table::PodTable| table.rejected.first().cloned();
    // The copy comes first by name and, for the restarted agent, by time.
    node.apply_text("a-copy-of-web", &text);
    let rejected = node.until("the rejection", rejection).await;
    assert_eq!(rejected.file, node.manifest("a-copy-of-web"));
    let original = node.manifest("web").display().to_string();
    assert!(rejected.message.contains(&original), "{}", rejected.message);
    let record = node.path("state/manifests.json");
    until_seen("the record of manifests", || match std::fs::read_to_string(&record) {
        Ok(text) if text.contains(&original) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    node.kill().await;
    std::fs::remove_file(node.manifest("web")).unwrap();
    node.apply_text("web", &text);
    node.start().await;
    let rejected = node.until("the rejection", rejection).await;
    assert_eq!(rejected.file, node.manifest("a-copy-of-web"));
    assert_eq!(node.until_ready("web").await.uid(), web.uid());
    assert_eq!(changes(&node, first), [""; 0], "{}", node.cri.transcript());
}

#[tokio::test]
async fn a_removed_manifests_pod_ends_gracefully_and_without_a_trace() {
    let node = Node::with(&[of_everything("web")]).await;
    let pod = node.until_ready("web").await;
    let folder = node.path(&format!("pods/{}/volumes/scratch", pod.uid()));
    assert!(folder.is_dir());
    let name = |id: &str| node.cri.world().containers.get(id).map(|c| c.name().to_owned());
    let ids = ["a", "b", "side"].map(|name| node.cri.container("web-n1", name).unwrap().id);
    assert_eq!(name(&ids[0]).as_deref(), Some("a"));
    let first = node.cri.calls().len();
    node.remove("web");
    node.until_pod("web", "to be terminating", View::terminating).await;
    node.until_nothing_is_left(&pod).await;
    let stopped: Vec<(usize, i64)> = node
        .cri
        .calls()
        .iter()
        .skip(first)
        .filter_map(|call| match &call.asked {
            Asked::StopContainer(request) => {
                Some((ids.iter().position(|id| *id == request.container_id).unwrap(), request.timeout))
            }
            _ => None,
        })
        .collect();
    // The sidecar is stopped last, with the rest of the pod's seven seconds.
    assert_eq!(stopped.len(), 3, "{stopped:?}");
    assert_eq!((stopped[2].0, stopped[0].1, stopped[1].1), (2, 7, 7));
    assert!((0..=7).contains(&stopped[2].1), "{stopped:?}");
    let all = changes(&node, first);
    let place = |name: &str| all.iter().position(|call| call == name).unwrap();
    assert!(place("StopPodSandbox") < place("RemoveContainer"));
    assert_eq!(place("RemovePodSandbox"), all.len() - 1);
}

#[tokio::test]
async fn an_ending_pod_shows_the_end_of_its_containers_until_it_is_removed() {
    let node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    let held = node.cri.on(Op::RemovePodSandbox).hold();
    node.remove("web");
    held.reached().await;
    let pod = node
        .until_pod("web", "to have ended", |pod| {
            pod.container("main").state.is_some_and(|state| state.terminated.is_some())
        })
        .await;
    assert!(pod.terminating() && !pod.ready());
    // The container is already removed, but its status must still show that it ran.
    node.until_relisted().await;
    assert!(view(&node.table(), "web").unwrap().container("main").state.unwrap().terminated.is_some());
    held.release();
    node.until_gone("web").await;
}

#[tokio::test]
async fn a_pod_whose_manifest_returns_while_it_ends_starts_again_once() {
    let node = Node::with(&[pod("web")]).await;
    let before = node.until_ready("web").await;
    let held = node.cri.on(Op::StopContainer).hold();
    node.remove("web");
    held.reached().await;
    node.apply(&pod("web"));
    node.until_relisted().await;
    let sandbox = node.cri.sandbox("web-n1").unwrap().id;
    held.release();
    node.cri
        .wait_until("a new sandbox", |world| world.sandbox("web-n1").is_some_and(|new| new.id != sandbox))
        .await;
    let after = node.until_pod("web", "to be back", |pod| pod.ready() && !pod.terminating()).await;
    assert_eq!(after.uid(), before.uid());
    node.until_relisted().await;
    // The pod is the same one: its containers ran before.
    assert_eq!(node.containers("web"), "main/1+");
    assert_eq!(node.cri.count(Op::RunPodSandbox), 2, "{}", node.cri.transcript());
}

#[tokio::test]
async fn a_pod_whose_manifest_was_restored_starts_again_once() {
    let mut manifest = assigned(UID);
    manifest["metadata"]["annotations"] = json!({ ANNOTATION_HASH: "same" });
    let restored = |times: u64| {
        let mut desired = Desired::clone(&desired(std::slice::from_ref(&manifest)));
        desired.put_back.insert(UID.to_owned(), times);
        std::sync::Arc::new(desired)
    };
    let (node, source) = node_with(std::slice::from_ref(&manifest)).await;
    node.until_ready("api").await;
    for times in 1..=2 {
        source.send_replace(restored(times));
        let count = i32::try_from(times).unwrap();
        let restarted =
            |pod: &View| pod.ready() && !pod.terminating() && pod.restarts().get("main") == Some(&count);
        node.until_pod("api", "to run again", restarted).await;
        // The same count has no further effect.
        source.send_replace(restored(times));
        node.until_relisted().await;
        assert_eq!(node.containers("api"), format!("main/{times}+"));
    }
}

#[tokio::test]
async fn a_damaged_manifest_stops_no_pod() {
    let node = Node::with(&[pod("web"), pod("other")]).await;
    let web = node.until_ready("web").await;
    node.until_ready("other").await;
    let done = node.done(&CHANGES);
    let mut broken = pod("web");
    broken["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "abc" } });
    node.apply(&broken);
    let rejected = node.until("the rejection", |table| table.rejected.first().cloned()).await;
    assert!(
        rejected.message.contains("abc") && rejected.message.contains("web.yaml"),
        "{}",
        rejected.message
    );
    node.until_relisted().await;
    assert_eq!(view(&node.table(), "web").unwrap().0, web.0);
    assert_eq!(node.done(&CHANGES), done);
    // With the repaired manifest the pod is the same as before.
    node.apply(&pod("web"));
    node.until("no rejection", |table| table.rejected.is_empty().then_some(())).await;
    node.until_relisted().await;
    assert_eq!(node.done(&CHANGES), done);
}
