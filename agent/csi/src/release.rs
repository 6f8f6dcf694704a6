//! Releases volumes by their records: unpublishes a removed pod's volumes, and unstages volumes that no pod
//! has.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use beelet_base::work::Work;
use beelet_base::{blocking::blocking, mountinfo};
use beelet_policy::volumes::csi as policy;
use beelet_proto::csi::{NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest};
use futures::future::join_all;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    Csi, Error, VolumeId, lock,
    records::{self, VolumeRecord, gone},
};

/// Time between two searches for staged volumes that no pod has.
const SWEEP: Duration = Duration::from_secs(60);

impl Csi {
    /// Unpublishes all volumes of the pod with this UID. Idempotent. [`Csi::sweep`] unstages volumes that no
    /// other pod has right afterwards: the pod does not wait for that.
    ///
    /// # Errors
    /// A driver is not registered or fails: the pod cannot be removed yet.
    pub async fn release(&self, uid: &str) -> Result<(), Error> {
        let folder = self.0.folders.pods_dir.join(uid);
        let all = blocking("looking for published volumes", move || records::of_pod(&folder)).await;
        let given_back = all.into_iter().map(|(place, record)| unpublish(self, place, record, uid));
        join_all(given_back).await.into_iter().collect::<Result<(), Error>>()?;
        // The names stay in use until the volumes are unstaged.
        self.0.in_use.leave(uid, policy::is_unique_name);
        self.0.released.notify_one();
        Ok(())
    }

    /// Unstages volumes that no pod has, until `cancel`: as soon as a pod has released a volume, and
    /// periodically, because a killed agent or an unreachable driver may have left staged volumes.
    pub fn sweep(self, cancel: CancellationToken) -> Work {
        Box::pin(async move {
            let mut drivers = self.drivers();
            let mut warned: BTreeSet<VolumeId> = BTreeSet::new();
            loop {
                let Some(failed) = cancel.run_until_cancelled(unstage_all_unused(&self)).await else {
                    return;
                };
                for (volume, error) in &failed {
                    if !warned.contains(volume) {
                        warn!(volume = volume.unique_name(), "cannot unstage an unused volume: {error}");
                    }
                }
                warned = failed.into_iter().map(|(volume, _)| volume).collect();
                tokio::select! {
                    () = tokio::time::sleep(SWEEP) => {}
                    () = self.0.released.notified() => {}
                    Ok(()) = drivers.changed() => {}
                    () = cancel.cancelled() => return,
                }
            }
        })
    }
}

async fn unpublish(csi: &Csi, folder: PathBuf, record: VolumeRecord, uid: &str) -> Result<(), Error> {
    let driver = csi.driver(&record.driver_name)?;
    let _held = csi.0.locks.hold(&VolumeId::of(&record)).await;
    let path = csi.0.folders.publish_path(&record, uid);
    let request = NodeUnpublishVolumeRequest {
        volume_id: record.volume_handle,
        target_path: path.to_string_lossy().into_owned(),
    };
    driver.unpublish(request).await?;
    blocking("removing a published volume", move || remove(&folder, &path)).await
}

/// Unstages a volume that no pod has.
async fn unstage_unused(csi: &Csi, volume: &VolumeId) -> Result<(), Error> {
    let _held = csi.0.locks.hold(volume).await;
    let (folder, pods, wanted) =
        (csi.0.folders.staging_folder(volume), csi.0.folders.pods_dir.clone(), volume.clone());
    let of = folder.clone();
    let unused = blocking("finding the pods of a volume", move || {
        let is_used = || records::published(&pods).iter().any(|(.., one)| VolumeId::of(one) == wanted);
        Ok::<_, Error>(VolumeRecord::read(&of)?.filter(|_| !is_used()))
    });
    let Some(record) = unused.await? else { return Ok(()) };
    let driver = csi.driver(&volume.driver)?;
    let path = csi.0.folders.staging_path(&record);
    let request = NodeUnstageVolumeRequest {
        volume_id: volume.handle.clone(),
        staging_target_path: path.to_string_lossy().into_owned(),
    };
    lock(&csi.0.staged).remove(volume);
    driver.unstage(request).await?;
    blocking("removing a staged volume", move || remove(&folder, &path)).await
}

/// Reports a volume as unused if no record of the volume is on disk.
async fn forget(csi: &Csi, name: String) {
    let (pods, staging, of) = (csi.0.folders.pods_dir.clone(), csi.0.folders.staging.clone(), name.clone());
    let on_disk = blocking("finding a volume's records", move || {
        let is_it = |record: &VolumeRecord| VolumeId::of(record).unique_name() == of;
        records::staged(&staging).iter().any(|(_, record)| is_it(record))
            || records::published(&pods).iter().any(|(.., record)| is_it(record))
    });
    if on_disk.await {
        return;
    }
    csi.0.in_use.forget(&name);
}

/// Removes the known sizes of volumes without a record on disk.
async fn forget_sizes(csi: &Csi) {
    if lock(&csi.0.sizes).is_empty() {
        return;
    }
    let (pods, staging) = (csi.0.folders.pods_dir.clone(), csi.0.folders.staging.clone());
    let on_disk = blocking("finding volumes' records", move || {
        let staged = records::staged(&staging).into_iter().map(|(_, record)| VolumeId::of(&record));
        let published = records::published(&pods).into_iter().map(|(.., record)| VolumeId::of(&record));
        staged.chain(published).collect::<BTreeSet<_>>()
    });
    let on_disk = on_disk.await;
    lock(&csi.0.sizes).retain(|volume, _| on_disk.contains(volume));
}

/// Unstages all unused volumes at the same time. Returns the failures.
async fn unstage_all_unused(csi: &Csi) -> Vec<(VolumeId, Error)> {
    let staging = csi.0.folders.staging.clone();
    let staged = blocking("looking for staged volumes", move || records::staged(&staging)).await;
    let volumes: BTreeSet<VolumeId> = staged.iter().map(|(_, record)| VolumeId::of(record)).collect();
    let unstaged = volumes.into_iter().map(async |volume| {
        let unstaged = unstage_unused(csi, &volume).await;
        unstaged.err().map(|error| (volume, error))
    });
    let failed = join_all(unstaged).await;
    forget_sizes(csi).await;
    for name in csi.0.in_use.unused().into_iter().filter(|name| policy::is_unique_name(name)) {
        forget(csi, name).await;
    }
    failed.into_iter().flatten().collect()
}

/// Removes the mount point, which the driver should have removed, and the record. Blocks.
fn remove(folder: &Path, mount: &Path) -> Result<(), Error> {
    if mountinfo::is_mount_point(mount).map_err(Error::io("look for a mount at", mount))? {
        return Err(Error::Mounted(mount.to_owned()));
    }
    match fs::symlink_metadata(mount) {
        Ok(found) if found.is_dir() => gone(fs::remove_dir(mount)).map_err(Error::io("remove", mount))?,
        Ok(_) => gone(fs::remove_file(mount)).map_err(Error::io("remove", mount))?,
        Err(_) => {}
    }
    VolumeRecord::remove(folder)
}
