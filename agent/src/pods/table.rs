//! What the node runs, as everyone else sees it: one value, replaced whole at each change and
//! shared by reference. Readers hold a `watch::Receiver<Arc<PodTable>>` and never see half a change.

use std::{collections::BTreeMap, fmt, path::PathBuf, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

/// A pod's full name, unique on a node. Prints as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodName {
    /// The pod's namespace; `default` where the manifest names none.
    pub namespace: String,
    /// The pod's name, with the node's name behind it for static pods.
    pub name: String,
}

impl PodName {
    /// The name in a pod's metadata; a missing name is empty, a missing namespace `default`.
    pub fn of(pod: &Pod) -> Self {
        let meta = &pod.metadata;
        Self {
            namespace: meta.namespace.clone().unwrap_or_else(|| "default".to_owned()),
            name: meta.name.clone().unwrap_or_default(),
        }
    }
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// All pods of the node, and the manifests that could not become one.
#[derive(Clone, Debug, Default)]
pub struct PodTable {
    /// Every pod, terminating ones included. An entry stays the same `Arc` while nothing in it changes.
    pub pods: BTreeMap<PodName, Arc<PodEntry>>,
    /// Manifests that could not be read, with the reason.
    pub rejected: Arc<Vec<RejectedManifest>>,
}

/// A pod with its status, and what a `v1.Pod` has no field for.
#[derive(Clone, Debug, PartialEq)]
pub struct PodEntry {
    /// Spec and status, as the kubelet serves it.
    pub pod: Pod,
    /// The last readiness change that a kernel event caused.
    pub readiness_edge: Option<ReadinessEdge>,
    /// The pod's network namespace; `None` for host network pods and before the sandbox runs.
    pub netns: Option<PathBuf>,
}

/// A readiness change that the kernel reported. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadinessEdge {
    /// The container whose readiness changed.
    pub container: String,
    /// What it changed to.
    pub ready: bool,
    /// When the kernel saw the listener come or go.
    pub kernel_ns: u64,
    /// When the status that says so was published.
    pub published_ns: u64,
}

/// A manifest that could not become a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedManifest {
    /// The file in the static pod folder.
    pub file: PathBuf,
    /// Line and column where known, the field, the cause.
    pub message: String,
}
