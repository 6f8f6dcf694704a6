//! The parts that every object needs: panic handler and license.

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Never reached: the verifier refuses a program that could loop here.
    loop {}
}

/// License of the object: the kernel allows schedulers, and helpers such as `bpf_skc_to_tcp_sock`, only to
/// GPL-compatible programs. The sources are Apache-2.0 as well.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
