//! The scheduler's records (`ebpf/src/scheduler.rs`), and the kernel functions that it calls.
//!
//! The agent resolves calls of kernel functions (kfuncs) by name in the running kernel's BTF: in the object
//! each is a call of a helper with a number that no helper has ([`FIRST_KFUNC`] and up).

use core::mem::{offset_of, size_of};

/// Scheduling classes of threads. Smaller numbers run first.
pub mod class {
    /// Guaranteed and critical pods: they run before all others, and at once when they wake up.
    pub const LATENCY: u32 = 0;
    /// Burstable pods by weight, and the machine's own threads.
    pub const SHARED: u32 = 1;
    /// BestEffort pods: they get the rest.
    pub const BEST_EFFORT: u32 = 2;
    /// In [`super::Turn::class`]: the CPU runs none of our threads.
    pub const NONE: u32 = u32::MAX;
}

/// Maximum number of CPUs that the scheduler supports.
pub const MAX_CPUS: usize = 1024;
/// Entries of `SHARES` and of `LIMITS`.
pub const MAX_SHARES: usize = 16_384;
/// The key in `SHARES` of all threads outside of pods.
pub const MACHINE: u64 = 0;
/// The weight of a request of one CPU.
pub const WEIGHT_OF_ONE_CPU: u32 = 100;
/// Time slice of a thread before others of its class get their turn, in nanoseconds.
pub const SLICE_NS: u64 = 5_000_000;
/// Length of the windows of CPU limits, in nanoseconds.
pub const WINDOW_NS: u64 = 100_000_000;
/// Maximum time between two turns of a waiting class on each CPU, in nanoseconds, regardless of the classes
/// before it.
pub const BOUND_NS: u64 = 100_000_000;
/// Time within which each waiting thread of a class gets a turn, in nanoseconds, for any number of threads:
/// the kernel's watchdog would unload the scheduler after [`WATCHDOG_MS`].
pub const ROUND_NS: u64 = 8_000_000_000;
/// Time after which the kernel unloads the scheduler if a runnable thread doesn't run, in milliseconds.
pub const WATCHDOG_MS: u32 = 20_000;

/// Value of the `SHARES` map, by cgroup id: of a pod, of a QoS class's cgroup (for pods without an entry
/// yet), or of [`MACHINE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Virtual run time, in nanoseconds of a share of [`WEIGHT_OF_ONE_CPU`]; counted by the programs.
    pub vtime: u64,
    /// Weight among the shares of [`class::SHARED`]; never 0.
    pub weight: u32,
    /// One of [`class`].
    pub class: u32,
}

/// Value of the `LIMITS` map, by the cgroup id of a container with a CPU limit.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// CPU time allowed per window, in nanoseconds; never 0.
    pub quota_ns: u64,
    /// CPU time used in the window, plus the excess of earlier windows; counted by the programs.
    pub used_ns: u64,
    /// Number of the window.
    pub window: u64,
    /// Time at which the quota allows the next parked thread to return: `CLOCK_MONOTONIC`, nanoseconds;
    /// updated by the programs.
    pub next_ns: u64,
}

/// Value of the `TURNS` map, by CPU: the running thread's turn.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Start of the turn, or its last charge: `CLOCK_MONOTONIC`, nanoseconds.
    pub since_ns: u64,
    /// Key of the thread's share.
    pub share: u64,
    /// Key of the thread's limit; 0 if it has none.
    pub container: u64,
    /// Time of the last check of [`class::SHARED`] for a thread on this CPU.
    pub shared_ns: u64,
    /// Time of the last check of [`class::BEST_EFFORT`] for a thread on this CPU.
    pub best_effort_ns: u64,
    /// Number of the first window that may have left parked threads to this CPU.
    pub window: u64,
    /// One of [`class`].
    pub class: u32,
    /// Zero.
    pub reserved: u32,
}

/// Bytes of each of the kernel's texts about an end.
pub const MESSAGE_BYTES: usize = 128;

/// The value of the `END` map.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The kernel's `scx_exit_kind`; 0 while the scheduler runs.
    pub kind: u64,
    /// The kernel's reason, terminated by a zero byte.
    pub reason: [u8; MESSAGE_BYTES],
    /// The kernel's message with details, terminated by a zero byte.
    pub message: [u8; MESSAGE_BYTES],
}

/// The number of the first kfunc.
pub const FIRST_KFUNC: i32 = 0x5c_0000;

/// A kernel function that programs call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kfunc {
    /// Names of the function in different kernels, the newest first.
    pub names: &'static [&'static str],
    /// The read-only global that is 1 if this kernel has the function; `None` if the programs require it.
    pub known_by: Option<&'static str>,
}

/// Indexes of the functions in [`KFUNCS`].
pub mod kfunc {
    #![allow(missing_docs)] // each is the kernel function of that name
    pub const SELECT_CPU_DFL: usize = 0;
    pub const INSERT: usize = 1;
    pub const INSERT_VTIME: usize = 2;
    pub const MOVE_TO_LOCAL: usize = 3;
    pub const CREATE_DSQ: usize = 4;
    pub const KICK_CPU: usize = 5;
    pub const NR_QUEUED: usize = 6;
    pub const SET_SLICE: usize = 7;
    pub const TEST_CPU: usize = 8;
}

/// All kernel functions. `scx_bpf_dispatch` and `scx_bpf_consume` are the names of Linux 6.12.
pub const KFUNCS: [Kfunc; 9] = [
    Kfunc { names: &["scx_bpf_select_cpu_dfl"], known_by: None },
    Kfunc { names: &["scx_bpf_dsq_insert", "scx_bpf_dispatch"], known_by: None },
    Kfunc { names: &["scx_bpf_dsq_insert_vtime", "scx_bpf_dispatch_vtime"], known_by: None },
    Kfunc { names: &["scx_bpf_dsq_move_to_local", "scx_bpf_consume"], known_by: None },
    Kfunc { names: &["scx_bpf_create_dsq"], known_by: None },
    Kfunc { names: &["scx_bpf_kick_cpu"], known_by: None },
    Kfunc { names: &["scx_bpf_dsq_nr_queued"], known_by: None },
    Kfunc { names: &["scx_bpf_task_set_slice"], known_by: Some("HAS_SET_SLICE") },
    Kfunc { names: &["bpf_cpumask_test_cpu"], known_by: None },
];

const _: () = {
    assert!(size_of::<Share>() == 16);
    assert!(offset_of!(Share, weight) == 8);
    assert!(offset_of!(Share, class) == 12);

    assert!(size_of::<Limit>() == 32);
    assert!(offset_of!(Limit, used_ns) == 8);
    assert!(offset_of!(Limit, window) == 16);
    assert!(offset_of!(Limit, next_ns) == 24);

    assert!(size_of::<Turn>() == 56);
    assert!(offset_of!(Turn, share) == 8);
    assert!(offset_of!(Turn, container) == 16);
    assert!(offset_of!(Turn, shared_ns) == 24);
    assert!(offset_of!(Turn, best_effort_ns) == 32);
    assert!(offset_of!(Turn, window) == 40);
    assert!(offset_of!(Turn, class) == 48);

    assert!(size_of::<End>() == 8 + 2 * MESSAGE_BYTES);
    assert!(offset_of!(End, reason) == 8);
    assert!(offset_of!(End, message) == 8 + MESSAGE_BYTES);
};
