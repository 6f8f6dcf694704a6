//! Records of pods, which keep the published state stable across a restart of the agent: start times,
//! condition times, probe results, and permanent ends of pods. The agent reads all other state from the
//! runtime again.
//!
//! Callers never wait: the newest records replace those that are not written yet, and one task writes them
//! without waiting for the disk, because after a reboot the recorded containers no longer run. Losing the
//! last records costs at most one probe period. Only the ends of pods must survive a power failure: otherwise
//! an evicted pod would start again, and a job would run a second time. A file that is replaced without
//! waiting for the disk may be lost completely. Ends therefore have their own file, which is written
//! synchronously, but only when the set of ends changes: a changed probe result does not wait for the disk,
//! even if a job has ended.
//!
//! All records are in one file, so the cost of a write grows with the number of pods, not with the number of
//! changes. A pause between two writes limits the CPU time of the writer during a burst of changes. Changes
//! that the agent could not observe again skip the pause.

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
    ended::Ended,
    failure::PodFailure,
    request::RuntimePod,
    status::{OomFacts, ProbeFacts, has_ended},
    table::ReadinessEdge,
};
use beelet_spec::resize::Accepted;
use beelet_state::{Loaded, State, StateError, json_text};

/// Name of the file with the records of all pods.
const NAME: &str = "pods";
/// Name of the file with the records of ended pods, which survives a power failure.
const ENDS: &str = "pods-ended";
/// Pause after a failed write.
const RETRY: Duration = Duration::from_secs(10);

/// Pause after a write, as a multiple of the write's duration; limited by [`LONGEST_PAUSE`].
const PAUSE_PER_WRITE: u32 = 9;
/// Time for which the serialized records are cached for the next write. An idle node frees their memory.
const TEXTS_KEPT: Duration = Duration::from_secs(10);
/// Longest wait for the write of a record before an action that depends on the record.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// Longest pause between two writes: changes of this time are lost if the agent is killed.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Record of one pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodRecord {
    /// Data for the removal of the pod, if only folders and cgroups are left.
    pub origin: RuntimePod,
    /// The last published status, shared with the manager.
    pub status: Option<Arc<core::PodStatus>>,
    /// Probe results by the runtime's container identifier.
    pub probes: BTreeMap<String, ProbeFacts>,
    /// Containers whose postStart hook has finished, by the runtime's identifier. The hook does not run
    /// again.
    #[serde(default)]
    pub hooked: BTreeSet<String>,
    /// OOM kills in containers, by the runtime's identifier.
    #[serde(default)]
    pub oom: BTreeMap<String, OomFacts>,
    /// Permanent failure of the pod, which must not start again without a retry request.
    #[serde(default)]
    pub failure: Option<PodFailure>,
    /// Resource amounts of the pod's admission or last resize. The wanted amounts may differ while a resize
    /// waits for room (the kubelet's allocated_pods_state).
    #[serde(default)]
    pub accepted: Option<Accepted>,
    /// The pod as admission counts it, with the amounts in `accepted`: a running pod holds its room before
    /// its source has been listed.
    #[serde(default)]
    pub outline: Option<Arc<core::Pod>>,
    /// Ephemeral containers that were added to a static pod.
    #[serde(default)]
    pub debuggers: Vec<core::EphemeralContainer>,
    /// The last readiness change that a kernel event caused. Its times are invalid after a reboot.
    #[serde(default)]
    pub edge: Option<ReadinessEdge>,
    /// The pod's network namespace, which lets the kernel answer probes before the first query to the
    /// runtime: if the agent connected to a thousand pods at once instead, some would not answer in time.
    /// Invalid after a reboot.
    #[serde(default)]
    pub netns: Option<PathBuf>,
    /// First processes of the pod's containers and sandbox, by the runtime's identifier, which save a slow
    /// query to the runtime for each at the next start. Invalid after a reboot.
    #[serde(default)]
    pub processes: BTreeMap<String, FirstProcess>,
    /// The pod was deleted by force: it is hidden from users while its termination continues.
    #[serde(default)]
    pub abandoned: bool,
    /// Termination of a static pod, which continues even if a manifest with its UID is restored.
    #[serde(default)]
    pub leaving: Option<Leaving>,
}

/// Termination of a static pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaving {
    /// Grace period of the containers; `None` for the pod's own.
    pub grace: Option<Duration>,
    /// A user requested the termination: the same manifest then describes another pod, whose restart counts
    /// begin at zero.
    pub on_request: bool,
}

impl PodRecord {
    /// Returns a record with no other data than the pod's origin.
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
            outline: None,
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

    /// Returns the pod as admission counts it, if the record has it.
    pub(crate) fn counted(&self) -> Option<Arc<core::Pod>> {
        let mut outline = self.outline.clone()?;
        self.accepted.iter().for_each(|accepted| accepted.apply_to(Arc::make_mut(&mut outline)));
        Some(outline)
    }

    /// Returns the proof that none of the pod's containers runs, if the record has it.
    pub(crate) fn ended(&self) -> Option<Ended> {
        let stopped = self.failure.as_ref().is_some_and(|failure| failure.has_stopped() || failure.cleared);
        Ended::of(self.status.as_deref(), stopped)
    }

    /// Returns true if the pod has failed or has a final phase.
    fn is_end(&self) -> bool {
        self.failure.is_some() || has_ended(self.status.as_deref())
    }

    /// Returns the data that cannot be observed again: failure, end, termination, debuggers and finished
    /// hooks.
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

/// Removes invalid records: the agent deletes the folders and cgroups of recorded pods that no longer exist.
fn sound(mut map: Map) -> Map {
    map.retain(|uid, record| {
        let sound = record.origin.is_sound(uid);
        if !sound {
            warn!(uid, pod = %record.origin.name, "ignoring record with an invalid pod name or UID");
        }
        sound
    });
    map
}

/// The records of all pods, by UID.
#[derive(Debug)]
pub struct Records {
    newest: watch::Sender<Map>,
    /// The last written records.
    written: watch::Sender<Map>,
    /// Notified when a change must be written without a pause.
    urgent: Arc<Notify>,
    /// Ends that an earlier agent wrote to the disk.
    ends: Map,
}

/// Read access to the pods in the records.
#[derive(Clone, Debug)]
pub struct KnownPods(watch::Receiver<Map>);

impl KnownPods {
    /// Returns true if a pod has a record.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.0.borrow().contains_key(uid)
    }
}

/// Read access to the last written records, for actions that the next agent must know of.
#[derive(Clone, Debug)]
pub struct WrittenRecords(watch::Receiver<Map>);

impl WrittenRecords {
    /// Waits until the record of an ephemeral container that was added to a static pod is written, for at
    /// most [`LONGEST_WAIT`]: debugging must still work when the disk is full.
    pub(crate) async fn have_debugger(&self, uid: &str, name: &str) {
        let mut written = self.0.clone();
        let has = |map: &Map| map.get(uid).is_some_and(|record| record.has_debugger(name));
        // The wait also fails when the agent ends.
        let _ = timeout(LONGEST_WAIT, written.wait_for(has)).await;
    }
}

impl Records {
    /// Loads the records of an earlier agent. A damaged file is quarantined with a warning.
    pub fn load(state: &State) -> Self {
        let all = Self::read(state, NAME);
        let ends = Self::read(state, ENDS).map(|(ends, _)| ends);
        let mut map = match all {
            Some((map, true)) => map,
            // This file is written without waiting for the disk, and may be older than the file of ends.
            older => with_ends(older.map(|(map, _)| map).unwrap_or_default(), ends.as_ref()),
        };
        map = sound(map);
        let ends = ends.unwrap_or_default();
        let written = watch::Sender::new(map.clone());
        Self { newest: watch::Sender::new(map), written, urgent: Arc::default(), ends }
    }

    /// Reads a file, if it exists and is intact. Returns true if the file was written in this boot.
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
                warn!(
                    ?moved_to, %reason, name,
                    "the records of pods were damaged and are quarantined; probes start from their initial state"
                );
            }
            Err(error) => {
                warn!(%error, name, "cannot read the records of pods; probes start from their initial state");
            }
        }
        None
    }

    /// Returns the record of a pod.
    pub fn get(&self, uid: &str) -> Option<PodRecord> {
        self.newest.borrow().get(uid).map(|record| (**record).clone())
    }

    /// Returns true if a pod was being terminated.
    pub(crate) fn is_leaving(&self, uid: &str) -> bool {
        self.newest.borrow().get(uid).is_some_and(|record| record.leaving.is_some())
    }

    /// Returns read access to the pods in the records.
    #[must_use]
    pub fn known(&self) -> KnownPods {
        KnownPods(self.newest.subscribe())
    }

    /// Returns read access to the last written records.
    #[must_use]
    pub fn written(&self) -> WrittenRecords {
        WrittenRecords(self.written.subscribe())
    }

    /// Returns the origins of all pods in the records.
    pub(crate) fn origins(&self) -> BTreeMap<String, RuntimePod> {
        self.newest.borrow().iter().map(|(uid, record)| (uid.clone(), record.origin.clone())).collect()
    }

    /// Sets the record of a pod.
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

    /// Removes the record of a pod.
    pub fn remove(&self, uid: &str) {
        self.newest.send_if_modified(|map| map.remove(uid).is_some());
    }

    /// Returns the task that writes the records. When the records are dropped, the task ends after a last
    /// write.
    pub fn writer(&self, state: Arc<State>, metrics: Metrics) -> impl Future<Output = ()> + Send + use<> {
        let mut newest = self.newest.subscribe();
        let (mut dropped, urgent) = (self.newest.subscribe(), Arc::clone(&self.urgent));
        let (published, mut ends_on_disk) = (self.written.clone(), self.ends.clone());
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
                    // Ends of removed pods must not reappear either.
                    let ends = Some(ends_of(&map)).filter(|ends| !are_same(ends, &ends_on_disk));
                    let writing = blocking("writing the records of pods", move || {
                        let written = texts.write(&map, ends.as_ref(), &state).map_err(|e| e.to_string());
                        (texts, map, ends, written)
                    });
                    let (ends, written);
                    (texts, map, ends, written) = writing.await;
                    let Err(cause) = written else {
                        if failing {
                            info!("writing the records of pods works again");
                        }
                        failing = false;
                        ends_on_disk = ends.unwrap_or(ends_on_disk);
                        published.send_replace(map);
                        break;
                    };
                    metrics.state_write_errors.inc();
                    if !failing {
                        error!(
                            error = cause,
                            "cannot write the records of pods; pods keep running, but after a restart \
                            of the agent their probes start from the initial state"
                        );
                    }
                    failing = true;
                    if !changed {
                        break;
                    }
                    // The wait ends early once the records are dropped.
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

/// Cache of the last written records with their JSON, which saves serializing unchanged records again.
#[derive(Debug, Default)]
struct Texts(BTreeMap<String, (Arc<PodRecord>, String)>);

impl Texts {
    /// Writes the changed `ends`, if any, and waits for the disk; then writes all records. Blocks.
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

/// Returns the records from before a reboot, corrected by the ends on the disk. An older agent had no file of
/// ends; then the records stay unchanged.
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

/// Returns the records of the pods that have failed or have a final phase.
fn ends_of(map: &Map) -> Map {
    let ends = map.iter().filter(|(_, record)| record.is_end());
    ends.map(|(uid, record)| (uid.clone(), Arc::clone(record))).collect()
}

/// Returns true if two sets of records agree in all data that must survive a power failure.
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
            manifest_hash: None,
            adopted: None,
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
    fn only_a_new_or_removed_end_waits_for_the_disk() {
        let failure = || Some(PodFailure::new("Evicted".to_owned(), "short of memory".to_owned(), None));
        let running = record("Running", None);
        let ends = |records: &[PodRecord]| ends_of(&map(records));
        let none = ends(&[running.clone(), record("Pending", None)]);
        assert!(none.is_empty());
        for ended in [record("Succeeded", None), record("Failed", None), record("Running", failure())] {
            let one = ends(&[running.clone(), ended.clone()]);
            assert!(!are_same(&none, &one) && !are_same(&one, &none), "a new and a removed end");
            // The other pod's readiness changes, and so does a detail of the ended pod.
            let flipped = PodRecord { edge: None, ..running.clone() };
            let changed = PodRecord { netns: None, ..ended.clone() };
            assert!(are_same(&one, &ends(&[flipped, changed])));
            let failed =
                PodRecord { failure: Some(PodFailure::new("Evicted", "other words", None)), ..ended };
            assert!(!are_same(&one, &ends(&[running.clone(), failed])));
        }
    }

    #[test]
    fn an_end_survives_a_power_failure_that_damages_or_reverts_the_main_file() {
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
        // In the same boot the last write counts.
        state("a").store(NAME, &map(&[running.clone(), running.clone()])).unwrap();
        assert_eq!(phase("a", "1").as_deref(), Some("Running"));
        state("a").store(NAME, &map(&[running])).unwrap();
        assert_eq!(phase("a", "1"), None);
    }

    #[test]
    fn added_changed_and_removed_records_read_back_as_written() {
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
    fn readiness_edge_and_namespace_survive_a_restart_of_the_agent_but_not_a_reboot() {
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
    async fn the_next_agent_knows_a_debugger_after_the_wait() {
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
