//! Keeps one worker for each pod that is desired or still present, and publishes the [`PodTable`].
//!
//! A single task owns all state: it receives desired pods, relists, probe results and worker reports, and
//! sends control values and the table. No step waits for the runtime. The manager publishes the changes of
//! one turn of its loop at the end of the turn.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
};

use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::{deps::Deps, records::Records, services::Services, worker::WorkerReport};
use beelet_base::work::Work;
use beelet_devices::Active;
use beelet_model::{
    desired::Desired,
    objects::Objects,
    origin::Origin,
    processes,
    request::{Listed, Request, RuntimePod},
    table::{Complete, PodName, PodTable},
};

mod active;
mod adopted;
mod assigned;
mod debugging;
mod deleting;
mod deletion;
mod exits;
mod failing;
mod keeping;
mod lifetime;
mod managed;
mod pods;
mod reconciling;
mod reports;
mod requests;
mod resizing;
mod resuming;
mod status_now;
mod totals;

use self::{
    active::DeviceNews,
    adopted::LeftAlone,
    managed::Managed,
    pods::{Due, Outputs, Pods},
    totals::Totals,
};

/// Capacity of the channel of worker reports. A worker waits while the channel is full.
const REPORTS: usize = 256;
/// Most reports, and most requests, per turn. Their changes are published once: the cost of a publication
/// grows with the number of pods, and a burst brings many reports and requests.
const PER_TURN: usize = 64;

/// Dependencies of the manager.
#[derive(Debug)]
pub struct Dependencies {
    /// Dependencies of the workers.
    pub deps: Deps,
    /// The runtime's name, the prefix of container identifiers in a status.
    pub runtime_name: String,
    /// The desired pods.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// Requests of other parts of the agent.
    pub requests: mpsc::Receiver<Request>,
    /// The published pod table.
    pub table: watch::Sender<Arc<PodTable>>,
    /// The first processes of containers, for the parts of the agent that follow exits.
    pub processes: watch::Sender<processes::Shared>,
    /// Records of pods, which survive restarts of the agent.
    pub records: Records,
    /// The pods that may hold devices.
    pub active: watch::Sender<Active>,
    /// The manager terminates all pods when the agent ends.
    pub stop_pods_on_exit: bool,
    /// Set once the table has all running pods.
    pub complete: Complete,
    /// Times of the last change of manifests, by path, in nanoseconds since the epoch, as of the agent's
    /// start. Empty unless the agent has adopted pods.
    pub manifest_changes: BTreeMap<PathBuf, i64>,
    /// The running pods of a kubelet that the agent leaves alone, by UID, as of the agent's start.
    pub left_alone: BTreeMap<String, (PodName, Origin)>,
}

/// Owns every pod's desired and observed state; runs as one task.
#[derive(Debug)]
pub struct Manager {
    desired: watch::Receiver<Arc<Desired>>,
    requests: mpsc::Receiver<Request>,
    complete: Complete,
    stop_pods_on_exit: bool,
    /// See [`Dependencies::manifest_changes`]. Without the manifests that may have changed since, and those
    /// whose pods have workers.
    manifest_changes: BTreeMap<PathBuf, i64>,
    /// See [`Dependencies::left_alone`].
    left_alone: LeftAlone,
    /// Services of the workers.
    services: Arc<Services>,
    pods: Pods,
    /// The pods in the runtime at the last relist. After the first relist also the pods in an earlier agent's
    /// records: a pod unknown to the runtime may have left folders and cgroups. `None` before the first
    /// relist.
    runtime: Option<Arc<BTreeMap<String, RuntimePod>>>,
    /// UIDs of the pods in the runtime at the last relist, without those from records.
    present: BTreeSet<String>,
    /// Objects that pods refer to, as of their workers' last notification.
    objects: Arc<Objects>,
    /// The runtime's lists of pods without an observation, until the next relist.
    listed: BTreeMap<String, Listed>,
    /// Removed pods with the times of their removal: a relist that began earlier may still have them.
    gone: BTreeMap<String, Instant>,
    reports_in: mpsc::Receiver<WorkerReport>,
    reports_out: mpsc::Sender<WorkerReport>,
    devices: DeviceNews,
    /// Changes when a pod releases resources that another pod may wait for.
    room: watch::Receiver<u64>,
    /// Pods removed in this turn, by UID, with the initial restart counts of their containers in case the
    /// pods start again in this turn.
    left: BTreeMap<String, Arc<BTreeMap<String, u32>>>,
}

impl Manager {
    /// Returns a manager without workers.
    pub fn new(dependencies: Dependencies) -> Self {
        let (reports_out, reports_in) = mpsc::channel(REPORTS);
        let Dependencies { deps, runtime_name, desired, requests, table, processes, records, active, .. } =
            dependencies;
        let published = Arc::clone(&table.borrow());
        let pods = Pods {
            runtime_name,
            records,
            by_uid: BTreeMap::new(),
            table: published,
            totals: Totals::default(),
            due: Due { active: true, ..Due::default() },
            outputs: Outputs { table, processes, active },
            deps,
        };
        Self {
            desired,
            requests,
            complete: dependencies.complete,
            manifest_changes: dependencies.manifest_changes,
            left_alone: LeftAlone::new(dependencies.left_alone),
            stop_pods_on_exit: dependencies.stop_pods_on_exit,
            services: Arc::new(Services::new(&pods.deps)),
            runtime: None,
            present: BTreeSet::new(),
            objects: Arc::default(),
            listed: BTreeMap::new(),
            gone: BTreeMap::new(),
            reports_in,
            reports_out,
            devices: DeviceNews::of(&pods.deps.devices),
            room: pods.deps.admission.changes(),
            left: BTreeMap::new(),
            pods,
        }
    }

    /// Runs until `shutdown`. Then pods keep running, unless `stop_pods_on_exit` is set.
    pub fn run(mut self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            let mut stopping = false;
            let mut source_open = true;
            self.reconcile();
            self.pods.publish_changes();
            loop {
                let deadline = self.pods.totals.next_deadline();
                self.publish_active();
                tokio::select! {
                    () = shutdown.cancelled(), if !stopping => {
                        if !self.stop_pods_on_exit { break }
                        stopping = true;
                        info!(pods = self.pods.by_uid.len(), "terminating all pods before the agent ends");
                        for uid in self.pods.by_uid.keys().cloned().collect::<Vec<_>>() {
                            deleting::terminate(&mut self.pods, &uid);
                        }
                    }
                    changed = self.desired.changed(), if source_open && !stopping => {
                        source_open = changed.is_ok();
                        self.reconcile();
                    }
                    Some(report) = self.reports_in.recv() => self.on_reports(report),
                    Some(request) = self.requests.recv() => self.on_requests(request, stopping),
                    pods = self.devices.changed() => active::on_devices(&mut self.pods, pods),
                    // The manager owns admission, which owns the sender.
                    _ = self.room.changed() => self.pods.due.resizes = true,
                    () = until(deadline), if !stopping => failing::fail_overdue(&mut self.pods),
                }
                if std::mem::take(&mut self.pods.due.reconcile) && !stopping {
                    self.reconcile();
                }
                if std::mem::take(&mut self.pods.due.resizes) {
                    resizing::try_resizes(&mut self.pods);
                }
                self.left.clear();
                self.pods.publish_changes();
                self.publish_complete();
                if stopping && self.pods.by_uid.is_empty() {
                    break;
                }
            }
            for managed in self.pods.by_uid.values() {
                managed.task.abort();
            }
        })
    }

    /// Publishes the pods that may hold devices, if the pods in the runtime and the desired pods are known.
    fn publish_active(&mut self) {
        let known = self.runtime.as_deref().filter(|_| !self.desired.borrow().is_incomplete());
        self.pods.publish_active(known);
    }

    /// Sets `complete` once every pod has a status or is terminating.
    fn publish_complete(&self) {
        let is_known = |managed: &Managed| managed.record.status.is_some() || managed.terminating();
        if self.desired.borrow().api_unread {
            return;
        }
        let all_known = || self.pods.by_uid.values().all(is_known);
        if self.runtime.is_some() && !self.complete.initialized() && all_known() {
            // No other part sets it.
            let _ = self.complete.set(());
        }
    }
}

/// Waits until a time, or forever.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
