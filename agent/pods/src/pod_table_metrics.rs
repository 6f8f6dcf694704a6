//! Metrics of the pod table, computed at scrape time because the table changes more often than scrapes occur.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge},
};

use beelet_model::table::PodTable;
use beelet_spec::resize;
use beelet_volumes::{has_volumes, plugin_name};

/// The pod table for the next scrape, shared by clones.
#[derive(Clone, Debug, Default)]
pub(crate) struct PodTableMetrics(Arc<Mutex<Arc<PodTable>>>);

impl PodTableMetrics {
    /// Sets the pod table for the next scrape.
    pub(crate) fn show(&self, table: &Arc<PodTable>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(table);
    }

    fn table(&self) -> Arc<PodTable> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Collector for PodTableMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let table = self.table();
        let counts = Counts::of(&table);
        for (name, help, count) in [
            ("kubelet_running_pods", "Pods in phase Running", counts.running_pods),
            (
                "kubelet_managed_ephemeral_containers",
                "Ephemeral containers in the specs of pods on the node",
                counts.ephemeral,
            ),
            (
                "kubelet_pod_in_progress_resizes",
                "Resizes whose amounts are being applied",
                counts.in_progress,
            ),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(count).encode(metric)?;
        }
        let help = "Containers by state: running, waiting or exited";
        let name = "kubelet_running_containers";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (state, count) in counts.containers {
            ConstGauge::new(count).encode(family.encode_family(&[("container_state", state)])?)?;
        }
        let help = "Resizes that wait, by reason: deferred or infeasible";
        let mut family =
            encoder.encode_descriptor("kubelet_pod_pending_resizes", help, None, MetricType::Gauge)?;
        for (reason, count) in counts.pending {
            ConstGauge::new(count).encode(family.encode_family(&[("reason", reason)])?)?;
        }
        let help = "Volumes of pods by plugin and state (desired_state_of_world, actual_state_of_world)";
        let name = "volume_manager_total_volumes";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for ((plugin, state), count) in counts.volumes {
            let labels = [("plugin_name", plugin), ("state", state)];
            ConstGauge::new(count).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Counts {
    running_pods: i64,
    ephemeral: i64,
    /// Resizes in progress, and waiting ones by reason.
    in_progress: i64,
    pending: [(&'static str, i64); 2],
    containers: [(&'static str, i64); 3],
    /// By plugin and state.
    volumes: BTreeMap<(&'static str, &'static str), i64>,
}

impl Counts {
    fn of(table: &PodTable) -> Self {
        let (mut running_pods, mut ephemeral) = (0, 0);
        let (mut running, mut waiting, mut exited) = (0, 0, 0);
        let (mut in_progress, mut deferred, mut infeasible) = (0, 0, 0);
        let mut volumes = BTreeMap::new();
        for entry in table.pods.values() {
            if let Some(status) = &entry.pod.status {
                running_pods += i64::from(status.phase.as_deref() == Some("Running"));
                for state in status.container_statuses.iter().flatten().filter_map(|c| c.state.as_ref()) {
                    running += i64::from(state.running.is_some());
                    waiting += i64::from(state.waiting.is_some());
                    exited += i64::from(state.terminated.is_some());
                }
            }
            in_progress += i64::from(resize::is_in_progress(&entry.pod));
            match resize::pending_reason(&entry.pod) {
                Some("Deferred") => deferred += 1,
                Some("Infeasible") => infeasible += 1,
                _ => {}
            }
            let Some(spec) = &entry.pod.spec else { continue };
            let debuggers = spec.ephemeral_containers.as_ref().map_or(0, Vec::len);
            ephemeral += i64::try_from(debuggers).unwrap_or(i64::MAX);
            let wanted = !entry.ending && entry.ended().is_none();
            let states = [("desired_state_of_world", wanted), ("actual_state_of_world", has_volumes(entry))];
            for (state, _) in states.into_iter().filter(|(_, holds)| *holds) {
                for volume in spec.volumes.iter().flatten() {
                    *volumes.entry((plugin_name(volume), state)).or_default() += 1;
                }
            }
        }
        let containers = [("running", running), ("waiting", waiting), ("exited", exited)];
        let pending = [("deferred", deferred), ("infeasible", infeasible)];
        Self { running_pods, ephemeral, in_progress, pending, containers, volumes }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text::encode, registry::Registry};
    use serde_json::json;

    use super::*;
    use beelet_model::table::{PodEntry, PodName};

    #[test]
    fn pods_containers_and_volumes_are_counted() {
        let pod = |name: &str, sandbox: &str, phase: &str| {
            let pod = serde_json::from_value(json!({
                "metadata": {"name": name, "namespace": "shop", "uid": name},
                "spec": {"containers": [], "volumes": [{"name": "v", "emptyDir": {}}]},
                "status": {"phase": phase, "conditions": [
                    {"type": "PodReadyToStartContainers", "status": sandbox},
                    {"type": "PodResizePending", "status": "True", "reason": "Deferred"},
                    {"type": "PodResizeInProgress", "status": "True"},
                ]},
            }));
            let pod: k8s_openapi::api::core::v1::Pod = pod.unwrap();
            (PodName::of(&pod), Arc::new(PodEntry::of(pod)))
        };
        let pods =
            [pod("a", "True", "Running"), pod("b", "False", "Pending"), pod("c", "False", "Succeeded")];
        let metrics = PodTableMetrics::default();
        metrics.show(&Arc::new(PodTable { pods: pods.into_iter().collect(), ..PodTable::default() }));
        let mut registry = Registry::default();
        registry.register_collector(Box::new(metrics));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let plugin = "plugin_name=\"kubernetes.io/empty-dir\"";
        for line in [
            "kubelet_running_pods 1".to_owned(),
            "kubelet_running_containers{container_state=\"waiting\"} 0".to_owned(),
            "kubelet_pod_pending_resizes{reason=\"deferred\"} 3".to_owned(),
            "kubelet_pod_pending_resizes{reason=\"infeasible\"} 0".to_owned(),
            "kubelet_pod_in_progress_resizes 3".to_owned(),
            format!("volume_manager_total_volumes{{{plugin},state=\"actual_state_of_world\"}} 1"),
            format!("volume_manager_total_volumes{{{plugin},state=\"desired_state_of_world\"}} 2"),
        ] {
            assert!(text.lines().any(|one| one == line), "no {line} in\n{text}");
        }
    }
}
