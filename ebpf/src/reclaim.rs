//! Time that threads of a cgroup spend in reclaim instead of running, because their own cgroup is at its
//! limit or the whole machine is short of memory; and the cgroups that cause the reclaim: a thread frees
//! memory when it needs some, so the cgroups that grow free most.
//!
//! The hooks run in the reclaiming thread, so they account the current thread and ignore the tracepoints'
//! arguments (which have been reordered between kernels). Reclaim by a kernel thread for a cgroup stalls no
//! thread of that cgroup.

use aya_ebpf::{
    helpers::{bpf_get_current_task_btf, bpf_ktime_get_ns},
    macros::btf_tracepoint,
    programs::BtfTracePointContext,
};
use beelet_ebpf_abi::{Counters, HALF_LIFE_BITS, fields::group, pressure, reclaim};

use crate::{
    args::argument,
    atomic::atomic_add,
    containers::{counters, pod_of_uncached},
    events::is_current,
    kernel::{POS_DIRECT_RECLAIMED, POS_MEMCG_RECLAIMED, known},
    maps::RECLAIMERS,
    pressure::waited,
    shares::{add, age},
    tasks::Task,
};

#[btf_tracepoint(function = "mm_vmscan_memcg_reclaim_begin")]
pub(crate) fn memcg_reclaim_begin(_ctx: BtfTracePointContext) -> i32 {
    begin()
}

#[btf_tracepoint(function = "mm_vmscan_direct_reclaim_begin")]
pub(crate) fn direct_reclaim_begin(_ctx: BtfTracePointContext) -> i32 {
    begin()
}

#[btf_tracepoint(function = "mm_vmscan_memcg_reclaim_end")]
pub(crate) fn memcg_reclaim_end(ctx: BtfTracePointContext) -> i32 {
    let freed = argument(&ctx, &POS_MEMCG_RECLAIMED);
    end(reclaim::MEMCG, freed, |counters| {
        (&raw mut counters.memcg_reclaim_ns, &raw mut counters.memcg_reclaims)
    })
}

#[btf_tracepoint(function = "mm_vmscan_direct_reclaim_end")]
pub(crate) fn direct_reclaim_end(ctx: BtfTracePointContext) -> i32 {
    let freed = argument(&ctx, &POS_DIRECT_RECLAIMED);
    end(reclaim::DIRECT, freed, |counters| {
        (&raw mut counters.direct_reclaim_ns, &raw mut counters.direct_reclaims)
    })
}

#[inline(always)]
fn current() -> Task {
    // SAFETY: takes nothing; a current task always exists, typed by the helper.
    unsafe { Task::new(bpf_get_current_task_btf() as u64) }
}

#[inline(always)]
fn begin() -> i32 {
    if known::<{ group::THREAD }>()
        && let Some(state) = current().state()
    {
        // SAFETY: a live element that only its own thread writes here; the helper takes nothing.
        unsafe { (*state).reclaiming_since_ns = bpf_ktime_get_ns() };
    }
    0
}

/// Accounts a reclaim by the current thread, which freed `freed` pages.
#[inline(always)]
fn end(kind: u32, freed: u64, fields: impl FnOnce(&mut Counters) -> (*mut u64, *mut u64)) -> i32 {
    if !known::<{ group::CGROUP }>() || !is_current() {
        return 0;
    }
    let task = current();
    let Some(state) = task.state() else { return 0 };
    // SAFETY: as in `begin`.
    let state = unsafe { &mut *state };
    // SAFETY: takes nothing.
    let now = unsafe { bpf_ktime_get_ns() };
    let since = state.reclaiming_since_ns;
    state.reclaiming_since_ns = 0;
    if since == 0 || now <= since {
        return 0;
    }
    let (cgroup, cgroup_id) = task.cgroup();
    // Also outside pods: memory that the machine's daemons need is missing for pods.
    if freed > 0 {
        charge_freed(kind, cgroup_id, freed, now);
    }
    let pod = pod_of_uncached(cgroup);
    if pod.is_none() {
        return 0;
    }
    if let Some(found) = counters(cgroup_id) {
        // SAFETY: a live element; atomic, because this thread may be preempted in the middle.
        unsafe {
            let (time, count) = fields(&mut *found);
            atomic_add(time, now - since);
            atomic_add(count, 1);
        }
    }
    waited::<{ pressure::RECLAIM as usize }>(cgroup_id, pod.qos, now - since, now);
    0
}

/// Adds pages to the sum that threads of a cgroup have freed. Returns the new sum.
///
/// The verifier checks this function by itself. Both programs share it: neither interrupts itself on one CPU,
/// and each has an element of its own.
#[inline(never)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn charge_freed(kind: u32, cgroup_id: u64, pages: u64, now: u64) -> u64 {
    let Some(found) = RECLAIMERS.get_ptr_mut(kind) else { return 0 };
    // SAFETY: this CPU's live element, and no other writer runs on this CPU in between.
    let found = unsafe { &mut *found };
    age(found, 0, now >> HALF_LIFE_BITS);
    found.total = found.total.wrapping_add(pages);
    add(found, cgroup_id, pages)
}
