//! Metrics of the server, under the kubelet's names.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use beelet_policy::node::access::is_long_running;
use jiff::Timestamp;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder},
    metrics::{
        MetricType, TypedMetric, counter::Counter, family::Family, gauge::Gauge, histogram::Histogram,
    },
    registry::Registry,
};

/// Histogram buckets in seconds: apiserver's for the kubelet's server.
const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// Methods with a label value of their own.
const METHODS: [&str; 6] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"];

/// Labels of a request, as in the kubelet's metrics.
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

/// Expiry of the serving certificate, exported as the remaining time at scrape time.
#[derive(Clone, Debug)]
pub(crate) struct Expiry(Arc<AtomicI64>);

/// Value without a certificate.
const NONE: i64 = i64::MAX;

impl Default for Expiry {
    fn default() -> Self {
        Self(Arc::new(AtomicI64::new(NONE)))
    }
}

impl Expiry {
    /// Sets the expiry.
    pub(crate) fn set(&self, end: Option<Timestamp>) {
        self.0.store(end.map_or(NONE, Timestamp::as_second), Ordering::Relaxed);
    }

    fn left(&self, now: Timestamp) -> f64 {
        match self.0.load(Ordering::Relaxed) {
            NONE => f64::INFINITY,
            end => (end - now.as_second()) as f64,
        }
    }
}

impl TypedMetric for Expiry {
    const TYPE: MetricType = MetricType::Gauge;
}

impl EncodeMetric for Expiry {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_gauge(&self.left(Timestamp::now()))
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

/// Metrics of the server; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    requests: Family<RequestLabels, Counter>,
    durations: Family<RequestLabels, Histogram, fn() -> Histogram>,
    inflight: Family<RequestLabels, Gauge>,
    /// Connections closed before a request could be read: no TLS, too slow, too much data.
    pub(crate) failed_connections: Counter,
    pub(crate) expiry: Expiry,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: Family::default(),
            durations: Family::new_with_constructor(durations as fn() -> Histogram),
            inflight: Family::default(),
            failed_connections: Counter::default(),
            expiry: Expiry::default(),
        }
    }
}

impl Metrics {
    /// Registers all metrics.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_http_requests",
            "Requests to the node's HTTPS server",
            self.requests.clone(),
        );
        registry.register(
            "kubelet_http_requests_duration_seconds",
            "Response time of the node's HTTPS server",
            self.durations.clone(),
        );
        registry.register(
            "kubelet_http_inflight_requests",
            "Requests in flight at the node's HTTPS server",
            self.inflight.clone(),
        );
        registry.register(
            "beelet_server_failed_connections",
            "Failed connections to the node's HTTPS server: no TLS, too slow, broken",
            self.failed_connections.clone(),
        );
        registry.register(
            "kubelet_certificate_manager_server_ttl_seconds",
            "Seconds until the serving certificate expires; negative if expired, +Inf without a certificate",
            self.expiry.clone(),
        );
    }

    /// Counts a request as in flight until the value is dropped.
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

/// A request in flight.
pub(crate) struct UnderWay {
    inflight: Gauge,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.inflight.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_a_certificate_is_counted_to_its_end_and_beyond() {
        let (expiry, at) = (Expiry::default(), |second| Timestamp::from_second(second).unwrap());
        assert!(expiry.left(at(0)).is_infinite());
        expiry.set(Some(at(100)));
        assert_eq!((expiry.left(at(40)), expiry.left(at(130))), (60.0, -30.0));
    }
}
