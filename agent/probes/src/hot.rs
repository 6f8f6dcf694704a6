//! The part of a probe's state that every check touches.

use std::{sync::Arc, time::Duration};

use beelet_policy::probe::listener::QueueWatch;

use super::{
    ids::Id,
    metrics::Tally,
    timetable::{Timetable, following, on_grid},
};
use beelet_bpf::CheckTarget;

/// State for a check of a [steady](Self::steady) probe. Kept together, since a node with thousands of probes
/// checks each once per second, when the CPU's caches have none of its state any more.
#[derive(Debug)]
pub(super) struct HotState {
    /// Lookup target, if the last check was a success by the kernel and another success would change nothing.
    pub steady: Option<CheckTarget>,
    /// Place in the timetable.
    pub due: Option<Duration>,
    /// Time of the next regular check; a check before that is an additional one.
    pub regular: Duration,
    /// Time between two checks.
    pub period: Duration,
    /// Time of the next canary; [`Duration::MAX`]: never.
    pub canary_due: Duration,
    pub queues: QueueWatch,
    pub tally: Arc<Tally>,
    /// Time and duration of the last check.
    pub looked: (Duration, Duration),
}

impl HotState {
    /// Enters a probe that was due into the timetable again, for its next regular check. Regular checks keep
    /// their distance even if this one is late.
    pub(super) fn again(&mut self, id: Id, timetable: &mut Timetable, now: Duration, by_kernel: bool) {
        if now >= self.regular {
            let next = following(self.regular, self.period, now);
            self.regular = if by_kernel { on_grid(next, self.period) } else { next };
        }
        self.due = None;
        timetable.set(id, &mut self.due, self.regular);
    }
}
