//! What each pod uses: memory and processes from its cgroup, disk from the last time it was measured.

use std::sync::Arc;

use beelet_policy::{
    cgroups::{CgroupConfig, pod_path},
    eviction::{PodUsage, Signal},
    qos::qos_class,
    quantity::Quantity,
    resources::{EPHEMERAL_STORAGE, MEMORY, ResourceList},
};
use k8s_openapi::api::core::v1 as core;

use super::disk::DiskUsages;
use crate::cgroups::Cgroups;

/// Asks for what pods use. Clones ask the same.
#[derive(Clone, Debug)]
pub struct PodUsages {
    /// The cgroup tree.
    pub cgroups: Arc<Cgroups>,
    /// How cgroups are named.
    pub config: CgroupConfig,
    /// What was measured of disks.
    pub disk: DiskUsages,
}

impl PodUsages {
    /// What the pod uses now; None if that can't be read. A pod without a cgroup uses nothing yet. Blocks for a moment.
    pub(super) fn of(&self, pod: &core::Pod) -> Option<PodUsage> {
        let uid = pod.metadata.uid.as_deref()?;
        let path = pod_path(Some(uid), qos_class(pod).ok()?, &self.config).ok()?;
        let (memory, pids) = match self.cgroups.memory_use(&path) {
            Some(memory) => (memory.working_set, self.cgroups.pids_use(&path).unwrap_or(0)),
            None if self.cgroups.exists(&path) => return None,
            None => (0, 0),
        };
        let disk = self.disk.of(uid);
        Some(PodUsage { memory_working_set_bytes: memory, pids, ..disk })
    }

    /// Each container with what it uses of a signal's resource and what it requested. Empty where that isn't told apart.
    pub(super) fn containers(&self, pod: &core::Pod, signal: Signal) -> Vec<(String, Quantity, Quantity)> {
        let Some(uid) = pod.metadata.uid.as_deref() else { return Vec::new() };
        let whole = |n: u64| Quantity::from_units(i64::try_from(n).unwrap_or(i64::MAX));
        let resource = signal.resource();
        let usage = |name: &str| match resource {
            MEMORY => {
                let path = pod_path(Some(uid), qos_class(pod).ok()?, &self.config).ok()?;
                let id = container_id(pod, name)?;
                Some(whole(self.cgroups.memory_use(&format!("{path}/{id}"))?.working_set))
            }
            EPHEMERAL_STORAGE => Some(whole(self.disk.container(uid, name)?)),
            _ => None,
        };
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        containers
            .filter_map(|container| {
                let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
                let request = ResourceList::read(requests).ok()?.amount(resource);
                Some((container.name.clone(), usage(&container.name)?, request))
            })
            .collect()
    }
}

/// The runtime's id of a container, which is its cgroup's name.
fn container_id<'p>(pod: &'p core::Pod, name: &str) -> Option<&'p str> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let id = statuses.iter().find(|status| status.name == name)?.container_id.as_deref()?;
    Some(id.split_once("://")?.1)
}
