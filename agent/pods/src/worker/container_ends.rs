//! End times of containers on the monotonic clock. The runtime reports them by the wall clock, which
//! administrators and NTP set: a delay by the wall clock could last for hours, or be skipped.

use std::{collections::BTreeMap, time::Duration};

use beelet_base::clock::After as _;
use beelet_policy::pod::{ContainerState, Observed};
use beelet_units::moment::Moment;
use jiff::Timestamp;
use tokio::time::Instant;

/// Greatest age of an end at the worker's start. No delay is longer.
const BEFORE: Duration = Duration::from_secs(24 * 60 * 60);

/// End times of a pod's containers.
#[derive(Debug)]
pub(super) struct ContainerEnds {
    began: Instant,
    known: BTreeMap<String, Moment>,
}

impl ContainerEnds {
    pub(super) fn new() -> Self {
        Self { began: Instant::now(), known: BTreeMap::new() }
    }

    /// Records new ends, with their age by the wall clock, whose current time is `wall`. An end in the future
    /// of the wall clock counts as now.
    pub(super) fn record(&mut self, observed: &Observed, wall: Timestamp) {
        let now = self.now();
        let ended = observed.containers.iter().filter_map(|container| match container.state {
            ContainerState::Exited { finished_at, .. } => Some((container.id.clone(), finished_at)),
            _ => None,
        });
        let before = std::mem::take(&mut self.known);
        self.known = ended
            .map(|(id, finished_at)| {
                let age = || Duration::try_from(wall.duration_since(finished_at)).unwrap_or(Duration::ZERO);
                let at = before.get(&id).copied().unwrap_or_else(|| now.minus(age()));
                (id, at)
            })
            .collect();
    }

    /// Returns the ends by the runtime's identifiers.
    pub(super) fn known(&self) -> &BTreeMap<String, Moment> {
        &self.known
    }

    pub(super) fn now(&self) -> Moment {
        Moment::after_start(BEFORE + self.began.elapsed())
    }

    /// Converts a moment to a timer's instant; a past moment becomes now.
    pub(super) fn instant(&self, at: Moment) -> Instant {
        Instant::now().after(at.since(self.now()))
    }
}

#[cfg(test)]
mod tests {
    use beelet_policy::pod::Container;

    use super::*;

    fn wall(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + seconds).unwrap()
    }

    fn ended(id: &str, finished: i64) -> Observed {
        let container = Container {
            id: id.to_owned(),
            name: "a".to_owned(),
            attempt: 0,
            sandbox_id: "s".to_owned(),
            state: ContainerState::Exited { exit_code: 1, started_at: None, finished_at: wall(finished) },
            restart_delay: Duration::ZERO,
            round: 0,
        };
        Observed { sandboxes: Vec::new(), containers: vec![container] }
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_of_the_wall_clock_does_not_move_an_end() {
        let (mut ends, second) = (ContainerEnds::new(), Duration::from_secs(1));
        ends.record(&ended("a", 0), wall(5));
        let at = ends.known()["a"];
        assert_eq!(ends.now().since(at), 5 * second);
        for shown in [-10_000, 10_000] {
            tokio::time::sleep(10 * second).await;
            ends.record(&ended("a", 0), wall(shown));
            assert_eq!(ends.known()["a"], at);
        }
        assert_eq!(ends.now().since(at), 25 * second);
        assert_eq!(ends.instant(at.plus(30 * second)), Instant::now() + 5 * second);
        assert_eq!(ends.instant(at), Instant::now());
        // The end of a removed container is forgotten.
        ends.record(&ended("b", 0), wall(5));
        assert_eq!(ends.known().keys().collect::<Vec<_>>(), ["b"]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_in_the_future_counts_as_now() {
        let mut ends = ContainerEnds::new();
        ends.record(&ended("a", 10_800), wall(0));
        assert_eq!(ends.known()["a"], ends.now());
        // The age of an end is limited to the longest delay.
        ends.record(&ended("b", -1_000_000), wall(0));
        assert_eq!(ends.now().since(ends.known()["b"]), BEFORE);
    }
}
