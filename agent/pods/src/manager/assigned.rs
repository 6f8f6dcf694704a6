//! Pods that the API server assigns to the node. They are known by their UID, may change while they run, and
//! are deleted in two steps: the API server says until when a pod may take to end, and forgets it once it is
//! told that nothing is left.

use std::{sync::Arc, time::Duration};

use beelet_policy::pod::api_status;
use beelet_units::bounds;
use jiff::Timestamp;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::Time};
use tracing::info;

use super::{Managed, Manager, Terminate};
use beelet_model::{
    failure::PodFailure,
    pod::grace_period,
    status::{has_ended, whole_second},
};
use beelet_spec::resize;

/// The deletion of a pod whose object is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deletion {
    /// What its containers get to end by themselves.
    pub(super) grace: Duration,
    /// Nothing of it runs any more.
    pub(super) stopped: bool,
    /// Nothing is left of it but logs.
    pub(super) cleared: bool,
}

impl Deletion {
    /// The deletion that the API server asks for, if it does.
    pub(super) fn of(pod: &core::Pod) -> Option<Self> {
        pod.metadata.deletion_timestamp.as_ref()?;
        let seconds = pod.metadata.deletion_grace_period_seconds;
        let grace = seconds.map_or_else(|| grace_period(pod), bounds::grace);
        Some(Self { grace, stopped: false, cleared: false })
    }
}

impl Manager {
    /// Takes in what the API server wants of a pod that is here.
    pub(super) fn follow_assigned(&mut self, uid: &str, wanted: &Arc<core::Pod>) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        let is_known = managed.assigned.as_ref().is_some_and(|known| Arc::ptr_eq(known, wanted));
        // One that was dropped goes, whatever is said of it now.
        if managed.is_dropped() || is_known {
            return;
        }
        managed.assigned = Some(Arc::clone(wanted));
        let known = managed.deletion;
        managed.delete(wanted);
        match managed.deletion {
            Some(deletion) => {
                if known != managed.deletion {
                    info!(pod = %managed.name, uid, grace_seconds = deletion.grace.as_secs(), "pod is deleted");
                    self.parts.deps.admission.leaving(uid, deletion.grace);
                }
            }
            None => managed.update(wanted),
        }
        let ended = wanted.status.as_ref().filter(|status| has_ended(Some(status)));
        if let Some(status) = ended.filter(|_| managed.kept.failure.is_none() && !managed.is_over()) {
            // Somebody else has ended it there: nobody counts on it any more.
            let text = |text: &Option<String>, or: &str| text.clone().unwrap_or_else(|| or.to_owned());
            let reason = text(&status.reason, "Terminated");
            let message = text(&status.message, "The API server says that the pod has ended");
            self.fail(uid, &PodFailure::new(reason, message, None));
        }
        self.publish(uid);
    }
}

impl Managed {
    /// Begins the deletion that `wanted` asks for, if it does, or hastens it.
    fn delete(&mut self, wanted: &Arc<core::Pod>) {
        let Some(asked) = Deletion::of(wanted) else { return };
        let (stopped, cleared) = (self.has_stopped(), self.is_cleared());
        let own = grace_period(wanted);
        let grace = self.deletion.map_or(asked.grace, |known| known.grace.min(asked.grace));
        self.deletion = Some(Deletion { grace, stopped, cleared });
        self.pod = with_amounts_of(wanted, &self.pod);
        self.control.send_if_modified(|c| c.fail(Terminate { grace: Some(grace) }, own));
    }

    /// Changes a pod while it runs. Its amounts stay as they are until it has its turn.
    pub(super) fn update(&mut self, wanted: &Arc<core::Pod>) {
        if resize::same_amounts(wanted, &self.pod) {
            self.want_nothing();
            self.pod = Arc::clone(wanted);
        } else {
            self.want(Arc::clone(wanted));
            self.pod = with_amounts_of(wanted, &self.pod);
        }
        let pod = Arc::clone(&self.pod);
        self.control.send_modify(|c| c.updated = Some(pod));
    }

    /// Returns true if it was ended, and nothing of it runs any more.
    pub(super) fn has_stopped(&self) -> bool {
        self.deletion.is_some_and(|deletion| deletion.stopped)
            || self.kept.failure.as_ref().is_some_and(PodFailure::has_stopped)
    }

    /// Returns true if it was ended, and nothing is left of it but logs.
    pub(super) fn is_cleared(&self) -> bool {
        self.deletion.is_some_and(|deletion| deletion.cleared)
            || self.kept.failure.as_ref().is_some_and(|failure| failure.cleared)
    }

    /// Notes in a status which claims others have made for the pod.
    pub(super) fn note_claims(&self, status: &mut core::PodStatus) {
        let Some(of) = self.assigned.as_ref().and_then(|pod| pod.status.as_ref()) else { return };
        status.resource_claim_statuses.clone_from(&of.resource_claim_statuses);
        status.extended_resource_claim_status.clone_from(&of.extended_resource_claim_status);
    }

    /// Notes in a status how the pod's readiness gates stand, which others open in the API server: until then
    /// it isn't ready.
    pub(super) fn note_gates(&self, status: &mut core::PodStatus) {
        let Some(assigned) = &self.assigned else { return };
        let gates = assigned.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
        let gates: Vec<&str> = gates.map(|gate| gate.condition_type.as_str()).collect();
        if gates.is_empty() {
            return;
        }
        let in_api = assigned.status.clone().unwrap_or_default();
        let others = in_api.conditions.iter().flatten().filter(|c| gates.contains(&c.type_.as_str()));
        let others: Vec<_> = others.filter(|c| !api_status::is_owned(&c.type_)).cloned().collect();
        api_status::open_gates(assigned, &in_api, status, &Time(whole_second(Timestamp::now())));
        let find = |status: &core::PodStatus| {
            let mut all = status.conditions.iter().flatten();
            all.find(|c| c.type_ == "Ready" && c.status == "False")
                .and_then(|c| c.last_transition_time.clone())
        };
        // It was shut before, too.
        let since = self.kept.status.as_deref().and_then(find);
        let conditions = status.conditions.get_or_insert_default();
        for ready in conditions.iter_mut().filter(|c| c.type_ == "Ready" && c.status == "False") {
            ready.last_transition_time = since.clone().or(ready.last_transition_time.take());
        }
        conditions.retain(|c| others.iter().all(|other| other.type_ != c.type_));
        conditions.extend(others);
    }

    /// Notes in a status which generation of the pod it is about.
    pub(super) fn note_generation(&self, status: &mut core::PodStatus) {
        let Some(generation) = self.assigned.as_ref().and_then(|pod| pod.metadata.generation) else { return };
        status.observed_generation = Some(generation);
        for condition in status.conditions.iter_mut().flatten() {
            condition.observed_generation = Some(generation);
        }
    }
}

/// The pod as it is wanted, with the amounts of cpu and memory that it has.
fn with_amounts_of(wanted: &Arc<core::Pod>, has: &core::Pod) -> Arc<core::Pod> {
    if resize::same_amounts(wanted, has) {
        return Arc::clone(wanted);
    }
    let mut pod = (**wanted).clone();
    resize::copy_amounts(&mut pod, has);
    Arc::new(pod)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_api_server_says_how_long_a_deleted_pod_gets() {
        let check = |metadata: serde_json::Value, expected: Option<u64>| {
            let spec = json!({"terminationGracePeriodSeconds": 7, "containers": []});
            let pod: core::Pod = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
            assert_eq!(Deletion::of(&pod).map(|deletion| deletion.grace.as_secs()), expected);
        };
        let now = "2026-01-01T00:00:00Z";
        check(json!({}), None);
        check(json!({"deletionGracePeriodSeconds": 3}), None);
        check(json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": 3}), Some(3));
        check(json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": -3}), Some(0));
        check(json!({"deletionTimestamp": now}), Some(7));
        check(
            json!({"deletionTimestamp": now, "deletionGracePeriodSeconds": i64::MAX}),
            Some(366 * 24 * 3600),
        );
    }
}
