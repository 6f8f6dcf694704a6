//! Static pods that a kubelet started. A kubelet derives their UIDs from its in-memory form of the manifest,
//! which the agent cannot compute: the agent recognizes the pod by its name and by the age of the manifest,
//! and from then on by the hash that the agent itself derives.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use beelet_model::{
    labels::{ANNOTATION_HASH, MANIFEST_HASH},
    origin::Origin,
    request::RuntimePod,
    table::PodName,
};
use beelet_policy::handover::is_same_manifest;
use k8s_openapi::api::core::v1 as core;
use tracing::warn;

use super::{
    managed::{hash_of, manifest_hash_of, manifest_of},
    pods::Pods,
};

/// Running pods of a kubelet that the agent leaves alone. A second instance would write to the same volumes.
#[derive(Debug, Default)]
pub(super) struct LeftAlone {
    /// Name and source by UID.
    pods: BTreeMap<String, (PodName, Origin)>,
    /// UIDs of desired pods with a logged warning.
    logged: BTreeSet<String>,
}

impl LeftAlone {
    pub(super) fn new(pods: BTreeMap<String, (PodName, Origin)>) -> Self {
        Self { pods, logged: BTreeSet::new() }
    }

    /// Returns true if the pod with this UID is left alone.
    pub(super) fn has(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    /// Returns true if the desired `pod` runs in containers of a kubelet, and logs a warning once. A kubelet
    /// derives another UID for a static pod, which the name identifies.
    pub(super) fn blocks(&mut self, uid: &str, pod: &core::Pod) -> bool {
        let name = PodName::of(pod);
        let is_same = |(other, origin): &(PodName, Origin)| !origin.is_api() && *other == name;
        let is_static = !Origin::of(pod).is_api();
        let blocks = self.has(uid) || is_static && self.pods.values().any(is_same);
        if blocks && self.logged.insert(uid.to_owned()) {
            warn!(
                pod = %name,
                uid,
                "the pod runs in containers of a kubelet, so the agent does not start it; start beelet with --adopt \
                 to take it over"
            );
        }
        blocks
    }
}

/// Returns true if a kubelet may have started the pod with this UID.
pub(super) fn is_adopted(pods: &Pods, in_runtime: &BTreeMap<String, RuntimePod>, uid: &str) -> bool {
    in_runtime.get(uid).is_some_and(|seen| seen.adopted.is_some())
        || pods.by_uid.get(uid).is_some_and(|managed| manifest_hash_of(&managed.pod).is_some())
}

/// Returns the adopted pod that runs the manifest of the desired `pod`: with the UID and the hash of the
/// adopted pod, so that its mirror stays valid too.
pub(super) fn of_manifest(
    pods: &Pods,
    in_runtime: &BTreeMap<String, RuntimePod>,
    changes: &BTreeMap<PathBuf, i64>,
    pod: &core::Pod,
) -> Option<(String, core::Pod)> {
    let (name, hash) = (PodName::of(pod), hash_of(pod)?);
    let mut managed = pods.by_uid.iter().filter(|(_, managed)| managed.name == name);
    let known = managed.find(|(_, managed)| manifest_hash_of(&managed.pod).as_ref() == Some(&hash));
    if let Some((known, managed)) = known {
        return Some((known.clone(), identified_as(pod, hash, known, hash_of(&managed.pod))));
    }
    let mut seen = in_runtime.iter().filter(|(other, seen)| {
        seen.name == name && !seen.origin.is_api() && !pods.by_uid.contains_key(*other)
    });
    let (known, seen) = seen.find(|(known, seen)| {
        let recorded = pods.records.get(known).and_then(|record| record.origin.manifest_hash);
        match recorded.as_ref().or(seen.manifest_hash.as_ref()) {
            Some(recorded) => *recorded == hash,
            None => seen
                .adopted
                .is_some_and(|created| is_unchanged(changes, manifest_of(pod).as_deref(), created)),
        }
    })?;
    Some((known.clone(), identified_as(pod, hash, known, seen.hash.clone())))
}

fn is_unchanged(changes: &BTreeMap<PathBuf, i64>, manifest: Option<&Path>, created: i64) -> bool {
    is_same_manifest(manifest.and_then(|manifest| changes.get(manifest).copied()), created)
}

fn identified_as(pod: &core::Pod, hash: String, known: &str, of_kubelet: Option<String>) -> core::Pod {
    let mut adopted = pod.clone();
    adopted.metadata.uid = Some(known.to_owned());
    let annotations = adopted.metadata.annotations.get_or_insert_default();
    annotations.insert(MANIFEST_HASH.to_owned(), hash);
    annotations.extend(of_kubelet.map(|hash| (ANNOTATION_HASH.to_owned(), hash)));
    adopted
}

/// Returns the digest of the pod without the parts that may change while it runs: the sandbox has the digest,
/// or, if a kubelet created the sandbox, the record of the pod.
pub(super) fn shape_of(pods: &Pods, uid: &str, seen: &RuntimePod) -> Option<String> {
    let recorded = || pods.records.get(uid)?.origin.shape;
    seen.shape.clone().or_else(|| seen.adopted.and_then(|_| recorded()))
}
