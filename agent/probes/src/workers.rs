//! All probes of the node, and access to the steady ones.

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

    /// Returns a probe for any change; it no longer counts as steady until its next check.
    pub(super) fn get_mut(&mut self, id: Id) -> Option<&mut Worker> {
        let worker = self.all.get_mut(id)?;
        worker.hot.steady = None;
        Some(worker)
    }

    /// Returns the part of a steady probe that a check may change.
    pub(super) fn steady_mut(&mut self, id: Id) -> Option<&mut HotState> {
        self.all.get_mut(id).map(|worker| &mut worker.hot).filter(|hot| hot.steady.is_some())
    }

    /// Records a published success by the kernel at `now`.
    pub(super) fn succeeded(&mut self, id: Id, now: Duration) {
        if let Some(worker) = self.all.get_mut(id) {
            worker.hot.steady = if worker.is_steady(now) { worker.place() } else { None };
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Id, &Worker)> {
        self.all.iter()
    }
}
