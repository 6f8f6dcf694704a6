//! Bytes and packets of the pods' sockets. Must never change a verdict: both programs always return 1, pass.

use aya_ebpf::{helpers::generated::bpf_skb_cgroup_id, macros::cgroup_skb, programs::SkBuffContext};
use beelet_ebpf_abi::Counters;

use crate::{atomic::atomic_add, containers::counters};

const PASS: i32 = 1;

/// Counts received packets of a pod's socket.
#[cgroup_skb(ingress)]
pub(crate) fn traffic_in(ctx: SkBuffContext) -> i32 {
    // The softirq receives packets: no other writer runs in between on this CPU, and plain adds are cheaper.
    let bytes = u64::from(ctx.len());
    count(&ctx, |counters| {
        counters.rx_bytes += bytes;
        counters.rx_packets += 1;
    })
}

/// Counts sent packets of a pod's socket.
#[cgroup_skb(egress)]
pub(crate) fn traffic_out(ctx: SkBuffContext) -> i32 {
    let bytes = u64::from(ctx.len());
    count(&ctx, |counters| {
        // SAFETY: `count` passes a live element; atomic, because a sending softirq may run in between.
        unsafe {
            atomic_add(&raw mut counters.tx_bytes, bytes);
            atomic_add(&raw mut counters.tx_packets, 1);
        }
    })
}

#[inline(always)]
fn count(ctx: &SkBuffContext, add: impl FnOnce(&mut Counters)) -> i32 {
    // SAFETY: takes this program type's context; returns 0 if the packet has no socket of its own.
    let cgroup_id = unsafe { bpf_skb_cgroup_id(ctx.skb.skb) };
    if cgroup_id != 0
        && let Some(found) = counters(cgroup_id)
    {
        // SAFETY: this CPU's live element.
        add(unsafe { &mut *found });
    }
    PASS
}
