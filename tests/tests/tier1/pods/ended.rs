//! Tests of a pod's end: only after all of its containers have ended, sidecars included.

use beelet_model::request::{ProbeUpdate, Request};
use beelet_policy::probe::{ProbeKind, ProbeResult};
use beelet_tests::cri::Op;
use serde_json::{Value, json};

use super::{
    devices,
    node::{Node, View, container, pod, with},
};

/// Returns a pod that runs once, with this sidecar.
fn job(mut sidecar: Value) -> Value {
    sidecar["restartPolicy"] = json!("Always");
    let job = with(pod("job"), "restartPolicy", json!("Never"));
    with(job, "initContainers", json!([sidecar]))
}

/// Makes the pod's main container exit.
fn end(node: &Node, pod: &str, code: i32) {
    node.cri.exit(&node.cri.container(&format!("{pod}-n1"), "main").unwrap().id, code);
}

fn phase_is<'a>(phase: &'a str) -> impl Fn(&View) -> bool + 'a {
    move |pod| pod.phase() == phase
}

#[tokio::test]
async fn a_pod_keeps_its_devices_until_the_sidecar_that_has_them_ends() {
    let node = devices::node(300, &[]).await;
    let _plugin = devices::plugin(&node, &["--devices", "a"]);
    devices::until_capacity(&node, 1, 1).await;
    node.apply(&job(devices::wanting("side", 1)));
    node.until_ready("job").await;
    // The sidecar's stop hangs.
    let held = node.cri.on(Op::StopContainer).hold();
    end(&node, "job", 0);
    held.reached().await;
    node.apply(&devices::pod_wanting("other", 1));
    node.until_pod("other", "to be refused", devices::failed).await;
    let job = node.until_pod("job", "to exist", |_| true).await;
    assert_eq!((job.phase().as_str(), job.running("side")), ("Running", true));
    assert_eq!(devices::held(&node, &job).len(), 1);
    held.release();
    node.until_pod("job", "to have succeeded", phase_is("Succeeded")).await;
    // The refused pod gets the device, although the first pod's manifest still exists.
    node.until_ready("other").await;
}

#[tokio::test]
async fn a_pod_keeps_its_room_until_its_sidecar_ends() {
    let sized = |mut container: Value, cpu: &str| {
        container["resources"] = json!({"requests": {"cpu": cpu}});
        container
    };
    let node = Node::with(&[job(sized(container("side"), "3"))]).await;
    node.until_ready("job").await;
    let held = node.cri.on(Op::StopContainer).hold();
    end(&node, "job", 1);
    held.reached().await;
    node.apply(&with(pod("other"), "containers", json!([sized(container("main"), "3")])));
    let refused = |pod: &View| pod.0.refusal.is_some() && pod.phase() == "Failed";
    node.until_pod("other", "to be refused", refused).await;
    let job = node.until_pod("job", "to exist", |_| true).await;
    assert!(job.0.ended().is_none() && job.phase() == "Running", "{:?}", job.0.pod.status);
    held.release();
    let job = node.until_pod("job", "to have failed", phase_is("Failed")).await;
    assert!(job.0.ended().is_some(), "{:?}", job.0.pod.status);
    node.until_ready("other").await;
}

#[tokio::test]
async fn a_probe_failure_at_a_containers_own_end_does_not_restart_it() {
    let node = Node::with(&[with(pod("job"), "restartPolicy", json!("OnFailure"))]).await;
    let job = node.until_ready("job").await;
    let id = node.cri.container("job-n1", "main").unwrap().id;
    let failed = || {
        Request::Probe(ProbeUpdate {
            uid: job.uid(),
            container: "main".to_owned(),
            container_id: id.clone(),
            kind: ProbeKind::Liveness,
            result: ProbeResult::Failure,
            restart: true,
            kernel_ns: None,
        })
    };
    // The listener closes first, so the probe fails both before and after the runtime reports the end.
    node.cri.exit(&id, 0);
    node.request(failed()).await;
    node.until_pod("job", "to have succeeded", phase_is("Succeeded")).await;
    node.request(failed()).await;
    node.until_relisted().await;
    let job = node.until_pod("job", "to exist", |_| true).await;
    assert_eq!((job.phase().as_str(), job.restarts()["main"]), ("Succeeded", 0), "{:?}", job.0.pod.status);
    assert_eq!(node.containers("job"), "main/0-");
}

#[tokio::test]
async fn a_container_that_a_probe_has_stopped_restarts_after_any_exit_code() {
    let node = Node::with(&[with(pod("web"), "restartPolicy", json!("OnFailure"))]).await;
    let web = node.until_ready("web").await;
    let update = ProbeUpdate {
        uid: web.uid(),
        container: "main".to_owned(),
        container_id: node.cri.container("web-n1", "main").unwrap().id,
        kind: ProbeKind::Liveness,
        result: ProbeResult::Failure,
        restart: true,
        kernel_ns: None,
    };
    node.request(Request::Probe(update)).await;
    node.until_pod("web", "to be restarted", |pod| pod.restarts()["main"] == 1).await;
}
