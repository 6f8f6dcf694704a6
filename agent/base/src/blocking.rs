//! Runs blocking work off the async threads, or in a simulation as a task of the simulation's thread
//! ([`crate::simulation`]). No panic is lost: a panic in the work resumes in the waiting
//! task, and ends the caller: a part, and with it the agent (`node/tasks`), or one pod's worker.

use std::any::Any;
use std::future::pending;
use std::panic::resume_unwind;

use tokio::task::{JoinError, JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::simulation;

/// Starts `work` on a thread that may block. The handle returns its result or its panic.
pub fn spawn_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    if simulation::is_on() { tokio::spawn(async { work() }) } else { tokio::task::spawn_blocking(work) }
}

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

/// The blocking work of one owner, such as a pod. Each piece runs to its end, also after the task that waited
/// for it is gone. Clones belong to the same owner.
#[derive(Clone, Debug)]
pub struct BlockingTasks(TaskTracker);

impl Default for BlockingTasks {
    fn default() -> Self {
        let tracker = TaskTracker::new();
        // A closed tracker still takes work, and only a closed one can be waited for.
        tracker.close();
        Self(tracker)
    }
}

impl BlockingTasks {
    /// Runs `work` on a thread that may block, and waits for it. If `work` panics, so does the caller.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let work = match simulation::is_on() {
            true => self.0.spawn(async { work() }),
            false => self.0.spawn_blocking(work),
        };
        joined("a pod's chore", work.await).await
    }

    /// Runs `work` in the same way, with a token that is cancelled once the caller waits no longer.
    pub async fn run_until<T: Send + 'static>(
        &self,
        work: impl FnOnce(&CancellationToken) -> T + Send + 'static,
    ) -> T {
        let stop = CancellationToken::new();
        let _dropped_with_the_wait = stop.clone().drop_guard();
        self.run(move || work(&stop)).await
    }

    /// Waits until all work that was begun has ended.
    pub async fn done(&self) {
        self.0.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn abandoned_work_is_asked_to_stop_and_runs_to_its_end() {
        let (tasks, (began, begun)) = (BlockingTasks::default(), tokio::sync::oneshot::channel());
        let work = tasks.run_until(move |stop| {
            let _ = began.send(());
            while !stop.is_cancelled() {
                std::thread::yield_now();
            }
        });
        tokio::select! {
            () = work => panic!("the work ended by itself"),
            begun = begun => begun.unwrap(),
        }
        tokio::time::timeout(Duration::from_mins(1), tasks.done()).await.expect("the work goes on");
        assert!(!tasks.run_until(CancellationToken::is_cancelled).await);
    }

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
