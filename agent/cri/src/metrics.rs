//! The metrics of calls to the runtime: their number, their failures and their duration. They have the
//! kubelet's own metric names, so existing dashboards keep working.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use super::operation::Operation;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    operation_type: Operation,
}

/// The counters of one [`super::Runtime`]; clones count together.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    operations: Family<Labels, Counter>,
    errors: Family<Labels, Counter>,
    duration: Family<Labels, Histogram>,
}

impl Metrics {
    pub(super) fn new() -> Self {
        Metrics {
            operations: Family::default(),
            errors: Family::default(),
            // The kubelet's buckets: 5 ms and 13 more, each 2.5 times as long (pkg/kubelet/metrics).
            duration: Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.005, 2.5, 14))),
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_runtime_operations",
            "Calls to the container runtime, by operation",
            self.operations.clone(),
        );
        registry.register(
            "kubelet_runtime_operations_errors",
            "Calls to the container runtime that failed, by operation",
            self.errors.clone(),
        );
        registry.register(
            "kubelet_runtime_operations_duration_seconds",
            "How long calls to the container runtime took, in seconds, by operation",
            self.duration.clone(),
        );
    }

    pub(super) fn record(&self, operation: Operation, took: Duration, failed: bool) {
        let labels = Labels { operation_type: operation };
        self.operations.get_or_create(&labels).inc();
        self.duration.get_or_create(&labels).observe(took.as_secs_f64());
        if failed {
            self.errors.get_or_create(&labels).inc();
        }
    }
}
