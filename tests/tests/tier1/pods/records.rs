//! Tests of durable records that cannot be written or read.

use std::{fs, path::Path, sync::Arc};

use beelet_model::{labels::POD_UID, table::PodTable};
use beelet_tests::cri::{Asked, CHANGES, Call, Op};
use beelet_tests::workdir::{PATIENCE, wait_for};
use serde_json::json;
use tokio::time::timeout;

use super::node::{Node, pod};

#[tokio::test]
async fn without_room_for_records_pods_run_on_and_the_failures_are_counted() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    let (state, away) = (node.path("state"), node.path("state-away"));
    fs::rename(&state, &away).unwrap();
    node.apply(&pod("other"));
    node.until_ready("other").await;
    let errors = node.metrics().state_write_errors.clone();
    let failed = || if errors.get() > 0 { Ok(()) } else { Err("no write has failed") };
    wait_for("a failed write", PATIENCE, failed).unwrap();
    // With room again, the current state is written without a further change.
    fs::rename(&away, &state).unwrap();
    let record = state.join("pods.json");
    let written = || {
        let text = fs::read_to_string(&record).unwrap_or_default();
        if text.contains("other-n1") { Ok(()) } else { Err("the record lacks the new pod") }
    };
    wait_for("the record", PATIENCE, written).unwrap();
    let changes = node.done(&CHANGES);
    node.kill_and_start().await;
    node.until_relisted().await;
    node.until_ready("other").await;
    assert_eq!(node.done(&CHANGES), changes);
}

#[tokio::test]
async fn a_new_agent_knows_a_pods_network_namespace_before_the_runtime_reports_it() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    let sandbox = node.cri.container("web-n1", "main").unwrap().sandbox_id;
    let own = json!([{ "type": "network", "path": "/proc/self/ns/net" }]);
    node.cri.set_sandbox_info(&sandbox, json!({ "runtimeSpec": { "linux": { "namespaces": own } } }));
    // An agent inspects a sandbox only once, so a new agent must read the changed info.
    node.kill_and_start().await;
    let record = node.path("state/pods.json");
    let written = || {
        let text = fs::read_to_string(&record).unwrap_or_default();
        if text.contains("/proc/self/ns/net") { Ok(()) } else { Err("the record lacks the namespace") }
    };
    wait_for("the record", PATIENCE, written).unwrap();
    let _held = node.cri.on(Op::PodSandboxStatus).always().hold();
    node.kill_and_start().await;
    let known = |table: &Arc<PodTable>| {
        let mut entries = table.pods.values();
        entries.any(|entry| entry.netns.as_deref() == Some(Path::new("/proc/self/ns/net")))
    };
    timeout(PATIENCE, node.watch().wait_for(known)).await.expect("the namespace is known").unwrap();
}

#[tokio::test]
async fn a_new_agent_does_not_query_recorded_facts() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    let sandbox = node.cri.container("web-n1", "main").unwrap().sandbox_id;
    // A running process that does not belong to a pod.
    let pid = std::process::id();
    node.cri.set_sandbox_info(&sandbox, json!({ "pid": pid }));
    // An agent inspects a sandbox only once, so a new agent must read the changed info.
    node.kill_and_start().await;
    let record = node.path("state/pods.json");
    let written = || {
        let text = fs::read_to_string(&record).unwrap_or_default();
        if text.contains(&format!("\"pid\":{pid}")) { Ok(()) } else { Err("the record lacks the process") }
    };
    wait_for("the record", PATIENCE, written).unwrap();
    let before = node.cri.calls().len();
    node.kill_and_start().await;
    node.until_relisted().await;
    node.until_ready("web").await;
    let inspects_one = |call: &&Call| match &call.asked {
        Asked::ListPodSandbox(request) => {
            request.filter.as_ref().is_some_and(|filter| filter.label_selector.contains_key(POD_UID))
        }
        Asked::ListContainers(request) => {
            request.filter.as_ref().is_some_and(|filter| filter.label_selector.contains_key(POD_UID))
        }
        Asked::PodSandboxStatus(_) => true,
        _ => false,
    };
    let calls = node.cri.calls();
    let found: Vec<&Call> = calls.iter().skip(before).filter(inspects_one).collect();
    assert!(found.is_empty(), "{found:?}");
    assert!(calls.iter().skip(before).any(|call| call.op() == Op::ContainerStatus));
}

#[tokio::test]
async fn an_agent_ends_in_time_though_its_records_cannot_be_written() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    fs::rename(node.path("state"), node.path("state-away")).unwrap();
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 1);
    node.until_pod("web", "to be restarted", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    let errors = node.metrics().state_write_errors.clone();
    let failed = || if errors.get() > 0 { Ok(()) } else { Err("no write has failed") };
    wait_for("a failed write", PATIENCE, failed).unwrap();
    // The agent must not wait for the writer's next attempt, or forever.
    node.stop().await;
}

#[tokio::test]
async fn damaged_records_are_set_aside_and_containers_run_on() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    node.kill().await;
    fs::write(node.path("state/pods.json"), "not a record\n").unwrap();
    let changes = node.done(&CHANGES);
    node.start().await;
    node.until_ready("web").await;
    node.until_relisted().await;
    assert_eq!(node.done(&CHANGES), changes, "{}", node.cri.transcript());
    let names = fs::read_dir(node.path("state")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().any(|name| name.to_string_lossy().starts_with("pods.corrupt-")));
}
