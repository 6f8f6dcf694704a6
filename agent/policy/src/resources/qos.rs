//! The QoS class of a pod: Guaranteed, Burstable or BestEffort.
//!
//! Follows `k8s.io/kubernetes/pkg/apis/core/v1/helper/qos`: a class in the status stands; pod-level
//! resources, if the field is present, decide alone; else every container and init container counts, cpu and
//! memory only, amounts above zero only. Must never consider anything but the pod.

use std::fmt;

use k8s_openapi::api::core::v1::Pod;
use serde::Serialize;

use crate::resources::{CPU, Demand, MEMORY, PodDemand, ResourceList};
use beelet_units::{field::FieldError, quantity::Quantity};

/// A node's commitment to a pod. Ordered by eviction: BestEffort < Burstable < Guaranteed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum QosClass {
    /// No container names any cpu or memory.
    BestEffort,
    /// Any other pod.
    Burstable,
    /// Every container has equal requests and limits for cpu and memory.
    Guaranteed,
}

impl QosClass {
    /// Returns the API's name of the class.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BestEffort => "BestEffort",
            Self::Burstable => "Burstable",
            Self::Guaranteed => "Guaranteed",
        }
    }
}

impl fmt::Display for QosClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Returns the QoS class of a pod: from its status, else from its resources.
///
/// # Errors
/// The path of the first amount in the pod that is not a quantity.
pub fn qos_class(pod: &Pod) -> Result<QosClass, FieldError> {
    Ok(qos_class_of(pod, &PodDemand::read(pod)?))
}

/// Works like [`qos_class`] for a pod whose amounts have been read already.
pub fn qos_class_of(pod: &Pod, demand: &PodDemand<'_>) -> QosClass {
    match pod.status.as_ref().and_then(|status| status.qos_class.as_deref()) {
        Some("Guaranteed") => QosClass::Guaranteed,
        Some("Burstable") => QosClass::Burstable,
        Some("BestEffort") => QosClass::BestEffort,
        _ => computed(demand),
    }
}

/// Returns the class from the amounts alone.
fn computed(demand: &PodDemand<'_>) -> QosClass {
    let mut tally = Tally::default();
    match &demand.pod_level {
        // A pod-level request without any pod-level limit falls through to Burstable: its limits don't match.
        Some(pod_level) => tally.count(pod_level, !pod_level.limits.is_empty()),
        None => {
            let init = demand.init_containers.iter().map(|init| &init.demand);
            demand.containers.iter().chain(init).for_each(|container| tally.count(container, true));
        }
    }
    tally.class()
}

/// Sums of the two resources that count; `None` if all amounts are zero or missing.
#[derive(Default)]
struct Tally {
    requests: [Option<Quantity>; 2],
    limits: [Option<Quantity>; 2],
    unlimited: bool,
}

impl Tally {
    fn count(&mut self, demand: &Demand<'_>, must_be_limited: bool) {
        add(&mut self.requests, &demand.requests);
        let limited = add(&mut self.limits, &demand.limits);
        self.unlimited |= must_be_limited && !limited;
    }

    fn class(&self) -> QosClass {
        if self.requests == [None; 2] && self.limits == [None; 2] {
            QosClass::BestEffort
        } else if !self.unlimited && self.requests == self.limits {
            QosClass::Guaranteed
        } else {
            QosClass::Burstable
        }
    }
}

/// Adds cpu and memory to the sums; returns true if the list has both, above zero.
fn add(sums: &mut [Option<Quantity>; 2], list: &ResourceList<'_>) -> bool {
    let mut both = true;
    for (sum, name) in sums.iter_mut().zip([CPU, MEMORY]) {
        match list.get(name).filter(|quantity| *quantity > Quantity::ZERO) {
            Some(quantity) => *sum = Some(sum.unwrap_or_default() + quantity),
            None => both = false,
        }
    }
    both
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(spec: &Value, class: QosClass) {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap();
        assert_eq!(qos_class(&pod).unwrap(), class, "{spec}");
    }

    fn both(cpu: &str, memory: &str) -> Value {
        json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
    }

    #[test]
    fn nothing_above_zero_is_besteffort() {
        check(&json!({"containers": [{"name": "a"}]}), QosClass::BestEffort);
        check(&json!({"containers": [{"name": "a", "resources": both("0", "0")}]}), QosClass::BestEffort);
        check(
            &json!({"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}),
            QosClass::BestEffort,
        );
    }

    #[test]
    fn equal_requests_and_limits_everywhere_are_guaranteed() {
        check(&json!({"containers": [{"name": "a", "resources": both("1", "1Gi")}]}), QosClass::Guaranteed);
        check(
            &json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1000m", "memory": "1024Mi"}}}]}),
            QosClass::Guaranteed,
        );
        check(
            &json!({"containers": [{"name": "a", "resources": both("1", "1Gi")}], "initContainers": [{"name": "i"}]}),
            QosClass::Burstable,
        );
    }

    #[test]
    fn a_limit_without_a_request_is_burstable_before_defaulting() {
        check(
            &json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}]}),
            QosClass::Burstable,
        );
    }

    #[test]
    fn pod_level_resources_decide_alone() {
        let busy = json!([{"name": "a", "resources": both("1", "1Gi")}]);
        check(&json!({"containers": [{"name": "a"}], "resources": both("1", "1Gi")}), QosClass::Guaranteed);
        check(&json!({"containers": busy, "resources": {"requests": {"cpu": "1"}}}), QosClass::Burstable);
        check(&json!({"containers": busy, "resources": {}}), QosClass::BestEffort);
    }

    #[test]
    fn the_class_in_the_status_stands() {
        let pod: Pod =
            serde_json::from_value(json!({"spec": {"containers": []}, "status": {"qosClass": "Guaranteed"}}))
                .unwrap();
        assert_eq!(qos_class(&pod).unwrap(), QosClass::Guaranteed);
    }
}
