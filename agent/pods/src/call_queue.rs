//! The queue of calls that make sandboxes and containers: at most [`StartLimit`] calls at the same time, the
//! most urgent first, and of those the pod that has come furthest. Of a hundred pods that are applied at once
//! the first then runs long before the last has a sandbox. Stops, pulls and probes never wait, however many
//! pods start; looks wait only for other looks.

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

/// A call that takes longer hangs: it gives its permit to another, and its duration does not count.
const HANGS: Duration = Duration::from_secs(10);
/// Looks at the same time. An agent that starts on a node of thousands of pods looks at each: all looks at
/// once take longer than a call may, and end the connection that they share.
const LOOKS: usize = 128;

/// Urgency of a call: the pod's priority, then pods first that ran before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Urgency {
    priority: Reverse<i32>,
    is_new: bool,
}

impl Urgency {
    /// The urgency for a pod of that priority. `again`: a part of the pod ran before, and is missed now.
    pub(crate) fn new(priority: i32, again: bool) -> Self {
        Self { priority: Reverse(priority), is_new: !again }
    }
}

/// Queues calls. Clones share the queue.
#[derive(Clone, Debug)]
pub(crate) struct CallQueue {
    inner: Arc<Mutex<Inner>>,
    looks: Arc<Semaphore>,
}

impl Default for CallQueue {
    fn default() -> Self {
        Self { inner: Arc::default(), looks: Arc::new(Semaphore::new(LOOKS)) }
    }
}

#[derive(Debug, Default)]
struct Inner {
    limit: StartLimit,
    under_way: usize,
    /// Calls that wait: the most urgent first, then the last call of a pod, then in the order of arrival.
    waiting: BTreeMap<(Urgency, Reverse<Call>, u64), oneshot::Sender<Permit>>,
    came: u64,
}

/// Permit for one call, returned when it is dropped.
#[derive(Debug)]
struct Permit {
    queue: CallQueue,
    /// Number of calls under way when the call began, with itself.
    under_way: usize,
}

impl CallQueue {
    /// Makes a call once it has a permit. The future of a call is large: boxed, it doesn't grow the futures
    /// that wait for it.
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

    /// Looks at a pod while fewer than [`LOOKS`] other looks are under way.
    pub(crate) async fn observe<T>(&self, look: impl Future<Output = T>) -> T {
        // The semaphore is never closed.
        let permit = self.looks.acquire().await;
        holding(permit, look).await.0
    }

    async fn permit(&self, urgency: Urgency, call: Call) -> Permit {
        let (sender, receiver) = oneshot::channel();
        self.with(|inner| {
            inner.came += 1;
            inner.waiting.insert((urgency, Reverse(call), inner.came), sender);
        });
        self.admit();
        // A sender is dropped only with a permit sent, or with the whole queue.
        match receiver.await {
            Ok(permit) => permit,
            Err(_) => std::future::pending().await,
        }
    }

    /// Gives permits to as many calls as may have one now.
    fn admit(&self) {
        while let Some((sender, under_way)) = self.with(Inner::next) {
            // A caller may have given up just now: then the permit comes back at once.
            drop(sender.send(Permit { queue: self.clone(), under_way }));
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> T {
        work(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Does work with a permit. Returns the permit, unless the work hung and the permit went to another call.
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
    /// The next call that may begin, and the number of calls under way then.
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

    /// Calls that begin, by number, and end when they are told to.
    struct Calls {
        queue: CallQueue,
        begun: (mpsc::UnboundedSender<u32>, mpsc::UnboundedReceiver<u32>),
    }

    impl Calls {
        fn new() -> Self {
            Self { queue: CallQueue::default(), begun: mpsc::unbounded_channel() }
        }

        /// One that waits for its end.
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
    async fn the_most_urgent_go_first_then_what_ran_before_then_the_pod_that_has_come_furthest() {
        let mut calls = Calls::new();
        let most = StartLimit::default().calls();
        let mut under_way: Vec<_> = (0..most).map(|_| calls.call(0, USUAL)).collect();
        for _ in 0..most {
            assert_eq!(calls.next().await, 0);
        }
        // One that gives up holds nobody back.
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
        assert!(calls.begun.1.try_recv().is_err(), "none goes before another has ended");
        let mut order = Vec::new();
        while !waiting.is_empty() {
            let (task, end) = under_way.pop().unwrap();
            end.send(()).unwrap();
            task.await.unwrap();
            // Each that ends may let more than one go: all took the same time.
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
    async fn calls_that_hang_give_their_permits_to_others() {
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
    async fn only_so_many_pods_are_looked_at_at_once_and_a_look_that_hangs_holds_up_nobody() {
        let queue = CallQueue::default();
        let (begun, mut beginnings) = mpsc::unbounded_channel();
        for _ in 0..LOOKS + 1 {
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
        for _ in 0..LOOKS {
            assert_eq!(beginnings.recv().await, Some(began));
        }
        assert_eq!(beginnings.recv().await, Some(began + HANGS));
    }
}
