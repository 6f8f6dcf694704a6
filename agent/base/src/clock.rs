//! Clocks that nobody sets: the one that both halves share, the one that goes on while the machine sleeps,
//! and a thread's own. And sums of a time and a length, which never overflow.

use std::time::Duration;

use beelet_units::bounds::FAR;
use jiff::{SignedDuration, Timestamp};
use rustix::time::{ClockId, clock_gettime};

/// Sums of a time and a length that never panic.
///
/// `+` panics where the sum is beyond what the type holds, and that ends the agent. A length that is no
/// constant is added by this alone (`cargo xtask tidy`).
pub trait After: Copy {
    /// The time of so much later. More than [`FAR`] counts as that; the last time that there is stays itself.
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

/// `CLOCK_MONOTONIC` in nanoseconds, as `bpf_ktime_get_ns` gives it in the kernel.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// How long this thread has had a processor (`CLOCK_THREAD_CPUTIME_ID`).
pub fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}

/// The least difference that says that the wall's clock was set. Less is how it is slewed, and how long
/// looking takes.
const SET: Duration = Duration::from_secs(1);

/// Notices that the wall's clock was set: it goes another way than the time since boot.
#[derive(Debug, Default)]
pub struct WallClock {
    before: Option<(Timestamp, Duration)>,
}

impl WallClock {
    /// By how much the clock was set since this was last asked; zero at first.
    pub fn step(&mut self, now: Timestamp) -> SignedDuration {
        let boot = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(boot.tv_sec).unwrap_or(0);
        self.step_at(now, Duration::new(seconds, u32::try_from(boot.tv_nsec).unwrap_or(0)))
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
        // However often: the last time stays itself.
        let mut late = std;
        for _ in 0..100_000 {
            late = late.after(Duration::MAX);
        }
        assert!(late > std);
    }

    #[test]
    fn a_clock_that_was_set_goes_another_way_than_the_time_since_boot() {
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
