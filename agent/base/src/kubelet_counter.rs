//! Counters that keep the kubelet's names. OpenMetrics appends `_total` to the name of a counter, but some of
//! the kubelet's counters lack it (`kubelet_evictions`, `kubelet_preemptions`), and dashboards query those
//! names.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder},
    metrics::{MetricType, TypedMetric},
};

/// A monotonic counter, exported under exactly its registered name. Clones share the count.
#[derive(Clone, Debug, Default)]
pub struct KubeletCounter(Arc<AtomicU64>);

impl KubeletCounter {
    /// Increments the counter.
    pub fn inc(&self) {
        self.add(1);
    }

    /// Adds to the counter.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// Returns the count.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl TypedMetric for KubeletCounter {
    // The metric is a counter, but the format's type `counter` would change its name.
    const TYPE: MetricType = MetricType::Unknown;
}

impl EncodeMetric for KubeletCounter {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        encoder.encode_gauge(&self.get())
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text::encode, registry::Registry};

    use super::*;

    #[test]
    fn the_name_is_kept_as_it_is() {
        let counter = KubeletCounter::default();
        let mut registry = Registry::default();
        registry.register("kubelet_preemptions", "Pods", counter.clone());
        counter.inc();
        counter.add(2);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        assert!(text.contains("\nkubelet_preemptions 3\n"), "{text}");
    }
}
