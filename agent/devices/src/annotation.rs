//! Annotation of a container with its devices, from which a lost checkpoint is rebuilt.

use std::sync::Arc;

use beelet_policy::devices::{
    HeldByResource, Remnant,
    checkpoint::{Entry, HolderKey},
};
use beelet_proto::cri;

use beelet_model::labels;

/// Maximum size. Larger annotations would burden the runtime; the checkpoint has the full data.
const MAX: usize = 256 << 10;

/// Returns the annotation's value; `None` if it would be empty or too large.
pub fn encode(held: &HeldByResource) -> Option<String> {
    if held.is_empty() {
        return None;
    }
    // Pod and container are in the container's labels.
    let place = |resource: &String| HolderKey {
        pod_uid: String::new(),
        container: String::new(),
        resource: resource.clone(),
    };
    let entries: Vec<Entry> =
        held.iter().map(|(resource, held)| Entry::new(&place(resource), held)).collect();
    serde_json::to_string(&entries).ok().filter(|text| text.len() <= MAX)
}

fn decode(text: &str) -> Option<HeldByResource> {
    let entries: Vec<Entry> = serde_json::from_str(text).ok()?;
    let held = |entry: Entry| {
        let (place, held) = entry.into_held();
        (place.resource, Arc::new(held))
    };
    Some(entries.into_iter().map(held).collect())
}

/// Returns the devices of our containers, according to their annotations. A container with an unreadable
/// annotation holds nothing.
#[must_use]
pub fn remnants(containers: &[cri::Container]) -> Vec<Remnant> {
    let remnant = |container: &cri::Container| {
        let held = decode(container.annotations.get(labels::DEVICES)?)?;
        let ended = i32::from(cri::ContainerState::ContainerExited);
        Some(Remnant {
            pod_uid: container.labels.get(labels::POD_UID)?.clone(),
            container: container.labels.get(labels::CONTAINER_NAME)?.clone(),
            alive: container.state != ended,
            created_at: container.created_at,
            held,
        })
    };
    containers.iter().filter_map(remnant).collect()
}
