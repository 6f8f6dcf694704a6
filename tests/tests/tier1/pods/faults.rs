//! Tests of a runtime that hangs for one pod, is slow for all, crashes and returns. Single failing calls:
//! every_call.rs.

use std::time::Duration;

use beelet_tests::cri::{CHANGES, Op, PATIENCE};
use futures::future::join_all;
use serde_json::json;

use super::node::{IMAGE, Node, Settings, View, container, of_everything, pod, view, with};

/// Returns a pod whose image must be pulled.
fn pulled(name: &str) -> serde_json::Value {
    let mut container = container("main");
    container["image"] = "registry.test/slow:1".into();
    with(pod(name), "containers", json!([container]))
}

#[tokio::test]
async fn a_call_that_hangs_for_one_pod_delays_no_other() {
    let check = async |op| {
        let node = Node::with(&[]).await;
        node.cri.add_to_registry("registry.test/slow:1");
        let held = node.cri.on(op).hold();
        node.apply(&pulled("web"));
        held.reached().await;
        node.apply(&pod("other"));
        node.until_ready("other").await;
        assert!(!view(&node.table(), "web").unwrap().ready(), "{op:?}");
        held.release();
        node.until_ready("web").await;
    };
    let ops = [Op::RunPodSandbox, Op::ImageStatus, Op::PullImage, Op::CreateContainer, Op::StartContainer];
    join_all(ops.map(check)).await;
}

#[tokio::test]
async fn a_stop_that_hangs_delays_no_other_pods_end() {
    let node = Node::with(&[pod("web"), pod("other")]).await;
    let web = node.until_ready("web").await;
    let other = node.until_ready("other").await;
    let held = node.cri.on(Op::StopContainer).hold();
    node.remove("web");
    held.reached().await;
    node.remove("other");
    node.until_nothing_is_left(&other).await;
    let terminating = view(&node.table(), "web").unwrap();
    assert!(terminating.terminating() && terminating.running("main"));
    held.release();
    node.until_nothing_is_left(&web).await;
}

#[tokio::test]
async fn a_pod_that_is_removed_while_its_pull_hangs_ends_at_once() {
    let node = Node::with(&[pulled("web")]).await;
    node.cri.add_to_registry("registry.test/slow:1");
    let held = node.cri.on(Op::PullImage).always().hold();
    let web = node.until_pod("web", "to be known", |_| true).await;
    node.remove("web");
    node.until_nothing_is_left(&web).await;
    drop(held);
}

#[tokio::test]
async fn with_a_slow_runtime_everything_starts_once() {
    let node = Node::with(&[]).await;
    node.cri.on_any().always().after(Duration::from_millis(150)).proceed();
    node.apply(&of_everything("web"));
    node.apply(&pod("other"));
    node.until_ready("web").await;
    node.until_ready("other").await;
    assert_eq!(node.containers("web"), "a/0+ b/0+ init/0- side/0+");
    // Two sandboxes, five created and five started containers.
    assert_eq!(node.done(&CHANGES), 12, "{}", node.cri.transcript());
}

#[tokio::test]
async fn with_a_slow_runtime_everything_is_removed_once() {
    let node = Node::with(&[of_everything("web")]).await;
    let web = node.until_ready("web").await;
    let before = node.done(&CHANGES);
    node.cri.on_any().always().after(Duration::from_millis(150)).proceed();
    node.remove("web");
    node.until_nothing_is_left(&web).await;
    // Three stopped and four removed containers, and the stop and the removal of the sandbox.
    assert_eq!(node.done(&CHANGES) - before, 9, "{}", node.cri.transcript());
}

/// Crashes the runtime, and waits until the agent tries to reconnect.
async fn crash(node: &Node) {
    node.cri.crash();
    std::fs::remove_file(node.cri.socket()).unwrap();
    let listener = tokio::net::UnixListener::bind(node.cri.socket()).unwrap();
    let tried = tokio::time::timeout(PATIENCE, listener.accept()).await;
    assert!(tried.is_ok(), "the agent does not reconnect");
}

#[tokio::test]
async fn a_crash_of_the_runtime_changes_nothing() {
    let node = Node::with(&[pod("web")]).await;
    let before = node.until_ready("web").await;
    let changes = node.done(&CHANGES);
    let mut seen = node.watch();
    seen.mark_unchanged();
    crash(&node).await;
    node.cri.come_back();
    node.until_relisted().await;
    assert!(!seen.has_changed().unwrap(), "the agent published a change");
    assert_eq!(view(&node.table(), "web").unwrap().0, before.0);
    assert_eq!(node.done(&CHANGES), changes, "{}", node.cri.transcript());
}

#[tokio::test]
async fn changes_while_the_runtime_is_away_are_applied_when_it_is_back() {
    let node = Node::with(&[pod("web"), pod("old")]).await;
    node.until_ready("web").await;
    let old = node.until_ready("old").await;
    crash(&node).await;
    node.apply(&pod("new"));
    node.remove("old");
    node.until_pod("new", "to be known", |pod| pod.phase() == "Pending").await;
    node.until_pod("old", "to be terminating", View::terminating).await;
    node.cri.come_back();
    node.until_ready("new").await;
    node.until_nothing_is_left(&old).await;
    assert_eq!(node.containers("web"), "main/0+");
}

#[tokio::test]
async fn a_runtime_that_lost_its_state_gets_the_pods_again() {
    let node = Node::with(&[pod("web"), of_everything("all")]).await;
    node.until_ready("web").await;
    node.until_ready("all").await;
    let before = node.cri.sandbox("web-n1").unwrap().id;
    crash(&node).await;
    node.cri.forget();
    node.cri.add_image(IMAGE);
    node.cri.come_back();
    node.until_pod("web", "to run in a new sandbox", |pod| {
        let sandbox = node.cri.sandbox("web-n1").map(|sandbox| sandbox.id);
        sandbox.is_some_and(|id| id != before) && pod.ready()
    })
    .await;
    node.until_pod("all", "to run again", |pod| pod.restarts()["a"] == 1 && pod.ready()).await;
    // Restart counts never fall.
    assert_eq!(node.containers("web"), "main/1+");
    assert_eq!(node.containers("all"), "a/1+ b/1+ init/1- side/1+");
    assert_eq!(node.cri.world().sandboxes.len(), 2);
}

/// The pod may have done its work completely or in part: the work must not be repeated.
#[tokio::test]
async fn a_pod_that_is_never_restarted_has_failed_when_the_runtime_lost_it() {
    let job = |name: &str| with(pod(name), "restartPolicy", "Never".into());
    let (mut node, _source) = super::assigned::node_with(&[with(
        super::assigned::assigned(super::assigned::UID),
        "restartPolicy",
        "Never".into(),
    )])
    .await;
    node.apply(&job("job"));
    node.until_ready("api").await;
    node.until_ready("job").await;
    let lose = async |node: &mut Node| {
        node.cri.crash();
        node.cri.forget();
        node.cri.add_image(IMAGE);
        node.cri.come_back();
    };
    lose(&mut node).await;
    for name in ["api", "job"] {
        let failed = node.until_pod(name, "to have failed", |pod| pod.phase() == "Failed").await;
        let main = failed.container("main");
        let end = main.state.unwrap().terminated.unwrap();
        assert_eq!((end.reason.as_deref(), end.exit_code), (Some("ContainerStatusUnknown"), 137), "{name}");
        assert_eq!(main.restart_count, 1, "{name}");
    }
    // A new agent keeps the pods failed, too, once their records are written.
    let record = node.path("state/pods.json");
    let written = || match std::fs::read_to_string(&record).unwrap_or_default().matches("Unknown").count() {
        0 | 1 => Err("the records lack an end"),
        _ => Ok(()),
    };
    beelet_tests::workdir::wait_for("the records", PATIENCE, written).unwrap();
    node.kill_and_start().await;
    node.until_relisted().await;
    assert_eq!((node.containers("api"), node.containers("job")), (String::new(), String::new()));
    assert!(["api", "job"].iter().all(|name| node.cri.sandbox(&format!("{name}-n1")).is_none()));
}

#[tokio::test]
async fn an_agent_that_starts_before_its_runtime_waits_for_it() {
    let mut node = Node::new(Settings::default());
    node.apply(&pod("web"));
    node.apply_text("broken", "{");
    node.cri.crash();
    node.launch();
    crash(&node).await;
    node.cri.come_back();
    node.until_connected().await;
    node.until("the rejected manifest", |table| (!table.rejected.is_empty()).then_some(())).await;
    node.until_ready("web").await;
    assert_eq!(node.containers("web"), "main/0+");
}
