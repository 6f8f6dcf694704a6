//! emptyDir volumes: a folder of the pod, on disk or in memory.

use std::path::{Path, PathBuf};

use beelet_policy::{
    resources::{
        self, MEMORY,
        huge_pages::{self, Medium},
    },
    volumes::content::Allowance,
};
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1 as core;

use crate::{
    error::Error,
    fs_group::Access,
    loss::Loss,
    mounts,
    plugin::{Location, Sources, Spec, Target, VolumePlugin},
    top_folder::{add_mode, make_top},
};

/// Plugin of emptyDir volumes.
#[derive(Debug)]
pub(crate) struct EmptyDirVolumes;

/// Returns the kubelet's name of the plugin of emptyDir volumes.
pub(crate) fn plugin_name(spec: &Spec<'_>) -> Option<&'static str> {
    spec.volume.empty_dir.is_some().then_some("kubernetes.io/empty-dir")
}

impl VolumePlugin for EmptyDirVolumes {
    fn name(&self, spec: &Spec<'_>) -> Option<&'static str> {
        plugin_name(spec)
    }

    fn location(&self, _volume: &core::Volume) -> Location {
        Location::Own
    }

    fn set_up(
        &self,
        spec: &Spec<'_>,
        target: &Target<'_>,
        _left: &mut Allowance,
    ) -> Result<Option<PathBuf>, Error> {
        let Some(source) = &spec.volume.empty_dir else { return Ok(None) };
        make(target.path, source, target.sources)?;
        if let Some(group) = target.fs_group {
            group.own(target.path, Access::ReadWrite)?;
        }
        Ok(None)
    }

    fn is_restorable(&self) -> bool {
        true
    }

    fn loss(&self, spec: &Spec<'_>, path: &Path) -> Result<Option<Loss>, Error> {
        let Some(source) = &spec.volume.empty_dir else { return Ok(None) };
        // Files in memory still exist for the containers that have the memory mounted, but for no others.
        let is_mounted = source.medium.as_deref().is_some_and(|medium| !medium.is_empty());
        let is_there = match std::fs::symlink_metadata(path) {
            Ok(found) => found.is_dir() && (!is_mounted || mounts::is_mount_point(path)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
            Err(error) => return Err(Error::io("inspect", path)(error)),
        };
        Ok((!is_there).then_some(Loss::Data))
    }
}

/// Makes the folder and mounts memory on it. Idempotent.
fn make(path: &Path, source: &core::EmptyDirVolumeSource, sources: &Sources<'_>) -> Result<(), Error> {
    make_top(path)?;
    match source.medium.as_deref().unwrap_or_default() {
        "" => {}
        "Memory" => {
            let size = size(sources.pod, source, sources.node.allocatable(MEMORY))?;
            // The default mode of a tmpfs, which the kubelet keeps: users cannot remove each other's files.
            mounts::mount_memory(path, size.value(), 0o1777)?;
        }
        medium => {
            let unknown = || Error::unmet(format!("emptyDir: the medium {medium:?} is not supported"));
            let pages = Medium::parse(medium).ok_or_else(unknown)?;
            let size =
                huge_pages::page_size(pages, sources.pod).map_err(|why| Error::unmet(why.to_string()))?;
            // The mount belongs to root and the pod's fsGroup: the kubelet changes nothing else.
            return mounts::mount_huge_pages(path, size);
        }
    }
    // Any user of the pod's containers may write to the folder, as under the kubelet. The folder keeps the
    // additional mode bits that it got with its group.
    add_mode(path, 0o777)
}

/// Returns the size of a volume in memory: the minimum of its limit, the pod's memory limit and the node's
/// allocatable memory (KEP-1967; `calculateEmptyDirMemorySize`). Without a limit, the kernel allows a tmpfs
/// to use half of the machine's memory.
fn size(
    pod: &core::Pod,
    source: &core::EmptyDirVolumeSource,
    allocatable: Quantity,
) -> Result<Quantity, Error> {
    let own = match &source.size_limit {
        Some(limit) => Some(Quantity::parse(&limit.0).map_err(|e| Error::unmet(format!("sizeLimit: {e}")))?),
        None => None,
    };
    let of_pod = if is_limited(pod) {
        resources::pod_limits(pod).map_err(|e| Error::unmet(e.to_string()))?.get(MEMORY)
    } else {
        None
    };
    let limits = [own, of_pod].into_iter().flatten().filter(|limit| !limit.is_zero());
    Ok(limits.fold(allocatable, Quantity::min))
}

/// Returns true if the pod's memory has a limit: the pod's own, or one of every container. Without that, only
/// the node's memory limits the pod.
fn is_limited(pod: &core::Pod) -> bool {
    let spec = pod.spec.as_ref();
    let own = spec.and_then(|spec| spec.resources.as_ref()?.limits.as_ref());
    if own.is_some_and(|limits| limits.contains_key(MEMORY)) {
        return true;
    }
    let mut all =
        spec.into_iter().flat_map(|s| s.containers.iter().chain(s.init_containers.iter().flatten()));
    all.all(|container| {
        let limits = container.resources.as_ref().and_then(|r| r.limits.as_ref());
        limits.is_some_and(|limits| limits.contains_key(MEMORY))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn memory_is_limited_by_the_volume_the_pod_and_the_node() {
        let check = |limit: Option<&str>, memory: Option<&str>, expected: &str| {
            let resources = memory.map(|memory| json!({"limits": {"memory": memory}}));
            let pod = json!({"spec": {"containers": [{"name": "c", "resources": resources}]}});
            let pod: core::Pod = serde_json::from_value(pod).unwrap();
            let source = serde_json::from_value(json!({"medium": "Memory", "sizeLimit": limit})).unwrap();
            let size = size(&pod, &source, Quantity::parse("8Gi").unwrap()).unwrap();
            assert_eq!(size, Quantity::parse(expected).unwrap(), "{limit:?} {memory:?}");
        };
        check(None, None, "8Gi");
        check(Some("64Mi"), None, "64Mi");
        check(Some("64Mi"), Some("32Mi"), "32Mi");
        check(None, Some("32Mi"), "32Mi");
        check(Some("16Gi"), None, "8Gi");
        check(Some("0"), None, "8Gi");
    }
}
