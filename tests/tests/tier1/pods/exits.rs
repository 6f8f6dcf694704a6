//! Tests of the sources that report a container's end (the kernel, the runtime's events, relists): the agent
//! acts once, for any combination and number of reports.

use std::time::Duration;

use beelet_bpf::OomKill;
use beelet_pleg::ExitHint;
use beelet_tests::cri::{Asked, Container, Held, Op};
use serde_json::json;

use super::node::{Node, Settings, View, container, is_relist, pod, with};

const AT_ONCE: Settings = Settings {
    request_timeout: Duration::from_secs(120),
    max_restart_delay: Duration::ZERO,
    stop_pods_on_exit: false,
    plugin_wait: None,
    pressure_transition: Duration::from_secs(3600),
    static_pods: true,
    volume_check: Duration::from_secs(3600),
    topology: None,
    configure: |_| {},
};

fn main_of(node: &Node, pod: &str) -> Container {
    node.cri.container(&format!("{pod}-n1"), "main").unwrap()
}

/// Holds all further relists.
async fn without_relist(node: &Node) -> Held {
    let held = node.cri.on(Op::ListContainers).when(is_relist).always().hold();
    held.reached().await;
    held
}

fn exited(container: &Container) -> ExitHint {
    ExitHint::Exited { pid: container.pid, at_ns: 1 }
}

async fn until_restarted(node: &Node, count: i32) -> View {
    let restarted = |pod: &View| pod.restarts()["main"] == count && pod.running("main");
    node.until_pod("web", &format!("restart {count}"), restarted).await
}

/// Returns a predicate for status calls about this container.
fn asks_about(id: String) -> impl Fn(&beelet_tests::cri::Call) -> bool {
    move |call| matches!(&call.asked, Asked::ContainerStatus(request) if request.container_id == id)
}

#[tokio::test]
async fn only_the_runtimes_report_of_an_exit_restarts_a_container() {
    let node = Node::with_settings(AT_ONCE, &[pod("web")]).await;
    node.until_ready("web").await;
    let _held = without_relist(&node).await;
    let main = main_of(&node, "web");
    let before = node.cri.calls().len();
    node.signal(exited(&main)).await;
    // The runtime still reports the container as running, and the agent polls it.
    let mut from = before;
    for _ in 0..5 {
        from = node.cri.wait_for_after("a status call", from, asks_about(main.id.clone())).await.number + 1;
    }
    assert_eq!(node.cri.count(Op::CreateContainer), 1, "{}", node.cri.transcript());
    node.cri.exit(&main.id, 1);
    until_restarted(&node, 1).await;
    assert_eq!(node.cri.count(Op::CreateContainer), 2);
}

#[tokio::test]
async fn an_end_while_another_container_is_made_is_not_missed() {
    let two = with(pod("web"), "containers", json!([container("main"), container("other")]));
    let node = Node::with_settings(AT_ONCE, &[two]).await;
    node.until_ready("web").await;
    let _held = without_relist(&node).await;
    let container = |name: &str| node.cri.container("web-n1", name).unwrap();
    let (main, other) = (container("main"), container("other"));
    let created = node.cri.on(Op::CreateContainer).hold();
    node.signal(exited(&main)).await;
    node.cri.exit(&main.id, 1);
    created.reached().await;
    // The worker creates the next `main` while the runtime reports the end of `other`.
    let from = node.cri.calls().len();
    node.signal(exited(&other)).await;
    node.cri.exit(&other.id, 1);
    node.cri.wait_for_after("a status call", from, asks_about(other.id.clone())).await;
    created.release();
    let both =
        |pod: &View| ["main", "other"].iter().all(|name| pod.restarts()[*name] == 1 && pod.running(name));
    node.until_pod("web", "to have started both again", both).await;
}

#[tokio::test]
async fn the_runtimes_events_are_followed() {
    let mut node = Node::new(AT_ONCE);
    node.cri.change(|world| world.streams_events = true);
    node.apply(&pod("web"));
    node.start().await;
    node.until_ready("web").await;
    let _held = without_relist(&node).await;
    for round in 1..=5 {
        node.cri.exit(&main_of(&node, "web").id, 1);
        until_restarted(&node, round).await;
    }
    assert_eq!(node.cri.count(Op::CreateContainer), 6, "{}", node.cri.transcript());
    assert_eq!(node.cri.count(Op::GetContainerEvents), 1, "the agent must subscribe once");
}

#[tokio::test]
async fn a_broken_event_stream_is_requested_again() {
    let mut node = Node::new(AT_ONCE);
    node.cri.change(|world| world.streams_events = true);
    node.apply(&pod("web"));
    node.start().await;
    node.until_ready("web").await;
    let first = node.cri.calls().len();
    node.cri.restart();
    node.cri.wait_for_after("a new stream", first, |call| call.op() == Op::GetContainerEvents).await;
    node.cri.exit(&main_of(&node, "web").id, 1);
    until_restarted(&node, 1).await;
}

#[tokio::test]
async fn three_sources_at_once_never_restart_a_container_twice() {
    let mut node = Node::new(AT_ONCE);
    node.cri.change(|world| world.streams_events = true);
    node.apply(&pod("web"));
    node.start().await;
    node.until_ready("web").await;
    for round in 1..=30 {
        let main = main_of(&node, "web");
        node.signal(exited(&main)).await;
        node.cri.exit(&main.id, round);
        node.signal(ExitHint::Stopped { id: main.id.clone() }).await;
        node.signal(ExitHint::Lost).await;
        until_restarted(&node, round).await;
        node.signal(exited(&main)).await;
    }
    node.until_relisted().await;
    assert_eq!(node.cri.count(Op::CreateContainer), 31, "{}", node.cri.transcript());
    assert_eq!(node.containers("web"), "main/29- main/30+");
}

#[tokio::test]
async fn an_end_before_the_first_inspection_is_not_missed() {
    let node = Node::with_settings(AT_ONCE, &[]).await;
    // The worker's first inspection of the running container is delayed.
    let is_running = |asked: &Asked| matches!(asked, Asked::ContainerStatus(request) if request.verbose);
    let inspection = node.cri.on(Op::ContainerStatus).when(is_running).hold_reply();
    node.apply(&pod("web"));
    inspection.reached().await;
    let _held = without_relist(&node).await;
    let main = main_of(&node, "web");
    node.signal(exited(&main)).await;
    node.cri.exit(&main.id, 1);
    inspection.release();
    until_restarted(&node, 1).await;
}

#[tokio::test]
async fn containers_that_end_together_are_listed_together() {
    let names: Vec<String> = (0..12).map(|n| format!("web{n}")).collect();
    let pods: Vec<_> = names.iter().map(|name| pod(name)).collect();
    let node = Node::with_settings(AT_ONCE, &pods).await;
    for name in &names {
        node.until_ready(name).await;
    }
    let mains: Vec<Container> = names.iter().map(|name| main_of(&node, name)).collect();
    let before = node.cri.calls().len();
    for main in &mains {
        node.signal(exited(main)).await;
    }
    let listings = |from| node.cri.wait_for_after("a listing", from, |call| is_relist(&call.asked));
    let mut from = before;
    for _ in 0..3 {
        from = listings(from).await.number + 1;
    }
    for main in &mains {
        node.cri.exit(&main.id, 1);
    }
    for name in &names {
        let restarted = |pod: &View| pod.restarts()["main"] == 1 && pod.running("main");
        node.until_pod(name, "to be restarted", restarted).await;
    }
    assert_eq!(node.cri.count(Op::CreateContainer), 24);
}

#[tokio::test]
async fn an_oom_kill_is_reported_with_the_kernels_numbers_and_recorded() {
    let mut limited = container("main");
    limited["resources"] = json!({ "limits": { "memory": "64Mi" } });
    let web = with(with(pod("web"), "restartPolicy", "Never".into()), "containers", json!([limited]));
    let mut node = Node::with_settings(AT_ONCE, &[web]).await;
    node.until_ready("web").await;
    let main = main_of(&node, "web");
    let kill = OomKill { pid: main.pid, total_vm: 100 << 20, anon_rss: 63 << 20, ..OomKill::default() };
    node.signal(ExitHint::OomKilled { cgroup_id: 0, kill }).await;
    node.signal(exited(&main)).await;
    node.cri.exit(&main.id, 137);
    let reported = |pod: &View| {
        let ended = pod.container("main").state.and_then(|state| state.terminated);
        ended.is_some_and(|ended| {
            ended.reason.as_deref() == Some("OOMKilled")
                && ended
                    .message
                    .is_some_and(|m| m.contains("63 MiB of its own") && m.contains("limit is 64Mi"))
        })
    };
    let pod = node.until_pod("web", "to be OOMKilled", reported).await;
    assert_eq!(pod.phase(), "Failed");
    assert!(node.events().iter().any(|event| event.starts_with("OOMKilling: ")), "{:#?}", node.events());
    let record = node.path("state/pods.json");
    let written = || {
        let text = std::fs::read_to_string(&record).unwrap_or_default();
        if text.contains("anon_rss") { Ok(()) } else { Err("the record lacks the kill") }
    };
    beelet_tests::workdir::wait_for("the record", beelet_tests::workdir::PATIENCE, written).unwrap();
    node.kill_and_start().await;
    node.until_relisted().await;
    node.until_pod("web", "to be OOMKilled", reported).await;
}

#[tokio::test]
async fn repeated_kills_of_children_are_reported_once_and_the_container_runs_on() {
    let node = Node::with_settings(AT_ONCE, &[pod("web")]).await;
    node.until_ready("web").await;
    let main = main_of(&node, "web");
    // A container's children are in its cgroup. The fake runtime has no cgroups, so the first process stands
    // for them.
    for mib in 0..50_u64 {
        let kill = OomKill { pid: main.pid, anon_rss: mib << 20, ..OomKill::default() };
        node.signal(ExitHint::OomKilled { cgroup_id: 0, kill }).await;
    }
    node.signal(exited(&main)).await;
    node.cri.exit(&main.id, 137);
    until_restarted(&node, 1).await;
    let events: Vec<String> =
        node.events().into_iter().filter(|event| event.starts_with("OOMKilling: ")).collect();
    assert_eq!(events.len(), 1, "{events:#?}");
    assert!(events[0].contains(&format!("killed process {}", main.pid)), "{events:#?}");
}
