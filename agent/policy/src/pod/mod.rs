//! The next actions for one pod: sandboxes and containers to create, start, stop or remove, given the pod's
//! spec and the runtime's state.
//!
//! The decision is repeated after every change, and each time considers the whole pod: no state survives
//! between two decisions except the runtime's own (attempts, exit codes, the delay before a container's
//! start). So an agent that was killed between any two actions continues at the same point. The order of
//! containers follows KEP-753 (sidecars); the restart delays are the kubelet's (10 s doubling to 300 s, reset
//! after 10 minutes).

#[allow(clippy::arithmetic_side_effects)] // lengths and places in texts that are in memory
pub mod api_status;
#[allow(clippy::arithmetic_side_effects)] // lengths and places in texts that are in memory
pub mod env_file;
pub mod mirror;
pub mod references;
pub mod start_limit;
pub mod too_much;
#[allow(clippy::arithmetic_side_effects)] // lengths and places in texts that are in memory
pub mod variables;
#[allow(clippy::arithmetic_side_effects)] // lengths and places in texts that are in memory
pub mod why;

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::core::v1::{Container as ContainerSpec, Pod, PodSpec};

use beelet_units::{bounds, moment::Moment};

mod actions;
mod ephemeral;
mod facts;
mod observed;
mod restart;
mod round;
mod start_retry;

pub use actions::{Actions, Backoff, Hook, Kill, KillReason, Outcome, Start};
pub use ephemeral::ephemeral_containers;
use facts::Facts;
pub use observed::{Container, ContainerState, Observed, Sandbox, UNKNOWN_EXIT, Verdicts};
#[cfg(test)]
use restart::RESTART_DELAY_MAX;
#[cfg(test)]
use restart::RESTART_DELAY_RESET;
pub use restart::{Tally, init_restarts, is_sidecar, phase, restart_delay, restarts, restarts_when_killed};
pub use round::{Round, may_restart_all};
pub use start_retry::{StartFailure, start_pause};

/// Returns the time for which the pod may be active, from its activeDeadlineSeconds.
pub fn active_limit(spec: &PodSpec) -> Option<Duration> {
    spec.active_deadline_seconds.filter(|seconds| *seconds >= 0).map(bounds::seconds)
}

/// End times of containers by the runtime's identifiers, and the current time, on a monotonic clock. The
/// runtime uses wall time, and a delay measured by wall time would last hours after the clock is set back.
#[derive(Clone, Copy, Debug)]
pub struct Times<'a> {
    /// End times of containers. A missing one ends now.
    pub ended: &'a BTreeMap<String, Moment>,
    /// The time of the decision.
    pub now: Moment,
}

/// Decides the next actions for `pod`. `max_restart_delay` is the maximum delay of a crashing container.
pub fn actions(
    pod: &Pod,
    observed: &Observed,
    verdicts: &Verdicts,
    max_restart_delay: Duration,
    times: Times<'_>,
) -> Actions {
    let Some(spec) = &pod.spec else { return Actions::default() };
    let facts = Facts::new(spec, observed, verdicts, max_restart_delay, times);
    let mut decision = Decision { facts, actions: Actions::default() };
    decision.retire_old_sandboxes();
    if let Some(outcome) = decision.facts.outcome() {
        decision.finish(outcome);
    } else if decision.facts.current.is_none() {
        decision.stop_dead_sandboxes();
        let attempt = observed.sandboxes.iter().map(|s| s.attempt.saturating_add(1)).max().unwrap_or(0);
        decision.actions.create_sandbox = Some(attempt);
    } else {
        decision.kill_condemned();
        decision.start_ephemeral();
        if decision.enter_round() {
            decision.start_missing();
        }
    }
    decision.remove_dead();
    decision.actions
}

/// A decision in the making.
struct Decision<'a> {
    facts: Facts<'a>,
    actions: Actions,
}

impl Decision<'_> {
    /// Stops every sandbox but the current one while anything in it may still run.
    fn retire_old_sandboxes(&mut self) {
        for sandbox in &self.facts.observed.sandboxes {
            if self.facts.current.is_some_and(|c| c.id == sandbox.id) {
                continue;
            }
            let alive = self.facts.observed.containers.iter().any(|c| {
                c.sandbox_id == sandbox.id
                    && !matches!(c.state, ContainerState::Exited { .. } | ContainerState::Created)
            });
            if sandbox.ready || alive {
                self.actions.stop_sandboxes.push(sandbox.id.clone());
            }
        }
    }

    /// Stops dead sandboxes, too, before a new one exists, like the kubelet (killPodWithSyncResult): a
    /// sandbox whose processes were lost in a reboot holds its addresses until then.
    fn stop_dead_sandboxes(&mut self) {
        let stopped = &mut self.actions.stop_sandboxes;
        for sandbox in &self.facts.observed.sandboxes {
            if !stopped.contains(&sandbox.id) {
                stopped.push(sandbox.id.clone());
            }
        }
    }

    /// Stops a finished pod's sandbox, with the sidecars in it. Then the pod releases its resources, except
    /// its containers and their logs (the kubelet's `SyncTerminatedPod`).
    fn finish(&mut self, outcome: Outcome) {
        self.actions.outcome = Some(outcome);
        if let Some(current) = self.facts.current {
            self.actions.stop_sandboxes.push(current.id.clone());
        }
        self.actions.release = self.actions.stop_sandboxes.is_empty();
    }

    fn kill(&mut self, container: &Container, reason: KillReason) {
        self.actions.kill.push(Kill { id: container.id.clone(), name: container.name.clone(), reason });
    }

    fn kill_condemned(&mut self) {
        for container in self.facts.newest.clone().into_values() {
            if self.facts.here(&container.name).is_none() {
                continue;
            }
            match (&container.state, self.facts.verdicts.condemned.get(&container.id)) {
                (ContainerState::Running { .. }, Some(reason)) => self.kill(container, *reason),
                (ContainerState::Unknown, _) => self.kill(container, KillReason::Unknown),
                _ => {}
            }
        }
    }

    fn start_missing(&mut self) {
        // Once any of the pod's own containers exists, this sandbox's initialization is over.
        let initialized = self.facts.spec.containers.iter().any(|c| self.facts.here(&c.name).is_some());
        for spec in self.facts.init_containers() {
            let ready_for_next = if is_sidecar(spec) {
                self.keep_running(spec, |_| true);
                !self.waits_for_hook(spec) && self.facts.is_started(&spec.name)
            } else {
                initialized || self.run_to_completion(spec)
            };
            if !ready_for_next && !initialized {
                return;
            }
        }
        for spec in &self.facts.spec.containers {
            let again = |code| restarts(self.facts.spec, spec, code);
            // A container that ended for good in an earlier sandbox does not run again in this one.
            if self.facts.exit_code(&spec.name).is_none_or(again) {
                self.keep_running(spec, again);
            }
            // The kubelet starts containers one after the other, hooks included; users rely on that to delay
            // applications until a proxy is up.
            if self.waits_for_hook(spec) {
                return;
            }
        }
    }

    /// Returns true if the container runs but its postStart hook is not known to have finished; requests the
    /// hook in that case.
    fn waits_for_hook(&mut self, spec: &ContainerSpec) -> bool {
        if spec.lifecycle.as_ref().is_none_or(|lifecycle| lifecycle.post_start.is_none()) {
            return false;
        }
        let Some(container) = self.facts.here(&spec.name) else { return false };
        let runs = matches!(container.state, ContainerState::Running { .. });
        if !runs || self.facts.verdicts.hooked.contains(&container.id) {
            return false;
        }
        if !self.facts.verdicts.condemned.contains_key(&container.id) {
            self.actions.post_start.push(Hook { id: container.id.clone(), name: container.name.clone() });
        }
        true
    }

    /// Starts an init container if needed; returns true once it has succeeded.
    fn run_to_completion(&mut self, spec: &ContainerSpec) -> bool {
        // An instance that was stopped for a resize has not succeeded, even with exit code 0.
        let here = self.facts.here(&spec.name).filter(|container| !self.facts.is_outdated(container));
        if let Some(ContainerState::Exited { exit_code: 0, .. }) = here.map(|c| &c.state) {
            return true;
        }
        // An init container that failed for good has decided the pod's outcome before this line.
        self.keep_running(spec, |code| code != 0);
        false
    }

    fn keep_running(&mut self, spec: &ContainerSpec, restarts: impl Fn(i32) -> bool) {
        let Some(container) = self.facts.here(&spec.name) else {
            // The first instance in this sandbox, though earlier sandboxes may have had one.
            let attempt =
                self.facts.newest.get(spec.name.as_str()).map_or(0, |c| c.attempt.saturating_add(1));
            self.start(&spec.name, attempt, self.facts.first_delay(&spec.name), None);
            return;
        };
        match &container.state {
            ContainerState::Running { .. } | ContainerState::Unknown => {}
            ContainerState::Created => {
                let created = Some(container.id.clone());
                self.start(&spec.name, container.attempt, container.restart_delay, created);
            }
            ContainerState::Exited { .. } if self.facts.is_outdated(container) => {
                // Crashes of another image must not delay this one.
                let delay = match self.facts.verdicts.condemned.get(&container.id) {
                    Some(KillReason::Redefined) => Duration::ZERO,
                    _ => container.restart_delay,
                };
                self.start(&spec.name, container.attempt.saturating_add(1), delay, None);
            }
            ContainerState::Exited { exit_code, .. } => {
                let again = restarts(*exit_code) || self.facts.comes_back(container);
                let Some((delay, until)) = self.facts.delay_after(container).filter(|_| again) else {
                    return;
                };
                if self.facts.verdicts.hurried.contains(&container.id) {
                    self.start(&spec.name, container.attempt.saturating_add(1), Duration::ZERO, None);
                } else if until > self.facts.times.now {
                    self.actions.backoff.insert(spec.name.clone(), Backoff { delay, until });
                } else {
                    self.start(&spec.name, container.attempt.saturating_add(1), delay, None);
                }
            }
        }
    }

    fn start(&mut self, name: &str, attempt: u32, restart_delay: Duration, created: Option<String>) {
        let round = self.facts.round.number;
        self.actions.start.push(Start { name: name.to_owned(), attempt, restart_delay, created, round });
    }

    /// Removes dead containers except the newest of each name and the newest dead one before it (the status's
    /// `lastState`). Containers created in an earlier sandbox or round never run.
    fn remove_dead(&mut self) {
        let mut kept_dead: BTreeMap<&str, (u32, &str)> = BTreeMap::new();
        for c in &self.facts.observed.containers {
            let newest = self.facts.newest.get(c.name.as_str()).is_some_and(|n| n.id == c.id);
            if !newest && matches!(c.state, ContainerState::Exited { .. }) {
                let slot = kept_dead.entry(&c.name).or_insert((c.attempt, &c.id));
                *slot = (*slot).max((c.attempt, &c.id));
            }
        }
        let in_current = |c: &Container| self.facts.current.is_some_and(|s| s.id == c.sandbox_id);
        let gone = |c: &Container| match c.state {
            ContainerState::Exited { .. } => {
                let newest = self.facts.newest.get(c.name.as_str()).is_some_and(|n| n.id == c.id);
                !newest && kept_dead.get(c.name.as_str()).is_none_or(|(_, id)| *id != c.id)
            }
            ContainerState::Created => !in_current(c) || self.facts.round.is_past(c),
            ContainerState::Running { .. } | ContainerState::Unknown => false,
        };
        let (removed, kept): (Vec<_>, Vec<_>) = self.facts.observed.containers.iter().partition(|c| gone(c));
        self.actions.remove_containers = removed.into_iter().map(|c| c.id.clone()).collect();
        let keeps_last = self.actions.outcome.is_some() || self.facts.current.is_none();
        let last = self.facts.observed.sandboxes.iter().max_by_key(|s| (s.attempt, &s.id));
        for sandbox in &self.facts.observed.sandboxes {
            let needed = sandbox.ready
                || kept.iter().any(|c| c.sandbox_id == sandbox.id)
                // The attempt number is the only record of the number of sandboxes.
                || (keeps_last && last.is_some_and(|l| l.id == sandbox.id));
            if !needed && !self.actions.stop_sandboxes.contains(&sandbox.id) {
                self.actions.remove_sandboxes.push(sandbox.id.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests;
