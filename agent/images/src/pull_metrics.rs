//! The kubelet's metrics of requests for images and of the records of their credentials.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Result of the check whether a pod may use an image on the node, in the kubelet's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// The policy needs no credentials.
    PolicyAllows,
    /// A record grants access.
    RecordFound,
    /// The pod must pull the image.
    MustAuthenticate,
    /// The record cannot be read.
    Error,
}

/// Facts about a request for an image; `None`: unknown.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Request {
    /// The image is on the node.
    pub(super) is_here: Option<bool>,
    /// The image must be pulled.
    pub(super) must_pull: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckLabel {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabel {
    pull_policy: &'static str,
    present_locally: &'static str,
    pull_required: &'static str,
}

/// Counters and gauges; clones share them.
#[derive(Clone, Debug, Default)]
pub struct PullMetrics {
    requests: Family<RequestLabel, Counter>,
    checks: Family<CheckLabel, Counter>,
    pulling: Gauge,
    pulled: Gauge,
}

impl PullMetrics {
    /// Adds all of them to `registry`.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_image_manager_ensure_image_requests",
            "Requests of containers for images, by pull policy, presence on the node and need of a pull",
            self.requests.clone(),
        );
        registry.register(
            "kubelet_imagemanager_image_mustpull_checks",
            "Checks whether a pod may use an image on the node, by result",
            self.checks.clone(),
        );
        registry.register(
            "kubelet_imagemanager_ondisk_pullintents",
            "Records of pulls under way, on the disk",
            self.pulling.clone(),
        );
        registry.register(
            "kubelet_imagemanager_ondisk_pulledrecords",
            "Records of the credentials that images were pulled with, on the disk",
            self.pulled.clone(),
        );
    }

    /// Counts a request with this pull policy.
    pub(super) fn requested(&self, policy: &str, request: Request) {
        let pull_policy = match policy {
            "Always" => "always",
            "Never" => "never",
            _ => "ifnotpresent",
        };
        let word =
            |known: Option<bool>| known.map_or("unknown", |known| if known { "true" } else { "false" });
        let (present_locally, pull_required) = (word(request.is_here), word(request.must_pull));
        let label = RequestLabel { pull_policy, present_locally, pull_required };
        self.requests.get_or_create(&label).inc();
    }

    /// Counts a check.
    pub(super) fn checked(&self, check: Check) {
        let result = match check {
            Check::PolicyAllows => "credentialPolicyAllowed",
            Check::RecordFound => "credentialRecordFound",
            Check::MustAuthenticate => "mustAuthenticate",
            Check::Error => "error",
        };
        self.checks.get_or_create(&CheckLabel { result }).inc();
    }

    /// Sets the numbers of records of pulls under way, and of completed pulls.
    pub(super) fn recorded(&self, pulling: usize, pulled: usize) {
        self.pulling.set(i64::try_from(pulling).unwrap_or(i64::MAX));
        self.pulled.set(i64::try_from(pulled).unwrap_or(i64::MAX));
    }
}
