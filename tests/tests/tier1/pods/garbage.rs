//! Tests of the garbage collection of dead containers, and of its side effects on pods.

use beelet_cri::Runtime;
use beelet_images::containers::{self, ContainerGc, ContainerGcRequest, Handle, Metrics, Parts};
use beelet_policy::images::containers::ContainerGcPolicy;
use beelet_state::events::{NodeEvents, Recorder};
use beelet_tests::cri::{Op, Outcome, PATIENCE};
use serde_json::json;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::node::{Node, pod, with};

/// Garbage collector with a limit of dead containers, and a period of its own collections.
struct Collector {
    gc: Handle,
    events: Recorder,
    shutdown: CancellationToken,
}

impl Collector {
    fn start(node: &Node, keep: i64, period: Duration) -> Collector {
        let events = Recorder::default();
        let (gc, handle) = ContainerGc::new(Parts {
            runtime: Runtime::new(&node.cri.endpoint(), Duration::from_secs(60)).unwrap(),
            table: node.watch(),
            policy: ContainerGcPolicy {
                min_age: Duration::ZERO,
                max_per_pod_container: keep,
                max_containers: -1,
            },
            period,
            pod_logs_dir: node.path("logs"),
            events: NodeEvents::new(events.clone(), "n1"),
            metrics: Metrics::default(),
        });
        let shutdown = CancellationToken::new();
        tokio::spawn(gc.run(shutdown.clone()));
        Collector { gc: handle, events, shutdown }
    }

    /// Starts a collector that collects only on request.
    fn on_request(node: &Node, keep: i64) -> Collector {
        Collector::start(node, keep, containers::PERIOD)
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// Makes the pod's container exit once, and waits until it runs again.
async fn restarted(node: &Node, name: &str) {
    let pod = node.until_ready(name).await;
    let id = node.cri.container(&pod.name(), "main").unwrap().id;
    node.cri.exit(&id, 1);
    node.until_pod(name, "to run again", |pod| pod.ready() && pod.restarts()["main"] == 1).await;
}

#[tokio::test]
async fn a_pod_that_has_ended_stays_so_when_its_containers_are_collected() {
    let mut node = Node::with(&[with(pod("job"), "restartPolicy", json!("Never")), pod("web")]).await;
    let web = node.until_ready("web").await;
    let job = node.until_ready("job").await;
    let id = node.cri.container(&job.name(), "main").unwrap().id;
    node.cri.exit(&id, 0);
    let done = node.until_pod("job", "to have succeeded", |pod| pod.phase() == "Succeeded").await;
    let collector = Collector::on_request(&node, 1);
    let gc = &collector.gc;
    let planned = gc.collect(ContainerGcRequest { terminated: true, dry_run: true }).await.unwrap();
    assert_eq!(planned.containers.len(), 1);
    assert_eq!(node.containers("job"), "main/0-", "a dry run removes nothing");
    // The sandbox of the ended pod is stopped by its worker, and removed too.
    let first = node.cri.calls().len();
    gc.collect(ContainerGcRequest { terminated: true, dry_run: false }).await.unwrap();
    assert_eq!(node.containers("job"), "");
    assert_eq!(node.containers("web"), "main/0+", "running containers stay");
    node.until_relisted().await;
    let started = || {
        node.cri
            .calls()
            .iter()
            .skip(first)
            .filter(|c| matches!(c.op(), Op::RunPodSandbox | Op::StartContainer))
            .count()
    };
    assert_eq!(started(), 0, "{}", node.cri.transcript());
    let status =
        |pod: &super::node::View| pod.container("main").state.unwrap().terminated.map(|end| end.exit_code);
    let still = node.until_pod("job", "to exist", |_| true).await;
    assert_eq!((still.phase(), status(&still)), ("Succeeded".to_owned(), status(&done)));
    // The same holds across a restart of the agent.
    node.kill_and_start().await;
    node.until_relisted().await;
    node.until_pod("job", "to have succeeded", |pod| pod.phase() == "Succeeded").await;
    node.until_ready("web").await;
    assert_eq!(node.containers("job"), "", "{}", node.cri.transcript());
    node.remove("job");
    node.until_gone("job").await;
    assert!(web.ready());
}

#[tokio::test]
async fn a_running_pod_keeps_as_many_dead_containers_as_configured() {
    let node = Node::with(&[pod("web")]).await;
    restarted(&node, "web").await;
    let all = ContainerGcRequest { terminated: true, dry_run: false };
    let collected = Collector::on_request(&node, 1).gc.collect(all).await.unwrap();
    assert_eq!((collected.containers.len(), collected.sandboxes.len()), (0, 0));
    assert_eq!(node.containers("web"), "main/0- main/1+");
    let collected = Collector::on_request(&node, 0).gc.collect(all).await.unwrap();
    assert_eq!((collected.containers.len(), collected.sandboxes.len()), (1, 0));
    assert_eq!(node.containers("web"), "main/1+");
}

#[tokio::test]
async fn a_failed_removal_is_reported_and_retried() {
    let node = Node::with(&[pod("web")]).await;
    restarted(&node, "web").await;
    node.cri.on(Op::RemoveContainer).always().fail(Code::Unknown, "the device is busy");
    let asked = Collector::on_request(&node, 0);
    let collected = asked.gc.collect(ContainerGcRequest::default()).await.unwrap();
    assert_eq!(collected.containers, []);
    assert!(
        collected.errors.len() == 1 && collected.errors[0].contains("the device is busy"),
        "{collected:?}"
    );
    assert_eq!(node.containers("web"), "main/0- main/1+");
    // A requester gets the error in its response; the collector's own failures are events.
    assert!(asked.events.subscribe().borrow().all().is_empty());
    let by_itself = Collector::start(&node, 0, Duration::from_millis(20));
    let mut log = by_itself.events.subscribe();
    let failed = log.wait_for(|log| {
        log.all().iter().any(|event| event.reason == "ContainerGCFailed" && event.message.contains("busy"))
    });
    tokio::time::timeout(PATIENCE, failed).await.unwrap().unwrap();
    node.cri.heal();
    node.cri.wait_until("the dead container's removal", |world| world.containers.len() == 1).await;
    assert_eq!(node.containers("web"), "main/1+");
}

#[tokio::test]
async fn at_most_eight_removals_run_at_a_time() {
    const PODS: usize = 12;
    let pods: Vec<_> =
        (0..PODS).map(|i| with(pod(&format!("job{i}")), "restartPolicy", json!("Never"))).collect();
    let node = Node::with(&pods).await;
    for i in 0..PODS {
        let job = node.until_ready(&format!("job{i}")).await;
        node.cri.exit(&node.cri.container(&job.name(), "main").unwrap().id, 0);
        node.until_pod(&format!("job{i}"), "to have succeeded", |pod| pod.phase() == "Succeeded").await;
    }
    let held = node.cri.on(Op::RemoveContainer).always().hold();
    let collector = Collector::on_request(&node, 1);
    let gc = collector.gc.clone();
    let collecting =
        tokio::spawn(
            async move { gc.collect(ContainerGcRequest { terminated: true, dry_run: false }).await },
        );
    let under_way = || {
        let calls = node.cri.calls();
        calls.iter().filter(|c| c.op() == Op::RemoveContainer && c.outcome == Outcome::Pending).count()
    };
    held.reached().await;
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while under_way() < 8 {
        assert!(tokio::time::Instant::now() < deadline, "only {} removals are running", under_way());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // During other calls to the runtime, no further removals start.
    node.until_relisted().await;
    node.until_relisted().await;
    assert_eq!(under_way(), 8);
    held.release();
    let collected = collecting.await.unwrap().unwrap();
    assert_eq!((collected.containers.len(), collected.errors.len()), (PODS, 0));
}
