//! Things that are given once: devices and room.

use std::collections::BTreeSet;

use super::{View, describe};
use crate::ledger::{Instance, PodState};

/// A device is given to one container (kubelet: `devicesToAllocate`); a later container of the same pod
/// may reuse an init container's.
pub(super) fn devices_are_given_once(
    view: &View<'_>,
    id: &str,
    sandbox: &str,
    name: &str,
    devices: &BTreeSet<String>,
) {
    let uid = view.ledger.sandboxes.get(sandbox).map(|sandbox| sandbox.uid.clone()).unwrap_or_default();
    let holders = view.ledger.instances.iter().filter(|other| {
        let is_earlier_self = other.uid == uid && (other.name == name || other.exited.is_some());
        other.exited.is_none() && !other.removed && !is_earlier_self
    });
    let twice: Vec<String> = holders
        .filter(|other| !other.devices.is_disjoint(devices) && other.runs())
        .map(|other| format!("container {id} ({name} of {uid}) and {}", describe(other)))
        .collect();
    for detail in twice {
        view.breaks("devices-are-given-once", detail);
    }
}

/// The requests of all pods that run fit the node (kubelet: `GeneralPredicates` at admission).
pub(super) fn room_is_given_once(view: &View<'_>) {
    let running = view.ledger.pods.iter().filter(|(uid, _)| view.ledger.of_pod(uid).any(Instance::runs));
    let sum: u64 = running.map(|(uid, pod)| held(view, uid, pod)).sum();
    if sum > view.node.cpu {
        view.breaks("room-is-given-once", format!("{sum}m of {}m CPU are given", view.node.cpu));
    }
}

/// Returns the CPU that a pod holds: the amounts in force of its running containers, at most its request.
pub(super) fn held(view: &View<'_>, uid: &str, pod: &PodState) -> u64 {
    let known = view.ledger.of_pod(uid).filter(|instance| instance.runs());
    known.filter_map(|instance| instance.cpu).sum::<u64>().min(pod.cpu())
}
