//! Folders of staged and published volumes, with the kubelet's paths.

use std::path::PathBuf;

use crate::{
    VolumeId,
    records::{self, VolumeRecord},
};

/// The folders that volumes are staged and published in.
#[derive(Debug)]
pub(crate) struct Folders {
    /// Folder with a folder for each pod.
    pub(crate) pods_dir: PathBuf,
    /// Folder of staged volumes: `<kubelet dir>/plugins/kubernetes.io/csi`.
    pub(crate) staging: PathBuf,
}

impl Folders {
    /// The path at which a volume is staged, by its record.
    pub(crate) fn staging_path(&self, record: &VolumeRecord) -> PathBuf {
        if record.block {
            return self.staging.join("volumeDevices/staging").join(one_part(&record.spec_volume));
        }
        self.staging_folder(&VolumeId::of(record)).join("globalmount")
    }

    /// The path at which a volume is published for a pod, by its record.
    pub(crate) fn publish_path(&self, record: &VolumeRecord, uid: &str) -> PathBuf {
        if record.block {
            return self.staging.join("volumeDevices/publish").join(one_part(&record.spec_volume)).join(uid);
        }
        records::folder_of(&self.pods_dir.join(uid)).join(one_part(&record.spec_volume)).join("mount")
    }

    /// The folder of a staged volume: `<driver>/<digest of the handle>`.
    pub(crate) fn staging_folder(&self, volume: &VolumeId) -> PathBuf {
        self.staging.join(&volume.driver).join(records::digest(&[&volume.handle]))
    }
}

/// The name of a volume as a part of paths: the names of some kinds, such as Azure's disks, are paths
/// themselves.
pub(crate) fn one_part(name: &str) -> String {
    name.replace('/', "~")
}
