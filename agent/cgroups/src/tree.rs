//! The directories of one hierarchy: made from the top, removed from the bottom.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::Hierarchy;
use super::{CgroupError, Store, is_gone};

/// Controllers that are passed down to pods on version 2, where the kernel has them.
const PASSED_DOWN: [&str; 6] = ["cpu", "cpuset", "hugetlb", "io", "memory", "pids"];

/// Makes `relative` and what is missing above it, ready for its controllers.
pub(super) fn make(hierarchy: &Hierarchy, relative: &Path, store: Store) -> Result<(), CgroupError> {
    let mut parent = hierarchy.mount.clone();
    for name in relative.components() {
        if hierarchy.is_v2 {
            pass_down(&parent)?;
        }
        let child = parent.join(name);
        let made = match store {
            Store::Kernel => fs::create_dir(&child),
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

/// Does for a plain folder what the kernel does for a cgroup: it is there with its files, or not at all.
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

/// The names of the files in a plain folder.
fn files(dir: &Path) -> io::Result<Vec<OsString>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>()?,
        Err(error) if is_gone(&error) => Vec::new(),
        Err(error) => return Err(error),
    };
    Ok(entries.iter().filter(|e| e.path().is_file()).map(fs::DirEntry::file_name).collect())
}

/// Enables in `parent` what its children need; only what is not enabled yet and what it has itself.
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

/// On version 1 a new cpuset is empty, and no process may enter it: it gets its parent's.
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

/// Removes `dir` and all below it. Only the directories: a cgroup's files go with it.
pub(super) fn remove(dir: &Path, store: Store) -> Result<(), CgroupError> {
    for name in children(dir)? {
        remove(&dir.join(name), store)?;
    }
    if store == Store::Folders {
        let emptied = files(dir).and_then(|all| all.iter().try_for_each(|f| fs::remove_file(dir.join(f))));
        emptied.map_err(|error| CgroupError::io("empty", dir, error))?;
    }
    match fs::remove_dir(dir) {
        Ok(()) => Ok(()),
        Err(error) if is_gone(&error) => Ok(()),
        Err(error) => Err(CgroupError::io("remove the cgroup", dir, error)),
    }
}

/// Adds the ids of all processes in `dir` and below it to `pids`.
pub(super) fn pids(dir: &Path, pids: &mut BTreeSet<u32>) -> Result<(), CgroupError> {
    let path = dir.join("cgroup.procs");
    match fs::read_to_string(&path) {
        Ok(text) => {
            pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()).filter(|pid| *pid != 0));
        }
        Err(error) if is_gone(&error) => return Ok(()),
        // A threaded cgroup of version 2 has its processes listed at its domain.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        Err(error) => return Err(CgroupError::io("read", &path, error)),
    }
    for name in children(dir)? {
        self::pids(&dir.join(name), pids)?;
    }
    Ok(())
}

/// The names of the cgroups right below `dir`; none if `dir` is not there.
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
