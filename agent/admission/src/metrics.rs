//! Metrics of admission.

use prometheus_client::{encoding::EncodeLabelSet, metrics::family::Family, registry::Registry};

use beelet_base::kubelet_counter::KubeletCounter;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SignalLabel {
    preemption_signal: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

/// Counters; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    preemptions: Family<SignalLabel, KubeletCounter>,
    rejections: Family<ReasonLabel, KubeletCounter>,
}

impl Metrics {
    /// Adds all of them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_preemptions",
            "Pods preempted for a critical pod, by the insufficient resource",
            self.preemptions.clone(),
        );
        registry.register(
            "kubelet_admission_rejections_total",
            "Pods rejected by admission, by reason",
            self.rejections.clone(),
        );
    }

    pub(super) fn preempted(&self, resource: &str) {
        self.preemptions.get_or_create(&SignalLabel { preemption_signal: resource.to_owned() }).inc();
    }

    pub(super) fn rejected(&self, reason: &str) {
        self.rejections.get_or_create(&ReasonLabel { reason: reason.to_owned() }).inc();
    }

    /// Number of pods preempted because this resource was short.
    #[cfg(test)]
    pub(crate) fn preemptions(&self, resource: &str) -> u64 {
        self.preemptions.get_or_create(&SignalLabel { preemption_signal: resource.to_owned() }).get()
    }
}
