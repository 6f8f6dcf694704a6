//! The node's identity at the API server: its files, its counters, and connections by it.

use std::{path::PathBuf, sync::atomic::AtomicU64};

use beelet_base::{blocking::blocking, kubelet_counter::KubeletCounter};
use prometheus_client::{
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};
use tokio::sync::watch;

use crate::{kubeconfig, presence::Presence, requests};

/// The labels of a metric that may be absent.
pub(crate) type Unlabelled = Vec<(String, String)>;

/// Counters of the identity; their names are the kubelet's.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Absent without a certificate.
    pub(crate) ttl: Family<Unlabelled, Gauge<f64, AtomicU64>>,
    pub(crate) errors: KubeletCounter,
}

impl Metrics {
    /// Adds them to the registry.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Seconds until the client certificate expires; below zero if it has";
        registry.register("kubelet_certificate_manager_client_ttl_seconds", help, self.ttl.clone());
        let help = "Requests for a new client certificate that failed";
        registry.register(
            "kubelet_certificate_manager_client_expiration_renew_errors",
            help,
            self.errors.clone(),
        );
    }
}

/// The files of the identity, and the way to get and keep it.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kubeconfig.
    pub kubeconfig: PathBuf,
    /// One whose identity may ask for the node's, where that is missing or expired.
    pub bootstrap: Option<PathBuf>,
    /// The folder of the node's certificates.
    pub cert_dir: PathBuf,
    /// The node's name.
    pub node_name: String,
    /// Ask for a new certificate before the old one expires.
    pub rotate: bool,
    /// Counters of the identity.
    pub metrics: Metrics,
    /// Counters of all requests.
    pub requests: requests::Metrics,
    /// Learns the outcome of all requests.
    pub presence: Presence,
}

/// Makes connections that share nothing with others.
#[derive(Clone, Debug)]
pub struct Connections {
    kubeconfig: PathBuf,
    changes: watch::Receiver<u64>,
    requests: requests::Metrics,
    presence: Presence,
}

impl Connections {
    pub(crate) fn new(options: &Options, changes: &watch::Sender<u64>) -> Self {
        let (kubeconfig, requests) = (options.kubeconfig.clone(), options.requests.clone());
        Self { kubeconfig, changes: changes.subscribe(), requests, presence: options.presence.clone() }
    }

    /// Learns the outcome of requests through these connections.
    pub(crate) fn presence(&self) -> Presence {
        self.presence.clone()
    }

    /// Opens a new one. Must be called on the threads of the runtime that is to serve it; reads files.
    ///
    /// # Errors
    /// The kubeconfig can't be used.
    pub async fn open(&mut self) -> Result<kube::Client, kubeconfig::Error> {
        self.changes.mark_unchanged();
        let (path, requests) = (self.kubeconfig.clone(), self.requests.clone());
        blocking("the kubeconfig", move || kubeconfig::client(&path, &requests)).await
    }

    /// Waits until the connections of before stand for an identity that is no more.
    pub async fn outdated(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
