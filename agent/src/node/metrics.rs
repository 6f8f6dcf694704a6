//! Metrics of all parts, created before the parts: the metrics page is served from the start.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};

use super::own_use::OwnUse;
use beelet_cgroups::{Cgroups, Version};
use beelet_cluster::node::KUBELET_VERSION;
use beelet_cri::Runtime;
use beelet_images::containers;
use beelet_pleg::{exits, relist};
use beelet_pods::qos_tree;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NodeLabel {
    node: String,
}

/// Labels of the build's version.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabel {
    git_version: &'static str,
    major: &'static str,
    minor: &'static str,
    platform: String,
}

impl Default for BuildLabel {
    fn default() -> Self {
        let platform = format!("linux/{}", beelet_policy::node::status::architecture(std::env::consts::ARCH));
        let (major, minor) = KUBELET_VERSION
            .strip_prefix('v')
            .and_then(|version| version.split_once('.'))
            .map_or(("", ""), |(major, rest)| (major, rest.split('.').next().unwrap_or_default()));
        Self { git_version: KUBELET_VERSION, major, minor, platform }
    }
}

/// Metrics of all parts. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// The pods' manager and its workers.
    pub pods: beelet_pods::metrics::Metrics,
    /// The keeper of the pods' cgroups.
    pub qos_tree: qos_tree::Metrics,
    /// The parts of the cluster.
    pub cluster: beelet_cluster::Metrics,
    pub(super) tuner: beelet_tuner::Metrics,
    pub(super) probes: beelet_probes::Metrics,
    pub(super) relist: relist::Metrics,
    pub(super) devices: beelet_devices::Metrics,
    pub(super) pinning: beelet_pinning::Metrics,
    pub(super) volumes: beelet_volumes::Metrics,
    pub(super) csi: beelet_csi::Metrics,
    pub(super) dra: beelet_dra::Metrics,
    pub(super) exits: exits::Metrics,
    pub(super) admission: beelet_admission::Metrics,
    pub(super) images: beelet_images::Metrics,
    pub(super) dead_containers: containers::Metrics,
    pub(super) eviction: beelet_eviction::Metrics,
    pub(super) pod_resources: beelet_api::podresources::Metrics,
    pub(super) shutdown: beelet_shutdown::Metrics,
    pub(super) kubelet_api: beelet_kubelet_api::Metrics,
    node: Family<NodeLabel, Gauge>,
}

impl Metrics {
    /// Creates the metrics of the node of this name.
    pub(super) fn of_node(name: &str) -> Self {
        let metrics = Self::default();
        metrics.node.get_or_create(&NodeLabel { node: name.to_owned() }).set(1);
        metrics
    }

    pub(super) fn registry(&self, runtime: &Runtime, cgroups: &Cgroups) -> Registry {
        let mut registry = Registry::default();
        self.pods.register(&mut registry);
        self.volumes.register(&mut registry);
        self.qos_tree.register(&mut registry);
        self.cluster.register(&mut registry);
        self.tuner.register(&mut registry);
        self.probes.register(&mut registry);
        self.relist.register(&mut registry);
        self.devices.register(&mut registry);
        self.pinning.register(&mut registry);
        self.csi.register(&mut registry);
        self.dra.register(&mut registry);
        self.exits.register(&mut registry);
        self.admission.register(&mut registry);
        self.images.register(&mut registry);
        self.dead_containers.register(&mut registry);
        self.eviction.register(&mut registry);
        self.pod_resources.register(&mut registry);
        self.shutdown.register(&mut registry);
        self.kubelet_api.register(&mut registry);
        runtime.register_metrics(&mut registry);
        cgroups.metrics().register(&mut registry);
        registry.register("kubelet_node_name", "The node's name; always 1", self.node.clone());
        registry.register("kubelet_cgroup_version", "The cgroup version of the memory controller", {
            let version = Gauge::<i64>::default();
            version.set(if matches!(cgroups.paths.version(), Version::V2) { 2 } else { 1 });
            version
        });
        let build = Family::<BuildLabel, Gauge>::default();
        build.get_or_create(&BuildLabel::default()).set(1);
        registry.register("kubernetes_build_info", "The implemented version of Kubernetes; always 1", build);
        // Dashboards query this metric since the time of dynamic configuration.
        let help = "1 if the agent does not use the given configuration; it refuses to start instead";
        registry.register("kubelet_node_config_error", help, Gauge::<i64>::default());
        registry.register_collector(Box::new(OwnUse));
        registry
    }
}
