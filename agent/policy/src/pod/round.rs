//! Restarts of all containers of a pod in their sandbox, init containers included (`RestartAllContainers`,
//! KEP-5532).
//!
//! The runtime keeps with each container of which *round* it is. One that ends so that its rule asks for it
//! begins the next round: what is of an earlier one is stopped, and is history from then on, as are
//! containers of an earlier sandbox. So it is known at any moment how far a restart of all has come, and an
//! agent that was killed in the middle goes on.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::core::v1::{Container as ContainerSpec, PodSpec};

use super::{
    Backoff, Container, ContainerState, Decision, KillReason, Observed, newest,
    restart::{RESTART_ALL, rule},
};

/// How often the containers of a pod were restarted together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// The round that containers are started in.
    pub number: u32,
    /// Nothing of it was started yet.
    pub begins: bool,
    /// The newest instances of their names that are of an earlier round.
    past: BTreeSet<String>,
}

/// Returns true if any of a pod's containers may ask for a restart of all.
pub fn may_restart_all(spec: &PodSpec) -> bool {
    let asks = |c: &ContainerSpec| {
        c.restart_policy.is_some()
            && c.restart_policy_rules.iter().flatten().any(|rule| rule.action == RESTART_ALL)
    };
    all(spec).any(asks)
}

fn all(spec: &PodSpec) -> impl Iterator<Item = &ContainerSpec> {
    spec.init_containers.iter().flatten().chain(&spec.containers)
}

/// Returns true if a container has ended so that all must be restarted.
fn asks_for_all(spec: &ContainerSpec, container: &Container) -> bool {
    let ContainerState::Exited { exit_code, .. } = container.state else { return false };
    rule(spec, exit_code).is_some_and(|rule| rule.action == RESTART_ALL)
}

impl Round {
    /// The round of a pod whose containers are as `observed`.
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

    /// Returns true if a container is history: it is, or will be, replaced by one of this round.
    pub fn is_past(&self, container: &Container) -> bool {
        self.past.contains(&container.id)
    }
}

impl Decision<'_> {
    /// Stops what runs of earlier rounds. True once this round may go on: nothing of the earlier ones runs,
    /// and the delay of the container that asked for the restart has passed.
    pub(super) fn enter_round(&mut self) -> bool {
        let past: Vec<&Container> = self.newest.values().copied().filter(|c| self.round.is_past(c)).collect();
        let mut stopped = true;
        for container in &past {
            let runs = matches!(container.state, ContainerState::Running { .. } | ContainerState::Unknown);
            if runs && self.current.is_some_and(|sandbox| sandbox.id == container.sandbox_id) {
                self.kill(container, KillReason::RestartAll);
                stopped = false;
            }
        }
        if !stopped {
            return false;
        }
        if self.round.begins {
            for container in past {
                if let Some((delay, until)) = self.delay_of_round(container)
                    && until > self.times.now
                {
                    self.actions.backoff.insert(container.name.clone(), Backoff { delay, until });
                }
            }
        }
        self.actions.backoff.is_empty()
    }

    /// The delay of a container that asked for the restart of all, and when it is over. The kubelet knows
    /// none; one that asks for it as soon as it starts would keep the node busy.
    fn delay_of_round(&self, container: &Container) -> Option<(Duration, beelet_units::moment::Moment)> {
        let spec = all(self.spec).find(|spec| spec.name == container.name)?;
        if !asks_for_all(spec, container) {
            return None;
        }
        self.delay_after(container)
    }

    /// The delay that goes with the first instance of a name in this sandbox and round.
    pub(super) fn first_delay(&self, name: &str) -> Duration {
        let before = self.newest.get(name).copied().filter(|c| self.round.is_past(c));
        before.and_then(|c| self.delay_of_round(c)).map_or(Duration::ZERO, |(delay, _)| delay)
    }
}
