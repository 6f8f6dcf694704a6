//! Adoption of the pods of a kubelet, at the agent's start and before the agent lists any pod. The record of
//! the adopted pods is durable before the first of them is touched: an agent that is killed at any point, and
//! starts again without the request, still knows its pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::blocking::blocking;
use beelet_cri::Runtime;
use beelet_model::{origin::Origin, table::PodName};
use beelet_policy::handover::{Adoption, Found, LeftAlone, Maker, Source, Sources, adoption};
use beelet_state::{Loaded, State, StateError};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use tracing::{info, warn};

use crate::found;

/// Name of the record of adopted pods.
const NAME: &str = "adopted";
/// Longest wait for the runtime's lists if no pod is to be adopted.
const LOOKING: Duration = Duration::from_secs(10);

/// Failure of the adoption.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The runtime does not list its objects.
    #[error("cannot list the pods to adopt: {0}")]
    Runtime(#[from] beelet_cri::Error),
    /// The record cannot be written.
    #[error("cannot record the adopted pods: {0}")]
    State(#[from] StateError),
    /// A kubelet ran the agent's own pods.
    #[error(
        "a kubelet and beelet have both started parts of {pods}: without adoption beelet would start the kubelet's \
         containers a second time; start beelet with --adopt"
    )]
    Divided {
        /// Names of the pods.
        pods: String,
    },
}

/// Adopted pods.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// UIDs of all adopted pods.
    pub pods: BTreeSet<String>,
    /// Number of pods that this start has adopted.
    pub new: usize,
    /// The running pods of a kubelet that the agent leaves alone, by UID.
    pub left_alone: BTreeMap<String, (PodName, Origin)>,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// Adopted pods by UID.
    pods: BTreeMap<String, PodName>,
}

/// Adopts the pods of a kubelet if `requested`, and those that an earlier start adopted. Makes the runtime
/// list them as the agent's own. `look` is true to search for a kubelet's pods without a request, to report
/// them.
///
/// # Errors
/// The runtime or the state folder fails, or a kubelet ran the agent's own pods and adoption is not
/// requested.
pub async fn adopt(
    runtime: &Runtime,
    state: &Arc<State>,
    (requested, look): (bool, bool),
    sources: Sources,
) -> Result<Adopted, Error> {
    let (known, is_lost) = load(state).await?;
    let found = if requested || is_lost || !known.pods.is_empty() {
        found::read(runtime).await?
    } else if look {
        match timeout(LOOKING, found::read(runtime)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return Ok(unknown(&error)),
            Err(error) => return Ok(unknown(&error)),
        }
    } else {
        return Ok(Adopted::default());
    };
    let Decided { record, pods, left_alone } = decide(&found, &known, (requested, is_lost), sources)?;
    let new = pods.iter().filter(|uid| !known.pods.contains_key(*uid)).count();
    if record != known {
        let state = Arc::clone(state);
        blocking("recording the adopted pods", move || state.store(NAME, &record)).await?;
    }
    runtime.sandboxes.adopt(pods.clone());
    Ok(Adopted { pods, new, left_alone })
}

fn unknown(error: &dyn std::fmt::Display) -> Adopted {
    warn!("cannot look for pods of a kubelet: {error}");
    Adopted::default()
}

/// Loads the record. Returns true if the record was damaged.
async fn load(state: &Arc<State>) -> Result<(Record, bool), Error> {
    let state = Arc::clone(state);
    let loaded = blocking("reading the adopted pods", move || state.load::<Record>(NAME)).await?;
    Ok(match loaded {
        Loaded::Value { value, .. } => (value, false),
        Loaded::Absent => (Record::default(), false),
        Loaded::Quarantined { moved_to, reason } => {
            warn!(
                ?moved_to,
                %reason,
                "the record of adopted pods was damaged; start beelet with --adopt to take these pods over again"
            );
            (Record::default(), true)
        }
    })
}

/// Decisions about all pods.
#[derive(Debug, Default, PartialEq, Eq)]
struct Decided {
    /// The adopted pods that still exist, also those without a source at this start.
    record: Record,
    /// UIDs of the pods that the agent takes over at this start.
    pods: BTreeSet<String>,
    /// See [`Adopted::left_alone`].
    left_alone: BTreeMap<String, (PodName, Origin)>,
}

/// Decides on each pod, and logs the decision. With a damaged record (`is_lost`), the agent's own part of a
/// pod proves that the agent had the pod.
fn decide(
    found: &BTreeMap<String, Found>,
    known: &Record,
    (requested, is_lost): (bool, bool),
    sources: Sources,
) -> Result<Decided, Error> {
    let (mut decided, mut divided, mut untouched) = (Decided::default(), Vec::new(), 0_usize);
    for (uid, pod) in found {
        let name = PodName { namespace: pod.namespace.clone(), name: pod.name.clone() };
        let is_known = known.pods.contains_key(uid);
        let is_proven = is_lost && pod.has_any_of(Maker::Beelet);
        let adoption = adoption(pod, requested || is_known || is_proven, sources);
        if matches!(adoption, Adoption::LeftAlone(_)) && pod.runs() {
            let origin = if pod.source == Source::Api { Origin::Api } else { Origin::File };
            decided.left_alone.insert(uid.clone(), (name.clone(), origin));
        }
        match adoption {
            Adoption::Own => {}
            Adoption::Adopted => {
                if !is_known {
                    let running = pod.containers.iter().filter(|container| container.running).count();
                    info!(pod = %name, uid, running, "adopting the pod of a kubelet");
                }
                decided.pods.insert(uid.clone());
                decided.record.pods.insert(uid.clone(), name);
            }
            Adoption::LeftAlone(LeftAlone::NotRequested) => untouched = untouched.saturating_add(1),
            Adoption::LeftAlone(why) => {
                warn!(pod = %name, uid, "leaving the pod of a kubelet alone: {why}");
                // The next start may have the source again.
                if is_known {
                    decided.record.pods.insert(uid.clone(), name);
                }
            }
            Adoption::Divided => divided.push(name.to_string()),
        }
    }
    if untouched > 0 {
        warn!(
            pods = untouched,
            "the runtime has pods of a kubelet, which stay untouched; start beelet with --adopt to take them over"
        );
    }
    if divided.is_empty() { Ok(decided) } else { Err(Error::Divided { pods: divided.join(", ") }) }
}

#[cfg(test)]
mod tests {
    use beelet_policy::handover::{FoundContainer, FoundSandbox};

    use super::*;

    const ALL: Sources = Sources { api: true, manifests: true };

    fn pod(uid: &str, source: Source, makers: &[Maker]) -> (String, Found) {
        let container = |maker: &Maker| FoundContainer {
            name: "main".to_owned(),
            attempt: 0,
            running: true,
            maker: *maker,
            hash: None,
            exit_code: None,
        };
        let sandbox = makers.first().map(|maker| FoundSandbox { ready: true, created_at: 1, maker: *maker });
        let found = Found {
            uid: uid.to_owned(),
            namespace: "default".to_owned(),
            name: format!("pod-{uid}"),
            source,
            sandboxes: sandbox.into_iter().collect(),
            containers: makers.iter().map(container).collect(),
        };
        (uid.to_owned(), found)
    }

    fn uids(all: &[&str]) -> BTreeSet<String> {
        all.iter().map(|uid| (*uid).to_owned()).collect()
    }

    fn record(all: &[&str]) -> Record {
        let name = |uid: &str| PodName { namespace: "default".to_owned(), name: format!("pod-{uid}") };
        Record { pods: all.iter().map(|uid| ((*uid).to_owned(), name(uid))).collect() }
    }

    #[test]
    fn pods_adopted_earlier_stay_adopted_and_removed_ones_are_forgotten() {
        let found = BTreeMap::from([
            pod("a", Source::Api, &[Maker::Kubelet]),
            pod("b", Source::Api, &[Maker::Kubelet]),
            pod("own", Source::Unnamed, &[Maker::Beelet]),
        ]);
        let check = |known: &[&str], requested, expected: &[&str]| {
            let decided = decide(&found, &record(known), (requested, false), ALL).unwrap();
            assert_eq!((decided.record, decided.pods), (record(expected), uids(expected)));
            let left_alone: Vec<_> = decided.left_alone.into_keys().collect();
            let others: Vec<_> = ["a", "b"].into_iter().filter(|uid| !expected.contains(uid)).collect();
            assert_eq!(left_alone, others);
        };
        check(&[], false, &[]);
        check(&[], true, &["a", "b"]);
        check(&["a", "gone"], false, &["a"]);
    }

    #[test]
    fn a_known_pod_without_its_source_stays_in_the_record() {
        let found = BTreeMap::from([
            pod("a", Source::Api, &[Maker::Kubelet]),
            pod("f", Source::File, &[Maker::Kubelet]),
        ]);
        let check = |sources, expected: &[&str]| {
            let known = record(&["a", "f", "gone"]);
            let decided = decide(&found, &known, (false, false), sources).unwrap();
            assert_eq!((decided.record, decided.pods), (record(&["a", "f"]), uids(expected)));
        };
        check(Sources { api: false, manifests: true }, &["f"]);
        check(Sources { api: true, manifests: false }, &["a"]);
        check(ALL, &["a", "f"]);
    }

    #[test]
    fn a_damaged_record_adopts_only_the_pods_with_own_parts() {
        let found = BTreeMap::from([
            pod("a", Source::Api, &[Maker::Kubelet]),
            pod("b", Source::Api, &[Maker::Kubelet, Maker::Beelet]),
        ]);
        let check = |requested, expected: &[&str]| {
            let decided = decide(&found, &Record::default(), (requested, true), ALL).unwrap();
            assert_eq!(decided.pods, uids(expected));
        };
        check(false, &["b"]);
        check(true, &["a", "b"]);
    }

    #[test]
    fn a_kubelets_container_in_an_own_sandbox_needs_a_request() {
        let found = BTreeMap::from([pod("a", Source::Unnamed, &[Maker::Beelet, Maker::Kubelet])]);
        let decide = |requested| decide(&found, &Record::default(), (requested, false), ALL);
        let error = decide(false).unwrap_err().to_string();
        assert!(error.contains("default/pod-a") && error.contains("--adopt"), "{error}");
        assert_eq!(decide(true).unwrap().pods.len(), 1);
    }
}
