//! What of a container can't change while it runs: another image asks for another container. The kubelet compares the name and
//! the image alone (`pkg/kubelet/container/helpers.go`, `HashContainer`), and so does this: whatever else an API server lets
//! change while a pod runs leaves its containers as they are.

use std::fmt::Write as _;

use beelet_model::labels::CONTAINER_HASH;
use beelet_proto::cri;
use k8s_openapi::api::core::v1::Container;
use sha2::{Digest, Sha256};

/// A digest of a container's definition.
pub fn digest(spec: &Container) -> String {
    let image = spec.image.as_deref().unwrap_or_default();
    let digest = Sha256::new().chain_update(&spec.name).chain_update([0]).chain_update(image).finalize();
    digest[..8].iter().fold(String::with_capacity(16), |mut text, byte| {
        // Writing to a String can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Whether a container was made from another definition than `spec`. One that doesn't say was made before this was noted.
pub fn is_redefined(spec: &Container, made: &cri::ContainerStatus) -> bool {
    made.annotations.get(CONTAINER_HASH).is_some_and(|noted| *noted != digest(spec))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn another_image_is_another_container_and_nothing_else_is() {
        let container = |value: Value| serde_json::from_value::<Container>(value).unwrap();
        let first = container(json!({"name": "a", "image": "x:1"}));
        let annotations = [(CONTAINER_HASH.to_owned(), digest(&first))].into();
        let made = cri::ContainerStatus { annotations, ..Default::default() };
        let check = |value: Value, expected| assert_eq!(is_redefined(&container(value), &made), expected);
        check(json!({"name": "a", "image": "x:1"}), false);
        check(json!({"name": "a", "image": "x:1", "resources": {"limits": {"cpu": "1"}}}), false);
        check(json!({"name": "a", "image": "x:2"}), true);
        assert!(!is_redefined(&first, &cri::ContainerStatus::default()));
    }
}
