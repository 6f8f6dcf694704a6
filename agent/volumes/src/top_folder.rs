//! The top folder of a volume that the agent makes: the folder's modes, and the check that a Secret's file
//! system in memory is mounted.

use std::{os::fd::OwnedFd, path::Path};

use beelet_base::folder::{PRIVATE, READABLE, make_folder};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use crate::{error::Error, mounts};

/// Makes a volume's top folder, which containers of any user may read.
pub(crate) fn make_top(path: &Path) -> Result<(), Error> {
    if let Some(parent) = path.parent() {
        make_folder(parent, PRIVATE)?;
    }
    make_folder(path, READABLE)?;
    // An earlier instance of the agent may have made the folder under another umask.
    add_mode(path, READABLE)
}

/// Adds bits to the mode of a folder, which keeps the bits that it got with its group. Uses the folder's
/// descriptor: a container may have replaced the folder by a link.
pub(crate) fn add_mode(path: &Path, more: u32) -> Result<(), Error> {
    let failed = |e: Errno| Error::io("set the mode of", path)(e);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
    let mode = (rustix::fs::fstat(&folder).map_err(failed)?.st_mode | more) & 0o7777;
    rustix::fs::fchmod(&folder, Mode::from_raw_mode(mode)).map_err(failed)
}

/// Opens the top folder of a volume of objects. Returns None if the folder is missing, or is not in memory
/// although it should be: the file system in memory may be unmounted at any time, and the agent must not
/// write a secret to the disk below.
pub(crate) fn open_top(path: &Path, in_memory: bool) -> Result<Option<OwnedFd>, Error> {
    let failed = |e: Errno| Error::io("open", path)(e);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    let there = !in_memory || mounts::is_tmpfs(&top).map_err(failed)?;
    Ok(there.then_some(top))
}
