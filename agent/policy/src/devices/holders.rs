//! The containers that hold devices.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{HeldByResource, HeldDevices, Ids, Request};

/// All containers with devices. A device may have several holders of one pod, of which at most one runs.
#[derive(Debug, Clone, Default)]
pub struct Holders {
    /// Allocated devices. Freed lazily: terminated pods keep theirs until another pod requests devices.
    pub(super) taken: BTreeMap<String, Ids>,
    pub(super) pods: BTreeMap<String, BTreeMap<String, HeldByResource>>,
}

impl Holders {
    /// Adds devices to a container.
    pub(super) fn add(&mut self, request: &Request<'_>, ids: &BTreeSet<String>, held: HeldDevices) {
        let pod = self.pods.entry(request.pod_uid.to_owned()).or_default();
        let container = pod.entry(request.container.to_owned()).or_default();
        container.insert(request.resource.to_owned(), Arc::new(held));
        self.taken.entry(request.resource.to_owned()).or_default().extend(ids.iter().cloned());
    }

    /// Frees the devices of inactive pods. Call this before the first selection for a container, unless some
    /// source of pods is not ready (the active pods are unknown then). Returns true if any were freed.
    pub fn free_inactive(&mut self, active: impl Fn(&str) -> bool) -> bool {
        let before = self.pods.len();
        self.pods.retain(|uid, _| active(uid));
        let any = self.pods.len() < before;
        if any {
            self.recount();
        }
        any
    }

    /// Frees the devices of a container that has ended for good (an init container, once the next has
    /// started). Devices that other containers of the pod reused stay theirs.
    pub fn release(&mut self, pod_uid: &str, container: &str) {
        let Some(pod) = self.pods.get_mut(pod_uid) else { return };
        if pod.remove(container).is_some() {
            if pod.is_empty() {
                self.pods.remove(pod_uid);
            }
            self.recount();
        }
    }

    /// Reverts commits for a pod's containers: pairs of container and resource.
    pub(crate) fn revert(&mut self, pod_uid: &str, committed: &[(String, String)]) {
        if let Some(pod) = self.pods.get_mut(pod_uid) {
            for (container, resource) in committed {
                if let Some(held) = pod.get_mut(container) {
                    held.remove(resource);
                }
            }
            pod.retain(|_, held| !held.is_empty());
            if pod.is_empty() {
                self.pods.remove(pod_uid);
            }
        }
        self.recount();
    }

    /// Frees all devices of a terminated pod.
    pub fn forget(&mut self, pod_uid: &str) {
        self.pods.remove(pod_uid);
        self.recount();
    }

    /// Returns the devices that a pod's containers hold.
    #[must_use]
    pub fn held(&self, pod_uid: &str) -> Option<&BTreeMap<String, HeldByResource>> {
        self.pods.get(pod_uid)
    }

    /// Returns the uids of pods that hold devices.
    pub fn pods(&self) -> impl Iterator<Item = &str> {
        self.pods.keys().map(String::as_str)
    }

    /// Recomputes the allocated devices from their holders, which drops a selection that the plugin did not
    /// allocate.
    pub fn recount(&mut self) {
        self.taken.clear();
        for (resource, held) in self.pods.values().flat_map(BTreeMap::values).flatten() {
            self.taken.entry(resource.clone()).or_default().extend(held.ids());
        }
    }
}
