//! What must be known of pods after a restart of the agent, so that nothing flips: start times,
//! condition times, probe results, and which pods were ended for good. Everything else is seen again in the
//! runtime.
//!
//! Writers never wait: the newest records replace those that were not written yet, and one task writes them
//! out, without waiting for the disk: after a reboot no container runs that they could speak of. Losing the
//! last ones costs a probe's period, no more. Only the end of a pod must survive a power cut too, or an
//! evicted pod would come back, and a job run a second time. A file that is replaced without waiting for the
//! disk may be lost whole, with ends that were safe before: as long as there are any, each write waits.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1 as core;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{error, info, warn};

use super::metrics::Metrics;
use beelet_base::blocking::blocking;
use beelet_model::{
    failure::PodFailure,
    request::RuntimePod,
    status::{OomFacts, ProbeFacts, has_ended},
    table::ReadinessEdge,
};
use beelet_state::{Loaded, State};

/// The name of the durable record.
const NAME: &str = "pods";
/// The pause after a failed write.
const RETRY: Duration = Duration::from_secs(10);

/// What is kept of one pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodRecord {
    /// Enough to take it away, should nothing but folders and cgroups be left of it.
    pub origin: RuntimePod,
    /// The status as last published.
    pub status: Option<core::PodStatus>,
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
    /// Ephemeral containers that were added to a static pod.
    #[serde(default)]
    pub debuggers: Vec<core::EphemeralContainer>,
    /// The last readiness change that a kernel event caused. Its times mean nothing after a reboot.
    #[serde(default)]
    pub edge: Option<ReadinessEdge>,
}

type Map = BTreeMap<String, Arc<PodRecord>>;

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

impl Records {
    /// Reads what an earlier instance left. A record that is damaged is set aside and said so.
    pub fn load(state: &State) -> Self {
        let map = match state.load::<Map>(NAME) {
            Ok(Loaded::Value { value, same_boot: true }) => value,
            Ok(Loaded::Value { mut value, same_boot: false }) => {
                value.values_mut().for_each(|record| Arc::make_mut(record).edge = None);
                value
            }
            Ok(Loaded::Absent) => Map::new(),
            Ok(Loaded::Quarantined { moved_to, reason }) => {
                warn!(?moved_to, %reason, "the records of pods were damaged and set aside; probes start anew");
                Map::new()
            }
            Err(error) => {
                warn!(%error, "the records of pods can't be read; probes start anew");
                Map::new()
            }
        };
        Self { newest: watch::Sender::new(sound(map)) }
    }

    /// The record of a pod.
    pub fn get(&self, uid: &str) -> Option<PodRecord> {
        self.newest.borrow().get(uid).map(|record| (**record).clone())
    }

    /// The pods in the records, now and later.
    #[must_use]
    pub fn known(&self) -> KnownPods {
        KnownPods(self.newest.subscribe())
    }

    /// All pods of which anything is known.
    pub(crate) fn origins(&self) -> BTreeMap<String, RuntimePod> {
        self.newest.borrow().iter().map(|(uid, record)| (uid.clone(), record.origin.clone())).collect()
    }

    /// Keeps what is known of a pod.
    pub fn set(&self, uid: &str, record: PodRecord) {
        self.newest.send_if_modified(|map| {
            let known = map.get(uid).is_some_and(|known| **known == record);
            if !known {
                map.insert(uid.to_owned(), Arc::new(record));
            }
            !known
        });
    }

    /// Forgets a pod.
    pub fn remove(&self, uid: &str) {
        self.newest.send_if_modified(|map| map.remove(uid).is_some());
    }

    /// The task that writes. It ends, after a last write, when the records are dropped.
    pub fn writer(&self, state: Arc<State>, metrics: Metrics) -> impl Future<Output = ()> + Send + use<> {
        let mut newest = self.newest.subscribe();
        async move {
            let mut failing = false;
            // Of those that an earlier instance left nobody knows whether they were waited for.
            let mut ends_on_disk = true;
            loop {
                let mut changed = newest.changed().await.is_ok();
                let mut map = newest.borrow_and_update().clone();
                loop {
                    let (state, snapshot) = (Arc::clone(&state), map.clone());
                    let ends = has_ends(&map);
                    // One that is there for the last time must not come back either.
                    let durable = ends || ends_on_disk;
                    let written = blocking("writing the records of pods", move || {
                        let written = if durable {
                            state.store(NAME, &snapshot)
                        } else {
                            state.store_for_this_boot(NAME, &snapshot)
                        };
                        written.map_err(|e| e.to_string())
                    });
                    let Err(cause) = written.await else {
                        if failing {
                            info!("the records of pods can be written again");
                        }
                        failing = false;
                        ends_on_disk = ends;
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
                    let dropped = async { while newest.changed().await.is_ok() {} };
                    tokio::select! {
                        () = tokio::time::sleep(RETRY) => {}
                        () = dropped => changed = false,
                    }
                    map = newest.borrow_and_update().clone();
                }
                if !changed {
                    return;
                }
            }
        }
    }
}

/// Returns true if any pod has ended, by itself or for good.
fn has_ends(map: &Map) -> bool {
    map.values().any(|record| record.failure.is_some() || has_ended(record.status.as_ref()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use beelet_model::{origin::Origin, table::PodName};

    fn record(phase: &str, failure: Option<PodFailure>) -> PodRecord {
        let status = json!({ "phase": phase });
        let edge = ReadinessEdge { container: "c".to_owned(), ready: true, kernel_ns: 1, published_ns: 2 };
        PodRecord {
            origin: RuntimePod {
                name: PodName { namespace: "default".to_owned(), name: "web-n1".to_owned() },
                grace: Duration::from_secs(30),
                manifest: None,
                hash: None,
                shape: None,
                origin: Origin::File,
            },
            status: serde_json::from_value(status).unwrap(),
            probes: BTreeMap::new(),
            hooked: BTreeSet::new(),
            oom: BTreeMap::new(),
            failure,
            debuggers: Vec::new(),
            edge: Some(edge),
        }
    }

    fn map(records: &[PodRecord]) -> Map {
        (0..)
            .zip(records)
            .map(|(uid, record): (u32, _)| (uid.to_string(), Arc::new(record.clone())))
            .collect()
    }

    #[test]
    fn as_long_as_any_pod_has_ended_each_write_waits_for_the_disk() {
        let failure = || Some(PodFailure::new("Evicted".to_owned(), "short of memory".to_owned(), None));
        let running = record("Running", None);
        assert!(!has_ends(&map(&[running.clone(), record("Pending", None)])));
        for ended in [record("Succeeded", None), record("Failed", None), record("Running", failure())] {
            assert!(has_ends(&map(&[running.clone(), ended])));
        }
    }

    #[test]
    fn a_readiness_change_is_known_after_a_restart_of_the_agent_and_means_nothing_after_a_reboot() {
        let dir = tempfile::tempdir().unwrap();
        State::open_in_boot(dir.path(), "a").unwrap().store(NAME, &map(&[record("Running", None)])).unwrap();
        let edge_in = |boot: &str| {
            let records = Records::load(&State::open_in_boot(dir.path(), boot).unwrap());
            records.get("0").unwrap().edge.map(|edge| edge.kernel_ns)
        };
        assert_eq!((edge_in("a"), edge_in("b")), (Some(1), None));
    }
}
