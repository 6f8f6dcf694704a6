//! Reading kernel structures whose layout differs from kernel to kernel.
//!
//! Rust emits no CO-RE relocations, so each offset is a read-only global that the agent sets from the running kernel's
//! BTF before loading (`agent/bpf/src/offsets.rs` has the same names). The verifier sees them as constants and checks
//! every read against the kernel's own types. [`ABSENT`] means that this kernel has no such field.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};

use aya_ebpf::Global;
use beelet_ebpf_abi::{ABSENT, Address, FAMILY_IPV4, FAMILY_IPV6};

/// Which argument of a tracepoint something is, or where a field lies.
pub(crate) type Position = Global<u32>;

macro_rules! offsets {
    ($($(#[$doc:meta])* $name:ident;)+) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub(crate) static $name: Global<u32> = Global::new(ABSENT);
    )+};
}

offsets! {
    /// `sock.sk_cgrp_data.cgroup`
    OFF_SOCK_CGROUP;
    /// `sock.sk_protocol`, 16 bits
    OFF_SOCK_PROTOCOL;
    /// `cgroup.kn`
    OFF_CGROUP_KN;
    /// `kernfs_node.id`
    OFF_KERNFS_ID;
    /// `sock_common.skc_net.net`
    OFF_SKC_NET;
    /// `net.net_cookie`
    OFF_NET_COOKIE;
    /// `sock_common.skc_family`
    OFF_SKC_FAMILY;
    /// `sock_common.skc_num`: the local port, host order
    OFF_SKC_NUM;
    /// `sock_common.skc_rcv_saddr`
    OFF_SKC_RCV_SADDR;
    /// `sock_common.skc_v6_rcv_saddr`
    OFF_SKC_V6_RCV_SADDR;
    /// The byte that holds `sock_common.skc_ipv6only`
    OFF_SKC_IPV6ONLY;
    /// The bit of that byte
    MASK_SKC_IPV6ONLY;

    /// `cgroup.level`: how deep it is
    OFF_CGROUP_LEVEL;
    /// `cgroup.ancestors`: pointers, one a level (Linux 6.1)
    OFF_CGROUP_ANCESTORS;
    /// `cgroup.ancestor_ids`: the same before
    OFF_CGROUP_ANCESTOR_IDS;
    /// `task_struct.cgroups`
    OFF_TASK_CGROUPS;
    /// `css_set.dfl_cgrp`
    OFF_CSS_SET_CGROUP;

    /// `task_struct.pid`
    OFF_TASK_PID;
    /// `task_struct.tgid`
    OFF_TASK_TGID;
    /// `task_struct.flags`
    OFF_TASK_FLAGS;
    /// `task_struct.__state`
    OFF_TASK_STATE;
    /// `task_struct.se.cfs_rq`: that of its group on its CPU, whatever schedules it (CONFIG_FAIR_GROUP_SCHED)
    OFF_TASK_CFS_RQ;
    /// `cfs_rq.rq`: the CPU's run queue (CONFIG_FAIR_GROUP_SCHED)
    OFF_CFS_RQ_RQ;
    /// `rq.clock`
    OFF_RQ_CLOCK;
    /// `task_struct.sched_info.run_delay`: how long it has waited for CPUs in its life
    OFF_TASK_RUN_DELAY;
    /// `task_struct.sched_info.last_arrival`: when it last got one
    OFF_TASK_LAST_ARRIVAL;
    /// `task_struct.sched_info.last_queued`: since when it waits for the one it is queued at
    OFF_TASK_LAST_QUEUED;
    /// `task_struct.exit_code`
    OFF_TASK_EXIT_CODE;
    /// `task_struct.group_leader`
    OFF_TASK_LEADER;
    /// `task_struct.signal`
    OFF_TASK_SIGNAL;
    /// `task_struct.start_time`
    OFF_TASK_START;
    /// `task_struct.thread_pid`
    OFF_TASK_THREAD_PID;
    /// `task_struct.mm`
    OFF_TASK_MM;
    /// `signal_struct.live`: threads that have not begun to end
    OFF_SIGNAL_LIVE;
    /// `signal_struct.flags`
    OFF_SIGNAL_FLAGS;
    /// `signal_struct.group_exit_code`
    OFF_SIGNAL_EXIT_CODE;
    /// `pid.level`
    OFF_PID_LEVEL;
    /// `pid.numbers`
    OFF_PID_NUMBERS;
    /// `mm_struct.total_vm`
    OFF_MM_TOTAL_VM;
    /// The counter of file pages in `mm_struct.rss_stat`
    OFF_MM_FILE;
    /// The counter of anonymous pages
    OFF_MM_ANON;
    /// The counter of shared memory
    OFF_MM_SHMEM;

    /// `sched_switch`: whether it is a preemption
    POS_SWITCH_PREEMPT;
    /// `sched_switch`: who leaves
    POS_SWITCH_PREV;
    /// `sched_switch`: who comes
    POS_SWITCH_NEXT;
    /// `sched_switch`: the state of who leaves (Linux 5.18)
    POS_SWITCH_STATE;
    /// `sched_wakeup` and `sched_wakeup_new`: who
    POS_WAKEUP_TASK;
    /// `sched_process_fork`: the child
    POS_FORK_CHILD;
    /// `sched_process_exit`: who
    POS_EXIT_TASK;
    /// `mark_victim`: the victim (Linux 6.9)
    POS_OOM_TASK;
    /// `mark_victim`: its number, before
    POS_OOM_PID;
}

/// 1: threads have task storage; 0: the hash `TASKS`.
#[unsafe(no_mangle)]
pub(crate) static USE_TASK_STORAGE: Global<u32> = Global::new(0);

/// Which instance of the programs this is: see [`beelet_ebpf_abi::Meta::instance`].
#[unsafe(no_mangle)]
pub(crate) static INSTANCE: Global<u32> = Global::new(0);

/// Whether the agent resolved what it takes to say which cgroup and pod a thread belongs to.
#[inline(always)]
pub(crate) fn cgroup_offsets_known() -> bool {
    OFF_TASK_PID.load() != ABSENT
        && OFF_TASK_CGROUPS.load() != ABSENT
        && OFF_CSS_SET_CGROUP.load() != ABSENT
        && OFF_CGROUP_KN.load() != ABSENT
        && OFF_KERNFS_ID.load() != ABSENT
        && OFF_CGROUP_LEVEL.load() != ABSENT
        && (OFF_CGROUP_ANCESTORS.load() != ABSENT || OFF_CGROUP_ANCESTOR_IDS.load() != ABSENT)
}

/// Whether the kernel has a clock in each run queue, which it has just read whenever one of the scheduler's hooks runs.
#[inline(always)]
pub(crate) fn run_queue_clock_known() -> bool {
    OFF_TASK_CFS_RQ.load() != ABSENT && OFF_CFS_RQ_RQ.load() != ABSENT && OFF_RQ_CLOCK.load() != ABSENT
}

/// Whether the kernel itself adds up how long each thread waits (`CONFIG_SCHED_INFO`), on that clock.
#[inline(always)]
pub(crate) fn kernel_counts_waits() -> bool {
    run_queue_clock_known()
        && OFF_TASK_RUN_DELAY.load() != ABSENT
        && OFF_TASK_LAST_ARRIVAL.load() != ABSENT
        && OFF_TASK_LAST_QUEUED.load() != ABSENT
}

/// Whether the agent resolved what no listener program can do without. The verifier drops everything behind it
/// otherwise, so that the object loads, idle, under any loader.
#[inline(always)]
pub(crate) fn socket_offsets_known() -> bool {
    OFF_SOCK_PROTOCOL.load() != ABSENT
        && OFF_SKC_NET.load() != ABSENT
        && OFF_NET_COOKIE.load() != ABSENT
        && OFF_SKC_FAMILY.load() != ABSENT
        && OFF_SKC_NUM.load() != ABSENT
        && OFF_SKC_RCV_SADDR.load() != ABSENT
}

/// A `struct sock *` or `struct tcp_sock *` that the verifier knows as such.
#[derive(Clone, Copy)]
pub(crate) struct Sock(*const u8);

impl Sock {
    /// # Safety
    /// `pointer` is not null, and the verifier tracks it as a pointer to a kernel `sock` (or a type that begins with one).
    #[inline(always)]
    pub(crate) const unsafe fn new(pointer: *const u8) -> Self {
        Self(pointer)
    }

    /// Reads a field of the socket.
    #[inline(always)]
    fn field<T: Copy>(self, offset: u32) -> T {
        // SAFETY: `Sock::new` says that this is a typed kernel pointer; reads through one are checked against the type
        // when the program is loaded and a fault reads as zero (Documentation/bpf/btf.rst, "BTF_KIND_STRUCT" pointers).
        unsafe { read(self.0, offset) }
    }

    /// The IP protocol number, so that MPTCP, SCTP and DCCP (which share TCP's states) can be told apart.
    #[inline(always)]
    pub(crate) fn protocol(self) -> u16 {
        self.field(OFF_SOCK_PROTOCOL.load())
    }

    /// The cgroup2 id of the socket's cgroup, or 0.
    #[inline(always)]
    pub(crate) fn cgroup_id(self) -> u64 {
        let (cgroup, kn, id) = (OFF_SOCK_CGROUP.load(), OFF_CGROUP_KN.load(), OFF_KERNFS_ID.load());
        if cgroup == ABSENT || kn == ABSENT || id == ABSENT {
            return 0;
        }
        let cgroup: *const u8 = self.field(cgroup);
        if cgroup.is_null() {
            return 0;
        }
        // SAFETY: typed kernel pointers, as in `field`; a null `kn` would read as zero.
        unsafe {
            let node: *const u8 = read(cgroup, kn);
            read(node, id)
        }
    }

    /// Where the socket is bound. The port is 0 while the kernel hasn't chosen one.
    #[inline(always)]
    pub(crate) fn address(self) -> Option<Address> {
        let net: *const u8 = self.field(OFF_SKC_NET.load());
        // SAFETY: every socket has its network namespace; a typed kernel pointer, as in `field`.
        let netns_cookie = unsafe { read(net, OFF_NET_COOKIE.load()) };
        let mut found = Address {
            netns_cookie,
            address: [0; 16],
            port: self.field(OFF_SKC_NUM.load()),
            family: self.field(OFF_SKC_FAMILY.load()),
            dual_stack: 0,
        };
        if found.family == FAMILY_IPV4 {
            let address: u32 = self.field(OFF_SKC_RCV_SADDR.load());
            set_word(&mut found.address, 0, address);
            return Some(found);
        }
        if found.family != FAMILY_IPV6 || OFF_SKC_V6_RCV_SADDR.load() == ABSENT {
            return None;
        }
        set_word(&mut found.address, 0, self.field(OFF_SKC_V6_RCV_SADDR.load()));
        set_word(&mut found.address, 1, self.field(OFF_SKC_V6_RCV_SADDR.load() + 4));
        set_word(&mut found.address, 2, self.field(OFF_SKC_V6_RCV_SADDR.load() + 8));
        set_word(&mut found.address, 3, self.field(OFF_SKC_V6_RCV_SADDR.load() + 12));
        if OFF_SKC_IPV6ONLY.load() != ABSENT {
            let flags: u8 = self.field(OFF_SKC_IPV6ONLY.load());
            found.dual_stack = u32::from(u32::from(flags) & MASK_SKC_IPV6ONLY.load() == 0);
        }
        Some(found)
    }
}

/// Writes the `index`th 32-bit word (already in network order) of an address.
#[inline(always)]
fn set_word(address: &mut [u8; 16], index: usize, word: u32) {
    // SAFETY: `index` is 0 to 3, and the array is at offset 8 of a type aligned to 8.
    unsafe { address.as_mut_ptr().cast::<u32>().add(index).write(word) };
}

/// # Safety
/// `base` is a typed kernel pointer and `offset` a constant to the verifier, within that type.
#[inline(always)]
pub(crate) unsafe fn read<T: Copy>(base: *const u8, offset: u32) -> T {
    // Volatile: the compiler may neither merge reads (the verifier wants them field by field) nor repeat them.
    // SAFETY: the verifier checks the access against the kernel's type, or refuses the program.
    unsafe { core::ptr::read_volatile(base.add(offset as usize).cast::<T>()) }
}

/// Adds `value` (two's complement, so it can subtract) to a map value that other CPUs change too.
///
/// # Safety
/// `pointer` points into a live map value and is aligned to 8.
#[inline(always)]
pub(crate) unsafe fn atomic_add(pointer: *mut u64, value: u64) {
    // SAFETY: the caller's.
    unsafe {
        atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(pointer, value);
    }
}

/// Reads a word of a map value that other CPUs change.
#[inline(always)]
pub(crate) fn load(word: &u64) -> u64 {
    // SAFETY: a reference is aligned and to something that lives.
    unsafe { core::ptr::read_volatile(word) }
}

/// Puts `new` into a word of a map value that other CPUs change, if `old` is there. What was there.
#[inline(always)]
pub(crate) fn exchange(word: &mut u64, old: u64, new: u64) -> u64 {
    // SAFETY: a reference is aligned and to something that lives.
    unsafe { atomic_cxchg::<u64, { AtomicOrdering::Relaxed }, { AtomicOrdering::Relaxed }>(word, old, new) }.0
}
