//! Who a pod from a manifest is on this node: name, UID, annotations, as the kubelet makes them
//! (`pkg/kubelet/config/common.go`).
//!
//! The UID follows from the node, the file and what is written in it, so that a manifest that changes is
//! another pod, and one that doesn't is the same pod after every restart of the agent. Defaults don't count:
//! an agent that learns a new one must not restart every pod of the node.

pub(crate) use beelet_model::labels::{
    ANNOTATION_HASH, ANNOTATION_MANIFEST, ANNOTATION_SEEN, ANNOTATION_SOURCE,
};
use std::fmt::Write as _;
use std::path::Path;

use beelet_codec::ApiType as _;
use k8s_openapi::api::core::v1::{Pod, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use sha2::{Digest, Sha256};

/// Says that a pod mirrors a static one in an API server; never true of a manifest.
const ANNOTATION_MIRROR: &str = "kubernetes.io/config.mirror";

/// What of a node and a file goes into a pod's identity.
#[derive(Clone, Debug)]
pub(super) struct Origin<'a> {
    /// The node's name.
    pub(super) node_name: &'a str,
    /// The manifest's path.
    pub(super) file: &'a Path,
    /// When this content was first seen, RFC 3339.
    pub(super) seen: &'a str,
    /// Whether the pod is marked as the kubelet marks static pods, which makes it critical.
    pub(super) critical: bool,
}

/// Drops what a manifest has no say in: status, owners, times, versions.
pub(super) fn keep_what_a_manifest_says(pod: &mut Pod) {
    pod.status = None;
    let metadata = std::mem::take(&mut pod.metadata);
    pod.metadata = ObjectMeta {
        name: metadata.name,
        namespace: metadata.namespace,
        uid: metadata.uid.filter(|uid| !uid.is_empty()),
        labels: metadata.labels,
        annotations: metadata.annotations,
        ..ObjectMeta::default()
    };
    for ours in [ANNOTATION_HASH, ANNOTATION_SEEN, ANNOTATION_SOURCE, ANNOTATION_MANIFEST, ANNOTATION_MIRROR]
    {
        pod.metadata.annotations.as_mut().and_then(|annotations| annotations.remove(ours));
    }
}

/// A digest of what a manifest says.
pub(super) fn content_digest(pod: &Pod) -> [u8; 32] {
    Sha256::digest(pod.to_json()).into()
}

/// The name that a pod has on a node.
pub(super) fn name_on_node(name: &str, node_name: &str) -> String {
    format!("{name}-{}", node_name.to_lowercase())
}

/// Gives a pod its identity on this node.
pub(super) fn assign(pod: &mut Pod, content: &[u8; 32], origin: &Origin<'_>) {
    let hash = hash(content, origin);
    let metadata = &mut pod.metadata;
    let name = metadata.name.as_deref().unwrap_or_default();
    metadata.name = Some(name_on_node(name, origin.node_name));
    metadata.uid.get_or_insert_with(|| hash.clone());
    let annotations = metadata.annotations.get_or_insert_default();
    annotations.insert(ANNOTATION_HASH.to_owned(), hash);
    annotations.insert(ANNOTATION_SEEN.to_owned(), origin.seen.to_owned());
    annotations.insert(ANNOTATION_MANIFEST.to_owned(), origin.file.display().to_string());
    if origin.critical {
        annotations.insert(ANNOTATION_SOURCE.to_owned(), "file".to_owned());
    }
    let spec = pod.spec.get_or_insert_default();
    spec.node_name = Some(origin.node_name.to_owned());
    tolerate_node_problems(spec.tolerations.get_or_insert_default());
}

/// Nothing evicts a static pod for its node's problems.
fn tolerate_node_problems(tolerations: &mut Vec<Toleration>) {
    let all = Toleration {
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        ..Toleration::default()
    };
    if !tolerations.contains(&all) {
        tolerations.push(all);
    }
}

/// 32 hexadecimal digits, the form of the kubelet's own.
fn hash(content: &[u8; 32], origin: &Origin<'_>) -> String {
    let mut hasher = Sha256::new();
    hasher.update(content);
    hasher.update(format!("host:{}", origin.node_name));
    hasher.update("file:");
    hasher.update(origin.file.as_os_str().as_encoded_bytes());
    let digest = hasher.finalize();
    digest[..16].iter().fold(String::with_capacity(32), |mut text, byte| {
        // Writing to a String can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
