//! Pods that are terminating, and the resources that their end frees.

use std::{collections::HashMap, sync::Arc, time::Duration};

use beelet_base::clock::After as _;
use beelet_model::table::{PodEntry, PodTable};
use beelet_policy::eviction::{
    DiskLayout, NodeCondition, Observation, PodUsage, Signal, Threshold, deficit, has_come, is_worth_it,
};
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;
use tracing::warn;

use super::{IMMEDIATE, Metrics, Observations, readings::Readings, reclaims::LATE, usage::KnownUsage};

/// Time beyond the grace period that a pod may take to terminate before others are evicted in its place.
const PATIENCE: Duration = Duration::from_secs(10);

/// A pod that holds resources, with its known usage.
pub(super) struct Pod {
    pub(super) uid: String,
    pub(super) pod: Arc<core::Pod>,
    pub(super) known: KnownUsage,
}

impl Pod {
    pub(super) fn is_deleted(&self) -> bool {
        self.pod.metadata.deletion_timestamp.is_some()
    }

    pub(super) fn frees(&self, signal: Signal, layout: DiskLayout) -> Quantity {
        self.known.usage.unwrap_or_default().of(signal, layout)
    }
}

/// A pod that is terminating.
#[derive(Debug, Clone)]
pub(super) struct Leaving {
    signal: Signal,
    /// The pod's grace period.
    grace: Duration,
    /// Time by which the pod should have terminated.
    by: Instant,
    /// Usage at the eviction and since, while the pod is not overdue.
    readings: Readings,
    /// True if the pod has not terminated by then.
    overdue: bool,
    /// The node's numbers at the eviction.
    before: Observations,
}

/// The space that a terminated pod leaves on a disk.
#[derive(Debug)]
struct LateRoom {
    /// Time of the pod's end.
    since: Instant,
    /// The node's numbers and the pod's usage at the eviction.
    before: Observations,
    usage: PodUsage,
}

/// Evicted and deleted pods that have not terminated yet.
#[derive(Debug, Default)]
pub(super) struct LeavingPods {
    /// By UID.
    pub(super) pods: HashMap<String, Leaving>,
    /// Time at which a pod was last seen to have terminated: earlier numbers do not include the effect.
    pub(super) gone_at: Option<Instant>,
    /// Pods evicted for a disk whose space may not be free yet.
    late: Vec<LateRoom>,
}

impl LeavingPods {
    /// Adds a pod; `before` are the node's numbers now.
    pub(super) fn add(&mut self, pod: &Pod, signal: Signal, grace: Duration, before: Observations) {
        let now = Instant::now();
        let readings = Readings::new(pod.known.read_at.unwrap_or(now), pod.known.usage.unwrap_or_default());
        let by = now.after(grace).after(PATIENCE);
        self.pods.insert(pod.uid.clone(), Leaving { signal, grace, by, readings, overdue: false, before });
    }

    /// Drops pods that have terminated from the list of leaving pods, and those that have been overdue long
    /// enough for another attempt. Returns true if any has terminated.
    pub(super) fn forget_the_gone(&mut self, table: &PodTable, metrics: &Metrics) -> bool {
        let here = |uid: &str| {
            let of_uid = |entry: &&Arc<PodEntry>| entry.pod.metadata.uid.as_deref() == Some(uid);
            table.pods.values().filter(of_uid).any(|entry| !entry.is_gone())
        };
        let gone: Vec<Leaving> = self.pods.extract_if(|uid, _| !here(uid)).map(|(_, gone)| gone).collect();
        let now = Instant::now();
        self.late.retain(|late| late.since.elapsed() < LATE);
        let any = !gone.is_empty();
        if any {
            let of_disks =
                gone.into_iter().filter(|pod| pod.signal.condition() == NodeCondition::DiskPressure);
            self.late.extend(of_disks.map(|pod| LateRoom {
                since: now,
                before: pod.before,
                usage: pod.readings.first(),
            }));
            self.gone_at = Some(now);
        }
        for (uid, leaving) in &mut self.pods {
            if leaving.by <= now && !leaving.overdue {
                leaving.overdue = true;
                metrics.overdue();
                warn!(
                    uid,
                    "an evicted pod has not terminated in time; others may have to be evicted in its place"
                );
            }
        }
        any
    }

    /// Returns true while the space of pods evicted for a disk may still become free and has not been seen.
    pub(super) fn must_wait_for_room(
        &mut self,
        threshold: &Threshold,
        observation: &Observation,
        layout: DiskLayout,
    ) -> bool {
        let signal = threshold.signal;
        let Some(first) = self.late.first() else { return false };
        if signal.condition() != NodeCondition::DiskPressure {
            return false;
        }
        let expected = self.late.iter().map(|late| late.usage.of(signal, layout)).sum();
        let before = first.before.get(&signal).map_or(observation.available, |before| before.available);
        let come = has_come(expected, before, observation.available, deficit(threshold, observation));
        if come {
            self.late.clear();
        }
        !come
    }

    /// Returns true if the pod may be chosen. Under a hard threshold that includes gracefully terminating
    /// pods whose end helps; their usage does not count as soon free.
    pub(super) fn is_candidate(
        &self,
        pod: &Pod,
        threshold: &Threshold,
        low: Quantity,
        layout: DiskLayout,
    ) -> bool {
        let Some(leaving) = self.pods.get(&pod.uid) else { return !pod.is_deleted() };
        let frees = pod.frees(threshold.signal, layout);
        threshold.grace.is_zero() && leaving.is_gentle() && !leaving.overdue && is_worth_it(frees, low)
    }

    /// Records the usage of leaving pods.
    pub(super) fn record_usage(&mut self, pods: &[Pod]) {
        for (uid, leaving) in self.pods.iter_mut().filter(|(_, leaving)| !leaving.overdue) {
            let known = pods.iter().find(|pod| pod.uid == *uid).map(|pod| &pod.known);
            if let Some((at, usage)) = known.and_then(|known| known.read_at.zip(known.usage)) {
                leaving.readings.add(at, usage);
            }
        }
    }

    /// Returns the amount that the pods counted on will free, relative to a number that was read at
    /// `read_at`.
    pub(super) fn coming(&self, threshold: &Threshold, read_at: Instant, layout: DiskLayout) -> Quantity {
        let leaving = self.pods.values().filter(|leaving| leaving.is_counted_on(threshold));
        leaving.map(|leaving| leaving.readings.by(read_at).of(threshold.signal, layout)).sum()
    }

    /// Returns true if the end of any of the pods will free some of the low resource soon enough.
    pub(super) fn is_any_counted_on(&self, threshold: &Threshold) -> bool {
        self.pods.values().any(|leaving| leaving.is_counted_on(threshold))
    }

    /// Records that a pod's grace period was shortened for a signal.
    pub(super) fn shorten(&mut self, uid: &str, signal: Signal) {
        if let Some(leaving) = self.pods.get_mut(uid) {
            (leaving.signal, leaving.grace) = (signal, IMMEDIATE);
            leaving.by = Instant::now() + IMMEDIATE + PATIENCE;
        }
    }
}

impl Leaving {
    /// Returns true if the pod's end will free some of the low resource, and soon enough: a hard threshold
    /// does not wait for a gracefully terminating pod. An overdue pod frees nothing.
    fn is_counted_on(&self, threshold: &Threshold) -> bool {
        let in_time = !threshold.grace.is_zero() || !self.is_gentle();
        in_time && !self.overdue && self.signal.condition() == threshold.signal.condition()
    }

    /// Returns true if the pod has more time than a hard threshold grants.
    fn is_gentle(&self) -> bool {
        self.grace > IMMEDIATE
    }
}
