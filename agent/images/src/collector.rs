//! Task shared by the image and container garbage collectors: runs one collection at a time, at intervals and
//! on request.

use beelet_base::work::Work;
use std::future::Future;

use tokio::{
    select,
    sync::{mpsc, oneshot},
};
use tokio_util::sync::CancellationToken;

use super::Error;

/// Capacity of the request queue. Senders of further requests wait.
const REQUESTS: usize = 16;

/// Resources that can be collected.
pub trait Garbage: Send + 'static {
    /// Options of a requested collection.
    type GcRequest: Send + 'static;
    /// The outcome of a collection.
    type Collected: Send + 'static;
    /// Timers of the work that needs no request.
    type Timers: Send;
    /// Work that a timer makes due.
    type Due: Send;

    /// Prepares the first collection; starts the timers.
    fn begin(&mut self) -> impl Future<Output = Self::Timers> + Send;

    /// Waits until work is due. Cancel safe: a dropped call has had no effect.
    fn due(timers: &mut Self::Timers) -> impl Future<Output = Self::Due> + Send;

    /// Does what is due.
    fn work(&mut self, due: Self::Due) -> impl Future<Output = ()> + Send;

    /// Runs a collection on request.
    fn collect(
        &mut self,
        request: Self::GcRequest,
    ) -> impl Future<Output = Result<Self::Collected, Error>> + Send;
}

/// Collects one kind of garbage; runs as one task.
#[derive(Debug)]
pub struct Collector<G: Garbage> {
    garbage: G,
    commands: mpsc::Receiver<Command<G::GcRequest, G::Collected>>,
}

/// Sends requests to a [`Collector`]; clones share it.
#[derive(Clone, Debug)]
pub struct Handle<R, C> {
    commands: mpsc::Sender<Command<R, C>>,
}

#[derive(Debug)]
struct Command<R, C> {
    request: R,
    reply: oneshot::Sender<Result<C, Error>>,
}

impl<G: Garbage> Collector<G> {
    /// Creates an idle collector and its handle.
    pub(crate) fn new(garbage: G) -> (Self, Handle<G::GcRequest, G::Collected>) {
        let (sender, commands) = mpsc::channel(REQUESTS);
        (Self { garbage, commands }, Handle { commands: sender })
    }

    /// Works until `shutdown`. Requests take precedence over timers. Each kind of garbage has its own `run`
    /// in its module, because generic code is generated where its type parameters are known.
    pub(crate) fn working(mut self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            let work = async {
                let mut timers = self.garbage.begin().await;
                loop {
                    select! {
                        biased;
                        Some(Command { request, reply }) = self.commands.recv() => {
                            let collected = self.garbage.collect(request).await;
                            // The client may have disconnected.
                            let _ = reply.send(collected);
                        }
                        due = G::due(&mut timers) => self.garbage.work(due).await,
                    }
                }
            };
            shutdown.run_until_cancelled(work).await;
        })
    }
}

impl<R, C> Handle<R, C> {
    /// Requests a collection; a collection under way finishes first.
    ///
    /// # Errors
    /// The collection could not decide anything. Failed removals are not an error: the outcome lists them.
    pub async fn collect(&self, request: R) -> Result<C, Error> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command { request, reply }).await.map_err(|_| Error::Stopping)?;
        answer.await.map_err(|_| Error::Stopping)?
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{Interval, interval};

    use super::*;

    /// Counts its requested and its own collections.
    #[derive(Default)]
    struct Counter(u32, u32);

    impl Garbage for Counter {
        type GcRequest = Result<u32, Error>;
        type Collected = (u32, u32, u32);
        type Timers = Interval;
        type Due = ();

        async fn begin(&mut self) -> Interval {
            interval(Duration::from_secs(60))
        }

        async fn due(timers: &mut Interval) {
            timers.tick().await;
        }

        async fn work(&mut self, (): ()) {
            self.1 += 1;
        }

        async fn collect(&mut self, request: Result<u32, Error>) -> Result<(u32, u32, u32), Error> {
            self.0 += 1;
            Ok((self.0, self.1, request?))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_collector_works_by_itself_answers_requests_and_ends() {
        let (collector, handle) = Collector::new(Counter::default());
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(collector.working(shutdown.clone()));
        tokio::time::sleep(Duration::from_secs(90)).await;
        assert_eq!(handle.collect(Ok(7)).await, Ok((1, 2, 7)));
        assert_eq!(handle.collect(Err(Error::NoMountpoint)).await, Err(Error::NoMountpoint));
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(handle.collect(Ok(8)).await, Ok((3, 3, 8)));
        shutdown.cancel();
        running.await.unwrap();
        assert_eq!(handle.collect(Ok(9)).await, Err(Error::Stopping));
        assert!(Error::Stopping.is_transient() && !Error::NoMountpoint.is_transient());
    }
}
