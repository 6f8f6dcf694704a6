//! Keeps the cgroups of the node, of the QoS classes, of pods and of running containers at the values that
//! the specs of the pods on the node require.
//!
//! The keeper compares the affected cgroups after each change of pods, and all cgroups every few seconds, and
//! corrects differences: values from the runtime's own formulas, changes of a running pod's manifest, and
//! values that another program wrote. At no time during a correction is a cgroup's limit below both its old
//! and its new value: the keeper first raises the levels above containers, then updates the containers
//! through the runtime, which owns them, and then lowers the levels above. A failed write (such as a memory
//! limit below the current usage) is retried until it succeeds.

mod containers;
mod metrics;
mod orphans;
mod resizes;
mod wanted;

use std::{collections::BTreeMap, collections::BTreeSet, sync::Arc, time::Duration};

use beelet_base::clock::After as _;
use beelet_policy::resources::cgroups::{CgroupConfig, CgroupValues, node_cgroups};
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

pub use self::metrics::{Level, Metrics};
use self::{orphans::Orphans, wanted::Wanted};
use crate::error::Error;
use beelet_base::blocking::blocking;
use beelet_base::work::Work;
use beelet_cgroups::{Adjust, Adjusted, Cgroups};
use beelet_cri::Runtime;
use beelet_model::{
    request::Request,
    table::{PodChanges, PodTable},
};

type Values = BTreeMap<String, BTreeMap<String, String>>;

/// Period of comparisons of all cgroups.
pub const CHECK: Duration = Duration::from_secs(10);
/// Pause before a retry after a failure. Each further failure doubles the pause, up to the check period.
const RETRY: Duration = Duration::from_millis(500);
/// Pause after a sync, as a multiple of the sync's duration; limited by [`LONGEST_PAUSE`]. Each sync computes
/// the values from all pods, which change constantly during a burst.
const PAUSE_PER_SYNC: u32 = 49;
/// Longest pause after a sync.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Time in which systemd writes all values again after it has reloaded its units.
const REWRITE: Duration = Duration::from_millis(500);

/// Returns the values for these pods.
///
/// # Errors
/// A pod has an invalid resource amount.
pub fn values(pods: &[&core::Pod], config: &CgroupConfig) -> Result<Values, Error> {
    let decided = node_cgroups(pods, config).map_err(|error| Error::Spec(error.to_string()))?;
    Ok(decided.into_iter().map(|cgroup| (cgroup.path, cgroup.files)).collect())
}

/// Writes `wanted`; parents are raised first and lowered last.
///
/// # Errors
/// A cgroup cannot be created or written.
pub async fn write(cgroups: &Arc<Cgroups>, wanted: Values) -> Result<(), Error> {
    let cgroups = Arc::clone(cgroups);
    Ok(blocking("writing the cgroups of pods", move || cgroups.ensure_all(&wanted)).await?)
}

/// Dependencies of the keeper.
#[derive(Debug)]
pub struct Dependencies {
    /// The pods. Ended pods do not count.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// The cgroup tree.
    pub cgroups: Arc<Cgroups>,
    /// Parameters of cgroup values.
    pub config: CgroupConfig,
    /// The runtime, which updates containers.
    pub runtime: Runtime,
    /// Cgroups of daemons with reserved resources, if the reservation is enforced. The keeper does not create
    /// these cgroups.
    pub reserved: Vec<CgroupValues>,
    /// Channel to the pods' manager, for notifications of finished resizes.
    pub requests: mpsc::Sender<Request>,
    /// Counters and gauges.
    pub metrics: Metrics,
    /// Period of comparisons of all cgroups: [`CHECK`].
    pub check: Duration,
}

/// Follows the pod table until `shutdown`.
pub fn follow(deps: Dependencies, shutdown: CancellationToken) -> Work {
    Box::pin(async move {
        let check = deps.check;
        let mut keeper = Keeper::new(deps);
        let (mut next_check, mut pause) = (Instant::now().after(check), RETRY);
        let mut everything = true;
        let mut rewrites = keeper.deps.cgroups.rewrites();
        loop {
            let table = Arc::clone(&keeper.deps.table.borrow_and_update());
            let began = Instant::now();
            if keeper.sync(&table, everything).await {
                pause = RETRY;
            } else {
                next_check = next_check.min(Instant::now().after(pause));
                pause = (pause * 2).min(check);
            }
            if everything {
                keeper.orphans.sweep(&keeper.deps, &table).await;
            }
            let next =
                Instant::now().after(began.elapsed().saturating_mul(PAUSE_PER_SYNC).min(LONGEST_PAUSE));
            let changed = async {
                tokio::time::sleep_until(next).await;
                keeper.deps.table.changed().await
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = changed => {
                    if changed.is_err() {
                        return;
                    }
                    everything = false;
                }
                () = rewritten(&mut rewrites) => {
                    next_check = next_check.min(Instant::now() + REWRITE);
                    everything = false;
                }
                () = tokio::time::sleep_until(next_check) => {
                    next_check = Instant::now().after(check);
                    everything = true;
                }
            }
        }
    })
}

/// Waits until systemd has reloaded its units and rewrites all values; forever without systemd.
async fn rewritten(rewrites: &mut Option<watch::Receiver<u64>>) {
    let is_rewritten = match rewrites {
        Some(rewrites) => rewrites.changed().await.is_ok(),
        None => false,
    };
    if !is_rewritten {
        std::future::pending::<()>().await;
    }
}

struct Keeper {
    deps: Dependencies,
    /// Values that the keeper has written, by cgroup. A later difference is another program's change.
    kept: Values,
    /// Values that the keeper has written for containers, by container identifier.
    kept_containers: Values,
    /// The pods of the last sync.
    done: Arc<PodTable>,
    /// At the last sync, a pod was waiting for its resize.
    resizes: bool,
    /// Failures that were logged, and are not logged again before they are resolved.
    logged: BTreeSet<String>,
    orphans: Orphans,
}

impl Keeper {
    fn new(deps: Dependencies) -> Self {
        let (kept, kept_containers) = (Values::new(), Values::new());
        let done = Arc::default();
        Self {
            deps,
            kept,
            kept_containers,
            done,
            resizes: false,
            logged: BTreeSet::new(),
            orphans: Orphans::default(),
        }
    }

    /// Corrects differences: in all cgroups if `everything` is set, else in those whose wanted values have
    /// changed. Returns false if a retry is necessary.
    async fn sync(&mut self, table: &Arc<PodTable>, everything: bool) -> bool {
        // A resize may only rewrite equal amounts in another notation, and still needs its confirmation.
        let changes = PodChanges::between(&self.done.pods, &table.pods);
        let resizes = self.resizes || resizes::any(changes.changed.iter().map(|(_, entry)| *entry));
        if !everything && !resizes && wanted::is_same(&self.done.pods, &changes) {
            self.done = Arc::clone(table);
            return true;
        }
        let wanted = match Wanted::of(table, &self.deps.config, &self.deps.reserved) {
            Ok(wanted) => wanted,
            Err(error) => {
                warn!(%error, "cannot compute the values of cgroups");
                return false;
            }
        };
        self.kept.retain(|path, _| wanted.levels.contains_key(path));
        self.kept_containers.retain(|id, _| wanted.containers.contains_key(id));
        let mut failed = self.write(&wanted, everything).await;
        failed.sort();
        failed.dedup();
        self.deps.metrics.pending.set(i64::try_from(failed.len()).unwrap_or(i64::MAX));
        self.warn_of_new(&failed);
        resizes::report(&self.deps, table, &wanted, &failed).await;
        self.resizes = resizes::any(table.pods.values());
        self.done = Arc::clone(table);
        if everything && failed.is_empty() {
            self.deps.metrics.syncs.inc();
        }
        failed.is_empty()
    }

    /// Corrects differences. Returns the messages of failures.
    async fn write(&mut self, wanted: &Wanted, everything: bool) -> Vec<String> {
        let mut levels: Vec<_> = wanted.levels.iter().collect();
        let mut containers: Vec<&String> = wanted.containers.keys().collect();
        if !everything {
            levels.retain(|(path, files)| !self.is_kept(path, files));
            containers.retain(|id| self.kept_containers.get(*id) != Some(&wanted.containers[*id].files));
        }
        if levels.is_empty() && containers.is_empty() {
            return Vec::new();
        }
        let levels = levels.into_iter().map(|(path, files)| (path.clone(), files.clone())).collect();
        let mut failed = Vec::new();
        let compared = containers::compare(&self.deps.cgroups, wanted, &containers).await;
        containers.retain(|id| !compared.absent.contains(id));
        if !compared.differing.is_empty() {
            let report = self.adjust(&levels, Adjust::Wider).await;
            failed.extend(self.count_levels(&levels, report));
        }
        for (id, path) in compared.differing {
            let container = &wanted.containers[&id];
            let drifted = self.kept_containers.get(&id) == Some(&container.files);
            match containers::correct(&self.deps, &id, &path, container).await {
                Ok(changed) => {
                    self.deps.metrics.changed(Level::Container, changed, drifted);
                    if drifted && changed > 0 {
                        info!(
                            pod = %container.pod,
                            container = container.name,
                            "restored values of a container's cgroup (another program had changed them)"
                        );
                    }
                }
                Err(error) => {
                    failed.push(error.to_string());
                    self.kept_containers.remove(&id);
                    containers.retain(|other| **other != id);
                }
            }
        }
        let existing = containers.into_iter().map(|id| (id.clone(), wanted.containers[id].files.clone()));
        self.kept_containers.extend(existing);
        // This check precedes the write: pod workers create cgroups concurrently, and those are not written
        // yet.
        let new = levels.iter().filter(|(path, files)| !self.is_kept(path, files));
        let compared =
            self.that_exist(new.map(|(path, files)| (path.clone(), files.clone())).collect()).await;
        let report = self.adjust(&levels, Adjust::All).await;
        failed.extend(self.count_levels(&levels, report));
        if failed.is_empty() {
            self.kept.extend(compared);
        }
        failed
    }

    fn is_kept(&self, path: &str, files: &BTreeMap<String, String>) -> bool {
        self.kept.get(path) == Some(files)
    }

    /// Returns the levels whose cgroups exist in all hierarchies. The initial values of a cgroup that is
    /// created later are not another program's change.
    async fn that_exist(&self, mut levels: Values) -> Values {
        let cgroups = Arc::clone(&self.deps.cgroups);
        let filter = move || {
            levels.retain(|path, files| cgroups.paths.has_all(path, files));
            levels
        };
        blocking("checking which cgroups exist", filter).await
    }

    async fn adjust(&self, levels: &Values, how: Adjust) -> Adjusted {
        let (cgroups, levels) = (Arc::clone(&self.deps.cgroups), levels.clone());
        blocking("setting cgroups of pods", move || cgroups.adjust(&levels, how)).await
    }

    /// Counts written values by cause. Returns the messages of failures.
    fn count_levels(&self, levels: &Values, report: Adjusted) -> Vec<String> {
        for change in &report.changed {
            let drifted = self.kept.get(&change.cgroup) == levels.get(&change.cgroup);
            self.deps.metrics.changed(Level::of(&change.cgroup), 1, drifted);
            if drifted {
                info!(
                    cgroup = change.cgroup,
                    file = change.file,
                    found = change.from,
                    set = change.to,
                    "restored a cgroup's value (another program had changed it)"
                );
            } else {
                debug!(
                    cgroup = change.cgroup,
                    file = change.file,
                    from = change.from,
                    to = change.to,
                    "cgroup set"
                );
            }
        }
        report.failed.into_iter().map(|error| error.to_string()).collect()
    }

    fn warn_of_new(&mut self, failed: &[String]) {
        for error in failed.iter().filter(|error| !self.logged.contains(*error)) {
            warn!(error, "cannot set a cgroup's value, retrying");
        }
        self.logged = failed.iter().cloned().collect();
    }
}
