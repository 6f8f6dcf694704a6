//! Startup latency of pods, with the kubelet's metric names. Only pods that are new to this agent count: the
//! startup of a pod that ran before is unknown.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use prometheus_client::{metrics::histogram::Histogram, registry::Registry};
use tokio::time::Instant;
use tracing::{Span, field::Empty, trace_span};

use beelet_base::spans::TARGET;
use beelet_model::{status::has_ended, table::PodName};

/// Upper bounds of the buckets, in seconds: the kubelet's.
const BUCKETS: [f64; 25] = [
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0,
    480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];

/// A pod that is starting.
#[derive(Debug)]
struct Start {
    seen: Instant,
    /// Duration of the pod's pulls.
    pulling: Duration,
    runs: bool,
}

/// Starting pods, and histograms of startup latencies; shared by clones.
#[derive(Clone, Debug)]
pub(crate) struct StartupLatency {
    starting: Arc<Mutex<BTreeMap<String, Start>>>,
    /// Spans of pods that were not ready yet, parents of the spans of their steps.
    spans: Arc<Mutex<BTreeMap<String, Span>>>,
    running: Histogram,
    total: Histogram,
    sli: Histogram,
}

impl Default for StartupLatency {
    fn default() -> Self {
        let histogram = || Histogram::new(BUCKETS);
        Self {
            starting: Arc::default(),
            spans: Arc::default(),
            running: histogram(),
            total: histogram(),
            sli: histogram(),
        }
    }
}

impl StartupLatency {
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_pod_start_duration_seconds",
            "Time from the first observation of a pod until its phase was Running, in seconds",
            self.running.clone(),
        );
        registry.register(
            "kubelet_pod_start_total_duration_seconds",
            "Time from a pod's creation until all its containers ran, in seconds",
            self.total.clone(),
        );
        registry.register(
            "kubelet_pod_start_sli_duration_seconds",
            "Time from a pod's creation until all its containers ran, without pulls and init containers, of pods with only ephemeral volumes, in seconds",
            self.sli.clone(),
        );
    }

    /// Begins the measurement of a new pod.
    pub(crate) fn begin(&self, name: &PodName, uid: &str) {
        let span = trace_span!(
            target: TARGET, parent: None, "pod", otel.name = "startPod", k8s.pod.uid = uid,
            k8s.pod = %name, k8s.pod.name = name.name, k8s.namespace.name = name.namespace,
        );
        if !span.is_none() {
            self.spans().insert(uid.to_owned(), span);
        }
        let start = Start { seen: Instant::now(), pulling: Duration::ZERO, runs: false };
        self.with(|starting| starting.insert(uid.to_owned(), start));
    }

    /// Returns the span of a step of the pod's worker: a child of the span of the pod's start until the pod
    /// is ready, later a root.
    pub(crate) fn step(&self, name: &PodName, uid: &str, step: &'static str) -> Span {
        let parent = self.spans().get(uid).and_then(Span::id);
        trace_span!(
            target: TARGET, parent: parent, "step", otel.name = step, k8s.pod.uid = uid,
            k8s.pod = %name, k8s.pod.name = name.name, k8s.namespace.name = name.namespace,
            otel.status_code = Empty, otel.status_description = Empty,
        )
    }

    /// Ends the span of the pod's start, with a last child span that names the end.
    fn end_span(&self, uid: &str, end: &'static str) {
        if let Some(span) = self.spans().remove(uid) {
            drop(trace_span!(target: TARGET, parent: &span, "end", otel.name = end));
        }
    }

    fn spans(&self) -> MutexGuard<'_, BTreeMap<String, Span>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the duration of a pull.
    pub(crate) fn pulled(&self, uid: &str, took: Duration) {
        self.with(|starting| starting.get_mut(uid).into_iter().for_each(|start| start.pulling += took));
    }

    /// Forgets a removed pod.
    pub(crate) fn forget(&self, uid: &str) {
        self.with(|starting| starting.remove(uid));
        self.end_span(uid, "gone");
    }

    /// Records the newest status of a pod.
    pub(crate) fn record(&self, uid: &str, pod: &core::Pod, status: &core::PodStatus, now: Timestamp) {
        if has_ended(Some(status)) {
            self.end_span(uid, "ended");
        } else if is_ready(status) {
            self.end_span(uid, "firstReady");
        }
        self.with(|starting| {
            let Some(start) = starting.get_mut(uid) else { return };
            if status.phase.as_deref() == Some("Running") && !std::mem::replace(&mut start.runs, true) {
                self.running.observe(start.seen.elapsed().as_secs_f64());
            }
            if start.runs && all_run(status) {
                let created = pod.metadata.creation_timestamp.as_ref();
                let since =
                    |time: Timestamp| Duration::try_from(now.duration_since(time)).unwrap_or_default();
                let whole = created.map_or_else(|| start.seen.elapsed(), |time| since(time.0));
                self.total.observe(whole.as_secs_f64());
                if is_stateless(pod) {
                    let own = whole.saturating_sub(start.pulling).saturating_sub(init_time(status));
                    self.sli.observe(own.as_secs_f64());
                }
                starting.remove(uid);
            } else if has_ended(Some(status)) {
                starting.remove(uid);
            }
        });
    }

    fn with<T>(&self, work: impl FnOnce(&mut BTreeMap<String, Start>) -> T) -> T {
        work(&mut self.starting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn is_ready(status: &core::PodStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn all_run(status: &core::PodStatus) -> bool {
    let mut containers = status.container_statuses.iter().flatten();
    containers.all(|container| container.state.as_ref().is_some_and(|state| state.running.is_some()))
}

/// Returns the total duration of the ended init containers.
fn init_time(status: &core::PodStatus) -> Duration {
    let states = status.init_container_statuses.iter().flatten().filter_map(|one| one.state.as_ref());
    let times = states.filter_map(|state| {
        let ended = state.terminated.as_ref()?;
        let (from, to) = (ended.started_at.as_ref()?, ended.finished_at.as_ref()?);
        Duration::try_from(to.0.duration_since(from.0)).ok()
    });
    times.sum()
}

/// Returns true if all volumes end with the pod, which the definition of the SLI requires.
fn is_stateless(pod: &core::Pod) -> bool {
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.all(|volume| {
        volume.secret.is_some()
            || volume.config_map.is_some()
            || volume.downward_api.is_some()
            || volume.empty_dir.is_some()
            || volume.projected.is_some()
    })
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use serde_json::json;

    use super::*;

    fn name(uid: &str) -> PodName {
        PodName { namespace: "shop".to_owned(), name: uid.to_owned() }
    }

    fn text(latency: &StartupLatency) -> String {
        let mut registry = Registry::default();
        latency.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_counts_once_without_its_pulls_and_init_containers() {
        let latency = StartupLatency::default();
        let pod: core::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"containers": [], "volumes": [{"name": "v", "emptyDir": {}}]},
        }))
        .unwrap();
        let status = |state: serde_json::Value| -> core::PodStatus {
            let container = |name: &str, state: &serde_json::Value| json!({"name": name, "image": "i", "imageID": "i", "ready": false, "restartCount": 0, "state": state});
            let ended = json!({"terminated": {"exitCode": 0, "startedAt": "2026-01-01T00:00:01Z",
                "finishedAt": "2026-01-01T00:00:03Z"}});
            serde_json::from_value(json!({
                "phase": "Running",
                "initContainerStatuses": [container("init", &ended)],
                "containerStatuses": [container("app", &state)],
            }))
            .unwrap()
        };
        latency.begin(&name("u"), "u");
        tokio::time::advance(Duration::from_secs(10)).await;
        latency.pulled("u", Duration::from_secs(4));
        let now: Timestamp = "2026-01-01T00:00:11Z".parse().unwrap();
        latency.record("u", &pod, &status(json!({"waiting": {}})), now);
        let half = text(&latency);
        assert!(half.contains("kubelet_pod_start_duration_seconds_sum 10.0"), "{half}");
        assert!(half.contains("kubelet_pod_start_sli_duration_seconds_count 0"), "{half}");
        for _ in 0..2 {
            latency.record(
                "u",
                &pod,
                &status(json!({"running": {"startedAt": "2026-01-01T00:00:11Z"}})),
                now,
            );
        }
        let whole = text(&latency);
        for line in ["pod_start_total_duration_seconds_sum 11.0", "pod_start_sli_duration_seconds_sum 5.0"] {
            assert!(whole.contains(&format!("kubelet_{line}")), "no {line} in\n{whole}");
        }
        assert!(whole.contains("kubelet_pod_start_duration_seconds_count 1"), "{whole}");
    }

    #[tokio::test(start_paused = true)]
    async fn earlier_and_removed_pods_do_not_count() {
        let latency = StartupLatency::default();
        let status = core::PodStatus { phase: Some("Running".to_owned()), ..Default::default() };
        latency.record("old", &core::Pod::default(), &status, Timestamp::now());
        latency.begin(&name("gone"), "gone");
        latency.forget("gone");
        latency.record("gone", &core::Pod::default(), &status, Timestamp::now());
        assert!(text(&latency).contains("kubelet_pod_start_duration_seconds_count 0"));
    }
}
