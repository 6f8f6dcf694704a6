//! The pods for the tuner, from the pod table. Pure.

use std::{collections::BTreeMap, sync::Arc};

use beelet_policy::resources::{
    CPU, MEMORY, PodDemand,
    cgroups::{CgroupConfig, pod_path},
    critical::priority,
    qos::{QosClass, qos_class_of},
};

use beelet_model::{
    pod::running,
    table::{PodChanges, PodEntry, PodName, PodTable, Pods},
};

/// A pod with running containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// `namespace/name`.
    pub name: String,
    /// The pod's class.
    pub class: QosClass,
    /// The pod's cgroup.
    pub cgroup: String,
    /// Requested millicores.
    pub cpu_request: u64,
    /// Requested bytes.
    pub memory_request: u64,
    /// True if a CPU limit of its own may throttle one of its containers.
    pub is_limited: bool,
    /// The pod's priority.
    pub priority: i32,
    /// The pod's running containers.
    pub containers: Vec<TargetContainer>,
}

/// A running container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetContainer {
    /// The container's name in the pod.
    pub name: String,
    /// The runtime's identifier.
    pub id: String,
}

#[cfg(test)]
impl Target {
    /// Creates a Burstable pod without limits and containers, named after its cgroup.
    pub(super) fn burstable(cgroup: &str) -> Self {
        Self {
            name: cgroup.to_owned(),
            class: QosClass::Burstable,
            cgroup: cgroup.to_owned(),
            cpu_request: 0,
            memory_request: 0,
            is_limited: false,
            priority: 0,
            containers: Vec::new(),
        }
    }
}

/// The pods with running containers as of the last look at the table: parsing the amounts of all pods at each
/// tick would be most of a tick's cost.
#[derive(Debug, Default)]
pub(super) struct Targets {
    known: Pods,
    by_name: BTreeMap<PodName, Target>,
    all: Arc<[Target]>,
}

impl Targets {
    /// Returns the pods of this table, without those whose amounts are invalid: they cannot have started.
    pub(super) fn of(&mut self, table: &PodTable, config: &CgroupConfig) -> Arc<[Target]> {
        let known = std::mem::replace(&mut self.known, table.pods.clone());
        let PodChanges { changed, gone } = PodChanges::between(&known, &self.known);
        if !(changed.is_empty() && gone.is_empty()) {
            for (name, _) in gone {
                self.by_name.remove(name);
            }
            for (name, entry) in changed {
                match target(entry, config) {
                    Some(target) => self.by_name.insert(name.clone(), target),
                    None => self.by_name.remove(name),
                };
            }
            self.all = self.by_name.values().cloned().collect();
        }
        Arc::clone(&self.all)
    }
}

fn target(entry: &PodEntry, config: &CgroupConfig) -> Option<Target> {
    let pod = &entry.pod;
    let containers: Vec<TargetContainer> = running(pod)
        .map(|(id, container)| TargetContainer { name: container.name.clone(), id: id.to_owned() })
        .collect();
    if containers.is_empty() {
        return None;
    }
    let demand = PodDemand::read(pod).ok()?;
    let class = qos_class_of(pod, &demand);
    let requests = demand.requests();
    Some(Target {
        name: PodName::of(pod).to_string(),
        class,
        cgroup: pod_path(pod.metadata.uid.as_deref(), class, config).ok()?,
        cpu_request: u64::try_from(requests.amount(CPU).milli_value()).unwrap_or(0),
        memory_request: u64::try_from(requests.amount(MEMORY).value()).unwrap_or(0),
        is_limited: demand.limits().get(CPU).is_some(),
        priority: priority(pod),
        containers,
    })
}
