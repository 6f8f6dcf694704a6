//! Decisions that depend on the holders of a wait.

use super::*;

/// The server waits while these pods use the CPUs: names and permille.
fn waits_for(mut seen: Observed, holders: &[(&str, u32)]) -> Observed {
    let cgroup = |name: &str| {
        seen.pods.iter().find(|pod| pod.name == format!("default/{name}")).unwrap().cgroup.clone()
    };
    let held_by = holders.iter().map(|(name, permille)| (cgroup(name), *permille)).collect();
    seen.pods[0].containers[0].held_by = Some(held_by);
    seen
}

#[test]
fn pods_that_the_server_does_not_wait_for_are_not_restricted() {
    let law = asking();
    let of_own_making = waits_for(node(200, 1600), &[("server", 900), ("hog", 99)]);
    assert_eq!(run(&law, &mut State::default(), &of_own_making, 50), Vec::<String>::new());
    let decision = decide(&law, &State::default(), &of_own_making, &nothing());
    assert_eq!(
        decision.findings[0],
        "default/server (main) waits for a CPU 20 % of the time (5 % at most), 90 % of that for its own threads; no \
         step is taken, as pods that may be restricted did not use the CPUs in that time"
    );
    // The machine's own daemons, and no known pod.
    assert!(run(&law, &mut State::default(), &waits_for(node(200, 1600), &[]), 50).is_empty());
    // A tenth of the wait is worth an attempt; without a limit of useless steps, any share is.
    let hog = waits_for(node(200, 1600), &[("server", 900), ("hog", 100)]);
    assert_eq!(run(&law, &mut State::default(), &hog, 1), ["cpu.idle=1"]);
    let hog = waits_for(node(200, 1600), &[("server", 100), ("hog", 625)]);
    assert_eq!(
        decide(&law, &State::default(), &hog, &nothing()).steps[0].reason,
        "default/server (main) waits for a CPU 20 % of the time (5 % at most), 62.5 % of that for default/hog: BestEffort \
         pods run only on otherwise idle CPUs"
    );
    assert_eq!(run(&quick(), &mut State::default(), &of_own_making, 1), ["cpu.idle=1"]);
}

#[test]
fn a_neighbour_above_its_request_is_capped_only_if_it_was_in_the_way() {
    let mut seen = node(200, 0);
    let mut batch = pod("batch", QosClass::Burstable);
    (batch.cpu_request, batch.cpu_used) = (300, Some(1000));
    seen.pods.push(batch);
    let law = asking();
    let in_the_way = waits_for(seen.clone(), &[("batch", 800)]);
    assert_eq!(run(&law, &mut State::default(), &in_the_way, 1), ["cpu.max=750"]);
    let elsewhere = waits_for(seen.clone(), &[("batch", 20), ("server", 700)]);
    assert!(run(&law, &mut State::default(), &elsewhere, 20).is_empty());
    // A pod within its request is entitled to its CPU time.
    seen.pods[2].cpu_used = Some(250);
    assert!(run(&law, &mut State::default(), &waits_for(seen, &[("batch", 800)]), 20).is_empty());
}

#[test]
fn helpful_steps_stay_when_other_pods_no_longer_cause_the_wait() {
    let (law, mut state) = (asking(), State::default());
    assert_eq!(run(&law, &mut state, &waits_for(node(900, 1600), &[("hog", 900)]), 1), ["cpu.idle=1"]);
    let helped = waits_for(node(400, 1600), &[("hog", 600)]);
    assert_eq!(run(&law, &mut state, &helped, 1), ["cpu.max=1200"]);
    // The rest of the wait is the server's own queue: no more steps follow, and none is reverted.
    let own = waits_for(node(200, 300), &[("server", 950)]);
    assert!(run(&law, &mut state, &own, 50).is_empty());
    assert_eq!(state.held[&knob(BEST_EFFORT, KnobKind::CpuCap)], 1200);
}

#[test]
fn a_server_throttled_by_its_own_quota_gets_a_burst_and_restricts_no_pod() {
    let mut seen = waits_for(node(300, 1600), &[]);
    seen.pods[0].containers[0].throttled_permille = Some(200);
    seen.pods[0].containers[0].quota_us = Some(50_000);
    assert_eq!(run(&asking(), &mut State::default(), &seen, 20), ["cpu.max.burst=50000"]);
}

#[test]
fn the_reason_for_reverting_is_the_lack_of_effect() {
    let (law, mut state) = (asking(), State::default());
    run(&law, &mut state, &node(200, 1600), 3);
    let decision = decide(&law, &state, &node(200, 1600), &nothing());
    assert_eq!(show(&decision), ["cpu.max-"]);
    assert!(decision.steps[0].reason.ends_with("the last 3 steps have not helped"), "{decision:?}");
}

#[test]
fn steps_that_help_go_on_to_the_floor() {
    let (law, mut state, mut wait) = (asking(), State::default(), 1000);
    for _ in 0..20 {
        let decision = decide(&law, &state, &node(wait, 1600), &nothing());
        if !decision.steps.is_empty() {
            wait = wait * 85 / 100;
        }
        state = decision.state;
    }
    assert_eq!(state.held[&knob(BEST_EFFORT, KnobKind::CpuCap)], 200);
    // Helpful steps stay, although no more are possible and the server still waits.
    assert!(run(&law, &mut state, &node(wait, 1600), 50).is_empty());
    let decision = decide(&law, &state, &node(wait, 1600), &nothing());
    assert!(
        decision.findings[0].ends_with("further steps have not helped, so no more are taken"),
        "{decision:?}"
    );
}

#[test]
fn a_container_that_cannot_be_helped_does_not_block_others() {
    let (law, mut state) = (asking(), State::default());
    let mut seen = node(900, 1600);
    run(&law, &mut state, &seen, 10);
    assert_eq!(state.held.len(), 1);
    let mut other = pod("other", QosClass::Burstable);
    other.containers[0].cpu_wait_permille = Some(300);
    seen.pods.push(other);
    let decision = decide(&law, &state, &seen, &nothing());
    assert_eq!(show(&decision), ["cpu.max=1200"]);
    assert!(decision.steps[0].reason.starts_with("default/other (main) waits"), "{decision:?}");
    assert!(decision.findings[0].starts_with("default/other (main) waits"), "{decision:?}");
    // The other container is well: the cap is removed, regardless of the hopeless one.
    state = decision.state;
    seen.pods[2].containers[0].cpu_wait_permille = Some(0);
    run(&law, &mut state, &seen, 20);
    assert_eq!(state.held.len(), 1, "{:?}", state.held);
}

#[test]
fn memory_steps_without_effect_are_reverted_too() {
    let (law, mut state) = (asking(), State::default());
    let steps = run(&law, &mut state, &stalled(100), 50);
    let high = |percent: u64| format!("memory.high={}", 1000 * MIB * percent / 100);
    assert_eq!(steps[..2], [high(90), high(81)]);
    assert_eq!((steps.len(), steps[3].as_str()), (4, "memory.high-"));
    assert!(state.held.is_empty());
}
