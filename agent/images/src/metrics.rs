//! Metrics of image garbage collection and credential providers.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use beelet_base::kubelet_counter::KubeletCounter;

use super::pull_metrics::PullMetrics;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProviderLabel {
    plugin_name: String,
}

/// Counters and gauges; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    collected: Family<ReasonLabel, KubeletCounter>,
    freed_bytes: KubeletCounter,
    failures: KubeletCounter,
    images: Gauge,
    bytes: Gauge,
    asked: Family<ProviderLabel, Histogram, fn() -> Histogram>,
    unanswered: Family<ProviderLabel, KubeletCounter>,
    /// Metrics of pulls.
    pub pulls: PullMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            collected: Family::default(),
            freed_bytes: KubeletCounter::default(),
            failures: KubeletCounter::default(),
            images: Gauge::default(),
            bytes: Gauge::default(),
            asked: Family::new_with_constructor(asked as fn() -> Histogram),
            unanswered: Family::default(),
            pulls: PullMetrics::default(),
        }
    }
}

/// Uses the default buckets of Prometheus.
fn asked() -> Histogram {
    Histogram::new([0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0])
}

impl Metrics {
    /// Adds all of them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_image_garbage_collected_total",
            "Images removed by garbage collection, by reason: age or space",
            self.collected.clone(),
        );
        registry.register(
            "beelet_image_gc_freed_bytes_total",
            "Bytes freed by image garbage collection, measured on the file system of images",
            self.freed_bytes.clone(),
        );
        registry.register(
            "beelet_image_gc_failures_total",
            "Image garbage collections that failed",
            self.failures.clone(),
        );
        registry.register("beelet_images", "Images on this node", self.images.clone());
        registry.register(
            "beelet_images_bytes",
            "Total size of images as reported by the runtime; a shared layer counts once per image",
            self.bytes.clone(),
        );
        registry.register(
            "kubelet_credential_provider_plugin_duration",
            "Duration of credential provider calls in seconds",
            self.asked.clone(),
        );
        registry.register(
            "kubelet_credential_provider_plugin_errors",
            "Credential provider calls that failed",
            self.unanswered.clone(),
        );
        self.pulls.register(registry);
    }

    /// Records a call to a credential provider.
    pub(super) fn asked(&self, provider: &str, took: Duration, failed: bool) {
        let label = ProviderLabel { plugin_name: provider.to_owned() };
        self.asked.get_or_create(&label).observe(took.as_secs_f64());
        if failed {
            self.unanswered.get_or_create(&label).inc();
        }
    }

    pub(super) fn collected(&self, reason: &'static str, freed_bytes: u64) {
        self.collected.get_or_create(&ReasonLabel { reason }).inc();
        self.freed_bytes.add(freed_bytes);
    }

    pub(super) fn failed(&self) {
        self.failures.inc();
    }

    pub(super) fn listed(&self, images: usize, bytes: u64) {
        self.images.set(i64::try_from(images).unwrap_or(i64::MAX));
        self.bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}
