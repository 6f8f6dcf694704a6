//! Changes of the amounts of cpu and memory of pods that run: decided by admission, made by the worker.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;
use tracing::info;

use super::{
    managed::{Managed, WantedAmounts},
    pods::Pods,
};
use crate::deps::Deps;
use beelet_policy::resources::{cgroups::resize_changes_swap, resize_order::Turn};
use beelet_spec::resize::{self, Accepted, Pending, ResizeFacts};
use beelet_state::events::Object;

/// Records that the pod is wanted with other amounts. Admission is asked for them when the pod has its turn.
pub(super) fn want(managed: &mut Managed, pod: Arc<core::Pod>) {
    let same = managed.wanted.as_ref().filter(|known| resize::same_amounts(&known.pod, &pod));
    let since = same.map_or_else(Instant::now, |known| known.since);
    managed.wanted = Some(WantedAmounts { pod, since });
}

/// Records that the pod is wanted with the amounts that it has. Returns true if its status had a pending
/// change.
pub(super) fn want_nothing(managed: &mut Managed) -> bool {
    managed.wanted = None;
    managed.resize.pending.take().is_some()
}

/// The pod's place among those that are wanted with other amounts; None if it isn't, or can't have any.
fn turn(managed: &Managed) -> Option<Turn<Instant>> {
    let wanted = managed.wanted.as_ref().filter(|_| managed.may_resize() && !managed.is_over())?;
    Some(Turn::of(&managed.pod, &wanted.pod, wanted.since))
}

/// Asks admission for the amounts that are wanted of the pod, and passes them on to the worker. The amounts
/// are in force once the cgroups have them. Returns true if the pod's status has changed.
fn try_resize(managed: &mut Managed, deps: &Deps) -> bool {
    let Some(WantedAmounts { pod, since }) = managed.wanted.take() else { return false };
    let (admission, events) = (&deps.admission, &deps.reports.events);
    let refused = if resize_changes_swap(&managed.pod, &pod, &deps.node.cgroup_config) {
        Some(("Infeasible", "In-place resize of containers with swap is not supported.".to_owned()))
    } else if let Some(message) = deps.pinning.refused_resize(&managed.pod) {
        Some(("Infeasible", message.to_owned()))
    } else {
        let refused = admission.resize(&pod, &managed.pod).err();
        refused.map(|why| (if why.infeasible { "Infeasible" } else { "Deferred" }, why.message))
    };
    if let Some((reason, message)) = refused {
        // The change is tried again whenever room is given back.
        let before = managed.resize.pending.replace(Pending { reason, message: message.clone() });
        if before.as_ref().is_none_or(|before| before.reason != reason) {
            let message = format!("{message}; the pod keeps its own amounts of cpu and memory");
            events.warning(Object::pod(&managed.pod), &format!("Resize{reason}"), &message);
        }
        managed.wanted = Some(WantedAmounts { pod, since });
        return before != managed.resize.pending;
    }
    managed.resize = ResizeFacts::default();
    events.normal(Object::pod(&pod), "Resized", "The pod's cpu or memory changes while it runs");
    info!(pod = %managed.name, "pod is resized: its cpu and memory change while it runs");
    managed.control.send_modify(|c| c.updated = Some(Arc::clone(&pod)));
    managed.pod = pod;
    true
}

/// Updates a pod that runs. The amounts stay until the pod has its turn.
pub(super) fn update(managed: &mut Managed, wanted: &Arc<core::Pod>) {
    if resize::same_amounts(wanted, &managed.pod) {
        want_nothing(managed);
        managed.pod = Arc::clone(wanted);
    } else {
        want(managed, Arc::clone(wanted));
        managed.pod = with_amounts_of(wanted, &managed.pod);
    }
    let pod = Arc::clone(&managed.pod);
    managed.control.send_modify(|c| c.updated = Some(pod));
}

/// The wanted pod, with the amounts of cpu and memory that the pod has.
pub(super) fn with_amounts_of(wanted: &Arc<core::Pod>, has: &core::Pod) -> Arc<core::Pod> {
    if resize::same_amounts(wanted, has) {
        return Arc::clone(wanted);
    }
    let mut pod = (**wanted).clone();
    resize::copy_amounts(&mut pod, has);
    Arc::new(pod)
}

/// A pod with the amounts that were accepted, if it is known which, whatever amounts are wanted of it by now.
pub(super) fn as_accepted(wanted: &Arc<core::Pod>, accepted: Option<&Accepted>) -> Arc<core::Pod> {
    let Some(accepted) = accepted else { return Arc::clone(wanted) };
    let mut pod = (**wanted).clone();
    accepted.apply_to(&mut pod);
    if resize::same_amounts(&pod, wanted) { Arc::clone(wanted) } else { Arc::new(pod) }
}

/// Tries all changes of amounts that are wanted, in the order of their turns: those that give room back
/// go before those that need some.
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

/// Asks for the amounts that are wanted of a pod which another instance of the agent admitted with others:
/// the room for them is not known yet (the kubelet's allocation manager asks again, too).
pub(super) fn ask_for_amounts(pods: &mut Pods, uid: &str, wanted: &Arc<core::Pod>) {
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
    if !managed.terminating() && !resize::same_amounts(wanted, &managed.pod) {
        update(managed, wanted);
    }
}

/// See [`beelet_model::request::Request::Enacted`].
pub(super) fn on_enacted(
    pods: &mut Pods,
    uid: &str,
    amounts: Result<BTreeMap<String, Option<core::ResourceRequirements>>, String>,
) {
    let Some(managed) = pods.by_uid.get_mut(uid) else { return };
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
