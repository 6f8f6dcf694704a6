//! Duration of the node's startup, by phase: boot, start of the agent, registration, readiness.
//!
//! Source: pkg/kubelet/util/node_startup_latency_tracker.go. As under the kubelet, only the registration of a
//! new Node counts: an agent that starts again on a known node shows no durations.

use std::{
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::Duration,
};

use beelet_base::clock::since_boot;
use prometheus_client::{
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};

/// No labels.
type NoLabels = [(&'static str, &'static str); 0];
/// A gauge without a sample before its first value.
type Seconds = Family<NoLabels, Gauge<f64, AtomicU64>>;

/// Durations of the startup. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Startup {
    /// Start of the agent, since boot.
    began: Duration,
    times: Arc<Mutex<Times>>,
    before_agent: Seconds,
    before_registration: Seconds,
    registration: Seconds,
    after_registration: Seconds,
    total: Seconds,
}

/// Times since boot.
#[derive(Debug, Default)]
struct Times {
    attempted: Option<Duration>,
    registered: Option<Duration>,
    ready: Option<Duration>,
}

impl Default for Startup {
    fn default() -> Self {
        Self::since(since_boot())
    }
}

impl Startup {
    fn since(began: Duration) -> Self {
        Self {
            began,
            times: Arc::default(),
            before_agent: Family::default(),
            before_registration: Family::default(),
            registration: Family::default(),
            after_registration: Family::default(),
            total: Family::default(),
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        for (name, help, gauge) in [
            (
                "kubelet_node_startup_pre_kubelet_duration_seconds",
                "Time from the boot to the agent's start",
                &self.before_agent,
            ),
            (
                "kubelet_node_startup_pre_registration_duration_seconds",
                "Time from the agent's start to the first attempt to register the Node",
                &self.before_registration,
            ),
            (
                "kubelet_node_startup_registration_duration_seconds",
                "Time from the first attempt to register the Node to its registration",
                &self.registration,
            ),
            (
                "kubelet_node_startup_post_registration_duration_seconds",
                "Time from the Node's registration until it was ready",
                &self.after_registration,
            ),
            (
                "kubelet_node_startup_duration_seconds",
                "Time from the boot until the Node was ready",
                &self.total,
            ),
        ] {
            registry.register(name, help, gauge.clone());
        }
    }

    /// Records an attempt to register the Node. Only the first one counts.
    pub(super) fn attempt(&self) {
        self.attempt_at(since_boot());
    }

    /// Records the registration of a new Node.
    pub(super) fn registered(&self) {
        self.registered_at(since_boot());
    }

    /// Records that the Node is ready.
    pub(super) fn ready(&self) {
        self.ready_at(since_boot());
    }

    fn attempt_at(&self, now: Duration) {
        self.with(|times| {
            times.attempted.get_or_insert(now);
        });
    }

    fn registered_at(&self, now: Duration) {
        let attempted = self.with(|times| {
            let attempted = times.attempted.filter(|_| times.registered.is_none())?;
            times.registered = Some(now);
            Some(attempted)
        });
        let Some(attempted) = attempted else { return };
        set(&self.before_agent, self.began);
        set(&self.before_registration, attempted.saturating_sub(self.began));
        set(&self.registration, now.saturating_sub(attempted));
    }

    fn ready_at(&self, now: Duration) {
        let registered = self.with(|times| {
            let registered = times.registered.filter(|_| times.ready.is_none())?;
            times.ready = Some(now);
            Some(registered)
        });
        let Some(registered) = registered else { return };
        set(&self.after_registration, now.saturating_sub(registered));
        set(&self.total, now);
    }

    fn with<T>(&self, work: impl FnOnce(&mut Times) -> T) -> T {
        work(&mut self.times.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn set(gauge: &Seconds, value: Duration) {
    gauge.get_or_create(&[]).set(value.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(startup: &Startup) -> Vec<String> {
        let mut registry = Registry::default();
        startup.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples.map(|line| line.replace("kubelet_node_startup_", "").replace("_seconds{}", "")).collect()
    }

    #[test]
    fn each_phase_of_a_new_nodes_startup_is_measured_once() {
        let at = Duration::from_secs;
        let startup = Startup::since(at(10));
        startup.ready_at(at(11));
        startup.registered_at(at(12));
        assert_eq!(shown(&startup), <[String; 0]>::default());
        for (attempt, registered, ready) in [(12, 15, 20), (30, 40, 50)] {
            startup.attempt_at(at(attempt));
            startup.registered_at(at(registered));
            startup.ready_at(at(ready));
        }
        assert_eq!(
            shown(&startup),
            [
                "pre_kubelet_duration 10.0",
                "pre_registration_duration 2.0",
                "registration_duration 3.0",
                "post_registration_duration 5.0",
                "duration 20.0",
            ]
        );
    }
}
