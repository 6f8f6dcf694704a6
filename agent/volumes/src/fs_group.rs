//! `fsGroup`: makes a volume usable for the pod's group, independently of the users of its containers. Like
//! the kubelet's `SetVolumeOwnership`: all files belong to the group and give it the owner's permissions;
//! files that are made later in a folder belong to the group too (setgid).
//!
//! Files are opened without following links, and changed by their descriptor, never by their name.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use k8s_openapi::api::core::v1 as core;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::path::Arg;
use tracing::warn;

use super::Error;
use beelet_base::own_file;
use beelet_base::walk::{Walk, WalkStep};

/// Group's permissions on files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Read and write.
    ReadWrite,
    /// Read, for files that only the agent writes.
    ReadOnly,
}

/// A pod's group for volumes.
#[derive(Clone, Debug)]
pub(super) struct FsGroup {
    group: Gid,
    /// Skip a volume whose top folder has the group and mode already (`fsGroupChangePolicy: OnRootMismatch`).
    on_root_mismatch: bool,
}

impl FsGroup {
    /// Returns the group that the pod's spec names, if any.
    pub(super) fn of(context: Option<&core::PodSecurityContext>) -> Option<Self> {
        let context = context?;
        let id = u32::try_from(context.fs_group?).ok().filter(|id| *id != u32::MAX)?;
        let on_root_mismatch = context.fs_group_change_policy.as_deref() == Some("OnRootMismatch");
        Some(Self { group: Gid::from_raw(id), on_root_mismatch })
    }

    /// Returns the group's id.
    pub(super) fn id(&self) -> u32 {
        self.group.as_raw()
    }

    /// Changes the group of the folder at `path` and of all files in it.
    pub(super) fn own(&self, path: &Path, access: Access) -> Result<(), Error> {
        let failed =
            |cause: Errno| Error::FsGroup { path: path.to_owned(), group: self.group.as_raw(), cause };
        let folder = open(CWD, path.as_os_str(), OFlags::DIRECTORY).map_err(failed)?;
        if self.on_root_mismatch && self.owns(&folder, access).map_err(failed)? {
            return Ok(());
        }
        self.own_all(folder, access).map_err(failed)
    }

    /// Returns true if a folder has the group and the mode already.
    fn owns(&self, folder: &OwnedFd, access: Access) -> Result<bool, Errno> {
        let stat = rustix::fs::fstat(folder)?;
        let wanted = mask(FileType::Directory, access);
        Ok(stat.st_gid == self.group.as_raw() && Mode::from_raw_mode(stat.st_mode).contains(wanted))
    }

    /// Changes children before their folder, so that the top folder shows an interrupted change. Skips files
    /// that are removed or replaced at the same time, and mounts below the folder, which belong to other
    /// volumes. If the file system refuses a change (squashed root, immutable file), the file stays as it is
    /// and the pod runs nevertheless, as under the kubelet.
    fn own_all(&self, folder: OwnedFd, access: Access) -> Result<(), Errno> {
        let mut walk = Walk::of(folder)?;
        let (mut refused, mut why) = (0_u64, None);
        while let Some(step) = walk.step()? {
            let is_entered = matches!(step, WalkStep::Entry(_, FileType::Directory));
            let owned = match step {
                WalkStep::Entry(name, FileType::Directory) => walk.enter(&name),
                WalkStep::Entry(name, FileType::RegularFile) => self.own_plain(walk.here(), &name, access),
                // Links have no mode; opening pipes, sockets and devices may have side effects.
                WalkStep::Entry(name, _) => self.own_name(walk.here(), &name),
                WalkStep::End => self.own_file(walk.here(), FileType::Directory, access),
                WalkStep::Left(_) => Ok(()),
                WalkStep::Lost => return Err(Errno::STALE),
            };
            match owned {
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO | Errno::XDEV) => {}
                Err(e) if is_entered => return Err(e),
                Err(e) => (refused, why) = (refused + 1, why.or(Some(e))),
            }
        }
        if let Some(why) = why {
            warn!("cannot change the group of {refused} files of a volume to {}: {why}", self.group.as_raw());
        }
        Ok(())
    }

    /// Changes the group and the mode of an open file.
    pub(super) fn own_file(&self, file: impl AsFd, kind: FileType, access: Access) -> Result<(), Errno> {
        let file = file.as_fd();
        rustix::fs::fchown(file, None, Some(self.group))?;
        let mode = Mode::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
        rustix::fs::fchmod(file, mode | mask(kind, access))
    }

    /// Changes the group and mode of a plain file. A container may have replaced the file by a device after
    /// its name was read, and opening a device may have side effects: the function opens the file only after
    /// checking that it still is a plain file.
    fn own_plain(&self, folder: BorrowedFd<'_>, name: &CStr, access: Access) -> Result<(), Errno> {
        let flags = own_file::FOUND.union(OFlags::NOFOLLOW);
        let found = rustix::fs::openat(folder, name, flags, Mode::empty())?;
        match own_file::reopen(&found, OFlags::RDONLY) {
            Ok(file) => self.own_file(&file, FileType::RegularFile, access),
            // An error of the kernel, or `reopen`'s own error that the file is not plain.
            Err(error) => Errno::from_io_error(&error).map_or_else(|| self.own_name(folder, name), Err),
        }
    }

    fn own_name(&self, folder: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
        rustix::fs::chownat(folder, name, None, Some(self.group), AtFlags::SYMLINK_NOFOLLOW)
    }
}

/// Returns the mode bits that are added to a file.
pub(super) fn mask(kind: FileType, access: Access) -> Mode {
    let rights = match access {
        Access::ReadWrite => 0o660,
        Access::ReadOnly => 0o440,
    };
    // Folders: setgid, and owner and group may enter.
    Mode::from_raw_mode(if kind == FileType::Directory { rights | 0o2110 } else { rights })
}

fn open(parent: impl AsFd, name: impl Arg, more: OFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | more;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use serde_json::json;

    use super::*;
    use beelet_base::walk::remove_folder;
    use beelet_testing::folders::{in_memory, make_deep};

    fn group(policy: &str) -> FsGroup {
        // An ordinary user may change files only to the user's own group.
        let gid = rustix::process::getgid().as_raw();
        let context = json!({"fsGroup": gid, "fsGroupChangePolicy": policy});
        FsGroup::of(Some(&serde_json::from_value(context).unwrap())).unwrap()
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn files_and_folders_get_the_groups_rights_and_links_stay_links() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::write(&outside, "").unwrap();
        set_mode(&outside, 0o600);
        let volume = dir.path().join("volume");
        fs::create_dir_all(volume.join("sub")).unwrap();
        fs::write(volume.join("sub/file"), "").unwrap();
        std::os::unix::fs::symlink(&outside, volume.join("link")).unwrap();
        for (path, was) in [("sub/file", 0o600), ("sub", 0o700), ("", 0o700)] {
            set_mode(&volume.join(path), was);
        }
        group("Always").own(&volume, Access::ReadWrite).unwrap();
        assert_eq!(mode(&volume.join("sub/file")), 0o660);
        assert_eq!(mode(&volume.join("sub")), 0o2770);
        assert_eq!(mode(&volume), 0o2770);
        assert_eq!(mode(&outside), 0o600, "the target of a link is left alone");
    }

    #[test]
    fn a_volume_of_many_thousand_levels_is_given_to_the_group() {
        let dir = in_memory();
        let last = make_deep(dir.path(), 20_000);
        // With the stack size of an agent's thread.
        let path = dir.path().to_owned();
        std::thread::spawn(move || group("Always").own(&path, Access::ReadWrite)).join().unwrap().unwrap();
        assert_eq!(rustix::fs::fstat(last).unwrap().st_mode & 0o7777, 0o2775);
        remove_folder(dir.path()).unwrap();
    }

    #[test]
    fn on_root_mismatch_checks_only_the_top_folder() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        set_mode(&file, 0o600);
        group("OnRootMismatch").own(dir.path(), Access::ReadWrite).unwrap();
        assert_eq!(mode(&file), 0o660);
        set_mode(&file, 0o600);
        group("OnRootMismatch").own(dir.path(), Access::ReadWrite).unwrap();
        assert_eq!(mode(&file), 0o600);
        group("Always").own(dir.path(), Access::ReadWrite).unwrap();
        assert_eq!(mode(&file), 0o660);
    }

    #[test]
    fn a_pod_without_fs_group_has_no_group() {
        assert!(FsGroup::of(None).is_none());
        assert!(FsGroup::of(Some(&core::PodSecurityContext::default())).is_none());
    }
}
