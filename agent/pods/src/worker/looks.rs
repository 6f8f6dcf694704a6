//! A worker's looks at its pod: when the runtime is asked again, and when the last answer, or a list that the
//! runtime gave to another part, still stands.

use std::sync::Arc;

use beelet_policy::pod::{self, Actions};
use jiff::Timestamp;
use tokio::time::Instant;

use super::{container_ends::ContainerEnds, control::Control};
use crate::{
    error::Error,
    runtime_view::{self, Foreknown, Made, Observation, Observer},
    services::LookServices,
};
use beelet_model::request::Listed;
use beelet_units::moment::Moment;

/// Looks at one pod, and the facts that they leave.
pub(super) struct Looks {
    services: Arc<LookServices>,
    observer: Observer,
    /// The last look, if the worker did nothing since, and the number of changes that were known then.
    last: Option<(Arc<Observation>, u64)>,
    /// The last actions, and the state that they were decided on.
    last_done: Option<(pod::Observed, Actions)>,
    expected: Option<Expected>,
    /// Time of the last action, or of a list that was taken over: earlier lists don't show it.
    changed_at: Instant,
    ends: ContainerEnds,
}

/// The runtime's list after the last actions.
struct Expected {
    listed: Listed,
    /// Number of changes that were known before.
    changes: u64,
    /// A container ran then.
    runs: bool,
}

impl Looks {
    /// Looks at the pod of this UID.
    pub(super) fn new(services: &Arc<LookServices>, uid: String, known: Foreknown) -> Self {
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

    /// Looks at the pod. If the worker did nothing since the last look, and the runtime has reported only the
    /// ends of containers, the runtime is not asked again: it goes through all its pods for each list.
    ///
    /// # Errors
    /// The runtime gives no answer.
    pub(super) async fn observe(&mut self, control: &Control) -> Result<Arc<Observation>, Error> {
        let last = self.last.take().filter(|(_, changes)| *changes == control.changes);
        let seen = match last {
            Some((last, _)) => last,
            None => self.list(control).await?,
        };
        // The runtime's status of an end is newer than any list from before it.
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
        // A container that ran beside the new ones may have ended meanwhile.
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

    /// Asks the runtime for a pod that ends. Earlier lists don't show the actions until now.
    ///
    /// # Errors
    /// The runtime gives no answer.
    pub(super) async fn observe_at_end(&mut self) -> Result<Arc<Observation>, Error> {
        self.changed_at = Instant::now();
        (self.last, self.expected) = (None, None);
        Ok(Arc::new(self.services.calls.observe(self.observer.observe()).await?))
    }

    /// Asks the runtime for the last states of containers that were just stopped.
    ///
    /// # Errors
    /// The runtime gives no answer.
    pub(super) async fn last_states(&mut self) -> Result<Arc<Observation>, Error> {
        Ok(Arc::new(self.observer.observe().await?))
    }

    /// Decides the next actions of a pod by a look at it.
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

    /// The time of a moment, on the clock of timers.
    pub(super) fn instant(&self, at: Moment) -> Instant {
        self.ends.instant(at)
    }

    /// Notes that the worker does nothing until a change.
    pub(super) fn record_idle(&mut self, seen: &Arc<Observation>, control: &Control) {
        self.last = Some((Arc::clone(seen), control.changes));
    }

    /// Refuses actions that were just done in the same state: the runtime would be asked without end.
    /// Containers are started again all the same, after their delays.
    ///
    /// # Errors
    /// The last actions can't be seen yet.
    pub(super) fn check_progress(&mut self, seen: &Observation, actions: &Actions) -> Result<(), Error> {
        let is_same = |(state, done): (pod::Observed, Actions)| state == seen.pod && done == *actions;
        if self.last_done.take().is_some_and(is_same) && count(actions) > actions.start.len() {
            return Err(Error::Unseen(
                "what the runtime was asked to do, and said it did, can't be seen yet",
            ));
        }
        Ok(())
    }

    /// Notes the time of actions, which earlier lists don't show.
    pub(super) fn record_actions(&mut self) {
        self.changed_at = Instant::now();
    }

    /// Notes the actions that were done, and the list that the runtime would give now if they are known to
    /// have only made new containers.
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

    /// Forgets the last actions of a pod that has ended.
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
