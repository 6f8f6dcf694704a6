//! The facts of a decision about a pod: the containers that count, their exit codes and their delays. Must
//! never choose an action.

use std::{collections::BTreeMap, time::Duration};

use beelet_units::moment::Moment;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container as ContainerSpec, PodSpec};

use super::{
    Container, ContainerState, KillReason, Observed, Outcome, Round, Sandbox, Times, Verdicts, init_restarts,
    is_sidecar, may_restart_all, observed::newest, restart, restart_delay, restarts, restarts_when_killed,
    round,
};

/// A pod's spec, the runtime's state, and values derived from both.
pub(super) struct Facts<'a> {
    pub(super) spec: &'a PodSpec,
    pub(super) observed: &'a Observed,
    pub(super) verdicts: &'a Verdicts,
    pub(super) times: Times<'a>,
    max_restart_delay: Duration,
    /// The sandbox that containers run in; `None` if a new one is needed.
    pub(super) current: Option<&'a Sandbox>,
    /// The newest container of each name, in any sandbox: it holds the restart count.
    pub(super) newest: BTreeMap<&'a str, &'a Container>,
    pub(super) round: Round,
}

impl<'a> Facts<'a> {
    pub(super) fn new(
        spec: &'a PodSpec,
        observed: &'a Observed,
        verdicts: &'a Verdicts,
        max_restart_delay: Duration,
        times: Times<'a>,
    ) -> Self {
        let current = observed.sandboxes.iter().filter(|s| s.ready).max_by_key(|s| (s.attempt, &s.id));
        let newest = newest(observed);
        let round = Round::of_newest(spec, &newest);
        Self { spec, observed, verdicts, times, max_restart_delay, current, newest, round }
    }

    /// Returns the container of this name in the current sandbox and round: earlier attempts are history.
    pub(super) fn here(&self, name: &str) -> Option<&'a Container> {
        let current = self.current?;
        self.newest.get(name).copied().filter(|c| c.sandbox_id == current.id && !self.round.is_past(c))
    }

    /// Returns the exit code of the newest container of this name, if it has ended. A container to be
    /// replaced in any case has none; for one that the runtime has lost the last known code counts.
    pub(super) fn exit_code(&self, name: &str) -> Option<i32> {
        let Some(newest) = self.newest.get(name) else {
            return self.verdicts.last_codes.get(name).copied();
        };
        let counts = |c: &&&Container| !self.round.is_past(c) && !self.is_outdated(c) && !self.comes_back(c);
        match Some(newest).filter(counts).map(|c| &c.state) {
            Some(ContainerState::Exited { exit_code, .. }) => Some(*exit_code),
            _ => None,
        }
    }

    /// Returns true if a container was stopped for a replacement that matches the pod's spec.
    pub(super) fn is_outdated(&self, container: &Container) -> bool {
        let reason = self.verdicts.condemned.get(&container.id);
        matches!(reason, Some(KillReason::Redefined | KillReason::Resized))
    }

    /// Returns true if the reason for stopping a container requires its restart.
    pub(super) fn comes_back(&self, container: &Container) -> bool {
        let reason = self.verdicts.condemned.get(&container.id);
        let mut own = self.spec.containers.iter().filter(|c| c.name == container.name);
        reason.is_some_and(|reason| reason.is_for_a_restart())
            && own.any(|c| restarts_when_killed(self.spec, c))
    }

    pub(super) fn init_containers(&self) -> &'a [ContainerSpec] {
        self.spec.init_containers.as_deref().unwrap_or_default()
    }

    /// Returns the pod's outcome, if it has ended.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        let outcome_of = |codes: &[Option<i32>]| {
            let all_zero = codes.iter().all(|code| *code == Some(0));
            if all_zero { Outcome::Succeeded } else { Outcome::Failed }
        };
        let mut regular = self.init_containers().iter().filter(|c| !is_sidecar(c));
        if regular.any(|c| {
            self.exit_code(&c.name).is_some_and(|code| code != 0 && !init_restarts(self.spec, c, code))
        }) {
            return Some(Outcome::Failed);
        }
        let mut own = self.spec.containers.iter();
        let codes: Vec<Option<i32>> = own.clone().map(|c| self.exit_code(&c.name)).collect();
        // A dead sandbox took its containers along; if none of them is ever restarted, the pod has ended.
        let comes_back = own.any(|c| restart::ever_restarts(self.spec, c)) || may_restart_all(self.spec);
        if self.current.is_none() && !self.observed.containers.is_empty() && !comes_back {
            return Some(outcome_of(&codes));
        }
        let ended_for_good = |(c, code): (&ContainerSpec, &Option<i32>)| {
            code.is_some_and(|code| !restarts(self.spec, c, code))
        };
        let all = self.spec.containers.iter().zip(&codes).all(ended_for_good);
        all.then(|| outcome_of(&codes))
    }

    pub(super) fn is_started(&self, name: &str) -> bool {
        self.here(name).is_some_and(|c| {
            matches!(c.state, ContainerState::Running { .. }) && self.verdicts.started.contains(&c.id)
        })
    }

    /// Returns the delay before an ended container restarts, and its end.
    pub(super) fn delay_after(&self, container: &Container) -> Option<(Duration, Moment)> {
        let ContainerState::Exited { started_at, finished_at, .. } = container.state else { return None };
        let ran = started_at.map_or(Duration::ZERO, |s| elapsed(s, finished_at));
        let delay = restart_delay(container.attempt, container.restart_delay, ran, self.max_restart_delay);
        let ended = self.ended_at(container);
        if self.waits_for_nothing(container, ended, delay) {
            return Some((delay, ended));
        }
        Some((delay, ended.plus(delay)))
    }

    pub(super) fn ended_at(&self, container: &Container) -> Moment {
        self.times.ended.get(&container.id).copied().unwrap_or(self.times.now)
    }

    /// Returns true if a container stopped by a probe is replaced at once: the kubelet stops the old
    /// container and starts the new one in one step, and counts the delay from the latest end known at that
    /// time, which is the previous one's (doBackOff). Without a previous end the delay is zero. If that delay
    /// has not passed, a later step decides, and counts from this container's end.
    pub(super) fn waits_for_nothing(&self, container: &Container, ended: Moment, delay: Duration) -> bool {
        let reason = self.verdicts.condemned.get(&container.id);
        if !matches!(reason, Some(KillReason::Liveness | KillReason::Startup)) {
            return false;
        }
        let is_before = |c: &&Container| {
            c.name == container.name
                && c.attempt < container.attempt
                && matches!(c.state, ContainerState::Exited { .. })
        };
        let before = self.observed.containers.iter().filter(is_before).max_by_key(|c| (c.attempt, &c.id));
        before.is_none_or(|before| self.ended_at(before).plus(delay) <= ended)
    }

    /// Returns the delay of the container that required the restart of all, and its end. The kubelet
    /// restarts at once, but a container that requires a restart as soon as it starts would keep the node
    /// busy.
    pub(super) fn delay_of_round(&self, container: &Container) -> Option<(Duration, Moment)> {
        let spec = round::all(self.spec).find(|spec| spec.name == container.name)?;
        if !round::asks_for_all(spec, container) {
            return None;
        }
        self.delay_after(container)
    }

    /// Returns the delay before the first instance of a name in this sandbox and round.
    pub(super) fn first_delay(&self, name: &str) -> Duration {
        let before = self.newest.get(name).copied().filter(|c| self.round.is_past(c));
        before.and_then(|c| self.delay_of_round(c)).map_or(Duration::ZERO, |(delay, _)| delay)
    }
}

fn elapsed(from: Timestamp, to: Timestamp) -> Duration {
    Duration::try_from(to.duration_since(from)).unwrap_or(Duration::ZERO)
}
