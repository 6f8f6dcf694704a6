//! Metrics of the durations of cgroup operations.

use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    operation_type: &'static str,
}

/// `kubelet_cgroup_manager_duration_seconds{operation_type}`.
#[derive(Debug, Clone)]
pub struct Metrics {
    duration: Family<Labels, Histogram, fn() -> Histogram>,
}

impl Default for Metrics {
    fn default() -> Self {
        // The kubelet's own buckets begin at 5 ms, where all of ours would fall into the first.
        let buckets = || Histogram::new([0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0]);
        Self { duration: Family::new_with_constructor(buckets) }
    }
}

impl Metrics {
    /// Adds the metrics to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_cgroup_manager_duration_seconds",
            "Duration in seconds of cgroup operations, by method",
            self.duration.clone(),
        );
    }

    pub(super) fn time<T>(&self, operation_type: &'static str, operation: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = operation();
        self.duration.get_or_create(&Labels { operation_type }).observe(start.elapsed().as_secs_f64());
        result
    }
}
