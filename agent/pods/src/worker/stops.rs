//! Stops of containers: preStop hooks, the order of sidecars, and one grace period that all containers share,
//! as in the kubelet's killContainersWithSyncResult (KEP-753 for the order).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use beelet_policy::pod::{self, KillReason};
use beelet_units::bounds;
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::{sync::watch, time::Instant};
use tracing::{debug, warn};

use super::hooks;
use crate::{error::Error, plan::PodPlan, runtime_view::Observation, services::StopServices};
use beelet_model::pod::container_of;
use beelet_state::events::Object;

/// Shortest grace period of a container: the kubelet's minimumGracePeriodInSeconds.
const MINIMUM: Duration = Duration::from_secs(2);

/// Age at which a container may get its first signal, if its grace period allows the delay. A process that
/// has just started has no signal handlers yet: the first process of a PID namespace ignores such signals,
/// and runs until the end of its grace period. The kubelet's status shows a start with a similar delay.
const CHILDHOOD: Duration = Duration::from_secs(1);

/// Returns the time until a container in this state may get its first signal.
fn childhood_left(state: &pod::ContainerState, now: Timestamp) -> Duration {
    let pod::ContainerState::Running { started_at } = state else { return Duration::ZERO };
    // The wall clock may have been set back: a negative age is ignored.
    let age = Duration::try_from(now.duration_since(*started_at)).unwrap_or(CHILDHOOD);
    CHILDHOOD.saturating_sub(age)
}

/// Time window in which a container or a sandbox must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    began: Instant,
    pub(super) grace: Duration,
}

impl Window {
    /// Returns a window that opens now.
    pub(super) fn new(grace: Duration) -> Self {
        Self { began: Instant::now(), grace }
    }

    /// Returns the remaining time for a hook, or for other containers to end first.
    fn left(self) -> Duration {
        self.grace.saturating_sub(self.began.elapsed())
    }

    /// Returns the grace period for the runtime: the window less the whole seconds that have passed.
    fn for_runtime(self) -> Duration {
        let passed = Duration::from_secs(self.began.elapsed().as_secs());
        self.grace.saturating_sub(passed).max(MINIMUM)
    }
}

/// Progress of containers that end together.
#[derive(Default)]
struct Progress {
    ended: BTreeSet<String>,
    /// A stop failed. Other containers do not wait for the failed one, and the worker retries the step.
    failed: bool,
}

/// Stops of a pod's containers and sandboxes, with the hooks around them.
pub(super) struct Stops {
    services: Arc<StopServices>,
}

impl Stops {
    pub(super) fn new(services: &Arc<StopServices>) -> Self {
        Self { services: Arc::clone(services) }
    }

    /// Stops the containers of a sandbox, sidecars last and in reverse order, and then the sandbox.
    pub(super) async fn stop_sandbox(
        &self,
        plan: &PodPlan,
        id: &str,
        seen: &Observation,
        window: Window,
    ) -> Result<(), Error> {
        self.end_sandbox(plan, id, seen, window).await.map_err(Error::of_kill)
    }

    async fn end_sandbox(
        &self,
        plan: &PodPlan,
        id: &str,
        seen: &Observation,
        window: Window,
    ) -> Result<(), Error> {
        let runs = |c: &&pod::Container| {
            matches!(c.state, pod::ContainerState::Running { .. } | pod::ContainerState::Unknown)
        };
        let alive: Vec<&pod::Container> =
            seen.pod.containers.iter().filter(|c| c.sandbox_id == id).filter(runs).collect();
        let inits = plan.pod.spec.as_ref().and_then(|s| s.init_containers.as_deref()).unwrap_or_default();
        // Position of a container among the sidecars; None for all other containers, which end first.
        let place =
            |c: &pod::Container| inits.iter().position(|init| pod::is_sidecar(init) && init.name == c.name);
        let progress = watch::Sender::new(Progress::default());
        let ends = alive.iter().map(|container| {
            let mine = place(container);
            let before = alive
                .iter()
                .filter(|other| mine.is_some() && (place(other).is_none() || place(other) > mine));
            let before: Vec<&str> = before.map(|other| other.id.as_str()).collect();
            let (events, object) = self.events_of(plan, &container.name);
            events.normal(object, "Killing", format!("Stopping container {}", container.name));
            self.end_container(plan, (container, seen), window, before, &progress)
        });
        join_all(ends).await.into_iter().collect::<Result<(), Error>>()?;
        ignore_missing(self.services.runtime.sandboxes.stop(id).await)
    }

    /// Stops one container: runs its hook, waits for the containers in `before`, and then stops its process.
    async fn end_container(
        &self,
        plan: &PodPlan,
        (container, seen): (&pod::Container, &Observation),
        window: Window,
        before: Vec<&str>,
        progress: &watch::Sender<Progress>,
    ) -> Result<(), Error> {
        let childhood = childhood_left(&container.state, Timestamp::now());
        if window.left() >= childhood + MINIMUM {
            tokio::time::sleep(childhood).await;
        }
        self.pre_stop(plan, (container, seen), window).await;
        let mut others = progress.subscribe();
        let turn = others.wait_for(|p| p.failed || before.iter().all(|id| p.ended.contains(*id)));
        // Once the window is over, the container ends together with those in `before`.
        if let Ok(Ok(p)) = tokio::time::timeout(window.left(), turn).await
            && p.failed
        {
            return Ok(());
        }
        let stopped =
            ignore_missing(self.services.runtime.containers.stop(&container.id, window.for_runtime()).await);
        progress.send_modify(|p| match &stopped {
            Ok(()) => drop(p.ended.insert(container.id.clone())),
            Err(_) => p.failed = true,
        });
        stopped
    }

    /// Stops containers that failed a probe or a hook, or that need a restart.
    pub(super) async fn kill(
        &self,
        plan: &PodPlan,
        kills: &[pod::Kill],
        seen: &Observation,
    ) -> Result<(), Error> {
        let progress = watch::Sender::new(Progress::default());
        let ends = kills.iter().filter_map(|kill| {
            let container = seen.pod.containers.iter().find(|c| c.id == kill.id)?;
            let (events, object) = self.events_of(plan, &kill.name);
            events.normal(object, "Killing", format!("Container {} {}", kill.name, kill.reason.message()));
            let window = Window::new(grace(plan, &kill.name, kill.reason));
            Some(self.end_container(plan, (container, seen), window, Vec::new(), &progress))
        });
        join_all(ends).await.into_iter().collect::<Result<(), Error>>().map_err(Error::of_kill)
    }

    /// Runs a container's preStop hook, if it has one and the window allows. A failure delays nothing.
    async fn pre_stop(
        &self,
        plan: &PodPlan,
        (container, seen): (&pod::Container, &Observation),
        window: Window,
    ) {
        let Some(spec) = container_of(&plan.pod, &container.name) else { return };
        let Some(handler) = spec.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref()) else { return };
        let runs = matches!(container.state, pod::ContainerState::Running { .. });
        if !runs || window.left().is_zero() {
            return;
        }
        debug!(pod = %plan.name, container = container.name, "running preStop hook");
        let ip = pod_ip(plan, seen);
        let subject = hooks::Subject { spec, id: &container.id, pod_ip: ip.as_deref() };
        if let Err(error) = self.run_hook(plan, handler, subject, Some(window.left())).await {
            warn!(pod = %plan.name, container = container.name, error, "preStop hook failed");
            let (events, object) = self.events_of(plan, &container.name);
            events.warning(object, "FailedPreStopHook", format!("preStop hook failed: {error}"));
        }
    }

    /// Runs a container's postStart hook. Returns true if the hook succeeded, or None if the container has
    /// none.
    pub(super) async fn post_start(
        &self,
        plan: &PodPlan,
        name: &str,
        id: &str,
        seen: &Observation,
    ) -> Option<bool> {
        let spec = container_of(&plan.pod, name)?;
        let handler = spec.lifecycle.as_ref()?.post_start.as_ref()?;
        debug!(pod = %plan.name, container = name, "running postStart hook");
        let ip = pod_ip(plan, seen);
        let subject = hooks::Subject { spec, id, pod_ip: ip.as_deref() };
        match self.run_hook(plan, handler, subject, None).await {
            Ok(()) => Some(true),
            Err(error) => {
                warn!(pod = %plan.name, container = name, error, "postStart hook failed, stopping the container");
                let (events, object) = self.events_of(plan, name);
                events.warning(object, "FailedPostStartHook", format!("postStart hook failed: {error}"));
                Some(false)
            }
        }
    }

    /// Runs a hook. Counts a downgrade from HTTPS to HTTP, and records an event for it.
    async fn run_hook(
        &self,
        plan: &PodPlan,
        handler: &core::LifecycleHandler,
        subject: hooks::Subject<'_>,
        within: Option<Duration>,
    ) -> Result<(), String> {
        let result = hooks::run(&self.services.runtime, handler, subject, within).await;
        // A pause can fail only by its timeout.
        if result.is_err() && handler.exec.is_none() && handler.sleep.is_some() {
            self.services.reports.metrics.shortened_sleeps.inc();
        }
        if let Some(downgraded) = result? {
            self.services.reports.metrics.downgraded_hooks.inc();
            let pod = Object::pod(&plan.pod);
            self.services.reports.events.warning(pod, "LifecycleHTTPFallback", downgraded.to_string());
        }
        Ok(())
    }

    /// Returns the recorder and the object for an event of a container.
    fn events_of(&self, plan: &PodPlan, container: &str) -> (&beelet_state::events::Recorder, Object) {
        (&self.services.reports.events, Object::container(&plan.pod, container))
    }
}

/// Returns the grace period of a container: that of its failed probe, else the pod's.
fn grace(plan: &PodPlan, container: &str, reason: KillReason) -> Duration {
    if reason == KillReason::RestartAll {
        // No hook and the minimum grace period, as in the kubelet (`ContainersToReset` in its SyncPod).
        return Duration::ZERO;
    }
    let probe = container_of(&plan.pod, container).and_then(|c| match reason {
        KillReason::Liveness => c.liveness_probe.as_ref(),
        KillReason::Startup => c.startup_probe.as_ref(),
        KillReason::Unknown
        | KillReason::PostStartHook
        | KillReason::Redefined
        | KillReason::Resized
        | KillReason::RestartAll
        | KillReason::Requested => None,
    });
    let own = probe.and_then(|p| p.termination_grace_period_seconds);
    own.map_or_else(|| plan.grace, bounds::grace)
}

/// Returns the pod's primary address.
fn pod_ip(plan: &PodPlan, seen: &Observation) -> Option<String> {
    let sandbox = seen.sandbox.as_ref()?;
    let on_host = plan.pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true));
    // A machine without an address uses the loopback address, like an empty host in Go.
    plan.ips(&sandbox.ips).into_iter().next().or_else(|| on_host.then(|| "127.0.0.1".to_owned()))
}

/// Treats "not found" as success.
pub(super) fn ignore_missing(result: Result<(), beelet_cri::Error>) -> Result<(), Error> {
    match result {
        Err(error) if !error.is_not_found() => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_gets_no_signal_in_its_first_second() {
        let now = Timestamp::from_second(100).unwrap();
        let check = |started: i64, expected: u64| {
            let started_at = Timestamp::from_millisecond(started).unwrap();
            let left = childhood_left(&pod::ContainerState::Running { started_at }, now);
            assert_eq!(left, Duration::from_millis(expected), "{started}");
        };
        check(100_000, 1000);
        check(99_750, 750);
        check(99_000, 0);
        check(0, 0);
        // The clock was set back.
        check(100_001, 0);
        assert_eq!(childhood_left(&pod::ContainerState::Unknown, now), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_window_closes_but_leaves_a_moment_to_end() {
        let seconds = Duration::from_secs;
        let window = Window::new(seconds(10));
        assert_eq!((window.left(), window.for_runtime()), (seconds(10), seconds(10)));
        tokio::time::advance(Duration::from_millis(2900)).await;
        assert_eq!((window.left(), window.for_runtime()), (Duration::from_millis(7100), seconds(8)));
        tokio::time::advance(seconds(60)).await;
        assert_eq!((window.left(), window.for_runtime()), (seconds(0), MINIMUM));
        assert_eq!(Window::new(seconds(0)).for_runtime(), MINIMUM);
    }
}
