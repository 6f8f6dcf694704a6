//! Tests of probes that change while their pod runs (KEP-6318): by an edited manifest and by the API server.

use std::net::TcpListener;

use serde_json::{Value, json};

use super::assigned::{UID, assigned, desired, node_with};
use super::node::{Node, View, container, pod, until_seen, with};

/// A port of this machine on which nothing listens until the test opens it.
fn free() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn probe(port: u16) -> Value {
    let socket = json!({ "host": "127.0.0.1", "port": port });
    json!({ "tcpSocket": socket, "periodSeconds": 1, "failureThreshold": 1 })
}

fn probed(probes: &[(&str, &Value)]) -> Value {
    let mut main = container("main");
    for (kind, probe) in probes {
        main[format!("{kind}Probe")] = (*probe).clone();
    }
    with(pod("web"), "containers", json!([main]))
}

fn changes(node: &Node) -> Vec<String> {
    let all = node.events().into_iter();
    all.filter_map(|event| event.strip_prefix("ContainerProbeChanged: ").map(str::to_owned)).collect()
}

/// Waits until this number of different changes was recorded. An event may come after the table's change.
async fn until_changes(node: &Node, count: usize) {
    until_seen("the events of changes", || match changes(node) {
        found if found.len() == count => Ok(()),
        found => Err(format!("{found:?}")),
    })
    .await;
}

/// Checks that the pod is the same, with its first container.
fn check_same(node: &Node, before: &View, now: &View) {
    assert_eq!(now.uid(), before.uid());
    assert_eq!(node.containers("web"), "main/0+");
}

#[tokio::test]
async fn a_manifest_of_which_only_probes_change_keeps_its_pod() {
    let (open, closed) = (TcpListener::bind(("127.0.0.1", 0)).unwrap(), free());
    let (good, bad) = (probe(open.local_addr().unwrap().port()), probe(closed));
    let node = Node::with(&[probed(&[("readiness", &bad)])]).await;
    let first = node.until_pod("web", "to run unready", |pod| pod.running("main") && !pod.ready()).await;
    // Another handler: in force at once.
    node.apply(&probed(&[("readiness", &good)]));
    check_same(&node, &first, &node.until_ready("web").await);
    // Removed: ready, as if there had been none. Added again: not ready until it succeeds.
    node.apply(&probed(&[("readiness", &bad)]));
    node.until_pod("web", "to be unready", |pod| !pod.ready()).await;
    node.apply(&probed(&[]));
    check_same(&node, &first, &node.until_ready("web").await);
    node.apply(&probed(&[("readiness", &bad)]));
    check_same(&node, &first, &node.until_pod("web", "to be unready", |pod| !pod.ready()).await);
    until_changes(&node, 3).await;
    // Equal events are counted, not repeated.
    let expected = ["updated", "removed", "added"];
    assert_eq!(changes(&node), expected.map(|action| format!("Container main: readiness probe {action}")));
    // A liveness probe that fails restarts the container, but its addition alone does not.
    node.apply(&probed(&[("liveness", &good)]));
    check_same(&node, &first, &node.until_ready("web").await);
    node.apply(&probed(&[("liveness", &bad)]));
    node.until_pod("web", "to be restarted", |pod| pod.restarts()["main"] == 1).await;
}

#[tokio::test]
async fn a_startup_probe_added_after_the_start_is_for_the_next_container() {
    let bad = probe(free());
    let never = json!({ "failureThreshold": 1000, "tcpSocket": bad["tcpSocket"], "periodSeconds": 1 });
    let node = Node::with(&[probed(&[])]).await;
    let first = node.until_ready("web").await;
    node.apply(&probed(&[("startup", &never)]));
    let pod = node.until("the probe to exist", |table| {
        let pod = super::node::view(table, "web")?;
        pod.0.pod.spec.as_ref()?.containers[0].startup_probe.as_ref()?;
        Some(pod)
    });
    let pod = pod.await;
    check_same(&node, &first, &pod);
    assert!(pod.ready() && pod.container("main").started == Some(true), "{:?}", pod.container("main"));
    let id = node.cri.world().container("web-n1", "main").unwrap().id.clone();
    node.cri.exit(&id, 1);
    let next =
        node.until_pod("web", "to run again", |pod| pod.restarts()["main"] == 1 && pod.running("main")).await;
    assert!(!next.ready() && next.container("main").started == Some(false), "{:?}", next.container("main"));
    // Its removal lets the container count as started.
    node.apply(&probed(&[]));
    node.until_ready("web").await;
}

#[tokio::test]
async fn a_patch_of_the_api_server_changes_probes_and_their_annotations_in_place() {
    let open = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let with_probe = |probe: Value, annotation: &str| {
        let mut pod = assigned(UID);
        pod["spec"]["containers"][0]["readinessProbe"] = probe;
        pod["metadata"]["annotations"]["beelet.dev/probes"] = json!(annotation);
        pod
    };
    let (node, source) = node_with(&[with_probe(probe(free()), "period=2s")]).await;
    node.until_pod("api", "to run unready", |pod| pod.running("main") && !pod.ready()).await;
    source.send_replace(desired(&[with_probe(probe(open.local_addr().unwrap().port()), "period=3s")]));
    let pod = node.until_ready("api").await;
    assert_eq!(pod.restarts()["main"], 0);
    assert_eq!(node.probes().await[0].period, std::time::Duration::from_secs(3));
    // A change of the period alone keeps the result.
    source.send_replace(desired(&[with_probe(probe(open.local_addr().unwrap().port()), "period=5s")]));
    while node.probes().await[0].period != std::time::Duration::from_secs(5) {
        tokio::task::yield_now().await;
    }
    assert!(node.until_ready("api").await.ready());
}

#[tokio::test]
async fn an_answer_to_an_earlier_question_does_not_count() {
    // A server that accepts and never answers: the check lasts until its timeout.
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let slow = json!({
        "httpGet": { "host": "127.0.0.1", "port": silent.local_addr().unwrap().port() },
        "timeoutSeconds": 5, "periodSeconds": 1, "failureThreshold": 1,
    });
    let open = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let node = Node::with(&[probed(&[("liveness", &slow)])]).await;
    node.until_ready("web").await;
    let held = tokio::task::spawn_blocking(move || silent.accept()).await.unwrap().unwrap();
    node.apply(&probed(&[("liveness", &probe(open.local_addr().unwrap().port()))]));
    until_changes(&node, 1).await;
    // The new probe looks again beyond the timeout of the question in flight.
    let from = jiff::Timestamp::now();
    loop {
        let last = node.probes().await[0].last.clone();
        if last.is_some_and(|check| check.at.duration_since(from).as_secs() >= 6) {
            break;
        }
        node.until_relisted().await;
    }
    assert_eq!(node.containers("web"), "main/0+", "{:#?}", node.events());
    drop(held);
}
