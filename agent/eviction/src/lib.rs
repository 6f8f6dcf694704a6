//! Keeps the node alive when memory, disk, inodes or process ids run low: first reclaims unused resources,
//! then evicts pods, in the kubelet's order.
//!
//! The effect of a removal on a disk may come seconds later: containerd collects the writable layers of
//! removed containers in its own time. So the next eviction for a disk waits until that space has been seen,
//! or 10 s have passed.
//!
//! `beelet_policy::eviction` decides; this crate supplies the numbers and carries out the decisions.
//! [`gauges`] read the numbers, each in a task of its own, so that a hanging one hides only itself; [`edges`]
//! are the kernel's hints to read again. A single task decides whenever a number is new. The task never
//! waits: not for a pod's end, not for a collection of images, not for a number. Once the disk is low, pods'
//! disk usage is measured again, for a bounded time, before a pod is chosen. Evicted pods stay recorded until
//! they have terminated, so that their memory is not requested twice; others take the place of a pod that
//! does not terminate. A gracefully terminating pod, due to a soft threshold or a deletion, is ranked for a
//! hard threshold like any other, and loses its grace period when its turn comes.
//!
//! Must never act on a pressure stall alone (a pod that thrashes at its own limit costs others nothing): only
//! available amounts decide. Must never evict a critical pod.

// Tests pass literals by value.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

mod decide;
mod disk;
mod disk_survey;
pub mod edges;
mod error;
mod files;
pub mod gauges;
mod leaving;
mod local_storage;
pub mod machine;
mod metrics;
mod readings;
mod reclaims;
mod swap_out;
mod usage;
mod walk;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

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
    swap_out::SwapDoor,
    usage::PodUsages,
};

use self::{
    disk_survey::DiskSurvey, gauges::LatestReadings, leaving::LeavingPods, reclaims::Reclaims,
    swap_out::SwapOuts, usage::Survey,
};
use beelet_model::{pressure::Conditions, request::Request, table::PodTable};
use beelet_state::events::NodeEvents;

/// Grace period of a pod under a hard threshold, as the kubelet's `immediateEvictionGracePeriodSeconds`.
const IMMEDIATE: Duration = Duration::from_secs(1);
/// Maximum time between two decisions: grace and transition periods end without a new number.
const TICK: Duration = Duration::from_secs(1);

/// A function that removes unused objects. Errors are those of the implementation.
pub type Reclaimer = Arc<dyn Fn(Reclaim) -> BoxFuture<'static, Result<Reclaimed, BoxError>> + Send + Sync>;

/// The result of a reclaim step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reclaimed {
    /// All freed space is measurable now.
    Now,
    /// The runtime may free some of the space a little later.
    Later,
}

/// An error of another crate.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The dependencies of eviction.
pub struct Parts {
    /// Configured thresholds; those of the containers' file system and of allocatable memory are derived from
    /// them.
    pub thresholds: Vec<Threshold>,
    /// Time for which a condition is reported after it was last seen.
    pub transition: Duration,
    /// Maximum grace period under a soft threshold; `None` for the pod's own.
    pub max_pod_grace: Option<Duration>,
    /// Sources of the numbers.
    pub gauges: Vec<Gauge>,
    /// Sharing of file systems.
    pub layout: watch::Receiver<DiskLayout>,
    /// The kernel's hints.
    pub hints: Hints,
    /// Usage of each pod.
    pub usage: PodUsages,
    /// All pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Channel to the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Remover of unused resources.
    pub reclaimer: Reclaimer,
    /// Swap for cold memory of pods, if it counts and can be filled on request.
    pub swap: Option<SwapDoor>,
    /// Published conditions of the node.
    pub conditions: watch::Sender<Conditions>,
    /// Events for users.
    pub events: NodeEvents,
    /// Counters and gauges.
    pub metrics: Metrics,
}

/// The task that decides about reclaim and evictions whenever a number is new.
pub struct Eviction {
    parts: Parts,
    /// Thresholds including the derived ones, for `layout`.
    thresholds: Vec<Threshold>,
    layout: DiskLayout,
    tracker: Tracker,
    /// Start of the tracker's monotonic clock.
    began: Instant,
    board: LatestReadings,
    /// Evicted and deleted pods that have not terminated yet.
    leaving: LeavingPods,
    reclaims: Reclaims,
    swap_outs: SwapOuts,
    /// Usage of pods.
    survey: Survey,
    /// Measurements of pods' disk usage.
    disks: DiskSurvey,
    /// True once an event has reported that no pod can be evicted.
    complained: bool,
    /// Hints that trigger another reading of the disks' gauges.
    look_again: Hints,
}

impl Eviction {
    /// Creates eviction before its first decision.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let layout = *parts.layout.borrow();
        Self {
            thresholds: derived(&parts.thresholds, layout),
            layout,
            tracker: Tracker::default(),
            began: Instant::now(),
            board: LatestReadings::default(),
            leaving: LeavingPods::default(),
            reclaims: Reclaims::new(Arc::clone(&parts.reclaimer)),
            swap_outs: SwapOuts::new(parts.swap.clone()),
            survey: Survey::new(parts.usage.clone()),
            disks: DiskSurvey::new(parts.usage.disk.clone()),
            complained: false,
            look_again: Hints::default(),
            parts,
        }
    }

    /// Runs until `shutdown`.
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
                // Gauges never end by themselves, and without one eviction would be blind.
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
            () = changed(&mut self.parts.table), if !self.leaving.pods.is_empty() => {}
            () = changed(&mut self.parts.layout) => self.relayout(),
            () = self.reclaims.ended() => self.look_again.notify(),
            () = self.swap_outs.ended() => self.parts.hints.notify(),
            () = tokio::time::sleep(TICK) => {}
        }
    }

    /// Handles a changed layout of the disks: indices identify thresholds, so the state about them is void.
    fn relayout(&mut self) {
        let layout = *self.parts.layout.borrow_and_update();
        if layout != self.layout {
            self.layout = layout;
            self.thresholds = derived(&self.parts.thresholds, layout);
            self.tracker = Tracker { conditions: self.tracker.conditions.clone(), ..Tracker::default() };
        }
    }
}

/// Waits for a change; forever if none can come.
async fn changed<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Returns all thresholds that apply to a layout.
fn derived(configured: &[Threshold], layout: DiskLayout) -> Vec<Threshold> {
    let mut thresholds = configured.to_vec();
    for dropped in derive_container_fs(&mut thresholds, layout) {
        let signal = dropped.signal.name();
        warn!(
            signal,
            "ignoring the threshold: the containers' file system has the thresholds of the file system that it is part of"
        );
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
