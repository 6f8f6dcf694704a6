//! flexVolume volumes: drivers, which are programs in a folder of the machine, mount them, with the behaviour
//! and the paths of Kubernetes' `pkg/volume/flexvolume`.
//!
//! A pod's volume is at `volumes/<vendor>~<driver>/<volume>` in the pod's folder. A volume that is attached
//! to the node is mounted first, once for all pods, at
//! `plugins/kubernetes.io/flexvolume/<vendor>/<driver>/mounts/<volume>` of the kubelet's folder. The agent
//! writes a record to disk before it calls a driver, and releases volumes by these records. A hanging driver
//! delays only the pods of its own volumes.

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

/// Folder of the records in a pod's folder.
const OF_POD: &str = "plugins/kubernetes.io~flexvolume";
/// Folder of the records of devices, among the drivers' folders, whose names never begin with a dot.
const DEVICES: &str = ".devices";

/// A volume that a pod needs, with the facts that its attachment revealed.
#[derive(Clone)]
pub(crate) struct FlexWanted {
    /// Volume.
    pub volume: FlexVolume,
    /// Content of the volume's Secret.
    pub secret: BTreeMap<String, Vec<u8>>,
    /// Device that a controller has attached to the node. None on a node without controllers.
    pub device: Option<String>,
}

impl fmt::Debug for FlexWanted {
    /// Omits the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { volume, device, .. } = self;
        f.debug_struct("FlexWanted").field("volume", volume).field("device", device).finish_non_exhaustive()
    }
}

/// A volume that a driver has, or may have, mounted for a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodRecord {
    driver: String,
    /// Name of the PersistentVolume, or of the volume in the pod.
    name: String,
    /// Other pods may refer to the volume: it is attached to the node, or is for one pod at a time.
    shared: bool,
    /// The driver supports SELinux labels.
    relabel: bool,
    /// The driver allows measuring the volume.
    metrics: bool,
}

/// A volume that a driver has, or may have, mounted for all pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DeviceRecord {
    driver: String,
    name: String,
    /// Requested options and file system.
    asked: (BTreeMap<String, String>, String),
    /// The agent attached the volume, not a controller.
    attached_here: bool,
}

/// Volumes of flexVolume drivers. Clones share them.
#[derive(Clone, Debug)]
pub struct FlexVolumes(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Name of the node.
    node: String,
    /// Folder of the mounted devices: `<kubelet dir>/plugins/kubernetes.io/flexvolume`.
    folder: PathBuf,
    /// Folder with a folder for each pod.
    pods_dir: PathBuf,
    drivers: Drivers,
    busy: Busy,
    in_use: VolumesInUse,
}

/// A volume that is being mounted for a pod.
struct Way<'a> {
    wanted: &'a FlexWanted,
    driver: &'a Driver,
    /// Name of the driver's folder in paths.
    folder: &'a str,
}

impl FlexVolumes {
    /// Opens the volumes of the drivers in `drivers`. Marks recorded devices as `in_use`. Blocks.
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

    /// Returns true if a driver's volumes are attached to a node before they are mounted. Blocks: the first
    /// use of a driver calls its `init`.
    ///
    /// # Errors
    /// The driver is not installed or does not answer.
    fn attaches(&self, driver: &str) -> Result<bool, Error> {
        Ok(self.0.drivers.get(driver)?.capabilities.attach)
    }

    /// Records that a pod will use a volume that a controller attaches, so that the controller does not
    /// detach the volume.
    fn use_by(&self, volume: &FlexVolume, uid: &str) {
        self.0.in_use.use_by(&volume.unique_name(), Some(uid));
    }

    /// Mounts a volume for the pod with this folder, unless it is mounted already. Returns the volume's path.
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
            // Before the record is written, so that a refused pod does not count as a user of the device.
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
            // As under the kubelet, the pod runs nevertheless.
            warn!("cannot apply fsGroup to a flexVolume: {why}");
        }
        Ok(target)
    }

    /// Makes the driver mount a volume for a pod. If the driver has no `mount` command, bind mounts the
    /// device that is mounted for all pods.
    fn mount(&self, way: &Way<'_>, pod: &Pod, target: &Path, group: Option<u32>) -> Result<(), Error> {
        let volume = &way.wanted.volume;
        let options = volume.options(policy::of_mount(pod, group, &way.wanted.secret));
        let secrets = policy::secrets(&options, &way.wanted.secret);
        make_folder(target, PRIVATE)?;
        let arguments = [target.as_os_str(), OsStr::new(&options)];
        let mounted = match way.driver.call_with("mount", &arguments, &secrets) {
            Ok(None) => {
                let options: &[String] = if volume.read_only { &["ro".to_owned()] } else { &[] };
                disk::bind(&self.device_path(way.folder, &volume.name), target, options)
            }
            called => called.map(drop),
        };
        if mounted.is_err() {
            // The next attempt makes the folder again.
            let _ = fs::remove_dir(target);
        }
        mounted
    }

    /// Refuses a volume if another pod has a volume of the same name with other options: only driver and name
    /// identify an attached device.
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

    /// Mounts an attached volume once for all pods. No other pod has a volume of this name with other
    /// options: `check_asked` made sure.
    fn mount_device(&self, way: &Way<'_>) -> Result<(), Error> {
        let FlexWanted { volume, device, .. } = way.wanted;
        let (target, place) =
            (self.device_path(way.folder, &volume.name), self.device_record(way.folder, &volume.name));
        match records::read::<DeviceRecord>(&place)? {
            // A removed pod left another volume of the same name behind.
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
        let arguments = [target.as_os_str(), OsStr::new(&device), options];
        let mounted = match way.driver.call("mountdevice", &arguments) {
            // A volume without a device needs no mount.
            Ok(None) if device.is_empty() => Ok(()),
            Ok(None) => mount_disk(&device, &target, volume),
            called => called.map(drop),
        };
        if mounted.is_err() {
            let _ = fs::remove_dir(&target);
        }
        mounted
    }

    /// Returns the path where a volume is mounted for all pods.
    fn device_path(&self, driver: &str, name: &str) -> PathBuf {
        self.0.folder.join(driver.replace('~', "/")).join("mounts").join(name)
    }

    fn device_record(&self, driver: &str, name: &str) -> PathBuf {
        self.0.folder.join(DEVICES).join(driver).join(name)
    }

    /// Returns true if a pod with another folder has, or may have, the volume.
    fn has_another(&self, driver: &str, name: &str, folder: &Path) -> bool {
        let folder_of = policy::folder_of(driver).unwrap_or_default();
        let has = |pod: &PathBuf| records::exists(&record_of(pod, &folder_of, name));
        records::folders(&self.0.pods_dir).iter().any(|pod| pod != folder && has(pod))
    }

    /// Unmounts all volumes of the pod with this folder, and detaches the devices that no other pod has.
    /// Idempotent.
    ///
    /// # Errors
    /// A driver is not installed or fails: the pod cannot be removed yet.
    fn release(&self, folder: &Path) -> Result<(), Error> {
        let all = records::all::<PodRecord>(&folder.join(OF_POD));
        let released = all.iter().map(|(place, record)| self.release_one(folder, place, record));
        // The failure of a volume does not keep the others from being released.
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

    /// Returns true if the device with this unique name has a record.
    fn has_device(&self, name: &str) -> bool {
        let Some((driver, name)) = name.rsplit_once('/') else { return false };
        policy::folder_of(driver).is_some_and(|folder| records::exists(&self.device_record(&folder, name)))
    }

    fn release_one(&self, folder: &Path, place: &Path, record: &PodRecord) -> Result<(), Error> {
        let PodRecord { driver, name, .. } = record;
        let of_driver = policy::folder_of(driver);
        let of_driver =
            of_driver.ok_or_else(|| Error::unmet(format!("{driver:?} is not the name of a driver")))?;
        let name = one_name(name)?;
        let _held = self.0.busy.hold(&key(folder, &format!("{driver}/{name}"), record.shared));
        let target = folder.join(VOLUMES).join(&of_driver).join(name);
        if is_there(&target) {
            // Mounts that containers made in the volume would keep the driver from unmounting it.
            mounts::unmount_within(&target)?;
            self.unmount("unmount", driver, &target)?;
        }
        if record.shared && !self.has_another(driver, name, folder) {
            self.release_device(driver, &of_driver, name)?;
        }
        // Last, so that an agent that is killed before this point releases the volume again.
        records::remove(place)
    }

    /// Unmounts and detaches a device that no pod has.
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
            let arguments = [OsStr::new(name), OsStr::new(&self.0.node)];
            self.0.drivers.get(driver)?.call("detach", &arguments)?;
        }
        records::remove(&place)?;
        Ok(())
    }

    /// Makes a driver unmount `target`, or unmounts it if the driver does not have the command.
    fn unmount(&self, command: &'static str, driver: &str, target: &Path) -> Result<(), Error> {
        let done = self.0.drivers.get(driver)?.call(command, &[target.as_os_str()])?;
        if done.is_none() && mounts::is_mount_point(target)? {
            mounts::unmount(target)?;
        }
        if mounts::is_mount_point(target)? {
            return Err(Error::unmet(format!(
                "{} is still mounted, although driver {driver} reported success for {command}",
                target.display()
            )));
        }
        // The removal of the pod's folder removes files that a driver left here.
        let _ = fs::remove_dir(target);
        Ok(())
    }
}

/// Returns the record of the pod's volume at `target`. None if the volume belongs to no driver.
fn record_at(folder: &Path, target: &Path) -> Option<PodRecord> {
    let mut parts = target.strip_prefix(folder.join(VOLUMES)).ok()?.components();
    let (driver, name) = (parts.next()?, parts.next()?);
    let place = record_of(folder, driver.as_os_str().to_str()?, name.as_os_str().to_str()?);
    records::read(&place).ok()?
}

/// The kubelet's plugin name for all drivers: the number of drivers' own names has no limit.
const NAME: &str = "kubernetes.io/flexvolume";

/// Returns the kubelet's name of the plugin of flexVolume volumes.
pub(crate) fn plugin_name(spec: &Spec<'_>) -> Option<&'static str> {
    let is_ours =
        spec.is_kind(|claimed| claimed.flex_volume.is_some(), |volume| volume.flex_volume.is_some());
    is_ours.then_some(NAME)
}

/// Returns the volume in the form that its driver needs.
fn volume_of(spec: &Spec<'_>, namespace: &str) -> Result<FlexVolume, Error> {
    let found = match spec.claimed {
        Some(Claimed { volume, read_only, .. }) => policy::of_claim(volume, *read_only, namespace),
        None => policy::of_pod(spec.volume, namespace).map(Ok),
    };
    found.ok_or_else(|| Error::unmet("the volume has no flexVolume"))?.map_err(Error::unmet_of)
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

    /// Waits until a controller has attached the volume, if its driver attaches volumes and the node belongs
    /// to a cluster. On a standalone node the agent attaches the volume during its setup.
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
            // The kubelet's text for a missing driver.
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
            return Err(Error::unmet("cannot determine whether the volume is attached"));
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

/// Returns the path of the record of a pod's volume, in the pod's folder.
fn record_of(folder: &Path, driver: &str, name: &str) -> PathBuf {
    folder.join(OF_POD).join(driver).join(name)
}

/// Returns the options and the file system of a volume, which distinguish volumes of the same name.
fn asked(volume: &FlexVolume) -> (BTreeMap<String, String>, String) {
    (volume.options.clone(), volume.file_system.clone())
}

/// Returns the key of the lock of a volume, which includes the pod unless several pods may have the volume.
fn key(folder: &Path, unique_name: &str, shared: bool) -> String {
    let pod = folder.file_name().filter(|_| !shared).unwrap_or_default();
    format!("{}/{unique_name}", pod.to_string_lossy())
}

/// Refuses a driver whose folder has the name of a volume of the pod.
fn check_no_namesake(pod: &Pod, folder: &str) -> Result<(), Error> {
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    if volumes.any(|volume| volume.name == folder) {
        return Err(Error::unmet(format!(
            "a volume of the pod has the name of the flexVolume driver's folder: rename the volume {folder:?}"
        )));
    }
    Ok(())
}

/// Mounts a device for a driver without the command `mountdevice`.
fn mount_disk(device: &str, target: &Path, volume: &FlexVolume) -> Result<(), Error> {
    if !device.starts_with('/') || device.contains('\0') {
        return Err(Error::unmet(format!("{device:?} is not the path of a device")));
    }
    let file_system = FileSystem::of(&volume.file_system).map_err(Error::unmet_of)?;
    disk::mount(Path::new(device), target, file_system, volume.read_only, &[])
}

/// Returns true unless the path certainly does not exist: the mount point of a dead file system gives an
/// error.
fn is_there(path: &Path) -> bool {
    !matches!(fs::symlink_metadata(path), Err(why) if why.kind() == ErrorKind::NotFound)
}

#[cfg(test)]
mod tests;
