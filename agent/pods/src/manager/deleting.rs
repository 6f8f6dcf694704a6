//! Deletion of static pods by a user, and the pods that wait for their names.

use std::sync::Arc;
use std::time::Duration;

use beelet_base::clock::After as _;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tracing::info;

use super::{deletion::Successor, managed::Managed, pods::Pods};
use crate::{records::Leaving, worker::Terminate};
use beelet_model::{desired::Desired, origin::Origin, status::whole_second};
use beelet_state::events::Object;

/// Reason of the event for a pod that waits for the removal of a force-deleted pod.
const WAITS: &str = "WaitsForDeletedPod";

/// See [`beelet_model::request::Request::Delete`].
pub(super) fn delete(pods: &mut Pods, uid: &str, grace: Option<Duration>, force: bool) {
    let uid = &pods.known_as(uid);
    let Some(managed) = pods.static_pod(uid) else { return };
    if force {
        info!(pod = %managed.name, uid, "force-deleting pod; it is hidden while it terminates");
        managed.record.abandoned = true;
    }
    if managed.is_dropped() {
        hasten(pods, uid, grace);
    } else {
        managed.asked_grace = grace;
    }
    pods.publish(uid);
    pods.due.reconcile |= force;
}

/// See [`beelet_model::request::Request::Terminate`].
pub(super) fn terminate_on_request(pods: &mut Pods, uid: &str) {
    let uid = &pods.known_as(uid);
    terminate(pods, uid);
    let Some(managed) = pods.static_pod(uid) else { return };
    managed.record.leaving.get_or_insert_default().on_request = true;
    pods.publish(uid);
    // The pod's manifest may have been restored.
    pods.due.reconcile = true;
}

/// Terminates a pod. The manager forgets the pod after its removal.
pub(super) fn terminate(pods: &mut Pods, uid: &str) {
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
    if managed.is_dropped() {
        return;
    }
    info!(pod = %managed.name, uid, "terminating pod");
    let asked = managed.asked_grace;
    managed.control.send_modify(|c| c.terminate = Some(Terminate { grace: asked }));
    if !managed.origin().is_api() {
        managed.record.leaving = Some(Leaving { grace: asked, on_request: false });
    }
    let grace = asked.unwrap_or_else(|| beelet_model::pod::grace_period(&managed.pod));
    mark_deleted(managed, grace);
    pods.deps.admission.leaving(uid, grace);
    pods.publish(uid);
}

/// Shortens the grace period of a terminating pod to `grace`, if `grace` is shorter.
fn hasten(pods: &mut Pods, uid: &str, grace: Option<Duration>) {
    let (Some(managed), Some(grace)) = (pods.by_uid.get_mut(uid), grace) else { return };
    let own = beelet_model::pod::grace_period(&managed.pod);
    let given = managed.control.borrow().terminate.and_then(|end| end.grace).unwrap_or(own);
    if grace >= given {
        return;
    }
    info!(pod = %managed.name, uid, grace_seconds = grace.as_secs(), "shortening the grace period of a terminating pod");
    managed.control.send_modify(|c| c.terminate = Some(Terminate { grace: Some(grace) }));
    managed.record.leaving.get_or_insert_default().grace = Some(grace);
    mark_deleted(managed, grace);
    pods.deps.admission.leaving(uid, grace);
}

/// Publishes, in place of each force-deleted pod, the desired pod of the same name that waits for its
/// removal.
pub(super) fn publish_successors(pods: &mut Pods, desired: &Desired) {
    let mut changed = Vec::new();
    for (uid, managed) in pods.by_uid.iter_mut().filter(|(_, managed)| managed.record.abandoned) {
        let wanted = desired.pods.get(&managed.name).filter(|_| managed.is_dropped());
        let wanted = wanted.filter(|pod| !Origin::of(pod).is_api());
        if managed.successor.as_ref().map(|known| &known.pod) == wanted {
            continue;
        }
        if let Some(pod) = wanted {
            let message = "waiting for the force-deleted pod of the same name to end";
            pods.deps.reports.events.warning(Object::pod(pod), WAITS, message.to_owned());
        }
        managed.successor = wanted.map(|pod| Successor::new(Arc::clone(pod), uid));
        changed.push(uid.clone());
    }
    changed.iter().for_each(|uid| pods.publish(uid));
}

/// Sets the deletion timestamp and grace period in the pod's metadata, with the grace period starting now.
fn mark_deleted(managed: &mut Managed, grace: Duration) {
    let deadline = Timestamp::now().after(grace);
    let metadata = &mut Arc::make_mut(&mut managed.pod).metadata;
    metadata.deletion_timestamp = Some(Time(whole_second(deadline)));
    metadata.deletion_grace_period_seconds = i64::try_from(grace.as_secs()).ok();
}
