//! Clocks that cannot be set: the monotonic clock that both halves share, the boot clock, which also runs
//! while the machine sleeps, and a thread's CPU clock. In a simulation the first two follow its clock. Also
//! sums of a time and a duration that never overflow.

use std::time::Duration;

use beelet_units::bounds::FAR;
use jiff::{SignedDuration, Timestamp};
use rustix::time::{ClockId, clock_gettime};

use crate::simulation;

/// Sums of a time and a duration that never panic.
///
/// `+` panics if the sum exceeds the type's range, and that ends the agent. Durations that are not constants
/// must be added with this trait (checked by `cargo xtask tidy`).
pub trait After: Copy {
    /// Returns the time `length` later. A length above [`FAR`] counts as [`FAR`]; beyond the type's range,
    /// the result saturates.
    #[must_use]
    fn after(self, length: Duration) -> Self;
}

impl After for std::time::Instant {
    fn after(self, length: Duration) -> Self {
        self.checked_add(length.min(FAR)).unwrap_or(self)
    }
}

impl After for tokio::time::Instant {
    fn after(self, length: Duration) -> Self {
        self.checked_add(length.min(FAR)).unwrap_or(self)
    }
}

impl After for Timestamp {
    fn after(self, length: Duration) -> Self {
        self.checked_add(length.min(FAR)).unwrap_or(Self::MAX)
    }
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds, as `bpf_ktime_get_ns` does in the kernel.
pub fn monotonic_ns() -> u64 {
    u64::try_from(read(ClockId::Monotonic).as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the time since boot, including the time that the machine slept (`CLOCK_BOOTTIME`).
#[must_use]
pub fn since_boot() -> Duration {
    read(ClockId::Boottime)
}

fn read(clock: ClockId) -> Duration {
    simulation::since_boot().unwrap_or_else(|| {
        let now = clock_gettime(clock);
        Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
    })
}

/// Returns this thread's CPU time (`CLOCK_THREAD_CPUTIME_ID`).
pub fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}

/// Minimum difference that counts as setting the wall clock. Smaller differences come from slewing and from
/// the time between the two readings.
const SET: Duration = Duration::from_secs(1);

/// Detects a step of the wall clock: a difference to the time since boot.
#[derive(Debug, Default)]
pub struct WallClock {
    before: Option<(Timestamp, Duration)>,
}

impl WallClock {
    /// Returns the clock's step since the last call; zero at first.
    pub fn step(&mut self, now: Timestamp) -> SignedDuration {
        self.step_at(now, since_boot())
    }

    fn step_at(&mut self, now: Timestamp, since_boot: Duration) -> SignedDuration {
        let Some((wall, boot)) = self.before.replace((now, since_boot)) else { return SignedDuration::ZERO };
        let passed = SignedDuration::try_from(since_boot.saturating_sub(boot)).unwrap_or(SignedDuration::MAX);
        let step = now.duration_since(wall).saturating_sub(passed);
        if step.unsigned_abs() < SET { SignedDuration::ZERO } else { step }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_of_a_time_and_a_length_never_overflows() {
        let (std, tokio, wall) = (std::time::Instant::now(), tokio::time::Instant::now(), Timestamp::now());
        for length in [0, 1, FAR.as_secs(), 1_000_000_000_000, i64::MAX.unsigned_abs(), u64::MAX] {
            let length = Duration::from_secs(length);
            let expected = length.min(FAR);
            assert_eq!(std.after(length) - std, expected);
            assert_eq!(tokio.after(length) - tokio, expected);
            assert_eq!(wall.after(length).duration_since(wall).unsigned_abs(), expected);
        }
        assert_eq!(Timestamp::MAX.after(Duration::MAX), Timestamp::MAX);
        // Also when repeated: the last time saturates.
        let mut late = std;
        for _ in 0..100_000 {
            late = late.after(Duration::MAX);
        }
        assert!(late > std);
    }

    #[test]
    fn a_step_of_the_wall_clock_is_a_difference_to_the_time_since_boot() {
        let (mut clock, mut boot) = (WallClock::default(), 0);
        let mut step = |wall_ms: i64, passed_ms: u64| {
            boot += passed_ms;
            let now = Timestamp::from_millisecond(1_700_000_000_000 + wall_ms).unwrap();
            clock.step_at(now, Duration::from_millis(boot)).as_millis()
        };
        assert_eq!(step(0, 0), 0);
        assert_eq!(step(300_000, 300_000), 0);
        assert_eq!(step(600_900, 300_000), 0);
        assert_eq!(step(4_500_900, 300_000), 3_600_000);
        assert_eq!(step(1_200_900, 300_000), -3_600_000);
        assert_eq!(WallClock::default().step(Timestamp::now()), SignedDuration::ZERO);
    }
}
