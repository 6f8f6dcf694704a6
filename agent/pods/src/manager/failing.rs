//! Permanent ends of pods by a failure, and retries of failed pods.

use std::collections::BTreeSet;
use std::sync::Arc;

use beelet_policy::pod::{self, ContainerState, KillReason};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::pods::Pods;
use crate::{
    records::{PodRecord, Records},
    worker::Terminate,
};
use beelet_model::{
    failure::{DEADLINE_EXCEEDED, PodFailure},
    origin::Origin,
};
use beelet_state::events::Object;

/// See [`beelet_model::request::Request::Fail`].
pub(super) fn fail(pods: &mut Pods, uid: &str, failure: &PodFailure) {
    let uid = &pods.known_as(uid);
    let Some(managed) = pods.by_uid.get_mut(uid) else {
        debug!(uid, reason = failure.reason, "ignoring failure of a removed pod");
        return;
    };
    let own = beelet_model::pod::grace_period(&managed.pod);
    let grace = if let Some(known) = &mut managed.record.failure {
        known.hasten(failure.grace, own);
        known.grace
    } else if managed.is_over() {
        debug!(pod = %managed.name, reason = failure.reason, "ignoring failure of a pod that has ended");
        return;
    } else if managed.terminating() {
        // The pod is terminating already: only a shorter grace period has an effect.
        failure.grace.filter(|grace| *grace < own)
    } else {
        let PodFailure { reason, message, .. } = failure;
        warn!(pod = %managed.name, uid, reason, "ending pod permanently: {message}");
        pods.deps.reports.events.warning(Object::pod(&managed.pod), reason, message.clone());
        managed.record.failure = Some(failure.clone());
        failure.grace
    };
    managed.retry = false;
    // A deletion in progress may have a shorter grace period.
    let grace = match &managed.deletion {
        Some(deletion) => Some(grace.unwrap_or(own).min(deletion.grace)),
        None => grace,
    };
    pods.deps.admission.leaving(uid, grace.unwrap_or(own));
    managed.control.send_if_modified(|c| c.fail(Terminate { grace }, own));
    pods.publish(uid);
}

/// See [`beelet_model::request::Request::Retry`].
pub(super) fn retry(pods: &mut Pods, uid: &str) {
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
    match &managed.record.failure {
        Some(failure) if failure.cleared => {}
        Some(_) => {
            managed.retry = true;
            return;
        }
        None => return,
    }
    info!(pod = %managed.name, uid, "restarting failed pod on request");
    (managed.record.failure, managed.retry) = (None, false);
    // The pod starts like a new one, with a new start time and new conditions.
    (managed.record.status, managed.seen, managed.record.edge) = (None, None, None);
    managed.waiting.clear();
    managed.record.probes.clear();
    managed.record.hooked.clear();
    managed.record.oom.clear();
    managed.oom_events.clear();
    managed.control.send_modify(|c| {
        c.failed = None;
        c.ended = false;
        c.counts = Arc::default();
        c.verdicts = pod::Verdicts::default();
    });
    pods.publish(uid);
}

/// See [`beelet_model::request::Request::Restart`].
pub(super) fn restart(pods: &mut Pods, uid: &str, containers: &BTreeSet<String>) {
    let Some(managed) = pods.by_uid.get_mut(uid).filter(|managed| managed.record.failure.is_none()) else {
        return;
    };
    let Some(seen) = managed.seen.clone() else { return };
    let asked = seen.pod.containers.iter().filter(|container| containers.contains(&container.id));
    managed.control.send_modify(|c| {
        c.retry_requests += 1;
        for container in asked {
            c.verdicts.hurried.insert(container.id.clone());
            if matches!(container.state, ContainerState::Running { .. }) {
                c.verdicts.condemned.entry(container.id.clone()).or_insert(KillReason::Requested);
            }
        }
    });
    info!(pod = %managed.name, uid, "restarting containers on request");
}

/// Records that a failed or deleted pod has released its resources.
pub(super) fn on_cleared(pods: &mut Pods, uid: &str) {
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
    if managed.record.failure.is_none() && managed.deletion.is_none() {
        return;
    }
    managed.record_stopped();
    managed.record.failure.iter_mut().for_each(|failure| failure.cleared = true);
    managed.deletion.iter_mut().for_each(|deletion| deletion.cleared = true);
    if let Some(ended) = managed.gone() {
        pods.deps.released(uid, ended);
    }
    managed.waiting.clear();
    let runs_again = managed.retry;
    pods.publish(uid);
    if runs_again {
        retry(pods, uid);
    }
}

/// Ends the pods whose activeDeadlineSeconds have passed.
pub(super) fn fail_overdue(pods: &mut Pods) {
    for uid in pods.totals.overdue(Instant::now()) {
        // The kubelet's message.
        let message = "Pod was active on the node longer than the specified deadline";
        fail(pods, &uid, &PodFailure::new(DEADLINE_EXCEEDED, message, None));
    }
}

/// Returns an earlier agent's record of a pod, and true if the pod runs again after its termination. A static
/// pod that was refused, or ended by a shutdown of the machine, counts as new after its termination. A pod of
/// the API server does not, because the API server knows that the pod has ended.
pub(super) fn remembered(records: &Records, uid: &str, origin: Origin) -> (Option<PodRecord>, bool) {
    let record = records.get(uid);
    if origin.is_api() {
        return (record, false);
    }
    let failure = record.as_ref().and_then(|record| record.failure.as_ref());
    match failure.filter(|failure| failure.is_refusal() || failure.is_of_shutdown()) {
        Some(past) if past.cleared => (None, false),
        past => (record.clone(), past.is_some()),
    }
}
