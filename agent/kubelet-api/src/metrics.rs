//! What the server counts, by the kubelet's names.

use std::time::Duration;

use beelet_policy::node_access::is_long_running;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

/// Bounds of durations, in seconds: apiserver's for the kubelet's server.
const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// Methods that are counted by name.
const METHODS: [&str; 6] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"];

/// A request, as the kubelet's metrics tell requests apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabels {
    long_running: &'static str,
    method: &'static str,
    path: &'static str,
    server_type: &'static str,
}

impl RequestLabels {
    pub(crate) fn new(method: &str, page: &'static str) -> Self {
        Self {
            long_running: if is_long_running(page) { "true" } else { "false" },
            method: METHODS.iter().copied().find(|known| *known == method).unwrap_or("other"),
            path: page,
            server_type: "readwrite",
        }
    }
}

fn durations() -> Histogram {
    Histogram::new(BUCKETS)
}

/// Counters of the server; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    requests: Family<RequestLabels, Counter>,
    durations: Family<RequestLabels, Histogram, fn() -> Histogram>,
    inflight: Family<RequestLabels, Gauge>,
    /// Connections that were closed before a request could be read: no TLS, too slow, too much.
    pub(crate) failed_connections: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: Family::default(),
            durations: Family::new_with_constructor(durations as fn() -> Histogram),
            inflight: Family::default(),
            failed_connections: Counter::default(),
        }
    }
}

impl Metrics {
    /// Adds all of them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_http_requests",
            "Requests to the node's HTTPS server",
            self.requests.clone(),
        );
        registry.register(
            "kubelet_http_requests_duration_seconds",
            "Time that the node's HTTPS server took to answer",
            self.durations.clone(),
        );
        registry.register(
            "kubelet_http_inflight_requests",
            "Requests to the node's HTTPS server that are being answered",
            self.inflight.clone(),
        );
        registry.register(
            "beelet_server_failed_connections",
            "Connections to the node's HTTPS server that failed: no TLS, too slow, broken",
            self.failed_connections.clone(),
        );
    }

    /// A request begins; it ends when the value is dropped.
    pub(crate) fn begin(&self, labels: &RequestLabels) -> UnderWay {
        self.requests.get_or_create(labels).inc();
        let inflight = self.inflight.get_or_create_owned(labels);
        inflight.inc();
        UnderWay { inflight }
    }

    pub(crate) fn took(&self, labels: &RequestLabels, time: Duration) {
        self.durations.get_or_create(labels).observe(time.as_secs_f64());
    }
}

/// A request that is being answered.
pub(crate) struct UnderWay {
    inflight: Gauge,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.inflight.dec();
    }
}
