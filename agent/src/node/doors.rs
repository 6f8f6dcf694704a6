//! The agent's ways to the machine, which tests replace.

use std::{sync::Arc, time::Duration};

use super::facts::Machine;
use beelet_base::filesystem::Space;
use beelet_cgroups::Cgroups;
use beelet_cri::Runtime;
use beelet_devices::Store;
use beelet_eviction::gauges::Gauge;
use beelet_pods::{qos_tree, refresh};

/// The agent's ways to the machine. Where nothing is given, the machine's own is opened.
#[derive(Debug)]
pub struct Doors {
    /// The container runtime, driven by this agent alone. Without it the agent takes the runtime's lock
    /// itself.
    pub runtime: Option<Runtime>,
    /// The cgroup tree.
    pub cgroups: Option<Arc<Cgroups>>,
    /// The machine's size and address.
    pub machine: Option<Machine>,
    /// The file of the device checkpoint.
    pub checkpoint: Option<Arc<dyn Store>>,
    /// Measures file systems, for the collection of images and for eviction.
    pub space: Space,
    /// Eviction's gauges beside those of file systems: memory and process ids.
    pub gauges: Option<Vec<Gauge>>,
    /// This process is the agent's alone: its umask, its limits and its OOM score are set.
    pub own_process: bool,
    /// The time between two comparisons of the pods' cgroups with what they should hold.
    pub cgroup_check: Duration,
    /// The time between two searches for orphaned pod folders.
    pub orphan_check: Duration,
    /// The time between two checks that the volumes of running pods are whole.
    pub volume_check: Duration,
}

impl Default for Doors {
    fn default() -> Self {
        Self {
            runtime: None,
            cgroups: None,
            machine: None,
            checkpoint: None,
            space: Space::by_statvfs(),
            gauges: None,
            own_process: true,
            cgroup_check: qos_tree::CHECK,
            orphan_check: Duration::from_secs(60),
            volume_check: refresh::CHECKED,
        }
    }
}
