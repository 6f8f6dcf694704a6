//! The agent's ways to the machine, which tests replace.

use std::{sync::Arc, time::Duration};

use super::facts::Machine;
use beelet_base::filesystem::Space;
use beelet_cgroups::Cgroups;
use beelet_cri::Runtime;
use beelet_devices::Store;
use beelet_eviction::gauges::Gauge;
use beelet_pods::qos_tree;

/// The agent's ways to the machine. Missing ones are opened on this machine.
#[derive(Debug)]
pub struct Doors {
    /// The container runtime, driven by this agent alone. If None, the agent acquires the runtime's lock
    /// itself.
    pub runtime: Option<Runtime>,
    /// True to search a `runtime` from here for the pods of a kubelet, as the agent searches its own.
    pub search_kubelet: bool,
    /// The cgroup tree.
    pub cgroups: Option<Arc<Cgroups>>,
    /// The machine's size and address.
    pub machine: Option<Machine>,
    /// File of the device checkpoint.
    pub checkpoint: Option<Arc<dyn Store>>,
    /// Measures file systems, for image garbage collection and for eviction.
    pub space: Space,
    /// Eviction's gauges other than those of file systems: memory and process ids.
    pub gauges: Option<Vec<Gauge>>,
    /// True if the process belongs to the agent, which then sets its umask, limits and OOM score.
    pub own_process: bool,
    /// Interval of comparisons of the pods' cgroups with their intended values.
    pub cgroup_check: Duration,
    /// Interval of searches for orphaned pod folders.
    pub orphan_check: Duration,
    /// Interval of checks that the volumes of running pods are intact.
    pub volume_check: Duration,
}

impl Default for Doors {
    fn default() -> Self {
        Self {
            runtime: None,
            search_kubelet: false,
            cgroups: None,
            machine: None,
            checkpoint: None,
            space: Space::by_statvfs(),
            gauges: None,
            own_process: true,
            cgroup_check: qos_tree::CHECK,
            orphan_check: Duration::from_secs(60),
            volume_check: beelet_volumes::CHECK_PERIOD,
        }
    }
}
