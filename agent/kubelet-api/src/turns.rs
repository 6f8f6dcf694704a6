//! Limits on concurrent reviews by the API server. Previously authenticated clients have permits that no
//! stranger takes, and each source of strangers has a few: random tokens do not block valid ones.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use beelet_base::room::Source;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// Concurrent reviews of previously authenticated clients, and of all others.
const KNOWN: usize = 16;
const STRANGERS: usize = 16;
/// Concurrent reviews per source of strangers.
const OF_SOURCE: usize = 4;

/// Client of a review.
#[derive(Clone, Copy, Debug)]
pub(crate) enum For {
    /// A client that the same review authenticated before.
    Known,
    /// Any client from this source.
    Stranger(Source),
}

pub(crate) struct Turns {
    known: Semaphore,
    strangers: Semaphore,
    of_source: Mutex<HashMap<Source, Weak<Semaphore>>>,
}

/// A permit, held until dropped.
pub(crate) struct Turn<'a> {
    _turn: Option<SemaphorePermit<'a>>,
    _of_source: Option<OwnedSemaphorePermit>,
}

impl Turns {
    pub(crate) fn new() -> Self {
        Self {
            known: Semaphore::new(KNOWN),
            strangers: Semaphore::new(STRANGERS),
            of_source: Mutex::default(),
        }
    }

    /// Waits for a permit.
    pub(crate) async fn acquire(&self, who: For) -> Turn<'_> {
        match who {
            For::Known => Turn { _turn: self.known.acquire().await.ok(), _of_source: None },
            For::Stranger(source) => {
                let own = self.of_source(source).acquire_owned().await.ok();
                Turn { _turn: self.strangers.acquire().await.ok(), _of_source: own }
            }
        }
    }

    fn of_source(&self, source: Source) -> Arc<Semaphore> {
        let mut all = self.of_source.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = all.get(&source).and_then(Weak::upgrade) {
            return own;
        }
        all.retain(|_, own| own.strong_count() > 0);
        let own = Arc::new(Semaphore::new(OF_SOURCE));
        all.insert(source, Arc::downgrade(&own));
        own
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn source(last: u8) -> For {
        For::Stranger(Source::of([10, 0, 0, last].into()))
    }

    #[tokio::test]
    async fn a_source_has_a_few_turns_and_strangers_leave_those_of_the_known() {
        let turns = Turns::new();
        let take = |who: For| turns.acquire(who).now_or_never();
        let own: Vec<_> = (0..OF_SOURCE).map(|_| take(source(1)).unwrap()).collect();
        assert!(take(source(1)).is_none());
        let others: Vec<_> =
            (0..STRANGERS - OF_SOURCE).map(|n| take(source(2 + (n / OF_SOURCE) as u8)).unwrap()).collect();
        assert!(take(source(99)).is_none());
        let known: Vec<_> = (0..KNOWN).map(|_| take(For::Known).unwrap()).collect();
        assert!(take(For::Known).is_none());
        drop(own);
        assert!(take(source(99)).is_some());
        drop((others, known));
        assert!(take(source(1)).is_some());
        let all = turns.of_source.lock().unwrap();
        assert!(all.len() <= 2, "idle sources are dropped: {}", all.len());
    }
}
