//! The part of a probe's state that every look touches.

use std::{sync::Arc, time::Duration};

use beelet_policy::probe::listener::QueueWatch;

use super::{
    ids::Id,
    metrics::Tally,
    timetable::{Timetable, following, on_grid},
};
use beelet_bpf::CheckTarget;

/// What a look at a [steady](Self::steady) probe needs: kept together, since a node with thousands of probes
/// comes to each once per second, when nothing of it is in the CPU's caches any more.
#[derive(Debug)]
pub(super) struct HotState {
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

impl HotState {
    /// It was due and taken out of the timetable: back in it, for the regular look after this one. These keep
    /// their distance however late this one is.
    pub(super) fn again(&mut self, id: Id, timetable: &mut Timetable, now: Duration, by_kernel: bool) {
        if now >= self.regular {
            let next = following(self.regular, self.period, now);
            self.regular = if by_kernel { on_grid(next, self.period) } else { next };
        }
        self.due = None;
        timetable.set(id, &mut self.due, self.regular);
    }
}
