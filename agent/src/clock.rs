//! The clock that both halves share.

/// `CLOCK_MONOTONIC` in nanoseconds, as `bpf_ktime_get_ns` gives it in the kernel.
pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}
