//! Conditions of a node under pressure, and reasons of pods that were ended for it.

use std::collections::BTreeSet;

use beelet_policy::eviction::NodeCondition;

/// Reason of a pod that was preempted for a critical one, as in the kubelet.
pub const PREEMPTING: &str = "Preempting";

/// Reason of a pod that was evicted or rejected because the node is under pressure.
pub const EVICTED: &str = "Evicted";

/// Present pressure conditions of the node.
pub type Conditions = BTreeSet<NodeCondition>;
