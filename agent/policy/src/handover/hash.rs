//! The kubelet's digest of a container (`HashContainer` in `pkg/kubelet/container/helpers.go`): a kubelet
//! restarts a running container whose annotation has another digest than the pod's spec.
//!
//! Since Kubernetes 1.31 the digest covers the name and the image only; before, it covered the whole
//! container in the field order of that version.

use beelet_units::go_json;
use serde_json::json;

use crate::devices::checkpoint::fnv1a;

/// Returns the digest of a container with this name and image, as kubelets since 1.31 compute it: FNV-1a over
/// the printed form of the bytes of a JSON object.
#[must_use]
pub fn container_hash(name: &str, image: &str) -> u32 {
    let json = go_json::escaped(&json!({ "image": image, "name": name }).to_string());
    let bytes: Vec<String> = json.bytes().map(|byte| byte.to_string()).collect();
    fnv1a(&format!("([]uint8)[{}]", bytes.join(" ")))
}

/// Returns the digest as the annotation `io.kubernetes.container.hash` has it.
#[must_use]
pub fn container_hash_of(name: &str, image: &str) -> String {
    format!("{:x}", container_hash(name, image))
}
