//! Tests of admission: refusals for lack of room, later admission, preemption for a critical pod.

use beelet_tests::cri::{Asked, Op};
use serde_json::{Value, json};

use super::node::{Node, View, container, pod, with};

fn wanting(name: &str, cpu: &str) -> Value {
    let mut main = container("main");
    main["resources"] = json!({ "requests": { "cpu": cpu } });
    with(pod(name), "containers", json!([main]))
}

fn critical(name: &str, cpu: &str) -> Value {
    with(wanting(name, cpu), "priorityClassName", json!("system-node-critical"))
}

fn status(pod: &View) -> (String, Option<String>) {
    let status = pod.0.pod.status.clone().unwrap();
    (status.phase.unwrap_or_default(), status.reason)
}

fn failed_with<'a>(reason: &'a str) -> impl Fn(&View) -> bool + 'a {
    move |pod| status(pod) == ("Failed".to_owned(), Some(reason.to_owned()))
}

#[tokio::test]
async fn a_pod_without_room_fails_with_the_reason_and_runs_once_there_is_room() {
    let mut node = Node::with(&[wanting("a", "3")]).await;
    node.until_ready("a").await;
    node.apply(&wanting("b", "2"));
    let b = node.until_pod("b", "to be refused", failed_with("OutOfcpu")).await;
    assert_eq!(
        b.0.pod.status.as_ref().unwrap().message.as_deref(),
        Some(
            "Pod was rejected: Node didn't have enough resource: cpu, requested: 2000, used: 3000, capacity: 4000"
        )
    );
    // The refused pod runs without another request.
    node.remove("a");
    node.until_ready("b").await;
    // A new agent keeps the refusal.
    node.apply(&wanting("c", "4"));
    node.until_pod("c", "to be refused", failed_with("OutOfcpu")).await;
    let record = node.path("state/pods.json");
    let written = || {
        let text = std::fs::read_to_string(&record).unwrap_or_default();
        if text.contains("OutOfcpu") { Ok(()) } else { Err("the record lacks the refusal") }
    };
    beelet_tests::workdir::wait_for("the record", beelet_tests::workdir::PATIENCE, written).unwrap();
    node.kill_and_start().await;
    node.until_pod("c", "to be refused again", failed_with("OutOfcpu")).await;
    node.until_ready("b").await;
    node.remove("b");
    node.until_ready("c").await;
}

#[tokio::test]
async fn a_new_pod_waits_for_the_room_of_a_pod_that_is_being_removed() {
    let node = Node::with(&[wanting("a", "3")]).await;
    node.until_ready("a").await;
    let held = node.cri.on(Op::StopContainer).hold();
    node.remove("a");
    held.reached().await;
    node.apply(&wanting("b", "3"));
    node.until_pod("b", "to be known", |pod| pod.phase() == "Pending").await;
    node.until_relisted().await;
    assert_eq!(node.cri.count(Op::RunPodSandbox), 1, "{}", node.cri.transcript());
    held.release();
    node.until_ready("b").await;
}

#[tokio::test]
async fn running_pods_survive_a_restart_that_would_not_admit_them_now() {
    let mut node = Node::with(&[wanting("a", "3")]).await;
    node.until_ready("a").await;
    // The new pod is added while the agent is away, and sorts before the old one.
    node.kill().await;
    for name in ["0", "1", "2"] {
        node.apply(&wanting(name, "3"));
    }
    node.start().await;
    for name in ["0", "1", "2"] {
        node.until_pod(name, "to be refused", failed_with("OutOfcpu")).await;
    }
    node.until_ready("a").await;
    assert_eq!(node.containers("a"), "main/0+");
}

#[tokio::test]
async fn a_critical_pod_preempts_others_and_a_victim_that_hangs_delays_no_other() {
    let node =
        Node::with(&[wanting("a", "1"), wanting("b", "1"), wanting("c", "1"), wanting("d", "1")]).await;
    for name in ["a", "b", "c", "d"] {
        node.until_ready(name).await;
    }
    // The stop of the first victim hangs.
    let held = node.cri.on(Op::StopContainer).hold();
    node.apply(&critical("crit", "2"));
    held.reached().await;
    let gone = |table: &beelet_model::table::PodTable| {
        let failed =
            |name: &&&str| super::node::view(table, name).is_some_and(|pod| failed_with("Preempting")(&pod));
        let names: Vec<&str> = ["a", "b", "c", "d"].iter().filter(failed).copied().collect();
        (!names.is_empty()).then_some(names)
    };
    // The other victim ends while the first still hangs.
    let first = node.until("a preempted victim", gone).await;
    assert_eq!(first.len(), 1);
    let victim = node.until_pod(first[0], "to exist", |_| true).await;
    let message = victim.0.pod.status.as_ref().unwrap().message.clone();
    assert_eq!(message.as_deref(), Some("Preempted in order to admit critical pod"));
    assert!(
        !node.cri.world().sandboxes.values().any(|s| s.pod_name() == "crit-n1"),
        "the critical pod has no room yet"
    );
    held.release();
    node.until_ready("crit").await;
    let stops = node
        .cri
        .calls()
        .iter()
        .filter(|call| matches!(&call.asked, Asked::StopContainer(r) if r.timeout == 7))
        .count();
    assert_eq!(stops, 2, "both victims get their own grace period: {}", node.cri.transcript());
    let ready = ["a", "b", "c", "d"]
        .iter()
        .filter(|name| super::node::view(&node.table(), name).is_some_and(|pod| pod.ready()));
    assert_eq!(ready.count(), 2);
}

#[tokio::test]
async fn a_refused_critical_pod_runs_once_it_has_room() {
    let node = Node::with(&[critical("one", "3")]).await;
    node.until_ready("one").await;
    node.apply(&critical("two", "3"));
    node.until_pod("two", "to be refused", failed_with("UnexpectedAdmissionError")).await;
    node.remove("one");
    node.until_ready("two").await;
    // Room that preemption can free counts, too.
    node.apply(&critical("three", "3"));
    node.until_pod("three", "to be refused", failed_with("UnexpectedAdmissionError")).await;
    node.remove("two");
    node.until_ready("three").await;
}

#[tokio::test]
async fn a_pod_whose_port_was_taken_runs_once_the_port_is_free() {
    let with_port = |name: &str| {
        let mut main = container("main");
        main["ports"] = json!([{"containerPort": 80, "hostPort": 8080}]);
        with(pod(name), "containers", json!([main]))
    };
    let node = Node::with(&[with(with_port("one"), "restartPolicy", json!("Never"))]).await;
    node.until_ready("one").await;
    node.apply(&with_port("two"));
    node.until_pod("two", "to be refused", failed_with("NodePorts")).await;
    // The pod ends by itself: its manifest stays.
    node.cri.exit(&node.cri.container("one-n1", "main").unwrap().id, 0);
    node.until_ready("two").await;
}

#[tokio::test]
async fn a_waiting_pod_that_requests_less_runs_at_once() {
    let node = Node::with(&[wanting("a", "3")]).await;
    node.until_ready("a").await;
    let held = node.cri.on(Op::StopContainer).hold();
    node.remove("a");
    held.reached().await;
    node.apply(&wanting("b", "3"));
    let b = node.until_pod("b", "to be known", |pod| pod.phase() == "Pending").await;
    node.until_relisted().await;
    assert_eq!(node.cri.count(Op::RunPodSandbox), 1, "{}", node.cri.transcript());
    node.apply(&wanting("b", "1"));
    let smaller = node.until_ready("b").await;
    assert_eq!(smaller.uid(), b.uid());
    held.release();
}

#[tokio::test]
async fn a_critical_pod_that_cannot_be_admitted_preempts_no_pod() {
    let node = Node::with(&[wanting("a", "1")]).await;
    node.until_ready("a").await;
    node.apply(&critical("crit", "5"));
    let crit = node.until_pod("crit", "to be refused", failed_with("UnexpectedAdmissionError")).await;
    assert!(crit.0.pod.status.as_ref().unwrap().message.as_ref().unwrap().contains("preemption"));
    node.until_ready("a").await;
    assert_eq!(node.cri.count(Op::StopContainer), 0);
}
