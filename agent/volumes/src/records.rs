//! Records on disk of the volumes that drivers mount and of network disks. A record is written before the
//! volume is mounted and suffices to release the volume. A pod's records are in the pod's folder; the records
//! of devices are next to the mounted devices.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use beelet_state::ForeignFile;
use serde::{Serialize, de::DeserializeOwned};
use tracing::warn;

use crate::Error;

/// Name of a record's file.
const FILE: &str = "volume.json";
/// Maximum number of folders that are searched for records.
const MOST: usize = 10_000;

/// Returns the records below a folder that has a folder for each driver or kind, with the records' folders.
pub(crate) fn all<T: DeserializeOwned>(folder: &Path) -> Vec<(PathBuf, T)> {
    let drivers = folders(folder);
    let places = drivers.iter().flat_map(|driver| folders(driver)).take(MOST);
    let read = |place: PathBuf| match read(&place) {
        Ok(record) => Some((place, record?)),
        Err(why) => {
            warn!("ignoring the record of a volume: {why}");
            None
        }
    };
    places.filter_map(read).collect()
}

pub(crate) fn read<T: DeserializeOwned>(place: &Path) -> Result<Option<T>, Error> {
    let file = place.join(FILE);
    let Some(text) = ForeignFile::new(file.clone()).read().map_err(Error::unmet_of)? else { return Ok(None) };
    let why = |cause: serde_json::Error| Error::unmet(format!("cannot parse {}: {cause}", file.display()));
    serde_json::from_slice(&text).map(Some).map_err(why)
}

/// Returns true if a record exists or may exist. A folder without a file does not count.
pub(crate) fn exists(place: &Path) -> bool {
    !matches!(fs::symlink_metadata(place.join(FILE)), Err(why) if why.kind() == ErrorKind::NotFound)
}

pub(crate) fn write<T: Serialize>(place: &Path, record: &T) -> Result<(), Error> {
    let file = ForeignFile::new(place.join(FILE));
    let text = serde_json::to_vec(record).map_err(Error::unmet_of)?;
    file.replace(&text).and_then(|()| file.settle()).map_err(Error::unmet_of)
}

/// Removes a record and its folder.
pub(crate) fn remove(place: &Path) -> Result<(), Error> {
    ForeignFile::new(place.join(FILE)).remove().map_err(Error::unmet_of)?;
    match fs::remove_dir(place) {
        Err(cause) if cause.kind() != ErrorKind::NotFound => {
            Err(Error::io("remove the record", place)(cause))
        }
        _ => Ok(()),
    }
}

/// Returns the folders in a folder.
pub(crate) fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}
