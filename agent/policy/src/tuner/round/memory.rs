//! Memory: restricts other pods for a complaint, and loosens the restrictions later.

use std::collections::BTreeMap;

use super::{Complaint, Hand, Node, Round, WORTH_NAMING, grow, shrink};
use crate::resources::qos::QosClass;
use crate::tuner::{Knob, KnobKind, PodSample, Standstill, words};

/// Restricts the memory of another pod for a complaint.
pub(super) fn squeeze<'a>(round: &mut Round<'a>, complaint: &Complaint<'a>) {
    if !round.node.seen.supports.memory_high {
        return;
    }
    let may = |pod: &&PodSample| match pod.class {
        QosClass::BestEffort => true,
        QosClass::Burstable => pod.working_set > pod.memory_request && pod.name != complaint.pod.name,
        QosClass::Guaranteed => false,
    };
    let spared =
        |pod: &&PodSample| round.state.standstill.get(&pod.cgroup).is_some_and(Standstill::is_spared);
    let mut order: Vec<&PodSample> =
        round.node.seen.pods.iter().filter(may).filter(|pod| !spared(pod)).collect();
    // A growing pod would at once use memory that others release.
    let growth = |pod: &PodSample| pod.memory_growth_permille.unwrap_or(0);
    order.sort_by_key(|pod| (pod.class, std::cmp::Reverse(growth(pod)), std::cmp::Reverse(pod.working_set)));
    for pod in order {
        let request = if pod.class == QosClass::Burstable { pod.memory_request } else { 0 };
        let now = round.hand.held(&pod.cgroup, KnobKind::MemoryHigh).unwrap_or(pod.memory_used);
        // Never below the real need now: each step takes the memory that the previous one made the pod
        // release.
        let least = pod.working_set.max(request).max(round.node.law.memory_floor);
        let next = shrink(now, round.node.law.memory_step_percent).max(least);
        let grew = match growth(pod) {
            WORTH_NAMING.. => format!(", whose growth is {} of all,", words::percent(growth(pod))),
            _ => String::new(),
        };
        let words = format!(
            "{}: {} ({}){grew} is held at {}",
            complaint.words,
            pod.name,
            pod.class,
            words::bytes(next)
        );
        if next < now && round.hand.hold(&pod.cgroup, KnobKind::MemoryHigh, next, &words) {
            return;
        }
    }
}

/// Raises every memory.high that is held, and removes those without effect.
pub(super) fn relax(node: Node<'_>, hand: &mut Hand<'_>) {
    let held: Vec<(Knob, u64)> = hand
        .held
        .iter()
        .filter(|(knob, _)| knob.kind == KnobKind::MemoryHigh)
        .map(|(knob, value)| (knob.clone(), *value))
        .collect();
    for (knob, high) in held {
        let used = node.seen.pods.iter().find(|pod| pod.cgroup == knob.cgroup).map_or(0, |p| p.memory_used);
        let next = grow(high, node.law.memory_step_percent).max(high + (1 << 20));
        // At twice its usage the limit has no effect on the pod.
        let to = Some(next).filter(|next| *next < used.saturating_mul(2));
        hand.set(&knob, to, "no protected pod stalls for memory any more");
    }
}

/// Restores the memory of pods that do nothing but reclaim.
pub(super) fn free_what_stands_still(
    node: Node<'_>,
    hand: &mut Hand<'_>,
    standstills: &mut BTreeMap<String, Standstill>,
) {
    for pod in &node.seen.pods {
        let held = hand.held(&pod.cgroup, KnobKind::MemoryHigh).is_some();
        let mut standstill = standstills.get(&pod.cgroup).copied().unwrap_or_default();
        let give_back = standstill.tick(node.law, held, pod.memory_still_permille);
        if standstill.is_over() {
            standstills.remove(&pod.cgroup);
        } else {
            standstills.insert(pod.cgroup.clone(), standstill);
        }
        if give_back {
            let knob = Knob { cgroup: pod.cgroup.clone(), kind: KnobKind::MemoryHigh };
            let words = format!("{} makes no progress under the reduced memory.high", pod.name);
            hand.set(&knob, None, &words);
        }
    }
}
