//! The top folder of a volume that the agent makes: its modes, and the check that a Secret's memory is
//! mounted.

use std::{os::fd::OwnedFd, path::Path};

use beelet_base::folder::{PRIVATE, READABLE, make_folder};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use crate::{error::Error, mounts};

/// Makes a volume's top folder. Containers of any user may look into it.
pub(crate) fn make_top(path: &Path) -> Result<(), Error> {
    if let Some(parent) = path.parent() {
        make_folder(parent, PRIVATE)?;
    }
    make_folder(path, READABLE)?;
    // An earlier instance of the agent may have made it, under another umask.
    add_mode(path, READABLE)
}

/// Adds to the mode of a folder: the mode of one that was given to a group has more in it, which stays. By
/// its descriptor: a container may have put a link in its place.
pub(crate) fn add_mode(path: &Path, more: u32) -> Result<(), Error> {
    let failed = |e: Errno| Error::io("set the mode of", path)(e);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
    let mode = (rustix::fs::fstat(&folder).map_err(failed)?.st_mode | more) & 0o7777;
    rustix::fs::fchmod(&folder, Mode::from_raw_mode(mode)).map_err(failed)
}

/// Opens the top folder of a volume that is made of objects. None if it isn't there, or isn't in memory
/// though it should be: a volume's memory may be unmounted at any time, and a secret must not be written to
/// the disk below.
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
