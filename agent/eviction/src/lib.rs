//! Keeps the node alive when memory, disk, inodes or process ids run low: first gives back what nobody needs,
//! then ends pods, in the kubelet's order.
//!
//! What a removal frees on a disk may come seconds later: containerd collects the writable layers of removed
//! containers when it finds the time. So nobody goes for a disk before that room was seen, or 10 s have
//! passed.
//!
//! `beelet_policy::eviction` decides; here it gets numbers, and what it decides is done. [`gauges`] read the
//! numbers, each in a task of its own, so that one that hangs hides only itself; [`edges`] are the kernel's
//! hints that it is time to read again. One task decides whenever a number is new. It never waits: not for a
//! pod's end, not for a collection of images, not for a number. What pods have on disk is measured anew once
//! the disk is low, for a bounded time, before one is chosen. What it ended is remembered until it is gone,
//! so that its memory isn't asked for twice; one that won't go is given up on, and others take its place. A
//! pod that leaves gently, by a soft threshold or because it was deleted, stands in a hard threshold's
//! ranking with the others, and is hastened when its turn comes.
//!
//! Must never act on a pressure stall alone (a pod that thrashes at its own limit costs others nothing): only
//! available amounts decide. Must never end a critical pod.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

mod decide;
mod disk;
pub mod edges;
mod error;
mod files;
pub mod gauges;
mod local_storage;
mod looks;
pub mod machine;
mod metrics;
mod usage;
mod walk;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use beelet_base::work::Work;
use beelet_policy::eviction::{
    DiskLayout, Reclaim, Threshold, Tracker, derive_allocatable, derive_container_fs,
};
use futures::future::BoxFuture;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub use self::{
    disk::{DiskUsages, DiskView, Filesystems},
    edges::Hints,
    error::Error,
    gauges::{Gauge, Readings},
    local_storage::LocalStorage,
    metrics::Metrics,
    usage::PodUsages,
};

use self::{gauges::LatestReadings, looks::Looks, usage::Survey};
use beelet_model::{pressure::Conditions, request::Request, table::PodTable};
use beelet_state::events::NodeEvents;

/// The longest time between two decisions: grace and transition periods end without a new number.
/// Grace period of a pod under a hard threshold, as the kubelet's `immediateEvictionGracePeriodSeconds`.
const IMMEDIATE: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_secs(1);

/// Removes what nobody needs. Its errors are its maker's.
pub type Reclaimer = Arc<dyn Fn(Reclaim) -> BoxFuture<'static, Result<Reclaimed, BoxError>> + Send + Sync>;

/// What came of a step of giving back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reclaimed {
    /// All the room that it gives can be measured.
    Now,
    /// The runtime may give back some of the room a little later.
    Later,
}

/// An error of another part.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What eviction needs from the rest of the node.
pub struct Parts {
    /// As configured: those of the containers' file system and of allocatable memory are derived here.
    pub thresholds: Vec<Threshold>,
    /// How long a condition is reported after it was last seen.
    pub transition: Duration,
    /// Most time that a pod gets under a soft threshold; None: its own grace period.
    pub max_pod_grace: Option<Duration>,
    /// Where the numbers come from.
    pub gauges: Vec<Gauge>,
    /// What shares a file system with what.
    pub layout: watch::Receiver<DiskLayout>,
    /// The kernel's hints.
    pub hints: Hints,
    /// What each pod uses.
    pub usage: PodUsages,
    /// All pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// To the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Gives back what nobody needs.
    pub reclaimer: Reclaimer,
    /// What the node is short of, for everyone.
    pub conditions: watch::Sender<Conditions>,
    /// What people should know.
    pub events: NodeEvents,
    /// Counters and gauges.
    pub metrics: Metrics,
}

/// Decides what is reclaimed, and which pods go, whenever a number is new; runs as one task.
pub struct Eviction {
    parts: Parts,
    /// With the derived ones, for `layout`.
    thresholds: Vec<Threshold>,
    layout: DiskLayout,
    tracker: Tracker,
    /// The beginning of the tracker's clock, which nobody sets.
    began: Instant,
    /// From when on measurements of what pods have on disk count.
    disks_asked: Option<Instant>,
    board: LatestReadings,
    /// Pods that were told to go, by UID.
    leaving: HashMap<String, Leaving>,
    /// What was given back, or is, by what that consists of: on a split disk each part has its own.
    reclaims: HashMap<&'static [Reclaim], ReclaimState>,
    /// What pods use.
    survey: Survey,
    /// When a pod was last seen to be gone: numbers from before don't know of it.
    gone_at: Option<Instant>,
    /// Pods that went for a disk and whose room may not have come yet.
    late: Vec<LateRoom>,
    /// It was said that nobody can go.
    complained: bool,
    /// Makes the disks' gauges read again.
    look_again: Hints,
    reclaimed_out: mpsc::Sender<(&'static [Reclaim], Reclaimed)>,
    reclaimed: mpsc::Receiver<(&'static [Reclaim], Reclaimed)>,
}

/// A pod that was told to go.
#[derive(Debug, Clone)]
struct Leaving {
    signal: beelet_policy::eviction::Signal,
    /// What it was given.
    grace: Duration,
    /// By when it should be gone; later it is one that won't go.
    by: Instant,
    /// Its usage when it was told, and since; as long as it isn't overdue.
    looks: Looks,
    /// It wasn't gone by then.
    overdue: bool,
    /// What the node had when it was told.
    before: Observations,
}

/// The room that a pod leaves on a disk.
#[derive(Debug)]
struct LateRoom {
    /// Since when the pod is gone.
    since: Instant,
    /// What the node had when it was told to go, and what it used then.
    before: Observations,
    usage: beelet_policy::eviction::PodUsage,
}

/// Whether something is being given back.
#[derive(Debug, Clone, Copy)]
enum ReclaimState {
    Running {
        since: Instant,
    },
    /// Numbers count that were read after `settled`.
    Done {
        at: Instant,
        settled: Instant,
    },
}

impl Eviction {
    /// Eviction that has not looked yet.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let (reclaimed_out, reclaimed) = mpsc::channel(1);
        let layout = *parts.layout.borrow();
        Self {
            thresholds: derived(&parts.thresholds, layout),
            layout,
            tracker: Tracker::default(),
            began: Instant::now(),
            disks_asked: None,
            board: LatestReadings::default(),
            leaving: HashMap::new(),
            reclaims: HashMap::new(),
            survey: Survey::new(parts.usage.clone()),
            gone_at: None,
            late: Vec::new(),
            complained: false,
            look_again: Hints::default(),
            reclaimed_out,
            reclaimed,
            parts,
        }
    }

    /// Works until `shutdown`.
    pub fn run(mut self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            let mut gauges = JoinSet::new();
            for gauge in std::mem::take(&mut self.parts.gauges) {
                let hints = if gauge.of_memory { &self.parts.hints } else { &self.look_again };
                gauges.spawn(gauge.run(
                    self.board.clone(),
                    hints.clone(),
                    self.thresholds.clone(),
                    self.began,
                ));
            }
            let work = async {
                loop {
                    self.decide().await;
                    self.wait().await;
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = work => {}
                // None ends by itself, and without one eviction would be blind.
                Some(Err(failed)) = gauges.join_next() => {
                    if let Ok(panic) = failed.try_into_panic() {
                        std::panic::resume_unwind(panic);
                    }
                }
            }
        })
    }

    /// Waits until there may be something new to decide.
    async fn wait(&mut self) {
        tokio::select! {
            () = self.board.changed() => {}
            () = changed(&mut self.parts.table), if !self.leaving.is_empty() => {}
            () = changed(&mut self.parts.layout) => self.relayout(),
            Some((steps, reclaimed)) = self.reclaimed.recv() => {
                let at = Instant::now();
                let settled = if reclaimed == Reclaimed::Later { at + decide::LATE } else { at };
                self.reclaims.insert(steps, ReclaimState::Done { at, settled });
                self.look_again.notify();
            }
            () = tokio::time::sleep(TICK) => {}
        }
    }

    /// The disks turned out to be shared in another way: thresholds are known by their place, so what was
    /// remembered of them is void.
    fn relayout(&mut self) {
        let layout = *self.parts.layout.borrow_and_update();
        if layout != self.layout {
            self.layout = layout;
            self.thresholds = derived(&self.parts.thresholds, layout);
            self.tracker = Tracker { conditions: self.tracker.conditions.clone(), ..Tracker::default() };
        }
    }
}

/// Waits for a change; for ever where none can come any more.
async fn changed<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// All thresholds that hold for a layout.
fn derived(configured: &[Threshold], layout: DiskLayout) -> Vec<Threshold> {
    let mut thresholds = configured.to_vec();
    for dropped in derive_container_fs(&mut thresholds, layout) {
        let signal = dropped.signal.name();
        warn!(signal, "the threshold is ignored: that file system follows the one that it is part of");
    }
    derive_allocatable(&mut thresholds);
    thresholds
}

impl std::fmt::Debug for Eviction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Eviction").field("thresholds", &self.thresholds).finish_non_exhaustive()
    }
}

/// Amounts by signal.
type Observations = BTreeMap<beelet_policy::eviction::Signal, beelet_policy::eviction::Observation>;

#[cfg(test)]
mod tests;
