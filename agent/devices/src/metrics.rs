//! Metrics of devices; the first two have the kubelet's names.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use super::NodeDevices;

/// Buckets of the kubelet: Prometheus' default.
const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfResource {
    resource_name: String,
}

/// Counters and gauges; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    registrations: Family<OfResource, Counter>,
    allocations: Family<OfResource, Histogram>,
    capacity: Family<OfResource, Gauge>,
    allocatable: Family<OfResource, Gauge>,
    pub(super) refused_registrations: Counter,
    pub(super) refused_lists: Counter,
    pub(super) checkpoint_errors: Counter,
    pub(super) waiting: Gauge,
    pub(super) queued: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            registrations: Family::default(),
            allocations: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            capacity: Family::default(),
            allocatable: Family::default(),
            refused_registrations: Counter::default(),
            refused_lists: Counter::default(),
            checkpoint_errors: Counter::default(),
            waiting: Gauge::default(),
            queued: Gauge::default(),
        }
    }
}

impl Metrics {
    /// Adds all of them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "kubelet_device_plugin_registration",
            "Registrations of device plugins, by resource",
            self.registrations.clone(),
        );
        registry.register(
            "kubelet_device_plugin_alloc_duration_seconds",
            "Duration of device plugin allocations in seconds, by resource",
            self.allocations.clone(),
        );
        registry.register("beelet_device_capacity", "Devices, by resource", self.capacity.clone());
        registry.register(
            "beelet_device_allocatable",
            "Devices that can be assigned or are, by resource",
            self.allocatable.clone(),
        );
        registry.register(
            "beelet_device_plugin_refused_registrations",
            "Refused registrations of device plugins",
            self.refused_registrations.clone(),
        );
        registry.register(
            "beelet_device_plugin_refused_lists",
            "Device lists that exceeded the maximum size",
            self.refused_lists.clone(),
        );
        registry.register(
            "beelet_device_checkpoint_errors",
            "Failed writes of the device checkpoint",
            self.checkpoint_errors.clone(),
        );
        registry.register(
            "beelet_device_waiting_pods",
            "Pods that wait for a device plugin",
            self.waiting.clone(),
        );
        registry.register(
            "beelet_device_queued_pods",
            "Pods queued while another pod is allocated devices of the same resource",
            self.queued.clone(),
        );
    }

    pub(super) fn registered(&self, resource: &str) {
        self.registrations.get_or_create(&of(resource)).inc();
    }

    pub(super) fn allocated(&self, resource: &str, took: Duration) {
        self.allocations.get_or_create(&of(resource)).observe(took.as_secs_f64());
    }

    pub(super) fn node(&self, node: &NodeDevices) {
        let families = [(&self.capacity, &node.capacity), (&self.allocatable, &node.allocatable)];
        for (family, amounts) in families {
            for (resource, amount) in amounts {
                family.get_or_create(&of(resource)).set(i64::try_from(*amount).unwrap_or(i64::MAX));
            }
            for resource in &node.removed {
                family.remove(&of(resource));
            }
        }
    }
}

fn of(resource: &str) -> OfResource {
    OfResource { resource_name: resource.to_owned() }
}
