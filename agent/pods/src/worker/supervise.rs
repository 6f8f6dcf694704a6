//! A worker that panics hurts only its pod, and only for a moment: it is started again, and finds the pod as
//! it is.

use std::{panic::AssertUnwindSafe, time::Duration};

use futures::FutureExt;
use tokio::time::{Instant, sleep};
use tracing::error;

/// The pause before the first new start; it doubles up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause, and how long one must have run for its panics to be forgotten.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Runs what `start` makes until one ends by itself. `what` names it in the log.
pub(super) async fn keep<F: Future<Output = ()>>(what: &str, mut start: impl FnMut() -> F) {
    let mut pause = PAUSE;
    loop {
        let began = Instant::now();
        let Err(panic) = AssertUnwindSafe(start()).catch_unwind().await else { return };
        let said = panic.downcast_ref::<&str>().copied().map(str::to_owned);
        let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        if began.elapsed() >= PAUSE_MAX {
            pause = PAUSE;
        }
        error!(
            pod = what,
            said,
            restart_in_seconds = pause.as_secs(),
            "a pod's worker panicked; this is a bug, please report it with the lines before"
        );
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_panics_is_started_again_until_it_ends() {
        let starts = AtomicUsize::new(0);
        let began = Instant::now();
        keep("default/web", || async {
            assert!(starts.fetch_add(1, Ordering::SeqCst) >= 3, "not yet");
        })
        .await;
        assert_eq!(starts.load(Ordering::SeqCst), 4);
        assert_eq!(began.elapsed(), Duration::from_secs(1 + 2 + 4));
    }
}
