//! When a node is under pressure, what to reclaim, and which pod goes first: the kubelet's eviction manager
//! (`pkg/kubelet/eviction/{eviction_manager,helpers}.go`).
//!
//! Numbers in, a decision out. Must never measure, kill or remember anything by itself: what has to outlive a
//! decision is in [`Tracker`], which the caller keeps.

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
    /// The memory that pods may use together.
    #[serde(rename = "allocatableMemory.available")]
    AllocatableMemoryAvailable,
    /// Bytes on the filesystem of volumes and logs.
    #[serde(rename = "nodefs.available")]
    NodeFsAvailable,
    /// Inodes on it.
    #[serde(rename = "nodefs.inodesFree")]
    NodeFsInodesFree,
    /// Bytes on the filesystem of images.
    #[serde(rename = "imagefs.available")]
    ImageFsAvailable,
    /// Inodes on it.
    #[serde(rename = "imagefs.inodesFree")]
    ImageFsInodesFree,
    /// Bytes on the filesystem of containers' writable layers.
    #[serde(rename = "containerfs.available")]
    ContainerFsAvailable,
    /// Inodes on it.
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
    /// Its name in a node's status.
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
    /// Its name in a configuration, e.g. `memory.available`.
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

    /// The resource that is short, as the message of an evicted pod names it (`signalToResource` of the
    /// kubelet).
    #[must_use]
    pub const fn resource(self) -> &'static str {
        match self {
            Self::MemoryAvailable | Self::AllocatableMemoryAvailable => resources::MEMORY,
            Self::PidAvailable => "pids",
            Self::NodeFsInodesFree | Self::ImageFsInodesFree | Self::ContainerFsInodesFree => "inodes",
            _ => resources::EPHEMERAL_STORAGE,
        }
    }

    /// The condition that the node has while this signal is low.
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

/// An amount, or a part of the capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ThresholdValue {
    /// So much.
    Amount(Quantity),
    /// So much of the capacity: 0.1 is 10 %. In single precision, as the kubelet has it.
    Part(f32),
}

/// Why a threshold's value makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// Neither an amount nor a percentage.
    #[error("{0:?} is neither a quantity nor a percentage (use e.g. 100Mi or 10%)")]
    Malformed(String),
    /// A percentage below 0 or above 100.
    #[error("{0:?} is not between 0% and 100%")]
    OutOfRange(String),
    /// An amount that must be above zero is not.
    #[error("{0:?} must be more than zero")]
    NotPositive(String),
}

impl ThresholdValue {
    /// Reads a threshold: a quantity above zero, or a percentage. `0%` and `100%` mean *no threshold*:
    /// `Ok(None)`.
    ///
    /// # Errors
    /// If it is neither, or outside its range.
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
    /// If it is neither, or outside its range.
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

    /// The amount that this is of `capacity`.
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

/// Below which amount a signal counts as low, and for how long it must.
#[derive(Debug, Clone, PartialEq)]
pub struct Threshold {
    /// What runs low.
    pub signal: Signal,
    /// Low is strictly below this.
    pub value: ThresholdValue,
    /// How long it must be low before pods go; zero: a *hard* threshold.
    pub grace: Duration,
    /// Once met, it stays met until so much more than `value` is available.
    pub min_reclaim: Option<ThresholdValue>,
}

/// What is there of a signal's resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Observation {
    /// Free for use.
    pub available: Quantity,
    /// In all.
    pub capacity: Quantity,
}

/// Where images, writable layers and everything else live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiskLayout {
    /// All on one filesystem.
    #[default]
    Single,
    /// Images and writable layers on a filesystem of their own.
    DedicatedImageFs,
    /// Images on a filesystem of their own; writable layers beside volumes and logs.
    SplitImageFs,
}

/// What frees node resources without hurting a running pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Reclaim {
    /// Remove dead containers and their sandboxes.
    DeleteUnusedContainers,
    /// Remove images that no container uses.
    DeleteUnusedImages,
}

/// The steps of reclaim, in order, before a pod is evicted.
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

/// Returns true if reclaim by these steps has done what it was for: none of the thresholds that it serves is
/// `met` any more, by numbers that were read after it had ended. A threshold that is met after that calls for
/// reclaim again before it calls for pods: what has come since may be something that nobody needs, too.
///
/// `read_since` says of a signal whether its number was read since reclaim ended; `None` where it has none.
/// One without a number is not low.
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

/// Gives the containers' filesystem the thresholds of the filesystem that it is (the kubelet lets nobody set
/// them): the image filesystem's if that is a dedicated one, else the node's. Thresholds set for it are
/// dropped; returned are those dropped.
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

/// Gives the pods' memory the hard thresholds of the node's memory (the kubelet does so where it enforces
/// allocatable on pods).
pub fn derive_allocatable(thresholds: &mut Vec<Threshold>) {
    let copies: Vec<Threshold> = thresholds
        .iter()
        .filter(|t| t.signal == Signal::MemoryAvailable && t.grace.is_zero())
        .map(|t| Threshold { signal: Signal::AllocatableMemoryAvailable, ..t.clone() })
        .collect();
    thresholds.extend(copies);
}

/// What must be remembered from one decision to the next. Thresholds are known by their place in the list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tracker {
    /// Since when each met threshold has been met.
    pub first_observed: BTreeMap<usize, Moment>,
    /// The thresholds that were actionable last time: they stay met until their minimum reclaim is there too.
    pub actionable: BTreeSet<usize>,
    /// When each condition was last seen.
    pub conditions: BTreeMap<NodeCondition, Moment>,
}

/// How the node stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Assessment {
    /// The thresholds that are met, by their place in the list.
    pub met: Vec<usize>,
    /// Those of them that have been met for their whole grace period; memory first.
    pub actionable: Vec<usize>,
    /// The conditions that the met thresholds stand for.
    pub conditions: Vec<NodeCondition>,
}

impl Tracker {
    /// Holds the observations against the thresholds. A signal without an observation is not low.
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

    /// The conditions to report: those seen within `transition` before `now`, so that they don't flap.
    #[must_use]
    pub fn reported(&self, now: Moment, transition: Duration) -> Vec<NodeCondition> {
        let recent = |at: &Moment| now < at.plus(transition);
        self.conditions.iter().filter(|(_, at)| recent(at)).map(|(condition, _)| *condition).collect()
    }
}

/// What a pod uses. What isn't known counts as nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PodUsage {
    /// Memory that can't be given back at once.
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
    /// Part of what its volumes have could not be measured, as a container has put it too deep. Where the
    /// disk of volumes is low it ranks as a pod of which nothing is known.
    pub hides_disk: bool,
}

/// A kind of what a pod has on disk.
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

    /// The kinds that count when the signal is low, which depends on what shares the filesystem that is full;
    /// none where the signal is not about a disk.
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
    /// The usage that counts when the signal is low.
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

/// A pod that might go.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    /// What it asked for.
    pub demand: PodDemand<'a>,
    /// Its priority; 0 if it has none.
    pub priority: i32,
    /// It is critical: it has its place in the ranking, but never goes.
    pub critical: bool,
    /// The pod is on its way out already, and gently: deleted, or evicted under a soft threshold.
    pub leaving: bool,
    /// What it uses; `None` if there are no statistics for it, in which case it goes first.
    pub usage: Option<PodUsage>,
}

impl Candidate<'_> {
    /// Its usage of what `signal` is about; `None` without statistics for that.
    fn known(&self, signal: Signal, layout: DiskLayout) -> Option<Quantity> {
        let counts = DiskPart::counted(signal, layout).contains(&DiskPart::Volumes);
        let usage = self.usage.filter(|usage| !(counts && usage.hides_disk))?;
        Some(usage.of(signal, layout))
    }

    /// Its usage, the request for what `signal` is about, and whether it is above that; `None` without
    /// statistics. Requests for process ids don't exist.
    fn against_request(&self, signal: Signal, layout: DiskLayout) -> Option<(Quantity, Quantity, bool)> {
        let usage = self.known(signal, layout)?;
        // With inodes the kubelet subtracts the request for bytes all the same: kept, the order is part of
        // the contract.
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

/// The pods' places in `pods`, first to go first.
///
/// Memory and disk: pods without statistics, or that hide what they have on a disk, then those above their
/// request, each group by priority, then those on their way out, then by how far they are above. Process ids:
/// by priority, then those on their way out, then by how many they use. Ties keep the order of `pods`.
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

/// The pod to evict: the first in the ranking that isn't critical.
#[must_use]
pub fn victim(ranked: &[usize], pods: &[Candidate<'_>]) -> Option<usize> {
    ranked.iter().copied().find(|i| pods.get(*i).is_some_and(|pod| !pod.critical))
}

/// The amount that must be freed before a threshold is no longer met, its minimum reclaim included; zero if
/// it isn't met.
#[must_use]
pub fn deficit(threshold: &Threshold, seen: &Observation) -> Quantity {
    let more = threshold.min_reclaim.map_or(Quantity::ZERO, |more| more.of(seen.capacity));
    let wanted = threshold.value.of(seen.capacity) + more;
    wanted.saturating_sub(seen.available).max(Quantity::ZERO)
}

/// A pod is worth evicting if that frees at least one part in so many of what is missing.
const WORTH: i128 = 100;

/// Returns true if a pod's end helps, if it frees so much: more than next to nothing of what is missing.
#[must_use]
pub fn is_worth_it(frees: Quantity, missing: Quantity) -> bool {
    frees > Quantity::ZERO && i128::from(frees.value()) * WORTH >= i128::from(missing.value())
}

/// Returns true if the room that a pod's end was expected to give has come: half of it at least, since others
/// write meanwhile, and more than next to nothing of what is missing. `from` is what was available when the
/// pod was told to go. Where nothing is known of what it had, this never says so.
#[must_use]
pub fn has_come(expected: Quantity, from: Quantity, available: Quantity, missing: Quantity) -> bool {
    let growth = available.saturating_sub(from);
    expected > Quantity::ZERO && growth + growth >= expected && is_worth_it(growth, missing)
}

/// The pods to evict at once, in the order of `ranked`, critical ones left out. `leaving` says that somebody
/// is on the way out already; `missing` is what those won't free.
///
/// The kubelet ends one pod, looks again, ends the next. Several go at once only where together they free
/// what is missing, and then only those that this takes: nobody who frees next to nothing while others free
/// enough, and nobody whose place in the ranking comes before others that must go in any case and free enough
/// without it. Where the pods can't free what is missing (it is held by something else), or one of them has
/// no statistics, one goes at a time: of those worth it the first, else the first of all. Nobody does while
/// another one is leaving: what that frees must be seen first.
///
/// A pod that leaves gently loses its grace period by being chosen. Below its request it never does so while
/// a pod above its own, which would free something, stays.
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
        // What comes after a pod without statistics waits until it is seen what that has freed.
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
    // The pod that gives least stays first, but for those that would lose their grace.
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
