//! Looks whether the mounts of one process reach another one; [`peer_groups`] judges what it finds. What is
//! mounted for that is unmounted again.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

mod peer_groups;

pub use peer_groups::{CONSEQUENCE, Groups, REMEDY, Reach, Sight, reach, sentence};

use crate::mountinfo;

/// The folder that is mounted on, in the folder that is asked about: always the same, so that what a killed
/// process left there is found again.
const PROBE: &str = ".mount-probe";
/// The first process. It listens for others (socket activation): what it sees need not be what they see.
const INIT: u32 = 1;

/// Finds out whether what process `own` mounts below `folder` is seen by process `runtime`. Blocking.
#[must_use]
pub fn look(folder: &Path, own: u32, runtime: Option<u32>) -> Reach {
    let verdict = by_tables(folder, own, runtime).unwrap_or(Reach::Unknown);
    // The tables show no chain of peer groups through a third namespace. A mount that is there proves one.
    let proven = match (verdict, runtime) {
        (Reach::No, Some(pid)) if own == std::process::id() => is_seen(folder, pid).ok(),
        _ => None,
    };
    match (verdict, proven) {
        (_, Some(true)) => Reach::Yes,
        (Reach::No, _) if runtime == Some(INIT) => Reach::Unknown,
        (verdict, _) => verdict,
    }
}

fn by_tables(folder: &Path, own: u32, runtime: Option<u32>) -> io::Result<Reach> {
    let table = table(own)?;
    let folder = existing(folder)?;
    let own_groups = mountinfo::mount_of(&table, &folder).map(|mount| mount.groups).unwrap_or_default();
    let theirs = runtime.and_then(|pid| self::table(pid).ok());
    let groups: Option<Vec<Groups>> =
        theirs.map(|table| mountinfo::mounts(&table).map(|mount| mount.groups).collect());
    let same_namespace = runtime.and_then(|pid| Some(namespace(own).ok()? == namespace(pid).ok()?));
    Ok(reach(&Sight { same_namespace, own: own_groups, runtime: groups.as_deref() }))
}

/// The nearest folder of `path` that exists, without links.
fn existing(path: &Path) -> io::Result<PathBuf> {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/")).canonicalize()
}

fn table(pid: u32) -> io::Result<Vec<u8>> {
    std::fs::read(format!("/proc/{pid}/mountinfo"))
}

/// What tells one mount namespace from another.
fn namespace(pid: u32) -> io::Result<(u64, u64)> {
    std::fs::metadata(format!("/proc/{pid}/ns/mnt")).map(|found| (found.dev(), found.ino()))
}

/// Mounts something in `folder` and looks whether the process sees it.
///
/// # Errors
/// Nothing can be mounted here, or the process's table cannot be read.
fn is_seen(folder: &Path, pid: u32) -> io::Result<bool> {
    let place = folder.join(PROBE);
    let clear = || {
        let _ = unmount(&place, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH);
        let _ = std::fs::remove_dir(&place);
    };
    clear();
    std::fs::create_dir(&place)?;
    let seen = mount("tmpfs", &place, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"size=4k,mode=0700")
        .map_err(io::Error::from)
        .and_then(|()| {
            // Each file system in memory has a device number of its own, the same in all namespaces.
            let device = std::fs::metadata(&place)?.dev();
            let numbers = (rustix::fs::major(device), rustix::fs::minor(device));
            let table = table(pid)?;
            Ok(mountinfo::mounts(&table).any(|mount| mount.device == Some(numbers)))
        });
    clear();
    seen
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_testing::again;

    #[test]
    fn a_process_sees_its_own_mounts() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::process::id();
        assert_eq!(look(&dir.path().join("not/there/yet"), own, Some(own)), Reach::Yes);
    }

    #[test]
    fn nobody_outside_sees_mounts_of_a_private_namespace_and_the_probe_leaves_nothing() {
        let own_mounts = ["unshare", "--mount", "--propagation", "private"];
        let name = "nobody_outside_sees_mounts_of_a_private_namespace_and_the_probe_leaves_nothing";
        if !rustix::process::geteuid().is_root() || !again::in_child(module_path!(), name, &own_mounts) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        // The process that made this one is outside.
        let outside = std::os::unix::process::parent_id();
        assert_eq!(look(dir.path(), std::process::id(), Some(outside)), Reach::No);
        assert!(is_seen(dir.path(), std::process::id()).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(look(dir.path(), std::process::id(), None), Reach::Unknown);
    }
}
