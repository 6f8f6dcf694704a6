//! The tuner's metrics.

use beelet_policy::tuner::KnobKind;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StepLabels {
    knob: &'static str,
    direction: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKnob {
    knob: &'static str,
}

/// Counters and gauges.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    steps: Family<StepLabels, Counter>,
    held: Family<OfKnob, Gauge>,
    overwritten: Family<OfKnob, Counter>,
    pub(super) ticks: Counter,
    pub(super) restored: Counter,
    scheduler: Gauge,
    scheduler_lost: Counter,
    reclaimed: Counter,
    read_again: Gauge,
}

const KINDS: [KnobKind; 6] = [
    KnobKind::Idle,
    KnobKind::Weight,
    KnobKind::CpuCap,
    KnobKind::MemoryHigh,
    KnobKind::Burst,
    KnobKind::DiskWeight,
];

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("beelet_tuner_ticks", "Passes over the node", self.ticks.clone());
        registry.register(
            "beelet_tuner_steps",
            "Changes of a cgroup setting that were made, advised, or failed",
            self.steps.clone(),
        );
        registry.register("beelet_tuner_held", "Cgroup settings that are held now", self.held.clone());
        registry.register(
            "beelet_tuner_overwritten",
            "Held settings that another process overwrote and now keeps",
            self.overwritten.clone(),
        );
        registry.register(
            "beelet_tuner_restored",
            "Settings restored at a stop, or at a start after an unclean end",
            self.restored.clone(),
        );
        registry.register(
            "beelet_tuner_scheduler_loaded",
            "1 while the tuner's own scheduler decides which thread runs",
            self.scheduler.clone(),
        );
        registry.register(
            "beelet_tuner_scheduler_lost",
            "Times that the tuner's own scheduler failed to load or was unloaded by the kernel",
            self.scheduler_lost.clone(),
        );
        registry.register(
            "beelet_tuner_reclaimed_bytes",
            "Cold memory that pods gave back on request",
            self.reclaimed.clone(),
        );
        registry.register(
            "beelet_tuner_read_again_bytes",
            "Cold memory taken from the running pods that they have read again",
            self.read_again.clone(),
        );
    }

    pub(super) fn reclaimed(&self, bytes: u64) {
        self.reclaimed.inc_by(bytes);
    }

    pub(super) fn read_again(&self, bytes: u64) {
        self.read_again.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    pub(super) fn step(&self, kind: KnobKind, gives_back: bool, outcome: &'static str) {
        let direction = if gives_back { "back" } else { "set" };
        self.steps.get_or_create(&StepLabels { knob: kind.as_str(), direction, outcome }).inc();
    }

    pub(super) fn scheduler(&self, is_loaded: bool) {
        self.scheduler.set(i64::from(is_loaded));
    }

    pub(super) fn scheduler_lost(&self) {
        self.scheduler_lost.inc();
    }

    pub(super) fn overwritten(&self, kind: KnobKind) {
        self.overwritten.get_or_create(&OfKnob { knob: kind.as_str() }).inc();
    }

    pub(super) fn hold<'a>(&self, held: &(impl Iterator<Item = &'a KnobKind> + Clone)) {
        for kind in KINDS {
            let count = held.clone().filter(|one| **one == kind).count();
            let gauge = self.held.get_or_create(&OfKnob { knob: kind.as_str() });
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }
}
