//! The order of pods that wait for an in-place resize of cpu and memory.
//!
//! The order is that of the kubelet's allocation manager (`pkg/kubelet/allocation`, `sortPendingResizes`,
//! since 1.34; KEP-1287): pods that request no more than they have, then by priority, by QoS class, and by
//! waiting time.

use std::cmp::Reverse;

use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1::{Container, Pod};

use crate::resources::{
    CPU, MEMORY, PodDemand, ResourceList,
    critical::priority,
    qos::{QosClass, qos_class},
};

/// A pod's place among the waiting ones, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn<T> {
    grows: bool,
    priority: Reverse<i32>,
    class: Reverse<Option<QosClass>>,
    since: T,
}

impl<T: Ord> Turn<T> {
    /// Returns the place of a pod that has `before`, and has wanted `wanted` since this time.
    #[must_use]
    pub fn of(before: &Pod, wanted: &Pod, since: T) -> Self {
        Self {
            grows: grows(before, wanted),
            priority: Reverse(priority(wanted)),
            class: Reverse(qos_class(wanted).ok()),
            since,
        }
    }
}

/// Returns true if a pod would request more of any resource than it does. Invalid amounts count as more.
#[must_use]
pub fn grows(before: &Pod, wanted: &Pod) -> bool {
    let (Ok(before), Ok(wanted)) = (PodDemand::read(before), PodDemand::read(wanted)) else { return true };
    let had: ResourceList<'_> = before.requests();
    wanted.requests().iter().any(|(name, amount)| amount > had.amount(name))
}

/// A change of one amount of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// `cpu` or `memory`.
    pub resource: &'static str,
    /// `requests` or `limits`.
    pub requirement: &'static str,
    /// `add`, `remove`, `increase` or `decrease`.
    pub operation: &'static str,
}

/// Returns the changes of the containers' amounts from `before` to `wanted`, as the kubelet counts them
/// (`recordContainerResizeOperations`). Invalid amounts count as absent.
#[must_use]
pub fn changes(before: &Pod, wanted: &Pod) -> Vec<Change> {
    let mut changes = Vec::new();
    for old in containers(before) {
        let Some(new) = containers(wanted).find(|new| new.name == old.name) else { continue };
        for resource in [MEMORY, CPU] {
            for requirement in ["requests", "limits"] {
                let amount = |container: &Container| amount(container, resource, requirement);
                if let Some(operation) = operation(amount(old), amount(new)) {
                    changes.push(Change { resource, requirement, operation });
                }
            }
        }
    }
    changes
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

fn amount(container: &Container, resource: &str, requirement: &str) -> Quantity {
    let list = container.resources.as_ref().and_then(|resources| match requirement {
        "requests" => resources.requests.as_ref(),
        _ => resources.limits.as_ref(),
    });
    let amount = list.and_then(|list| Quantity::parse(&list.get(resource)?.0).ok());
    amount.unwrap_or(Quantity::ZERO)
}

fn operation(old: Quantity, new: Quantity) -> Option<&'static str> {
    match (old.is_zero(), new.is_zero()) {
        (true, false) => Some("add"),
        (false, true) => Some("remove"),
        _ if new > old => Some("increase"),
        _ if new < old => Some("decrease"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(cpu: &str, memory: &str, more: &Value) -> Pod {
        let requests = json!({"cpu": cpu, "memory": memory});
        let mut resources = json!({"requests": requests});
        if more["guaranteed"] == true {
            resources["limits"] = requests;
        }
        let spec =
            json!({"priority": more["priority"], "containers": [{"name": "c", "resources": resources}]});
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
    }

    #[test]
    fn a_pod_grows_if_it_requests_more_of_any_resource() {
        let check = |before: (&str, &str), wanted: (&str, &str), expected: bool| {
            let pod = |(cpu, memory): (&str, &str)| pod(cpu, memory, &json!({}));
            assert_eq!(grows(&pod(before), &pod(wanted)), expected, "{before:?} to {wanted:?}");
        };
        check(("1", "1Gi"), ("1", "1Gi"), false);
        check(("1", "1Gi"), ("500m", "1Gi"), false);
        check(("1", "1Gi"), ("500m", "1025Mi"), true);
        check(("1", "1Gi"), ("1001m", "1Mi"), true);
    }

    #[test]
    fn each_changed_amount_is_one_change() {
        let of = |resources: Value| -> Pod {
            let containers = json!([{"name": "a", "resources": resources}, {"name": "b"}]);
            serde_json::from_value(json!({"metadata": {}, "spec": {"containers": containers}})).unwrap()
        };
        let old = of(json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}));
        let new = of(
            json!({"requests": {"cpu": "500m", "memory": "1024Mi"}, "limits": {"cpu": "2", "memory": "2Gi"}}),
        );
        let named = |before: &Pod, wanted: &Pod| -> Vec<String> {
            let changes = changes(before, wanted).into_iter();
            changes.map(|c| format!("{} {} {}", c.operation, c.resource, c.requirement)).collect()
        };
        assert_eq!(named(&old, &new), ["increase memory limits", "decrease cpu requests", "add cpu limits"]);
        assert_eq!(
            named(&new, &old),
            ["decrease memory limits", "increase cpu requests", "remove cpu limits"]
        );
        assert_eq!(named(&new, &new), <[String; 0]>::default());
    }

    #[test]
    fn shrinking_pods_come_first_then_important_ones_then_the_longest_waiting() {
        let turn = |cpu: &str, more: Value, since: u32| {
            Turn::of(&pod("2", "1Gi", &more), &pod(cpu, "1Gi", &more), since)
        };
        let in_order = [
            turn("1", json!({"priority": -5}), 9),
            turn("3", json!({"priority": 7}), 8),
            turn("3", json!({"guaranteed": true}), 7),
            turn("3", json!({}), 1),
            turn("3", json!({}), 2),
            turn("3", json!({"priority": -5, "guaranteed": true}), 0),
        ];
        assert!(in_order.is_sorted(), "{in_order:#?}");
    }
}
