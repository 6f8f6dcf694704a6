//! Times of a monotonic clock, for lengths: grace periods, delays, ages.
//!
//! People and NTP set the wall clock, by hours at a time. A length measured with it would end too soon, or
//! never.

use std::time::Duration;

use jiff::Timestamp;

/// A time on a monotonic clock, since a beginning that the clock's owner chose. Moments of two clocks are not
/// comparable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(Duration);

impl Moment {
    /// Returns the moment this time after the clock's beginning.
    #[must_use]
    pub const fn after_start(time: Duration) -> Self {
        Self(time)
    }

    /// Converts a wall-clock time of a scenario, in which all times are of one clock that is never set.
    #[must_use]
    pub fn of_scenario(at: Timestamp) -> Self {
        let nanos = at.as_nanosecond().saturating_sub(Timestamp::MIN.as_nanosecond());
        let (seconds, nanos) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
        Self(Duration::new(u64::try_from(seconds).unwrap_or(0), u32::try_from(nanos).unwrap_or(0)))
    }

    /// Returns the moment `length` later, saturating.
    #[must_use]
    pub const fn plus(self, length: Duration) -> Self {
        Self(self.0.saturating_add(length))
    }

    /// Returns the moment `length` earlier, but not before the clock's beginning.
    #[must_use]
    pub const fn minus(self, length: Duration) -> Self {
        Self(self.0.saturating_sub(length))
    }

    /// Returns the time since `earlier`; zero if that is in the future.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scenarios_times_keep_their_distances() {
        let at = |text: &str| Moment::of_scenario(text.parse().unwrap());
        let (early, late) = (at("1901-01-01T00:00:00Z"), at("2026-11-21T12:00:00.000000007Z"));
        assert_eq!(at("2026-11-21T11:59:00Z").plus(Duration::new(60, 7)), late);
        assert_eq!(
            (early.since(late), late.since(late.minus(Duration::from_secs(5)))),
            (Duration::ZERO, Duration::from_secs(5))
        );
    }
}
