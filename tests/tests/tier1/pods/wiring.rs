//! Tests of the connections between the agent's parts. Each part has its own tests.

use std::sync::Arc;
use std::time::Duration;

use beelet_client::Client;
use beelet_model::desired::Desired;
use beelet_model::table::PodName;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;

use super::node::{Node, Settings, View, pod};

/// Bytes of available memory below and above eviction's threshold of 100Mi.
const SHORT: u64 = 50 << 20;
const ENOUGH: u64 = 4 << 30;

fn conditions(node: &Node) -> Vec<(String, String)> {
    (node.handles().conditions)().into_iter().map(|one| (one.type_, one.status)).collect()
}

fn is_evicted(pod: &View) -> bool {
    let status = pod.0.pod.status.as_ref().unwrap();
    pod.phase() == "Failed" && status.reason.as_deref() == Some("Evicted")
}

#[tokio::test]
async fn a_node_short_of_memory_evicts_a_pod_which_runs_again_once_there_is_enough() {
    let settings = Settings { pressure_transition: Duration::from_secs(1), ..Settings::default() };
    let node = Node::with_settings(settings, &[pod("web")]).await;
    node.until_ready("web").await;
    node.set_memory_available(SHORT);
    node.until_pod("web", "to be evicted", is_evicted).await;
    assert!(conditions(&node).contains(&("MemoryPressure".to_owned(), "True".to_owned())));
    node.until_pod("web", "to have released everything", |pod| pod.0.cleared).await;
    assert_eq!(node.containers("web"), "");
    node.set_memory_available(ENOUGH);
    node.until_ready("web").await;
    assert!(conditions(&node).contains(&("MemoryPressure".to_owned(), "False".to_owned())));
}

/// Returns the desired state with one pod of a source other than the manifests: complete, with its identity.
fn wanted(name: &str) -> Arc<Desired> {
    let mut pod: Pod = serde_json::from_value(pod(name)).unwrap();
    pod.metadata.namespace = Some("default".to_owned());
    pod.metadata.name = Some(format!("{name}-n1"));
    pod.metadata.uid = Some("7d5f41d6-0000-4000-8000-000000000001".to_owned());
    pod.spec.as_mut().unwrap().node_name = Some("n1".to_owned());
    Arc::new(Desired { pods: [(PodName::of(&pod), Arc::new(pod))].into(), ..Desired::default() })
}

#[tokio::test]
async fn a_pod_of_another_source_runs_with_static_ones_and_ends_when_its_source_drops_it() {
    let (source, desired) = watch::channel(wanted("api"));
    let mut node = Node::new(Settings::default());
    node.sources.push(desired);
    node.apply(&pod("web"));
    node.start().await;
    node.until_ready("web").await;
    let api = node.until_ready("api").await;
    source.send_replace(Arc::default());
    node.until_nothing_is_left(&api).await;
    assert_eq!(node.containers("web"), "main/0+");
}

#[tokio::test]
async fn the_api_shows_and_reaches_every_part() {
    let node = Node::with(&[pod("web")]).await;
    node.until_ready("web").await;
    let mut client = Client::connect(&node.path("run/beelet.sock")).await.unwrap();
    let (table, _) = client.pods.list().await.unwrap();
    assert_eq!(table.pods.keys().map(ToString::to_string).collect::<Vec<_>>(), ["default/web-n1"]);
    let described = client.devices.node().await.unwrap();
    assert_eq!(described.capacity.get("cpu").map(String::as_str), Some("4"), "{described:?}");
    assert!(client.probes.list().await.unwrap().is_empty());
    assert!(client.devices.list().await.unwrap().resources.is_empty());
    client.tuner.status().await.unwrap();
    let planned = client.garbage.collect_images(false, true).await.unwrap();
    assert_eq!(planned.usage_percent, Some(50), "{planned:?}");
}
