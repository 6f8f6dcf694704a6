//! Metrics of the volume manager.

use beelet_model::disk::VolumesUse;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::{operations::Operations, stats::StatsMetrics};

/// Counters of operations on volumes, and gauges of the volumes' use. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pub(crate) operations: Operations,
    pub(crate) stats: StatsMetrics,
}

impl Metrics {
    /// Adds the metrics to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        self.operations.register(registry);
        self.stats.register(registry);
    }

    /// Returns the use of the measured volumes.
    #[must_use]
    pub fn usage(&self) -> watch::Receiver<VolumesUse> {
        self.stats.usage()
    }
}
