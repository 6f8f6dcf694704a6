//! What must be known of pods after a restart of the agent, so that nothing flips: start times,
//! condition times, probe results, and which pods were ended for good. Everything else is seen again in the
//! runtime.
//!
//! Writers never wait: the newest records replace those that were not written yet, and one task writes them
//! out, without waiting for the disk: after a reboot no container runs that they could speak of. Losing the
//! last ones costs a probe's period, no more. Only the end of a pod must survive a power cut too, or an
//! evicted pod would come back, and a job run a second time. A file that is replaced without waiting for the
//! disk may be lost whole, so ends have one of their own, which is written, and waited for, when one is new
//! or gone: a probe that flips beside a job that is done costs no wait.
//!
//! All records are one file, so a write costs as much as there are pods, however little has changed. Between
//! two writes there is a pause that leaves the most of a storm's CPU to the pods, unless something is to be
//! kept that could not be seen again.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1 as core;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, timeout},
};
use tracing::{error, info, warn};

use super::metrics::Metrics;
use beelet_base::{blocking::blocking, process::FirstProcess};
use beelet_model::{
    failure::PodFailure,
    request::RuntimePod,
    status::{OomFacts, ProbeFacts, has_ended},
    table::ReadinessEdge,
};
use beelet_spec::resize::Accepted;
use beelet_state::{Loaded, State, StateError, json_text};

/// The name of the record of all pods.
const NAME: &str = "pods";
/// The name of the record of the pods that have ended, which survives a power cut.
const ENDS: &str = "pods-ended";
/// The pause after a failed write.
const RETRY: Duration = Duration::from_secs(10);

/// The pause after a write is this many times what the write took, and at most [`LONGEST_PAUSE`].
const PAUSE_PER_WRITE: u32 = 9;
/// How long the words of the records are kept for the next write: on a node at rest they are only in the way.
const TEXTS_KEPT: Duration = Duration::from_secs(10);
/// How long something is put off because what the next agent must know of it is not written.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// What a sudden end of the agent may cost of what was learned last.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// What is kept of one pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodRecord {
    /// Enough to take it away, should nothing but folders and cgroups be left of it.
    pub origin: RuntimePod,
    /// The status as last published. The manager has the same one.
    pub status: Option<Arc<core::PodStatus>>,
    /// Probe results by the runtime's container identifier.
    pub probes: BTreeMap<String, ProbeFacts>,
    /// Containers whose postStart hook is done, by the runtime's identifier: it is not run again.
    #[serde(default)]
    pub hooked: BTreeSet<String>,
    /// OOM kills in containers, by the runtime's identifier.
    #[serde(default)]
    pub oom: BTreeMap<String, OomFacts>,
    /// Set if the pod was ended for good: it must not start again by itself.
    #[serde(default)]
    pub failure: Option<PodFailure>,
    /// The amounts that it was let in with, or that it was resized to since. What is wanted may be others,
    /// which wait for room (the kubelet's allocated_pods_state).
    #[serde(default)]
    pub accepted: Option<Accepted>,
    /// Ephemeral containers that were added to a static pod.
    #[serde(default)]
    pub debuggers: Vec<core::EphemeralContainer>,
    /// The last readiness change that a kernel event caused. Its times mean nothing after a reboot.
    #[serde(default)]
    pub edge: Option<ReadinessEdge>,
    /// The pod's network namespace, so that the kernel answers its probes before the runtime was asked: a
    /// thousand pods that are connected to instead, all at once, don't all answer in time. It means nothing
    /// after a reboot.
    #[serde(default)]
    pub netns: Option<PathBuf>,
    /// The first processes of its containers and its sandbox, by the runtime's identifier, so that the
    /// runtime need not be asked for each, at length, at the next start. They mean nothing after a reboot.
    #[serde(default)]
    pub processes: BTreeMap<String, FirstProcess>,
    /// It was deleted by force: nobody is to see it any more, while what is left of it is ended all the same.
    #[serde(default)]
    pub abandoned: bool,
    /// Set once the pod, a static one, is terminated: it goes, also where a manifest of its UID is there
    /// again.
    #[serde(default)]
    pub leaving: Option<Leaving>,
}

/// How a pod goes that is terminated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaving {
    /// What its containers get to end by themselves; `None` for the pod's own grace period.
    pub grace: Option<Duration>,
    /// A person asked for it: what the same manifest describes afterwards is another pod, whose restart
    /// counts begin anew.
    pub on_request: bool,
}

impl PodRecord {
    /// What is kept of a pod of which nothing else is known.
    #[must_use]
    pub fn new(origin: RuntimePod) -> Self {
        Self {
            origin,
            status: None,
            probes: BTreeMap::new(),
            hooked: BTreeSet::new(),
            oom: BTreeMap::new(),
            failure: None,
            accepted: None,
            debuggers: Vec::new(),
            edge: None,
            netns: None,
            processes: BTreeMap::new(),
            abandoned: false,
            leaving: None,
        }
    }

    /// Returns true if an ephemeral container of this name was added to the pod.
    pub(crate) fn has_debugger(&self, name: &str) -> bool {
        self.debuggers.iter().any(|debugger| debugger.name == name)
    }

    /// Returns true if the pod has ended, by itself or for good.
    fn is_end(&self) -> bool {
        self.failure.is_some() || has_ended(self.status.as_deref())
    }

    /// What of it nobody could find out again: how it ended or goes, its debuggers, the hooks that are done.
    fn lasting(&self) -> Lasting<'_> {
        let ended = has_ended(self.status.as_deref());
        let going = (self.leaving, self.abandoned);
        (self.failure.as_ref(), ended, going, &self.debuggers, self.hooked.iter().collect())
    }
}

type Map = BTreeMap<String, Arc<PodRecord>>;

/// See [`PodRecord::lasting`].
type Lasting<'a> =
    (Option<&'a PodFailure>, bool, (Option<Leaving>, bool), &'a [core::EphemeralContainer], Vec<&'a String>);

/// Without what can't be of a pod of ours: what is recorded of a pod that is gone is taken away.
fn sound(mut map: Map) -> Map {
    map.retain(|uid, record| {
        let sound = record.origin.is_sound(uid);
        if !sound {
            warn!(uid, pod = %record.origin.name, "a record that names no pod is passed over");
        }
        sound
    });
    map
}

/// The records of all pods, by UID.
#[derive(Debug)]
pub struct Records {
    newest: watch::Sender<Map>,
    /// As they were written last.
    written: watch::Sender<Map>,
    /// Rung when what has changed can't wait.
    urgent: Arc<Notify>,
    /// The ends that an earlier instance left on the disk.
    ends: Map,
}

/// The pods in the records, for others to read.
#[derive(Clone, Debug)]
pub struct KnownPods(watch::Receiver<Map>);

impl KnownPods {
    /// Returns true if anything is known of a pod.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.0.borrow().contains_key(uid)
    }
}

/// The records as they were written last, for those who may not act on what the next agent would not know.
#[derive(Clone, Debug)]
pub struct WrittenRecords(watch::Receiver<Map>);

impl WrittenRecords {
    /// Waits until an ephemeral container that was added to a static pod is written down. While nothing can
    /// be written, on a full disk, it gives up: that is when a person needs to look into a pod.
    pub(crate) async fn have_debugger(&self, uid: &str, name: &str) {
        let mut written = self.0.clone();
        let has = |map: &Map| map.get(uid).is_some_and(|record| record.has_debugger(name));
        // It fails, too, when the agent ends.
        let _ = timeout(LONGEST_WAIT, written.wait_for(has)).await;
    }
}

impl Records {
    /// Reads what an earlier instance left. A record that is damaged is set aside and said so.
    pub fn load(state: &State) -> Self {
        let all = Self::read(state, NAME);
        let ends = Self::read(state, ENDS).map(|(ends, _)| ends);
        let mut map = match all {
            Some((map, true)) => map,
            // This record is written without waiting for the disk, and may be older than the ends are.
            older => with_ends(older.map(|(map, _)| map).unwrap_or_default(), ends.as_ref()),
        };
        map = sound(map);
        let ends = ends.unwrap_or_default();
        let written = watch::Sender::new(map.clone());
        Self { newest: watch::Sender::new(map), written, urgent: Arc::default(), ends }
    }

    /// Reads a record, if it is there and whole; true if it was written in this boot.
    fn read(state: &State, name: &str) -> Option<(Map, bool)> {
        match state.load::<Map>(name) {
            Ok(Loaded::Value { value, same_boot: true }) => return Some((value, true)),
            Ok(Loaded::Value { mut value, same_boot: false }) => {
                for record in value.values_mut().map(Arc::make_mut) {
                    (record.edge, record.netns) = (None, None);
                    record.processes.clear();
                }
                return Some((value, false));
            }
            Ok(Loaded::Absent) => {}
            Ok(Loaded::Quarantined { moved_to, reason }) => {
                warn!(?moved_to, %reason, name, "the records of pods were damaged and set aside; probes start anew");
            }
            Err(error) => {
                warn!(%error, name, "the records of pods can't be read; probes start anew");
            }
        }
        None
    }

    /// The record of a pod.
    pub fn get(&self, uid: &str) -> Option<PodRecord> {
        self.newest.borrow().get(uid).map(|record| (**record).clone())
    }

    /// Returns true if a pod was being terminated.
    pub(crate) fn is_leaving(&self, uid: &str) -> bool {
        self.newest.borrow().get(uid).is_some_and(|record| record.leaving.is_some())
    }

    /// The pods in the records, now and later.
    #[must_use]
    pub fn known(&self) -> KnownPods {
        KnownPods(self.newest.subscribe())
    }

    /// The records as they were written last, now and later.
    #[must_use]
    pub fn written(&self) -> WrittenRecords {
        WrittenRecords(self.written.subscribe())
    }

    /// All pods of which anything is known.
    pub(crate) fn origins(&self) -> BTreeMap<String, RuntimePod> {
        self.newest.borrow().iter().map(|(uid, record)| (uid.clone(), record.origin.clone())).collect()
    }

    /// Keeps what is known of a pod.
    pub fn set(&self, uid: &str, record: PodRecord) {
        self.newest.send_if_modified(|map| {
            let known = map.get(uid);
            if known.is_some_and(|known| **known == record) {
                return false;
            }
            if known.map(|known| known.lasting()).unwrap_or_default() != record.lasting() {
                self.urgent.notify_one();
            }
            map.insert(uid.to_owned(), Arc::new(record));
            true
        });
    }

    /// Forgets a pod.
    pub fn remove(&self, uid: &str) {
        self.newest.send_if_modified(|map| map.remove(uid).is_some());
    }

    /// The task that writes. It ends, after a last write, when the records are dropped.
    pub fn writer(&self, state: Arc<State>, metrics: Metrics) -> impl Future<Output = ()> + Send + use<> {
        let mut newest = self.newest.subscribe();
        let (mut dropped, urgent) = (self.newest.subscribe(), Arc::clone(&self.urgent));
        let (told, mut ends_on_disk) = (self.written.clone(), self.ends.clone());
        async move {
            let mut failing = false;
            let mut texts = Texts::default();
            loop {
                let mut changed = match timeout(TEXTS_KEPT, newest.changed()).await {
                    Ok(changed) => changed.is_ok(),
                    Err(_) => {
                        texts = Texts::default();
                        newest.changed().await.is_ok()
                    }
                };
                let mut map = newest.borrow_and_update().clone();
                let began = Instant::now();
                loop {
                    let state = Arc::clone(&state);
                    // An end that is there no longer must not come back either.
                    let ends = Some(ends_of(&map)).filter(|ends| !are_same(ends, &ends_on_disk));
                    let writing = blocking("writing the records of pods", move || {
                        let written = texts.write(&map, ends.as_ref(), &state).map_err(|e| e.to_string());
                        (texts, map, ends, written)
                    });
                    let (ends, written);
                    (texts, map, ends, written) = writing.await;
                    let Err(cause) = written else {
                        if failing {
                            info!("the records of pods can be written again");
                        }
                        failing = false;
                        ends_on_disk = ends.unwrap_or(ends_on_disk);
                        told.send_replace(map);
                        break;
                    };
                    metrics.state_write_errors.inc();
                    if !failing {
                        error!(
                            error = cause,
                            "the records of pods can't be written; pods keep running, but after a \
                            restart of the agent their probes start anew"
                        );
                    }
                    failing = true;
                    if !changed {
                        break;
                    }
                    // It fails once the records are dropped.
                    changed = timeout(RETRY, dropped.wait_for(|_| false)).await.is_err();
                    map = newest.borrow_and_update().clone();
                }
                if !changed {
                    return;
                }
                let pause = (began.elapsed() * PAUSE_PER_WRITE).min(LONGEST_PAUSE);
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = urgent.notified() => {}
                    // The records are dropped.
                    _ = dropped.wait_for(|_| false) => {}
                }
            }
        }
    }
}

/// The records as they were written last, each with its text: of a thousand only those that changed are put
/// into words again.
#[derive(Debug, Default)]
struct Texts(BTreeMap<String, (Arc<PodRecord>, String)>);

impl Texts {
    /// Writes all records; before them the `ends`, where they have changed, and waits for the disk. Blocks.
    fn write(&mut self, map: &Map, ends: Option<&Map>, state: &State) -> Result<(), StateError> {
        if let Some(ends) = ends {
            state.store(ENDS, ends)?;
        }
        let json = self.json(map).map_err(|source| StateError::Encode { name: NAME.to_owned(), source })?;
        state.store_json_for_this_boot(NAME, &json)
    }

    fn json(&mut self, map: &Map) -> Result<String, serde_json::Error> {
        self.0.retain(|uid, _| map.contains_key(uid));
        for (uid, record) in map {
            if self.0.get(uid).is_none_or(|(known, _)| !Arc::ptr_eq(known, record)) {
                let text = format!("{}:{}", json_text(uid)?, json_text(record)?);
                self.0.insert(uid.clone(), (Arc::clone(record), text));
            }
        }
        let members = self.0.values().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(",");
        Ok(format!("{{{members}}}"))
    }
}

/// The records of before a reboot, with the ends as they were on the disk. Without them (an agent of before
/// they had a file of their own) all stays as it is.
fn with_ends(mut map: Map, ends: Option<&Map>) -> Map {
    let Some(ends) = ends else { return map };
    map.retain(|uid, record| !record.is_end() || ends.contains_key(uid));
    for (uid, record) in ends {
        if !map.get(uid).is_some_and(|known| known.is_end()) {
            map.insert(uid.clone(), Arc::clone(record));
        }
    }
    map
}

/// The records of the pods that have ended, by themselves or for good.
fn ends_of(map: &Map) -> Map {
    let ends = map.iter().filter(|(_, record)| record.is_end());
    ends.map(|(uid, record)| (uid.clone(), Arc::clone(record))).collect()
}

/// Returns true if two records have the same of what must survive a power cut.
fn are_same(one: &Map, other: &Map) -> bool {
    one.len() == other.len()
        && one.iter().zip(other).all(|((a, one), (b, other))| {
            a == b && (Arc::ptr_eq(one, other) || one.lasting() == other.lasting())
        })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use beelet_model::{origin::Origin, table::PodName};

    fn record(phase: &str, failure: Option<PodFailure>) -> PodRecord {
        let status = json!({ "phase": phase });
        let edge = ReadinessEdge { container: "c".to_owned(), ready: true, kernel_ns: 1, published_ns: 2 };
        let origin = RuntimePod {
            name: PodName { namespace: "default".to_owned(), name: "web-n1".to_owned() },
            grace: Duration::from_secs(30),
            manifest: None,
            hash: None,
            shape: None,
            origin: Origin::File,
        };
        PodRecord {
            status: serde_json::from_value(status).unwrap(),
            failure,
            edge: Some(edge),
            netns: Some("/run/netns/one".into()),
            processes: BTreeMap::from([("c1".to_owned(), FirstProcess::of(1))]),
            ..PodRecord::new(origin)
        }
    }

    fn map(records: &[PodRecord]) -> Map {
        (0..)
            .zip(records)
            .map(|(uid, record): (u32, _)| (uid.to_string(), Arc::new(record.clone())))
            .collect()
    }

    #[test]
    fn only_a_new_end_or_one_that_is_gone_waits_for_the_disk() {
        let failure = || Some(PodFailure::new("Evicted".to_owned(), "short of memory".to_owned(), None));
        let running = record("Running", None);
        let ends = |records: &[PodRecord]| ends_of(&map(records));
        let none = ends(&[running.clone(), record("Pending", None)]);
        assert!(none.is_empty());
        for ended in [record("Succeeded", None), record("Failed", None), record("Running", failure())] {
            let one = ends(&[running.clone(), ended.clone()]);
            assert!(!are_same(&none, &one) && !are_same(&one, &none), "a new end, and one that is gone");
            // Another pod's readiness flips, and so do words in the status of the one that has ended.
            let flipped = PodRecord { edge: None, ..running.clone() };
            let told = PodRecord { netns: None, ..ended.clone() };
            assert!(are_same(&one, &ends(&[flipped, told])));
            let failed =
                PodRecord { failure: Some(PodFailure::new("Evicted", "other words", None)), ..ended };
            assert!(!are_same(&one, &ends(&[running.clone(), failed])));
        }
    }

    #[test]
    fn an_end_survives_a_power_cut_that_takes_or_ages_the_record_of_all() {
        let dir = tempfile::tempdir().unwrap();
        let state = |boot: &str| State::open_in_boot(dir.path(), boot).unwrap();
        let (running, ended) = (record("Running", None), record("Succeeded", None));
        let now = map(&[running.clone(), ended.clone()]);
        Texts::default().write(&now, Some(&ends_of(&now)), &state("a")).unwrap();
        let phase = |boot: &str, uid: &str| {
            let record = Records::load(&state(boot)).get(uid)?;
            record.status.as_ref()?.phase.clone()
        };
        let file = dir.path().join("pods.json");
        for damage in ["", "half", "old"] {
            match damage {
                "old" => state("a").store(NAME, &map(&[running.clone(), running.clone()])).unwrap(),
                text => std::fs::write(&file, text).unwrap(),
            }
            assert_eq!(phase("b", "1").as_deref(), Some("Succeeded"), "{damage:?}");
        }
        // In the same boot what was written last counts.
        state("a").store(NAME, &map(&[running.clone(), running.clone()])).unwrap();
        assert_eq!(phase("a", "1").as_deref(), Some("Running"));
        state("a").store(NAME, &map(&[running])).unwrap();
        assert_eq!(phase("a", "1"), None);
    }

    #[test]
    fn what_is_written_of_records_that_changed_came_and_went_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open_in_boot(dir.path(), "a").unwrap();
        let mut texts = Texts::default();
        let (one, two) = (record("Running", None), record("Pending", None));
        for records in [vec![], vec![one.clone(), two.clone()], vec![two.clone(), two], vec![one]] {
            let map = map(&records);
            texts.write(&map, None, &state).unwrap();
            assert_eq!(*Records::load(&state).newest.borrow(), map);
        }
    }

    #[test]
    fn a_readiness_change_and_a_namespace_are_known_after_a_restart_of_the_agent_but_not_after_a_reboot() {
        let dir = tempfile::tempdir().unwrap();
        State::open_in_boot(dir.path(), "a").unwrap().store(NAME, &map(&[record("Running", None)])).unwrap();
        let known_in = |boot: &str| {
            let record = Records::load(&State::open_in_boot(dir.path(), boot).unwrap()).get("0").unwrap();
            (record.edge.map(|edge| edge.kernel_ns), record.netns)
        };
        assert_eq!(known_in("a"), (Some(1), Some("/run/netns/one".into())));
        assert_eq!(known_in("b"), (None, None));
    }

    #[tokio::test]
    async fn a_debugger_that_was_waited_for_is_known_to_the_next_agent() {
        let dir = tempfile::tempdir().unwrap();
        let state = Arc::new(State::open_in_boot(dir.path(), "a").unwrap());
        let records = Records::load(&state);
        let writer = tokio::spawn(records.writer(Arc::clone(&state), Metrics::default()));
        let mut one = record("Running", None);
        one.debuggers.push(core::EphemeralContainer { name: "debugger".to_owned(), ..Default::default() });
        records.set("0", one);
        records.written().have_debugger("0", "debugger").await;
        assert!(Records::load(&state).get("0").unwrap().has_debugger("debugger"));
        drop(records);
        writer.await.unwrap();
    }
}
