//! What the programs count for each cgroup below the pods' root, and the events that they send of it.

use core::mem::{align_of, offset_of, size_of};

use crate::EventHeader;

/// Entries of the `CONTAINERS`, `HOLDERS`, `SLOTS` and `PRESSURE` maps, as a power of two, unless the agent
/// sets another (the read-only global `CONTAINER_BITS`): cgroups below the pods' root that are alive, or died
/// a short while ago.
pub const CONTAINER_BITS: u32 = 11;
/// Two to the [`CONTAINER_BITS`].
pub const MAX_CONTAINERS: usize = 1 << CONTAINER_BITS;
/// 2^64 divided by the golden ratio, to the next odd number. The highest bits of a cgroup's id times this say
/// where its counters are looked for first, its home: that takes ids at any regular distance far apart
/// (Knuth, The Art of Computer Programming 3, 6.4, Fibonacci hashing).
pub const HOME_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// How many slots are tried for a cgroup: `n * (n + 1) / 2` behind its home, so all of them are different.
pub const SLOT_TRIES: u32 = 64;
/// Entries of the `TASKS` map: threads of the machine. It is used below Linux 6.4 only, and has one entry
/// elsewhere.
pub const MAX_TASKS: usize = 65_536;
/// Entries of the `ANCESTRY` cache, for each CPU.
pub const ANCESTRY_SLOTS: usize = 512;
/// Entries of the `EXITED` map: processes of which the end was sent lately. Each is needed from the process's
/// end to the last switch of its threads, which is microseconds.
pub const MAX_EXITED: usize = 1024;
/// Buckets of [`Counters::run_queue_waits`]: a power of two, so that a mask keeps an index in bounds.
pub const WAIT_BUCKETS: usize = 32;
/// The power of two, in nanoseconds, below which everything is in the first bucket.
pub const FIRST_BUCKET_BITS: u32 = 10;
/// The span that pressure is summed over before an edge is decided: nanoseconds.
pub const PRESSURE_WINDOW_NS: u64 = 1_000_000_000;
/// Waits shorter than this are counted, but are no pressure: nanoseconds. It keeps the shared `PRESSURE` map
/// out of the scheduler's fast path.
pub const PRESSURE_FLOOR_NS: u64 = 100_000;

/// Stretches of time that are remembered of each CPU: [`Running::stretches`]. A power of two, so that a mask
/// keeps an index in bounds.
pub const STRETCHES: usize = 16;
/// As many cgroups are told apart in [`Shares`]. A power of two.
pub const MAX_PARTS: usize = 8;
/// What [`Shares`] say counts half after 2^35 ns (34 s), a quarter after twice that, and so on.
pub const HALF_LIFE_BITS: u32 = 35;
/// Who has a CPU on which nothing runs: a thread that waits there is held back by its own CPU quota.
pub const NOBODY: u64 = u64::MAX;

/// QoS classes, as indexes of [`Settings::run_queue_wait_ns`] and [`Settings::reclaim_ns`].
pub mod qos {
    /// A pod directly below the pods' root.
    pub const GUARANTEED: u32 = 0;
    /// A pod below the cgroup `burstable`.
    pub const BURSTABLE: u32 = 1;
    /// A pod below the cgroup `besteffort`.
    pub const BEST_EFFORT: u32 = 2;
    /// How many there are.
    pub const CLASSES: usize = 3;
}

/// What a cgroup is short of: [`PressureEvent::pressure`].
pub mod pressure {
    /// Its threads were runnable, but did not run.
    pub const RUN_QUEUE: u32 = 0;
    /// Its threads looked for free memory instead of running.
    pub const RECLAIM: u32 = 1;
    /// How many kinds there are.
    pub const KINDS: usize = 2;
}

/// Key of the `PRESSURE` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CgroupKey {
    /// The cgroup2 id: the inode of its directory. Never used twice while the machine is up.
    pub cgroup_id: u64,
}

/// Value of the `SLOTS` map: the owner of the element of the `CONTAINERS` map with the same index. The
/// programs take slots, the agent frees them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// The cgroup2 id; 0: free.
    pub cgroup_id: u64,
}

/// Value of the per-CPU `CONTAINERS` map: what one cgroup used, waited for and moved. All of it only ever
/// grows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The cgroup2 id of their owner, on this CPU. If it differs from the slot's, the slot's owner has done
    /// nothing on this CPU yet, and what is here is left from before.
    pub cgroup_id: u64,
    /// Time on a CPU, nanoseconds.
    pub on_cpu_ns: u64,
    /// How often one of its threads left a CPU.
    pub switches: u64,
    /// Of these, how often it would have gone on, but a thread of the same pod came instead.
    pub preempted_by_same_pod: u64,
    /// A thread of another pod came instead.
    pub preempted_by_other_pod: u64,
    /// A thread of the machine (not a pod's) came instead.
    pub preempted_by_system: u64,
    /// Time that threads were runnable but did not run, nanoseconds.
    pub run_queue_wait_ns: u64,
    /// How many such waits there were, by length. Bucket 0: below 1024 ns. Bucket i: from 2^(9+i) to 2^(10+i)
    /// ns. The last: everything above.
    pub run_queue_waits: [u64; WAIT_BUCKETS],
    /// Time that threads spent reclaiming because a cgroup was at its limit, nanoseconds.
    pub memcg_reclaim_ns: u64,
    /// How often.
    pub memcg_reclaims: u64,
    /// Time that threads spent reclaiming because the machine was short of memory, nanoseconds.
    pub direct_reclaim_ns: u64,
    /// How often.
    pub direct_reclaims: u64,
    /// Processes that the kernel killed for want of memory.
    pub oom_kills: u64,
    /// TCP connections that were made, by either side.
    pub established: u64,
    /// TCP segments sent again.
    pub retransmits: u64,
    /// The sum of the smoothed round-trip times seen, microseconds.
    pub rtt_us: u64,
    /// How many such times.
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

/// Value of the `SETTINGS` map: what the agent sets for the programs that count.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The cgroup2 id of the pods' root; 0: nothing is counted.
    pub pods_cgroup: u64,
    /// The cgroup2 id of the cgroup of Burstable pods; 0 if there is none.
    pub burstable: u64,
    /// The cgroup2 id of the cgroup of BestEffort pods; 0 if there is none.
    pub best_effort: u64,
    /// Another number with each change: what the programs remembered of cgroups is void then.
    pub generation: u32,
    /// Zero.
    pub reserved: u32,
    /// Run-queue waits within [`PRESSURE_WINDOW_NS`] that are pressure, nanoseconds, by [`qos`]; 0: never.
    pub run_queue_wait_ns: [u64; qos::CLASSES],
    /// Reclaim within [`PRESSURE_WINDOW_NS`] that is pressure, nanoseconds, by [`qos`]; 0: never.
    pub reclaim_ns: [u64; qos::CLASSES],
}

/// Value of the per-CPU `RUNNING` map: the thread that runs there now. What it has run so far is not in
/// [`Counters`] yet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Running {
    /// Since when: nanoseconds on the run queue's clock; 0 before the first switch.
    pub since_ns: u64,
    /// How far `CLOCK_MONOTONIC` is ahead of the run queue's clock, nanoseconds; wraps where it is behind.
    pub ahead_ns: u64,
    /// When `ahead_ns` was found, on the run queue's clock; 0: never.
    pub compared_ns: u64,
    /// Its cgroup2 id; 0 if it is no pod's.
    pub cgroup_id: u64,
    /// The cgroup2 id of its pod.
    pub pod_id: u64,
    /// How long it had waited for the CPU, nanoseconds.
    pub wait_ns: u64,
    /// One of [`qos`].
    pub qos: u32,
    /// 1 if it had waited: `wait_ns` counts.
    pub waited: u32,
    /// The element of `stretches` that goes on.
    pub newest: u64,
    /// Who had the CPU lately: a ring, the oldest behind the newest.
    pub stretches: [Stretch; STRETCHES],
}

/// A stretch of time during which one cgroup after another's threads had a CPU, up to the next stretch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stretch {
    /// The cgroup2 id of the threads, whether a pod's or the machine's; [`NOBODY`]: none ran.
    pub cgroup_id: u64,
    /// Since when: nanoseconds on the run queue's clock; 0: never used.
    pub since_ns: u64,
}

/// How much of something each of several cgroups had, lately. Value of two per-CPU maps:
///
/// - `HOLDERS`, of which an element belongs to the cgroup that has the same element of `SLOTS`: how long each
///   had this CPU while threads of that cgroup waited for it at least [`PRESSURE_FLOOR_NS`], in nanoseconds.
/// - `RECLAIMERS`, with an element for each kind of [`reclaim`], which belongs to nobody: how many pages the
///   threads of each freed on this CPU, because they needed as many.
///
/// All amounts count half with each 2^[`HALF_LIFE_BITS`] ns that have passed. If all of `parts` are taken,
/// the one with the least gives its place and its amount to the next (space saving: Metwally et al.,
/// Efficient computation of frequent and top-k elements in data streams, 2005).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// The cgroup2 id of the owner, on this CPU: as in [`Counters::cgroup_id`]; 0: nobody's.
    pub cgroup_id: u64,
    /// `CLOCK_MONOTONIC` divided by 2^[`HALF_LIFE_BITS`], up to which the amounts were halved.
    pub epoch: u64,
    /// All of it: also what nobody is named for.
    pub total: u64,
    /// Who had how much.
    pub parts: [Part; MAX_PARTS],
}

/// One of [`Shares::parts`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// As in [`Stretch::cgroup_id`]; 0: free.
    pub cgroup_id: u64,
    /// How much it had.
    pub amount: u64,
}

/// Kinds of reclaim: the elements of the `RECLAIMERS` map.
pub mod reclaim {
    /// The machine was short of memory.
    pub const DIRECT: u32 = 0;
    /// A cgroup was at its limit: the thread's own one, or one above it.
    pub const MEMCG: u32 = 1;
    /// How many kinds there are.
    pub const KINDS: usize = 2;
}

/// Value of the per-CPU `ANCESTRY` cache: what cgroup belongs to what pod.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ancestry {
    /// The cgroup2 id.
    pub cgroup_id: u64,
    /// Its pod's; 0 if it is not below the pods' root.
    pub pod_id: u64,
    /// One of [`qos`].
    pub qos: u32,
    /// As [`Settings::generation`] was.
    pub generation: u32,
}

/// Key of the `TASKS` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskKey {
    /// The thread's id in the first pid namespace.
    pub pid: u32,
}

/// Value of the `TASKS` and `TASK_STORAGE` maps: what a thread is waiting for.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskState {
    /// When it last became runnable: nanoseconds on the run queue's clock; 0: not seen yet. Only where the
    /// kernel doesn't count how long threads wait.
    pub runnable_since_ns: u64,
    /// When it last got a CPU in a pod, on that clock. Only where the kernel counts, as the next.
    pub arrived_ns: u64,
    /// How long it had waited for CPUs in its life by then, nanoseconds.
    pub waited_ns: u64,
    /// Since when it reclaims memory; 0 if it doesn't.
    pub reclaiming_since_ns: u64,
    /// Its `task_struct`, where the kernel names an OOM kill's victim by number only (`TASKS`); else 0.
    pub task: u64,
}

/// Value of the `PRESSURE` map: what the edges of one cgroup are decided from.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// When the window began, by [`pressure`] kind: `CLOCK_MONOTONIC`, nanoseconds.
    pub window_ns: [u64; pressure::KINDS],
    /// What was waited since, nanoseconds.
    pub waited_ns: [u64; pressure::KINDS],
    /// 1 between the edge up and the edge down.
    pub above: [u64; pressure::KINDS],
    /// When the last edge of any kind was sent.
    pub edge_ns: u64,
}

/// Key of the `EXITED` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitedKey {
    /// When its first thread was started: with the id this names a process for good.
    pub started_ns: u64,
    /// The process.
    pub pid: u32,
    /// Zero.
    pub reserved: u32,
}

/// [`crate::kind::EXITED`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitEvent {
    /// Kind, CPU, time, cgroup.
    pub header: EventHeader,
    /// The process, in the first pid namespace.
    pub pid: u32,
    /// Its id in its own pid namespace; 0 if unknown. A container's first process has 1, unless the pod's
    /// containers share a namespace.
    pub own_pid: u32,
    /// As wait(2) gives it: the signal in the lowest seven bits, the exit code in the second byte.
    pub status: u32,
    /// Zero.
    pub reserved: u32,
}

/// [`crate::kind::OOM_KILL`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OomEvent {
    /// Kind, CPU, time, the victim's cgroup.
    pub header: EventHeader,
    /// The victim. Its sizes are in pages here.
    pub kill: OomKill,
}

/// A process that the kernel chose to kill for want of memory. Sizes are in bytes once the agent has read the
/// record from the ring buffer ([`OomKill::in_bytes`]); 0 if unknown.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct OomKill {
    /// The process, in the first pid namespace.
    pub pid: u32,
    /// Zero.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub reserved: u32,
    /// Its address space.
    pub total_vm: u64,
    /// Its anonymous memory.
    pub anon_rss: u64,
    /// Files that it had mapped.
    pub file_rss: u64,
    /// Shared memory that it had mapped.
    pub shmem_rss: u64,
}

impl OomKill {
    /// From pages, which only the kernel knows the size of, to bytes.
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

/// [`crate::kind::PRESSURE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PressureEvent {
    /// Kind, CPU, time, cgroup.
    pub header: EventHeader,
    /// One of [`pressure`].
    pub pressure: u32,
    /// 1: it rose above its threshold. 0: it fell below half of it.
    pub above: u32,
    /// What was waited in the window, nanoseconds.
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
