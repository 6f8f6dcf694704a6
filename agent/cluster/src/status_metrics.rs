//! Duration of the writes of pods' statuses to the API server.

use std::time::Duration;

use prometheus_client::{metrics::histogram::Histogram, registry::Registry};

/// Upper bounds of the buckets in seconds: the kubelet's (`PodStatusSyncDuration`).
const SECONDS: [f64; 11] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];

/// Metrics of the writer of statuses. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics(Histogram);

impl Default for Metrics {
    fn default() -> Self {
        Self(Histogram::new(SECONDS))
    }
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Time from the first unwritten change of a pod's status until the API server has the status, in seconds";
        registry.register("kubelet_pod_status_sync_duration_seconds", help, self.0.clone());
    }

    /// Records that the API server has a status that had changed this long ago.
    pub(crate) fn written(&self, after: Duration) {
        self.0.observe(after.as_secs_f64());
    }
}
