//! Labels that a kubelet may set on its own Node (`ValidateKubeletFlags`, `kubeletapis.IsKubeletLabel`): only
//! a few of the project's own names, so that a node cannot attract pods meant for others. NodeRestriction
//! refuses the rest.

/// Domains whose names are all allowed.
pub const PREFIXES: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];
/// Further allowed names.
pub const ALLOWED: [&str; 13] = [
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "failure-domain.kubernetes.io/region",
    "failure-domain.kubernetes.io/zone",
];

/// Returns true if a kubelet may set the label of this name.
#[must_use]
pub fn may_be_set(name: &str) -> bool {
    let Some((domain, _)) = name.split_once('/') else { return true };
    let within =
        |parent: &str| domain == parent || domain.strip_suffix(parent).is_some_and(|d| d.ends_with('.'));
    if !within("kubernetes.io") && !within("k8s.io") {
        return true;
    }
    PREFIXES.iter().any(|prefix| within(prefix)) || ALLOWED.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_kubelets_labels_may_be_set_of_the_projects_names() {
        for (name, expected) in [
            ("pool", true),
            ("example.com/pool", true),
            ("notkubernetes.io/pool", true),
            ("node.kubernetes.io/pool", true),
            ("a.node.kubernetes.io/pool", true),
            ("topology.kubernetes.io/zone", true),
            ("node-role.kubernetes.io/control-plane", false),
            ("kubernetes.io/mine", false),
            ("k8s.io/mine", false),
        ] {
            assert_eq!(may_be_set(name), expected, "{name}");
        }
    }
}
