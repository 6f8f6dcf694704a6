//! Adding to what other CPUs change too.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

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
