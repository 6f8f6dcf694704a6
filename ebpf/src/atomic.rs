//! Atomic operations on words that several CPUs change.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};

/// Adds `value` (two's complement, so it can subtract) to a map value that other CPUs also change.
///
/// # Safety
/// `pointer` points into a live map value and is aligned to 8.
#[inline(always)]
pub(crate) unsafe fn atomic_add(pointer: *mut u64, value: u64) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(pointer, value);
    }
}

/// Writes `new` into a word of a map value that other CPUs change, if the word is `old`. Returns the word's
/// former value.
#[inline(always)]
pub(crate) fn exchange(word: &mut u64, old: u64, new: u64) -> u64 {
    // SAFETY: a reference is aligned and points to a live value.
    unsafe { atomic_cxchg::<u64, { AtomicOrdering::Relaxed }, { AtomicOrdering::Relaxed }>(word, old, new) }.0
}
