//! How much a pod on its way out was seen to use, and when.

use beelet_policy::eviction::PodUsage;
use tokio::time::{Duration, Instant};

/// Least time between two looks that are kept, but for the newest ones.
const APART: Duration = Duration::from_secs(1);
/// Most looks that are kept: longer than any number counts after it was read.
const MOST: usize = 64;

/// The looks at one pod. Their number is bounded, however long the pod takes to be gone.
#[derive(Debug, Clone)]
pub(super) struct Looks {
    first: (Instant, PodUsage),
    later: Vec<(Instant, PodUsage)>,
}

impl Looks {
    /// The look at which the pod was told to go.
    pub(super) fn new(at: Instant, usage: PodUsage) -> Self {
        Self { first: (at, usage), later: Vec::new() }
    }

    /// The usage when the pod was told to go.
    pub(super) fn first(&self) -> PodUsage {
        self.first.1
    }

    /// Adds a look, if it is newer than the last one. The last two stay as they are; of those before, one per
    /// second does.
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

    /// The usage when a number was read, or before. Never what was seen later: that lacks what was freed in
    /// between, which isn't in the number either, and others would have to go for it.
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
    fn looks_of_hours_are_few_and_the_newest_are_all_there() {
        let began = Instant::now();
        let at = |tenths: u64| began + Duration::from_millis(100 * tenths);
        let mut looks = Looks::new(began, pids(0));
        for tenths in 1..=36_000 {
            looks.add(at(tenths), pids(tenths));
            assert!(looks.later.len() <= MOST);
            // A number is read a little before the decision that looks.
            assert_eq!(looks.by(at(tenths - 1)).pids, tenths - 1);
        }
        assert_eq!(looks.by(at(36_000)).pids, 36_000);
        assert_eq!(looks.first(), pids(0));
        for late in [10, 100, 300] {
            let seen = looks.by(at(36_000 - late)).pids;
            assert!(seen <= 36_000 - late && seen + 20 >= 36_000 - late, "{seen} is too old");
        }
        assert_eq!(looks.by(began), pids(0), "a number from before has what there was at first");
    }

    #[test]
    fn a_look_that_is_not_newer_changes_nothing() {
        let began = Instant::now();
        let mut looks = Looks::new(began, pids(3));
        looks.add(began, pids(1));
        assert_eq!(looks.by(began + APART), pids(3));
    }
}
