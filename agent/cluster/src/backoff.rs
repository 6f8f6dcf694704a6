//! How long to wait before a request is tried again: each time twice as long, up to a bound, and never two
//! nodes at the same moment.

use std::time::Duration;

pub(crate) use beelet_base::chance::{chance, random};
use tokio::time::sleep;

use crate::error::Error;

/// A refusal whose pauses are still below this says nothing yet: about a second has passed since the first.
const EARLY: Duration = Duration::from_millis(800);

/// The pauses of one series of failures.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    next: Duration,
    least: Duration,
    most: Duration,
}

impl Default for Backoff {
    /// Of requests whose failure holds nothing else up.
    fn default() -> Self {
        Self::new(Duration::from_millis(500), Duration::from_secs(30))
    }
}

impl Backoff {
    /// The first pause and the longest, before chance makes them up to half as long again.
    pub(crate) fn new(least: Duration, most: Duration) -> Self {
        Self { next: least, least, most }
    }

    /// Forgets earlier failures.
    pub(crate) fn reset(&mut self) {
        self.next = self.least;
    }

    /// The next pause; within reason never shorter than the server asks for.
    pub(crate) fn next(&mut self, asked: Option<Duration>) -> Duration {
        let pause = jittered(self.next);
        self.next = (self.next * 2).min(self.most);
        // Whom the server asks for the same time must not come back together.
        pause.max(
            asked.map(|asked| asked.min(self.most) + jittered(self.least) - self.least).unwrap_or_default(),
        )
    }

    /// Waits for the next pause.
    pub(crate) async fn wait(&mut self, asked: Option<Duration>) {
        sleep(self.next(asked)).await;
    }
}

/// The pauses of what is asked for one pod: a refusal has a series of its own, which begins shorter. The API
/// server's authorizer learns by a watch of its own which pods a node has, often a moment after the node.
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

    /// The series that an error belongs to.
    pub(crate) fn of(&mut self, error: &Error) -> &mut Backoff {
        if error.is_refusal() { &mut self.refused } else { &mut self.usual }
    }

    /// Returns true for a refusal that the next try may well undo, of which nobody needs to be warned. In a
    /// run of Kubernetes' suite the authorizer knew one object in five up to 0.3 s later than the node did.
    pub(crate) fn may_be_early(&self, error: &Error) -> bool {
        error.is_refusal() && self.refused.next < EARLY
    }

    /// Waits for the next pause after something that was no error.
    pub(crate) async fn wait(&mut self) {
        self.usual.wait(None).await;
    }
}

/// From `time` to half as much again.
pub(crate) fn jittered(time: Duration) -> Duration {
    time + time.mul_f64(random() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn pauses_grow_to_a_bound_and_begin_anew() {
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
