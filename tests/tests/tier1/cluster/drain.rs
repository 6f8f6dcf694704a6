//! Tests of `beelet drain`, `cordon` and `uncordon`: the commands, and a fake API server.

use std::process::{Child, Command, Output, Stdio};

use beelet_tests::agent::binary;
use beelet_tests::apiserver::{FakeApi, Verb};
use beelet_tests::workdir;
use serde_json::{Value, json};

const NODE: &str = "/api/v1/nodes/w1";
const EVICTIONS: &str = "/api/v1/namespaces/*/pods/*/eviction";

/// A cluster with one node, and the folder of its kubeconfig.
struct Drained {
    api: FakeApi,
    dir: tempfile::TempDir,
}

impl Drained {
    fn new() -> Self {
        let (api, dir) = (FakeApi::start(), tempfile::tempdir().unwrap());
        workdir::write(&dir.path().join("kubeconfig"), api.kubeconfig()).unwrap();
        api.put(NODE, json!({ "metadata": { "name": "w1" }, "spec": {} }));
        Self { api, dir }
    }

    /// Adds a pod on the node, with a controller of this kind.
    fn pod(&self, name: &str, controller: Option<&str>) {
        let owners = controller.map(|kind| {
            json!([{ "apiVersion": "apps/v1", "kind": kind, "name": "owner", "uid": "owner", "controller": true }])
        });
        let pod = json!({
            "metadata": { "name": name, "namespace": "shop", "ownerReferences": owners },
            "spec": { "nodeName": "w1", "containers": [{ "name": "c", "image": "app" }] },
            "status": { "phase": "Running" },
        });
        self.api.put(&path(name), pod);
    }

    fn start(&self, arguments: &[&str]) -> Child {
        let mut command = Command::new(binary().unwrap());
        command.args(arguments).arg("--kubeconfig").arg(self.dir.path().join("kubeconfig"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    async fn run(&self, arguments: &[&str]) -> (bool, String) {
        ended(self.start(arguments)).await
    }

    fn is_cordoned(&self) -> bool {
        self.api.get(NODE).unwrap()["spec"]["unschedulable"] == Value::Bool(true)
    }

    fn evictions(&self) -> usize {
        self.api.count(Verb::Create, EVICTIONS)
    }
}

fn path(name: &str) -> String {
    format!("/api/v1/namespaces/shop/pods/{name}")
}

/// Returns true if the command succeeded, and what it wrote.
async fn ended(child: Child) -> (bool, String) {
    let waiting = tokio::task::spawn_blocking(|| child.wait_with_output());
    let Output { status, stdout, stderr } = waiting.await.unwrap().unwrap();
    (status.success(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

#[tokio::test]
async fn a_drain_waits_for_a_budget_and_ends_with_the_last_pod() {
    let cluster = Drained::new();
    cluster.pod("web", Some("ReplicaSet"));
    cluster.pod("job", Some("Job"));
    cluster.pod("agent", Some("DaemonSet"));
    let mirror = json!({ "metadata": { "annotations": { "kubernetes.io/config.mirror": "x" } } });
    cluster.pod("static-w1", None);
    cluster.api.patch(&path("static-w1"), &mirror);
    let eviction = format!("{}/eviction", path("web"));
    let budget = "Cannot evict pod as it would violate the pod's disruption budget.";
    cluster.api.on(Verb::Create, &eviction).refuse(429, budget);
    let draining = cluster.start(&["drain", "w1", "--timeout=5m"]);
    let asked = cluster
        .api
        .wait_for("the eviction that the budget permits", |asked| {
            asked.is(Verb::Create, &eviction) && asked.succeeded()
        })
        .await;
    assert_eq!(asked.body["apiVersion"], "policy/v1");
    assert!(asked.body["deleteOptions"]["preconditions"]["uid"].is_string(), "{}", asked.body);
    assert!(cluster.is_cordoned());
    // The node's agent terminates the pods.
    for pod in ["job", "web"] {
        assert!(cluster.api.get(&path(pod)).unwrap()["metadata"]["deletionTimestamp"].is_string(), "{pod}");
        cluster.api.remove(&path(pod));
    }
    let (drained, output) = ended(draining).await;
    assert!(drained, "{output}");
    for line in [
        "node/w1 cordoned",
        "pod shop/agent stays: a DaemonSet manages it",
        "pod shop/static-w1 stays: the node's manifests own static pods",
        "evicting pod shop/job",
        &format!("pod shop/web is not evicted yet: {budget}"),
        "evicting pod shop/web",
        "pod shop/web has left",
        "node/w1 drained",
    ] {
        assert!(output.lines().any(|one| one == line), "{line}: {output}");
    }
    assert_eq!(cluster.evictions(), 3, "{}", cluster.api.transcript());
}

#[tokio::test]
async fn a_pod_that_would_not_return_forbids_the_drain_unless_it_is_forced() {
    let cluster = Drained::new();
    cluster.pod("web", Some("ReplicaSet"));
    cluster.pod("bare", None);
    let (drained, output) = cluster.run(&["drain", "w1"]).await;
    assert!(!drained && output.contains("shop/bare (no controller would create it again"), "{output}");
    assert!(cluster.is_cordoned() && cluster.evictions() == 0);
    let (possible, output) = cluster.run(&["drain", "w1", "--force", "--dry-run"]).await;
    assert!(possible && output.contains("node/w1 can be drained"), "{output}");
    assert_eq!(cluster.evictions(), 0);
    // Only the selected pods leave.
    cluster.api.patch(&path("web"), &json!({ "metadata": { "labels": { "app": "web" } } }));
    let draining = cluster.start(&["drain", "w1", "--pod-selector=app=web", "--grace-period=7"]);
    let evicted = cluster.api.wait_for("an eviction", |asked| asked.is(Verb::Create, EVICTIONS)).await;
    assert_eq!(evicted.body["deleteOptions"]["gracePeriodSeconds"], 7);
    cluster
        .api
        .wait_until("the pod to terminate", |api| {
            api.get(&path("web"))?["metadata"]["deletionTimestamp"].is_string().then_some(())
        })
        .await;
    cluster.api.remove(&path("web"));
    let (drained, output) = ended(draining).await;
    assert!(drained, "{output}");
    assert!(cluster.api.get(&path("bare")).is_some());
}

#[tokio::test]
async fn a_drain_that_takes_too_long_names_the_pods_and_the_reason() {
    let cluster = Drained::new();
    cluster.pod("web", Some("ReplicaSet"));
    cluster.api.on(Verb::Create, EVICTIONS).always().refuse(429, "the budget needs 1 healthy pod");
    let (drained, output) = cluster.run(&["drain", "w1", "--timeout=1s"]).await;
    assert!(!drained, "{output}");
    let end = "not drained after 1 s; still there: shop/web (the budget needs 1 healthy pod)";
    assert!(output.contains(end), "{output}");
}

#[tokio::test]
async fn a_node_is_cordoned_and_uncordoned_once() {
    let cluster = Drained::new();
    for (command, output, cordoned) in [
        ("cordon", "node/w1 cordoned", true),
        ("cordon", "node/w1 already cordoned", true),
        ("uncordon", "node/w1 uncordoned", false),
        ("uncordon", "node/w1 already uncordoned", false),
    ] {
        let (done, said) = cluster.run(&[command, "w1"]).await;
        assert!(done && said.trim() == output, "{command}: {said}");
        assert_eq!(cluster.is_cordoned(), cordoned);
    }
    assert_eq!(cluster.api.count(Verb::Patch, NODE), 2);
    let (done, said) = cluster.run(&["cordon", "w2"]).await;
    assert!(!done && said.contains("404"), "{said}");
}
