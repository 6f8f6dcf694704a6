//! Tests of ephemeral containers, which an API server adds to running pods.

use beelet_proto::cri::NamespaceMode;
use beelet_tests::cri::{Asked, Op};
use serde_json::{Value, json};

use super::assigned::{UID, assigned, desired, node_with};
use super::node::{Node, View};

/// Adds an ephemeral container to a pod.
fn with_debugger(mut pod: Value) -> Value {
    pod["spec"]["ephemeralContainers"] =
        json!([{"name": "debug", "image": super::node::IMAGE, "targetContainerName": "main", "stdin": true}]);
    pod
}

fn once(mut pod: Value) -> Value {
    pod["spec"]["restartPolicy"] = json!("Never");
    pod
}

fn debugger(pod: &View) -> Option<k8s_openapi::api::core::v1::ContainerState> {
    let all = pod.0.pod.status.as_ref()?.ephemeral_container_statuses.as_ref()?;
    all.iter().find(|one| one.name == "debug")?.state.clone()
}

/// Makes a container of the pod exit.
fn end(node: &Node, container: &str, code: i32) {
    node.cri.exit(&node.cri.container("api-n1", container).unwrap().id, code);
}

async fn until_it_runs(node: &Node) -> View {
    let runs = |pod: &View| debugger(pod).is_some_and(|state| state.running.is_some());
    node.until_pod("api", "to have its debugger", runs).await
}

#[tokio::test]
async fn an_ephemeral_container_starts_in_a_running_pod_with_its_target() {
    let (node, source) = node_with(&[assigned(UID)]).await;
    let before = node.until_ready("api").await;
    source.send_replace(desired(&[with_debugger(assigned(UID))]));
    let pod = until_it_runs(&node).await;
    assert!(pod.ready());
    assert_eq!(node.containers("api"), "debug/0+ main/0+");
    let asked = node.cri.calls().into_iter().find_map(|call| match call.asked {
        Asked::CreateContainer(request) => {
            let config = request.config?;
            (config.metadata?.name == "debug").then_some(config.linux?.security_context?.namespace_options?)
        }
        _ => None,
    });
    let options = asked.unwrap();
    assert_eq!(
        (options.pid(), &options.target_id),
        (NamespaceMode::Target, &node.cri.container("api-n1", "main").unwrap().id)
    );
    assert_eq!(before.uid(), pod.uid());
}

#[tokio::test]
async fn an_ephemeral_container_that_ended_is_not_started_again_even_by_another_agent() {
    let (mut node, source) = node_with(&[assigned(UID)]).await;
    node.until_ready("api").await;
    source.send_replace(desired(&[with_debugger(assigned(UID))]));
    until_it_runs(&node).await;
    node.kill_and_start().await;
    until_it_runs(&node).await;
    assert_eq!((node.done(&[Op::CreateContainer]), node.done(&[Op::StopContainer])), (2, 0));
    end(&node, "debug", 3);
    let ended =
        |pod: &View| debugger(pod).and_then(|state| state.terminated).is_some_and(|end| end.exit_code == 3);
    let pod = node.until_pod("api", "to have an ended debugger", ended).await;
    assert!(pod.ready());
    node.kill_and_start().await;
    node.until_pod("api", "to be known again", ended).await;
    node.until_relisted().await;
    assert_eq!((node.containers("api").as_str(), node.done(&[Op::CreateContainer])), ("debug/0- main/0+", 2));
}

#[tokio::test]
async fn a_pod_ends_with_its_own_containers_despite_running_ephemeral_ones() {
    let (node, source) = node_with(&[once(assigned(UID))]).await;
    node.until_ready("api").await;
    source.send_replace(desired(&[once(with_debugger(assigned(UID)))]));
    until_it_runs(&node).await;
    end(&node, "main", 0);
    let over = |pod: &View| {
        pod.phase() == "Succeeded" && debugger(pod).is_some_and(|state| state.terminated.is_some())
    };
    node.until_pod("api", "to have ended", over).await;
}
