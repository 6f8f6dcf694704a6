//! The kubelet's metrics of in-place resizes: requests, refusals, and the time until the amounts are in
//! force. The numbers of pending resizes come from the pod table.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};

use beelet_policy::resources::resize_order;

/// Upper bounds of the buckets in milliseconds: the kubelet's (`podResizeDurationBuckets`).
const MILLISECONDS: [f64; 14] = [
    10.0, 50.0, 100.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0, 30_000.0, 60_000.0, 120_000.0,
    300_000.0, 600_000.0,
];
/// Label of all retries. The kubelet also has labels for its other triggers, which need no retry here.
const ROOM: &str = "room_released";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabel {
    resource: &'static str,
    requirement: &'static str,
    operation: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SuccessLabel {
    success: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DetailLabel {
    reason_detail: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TriggerLabel {
    retry_trigger: &'static str,
}

/// Counters and histograms, shared by clones.
#[derive(Clone, Debug)]
pub(crate) struct ResizeMetrics {
    requested: Family<RequestLabel, Counter>,
    durations: Family<SuccessLabel, Histogram, fn() -> Histogram>,
    infeasible: Family<DetailLabel, Counter>,
    accepted_later: Family<TriggerLabel, Counter>,
}

impl Default for ResizeMetrics {
    fn default() -> Self {
        let durations = (|| Histogram::new(MILLISECONDS)) as fn() -> Histogram;
        Self {
            requested: Family::default(),
            durations: Family::new_with_constructor(durations),
            infeasible: Family::default(),
            accepted_later: Family::default(),
        }
    }
}

impl ResizeMetrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_container_requested_resizes",
            "Requested changes of a container's cpu or memory, by resource, requirement (requests, limits) and operation",
            self.requested.clone(),
        );
        registry.register(
            "kubelet_pod_resize_duration_milliseconds",
            "Time from the acceptance of a resize until its amounts are in force or fail, in milliseconds",
            self.durations.clone(),
        );
        registry.register(
            "kubelet_pod_infeasible_resizes",
            "Resizes that are impossible on this node, by reason",
            self.infeasible.clone(),
        );
        registry.register(
            "kubelet_pod_deferred_accepted_resizes",
            "Deferred resizes that were accepted later, by the trigger of the retry",
            self.accepted_later.clone(),
        );
    }

    /// Counts the changes that a pod's new spec requests.
    pub(crate) fn requested(&self, before: &Pod, wanted: &Pod) {
        for change in resize_order::changes(before, wanted) {
            let resize_order::Change { resource, requirement, operation } = change;
            self.requested.get_or_create(&RequestLabel { resource, requirement, operation }).inc();
        }
    }

    /// Counts an impossible resize.
    pub(crate) fn infeasible(&self, reason_detail: &'static str) {
        self.infeasible.get_or_create(&DetailLabel { reason_detail }).inc();
    }

    /// Counts a deferred resize that is accepted now.
    pub(crate) fn accepted_later(&self) {
        self.accepted_later.get_or_create(&TriggerLabel { retry_trigger: ROOM }).inc();
    }

    /// Counts a resize whose amounts are in force, or could not be applied.
    pub(crate) fn enacted(&self, took: Duration, success: bool) {
        let label = SuccessLabel { success: if success { "true" } else { "false" } };
        self.durations.get_or_create(&label).observe(took.as_secs_f64() * 1e3);
    }
}
