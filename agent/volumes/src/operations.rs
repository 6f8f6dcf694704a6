//! How long volumes take to be made and to be taken away, under the kubelet's names.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use beelet_model::storage::Claimed;
use beelet_policy::volumes::claims;
use k8s_openapi::api::core::v1 as core;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};

use crate::Error;

/// Bounds of durations, in seconds: the kubelet's.
const BUCKETS: [f64; 13] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// The kubelet's names of kinds of PersistentVolumes.
const HOST_PATH: &str = "kubernetes.io/host-path";
const LOCAL: &str = "kubernetes.io/local-volume";
const CSI: &str = "kubernetes.io/csi";
const NFS: &str = "kubernetes.io/nfs";
const FC: &str = "kubernetes.io/fc";
const ISCSI: &str = "kubernetes.io/iscsi";
/// Of all drivers: their own names would be any number.
pub(crate) const FLEX: &str = "kubernetes.io/flexvolume";

/// What is done with a volume, in the kubelet's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// It is made, or found made.
    Mount,
    /// It is taken away.
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

/// What was done with volumes; clones count together.
#[derive(Clone, Debug)]
pub struct Operations {
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
    /// Adds them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "storage_operation_duration_seconds",
            "How long volumes took to be made and to be taken away, in seconds",
            self.durations.clone(),
        );
        registry.register(
            "storage_operation_errors",
            "Volumes that could not be made or taken away; the kubelet has it no more, dashboards ask for it",
            self.errors.clone(),
        );
    }

    /// Does something with volumes, and counts it for each of them, by its plugin.
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

/// The kubelet's name of what makes such a volume.
#[must_use]
pub fn plugin(volume: &core::Volume) -> &'static str {
    let core::Volume { empty_dir, host_path, config_map, secret, projected, downward_api, image, .. } =
        volume;
    let kinds = [
        (empty_dir.is_some(), "kubernetes.io/empty-dir"),
        (host_path.is_some(), HOST_PATH),
        (config_map.is_some(), "kubernetes.io/configmap"),
        (secret.is_some(), "kubernetes.io/secret"),
        (projected.is_some(), "kubernetes.io/projected"),
        (downward_api.is_some(), "kubernetes.io/downward-api"),
        (image.is_some(), "kubernetes.io/image"),
        (volume.nfs.is_some(), NFS),
        (volume.flex_volume.is_some(), FLEX),
        (volume.fc.is_some(), FC),
        (volume.iscsi.is_some(), ISCSI),
        (claims::may_be_of_driver(volume), CSI),
    ];
    kinds.into_iter().find(|(is_there, _)| *is_there).map_or("N/A", |(_, name)| name)
}

/// The same of a PersistentVolume.
pub(crate) fn plugin_of_claim(claimed: &Claimed) -> &'static str {
    let spec = claimed.volume.spec.as_ref();
    let Some(spec) = spec else { return "N/A" };
    let kinds = [
        (spec.local.is_some(), LOCAL),
        (spec.host_path.is_some(), HOST_PATH),
        (spec.csi.is_some(), CSI),
        (spec.nfs.is_some(), NFS),
        (spec.flex_volume.is_some(), FLEX),
        (spec.fc.is_some(), FC),
        (spec.iscsi.is_some(), ISCSI),
    ];
    kinds.into_iter().find(|(is_it, _)| *is_it).map_or("N/A", |(_, name)| name)
}

/// The same of a PersistentVolume that is mounted there.
pub(crate) fn plugin_at(place: &Path) -> &'static str {
    let is_in = |plugin: &str| place.components().any(|part| part.as_os_str() == plugin);
    match () {
        () if is_in(crate::local::PLUGIN) => LOCAL,
        () if is_in(beelet_policy::volumes::csi::PLUGIN) => CSI,
        () if is_in(crate::nfs::PLUGIN) => NFS,
        () if is_in(crate::remote::FC) => FC,
        () if is_in(crate::remote::ISCSI) => ISCSI,
        () => HOST_PATH,
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
