//! The node as it is seen: measurements of protected containers relative to their bounds, and the pods that
//! use more than their part.

use super::{Complaint, Hand, Node, WORTH_NAMING, ratio, wait_for_others};
use crate::resources::cgroups::{millis_to_shares, shares_to_weight_linear};
use crate::resources::qos::QosClass;
use crate::tuner::{ContainerSample, KnobKind, PodSample, words};
use beelet_units::bounds;

impl Node<'_> {
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
    pub(super) fn is_hopeless(&self, complaint: &Complaint<'_>, hand: &Hand<'_>) -> bool {
        let Some(held_by) = complaint.container.held_by.as_ref().filter(|_| self.law.helpless_steps > 0)
        else {
            return false;
        };
        let others = self.seen.pods.iter().filter(|pod| pod.cgroup != complaint.pod.cgroup);
        let within_reach = others
            .filter(|pod| pod.class == QosClass::BestEffort || self.is_greedier(pod, complaint.pod, hand))
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
    pub(super) fn is_greedier(&self, pod: &PodSample, than: &PodSample, hand: &Hand<'_>) -> bool {
        let (used, theirs) = (pod.cpu_used.unwrap_or(0), than.cpu_used.unwrap_or(0));
        // used / request > theirs / request, where a request of zero counts as a minimal one.
        let uses_more = used > pod.cpu_request.saturating_add(self.quiet())
            && u128::from(used) * u128::from(than.cpu_request.max(1))
                > u128::from(theirs) * u128::from(pod.cpu_request.max(1));
        pod.class == QosClass::Burstable
            // Otherwise nothing can be taken from the pod.
            && (self.seen.supports.weights || pod.can_cap)
            // A capped pod uses less because of its cap.
            && (uses_more || hand.held(&pod.cgroup, KnobKind::CpuCap).is_some())
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

    /// Returns the usage below which a step is not worthwhile, in millicores.
    pub(super) fn quiet(&self) -> u64 {
        self.seen.cpus * u64::from(self.law.quiet_percent) / 100
    }

    /// Returns true if a pod gets less than it requests and is kept from running: it waits for most of the
    /// time in which it does not run. A pod that waits for a disk or has nothing to do does not count.
    pub(super) fn falls_short(&self, pod: &PodSample) -> bool {
        let used = pod.cpu_used.unwrap_or(u64::MAX);
        let not_running = 1000_u64.saturating_sub(used);
        let waits = |container| {
            let wait = wait_for_others(container);
            wait.is_none_or(|wait| wait > self.law.cpu_wait_permille && u64::from(wait) * 2 >= not_running)
        };
        used < pod.cpu_request && pod.containers.iter().any(waits)
    }

    /// Returns the lowest CPU weight with which a Burstable pod still gets its request while all others use
    /// all that they can, if that is far below its own weight. While CPUs are free, the lower weight costs
    /// the pod nothing; otherwise the pod gets fewer turns, and a thread of another pod that wakes up still
    /// waits for the end of one.
    pub(super) fn least_weight(&self, pod: &PodSample) -> Option<u64> {
        let requested = |class: QosClass| -> u64 {
            let of_class = self.seen.pods.iter().filter(|other| other.class == class);
            let others = of_class.filter(|other| other.cgroup != pod.cgroup);
            bounds::total(others.map(|other| other.cpu_request))
        };
        // Guaranteed pods use no more than they request. A quarter is left to the machine's daemons.
        let all = (self.seen.cpus * 3 / 4).checked_sub(requested(QosClass::Guaranteed))?;
        let beyond = all.checked_sub(pod.cpu_request).filter(|beyond| *beyond > 0)?;
        // request = all * weight / (weight + the others' weights), where weights are proportional to
        // requests.
        let product = u128::from(pod.cpu_request) * u128::from(requested(QosClass::Burstable));
        let enough = u64::try_from(product.div_ceil(u128::from(beyond))).unwrap_or(u64::MAX);
        let worth_it = enough.saturating_mul(2) < pod.cpu_request;
        // Rounded up, as weights are coarse.
        worth_it
            .then(|| 1 + shares_to_weight_linear(millis_to_shares(i64::try_from(enough).unwrap_or(i64::MAX))))
    }
}
