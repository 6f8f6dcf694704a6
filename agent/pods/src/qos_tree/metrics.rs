//! Metrics of cgroup changes by cause.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Level of cgroups, a label of the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Cgroups of kubepods, of the QoS classes and of reserved daemons.
    Node,
    /// Cgroups of pods.
    Pod,
    /// Cgroups of containers.
    Container,
}

impl Level {
    fn labels(self) -> Labels {
        let level = match self {
            Self::Node => "node",
            Self::Pod => "pod",
            Self::Container => "container",
        };
        Labels { level }
    }

    pub(super) fn of(path: &str) -> Self {
        let name = path.rsplit('/').next().unwrap_or_default();
        if path.starts_with("/kubepods/") && name.starts_with("pod") { Self::Pod } else { Self::Node }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    level: &'static str,
}

/// Counters and gauges.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    drift: Family<Labels, Counter>,
    updates: Family<Labels, Counter>,
    /// Comparisons of all cgroups without a failed write.
    pub(super) syncs: Counter,
    /// Values whose write failed, and is retried.
    pub(super) pending: Gauge,
    pub(super) orphans_removed: Counter,
}

impl Metrics {
    /// Adds the metrics to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "beelet_cgroup_drift",
            "Cgroup values restored after another program had changed them",
            self.drift.clone(),
        );
        registry.register(
            "beelet_cgroup_updates",
            "Cgroup values written because pods were added, removed or changed, or because the runtime's formula differs",
            self.updates.clone(),
        );
        registry.register(
            "beelet_cgroup_syncs",
            "Comparisons of all cgroups with their wanted values without a failed write",
            self.syncs.clone(),
        );
        registry.register(
            "beelet_cgroup_pending",
            "Cgroup values that could not be written at the last try (such as a memory limit below the current usage)",
            self.pending.clone(),
        );
        registry.register(
            "beelet_cgroup_orphans_removed",
            "Removed empty cgroups of unknown pods",
            self.orphans_removed.clone(),
        );
    }

    pub(super) fn changed(&self, level: Level, values: usize, drifted: bool) {
        let family = if drifted { &self.drift } else { &self.updates };
        family.get_or_create(&level.labels()).inc_by(values as u64);
    }

    /// Returns the number of values that another program had changed.
    #[must_use]
    pub fn drifted(&self, level: Level) -> u64 {
        self.drift.get_or_create(&level.labels()).get()
    }

    /// Returns the number of comparisons of all cgroups without a failed write.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.syncs.get()
    }
}
