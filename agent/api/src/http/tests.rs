use std::collections::BTreeMap;

use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use beelet_model::table::{PodEntry, PodName};
use beelet_stats::metrics::{Containers, RUNQUEUE, RUNQUEUE_NATIVE};
use beelet_stats::model::{KernelCounters, RUNQ_BUCKETS};

struct Server {
    address: SocketAddr,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

async fn start(health: Result<(), String>) -> Server {
    let mut registry = Registry::default();
    let counter = Counter::<u64>::default();
    counter.inc();
    registry.register("beelet_test", "A counter", counter);
    start_with(health, registry, beelet_stats::channel().0).await
}

async fn start_with(health: Result<(), String>, registry: Registry, pressure: Pressure) -> Server {
    start_as(health, registry, pressure, false).await
}

async fn start_as(health: Result<(), String>, registry: Registry, pressure: Pressure, specs: bool) -> Server {
    let pod: Pod = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "web-node", "namespace": "default"},
        "status": {"phase": "Running"},
    }))
    .unwrap();
    let entry = PodEntry::of(pod);
    let pods = BTreeMap::from([(PodName::of(&entry.pod), Arc::new(entry))]);
    let (_, receiver) = watch::channel(Arc::new(PodTable { pods, ..Default::default() }));
    let state = ApiState {
        pods: receiver,
        registry: Arc::new(registry),
        pressure,
        specs,
        summary: true,
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

/// The waits of a container, by the kernel's buckets.
const WAITS: [u64; RUNQ_BUCKETS] = {
    let mut waits = [0; RUNQ_BUCKETS];
    let mut bucket = 0;
    // The last two are empty.
    while bucket < RUNQ_BUCKETS - 2 {
        waits[bucket] = 7 + (bucket as u64 * 13) % 11;
        bucket += 1;
    }
    waits
};

#[tokio::test]
async fn who_prefers_protobuf_gets_the_waits_as_a_native_histogram_with_the_classic_ones_counts() {
    let mut pressure = fixtures::pressure();
    pressure.by_kernel = true;
    let counters = &mut pressure.pods[0].containers[0].reading.as_mut().unwrap().counters;
    counters.kernel = Some(Box::new(KernelCounters {
        runq: WAITS,
        runq_wait_ns: 5_000_000_000,
        ..KernelCounters::default()
    }));
    let pressure = Pressure::fixed(pressure);
    let mut registry = Registry::default();
    let containers = Containers { pressure: pressure.clone(), pod_uid: false };
    registry.register_collector(Box::new(containers));
    let server = start_with(Ok(()), registry, pressure).await;

    let accept = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
    let request =
        format!("GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: {accept};q=0.6,text/plain;q=0.5\r\n\r\n");
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let head = String::from_utf8_lossy(&answer[..end]).to_lowercase();
    assert!(head.contains("content-type: application/vnd.google.protobuf; proto=io.prometheus"), "{head}");
    assert!(!head.contains("transfer-encoding"), "{head}");

    let families = protobuf::tests::decode(&answer[end + 4..]);
    let histogram = |name: &str| {
        let family = families.iter().find(|family| family.name() == name).unwrap();
        let labels: Vec<&str> =
            family.metric[0].label.iter().map(beelet_proto::prometheus::LabelPair::value).collect();
        assert_eq!(labels, ["shop", "web", "app"]);
        family.metric[0].histogram.clone().unwrap()
    };
    let (classic, native) = (histogram(RUNQUEUE.0), histogram(RUNQUEUE_NATIVE.0));
    assert_eq!((native.schema(), native.zero_threshold()), (0, 1024.0));
    assert_eq!((native.sample_count(), native.sample_sum()), (WAITS.iter().sum(), 5e9));
    assert_eq!(classic.sample_count(), native.sample_count());

    // How many waits are not above each bound, in nanoseconds.
    let mut cumulative = vec![(native.zero_threshold(), native.zero_count())];
    let (mut count, span) = (0_i64, &native.positive_span[0]);
    assert_eq!((native.positive_span.len(), span.length() as usize), (1, native.positive_delta.len()));
    for (index, delta) in (span.offset()..).zip(&native.positive_delta) {
        count += delta;
        let before = cumulative.last().unwrap().1;
        cumulative.push((2_f64.powi(index), before + u64::try_from(count).unwrap()));
    }
    assert_eq!(cumulative.last().unwrap().1, native.sample_count());
    let at = |bound: f64| cumulative.iter().find(|(upper, _)| (upper / 1e9 - bound).abs() < bound * 1e-9);
    let bounded: Vec<_> = classic
        .bucket
        .iter()
        .filter(|bucket| bucket.upper_bound() * 1e9 <= cumulative.last().unwrap().0)
        .collect();
    assert!(bounded.len() > 10, "{classic:#?}");
    for bucket in bounded {
        let (_, count) = at(bucket.upper_bound()).unwrap();
        assert_eq!(*count, bucket.cumulative_count(), "{}", bucket.upper_bound());
    }
}

#[tokio::test]
async fn the_last_bucket_of_waits_has_no_bound_in_text_either() {
    let mut pressure = fixtures::pressure();
    pressure.by_kernel = true;
    let counters = &mut pressure.pods[0].containers[0].reading.as_mut().unwrap().counters;
    counters.kernel = Some(Box::new(KernelCounters { runq: WAITS, ..KernelCounters::default() }));
    let pressure = Pressure::fixed(pressure);
    let mut registry = Registry::default();
    let containers = Containers { pressure: pressure.clone(), pod_uid: false };
    registry.register_collector(Box::new(containers));
    let (_, body) = start_with(Ok(()), registry, pressure).await.get("/metrics").await;
    let buckets: Vec<&str> = body
        .lines()
        .filter(|line| line.starts_with("beelet_container_runqueue_latency_seconds_bucket"))
        .collect();
    let total: u64 = WAITS.iter().sum();
    let last = buckets.last().unwrap();
    assert!(last.contains("le=\"+Inf\"") && last.ends_with(&format!(" {total}")), "{last}");
    assert_eq!(buckets.iter().filter(|line| line.contains("+Inf")).count(), 1, "{buckets:#?}");
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
async fn specs_are_for_root_unless_the_configuration_says_otherwise() {
    let server = start(Ok(())).await;
    let (head, body) = server.get("/pods").await;
    assert!(head.starts_with("http/1.1 403") && body.contains("beelet get pods -o json"), "{head}\n{body}");
    assert!(body.contains("unauthenticatedPods") && !body.contains("web-node"), "{body}");
    assert!(!server.get("/").await.1.contains("/pods"));
}

#[tokio::test]
async fn pods_are_a_pod_list_with_status_where_they_are_asked_for() {
    let server = start_as(Ok(()), Registry::default(), beelet_stats::channel().0, true).await;
    let (head, body) = server.get("/pods").await;
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
