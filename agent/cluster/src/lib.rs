//! The node's side of the cluster protocol. No other crate knows of an API server: this crate has the only
//! client of it ([`client`]) and a kubelet's duties towards it: identity ([`connect`](mod@connect)),
//! heartbeat ([`lease`]), the Node object ([`node`]), events ([`events`]), and a drain
//! ([`drain`](mod@drain)).

pub mod accounts;
mod assigned;
pub mod autonomy;
mod backoff;
mod bootstrap;
pub mod certificate;
pub mod client;
pub mod connect;
mod credential;
pub mod csi_node;
pub mod drain;
pub mod error;
pub mod events;
mod held;
pub mod identity;
mod kept;
pub mod kubeconfig;
pub mod lease;
pub mod machine;
mod mirrors;
pub mod node;
mod objects;
pub mod presence;
pub mod requests;
pub mod resource_slices;
pub mod reviews;
pub mod rotation;
mod seal;
pub mod serving;
mod simulated;
mod status;
pub mod status_metrics;
pub mod storage;
#[cfg(test)]
mod testing;
mod tokens;
mod url;
mod watch;
pub mod workload;

pub use assigned::pods_of;

use prometheus_client::{metrics::gauge::Gauge, registry::Registry};

/// Metrics of all parts. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Events to the API server.
    pub events: events::Metrics,
    /// The node's lease.
    pub lease: lease::Metrics,
    /// The node's certificate.
    pub identity: identity::Metrics,
    /// The Node object.
    pub node: node::Metrics,
    /// The certificate of the node's server.
    pub serving: serving::Metrics,
    /// Requests to the API server.
    pub requests: requests::Metrics,
    /// Writes of pods' statuses.
    pub statuses: status_metrics::Metrics,
    /// Mirrors of static pods in the API server.
    pub mirrors: Gauge,
}

impl Metrics {
    /// Registers all metrics.
    pub fn register(&self, registry: &mut Registry) {
        self.events.register(registry);
        self.lease.register(registry);
        self.identity.register(registry);
        self.node.register(registry);
        self.serving.register(registry);
        self.requests.register(registry);
        self.statuses.register(registry);
        let help = "Mirrors of this node's static pods in the API server";
        registry.register("kubelet_mirror_pods", help, self.mirrors.clone());
    }
}
