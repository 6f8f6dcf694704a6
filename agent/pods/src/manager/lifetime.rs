//! The active time of a pod, for its deadline.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

/// Active time of a pod. The status has the start by the wall clock, which may be set; after the first
/// reading of the status, the monotonic clock measures the time.
#[derive(Debug)]
pub(super) struct Lifetime {
    pub(super) start: Timestamp,
    seen: Instant,
    /// Age at the first reading.
    age: Duration,
}

impl Lifetime {
    /// Returns the lifetime of a pod that started at `start`; the current wall clock time is `now`.
    pub(super) fn new(start: Timestamp, now: Timestamp) -> Self {
        let age = Duration::try_from(now.duration_since(start)).unwrap_or(Duration::ZERO);
        Self { start, seen: Instant::now(), age }
    }

    /// Returns the deadline of a pod with this limit of active time, or None if the deadline is out of range.
    pub(super) fn end(&self, limit: Duration) -> Option<Instant> {
        self.seen.checked_add(limit.saturating_sub(self.age))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_deadline_counts_from_the_start_and_never_by_a_clock_that_was_set_back() {
        let start = Timestamp::from_second(1_700_000_000).unwrap();
        let (second, now) = (Duration::from_secs(1), Instant::now());
        let end = |ago: i64, limit: Duration| {
            Lifetime::new(start, Timestamp::from_second(1_700_000_000 + ago).unwrap()).end(limit)
        };
        assert_eq!(end(20, 60 * second), Some(now + 40 * second));
        assert_eq!(end(90, 60 * second), Some(now));
        assert_eq!(end(-3600, 60 * second), Some(now + 60 * second));
        assert_eq!(end(0, Duration::MAX), None);
    }
}
