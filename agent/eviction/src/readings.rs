//! Readings of a terminating pod's usage, with their times.

use beelet_policy::eviction::PodUsage;
use tokio::time::{Duration, Instant};

/// Minimum time between two kept readings, except for the newest ones.
const APART: Duration = Duration::from_secs(1);
/// Maximum number of kept readings: they span more than the maximum age of any number.
const MOST: usize = 64;

/// The readings of one pod. Their number is bounded for any duration of the pod's termination.
#[derive(Debug, Clone)]
pub(super) struct Readings {
    first: (Instant, PodUsage),
    later: Vec<(Instant, PodUsage)>,
}

impl Readings {
    /// Starts with the reading at the eviction.
    pub(super) fn new(at: Instant, usage: PodUsage) -> Self {
        Self { first: (at, usage), later: Vec::new() }
    }

    /// Returns the usage at the eviction.
    pub(super) fn first(&self) -> PodUsage {
        self.first.1
    }

    /// Adds a reading, if it is newer than the last one. Keeps the last two, and one per second before those.
    pub(super) fn add(&mut self, at: Instant, usage: PodUsage) {
        let last = self.later.last().unwrap_or(&self.first);
        if at <= last.0 {
            return;
        }
        if let [.., (before, _), (middle, _), _] = self.later.as_slice()
            && middle.duration_since(*before) < APART
        {
            self.later.remove(self.later.len() - 2);
        }
        if self.later.len() == MOST {
            self.later.remove(0);
        }
        self.later.push((at, usage));
    }

    /// Returns the usage at the time of a reading, or before. Never a later one: that lacks the amount freed
    /// in between, which the number does not include either, and other pods would be evicted for it.
    pub(super) fn by(&self, read_at: Instant) -> PodUsage {
        let later = self.later.partition_point(|(at, _)| *at <= read_at);
        later.checked_sub(1).and_then(|last| self.later.get(last)).map_or(self.first.1, |(_, usage)| *usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pids(pids: u64) -> PodUsage {
        PodUsage { pids, ..PodUsage::default() }
    }

    #[test]
    fn readings_over_hours_are_few_and_the_newest_are_complete() {
        let began = Instant::now();
        let at = |tenths: u64| began + Duration::from_millis(100 * tenths);
        let mut readings = Readings::new(began, pids(0));
        for tenths in 1..=36_000 {
            readings.add(at(tenths), pids(tenths));
            assert!(readings.later.len() <= MOST);
            // A number is read shortly before the decision that uses it.
            assert_eq!(readings.by(at(tenths - 1)).pids, tenths - 1);
        }
        assert_eq!(readings.by(at(36_000)).pids, 36_000);
        assert_eq!(readings.first(), pids(0));
        for late in [10, 100, 300] {
            let seen = readings.by(at(36_000 - late)).pids;
            assert!(seen <= 36_000 - late && seen + 20 >= 36_000 - late, "{seen} is too old");
        }
        assert_eq!(readings.by(began), pids(0), "an older number gets the first reading");
    }

    #[test]
    fn a_reading_that_is_not_newer_changes_nothing() {
        let began = Instant::now();
        let mut readings = Readings::new(began, pids(3));
        readings.add(began, pids(1));
        assert_eq!(readings.by(began + APART), pids(3));
    }
}
