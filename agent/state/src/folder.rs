//! The folder of the records.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;

use super::{StateError, io_error};

/// The folder of the records.
#[derive(Debug)]
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn path(&self, name: &str) -> Result<PathBuf, StateError> {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || name.len() > 64 || !name.chars().all(fits) {
            return Err(StateError::Name(name.to_owned()));
        }
        Ok(self.0.join(format!("{name}.json")))
    }

    pub(super) fn sync(&self) -> Result<(), StateError> {
        File::open(&self.0)
            .and_then(|dir| dir.sync_all())
            .map_err(|error| io_error("sync the folder", &self.0, error))
    }

    pub(super) fn files(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, StateError> {
        let list = || -> io::Result<Vec<PathBuf>> {
            let entries = fs::read_dir(&self.0)?.collect::<Result<Vec<_>, _>>()?;
            Ok(entries
                .into_iter()
                .filter(|entry| entry.file_name().to_str().is_some_and(&wanted))
                .map(|entry| entry.path())
                .collect())
        };
        list().map_err(|error| io_error("list", &self.0, error))
    }

    /// Removes temporary files of a process that was killed during a write.
    pub(super) fn remove_leftovers(&self) -> Result<(), StateError> {
        for path in self.files(|file| file.ends_with(".tmp"))? {
            fs::remove_file(&path).map_err(|error| io_error("remove", &path, error))?;
        }
        Ok(())
    }
}
