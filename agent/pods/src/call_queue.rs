//! The queue of calls that create sandboxes and containers. At most [`StartLimit`] calls run concurrently:
//! the most urgent first and, among equally urgent ones, those of the pod that is closest to running. Of a
//! hundred pods applied together, the first then runs long before the last has a sandbox. Stops, pulls and
//! probes never wait in this queue; observations wait only for other observations.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use beelet_policy::pod::start_limit::{Call, StartLimit};
use tokio::{
    sync::{Semaphore, oneshot},
    time::{Instant, sleep},
};

/// Duration after which a call counts as hanging: its permit is released, and its duration is not recorded.
const HANGS: Duration = Duration::from_secs(10);
/// Most concurrent observations. An agent that starts on a node with thousands of pods observes each: too
/// many concurrent queries exceed their timeout and close the connection that they share.
const MAX_OBSERVATIONS: usize = 128;

/// Urgency of a call: the pod's priority, then restarts before first starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Urgency {
    priority: Reverse<i32>,
    is_new: bool,
}

impl Urgency {
    /// Returns the urgency for a pod with this priority. `again` is true for a restart.
    pub(crate) fn new(priority: i32, again: bool) -> Self {
        Self { priority: Reverse(priority), is_new: !again }
    }
}

/// Queue of calls, shared by clones.
#[derive(Clone, Debug)]
pub(crate) struct CallQueue {
    inner: Arc<Mutex<Inner>>,
    observations: Arc<Semaphore>,
}

impl Default for CallQueue {
    fn default() -> Self {
        Self { inner: Arc::default(), observations: Arc::new(Semaphore::new(MAX_OBSERVATIONS)) }
    }
}

#[derive(Debug, Default)]
struct Inner {
    limit: StartLimit,
    under_way: usize,
    /// Waiting calls, ordered by urgency, then by the call's position in a pod's start (later calls first),
    /// then by arrival.
    waiting: BTreeMap<(Urgency, Reverse<Call>, u64), oneshot::Sender<Permit>>,
    came: u64,
}

/// Permit for one call. Dropping the permit releases it.
#[derive(Debug)]
struct Permit {
    queue: CallQueue,
    /// Number of running calls when the call began, including the call itself.
    under_way: usize,
}

impl CallQueue {
    /// Executes a call once it has a permit. The large future of a call is boxed, so that the futures that
    /// wait for the call stay small.
    pub(crate) async fn call<T, E>(
        &self,
        urgency: Urgency,
        call: Call,
        work: Pin<Box<impl Future<Output = Result<T, E>>>>,
    ) -> Result<T, E> {
        let permit = self.permit(urgency, call).await;
        let began = Instant::now();
        let (made, permit) = holding(permit, work).await;
        if let Some(permit) = permit {
            self.with(|inner| inner.limit.learn(call, began.elapsed(), permit.under_way, made.is_err()));
        }
        made
    }

    /// Observes a pod once fewer than [`MAX_OBSERVATIONS`] other observations are running.
    pub(crate) async fn observe<T>(&self, observation: impl Future<Output = T>) -> T {
        // The semaphore is never closed.
        let permit = self.observations.acquire().await;
        holding(permit, observation).await.0
    }

    async fn permit(&self, urgency: Urgency, call: Call) -> Permit {
        let (sender, receiver) = oneshot::channel();
        self.with(|inner| {
            inner.came += 1;
            inner.waiting.insert((urgency, Reverse(call), inner.came), sender);
        });
        self.admit();
        // The sender is dropped only after it has sent a permit, or with the whole queue.
        match receiver.await {
            Ok(permit) => permit,
            Err(_) => std::future::pending().await,
        }
    }

    /// Grants permits to all calls that may begin now.
    fn admit(&self) {
        while let Some((sender, under_way)) = self.with(Inner::next) {
            // If the caller was cancelled in the meantime, the failed send drops and releases the permit.
            drop(sender.send(Permit { queue: self.clone(), under_way }));
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> T {
        work(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Runs work while holding a permit. Returns the permit, unless the work hung and the permit was released.
async fn holding<G, T>(permit: G, work: impl Future<Output = T>) -> (T, Option<G>) {
    let mut work = std::pin::pin!(work);
    tokio::select! {
        done = &mut work => (done, Some(permit)),
        () = sleep(HANGS) => {
            drop(permit);
            (work.await, None)
        }
    }
}

impl Inner {
    /// Returns the next call that may begin, with the number of running calls including it.
    fn next(&mut self) -> Option<(oneshot::Sender<Permit>, usize)> {
        while self.under_way < self.limit.calls() {
            let (_, sender) = self.waiting.pop_first()?;
            if !sender.is_closed() {
                self.under_way += 1;
                return Some((sender, self.under_way));
            }
        }
        None
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.queue.with(|inner| inner.under_way -= 1);
        self.queue.admit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc;

    /// Numbered calls, which report their begin and end on request.
    struct Calls {
        queue: CallQueue,
        begun: (mpsc::UnboundedSender<u32>, mpsc::UnboundedReceiver<u32>),
    }

    impl Calls {
        fn new() -> Self {
            Self { queue: CallQueue::default(), begun: mpsc::unbounded_channel() }
        }

        /// Starts a call that runs until the returned sender is used.
        fn call(&self, number: u32, urgency: Urgency) -> (tokio::task::JoinHandle<()>, oneshot::Sender<()>) {
            self.call_of(Call::RunSandbox, number, urgency)
        }

        fn call_of(
            &self,
            call: Call,
            number: u32,
            urgency: Urgency,
        ) -> (tokio::task::JoinHandle<()>, oneshot::Sender<()>) {
            let (queue, begun, (end, ended)) = (self.queue.clone(), self.begun.0.clone(), oneshot::channel());
            let work = async move {
                begun.send(number).unwrap();
                ended.await
            };
            let task = tokio::spawn(async move {
                queue.call(urgency, call, Box::pin(work)).await.unwrap();
            });
            (task, end)
        }

        async fn next(&mut self) -> u32 {
            self.begun.1.recv().await.unwrap()
        }
    }

    const USUAL: Urgency = Urgency { priority: Reverse(0), is_new: true };

    #[tokio::test(start_paused = true)]
    async fn order_is_by_priority_then_restarts_then_progress_of_the_pod() {
        let mut calls = Calls::new();
        let most = StartLimit::default().calls();
        let mut under_way: Vec<_> = (0..most).map(|_| calls.call(0, USUAL)).collect();
        for _ in 0..most {
            assert_eq!(calls.next().await, 0);
        }
        // A cancelled call delays no other call.
        let (gone, _end) = calls.call(9, Urgency::new(i32::MAX, true));
        tokio::task::yield_now().await;
        gone.abort();
        let _ = gone.await;
        let mut waiting = BTreeMap::new();
        for (number, urgency, call) in [
            (6, USUAL, Call::RunSandbox),
            (3, Urgency::new(0, true), Call::RunSandbox),
            (1, Urgency::new(2_000_001_000, true), Call::RunSandbox),
            (7, USUAL, Call::RunSandbox),
            (5, USUAL, Call::CreateContainer),
            (4, USUAL, Call::StartContainer),
            (2, Urgency::new(2_000_001_000, false), Call::RunSandbox),
        ] {
            waiting.insert(number, calls.call_of(call, number, urgency));
            tokio::task::yield_now().await;
        }
        assert!(calls.begun.1.try_recv().is_err(), "a call began before another had ended");
        let mut order = Vec::new();
        while !waiting.is_empty() {
            let (task, end) = under_way.pop().unwrap();
            end.send(()).unwrap();
            task.await.unwrap();
            // The end of a call may start more than one other: all durations are equal.
            while let Ok(number) = {
                tokio::task::yield_now().await;
                calls.begun.1.try_recv()
            } {
                order.push(number);
                under_way.extend(waiting.remove(&number));
            }
        }
        assert_eq!(order, [1, 2, 3, 4, 5, 6, 7]);
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_calls_release_their_permits() {
        let mut calls = Calls::new();
        let most = StartLimit::default().calls();
        let hanging: Vec<_> = (0..most).map(|_| calls.call(0, USUAL)).collect();
        for _ in 0..most {
            calls.next().await;
        }
        let (task, end) = calls.call(1, USUAL);
        assert_eq!(calls.next().await, 1, "the clock is at {HANGS:?} now");
        end.send(()).unwrap();
        task.await.unwrap();
        for (task, end) in hanging {
            end.send(()).unwrap();
            task.await.unwrap();
        }
        assert_eq!(calls.queue.with(|inner| inner.under_way), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn observations_are_limited_and_a_hanging_observation_blocks_no_other() {
        let queue = CallQueue::default();
        let (begun, mut beginnings) = mpsc::unbounded_channel();
        for _ in 0..MAX_OBSERVATIONS + 1 {
            let (queue, begun) = (queue.clone(), begun.clone());
            tokio::spawn(async move {
                queue
                    .observe(async move {
                        let _ = begun.send(Instant::now());
                        std::future::pending::<()>().await;
                    })
                    .await;
            });
        }
        let began = Instant::now();
        for _ in 0..MAX_OBSERVATIONS {
            assert_eq!(beginnings.recv().await, Some(began));
        }
        assert_eq!(beginnings.recv().await, Some(began + HANGS));
    }
}
