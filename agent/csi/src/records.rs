//! What is on disk of volumes: `vol_data.json`, in the kubelet's form, so that either reads the other's.

use std::{
    fs,
    path::{Path, PathBuf},
};

use beelet_state::ForeignFile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tracing::warn;

use crate::Error;

/// The file's name.
const FILE: &str = "vol_data.json";

/// What is known of a staged or published volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct VolumeRecord {
    pub(crate) driver_name: String,
    pub(crate) volume_handle: String,
    /// The PersistentVolume, or the pod's volume; empty of a staged one.
    #[serde(rename = "specVolID", skip_serializing_if = "String::is_empty")]
    pub(crate) spec_volume: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) node_name: String,
    #[serde(rename = "attachmentID", skip_serializing_if = "String::is_empty")]
    pub(crate) attachment: String,
    /// `Persistent` or `Ephemeral`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) volume_lifecycle_mode: String,
    /// It is a block device. The agent's own field: a kubelet keeps such records elsewhere.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) block: bool,
}

impl VolumeRecord {
    /// Returns true if a controller may have attached it to the node.
    pub(crate) fn is_attached(&self) -> bool {
        self.volume_lifecycle_mode == "Persistent"
    }

    /// Writes it into a folder. Blocks.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), Error> {
        let file = ForeignFile::new(folder.join(FILE));
        let text = serde_json::to_vec(self).map_err(|cause| Error::Unmet(cause.to_string()))?;
        file.replace(&text)?;
        Ok(file.settle()?)
    }

    /// That of a folder, if there is one. Blocks.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, Error> {
        let Some(text) = ForeignFile::new(folder.join(FILE)).read()? else { return Ok(None) };
        let read = serde_json::from_slice(&text);
        let why = |cause: serde_json::Error| {
            Error::Unmet(format!("{} can't be read: {cause}", folder.join(FILE).display()))
        };
        read.map(Some).map_err(why)
    }

    /// Removes that of a folder, and the folder, which must be empty then. Blocks.
    pub(crate) fn remove(folder: &Path) -> Result<(), Error> {
        ForeignFile::new(folder.join(FILE)).remove()?;
        gone(fs::remove_dir(folder)).map_err(Error::io("remove", folder))
    }
}

/// What isn't there needs no removal.
pub(crate) fn gone(removed: std::io::Result<()>) -> std::io::Result<()> {
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The records of volumes that are published for pods: pod's UID, folder, record. Blocks.
pub(crate) fn published(pods_dir: &Path) -> Vec<(String, PathBuf, VolumeRecord)> {
    let mut all = Vec::new();
    for pod in folders(pods_dir) {
        let uid = pod.file_name().unwrap_or_default().to_string_lossy().into_owned();
        all.extend(of_pod(&pod).into_iter().map(|(folder, record)| (uid.clone(), folder, record)));
    }
    all
}

/// Those of one pod, by its folder. Blocks.
pub(crate) fn of_pod(pod: &Path) -> Vec<(PathBuf, VolumeRecord)> {
    folders(&folder_of(pod)).into_iter().filter_map(read_or_tell).collect()
}

/// The folder with a folder for each volume that is published for a pod.
pub(crate) fn folder_of(pod: &Path) -> PathBuf {
    pod.join("volumes").join(beelet_policy::volumes::csi::PLUGIN)
}

/// The records of staged volumes. Blocks.
pub(crate) fn staged(staging: &Path) -> Vec<(PathBuf, VolumeRecord)> {
    let drivers = folders(staging);
    drivers.iter().flat_map(|driver| folders(driver)).filter_map(read_or_tell).collect()
}

fn read_or_tell(folder: PathBuf) -> Option<(PathBuf, VolumeRecord)> {
    match VolumeRecord::read(&folder) {
        Ok(record) => Some((folder, record?)),
        Err(why) => {
            warn!("a volume of a storage plugin is passed over: {why}");
            None
        }
    }
}

/// The folders in a folder. Blocks.
pub(crate) fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// The SHA-256 of texts, one behind the other, in hexadecimal digits.
pub(crate) fn digest(texts: &[&str]) -> String {
    let mut hash = Sha256::new();
    texts.iter().for_each(|text| hash.update(text));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_the_kubelets_form() {
        let dir = tempfile::tempdir().unwrap();
        let record = VolumeRecord {
            driver_name: "d.example".to_owned(),
            volume_handle: "h".to_owned(),
            spec_volume: "pv".to_owned(),
            node_name: "n".to_owned(),
            attachment: "csi-1".to_owned(),
            volume_lifecycle_mode: "Persistent".to_owned(),
            block: false,
        };
        record.write(dir.path()).unwrap();
        let text = fs::read_to_string(dir.path().join(FILE)).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let expected = serde_json::json!({
            "driverName": "d.example", "volumeHandle": "h", "specVolID": "pv", "nodeName": "n",
            "attachmentID": "csi-1", "volumeLifecycleMode": "Persistent",
        });
        assert_eq!(value, expected);
        assert_eq!(VolumeRecord::read(dir.path()).unwrap(), Some(record));
        // What a kubelet adds is passed over.
        fs::write(
            dir.path().join(FILE),
            r#"{"driverName": "d", "volumeHandle": "h", "seLinuxMountContext": "x"}"#,
        )
        .unwrap();
        assert_eq!(VolumeRecord::read(dir.path()).unwrap().unwrap().driver_name, "d");
        fs::write(dir.path().join(FILE), "{").unwrap();
        assert!(VolumeRecord::read(dir.path()).is_err());
        VolumeRecord::remove(dir.path()).unwrap();
        assert_eq!(VolumeRecord::read(dir.path()).unwrap(), None);
    }

    #[test]
    fn names_are_digested_as_the_kubelet_does() {
        assert_eq!(digest(&["a", "b"]), digest(&["ab"]));
        assert_eq!(digest(&["abc"]), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
