use std::time::Duration;

use crate::plan::{Action, Plan, Scenario};
use crate::trial::Trial;

/// Returns a plan with kills, faults and pods of both kinds.
fn plan(seed: u64) -> Plan {
    Plan::of(seed, Scenario::Mixed, Duration::from_secs(200), 6)
}

#[test]
fn the_same_seed_has_the_same_trace() {
    for seed in 0..2 {
        let (first, second) = (Trial::run(&plan(seed)).text(), Trial::run(&plan(seed)).text());
        let differing = first.lines().zip(second.lines()).find(|(first, second)| first != second);
        assert_eq!(differing, None, "seed {seed}");
        assert_eq!(first, second, "seed {seed}");
        assert!(first.contains("Started"), "{first}");
    }
    assert_ne!(Trial::run(&plan(0)).text(), Trial::run(&plan(1)).text());
}

#[test]
fn a_plan_has_no_action_after_its_end_and_starts_with_a_pod() {
    for seed in 0..200 {
        let plan = plan(seed);
        assert!(matches!(plan.actions.first(), Some((_, Action::Create(_)))), "{plan:?}");
        assert!(plan.faults_end() < plan.end, "{plan:?}");
        assert!(plan.actions.is_sorted_by_key(|(at, _)| *at));
    }
}
