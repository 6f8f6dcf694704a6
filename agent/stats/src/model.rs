//! What is known of the node's containers at one moment: counters as the kernel keeps them, and rates over
//! windows.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use beelet_model::disk::{Places, PodDisk, VolumeUse};
use beelet_model::table::PodName;

/// What only the kernel programs know, counted since they were attached; and the buckets of its histogram of
/// waits for a CPU (`bucket_bounds` in rates.rs).
pub use beelet_ebpf_abi::{Counters as KernelCounters, WAIT_BUCKETS};

/// The lengths of the windows that rates are given over.
pub(crate) const WINDOWS: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(10), Duration::from_secs(60)];

/// Time during which tasks waited for a resource (PSI, Documentation/accounting/psi.rst). Microseconds since
/// the cgroup was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stalls {
    /// At least one task waited.
    pub some_us: u64,
    /// All tasks that could have done something waited.
    pub full_us: u64,
    /// The kernel's own decaying averages over 10 s, 60 s and 300 s, in hundredths of a per cent: some, full.
    pub averages: [[u16; 3]; 2],
}

/// What passed through the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it
pub struct Net {
    pub rx_bytes: u64,
    pub rx_packets: u64,
    pub rx_errors: u64,
    pub rx_dropped: u64,
    pub tx_bytes: u64,
    pub tx_packets: u64,
    pub tx_errors: u64,
    pub tx_dropped: u64,
    /// TCP segments sent again.
    pub retransmits: u64,
}

/// Everything that only grows. A source that this machine doesn't have is `None`, never 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// CPU time, in nanoseconds.
    pub cpu_ns: u64,
    /// Of it in user mode.
    pub cpu_user_ns: u64,
    /// Of it in the kernel.
    pub cpu_system_ns: u64,
    /// Periods of CPU quota enforcement during which something ran; 0 without a quota.
    pub periods: u64,
    /// Of these, periods in which the quota was used up.
    pub throttled_periods: u64,
    /// Time that tasks were kept from running so, in nanoseconds.
    pub throttled_ns: u64,
    /// Waiting for a CPU.
    pub cpu_stalls: Option<Stalls>,
    /// Waiting for memory: reclaim, refaults, swap.
    pub memory_stalls: Option<Stalls>,
    /// Waiting for block devices.
    pub io_stalls: Option<Stalls>,
    /// Page faults.
    pub page_faults: u64,
    /// Of these, such that needed a read.
    pub major_faults: u64,
    /// Processes that the kernel killed for lack of memory.
    pub oom_kills: u64,
    /// Bytes read from and written to block devices.
    pub io_bytes: Option<[u64; 2]>,
    /// From the kernel programs, where they run.
    pub kernel: Option<Box<KernelCounters>>,
}

/// What goes up and down.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Gauges {
    /// All memory that is charged, in bytes.
    pub memory_usage: u64,
    /// The part that can't be taken back at once: usage without inactive file pages, as cAdvisor has it.
    pub working_set: u64,
    /// Anonymous memory.
    pub rss: u64,
    /// Page cache.
    pub cache: u64,
    /// Mapped files.
    pub mapped: u64,
    /// File pages that were used lately.
    pub active_file: u64,
    /// File pages that were not, and go first.
    pub inactive_file: u64,
    /// Swapped out; `None` where swap is not counted.
    pub swap: Option<u64>,
    /// The memory limit; `None`: none.
    pub memory_limit: Option<u64>,
    /// The CPU quota in cores; `None`: none.
    pub cpu_limit: Option<f64>,
    /// The period of the CPU quota in microseconds, also where there is no quota.
    pub cpu_period: Option<u64>,
    /// The memory limit that reclaim begins at (`memory.high`, the soft limit of version 1); `None`: none.
    pub memory_reservation: Option<u64>,
    /// How much may be swapped out; on version 1 memory and swap together; `None`: any amount.
    pub swap_limit: Option<u64>,
    /// `cpu.shares`, on version 2 what `cpu.weight` stands for.
    pub cpu_shares: Option<u64>,
    /// Processes and threads; `None` where they are not counted.
    pub pids: Option<u64>,
    /// How many there may be; `None`: any number.
    pub pids_limit: Option<u64>,
    /// Its processes. These three are in full readings, and `None` where they are too many to be counted.
    pub processes: Option<u64>,
    /// Open files.
    pub descriptors: Option<u64>,
    /// Open sockets.
    pub sockets: Option<u64>,
}

/// A share of the time, 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Share {
    /// Some task waited.
    pub some: f64,
    /// All waited.
    pub full: f64,
}

/// How long runnable tasks waited for a CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RunQueue {
    /// Half of the waits were shorter, in nanoseconds. `None` if there were none.
    pub p50_ns: Option<f64>,
    /// All but one in a hundred were shorter.
    pub p99_ns: Option<f64>,
    /// Seconds waited per second, over all tasks.
    pub waiting: f64,
    /// Waits per second.
    pub waits: f64,
}

/// What happened between two readings, per second. `None` where no source measures it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rates {
    /// The time between the two readings, in nanoseconds: near the window's length, less at the beginning.
    pub over_ns: u64,
    /// CPUs in use.
    pub cpu: f64,
    /// Share of the enforcement periods in which the quota was used up; `None` without a quota.
    pub throttled: Option<f64>,
    /// Seconds per second that tasks were kept from running by the quota.
    pub throttled_time: f64,
    /// Waits for a CPU.
    pub runq: Option<RunQueue>,
    /// Involuntary switches by the thread that came next: same pod, other pod, system.
    pub preempted: Option<[f64; 3]>,
    /// Waiting for a CPU (PSI).
    pub cpu_stalled: Option<Share>,
    /// Waiting for memory (PSI).
    pub memory_stalled: Option<Share>,
    /// Waiting for devices (PSI).
    pub io_stalled: Option<Share>,
    /// Seconds per second spent in reclaim.
    pub reclaim: Option<f64>,
    /// Faults that needed a read.
    pub major_faults: f64,
    /// Bytes read from devices.
    pub read_bytes: Option<f64>,
    /// Bytes written to devices.
    pub written_bytes: Option<f64>,
    /// The container's sockets.
    pub net: Option<NetRates>,
    /// Connections established.
    pub established: Option<f64>,
    /// The mean of the smoothed round trip times seen, in microseconds; `None` if none was.
    pub rtt_us: Option<f64>,
    /// Processes killed for lack of memory, in all between the two readings.
    pub oom_kills: u64,
}

/// One reading of a cgroup.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// `CLOCK_MONOTONIC`, in nanoseconds.
    pub at_ns: u64,
    /// The counters then.
    pub counters: Counters,
    /// The gauges then.
    pub gauges: Gauges,
    /// What pages alone show; in full readings.
    pub details: Option<Box<Details>>,
}

/// What is read of a cgroup only when somebody asks for a page. `None` where this machine doesn't say it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Details {
    /// How often the memory limit was hit since the cgroup was made.
    pub limit_hits: Option<u64>,
    /// The most memory that was ever charged, in bytes.
    pub memory_peak: Option<u64>,
    /// Memory of the kernel's own, in bytes.
    pub memory_kernel: Option<u64>,
    /// What went to and came from each block device; a device without any traffic may be missing.
    pub devices: Vec<DeviceTraffic>,
    /// How many files the first process may have open (the soft limit); -1: any number.
    pub descriptors_limit: Option<i64>,
}

/// What a cgroup read from a block device and wrote to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceTraffic {
    /// The device's major and minor number.
    pub device: (u32, u32),
    /// Bytes read and written.
    pub bytes: [u64; 2],
    /// Reads and writes.
    pub operations: [u64; 2],
}

/// A block device of the machine, as `/proc/diskstats` has it since the machine's start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Disk {
    /// Its major and minor number.
    pub device: (u32, u32),
    /// Its name below `/dev`.
    pub name: String,
    /// What was read.
    pub read: DiskWork,
    /// What was written.
    pub written: DiskWork,
    /// Requests that are under way.
    pub in_flight: u64,
    /// Milliseconds during which any request was under way.
    pub busy_ms: u64,
    /// Milliseconds that all requests together were under way.
    pub weighted_ms: u64,
}

/// One direction of a block device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskWork {
    /// Requests that are done.
    pub completed: u64,
    /// Requests that were merged with others.
    pub merged: u64,
    /// Sectors of 512 bytes.
    pub sectors: u64,
    /// Milliseconds that requests took.
    pub ms: u64,
}

/// A container and what its cgroup said.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ContainerStats {
    /// Its name in the pod.
    pub name: String,
    /// The runtime's identifier, without the runtime's name.
    pub id: String,
    /// The image, as the pod's status has it.
    pub image: String,
    /// It runs to its end, and says nothing of the pod then: an init container or an ephemeral one.
    pub init: bool,
    /// How often it was started again.
    pub restarts: u32,
    /// What it is at.
    pub state: State,
    /// `None` where it is not probed (a foreign pod).
    pub ready: Option<bool>,
    /// When it was started.
    pub started_at: Option<Timestamp>,
    /// Its cgroup, from the root; `None` while it has none.
    pub cgroup: Option<String>,
    /// The cgroup2 directory's inode: how the kernel programs know it.
    pub cgroup_id: Option<u64>,
    /// The newest reading; `None` before the first one, and for what doesn't run.
    pub reading: Option<Reading>,
    /// Rates over [`WINDOWS`], in that order; `None` before there are two readings.
    pub windows: [Option<Rates>; 3],
    /// Who had the CPUs while it waited for them; `None` if it did not wait lately, and where no kernel
    /// program measures.
    pub waited_for: Option<WaitedFor>,
    /// Whose growth made it wait for memory; `None` if it did not lately, and where no kernel program
    /// measures.
    pub waited_for_memory: Option<WaitedFor>,
}

/// Who made a container's threads wait, in about the last minute: who had the CPUs meanwhile (waits below 100
/// µs are left out), or whose threads needed the memory ([`beelet_policy::tuner::reclaim`]).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WaitedFor {
    /// Share of the last minute (0 to 1) in which some thread waited: PSI's, or where there is none, the
    /// number of threads that waited on average, at most 1.
    pub some: f64,
    /// Those that had most, three at most, the most first.
    pub holders: Vec<Holder>,
}

/// One of those that had what others waited for.
#[derive(Debug, Clone, PartialEq)]
pub struct Holder {
    /// Who.
    pub who: Who,
    /// The share of the wait (0 to 1) during which it had the CPU; its share of the memory that was needed.
    pub share: f64,
}

/// Who can have a CPU, or need memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Who {
    /// A container, or the sandbox of a pod: then `container` is empty.
    Pod {
        /// Its pod.
        pod: PodName,
        /// Its name.
        container: String,
    },
    /// A cgroup of the machine's, by its path from the root of cgroup2. `/` has kernel threads, and what is
    /// in no cgroup.
    Machine(String),
    /// Nothing ran: its own CPU quota, or its pod's, held the container back; or its own memory limit did.
    Nobody,
    /// A cgroup that is gone.
    Gone,
}

/// What a container is at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum State {
    /// It runs.
    Running,
    /// It will, and why it doesn't yet.
    Waiting(String),
    /// It did, and how it ended.
    Ended(String),
    /// The status says nothing.
    #[default]
    Unknown,
}

/// A pod and its containers.
#[derive(Debug, Clone, PartialEq)]
pub struct PodStats {
    /// Namespace and name.
    pub name: PodName,
    /// Its UID.
    pub uid: String,
    /// `Guaranteed`, `Burstable`, `BestEffort`; empty if unknown.
    pub qos: String,
    /// `Pending`, `Running`, `Terminating`, `Evicted`, …
    pub phase: String,
    /// Whether it takes traffic; `None` where it is not probed.
    pub ready: Option<bool>,
    /// Why not: the condition's reason and message, in one line.
    pub not_ready: String,
    /// When it was started.
    pub started_at: Option<Timestamp>,
    /// It shares the node's network: then `net` is `None`.
    pub host_network: bool,
    /// Its network namespace, where that is known.
    pub netns: Option<PathBuf>,
    /// The pod's own cgroup, which its containers' are in.
    pub cgroup: Option<String>,
    /// What that one said: containers and pause together; from [`Scope::Usage`](crate::Scope::Usage) on, in
    /// full readings all of it.
    pub reading: Option<Reading>,
    /// The pod's interfaces but the loopback one, by name; in full readings, and where no kernel program
    /// counts.
    pub net: Vec<(String, Net)>,
    /// Bytes received and sent per second, and segments sent again, over [`WINDOWS`]; from `net`.
    pub net_windows: [Option<NetRates>; 3],
    /// In the order of the spec, init containers first.
    pub containers: Vec<ContainerStats>,
    /// What it has on disk; in full readings.
    pub disk: Option<PodDisk>,
    /// Its volumes with room of their own; in full readings.
    pub volumes: Vec<VolumeUse>,
}

/// A pod's network traffic, per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NetRates {
    /// Bytes received.
    pub rx_bytes: f64,
    /// Bytes sent.
    pub tx_bytes: f64,
    /// TCP segments sent again.
    pub retransmits: f64,
}

/// The machine as a whole.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Machine {
    /// CPUs that are online.
    pub cpus: u32,
    /// Time that they were busy together since boot, in nanoseconds.
    pub cpu_ns: u64,
    /// Of one CPU each, how many are busy: over [`WINDOWS`].
    pub cpu: [Option<f64>; 3],
    /// The load averages.
    pub load: [f64; 3],
    /// Bytes of memory.
    pub memory_total: u64,
    /// What can be had without swapping.
    pub memory_available: u64,
    /// Used without inactive file pages.
    pub working_set: u64,
    /// Used in all.
    pub memory_usage: u64,
    /// Waiting, on the whole machine: CPU, memory, devices.
    pub stalls: [Option<Stalls>; 3],
    /// The same as shares of the time, over 10 s.
    pub stalled: [Option<Share>; 3],
    /// When it was started.
    pub booted_at: Option<Timestamp>,
    /// Anonymous memory.
    pub rss: Option<u64>,
    /// Page faults, and such that needed a read.
    pub faults: Option<[u64; 2]>,
    /// The machine's interfaces but the loopback one and pods' ends; in full readings.
    pub net: Vec<(String, Net)>,
    /// Bytes of swap, and how many of them are free; `None` without any.
    pub swap: Option<[u64; 2]>,
    /// The path of the cgroup of all pods, and what it said; in full readings.
    pub all_pods: Option<(String, Reading)>,
    /// The whole machine, as if it were a cgroup; in full readings.
    pub reading: Option<Reading>,
    /// Its block devices; in full readings.
    pub disks: Vec<Disk>,
}

/// The whole node at one moment. Published whole; never changed.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeStats {
    /// When it was read.
    pub at: Timestamp,
    /// The same on `CLOCK_MONOTONIC`, in nanoseconds; 0 before the first reading.
    pub at_ns: u64,
    /// The node's name.
    pub node: Arc<str>,
    /// Whether kernel programs measure; if not, what only they know is missing everywhere.
    pub by_kernel: bool,
    /// The machine.
    pub machine: Machine,
    /// Where its file systems are; in full readings.
    pub places: Places,
    /// All pods, by name.
    pub pods: Vec<PodStats>,
    /// Containers that run but whose cgroup was not found (yet), or that are beyond the configured number.
    pub left_out: usize,
}

impl NodeStats {
    /// The value before anything was read.
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

    /// Every container with its pod.
    pub fn containers(&self) -> impl Iterator<Item = (&PodStats, &ContainerStats)> {
        self.pods.iter().flat_map(|pod| pod.containers.iter().map(move |container| (pod, container)))
    }

    /// Every container that was read, with its pod and the reading.
    pub fn readings(&self) -> impl Iterator<Item = (&PodStats, &ContainerStats, &Reading)> {
        self.containers().filter_map(|(pod, container)| Some((pod, container, container.reading.as_ref()?)))
    }
}
