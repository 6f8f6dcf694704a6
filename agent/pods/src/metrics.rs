//! What the pods' half tells of itself.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use beelet_model::table::PodTable;

/// The state of a container, as the kubelet's metric has it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ContainerStateLabel {
    container_state: &'static str,
}

/// Counters and gauges; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    desired_pods: Gauge,
    running_pods: Gauge,
    running_containers: Family<ContainerStateLabel, Gauge>,
    /// Manifests that could not become a pod.
    pub rejected_manifests: Gauge,
    /// Writes of the durable pod records that failed.
    pub state_write_errors: Counter,
}

impl Metrics {
    /// Adds all of them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_desired_pods",
            "Pods that this node should run",
            self.desired_pods.clone(),
        );
        registry.register("kubelet_running_pods", "Pods in phase Running", self.running_pods.clone());
        registry.register(
            "kubelet_running_containers",
            "Containers by state: running, waiting or exited",
            self.running_containers.clone(),
        );
        registry.register(
            "beelet_rejected_manifests",
            "Files in the static pod folder that could not become a pod",
            self.rejected_manifests.clone(),
        );
        registry.register(
            "beelet_pod_records_write_errors",
            "Failed writes of the durable pod records",
            self.state_write_errors.clone(),
        );
    }

    /// Counts what the table shows.
    pub fn observe(&self, table: &PodTable) {
        let mut running_pods = 0;
        let (mut running, mut waiting, mut exited) = (0, 0, 0);
        for status in table.pods.values().filter_map(|entry| entry.pod.status.as_ref()) {
            running_pods += i64::from(status.phase.as_deref() == Some("Running"));
            for state in status.container_statuses.iter().flatten().filter_map(|c| c.state.as_ref()) {
                running += i64::from(state.running.is_some());
                waiting += i64::from(state.waiting.is_some());
                exited += i64::from(state.terminated.is_some());
            }
        }
        self.desired_pods.set(i64::try_from(table.pods.len()).unwrap_or(i64::MAX));
        self.running_pods.set(running_pods);
        for (container_state, count) in [("running", running), ("waiting", waiting), ("exited", exited)] {
            self.running_containers.get_or_create(&ContainerStateLabel { container_state }).set(count);
        }
    }
}
