//! The manager's instructions to a worker, and the effective grace period of several termination requests.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use beelet_model::request::Listed;
use beelet_policy::pod::Verdicts;
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;

/// Termination of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terminate {
    /// Grace period that overrides the pod's own.
    pub grace: Option<Duration>,
}

/// The manager's instructions to a worker. A state, not a queue: only the newest value counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Control {
    /// Termination of the pod: the worker stops and removes all parts of the pod.
    pub terminate: Option<Terminate>,
    /// Termination of a failed or deleted pod: the worker releases the pod's resources, and starts no
    /// container while this is set.
    pub failed: Option<Terminate>,
    /// All containers of the pod have ended permanently: the worker starts none, even after garbage
    /// collection of the runtime's container records.
    pub ended: bool,
    /// The current pod, if it was changed while it runs.
    pub updated: Option<Arc<core::Pod>>,
    /// Results of probes.
    pub verdicts: Verdicts,
    /// Initial restart counts of containers that ran before, but are unknown to the runtime.
    pub counts: Arc<BTreeMap<String, u32>>,
    /// Number of changes that the runtime reported.
    pub changes: u64,
    /// The runtime's list of the pod that showed the last of these changes, and the time of its request.
    pub listed: Option<(Instant, Arc<Listed>)>,
    /// Number of changes of ConfigMaps and Secrets that the pod refers to.
    pub objects: u64,
    /// Number of requests to retry failed starts immediately.
    pub retry_requests: u64,
    /// The runtime's status of containers that ended after the last observation.
    pub exited: BTreeMap<String, Arc<cri::ContainerStatus>>,
}

impl Control {
    /// Returns true if the pod has changed since the version `known`.
    pub(super) fn is_newer_than(&self, known: &Arc<core::Pod>) -> bool {
        self.updated.as_ref().is_some_and(|pod| !Arc::ptr_eq(pod, known))
    }

    /// Returns the effective grace period of a pod whose own is `own`, if a termination is requested; the
    /// shorter of two requests wins.
    pub(super) fn end(&self, own: Duration) -> Option<Duration> {
        self.terminate.iter().chain(&self.failed).map(|end| end.grace.unwrap_or(own)).min()
    }

    /// Requests the end of a pod whose own grace period is `own`. A later request can only shorten the grace
    /// period, as in the kubelet (`calculateEffectiveGracePeriod`, pkg/kubelet/pod_workers.go). Returns true
    /// if the request has an effect.
    pub(crate) fn fail(&mut self, end: Terminate, own: Duration) -> bool {
        let by = |end: Terminate| end.grace.unwrap_or(own);
        let is_new = self.failed.is_none_or(|known| by(end) < by(known));
        if is_new {
            self.failed = Some(end);
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_request_only_shortens_the_grace_period() {
        let own = Duration::from_secs(30);
        let check = |asked: &[(Option<u64>, bool)], expected: Option<u64>| {
            let mut control = Control::default();
            for (grace, is_new) in asked {
                let end = Terminate { grace: grace.map(Duration::from_secs) };
                assert_eq!(control.fail(end, own), *is_new, "{asked:?}");
            }
            assert_eq!(
                control.failed.map(|end| end.grace),
                Some(expected.map(Duration::from_secs)),
                "{asked:?}"
            );
        };
        check(&[(None, true)], None);
        // A deletion after an eviction or a preemption with the pod's own grace period.
        check(&[(None, true), (Some(300), false)], None);
        check(&[(None, true), (Some(30), false), (Some(29), true)], Some(29));
        check(&[(Some(300), true), (None, true)], None);
        check(&[(Some(1), true), (None, false), (Some(20), false)], Some(1));
    }

    #[test]
    fn the_shorter_of_two_grace_periods_wins() {
        let own = Duration::from_secs(30);
        let seconds = |grace: Option<u64>| Terminate { grace: grace.map(Duration::from_secs) };
        let check = |terminate: Option<Option<u64>>, failed: Option<Option<u64>>, expected: Option<u64>| {
            let control = Control {
                terminate: terminate.map(seconds),
                failed: failed.map(seconds),
                ..Control::default()
            };
            assert_eq!(control.end(own), expected.map(Duration::from_secs), "{terminate:?} {failed:?}");
        };
        check(None, None, None);
        check(Some(None), None, Some(30));
        check(None, Some(Some(5)), Some(5));
        check(Some(None), Some(Some(5)), Some(5));
        check(Some(None), Some(Some(300)), Some(30));
    }
}
