//! The use of exclusive CPUs, for people and monitors.

use std::collections::BTreeMap;

use beelet_model::table::PodName;
use beelet_policy::pinning::signals::Disturbance;

/// The last measurement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PinningReport {
    /// Containers with CPUs for themselves, by the pod's UID and the container's name.
    pub pinned: BTreeMap<(String, String), PinnedContainer>,
    /// Containers that would gain from pinning, and those that leave their CPUs idle, in words.
    pub advice: Vec<String>,
}

/// A container with CPUs for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinnedContainer {
    /// Its pod.
    pub pod: PodName,
    /// The CPUs as a list.
    pub cpus: String,
    /// Work of others on these CPUs over the last minute.
    pub disturbance: Disturbance,
}
