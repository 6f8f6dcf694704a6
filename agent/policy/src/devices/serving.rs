//! The order of serving a pod's containers with devices.

use std::collections::{BTreeMap, BTreeSet};

use super::{ContainerKind, Devices, Ids};

/// The state of serving a pod's containers one after the other, init containers first. Every pass over a pod
/// needs a new value.
#[derive(Debug, Clone, Default)]
pub struct Serving {
    /// Devices that init containers leave to later containers, by resource.
    reuse: BTreeMap<String, Ids>,
    /// The NUMA nodes that the container being served should get its devices from.
    pub(super) affinity: Option<BTreeSet<i64>>,
    /// Devices that later containers already hold, because the pod had another sandbox.
    later: BTreeMap<String, Ids>,
    /// The container being served ends before any of the later containers begins.
    lends: bool,
}

impl Serving {
    /// Begins to serve a container of this kind, followed by the containers `after`. An init container may
    /// use devices that later containers hold: the kubelet keeps the init container's own devices, with the
    /// same effect, but also those that no later container needs. While a later container `runs`, none of
    /// them lends devices.
    pub(crate) fn begin<'c>(
        &mut self,
        devices: &Devices,
        pod_uid: &str,
        kind: ContainerKind,
        after: impl Iterator<Item = &'c str>,
        runs: impl Fn(&str) -> bool,
    ) {
        self.later.clear();
        self.lends = kind == ContainerKind::Init;
        let Some(pod) = devices.holders.pods.get(pod_uid) else { return };
        for container in after {
            self.lends &= !runs(container);
            for (resource, held) in pod.get(container).into_iter().flatten() {
                self.later.entry(resource.clone()).or_default().extend(held.ids());
            }
        }
    }

    /// Returns devices that init containers leave to the container being served, which must use them. A
    /// container that keeps its devices cannot use those that a later one holds.
    pub(super) fn left(&self, resource: &str) -> impl Iterator<Item = &String> {
        let later = self.later.get(resource).filter(|_| !self.lends);
        let left = self.reuse.get(resource).into_iter().flatten();
        left.filter(move |id| later.is_none_or(|later| !later.contains(*id)))
    }

    /// Returns devices of later containers that the container being served may use.
    pub(super) fn lent(&self, resource: &str) -> impl Iterator<Item = &String> {
        self.later.get(resource).filter(|_| self.lends).into_iter().flatten()
    }

    /// Restricts the container being served to these NUMA nodes, as far as they have enough devices (see
    /// [`topology`]).
    pub(crate) fn align(&mut self, nodes: Option<BTreeSet<i64>>) {
        self.affinity = nodes;
    }

    /// Ends the serving of a container. An init container leaves its devices to the later containers; a
    /// lasting one does not.
    pub fn finish(&mut self, devices: &Devices, pod_uid: &str, container: &str, kind: ContainerKind) {
        let held = devices.holders.pods.get(pod_uid).and_then(|pod| pod.get(container));
        for (resource, held) in held.into_iter().flatten() {
            let reusable = self.reuse.entry(resource.clone()).or_default();
            match kind {
                ContainerKind::Init => reusable.extend(held.ids()),
                ContainerKind::Lasting => {
                    reusable.retain(|id| !held.by_node.values().flatten().any(|own| own == id));
                }
            }
        }
    }
}
