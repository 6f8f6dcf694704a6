//! The node's identity at the API server: files, metrics, and connections with this identity.

use std::{path::PathBuf, sync::atomic::AtomicU64};

use beelet_base::{blocking::blocking, kubelet_counter::KubeletCounter};
use prometheus_client::{
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};
use tokio::sync::watch;

use crate::{kubeconfig, presence::Presence, requests};

/// Label set of a metric without labels that may be absent.
pub(crate) type Unlabelled = Vec<(String, String)>;

/// Metrics of the identity, with the kubelet's names.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Absent without a certificate.
    pub(crate) ttl: Family<Unlabelled, Gauge<f64, AtomicU64>>,
    pub(crate) errors: KubeletCounter,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Seconds until the client certificate expires; below zero if it has";
        registry.register("kubelet_certificate_manager_client_ttl_seconds", help, self.ttl.clone());
        let help = "Failed requests for a new client certificate";
        registry.register(
            "kubelet_certificate_manager_client_expiration_renew_errors",
            help,
            self.errors.clone(),
        );
    }
}

/// Files of the identity and settings of its renewal.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kubeconfig.
    pub kubeconfig: PathBuf,
    /// The bootstrap kubeconfig, for a node whose certificate is missing or expired.
    pub bootstrap: Option<PathBuf>,
    /// Folder of the node's certificates.
    pub cert_dir: PathBuf,
    /// The node's name.
    pub node_name: String,
    /// True to renew the certificate before it expires.
    pub rotate: bool,
    /// Metrics of the identity.
    pub metrics: Metrics,
    /// Metrics of all requests.
    pub requests: requests::Metrics,
    /// Record of the results of all requests.
    pub presence: Presence,
}

/// Opens connections that share nothing with others.
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

    /// Returns the record of results of requests through these connections.
    pub(crate) fn presence(&self) -> Presence {
        self.presence.clone()
    }

    /// Opens a connection. Must be called on a thread of the runtime that serves the connection; reads files.
    ///
    /// # Errors
    /// The kubeconfig is unusable.
    pub async fn open(&mut self) -> Result<kube::Client, kubeconfig::Error> {
        self.changes.mark_unchanged();
        let (path, requests) = (self.kubeconfig.clone(), self.requests.clone());
        blocking("the kubeconfig", move || kubeconfig::client(&path, &requests)).await
    }

    /// Waits until the identity has changed since the last [`Self::open`].
    pub async fn outdated(&mut self) {
        if self.changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
