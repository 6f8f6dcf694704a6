//! One durable file in a form and at a place that another program gives: the kubelet's device checkpoint.
//! Replaced as a whole like our own records; what can't be trusted is set aside beside it. Must never know
//! what the content means.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::{MAX_QUARANTINED, MAX_RECORD, StateError, io_error, read_at_most, write_error};

/// A file by its path. All calls block.
#[derive(Debug, Clone)]
pub struct ForeignFile {
    path: PathBuf,
}

impl ForeignFile {
    /// The file at `path`, which must be in a folder. Nothing is touched yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its content; `None` where there is none. A file that is larger than any record may be is cut there,
    /// and so isn't what was written.
    ///
    /// # Errors
    /// The file system fails.
    pub fn read(&self) -> Result<Option<Vec<u8>>, StateError> {
        match read_at_most(&self.path, MAX_RECORD) {
            Ok(bytes) => Ok(Some(bytes.unwrap_or_default())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_error("read", &self.path, error)),
        }
    }

    /// Puts `bytes`, once the disk has them, in place of what is there. That survives the end of the agent,
    /// however sudden; after that of the machine there is either the one or the other, and these for certain
    /// after [`Self::settle`].
    ///
    /// # Errors
    /// There are more of them than [`Self::read`] takes, or the disk is full or fails; what was there before
    /// still is.
    pub fn replace(&self, bytes: &[u8]) -> Result<(), StateError> {
        if bytes.len() as u64 > MAX_RECORD {
            return Err(StateError::TooLarge(self.path.clone()));
        }
        let temporary = self.beside("tmp");
        let write = || {
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, &self.path)
        };
        let written = match write() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make_folder().and_then(|()| write())
            }
            written => written,
        };
        written.map_err(|error| {
            // Half a file would only take space that is missing already.
            let _ = fs::remove_file(&temporary);
            write_error(&self.path, error)
        })
    }

    /// Waits until the disk knows what was last put in place.
    ///
    /// # Errors
    /// The disk fails.
    pub fn settle(&self) -> Result<(), StateError> {
        let synced = File::open(self.folder()).and_then(|folder| folder.sync_all());
        synced.map_err(|error| io_error("sync", self.folder(), error))
    }

    /// Moves the file aside, keeping the last few such; where it was moved to.
    ///
    /// # Errors
    /// The file system fails.
    pub fn set_aside(&self) -> Result<PathBuf, StateError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let moved_to = self.beside(&format!("corrupt-{now:020}"));
        fs::rename(&self.path, &moved_to).map_err(|error| io_error("set aside", &self.path, error))?;
        let prefix = self.beside("corrupt-");
        let entries = fs::read_dir(self.folder()).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let entries = entries.map_err(|error| io_error("list", self.folder(), error))?;
        let is_copy = |path: &PathBuf| path.to_string_lossy().starts_with(prefix.to_string_lossy().as_ref());
        let mut copies: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).filter(is_copy).collect();
        copies.sort();
        for old in copies.iter().rev().skip(MAX_QUARANTINED) {
            fs::remove_file(old).map_err(|error| io_error("remove", old, error))?;
        }
        Ok(moved_to)
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    fn make_folder(&self) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o750).create(self.folder())
    }

    fn beside(&self, end: &str) -> PathBuf {
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(".");
        name.push(end);
        self.path.with_file_name(name)
    }
}

#[cfg(test)]
mod tests {
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
    fn where_it_cannot_be_written_the_old_content_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = ForeignFile::new(dir.path().join("checkpoint"));
        file.replace(b"old").unwrap();
        // The temporary file's place is taken by a folder.
        fs::create_dir(dir.path().join("checkpoint.tmp")).unwrap();
        assert!(file.replace(b"new").is_err());
        assert_eq!(file.read().unwrap().unwrap(), b"old");
    }
}
