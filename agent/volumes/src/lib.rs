//! A pod's volumes on disk. A pod's folder is `<pods>/<uid>`: `volumes/<name>` holds what is made for the
//! pod, `volume-subpaths/<volume>/<container>/<index>` the parts of volumes that are mounted alone. What is
//! in the folder goes with the pod; nothing outside it ever does. Of a PersistentVolume `volumes/<name>` is a
//! link to where it is: whoever starts a container later needn't ask what its claim is bound to.
//!
//! Containers may have written to their volumes, so nothing below a volume is trusted: no symbolic link in
//! there is followed out of it, and no mount point in the folder is crossed when it is removed. Blocking, all
//! of it.

// A test hands its literals over.
#![cfg_attr(test, allow(clippy::needless_pass_by_value))]

mod atomic;
mod busy;
mod content;
mod disk;
mod disks;
mod empty_dir;
mod error;
mod flex;
mod fs_group;
mod host_path;
mod local;
pub mod mounts;
mod nfs;
mod operations;
mod records;
mod remote;
mod restore;
mod room;
mod sub_path;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use beelet_model::storage::{Claimed, Published};
use beelet_policy::{
    pod::variables::{Budget, expand_strict},
    volumes::{
        claims,
        content::{Allowance, TooMuch, shown},
        migration, mount_points, removed_kinds,
    },
};
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tracing::debug;

pub use self::content::Sources;
pub use self::disks::Disks;
pub use self::error::Error;
pub use self::flex::{FlexVolumes, FlexWanted};
pub use self::local::LocalDisks;
pub use self::operations::{Operations, plugin};
pub use self::remote::{RemoteDisks, RemoteWanted};
pub use self::restore::{Loss, Restored};
pub use self::room::room;

use self::fs_group::FsGroup;
use self::operations::Operation;
use beelet_base::folder::{PRIVATE, READABLE, make_folder};
use beelet_base::walk::remove_folder;
use beelet_spec::env::Environment;

/// What the folders in a pod's folder are called.
const VOLUMES: &str = "volumes";
const SUB_PATHS: &str = "volume-subpaths";
/// The longest file of variables.
const READ_MOST: u64 = 1 << 20;

/// A pod's volumes.
#[derive(Clone, Debug)]
pub struct Volumes {
    /// `<pods>/<uid>`.
    folder: PathBuf,
    volumes: Vec<core::Volume>,
    fs_group: Option<FsGroup>,
    operations: Operations,
    disks: Option<Disks>,
}

/// A volume that is attached to the node, or may be, by others than storage plugins, with what was found out
/// for it.
#[derive(Clone, Debug)]
pub enum Attached {
    /// Of a driver of `flexVolume`.
    Flex(FlexWanted),
    /// A disk on a network.
    Remote(RemoteWanted),
}

/// What a container's mounts are made of besides its spec.
#[derive(Debug)]
pub struct MountFacts {
    /// The container's environment, for `subPathExpr`.
    pub env: Environment,
    /// The images of image volumes as the runtime identifies them, by volume; of `optional` failures, none.
    pub images: BTreeMap<String, String>,
    /// Whether the runtime can make mounts read-only with all that is mounted below them.
    pub recursive_read_only: bool,
}

/// Asks whether work is to stop: nobody waits for it any more. Asked between two mounts, so that what is made
/// can soon be taken away.
pub type Stop<'a> = &'a dyn Fn() -> bool;

impl Volumes {
    /// The volumes of `pod`, with their folders below `pods_dir`.
    pub fn of(pod: &core::Pod, pods_dir: &Path) -> Self {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let volumes = pod.spec.as_ref().and_then(|s| s.volumes.clone()).unwrap_or_default();
        let context = pod.spec.as_ref().and_then(|s| s.security_context.as_ref());
        let (fs_group, operations) = (FsGroup::of(context), Operations::default());
        Self { folder: pods_dir.join(uid), volumes, fs_group, operations, disks: None }
    }

    /// The same, counted in `operations`, with the machine's disks and drivers.
    #[must_use]
    pub fn on(self, operations: &Operations, disks: &Disks) -> Self {
        Self { operations: operations.clone(), disks: Some(disks.clone()), ..self }
    }

    fn path(&self, volume: &str) -> PathBuf {
        self.folder.join(VOLUMES).join(volume)
    }

    /// Makes what must be there before the first container runs.
    ///
    /// Harmless to repeat. For a volume that no container uses nobody waits.
    ///
    /// # Errors
    /// Why one can't be made; or `stop` said so.
    pub fn set_up(&self, sources: &Sources<'_>, stop: Stop<'_>) -> Result<(), Error> {
        let (mounts, devices) = claims::used(sources.pod);
        let (mut left, nested) = (Allowance::default(), mount_points::nested(sources.pod));
        for volume in &self.volumes {
            go_on(stop)?;
            left.volume().map_err(|e| Error::from(e).of_volume(&volume.name))?;
            let is_used = mounts.contains(volume.name.as_str()) || devices.contains(volume.name.as_str());
            if !is_used && volume.host_path.is_some() {
                continue;
            }
            let (claimed, published) =
                (sources.claims.get(&volume.name), sources.published.get(&volume.name));
            let is_mounted_by_us =
                (volume.nfs.is_some() || is_attached(volume)) && mounts.contains(volume.name.as_str());
            if is_elsewhere(volume) && claimed.is_none() && published.is_none() && !is_mounted_by_us {
                // No container uses it.
                continue;
            }
            let plugin = claimed.map_or_else(|| plugin(volume), operations::plugin_of_claim);
            let made = self.operations.time(Operation::Mount, &[plugin], || match (published, claimed) {
                (Some(published), _) => self.set_up_published(&volume.name, published),
                (None, Some(claimed)) => self.set_up_claim(&volume.name, claimed, sources),
                (None, None) => self.set_up_one(volume, sources, nested.get(volume.name.as_str()), &mut left),
            });
            match made.map_err(|e| e.of_volume(&volume.name)) {
                Err(error) if is_used => return Err(error),
                Err(error) => debug!("a volume that no container uses is not made: {error}"),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Links to what a storage plugin has brought.
    fn set_up_published(&self, name: &str, published: &Published) -> Result<(), Error> {
        if let Some(group) = self.fs_group.as_ref().filter(|_| published.give_to_group) {
            group.own(&published.path, fs_group::Access::ReadWrite)?;
        }
        self.link(name, &published.path)
    }

    /// Mounts a PersistentVolume, and links to it.
    fn set_up_claim(&self, name: &str, claimed: &Claimed, sources: &Sources<'_>) -> Result<(), Error> {
        let spec = claimed.volume.spec.clone().unwrap_or_default();
        let is_block = spec.volume_mode.as_deref() == Some("Block");
        let place = match (&spec.local, &spec.host_path, &self.disks) {
            (Some(source), _, _) if is_block => local::device(source)?,
            (Some(source), _, Some(disks)) => {
                disks.local().set_up(&self.folder, claimed, source, self.fs_group.as_ref())?
            }
            (_, Some(source), _) => local::host_path(claimed, source)?,
            _ if spec.nfs.is_some() => {
                let source = spec.nfs.unwrap_or_default();
                let read_only = claimed.read_only || source.read_only == Some(true);
                nfs::set_up(&self.folder, claimed.name(), &source, read_only, &local::options_of(claimed))?
            }
            _ if spec.flex_volume.is_some() || spec.fc.is_some() || spec.iscsi.is_some() => {
                self.set_up_attached(name, sources)?
            }
            _ => return Err(Error::unmet("beelet can't mount PersistentVolumes of this kind")),
        };
        self.link(name, &place)
    }

    /// Has a volume that is attached mounted, by its driver or from its disk; where it is then.
    fn set_up_attached(&self, name: &str, sources: &Sources<'_>) -> Result<PathBuf, Error> {
        let (Some(disks), Some(wanted)) = (&self.disks, sources.attached.get(name)) else {
            return Err(Error::unmet("it is not known whether the volume is attached"));
        };
        let group = self.fs_group.as_ref();
        match wanted {
            Attached::Flex(wanted) => disks.flex().set_up(&self.folder, sources.pod, wanted, group),
            Attached::Remote(wanted) => disks.remote().set_up(&self.folder, wanted, group),
        }
    }

    /// Links from a volume's own path to where it is.
    fn link(&self, name: &str, place: &Path) -> Result<(), Error> {
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

    /// Where the volumes are that aren't in the pod's own folder: volume, place. Those that are set up.
    #[must_use]
    pub fn places(&self) -> Vec<(String, PathBuf)> {
        let elsewhere = self.volumes.iter().filter(|volume| is_elsewhere(volume));
        let place = |volume: &core::Volume| {
            Some((volume.name.clone(), std::fs::read_link(self.path(&volume.name)).ok()?))
        };
        let is_measured = |(_, place): &(String, PathBuf)| {
            self.disks.as_ref().is_none_or(|disks| disks.flex().is_measured(&self.folder, place))
        };
        elsewhere.filter_map(place).filter(is_measured).collect()
    }

    /// Where a PersistentVolume is. What was mounted in the pod's folder must still be: a container must not
    /// write beside it.
    fn place(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.path(name);
        let place = std::fs::read_link(&path).map_err(Error::io("find", &path))?;
        let own = self.folder.join(VOLUMES);
        let plugins = [local::PLUGIN, nfs::PLUGIN, remote::FC, remote::ISCSI];
        let is_ours = plugins.iter().any(|plugin| place.starts_with(own.join(plugin)));
        if is_ours && !mounts::is_mount_point(&place)? {
            return Err(Error::unmet(format!("{} is mounted no longer", place.display())));
        }
        Ok(place)
    }

    /// The plugin of a volume that is there, in the kubelet's words.
    fn plugin_of(&self, volume: &core::Volume) -> &'static str {
        if !is_elsewhere(volume) {
            return plugin(volume);
        }
        let place = std::fs::read_link(self.path(&volume.name)).unwrap_or_default();
        let is_of_driver = self.disks.as_ref().is_some_and(|disks| disks.flex().has(&self.folder, &place));
        if is_of_driver { operations::FLEX } else { operations::plugin_at(&place) }
    }

    fn set_up_one(
        &self,
        volume: &core::Volume,
        sources: &Sources<'_>,
        nested: Option<&Result<BTreeSet<String>, TooMuch>>,
        left: &mut Allowance,
    ) -> Result<(), Error> {
        let path = self.path(&volume.name);
        if let Some(source) = &volume.empty_dir {
            empty_dir::set_up(&path, source, sources)?;
            if let Some(group) = &self.fs_group {
                group.own(&path, fs_group::Access::ReadWrite)?;
            }
        } else if let Some(source) = &volume.nfs {
            let read_only = source.read_only == Some(true);
            let place = nfs::set_up(&self.folder, &volume.name, source, read_only, &[])?;
            self.link(&volume.name, &place)?;
        } else if is_attached(volume) {
            self.link(&volume.name, &self.set_up_attached(&volume.name, sources)?)?;
        } else if let Some(source) = &volume.host_path {
            host_path::check(source)?;
        } else if let Some(payload) = content::payload(volume, sources, left)? {
            let none = BTreeSet::new();
            let nested = nested.map_or(Ok(&none), |nested| nested.as_ref().map_err(Clone::clone))?;
            nested.iter().try_for_each(|way| left.path(way))?;
            make_top(&path)?;
            let in_memory = content::in_memory(volume);
            if in_memory {
                mounts::mount_for_content(&path)?;
            }
            let top = open_top(&path, in_memory)?.ok_or_else(|| Error::Vanished(path.clone()))?;
            atomic::make_mount_points(&path, &top, nested, self.fs_group.as_ref())?;
            if content::lacks_token(volume, sources) && atomic::is_set_up(&top) {
                return Ok(());
            }
            atomic::write(&path, &top, &payload, self.fs_group.as_ref())?;
        } else if volume.git_repo.is_some() {
            return Err(Error::unmet(removed_kinds::GIT_REPO));
        } else if volume.image.is_none() {
            return Err(Error::unmet("beelet can't make volumes of this kind"));
        }
        Ok(())
    }

    /// Brings volumes made of objects up to date, those that are there. Returns the number of volumes that
    /// changed.
    pub fn refresh(&self, sources: &Sources<'_>) -> Result<usize, Error> {
        let (mut changed, mut left) = (0, Allowance::default());
        let (mounts, _) = claims::used(sources.pod);
        for volume in self.volumes.iter().filter(|volume| has_content(volume)) {
            let path = self.path(&volume.name);
            // One that isn't set up yet, or is being taken away, is left alone.
            let Some(top) = open_top(&path, content::in_memory(volume))?.filter(atomic::is_set_up) else {
                continue;
            };
            if content::lacks_token(volume, sources) {
                continue;
            }
            let refreshed = content::payload(volume, sources, &mut left).and_then(|payload| match payload {
                Some(payload) => atomic::write(&path, &top, &payload, self.fs_group.as_ref()),
                None => Ok(false),
            });
            match refreshed.map_err(|e| e.of_volume(&volume.name)) {
                Err(_) if !mounts.contains(volume.name.as_str()) => {} // nobody looks at it
                refreshed => changed += usize::from(refreshed?),
            }
        }
        Ok(changed)
    }

    /// Returns true if any volume is made of objects or of what the pod is told about itself.
    pub fn have_content(&self) -> bool {
        self.volumes.iter().any(has_content)
    }

    /// The volumes that are images.
    pub fn images(&self) -> impl Iterator<Item = (&str, &core::ImageVolumeSource)> {
        self.volumes.iter().filter_map(|volume| Some((volume.name.as_str(), volume.image.as_ref()?)))
    }

    /// Reads a file of an emptyDir volume, without leaving the volume whatever containers have made in
    /// there. Of no other kind of file, and none of more than a megabyte.
    pub fn read(&self, volume: &str, path: &Path) -> Result<Vec<u8>, Error> {
        let is_own = |v: &&core::Volume| v.name == volume && v.empty_dir.is_some();
        if !self.volumes.iter().any(|v| is_own(&v)) {
            return Err(Error::unmet(format!("the pod has no emptyDir volume {volume}")));
        }
        sub_path::read(&self.path(volume), path, READ_MOST)
    }

    /// The mounts of one container. Mounts the parts of volumes that it asks for.
    ///
    /// # Errors
    /// Why one can't be mounted; or `stop` said so.
    pub fn mounts(
        &self,
        container: &core::Container,
        facts: &MountFacts,
        stop: Stop<'_>,
    ) -> Result<Vec<cri::Mount>, Error> {
        let (all, mut left) = (container.volume_mounts.iter().flatten().enumerate(), Allowance::default());
        all.map(|(index, mount)| {
            go_on(stop)?;
            self.mount((container, index), mount, facts, &mut left).map_err(|cause| Error::Mount {
                path: shown(&mount.mount_path),
                container: container.name.clone(),
                cause: Box::new(cause),
            })
        })
        .collect()
    }

    fn mount(
        &self,
        (container, index): (&core::Container, usize),
        mount: &core::VolumeMount,
        facts: &MountFacts,
        left: &mut Allowance,
    ) -> Result<cri::Mount, Error> {
        let volume = self
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
            made.image_sub_path =
                sub_path.map(|part| part.to_string_lossy().into_owned()).unwrap_or_default();
            made.readonly = true;
            return Ok(made);
        }
        made.readonly |= is_read_only(volume);
        let whole = match &volume.host_path {
            Some(host) => PathBuf::from(&host.path),
            None if is_elsewhere(volume) => self.place(&volume.name)?,
            None => self.path(&volume.name),
        };
        // What is the host's keeps its SELinux label; what the agent made gets the container's. What was
        // mounted read-only can't have it: the kubelet's plugins call that not managed. Files of ConfigMaps
        // and the like are read-only for containers alone.
        let is_changeable = !(is_elsewhere(volume) && is_read_only(volume));
        let is_network = whole.starts_with(self.folder.join(VOLUMES).join(nfs::PLUGIN));
        let may_relabel =
            || self.disks.as_ref().is_none_or(|disks| disks.flex().may_relabel(&self.folder, &whole));
        made.selinux_relabel =
            whole.starts_with(&self.folder) && !is_network && is_changeable && may_relabel();
        let source = match sub_path {
            Some(part) => {
                let name = Path::new(&volume.name).join(&container.name).join(index.to_string());
                let target = self.folder.join(SUB_PATHS).join(name);
                sub_path::mount(&whole, &part, &target)?;
                target
            }
            None => whole,
        };
        made.host_path = source.to_string_lossy().into_owned();
        Ok(made)
    }

    /// The block devices of one container.
    pub fn devices(&self, container: &core::Container) -> Result<Vec<cri::Device>, Error> {
        let all = container.volume_devices.iter().flatten();
        all.map(|device| {
            let volume = self.volumes.iter().find(|volume| volume.name == device.name);
            let none = || Error::unmet(format!("the pod has no volume {}", device.name));
            let volume = volume.filter(|volume| is_elsewhere(volume)).ok_or_else(none)?;
            Ok(cri::Device {
                container_path: device.device_path.clone(),
                host_path: self.place(&volume.name)?.to_string_lossy().into_owned(),
                permissions: if is_read_only(volume) { "r" } else { "mrw" }.to_owned(),
            })
        })
        .collect()
    }

    /// Unmounts and removes the volumes. What containers said at their end stays, and so does the rest of the
    /// folder.
    pub fn release(&self) -> Result<(), Error> {
        self.unmount(|| {
            remove_folder(&self.folder.join(SUB_PATHS))?;
            Ok(remove_folder(&self.folder.join(VOLUMES))?)
        })
    }

    /// Unmounts and removes the pod's folder. Symbolic links in it are removed, not followed.
    pub fn tear_down(&self) -> Result<(), Error> {
        self.unmount(|| Ok(remove_folder(&self.folder)?))
    }

    /// Unmounts what is mounted in the folder, then does `remove`. Counted where there is a volume to go.
    fn unmount(&self, remove: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let made = |volume: &&core::Volume| self.path(&volume.name).symlink_metadata().is_ok();
        let made: Vec<&str> = self.volumes.iter().filter(made).map(|volume| self.plugin_of(volume)).collect();
        self.operations.time(Operation::Unmount, &made, || {
            match &self.disks {
                Some(disks) => disks.unmount_all(&self.folder)?,
                None => mounts::unmount_below(&self.folder)?,
            }
            remove()
        })
    }
}

fn go_on(stop: Stop<'_>) -> Result<(), Error> {
    if stop() { Err(Error::Stopped) } else { Ok(()) }
}

/// Returns true if a volume is made of objects or of what the pod is told about itself.
fn has_content(volume: &core::Volume) -> bool {
    volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.downward_api.is_some()
        || volume.projected.is_some()
}

/// Returns true if a volume's own path is a link to where it is.
fn is_elsewhere(volume: &core::Volume) -> bool {
    claims::may_be_of_driver(volume) || volume.nfs.is_some() || is_attached(volume)
}

/// Returns true if a pod's own volume is attached to the node, or may be, by others than storage plugins.
fn is_attached(volume: &core::Volume) -> bool {
    volume.flex_volume.is_some() || volume.fc.is_some() || volume.iscsi.is_some()
}

/// Returns true if nobody may write to a volume: what is made of objects is replaced as a whole, and of a
/// claim the pod says so.
fn is_read_only(volume: &core::Volume) -> bool {
    match (&volume.persistent_volume_claim, &volume.csi, &volume.nfs) {
        (Some(claim), ..) => claim.read_only == Some(true),
        (_, Some(source), _) => source.read_only == Some(true),
        (.., Some(source)) => source.read_only == Some(true),
        _ if is_attached(volume) => {
            let said = [
                volume.flex_volume.as_ref().and_then(|source| source.read_only),
                volume.fc.as_ref().and_then(|source| source.read_only),
                volume.iscsi.as_ref().and_then(|source| source.read_only),
            ];
            said.contains(&Some(true))
        }
        _ if migration::is_migrated(volume) => migration::is_read_only(volume),
        _ => volume.empty_dir.is_none() && volume.host_path.is_none() && volume.ephemeral.is_none(),
    }
}

/// Makes a volume's top folder. Containers of any user may look into it.
fn make_top(path: &Path) -> Result<(), Error> {
    if let Some(parent) = path.parent() {
        make_folder(parent, PRIVATE)?;
    }
    make_folder(path, READABLE)?;
    // An earlier instance of the agent may have made it, under another umask.
    add_mode(path, READABLE)
}

/// Adds to the mode of a folder: the mode of one that was given to a group has more in it, which stays. By
/// its descriptor: a container may have put a link in its place.
fn add_mode(path: &Path, more: u32) -> Result<(), Error> {
    let failed = |e: Errno| Error::io("set the mode of", path)(e);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
    let mode = (rustix::fs::fstat(&folder).map_err(failed)?.st_mode | more) & 0o7777;
    rustix::fs::fchmod(&folder, Mode::from_raw_mode(mode)).map_err(failed)
}

/// Opens the top folder of a volume that is made of objects. None if it isn't there, or isn't in memory
/// though it should be: a volume's memory may be unmounted at any time, and a secret must not be written to
/// the disk below.
fn open_top(path: &Path, in_memory: bool) -> Result<Option<OwnedFd>, Error> {
    let failed = |e: Errno| Error::io("open", path)(e);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    let there = !in_memory || mounts::is_tmpfs(&top).map_err(failed)?;
    Ok(there.then_some(top))
}

/// A path in the container: one that is relative means one below its root, as to the kubelet.
fn in_container(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

/// The part of the volume that is meant, if not the whole. The agent may have to make its folders.
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

/// Returns true if the mount must be read-only with all that is mounted below it.
fn recursive_read_only(mount: &core::VolumeMount, possible: bool) -> Result<bool, Error> {
    match mount.recursive_read_only.as_deref() {
        Some("Enabled") if !possible => Err(Error::unmet(
            "recursiveReadOnly: Enabled needs a runtime and a kernel that can do it (containerd 2.0, runc 1.1, Linux \
             5.12); use IfPossible to do without",
        )),
        Some("Enabled") => Ok(true),
        Some("IfPossible") => Ok(possible && mount.read_only == Some(true)),
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests;
