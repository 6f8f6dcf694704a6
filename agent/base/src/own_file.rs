//! Plain files in folders that containers may also reach, by a hostPath: must never follow, wait for, or
//! write through entries that containers put in a file's place, nor open a device, since opening alone may
//! have an effect (a watchdog, a tape). So a file is first found (`O_PATH`) and checked, and then opened by
//! its descriptor. Blocking.
//!
//! Together with [`crate::shared_folder`] the only door to files in folders that others can write to.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::walk::remove_folder;

/// Maximum number of times that foreign entries are removed before the agent gives up: another process may
/// recreate them.
const TRIES: usize = 3;

/// Opens a plain file for reading. The kernel refuses a link, and the call does not wait for a FIFO.
pub fn read(path: &Path) -> io::Result<File> {
    reopen(find(path)?, OFlags::RDONLY)
}

/// Opens a plain file for reading, through links too: for files of the node's administrator, which may be
/// links, in folders that are often mounted into containers (`/etc`, that of CNI).
pub fn read_through_links(path: &Path) -> io::Result<File> {
    reopen(rustix::fs::openat(CWD, path, FOUND, Mode::empty())?, OFlags::RDONLY)
}

/// Finds an entry of any kind without opening it, and follows no link. As long as the descriptor is open, no
/// other entry of the file system can get the same inode number.
pub fn find(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(CWD, path, FOUND.union(OFlags::NOFOLLOW), Mode::empty())?)
}

/// Reads an open file of at most `most` bytes. `None` if it has more.
pub fn read_at_most(file: &File, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= most).then_some(bytes))
}

/// Opens a plain file that was found by `O_PATH`.
pub fn reopen(found: impl AsFd, access: OFlags) -> io::Result<File> {
    open_again(found.as_fd(), FileType::RegularFile, access)
}

/// Opens a block device that was found by `O_PATH` for reading: for block volumes.
pub fn open_block_device(found: impl AsFd) -> io::Result<File> {
    open_again(found.as_fd(), FileType::BlockDevice, OFlags::RDONLY)
}

fn open_again(found: BorrowedFd<'_>, wanted: FileType, access: OFlags) -> io::Result<File> {
    match FileType::from_raw_mode(rustix::fs::fstat(found)?.st_mode) {
        kind if kind == wanted => {}
        FileType::Symlink => return Err(io::Error::other("is a symbolic link")),
        _ => return Err(io::Error::other("is not a plain file")),
    }
    let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let by_descriptor = format!("/proc/self/fd/{}", found.as_raw_fd());
    Ok(rustix::fs::open(by_descriptor, flags, Mode::empty())?.into())
}

/// Returns the name of an open file in its folder; the last name, if the file was removed.
pub fn name(file: &File) -> io::Result<OsString> {
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let name = path.file_name().unwrap_or_default().as_bytes();
    // d_path() in the kernel's fs/d_path.c adds this to the path of a removed file.
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    Ok(OsStr::from_bytes(name).to_owned())
}

/// Flags for finding a file to check before opening it.
pub const FOUND: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// Opens a file of the agent's own for writing, without truncating it, and makes a missing one. Removes other
/// kinds of entries in its place.
pub fn own(path: &Path) -> io::Result<File> {
    let mut tries = 0;
    loop {
        tries += 1;
        clear(path)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = match rustix::fs::openat(CWD, path, flags, Mode::from_raw_mode(0o600)) {
            Ok(made) => Ok(made.into()),
            Err(Errno::EXIST) => {
                let found = rustix::fs::openat(CWD, path, FOUND.union(OFlags::NOFOLLOW), Mode::empty());
                found.map_err(io::Error::from).and_then(|found| reopen(found, OFlags::RDWR))
            }
            Err(error) => Err(error.into()),
        };
        if opened.is_ok() || tries == TRIES {
            return opened;
        }
    }
}

/// Removes the entry at `path`, unless it is a plain file.
pub fn clear(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => Ok(()),
        Ok(_) => remove_folder(path).map_err(io::Error::other),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

/// Sets a file's permissions by its descriptor, independent of the umask.
pub fn permit(file: &File, mode: u32) -> io::Result<()> {
    file.set_permissions(fs::Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn only_plain_files_are_read_and_other_entries_are_replaced_by_own_files() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        fs::write(&secret, "hush").unwrap();
        let at = |name: &str| dir.path().join(name);
        std::os::unix::fs::symlink(&secret, at("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
        let mode = Mode::from_raw_mode(0o666);
        for (name, kind) in [("fifo", FileType::Fifo), ("socket", FileType::Socket)] {
            rustix::fs::mknodat(CWD, at(name), kind, mode, 0).unwrap();
        }
        fs::create_dir_all(at("folder/full")).unwrap();
        for name in ["link", "dangling", "fifo", "socket", "folder"] {
            let path = at(name);
            assert!(read(&path).is_err(), "{name}");
            let mut file = own(&path).unwrap();
            file.write_all(b"ours").unwrap();
            permit(&file, 0o666).unwrap();
            let mut text = String::new();
            read(&path).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "ours", "{name}");
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o666);
        }
        assert_eq!(fs::read_to_string(&secret).unwrap(), "hush");
        assert!(!at("nowhere").exists());
        // The administrator's link leads to plain files only.
        let mut text = String::new();
        std::os::unix::fs::symlink(&secret, at("again")).unwrap();
        read_through_links(&at("again")).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "hush");
        for other in ["/dev/null", "/dev/zero"] {
            assert!(read(Path::new(other)).unwrap_err().to_string().contains("not a plain file"));
            assert!(read_through_links(Path::new(other)).is_err());
        }
        let file = read(&secret).unwrap();
        assert_eq!(read_at_most(&file, 3).unwrap(), None);
        assert_eq!(read_at_most(&read(&secret).unwrap(), 4).unwrap().unwrap(), b"hush");
        // An existing file stays as it is.
        let mut text = String::new();
        own(&at("link")).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "ours");
        assert_eq!(read(&at("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
