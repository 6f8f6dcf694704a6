//! Parts of volumes (`subPath`), mounted safely, independently of the files that containers made in the
//! volume.
//!
//! A container can replace a name by a link between a check of the name and a mount by name
//! (CVE-2017-1002101, CVE-2021-25741). So the agent opens the part once, with openat2(2) and
//! `RESOLVE_BENEATH`, which never leaves the volume, and bind mounts the open file (`/proc/self/fd/N`) to a
//! path of the pod, which the runtime then mounts.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{Error, mounts};
use beelet_base::folder::{PRIVATE, make_folder};
use beelet_base::own_file;

/// Bind mounts `part` of the volume at `volume` to `target`. Makes a missing part as a folder with the
/// volume's own mode. Idempotent; a part that was replaced since the last call is mounted again.
pub(super) fn mount(volume: &Path, part: &Path, target: &Path) -> Result<(), Error> {
    let failed = |cause: Errno| Error::SubPath { part: part.to_owned(), volume: volume.to_owned(), cause };
    let root =
        rustix::fs::openat(CWD, volume, OFlags::PATH | OFlags::CLOEXEC | OFlags::DIRECTORY, Mode::empty())
            .map_err(failed)?;
    let found = match open(&root, part, OFlags::empty()) {
        Err(Errno::NOENT) => make(&root, part),
        found => found,
    };
    bind(&found.map_err(failed)?, target)
}

/// Reads the plain file at `part` of the volume, which must have at most `most` bytes.
pub(super) fn read(volume: &Path, part: &Path, most: u64) -> Result<Vec<u8>, Error> {
    let failed = |cause: Errno| Error::Part { part: part.to_owned(), volume: volume.to_owned(), cause };
    let root =
        rustix::fs::openat(CWD, volume, OFlags::PATH | OFlags::CLOEXEC | OFlags::DIRECTORY, Mode::empty())
            .map_err(failed)?;
    // Found first, then opened: a container may have made a device here, whose opening may have side effects.
    let found = open(&root, part, OFlags::empty()).map_err(failed)?;
    let wrong = |why: String| Error::unmet(format!("{} of {}: {why}", part.display(), volume.display()));
    let read = own_file::reopen(&found, OFlags::RDONLY).and_then(|file| own_file::read_at_most(&file, most));
    let bytes = read.map_err(|error| wrong(error.to_string()))?;
    bytes.ok_or_else(|| wrong(format!("the file has more than {most} bytes")))
}

fn open(root: &OwnedFd, part: &Path, more: OFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | more;
    rustix::fs::openat2(root, part, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS)
}

/// Makes the folders that lead to `part`, one after another, with the volume's mode and, if the volume's
/// folder has setgid, with its group. The mode includes the sticky bit, as under the kubelet (GetMode).
fn make(root: &OwnedFd, part: &Path) -> Result<OwnedFd, Errno> {
    let mode = Mode::from_raw_mode(rustix::fs::fstat(root)?.st_mode & 0o1777);
    let mut way = std::path::PathBuf::new();
    let mut parent = open(root, Path::new("."), OFlags::DIRECTORY)?;
    for component in part.components() {
        let Component::Normal(name) = component else { continue };
        way.push(name);
        match rustix::fs::mkdirat(&parent, name, mode) {
            Ok(()) => {
                // The agent's umask reduced the mode. A container may have replaced the folder: opening it by
                // name accepts only a folder, and no link.
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let made = rustix::fs::openat(&parent, name, flags, Mode::empty())?;
                let inherited = Mode::from_raw_mode(rustix::fs::fstat(&made)?.st_mode) & Mode::SGID;
                rustix::fs::fchmod(&made, mode | inherited)?;
            }
            Err(Errno::EXIST) => {}
            Err(e) => return Err(e),
        }
        parent = open(root, &way, OFlags::DIRECTORY)?;
    }
    Ok(parent)
}

/// Bind mounts an open file or folder to `target`.
fn bind(source: &OwnedFd, target: &Path) -> Result<(), Error> {
    let failed = |e: Errno| Error::io("mount on", target)(e);
    let wanted = rustix::fs::fstat(source).map_err(failed)?;
    let is_folder = FileType::from_raw_mode(wanted.st_mode) == FileType::Directory;
    if mounts::is_mount_point(target)? {
        let there = rustix::fs::stat(target).map_err(failed)?;
        if (there.st_dev, there.st_ino) == (wanted.st_dev, wanted.st_ino) {
            return Ok(());
        }
        mounts::unmount(target)?;
    }
    make_target(target, is_folder)?;
    let source = format!("/proc/self/fd/{}", source.as_fd().as_raw_fd());
    rustix::mount::mount_bind(source, target).map_err(failed)
}

/// Makes a file or folder to mount on. Replaces an earlier mount point of the other type.
fn make_target(target: &Path, is_folder: bool) -> Result<(), Error> {
    if let Ok(there) = std::fs::symlink_metadata(target) {
        if there.is_dir() == is_folder {
            return Ok(());
        }
        beelet_base::walk::remove_folder(target)?;
    }
    if is_folder {
        return Ok(make_folder(target, PRIVATE)?);
    }
    if let Some(parent) = target.parent() {
        make_folder(parent, PRIVATE)?;
    }
    own_file::own(target).map(drop).map_err(Error::io("make", target))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn open_in(volume: &Path, part: &str) -> Result<OwnedFd, Errno> {
        let root = rustix::fs::openat(CWD, volume, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        match open(&root, Path::new(part), OFlags::empty()) {
            Err(Errno::NOENT) => make(&root, Path::new(part)),
            found => found,
        }
    }

    #[test]
    fn a_part_never_leads_out_of_the_volume() {
        let dir = tempfile::tempdir().unwrap();
        let (volume, outside) = (dir.path().join("volume"), dir.path().join("outside"));
        fs::create_dir_all(volume.join("real/deep")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("secret"), "").unwrap();
        symlink("real", volume.join("inside")).unwrap();
        symlink("../outside", volume.join("up")).unwrap();
        symlink(&outside, volume.join("absolute")).unwrap();
        symlink("/proc/self/root", volume.join("magic")).unwrap();
        symlink("loop", volume.join("loop")).unwrap();
        let check = |part: &str, expected: Result<(), Errno>| {
            assert_eq!(open_in(&volume, part).map(drop), expected, "{part}");
        };
        check("real/deep", Ok(()));
        check("inside/deep", Ok(()));
        check("up", Err(Errno::XDEV));
        check("up/secret", Err(Errno::XDEV));
        check("up/new", Err(Errno::XDEV));
        check("absolute", Err(Errno::XDEV));
        check("absolute/secret", Err(Errno::XDEV));
        check("magic/etc", Err(Errno::XDEV));
        check("loop", Err(Errno::LOOP));
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1, "nothing was made outside");
    }

    #[test]
    fn a_file_is_read_and_nothing_else_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "text").unwrap();
        fs::create_dir(at("folder")).unwrap();
        symlink("file", at("link")).unwrap();
        symlink("/etc/hostname", at("out")).unwrap();
        rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        for name in ["file", "link"] {
            assert_eq!(read(dir.path(), Path::new(name), 4).unwrap(), b"text", "{name}");
            let why = read(dir.path(), Path::new(name), 3).unwrap_err().to_string();
            assert!(why.contains("more than 3 bytes"), "{why}");
        }
        for name in ["folder", "out", "fifo", "none"] {
            assert!(read(dir.path(), Path::new(name), 4).is_err(), "{name}");
        }
        // A device without a driver: opening it gives an error, inspecting it does not.
        let none = rustix::fs::makedev(4095, 0xf_ffff);
        let device = rustix::fs::mknodat(CWD, at("device"), FileType::CharacterDevice, Mode::RWXU, none);
        if device.is_ok() {
            let why = read(dir.path(), Path::new("device"), 4).unwrap_err().to_string();
            assert!(why.contains("is not a plain file"), "{why}");
        }
    }

    #[test]
    fn a_missing_part_is_made_with_the_volumes_mode() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        symlink("other", dir.path().join("link")).unwrap();
        fs::create_dir(dir.path().join("other")).unwrap();
        open_in(dir.path(), "a/b").unwrap();
        open_in(dir.path(), "link/c").unwrap();
        let mode = |path: &str| fs::metadata(dir.path().join(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("a"), mode("a/b"), mode("other/c")), (0o777, 0o777, 0o777));
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        open_in(dir.path(), "sticky").unwrap();
        assert_eq!(mode("sticky"), 0o1777);
    }
}
