use proptest::prelude::*;

use super::*;

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
    let supports =
        Supports { idle: true, harmless_caps: true, memory_high: true, burst: true, weights: false };
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

fn any_container() -> impl Strategy<Value = ContainerSample> {
    (
        any::<Option<u16>>(),
        any::<Option<u16>>(),
        any::<Option<u16>>(),
        any::<bool>(),
        prop::option::of(1000..200_000_u64),
    )
        .prop_map(|(wait, throttled, stall, at_memory_limit, quota_us)| ContainerSample {
            name: "c".to_owned(),
            cgroup: String::new(),
            cpu_wait_permille: wait.map(|wait| u32::from(wait) % 1000),
            cpu_wait_p99_us: wait.map(u64::from),
            throttled_permille: throttled.map(|part| u32::from(part) % 1000),
            memory_stall_permille: stall.map(|stall| u32::from(stall) % 1000),
            at_memory_limit,
            quota_us,
            held_by: None,
        })
}

fn any_pod() -> impl Strategy<Value = PodSample> {
    let class = prop::sample::select(vec![QosClass::BestEffort, QosClass::Burstable, QosClass::Guaranteed]);
    // Next to a kubelet a request is beyond all numbers at the end of the weights' scale.
    let request = prop_oneof![9 => 0..3000_u64, 1 => Just(u64::MAX)];
    let amounts = (request, prop::option::of(0..3000_u64), 0..2000_u64, 0..4000_u64, 0..=100_u64);
    (class, amounts, any::<bool>(), prop::collection::vec(any_container(), 0..3)).prop_map(
        |(class, (request, used, memory_request, memory_used, needed), can_cap, containers)| PodSample {
            name: String::new(),
            class,
            cgroup: String::new(),
            cpu_request: request,
            cpu_used: used,
            can_cap,
            quota_us: used.map(|used| used * 100 + 1000),
            memory_request: memory_request * MIB,
            memory_used: memory_used * MIB,
            working_set: memory_used * needed / 100 * MIB,
            memory_still_permille: Some(u32::try_from(needed * 10).unwrap()),
            memory_growth_permille: used.map(|used| u32::try_from(used / 3).unwrap()),
            containers,
        },
    )
}

fn any_node() -> impl Strategy<Value = Observed> {
    (1..8_u64, 0..8000_u64, any::<[bool; 5]>(), prop::collection::vec(any_pod(), 0..5)).prop_map(
        |(cpus, best_effort_used, [idle, harmless_caps, memory_high, burst, weights], mut pods)| {
            for (index, pod) in pods.iter_mut().enumerate() {
                pod.name = format!("default/p{index}");
                pod.cgroup = format!("/kubepods/pod{index}");
                for (number, container) in pod.containers.iter_mut().enumerate() {
                    container.cgroup = format!("{}/{number}", pod.cgroup);
                }
            }
            let best_effort = BEST_EFFORT.to_owned();
            let supports = Supports { idle, harmless_caps, memory_high, burst, weights };
            Observed { cpus: cpus * 1000, best_effort, best_effort_used, supports, pods }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// In any sequence of nodes, every step respects its bound, affects only allowed knobs, has a reason, and
    /// changes a value.
    #[test]
    fn steps_keep_their_bounds(nodes in prop::collection::vec(any_node(), 1..20)) {
        let (law, mut state) = (Law { cpu_caps: CpuCaps::Auto, ..asking() }, State::default());
        for seen in &nodes {
            let decision = decide(&law, &state, seen, &nothing());
            // Both are settings of one file.
            let turns = decision.steps.iter().filter(|step| {
                step.knob.cgroup != BEST_EFFORT && matches!(step.knob.kind, KnobKind::Idle | KnobKind::Weight)
            });
            let turns: Vec<&str> = turns.map(|step| step.knob.cgroup.as_str()).collect();
            prop_assert_eq!(turns.iter().collect::<BTreeSet<_>>().len(), turns.len(), "{:?}", decision.steps);
            for step in &decision.steps {
                prop_assert!(!step.reason.is_empty());
                prop_assert!(step.from != step.to, "{step:?}");
                let pod = seen.pods.iter().find(|pod| step.knob.cgroup.starts_with(&pod.cgroup));
                let tightened = step.to.filter(|to| step.from.is_none_or(|from| *to < from));
                match (step.knob.kind, tightened) {
                    (KnobKind::CpuCap, Some(cap)) => {
                        let floor = pod.map_or(seen.cpus / 10, |pod| pod.cpu_request);
                        prop_assert!(cap >= floor, "{step:?}");
                        prop_assert!(pod.is_none_or(|pod| pod.class == QosClass::Burstable && pod.can_cap));
                        prop_assert!(seen.supports.harmless_caps);
                    }
                    (KnobKind::MemoryHigh, Some(high)) => {
                        let pod = pod.unwrap();
                        prop_assert!(high >= pod.working_set && high >= law.memory_floor, "{step:?}");
                        prop_assert!(pod.class != QosClass::Burstable || high >= pod.memory_request);
                        prop_assert!(pod.class != QosClass::Guaranteed && seen.supports.memory_high);
                    }
                    (KnobKind::Burst, Some(burst)) => {
                        let pod = pod.unwrap();
                        let container = pod.containers.iter().find(|c| c.cgroup == step.knob.cgroup);
                        let quota = container.map_or(pod.quota_us, |container| container.quota_us);
                        prop_assert!(burst <= quota.unwrap() && seen.supports.burst);
                    }
                    (KnobKind::Idle, Some(_)) => {
                        let may = |pod: &PodSample| seen.supports.weights && pod.class == QosClass::Burstable;
                        prop_assert!(seen.supports.idle && pod.is_none_or(may), "{step:?}");
                    }
                    (KnobKind::Weight, Some(weight)) => match pod {
                        None => prop_assert!(!seen.supports.idle && weight == 1),
                        Some(pod) => prop_assert!(seen.supports.weights && pod.class == QosClass::Burstable),
                    },
                    (_, None) => {}
                }
            }
            state = decision.state;
        }
    }

    /// The steps agree with the state: applying them yields the state's values.
    #[test]
    fn the_steps_lead_from_one_state_to_the_next(before in any_node(), after in any_node()) {
        let law = asking();
        let mut state = decide(&law, &State::default(), &before, &nothing()).state;
        for _ in 0..5 {
            let decision = decide(&law, &state, &after, &nothing());
            let mut held = state.held.clone();
            held.retain(|knob, _| decision.state.held.contains_key(knob) || decision.steps.iter().any(|s| s.knob == *knob));
            for step in &decision.steps {
                match step.to {
                    Some(to) => held.insert(step.knob.clone(), to),
                    None => held.remove(&step.knob),
                };
            }
            prop_assert_eq!(&held, &decision.state.held);
            state = decision.state;
        }
    }

    /// All settings are restored once the protected pods are well and BestEffort pods use no CPU.
    #[test]
    fn everything_is_restored(nodes in prop::collection::vec(any_node(), 1..10)) {
        let (law, mut state) = (asking(), State::default());
        for seen in &nodes {
            state = decide(&law, &state, seen, &nothing()).state;
        }
        let mut calm = nodes.last().unwrap().clone();
        calm.best_effort_used = 0;
        calm.pods.iter_mut().for_each(|pod| pod.cpu_used = Some(0));
        for container in calm.pods.iter_mut().flat_map(|pod| &mut pod.containers) {
            container.cpu_wait_permille = Some(0);
            container.cpu_wait_p99_us = None;
            container.throttled_permille = Some(0);
            container.memory_stall_permille = Some(0);
        }
        for _ in 0..20_000 {
            if state.held.is_empty() {
                break;
            }
            state = decide(&law, &state, &calm, &nothing()).state;
        }
        prop_assert!(state.held.is_empty(), "{:?}", state.held);
    }
}
