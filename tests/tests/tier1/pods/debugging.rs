//! Test of `beelet debug`: ephemeral containers of static pods, which live as long as their pod.

use beelet_client::Client;
use beelet_proto::{beelet as proto, cri::NamespaceMode};
use k8s_openapi::api::core::v1::ContainerState;
use serde_json::json;

use super::node::{IMAGE, Node, View, pod, with};

fn debugger(pod: &View) -> Option<ContainerState> {
    let all = pod.0.pod.status.as_ref()?.ephemeral_container_statuses.as_ref()?;
    all.iter().find(|one| one.name == "debugger")?.state.clone()
}

fn runs(pod: &View) -> bool {
    debugger(pod).is_some_and(|state| state.running.is_some())
}

async fn ask(node: &Node, container: &str) -> Result<proto::DebugResponse, String> {
    let mut client = Client::connect(&node.path("run/beelet.sock")).await.unwrap();
    let target = proto::ContainerTarget {
        pod: "web".to_owned(),
        container: container.to_owned(),
        ..Default::default()
    };
    let request = proto::DebugRequest {
        target: Some(target),
        image: IMAGE.to_owned(),
        stdin: true,
        ..Default::default()
    };
    client.containers.debug(request).await.map_err(|error| error.to_string())
}

#[tokio::test]
async fn a_debugger_is_added_to_a_running_pod_and_stays_with_it() {
    let mut node = Node::with(&[pod("web")]).await;
    let before = node.until_ready("web").await;
    assert!(ask(&node, "other").await.unwrap_err().contains("it has main"));
    assert_eq!(ask(&node, "main").await.unwrap().container, "debugger");
    let seen = node.until_pod("web", "to have its debugger", runs).await;
    assert!(seen.ready() && seen.uid() == before.uid());
    assert_eq!(node.containers("web"), "debugger/0+ main/0+");
    let config = node.cri.container("web-n1", "debugger").unwrap().config;
    assert!(config.stdin);
    let options = config.linux.unwrap().security_context.unwrap().namespace_options.unwrap();
    assert_eq!(options.pid(), NamespaceMode::Target);
    assert_eq!(options.target_id, node.cri.container("web-n1", "main").unwrap().id);
    // A new agent knows the debugger, and does not restart it after its end.
    node.kill_and_start().await;
    node.until_pod("web", "to be known again", runs).await;
    node.cri.exit(&node.cri.container("web-n1", "debugger").unwrap().id, 3);
    let ended = |pod: &View| {
        debugger(pod).and_then(|state| state.terminated).is_some_and(|ended| ended.exit_code == 3)
    };
    assert!(node.until_pod("web", "to have an ended debugger", ended).await.ready());
    assert_eq!(ask(&node, "").await.unwrap().container, "debugger-2");
    node.until_pod("web", "to have another debugger", |_| {
        node.containers("web") == "debugger-2/0+ debugger/0- main/0+"
    })
    .await;
    // Another pod of the same name has no debugger.
    node.apply(&with(pod("web"), "terminationGracePeriodSeconds", json!(1)));
    node.until_pod("web", "to be another", |pod| pod.uid() != before.uid() && pod.ready()).await;
    assert_eq!(node.containers("web"), "main/0+");
}
