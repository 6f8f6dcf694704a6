//! Removes a folder with its content, which containers may have written: follows no symbolic link and crosses
//! no mount point. If a file system is still mounted somewhere below, the removal fails and that file system
//! keeps its content.
//!
//! Trees may have any depth and any number of names, and memory is bounded: a tree deeper than [`DEEP`] is
//! moved to the top under a new name, level by level, until it is not deep any more.

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::{Walk, WalkStep};
use crate::Error;

/// Depth from which a tree is moved to the top.
const DEEP: usize = 4096;
/// Maximum number of walks through a folder that is not empty afterwards. Deep trees need several: the limit
/// is this times [`DEEP`] levels. So do kernels whose positions in a tmpfs folder shift while names are
/// removed (before 6.6).
const ROUNDS: usize = 10_000;

/// Removes the folder at `path`. A missing folder counts as removed; so does a name too long to exist.
pub fn remove_folder(path: &Path) -> Result<(), Error> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::NotRemovable(path.to_owned()));
    };
    let failed = |cause: Errno| Error::RemoveFolder { path: path.to_owned(), cause };
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::PATH;
    let parent = match rustix::fs::openat(CWD, parent, flags, Mode::empty()) {
        Ok(parent) => parent,
        Err(Errno::NOENT | Errno::NAMETOOLONG) => return Ok(()),
        Err(e) => return Err(failed(e)),
    };
    let Ok(name) = CString::new(name.as_bytes()) else { return Ok(()) };
    remove(parent.as_fd(), &name).map_err(failed)
}

/// Removes the entry `name` of a folder, with its content.
pub fn remove(parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    if unlink(parent, name)? {
        return Ok(());
    }
    for _ in 0..ROUNDS {
        let mut removed = false;
        match Walk::open(parent, OsStr::from_bytes(name.to_bytes())) {
            Ok(walk) => empty(walk, &mut removed)?,
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(e),
        }
        if remove_empty(parent, name)? {
            return Ok(());
        }
        if !removed {
            break;
        }
    }
    Err(Errno::NOTEMPTY)
}

/// Removes the content of a folder. Entries may stay; only [`remove_empty`] of the folder shows whether.
fn empty(mut walk: Walk, removed: &mut bool) -> Result<(), Errno> {
    let mut hung = 0_u64;
    while let Some(step) = walk.step()? {
        match step {
            WalkStep::Entry(name, kind) => {
                let here = walk.here();
                let gone = (kind != FileType::Directory && unlink(here, &name)?)
                    || remove_empty(here, &name)?
                    || (walk.depth() >= DEEP && hang_up(here, &name, walk.top(), &mut hung));
                if gone {
                    *removed = true;
                } else {
                    match walk.enter(&name) {
                        // An entry that was removed or became a link in between is seen in the next round.
                        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                        Err(e) => return Err(e),
                    }
                }
            }
            WalkStep::Left(name) => *removed |= remove_empty(walk.here(), &name)?,
            // The next round finds the rest of a folder that was moved in between, if it is still below.
            WalkStep::End | WalkStep::Lost => {}
        }
    }
    Ok(())
}

/// Removes an entry that is not a folder; returns false for a folder.
fn unlink(parent: BorrowedFd<'_>, name: &CStr) -> Result<bool, Errno> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT | Errno::NAMETOOLONG) => Ok(true),
        // For a folder, Linux returns ISDIR, other file systems (and POSIX) PERM.
        Err(Errno::ISDIR | Errno::PERM) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Removes an empty folder; returns false if it has entries.
fn remove_empty(parent: BorrowedFd<'_>, name: &CStr) -> Result<bool, Errno> {
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
        // The entry is not a folder any more.
        Err(Errno::NOTDIR) => unlink(parent, name),
        Err(e) => Err(e),
    }
}

/// Moves a folder to `top` under an unused name. Returns false if the file system refuses (different quota
/// projects): then the walk continues downwards.
fn hang_up(parent: BorrowedFd<'_>, name: &CStr, top: BorrowedFd<'_>, hung: &mut u64) -> bool {
    for _ in 0..ROUNDS {
        *hung += 1;
        let moved = format!("deep-{hung}");
        match rustix::fs::renameat_with(parent, name, top, moved, RenameFlags::NOREPLACE) {
            Ok(()) => return true,
            Err(Errno::EXIST) => {}
            Err(_) => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use beelet_testing::folders::{in_memory, make_deep};

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
    fn a_tree_of_a_hundred_thousand_levels_is_removed() {
        let dir = in_memory();
        let deep = dir.path().join("deep");
        fs::create_dir(&deep).unwrap();
        let last = make_deep(&deep, 100_000);
        rustix::fs::symlinkat("/", last, "link").unwrap();
        // Names that moved trees would get.
        fs::write(deep.join("deep-1"), "").unwrap();
        fs::create_dir_all(deep.join("deep-2/x")).unwrap();
        remove_folder(&deep).unwrap();
        assert!(!deep.exists());
    }

    #[test]
    fn folders_of_many_names_and_folders_are_removed() {
        let dir = in_memory();
        let wide = dir.path().join("wide");
        for i in 0..5000 {
            fs::create_dir_all(wide.join(format!("{i:060}/x"))).unwrap();
            fs::write(wide.join(format!("file-{i:060}")), "").unwrap();
        }
        remove_folder(&wide).unwrap();
        assert!(!wide.exists());
    }

    #[test]
    fn read_only_folders_are_no_obstacle_to_root() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        fs::create_dir_all(top.join("a/b")).unwrap();
        for path in ["a/b", "a", ""] {
            fs::set_permissions(top.join(path), fs::Permissions::from_mode(0o000)).unwrap();
        }
        remove_folder(&top).unwrap();
        assert!(!top.exists());
    }

    #[test]
    fn a_name_too_long_to_exist_counts_as_removed() {
        let dir = tempfile::tempdir().unwrap();
        remove_folder(&dir.path().join("x".repeat(256))).unwrap();
        remove_folder(&dir.path().join("x".repeat(256)).join("y")).unwrap();
    }
}
