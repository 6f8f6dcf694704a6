//! Pods that were ended for good by something other than their own containers: evicted, preempted, refused by
//! admission, past their deadline. Such a pod gives everything back, but stays in the table as `Failed` until
//! its manifest changes or somebody asks for another try. One that admission refused is asked for again after
//! a restart of the agent, as under the kubelet.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::Time};
use serde::{Deserialize, Serialize};

use super::pressure::EVICTED;
use super::status::whole_second;

/// The reason of a pod that was active for longer than its activeDeadlineSeconds, as the kubelet has it.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// The reason of a pod that was ended because the machine went down, as the kubelet has it.
pub const NODE_SHUTDOWN: &str = "Terminated";
/// The condition that says so: not the pod's own fault.
const DISRUPTION: &str = "DisruptionTarget";
/// Reasons with which the kubelet sets [`DISRUPTION`].
const DISRUPTIONS: &[&str] = &["Evicted", "Preempting", NODE_SHUTDOWN];

/// The reason of a pod that was not let in because the machine goes down.
pub const NODE_SHUTS_DOWN: &str = "NodeShutdown";
/// Reasons of pods that were not let in, as the kubelet has them; those that begin with [`OUT_OF`] too.
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
/// Not enough of what follows.
const OUT_OF: &str = "OutOf";
/// How the message of a pod begins that was not let in, as the kubelet's does. A node that is short of
/// something refuses pods with the reason of those that it evicts: only this tells them apart.
pub const REJECTED: &str = "Pod was rejected: ";

/// Says when another try of a pod that was not let in may succeed. The part that refuses a pod sets it;
/// nothing reads it out of the reason's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// As soon as room is given back: amounts, ports, or pods that may be preempted.
    Room,
    /// When something else has changed: the node's condition, its devices, the manifest. The part that knows
    /// of that asks for another try.
    Other,
}

/// Why a pod was ended, and how far that has come. It is a part of the pod's durable record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodFailure {
    /// One word, `status.reason`: `Evicted`, `Preempting`, `OutOfcpu`, …
    pub reason: String,
    /// A sentence, `status.message`.
    pub message: String,
    /// How long its containers get to end by themselves; `None` for the pod's own grace period.
    pub grace: Option<Duration>,
    /// Nothing of it runs any more: its phase is `Failed`, and whoever makes another pod in its place may do
    /// so.
    #[serde(default)]
    pub stopped: bool,
    /// Its cgroup and its volumes are gone too. Only then is its room free.
    pub cleared: bool,
    /// Set if it was not let in. Records of before that was noted have only the reason's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
}

impl PodFailure {
    /// A failure of a pod that still has everything.
    #[must_use]
    pub fn new(reason: impl Into<String>, message: impl Into<String>, grace: Option<Duration>) -> Self {
        let (reason, message) = (reason.into(), message.into());
        Self { reason, message, grace, stopped: false, cleared: false, refusal: None }
    }

    /// The failure of a pod that was not let in.
    #[must_use]
    pub fn refused(reason: impl Into<String>, message: impl Into<String>, refusal: Refusal) -> Self {
        Self { refusal: Some(refusal), ..Self::new(reason, message, None) }
    }

    /// Returns true if nothing of it runs any more. A record of before that was noted has only the whole end.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.stopped || self.cleared
    }

    /// Returns true if the pod was not let in, for lack of room, devices, ports. The kubelet remembers such a
    /// pod no longer than it runs itself: after its restart a static pod is asked for again. One that was
    /// evicted or preempted, or is past its deadline, has been let in.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        self.refusal.is_some()
            || REFUSALS.contains(&self.reason.as_str())
            || self.reason.starts_with(OUT_OF)
            || self.reason == EVICTED && self.message.starts_with(REJECTED)
    }

    /// Whether it went with its machine. Where nobody makes another pod in its place (a static one) it
    /// runs again once the machine does.
    #[must_use]
    pub fn is_of_shutdown(&self) -> bool {
        self.reason == NODE_SHUTDOWN || self.reason == NODE_SHUTS_DOWN
    }

    /// The sooner of two wishes wins: a pod that must go at once doesn't wait for an earlier, gentler end.
    pub fn hasten(&mut self, grace: Option<Duration>, own: Duration) {
        if grace.is_some_and(|wanted| wanted < self.grace.unwrap_or(own)) {
            self.grace = grace;
        }
    }

    /// Writes the failure into a status that was made without it. `previous` is the status before.
    pub fn mark(&self, status: &mut core::PodStatus, previous: Option<&core::PodStatus>, now: Timestamp) {
        status.reason = Some(self.reason.clone());
        status.message = Some(self.message.clone());
        if self.has_stopped() {
            status.phase = Some("Failed".to_owned());
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
        assert_eq!(status.conditions, before.conditions, "one condition, with the time it was first set");
    }
}
