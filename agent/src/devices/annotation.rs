//! What a container was given, as an annotation of it: a checkpoint that is lost is rebuilt from these.

use std::collections::BTreeMap;

use beelet_policy::devices::{Held, HeldByResource, Remnant, checkpoint::Entry};
use beelet_proto::cri;

use crate::pods::labels;

/// Annotations larger than this would only be a burden to the runtime; the checkpoint has it all.
const MAX: usize = 256 << 10;

/// The annotation's value; `None` if there is nothing to keep, or too much.
pub(super) fn encode(held: &HeldByResource) -> Option<String> {
    if held.is_empty() {
        return None;
    }
    let entries: Vec<Entry> = held
        .iter()
        .map(|(resource, held)| Entry {
            pod_uid: String::new(),
            container_name: String::new(),
            resource_name: resource.clone(),
            device_ids: Some(held.by_node.iter().map(|(node, ids)| (*node, Some(ids.clone()))).collect()),
            alloc_resp: Some(held.response.clone()),
        })
        .collect();
    serde_json::to_string(&entries).ok().filter(|text| text.len() <= MAX)
}

fn decode(text: &str) -> Option<HeldByResource> {
    let entries: Vec<Entry> = serde_json::from_str(text).ok()?;
    let held = |entry: Entry| {
        let by_node: BTreeMap<i64, Vec<String>> = entry
            .device_ids
            .unwrap_or_default()
            .into_iter()
            .map(|(node, ids)| (node, ids.unwrap_or_default()))
            .collect();
        (entry.resource_name, Held { by_node, response: entry.alloc_resp.unwrap_or_default() })
    };
    Some(entries.into_iter().map(held).collect())
}

/// What these containers of ours were given. One whose annotation can't be read has nothing.
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
