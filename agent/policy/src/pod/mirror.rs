//! Mirror pods: the API server's image of static pods, so that clients can see and count them and read their
//! logs.
//!
//! Every static pod gets a mirror that names the pod in annotations and belongs to the Node object. The agent
//! replaces a mirror that no longer shows its pod, and deletes it with its pod (kubelet:
//! `pkg/kubelet/pod/mirror_client.go`, `pkg/kubelet/kubelet.go`, `tryReconcileMirrorPods`). Deleting a mirror
//! does not end the pod.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::Pod,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};

use crate::probe::settings;

/// Annotation of a mirror: the hash of its pod.
pub const MIRROR: &str = "kubernetes.io/config.mirror";
/// Annotation of a static pod and its mirror: a hash of the manifest.
pub const HASH: &str = "kubernetes.io/config.hash";
/// Annotation with the time at which the manifest was first seen.
pub const SEEN: &str = "kubernetes.io/config.seen";
/// Annotation with the source of a pod.
pub const SOURCE: &str = "kubernetes.io/config.source";
/// The value of [`SOURCE`] for a static manifest.
pub const FILE: &str = "file";

/// Namespace and name.
pub type Name = (String, String);

/// The node that owns the mirrors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The Node's name.
    pub name: String,
    /// The UID of its Node object.
    pub uid: String,
}

/// The next step for a mirror.
#[derive(Clone, Debug, PartialEq)]
pub enum MirrorStep {
    /// Create a missing mirror.
    Create(Box<Pod>),
    /// Delete a mirror that shows an outdated or missing pod, at once and by its UID.
    Delete {
        /// The mirror's name.
        name: Name,
        /// The mirror's own UID, not the pod's.
        uid: String,
    },
}

/// Returns true if a pod of the API server is a mirror.
#[must_use]
pub fn is_mirror(pod: &Pod) -> bool {
    annotation(pod, MIRROR).is_some()
}

/// Returns true if `mirror` shows the current `pod`.
#[must_use]
pub fn shows(mirror: &Pod, pod: &Pod) -> bool {
    mirror.metadata.deletion_timestamp.is_none()
        && name_of(mirror) == name_of(pod)
        && annotation(mirror, MIRROR) == annotation(pod, HASH)
}

/// Returns the steps that make `mirrors` show `pods`, the node's static pods. An outdated mirror is deleted
/// first: its successor has the same name.
#[must_use]
pub fn steps(pods: &BTreeMap<Name, &Pod>, mirrors: &BTreeMap<Name, &Pod>, owner: &Owner) -> Vec<MirrorStep> {
    let mut steps = Vec::new();
    for (name, mirror) in mirrors {
        if !pods.get(name).is_some_and(|pod| shows(mirror, pod)) {
            let uid = mirror.metadata.uid.clone().unwrap_or_default();
            steps.push(MirrorStep::Delete { name: name.clone(), uid });
        }
    }
    let missing = pods.iter().filter(|(name, _)| !mirrors.contains_key(*name));
    steps.extend(missing.map(|(_, pod)| MirrorStep::Create(Box::new(mirror_of(pod, owner)))));
    steps
}

/// Returns the mirror of a static pod, without the annotations that only this node understands.
pub(crate) fn mirror_of(pod: &Pod, owner: &Owner) -> Pod {
    let hash = annotation(pod, HASH).unwrap_or_default().to_owned();
    let mut annotations = pod.metadata.annotations.clone().unwrap_or_default();
    annotations.retain(|key, _| !key.starts_with("beelet.dev/") || key == settings::POD_ANNOTATION);
    annotations.insert(SOURCE.to_owned(), FILE.to_owned());
    annotations.insert(MIRROR.to_owned(), hash);
    let node = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: owner.name.clone(),
        uid: owner.uid.clone(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    let mut spec = pod.spec.clone().unwrap_or_default();
    spec.node_name = Some(owner.name.clone());
    Pod {
        metadata: ObjectMeta {
            name: pod.metadata.name.clone(),
            namespace: pod.metadata.namespace.clone(),
            labels: pod.metadata.labels.clone(),
            annotations: Some(annotations),
            owner_references: Some(vec![node]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

/// Returns a pod's namespace and name.
#[must_use]
pub fn name_of(pod: &Pod) -> Name {
    let namespace = pod.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
    (namespace, pod.metadata.name.clone().unwrap_or_default())
}

fn annotation<'p>(pod: &'p Pod, name: &str) -> Option<&'p str> {
    pod.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn owner() -> Owner {
        Owner { name: "n1".to_owned(), uid: "node-uid".to_owned() }
    }

    /// Creates a static pod from `name hash`.
    fn pod(text: &str) -> Pod {
        let (name, hash) = text.split_once(' ').unwrap();
        of(json!({"name": name, "namespace": "kube-system", "uid": hash, "labels": {"tier": "x"},
            "annotations": {HASH: hash, SEEN: "2026-01-01T00:00:00Z", "beelet.dev/manifest": "/m/a.yaml"}}))
    }

    /// Creates a mirror from `name hash`, with `-` in front if it is being deleted.
    fn mirror(text: &str) -> Pod {
        let mut mirror = mirror_of(&pod(text.trim_start_matches('-')), &owner());
        mirror.metadata.uid = Some(format!("mirror-{}", text.trim_start_matches('-')));
        if text.starts_with('-') {
            mirror.metadata.deletion_timestamp =
                serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        }
        mirror
    }

    fn of(metadata: Value) -> Pod {
        serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": []}})).unwrap()
    }

    #[test]
    fn a_mirror_is_created_kept_replaced_and_deleted() {
        let check = |pods: &[&str], mirrors: &[&str], expected: &[&str]| {
            let pods: Vec<Pod> = pods.iter().map(|text| pod(text)).collect();
            let mirrors: Vec<Pod> = mirrors.iter().map(|text| mirror(text)).collect();
            let named =
                |pods: &'_ [Pod]| pods.iter().map(|pod| (name_of(pod), pod.clone())).collect::<Vec<_>>();
            let (pods, mirrors) = (named(&pods), named(&mirrors));
            let pods = pods.iter().map(|(name, pod)| (name.clone(), pod)).collect();
            let mirrors = mirrors.iter().map(|(name, pod)| (name.clone(), pod)).collect();
            let shown = |step: &MirrorStep| match step {
                MirrorStep::Create(pod) => {
                    format!("+{} {}", name_of(pod).1, annotation(pod, MIRROR).unwrap())
                }
                MirrorStep::Delete { uid, .. } => format!("-{uid}"),
            };
            let shown: Vec<String> = steps(&pods, &mirrors, &owner()).iter().map(shown).collect();
            assert_eq!(shown, expected);
        };
        check(&["a 1"], &[], &["+a 1"]);
        check(&["a 1"], &["a 1"], &[]);
        check(&["a 2"], &["a 1"], &["-mirror-a 1"]);
        check(&["a 1"], &["-a 1"], &["-mirror-a 1"]);
        check(&[], &["a 1"], &["-mirror-a 1"]);
        check(&["a 1", "b 1"], &["c 1"], &["-mirror-c 1", "+a 1", "+b 1"]);
    }

    #[test]
    fn a_mirror_names_its_pod() {
        let mirror = mirror("a 7");
        let annotations = mirror.metadata.annotations.as_ref().unwrap();
        let keys: Vec<&str> = annotations.keys().map(String::as_str).collect();
        assert_eq!(keys, [HASH, MIRROR, SEEN, SOURCE]);
        assert_eq!((annotations[MIRROR].as_str(), annotations[SOURCE].as_str()), ("7", "file"));
        let owner = &mirror.metadata.owner_references.as_ref().unwrap()[0];
        assert_eq!(
            (owner.kind.as_str(), owner.uid.as_str(), owner.controller),
            ("Node", "node-uid", Some(true))
        );
        assert_eq!(mirror.spec.unwrap().node_name.as_deref(), Some("n1"));
        assert_eq!(mirror.metadata.labels.unwrap()["tier"], "x");
        assert!(is_mirror(&self::mirror("a 7")) && !is_mirror(&pod("a 7")));
    }
}
