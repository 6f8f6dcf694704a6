//! In-place changes of running pods: admission decides on cpu and memory, the worker applies them; probes
//! change at once.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;
use tracing::info;

use super::{
    managed::{Managed, WantedAmounts},
    pods::Pods,
};
use crate::{deps::Deps, resize_metrics::ResizeMetrics};
use beelet_admission::ResizeDeferral;
use beelet_model::{pod::container_of, status::runtime_id};
use beelet_pinning::NoResize;
use beelet_policy::resources::{cgroups::resize_changes_swap, resize_order::Turn};
use beelet_spec::resize::{self, Accepted, Pending, ResizeFacts};
use beelet_state::events::Object;

/// Records a resize request. Admission decides on the request when the pod has its turn.
pub(super) fn want(managed: &mut Managed, pod: Arc<core::Pod>, metrics: &ResizeMetrics) {
    let same = managed.wanted.as_ref().filter(|known| resize::same_amounts(&known.pod, &pod));
    let since = same.map_or_else(Instant::now, |known| known.since);
    if same.is_none() {
        metrics.requested(managed.wanted.as_ref().map_or(&managed.pod, |known| &known.pod), &pod);
    }
    managed.wanted = Some(WantedAmounts { pod, since });
}

/// Cancels the resize request of a pod. Returns true if the pod's status had a pending resize.
pub(super) fn want_nothing(managed: &mut Managed) -> bool {
    managed.wanted = None;
    managed.resize.pending.take().is_some()
}

/// Returns the pod's place in the order of resizes, or None if the pod has no resize request or cannot be
/// resized.
fn turn(managed: &Managed) -> Option<Turn<Instant>> {
    let wanted = managed.wanted.as_ref().filter(|_| managed.may_resize() && !managed.is_over())?;
    Some(Turn::of(&managed.pod, &wanted.pod, wanted.since))
}

/// Requests the wanted amounts from admission, and passes admitted amounts to the worker. The amounts are in
/// force once the cgroups have them. Returns true if the pod's status has changed.
fn try_resize(managed: &mut Managed, deps: &Deps) -> bool {
    let Some(WantedAmounts { pod, since }) = managed.wanted.take() else { return false };
    let (events, metrics) = (&deps.reports.events, &deps.reports.metrics.resizes);
    if let Some(Refused { reason, detail, message }) = refused(managed, &pod, deps) {
        // The resize is retried whenever a pod releases resources.
        let before = managed.resize.pending.replace(Pending { reason, message: message.clone() });
        if before.as_ref().is_none_or(|before| before.reason != reason) {
            detail.into_iter().for_each(|detail| metrics.infeasible(detail));
            let message = format!("{message}; the pod keeps its current cpu and memory");
            events.warning(Object::pod(&managed.pod), &format!("Resize{reason}"), &message);
        }
        managed.wanted = Some(WantedAmounts { pod, since });
        return before != managed.resize.pending;
    }
    if managed.resize.pending.as_ref().is_some_and(|pending| pending.reason == "Deferred") {
        metrics.accepted_later();
    }
    managed.resize = ResizeFacts::default();
    managed.enacting = Some(Instant::now());
    events.normal(Object::pod(&pod), "Resized", "Resizing the pod's cpu or memory in place");
    info!(pod = %managed.name, "resizing pod's cpu and memory in place");
    managed.control.send_modify(|c| c.updated = Some(Arc::clone(&pod)));
    managed.pod = pod;
    true
}

/// Refusal of a resize.
struct Refused {
    /// Reason of the condition.
    reason: &'static str,
    /// The kubelet's label of an impossible resize.
    detail: Option<&'static str>,
    message: String,
}

/// Requests the amounts of `pod` from admission, and its CPUs from pinning.
fn refused(managed: &Managed, pod: &Arc<core::Pod>, deps: &Deps) -> Option<Refused> {
    let infeasible =
        |detail, message: String| Some(Refused { reason: "Infeasible", detail: Some(detail), message });
    if resize_changes_swap(&managed.pod, pod, &deps.node.cgroup_config) {
        let message = "In-place resize of containers with swap is not supported.";
        return infeasible("swap_limitation", message.to_owned());
    }
    let admit = || deps.admission.resize(pod, &managed.pod);
    match deps.pinning.resize(pod, &managed.pod, admit).err()? {
        NoResize::Never { detail, message } => infeasible(detail, message),
        NoResize::Other(why) if why.infeasible => infeasible("insufficient_node_allocatable", why.message),
        NoResize::Later(message) | NoResize::Other(ResizeDeferral { message, .. }) => {
            Some(Refused { reason: "Deferred", detail: None, message })
        }
    }
}

/// Replaces the probes of a running pod, and nothing else.
pub(super) fn update_probes(managed: &mut Managed, wanted: &Arc<core::Pod>) {
    let mut pod = (*managed.pod).clone();
    resize::copy_probes(&mut pod, wanted);
    if pod != *managed.pod {
        replace(managed, Arc::new(pod));
    }
}

/// Replaces the pod of a worker.
fn replace(managed: &mut Managed, pod: Arc<core::Pod>) {
    keep_started(managed, &pod);
    managed.pod = pod;
    let pod = Arc::clone(&managed.pod);
    managed.control.send_modify(|c| c.updated = Some(pod));
}

/// Records that the containers that count as started stay so, also with a new startup probe, which is for
/// the next instance; and forgets the readiness of those whose readiness probe was added or removed
/// (KEP-6318, "Adding and removing probes").
fn keep_started(managed: &mut Managed, new: &core::Pod) {
    let Some(status) = managed.record.status.clone() else { return };
    let statuses = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    for status in statuses {
        let (Some(id), Some(before), Some(after)) =
            (runtime_id(status), container_of(&managed.pod, &status.name), container_of(new, &status.name))
        else {
            continue;
        };
        let startup = (before.startup_probe.is_some(), after.startup_probe.is_some());
        if startup == (false, true) && status.started == Some(true) {
            managed.record.probes.entry(id.to_owned()).or_default().started = Some(true);
            managed.control.send_if_modified(|c| c.verdicts.started.insert(id.to_owned()));
        }
        if before.readiness_probe.is_some() != after.readiness_probe.is_some()
            && let Some(facts) = managed.record.probes.get_mut(id)
        {
            facts.ready = None;
        }
    }
}

/// Updates a running pod. The pod keeps its amounts until its turn for the resize.
pub(super) fn update(managed: &mut Managed, wanted: &Arc<core::Pod>, metrics: &ResizeMetrics) {
    if resize::same_amounts(wanted, &managed.pod) {
        want_nothing(managed);
        replace(managed, Arc::clone(wanted));
    } else {
        want(managed, Arc::clone(wanted), metrics);
        replace(managed, with_amounts_of(wanted, &managed.pod));
    }
}

/// Returns the wanted pod with the current cpu and memory of `has`.
pub(super) fn with_amounts_of(wanted: &Arc<core::Pod>, has: &core::Pod) -> Arc<core::Pod> {
    if resize::same_amounts(wanted, has) {
        return Arc::clone(wanted);
    }
    let mut pod = (**wanted).clone();
    resize::copy_amounts(&mut pod, has);
    Arc::new(pod)
}

/// Returns the wanted pod with the accepted amounts, if they are known, in place of the wanted ones.
pub(super) fn as_accepted(wanted: &Arc<core::Pod>, accepted: Option<&Accepted>) -> Arc<core::Pod> {
    let Some(accepted) = accepted else { return Arc::clone(wanted) };
    let mut pod = (**wanted).clone();
    accepted.apply_to(&mut pod);
    if resize::same_amounts(&pod, wanted) { Arc::clone(wanted) } else { Arc::new(pod) }
}

/// Tries all requested resizes in order: those that release resources precede those that need more.
pub(super) fn try_resizes(pods: &mut Pods) {
    let waiting = pods.by_uid.iter().filter_map(|(uid, managed)| Some((turn(managed)?, uid.clone())));
    let mut waiting: Vec<_> = waiting.collect();
    waiting.sort();
    for (_, uid) in waiting {
        let changed = pods.by_uid.get_mut(&uid).is_some_and(|managed| try_resize(managed, &pods.deps));
        if changed {
            pods.publish(&uid);
        }
    }
}

/// Requests the wanted amounts of a pod that an earlier agent admitted with other amounts. Admission decides
/// again, as in the kubelet's allocation manager.
pub(super) fn ask_for_amounts(pods: &mut Pods, uid: &str, wanted: &Arc<core::Pod>) {
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
    if !managed.terminating() && !resize::same_amounts(wanted, &managed.pod) {
        update(managed, wanted, &pods.deps.reports.metrics.resizes);
    }
}

/// See [`beelet_model::request::Request::Enacted`].
pub(super) fn on_enacted(
    pods: &mut Pods,
    uid: &str,
    amounts: Result<BTreeMap<String, Option<core::ResourceRequirements>>, String>,
) {
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
    if amounts.is_ok() || managed.resize.error.is_none() {
        // The amounts of an earlier agent's resize have no beginning here.
        let since = if amounts.is_ok() { managed.enacting.take() } else { managed.enacting };
        let metrics = &pods.deps.reports.metrics.resizes;
        since.into_iter().for_each(|since| metrics.enacted(since.elapsed(), amounts.is_ok()));
    }
    match amounts {
        Ok(enacted) => {
            managed.resize.error = None;
            if let Some(status) = &mut managed.record.status {
                resize::enact(Arc::make_mut(status), uid, &enacted);
            }
        }
        Err(error) => managed.resize.error = Some(error),
    }
    pods.publish(uid);
}
