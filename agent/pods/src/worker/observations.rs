//! A worker's observations of its pod: decides when to query the runtime again, and when the last response,
//! or a list that another part received from the runtime, is still valid.

use std::sync::Arc;

use beelet_policy::pod::{self, Actions};
use jiff::Timestamp;
use tokio::time::Instant;

use super::{container_ends::ContainerEnds, control::Control};
use crate::{
    error::Error,
    runtime_view::{self, Foreknown, Made, Observation, Observer},
    services::ObservationServices,
};
use beelet_model::request::Listed;
use beelet_units::moment::Moment;

/// Observations of one pod, and the facts derived from them.
pub(super) struct Observations {
    services: Arc<ObservationServices>,
    observer: Observer,
    /// The last observation, if the worker has not acted since, with the number of changes known then.
    last: Option<(Arc<Observation>, u64)>,
    /// The state that led to the last actions, and these actions.
    last_done: Option<(pod::Observed, Actions)>,
    expected: Option<Expected>,
    /// Time of the last action or of the last list from another part. Earlier lists are outdated.
    changed_at: Instant,
    ends: ContainerEnds,
}

/// The runtime's list after the last actions.
struct Expected {
    listed: Listed,
    /// Number of changes known before the actions.
    changes: u64,
    /// A container was running before the actions.
    runs: bool,
}

impl Observations {
    /// Returns an observer of the pod with this UID.
    pub(super) fn new(services: &Arc<ObservationServices>, uid: String, known: Foreknown) -> Self {
        Self {
            services: Arc::clone(services),
            observer: Observer::new(services.runtime.clone(), uid, known),
            last: None,
            last_done: None,
            expected: None,
            changed_at: Instant::now(),
            ends: ContainerEnds::new(),
        }
    }

    /// Observes the pod. If the worker has not acted since the last observation, and the runtime has reported
    /// only ended containers, the runtime is not queried again: a runtime iterates over all pods for each
    /// list.
    ///
    /// # Errors
    /// The query to the runtime fails.
    pub(super) async fn observe(&mut self, control: &Control) -> Result<Arc<Observation>, Error> {
        let last = self.last.take().filter(|(_, changes)| *changes == control.changes);
        let seen = match last {
            Some((last, _)) => last,
            None => self.list(control).await?,
        };
        // The runtime's status of an ended container is newer than any list from before the end.
        let ended = control.exited.values().filter(|status| seen.is_running(&status.id));
        let ended: Vec<_> = ended.map(|status| (**status).clone()).collect();
        if ended.is_empty() {
            return Ok(seen);
        }
        let ended = runtime_view::with_last_words(ended).await;
        let ended: Vec<_> = ended.into_iter().map(Arc::new).collect();
        let seen = ended.iter().fold((*seen).clone(), Observation::with_newer);
        ended.into_iter().for_each(|status| self.observer.record(status));
        Ok(Arc::new(seen))
    }

    async fn list(&mut self, control: &Control) -> Result<Arc<Observation>, Error> {
        // An older container may have ended since the new containers were started.
        let expected = self.expected.take().filter(|e| !e.runs || e.changes == control.changes);
        if let Some(expected) = expected {
            self.observer.expect(expected.listed);
        }
        if let Some((at, listed)) = control.listed.as_ref().filter(|(at, _)| *at > self.changed_at) {
            self.changed_at = *at;
            self.observer.expect((**listed).clone());
        }
        Ok(Arc::new(self.services.calls.observe(self.observer.observe()).await?))
    }

    /// Queries the runtime for a terminating pod. Earlier lists may lack the latest actions.
    ///
    /// # Errors
    /// The query to the runtime fails.
    pub(super) async fn observe_at_end(&mut self) -> Result<Arc<Observation>, Error> {
        self.changed_at = Instant::now();
        (self.last, self.expected) = (None, None);
        Ok(Arc::new(self.services.calls.observe(self.observer.observe()).await?))
    }

    /// Queries the runtime for the last states of containers that were just stopped.
    ///
    /// # Errors
    /// The query to the runtime fails.
    pub(super) async fn last_states(&mut self) -> Result<Arc<Observation>, Error> {
        Ok(Arc::new(self.observer.observe().await?))
    }

    /// Decides the next actions for an observed pod.
    pub(super) fn decide(
        &mut self,
        pod: &k8s_openapi::api::core::v1::Pod,
        seen: &Observation,
        verdicts: &pod::Verdicts,
    ) -> Actions {
        self.ends.record(&seen.pod, Timestamp::now());
        let times = pod::Times { ended: self.ends.known(), now: self.ends.now() };
        pod::actions(pod, &seen.pod, verdicts, self.services.max_restart_delay, times)
    }

    /// Converts a moment to a timer's instant.
    pub(super) fn instant(&self, at: Moment) -> Instant {
        self.ends.instant(at)
    }

    /// Records that the worker is idle until the next change.
    pub(super) fn record_idle(&mut self, seen: &Arc<Observation>, control: &Control) {
        self.last = Some((Arc::clone(seen), control.changes));
    }

    /// Rejects actions that were just executed in the same state, to prevent an endless loop of calls to the
    /// runtime. Starts of containers may repeat, after their delays.
    ///
    /// # Errors
    /// The runtime does not show the last actions yet.
    pub(super) fn check_progress(&mut self, seen: &Observation, actions: &Actions) -> Result<(), Error> {
        let is_same = |(state, done): (pod::Observed, Actions)| state == seen.pod && done == *actions;
        if self.last_done.take().is_some_and(is_same) && count(actions) > actions.start.len() {
            return Err(Error::Unseen("the runtime does not show the result of the last actions yet"));
        }
        Ok(())
    }

    /// Records the time of actions, which earlier lists do not show.
    pub(super) fn record_actions(&mut self) {
        self.changed_at = Instant::now();
    }

    /// Records the executed actions and, if they only created containers, the list that the runtime would
    /// return now.
    pub(super) fn record_done(
        &mut self,
        seen: &Observation,
        actions: Actions,
        made: Option<Made>,
        changes: u64,
    ) {
        if let Some(made) = made {
            let runs = seen.pod.containers.iter().any(|c| seen.is_running(&c.id));
            self.expected = Some(Expected { listed: made.listed_after(seen), changes, runs });
        }
        self.last_done = Some((seen.pod.clone(), actions));
    }

    /// Clears the last actions of a pod that has ended.
    pub(super) fn forget_actions(&mut self) {
        self.last_done = None;
    }
}

/// Number of actions.
pub(super) fn count(actions: &Actions) -> usize {
    actions.kill.len()
        + actions.stop_sandboxes.len()
        + usize::from(actions.create_sandbox.is_some())
        + actions.remove_containers.len()
        + actions.remove_sandboxes.len()
        + actions.post_start.len()
        + actions.start.len()
}
