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

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{error::Error, records::KnownPods};
use beelet_base::blocking::blocking;
use beelet_base::walk::remove_folder;
use beelet_base::work::Work;
use beelet_cri::Runtime;
use beelet_csi::Csi;
use beelet_dra::Dra;
use beelet_model::{desired::Desired, table::PodTable};
use beelet_volumes::Disks;

/// What is needed to tell whose a folder is.
#[derive(Debug)]
pub struct Sweep {
    /// The folder with a folder for each pod.
    pub pods_dir: PathBuf,
    /// The disks that are mounted for pods, and the volumes of drivers.
    pub disks: Disks,
    /// Storage plugins.
    pub csi: Csi,
    /// Drivers that claims to devices are prepared by.
    pub dra: Dra,
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
        unknown.extend(parts.dra.pods());
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
        for uid in old.into_iter().filter(|uid| !running.contains(uid.as_str()) && !parts.is_known(uid)) {
            self.remove(parts, uid).await;
        }
    }

    async fn remove(&mut self, parts: &Sweep, uid: String) {
        let (folder, disks) = (parts.pods_dir.join(&uid), parts.disks.clone());
        let of_plugins = parts.csi.release(&uid).await.map_err(Error::of_files);
        let table = Arc::clone(&parts.table.borrow());
        let of_drivers = parts.dra.unprepare(&uid, &table).await.map_err(Error::StillPrepared);
        let remove = async || {
            of_plugins?;
            of_drivers?;
            let removing = blocking("removing a folder of volumes", move || {
                disks.unmount_all(&folder)?;
                Ok::<_, beelet_volumes::Error>(remove_folder(&folder)?)
            });
            removing.await.map_err(Error::of_files)
        };
        match remove().await {
            Ok(()) => {
                info!(uid, "the volumes and the claims of a pod that nobody knows are given back");
                self.since.remove(&uid);
            }
            Err(error) => {
                if self.told.insert(uid) {
                    warn!("what a pod has left that nobody knows stays: {error}");
                }
            }
        }
    }
}

impl Sweep {
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
