use std::time::Duration;

use crate::plan::{Action, Plan, Scenario};
use crate::shapes::{Pod, Shape};
use crate::trial::Trial;
use beelet_judge::trace::{Restart, Role};

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

/// Returns a pod with one container that runs until it is stopped.
fn pod(number: usize, cpu: u64, is_static: bool) -> Pod {
    let (name, role, lives, stops) = ("main0".to_owned(), Role::Main, None, Some(0));
    Pod {
        name: format!("p{number}"),
        uid: format!("00000000-0000-4000-8000-{number:012}"),
        restart: Restart::Always,
        grace: 5,
        deadline: None,
        is_static,
        containers: vec![Shape { name, role, cpu, lives, stops, probes: Vec::new(), hook: false }],
    }
}

#[test]
fn room_is_not_given_twice_before_the_api_server_is_listed() {
    let kill = Action::Kill { calls: 0, after_effect: false, seconds: 5 };
    let actions = [
        (1, Action::Create(pod(1, 3000, false))),
        (2, Action::Create(pod(2, 100, true))),
        (30, kill),
        // The stop of this pod is the call at which the agent dies.
        (31, Action::Delete { pod: "p2".to_owned(), grace: None }),
        (33, Action::Create(pod(3, 2000, true))),
    ];
    let actions = actions.into_iter().map(|(at, action)| (Duration::from_secs(at), action)).collect();
    let plan = Plan { actions, ..plan(0) };
    let trial = Trial::run(&plan);
    let text = trial.text();
    assert!(text.contains("AgentKilled") && text.contains("OutOfcpu"), "{text}");
    assert!(trial.violations.is_empty(), "{text}");
}
