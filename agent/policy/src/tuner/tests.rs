use proptest::prelude::*;

use super::*;

mod holders;
mod properties;

const BEST_EFFORT: &str = "/kubepods/besteffort";
const MIB: u64 = 1 << 20;

/// A law without patience that caps every pod it may and ignores the effect of steps: most tests have no
/// container to help.
fn quick() -> Law {
    Law { hot_ticks: 1, calm_ticks: 1, helpless_steps: 0, cpu_caps: CpuCaps::Always, ..Law::default() }
}

/// The same law, which gives up.
fn asking() -> Law {
    Law { helpless_steps: 3, ..quick() }
}

fn pod(name: &str, class: QosClass) -> PodSample {
    let cgroup = format!("/kubepods/{}/pod{name}", class.as_str().to_lowercase());
    let container = ContainerSample {
        name: "main".to_owned(),
        cgroup: format!("{cgroup}/1"),
        ..ContainerSample::default()
    };
    PodSample {
        name: format!("default/{name}"),
        class,
        cgroup,
        cpu_request: 0,
        cpu_used: Some(0),
        can_cap: true,
        quota_us: None,
        memory_request: 0,
        memory_used: 0,
        working_set: 0,
        memory_still_permille: Some(0),
        memory_growth_permille: None,
        containers: vec![ContainerSample {
            cpu_wait_permille: Some(0),
            throttled_permille: Some(0),
            memory_stall_permille: Some(0),
            ..container
        }],
    }
}

/// A server that waits, and a hog.
fn node(wait_permille: u32, best_effort_used: u64) -> Observed {
    let mut server = pod("server", QosClass::Guaranteed);
    server.containers[0].cpu_wait_permille = Some(wait_permille);
    let supports = Supports {
        idle: true,
        harmless_caps: true,
        memory_high: true,
        burst: true,
        disk_weight: false,
        weights: false,
    };
    let pods = vec![server, pod("hog", QosClass::BestEffort)];
    Observed { cpus: 2000, best_effort: BEST_EFFORT.to_owned(), best_effort_used, supports, pods }
}

fn stalled(permille: u32) -> Observed {
    let mut seen = node(0, 0);
    seen.pods[0].containers[0].memory_stall_permille = Some(permille);
    seen.pods[1].memory_used = 1000 * MIB;
    seen.pods[1].working_set = 600 * MIB;
    seen
}

fn nothing() -> BTreeSet<Knob> {
    BTreeSet::new()
}

fn knob(cgroup: &str, kind: KnobKind) -> Knob {
    Knob { cgroup: cgroup.to_owned(), kind }
}

/// Prints `cpu.idle=1`, or `cpu.max-` for a restored setting, one per step.
fn show(decision: &Decision) -> Vec<String> {
    let value = |step: &TunerStep| step.to.map_or("-".to_owned(), |to| format!("={to}"));
    decision.steps.iter().map(|step| format!("{}{}", step.knob.kind.as_str(), value(step))).collect()
}

/// Runs ticks with the same observation and returns their steps.
fn run(law: &Law, state: &mut State, seen: &Observed, ticks: usize) -> Vec<String> {
    let mut all = Vec::new();
    for _ in 0..ticks {
        let decision = decide(law, state, seen, &nothing());
        all.extend(show(&decision));
        *state = decision.state;
    }
    all
}

#[test]
fn best_effort_is_made_idle_first_then_capped_step_by_step_down_to_its_floor() {
    let mut state = State::default();
    let steps = run(&quick(), &mut state, &node(200, 1600), 20);
    assert_eq!(steps[..4], ["cpu.idle=1", "cpu.max=1200", "cpu.max=900", "cpu.max=675"]);
    assert_eq!(steps.last().map(String::as_str), Some("cpu.max=200"));
    assert_eq!(state.held[&knob(BEST_EFFORT, KnobKind::CpuCap)], 200);
}

#[test]
fn caps_are_used_only_without_idle_and_without_harm_unless_configured() {
    let auto = Law { cpu_caps: CpuCaps::Auto, ..quick() };
    let check = |idle: bool, harmless_caps: bool, ticks: usize, expected: &[&str]| {
        let mut seen = node(200, 1600);
        (seen.supports.idle, seen.supports.harmless_caps) = (idle, harmless_caps);
        assert_eq!(run(&auto, &mut State::default(), &seen, ticks), expected, "{idle} {harmless_caps}");
        assert_eq!(run(&quick(), &mut State::default(), &seen, 2), [expected[0], "cpu.max=1200"]);
    };
    check(true, true, 20, &["cpu.idle=1"]);
    check(true, false, 20, &["cpu.idle=1"]);
    check(false, true, 2, &["cpu.weight=1", "cpu.max=1200"]);
    check(false, false, 20, &["cpu.weight=1"]);
}

#[test]
fn caps_are_restored_before_idle_and_idle_only_at_low_usage() {
    let (law, mut state) = (quick(), State::default());
    run(&law, &mut state, &node(200, 1600), 3);
    assert_eq!(run(&law, &mut state, &node(0, 900), 20), ["cpu.max=1200", "cpu.max=1600", "cpu.max-"]);
    assert_eq!(state.held.len(), 1);
    assert_eq!(run(&law, &mut state, &node(0, 10), 1), ["cpu.idle-"]);
    assert!(state.held.is_empty());
}

#[test]
fn a_growing_pod_is_held_before_a_large_one() {
    let mut seen = stalled(100);
    let mut grower = pod("grower", QosClass::BestEffort);
    (grower.memory_used, grower.working_set) = (300 * MIB, 200 * MIB);
    seen.pods.push(grower);
    let first = |seen: &Observed| {
        let mut steps = decide(&quick(), &State::default(), seen, &nothing()).steps;
        assert_eq!(steps.len(), 1, "{steps:?}");
        let step = steps.remove(0);
        (step.knob.cgroup, step.reason)
    };
    assert!(first(&seen).0.ends_with("podhog"), "growth is unknown");
    seen.pods[1].memory_growth_permille = Some(50);
    seen.pods[2].memory_growth_permille = Some(700);
    let (cgroup, reason) = first(&seen);
    assert!(cgroup.ends_with("podgrower"), "{cgroup}");
    assert!(
        reason.ends_with("default/grower (BestEffort), whose growth is 70 % of all, is held at 270 MiB"),
        "{reason}"
    );
}

#[test]
fn a_finding_reports_that_no_pod_has_anything_to_take() {
    let mut state = State::default();
    let seen = node(200, 0);
    assert!(run(&asking(), &mut state, &seen, 3).is_empty());
    let findings = decide(&asking(), &state, &seen, &nothing()).findings;
    assert!(findings[0].ends_with("no pod has anything that may be taken now"), "{findings:?}");
}

#[test]
fn a_pod_at_a_standstill_gets_its_memory_back_and_is_spared_for_a_while() {
    let law = Law { standstill_ticks: 3, retry_ticks: 10, ..quick() };
    let mut state = State::default();
    let mut seen = stalled(100);
    assert_eq!(run(&law, &mut state, &seen, 1), ["memory.high=943718400"]);
    seen.pods[1].memory_still_permille = Some(900);
    // Two ticks do not make a standstill; then all memory is restored, and no step follows while the pod is
    // spared.
    let steps = run(&law, &mut state, &seen, 2);
    assert!(steps.iter().all(|step| step.starts_with("memory.high=")), "{steps:?}");
    assert_eq!(run(&law, &mut state, &seen, 1), ["memory.high-"]);
    assert!(run(&law, &mut state, &seen, 9).is_empty());
    assert_eq!(run(&law, &mut state, &seen, 2).len(), 2);
    // A pod that works a little in between is merely slow.
    let mut slow = State::default();
    run(&law, &mut slow, &seen, 1);
    for _ in 0..5 {
        run(&law, &mut slow, &seen, 2);
        run(&law, &mut slow, &stalled(100), 1);
    }
    assert!(!slow.held.is_empty(), "{slow:?}");
    // With the standstill disabled, the memory is never restored.
    let (never, mut state) = (Law { standstill_ticks: 0, ..law }, State::default());
    assert!(!run(&never, &mut state, &seen, 50).contains(&"memory.high-".to_owned()));
}

#[test]
fn without_cpu_idle_the_weight_is_reduced() {
    let mut seen = node(200, 1600);
    seen.supports.idle = false;
    assert_eq!(run(&quick(), &mut State::default(), &seen, 2), ["cpu.weight=1", "cpu.max=1200"]);
}

#[test]
fn between_the_bounds_nothing_changes() {
    let (law, mut state) = (quick(), State::default());
    run(&law, &mut state, &node(200, 1600), 2);
    let held = state.held.clone();
    assert!(run(&law, &mut state, &node(40, 1600), 50).is_empty());
    assert_eq!(state.held, held);
}

#[test]
fn a_wait_caused_by_the_own_quota_restricts_no_pod() {
    let mut seen = node(300, 1600);
    seen.pods[0].containers[0].throttled_permille = Some(290);
    let steps = run(&Law { burst_percent: 0, ..quick() }, &mut State::default(), &seen, 10);
    assert!(steps.is_empty(), "{steps:?}");
}

#[test]
fn single_long_waits_count_if_they_are_measured() {
    let mut seen = node(1, 1600);
    seen.pods[0].containers[0].cpu_wait_p99_us = Some(7_000);
    let decision = decide(&quick(), &State::default(), &seen, &nothing());
    assert_eq!(show(&decision), ["cpu.idle=1"]);
    assert_eq!(
        decision.steps[0].reason,
        "default/server (main) waits 7 ms for a CPU at the 99th percentile (5 ms at most): BestEffort pods run only \
         on otherwise idle CPUs"
    );
}

#[test]
fn burstable_pods_are_capped_only_above_their_request_and_never_for_their_own_complaint() {
    let mut seen = node(200, 0);
    let mut batch = pod("batch", QosClass::Burstable);
    (batch.cpu_request, batch.cpu_used) = (300, Some(1000));
    let mut modest = pod("modest", QosClass::Burstable);
    (modest.cpu_request, modest.cpu_used) = (300, Some(200));
    seen.pods.extend([batch, modest]);
    let mut state = State::default();
    let steps = run(&quick(), &mut state, &seen, 20);
    assert_eq!(steps.first().map(String::as_str), Some("cpu.max=750"));
    assert_eq!(steps.last().map(String::as_str), Some("cpu.max=300"));
    assert_eq!(
        state.held.keys().map(|knob| knob.cgroup.as_str()).collect::<Vec<_>>(),
        ["/kubepods/burstable/podbatch"]
    );

    seen.pods[0].containers[0].cpu_wait_permille = Some(0);
    seen.pods[2].containers[0].cpu_wait_permille = Some(400);
    assert!(run(&quick(), &mut State::default(), &seen, 10).is_empty());
}

#[test]
fn a_pod_far_above_its_request_does_not_restrict_one_slightly_above() {
    let mut seen = node(0, 0);
    let mut greedy = pod("greedy", QosClass::Burstable);
    (greedy.cpu_request, greedy.cpu_used) = (300, Some(1600));
    let mut server = pod("web", QosClass::Burstable);
    (server.cpu_request, server.cpu_used) = (300, Some(350));
    seen.pods.extend([greedy, server]);
    // The greedy pod's many threads wait for each other, and for the server.
    seen.pods[2].containers[0].cpu_wait_permille = Some(660);
    assert!(run(&quick(), &mut State::default(), &seen, 20).is_empty());
    let waits = BTreeMap::from([(seen.pods[2].cgroup.clone(), 700), (seen.pods[3].cgroup.clone(), 300)]);
    seen.pods[2].containers[0].held_by = Some(waits);
    assert!(run(&asking(), &mut State::default(), &seen, 20).is_empty());
    // The server has a better claim.
    seen.pods[3].containers[0].cpu_wait_permille = Some(700);
    let mut state = State::default();
    assert_eq!(run(&quick(), &mut state, &seen, 1), ["cpu.max=1200"]);
    assert_eq!(
        state.held.keys().map(|knob| knob.cgroup.as_str()).collect::<Vec<_>>(),
        ["/kubepods/burstable/podgreedy"]
    );
    // A pod slightly above its request is never capped.
    seen.pods[2].cpu_used = Some(330);
    assert!(run(&quick(), &mut State::default(), &seen, 20).is_empty());
}

/// Returns a greedy pod of 0.3 CPUs next to one that waits.
fn greedy_beside_web() -> Observed {
    let mut seen = node(0, 0);
    seen.supports.weights = true;
    let mut greedy = pod("greedy", QosClass::Burstable);
    (greedy.cpu_request, greedy.cpu_used) = (300, Some(1600));
    let mut web = pod("web", QosClass::Burstable);
    (web.cpu_request, web.cpu_used) = (300, Some(310));
    web.containers[0].cpu_wait_permille = Some(200);
    seen.pods.extend([greedy, web]);
    seen
}

#[test]
fn a_greedy_pod_loses_its_turn_before_its_time() {
    let mut seen = greedy_beside_web();
    let mut state = State::default();
    let first = decide(&quick(), &state, &seen, &nothing());
    // BestEffort pods would run before an idle pod, so they become idle first, even with little usage.
    let cgroups: Vec<&str> = first.steps.iter().map(|step| step.knob.cgroup.as_str()).collect();
    assert_eq!(show(&first), ["cpu.idle=1", "cpu.idle=1"]);
    assert_eq!(cgroups, [BEST_EFFORT, "/kubepods/burstable/podgreedy"]);
    state = first.state;
    assert_eq!(run(&quick(), &mut state, &seen, 1), ["cpu.max=1200"]);
    // The cap is removed; the turn stays away while usage exceeds the request.
    seen.pods[3].containers[0].cpu_wait_permille = Some(0);
    assert_eq!(run(&quick(), &mut state, &seen, 20), ["cpu.max=1600", "cpu.max-"]);
    seen.pods[2].cpu_used = Some(300);
    assert_eq!(run(&quick(), &mut state, &seen, 2), ["cpu.idle-", "cpu.idle-"]);
    // If another process controls the BestEffort pods' turn, only the weight is reduced.
    let theirs = BTreeSet::from([knob(BEST_EFFORT, KnobKind::Idle)]);
    let seen = greedy_beside_web();
    assert_eq!(show(&decide(&quick(), &State::default(), &seen, &theirs)), ["cpu.weight=4"]);
}

#[test]
fn no_pod_is_restricted_for_a_pod_that_is_held_back() {
    let mut seen = greedy_beside_web();
    let mut state = State::default();
    run(&quick(), &mut state, &seen, 20);
    // The protected pod catches up on its backlog, and the other one waits.
    seen.pods[2].containers[0].cpu_wait_permille = Some(900);
    (seen.pods[2].cpu_used, seen.pods[3].cpu_used) = (Some(500), Some(1000));
    seen.pods[3].containers[0].cpu_wait_permille = Some(0);
    for _ in 0..20 {
        let decision = decide(&quick(), &state, &seen, &nothing());
        assert!(!decision.steps.iter().any(|step| step.knob.cgroup.ends_with("podweb")), "{decision:?}");
        state = decision.state;
    }
    // The same holds for memory.
    let mut seen = stalled(100);
    let mut web = pod("web", QosClass::Burstable);
    (web.memory_used, web.working_set) = (500 * MIB, 100 * MIB);
    seen.pods.push(web);
    seen.pods[1].memory_used = 0;
    let mut state = State::default();
    run(&quick(), &mut state, &seen, 1);
    assert!(state.held.contains_key(&knob("/kubepods/burstable/podweb", KnobKind::MemoryHigh)), "{state:?}");
    seen.pods[0].containers[0].memory_stall_permille = Some(0);
    seen.pods[2].containers[0].memory_stall_permille = Some(500);
    (seen.pods[1].memory_used, seen.pods[1].working_set) = (1000 * MIB, 600 * MIB);
    for _ in 0..2 {
        let decision = decide(&quick(), &state, &seen, &nothing());
        assert!(!decision.steps.iter().any(|step| step.knob.cgroup.ends_with("podhog")), "{decision:?}");
        state = decision.state;
    }
}

#[test]
fn a_greedy_pods_turn_goes_before_the_time_of_best_effort_pods() {
    let mut seen = greedy_beside_web();
    seen.best_effort_used = 400;
    let steps = run(&quick(), &mut State::default(), &seen, 4);
    assert_eq!(steps, ["cpu.idle=1", "cpu.idle=1", "cpu.max=300", "cpu.max=225"]);
}

#[test]
fn an_idle_pod_below_its_request_gets_its_turn_back_at_once_and_keeps_it_for_a_while() {
    let mut seen = greedy_beside_web();
    let law = Law { retry_ticks: 5, cpu_caps: CpuCaps::Auto, ..quick() };
    seen.supports.harmless_caps = false;
    let mut state = State::default();
    assert_eq!(run(&law, &mut state, &seen, 1), ["cpu.idle=1", "cpu.idle=1"]);
    // The pod needs no more.
    seen.pods[2].cpu_used = Some(200);
    assert!(run(&law, &mut state, &seen, 1).is_empty(), "others are still not well");
    // The pod needs more, and others leave too little.
    seen.pods[2].containers[0].cpu_wait_permille = Some(900);
    let decision = decide(&law, &state, &seen, &nothing());
    assert_eq!(show(&decision), ["cpu.idle-"]);
    assert_eq!(decision.steps[0].reason, "default/greedy gets less than the 0.3 CPUs it requests");
    state = decision.state;
    // Next, the weight of its request, which stays in that case.
    (seen.pods[2].cpu_used, seen.pods[2].containers[0].cpu_wait_permille) = (Some(1600), Some(0));
    assert_eq!(run(&law, &mut state, &seen, 4), ["cpu.weight=4"]);
    (seen.pods[2].cpu_used, seen.pods[3].containers[0].cpu_wait_permille) = (Some(300), Some(0));
    assert_eq!(run(&law, &mut state, &seen, 2), ["cpu.weight-", "cpu.idle-"]);
    assert!(state.fell_short.is_empty(), "{state:?}");
    (seen.pods[2].cpu_used, seen.pods[3].containers[0].cpu_wait_permille) = (Some(1600), Some(200));
    assert_eq!(run(&law, &mut state, &seen, 1), ["cpu.idle=1", "cpu.idle=1"]);
}

#[test]
fn burstable_pods_get_their_turn_back_if_another_process_restores_best_effort_ones() {
    let seen = greedy_beside_web();
    let law = Law { hot_ticks: 2, cpu_caps: CpuCaps::Auto, ..quick() };
    let mut state = State::default();
    assert_eq!(run(&law, &mut state, &seen, 2), ["cpu.idle=1", "cpu.idle=1"]);
    let theirs = BTreeSet::from([knob(BEST_EFFORT, KnobKind::Idle)]);
    let decision = decide(&law, &state, &seen, &theirs);
    assert_eq!(show(&decision), ["cpu.idle-"], "{:?}", decision.steps);
    assert!(decision.steps[0].reason.contains("after BestEffort pods"), "{:?}", decision.steps);
    // Next, the weight of its request, as always when pods cannot be made idle.
    let after = decide(&law, &decision.state, &seen, &theirs);
    let next = decide(&law, &after.state, &seen, &theirs);
    assert_eq!([show(&after), show(&next)].concat(), ["cpu.weight=4"]);
}

#[test]
fn low_usage_not_caused_by_others_restores_no_turn() {
    let mut seen = greedy_beside_web();
    let law = Law { hot_ticks: 2, ..quick() };
    let mut state = State::default();
    run(&law, &mut state, &seen, 20);
    let idle = knob("/kubepods/burstable/podgreedy", KnobKind::Idle);
    seen.pods[2].containers[0].cpu_wait_permille = Some(900);
    for used in [200, 1600, 200, 1600] {
        seen.pods[2].cpu_used = Some(used);
        run(&law, &mut state, &seen, 1);
        assert!(state.held.contains_key(&idle), "{used}: {state:?}");
    }
    // A pod that waits for a disk does not count either: it waits for a CPU less than half of the time.
    seen.pods[2].cpu_used = Some(200);
    seen.pods[2].containers[0].cpu_wait_permille = Some(399);
    run(&law, &mut state, &seen, 20);
    assert!(state.held.contains_key(&idle), "{state:?}");
    seen.pods[2].containers[0].cpu_wait_permille = Some(400);
    run(&law, &mut state, &seen, 2);
    assert!(!state.held.contains_key(&idle), "{state:?}");
}

#[test]
fn without_cpu_idle_a_greedy_pod_keeps_as_much_weight_as_its_request_needs() {
    let mut seen = greedy_beside_web();
    seen.supports.idle = false;
    // 300 of 1,500 next to a pod of 300: a quarter of its weight is enough.
    assert_eq!(run(&quick(), &mut State::default(), &seen, 2), ["cpu.weight=4", "cpu.max=1200"]);
    // On a full node no pod's weight exceeds its need.
    seen.pods[0].cpu_request = 800;
    assert_eq!(run(&quick(), &mut State::default(), &seen, 1), ["cpu.max=1200"]);
}

#[test]
fn memory_is_reduced_to_the_working_set_and_no_further_in_one_step() {
    let (law, mut state) = (quick(), State::default());
    let mut seen = stalled(100);
    assert_eq!(run(&law, &mut state, &seen, 2).len(), 2);
    let steps = run(&law, &mut state, &seen, 20);
    assert_eq!(steps.last(), Some(&format!("memory.high={}", 600 * MIB)));
    // The pod released more memory: there is more to take.
    seen.pods[1].working_set = 100 * MIB;
    let next = run(&law, &mut state, &seen, 1);
    assert_eq!(next, [format!("memory.high={}", 600 * MIB * 90 / 100)]);
    // Never below the floor, and restored once all is well.
    seen.pods[1].working_set = MIB;
    run(&law, &mut state, &seen, 100);
    let hog = knob("/kubepods/besteffort/podhog", KnobKind::MemoryHigh);
    assert_eq!(state.held[&hog], law.memory_floor);
    seen.pods[0].containers[0].memory_stall_permille = Some(0);
    run(&law, &mut state, &seen, 100);
    assert!(state.held.is_empty(), "{:?}", state.held);
}

#[test]
fn memory_stalls_at_an_own_limit_or_without_memory_high_restrict_no_pod() {
    let mut own = stalled(500);
    own.pods[0].containers[0].at_memory_limit = true;
    assert!(run(&quick(), &mut State::default(), &own, 10).is_empty());
    let mut v1 = stalled(500);
    v1.supports.memory_high = false;
    assert!(run(&quick(), &mut State::default(), &v1, 10).is_empty());
}

#[test]
fn a_throttled_container_is_lent_a_burst_within_its_quota() {
    let mut seen = node(0, 0);
    seen.pods[0].containers[0].throttled_permille = Some(200);
    seen.pods[0].containers[0].quota_us = Some(50_000);
    assert_eq!(run(&quick(), &mut State::default(), &seen, 5), ["cpu.max.burst=50000"]);
    // The pod has a quota as well, which would hold the container back all the same.
    seen.pods[0].quota_us = Some(60_000);
    let mut state = State::default();
    assert_eq!(run(&quick(), &mut state, &seen, 5), ["cpu.max.burst=50000", "cpu.max.burst=50000"]);
    assert_eq!(state.held.len(), 2);
    seen.pods[0].quota_us = None;
    let (law, mut state) = (quick(), State::default());
    assert_eq!(run(&law, &mut state, &seen, 5), ["cpu.max.burst=50000"]);
    // A resize lowers the quota.
    seen.pods[0].containers[0].quota_us = Some(20_000);
    assert_eq!(run(&law, &mut state, &seen, 1), ["cpu.max.burst=20000"]);
    // The burst stays while it may be needed again.
    seen.pods[0].containers[0].throttled_permille = Some(0);
    assert!(run(&law, &mut state, &seen, usize::try_from(law.retry_ticks).unwrap() - 1).is_empty());
    assert_eq!(run(&law, &mut state, &seen, 1), ["cpu.max.burst-"]);
    assert!(state.held.is_empty());
}

#[test]
fn only_throttling_of_its_own_containers_requires_a_burst() {
    let (law, mut state, mut seen) = (quick(), State::default(), node(0, 0));
    seen.pods[0].containers[0].throttled_permille = Some(200);
    seen.pods[0].containers[0].quota_us = Some(50_000);
    seen.pods[0].quota_us = Some(60_000);
    run(&law, &mut state, &seen, 5);
    let lent: Vec<Knob> = state.held.keys().cloned().collect();
    assert_eq!(lent.len(), 2);
    assert!(lent.iter().all(|knob| !state.is_calm_for(knob)), "{state:?}");
    assert!(state.is_calm_for(&knob(BEST_EFFORT, KnobKind::Idle)), "{state:?}");
    seen.pods[0].containers[0].throttled_permille = Some(0);
    run(&law, &mut state, &seen, 1);
    assert!(lent.iter().all(|knob| state.is_calm_for(knob)), "{state:?}");
}

#[test]
fn a_blocked_knob_is_left_alone_and_not_counted_as_held() {
    let (law, mut state) = (quick(), State::default());
    run(&law, &mut state, &node(200, 1600), 1);
    let blocked = BTreeSet::from([knob(BEST_EFFORT, KnobKind::Idle)]);
    let decision = decide(&law, &state, &node(200, 1600), &blocked);
    assert_eq!(show(&decision), ["cpu.max=1200"]);
    assert!(!decision.state.held.contains_key(&knob(BEST_EFFORT, KnobKind::Idle)));
}

#[test]
fn held_settings_of_a_removed_pod_are_dropped() {
    let (law, mut state) = (quick(), State::default());
    run(&law, &mut state, &stalled(100), 1);
    assert_eq!(state.held.len(), 1);
    let mut seen = stalled(100);
    seen.pods.remove(1);
    let decision = decide(&law, &state, &seen, &nothing());
    assert!(decision.state.held.is_empty() && decision.steps.is_empty());
}

#[test]
fn missing_measurements_restore_nothing() {
    let (law, mut state) = (quick(), State::default());
    run(&law, &mut state, &node(200, 1600), 2);
    let mut seen = node(0, 1600);
    seen.pods[0].containers[0].cpu_wait_permille = None;
    assert!(run(&law, &mut state, &seen, 20).is_empty());
    // Without a pod to protect all settings are restored.
    seen.pods.remove(0);
    run(&law, &mut state, &seen, 20);
    assert!(state.held.is_empty());
}

#[test]
fn a_wait_for_own_threads_ends_with_only_idle_held() {
    let (law, mut state, seen) = (asking(), State::default(), node(200, 1600));
    let steps = run(&law, &mut state, &seen, 50);
    assert_eq!(steps, ["cpu.idle=1", "cpu.max=1200", "cpu.max=900", "cpu.max-"]);
    assert_eq!(state.held, BTreeMap::from([(knob(BEST_EFFORT, KnobKind::Idle), 1)]));
    let decision = decide(&law, &state, &seen, &nothing());
    assert_eq!(
        decision.findings[0],
        "default/server (main) waits for a CPU 20 % of the time (5 % at most); restricting other pods has not helped, so \
         no more steps are taken"
    );
    // A wait half as long again is another complaint, and so is any wait after a long time.
    assert_eq!(run(&law, &mut state.clone(), &node(310, 1600), 1), ["cpu.max=1200"]);
    let soon = Law { retry_ticks: 20, ..law };
    assert_eq!(run(&soon, &mut state, &seen, 40)[..3], ["cpu.max=1200", "cpu.max=900", "cpu.max=675"]);
}

#[test]
fn best_effort_pods_yield_the_disk_while_the_tuner_runs() {
    let law = Law { best_effort_disk_weight: 10, ..quick() };
    let supports = Supports { disk_weight: true, ..Supports::default() };
    let seen = Observed { best_effort: BEST_EFFORT.to_owned(), supports, ..Observed::default() };
    let knob = Knob { cgroup: BEST_EFFORT.to_owned(), kind: KnobKind::DiskWeight };
    let mut state = State::default();
    for expected in [1, 0, 0] {
        let decision = decide(&law, &state, &seen, &BTreeSet::new());
        assert_eq!(decision.steps.len(), expected);
        state = decision.state;
        assert_eq!(state.held.get(&knob), Some(&10));
        assert!(state.is_at_rest() && !state.is_calm_for(&knob));
    }
    // Another process has set the weight.
    assert_eq!(decide(&law, &State::default(), &seen, &[knob].into()).steps, []);
    for law in [quick(), Law { best_effort_disk_weight: 0, ..law }] {
        assert_eq!(decide(&law, &State::default(), &seen, &BTreeSet::new()).steps, []);
    }
    let without = Observed { supports: Supports::default(), ..seen };
    assert_eq!(decide(&law, &State::default(), &without, &BTreeSet::new()).steps, []);
}
