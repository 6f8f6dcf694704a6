//! What must be known of pods after a restart of the agent, so that nothing flips: start times,
//! condition times, probe results, and which pods were ended for good. Everything else is seen again in the
//! runtime.
//!
//! Writers never wait: the newest records replace those that were not written yet, and one task writes
//! them out, without waiting for the disk: after a reboot no container runs that they could speak of.
//! Losing the last ones costs a probe's period, no more. Only a pod's failure must survive a power cut too, or
//! an evicted pod would come back: where one is new or gone, the disk is waited for.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1 as core;
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, task::spawn_blocking};
use tracing::{error, info, warn};

use super::{
    failure::Failure,
    manager::RuntimePod,
    metrics::Metrics,
    status::{OomFacts, ProbeFacts},
};
use crate::state::{Loaded, State};

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
    pub failure: Option<Failure>,
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

impl Records {
    /// Reads what an earlier instance left. A record that is damaged is set aside and said so.
    pub fn load(state: &State) -> Self {
        let map = match state.load::<Map>(NAME) {
            Ok(Loaded::Value { value, .. }) => value,
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

    /// What is known of a pod.
    pub fn get(&self, uid: &str) -> Option<PodRecord> {
        self.newest.borrow().get(uid).map(|record| (**record).clone())
    }

    /// All pods of which anything is known.
    pub fn origins(&self) -> BTreeMap<String, RuntimePod> {
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
            let mut failures_on_disk = None;
            loop {
                let mut changed = newest.changed().await.is_ok();
                let mut map = newest.borrow_and_update().clone();
                loop {
                    let (state, snapshot) = (Arc::clone(&state), map.clone());
                    let failures = failures_of(&map);
                    let settled = failures_on_disk.as_ref() == Some(&failures);
                    let written = spawn_blocking(move || {
                        let written = if settled {
                            state.store_for_this_boot(NAME, &snapshot)
                        } else {
                            state.store(NAME, &snapshot)
                        };
                        written.map_err(|e| e.to_string())
                    });
                    let result = written.await.unwrap_or_else(|e| Err(e.to_string()));
                    let Err(cause) = result else {
                        if failing {
                            info!("the records of pods can be written again");
                        }
                        failing = false;
                        failures_on_disk = Some(failures);
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

/// The pods that were ended for good, and why.
fn failures_of(map: &Map) -> BTreeMap<String, Failure> {
    map.iter().filter_map(|(uid, record)| Some((uid.clone(), record.failure.clone()?))).collect()
}
