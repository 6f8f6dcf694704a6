//! An agent that is the node of a fake cluster.

use std::path::Path;

use beelet_tests::agent::{NODE, Options};
use beelet_tests::apiserver::{Asked, FakeApi, Verb};
use beelet_tests::workdir;
use serde_json::{Value, json};

use crate::hostile::scene::Scene;

/// Path of the Nodes.
pub(crate) const NODES: &str = "/api/v1/nodes";
/// Path of the node's lease.
pub(crate) const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/testnode";

/// The agent, its runtime, and the API server, which is dropped last.
pub(crate) struct Member {
    pub(crate) scene: Scene,
    pub(crate) api: FakeApi,
}

impl Drop for Member {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.api.transcript());
        }
    }
}

/// Returns the path of the test's Node.
pub(crate) fn own_node() -> String {
    format!("{NODES}/{NODE}")
}

impl Member {
    /// Starts an agent as a node of the cluster of `api`.
    pub(crate) fn spawn(api: FakeApi, change: impl FnOnce(Options) -> Options) -> Member {
        let scene = Scene::spawn(|dir, options| change(joined(&api, dir, options)));
        Member { scene, api }
    }

    /// Starts an agent and waits until its Node is registered, or adopted, and ready.
    pub(crate) async fn start(api: FakeApi, change: impl FnOnce(Options) -> Options) -> Member {
        let member = Member::spawn(api, change);
        member.until_ready().await;
        member
    }

    /// Waits until the Node is ready.
    pub(crate) async fn until_ready(&self) -> Value {
        self.api
            .wait_until("the Node to be ready", |api| {
                api.get(&own_node()).filter(|node| status_of(node, "Ready").as_deref() == Some("True"))
            })
            .await
    }

    /// Waits for a successful request, from number `first` on.
    pub(crate) async fn until_done(&self, first: usize, verb: Verb, pattern: &str) -> Asked {
        let what = format!("{verb} {pattern}");
        self.api.wait_for_after(&what, first, |asked| asked.is(verb, pattern) && asked.succeeded()).await
    }
}

/// Returns the options of an agent that is a node of the cluster of `api`, with a lease of four seconds.
fn joined(api: &FakeApi, dir: &Path, mut options: Options) -> Options {
    let kubeconfig = dir.join("kubeconfig");
    workdir::write(&kubeconfig, api.kubeconfig()).unwrap();
    let arguments = ["--kubeconfig".to_owned(), kubeconfig.display().to_string()];
    options.arguments.extend(arguments);
    options.arguments.extend(["--node-ip".to_owned(), "192.0.2.7".to_owned()]);
    options.kubelet("nodeLeaseDurationSeconds", 4)
}

/// Returns the status of a condition.
pub(crate) fn status_of(object: &Value, kind: &str) -> Option<String> {
    let all = object["status"]["conditions"].as_array()?;
    let found = all.iter().find(|condition| condition["type"] == kind)?;
    found["status"].as_str().map(str::to_owned)
}

/// Returns a Node that exists before the agent.
pub(crate) fn node(metadata: &Value, status: &Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status })
}
