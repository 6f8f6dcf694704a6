//! Exits: the end of each process below the pods' root is sent to user space once, with its exit code or
//! signal.
//!
//! `sched_process_exit` sends the event. An exit that it missed is sent when the scheduler switches away from
//! the thread for the last time: newer kernels (7.3, not yet 6.18) preempt programs on most tracepoints, and
//! skip the run of a program whose last run on the same CPU is not over (`recursion_misses`). Programs on the
//! scheduler's own tracepoint can't be preempted.

use aya_ebpf::{bindings::BPF_NOEXIST, macros::btf_tracepoint, programs::BtfTracePointContext};
use beelet_ebpf_abi::{ABSENT, ExitEvent, ExitedKey, fields::group, kind};

use crate::{
    args::argument,
    containers::{peek, pod_of_uncached},
    events::{header, is_current, send},
    kernel::{
        OFF_PID_LEVEL, OFF_PID_NUMBERS, OFF_SIGNAL_EXIT_CODE, OFF_SIGNAL_FLAGS, OFF_SIGNAL_LIVE,
        OFF_TASK_EXIT_CODE, OFF_TASK_LEADER, OFF_TASK_SIGNAL, OFF_TASK_START, OFF_TASK_TGID,
        OFF_TASK_THREAD_PID, POS_EXIT_TASK, known, read,
    },
    maps::EXITED,
    tasks::Task,
};

/// include/linux/sched/signal.h: exit_group(2) or a fatal signal ends the whole process.
const SIGNAL_GROUP_EXIT: u32 = 4;
/// `struct upid` is an int and a pointer.
const UPID_BYTES: u64 = 16;
/// include/linux/pid_namespace.h: MAX_PID_NS_LEVEL
const MAX_PID_LEVEL: u32 = 32;

/// Handles the end of a thread.
#[btf_tracepoint(function = "sched_process_exit")]
pub(crate) fn task_exited(ctx: BtfTracePointContext) -> i32 {
    if !known::<{ group::EXIT_TASK | group::THREAD }>() {
        return 0;
    }
    // SAFETY: a task, never null.
    let task = unsafe { Task::new(argument(&ctx, &POS_EXIT_TASK)) };
    task.forget();
    if !known::<{ group::CGROUP }>() || !is_current() {
        return 0;
    }
    let (cgroup, cgroup_id) = task.cgroup();
    if !pod_of_uncached(cgroup).is_none() {
        thread_ended(task, cgroup_id);
    }
    0
}

/// Handles the end of a pod's thread. do_exit decrements `live` before the tracepoint, so several threads
/// that end together may each read zero.
#[inline(always)]
pub(crate) fn thread_ended(task: Task, cgroup_id: u64) {
    if !known::<{ group::EXIT }>() {
        return;
    }
    let signal: *const u8 = task.field(OFF_TASK_SIGNAL.load());
    // SAFETY: a thread has its signal structure until it is freed; a typed kernel pointer.
    if unsafe { read::<u32>(signal, OFF_SIGNAL_LIVE.load()) } == 0 {
        send_once(task, cgroup_id);
    }
}

/// Sends the end of the thread's process, once.
#[inline(always)]
fn send_once(task: Task, cgroup_id: u64) {
    let signal: u64 = task.field(OFF_TASK_SIGNAL.load());
    let leader: *const u8 = task.field(OFF_TASK_LEADER.load());
    // SAFETY: a typed kernel pointer. Another thread's last switch may come after the leader was freed and
    // its memory reused: then an earlier thread has already sent the process's end.
    let (started_ns, of_leader): (u64, u64) =
        unsafe { (read(leader, OFF_TASK_START.load()), read(leader, OFF_TASK_SIGNAL.load())) };
    let key = ExitedKey { started_ns, pid: task.field(OFF_TASK_TGID.load()), reserved: 0 };
    // Lookup before insertion, because an insertion into a full map evicts another entry first.
    // SAFETY: nothing is read through the reference.
    if of_leader != signal || unsafe { EXITED.get(&key) }.is_some() {
        return;
    }
    // Two threads may get here at the same time.
    if EXITED.insert(key, 1_u64, u64::from(BPF_NOEXIST)).is_ok() {
        send(ExitEvent {
            header: header(kind::EXITED, cgroup_id),
            pid: key.pid,
            own_pid: own_pid(task),
            status: status(task),
            reserved: 0,
        });
    }
}

/// Returns the status that wait(2) will report (`wait_task_zombie` in kernel/exit.c).
#[inline(always)]
fn status(task: Task) -> u32 {
    let signal: *const u8 = task.field(OFF_TASK_SIGNAL.load());
    // SAFETY: as in `thread_ended`, and `send_once` has checked that the leader exists.
    unsafe {
        if read::<u32>(signal, OFF_SIGNAL_FLAGS.load()) & SIGNAL_GROUP_EXIT != 0 {
            return read(signal, OFF_SIGNAL_EXIT_CODE.load());
        }
        let leader: *const u8 = task.field(OFF_TASK_LEADER.load());
        read(leader, OFF_TASK_EXIT_CODE.load())
    }
}

/// Returns the process's id in its own pid namespace; 0 if this kernel's structures are unknown.
#[inline(always)]
fn own_pid(task: Task) -> u32 {
    if OFF_TASK_THREAD_PID.load() == ABSENT
        || OFF_PID_LEVEL.load() == ABSENT
        || OFF_PID_NUMBERS.load() == ABSENT
    {
        return 0;
    }
    let leader: u64 = task.field(OFF_TASK_LEADER.load());
    let pid: u64 = peek(leader + u64::from(OFF_TASK_THREAD_PID.load()));
    if pid == 0 {
        return 0;
    }
    let level: u32 = peek(pid + u64::from(OFF_PID_LEVEL.load()));
    if level > MAX_PID_LEVEL {
        return 0;
    }
    peek(pid + u64::from(OFF_PID_NUMBERS.load()) + UPID_BYTES * u64::from(level))
}
