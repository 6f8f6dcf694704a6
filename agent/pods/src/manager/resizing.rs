//! Pods that get other amounts of cpu and memory while they run: whether they may, and when they have them.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1 as core;
use tracing::info;

use super::{Managed, Manager};
use crate::launch::Launcher;
use beelet_policy::cgroups::resize_changes_swap;
use beelet_spec::resize::{self, Accepted, Pending, ResizeFacts};
use beelet_state::events::Object;

impl Managed {
    /// Asks whether the pod may have the amounts that `pod` has; if so its worker is told. What is in force
    /// is known when the cgroups have it.
    pub(super) fn try_resize(&mut self, pod: &Arc<core::Pod>, launcher: &Launcher) -> bool {
        let Launcher { admission, events, .. } = launcher;
        let refused = if resize_changes_swap(&self.pod, pod, &launcher.cgroup_config) {
            Some(("Infeasible", "In-place resize of containers with swap is not supported.".to_owned()))
        } else {
            let refused = admission.resize(pod).err();
            refused.map(|why| (if why.infeasible { "Infeasible" } else { "Deferred" }, why.message))
        };
        if let Some((reason, message)) = refused {
            // It is looked at again whenever a pod is gone.
            let pending = Some(Pending { reason, message });
            if self.resize.pending != pending {
                let message = pending.as_ref().map(|pending| pending.message.as_str()).unwrap_or_default();
                let message = format!("{message}; the pod keeps its own amounts of cpu and memory");
                events.warning(Object::pod(&self.pod), &format!("Resize{reason}"), &message);
            }
            self.resize.pending = pending;
            return false;
        }
        self.resize = ResizeFacts::default();
        events.normal(Object::pod(pod), "Resized", "The pod's cpu or memory changes while it runs");
        info!(pod = %self.name, "pod is resized: its cpu and memory change while it runs");
        self.control.send_modify(|c| c.updated = Some(Arc::clone(pod)));
        true
    }
}

/// A pod with the amounts that were accepted, if it is known which, whatever amounts are wanted of it by now.
pub(super) fn as_accepted(wanted: &Arc<core::Pod>, accepted: Option<&Accepted>) -> Arc<core::Pod> {
    let Some(accepted) = accepted else { return Arc::clone(wanted) };
    let mut pod = (**wanted).clone();
    accepted.give(&mut pod);
    if resize::same_amounts(&pod, wanted) { Arc::clone(wanted) } else { Arc::new(pod) }
}

impl Manager {
    /// Asks for the amounts that are wanted of a pod which another instance of the agent let in with others:
    /// nobody has looked yet whether there is room for them (the kubelet's allocation manager asks anew,
    /// too).
    pub(super) fn ask_for_amounts(&mut self, uid: &str, wanted: &Arc<core::Pod>) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        if !managed.terminating() && !resize::same_amounts(wanted, &managed.pod) {
            managed.update(wanted, &self.parts.launcher);
        }
    }

    /// See [`beelet_model::request::Request::Enacted`].
    pub(super) fn on_enacted(
        &mut self,
        uid: &str,
        amounts: Result<BTreeMap<String, Option<core::ResourceRequirements>>, String>,
    ) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        match amounts {
            Ok(enacted) => {
                managed.resize.error = None;
                if let Some(status) = &mut managed.kept.status {
                    resize::enact(Arc::make_mut(status), uid, &enacted);
                }
            }
            Err(error) => managed.resize.error = Some(error),
        }
        self.publish(uid);
    }
}
