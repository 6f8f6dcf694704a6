//! How containers are ended: preStop hooks, the order of sidecars, and one grace period that all of it
//! shares, as in the kubelet's killContainersWithSyncResult (KEP-753 for the order).

use std::{collections::BTreeSet, time::Duration};

use beelet_policy::pod::{self, KillReason, why::KILL_FAILED};
use beelet_units::bounds;
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::{sync::watch, time::Instant};
use tracing::{debug, warn};

use super::{Worker, hooks, ignore_missing};
use crate::{error::Error, runtime_view::Observation};
use beelet_model::{pod::container_of, status::whole_second};
use beelet_state::events::Object;

/// What a container gets to end by itself, however little is left: the kubelet's minimumGracePeriodInSeconds.
const MINIMUM: Duration = Duration::from_secs(2);

/// How old a container is before it is told to end, where its grace period has room for that. A process that
/// has only begun does not listen to signals yet: as the first of its namespace it loses them, and goes on
/// until its grace period is over. Who looks at the kubelet's word knows of a start about that late.
const CHILDHOOD: Duration = Duration::from_secs(1);

/// How long a container that is in that state now is left alone first.
fn childhood_left(state: &pod::ContainerState, now: Timestamp) -> Duration {
    let pod::ContainerState::Running { started_at } = state else { return Duration::ZERO };
    // By the clock on the wall, which may have been set: an age below zero says nothing.
    let age = Duration::try_from(now.duration_since(*started_at)).unwrap_or(CHILDHOOD);
    CHILDHOOD.saturating_sub(age)
}

/// The time in which something must have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    began: Instant,
    pub(super) grace: Duration,
}

impl Window {
    /// From now on.
    pub(super) fn new(grace: Duration) -> Self {
        Self { began: Instant::now(), grace }
    }

    /// What is left for a hook, or for others to end first.
    fn left(self) -> Duration {
        self.grace.saturating_sub(self.began.elapsed())
    }

    /// What the runtime is told: whole seconds, of which only whole ones have passed.
    fn for_runtime(self) -> Duration {
        let passed = Duration::from_secs(self.began.elapsed().as_secs());
        self.grace.saturating_sub(passed).max(MINIMUM)
    }
}

/// How far containers that end together have come.
#[derive(Default)]
struct Progress {
    ended: BTreeSet<String>,
    /// One could not be stopped. Nobody waits for it; all is tried again.
    failed: bool,
}

impl Worker {
    /// Ends what runs in a sandbox, sidecars last and in reverse, then the sandbox itself.
    pub(super) async fn stop_sandbox(
        &self,
        id: &str,
        seen: &Observation,
        window: Window,
    ) -> Result<(), Error> {
        self.end_sandbox(id, seen, window).await.map_err(Error::of_kill)
    }

    /// Records why the pod, or something of it, has not ended: a step of its end failed, or one that stops
    /// something (`killPod` of the kubelet).
    pub(super) fn record_not_ended(&self, error: &Error, is_ending: bool) {
        // That drivers don't take back what they prepared has an event of its own.
        let is_told = matches!(error, Error::StillPrepared(_));
        if !is_told && (is_ending || matches!(error, Error::Kill(_))) {
            let message = format!("error killing pod: {error}");
            self.launcher.events.warning(Object::pod(&self.plan.pod), KILL_FAILED, message);
        }
    }

    async fn end_sandbox(&self, id: &str, seen: &Observation, window: Window) -> Result<(), Error> {
        let runs = |c: &&pod::Container| {
            matches!(c.state, pod::ContainerState::Running { .. } | pod::ContainerState::Unknown)
        };
        let alive: Vec<&pod::Container> =
            seen.pod.containers.iter().filter(|c| c.sandbox_id == id).filter(runs).collect();
        let inits =
            self.plan.pod.spec.as_ref().and_then(|s| s.init_containers.as_deref()).unwrap_or_default();
        // Its place among the sidecars; None for all others, which end first.
        let place =
            |c: &pod::Container| inits.iter().position(|init| pod::is_sidecar(init) && init.name == c.name);
        let progress = watch::Sender::new(Progress::default());
        let ends = alive.iter().map(|container| {
            let mine = place(container);
            let before = alive
                .iter()
                .filter(|other| mine.is_some() && (place(other).is_none() || place(other) > mine));
            let before: Vec<&str> = before.map(|other| other.id.as_str()).collect();
            let (events, object) = self.events_of(&container.name);
            events.normal(object, "Killing", format!("Stopping container {}", container.name));
            self.end_container(container, seen, window, before, &progress)
        });
        join_all(ends).await.into_iter().collect::<Result<(), Error>>()?;
        ignore_missing(self.runtime.stop_sandbox(id).await)
    }

    /// Ends one container: its hook, then, once those `before` it have ended, its process.
    async fn end_container(
        &self,
        container: &pod::Container,
        seen: &Observation,
        window: Window,
        before: Vec<&str>,
        progress: &watch::Sender<Progress>,
    ) -> Result<(), Error> {
        let childhood = childhood_left(&container.state, Timestamp::now());
        if window.left() >= childhood + MINIMUM {
            tokio::time::sleep(childhood).await;
        }
        self.pre_stop(container, seen, window).await;
        let mut others = progress.subscribe();
        let turn = others.wait_for(|p| p.failed || before.iter().all(|id| p.ended.contains(*id)));
        // Out of time, it ends together with those it should have outlived.
        if let Ok(Ok(p)) = tokio::time::timeout(window.left(), turn).await
            && p.failed
        {
            return Ok(());
        }
        let stopped = ignore_missing(self.runtime.stop_container(&container.id, window.for_runtime()).await);
        progress.send_modify(|p| match &stopped {
            Ok(()) => drop(p.ended.insert(container.id.clone())),
            Err(_) => p.failed = true,
        });
        stopped
    }

    /// Ends containers that a probe or a hook condemned.
    pub(super) async fn kill(&self, kills: &[pod::Kill], seen: &Observation) -> Result<(), Error> {
        let progress = watch::Sender::new(Progress::default());
        let ends = kills.iter().filter_map(|kill| {
            let container = seen.pod.containers.iter().find(|c| c.id == kill.id)?;
            let (events, object) = self.events_of(&kill.name);
            events.normal(object, "Killing", format!("Container {} {}", kill.name, kill.reason.message()));
            let window = Window::new(self.grace(&kill.name, kill.reason));
            Some(self.end_container(container, seen, window, Vec::new(), &progress))
        });
        join_all(ends).await.into_iter().collect::<Result<(), Error>>().map_err(Error::of_kill)
    }

    /// Returns true if a container runs, or has ended after it was told to: what it was condemned for may be
    /// why. A container that ended by itself counts by its exit code, whatever a probe said in that instant.
    pub(super) fn may_be_for(&self, id: &str, seen: &Observation) -> bool {
        let container = seen.pod.containers.iter().find(|c| c.id == id);
        match container.map(|c| &c.state) {
            Some(pod::ContainerState::Exited { finished_at, .. }) => {
                // A runtime may know the time to the second, or not at all.
                let is_known = *finished_at != Timestamp::UNIX_EPOCH;
                let is_exact = finished_at.subsec_nanosecond() != 0;
                let since = |at: &Timestamp| if is_exact { *at } else { whole_second(*at) };
                self.stopped.get(id).is_some_and(|at| !is_known || since(at) <= *finished_at)
            }
            _ => true,
        }
    }

    /// The seconds a container gets: its failed probe's own, else the pod's.
    fn grace(&self, container: &str, reason: KillReason) -> Duration {
        if reason == KillReason::RestartAll {
            // No hook, and the least time to end, as from the kubelet (`ContainersToReset` in its SyncPod).
            return Duration::ZERO;
        }
        let probe = container_of(&self.plan.pod, container).and_then(|c| match reason {
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
        own.map_or_else(|| self.plan.grace, bounds::grace)
    }

    /// Runs a container's preStop hook, if it has one and there is time for it. A failure delays nothing.
    async fn pre_stop(&self, container: &pod::Container, seen: &Observation, window: Window) {
        let Some(spec) = container_of(&self.plan.pod, &container.name) else { return };
        let Some(handler) = spec.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref()) else { return };
        let runs = matches!(container.state, pod::ContainerState::Running { .. });
        if !runs || window.left().is_zero() {
            return;
        }
        debug!(pod = %self.plan.name, container = container.name, "preStop hook runs");
        let ip = self.pod_ip(seen);
        let subject = hooks::Subject { spec, id: &container.id, pod_ip: ip.as_deref() };
        if let Err(error) = self.run_hook(handler, subject, Some(window.left())).await {
            warn!(pod = %self.plan.name, container = container.name, error, "preStop hook failed");
            let (events, object) = self.events_of(&container.name);
            events.warning(object, "FailedPreStopHook", format!("preStop hook failed: {error}"));
        }
    }

    /// Runs a container's postStart hook, if it has one; false if it failed.
    pub(super) async fn post_start(&mut self, name: &str, id: &str, seen: &Observation) -> bool {
        let pod = std::sync::Arc::clone(&self.plan.pod);
        let Some(spec) = container_of(&pod, name) else { return true };
        let Some(handler) = spec.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()) else { return true };
        debug!(pod = %self.plan.name, container = name, "postStart hook runs");
        let ip = self.pod_ip(seen);
        let subject = hooks::Subject { spec, id, pod_ip: ip.as_deref() };
        match self.run_hook(handler, subject, None).await {
            Ok(()) => {
                self.hooked.insert(id.to_owned());
                true
            }
            Err(error) => {
                warn!(pod = %self.plan.name, container = name, error, "postStart hook failed; the container is stopped");
                let (events, object) = self.events_of(name);
                events.warning(object, "FailedPostStartHook", format!("postStart hook failed: {error}"));
                self.failed_hooks.insert(id.to_owned());
                false
            }
        }
    }

    /// Runs a hook, and says what was not as the pod wanted it.
    async fn run_hook(
        &self,
        handler: &core::LifecycleHandler,
        subject: hooks::Subject<'_>,
        within: Option<Duration>,
    ) -> Result<(), String> {
        if let Some(downgraded) = hooks::run(&self.runtime, handler, subject, within).await? {
            self.launcher.metrics.downgraded_hooks.inc();
            let pod = Object::pod(&self.plan.pod);
            self.launcher.events.warning(pod, "LifecycleHTTPFallback", downgraded.to_string());
        }
        Ok(())
    }

    fn pod_ip(&self, seen: &Observation) -> Option<String> {
        let sandbox = seen.sandbox.as_ref()?;
        let on_host = self.plan.pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true));
        // On a machine without an address, as an empty host is in Go.
        self.plan.ips(&sandbox.ips).into_iter().next().or_else(|| on_host.then(|| "127.0.0.1".to_owned()))
    }

    /// Where to record an event of a container, and its subject.
    fn events_of(&self, container: &str) -> (&beelet_state::events::Recorder, Object) {
        (&self.launcher.events, Object::container(&self.plan.pod, container))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_left_alone_until_it_is_a_second_old() {
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
