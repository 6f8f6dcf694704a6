//! Containers' numbers as metrics, and metrics of the sampling itself.
//!
//! Each page has a table: a metric is its name, its help and the function that extracts its value, and all
//! outputs of metrics use these tables (`/metrics`, `/metrics/cadvisor`, `/metrics/resource`,
//! docs/metrics.md). Cardinality is bounded by the number of containers, which the sampler bounds; histograms
//! have 17 buckets.

mod page;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

pub use self::page::{LabelText, Page};

use super::Stats;
use super::model::{ContainerStats, NodeStats, PodStats, Reading, WAIT_BUCKETS, WaitedFor, Who};
use super::rates::{bucket_bounds, reclaim_ns};

/// Metrics of the sampling itself. Clones share the counts.
#[derive(Debug, Clone)]
pub struct Metrics {
    duration: Histogram,
    containers: Gauge,
    left_out: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            // 100 µs to 1.6 s.
            duration: Histogram::new(exponential_buckets(0.0001, 2.0, 15)),
            containers: Gauge::default(),
            left_out: Gauge::default(),
        }
    }
}

impl Metrics {
    /// Adds the metrics to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "beelet_pressure_read_duration_seconds",
            "Time to read all containers' counters",
            self.duration.clone(),
        );
        registry.register(
            "beelet_pressure_containers",
            "Containers whose counters are read",
            self.containers.clone(),
        );
        registry.register(
            "beelet_pressure_left_out_containers",
            "Running containers whose cgroup was not found, or that are beyond maxMeasuredContainers",
            self.left_out.clone(),
        );
    }

    pub(super) fn time<T>(&self, read: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = read();
        self.duration.observe(start.elapsed().as_secs_f64());
        result
    }

    pub(super) fn observe(&self, containers: usize, left_out: usize) {
        self.containers.set(i64::try_from(containers).unwrap_or(i64::MAX));
        self.left_out.set(i64::try_from(left_out).unwrap_or(i64::MAX));
    }
}

/// Kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A monotonic counter.
    Counter,
    /// A current value.
    Gauge,
}

impl Kind {
    /// Returns the kind's name in the text format.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// A container's metric. An unknown value gives no sample.
pub struct ContainerMetric {
    /// Full name, including `_total`.
    pub name: &'static str,
    /// Kind.
    pub kind: Kind,
    /// Help text, with the unit.
    pub help: &'static str,
    /// Additional labels.
    pub labels: &'static [(&'static str, &'static str)],
    /// The value.
    pub value: fn(&Reading) -> Option<f64>,
}

impl fmt::Debug for ContainerMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

const fn counter(
    name: &'static str,
    help: &'static str,
    value: fn(&Reading) -> Option<f64>,
) -> ContainerMetric {
    ContainerMetric { name, kind: Kind::Counter, help, labels: &[], value }
}

const fn gauge(
    name: &'static str,
    help: &'static str,
    value: fn(&Reading) -> Option<f64>,
) -> ContainerMetric {
    ContainerMetric { name, kind: Kind::Gauge, help, labels: &[], value }
}

const fn with(
    mut metric: ContainerMetric,
    labels: &'static [(&'static str, &'static str)],
) -> ContainerMetric {
    metric.labels = labels;
    metric
}

fn seconds(nanoseconds: u64) -> Option<f64> {
    Some(nanoseconds as f64 / 1e9)
}

/// cAdvisor's metrics of containers, with its names and meanings.
pub const CADVISOR: &[ContainerMetric] = &[
    with(
        counter("container_cpu_usage_seconds_total", "CPU time used, in seconds", |r| {
            seconds(r.counters.cpu_ns)
        }),
        &[("cpu", "total")],
    ),
    counter("container_cpu_user_seconds_total", "CPU time used in user mode, in seconds", |r| {
        seconds(r.counters.cpu_user_ns)
    }),
    counter("container_cpu_system_seconds_total", "CPU time used in the kernel, in seconds", |r| {
        seconds(r.counters.cpu_system_ns)
    }),
    counter("container_cpu_cfs_periods_total", "Periods of CPU quota enforcement with a running task", |r| {
        r.gauges.cpu_limit.map(|_| r.counters.periods as f64)
    }),
    counter("container_cpu_cfs_throttled_periods_total", "Periods in which the CPU quota was used up", |r| {
        r.gauges.cpu_limit.map(|_| r.counters.throttled_periods as f64)
    }),
    counter(
        "container_cpu_cfs_throttled_seconds_total",
        "Time that the CPU quota kept tasks from running, in seconds",
        |r| r.gauges.cpu_limit.and_then(|_| seconds(r.counters.throttled_ns)),
    ),
    gauge("container_memory_usage_bytes", "Memory in use, page cache included", |r| {
        Some(r.gauges.memory_usage as f64)
    }),
    gauge(
        "container_memory_working_set_bytes",
        "Memory in use without inactive file pages, the value used by eviction and OOM",
        |r| Some(r.gauges.working_set as f64),
    ),
    gauge("container_memory_rss", "Anonymous memory, in bytes", |r| Some(r.gauges.rss as f64)),
    gauge("container_memory_cache", "Page cache, in bytes", |r| Some(r.gauges.cache as f64)),
    gauge("container_memory_mapped_file", "Mapped files in memory, in bytes", |r| {
        Some(r.gauges.mapped as f64)
    }),
    gauge("container_memory_total_active_file_bytes", "Recently used file pages, in bytes", |r| {
        Some(r.gauges.active_file as f64)
    }),
    gauge("container_memory_total_inactive_file_bytes", "File pages not used recently, in bytes", |r| {
        Some(r.gauges.inactive_file as f64)
    }),
    gauge("container_memory_max_usage_bytes", "Peak memory usage", |r| {
        r.details.as_ref()?.memory_peak.map(|bytes| bytes as f64)
    }),
    gauge("container_memory_kernel_usage", "Kernel memory, in bytes", |r| {
        r.details.as_ref()?.memory_kernel.map(|bytes| bytes as f64)
    }),
    counter("container_memory_failcnt", "Number of times the memory limit was hit", |r| {
        r.details.as_ref()?.limit_hits.map(|times| times as f64)
    }),
    gauge("container_memory_swap", "Swapped memory, in bytes", |r| r.gauges.swap.map(|bytes| bytes as f64)),
    with(
        counter("container_memory_failures_total", "Page faults, by kind", |r| {
            Some(r.counters.page_faults as f64)
        }),
        &[("failure_type", "pgfault"), ("scope", "container")],
    ),
    with(
        counter("container_memory_failures_total", "Page faults, by kind", |r| {
            Some(r.counters.page_faults as f64)
        }),
        &[("failure_type", "pgfault"), ("scope", "hierarchy")],
    ),
    with(
        counter("container_memory_failures_total", "Page faults, by kind", |r| {
            Some(r.counters.major_faults as f64)
        }),
        &[("failure_type", "pgmajfault"), ("scope", "container")],
    ),
    with(
        counter("container_memory_failures_total", "Page faults, by kind", |r| {
            Some(r.counters.major_faults as f64)
        }),
        &[("failure_type", "pgmajfault"), ("scope", "hierarchy")],
    ),
    counter("container_oom_events_total", "Processes killed for lack of memory", |r| {
        Some(r.counters.oom_kills as f64)
    }),
    gauge("container_spec_memory_limit_bytes", "The memory limit; 0: none", |r| {
        Some(r.gauges.memory_limit.unwrap_or(0) as f64)
    }),
    gauge(
        "container_spec_memory_reservation_limit_bytes",
        "Memory usage at which reclaim begins; 0: none",
        |r| Some(r.gauges.memory_reservation.unwrap_or(0) as f64),
    ),
    gauge(
        "container_spec_memory_swap_limit_bytes",
        "Limit of swap, on cgroup v1 of memory and swap together; 0: unlimited",
        |r| r.gauges.swap.map(|_| r.gauges.swap_limit.unwrap_or(0) as f64),
    ),
    gauge("container_spec_cpu_shares", "CPU shares, on cgroup v2 the equivalent of its weight", |r| {
        r.gauges.cpu_shares.map(|shares| shares as f64)
    }),
    gauge("container_spec_cpu_quota", "CPU quota per period, in microseconds", |r| {
        r.gauges.cpu_limit.map(|cores| (cores * r.gauges.cpu_period.unwrap_or(100_000) as f64).round())
    }),
    gauge("container_spec_cpu_period", "Period of the CPU quota, in microseconds", |r| {
        r.gauges.cpu_period.map(|period| period as f64)
    }),
    gauge("container_processes", "Processes of the container's own cgroup", |r| {
        r.gauges.processes.map(|count| count as f64)
    }),
    gauge("container_file_descriptors", "Open files; left out beyond some thousands", |r| {
        r.gauges.descriptors.map(|count| count as f64)
    }),
    gauge("container_sockets", "Open sockets; left out beyond some thousands of open files", |r| {
        r.gauges.sockets.map(|count| count as f64)
    }),
    with(
        gauge("container_ulimits_soft", "Limit of open files of the first process; -1: unlimited", |r| {
            r.details.as_ref()?.descriptors_limit.map(|limit| limit as f64)
        }),
        &[("ulimit", "max_open_files")],
    ),
    gauge("container_threads", "Processes and threads", |r| r.gauges.pids.map(|pids| pids as f64)),
    gauge("container_threads_max", "Limit of processes and threads; 0: unlimited", |r| {
        r.gauges.pids.map(|_| r.gauges.pids_limit.unwrap_or(0) as f64)
    }),
    counter(
        "container_pressure_cpu_waiting_seconds_total",
        "Time that some task waited for a CPU (PSI some), in seconds",
        |r| r.counters.cpu_stalls.map(|stalls| stalls.some_us as f64 / 1e6),
    ),
    counter(
        "container_pressure_cpu_stalled_seconds_total",
        "Time that all tasks waited for a CPU (PSI full), in seconds",
        |r| r.counters.cpu_stalls.map(|stalls| stalls.full_us as f64 / 1e6),
    ),
    counter(
        "container_pressure_memory_waiting_seconds_total",
        "Time that some task waited for memory (PSI some), in seconds",
        |r| r.counters.memory_stalls.map(|stalls| stalls.some_us as f64 / 1e6),
    ),
    counter(
        "container_pressure_memory_stalled_seconds_total",
        "Time that all tasks waited for memory (PSI full), in seconds",
        |r| r.counters.memory_stalls.map(|stalls| stalls.full_us as f64 / 1e6),
    ),
    counter(
        "container_pressure_io_waiting_seconds_total",
        "Time that some task waited for a device (PSI some), in seconds",
        |r| r.counters.io_stalls.map(|stalls| stalls.some_us as f64 / 1e6),
    ),
    counter(
        "container_pressure_io_stalled_seconds_total",
        "Time that all tasks waited for a device (PSI full), in seconds",
        |r| r.counters.io_stalls.map(|stalls| stalls.full_us as f64 / 1e6),
    ),
];

/// Metrics that only the kernel programs provide, with labels `namespace`, `pod`, `container`.
pub const KERNEL: &[ContainerMetric] = &[
    counter(
        "beelet_container_on_cpu_seconds_total",
        "Time that tasks were on a CPU since the programs were attached, including interrupts and time stolen by a hypervisor, in seconds",
        |r| seconds(r.counters.kernel.as_ref()?.on_cpu_ns),
    ),
    counter(
        "beelet_container_runqueue_wait_seconds_total",
        "Time that runnable tasks waited for a CPU, in seconds",
        |r| seconds(r.counters.kernel.as_ref()?.run_queue_wait_ns),
    ),
    counter("beelet_container_context_switches_total", "Number of times a task left its CPU", |r| {
        Some(r.counters.kernel.as_ref()?.switches as f64)
    }),
    with(
        counter("beelet_container_preemptions_total", "Preemptions of tasks, by the preempting task", |r| {
            Some(r.counters.kernel.as_ref()?.preempted_by_same_pod as f64)
        }),
        &[("by", "same-pod")],
    ),
    with(
        counter("beelet_container_preemptions_total", "Preemptions of tasks, by the preempting task", |r| {
            Some(r.counters.kernel.as_ref()?.preempted_by_other_pod as f64)
        }),
        &[("by", "other-pod")],
    ),
    with(
        counter("beelet_container_preemptions_total", "Preemptions of tasks, by the preempting task", |r| {
            Some(r.counters.kernel.as_ref()?.preempted_by_system as f64)
        }),
        &[("by", "system")],
    ),
    counter("beelet_container_reclaim_seconds_total", "Time that tasks spent in reclaim, in seconds", |r| {
        seconds(reclaim_ns(r.counters.kernel.as_ref()?))
    }),
    counter("beelet_container_reclaims_total", "Number of times a task had to reclaim memory", |r| {
        r.counters.kernel.as_ref().map(|kernel| (kernel.memcg_reclaims + kernel.direct_reclaims) as f64)
    }),
    counter("beelet_container_tcp_established_total", "TCP connections established, both ways", |r| {
        Some(r.counters.kernel.as_ref()?.established as f64)
    }),
    counter("beelet_container_tcp_retransmits_total", "TCP segments retransmitted", |r| {
        Some(r.counters.kernel.as_ref()?.retransmits as f64)
    }),
    counter(
        "beelet_container_network_receive_bytes_total",
        "Bytes received by the container's sockets, counted while this page or `beelet top` is read",
        |r| Some(r.counters.kernel.as_ref()?.rx_bytes as f64),
    ),
    counter(
        "beelet_container_network_transmit_bytes_total",
        "Bytes sent by the container's sockets, counted while this page or `beelet top` is read",
        |r| Some(r.counters.kernel.as_ref()?.tx_bytes as f64),
    ),
];

/// The histogram of waits for a CPU.
pub const RUNQUEUE: (&str, &str) = (
    "beelet_container_runqueue_latency_seconds",
    "Waits of runnable tasks for a CPU, in seconds: 1 µs to 18 min, each bucket four times as long as the one before",
);

/// Shares of the CPUs' holders while a container waited for them.
pub const HELD: (&str, &str) = (
    "beelet_container_cpu_held_ratio",
    "Share of the last minute's long waits for a CPU during which another pod or cgroup had it; the three largest",
);

/// Shares of the growth that made a container wait for memory.
pub const GREW: (&str, &str) = (
    "beelet_container_memory_growth_ratio",
    "Share of the memory needed in the last minute, while the container waited for some, that another pod or cgroup needed; the three largest",
);

/// Labels of all our metrics of containers. `pod_uid` is left out unless configured.
#[derive(Debug, Clone)]
struct Labels<'a> {
    pod: &'a PodStats,
    container: &'a ContainerStats,
    own: &'a [(&'a str, &'a str)],
    pod_uid: bool,
}

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut prometheus_client::encoding::LabelSetEncoder<'_>) -> fmt::Result {
        use prometheus_client::encoding::EncodeLabel;
        let name = &self.pod.name;
        ("namespace", name.namespace.as_str()).encode(encoder.encode_label())?;
        ("pod", name.name.as_str()).encode(encoder.encode_label())?;
        ("container", self.container.name.as_str()).encode(encoder.encode_label())?;
        if self.pod_uid {
            ("pod_uid", self.pod.uid.as_str()).encode(encoder.encode_label())?;
        }
        for own in self.own {
            own.encode(encoder.encode_label())?;
        }
        Ok(())
    }
}

/// Collector of [`KERNEL`] and the histogram for the registry, from the newest reading: the registry's server
/// requests a reading first.
#[derive(Debug, Clone)]
pub struct Containers {
    /// Source of the reading.
    pub pressure: Stats,
    /// True if each sample has the pod's UID.
    pub pod_uid: bool,
}

impl Collector for Containers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let pressure = self.pressure.latest();
        if !pressure.by_kernel {
            return Ok(());
        }
        let mut last = "";
        for metric in KERNEL.iter().filter(|metric| std::mem::replace(&mut last, metric.name) != metric.name)
        {
            // OpenMetrics names a counter without the `_total` of its sample.
            let name = metric.name.trim_end_matches("_total");
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
            };
            let mut family = encoder.encode_descriptor(name, metric.help, None, kind)?;
            for metric in KERNEL.iter().filter(|one| one.name == metric.name) {
                for (pod, container, reading) in pressure.readings() {
                    let Some(value) = (metric.value)(reading) else { continue };
                    let labels = Labels { pod, container, own: metric.labels, pod_uid: self.pod_uid };
                    let sample = family.encode_family(&labels)?;
                    match metric.kind {
                        Kind::Counter => ConstCounter::new(value).encode(sample)?,
                        Kind::Gauge => ConstGauge::new(value).encode(sample)?,
                    }
                }
            }
        }
        self.waits(HELD, |one| one.waited_for.as_ref(), "cpu-quota", &pressure, &mut encoder)?;
        self.waits(GREW, |one| one.waited_for_memory.as_ref(), "memory-limit", &pressure, &mut encoder)?;
        self.histogram(&pressure, encoder)
    }
}

impl Containers {
    /// Encodes the holders that made containers wait; `own` is the label of a container's own limit.
    fn waits(
        &self,
        (name, help): (&str, &str),
        of: impl Fn(&ContainerStats) -> Option<&WaitedFor>,
        own: &str,
        pressure: &NodeStats,
        encoder: &mut DescriptorEncoder<'_>,
    ) -> fmt::Result {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (pod, container) in pressure.containers() {
            // Containers of the same pod are summed: a sample's labels must be unique.
            let mut shares: BTreeMap<String, f64> = BTreeMap::new();
            for holder in of(container).into_iter().flat_map(|waited| &waited.holders) {
                *shares.entry(label_of(&holder.who, own)).or_default() += holder.share;
            }
            for (by, share) in shares {
                let labels = Labels { pod, container, own: &[("by", &by)], pod_uid: self.pod_uid };
                ConstGauge::new(share.min(1.0)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn histogram(&self, pressure: &NodeStats, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (name, help) = RUNQUEUE;
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (pod, container, reading) in pressure.readings() {
            let Some(kernel) = &reading.counters.kernel else { continue };
            let labels = Labels { pod, container, own: &[], pod_uid: self.pod_uid };
            let sum = kernel.run_queue_wait_ns as f64 / 1e9;
            let count = kernel.run_queue_waits.iter().sum();
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                sum,
                count,
                &buckets(&kernel.run_queue_waits),
                None,
            )?;
        }
        Ok(())
    }
}

/// Returns the label of a holder: `namespace/pod` of a pod, the path of a cgroup of the machine, or a word.
fn label_of(who: &Who, own: &str) -> String {
    match who {
        Who::Pod { pod, .. } => format!("{}/{}", pod.namespace, pod.name),
        Who::Machine(path) => path.clone(),
        Who::Nobody => own.to_owned(),
        Who::Gone => "gone".to_owned(),
    }
}

/// Returns upper bounds in seconds and counts, with two of the kernel's buckets in each: 4^k times 1.024 µs.
/// The last bucket has no upper bound.
fn buckets(counts: &[u64; WAIT_BUCKETS]) -> Vec<(f64, u64)> {
    let mut merged: Vec<(f64, u64)> = Vec::with_capacity(WAIT_BUCKETS / 2 + 1);
    for (bucket, &count) in counts.iter().enumerate() {
        let last = bucket + 1 == WAIT_BUCKETS;
        match merged.last_mut().filter(|_| bucket % 2 == 0 && bucket > 0) {
            // Merges an even bucket with the odd one before it.
            Some(before) if !last => *before = (bucket_bounds(bucket).1 / 1e9, before.1 + count),
            _ if last => merged.push((f64::INFINITY, count)),
            _ => merged.push((bucket_bounds(bucket).1 / 1e9, count)),
        }
    }
    merged
}

#[cfg(test)]
mod tests;
