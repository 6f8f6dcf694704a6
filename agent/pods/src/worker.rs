//! The worker of one pod: looks at what the runtime has, lets `policy` decide, does it, and looks again,
//! until the pod is terminated. It remembers nothing that it could not see again, so it may be killed
//! between any two steps.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::{
    blocking::BlockingTasks,
    chance::chance,
    clock::After as _,
    spans::{self, TARGET},
};
use beelet_policy::pod::{self, Actions, KillReason, StartFailure, Verdicts};
use beelet_proto::cri;
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tracing::{Instrument, debug, info, trace_span, warn};

use super::{
    error::{Error, StartError},
    launch::Launcher,
    metrics,
    plan::PodPlan,
    runtime_view::{self, Foreknown, Made, Observation, Observer},
    status::Waiting,
};
use beelet_cri::Runtime;
use beelet_model::{origin::Origin, request::Listed, table::PodName};
use beelet_spec::{cri_config::dns_warnings, definition};
use beelet_state::events::Object;

mod devices;
mod ending;
mod ends;
mod hooks;
mod last_words;
mod room;
mod stop;
mod supervise;

use devices::Grant;
pub(super) use ending::Terminate;
use ends::Ends;
use stop::Window;

/// The first pause after a failed step; it doubles up to [`RETRY_MAX`].
const RETRY_INITIAL: Duration = Duration::from_secs(1);
/// The longest pause after a failed step. A change that the runtime reports ends it early.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// What the manager wants of a worker. A state, not a queue: only the newest counts.
#[derive(Clone, Debug, Default)]
pub(super) struct Control {
    /// Set once the pod must go: everything is stopped and removed.
    pub terminate: Option<Terminate>,
    /// Set once the pod must give everything back, and not start again while this stands: it was ended for
    /// good, or is deleted.
    pub failed: Option<Terminate>,
    /// All containers of the pod have ended for good: none is started again, even when the runtime's records
    /// of them are collected as garbage.
    pub ended: bool,
    /// The pod as it is now, once it was changed while it runs.
    pub updated: Option<Arc<core::Pod>>,
    /// What probes say.
    pub verdicts: Verdicts,
    /// The restart counts with which containers begin that the runtime knows nothing of: they ran before.
    pub counts: Arc<BTreeMap<String, u32>>,
    /// Counts the changes that the runtime reported.
    pub changes: u64,
    /// What it listed of the pod with the last of them, and when it was asked.
    pub listed: Option<(Instant, Arc<Listed>)>,
    /// Counts the changes of ConfigMaps and Secrets that the pod refers to.
    pub objects: u64,
    /// Counts the requests to start again at once what could not be started.
    pub hurries: u64,
    /// The runtime's word on containers that were last seen running, and have ended.
    pub exited: BTreeMap<String, Arc<cri::ContainerStatus>>,
}

impl Control {
    /// Returns true if the pod has been changed since it was `known`.
    fn is_newer_than(&self, known: &Arc<core::Pod>) -> bool {
        self.updated.as_ref().is_some_and(|pod| !Arc::ptr_eq(pod, known))
    }
}

/// How far a pod's end has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It runs, or is still being stopped.
    Here,
    /// It has ended for good, and nothing of it runs any more: what is left of it may take its time.
    Stopped,
    /// It has ended for good and given everything back: nothing of it is in the runtime, its cgroup and its
    /// volumes are gone. Its logs stay.
    Cleared,
    /// Nothing is left of it, and this was the last report.
    Gone,
}

/// What a worker tells the manager after each look.
#[derive(Clone, Debug)]
pub(super) struct WorkerReport {
    /// The pod.
    pub uid: String,
    /// What the runtime has.
    pub seen: Arc<Observation>,
    /// Why containers aren't running, by name.
    pub waiting: BTreeMap<String, Waiting>,
    /// Containers whose postStart hook is done, by identifier.
    pub hooked: BTreeSet<String>,
    /// Containers that have ended because they were stopped here, by identifier.
    pub stopped: BTreeSet<String>,
    /// How far its end has come.
    pub stage: Stage,
}

/// A try to start a container that failed.
#[derive(Clone, Debug)]
struct FailedStart {
    waiting: Waiting,
    failure: StartFailure,
    tries: u32,
    delay: Duration,
    retry_at: Instant,
    /// What it needs could not be made: another ConfigMap or Secret may be all that is missing.
    lacks: bool,
}

/// Makes one pod real: looks, decides, acts, and looks again; runs as one task.
pub(super) struct Worker {
    runtime: Runtime,
    launcher: Arc<Launcher>,
    plan: Arc<PodPlan>,
    observer: Observer,
    control: watch::Receiver<Control>,
    reports: mpsc::Sender<WorkerReport>,
    failed_starts: BTreeMap<String, FailedStart>,
    /// The requests to start again at once that were heard.
    hurries: u64,
    /// The changes of objects that were heard.
    objects: u64,
    /// Containers whose postStart hook is done, and those whose hook failed.
    hooked: BTreeSet<String>,
    failed_hooks: BTreeSet<String>,
    /// Containers that ran, and are not what the pod asks for any more.
    outdated: BTreeMap<String, KillReason>,
    /// Containers, by name, whose image or resources have changed since the last look, and those instances
    /// that were the last ones before: how often they crashed says nothing of the next.
    renewed: BTreeSet<String>,
    of_before: BTreeSet<String>,
    /// Containers that ran at the last look, or were started since.
    alive: BTreeSet<String>,
    /// Since when containers have been stopped, by identifier.
    stopped: BTreeMap<String, Timestamp>,
    /// Containers that were held back by a restart delay at the last look.
    backing_off: BTreeSet<String>,
    ends: Ends,
    /// The time in which the pod must have ended, once it must.
    ending: Option<Window>,
    /// The last look, if nothing was done since, and the changes that were known then.
    last_look: Option<(Arc<Observation>, u64)>,
    /// What was seen when something was last done, and what was done.
    last_done: Option<(pod::Observed, Actions)>,
    /// What the runtime would list after what was just made, the changes that were known before, and whether
    /// something ran then.
    expected: Option<Expected>,
    /// When something was last done, or a list taken over: earlier lists don't show it.
    listed_at: Instant,
    /// Nothing new is made before the API server has answered for all that the pod refers to.
    held_back: bool,
    devices: Grant,
    /// What blocks, also what was begun for this pod by a worker before this one.
    chores: BlockingTasks,
    /// The pod has ended, and has given back all but its containers and logs.
    released: bool,
}

/// See [`Worker::expected`].
struct Expected {
    listed: Listed,
    changes: u64,
    runs: bool,
}

/// How a step ended.
enum Step {
    /// Something was done: look again.
    Done,
    /// Nothing to do before a change, or before this time.
    Idle(Option<Instant>),
}

impl Worker {
    /// A worker for `pod`, which it finds as it is.
    fn new(
        launcher: Arc<Launcher>,
        pod: Arc<core::Pod>,
        control: watch::Receiver<Control>,
        reports: mpsc::Sender<WorkerReport>,
        (chores, known): (BlockingTasks, Foreknown),
    ) -> Self {
        let plan = launcher.plan(pod);
        let runtime = launcher.runtime.clone();
        let observer = Observer::new(runtime.clone(), plan.uid.clone(), known);
        let hooked = control.borrow().verdicts.hooked.clone();
        let devices = Grant::new(launcher.devices.node());
        Self {
            runtime,
            launcher,
            plan,
            observer,
            control,
            reports,
            failed_starts: BTreeMap::new(),
            hurries: 0,
            objects: 0,
            hooked,
            failed_hooks: BTreeSet::new(),
            outdated: BTreeMap::new(),
            renewed: BTreeSet::new(),
            of_before: BTreeSet::new(),
            alive: BTreeSet::new(),
            stopped: BTreeMap::new(),
            backing_off: BTreeSet::new(),
            ends: Ends::new(),
            ending: None,
            last_look: None,
            last_done: None,
            expected: None,
            listed_at: Instant::now(),
            held_back: false,
            devices,
            chores,
            released: false,
        }
    }

    /// The task of a worker that is made anew should it panic.
    pub(super) async fn supervised(
        launcher: Arc<Launcher>,
        pod: Arc<core::Pod>,
        control: watch::Receiver<Control>,
        reports: mpsc::Sender<WorkerReport>,
        mut known: Foreknown,
    ) {
        let name = PodName::of(&pod).to_string();
        let chores = BlockingTasks::default();
        let start = move || {
            let (pod, control, reports) = (Arc::clone(&pod), control.clone(), reports.clone());
            // What was known holds for the first look alone.
            let known = (chores.clone(), std::mem::take(&mut known));
            Self::new(Arc::clone(&launcher), pod, control, reports, known).run()
        };
        supervise::keep(&name, start).await;
    }

    /// Works until nothing is left of a terminated pod, or the manager is gone. Its steps are boxed: workers
    /// wait most of the time, and each would keep room for the largest step.
    async fn run(mut self) {
        let mut pause = RETRY_INITIAL;
        let mut purpose = metrics::Purpose::Create;
        loop {
            let control = self.control.borrow_and_update().clone();
            if let Some(pod) = control.updated.as_ref().filter(|_| control.is_newer_than(&self.plan.pod)) {
                self.take_over(pod);
                purpose = metrics::Purpose::Update;
            }
            let own = self.plan.grace;
            let end = control.end(own);
            if end.is_some() {
                purpose = metrics::Purpose::Kill;
            }
            let began = Instant::now();
            let mut signal = self.control.clone();
            let kind = if end.is_some() { "syncTerminatingPod" } else { "syncPod" };
            let span = self.launcher.metrics.starts.step(&self.plan.name, &self.plan.uid, kind);
            let step = if let Some(grace) = end {
                tokio::select! {
                    // A pod that must go sooner than was said before is told so.
                    changed = signal.wait_for(|c| c.end(own).is_some_and(|sooner| sooner < grace)) => {
                        if changed.is_err() { return }
                        continue;
                    }
                    step = Box::pin(self.terminate(&control, grace)).instrument(span.clone()) => step,
                }
            } else {
                tokio::select! {
                    // A pod that must go does not wait for a slow pull or a long stop.
                    changed = signal.wait_for(|c| c.end(own).is_some()) => {
                        if changed.is_err() { return }
                        continue;
                    }
                    step = Box::pin(self.advance(&control)).instrument(span.clone()) => step,
                }
            };
            if let Err(error) = &step {
                spans::fail(&span, error);
            }
            drop(span);
            self.launcher.metrics.step(purpose, began.elapsed());
            purpose = metrics::Purpose::Sync;
            let wake = match step {
                Ok(Some(Step::Done)) => {
                    pause = RETRY_INITIAL;
                    continue;
                }
                Ok(Some(Step::Idle(wake))) => {
                    pause = RETRY_INITIAL;
                    wake
                }
                Ok(None) => return,
                Err(error) => {
                    warn!(pod = %self.plan.name, %error, "a step failed and will be tried again");
                    self.record_not_ended(&error, end.is_some());
                    let at = Instant::now().after(pause);
                    pause = (pause * 2).min(RETRY_MAX);
                    Some(at)
                }
            };
            if !self.wait(wake).await {
                return;
            }
        }
    }

    /// Takes over the pod as it is now, for containers that start from now on; those that run are the QoS
    /// tree's.
    fn take_over(&mut self, pod: &Arc<core::Pod>) {
        let (of_image, of_any) = definition::renewed(&self.plan.pod, pod);
        self.failed_starts.retain(|name, _| !of_image.contains(name));
        self.renewed.extend(of_any);
        self.plan = self.launcher.plan(Arc::clone(pod));
    }

    /// Waits for a change of what is wanted or seen, or for a time; false if the manager is gone.
    async fn wait(&mut self, wake: Option<Instant>) -> bool {
        let timer = async {
            match wake {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let waits = self.waits_for_devices();
        let answered = Box::pin(self.launcher.answered(&self.plan.pod));
        tokio::select! {
            changed = self.control.changed() => changed.is_ok(),
            () = answered, if self.held_back => true,
            _ = self.devices.changes.changed(), if waits => true,
            () = timer => true,
        }
    }

    /// One look, one decision, and what it asks for.
    async fn advance(&mut self, control: &Control) -> Result<Option<Step>, Error> {
        // A step that fails before this is known again waits for its pause, not for an answer that is there.
        self.held_back = false;
        let seen = self.look(control).await?;
        if std::mem::replace(&mut self.hurries, control.hurries) != control.hurries {
            self.failed_starts.clear();
        }
        if std::mem::replace(&mut self.objects, control.objects) != control.objects {
            // Each change gives one try; the pauses between the others stay as long as they have become.
            let lacking = self.failed_starts.values_mut().filter(|failed| failed.lacks);
            lacking.for_each(|failed| failed.retry_at = Instant::now());
        }
        let verdicts = self.verdicts(&control.verdicts, &seen);
        self.tell_last_words(&verdicts, &seen).await;
        self.ends.record(&seen.pod, Timestamp::now());
        let times = pod::Times { ended: self.ends.known(), now: self.ends.now() };
        let mut actions =
            pod::actions(&self.plan.pod, &seen.pod, &verdicts, self.launcher.max_restart_delay, times);
        if control.ended {
            // Without records of its containers it would look as if it had never run.
            hold_back(&mut actions, &seen);
            actions.backoff.clear();
            actions.release = actions.stop_sandboxes.is_empty();
        }
        if actions.outcome.is_some() && self.launcher.dra.has(&self.plan.uid) {
            return self.give_back_claims(&actions, &seen).await;
        }
        self.release_ended(&seen);
        self.failed_starts.retain(|name, _| actions.start.iter().any(|s| s.name == *name));
        self.record_backoff(&actions);
        if !self.report(&seen, &actions, Stage::Here).await {
            return Ok(None);
        }
        self.release_volumes(&actions).await?;
        self.held_back = self.launcher.waits_for_objects(&self.plan.pod);
        let mut retry_at = self.failed_starts.values().map(|f| f.retry_at).min();
        if self.held_back {
            hold_back(&mut actions, &seen);
            retry_at = None;
        }
        let due = actions.start.iter().any(|s| self.may_start(&s.name));
        if actions.is_idle() || (actions.start.len() == count(&actions) && !due) {
            self.last_look = Some((Arc::clone(&seen), control.changes));
            let backoff = actions.wake_at().map(|at| self.ends.instant(at));
            return Ok(Some(Step::Idle(backoff.into_iter().chain(retry_at).min())));
        }
        let doing = (seen.pod.clone(), actions.clone());
        // Not again at once: the runtime would be asked without end.
        if self.last_done.take().is_some_and(|done| done == doing && count(&actions) > actions.start.len()) {
            return Err(Error::Unseen(
                "what the runtime was asked to do, and said it did, can't be seen yet",
            ));
        }
        if !self.has_room(&actions).await {
            return Ok(Some(Step::Idle(None)));
        }
        if self.is_superseded() {
            // The pod was let in with other amounts than those of this plan.
            return Ok(Some(Step::Done));
        }
        if let Some(waiting) = self.have_devices(&seen, &actions).await {
            if !self.report(&seen, &actions, Stage::Here).await {
                return Ok(None);
            }
            hold_back(&mut actions, &seen);
            if actions.is_idle() {
                return Ok(Some(waiting));
            }
        }
        let only_makes = actions.only_makes();
        let made = self.execute(actions, &seen).await;
        self.listed_at = Instant::now();
        let made = made?;
        // A start that failed may have left a container behind.
        if only_makes && self.failed_starts.is_empty() {
            let runs = seen.pod.containers.iter().any(|c| seen.is_running(&c.id));
            self.expected =
                Some(Expected { listed: made.listed_after(&seen), changes: control.changes, runs });
        }
        self.last_done = Some(doing);
        Ok(Some(Step::Done))
    }

    /// A pod that has ended says how its containers have, gives back its claims, and is looked at again: its
    /// phase says so once that is done. A driver may be away for long.
    async fn give_back_claims(
        &self,
        actions: &Actions,
        seen: &Arc<Observation>,
    ) -> Result<Option<Step>, Error> {
        if !self.report(seen, actions, Stage::Here).await {
            return Ok(None);
        }
        for id in &actions.stop_sandboxes {
            self.stop_sandbox(id, seen, Window::new(self.plan.grace)).await?;
        }
        self.launcher.unprepare(&self.plan).await?;
        Ok(Some(Step::Done))
    }

    /// A pod that has ended gives back its volumes and its cgroup, once.
    async fn release_volumes(&mut self, actions: &Actions) -> Result<(), Error> {
        if actions.release && !self.released {
            self.launcher.release_ended(&self.plan, &self.chores).await?;
            info!(pod = %self.plan.name, "pod has ended, and its volumes and its cgroup are given back");
        }
        self.released = actions.release;
        Ok(())
    }

    /// Looks at the pod. Where nothing was done since the last look, and the runtime has changed nothing but
    /// that containers have ended, and how, it isn't asked again: it goes through all it has for each list.
    async fn look(&mut self, control: &Control) -> Result<Arc<Observation>, Error> {
        let last = self.last_look.take().filter(|(_, changes)| *changes == control.changes);
        let seen = match last {
            Some((last, _)) => last,
            None => self.look_anew(control).await?,
        };
        // The runtime's word on an end is newer than any list from before it.
        let ended = control.exited.values().filter(|status| seen.is_running(&status.id));
        let ended: Vec<_> = ended.map(|status| (**status).clone()).collect();
        if ended.is_empty() {
            return Ok(seen);
        }
        let ended = runtime_view::with_last_words(ended).await;
        let ended: Vec<_> = ended.into_iter().map(Arc::new).collect();
        let seen = ended.iter().fold((*seen).clone(), Observation::with_newer);
        ended.into_iter().for_each(|status| self.observer.record(status));
        Ok(Arc::new(seen))
    }

    async fn look_anew(&mut self, control: &Control) -> Result<Arc<Observation>, Error> {
        // What ran beside what was made may have ended meanwhile.
        let expected = self.expected.take().filter(|e| !e.runs || e.changes == control.changes);
        if let Some(expected) = expected {
            self.observer.expect(expected.listed);
        }
        if let Some((at, listed)) = control.listed.as_ref().filter(|(at, _)| *at > self.listed_at) {
            self.listed_at = *at;
            self.observer.expect((**listed).clone());
        }
        Ok(Arc::new(self.launcher.turns.look(self.observer.observe()).await?))
    }

    /// What probes say, and what is known here: how hooks did, and that containers without a startup probe
    /// have started as soon as they run.
    fn verdicts(&mut self, probes: &Verdicts, seen: &Observation) -> Verdicts {
        self.hooked.retain(|id| seen.containers.contains_key(id));
        self.stopped.retain(|id, _| seen.containers.contains_key(id));
        self.failed_hooks.retain(|id| seen.containers.contains_key(id));
        let mut verdicts = Verdicts { hooked: self.hooked.clone(), ..probes.clone() };
        verdicts.condemned.retain(|id, reason| !reason.is_of_probe() || self.may_be_for(id, seen));
        let failed = self.failed_hooks.iter().map(|id| (id.clone(), KillReason::PostStartHook));
        verdicts.condemned.extend(failed);
        let spec = self.plan.pod.spec.as_ref();
        let all = spec.into_iter().flat_map(|s| s.init_containers.iter().flatten().chain(&s.containers));
        for container in all.filter(|c| c.startup_probe.is_none()) {
            verdicts.started.extend(seen.newest(&container.name).map(|c| c.id.clone()));
        }
        self.note_outdated(seen);
        let before = std::mem::take(&mut self.renewed).into_iter();
        self.of_before.extend(before.filter_map(|name| seen.newest(&name).map(|c| c.id.clone())));
        self.of_before.retain(|id| seen.containers.contains_key(id));
        verdicts.hurried.extend(self.replaced(seen));
        verdicts.hurried.extend(self.of_before.iter().cloned());
        for (id, reason) in &self.outdated {
            verdicts.condemned.entry(id.clone()).or_insert(*reason);
        }
        verdicts
    }

    /// Looks which running containers are not what the pod asks for now. Once they have ended that can't be
    /// told any more: they may have ended before. An init container runs to its end as it was made, unless it
    /// is a sidecar (computeInitContainerActions).
    fn note_outdated(&mut self, seen: &Observation) {
        self.outdated.retain(|id, _| seen.containers.contains_key(id) && !seen.is_running(id));
        let spec = self.plan.pod.spec.as_ref();
        let lasting = spec.into_iter().flat_map(|s| {
            s.init_containers.iter().flatten().filter(|init| pod::is_sidecar(init)).chain(&s.containers)
        });
        for container in lasting {
            let made = seen.newest(&container.name).and_then(|c| seen.containers.get(&c.id));
            let Some(made) = made.filter(|made| seen.is_running(&made.id)) else { continue };
            if definition::is_redefined(container, made) {
                self.outdated.insert(made.id.clone(), KillReason::Redefined);
            } else if definition::is_resized(container, made) {
                self.outdated.insert(made.id.clone(), KillReason::Resized);
            }
        }
    }

    /// Containers that have ended, and whose next one is of another definition: how often they crashed says
    /// nothing of that (the kubelet's back-off is by the container's hash).
    fn replaced(&self, seen: &Observation) -> Vec<String> {
        let spec = self.plan.pod.spec.as_ref();
        let all = spec.into_iter().flat_map(|s| s.init_containers.iter().flatten().chain(&s.containers));
        let ended = all.filter_map(|container| {
            let made = seen.newest(&container.name).and_then(|c| seen.containers.get(&c.id))?;
            let replaced = !seen.is_running(&made.id) && definition::is_redefined(container, made);
            replaced.then(|| made.id.clone())
        });
        ended.collect()
    }

    fn may_start(&self, name: &str) -> bool {
        self.failed_starts.get(name).is_none_or(|f| f.retry_at <= Instant::now())
    }

    /// Tells of containers that are held back from now on.
    fn record_backoff(&mut self, actions: &Actions) {
        let PodName { namespace, name: pod } = &self.plan.name;
        for name in actions.backoff.keys().filter(|name| !self.backing_off.contains(*name)) {
            let uid = &self.plan.uid;
            let message =
                format!("Back-off restarting failed container {name} in pod {pod}_{namespace}({uid})");
            self.launcher.events.warning(Object::container(&self.plan.pod, name), "BackOff", message);
        }
        self.backing_off = actions.backoff.keys().cloned().collect();
    }

    async fn create_sandbox(&self, attempt: u32) -> Result<String, Error> {
        let (events, pod) = (&self.launcher.events, || Object::pod(&self.plan.pod));
        if attempt > 0 {
            events.normal(pod(), "SandboxChanged", "Pod sandbox changed, it will be killed and re-created.");
        }
        for (reason, message) in dns_warnings(&self.plan.pod, &self.launcher.node) {
            events.warning(pod(), reason, message);
        }
        let span = trace_span!(target: TARGET, "sandbox", otel.name = "createSandbox", attempt);
        let made = self.launcher.create_sandbox(&self.plan, attempt, &self.chores).instrument(span).await;
        self.launcher.metrics.launches.pod(made.is_err());
        if self.plan.own_users {
            let (started, failed) = &self.launcher.metrics.user_namespaced;
            started.inc();
            failed.inc_by(made.is_err().into());
        }
        match made {
            Ok(id) => {
                info!(pod = %self.plan.name, sandbox = id, attempt, "sandbox runs");
                Ok(id)
            }
            Err(error) => {
                match &error {
                    Error::UnseenMount { volume, why } => {
                        let message = format!("MountVolume.SetUp failed for volume {volume:?} : {why}");
                        events.warning(pod(), "FailedMount", message);
                    }
                    Error::Volume { volume, why } if Origin::of(&self.plan.pod).is_api() => {
                        let message = format!("MountVolume.SetUp failed for volume {volume:?} : {why}");
                        events.warning(pod(), "FailedMount", message);
                    }
                    Error::Unprepared(_) => {
                        let message = format!("Failed to prepare dynamic resources: {error}");
                        events.warning(pod(), "FailedPrepareDynamicResources", message);
                    }
                    Error::Claims { .. } => {
                        let message = format!("Unable to attach or mount volumes: {error}");
                        events.warning(pod(), "FailedMount", message);
                    }
                    _ => {
                        let message = format!("Failed to create pod sandbox: {error}");
                        events.warning(pod(), "FailedCreatePodSandBox", message);
                    }
                }
                Err(error)
            }
        }
    }

    async fn execute(&mut self, actions: Actions, seen: &Observation) -> Result<Made, Error> {
        let mut made = Made::default();
        for kill in &actions.kill {
            self.stopped.entry(kill.id.clone()).or_insert_with(Timestamp::now);
        }
        self.kill(&actions.kill, seen).await?;
        for id in &actions.stop_sandboxes {
            self.stop_sandbox(id, seen, Window::new(self.plan.grace)).await?;
        }
        if let Some(attempt) = actions.create_sandbox {
            made.sandbox = Some((self.create_sandbox(attempt).await?, attempt));
        }
        for id in &actions.remove_containers {
            ignore_missing(self.runtime.remove_container(id).await)?;
        }
        for id in &actions.remove_sandboxes {
            ignore_missing(self.runtime.remove_sandbox(id).await)?;
        }
        for hook in &actions.post_start {
            self.post_start(&hook.name, &hook.id, seen).await;
        }
        made.containers = self.start(&actions, seen).await?;
        Ok(made)
    }

    /// Starts containers, one after the other, hooks included; those that were started.
    async fn start(
        &mut self,
        actions: &Actions,
        seen: &Observation,
    ) -> Result<Vec<(String, pod::Start)>, Error> {
        let mut all = Vec::new();
        let counts = Arc::clone(&self.control.borrow().counts);
        for start in &actions.start {
            if !self.may_start(&start.name) {
                continue;
            }
            let begins = counts.get(&start.name).filter(|_| seen.newest(&start.name).is_none());
            let attempt = begins.map_or(start.attempt, |count| start.attempt.max(*count));
            let start = &pod::Start { attempt, ..start.clone() };
            let Some(sandbox) = &seen.sandbox else {
                return Err(Error::Unseen("the sandbox is gone that its containers were to run in"));
            };
            info!(pod = %self.plan.name, container = start.name, attempt = start.attempt, "container is asked for");
            let span = trace_span!(
                target: TARGET, "container", otel.name = "startContainer", k8s.container.name = start.name,
                attempt = start.attempt,
            );
            let starting = self.launcher.start(&self.plan, (sandbox, seen), start, &self.chores);
            let started = starting.instrument(span).await;
            self.launcher.metrics.launches.container(&self.plan.pod, &start.name, &started);
            match started {
                Ok(id) => {
                    self.failed_starts.remove(&start.name);
                    info!(pod = %self.plan.name, container = start.name, id, attempt = start.attempt, "container runs");
                    self.alive.insert(id.clone());
                    all.push((id.clone(), start.clone()));
                    if !self.post_start(&start.name, &id, seen).await {
                        // It is stopped before anything else is done.
                        return Ok(all);
                    }
                }
                Err(error) => self.note_failed_start(&start.name, &error),
            }
        }
        Ok(all)
    }

    /// A container that can't be started waits, and doesn't hold the others back.
    fn note_failed_start(&mut self, name: &str, error: &StartError) {
        let failure = error.failure();
        let before = self.failed_starts.get(name);
        let same = before.filter(|before| before.failure == failure);
        let delay = pod::start_pause(failure, same.map(|before| before.delay), chance());
        let tries = before.map_or(0, |before| before.tries) + 1;
        warn!(pod = %self.plan.name, container = name, reason = error.reason(), %error,
            retry_in_seconds = delay.as_secs(), "container could not be started");
        let waiting = Waiting { reason: error.reason().to_owned(), message: error.to_string() };
        let told = format!("Error: {}: {}", waiting.reason, waiting.message);
        self.launcher.events.warning(Object::container(&self.plan.pod, name), "Failed", told);
        let lacks = matches!(error, StartError::Config(_));
        let failed =
            FailedStart { waiting, failure, tries, delay, retry_at: Instant::now().after(delay), lacks };
        self.failed_starts.insert(name.to_owned(), failed);
    }

    /// Takes the pod away, or as much of it as a failed one gives back. `Ok(None)` once nothing is left of
    /// it.
    async fn terminate(&mut self, control: &Control, grace: Duration) -> Result<Option<Step>, Error> {
        // What was listed before doesn't show what was being done until now.
        self.listed_at = Instant::now();
        (self.last_look, self.expected, self.held_back) = (None, None, false);
        let seen = Arc::new(self.launcher.turns.look(self.observer.observe()).await?);
        let nothing = Actions::default();
        let empty = seen.pod.containers.is_empty() && seen.pod.sandboxes.is_empty();
        // With its containers removed a pod would look as if it had never run: its last states stand.
        if !empty && !self.report(&seen, &nothing, Stage::Here).await {
            return Ok(None);
        }
        let window = self.ending.filter(|window| window.grace == grace).unwrap_or_else(|| Window::new(grace));
        self.ending = Some(window);
        let stops = seen.pod.sandboxes.iter().map(|sandbox| self.stop_sandbox(&sandbox.id, &seen, window));
        join_all(stops).await.into_iter().collect::<Result<(), Error>>()?;
        if !empty {
            // The last states are worth seeing before the records go.
            let last = Arc::new(self.observer.observe().await?);
            let stage = if last.may_run() { Stage::Here } else { Stage::Stopped };
            if stage == Stage::Stopped && self.launcher.dra.has(&self.plan.uid) {
                // How its containers have ended doesn't wait for drivers.
                if !self.report(&last, &nothing, Stage::Here).await {
                    return Ok(None);
                }
                self.launcher.unprepare(&self.plan).await?;
            }
            if !self.report(&last, &nothing, stage).await {
                return Ok(None);
            }
            for container in &last.pod.containers {
                ignore_missing(self.runtime.remove_container(&container.id).await)?;
            }
            for sandbox in &last.pod.sandboxes {
                ignore_missing(self.runtime.remove_sandbox(&sandbox.id).await)?;
            }
            return Ok(Some(Step::Done));
        }
        self.failed_starts.clear();
        (self.last_done, self.ending) = (None, None);
        self.devices.revoke();
        self.launcher.unprepare(&self.plan).await?;
        // A volume may hang. The pod's end doesn't wait for it (SyncTerminatingPod).
        if !self.report(&seen, &nothing, Stage::Stopped).await {
            return Ok(None);
        }
        self.launcher.release(&self.plan, &self.chores).await?;
        if control.terminate.is_none() {
            info!(pod = %self.plan.name, uid = self.plan.uid, "pod has given back everything it had");
            let told = self.report(&seen, &nothing, Stage::Cleared).await;
            return Ok(told.then_some(Step::Idle(None)));
        }
        self.launcher.remove_logs(&self.plan, &self.chores).await?;
        info!(pod = %self.plan.name, uid = self.plan.uid, "pod is gone");
        self.report(&seen, &nothing, Stage::Gone).await;
        Ok(None)
    }

    /// Tells the manager; false if it is gone.
    async fn report(&self, seen: &Arc<Observation>, actions: &Actions, stage: Stage) -> bool {
        let mut waiting: BTreeMap<String, Waiting> = BTreeMap::new();
        for (name, backoff) in &actions.backoff {
            let PodName { namespace, name: pod } = &self.plan.name;
            let (delay, uid) = (in_go(backoff.delay), &self.plan.uid);
            let message =
                format!("back-off {delay} restarting failed container={name} pod={pod}_{namespace}({uid})");
            waiting.insert(name.clone(), Waiting { reason: "CrashLoopBackOff".to_owned(), message });
        }
        let failed = self.failed_starts.iter().map(|(name, f)| (name.clone(), self.held_back(f)));
        waiting.extend(failed);
        waiting.extend(self.without_devices(actions));
        for (name, reason) in self.without_outdated(seen) {
            waiting.entry(name).or_insert(reason);
        }
        debug!(pod = %self.plan.name, ?actions, "looked at the pod");
        let report = WorkerReport {
            uid: self.plan.uid.clone(),
            seen: Arc::clone(seen),
            waiting,
            hooked: self.hooked.clone(),
            stopped: self.stopped.keys().filter(|id| self.may_be_for(id, seen)).cloned().collect(),
            stage,
        };
        self.reports.send(report).await.is_ok()
    }

    /// Containers that have ended for one that is as the pod asks for now: they wait for it, and the pod has
    /// not ended.
    fn without_outdated<'a>(&'a self, seen: &'a Observation) -> impl Iterator<Item = (String, Waiting)> + 'a {
        let ended = seen.pod.containers.iter().filter(|c| {
            let newest = seen.newest(&c.name).is_some_and(|newest| newest.id == c.id);
            newest && self.outdated.contains_key(&c.id) && !seen.is_running(&c.id)
        });
        let waiting = || Waiting { reason: "ContainerCreating".to_owned(), message: String::new() };
        ended.map(move |c| (c.name.clone(), waiting()))
    }

    /// While a failed pull waits for its next try it is called a back-off, as under the kubelet.
    fn held_back(&self, failed: &FailedStart) -> Waiting {
        let mut waiting = failed.waiting.clone();
        if waiting.reason == "ErrImagePull" && failed.tries > 1 {
            waiting.reason = "ImagePullBackOff".to_owned();
        }
        waiting
    }
}

/// Takes out what makes something new of the pod; what must be stopped stays. A sandbox in which nothing runs
/// any more is stopped for the next one's sake, and can't be seen to be: it would be stopped again and again.
fn hold_back(actions: &mut Actions, seen: &Observation) {
    actions.create_sandbox = None;
    actions.start.clear();
    actions.stop_sandboxes.retain(|id| seen.may_run_in(id));
}

/// How many things a decision asks for.
fn count(actions: &Actions) -> usize {
    actions.kill.len()
        + actions.stop_sandboxes.len()
        + usize::from(actions.create_sandbox.is_some())
        + actions.remove_containers.len()
        + actions.remove_sandboxes.len()
        + actions.post_start.len()
        + actions.start.len()
}

/// A duration of whole seconds as Go writes it, and so the kubelet: `10s`, `1m20s`, `5m0s`.
fn in_go(duration: Duration) -> String {
    match (duration.as_secs() / 60, duration.as_secs() % 60) {
        (0, seconds) => format!("{seconds}s"),
        (minutes, seconds) => format!("{minutes}m{seconds}s"),
    }
}

/// What is gone already needs no removal.
fn ignore_missing(result: Result<(), beelet_cri::Error>) -> Result<(), Error> {
    match result {
        Err(error) if !error.is_not_found() => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_the_kubelet_does() {
        let check = |seconds, text: &str| assert_eq!(in_go(Duration::from_secs(seconds)), text);
        check(0, "0s");
        check(10, "10s");
        check(60, "1m0s");
        check(160, "2m40s");
        check(300, "5m0s");
    }

    #[test]
    fn a_worker_that_waits_is_small() {
        fn size<W, F>(_: fn(W) -> F) -> usize {
            size_of::<F>()
        }
        assert!(size(Worker::run) < 4096, "{} bytes for each pod of the node", size(Worker::run));
    }
}
