//! How much work others can make for the reader of the ring. Any process of the machine makes it wake up by
//! listen() and close(), and look at everything again by more listeners than the maps hold. Both have a bound
//! here; what comes meanwhile waits in the ring or in the maps, and none of it is lost for good.

use std::time::{Duration, Instant};

/// Wake-ups within a second that cost no pause: more than any node's pods cause.
const FREE_WAKES: u32 = 1000;
/// The pause between two of those that come on top. The ring holds the events of a hundred thousand sockets a
/// second for as long as that.
pub(super) const PAUSE: Duration = Duration::from_millis(10);
/// Between two times at which losses are told and made up for.
pub(super) const LOSS_PERIOD: Duration = Duration::from_secs(5);

/// Counts wake-ups.
#[derive(Debug, Default)]
pub(super) struct Wakes {
    since: Option<Instant>,
    count: u32,
}

impl Wakes {
    /// Notes one. Whether the next must wait for a [`PAUSE`].
    pub(super) fn are_too_many(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= Duration::from_secs(1)) {
            (self.since, self.count) = (Some(now), 0);
        }
        self.count = self.count.saturating_add(1);
        self.count > FREE_WAKES
    }
}

/// Something that may be done once in a while.
#[derive(Debug, Default)]
pub(super) struct Seldom {
    last: Option<Instant>,
}

impl Seldom {
    /// Whether it may be done now; then it is noted as done.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.next().is_none_or(|next| next <= now);
        if is_due {
            self.last = Some(now);
        }
        is_due
    }

    /// When it may be done again; None: at once.
    pub(super) fn next(&self) -> Option<Instant> {
        self.last.map(|last| last + LOSS_PERIOD)
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
    fn a_first_loss_is_told_at_once_and_the_next_ones_together() {
        let (start, mut losses) = (Instant::now(), Seldom::default());
        assert!(losses.next().is_none() && losses.is_due(start));
        assert!(!losses.is_due(start + LOSS_PERIOD / 2));
        assert_eq!(losses.next(), Some(start + LOSS_PERIOD));
        assert!(losses.is_due(start + LOSS_PERIOD) && !losses.is_due(start + LOSS_PERIOD));
    }
}
