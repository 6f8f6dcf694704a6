//! The state of the node's containers at a moment: the kernel's counters, and rates over windows.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use beelet_model::disk::{Places, PodDisk, VolumeUse};
use beelet_model::table::PodName;

/// Counters that only the kernel programs have, since they were attached; and the number of buckets of their
/// histogram of waits for a CPU (`bucket_bounds` in rates.rs).
pub use beelet_ebpf_abi::{Counters as KernelCounters, WAIT_BUCKETS};

/// Lengths of the windows of rates.
pub(crate) const WINDOWS: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(10), Duration::from_secs(60)];

/// Time during which tasks waited for a resource (PSI, Documentation/accounting/psi.rst), in microseconds
/// since the cgroup was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Time with at least one waiting task.
    pub some_us: u64,
    /// Time with all non-idle tasks waiting.
    pub full_us: u64,
    /// The kernel's own decaying averages over 10 s, 60 s and 300 s, in hundredths of a per cent: some, full.
    pub averages: [[u16; 3]; 2],
}

/// Network traffic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names suffice
pub struct Net {
    pub rx_bytes: u64,
    pub rx_packets: u64,
    pub rx_errors: u64,
    pub rx_dropped: u64,
    pub tx_bytes: u64,
    pub tx_packets: u64,
    pub tx_errors: u64,
    pub tx_dropped: u64,
    /// TCP segments retransmitted.
    pub retransmits: u64,
}

/// Monotonic counters. A counter without a source on this machine is `None`, never 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// CPU time, in nanoseconds.
    pub cpu_ns: u64,
    /// Part of the CPU time in user mode.
    pub cpu_user_ns: u64,
    /// Part of the CPU time in the kernel.
    pub cpu_system_ns: u64,
    /// Periods of CPU quota enforcement with a running task; 0 without a quota.
    pub periods: u64,
    /// Periods in which the quota was used up.
    pub throttled_periods: u64,
    /// Time that the quota kept tasks from running, in nanoseconds.
    pub throttled_ns: u64,
    /// Waits for a CPU.
    pub cpu_stalls: Option<Stalls>,
    /// Waits for memory: reclaim, refaults, swap.
    pub memory_stalls: Option<Stalls>,
    /// Waits for block devices.
    pub io_stalls: Option<Stalls>,
    /// Page faults.
    pub page_faults: u64,
    /// Page faults that needed a read.
    pub major_faults: u64,
    /// Processes killed by the OOM killer.
    pub oom_kills: u64,
    /// Bytes read from and written to block devices.
    pub io_bytes: Option<[u64; 2]>,
    /// Counters of the kernel programs, if they run.
    pub kernel: Option<Box<KernelCounters>>,
}

/// Current values.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Gauges {
    /// All charged memory, in bytes.
    pub memory_usage: u64,
    /// Usage without inactive file pages, which can be reclaimed at once; defined as in cAdvisor.
    pub working_set: u64,
    /// Anonymous memory.
    pub rss: u64,
    /// Page cache.
    pub cache: u64,
    /// Mapped files.
    pub mapped: u64,
    /// Recently used file pages.
    pub active_file: u64,
    /// Other file pages, which are reclaimed first.
    pub inactive_file: u64,
    /// Swapped memory; `None` if swap is not counted.
    pub swap: Option<u64>,
    /// The memory limit, if any.
    pub memory_limit: Option<u64>,
    /// The CPU quota in cores, if any.
    pub cpu_limit: Option<f64>,
    /// The period of the CPU quota in microseconds, also without a quota.
    pub cpu_period: Option<u64>,
    /// Memory usage at which reclaim begins (`memory.high`, the soft limit of version 1), if limited.
    pub memory_reservation: Option<u64>,
    /// Limit of swap, on version 1 of memory and swap together; `None` if unlimited.
    pub swap_limit: Option<u64>,
    /// `cpu.shares`; on version 2 the equivalent of `cpu.weight`.
    pub cpu_shares: Option<u64>,
    /// Processes and threads; `None` if not counted.
    pub pids: Option<u64>,
    /// Limit of processes and threads; `None` if unlimited.
    pub pids_limit: Option<u64>,
    /// Processes; in full readings.
    pub processes: Option<u64>,
    /// Open files; in full readings, `None` if too many to count.
    pub descriptors: Option<u64>,
    /// Open sockets; in full readings, `None` if too many files to count.
    pub sockets: Option<u64>,
}

/// Shares of the time, 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Share {
    /// Share with some task waiting.
    pub some: f64,
    /// Share with all tasks waiting.
    pub full: f64,
}

/// Waits of runnable tasks for a CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RunQueue {
    /// Median of the waits in nanoseconds; `None` without waits.
    pub p50_ns: Option<f64>,
    /// 99th percentile of the waits in nanoseconds.
    pub p99_ns: Option<f64>,
    /// Seconds waited per second, over all tasks.
    pub waiting: f64,
    /// Waits per second.
    pub waits: f64,
}

/// Changes between two readings, per second. `None` without a source.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rates {
    /// Time between the two readings in nanoseconds: close to the window's length, less at the beginning.
    pub over_ns: u64,
    /// CPUs in use.
    pub cpu: f64,
    /// Share of the enforcement periods in which the quota was used up; `None` without a quota.
    pub throttled: Option<f64>,
    /// Seconds per second that tasks were kept from running by the quota.
    pub throttled_time: f64,
    /// Waits for a CPU.
    pub runq: Option<RunQueue>,
    /// Preemptions by the preempting thread: of the same pod, of another pod, of the system.
    pub preempted: Option<[f64; 3]>,
    /// Waits for a CPU (PSI).
    pub cpu_stalled: Option<Share>,
    /// Waits for memory (PSI).
    pub memory_stalled: Option<Share>,
    /// Waits for devices (PSI).
    pub io_stalled: Option<Share>,
    /// Seconds per second spent in reclaim.
    pub reclaim: Option<f64>,
    /// Page faults that needed a read.
    pub major_faults: f64,
    /// Bytes read from devices.
    pub read_bytes: Option<f64>,
    /// Bytes written to devices.
    pub written_bytes: Option<f64>,
    /// Traffic of the container's sockets.
    pub net: Option<NetRates>,
    /// Connections established.
    pub established: Option<f64>,
    /// Mean of the sampled smoothed round-trip times in microseconds; `None` without samples.
    pub rtt_us: Option<f64>,
    /// Total number of OOM kills between the two readings.
    pub oom_kills: u64,
}

/// A reading of a cgroup.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// Time of the reading: `CLOCK_MONOTONIC`, in nanoseconds.
    pub at_ns: u64,
    /// Counters.
    pub counters: Counters,
    /// Gauges.
    pub gauges: Gauges,
    /// Details for pages; in full readings.
    pub details: Option<Box<Details>>,
}

/// Data of a cgroup that are read only for pages. `None` if this machine lacks the source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Details {
    /// Number of times the memory limit was hit since the cgroup was made.
    pub limit_hits: Option<u64>,
    /// Peak memory usage in bytes.
    pub memory_peak: Option<u64>,
    /// Kernel memory in bytes.
    pub memory_kernel: Option<u64>,
    /// Traffic of each block device; a device without traffic may be missing.
    pub devices: Vec<DeviceTraffic>,
    /// Limit of open files of the first process (the soft limit); -1: unlimited.
    pub descriptors_limit: Option<i64>,
}

/// Traffic between a cgroup and a block device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceTraffic {
    /// The device's major and minor number.
    pub device: (u32, u32),
    /// Bytes read and written.
    pub bytes: [u64; 2],
    /// Reads and writes.
    pub operations: [u64; 2],
}

/// A block device of the machine, as in `/proc/diskstats`, since boot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Disk {
    /// Major and minor number.
    pub device: (u32, u32),
    /// Name below `/dev`.
    pub name: String,
    /// Reads.
    pub read: DiskWork,
    /// Writes.
    pub written: DiskWork,
    /// Requests in flight.
    pub in_flight: u64,
    /// Milliseconds with any request in flight.
    pub busy_ms: u64,
    /// Total milliseconds of all requests in flight.
    pub weighted_ms: u64,
}

/// Requests of a block device in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskWork {
    /// Completed requests.
    pub completed: u64,
    /// Requests merged with others.
    pub merged: u64,
    /// Sectors of 512 bytes.
    pub sectors: u64,
    /// Total milliseconds of the requests.
    pub ms: u64,
}

/// A container and its cgroup's reading.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ContainerStats {
    /// Name in the pod.
    pub name: String,
    /// The runtime's identifier, without the runtime's name.
    pub id: String,
    /// The image, as in the pod's status.
    pub image: String,
    /// True for a container whose end does not affect the pod: an init or an ephemeral container.
    pub init: bool,
    /// Number of restarts.
    pub restarts: u32,
    /// Current state.
    pub state: State,
    /// Readiness; `None` if not probed (a foreign pod).
    pub ready: Option<bool>,
    /// Start time.
    pub started_at: Option<Timestamp>,
    /// The container's cgroup, from the root; `None` while it has none.
    pub cgroup: Option<String>,
    /// Inode of the cgroup2 directory, the kernel programs' id of the container.
    pub cgroup_id: Option<u64>,
    /// The newest reading; `None` before the first one, and if the container doesn't run.
    pub reading: Option<Reading>,
    /// Rates over [`WINDOWS`], in that order; `None` with fewer than two readings.
    pub windows: [Option<Rates>; 3],
    /// Holders of the CPUs while the container waited for them; `None` without recent waits, and if no kernel
    /// program measures.
    pub waited_for: Option<WaitedFor>,
    /// Holders whose growth made the container wait for memory; `None` without recent waits, and if no kernel
    /// program measures.
    pub waited_for_memory: Option<WaitedFor>,
}

/// Waits of a container's threads in about the last minute, and their causes: the holders of the CPUs (waits
/// below 100 µs are left out), or those that needed the memory ([`beelet_policy::tuner::reclaim`]).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WaitedFor {
    /// Share of the last minute (0 to 1) in which some thread waited: from PSI, or without it the average
    /// number of waiting threads, at most 1.
    pub some: f64,
    /// The holders with the largest shares, at most three, in descending order.
    pub holders: Vec<Holder>,
}

/// Holder of a resource that others waited for.
#[derive(Debug, Clone, PartialEq)]
pub struct Holder {
    /// Identity of the holder.
    pub who: Who,
    /// Share of the wait (0 to 1) during which the holder had the CPU, or its share of the needed memory.
    pub share: f64,
}

/// Identity of a holder of a CPU or of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Who {
    /// A container, or the sandbox of a pod: then `container` is empty.
    Pod {
        /// The pod.
        pod: PodName,
        /// Name of the container.
        container: String,
    },
    /// A cgroup of the machine, by its path from the root of cgroup2. `/` has kernel threads, and processes
    /// without a cgroup.
    Machine(String),
    /// An idle CPU: the container's or its pod's CPU quota held the container back; or the container's own
    /// memory limit.
    Nobody,
    /// A removed cgroup.
    Gone,
}

/// State of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum State {
    /// The container runs.
    Running,
    /// The container has not started yet, with the reason.
    Waiting(String),
    /// The container has ended, with the reason.
    Ended(String),
    /// The status has no state.
    #[default]
    Unknown,
}

/// A pod and its containers.
#[derive(Debug, Clone, PartialEq)]
pub struct PodStats {
    /// Namespace and name.
    pub name: PodName,
    /// UID of the pod.
    pub uid: String,
    /// QoS class: `Guaranteed`, `Burstable`, `BestEffort`; empty if unknown.
    pub qos: String,
    /// Phase or reason: `Pending`, `Running`, `Terminating`, `Evicted`, …
    pub phase: String,
    /// Readiness; `None` if not probed.
    pub ready: Option<bool>,
    /// Reason and message of the condition if the pod is not ready, in one line.
    pub not_ready: String,
    /// Start time.
    pub started_at: Option<Timestamp>,
    /// True if the pod shares the node's network; then `net` is empty.
    pub host_network: bool,
    /// The pod's network namespace, if known.
    pub netns: Option<PathBuf>,
    /// The pod's own cgroup, the parent of its containers' cgroups.
    pub cgroup: Option<String>,
    /// Reading of the pod's cgroup, containers and pause together; from [`Scope::Usage`](crate::Scope::Usage)
    /// on, and complete in full readings.
    pub reading: Option<Reading>,
    /// The pod's interfaces but loopback, by name; in full readings, and if no kernel program counts.
    pub net: Vec<(String, Net)>,
    /// Bytes received and sent per second, and retransmits, over [`WINDOWS`]; from `net`.
    pub net_windows: [Option<NetRates>; 3],
    /// Containers in the order of the spec, init containers first.
    pub containers: Vec<ContainerStats>,
    /// Disk usage of the pod; in full readings.
    pub disk: Option<PodDisk>,
    /// The pod's volumes with a capacity of their own; in full readings.
    pub volumes: Vec<VolumeUse>,
}

/// A pod's network traffic, per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NetRates {
    /// Bytes received.
    pub rx_bytes: f64,
    /// Bytes sent.
    pub tx_bytes: f64,
    /// TCP segments retransmitted.
    pub retransmits: f64,
}

/// The machine as a whole.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Machine {
    /// Online CPUs.
    pub cpus: u32,
    /// Busy time of all CPUs since boot, in nanoseconds.
    pub cpu_ns: u64,
    /// Number of busy CPUs over [`WINDOWS`].
    pub cpu: [Option<f64>; 3],
    /// The load averages.
    pub load: [f64; 3],
    /// Total memory in bytes.
    pub memory_total: u64,
    /// Memory available without swapping.
    pub memory_available: u64,
    /// Usage without inactive file pages.
    pub working_set: u64,
    /// Total usage.
    pub memory_usage: u64,
    /// Stalls of the whole machine: CPU, memory, devices.
    pub stalls: [Option<Stalls>; 3],
    /// Stalls as shares of the time, over 10 s.
    pub stalled: [Option<Share>; 3],
    /// Boot time.
    pub booted_at: Option<Timestamp>,
    /// Anonymous memory.
    pub rss: Option<u64>,
    /// Page faults, and those that needed a read.
    pub faults: Option<[u64; 2]>,
    /// The machine's interfaces but loopback and the pods' ends; in full readings.
    pub net: Vec<(String, Net)>,
    /// Total and free swap in bytes; `None` without swap.
    pub swap: Option<[u64; 2]>,
    /// Path and reading of the cgroup of all pods; in full readings.
    pub all_pods: Option<(String, Reading)>,
    /// The whole machine as a cgroup; in full readings.
    pub reading: Option<Reading>,
    /// Block devices; in full readings.
    pub disks: Vec<Disk>,
}

/// The whole node at a moment: published as a whole, immutable.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeStats {
    /// Time of the reading.
    pub at: Timestamp,
    /// Time of the reading on `CLOCK_MONOTONIC`, in nanoseconds; 0 before the first reading.
    pub at_ns: u64,
    /// The node's name.
    pub node: Arc<str>,
    /// True if kernel programs measure; otherwise their data are missing everywhere.
    pub by_kernel: bool,
    /// The machine.
    pub machine: Machine,
    /// Paths of the node's file systems; in full readings.
    pub places: Places,
    /// All pods, by name.
    pub pods: Vec<PodStats>,
    /// Running containers whose cgroup was not found (yet), or beyond the configured number.
    pub left_out: usize,
}

impl NodeStats {
    /// Returns the value before the first reading.
    #[must_use]
    pub fn nothing_yet() -> Self {
        Self {
            at: Timestamp::UNIX_EPOCH,
            at_ns: 0,
            node: "".into(),
            by_kernel: false,
            machine: Machine::default(),
            places: Places::default(),
            pods: Vec::new(),
            left_out: 0,
        }
    }

    /// Returns every container with its pod.
    pub fn containers(&self) -> impl Iterator<Item = (&PodStats, &ContainerStats)> {
        self.pods.iter().flat_map(|pod| pod.containers.iter().map(move |container| (pod, container)))
    }

    /// Returns every container with a reading, with its pod and the reading.
    pub fn readings(&self) -> impl Iterator<Item = (&PodStats, &ContainerStats, &Reading)> {
        self.containers().filter_map(|(pod, container)| Some((pod, container, container.reading.as_ref()?)))
    }
}
