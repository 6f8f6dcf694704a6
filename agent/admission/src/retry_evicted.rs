//! Restarts pods that the node terminated or rejected: evicted ones when there has been no pressure for the
//! transition period, preempted ones when there has been room for that period, and rejected ones as soon as
//! they fit. In a cluster a controller would create a replacement; a standalone node has only the manifest.
//!
//! Must never restart a pod that does not fit: it would be rejected again.

use std::{collections::HashMap, sync::Arc, time::Duration};

use beelet_base::work::Work;
use beelet_policy::resources::critical::priority;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::Admission;
use beelet_model::pressure::{Conditions, EVICTED, PREEMPTING};
use beelet_model::{
    failure::Refusal,
    origin::Origin,
    request::Request,
    table::{PodChanges, PodEntry, PodName, PodTable, Pods},
};

/// Minimum time before a rejected pod is retried, so that it cannot loop.
const REFUSED_FOR: Duration = Duration::from_secs(1);

/// Requests a retry of pods that were evicted, preempted or rejected for lack of room, when they fit.
#[derive(Debug)]
pub struct RetryEvicted {
    /// All pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Pressure conditions of the node.
    pub conditions: watch::Receiver<Conditions>,
    /// Reserves room.
    pub admission: Arc<Admission>,
    /// Requests to the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Time without pressure before evicted pods restart.
    pub transition: Duration,
}

impl RetryEvicted {
    /// Works until `shutdown`.
    pub fn run(mut self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            // Pressure before the agent's start is unknown, so the period counts from here. The time at which
            // a pod ended by the wall clock, which may have been set, does not matter either.
            let mut ended = Candidates::default();
            let (mut room, mut going) = (self.admission.changes(), self.admission.parts.shutdown.clone());
            loop {
                ended.follow(&self.table.borrow_and_update());
                let due = self.retry(&ended.in_order()).await;
                let wake = due.into_iter().chain(self.admission.expire()).min();
                let timer = async {
                    match wake {
                        Some(at) => tokio::time::sleep_until(at).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    changed = self.table.changed() => if changed.is_err() { return },
                    changed = self.conditions.changed() => if changed.is_err() { return },
                    // The sender lives as long as admission.
                    _ = room.changed() => {}
                    // An aborted shutdown admits pods again.
                    Ok(()) = going.changed() => {}
                    () = timer => {}
                }
            }
        })
    }

    /// Requests a retry of pods that are due; returns the next due time. Released room wakes the task.
    async fn retry(&mut self, pods: &[&Candidate]) -> Option<Instant> {
        let short = !self.conditions.borrow_and_update().is_empty();
        let (now, mut due) = (Instant::now(), None);
        for Candidate { pod, how, at } in pods.iter().copied() {
            let is_refused = *how == How::Refused;
            let patience = if is_refused { REFUSED_FOR } else { self.transition };
            let from = at.checked_add(patience);
            if from.is_none_or(|from| from > now) {
                due = due.into_iter().chain(from).min();
            } else if short && !is_refused {
                // The end of the pressure wakes the task.
            } else if self.admission.reserve(pod) {
                info!(pod = %PodName::of(pod), "restarting a pod that was evicted or rejected: there is room for it");
                let uid = pod.metadata.uid.clone().unwrap_or_default();
                if self.requests.send(Request::Retry { uid }).await.is_err() {
                    return None;
                }
            }
        }
        due
    }
}

/// Pods that the node terminated or rejected.
#[derive(Default)]
struct Candidates {
    /// Pods as of the last update: only later changes are examined.
    known: Pods,
    ended: HashMap<PodName, Candidate>,
}

impl Candidates {
    /// Updates the candidates from what has changed.
    fn follow(&mut self, table: &PodTable) {
        let changes = PodChanges::between(&self.known, &table.pods);
        for (name, _) in changes.gone {
            self.ended.remove(name);
        }
        for (name, entry) in changes.changed {
            let before = self.ended.remove(name);
            let now = Candidate::of(entry, before.as_ref());
            self.ended.extend(now.map(|candidate| (name.clone(), candidate)));
        }
        self.known = table.pods.clone();
    }

    /// Returns the candidates by descending priority.
    fn in_order(&self) -> Vec<&Candidate> {
        let mut pods: Vec<_> = self.ended.iter().collect();
        pods.sort_by_cached_key(|(name, one)| (std::cmp::Reverse(priority(&one.pod)), *name));
        pods.into_iter().map(|(_, one)| one).collect()
    }
}

/// Pod that may be restarted.
struct Candidate {
    pod: Arc<core::Pod>,
    how: How,
    /// Time at which its end was first seen.
    at: Instant,
}

impl Candidate {
    /// Returns a candidate if the node terminated or rejected the pod. `before` is the candidate of an
    /// earlier version; the time is kept if it describes the same end.
    fn of(entry: &PodEntry, before: Option<&Self>) -> Option<Self> {
        // In a cluster a controller creates a replacement.
        if entry.pod.metadata.deletion_timestamp.is_some() || Origin::of(&entry.pod).is_api() {
            return None;
        }
        let how = how_ended(entry)?;
        let is_same = |known: &&Self| known.how == how && known.pod.metadata.uid == entry.pod.metadata.uid;
        let at = before.filter(is_same).map_or_else(Instant::now, |known| known.at);
        let pod = Arc::new(core::Pod { status: None, ..entry.pod.clone() });
        Some(Self { pod, how, at })
    }
}

/// Way in which the node ended a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// The pod ran until then.
    At(Timestamp),
    /// The pod was rejected for lack of room.
    Refused,
}

/// Returns how the node ended the pod; None if it did not, or if the pod has not terminated yet.
fn how_ended(entry: &PodEntry) -> Option<How> {
    entry.ended()?;
    let status = entry.pod.status.as_ref()?;
    // A preempted pod may have succeeded.
    let phase = status.phase.as_deref().filter(|phase| matches!(*phase, "Failed" | "Succeeded"));
    let reason = status.reason.as_deref().filter(|_| phase.is_some())?;
    if entry.refusal == Some(Refusal::Room) {
        return Some(How::Refused);
    }
    if !matches!(reason, EVICTED | PREEMPTING) {
        return None;
    }
    let condition = status.conditions.iter().flatten().find(|c| c.type_ == "DisruptionTarget")?;
    Some(How::At(condition.last_transition_time.as_ref()?.0))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn entry(status: &Value, refusal: Option<Refusal>) -> PodEntry {
        let pod = json!({"metadata": {"name": "p", "uid": "u"}, "status": status});
        PodEntry { refusal, ..PodEntry::of(serde_json::from_value(pod).unwrap()) }
    }

    #[test]
    fn the_time_counts_from_when_a_pods_end_was_first_seen() {
        let table = |pods: &[(&str, &str, &str)]| {
            let entry = |(name, uid, reason): &(&str, &str, &str)| {
                let pod = json!({"metadata": {"name": name, "uid": uid},
                                 "status": {"phase": "Failed", "reason": reason}});
                let pod: core::Pod = serde_json::from_value(pod).unwrap();
                let refusal = (*reason != "Error").then_some(Refusal::Room);
                (PodName::of(&pod), Arc::new(PodEntry { refusal, ..PodEntry::of(pod) }))
            };
            PodTable { pods: pods.iter().map(entry).collect(), ..PodTable::default() }
        };
        let mut candidates = Candidates::default();
        let seen = |candidates: &Candidates| -> Vec<(String, Instant)> {
            let name = |one: &Candidate| one.pod.metadata.name.clone().unwrap();
            candidates.in_order().into_iter().map(|one| (name(one), one.at)).collect()
        };
        candidates.follow(&table(&[("b", "1", "OutOfcpu"), ("a", "2", "OutOfcpu"), ("c", "3", "Error")]));
        let first = seen(&candidates);
        assert_eq!(first.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        // A changed reason is the same end; another pod of that name is not.
        candidates.follow(&table(&[("b", "1", "OutOfmemory"), ("a", "4", "OutOfcpu")]));
        let second = seen(&candidates);
        assert_eq!(second[1], first[1]);
        assert!(second[0].1 > first[0].1);
        candidates.follow(&table(&[("b", "1", "Error")]));
        assert!(seen(&candidates).is_empty());
    }

    #[test]
    fn only_terminated_pods_that_the_node_ended_or_rejected_are_retried() {
        let condition = json!([{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2026-11-21T12:00:00Z"}]);
        let check = |phase: &str, reason: &str, refusal: Option<Refusal>, expect: bool| {
            let status = json!({"phase": phase, "reason": reason, "conditions": condition});
            assert_eq!(how_ended(&entry(&status, refusal)).is_some(), expect, "{phase} {reason} {refusal:?}");
        };
        check("Failed", "Evicted", None, true);
        check("Failed", "Preempting", None, true);
        check("Succeeded", "Preempting", None, true);
        check("Running", "Evicted", None, false);
        check("Failed", "DeadlineExceeded", None, false);
        check("Succeeded", "", None, false);
        // The reason alone does not identify a rejection.
        for reason in ["OutOfcpu", "NodePorts", "UnexpectedAdmissionError", "Other"] {
            check("Failed", reason, Some(Refusal::Room), true);
            check("Failed", reason, Some(Refusal::Other), false);
            check("Pending", reason, Some(Refusal::Room), false);
        }
    }
}
