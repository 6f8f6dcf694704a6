//! What a container was given, as an annotation of it: a checkpoint that is lost is rebuilt from these.

use std::sync::Arc;

use beelet_policy::devices::{
    HeldByResource, Remnant,
    checkpoint::{Entry, HolderKey},
};
use beelet_proto::cri;

use beelet_model::labels;

/// Annotations larger than this would only be a burden to the runtime; the checkpoint has it all.
const MAX: usize = 256 << 10;

/// The annotation's value; `None` if there is nothing to keep, or too much.
pub fn encode(held: &HeldByResource) -> Option<String> {
    if held.is_empty() {
        return None;
    }
    // Whose it is, the container's labels say.
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

/// The devices that these containers of ours were given. One whose annotation can't be read has nothing.
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
