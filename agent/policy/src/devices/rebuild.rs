//! The ledger without a checkpoint, rebuilt from the devices of the containers that still exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{
    Devices, HeldByResource,
    checkpoint::{Data, Entry, HolderKey},
};

/// A container that the runtime still has, with the devices of its creation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remnant {
    /// The pod's uid.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// True if the container runs or is about to: no other container can hold its devices.
    pub alive: bool,
    /// Creation time, in any unit.
    pub created_at: i64,
    /// Devices passed to the container.
    pub held: HeldByResource,
}

impl Devices {
    /// Rebuilds the ledger from the containers' devices. Of one container the newest instance counts. Of two
    /// pods that claim the same device (one of them died long ago) the living one keeps it, else the younger.
    /// Every plugin must register first. Also returns one sentence per dropped claim.
    #[must_use]
    pub fn rebuilt(mut remnants: Vec<Remnant>, now: Duration) -> (Self, Vec<String>) {
        remnants.sort_by_key(|r| (std::cmp::Reverse(r.alive), std::cmp::Reverse(r.created_at)));
        let mut entries = Vec::new();
        let mut registered = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut owner: BTreeMap<(String, String), String> = BTreeMap::new();
        let mut dropped = Vec::new();
        for Remnant { pod_uid, container, held, .. } in remnants {
            if !seen.insert((pod_uid.clone(), container.clone())) {
                continue;
            }
            for (resource, held) in held {
                registered.insert(resource.clone(), None);
                let key = |id: &String| (resource.clone(), id.clone());
                let ids = held.ids();
                let others = |id: &String| owner.get(&key(id)).filter(|other| **other != pod_uid);
                if let Some((id, other)) = ids.iter().find_map(|id| Some((id, others(id)?))) {
                    dropped.push(format!(
                        "{id} of {resource} belongs to pod {other}; dropped the older claim of pod {pod_uid}"
                    ));
                    continue;
                }
                owner.extend(ids.iter().map(|id| (key(id), pod_uid.clone())));
                let place = HolderKey { pod_uid: pod_uid.clone(), container: container.clone(), resource };
                entries.push(Entry::new(&place, &held));
            }
        }
        let data = Data { pod_device_entries: Some(entries), registered_devices: Some(registered) };
        (Self::restored(data, now), dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::devices::HeldDevices;

    fn remnant(pod: &str, container: &str, alive: bool, created_at: i64, ids: &[&str]) -> Remnant {
        let ids = ids.iter().map(|id| (*id).to_owned()).collect();
        let held = HeldDevices { by_node: BTreeMap::from([(-1, ids)]), response: vec![1] };
        let held = BTreeMap::from([("example.com/gpu".to_owned(), Arc::new(held))]);
        Remnant { pod_uid: pod.to_owned(), container: container.to_owned(), alive, created_at, held }
    }

    /// Expects `pod/container: ids`, and the number of dropped claims.
    fn check(remnants: Vec<Remnant>, expected: &[&str], conflicts: usize) {
        let (devices, dropped) = Devices::rebuilt(remnants, Duration::ZERO);
        let mut lines = Vec::new();
        for pod in devices.holders.pods() {
            for (container, held) in devices.holders.held(pod).into_iter().flatten() {
                let ids: Vec<String> = held.values().flat_map(|held| held.ids()).collect();
                lines.push(format!("{pod}/{container}: {}", ids.join(" ")));
            }
        }
        assert_eq!(lines, expected);
        assert_eq!(dropped.len(), conflicts, "{dropped:?}");
    }

    #[test]
    fn the_newest_instance_of_a_container_decides_its_devices() {
        check(vec![remnant("p", "c", false, 1, &["a"]), remnant("p", "c", true, 2, &["b"])], &["p/c: b"], 0);
    }

    #[test]
    fn a_living_pod_keeps_the_device_and_else_the_younger() {
        check(vec![remnant("p", "c", true, 1, &["a"]), remnant("q", "c", false, 2, &["a"])], &["p/c: a"], 1);
        check(vec![remnant("p", "c", false, 1, &["a"]), remnant("q", "c", false, 2, &["a"])], &["q/c: a"], 1);
    }

    #[test]
    fn containers_of_one_pod_may_share_and_the_resource_is_known_again() {
        let shared = vec![remnant("p", "init", false, 1, &["a", "b"]), remnant("p", "main", true, 2, &["a"])];
        check(shared.clone(), &["p/init: a b", "p/main: a"], 0);
        let (devices, _) = Devices::rebuilt(shared, Duration::ZERO);
        assert!(devices.knows("example.com/gpu"));
    }
}
