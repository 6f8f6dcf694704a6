//! Restarts of ended containers: restart policies of pods and of single containers (KEP-753 for sidecars,
//! KEP-5307 for rules by exit code), and the delays between restarts.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container as ContainerSpec, ContainerRestartRule, PodSpec};

/// Delay before a container's second restart; the first one is immediate.
pub(crate) const RESTART_DELAY_INITIAL: Duration = Duration::from_secs(10);
/// Maximum delay of a restart, unless the node's configuration sets another.
#[cfg(test)]
pub(crate) const RESTART_DELAY_MAX: Duration = Duration::from_secs(300);
/// Running time after which a container's earlier crashes are forgotten.
pub(crate) const RESTART_DELAY_RESET: Duration = Duration::from_secs(600);

/// A restartPolicy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RestartPolicy {
    /// Restart after any end.
    Always,
    /// Restart after an exit code other than 0.
    OnFailure,
    /// Never restart.
    Never,
}

impl RestartPolicy {
    /// Returns the policy of a pod's spec. Any value other than `OnFailure` or `Never` counts as the default,
    /// `Always`.
    pub(crate) fn of(spec: &PodSpec) -> Self {
        Self::parse(spec.restart_policy.as_deref())
    }

    fn parse(text: Option<&str>) -> Self {
        match text {
            Some("OnFailure") => Self::OnFailure,
            Some("Never") => Self::Never,
            _ => Self::Always,
        }
    }

    fn restarts(self, exit_code: i32) -> bool {
        match self {
            Self::Always => true,
            Self::OnFailure => exit_code != 0,
            Self::Never => false,
        }
    }
}

/// The action of a rule that restarts all containers of a pod.
pub(super) const RESTART_ALL: &str = "RestartAllContainers";

/// Returns true if an init container is a sidecar: started in order, but kept running with the pod's
/// containers.
pub fn is_sidecar(container: &ContainerSpec) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// Returns true if `container`, one of the pod's own or a sidecar, is restarted after it ended with
/// `exit_code`: by its first matching rule, else by its own policy, else by the pod's.
pub fn restarts(spec: &PodSpec, container: &ContainerSpec, exit_code: i32) -> bool {
    let Some(own) = container.restart_policy.as_deref() else {
        return RestartPolicy::of(spec).restarts(exit_code);
    };
    // A rule with any action restarts the container itself.
    rule(container, exit_code).is_some() || RestartPolicy::parse(Some(own)).restarts(exit_code)
}

/// Returns true if a container, one of the pod's own or a sidecar, is restarted after a stop for a failed
/// probe or on request, regardless of its exit code: the kubelet stops it and starts the next one in one
/// step. Rules do not apply: they concern containers that end by themselves (computePodActions).
pub fn restarts_when_killed(spec: &PodSpec, container: &ContainerSpec) -> bool {
    let policy = match container.restart_policy.as_deref() {
        Some(own) => RestartPolicy::parse(Some(own)),
        None => RestartPolicy::of(spec),
    };
    policy != RestartPolicy::Never
}

/// Returns the first of a container's rules that matches its exit code. Rules without a policy of the
/// container's own have no effect.
pub(super) fn rule(container: &ContainerSpec, exit_code: i32) -> Option<&ContainerRestartRule> {
    container.restart_policy.as_ref()?;
    container.restart_policy_rules.iter().flatten().find(|rule| fits(rule, exit_code))
}

/// Returns true if an init container, which must run to its end, is restarted; a successful one never is.
pub fn init_restarts(spec: &PodSpec, container: &ContainerSpec, exit_code: i32) -> bool {
    exit_code != 0 && restarts(spec, container, exit_code)
}

/// Returns true if the container would be restarted after at least one kind of end.
pub(super) fn ever_restarts(spec: &PodSpec, container: &ContainerSpec) -> bool {
    let ruled = container.restart_policy.is_some()
        && container.restart_policy_rules.as_ref().is_some_and(|rules| !rules.is_empty());
    ruled || restarts(spec, container, 1)
}

fn fits(rule: &ContainerRestartRule, exit_code: i32) -> bool {
    let Some(codes) = &rule.exit_codes else { return false };
    let listed = codes.values.iter().flatten().any(|code| *code == exit_code);
    match codes.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        _ => false,
    }
}

/// Returns the delay before the restart of a container that was started after `previous` and ran for `ran`.
/// `attempt` is the restart count of the ended container, `max` the maximum delay.
pub fn restart_delay(attempt: u32, previous: Duration, ran: Duration, max: Duration) -> Duration {
    if attempt == 0 || ran >= RESTART_DELAY_RESET {
        Duration::ZERO
    } else if previous.is_zero() {
        RESTART_DELAY_INITIAL.min(max)
    } else {
        previous.saturating_mul(2).min(max)
    }
}

/// Counts of a pod's containers by state, which determine its phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Init containers that have not finished yet.
    pub init_pending: usize,
    /// True if an init container failed that is not restarted, and no sidecar is left that would have to end.
    pub init_failed: bool,
    /// Containers that never ran.
    pub waiting: usize,
    /// Running containers, sidecars included.
    pub running: usize,
    /// Ended containers that will be restarted.
    pub restarting: usize,
    /// Containers that ended for good with exit code 0.
    pub succeeded: usize,
    /// Containers that ended for good with another exit code.
    pub failed: usize,
}

/// Returns a pod's phase, by the rules of the kubelet's getPhase.
pub fn phase(tally: Tally) -> &'static str {
    if tally.init_failed {
        return "Failed";
    }
    if tally.init_pending > 0 || tally.waiting > 0 {
        return "Pending";
    }
    match tally {
        Tally { running: 0, restarting: 0, succeeded: 0, failed: 0, .. } => "Pending",
        Tally { running: 1.., .. } | Tally { restarting: 1.., .. } => "Running",
        Tally { failed: 0, .. } => "Succeeded",
        _ => "Failed",
    }
}
