//! A tracepoint's arguments, by positions that the agent looked up in the running kernel's BTF.
//!
//! The verifier accepts only constant offsets into the context. So each position has a branch of its own with
//! a load of its own; the read-only global makes all branches but one dead. The loads are in assembler,
//! because the compiler would merge them again into one from a computed address.

use core::{arch::asm, ffi::c_void};

use aya_ebpf::{EbpfContext as _, programs::BtfTracePointContext};
use beelet_ebpf_abi::ABSENT;

use crate::kernel::Position;

macro_rules! load {
    ($ctx:expr, $offset:literal) => {{
        let value: u64;
        // SAFETY: reads one argument of the context; the verifier refuses a tracepoint that has fewer.
        unsafe {
            asm!(
                concat!("{0} = *(u64 *)({1} + ", $offset, ")"),
                out(reg) value,
                in(reg) $ctx,
                options(readonly, nostack, preserves_flags),
            );
        }
        value
    }};
}

/// Returns the argument at `position`; 0 if this kernel's tracepoint lacks the argument.
#[inline(always)]
pub(crate) fn argument(ctx: &BtfTracePointContext, position: &Position) -> u64 {
    let ctx: *mut c_void = ctx.as_ptr();
    match position.load() {
        0 => load!(ctx, "0"),
        1 => load!(ctx, "8"),
        2 => load!(ctx, "16"),
        3 => load!(ctx, "24"),
        4 => load!(ctx, "32"),
        _ => 0,
    }
}

/// Returns true if this kernel's tracepoint has the argument.
#[inline(always)]
pub(crate) fn has(position: &Position) -> bool {
    position.load() != ABSENT
}
