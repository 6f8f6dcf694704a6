//! What is on disk of volumes that drivers mount, and of disks on networks, written before anything is done:
//! from it alone all is taken back. A pod's is in the pod's folder, that of a device beside those that are
//! mounted.

use std::{
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
/// The most folders that are looked into.
const MOST: usize = 10_000;

/// The records in a folder with a folder for each driver, or kind, with their own folders.
pub(crate) fn all<T: DeserializeOwned>(folder: &Path) -> Vec<(PathBuf, T)> {
    let drivers = folders(folder);
    let places = drivers.iter().flat_map(|driver| folders(driver)).take(MOST);
    let read = |place: PathBuf| match read(&place) {
        Ok(record) => Some((place, record?)),
        Err(why) => {
            warn!("a record of a volume is passed over: {why}");
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

/// Returns true if there is a record, or may be one: a folder that lost its record is none.
pub(crate) fn exists(place: &Path) -> bool {
    !matches!(fs::symlink_metadata(place.join(FILE)), Err(why) if why.kind() == ErrorKind::NotFound)
}

pub(crate) fn write<T: Serialize>(place: &Path, record: &T) -> Result<(), Error> {
    let file = ForeignFile::new(place.join(FILE));
    let text = serde_json::to_vec(record).map_err(Error::unmet_of)?;
    file.replace(&text).and_then(|()| file.settle()).map_err(Error::unmet_of)
}

/// Removes a record, and its folder.
pub(crate) fn remove(place: &Path) -> Result<(), Error> {
    ForeignFile::new(place.join(FILE)).remove().map_err(Error::unmet_of)?;
    match fs::remove_dir(place) {
        Err(cause) if cause.kind() != ErrorKind::NotFound => {
            Err(Error::io("remove the record", place)(cause))
        }
        _ => Ok(()),
    }
}

/// The folders in a folder.
pub(crate) fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}
