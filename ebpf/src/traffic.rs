//! Bytes and packets of the pods' sockets. Never changes a verdict: both programs always say 1, pass.

use aya_ebpf::{helpers::generated::bpf_skb_cgroup_id, macros::cgroup_skb, programs::SkBuffContext};
use beelet_ebpf_abi::Counters;

use crate::{containers::counters, kernel::atomic_add};

const PASS: i32 = 1;

/// What a pod's socket receives.
#[cgroup_skb(ingress)]
pub(crate) fn traffic_in(ctx: SkBuffContext) -> i32 {
    count(&ctx, |counters| (&raw mut counters.rx_bytes, &raw mut counters.rx_packets))
}

/// What a pod's socket sends.
#[cgroup_skb(egress)]
pub(crate) fn traffic_out(ctx: SkBuffContext) -> i32 {
    count(&ctx, |counters| (&raw mut counters.tx_bytes, &raw mut counters.tx_packets))
}

#[inline(always)]
fn count(ctx: &SkBuffContext, fields: impl FnOnce(&mut Counters) -> (*mut u64, *mut u64)) -> i32 {
    // SAFETY: takes this program type's context; 0 where the packet has no socket of its own.
    let cgroup_id = unsafe { bpf_skb_cgroup_id(ctx.skb.skb) };
    if cgroup_id != 0
        && let Some(found) = counters(cgroup_id)
    {
        // SAFETY: a live element; atomic, because a softirq may come between.
        unsafe {
            let (bytes, packets) = fields(&mut *found);
            atomic_add(bytes, u64::from(ctx.len()));
            atomic_add(packets, 1);
        }
    }
    PASS
}
