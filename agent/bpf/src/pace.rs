//! Bounds on the work and the log lines that other processes can cause in the reader of the ring. Any process
//! of the machine can wake the reader with listen() and close(), and make it read all maps again with more
//! listeners than the maps hold. Events during a pause wait in the ring or in the maps; none is lost
//! permanently.

use std::time::{Duration, Instant};

/// Wake-ups within a second without a pause: more than any node's pods cause.
const FREE_WAKES: u32 = 1000;
/// Pause after each further wake-up. The pause limits them to a thousand more per second, and delays edges by
/// at most this time.
pub(super) const PAUSE: Duration = Duration::from_millis(1);
/// Minimum time between two readings of the maps because of losses.
pub(super) const LOSS_PERIOD: Duration = Duration::from_secs(5);
/// Minimum time between two warnings about losses, which last as long as a storm does.
pub(super) const WARNING_PERIOD: Duration = Duration::from_secs(60);

/// Counts wake-ups.
#[derive(Debug, Default)]
pub(super) struct Wakes {
    since: Option<Instant>,
    count: u32,
}

impl Wakes {
    /// Counts a wake-up. Returns true if the next one must wait for a [`PAUSE`].
    pub(super) fn are_too_many(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= Duration::from_secs(1)) {
            (self.since, self.count) = (Some(now), 0);
        }
        self.count = self.count.saturating_add(1);
        self.count > FREE_WAKES
    }
}

/// Limits an action to once per period.
#[derive(Debug)]
pub(super) struct RateLimit {
    period: Duration,
    last: Option<Instant>,
}

impl RateLimit {
    pub(super) fn new(period: Duration) -> RateLimit {
        RateLimit { period, last: None }
    }

    /// Returns true if the action is allowed now, and records it as done.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.next().is_none_or(|next| next <= now);
        if is_due {
            self.last = Some(now);
        }
        is_due
    }

    /// Returns the time of the next allowed action; `None` if it is allowed at once.
    pub(super) fn next(&self) -> Option<Instant> {
        self.last.and_then(|last| last.checked_add(self.period))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_is_slowed_down_and_normal_load_is_not() {
        let (start, mut wakes) = (Instant::now(), Wakes::default());
        let at = |ms: u64| start + Duration::from_millis(ms);
        // A wake-up each millisecond, forever.
        assert!((0..10_000).all(|ms| !wakes.are_too_many(at(ms))));
        // A thousand in an instant, and the next of the same second.
        assert!((0..FREE_WAKES).all(|_| !wakes.are_too_many(at(20_000))));
        assert!(wakes.are_too_many(at(20_000)) && wakes.are_too_many(at(20_999)));
        assert!(!wakes.are_too_many(at(21_000)));
    }

    #[test]
    fn a_first_loss_is_due_at_once_and_the_next_ones_together() {
        let (start, mut losses) = (Instant::now(), RateLimit::new(LOSS_PERIOD));
        assert!(losses.next().is_none() && losses.is_due(start));
        assert!(!losses.is_due(start + LOSS_PERIOD / 2));
        assert_eq!(losses.next(), Some(start + LOSS_PERIOD));
        assert!(losses.is_due(start + LOSS_PERIOD) && !losses.is_due(start + LOSS_PERIOD));
        // As long as a storm goes on, losses are handled each time and a line is logged once per minute.
        let (mut losses, mut warnings) = (RateLimit::new(LOSS_PERIOD), RateLimit::new(WARNING_PERIOD));
        let ten_minutes = (0..1200).map(|half| start + half * Duration::from_millis(500));
        let handled: Vec<Instant> = ten_minutes.filter(|now| losses.is_due(*now)).collect();
        let logged = handled.iter().filter(|now| warnings.is_due(**now)).count();
        assert_eq!((handled.len(), logged), (120, 10));
    }
}
