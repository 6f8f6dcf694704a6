//! Memory: restricts other pods for a complaint, and loosens the restrictions later.

use super::{Complaint, Round, WORTH_NAMING, grow, shrink};
use crate::resources::qos::QosClass;
use crate::tuner::{Knob, KnobKind, PodSample, Standstill, words};

impl<'a> Round<'a> {
    pub(super) fn squeeze_memory(&mut self, complaint: &Complaint<'a>) {
        if !self.seen.supports.memory_high {
            return;
        }
        let may = |pod: &&PodSample| match pod.class {
            QosClass::BestEffort => true,
            QosClass::Burstable => pod.working_set > pod.memory_request && pod.name != complaint.pod.name,
            QosClass::Guaranteed => false,
        };
        let spared =
            |pod: &&PodSample| self.state.standstill.get(&pod.cgroup).is_some_and(Standstill::is_spared);
        let mut order: Vec<&PodSample> =
            self.seen.pods.iter().filter(may).filter(|pod| !spared(pod)).collect();
        // A growing pod would at once use memory that others release.
        let growth = |pod: &PodSample| pod.memory_growth_permille.unwrap_or(0);
        order.sort_by_key(|pod| {
            (pod.class, std::cmp::Reverse(growth(pod)), std::cmp::Reverse(pod.working_set))
        });
        for pod in order {
            let request = if pod.class == QosClass::Burstable { pod.memory_request } else { 0 };
            let now = self.held(&pod.cgroup, KnobKind::MemoryHigh).unwrap_or(pod.memory_used);
            // Never below the real need now: each step takes the memory that the previous one made the pod
            // release.
            let least = pod.working_set.max(request).max(self.law.memory_floor);
            let next = shrink(now, self.law.memory_step_percent).max(least);
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
            if next < now && self.hold(&pod.cgroup, KnobKind::MemoryHigh, next, &words) {
                return;
            }
        }
    }

    /// Raises every memory.high that is held, and removes those without effect.
    pub(super) fn relax_memory(&mut self) {
        let held: Vec<(Knob, u64)> = self
            .state
            .held
            .iter()
            .filter(|(knob, _)| knob.kind == KnobKind::MemoryHigh)
            .map(|(knob, value)| (knob.clone(), *value))
            .collect();
        for (knob, high) in held {
            let used =
                self.seen.pods.iter().find(|pod| pod.cgroup == knob.cgroup).map_or(0, |p| p.memory_used);
            let next = grow(high, self.law.memory_step_percent).max(high + (1 << 20));
            // At twice its usage the limit has no effect on the pod.
            let to = Some(next).filter(|next| *next < used.saturating_mul(2));
            self.set(&knob, to, "no protected pod stalls for memory any more");
        }
    }

    // ---- Bursts ----
}
