//! The subjects of calls, in words.

use beelet_proto::cri;

/// Shortens an id to its first 13 characters, as `crictl` shows it.
fn short(id: &str) -> &str {
    id.get(..13).unwrap_or(id)
}

pub(super) fn sandbox(id: &str) -> String {
    format!("sandbox {}", short(id))
}

pub(super) fn container(id: &str) -> String {
    format!("container {}", short(id))
}

pub(super) fn image_subject(image: &str) -> String {
    format!("image {image}")
}

pub(super) fn pod(config: &cri::PodSandboxConfig) -> String {
    match &config.metadata {
        Some(metadata) => format!("pod {}/{}", metadata.namespace, metadata.name),
        None => "a pod without a name".to_owned(),
    }
}
