//! Node pressure, reclaim and the ranking of pods for eviction: the kubelet's eviction manager
//! (`pkg/kubelet/eviction/{eviction_manager,helpers}.go`).
//!
//! Takes numbers and returns a decision. Must never measure, kill or keep state: the caller keeps the state
//! between decisions in [`Tracker`].

#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod local_storage;
mod memory_signal;
mod ranking;
mod swap;
mod threshold;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

pub use memory_signal::{FileCache, MemoryReading, MemorySignal, NeededCache};
pub use ranking::{Candidate, DiskPart, PodUsage, deficit, has_come, is_worth_it, rank, victim, victims};
pub use swap::{EvictionSwap, SwapOut, swap_out};
pub use threshold::{ThresholdValue, ValueError};

use serde::{Deserialize, Serialize};

use crate::resources;
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

    /// Returns true for the signals of memory.
    #[must_use]
    pub const fn is_memory(self) -> bool {
        matches!(self, Self::MemoryAvailable | Self::AllocatableMemoryAvailable)
    }

    const fn is_inodes(self) -> bool {
        matches!(self, Self::NodeFsInodesFree | Self::ImageFsInodesFree | Self::ContainerFsInodesFree)
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

#[cfg(test)]
mod tests;
