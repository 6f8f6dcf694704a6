//! Dead containers that are collected, and what must not come of it.

use beelet::events::{NodeEvents, Recorder};
use beelet::pods::garbage::{ContainerGc, Metrics, Parts, Wish};
use beelet::runtime::Runtime;
use beelet_policy::container_gc::ContainerGcPolicy;
use beelet_tests::cri::Op;
use serde_json::json;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

use crate::node::{Node, pod, with};

fn collector(node: &Node, shutdown: &CancellationToken) -> beelet::pods::garbage::Handle {
    let (gc, handle) = ContainerGc::new(Parts {
        runtime: Runtime::new(&node.cri.endpoint(), Duration::from_secs(60)).unwrap(),
        table: node.watch(),
        policy: ContainerGcPolicy { min_age: Duration::ZERO, max_per_pod_container: 1, max_containers: -1 },
        pod_logs_dir: node.path("logs"),
        events: NodeEvents::new(Recorder::default(), "n1"),
        metrics: Metrics::default(),
    });
    tokio::spawn(gc.run(shutdown.clone()));
    handle
}

#[tokio::test]
async fn a_pod_that_has_ended_stays_so_when_its_containers_are_collected() {
    let mut node = Node::with(&[with(pod("job"), "restartPolicy", json!("Never")), pod("web")]).await;
    let web = node.until_ready("web").await;
    let job = node.until_ready("job").await;
    let id = node.cri.container(&job.name(), "main").unwrap().id;
    node.cri.exit(&id, 0);
    let done = node.until_pod("job", "to have succeeded", |pod| pod.phase() == "Succeeded").await;
    let shutdown = CancellationToken::new();
    let gc = collector(&node, &shutdown);
    let planned = gc.collect(Wish { terminated: true, dry_run: true }).await.unwrap();
    assert_eq!(planned.containers.len(), 1);
    assert_eq!(node.containers("job"), "main/0-", "a dry run removes nothing");
    // The sandbox of the ended pod is stopped by its worker, and goes too.
    let first = node.cri.calls().len();
    gc.collect(Wish { terminated: true, dry_run: false }).await.unwrap();
    assert_eq!(node.containers("job"), "");
    assert_eq!(node.containers("web"), "main/0+", "what runs stays");
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
        |pod: &crate::node::View| pod.container("main").state.unwrap().terminated.map(|end| end.exit_code);
    let still = node.until_pod("job", "to be there", |_| true).await;
    assert_eq!((still.phase(), status(&still)), ("Succeeded".to_owned(), status(&done)));
    // And over a restart of the agent.
    node.kill_and_start().await;
    node.until_relisted().await;
    node.until_pod("job", "to have succeeded", |pod| pod.phase() == "Succeeded").await;
    node.until_ready("web").await;
    assert_eq!(node.containers("job"), "", "{}", node.cri.transcript());
    node.remove("job");
    node.until_gone("job").await;
    assert!(web.ready());
    shutdown.cancel();
}

#[tokio::test]
async fn the_newest_dead_container_of_a_running_pod_stays_and_a_failed_removal_is_said() {
    let node = Node::with(&[pod("web")]).await;
    let web = node.until_ready("web").await;
    let id = node.cri.container(&web.name(), "main").unwrap().id;
    node.cri.exit(&id, 1);
    node.until_pod("web", "to run again", |pod| pod.ready() && pod.restarts()["main"] == 1).await;
    let shutdown = CancellationToken::new();
    let gc = collector(&node, &shutdown);
    let collected = gc.collect(Wish { terminated: true, dry_run: false }).await.unwrap();
    assert_eq!((collected.containers.len(), collected.sandboxes.len()), (0, 0));
    assert_eq!(node.containers("web"), "main/0- main/1+");
    shutdown.cancel();
}
