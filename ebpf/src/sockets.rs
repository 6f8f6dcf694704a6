//! TCP sockets of the pods: listeners (listeners.rs), connections, retransmits and round-trip times. A single
//! program handles all of these, because each program costs every connection some ten calls.

use aya_ebpf::{helpers::bpf_skc_to_tcp_sock, macros::sock_ops, programs::SockOpsContext};
use beelet_ebpf_abi::{ABSENT, Counters};

use crate::{
    atomic::atomic_add,
    containers::counters,
    kernel::{OFF_CGROUP_KN, OFF_KERNFS_ID, OFF_SOCK_CGROUP, Sock},
    listeners::by_sock_ops,
};

/// `enum bpf_sock_ops_op`
const BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB: u32 = 4;
const BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB: u32 = 5;
/// Retransmit; arguments: first sequence number, number of segments, result (0 on success).
const BPF_SOCK_OPS_RETRANS_CB: u32 = 9;
/// State change; arguments: old and new state.
const BPF_SOCK_OPS_STATE_CB: u32 = 10;
/// Success of `listen`.
const BPF_SOCK_OPS_TCP_LISTEN_CB: u32 = 11;
/// Round trip.
const BPF_SOCK_OPS_RTT_CB: u32 = 12;
/// Flags that request the callbacks for retransmits and round trips.
const CALLBACKS: u32 = 1 << 1 | 1 << 3;

/// The sock_ops program on the pods' root cgroup.
#[sock_ops]
pub(crate) fn pod_socket(ctx: SockOpsContext) -> u32 {
    match ctx.op() {
        BPF_SOCK_OPS_TCP_LISTEN_CB => by_sock_ops(&ctx, true),
        BPF_SOCK_OPS_STATE_CB => by_sock_ops(&ctx, false),
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB | BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => {
            // OR-ed onto the existing flags: another program on this cgroup may have requested callbacks.
            let _ = ctx.set_cb_flags((ctx.cb_flags() | CALLBACKS) as i32);
            let rtt_us = smoothed_rtt_us(&ctx);
            count(&ctx, |counters| {
                // SAFETY: `count` passes a live element.
                unsafe { atomic_add(&raw mut counters.established, 1) };
                sample(counters, rtt_us);
            });
        }
        BPF_SOCK_OPS_RETRANS_CB if ctx.arg(2) == 0 => {
            let segments = u64::from(ctx.arg(1));
            count(&ctx, |counters| {
                // SAFETY: `count` passes a live element.
                unsafe { atomic_add(&raw mut counters.retransmits, segments) };
            });
        }
        BPF_SOCK_OPS_RTT_CB => {
            let rtt_us = smoothed_rtt_us(&ctx);
            count(&ctx, |counters| sample(counters, rtt_us));
        }
        _ => {}
    }
    1
}

/// Returns the smoothed round-trip time; the kernel stores eight times its value.
#[inline(always)]
fn smoothed_rtt_us(ctx: &SockOpsContext) -> u64 {
    // SAFETY: `ops` is the program's context; the verifier checks the access.
    u64::from(unsafe { (*ctx.ops).srtt_us } >> 3)
}

#[inline(always)]
fn sample(counters: &mut Counters, rtt_us: u64) {
    if rtt_us != 0 {
        // SAFETY: a live element, as `count` passes it.
        unsafe {
            atomic_add(&raw mut counters.rtt_us, rtt_us);
            atomic_add(&raw mut counters.rtt_samples, 1);
        }
    }
}

/// Passes this CPU's counters of the socket's cgroup to `add`. Softirqs may run in between, so adds must be
/// atomic.
#[inline(always)]
fn count(ctx: &SockOpsContext, add: impl FnOnce(&mut Counters)) {
    if OFF_SOCK_CGROUP.load() == ABSENT || OFF_CGROUP_KN.load() == ABSENT || OFF_KERNFS_ID.load() == ABSENT {
        return;
    }
    let cgroup_id = sock_of(ctx).map_or(0, Sock::cgroup_id);
    if cgroup_id != 0
        && let Some(found) = counters(cgroup_id)
    {
        // SAFETY: a live element.
        add(unsafe { &mut *found });
    }
}

/// Returns the socket of a callback.
#[inline(always)]
pub(crate) fn sock_of(ctx: &SockOpsContext) -> Option<Sock> {
    // SAFETY: `ops` is the program's context; the verifier checks the access.
    let sk = unsafe { (*ctx.ops).__bindgen_anon_2.sk };
    if sk.is_null() {
        return None;
    }
    // SAFETY: a socket, not null. The helper returns the same socket as a typed kernel pointer, or null.
    let tcp = unsafe { bpf_skc_to_tcp_sock(sk.cast()) }.cast::<u8>();
    if tcp.is_null() {
        return None;
    }
    // SAFETY: not null, and typed by the helper.
    Some(unsafe { Sock::new(tcp) })
}
