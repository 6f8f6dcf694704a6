//! Threads: a thread's cgroup, and its wait state.
//!
//! A thread's state is made at its fork (for earlier threads, by one walk), and only looked up afterwards:
//! the scheduler's hooks run under the run-queue lock, where allocation is forbidden. From Linux 6.4 on the
//! state is in task storage. On earlier kernels task storage can deadlock there, and the state is in a
//! preallocated hash.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::{bpf_ktime_get_ns, generated::bpf_task_storage_get},
    macros::btf_tracepoint,
    programs::BtfTracePointContext,
};
use beelet_ebpf_abi::{ABSENT, TaskKey, TaskState, fields::group};

use crate::{
    args::argument,
    events::dropped,
    kernel::{
        OFF_CFS_RQ_RQ, OFF_CGROUP_KN, OFF_CSS_SET_CGROUP, OFF_KERNFS_ID, OFF_RQ_CLOCK, OFF_TASK_CFS_RQ,
        OFF_TASK_CGROUPS, OFF_TASK_FLAGS, OFF_TASK_LAST_ARRIVAL, OFF_TASK_LAST_QUEUED, OFF_TASK_PID,
        OFF_TASK_RUN_DELAY, POS_FORK_CHILD, USE_TASK_STORAGE, known, read,
    },
    maps::{TASK_STORAGE, TASKS},
};

/// include/uapi/linux/bpf.h
const BPF_LOCAL_STORAGE_GET_F_CREATE: u64 = 1;
/// include/linux/sched.h
const PF_EXITING: u32 = 4;

/// A `struct task_struct *` that the verifier tracks as such.
#[derive(Clone, Copy)]
pub(crate) struct Task(*const u8);

/// The kernel's record of a thread's waits, in nanoseconds on the run queue's clock.
pub(crate) struct Waits {
    /// Wait at the thread's current run queue. A thread that was moved there had also waited elsewhere.
    pub(crate) here: u64,
    /// All waits in the thread's life.
    pub(crate) all: u64,
    /// Time at which the thread last got a CPU.
    pub(crate) arrived: u64,
}

impl Task {
    /// # Safety
    /// `pointer` is not null, and the verifier tracks it as a pointer to a `task_struct`.
    #[inline(always)]
    pub(crate) const unsafe fn new(pointer: u64) -> Self {
        Self(pointer as *const u8)
    }

    #[inline(always)]
    pub(crate) fn address(self) -> u64 {
        self.0 as u64
    }

    /// Reads a field.
    #[inline(always)]
    pub(crate) fn field<T: Copy>(self, offset: u32) -> T {
        // SAFETY: `Task::new` requires a typed kernel pointer: see `read`.
        unsafe { read(self.0, offset) }
    }

    #[inline(always)]
    pub(crate) fn pid(self) -> u32 {
        self.field(OFF_TASK_PID.load())
    }

    /// Returns the thread's cgroup in cgroup2 (the address), and that cgroup's id.
    #[inline(always)]
    pub(crate) fn cgroup(self) -> (u64, u64) {
        let set: *const u8 = self.field(OFF_TASK_CGROUPS.load());
        // SAFETY: every task has a css_set, every css_set a default cgroup, every cgroup its node; typed
        // kernel pointers, and a null one would read as zero.
        unsafe {
            let cgroup: *const u8 = read(set, OFF_CSS_SET_CGROUP.load());
            let node: *const u8 = read(cgroup, OFF_CGROUP_KN.load());
            (cgroup as u64, read(node, OFF_KERNFS_ID.load()))
        }
    }

    /// Returns the time on the clock of the thread's run queue, in nanoseconds. The kernel reads that clock
    /// right before each of the scheduler's hooks, under the lock that is still held (`update_rq_clock` in
    /// kernel/sched/core.c), and also measures waits with it (`sched_info`). Another reading would cost more
    /// than the rest of a wake-up (decisions/0013).
    #[inline(always)]
    pub(crate) fn run_queue_clock(self) -> u64 {
        if !known::<{ group::RUN_QUEUE_CLOCK }>() {
            // SAFETY: takes nothing.
            return unsafe { bpf_ktime_get_ns() };
        }
        let group: *const u8 = self.field(OFF_TASK_CFS_RQ.load());
        // SAFETY: every thread has a cfs_rq, and every cfs_rq its run queue; typed kernel pointers, and a
        // null one would read as zero.
        unsafe {
            let queue: *const u8 = read(group, OFF_CFS_RQ_RQ.load());
            read(queue, OFF_RQ_CLOCK.load())
        }
    }

    /// Returns the kernel's measure of the thread's wait for the CPU that it gets at `now`
    /// (`sched_info_arrive` in kernel/sched/stats.h, which runs after the hook).
    #[inline(always)]
    pub(crate) fn waits(self, now: u64) -> Waits {
        let queued: u64 = self.field(OFF_TASK_LAST_QUEUED.load());
        let here = if queued == 0 { 0 } else { now.saturating_sub(queued) };
        let before: u64 = self.field(OFF_TASK_RUN_DELAY.load());
        Waits { here, all: before + here, arrived: self.field(OFF_TASK_LAST_ARRIVAL.load()) }
    }

    /// Returns the thread's state, if it has one.
    #[inline(always)]
    pub(crate) fn state(self) -> Option<*mut TaskState> {
        self.find(0)
    }

    /// Returns the thread's state, and makes it if `task_forked` missed the thread: newer kernels can preempt
    /// that program (see exits.rs), and on them task storage may be made under the run-queue lock.
    #[inline(always)]
    pub(crate) fn state_or_new(self) -> Option<*mut TaskState> {
        self.find(BPF_LOCAL_STORAGE_GET_F_CREATE)
    }

    #[inline(always)]
    fn find(self, flags: u64) -> Option<*mut TaskState> {
        if USE_TASK_STORAGE.load() == 0 {
            return TASKS.get_ptr_mut(TaskKey { pid: self.pid() });
        }
        let state = self.storage(flags);
        if state.is_null() { None } else { Some(state) }
    }

    #[inline(always)]
    fn storage(self, flags: u64) -> *mut TaskState {
        // SAFETY: a map of that type, a typed task, and no initial value: the kernel starts with zeros.
        unsafe {
            bpf_task_storage_get(
                (&raw const TASK_STORAGE).cast_mut().cast::<c_void>(),
                self.0.cast_mut().cast(),
                core::ptr::null_mut(),
                flags,
            )
        }
        .cast()
    }

    /// Makes the thread's state. Replaces an existing hash entry, which belongs to an earlier thread with the
    /// same number, unless `flags` forbid it.
    #[inline(always)]
    fn follow(self, flags: u32) {
        let made = if USE_TASK_STORAGE.load() == 0 {
            let key = TaskKey { pid: self.pid() };
            let made = TASKS.insert(key, &FRESH, u64::from(flags)).is_ok();
            if made && let Some(state) = TASKS.get_ptr_mut(key) {
                // SAFETY: a live element; only this thread's own hooks write it, and each whole words.
                unsafe { (*state).task = self.address() };
            }
            made
        } else {
            !self.storage(BPF_LOCAL_STORAGE_GET_F_CREATE).is_null()
        };
        if !made && flags == BPF_ANY {
            dropped(|drops| &raw mut drops.tasks_full);
        }
    }

    /// Removes the thread's state from the hash; the kernel itself frees task storage with the thread.
    #[inline(always)]
    pub(crate) fn forget(self) {
        if USE_TASK_STORAGE.load() == 0 {
            let _ = TASKS.remove(TaskKey { pid: self.pid() });
        }
    }
}

/// Initial state of a thread. Static instead of on the stack, for which the compiler would call `memset`:
/// before Linux 6.8 a program may not call functions without a return value.
static FRESH: TaskState =
    TaskState { runnable_since_ns: 0, arrived_ns: 0, waited_ns: 0, reclaiming_since_ns: 0, task: 0 };

/// Follows every new thread of the machine before its first run.
#[btf_tracepoint(function = "sched_process_fork")]
pub(crate) fn task_forked(ctx: BtfTracePointContext) -> i32 {
    if !known::<{ group::THREAD }>() {
        return 0;
    }
    let child = argument(&ctx, &POS_FORK_CHILD);
    if child != 0 {
        // SAFETY: the tracepoint's child is a task, never null.
        unsafe { Task::new(child) }.follow(BPF_ANY);
    }
    0
}

/// `struct bpf_iter__task`
#[repr(C)]
pub(crate) struct TaskWalk {
    meta: u64,
    task: u64,
}

/// Follows every thread that exists when the programs are loaded; run once by the agent.
///
/// # Safety
/// Called by the kernel with its own context.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task")]
pub(crate) unsafe fn task_walk(ctx: *const TaskWalk) -> u32 {
    // SAFETY: the context's second word; the verifier checks the access.
    let pointer = unsafe { core::ptr::read_volatile(&raw const (*ctx).task) };
    if pointer == 0 || !known::<{ group::THREAD }>() {
        return 0;
    }
    // SAFETY: not null, and typed by the kernel.
    let task = unsafe { Task::new(pointer) };
    task.follow(BPF_NOEXIST);
    // A thread that passed `task_exited` before the insertion already has this flag.
    if OFF_TASK_FLAGS.load() != ABSENT && task.field::<u32>(OFF_TASK_FLAGS.load()) & PF_EXITING != 0 {
        task.forget();
    }
    0
}
