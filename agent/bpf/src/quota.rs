//! Disk usage without a walk: on file systems with project quotas (XFS and ext4 mounted with `prjquota`), a
//! volume gets a project of its own, and the kernel counts its usage.
//!
//! The quotas only count and set no limit. On any failure the caller walks the folder instead. Must never
//! move a folder out of a foreign project, nor follow a link or wait for a pipe that a pod puts in the
//! agent's way.

use std::{
    ffi::CStr,
    io,
    mem::{MaybeUninit, size_of},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{CWD, Dir, FileType, Mode, OFlags, fstat, openat},
    io::Errno,
};

/// Disk usage of a folder.
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
/// `FS_XFLAG_PROJINHERIT`: new files in a folder get the folder's project.
const INHERIT: u32 = 0x200;
/// `QCMD(Q_GETINFO, PRJQUOTA)` and `QCMD(Q_GETQUOTA, PRJQUOTA)` (include/uapi/linux/quota.h).
const GET_INFO: u32 = 0x80_0005 << 8 | PROJECTS;
const GET_QUOTA: u32 = 0x80_0007 << 8 | PROJECTS;
const PROJECTS: u32 = 2;
/// First of our projects: high numbers, which no administrator uses in /etc/projects.
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

/// Flags for opening a file that a pod may have replaced: follow no link, wait for no pipe.
const READ: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);
/// Maximum depth: deeper than any volume that a pod has just begun to fill.
const DEEPEST: usize = 64;

/// Returns the disk usage of `folder` from its project, which it gets if it has none. `None` if the file
/// system has no project quotas, the folder is in a foreign project, or anything else fails.
#[must_use]
pub fn measure(folder: &Path) -> Option<Counted> {
    let top = open_folder(folder).ok()?;
    if !counts_projects(top.as_fd()) {
        return None;
    }
    usage(top.as_fd(), adopt_opened(folder, &top).ok()?)
}

/// Moves `folder` and its whole content into the folder's own project, and returns the project's number.
/// Skips a folder that is in its project already: a folder is marked last, after everything below it.
///
/// # Errors
/// The folder is in another project (an inherited one, which may have a limit), or a file in it can't be
/// marked.
pub fn adopt(folder: &Path) -> io::Result<u32> {
    adopt_opened(folder, &open_folder(folder)?)
}

/// Returns the project of a file or folder that is not a link.
///
/// # Errors
/// The path is missing, or its file system has no projects.
pub fn project_of(path: &Path) -> io::Result<u32> {
    Ok(attributes(openat(CWD, path, READ, Mode::empty())?.as_fd())?.projid)
}

fn open_folder(folder: &Path) -> io::Result<OwnedFd> {
    Ok(openat(CWD, folder, READ | OFlags::DIRECTORY, Mode::empty())?)
}

fn adopt_opened(folder: &Path, top: &OwnedFd) -> io::Result<u32> {
    let project = project_for(folder);
    let before = attributes(top.as_fd())?;
    if before.projid == project && before.xflags & INHERIT != 0 {
        return Ok(project);
    }
    if before.projid != 0 && before.projid != project {
        return Err(io::Error::other("the folder is in a foreign project"));
    }
    let marking = Marking { project, device: fstat(top)?.st_dev };
    marking.all_in(top, false)?;
    mark(top, project, true)?;
    // Files made in the folder itself during the first pass inherited nothing; from now on all do.
    if let Err(error) = marking.all_in(top, true) {
        // Otherwise the next call would take the marking for complete.
        set_attributes(top.as_fd(), &before)?;
        return Err(error);
    }
    Ok(project)
}

/// Returns the project number of a folder, always the same for a path.
fn project_for(folder: &Path) -> u32 {
    let bytes = folder.as_os_str().as_encoded_bytes();
    // FNV-1a; two volumes with the same hash would be measured as one, which is unlikely among a node's few
    // hundred.
    let hash =
        bytes.iter().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    FIRST_PROJECT | hash & (FIRST_PROJECT - 1)
}

/// Moves files and folders into a project.
#[derive(Clone, Copy)]
struct Marking {
    project: u32,
    /// Device of the file system that all of them are on.
    device: u64,
}

impl Marking {
    /// Marks everything in `folder`. With `all_but_marked`, skips the direct entries of `folder` that are in
    /// the project already. Fails if `folder` is deeper than [`DEEPEST`].
    fn all_in(self, folder: &OwnedFd, all_but_marked: bool) -> io::Result<()> {
        // The folders on the way down, each with the rest of its entries: one descriptor per level.
        let mut open = vec![(Dir::read_from(folder)?, folder.try_clone()?)];
        loop {
            let depth = open.len();
            let Some((entries, parent)) = open.last_mut() else { return Ok(()) };
            let Some(entry) = entries.next() else {
                open.pop();
                continue;
            };
            let entry = entry?;
            let (name, kind) = (entry.file_name(), entry.file_type());
            let markable = matches!(kind, FileType::Directory | FileType::RegularFile | FileType::Unknown);
            if !markable || name == c"." || name == c".." {
                continue;
            }
            let Some(below) = self.entry(parent, name, all_but_marked && depth == 1)? else { continue };
            if depth > DEEPEST {
                return Err(io::ErrorKind::Unsupported.into());
            }
            open.push((Dir::read_from(&below)?, below));
        }
    }

    /// Marks a file or a folder, and returns a folder. A folder is marked before its content, so that files
    /// made in it during the walk inherit the project. The kind is checked again after opening, because a pod
    /// may have replaced the entry with a link or a pipe since it was listed.
    fn entry(self, folder: &OwnedFd, name: &CStr, all_but_marked: bool) -> io::Result<Option<OwnedFd>> {
        let file = match openat(folder, name, READ, Mode::empty()) {
            Ok(file) => file,
            // Removed, a link, or a socket.
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let stat = fstat(&file)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if !matches!(kind, FileType::Directory | FileType::RegularFile) {
            return Ok(None);
        }
        if stat.st_dev != self.device {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        if all_but_marked && attributes(file.as_fd())?.projid == self.project {
            return Ok(None);
        }
        let is_folder = kind == FileType::Directory;
        mark(&file, self.project, is_folder)?;
        Ok(is_folder.then_some(file))
    }
}

fn mark(file: &OwnedFd, project: u32, inherit: bool) -> io::Result<()> {
    let mut attributes = attributes(file.as_fd())?;
    let inherits = if inherit { INHERIT } else { 0 };
    if attributes.projid == project && attributes.xflags & inherits == inherits {
        return Ok(());
    }
    attributes.projid = project;
    attributes.xflags |= inherits;
    set_attributes(file.as_fd(), &attributes)
}

fn attributes(file: BorrowedFd<'_>) -> io::Result<Attributes> {
    let mut attributes = Attributes::default();
    // SAFETY: the descriptor is open for the call, and the kernel writes one `struct fsxattr` to the pointer,
    // whose target has that size and alignment (fs/ioctl.c, `ioctl_fsgetxattr`).
    let result = unsafe { libc::ioctl(file.as_raw_fd(), GET_ATTRIBUTES, &raw mut attributes) };
    if result == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
}

fn set_attributes(file: BorrowedFd<'_>, attributes: &Attributes) -> io::Result<()> {
    // SAFETY: as in `attributes`; the kernel only reads (`ioctl_fssetxattr`).
    let result = unsafe { libc::ioctl(file.as_raw_fd(), SET_ATTRIBUTES, &raw const *attributes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reason for measuring the volumes in a folder by walking them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Uncounted {
    /// Project quotas are off on the volumes' file system; usually they can be turned on.
    #[error("{0}")]
    Off(String),
    /// Project quotas may be on, but the agent may not query them.
    #[error("{0}")]
    Refused(String),
}

/// Checks that the kernel counts the disk usage of volumes in `folder`, or in the nearest existing folder
/// above it.
///
/// # Errors
/// The kernel does not count it; the error has the reason and the remedy.
pub fn counted(folder: &Path) -> Result<(), Uncounted> {
    let nearest = folder.ancestors().find(|path| path.is_dir()).unwrap_or(folder);
    let off = |error: io::Error| {
        Uncounted::Off(format!(
            "the file system of {} has no project quotas ({error}): mount XFS or ext4 with prjquota to turn them on",
            nearest.display()
        ))
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat(CWD, nearest, flags, Mode::empty()).map_err(|error| off(error.into()))?;
    match quotactl::<Info>(opened.as_fd(), GET_INFO, 0) {
        Ok(_) => Ok(()),
        // The query itself needs no privilege (fs/quota/quota.c, `check_quotactl_permission`): a filter
        // refuses it.
        Err(Errno::PERM | Errno::ACCESS) => Err(Uncounted::Refused(
            "a filter refuses the system call quotactl_fd: allow it (SystemCallFilter= of the unit, the container's seccomp \
             profile)"
                .to_owned(),
        )),
        Err(error) => Err(off(error.into())),
    }
}

/// Returns true if project quotas are switched on for the file system of `file`.
fn counts_projects(file: BorrowedFd<'_>) -> bool {
    quotactl::<Info>(file, GET_INFO, 0).is_ok()
}

fn usage(file: BorrowedFd<'_>, project: u32) -> Option<Counted> {
    let quota = quotactl::<Quota>(file, GET_QUOTA, project).ok()?;
    Some(Counted { bytes: quota.bytes, inodes: quota.inodes })
}

/// Calls quotactl_fd(2), Linux 5.14, which takes the file system of the descriptor and needs no device path.
fn quotactl<T>(file: BorrowedFd<'_>, command: u32, id: u32) -> Result<T, Errno> {
    let mut answer = MaybeUninit::<T>::zeroed();
    // SAFETY: the descriptor is open for the call, and the kernel writes the command's structure to the
    // pointer, whose target is zeroed memory of its size and alignment (fs/quota/quota.c, `do_quotactl`).
    let result =
        unsafe { libc::syscall(libc::SYS_quotactl_fd, file.as_raw_fd(), command, id, answer.as_mut_ptr()) };
    if result != 0 {
        return Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    // SAFETY: all bytes were zeroed or written by the kernel, and both structures are plain numbers.
    Ok(unsafe { answer.assume_init() })
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
    fn without_project_quotas_there_is_no_usage_and_the_remedy_is_named() {
        // procfs has no quotas anywhere.
        assert_eq!(measure(Path::new("/proc/self")), None);
        assert_eq!(measure(Path::new("/nonexistent")), None);
        for path in ["/proc/self", "/proc/self/not/yet/there"] {
            let Err(Uncounted::Off(why)) = counted(Path::new(path)) else { panic!("{path} counts") };
            assert!(why.contains("/proc/self has no project quotas") && why.contains("prjquota"), "{why}");
        }
    }

    #[test]
    fn an_entry_replaced_by_a_link_or_a_pipe_is_neither_followed_nor_waited_for() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).unwrap();
        rustix::fs::mknodat(CWD, dir.path().join("pipe"), FileType::Fifo, 0o600.into(), 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
        let folder = open_folder(dir.path()).unwrap();
        let marking = Marking { project: FIRST_PROJECT, device: fstat(&folder).unwrap().st_dev };
        for name in [c"link", c"pipe", c"socket", c"gone"] {
            assert!(marking.entry(&folder, name, false).unwrap().is_none());
        }
        let error = Marking { device: 0, ..marking }.entry(&folder, c".", false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::CrossesDevices);
        assert!(
            open_folder(&dir.path().join("link")).is_err() && open_folder(&dir.path().join("pipe")).is_err()
        );
    }

    #[test]
    fn a_folder_has_the_same_project_every_time() {
        let (a, b) = (project_for(Path::new("/a")), project_for(Path::new("/b")));
        assert_eq!(a, project_for(Path::new("/a")));
        assert!(a != b && a >= FIRST_PROJECT && b < 2 * FIRST_PROJECT);
    }
}
