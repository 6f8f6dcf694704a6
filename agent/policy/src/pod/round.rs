//! Restarts of all containers of a pod in their sandbox, init containers included (`RestartAllContainers`,
//! KEP-5532).
//!
//! The runtime stores the *round* of each container. A container that ends with a matching rule begins the
//! next round: containers of earlier rounds are stopped and are history from then on, like containers of an
//! earlier sandbox. So the progress of a restart is known at any moment, and an agent that was killed in the
//! middle continues.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container as ContainerSpec, PodSpec};

use super::{
    Backoff, Container, ContainerState, Decision, KillReason, Observed,
    observed::newest,
    restart::{RESTART_ALL, rule},
};

/// The number of joint restarts of a pod's containers, and the remains of earlier rounds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// Round in which containers are started.
    pub number: u32,
    /// True until the first container of the round starts.
    pub begins: bool,
    /// Ids of containers of an earlier round that are still the newest of their names.
    past: BTreeSet<String>,
}

/// Returns true if any of a pod's containers may require a restart of all.
pub fn may_restart_all(spec: &PodSpec) -> bool {
    let asks = |c: &ContainerSpec| {
        c.restart_policy.is_some()
            && c.restart_policy_rules.iter().flatten().any(|rule| rule.action == RESTART_ALL)
    };
    all(spec).any(asks)
}

pub(super) fn all(spec: &PodSpec) -> impl Iterator<Item = &ContainerSpec> {
    spec.init_containers.iter().flatten().chain(&spec.containers)
}

/// Returns true if a container's end requires a restart of all.
pub(super) fn asks_for_all(spec: &ContainerSpec, container: &Container) -> bool {
    let ContainerState::Exited { exit_code, .. } = container.state else { return false };
    rule(spec, exit_code).is_some_and(|rule| rule.action == RESTART_ALL)
}

impl Round {
    /// Returns the round of a pod with the containers in `observed`.
    pub fn of(spec: &PodSpec, observed: &Observed) -> Self {
        if !may_restart_all(spec) {
            return Self::default();
        }
        Self::of_newest(spec, &newest(observed))
    }

    pub(super) fn of_newest(spec: &PodSpec, newest: &BTreeMap<&str, &Container>) -> Self {
        if !may_restart_all(spec) {
            return Self::default();
        }
        let known: Vec<_> = all(spec).filter_map(|c| Some((c, *newest.get(c.name.as_str())?))).collect();
        let last = known.iter().map(|(_, container)| container.round).max().unwrap_or(0);
        let begins = known.iter().any(|(spec, c)| c.round == last && asks_for_all(spec, c));
        let number = if begins { last.saturating_add(1) } else { last };
        let past = known.into_iter().filter(|(_, c)| c.round < number).map(|(_, c)| c.id.clone()).collect();
        Self { number, begins, past }
    }

    /// Returns true if a container is history: one of this round has replaced it or will.
    pub fn is_past(&self, container: &Container) -> bool {
        self.past.contains(&container.id)
    }
}

impl Decision<'_> {
    /// Stops running containers of earlier rounds. Returns true once this round may continue: no earlier
    /// container runs, and the delay of the container that required the restart has passed.
    pub(super) fn enter_round(&mut self) -> bool {
        let past: Vec<&Container> =
            self.facts.newest.values().copied().filter(|c| self.facts.round.is_past(c)).collect();
        let mut stopped = true;
        for container in &past {
            let runs = matches!(container.state, ContainerState::Running { .. } | ContainerState::Unknown);
            if runs && self.facts.current.is_some_and(|sandbox| sandbox.id == container.sandbox_id) {
                self.kill(container, KillReason::RestartAll);
                stopped = false;
            }
        }
        if !stopped {
            return false;
        }
        if self.facts.round.begins {
            for container in past {
                if let Some((delay, until)) = self.facts.delay_of_round(container)
                    && until > self.facts.times.now
                {
                    self.actions.backoff.insert(container.name.clone(), Backoff { delay, until });
                }
            }
        }
        self.actions.backoff.is_empty()
    }
}
