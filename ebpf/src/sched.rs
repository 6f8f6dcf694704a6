//! Time on the CPU, time waiting for it, and preemptions by their cause: every event of each cgroup below the
//! pods' root.
//!
//! These hooks run some hundred thousand times per second under the run-queue lock, with interrupts off, so
//! no other code runs in between on the same CPU: plain adds to per-CPU values are enough. A thread's run and
//! wait time is added when the thread leaves the CPU, with one lookup; user space adds the unfinished run
//! (`RUNNING`). All times are on the run queue's own clock: reading another one would be a third of the cost.

use aya_ebpf::{helpers::bpf_ktime_get_ns, macros::btf_tracepoint, programs::BtfTracePointContext};
use beelet_ebpf_abi::{
    ABSENT, Counters, FIRST_BUCKET_BITS, PRESSURE_FLOOR_NS, Running, TaskState, WAIT_BUCKETS, fields::group,
    pressure,
};

use crate::{
    args::{argument, has},
    containers::{Pod, counters, pod_of_cached},
    events::is_current,
    exits::thread_ended,
    holders::{begin_stretch, waited_for},
    kernel::{
        OFF_TASK_STATE, POS_SWITCH_NEXT, POS_SWITCH_PREEMPT, POS_SWITCH_PREV, POS_SWITCH_STATE,
        POS_WAKEUP_TASK, known,
    },
    maps::RUNNING,
    pressure::waited,
    tasks::Task,
};

/// include/linux/sched.h
const TASK_RUNNING: u32 = 0;
/// include/linux/sched.h: the thread will never run again.
const TASK_DEAD: u32 = 0x80;
/// Period of comparing a CPU's run-queue clock with `CLOCK_MONOTONIC`: NTP moves them apart by at most half a
/// millisecond in that time.
const COMPARE_NS: u64 = 1_000_000_000;
/// Not a state of the kernel.
const UNKNOWN: u32 = u32::MAX;

/// Accounts a switch of threads on this CPU.
#[btf_tracepoint(function = "sched_switch")]
pub(crate) fn sched_switch(ctx: BtfTracePointContext) -> i32 {
    if !known::<{ group::CGROUP | group::SWITCH }>() || !is_current() {
        return 0;
    }
    let Some(cpu) = RUNNING.get_ptr_mut(0) else { return 0 };
    // SAFETY: this CPU's live element, and no other code runs in between.
    let cpu = unsafe { &mut *cpu };
    // SAFETY: both are tasks, never null.
    let (previous, next) =
        unsafe { (Task::new(argument(&ctx, &POS_SWITCH_PREV)), Task::new(argument(&ctx, &POS_SWITCH_NEXT))) };
    let now = previous.run_queue_clock();
    compare_clocks(cpu, now);
    let (cgroup, cgroup_id) = next.cgroup();
    let pod = pod_of_cached(cgroup, cgroup_id);
    let state = state_of(&ctx, previous);
    let runnable = state == TASK_RUNNING;
    if cpu.cgroup_id != 0 {
        account(cpu, now, runnable, pod);
        if state == TASK_DEAD {
            thread_ended(previous, cpu.cgroup_id);
        }
    }
    if !known::<{ group::RUN_DELAY }>()
        && runnable
        && previous.pid() != 0
        && let Some(state) = previous.state()
    {
        // SAFETY: a live element; only this thread's own hooks write it, one at a time.
        unsafe { (*state).runnable_since_ns = now };
    }
    let wait = if pod.is_none() { None } else { waited_ns(next, now) };
    if let Some(wait) = wait
        && wait.all >= PRESSURE_FLOOR_NS
    {
        waited_for(cgroup_id, wait.all, wait.here, now);
        let now = now.wrapping_add(cpu.ahead_ns);
        waited::<{ pressure::RUN_QUEUE as usize }>(cgroup_id, pod.qos, wait.all, now);
    }
    begin_stretch(cpu, next, cgroup_id, now);
    cpu.since_ns = now;
    cpu.cgroup_id = if pod.is_none() { 0 } else { cgroup_id };
    cpu.pod_id = pod.id;
    cpu.qos = pod.qos;
    cpu.wait_ns = wait.map_or(0, |wait| wait.all);
    cpu.waited = u32::from(wait.is_some());
    0
}

/// A thread's wait for the CPU that it gets, in nanoseconds.
#[derive(Clone, Copy)]
struct Wait {
    all: u64,
    /// Part of the wait at this CPU, up to now.
    here: u64,
}

/// Measures, once per period, how far `CLOCK_MONOTONIC` is ahead of this CPU's run-queue clock.
#[inline(always)]
fn compare_clocks(cpu: &mut Running, now: u64) {
    if now.wrapping_sub(cpu.compared_ns) >= COMPARE_NS {
        // SAFETY: takes nothing.
        cpu.ahead_ns = unsafe { bpf_ktime_get_ns() }.wrapping_sub(now);
        cpu.compared_ns = now;
    }
}

/// Returns the wait of a thread that gets the CPU now; `None` if the wait's beginning was not seen.
#[inline(always)]
fn waited_ns(next: Task, now: u64) -> Option<Wait> {
    if known::<{ group::RUN_DELAY }>() { Some(by_run_delay(next, now)) } else { by_wakeup(next, now) }
}

/// Returns the wait by the kernel's sum of each thread's waits in its life (`run_delay`). The growth of the
/// sum since the thread last got a CPU is this wait, even if the thread was moved in between.
#[inline(always)]
fn by_run_delay(next: Task, now: u64) -> Wait {
    let waits = next.waits(now);
    // The thread is new to the pods, or its fork was missed, as may happen on newer kernels (see exits.rs);
    // task storage may be made here.
    let state = next.state_or_new();
    let Some(state) = state else { return Wait { all: waits.here, here: waits.here } };
    // SAFETY: a live element; only this thread's own hooks write it, one at a time.
    let state = unsafe { &mut *state };
    let all = if state.arrived_ns == waits.arrived {
        waits.all.saturating_sub(state.waited_ns)
    } else {
        waits.here
    };
    state.arrived_ns = now;
    state.waited_ns = waits.all;
    Wait { all, here: waits.here }
}

/// Returns the wait since the thread's last wake-up or preemption, so the state is always of the current
/// wait. The length is zero if the wake-up caused the switch: then the kernel skips reading its clock again
/// (`rq_clock_skip_update`).
#[inline(always)]
fn by_wakeup(next: Task, now: u64) -> Option<Wait> {
    // SAFETY: a live element; only this thread's own hooks write it, one at a time.
    let since = unsafe { (*next.state()?).runnable_since_ns };
    // If the thread was moved in between, the beginning of its wait here is unknown.
    if since != 0 && now >= since { Some(Wait { all: now - since, here: now - since }) } else { None }
}

/// Adds the run and wait time of the leaving thread. `next` is the pod of the next thread.
#[inline(always)]
fn account(cpu: &Running, now: u64, preempted: bool, next: Pod) {
    let Some(found) = counters(cpu.cgroup_id) else { return };
    // SAFETY: this CPU's live element, and no other writer of these fields runs in between.
    let found: &mut Counters = unsafe { &mut *found };
    found.on_cpu_ns += now.saturating_sub(cpu.since_ns);
    found.switches += 1;
    if preempted {
        if next.is_none() {
            found.preempted_by_system += 1;
        } else if next.id == cpu.pod_id {
            found.preempted_by_same_pod += 1;
        } else {
            found.preempted_by_other_pod += 1;
        }
    }
    if cpu.waited != 0 {
        found.run_queue_wait_ns += cpu.wait_ns;
        // A mask, hidden from the compiler, which would drop it as needless: older verifiers follow branches
        // that their own bounds rule out, so a comparison is not enough for them.
        let bucket = core::hint::black_box(bucket(cpu.wait_ns)) as usize % WAIT_BUCKETS;
        found.run_queue_waits[bucket] += 1;
    }
}

/// Returns the state of the leaving thread. [`TASK_RUNNING`]: the thread was still runnable, but was
/// preempted or yielded; the kernel counts that as an involuntary switch (`nivcsw` in kernel/sched/core.c).
#[inline(always)]
fn state_of(ctx: &BtfTracePointContext, previous: Task) -> u32 {
    if has(&POS_SWITCH_PREEMPT) && argument(ctx, &POS_SWITCH_PREEMPT) & 0xff != 0 {
        return TASK_RUNNING;
    }
    if has(&POS_SWITCH_STATE) {
        return argument(ctx, &POS_SWITCH_STATE) as u32;
    }
    // Before Linux 5.18 the state is not passed.
    if OFF_TASK_STATE.load() == ABSENT { UNKNOWN } else { previous.field(OFF_TASK_STATE.load()) }
}

/// Returns the bucket of a wait: 0 below 2^10 ns, then one per power of two, up to the last.
#[inline(always)]
fn bucket(wait_ns: u64) -> u64 {
    const LONGEST: u64 = (1 << (WAIT_BUCKETS - 1)) - 1;
    let mut rest = wait_ns >> FIRST_BUCKET_BITS;
    if rest == 0 {
        return 0;
    }
    if rest > LONGEST {
        rest = LONGEST;
    }
    let mut bits = 0;
    for step in [16, 8, 4, 2] {
        if rest >> step != 0 {
            rest >>= step;
            bits += step;
        }
    }
    bits + (rest >> 1) + 1
}

/// Records that a thread becomes runnable. The agent attaches this hook and the next only if the kernel
/// itself doesn't count waits: two more hooks would cost half as much again (decisions/0015).
#[btf_tracepoint(function = "sched_wakeup")]
pub(crate) fn sched_wakeup(ctx: BtfTracePointContext) -> i32 {
    woken(&ctx, Task::state)
}

/// Records that a thread becomes runnable for the first time.
#[btf_tracepoint(function = "sched_wakeup_new")]
pub(crate) fn sched_wakeup_new(ctx: BtfTracePointContext) -> i32 {
    woken(&ctx, Task::state_or_new)
}

#[inline(always)]
fn woken(ctx: &BtfTracePointContext, state_of: impl FnOnce(Task) -> Option<*mut TaskState>) -> i32 {
    if !known::<{ group::THREAD | group::WAKEUP }>() {
        return 0;
    }
    // SAFETY: a task, never null.
    let task = unsafe { Task::new(argument(ctx, &POS_WAKEUP_TASK)) };
    if let Some(state) = state_of(task) {
        // SAFETY: a live element, written under the thread's own lock.
        unsafe { (*state).runnable_since_ns = task.run_queue_clock() };
    }
    0
}
