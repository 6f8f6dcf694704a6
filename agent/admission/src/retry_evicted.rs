//! Lets pods run again that the node ended or did not let in: evicted ones once nothing has been short for
//! the transition period, preempted ones once there has been room for so long, and those that did not fit as
//! soon as they do. Under an API server somebody would make a new pod; a standalone node has only the
//! manifest.
//!
//! Must never bring back a pod for which there is no room: it would be refused once more.

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

/// A pod that did not fit is not tried again sooner than this: nothing turns in a circle at once.
const REFUSED_FOR: Duration = Duration::from_secs(1);

/// Asks for another try of pods that were evicted or preempted, or did not fit, once the node has room for
/// them.
#[derive(Debug)]
pub struct RetryEvicted {
    /// All pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// What the node is short of.
    pub conditions: watch::Receiver<Conditions>,
    /// Knows whether there is room.
    pub admission: Arc<Admission>,
    /// To the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// How long nothing must have been short.
    pub transition: Duration,
}

impl RetryEvicted {
    /// Works until `shutdown`.
    pub fn run(mut self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            // What was short before the agent began isn't known: only from here on nothing has been. So it
            // doesn't matter either when by the wall's clock, which may have been set, a pod was ended.
            let mut ended = Candidates::default();
            let (mut room, mut going) = (self.admission.changes(), self.admission.parts.shutdown.clone());
            loop {
                ended.follow(&self.table.borrow_and_update());
                let due = self.bring_back(&ended.in_order()).await;
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
                    // A machine that does not go down after all lets pods in again.
                    Ok(()) = going.changed() => {}
                    () = timer => {}
                }
            }
        })
    }

    /// Asks for those that may; when others may at the soonest. Room that comes free wakes us.
    async fn bring_back(&mut self, pods: &[&Candidate]) -> Option<Instant> {
        let short = !self.conditions.borrow_and_update().is_empty();
        let (now, mut due) = (Instant::now(), None);
        for Candidate { pod, how, at } in pods.iter().copied() {
            let is_refused = *how == How::Refused;
            let patience = if is_refused { REFUSED_FOR } else { self.transition };
            let from = at.checked_add(patience);
            if from.is_none_or(|from| from > now) {
                due = due.into_iter().chain(from).min();
            } else if short && !is_refused {
                // The conditions' end wakes us.
            } else if self.admission.reserve(pod) {
                info!(pod = %PodName::of(pod), "there is room for a pod that the node ended or refused; it may run");
                let uid = pod.metadata.uid.clone().unwrap_or_default();
                if self.requests.send(Request::Retry { uid }).await.is_err() {
                    return None;
                }
            }
        }
        due
    }
}

/// The pods that the node ended.
#[derive(Default)]
struct Candidates {
    /// The pods as they were when they were last looked at: only what has changed since is looked at again.
    known: Pods,
    ended: HashMap<PodName, Candidate>,
}

impl Candidates {
    /// Takes over what has changed.
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

    /// The most important first.
    fn in_order(&self) -> Vec<&Candidate> {
        let mut pods: Vec<_> = self.ended.iter().collect();
        pods.sort_by_cached_key(|(name, one)| (std::cmp::Reverse(priority(&one.pod)), *name));
        pods.into_iter().map(|(_, one)| one).collect()
    }
}

/// A pod that may run again.
struct Candidate {
    pod: Arc<core::Pod>,
    how: How,
    /// When it was first seen to have ended.
    at: Instant,
}

impl Candidate {
    /// The pod, if the node ended it. It may have been ended `before`, at the same time by what it says, or
    /// at another.
    fn of(entry: &PodEntry, before: Option<&Self>) -> Option<Self> {
        // In a cluster somebody makes a new pod.
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

/// How the node ended a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// It ran, until then.
    At(Timestamp),
    /// There was no room for it.
    Refused,
}

/// Returns how the node ended the pod; None if it didn't, or if that isn't over yet.
fn how_ended(entry: &PodEntry) -> Option<How> {
    entry.ended()?;
    let status = entry.pod.status.as_ref()?;
    let reason = status.reason.as_deref().filter(|_| status.phase.as_deref() == Some("Failed"))?;
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
        // The same end with other words is the same; another pod of that name is not.
        candidates.follow(&table(&[("b", "1", "OutOfmemory"), ("a", "4", "OutOfcpu")]));
        let second = seen(&candidates);
        assert_eq!(second[1], first[1]);
        assert!(second[0].1 > first[0].1);
        candidates.follow(&table(&[("b", "1", "Error")]));
        assert!(seen(&candidates).is_empty());
    }

    #[test]
    fn only_what_the_node_ended_or_refused_comes_back_and_only_once_it_is_over() {
        let condition = json!([{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2026-11-21T12:00:00Z"}]);
        let check = |phase: &str, reason: &str, refusal: Option<Refusal>, expect: bool| {
            let status = json!({"phase": phase, "reason": reason, "conditions": condition});
            assert_eq!(how_ended(&entry(&status, refusal)).is_some(), expect, "{phase} {reason} {refusal:?}");
        };
        check("Failed", "Evicted", None, true);
        check("Failed", "Preempting", None, true);
        check("Running", "Evicted", None, false);
        check("Failed", "DeadlineExceeded", None, false);
        check("Succeeded", "", None, false);
        // The reason's word says nothing of a refusal.
        for reason in ["OutOfcpu", "NodePorts", "UnexpectedAdmissionError", "Whatever"] {
            check("Failed", reason, Some(Refusal::Room), true);
            check("Failed", reason, Some(Refusal::Other), false);
            check("Pending", reason, Some(Refusal::Room), false);
        }
    }
}
