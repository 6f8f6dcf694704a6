//! Every field of a kernel structure, and every argument of a tracepoint, that the kernel programs read.
//!
//! Rust emits no CO-RE relocations, so each is a read-only global of an object. The agent sets it from the
//! running kernel's BTF before loading, and the verifier sees it as a constant. [`kernel_fields`] is the only
//! list: both objects make their globals and the checks of a [`group`] from it, and the agent what it looks
//! up. A new field is one row.

/// What programs can't do without. A program whose group is incomplete does nothing, and the agent doesn't
/// attach it.
pub mod group {
    /// Where a socket listens.
    pub const LISTENER: u32 = 1;
    /// Which cgroup and pod a thread belongs to.
    pub const CGROUP: u32 = 1 << 1;
    /// The clock of a CPU's run queue, which the kernel has just read whenever one of the scheduler's hooks
    /// runs.
    pub const RUN_QUEUE_CLOCK: u32 = 1 << 2;
    /// How long each thread waited for CPUs, added up by the kernel on that clock (`CONFIG_SCHED_INFO`).
    pub const RUN_DELAY: u32 = 1 << 3;
    /// How a process ended.
    pub const EXIT: u32 = 1 << 4;
    /// Which thread ends.
    pub const EXIT_TASK: u32 = 1 << 5;
    /// Which thread a hook is about.
    pub const THREAD: u32 = 1 << 6;
    /// Which thread is new.
    pub const FORK: u32 = 1 << 7;
    /// Which thread becomes runnable.
    pub const WAKEUP: u32 = 1 << 8;
    /// Which threads leave a CPU and get it.
    pub const SWITCH: u32 = 1 << 9;
    /// All that the lookup of listeners needs.
    pub const CHECK: u32 = 1 << 10;
    /// All that the scheduler needs.
    pub const SCHEDULER: u32 = 1 << 11;
}

/// The place of a value in this kernel's types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The offset of a member, in bytes: of the byte that holds it, for a bit field.
    Field {
        /// The structure's name.
        structure: &'static str,
        /// The member, through nested structures.
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
        /// What it is.
        shape: Shape,
        /// Where the BTF has no names: its place among those of its shape.
        nth: usize,
    },
}

/// What a tracepoint's argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A pointer to a `task_struct`.
    Task,
    /// A plain integer.
    Integer,
}

/// One row of [`kernel_fields`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelField {
    /// The read-only global that gets the value; without one it keeps [`crate::ABSENT`].
    pub global: &'static str,
    /// The global that serves instead on other kernels.
    pub or: Option<&'static str>,
    /// The place of its value.
    pub source: Source,
    /// The groups it belongs to, each a bit of [`group`].
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

/// Hands all rows to the macro `$expand`: those of both objects, of the attached programs alone, of
/// `socket_check` alone.
///
/// A row is `GLOBAL: source [GROUP ..];` or, with another global that serves instead, `GLOBAL or OTHER: ..`.
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

                /// How deep it is
                OFF_CGROUP_LEVEL: field("cgroup", "level") [CGROUP];
                OFF_TASK_CGROUPS: field("task_struct", "cgroups") [CGROUP];
                OFF_CSS_SET_CGROUP: field("css_set", "dfl_cgrp") [CGROUP];
                OFF_TASK_PID: field("task_struct", "pid") [CGROUP THREAD];
                /// Pointers, one per level (Linux 6.1)
                OFF_CGROUP_ANCESTORS or OFF_CGROUP_ANCESTOR_IDS: field("cgroup", "ancestors") [CGROUP];
                /// Their ids, before
                OFF_CGROUP_ANCESTOR_IDS: field("cgroup", "ancestor_ids") [];

                OFF_TASK_TGID: field("task_struct", "tgid") [EXIT];
                OFF_TASK_FLAGS: field("task_struct", "flags") [];
                OFF_TASK_STATE: field("task_struct", "__state") [];
                /// That of its group on its CPU, whatever schedules it (CONFIG_FAIR_GROUP_SCHED)
                OFF_TASK_CFS_RQ: field("task_struct", "se.cfs_rq") [RUN_QUEUE_CLOCK RUN_DELAY];
                /// The CPU's run queue (CONFIG_FAIR_GROUP_SCHED)
                OFF_CFS_RQ_RQ: field("cfs_rq", "rq") [RUN_QUEUE_CLOCK RUN_DELAY];
                OFF_RQ_CLOCK: field("rq", "clock") [RUN_QUEUE_CLOCK RUN_DELAY];
                /// How long it has waited for CPUs in its life
                OFF_TASK_RUN_DELAY: field("task_struct", "sched_info.run_delay") [RUN_DELAY];
                /// When it last got one
                OFF_TASK_LAST_ARRIVAL: field("task_struct", "sched_info.last_arrival") [RUN_DELAY];
                /// Since when it waits for the one it is queued at
                OFF_TASK_LAST_QUEUED: field("task_struct", "sched_info.last_queued") [RUN_DELAY];
                OFF_TASK_EXIT_CODE: field("task_struct", "exit_code") [EXIT];
                OFF_TASK_LEADER: field("task_struct", "group_leader") [EXIT];
                OFF_TASK_SIGNAL: field("task_struct", "signal") [EXIT];
                OFF_TASK_START: field("task_struct", "start_time") [EXIT];
                OFF_TASK_THREAD_PID: field("task_struct", "thread_pid") [];
                OFF_TASK_MM: field("task_struct", "mm") [];
                /// Threads that have not begun to end
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

                /// 1 if it is a preemption
                POS_SWITCH_PREEMPT: integer("sched_switch", "preempt", 0) [];
                /// The thread that leaves
                POS_SWITCH_PREV: task("sched_switch", "prev", 0) [SWITCH];
                /// The thread that comes
                POS_SWITCH_NEXT: task("sched_switch", "next", 1) [SWITCH];
                /// The state of the thread that leaves (Linux 5.18)
                POS_SWITCH_STATE: integer("sched_switch", "prev_state", 1) [];
                /// Of `sched_wakeup_new`, too
                POS_WAKEUP_TASK: task("sched_wakeup", "p", 0) [WAKEUP];
                POS_FORK_CHILD: task("sched_process_fork", "child", 1) [FORK];
                POS_EXIT_TASK: task("sched_process_exit", "p", 0) [EXIT_TASK];
                /// Pages that it freed
                POS_MEMCG_RECLAIMED: integer("mm_vmscan_memcg_reclaim_end", "nr_reclaimed", 0) [];
                POS_DIRECT_RECLAIMED: integer("mm_vmscan_direct_reclaim_end", "nr_reclaimed", 0) [];
                /// The victim (Linux 6.9)
                POS_OOM_TASK: task("mark_victim", "task", 0) [];
                /// Its number, before
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
                /// Pointers, one per level
                OFF_CGROUP_ANCESTORS: field("cgroup", "ancestors") [SCHEDULER];
                OFF_CGROUP_KN: field("cgroup", "kn") [SCHEDULER];
                OFF_KERNFS_ID: field("kernfs_node", "id") [SCHEDULER];
                OFF_TASK_FLAGS: field("task_struct", "flags") [SCHEDULER];
                OFF_TASK_CPUS_PTR: field("task_struct", "cpus_ptr") [SCHEDULER];
                /// How many CPUs it may run on
                OFF_TASK_CPUS_ALLOWED: field("task_struct", "nr_cpus_allowed") [SCHEDULER];
                OFF_TASK_VTIME: field("task_struct", "scx.dsq_vtime") [SCHEDULER];
                OFF_TASK_SLICE: field("task_struct", "scx.slice") [SCHEDULER];
                /// What the scheduler's core knows of it
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
        /// What the attached programs read.
        pub const ATTACHED: &[KernelField] = rows! { $($both)+ $($attached)+ };
        /// What `socket_check` reads.
        pub const CHECK: &[KernelField] = rows! { $($both)+ $($check)+ };
        /// What the scheduler reads.
        pub const SCHEDULER: &[KernelField] = rows! { $($scheduler)+ };
    };
}

kernel_fields!(tables);

const _: () = {
    // A global's name stands for one value: nothing is set twice.
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
