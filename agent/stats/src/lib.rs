//! Usage, waits and limits of each container: combines the kernel programs' counters and the cgroups' files
//! into a single value for the whole node, [`NodeStats`], with rates over a second, ten and a minute.
//!
//! Nothing is read without a reader. A [`Stats::subscribe`]d receiver gets a new value every tick while it
//! lives; [`Stats::now`] makes a reading for a single request (a scrape, a snapshot), limited to the
//! requested [`Scope`]. Must only read, never decide and never call the runtime: the pod table lists the
//! node's pods.
//!
//! If kernel programs measure, they provide run-queue latency, preemption, reclaim and the sockets' traffic.
//! Otherwise these are missing, PSI files provide the wait times, and a pod's traffic is that of its network
//! namespace. CPU time, memory, throttling and OOM kills always come from the files, which count from the
//! cgroup's creation.

mod files;
mod history;
mod inventory;
pub mod metrics;
pub mod model;
pub mod parse;
mod rates;
mod sampler;
mod who;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

pub use self::model::NodeStats;
pub use self::sampler::{KernelReading, Snapshot};

use self::sampler::Sampler;
use beelet_base::blocking::spawn_blocking;
use beelet_base::work::Work;
use beelet_cgroups::Cgroups;
use beelet_model::{
    disk::{DiskUse, VolumesUse},
    table::PodTable,
};

/// Maximum number of requests waiting for a reading. Further ones get the newest value.
const QUESTIONS: usize = 64;
/// Maximum age of a reading for a request: several requests at a time cost a single reading.
const FRESH: Duration = Duration::from_millis(100);
/// Timeout of a request: the first reading of hundreds of new containers takes some tens of milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// Minimum time between two rounds of closing the files of removed pods: a scan of all pods for each of a
/// hundred changes per second, while many start, would cost more than it frees.
const FORGET: Duration = Duration::from_secs(1);

/// Scope of a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Usage and waits of containers: a tick's reading.
    Containers,
    /// Also the CPU time and memory of pods' own cgroups: `/metrics`, `/metrics/resource`.
    Usage,
    /// A full reading, with limits, networks, open files and disks: `/metrics/cadvisor`, `/stats/summary`.
    Everything,
}

type Question = (Scope, oneshot::Sender<Arc<NodeStats>>);

/// Handle for reading the node's stats. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Stats {
    latest: watch::Sender<Arc<NodeStats>>,
    viewers: Arc<Notify>,
    traffic: Arc<Notify>,
    questions: mpsc::Sender<Question>,
}

/// The other end, for [`Sampling`].
#[derive(Debug)]
pub struct Inbox {
    latest: watch::Sender<Arc<NodeStats>>,
    viewers: Arc<Notify>,
    traffic: Arc<Notify>,
    questions: mpsc::Receiver<Question>,
}

/// Returns both ends. Until [`Sampling`] runs, every answer is [`NodeStats::nothing_yet`].
#[must_use]
pub fn channel() -> (Stats, Inbox) {
    let (latest, _) = watch::channel(Arc::new(NodeStats::nothing_yet()));
    let (sender, questions) = mpsc::channel(QUESTIONS);
    let (viewers, traffic) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let stats = Stats {
        latest: latest.clone(),
        viewers: Arc::clone(&viewers),
        traffic: Arc::clone(&traffic),
        questions: sender,
    };
    (stats, Inbox { latest, viewers, traffic, questions })
}

impl Stats {
    /// Returns a handle with a constant value.
    #[cfg(any(test, feature = "test-util"))]
    pub fn fixed(value: NodeStats) -> Self {
        let (stats, _) = channel();
        stats.latest.send_replace(Arc::new(value));
        stats
    }

    /// Subscribes to a value every tick, while the receiver (or a clone of it) lives. The first value comes
    /// at once; the second has the first rates.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<NodeStats>> {
        let receiver = self.latest.subscribe();
        self.viewers.notify_one();
        receiver
    }

    /// Returns a reading of this scope, made now unless a fresh one exists.
    pub async fn now(&self, scope: Scope) -> Arc<NodeStats> {
        let (answer, answered) = oneshot::channel();
        if self.questions.try_send((scope, answer)).is_ok()
            && let Ok(Ok(stats)) = timeout(PATIENCE, answered).await
        {
            return stats;
        }
        self.latest()
    }

    /// Returns a reading as [`Stats::now`] with [`Scope::Usage`], for a reader of the containers' socket
    /// traffic: that is counted only while it has readers, so the first reading has the earlier counts.
    pub async fn with_traffic(&self) -> Arc<NodeStats> {
        self.traffic.notify_one();
        self.now(Scope::Usage).await
    }

    /// Returns the notification of each reading of the containers' socket traffic: by a subscriber at each
    /// tick, and by [`Stats::with_traffic`].
    #[must_use]
    pub fn traffic_demand(&self) -> Arc<Notify> {
        Arc::clone(&self.traffic)
    }

    /// Returns the newest value of any age.
    pub(crate) fn latest(&self) -> Arc<NodeStats> {
        Arc::clone(&self.latest.borrow())
    }
}

/// Dependencies of the sampling.
pub struct Parts {
    /// Cgroups with the files to read.
    pub cgroups: Arc<Cgroups>,
    /// The pods of the node.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Reader of the kernel programs' counters.
    pub snapshot: Snapshot,
    /// The node's name.
    pub node: String,
    /// Time between two readings while a subscriber exists.
    pub interval: Duration,
    /// Maximum number of containers to read.
    pub most: usize,
    /// Disk usage of pods.
    pub disk: Box<dyn DiskUse>,
    /// Usage of pods' volumes.
    pub volumes: watch::Receiver<VolumesUse>,
    /// Metrics of the sampling itself.
    pub metrics: metrics::Metrics,
}

/// Makes the readings while a reader exists; runs as one task.
pub struct Sampling {
    inbox: Inbox,
    table: watch::Receiver<Arc<PodTable>>,
    interval: Duration,
    metrics: metrics::Metrics,
    /// The sampler; `None` while a blocking thread reads with it.
    sampler: Option<Sampler>,
    /// Time and scope of the newest reading.
    newest: Option<(Instant, Scope)>,
}

/// Waits until `then`, and then for a change of the table, which may be earlier than `then`.
async fn changed_after(
    table: &mut watch::Receiver<Arc<PodTable>>,
    then: Instant,
) -> Result<(), watch::error::RecvError> {
    sleep_until(then).await;
    table.changed().await
}

impl Sampling {
    /// Returns the task before its first reading.
    #[must_use]
    pub fn new(parts: Parts, inbox: Inbox) -> Self {
        let Parts { cgroups, snapshot, disk, .. } = parts;
        let sampler = Sampler::new(cgroups, (snapshot, disk, parts.volumes), parts.node.into(), parts.most);
        Self {
            inbox,
            table: parts.table,
            interval: parts.interval,
            metrics: parts.metrics,
            sampler: Some(sampler),
            newest: None,
        }
    }

    /// Reads for subscribers and requests, until `shutdown`.
    pub fn run(mut self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            let mut next = Instant::now();
            loop {
                let tracks = self.sampler.as_ref().is_some_and(Sampler::tracks);
                let idle = tokio::select! {
                    () = shutdown.cancelled() => return,
                    question = self.inbox.questions.recv() => question,
                    () = self.inbox.viewers.notified() => None,
                    Ok(()) = changed_after(&mut self.table, next), if tracks => {
                        self.forget_gone();
                        next = Instant::now() + FORGET;
                        continue;
                    }
                };
                if let Some(question) = idle {
                    self.answer(question).await;
                }
                if self.inbox.latest.receiver_count() > 0 {
                    tokio::select! {
                        () = shutdown.cancelled() => return,
                        () = self.tick() => {}
                    }
                }
            }
        })
    }

    /// Closes the files of removed pods, since the next reader may come only in an hour.
    fn forget_gone(&mut self) {
        let table = Arc::clone(&self.table.borrow_and_update());
        if let Some(sampler) = &mut self.sampler {
            sampler.forget_gone(&table);
        }
    }

    /// Makes a reading every tick until the last subscriber is dropped.
    async fn tick(&mut self) {
        let mut ticks = interval(self.interval);
        // A reading that took longer than a tick is followed by a whole tick, not by a burst.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let latest = self.inbox.latest.clone();
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    if latest.receiver_count() == 0 {
                        break;
                    }
                    self.inbox.traffic.notify_one();
                    self.read(Scope::Containers).await;
                }
                Some(question) = self.inbox.questions.recv() => self.answer(question).await,
                () = latest.closed() => break,
            }
        }
        if let Some(sampler) = &mut self.sampler {
            sampler.rest();
        }
    }

    async fn answer(&mut self, (scope, answer): Question) {
        if self.newest.is_none_or(|(at, has)| has < scope || at.elapsed() > FRESH) {
            self.read(scope).await;
        }
        // The receiver may have been dropped.
        let _ = answer.send(Arc::clone(&self.inbox.latest.borrow()));
    }

    async fn read(&mut self, scope: Scope) {
        let Some(mut sampler) = self.sampler.take() else { return };
        let table = Arc::clone(&self.table.borrow_and_update());
        let metrics = self.metrics.clone();
        let read = spawn_blocking(move || {
            let stats = metrics.time(|| sampler.read(&table, scope));
            metrics.observe(sampler.tracked(), stats.left_out);
            (sampler, stats)
        });
        match read.await {
            Ok((sampler, stats)) => {
                self.sampler = Some(sampler);
                self.newest = Some((Instant::now(), scope));
                self.inbox.latest.send_replace(Arc::new(stats));
            }
            // Only while the async runtime is shutting down.
            Err(error) => tracing::error!("cannot read stats any more: {error}"),
        }
    }
}

#[cfg(test)]
mod tests;
