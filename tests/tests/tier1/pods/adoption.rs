//! Tests of the adoption of pods that ran before the agent.

use std::collections::BTreeSet;
use std::time::Duration;

use beelet_model::labels;
use beelet_proto::cri;
use beelet_tests::cri::{Asked, CHANGES, Op};

use super::node::{Node, Settings, of_everything, pod, until_seen, with};

#[tokio::test]
async fn a_pod_starts_in_the_right_order() {
    let mut node = Node::new(Settings::default());
    node.apply(&of_everything("web"));
    node.start().await;
    let pod = node.until_ready("web").await;
    assert_eq!(node.containers("web"), "a/0+ b/0+ init/0- side/0+");
    let name = |id: &str| node.cri.world().containers[id].name().to_owned();
    let done: Vec<String> = node
        .cri
        .calls()
        .iter()
        .filter_map(|call| match &call.asked {
            Asked::RunPodSandbox(_) => Some("sandbox".to_owned()),
            Asked::CreateContainer(request) => {
                let metadata = request.config.as_ref()?.metadata.as_ref()?;
                Some(format!("create {}", metadata.name))
            }
            Asked::StartContainer(request) => Some(format!("start {}", name(&request.container_id))),
            other => CHANGES.contains(&other.op()).then(|| format!("{:?}", other.op())),
        })
        .collect();
    let expected = [
        "sandbox",
        "create init",
        "start init",
        "create side",
        "start side",
        "create a",
        "start a",
        "create b",
        "start b",
    ];
    assert_eq!(done, expected);
    assert_eq!(pod.phase(), "Running");
    assert!(pod.restarts().values().all(|count| *count == 0), "{:?}", pod.restarts());
    // The pod's cgroup is at the path that the runtime got.
    let parent = node.cri.sandbox("web-n1").unwrap().config.linux.unwrap().cgroup_parent;
    assert_eq!(parent, format!("/kubepods/besteffort/pod{}", pod.uid()));
    assert!(node.path(&format!("cgroup/cpu{parent}")).is_dir());
}

#[tokio::test]
async fn a_killed_agent_adopts_running_pods_without_changes() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 1);
    let before =
        node.until_pod("web", "to run again", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    node.until_relisted().await;
    node.kill().await;
    let changes = node.done(&CHANGES);
    node.start().await;
    let mut seen = node.watch();
    let first = node.until_pod("web", "to be known", |_| true).await;
    assert!(first.ready(), "the pod's readiness flipped");
    node.until_relisted().await;
    let after = node.until_ready("web").await;
    assert_eq!(after.0.pod.status, before.0.pod.status);
    assert_eq!(seen.borrow_and_update().pods.len(), 1);
    assert_eq!(node.done(&CHANGES), changes, "{}", node.cri.transcript());
    assert_eq!(node.containers("web"), "main/0- main/1+");
}

#[tokio::test]
async fn a_container_that_ended_while_the_agent_was_away_is_restarted_once() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    node.kill().await;
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 0);
    node.start().await;
    let pod = node.until_pod("web", "to run again", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    let ended = pod.container("main").last_state.unwrap().terminated.unwrap();
    assert_eq!((ended.exit_code, ended.reason.as_deref()), (0, Some("Completed")));
    assert_eq!(node.containers("web"), "main/0- main/1+");
}

#[tokio::test]
async fn a_node_that_was_rebooted_gets_its_pods_in_new_sandboxes() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    node.kill().await;
    node.cri.reboot();
    node.start().await;
    let pod = node.until_pod("web", "to run again", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    assert_eq!(pod.container("main").last_state.unwrap().terminated.unwrap().exit_code, 255);
    assert_eq!(node.cri.sandbox("web-n1").unwrap().config.metadata.unwrap().attempt, 1);
    // Only the old sandbox, with the container of `lastState`, and the new one are left.
    node.cri.wait_until("no third sandbox", |world| world.sandboxes.len() <= 2).await;
}

/// Adds a sandbox of another client, or an orphaned one of the agent's.
fn sandbox(node: &Node, name: &str, ours: bool) -> String {
    let uid = format!("{name}-uid");
    let mut all = vec![
        (labels::POD_NAME, name),
        (labels::POD_NAMESPACE, "default"),
        (labels::POD_UID, uid.as_str()),
        (labels::CONTAINER_NAME, "main"),
    ];
    if ours {
        all.push((labels::MANAGED_BY, labels::MANAGED_BY_BEELET));
    }
    let labels = all.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned()));
    let labels: std::collections::HashMap<String, String> = labels.collect();
    let metadata = cri::PodSandboxMetadata {
        name: name.to_owned(),
        namespace: "default".to_owned(),
        uid: uid.clone(),
        attempt: 0,
    };
    let annotations = [(labels::GRACE_PERIOD.to_owned(), "11".to_owned())].into();
    let config = cri::PodSandboxConfig {
        metadata: Some(metadata),
        labels: labels.clone(),
        annotations,
        ..cri::PodSandboxConfig::default()
    };
    let id = format!("{name}-sandbox");
    let of_container = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
        labels,
        ..cri::ContainerConfig::default()
    };
    node.cri.change(|world| {
        world.sandboxes.insert(
            id.clone(),
            beelet_tests::cri::Sandbox {
                id: id.clone(),
                config,
                state: cri::PodSandboxState::SandboxReady,
                created_at: 1,
                ip: String::new(),
                info: serde_json::json!({}),
                runtime_handler: String::new(),
            },
        );
        world.containers.insert(
            format!("{name}-container"),
            beelet_tests::cri::Container::running(format!("{name}-container"), id.clone(), of_container),
        );
    });
    id
}

#[tokio::test]
async fn foreign_sandboxes_are_never_touched_and_orphans_end_gracefully() {
    let mut node = Node::new(Settings::default());
    let foreign = sandbox(&node, "foreign", false);
    let orphan = sandbox(&node, "orphan", true);
    node.apply(&pod("web"));
    node.start().await;
    node.until_ready("web").await;
    node.cri.wait_until("the orphan's removal", |world| !world.sandboxes.contains_key(&orphan)).await;
    node.until_relisted().await;
    let calls = node.cri.calls();
    let grace: BTreeSet<i64> = calls
        .iter()
        .filter_map(|call| match &call.asked {
            Asked::StopContainer(request) if request.container_id == "orphan-container" => {
                Some(request.timeout)
            }
            _ => None,
        })
        .collect();
    assert_eq!(grace, BTreeSet::from([11]));
    // No call contains the name of the foreign sandbox or its container.
    assert!(
        calls.iter().all(|call| !format!("{:?}", call.asked).contains("foreign")),
        "{}",
        node.cri.transcript()
    );
    assert!(node.cri.world().sandboxes.contains_key(&foreign));
    assert!(node.cri.world().containers.contains_key("foreign-container"));
    assert!(!node.table().pods.keys().any(|name| name.name == "foreign"));
}

#[tokio::test]
async fn a_pod_whose_manifest_cannot_be_read_at_the_start_is_left_alone() {
    let mut node = Node::with(&[pod("web"), pod("other")]).await;
    node.until_ready("web").await;
    node.until_ready("other").await;
    node.kill().await;
    node.apply_text("web", "apiVersion: v1\nkind: Pod\nspec: [\n");
    node.start().await;
    node.until_ready("other").await;
    node.until("the manifest to be rejected", |table| (!table.rejected.is_empty()).then_some(())).await;
    node.until_relisted().await;
    assert_eq!(node.containers("web"), "main/0+");
    assert_eq!(node.cri.count(Op::StopContainer), 0);
    // With the repaired manifest it is the same pod again.
    node.apply(&pod("web"));
    node.until_ready("web").await;
    assert_eq!(node.containers("web"), "main/0+");
    // A different manifest replaces the pod.
    node.kill().await;
    node.apply_text("web", "{");
    node.start().await;
    node.until("the manifest to be rejected", |table| (!table.rejected.is_empty()).then_some(())).await;
    node.apply(&with(pod("web"), "terminationGracePeriodSeconds", serde_json::json!(3)));
    let is_new = |pod: &super::node::View| {
        pod.0.pod.spec.as_ref().unwrap().termination_grace_period_seconds == Some(3) && pod.ready()
    };
    node.until_pod("web", "to match the new manifest", is_new).await;
    assert_eq!(node.cri.world().sandboxes.values().filter(|s| s.pod_name() == "web-n1").count(), 1);
}

#[tokio::test]
async fn a_stopped_agent_leaves_its_pods_running() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    node.stop().await;
    assert_eq!(node.containers("web"), "main/0+");
    assert_eq!(node.cri.count(Op::StopContainer) + node.cri.count(Op::StopPodSandbox), 0);
}

#[tokio::test]
async fn with_stop_pods_on_exit_the_agent_ends_after_its_pods() {
    let settings = Settings { stop_pods_on_exit: true, ..Settings::default() };
    let mut node = Node::with_settings(settings, &[pod("web"), of_everything("all")]).await;
    let web = node.until_ready("web").await;
    let slow = node.cri.on(Op::StopContainer).after(Duration::from_millis(200)).always();
    slow.proceed();
    node.stop().await;
    assert_eq!(node.cri.world().sandboxes.len(), 0);
    node.until_nothing_is_left(&web).await;
}

#[tokio::test]
async fn the_table_is_complete_only_after_all_running_pods_were_inspected() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    node.kill().await;
    // The new agent has no records of running pods.
    std::fs::remove_dir_all(node.path("state")).unwrap();
    let held = node.cri.on(Op::PodSandboxStatus).hold();
    node.start().await;
    held.reached().await;
    assert!(!node.is_complete() && node.table().pods.is_empty());
    held.release();
    node.until_ready("web").await;
    until_seen("the table to be complete", || node.is_complete().then_some(()).ok_or("not yet")).await;
}
