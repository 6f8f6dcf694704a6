//! Properties of random schedules.

use super::*;

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
            let supports = Supports { idle, harmless_caps, memory_high, burst, disk_weight: idle, weights };
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
                    (KnobKind::DiskWeight, Some(weight)) => {
                        prop_assert!(pod.is_none() && seen.supports.disk_weight);
                        prop_assert!(weight == u64::from(law.best_effort_disk_weight));
                    }
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
