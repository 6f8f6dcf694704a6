//! Who may run here: room for a pod's requests is found, made (a critical pod preempts) or refused, before
//! anything of the pod is started.
//!
//! The decisions are `beelet_policy::admission` and `::preemption`, the same that `beelet plan` shows; here
//! they meet the pods that really hold something. A pod's worker asks before it starts anything; the pods'
//! manager says what leaves and what has left. Room is counted as taken until the pod that had it is really
//! gone, so a new pod may have to wait for one on its way out, and is not refused for it.
//!
//! Must never kill anything by itself (it asks the pods' manager to), never look at what pods use, and never
//! refuse a pod that runs already.
// What this adds up comes from outside.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use beelet_model::pressure::{Conditions, EVICTED, PREEMPTING};
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
/// The kubelet's words.
const SHUTS_DOWN_MESSAGE: &str = "Pod was rejected as the node is shutting down.";
/// The taint that a pod must tolerate to be let in without requests while memory is short.
const MEMORY_PRESSURE_TAINT: &str = "node.kubernetes.io/memory-pressure";

/// Why a pod may not run here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmissionRejection {
    /// One word, as the kubelet has it: `OutOfcpu`, `NodePorts`, `Evicted`, `UnexpectedAdmissionError`, …
    pub reason: String,
    /// A sentence.
    pub message: String,
    /// Says when another try may succeed.
    pub refusal: Refusal,
}

/// Why a pod that runs can't have other amounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResizeDeferral {
    /// Not on this node, whoever goes.
    pub infeasible: bool,
    /// A sentence.
    pub message: String,
}

/// What admission needs from the rest of the node.
#[derive(Debug)]
pub struct Parts {
    /// What the node has for pods.
    pub resources: NodeResources,
    /// How victims are chosen.
    pub policy: preemption::Policy,
    /// What the node is short of.
    pub conditions: watch::Receiver<Conditions>,
    /// Since when the machine has been going down, if it is.
    pub shutdown: watch::Receiver<Option<Timestamp>>,
    /// To the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Counters.
    pub metrics: Metrics,
}

/// Decides whether a pod has room; clones of its `Arc` share one ledger.
#[derive(Debug)]
pub struct Admission {
    parts: Parts,
    ledger: Mutex<Ledger>,
    /// Rung at each change of [`Ledger::changes`].
    changes: watch::Sender<u64>,
}

/// A place in the queue of pods that wait for room. Dropped before it was admitted, the pod gives it up.
#[derive(Debug)]
pub struct QueuePlace<'a> {
    admission: &'a Admission,
    uid: String,
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        self.admission.with(|ledger| ledger.give_up(&self.uid));
    }
}

impl Admission {
    /// Admission on a node where no pod is yet.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let ledger = Mutex::new(Ledger::new(parts.resources.clone(), parts.policy));
        Self { parts, ledger, changes: watch::Sender::new(0) }
    }

    /// The resources that the node has for pods.
    #[must_use]
    pub fn resources(&self) -> &NodeResources {
        &self.parts.resources
    }

    /// Counts a pod that runs already: whatever is said of it now, it was let in before the agent's restart.
    pub fn adopt(&self, pod: &Arc<core::Pod>) {
        self.with(|ledger| ledger.adopt(pod));
    }

    /// Changes whenever room was given back, or may soon be: a pod is gone or on its way out, has become
    /// smaller, or waits no longer. Everything that waits for room waits for this.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Counts a pod that is here with other amounts of cpu and memory, if it asks for less or there is room
    /// for them; `before` is the pod as it is.
    ///
    /// # Errors
    /// There is no room for them now, or there never is on this node.
    pub fn resize(&self, pod: &Arc<core::Pod>, before: &core::Pod) -> Result<(), ResizeDeferral> {
        self.with(|ledger| ledger.resize(pod, before, Instant::now()))
    }

    /// The pod is on its way out; what it has is not free yet. Unknown pods are none of ours.
    pub fn leaving(&self, uid: &str, grace: Duration) {
        self.with(|ledger| ledger.leaving(uid, Instant::now(), grace));
    }

    /// The room of a pod is free, of which nothing runs any more.
    pub fn released(&self, uid: &str, _: Ended) {
        self.with(|ledger| ledger.released(uid));
    }

    /// A place in the queue for a pod, which it keeps until this is dropped.
    #[must_use]
    pub fn queue(&self, uid: &str) -> QueuePlace<'_> {
        QueuePlace { admission: self, uid: uid.to_owned() }
    }

    /// Checks that `pod` belongs on `node`, by the node's name, labels and taints. A pod that was let in
    /// before does.
    ///
    /// # Errors
    /// Why it does not.
    pub fn fits(&self, pod: &core::Pod, node: &NodeView) -> Result<(), AdmissionRejection> {
        if self.with(|ledger| ledger.has(pod.metadata.uid.as_deref().unwrap_or_default())) {
            return Ok(());
        }
        let Some(misfit) = fit::misfit(pod, node) else { return Ok(()) };
        let (reason, message) = (misfit.reason().to_owned(), misfit.message().to_owned());
        Err(self.rejected(pod, AdmissionRejection { reason, message, refusal: Refusal::Other }))
    }

    /// Has a pod ended that may not run here.
    pub async fn refuse(&self, uid: &str, rejection: AdmissionRejection) {
        let AdmissionRejection { reason, message, refusal } = rejection;
        let request = Request::Refuse { uid: uid.to_owned(), reason, message, refusal };
        // Without a manager there is nobody to end it, and soon no pod.
        let _ = self.parts.requests.send(request).await;
    }

    /// Returns true if a pod that was ended would find room now; a critical one also where others would have
    /// to go. If so the room is kept for it for a while.
    pub(self) fn reserve(&self, pod: &Arc<core::Pod>) -> bool {
        self.refused_by_node(pod).is_none() && self.with(|ledger| ledger.reserve(pod, Instant::now()))
    }

    /// Gives up the room of pods that did not come back; when there is more of it to give up.
    pub(self) fn expire(&self) -> Option<Instant> {
        self.with(|ledger| {
            ledger.expire(Instant::now());
            ledger.next_expiry()
        })
    }

    /// All victims at once: none waits for another's end.
    async fn preempt(&self, pod: &core::Pod, victims: &[Arc<core::Pod>], resource: &str) {
        for victim in victims {
            warn!(pod = %PodName::of(pod), victim = %PodName::of(victim), resource, "preempts a pod to make room");
            self.parts.metrics.preempted(resource);
            let request = Request::Fail {
                uid: victim.metadata.uid.clone().unwrap_or_default(),
                reason: PREEMPTING.to_owned(),
                message: PREEMPTED_MESSAGE.to_owned(),
                grace: None,
            };
            if self.parts.requests.send(request).await.is_err() {
                return;
            }
        }
    }

    fn rejected(&self, pod: &core::Pod, rejection: AdmissionRejection) -> AdmissionRejection {
        info!(pod = %PodName::of(pod), reason = rejection.reason, message = rejection.message, "pod is rejected");
        self.parts.metrics.rejected(&rejection.reason);
        rejection
    }

    /// Nobody begins on a machine that goes down. Else the kubelet's rule (`pkg/kubelet/eviction`, `Admit`):
    /// under memory pressure no pod without requests, unless it tolerates that; under any other pressure no
    /// pod at all. Critical pods come in always.
    fn refused_by_node(&self, pod: &core::Pod) -> Option<AdmissionRejection> {
        if self.parts.shutdown.borrow().is_some() {
            let (reason, message) = (NODE_SHUTS_DOWN.to_owned(), SHUTS_DOWN_MESSAGE.to_owned());
            return Some(AdmissionRejection { reason, message, refusal: Refusal::Other });
        }
        let conditions = self.parts.conditions.borrow();
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

    /// The only way to the ledger: whatever is given back there is published before anybody else works on it.
    fn with<T>(&self, work: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let result = work(&mut ledger);
        let now = ledger.changes();
        self.changes.send_if_modified(|known| std::mem::replace(known, now) != now);
        result
    }
}

impl QueuePlace<'_> {
    /// Waits until `pod` may run: at once if there is room, later if there will be. Asked again for a pod
    /// that was let in it says yes at once. Asked with other amounts, the pod keeps its place.
    ///
    /// # Errors
    /// Why it may not run here at all.
    pub async fn admit(&self, pod: &Arc<core::Pod>) -> Result<(), AdmissionRejection> {
        let admission = self.admission;
        if admission.with(|ledger| ledger.still_has(pod, Instant::now())) {
            return Ok(());
        }
        if let Some(rejection) = admission.refused_by_node(pod) {
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
                    admission.preempt(pod, &victims, &resource).await;
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

/// How long a pod that leaves gets before it counts as one that won't: the kubelet waits half as long again
/// as the pod's own grace period, and at least 10 s (`pkg/kubelet/pod_workers.go`, `killPodNow`).
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
