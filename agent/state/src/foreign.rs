//! A durable file whose format and place another program defines: the kubelet's device checkpoint. The file
//! is replaced as a whole like our own records; a damaged one is set aside next to it. This module must never
//! interpret the content.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use beelet_base::folder::{PRIVATE, make_folder};
use beelet_base::shared_folder::{Folder, beside};

use super::{MAX_QUARANTINED, MAX_RECORD, StateError, io_error, write_error};

/// A file by its path. All calls block.
#[derive(Debug, Clone)]
pub struct ForeignFile {
    path: PathBuf,
    /// True if only root can replace the file's folder.
    is_folder_safe: bool,
}

impl ForeignFile {
    /// Creates a handle for the file at `path`, which must be in a folder. Plugins and drivers may write to
    /// that folder, and replace it: their links are never followed. Does not access the file yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path, is_folder_safe: false }
    }

    /// Creates a handle for a file in a folder of the node's administrator, which may be a link.
    #[must_use]
    pub fn of_node(path: PathBuf) -> Self {
        Self { path, is_folder_safe: true }
    }

    /// Returns the file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file; `None` if it is missing. A file larger than any record reads as empty, and so differs
    /// from the written content.
    ///
    /// # Errors
    /// Fails if the file system fails, or the path is not a plain file.
    pub fn read(&self) -> Result<Option<Vec<u8>>, StateError> {
        match self.open().and_then(|folder| folder.read(self.name(), MAX_RECORD)) {
            Ok(bytes) => Ok(Some(bytes.unwrap_or_default())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_error("read", &self.path, error)),
        }
    }

    /// Replaces the content with `bytes`, once the disk has them. The new content survives a crash of the
    /// agent. After a crash of the machine the file has either content, and the new one for certain after
    /// [`Self::settle`].
    ///
    /// # Errors
    /// Fails if `bytes` exceed the limit of [`Self::read`], or the disk is full or fails; the old content
    /// stays.
    pub fn replace(&self, bytes: &[u8]) -> Result<(), StateError> {
        if bytes.len() as u64 > MAX_RECORD {
            return Err(StateError::TooLarge(self.path.clone()));
        }
        let folder = match self.open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_folder(self.folder(), PRIVATE).map_err(|error| {
                    let cause = match error {
                        beelet_base::Error::MakeFolder { cause, .. } => io::Error::from(cause),
                        other => io::Error::other(other),
                    };
                    write_error(&self.path, cause)
                })?;
                self.open()
            }
            folder => folder,
        };
        let written = folder.and_then(|folder| match folder.replace(self.name(), bytes) {
            // A plugin has created a folder there.
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                folder.rename(self.name(), &self.aside())?;
                folder.replace(self.name(), bytes)
            }
            written => written,
        });
        written.map_err(|error| write_error(&self.path, error))
    }

    /// Waits until the disk has the last replacement.
    ///
    /// # Errors
    /// Fails if the disk fails.
    pub fn settle(&self) -> Result<(), StateError> {
        let synced = self.open().and_then(|folder| folder.sync());
        synced.map_err(|error| io_error("sync", self.folder(), error))
    }

    /// Removes the file; a missing file is a success.
    ///
    /// # Errors
    /// Fails if the file system fails.
    pub fn remove(&self) -> Result<(), StateError> {
        match self.open().and_then(|folder| folder.remove_file(self.name())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(io_error("remove", &self.path, error))
            }
            _ => Ok(()),
        }
    }

    /// Moves the object at the file's path aside, keeps the last few copies, and returns the new path.
    ///
    /// # Errors
    /// Fails if the file system fails.
    pub fn set_aside(&self) -> Result<PathBuf, StateError> {
        let moved_to = self.aside();
        let set_aside = || {
            let folder = self.open()?;
            folder.rename(self.name(), &moved_to)?;
            let prefix = beside(self.name(), ASIDE);
            let is_copy = |name: &OsStr| name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
            let mut copies = folder.names(is_copy)?;
            copies.sort();
            copies.iter().rev().skip(MAX_QUARANTINED).try_for_each(|old| folder.remove(old))
        };
        set_aside().map_err(|error| io_error("set aside", &self.path, error))?;
        Ok(self.path.with_file_name(moved_to))
    }

    fn aside(&self) -> OsString {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        beside(self.name(), &format!("{ASIDE}{now:020}"))
    }

    fn open(&self) -> io::Result<Folder> {
        if self.is_folder_safe {
            Folder::open_through_links(self.folder())
        } else {
            Folder::open(self.folder())
        }
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }
}

/// Beginning of the suffix of set-aside copies.
const ASIDE: &str = "corrupt-";

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn it_is_replaced_as_a_whole_and_its_folder_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let file = ForeignFile::new(dir.path().join("a/b/checkpoint"));
        assert_eq!(file.read().unwrap(), None);
        file.replace(b"one").unwrap();
        file.replace(b"two").unwrap();
        file.settle().unwrap();
        assert_eq!(file.read().unwrap().unwrap(), b"two");
        assert_eq!(fs::read_dir(dir.path().join("a/b")).unwrap().count(), 1);
    }

    #[test]
    fn what_is_set_aside_is_kept_a_few_times() {
        let dir = tempfile::tempdir().unwrap();
        let file = ForeignFile::new(dir.path().join("checkpoint"));
        for round in 0..8_u8 {
            file.replace(&[round]).unwrap();
            let moved_to = file.set_aside().unwrap();
            assert_eq!(fs::read(moved_to).unwrap(), [round]);
            assert_eq!(file.read().unwrap(), None);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), MAX_QUARANTINED);
    }

    #[test]
    fn what_could_not_be_read_again_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = ForeignFile::new(dir.path().join("checkpoint"));
        file.replace(b"old").unwrap();
        let large = vec![b'x'; usize::try_from(MAX_RECORD).unwrap() + 1];
        assert!(matches!(file.replace(&large), Err(StateError::TooLarge(_))));
        assert_eq!(file.read().unwrap().unwrap(), b"old");
    }

    #[test]
    fn what_a_plugin_puts_in_its_place_or_beside_it_is_never_written_through() {
        // Acts like a device plugin that can write to the folder only.
        for what in ["link", "dangling link", "FIFO", "folder"] {
            for place in ["checkpoint", "checkpoint.tmp"] {
                let dir = tempfile::tempdir().unwrap();
                let shared = dir.path().join("device-plugins");
                let (victim, place) = (dir.path().join("victim"), shared.join(place));
                fs::create_dir(&shared).unwrap();
                fs::write(&victim, "hush").unwrap();
                let mode = rustix::fs::Mode::RWXU;
                match what {
                    "link" => symlink(&victim, &place).unwrap(),
                    "dangling link" => symlink(dir.path().join("made"), &place).unwrap(),
                    "FIFO" => rustix::fs::mkfifoat(rustix::fs::CWD, &place, mode).unwrap(),
                    _ => fs::create_dir_all(place.join("full")).unwrap(),
                }
                let file = ForeignFile::new(shared.join("checkpoint"));
                let is_in_place = place == file.path();
                assert_eq!(file.read().is_err(), is_in_place, "{what} at {place:?}");
                if is_in_place {
                    let aside = file.set_aside().unwrap();
                    assert!(fs::symlink_metadata(&aside).is_ok() && file.read().unwrap().is_none());
                    fs::rename(&aside, &place).unwrap();
                }
                file.replace(b"ours").unwrap();
                assert_eq!(file.read().unwrap().unwrap(), b"ours", "{what} at {place:?}");
                assert_eq!(fs::read_to_string(&victim).unwrap(), "hush", "{what} at {place:?}");
                assert!(!dir.path().join("made").exists(), "{what} at {place:?}");
            }
        }
    }

    #[test]
    fn a_folder_that_is_a_link_is_the_administrators_or_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("elsewhere")).unwrap();
        symlink("elsewhere", dir.path().join("folder")).unwrap();
        let path = dir.path().join("folder/record");
        assert!(ForeignFile::new(path.clone()).replace(b"x").is_err());
        assert!(!path.exists());
        let file = ForeignFile::of_node(path);
        file.replace(b"x").unwrap();
        file.settle().unwrap();
        assert_eq!(file.read().unwrap().unwrap(), b"x");
        file.remove().unwrap();
        file.remove().unwrap();
        assert_eq!(file.read().unwrap(), None);
    }
}
