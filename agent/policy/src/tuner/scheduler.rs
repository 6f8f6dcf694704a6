//! A pod's share of the CPUs under the tuner's scheduler (`tuner.scheduler`).
//!
//! Must never consider anything but a pod's class, its priority and its request.

use crate::resources::{critical::SYSTEM_CRITICAL_PRIORITY, qos::QosClass};
use beelet_units::scheduling::{SchedulingClass, SchedulingShare};

/// The scheduler that decides which thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SchedulerKind {
    /// The kernel's own scheduler, by cgroups alone.
    #[default]
    Cgroups,
    /// The tuner's own scheduler, on kernels with sched_ext.
    SchedExt,
}

/// Returns a pod's share, by its class, its priority and the millicores that it requests. Guaranteed pods
/// come first, and Burstable ones of a system priority; a BestEffort pod of that priority, which has no CPU
/// request, counts as Burstable. Static pods have no special place: any pod may be static.
#[must_use]
pub fn share(class: QosClass, priority: i32, millicores: u64) -> SchedulingShare {
    let place = match (class, priority >= SYSTEM_CRITICAL_PRIORITY) {
        (QosClass::Guaranteed, _) | (QosClass::Burstable, true) => SchedulingClass::Latency,
        (QosClass::Burstable, false) | (QosClass::BestEffort, true) => SchedulingClass::Shared,
        (QosClass::BestEffort, false) => SchedulingClass::BestEffort,
    };
    let weight = u32::try_from(millicores / 10).unwrap_or(u32::MAX).clamp(1, 1_000_000);
    SchedulingShare { class: place, weight }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_place_comes_from_its_class_and_its_weight_from_its_request() {
        use SchedulingClass::{BestEffort, Latency, Shared};
        let (usual, critical) = (1_000_000_000, SYSTEM_CRITICAL_PRIORITY + 1000);
        let check = |class, priority, millicores, place, weight| {
            let expected = SchedulingShare { class: place, weight };
            assert_eq!(share(class, priority, millicores), expected, "{class} {priority} {millicores}");
        };
        check(QosClass::Guaranteed, usual, 2000, Latency, 200);
        check(QosClass::Burstable, usual, 250, Shared, 25);
        check(QosClass::Burstable, critical, 250, Latency, 25);
        check(QosClass::Burstable, usual, 0, Shared, 1);
        check(QosClass::BestEffort, usual, 0, BestEffort, 1);
        check(QosClass::BestEffort, critical, 0, Shared, 1);
        check(QosClass::Burstable, usual, u64::MAX, Shared, 1_000_000);
    }
}
