//! Network disks (`iscsi`, `fc`), with the behaviour and the paths of Kubernetes' `pkg/volume/iscsi` and
//! `pkg/volume/fc`. A disk is mounted once for all pods below `plugins/kubernetes.io/<kind>` of the kubelet's
//! folder, and bind mounted at `volumes/kubernetes.io~<kind>/<volume>` in the pod's folder, or is a block
//! device of containers. After the last pod, the agent deletes the disk from the kernel.
//!
//! The agent writes a record to disk before each step, and releases disks by these records. A disk that does
//! not answer delays only its own pods. Must never delete a disk that is mounted anywhere.

mod fc;
mod iscsi;
mod machine;

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use beelet_base::folder::{PRIVATE, make_folder};
use beelet_model::storage::{Claimed, VolumesInUse};
use beelet_policy::volumes::{
    content::Allowance,
    remote_disk::{self as policy, IscsiDisk, RemoteDisk, RemoteVolume, is_unique_name},
};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Volume;
use serde::{Deserialize, Serialize};

use self::{iscsi::Login, machine::Machine};
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

/// The kubelet's names of these kinds of volumes in paths.
const FC: &str = "kubernetes.io~fc";
const ISCSI: &str = "kubernetes.io~iscsi";
/// Folder of the records in a pod's folder.
const OF_POD: &str = "plugins/kubernetes.io~remote-disk";
/// Folder of the records of disks, next to the mounted disks.
const DISKS: &str = ".disks";

/// A volume that a pod needs, with the content of the volume's Secret.
#[derive(Clone)]
pub(crate) struct RemoteWanted {
    /// Volume.
    pub volume: RemoteVolume,
    /// Content of the volume's Secret.
    pub secret: BTreeMap<String, String>,
}

impl fmt::Debug for RemoteWanted {
    /// Omits the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteWanted").field("volume", &self.volume).finish_non_exhaustive()
    }
}

/// A disk that a pod has or may have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodRecord {
    name: String,
    disk: RemoteDisk,
}

/// A disk that is or may be on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct DiskRecord {
    disk: RemoteDisk,
    /// Disk's device; None until it is found.
    device: Option<PathBuf>,
}

/// Network disks. Clones share them.
#[derive(Clone, Debug)]
pub struct RemoteDisks(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// `<kubelet dir>/plugins`.
    plugins: PathBuf,
    /// Folder with a folder for each pod.
    pods_dir: PathBuf,
    machine: Machine,
    busy: Busy,
    in_use: VolumesInUse,
}

/// Returns the name of a disk's kind in paths.
fn plugin_in_paths(disk: &RemoteDisk) -> String {
    disk.plugin().replace('/', "~")
}

impl RemoteDisks {
    /// Opens the disks that are mounted in the kubelet's folder. Marks recorded disks as `in_use`. Blocks.
    #[must_use]
    pub fn open((kubelet_dir, pods_dir): (&Path, &Path), in_use: VolumesInUse) -> Self {
        Self::on(Machine::own(), (kubelet_dir, pods_dir), in_use)
    }

    fn on(machine: Machine, (kubelet_dir, pods_dir): (&Path, &Path), in_use: VolumesInUse) -> Self {
        let plugins = kubelet_dir.join("plugins");
        for kind in ["fc", "iscsi"] {
            for (_, DiskRecord { disk, .. }) in
                records::all(&plugins.join("kubernetes.io").join(kind).join(DISKS))
            {
                in_use.use_by(&disk.unique_name(), None);
            }
        }
        let pods_dir = pods_dir.to_owned();
        Self(Arc::new(Inner { plugins, pods_dir, machine, busy: Busy::default(), in_use }))
    }

    /// Records that a pod will use a volume that a controller attaches, so that the controller does not
    /// detach the volume.
    fn use_by(&self, volume: &RemoteVolume, uid: &str) {
        self.0.in_use.use_by(&volume.disk.unique_name(), Some(uid));
    }

    /// Mounts a disk for the pod with this folder, or finds the disk's device for a block volume. Idempotent.
    /// Returns the path.
    fn mount_for_pod(
        &self,
        folder: &Path,
        wanted: &RemoteWanted,
        group: Option<&FsGroup>,
    ) -> Result<PathBuf, Error> {
        let volume = &wanted.volume;
        let name = one_name(&volume.name)?;
        let plugin = plugin_in_paths(&volume.disk);
        let target = folder.join(VOLUMES).join(&plugin).join(name);
        let unique = volume.disk.unique_name();
        let _held = self.0.busy.hold(&unique);
        let place = folder.join(OF_POD).join(&plugin).join(name);
        let is_known = records::read::<PodRecord>(&place)?.is_some();
        if is_known && !volume.is_block && mounts::is_mount_point(&target)? {
            return Ok(target);
        }
        if volume.for_one_pod && self.others(&place).iter().any(|other| other.disk.unique_name() == unique) {
            return Err(Error::unmet(
                "volume uses the ReadWriteOncePod access mode and is already in use by another pod",
            ));
        }
        records::write(&place, &PodRecord { name: name.to_owned(), disk: volume.disk.clone() })?;
        let device = self.find(wanted)?;
        if volume.is_block {
            return Ok(device);
        }
        let mounted = self.mounted_at(&volume.disk);
        disk::mount(&device, &mounted, volume.file_system, volume.read_only, &volume.options)?;
        let mut options = volume.options.clone();
        options.extend(volume.read_only.then(|| "ro".to_owned()));
        make_folder(&target, PRIVATE)?;
        disk::bind(&mounted, &target, &options)?;
        if let Some(group) = group.filter(|_| !volume.read_only)
            && let Err(error) = group.own(&target, Access::ReadWrite)
        {
            // The next attempt would regard a mounted volume as done.
            mounts::unmount(&target)?;
            return Err(error);
        }
        Ok(target)
    }

    /// Finds the device of a disk.
    fn find(&self, wanted: &RemoteWanted) -> Result<PathBuf, Error> {
        let disk = &wanted.volume.disk;
        let place = self.record_of(disk);
        let known = records::read::<DiskRecord>(&place)?;
        let device = known.as_ref().and_then(|known| known.device.as_ref()).filter(|device| device.exists());
        if let Some(device) = device
            && mounts::is_mount_point(&self.mounted_at(disk))?
        {
            return Ok(device.clone());
        }
        // A known device stays in the record: another pod may have the disk.
        let mut record = known.unwrap_or_else(|| DiskRecord { disk: disk.clone(), device: None });
        records::write(&place, &record)?;
        let found = match disk {
            RemoteDisk::Fc(disk) => fc::find(&self.0.machine, disk)?,
            RemoteDisk::Iscsi(disk) => {
                // Several disks share the login to their target.
                let _held = self.0.busy.hold(&target_of(disk));
                Login { machine: &self.0.machine, disk, secret: &wanted.secret }.find()?
            }
        };
        record.device = Some(found.clone());
        records::write(&place, &record)?;
        Ok(found)
    }

    fn folder_of(&self, disk: &RemoteDisk) -> PathBuf {
        self.0.plugins.join(disk.plugin())
    }

    /// Returns the path where a disk is mounted for all pods.
    fn mounted_at(&self, disk: &RemoteDisk) -> PathBuf {
        self.folder_of(disk).join(disk.folder())
    }

    /// Returns the path of the record of a disk: two folders deep for both kinds of disks.
    fn record_of(&self, disk: &RemoteDisk) -> PathBuf {
        let folder = self.folder_of(disk).join(DISKS);
        match disk {
            RemoteDisk::Fc(_) => folder.join("all").join(disk.folder()),
            RemoteDisk::Iscsi(_) => folder.join(disk.folder()),
        }
    }

    /// Returns the records of all pods' disks, except the record at `than`.
    fn others(&self, than: &Path) -> Vec<PodRecord> {
        let pods = records::folders(&self.0.pods_dir);
        let all = pods.iter().flat_map(|pod| records::all(&pod.join(OF_POD)));
        all.filter(|(place, _)| place != than).map(|(_, record)| record).collect()
    }

    /// Unmounts all disks of the pod with this folder, and deletes from the kernel those that no other pod
    /// has. Idempotent.
    ///
    /// # Errors
    /// A mount is in use, or the logout from a target fails: the pod cannot be removed yet.
    fn release(&self, folder: &Path) -> Result<(), Error> {
        let all = records::all(&folder.join(OF_POD));
        let released = all.iter().map(|(place, record)| self.release_one(folder, place, record));
        // The failure of a disk does not keep the others from being released.
        let released: Vec<Result<(), Error>> = released.collect();
        released.into_iter().collect::<Result<(), Error>>()?;
        let uid = folder.file_name().unwrap_or_default().to_string_lossy();
        self.0.in_use.leave(&uid, is_unique_name);
        let names: Vec<String> =
            self.0.in_use.unused().into_iter().filter(|name| is_unique_name(name)).collect();
        if !names.is_empty() {
            let here: Vec<String> = self.disks().iter().map(RemoteDisk::unique_name).collect();
            names.iter().filter(|name| !here.contains(name)).for_each(|name| self.0.in_use.forget(name));
        }
        Ok(())
    }

    /// Returns the disks that are or may be on the node.
    fn disks(&self) -> Vec<RemoteDisk> {
        let kinds = ["fc", "iscsi"].map(|kind| self.0.plugins.join("kubernetes.io").join(kind).join(DISKS));
        let all = kinds.iter().flat_map(|folder| records::all::<DiskRecord>(folder));
        all.map(|(_, record)| record.disk).collect()
    }

    fn release_one(&self, folder: &Path, place: &Path, record: &PodRecord) -> Result<(), Error> {
        let PodRecord { name, disk } = record;
        let target = folder.join(VOLUMES).join(plugin_in_paths(disk)).join(one_name(name)?);
        let unique = disk.unique_name();
        let _held = self.0.busy.hold(&unique);
        mounts::unmount_at(&target)?;
        // Held until the record is removed: the last disk of a target to be released logs out.
        let _target = match disk {
            RemoteDisk::Iscsi(disk) => Some(self.0.busy.hold(&target_of(disk))),
            RemoteDisk::Fc(_) => None,
        };
        let others = self.others(place);
        if !others.iter().any(|other| other.disk.unique_name() == unique) {
            // A name has several records if pods reach the disk by several interfaces.
            for disk in self.disks().iter().filter(|disk| disk.unique_name() == unique) {
                self.release_disk(disk, &others)?;
            }
        }
        // Last, so that an agent that is killed before this point releases the disk again.
        records::remove(place)
    }

    /// Unmounts and deletes a disk that no pod has. The caller holds the lock of the disk's target.
    fn release_disk(&self, disk: &RemoteDisk, others: &[PodRecord]) -> Result<(), Error> {
        let place = self.record_of(disk);
        let Some(record) = records::read::<DiskRecord>(&place)? else { return Ok(()) };
        let mounted = self.mounted_at(disk);
        mounts::unmount_at(&mounted)?;
        let _ = fs::remove_dir(&mounted);
        let device = record.device.filter(|device| device.exists());
        let is_free = match &device {
            Some(device) => !mounts::is_mounted(device)?,
            None => true,
        };
        match disk {
            // Another program on the machine has mounted the disk.
            _ if !is_free => {}
            RemoteDisk::Fc(_) => {
                if let Some(device) = &device {
                    fc::forget(&self.0.machine, device);
                }
            }
            RemoteDisk::Iscsi(disk) => {
                let secret = BTreeMap::new();
                let is_last = !others.iter().any(|other| shares_target(&other.disk, disk));
                Login { machine: &self.0.machine, disk, secret: &secret }.forget(is_last)?;
            }
        }
        records::remove(&place)
    }
}

/// Returns the kubelet's name of the plugin of network disks.
pub(crate) fn plugin_name(spec: &Spec<'_>) -> Option<&'static str> {
    if spec.is_kind(|claimed| claimed.fc.is_some(), |volume| volume.fc.is_some()) {
        return Some("kubernetes.io/fc");
    }
    let is_iscsi = spec.is_kind(|claimed| claimed.iscsi.is_some(), |volume| volume.iscsi.is_some());
    is_iscsi.then_some("kubernetes.io/iscsi")
}

/// Returns the volume with its disk.
fn volume_of(spec: &Spec<'_>, namespace: &str) -> Result<RemoteVolume, Error> {
    let found = match spec.claimed {
        Some(Claimed { volume, read_only, .. }) => policy::of_claim(volume, *read_only, namespace),
        None => policy::of_pod(spec.volume, namespace),
    };
    found.ok_or_else(|| Error::unmet("the volume has no network disk"))?.map_err(Error::unmet_of)
}

impl VolumePlugin for RemoteDisks {
    fn name(&self, spec: &Spec<'_>) -> Option<&'static str> {
        plugin_name(spec)
    }

    fn location(&self, _volume: &Volume) -> Location {
        Location::Linked
    }

    fn is_read_only(&self, volume: &Volume) -> bool {
        let of_fc = volume.fc.as_ref().and_then(|source| source.read_only);
        let of_iscsi = volume.iscsi.as_ref().and_then(|source| source.read_only);
        [of_fc, of_iscsi].contains(&Some(true))
    }

    fn is_due(&self, spec: &Spec<'_>, used: Use, _attachment: Option<&Attachment>) -> bool {
        spec.is_claimed_or_mounted(used)
    }

    /// Waits until a controller has attached the disk: a controller prevents two nodes from using a disk that
    /// only one may use. A standalone node has no controller.
    fn attach<'a>(
        &'a self,
        spec: Spec<'a>,
        facts: AttachFacts<'a>,
    ) -> BoxFuture<'a, Result<Option<Attachment>, Error>> {
        Box::pin(async move {
            let found = volume_of(&spec, namespace_of(facts.pod))?;
            if let Some(storage) = facts.storage {
                self.use_by(&found, facts.uid());
                AttachFacts::attached(storage, &spec.volume.name, &found.disk.unique_name()).await?;
            }
            let secret = match &found.secret {
                Some(named) => facts.secret(None, named).await?,
                None => BTreeMap::new(),
            };
            Ok(Some(Attachment { secret, device: None, published: None }))
        })
    }

    fn set_up(
        &self,
        spec: &Spec<'_>,
        target: &Target<'_>,
        _left: &mut Allowance,
    ) -> Result<Option<PathBuf>, Error> {
        let Some(Attachment { secret, .. }) = target.attachment(spec) else {
            return Err(Error::unmet("cannot determine whether the volume is attached"));
        };
        let volume = volume_of(spec, namespace_of(target.sources.pod))?;
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        let secret = secret.iter().map(|(key, value)| (key.clone(), text(value))).collect();
        self.mount_for_pod(target.folder, &RemoteWanted { volume, secret }, target.fs_group).map(Some)
    }

    fn tear_down(&self, folder: &Path) -> Result<(), Error> {
        self.release(folder)
    }

    fn name_of_place(&self, _folder: &Path, place: &Path) -> Option<&'static str> {
        let is_in = |plugin: &str| place.components().any(|part| part.as_os_str() == plugin);
        if is_in(FC) { Some("kubernetes.io/fc") } else { is_in(ISCSI).then_some("kubernetes.io/iscsi") }
    }

    fn must_be_mounted(&self, folder: &Path, place: &Path) -> bool {
        [FC, ISCSI].iter().any(|plugin| place.starts_with(folder.join(VOLUMES).join(plugin)))
    }
}

/// Returns the key of the lock for logins to the disk's target.
fn target_of(disk: &IscsiDisk) -> String {
    format!("target {}", disk.target)
}

/// Returns true if two disks are on the same target, reached by the same portal.
fn shares_target(other: &RemoteDisk, disk: &IscsiDisk) -> bool {
    match other {
        RemoteDisk::Iscsi(other) => {
            other.target == disk.target && other.portals.first() == disk.portals.first()
        }
        RemoteDisk::Fc(_) => false,
    }
}

#[cfg(test)]
mod tests;
