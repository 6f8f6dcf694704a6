//! Pods that leave with any grace period.

use beelet_base::clock::After as _;
use proptest::prelude::*;

use super::*;
use crate::book::LONGEST_WAIT;

#[tokio::test(start_paused = true)]
async fn no_pod_waits_for_one_that_takes_years_to_leave() {
    let node = Node::new();
    node.admits(&plain("old", "3")).await;
    node.admission.leaving("old", Duration::from_secs(365 * 24 * 3600));
    let words = "Pod was rejected: Node didn't have enough resource: cpu, requested: 2000, used: 3000, capacity: 4000";
    node.rejects(&plain("new", "2"), "OutOfcpu", words).await;
    node.admits(&plain("small", "1")).await;
}

/// Returns short grace periods as often as any other ones.
fn grace_seconds() -> impl Strategy<Value = u64> {
    prop_oneof![0..1000_u64, any::<u64>()]
}

proptest! {
    /// For any grace period: the termination is published, a pod waits with a deadline or is rejected, and a
    /// later call can only shorten the period.
    #[test]
    fn a_pod_may_leave_with_any_grace_period(seconds in grace_seconds(), nanos in 0..1_000_000_000_u32) {
        let cpus = ("cpu".to_owned(), beelet_units::quantity::Quantity::from_units(4));
        let pods = ("pods".to_owned(), beelet_units::quantity::Quantity::from_units(10));
        let resources = NodeResources::new([cpus, pods].into(), &Default::default(), &[]);
        let mut ledger = Ledger::new(resources, preemption::Policy::Kubelet);
        let (now, grace) = (Instant::now(), Duration::new(seconds, nanos));
        ledger.book.enter(&plain("a", "3"), false);
        let publishes = |ledger: &mut Ledger, grace: Duration| {
            let before = ledger.book.changes();
            ledger.book.leaving("a", now, grace);
            ledger.book.changes() != before
        };
        prop_assert!(publishes(&mut ledger, grace));
        prop_assert!(!publishes(&mut ledger, grace.saturating_add(SECOND)));
        let by = now.after(patience(grace));
        match ledger.decide(&plain("b", "3"), now) {
            Verdict::Wait { until } => {
                prop_assert_eq!(until, Some(by));
                prop_assert!(by <= now + LONGEST_WAIT && by >= now + 10 * SECOND);
            }
            Verdict::Rejected(_) => prop_assert!(by > now + LONGEST_WAIT),
            verdict => return Err(TestCaseError::fail(format!("{verdict:?}"))),
        }
        prop_assert!(by.duration_since(now) >= grace.min(beelet_units::bounds::FAR));
        prop_assert_eq!(publishes(&mut ledger, Duration::ZERO), by > now + 10 * SECOND);
    }
}

#[test]
fn a_pod_with_the_longest_grace_period_of_all_leaves() {
    for seconds in [u64::MAX, i64::MAX.unsigned_abs(), 1_000_000_000_000] {
        assert!(patience(Duration::from_secs(seconds)) >= Duration::from_secs(seconds));
    }
}
