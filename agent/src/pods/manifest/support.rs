//! What the agent can't do for a pod: one table, so that a field moves from refused to run by taking its row
//! out.
//!
//! A field that the agent would pass over in silence is worse than one it refuses: nobody must believe that a
//! pod is probed, confined or limited when it isn't. Fields that only a scheduler reads are passed over with a
//! warning.

use serde_json::Value;

use super::error::Problem;

/// What becomes of a manifest with such a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Refused: the agent can't do this yet.
    NotYet,
    /// Refused: it refers to an object of the API server's, which a static pod may not (and there is none).
    ApiObject,
    /// Accepted with a warning: it has no effect here.
    NoEffect,
}
use Verdict::{ApiObject, NoEffect, NotYet};

/// Which values of the field are meant.
#[derive(Clone, Copy)]
enum When {
    /// Any but nothing: null, false and empty ones say nothing.
    Set,
    /// This text.
    Is(&'static str),
    /// Any text but this and the empty one.
    IsNot(&'static str),
    /// `false`.
    False,
    /// What this says yes to.
    Like(fn(&Value) -> bool),
    /// A mapping's key: this one is asked about each.
    Key(fn(&str) -> bool),
}
use When::{False, Is, IsNot, Key, Like, Set};

/// One row: the field, when, the verdict, what it is in words.
type Row = (&'static str, When, Verdict, &'static str);

/// `{a,b}` is either of them, `[*]` any element of a list.
#[rustfmt::skip]
const TABLE: &[Row] = &[
    // The pod as a whole.
    ("spec.ephemeralContainers", Set, ApiObject, "ephemeral containers (they are added through the API server)"),
    ("spec.hostUsers", False, NotYet, "user namespaces"),
    ("spec.readinessGates", Set, NotYet, "readiness gates"),
    ("spec.resources", Set, NotYet, "resources of the pod as a whole"),
    ("spec.schedulingGates", Set, NotYet, "scheduling gates"),
    ("spec.schedulingGroup", Set, NotYet, "scheduling groups"),
    ("spec.{serviceAccount,serviceAccountName}", Set, ApiObject, "service accounts"),
    ("spec.resourceClaims", Set, ApiObject, "resource claims"),
    ("spec.{affinity,nodeSelector,topologySpreadConstraints}", Set, NoEffect, "there is no scheduler; the pod runs on this node"),
    // Security.
    ("spec.securityContext.{appArmorProfile,seLinuxOptions,seLinuxChangePolicy,windowsOptions}", Set, NotYet, "this kind of confinement"),
    ("spec.{containers,initContainers}[*].securityContext.{appArmorProfile,seLinuxOptions,windowsOptions}", Set, NotYet, "this kind of confinement"),
    // Containers.
    ("spec.{containers,initContainers}[*].lifecycle.stopSignal", Set, NotYet, "stop signals"),
    ("spec.{containers,initContainers}[*].lifecycle.{postStart,preStop}.httpGet.scheme", Is("HTTPS"), NotYet, "hooks by HTTPS"),
    ("spec.{containers,initContainers}[*].env[*].valueFrom.fileKeyRef", Set, NotYet, "this source of a variable"),
    ("spec.{containers,initContainers}[*].resources.claims", Set, ApiObject, "resource claims"),
    ("spec.{containers,initContainers}[*].resources.{limits,requests}", Key(is_huge_pages), NotYet, "huge pages"),
    ("spec.{containers,initContainers}[*].resources.limits.ephemeral-storage", Set, NoEffect, "local storage is not limited yet"),
    // Volumes.
    ("spec.{containers,initContainers}[*].volumeDevices", Set, NotYet, "block devices"),
    ("spec.volumes[*].{persistentVolumeClaim,ephemeral}", Set, ApiObject, "volume claims"),
    ("spec.volumes[*].projected.sources[*].{serviceAccountToken,clusterTrustBundle,podCertificate}", Set, ApiObject, "objects to project"),
    ("spec.volumes[*].{awsElasticBlockStore,azureDisk,azureFile,cephfs,cinder,csi,fc,flexVolume,flocker,gcePersistentDisk,gitRepo,glusterfs,iscsi,nfs,photonPersistentDisk,portworxVolume,quobyte,rbd,scaleIO,storageos,vsphereVolume}", Set, NotYet, "network and storage plugins' volumes"),
    ("spec.volumes[*].emptyDir", Like(limits_a_disk), NoEffect, "sizeLimit of a volume on disk is not enforced yet"),
    ("spec.volumes[*].emptyDir.medium", IsNot("Memory"), NotYet, "this medium of an emptyDir"),
];

fn is_huge_pages(name: &str) -> bool {
    name.starts_with("hugepages-")
}

/// Whether an emptyDir on disk has a size limit; one in memory is limited by its mount.
fn limits_a_disk(empty_dir: &Value) -> bool {
    let set = |field: &str| empty_dir.get(field).is_some_and(|value| !says_nothing(value));
    set("sizeLimit") && !set("medium")
}

/// What the table says of a manifest.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Why it can't be run.
    pub(super) refused: Vec<Problem>,
    /// What has no effect.
    pub(super) ignored: Vec<Problem>,
}

/// Looks every row of the table up in a manifest.
pub(super) fn check(manifest: &Value) -> Found {
    let mut found = Found::default();
    for (pattern, when, verdict, what) in TABLE {
        visit(manifest, pattern, &mut String::new(), &mut |path, node| {
            for path in matches(*when, path, node) {
                let problem = Problem::new(path, sentence(*verdict, what));
                match verdict {
                    NotYet | ApiObject => found.refused.push(problem),
                    NoEffect => found.ignored.push(problem),
                }
            }
        });
    }
    found
}

fn sentence(verdict: Verdict, what: &str) -> String {
    match verdict {
        NotYet => format!("beelet can't do this yet ({what}); take it out"),
        ApiObject => format!("a static pod may not refer to objects of the API server ({what}); take it out"),
        NoEffect => format!("has no effect: {what}"),
    }
}

/// The paths that are meant, of a field at `path`.
fn matches(when: When, path: &str, node: &Value) -> Vec<String> {
    let met = match when {
        Set => !says_nothing(node),
        Is(text) => node.as_str() == Some(text),
        IsNot(text) => node.as_str().is_some_and(|is| !is.is_empty() && is != text),
        False => node == &Value::Bool(false),
        Like(asked) => asked(node),
        Key(asked) => {
            let keys = node.as_object().into_iter().flat_map(serde_json::Map::keys);
            return keys.filter(|key| asked(key)).map(|key| super::names::field(path, key)).collect();
        }
    };
    if met { vec![path.to_owned()] } else { Vec::new() }
}

fn says_nothing(node: &Value) -> bool {
    match node {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        // `emptyDir: {}` says something, and so does any source of a volume or handler of a probe.
        Value::Object(_) | Value::Bool(true) | Value::Number(_) => false,
    }
}

/// Calls `f` with every node that `pattern` reaches, and its path.
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
        let container = json!({"lifecycle": {"stopSignal": "SIGINT"}});
        check_refused(
            &json!({"spec": {"containers": [{}, container], "initContainers": [{"volumeDevices": [{}]}]}}),
            &["spec.containers[1].lifecycle.stopSignal", "spec.initContainers[0].volumeDevices"],
        );
        check_refused(
            &json!({"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1", "hugepages-2Mi": "1"}}}]}}),
            &["spec.containers[0].resources.limits.hugepages-2Mi"],
        );
    }

    #[test]
    fn fields_that_say_nothing_are_passed_over() {
        check_refused(
            &json!({"spec": {"serviceAccountName": "", "resourceClaims": [], "resources": null}}),
            &[],
        );
        check_refused(&json!({"spec": {"hostUsers": true}}), &[]);
        check_refused(&json!({"spec": {"hostUsers": false}}), &["spec.hostUsers"]);
        check_refused(&json!({"spec": {"volumes": [{"name": "x", "emptyDir": {"medium": ""}}]}}), &[]);
        check_refused(&json!("text"), &[]);
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
