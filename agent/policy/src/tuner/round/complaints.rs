//! Complaints: measurements of protected containers relative to their bounds.

use super::{Complaint, Round, WORTH_NAMING, ratio, wait_for_others};
use crate::resources::qos::QosClass;
use crate::tuner::{ContainerSample, KnobKind, PodSample, words};

impl<'a> Round<'a> {
    /// Returns a container's CPU wait relative to the bound, in thousandths, and an explanation. Time in
    /// which its own quota throttled it does not count.
    pub(super) fn cpu_complaint(&self, container: &ContainerSample) -> Option<(u32, String)> {
        let share = wait_for_others(container).map(|wait| {
            let bound = self.law.cpu_wait_permille;
            let words = format!(
                "waits for a CPU {} of the time ({} at most)",
                words::percent(wait),
                words::percent(bound)
            );
            (ratio(wait.into(), bound.into()), words)
        });
        let throttled = container.throttled_permille.is_some_and(|part| part > 0);
        let p99 = container.cpu_wait_p99_us.filter(|_| !throttled).map(|wait| {
            let bound = self.law.cpu_wait_p99_us;
            let words = format!(
                "waits {} for a CPU at the 99th percentile ({} at most)",
                words::millis(wait),
                words::millis(bound)
            );
            (ratio(wait, bound), words)
        });
        share.into_iter().chain(p99).max_by_key(|(ratio, _)| *ratio)
    }

    /// Returns true if no step can help: the CPUs were used by the container's own threads, the machine,
    /// Guaranteed pods, or pods within their requests. Restricting other pods could not yield the gain
    /// required of steps.
    pub(super) fn is_hopeless(&self, complaint: &Complaint<'_>) -> bool {
        let Some(held_by) = complaint.container.held_by.as_ref().filter(|_| self.law.helpless_steps > 0)
        else {
            return false;
        };
        let others = self.seen.pods.iter().filter(|pod| pod.cgroup != complaint.pod.cgroup);
        let within_reach = others
            .filter(|pod| pod.class == QosClass::BestEffort || self.is_greedier(pod, complaint.pod))
            .filter_map(|pod| held_by.get(&pod.cgroup));
        within_reach.sum::<u32>() < self.law.gain_percent * 10
    }

    /// Names the main cause of the wait; `None` if not measured, or if no pod stands out.
    pub(super) fn waits_for(&self, complaint: &Complaint<'_>) -> Option<String> {
        let held_by = complaint.container.held_by.as_ref()?;
        let (cgroup, permille) = held_by.iter().max_by_key(|(_, permille)| **permille)?;
        let whom = match self.seen.pods.iter().find(|pod| pod.cgroup == *cgroup)? {
            pod if pod.cgroup == complaint.pod.cgroup => "its own threads",
            pod => pod.name.as_str(),
        };
        (*permille >= WORTH_NAMING).then(|| format!(", {} of that for {whom}", words::percent(*permille)))
    }

    /// Returns true if a Burstable pod uses more than it requests, and exceeds its request by a larger factor
    /// than the complaining pod, which has no better claim to the rest. A small excess is not worth a cap,
    /// which would delay each of the pod's own bursts.
    pub(super) fn is_greedier(&self, pod: &PodSample, than: &PodSample) -> bool {
        let (used, theirs) = (pod.cpu_used.unwrap_or(0), than.cpu_used.unwrap_or(0));
        // used / request > theirs / request, where a request of zero counts as a minimal one.
        let uses_more = used > pod.cpu_request.saturating_add(self.quiet())
            && u128::from(used) * u128::from(than.cpu_request.max(1))
                > u128::from(theirs) * u128::from(pod.cpu_request.max(1));
        pod.class == QosClass::Burstable
            // Otherwise nothing can be taken from the pod.
            && (self.seen.supports.weights || pod.can_cap)
            // A capped pod uses less because of its cap.
            && (uses_more || self.held(&pod.cgroup, KnobKind::CpuCap).is_some())
    }

    /// Returns the memory complaint likewise. A container at its own limit causes its stalls itself.
    pub(super) fn memory_complaint(&self, container: &ContainerSample) -> Option<(u32, String)> {
        let stall = container.memory_stall_permille?;
        if container.at_memory_limit {
            return Some((0, "stalls at its own memory limit".to_owned()));
        }
        let bound = self.law.memory_stall_permille;
        let words = format!(
            "stalls for memory {} of the time ({} at most)",
            words::percent(stall),
            words::percent(bound)
        );
        Some((ratio(stall.into(), bound.into()), words))
    }

    // ---- CPU ----
}
