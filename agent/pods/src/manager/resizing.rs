//! Pods that get other amounts of cpu and memory while they run: whether they may, and when they have them.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;
use tracing::info;

use super::{Managed, Manager};
use crate::deps::Deps;
use beelet_policy::resources::{cgroups::resize_changes_swap, resize_order::Turn};
use beelet_spec::resize::{self, Accepted, Pending, ResizeFacts};
use beelet_state::events::Object;

/// Other amounts that are wanted of a pod.
#[derive(Debug)]
pub(super) struct Wanted {
    /// The pod with them.
    pod: Arc<core::Pod>,
    /// Since when they are wanted.
    since: Instant,
}

impl Managed {
    /// The pod is wanted with other amounts. They are asked for when it has its turn.
    pub(super) fn want(&mut self, pod: Arc<core::Pod>) {
        let same = self.wanted.as_ref().filter(|known| resize::same_amounts(&known.pod, &pod));
        let since = same.map_or_else(Instant::now, |known| known.since);
        self.wanted = Some(Wanted { pod, since });
    }

    /// The pod is wanted with the amounts that it has. Returns true if its status said something else.
    pub(super) fn want_nothing(&mut self) -> bool {
        self.wanted = None;
        self.resize.pending.take().is_some()
    }

    /// The pod's place among those that are wanted with other amounts; None if it isn't, or can't have any.
    fn turn(&self) -> Option<Turn<Instant>> {
        let wanted = self.wanted.as_ref().filter(|_| self.may_resize() && !self.is_over())?;
        Some(Turn::of(&self.pod, &wanted.pod, wanted.since))
    }

    /// Asks whether the pod may have the amounts that are wanted of it; if so its worker is told. What is in
    /// force is known when the cgroups have it. Returns true if its status says something else now.
    fn try_resize(&mut self, deps: &Deps) -> bool {
        let Some(Wanted { pod, since }) = self.wanted.take() else { return false };
        let (admission, events) = (&deps.admission, &deps.reports.events);
        let refused = if resize_changes_swap(&self.pod, &pod, &deps.node.cgroup_config) {
            Some(("Infeasible", "In-place resize of containers with swap is not supported.".to_owned()))
        } else {
            let refused = admission.resize(&pod, &self.pod).err();
            refused.map(|why| (if why.infeasible { "Infeasible" } else { "Deferred" }, why.message))
        };
        if let Some((reason, message)) = refused {
            // The change is tried again whenever room is given back.
            let before = self.resize.pending.replace(Pending { reason, message: message.clone() });
            if before.as_ref().is_none_or(|before| before.reason != reason) {
                let message = format!("{message}; the pod keeps its own amounts of cpu and memory");
                events.warning(Object::pod(&self.pod), &format!("Resize{reason}"), &message);
            }
            self.wanted = Some(Wanted { pod, since });
            return before != self.resize.pending;
        }
        self.resize = ResizeFacts::default();
        events.normal(Object::pod(&pod), "Resized", "The pod's cpu or memory changes while it runs");
        info!(pod = %self.name, "pod is resized: its cpu and memory change while it runs");
        self.control.send_modify(|c| c.updated = Some(Arc::clone(&pod)));
        self.pod = pod;
        true
    }
}

/// A pod with the amounts that were accepted, if it is known which, whatever amounts are wanted of it by now.
pub(super) fn as_accepted(wanted: &Arc<core::Pod>, accepted: Option<&Accepted>) -> Arc<core::Pod> {
    let Some(accepted) = accepted else { return Arc::clone(wanted) };
    let mut pod = (**wanted).clone();
    accepted.apply_to(&mut pod);
    if resize::same_amounts(&pod, wanted) { Arc::clone(wanted) } else { Arc::new(pod) }
}

impl Manager {
    /// Tries all changes of amounts that are wanted, in the order of their turns: those that give room back
    /// go before those that need some.
    pub(super) fn try_resizes(&mut self) {
        let waiting = self.pods.iter().filter_map(|(uid, managed)| Some((managed.turn()?, uid.clone())));
        let mut waiting: Vec<_> = waiting.collect();
        waiting.sort();
        for (_, uid) in waiting {
            let changed = self.pods.get_mut(&uid).is_some_and(|managed| managed.try_resize(&self.parts.deps));
            if changed {
                self.publish(&uid);
            }
        }
    }

    /// Asks for the amounts that are wanted of a pod which another instance of the agent let in with others:
    /// nobody has looked yet whether there is room for them (the kubelet's allocation manager asks anew,
    /// too).
    pub(super) fn ask_for_amounts(&mut self, uid: &str, wanted: &Arc<core::Pod>) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        if !managed.terminating() && !resize::same_amounts(wanted, &managed.pod) {
            managed.update(wanted);
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
