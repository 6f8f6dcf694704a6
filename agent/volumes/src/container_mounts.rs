//! A container's mounts and block devices, from the volumes of its pod that are set up. All functions block.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use beelet_policy::{
    pod::variables::{Budget, expand_strict},
    volumes::content::{Allowance, shown},
};
use beelet_proto::cri;
use beelet_spec::env::Environment;
use k8s_openapi::api::core::v1 as core;

use crate::{
    SUB_PATHS,
    error::Error,
    plugin::Location,
    pod_volumes::{PodVolumes, Stop, go_on},
    sub_path,
};

/// Facts that a container's mounts need in addition to the container's spec.
#[derive(Debug)]
pub struct MountFacts {
    /// Container's environment, for `subPathExpr`.
    pub env: Environment,
    /// Runtime's ids of the images of image volumes, by volume; without volumes whose `optional` image
    /// failed.
    pub images: BTreeMap<String, String>,
    /// The runtime can make mounts read-only with all mounts below them.
    pub recursive_read_only: bool,
}

impl PodVolumes {
    /// Returns the mounts of a container, after mounting the parts of volumes that the container asks for.
    ///
    /// # Errors
    /// A volume or a part of a volume cannot be mounted, or `stop` returned true.
    pub fn mounts(
        &self,
        container: &core::Container,
        facts: &MountFacts,
        stop: Stop<'_>,
    ) -> Result<Vec<cri::Mount>, Error> {
        let (all, mut left) = (container.volume_mounts.iter().flatten().enumerate(), Allowance::default());
        all.map(|(index, mount)| {
            go_on(stop)?;
            mount_of(self, (container, index), mount, facts, &mut left).map_err(|cause| Error::Mount {
                path: shown(&mount.mount_path),
                container: container.name.clone(),
                cause: Box::new(cause),
            })
        })
        .collect()
    }

    /// Returns the block devices of a container.
    ///
    /// # Errors
    /// The pod lacks a volume, or the volume is not set up.
    pub fn devices(&self, container: &core::Container) -> Result<Vec<cri::Device>, Error> {
        let all = container.volume_devices.iter().flatten();
        all.map(|device| {
            let volume = self.volumes.iter().find(|volume| volume.name == device.name);
            let none = || Error::unmet(format!("the pod has no volume {}", device.name));
            let is_linked = |volume: &&core::Volume| self.plugin(volume).location(volume) == Location::Linked;
            let volume = volume.filter(is_linked).ok_or_else(none)?;
            Ok(cri::Device {
                container_path: device.device_path.clone(),
                host_path: self.place(&volume.name)?.to_string_lossy().into_owned(),
                permissions: if self.plugin(volume).is_read_only(volume) { "r" } else { "mrw" }.to_owned(),
            })
        })
        .collect()
    }
}

/// Returns the mount of a volume, or of the part of it that the agent mounts for the container.
fn mount_of(
    volumes: &PodVolumes,
    (container, index): (&core::Container, usize),
    mount: &core::VolumeMount,
    facts: &MountFacts,
    left: &mut Allowance,
) -> Result<cri::Mount, Error> {
    let volume = volumes
        .volumes
        .iter()
        .find(|v| v.name == mount.name)
        .ok_or_else(|| Error::unmet(format!("the pod has no volume {}", mount.name)))?;
    let sub_path = sub_path_of(mount, &facts.env, left)?;
    let recursive = recursive_read_only(mount, facts.recursive_read_only)?;
    let propagation = match mount.mount_propagation.as_deref() {
        Some("HostToContainer") => cri::MountPropagation::PropagationHostToContainer,
        Some("Bidirectional") => cri::MountPropagation::PropagationBidirectional,
        _ => cri::MountPropagation::PropagationPrivate,
    };
    let mut made = cri::Mount {
        container_path: in_container(&mount.mount_path),
        readonly: mount.read_only.unwrap_or(false),
        recursive_read_only: recursive,
        propagation: propagation.into(),
        ..Default::default()
    };
    if volume.image.is_some() {
        let image = facts.images.get(&volume.name).cloned().unwrap_or_default();
        made.image = Some(cri::ImageSpec { image, ..Default::default() });
        made.image_sub_path = sub_path.map(|part| part.to_string_lossy().into_owned()).unwrap_or_default();
        made.readonly = true;
        return Ok(made);
    }
    let plugin = volumes.plugin(volume);
    let (location, is_read_only) = (plugin.location(volume), plugin.is_read_only(volume));
    made.readonly |= is_read_only;
    let is_changeable = !(location == Location::Linked && is_read_only);
    let whole = match location {
        Location::Machine(path) => path,
        Location::Linked => volumes.place(&volume.name)?,
        Location::Own => volumes.path(&volume.name),
    };
    // Paths of the host keep their SELinux label; volumes that the agent made get the container's label. A
    // volume that was mounted read-only cannot be relabelled: the kubelet's plugins call such a volume not
    // managed. Files of ConfigMaps and similar volumes are read-only for containers only.
    let may_relabel = || volumes.plugins.all().all(|plugin| plugin.may_relabel(&volumes.folder, &whole));
    made.selinux_relabel = whole.starts_with(&volumes.folder) && is_changeable && may_relabel();
    let source = match sub_path {
        Some(part) => {
            let name = Path::new(&volume.name).join(&container.name).join(index.to_string());
            let target = volumes.folder.join(SUB_PATHS).join(name);
            sub_path::mount(&whole, &part, &target)?;
            target
        }
        None => whole,
    };
    made.host_path = source.to_string_lossy().into_owned();
    Ok(made)
}

/// Returns a path in the container. A relative path starts at the container's root, as under the kubelet.
fn in_container(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

/// Returns the part of the volume that the mount names; None for the whole volume. The agent may have to make
/// the part's folders.
fn sub_path_of(
    mount: &core::VolumeMount,
    env: &Environment,
    left: &mut Allowance,
) -> Result<Option<PathBuf>, Error> {
    let expression = mount.sub_path_expr.as_deref().filter(|text| !text.is_empty());
    let text = match expression {
        Some(expression) => expand_strict(expression, |name| env.get(name), &mut { Budget::PATH })
            .map_err(|why| Error::unmet(format!("subPathExpr {why}")))?,
        None => mount.sub_path.clone().unwrap_or_default(),
    };
    if text.is_empty() {
        return Ok(None);
    }
    left.path(&text)?;
    let path = PathBuf::from(&text);
    let inside = path
        .components()
        .all(|part| matches!(part, std::path::Component::Normal(_) | std::path::Component::CurDir));
    if !inside || text.contains('\0') {
        return Err(Error::unmet(format!("subPath {:?} must be relative and without '..'", shown(&text))));
    }
    Ok(Some(path))
}

/// Returns true if the mount and all mounts below it must be read-only.
fn recursive_read_only(mount: &core::VolumeMount, possible: bool) -> Result<bool, Error> {
    match mount.recursive_read_only.as_deref() {
        Some("Enabled") if !possible => Err(Error::unmet(
            "`recursiveReadOnly: Enabled` needs containerd 2.0, runc 1.1 and Linux 5.12 or later; use `IfPossible` to \
             run without it",
        )),
        Some("Enabled") => Ok(true),
        Some("IfPossible") => Ok(possible && mount.read_only == Some(true)),
        _ => Ok(false),
    }
}
