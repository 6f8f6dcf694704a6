//! The volumes of one pod on disk: setup, refresh, restoration and removal. All functions block.

use std::path::{Path, PathBuf};

use beelet_base::{
    folder::{PRIVATE, make_folder},
    walk::remove_folder,
};
use beelet_policy::{
    handover::Places,
    volumes::{claims, content::Allowance, mount_points},
};
use k8s_openapi::api::core::v1 as core;
use tracing::debug;

use crate::{
    SUB_PATHS, VOLUMES,
    error::Error,
    fs_group::FsGroup,
    loss::Restored,
    mounts,
    operations::Operation,
    plugin::{Location, Sources, Spec, Target, Use, VolumePlugin},
    plugins::{Plugins, plugin_name},
    sub_path,
};

/// Maximum size of a file of variables in bytes.
const READ_MOST: u64 = 1 << 20;

/// The volumes of a pod.
#[derive(Clone, Debug)]
pub struct PodVolumes {
    /// `<pods>/<uid>`.
    pub(crate) folder: PathBuf,
    pub(crate) volumes: Vec<core::Volume>,
    pub(crate) plugins: Plugins,
    fs_group: Option<FsGroup>,
}

/// A function that returns true once the work has to stop, because its caller no longer waits. Checked
/// between two mounts, so that a removal of the mounts can begin soon.
pub type Stop<'a> = &'a dyn Fn() -> bool;

impl PodVolumes {
    /// Makes the volumes of `pod`, whose folders are below `pods_dir`.
    #[must_use]
    pub fn of(pod: &core::Pod, pods_dir: &Path, plugins: &Plugins) -> Self {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let volumes = pod.spec.as_ref().and_then(|s| s.volumes.clone()).unwrap_or_default();
        let context = pod.spec.as_ref().and_then(|s| s.security_context.as_ref());
        let fs_group = FsGroup::of(context);
        Self { folder: pods_dir.join(uid), volumes, plugins: plugins.clone(), fs_group }
    }

    /// Returns a volume's own path. A volume that a kubelet has set up first stays in the kubelet's place,
    /// which the pod's containers have mounted.
    pub(crate) fn path(&self, volume: &str) -> PathBuf {
        let own = self.folder.join(VOLUMES).join(volume);
        if own.symlink_metadata().is_ok() {
            return own;
        }
        set_up_by_kubelet(self, volume).unwrap_or(own)
    }

    /// Returns the plugin of a volume whose claim was not read.
    pub(crate) fn plugin(&self, volume: &core::Volume) -> &dyn VolumePlugin {
        self.plugins.of(&Spec::of(volume)).1
    }

    /// Sets up the volumes that must exist before the first container runs. Idempotent. A failing volume that
    /// no container uses delays nothing.
    ///
    /// # Errors
    /// A volume that a container uses cannot be made, or `stop` returned true.
    pub fn set_up(&self, sources: &Sources<'_>, stop: Stop<'_>) -> Result<(), Error> {
        let (mounted, devices) = claims::used(sources.pod);
        let (mut left, nested) = (Allowance::default(), mount_points::nested(sources.pod));
        for volume in &self.volumes {
            go_on(stop)?;
            let name = volume.name.as_str();
            left.volume().map_err(|e| Error::from(e).of_volume(name))?;
            let used = Use { mounted: mounted.contains(name), device: devices.contains(name) };
            let spec = Spec { volume, claimed: sources.prepared.claims.get(name) };
            let (plugin_name, plugin) = self.plugins.of(&spec);
            if !plugin.is_due(&spec, used, sources.prepared.attachments.get(name)) {
                continue;
            }
            let path = self.path(name);
            let target = Target { nested: nested.get(name), ..target(self, &path, sources) };
            let made = self.plugins.operations().time(Operation::Mount, &[plugin_name], || {
                match plugin.set_up(&spec, &target, &mut left)? {
                    Some(place) => self.link(name, &place),
                    None => Ok(()),
                }
            });
            match made.map_err(|e| e.of_volume(name)) {
                Err(error) if used.is_any() => return Err(error),
                Err(error) => debug!("skipping a volume that no container uses: {error}"),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Makes a link from a volume's own path to its place.
    pub(crate) fn link(&self, name: &str, place: &Path) -> Result<(), Error> {
        let path = self.path(name);
        if std::fs::read_link(&path).is_ok_and(|known| known == place) {
            return Ok(());
        }
        make_folder(&self.folder.join(VOLUMES), PRIVATE)?;
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("replace", &path)(e)),
            _ => {}
        }
        std::os::unix::fs::symlink(place, &path).map_err(Error::io("make the link", &path))
    }

    /// Returns the place of a linked volume. A place that was a mount point must still be one, so that no
    /// container writes to the folder below the mount.
    pub(crate) fn place(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.path(name);
        let place = std::fs::read_link(&path).map_err(Error::io("find", &path))?;
        let is_ours = self.plugins.all().any(|plugin| plugin.must_be_mounted(&self.folder, &place));
        if is_ours && !mounts::is_mount_point(&place)? {
            return Err(Error::unmet(format!("{} is no longer mounted", place.display())));
        }
        Ok(place)
    }

    /// Updates the existing volumes that show objects. Returns the number of volumes that changed.
    ///
    /// # Errors
    /// A volume that a container mounts cannot be updated.
    pub fn refresh(&self, sources: &Sources<'_>) -> Result<usize, Error> {
        let (mut changed, mut left) = (0, Allowance::default());
        let (mounts, _) = claims::used(sources.pod);
        for volume in &self.volumes {
            let path = self.path(&volume.name);
            let target = target(self, &path, sources);
            let refreshed = self.plugin(volume).refresh(&Spec::of(volume), &target, &mut left);
            match refreshed.map_err(|e| e.of_volume(&volume.name)) {
                Err(_) if !mounts.contains(volume.name.as_str()) => {} // no container reads the volume
                refreshed => changed += usize::from(refreshed?),
            }
        }
        Ok(changed)
    }

    /// Returns true if `is` is true for the plugin of any volume.
    pub(crate) fn any(&self, is: fn(&dyn VolumePlugin) -> bool) -> bool {
        self.volumes.iter().any(|volume| is(self.plugin(volume)))
    }

    /// Restores lost parts of the volumes that containers mount, as far as the agent knows their content
    /// (`reconcile` of the kubelet's volume manager). Must never be called for a pod whose volumes are not
    /// set up yet or are being removed.
    ///
    /// # Errors
    /// A lost volume cannot be made.
    pub fn restore(&self, sources: &Sources<'_>) -> Result<Vec<Restored>, Error> {
        let (mounted, _) = claims::used(sources.pod);
        let (mut left, nested) = (Allowance::default(), mount_points::nested(sources.pod));
        let mut restored = Vec::new();
        for volume in self.volumes.iter().filter(|volume| mounted.contains(volume.name.as_str())) {
            let in_volume = |error: Error| error.of_volume(&volume.name);
            let (path, spec, plugin) = (self.path(&volume.name), Spec::of(volume), self.plugin(volume));
            if let Some(loss) = plugin.loss(&spec, &path).map_err(in_volume)? {
                let nested = nested.get(volume.name.as_str());
                let target = Target { nested, ..target(self, &path, sources) };
                plugin.set_up(&spec, &target, &mut left).map_err(in_volume)?;
                restored.push(Restored { volume: volume.name.clone(), loss });
            }
        }
        Ok(restored)
    }

    /// Returns the image volumes.
    pub fn images(&self) -> impl Iterator<Item = (&str, &core::ImageVolumeSource)> {
        self.volumes.iter().filter_map(|volume| Some((volume.name.as_str(), volume.image.as_ref()?)))
    }

    /// Reads a file of at most one megabyte from an emptyDir volume. Links and devices that containers made
    /// cannot lead out of the volume.
    ///
    /// # Errors
    /// The pod has no emptyDir volume of this name, or the file cannot be read.
    pub fn read(&self, volume: &str, path: &Path) -> Result<Vec<u8>, Error> {
        let is_own = |v: &&core::Volume| v.name == volume && v.empty_dir.is_some();
        if !self.volumes.iter().any(|v| is_own(&v)) {
            return Err(Error::unmet(format!("the pod has no emptyDir volume {volume}")));
        }
        sub_path::read(&self.path(volume), path, READ_MOST)
    }

    /// Unmounts and removes the volumes. Keeps the containers' termination messages and the rest of the
    /// folder.
    ///
    /// # Errors
    /// A mount is in use, or a driver cannot unmount a volume.
    pub fn release(&self) -> Result<(), Error> {
        unmount(self, || {
            remove_folder(&self.folder.join(SUB_PATHS))?;
            Ok(remove_folder(&self.folder.join(VOLUMES))?)
        })
    }

    /// Unmounts the volumes and removes the pod's folder. Symbolic links in it are removed, not followed.
    ///
    /// # Errors
    /// Same as [`Self::release`].
    pub fn tear_down(&self) -> Result<(), Error> {
        unmount(self, || Ok(remove_folder(&self.folder)?))
    }
}

/// Returns the kubelet's place of a volume at its own path, if the place exists.
fn set_up_by_kubelet(volumes: &PodVolumes, name: &str) -> Option<PathBuf> {
    let volume = volumes.volumes.iter().find(|volume| volume.name == name)?;
    let (plugin_name, plugin) = volumes.plugins.of(&Spec::of(volume));
    let is_own = plugin.location(volume) == Location::Own;
    kubelets_place(&volumes.folder, plugin_name, name).filter(|_| is_own)
}

/// Returns the places of a pod's volumes in the `folder` of the pod. Links to volumes elsewhere don't count.
#[must_use]
pub fn places(pod: &core::Pod, folder: &Path) -> Places {
    let mut places = Places::default();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let own = folder.join(VOLUMES).join(&volume.name);
        if own.symlink_metadata().is_ok_and(|found| found.is_dir()) {
            places.of_beelet.insert(volume.name.clone());
        }
        if kubelets_place(folder, plugin_name(volume), &volume.name).is_some() {
            places.of_kubelet.insert(volume.name.clone());
        }
    }
    places
}

/// Returns the folder in which a kubelet has set up a volume of this plugin, if it exists, in the `folder` of
/// the pod (`GetPodVolumeDir`).
fn kubelets_place(folder: &Path, plugin_name: &str, volume: &str) -> Option<PathBuf> {
    let place = folder.join(VOLUMES).join(plugin_name.replace('/', "~")).join(volume);
    place.symlink_metadata().is_ok_and(|found| found.is_dir()).then_some(place)
}

fn target<'a>(volumes: &'a PodVolumes, path: &'a Path, sources: &'a Sources<'a>) -> Target<'a> {
    Target { folder: &volumes.folder, path, fs_group: volumes.fs_group.as_ref(), sources, nested: None }
}

/// Returns the kubelet's plugin name of a volume that is set up.
fn plugin_name_of(volumes: &PodVolumes, volume: &core::Volume) -> &'static str {
    let (name, plugin) = volumes.plugins.of(&Spec::of(volume));
    if plugin.location(volume) != Location::Linked {
        return name;
    }
    let place = std::fs::read_link(volumes.path(&volume.name)).unwrap_or_default();
    volumes.plugins.name_of_place(&volumes.folder, &place)
}

/// Unmounts all mounts in the folder, then calls `remove`. Records the duration for the volumes that were set
/// up.
fn unmount(volumes: &PodVolumes, remove: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    let is_made = |volume: &&core::Volume| volumes.path(&volume.name).symlink_metadata().is_ok();
    let made: Vec<&str> =
        volumes.volumes.iter().filter(is_made).map(|volume| plugin_name_of(volumes, volume)).collect();
    volumes.plugins.operations().time(Operation::Unmount, &made, || {
        volumes.plugins.unmount_all(&volumes.folder)?;
        remove()
    })
}

/// Returns an error if the caller no longer waits for the work.
pub(crate) fn go_on(stop: Stop<'_>) -> Result<(), Error> {
    if stop() { Err(Error::Stopped) } else { Ok(()) }
}
