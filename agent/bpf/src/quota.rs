//! Disk usage without walking: where a file system counts by project (XFS and ext4 mounted with `prjquota`),
//! a volume gets a project of its own, and the kernel says what it takes.
//!
//! Nothing is limited by this, only counted. Whatever doesn't work, for whatever reason, leaves the walk in
//! its place. Must never take a folder out of somebody else's project, nor follow what a pod puts in the way
//! of the agent: a link, a pipe.

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

/// How a file is opened that may be another by now: no link is followed, no pipe waited for.
const READ: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);
/// Deeper than any volume that a pod has just begun to fill.
const DEEPEST: usize = 64;

/// Disk usage of `folder`, by its project, which it gets if it has none. None where the file system counts no
/// projects, the folder is in a project that isn't its own, or anything else is in the way.
#[must_use]
pub fn measure(folder: &Path) -> Option<Counted> {
    let top = open_folder(folder).ok()?;
    if !counts_projects(top.as_fd()) {
        return None;
    }
    usage(top.as_fd(), adopt_opened(folder, &top).ok()?)
}

/// Puts `folder` and all that is in it into the folder's own project, and says which that is. A folder that
/// is in it stays as it is: it is marked last, once everything below it is.
///
/// # Errors
/// It is in another project (it inherited that, and somebody's limit may come with it), or something in it
/// can't be marked.
pub fn adopt(folder: &Path) -> io::Result<u32> {
    adopt_opened(folder, &open_folder(folder)?)
}

/// The project of a file or folder that is not a link.
///
/// # Errors
/// It is not there, or its file system has no projects.
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
        return Err(io::Error::other("the folder is in somebody else's project"));
    }
    let marking = Marking { project, device: fstat(top)?.st_dev };
    marking.all_in(top, false)?;
    mark(top, project, true)?;
    // What was made in the folder itself meanwhile has inherited nothing; from now on everything does.
    if let Err(error) = marking.all_in(top, true) {
        // Else it would be taken for complete the next time.
        set_attributes(top.as_fd(), &before)?;
        return Err(error);
    }
    Ok(project)
}

/// A number for a folder: of a path always the same one.
fn project_for(folder: &Path) -> u32 {
    let bytes = folder.as_os_str().as_encoded_bytes();
    // FNV-1a; two volumes of a node that meet in it are measured as one, which a node's few hundred don't.
    let hash =
        bytes.iter().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    FIRST_PROJECT | hash & (FIRST_PROJECT - 1)
}

/// Puts files and folders into a project.
#[derive(Clone, Copy)]
struct Marking {
    project: u32,
    /// The file system that all of them are on.
    device: u64,
}

impl Marking {
    /// Marks everything in `folder`; but what in `folder` itself is in the project already stays as it is if
    /// `all_but_marked`. Fails where it is deeper than [`DEEPEST`].
    fn all_in(self, folder: &OwnedFd, all_but_marked: bool) -> io::Result<()> {
        // The folders on the way down, each with what is left to read of it: as many descriptors as it is
        // deep.
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

    /// Marks a file, or a folder, which is returned: the folder comes before what is in it, so that what is
    /// made in it meanwhile inherits. Its kind when it was listed means nothing any more: a pod may have put
    /// a link or a pipe in its place.
    fn entry(self, folder: &OwnedFd, name: &CStr, all_but_marked: bool) -> io::Result<Option<OwnedFd>> {
        let file = match openat(folder, name, READ, Mode::empty()) {
            Ok(file) => file,
            // It is gone, a link, or a socket.
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
    // which is to one of that size and alignment (fs/ioctl.c, `ioctl_fsgetxattr`).
    let result = unsafe { libc::ioctl(file.as_raw_fd(), GET_ATTRIBUTES, &raw mut attributes) };
    if result == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
}

fn set_attributes(file: BorrowedFd<'_>, attributes: &Attributes) -> io::Result<()> {
    // SAFETY: as above; the kernel only reads (`ioctl_fssetxattr`).
    let result = unsafe { libc::ioctl(file.as_raw_fd(), SET_ATTRIBUTES, &raw const *attributes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Why volumes in a folder are measured by walking through them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Uncounted {
    /// Their file system counts no projects: as a rule, it could.
    #[error("{0}")]
    Off(String),
    /// It may, but the agent isn't allowed to ask.
    #[error("{0}")]
    Refused(String),
}

/// Checks that the kernel counts what volumes in `folder`, or in the nearest folder above it that exists,
/// take.
///
/// # Errors
/// It doesn't: why, and what to do, in a sentence.
pub fn counted(folder: &Path) -> Result<(), Uncounted> {
    let nearest = folder.ancestors().find(|path| path.is_dir()).unwrap_or(folder);
    let off = |error: io::Error| {
        Uncounted::Off(format!(
            "the file system of {} counts nothing by project ({error}): mount XFS or ext4 with prjquota to have it counted",
            nearest.display()
        ))
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat(CWD, nearest, flags, Mode::empty()).map_err(|error| off(error.into()))?;
    match quotactl::<Info>(opened.as_fd(), GET_INFO, 0) {
        Ok(_) => Ok(()),
        // The question itself needs no privilege (fs/quota/quota.c, `check_quotactl_permission`): something
        // filters it.
        Err(Errno::PERM | Errno::ACCESS) => Err(Uncounted::Refused(
            "the system call quotactl_fd is refused to the agent: allow it (SystemCallFilter= of the unit, the container's \
             seccomp profile)"
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

/// quotactl_fd(2), Linux 5.14: the file system is that of the descriptor, wherever its device is.
fn quotactl<T>(file: BorrowedFd<'_>, command: u32, id: u32) -> Result<T, Errno> {
    let mut answer = MaybeUninit::<T>::zeroed();
    // SAFETY: the descriptor is open for the call, and the kernel writes the structure that the command is
    // for to the pointer, which is to zeroed memory of its size and alignment (fs/quota/quota.c,
    // `do_quotactl`).
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
    fn where_nothing_is_counted_by_project_nothing_is_said() {
        // procfs has no quotas anywhere.
        assert_eq!(measure(Path::new("/proc/self")), None);
        assert_eq!(measure(Path::new("/nonexistent")), None);
        for path in ["/proc/self", "/proc/self/not/yet/there"] {
            let Err(Uncounted::Off(why)) = counted(Path::new(path)) else { panic!("{path} counts") };
            assert!(why.contains("/proc/self counts nothing") && why.contains("prjquota"), "{why}");
        }
    }

    #[test]
    fn what_was_swapped_for_a_link_a_pipe_or_nothing_is_neither_followed_nor_waited_for() {
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
