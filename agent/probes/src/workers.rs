//! All probes of the node, and those that go on as they were.

use std::time::Duration;

use slotmap::SlotMap;

use super::{hot::HotState, ids::Id, worker::Worker};

/// Every probe of the node, by its id.
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

    /// To change it in any way: until the next look it is unknown whether it is steady.
    pub(super) fn get_mut(&mut self, id: Id) -> Option<&mut Worker> {
        let worker = self.all.get_mut(id)?;
        worker.hot.steady = None;
        Some(worker)
    }

    /// What a look at a probe that is steady may change.
    pub(super) fn steady_mut(&mut self, id: Id) -> Option<&mut HotState> {
        self.all.get_mut(id).map(|worker| &mut worker.hot).filter(|hot| hot.steady.is_some())
    }

    /// A look at `now` was a success of the kernel's, and has been published.
    pub(super) fn succeeded(&mut self, id: Id, now: Duration) {
        if let Some(worker) = self.all.get_mut(id) {
            worker.hot.steady = if worker.is_steady(now) { worker.place() } else { None };
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Id, &Worker)> {
        self.all.iter()
    }
}
