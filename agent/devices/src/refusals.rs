//! Pods that cannot have their devices: they wait for a plugin, or end with the kubelet's reason.

use std::sync::Arc;

use beelet_model::{failure::Refusal, origin::Origin, request::Request, table::PodName};
use beelet_policy::devices::{AllocateError, admission::AdmissionError};
use beelet_state::events::{Object, Recorder};
use k8s_openapi::api::core::v1 as core;
use tokio::{sync::mpsc, time::Instant};
use tracing::{debug, warn};

use super::ledger::{Shared, Waiting};

/// Reason of the kubelet for a pod that cannot have its devices.
pub(super) const UNEXPECTED: &str = "UnexpectedAdmissionError";
/// Maximum number of refused pods remembered for a retry. Further ones wait for a change of their manifest.
const MAX_REFUSED: usize = 1024;

/// Refusal to let a pod start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceRefusal {
    /// Not at present: ask again when the node's devices change, or at `until`.
    Wait {
        /// The missing plugin or devices.
        message: String,
        /// Time at which to ask again at the latest.
        until: Instant,
    },
    /// The pods' manager was asked to end the pod.
    Failed {
        /// Cause.
        message: String,
    },
}

/// Failure of an admission.
pub(super) enum AdmitError {
    /// The ledger refused.
    Refused(AdmissionError),
    /// The plugin refused.
    Plugin(String),
    /// The plugin disconnected during a call.
    Lost(String),
    /// The requester no longer waits.
    Unasked,
}

/// Records refusals, and notifies the pods' manager and the users.
#[derive(Debug)]
pub(super) struct Refusals {
    pub(super) shared: Arc<Shared>,
    pub(super) requests: mpsc::Sender<Request>,
    pub(super) events: Recorder,
}

impl Refusals {
    /// Returns true if a pod has waited for its plugin for too long.
    pub(super) fn overdue(&self, waiting: &Waiting) -> bool {
        self.shared.now().saturating_sub(waiting.since) >= self.shared.settings.plugin_wait
    }

    /// Lets a pod wait if its obstacle may pass, and refuses it otherwise.
    pub(super) async fn refuse(
        &self,
        pod: &core::Pod,
        uid: &str,
        trouble: AdmitError,
        restarting: bool,
    ) -> DeviceRefusal {
        let (message, reason, may_pass, lack) = match trouble {
            AdmitError::Refused(AdmissionError::Aligned(refusal)) => {
                return self.fail(pod, uid, refusal.reason.as_str(), refusal.message, None).await;
            }
            // Nothing but the aligner aligns.
            AdmitError::Refused(AdmissionError::Topology(error)) => {
                (error.to_string(), UNEXPECTED, false, None)
            }
            AdmitError::Refused(AdmissionError::Allocate(error)) => {
                let lack = match &error {
                    AllocateError::TooFew { resource, requested, .. } => Some((resource.clone(), *requested)),
                    AllocateError::Changed { .. } => None,
                    other => Some((other.resource().to_owned(), 1)),
                };
                let too_few = matches!(error, AllocateError::TooFew { .. });
                (error.to_string(), UNEXPECTED, error.may_pass() || (restarting && too_few), lack)
            }
            AdmitError::Lost(message) => (message, UNEXPECTED, true, None),
            AdmitError::Plugin(message) => (message, UNEXPECTED, false, None),
            AdmitError::Unasked => {
                debug!(pod = %PodName::of(pod), "the pod was deleted before its devices were allocated");
                let message = "the pod no longer waits".to_owned();
                return DeviceRefusal::Wait { message, until: Instant::now() };
            }
        };
        let overdue = self.shared.with_ledger(|l| l.waiting.get(uid).is_some_and(|w| self.overdue(w)));
        let waits = !self.shared.settings.plugin_wait.is_zero();
        if may_pass && waits && !overdue {
            return self.wait(pod, uid, message);
        }
        let message = format!("Allocate failed due to {message}, which is unexpected");
        self.fail(pod, uid, reason, message, lack).await
    }

    /// Lets a pod wait.
    pub(super) fn wait(&self, pod: &core::Pod, uid: &str, message: String) -> DeviceRefusal {
        let (now, name) = (self.shared.now(), PodName::of(pod));
        let (since, first) = self.shared.with_ledger(|ledger| {
            let first = !ledger.waiting.contains_key(uid);
            let new = || Waiting { since: now, pod: name.to_string(), message: String::new() };
            let waiting = ledger.waiting.entry(uid.to_owned()).or_insert_with(new);
            waiting.message.clone_from(&message);
            self.shared.metrics.waiting.set(i64::try_from(ledger.waiting.len()).unwrap_or(i64::MAX));
            (ledger.waiting.get(uid).map_or(now, |waiting| waiting.since), first)
        });
        if first {
            warn!(pod = %name, "the pod waits for its devices: {message}");
            self.events.warning(Object::pod(pod), "WaitingForDevices", message.clone());
        }
        DeviceRefusal::Wait {
            message,
            until: self.shared.at(since.saturating_add(self.shared.settings.plugin_wait)),
        }
    }

    /// Requests the end of a pod; `lack` is the resource, and the number of devices, that would admit it.
    pub(super) async fn fail(
        &self,
        pod: &core::Pod,
        uid: &str,
        reason: &str,
        message: String,
        lack: Option<(String, usize)>,
    ) -> DeviceRefusal {
        warn!(pod = %PodName::of(pod), reason, "cannot allocate the pod's devices: {message}");
        // In a cluster a controller creates a replacement.
        let lack = lack.filter(|_| !Origin::of(pod).is_api());
        self.shared.with_ledger(|ledger| {
            ledger.waiting.remove(uid);
            if let Some(lack) = lack.filter(|_| ledger.refused.len() < MAX_REFUSED) {
                ledger.refused.insert(uid.to_owned(), lack);
            }
        });
        let request = Request::Refuse {
            uid: uid.to_owned(),
            reason: reason.to_owned(),
            message: message.clone(),
            refusal: Refusal::Other,
        };
        // Sending fails only if the agent is stopping, when the request is pointless.
        let _ = self.requests.send(request).await;
        DeviceRefusal::Failed { message }
    }
}
