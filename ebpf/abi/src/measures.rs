//! The programs' counters of each cgroup below the pods' root, and their events about it.

use core::mem::{align_of, offset_of, size_of};

use crate::EventHeader;

/// Default entries of the `CONTAINERS`, `HOLDERS`, `SLOTS` and `PRESSURE` maps, as a power of two: existing
/// and recently removed cgroups below the pods' root. The agent can override it (the read-only global
/// `CONTAINER_BITS`).
pub const CONTAINER_BITS: u32 = 11;
/// Two to the power of [`CONTAINER_BITS`].
pub const MAX_CONTAINERS: usize = 1 << CONTAINER_BITS;
/// 2^64 divided by the golden ratio, to the next odd number. The highest bits of a cgroup's id times this
/// factor are the first slot to try, its home: the product spreads ids at any regular distance far apart
/// (Knuth, The Art of Computer Programming 3, 6.4, Fibonacci hashing).
pub const HOME_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// Number of slots to try for a cgroup: `n * (n + 1) / 2` behind its home, so all of them are different.
pub const SLOT_TRIES: u32 = 64;
/// Entries of the `TASKS` map: threads of the machine. The map is used only before Linux 6.4, and has a
/// single entry on later kernels.
pub const MAX_TASKS: usize = 65_536;
/// Entries of the `ANCESTRY` cache, for each CPU.
pub const ANCESTRY_SLOTS: usize = 512;
/// Entries of the `EXITED` map: processes whose end was sent lately. Each is needed from the process's end to
/// the last switch of its threads, which takes microseconds.
pub const MAX_EXITED: usize = 1024;
/// Buckets of [`Counters::run_queue_waits`]: a power of two, so that a mask keeps an index in bounds.
pub const WAIT_BUCKETS: usize = 32;
/// Upper bound of the first bucket in nanoseconds, as a power of two.
pub const FIRST_BUCKET_BITS: u32 = 10;
/// Period over which waits are summed before an edge is decided, in nanoseconds.
pub const PRESSURE_WINDOW_NS: u64 = 1_000_000_000;
/// Minimum wait that counts as pressure, in nanoseconds; shorter waits are only counted. The minimum keeps
/// the shared `PRESSURE` map out of the scheduler's fast path.
pub const PRESSURE_FLOOR_NS: u64 = 100_000;

/// Remembered stretches of time per CPU: [`Running::stretches`]. A power of two, so that a mask keeps an
/// index in bounds.
pub const STRETCHES: usize = 16;
/// Number of cgroups that [`Shares`] distinguishes. A power of two.
pub const MAX_PARTS: usize = 8;
/// Half-life of the amounts in [`Shares`], 2^35 ns (34 s): older amounts count half, after twice that time a
/// quarter, and so on.
pub const HALF_LIFE_BITS: u32 = 35;
/// Holder of an idle CPU: a thread that waits there is held back by its own CPU quota.
pub const NOBODY: u64 = u64::MAX;

/// QoS classes, as indexes of [`Settings::run_queue_wait_ns`] and [`Settings::reclaim_ns`].
pub mod qos {
    /// A pod directly below the pods' root.
    pub const GUARANTEED: u32 = 0;
    /// A pod below the cgroup `burstable`.
    pub const BURSTABLE: u32 = 1;
    /// A pod below the cgroup `besteffort`.
    pub const BEST_EFFORT: u32 = 2;
    /// Number of classes.
    pub const CLASSES: usize = 3;
}

/// Kinds of pressure: [`PressureEvent::pressure`].
pub mod pressure {
    /// The cgroup's threads were runnable, but did not run.
    pub const RUN_QUEUE: u32 = 0;
    /// The cgroup's threads reclaimed memory instead of running.
    pub const RECLAIM: u32 = 1;
    /// Number of kinds.
    pub const KINDS: usize = 2;
}

/// Key of the `PRESSURE` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CgroupKey {
    /// Cgroup2 id: the inode of the directory. Never used twice while the machine is up.
    pub cgroup_id: u64,
}

/// Value of the `SLOTS` map: the owner of the element of the `CONTAINERS` map with the same index. The
/// programs allocate slots, the agent frees them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// Cgroup2 id; 0 if the slot is free.
    pub cgroup_id: u64,
}

/// Value of the per-CPU `CONTAINERS` map: the counters of a cgroup, which only grow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Cgroup2 id of the counters' owner on this CPU. If it differs from the slot's, the slot's owner has not
    /// counted on this CPU yet, and the counters are a former owner's.
    pub cgroup_id: u64,
    /// Time on a CPU, nanoseconds.
    pub on_cpu_ns: u64,
    /// Switches away from the cgroup's threads.
    pub switches: u64,
    /// Switches at which a runnable thread was preempted by a thread of the same pod.
    pub preempted_by_same_pod: u64,
    /// Switches at which a runnable thread was preempted by a thread of another pod.
    pub preempted_by_other_pod: u64,
    /// Switches at which a runnable thread was preempted by a thread of the machine (not a pod's).
    pub preempted_by_system: u64,
    /// Time that threads were runnable but did not run, nanoseconds.
    pub run_queue_wait_ns: u64,
    /// Number of these waits by length. Bucket 0: below 1024 ns. Bucket i: from 2^(9+i) to 2^(10+i) ns. The
    /// last bucket: everything above.
    pub run_queue_waits: [u64; WAIT_BUCKETS],
    /// Time that threads spent in reclaim because a cgroup was at its limit, nanoseconds.
    pub memcg_reclaim_ns: u64,
    /// Number of these reclaims.
    pub memcg_reclaims: u64,
    /// Time that threads spent in reclaim because the machine was short of memory, nanoseconds.
    pub direct_reclaim_ns: u64,
    /// Number of these reclaims.
    pub direct_reclaims: u64,
    /// Processes that the OOM killer chose.
    pub oom_kills: u64,
    /// TCP connections established by either side.
    pub established: u64,
    /// TCP segments retransmitted.
    pub retransmits: u64,
    /// Sum of the sampled smoothed round-trip times, microseconds.
    pub rtt_us: u64,
    /// Number of these samples.
    pub rtt_samples: u64,
    /// Bytes received, from the IP header on.
    pub rx_bytes: u64,
    /// Packets received.
    pub rx_packets: u64,
    /// Bytes sent, from the IP header on.
    pub tx_bytes: u64,
    /// Packets sent.
    pub tx_packets: u64,
}

/// Value of the `SETTINGS` map: the agent's settings for the counting programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Cgroup2 id of the pods' root; 0 turns counting off.
    pub pods_cgroup: u64,
    /// Cgroup2 id of the cgroup of Burstable pods; 0 if missing.
    pub burstable: u64,
    /// Cgroup2 id of the cgroup of BestEffort pods; 0 if missing.
    pub best_effort: u64,
    /// Number that changes with the settings and invalidates the programs' cache of cgroups.
    pub generation: u32,
    /// Zero.
    pub reserved: u32,
    /// Thresholds of run-queue waits within [`PRESSURE_WINDOW_NS`], nanoseconds, by [`qos`]; 0: no edges.
    pub run_queue_wait_ns: [u64; qos::CLASSES],
    /// Thresholds of reclaim within [`PRESSURE_WINDOW_NS`], nanoseconds, by [`qos`]; 0: no edges.
    pub reclaim_ns: [u64; qos::CLASSES],
}

/// Value of the per-CPU `RUNNING` map: the CPU's running thread, whose unfinished run is not in [`Counters`]
/// yet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Running {
    /// Start of the run: nanoseconds on the run queue's clock; 0 before the first switch.
    pub since_ns: u64,
    /// Lead of `CLOCK_MONOTONIC` over the run queue's clock, nanoseconds; wraps if it is behind.
    pub ahead_ns: u64,
    /// Time of measuring `ahead_ns`, on the run queue's clock; 0: never.
    pub compared_ns: u64,
    /// Cgroup2 id of the thread; 0 if it does not belong to a pod.
    pub cgroup_id: u64,
    /// Cgroup2 id of the thread's pod.
    pub pod_id: u64,
    /// Length of the thread's wait for the CPU, nanoseconds.
    pub wait_ns: u64,
    /// One of [`qos`].
    pub qos: u32,
    /// 1 if `wait_ns` is known.
    pub waited: u32,
    /// Number of the current stretch; modulo [`STRETCHES`], its index in `stretches`.
    pub newest: u64,
    /// Recent holders of the CPU: a ring, in which the oldest follows the newest.
    pub stretches: [Stretch; STRETCHES],
}

/// A stretch of time during which the threads of one cgroup had a CPU, up to the next stretch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stretch {
    /// Cgroup2 id of the threads, a pod's or the machine's; [`NOBODY`] if the CPU was idle.
    pub cgroup_id: u64,
    /// Start of the stretch: nanoseconds on the run queue's clock; 0: never used.
    pub since_ns: u64,
}

/// Recent amounts of a resource of several cgroups. Value of two per-CPU maps:
///
/// - `HOLDERS`, whose elements belong to the cgroups with the same elements of `SLOTS`: the time for which
///   each cgroup had this CPU while threads of the owner waited for it at least [`PRESSURE_FLOOR_NS`], in
///   nanoseconds.
/// - `RECLAIMERS`, with an element without an owner for each kind of [`reclaim`]: the pages that the threads
///   of each cgroup freed on this CPU, because they needed as many.
///
/// All amounts are halved every 2^[`HALF_LIFE_BITS`] ns. If all of `parts` are in use, a new cgroup replaces
/// the one with the least amount and inherits that amount (space saving: Metwally et al., Efficient
/// computation of frequent and top-k elements in data streams, 2005).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Cgroup2 id of the owner on this CPU, as in [`Counters::cgroup_id`]; 0 without an owner.
    pub cgroup_id: u64,
    /// Time up to which the amounts were halved: `CLOCK_MONOTONIC` divided by 2^[`HALF_LIFE_BITS`].
    pub epoch: u64,
    /// Total amount, including the part without a known cgroup.
    pub total: u64,
    /// Amounts by cgroup.
    pub parts: [Part; MAX_PARTS],
}

/// An element of [`Shares::parts`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Cgroup2 id as in [`Stretch::cgroup_id`]; 0 if the element is free.
    pub cgroup_id: u64,
    /// Amount of the cgroup.
    pub amount: u64,
}

/// Kinds of reclaim: the elements of the `RECLAIMERS` map.
pub mod reclaim {
    /// The machine was short of memory.
    pub const DIRECT: u32 = 0;
    /// A cgroup was at its limit: the thread's own, or one above it.
    pub const MEMCG: u32 = 1;
    /// Number of kinds.
    pub const KINDS: usize = 2;
}

/// Value of the per-CPU `ANCESTRY` cache: the pod of a cgroup.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ancestry {
    /// Cgroup2 id of the cgroup.
    pub cgroup_id: u64,
    /// Cgroup2 id of the pod; 0 if the cgroup is not below the pods' root.
    pub pod_id: u64,
    /// One of [`qos`].
    pub qos: u32,
    /// [`Settings::generation`] at the time of caching.
    pub generation: u32,
}

/// Key of the `TASKS` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskKey {
    /// Pid of the thread in the initial pid namespace.
    pub pid: u32,
}

/// Value of the `TASKS` and `TASK_STORAGE` maps: a thread's wait state.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskState {
    /// Time at which the thread last became runnable: nanoseconds on the run queue's clock; 0: not seen yet.
    /// Used only if the kernel doesn't count waits.
    pub runnable_since_ns: u64,
    /// Time at which the thread last got a CPU in a pod, on that clock. Used only if the kernel counts waits.
    pub arrived_ns: u64,
    /// Total wait for CPUs in the thread's life at that time, nanoseconds. Used only if the kernel counts
    /// waits.
    pub waited_ns: u64,
    /// Start of the current reclaim; 0 without one.
    pub reclaiming_since_ns: u64,
    /// Address of the `task_struct`, if the kernel identifies an OOM kill's victim only by number (`TASKS`);
    /// otherwise 0.
    pub task: u64,
}

/// Value of the `PRESSURE` map: state of a cgroup's pressure edges.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Start of the window, by [`pressure`] kind: `CLOCK_MONOTONIC`, nanoseconds.
    pub window_ns: [u64; pressure::KINDS],
    /// Time waited since the start of the window, nanoseconds.
    pub waited_ns: [u64; pressure::KINDS],
    /// 1 between the edge up and the edge down.
    pub above: [u64; pressure::KINDS],
    /// Time of the last edge of any kind.
    pub edge_ns: u64,
}

/// Key of the `EXITED` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitedKey {
    /// Start time of the process's first thread: together with the pid it identifies a process permanently.
    pub started_ns: u64,
    /// Pid of the process.
    pub pid: u32,
    /// Zero.
    pub reserved: u32,
}

/// Event of [`crate::kind::EXITED`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitEvent {
    /// Kind, CPU, time, cgroup.
    pub header: EventHeader,
    /// Pid of the process in the initial pid namespace.
    pub pid: u32,
    /// Pid of the process in its own pid namespace; 0 if unknown. A container's first process has 1, unless
    /// the pod's containers share a namespace.
    pub own_pid: u32,
    /// Status as in wait(2): the signal in the lowest seven bits, the exit code in the second byte.
    pub status: u32,
    /// Zero.
    pub reserved: u32,
}

/// Event of [`crate::kind::OOM_KILL`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OomEvent {
    /// Kind, CPU, time, the victim's cgroup.
    pub header: EventHeader,
    /// The victim, with sizes in pages.
    pub kill: OomKill,
}

/// A victim of the OOM killer. Sizes are in bytes after the agent has read the record from the ring buffer
/// ([`OomKill::in_bytes`]); 0 if unknown.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct OomKill {
    /// Pid of the process in the initial pid namespace.
    pub pid: u32,
    /// Zero.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub reserved: u32,
    /// Size of the address space.
    pub total_vm: u64,
    /// Resident anonymous memory.
    pub anon_rss: u64,
    /// Resident file mappings.
    pub file_rss: u64,
    /// Resident shared memory.
    pub shmem_rss: u64,
}

impl OomKill {
    /// Converts the sizes from pages to bytes.
    #[must_use]
    pub const fn in_bytes(self, page_bytes: u64) -> OomKill {
        OomKill {
            total_vm: self.total_vm.saturating_mul(page_bytes),
            anon_rss: self.anon_rss.saturating_mul(page_bytes),
            file_rss: self.file_rss.saturating_mul(page_bytes),
            shmem_rss: self.shmem_rss.saturating_mul(page_bytes),
            ..self
        }
    }
}

/// Event of [`crate::kind::PRESSURE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PressureEvent {
    /// Kind, CPU, time, cgroup.
    pub header: EventHeader,
    /// One of [`pressure`].
    pub pressure: u32,
    /// 1 if the pressure rose above its threshold, 0 if it fell below half of it.
    pub above: u32,
    /// Time waited in the window, nanoseconds.
    pub waited_ns: u64,
}

const _: () = {
    assert!(size_of::<CgroupKey>() == 8);
    assert!(size_of::<Slot>() == 8);
    assert!(size_of::<Counters>() == 8 * (20 + WAIT_BUCKETS) && align_of::<Counters>() == 8);
    assert!(offset_of!(Counters, run_queue_waits) == 56);
    assert!(offset_of!(Counters, memcg_reclaim_ns) == 56 + 8 * WAIT_BUCKETS);
    assert!(offset_of!(Counters, established) == 56 + 8 * WAIT_BUCKETS + 40);
    assert!(SLOT_TRIES as usize <= MAX_CONTAINERS);
    assert!(offset_of!(Counters, tx_packets) == size_of::<Counters>() - 8);

    assert!(size_of::<Settings>() == 80);
    assert!(offset_of!(Settings, generation) == 24);
    assert!(offset_of!(Settings, run_queue_wait_ns) == 32);
    assert!(offset_of!(Settings, reclaim_ns) == 56);

    assert!(size_of::<Running>() == 64 + 16 * STRETCHES && offset_of!(Running, qos) == 48);
    assert!(offset_of!(Running, stretches) == 64 && STRETCHES.is_power_of_two());
    assert!(size_of::<Shares>() == 24 + 16 * MAX_PARTS && offset_of!(Shares, parts) == 24);
    assert!(size_of::<Part>() == 16 && size_of::<Stretch>() == 16 && MAX_PARTS.is_power_of_two());
    assert!(size_of::<Ancestry>() == 24 && offset_of!(Ancestry, qos) == 16);
    assert!(size_of::<TaskKey>() == 4);
    assert!(size_of::<TaskState>() == 40);
    assert!(size_of::<Pressure>() == 56 && offset_of!(Pressure, edge_ns) == 48);
    assert!(size_of::<ExitedKey>() == 16);

    assert!(size_of::<ExitEvent>() == 40 && offset_of!(ExitEvent, status) == 32);
    assert!(size_of::<OomEvent>() == 64 && offset_of!(OomEvent, kill) == 24);
    assert!(size_of::<OomKill>() == 40 && offset_of!(OomKill, total_vm) == 8);
    assert!(size_of::<PressureEvent>() == 40 && offset_of!(PressureEvent, waited_ns) == 32);
};
