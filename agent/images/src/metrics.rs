//! What the images' half tells of itself.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};

use beelet_base::kubelet_counter::KubeletCounter;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// Counters and gauges; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    collected: Family<ReasonLabel, KubeletCounter>,
    freed_bytes: KubeletCounter,
    failures: KubeletCounter,
    images: Gauge,
    bytes: Gauge,
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
            "Space that garbage collection of images freed, as measured on their file system",
            self.freed_bytes.clone(),
        );
        registry.register(
            "beelet_image_gc_failures_total",
            "Garbage collections of images that did not do what they were to",
            self.failures.clone(),
        );
        registry.register("beelet_images", "Images on this node", self.images.clone());
        registry.register(
            "beelet_images_bytes",
            "What the runtime says the images take; layers shared by several count for each",
            self.bytes.clone(),
        );
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
