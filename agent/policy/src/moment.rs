//! Times of a clock that nobody sets, for what is a length: grace periods, delays, how long something has lasted.
//!
//! The wall's clock is set by people and by NTP, by hours at a time. What was measured with it would be over too soon, or
//! never.

use std::time::Duration;

/// A time on a clock that only goes forward, since a beginning that its owner chose. Moments of two clocks say nothing
/// of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(Duration);

impl Moment {
    /// So long after the clock's beginning.
    #[must_use]
    pub const fn after_start(time: Duration) -> Self {
        Self(time)
    }

    /// So much later; the end of all times if there is no such moment.
    #[must_use]
    pub const fn plus(self, length: Duration) -> Self {
        Self(self.0.saturating_add(length))
    }

    /// So much earlier, but not before the clock's beginning.
    #[must_use]
    pub const fn minus(self, length: Duration) -> Self {
        Self(self.0.saturating_sub(length))
    }

    /// How long it is since `earlier`; nothing if that is yet to come.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}
