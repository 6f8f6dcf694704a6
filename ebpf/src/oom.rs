//! Victims of the OOM killer, because their cgroup or the whole machine was out of memory.
//!
//! The tracepoint passes the victim itself since Linux 6.9, its number before. Before 6.4 the number leads to
//! the thread through the `TASKS` map; between the two releases, user space finds the cgroup by the number.
//! This module reads all fields by address: OOM kills are rare, and one way serves both kinds of kernel.

use aya_ebpf::{macros::btf_tracepoint, programs::BtfTracePointContext};
use beelet_ebpf_abi::{ABSENT, OomEvent, OomKill, TaskKey, fields::group, kind};

use crate::{
    args::{argument, has},
    atomic::atomic_add,
    containers::{counters, id_of, peek, pod_of_uncached},
    events::{header, is_current, send},
    kernel::{
        OFF_CSS_SET_CGROUP, OFF_MM_ANON, OFF_MM_FILE, OFF_MM_SHMEM, OFF_MM_TOTAL_VM, OFF_TASK_CGROUPS,
        OFF_TASK_MM, OFF_TASK_TGID, POS_OOM_PID, POS_OOM_TASK, Position, USE_TASK_STORAGE, known,
    },
    maps::TASKS,
};

#[btf_tracepoint(function = "mark_victim")]
pub(crate) fn oom_victim(ctx: BtfTracePointContext) -> i32 {
    if !known::<{ group::CGROUP }>() || !is_current() {
        return 0;
    }
    let (task, pid) = victim(&ctx);
    if pid == 0 {
        return 0;
    }
    if task == 0 {
        return report(0, 0, pid);
    }
    let set: u64 = peek(task + u64::from(OFF_TASK_CGROUPS.load()));
    let cgroup: u64 = peek(set + u64::from(OFF_CSS_SET_CGROUP.load()));
    if pod_of_uncached(cgroup).is_none() {
        return 0;
    }
    let cgroup_id = id_of(cgroup);
    if let Some(found) = counters(cgroup_id) {
        // SAFETY: a live element.
        unsafe { atomic_add(&raw mut (*found).oom_kills, 1) };
    }
    report(task, cgroup_id, pid)
}

/// Returns the victim's `task_struct` (0 if unknown) and its process id.
#[inline(always)]
fn victim(ctx: &BtfTracePointContext) -> (u64, u32) {
    if has(&POS_OOM_TASK) {
        let task = argument(ctx, &POS_OOM_TASK);
        return (task, peek(task + u64::from(OFF_TASK_TGID.load())));
    }
    let pid = argument(ctx, &POS_OOM_PID) as u32;
    if USE_TASK_STORAGE.load() != 0 {
        return (0, pid);
    }
    // SAFETY: a live element; read whole.
    (TASKS.get_ptr(TaskKey { pid }).map_or(0, |state| unsafe { (*state).task }), pid)
}

#[inline(always)]
fn report(task: u64, cgroup_id: u64, pid: u32) -> i32 {
    let mm: u64 = if task == 0 || OFF_TASK_MM.load() == ABSENT {
        0
    } else {
        peek(task + u64::from(OFF_TASK_MM.load()))
    };
    send(OomEvent {
        header: header(kind::OOM_KILL, cgroup_id),
        kill: OomKill {
            pid,
            reserved: 0,
            total_vm: pages(mm, &OFF_MM_TOTAL_VM),
            anon_rss: pages(mm, &OFF_MM_ANON),
            file_rss: pages(mm, &OFF_MM_FILE),
            shmem_rss: pages(mm, &OFF_MM_SHMEM),
        },
    });
    0
}

/// Returns a counter of a `mm_struct`. Some counters are sums without the small rest that each CPU keeps, and
/// may be below zero for a moment.
#[inline(always)]
fn pages(mm: u64, offset: &Position) -> u64 {
    let pages: i64 = if mm == 0 || offset.load() == ABSENT { 0 } else { peek(mm + u64::from(offset.load())) };
    // The compiler would turn four zeros in a row into a call of `memset`, which kernels before 6.8 refuse.
    core::hint::black_box(if pages < 0 { 0 } else { pages as u64 })
}
