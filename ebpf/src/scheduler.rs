//! The scheduler: the callbacks of one `sched_ext_ops` (Documentation/scheduler/sched-ext.rst), which place
//! all threads of the classes SCHED_NORMAL, SCHED_BATCH and SCHED_IDLE on CPUs.
//!
//! Three queues for the whole machine: latency-critical pods first, then Burstable pods by weight together
//! with the machine's own threads, then BestEffort pods. A thread that finds no idle CPU takes one from a
//! class behind its own. Each waiting class gets a turn on each CPU at least once per bound ([`BOUND_NS`]),
//! so no class starves. The programs also enforce CPU limits, which the kernel does only in its own
//! scheduler: a thread whose container has used its quota is parked until a later window. Then the thread
//! runs for a moment, and is queued like others or parked again. The number of a container's threads that
//! return in a window is limited by its quota, so those moments cost little.
//!
//! An object of its own, which the agent links itself: aya does not support `struct_ops`, and kfuncs are
//! calls of numbers (`beelet_ebpf_abi::scheduler`). Nothing is pinned: the kernel restores its own scheduler
//! as soon as the agent's descriptor is closed, for any reason.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![allow(internal_features)] // the only way to say "atomic add" for this target

use core::{ffi::c_void, mem::transmute};

use aya_ebpf::{
    Global,
    bindings::bpf_timer,
    btf_maps::{Array, HashMap},
    helpers::{
        bpf_get_smp_processor_id, bpf_ktime_get_ns,
        generated::{
            bpf_probe_read_kernel, bpf_probe_read_kernel_str, bpf_timer_init, bpf_timer_set_callback,
            bpf_timer_start,
        },
    },
    macros::btf_map,
};
use beelet_ebpf_abi::{
    CgroupKey, kernel_fields,
    scheduler::{
        BOUND_NS, End, FIRST_KFUNC, Limit, MACHINE, MAX_CPUS, MAX_SHARES, MESSAGE_BYTES, ROUND_NS, SLICE_NS,
        Share, Turn, WATCHDOG_MS, WEIGHT_OF_ONE_CPU, WINDOW_NS, class, kfunc,
    },
};

use atomic::{atomic_add, exchange};

#[macro_use]
#[allow(unused_macros)] // only the attached programs ask for groups
mod fields;

mod atomic;
mod object;

macro_rules! scheduler {
    (
        both { $($both:tt)+ } attached { $($attached:tt)+ } check { $($check:tt)+ }
        scheduler { $($scheduler:tt)+ }
    ) => {
        globals! { $($scheduler)+ }
    };
}

kernel_fields!(scheduler);

/// The cgroup id of the pods' root.
#[unsafe(no_mangle)]
static PODS: Global<u64> = Global::new(0);
/// Depth of the pods' root below the root of cgroup2.
#[unsafe(no_mangle)]
static PODS_LEVEL: Global<u32> = Global::new(0);
/// The cgroup id of the Burstable pods' folder.
#[unsafe(no_mangle)]
static BURSTABLE: Global<u64> = Global::new(0);
/// The cgroup id of the BestEffort pods' folder.
#[unsafe(no_mangle)]
static BEST_EFFORT: Global<u64> = Global::new(0);
/// Number of possible CPUs.
#[unsafe(no_mangle)]
static CPUS: Global<u32> = Global::new(0);
/// 1: this kernel has `scx_bpf_task_set_slice`; 0: the program may write the field itself.
#[unsafe(no_mangle)]
static HAS_SET_SLICE: Global<u32> = Global::new(0);

/// Shares of CPU time. The agent adds pods, the programs count their usage.
#[btf_map]
static SHARES: HashMap<CgroupKey, Share, MAX_SHARES> = HashMap::new();
/// Containers with a CPU limit.
#[btf_map]
static LIMITS: HashMap<CgroupKey, Limit, MAX_SHARES> = HashMap::new();
/// The current turn on each CPU.
#[btf_map]
static TURNS: Array<Turn, MAX_CPUS> = Array::new();
/// The virtual time of [`class::SHARED`]: the furthest virtual time of the threads that got a turn.
#[btf_map]
static VTIME: Array<u64, 1> = Array::new();
/// Timer that wakes idle CPUs for parked threads.
#[btf_map]
static TIMER: Array<Timer, 1> = Array::new();
/// End of the scheduler.
#[btf_map]
static END: Array<End, 1> = Array::new();

/// The value of [`TIMER`]; the kernel finds the timer by its type's name.
#[repr(C)]
struct Timer {
    timer: bpf_timer,
}

// enum scx_dsq_id_flags, include/linux/sched/ext.h
const DSQ_LOCAL: u64 = 1 << 63 | 2;
// enum scx_enq_flags, kernel/sched/ext_internal.h
const ENQ_WAKEUP: u64 = 1;
const ENQ_LAST: u64 = 1 << 41;
// enum scx_kick_flags
const KICK_IDLE: u64 = 1;
const KICK_PREEMPT: u64 = 2;
/// enum scx_ent_flags, include/linux/sched/ext.h: the thread is runnable.
const TASK_QUEUED: u32 = 1;
/// include/linux/sched.h
const PF_KTHREAD: u32 = 0x0020_0000;

/// Queue of latency-critical pods.
const LATENCY_QUEUE: u64 = 0;
const SHARED_QUEUE: u64 = 1;
const BEST_EFFORT_QUEUE: u64 = 2;
/// First of the queues of parked threads, one per window in which threads return. The queues form a wheel:
/// half of them are for coming windows, and half for past ones, in which a CPU may have left threads.
const PARKED_QUEUE: u64 = 3;
const PARKED_QUEUES: u64 = 2 * AHEAD;
const QUEUES: u64 = PARKED_QUEUE + PARKED_QUEUES;
/// Maximum number of windows for which a thread is parked.
const AHEAD: u64 = 32;
/// [`AHEAD`], known to the verifier but not to the compiler: older verifiers don't accept the loop that the
/// compiler would make of a constant.
static LOOKS: Global<u64> = Global::new(AHEAD);
// A thread that all CPUs missed returns when the wheel has turned.
const _: () = assert!((AHEAD + PARKED_QUEUES) * WINDOW_NS < WATCHDOG_MS as u64 * 1_000_000);

/// Slice of a parked thread only: with it, `running` preempts the thread.
const PARKED_SLICE_NS: u64 = 1;
/// Part of a container's next quotas, in nanoseconds, for which one of its parked threads returns. Busy
/// threads use more, and the rest are parked again; threads that soon sleep use less.
const PARKED_STEP_NS: u64 = 1_000_000;
/// Maximum depth of a cgroup; no cgroup2 hierarchy is deeper in practice.
const MAX_LEVEL: u32 = 64;

/// A `struct task_struct *` that the verifier tracks as such.
type Task = *const u8;

macro_rules! kfuncs {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? = $place:ident;)+) => {
        $(
            $(#[$doc])*
            #[inline(always)]
            fn $name($($arg: $type),*) $(-> $out)? {
                // SAFETY: the agent replaces the number with the kernel function of that place, and the
                // verifier checks every argument of the call.
                unsafe {
                    let call: unsafe extern "C" fn($($type),*) $(-> $out)? =
                        transmute(FIRST_KFUNC as usize + kfunc::$place);
                    call($($arg),*)
                }
            }
        )+
    };
}

kfuncs! {
    fn select_cpu_dfl(task: Task, previous: i32, flags: u64, idle: *mut bool) -> i32 = SELECT_CPU_DFL;
    fn insert(task: Task, queue: u64, slice: u64, flags: u64) = INSERT;
    fn insert_by_vtime(task: Task, queue: u64, slice: u64, vtime: u64, flags: u64) = INSERT_VTIME;
    fn move_to_local(queue: u64) -> bool = MOVE_TO_LOCAL;
    fn create_queue(queue: u64, node: i32) -> i32 = CREATE_DSQ;
    fn kick(cpu: i32, flags: u64) = KICK_CPU;
    fn waiting(queue: u64) -> i32 = NR_QUEUED;
    fn set_slice(task: Task, slice: u64) -> bool = SET_SLICE;
    fn may_run_on(cpu: u32, mask: *const u8) -> bool = TEST_CPU;
}

/// Selects the CPU of a waking thread, and starts the thread at once if that CPU is idle.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/select_cpu")]
extern "C" fn select_cpu(ctx: *const u64) -> i64 {
    let task = task_at(ctx, 0);
    let mut idle = false;
    let cpu = select_cpu_dfl(task, argument(ctx, 1) as i32, argument(ctx, 2), &raw mut idle);
    if idle {
        let left = left(place_of(task).container, now());
        if left > 0 {
            insert(task, DSQ_LOCAL, smaller(left, SLICE_NS), 0);
        }
    }
    i64::from(cpu)
}

/// Queues a runnable thread that has no CPU yet, or whose turn is over.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/enqueue")]
extern "C" fn enqueue(ctx: *const u64) -> i64 {
    let (task, flags) = (task_at(ctx, 0), argument(ctx, 1));
    if is_kernel_thread(task) {
        // Many kernel threads are bound to one CPU, and all other threads depend on their work.
        insert(task, DSQ_LOCAL, SLICE_NS, flags);
        return 0;
    }
    let (place, now) = (place_of(task), now());
    let left = left(place.container, now);
    if left == 0 {
        insert(task, parked(comes_back(place.container, now)), PARKED_SLICE_NS, flags);
        return 0;
    }
    let slice = smaller(left, SLICE_NS);
    match place.class {
        class::LATENCY => insert(task, LATENCY_QUEUE, slice, flags),
        class::BEST_EFFORT => insert(task, BEST_EFFORT_QUEUE, slice, flags),
        _ => insert_by_vtime(task, SHARED_QUEUE, slice, vtime_of(place.share), flags),
    }
    call_a_cpu(task, place.class, flags);
    0
}

/// Finds the next thread for a CPU that has nothing to run.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/dispatch")]
extern "C" fn dispatch(ctx: *const u64) -> i64 {
    let (cpu, previous, now) = (argument(ctx, 0) as u32, task_at(ctx, 1), now());
    let Some(turn) = TURNS.get_ptr_mut(cpu) else { return 0 };
    // SAFETY: this CPU's element, which no other CPU changes.
    let turn = unsafe { &mut *turn };
    if release(turn, now) {
        return 0;
    }
    if now - turn.shared_ns > bound(SHARED_QUEUE) {
        turn.shared_ns = now;
        if move_to_local(SHARED_QUEUE) {
            return 0;
        }
    }
    if now - turn.best_effort_ns > bound(BEST_EFFORT_QUEUE) {
        turn.best_effort_ns = now;
        if move_to_local(BEST_EFFORT_QUEUE) {
            return 0;
        }
    }
    // The thread that ran here is not queued yet: it precedes threads of the classes behind its own.
    if move_to_local(LATENCY_QUEUE) || turn.class == class::LATENCY && goes_on(previous, turn, now) {
        return 0;
    }
    turn.shared_ns = now;
    if move_to_local(SHARED_QUEUE) || turn.class == class::SHARED && goes_on(previous, turn, now) {
        return 0;
    }
    turn.best_effort_ns = now;
    if !move_to_local(BEST_EFFORT_QUEUE) {
        goes_on(previous, turn, now);
    }
    0
}

/// Returns the queue of threads parked until a window.
#[inline(always)]
fn parked(window: u64) -> u64 {
    PARKED_QUEUE + window % PARKED_QUEUES
}

/// Returns the window in which a thread returns whose container has used its quota.
#[inline(always)]
fn comes_back(container: u64, now: u64) -> u64 {
    let window = now / WINDOW_NS;
    let Some(limit) = LIMITS.get_ptr_mut(CgroupKey { cgroup_id: container }) else { return window + 1 };
    // SAFETY: as in `place_of`. CPUs that race assign the same turn to two threads.
    let limit = unsafe { &mut *limit };
    let debt = smaller(limit.used_ns.checked_div(limit.quota_ns).unwrap_or(1), AHEAD);
    let (earliest, latest) = ((window + larger(debt, 1)) * WINDOW_NS, (window + AHEAD) * WINDOW_NS);
    let at = smaller(larger(limit.next_ns, earliest), latest);
    let step = smaller(PARKED_STEP_NS, limit.quota_ns) * WINDOW_NS;
    limit.next_ns = at + step.checked_div(limit.quota_ns).unwrap_or(0);
    at / WINDOW_NS
}

/// Moves a thread to this CPU that was parked until this window, or until a window since this CPU's last
/// check. Parked threads come one by one, before all others: each runs only for a moment.
#[inline(always)]
fn release(turn: &mut Turn, now: u64) -> bool {
    let window = now / WINDOW_NS;
    let mut at = larger(turn.window, less(window, AHEAD - 1));
    let mut looks = 0;
    while at <= window && looks < LOOKS.load() {
        turn.window = at;
        if move_to_local(parked(at)) {
            return true;
        }
        at += 1;
        looks += 1;
    }
    false
}

/// Extends the turn of the thread that ran here by another slice, if it is runnable and within its quota.
#[inline(always)]
fn goes_on(previous: Task, turn: &mut Turn, now: u64) -> bool {
    if previous.is_null() || read::<u32>(previous, &OFF_TASK_SCX_FLAGS) & TASK_QUEUED == 0 {
        return false;
    }
    charge(turn, now);
    let left = left(turn.container, now);
    if left == 0 {
        return false;
    }
    give_slice(previous, smaller(left, SLICE_NS));
    true
}

/// Records that a thread begins to run.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/running")]
extern "C" fn running(ctx: *const u64) -> i64 {
    let task = task_at(ctx, 0);
    let place = place_of(task);
    // SAFETY: reads no memory.
    let cpu = unsafe { bpf_get_smp_processor_id() } as u32;
    let Some(turn) = TURNS.get_ptr_mut(cpu) else { return 0 };
    // SAFETY: this CPU's element, which no other CPU changes.
    let turn = unsafe { &mut *turn };
    turn.since_ns = now();
    turn.share = place.share;
    turn.container = place.container;
    turn.class = place.class;
    let slice: u64 = read(task, &OFF_TASK_SLICE);
    // Other threads of the container may have used up the quota since. The kernel itself sets longer slices,
    // for threads that it queues without the scheduler: exiting ones, for example.
    if slice == PARKED_SLICE_NS || slice <= SLICE_NS && left(place.container, turn.since_ns) == 0 {
        kick(cpu as i32, KICK_PREEMPT);
    }
    if place.class == class::SHARED
        && let Some(vtime) = VTIME.get_ptr_mut(0)
    {
        let reached: u64 = read(task, &OFF_TASK_VTIME);
        // SAFETY: a live element. A race loses a step, which the next call repeats.
        unsafe {
            if reached.wrapping_sub(vtime.read_volatile()) as i64 > 0 {
                vtime.write_volatile(reached);
            }
        }
    }
    0
}

/// Records that a thread stops running.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/stopping")]
extern "C" fn stopping(_ctx: *const u64) -> i64 {
    // SAFETY: reads no memory.
    let cpu = unsafe { bpf_get_smp_processor_id() } as u32;
    let Some(turn) = TURNS.get_ptr_mut(cpu) else { return 0 };
    // SAFETY: this CPU's element, which no other CPU changes.
    let turn = unsafe { &mut *turn };
    charge(turn, now());
    turn.class = class::NONE;
    0
}

/// Makes the queues, and starts the timer for parked threads.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/init")]
extern "C" fn init(_ctx: *const u64) -> i64 {
    for queue in 0..QUEUES {
        let refused = create_queue(queue, -1);
        if refused != 0 {
            return i64::from(refused);
        }
    }
    let Some(timer) = TIMER.get_ptr_mut(0) else { return -1 };
    let (timer, map) = (timer.cast::<bpf_timer>(), (&raw const TIMER).cast_mut().cast::<c_void>());
    // SAFETY: a timer in its own map's element.
    unsafe {
        let refused = bpf_timer_init(timer, map, 1); // CLOCK_MONOTONIC
        if refused != 0 {
            return refused;
        }
        bpf_timer_set_callback(timer, next_window as *mut c_void);
        bpf_timer_start(timer, until_next_window(), 0)
    }
}

/// Records the scheduler's end, caused by the agent or by a fault.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/exit")]
extern "C" fn exit(ctx: *const u64) -> i64 {
    let info = task_at(ctx, 0);
    let Some(end) = END.get_ptr_mut(0) else { return 0 };
    let kind: u32 = read(info, &OFF_EXIT_KIND);
    let (reason, message): (u64, u64) = (read(info, &OFF_EXIT_REASON), read(info, &OFF_EXIT_MESSAGE));
    let size = MESSAGE_BYTES as u32;
    // SAFETY: a live element; the helper checks the address, and writes no more than fits.
    unsafe {
        bpf_probe_read_kernel_str((&raw mut (*end).reason).cast(), size, reason as *const c_void);
        bpf_probe_read_kernel_str((&raw mut (*end).message).cast(), size, message as *const c_void);
        (*end).kind = u64::from(kind);
    }
    0
}

/// Handles the begin of a window: wakes idle CPUs to fetch parked threads.
extern "C" fn next_window(_map: *const c_void, _key: *const c_void, timer: *mut bpf_timer) -> i64 {
    let window = now() / WINDOW_NS;
    if waiting(parked(window)) > 0 || waiting(parked(window - 1)) > 0 {
        let mut cpu = 0;
        while cpu < CPUS.load() {
            kick(cpu as i32, KICK_IDLE);
            cpu += 1;
        }
    }
    // SAFETY: the kernel's own timer.
    unsafe { bpf_timer_start(timer, until_next_window(), 0) };
    0
}

/// Returns the time until shortly after the begin of the next window, in nanoseconds.
#[inline(always)]
fn until_next_window() -> u64 {
    WINDOW_NS - now() % WINDOW_NS + 50_000
}

/// Owner of a thread.
#[derive(Clone, Copy)]
struct Place {
    /// Key of the thread's share.
    share: u64,
    /// Cgroup id of the thread's container; 0 if it has none.
    container: u64,
    class: u32,
}

#[inline(always)]
fn is_kernel_thread(task: Task) -> bool {
    read::<u32>(task, &OFF_TASK_FLAGS) & PF_KTHREAD != 0
}

/// Returns the owner of a thread by its cgroup: `<root>/pod<uid>/...` is a Guaranteed pod,
/// `<root>/burstable/pod<uid>/...` and `<root>/besteffort/pod<uid>/...` are the others. Threads in other
/// cgroups are the machine's, and so is a kernel thread in any cgroup.
#[inline(always)]
fn place_of(task: Task) -> Place {
    let machine = Place { share: MACHINE, container: 0, class: class::SHARED };
    if is_kernel_thread(task) {
        return machine;
    }
    let cgroups: *const u8 = read(task, &OFF_TASK_CGROUPS);
    let cgroup: u64 = read(cgroups, &OFF_CSS_SET_CGROUP);
    let level: u32 = peek(cgroup + u64::from(OFF_CGROUP_LEVEL.load()));
    let root = PODS_LEVEL.load();
    if level <= root || root > MAX_LEVEL || ancestor_id(cgroup, root) != PODS.load() {
        return machine;
    }
    let first = ancestor_id(cgroup, root + 1);
    let (class, at) = if first == BURSTABLE.load() {
        (class::SHARED, root + 2)
    } else if first == BEST_EFFORT.load() {
        (class::BEST_EFFORT, root + 2)
    } else {
        (class::LATENCY, root + 1)
    };
    let pod = if level >= at { ancestor_id(cgroup, at) } else { first };
    let container = if level > at { ancestor_id(cgroup, at + 1) } else { 0 };
    match SHARES.get_ptr(CgroupKey { cgroup_id: pod }) {
        // SAFETY: an element that lives at least as long as the program runs.
        Some(share) => Place { share: pod, container, class: unsafe { (*share).class } },
        None => Place { share: first, container, class },
    }
}

/// Returns the rest of a container's quota in this window, in nanoseconds.
#[inline(always)]
fn left(container: u64, now: u64) -> u64 {
    if container == 0 {
        return u64::MAX;
    }
    let Some(limit) = LIMITS.get_ptr_mut(CgroupKey { cgroup_id: container }) else { return u64::MAX };
    // SAFETY: as in `place_of`.
    let limit = unsafe { &mut *limit };
    let (window, known) = (now / WINDOW_NS, limit.window);
    // Of the CPUs that see the new window, only one refunds quota; a CPU with an older time refunds nothing.
    if window > known && exchange(&mut limit.window, known, window) == known {
        // A quota is at most a window of all CPUs: the product fits.
        let back = smaller(limit.quota_ns.wrapping_mul(smaller(window - known, 1024)), limit.used_ns);
        // SAFETY: a live element.
        unsafe { atomic_add(&raw mut limit.used_ns, back.wrapping_neg()) };
    }
    less(limit.quota_ns, limit.used_ns)
}

/// Charges the CPU time that the thread of a turn has used since the last charge.
#[inline(always)]
fn charge(turn: &mut Turn, now: u64) {
    if turn.class == class::NONE {
        return;
    }
    let used = now - turn.since_ns;
    turn.since_ns = now;
    if let Some(share) = SHARES.get_ptr_mut(CgroupKey { cgroup_id: turn.share }) {
        // SAFETY: as in `place_of`.
        unsafe {
            let step = (used * u64::from(WEIGHT_OF_ONE_CPU)).checked_div(u64::from((*share).weight));
            atomic_add(&raw mut (*share).vtime, step.unwrap_or(0));
        }
    }
    if turn.container != 0
        && let Some(limit) = LIMITS.get_ptr_mut(CgroupKey { cgroup_id: turn.container })
    {
        // SAFETY: as above.
        unsafe { atomic_add(&raw mut (*limit).used_ns, used) };
    }
}

/// Returns the virtual time of a share. A share that slept gets at most one slice of credit.
#[inline(always)]
fn vtime_of(share: u64) -> u64 {
    let Some(reached) = VTIME.get_ptr(0) else { return 0 };
    // SAFETY: a live element.
    let least = unsafe { reached.read_volatile() }.wrapping_sub(SLICE_NS);
    let Some(share) = SHARES.get_ptr_mut(CgroupKey { cgroup_id: share }) else { return least };
    // SAFETY: as in `place_of`. A race with `charge` loses one step.
    unsafe {
        let vtime = &raw mut (*share).vtime;
        if (vtime.read_volatile().wrapping_sub(least) as i64) < 0 {
            vtime.write_volatile(least);
        }
        vtime.read_volatile()
    }
}

/// Returns the maximum time for which a CPU may skip a waiting class: shorter if many threads wait.
#[inline(always)]
fn bound(queue: u64) -> u64 {
    let waiting = waiting(queue);
    let threads = if waiting > 0 { waiting as u64 } else { 0 };
    let round = (ROUND_NS * u64::from(CPUS.load())).checked_div(threads + 1);
    smaller(BOUND_NS, round.unwrap_or(BOUND_NS))
}

/// Kicks a CPU that is idle, or that runs a class behind the thread's, to check the queues.
#[inline(always)]
fn call_a_cpu(task: Task, class: u32, flags: u64) {
    // SAFETY: reads no memory.
    let own = unsafe { bpf_get_smp_processor_id() } as u32;
    // A thread whose turn is over is leaving its CPU, which checks the queues by itself, unless `flags` say
    // that the CPU has no other thread.
    let skipped = if flags & (ENQ_WAKEUP | ENQ_LAST) == 0 { own } else { u32::MAX };
    let mask: *const u8 = read(task, &OFF_TASK_CPUS_PTR);
    let mut cpu = cpu_behind(class::SHARED, mask, skipped);
    if cpu == u32::MAX && class == class::LATENCY {
        cpu = cpu_behind(class::LATENCY, mask, skipped);
    }
    if cpu == u32::MAX {
        return;
    }
    // A BestEffort thread preempts no other: it only wakes an idle CPU.
    kick(cpu as i32, if class == class::BEST_EFFORT { KICK_IDLE } else { KICK_PREEMPT });
}

/// Returns the first CPU that runs a class behind `ahead` or none of our threads; `u32::MAX` without one.
#[inline(always)]
fn cpu_behind(ahead: u32, mask: *const u8, skipped: u32) -> u32 {
    let mut cpu = 0;
    while cpu < CPUS.load() {
        if let Some(turn) = TURNS.get_ptr(cpu)
            // SAFETY: a live element; another CPU may be changing the word, which is valid at any time.
            && unsafe { (&raw const (*turn).class).read_volatile() } > ahead
            && cpu != skipped
            && may_run_on(cpu, mask)
        {
            return cpu;
        }
        cpu += 1;
    }
    u32::MAX
}

#[inline(always)]
fn give_slice(task: Task, slice: u64) {
    if HAS_SET_SLICE.load() != 0 {
        set_slice(task, slice);
        return;
    }
    // SAFETY: the verifier lets a scheduler write this field, and no other.
    unsafe { task.add(OFF_TASK_SLICE.load() as usize).cast_mut().cast::<u64>().write_volatile(slice) };
}

/// Returns the id of a cgroup's ancestor `level` levels below the root of cgroup2; at its own level, its own
/// id.
#[inline(always)]
fn ancestor_id(cgroup: u64, level: u32) -> u64 {
    let ancestor: u64 = peek(cgroup + u64::from(OFF_CGROUP_ANCESTORS.load()) + 8 * u64::from(level));
    let node: u64 = peek(ancestor + u64::from(OFF_CGROUP_KN.load()));
    peek(node + u64::from(OFF_KERNFS_ID.load()))
}

/// Returns a callback's argument as a number.
#[inline(always)]
fn argument(ctx: *const u64, index: usize) -> u64 {
    // SAFETY: the verifier checks that the callback has this argument.
    unsafe { ctx.add(index).read_volatile() }
}

/// Returns a callback's argument as a pointer.
#[inline(always)]
fn task_at(ctx: *const u64, index: usize) -> Task {
    // SAFETY: as in `argument`.
    unsafe { ctx.add(index).cast::<Task>().read_volatile() }
}

/// Reads a field of a structure that the verifier knows.
#[inline(always)]
fn read<T: Copy>(base: *const u8, offset: &Global<u32>) -> T {
    // SAFETY: the verifier checks the access against the kernel's type, or refuses the program. Volatile: the
    // compiler may neither merge reads nor repeat them.
    unsafe { base.add(offset.load() as usize).cast::<T>().read_volatile() }
}

/// Reads the kernel's memory; returns zero if nothing is mapped there.
#[inline(always)]
fn peek<T: Copy + Default>(address: u64) -> T {
    let mut value = T::default();
    // SAFETY: the helper checks the address, and copies or writes zeros.
    unsafe {
        bpf_probe_read_kernel((&raw mut value).cast(), size_of::<T>() as u32, address as *const c_void);
    }
    value
}

#[inline(always)]
fn now() -> u64 {
    // SAFETY: reads a clock.
    unsafe { bpf_ktime_get_ns() }
}

#[inline(always)]
fn smaller(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}

#[inline(always)]
fn larger(a: u64, b: u64) -> u64 {
    if a > b { a } else { b }
}

/// Returns the difference, or 0 if it would be negative.
#[inline(always)]
fn less(a: u64, b: u64) -> u64 {
    if a > b { a - b } else { 0 }
}
