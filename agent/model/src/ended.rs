//! Proof that all containers of a pod have ended.
//!
//! A final phase does not prove that no container runs any more. The release of a pod's room, devices, probes
//! and node-wide counts needs that proof. All parts use this module, and functions that release something of
//! a pod take an [`Ended`], which only this module can create.

use k8s_openapi::api::core::v1 as core;

use crate::status::has_ended;

/// Proof that no container of a pod runs any more, nor will again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended(());

impl Ended {
    /// Returns the proof for a pod with this status, if it has ended. `stopped` is set by the pod's worker
    /// after it has stopped all containers.
    ///
    /// Without `stopped` the phase must be final and no container may run, as under the kubelet
    /// (`filterOutInactivePods`): a sidecar or an ephemeral container may outlive the containers that
    /// determine the phase.
    #[must_use]
    pub fn of(status: Option<&core::PodStatus>, stopped: bool) -> Option<Self> {
        let by_itself = || has_ended(status) && !status.is_some_and(any_running);
        (stopped || by_itself()).then_some(Self(()))
    }
}

/// Returns true if a status has a running container of any kind.
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
