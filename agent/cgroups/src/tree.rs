//! The directories of a hierarchy: made from the top, removed from the bottom.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::layout::{Hierarchy, Version};
use super::{CgroupError, Store, is_gone};
use beelet_base::walk::{Walk, WalkStep};

/// Controllers to pass down to pods on version 2, if the kernel has them.
const PASSED_DOWN: [&str; 6] = ["cpu", "cpuset", "hugetlb", "io", "memory", "pids"];

/// Makes `relative` and its missing ancestors, ready for its controllers: on a hybrid machine all controllers
/// are version 1's, and cgroup2 needs none.
pub(super) fn make(
    hierarchy: &Hierarchy,
    version: Version,
    relative: &Path,
    store: &Store,
) -> Result<(), CgroupError> {
    let mut parent = hierarchy.mount.clone();
    for name in relative.components() {
        if version == Version::V2 {
            pass_down(&parent)?;
        }
        let child = parent.join(name);
        let made = match store {
            Store::Kernel | Store::Systemd(_) => fs::create_dir(&child),
            Store::Folders => make_folder(&parent, &child),
        };
        match made {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(CgroupError::io("make the cgroup", &child, error)),
        }
        if hierarchy.controllers.contains("cpuset") {
            inherit(&parent, &child, "cpuset.cpus")?;
            inherit(&parent, &child, "cpuset.mems")?;
        }
        parent = child;
    }
    Ok(())
}

/// Makes a plain folder atomically with its files, as the kernel makes a cgroup.
fn make_folder(parent: &Path, child: &Path) -> io::Result<()> {
    if child.exists() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    static MADE: AtomicU64 = AtomicU64::new(0);
    let folder = parent.join(format!(".new-{}", MADE.fetch_add(1, Ordering::Relaxed)));
    fs::create_dir(&folder)?;
    for file in files(parent)? {
        fs::copy(parent.join(&file), folder.join(&file))?;
    }
    match fs::rename(&folder, child) {
        // Another thread was faster.
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => fs::remove_dir_all(folder),
        renamed => renamed,
    }
}

/// Returns the names of the files in a plain folder.
fn files(dir: &Path) -> io::Result<Vec<OsString>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>()?,
        Err(error) if is_gone(&error) => Vec::new(),
        Err(error) => return Err(error),
    };
    Ok(entries.iter().filter(|e| e.path().is_file()).map(fs::DirEntry::file_name).collect())
}

/// Enables the controllers in `parent` that its children need, if `parent` has them and they are not enabled
/// yet.
fn pass_down(parent: &Path) -> Result<(), CgroupError> {
    let words = |file: &str| -> Result<BTreeSet<String>, CgroupError> {
        let path = parent.join(file);
        let text = fs::read_to_string(&path).map_err(|error| CgroupError::io("read", &path, error))?;
        Ok(text.split_whitespace().map(str::to_owned).collect())
    };
    let (offered, enabled) = (words("cgroup.controllers")?, words("cgroup.subtree_control")?);
    let missing: Vec<String> = PASSED_DOWN
        .iter()
        .filter(|name| offered.contains(**name) && !enabled.contains(**name))
        .map(|name| format!("+{name}"))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let path = parent.join("cgroup.subtree_control");
    fs::write(&path, missing.join(" "))
        .map_err(|error| CgroupError::io("enable controllers in", &path, error))
}

/// Copies the parent's cpuset: on version 1 a new cpuset is empty, and no process may enter it.
fn inherit(parent: &Path, child: &Path, file: &str) -> Result<(), CgroupError> {
    let read = |dir: &Path| {
        let path = dir.join(file);
        fs::read_to_string(&path).map_err(|error| CgroupError::io("read", &path, error))
    };
    if !read(child)?.trim().is_empty() {
        return Ok(());
    }
    let path = child.join(file);
    fs::write(&path, read(parent)?.trim()).map_err(|error| CgroupError::io("write", &path, error))
}

/// Removes `dir` and the directories below it, from the bottom, by descriptors: a container that makes
/// cgroups of its own may nest them deeper than any path. The kernel removes a cgroup's files with it.
pub(super) fn remove(dir: &Path, store: &Store) -> Result<(), CgroupError> {
    let failed = |error: Errno| CgroupError::io("remove the cgroup", dir, error.into());
    match open(dir).and_then(|top| empty(Walk::of(top)?, store)) {
        Ok(()) => {}
        Err(error) if is_gone(&error.into()) => return Ok(()),
        Err(error) => return Err(failed(error)),
    }
    match rustix::fs::rmdir(dir) {
        Ok(()) => Ok(()),
        Err(error) if is_gone(&error.into()) => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// Removes the directories below the top of a walk.
fn empty(mut walk: Walk, store: &Store) -> Result<(), Errno> {
    while let Some(step) = walk.step()? {
        let done = match step {
            WalkStep::Entry(name, FileType::Directory) => walk.enter(&name),
            WalkStep::Entry(name, _) if matches!(store, Store::Folders) => {
                rustix::fs::unlinkat(walk.here(), &name, AtFlags::empty())
            }
            WalkStep::Left(name) => rustix::fs::unlinkat(walk.here(), &name, AtFlags::REMOVEDIR),
            // The rest of a cgroup that was moved in between makes the removal of its parent fail.
            WalkStep::Entry(..) | WalkStep::End | WalkStep::Lost => Ok(()),
        };
        match done {
            Err(error) if !is_gone(&error.into()) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Adds the ids of all processes in `dir` and below it to `pids`. Uses descriptors, as [`remove`] does.
pub(super) fn pids(dir: &Path, pids: &mut BTreeSet<u32>) -> Result<(), CgroupError> {
    let listed = open(dir).and_then(|top| {
        let mut walk = Walk::of(top)?;
        add_pids(walk.here(), pids)?;
        while let Some(step) = walk.step()? {
            match step {
                WalkStep::Entry(name, FileType::Directory) => match walk.enter(&name) {
                    Ok(()) => add_pids(walk.here(), pids)?,
                    Err(error) if is_gone(&error.into()) => {}
                    Err(error) => return Err(error),
                },
                WalkStep::Lost => return Err(Errno::STALE),
                WalkStep::Entry(..) | WalkStep::Left(_) | WalkStep::End => {}
            }
        }
        Ok(())
    });
    match listed.map_err(io::Error::from) {
        Err(error) if !is_gone(&error) => Err(CgroupError::io("list the processes of", dir, error)),
        _ => Ok(()),
    }
}

fn add_pids(cgroup: BorrowedFd<'_>, pids: &mut BTreeSet<u32>) -> Result<(), Errno> {
    let read = rustix::fs::openat(cgroup, "cgroup.procs", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| io::read_to_string(fs::File::from(file)));
    match read {
        Ok(text) => {
            pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()).filter(|pid| *pid != 0));
            Ok(())
        }
        Err(error) if is_gone(&error) => Ok(()),
        // The processes of a threaded cgroup of version 2 are listed at its domain.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
        Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
    }
}

fn open(dir: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(dir, flags, Mode::empty())
}

/// Returns the names of the cgroups right below `dir`; none if `dir` is missing.
pub(super) fn children(dir: &Path) -> Result<Vec<String>, CgroupError> {
    let list = || -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                names.extend(entry.file_name().into_string().ok());
            }
        }
        names.sort();
        Ok(names)
    };
    match list() {
        Ok(names) => Ok(names),
        Err(error) if is_gone(&error) => Ok(Vec::new()),
        Err(error) => Err(CgroupError::io("list", dir, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_nested_deeper_than_any_path_hide_no_process_and_are_removed() {
        let dir = beelet_testing::folders::in_memory();
        let top = dir.path().join("pod");
        fs::create_dir(&top).unwrap();
        fs::write(top.join("cgroup.procs"), "7\n").unwrap();
        let last = beelet_testing::folders::make_deep(&top, 5000);
        let flags = OFlags::WRONLY | OFlags::CREATE;
        let procs = rustix::fs::openat(last, "cgroup.procs", flags, Mode::from_raw_mode(0o600)).unwrap();
        rustix::io::write(procs, b"12\n0\n").unwrap();
        let mut found = BTreeSet::new();
        pids(&top, &mut found).unwrap();
        assert_eq!(found, BTreeSet::from([7, 12]));
        remove(&top, &Store::Folders).unwrap();
        assert!(!top.exists());
        remove(&top, &Store::Folders).unwrap();
        pids(&top, &mut found).unwrap();
    }
}
