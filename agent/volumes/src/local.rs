//! PersistentVolumes on the machine's own disks (`local`): a folder, or a disk with a file system.
//!
//! A volume is bind mounted at `volumes/kubernetes.io~local-volume/<PersistentVolume>` in the pod's folder.
//! A disk is mounted once for all pods, in the folder of [`LocalDisks`], and unmounted after its last pod.

use std::{
    fs,
    os::unix::fs::FileTypeExt,
    path::{Component, Path, PathBuf},
};

use beelet_base::folder::{PRIVATE, make_folder};
use beelet_model::storage::Claimed;
use beelet_policy::volumes::{claims, content, file_system::FileSystem};
use k8s_openapi::api::core::v1 as core;

use crate::{
    VOLUMES,
    busy::Busy,
    disk,
    error::Error,
    fs_group::{Access, FsGroup},
    mounts,
    persistent_volume::{one_name, options_of},
    plugin::{Location, Spec, Target, VolumePlugin},
};

/// The kubelet's name of this kind of volumes in paths.
const PLUGIN: &str = "kubernetes.io~local-volume";

/// Disks that are mounted for pods. Clones share them.
#[derive(Clone, Debug)]
pub struct LocalDisks {
    /// Folder of the mounted disks: `<kubelet dir>/plugins/kubernetes.io/local-volume/mounts`.
    folder: PathBuf,
    /// Folder with a folder for each pod.
    pods_dir: PathBuf,
    busy: Busy,
}

impl LocalDisks {
    /// Mounts disks in the kubelet's folder.
    #[must_use]
    pub fn new(kubelet_dir: &Path, pods_dir: &Path) -> Self {
        let folder = kubelet_dir.join("plugins/kubernetes.io/local-volume/mounts");
        Self { folder, pods_dir: pods_dir.to_owned(), busy: Busy::default() }
    }

    /// Returns the mount points of a volume in pods' folders, except `than`.
    fn others(&self, name: &str, than: Option<&Path>) -> Result<Vec<PathBuf>, Error> {
        let end = Path::new(VOLUMES).join(PLUGIN).join(name);
        let mut points = mounts::below(&self.pods_dir)?;
        points.retain(|point| point.ends_with(&end) && than.is_none_or(|own| mounts::real(own) != *point));
        Ok(points)
    }

    /// Unmounts the disks of those volumes that no pod has mounted any more.
    fn release(&self, volumes: &[String]) -> Result<(), Error> {
        for name in volumes {
            let _held = self.busy.hold(name);
            let mounted = self.folder.join(name);
            if mounts::is_mount_point(&mounted)? && self.others(name, None)?.is_empty() {
                mounts::unmount(&mounted)?;
                fs::remove_dir(&mounted).map_err(Error::io("remove", &mounted))?;
            }
        }
        Ok(())
    }

    /// Mounts a `local` volume for the pod with this folder, unless it is mounted already. Returns the
    /// volume's path.
    fn mount(
        &self,
        folder: &Path,
        claimed: &Claimed,
        source: &core::LocalVolumeSource,
        group: Option<&FsGroup>,
    ) -> Result<PathBuf, Error> {
        let name = one_name(claimed.name())?;
        content::check_path(&source.path)?;
        let from = Path::new(&source.path);
        if from.components().any(|part| part == Component::ParentDir) {
            return Err(Error::unmet(format!("invalid path: {} must not contain '..'", source.path)));
        }
        let target = folder.join(VOLUMES).join(PLUGIN).join(name);
        let _held = self.busy.hold(name);
        if mounts::is_mount_point(&target)? {
            return Ok(target);
        }
        let is_shared = !self.others(name, Some(&target))?.is_empty();
        if is_shared && claims::is_for_one_pod(&claimed.volume) {
            return Err(Error::unmet(
                "volume uses the ReadWriteOncePod access mode and is already in use by another pod",
            ));
        }
        let mut options = options_of(claimed);
        let kind = fs::metadata(from).map_err(Error::io("find the local volume", from))?.file_type();
        let from = if kind.is_dir() {
            from.to_owned()
        } else if kind.is_block_device() {
            let mounted = self.folder.join(name);
            let kind = FileSystem::of(source.fs_type.as_deref().unwrap_or_default());
            let kind = kind.map_err(Error::unmet_of)?;
            disk::mount(from, &mounted, kind, claimed.read_only, &options)?;
            mounted
        } else {
            return Err(Error::unmet(format!(
                "the local volume {} is neither a folder nor a block device",
                source.path
            )));
        };
        if claimed.read_only {
            options.push("ro".to_owned());
        }
        make_folder(&target, PRIVATE)?;
        disk::bind(&from, &target, &options)?;
        if let Some(group) = group.filter(|_| !claimed.read_only && !is_shared)
            && let Err(error) = group.own(&target, Access::ReadWrite)
        {
            // The next attempt would regard a mounted volume as done.
            mounts::unmount(&target)?;
            return Err(error);
        }
        Ok(target)
    }
}

/// Returns the kubelet's name of the plugin of `local` PersistentVolumes.
pub(crate) fn plugin_name(spec: &Spec<'_>) -> Option<&'static str> {
    spec.persistent()?.local.is_some().then_some("kubernetes.io/local-volume")
}

impl VolumePlugin for LocalDisks {
    fn name(&self, spec: &Spec<'_>) -> Option<&'static str> {
        plugin_name(spec)
    }

    fn location(&self, _volume: &core::Volume) -> Location {
        Location::Linked
    }

    fn set_up(
        &self,
        spec: &Spec<'_>,
        target: &Target<'_>,
        _left: &mut content::Allowance,
    ) -> Result<Option<PathBuf>, Error> {
        let (Some(claimed), Some(persistent)) = (spec.claimed, spec.persistent()) else { return Ok(None) };
        let Some(source) = &persistent.local else { return Ok(None) };
        if persistent.volume_mode.as_deref() == Some("Block") {
            return device(source).map(Some);
        }
        self.mount(target.folder, claimed, source, target.fs_group).map(Some)
    }

    /// Unmounts the pod's `local` volumes, and the disks that no other pod has.
    fn tear_down(&self, folder: &Path) -> Result<(), Error> {
        let own = folder.join(VOLUMES).join(PLUGIN);
        let entries = fs::read_dir(&own).into_iter().flatten().flatten();
        let volumes: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        mounts::unmount_below(&own)?;
        self.release(&volumes)
    }

    fn name_of_place(&self, _folder: &Path, place: &Path) -> Option<&'static str> {
        let is_ours = place.components().any(|part| part.as_os_str() == PLUGIN);
        is_ours.then_some("kubernetes.io/local-volume")
    }

    fn must_be_mounted(&self, folder: &Path, place: &Path) -> bool {
        place.starts_with(folder.join(VOLUMES).join(PLUGIN))
    }
}

/// Checks that a `local` volume is a block device. Returns its path.
fn device(source: &core::LocalVolumeSource) -> Result<PathBuf, Error> {
    content::check_path(&source.path)?;
    let path = PathBuf::from(&source.path);
    let kind = fs::metadata(&path).map_err(Error::io("find the local volume", &path))?.file_type();
    if kind.is_block_device() {
        return Ok(path);
    }
    Err(Error::unmet(format!("the local volume {} is not a block device", source.path)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_path;

    #[test]
    fn the_path_of_a_persistent_volume_is_one_that_linux_takes() {
        let path = "/a".repeat(1 << 20);
        let local = core::LocalVolumeSource { path: path.clone(), ..Default::default() };
        let host = core::HostPathVolumeSource { path, type_: Some("DirectoryOrCreate".to_owned()) };
        let (volume, claim) = Default::default();
        let claimed = Claimed { volume, claim, read_only: false };
        for refused in [device(&local), host_path::persistent(&claimed, &host)] {
            assert!(matches!(refused, Err(Error::TooMuch(_))), "{refused:?}");
        }
    }
}
