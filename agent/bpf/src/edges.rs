//! Edges, and their way from the reader thread to the subscribers.
//!
//! Each subscriber has a bounded channel of its own, so a slow one harms no other. While its channel is full,
//! edges are counted and dropped. After the subscriber has read the rest, it gets one [`Edge::Lost`] for all
//! of the dropped edges and reads the maps (or asks the runtime) again. The reader never waits for a
//! subscriber.

use super::listeners::Listener;
use beelet_ebpf_abi::{OomKill, pressure};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError};
use std::ops::BitOr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;
use tokio::sync::Notify;

/// Capacity of a subscriber's channel; further edges are lost.
pub(super) const CHANNEL_EDGES: usize = 4096;

/// An event that a subscriber should learn of at once. Times are `CLOCK_MONOTONIC` in nanoseconds, taken in
/// the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edge {
    /// A socket began to listen.
    ListenerOpened {
        /// The socket and its address.
        listener: Listener,
        /// Time of the event.
        at_ns: u64,
    },
    /// A socket stopped listening. Others may still listen at its address: see
    /// [`super::Listeners::is_listening`].
    ListenerClosed {
        /// The socket and its address. `since_ns` is 0 if it was opened before the programs were attached.
        listener: Listener,
        /// Time of the event.
        at_ns: u64,
    },
    /// A process below the pods' root cgroup ended, with its last thread: one edge per process. A container's
    /// main process has `own_pid` 1, unless the pod's containers share a pid namespace. The runtime learns of
    /// the exit a little later.
    ContainerExited {
        /// Cgroup2 id (the inode of the directory) of the process's container.
        cgroup_id: u64,
        /// Pid in the machine's pid namespace.
        pid: u32,
        /// Pid in the process's own pid namespace; 0 if unknown.
        own_pid: u32,
        /// Exit code; 0 if a signal ended the process.
        code: u32,
        /// Signal that ended the process; 0 if it exited by itself.
        signal: u32,
        /// Time of the event.
        at_ns: u64,
    },
    /// The OOM killer chose a process below the pods' root cgroup. The process's exit follows.
    OomKill {
        /// Cgroup2 id of the process's container; 0 if unknown.
        cgroup_id: u64,
        /// The process.
        kill: OomKill,
        /// Time of the event.
        at_ns: u64,
    },
    /// A cgroup below the pods' root crossed the threshold of its QoS class: the time that its threads waited
    /// within a second rose above the threshold (`above`), or fell below half of it. At most one edge per
    /// cgroup and second. A cgroup that becomes idle sends no edge; its [`super::Measures`] show that.
    Pressure {
        /// Cgroup2 id of the container.
        cgroup_id: u64,
        /// The scarce resource.
        kind: PressureKind,
        /// True if the value rose above the threshold, false if it fell below half of it.
        above: bool,
        /// Time waited in the current second, summed over all threads, in nanoseconds.
        value: u64,
        /// Time of the event.
        at_ns: u64,
    },
    /// Edges were lost: read the maps again.
    Lost,
}

impl Edge {
    /// Returns the interest that selects this edge; `None` if all subscribers get it.
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

/// A resource that a cgroup is short of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PressureKind {
    /// CPU: the cgroup's threads are runnable, but don't run.
    RunQueue,
    /// Memory: the cgroup's threads reclaim instead of running.
    Reclaim,
}

impl PressureKind {
    /// Converts the number in a record.
    pub(super) fn from_abi(number: u32) -> Option<PressureKind> {
        match number {
            pressure::RUN_QUEUE => Some(PressureKind::RunQueue),
            pressure::RECLAIM => Some(PressureKind::Reclaim),
            _ => None,
        }
    }
}

/// The kinds of edges that a subscriber wants, joined with `|`. Every subscriber gets [`Edge::Lost`].
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

/// A subscriber's receiver of edges. Dropping it and all its clones ends the subscription. Clones share the
/// subscription: each edge reaches one of them.
#[derive(Clone, Debug)]
pub struct Edges {
    receiver: Receiver<Edge>,
    shared: Arc<Shared>,
}

/// State that the hub and the subscriber share.
#[derive(Debug)]
struct Shared {
    sender: Sender<Edge>,
    interest: Interest,
    /// Edges were dropped since the subscriber's last [`Edge::Lost`].
    lost: AtomicBool,
    wake: Arc<Notify>,
}

impl Edges {
    /// Returns the next edge, if there is one.
    #[must_use]
    pub fn try_recv(&self) -> Option<Edge> {
        match self.receiver.try_recv() {
            Ok(edge) => Some(edge),
            // The subscriber has read all edges from before the loss, and none from after it.
            Err(_) => self.shared.lost.swap(false, Ordering::AcqRel).then_some(Edge::Lost),
        }
    }

    /// Waits for the next edge, on this thread.
    ///
    /// # Errors
    /// No edge came before `deadline`.
    pub fn recv_deadline(&self, deadline: Instant) -> Result<Edge, RecvTimeoutError> {
        match self.try_recv() {
            Some(edge) => Ok(edge),
            None => self.receiver.recv_deadline(deadline),
        }
    }

    /// Waits for the next edge. Cancel-safe: dropping the future loses no edge.
    pub async fn recv(&self) -> Edge {
        loop {
            if let Some(edge) = self.try_recv() {
                return edge;
            }
            self.shared.wake.notified().await;
        }
    }

    /// Returns the notification that follows sent edges: call [`Edges::try_recv`] until it returns `None`
    /// then.
    #[must_use]
    pub fn wake(&self) -> Arc<Notify> {
        Arc::clone(&self.shared.wake)
    }
}

/// Distributes edges to the interested subscribers.
#[derive(Clone, Debug, Default)]
pub(super) struct Hub {
    subscribers: Arc<Mutex<Vec<Weak<Shared>>>>,
    dropped: Arc<AtomicU64>,
}

impl Hub {
    /// Subscribes to edges from now on.
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

    /// Sends edges to the subscribers and wakes those that got one. Never blocks.
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

    /// Sends one edge, unless the subscriber has still to read an [`Edge::Lost`]: this keeps the order.
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

    /// Returns the number of edges that found a full channel, over all subscribers.
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
    fn each_subscriber_gets_the_edges_of_its_interest() {
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
    fn a_slow_subscriber_loses_edges_gets_one_notice_and_harms_no_other() {
        let hub = Hub::default();
        let (slow, quick) = (hub.subscribe_with(Interest::ALL, 2), hub.subscribe_with(Interest::ALL, 10));
        hub.send(&[exit(1), exit(2), exit(3), exit(4)]);
        assert_eq!(all(&quick), [exit(1), exit(2), exit(3), exit(4)]);
        assert_eq!(hub.dropped(), 2);
        assert_eq!(slow.try_recv(), Some(exit(1)));
        // Even with room in the channel, edges after a loss come after the notice of it.
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
