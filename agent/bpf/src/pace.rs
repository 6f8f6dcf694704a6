//! Bounds of the work, and of the log lines, that others can cause in the reader of the ring. Any process of
//! the machine makes it wake up by listen() and close(), and read all maps again by more listeners than they
//! hold. What comes meanwhile waits in the ring or in the maps, and none of it is lost for good.

use std::time::{Duration, Instant};

/// Wake-ups within a second that cost no pause: more than any node's pods cause.
const FREE_WAKES: u32 = 1000;
/// The pause between two of those that come on top. They are a thousand more per second at most, and what
/// comes meanwhile is late by this much.
pub(super) const PAUSE: Duration = Duration::from_millis(1);
/// The time between two readings of the maps for losses.
pub(super) const LOSS_PERIOD: Duration = Duration::from_secs(5);
/// The time between two warnings of losses, which may go on for as long as a storm does.
pub(super) const WARNING_PERIOD: Duration = Duration::from_secs(60);

/// Counts wake-ups.
#[derive(Debug, Default)]
pub(super) struct Wakes {
    since: Option<Instant>,
    count: u32,
}

impl Wakes {
    /// Counts one. Returns true if the next must wait for a [`PAUSE`].
    pub(super) fn are_too_many(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= Duration::from_secs(1)) {
            (self.since, self.count) = (Some(now), 0);
        }
        self.count = self.count.saturating_add(1);
        self.count > FREE_WAKES
    }
}

/// Something that may be done once per period.
#[derive(Debug)]
pub(super) struct RateLimit {
    period: Duration,
    last: Option<Instant>,
}

impl RateLimit {
    pub(super) fn new(period: Duration) -> RateLimit {
        RateLimit { period, last: None }
    }

    /// Returns true if it may be done now, and records it as done.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.next().is_none_or(|next| next <= now);
        if is_due {
            self.last = Some(now);
        }
        is_due
    }

    /// When it may be done again; None: at once.
    pub(super) fn next(&self) -> Option<Instant> {
        self.last.and_then(|last| last.checked_add(self.period))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_is_slowed_down_and_what_a_node_does_is_not() {
        let (start, mut wakes) = (Instant::now(), Wakes::default());
        let at = |ms: u64| start + Duration::from_millis(ms);
        // Each millisecond one, for ever.
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
