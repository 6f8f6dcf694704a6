//! Pods that are ended for good, and let run again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use beelet_policy::pod::{self, ContainerState, KillReason};
use jiff::Timestamp;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::{Managed, Manager, Terminate, hash_of};
use crate::records::PodRecord;
use beelet_model::{
    ended::Ended,
    failure::{DEADLINE_EXCEEDED, PodFailure},
    origin::Origin,
    status::has_ended,
};
use beelet_state::events::Object;

impl Manager {
    /// See [`beelet_model::request::Request::Fail`].
    pub(super) fn fail(&mut self, uid: &str, failure: &PodFailure) {
        let uid = &self.known_as(uid);
        let Some(managed) = self.pods.get_mut(uid) else {
            debug!(uid, reason = failure.reason, "a pod that was to be ended is gone already");
            return;
        };
        let own = beelet_model::pod::grace_period(&managed.pod);
        let grace = if let Some(known) = &mut managed.kept.failure {
            known.hasten(failure.grace, own);
            known.grace
        } else if managed.is_over() {
            debug!(pod = %managed.name, reason = failure.reason, "a pod that was to be ended has ended by itself");
            return;
        } else if managed.terminating() {
            // It goes anyway, and what it leaves is nothing: only the haste is new.
            failure.grace.filter(|grace| *grace < own)
        } else {
            let PodFailure { reason, message, .. } = failure;
            warn!(pod = %managed.name, uid, reason, "pod is ended: {message}");
            self.parts.deps.reports.events.warning(Object::pod(&managed.pod), reason, message.clone());
            managed.kept.failure = Some(failure.clone());
            failure.grace
        };
        managed.retry = false;
        // A deletion under way may be in more haste.
        let grace = match &managed.deletion {
            Some(deletion) => Some(grace.unwrap_or(own).min(deletion.grace)),
            None => grace,
        };
        self.parts.deps.admission.leaving(uid, grace.unwrap_or(own));
        managed.control.send_if_modified(|c| c.fail(Terminate { grace }, own));
        self.publish(uid);
    }

    /// The UID of the pod that a manifest of this UID means: one that was resized in place has kept its own.
    pub(super) fn known_as(&self, uid: &str) -> String {
        let of_manifest = |managed: &Managed| hash_of(&managed.pod).as_deref() == Some(uid);
        let resized = || self.pods.iter().find(|(_, managed)| of_manifest(managed)).map(|(known, _)| known);
        let resized = if self.pods.contains_key(uid) { None } else { resized() };
        resized.cloned().unwrap_or_else(|| uid.to_owned())
    }

    /// See [`beelet_model::request::Request::Retry`].
    pub(super) fn retry(&mut self, uid: &str) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        match &managed.kept.failure {
            Some(failure) if failure.cleared => {}
            Some(_) => {
                managed.retry = true;
                return;
            }
            None => return,
        }
        info!(pod = %managed.name, uid, "pod may run again");
        (managed.kept.failure, managed.retry) = (None, false);
        // As if it were new: with a start time and conditions of its own.
        (managed.kept.status, managed.seen, managed.kept.edge) = (None, None, None);
        managed.waiting.clear();
        managed.kept.probes.clear();
        managed.kept.hooked.clear();
        managed.kept.oom.clear();
        managed.oom_told.clear();
        managed.control.send_modify(|c| {
            c.failed = None;
            c.ended = false;
            c.counts = Arc::default();
            c.verdicts = pod::Verdicts::default();
        });
        self.publish(uid);
    }

    /// See [`beelet_model::request::Request::Restart`].
    pub(super) fn restart(&mut self, uid: &str, containers: &BTreeSet<String>) {
        let Some(managed) = self.pods.get_mut(uid).filter(|managed| managed.kept.failure.is_none()) else {
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
        info!(pod = %managed.name, uid, "containers are restarted on request");
    }

    /// What an earlier instance of the agent knew of a pod, and whether that pod is to run again once its end
    /// is over. One that was refused, or went with the machine, is as if it were new, as soon as nothing of
    /// it is left, but not where the API server knows of its end.
    pub(super) fn remembered(&self, uid: &str, origin: Origin) -> (Option<PodRecord>, bool) {
        let record = self.parts.records.get(uid);
        if origin.is_api() {
            return (record, false);
        }
        let failure = record.as_ref().and_then(|record| record.failure.as_ref());
        match failure.filter(|failure| failure.is_refusal() || failure.is_of_shutdown()) {
            Some(past) if past.cleared => (None, false),
            past => (record.clone(), past.is_some()),
        }
    }

    /// A pod that was ended for good, or deleted, has given everything back.
    pub(super) fn on_cleared(&mut self, uid: &str) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        if managed.kept.failure.is_none() && managed.deletion.is_none() {
            return;
        }
        managed.note_stopped();
        managed.kept.failure.iter_mut().for_each(|failure| failure.cleared = true);
        managed.deletion.iter_mut().for_each(|deletion| deletion.cleared = true);
        if let Some(ended) = managed.gone() {
            self.parts.deps.admission.released(uid, ended);
        }
        managed.waiting.clear();
        let retry = managed.retry;
        self.publish(uid);
        if retry {
            self.retry(uid);
        }
    }

    /// Ends the pods whose activeDeadlineSeconds are over.
    pub(super) fn fail_overdue(&mut self) {
        for uid in self.totals.overdue(Instant::now()) {
            // The kubelet's words.
            let message = "Pod was active on the node longer than the specified deadline";
            self.fail(&uid, &PodFailure::new(DEADLINE_EXCEEDED, message, None));
        }
    }
}

impl Managed {
    /// Returns true if its phase is final: none of its containers is started again.
    pub(super) fn is_over(&self) -> bool {
        has_ended(self.kept.status.as_deref())
    }

    /// The proof that nothing of it runs any more.
    pub(super) fn ended(&self) -> Option<Ended> {
        Ended::of(self.kept.status.as_deref(), self.has_stopped() || self.is_cleared())
    }

    /// The proof that its room is free: what was ended needs that until it has given everything back.
    pub(super) fn gone(&self) -> Option<Ended> {
        let is_ending = self.terminating() || self.kept.failure.is_some();
        self.ended().filter(|_| self.is_cleared() || !is_ending)
    }

    /// Notes that nothing of a pod runs any more that was ended for good, or deleted.
    pub(super) fn note_stopped(&mut self) {
        self.kept.failure.iter_mut().for_each(|failure| failure.stopped = true);
        self.deletion.iter_mut().for_each(|deletion| deletion.stopped = true);
    }

    /// When it must have ended, if it has a deadline that still means anything.
    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.kept.failure.is_some() || self.terminating() || self.is_over() {
            return None;
        }
        self.lifetime.as_ref()?.end(pod::active_limit(self.pod.spec.as_ref()?)?)
    }

    /// Remembers since when the pod has been active, by its status.
    pub(super) fn note_start(&mut self) {
        let start =
            self.kept.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
        if self.lifetime.as_ref().map(|lifetime| lifetime.start) != start {
            self.lifetime = start.map(|start| Lifetime::new(start, Timestamp::now()));
        }
    }
}

/// Since when a pod has been active. Its status tells that by the wall's clock, which may be set; from when
/// that was first seen the time that passes is a timer's.
#[derive(Debug)]
pub(super) struct Lifetime {
    start: Timestamp,
    seen: Instant,
    /// How old it was then.
    age: Duration,
}

impl Lifetime {
    fn new(start: Timestamp, now: Timestamp) -> Self {
        let age = Duration::try_from(now.duration_since(start)).unwrap_or(Duration::ZERO);
        Self { start, seen: Instant::now(), age }
    }

    /// When it must end that may be active for so long; None if that is never.
    fn end(&self, limit: Duration) -> Option<Instant> {
        self.seen.checked_add(limit.saturating_sub(self.age))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_deadline_counts_from_the_start_and_never_by_a_clock_that_was_set_back() {
        let start = Timestamp::from_second(1_700_000_000).unwrap();
        let (second, now) = (Duration::from_secs(1), Instant::now());
        let end = |ago: i64, limit: Duration| {
            Lifetime::new(start, Timestamp::from_second(1_700_000_000 + ago).unwrap()).end(limit)
        };
        assert_eq!(end(20, 60 * second), Some(now + 40 * second));
        assert_eq!(end(90, 60 * second), Some(now));
        assert_eq!(end(-3600, 60 * second), Some(now + 60 * second));
        assert_eq!(end(0, Duration::MAX), None);
    }
}
