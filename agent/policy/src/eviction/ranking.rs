//! The order of eviction, and the choice of the pods to evict.

use std::cmp::Reverse;

use super::{DiskLayout, Observation, Signal, Threshold};
use crate::resources::{self, PodDemand};
use beelet_units::quantity::Quantity;

/// A pod's usage. Unknown amounts count as zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PodUsage {
    /// Memory that cannot be reclaimed at once.
    pub memory_working_set_bytes: u64,
    /// Memory in swap, if swap counts ([`super::EvictionSwap`]). The end of the pod does not free memory by
    /// this amount, but the pod occupies it beyond its request.
    pub swap_bytes: u64,
    /// The containers' writable layers.
    pub rootfs_bytes: u64,
    /// The containers' logs.
    pub logs_bytes: u64,
    /// Volumes on the node's own disk.
    pub volumes_bytes: u64,
    /// Files of the node that containers may write: those in `/etc`, termination messages.
    pub files_bytes: u64,
    /// Inodes of all of these.
    pub inodes: u64,
    /// Processes.
    pub pids: u64,
    /// True if a container has put part of its volumes' data too deep to be measured. If the disk of volumes
    /// is low, the pod ranks like one without statistics.
    pub hides_disk: bool,
}

/// A category of a pod's disk usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskPart {
    /// The containers' writable layers.
    Rootfs,
    /// The containers' logs.
    Logs,
    /// Volumes on the node's own disk.
    Volumes,
    /// Files of the node that containers may write.
    Files,
}

impl DiskPart {
    const ALL: &'static [Self] = &[Self::Rootfs, Self::Logs, Self::Volumes, Self::Files];

    /// Returns the categories that count when the signal is low, depending on what shares the full
    /// filesystem; empty for a signal that does not concern a disk.
    #[must_use]
    pub const fn counted(signal: Signal, layout: DiskLayout) -> &'static [Self] {
        match (signal, layout) {
            (Signal::PidAvailable | Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable, _) => &[],
            (signal, _) if signal.is_inodes() => Self::ALL,
            (Signal::NodeFsAvailable, DiskLayout::DedicatedImageFs) => {
                &[Self::Logs, Self::Volumes, Self::Files]
            }
            (_, DiskLayout::DedicatedImageFs) => &[Self::Rootfs],
            (Signal::ImageFsAvailable, DiskLayout::SplitImageFs) => &[],
            _ => Self::ALL,
        }
    }
}

impl PodUsage {
    /// Returns the usage that counts when the signal is low.
    #[must_use]
    pub fn of(&self, signal: Signal, layout: DiskLayout) -> Quantity {
        let units = |n: u64| Quantity::from_units(i64::try_from(n).unwrap_or(i64::MAX));
        match signal {
            Signal::PidAvailable => units(self.pids),
            signal if signal.is_memory() => units(self.memory_working_set_bytes),
            signal if signal.is_inodes() => units(self.inodes),
            signal => DiskPart::counted(signal, layout).iter().map(|part| units(self.bytes_of(*part))).sum(),
        }
    }

    /// Returns the usage that is compared with the request when the signal is low.
    fn occupied(&self, signal: Signal, layout: DiskLayout) -> Quantity {
        let swap = if signal.is_memory() { self.swap_bytes } else { 0 };
        self.of(signal, layout) + Quantity::from_units(i64::try_from(swap).unwrap_or(i64::MAX))
    }

    const fn bytes_of(&self, part: DiskPart) -> u64 {
        match part {
            DiskPart::Rootfs => self.rootfs_bytes,
            DiskPart::Logs => self.logs_bytes,
            DiskPart::Volumes => self.volumes_bytes,
            DiskPart::Files => self.files_bytes,
        }
    }
}

/// A pod that may be evicted.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    /// The pod's requests and limits.
    pub demand: PodDemand<'a>,
    /// The pod's priority; 0 if it has none.
    pub priority: i32,
    /// True for a critical pod, which is ranked but never evicted.
    pub critical: bool,
    /// True for a pod already terminating with its grace period: deleted, or evicted under a soft threshold.
    pub leaving: bool,
    /// The pod's usage; `None` without statistics, in which case the pod is evicted first.
    pub usage: Option<PodUsage>,
}

impl Candidate<'_> {
    /// Returns the pod's usage; `None` without statistics for the signal.
    fn measured(&self, signal: Signal, layout: DiskLayout) -> Option<PodUsage> {
        let counts = DiskPart::counted(signal, layout).contains(&DiskPart::Volumes);
        self.usage.filter(|usage| !(counts && usage.hides_disk))
    }

    /// Returns the amount that the end of the pod frees; `None` without statistics.
    fn known(&self, signal: Signal, layout: DiskLayout) -> Option<Quantity> {
        Some(self.measured(signal, layout)?.of(signal, layout))
    }

    /// Returns the pod's usage, its request for the signal's resource, and true if usage exceeds the request;
    /// `None` without statistics. Process ids have no requests.
    fn against_request(&self, signal: Signal, layout: DiskLayout) -> Option<(Quantity, Quantity, bool)> {
        let usage = self.measured(signal, layout)?.occupied(signal, layout);
        // For inodes, too, the kubelet subtracts the request for bytes: kept, since the order is part of the
        // contract.
        let (limit, subtracted) = match signal {
            Signal::PidAvailable => return Some((usage, Quantity::ZERO, false)),
            signal if signal.is_memory() => (resources::MEMORY, resources::MEMORY),
            signal if signal.is_inodes() => ("inodes", resources::EPHEMERAL_STORAGE),
            _ => (resources::EPHEMERAL_STORAGE, resources::EPHEMERAL_STORAGE),
        };
        let request = self.demand.counted_request(subtracted);
        let above = usage > if limit == subtracted { request } else { self.demand.counted_request(limit) };
        Some((usage, request, above))
    }
}

/// Returns indices into `pods` in eviction order.
///
/// Memory and disk: pods without statistics or with hidden disk usage, then those above their request, each
/// group by priority, then terminating pods, then by the excess over the request. Process ids: by priority,
/// then terminating pods, then by the number of processes. Ties keep the order of `pods`.
#[must_use]
pub fn rank(signal: Signal, layout: DiskLayout, pods: &[Candidate<'_>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pods.len()).collect();
    if signal == Signal::PidAvailable {
        order.sort_by_cached_key(|i| {
            let pod = &pods[*i];
            (pod.priority, !pod.leaving, pod.usage.map(|usage| Reverse(usage.pids)))
        });
        return order;
    }
    order.sort_by_cached_key(|i| {
        let pod = &pods[*i];
        let Some((usage, request, above)) = pod.against_request(signal, layout) else {
            return (false, false, pod.priority, !pod.leaving, Reverse(Quantity::ZERO));
        };
        (true, !above, pod.priority, !pod.leaving, Reverse(usage.saturating_sub(request)))
    });
    order
}

/// Returns the pod to evict: the first in the ranking that is not critical.
#[must_use]
pub fn victim(ranked: &[usize], pods: &[Candidate<'_>]) -> Option<usize> {
    ranked.iter().copied().find(|i| pods.get(*i).is_some_and(|pod| !pod.critical))
}

/// Returns the amount that must be freed before a threshold is no longer met, its minimum reclaim included;
/// zero if it is not met.
#[must_use]
pub fn deficit(threshold: &Threshold, seen: &Observation) -> Quantity {
    let more = threshold.min_reclaim.map_or(Quantity::ZERO, |more| more.of(seen.capacity));
    let wanted = threshold.value.of(seen.capacity) + more;
    wanted.saturating_sub(seen.available).max(Quantity::ZERO)
}

/// A pod is worth evicting if it frees at least this fraction (1/N) of the missing amount.
const WORTH: i128 = 100;

/// Returns true if evicting a pod that frees this amount is worthwhile: more than next to nothing of the
/// missing amount.
#[must_use]
pub fn is_worth_it(frees: Quantity, missing: Quantity) -> bool {
    frees > Quantity::ZERO && i128::from(frees.value()) * WORTH >= i128::from(missing.value())
}

/// Returns true if the space expected from evicting a pod has become available: at least half of it, since
/// others write at the same time, and more than next to nothing of the missing amount. `from` is the amount
/// available when the eviction began. Always false if the pod's usage is unknown.
#[must_use]
pub fn has_come(expected: Quantity, from: Quantity, available: Quantity, missing: Quantity) -> bool {
    let growth = available.saturating_sub(from);
    expected > Quantity::ZERO && growth + growth >= expected && is_worth_it(growth, missing)
}

/// Returns the pods to evict at once, in the order of `ranked`, without critical ones. `leaving` states that
/// some pod is already terminating; `missing` is the amount that terminating pods will not free.
///
/// The kubelet evicts one pod, measures, evicts the next. This function evicts several at once only if
/// together they free the missing amount, and then only the necessary ones: it skips a pod that frees next to
/// nothing while others free enough, and a pod ranked before others that must be evicted in any case and free
/// enough without it. If the pods cannot free the missing amount (something else holds it), or one of them
/// has no statistics, it evicts one at a time: the first one worth it, else the first of all; and none while
/// another pod is terminating, since the effect of that must be measured first.
///
/// A gracefully terminating pod that is chosen loses its grace period. Below its request that never happens
/// while a pod above its own request, which would free something, stays.
#[must_use]
pub fn victims(
    signal: Signal,
    layout: DiskLayout,
    ranked: &[usize],
    pods: &[Candidate<'_>],
    missing: Quantity,
    leaving: bool,
) -> Vec<usize> {
    let frees = |i: &usize| pods.get(*i)?.known(signal, layout);
    let may_go: Vec<usize> =
        ranked.iter().copied().filter(|i| pods.get(*i).is_some_and(|pod| !pod.critical)).collect();
    let mut worth: Vec<(usize, Quantity)> = may_go
        .iter()
        // Pods after one without statistics wait until its effect has been measured.
        .map_while(|i| Some((*i, frees(i)?)))
        .filter(|(_, amount)| is_worth_it(*amount, missing))
        .collect();
    let mut freed = Quantity::ZERO;
    let enough = worth.iter().position(|(_, amount)| {
        freed = freed + *amount;
        freed >= missing
    });
    let Some(last) = enough else {
        let unknown = may_go.first().filter(|i| frees(i).is_none());
        let first = unknown.or(worth.first().map(|(i, _)| i)).or(may_go.first()).copied();
        return first.filter(|_| !leaving).into_iter().collect();
    };
    worth.truncate(last + 1);
    let is_above = |i: usize| {
        pods.get(i).and_then(|pod| pod.against_request(signal, layout)).is_some_and(|(.., above)| above)
    };
    let loses_grace = |i: usize| pods.get(i).is_some_and(|pod| pod.leaving) && !is_above(i);
    // The smallest contributor stays first, except for pods that would lose their grace period.
    let mut by_amount: Vec<(usize, Quantity)> = worth.clone();
    by_amount.sort_by_key(|(i, amount)| (!loses_grace(*i), *amount));
    for (index, amount) in by_amount {
        let comes_first = is_above(index) && worth.iter().any(|(i, _)| loses_grace(*i));
        if worth.len() > 1 && !comes_first && freed.saturating_sub(amount) >= missing {
            freed = freed.saturating_sub(amount);
            worth.retain(|(i, _)| *i != index);
        }
    }
    worth.into_iter().map(|(i, _)| i).collect()
}
