//! The metrics of eviction.

use std::time::Duration;

use beelet_policy::eviction::NodeCondition;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use super::Observations;
use beelet_base::kubelet_counter::KubeletCounter;
use beelet_model::pressure::Conditions;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SignalLabel {
    eviction_signal: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConditionLabel {
    condition: &'static str,
}

/// Counters and gauges; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    evictions: Family<SignalLabel, KubeletCounter>,
    stats_age: Family<SignalLabel, Histogram, fn() -> Histogram>,
    conditions: Family<ConditionLabel, Gauge>,
    available: Family<SignalLabel, Gauge>,
    capacity: Family<SignalLabel, Gauge>,
    reclaims: KubeletCounter,
    overdue: KubeletCounter,
    oom_kills: KubeletCounter,
}

impl Default for Metrics {
    fn default() -> Self {
        // The kubelet's own buckets begin at 5 ms, in seconds.
        let buckets = || Histogram::new([0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]);
        Self {
            evictions: Family::default(),
            stats_age: Family::new_with_constructor(buckets),
            conditions: Family::default(),
            available: Family::default(),
            capacity: Family::default(),
            reclaims: KubeletCounter::default(),
            overdue: KubeletCounter::default(),
            oom_kills: KubeletCounter::default(),
        }
    }
}

impl Metrics {
    /// Registers all metrics.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("kubelet_evictions", "Pods evicted, by eviction signal", self.evictions.clone());
        registry.register(
            "kubelet_eviction_stats_age_seconds",
            "Age of the numbers on which a pod was evicted, by eviction signal",
            self.stats_age.clone(),
        );
        registry.register(
            "beelet_node_condition",
            "1 while the node has the condition",
            self.conditions.clone(),
        );
        registry.register(
            "beelet_eviction_signal_available",
            "Available amount, in bytes, inodes or process ids",
            self.available.clone(),
        );
        registry.register(
            "beelet_eviction_signal_capacity",
            "Total amount, in bytes, inodes or process ids",
            self.capacity.clone(),
        );
        registry.register(
            "beelet_eviction_reclaims_total",
            "Times that unused containers and images were removed because the disk was short",
            self.reclaims.clone(),
        );
        registry.register(
            "beelet_eviction_overdue_total",
            "Evicted pods that did not terminate in time",
            self.overdue.clone(),
        );
        registry.register(
            "beelet_pod_oom_kills_total",
            "Processes of pods killed by the kernel's OOM killer, as seen by the kernel programs",
            self.oom_kills.clone(),
        );
    }

    pub(super) fn oom_killed(&self) {
        self.oom_kills.inc();
    }

    /// Counts an eviction; `stats_age` is the age of the numbers behind it, if any.
    pub(super) fn evicted(&self, signal: &'static str, stats_age: Option<Duration>) {
        let label = SignalLabel { eviction_signal: signal };
        self.evictions.get_or_create(&label).inc();
        if let Some(age) = stats_age {
            self.stats_age.get_or_create(&label).observe(age.as_secs_f64());
        }
    }

    pub(super) fn reclaimed(&self) {
        self.reclaims.inc();
    }

    pub(super) fn overdue(&self) {
        self.overdue.inc();
    }

    pub(super) fn conditions(&self, now: &Conditions) {
        for condition in
            [NodeCondition::MemoryPressure, NodeCondition::DiskPressure, NodeCondition::PidPressure]
        {
            let label = ConditionLabel { condition: condition.name() };
            self.conditions.get_or_create(&label).set(i64::from(now.contains(&condition)));
        }
    }

    pub(super) fn seen(&self, seen: &Observations) {
        for (signal, observation) in seen {
            let label = SignalLabel { eviction_signal: signal.name() };
            self.available.get_or_create(&label).set(observation.available.value());
            self.capacity.get_or_create(&label).set(observation.capacity.value());
        }
    }

    /// Returns the number of pods evicted for this signal.
    #[cfg(test)]
    pub(crate) fn evictions(&self, signal: beelet_policy::eviction::Signal) -> u64 {
        self.evictions.get_or_create(&SignalLabel { eviction_signal: signal.name() }).get()
    }
}
