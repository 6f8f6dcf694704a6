//! Removes a folder with all in it, whatever containers have put there: no symbolic link is followed, and no mount
//! point is crossed. A file system that is still mounted somewhere below makes it fail, and keeps what is in it.

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Deepest tree that is removed: each level costs an open file.
const MAX_DEPTH: usize = 512;

/// Removes the folder at `path`. One that isn't there is removed already.
pub(in crate::pods) fn remove_folder(path: &Path) -> Result<(), String> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(format!("{} is not a folder that can be removed", path.display()));
    };
    let failed = |e: Errno| {
        let why = if e == Errno::XDEV || e == Errno::BUSY {
            "something is still mounted in it; unmount it".to_owned()
        } else {
            e.to_string()
        };
        format!("cannot remove the folder {}: {why}", path.display())
    };
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::PATH;
    let parent = match rustix::fs::openat(CWD, parent, flags, Mode::empty()) {
        Ok(parent) => parent,
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(failed(e)),
    };
    remove(parent.as_fd(), name, 0).map_err(failed)
}

/// Removes the entry `name` of a folder.
fn remove(parent: impl AsFd, name: &OsStr, depth: usize) -> Result<(), Errno> {
    let parent = parent.as_fd();
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        // Linux says ISDIR of a folder, other file systems (and POSIX) PERM.
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(e) => return Err(e),
    }
    if depth >= MAX_DEPTH {
        return Err(Errno::LOOP);
    }
    match open_folder(parent, name) {
        Ok(folder) => {
            for entry in entries(&folder)? {
                remove(folder.as_fd(), &entry, depth + 1)?;
            }
        }
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(e),
    }
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) | Ok(()) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Opens a folder that is on the same mount, and is no link.
fn open_folder(parent: impl AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), resolve)
}

/// The names in a folder, without `.` and `..`. Read whole first: entries that go while it is read would confuse it.
pub(super) fn entries(folder: &OwnedFd) -> Result<Vec<std::ffi::OsString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        if name != c"." && name != c".." {
            names.push(OsStr::from_bytes(name.to_bytes()).to_owned());
        }
    }
    Ok(names)
}

/// What kind of thing an entry is, a link seen as a link.
pub(super) fn kind(parent: impl AsFd, name: &OsStr) -> Result<FileType, Errno> {
    let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn links_are_removed_and_what_they_lead_to_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (outside, inside) = (dir.path().join("outside"), dir.path().join("inside"));
        fs::create_dir_all(inside.join("a/b")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "").unwrap();
        fs::write(inside.join("a/b/file"), "").unwrap();
        std::os::unix::fs::symlink(&outside, inside.join("a/link")).unwrap();
        std::os::unix::fs::symlink(outside.join("kept"), inside.join("link")).unwrap();
        remove_folder(&inside).unwrap();
        assert!(!inside.exists() && outside.join("kept").exists());
        remove_folder(&inside).unwrap();
        remove_folder(&inside.join("never/there")).unwrap();
    }

    #[test]
    fn a_link_in_the_folders_own_place_is_removed_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (outside, link) = (dir.path().join("outside"), dir.path().join("link"));
        fs::create_dir(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, &link).unwrap();
        remove_folder(&link).unwrap();
        assert!(outside.exists() && !link.is_symlink());
    }

    #[test]
    fn read_only_folders_are_no_obstacle_and_deep_ones_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("deep");
        let mut path = deep.clone();
        for _ in 0..100 {
            path.push("x");
        }
        fs::create_dir_all(&path).unwrap();
        remove_folder(&deep).unwrap();
        assert!(!deep.exists());
    }
}
