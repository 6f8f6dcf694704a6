//! The end of processes: of those below the pods' root user space hears, each once, with its exit code or signal.

use aya_ebpf::{bindings::BPF_NOEXIST, macros::btf_tracepoint, programs::BtfTracePointContext};
use beelet_ebpf_abi::{ABSENT, ExitEvent, ExitedKey, kind};

use crate::{
    args::{argument, has},
    containers::{peek, pod_of_uncached},
    events::{header, is_current, send},
    kernel::{
        OFF_PID_LEVEL, OFF_PID_NUMBERS, OFF_SIGNAL_EXIT_CODE, OFF_SIGNAL_FLAGS, OFF_SIGNAL_LIVE,
        OFF_SIGNAL_THREADS, OFF_TASK_EXIT_CODE, OFF_TASK_LEADER, OFF_TASK_PID, OFF_TASK_SIGNAL,
        OFF_TASK_START, OFF_TASK_TGID, OFF_TASK_THREAD_PID, POS_EXIT_GROUP_DEAD, POS_EXIT_TASK,
        cgroup_offsets_known, read,
    },
    maps::EXITED,
    tasks::Task,
};

/// include/linux/sched/signal.h: the whole process ends, by exit_group(2) or a fatal signal.
const SIGNAL_GROUP_EXIT: u32 = 4;
/// `struct upid` is an int and a pointer.
const UPID_BYTES: u64 = 16;
/// include/linux/pid_namespace.h: MAX_PID_NS_LEVEL
const MAX_PID_LEVEL: u32 = 32;

/// A thread ends.
#[btf_tracepoint(function = "sched_process_exit")]
pub(crate) fn task_exited(ctx: BtfTracePointContext) -> i32 {
    if !has(&POS_EXIT_TASK) || OFF_TASK_PID.load() == ABSENT {
        return 0;
    }
    // SAFETY: a task, never null.
    let task = unsafe { Task::new(argument(&ctx, &POS_EXIT_TASK)) };
    task.forget();
    if !exit_offsets_known() || !is_current() {
        return 0;
    }
    let (cgroup, cgroup_id) = task.cgroup();
    if pod_of_uncached(cgroup).is_none() || !is_last(&ctx, task) {
        return 0;
    }
    send(ExitEvent {
        header: header(kind::EXITED, cgroup_id),
        pid: task.field(OFF_TASK_TGID.load()),
        own_pid: own_pid(task),
        status: status(task),
        reserved: 0,
    });
    0
}

#[inline(always)]
fn exit_offsets_known() -> bool {
    cgroup_offsets_known()
        && OFF_TASK_TGID.load() != ABSENT
        && OFF_TASK_SIGNAL.load() != ABSENT
        && OFF_TASK_LEADER.load() != ABSENT
        && OFF_TASK_EXIT_CODE.load() != ABSENT
        && OFF_SIGNAL_FLAGS.load() != ABSENT
        && OFF_SIGNAL_EXIT_CODE.load() != ABSENT
        && (has(&POS_EXIT_GROUP_DEAD)
            || (OFF_SIGNAL_LIVE.load() != ABSENT
                && OFF_SIGNAL_THREADS.load() != ABSENT
                && OFF_TASK_START.load() != ABSENT))
}

/// Whether the process ends with this thread: true for exactly one of its threads.
#[inline(always)]
fn is_last(ctx: &BtfTracePointContext, task: Task) -> bool {
    if has(&POS_EXIT_GROUP_DEAD) {
        return argument(ctx, &POS_EXIT_GROUP_DEAD) & 0xff != 0;
    }
    let signal: *const u8 = task.field(OFF_TASK_SIGNAL.load());
    // SAFETY: a task that ends still has its signal structure; typed kernel pointers.
    let (live, threads): (u32, u32) =
        unsafe { (read(signal, OFF_SIGNAL_LIVE.load()), read(signal, OFF_SIGNAL_THREADS.load())) };
    if live != 0 {
        return false;
    }
    // do_exit counts down before this tracepoint: of two threads that end together, both may find zero here, and the later
    // one that it is alone, if the other is reaped by then.
    let leader: *const u8 = task.field(OFF_TASK_LEADER.load());
    let key = ExitedKey {
        // SAFETY: the leader is there until all threads are gone.
        started_ns: unsafe { read(leader, OFF_TASK_START.load()) },
        pid: task.field(OFF_TASK_TGID.load()),
        reserved: 0,
    };
    if threads <= 1 {
        // SAFETY: nothing is read through the reference.
        return unsafe { EXITED.get(&key) }.is_none();
    }
    EXITED.insert(key, 1_u64, u64::from(BPF_NOEXIST)).is_ok()
}

/// What wait(2) will say (`wait_task_zombie` in kernel/exit.c).
#[inline(always)]
fn status(task: Task) -> u32 {
    let signal: *const u8 = task.field(OFF_TASK_SIGNAL.load());
    // SAFETY: as in `is_last`.
    unsafe {
        if read::<u32>(signal, OFF_SIGNAL_FLAGS.load()) & SIGNAL_GROUP_EXIT != 0 {
            return read(signal, OFF_SIGNAL_EXIT_CODE.load());
        }
        let leader: *const u8 = task.field(OFF_TASK_LEADER.load());
        read(leader, OFF_TASK_EXIT_CODE.load())
    }
}

/// The process's id in its own pid namespace; 0 if this kernel's structures are strange.
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
