//! Starts of sandboxes and containers, which require that the pod is admitted, has its devices, and that all
//! objects it refers to are known. A container that cannot start waits for its next try and delays no other
//! container.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::{blocking::BlockingTasks, chance::chance, clock::After as _, spans::TARGET};
use beelet_model::{origin::Origin, table::PodName};
use beelet_policy::pod::{self, Actions, StartFailure};
use beelet_spec::cri_config::dns_warnings;
use beelet_state::events::Object;
use tokio::{sync::watch, time::Instant};
use tracing::{Instrument, info, trace_span, warn};

use super::{control::Control, devices::DeviceGrant, room};
use crate::{
    error::{Error, StartError},
    plan::PodPlan,
    runtime_view::{Observation, SandboxDetail},
    services::StartServices,
    status::Waiting,
};

/// A failed try to start a container.
#[derive(Clone, Debug)]
struct FailedStart {
    waiting: Waiting,
    failure: StartFailure,
    tries: u32,
    delay: Duration,
    retry_at: Instant,
    /// The container's configuration failed. A change of a ConfigMap or Secret may resolve the failure.
    lacks: bool,
}

impl FailedStart {
    /// Returns the waiting state. A failed pull that waits for its next try is a back-off, as under the
    /// kubelet.
    fn waiting(&self) -> Waiting {
        let mut waiting = self.waiting.clone();
        if waiting.reason == "ErrImagePull" && self.tries > 1 {
            waiting.reason = "ImagePullBackOff".to_owned();
        }
        waiting
    }
}

/// Starts of a pod's sandboxes and containers.
pub(super) struct Starts {
    services: Arc<StartServices>,
    /// Failed tries, by container.
    failed: BTreeMap<String, FailedStart>,
    /// Number of handled requests to retry immediately.
    retry_requests: u64,
    /// Number of handled changes of objects.
    objects: u64,
    /// Containers that waited for a restart delay at the last observation.
    backing_off: BTreeSet<String>,
    devices: DeviceGrant,
    /// Nothing is created or started before the API server has answered for all objects of the pod.
    held_back: bool,
}

impl Starts {
    pub(super) fn new(services: &Arc<StartServices>) -> Self {
        Self {
            services: Arc::clone(services),
            failed: BTreeMap::new(),
            retry_requests: 0,
            objects: 0,
            backing_off: BTreeSet::new(),
            devices: DeviceGrant::new(services.devices.clone(), services.pinning.clone()),
            held_back: false,
        }
    }

    /// Handles requests to retry, and changes of objects. A change allows one immediate try, and does not
    /// reset the back-off.
    pub(super) fn answer(&mut self, control: &Control) {
        if std::mem::replace(&mut self.retry_requests, control.retry_requests) != control.retry_requests {
            self.failed.clear();
        }
        if std::mem::replace(&mut self.objects, control.objects) != control.objects {
            let lacking = self.failed.values_mut().filter(|failed| failed.lacks);
            lacking.for_each(|failed| failed.retry_at = Instant::now());
        }
    }

    /// Forgets the failed tries of containers that no longer need a start, and records events for containers
    /// that enter back-off.
    pub(super) fn follow(&mut self, plan: &PodPlan, actions: &Actions) {
        self.failed.retain(|name, _| actions.start.iter().any(|start| start.name == *name));
        let (PodName { namespace, name: pod }, uid) = (&plan.name, &plan.uid);
        for name in actions.backoff.keys().filter(|name| !self.backing_off.contains(*name)) {
            let message =
                format!("Back-off restarting failed container {name} in pod {pod}_{namespace}({uid})");
            let object = Object::container(&plan.pod, name);
            self.services.reports.events.warning(object, "BackOff", message);
        }
        self.backing_off = actions.backoff.keys().cloned().collect();
    }

    /// Forgets the failed tries of containers for which `is_meant` returns true.
    pub(super) fn forget(&mut self, is_meant: impl Fn(&str) -> bool) {
        self.failed.retain(|name, _| !is_meant(name));
    }

    /// Returns true if a failed try of a container is waiting for its retry.
    pub(super) fn any_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Returns true if a container may be started now.
    pub(super) fn may_try(&self, name: &str) -> bool {
        self.failed.get(name).is_none_or(|failed| failed.retry_at <= Instant::now())
    }

    /// Returns the time of the next try, or None while the pod waits for objects or if no try failed.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.failed.values().map(|failed| failed.retry_at).min().filter(|_| !self.held_back)
    }

    /// Returns true if the pod has to wait for objects that the API server has not answered for yet. `plan`
    /// is None at the beginning of a step: a step that fails before the check waits for its pause only.
    pub(super) fn hold_back(&mut self, plan: Option<&PodPlan>) -> bool {
        self.held_back = plan.is_some_and(|plan| self.services.pods.waits_for_objects(&plan.pod));
        self.held_back
    }

    /// Waits for the objects or devices that the pod waits for; forever if it waits for none.
    pub(super) async fn changed(&mut self, plan: &PodPlan) {
        let Self { services, devices, held_back, .. } = self;
        let answered = Box::pin(services.pods.objects_answered(&plan.pod));
        tokio::select! {
            () = answered, if *held_back => {}
            () = devices.changed() => {}
        }
    }

    /// Waits until the pod is admitted. Returns false if admission refuses the pod; the manager then ends it.
    pub(super) async fn has_room(
        &self,
        plan: &PodPlan,
        control: &watch::Receiver<Control>,
        actions: &Actions,
    ) -> bool {
        if actions.create_sandbox.is_none() && actions.start.is_empty() {
            return true;
        }
        let node = self.services.pods.desired.borrow().node.clone();
        room::admitted(&self.services.admission, node.as_deref(), plan, control).await
    }

    /// Returns the pod's devices.
    pub(super) fn devices(&mut self) -> &mut DeviceGrant {
        &mut self.devices
    }

    /// Returns the waiting states of containers, by name.
    pub(super) fn waiting(&self, plan: &PodPlan, actions: &Actions) -> BTreeMap<String, Waiting> {
        let (PodName { namespace, name: pod }, uid) = (&plan.name, &plan.uid);
        let mut waiting: BTreeMap<String, Waiting> = BTreeMap::new();
        for (name, backoff) in &actions.backoff {
            let delay = in_go(backoff.delay);
            let message =
                format!("back-off {delay} restarting failed container={name} pod={pod}_{namespace}({uid})");
            waiting.insert(name.clone(), Waiting { reason: "CrashLoopBackOff".to_owned(), message });
        }
        waiting.extend(self.failed.iter().map(|(name, failed)| (name.clone(), failed.waiting())));
        waiting.extend(self.devices.waiting(plan, actions));
        waiting
    }

    /// Creates the pod's sandbox, and records a failure as an event. Returns the sandbox's identifier.
    ///
    /// # Errors
    /// A step of the creation fails.
    pub(super) async fn create_sandbox(
        &self,
        plan: &Arc<PodPlan>,
        attempt: u32,
        tasks: &BlockingTasks,
    ) -> Result<String, Error> {
        let StartServices { sandboxes, reports, node, .. } = &*self.services;
        let object = || Object::pod(&plan.pod);
        if attempt > 0 {
            let message = "Pod sandbox changed, it will be killed and re-created.";
            reports.events.normal(object(), "SandboxChanged", message);
        }
        for (reason, message) in dns_warnings(&plan.pod, node) {
            reports.events.warning(object(), reason, message);
        }
        let span = trace_span!(target: TARGET, "sandbox", otel.name = "createSandbox", attempt);
        let made = sandboxes.create(plan, attempt, tasks).instrument(span).await;
        reports.metrics.started.pod(made.is_err());
        if plan.own_users {
            let (started, failed) = &reports.metrics.user_namespaced;
            started.inc();
            failed.inc_by(made.is_err().into());
        }
        match &made {
            Ok(id) => info!(pod = %plan.name, sandbox = id, attempt, "sandbox runs"),
            Err(error) => {
                let (reason, message) = sandbox_failure(error, plan);
                reports.events.warning(object(), reason, message);
            }
        }
        made
    }

    /// Starts a container, and returns its identifier. After a failure, records it and returns None; the
    /// container waits for its next try.
    pub(super) async fn start_container(
        &mut self,
        plan: &Arc<PodPlan>,
        observed: (&SandboxDetail, &Observation),
        start: &pod::Start,
        tasks: &BlockingTasks,
    ) -> Option<String> {
        let (name, attempt) = (&start.name, start.attempt);
        info!(pod = %plan.name, container = name, attempt, "starting container");
        let span = trace_span!(
            target: TARGET, "container", otel.name = "startContainer", k8s.container.name = name,
            attempt,
        );
        let started = self.services.containers.start(plan, observed, start, tasks).instrument(span).await;
        self.services.reports.metrics.started.container(&plan.pod, name, &started);
        match started {
            Ok(id) => {
                self.failed.remove(name);
                info!(pod = %plan.name, container = name, id, attempt, "container runs");
                Some(id)
            }
            Err(error) => {
                self.record_failure(plan, name, &error);
                None
            }
        }
    }

    fn record_failure(&mut self, plan: &PodPlan, name: &str, error: &StartError) {
        let failure = error.failure();
        let before = self.failed.get(name);
        let same = before.filter(|before| before.failure == failure);
        let delay = pod::start_pause(failure, same.map(|before| before.delay), chance());
        let tries = before.map_or(0, |before| before.tries) + 1;
        warn!(pod = %plan.name, container = name, reason = error.reason(), %error,
            retry_in_seconds = delay.as_secs(), "cannot start container");
        let waiting = Waiting { reason: error.reason().to_owned(), message: error.to_string() };
        let message = format!("Error: {}: {}", waiting.reason, waiting.message);
        self.services.reports.events.warning(Object::container(&plan.pod, name), "Failed", message);
        let (retry_at, lacks) = (Instant::now().after(delay), matches!(error, StartError::Config(_)));
        let failed = FailedStart { waiting, failure, tries, delay, retry_at, lacks };
        self.failed.insert(name.to_owned(), failed);
    }
}

/// Returns the reason and message of the event for a failed creation of a sandbox.
fn sandbox_failure(error: &Error, plan: &PodPlan) -> (&'static str, String) {
    let is_api = Origin::of(&plan.pod).is_api();
    match error {
        Error::UnseenMount { volume, why } => {
            ("FailedMount", format!("MountVolume.SetUp failed for volume {volume:?} : {why}"))
        }
        Error::Volume { volume, why } if is_api => {
            ("FailedMount", format!("MountVolume.SetUp failed for volume {volume:?} : {why}"))
        }
        Error::Unprepared(_) => {
            ("FailedPrepareDynamicResources", format!("Failed to prepare dynamic resources: {error}"))
        }
        Error::Claims { .. } => ("FailedMount", format!("Unable to attach or mount volumes: {error}")),
        _ => ("FailedCreatePodSandBox", format!("Failed to create pod sandbox: {error}")),
    }
}

/// Formats a duration of whole seconds like Go, and so like the kubelet: `10s`, `1m20s`, `5m0s`.
fn in_go(duration: Duration) -> String {
    match (duration.as_secs() / 60, duration.as_secs() % 60) {
        (0, seconds) => format!("{seconds}s"),
        (minutes, seconds) => format!("{minutes}m{seconds}s"),
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
}
