//! Wanted values of the node's cgroups, computed from the pods on the node. Pure.

use beelet_model::pod::running;
use std::{collections::BTreeMap, sync::Arc};

use beelet_policy::resources::cgroups::{
    CgroupConfig, CgroupValues, ContainerResources, container_cgroup, container_resources, pod_cgroup,
};
use k8s_openapi::api::core::v1 as core;

use super::{Values, values};
use crate::error::Error;
use beelet_model::table::{PodChanges, PodEntry, PodName, PodTable, Pods};
use beelet_spec::definition::awaits_restart;

/// Wanted values of all cgroups.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Wanted {
    /// Values of the cgroups above containers.
    pub(super) levels: Values,
    /// Values of running containers, by the runtime's identifier.
    pub(super) containers: BTreeMap<String, WantedContainer>,
}

/// Wanted values of a running container.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WantedContainer {
    /// Name of the pod.
    pub(super) pod: PodName,
    /// Name of the container in the pod.
    pub(super) name: String,
    /// Cgroup of the pod.
    pub(super) parent: String,
    /// Values by file of the container's cgroup.
    pub(super) files: BTreeMap<String, String>,
    /// The same values as resources for the runtime.
    pub(super) resources: ContainerResources,
}

impl Wanted {
    /// Returns the wanted values for the pods of `table` that have not ended.
    ///
    /// # Errors
    /// A pod has an invalid resource amount.
    pub(super) fn of(
        table: &PodTable,
        config: &CgroupConfig,
        reserved: &[CgroupValues],
    ) -> Result<Self, Error> {
        let here = table.pods.values().filter(|entry| entry.ended().is_none());
        let pods: Vec<&core::Pod> = here.map(|entry| &entry.pod).collect();
        let levels = values(&pods, config)?;
        let mut wanted = Self { levels, ..Self::default() };
        let daemons = reserved.iter().map(|cgroup| (cgroup.path.clone(), cgroup.files.clone()));
        wanted.levels.extend(daemons);
        for pod in pods {
            let in_pod =
                |e: beelet_units::field::FieldError| Error::Spec(format!("{}: {e}", PodName::of(pod)));
            let cgroup = pod_cgroup(pod, config).map_err(in_pod)?;
            // A container that needs a restart for new amounts keeps its current amounts until then.
            for (id, container) in running(pod).filter(|(_, container)| !awaits_restart(pod, container)) {
                let container = WantedContainer {
                    pod: PodName::of(pod),
                    name: container.name.clone(),
                    parent: cgroup.path.clone(),
                    files: container_cgroup(pod, container, config).map_err(in_pod)?.files,
                    resources: container_resources(pod, container, config).map_err(in_pod)?,
                };
                wanted.containers.insert(id.to_owned(), container);
            }
            wanted.levels.insert(cgroup.path, cgroup.files);
        }
        Ok(wanted)
    }
}

/// Returns true if these changes certainly leave the wanted values unchanged, because only the readiness of
/// pods has changed.
pub(super) fn is_same(before: &Pods, changes: &PodChanges<'_>) -> bool {
    let same = |(name, now): &(&PodName, &Arc<PodEntry>)| {
        before.get(*name).is_some_and(|before| without_readiness(&before.pod) == without_readiness(&now.pod))
    };
    changes.gone.is_empty() && changes.changed.iter().all(same)
}

fn without_readiness(pod: &core::Pod) -> core::Pod {
    let mut pod = pod.clone();
    if let Some(status) = &mut pod.status {
        status.conditions = None;
        for container in status.container_statuses.iter_mut().flatten() {
            (container.ready, container.started) = (false, None);
        }
    }
    pod
}

#[cfg(test)]
mod tests {
    use beelet_policy::resources::cgroups::{CgroupVersion, NodeAmounts};
    use serde_json::json;

    use super::*;

    fn unchanged(before: &PodTable, now: &PodTable) -> bool {
        is_same(&before.pods, &PodChanges::between(&before.pods, &now.pods))
    }

    fn table(pods: &[serde_json::Value]) -> PodTable {
        let entry = |value: &serde_json::Value| {
            let pod: core::Pod = serde_json::from_value(value.clone()).unwrap();
            (PodName::of(&pod), Arc::new(PodEntry::of(pod)))
        };
        PodTable { pods: pods.iter().map(entry).collect(), ..PodTable::default() }
    }

    fn config() -> CgroupConfig {
        let node =
            NodeAmounts { memory_capacity: 1 << 33, allocatable_millis: 4000, allocatable_memory: 1 << 33 };
        CgroupConfig::new(CgroupVersion::V1, node)
    }

    fn pod(name: &str, phase: &str, state: &str) -> serde_json::Value {
        json!({
            "metadata": {"name": name, "uid": name},
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "500m"}}}]},
            "status": {"phase": phase, "containerStatuses": [{
                "name": "main", "containerID": format!("containerd://id-{name}"), "image": "", "imageID": "",
                "ready": true, "restartCount": 0, "state": {state: {"startedAt": null, "exitCode": 0}},
            }]},
        })
    }

    #[test]
    fn running_containers_of_pods_that_have_not_ended_are_kept() {
        let table = table(&[
            pod("a", "Running", "running"),
            pod("b", "Running", "waiting"),
            pod("c", "Failed", "terminated"),
        ]);
        let wanted = Wanted::of(&table, &config(), &[]).unwrap();
        let levels: Vec<&str> = wanted.levels.keys().map(String::as_str).collect();
        assert_eq!(
            levels,
            [
                "/kubepods",
                "/kubepods/besteffort",
                "/kubepods/burstable",
                "/kubepods/burstable/poda",
                "/kubepods/burstable/podb"
            ]
        );
        assert_eq!(wanted.levels["/kubepods/burstable"]["cpu.shares"], "1024");
        let containers: Vec<_> =
            wanted.containers.iter().map(|(id, c)| (id.as_str(), c.parent.as_str())).collect();
        assert_eq!(containers, [("id-a", "/kubepods/burstable/poda")]);
        assert_eq!(wanted.containers["id-a"].files["cpu.shares"], "512");
    }

    #[test]
    fn readiness_leaves_wanted_values_unchanged_and_other_changes_may_not() {
        let one = pod("a", "Running", "running");
        let mut other = one.clone();
        other["status"]["containerStatuses"][0]["ready"] = json!(false);
        other["status"]["conditions"] = json!([{ "type": "Ready", "status": "False" }]);
        assert!(unchanged(&table(std::slice::from_ref(&one)), &table(std::slice::from_ref(&other))));
        other["status"]["containerStatuses"][0]["containerID"] = json!("containerd://another");
        for unlike in [vec![other], vec![], vec![one.clone(), pod("b", "Running", "running")]] {
            assert!(!unchanged(&table(std::slice::from_ref(&one)), &table(&unlike)), "{unlike:?}");
        }
        assert!(!unchanged(&table(&[one]), &table(&[pod("b", "Running", "running")])));
    }

    #[test]
    fn reserved_cgroups_have_wanted_values_too() {
        let reserved = CgroupValues {
            path: "/system".to_owned(),
            files: BTreeMap::from([("cpu.shares".to_owned(), "512".to_owned())]),
        };
        let wanted = Wanted::of(&table(&[]), &config(), &[reserved]).unwrap();
        assert_eq!(wanted.levels["/system"]["cpu.shares"], "512");
    }
}
