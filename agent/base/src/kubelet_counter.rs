//! Counters that keep the kubelet's names. OpenMetrics puts `_total` behind the name of a counter, and the
//! kubelet has some that lack it (`kubelet_evictions`, `kubelet_preemptions`): dashboards ask for those.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder},
    metrics::{MetricType, TypedMetric},
};

/// A number that only grows, under exactly the name it is registered with. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct KubeletCounter(Arc<AtomicU64>);

impl KubeletCounter {
    /// One more.
    pub fn inc(&self) {
        self.add(1);
    }

    /// So many more.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// The count so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl TypedMetric for KubeletCounter {
    // A counter by nature; the format's own word for it would change the name.
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
