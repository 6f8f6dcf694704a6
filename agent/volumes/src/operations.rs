//! Durations of operations on volumes, under the kubelet's names.

use std::time::{Duration, Instant};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};

use crate::error::Error;

/// Upper bounds of the buckets of durations, in seconds: the kubelet's.
const BUCKETS: [f64; 13] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// An operation on a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Setup of a volume, or the check that it is set up.
    Mount,
    /// Removal of a volume.
    Unmount,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Mount => "volume_mount",
            Self::Unmount => "volume_unmount",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Done {
    volume_plugin: &'static str,
    operation_name: &'static str,
    status: &'static str,
    migrated: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failed {
    volume_plugin: &'static str,
    operation_name: &'static str,
}

fn durations() -> Histogram {
    Histogram::new(BUCKETS)
}

/// Counters of operations on volumes. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Operations {
    durations: Family<Done, Histogram, fn() -> Histogram>,
    errors: Family<Failed, Counter>,
}

impl Default for Operations {
    fn default() -> Self {
        let durations = Family::new_with_constructor(durations as fn() -> Histogram);
        Self { durations, errors: Family::default() }
    }
}

impl Operations {
    /// Adds the counters to `registry`.
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "storage_operation_duration_seconds",
            "Duration of setting up and removing volumes, in seconds",
            self.durations.clone(),
        );
        registry.register(
            "storage_operation_errors",
            "Failed setups and removals of volumes; newer kubelets lack this metric, but dashboards use it",
            self.errors.clone(),
        );
    }

    /// Runs `work` and records its duration once per volume, by the volume's plugin.
    pub(crate) fn time<T>(
        &self,
        operation: Operation,
        plugins: &[&'static str],
        work: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let began = Instant::now();
        let result = work();
        let took = began.elapsed();
        plugins.iter().for_each(|plugin| self.record(operation, plugin, took, result.is_ok()));
        result
    }

    fn record(&self, operation: Operation, volume_plugin: &'static str, took: Duration, success: bool) {
        let operation_name = operation.name();
        let status = if success { "success" } else { "fail-unknown" };
        let done = Done { volume_plugin, operation_name, status, migrated: "false" };
        self.durations.get_or_create(&done).observe(took.as_secs_f64());
        if !success {
            self.errors.get_or_create(&Failed { volume_plugin, operation_name }).inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn operations_are_counted_by_plugin_and_failures_twice() {
        let operations = Operations::default();
        let volumes = ["kubernetes.io/empty-dir"];
        operations.time(Operation::Mount, &volumes, || Ok(())).unwrap();
        let failed = operations.time(Operation::Unmount, &volumes, || Err::<(), _>(Error::unmet("no")));
        assert!(failed.is_err());
        let mut registry = Registry::default();
        operations.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let of = |operation: &str, status: &str| {
            format!(
                "storage_operation_duration_seconds_count{{volume_plugin=\"kubernetes.io/empty-dir\",\
                 operation_name=\"{operation}\",status=\"{status}\",migrated=\"false\"}} 1"
            )
        };
        let error = "storage_operation_errors_total{volume_plugin=\"kubernetes.io/empty-dir\",operation_name=\"volume_unmount\"} 1";
        for line in [of("volume_mount", "success"), of("volume_unmount", "fail-unknown"), error.to_owned()] {
            assert!(text.lines().any(|one| one == line), "no {line} in\n{text}");
        }
    }
}
