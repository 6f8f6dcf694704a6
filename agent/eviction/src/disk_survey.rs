//! Measurements of pods' disk usage, which take long: requested once the disk is low.

use std::time::Duration;

use beelet_model::table::PodTable;
use beelet_policy::eviction::{DiskLayout, Signal};
use beelet_units::quantity::Quantity;
use tokio::time::Instant;

use super::{DiskUsages, leaving::Pod};

/// Time for which measurements of pods' disk usage stay valid while the disk stays low.
const DISKS: Duration = Duration::from_secs(60);

/// The measurements, and the last request for them.
#[derive(Debug)]
pub(super) struct DiskSurvey {
    usage: DiskUsages,
    /// Time from which measurements count.
    pub(super) asked: Option<Instant>,
}

impl DiskSurvey {
    pub(super) fn new(usage: DiskUsages) -> Self {
        Self { usage, asked: None }
    }

    /// Returns the time from which measurements count, which is not before `called`. Requests new
    /// measurements if the earlier ones are too old.
    pub(super) fn since(&mut self, called: Option<Instant>) -> Instant {
        let holds = |asked: &Instant| called.is_none_or(|called| *asked >= called) && asked.elapsed() < DISKS;
        self.asked.filter(holds).unwrap_or_else(|| {
            let now = Instant::now();
            self.usage.ask(now);
            *self.asked.insert(now)
        })
    }

    /// Returns true if every pod's disk usage was measured since then.
    pub(super) fn are_measured(&self, table: &PodTable, since: Instant) -> bool {
        let mut holding = table.pods.values().filter(|entry| !entry.is_gone());
        holding.all(|entry| {
            let uid = entry.pod.metadata.uid.as_deref();
            uid.is_none_or(|uid| self.usage.is_measured(uid, since))
        })
    }

    /// Returns true if no further measurement is needed: a single pod accounts for the missing amount by its
    /// growth since the last measurement before `since`.
    pub(super) fn is_evident(
        &self,
        (chosen, candidates): (&[usize], &[&Pod]),
        (signal, layout): (Signal, DiskLayout),
        missing: Quantity,
        since: Instant,
    ) -> bool {
        let [chosen] = chosen else { return false };
        let Some(pod) = candidates.get(*chosen) else { return false };
        let Some(before) = self.usage.before(&pod.uid, since) else { return false };
        let gained = pod.frees(signal, layout).saturating_sub(before.of(signal, layout));
        gained > Quantity::ZERO && gained >= missing
    }
}
