//! Pods that were ended permanently for a reason other than their own containers: evicted, preempted,
//! rejected by admission, past their deadline. A failed pod releases everything, but stays in the table as
//! `Failed` until its manifest changes or a part requests another try. Admission decides on a rejected pod
//! again after a restart of the agent, as under the kubelet.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::Time};
use serde::{Deserialize, Serialize};

use super::pressure::{EVICTED, PREEMPTING};
use super::status::whole_second;

/// Reason of a pod that was active for longer than its activeDeadlineSeconds, as in the kubelet.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// Reason of a pod that was terminated because the machine went down, as in the kubelet.
pub const NODE_SHUTDOWN: &str = "Terminated";
/// Condition of a disruption that the pod did not cause.
const DISRUPTION: &str = "DisruptionTarget";
/// Reasons with which the kubelet sets [`DISRUPTION`].
const DISRUPTIONS: &[&str] = &[EVICTED, PREEMPTING, NODE_SHUTDOWN];

/// Reason of a pod that was rejected because the machine goes down.
pub const NODE_SHUTS_DOWN: &str = "NodeShutdown";
/// Reasons of rejected pods, as in the kubelet; those that begin with [`OUT_OF`] as well.
const REFUSALS: &[&str] = &[
    "UnexpectedAdmissionError",
    NODE_SHUTS_DOWN,
    "AppArmor",
    "SysctlForbidden",
    "TopologyAffinityError",
    "NodePorts",
    "PodOSNotSupported",
    "PodOSSelectorNodeLabelDoesNotMatch",
    "NodeAffinity",
    "NodeName",
    "TaintToleration",
];
/// Prefix of reasons for a lack of the resource that follows.
const OUT_OF: &str = "OutOf";
/// Beginning of the message of a rejected pod, as in the kubelet. A node under pressure rejects pods with the
/// reason of evicted ones: only this prefix distinguishes them.
pub const REJECTED: &str = "Pod was rejected: ";

/// Condition for another try of a rejected pod. The part that rejects the pod sets it; no part derives it
/// from the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// Retry once room is released: amounts, ports, or pods that may be preempted.
    Room,
    /// Retry after another change: the node's condition, its devices, the manifest. The part that detects the
    /// change requests the try.
    Other,
}

/// Reason and progress of a pod's end; part of the pod's durable record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodFailure {
    /// `status.reason`, a word: `Evicted`, `Preempting`, `OutOfcpu`, …
    pub reason: String,
    /// `status.message`, a sentence.
    pub message: String,
    /// Grace period of its containers; `None` for the pod's own.
    pub grace: Option<Duration>,
    /// True once all containers have ended: the phase is `Failed`, and a controller may create another pod in
    /// its place.
    #[serde(default)]
    pub stopped: bool,
    /// True once its cgroup and volumes are removed too. Only then is its room free.
    pub cleared: bool,
    /// Set for a rejected pod. Older records lack the field and have only the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
}

impl PodFailure {
    /// Creates the failure of a pod that has released nothing yet.
    #[must_use]
    pub fn new(reason: impl Into<String>, message: impl Into<String>, grace: Option<Duration>) -> Self {
        let (reason, message) = (reason.into(), message.into());
        Self { reason, message, grace, stopped: false, cleared: false, refusal: None }
    }

    /// Creates the failure of a rejected pod.
    #[must_use]
    pub fn refused(reason: impl Into<String>, message: impl Into<String>, refusal: Refusal) -> Self {
        Self { refusal: Some(refusal), ..Self::new(reason, message, None) }
    }

    /// Returns true if all containers have ended. Older records have only `cleared`.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.stopped || self.cleared
    }

    /// Returns true if the pod was rejected, for lack of room, devices, ports. The kubelet forgets a rejected
    /// pod at its restart, and decides on a static pod again. A pod that was evicted or preempted, or is past
    /// its deadline, was admitted.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        self.refusal.is_some()
            || REFUSALS.contains(&self.reason.as_str())
            || self.reason.starts_with(OUT_OF)
            || self.reason == EVICTED && self.message.starts_with(REJECTED)
    }

    /// Returns true if the pod was terminated with its machine. A static pod, which no controller replaces,
    /// runs again after the boot.
    #[must_use]
    pub fn is_of_shutdown(&self) -> bool {
        self.reason == NODE_SHUTDOWN || self.reason == NODE_SHUTS_DOWN
    }

    /// Returns the phase of the stopped pod with these containers. As under the kubelet (generateAPIPodStatus
    /// after the end), a preempted pod has succeeded if all of its containers ended with exit code 0. Evicted
    /// pods fail in any case: a controller must not take an evicted pod for a completed one.
    #[must_use]
    pub fn final_phase<'s>(
        &self,
        containers: impl IntoIterator<Item = &'s core::ContainerStatus>,
    ) -> &'static str {
        let succeeded = |status: &core::ContainerStatus| {
            let ended = status.state.as_ref().and_then(|state| state.terminated.as_ref());
            ended.is_some_and(|ended| ended.exit_code == 0)
        };
        let mut containers = containers.into_iter().peekable();
        let any = containers.peek().is_some();
        if self.reason == PREEMPTING && any && containers.all(succeeded) { "Succeeded" } else { "Failed" }
    }

    /// Shortens the grace period: the shorter of two wins, so a pod that must end at once does not wait for
    /// an earlier, longer one.
    pub fn hasten(&mut self, grace: Option<Duration>, own: Duration) {
        if grace.is_some_and(|wanted| wanted < self.grace.unwrap_or(own)) {
            self.grace = grace;
        }
    }

    /// Writes the failure into a status that lacks it. `previous` is the previous status.
    pub fn mark(&self, status: &mut core::PodStatus, previous: Option<&core::PodStatus>, now: Timestamp) {
        status.reason = Some(self.reason.clone());
        status.message = Some(self.message.clone());
        if self.has_stopped() {
            status.phase = Some(self.final_phase(status.container_statuses.iter().flatten()).to_owned());
        }
        if DISRUPTIONS.contains(&self.reason.as_str()) {
            let before = previous.iter().flat_map(|p| p.conditions.iter().flatten());
            let since = before.filter(|c| c.type_ == DISRUPTION).find_map(|c| c.last_transition_time.clone());
            let conditions = status.conditions.get_or_insert_default();
            conditions.retain(|c| c.type_ != DISRUPTION);
            conditions.push(core::PodCondition {
                type_: DISRUPTION.to_owned(),
                status: "True".to_owned(),
                last_transition_time: since.or(Some(Time(whole_second(now)))),
                reason: Some("TerminationByKubelet".to_owned()),
                message: Some(self.message.clone()),
                ..Default::default()
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shorter_grace_counts() {
        let seconds = |s: u64| Some(Duration::from_secs(s));
        let check = |first: Option<Duration>, second: Option<Duration>, expect: Option<Duration>| {
            let mut failure = PodFailure::new("Evicted", "m", first);
            failure.hasten(second, Duration::from_secs(30));
            assert_eq!(failure.grace, expect, "{first:?} then {second:?}");
        };
        check(None, None, None);
        check(None, seconds(1), seconds(1));
        check(None, seconds(60), None);
        check(seconds(5), None, seconds(5));
        check(seconds(5), seconds(1), seconds(1));
        check(seconds(1), seconds(5), seconds(1));
    }

    #[test]
    fn what_was_not_let_in_is_told_from_what_was_ended() {
        for (reason, refused) in [
            ("OutOfcpu", true),
            ("OutOfexample.com/gpu", true),
            ("UnexpectedAdmissionError", true),
            ("AppArmor", true),
            ("SysctlForbidden", true),
            ("TopologyAffinityError", true),
            ("NodePorts", true),
            ("PodOSNotSupported", true),
            (NODE_SHUTS_DOWN, true),
            (NODE_SHUTDOWN, false),
            ("Evicted", false),
            ("Preempting", false),
            (DEADLINE_EXCEEDED, false),
        ] {
            assert_eq!(PodFailure::new(reason, "m", None).is_refusal(), refused, "{reason}");
        }
        let refused =
            PodFailure::new("Evicted", "Pod was rejected: The node had condition: [DiskPressure]", None);
        assert!(refused.is_refusal());
    }

    #[test]
    fn a_preempted_pod_succeeds_if_all_its_containers_exit_zero() {
        let ended = |code: i32| core::ContainerStatus {
            state: Some(core::ContainerState {
                terminated: Some(core::ContainerStateTerminated { exit_code: code, ..Default::default() }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let check = |reason: &str, containers: &[core::ContainerStatus], expect: &str| {
            let failure = PodFailure { stopped: true, ..PodFailure::new(reason, "m", None) };
            let containers = Some(containers.to_vec());
            let mut status = core::PodStatus { container_statuses: containers, ..Default::default() };
            failure.mark(&mut status, None, Timestamp::UNIX_EPOCH);
            assert_eq!(status.phase.as_deref(), Some(expect), "{reason}");
        };
        check("Preempting", &[ended(0), ended(0)], "Succeeded");
        check("Preempting", &[ended(0), ended(137)], "Failed");
        check("Preempting", &[ended(0), core::ContainerStatus::default()], "Failed");
        check("Preempting", &[], "Failed");
        check("Evicted", &[ended(0)], "Failed");
    }

    #[test]
    fn the_phase_is_failed_once_nothing_runs_whatever_is_still_given_back() {
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        let mut failure = PodFailure::new("Evicted", "The node was low on resource: memory.", None);
        let mut status = core::PodStatus { phase: Some("Running".to_owned()), ..Default::default() };
        failure.mark(&mut status, None, now);
        assert_eq!(status.phase.as_deref(), Some("Running"));
        assert_eq!(status.reason.as_deref(), Some("Evicted"));
        failure.stopped = true;
        let before = status.clone();
        let later = now.saturating_add(Duration::from_secs(60)).unwrap();
        failure.mark(&mut status, Some(&before), later);
        assert_eq!(status.phase.as_deref(), Some("Failed"));
        assert_eq!(
            status.conditions, before.conditions,
            "the condition keeps the time at which it was first set"
        );
    }
}
