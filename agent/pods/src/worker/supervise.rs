//! Restarts a worker that panics. A panic affects only the worker's own pod; the new worker continues with
//! the pod's current state.

use std::{panic::AssertUnwindSafe, time::Duration};

use futures::FutureExt;
use tokio::time::{Instant, sleep};
use tracing::error;

/// Pause before the first restart. Each further panic doubles the pause, up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_secs(1);
/// Longest pause, and run time of a worker after which the pause starts from [`PAUSE`] again.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Runs the worker that `start` returns, and restarts it after a panic, until a worker ends. `pod` is the
/// pod's name in the log.
pub(super) async fn keep<F: Future<Output = ()>>(pod: &str, mut start: impl FnMut() -> F) {
    let mut pause = PAUSE;
    loop {
        let began = Instant::now();
        let Err(panic) = AssertUnwindSafe(start()).catch_unwind().await else { return };
        let message = panic.downcast_ref::<&str>().copied().map(str::to_owned);
        let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        if began.elapsed() >= PAUSE_MAX {
            pause = PAUSE;
        }
        error!(
            pod,
            panic = message,
            restart_in_seconds = pause.as_secs(),
            "pod worker panicked; this is a bug, please report it with the preceding log lines"
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
    async fn a_panicking_worker_is_restarted_until_it_ends() {
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
