//! The worker of one pod: observes the pod in the runtime, lets `policy` decide, acts, and observes again,
//! until the pod is terminated. A worker can read all of its state from the runtime again, so it may be
//! killed between any two steps.
//!
//! [`Observations`] has the state of its observations, [`History`] the facts about containers that the
//! runtime does not report, [`Starts`] the starts and their failures, [`Stops`] the stops with their hooks,
//! [`Ending`] the termination of the pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::{blocking::BlockingTasks, clock::After as _, spans};
use beelet_policy::pod::{self, Actions};
use futures::future::join_all;
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tracing::{Instrument, debug, info, warn};

use super::{
    error::Error,
    metrics,
    plan::PodPlan,
    runtime_view::{Foreknown, Made, Observation},
    services::Services,
    status::Waiting,
};
use beelet_cri::Runtime;
use beelet_model::table::PodName;
use beelet_spec::definition;

mod container_ends;
mod control;
mod devices;
mod ending;
mod history;
mod hooks;
mod last_words;
mod observations;
mod room;
mod starts;
mod stops;
mod supervise;

pub(super) use control::{Control, Terminate};
use devices::Granted;
use ending::Ending;
use history::History;
use observations::{Observations, count};
use starts::Starts;
use stops::{Stops, Window, ignore_missing};

/// Pause after the first failed step. Each further failure doubles the pause, up to [`RETRY_MAX`].
const RETRY_INITIAL: Duration = Duration::from_secs(1);
/// Longest pause after a failed step. A change that the runtime reports ends the pause early.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Stage of a pod's termination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The pod runs, or is still being stopped.
    Here,
    /// The pod has ended permanently, and none of its containers runs. Its volumes and cgroup may still
    /// exist.
    Stopped,
    /// The pod has ended permanently and has released its resources: its sandbox, cgroup and volumes are
    /// removed. Its logs remain.
    Cleared,
    /// The pod and its logs are removed, and this was the last report.
    Gone,
}

/// Report of a worker to the manager, after each observation.
#[derive(Clone, Debug)]
pub(super) struct WorkerReport {
    /// UID of the pod.
    pub uid: String,
    /// The pod in the runtime.
    pub seen: Arc<Observation>,
    /// Waiting reasons of containers that are not running, by name.
    pub waiting: BTreeMap<String, Waiting>,
    /// Containers whose postStart hook has finished, by identifier.
    pub hooked: BTreeSet<String>,
    /// Containers that ended because the worker stopped them, by identifier.
    pub stopped: BTreeSet<String>,
    /// Stage of the pod's termination.
    pub stage: Stage,
}

/// Observes one pod, decides and acts in a loop; runs as one task.
pub(super) struct Worker {
    services: Arc<Services>,
    runtime: Runtime,
    plan: Arc<PodPlan>,
    control: watch::Receiver<Control>,
    reports: mpsc::Sender<WorkerReport>,
    observations: Observations,
    history: History,
    starts: Starts,
    stops: Stops,
    ending: Ending,
    /// Blocking work, including work that an earlier worker of this pod started.
    tasks: BlockingTasks,
}

/// Result of a step.
enum Step {
    /// The worker has acted, and observes the pod again.
    Done,
    /// The worker has nothing to do before a change, or before this time.
    Idle(Option<Instant>),
}

impl Worker {
    /// Returns a worker for `pod`, in any state of the pod.
    fn new(
        services: Arc<Services>,
        pod: Arc<core::Pod>,
        control: watch::Receiver<Control>,
        reports: mpsc::Sender<WorkerReport>,
        (tasks, known): (BlockingTasks, Foreknown),
    ) -> Self {
        let plan = services.planner.plan(pod);
        let history = History::new(control.borrow().verdicts.hooked.clone());
        Self {
            runtime: services.observations.runtime.clone(),
            observations: Observations::new(&services.observations, plan.uid.clone(), known),
            history,
            starts: Starts::new(&services.starts),
            stops: Stops::new(&services.stops),
            ending: Ending::new(&services.ends),
            services,
            plan,
            control,
            reports,
            tasks,
        }
    }

    /// Runs a worker, and replaces a worker that panics by a new one.
    pub(super) async fn supervised(
        services: Arc<Services>,
        pod: Arc<core::Pod>,
        control: watch::Receiver<Control>,
        reports: mpsc::Sender<WorkerReport>,
        mut known: Foreknown,
    ) {
        let name = PodName::of(&pod).to_string();
        let tasks = BlockingTasks::default();
        let start = move || {
            let (pod, control, reports) = (Arc::clone(&pod), control.clone(), reports.clone());
            // Earlier knowledge is valid for the first observation only.
            let known = (tasks.clone(), std::mem::take(&mut known));
            Self::new(Arc::clone(&services), pod, control, reports, known).run()
        };
        supervise::keep(&name, start).await;
    }

    /// Works until the terminated pod is removed, or the manager has ended. Steps are boxed: workers wait
    /// most of the time, and each worker would reserve memory for the largest step.
    async fn run(mut self) {
        let mut pause = RETRY_INITIAL;
        let mut purpose = metrics::Purpose::Create;
        loop {
            let control = self.control.borrow_and_update().clone();
            if let Some(pod) = control.updated.as_ref().filter(|_| control.is_newer_than(&self.plan.pod)) {
                self.update_plan(pod);
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
            let span = self.services.reports.metrics.startup.step(&self.plan.name, &self.plan.uid, kind);
            let step = if let Some(grace) = end {
                tokio::select! {
                    // A request for a shorter grace period interrupts the step.
                    changed = signal.wait_for(|c| c.end(own).is_some_and(|sooner| sooner < grace)) => {
                        if changed.is_err() { return }
                        continue;
                    }
                    step = Box::pin(self.terminate(&control, grace)).instrument(span.clone()) => step,
                }
            } else {
                tokio::select! {
                    // A termination request does not wait for a slow pull or a long stop.
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
            self.services.reports.metrics.step(purpose, began.elapsed());
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
                    warn!(pod = %self.plan.name, %error, "pod worker step failed, retrying");
                    self.ending.record_failure(&self.plan, &error, end.is_some());
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

    /// Uses the updated pod for containers that start from now on. The QoS tree changes the running
    /// containers.
    fn update_plan(&mut self, pod: &Arc<core::Pod>) {
        let (of_image, of_any) = definition::renewed(&self.plan.pod, pod);
        self.starts.forget(|name| of_image.iter().any(|changed| changed == name));
        self.history.renew(of_image, of_any);
        self.plan = self.services.planner.plan(Arc::clone(pod));
    }

    /// Waits for a new control value, for a change of the objects or devices that the pod waits for, or until
    /// `wake`. Returns false if the manager has ended.
    async fn wait(&mut self, wake: Option<Instant>) -> bool {
        let timer = async {
            match wake {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = self.control.changed() => changed.is_ok(),
            () = self.starts.changed(&self.plan) => true,
            () = timer => true,
        }
    }

    /// Observes the pod once, decides once, and acts.
    async fn advance(&mut self, control: &Control) -> Result<Option<Step>, Error> {
        self.starts.hold_back(None);
        let seen = self.observations.observe(control).await?;
        self.starts.answer(control);
        let verdicts = self.history.verdicts(&self.plan.pod, &control.verdicts, &seen);
        let ended = self.history.ended_since_last(&seen);
        for status in &ended {
            self.services.reports.metrics.started.ended(&self.plan.pod, status);
        }
        last_words::record(&self.services.reports.events, &self.plan.pod, ended, &verdicts).await;
        let mut actions = self.observations.decide(&self.plan.pod, &seen, &verdicts);
        if control.ended {
            // A pod without container records appears never to have run.
            hold_back(&mut actions, &seen);
            actions.backoff.clear();
            actions.release = actions.stop_sandboxes.is_empty();
        }
        if actions.outcome.is_some() && self.ending.has_claims(&self.plan) {
            return self.release_claims(&actions, &seen).await;
        }
        self.starts.devices().release_ended(&self.plan, &seen);
        self.starts.follow(&self.plan, &actions);
        if !self.report(&seen, &actions, Stage::Here).await {
            return Ok(None);
        }
        self.ending.release_ended(&self.plan, &actions, &self.tasks).await?;
        if self.starts.hold_back(Some(&self.plan)) {
            hold_back(&mut actions, &seen);
        }
        let due = actions.start.iter().any(|start| self.starts.may_try(&start.name));
        if actions.is_idle() || (actions.start.len() == count(&actions) && !due) {
            self.observations.record_idle(&seen, control);
            let backoff = actions.wake_at().map(|at| self.observations.instant(at));
            return Ok(Some(Step::Idle(backoff.into_iter().chain(self.starts.retry_at()).min())));
        }
        self.act(control, actions, &seen).await
    }

    /// Executes the decided actions once the pod is admitted and has its devices.
    async fn act(
        &mut self,
        control: &Control,
        mut actions: Actions,
        seen: &Arc<Observation>,
    ) -> Result<Option<Step>, Error> {
        let decided = actions.clone();
        self.observations.check_progress(seen, &decided)?;
        if !self.starts.has_room(&self.plan, &self.control, &actions).await {
            return Ok(Some(Step::Idle(None)));
        }
        if self.control.borrow().is_newer_than(&self.plan.pod) {
            // Admission used other resource amounts than this plan.
            return Ok(Some(Step::Done));
        }
        if let Granted::No(until) = self.starts.devices().have(&self.plan, seen, &actions).await {
            if !self.report(seen, &actions, Stage::Here).await {
                return Ok(None);
            }
            hold_back(&mut actions, seen);
            if actions.is_idle() {
                return Ok(Some(Step::Idle(until)));
            }
        }
        let only_makes = actions.only_makes();
        let made = self.execute(actions, seen).await;
        self.observations.record_actions();
        let made = made?;
        // A start that failed may have left a container behind.
        let made = Some(made).filter(|_| only_makes && !self.starts.any_failed());
        self.observations.record_done(seen, decided, made, control.changes);
        Ok(Some(Step::Done))
    }

    /// Reports the ended containers of an ended pod, and releases its claims. The next observation reports
    /// the phase, because a driver may be unavailable for a long time.
    async fn release_claims(
        &self,
        actions: &Actions,
        seen: &Arc<Observation>,
    ) -> Result<Option<Step>, Error> {
        if !self.report(seen, actions, Stage::Here).await {
            return Ok(None);
        }
        for id in &actions.stop_sandboxes {
            self.stops.stop_sandbox(&self.plan, id, seen, Window::new(self.plan.grace)).await?;
        }
        self.ending.unprepare(&self.plan).await?;
        Ok(Some(Step::Done))
    }

    async fn execute(&mut self, actions: Actions, seen: &Observation) -> Result<Made, Error> {
        let mut made = Made::default();
        actions.kill.iter().for_each(|kill| self.history.record_stop(&kill.id));
        self.stops.kill(&self.plan, &actions.kill, seen).await?;
        for id in &actions.stop_sandboxes {
            self.stops.stop_sandbox(&self.plan, id, seen, Window::new(self.plan.grace)).await?;
        }
        if let Some(attempt) = actions.create_sandbox {
            let id = self.starts.create_sandbox(&self.plan, attempt, &self.tasks).await?;
            made.sandbox = Some((id, attempt));
        }
        for id in &actions.remove_containers {
            ignore_missing(self.runtime.containers.remove(id).await)?;
        }
        for id in &actions.remove_sandboxes {
            ignore_missing(self.runtime.sandboxes.remove(id).await)?;
        }
        for hook in &actions.post_start {
            self.post_start(&hook.name, &hook.id, seen).await;
        }
        made.containers = self.start(&actions, seen).await?;
        Ok(made)
    }

    /// Runs a container's postStart hook. Returns false if it failed.
    async fn post_start(&mut self, name: &str, id: &str, seen: &Observation) -> bool {
        let succeeded = self.stops.post_start(&self.plan, name, id, seen).await;
        self.history.record_hook(id, succeeded);
        succeeded != Some(false)
    }

    /// Starts containers in sequence, each with its hook. Returns the started containers.
    async fn start(
        &mut self,
        actions: &Actions,
        seen: &Observation,
    ) -> Result<Vec<(String, pod::Start)>, Error> {
        let mut all = Vec::new();
        let counts = Arc::clone(&self.control.borrow().counts);
        for start in &actions.start {
            if !self.starts.may_try(&start.name) {
                continue;
            }
            let begins = counts.get(&start.name).filter(|_| seen.newest(&start.name).is_none());
            let attempt = begins.map_or(start.attempt, |count| start.attempt.max(*count));
            let start = pod::Start { attempt, ..start.clone() };
            let Some(sandbox) = &seen.sandbox else {
                return Err(Error::Unseen("the sandbox for the containers has disappeared"));
            };
            let started = self.starts.start_container(&self.plan, (sandbox, seen), &start, &self.tasks).await;
            if let Some(id) = started {
                self.history.record_start(&id);
                let name = start.name.clone();
                all.push((id.clone(), start));
                if !self.post_start(&name, &id, seen).await {
                    // The next step stops the container first.
                    return Ok(all);
                }
            }
        }
        Ok(all)
    }

    /// Terminates the pod; a failed pod keeps its logs. Returns `Ok(None)` once the pod is removed.
    async fn terminate(&mut self, control: &Control, grace: Duration) -> Result<Option<Step>, Error> {
        self.starts.hold_back(None);
        let seen = self.observations.observe_at_end().await?;
        let nothing = Actions::default();
        let empty = seen.pod.containers.is_empty() && seen.pod.sandboxes.is_empty();
        // A pod without containers appears never to have run: its last reported states stand.
        if !empty && !self.report(&seen, &nothing, Stage::Here).await {
            return Ok(None);
        }
        let window = self.ending.window(grace);
        let sandboxes = seen.pod.sandboxes.iter();
        let stops = sandboxes.map(|sandbox| self.stops.stop_sandbox(&self.plan, &sandbox.id, &seen, window));
        join_all(stops).await.into_iter().collect::<Result<(), Error>>()?;
        if !empty {
            return self.remove_stopped().await;
        }
        self.starts.forget(|_| true);
        self.observations.forget_actions();
        self.ending.close();
        self.starts.devices().revoke();
        self.ending.unprepare(&self.plan).await?;
        // A volume may hang. The report of the pod's end does not wait for the volume (SyncTerminatingPod).
        if !self.report(&seen, &nothing, Stage::Stopped).await {
            return Ok(None);
        }
        self.ending.release(&self.plan, &self.tasks).await?;
        if control.terminate.is_none() {
            info!(pod = %self.plan.name, uid = self.plan.uid, "pod has released its resources");
            let reported = self.report(&seen, &nothing, Stage::Cleared).await;
            return Ok(reported.then_some(Step::Idle(None)));
        }
        self.ending.remove_logs(&self.plan, &self.tasks).await?;
        info!(pod = %self.plan.name, uid = self.plan.uid, "pod is removed");
        self.report(&seen, &nothing, Stage::Gone).await;
        Ok(None)
    }

    /// Reports the last states of stopped containers, and removes the containers and sandboxes.
    async fn remove_stopped(&mut self) -> Result<Option<Step>, Error> {
        let nothing = Actions::default();
        let last = self.observations.last_states().await?;
        let stage = if last.may_run() { Stage::Here } else { Stage::Stopped };
        if stage == Stage::Stopped && self.ending.has_claims(&self.plan) {
            // The report of the ended containers does not wait for drivers.
            if !self.report(&last, &nothing, Stage::Here).await {
                return Ok(None);
            }
            self.ending.unprepare(&self.plan).await?;
        }
        if !self.report(&last, &nothing, stage).await {
            return Ok(None);
        }
        for container in &last.pod.containers {
            ignore_missing(self.runtime.containers.remove(&container.id).await)?;
        }
        for sandbox in &last.pod.sandboxes {
            ignore_missing(self.runtime.sandboxes.remove(&sandbox.id).await)?;
        }
        Ok(Some(Step::Done))
    }

    /// Reports to the manager. Returns false if the manager has ended.
    async fn report(&self, seen: &Arc<Observation>, actions: &Actions, stage: Stage) -> bool {
        let mut waiting = self.starts.waiting(&self.plan, actions);
        for (name, reason) in self.history.waiting(seen) {
            waiting.entry(name).or_insert(reason);
        }
        debug!(pod = %self.plan.name, ?actions, "observed the pod");
        let report = WorkerReport {
            uid: self.plan.uid.clone(),
            seen: Arc::clone(seen),
            waiting,
            hooked: self.history.hooked().clone(),
            stopped: self.history.stopped(seen),
            stage,
        };
        self.reports.send(report).await.is_ok()
    }
}

/// Removes the actions that create or start a part of the pod, and keeps the stops of sandboxes in which
/// containers may run. The runtime's list does not show that an empty sandbox was stopped, so its stop would
/// repeat forever.
fn hold_back(actions: &mut Actions, seen: &Observation) {
    actions.create_sandbox = None;
    actions.start.clear();
    actions.stop_sandboxes.retain(|id| seen.may_run_in(id));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_waits_is_small() {
        fn size<W, F>(_: fn(W) -> F) -> usize {
            size_of::<F>()
        }
        assert!(size(Worker::run) < 4096, "{} bytes for each pod of the node", size(Worker::run));
    }
}
