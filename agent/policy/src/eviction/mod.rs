//! Node pressure, reclaim and the ranking of pods for eviction: the kubelet's eviction manager
//! (`pkg/kubelet/eviction/{eviction_manager,helpers}.go`).
//!
//! Takes numbers and returns a decision. Must never measure, kill or keep state: the caller keeps the state
//! between decisions in [`Tracker`].

#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod local_storage;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::resources::{self, PodDemand};
use beelet_units::{moment::Moment, quantity::Quantity};

/// A resource of the node that can run low.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Signal {
    /// The node's memory.
    #[serde(rename = "memory.available")]
    MemoryAvailable,
    /// The memory that all pods together may use.
    #[serde(rename = "allocatableMemory.available")]
    AllocatableMemoryAvailable,
    /// Bytes on the filesystem of volumes and logs.
    #[serde(rename = "nodefs.available")]
    NodeFsAvailable,
    /// Inodes on the filesystem of volumes and logs.
    #[serde(rename = "nodefs.inodesFree")]
    NodeFsInodesFree,
    /// Bytes on the filesystem of images.
    #[serde(rename = "imagefs.available")]
    ImageFsAvailable,
    /// Inodes on the filesystem of images.
    #[serde(rename = "imagefs.inodesFree")]
    ImageFsInodesFree,
    /// Bytes on the filesystem of containers' writable layers.
    #[serde(rename = "containerfs.available")]
    ContainerFsAvailable,
    /// Inodes on the filesystem of writable layers.
    #[serde(rename = "containerfs.inodesFree")]
    ContainerFsInodesFree,
    /// Process ids.
    #[serde(rename = "pid.available")]
    PidAvailable,
}

/// A condition of the node, reported while a signal's threshold is met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum NodeCondition {
    /// Memory is low.
    MemoryPressure,
    /// Space or inodes are low.
    DiskPressure,
    /// Process ids are low.
    #[serde(rename = "PIDPressure")]
    PidPressure,
}

impl NodeCondition {
    /// Returns the condition's name in a node's status.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MemoryPressure => "MemoryPressure",
            Self::DiskPressure => "DiskPressure",
            Self::PidPressure => "PIDPressure",
        }
    }
}

impl std::fmt::Display for NodeCondition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Signal {
    /// Returns the signal's name in a configuration, e.g. `memory.available`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MemoryAvailable => "memory.available",
            Self::AllocatableMemoryAvailable => "allocatableMemory.available",
            Self::NodeFsAvailable => "nodefs.available",
            Self::NodeFsInodesFree => "nodefs.inodesFree",
            Self::ImageFsAvailable => "imagefs.available",
            Self::ImageFsInodesFree => "imagefs.inodesFree",
            Self::ContainerFsAvailable => "containerfs.available",
            Self::ContainerFsInodesFree => "containerfs.inodesFree",
            Self::PidAvailable => "pid.available",
        }
    }

    /// Returns the resource that is short, as the message of an evicted pod names it (`signalToResource` of
    /// the kubelet).
    #[must_use]
    pub const fn resource(self) -> &'static str {
        match self {
            Self::MemoryAvailable | Self::AllocatableMemoryAvailable => resources::MEMORY,
            Self::PidAvailable => "pids",
            Self::NodeFsInodesFree | Self::ImageFsInodesFree | Self::ContainerFsInodesFree => "inodes",
            _ => resources::EPHEMERAL_STORAGE,
        }
    }

    /// Returns the node condition that stands for this signal.
    #[must_use]
    pub const fn condition(self) -> NodeCondition {
        match self {
            Self::MemoryAvailable | Self::AllocatableMemoryAvailable => NodeCondition::MemoryPressure,
            Self::PidAvailable => NodeCondition::PidPressure,
            _ => NodeCondition::DiskPressure,
        }
    }

    const fn is_memory(self) -> bool {
        matches!(self, Self::MemoryAvailable | Self::AllocatableMemoryAvailable)
    }

    const fn is_inodes(self) -> bool {
        matches!(self, Self::NodeFsInodesFree | Self::ImageFsInodesFree | Self::ContainerFsInodesFree)
    }
}

/// An amount, or a fraction of the capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ThresholdValue {
    /// An absolute amount.
    Amount(Quantity),
    /// A fraction of the capacity: 0.1 is 10 %. In single precision, like the kubelet's.
    Part(f32),
}

/// An error in a threshold's value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The text is neither an amount nor a percentage.
    #[error("{0:?} is neither a quantity nor a percentage (use e.g. 100Mi or 10%)")]
    Malformed(String),
    /// The percentage is below 0 or above 100.
    #[error("{0:?} is not between 0% and 100%")]
    OutOfRange(String),
    /// The amount must be above zero.
    #[error("{0:?} must be more than zero")]
    NotPositive(String),
}

impl ThresholdValue {
    /// Reads a threshold: a quantity above zero, or a percentage. `0%` and `100%` mean *no threshold*:
    /// `Ok(None)`.
    ///
    /// # Errors
    /// If the text is neither, or outside its range.
    pub fn threshold(text: &str) -> Result<Option<Self>, ValueError> {
        if matches!(text, "0%" | "100%") {
            return Ok(None);
        }
        let value = Self::parse(text)?;
        match value {
            Self::Part(part) if part > 1.0 => Err(ValueError::OutOfRange(text.to_owned())),
            Self::Amount(amount) if amount <= Quantity::ZERO => Err(ValueError::NotPositive(text.to_owned())),
            value => Ok(Some(value)),
        }
    }

    /// Reads a minimum to reclaim: a quantity of zero or more, or a percentage above zero.
    ///
    /// # Errors
    /// If the text is neither, or outside its range.
    pub fn min_reclaim(text: &str) -> Result<Self, ValueError> {
        match Self::parse(text)? {
            Self::Part(part) if part <= 0.0 => Err(ValueError::NotPositive(text.to_owned())),
            Self::Amount(amount) if amount < Quantity::ZERO => Err(ValueError::OutOfRange(text.to_owned())),
            value => Ok(value),
        }
    }

    fn parse(text: &str) -> Result<Self, ValueError> {
        let malformed = || ValueError::Malformed(text.chars().take(64).collect());
        let Some(percent) = text.strip_suffix('%') else {
            return Quantity::parse(text.trim()).map(Self::Amount).map_err(|_| malformed());
        };
        let percent: f32 = percent.parse().ok().filter(|p: &f32| p.is_finite()).ok_or_else(malformed)?;
        if percent < 0.0 {
            Err(ValueError::OutOfRange(text.to_owned()))
        } else {
            Ok(Self::Part(percent / 100.0))
        }
    }

    /// Returns this value as an amount of `capacity`.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "the kubelet's arithmetic; the cast saturates"
    )]
    pub fn of(self, capacity: Quantity) -> Quantity {
        match self {
            Self::Amount(amount) => amount,
            Self::Part(part) => Quantity::from_units((capacity.value() as f64 * f64::from(part)) as i64),
        }
    }
}

/// Amount below which a signal counts as low, and the grace period for acting on it.
#[derive(Debug, Clone, PartialEq)]
pub struct Threshold {
    /// The signal.
    pub signal: Signal,
    /// The signal is low strictly below this value.
    pub value: ThresholdValue,
    /// Time for which the signal must be low before pods are evicted; zero for a *hard* threshold.
    pub grace: Duration,
    /// A threshold, once met, stays met until this much more than `value` is available.
    pub min_reclaim: Option<ThresholdValue>,
}

/// Availability of a signal's resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Observation {
    /// Available amount.
    pub available: Quantity,
    /// Total amount.
    pub capacity: Quantity,
}

/// Filesystems of images, writable layers and everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiskLayout {
    /// A single filesystem for all.
    #[default]
    Single,
    /// Images and writable layers on a filesystem of their own.
    DedicatedImageFs,
    /// Images on a filesystem of their own; writable layers on the filesystem of volumes and logs.
    SplitImageFs,
}

/// A way to free node resources without affecting a running pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Reclaim {
    /// Removes dead containers and their sandboxes.
    DeleteUnusedContainers,
    /// Removes images that no container uses.
    DeleteUnusedImages,
}

/// Returns the steps of reclaim, in order, before a pod is evicted.
#[must_use]
pub const fn reclaim(signal: Signal, layout: DiskLayout) -> &'static [Reclaim] {
    use Reclaim::{DeleteUnusedContainers as Containers, DeleteUnusedImages as Images};
    use Signal::{
        AllocatableMemoryAvailable, ImageFsAvailable, ImageFsInodesFree, MemoryAvailable, NodeFsAvailable,
        NodeFsInodesFree, PidAvailable,
    };
    match (layout, signal) {
        (_, MemoryAvailable | AllocatableMemoryAvailable | PidAvailable) => &[],
        (DiskLayout::Single, _) => &[Containers, Images],
        (DiskLayout::DedicatedImageFs, NodeFsAvailable | NodeFsInodesFree) => &[],
        (DiskLayout::DedicatedImageFs, _) => &[Containers, Images],
        (DiskLayout::SplitImageFs, ImageFsAvailable | ImageFsInodesFree) => &[Images],
        (DiskLayout::SplitImageFs, _) => &[Containers],
    }
}

/// Returns true if these steps of reclaim were enough: none of the thresholds that they serve is `met`, by
/// numbers read after reclaim ended. A threshold met after that leads to another reclaim before evictions:
/// the newly used space may be unused by any pod, too.
///
/// `read_since` returns true if a signal's number was read since reclaim ended, and `None` without a number.
/// A signal without a number is not low.
#[must_use]
pub fn is_relieved(
    steps: &[Reclaim],
    layout: DiskLayout,
    thresholds: &[Threshold],
    met: &[usize],
    read_since: impl Fn(Signal) -> Option<bool>,
) -> bool {
    let mut known = false;
    for (index, threshold) in thresholds.iter().enumerate() {
        if reclaim(threshold.signal, layout) != steps {
            continue;
        }
        match read_since(threshold.signal) {
            Some(true) if !met.contains(&index) => known = true,
            Some(_) => return false,
            None => {}
        }
    }
    known
}

/// Copies to the containers' filesystem the thresholds of its actual filesystem: the image filesystem's if
/// that is a dedicated one, else the node's. Drops and returns thresholds set for it (the kubelet accepts
/// none).
pub fn derive_container_fs(thresholds: &mut Vec<Threshold>, layout: DiskLayout) -> Vec<Threshold> {
    let is_container_fs =
        |t: &Threshold| matches!(t.signal, Signal::ContainerFsAvailable | Signal::ContainerFsInodesFree);
    let dropped = thresholds.extract_if(.., |t| is_container_fs(t)).collect();
    let (bytes, inodes) = match layout {
        DiskLayout::DedicatedImageFs => (Signal::ImageFsAvailable, Signal::ImageFsInodesFree),
        _ => (Signal::NodeFsAvailable, Signal::NodeFsInodesFree),
    };
    for (from, to) in [(bytes, Signal::ContainerFsAvailable), (inodes, Signal::ContainerFsInodesFree)] {
        let copies: Vec<Threshold> = thresholds
            .iter()
            .filter(|t| t.signal == from)
            .map(|t| Threshold { signal: to, ..t.clone() })
            .collect();
        thresholds.extend(copies);
    }
    dropped
}

/// Copies the hard thresholds of the node's memory to the pods' memory (the kubelet does so if it enforces
/// allocatable on pods).
pub fn derive_allocatable(thresholds: &mut Vec<Threshold>) {
    let copies: Vec<Threshold> = thresholds
        .iter()
        .filter(|t| t.signal == Signal::MemoryAvailable && t.grace.is_zero())
        .map(|t| Threshold { signal: Signal::AllocatableMemoryAvailable, ..t.clone() })
        .collect();
    thresholds.extend(copies);
}

/// State kept between decisions. Indices into the list identify thresholds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tracker {
    /// Time since which each met threshold has been met.
    pub first_observed: BTreeMap<usize, Moment>,
    /// Thresholds actionable at the last decision: they stay met until their minimum reclaim is available,
    /// too.
    pub actionable: BTreeSet<usize>,
    /// Time at which each condition was last seen.
    pub conditions: BTreeMap<NodeCondition, Moment>,
}

/// The assessment of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Assessment {
    /// Indices of the met thresholds.
    pub met: Vec<usize>,
    /// Those of them that have been met for their whole grace period; memory first.
    pub actionable: Vec<usize>,
    /// The conditions of the met thresholds.
    pub conditions: Vec<NodeCondition>,
}

impl Tracker {
    /// Compares the observations with the thresholds. A signal without an observation is not low.
    pub fn assess(
        &mut self,
        now: Moment,
        thresholds: &[Threshold],
        observations: &BTreeMap<Signal, Observation>,
    ) -> Assessment {
        let low = |threshold: &Threshold, with_reclaim: bool| {
            observations.get(&threshold.signal).is_some_and(|seen| {
                let more = threshold
                    .min_reclaim
                    .filter(|_| with_reclaim)
                    .map_or(Quantity::ZERO, |more| more.of(seen.capacity));
                threshold.value.of(seen.capacity) + more > seen.available
            })
        };
        let met: Vec<usize> = thresholds
            .iter()
            .enumerate()
            .filter(|(i, threshold)| {
                low(threshold, false) || (self.actionable.contains(i) && low(threshold, true))
            })
            .map(|(i, _)| i)
            .collect();
        self.first_observed =
            met.iter().map(|i| (*i, self.first_observed.get(i).copied().unwrap_or(now))).collect();
        let lasted = |i: &usize| {
            let (Some(since), Some(threshold)) = (self.first_observed.get(i), thresholds.get(*i)) else {
                return false;
            };
            since.plus(threshold.grace) <= now
        };
        let signal = |i: usize| thresholds.get(i).map(|t| t.signal);
        let mut actionable: Vec<usize> = met.iter().copied().filter(lasted).collect();
        actionable.sort_by_key(|i| !signal(*i).is_some_and(Signal::is_memory));
        self.actionable = actionable.iter().copied().collect();
        let conditions: BTreeSet<NodeCondition> =
            met.iter().filter_map(|i| signal(*i)).map(Signal::condition).collect();
        self.conditions.extend(conditions.iter().map(|condition| (*condition, now)));
        Assessment { met, actionable, conditions: conditions.into_iter().collect() }
    }

    /// Returns the conditions to report: those seen within `transition` before `now`, so that they don't
    /// flap.
    #[must_use]
    pub fn reported(&self, now: Moment, transition: Duration) -> Vec<NodeCondition> {
        let recent = |at: &Moment| now < at.plus(transition);
        self.conditions.iter().filter(|(_, at)| recent(at)).map(|(condition, _)| *condition).collect()
    }
}

/// A pod's usage. Unknown amounts count as zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PodUsage {
    /// Memory that cannot be reclaimed at once.
    pub memory_working_set_bytes: u64,
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
    /// Returns the pod's usage of the signal's resource; `None` without statistics.
    fn known(&self, signal: Signal, layout: DiskLayout) -> Option<Quantity> {
        let counts = DiskPart::counted(signal, layout).contains(&DiskPart::Volumes);
        let usage = self.usage.filter(|usage| !(counts && usage.hides_disk))?;
        Some(usage.of(signal, layout))
    }

    /// Returns the pod's usage, its request for the signal's resource, and true if usage exceeds the request;
    /// `None` without statistics. Process ids have no requests.
    fn against_request(&self, signal: Signal, layout: DiskLayout) -> Option<(Quantity, Quantity, bool)> {
        let usage = self.known(signal, layout)?;
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

#[cfg(test)]
mod tests;
