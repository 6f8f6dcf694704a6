//! The conditions of a node under pressure, and the reasons of pods that went for it.

use std::collections::BTreeSet;

use beelet_policy::eviction::NodeCondition;

/// The reason of a pod that made room for a critical one, as the kubelet has it.
pub const PREEMPTING: &str = "Preempting";

/// The reason of a pod that went, or wasn't let in, because the node is short of something.
pub const EVICTED: &str = "Evicted";

/// What the node is short of.
pub type Conditions = BTreeSet<NodeCondition>;
