//! Checks whether the mounts of one process reach another; [`peer_groups`] judges the facts. A mount made for
//! the check is unmounted again.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

mod peer_groups;

pub use peer_groups::{
    CONSEQUENCE, Finding, First, Groups, Reach, Sight, Stranger, at_home, reach, remedy, sentence, stranger,
};

use crate::mountinfo;

/// Name of the mount point for the check: always the same, so that a later check removes the mount of a
/// killed process.
const PROBE: &str = ".mount-probe";
/// The first process. Init listens for others (socket activation), which may see other mounts.
const INIT: u32 = 1;
/// The inode of the machine's PID namespace (`PROC_PID_INIT_INO` of include/linux/proc_ns.h).
const MACHINES_PIDS: u64 = 0xEFFF_FFFC;

/// Checks whether process `runtime` sees the mounts of process `own` below `folder`. Blocking.
#[must_use]
pub fn inspect(folder: &Path, own: u32, runtime: Option<u32>) -> Finding {
    let with_first = |pid: u32| Some(namespace(pid).ok()? == namespace(INIT).ok()?);
    let stranger = stranger(with_first(own), runtime.and_then(with_first));
    Finding { reach: judge(folder, own, runtime), stranger }
}

fn judge(folder: &Path, own: u32, runtime: Option<u32>) -> Reach {
    let verdict = by_tables(folder, own, runtime).unwrap_or(Reach::Unknown);
    // The tables show no chain of peer groups through a third namespace. A visible mount proves one.
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
    let at_home = at_home(first(own), runtime.is_some());
    Ok(reach(&Sight { same_namespace, at_home, own: own_groups, runtime: groups.as_deref() }))
}

/// Returns the first process visible to the agent; `None` if /proc hides it.
fn first(own: u32) -> Option<First> {
    let has_agents_mounts = namespace(own).ok()? == namespace(INIT).ok()?;
    let pids = std::fs::metadata(format!("/proc/{INIT}/ns/pid")).ok()?;
    Some(First { has_agents_mounts, is_machines: pids.ino() == MACHINES_PIDS })
}

/// Returns the nearest existing ancestor of `path`, without links.
fn existing(path: &Path) -> io::Result<PathBuf> {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/")).canonicalize()
}

fn table(pid: u32) -> io::Result<Vec<u8>> {
    std::fs::read(format!("/proc/{pid}/mountinfo"))
}

/// Returns the identity of a process's mount namespace: device and inode.
///
/// # Errors
/// The process does not exist, or /proc hides it.
pub fn namespace(pid: u32) -> io::Result<(u64, u64)> {
    std::fs::metadata(format!("/proc/{pid}/ns/mnt")).map(|found| (found.dev(), found.ino()))
}

/// Mounts a file system in `folder` and checks whether the process sees it.
///
/// # Errors
/// The mount fails, or the process's table cannot be read.
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
        assert_eq!(inspect(&dir.path().join("not/there/yet"), own, Some(own)).reach, Reach::Yes);
    }

    #[test]
    fn mounts_of_a_private_namespace_are_invisible_outside_and_the_probe_leaves_nothing() {
        let own_mounts = ["unshare", "--mount", "--propagation", "private"];
        let name = "mounts_of_a_private_namespace_are_invisible_outside_and_the_probe_leaves_nothing";
        if !rustix::process::geteuid().is_root() || !again::in_child(module_path!(), name, &own_mounts) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        // The process that made this one is outside.
        let outside = std::os::unix::process::parent_id();
        let found = inspect(dir.path(), std::process::id(), Some(outside));
        assert_eq!((found.reach, found.stranger), (Reach::No, Stranger::Agent));
        assert!(is_seen(dir.path(), std::process::id()).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        // Away from the first process, and the mount is private: nothing reaches any runtime from here. If
        // /proc hides the first process, that is unknown.
        let expected = if namespace(INIT).is_ok() { Reach::No } else { Reach::Unknown };
        assert_eq!(inspect(dir.path(), std::process::id(), None).reach, expected);
    }

    #[test]
    fn in_processes_and_mounts_of_its_own_nothing_reaches_a_runtime_outside() {
        let own = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--propagation", "private"];
        let name = "in_processes_and_mounts_of_its_own_nothing_reaches_a_runtime_outside";
        if !rustix::process::geteuid().is_root() || !again::in_child(module_path!(), name, &own) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        // The kernel reports no id of a process outside.
        assert_eq!(inspect(dir.path(), std::process::id(), None).reach, Reach::No);
    }
}
