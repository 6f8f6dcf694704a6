//! Work that may block, off the async threads. No panic in it is lost: it goes on in the task that waits for
//! the work, so that it ends what asked for it: a part, and with it the agent (`node/tasks`), or one pod's
//! worker.

use std::any::Any;
use std::future::pending;
use std::panic::resume_unwind;

use tokio::task::{JoinError, spawn_blocking};

/// Runs `work` on a thread that may block, and waits for it. If `work` panics, so does the caller, with the
/// name before what the panic said.
pub async fn blocking<T: Send + 'static>(name: &'static str, work: impl FnOnce() -> T + Send + 'static) -> T {
    joined(name, spawn_blocking(work).await).await
}

/// The result of work that was spawned elsewhere. If it panicked, so does the caller, as with [`blocking`].
/// Work that was aborted has no result: this never returns then, as the runtime is being shut down.
pub async fn joined<T>(name: &'static str, ended: Result<T, JoinError>) -> T {
    match ended.map_err(JoinError::try_into_panic) {
        Ok(value) => value,
        Err(Ok(panic)) => resume_unwind(Box::new(format!("{name}: {}", message(&*panic)))),
        Err(Err(_aborted)) => pending().await,
    }
}

/// The text of a panic.
#[must_use]
pub fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a word")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_goes_on_in_the_task_that_waits() {
        assert_eq!(blocking("adding", || 1 + 1).await, 2);
        let failed =
            tokio::spawn(blocking("listing folders", || -> u8 { std::panic::panic_any("index 7 of 3") }));
        let panic = failed.await.unwrap_err().into_panic();
        assert_eq!(message(&*panic), "listing folders: index 7 of 3");
        let failed = tokio::spawn(blocking("reading", || -> u8 { std::panic::panic_any(7) }));
        assert_eq!(message(&*failed.await.unwrap_err().into_panic()), "reading: without a word");
    }
}
