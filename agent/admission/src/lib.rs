//! Admission: finds room for a pod's requests, makes room (a critical pod preempts others), or rejects the
//! pod, before anything of the pod is started.
//!
//! `beelet_policy::admission` and `::preemption` decide, as in `beelet plan`; this crate applies them to the
//! pods on the node. A pod's worker asks before it starts anything; the pods' manager reports terminating and
//! terminated pods. Room counts as taken until its pod has really terminated, so a new pod may have to wait
//! for a terminating one, and is not rejected because of it.
//!
//! Must never kill anything by itself (it asks the pods' manager), never look at the pods' actual usage, and
//! never reject a running pod.
// The amounts that this crate adds come from outside.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use beelet_model::pressure::{Conditions, EVICTED, PREEMPTING};
mod book;
mod ledger;
mod metrics;
mod node;
mod retry_evicted;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use beelet_policy::{
    admission::preemption,
    eviction::NodeCondition,
    node::fit::{self, NodeView},
    resources::{
        critical::is_critical,
        qos::{QosClass, qos_class},
    },
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tracing::{info, warn};

pub use self::{
    metrics::Metrics,
    node::{NodeResources, PID, hugepages, over_reserved, pids},
    retry_evicted::RetryEvicted,
};

use self::ledger::{Ledger, Verdict};
use beelet_model::failure::{NODE_SHUTS_DOWN, REJECTED, Refusal};
use beelet_model::{ended::Ended, request::Request, table::PodName};

const PREEMPTED_MESSAGE: &str = "Preempted in order to admit critical pod";
/// Message of the kubelet.
const SHUTS_DOWN_MESSAGE: &str = "Pod was rejected as the node is shutting down.";
/// Taint that a best-effort pod must tolerate to be admitted under memory pressure.
const MEMORY_PRESSURE_TAINT: &str = "node.kubernetes.io/memory-pressure";

/// Rejection of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmissionRejection {
    /// Single word, as the kubelet's: `OutOfcpu`, `NodePorts`, `Evicted`, `UnexpectedAdmissionError`, …
    pub reason: String,
    /// Message for users.
    pub message: String,
    /// Condition under which another try may succeed.
    pub refusal: Refusal,
}

/// Refusal of a running pod's resize.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResizeDeferral {
    /// The node could not fit these amounts even without other pods.
    pub infeasible: bool,
    /// Message for users.
    pub message: String,
}

/// A running pod that the manager does not manage: its definition is unknown.
#[derive(Clone, Debug)]
pub struct Held {
    /// The parts of the pod that admission counts.
    pub pod: Arc<core::Pod>,
    /// The pod's source has been listed, and still does not show the pod's definition.
    pub is_listed: bool,
}

/// Dependencies of admission.
#[derive(Debug)]
pub struct Parts {
    /// Capacity and allocatable resources of the node.
    pub resources: NodeResources,
    /// Choice of victims.
    pub policy: preemption::Policy,
    /// Pressure conditions of the node.
    pub conditions: watch::Receiver<Conditions>,
    /// Start of the machine's shutdown, if it is shutting down.
    pub shutdown: watch::Receiver<Option<Timestamp>>,
    /// Requests to the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Counters.
    pub metrics: Metrics,
}

impl Parts {
    /// Rejects all pods on a machine that is shutting down. Otherwise applies the kubelet's rule
    /// (`pkg/kubelet/eviction`, `Admit`): memory pressure rejects best-effort pods that do not tolerate it;
    /// any other pressure rejects all pods. Critical pods are always admitted.
    fn refusal(&self, pod: &core::Pod) -> Option<AdmissionRejection> {
        if self.shutdown.borrow().is_some() {
            let (reason, message) = (NODE_SHUTS_DOWN.to_owned(), SHUTS_DOWN_MESSAGE.to_owned());
            return Some(AdmissionRejection { reason, message, refusal: Refusal::Other });
        }
        let conditions = self.conditions.borrow();
        if conditions.is_empty() || is_critical(pod) {
            return None;
        }
        let only_memory = conditions.iter().all(|condition| *condition == NodeCondition::MemoryPressure);
        let best_effort = qos_class(pod).is_ok_and(|class| class == QosClass::BestEffort);
        if only_memory && (!best_effort || tolerates_memory_pressure(pod)) {
            return None;
        }
        let names: Vec<String> = conditions.iter().map(ToString::to_string).collect();
        let message = format!("{REJECTED}The node had condition: [{}]", names.join(" "));
        Some(AdmissionRejection { reason: EVICTED.to_owned(), message, refusal: Refusal::Other })
    }

    /// Preempts all victims at once: none waits for another's termination.
    async fn preempt(&self, pod: &core::Pod, victims: &[Arc<core::Pod>], resource: &str) {
        for victim in victims {
            warn!(pod = %PodName::of(pod), victim = %PodName::of(victim), resource, "preempting a pod to make room");
            self.metrics.preempted(resource);
            let request = Request::Fail {
                uid: victim.metadata.uid.clone().unwrap_or_default(),
                reason: PREEMPTING.to_owned(),
                message: PREEMPTED_MESSAGE.to_owned(),
                grace: None,
            };
            if self.requests.send(request).await.is_err() {
                return;
            }
        }
    }
}

/// Decides whether a pod has room. Shared through an `Arc`.
#[derive(Debug)]
pub struct Admission {
    parts: Parts,
    ledger: Mutex<Ledger>,
    /// Publishes each change of [`Book::changes`](book::Book::changes).
    changes: watch::Sender<u64>,
}

/// Place in the queue of pods that wait for room. Dropping it before the admission gives up the place.
#[derive(Debug)]
pub struct QueuePlace<'a> {
    admission: &'a Admission,
    uid: String,
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        self.admission.with(|ledger| ledger.book.withdraw(&self.uid));
    }
}

impl Admission {
    /// Creates the admission of a node without pods.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let ledger = Mutex::new(Ledger::new(parts.resources.clone(), parts.policy));
        Self { parts, ledger, changes: watch::Sender::new(0) }
    }

    /// Returns the resources that the node has for pods.
    #[must_use]
    pub fn resources(&self) -> &NodeResources {
        &self.parts.resources
    }

    /// Counts a running pod regardless of its requests: it was admitted before the agent's restart.
    pub fn adopt(&self, pod: &Arc<core::Pod>) {
        self.with(|ledger| ledger.book.enter(pod, false));
    }

    /// Sets the running pods without a worker. Their room counts as taken, and they cannot be preempted. A
    /// pod that lacks only the room of pods whose source is not listed yet waits up to a minute, because they
    /// may be unwanted.
    pub fn hold(&self, held: &[Held]) {
        self.with(|ledger| ledger.book.hold(held, Instant::now()));
    }

    /// Subscribes to changes after which a waiting pod may fit: a pod is terminating, has terminated or
    /// shrunk, or no longer waits.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Counts an admitted pod with other amounts of cpu and memory, if they shrink or there is room; `before`
    /// is the pod as it is.
    ///
    /// # Errors
    /// The amounts do not fit at present, or never on this node.
    pub fn resize(&self, pod: &Arc<core::Pod>, before: &core::Pod) -> Result<(), ResizeDeferral> {
        self.with(|ledger| ledger.resize(pod, before, Instant::now()))
    }

    /// Marks the pod as terminating; its room is not free yet. Ignores unknown pods.
    pub fn leaving(&self, uid: &str, grace: Duration) {
        self.with(|ledger| ledger.book.leaving(uid, Instant::now(), grace));
    }

    /// Releases the room of a terminated pod.
    pub fn released(&self, uid: &str, _: Ended) {
        self.with(|ledger| ledger.book.released(uid));
    }

    /// Returns a place in the queue for a pod; dropping it gives up the place.
    #[must_use]
    pub fn queue(&self, uid: &str) -> QueuePlace<'_> {
        QueuePlace { admission: self, uid: uid.to_owned() }
    }

    /// Checks `pod` against the node's name, labels and taints. An admitted pod passes.
    ///
    /// # Errors
    /// The pod does not belong on `node`.
    pub fn fits(&self, pod: &core::Pod, node: &NodeView) -> Result<(), AdmissionRejection> {
        if self.with(|ledger| ledger.book.has(pod.metadata.uid.as_deref().unwrap_or_default())) {
            return Ok(());
        }
        let Some(misfit) = fit::misfit(pod, node) else { return Ok(()) };
        let (reason, message) = (misfit.reason().to_owned(), misfit.message().to_owned());
        Err(self.rejected(pod, AdmissionRejection { reason, message, refusal: Refusal::Other }))
    }

    /// Requests the termination of a rejected pod.
    pub async fn refuse(&self, uid: &str, rejection: AdmissionRejection) {
        let AdmissionRejection { reason, message, refusal } = rejection;
        let request = Request::Refuse { uid: uid.to_owned(), reason, message, refusal };
        // Without a manager the agent is stopping, and the request is pointless.
        let _ = self.parts.requests.send(request).await;
    }

    /// Returns true and reserves room for a while if a terminated pod would fit now; for a critical pod, also
    /// by preemption.
    pub(self) fn reserve(&self, pod: &Arc<core::Pod>) -> bool {
        self.parts.refusal(pod).is_none() && self.with(|ledger| ledger.reserve(pod, Instant::now()))
    }

    /// Drops expired reservations; returns the time of the next expiry.
    pub(self) fn expire(&self) -> Option<Instant> {
        self.with(|ledger| {
            ledger.book.expire(Instant::now());
            ledger.book.next_expiry()
        })
    }

    fn rejected(&self, pod: &core::Pod, rejection: AdmissionRejection) -> AdmissionRejection {
        info!(pod = %PodName::of(pod), reason = rejection.reason, message = rejection.message, "rejected a pod");
        self.parts.metrics.rejected(&rejection.reason);
        rejection
    }

    /// Runs `work` on the ledger: the only access to it. Publishes released room while the ledger is locked.
    fn with<T>(&self, work: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let result = work(&mut ledger);
        let now = ledger.book.changes();
        self.changes.send_if_modified(|known| std::mem::replace(known, now) != now);
        result
    }
}

impl QueuePlace<'_> {
    /// Waits until `pod` may run: returns at once if there is room, later if there will be. For an admitted
    /// pod it returns at once. A call with other amounts keeps the pod's place.
    ///
    /// # Errors
    /// The pod may not run on this node.
    pub async fn admit(&self, pod: &Arc<core::Pod>) -> Result<(), AdmissionRejection> {
        let admission = self.admission;
        if admission.with(|ledger| ledger.still_has(pod, Instant::now())) {
            return Ok(());
        }
        if let Some(rejection) = admission.parts.refusal(pod) {
            return Err(admission.rejected(pod, rejection));
        }
        let mut changes = admission.changes();
        loop {
            let verdict = admission.with(|ledger| ledger.decide(pod, Instant::now()));
            let wake = match verdict {
                Verdict::Admitted => return Ok(()),
                Verdict::Rejected(rejection) => return Err(admission.rejected(pod, rejection)),
                Verdict::Wait { until } => until,
                Verdict::Preempt { victims, resource, until } => {
                    admission.parts.preempt(pod, &victims, &resource).await;
                    until
                }
            };
            let timer = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // The sender lives as long as this value.
                _ = changes.changed() => {}
                () = timer => {}
            }
        }
    }
}

/// Returns the time after which a terminating pod is overdue. As in the kubelet, 1.5 times the pod's grace
/// period, and at least 10 s (`pkg/kubelet/pod_workers.go`, `killPodNow`).
fn patience(grace: Duration) -> Duration {
    let half = grace.checked_div(2).unwrap_or_default();
    grace.saturating_add(half).max(Duration::from_secs(10))
}

fn grace_of(pod: &core::Pod) -> Duration {
    beelet_model::pod::grace_period(pod)
}

fn tolerates_memory_pressure(pod: &core::Pod) -> bool {
    let tolerations = pod.spec.iter().flat_map(|spec| spec.tolerations.iter().flatten());
    tolerations.into_iter().any(|toleration| {
        let effect = toleration.effect.as_deref().is_none_or(|e| e.is_empty() || e == "NoSchedule");
        let exists = toleration.operator.as_deref() == Some("Exists");
        let key = match toleration.key.as_deref() {
            None | Some("") => exists,
            Some(key) => {
                // The taint has no value, so only an empty one equals it.
                key == MEMORY_PRESSURE_TAINT
                    && (exists || toleration.value.as_deref().is_none_or(str::is_empty))
            }
        };
        effect && key
    })
}

#[cfg(test)]
mod tests;
