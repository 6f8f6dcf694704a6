//! What is on disk of volumes of drivers, written before a driver is asked for anything: from it alone all is
//! taken back. A pod's is in the pod's folder, that of a device beside those that are mounted.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use beelet_state::ForeignFile;
use serde::{Serialize, de::DeserializeOwned};
use tracing::warn;

use crate::Error;

/// The file's name.
const FILE: &str = "volume.json";
/// Where they are in a pod's folder.
const OF_POD: &str = "plugins/kubernetes.io~flexvolume";
/// The most folders that are looked into.
const MOST: usize = 10_000;

/// A volume that a driver has mounted for a pod, or may have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodRecord {
    pub(crate) driver: String,
    /// The volume's name, of its PersistentVolume or in the pod.
    pub(crate) name: String,
    /// Other pods may have it too: it is attached to the node, or for one pod at a time.
    pub(crate) shared: bool,
    /// The driver takes SELinux labels.
    pub(crate) relabel: bool,
    /// How much room there is may be asked.
    pub(crate) metrics: bool,
}

/// A volume that a driver has mounted for all pods, or may have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DeviceRecord {
    pub(crate) driver: String,
    pub(crate) name: String,
    /// What was asked for: its options and its file system.
    pub(crate) asked: (BTreeMap<String, String>, String),
    /// The agent has had it attached, not a controller.
    pub(crate) attached_here: bool,
}

/// Where the record of a pod's volume is, by the pod's folder and the driver's.
pub(crate) fn of_pod(folder: &Path, driver: &str, name: &str) -> PathBuf {
    folder.join(OF_POD).join(driver).join(name)
}

/// The records in a pod's folder, with their own folders.
pub(crate) fn all_of_pod(folder: &Path) -> Vec<(PathBuf, PodRecord)> {
    all(&folder.join(OF_POD))
}

/// The records in a folder with a folder for each driver.
pub(crate) fn all<T: DeserializeOwned>(folder: &Path) -> Vec<(PathBuf, T)> {
    let drivers = folders(folder);
    let places = drivers.iter().flat_map(|driver| folders(driver)).take(MOST);
    let read = |place: PathBuf| match read(&place) {
        Ok(record) => Some((place, record?)),
        Err(why) => {
            warn!("a volume of a flexVolume driver is passed over: {why}");
            None
        }
    };
    places.filter_map(read).collect()
}

pub(crate) fn read<T: DeserializeOwned>(place: &Path) -> Result<Option<T>, Error> {
    let file = place.join(FILE);
    let Some(text) = ForeignFile::new(file.clone()).read().map_err(Error::unmet_of)? else { return Ok(None) };
    let why = |cause: serde_json::Error| Error::unmet(format!("{} can't be read: {cause}", file.display()));
    serde_json::from_slice(&text).map(Some).map_err(why)
}

pub(crate) fn write<T: Serialize>(place: &Path, record: &T) -> Result<(), Error> {
    let file = ForeignFile::new(place.join(FILE));
    let text = serde_json::to_vec(record).map_err(Error::unmet_of)?;
    file.replace(&text).and_then(|()| file.settle()).map_err(Error::unmet_of)
}

/// Removes a record, and its folder.
pub(crate) fn remove(place: &Path) -> Result<(), Error> {
    let file = place.join(FILE);
    for removed in [fs::remove_file(&file), fs::remove_dir(place)] {
        match removed {
            Err(cause) if cause.kind() != ErrorKind::NotFound => {
                return Err(Error::io("remove the record", place)(cause));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The folders in a folder.
pub(crate) fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}
