//! The first processes of what runs: how an exit that the kernel reports is known to be a container's end.

use std::{collections::BTreeMap, sync::Arc};

/// What a first process belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The pod's UID.
    pub uid: String,
    /// The runtime's identifier of the container, or of the sandbox.
    pub id: String,
    /// True for a sandbox.
    pub sandbox: bool,
    /// Its cgroup, as [`beelet_cgroups`] names it. Empty for a sandbox.
    pub cgroup: String,
}

/// By process id on the host. Most of one are of the one before, and shared with it.
pub type Processes = BTreeMap<u32, Arc<Process>>;

/// What a watch channel of [`Processes`] carries: replaced whole at each change.
pub type Shared = Arc<Processes>;
