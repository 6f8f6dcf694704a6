//! A folder that others can also write to: device plugins, drivers, containers with a hostPath. The folder is
//! opened once, and all operations use its descriptor and a name: with any links, FIFOs, devices or folders
//! that others put there, nothing outside the folder is read or written, and no operation waits for another
//! process. All functions block.

use std::ffi::{CString, OsStr, OsString};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags};
use rustix::io::Errno;

use crate::{chance, own_file, walk};

/// Maximum number of names to try for a temporary file: others may use each of them.
const TRIES: usize = 8;

/// An open shared folder.
#[derive(Debug)]
pub struct Folder(OwnedFd);

impl Folder {
    /// Opens a folder, and refuses a link to a folder.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_with(path, OFlags::NOFOLLOW)
    }

    /// Opens a folder that may be a link, because only the node's administrator can create it.
    pub fn open_through_links(path: &Path) -> io::Result<Self> {
        Self::open_with(path, OFlags::empty())
    }

    fn open_with(path: &Path, more: OFlags) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | more;
        Ok(Self(rustix::fs::openat(CWD, path, flags, Mode::empty())?))
    }

    /// Returns the content of a plain file of at most `most` bytes; `None` if the file is longer.
    pub fn read(&self, name: &OsStr, most: u64) -> io::Result<Option<Vec<u8>>> {
        let flags = own_file::FOUND.union(OFlags::NOFOLLOW);
        let found = rustix::fs::openat(&self.0, one_name(name)?, flags, Mode::empty())?;
        own_file::read_at_most(&own_file::reopen(found, OFlags::RDONLY)?, most)
    }

    /// Writes `bytes` to a new file, syncs it to the disk, and renames it over the entry `name`: replaces a
    /// link there and never follows it. Fails if the entry is a folder. Others with access to the folder may
    /// forge the content at any time, so never trust it.
    ///
    /// No two threads may replace the same file at the same time.
    pub fn replace(&self, name: &OsStr, bytes: &[u8]) -> io::Result<()> {
        let name = one_name(name)?;
        let (temporary, file) = self.temporary(name)?;
        let mut file = std::fs::File::from(file);
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        let written = written.and_then(|()| self.rename(&temporary, name));
        if written.is_err() {
            // Half a file would only waste space, which may be the cause of the failure.
            let _ = self.unlink(&temporary);
        }
        written
    }

    /// Replaces the entry `name` by a new file of this mode with the content `bytes`. The file is not synced
    /// to the disk, and a reader may see it before it is complete.
    pub fn create(&self, name: &OsStr, bytes: &[u8], mode: u32) -> io::Result<()> {
        self.remove(name)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.0, one_name(name)?, flags, Mode::from_raw_mode(0o600))?;
        let mut file = std::fs::File::from(file);
        file.write_all(bytes)?;
        own_file::permit(&file, mode)
    }

    /// Creates a temporary file next to `name`. Removes the first name, which a killed agent may have left;
    /// if others keep creating entries there, uses another name.
    fn temporary(&self, name: &OsStr) -> io::Result<(OsString, OwnedFd)> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut end = "tmp".to_owned();
        let _ = self.unlink(&beside(name, &end));
        for _ in 0..TRIES {
            let temporary = beside(name, &end);
            match rustix::fs::openat(&self.0, &temporary, flags, Mode::from_raw_mode(0o600)) {
                Ok(file) => return Ok((temporary, file)),
                Err(Errno::EXIST) => end = format!("{:016x}.tmp", chance::word()),
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other("other processes keep creating every name of a temporary file"))
    }

    /// Renames an entry within the folder. An entry at the new name is replaced.
    pub fn rename(&self, from: &OsStr, to: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.0, one_name(from)?, &self.0, one_name(to)?)?)
    }

    /// Removes an entry, a folder with its content. Treats "not found" as success.
    pub fn remove(&self, name: &OsStr) -> io::Result<()> {
        let name = CString::new(one_name(name)?.as_bytes())?;
        match walk::remove(self.0.as_fd(), &name) {
            Err(Errno::NOENT) => Ok(()),
            removed => Ok(removed?),
        }
    }

    /// Removes a file and the temporary file of an interrupted [`Self::replace`]. Treats "not found" as
    /// success.
    pub fn remove_file(&self, name: &OsStr) -> io::Result<()> {
        let _ = self.unlink(&beside(one_name(name)?, "tmp"));
        match self.unlink(name) {
            Err(Errno::NOENT) => Ok(()),
            removed => Ok(removed?),
        }
    }

    fn unlink(&self, name: &OsStr) -> Result<(), Errno> {
        rustix::fs::unlinkat(&self.0, name, AtFlags::empty())
    }

    /// Returns the names in the folder that satisfy `is_wanted`.
    pub fn names(&self, is_wanted: impl Fn(&OsStr) -> bool) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.0)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if !matches!(name.as_bytes(), b"." | b"..") && is_wanted(name) {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Syncs the folder's entries to the disk.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.0)?)
    }
}

/// Returns a name with another suffix.
#[must_use]
pub fn beside(name: &OsStr, end: &str) -> OsString {
    let mut name = name.to_owned();
    name.push(".");
    name.push(end);
    name
}

/// Checks that a name is a single path component.
fn one_name(name: &OsStr) -> io::Result<&OsStr> {
    let bytes = name.as_bytes();
    if matches!(bytes, b"" | b"." | b"..") || bytes.contains(&b'/') {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a valid file name"));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    /// Makes a folder next to a victim, with an entry of kind `what` at `name` in it.
    fn planted(what: &str, name: &str) -> (tempfile::TempDir, Folder) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("victim"), "hush").unwrap();
        let shared = dir.path().join("shared");
        fs::create_dir(&shared).unwrap();
        let place = shared.join(name);
        match what {
            "link" => symlink("../victim", &place).unwrap(),
            "dangling link" => symlink("../made", &place).unwrap(),
            "FIFO" => rustix::fs::mknodat(CWD, &place, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap(),
            "folder" => fs::create_dir_all(place.join("full")).unwrap(),
            _ => {}
        }
        let folder = Folder::open(&shared).unwrap();
        (dir, folder)
    }

    #[test]
    fn entries_of_others_are_never_followed_waited_for_or_written_through() {
        let name = OsStr::new("record");
        for what in ["link", "dangling link", "FIFO", "folder", "nothing"] {
            for place in ["record", "record.tmp"] {
                let (dir, folder) = planted(what, place);
                let is_blocked = what == "folder" && place == "record";
                if place == "record" {
                    assert!(folder.read(name, 10).is_err(), "{what}");
                }
                assert_eq!(folder.replace(name, b"ours").is_err(), is_blocked, "{what} at {place}");
                if is_blocked {
                    folder.rename(name, OsStr::new("aside")).unwrap();
                    folder.replace(name, b"ours").unwrap();
                }
                assert_eq!(folder.read(name, 4).unwrap().unwrap(), b"ours", "{what} at {place}");
                let made = fs::symlink_metadata(dir.path().join("shared/record")).unwrap();
                assert!(made.is_file() && made.mode() & 0o7777 == 0o600);
                assert_eq!(fs::read_to_string(dir.path().join("victim")).unwrap(), "hush");
                assert!(!dir.path().join("made").exists());
                folder.remove_file(name).unwrap();
                folder.remove_file(name).unwrap();
                folder.remove(OsStr::new("record.tmp")).unwrap();
                assert!(folder.names(|name| name != "aside").unwrap().is_empty(), "{what} at {place}");
            }
        }
    }

    #[test]
    fn a_name_never_leads_out_of_the_folder() {
        let (dir, folder) = planted("nothing", "x");
        for name in ["", ".", "..", "../victim", "a/b", "/etc/hostname"] {
            let name = OsStr::new(name);
            assert!(folder.read(name, 10).is_err() && folder.replace(name, b"x").is_err(), "{name:?}");
            assert!(folder.remove(name).is_err() && folder.remove_file(name).is_err(), "{name:?}");
            assert!(folder.rename(name, OsStr::new("y")).is_err(), "{name:?}");
        }
        assert_eq!(fs::read_to_string(dir.path().join("victim")).unwrap(), "hush");
        symlink("shared", dir.path().join("link")).unwrap();
        assert!(Folder::open(&dir.path().join("link")).is_err());
        assert!(Folder::open_through_links(&dir.path().join("link")).is_ok());
    }

    #[test]
    fn a_file_that_is_too_long_is_not_returned() {
        let (_dir, folder) = planted("nothing", "x");
        let name = OsStr::new("record");
        assert_eq!(folder.read(name, 10).unwrap_err().kind(), io::ErrorKind::NotFound);
        folder.replace(name, b"12345").unwrap();
        assert_eq!(folder.read(name, 4).unwrap(), None);
        assert_eq!(folder.read(name, 5).unwrap().unwrap(), b"12345");
    }
}
