//! Detection of pods above their limits on the node's disk: the kubelet's local storage eviction
//! (`pkg/kubelet/eviction/eviction_manager.go`, `localStorageEviction`).
//!
//! Takes numbers and returns a message. Must never consider the node's free space: these evictions enforce
//! the pod's own limits.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;

use crate::resources::{EPHEMERAL_STORAGE, PodDemand, ResourceList};
use beelet_units::{field::FieldError, quantity::Quantity};

/// A pod's disk usage, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodStorage {
    /// Usage of each emptyDir volume.
    pub volumes: BTreeMap<String, u64>,
    /// Usage of each container's writable layer and logs together.
    pub containers: BTreeMap<String, u64>,
    /// Total size of the node's files that the pod's containers may write: those in `/etc`, termination
    /// messages.
    pub files: u64,
    /// Volumes with folders deeper than a measurement goes. A container can hide any amount in there, and can
    /// make files elsewhere count for next to nothing through hard links in there: such a volume therefore
    /// counts as above every limit.
    pub too_deep: BTreeSet<String>,
}

/// A limit that a pod exceeds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The kubelet's metric label for the limit: `emptydirfs.limit`, `ephemeralpodfs.limit` or
    /// `ephemeralcontainerfs.limit`.
    pub signal: &'static str,
    /// The eviction message, in the kubelet's words.
    pub message: String,
}

/// Returns the first limit that the pod exceeds: of an emptyDir volume, of the pod as a whole, of a
/// container. The pod's limit is the sum of the containers' limits that exist; it covers the pod's volumes,
/// its containers' writable layers and logs, and the node's files that they may write.
///
/// # Errors
/// The path of the first amount in the pod that is not a quantity.
pub fn violation(pod: &Pod, storage: &PodStorage) -> Result<Option<Violation>, FieldError> {
    if let Some(found) = volume(pod, storage)? {
        return Ok(Some(found));
    }
    let limit = PodDemand::read(pod)?.limits().get(EPHEMERAL_STORAGE);
    let named = storage.volumes.values().chain(storage.containers.values()).copied();
    let used: Quantity = named.chain([storage.files]).map(bytes).sum();
    let deep = storage.too_deep.first();
    if let Some(limit) = limit.filter(|limit| used > *limit || deep.is_some()) {
        let why = deep.filter(|_| used <= limit).map(|volume| too_deep(volume)).unwrap_or_default();
        let message = format!(
            "Pod ephemeral local storage usage exceeds the total limit of containers {}. {why}",
            limit.binary()
        );
        return Ok(Some(Violation { signal: "ephemeralpodfs.limit", message }));
    }
    container(pod, storage)
}

fn volume(pod: &Pod, storage: &PodStorage) -> Result<Option<Violation>, FieldError> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    for (index, volume) in volumes.enumerate() {
        let Some(size) = volume.empty_dir.as_ref().and_then(|empty| empty.size_limit.as_ref()) else {
            continue;
        };
        let limit = Quantity::try_from(size).map_err(|error| {
            FieldError::new(format!("spec.volumes[{index}].emptyDir.sizeLimit"), error.to_string())
        })?;
        let used = storage.volumes.get(&volume.name).copied().map(bytes);
        let (above, deep) = (used.is_some_and(|used| used > limit), storage.too_deep.contains(&volume.name));
        if limit > Quantity::ZERO && (above || deep) {
            let why = if above { String::new() } else { too_deep(&volume.name) };
            let message = format!(
                "Usage of EmptyDir volume {:?} exceeds the limit {:?}. {why}",
                volume.name,
                limit.binary()
            );
            return Ok(Some(Violation { signal: "emptydirfs.limit", message }));
        }
    }
    Ok(None)
}

/// Returns the reason why a volume that could not be measured fully counts as above its limit.
fn too_deep(volume: &str) -> String {
    format!(
        "The volume {volume:?} has folders too deep to be measured, and counts as full: use fewer levels of folders. "
    )
}

fn container(pod: &Pod, storage: &PodStorage) -> Result<Option<Violation>, FieldError> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    for (index, container) in containers.enumerate() {
        let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
        let limits = ResourceList::read(limits)
            .map_err(|error| error.under(&format!("spec.containers[{index}].resources.limits")))?;
        let Some(limit) = limits.get(EPHEMERAL_STORAGE) else { continue };
        let used = storage.containers.get(&container.name).copied().map(bytes);
        if used.is_some_and(|used| used > limit) {
            let message = format!(
                "Container {} exceeded its local ephemeral storage limit {:?}. ",
                container.name,
                limit.binary()
            );
            return Ok(Some(Violation { signal: "ephemeralcontainerfs.limit", message }));
        }
    }
    Ok(None)
}

fn bytes(bytes: u64) -> Quantity {
    Quantity::from_units(i64::try_from(bytes).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod() -> Pod {
        let limited = json!({"name": "a", "resources": {"limits": {"ephemeral-storage": "100Mi"}}});
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {
            "containers": [limited, {"name": "b"}],
            "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "10Mi"}}, {"name": "w", "emptyDir": {}},
                        {"name": "z", "emptyDir": {"sizeLimit": "0"}}],
        }}))
        .unwrap()
    }

    /// Checks usages in MiB of the volumes v and w and the containers a and b.
    fn check(volumes: [u64; 2], containers: [u64; 2], expect: Option<(&str, &str)>) {
        let storage = PodStorage {
            volumes: [
                ("v".to_owned(), volumes[0] << 20),
                ("w".to_owned(), volumes[1] << 20),
                ("z".to_owned(), 1),
            ]
            .into(),
            containers: [("a".to_owned(), containers[0] << 20), ("b".to_owned(), containers[1] << 20)].into(),
            ..PodStorage::default()
        };
        let found = violation(&pod(), &storage).unwrap();
        let found = found.as_ref().map(|violation| (violation.signal, violation.message.trim_end()));
        assert_eq!(found, expect, "{volumes:?} {containers:?}");
    }

    #[test]
    fn volumes_pods_and_containers_have_limits() {
        check([10, 0], [0, 0], None);
        check(
            [11, 0],
            [0, 0],
            Some(("emptydirfs.limit", "Usage of EmptyDir volume \"v\" exceeds the limit \"10Mi\".")),
        );
        let pod = "Pod ephemeral local storage usage exceeds the total limit of containers 100Mi.";
        check([5, 50], [20, 30], Some(("ephemeralpodfs.limit", pod)));
        check([5, 50], [20, 24], None);
    }

    #[test]
    fn a_volume_that_is_too_deep_to_be_measured_is_above_every_limit() {
        let check = |volume: &str, used: u64, pod: &Pod, expected: Option<(&str, &str)>| {
            let volumes = [(volume.to_owned(), used << 20)].into();
            let too_deep = [volume.to_owned()].into();
            let found = violation(pod, &PodStorage { volumes, too_deep, ..PodStorage::default() }).unwrap();
            let found = found.as_ref().map(|found| (found.signal, found.message.trim_end()));
            assert_eq!(found, expected, "{volume} {used}");
        };
        let volume = "Usage of EmptyDir volume \"v\" exceeds the limit \"10Mi\".";
        let why = "The volume \"v\" has folders too deep to be measured, and counts as full: use fewer levels of folders.";
        check("v", 0, &pod(), Some(("emptydirfs.limit", &format!("{volume} {why}"))));
        check("v", 11, &pod(), Some(("emptydirfs.limit", volume)));
        let whole = "Pod ephemeral local storage usage exceeds the total limit of containers 100Mi.";
        let why = why.replace("\"v\"", "\"w\"");
        check("w", 0, &pod(), Some(("ephemeralpodfs.limit", &format!("{whole} {why}"))));
        check("w", 101, &pod(), Some(("ephemeralpodfs.limit", whole)));
        // A size of zero sets no limit, and a pod without limits cannot exceed any.
        let mut free = pod();
        free.spec.as_mut().unwrap().containers[0].resources = None;
        check("z", 0, &free, None);
        check("w", 0, &free, None);
    }

    #[test]
    fn files_of_the_node_count_for_the_pod() {
        let check = |files, expected| {
            let storage =
                PodStorage { files, volumes: [("w".to_owned(), 1)].into(), ..PodStorage::default() };
            let found = violation(&pod(), &storage).unwrap();
            assert_eq!(found.map(|found| found.signal), expected, "{files}");
        };
        check((100 << 20) - 1, None);
        check(100 << 20, Some("ephemeralpodfs.limit"));
        check(u64::MAX, Some("ephemeralpodfs.limit"));
    }

    #[test]
    fn a_containers_own_limit_counts_where_the_pods_does_not() {
        let mut pod = pod();
        let spec = pod.spec.as_mut().unwrap();
        spec.containers[1].resources =
            serde_json::from_value(json!({"limits": {"ephemeral-storage": "100Mi"}})).unwrap();
        let storage =
            PodStorage { containers: [("a".to_owned(), 101 << 20)].into(), ..PodStorage::default() };
        let found = violation(&pod, &storage).unwrap().unwrap();
        assert_eq!(found.signal, "ephemeralcontainerfs.limit");
        assert_eq!(found.message, "Container a exceeded its local ephemeral storage limit \"100Mi\". ");
        assert_eq!(violation(&Pod::default(), &storage).unwrap(), None);
    }
}
