//! Keeps one worker for each pod that should be here or still is, and publishes the [`PodTable`].
//!
//! One task owns everything: desired pods, what the runtime was seen to have, probe results and worker
//! reports come in, control values and the table go out. Nothing here waits for the runtime. What one turn of
//! its loop has changed is published at its end.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use beelet_policy::{
    pod::{ContainerState, KillReason},
    probe::{ProbeKind, ProbeResult},
};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1 as core,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    deps::Deps,
    metrics::{Counted, Lifecycle},
    records::{PodRecord, Records},
    runtime_view::{Foreknown, Observation},
    services::Services,
    status::Waiting,
    worker::{Control, Stage, Terminate, Worker, WorkerReport},
};
use beelet_base::clock::monotonic_ns;
use beelet_base::work::Work;
use beelet_devices::Active;
use beelet_model::{
    desired::Desired,
    ended::Ended,
    failure::PodFailure,
    labels::ANNOTATION_HASH,
    objects::Objects,
    origin::Origin,
    processes,
    request::{Listed, ProbeUpdate, Request, RuntimePod},
    status::{has_ended, whole_second},
    table::{Complete, PodEntry, PodName, PodTable, ReadinessEdge},
};
use beelet_spec::resize::{self, ResizeFacts};

mod active;
mod assigned;
mod debugging;
mod deleting;
mod exits;
mod failing;
mod keeping;
mod resizing;
mod resuming;
mod status_now;
mod totals;

use self::active::DeviceNews;
use self::keeping::runtime_pod;
use self::resuming::{control_of, next_counts, remember};
use self::totals::{Share, Totals};

/// Reports under way from workers. A worker waits while the manager is behind by this many.
const REPORTS: usize = 256;
/// Reports, and requests, that are taken in one turn. What they change is published once: each publication
/// costs as much as there are pods, and a storm brings several of each.
const PER_TURN: usize = 64;

/// What the manager needs from the rest of the node.
#[derive(Debug)]
pub struct Parts {
    /// Parts of the node that pods run with.
    pub deps: Deps,
    /// The runtime's name, as container identifiers in a status carry it.
    pub runtime_name: String,
    /// What should be here.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// What others ask.
    pub requests: mpsc::Receiver<Request>,
    /// The table that everyone reads.
    pub table: watch::Sender<Arc<PodTable>>,
    /// The first processes of what runs, for those who hear of exits.
    pub processes: watch::Sender<processes::Shared>,
    /// What is known of pods from before a restart; new knowledge goes to the same place.
    pub records: Records,
    /// The pods that may hold devices.
    pub active: watch::Sender<Active>,
    /// The pods go when the agent ends.
    pub stop_pods_on_exit: bool,
    /// Set when the table has all that runs.
    pub complete: Complete,
}

/// A pod with a worker.
#[derive(Debug)]
struct Managed {
    name: PodName,
    pod: Arc<core::Pod>,
    control: watch::Sender<Control>,
    task: JoinHandle<()>,
    seen: Option<Arc<Observation>>,
    waiting: BTreeMap<String, Waiting>,
    /// What is known of it when the agent starts anew, and its status among that.
    kept: PodRecord,
    /// The pod that `kept` is of as it is now.
    kept_of: Option<Arc<core::Pod>>,
    /// What was told of its OOM kills.
    oom_told: BTreeMap<String, exits::OomTold>,
    /// Since when it has been active.
    lifetime: Option<failing::Lifetime>,
    /// It may run again once its failure is cleared.
    retry: bool,
    /// Its deletion, if the API server wants it deleted: its object is there until nothing is left of the
    /// pod.
    deletion: Option<assigned::Deletion>,
    /// What the API server last wanted of it.
    assigned: Option<Arc<core::Pod>>,
    /// How a change of its amounts stands, and the change that it waits for.
    resize: ResizeFacts,
    wanted: Option<resizing::Wanted>,
    /// How often its manifest had been put back when it began.
    put_back: u64,
    /// What it gets to end by itself once it is terminated, if a person has said so.
    asked_grace: Option<Duration>,
    /// The pod of its name that waits until it, which was deleted by force, is gone.
    successor: Option<deleting::Successor>,
}

impl Managed {
    fn terminating(&self) -> bool {
        self.deletion.is_some() || self.is_dropped()
    }

    /// Returns true if an object that has come may be what it has waited for.
    fn is_pending(&self) -> bool {
        self.kept.status.as_ref().is_none_or(|status| status.phase.as_deref() == Some("Pending"))
    }

    /// Returns true if nobody wants it any more: once nothing is left of it, it is forgotten.
    fn is_dropped(&self) -> bool {
        self.control.borrow().terminate.is_some()
    }

    /// What it adds to what is known of all pods together.
    fn share(&self) -> Share {
        Share { counted: self.counted(), is_active: self.ended().is_none(), deadline: self.deadline() }
    }

    /// What it counts as in the gauges of pods.
    fn counted(&self) -> Counted {
        let lifecycle = if self.gone().is_some() {
            Lifecycle::Terminated
        } else if self.terminating() || self.kept.failure.is_some() {
            Lifecycle::Terminating
        } else {
            Lifecycle::Sync
        };
        Counted { is_static: !self.origin().is_api(), is_desired: !self.is_dropped(), lifecycle }
    }

    fn origin(&self) -> Origin {
        Origin::of(&self.pod)
    }

    /// Returns true if other amounts of cpu and memory don't make it another pod. One that was ended for good
    /// is.
    fn may_resize(&self) -> bool {
        !self.terminating() && self.kept.failure.is_none()
    }
}

/// Owns every pod's desired and observed state; runs as one task.
#[derive(Debug)]
pub struct Manager {
    parts: Parts,
    /// Services of the workers.
    services: Arc<Services>,
    /// By UID.
    pods: BTreeMap<String, Managed>,
    /// What the runtime was last seen to have, and at first what the records of an earlier instance name: a
    /// pod that the runtime has forgotten may have left folders and cgroups. `None` before the first look.
    runtime: Option<Arc<BTreeMap<String, RuntimePod>>>,
    /// The table as it is published at the end of a turn.
    table: Arc<PodTable>,
    /// What is known of all pods together.
    totals: Totals,
    /// What else is due at the end of a turn.
    due: Due,
    /// UIDs of the pods that the runtime itself named, when it was last asked.
    present: BTreeSet<String>,
    /// What pods refer to, as it was when they were last told of it.
    objects: Arc<Objects>,
    /// What the runtime listed of pods that no worker has looked at yet, until it is asked again.
    listed: BTreeMap<String, Listed>,
    /// Pods that are gone, and since when: what the runtime was asked before may still name them.
    gone: BTreeMap<String, Instant>,
    reports_in: mpsc::Receiver<WorkerReport>,
    reports_out: mpsc::Sender<WorkerReport>,
    devices: DeviceNews,
    /// Rung when room was given back that a pod may wait for.
    room: watch::Receiver<u64>,
    /// Pods that have gone in this turn, by UID, and the restart counts with which their containers begin
    /// should they come back at once.
    left: BTreeMap<String, Arc<BTreeMap<String, u32>>>,
}

/// What is done once at the end of a turn, however much came in it.
#[derive(Debug, Default)]
struct Due {
    /// The table has changed.
    table: bool,
    /// First processes may have come or gone.
    processes: bool,
    /// A pod is gone for which another of its name may have waited.
    reconcile: bool,
    /// Other pods may have containers than before.
    active: bool,
    /// There may be room for pods that wait for other amounts.
    resizes: bool,
}

impl Manager {
    /// A manager that has started nothing yet.
    pub fn new(parts: Parts) -> Self {
        let (reports_out, reports_in) = mpsc::channel(REPORTS);
        let (pods, gone, present) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let devices = DeviceNews::of(&parts.deps.devices);
        let room = parts.deps.admission.changes();
        let table = Arc::clone(&parts.table.borrow());
        Self {
            services: Arc::new(Services::new(&parts.deps)),
            parts,
            pods,
            runtime: None,
            table,
            totals: Totals::default(),
            due: Due { active: true, ..Due::default() },
            present,
            objects: Arc::default(),
            listed: BTreeMap::new(),
            gone,
            reports_in,
            reports_out,
            devices,
            room,
            left: BTreeMap::new(),
        }
    }

    /// Runs until `shutdown`. Then pods are left as they are, or terminated where the configuration says so.
    pub fn run(mut self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            let mut stopping = false;
            let mut source_open = true;
            self.reconcile();
            self.publish_changes();
            loop {
                let deadline = self.totals.next_deadline();
                self.publish_active();
                tokio::select! {
                    () = shutdown.cancelled(), if !stopping => {
                        if !self.parts.stop_pods_on_exit { break }
                        stopping = true;
                        info!(pods = self.pods.len(), "terminating all pods before the agent ends");
                        for uid in self.pods.keys().cloned().collect::<Vec<_>>() {
                            self.terminate(&uid);
                        }
                    }
                    changed = self.parts.desired.changed(), if source_open && !stopping => {
                        source_open = changed.is_ok();
                        self.reconcile();
                    }
                    Some(report) = self.reports_in.recv() => self.on_reports(report),
                    Some(request) = self.parts.requests.recv() => self.on_requests(request, stopping),
                    pods = self.devices.changed() => self.on_devices(pods),
                    // The manager keeps admission, and so the sender.
                    _ = self.room.changed() => self.due.resizes = true,
                    () = until(deadline), if !stopping => self.fail_overdue(),
                }
                if std::mem::take(&mut self.due.reconcile) && !stopping {
                    self.reconcile();
                }
                if std::mem::take(&mut self.due.resizes) {
                    self.try_resizes();
                }
                self.left.clear();
                self.publish_changes();
                self.note_complete();
                if stopping && self.pods.is_empty() {
                    break;
                }
            }
            for managed in self.pods.values() {
                managed.task.abort();
            }
        })
    }

    /// Tells once that every pod was looked at.
    fn note_complete(&self) {
        let is_known = |managed: &Managed| managed.kept.status.is_some() || managed.terminating();
        if self.parts.desired.borrow().api_unread {
            return;
        }
        if self.runtime.is_some() && !self.parts.complete.initialized() && self.pods.values().all(is_known) {
            // Nobody else sets it.
            let _ = self.parts.complete.set(());
        }
    }

    /// Makes workers fit what is desired: starts the missing, terminates the others.
    fn reconcile(&mut self) {
        let desired = Arc::clone(&self.parts.desired.borrow_and_update());
        self.due.active = true;
        self.publish_rejected(&desired);
        if !Objects::are_same(&self.objects, &desired.objects) {
            let before = std::mem::replace(&mut self.objects, Arc::clone(&desired.objects));
            for managed in self.pods.values() {
                // A pod may have waited for one of them. All others are left alone: in a cluster somebody's
                // Service or token changes all the time, and each pod that is woken is work.
                if managed.kept.failure.is_some() || managed.terminating() || managed.is_over() {
                    continue;
                }
                let concerned = !before.are_same_for(&desired.objects, &managed.pod);
                managed.control.send_if_modified(|c| {
                    c.objects += u64::from(concerned);
                    concerned || managed.is_pending()
                });
            }
        }
        // Before the first look at the runtime a pod that runs could be taken for one that doesn't.
        let Some(in_runtime) = self.runtime.clone() else { return };
        let wanted = self.identified(&desired, &in_runtime);
        for uid in self.pods.keys().cloned().collect::<Vec<_>>() {
            self.keep_or_terminate(&uid, wanted.get(&uid), &desired);
        }
        // Those that run have their room before any new one asks for some.
        wanted.iter().for_each(|(uid, pod)| self.adopt(uid, pod));
        for (uid, orphan) in in_runtime.iter() {
            // A UID may be written in the manifest, and stay when the rest changes.
            let is_wanted = wanted.get(uid).is_some_and(|pod| {
                Origin::of(pod).is_api()
                    || orphan.hash.is_none()
                    || orphan.hash == hash_of(pod)
                    || orphan.shape == Some(resize::shape(pod))
            });
            let may_remove = desired.may_remove_of(orphan.origin, uid, orphan.manifest.as_deref());
            // One whose termination an earlier instance of the agent began goes, whatever is wanted now.
            let is_leaving = self.parts.records.is_leaving(uid);
            if self.pods.contains_key(uid) || !is_leaving && (is_wanted || !may_remove) {
                continue;
            }
            if is_leaving {
                info!(pod = %orphan.name, uid, "the termination of a pod goes on that an earlier agent began");
            } else {
                info!(pod = %orphan.name, uid, "a pod that nobody wants runs here; it is terminated");
                self.parts.deps.reports.metrics.orphaned();
            }
            self.spawn(Arc::new(pod_of_orphan(uid, orphan)), true);
        }
        self.spawn_missing(wanted, &in_runtime);
        self.note_successors(&desired);
        // After those that run already have their room, and before new ones ask for some.
        self.due.resizes = true;
    }

    /// Starts workers of wanted pods that have none.
    fn spawn_missing(
        &mut self,
        mut wanted: BTreeMap<String, Arc<core::Pod>>,
        in_runtime: &BTreeMap<String, RuntimePod>,
    ) {
        wanted.retain(|uid, _| !self.pods.contains_key(uid));
        if wanted.is_empty() {
            return;
        }
        let mut names: BTreeSet<PodName> = self.pods.values().map(|managed| managed.name.clone()).collect();
        let left_alone = in_runtime.iter().filter(|(uid, _)| !self.pods.contains_key(*uid));
        let left_alone: Vec<(&PodName, &String)> = left_alone.map(|(uid, seen)| (&seen.name, uid)).collect();
        let mut by_name: BTreeMap<&PodName, Vec<&String>> = BTreeMap::new();
        left_alone.into_iter().for_each(|(name, uid)| by_name.entry(name).or_default().push(uid));
        for (uid, pod) in wanted {
            let name = PodName::of(&pod);
            // Of two pods of one name the old one must be gone first: they may share ports and files.
            if names.contains(&name) {
                continue;
            }
            if by_name.get(&name).is_some_and(|uids| uids.iter().any(|other| **other != uid)) {
                warn!(pod = %name, uid, "pod must wait: one of its name runs here, from a manifest that can't be read");
                continue;
            }
            info!(pod = %name, uid, "pod is managed from now on");
            if self.gone.contains_key(&uid) {
                self.parts.deps.reports.metrics.restarted(!Origin::of(&pod).is_api());
            }
            self.spawn(pod, false);
            names.insert(name);
        }
    }

    /// The desired pods by UID. One that differs from a pod that is here in nothing but amounts that may
    /// change while it runs is that pod.
    fn identified(
        &self,
        desired: &Desired,
        in_runtime: &BTreeMap<String, RuntimePod>,
    ) -> BTreeMap<String, Arc<core::Pod>> {
        let identify = |pod: &Arc<core::Pod>| {
            let uid = pod.metadata.uid.clone()?;
            let is_known = self.pods.contains_key(&uid) || in_runtime.contains_key(&uid);
            if is_known || Origin::of(pod).is_api() {
                return Some((uid, Arc::clone(pod)));
            }
            let (name, shape) = (PodName::of(pod), resize::shape(pod));
            let mut managed = self.pods.iter().filter(|(_, m)| m.name == name && m.may_resize());
            let running = managed.find(|(_, m)| resize::shape(&m.pod) == shape).map(|(uid, _)| uid);
            let mut seen = in_runtime.iter().filter(|(uid, _)| !self.pods.contains_key(*uid));
            let known = running.or_else(|| {
                seen.find(|(_, seen)| seen.name == name && seen.shape.as_ref() == Some(&shape))
                    .map(|(uid, _)| uid)
            });
            let Some(known) = known else { return Some((uid, Arc::clone(pod))) };
            let mut resized = (**pod).clone();
            resized.metadata.uid = Some(known.clone());
            Some((known.clone(), Arc::new(resized)))
        };
        desired.pods.values().filter_map(identify).collect()
    }

    /// Terminates a pod that isn't wanted any more, or not as it is.
    fn keep_or_terminate(&mut self, uid: &str, wanted: Option<&Arc<core::Pod>>, desired: &Desired) {
        if let Some(pod) = wanted.filter(|pod| Origin::of(pod).is_api()) {
            self.follow_assigned(uid, pod);
            return;
        }
        let Some(managed) = self.pods.get_mut(uid) else { return };
        if wanted.is_some() && put_back(desired, uid) > managed.put_back {
            info!(pod = %managed.name, uid, "the pod's manifest was deleted and put back");
            self.terminate(uid);
            return;
        }
        let same = |pod: &&Arc<core::Pod>| {
            hash_of(pod) == hash_of(&managed.pod)
                || managed.may_resize() && resize::shape(pod) == resize::shape(&managed.pod)
        };
        match wanted.filter(same).map(|pod| managed.with_debuggers(pod)) {
            // The same manifest; what comes from elsewhere, its priority, may be new.
            Some(pod) if !managed.terminating() && managed.pod != pod => {
                if hash_of(&pod) == hash_of(&managed.pod) {
                    managed.want_nothing();
                    managed.pod = pod;
                } else {
                    managed.want(pod);
                }
                self.publish(uid);
            }
            Some(_) if managed.want_nothing() => self.publish(uid),
            Some(_) => {}
            None if desired.may_remove_of(managed.origin(), uid, manifest_of(&managed.pod).as_deref()) => {
                self.terminate(uid);
            }
            None => {}
        }
    }

    /// A pod that an earlier instance of the agent let in is not asked again, whatever the node is like now.
    fn adopt(&self, uid: &str, pod: &Arc<core::Pod>) {
        if !self.present.contains(uid) || self.pods.contains_key(uid) {
            return;
        }
        let record = self.parts.records.get(uid);
        if record.as_ref().is_none_or(|record| record.failure.is_none() && record.leaving.is_none()) {
            let accepted = record.and_then(|record| record.accepted);
            self.parts.deps.admission.adopt(&resizing::as_accepted(pod, accepted.as_ref()));
        }
    }

    fn publish_rejected(&mut self, desired: &Desired) {
        if *self.table.rejected != desired.rejected {
            Arc::make_mut(&mut self.table).rejected = Arc::new(desired.rejected.clone());
            self.due.table = true;
        }
        self.parts
            .deps
            .reports
            .metrics
            .rejected_manifests
            .set(i64::try_from(desired.rejected.len()).unwrap_or(i64::MAX));
    }

    fn spawn(&mut self, pod: Arc<core::Pod>, terminate: bool) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let (record, retry) = self.remembered(&uid, Origin::of(&pod));
        let mut kept = record.unwrap_or_else(|| PodRecord::new(runtime_pod(&pod)));
        kept.abandoned &= terminate;
        let is_static = !Origin::of(&pod).is_api();
        kept.leaving = (terminate && is_static).then(|| kept.leaving.unwrap_or_default());
        let left = self.left.remove(&uid);
        let counts = left.unwrap_or_else(|| Arc::new(next_counts(kept.status.as_deref())));
        let wanted = debugging::with_debuggers(pod, &kept.debuggers);
        let assigned = Origin::of(&wanted).is_api().then(|| Arc::clone(&wanted));
        let pod = resizing::as_accepted(&wanted, kept.accepted.as_ref());
        if kept.status.is_none() {
            // What has ended by the API server's word never runs again, whatever was forgotten here.
            kept.status = pod.status.clone().filter(|status| has_ended(Some(status))).map(Arc::new);
        }
        let mut deletion = assigned.as_deref().and_then(assigned::Deletion::of);
        if let (Some(deletion), Some(failure)) = (&mut deletion, &kept.failure) {
            (deletion.stopped, deletion.cleared) = (failure.has_stopped(), failure.cleared);
        }
        self.admit_leaving(&uid, &pod, deletion.as_ref(), terminate);
        let control = Control {
            terminate: terminate.then(|| Terminate { grace: kept.leaving.and_then(|leaving| leaving.grace) }),
            ..control_of(&kept, deletion.as_ref(), counts, beelet_model::pod::grace_period(&pod))
        };
        let (control, signal) = watch::channel(control);
        // Of a pod that the runtime did not have there is nothing to be listed: nobody else makes it.
        let is_new = self.runtime.as_ref().is_some_and(|runtime| !runtime.contains_key(&uid));
        let listed = self.listed.remove(&uid).or_else(|| is_new.then(Listed::default));
        let network = resuming::network_of(&kept, &pod);
        let known = Foreknown { listed, processes: kept.processes.clone(), network };
        let (services, reports) = (Arc::clone(&self.services), self.reports_out.clone());
        let worker = Worker::supervised(services, Arc::clone(&pod), signal, reports, known);
        let managed = Managed {
            name: PodName::of(&pod),
            pod,
            control,
            task: tokio::spawn(worker),
            seen: None,
            waiting: BTreeMap::new(),
            kept,
            kept_of: None,
            oom_told: BTreeMap::new(),
            lifetime: None,
            retry,
            deletion,
            assigned,
            resize: ResizeFacts::default(),
            wanted: None,
            put_back: put_back(&self.parts.desired.borrow(), &uid),
            asked_grace: None,
            successor: None,
        };
        let is_known = managed.kept.status.is_some();
        let may_run = self.runtime.as_ref().is_some_and(|runtime| runtime.contains_key(&uid));
        if !is_known && !may_run && !terminate {
            self.parts.deps.reports.metrics.startup.begin(&managed.name, &uid);
        }
        self.pods.insert(uid.clone(), managed);
        self.ask_for_amounts(&uid, &wanted);
        self.note(&uid);
        self.due.active = true;
        // A pod that runs, but of which nothing is known, is not called pending before it was looked at.
        if is_known || !may_run {
            self.publish(&uid);
        }
    }

    /// Tells admission of a pod that is on its way out when it is first seen.
    fn admit_leaving(
        &self,
        uid: &str,
        pod: &Arc<core::Pod>,
        deletion: Option<&assigned::Deletion>,
        terminate: bool,
    ) {
        let admission = &self.parts.deps.admission;
        if let Some(deletion) = deletion {
            admission.leaving(uid, deletion.grace);
        }
        if terminate {
            admission.adopt(pod);
            admission.leaving(uid, beelet_model::pod::grace_period(pod));
        }
    }

    /// Takes this report, and those that have come behind it.
    fn on_reports(&mut self, report: WorkerReport) {
        self.on_report(report);
        for _ in 1..PER_TURN {
            let Ok(report) = self.reports_in.try_recv() else { return };
            self.on_report(report);
        }
    }

    /// Takes this request, and those that have come behind it.
    fn on_requests(&mut self, request: Request, stopping: bool) {
        self.on_request(request, stopping);
        for _ in 1..PER_TURN {
            let Ok(request) = self.parts.requests.try_recv() else { return };
            self.on_request(request, stopping);
        }
    }

    fn on_report(&mut self, report: WorkerReport) {
        let Some(managed) = self.pods.get_mut(&report.uid) else { return };
        if report.stage == Stage::Gone {
            let name = managed.name.clone();
            let on_request = managed.kept.leaving.is_some_and(|leaving| leaving.on_request);
            let status = managed.kept.status.as_deref().filter(|_| !on_request);
            let counts = Arc::new(next_counts(status));
            self.pods.remove(&report.uid);
            self.gone.insert(report.uid.clone(), Instant::now());
            self.parts.records.remove(&report.uid);
            self.parts.deps.reports.metrics.startup.forget(&report.uid);
            if let Some(ended) = Ended::of(None, report.stage == Stage::Gone) {
                self.parts.deps.admission.released(&report.uid, ended);
            }
            if let Some(runtime) = &mut self.runtime {
                Arc::make_mut(runtime).remove(&report.uid);
            }
            self.note(&report.uid);
            self.due.active = true;
            self.unpublish(&name, &report.uid);
            self.due.processes = true;
            self.due.reconcile = true;
            // The same pod may have waited for this one, too.
            self.left.insert(report.uid, counts);
            return;
        }
        match report.stage {
            Stage::Cleared => return self.on_cleared(&report.uid),
            Stage::Stopped => {
                managed.note_stopped();
                if report.seen.pod.sandboxes.is_empty() && report.seen.pod.containers.is_empty() {
                    return self.publish(&report.uid);
                }
            }
            Stage::Here | Stage::Gone => {}
        }
        // What probes said of containers that are gone is of no use any more.
        managed.kept.probes.retain(|id, _| report.seen.containers.contains_key(id));
        managed.control.send_if_modified(|c| {
            let running = |id: &String| {
                let of_id = report.seen.pod.containers.iter().find(|c| c.id == *id);
                of_id.is_some_and(|c| matches!(c.state, ContainerState::Running { .. }))
            };
            // Why one was stopped says whether it comes back.
            c.verdicts.condemned.retain(|id, reason| {
                let counts = reason.is_for_a_restart() && report.seen.containers.contains_key(id);
                running(id) || counts && (!reason.is_of_probe() || report.stopped.contains(id))
            });
            c.exited.retain(|id, _| running(id));
            c.verdicts.hurried.retain(|id| report.seen.containers.contains_key(id));
            c.verdicts.started.retain(|id| report.seen.containers.contains_key(id));
            c.verdicts.hooked.clone_from(&report.hooked);
            // It was taken over, or can be asked for again: a thousand pods would keep room for theirs.
            c.listed = None;
            false // the worker that reports has seen it all
        });
        managed.record_unseen_oom(&report.seen, &self.parts.deps.reports.events);
        managed.kept.netns = report.seen.sandbox.as_ref().and_then(|sandbox| sandbox.netns.clone());
        managed.kept.processes.clone_from(&report.seen.processes);
        let before = managed.seen.replace(report.seen);
        // All pods' are published together.
        self.due.processes |= before.is_none_or(|before| before.processes != managed.kept.processes);
        managed.waiting = report.waiting;
        managed.kept.hooked = report.hooked;
        let known = |id: &String| managed.seen.as_ref().is_some_and(|s| s.containers.contains_key(id));
        managed.kept.oom.retain(|id, _| known(id));
        managed.oom_told.retain(|id, _| known(id));
        self.publish(&report.uid);
    }

    fn on_request(&mut self, request: Request, stopping: bool) {
        match request {
            Request::Runtime(mut seen) => {
                for (uid, managed) in &self.pods {
                    let had_any = managed.seen.as_ref().is_some_and(|s| !s.pod.sandboxes.is_empty());
                    let cleared = managed.is_cleared();
                    let lost = had_any && !cleared && !seen.pods.contains_key(uid);
                    if lost || seen.recovered || seen.changed.contains(uid) {
                        let listed = seen.listed.remove(uid).map(|l| (seen.asked_at, Arc::new(l)));
                        managed.control.send_modify(|c| {
                            c.changes += 1;
                            c.listed = listed;
                        });
                    }
                }
                // Later answers are late where a pod begins: it may have been there before, and have left.
                self.listed = if self.runtime.is_none() { seen.listed } else { BTreeMap::new() };
                self.present = seen.pods.keys().cloned().collect();
                self.gone.retain(|_, since| *since >= seen.asked_at);
                seen.pods.retain(|uid, _| !self.gone.contains_key(uid));
                let earlier =
                    if self.runtime.is_none() { self.parts.records.origins() } else { BTreeMap::new() };
                let in_runtime: BTreeMap<_, _> = earlier.into_iter().chain(seen.pods).collect();
                if self.runtime.as_deref() != Some(&in_runtime) {
                    self.runtime = Some(Arc::new(in_runtime));
                    self.due.active = true;
                    if !stopping {
                        self.reconcile();
                    }
                }
            }
            Request::Probe(update) => self.on_probe(&update),
            Request::Fail { uid, reason, message, grace } => {
                self.fail(&uid, &PodFailure::new(reason, message, grace));
            }
            Request::Refuse { uid, reason, message, refusal } => {
                self.fail(&uid, &PodFailure::refused(reason, message, refusal));
            }
            Request::Retry { uid } => self.retry(&uid),
            Request::Delete { uid, grace, force } => self.delete(&uid, grace, force),
            Request::Terminate { uid } => self.terminate_on_request(&uid),
            Request::Restart { uid, containers } => self.restart(&uid, &containers),
            Request::Debug { uid, container } => self.debug(&uid, *container),
            Request::Exited { uid, status } => self.on_exited(&uid, *status),
            Request::OomKilled(update) => self.on_oom_killed(update),
            Request::Enacted { uid, amounts } => self.on_enacted(&uid, amounts),
        }
    }

    fn on_probe(&mut self, update: &ProbeUpdate) {
        let Some(managed) = self.pods.get_mut(&update.uid) else { return };
        let facts = managed.kept.probes.entry(update.container_id.clone()).or_default();
        let success = update.result == ProbeResult::Success;
        match update.kind {
            ProbeKind::Readiness => facts.ready = Some(success),
            ProbeKind::Startup => facts.started = Some(success),
            ProbeKind::Liveness => {}
        }
        // A container that has ended by itself counts by its exit code.
        let has_exited = |seen: &Arc<Observation>| {
            seen.containers.contains_key(&update.container_id) && !seen.is_running(&update.container_id)
        };
        if update.restart && managed.seen.as_ref().is_some_and(has_exited) {
            debug!(pod = %managed.name, container = update.container, "a probe condemned a container that has ended");
        } else if update.restart {
            let reason =
                if update.kind == ProbeKind::Startup { KillReason::Startup } else { KillReason::Liveness };
            managed.control.send_modify(|c| {
                c.verdicts.condemned.insert(update.container_id.clone(), reason);
            });
        } else if update.kind == ProbeKind::Startup && success {
            managed.control.send_modify(|c| {
                c.verdicts.started.insert(update.container_id.clone());
            });
        }
        if let (ProbeKind::Readiness, Some(kernel_ns)) = (update.kind, update.kernel_ns) {
            managed.kept.edge = Some(ReadinessEdge {
                container: update.container.clone(),
                ready: success,
                kernel_ns,
                published_ns: monotonic_ns(),
            });
        }
        self.publish(&update.uid);
    }

    /// Computes a pod's status anew and publishes it if it changed.
    fn publish(&mut self, uid: &str) {
        if !self.is_shadowed(uid) {
            self.publish_status(uid);
        }
        self.note(uid);
    }

    /// Brings what is known of all pods up to date with one that may have changed, or is gone.
    fn note(&mut self, uid: &str) {
        let share = self.pods.get(uid).map(Managed::share);
        self.due.active |= self.totals.set(uid, share);
    }

    fn publish_status(&mut self, uid: &str) {
        let Some(managed) = self.pods.get_mut(uid) else { return };
        let mut status = managed.status_now(&self.parts);
        if managed.seen.is_some() {
            self.parts.deps.devices.plugins.annotate(uid, &mut status);
            self.parts.deps.devices.claims.annotate(&managed.pod, &mut status);
            remember(&managed.control, &status);
        }
        managed.note_claims(&mut status);
        managed.note_gates(&mut status);
        managed.note_generation(&mut status);
        self.parts.deps.reports.metrics.startup.record(uid, &managed.pod, &status, Timestamp::now());
        managed.kept.status = Some(Arc::new(status.clone()));
        managed.note_start();
        if managed.is_over() && managed.kept.failure.is_none() {
            // The pod does not start again when the runtime forgets how it ended.
            managed.control.send_if_modified(|c| !std::mem::replace(&mut c.ended, true));
        }
        if let Some(ended) = managed.gone() {
            self.parts.deps.admission.released(uid, ended);
        }
        managed.keep_pod();
        let entry = PodEntry {
            pod: core::Pod { status: Some(status), ..(*managed.pod).clone() },
            readiness_edge: managed.kept.edge.clone(),
            netns: managed.kept.netns.clone(),
            ending: managed.terminating() || managed.kept.failure.is_some(),
            stopped: managed.has_stopped(),
            cleared: managed.is_cleared(),
            abandoned: managed.kept.abandoned,
            successor: managed.successor.as_ref().map(|successor| Arc::clone(&successor.entry)),
            refusal: managed.kept.failure.as_ref().and_then(|failure| failure.refusal),
        };
        if self.table.pods.get(&managed.name).is_none_or(|known| **known != entry) {
            Arc::make_mut(&mut self.table).pods.insert(managed.name.clone(), Arc::new(entry));
            self.due.table = true;
        }
        self.parts.records.set(uid, managed.kept.clone());
    }

    /// Publishes what has changed in this turn.
    fn publish_changes(&mut self) {
        if std::mem::take(&mut self.due.processes) {
            self.publish_processes();
        }
        if std::mem::take(&mut self.due.table) {
            self.parts.table.send_replace(Arc::clone(&self.table));
            self.parts.deps.reports.metrics.show(&self.table);
            self.parts.deps.reports.metrics.count(self.totals.working());
        }
        debug_assert_eq!(self.totals, self.whole(), "a change of a pod was not noted");
    }

    /// What is known of all pods together, from all of them.
    fn whole(&self) -> Totals {
        let mut totals = Totals::default();
        for (uid, managed) in &self.pods {
            totals.set(uid, Some(managed.share()));
        }
        totals
    }

    /// Returns true if it is on its way out while another pod has its name: readers see that one.
    fn is_shadowed(&self, uid: &str) -> bool {
        let Some(managed) = self.pods.get(uid).filter(|m| m.terminating()) else { return false };
        self.pods.iter().any(|(other, m)| other != uid && m.name == managed.name && !m.terminating())
    }

    fn unpublish(&mut self, name: &PodName, uid: &str) {
        // Another pod may have the name by now.
        let is_its = |entry: &Arc<PodEntry>| entry.pod.metadata.uid.as_deref() == Some(uid);
        if self.table.pods.get(name).is_some_and(is_its) {
            Arc::make_mut(&mut self.table).pods.remove(name);
            self.due.table = true;
        }
    }
}

/// How often a pod's manifest was put back so far.
fn put_back(desired: &Desired, uid: &str) -> u64 {
    desired.put_back.get(uid).copied().unwrap_or_default()
}

fn manifest_of(pod: &core::Pod) -> Option<PathBuf> {
    pod.metadata.annotations.as_ref()?.get(beelet_model::labels::MANIFEST).map(PathBuf::from)
}

fn hash_of(pod: &core::Pod) -> Option<String> {
    pod.metadata.annotations.as_ref()?.get(ANNOTATION_HASH).cloned()
}

/// As much of a pod as its termination needs.
fn pod_of_orphan(uid: &str, orphan: &RuntimePod) -> core::Pod {
    core::Pod {
        metadata: ObjectMeta {
            name: Some(orphan.name.name.clone()),
            namespace: Some(orphan.name.namespace.clone()),
            uid: Some(uid.to_owned()),
            deletion_timestamp: Some(Time(whole_second(Timestamp::now()))),
            ..Default::default()
        },
        spec: Some(core::PodSpec {
            termination_grace_period_seconds: i64::try_from(orphan.grace.as_secs()).ok(),
            ..Default::default()
        }),
        status: None,
    }
}

/// Until a time, or for ever.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
