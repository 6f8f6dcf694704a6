use std::sync::Mutex;

use k8s_openapi::api::core::v1::{NodeCondition, NodeRuntimeHandler, NodeSystemInfo};

use super::*;
use crate::testing::Server;

const OWN: &str = "/api/v1/nodes/n1";

/// A machine whose readiness the test sets.
#[derive(Clone, Default)]
struct Machine {
    ready: Arc<Mutex<bool>>,
}

struct Kept {
    server: Server,
    node: watch::Receiver<Option<Arc<Node>>>,
    changes: watch::Sender<()>,
    machine: Machine,
    events: Recorder,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

fn start(server: &Server, register: bool) -> Kept {
    let (sender, node) = watch::channel(None);
    let (changes, changed) = watch::channel(());
    let machine = Machine::default();
    *machine.ready.lock().unwrap() = true;
    let (stop, events, told) = (CancellationToken::new(), Recorder::default(), machine.clone());
    let report = move || {
        let status = if *told.ready.lock().unwrap() { "True" } else { "False" };
        let ready = NodeCondition {
            type_: "Ready".to_owned(),
            status: status.to_owned(),
            ..NodeCondition::default()
        };
        let handler = NodeRuntimeHandler { name: Some("runc".to_owned()), ..NodeRuntimeHandler::default() };
        let info = NodeSystemInfo { boot_id: "now".to_owned(), ..NodeSystemInfo::default() };
        NodeReport {
            conditions: vec![ready],
            handlers: vec![handler],
            port: 10250,
            info,
            ..NodeReport::default()
        }
    };
    let inputs = Inputs {
        registration: Registration {
            name: "n1".to_owned(),
            hostname: "n1".to_owned(),
            ..Registration::default()
        },
        arch: "amd64".to_owned(),
        host: HostIps::fixed(vec![[10, 0, 0, 1].into()]),
        report: Arc::new(report),
        changes: changed,
        register,
        update: Duration::from_secs(10),
        report_every: Duration::from_secs(300),
        node: sender,
        events: events.clone(),
        metrics: Metrics::default(),
    };
    let task = tokio::spawn(keep(server.client(), inputs, stop.clone()));
    Kept { server: server.clone(), node, changes, machine, events, stop, task }
}

impl Kept {
    async fn until(&mut self, wanted: impl Fn(&Node) -> bool) -> Arc<Node> {
        let found = self.node.wait_for(|node| node.as_deref().is_some_and(&wanted)).await.unwrap();
        found.clone().unwrap()
    }

    async fn end(self) -> Vec<String> {
        self.stop.cancel();
        self.task.await.unwrap();
        self.server.requests()
    }
}

fn condition(node: &Node) -> &str {
    node.status.as_ref().unwrap().conditions.as_ref().unwrap()[0].status.as_str()
}

#[tokio::test(start_paused = true)]
async fn a_node_is_registered_with_its_status_in_one_write_and_then_rests() {
    let server = Server::default();
    let mut kept = start(&server, true);
    let node = kept.until(|_| true).await;
    assert_eq!(condition(&node), "True");
    sleep(Duration::from_secs(250)).await;
    let log = kept.events.subscribe();
    assert_eq!(log.borrow().all()[0].message, "Node n1 status is now: NodeReady");
    let requests = kept.end().await;
    assert_eq!(
        requests,
        [format!("GET {OWN}"), "POST /api/v1/nodes".to_owned(), "WATCH /api/v1/nodes".to_owned()]
    );
}

#[tokio::test(start_paused = true)]
async fn a_status_is_written_once_per_report_frequency_and_when_it_changed() {
    let server = Server::default();
    let mut kept = start(&server, true);
    kept.until(|_| true).await;
    let patch = format!("PATCH {OWN}/status");
    let patches = |server: &Server| server.requests().iter().filter(|request| **request == patch).count();
    sleep(Duration::from_secs(615)).await;
    assert_eq!(patches(&server), 2);
    *kept.machine.ready.lock().unwrap() = false;
    kept.changes.send_replace(());
    let began = Instant::now();
    kept.until(|node| condition(node) == "False").await;
    assert!(began.elapsed() <= Duration::from_secs(2), "{:?}", began.elapsed());
    kept.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_an_older_server_leaves_out_is_not_written_again_and_again() {
    let server = Server::default();
    server.forget("runtimeHandlers");
    let mut kept = start(&server, true);
    kept.until(|_| true).await;
    sleep(Duration::from_secs(200)).await;
    let patch = format!("PATCH {OWN}/status");
    let patches = |server: &Server| server.requests().iter().filter(|request| **request == patch).count();
    assert_eq!(patches(&server), 1);
    *kept.machine.ready.lock().unwrap() = false;
    kept.until(|node| condition(node) == "False").await;
    kept.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_existing_node_keeps_what_others_put_on_it() {
    let server = Server::default();
    server.set(
        OWN,
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "n1", "labels": { "kubernetes.io/arch": "arm64", "pool": "blue" } },
            "spec": { "unschedulable": true },
            "status": { "conditions": [{ "type": "NetworkUnavailable", "status": "False" }],
                        "capacity": { "example.com/dongle": "4" } }
        }),
    );
    let mut kept = start(&server, true);
    let labels = |node: &Node| node.metadata.labels.clone().unwrap_or_default();
    let node = kept.until(|node| labels(node).contains_key("kubernetes.io/os")).await;
    assert_eq!(
        (labels(&node)["kubernetes.io/arch"].as_str(), labels(&node)["pool"].as_str()),
        ("amd64", "blue")
    );
    assert_eq!(node.spec.as_ref().unwrap().unschedulable, Some(true));
    let status = node.status.as_ref().unwrap();
    assert_eq!(status.conditions.as_ref().unwrap().len(), 2);
    assert_eq!(status.allocatable.as_ref().unwrap()["example.com/dongle"].0, "4");
    assert_eq!(status.addresses.as_ref().unwrap().len(), 2);
    kept.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_cordon_its_end_and_a_reboot_are_events_of_the_node_each_once() {
    let server = Server::default();
    let node = |unschedulable: bool| {
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" },
            "spec": { "unschedulable": unschedulable }, "status": { "nodeInfo": { "bootID": "before" } }
        })
    };
    server.set(OWN, node(true));
    let mut kept = start(&server, true);
    let boot =
        |node: &Node| node.status.as_ref().and_then(|s| s.node_info.as_ref()).map(|i| i.boot_id.clone());
    kept.until(|node| boot(node).as_deref() == Some("now")).await;
    // Another client overwrites the agent's fields: no second reboot event.
    server.set(OWN, node(false));
    kept.until(|node| boot(node).as_deref() == Some("before")).await;
    kept.until(|node| boot(node).as_deref() == Some("now")).await;
    let log = kept.events.subscribe();
    let said: Vec<(String, String)> =
        log.borrow().all().iter().map(|event| (event.reason.clone(), event.message.clone())).collect();
    for (reason, message) in [
        ("NodeNotSchedulable", "Node n1 status is now: NodeNotSchedulable"),
        ("NodeSchedulable", "Node n1 status is now: NodeSchedulable"),
        ("Rebooted", "Node n1 has been rebooted, boot id: now"),
    ] {
        let same = said.iter().filter(|event| event.0 == reason && event.1 == message);
        assert_eq!(same.count(), 1, "{reason}: {said:?}");
    }
    assert!(log.borrow().all().iter().all(|event| event.count == 1), "{said:?}");
    kept.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_deleted_node_is_registered_again() {
    let server = Server::default();
    let mut kept = start(&server, true);
    let first = kept.until(|_| true).await.metadata.uid.clone();
    server.remove(OWN);
    kept.until(|node| node.metadata.uid != first).await;
    kept.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_may_not_register_waits_for_one_to_be_made() {
    let server = Server::default();
    let mut kept = start(&server, false);
    sleep(Duration::from_secs(30)).await;
    assert!(server.requests().iter().all(|request| *request == format!("GET {OWN}")));
    server.set(OWN, json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } }));
    kept.until(|node| node.status.as_ref().is_some_and(|status| status.conditions.is_some())).await;
    kept.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_is_asked_ever_less_often_and_found_again() {
    let server = Server::default();
    server.fail(true);
    let mut kept = start(&server, true);
    sleep(Duration::from_secs(600)).await;
    let asked = server.requests().len();
    assert!((60..150).contains(&asked), "{asked}");
    server.fail(false);
    kept.until(|_| true).await;
    kept.end().await;
}
