//! Disk usage without walking: where a file system counts by project (XFS and ext4 mounted with `prjquota`), a volume gets a
//! project of its own, and the kernel says what it takes.
//!
//! Nothing is limited by this, only counted. Whatever doesn't work, for whatever reason, leaves the walk in its place.

use std::{
    fs::File,
    io,
    mem::{MaybeUninit, size_of},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
};

/// What a folder takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Bytes on disk.
    pub bytes: u64,
    /// Files, folders and links.
    pub inodes: u64,
}

/// `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR` (include/uapi/linux/fs.h): `_IOR('X', 31, struct fsxattr)` and
/// `_IOW('X', 32, struct fsxattr)`.
const GET_ATTRIBUTES: libc::Ioctl = ioctl_number(2, 31) as libc::Ioctl;
const SET_ATTRIBUTES: libc::Ioctl = ioctl_number(1, 32) as libc::Ioctl;
/// `FS_XFLAG_PROJINHERIT`: what is made in a folder gets its project.
const INHERIT: u32 = 0x200;
/// `QCMD(Q_GETINFO, PRJQUOTA)` and `QCMD(Q_GETQUOTA, PRJQUOTA)` (include/uapi/linux/quota.h).
const GET_INFO: u32 = 0x80_0005 << 8 | PROJECTS;
const GET_QUOTA: u32 = 0x80_0007 << 8 | PROJECTS;
const PROJECTS: u32 = 2;
/// Our projects: high numbers, which nobody writes into /etc/projects.
const FIRST_PROJECT: u32 = 0x4000_0000;

/// `struct fsxattr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Attributes {
    xflags: u32,
    extsize: u32,
    nextents: u32,
    projid: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

/// `struct if_dqblk`.
#[repr(C)]
struct Quota {
    bytes_hard: u64,
    bytes_soft: u64,
    bytes: u64,
    inodes_hard: u64,
    inodes_soft: u64,
    inodes: u64,
    bytes_time: u64,
    inodes_time: u64,
    valid: u32,
}

/// `struct if_dqinfo`.
#[repr(C)]
struct Info {
    bytes_grace: u64,
    inodes_grace: u64,
    flags: u32,
    valid: u32,
}

const fn ioctl_number(direction: u32, number: u32) -> u32 {
    direction << 30 | (size_of::<Attributes>() as u32) << 16 | (b'X' as u32) << 8 | number
}

/// What `folder` takes, by its project, which it gets if it has none. None where the file system counts no projects, or
/// anything else is in the way.
#[must_use]
pub fn measure(folder: &Path) -> Option<Counted> {
    let top = File::open(folder).ok()?;
    if !top.metadata().ok()?.is_dir() || !counts_projects(top.as_fd()) {
        return None;
    }
    let attributes = attributes(top.as_fd()).ok()?;
    let project = if attributes.projid != 0 && attributes.xflags & INHERIT != 0 {
        attributes.projid
    } else {
        let project = project_for(folder);
        // Folders first: what is made meanwhile inherits.
        assign(folder, top.metadata().ok()?.dev(), project, 0).ok()?;
        project
    };
    usage(top.as_fd(), project)
}

/// A number for a folder: of a path always the same one.
fn project_for(folder: &Path) -> u32 {
    let bytes = folder.as_os_str().as_encoded_bytes();
    // FNV-1a; two volumes of a node that meet in it are measured as one, which a node's few hundred don't.
    let hash =
        bytes.iter().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    FIRST_PROJECT | hash & (FIRST_PROJECT - 1)
}

/// Puts a folder and what is in it already into the project.
fn assign(path: &Path, device: u64, project: u32, depth: usize) -> io::Result<()> {
    /// Deeper than any volume that a pod has just begun to fill.
    const DEEPEST: usize = 64;
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.dev() != device || depth > DEEPEST {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let mut attributes = attributes(file.as_fd())?;
    attributes.projid = project;
    if metadata.is_dir() {
        attributes.xflags |= INHERIT;
    }
    set_attributes(file.as_fd(), &attributes)?;
    if metadata.is_dir() {
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() || kind.is_file() {
                assign(&entry.path(), device, project, depth + 1)?;
            }
        }
    }
    Ok(())
}

fn attributes(file: BorrowedFd<'_>) -> io::Result<Attributes> {
    let mut attributes = Attributes::default();
    // SAFETY: the descriptor is open for the call, and the kernel writes one `struct fsxattr` to the pointer, which is
    // to one of that size and alignment (fs/ioctl.c, `ioctl_fsgetxattr`).
    let result = unsafe { libc::ioctl(file.as_raw_fd(), GET_ATTRIBUTES, &raw mut attributes) };
    if result == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
}

fn set_attributes(file: BorrowedFd<'_>, attributes: &Attributes) -> io::Result<()> {
    // SAFETY: as above; the kernel only reads (`ioctl_fssetxattr`).
    let result = unsafe { libc::ioctl(file.as_raw_fd(), SET_ATTRIBUTES, &raw const *attributes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether project quotas are switched on for the file system of `file`.
fn counts_projects(file: BorrowedFd<'_>) -> bool {
    quotactl::<Info>(file, GET_INFO, 0).is_some()
}

fn usage(file: BorrowedFd<'_>, project: u32) -> Option<Counted> {
    let quota = quotactl::<Quota>(file, GET_QUOTA, project)?;
    Some(Counted { bytes: quota.bytes, inodes: quota.inodes })
}

/// quotactl_fd(2), Linux 5.14: the file system is that of the descriptor, wherever its device is.
fn quotactl<T>(file: BorrowedFd<'_>, command: u32, id: u32) -> Option<T> {
    let mut answer = MaybeUninit::<T>::zeroed();
    // SAFETY: the descriptor is open for the call, and the kernel writes the structure that the command is for to the
    // pointer, which is to zeroed memory of its size and alignment (fs/quota/quota.c, `do_quotactl`).
    let result =
        unsafe { libc::syscall(libc::SYS_quotactl_fd, file.as_raw_fd(), command, id, answer.as_mut_ptr()) };
    // SAFETY: all bytes were zeroed or written by the kernel, and both structures are plain numbers.
    (result == 0).then(|| unsafe { answer.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structures_are_the_kernels() {
        assert_eq!(size_of::<Attributes>(), 28);
        assert_eq!(size_of::<Quota>(), 72);
        assert_eq!(size_of::<Info>(), 24);
        assert_eq!((ioctl_number(2, 31), ioctl_number(1, 32)), (0x801c_581f, 0x401c_5820));
    }

    #[test]
    fn where_nothing_is_counted_by_project_nothing_is_said() {
        // procfs has no quotas anywhere.
        assert_eq!(measure(Path::new("/proc/self")), None);
        assert_eq!(measure(Path::new("/nonexistent")), None);
    }

    #[test]
    fn a_folder_has_the_same_project_every_time() {
        let (a, b) = (project_for(Path::new("/a")), project_for(Path::new("/b")));
        assert_eq!(a, project_for(Path::new("/a")));
        assert!(a != b && a >= FIRST_PROJECT && b < 2 * FIRST_PROJECT);
    }
}
