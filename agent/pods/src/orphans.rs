//! Removal of folders and prepared claims of unknown pods, left behind by an agent that was killed or lost
//! its records. Corresponds to the kubelet's `cleanupOrphanedPodDirs` and the reconciliation of its DRA
//! manager, but also unmounts the mounts in the folders.
//!
//! The sweep removes only folders whose name is a UID, and only after their pods have been unknown for a
//! while. Must never remove a folder of a known pod: a pod in the pod table or the records, with a sandbox,
//! or with a manifest that cannot be read.

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

/// Most concurrent removals: a driver that does not answer must not block the other removals.
const AT_ONCE: usize = 16;

/// Dependencies of the sweep.
#[derive(Debug)]
pub struct Sweep {
    /// Parent folder of all pods' folders.
    pub pods_dir: PathBuf,
    /// Removes volumes.
    pub volumes: VolumeManager,
    /// Unprepares resource claims.
    pub dra: Dra,
    /// The node has no API server. Its DRA drivers, which are pods of a cluster, are absent then: recorded
    /// claims stay until the drivers return.
    pub standalone: bool,
    /// The published pod table.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// The pods with records.
    pub known: KnownPods,
    /// The desired pods.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// The container runtime.
    pub runtime: Runtime,
    /// Period of the sweep, and time for which a pod must have been unknown.
    pub period: Duration,
}

/// Removes the folders and claims of unknown pods until `cancel`.
pub fn sweep(deps: Sweep, cancel: CancellationToken) -> Work {
    Box::pin(async move {
        let mut ticks = interval(deps.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut found = Found::default();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = cancel.cancelled() => return,
            }
            tokio::select! {
                () = found.sweep(&deps) => {}
                () = cancel.cancelled() => return,
            }
        }
    })
}

/// Unknown pods of the last sweep.
#[derive(Debug, Default)]
struct Found {
    since: BTreeMap<String, Instant>,
    logged: BTreeSet<String>,
}

impl Found {
    async fn sweep(&mut self, deps: &Sweep) {
        let pods_dir = deps.pods_dir.clone();
        let listed = blocking("listing the folders of pods", move || {
            let entries = std::fs::read_dir(pods_dir).into_iter().flatten().flatten();
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect::<BTreeSet<String>>()
        });
        let mut unknown = listed.await;
        if !deps.standalone {
            unknown.extend(deps.dra.pods());
        }
        unknown.retain(|uid| is_uid(uid) && !deps.is_known(uid));
        self.since.retain(|uid, _| unknown.contains(uid));
        self.logged.retain(|uid| unknown.contains(uid));
        for uid in unknown {
            self.since.entry(uid).or_insert_with(Instant::now);
        }
        let old = self.since.iter().filter(|(_, since)| since.elapsed() >= deps.period);
        let old: Vec<String> = old.map(|(uid, _)| uid.clone()).collect();
        if old.is_empty() {
            return;
        }
        // The list of sandboxes is last: a new pod may have been unknown until now.
        let Ok(sandboxes) = deps.runtime.sandboxes.list(None).await else { return };
        let running: BTreeSet<&str> =
            sandboxes.iter().filter_map(|sandbox| Some(sandbox.metadata.as_ref()?.uid.as_str())).collect();
        let gone = old.into_iter().filter(|uid| !running.contains(uid.as_str()) && !deps.is_known(uid));
        let gone: Vec<String> = gone.collect();
        for some in gone.chunks(AT_ONCE) {
            let done = join_all(some.iter().map(|uid| deps.remove(uid))).await;
            some.iter().zip(done).for_each(|(uid, done)| self.record(uid, done));
        }
    }

    /// Logs the result of a removal; a failure only once.
    fn record(&mut self, uid: &str, done: Result<(), Error>) {
        match done {
            Ok(()) => {
                info!(uid, "removed the volumes and claims of an unknown pod");
                self.since.remove(uid);
            }
            Err(error) => {
                if self.logged.insert(uid.to_owned()) {
                    warn!(uid, "cannot remove the volumes and claims of an unknown pod: {error}");
                }
            }
        }
    }
}

impl Sweep {
    /// Removes the volumes and the claims of a pod. The removals are independent, because each may hang
    /// forever.
    async fn remove(&self, uid: &str) -> Result<(), Error> {
        let table = Arc::clone(&self.table.borrow());
        let (of_volumes, of_drivers) = join(self.volumes.remove(uid), self.dra.unprepare(uid, &table)).await;
        of_volumes.map_err(Error::of_files).and(of_drivers.map_err(Error::StillPrepared))
    }

    fn is_known(&self, uid: &str) -> bool {
        // An unreadable manifest, or an API server that has not answered yet, may contain any pod.
        self.desired.borrow().is_incomplete()
            || self.known.has(uid)
            || self.table.borrow().pods.values().any(|entry| entry.pod.metadata.uid.as_deref() == Some(uid))
    }
}

/// Returns true if a name is a UID that the agent generates for a manifest's pod, or an API server's. UIDs
/// that users write in manifests may have other forms, and are ignored.
fn is_uid(name: &str) -> bool {
    let hex = |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let lengths: Vec<usize> = name.split('-').map(str::len).collect();
    name.split('-').all(hex) && matches!(lengths.as_slice(), [32] | [8, 4, 4, 4, 12])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_generated_uids_are_accepted_as_names() {
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
