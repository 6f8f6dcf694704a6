//! Resource requests of the pods on a node.

use std::collections::BTreeMap;

use beelet_model::table::{PodEntry, PodTable};
use beelet_policy::resources::{CPU, EPHEMERAL_STORAGE, MEMORY, PODS, pod_requests};
use beelet_units::quantity::Quantity;

/// Returns the requests of one pod by resource; an unreadable amount counts as none.
pub(crate) fn of_pod(entry: &PodEntry) -> BTreeMap<String, Quantity> {
    let requests = pod_requests(&entry.pod).unwrap_or_default();
    requests.iter().map(|(name, amount)| (name.to_owned(), amount)).collect()
}

/// Returns the pods that count: those that have not terminated.
pub(crate) fn counted(table: &PodTable) -> impl Iterator<Item = &PodEntry> {
    table.pods.values().map(AsRef::as_ref).filter(|entry| entry.ended().is_none())
}

/// Returns the requests of all pods by resource, and the number of pods.
pub(crate) fn of_all(table: &PodTable) -> BTreeMap<String, Quantity> {
    let mut all: BTreeMap<String, Quantity> = BTreeMap::new();
    for entry in counted(table) {
        let one = (PODS.to_owned(), Quantity::from_units(1));
        for (name, amount) in of_pod(entry).into_iter().chain([one]) {
            let so_far = all.entry(name).or_default();
            *so_far = *so_far + amount;
        }
    }
    all
}

/// Returns a human-readable amount: bytes in binary units, cpu in cores or millicores, other resources as
/// counts.
pub(crate) fn shown(resource: &str, amount: Quantity) -> String {
    match resource {
        MEMORY | EPHEMERAL_STORAGE => amount.binary(),
        CPU => amount.to_string(),
        _ if resource.starts_with("hugepages-") => amount.binary(),
        _ => amount.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use beelet_model::table::PodName;
    use serde_json::json;

    use super::*;

    #[test]
    fn pods_that_have_ended_count_for_nothing() {
        let mut table = PodTable::default();
        for (name, phase) in [("a", "Running"), ("b", "Pending"), ("c", "Succeeded")] {
            let pod = json!({
                "metadata": {"name": name},
                "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "250m", "memory": "64Mi"}}}]},
                "status": {"phase": phase}
            });
            let entry = PodEntry::of(serde_json::from_value(pod).unwrap());
            table.pods.insert(PodName::of(&entry.pod), Arc::new(entry));
        }
        let all: Vec<String> = of_all(&table)
            .into_iter()
            .map(|(name, amount)| format!("{name} {}", shown(&name, amount)))
            .collect();
        assert_eq!(all, ["cpu 500m", "memory 128Mi", "pods 2"]);
    }
}
