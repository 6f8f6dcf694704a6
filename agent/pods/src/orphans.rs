//! Pods' folders that no pod belongs to, and claims that are prepared for none: what an agent that was
//! killed, or lost its records, has left. As the kubelet's `cleanupOrphanedPodDirs` and the reconciliation of
//! its DRA manager, but what is mounted in the folders is unmounted.
//!
//! Nothing is touched but folders that are called as a UID is, and those only once they have been nobody's
//! for a while. Must never remove what is a pod's: one that is here, one that the records know, one that has
//! a sandbox, one whose manifest can't be read.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use futures::future::{join, join_all};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{error::Error, records::KnownPods};
use beelet_base::blocking::blocking;
use beelet_base::work::Work;
use beelet_cri::Runtime;
use beelet_dra::Dra;
use beelet_model::{desired::Desired, table::PodTable};
use beelet_volumes::VolumeManager;

/// How many pods' remains are taken away at a time: a driver that says nothing must not hold up all others.
const AT_ONCE: usize = 16;

/// What is needed to tell whose a folder is.
#[derive(Debug)]
pub struct Sweep {
    /// The folder with a folder for each pod.
    pub pods_dir: PathBuf,
    /// Takes back volumes.
    pub volumes: VolumeManager,
    /// Drivers that claims to devices are prepared by.
    pub dra: Dra,
    /// The node has no API server. Its drivers, pods of a cluster, are not here then: what the record of
    /// claims says waits for the day that they are again.
    pub standalone: bool,
    /// The pods that are here.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// The pods of which anything is known.
    pub known: KnownPods,
    /// The manifests.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// The runtime.
    pub runtime: Runtime,
    /// How often to look, and how long a folder must have been nobody's.
    pub period: Duration,
}

/// Looks for them until `cancel`.
pub fn sweep(parts: Sweep, cancel: CancellationToken) -> Work {
    Box::pin(async move {
        let mut ticks = interval(parts.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut found = Found::default();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = cancel.cancelled() => return,
            }
            tokio::select! {
                () = found.look(&parts) => {}
                () = cancel.cancelled() => return,
            }
        }
    })
}

/// Folders that were nobody's when last looked at.
#[derive(Debug, Default)]
struct Found {
    since: BTreeMap<String, Instant>,
    told: BTreeSet<String>,
}

impl Found {
    async fn look(&mut self, parts: &Sweep) {
        let pods_dir = parts.pods_dir.clone();
        let listed = blocking("listing the folders of pods", move || {
            let entries = std::fs::read_dir(pods_dir).into_iter().flatten().flatten();
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect::<BTreeSet<String>>()
        });
        let mut unknown = listed.await;
        if !parts.standalone {
            unknown.extend(parts.dra.pods());
        }
        unknown.retain(|uid| is_uid(uid) && !parts.is_known(uid));
        self.since.retain(|uid, _| unknown.contains(uid));
        self.told.retain(|uid| unknown.contains(uid));
        for uid in unknown {
            self.since.entry(uid).or_insert_with(Instant::now);
        }
        let old = self.since.iter().filter(|(_, since)| since.elapsed() >= parts.period);
        let old: Vec<String> = old.map(|(uid, _)| uid.clone()).collect();
        if old.is_empty() {
            return;
        }
        // Asked last: what is here by now was unknown a moment ago.
        let Ok(sandboxes) = parts.runtime.list_sandboxes(None).await else { return };
        let running: BTreeSet<&str> =
            sandboxes.iter().filter_map(|sandbox| Some(sandbox.metadata.as_ref()?.uid.as_str())).collect();
        let gone = old.into_iter().filter(|uid| !running.contains(uid.as_str()) && !parts.is_known(uid));
        let gone: Vec<String> = gone.collect();
        for some in gone.chunks(AT_ONCE) {
            let done = join_all(some.iter().map(|uid| parts.remove(uid))).await;
            some.iter().zip(done).for_each(|(uid, done)| self.note(uid, done));
        }
    }

    /// Says what came of one, once.
    fn note(&mut self, uid: &str, done: Result<(), Error>) {
        match done {
            Ok(()) => {
                info!(uid, "the volumes and the claims of a pod that nobody knows are given back");
                self.since.remove(uid);
            }
            Err(error) => {
                if self.told.insert(uid.to_owned()) {
                    warn!("what a pod has left that nobody knows stays: {error}");
                }
            }
        }
    }
}

impl Sweep {
    /// Takes away what is left of a pod. Its volumes don't wait for drivers of its claims, nor these for
    /// them: either may never be given back.
    async fn remove(&self, uid: &str) -> Result<(), Error> {
        let table = Arc::clone(&self.table.borrow());
        let (of_volumes, of_drivers) = join(self.volumes.remove(uid), self.dra.unprepare(uid, &table)).await;
        of_volumes.map_err(Error::of_files).and(of_drivers.map_err(Error::StillPrepared))
    }

    fn is_known(&self, uid: &str) -> bool {
        // A manifest that can't be read may be of any pod, and the API server may name any.
        self.desired.borrow().is_incomplete()
            || self.known.has(uid)
            || self.table.borrow().pods.values().any(|entry| entry.pod.metadata.uid.as_deref() == Some(uid))
    }
}

/// Returns true if a name is a UID as a manifest's pod gets it, or an API server's. Those that people write
/// are passed over.
fn is_uid(name: &str) -> bool {
    let hex = |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let lengths: Vec<usize> = name.split('-').map(str::len).collect();
    name.split('-').all(hex) && matches!(lengths.as_slice(), [32] | [8, 4, 4, 4, 12])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_called_as_a_uid_is_taken_for_a_pods() {
        let check = |name: &str, expected: bool| assert_eq!(is_uid(name), expected, "{name}");
        check("0123456789abcdef0123456789abcdef", true);
        check("7c9b2f6e-0000-4000-8000-00000000000a", true);
        check("0123456789abcdef0123456789abcde", false);
        check("0123456789ABCDEF0123456789abcdef", false);
        check("7c9b2f6e-0000-4000-8000-00000000000a-", false);
        check("lost+found", false);
        check("", false);
    }
}
