//! Runs blocking work off the async threads. No panic is lost: a panic in the work resumes in the waiting
//! task, and ends the caller: a part, and with it the agent (`node/tasks`), or one pod's worker.

use std::any::Any;
use std::future::pending;
use std::panic::resume_unwind;

use tokio::task::{JoinError, spawn_blocking};

/// Runs `work` on a thread that may block, and waits for it. If `work` panics, so does the caller, with the
/// name before the panic's message.
pub async fn blocking<T: Send + 'static>(name: &'static str, work: impl FnOnce() -> T + Send + 'static) -> T {
    joined(name, spawn_blocking(work).await).await
}

/// Returns the result of spawned work. If the work panicked, so does the caller, as with [`blocking`].
/// Aborted work has no result: this function then never returns, as the runtime is shutting down.
pub async fn joined<T>(name: &'static str, ended: Result<T, JoinError>) -> T {
    match ended.map_err(JoinError::try_into_panic) {
        Ok(value) => value,
        Err(Ok(panic)) => resume_unwind(Box::new(format!("{name}: {}", message(&*panic)))),
        Err(Err(_aborted)) => pending().await,
    }
}

/// Returns the message of a panic.
#[must_use]
pub fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_resumes_in_the_waiting_task() {
        assert_eq!(blocking("adding", || 1 + 1).await, 2);
        let failed =
            tokio::spawn(blocking("listing folders", || -> u8 { std::panic::panic_any("index 7 of 3") }));
        let panic = failed.await.unwrap_err().into_panic();
        assert_eq!(message(&*panic), "listing folders: index 7 of 3");
        let failed = tokio::spawn(blocking("reading", || -> u8 { std::panic::panic_any(7) }));
        assert_eq!(message(&*failed.await.unwrap_err().into_panic()), "reading: no message");
    }
}
