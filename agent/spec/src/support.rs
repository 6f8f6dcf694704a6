//! Table of the pod fields that the agent does not support. Removing a row makes a field supported.
//!
//! The agent must never ignore a field silently: a user would believe that a pod is probed, confined or
//! limited when it is not. Fields that only a scheduler reads cause a warning.

use beelet_codec::error::Problem;
use serde_json::Value;

/// Handling of a pod with an unsupported field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Refused in a manifest: static pods may not refer to the API server or its objects.
    ApiObject,
    /// Refused in a manifest: the field is for another operating system. In a pod of the API server it has
    /// no effect, as under the kubelet.
    OtherSystem,
    /// Refused in a manifest: Kubernetes has removed it. A pod of the API server waits for such a volume, as
    /// under the kubelet.
    Removed,
    /// Accepted with a warning: the field has no effect here.
    NoEffect,
}
use Verdict::{ApiObject, NoEffect, OtherSystem, Removed};

/// A row: the field, the verdict, its description. The row applies to any value except null, false and empty
/// ones.
type Row = (&'static str, Verdict, &'static str);

/// `{a,b}` is either of them, `[*]` any element of a list.
#[rustfmt::skip]
const TABLE: &[Row] = &[
    // The pod as a whole.
    ("spec.ephemeralContainers", ApiObject, "ephemeral containers (they are added through the API server)"),
    ("spec.readinessGates", ApiObject, "readiness gates (others set their conditions through the API server)"),
    ("spec.resources.claims", ApiObject, "resource claims"),
    ("spec.schedulingGates", ApiObject, "scheduling gates (others open them through the API server before a pod gets a node; this one has its node)"),
    ("spec.schedulingGroup", ApiObject, "scheduling groups"),
    ("spec.{serviceAccount,serviceAccountName}", ApiObject, "service accounts"),
    ("spec.resourceClaims", ApiObject, "resource claims"),
    ("spec.{affinity,nodeSelector,topologySpreadConstraints}", NoEffect, "a standalone node has no scheduler; the pod runs on this node"),
    // Security.
    ("spec.securityContext.windowsOptions", OtherSystem, "windowsOptions"),
    ("spec.{containers,initContainers}[*].securityContext.windowsOptions", OtherSystem, "windowsOptions"),
    // Containers.
    ("spec.{containers,initContainers}[*].resources.claims", ApiObject, "resource claims"),
    // Volumes.
    ("spec.{containers,initContainers}[*].volumeDevices", ApiObject, "block devices of volume claims"),
    ("spec.volumes[*].{persistentVolumeClaim,ephemeral}", ApiObject, "volume claims"),
    ("spec.volumes[*].csi", ApiObject, "storage plugins, of which the API server says how they are used"),
    ("spec.volumes[*].projected.sources[*].{serviceAccountToken,clusterTrustBundle,podCertificate}", ApiObject, "objects to project"),
    ("spec.volumes[*].{awsElasticBlockStore,azureDisk,azureFile,cinder,gcePersistentDisk,portworxVolume,vsphereVolume}", ApiObject, "storage plugins, of which the API server says how they are used"),
    ("spec.volumes[*].{cephfs,flocker,gitRepo,glusterfs,photonPersistentDisk,quobyte,rbd,scaleIO,storageos}", Removed, "volumes of this kind"),
];

/// Unsupported fields of a manifest.
#[derive(Debug, Default)]
pub struct Found {
    /// Fields that prevent the pod from running.
    pub refused: Vec<Problem>,
    /// Fields without an effect.
    pub ignored: Vec<Problem>,
}

/// Checks a manifest against every row of the table.
#[must_use]
pub fn check(manifest: &Value) -> Found {
    let mut found = Found::default();
    for (pattern, verdict, what) in TABLE {
        visit(manifest, pattern, &mut String::new(), &mut |path, node| {
            if says_nothing(node) {
                return;
            }
            let problem = Problem::new(path, sentence(*verdict, what));
            match verdict {
                ApiObject | OtherSystem | Removed => {
                    found.refused.push(problem);
                }
                NoEffect => found.ignored.push(problem),
            }
        });
    }
    found
}

fn sentence(verdict: Verdict, what: &str) -> String {
    match verdict {
        ApiObject => {
            format!("a static pod may not refer to objects of the API server ({what}); take it out")
        }
        Removed => format!("Kubernetes has removed {what}: nothing makes them any more; take it out"),
        OtherSystem => format!("{what} are for nodes of Windows, and this one runs Linux; take it out"),
        NoEffect => format!("has no effect: {what}"),
    }
}

fn says_nothing(node: &Value) -> bool {
    match node {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        // `emptyDir: {}` has a meaning, and so has any source of a volume or handler of a probe.
        Value::Object(_) | Value::Bool(true) | Value::Number(_) => false,
    }
}

/// Calls `f` with every node that matches `pattern`, and its path.
fn visit(node: &Value, pattern: &str, path: &mut String, f: &mut impl FnMut(&str, &Value)) {
    let length = path.len();
    let pattern = pattern.strip_prefix('.').unwrap_or(pattern);
    if pattern.is_empty() {
        f(path, node);
    } else if let Some(rest) = pattern.strip_prefix("[*]") {
        for (i, item) in node.as_array().into_iter().flatten().enumerate() {
            path.push_str(&format!("[{i}]"));
            visit(item, rest, path, f);
            path.truncate(length);
        }
    } else if let Some((keys, rest)) = pattern.strip_prefix('{').and_then(|p| p.split_once('}')) {
        keys.split(',').for_each(|key| visit_key(node, key, rest, path, f));
    } else {
        let end = pattern.find(['.', '[']).unwrap_or(pattern.len());
        visit_key(node, &pattern[..end], &pattern[end..], path, f);
    }
}

fn visit_key(node: &Value, key: &str, rest: &str, path: &mut String, f: &mut impl FnMut(&str, &Value)) {
    let length = path.len();
    if let Some(child) = node.get(key) {
        path.push_str(if length > 0 { "." } else { "" });
        path.push_str(key);
        visit(child, rest, path, f);
        path.truncate(length);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check_refused(manifest: &Value, expected: &[&str]) {
        let found = check(manifest);
        let paths: Vec<_> = found.refused.iter().map(|p| p.path.as_str()).collect();
        assert_eq!(paths, expected, "{manifest}");
    }

    #[test]
    fn the_table_finds_its_fields_wherever_they_are() {
        let container = json!({"volumeDevices": [{}]});
        check_refused(
            &json!({"spec": {"containers": [{}, container], "initContainers": [{"volumeDevices": [{}]}]}}),
            &["spec.containers[1].volumeDevices", "spec.initContainers[0].volumeDevices"],
        );
    }

    #[test]
    fn fields_that_say_nothing_are_passed_over() {
        check_refused(
            &json!({"spec": {"serviceAccountName": "", "resourceClaims": [], "resources": null}}),
            &[],
        );
        check_refused(
            &json!({"spec": {"schedulingGates": [], "securityContext": {"windowsOptions": null}}}),
            &[],
        );
        check_refused(&json!("text"), &[]);
    }

    /// Returns the last names of a pattern: of `a.{b,c}[*].{d,e}` these are d and e.
    fn names_of(pattern: &str) -> Vec<&str> {
        let last = pattern.rsplit_once('.').map_or(pattern, |(_, last)| last);
        last.trim_start_matches('{').trim_end_matches('}').split(',').collect()
    }

    #[test]
    fn the_users_page_lists_every_row() {
        let page = include_str!("../../../docs/pods.md");
        let (_, list) = page.split_once("## Not in this version").unwrap();
        let list = list.split("\n## ").next().unwrap();
        for name in TABLE.iter().map(|row| row.0).flat_map(names_of) {
            assert!(
                list.contains(&format!("`{name}")),
                "docs/pods.md does not say that `{name}` is not there"
            );
        }
    }

    #[test]
    fn what_kubernetes_has_removed_is_what_the_node_knows_of() {
        let rows = TABLE.iter().filter(|row| row.1 == Removed);
        let names: Vec<&str> = rows.flat_map(|row| names_of(row.0)).collect();
        let known: Vec<&str> =
            beelet_policy::volumes::removed_kinds::REMOVED.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, known);
        let page = include_str!("../../../docs/pods.md");
        for (name, version) in beelet_policy::volumes::removed_kinds::REMOVED {
            assert!(page.contains(&format!("`{name}` ({version})")), "docs/pods.md: {name}");
        }
    }

    #[test]
    fn every_row_is_a_pattern_of_known_fields() {
        for (pattern, ..) in TABLE {
            assert!(pattern.starts_with("spec."), "{pattern}");
            assert_eq!(pattern.matches('{').count(), pattern.matches('}').count(), "{pattern}");
            assert!(!pattern.contains("[0"), "{pattern}");
        }
    }
}
