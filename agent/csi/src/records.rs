//! Records of volumes on disk: `vol_data.json` in the kubelet's format, so that a kubelet can read the
//! agent's records and the agent the kubelet's.

use std::{
    fs,
    path::{Path, PathBuf},
};

use beelet_state::ForeignFile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tracing::warn;

use crate::Error;

/// Name of a record's file.
const FILE: &str = "vol_data.json";

/// The record of a staged or published volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct VolumeRecord {
    pub(crate) driver_name: String,
    pub(crate) volume_handle: String,
    /// Name of the PersistentVolume, or of the pod's volume; empty for a staged volume.
    #[serde(rename = "specVolID", skip_serializing_if = "String::is_empty")]
    pub(crate) spec_volume: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) node_name: String,
    #[serde(rename = "attachmentID", skip_serializing_if = "String::is_empty")]
    pub(crate) attachment: String,
    /// `Persistent` or `Ephemeral`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) volume_lifecycle_mode: String,
    /// The volume is a block device. The kubelet has no such field: it stores these records elsewhere.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) block: bool,
}

impl VolumeRecord {
    /// Returns true if a controller may have attached the volume to the node.
    pub(crate) fn is_attached(&self) -> bool {
        self.volume_lifecycle_mode == "Persistent"
    }

    /// Writes the record to a folder. Blocks.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), Error> {
        let file = ForeignFile::new(folder.join(FILE));
        let text = serde_json::to_vec(self).map_err(|cause| Error::Unmet(cause.to_string()))?;
        file.replace(&text)?;
        Ok(file.settle()?)
    }

    /// Reads the record in a folder, if any. Blocks.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, Error> {
        let Some(text) = ForeignFile::new(folder.join(FILE)).read()? else { return Ok(None) };
        let read = serde_json::from_slice(&text);
        let why = |cause: serde_json::Error| {
            Error::Unmet(format!("cannot parse {}: {cause}", folder.join(FILE).display()))
        };
        read.map(Some).map_err(why)
    }

    /// Removes the record in a folder and the folder, which must have no other files. Blocks.
    pub(crate) fn remove(folder: &Path) -> Result<(), Error> {
        ForeignFile::new(folder.join(FILE)).remove()?;
        gone(fs::remove_dir(folder)).map_err(Error::io("remove", folder))
    }
}

/// Treats "not found" as success.
pub(crate) fn gone(removed: std::io::Result<()>) -> std::io::Result<()> {
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the records of published volumes: pod's UID, folder, record. Blocks.
pub(crate) fn published(pods_dir: &Path) -> Vec<(String, PathBuf, VolumeRecord)> {
    let mut all = Vec::new();
    for pod in folders(pods_dir) {
        let uid = pod.file_name().unwrap_or_default().to_string_lossy().into_owned();
        all.extend(of_pod(&pod).into_iter().map(|(folder, record)| (uid.clone(), folder, record)));
    }
    all
}

/// Returns the records of a pod's published volumes, by the pod's folder. Blocks.
pub(crate) fn of_pod(pod: &Path) -> Vec<(PathBuf, VolumeRecord)> {
    folders(&folder_of(pod)).into_iter().filter_map(read_or_warn).collect()
}

/// Returns the folder with a folder for each published volume of a pod.
pub(crate) fn folder_of(pod: &Path) -> PathBuf {
    pod.join("volumes").join(beelet_policy::volumes::csi::PLUGIN)
}

/// Returns the records of staged volumes. Blocks.
pub(crate) fn staged(staging: &Path) -> Vec<(PathBuf, VolumeRecord)> {
    let drivers = folders(staging);
    drivers.iter().flat_map(|driver| folders(driver)).filter_map(read_or_warn).collect()
}

fn read_or_warn(folder: PathBuf) -> Option<(PathBuf, VolumeRecord)> {
    match VolumeRecord::read(&folder) {
        Ok(record) => Some((folder, record?)),
        Err(why) => {
            warn!("ignoring the record of a storage plugin's volume: {why}");
            None
        }
    }
}

/// Returns the folders in a folder. Blocks.
pub(crate) fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// Returns the SHA-256 of the concatenated texts, in hexadecimal digits.
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
        // Other fields of a kubelet are ignored.
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
