//! Bytes and packets of the pods' sockets. Never changes a verdict: both programs always say 1, pass.

use aya_ebpf::{helpers::generated::bpf_skb_cgroup_id, macros::cgroup_skb, programs::SkBuffContext};
use beelet_ebpf_abi::Counters;

use crate::{atomic::atomic_add, containers::counters};

const PASS: i32 = 1;

/// What a pod's socket receives.
#[cgroup_skb(ingress)]
pub(crate) fn traffic_in(ctx: SkBuffContext) -> i32 {
    // Receiving is the softirq's: nothing comes between on this CPU, and plain adds are cheaper.
    let bytes = u64::from(ctx.len());
    count(&ctx, |counters| {
        counters.rx_bytes += bytes;
        counters.rx_packets += 1;
    })
}

/// What a pod's socket sends.
#[cgroup_skb(egress)]
pub(crate) fn traffic_out(ctx: SkBuffContext) -> i32 {
    let bytes = u64::from(ctx.len());
    count(&ctx, |counters| {
        // SAFETY: `count` gives a live element; atomic, because a softirq that sends may come between.
        unsafe {
            atomic_add(&raw mut counters.tx_bytes, bytes);
            atomic_add(&raw mut counters.tx_packets, 1);
        }
    })
}

#[inline(always)]
fn count(ctx: &SkBuffContext, add: impl FnOnce(&mut Counters)) -> i32 {
    // SAFETY: takes this program type's context; 0 where the packet has no socket of its own.
    let cgroup_id = unsafe { bpf_skb_cgroup_id(ctx.skb.skb) };
    if cgroup_id != 0
        && let Some(found) = counters(cgroup_id)
    {
        // SAFETY: this CPU's live element.
        add(unsafe { &mut *found });
    }
    PASS
}
