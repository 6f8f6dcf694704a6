//! Metrics of the manager of pods and of its workers.

use std::{sync::Arc, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::{
    pod_table_metrics::PodTableMetrics, resize_metrics::ResizeMetrics, start_counters::StartCounters,
    startup_latency::StartupLatency,
};
use beelet_model::table::PodTable;

/// Upper bounds of the buckets for a step's duration, in seconds: Prometheus' defaults.
const STEPS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Purpose of a worker's step, a label of the kubelet's metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The first step of a worker.
    Create,
    /// A step after a change of the pod.
    Update,
    /// Reconciliation of the runtime with the desired pod.
    Sync,
    /// Termination of the pod.
    Kill,
}

/// Lifecycle of a pod, a label of `kubelet_working_pods`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    /// The pod runs or will run.
    Sync,
    /// The pod is terminating.
    Terminating,
    /// All containers of the pod have ended permanently.
    Terminated,
}

/// Labels of a pod in the gauges of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    /// The pod's source is not the API server.
    pub(crate) is_static: bool,
    /// The pod's source still has the pod.
    pub(crate) is_desired: bool,
    pub(crate) lifecycle: Lifecycle,
}

/// Numbers of pods by labels: [static][orphan][lifecycle].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Working([[[i64; 3]; 2]; 2]);

impl Working {
    /// Adds `more`, which may be negative, to the number of pods with these labels.
    pub(crate) fn add(&mut self, pod: Counted, more: i64) {
        self.0[usize::from(pod.is_static)][usize::from(!pod.is_desired)][pod.lifecycle as usize] += more;
    }
}

/// Label `static`, which is "true" or empty, as in the kubelet.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StaticLabel {
    r#static: &'static str,
}

impl StaticLabel {
    fn of(is_static: bool) -> Self {
        Self { r#static: if is_static { "true" } else { "" } }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkingLabel {
    lifecycle: &'static str,
    config: &'static str,
    r#static: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StepLabel {
    operation_type: &'static str,
}

fn steps() -> Histogram {
    Histogram::new(STEPS)
}

/// Counters and gauges, shared by clones.
#[derive(Clone, Debug)]
pub struct Metrics {
    desired_pods: Family<StaticLabel, Gauge>,
    active_pods: Family<StaticLabel, Gauge>,
    working_pods: Family<WorkingLabel, Gauge>,
    restarted_pods: Family<StaticLabel, Counter>,
    orphaned_pods: Counter,
    /// Rejected manifests.
    pub rejected_manifests: Gauge,
    /// Failed writes of the durable pod records.
    pub state_write_errors: Counter,
    /// Attempts to create sandboxes with their own user namespace, and failed attempts.
    pub(crate) user_namespaced: (Counter, Counter),
    /// HTTPS hooks that were repeated by HTTP.
    pub downgraded_hooks: Counter,
    /// `sleep` hooks that ended before their time.
    pub(crate) shortened_sleeps: Counter,
    pub(crate) startup: StartupLatency,
    pub(crate) started: StartCounters,
    pub(crate) resizes: ResizeMetrics,
    steps: Family<StepLabel, Histogram, fn() -> Histogram>,
    pod_table: PodTableMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            desired_pods: Family::default(),
            active_pods: Family::default(),
            working_pods: Family::default(),
            restarted_pods: Family::default(),
            orphaned_pods: Counter::default(),
            rejected_manifests: Gauge::default(),
            state_write_errors: Counter::default(),
            user_namespaced: Default::default(),
            downgraded_hooks: Counter::default(),
            shortened_sleeps: Counter::default(),
            startup: StartupLatency::default(),
            started: StartCounters::default(),
            resizes: ResizeMetrics::default(),
            steps: Family::new_with_constructor(steps as fn() -> Histogram),
            pod_table: PodTableMetrics::default(),
        }
    }
}

impl Metrics {
    /// Adds all metrics to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_desired_pods",
            "Desired pods of this node (static=\"true\" for pods from manifests)",
            self.desired_pods.clone(),
        );
        registry.register(
            "kubelet_active_pods",
            "Desired pods that have not ended, which count in admission",
            self.active_pods.clone(),
        );
        registry.register(
            "kubelet_working_pods",
            "Pods with a worker, by lifecycle (sync, terminating, terminated) and config (desired, orphan)",
            self.working_pods.clone(),
        );
        registry.register(
            "kubelet_restarted_pods",
            "Pods that started again with the UID of a removed pod",
            self.restarted_pods.clone(),
        );
        registry.register(
            "kubelet_orphaned_runtime_pods",
            "Pods found in the runtime that no source had",
            self.orphaned_pods.clone(),
        );
        registry.register(
            "beelet_rejected_manifests",
            "Rejected files in the static pod folder",
            self.rejected_manifests.clone(),
        );
        registry.register(
            "beelet_pod_records_write_errors",
            "Failed writes of the durable pod records",
            self.state_write_errors.clone(),
        );
        registry.register(
            "kubelet_pod_worker_duration_seconds",
            "Duration of a pod worker's step in seconds, by operation type (create, update, sync, kill)",
            self.steps.clone(),
        );
        registry.register(
            "kubelet_started_user_namespaced_pods",
            "Attempts to create the sandbox of a pod with its own user namespace",
            self.user_namespaced.0.clone(),
        );
        registry.register(
            "kubelet_started_user_namespaced_pods_errors",
            "Failed attempts to create the sandbox of a pod with its own user namespace",
            self.user_namespaced.1.clone(),
        );
        registry.register(
            "kubelet_lifecycle_handler_http_fallbacks",
            "HTTPS lifecycle hooks that were repeated by HTTP because the server answered by HTTP",
            self.downgraded_hooks.clone(),
        );
        registry.register(
            "kubelet_sleep_action_terminated_early",
            "Pauses of lifecycle hooks (`sleep`) that ended before their time",
            self.shortened_sleeps.clone(),
        );
        self.startup.register(registry);
        self.started.register(registry);
        self.resizes.register(registry);
        registry.register_collector(Box::new(self.pod_table.clone()));
    }

    /// Observes the duration of a worker's step.
    pub(crate) fn step(&self, step: Purpose, took: Duration) {
        let operation_type = match step {
            Purpose::Create => "create",
            Purpose::Update => "update",
            Purpose::Sync => "sync",
            Purpose::Kill => "kill",
        };
        self.steps.get_or_create(&StepLabel { operation_type }).observe(took.as_secs_f64());
    }

    /// Sets the gauges of pods.
    pub(crate) fn count(&self, working: &Working) {
        for (is_static, of_source) in [false, true].into_iter().zip(working.0) {
            let label = StaticLabel::of(is_static);
            let [sync, terminating, terminated] = of_source[0];
            self.desired_pods.get_or_create(&label).set(sync + terminating + terminated);
            self.active_pods.get_or_create(&label).set(sync + terminating);
            for (config, counts) in ["desired", "orphan"].into_iter().zip(of_source) {
                for (lifecycle, count) in ["sync", "terminating", "terminated"].into_iter().zip(counts) {
                    let label = WorkingLabel { lifecycle, config, r#static: label.r#static };
                    self.working_pods.get_or_create(&label).set(count);
                }
            }
        }
        // Every sandbox has labels for its pod and the pod's source, so no pod is unknown.
        for lifecycle in ["sync", "terminating", "terminated"] {
            let label = WorkingLabel { lifecycle, config: "runtime_only", r#static: "unknown" };
            self.working_pods.get_or_create(&label).set(0);
        }
    }

    /// Counts a pod that starts again with the UID of a removed pod.
    pub(crate) fn restarted(&self, is_static: bool) {
        self.restarted_pods.get_or_create(&StaticLabel::of(is_static)).inc();
    }

    /// Counts an orphaned pod in the runtime.
    pub(crate) fn orphaned(&self) {
        self.orphaned_pods.inc();
    }

    /// Sets the pod table that the next scrape shows.
    pub(crate) fn show(&self, table: &Arc<PodTable>) {
        self.pod_table.show(table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;

    #[test]
    fn pods_are_counted_by_lifecycle_and_source() {
        let pod = |is_static, is_desired, lifecycle| Counted { is_static, is_desired, lifecycle };
        let metrics = Metrics::default();
        let mut working = Working::default();
        for one in [
            pod(false, true, Lifecycle::Sync),
            pod(false, true, Lifecycle::Terminating),
            pod(false, true, Lifecycle::Terminated),
            pod(true, false, Lifecycle::Terminating),
        ] {
            working.add(one, 1);
        }
        metrics.count(&working);
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            r#"kubelet_desired_pods{static=""} 3"#,
            r#"kubelet_desired_pods{static="true"} 0"#,
            r#"kubelet_active_pods{static=""} 2"#,
            r#"kubelet_active_pods{static="true"} 0"#,
            r#"kubelet_working_pods{lifecycle="sync",config="desired",static=""} 1"#,
            r#"kubelet_working_pods{lifecycle="terminating",config="orphan",static="true"} 1"#,
            r#"kubelet_working_pods{lifecycle="terminated",config="runtime_only",static="unknown"} 0"#,
        ] {
            assert!(text.lines().any(|one| one == line), "no {line} in\n{text}");
        }
    }
}
