//! Keeps the cgroups of the node, of the QoS classes, of pods and of running containers at the values that
//! the pods on the node ask for.
//!
//! Everything is compared when the pods change (only what that changes) and every few seconds (all of it),
//! and what differs is set right: what the runtime's own formulas made of a container, what a manifest
//! changed of a running pod, what somebody else wrote. In an order in which no cgroup is ever held tighter
//! than both its old and its new values hold it: the levels above are widened, then the containers are set
//! through the runtime, which owns them, then the levels above are tightened. What can't be written now (a
//! memory limit below what is in use) is tried again until it fits.

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

/// How often everything is compared though no pod changed.
pub const CHECK: Duration = Duration::from_secs(10);
/// The pause before what failed is tried again; it doubles up to the time between two checks.
const RETRY: Duration = Duration::from_millis(500);
/// The pause after what a change of the pods made necessary is this many times what that took, and at most
/// [`LONGEST_PAUSE`]: the values of all pods follow from all of them, and in a storm they change without end.
const PAUSE_PER_SYNC: u32 = 49;
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How long systemd may take to write all values anew, once it has said that it read its units.
const REWRITE: Duration = Duration::from_millis(500);

/// The values for these pods.
///
/// # Errors
/// A pod's amounts can't be read.
pub fn values(pods: &[&core::Pod], config: &CgroupConfig) -> Result<Values, Error> {
    let decided = node_cgroups(pods, config).map_err(|error| Error::Spec(error.to_string()))?;
    Ok(decided.into_iter().map(|cgroup| (cgroup.path, cgroup.files)).collect())
}

/// Writes `wanted`, parents raised first and lowered last.
///
/// # Errors
/// The cgroup tree does not take them.
pub async fn write(cgroups: &Arc<Cgroups>, wanted: Values) -> Result<(), Error> {
    let cgroups = Arc::clone(cgroups);
    Ok(blocking("writing the cgroups of pods", move || cgroups.ensure_all(&wanted)).await?)
}

/// What is needed to keep them.
#[derive(Debug)]
pub struct Parts {
    /// The pods. Those that have ended count no more.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// The cgroups.
    pub cgroups: Arc<Cgroups>,
    /// How values are computed.
    pub config: CgroupConfig,
    /// Changes containers: they are the runtime's.
    pub runtime: Runtime,
    /// The cgroups of daemons that something is reserved for, where that is enforced. Never made here.
    pub reserved: Vec<CgroupValues>,
    /// To the pods' manager, which needs to know when new amounts of a running pod are in force.
    pub requests: mpsc::Sender<Request>,
    /// Counters and gauges.
    pub metrics: Metrics,
    /// How often everything is compared: [`CHECK`].
    pub check: Duration,
}

/// Follows the table until `shutdown`.
pub fn follow(parts: Parts, shutdown: CancellationToken) -> Work {
    Box::pin(async move {
        let check = parts.check;
        let mut keeper = Keeper::new(parts);
        let (mut next_check, mut pause) = (Instant::now().after(check), RETRY);
        let mut everything = true;
        let mut rewrites = keeper.parts.cgroups.rewrites();
        loop {
            let table = Arc::clone(&keeper.parts.table.borrow_and_update());
            let began = Instant::now();
            if keeper.sync(&table, everything).await {
                pause = RETRY;
            } else {
                next_check = next_check.min(Instant::now().after(pause));
                pause = (pause * 2).min(check);
            }
            if everything {
                keeper.orphans.look(&keeper.parts, &table).await;
            }
            let next =
                Instant::now().after(began.elapsed().saturating_mul(PAUSE_PER_SYNC).min(LONGEST_PAUSE));
            let changed = async {
                tokio::time::sleep_until(next).await;
                keeper.parts.table.changed().await
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

/// Waits until somebody else has written all values anew; for ever where nobody does that.
async fn rewritten(rewrites: &mut Option<watch::Receiver<u64>>) {
    let told = match rewrites {
        Some(rewrites) => rewrites.changed().await.is_ok(),
        None => false,
    };
    if !told {
        std::future::pending::<()>().await;
    }
}

struct Keeper {
    parts: Parts,
    /// What was wanted and is written, by cgroup: from then on a difference is somebody else's doing.
    kept: Values,
    /// The same for containers, by their identifier.
    kept_containers: Values,
    /// The pods that it was done for last.
    done: Arc<PodTable>,
    /// One of them waited for its new amounts.
    resizes: bool,
    /// What was told to be wrong: it isn't told again until it is right.
    told: BTreeSet<String>,
    orphans: Orphans,
}

impl Keeper {
    fn new(parts: Parts) -> Self {
        let (kept, kept_containers) = (Values::new(), Values::new());
        let done = Arc::default();
        Self {
            parts,
            kept,
            kept_containers,
            done,
            resizes: false,
            told: BTreeSet::new(),
            orphans: Orphans::default(),
        }
    }

    /// Sets right what differs; false if something has to be tried again. Unless `everything` is to be
    /// compared, only what is wanted otherwise than before is.
    async fn sync(&mut self, table: &Arc<PodTable>, everything: bool) -> bool {
        // Amounts may be written in another way and be the same; still somebody waits for them.
        let changes = PodChanges::between(&self.done.pods, &table.pods);
        let resizes = self.resizes || resizes::any(changes.changed.iter().map(|(_, entry)| *entry));
        if !everything && !resizes && wanted::is_same(&self.done.pods, &changes) {
            self.done = Arc::clone(table);
            return true;
        }
        let wanted = match Wanted::of(table, &self.parts.config, &self.parts.reserved) {
            Ok(wanted) => wanted,
            Err(error) => {
                warn!(%error, "the cgroups' values can't be computed");
                return false;
            }
        };
        self.kept.retain(|path, _| wanted.levels.contains_key(path));
        self.kept_containers.retain(|id, _| wanted.containers.contains_key(id));
        let mut failed = self.write(&wanted, everything).await;
        failed.sort();
        failed.dedup();
        self.parts.metrics.pending.set(i64::try_from(failed.len()).unwrap_or(i64::MAX));
        self.warn_of_new(&failed);
        resizes::report(&self.parts, table, &wanted, &failed).await;
        self.resizes = resizes::any(table.pods.values());
        self.done = Arc::clone(table);
        if everything && failed.is_empty() {
            self.parts.metrics.syncs.inc();
        }
        failed.is_empty()
    }

    /// Sets right what differs; what could not be, a sentence each.
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
        let compared = containers::compare(&self.parts.cgroups, wanted, &containers).await;
        containers.retain(|id| !compared.absent.contains(id));
        if !compared.differing.is_empty() {
            let report = self.adjust(&levels, Adjust::Wider).await;
            failed.extend(self.count_levels(&levels, report));
        }
        for (id, path) in compared.differing {
            let container = &wanted.containers[&id];
            let drifted = self.kept_containers.get(&id) == Some(&container.files);
            match containers::correct(&self.parts, &id, &path, container).await {
                Ok(changed) => {
                    self.parts.metrics.changed(Level::Container, changed, drifted);
                    if drifted && changed > 0 {
                        info!(pod = %container.pod, container = container.name, "values of a container's cgroup were changed by \
                            somebody else, and are set right again");
                    }
                }
                Err(error) => {
                    failed.push(error.to_string());
                    self.kept_containers.remove(&id);
                    containers.retain(|other| **other != id);
                }
            }
        }
        let there = containers.into_iter().map(|id| (id.clone(), wanted.containers[id].files.clone()));
        self.kept_containers.extend(there);
        // Before they are compared: a pod's worker makes cgroups meanwhile, and those were not.
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

    /// Those that there are, wherever they have values: what is made later begins with others, which is
    /// nobody's doing.
    async fn that_exist(&self, mut levels: Values) -> Values {
        let cgroups = Arc::clone(&self.parts.cgroups);
        let look = move || {
            levels.retain(|path, files| cgroups.has_all(path, files));
            levels
        };
        blocking("looking which cgroups are there", look).await
    }

    async fn adjust(&self, levels: &Values, how: Adjust) -> Adjusted {
        let (cgroups, levels) = (Arc::clone(&self.parts.cgroups), levels.clone());
        blocking("setting cgroups of pods", move || cgroups.adjust(&levels, how)).await
    }

    /// Counts what was written, by its reason; the failures in words.
    fn count_levels(&self, levels: &Values, report: Adjusted) -> Vec<String> {
        for change in &report.changed {
            let drifted = self.kept.get(&change.cgroup) == levels.get(&change.cgroup);
            self.parts.metrics.changed(Level::of(&change.cgroup), 1, drifted);
            if drifted {
                info!(
                    cgroup = change.cgroup,
                    file = change.file,
                    found = change.from,
                    set = change.to,
                    "a cgroup's value was changed by somebody else, and is set right again"
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
        for error in failed.iter().filter(|error| !self.told.contains(*error)) {
            warn!(error, "a cgroup's value could not be set; it is tried again");
        }
        self.told = failed.iter().cloned().collect();
    }
}
