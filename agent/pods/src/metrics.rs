//! What the pods' half tells of itself.

use std::{sync::Arc, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::{
    pod_table_metrics::PodTableMetrics, start_counters::StartCounters, startup_latency::StartupLatency,
};
use beelet_model::table::PodTable;

/// Bounds of a step's duration, in seconds: Prometheus' own.
const STEPS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// What a step of a pod's worker was for, as the kubelet's metric has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The first one.
    Create,
    /// The pod was changed.
    Update,
    /// What the runtime has was brought to what is wanted.
    Sync,
    /// The pod ends.
    Kill,
}

/// Where a pod is on its way, as `kubelet_working_pods` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    /// It runs, or is to run.
    Sync,
    /// It ends.
    Terminating,
    /// Nothing of it runs any more.
    Terminated,
}

/// What a pod counts as in the gauges of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    /// It is not from the API server.
    pub(crate) is_static: bool,
    /// Its source still has it.
    pub(crate) is_desired: bool,
    pub(crate) lifecycle: Lifecycle,
}

/// How many pods count as what: [static][orphan][lifecycle].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Working([[[i64; 3]; 2]; 2]);

impl Working {
    /// So many more count as this.
    pub(crate) fn add(&mut self, pod: Counted, more: i64) {
        self.0[usize::from(pod.is_static)][usize::from(!pod.is_desired)][pod.lifecycle as usize] += more;
    }
}

/// The kubelet writes "true" or nothing.
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

/// Counters and gauges; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    desired_pods: Family<StaticLabel, Gauge>,
    active_pods: Family<StaticLabel, Gauge>,
    working_pods: Family<WorkingLabel, Gauge>,
    restarted_pods: Family<StaticLabel, Counter>,
    orphaned_pods: Counter,
    /// Manifests that could not become a pod.
    pub rejected_manifests: Gauge,
    /// Writes of the durable pod records that failed.
    pub state_write_errors: Counter,
    /// Pods with user namespaces of their own that were started, and those of them that failed to.
    pub(crate) user_namespaced: (Counter, Counter),
    /// Hooks that were to ask by HTTPS and asked by HTTP.
    pub downgraded_hooks: Counter,
    pub(crate) startup: StartupLatency,
    pub(crate) started: StartCounters,
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
            startup: StartupLatency::default(),
            started: StartCounters::default(),
            steps: Family::new_with_constructor(steps as fn() -> Histogram),
            pod_table: PodTableMetrics::default(),
        }
    }
}

impl Metrics {
    /// Adds all of them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_desired_pods",
            "Pods that this node is told to run; static=\"true\": by its manifests",
            self.desired_pods.clone(),
        );
        registry.register(
            "kubelet_active_pods",
            "Pods of these that have not ended: they count when a new one asks for room",
            self.active_pods.clone(),
        );
        registry.register(
            "kubelet_working_pods",
            "Pods that are here, by lifecycle (sync, terminating, terminated) and by whether anybody wants them (desired, orphan)",
            self.working_pods.clone(),
        );
        registry.register(
            "kubelet_restarted_pods",
            "Pods that came back with the UID of one that was here and went",
            self.restarted_pods.clone(),
        );
        registry.register(
            "kubelet_orphaned_runtime_pods",
            "Pods that the runtime had and nobody wanted",
            self.orphaned_pods.clone(),
        );
        registry.register(
            "beelet_rejected_manifests",
            "Files in the static pod folder that could not become a pod",
            self.rejected_manifests.clone(),
        );
        registry.register(
            "beelet_pod_records_write_errors",
            "Failed writes of the durable pod records",
            self.state_write_errors.clone(),
        );
        registry.register(
            "kubelet_pod_worker_duration_seconds",
            "How long a step of a pod's worker took, in seconds, by what it was for: create, update, sync or kill",
            self.steps.clone(),
        );
        registry.register(
            "kubelet_started_user_namespaced_pods",
            "Pods with user namespaces of their own whose sandbox was to be made",
            self.user_namespaced.0.clone(),
        );
        registry.register(
            "kubelet_started_user_namespaced_pods_errors",
            "Those of them whose sandbox could not be made",
            self.user_namespaced.1.clone(),
        );
        registry.register(
            "kubelet_lifecycle_handler_http_fallbacks",
            "Hooks that were to ask by HTTPS and asked by HTTP, because that answered",
            self.downgraded_hooks.clone(),
        );
        self.startup.register(registry);
        self.started.register(registry);
        registry.register_collector(Box::new(self.pod_table.clone()));
    }

    /// A step of a pod's worker took so long.
    pub(crate) fn step(&self, step: Purpose, took: Duration) {
        let operation_type = match step {
            Purpose::Create => "create",
            Purpose::Update => "update",
            Purpose::Sync => "sync",
            Purpose::Kill => "kill",
        };
        self.steps.get_or_create(&StepLabel { operation_type }).observe(took.as_secs_f64());
    }

    /// Counts pods by what they are on their way to.
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
        // Every sandbox says whose it is and where its pod came from: there is none of which nothing is
        // known.
        for lifecycle in ["sync", "terminating", "terminated"] {
            let label = WorkingLabel { lifecycle, config: "runtime_only", r#static: "unknown" };
            self.working_pods.get_or_create(&label).set(0);
        }
    }

    /// A pod came back with the UID of one that went.
    pub(crate) fn restarted(&self, is_static: bool) {
        self.restarted_pods.get_or_create(&StaticLabel::of(is_static)).inc();
    }

    /// The runtime had a pod that nobody wanted.
    pub(crate) fn orphaned(&self) {
        self.orphaned_pods.inc();
    }

    /// What is told of the table from now on, whenever somebody asks.
    pub(crate) fn show(&self, table: &Arc<PodTable>) {
        self.pod_table.show(table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;

    #[test]
    fn pods_are_counted_by_their_lifecycle_and_by_whether_they_are_wanted() {
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
