//! Identity of a manifest's pod on this node: name, UID and annotations, as in the kubelet
//! (`pkg/kubelet/config/common.go`).
//!
//! The UID is a digest of the node, the file and its content: a changed manifest is another pod, and an
//! unchanged one is the same pod after every restart of the agent. Defaults are not part of the digest: an
//! agent with a new default must not restart every pod of the node.

pub(crate) use beelet_model::labels::{
    ANNOTATION_HASH, ANNOTATION_MANIFEST, ANNOTATION_SEEN, ANNOTATION_SOURCE,
};
use std::fmt::Write as _;
use std::path::Path;

use beelet_codec::ApiType as _;
use k8s_openapi::api::core::v1::{Pod, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use sha2::{Digest, Sha256};

/// Annotation of mirror pods in an API server; removed from manifests.
const ANNOTATION_MIRROR: &str = "kubernetes.io/config.mirror";

/// Inputs of a pod's identity.
#[derive(Clone, Debug)]
pub(super) struct Origin<'a> {
    /// The node's name.
    pub(super) node_name: &'a str,
    /// The manifest's path.
    pub(super) file: &'a Path,
    /// Time at which this content was first seen, RFC 3339.
    pub(super) seen: &'a str,
    /// True to add the kubelet's mark of static pods, which makes the pod critical.
    pub(super) critical: bool,
}

/// Removes the fields that a manifest can't set: status, owners, times, versions.
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

/// Returns the digest of a manifest's content.
pub(super) fn content_digest(pod: &Pod) -> [u8; 32] {
    Sha256::digest(pod.to_json()).into()
}

/// Returns a pod's name on a node.
pub(super) fn name_on_node(name: &str, node_name: &str) -> String {
    format!("{name}-{}", node_name.to_lowercase())
}

/// Assigns a pod's identity on this node.
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

/// Adds a toleration of all NoExecute taints: node problems do not evict a static pod.
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

/// Returns 32 hexadecimal digits, the kubelet's form.
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
