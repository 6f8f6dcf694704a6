//! First processes of containers and sandboxes, by which an exit from the kernel is matched to a container.

use std::{collections::BTreeMap, sync::Arc};

/// Owner of a first process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// UID of the pod.
    pub uid: String,
    /// Identifier of the container or sandbox at the runtime.
    pub id: String,
    /// True for a sandbox.
    pub sandbox: bool,
    /// Cgroup, as named by [`beelet_cgroups`]. Empty for a sandbox.
    pub cgroup: String,
}

/// First processes by process id on the host. A new map shares most entries with the previous one.
pub type Processes = BTreeMap<u32, Arc<Process>>;

/// Value of a watch channel of [`Processes`], replaced at each change.
pub type Shared = Arc<Processes>;
