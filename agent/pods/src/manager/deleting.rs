//! Static pods that a person deletes: how they go, and what is shown of the pod that waits for their name.

use std::sync::Arc;
use std::time::Duration;

use beelet_base::clock::After as _;
use jiff::Timestamp;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::Time};
use tracing::info;

use super::{Managed, Manager, Terminate};
use crate::records::Leaving;
use beelet_model::{
    desired::Desired, labels::ANNOTATION_WAITS_FOR, origin::Origin, status::whole_second, table::PodEntry,
};
use beelet_state::events::Object;

/// The reason of the event of a pod that waits until one that was deleted by force is gone.
const WAITS: &str = "WaitsForDeletedPod";

/// The pod that waits until one that was deleted by force is gone.
#[derive(Debug)]
pub(super) struct Successor {
    /// As it is desired.
    pod: Arc<core::Pod>,
    /// As it is shown.
    pub(super) entry: Arc<PodEntry>,
}

impl Successor {
    /// The pod that waits for the one of the UID `before`.
    fn new(pod: Arc<core::Pod>, before: &str) -> Self {
        let mut shown = (*pod).clone();
        let annotations = shown.metadata.annotations.get_or_insert_default();
        annotations.insert(ANNOTATION_WAITS_FOR.to_owned(), before.to_owned());
        shown.status = Some(core::PodStatus { phase: Some("Pending".to_owned()), ..Default::default() });
        Self { pod, entry: Arc::new(PodEntry::of(shown)) }
    }
}

impl Manager {
    /// See [`beelet_model::request::Request::Delete`].
    pub(super) fn delete(&mut self, uid: &str, grace: Option<Duration>, force: bool) {
        let uid = &self.known_as(uid);
        let Some(managed) = self.static_pod(uid) else { return };
        if force {
            info!(pod = %managed.name, uid, "pod is deleted by force; people see it no more while what is left of it ends");
            managed.kept.abandoned = true;
        }
        if managed.is_dropped() {
            self.hasten(uid, grace);
        } else {
            managed.asked_grace = grace;
        }
        self.publish(uid);
        self.due.reconcile |= force;
    }

    /// See [`beelet_model::request::Request::Terminate`].
    pub(super) fn terminate_on_request(&mut self, uid: &str) {
        let uid = &self.known_as(uid);
        self.terminate(uid);
        let Some(managed) = self.static_pod(uid) else { return };
        managed.kept.leaving.get_or_insert_default().on_request = true;
        self.publish(uid);
        // Its manifest may be there again.
        self.due.reconcile = true;
    }

    /// Terminates a pod: once nothing is left of it, it is forgotten.
    pub(super) fn terminate(&mut self, uid: &str) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        if managed.is_dropped() {
            return;
        }
        info!(pod = %managed.name, uid, "pod is terminated");
        let asked = managed.asked_grace;
        managed.control.send_modify(|c| c.terminate = Some(Terminate { grace: asked }));
        if !managed.origin().is_api() {
            managed.kept.leaving = Some(Leaving { grace: asked, on_request: false });
        }
        let grace = asked.unwrap_or_else(|| beelet_model::pod::grace_period(&managed.pod));
        managed.mark_deleted(grace);
        self.parts.deps.admission.leaving(uid, grace);
        self.publish(uid);
    }

    fn static_pod(&mut self, uid: &str) -> Option<&mut Managed> {
        self.pods.get_mut(uid).filter(|managed| !managed.origin().is_api())
    }

    /// Ends a pod that is terminated sooner, if `grace` is shorter than what it was given.
    fn hasten(&mut self, uid: &str, grace: Option<Duration>) {
        let (Some(managed), Some(grace)) = (self.pods.get_mut(uid), grace) else { return };
        let own = beelet_model::pod::grace_period(&managed.pod);
        let given = managed.control.borrow().terminate.and_then(|end| end.grace).unwrap_or(own);
        if grace >= given {
            return;
        }
        info!(pod = %managed.name, uid, grace_seconds = grace.as_secs(), "the end of a pod is hastened");
        managed.control.send_modify(|c| c.terminate = Some(Terminate { grace: Some(grace) }));
        managed.kept.leaving.get_or_insert_default().grace = Some(grace);
        managed.mark_deleted(grace);
        self.parts.deps.admission.leaving(uid, grace);
    }

    /// Shows, in the place of each pod that was deleted by force, the pod of its name that waits for it.
    pub(super) fn note_successors(&mut self, desired: &Desired) {
        let mut changed = Vec::new();
        for (uid, managed) in self.pods.iter_mut().filter(|(_, managed)| managed.kept.abandoned) {
            let wanted = desired.pods.get(&managed.name).filter(|_| managed.is_dropped());
            let wanted = wanted.filter(|pod| !Origin::of(pod).is_api());
            if managed.successor.as_ref().map(|known| &known.pod) == wanted {
                continue;
            }
            if let Some(pod) = wanted {
                let message =
                    "the pod waits: the pod of this name that was deleted by force has not ended yet";
                self.parts.deps.reports.events.warning(Object::pod(pod), WAITS, message.to_owned());
            }
            managed.successor = wanted.map(|pod| Successor::new(Arc::clone(pod), uid));
            changed.push(uid.clone());
        }
        changed.iter().for_each(|uid| self.publish(uid));
    }
}

impl Managed {
    /// Notes in the pod's metadata that it is deleted, and gets so long to end from now on.
    pub(super) fn mark_deleted(&mut self, grace: Duration) {
        let deadline = Timestamp::now().after(grace);
        let metadata = &mut Arc::make_mut(&mut self.pod).metadata;
        metadata.deletion_timestamp = Some(Time(whole_second(deadline)));
        metadata.deletion_grace_period_seconds = i64::try_from(grace.as_secs()).ok();
    }
}
