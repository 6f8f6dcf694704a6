//! The pods that the tuner looks at, from the pod table. Pure.

use std::collections::BTreeMap;

use beelet_policy::{
    cgroups::{CgroupConfig, pod_path},
    critical::priority,
    qos::{QosClass, qos_class_of},
    resources::{CPU, MEMORY, PodDemand},
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
    /// Its class.
    pub class: QosClass,
    /// Its cgroup.
    pub cgroup: String,
    /// Millicores that it requests.
    pub cpu_request: u64,
    /// Bytes that it requests.
    pub memory_request: u64,
    /// A container of it may be held back by a CPU limit of its own.
    pub is_limited: bool,
    /// Its priority.
    pub priority: i32,
    /// Its running containers.
    pub containers: Vec<TargetContainer>,
}

/// A running container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetContainer {
    /// Its name in the pod.
    pub name: String,
    /// The runtime's identifier.
    pub id: String,
}

/// The pods with running containers, as they were when the table was last looked at: to read the amounts of
/// all anew at each tick would be most of what a tick costs.
#[derive(Debug, Default)]
pub(super) struct Targets {
    known: Pods,
    of: BTreeMap<PodName, Target>,
}

impl Targets {
    /// Those of this table. One whose amounts can't be read is left out: it can't have been started.
    pub(super) fn of(&mut self, table: &PodTable, config: &CgroupConfig) -> impl Iterator<Item = &Target> {
        let known = std::mem::replace(&mut self.known, table.pods.clone());
        let changes = PodChanges::between(&known, &self.known);
        for (name, _) in changes.gone {
            self.of.remove(name);
        }
        for (name, entry) in changes.changed {
            match target(entry, config) {
                Some(target) => self.of.insert(name.clone(), target),
                None => self.of.remove(name),
            };
        }
        self.of.values()
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
