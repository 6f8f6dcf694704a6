//! Metrics of pinning, under the kubelet's names.

use std::{sync::atomic::AtomicU64, time::Duration};

use beelet_base::kubelet_counter::KubeletCounter;
use beelet_model::table::PodName;
use beelet_policy::{
    devices::topology::{TopologyPolicy, TopologyScope},
    pinning::{Needs, Pins, Refusal, cpus::view},
};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use super::report::PinningReport;

/// Buckets of the kubelet, in milliseconds (`ExponentialBuckets(1, 2, 15)`).
const BUCKETS: [f64; 15] =
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfNode {
    numa_node: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfContainer {
    namespace: String,
    pod: String,
    container: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Boundary {
    scope: &'static str,
    boundary: &'static str,
}

/// Counters and gauges; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    cpu_requests: Counter,
    cpu_errors: Counter,
    shared_pool: Gauge,
    exclusive: Gauge,
    per_node: Family<OfNode, Gauge>,
    memory_requests: Counter,
    memory_errors: Counter,
    pub(super) topology_requests: Counter,
    pub(super) topology_errors: Counter,
    topology_duration: Histogram,
    aligned: Family<Boundary, KubeletCounter>,
    not_aligned: Family<Boundary, KubeletCounter>,
    idle: Family<OfContainer, Gauge<f64, AtomicU64>>,
    disturbed: Family<OfContainer, Gauge<f64, AtomicU64>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            cpu_requests: Counter::default(),
            cpu_errors: Counter::default(),
            shared_pool: Gauge::default(),
            exclusive: Gauge::default(),
            per_node: Family::default(),
            memory_requests: Counter::default(),
            memory_errors: Counter::default(),
            topology_requests: Counter::default(),
            topology_errors: Counter::default(),
            topology_duration: Histogram::new(BUCKETS),
            aligned: Family::default(),
            not_aligned: Family::default(),
            idle: Family::default(),
            disturbed: Family::default(),
        }
    }
}

impl Metrics {
    /// Registers all of them.
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, counter) in [
            ("cpu_manager_pinning_requests", "Containers that requested exclusive CPUs", &self.cpu_requests),
            ("cpu_manager_pinning_errors", "Containers that were refused exclusive CPUs", &self.cpu_errors),
            (
                "memory_manager_pinning_requests",
                "Containers that requested memory of specific NUMA nodes",
                &self.memory_requests,
            ),
            (
                "memory_manager_pinning_errors",
                "Containers that were refused memory of specific NUMA nodes",
                &self.memory_errors,
            ),
            (
                "topology_manager_admission_requests",
                "Pods whose CPUs, memory and devices were to be aligned",
                &self.topology_requests,
            ),
            (
                "topology_manager_admission_errors",
                "Pods whose CPUs, memory and devices could not be aligned or given",
                &self.topology_errors,
            ),
        ] {
            registry.register(format!("kubelet_{name}"), help, counter.clone());
        }
        let help = "Shared CPUs, for containers without exclusive CPUs, in thousandths";
        registry.register("kubelet_cpu_manager_shared_pool_size_millicores", help, self.shared_pool.clone());
        let help = "Exclusive CPUs of containers";
        registry.register("kubelet_cpu_manager_exclusive_cpu_allocation_count", help, self.exclusive.clone());
        let help = "Exclusive CPUs of containers, by NUMA node";
        registry.register("kubelet_cpu_manager_allocation_per_numa", help, self.per_node.clone());
        let help = "Duration of an admission with CPUs, memory and devices in milliseconds";
        registry.register(
            "kubelet_topology_manager_admission_duration_ms",
            help,
            self.topology_duration.clone(),
        );
        let help = "Containers and pods with all resources guaranteed within one boundary";
        registry.register("kubelet_container_aligned_compute_resources_count", help, self.aligned.clone());
        self.register_measured(registry);
        let help = "Containers and pods that were refused resources within one boundary";
        registry.register(
            "kubelet_container_aligned_compute_resources_failure_count",
            help,
            self.not_aligned.clone(),
        );
    }

    fn register_measured(&self, registry: &mut Registry) {
        let help = "Share of the last minute in which the exclusive CPUs of a container had no work";
        registry.register("beelet_pinned_idle_ratio", help, self.idle.clone());
        let help = "Interrupts of devices and runs of kernel threads per second on the exclusive CPUs of a container";
        registry.register("beelet_pinned_disturbances_per_second", help, self.disturbed.clone());
    }

    /// Publishes the measured use of exclusive CPUs.
    pub(super) fn show_pinned(&self, report: &PinningReport) {
        self.idle.clear();
        self.disturbed.clear();
        for ((_, container), pinned) in &report.pinned {
            let PodName { namespace, name } = pinned.pod.clone();
            let of = OfContainer { namespace, pod: name, container: container.clone() };
            self.idle.get_or_create(&of).set(f64::from(pinned.disturbance.idle_permille) / 1000.0);
            self.disturbed.get_or_create(&of).set(pinned.disturbance.per_minute as f64 / 60.0);
        }
    }

    /// Publishes the current assignments.
    pub(super) fn show(&self, pins: &Pins) {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.shared_pool.set(count(pins.cpus.state().shared.len()).saturating_mul(1000));
        self.exclusive.set(count(view::given(&pins.cpus).len()));
        for (numa_node, cpus) in view::given_by_node(&pins.cpus) {
            self.per_node.get_or_create(&OfNode { numa_node }).set(count(cpus));
        }
    }

    pub(super) fn admitted(&self, took: Duration) {
        self.topology_duration.observe(took.as_secs_f64() * 1000.0);
    }

    /// Counts the admission of a container, or of all where they are aligned together.
    pub(super) fn count(&self, pins: &Pins, needs: &Needs, container: &str, admitted: &Result<(), Refusal>) {
        let is_per_pod = pins.is_per_pod();
        let meant = needs.containers.iter().filter(|own| is_per_pod || own.name == container);
        let is_pinned = |own: &&beelet_policy::pinning::needs::ContainerNeeds| {
            own.cpus > 0 && !needs.ignored && !pins.cpus.allocatable().is_empty()
        };
        let cpus = meant.clone().filter(is_pinned).count();
        let has_memory = pins.memory.is_static() && needs.guaranteed && !needs.ignored;
        let memory = if has_memory { meant.count() } else { 0 };
        let add = |counter: &Counter, count: usize| {
            counter.inc_by(u64::try_from(count).unwrap_or(u64::MAX));
        };
        add(&self.cpu_requests, cpus);
        add(&self.memory_requests, memory);
        if let Err(refusal) = admitted {
            let of_memory = refusal.message.contains("[memorymanager]");
            add(&self.cpu_errors, usize::from(cpus > 0 && !of_memory));
            add(&self.memory_errors, usize::from(of_memory));
        }
        let family = if admitted.is_ok() { &self.aligned } else { &self.not_aligned };
        let scope = if pins.topology.scope() == TopologyScope::Pod { "pod" } else { "container" };
        if pins.topology.policy() == TopologyPolicy::SingleNumaNode {
            family.get_or_create(&Boundary { scope, boundary: "numa_node" }).inc();
        }
        if view::options(&pins.cpus).full_cores && cpus > 0 {
            family.get_or_create(&Boundary { scope: "container", boundary: "physical_cpu" }).inc();
        }
    }
}
