//! The timetable of checks: an ordered set of deadlines for all probes of the node.
//!
//! Probes that the kernel answers cost a microsecond each, so their total cost depends on the number of the
//! agent's wake-ups: their checks are aligned to a grid of their period (at most a second), and all due
//! checks run together. The grid moves a probe's first check, not the time between its checks. Only the
//! kernel notices such a burst; checks that an application must answer are spread instead.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use super::ids::Id;

/// Maximum step of the grid.
const COARSEST: Duration = Duration::from_secs(1);

/// The deadlines, on the clock of `policy::probe`, each with the probes due then, of which the grid makes
/// many.
#[derive(Debug, Default)]
pub(super) struct Timetable {
    due: BTreeMap<Duration, Vec<Id>>,
}

impl Timetable {
    /// Schedules a probe at `at` instead of its current `place`, and updates `place`.
    pub(super) fn set(&mut self, id: Id, place: &mut Option<Duration>, at: Duration) {
        self.remove(id, place);
        self.due.entry(at).or_default().push(id);
        *place = Some(at);
    }

    /// Removes a probe.
    pub(super) fn remove(&mut self, id: Id, place: &mut Option<Duration>) {
        let Some(before) = place.take() else { return };
        if let Some(ids) = self.due.get_mut(&before) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.due.remove(&before);
            }
        }
    }

    /// Returns the next deadline.
    pub(super) fn next(&self) -> Option<Duration> {
        self.due.first_key_value().map(|(at, _)| *at)
    }

    /// Removes the due probes and returns them in order.
    pub(super) fn pop_due(&mut self, now: Duration) -> Vec<Id> {
        let later = self.due.split_off(&(now + Duration::from_nanos(1)));
        std::mem::replace(&mut self.due, later).into_values().flatten().collect()
    }
}

/// Returns the first point of the grid for `period` that isn't before `at`.
pub(super) fn on_grid(at: Duration, period: Duration) -> Duration {
    let step = period.clamp(Duration::from_millis(1), COARSEST).as_nanos();
    let points = at.as_nanos().div_ceil(step);
    Duration::from_nanos(u64::try_from(points * step).unwrap_or(u64::MAX))
}

/// Returns a probe's offset in its period, which spreads probes evenly: always the same for the same probe.
pub(super) fn phase(of: &impl Hash, period: Duration) -> Duration {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    let millis = u64::try_from(period.as_millis()).unwrap_or(u64::MAX).max(1);
    Duration::from_millis(hasher.finish() % millis)
}

/// Returns the next of the moments `from + n * period` after `now`.
pub(super) fn following(from: Duration, period: Duration, now: Duration) -> Duration {
    if now < from {
        return from;
    }
    let missed = (now - from).as_nanos() / period.as_nanos().max(1);
    let ahead = period.saturating_mul(u32::try_from(missed + 1).unwrap_or(u32::MAX));
    from.saturating_add(ahead).max(now)
}

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::*;

    fn millis(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn due_probes_come_once_and_in_order() {
        let mut table = Timetable::default();
        let mut ids: SlotMap<Id, ()> = SlotMap::with_key();
        let ids = [(); 5].map(|()| ids.insert(()));
        let mut places = [None; 5];
        for (probe, at) in [(0, 30), (1, 10), (2, 20), (3, 40), (4, 10)] {
            table.set(ids[probe], &mut places[probe], millis(at));
        }
        table.set(ids[0], &mut places[0], millis(5));
        table.remove(ids[2], &mut places[2]);
        assert_eq!(table.next(), Some(millis(5)));
        assert_eq!(table.pop_due(millis(10)), [ids[0], ids[1], ids[4]]);
        assert_eq!(table.pop_due(millis(10)), []);
        assert_eq!(table.due, BTreeMap::from([(millis(40), vec![ids[3]])]));
    }

    #[test]
    fn the_grid_is_the_period_up_to_a_second_and_keeps_the_time_between_checks() {
        let check = |at, period, expect| {
            assert_eq!(on_grid(millis(at), millis(period)), millis(expect), "{at} {period}");
        };
        check(1, 100, 100);
        check(200, 100, 200);
        check(1, 1000, 1000);
        check(1, 60_000, 1000);
        check(1001, 60_000, 2000);
        check(1, 5, 5);
        let mut at = on_grid(millis(1234), millis(100));
        for _ in 0..10 {
            let next = on_grid(at + millis(100), millis(100));
            assert_eq!(next - at, millis(100));
            at = next;
        }
    }

    #[test]
    fn a_late_check_does_not_move_the_next_ones() {
        assert_eq!(following(millis(100), millis(50), millis(100)), millis(150));
        assert_eq!(following(millis(100), millis(50), millis(149)), millis(150));
        assert_eq!(following(millis(100), millis(50), millis(320)), millis(350));
        assert_eq!(following(millis(100), millis(50), millis(20)), millis(100));
    }

    #[test]
    fn phases_spread_probes_through_their_period() {
        let period = millis(1000);
        let mut slots = [0_u32; 10];
        for probe in 0..1000_u32 {
            let at = phase(&("pod", probe), period);
            assert!(at < period);
            slots[usize::try_from(at.as_millis() / 100).unwrap()] += 1;
        }
        let most = slots.into_iter().max().unwrap();
        // k/k 52154 and 102064: bursts of probes. The busiest tenth has less than half more than the mean.
        assert!(most <= 150, "{slots:?}");
    }
}
