//! What probes tell of themselves, under the kubelet's name.

use std::sync::Arc;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

/// The labels of `prober_probe_total`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ProbeLabels {
    /// `Liveness`, `Readiness` or `Startup`.
    pub probe_type: &'static str,
    /// `successful`, `failed` or `unknown`.
    pub result: &'static str,
    /// The container's name.
    pub container: Arc<str>,
    /// The pod's name.
    pub pod: Arc<str>,
    /// The pod's namespace.
    pub namespace: Arc<str>,
}

/// Counters; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Looks, by probe and result.
    pub probes: Family<ProbeLabels, Counter>,
    /// Readiness changes that a kernel edge caused.
    pub edges: Counter,
}

impl Metrics {
    /// Adds all of them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("prober_probe", "Probes run, by kind and result", self.probes.clone());
        registry.register(
            "beelet_probe_kernel_edges",
            "Changes of a probe's state that a kernel event caused",
            self.edges.clone(),
        );
    }
}
