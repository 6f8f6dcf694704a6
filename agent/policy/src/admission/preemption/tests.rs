use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn pod(value: Value) -> Pod {
    serde_json::from_value(value).unwrap()
}

fn critical() -> Pod {
    pod(json!({"metadata": {"name": "critical"}, "spec": {"priority": 2_000_000_000, "containers": []}}))
}

fn requirements(amounts: &[(&str, i64)]) -> Vec<Requirement> {
    amounts
        .iter()
        .map(|(resource, amount)| Requirement { resource: (*resource).to_owned(), amount: *amount })
        .collect()
}

fn candidate(
    index: usize,
    priority: i32,
    class: QosClass,
    frees: &[i64],
    names: &'static [String],
) -> Candidate<'static> {
    let (memory, cpu) = (frees.first().copied().unwrap_or(0), frees.get(1).copied().unwrap_or(0));
    Candidate {
        index,
        name: ("default", names[index].as_str()),
        priority,
        class,
        frees: frees.to_vec(),
        memory,
        cpu,
    }
}

fn names() -> &'static [String] {
    static NAMES: std::sync::OnceLock<Vec<String>> = std::sync::OnceLock::new();
    NAMES.get_or_init(|| (0..2000).map(|index| format!("p{index:04}")).collect())
}

const NEEDS: [(&str, i64); 2] = [("memory", 100), ("cpu", 100)];

/// Expects these victims' indices for candidates given as (priority, class, frees).
fn check(policy: Policy, candidates: &[(i32, QosClass, [i64; 2])], victims: &[usize]) {
    let candidates: Vec<_> = candidates
        .iter()
        .enumerate()
        .map(|(index, (priority, class, frees))| candidate(index, *priority, *class, frees, names()))
        .collect();
    let preemption = choose(&candidates, &requirements(&NEEDS), policy);
    assert_eq!((preemption.victims.as_slice(), preemption.error), (victims, None));
}

use QosClass::{BestEffort, Burstable, Guaranteed};

#[test]
fn minimal_spares_the_important_pod_whatever_its_size() {
    check(
        Policy::Minimal,
        &[(1, Burstable, [100, 100]), (0, Burstable, [50, 50]), (0, Burstable, [50, 50])],
        &[1, 2],
    );
    check(
        Policy::Minimal,
        &[(0, Guaranteed, [100, 100]), (0, Burstable, [60, 60]), (0, Burstable, [60, 60])],
        &[1, 2],
    );
    // The kubelet, by QoS alone, takes the Burstable pod of higher priority before the Guaranteed one.
    check(Policy::Kubelet, &[(9, Burstable, [100, 100]), (0, Guaranteed, [100, 100])], &[0]);
    check(Policy::Minimal, &[(9, Burstable, [100, 100]), (0, Guaranteed, [100, 100])], &[1]);
}

#[test]
fn minimal_takes_no_pod_that_an_important_victim_makes_needless() {
    check(
        Policy::Minimal,
        &[(1, Burstable, [100, 90]), (0, Burstable, [60, 5]), (0, Burstable, [10, 10])],
        &[2, 0],
    );
}

#[test]
fn minimal_breaks_ties_by_overfreeing_then_by_name() {
    check(Policy::Minimal, &[(0, Burstable, [120, 100]), (0, Burstable, [100, 110])], &[1]);
    check(Policy::Minimal, &[(0, Burstable, [110, 100]), (0, Burstable, [100, 110])], &[0]);
    check(Policy::Minimal, &[(0, Burstable, [100, 100]), (0, Burstable, [100, 100])], &[0]);
    // Of two equal pods the kubelet takes the later one.
    check(Policy::Kubelet, &[(0, Burstable, [100, 100]), (0, Burstable, [100, 100])], &[1]);
}

#[test]
fn preemption_reports_a_shortfall_and_evicts_none() {
    for policy in [Policy::Kubelet, Policy::Minimal] {
        let only = [candidate(0, 0, Burstable, &[99, 500], names())];
        let preemption = choose(&only, &requirements(&NEEDS), policy);
        assert!(preemption.victims.is_empty());
        assert!(preemption.error.unwrap().contains("1 of memory would still be missing"));
    }
}

#[test]
fn no_need_no_victim() {
    for policy in [Policy::Kubelet, Policy::Minimal] {
        let only = [candidate(0, 0, Burstable, &[99, 500], names())];
        assert_eq!(
            choose(&only, &requirements(&[("memory", 0), ("cpu", -5)]), policy),
            Preemption::default()
        );
    }
}

#[test]
fn critical_pods_and_higher_priorities_are_spared() {
    let requests = json!({"requests": {"cpu": "1"}});
    let spec = |priority: Option<i64>| json!({"priority": priority, "containers": [{"name": "c", "resources": requests}]});
    let pods = [
        pod(json!({"metadata": {"name": "system"}, "spec": spec(Some(2_000_000_000))})),
        pod(
            json!({"metadata": {"name": "static", "annotations": {"kubernetes.io/config.source": "file"}}, "spec": spec(None)}),
        ),
        pod(
            json!({"metadata": {"name": "mirror", "annotations": {"kubernetes.io/config.mirror": "x"}}, "spec": spec(None)}),
        ),
        pod(
            json!({"metadata": {"name": "plain", "annotations": {"kubernetes.io/config.source": "api"}}, "spec": spec(None)}),
        ),
    ];
    for policy in [Policy::Kubelet, Policy::Minimal] {
        let preemption = preempt(&critical(), &pods, &requirements(&[("cpu", 1)]), policy).unwrap();
        assert_eq!(preemption.victims, [3]);
        let preemption = preempt(&critical(), &pods, &requirements(&[("pods", 2)]), policy).unwrap();
        assert!(preemption.error.is_some());
    }
}

#[test]
fn a_bad_amount_is_named_by_pod_and_field() {
    let pods =
        [pod(json!({"spec": {"containers": [{"name": "c", "resources": {"limits": {"memory": "x"}}}]}}))];
    let error = preempt(&critical(), &pods, &requirements(&[("cpu", 1)]), Policy::Kubelet).unwrap_err();
    assert_eq!(error.path(), "[0].spec.containers[0].resources.limits.memory");
}

#[test]
fn many_pods_are_chosen_exactly_or_honestly() {
    let many: Vec<_> = (0..2000)
        .map(|index| {
            let random = |salt: usize| {
                i64::try_from((index * 7919 + salt * 104_729) * 48_271 % 2_147_483_647 % 97).unwrap() + 1
            };
            candidate(index, i32::try_from(index % 3).unwrap(), Burstable, &[random(1), random(2)], names())
        })
        .collect();
    let need = requirements(&[("memory", 20_000), ("cpu", 20_000)]);
    let preemption = choose(&many, &need, Policy::Minimal);
    let freed =
        |column: usize| preemption.victims.iter().map(|victim| many[*victim].frees[column]).sum::<i64>();
    assert!(freed(0) >= 20_000 && freed(1) >= 20_000);
    let of_priority =
        |priority| preemption.victims.iter().filter(|victim| many[**victim].priority == priority).count();
    assert_eq!((of_priority(1), of_priority(2)), (0, 0), "the least important third is enough");
}

/// Judges all sets that meet the needs as the policy's documentation states: counts, overfreeing in exact
/// fractions, names.
fn brute_force(candidates: &[Candidate<'_>], needs: &[Requirement]) -> Option<Vec<usize>> {
    let mut classes: Vec<(i32, QosClass)> = candidates.iter().map(|c| (c.priority, c.class)).collect();
    classes.sort_unstable();
    classes.dedup();
    classes.reverse();
    // Multiplying by all needs makes overfreeing a whole number.
    let product: i128 = needs.iter().map(|need| i128::from(need.amount)).product();
    let judge = |set: u32| {
        let chosen: Vec<&Candidate<'_>> = candidates.iter().filter(|c| set >> c.index & 1 == 1).collect();
        let mut over = 0;
        for (column, need) in needs.iter().enumerate() {
            let freed: i128 = chosen.iter().map(|c| i128::from(c.frees[column])).sum();
            let spare = freed - i128::from(need.amount);
            if spare < 0 {
                return None;
            }
            over += spare * (product / i128::from(need.amount));
        }
        let counts: Vec<usize> = classes
            .iter()
            .map(|class| chosen.iter().filter(|c| (c.priority, c.class) == *class).count())
            .collect();
        let mut names: Vec<_> = chosen.iter().map(|c| c.name).collect();
        names.sort_unstable();
        let mut order: Vec<usize> = chosen.iter().map(|c| c.index).collect();
        order.sort_unstable_by_key(|index| {
            (candidates[*index].priority, candidates[*index].class, candidates[*index].name)
        });
        Some((counts, over, names, order))
    };
    (0..1_u32 << candidates.len()).filter_map(judge).min().map(|(_, _, _, order)| order)
}

fn class() -> impl Strategy<Value = QosClass> {
    prop_oneof![Just(BestEffort), Just(Burstable), Just(Guaranteed)]
}

prop_compose! {
    /// Few values, so that ties are common; a shuffled order of names.
    fn contenders(most: usize)(
        pods in prop::collection::vec((0..3_i32, class(), prop::collection::vec(0..6_i64, 3)), 1..=most),
        shuffle in any::<prop::sample::Index>(),
    ) -> Vec<Candidate<'static>> {
        let count = pods.len();
        let shift = shuffle.index(count);
        pods.into_iter().enumerate().map(|(index, (priority, class, frees))| Candidate {
            name: ("default", names()[(index + shift) % count].as_str()),
            ..candidate(index, priority, class, &frees, names())
        }).collect()
    }
}

fn three_needs() -> impl Strategy<Value = Vec<Requirement>> {
    (1..20_i64, 1..20_i64, 1..20_i64)
        .prop_map(|(a, b, c)| requirements(&[("memory", a), ("cpu", b), ("x", c)]))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn minimal_is_the_best_of_all_sets(candidates in contenders(9), needs in three_needs()) {
        let preemption = choose(&candidates, &needs, Policy::Minimal);
        prop_assert_eq!(brute_force(&candidates, &needs), preemption.error.is_none().then_some(preemption.victims));
    }

    #[test]
    fn no_pod_is_evicted_needlessly_and_every_need_is_met(candidates in contenders(14), needs in three_needs(), kubelet in any::<bool>()) {
        let policy = if kubelet { Policy::Kubelet } else { Policy::Minimal };
        let preemption = choose(&candidates, &needs, policy);
        if preemption.error.is_none() {
            for (column, need) in needs.iter().enumerate() {
                prop_assert!(preemption.victims.iter().map(|victim| candidates[*victim].frees[column]).sum::<i64>() >= need.amount);
            }
            // The decision is stable: once the victims are evicted, no need remains and no further pod is
            // evicted.
            let rest: Vec<_> = needs.iter().enumerate().map(|(column, need)| Requirement {
                amount: need.amount - preemption.victims.iter().map(|victim| candidates[*victim].frees[column]).sum::<i64>(),
                ..need.clone()
            }).collect();
            prop_assert_eq!(choose(&candidates, &rest, policy).victims, Vec::<usize>::new());
        }
        prop_assert_eq!(choose(&candidates, &needs, policy), preemption);
    }

    #[test]
    fn minimal_never_takes_a_more_important_pod_that_others_could_replace(candidates in contenders(12), needs in three_needs()) {
        let preemption = choose(&candidates, &needs, Policy::Minimal);
        let importance = |index: usize| (candidates[index].priority, candidates[index].class);
        let mut by_class: BTreeMap<_, usize> = BTreeMap::new();
        preemption.victims.iter().for_each(|victim| *by_class.entry(importance(*victim)).or_default() += 1);
        for victim in &preemption.victims {
            // Without this victim, all less important pods and the other victims together must fall short.
            let others = |c: &&Candidate<'_>| {
                importance(c.index) < importance(*victim) || (preemption.victims.contains(&c.index) && c.index != *victim)
            };
            let enough = needs.iter().enumerate().all(|(column, need)| {
                candidates.iter().filter(others).map(|c| c.frees[column]).sum::<i64>() >= need.amount
            });
            prop_assert!(!enough, "evicting {victim} is needless");
        }
        let mut order: Vec<_> = preemption.victims.iter().map(|victim| importance(*victim)).collect();
        let evicted = order.clone();
        order.sort_unstable();
        prop_assert_eq!(evicted, order, "never a higher priority before a lower one");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn minimal_is_the_best_of_all_sets_of_fourteen(candidates in contenders(14), needs in three_needs()) {
        let preemption = choose(&candidates, &needs, Policy::Minimal);
        prop_assert_eq!(brute_force(&candidates, &needs), preemption.error.is_none().then_some(preemption.victims));
    }
}
