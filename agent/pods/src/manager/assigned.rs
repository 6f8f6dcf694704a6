//! Pods that the API server assigns to the node. These pods are identified by UID, may change while they run,
//! and are deleted in two steps: the API server sets a pod's deletion timestamp and grace period, and removes
//! the object once the agent confirms that the pod is removed.

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use tracing::info;

use super::{deletion::Deletion, failing, managed::Managed, pods::Pods, resizing};
use crate::worker::Terminate;
use beelet_model::{failure::PodFailure, pod::grace_period, status::has_ended};

/// Applies the API server's version of a pod that has a worker.
pub(super) fn follow_assigned(pods: &mut Pods, uid: &str, wanted: &Arc<core::Pod>) {
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
    let is_known = managed.assigned.as_ref().is_some_and(|known| Arc::ptr_eq(known, wanted));
    // The termination of a dropped pod continues, regardless of the API server's version.
    if managed.is_dropped() || is_known {
        return;
    }
    managed.assigned = Some(Arc::clone(wanted));
    let known = managed.deletion;
    delete(managed, wanted);
    match managed.deletion {
        Some(deletion) => {
            if known != managed.deletion {
                info!(pod = %managed.name, uid, grace_seconds = deletion.grace.as_secs(), "terminating pod (deleted from the API server)");
                pods.deps.admission.leaving(uid, deletion.grace);
            }
        }
        None => resizing::update(managed, wanted, &pods.deps.reports.metrics.resizes),
    }
    let ended = wanted.status.as_ref().filter(|status| has_ended(Some(status)));
    if let Some(status) = ended.filter(|_| managed.record.failure.is_none() && !managed.is_over()) {
        // Another client has set a final phase in the API server: no controller expects the pod to run.
        let text = |text: &Option<String>, or: &str| text.clone().unwrap_or_else(|| or.to_owned());
        let reason = text(&status.reason, "Terminated");
        let message = text(&status.message, "The pod has ended in the API server");
        failing::fail(pods, uid, &PodFailure::new(reason, message, None));
    }
    pods.publish(uid);
}

/// Begins the deletion that `wanted` requests, if any, or shortens its grace period.
fn delete(managed: &mut Managed, wanted: &Arc<core::Pod>) {
    let Some(asked) = Deletion::of(wanted) else { return };
    let (stopped, cleared) = (managed.has_stopped(), managed.is_cleared());
    let own = grace_period(wanted);
    let grace = managed.deletion.map_or(asked.grace, |known| known.grace.min(asked.grace));
    managed.deletion = Some(Deletion { grace, stopped, cleared });
    managed.pod = resizing::with_amounts_of(wanted, &managed.pod);
    managed.control.send_if_modified(|c| c.fail(Terminate { grace: Some(grace) }, own));
}
