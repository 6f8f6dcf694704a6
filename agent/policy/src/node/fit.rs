//! Checks whether a pod belongs on this node: by selector, affinity, name, taints, and the operating system's
//! label.
//!
//! The checks are the kubelet's at admission (`pkg/kubelet/lifecycle/predicate.go`), their rules the
//! scheduler's (`nodeaffinity`, `nodename`, `tainttoleration`). Of taints only `NoExecute` counts here:
//! `NoSchedule` concerns pods not yet scheduled. Must never consider other pods.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec, Taint, Toleration,
};

use crate::resources::critical::{is_mirror, is_static};

const OS_LABEL: &str = "kubernetes.io/os";
/// The only operating system of this agent.
const OS: &str = "linux";
/// The effect that evicts pods already on the node.
const NO_EXECUTE: &str = "NoExecute";
/// The only node field that an affinity may name.
const NAME_FIELD: &str = "metadata.name";

/// The part of a node that pods may select by.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeView {
    /// The node's name.
    pub name: String,
    /// The node's labels on the API server.
    pub labels: BTreeMap<String, String>,
    /// The node's taints.
    pub taints: Vec<Taint>,
    /// True if the runtime can give processes exactly the requested groups.
    pub strict_groups: bool,
}

/// A reason why a pod does not belong on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// The pod's label selector names another operating system.
    OsLabel,
    /// The pod requires exactly its listed groups, which the runtime does not support.
    StrictGroups,
    /// The pod's nodeSelector or required affinity names other nodes.
    Affinity,
    /// The pod is bound to another node.
    Name,
    /// The pod does not tolerate a taint.
    Taint,
}

impl Misfit {
    /// Returns the pod's `status.reason`, the kubelet's own.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::OsLabel => "PodOSSelectorNodeLabelDoesNotMatch",
            Self::StrictGroups => "SupplementalGroupsPolicyNotSupported",
            Self::Affinity => "NodeAffinity",
            Self::Name => "NodeName",
            Self::Taint => "TaintToleration",
        }
    }

    /// Returns the kubelet's message.
    #[must_use]
    pub fn message(self) -> &'static str {
        match self {
            Self::OsLabel => "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
            Self::StrictGroups => "SupplementalGroupsPolicy=Strict is not supported in this node",
            Self::Affinity => {
                "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"
            }
            Self::Name => "Predicate NodeName failed: node(s) didn't match the requested node name",
            Self::Taint => {
                "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate"
            }
        }
    }
}

/// Returns the reason why `pod` does not belong on `node`: the first one in the kubelet's order.
#[must_use]
pub fn misfit(pod: &Pod, node: &NodeView) -> Option<Misfit> {
    let spec = pod.spec.as_ref()?;
    let selected_os = spec.node_selector.as_ref().and_then(|labels| labels.get(OS_LABEL));
    if selected_os.is_some_and(|os| os != OS) {
        return Some(Misfit::OsLabel);
    }
    let groups = spec.security_context.as_ref().and_then(|c| c.supplemental_groups_policy.as_deref());
    if groups == Some("Strict") && !node.strict_groups {
        return Some(Misfit::StrictGroups);
    }
    if !selected(spec, node) || !required_affinity(spec, node) {
        return Some(Misfit::Affinity);
    }
    if spec.node_name.as_ref().is_some_and(|name| !name.is_empty() && *name != node.name) {
        return Some(Misfit::Name);
    }
    let exempt = is_static(pod) || is_mirror(pod);
    (!exempt && untolerated(spec, node).is_some()).then_some(Misfit::Taint)
}

fn selected(spec: &PodSpec, node: &NodeView) -> bool {
    spec.node_selector.iter().flatten().all(|(key, value)| node.labels.get(key) == Some(value))
}

fn required_affinity(spec: &PodSpec, node: &NodeView) -> bool {
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    required.is_none_or(|required| selects(required, node))
}

/// Returns true if a selector matches this node: any of its terms does. A selector without terms matches no
/// node.
#[must_use]
pub fn selects(selector: &NodeSelector, node: &NodeView) -> bool {
    selector.node_selector_terms.iter().any(|term| matches(term, node))
}

/// Returns true if all of a term's requirements hold; a term without any matches nothing.
fn matches(term: &NodeSelectorTerm, node: &NodeView) -> bool {
    let labels = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    (!labels.is_empty() || !fields.is_empty())
        && labels.iter().all(|one| fulfilled(one, node.labels.get(&one.key).map(String::as_str)))
        && fields.iter().all(|one| one.key == NAME_FIELD && fulfilled(one, Some(&node.name)))
}

/// Returns true if a label's value meets the requirement. An unknown operator is never met.
fn fulfilled(required: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = required.values.as_deref().unwrap_or_default();
    let listed = || value.is_some_and(|value| values.iter().any(|one| one == value));
    let number = |text: &str| text.parse::<i64>().ok();
    let compared = || Some((number(value?)?, number(values.first()?)?));
    match required.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared().is_some_and(|(value, limit)| value > limit),
        "Lt" => compared().is_some_and(|(value, limit)| value < limit),
        _ => false,
    }
}

/// Returns the first evicting taint that the pod does not tolerate.
fn untolerated<'n>(spec: &PodSpec, node: &'n NodeView) -> Option<&'n Taint> {
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let mut ending = node.taints.iter().filter(|taint| taint.effect == NO_EXECUTE);
    ending.find(|taint| !tolerations.iter().any(|toleration| tolerates(toleration, taint)))
}

/// Returns true if a toleration covers a taint (`v1.Toleration.ToleratesTaint`).
pub(crate) fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |text: &'_ Option<String>| text.clone().unwrap_or_default();
    let (effect, key, value) = (text(&toleration.effect), text(&toleration.key), text(&toleration.value));
    if !effect.is_empty() && effect != taint.effect || !key.is_empty() && key != taint.key {
        return false;
    }
    let tainted = taint.value.as_deref().unwrap_or_default();
    let compared = || Some((tainted.parse::<i64>().ok()?, value.parse::<i64>().ok()?));
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => value == tainted,
        "Exists" => true,
        "Gt" => compared().is_some_and(|(tainted, limit)| tainted > limit),
        "Lt" => compared().is_some_and(|(tainted, limit)| tainted < limit),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node() -> NodeView {
        let taint = |key: &str, effect: &str| Taint {
            key: key.to_owned(),
            value: Some("v".to_owned()),
            effect: effect.to_owned(),
            time_added: None,
        };
        let labels = [("zone", "a"), ("cores", "8"), (OS_LABEL, OS)];
        NodeView {
            name: "n1".to_owned(),
            labels: labels.into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())).collect(),
            taints: vec![
                taint("soft", "PreferNoSchedule"),
                taint("closed", "NoSchedule"),
                taint("out", NO_EXECUTE),
            ],
            strict_groups: false,
        }
    }

    fn check(mut spec: Value, expected: Option<Misfit>) {
        if spec.get("tolerations").is_none() {
            spec["tolerations"] = json!([{"operator": "Exists"}]);
        }
        spec["containers"] = json!([]);
        let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
        assert_eq!(misfit(&pod, &node()), expected, "{spec}");
    }

    fn check_required(required: Value, expected: bool) {
        check(
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}),
            (!expected).then_some(Misfit::Affinity),
        );
    }

    #[test]
    fn a_selector_names_labels() {
        check(json!({}), None);
        check(json!({"nodeSelector": {"zone": "a"}}), None);
        check(json!({"nodeSelector": {"zone": "a", "disk": "ssd"}}), Some(Misfit::Affinity));
        check(json!({"nodeSelector": {"zone": "b"}}), Some(Misfit::Affinity));
        check(json!({"nodeSelector": {OS_LABEL: "linux"}}), None);
        check(json!({"nodeSelector": {OS_LABEL: "windows"}}), Some(Misfit::OsLabel));
    }

    #[test]
    fn exact_groups_need_a_node_that_has_them() {
        check(json!({"securityContext": {"supplementalGroupsPolicy": "Merge"}}), None);
        let strict = json!({"securityContext": {"supplementalGroupsPolicy": "Strict"}});
        check(strict.clone(), Some(Misfit::StrictGroups));
        let pod: Pod = serde_json::from_value(
            json!({"spec": {"containers": [], "tolerations": [{"operator": "Exists"}],
            "securityContext": strict["securityContext"]}}),
        )
        .unwrap();
        assert_eq!(misfit(&pod, &NodeView { strict_groups: true, ..node() }), None);
    }

    #[test]
    fn a_pod_bound_to_another_node_does_not_fit() {
        check(json!({"nodeName": "n1"}), None);
        check(json!({"nodeName": "n2"}), Some(Misfit::Name));
    }

    #[test]
    fn an_affinity_is_any_of_its_terms_and_all_of_their_requirements() {
        let expression = |key: &str, operator: &str, values: &[&str]| json!({"key": key, "operator": operator, "values": values});
        let one = |e: Value| json!({"nodeSelectorTerms": [{"matchExpressions": [e]}]});
        for (key, operator, values, expected) in [
            ("zone", "In", &["a", "b"][..], true),
            ("zone", "In", &["b"][..], false),
            ("disk", "In", &["ssd"][..], false),
            ("zone", "NotIn", &["a"][..], false),
            ("zone", "NotIn", &["b"][..], true),
            ("disk", "NotIn", &["ssd"][..], true),
            ("zone", "Exists", &[][..], true),
            ("disk", "Exists", &[][..], false),
            ("zone", "DoesNotExist", &[][..], false),
            ("disk", "DoesNotExist", &[][..], true),
            ("cores", "Gt", &["4"][..], true),
            ("cores", "Gt", &["8"][..], false),
            ("cores", "Lt", &["16"][..], true),
            ("zone", "Gt", &["4"][..], false),
            ("zone", "Likes", &["a"][..], false),
        ] {
            check_required(one(expression(key, operator, values)), expected);
        }
        let (yes, no) = (expression("zone", "Exists", &[]), expression("disk", "Exists", &[]));
        check_required(json!({"nodeSelectorTerms": [{"matchExpressions": [yes, no]}]}), false);
        check_required(
            json!({"nodeSelectorTerms": [{"matchExpressions": [no]}, {"matchExpressions": [yes]}]}),
            true,
        );
        check_required(json!({"nodeSelectorTerms": [{}]}), false);
        check_required(json!({"nodeSelectorTerms": []}), false);
        let field = |key: &str, name: &str| json!({"nodeSelectorTerms": [{"matchFields": [expression(key, "In", &[name])]}]});
        check_required(field("metadata.name", "n1"), true);
        check_required(field("metadata.name", "n2"), false);
        check_required(field("metadata.uid", "n1"), false);
    }

    #[test]
    fn a_taint_that_ends_pods_must_be_tolerated() {
        let with = |tolerations: Value, misfit| check(json!({"tolerations": tolerations}), misfit);
        with(json!([]), Some(Misfit::Taint));
        with(json!([{"key": "out", "operator": "Exists"}]), None);
        with(json!([{"key": "out", "operator": "Exists", "effect": "NoExecute"}]), None);
        with(json!([{"key": "out", "operator": "Exists", "effect": "NoSchedule"}]), Some(Misfit::Taint));
        with(json!([{"key": "out", "value": "v"}]), None);
        with(json!([{"key": "out", "operator": "Equal", "value": "w"}]), Some(Misfit::Taint));
        with(json!([{"key": "closed", "operator": "Exists"}]), Some(Misfit::Taint));
    }

    #[test]
    fn static_pods_and_their_mirrors_are_never_tainted_out() {
        for annotation in ["kubernetes.io/config.source", "kubernetes.io/config.mirror"] {
            let pod: Pod = serde_json::from_value(
                json!({"metadata": {"annotations": {annotation: "file"}}, "spec": {"containers": []}}),
            )
            .unwrap();
            assert_eq!(misfit(&pod, &node()), None, "{annotation}");
        }
    }
}
