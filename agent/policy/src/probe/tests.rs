//! Tests of the decisions on probe results.

use super::*;
use proptest::prelude::*;

fn params(success: u32, failure: u32) -> ProbeParams {
    ProbeParams {
        initial_delay: Duration::ZERO,
        success_threshold: success,
        failure_threshold: failure,
        waits_for_startup: false,
        edge_policy: EdgePolicy::Immediate,
    }
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Plays a script of one letter per second on a fresh probe: `s`uccess, `f`ailure, `e`rror, `R`estart
/// (new container), `L`istening, `C`losed, `G`ate opens, `X` container stops, `D` pod deleted.
/// Expectation: the published states, `second` + `+`, `-` or `?`, `!` if a restart is required.
fn check(kind: ProbeKind, params: &ProbeParams, script: &str, expectation: &str) {
    let mut state = ProbeState::new(kind, params);
    let mut seen = Vec::new();
    for (second, letter) in script.chars().enumerate() {
        let now = at(second as u64);
        let transition = match letter {
            's' => state.record(now, Outcome::Success),
            'f' => state.record(now, Outcome::Failure),
            'e' => state.record(now, Outcome::Error),
            'R' => state.container_started(now, now),
            'L' => state.edge(now, true),
            'C' => state.edge(now, false),
            'G' => {
                state.gate.startup_succeeded();
                None
            }
            'X' => state.container_stopped(now),
            'D' => state.pod_deleted(now),
            _ => None,
        };
        if let Some(t) = transition {
            let sign = match t.result {
                ProbeResult::Success => '+',
                ProbeResult::Failure => '-',
                ProbeResult::Unknown => '?',
            };
            seen.push(format!("{}{sign}{}", t.at.as_secs(), if t.restart { "!" } else { "" }));
        }
    }
    assert_eq!(seen.join(" "), expectation, "{kind:?} {params:?} {script}");
}

#[test]
fn thresholds_count_equal_outcomes_in_a_row() {
    check(ProbeKind::Readiness, &params(1, 3), "Rsffsfff", "0- 1+ 7-");
    check(ProbeKind::Readiness, &params(2, 1), "Rsfsss", "0- 4+");
    check(ProbeKind::Readiness, &params(0, 0), "Rsf", "0- 1+ 2-");
}

#[test]
fn errors_neither_count_nor_reset_the_run() {
    check(ProbeKind::Readiness, &params(1, 2), "Rsfeef", "0- 1+ 5-");
    check(ProbeKind::Liveness, &params(1, 3), "Rfefeef", "0+ 6-!");
}

#[test]
fn a_failed_liveness_probe_holds_until_the_new_container_runs() {
    check(ProbeKind::Liveness, &params(1, 2), "RffffsfRsff", "0+ 2-! 7+ 10-!");
}

#[test]
fn the_run_carries_over_into_a_new_container() {
    check(ProbeKind::Liveness, &params(1, 3), "RffRf", "0+ 3+ 4-!");
}

#[test]
fn changed_settings_keep_the_result_and_restart_the_count() {
    let mut state = ProbeState::new(ProbeKind::Readiness, &params(1, 3));
    state.container_started(at(0), at(0));
    assert_eq!(state.record(at(1), Outcome::Success).map(|t| t.result), Some(ProbeResult::Success));
    let fail = |state: &mut ProbeState, times| -> Vec<bool> {
        (0..times).map(|n| state.record(at(10 + n), Outcome::Failure).is_some()).collect()
    };
    assert_eq!(fail(&mut state, 2), [false, false]);
    // The same thresholds (another period, another grace period): the count goes on.
    state.reconfigure(&params(1, 3), false);
    assert_eq!(state.published(), ProbeResult::Success);
    assert_eq!(fail(&mut state, 1), [true]);
    assert!(state.record(at(20), Outcome::Success).is_some());
    assert_eq!(fail(&mut state, 2), [false, false]);
    // Another handler or threshold: the count restarts, and the result stays.
    state.reconfigure(&params(1, 3), true);
    assert_eq!(fail(&mut state, 3), [false, false, true]);
    assert!(state.record(at(30), Outcome::Success).is_some());
    assert_eq!(fail(&mut state, 1), [false]);
    state.reconfigure(&params(1, 2), false);
    assert_eq!(state.published(), ProbeResult::Success);
    assert_eq!(fail(&mut state, 2), [false, true]);
}

#[test]
fn a_changed_initial_delay_counts_until_the_first_outcome() {
    let with = |seconds| ProbeParams { initial_delay: at(seconds), ..params(1, 1) };
    let mut state = ProbeState::new(ProbeKind::Readiness, &with(100));
    state.container_started(at(0), at(0));
    assert!(!state.due(at(5)));
    state.reconfigure(&with(2), false);
    assert!(state.due(at(5)));
    state.record(at(5), Outcome::Success);
    state.reconfigure(&with(50), false);
    assert!(state.due(at(6)), "no effect for this container");
    state.container_started(at(60), at(60));
    assert!(!state.due(at(70)), "but for the next");
}

#[test]
fn a_startup_probe_changed_after_its_success_is_for_the_next_container() {
    let mut state = ProbeState::new(ProbeKind::Startup, &params(1, 1));
    state.container_started(at(0), at(0));
    assert!(state.record(at(1), Outcome::Success).is_some());
    state.reconfigure(&params(1, 5), true);
    assert_eq!((state.published(), state.due(at(2))), (ProbeResult::Success, false));
    state.container_started(at(3), at(3));
    assert!(state.due(at(4)));
}

#[test]
fn a_startup_probe_holds_after_either_result() {
    check(ProbeKind::Startup, &params(1, 2), "Rsfff", "0? 1+");
    check(ProbeKind::Startup, &params(1, 2), "RfffsRs", "0? 2-! 5? 6+");
}

#[test]
fn outcomes_before_the_initial_delay_do_not_count() {
    let late = ProbeParams { initial_delay: at(3), ..params(1, 1) };
    check(ProbeKind::Readiness, &late, "Rsss", "0- 3+");
    check(ProbeKind::Readiness, &late, "RLLL", "0- 3+");
}

#[test]
fn liveness_and_readiness_wait_for_the_startup_probe_of_each_container() {
    let gated = ProbeParams { waits_for_startup: true, ..params(1, 1) };
    check(ProbeKind::Readiness, &gated, "RssGsRsGs", "0- 4+ 5- 8+");
    check(ProbeKind::Liveness, &gated, "RffGf", "0+ 4-!");
    check(ProbeKind::Readiness, &gated, "RLCGL", "0- 4+");
    check(ProbeKind::Startup, &gated, "Rs", "0? 1+");
}

#[test]
fn an_immediate_edge_turns_readiness_at_once() {
    check(ProbeKind::Readiness, &params(1, 3), "RLCL", "0- 1+ 2- 3+");
    check(ProbeKind::Readiness, &params(2, 3), "RLLC", "0- 2+ 3-");
    check(ProbeKind::Readiness, &params(2, 3), "RssCsCss", "0- 2+ 3- 7+");
}

#[test]
fn a_threshold_edge_is_one_more_outcome() {
    let patient = ProbeParams { edge_policy: EdgePolicy::Threshold, ..params(1, 2) };
    check(ProbeKind::Readiness, &patient, "RLCfL", "0- 1+ 3- 4+");
}

#[test]
fn liveness_keeps_its_thresholds_under_any_edge_policy() {
    check(ProbeKind::Liveness, &params(1, 2), "RCsCC", "0+ 4-!");
}

#[test]
fn a_stopped_container_is_not_ready_and_requests_no_restart() {
    check(ProbeKind::Readiness, &params(1, 1), "RsXsRs", "0- 1+ 2- 4- 5+");
    check(ProbeKind::Liveness, &params(1, 1), "RXf", "0+ 1-");
}

#[test]
fn deletion_silences_liveness_and_startup_only() {
    check(ProbeKind::Liveness, &params(1, 1), "RDffR", "0+");
    check(ProbeKind::Startup, &params(1, 1), "RDf", "0? 1+");
    check(ProbeKind::Readiness, &params(1, 1), "RsDf", "0- 1+ 3-");
}

#[test]
fn state_of_an_earlier_agent_does_not_flip() {
    let mut ready = ProbeState::resume(ProbeKind::Readiness, &params(1, 3), at(0), ProbeResult::Success);
    assert_eq!(ready.record(at(9), Outcome::Success), None);
    assert_eq!(ready.published(), ProbeResult::Success);
    let mut started = ProbeState::resume(ProbeKind::Startup, &params(1, 1), at(0), ProbeResult::Success);
    assert_eq!(started.record(at(9), Outcome::Failure), None);
}

proptest! {
    /// Dropping any number of successes in a steady state does not change later transitions.
    #[test]
    fn successes_in_a_steady_state_change_nothing(
        kind in prop::sample::select(vec![ProbeKind::Liveness, ProbeKind::Readiness, ProbeKind::Startup]),
        script in prop::collection::vec(0..10u8, 0..60), success in 1..4u32, failure in 1..4u32,
        delay in 0..4u64, waits in any::<bool>(),
    ) {
        let params = ProbeParams {
            initial_delay: at(delay), waits_for_startup: waits, ..params(success, failure)
        };
        let mut told = ProbeState::new(kind, &params);
        let mut untold = told.clone();
        for (second, letter) in script.into_iter().enumerate() {
            let now = at(second as u64);
            let play = |state: &mut ProbeState| match letter {
                0 => state.record(now, Outcome::Failure),
                1 => state.record(now, Outcome::Error),
                2 => state.container_started(now, now),
                3 => state.container_stopped(now),
                4 => state.edge(now, true),
                5 => state.edge(now, false),
                6 => { state.gate.startup_succeeded(); None }
                7 if second > 50 => state.pod_deleted(now),
                _ => state.record(now, Outcome::Success),
            };
            let is_untold = untold.is_steady(now) && letter > 7;
            let expected = play(&mut told);
            let got = if is_untold { None } else { play(&mut untold) };
            prop_assert_eq!(got, expected, "{} at {}", letter, second);
            prop_assert_eq!(untold.is_steady(now), told.is_steady(now));
        }
    }

    /// A published success or failure always follows a full row of equal outcomes.
    #[test]
    fn no_change_without_a_full_row(outcomes in prop::collection::vec(0..3u8, 0..60), success in 1..4u32, failure in 1..4u32) {
        let mut state = ProbeState::new(ProbeKind::Readiness, &params(success, failure));
        state.container_started(at(0), at(0));
        let mut counted = Vec::new();
        for (second, outcome) in outcomes.iter().enumerate() {
            let outcome = [Outcome::Success, Outcome::Failure, Outcome::Error][usize::from(*outcome)];
            if outcome != Outcome::Error {
                counted.push(outcome);
            }
            if let Some(transition) = state.record(at(second as u64), outcome) {
                let (want, row) = match transition.result {
                    ProbeResult::Success => (Outcome::Success, success),
                    _ => (Outcome::Failure, failure),
                };
                prop_assert!(counted.iter().rev().take(row as usize).filter(|o| **o == want).count() == row as usize);
            }
        }
    }
}
