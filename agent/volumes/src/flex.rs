//! Volumes of `flexVolume`: mounted by drivers, programs in a folder of the machine's, as
//! `pkg/volume/flexvolume` of Kubernetes does it, and with its paths.
//!
//! A pod's volume is at `volumes/<vendor>~<driver>/<volume>` in the pod's folder. One that is attached to the
//! node is mounted first, once for all pods, at `plugins/kubernetes.io/flexvolume/<vendor>/<driver>/mounts/
//! <volume>` of the kubelet's folder. What a driver may have done is on disk before it is asked for it, and
//! is taken back from there. A driver that hangs holds up the pods of its own volumes alone.

mod driver;

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt, fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::Arc,
};

use beelet_base::{
    blocking::blocking,
    folder::{PRIVATE, make_folder},
};
use beelet_model::storage::{Claimed, VolumesInUse};
use beelet_policy::volumes::{
    content::Allowance,
    csi,
    file_system::FileSystem,
    flex_volume::{self as policy, FlexVolume},
    remote_disk,
};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{Pod, Volume};
use tracing::warn;

use serde::{Deserialize, Serialize};

use self::driver::{Driver, Drivers};
use crate::{
    VOLUMES,
    busy::Busy,
    disk,
    error::Error,
    fs_group::{Access, FsGroup},
    mounts,
    persistent_volume::one_name,
    plugin::{AttachFacts, Attachment, Location, Spec, Target, Use, VolumePlugin, namespace_of},
    records,
};

/// Where records are in a pod's folder.
const OF_POD: &str = "plugins/kubernetes.io~flexvolume";
/// The folder with the records of devices, among those of drivers: none of them begins with a dot.
const DEVICES: &str = ".devices";

/// A volume that a pod needs, with what was found out for it.
#[derive(Clone)]
pub(crate) struct FlexWanted {
    /// The volume.
    pub volume: FlexVolume,
    /// What is in its Secret.
    pub secret: BTreeMap<String, Vec<u8>>,
    /// The device that a controller has attached to the node. None: there is no controller.
    pub device: Option<String>,
}

impl fmt::Debug for FlexWanted {
    /// Not the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { volume, device, .. } = self;
        f.debug_struct("FlexWanted").field("volume", volume).field("device", device).finish_non_exhaustive()
    }
}

/// A volume that a driver has mounted for a pod, or may have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodRecord {
    driver: String,
    /// The volume's name, of its PersistentVolume or in the pod.
    name: String,
    /// Other pods may have it too: it is attached to the node, or for one pod at a time.
    shared: bool,
    /// The driver takes SELinux labels.
    relabel: bool,
    /// How much room there is may be asked.
    metrics: bool,
}

/// A volume that a driver has mounted for all pods, or may have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DeviceRecord {
    driver: String,
    name: String,
    /// What was asked for: its options and its file system.
    asked: (BTreeMap<String, String>, String),
    /// The agent has had it attached, not a controller.
    attached_here: bool,
}

/// The volumes of drivers. Clones share them.
#[derive(Clone, Debug)]
pub struct FlexVolumes(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The node's name.
    node: String,
    /// Where devices are mounted: `<kubelet dir>/plugins/kubernetes.io/flexvolume`.
    folder: PathBuf,
    /// The folder with a folder for each pod.
    pods_dir: PathBuf,
    drivers: Drivers,
    busy: Busy,
    in_use: VolumesInUse,
}

/// A volume on its way to a pod.
struct Way<'a> {
    wanted: &'a FlexWanted,
    driver: &'a Driver,
    /// The driver's folder, as in paths.
    folder: &'a str,
}

impl FlexVolumes {
    /// Volumes of the drivers in `drivers`. What is on disk of devices is `in_use` then. Blocks.
    #[must_use]
    pub fn open(
        node: &str,
        (kubelet_dir, pods_dir): (&Path, &Path),
        drivers: &Path,
        in_use: VolumesInUse,
    ) -> Self {
        let folder = kubelet_dir.join("plugins/kubernetes.io/flexvolume");
        for (_, DeviceRecord { driver, name, .. }) in records::all(&folder.join(DEVICES)) {
            in_use.use_by(&format!("{driver}/{name}"), None);
        }
        Self(Arc::new(Inner {
            node: node.to_owned(),
            folder,
            pods_dir: pods_dir.to_owned(),
            drivers: Drivers::new(drivers),
            busy: Busy::default(),
            in_use,
        }))
    }

    /// Returns true if a driver's volumes are attached to a node before they are mounted. Blocks: a driver
    /// that nobody has called is asked.
    ///
    /// # Errors
    /// The driver is not there, or does not answer.
    fn attaches(&self, driver: &str) -> Result<bool, Error> {
        Ok(self.0.drivers.get(driver)?.capabilities.attach)
    }

    /// Says that a pod will use a volume that a controller attaches: it detaches it no more.
    fn use_by(&self, volume: &FlexVolume, uid: &str) {
        self.0.in_use.use_by(&volume.unique_name(), Some(uid));
    }

    /// Has a volume mounted for the pod with this folder, also where it is mounted already. Returns its
    /// place.
    fn mount_for_pod(
        &self,
        folder: &Path,
        pod: &Pod,
        wanted: &FlexWanted,
        group: Option<&FsGroup>,
    ) -> Result<PathBuf, Error> {
        let volume = &wanted.volume;
        let name = one_name(&volume.name)?;
        let driver = self.0.drivers.get(&volume.driver)?;
        let of_driver = policy::folder_of(&volume.driver).unwrap_or_default();
        check_no_namesake(pod, &of_driver)?;
        let target = folder.join(VOLUMES).join(&of_driver).join(name);
        let can = driver.capabilities;
        let shared = can.attach || volume.for_one_pod;
        let _held = self.0.busy.hold(&key(folder, &volume.unique_name(), shared));
        let place = record_of(folder, &of_driver, name);
        if mounts::is_mount_point(&target)? && records::read::<PodRecord>(&place)?.is_some() {
            return Ok(target);
        }
        if volume.for_one_pod && self.has_another(&volume.driver, name, folder) {
            return Err(Error::unmet(
                "volume uses the ReadWriteOncePod access mode and is already in use by another pod",
            ));
        }
        let way = Way { wanted, driver: &driver, folder: &of_driver };
        if can.attach {
            // Before the record: a pod that is refused has no part in what the other has.
            self.check_asked(&way, folder)?;
        }
        let record = PodRecord {
            driver: volume.driver.clone(),
            name: name.to_owned(),
            shared,
            relabel: can.relabel,
            metrics: can.metrics,
        };
        records::write(&place, &record)?;
        if can.attach {
            self.mount_device(&way)?;
        }
        self.mount(&way, pod, &target, group.map(FsGroup::id))?;
        if let Some(group) = group.filter(|_| can.group && !volume.read_only)
            && let Err(why) = group.own(&target, Access::ReadWrite)
        {
            // As under the kubelet: the pod runs all the same.
            warn!("a flexVolume's files could not be given to the pod's group: {why}");
        }
        Ok(target)
    }

    /// Has the driver mount a volume for a pod, or, if it leaves that to others, shows what is mounted for
    /// all.
    fn mount(&self, way: &Way<'_>, pod: &Pod, target: &Path, group: Option<u32>) -> Result<(), Error> {
        let volume = &way.wanted.volume;
        let options = volume.options(policy::of_mount(pod, group, &way.wanted.secret));
        let secrets = policy::secrets(&options, &way.wanted.secret);
        make_folder(target, PRIVATE)?;
        let told = [target.as_os_str(), OsStr::new(&options)];
        let mounted = match way.driver.call_with("mount", &told, &secrets) {
            Ok(None) => {
                let options: &[String] = if volume.read_only { &["ro".to_owned()] } else { &[] };
                disk::bind(&self.device_path(way.folder, &volume.name), target, options)
            }
            called => called.map(drop),
        };
        if mounted.is_err() {
            // The next try makes it again.
            let _ = fs::remove_dir(target);
        }
        mounted
    }

    /// Refuses a volume that another pod has under the same name, and asked for otherwise: what is attached
    /// is told apart by driver and name alone.
    fn check_asked(&self, way: &Way<'_>, folder: &Path) -> Result<(), Error> {
        let volume = &way.wanted.volume;
        let known = records::read::<DeviceRecord>(&self.device_record(way.folder, &volume.name))?;
        let Some(known) = known.filter(|_| self.has_another(&volume.driver, &volume.name, folder)) else {
            return Ok(());
        };
        if known.asked == asked(volume) {
            return Ok(());
        }
        Err(Error::unmet(format!(
            "another pod has a volume {:?} of the flexVolume driver {:?} with other options: rename one of them",
            volume.name, volume.driver
        )))
    }

    /// Mounts an attached volume once for all pods. No other pod has one of this name that was asked for
    /// otherwise: see `check_asked`.
    fn mount_device(&self, way: &Way<'_>) -> Result<(), Error> {
        let FlexWanted { volume, device, .. } = way.wanted;
        let (target, place) =
            (self.device_path(way.folder, &volume.name), self.device_record(way.folder, &volume.name));
        match records::read::<DeviceRecord>(&place)? {
            // What a pod that is gone has left behind is another volume, of the same name.
            Some(known) if known.asked != asked(volume) => {
                self.release_device(&volume.driver, way.folder, &volume.name)?;
            }
            Some(_) if mounts::is_mount_point(&target)? => return Ok(()),
            _ => {}
        }
        let options = volume.options(BTreeMap::new());
        let options = OsStr::new(&options);
        let record = DeviceRecord {
            driver: volume.driver.clone(),
            name: volume.name.clone(),
            asked: asked(volume),
            attached_here: device.is_none(),
        };
        records::write(&place, &record)?;
        let device = match device {
            Some(device) => device.clone(),
            None => {
                let attached = way.driver.call("attach", &[options, OsStr::new(&self.0.node)])?;
                attached.map(|answer| answer.device).unwrap_or_default()
            }
        };
        let found = way.driver.call("waitforattach", &[OsStr::new(&device), options])?;
        let device = found.map_or(device, |answer| answer.device);
        make_folder(&target, PRIVATE)?;
        let told = [target.as_os_str(), OsStr::new(&device), options];
        let mounted = match way.driver.call("mountdevice", &told) {
            // Without a device there is nothing to mount.
            Ok(None) if device.is_empty() => Ok(()),
            Ok(None) => mount_disk(&device, &target, volume),
            called => called.map(drop),
        };
        if mounted.is_err() {
            let _ = fs::remove_dir(&target);
        }
        mounted
    }

    /// Where a volume is mounted for all pods.
    fn device_path(&self, driver: &str, name: &str) -> PathBuf {
        self.0.folder.join(driver.replace('~', "/")).join("mounts").join(name)
    }

    fn device_record(&self, driver: &str, name: &str) -> PathBuf {
        self.0.folder.join(DEVICES).join(driver).join(name)
    }

    /// Returns true if a pod with another folder has a volume, or may have.
    fn has_another(&self, driver: &str, name: &str, folder: &Path) -> bool {
        let folder_of = policy::folder_of(driver).unwrap_or_default();
        let has = |pod: &PathBuf| records::exists(&record_of(pod, &folder_of, name));
        records::folders(&self.0.pods_dir).iter().any(|pod| pod != folder && has(pod))
    }

    /// Has all volumes of the pod with this folder taken away, and the devices that were the pod's alone.
    /// Harmless to repeat.
    ///
    /// # Errors
    /// A driver is not there, or can't: the pod can't go yet.
    fn release(&self, folder: &Path) -> Result<(), Error> {
        let all = records::all::<PodRecord>(&folder.join(OF_POD));
        let released = all.iter().map(|(place, record)| self.release_one(folder, place, record));
        // Each is tried, whatever becomes of the others.
        let released: Vec<Result<(), Error>> = released.collect();
        released.into_iter().collect::<Result<(), Error>>()?;
        let uid = folder.file_name().unwrap_or_default().to_string_lossy();
        let is_ours = |name: &str| !csi::is_unique_name(name) && !remote_disk::is_unique_name(name);
        self.0.in_use.leave(&uid, is_ours);
        for name in self.0.in_use.unused().into_iter().filter(|name| is_ours(name)) {
            if !self.has_device(&name) {
                self.0.in_use.forget(&name);
            }
        }
        Ok(())
    }

    /// Returns true if anything is on disk of a device, by its unique name.
    fn has_device(&self, name: &str) -> bool {
        let Some((driver, name)) = name.rsplit_once('/') else { return false };
        policy::folder_of(driver).is_some_and(|folder| records::exists(&self.device_record(&folder, name)))
    }

    fn release_one(&self, folder: &Path, place: &Path, record: &PodRecord) -> Result<(), Error> {
        let PodRecord { driver, name, .. } = record;
        let of_driver = policy::folder_of(driver);
        let of_driver = of_driver.ok_or_else(|| Error::unmet(format!("{driver:?} is no driver")))?;
        let name = one_name(name)?;
        let _held = self.0.busy.hold(&key(folder, &format!("{driver}/{name}"), record.shared));
        let target = folder.join(VOLUMES).join(&of_driver).join(name);
        if is_there(&target) {
            // What containers have mounted in it would keep the driver from unmounting it.
            mounts::unmount_within(&target)?;
            self.unmount("unmount", driver, &target)?;
        }
        if record.shared && !self.has_another(driver, name, folder) {
            self.release_device(driver, &of_driver, name)?;
        }
        // Last: an agent that is killed before does all of it again.
        records::remove(place)
    }

    /// Has a device taken away that no pod has.
    fn release_device(&self, driver: &str, of_driver: &str, name: &str) -> Result<(), Error> {
        let place = self.device_record(of_driver, name);
        let Some(record) = records::read::<DeviceRecord>(&place)? else { return Ok(()) };
        let target = self.device_path(of_driver, name);
        if mounts::is_mount_point(&target)? {
            self.unmount("unmountdevice", driver, &target)?;
        } else {
            let _ = fs::remove_dir(&target);
        }
        if record.attached_here {
            let told = [OsStr::new(name), OsStr::new(&self.0.node)];
            self.0.drivers.get(driver)?.call("detach", &told)?;
        }
        records::remove(&place)?;
        Ok(())
    }

    /// Has a driver unmount what it has mounted, or does it where the driver leaves it to others.
    fn unmount(&self, command: &'static str, driver: &str, target: &Path) -> Result<(), Error> {
        let done = self.0.drivers.get(driver)?.call(command, &[target.as_os_str()])?;
        if done.is_none() && mounts::is_mount_point(target)? {
            mounts::unmount(target)?;
        }
        if mounts::is_mount_point(target)? {
            return Err(Error::unmet(format!(
                "{} is mounted still, though the driver {driver} said that it unmounted it",
                target.display()
            )));
        }
        // What a driver has left in it goes with the pod's folder.
        let _ = fs::remove_dir(target);
        Ok(())
    }
}

/// The record of the pod's volume at `target`. None if no driver has it.
fn record_at(folder: &Path, target: &Path) -> Option<PodRecord> {
    let mut parts = target.strip_prefix(folder.join(VOLUMES)).ok()?.components();
    let (driver, name) = (parts.next()?, parts.next()?);
    let place = record_of(folder, driver.as_os_str().to_str()?, name.as_os_str().to_str()?);
    records::read(&place).ok()?
}

/// The kubelet's name of the plugin of all drivers: the drivers' own names are not bounded.
const NAME: &str = "kubernetes.io/flexvolume";

/// The kubelet's name of the plugin of flexVolume volumes.
pub(crate) fn plugin_name(spec: &Spec<'_>) -> Option<&'static str> {
    let is_ours =
        spec.is_kind(|claimed| claimed.flex_volume.is_some(), |volume| volume.flex_volume.is_some());
    is_ours.then_some(NAME)
}

/// The volume as its driver is asked for it.
fn volume_of(spec: &Spec<'_>, namespace: &str) -> Result<FlexVolume, Error> {
    let found = match spec.claimed {
        Some(Claimed { volume, read_only, .. }) => policy::of_claim(volume, *read_only, namespace),
        None => policy::of_pod(spec.volume, namespace).map(Ok),
    };
    found.unwrap_or_else(|| Err("the volume has no flexVolume".to_owned())).map_err(Error::unmet)
}

impl VolumePlugin for FlexVolumes {
    fn name(&self, spec: &Spec<'_>) -> Option<&'static str> {
        plugin_name(spec)
    }

    fn location(&self, _volume: &Volume) -> Location {
        Location::Linked
    }

    fn is_read_only(&self, volume: &Volume) -> bool {
        volume.flex_volume.as_ref().is_some_and(|source| source.read_only == Some(true))
    }

    fn is_due(&self, spec: &Spec<'_>, used: Use, _attachment: Option<&Attachment>) -> bool {
        spec.is_claimed_or_mounted(used)
    }

    /// Waits until a controller has attached the volume, where its driver attaches volumes and there is a
    /// controller. On a node of its own the agent attaches it when it is set up.
    fn attach<'a>(
        &'a self,
        spec: Spec<'a>,
        facts: AttachFacts<'a>,
    ) -> BoxFuture<'a, Result<Option<Attachment>, Error>> {
        Box::pin(async move {
            let name = &spec.volume.name;
            let found = volume_of(&spec, namespace_of(facts.pod))?;
            let (drivers, driver) = (self.clone(), found.driver.clone());
            let asked = blocking("asking a flexVolume driver", move || drivers.attaches(&driver)).await;
            // Without the driver, the kubelet's words.
            let is_attached = asked.map_err(|why| Error::Claims {
                volumes: vec![name.clone()],
                why: format!("failed to get Plugin from volumeSpec for volume {:?} err={why}", found.name),
            })?;
            let device = match facts.storage.filter(|_| is_attached) {
                Some(storage) => {
                    self.use_by(&found, facts.uid());
                    Some(AttachFacts::attached(storage, name, &found.unique_name()).await?)
                }
                None => None,
            };
            let secret = match &found.secret {
                Some(named) => facts.secret(Some(&found.driver), named).await?,
                None => BTreeMap::new(),
            };
            Ok(Some(Attachment { secret, device, published: None }))
        })
    }

    fn set_up(
        &self,
        spec: &Spec<'_>,
        target: &Target<'_>,
        _left: &mut Allowance,
    ) -> Result<Option<PathBuf>, Error> {
        let Some(Attachment { secret, device, .. }) = target.attachment(spec) else {
            return Err(Error::unmet("it is not known whether the volume is attached"));
        };
        let pod = target.sources.pod;
        let volume = volume_of(spec, namespace_of(pod))?;
        let wanted = FlexWanted { volume, secret: secret.clone(), device: device.clone() };
        self.mount_for_pod(target.folder, pod, &wanted, target.fs_group).map(Some)
    }

    fn tear_down(&self, folder: &Path) -> Result<(), Error> {
        self.release(folder)
    }

    fn name_of_place(&self, folder: &Path, place: &Path) -> Option<&'static str> {
        record_at(folder, place).map(|_| NAME)
    }

    fn may_relabel(&self, folder: &Path, place: &Path) -> bool {
        record_at(folder, place).is_none_or(|record| record.relabel)
    }

    fn is_measured(&self, folder: &Path, place: &Path) -> bool {
        record_at(folder, place).is_none_or(|record| record.metrics)
    }
}

/// Where the record of a pod's volume is, by the pod's folder and the driver's.
fn record_of(folder: &Path, driver: &str, name: &str) -> PathBuf {
    folder.join(OF_POD).join(driver).join(name)
}

/// What tells a volume from others of its name: its options and its file system.
fn asked(volume: &FlexVolume) -> (BTreeMap<String, String>, String) {
    (volume.options.clone(), volume.file_system.clone())
}

/// What is worked on alone: a volume that several pods may have, or that of one pod.
fn key(folder: &Path, unique_name: &str, shared: bool) -> String {
    let pod = folder.file_name().filter(|_| !shared).unwrap_or_default();
    format!("{}/{unique_name}", pod.to_string_lossy())
}

/// Refuses a driver whose folder is called as one of the pod's volumes is.
fn check_no_namesake(pod: &Pod, folder: &str) -> Result<(), Error> {
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    if volumes.any(|volume| volume.name == folder) {
        return Err(Error::unmet(format!(
            "a volume of the pod is called as the flexVolume driver {folder:?} is: rename it"
        )));
    }
    Ok(())
}

/// Mounts a device for a driver that leaves it to others.
fn mount_disk(device: &str, target: &Path, volume: &FlexVolume) -> Result<(), Error> {
    if !device.starts_with('/') || device.contains('\0') {
        return Err(Error::unmet(format!("{device:?} is no path of a device")));
    }
    let file_system = FileSystem::of(&volume.file_system).map_err(Error::unmet_of)?;
    disk::mount(Path::new(device), target, file_system, volume.read_only, &[])
}

/// Returns true unless there certainly is nothing: what a dead file system is mounted on can't be looked at.
fn is_there(path: &Path) -> bool {
    !matches!(fs::symlink_metadata(path), Err(why) if why.kind() == ErrorKind::NotFound)
}

#[cfg(test)]
mod tests;
