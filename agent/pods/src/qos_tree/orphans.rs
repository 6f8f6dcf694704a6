//! Pods' cgroups that no pod belongs to: an agent that lost its records has left them.
//!
//! Pods that the agent knows of clean up after themselves, in their workers. What is found here may as well
//! belong to another program that uses the same cgroup root with another runtime; so only what is empty is
//! removed, and only after it has been nobody's for a while. One that has processes is logged, and never
//! killed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;
use tracing::{info, warn};

use super::Parts;
use beelet_base::blocking::blocking;
use beelet_model::table::PodTable;

/// How long a cgroup must have been nobody's.
const UNKNOWN_FOR: Duration = Duration::from_secs(60);

/// Cgroups that were nobody's when last looked at.
#[derive(Debug, Default)]
pub(super) struct Orphans {
    since: BTreeMap<String, Instant>,
    told: BTreeSet<String>,
}

impl Orphans {
    /// Looks for them, and removes those that have been empty and nobody's for long enough.
    pub(super) async fn look(&mut self, parts: &Parts, table: &PodTable) {
        let cgroups = Arc::clone(&parts.cgroups);
        let Ok(listed) = blocking("listing cgroups of pods", move || cgroups.list_pods()).await else {
            return;
        };
        let known: BTreeSet<&str> =
            table.pods.values().filter_map(|entry| entry.pod.metadata.uid.as_deref()).collect();
        let unknown: BTreeSet<String> =
            listed.into_iter().filter(|path| !known.contains(uid_of(path))).collect();
        self.since.retain(|path, _| unknown.contains(path));
        self.told.retain(|path| unknown.contains(path));
        for path in unknown {
            self.since.entry(path).or_insert_with(Instant::now);
        }
        let old = self.since.iter().filter(|(_, since)| since.elapsed() >= UNKNOWN_FOR);
        let old: Vec<String> = old.map(|(path, _)| path.clone()).collect();
        if old.is_empty() {
            return;
        }
        // Asked last: a pod that is just being started has its sandbox before it has anything else.
        let Ok(sandboxes) = parts.runtime.list_sandboxes(None).await else { return };
        let uids: BTreeSet<&str> =
            sandboxes.iter().filter_map(|sandbox| Some(sandbox.metadata.as_ref()?.uid.as_str())).collect();
        for path in old.into_iter().filter(|path| !uids.contains(uid_of(path))) {
            self.remove(parts, path).await;
        }
    }

    async fn remove(&mut self, parts: &Parts, path: String) {
        let (cgroups, cgroup) = (Arc::clone(&parts.cgroups), path.clone());
        match blocking("removing a pod's cgroup", move || cgroups.remove(&cgroup)).await {
            Ok(()) => {
                info!(cgroup = path, "an empty cgroup of a pod that nobody knows is removed");
                parts.metrics.orphans_removed.inc();
                self.since.remove(&path);
            }
            Err(error) => {
                if self.told.insert(path) {
                    warn!(%error, "a pod's cgroup belongs to no pod of this node and is left alone; if it is no other \
                        agent's, end its processes and it is removed");
                }
            }
        }
    }
}

/// The UID that a pod's cgroup is named by.
fn uid_of(path: &str) -> &str {
    path.rsplit('/').next().and_then(|name| name.strip_prefix("pod")).unwrap_or_default()
}
