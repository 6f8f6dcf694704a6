//! The one answer to the question whether anything of a pod still runs.
//!
//! A phase says how a pod ended; that nothing of it runs any more is another thing. Its room, its devices,
//! its probes and its place in what the node counts go by the second. All parts ask here, and what gives
//! something of a pod away takes an [`Ended`], which nothing else can make.

use k8s_openapi::api::core::v1 as core;

use crate::status::has_ended;

/// The proof that nothing of a pod runs any more, nor will again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended(());

impl Ended {
    /// The proof for a pod of this status, if there is one. `stopped` is the word of the pod's worker, which
    /// stopped all that ran.
    ///
    /// Without that word the phase must be final and no container may run, as under the kubelet
    /// (`filterOutInactivePods`): a sidecar or an ephemeral container may be there for longer than the
    /// containers from which the phase follows.
    #[must_use]
    pub fn of(status: Option<&core::PodStatus>, stopped: bool) -> Option<Self> {
        let by_itself = || has_ended(status) && !status.is_some_and(any_running);
        (stopped || by_itself()).then_some(Self(()))
    }
}

/// Returns true if a status says of any container, whatever its kind, that it runs.
fn any_running(status: &core::PodStatus) -> bool {
    let usual = status.init_container_statuses.iter().chain(&status.container_statuses);
    let mut all = usual.chain(&status.ephemeral_container_statuses).flatten();
    all.any(|container| container.state.as_ref().is_some_and(|state| state.running.is_some()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn status(phase: &str, kind: &str, state: &Value) -> core::PodStatus {
        let container = json!({"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                               "state": state});
        serde_json::from_value(json!({"phase": phase, kind: [container]})).unwrap()
    }

    #[test]
    fn a_pod_has_ended_once_its_phase_is_final_and_no_container_of_any_kind_runs() {
        let (runs, over) = (json!({"running": {}}), json!({"terminated": {"exitCode": 0}}));
        for kind in ["initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"] {
            for phase in ["Pending", "Running", "Succeeded", "Failed", "Unknown", ""] {
                let is_final = matches!(phase, "Succeeded" | "Failed");
                let ended = |state: &Value| Ended::of(Some(&status(phase, kind, state)), false).is_some();
                assert!(!ended(&runs), "{phase} {kind}");
                assert_eq!(ended(&over), is_final, "{phase} {kind}");
                assert_eq!(ended(&json!({"waiting": {}})), is_final, "{phase} {kind}");
                let stopped = Ended::of(Some(&status(phase, kind, &over)), true);
                assert!(stopped.is_some(), "{phase} {kind}: the worker stopped all of it");
            }
        }
        assert!(Ended::of(None, false).is_none() && Ended::of(None, true).is_some());
    }
}
