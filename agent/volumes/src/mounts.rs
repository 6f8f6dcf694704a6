//! The agent's own mounts: file systems in memory and bind mounts of volumes' parts, below the pods' folder.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{AtFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use super::Error;
use beelet_base::mountinfo::{self, Mount};
use beelet_policy::volumes::content::{BYTES, NAMES};

/// Time limit for unmounting a network file system: the kubelet's.
const SERVER: Duration = Duration::from_secs(60);

/// Mounts a file system in memory for the files of objects, unless one is mounted already. Its size allows
/// two sets with the maximum number of files per pod, and the links to a set: a second limit, which also
/// holds for files that containers cause.
pub(super) fn mount_for_content(path: &Path) -> Result<(), Error> {
    let pages = NAMES.saturating_mul(rustix::param::page_size()).saturating_add(BYTES);
    mount_tmpfs(path, &[("size", pages.saturating_mul(2)), ("nr_inodes", NAMES * 4)], 0o755)
}

/// Mounts a file system in memory of `size` bytes on a folder, unless one is mounted already.
pub(super) fn mount_memory(path: &Path, size: i64, mode: u32) -> Result<(), Error> {
    mount_tmpfs(path, &[("size", size)], mode)
}

fn mount_tmpfs(path: &Path, limits: &[(&str, impl std::fmt::Display)], mode: u32) -> Result<(), Error> {
    if is_mount_point(path)? {
        return Ok(());
    }
    let mut options = format!("mode=0{mode:o}");
    for (name, limit) in limits {
        options = format!("{options},{name}={limit}");
    }
    let mount = |options: String| -> Result<Result<(), Errno>, Error> {
        let data = CString::new(options).map_err(Error::io("mount a tmpfs on", path))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        Ok(rustix::mount::mount("tmpfs", path, "tmpfs", flags, data.as_c_str()))
    };
    // Swap must not write the files to the disk (KEP-2400). Linux has the option since 6.4.
    let mounted = match mount(format!("{options},noswap"))? {
        Err(Errno::INVAL) => mount(options)?,
        mounted => mounted,
    };
    mounted.map_err(Error::io("mount a tmpfs on", path))
}

/// Mounts a file system of huge pages of `size` bytes on a folder, unless one is mounted already.
pub(super) fn mount_huge_pages(path: &Path, size: i64) -> Result<(), Error> {
    let action = "mount huge pages on";
    if is_mount_point(path)? {
        let there = rustix::fs::statfs(path).map_err(Error::io(action, path))?;
        let same = there.f_type == libc::HUGETLBFS_MAGIC && i128::from(there.f_bsize) == i128::from(size);
        let other =
            || Error::unmet("another file system, or huge pages of another size, are mounted already");
        return if same { Ok(()) } else { Err(other()) };
    }
    let data = CString::new(format!("pagesize={size}")).map_err(Error::io(action, path))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("hugetlbfs", path, "hugetlbfs", flags, data.as_c_str())
        .map_err(Error::io(action, path))
}

/// Returns true if a folder is the top of a file system in memory.
pub(super) fn is_tmpfs(folder: &OwnedFd) -> Result<bool, Errno> {
    let top = rustix::fs::statx(folder, c"", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
    let mounted = top.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    Ok(mounted && rustix::fs::fstatfs(folder)?.f_type == libc::TMPFS_MAGIC)
}

/// Unmounts everything at and below `folder`, the innermost first.
pub fn unmount_below(folder: &Path) -> Result<(), Error> {
    unmount_all(&real(folder), |_| true)
}

/// Unmounts everything at and below a mount point without accessing it: its server may be unreachable.
pub(super) fn unmount_at(point: &Path) -> Result<(), Error> {
    unmount_all(&as_in_table(point), |_| true)
}

/// Unmounts everything below `folder`, but nothing at it: mounts that containers made in a volume.
pub(super) fn unmount_within(folder: &Path) -> Result<(), Error> {
    let own = as_in_table(folder);
    unmount_all(&own, |point| point != own)
}

/// Returns the path of a mount point as the kernel shows it, without accessing the mounted file system.
fn as_in_table(point: &Path) -> PathBuf {
    match (point.parent(), point.file_name()) {
        (Some(parent), Some(name)) => real(parent).join(name),
        _ => point.to_owned(),
    }
}

fn unmount_all(folder: &Path, is_meant: impl Fn(&Path) -> bool) -> Result<(), Error> {
    let table = table()?;
    let is_meant = |mount: &Mount<'_>| mount.point.starts_with(folder) && is_meant(&mount.point);
    let mut mounts: Vec<Mount<'_>> = mountinfo::mounts(&table).filter(is_meant).collect();
    // The latest mount is unmounted first: it hides an earlier one on the same folder.
    mounts.reverse();
    mounts.sort_by_key(|mount| std::cmp::Reverse(mount.point.components().count()));
    for Mount { point, fs_type, .. } in mounts {
        if fs_type.starts_with(b"nfs") { unmount_network(&point)? } else { unmount(&point)? }
    }
    Ok(())
}

/// Unmounts a file system whose server may be unreachable: after [`SERVER`] by force, like
/// `mount.CleanupMountWithForce`, which loses data that the kernel has not written yet.
fn unmount_network(point: &Path) -> Result<(), Error> {
    let (sender, done) = mpsc::channel();
    let own = point.to_owned();
    std::thread::spawn(move || sender.send(unmount(&own)));
    match done.recv_timeout(SERVER) {
        Ok(done) => done,
        Err(_) => {
            let flags = UnmountFlags::NOFOLLOW | UnmountFlags::FORCE | UnmountFlags::DETACH;
            rustix::mount::unmount(point, flags)
                .map_err(|cause| Error::Busy { path: point.to_owned(), cause })
        }
    }
}

/// Unmounts the file system at `point`, which must be a mount point itself.
pub(super) fn unmount(point: &Path) -> Result<(), Error> {
    rustix::mount::unmount(point, UnmountFlags::NOFOLLOW)
        .map_err(|cause| Error::Busy { path: point.to_owned(), cause })
}

/// Returns true if `path` is a mount point. Does not follow a link at `path`, and does not access the mounted
/// file system: its server may be unreachable.
pub(super) fn is_mount_point(path: &Path) -> Result<bool, Error> {
    mountinfo::is_mount_point(path).map_err(Error::io("look for a mount at", path))
}

/// Returns true if a file system on this device is mounted anywhere that the agent sees.
pub(super) fn is_mounted(device: &Path) -> Result<bool, Error> {
    let found = std::fs::metadata(device).map_err(Error::io("find", device))?;
    if !found.file_type().is_block_device() {
        return Ok(false);
    }
    let numbers = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
    Ok(mountinfo::mounts(&table()?).any(|mount| mount.device == Some(numbers)))
}

/// Returns a path as the kernel shows it: a configured path may lead through links (/var/run).
pub(super) fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Returns the mount points at and below `folder`, in the order of mounting.
pub(super) fn below(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    Ok(mounts_below(&table()?, folder).map(|mount| mount.point).collect())
}

fn mounts_below<'a>(table: &'a [u8], folder: &Path) -> impl Iterator<Item = Mount<'a>> {
    let folder = real(folder);
    mountinfo::mounts(table).filter(move |mount| mount.point.starts_with(&folder))
}

fn table() -> Result<Vec<u8>, Error> {
    mountinfo::read().map_err(Error::io("read", mountinfo::PATH))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;

    use super::*;
    use beelet_testing::again;

    #[test]
    fn mount_points_need_not_be_utf8() {
        let own_mounts = ["unshare", "--mount", "--propagation", "private"];
        if !rustix::process::geteuid().is_root()
            || !again::in_child(module_path!(), "mount_points_need_not_be_utf8", &own_mounts)
        {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (volume, part, other) =
            (dir.path().join("volume"), dir.path().join("part"), dir.path().join("other"));
        for folder in [&volume, &part, &other] {
            fs::create_dir(folder).unwrap();
        }
        mount_for_content(&volume).unwrap();
        let limits = rustix::fs::statvfs(&volume).unwrap();
        assert_eq!(limits.f_files, 4 * NAMES as u64);
        let size = limits.f_blocks * limits.f_frsize;
        assert!((1..1 << 33).contains(&size), "{size}");
        fs::create_dir(volume.join("dir")).unwrap();
        rustix::mount::mount_bind(volume.join("dir"), &part).unwrap();
        // A container renames the source of a bind mount, and a USB stick has a label, both not in UTF-8.
        fs::rename(volume.join("dir"), volume.join(OsStr::from_bytes(b"\xff"))).unwrap();
        let stick = dir.path().join(OsStr::from_bytes(b"caf\xe9 \n1"));
        fs::create_dir(&stick).unwrap();
        mount_memory(&stick, 1 << 20, 0o755).unwrap();
        assert!(is_mount_point(&part).unwrap() && is_mount_point(&stick).unwrap());
        assert!(!is_mount_point(&other).unwrap());
        assert!(beelet_cgroups::layout::parse(&mountinfo::read().unwrap()).is_some());
        unmount_below(dir.path()).unwrap();
        assert!(below(dir.path()).unwrap().is_empty());
    }
}
