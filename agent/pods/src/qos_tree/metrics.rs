//! How often cgroups had to be set, and why.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Which cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// kubepods, the QoS classes, reserved daemons.
    Node,
    /// Pods.
    Pod,
    /// Containers.
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
    /// Comparisons of all cgroups that left nothing to be tried again.
    pub(super) syncs: Counter,
    /// Values that could not be written and are tried again.
    pub(super) pending: Gauge,
    pub(super) orphans_removed: Counter,
}

impl Metrics {
    /// Adds them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "beelet_cgroup_drift",
            "Values of cgroups that somebody else had changed and that were set right again",
            self.drift.clone(),
        );
        registry.register(
            "beelet_cgroup_updates",
            "Values of cgroups that were changed because pods came, went or changed, or the runtime's formula differs",
            self.updates.clone(),
        );
        registry.register(
            "beelet_cgroup_syncs",
            "Comparisons of all cgroups with what pods ask for, after which nothing was left to be written",
            self.syncs.clone(),
        );
        registry.register(
            "beelet_cgroup_pending",
            "Values of cgroups that could not be written at the last try (a memory limit below what is in use)",
            self.pending.clone(),
        );
        registry.register(
            "beelet_cgroup_orphans_removed",
            "Empty cgroups of pods that nobody knew, removed",
            self.orphans_removed.clone(),
        );
    }

    pub(super) fn changed(&self, level: Level, values: usize, drifted: bool) {
        let family = if drifted { &self.drift } else { &self.updates };
        family.get_or_create(&level.labels()).inc_by(values as u64);
    }

    /// Number of values that something else had changed.
    #[must_use]
    pub fn drifted(&self, level: Level) -> u64 {
        self.drift.get_or_create(&level.labels()).get()
    }

    /// Number of times that all cgroups were compared and set right.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.syncs.get()
    }
}
