//! Changing what other CPUs change too.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};

/// Adds `value` (two's complement, so it can subtract) to a map value that other CPUs change too.
///
/// # Safety
/// `pointer` points into a live map value and is aligned to 8.
#[inline(always)]
pub(crate) unsafe fn atomic_add(pointer: *mut u64, value: u64) {
    // SAFETY: the caller's.
    unsafe {
        atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(pointer, value);
    }
}

/// Writes `new` into a word of a map value that other CPUs change, if `old` is there. Returns what was there.
#[inline(always)]
pub(crate) fn exchange(word: &mut u64, old: u64, new: u64) -> u64 {
    // SAFETY: a reference is aligned and to something that lives.
    unsafe { atomic_cxchg::<u64, { AtomicOrdering::Relaxed }, { AtomicOrdering::Relaxed }>(word, old, new) }.0
}
