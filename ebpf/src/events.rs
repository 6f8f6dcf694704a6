//! Sends events to user space, and counts those that could not be sent.

use aya_ebpf::helpers::{bpf_get_smp_processor_id, bpf_ktime_get_ns};
use beelet_ebpf_abi::{Drops, EventHeader};

use crate::{
    atomic::atomic_add,
    kernel::INSTANCE,
    maps::{DROPS, EVENTS, META},
};

/// Returns true if this instance of the programs is the active one, not a coming or a replaced one: see
/// [`beelet_ebpf_abi::Meta::instance`].
#[inline(always)]
pub(crate) fn is_current() -> bool {
    // SAFETY: the element lives as long as the array; the agent changes this field as one aligned word.
    META.get_ptr(0).is_some_and(
        |meta| unsafe { core::ptr::read_volatile(&raw const (*meta).instance) } == INSTANCE.load(),
    )
}

/// Builds the head of a record about an event that happened just now.
#[inline(always)]
pub(crate) fn header(kind: u32, cgroup_id: u64) -> EventHeader {
    // SAFETY: both helpers take nothing and are allowed in every program type.
    let (cpu, at_ns) = unsafe { (bpf_get_smp_processor_id(), bpf_ktime_get_ns()) };
    EventHeader { kind, cpu, at_ns, cgroup_id }
}

/// Sends `record`, or counts it as dropped if the ring is full.
#[inline(always)]
pub(crate) fn send<T: Copy + 'static>(record: T) {
    match EVENTS.reserve_untyped::<T>(0) {
        Some(mut slot) => {
            slot.write(record);
            slot.submit(0);
        }
        None => dropped(|drops| &raw mut drops.ring_full),
    }
}

/// Adds one to a field of this CPU's drop counters.
#[inline(always)]
pub(crate) fn dropped(field: impl FnOnce(&mut Drops) -> *mut u64) {
    if let Some(drops) = DROPS.get_ptr_mut(0) {
        // SAFETY: the pointer is this CPU's live array element. The add is atomic because a program in an
        // interrupt can run in between on the same CPU.
        unsafe { atomic_add(field(&mut *drops), 1) };
    }
}
