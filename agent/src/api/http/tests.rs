use std::collections::BTreeMap;

use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::pods::table::{PodEntry, PodName};

struct Server {
    address: SocketAddr,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

async fn start(health: Result<(), String>) -> Server {
    let pod: Pod = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "web-node", "namespace": "default"},
        "status": {"phase": "Running"},
    }))
    .unwrap();
    let entry = PodEntry { pod, readiness_edge: None, netns: None };
    let pods = BTreeMap::from([(PodName::of(&entry.pod), Arc::new(entry))]);
    let (_, receiver) = watch::channel(Arc::new(PodTable { pods, ..Default::default() }));
    let mut registry = Registry::default();
    let counter = Counter::<u64>::default();
    counter.inc();
    registry.register("beelet_test", "A counter", counter);
    let state = ApiState {
        pods: receiver,
        registry: Arc::new(registry),
        pressure: crate::pressure::channel().0,
        numbers_only: false,
        health: Arc::new(move || health.clone()),
    };
    let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
    let address = listener.local_addr().unwrap();
    let shutdown = CancellationToken::new();
    let task = tokio::spawn(serve(listener, state, shutdown.clone()));
    Server { address, shutdown, task }
}

impl Server {
    /// The whole answer: head and body.
    async fn get(&self, path: &str) -> (String, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_lowercase(), body.to_owned())
    }
}

#[tokio::test]
async fn health_is_ok_or_says_why_not() {
    let (head, body) = start(Ok(())).await.get("/healthz").await;
    assert!(head.starts_with("http/1.1 200"), "{head}");
    assert_eq!(body, "ok");
    let (head, body) =
        start(Err("the runtime has not answered for 3 minutes".into())).await.get("/healthz").await;
    assert!(head.starts_with("http/1.1 500"), "{head}");
    assert_eq!(body, "the runtime has not answered for 3 minutes\n");
}

#[tokio::test]
async fn metrics_are_openmetrics() {
    let (head, body) = start(Ok(())).await.get("/metrics").await;
    assert!(
        head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
        "{head}"
    );
    assert!(body.contains("beelet_test_total 1\n") && body.ends_with("# EOF\n"), "{body}");
}

#[tokio::test]
async fn before_anything_was_read_the_pages_of_numbers_say_so() {
    let server = start(Ok(())).await;
    let (head, body) = server.get("/metrics/resource").await;
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    assert!(body.ends_with("resource_scrape_error 1\n"), "{body}");
    assert!(server.get("/metrics/cadvisor").await.1.contains("machine_cpu_cores"));
    assert!(!server.get("/metrics/probes").await.1.contains("beelet_test"));
    assert!(server.get("/stats/summary").await.0.starts_with("http/1.1 503"));
}

#[tokio::test]
async fn pods_are_a_pod_list_with_status() {
    let (head, body) = start(Ok(())).await.get("/pods").await;
    assert!(head.contains("content-type: application/json"), "{head}");
    let list: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((&list["kind"], &list["apiVersion"]), (&"PodList".into(), &"v1".into()));
    assert_eq!(list["items"][0]["metadata"]["name"], "web-node");
    assert_eq!(list["items"][0]["status"]["phase"], "Running");
}

#[tokio::test]
async fn other_paths_and_methods_are_refused_and_the_index_helps() {
    let server = start(Ok(())).await;
    assert!(server.get("/").await.1.contains("/metrics/resource"));
    assert!(server.get("/secrets").await.0.starts_with("http/1.1 404"));
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(b"DELETE /pods HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
}

#[tokio::test]
async fn a_port_that_is_taken_is_an_error_that_says_what_to_do() {
    let server = start(Ok(())).await;
    let error = bind(server.address).await.unwrap_err().to_string();
    assert!(error.contains("healthzPort"), "{error}");
}

#[tokio::test]
async fn serving_ends_at_shutdown_although_a_client_is_silent() {
    let server = start(Ok(())).await;
    let _silent = TcpStream::connect(server.address).await.unwrap();
    server.get("/healthz").await;
    server.shutdown.cancel();
    tokio::time::timeout(Duration::from_secs(30), server.task).await.unwrap().unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}
