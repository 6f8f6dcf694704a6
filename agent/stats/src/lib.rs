//! What each container uses, waits for and is kept from: the kernel programs' counters and the cgroups' files
//! made into one value for the whole node, [`NodeStats`], with rates over a second, ten and a minute.
//!
//! Nothing is read without a reader. A [`Stats::subscribe`]d receiver gets a new value every tick as long as
//! it lives; [`Stats::now`] makes one reading for one question (a scrape, a snapshot), with no more than that
//! one asks for ([`Scope`]). This module only reads; it decides nothing and asks the runtime nothing: the pod
//! table says which pods are on the node.
//!
//! Where kernel programs measure, run-queue latency, preemption, reclaim and the sockets' traffic are theirs.
//! Where they don't, these are missing, PSI files say how long containers waited, and a pod's traffic is its
//! network namespace's. CPU time, memory, throttling and OOM kills come from the files always: they count
//! from the cgroup's birth.

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
use tokio::task::spawn_blocking;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

pub use self::model::NodeStats;
pub use self::sampler::{KernelReading, Snapshot};

use self::sampler::Sampler;
use beelet_base::work::Work;
use beelet_cgroups::Cgroups;
use beelet_model::{
    disk::{DiskUse, VolumesUse},
    table::PodTable,
};

/// Questions that wait for a reading. One more is answered with the newest value that there is.
const QUESTIONS: usize = 64;
/// A question is answered by a reading that is not older than this: several at a time cost one.
const FRESH: Duration = Duration::from_millis(100);
/// How long a question waits: the first reading of hundreds of new containers takes some tens of
/// milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is open of pods that are gone is closed at most this often: a look at all pods, for each of a
/// hundred changes per second while many start, would cost more than it frees.
const FORGET: Duration = Duration::from_secs(1);

/// How much of the node a reading has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// What containers use and wait for: a tick's reading.
    Containers,
    /// And the CPU time and memory of pods' own cgroups: `/metrics`, `/metrics/resource`.
    Usage,
    /// A full reading: limits, networks, open files and disks too. `/metrics/cadvisor`, `/stats/summary`.
    Everything,
}

type Question = (Scope, oneshot::Sender<Arc<NodeStats>>);

/// Answers with the node's stats. Cheap to clone.
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

/// Both ends. Until [`Sampling`] runs, every answer is [`NodeStats::nothing_yet`].
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
    /// One that stays as it is.
    #[cfg(any(test, feature = "test-util"))]
    pub fn fixed(value: NodeStats) -> Self {
        let (stats, _) = channel();
        stats.latest.send_replace(Arc::new(value));
        stats
    }

    /// A value every tick, as long as the receiver (or a clone of it) lives. The first one comes at once;
    /// rates are in the second.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<NodeStats>> {
        let receiver = self.latest.subscribe();
        self.viewers.notify_one();
        receiver
    }

    /// A reading that has this much, made now unless there is one of this very moment.
    pub async fn now(&self, scope: Scope) -> Arc<NodeStats> {
        let (answer, answered) = oneshot::channel();
        if self.questions.try_send((scope, answer)).is_ok()
            && let Ok(Ok(stats)) = timeout(PATIENCE, answered).await
        {
            return stats;
        }
        self.latest()
    }

    /// As [`Stats::now`] with [`Scope::Usage`], for one who reads what the containers' sockets carried: that
    /// is counted only while somebody asks for it, so the first such reading has what was counted before.
    pub async fn with_traffic(&self) -> Arc<NodeStats> {
        self.traffic.notify_one();
        self.now(Scope::Usage).await
    }

    /// Notified whenever somebody reads what the containers' sockets carried: a subscriber at each tick, and
    /// [`Stats::with_traffic`].
    #[must_use]
    pub fn traffic_demand(&self) -> Arc<Notify> {
        Arc::clone(&self.traffic)
    }

    /// The newest value, however old.
    pub(crate) fn latest(&self) -> Arc<NodeStats> {
        Arc::clone(&self.latest.borrow())
    }
}

/// What sampling needs.
pub struct Parts {
    /// Where the files are.
    pub cgroups: Arc<Cgroups>,
    /// The pods of the node.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// What the kernel programs counted.
    pub snapshot: Snapshot,
    /// The node's name.
    pub node: String,
    /// The time between two readings while there is a subscriber.
    pub interval: Duration,
    /// More containers than this are left out.
    pub most: usize,
    /// What pods have on disk.
    pub disk: Box<dyn DiskUse>,
    /// What their volumes have.
    pub volumes: watch::Receiver<VolumesUse>,
    /// Metrics of the sampling itself.
    pub metrics: metrics::Metrics,
}

/// Makes the readings, while there is a reader; runs as one task.
pub struct Sampling {
    inbox: Inbox,
    table: watch::Receiver<Arc<PodTable>>,
    interval: Duration,
    metrics: metrics::Metrics,
    /// With the blocking thread while it reads.
    sampler: Option<Sampler>,
    /// When the newest reading was made, and what it has.
    newest: Option<(Instant, Scope)>,
}

/// Waits for a change of the table, which may be older than `then`; not before `then`.
async fn changed_after(
    table: &mut watch::Receiver<Arc<PodTable>>,
    then: Instant,
) -> Result<(), watch::error::RecvError> {
    sleep_until(then).await;
    table.changed().await
}

impl Sampling {
    /// Not reading yet.
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

    /// Reads for subscribers and questions, until `shutdown`.
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

    /// Closes what is open of pods that are gone: the next one who looks may come in an hour.
    fn forget_gone(&mut self) {
        let table = Arc::clone(&self.table.borrow_and_update());
        if let Some(sampler) = &mut self.sampler {
            sampler.forget_gone(&table);
        }
    }

    /// A reading every tick until the last viewer has gone.
    async fn tick(&mut self) {
        let mut ticks = interval(self.interval);
        // A reading that took longer than a tick is followed by a whole one, not by a burst.
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
        // The receiver may have gone.
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
            // Only when the agent's threads are being taken down.
            Err(error) => tracing::error!("cannot read stats any more: {error}"),
        }
    }
}

#[cfg(test)]
mod tests;
