//! All probes of the node, and those that go on as they were.

use std::{sync::Arc, time::Duration};

use beelet_policy::probe::listener::QueueWatch;
use slotmap::SlotMap;

use super::{
    metrics::Tally,
    timetable::{Timetable, following, on_grid},
    worker::Worker,
};
use beelet_bpf::CheckTarget;

slotmap::new_key_type! {
    /// A probe, for as long as the agent runs.
    pub(super) struct Id;
}

/// What a look at a [steady](Self::steady) probe needs: kept together, since a node with thousands of probes comes to each
/// once a second, when nothing of it is in the CPU's caches any more.
#[derive(Debug)]
pub(super) struct Beat {
    /// Where to look, if the last look was a success of the kernel's and another one would change nothing.
    pub steady: Option<CheckTarget>,
    /// Where it is in the timetable.
    pub due: Option<Duration>,
    /// When the next regular look comes; one before that is an additional one.
    pub regular: Duration,
    /// The time between two looks.
    pub period: Duration,
    /// When the next canary is sent; [`Duration::MAX`]: never.
    pub canary_due: Duration,
    pub queues: QueueWatch,
    pub tally: Arc<Tally>,
    /// When the last look was, and how long it took.
    pub looked: (Duration, Duration),
}

impl Beat {
    /// It was due and taken out of the timetable: back in it, for the regular look after this one. These keep their distance
    /// however late this one is.
    pub(super) fn again(&mut self, id: Id, timetable: &mut Timetable, now: Duration, by_kernel: bool) {
        if now >= self.regular {
            let next = following(self.regular, self.period, now);
            self.regular = if by_kernel { on_grid(next, self.period) } else { next };
        }
        self.due = None;
        timetable.set(id, &mut self.due, self.regular);
    }
}

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Workers {
    all: SlotMap<Id, Worker>,
}

impl Workers {
    pub(super) fn insert(&mut self, worker: Worker) -> Id {
        self.all.insert(worker)
    }

    pub(super) fn remove(&mut self, id: Id) -> Option<Worker> {
        self.all.remove(id)
    }

    pub(super) fn get(&self, id: Id) -> Option<&Worker> {
        self.all.get(id)
    }

    /// To change it in any way: until the next look nobody knows whether it is steady.
    pub(super) fn get_mut(&mut self, id: Id) -> Option<&mut Worker> {
        let worker = self.all.get_mut(id)?;
        worker.beat.steady = None;
        Some(worker)
    }

    /// What a look at a probe that is steady may change.
    pub(super) fn steady_mut(&mut self, id: Id) -> Option<&mut Beat> {
        self.all.get_mut(id).map(|worker| &mut worker.beat).filter(|beat| beat.steady.is_some())
    }

    /// A look at `now` was a success of the kernel's, and has been told to whom it concerns.
    pub(super) fn succeeded(&mut self, id: Id, now: Duration) {
        if let Some(worker) = self.all.get_mut(id) {
            worker.beat.steady = if worker.is_steady(now) { worker.place() } else { None };
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Id, &Worker)> {
        self.all.iter()
    }
}
