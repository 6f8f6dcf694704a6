//! Removal of orphaned cgroups: cgroups of pods that the agent does not know, for instance after the loss of
//! its records.
//!
//! Workers remove the cgroups of known pods. An orphaned cgroup may belong to another program that uses the
//! same cgroup root with another runtime. Therefore only empty cgroups are removed, and only after they have
//! been unknown for a while. A cgroup with processes is logged, and its processes are never killed.

use beelet_cgroups::search;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;
use tracing::{info, warn};

use super::Dependencies;
use beelet_base::blocking::blocking;
use beelet_model::table::PodTable;

/// Time for which a cgroup must have been unknown before its removal.
const UNKNOWN_FOR: Duration = Duration::from_secs(60);

/// Orphaned cgroups of the last sweep.
#[derive(Debug, Default)]
pub(super) struct Orphans {
    since: BTreeMap<String, Instant>,
    logged: BTreeSet<String>,
}

impl Orphans {
    /// Lists cgroups, and removes empty ones that have been unknown for [`UNKNOWN_FOR`].
    pub(super) async fn sweep(&mut self, deps: &Dependencies, table: &PodTable) {
        let cgroups = Arc::clone(&deps.cgroups);
        let Ok(listed) = blocking("listing cgroups of pods", move || search::pods(&cgroups)).await else {
            return;
        };
        let known: BTreeSet<&str> =
            table.pods.values().filter_map(|entry| entry.pod.metadata.uid.as_deref()).collect();
        let unknown: BTreeSet<String> =
            listed.into_iter().filter(|path| !known.contains(uid_of(path))).collect();
        self.since.retain(|path, _| unknown.contains(path));
        self.logged.retain(|path| unknown.contains(path));
        for path in unknown {
            self.since.entry(path).or_insert_with(Instant::now);
        }
        let old = self.since.iter().filter(|(_, since)| since.elapsed() >= UNKNOWN_FOR);
        let old: Vec<String> = old.map(|(path, _)| path.clone()).collect();
        if old.is_empty() {
            return;
        }
        // The list of sandboxes is last: a starting pod has its sandbox before its other parts.
        let Ok(sandboxes) = deps.runtime.sandboxes.list(None).await else { return };
        let uids: BTreeSet<&str> =
            sandboxes.iter().filter_map(|sandbox| Some(sandbox.metadata.as_ref()?.uid.as_str())).collect();
        for path in old.into_iter().filter(|path| !uids.contains(uid_of(path))) {
            self.remove(deps, path).await;
        }
    }

    async fn remove(&mut self, deps: &Dependencies, path: String) {
        let (cgroups, cgroup) = (Arc::clone(&deps.cgroups), path.clone());
        match blocking("removing a pod's cgroup", move || cgroups.remove(&cgroup)).await {
            Ok(()) => {
                info!(cgroup = path, "removed orphaned cgroup (empty, of an unknown pod)");
                deps.metrics.orphans_removed.inc();
                self.since.remove(&path);
            }
            Err(error) => {
                if self.logged.insert(path) {
                    warn!(
                        %error,
                        "cannot remove orphaned cgroup of an unknown pod; unless another agent uses it, end its \
                        processes, and this agent removes it"
                    );
                }
            }
        }
    }
}

/// Returns the pod's UID in the name of a cgroup.
fn uid_of(path: &str) -> &str {
    path.rsplit('/').next().and_then(|name| name.strip_prefix("pod")).unwrap_or_default()
}
