//! Tests of containers that end: restart policies, crash loops, sidecars.

use std::time::Duration;

use beelet_model::labels;
use beelet_tests::cri::{Asked, CHANGES, Op};
use serde_json::json;

use super::node::{Node, Settings, View, container, containers, of_everything, pod, with};

/// Makes the newest container of this name exit.
fn exit(node: &Node, pod: &str, container: &str, code: i32) {
    node.cri.exit(&node.cri.container(&format!("{pod}-n1"), container).unwrap().id, code);
}

async fn until_restarted(node: &Node, container: &str, count: i32) {
    node.until_pod("web", "to be restarted", |pod| {
        pod.restarts()[container] == count && pod.running(container)
    })
    .await;
}

#[tokio::test]
async fn a_container_that_crashes_again_backs_off_and_reports_it() {
    let settings = Settings { max_restart_delay: Duration::from_secs(4), ..Settings::default() };
    let two = with(pod("web"), "containers", json!([container("main"), container("neighbour")]));
    let node = Node::with_settings(settings, &[two]).await;
    let uid = node.until_ready("web").await.uid();
    exit(&node, "web", "main", 1);
    until_restarted(&node, "main", 1).await;
    exit(&node, "web", "main", 3);
    let pod = node.until_pod("web", "to back off", |pod| pod.waits_for("main", "CrashLoopBackOff")).await;
    let expected = format!("back-off 4s restarting failed container=main pod=web-n1_default({uid})");
    assert_eq!(pod.waiting("main").unwrap().1, expected);
    let main = pod.container("main");
    assert_eq!(main.last_state.unwrap().terminated.unwrap().exit_code, 3);
    assert!(!main.ready && !pod.ready() && pod.running("neighbour") && pod.phase() == "Running");
    until_restarted(&node, "main", 2).await;
    // Only the last dead container is kept, for `lastState`.
    let kept = |world: &beelet_tests::cri::World| containers(world, "web") == "main/1- main/2+ neighbour/0+";
    node.cri.wait_until("the removal of the first container", kept).await;
    // The runtime keeps the delay, so that the back-off survives a kill of the agent.
    let annotations = node.cri.container("web-n1", "main").unwrap().config.annotations;
    assert_eq!(annotations[labels::RESTART_DELAY], "4");
}

#[tokio::test]
async fn the_first_delay_is_the_kubelets() {
    let mut node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    exit(&node, "web", "main", 1);
    until_restarted(&node, "main", 1).await;
    exit(&node, "web", "main", 1);
    let is_waiting = |pod: &View| {
        pod.waiting("main").is_some_and(|(_, message)| message.starts_with("back-off 10s restarting"))
    };
    node.until_pod("web", "to back off", is_waiting).await;
    // A new agent continues the wait, and does not restart the container early.
    node.kill_and_start().await;
    until_restarted(&node, "main", 2).await;
    let containers = node.cri.world().containers;
    let attempt = |n| containers.values().find(|c| c.attempt() == n).unwrap();
    let waited = Duration::from_nanos((attempt(2).started_at - attempt(1).finished_at).try_into().unwrap());
    assert!(waited >= Duration::from_secs(10), "{waited:?}");
}

#[tokio::test]
async fn a_pod_ends_according_to_its_restart_policy() {
    let check = async |policy: &str, codes: &[i32], phase: &str, restarts: i32| {
        let node = Node::with(&[with(pod("web"), "restartPolicy", policy.into())]).await;
        node.until_ready("web").await;
        for (count, code) in (0..).zip(codes) {
            until_restarted(&node, "main", count).await;
            exit(&node, "web", "main", *code);
        }
        let mut node = node;
        let pod = node.until_pod("web", "to end", |pod| pod.phase() == phase).await;
        assert_eq!(pod.restarts()["main"], restarts, "{policy} {codes:?}");
        let state = pod.container("main").state.unwrap().terminated.unwrap();
        assert_eq!(Some(&state.exit_code), codes.last());
        let stopped = |world: &beelet_tests::cri::World| {
            world.sandboxes.values().all(|s| s.state == beelet_proto::cri::PodSandboxState::SandboxNotready)
        };
        node.cri.wait_until("the sandbox to stop", stopped).await;
        // The pod stays ended, also after a restart of the agent.
        node.until_relisted().await;
        let changes = node.done(&CHANGES);
        node.kill_and_start().await;
        node.until_relisted().await;
        node.until_pod("web", "to have ended", |pod| pod.phase() == phase).await;
        assert_eq!(node.done(&CHANGES), changes, "{policy} {codes:?}");
    };
    check("Never", &[0], "Succeeded", 0).await;
    check("Never", &[2], "Failed", 0).await;
    check("OnFailure", &[0], "Succeeded", 0).await;
    check("OnFailure", &[1, 0], "Succeeded", 1).await;
}

#[tokio::test]
async fn a_finished_pods_sidecar_is_stopped() {
    let node = Node::with(&[with(of_everything("web"), "restartPolicy", "Never".into())]).await;
    node.until_pod("web", "to run", |pod| pod.running("a") && pod.running("b")).await;
    exit(&node, "web", "a", 0);
    exit(&node, "web", "b", 0);
    node.until_pod("web", "to succeed", |pod| pod.phase() == "Succeeded" && !pod.running("side")).await;
    let side = node.cri.container("web-n1", "side").unwrap().id;
    let stops = node.cri.calls().into_iter().filter(|call| {
        matches!(&call.asked,
        Asked::StopContainer(request) if request.container_id == side && request.timeout == 7)
    });
    assert_eq!(stops.count(), 1, "{}", node.cri.transcript());
}

#[tokio::test]
async fn a_sidecar_that_crashes_is_restarted_while_the_others_run() {
    let node = Node::with(&[of_everything("web")]).await;
    node.until_ready("web").await;
    exit(&node, "web", "side", 1);
    until_restarted(&node, "side", 1).await;
    assert_eq!(node.containers("web"), "a/0+ b/0+ init/0- side/0- side/1+");
}

#[tokio::test]
async fn an_init_container_that_fails_holds_the_others_back() {
    let node = Node::with(&[]).await;
    node.cri.change(|world| world.ends_at_once.clear());
    node.apply(&of_everything("web"));
    node.until_pod("web", "to initialize", |pod| pod.running("init")).await;
    exit(&node, "web", "init", 1);
    until_restarted(&node, "init", 1).await;
    exit(&node, "web", "init", 1);
    let pod = node.until_pod("web", "to back off", |pod| pod.waits_for("init", "CrashLoopBackOff")).await;
    assert!(pod.waits_for("a", "PodInitializing") && pod.waits_for("side", "PodInitializing"));
    assert_eq!((pod.phase(), pod.ready()), ("Pending".to_owned(), false));
    assert_eq!(node.containers("web"), "init/0- init/1-");
    // With the restart policy Never, its failure fails the pod.
    node.apply(&with(of_everything("job"), "restartPolicy", "Never".into()));
    node.until_pod("job", "to initialize", |pod| pod.running("init")).await;
    exit(&node, "job", "init", 1);
    node.until_pod("job", "to fail", |pod| pod.phase() == "Failed").await;
    assert_eq!(node.containers("job"), "init/0-");
}

#[tokio::test]
async fn a_container_that_runs_out_of_memory_reports_it() {
    let node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    node.cri.kill_for_memory(&node.cri.container("web-n1", "main").unwrap().id);
    let pod = node.until_pod("web", "to run again", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    let ended = pod.container("main").last_state.unwrap().terminated.unwrap();
    assert_eq!((ended.exit_code, ended.reason.as_deref()), (137, Some("OOMKilled")));
    let reported =
        |event: &String| event.starts_with("OOMKilling: ") && event.contains("the runtime reports");
    assert!(node.events().iter().any(reported), "{:#?}", node.events());
}

#[tokio::test]
async fn a_dead_sandbox_is_replaced_and_restart_counts_continue() {
    let node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    node.cri.reboot();
    let pod = node.until_pod("web", "to run again", |pod| pod.restarts()["main"] == 1 && pod.ready()).await;
    assert_eq!(pod.container("main").last_state.unwrap().terminated.unwrap().exit_code, 255);
    assert_eq!(node.cri.count(Op::RunPodSandbox), 2);
    // The dead sandbox is stopped, which releases its address.
    assert_eq!(node.cri.count(Op::StopPodSandbox), 1, "{}", node.cri.transcript());
}

#[tokio::test]
async fn a_rule_restarts_all_containers_in_their_sandbox() {
    let mut pod = pod("web");
    pod["spec"]["restartPolicy"] = json!("Never");
    pod["spec"]["initContainers"] = json!([{"name": "init", "image": super::node::IMAGE}]);
    pod["spec"]["containers"][0]["restartPolicy"] = json!("Never");
    pod["spec"]["containers"][0]["restartPolicyRules"] =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let other = json!({"name": "other", "image": super::node::IMAGE});
    pod["spec"]["containers"].as_array_mut().unwrap().push(other);
    let mut node = Node::with(&[pod]).await;
    node.until_ready("web").await;
    let before = node.containers("web");
    assert_eq!(before, "init/0- main/0+ other/0+");
    // The agent is killed when the other containers are stopped, and none is started again.
    let held = node.cri.on(Op::CreateContainer).hold();
    node.cri.exit(&node.cri.container("web-n1", "main").unwrap().id, 42);
    held.reached().await;
    assert_eq!(node.containers("web"), "init/0- main/0- other/0-");
    node.kill().await;
    node.cri.heal();
    node.start().await;
    let all_again = |pod: &View| pod.ready() && pod.restarts().values().all(|count| *count == 1);
    let again = node.until_pod("web", "to run again as a whole", all_again).await;
    assert_eq!(again.phase(), "Running");
    assert_eq!(node.done(&[Op::RunPodSandbox]), 1);
}
