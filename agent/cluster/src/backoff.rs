//! Back-off between attempts of a request: doubled each time up to a bound, with jitter so that nodes don't
//! retry at the same moment.

use std::time::Duration;

pub(crate) use beelet_base::chance::{chance, random};
use tokio::time::sleep;

use crate::error::Error;

/// Pause below which a refusal is inconclusive: about a second has passed since the first.
const EARLY: Duration = Duration::from_millis(800);

/// The pauses of one series of failures.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    next: Duration,
    least: Duration,
    most: Duration,
}

impl Default for Backoff {
    /// Returns the pauses of requests whose failure delays nothing else.
    fn default() -> Self {
        Self::new(Duration::from_millis(500), Duration::from_secs(30))
    }
}

impl Backoff {
    /// Sets the first and the longest pause, before jitter of up to half the pause is added.
    pub(crate) fn new(least: Duration, most: Duration) -> Self {
        Self { next: least, least, most }
    }

    /// Forgets earlier failures.
    pub(crate) fn reset(&mut self) {
        self.next = self.least;
    }

    /// Returns the next pause: at least the time that the server asks for, up to the longest pause.
    pub(crate) fn next(&mut self, asked: Option<Duration>) -> Duration {
        let pause = jittered(self.next);
        self.next = (self.next * 2).min(self.most);
        // Nodes that the server asks to wait for the same time must not return together.
        pause.max(
            asked.map(|asked| asked.min(self.most) + jittered(self.least) - self.least).unwrap_or_default(),
        )
    }

    /// Waits for the next pause.
    pub(crate) async fn wait(&mut self, asked: Option<Duration>) {
        sleep(self.next(asked)).await;
    }
}

/// The pauses of the requests for one pod. Refusals have a separate series with a shorter first pause: the
/// API server's authorizer learns a node's pods through a watch of its own, often a moment after the node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pauses {
    usual: Backoff,
    refused: Backoff,
}

impl Default for Pauses {
    fn default() -> Self {
        let refused = Backoff::new(Duration::from_millis(50), Duration::from_secs(30));
        Self { usual: Backoff::default(), refused }
    }
}

impl Pauses {
    /// Forgets earlier failures.
    pub(crate) fn reset(&mut self) {
        self.usual.reset();
        self.refused.reset();
    }

    /// Returns the series to which an error belongs.
    pub(crate) fn of(&mut self, error: &Error) -> &mut Backoff {
        if error.is_refusal() { &mut self.refused } else { &mut self.usual }
    }

    /// Returns true for a refusal that needs no warning because the next attempt may succeed. In a run of
    /// Kubernetes' suite the authorizer knew one object in five up to 0.3 s later than the node did.
    pub(crate) fn may_be_early(&self, error: &Error) -> bool {
        error.is_refusal() && self.refused.next < EARLY
    }

    /// Waits for the next pause of the usual series.
    pub(crate) async fn wait(&mut self) {
        self.usual.wait(None).await;
    }
}

/// Returns a random duration between `time` and 1.5 times `time`.
pub(crate) fn jittered(time: Duration) -> Duration {
    time + time.mul_f64(random() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn pauses_grow_to_a_bound_and_start_over_after_a_reset() {
        let mut backoff = Backoff::new(SECOND, SECOND * 4);
        for least in [1, 2, 4, 4] {
            let pause = backoff.next(None);
            assert!((SECOND * least..=SECOND * least * 3 / 2).contains(&pause), "{pause:?}");
        }
        backoff.reset();
        assert!(backoff.next(None) <= SECOND * 3 / 2);
    }

    #[test]
    fn a_refusal_is_soon_asked_again_and_says_nothing_of_other_failures() {
        let error = |code| Error {
            request: "GET /".to_owned(),
            kind: Kind::Status { code, retry_after: None },
            message: String::new(),
        };
        let mut pauses = Pauses::default();
        for least in [50, 100, 200, 400] {
            assert!(pauses.may_be_early(&error(403)) && !pauses.may_be_early(&error(500)), "{least}");
            let pause = pauses.of(&error(403)).next(None);
            assert!(pause <= Duration::from_millis(least * 3 / 2), "{pause:?}");
        }
        assert!(!pauses.may_be_early(&error(403)), "the fifth in a row");
        assert!(pauses.of(&error(500)).next(None) < SECOND, "the first of its kind");
        assert!(pauses.of(&error(500)).next(None) >= SECOND);
        pauses.reset();
        assert!(pauses.of(&error(403)).next(None) < SECOND / 10);
    }

    #[test]
    fn a_server_that_asks_for_time_gets_it_within_reason() {
        assert!(Backoff::default().next(Some(7 * SECOND)) >= 7 * SECOND);
        assert!(Backoff::new(SECOND, SECOND * 4).next(Some(86_400 * SECOND)) <= SECOND * 5);
    }
}
