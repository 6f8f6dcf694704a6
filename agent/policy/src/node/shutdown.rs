//! Graceful node shutdown: order and grace periods of the pods' termination (KEP-2000, KEP-2712;
//! `pkg/kubelet/nodeshutdown/nodeshutdown_manager.go` of the kubelet).

use std::time::Duration;

use crate::resources::critical::SYSTEM_CRITICAL_PRIORITY;

/// Time that the node needs after the pods' periods: a pod that used all of its own must still release its
/// volumes, and its status must be written. The kubelet has no margin, and loses both (kubernetes/kubernetes
/// 110755, 112443).
pub const MARGIN: Duration = Duration::from_secs(10);
/// Part of the longest delay left to the machine: the agent releases the lock before logind breaks it.
const RESERVE: Duration = Duration::from_millis(500);

/// The period for pods from one priority up to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Period {
    /// Minimum priority.
    pub priority: i32,
    /// Maximum time for these pods.
    pub grace: Duration,
}

/// All periods, by ascending priority. Without any, pods get no time, and the machine does not wait for them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Periods(Vec<Period>);

/// Pods terminated together, and the time for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group<T> {
    /// The configured period.
    pub period: Period,
    /// The pods; never empty.
    pub pods: Vec<T>,
}

impl Periods {
    /// Creates the set from periods in any order.
    #[must_use]
    pub fn new(mut periods: Vec<Period>) -> Self {
        periods.sort_by_key(|period| period.priority);
        Self(periods)
    }

    /// Returns the periods for `shutdownGracePeriod`, whose last part `shutdownGracePeriodCriticalPods`
    /// belongs to critical pods alone. In whole seconds, as in the kubelet (`migrateConfig`).
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

    /// Returns true if the machine does not wait for pods at all.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the periods, by ascending priority.
    #[must_use]
    pub fn all(&self) -> &[Period] {
        &self.0
    }

    /// Returns the total time of all periods.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.0.iter().map(|period| period.grace).sum()
    }

    /// Returns the shutdown delay that logind must allow.
    #[must_use]
    pub fn needed_delay(&self) -> Duration {
        self.total() + MARGIN
    }

    /// Groups pods, each given with its priority, in the order of termination. A pod belongs to the period
    /// with the highest priority not above its own; a pod below all belongs to the lowest
    /// (`groupByPriority`). Groups without pods take no time.
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

/// Returns a pod's time: its own grace period, limited to the group's.
#[must_use]
pub fn grace(own: Duration, group: Duration) -> Duration {
    own.min(group)
}

/// Returns the latest time after the beginning of a shutdown for releasing the lock, if logind waits for
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
    fn pods_terminate_with_the_highest_period_not_above_them() {
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
        // Without a period of 0, the lowest period includes the pods below it.
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
    fn the_lock_is_released_before_logind_breaks_it() {
        assert_eq!(latest_release(seconds(40)), Duration::from_millis(39_500));
        assert_eq!(latest_release(seconds(1)), Duration::from_millis(900));
        assert_eq!(latest_release(seconds(0)), seconds(0));
    }
}
