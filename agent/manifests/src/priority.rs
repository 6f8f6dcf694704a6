//! Priorities of standalone pods from the two system classes and the PriorityClass manifests of the folder,
//! as the API server's admission sets them for a cluster's pods (`plugin/pkg/admission/priority`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;
use serde_json::Value;

use super::{Manifest, Object, names};
use beelet_codec::ApiType as _;
use beelet_codec::error::Problem;

/// Predefined classes.
const SYSTEM: [(&str, i32); 2] =
    [("system-cluster-critical", 2_000_000_000), ("system-node-critical", 2_000_001_000)];

/// Maximum priority of a user's class.
const HIGHEST_OWN: i32 = 1_000_000_000;

/// Reads a PriorityClass.
pub(super) fn read(value: &Value) -> Result<Manifest, Vec<Problem>> {
    let (class, unknown) = PriorityClass::read(value)?;
    let name = class.metadata.name.as_deref().unwrap_or_default();
    let mut problems: Vec<Problem> = names::subdomain("metadata.name", name).into_iter().collect();
    let system = SYSTEM.iter().find(|(system, _)| *system == name);
    match (class.value, system) {
        (None, _) => problems.push(Problem::new("value", "must be set to a whole number")),
        (Some(value), Some((_, known))) if value != *known => {
            problems.push(Problem::new("value", format!("{name} always has the value {known}")));
        }
        (Some(_), None) if name.starts_with("system-") => {
            problems.push(Problem::new("metadata.name", "names that begin with system- are reserved"));
        }
        (Some(value), None) if value > HIGHEST_OWN => {
            problems.push(Problem::new(
                "value",
                format!("must not exceed {HIGHEST_OWN}; higher values are reserved for the system"),
            ));
        }
        _ => {}
    }
    problems.extend(preemption_policy("preemptionPolicy", class.preemption_policy.as_deref()));
    if !problems.is_empty() {
        return Err(problems);
    }
    let warnings = unknown.iter().map(Problem::to_string).collect();
    Ok(Manifest { object: Object::PriorityClass(Box::new(class)), content: [0; 32], warnings })
}

/// Checks that a preemption policy has one of the known names.
pub(super) fn preemption_policy(path: &str, policy: Option<&str>) -> Option<Problem> {
    let known = ["", "PreemptLowerPriority", "Never"];
    (!known.contains(&policy.unwrap_or_default()))
        .then(|| Problem::new(path, "must be PreemptLowerPriority or Never"))
}

/// Priority classes by name.
#[derive(Debug, Default)]
pub(super) struct Classes<'a> {
    by_name: BTreeMap<&'a str, &'a PriorityClass>,
}

/// A pod's priority and preemption policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Priority {
    class: Option<String>,
    value: i32,
    preemption_policy: Option<String>,
}

/// A manifest's values of the fields that a class may set, too.
#[derive(Clone, Debug, Default)]
pub(super) struct Written {
    priority: Option<i32>,
    class: Option<String>,
    preemption_policy: Option<String>,
    pub(super) overhead: Option<BTreeMap<String, Amount>>,
}

impl Written {
    /// Returns the values of a pod as read.
    pub(super) fn of(pod: &Pod) -> Self {
        let Some(spec) = &pod.spec else { return Self::default() };
        Self {
            priority: spec.priority,
            class: spec.priority_class_name.clone(),
            preemption_policy: spec.preemption_policy.clone(),
            overhead: spec.overhead.clone(),
        }
    }

    /// Restores the values in the pod.
    pub(super) fn apply_to(&self, pod: &mut Pod) {
        let spec = pod.spec.get_or_insert_default();
        spec.priority = self.priority;
        spec.priority_class_name.clone_from(&self.class);
        spec.preemption_policy.clone_from(&self.preemption_policy);
        spec.overhead.clone_from(&self.overhead);
    }
}

impl<'a> Classes<'a> {
    /// Adds a class.
    pub(super) fn add(&mut self, class: &'a PriorityClass) {
        self.by_name.insert(class.metadata.name.as_deref().unwrap_or_default(), class);
    }

    /// Returns the priority of a pod, or an error message if its class is missing.
    pub(super) fn resolve(&self, pod: &Written) -> Result<Priority, String> {
        let written = pod.priority;
        let class = pod.class.as_deref().filter(|name| !name.is_empty());
        let resolved = match class {
            Some(name) => self.named(name)?,
            // A priority without a class counts as written: no admission has set it.
            None if written.is_some() => Priority { class: None, value: 0, preemption_policy: None },
            None => self.default_priority(),
        };
        match written {
            Some(value) if class.is_some() && value != resolved.value => Err(format!(
                "spec.priority: is {value}, but the class {} has {}; remove it",
                resolved.class.unwrap_or_default(),
                resolved.value
            )),
            Some(value) => Ok(Priority { value, ..resolved }),
            None => Ok(resolved),
        }
    }

    fn named(&self, name: &str) -> Result<Priority, String> {
        let system = SYSTEM.iter().find(|(system, _)| *system == name).map(|(_, value)| *value);
        let class = self.by_name.get(name).copied();
        match (system, class) {
            (Some(value), _) => Ok(Priority { class: Some(name.to_owned()), value, preemption_policy: None }),
            (None, Some(class)) => Ok(of_class(class)),
            (None, None) => Err(format!(
                "spec.priorityClassName: PriorityClass {} not found; add its manifest to the folder, or use \
                 system-node-critical or system-cluster-critical",
                names::quoted(name)
            )),
        }
    }

    /// Returns the priority of pods without a class: of several default classes, the lowest value, as in the
    /// API server.
    fn default_priority(&self) -> Priority {
        let defaults = self.by_name.values().filter(|class| class.global_default == Some(true));
        match defaults.min_by_key(|class| class.value) {
            Some(class) => of_class(class),
            None => Priority { class: None, value: 0, preemption_policy: None },
        }
    }
}

fn of_class(class: &PriorityClass) -> Priority {
    Priority {
        class: class.metadata.name.clone(),
        value: class.value.unwrap_or_default(),
        preemption_policy: class.preemption_policy.clone().filter(|policy| !policy.is_empty()),
    }
}

impl Priority {
    /// Writes the priority into a pod.
    pub(super) fn apply_to(&self, pod: &mut Pod) {
        let spec = pod.spec.get_or_insert_default();
        spec.priority = Some(self.value);
        if self.class.is_some() {
            spec.priority_class_name.clone_from(&self.class);
        }
        if self.preemption_policy.is_some() {
            spec.preemption_policy.clone_from(&self.preemption_policy);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn class(name: &str, value: i32, global_default: bool) -> PriorityClass {
        let value = json!({"metadata": {"name": name}, "value": value, "globalDefault": global_default});
        serde_json::from_value(value).unwrap()
    }

    fn check(classes: &[PriorityClass], spec: &Value, expected: Result<i32, &str>) {
        let mut all = Classes::default();
        for class in classes {
            all.add(class);
        }
        let mut pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
        match (all.resolve(&Written::of(&pod)), expected) {
            (Ok(priority), Ok(expected)) => {
                priority.apply_to(&mut pod);
                assert_eq!(pod.spec.unwrap().priority, Some(expected), "{spec}");
            }
            (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
            (got, expected) => panic!("{spec}: {got:?}, not {expected:?}"),
        }
    }

    #[test]
    fn a_pods_priority_comes_from_its_class() {
        let classes = [class("high", 1000, false), class("std", 5, true), class("other", 7, true)];
        check(&[], &json!({}), Ok(0));
        check(&[], &json!({"priorityClassName": ""}), Ok(0));
        check(&[], &json!({"priorityClassName": "system-node-critical"}), Ok(2_000_001_000));
        check(&[], &json!({"priorityClassName": "system-cluster-critical"}), Ok(2_000_000_000));
        check(&[], &json!({"priorityClassName": "high"}), Err("PriorityClass \"high\" not found"));
        check(&classes, &json!({"priorityClassName": "high"}), Ok(1000));
        check(&classes, &json!({}), Ok(5));
        check(&classes, &json!({"priority": 9}), Ok(9));
        check(
            &classes,
            &json!({"priority": 9, "priorityClassName": "high"}),
            Err("is 9, but the class high has 1000"),
        );
        check(&classes, &json!({"priority": 1000, "priorityClassName": "high"}), Ok(1000));
    }

    fn check_read(class: &Value, expected: Option<&str>) {
        let problems = read(class).map_or_else(|p| p, |_| Vec::new());
        let text: Vec<_> = problems.iter().map(|p| format!("{}: {}", p.path, p.message)).collect();
        match expected {
            None => assert!(text.is_empty(), "{text:?}"),
            Some(part) => assert!(text.iter().any(|t| t.contains(part)), "{class}: {text:?}"),
        }
    }

    #[test]
    fn a_class_obeys_the_rules_of_the_api() {
        check_read(&json!({"metadata": {"name": "high"}, "value": 1000}), None);
        check_read(&json!({"metadata": {"name": "high"}, "value": 1_000_000_000}), None);
        check_read(&json!({"metadata": {"name": "low"}, "value": -5}), None);
        check_read(&json!({"metadata": {"name": "system-node-critical"}, "value": 2_000_001_000}), None);
        check_read(
            &json!({"metadata": {"name": "system-node-critical"}, "value": 1}),
            Some("always has the value 2000001000"),
        );
        check_read(&json!({"metadata": {"name": "system-mine"}, "value": 1}), Some("are reserved"));
        check_read(&json!({"metadata": {"name": "high"}, "value": 1_000_000_001}), Some("must not exceed"));
        check_read(&json!({"metadata": {"name": "high"}}), Some("value: must be set"));
        check_read(
            &json!({"metadata": {"name": "High"}, "value": 1}),
            Some("metadata.name: \"High\" is not a name"),
        );
        check_read(&json!({"metadata": {"name": "h"}, "value": "1"}), Some("value: must be a whole number"));
        check_read(
            &json!({"metadata": {"name": "h"}, "value": 1, "preemptionPolicy": "x"}),
            Some("PreemptLowerPriority or Never"),
        );
    }
}
