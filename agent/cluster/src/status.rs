//! Writes the pods' statuses to the API server, and deletes fully terminated pods there.
//!
//! A single writer serves all pods: it writes the newest status of each, at most one request per pod at a
//! time, the most urgent first. Instead of a queue, the writer computes the differences to the API server's
//! objects each time, so all changes during an outage become one write at its end.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_codec::ApiType;
use beelet_model::{
    origin::Origin,
    status::whole_second,
    table::{PodEntry, PodName, PodTable},
};
use beelet_policy::pod::{
    api_status::{self, Urgency},
    mirror,
};
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use jiff::Timestamp;
use k8s_openapi::{api::core::v1 as core, apimachinery::pkg::apis::meta::v1::Time};
use serde_json::Value;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    assigned::{Pod, Pods},
    backoff::Backoff,
    client::{Client, Error, Patch},
    presence::moment,
    status_metrics::Metrics,
    url,
    watch::is_older,
};

/// Maximum number of concurrent requests.
const AT_ONCE: usize = 8;
/// Timeout of the last statuses when the agent stops.
const LAST: Duration = Duration::from_secs(5);

/// Writes statuses.
pub(crate) struct Writer {
    client: Client,
    pods: watch::Receiver<Pods>,
    table: watch::Receiver<Arc<PodTable>>,
    /// By the UID of the API server's object.
    slots: BTreeMap<String, Slot>,
    /// Time of the next attempt after a failure of the API server, which starts with a single request.
    away: Option<Instant>,
    away_pauses: Backoff,
    /// True while the API server does not answer: another task's answered request ends the pause.
    waits_for_return: bool,
    /// The last examined table.
    looked: Arc<PodTable>,
    /// True when the agent stops: no status is held back any more.
    ends: bool,
    /// The newest table whose statuses the API server has completely.
    written: watch::Sender<Option<Arc<PodTable>>>,
    metrics: Metrics,
}

/// State of one pod's writes.
#[derive(Default)]
struct Slot {
    /// True while a request is active.
    busy: bool,
    /// The last written status, and the API server's status after this write.
    settled: Option<(Value, Value)>,
    /// The object in the API server's last answer, possibly newer than the watched one.
    answered: Option<Arc<core::Pod>>,
    /// Time of the first change that the API server lacks.
    changed: Option<Instant>,
    /// The inputs for which no request was needed.
    idle: Option<(Arc<core::Pod>, Arc<PodEntry>)>,
    /// True if the pod was deleted or not found; the watch is going to report the deletion.
    gone: bool,
    not_before: Option<Instant>,
    /// Maximum wait and its end, for a status that another status or the object's deletion soon follows.
    held: Option<(Duration, Instant)>,
    pauses: Backoff,
}

/// A request for one pod.
struct Job {
    uid: String,
    name: PodName,
    what: What,
    urgency: Urgency,
}

enum What {
    Write(Box<Write>),
    Delete,
}

/// A change of a status.
struct Write {
    patch: Value,
    before: Value,
    after: Value,
}

type Answer = (Job, Result<Value, Error>);
type UnderWay = FuturesUnordered<BoxFuture<'static, Answer>>;

impl Writer {
    pub(crate) fn new(
        client: Client,
        pods: watch::Receiver<Pods>,
        table: watch::Receiver<Arc<PodTable>>,
        written: watch::Sender<Option<Arc<PodTable>>>,
        metrics: Metrics,
    ) -> Self {
        let (slots, away_pauses, looked) = (BTreeMap::new(), Backoff::default(), Arc::default());
        let (waits_for_return, ends) = (false, false);
        Self {
            client,
            pods,
            table,
            slots,
            away: None,
            away_pauses,
            waits_for_return,
            looked,
            ends,
            written,
            metrics,
        }
    }

    /// Writes statuses until `stop`, and then tries each unwritten status once.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        // Publish an empty table: a writer exists, but has written no status yet.
        self.written.send_if_modified(|written| written.replace(Arc::default()).is_none());
        let mut under_way = UnderWay::new();
        let presence = self.client.presence().clone();
        while !stop.is_cancelled() {
            let wake = self.begin(&mut under_way);
            tokio::select! {
                Some(answer) = under_way.next() => self.complete(answer),
                changed = self.pods.changed() => if changed.is_err() { break },
                changed = self.table.changed() => if changed.is_err() { break },
                () = until(wake) => {}
                () = presence.here(), if self.waits_for_return => self.resume(),
                () = stop.cancelled() => {}
            }
        }
        let rest = async {
            let mut tried = BTreeSet::new();
            (self.away, self.ends) = (None, true);
            loop {
                for job in self.jobs().into_iter().filter(|job| tried.insert(job.uid.clone())) {
                    self.start(job, &mut under_way);
                }
                let Some(answer) = under_way.next().await else { return };
                self.complete(answer);
                self.away = None;
            }
        };
        if timeout(LAST, rest).await.is_err() {
            warn!(
                "cannot write the last statuses of pods to the API server in time; the next start writes them"
            );
        }
    }

    /// Schedules the next attempt soon, since the server has answered another task's request.
    fn resume(&mut self) {
        self.waits_for_return = false;
        self.away_pauses.reset();
        let soon = Instant::now().after(moment());
        self.away = self.away.map(|away| away.min(soon));
    }

    /// Starts due requests within the limit. Returns the time of the next check without changes.
    fn begin(&mut self, under_way: &mut UnderWay) -> Option<Instant> {
        let now = Instant::now();
        if let Some(away) = self.away.filter(|away| *away > now) {
            return Some(away);
        }
        let limit = if self.away.is_some() { 1 } else { AT_ONCE };
        let jobs = self.jobs();
        if jobs.is_empty() && under_way.is_empty() {
            self.publish_written();
        }
        for job in jobs {
            if under_way.len() >= limit {
                break;
            }
            self.start(job, under_way);
        }
        let times = self.slots.values().flat_map(|slot| [slot.not_before, slot.held.map(|(_, until)| until)]);
        times.flatten().filter(|at| *at > now).min()
    }

    /// Publishes the examined table as written, unless a status waits for a retry or is held back.
    fn publish_written(&self) {
        let waits = |slot: &Slot| !slot.gone && (slot.not_before.is_some() || slot.held.is_some());
        if self.pods.borrow().is_none() || self.slots.values().any(waits) {
            return;
        }
        self.written.send_if_modified(|written| {
            let is_new = written.as_ref().is_none_or(|known| !Arc::ptr_eq(known, &self.looked));
            *written = Some(Arc::clone(&self.looked));
            is_new
        });
    }

    fn start(&mut self, job: Job, under_way: &mut UnderWay) {
        self.slots.entry(job.uid.clone()).or_default().busy = true;
        let client = self.client.clone();
        let request = async move {
            let (namespace, name) = (url::escaped(&job.name.namespace), url::escaped(&job.name.name));
            let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
            let answer = match &job.what {
                What::Write(write) => {
                    client.patch(&format!("{path}/status"), Patch::StrategicMerge, &write.patch).await
                }
                What::Delete => client.delete(&path, Some(&job.uid)).await,
            };
            (job, answer)
        };
        under_way.push(request.boxed());
    }

    /// Returns all due requests, the most urgent first.
    fn jobs(&mut self) -> Vec<Job> {
        let Some(pods) = self.pods.borrow_and_update().clone() else { return Vec::new() };
        let table = Arc::clone(&self.table.borrow_and_update());
        self.looked = Arc::clone(&table);
        let uids: BTreeSet<&str> =
            pods.values().filter_map(|pod| pod.object.metadata.uid.as_deref()).collect();
        self.slots.retain(|uid, slot| slot.busy || uids.contains(uid.as_str()));
        let now = Instant::now();
        let mut jobs: Vec<Job> = pods
            .iter()
            .filter_map(|(name, pod)| {
                let entry = table.pods.get(name).filter(|entry| is_of(entry, pod))?;
                let uid = pod.object.metadata.uid.clone()?;
                let slot = self.slots.entry(uid.clone()).or_default();
                let waits = slot.not_before.is_some_and(|at| at > now);
                if slot.busy || slot.gone || waits {
                    return None;
                }
                let (what, urgency) = slot.next(&uid, pod, entry, self.ends)?;
                Some(Job { uid, name: name.clone(), what, urgency })
            })
            .collect();
        jobs.sort_by_key(|job| Reverse(job.urgency));
        jobs
    }

    fn complete(&mut self, (job, answer): Answer) {
        let slot = self.slots.entry(job.uid).or_default();
        (slot.busy, slot.not_before) = (false, None);
        match answer {
            Ok(object) => {
                if self.away.take().is_some() {
                    info!("writing the pods' statuses to the API server again");
                }
                self.away_pauses.reset();
                slot.pauses.reset();
                if let Some(since) = slot.answered(job.what, &object) {
                    self.metrics.written(since.elapsed());
                }
            }
            Err(error) if error.is_not_found() => {
                debug!(pod = %job.name, %error, "the pod no longer exists in the API server");
                slot.gone = true;
            }
            Err(error) if error.is_transient() => {
                let pause = self.away_pauses.next(error.retry_after());
                self.waits_for_return = error.is_absence();
                if self.away.replace(Instant::now().after(pause)).is_none() {
                    warn!(pod = %job.name, %error, "cannot write the pods' statuses to the API server, retrying");
                }
            }
            Err(error) => {
                let pause = slot.pauses.next(error.retry_after());
                warn!(pod = %job.name, %error, "cannot write the pod's status");
                match (error.code(), job.what) {
                    // The server would refuse the same status again.
                    (Some(400 | 422), What::Write(write)) => {
                        slot.settled = Some((write.after, write.before));
                    }
                    _ => slot.not_before = Some(Instant::now().after(pause)),
                }
            }
        }
    }
}

impl Slot {
    /// Returns the due request of a pod, if any.
    fn next(
        &mut self,
        uid: &str,
        pod: &Pod,
        entry: &Arc<PodEntry>,
        at_once: bool,
    ) -> Option<(What, Urgency)> {
        let same = |(object, seen): &(Arc<core::Pod>, Arc<PodEntry>)| {
            Arc::ptr_eq(object, &pod.object) && Arc::ptr_eq(seen, entry)
        };
        if self.idle.as_ref().is_some_and(same) {
            return None;
        }
        let version = |pod: &core::Pod| pod.metadata.resource_version.clone().unwrap_or_default();
        let watched = Arc::clone(&pod.object);
        let newest = match self.answered.take() {
            Some(answered) if is_older(&version(&watched), &version(&answered)) => {
                self.answered = Some(Arc::clone(&answered));
                answered
            }
            _ => watched,
        };
        let in_api = newest.status.clone().unwrap_or_default();
        let ours = ours(entry, &newest, &in_api);
        let merged = api_status::merged(&in_api, &ours);
        let (before, after) = (in_api.to_value(), merged.to_value());
        let settled = self.settled.as_ref().is_some_and(|(ours, theirs)| *ours == after && *theirs == before);
        let patch = api_status::patch(uid, &before, &after).filter(|_| !settled);
        self.changed = patch.as_ref().map(|_| self.changed.unwrap_or_else(Instant::now));
        // The API server would refuse writes and deletions of an object that it is removing.
        let patience = match &patch {
            _ if api_status::vanishes(&newest) => Some(api_status::VANISHING),
            Some(_) => api_status::patience(&newest, &merged),
            None => None,
        };
        let held = self.held;
        self.held = patience.filter(|_| !at_once).map(|patience| match held {
            Some((of, until)) if of == patience => (of, until),
            _ => (patience, Instant::now().after(patience)),
        });
        if self.held.is_some_and(|(_, until)| until > Instant::now()) {
            return None;
        }
        self.held = None;
        if let Some(patch) = patch {
            let write = Box::new(Write { patch, before, after });
            return Some((What::Write(write), api_status::urgency(&in_api, &merged)));
        }
        let deleted = newest.metadata.deletion_timestamp.is_some();
        if deleted && entry.cleared && pod.wanted.is_some() {
            return Some((What::Delete, Urgency::Phase));
        }
        self.idle = Some((Arc::clone(&pod.object), Arc::clone(entry)));
        None
    }

    /// Records the API server's answer. Returns the time of the first change that a write has brought.
    fn answered(&mut self, what: What, object: &Value) -> Option<Instant> {
        let changed = self.changed.take().filter(|_| matches!(what, What::Write(_)));
        match what {
            What::Delete => self.gone = true,
            What::Write(write) => match core::Pod::from_value(object) {
                Ok(pod) => {
                    let theirs = pod.status.clone().unwrap_or_default().to_value();
                    self.settled = Some((write.after, theirs));
                    self.answered = Some(Arc::new(pod));
                }
                Err(problem) => {
                    debug!(%problem, "the API server's answer is not a pod; waiting for the watch");
                }
            },
        }
        changed
    }
}

/// Returns true if an entry of the table is the pod of this object, or the static pod that the object
/// mirrors.
fn is_of(entry: &PodEntry, pod: &Pod) -> bool {
    match &pod.wanted {
        Some(wanted) => entry.pod.metadata.uid == wanted.metadata.uid,
        None => !Origin::of(&entry.pod).is_api() && mirror::shows(&pod.object, &entry.pod),
    }
}

/// Returns a pod's status on this node.
fn ours(entry: &PodEntry, object: &core::Pod, in_api: &core::PodStatus) -> core::PodStatus {
    let status = entry.pod.status.clone().unwrap_or_default();
    let mut status = if entry.stopped { api_status::finished(object, &status) } else { status };
    api_status::open_gates(object, in_api, &mut status, &Time(whole_second(Timestamp::now())));
    status
}

/// Sleeps until `at`, or forever without a time.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(change: impl FnOnce(&mut Value)) -> Pod {
        let mut value = json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1", "resourceVersion": "5",
                "annotations": {"kubernetes.io/config.source": "api"}},
            "spec": {"containers": [{"name": "c"}]},
            "status": {"phase": "Pending"},
        });
        change(&mut value);
        let object: core::Pod = serde_json::from_value(value).unwrap();
        let wanted = core::Pod { status: None, ..object.clone() };
        Pod { object: Arc::new(object), wanted: Some(Arc::new(wanted)) }
    }

    fn entry(pod: &Pod, phase: &str) -> PodEntry {
        let status = core::PodStatus { phase: Some(phase.to_owned()), ..Default::default() };
        PodEntry::of(core::Pod { status: Some(status), ..(*pod.object).clone() })
    }

    fn patch(slot: &mut Slot, pod: &Pod, entry: &Arc<PodEntry>) -> Option<String> {
        slot.next("u1", pod, entry, false).map(|(what, _)| match what {
            What::Write(write) => write.patch["status"].to_string(),
            What::Delete => "delete".to_owned(),
        })
    }

    #[test]
    fn only_a_difference_is_written_and_an_answer_counts_before_the_watch_tells_it() {
        let (mut slot, pending) = (Slot::default(), pod(|_| {}));
        let running = Arc::new(entry(&pending, "Running"));
        assert_eq!(patch(&mut slot, &pending, &running).unwrap(), r#"{"phase":"Running"}"#);
        let (what, _) = slot.next("u1", &pending, &running, false).unwrap();
        let answer = pod(|pod| {
            pod["metadata"]["resourceVersion"] = json!("6");
            pod["status"]["phase"] = json!("Running");
        });
        let changed = slot.changed.unwrap();
        assert_eq!(slot.answered(what, &answer.object.to_value()), Some(changed));
        assert_eq!(slot.changed, None);
        assert_eq!(patch(&mut slot, &pending, &running), None);
        assert_eq!(patch(&mut slot, &answer, &running), None);
        // Another client's change of the agent's fields is reverted.
        let meddled = pod(|pod| pod["metadata"]["resourceVersion"] = json!("7"));
        assert_eq!(patch(&mut slot, &meddled, &running).unwrap(), r#"{"phase":"Running"}"#);
    }

    #[test]
    fn what_the_api_server_does_not_keep_is_not_written_again() {
        let (mut slot, pending) = (Slot::default(), pod(|_| {}));
        let running = Arc::new(entry(&pending, "Running"));
        let (what, _) = slot.next("u1", &pending, &running, false).unwrap();
        // An older server drops fields that it doesn't know.
        let dropped = pod(|pod| pod["metadata"]["resourceVersion"] = json!("6"));
        slot.answered(what, &dropped.object.to_value());
        assert_eq!(patch(&mut slot, &pending, &running), None);
        assert_eq!(patch(&mut slot, &dropped, &running), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_between_two_containers_is_written_only_if_it_lasts() {
        let container = |state: Value, last: Value| {
            json!({"phase": "Running", "containerStatuses": [{"name": "c", "containerID": "c://1", "image": "a",
                "imageID": "", "ready": false, "restartCount": 0, "state": state, "lastState": last}]})
        };
        let runs = pod(|pod| pod["status"] = container(json!({"running": {}}), json!({})));
        let ended = json!({"terminated": {"containerID": "c://1", "exitCode": 143}});
        let between = container(json!({"waiting": {"reason": "ContainerCreating"}}), ended);
        let status: core::PodStatus = serde_json::from_value(between).unwrap();
        let seen = Arc::new(PodEntry::of(core::Pod { status: Some(status), ..(*runs.object).clone() }));
        let mut slot = Slot::default();
        assert_eq!(patch(&mut slot, &runs, &seen), None);
        tokio::time::advance(Duration::from_millis(500)).await;
        assert_eq!(patch(&mut slot, &runs, &seen), None);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(patch(&mut slot, &runs, &seen).unwrap().contains("ContainerCreating"));
        assert!(slot.held.is_none());
        // A stopping agent does not hold back statuses.
        let last = Slot::default().next("u1", &runs, &seen, true);
        assert!(matches!(last, Some((What::Write(_), _))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_the_api_server_is_removing_is_left_alone_unless_it_stays() {
        let doomed = |finalizers: Value| {
            pod(|pod| {
                pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                pod["metadata"]["deletionGracePeriodSeconds"] = json!(0);
                pod["metadata"]["finalizers"] = finalizers;
            })
        };
        let (kept, vanishing) = (doomed(json!(["a.io/b"])), doomed(json!([])));
        let ended = Arc::new(PodEntry { stopped: true, cleared: true, ..entry(&vanishing, "Succeeded") });
        assert!(patch(&mut Slot::default(), &kept, &ended).unwrap().contains("Succeeded"));
        let mut slot = Slot::default();
        assert_eq!(patch(&mut slot, &vanishing, &ended), None);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert!(patch(&mut slot, &vanishing, &ended).unwrap().contains("Succeeded"));
        assert!(slot.held.is_none());
    }

    #[test]
    fn a_deleted_pod_has_ended_once_nothing_runs_and_is_deleted_once_nothing_is_left() {
        let mut slot = Slot::default();
        let deleted = pod(|pod| {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            pod["status"]["phase"] = json!("Running");
        });
        let stopping = Arc::new(entry(&deleted, "Running"));
        assert_eq!(patch(&mut slot, &deleted, &stopping), None);
        let stopped = Arc::new(PodEntry { stopped: true, ..(*stopping).clone() });
        assert_eq!(patch(&mut slot, &deleted, &stopped).unwrap(), r#"{"phase":"Failed"}"#);
        let cleared = Arc::new(PodEntry { cleared: true, ..(*stopped).clone() });
        assert_eq!(patch(&mut slot, &deleted, &cleared).unwrap(), r#"{"phase":"Failed"}"#);
        let ended = pod(|pod| {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            pod["metadata"]["resourceVersion"] = json!("6");
            pod["status"]["phase"] = json!("Failed");
        });
        assert_eq!(patch(&mut slot, &ended, &stopped), None, "its volumes may still be there");
        assert_eq!(patch(&mut slot, &ended, &cleared).unwrap(), "delete");
    }

    #[test]
    fn a_status_goes_to_the_pod_of_its_uid_and_a_static_pods_to_its_mirror() {
        let (web, other) = (pod(|_| {}), pod(|pod| pod["metadata"]["uid"] = json!("u2")));
        assert!(is_of(&entry(&web, "Running"), &web) && !is_of(&entry(&other, "Running"), &web));
        let of_file = |key: &str, hash: &str| {
            pod(|pod| {
                pod["metadata"]["annotations"] = json!({"kubernetes.io/config.hash": hash, key: hash});
            })
        };
        let mirror = Pod { wanted: None, ..of_file("kubernetes.io/config.mirror", "h") };
        assert!(is_of(&entry(&of_file("x", "h"), "Running"), &mirror));
        assert!(!is_of(&entry(&of_file("x", "i"), "Running"), &mirror));
        assert!(!is_of(&entry(&web, "Running"), &mirror));
    }
}
