//! Every field of a kernel structure, and every argument of a tracepoint, that the kernel programs read.
//!
//! Rust emits no CO-RE relocations, so each offset is a read-only global of an object. The agent sets it from
//! the running kernel's BTF before loading, and the verifier sees a constant. [`kernel_fields`] is the only
//! list: both objects make their globals and the checks of a [`group`] from it, and the agent its lookups. A
//! new field is one row.

/// Groups of fields that programs require. A program whose group is incomplete does nothing, and the agent
/// doesn't attach it.
pub mod group {
    /// A listening socket's address.
    pub const LISTENER: u32 = 1;
    /// A thread's cgroup and pod.
    pub const CGROUP: u32 = 1 << 1;
    /// The clock of a CPU's run queue, which the kernel reads right before each of the scheduler's hooks.
    pub const RUN_QUEUE_CLOCK: u32 = 1 << 2;
    /// Each thread's total wait for CPUs, summed by the kernel on that clock (`CONFIG_SCHED_INFO`).
    pub const RUN_DELAY: u32 = 1 << 3;
    /// A process's exit status.
    pub const EXIT: u32 = 1 << 4;
    /// The exiting thread.
    pub const EXIT_TASK: u32 = 1 << 5;
    /// A hook's thread.
    pub const THREAD: u32 = 1 << 6;
    /// The forked thread.
    pub const FORK: u32 = 1 << 7;
    /// The thread that becomes runnable.
    pub const WAKEUP: u32 = 1 << 8;
    /// The previous and the next thread of a switch.
    pub const SWITCH: u32 = 1 << 9;
    /// All fields for the lookup of listeners.
    pub const CHECK: u32 = 1 << 10;
    /// All fields for the scheduler.
    pub const SCHEDULER: u32 = 1 << 11;
}

/// Source of a value in this kernel's types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The offset of a member in bytes; for a bit field, of the byte that holds it.
    Field {
        /// The structure's name.
        structure: &'static str,
        /// Path of the member through nested structures.
        path: &'static str,
    },
    /// The mask of a bit field in its byte.
    Mask {
        /// The structure's name.
        structure: &'static str,
        /// The member.
        path: &'static str,
    },
    /// The offset of one of the counters in `mm_struct.rss_stat`, by its index
    /// (include/linux/mm_types_task.h).
    RssCounter {
        /// The index.
        index: u32,
    },
    /// The position of a tracepoint's argument.
    Argument {
        /// The tracepoint.
        tracepoint: &'static str,
        /// The argument's name.
        name: &'static str,
        /// The argument's shape.
        shape: Shape,
        /// Rank among the arguments of this shape, for a BTF without names.
        nth: usize,
    },
}

/// Shape of a tracepoint's argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A pointer to a `task_struct`.
    Task,
    /// A plain integer.
    Integer,
}

/// A row of [`kernel_fields`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelField {
    /// The read-only global for the value; it keeps [`crate::ABSENT`] if the kernel lacks the field.
    pub global: &'static str,
    /// The replacement global on other kernels.
    pub or: Option<&'static str>,
    /// Source of the value.
    pub source: Source,
    /// Groups of the field, each a bit of [`group`].
    pub groups: u32,
}

const fn field(structure: &'static str, path: &'static str) -> Source {
    Source::Field { structure, path }
}

const fn mask(structure: &'static str, path: &'static str) -> Source {
    Source::Mask { structure, path }
}

const fn rss_counter(index: u32) -> Source {
    Source::RssCounter { index }
}

const fn task(tracepoint: &'static str, name: &'static str, nth: usize) -> Source {
    Source::Argument { tracepoint, name, shape: Shape::Task, nth }
}

const fn integer(tracepoint: &'static str, name: &'static str, nth: usize) -> Source {
    Source::Argument { tracepoint, name, shape: Shape::Integer, nth }
}

/// Passes all rows to the macro `$expand`: those of both the attached programs and `socket_check`, of the
/// attached programs only, of `socket_check` only, and of the scheduler.
///
/// A row is `GLOBAL: source [GROUP ..];` or, with a replacement global, `GLOBAL or OTHER: ..`.
#[macro_export]
macro_rules! kernel_fields {
    ($expand:ident) => {
        $expand! {
            both {
                OFF_SOCK_CGROUP: field("sock", "sk_cgrp_data.cgroup") [];
                OFF_CGROUP_KN: field("cgroup", "kn") [CGROUP];
                OFF_KERNFS_ID: field("kernfs_node", "id") [CGROUP];
                OFF_SKC_NET: field("sock_common", "skc_net.net") [LISTENER CHECK];
                OFF_NET_COOKIE: field("net", "net_cookie") [LISTENER CHECK];
            }
            attached {
                /// 16 bits
                OFF_SOCK_PROTOCOL: field("sock", "sk_protocol") [LISTENER];
                OFF_SKC_FAMILY: field("sock_common", "skc_family") [LISTENER];
                /// The local port, host order
                OFF_SKC_NUM: field("sock_common", "skc_num") [LISTENER];
                OFF_SKC_RCV_SADDR: field("sock_common", "skc_rcv_saddr") [LISTENER];
                OFF_SKC_V6_RCV_SADDR: field("sock_common", "skc_v6_rcv_saddr") [];
                OFF_SKC_IPV6ONLY: field("sock_common", "skc_ipv6only") [];
                MASK_SKC_IPV6ONLY: mask("sock_common", "skc_ipv6only") [];

                /// Depth of the cgroup
                OFF_CGROUP_LEVEL: field("cgroup", "level") [CGROUP];
                OFF_TASK_CGROUPS: field("task_struct", "cgroups") [CGROUP];
                OFF_CSS_SET_CGROUP: field("css_set", "dfl_cgrp") [CGROUP];
                OFF_TASK_PID: field("task_struct", "pid") [CGROUP THREAD];
                /// Pointers to the ancestors, one per level (Linux 6.1)
                OFF_CGROUP_ANCESTORS or OFF_CGROUP_ANCESTOR_IDS: field("cgroup", "ancestors") [CGROUP];
                /// Ids of the ancestors, before Linux 6.1
                OFF_CGROUP_ANCESTOR_IDS: field("cgroup", "ancestor_ids") [];

                OFF_TASK_TGID: field("task_struct", "tgid") [EXIT];
                OFF_TASK_FLAGS: field("task_struct", "flags") [];
                OFF_TASK_STATE: field("task_struct", "__state") [];
                /// Queue of the thread's group on its CPU, in any scheduling class (CONFIG_FAIR_GROUP_SCHED)
                OFF_TASK_CFS_RQ: field("task_struct", "se.cfs_rq") [RUN_QUEUE_CLOCK RUN_DELAY];
                /// The CPU's run queue (CONFIG_FAIR_GROUP_SCHED)
                OFF_CFS_RQ_RQ: field("cfs_rq", "rq") [RUN_QUEUE_CLOCK RUN_DELAY];
                OFF_RQ_CLOCK: field("rq", "clock") [RUN_QUEUE_CLOCK RUN_DELAY];
                /// Total wait for CPUs in the thread's life
                OFF_TASK_RUN_DELAY: field("task_struct", "sched_info.run_delay") [RUN_DELAY];
                /// Time at which the thread last got a CPU
                OFF_TASK_LAST_ARRIVAL: field("task_struct", "sched_info.last_arrival") [RUN_DELAY];
                /// Start of the wait at the current run queue
                OFF_TASK_LAST_QUEUED: field("task_struct", "sched_info.last_queued") [RUN_DELAY];
                OFF_TASK_EXIT_CODE: field("task_struct", "exit_code") [EXIT];
                OFF_TASK_LEADER: field("task_struct", "group_leader") [EXIT];
                OFF_TASK_SIGNAL: field("task_struct", "signal") [EXIT];
                OFF_TASK_START: field("task_struct", "start_time") [EXIT];
                OFF_TASK_THREAD_PID: field("task_struct", "thread_pid") [];
                OFF_TASK_MM: field("task_struct", "mm") [];
                /// Number of threads that have not begun to exit
                OFF_SIGNAL_LIVE: field("signal_struct", "live") [EXIT];
                OFF_SIGNAL_FLAGS: field("signal_struct", "flags") [EXIT];
                OFF_SIGNAL_EXIT_CODE: field("signal_struct", "group_exit_code") [EXIT];
                OFF_PID_LEVEL: field("pid", "level") [];
                OFF_PID_NUMBERS: field("pid", "numbers") [];
                OFF_MM_TOTAL_VM: field("mm_struct", "total_vm") [];
                /// File pages
                OFF_MM_FILE: rss_counter(0) [];
                /// Anonymous pages
                OFF_MM_ANON: rss_counter(1) [];
                /// Shared memory
                OFF_MM_SHMEM: rss_counter(3) [];

                /// 1 for a preemption
                POS_SWITCH_PREEMPT: integer("sched_switch", "preempt", 0) [];
                /// The leaving thread
                POS_SWITCH_PREV: task("sched_switch", "prev", 0) [SWITCH];
                /// The next thread
                POS_SWITCH_NEXT: task("sched_switch", "next", 1) [SWITCH];
                /// State of the leaving thread (Linux 5.18)
                POS_SWITCH_STATE: integer("sched_switch", "prev_state", 1) [];
                /// Also the position in `sched_wakeup_new`
                POS_WAKEUP_TASK: task("sched_wakeup", "p", 0) [WAKEUP];
                POS_FORK_CHILD: task("sched_process_fork", "child", 1) [FORK];
                POS_EXIT_TASK: task("sched_process_exit", "p", 0) [EXIT_TASK];
                /// Pages freed
                POS_MEMCG_RECLAIMED: integer("mm_vmscan_memcg_reclaim_end", "nr_reclaimed", 0) [];
                POS_DIRECT_RECLAIMED: integer("mm_vmscan_direct_reclaim_end", "nr_reclaimed", 0) [];
                /// The victim (Linux 6.9)
                POS_OOM_TASK: task("mark_victim", "task", 0) [];
                /// The victim's pid, before Linux 6.9
                POS_OOM_PID: integer("mark_victim", "pid", 0) [];
            }
            check {
                /// 8 bits
                OFF_SKC_STATE: field("sock_common", "skc_state") [CHECK];
                OFF_SKC_COOKIE: field("sock_common", "skc_cookie.counter") [];
                OFF_SK_SOCKET: field("sock", "sk_socket") [CHECK];
                OFF_ACK_BACKLOG: field("sock", "sk_ack_backlog") [CHECK];
                OFF_MAX_ACK_BACKLOG: field("sock", "sk_max_ack_backlog") [CHECK];
                OFF_REUSEPORT: field("sock", "sk_reuseport_cb") [CHECK];
                /// 16 bits
                OFF_NUM_SOCKS: field("sock_reuseport", "num_socks") [CHECK];
                OFF_SOCKS: field("sock_reuseport", "socks") [CHECK];
                OFF_ACCEPT_HEAD: field("inet_connection_sock", "icsk_accept_queue.rskq_accept_head") [];
                OFF_SENT_ISN: field("tcp_request_sock", "snt_isn") [];
            }
            scheduler {
                OFF_TASK_CGROUPS: field("task_struct", "cgroups") [SCHEDULER];
                OFF_CSS_SET_CGROUP: field("css_set", "dfl_cgrp") [SCHEDULER];
                OFF_CGROUP_LEVEL: field("cgroup", "level") [SCHEDULER];
                /// Pointers to the ancestors, one per level
                OFF_CGROUP_ANCESTORS: field("cgroup", "ancestors") [SCHEDULER];
                OFF_CGROUP_KN: field("cgroup", "kn") [SCHEDULER];
                OFF_KERNFS_ID: field("kernfs_node", "id") [SCHEDULER];
                OFF_TASK_FLAGS: field("task_struct", "flags") [SCHEDULER];
                OFF_TASK_CPUS_PTR: field("task_struct", "cpus_ptr") [SCHEDULER];
                /// Number of CPUs that the thread may run on
                OFF_TASK_CPUS_ALLOWED: field("task_struct", "nr_cpus_allowed") [SCHEDULER];
                OFF_TASK_VTIME: field("task_struct", "scx.dsq_vtime") [SCHEDULER];
                OFF_TASK_SLICE: field("task_struct", "scx.slice") [SCHEDULER];
                /// Flags of the scheduler's core
                OFF_TASK_SCX_FLAGS: field("task_struct", "scx.flags") [SCHEDULER];
                OFF_EXIT_KIND: field("scx_exit_info", "kind") [SCHEDULER];
                OFF_EXIT_REASON: field("scx_exit_info", "reason") [SCHEDULER];
                OFF_EXIT_MESSAGE: field("scx_exit_info", "msg") [SCHEDULER];
            }
        }
    };
}

macro_rules! rows {
    ($($(#[$doc:meta])* $name:ident $(or $other:ident)? : $kind:ident ($($arg:expr),+) [$($group:ident)*];)+) => {
        &[$(KernelField {
            global: stringify!($name),
            or: rows!(@or $($other)?),
            source: $kind($($arg),+),
            groups: 0 $(| group::$group)*,
        }),+]
    };
    (@or) => { None };
    (@or $other:ident) => { Some(stringify!($other)) };
}

macro_rules! tables {
    (both { $($both:tt)+ } attached { $($attached:tt)+ } check { $($check:tt)+ } scheduler { $($scheduler:tt)+ }) => {
        /// Fields that the attached programs read.
        pub const ATTACHED: &[KernelField] = rows! { $($both)+ $($attached)+ };
        /// Fields that `socket_check` reads.
        pub const CHECK: &[KernelField] = rows! { $($both)+ $($check)+ };
        /// Fields that the scheduler reads.
        pub const SCHEDULER: &[KernelField] = rows! { $($scheduler)+ };
    };
}

kernel_fields!(tables);

const _: () = {
    // A global's name stands for one value, so no two rows may share a name.
    let (mut i, all) = (0, ATTACHED);
    while i < all.len() {
        let mut j = i + 1;
        while j < all.len() {
            assert!(!is_same(all[i].global.as_bytes(), all[j].global.as_bytes()));
            j += 1;
        }
        i += 1;
    }
};

const fn is_same(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}
