//! Times of the last shutdown, under the kubelet's metric names.

use std::sync::atomic::AtomicU64;

use jiff::Timestamp;
use prometheus_client::{metrics::gauge::Gauge, registry::Registry};

/// Metrics of shutdowns. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    began: Gauge<f64, AtomicU64>,
    ended: Gauge<f64, AtomicU64>,
}

impl Metrics {
    /// Adds the metrics to the registry.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Start time of the last graceful shutdown, in seconds since 1970; 0 before the first";
        registry.register("kubelet_graceful_shutdown_start_time_seconds", help, self.began.clone());
        let help = "End time of the last graceful shutdown; 0 while it runs";
        registry.register("kubelet_graceful_shutdown_end_time_seconds", help, self.ended.clone());
    }

    pub(crate) fn show(&self, began: Option<Timestamp>, ended: Option<Timestamp>) {
        let seconds = |at: Timestamp| at.as_duration().as_secs_f64();
        self.began.set(began.map_or(0.0, seconds));
        self.ended.set(ended.map_or(0.0, seconds));
    }
}
