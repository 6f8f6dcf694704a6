use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::resources::PodDemand;

fn at(seconds: u64) -> Moment {
    Moment::after_start(Duration::from_secs(seconds))
}

fn units(units: i64) -> Quantity {
    Quantity::from_units(units)
}

fn threshold(signal: Signal, value: &str) -> Threshold {
    Threshold {
        signal,
        value: ThresholdValue::threshold(value).unwrap().unwrap(),
        grace: Duration::ZERO,
        min_reclaim: None,
    }
}

fn observe(signal: Signal, available: i64, capacity: i64) -> BTreeMap<Signal, Observation> {
    BTreeMap::from([(signal, Observation { available: units(available), capacity: units(capacity) })])
}

/// Checks whether a threshold on memory is met with this much of 1000 available.
fn check_met(value: &str, available: i64, expectation: bool) {
    let seen = observe(Signal::MemoryAvailable, available, 1000);
    let assessment = Tracker::default().assess(at(0), &[threshold(Signal::MemoryAvailable, value)], &seen);
    assert_eq!(!assessment.met.is_empty(), expectation, "{value} with {available}");
}

#[test]
fn low_is_strictly_below_the_threshold() {
    check_met("100", 100, false);
    check_met("100", 99, true);
    check_met("10%", 100, false);
    check_met("10%", 99, true);
    check_met("0.1k", 99, true);
}

#[test]
fn percentages_are_single_precision_parts_truncated() {
    // 0.07 in single precision is slightly more than 0.07, and 33 % of 1000 slightly less than 330.
    let part = |text: &str, capacity| ThresholdValue::threshold(text).unwrap().unwrap().of(units(capacity));
    assert_eq!(part("7%", 1_000_000_000_000), units(70_000_000_298));
    assert_eq!(part("33%", 100_000_000_000), units(33_000_001_311));
    assert_eq!(part("2.5%", 1000), units(25));
}

#[test]
fn no_threshold_at_nothing_or_everything() {
    assert_eq!(ThresholdValue::threshold("0%"), Ok(None));
    assert_eq!(ThresholdValue::threshold("100%"), Ok(None));
    assert!(ThresholdValue::threshold("0.0%").unwrap().is_some());
}

#[test]
fn invalid_values_are_refused() {
    for text in ["", "%", "ten", "10 %", "NaN%", "inf%", "-1%", "101%", "0", "-5", "1e9%"] {
        assert!(ThresholdValue::threshold(text).is_err(), "{text}");
    }
    for text in ["", "0%", "-1%", "-5", "x%"] {
        assert!(ThresholdValue::min_reclaim(text).is_err(), "{text}");
    }
    assert!(ThresholdValue::min_reclaim("0").is_ok());
}

#[test]
fn soft_thresholds_wait_for_their_grace_period() {
    let soft = Threshold { grace: Duration::from_secs(90), ..threshold(Signal::MemoryAvailable, "100") };
    let (mut tracker, low, fine) = (
        Tracker::default(),
        observe(Signal::MemoryAvailable, 1, 1000),
        observe(Signal::MemoryAvailable, 900, 1000),
    );
    let thresholds = [soft];
    assert_eq!(tracker.assess(at(0), &thresholds, &low).actionable, Vec::<usize>::new());
    assert_eq!(tracker.assess(at(89), &thresholds, &low).actionable, Vec::<usize>::new());
    assert_eq!(tracker.assess(at(90), &thresholds, &low).actionable, [0]);
    assert_eq!(tracker.assess(at(91), &thresholds, &fine).met, Vec::<usize>::new());
    assert_eq!(
        tracker.assess(at(92), &thresholds, &low).actionable,
        Vec::<usize>::new(),
        "a new period begins"
    );
}

#[test]
fn a_threshold_once_acted_on_stays_met_until_its_minimum_reclaim_is_there() {
    let hard = Threshold {
        min_reclaim: Some(ThresholdValue::min_reclaim("50").unwrap()),
        ..threshold(Signal::MemoryAvailable, "100")
    };
    let (mut tracker, thresholds) = (Tracker::default(), [hard]);
    let mut met = |available| {
        !tracker.assess(at(0), &thresholds, &observe(Signal::MemoryAvailable, available, 1000)).met.is_empty()
    };
    assert!(!met(149));
    assert!(met(99));
    assert!(met(149));
    assert!(!met(150));
    assert!(!met(149));
}

#[test]
fn memory_is_acted_on_first() {
    let thresholds = [threshold(Signal::NodeFsAvailable, "10%"), threshold(Signal::MemoryAvailable, "10%")];
    let mut seen = observe(Signal::NodeFsAvailable, 0, 10);
    seen.extend(observe(Signal::MemoryAvailable, 0, 10));
    let assessment = Tracker::default().assess(at(0), &thresholds, &seen);
    assert_eq!((assessment.met, assessment.actionable), (vec![0, 1], vec![1, 0]));
    assert_eq!(assessment.conditions, [NodeCondition::MemoryPressure, NodeCondition::DiskPressure]);
}

#[test]
fn conditions_are_reported_until_the_transition_period_is_over() {
    let (mut tracker, thresholds) = (Tracker::default(), [threshold(Signal::PidAvailable, "10%")]);
    tracker.assess(at(0), &thresholds, &observe(Signal::PidAvailable, 0, 10));
    tracker.assess(at(10), &thresholds, &observe(Signal::PidAvailable, 10, 10));
    assert_eq!(tracker.reported(at(299), Duration::from_secs(300)), [NodeCondition::PidPressure]);
    assert_eq!(tracker.reported(at(300), Duration::from_secs(300)), []);
}

#[test]
fn the_steps_of_reclaim_depend_on_the_disks() {
    use Reclaim::{DeleteUnusedContainers as Containers, DeleteUnusedImages as Images};
    let check = |signal, layout, expectation: &[Reclaim]| {
        assert_eq!(reclaim(signal, layout), expectation, "{signal:?} {layout:?}");
    };
    check(Signal::MemoryAvailable, DiskLayout::Single, &[]);
    check(Signal::PidAvailable, DiskLayout::DedicatedImageFs, &[]);
    check(Signal::NodeFsInodesFree, DiskLayout::Single, &[Containers, Images]);
    check(Signal::NodeFsAvailable, DiskLayout::DedicatedImageFs, &[]);
    check(Signal::ImageFsAvailable, DiskLayout::DedicatedImageFs, &[Containers, Images]);
    check(Signal::ContainerFsAvailable, DiskLayout::DedicatedImageFs, &[Containers, Images]);
    check(Signal::ImageFsInodesFree, DiskLayout::SplitImageFs, &[Images]);
    check(Signal::NodeFsAvailable, DiskLayout::SplitImageFs, &[Containers]);
}

#[test]
fn reclaim_was_enough_once_later_numbers_meet_none_of_its_thresholds() {
    use Reclaim::{DeleteUnusedContainers as Containers, DeleteUnusedImages as Images};
    use Signal::{ImageFsAvailable, MemoryAvailable, NodeFsAvailable};
    let thresholds = [MemoryAvailable, NodeFsAvailable, ImageFsAvailable, NodeFsAvailable];
    let thresholds = thresholds.map(|signal| threshold(signal, "10%"));
    let check = |layout, steps: &[Reclaim], met: &[usize], fresh: &[(Signal, bool)], expectation| {
        let read_since = |signal| fresh.iter().find(|(of, _)| *of == signal).map(|(_, since)| *since);
        let relieved = is_relieved(steps, layout, &thresholds, met, read_since);
        assert_eq!(relieved, expectation, "{steps:?} {layout:?} {met:?} {fresh:?}");
    };
    let both = [(NodeFsAvailable, true), (ImageFsAvailable, true)];
    let single: &[Reclaim] = &[Containers, Images];
    check(DiskLayout::Single, single, &[], &both, true);
    check(DiskLayout::Single, single, &[0], &both, true);
    check(DiskLayout::Single, single, &[3], &both, false);
    check(DiskLayout::Single, single, &[2], &both, false);
    check(DiskLayout::Single, single, &[], &[(NodeFsAvailable, true), (ImageFsAvailable, false)], false);
    check(DiskLayout::Single, single, &[], &[(NodeFsAvailable, true)], true);
    check(DiskLayout::Single, single, &[], &[(MemoryAvailable, true)], false);
    // On a split disk, space freed on the images' disk does not help the volumes' disk.
    check(DiskLayout::SplitImageFs, &[Images], &[1, 3], &both, true);
    check(DiskLayout::SplitImageFs, &[Containers], &[1, 3], &both, false);
    check(DiskLayout::SplitImageFs, &[Containers], &[2], &[(NodeFsAvailable, true)], true);
}

#[test]
fn the_containers_filesystem_has_the_thresholds_of_the_one_it_is() {
    let derived = |layout| {
        let mut all = vec![
            threshold(Signal::NodeFsAvailable, "10%"),
            threshold(Signal::ImageFsAvailable, "15%"),
            threshold(Signal::ContainerFsAvailable, "99%"),
        ];
        let dropped = derive_container_fs(&mut all, layout);
        assert_eq!(dropped.len(), 1);
        all.into_iter()
            .filter(|t| t.signal == Signal::ContainerFsAvailable)
            .map(|t| t.value)
            .collect::<Vec<_>>()
    };
    assert_eq!(derived(DiskLayout::Single), [ThresholdValue::Part(0.1)]);
    assert_eq!(derived(DiskLayout::SplitImageFs), [ThresholdValue::Part(0.1)]);
    assert_eq!(derived(DiskLayout::DedicatedImageFs), [ThresholdValue::Part(0.15)]);
}

#[test]
fn only_hard_memory_thresholds_hold_for_the_pods_memory_too() {
    let soft = Threshold { grace: Duration::from_secs(1), ..threshold(Signal::MemoryAvailable, "1Gi") };
    let mut all = vec![threshold(Signal::MemoryAvailable, "100Mi"), soft];
    derive_allocatable(&mut all);
    assert_eq!(all.len(), 3);
    assert_eq!(all[2].signal, Signal::AllocatableMemoryAvailable);
    assert!(all[2].grace.is_zero());
}

/// A pod of (name, request, priority, usage); usage below zero: no statistics. A name in capitals: critical.
type Row = (&'static str, i64, i32, i64);

/// Ranks pods by a signal; each row's request and usage are of the signal's resource.
fn check_rank(signal: Signal, rows: &[Row], expectation: &str) {
    let resource = if signal.is_memory() { "memory" } else { "ephemeral-storage" };
    let pods: Vec<Pod> = rows
        .iter()
        .map(|(name, request, ..)| {
            serde_json::from_value(json!({"metadata": {"name": name},
                "spec": {"containers": [{"name": "c", "resources": {"requests": {resource: request.to_string()}}}]}}))
            .unwrap()
        })
        .collect();
    let candidates: Vec<Candidate<'_>> = rows
        .iter()
        .zip(&pods)
        .map(|((name, _, priority, usage), pod)| Candidate {
            demand: PodDemand::read(pod).unwrap(),
            priority: *priority,
            critical: name.chars().all(char::is_uppercase),
            leaving: name.starts_with("leaves"),
            usage: u64::try_from(*usage).ok().map(|n| PodUsage {
                memory_working_set_bytes: n,
                rootfs_bytes: n,
                inodes: n,
                pids: n,
                ..PodUsage::default()
            }),
        })
        .collect();
    let ranked = rank(signal, DiskLayout::Single, &candidates);
    let names: Vec<&str> = ranked.iter().map(|i| rows[*i].0).collect();
    let victim = victim(&ranked, &candidates).map_or("none", |i| rows[i].0);
    assert_eq!(format!("{} -> {victim}", names.join(" ")), expectation);
}

#[test]
fn memory_ranks_pods_above_their_request_by_priority_then_by_excess() {
    let rows = [
        ("under", 100, -5, 99),
        ("a", 100, 0, 150),
        ("b", 100, 0, 250),
        ("low", 100, -1, 101),
        ("unknown", 0, 9, -1),
    ];
    check_rank(Signal::MemoryAvailable, &rows, "unknown low b a under -> unknown");
    check_rank(Signal::AllocatableMemoryAvailable, &[("a", 100, 0, 100), ("b", 100, 1, 101)], "b a -> b");
}

#[test]
fn disk_is_ranked_alike() {
    check_rank(Signal::NodeFsAvailable, &[("a", 100, 0, 150), ("b", 0, 0, 60)], "b a -> b");
}

#[test]
fn inodes_subtract_the_request_for_bytes() {
    check_rank(
        Signal::NodeFsInodesFree,
        &[("a", 100, 0, 150), ("b", 0, 0, 60), ("c", 0, 0, 10)],
        "b a c -> b",
    );
}

#[test]
fn process_ids_are_ranked_by_priority_first() {
    check_rank(
        Signal::PidAvailable,
        &[("a", 0, 1, 500), ("b", 0, 0, 3), ("unknown", 0, 1, -1), ("c", 0, 0, 5)],
        "c b unknown a -> c",
    );
}

#[test]
fn critical_pods_are_ranked_but_never_evicted() {
    check_rank(Signal::MemoryAvailable, &[("CRITICAL", 0, 0, 500), ("b", 0, 0, 3)], "CRITICAL b -> b");
    check_rank(Signal::MemoryAvailable, &[("CRITICAL", 0, 0, 500)], "CRITICAL -> none");
}

#[test]
fn terminating_pods_come_first_among_equals() {
    let rows = [
        ("far above", 100, 0, 900),
        ("leaves", 100, 0, 101),
        ("leaves below", 100, 0, 99),
        ("below", 100, 0, 100),
        ("low", 100, -1, 101),
        ("leaves high", 100, 1, 999),
    ];
    let expectation = "low leaves far above leaves high leaves below below -> low";
    check_rank(Signal::MemoryAvailable, &rows, expectation);
    check_rank(Signal::PidAvailable, &[("a", 0, 0, 9), ("leaves", 0, 0, 3)], "leaves a -> leaves");
}

/// Returns the victims among pods `(MiB requested, MiB in use, terminating)` in any order, for this missing
/// amount.
fn chosen_of_leaving(pods: &[(i64, i64, bool)], missing: i64) -> Vec<usize> {
    let made: Vec<Pod> = pods
        .iter()
        .map(|(request, ..)| {
            let resources = json!({"requests": {"memory": request.to_string()}});
            serde_json::from_value(json!({"spec": {"containers": [{"name": "c", "resources": resources}]}}))
                .unwrap()
        })
        .collect();
    let mut candidates = Vec::new();
    for ((_, used, leaving), pod) in pods.iter().zip(&made) {
        let bytes = u64::try_from(*used).unwrap();
        candidates.push(Candidate {
            demand: PodDemand::read(pod).unwrap(),
            priority: 0,
            critical: false,
            leaving: *leaving,
            usage: Some(PodUsage { memory_working_set_bytes: bytes, ..PodUsage::default() }),
        });
    }
    let (signal, layout) = (Signal::MemoryAvailable, DiskLayout::Single);
    victims(signal, layout, &rank(signal, layout, &candidates), &candidates, units(missing), false)
}

#[test]
fn no_pod_loses_its_grace_period_needlessly() {
    // A drain: three databases below their requests.
    let drained = [(500, 200, true), (500, 300, true), (500, 250, true)];
    assert_eq!(chosen_of_leaving(&drained, 300), [1]);
    assert_eq!(chosen_of_leaving(&drained, 301), [1, 2]);
    // A pod above its request frees enough.
    assert_eq!(chosen_of_leaving(&[(500, 300, true), (0, 200, false)], 100), [1]);
    // A pod above its request does not free enough: it is evicted first, in addition to the other.
    assert_eq!(chosen_of_leaving(&[(500, 300, true), (0, 50, false)], 100), [1, 0]);
    // A terminating pod above its request is evicted before others.
    assert_eq!(chosen_of_leaving(&[(0, 300, false), (0, 200, true)], 100), [1]);
    // A pod next to nothing above its request is not worth evicting.
    assert_eq!(chosen_of_leaving(&[(500, 300, true), (0, 1, false)], 200), [0]);
}

fn candidates<'a>(pod: &'a Pod, pods: &[(i64, bool)]) -> Vec<Candidate<'a>> {
    let candidate = |(used, critical): &(i64, bool)| Candidate {
        demand: PodDemand::read(pod).unwrap(),
        priority: 0,
        critical: *critical,
        leaving: false,
        usage: u64::try_from(*used)
            .ok()
            .map(|bytes| PodUsage { memory_working_set_bytes: bytes, ..PodUsage::default() }),
    };
    pods.iter().map(candidate).collect()
}

fn chosen(pods: &[(i64, bool)], missing: i64, leaving: bool) -> Vec<usize> {
    let pod: Pod =
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"containers": []}})).unwrap();
    let ranked: Vec<usize> = (0..pods.len()).collect();
    let candidates = candidates(&pod, pods);
    victims(Signal::MemoryAvailable, DiskLayout::Single, &ranked, &candidates, units(missing), leaving)
}

/// Checks which pods are evicted at once, from a ranking of `(MiB in use or -1 for unknown, critical)`, for
/// this missing amount.
fn check_victims(pods: &[(i64, bool)], missing: i64, expectation: &[usize]) {
    assert_eq!(chosen(pods, missing, false), expectation, "{pods:?} for {missing}");
}

#[test]
fn as_many_pods_as_necessary_are_evicted_at_once() {
    check_victims(&[(50, false), (40, false), (30, false)], 50, &[0]);
    check_victims(&[(50, false), (40, false), (30, false)], 51, &[0, 1]);
    check_victims(&[(50, false), (40, false), (30, false)], 120, &[0, 1, 2]);
    check_victims(&[(500, true), (40, false), (30, false)], 50, &[1, 2]);
    check_victims(&[(50, false)], 0, &[0]);
    check_victims(&[(500, true)], 5, &[]);
}

#[test]
fn one_pod_at_a_time_is_evicted_if_all_together_are_not_enough() {
    check_victims(&[(50, false), (40, false), (30, false)], 121, &[0]);
    check_victims(&[(0, false), (0, false)], 5, &[0]);
    // The first pod that is worth it; its effect must be measured before the next eviction.
    check_victims(&[(0, false), (0, false), (4, false)], 5, &[2]);
    assert!(chosen(&[(50, false), (40, false)], 121, true).is_empty());
    assert_eq!(chosen(&[(50, false), (40, false)], 60, true), [0, 1]);
    // The effect of evicting a pod without statistics must be measured first.
    check_victims(&[(-1, false), (40, false)], 50, &[0]);
    check_victims(&[(10, false), (-1, false), (40, false)], 50, &[0]);
    check_victims(&[(0, false), (-1, false), (40, false)], 50, &[0]);
    assert!(chosen(&[(-1, false), (40, false)], 50, true).is_empty());
}

#[test]
fn a_pod_that_frees_next_to_nothing_stays_while_a_culprit_exists() {
    check_victims(&[(0, false), (0, false), (7, false)], 5, &[2]);
    check_victims(&[(9, false), (990, false), (5, false)], 1000, &[1]);
    check_victims(&[(9, false), (995, false), (5, false)], 990, &[1]);
    check_victims(&[(10, false), (990, false), (5, false)], 1000, &[0, 1]);
    // The first pod stays: a later one must be evicted anyway, and frees enough alone.
    check_victims(&[(124, false), (48, false), (40_000, false)], 4000, &[2]);
    check_victims(&[(300, false), (500, false), (600, false)], 1100, &[1, 2]);
}

#[test]
fn a_pod_that_fills_the_disk_is_evicted_alone() {
    const KIB: i64 = 1 << 10;
    let check = |filler: (i32, i64), missing: i64, expectation: &[&str]| {
        let rows = [("nginx", 0, 124 * KIB), ("postgres", 0, 48 * KIB), ("redis", 0, 24 * KIB)];
        let rows = rows.into_iter().chain([("filler", filler.0, filler.1)]);
        let rows: Vec<(&str, i32, i64)> = rows.filter(|(.., used)| *used >= 0).collect();
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"containers": []}})).unwrap();
        let candidate = |(_, priority, used): &(&str, i32, i64)| Candidate {
            demand: PodDemand::read(&pod).unwrap(),
            priority: *priority,
            critical: false,
            leaving: false,
            usage: Some(PodUsage { volumes_bytes: u64::try_from(*used).unwrap(), ..PodUsage::default() }),
        };
        let candidates: Vec<Candidate<'_>> = rows.iter().map(candidate).collect();
        let (signal, layout) = (Signal::NodeFsAvailable, DiskLayout::Single);
        let ranked = rank(signal, layout, &candidates);
        let chosen = victims(signal, layout, &ranked, &candidates, units(missing), false);
        let names: Vec<&str> = chosen.iter().map(|i| rows[*i].0).collect();
        assert_eq!(names, expectation, "{filler:?}");
    };
    let missing = 4096 * KIB;
    check((0, 40_960 * KIB), missing, &["filler"]);
    // The pod ranks last by its priority.
    check((1000, 40_960 * KIB), missing, &["filler"]);
    // The culprit could not be measured in time, or is not a pod.
    check((0, 0), missing, &["nginx"]);
    check((0, -1), missing, &["nginx"]);
}

#[test]
fn space_has_become_available_once_half_of_the_expected_amount_is_seen() {
    let check = |expected, from, available, missing, expectation| {
        let come = has_come(units(expected), units(from), units(available), units(missing));
        assert_eq!(come, expectation, "{expected} from {from} to {available}, {missing} missing");
    };
    check(500, 200, 700, 100, true);
    check(500, 200, 450, 100, true);
    check(500, 200, 449, 100, false);
    check(500, 200, 100, 100, false);
    check(0, 200, 900, 100, false);
    // Next to nothing could come from other processes.
    check(4, 200, 204, 1000, false);
    check(20, 200, 210, 1000, true);
}

#[test]
fn the_missing_amount_includes_the_minimum_reclaim() {
    let more = ThresholdValue::min_reclaim("50").unwrap();
    let seen = Observation { available: units(80), capacity: units(1000) };
    let plain = threshold(Signal::MemoryAvailable, "100");
    assert_eq!(deficit(&plain, &seen), units(20));
    assert_eq!(deficit(&Threshold { min_reclaim: Some(more), ..plain.clone() }, &seen), units(70));
    let enough = Observation { available: units(180), capacity: units(1000) };
    assert_eq!(deficit(&plain, &enough), units(0));
}

#[test]
fn a_pod_with_hidden_volume_usage_is_evicted_first_and_alone() {
    let pod: Pod =
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"containers": []}})).unwrap();
    let candidate = |(used, hides_disk): (u64, bool)| Candidate {
        demand: PodDemand::read(&pod).unwrap(),
        priority: i32::from(hides_disk),
        critical: false,
        leaving: false,
        usage: Some(PodUsage { volumes_bytes: used, inodes: used, hides_disk, ..PodUsage::default() }),
    };
    let candidates = [(900, false), (1, true), (500, false)].map(candidate);
    let check = |signal, layout, expectation: [usize; 3], gone: &[usize]| {
        let ranked = rank(signal, layout, &candidates);
        assert_eq!(ranked, expectation, "{signal:?} {layout:?}");
        let chosen = victims(signal, layout, &ranked, &candidates, units(100), false);
        assert_eq!(chosen, gone, "{signal:?} {layout:?}");
    };
    check(Signal::NodeFsAvailable, DiskLayout::Single, [1, 0, 2], &[1]);
    check(Signal::NodeFsInodesFree, DiskLayout::Single, [1, 0, 2], &[1]);
    check(Signal::NodeFsAvailable, DiskLayout::DedicatedImageFs, [1, 0, 2], &[1]);
    // The volumes are on another disk.
    check(Signal::ImageFsAvailable, DiskLayout::DedicatedImageFs, [0, 2, 1], &[0]);
    check(Signal::MemoryAvailable, DiskLayout::Single, [0, 2, 1], &[0]);
}

#[test]
fn the_bytes_that_count_depend_on_the_disks() {
    let usage = PodUsage {
        rootfs_bytes: 1,
        logs_bytes: 10,
        volumes_bytes: 100,
        files_bytes: 1000,
        ..PodUsage::default()
    };
    let check = |signal, layout, expectation| {
        assert_eq!(usage.of(signal, layout), units(expectation), "{signal:?} {layout:?}");
    };
    check(Signal::NodeFsAvailable, DiskLayout::Single, 1111);
    check(Signal::ImageFsAvailable, DiskLayout::Single, 1111);
    check(Signal::NodeFsAvailable, DiskLayout::DedicatedImageFs, 1110);
    check(Signal::ImageFsAvailable, DiskLayout::DedicatedImageFs, 1);
    check(Signal::ContainerFsAvailable, DiskLayout::DedicatedImageFs, 1);
    check(Signal::ImageFsAvailable, DiskLayout::SplitImageFs, 0);
    check(Signal::NodeFsAvailable, DiskLayout::SplitImageFs, 1111);
}

proptest! {
    #[test]
    fn any_text_is_a_threshold_or_refused(text: String) {
        let _ = ThresholdValue::threshold(&text);
        let _ = ThresholdValue::min_reclaim(&text);
    }

    #[test]
    fn any_percentage_of_any_capacity_is_an_amount(percent in "[0-9]{1,3}([.][0-9]{0,9})?%", capacity: i64) {
        if let Ok(Some(value)) = ThresholdValue::threshold(&percent) {
            let _ = value.of(units(capacity));
        }
    }
}

proptest! {
    #[test]
    fn no_pod_below_its_request_loses_its_grace_while_one_above_stays(
        pods in prop::collection::vec((0..1000_i64, 0..1000_i64, any::<bool>()), 1..12),
        missing in 1..5000_i64,
    ) {
        let chosen = chosen_of_leaving(&pods, missing);
        let is_above = |i: usize| pods[i].1 > pods[i].0;
        if chosen.iter().any(|i| pods[*i].2 && !is_above(*i)) {
            let stays = |i: &usize| is_above(*i) && !chosen.contains(i);
            prop_assert!(!(0..pods.len()).any(|i| stays(&i) && is_worth_it(units(pods[i].1), units(missing))));
        }
    }
}

proptest! {
    #[test]
    fn no_pod_is_evicted_needlessly(
        pods in prop::collection::vec((-1..1000_i64, any::<bool>()), 0..20),
        missing in 0..5000_i64, leaving: bool,
    ) {
        let chosen = chosen(&pods, missing, leaving);
        prop_assert!(chosen.iter().all(|i| !pods[*i].1), "evicted a critical pod");
        prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]), "not in order");
        prop_assert!(leaving || chosen.is_empty() == pods.iter().all(|(_, critical)| *critical));
        if chosen.len() > 1 {
            let freed: i64 = chosen.iter().map(|i| pods[*i].0).sum();
            prop_assert!(freed >= missing);
            prop_assert!(chosen.iter().all(|i| freed - pods[*i].0 < missing), "evicted one pod too many");
        }
    }
}

#[test]
fn swapped_memory_counts_against_the_request_and_is_not_freed() {
    let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [{"name": "c",
        "resources": {"requests": {"memory": "100"}}}]}}))
    .unwrap();
    let candidate = |memory, swap| Candidate {
        demand: PodDemand::read(&pod).unwrap(),
        priority: 0,
        critical: false,
        leaving: false,
        usage: Some(PodUsage { memory_working_set_bytes: memory, swap_bytes: swap, ..PodUsage::default() }),
    };
    let (signal, layout) = (Signal::MemoryAvailable, DiskLayout::Single);
    let pods = [candidate(110, 0), candidate(90, 500), candidate(95, 0)];
    let ranked = rank(signal, layout, &pods);
    assert_eq!(ranked, [1, 0, 2]);
    // The swapped 500 bytes free no memory.
    assert_eq!(victims(signal, layout, &ranked, &pods, units(150), false), [1, 0]);
    assert_eq!(rank(Signal::PidAvailable, layout, &pods), [0, 1, 2]);
}
