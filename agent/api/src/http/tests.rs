use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use beelet_model::table::{PodEntry, PodName, Pods};
use beelet_stats::metrics::{Containers, RUNQUEUE};
use beelet_stats::model::{KernelCounters, WAIT_BUCKETS};

struct Server {
    address: SocketAddr,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

async fn start(ill: Option<&'static str>) -> Server {
    let mut registry = Registry::default();
    let counter = Counter::<u64>::default();
    counter.inc();
    registry.register("beelet_test", "A counter", counter);
    start_with(ill, registry, beelet_stats::channel().0).await
}

async fn start_with(ill: Option<&'static str>, registry: Registry, pressure: Stats) -> Server {
    start_as(ill, registry, pressure, false).await
}

async fn start_as(ill: Option<&'static str>, registry: Registry, pressure: Stats, specs: bool) -> Server {
    let pod: Pod = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "web-node", "namespace": "default"},
        "status": {"phase": "Running"},
    }))
    .unwrap();
    let entry = PodEntry::of(pod);
    let pods = Pods::unit(PodName::of(&entry.pod), Arc::new(entry));
    let (_, receiver) = watch::channel(Arc::new(PodTable { pods, ..Default::default() }));
    let state = ApiState {
        pods: receiver,
        registry: Arc::new(registry),
        pressure,
        specs,
        summary: true,
        health: Arc::new(move || ill.map(str::to_owned)),
        slis: slis::Slis::default(),
    };
    let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0)), "healthzPort").await.unwrap();
    let address = listener.address().unwrap();
    let shutdown = CancellationToken::new();
    let task = tokio::spawn(serve(listener, state, shutdown.clone()));
    Server { address, shutdown, task }
}

impl Server {
    /// Returns the whole answer: head and body.
    async fn get(&self, path: &str) -> (String, String) {
        self.get_as(path, "*/*").await
    }

    async fn get_as(&self, path: &str, accept: &str) -> (String, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_lowercase(), body.to_owned())
    }
}

#[tokio::test]
async fn health_is_ok_or_says_why_not() {
    let (head, body) = start(None).await.get("/healthz").await;
    assert!(head.starts_with("http/1.1 200"), "{head}");
    assert_eq!(body, "ok");
    let (head, body) = start(Some("the runtime has not answered for 3 minutes")).await.get("/healthz").await;
    assert!(head.starts_with("http/1.1 500"), "{head}");
    assert_eq!(body, "the runtime has not answered for 3 minutes\n");
}

#[tokio::test]
async fn connections_that_ask_for_nothing_keep_nobody_from_health() {
    let server = start(None).await;
    let mut silent = Vec::new();
    for _ in 0..ROOM.strangers + 100 {
        silent.push(TcpStream::connect(server.address).await.unwrap());
    }
    let (_, body) = server.get("/healthz").await;
    assert_eq!(body, "ok");
    let is_open = |stream: &TcpStream| {
        let read = stream.try_read(&mut [0]);
        matches!(read, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    };
    for stream in &mut silent {
        // A poll makes the runtime notice what the kernel knows of the stream.
        let _ = tokio::time::timeout(Duration::ZERO, stream.readable()).await;
    }
    tokio::task::yield_now().await;
    let open = silent.iter().filter(|stream| is_open(stream)).count();
    assert!(open <= ROOM.strangers, "{open} idle connections are kept");
    assert!(is_open(silent.last().unwrap()), "the newest stay");
}

#[tokio::test]
async fn metrics_are_text_and_openmetrics_for_who_asks_for_it() {
    let server = start(None).await;
    let (head, body) = server.get("/metrics").await;
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    assert!(body.contains("# TYPE beelet_test_total counter\nbeelet_test_total 1\n"), "{body}");
    let (head, body) = server.get_as("/metrics", "application/openmetrics-text").await;
    assert!(
        head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
        "{head}"
    );
    assert!(body.contains("beelet_test_total 1\n") && body.ends_with("# EOF\n"), "{body}");
}

/// Waits of a container by the kernel's buckets.
const WAITS: [u64; WAIT_BUCKETS] = {
    let mut waits = [0; WAIT_BUCKETS];
    let mut bucket = 0;
    // The last two buckets are empty.
    while bucket < WAIT_BUCKETS - 2 {
        waits[bucket] = 7 + (bucket as u64 * 13) % 11;
        bucket += 1;
    }
    waits
};

/// Returns the samples of a family: labels and value.
fn samples<'b>(body: &'b str, name: &str) -> Vec<(&'b str, f64)> {
    let of = |line: &'b str| {
        let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.split_once("} ")?;
        Some((labels, value.parse().ok()?))
    };
    body.lines().filter_map(of).collect()
}

#[tokio::test]
async fn waits_are_a_histogram_of_the_kernels_buckets_whose_last_has_no_bound() {
    let mut pressure = fixtures::pressure();
    pressure.by_kernel = true;
    let counters = &mut pressure.pods[0].containers[0].reading.as_mut().unwrap().counters;
    counters.kernel = Some(Box::new(KernelCounters {
        run_queue_waits: WAITS,
        run_queue_wait_ns: 5_000_000_000,
        ..KernelCounters::default()
    }));
    let pressure = Stats::fixed(pressure);
    let mut registry = Registry::default();
    let containers = Containers { pressure: pressure.clone(), pod_uid: false };
    registry.register_collector(Box::new(containers));
    let (_, body) = start_with(None, registry, pressure).await.get("/metrics").await;
    let of = |suffix: &str| samples(&body, &format!("{}{suffix}", RUNQUEUE.0));
    let labels = r#"namespace="shop",pod="web",container="app""#;
    let total: u64 = WAITS.iter().sum();
    assert_eq!(of("_sum"), [(labels, 5.0)]);
    assert_eq!(of("_count"), [(labels, total as f64)]);

    let buckets = of("_bucket");
    let bound = |labels: &str| labels.split("le=\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let (last, bounded) = buckets.split_last().unwrap();
    assert_eq!((bound(last.0).as_str(), last.1), ("+Inf", total as f64));
    assert!(bounded.len() > 10, "{buckets:#?}");
    // The kernel's first bucket ends at 2^10 ns, each following one at twice the previous.
    for (labels, count) in bounded {
        let bound: f64 = bound(labels).parse().unwrap();
        let below =
            |bucket: usize| 2_f64.powi(10 + i32::try_from(bucket).unwrap()) <= bound * 1e9 * 1.000_001;
        let expected: u64 =
            (0..WAIT_BUCKETS).filter(|bucket| below(*bucket)).map(|bucket| WAITS[bucket]).sum();
        assert_eq!(*count, expected as f64, "{bound}");
    }
}

#[tokio::test]
async fn before_anything_was_read_the_pages_of_numbers_say_so() {
    let server = start(None).await;
    let (head, body) = server.get("/metrics/resource").await;
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    assert!(body.ends_with("resource_scrape_error 1\n"), "{body}");
    assert!(server.get("/metrics/cadvisor").await.1.contains("machine_cpu_cores"));
    assert!(!server.get("/metrics/probes").await.1.contains("beelet_test"));
    assert!(server.get("/stats/summary").await.0.starts_with("http/1.1 503"));
}

#[tokio::test]
async fn specs_are_for_root_unless_the_configuration_says_otherwise() {
    let server = start(None).await;
    let (head, body) = server.get("/pods").await;
    assert!(head.starts_with("http/1.1 403") && body.contains("beelet get pods -o json"), "{head}\n{body}");
    assert!(body.contains("unauthenticatedPods") && !body.contains("web-node"), "{body}");
    assert!(!server.get("/").await.1.contains("/pods"));
}

#[tokio::test]
async fn pods_are_a_pod_list_with_status_where_they_are_asked_for() {
    let server = start_as(None, Registry::default(), beelet_stats::channel().0, true).await;
    let (head, body) = server.get("/pods").await;
    assert!(head.contains("content-type: application/json"), "{head}");
    let list: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((&list["kind"], &list["apiVersion"]), (&"PodList".into(), &"v1".into()));
    assert_eq!(list["items"][0]["metadata"]["name"], "web-node");
    assert_eq!(list["items"][0]["status"]["phase"], "Running");
}

#[tokio::test]
async fn other_paths_and_methods_are_refused_and_the_index_helps() {
    let server = start(None).await;
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
    let server = start(None).await;
    let error = bind(server.address, "healthzPort").await.unwrap_err().to_string();
    assert!(error.contains("healthzPort"), "{error}");
}

#[tokio::test]
async fn serving_ends_at_shutdown_although_a_client_is_silent() {
    let server = start(None).await;
    let _silent = TcpStream::connect(server.address).await.unwrap();
    server.get("/healthz").await;
    server.shutdown.cancel();
    tokio::time::timeout(Duration::from_secs(30), server.task).await.unwrap().unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}
