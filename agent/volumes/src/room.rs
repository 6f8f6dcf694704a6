//! Capacity and use of volumes with their own file system or device, like the kubelet's
//! `pkg/volume/metrics_statfs.go` and `metrics_block.go`. Must never run on a thread that other work waits
//! for: a file system whose server is unreachable blocks the call until the server is back.

use std::{
    io::{Seek, SeekFrom},
    path::Path,
};

use beelet_base::own_file;
use beelet_model::disk::Room;
use rustix::fs::{CWD, FileType, Mode};

use crate::{Error, mounts};

/// Returns the capacity and use of the file system that is mounted at `place` in the pods' folder, or the
/// size of the block device at `place`. Returns None for other paths: the machine's own mounts belong to no
/// pod.
///
/// # Errors
/// The kernel refuses the measurement.
pub(crate) fn room(pods: &Path, place: &Path) -> Result<Option<Room>, Error> {
    let found = rustix::fs::openat(CWD, place, own_file::FOUND, Mode::empty());
    let found = found.map_err(Error::io("measure", place))?;
    let kind =
        FileType::from_raw_mode(rustix::fs::fstat(&found).map_err(Error::io("measure", place))?.st_mode);
    if kind == FileType::BlockDevice {
        let mut device = own_file::open_block_device(&found).map_err(Error::io("open", place))?;
        let capacity_bytes = device.seek(SeekFrom::End(0)).map_err(Error::io("measure", place))?;
        return Ok(Some(Room { capacity_bytes, ..Room::default() }));
    }
    if !place.starts_with(pods) || !mounts::is_mount_point(place)? {
        return Ok(None);
    }
    let found = rustix::fs::statvfs(place).map_err(Error::io("measure", place))?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Ok(Some(Room {
        capacity_bytes: bytes(found.f_blocks),
        available_bytes: bytes(found.f_bavail),
        used_bytes: bytes(found.f_blocks.saturating_sub(found.f_bfree)),
        inodes: found.f_files,
        inodes_free: found.f_ffree,
        inodes_used: found.f_files.saturating_sub(found.f_ffree),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_in_the_pods_folder_are_measured() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(room(dir.path(), dir.path()).unwrap(), None);
        assert_eq!(room(dir.path(), Path::new("/proc")).unwrap(), None);
        let mounted = room(Path::new("/"), Path::new("/proc")).unwrap().unwrap();
        assert_eq!(mounted.capacity_bytes, 0);
        let file = dir.path().join("file");
        assert!(room(dir.path(), &file).unwrap_err().to_string().contains("file"));
    }
}
