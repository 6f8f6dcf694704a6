//! The task that owns all probes: it syncs them with the pods, runs due checks, and publishes changes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_base::{simulation, work::Work};
use beelet_policy::probe::{Outcome, ProbeKind, Suspension, Transition, listener::Verdict};
use futures::FutureExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::{
    runtime::Builder,
    sync::{mpsc, oneshot, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::{
    Settings,
    alarm::Alarm,
    answer::Answer,
    ask::Probers,
    canary,
    direct::Direct,
    handle::Commands,
    ids::{Id, Key},
    listening,
    metrics::Metrics,
    target::{TargetError, pod_ip, probes_of},
    timetable::Timetable,
    worker::{Change, Hint, Method, Worker, now},
    workers::Workers,
};
use beelet_bpf::{CheckedNetns, Checker, Edges, KernelError, Listeners};
use beelet_cri::Runtime;
use beelet_model::{
    request::{ProbeUpdate, Request},
    table::{PodChanges, PodEntry, PodName, PodTable, Pods},
};
use beelet_state::events::{Object, Recorder};

/// Capacity of the channel of answers to the task. A sender waits while it is full.
const ANSWERS: usize = 256;

/// Dependencies of the probes.
#[derive(Debug)]
pub struct Parts {
    /// The pods with their status.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Receiver of changed results.
    pub requests: mpsc::Sender<Request>,
    /// The container runtime, for commands.
    pub runtime: Option<Runtime>,
    /// The kernel's listeners, if programs record them.
    pub listeners: Option<Listeners>,
    /// Lookup of listeners, if the kernel allows it.
    pub checker: Option<Checker>,
    /// The kernel's edges.
    pub edges: Edges,
    /// Commands to this task.
    pub commands: Commands,
    /// The node's defaults for probes.
    pub settings: Settings,
    /// Recorder of events.
    pub events: Recorder,
    /// Counters.
    pub metrics: Metrics,
    /// Socket of the helper that runs commands.
    pub exec_socket: PathBuf,
    /// Async runtime of the checks that wait for an answer.
    pub asking: tokio::runtime::Handle,
}

/// The reason for which a probe asks something that may take a while to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A check. A connection to an application whose listener the kernel knows is a canary: followed until
    /// the application accepts it.
    Check,
    /// A check that the kernel was to answer and can't.
    Instead,
    /// The kernel has no listener on the port and never had one: a connection decides.
    Confirm,
}

/// A probe's answer, sent by the task that waited for it.
#[derive(Debug)]
struct Finished {
    id: Id,
    container_id: String,
    revision: u64,
    purpose: Purpose,
    answer: Answer,
    latency: Duration,
}

/// The network namespace of a pod, or the host's own.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Netns {
    Host,
    Pod(PathBuf),
}

impl Netns {
    fn of(entry: &PodEntry) -> Self {
        entry.netns.clone().map_or(Self::Host, Self::Pod)
    }

    fn path(&self) -> &Path {
        match self {
            Self::Host => Path::new("/proc/self/ns/net"),
            Self::Pod(path) => path,
        }
    }
}

/// Owns every probe of the node; runs as one task on a thread of its own.
#[derive(Debug)]
pub struct Probes {
    pub(super) parts: Parts,
    known: Pods,
    ids: BTreeMap<Key, Id>,
    pub(super) workers: Workers,
    pub(super) timetable: Timetable,
    /// Probes that the kernel answers, by namespace cookie and port.
    pub(super) by_port: BTreeMap<(u64, u16), BTreeSet<Id>>,
    namespaces: HashMap<Netns, Arc<CheckedNetns>>,
    pub(super) probers: Probers,
    finished_in: mpsc::Receiver<Finished>,
    finished_out: mpsc::Sender<Finished>,
}

impl Probes {
    /// Returns the owner without probes yet.
    pub fn new(parts: Parts) -> Self {
        let (finished_out, finished_in) = mpsc::channel(ANSWERS);
        let fallbacks = parts.metrics.exec_fallbacks.clone();
        let direct =
            parts.runtime.clone().map(|runtime| Direct::new(runtime, parts.exec_socket.clone(), fallbacks));
        Self {
            probers: Probers::new(parts.runtime.clone(), direct),
            parts,
            known: Pods::new(),
            ids: BTreeMap::new(),
            workers: Workers::default(),
            timetable: Timetable::default(),
            by_port: BTreeMap::new(),
            namespaces: HashMap::new(),
            finished_in,
            finished_out,
        }
    }

    /// Runs the probes until `shutdown`, or until this future is dropped: on a thread of its own, since
    /// wake-ups are most of the cost of a regular check, and a runtime of several threads wakes two. In a
    /// simulation, runs them as a task of the simulation's thread.
    pub fn run(self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            let stop = shutdown.child_token();
            let _stop_with_us = stop.clone().drop_guard();
            if simulation::is_on() {
                match Alarm::new() {
                    Ok(alarm) => self.work(alarm, stop).await,
                    Err(error) => error!(%error, "cannot run probes: no timer"),
                }
                return;
            }
            let (running, ended) = oneshot::channel::<()>();
            let thread = Builder::new_current_thread().enable_io().build().and_then(|runtime| {
                let alarm = {
                    let _here = runtime.enter();
                    Alarm::new()?
                };
                let work = move || {
                    let _running = running;
                    runtime.block_on(self.work(alarm, stop));
                };
                std::thread::Builder::new().name("probes".to_owned()).spawn(work)
            });
            match thread {
                Ok(thread) => {
                    // The thread sends nothing; the channel closes when it ends.
                    let _ = ended.await;
                    if let Err(panic) = thread.join() {
                        std::panic::resume_unwind(panic);
                    }
                }
                Err(error) => error!(%error, "cannot run probes: no thread or timer"),
            }
        })
    }

    async fn work(mut self, mut alarm: Alarm, shutdown: CancellationToken) {
        let wake = self.parts.edges.wake();
        self.sync().await;
        loop {
            let next = self.timetable.next();
            tokio::select! {
                // Edges first: users wait for their effect.
                biased;
                () = shutdown.cancelled() => return,
                () = wake.notified() => self.drain_edges().await,
                Some(finished) = self.finished_in.recv() => self.on_finished(finished).await,
                changed = self.parts.table.changed() => {
                    if changed.is_err() { return }
                    self.sync().await;
                }
                rung = alarm.until(next) => match rung {
                    Ok(()) => self.on_time().await,
                    Err(error) => return error!(%error, "cannot run probes any more: the timer failed"),
                },
                Some(command) = self.parts.commands.recv() => {
                    // The client may have seen newer pods.
                    if self.parts.table.has_changed().unwrap_or(false) {
                        self.sync().await;
                    }
                    self.on_command(command);
                }
            }
        }
    }

    /// Syncs the probes with the pods. Skips entries that are the same `Arc` as before.
    async fn sync(&mut self) {
        let table = Arc::clone(&self.parts.table.borrow_and_update());
        let known = std::mem::replace(&mut self.known, table.pods.clone());
        let changes = PodChanges::between(&known, &table.pods);
        let mut left_one = !changes.gone.is_empty();
        for (_, entry) in changes.gone {
            self.forget(entry, None);
        }
        for (name, entry) in changes.changed {
            let before = known.get(name);
            // Another pod of that name, or the same pod after a cancelled termination, starts from the
            // beginning.
            if let Some(before) = before
                && (before.pod.metadata.uid != entry.pod.metadata.uid || before.ending && !entry.ending)
            {
                self.forget(before, None);
            }
            left_one |= before.is_some_and(|before| before.netns != entry.netns);
            let is_known = before.is_some_and(|before| before.pod.metadata.uid == entry.pod.metadata.uid);
            self.sync_pod(entry, is_known).await;
        }
        if left_one {
            let used: BTreeSet<Netns> = self.known.values().map(|entry| Netns::of(entry)).collect();
            self.namespaces.retain(|netns, _| used.contains(netns));
        }
    }

    /// Drops the probes of a pod: of all its containers, or of those without probes now.
    fn forget(&mut self, entry: &PodEntry, keep: Option<&BTreeSet<Key>>) {
        let uid = entry.pod.metadata.uid.clone().unwrap_or_default();
        // No container is named "", so the pod's keys follow this one.
        let first = Key { uid: uid.into(), container: "".into(), kind: ProbeKind::Liveness };
        let of_pod = self.ids.range(&first..).take_while(|(key, _)| key.uid == first.uid);
        let gone = of_pod.filter(|(key, _)| keep.is_none_or(|keep| !keep.contains(key)));
        let gone: Vec<(Key, Id)> = gone.map(|(key, id)| (key.clone(), *id)).collect();
        for (key, id) in gone {
            self.ids.remove(&key);
            self.leave_port(id);
            if let Some(mut worker) = self.workers.remove(id) {
                if let Some(asking) = worker.asking.take() {
                    asking.abort();
                }
                if let (Some(direct), Some(container)) = (self.probers.direct(), &worker.container_id) {
                    direct.forget(container);
                }
                if keep.is_some() && !entry.ending {
                    self.report_change(&worker, "removed");
                }
                self.count_fallback(worker.method(), -1);
                self.timetable.remove(id, &mut worker.hot.due);
                self.parts.metrics.forget(&worker.hot.tally);
            }
        }
    }

    /// Syncs the probes of a pod; `is_known` is true if the pod has been synced before.
    async fn sync_pod(&mut self, entry: &Arc<PodEntry>, is_known: bool) {
        if entry.ended().is_some() {
            self.forget(entry, None);
            return;
        }
        let Some(spec) = &entry.pod.spec else { return };
        let uid: Arc<str> = entry.pod.metadata.uid.clone().unwrap_or_default().into();
        let mut wanted = BTreeSet::new();
        let sidecars = spec.init_containers.iter().flatten().filter(|c| beelet_policy::pod::is_sidecar(c));
        for container in spec.containers.iter().chain(sidecars) {
            for (kind, probe) in probes_of(container) {
                let key = Key { uid: Arc::clone(&uid), container: container.name.as_str().into(), kind };
                wanted.insert(key.clone());
                let (id, added) = match self.ids.get(&key).copied() {
                    Some(id) => {
                        if !entry.ending {
                            self.change(&entry.pod, container, id, probe);
                        }
                        (id, false)
                    }
                    None => match self.add(&entry.pod, container, key, probe) {
                        Some(id) => (id, is_known),
                        None => continue,
                    },
                };
                self.sync_container(entry, id, added).await;
            }
        }
        self.forget(entry, Some(&wanted));
    }

    /// Applies a changed probe of a running pod (KEP-6318, `MutableContainerProbes`).
    fn change(&mut self, pod: &core::Pod, container: &core::Container, id: Id, probe: &core::Probe) {
        let Some(worker) = self.workers.get(id).filter(|worker| !worker.is_of(pod, container, probe)) else {
            return;
        };
        let key = worker.key.clone();
        let new = match Worker::new(pod, container, key, probe, &self.parts.settings, &self.parts.metrics) {
            Ok(new) => new,
            Err(error) => return self.report_unusable(pod, container, worker.key.kind, &error),
        };
        self.parts.metrics.forget(&new.hot.tally);
        self.report_problems(pod, container, &new);
        self.leave_port(id);
        let Some(worker) = self.workers.get_mut(id) else { return };
        let (now, change) = (now(), worker.reconfigure(new));
        match change {
            Change::Question => {
                let before = worker.choose(Method::Undecided);
                worker.netns = None;
                worker.hot.regular = now;
                self.timetable.set(id, &mut worker.hot.due, now);
                self.count_fallback(&before, -1);
            }
            // The next check is one period after the last one, or at once.
            Change::Period if worker.state.gate.has_counted() => {
                worker.hot.regular = worker.hot.looked.0.saturating_add(worker.hot.period).max(now);
                self.timetable.set(id, &mut worker.hot.due, worker.hot.regular);
            }
            Change::Counting if worker.state.gate.has_counted() => {}
            // Perhaps the initial delay is over now. A check that is not due yet costs nothing.
            Change::Period | Change::Counting => {
                worker.hot.regular = now;
                self.timetable.set(id, &mut worker.hot.due, now);
            }
        }
        self.enter_port(id);
        if let Some(worker) = self.workers.get(id) {
            self.report_change(worker, "updated");
        }
    }

    /// Records that a change of a probe is in force, with the KEP's reason.
    fn report_change(&self, worker: &Worker, action: &str) {
        let kind = worker.key.kind.name();
        info!(pod = %worker.name, container = %worker.key.container, kind, action, "probe changed in place");
        let message = format!("Container {}: {kind} probe {action}", worker.key.container);
        self.parts.events.normal(worker.object(), "ContainerProbeChanged", message);
    }

    fn report_unusable(
        &self,
        pod: &core::Pod,
        container: &core::Container,
        kind: ProbeKind,
        error: &TargetError,
    ) {
        let message = format!("{} probe can't be run: {error}", kind.title());
        self.parts.events.warning(Object::container(pod, &container.name), "Unhealthy", message);
    }

    fn report_problems(&self, pod: &core::Pod, container: &core::Container, worker: &Worker) {
        let kind = worker.key.kind.title();
        for problem in &worker.problems {
            warn!(pod = %worker.name, container = container.name, "{problem}");
            let message = format!("{kind} probe warning: {problem}");
            self.parts.events.warning(Object::container(pod, &container.name), "ProbeWarning", message);
        }
    }

    fn add(
        &mut self,
        pod: &core::Pod,
        container: &core::Container,
        key: Key,
        probe: &core::Probe,
    ) -> Option<Id> {
        let kind = key.kind;
        let made = Worker::new(pod, container, key.clone(), probe, &self.parts.settings, &self.parts.metrics);
        let worker = match made {
            Ok(worker) => worker,
            Err(error) => {
                // Once per change of the pod, and counted as one event.
                self.report_unusable(pod, container, kind, &error);
                return None;
            }
        };
        self.report_problems(pod, container, &worker);
        let id = self.workers.insert(worker);
        self.ids.insert(key, id);
        Some(id)
    }

    /// Syncs a probe with its container. A probe that was `added` to a known pod starts with its initial
    /// result.
    async fn sync_container(&mut self, entry: &PodEntry, id: Id, added: bool) {
        let now = now();
        let chosen = self.choose_method(entry, id);
        let Some(worker) = self.workers.get_mut(id) else { return };
        worker.ip = pod_ip(&entry.pod);
        let status = container_status(&entry.pod, &worker.key.container);
        let running = status.and_then(|s| s.state.as_ref()?.running.as_ref());
        let container = status.and_then(|s| s.container_id.as_deref()).map(bare_id);
        let mut transitions = Vec::new();
        match (running, container) {
            (Some(running), Some(container)) if worker.container_id.as_ref() != Some(&container) => {
                let started_at = running.started_at.as_ref().map_or(now, |t| since_boot(t.0, now));
                let settled = status.is_some_and(|s| match worker.key.kind {
                    ProbeKind::Readiness => s.ready && !added,
                    ProbeKind::Startup => s.started == Some(true),
                    ProbeKind::Liveness => false,
                });
                // The container is from before a restart of the agent: its state continues.
                let taken_over = worker.container_id.is_none() && settled;
                if taken_over {
                    worker.resume(started_at);
                    worker.since = since_of(&entry.pod, worker.key.kind);
                } else {
                    transitions.extend(worker.state.container_started(now, started_at));
                }
                if let (Some(direct), Some(before)) = (self.probers.direct(), &worker.container_id) {
                    direct.forget(before);
                }
                worker.start(container, now);
                let at = worker.plan(started_at, now, taken_over);
                if taken_over {
                    // An edge may have come while no agent ran.
                    worker.edge = Some((Hint::Missed, monotonic(now)));
                }
                self.timetable.set(id, &mut worker.hot.due, at);
            }
            (None, _) => transitions.extend(worker.state.container_stopped(now)),
            // The network namespace of a container from before the restart is known only now.
            (Some(_), Some(_)) if chosen && worker.in_kernel().is_some() => {
                worker.edge = Some((Hint::Missed, monotonic(now)));
                self.timetable.set(id, &mut worker.hot.due, now);
            }
            _ => {}
        }
        if entry.ending {
            transitions.extend(worker.state.pod_deleted(now));
        }
        if worker.key.kind != ProbeKind::Startup && status.is_some_and(|s| s.started == Some(true)) {
            let was_due = worker.state.due(now);
            worker.state.gate.startup_succeeded();
            if !was_due && worker.state.due(now) {
                self.timetable.set(id, &mut worker.hot.due, now);
            }
        }
        if added && let Some(worker) = self.workers.get(id).filter(|worker| worker.container_id.is_some()) {
            self.report_change(worker, "added");
        }
        for transition in transitions {
            self.send(id, transition, None).await;
        }
    }

    /// Chooses the source of a probe's answers as soon as possible, and again if the pod's network namespace
    /// changes. Returns true if it was chosen now.
    fn choose_method(&mut self, entry: &PodEntry, id: Id) -> bool {
        let Some(worker) = self.workers.get(id) else { return false };
        if !matches!(worker.method(), Method::Undecided) {
            if entry.netns.is_none() || worker.netns == entry.netns {
                return false;
            }
            self.leave_port(id);
        }
        let Some(worker) = self.workers.get(id) else { return false };
        let method = if !worker.wants_kernel() {
            Method::Ask(None)
        } else if self.parts.checker.is_none() && self.parts.listeners.is_none() {
            Method::Ask(Some("the kernel half is off (see `beelet doctor`)".to_owned()))
        } else if let Some(class) = worker.runtime_class() {
            Method::Ask(Some(format!(
                "a pod of runtime class `{class}` may have sockets that the node's kernel does not see; if it has \
                 none, annotate the pod with `beelet.dev/probes: mode=kernel`"
            )))
        } else {
            let on_host = entry.pod.spec.as_ref().is_some_and(|s| s.host_network == Some(true));
            if entry.netns.is_none() && !on_host {
                return false; // unknown before the sandbox runs
            }
            match self.namespace(Netns::of(entry)) {
                Ok(netns) => Method::Kernel(netns),
                Err(error) => {
                    warn!(pod = %PodName::of(&entry.pod), %error, "the kernel can't answer this pod's TCP probes; they connect");
                    Method::Ask(Some(error.to_string()))
                }
            }
        };
        self.count_fallback(&method, 1);
        let Some(worker) = self.workers.get_mut(id) else { return false };
        worker.netns.clone_from(&entry.netns);
        let before = worker.choose(method);
        self.enter_port(id);
        self.count_fallback(&before, -1);
        true
    }

    /// Adds `more` to the count of fallbacks, if the method is one: the probe connects although the kernel
    /// should answer.
    fn count_fallback(&self, method: &Method, more: i64) {
        if matches!(method, Method::Ask(Some(_))) {
            self.parts.metrics.fallbacks.inc_by(more);
        }
    }

    fn namespace(&mut self, netns: Netns) -> Result<Arc<CheckedNetns>, KernelError> {
        if let Some(known) = self.namespaces.get(&netns) {
            return Ok(Arc::clone(known));
        }
        let opened = Arc::new(CheckedNetns::open(netns.path(), self.parts.checker.as_ref())?);
        self.namespaces.insert(netns, Arc::clone(&opened));
        Ok(opened)
    }

    fn enter_port(&mut self, id: Id) {
        let place = self.workers.get(id).and_then(Worker::in_kernel);
        if let Some((netns, port)) = place {
            let place = (netns.handle().cookie(), port);
            self.by_port.entry(place).or_default().insert(id);
        }
    }

    fn leave_port(&mut self, id: Id) {
        let place = self.workers.get(id).and_then(Worker::in_kernel);
        let Some(place) = place.map(|(netns, port)| (netns.handle().cookie(), port)) else { return };
        if let Some(ids) = self.by_port.get_mut(&place) {
            ids.remove(&id);
            if ids.is_empty() {
                self.by_port.remove(&place);
            }
        }
    }

    /// Runs all due checks.
    async fn on_time(&mut self) {
        let now = now();
        let (mut by_kernel, mut ask) = (Vec::new(), Vec::new());
        for id in self.timetable.pop_due(now) {
            if let Some(hot) = self.workers.steady_mut(id).filter(|hot| now < hot.canary_due) {
                hot.again(id, &mut self.timetable, now, true);
                by_kernel.push(id);
                continue;
            }
            let Some(worker) = self.workers.get_mut(id) else { continue };
            let in_kernel = worker.in_kernel().is_some();
            worker.hot.again(id, &mut self.timetable, now, in_kernel);
            // A held or not yet due probe keeps its place in the timetable; one in flight has had its turn.
            if worker.in_flight || !worker.state.due(now) {
                continue;
            }
            if in_kernel && !worker.takes_canary(now) {
                by_kernel.push(id);
            } else {
                ask.push(id);
            }
        }
        self.poll(&by_kernel).await;
        for id in ask {
            self.launch(id, Purpose::Check);
        }
    }

    /// Starts a check that waits for an answer, in a task of its own.
    pub(super) fn launch(&mut self, id: Id, purpose: Purpose) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        let Some(question) = worker.question() else { return };
        worker.in_flight = true;
        let follows = purpose == Purpose::Check;
        let canary = worker.in_kernel().filter(|_| follows).map(|(netns, port)| (Arc::clone(netns), port));
        let canary = canary.zip(worker.ip).zip(self.parts.checker.clone());
        if canary.is_some() {
            self.parts.metrics.canaries.inc();
        }
        let (probers, finished) = (self.probers.clone(), self.finished_out.clone());
        let revision = worker.revision;
        let task = self.parts.asking.spawn(async move {
            let started = Instant::now();
            let asked = async {
                match canary {
                    Some((((netns, port), ip), checker)) => {
                        let address = (ip, port).into();
                        (canary::send(&checker, &netns, address, question.within).await, started.elapsed())
                    }
                    None => probers.ask(&question).await,
                }
            };
            // An answer must come in any case: without it this probe would never run again.
            let asked = AssertUnwindSafe(asked).catch_unwind().await;
            let (answer, latency) = asked.unwrap_or_else(|_| {
                (Answer::error("the probe panicked, which is a bug: see the log"), started.elapsed())
            });
            let container_id = question.container_id;
            // The receiver is closed if the agent is stopping.
            let _ = finished.send(Finished { id, container_id, revision, purpose, answer, latency }).await;
        });
        worker.asking = Some(task.abort_handle());
    }

    async fn on_finished(&mut self, finished: Finished) {
        let Some(worker) = self.workers.get_mut(finished.id) else { return };
        let Finished { id, container_id, revision, purpose, answer, latency } = finished;
        // The answer to another question, which was asked before the probe was changed.
        if revision != worker.revision {
            return;
        }
        worker.in_flight = false;
        worker.asking = None;
        // An answer of a previous container does not apply to the current one.
        if worker.container_id.as_ref() != Some(&container_id) {
            worker.edge = None;
            return;
        }
        match purpose {
            Purpose::Check | Purpose::Instead => self.record(id, &answer, latency).await,
            Purpose::Confirm => self.confirmed(id, &answer, latency).await,
        }
    }

    /// A connection has decided for a port on which the kernel never had a listener. If it succeeded, the
    /// application's sockets are out of the kernel's sight, and the probe connects from now on.
    async fn confirmed(&mut self, id: Id, answer: &Answer, latency: Duration) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        let Some((_, port)) = worker.in_kernel() else { return self.record(id, answer, latency).await };
        // A listener came while the connection was under way: its edge has been judged.
        if worker.has_seen_listener {
            return;
        }
        match (answer.outcome, worker.edge) {
            (Outcome::Failure, Some(_)) => self.judge_edge(id, false).await,
            (Outcome::Failure, None) => {
                self.record(id, &listening::answer(Verdict::NotListening, port), latency).await;
            }
            (Outcome::Error, _) => {
                worker.edge = None;
                self.record(id, answer, latency).await;
            }
            (Outcome::Success, _) => {
                worker.edge = None;
                self.fall_back(id, port);
                self.record(id, answer, latency).await;
            }
        }
    }

    /// Lets a probe connect from now on, and says so once.
    fn fall_back(&mut self, id: Id, port: u16) {
        let why = format!(
            "the kernel has no listener on port {port} in the pod's network namespace, but a connection succeeds"
        );
        self.leave_port(id);
        let method = Method::Ask(Some(why.clone()));
        self.count_fallback(&method, 1);
        let Some(worker) = self.workers.get_mut(id) else { return };
        worker.choose(method);
        let message = format!("{} probe connects from now on: {why}", worker.key.kind.title());
        info!(pod = %worker.name, container = %worker.key.container, "{message}");
        self.parts.events.normal(worker.object(), "ProbeFellBack", message);
    }

    /// Counts an outcome, publishes it, and judges it.
    pub(super) async fn record(&mut self, id: Id, answer: &Answer, latency: Duration) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        worker.count(answer, latency);
        let now = now();
        // The check was in flight when the pod's termination began.
        let ending = worker.state.held(now) == Some(Suspension::Deleted);
        let transition = worker.state.record(now, answer.outcome);
        if !ending {
            self.record_event(id, answer);
        }
        if let Some(transition) = transition {
            self.send(id, transition, None).await;
        }
    }

    /// Records an event, in the kubelet's words (pkg/kubelet/prober/prober.go).
    pub(super) fn record_event(&self, id: Id, answer: &Answer) {
        let Some(worker) = self.workers.get(id) else { return };
        // A command's output ends with a newline.
        let (kind, detail) = (worker.key.kind.title(), answer.detail.trim_end());
        let (reason, message) = match answer.outcome {
            Outcome::Success if answer.warning => ("ProbeWarning", format!("{kind} probe warning: {detail}")),
            Outcome::Success => return,
            Outcome::Failure => ("Unhealthy", format!("{kind} probe failed: {detail}")),
            Outcome::Error => {
                ("Unhealthy", format!("{kind} probe errored and resulted in unknown state: {detail}"))
            }
        };
        debug!(pod = %worker.name, container = %worker.key.container, message, "probe did not succeed");
        self.parts.events.warning(worker.object(), reason, message);
    }

    /// Notifies the pods' manager of a change.
    pub(super) async fn send(&mut self, id: Id, transition: Transition, kernel_ns: Option<u64>) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        worker.since = Some(Timestamp::now());
        let Some(container_id) = worker.container_id.clone() else { return };
        if transition.restart {
            let reason = worker.last.as_ref().map(|check| check.detail.as_str()).unwrap_or_default();
            warn!(pod = %worker.name, container = %worker.key.container, kind = worker.key.kind.name(), reason,
                "probe failed; the container must restart");
        }
        let update = ProbeUpdate {
            uid: worker.key.uid.to_string(),
            container: worker.key.container.to_string(),
            container_id,
            kind: worker.key.kind,
            result: transition.result,
            restart: transition.restart,
            kernel_ns,
        };
        // The manager ends only with the agent.
        let _ = self.parts.requests.send(Request::Probe(update)).await;
    }

    /// Finds the probe of a container; the pod's name may omit the `-NODE` suffix of static pods.
    pub(super) fn find(&self, namespace: &str, pod: &str, container: &str, kind: ProbeKind) -> Vec<Id> {
        let of = |exact: bool| {
            self.workers.iter().filter(move |(_, worker)| {
                let name = &worker.name.name;
                let fits = if exact {
                    name == pod
                } else {
                    name.strip_prefix(pod).is_some_and(|rest| rest.starts_with('-'))
                };
                fits && (namespace.is_empty() || worker.name.namespace == namespace)
                    && *worker.key.container == *container
                    && worker.key.kind == kind
            })
        };
        let exact: Vec<Id> = of(true).map(|(id, _)| id).collect();
        if exact.is_empty() { of(false).map(|(id, _)| id).collect() } else { exact }
    }
}

fn container_status<'a>(pod: &'a core::Pod, name: &str) -> Option<&'a core::ContainerStatus> {
    let status = pod.status.as_ref()?;
    let all =
        status.container_statuses.iter().flatten().chain(status.init_container_statuses.iter().flatten());
    all.into_iter().find(|c| c.name == name)
}

/// Returns the time of the last change of a resumed probe's result, from the pod's status.
fn since_of(pod: &core::Pod, kind: ProbeKind) -> Option<Timestamp> {
    let wanted = if kind == ProbeKind::Readiness { "ContainersReady" } else { "Initialized" };
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    Some(conditions.iter().find(|c| c.type_ == wanted)?.last_transition_time.as_ref()?.0)
}

/// Returns `containerd://<id>` without the runtime's name.
fn bare_id(id: &str) -> String {
    id.split_once("://").map_or(id, |(_, bare)| bare).to_owned()
}

/// Converts a time to the clock of edges.
pub(super) fn monotonic(at: Duration) -> u64 {
    u64::try_from(at.as_nanos()).unwrap_or(u64::MAX)
}

/// Converts a wall-clock time in the past to the clock of `ProbeState`.
fn since_boot(at: Timestamp, now: Duration) -> Duration {
    let ago = Duration::try_from(Timestamp::now().duration_since(at)).unwrap_or(Duration::ZERO);
    now.saturating_sub(ago)
}
