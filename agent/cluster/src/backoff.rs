//! How long to wait before a request is tried again: each time twice as long, up to a bound, and never two
//! nodes at the same moment.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use tokio::time::sleep;

/// The first pause, on average, and the longest.
const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(30);

/// The pauses of one series of failures.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Forgets earlier failures.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    /// The next pause: between half of it and one and a half, and never shorter than the server asks for.
    pub(crate) fn next(&mut self, asked: Option<Duration>) -> Duration {
        let pause = FIRST.saturating_mul(1 << self.failures.min(10)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        spread(pause).max(asked.map(|asked| asked.min(LONGEST) + spread(FIRST)).unwrap_or_default())
    }

    /// Waits for the next pause.
    pub(crate) async fn wait(&mut self, asked: Option<Duration>) {
        sleep(self.next(asked)).await;
    }
}

/// Between half and one and a half times as long.
pub(crate) fn spread(pause: Duration) -> Duration {
    pause / 2 + pause / 255 * u32::from(chance())
}

/// Any of 256 numbers.
pub(crate) fn chance() -> u8 {
    // Each state has keys of its own.
    RandomState::new().hash_one(0_u8).to_le_bytes()[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_begin_anew() {
        let mut backoff = Backoff::default();
        let check = |pause: Duration, about: Duration| {
            assert!(pause >= about / 2 && pause <= about / 2 * 3, "{pause:?} is not about {about:?}");
        };
        for seconds in [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] {
            check(backoff.next(None), Duration::from_secs_f64(seconds));
        }
        backoff.reset();
        check(backoff.next(None), FIRST);
    }

    #[test]
    fn a_server_that_asks_for_time_gets_it_within_reason() {
        let second = Duration::from_secs(1);
        assert!(Backoff::default().next(Some(7 * second)) >= 7 * second);
        assert!(Backoff::default().next(Some(86_400 * second)) <= LONGEST + 2 * FIRST);
    }
}
