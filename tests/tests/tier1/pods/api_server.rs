//! Tests of pods from an API server that fails on demand: started, reported, deleted and mirrored despite
//! its faults.

use std::sync::Arc;

use beelet_cluster::autonomy::Settings as Autonomy;
use beelet_cluster::connect::connect;
use beelet_cluster::identity::{Metrics, Options};
use beelet_cluster::presence::Presence;
use beelet_cluster::rotation::Identity;
use beelet_cluster::workload::{Inputs, Workload};
use beelet_tests::apiserver::{FakeApi, Verb};
use beelet_tests::cri::Op;
use k8s_openapi::api::core::v1 as core;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::node::{Node, Settings, pod, until_file, until_seen};

const POD: &str = "/api/v1/namespaces/default/pods/api-n1";
const PODS: &str = "/api/v1/pods";
const STATUS: &str = "/api/v1/namespaces/*/pods/*/status";

/// Node with an API server, and the tasks that connect them.
struct Cluster {
    node: Node,
    api: FakeApi,
    stop: CancellationToken,
    working: JoinHandle<()>,
    _identity: Identity,
    _object: watch::Sender<Option<Arc<core::Node>>>,
}

impl Cluster {
    async fn start(api: FakeApi, manifests: &[Value]) -> Self {
        let mut node = Node::new(Settings::default());
        manifests.iter().for_each(|pod| node.apply(pod));
        let (workload, desired) = Workload::new();
        node.sources.push(desired);
        node.start().await;
        let kubeconfig = node.path("kubeconfig");
        std::fs::write(&kubeconfig, api.kubeconfig()).unwrap();
        let stop = CancellationToken::new();
        let presence = Presence::default();
        let options = Options {
            kubeconfig,
            bootstrap: None,
            cert_dir: node.path("pki"),
            node_name: "n1".to_owned(),
            rotate: false,
            metrics: Metrics::default(),
            requests: beelet_cluster::requests::Metrics::default(),
            presence: presence.clone(),
        };
        let (client, identity) = connect(options).await.unwrap();
        let object = json!({"metadata": {"name": "n1", "uid": "node-uid"}});
        let object: core::Node = serde_json::from_value(object).unwrap();
        let (object, node_object) = watch::channel(Some(Arc::new(object)));
        let handles = node.handles().clone();
        let inputs = Inputs {
            node_name: "n1".to_owned(),
            node: node_object,
            table: handles.services.table,
            requests: handles.requests,
            complete: handles.services.complete,
            events: handles.services.events,
            statuses: handles.services.metrics.cluster.statuses,
            mirrors: handles.services.metrics.cluster.mirrors,
            state: handles.services.state,
            autonomy: Autonomy {
                enabled: false,
                after: std::time::Duration::from_secs(30),
                key_file: None,
                stateful_sets: false,
            },
            presence,
            written: watch::Sender::new(None),
        };
        let client = std::future::ready(client);
        let working = tokio::spawn(workload.run(Box::pin(client), inputs, stop.clone()));
        Cluster { node, api, stop, working, _identity: identity, _object: object }
    }

    /// Waits until `wanted` accepts the API server's pod.
    async fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        self.api.wait_until(what, |api| api.get(POD).filter(&wanted)).await
    }

    async fn stop(self) {
        self.stop.cancel();
        self.working.await.unwrap();
    }
}

/// Returns a pod that the scheduler has bound to the node.
fn bound() -> Value {
    let mut pod = pod("api-n1");
    pod["metadata"]["namespace"] = json!("default");
    pod["spec"]["nodeName"] = json!("n1");
    pod["spec"]["restartPolicy"] = json!("Always");
    pod
}

fn with_pod() -> FakeApi {
    let api = FakeApi::start();
    api.put(POD, bound());
    api
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|c| c["type"] == "Ready" && c["status"] == "True"))
}

fn restarts(pod: &Value) -> i64 {
    pod["status"]["containerStatuses"][0]["restartCount"].as_i64().unwrap_or_default()
}

/// Makes the container exit; the agent restarts it.
fn end_container(node: &Node) {
    let id = node.cri.container("api-n1", "main").unwrap().id;
    node.cri.exit(&id, 1);
}

#[tokio::test]
async fn a_pod_is_run_reported_and_deleted_after_its_removal() {
    let cluster = Cluster::start(with_pod(), &[]).await;
    let ready = cluster.until("the pod to be ready", is_ready).await;
    assert_eq!(ready["status"]["phase"], "Running");
    let writes = cluster.api.count(Verb::Patch, STATUS);
    assert!(writes <= 4, "{}", cluster.api.transcript());
    cluster.api.delete(POD);
    cluster.api.wait_until("the pod's deletion", |api| api.get(POD).is_none().then_some(())).await;
    assert_eq!(cluster.node.containers("api"), "");
    let deletion = cluster.api.wait_for("its deletion", |asked| asked.is(Verb::Delete, POD)).await;
    assert_eq!(deletion.body["preconditions"]["uid"], ready["metadata"]["uid"]);
    assert_eq!(deletion.body["gracePeriodSeconds"], 0);
    // The last status was written before the deletion.
    let last = cluster.api.asked().into_iter().rfind(|asked| asked.verb == Verb::Patch).unwrap();
    assert_eq!(last.body["status"]["phase"], "Failed", "{}", cluster.api.transcript());
    cluster.stop().await;
}

#[tokio::test]
async fn changes_while_the_api_server_is_away_arrive_when_it_is_back() {
    let cluster = Cluster::start(with_pod(), &[]).await;
    cluster.until("the pod to be ready", is_ready).await;
    cluster.api.crash();
    end_container(&cluster.node);
    cluster.node.until_pod("api", "to run again", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    let first = cluster.api.asked().len();
    cluster.api.come_back();
    cluster.until("the restart", |pod| restarts(pod) == 1 && is_ready(pod)).await;
    // Only the latest status is written, not the ones between.
    let writes = cluster.api.asked()[first..].iter().filter(|asked| asked.verb == Verb::Patch).count();
    assert_eq!(writes, 1, "{}", cluster.api.transcript());
    cluster.stop().await;
}

#[tokio::test]
async fn a_status_arrives_despite_refusals_and_lost_replies() {
    let api = with_pod();
    api.on(Verb::Patch, STATUS).times(2).refuse(500, "etcd is away");
    api.on(Verb::Patch, STATUS).throttle(1);
    api.on(Verb::Patch, STATUS).refuse(409, "the object has been modified");
    api.on(Verb::Patch, STATUS).lose_reply();
    let cluster = Cluster::start(api, &[]).await;
    cluster.until("the pod to be ready", is_ready).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_list_that_is_empty_by_mistake_stops_no_pod() {
    let cluster = Cluster::start(with_pod(), &[]).await;
    cluster.until("the pod to be ready", is_ready).await;
    let first = cluster.api.asked().len();
    cluster.api.on(Verb::List, PODS).answer_empty_list();
    cluster.api.on(Verb::Watch, PODS).refuse(410, "too old resource version");
    cluster.api.break_watches(PODS);
    cluster
        .api
        .wait_for_after("a new watch", first, |asked| asked.is(Verb::Watch, PODS) && asked.succeeded())
        .await;
    // The agent watches only after a list that it accepts.
    end_container(&cluster.node);
    cluster.until("the restart", |pod| restarts(pod) == 1 && is_ready(pod)).await;
    assert_eq!(cluster.node.done(&[Op::StopContainer]), 0, "{}", cluster.api.transcript());
    assert!(cluster.node.events().iter().any(|event| event.starts_with("NoPodsAssigned")));
    cluster.stop().await;
}

#[tokio::test]
async fn a_watch_continues_after_noise_and_bookmarks_of_the_past() {
    let cluster = Cluster::start(with_pod(), &[]).await;
    cluster.until("the pod to be ready", is_ready).await;
    let past = json!({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1"}}});
    cluster.api.say(PODS, format!("{past}\n"));
    cluster.api.say(PODS, "{\"type\": \"MODIF");
    cluster.api.break_watches(PODS);
    cluster.api.delete(POD);
    cluster.api.wait_until("the pod's deletion", |api| api.get(POD).is_none().then_some(())).await;
    assert_eq!(cluster.api.count(Verb::List, PODS), 1, "{}", cluster.api.transcript());
    cluster.stop().await;
}

#[tokio::test]
async fn a_static_pods_mirror_is_restored_and_is_deleted_with_the_pod() {
    const MIRROR: &str = "/api/v1/namespaces/default/pods/web-n1";
    let mut web = pod("web");
    web["metadata"]["labels"] = json!({"tier": "a"});
    let cluster = Cluster::start(FakeApi::start(), &[web]).await;
    let ready = |api: &FakeApi| api.get(MIRROR).filter(is_ready);
    let mirror = cluster.api.wait_until("the mirror to be ready", ready).await;
    assert_eq!(mirror["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    assert_eq!(mirror["metadata"]["labels"]["tier"], "a");
    cluster.api.remove(MIRROR);
    let again = |api: &FakeApi| ready(api).filter(|new| new["metadata"]["uid"] != mirror["metadata"]["uid"]);
    cluster.api.wait_until("another mirror", again).await;
    assert_eq!(cluster.node.containers("web"), "main/0+");
    cluster.node.remove("web");
    cluster.api.wait_until("the mirror's deletion", |api| api.get(MIRROR).is_none().then_some(())).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_pod_waits_for_its_config_map_and_gets_its_changes() {
    const MAP: &str = "/api/v1/namespaces/default/configmaps/m";
    let api = FakeApi::start();
    let mut pod = bound();
    pod["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "m"}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/etc/app"}]);
    let uid = api.put(POD, pod)["metadata"]["uid"].as_str().unwrap().to_owned();
    let cluster = Cluster::start(api, &[]).await;
    let failed = |event: &String| {
        event.starts_with("FailedMount")
            && event.contains("SetUp failed for volume \"v\" : configmap \"m\" not found")
    };
    until_seen("the event", || cluster.node.events().iter().any(failed).then_some(()).ok_or("not yet")).await;
    cluster.api.put(MAP, json!({"data": {"a": "1"}}));
    cluster.until("the pod to be ready", is_ready).await;
    let file = cluster.node.path(&format!("pods/{uid}/volumes/v/a"));
    until_file(&file, "1").await;
    cluster.api.put(MAP, json!({"data": {"a": "2"}}));
    until_file(&file, "2").await;
    // A single watch delivers all changes.
    let asked = |verb| cluster.api.count(verb, "/api/v1/namespaces/default/configmaps");
    assert_eq!((asked(Verb::Watch), asked(Verb::List)), (1, 0), "{}", cluster.api.transcript());
    cluster.stop().await;
}

/// The kubelet stops a container and starts the next one in one step, and writes a status when it is done.
#[tokio::test]
async fn a_pod_stays_ready_in_the_api_while_a_container_is_replaced() {
    let cluster = Cluster::start(with_pod(), &[]).await;
    cluster.until("the pod to be ready", is_ready).await;
    let first = cluster.api.asked().len();
    let mut containers = bound()["spec"]["containers"].clone();
    cluster.node.cri.add_image("docker.io/library/app:2");
    containers[0]["image"] = json!("docker.io/library/app:2");
    cluster.api.patch(POD, &json!({"spec": {"containers": containers}}));
    cluster.until("the next container", |pod| restarts(pod) == 1 && is_ready(pod)).await;
    let unready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "False";
    for asked in cluster.api.asked().iter().skip(first).filter(|asked| asked.is(Verb::Patch, STATUS)) {
        let conditions = asked.body["status"]["conditions"].as_array();
        assert!(!conditions.is_some_and(|all| all.iter().any(unready)), "{}", cluster.api.transcript());
    }
    cluster.stop().await;
}

/// The API server's authorizer learns of a pod later than the node; a server may have KEP-3157 turned off.
#[tokio::test]
async fn a_config_map_is_read_despite_a_refusal_and_without_streamed_lists() {
    const MAPS: &str = "/api/v1/namespaces/default/configmaps";
    let api = FakeApi::start();
    api.put(&format!("{MAPS}/m"), json!({"data": {"a": "1"}}));
    api.on(Verb::Watch, MAPS).refuse(403, "no relationship found between node 'n1' and this object");
    api.on(Verb::Watch, MAPS).refuse(422, "sendInitialEvents: Forbidden: sendInitialEvents is forbidden");
    let mut pod = bound();
    pod["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "m"}}]);
    let uid = api.put(POD, pod)["metadata"]["uid"].as_str().unwrap().to_owned();
    let cluster = Cluster::start(api, &[]).await;
    cluster.until("the pod to be ready", is_ready).await;
    let file = cluster.node.path(&format!("pods/{uid}/volumes/v/a"));
    until_file(&file, "1").await;
    cluster.api.put(&format!("{MAPS}/m"), json!({"data": {"a": "2"}}));
    until_file(&file, "2").await;
    let asked = |verb| cluster.api.count(verb, MAPS);
    assert_eq!((asked(Verb::Watch), asked(Verb::List)), (3, 1), "{}", cluster.api.transcript());
    cluster.stop().await;
}

#[tokio::test]
async fn a_pod_waits_for_the_list_of_services_and_has_their_variables() {
    let api = FakeApi::start();
    api.put(
        "/api/v1/namespaces/default/services/db",
        json!({"spec": {"clusterIP": "10.0.0.9", "ports": [{"port": 5432}]}}),
    );
    api.put(POD, bound());
    let held = api.on(Verb::List, "/api/v1/services").hold();
    let cluster = Cluster::start(api, &[]).await;
    held.reached().await;
    cluster.until("the pod to be accepted", |pod| pod["status"]["phase"] == "Pending").await;
    assert_eq!(cluster.node.cri.count(Op::CreateContainer), 0);
    drop(held);
    cluster.until("the pod to be ready", is_ready).await;
    let made = cluster.node.cri.container("api-n1", "main").unwrap();
    assert_eq!(super::devices::env(&made.config, "DB_SERVICE_HOST").as_deref(), Some("10.0.0.9"));
    assert_eq!(super::devices::env(&made.config, "DB_PORT_5432_TCP_PORT").as_deref(), Some("5432"));
    cluster.stop().await;
}

#[tokio::test]
async fn a_pod_that_selects_another_node_is_refused_with_the_reason() {
    let api = FakeApi::start();
    let mut pod = bound();
    pod["spec"]["nodeSelector"] = json!({"zone": "a"});
    api.put(POD, pod);
    let cluster = Cluster::start(api, &[]).await;
    let refused = cluster.until("the pod to be refused", |pod| pod["status"]["phase"] == "Failed").await;
    assert_eq!(refused["status"]["reason"], "NodeAffinity");
    assert_eq!(cluster.node.cri.count(Op::RunPodSandbox), 0);
    cluster.stop().await;
}
