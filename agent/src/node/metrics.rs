//! Every part's counters, made before the parts are: the metrics page is served from the start.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::sync::watch;

use super::protection;
use beelet_cgroups::Cgroups;
use beelet_cri::Runtime;
use beelet_pleg::{exits, relist};
use beelet_pods::qos_tree;

/// The counters of all parts. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// The pods' manager and its workers.
    pub pods: beelet_pods::metrics::Metrics,
    /// The keeper of the pods' cgroups.
    pub qos_tree: qos_tree::Metrics,
    /// What keeps the node in its cluster.
    pub cluster: beelet_cluster::Metrics,
    pub(super) tuner: beelet_tuner::Metrics,
    /// What the tuner shows: the API is there before the tuner is.
    pub(super) tuner_view: watch::Sender<Arc<beelet_tuner::View>>,
    pub(super) probes: beelet_probes::Metrics,
    pub(super) relist: relist::Metrics,
    pub(super) devices: beelet_devices::Metrics,
    pub(super) exits: exits::Metrics,
    pub(super) protection: protection::Metrics,
}

impl Metrics {
    pub(super) fn registry(&self, runtime: &Runtime, cgroups: &Cgroups) -> Registry {
        let mut registry = Registry::default();
        self.pods.register(&mut registry);
        self.qos_tree.register(&mut registry);
        self.cluster.register(&mut registry);
        self.tuner.register(&mut registry);
        self.probes.register(&mut registry);
        self.relist.register(&mut registry);
        self.devices.register(&mut registry);
        self.exits.register(&mut registry);
        self.protection.register(&mut registry);
        runtime.register_metrics(&mut registry);
        cgroups.metrics().register(&mut registry);
        registry
    }
}
