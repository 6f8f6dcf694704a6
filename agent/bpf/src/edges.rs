//! Edges, and how they get from the reader thread to their subscribers.
//!
//! Each subscriber has a bounded channel of its own, so one that is slow harms nobody else. Where its channel
//! is full, edges are counted and dropped, and once it has read what it has, it gets one [`Edge::Lost`] for
//! all of them: it reads the maps (or asks the runtime) again then. Nobody ever waits for a subscriber.

use super::listeners::Listener;
use beelet_ebpf_abi::{OomKill, pressure};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError};
use std::ops::BitOr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;
use tokio::sync::Notify;

/// Edges that wait for one subscriber before it loses some.
pub(super) const CHANNEL_EDGES: usize = 4096;

/// Something happened that a subscriber should know now. Times are `CLOCK_MONOTONIC` in nanoseconds, taken in
/// the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edge {
    /// A socket began to listen.
    ListenerOpened {
        /// Which, and where.
        listener: Listener,
        /// When.
        at_ns: u64,
    },
    /// A socket listens no longer. Others may still listen at its address: ask
    /// [`super::Listeners::is_listening`].
    ListenerClosed {
        /// Which, and where. `since_ns` is 0 if it was opened before the programs were attached.
        listener: Listener,
        /// When.
        at_ns: u64,
    },
    /// A process below the pods' root cgroup ended, with its last thread. It is told once for each process:
    /// of a container's processes the one with `own_pid` 1 is the container's own, unless the pod's
    /// containers share a pid namespace. The runtime learns of it a little later.
    ContainerExited {
        /// The cgroup2 id (the inode of the directory) of its container.
        cgroup_id: u64,
        /// The process, in the machine's pid namespace.
        pid: u32,
        /// Its id in its own pid namespace; 0 if unknown.
        own_pid: u32,
        /// Its exit code; 0 if a signal ended it.
        code: u32,
        /// The signal that ended it; 0 if it ended by itself.
        signal: u32,
        /// When.
        at_ns: u64,
    },
    /// The kernel chose a process below the pods' root cgroup to be killed for want of memory. Its exit
    /// follows.
    OomKill {
        /// The cgroup2 id of its container; 0 if unknown.
        cgroup_id: u64,
        /// The process.
        kill: OomKill,
        /// When.
        at_ns: u64,
    },
    /// A cgroup below the pods' root crossed the threshold of its QoS class: it waited longer than that
    /// within a second (`above`), or no longer half as long. At most one per cgroup and second. One that goes
    /// idle sends nothing more: its [`super::Measures`] do.
    Pressure {
        /// The cgroup2 id of the container.
        cgroup_id: u64,
        /// What it is short of.
        kind: PressureKind,
        /// Whether it rose above the threshold, or fell below half of it.
        above: bool,
        /// How long its threads waited in the current second, nanoseconds: all threads added up.
        value: u64,
        /// When.
        at_ns: u64,
    },
    /// Edges were lost: read the maps again.
    Lost,
}

impl Edge {
    /// Which subscribers get it; `None`: all.
    fn interest(&self) -> Option<Interest> {
        match self {
            Edge::ListenerOpened { .. } | Edge::ListenerClosed { .. } => Some(Interest::LISTENERS),
            Edge::ContainerExited { .. } => Some(Interest::EXITS),
            Edge::OomKill { .. } => Some(Interest::OOM_KILLS),
            Edge::Pressure { .. } => Some(Interest::PRESSURE),
            Edge::Lost => None,
        }
    }
}

/// What a cgroup is short of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PressureKind {
    /// A CPU: its threads are runnable, but don't run.
    RunQueue,
    /// Memory: its threads reclaim instead of running.
    Reclaim,
}

impl PressureKind {
    /// From the record's number.
    pub(super) fn from_abi(number: u32) -> Option<PressureKind> {
        match number {
            pressure::RUN_QUEUE => Some(PressureKind::RunQueue),
            pressure::RECLAIM => Some(PressureKind::Reclaim),
            _ => None,
        }
    }
}

/// Which edges a subscriber wants; join them with `|`. [`Edge::Lost`] comes always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest(u8);

impl Interest {
    /// [`Edge::ListenerOpened`] and [`Edge::ListenerClosed`], of the whole machine.
    pub const LISTENERS: Interest = Interest(1);
    /// [`Edge::ContainerExited`].
    pub const EXITS: Interest = Interest(2);
    /// [`Edge::OomKill`].
    pub const OOM_KILLS: Interest = Interest(4);
    /// [`Edge::Pressure`].
    pub const PRESSURE: Interest = Interest(8);
    /// All of them.
    pub const ALL: Interest = Interest(15);

    fn overlaps(self, other: Interest) -> bool {
        self.0 & other.0 != 0
    }
}

impl BitOr for Interest {
    type Output = Interest;

    fn bitor(self, other: Interest) -> Interest {
        Interest(self.0 | other.0)
    }
}

/// The end at which a subscriber receives its edges. Dropping it, and its clones, ends the subscription.
/// Clones share it: each edge goes to one of them.
#[derive(Clone, Debug)]
pub struct Edges {
    receiver: Receiver<Edge>,
    shared: Arc<Shared>,
}

/// What the hub and the subscriber both have.
#[derive(Debug)]
struct Shared {
    sender: Sender<Edge>,
    interest: Interest,
    /// Edges were dropped since the subscriber last heard of it.
    lost: AtomicBool,
    wake: Arc<Notify>,
}

impl Edges {
    /// The next edge, if there is one.
    #[must_use]
    pub fn try_recv(&self) -> Option<Edge> {
        match self.receiver.try_recv() {
            Ok(edge) => Some(edge),
            // What came before the loss has been read; what comes after it is still to come.
            Err(_) => self.shared.lost.swap(false, Ordering::AcqRel).then_some(Edge::Lost),
        }
    }

    /// Waits for the next edge, on this thread.
    ///
    /// # Errors
    /// None came until `deadline`.
    pub fn recv_deadline(&self, deadline: Instant) -> Result<Edge, RecvTimeoutError> {
        match self.try_recv() {
            Some(edge) => Ok(edge),
            None => self.receiver.recv_deadline(deadline),
        }
    }

    /// Waits for the next edge. Safe to drop at any time: no edge is lost by it.
    pub async fn recv(&self) -> Edge {
        loop {
            if let Some(edge) = self.try_recv() {
                return edge;
            }
            self.shared.wake.notified().await;
        }
    }

    /// Notified after edges were sent: [`Edges::try_recv`] all of them then.
    #[must_use]
    pub fn wake(&self) -> Arc<Notify> {
        Arc::clone(&self.shared.wake)
    }
}

/// Hands edges to all subscribers that want them.
#[derive(Clone, Debug, Default)]
pub(super) struct Hub {
    subscribers: Arc<Mutex<Vec<Weak<Shared>>>>,
    dropped: Arc<AtomicU64>,
}

impl Hub {
    /// A new subscription: edges from now on.
    pub(super) fn subscribe(&self, interest: Interest) -> Edges {
        self.subscribe_with(interest, CHANNEL_EDGES)
    }

    fn subscribe_with(&self, interest: Interest, room: usize) -> Edges {
        let (sender, receiver) = crossbeam_channel::bounded(room);
        let (lost, wake) = (AtomicBool::new(false), Arc::default());
        let shared = Arc::new(Shared { sender, interest, lost, wake });
        let mut all = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(&shared));
        Edges { receiver, shared }
    }

    /// Hands edges on and wakes the subscribers that got one. Never waits.
    pub(super) fn send(&self, edges: &[Edge]) {
        if edges.is_empty() {
            return;
        }
        let all: Vec<Arc<Shared>> = {
            let subscribers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
            subscribers.iter().filter_map(Weak::upgrade).collect()
        };
        for one in all {
            let wanted =
                |edge: &&Edge| edge.interest().is_none_or(|interest| interest.overlaps(one.interest));
            let mut any = false;
            for edge in edges.iter().filter(wanted) {
                any = true;
                self.send_one(&one, edge);
            }
            if any {
                one.wake.notify_one();
            }
        }
    }

    /// While a subscriber has not heard of a loss yet, it gets nothing newer: the order stays.
    fn send_one(&self, one: &Shared, edge: &Edge) {
        if one.lost.load(Ordering::Acquire) {
            self.count(edge);
            return;
        }
        if let Err(TrySendError::Full(edge)) = one.sender.try_send(edge.clone()) {
            one.lost.store(true, Ordering::Release);
            self.count(&edge);
        }
    }

    fn count(&self, dropped: &Edge) {
        if *dropped != Edge::Lost {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Number of edges that found a full channel, of all subscribers.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn exit(pid: u32) -> Edge {
        Edge::ContainerExited { cgroup_id: 1, pid, own_pid: 1, code: 0, signal: 0, at_ns: 9 }
    }

    fn oom(pid: u32) -> Edge {
        Edge::OomKill { cgroup_id: 1, kill: OomKill { pid, ..OomKill::default() }, at_ns: 9 }
    }

    fn all(edges: &Edges) -> Vec<Edge> {
        std::iter::from_fn(|| edges.try_recv()).collect()
    }

    #[test]
    fn everybody_gets_what_he_asked_for() {
        let hub = Hub::default();
        let (exits, both) =
            (hub.subscribe(Interest::EXITS), hub.subscribe(Interest::EXITS | Interest::OOM_KILLS));
        hub.send(&[exit(1), oom(2), Edge::Lost]);
        assert_eq!(all(&exits), [exit(1), Edge::Lost]);
        assert_eq!(all(&both), [exit(1), oom(2), Edge::Lost]);
        let late = hub.subscribe(Interest::ALL);
        assert_eq!(all(&late), []);
    }

    #[test]
    fn a_slow_subscriber_loses_edges_hears_of_it_once_and_harms_nobody() {
        let hub = Hub::default();
        let (slow, quick) = (hub.subscribe_with(Interest::ALL, 2), hub.subscribe_with(Interest::ALL, 10));
        hub.send(&[exit(1), exit(2), exit(3), exit(4)]);
        assert_eq!(all(&quick), [exit(1), exit(2), exit(3), exit(4)]);
        assert_eq!(hub.dropped(), 2);
        assert_eq!(slow.try_recv(), Some(exit(1)));
        // Room or not: what follows a loss comes after the word of it.
        hub.send(&[exit(5)]);
        assert_eq!(all(&slow), [exit(2), Edge::Lost]);
        assert_eq!(hub.dropped(), 3);
        hub.send(&[exit(6)]);
        assert_eq!(all(&slow), [exit(6)]);
    }

    #[test]
    fn a_dropped_subscription_is_forgotten() {
        let hub = Hub::default();
        let edges = hub.subscribe(Interest::ALL);
        let copy = edges.clone();
        drop(edges);
        hub.send(&[exit(1)]);
        assert_eq!(all(&copy), [exit(1)]);
        drop(copy);
        hub.send(&[exit(2)]);
        let _new = hub.subscribe(Interest::ALL);
        assert_eq!(hub.subscribers.lock().unwrap().len(), 1);
        assert_eq!(hub.dropped(), 0);
    }

    #[test]
    fn waiting_ends_with_an_edge_or_at_the_deadline() {
        let hub = Hub::default();
        let edges = hub.subscribe(Interest::EXITS);
        assert!(edges.recv_deadline(Instant::now() + Duration::from_millis(1)).is_err());
        let sender = hub.clone();
        let waiting =
            std::thread::spawn(move || edges.recv_deadline(Instant::now() + Duration::from_secs(30)));
        sender.send(&[Edge::Lost]);
        assert_eq!(waiting.join().unwrap(), Ok(Edge::Lost));
    }

    #[tokio::test]
    async fn a_task_is_woken() {
        let hub = Hub::default();
        let edges = hub.subscribe(Interest::EXITS);
        let waiting = tokio::spawn(async move { edges.recv().await });
        tokio::task::yield_now().await;
        hub.send(&[exit(7)]);
        assert_eq!(waiting.await.unwrap(), exit(7));
    }
}
