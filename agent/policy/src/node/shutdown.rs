//! The graceful end of a node: which pods go when, and how long each may take (KEP-2000, KEP-2712;
//! `pkg/kubelet/nodeshutdown/nodeshutdown_manager.go` of the kubelet).

use std::time::Duration;

use crate::resources::critical::SYSTEM_CRITICAL_PRIORITY;

/// What the node needs after the pods' time: a pod that used all of its own still has volumes to give
/// back and a status to be written. The kubelet asks for nothing more, and loses both
/// (kubernetes/kubernetes 110755, 112443).
pub const MARGIN: Duration = Duration::from_secs(10);
/// What of the longest delay is left to the machine: the lock is given back before it is taken away.
const RESERVE: Duration = Duration::from_millis(500);

/// The time for pods from one priority on, up to the next one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Period {
    /// The least priority.
    pub priority: i32,
    /// How long these pods may take.
    pub grace: Duration,
}

/// All periods, by priority from low to high. None: pods get nothing, and the machine doesn't wait for them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Periods(Vec<Period>);

/// Pods that end together, and how long they may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group<T> {
    /// From the configuration.
    pub period: Period,
    /// Never empty.
    pub pods: Vec<T>,
}

impl Periods {
    /// Periods in any order.
    #[must_use]
    pub fn new(mut periods: Vec<Period>) -> Self {
        periods.sort_by_key(|period| period.priority);
        Self(periods)
    }

    /// `shutdownGracePeriod`, of whose end `shutdownGracePeriodCriticalPods` belongs to critical pods
    /// alone. In whole seconds, as from the kubelet (`migrateConfig`).
    #[must_use]
    pub fn of_totals(total: Duration, critical: Duration) -> Self {
        if total.is_zero() {
            return Self::default();
        }
        let whole = |period: Duration| Duration::from_secs(period.as_secs());
        let usual = total.saturating_sub(critical);
        Self(vec![
            Period { priority: 0, grace: whole(usual) },
            Period { priority: SYSTEM_CRITICAL_PRIORITY, grace: whole(total - usual) },
        ])
    }

    /// Whether the machine doesn't wait for pods at all.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.0.is_empty()
    }

    /// From low to high.
    #[must_use]
    pub fn all(&self) -> &[Period] {
        &self.0
    }

    /// What all pods may take together.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.0.iter().map(|period| period.grace).sum()
    }

    /// How long logind has to let a shutdown be delayed.
    #[must_use]
    pub fn needed_delay(&self) -> Duration {
        self.total() + MARGIN
    }

    /// The pods by when they go, each with its priority. A pod belongs to the period with the highest
    /// priority that is not above its own; one that is below all to the lowest (`groupByPriority`).
    /// Groups without pods take no time.
    #[must_use]
    pub fn groups<T>(&self, pods: impl IntoIterator<Item = (T, i32)>) -> Vec<Group<T>> {
        let mut groups: Vec<Group<T>> =
            self.0.iter().map(|period| Group { period: *period, pods: Vec::new() }).collect();
        for (pod, priority) in pods {
            let above = groups.partition_point(|group| group.period.priority <= priority);
            if let Some(group) = groups.get_mut(above.saturating_sub(1)) {
                group.pods.push(pod);
            }
        }
        groups.retain(|group| !group.pods.is_empty());
        groups
    }
}

/// What a pod of a group gets: its own grace period, but no more than the group has.
#[must_use]
pub fn grace(own: Duration, group: Duration) -> Duration {
    own.min(group)
}

/// How long after the beginning of the shutdown the lock is given back at the latest, where logind waits for
/// `longest_delay`.
#[must_use]
pub fn latest_release(longest_delay: Duration) -> Duration {
    longest_delay.saturating_sub(RESERVE.min(longest_delay / 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn periods(all: &[(i32, u64)]) -> Periods {
        Periods::new(all.iter().map(|(p, s)| Period { priority: *p, grace: seconds(*s) }).collect())
    }

    #[test]
    fn a_total_is_split_between_usual_and_critical_pods() {
        let check = |total, critical, expected: &[(i32, u64)]| {
            let split = Periods::of_totals(Duration::from_millis(total), Duration::from_millis(critical));
            assert_eq!(split, periods(expected), "{total} {critical}");
        };
        let critical = SYSTEM_CRITICAL_PRIORITY;
        check(0, 0, &[]);
        check(30_000, 10_000, &[(0, 20), (critical, 10)]);
        check(30_000, 0, &[(0, 30), (critical, 0)]);
        check(30_000, 30_000, &[(0, 0), (critical, 30)]);
        check(30_900, 10_500, &[(0, 20), (critical, 10)]);
        assert!(Periods::of_totals(seconds(0), seconds(0)).is_off());
        assert_eq!(Periods::of_totals(seconds(30), seconds(10)).total(), seconds(30));
        assert_eq!(periods(&[(5, 1), (0, 2)]).needed_delay(), seconds(13));
    }

    #[test]
    fn pods_go_with_the_period_that_is_not_above_them_from_low_to_high() {
        // The KEP's example, in another order.
        let all = periods(&[(100_000, 10), (0, 60), (10_000, 20), (2_000_000_000, 5)]);
        let check = |priorities: &[i32], expected: &[(i32, &[i32])]| {
            let groups = all.groups(priorities.iter().map(|priority| (*priority, *priority)));
            let found: Vec<(i32, &[i32])> =
                groups.iter().map(|group| (group.period.priority, group.pods.as_slice())).collect();
            assert_eq!(found, expected);
        };
        check(&[], &[]);
        check(&[0, -5, i32::MIN, 9_999], &[(0, &[0, -5, i32::MIN, 9_999])]);
        check(&[10_000, 99_999], &[(10_000, &[10_000, 99_999])]);
        check(
            &[i32::MAX, 0, 2_000_000_000, 100_000],
            &[(0, &[0]), (100_000, &[100_000]), (2_000_000_000, &[i32::MAX, 2_000_000_000])],
        );
        assert!(Periods::default().groups([((), 0)]).is_empty());
        // Without a period of 0 the lowest one has what is below it.
        let high = periods(&[(1000, 1), (2000, 2)]);
        assert_eq!(high.groups([("low", 5)])[0].period.priority, 1000);
    }

    #[test]
    fn a_pod_gets_no_more_than_its_group() {
        for (own, group, expected) in [(30, 10, 10), (5, 10, 5), (30, 0, 0)] {
            assert_eq!(grace(seconds(own), seconds(group)), seconds(expected));
        }
    }

    #[test]
    fn the_lock_is_given_back_before_it_is_taken_away() {
        assert_eq!(latest_release(seconds(40)), Duration::from_millis(39_500));
        assert_eq!(latest_release(seconds(1)), Duration::from_millis(900));
        assert_eq!(latest_release(seconds(0)), seconds(0));
    }
}
