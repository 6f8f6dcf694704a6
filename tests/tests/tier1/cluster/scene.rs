//! An agent that is the node of a fake cluster.

use std::path::Path;

use beelet_tests::agent::{NODE, Options};
use beelet_tests::apiserver::{Asked, FakeApi, Verb};
use beelet_tests::workdir;
use serde_json::{Value, json};

use crate::hostile::scene::Scene;

/// Where Nodes are.
pub(crate) const NODES: &str = "/api/v1/nodes";
/// Where the node's lease is.
pub(crate) const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/testnode";

/// The agent, its runtime, and the API server, which goes last.
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

/// The path of the test's Node.
pub(crate) fn own_node() -> String {
    format!("{NODES}/{NODE}")
}

impl Member {
    /// An agent that was started as a node of the cluster of `api`.
    pub(crate) fn spawn(api: FakeApi, change: impl FnOnce(Options) -> Options) -> Member {
        let scene = Scene::spawn(|dir, options| change(joined(&api, dir, options)));
        Member { scene, api }
    }

    /// One whose Node is registered, or adopted, and ready.
    pub(crate) async fn start(api: FakeApi, change: impl FnOnce(Options) -> Options) -> Member {
        let member = Member::spawn(api, change);
        member.until_ready().await;
        member
    }

    /// Waits until the Node says that it is ready.
    pub(crate) async fn until_ready(&self) -> Value {
        self.api
            .wait_until("the Node to be ready", |api| {
                api.get(&own_node()).filter(|node| status_of(node, "Ready").as_deref() == Some("True"))
            })
            .await
    }

    /// Waits for such a request that was done, from number `first` on.
    pub(crate) async fn until_done(&self, first: usize, verb: Verb, pattern: &str) -> Asked {
        let what = format!("{verb} {pattern}");
        self.api.wait_for_after(&what, first, |asked| asked.is(verb, pattern) && asked.succeeded()).await
    }
}

/// The options of an agent that is a node of the cluster of `api`, with a lease of four seconds.
fn joined(api: &FakeApi, dir: &Path, mut options: Options) -> Options {
    let kubeconfig = dir.join("kubeconfig");
    workdir::write(&kubeconfig, api.kubeconfig()).unwrap();
    let arguments = ["--kubeconfig".to_owned(), kubeconfig.display().to_string()];
    options.arguments.extend(arguments);
    options.arguments.extend(["--node-ip".to_owned(), "192.0.2.7".to_owned()]);
    options.kubelet("nodeLeaseDurationSeconds", 4)
}

/// The status of a condition.
pub(crate) fn status_of(object: &Value, kind: &str) -> Option<String> {
    let all = object["status"]["conditions"].as_array()?;
    let found = all.iter().find(|condition| condition["type"] == kind)?;
    found["status"].as_str().map(str::to_owned)
}

/// A Node that is there before the agent.
pub(crate) fn node(metadata: &Value, status: &Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status })
}
