//! Time and randomness of the simulation, below the standard library: this program's own `clock_gettime` and
//! `getrandom` replace the C library's, so that `Instant`, `SystemTime`, the keys of hash maps and tokio's
//! random choices follow the simulation, in the agent and in every library
//! (docs/decisions/0028-simulation.md).
//!
//! Outside of a simulation both functions ask the kernel, as the C library's do.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

/// Wall-clock time at the start of a simulation: 2027-01-01T00:00:00Z, in nanoseconds since 1970.
const EPOCH: u64 = 1_798_761_600_000_000_000;
/// `CLOCK_MONOTONIC` at the start of a simulation, in nanoseconds. Not zero, since programs subtract.
const ORIGIN: u64 = 1_000_000 * 1_000_000_000;

/// True while a simulation runs in this process.
static ACTIVE: AtomicBool = AtomicBool::new(false);
/// Newest simulated `CLOCK_MONOTONIC`, in nanoseconds.
static NOW: AtomicU64 = AtomicU64::new(ORIGIN);
/// Sum of the steps of the wall clock, in nanoseconds.
static STEPS: AtomicI64 = AtomicI64::new(0);
/// State of the random numbers.
static WORD: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The current async runtime's first instant, and its simulated time.
    static RUNTIME: Cell<Option<(tokio::time::Instant, u64)>> = const { Cell::new(None) };
    /// True while a reading is in progress: tokio's clock reads the system's.
    static READING: Cell<bool> = const { Cell::new(false) };
}

/// Begins a simulation. All random numbers follow from `seed`.
pub(crate) fn begin(seed: u64) {
    NOW.store(ORIGIN, Ordering::SeqCst);
    STEPS.store(0, Ordering::SeqCst);
    WORD.store(seed, Ordering::SeqCst);
    ACTIVE.store(true, Ordering::SeqCst);
}

/// Ends the simulation.
pub(crate) fn end() {
    ACTIVE.store(false, Ordering::SeqCst);
}

/// Follows the paused clock of the async runtime that runs this function.
pub(crate) fn follow_runtime() {
    let origin = tokio::time::Instant::now();
    RUNTIME.set(Some((origin, NOW.load(Ordering::SeqCst))));
}

/// Ends [`follow_runtime`]: time stands still.
pub(crate) fn leave_runtime() {
    now();
    RUNTIME.set(None);
}

/// Returns the time since the start of the simulation.
pub(crate) fn elapsed() -> Duration {
    Duration::from_nanos(now() - ORIGIN)
}

/// Returns the simulated `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn now() -> u64 {
    let last = NOW.load(Ordering::SeqCst);
    let Some((origin, base)) = RUNTIME.get() else { return last };
    if READING.replace(true) {
        return last;
    }
    let passed = tokio::time::Instant::now().saturating_duration_since(origin);
    READING.set(false);
    let now = base.saturating_add(u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX)).max(last);
    NOW.store(now, Ordering::SeqCst);
    now
}

/// Steps the wall clock by these seconds, as an administrator or an NTP client does. Other clocks continue.
pub(crate) fn step_wall_clock(seconds: i64) {
    STEPS.fetch_add(seconds.saturating_mul(1_000_000_000), Ordering::SeqCst);
}

/// Returns the next random number (SplitMix64, Steele et al. 2014).
fn word() -> u64 {
    let mut word =
        WORD.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::SeqCst).wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

fn simulated(clock: libc::clockid_t) -> Option<u64> {
    if !ACTIVE.load(Ordering::SeqCst) {
        return None;
    }
    match clock {
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE => {
            Some((EPOCH + (now() - ORIGIN)).saturating_add_signed(STEPS.load(Ordering::SeqCst)))
        }
        libc::CLOCK_MONOTONIC
        | libc::CLOCK_MONOTONIC_RAW
        | libc::CLOCK_MONOTONIC_COARSE
        | libc::CLOCK_BOOTTIME => Some(now()),
        _ => None,
    }
}

/// Replaces the C library's function.
///
/// # Safety
/// `time` points to a writable timespec, as the C function requires.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn clock_gettime(
    clock: libc::clockid_t,
    time: *mut libc::timespec,
) -> libc::c_int {
    let Some(now) = simulated(clock) else {
        // SAFETY: the arguments are the caller's, and the system call has the function's own contract.
        let result = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
        return libc::c_int::try_from(result).unwrap_or(-1);
    };
    let seconds = libc::time_t::try_from(now / 1_000_000_000).unwrap_or(libc::time_t::MAX);
    let nanos = libc::c_long::try_from(now % 1_000_000_000).unwrap_or(0);
    // SAFETY: the caller passes a writable timespec.
    unsafe { time.write(libc::timespec { tv_sec: seconds, tv_nsec: nanos }) };
    0
}

/// Replaces the C library's function.
///
/// # Safety
/// `buffer` points to `length` writable bytes, as the C function requires.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, flags: libc::c_uint) -> isize {
    if !ACTIVE.load(Ordering::SeqCst) {
        // SAFETY: the arguments are the caller's, and the system call has the function's own contract.
        let result = unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) };
        return isize::try_from(result).unwrap_or(-1);
    }
    // SAFETY: the caller passes `length` writable bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buffer, length) };
    for chunk in bytes.chunks_mut(8) {
        let word = word().to_le_bytes();
        chunk.iter_mut().zip(word).for_each(|(byte, random)| *byte = random);
    }
    isize::try_from(length).unwrap_or(isize::MAX)
}
