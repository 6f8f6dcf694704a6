//! Folders of staged and published volumes, with the kubelet's paths.

use std::path::PathBuf;

use crate::{
    VolumeId,
    records::{self, VolumeRecord},
};

/// Folders of staged and published volumes.
#[derive(Debug)]
pub(crate) struct Folders {
    /// Folder with a folder for each pod.
    pub(crate) pods_dir: PathBuf,
    /// Folder of staged volumes: `<kubelet dir>/plugins/kubernetes.io/csi`.
    pub(crate) staging: PathBuf,
}

impl Folders {
    /// Returns the path at which a volume is staged, by its record.
    pub(crate) fn staging_path(&self, record: &VolumeRecord) -> PathBuf {
        if record.block {
            return self.staging.join("volumeDevices/staging").join(one_part(&record.spec_volume));
        }
        self.staging_folder(&VolumeId::of(record)).join("globalmount")
    }

    /// Returns the path at which a volume is published for a pod, by its record.
    pub(crate) fn publish_path(&self, record: &VolumeRecord, uid: &str) -> PathBuf {
        if record.block {
            return self.staging.join("volumeDevices/publish").join(one_part(&record.spec_volume)).join(uid);
        }
        records::folder_of(&self.pods_dir.join(uid)).join(one_part(&record.spec_volume)).join("mount")
    }

    /// Returns the folder of a staged volume: `<driver>/<digest of the handle>`.
    pub(crate) fn staging_folder(&self, volume: &VolumeId) -> PathBuf {
        self.staging.join(&volume.driver).join(records::digest(&[&volume.handle]))
    }
}

/// Returns the name of a volume as a single part of a path: the names of some kinds, e.g. Azure's disks, are
/// paths themselves.
pub(crate) fn one_part(name: &str) -> String {
    name.replace('/', "~")
}
