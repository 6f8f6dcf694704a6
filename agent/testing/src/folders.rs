//! Deep folders and folders in memory.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Creates `levels` nested folders in `top`, all called `d`; returns the last one's descriptor.
pub fn make_deep(top: &Path, levels: usize) -> OwnedFd {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut here: OwnedFd = fs::File::open(top).unwrap().into();
    for _ in 0..levels {
        rustix::fs::mkdirat(&here, "d", Mode::from_raw_mode(0o755)).unwrap();
        here = rustix::fs::openat(&here, "d", flags, Mode::empty()).unwrap();
    }
    here
}

/// Creates a folder in memory if possible: thousands of folders are slow on a disk.
pub fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}
