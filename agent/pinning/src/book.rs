//! The pins, and the pods that request some.

use std::collections::{BTreeMap, BTreeSet};

use beelet_policy::pinning::Pins;
use tokio::sync::watch;

use super::Active;

/// Maximum number of refused pods that are remembered for another try.
const MAX_REFUSED: usize = 1024;

/// The pins of a node.
#[derive(Debug)]
pub(super) struct Book {
    pub(super) pins: Pins,
    /// Pods with a request, each with a receiver that has seen the active set published
    /// before: that set may not name the pod yet.
    entering: BTreeMap<String, watch::Receiver<Active>>,
    /// Refused pods that may fit after a release.
    refused: BTreeSet<String>,
    /// True after a release since the refused pods were last tried.
    pub(super) freed: bool,
    /// Pods that lost their assignments of the state files, until their events are recorded.
    pub(super) lost: BTreeSet<String>,
}

impl Book {
    pub(super) fn new(pins: Pins, lost: BTreeSet<String>) -> Self {
        Self { pins, entering: BTreeMap::new(), refused: BTreeSet::new(), freed: false, lost }
    }

    /// Records that the pod may hold pins, although the active set may not name it yet.
    pub(super) fn enter(&mut self, uid: &str, active: &watch::Receiver<Active>) {
        let mut seen = active.clone();
        seen.mark_unchanged();
        self.entering.insert(uid.to_owned(), seen);
        self.refused.remove(uid);
    }

    /// Remembers a refused pod for another try.
    pub(super) fn refuse(&mut self, uid: &str) {
        if self.refused.len() < MAX_REFUSED {
            self.refused.insert(uid.to_owned());
        }
    }

    /// Removes and returns the refused pods after a release since the last call.
    pub(super) fn drain_refused(&mut self) -> BTreeSet<String> {
        match std::mem::take(&mut self.freed) {
            true => std::mem::take(&mut self.refused),
            false => BTreeSet::new(),
        }
    }

    /// Frees the pins of a pod. Returns true if the pod had any.
    pub(super) fn release(&mut self, uid: &str) -> bool {
        let had = !self.holders(uid).is_empty();
        self.pins.release(uid);
        self.entering.remove(uid);
        self.freed |= had;
        had
    }

    /// The containers of a pod that hold pins.
    pub(super) fn holders(&self, uid: &str) -> BTreeSet<String> {
        let (cpus, memory) = (self.pins.cpus.state(), self.pins.memory.state());
        let cpus = cpus.containers.get(uid).into_iter().flat_map(BTreeMap::keys);
        let memory = memory.containers.get(uid).into_iter().flat_map(BTreeMap::keys);
        cpus.chain(memory).cloned().collect()
    }

    /// Frees the pins of pods that are neither active nor `asking`. Returns true if there were any.
    pub(super) fn free_inactive(&mut self, active: &BTreeSet<String>, asking: &str) -> bool {
        // An active set published after the request already accounts for the pod.
        self.entering.retain(|_, seen| !seen.has_changed().unwrap_or(true));
        let entering = &self.entering;
        let may_hold = |uid: &str| uid == asking || entering.contains_key(uid) || active.contains(uid);
        self.lost.retain(|uid| may_hold(uid));
        let (cpus, memory) = (self.pins.cpus.state(), self.pins.memory.state());
        let mut holders = cpus.containers.keys().chain(cpus.pods.keys());
        let mut holders_of_memory = memory.containers.keys().chain(memory.pods.keys());
        let is_over = |uid: &String| !may_hold(uid);
        if !holders.any(is_over) && !holders_of_memory.any(is_over) {
            return false;
        }
        self.pins.retain(|uid, _| may_hold(uid));
        self.freed = true;
        true
    }
}
