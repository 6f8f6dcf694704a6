//! Usage of the images' file system. The runtime names it and the kernel measures it: the runtime's own
//! figure is up to 10 s old, and only the file system shows the bytes that a removal freed (layers are
//! shared).

use std::{path::Path, sync::Arc, time::Duration};

use beelet_proto::cri;
use beelet_units::fs_usage::FsUsage;

use crate::Error;
use crate::blocking::blocking;

/// Timeout of measuring a file system: a hanging one (a dead network mount) must not block the caller.
const DEADLINE: Duration = Duration::from_secs(5);

/// Measures the file system of a path.
#[derive(Clone)]
pub struct Space(Arc<Measure>);

type Measure = dyn Fn(&Path) -> Result<Statvfs, Error> + Send + Sync;

/// Result of statvfs(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statvfs {
    /// Size and space available to the agent, in bytes.
    pub bytes: FsUsage,
    /// Total inodes.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
    /// True if the file system, or its mount, takes no writes.
    pub read_only: bool,
}

impl Space {
    /// Measures with statvfs(2).
    #[must_use]
    pub fn by_statvfs() -> Self {
        Self::by(statvfs)
    }

    /// Measures with a function that may block, for tests.
    pub fn by(measure: impl Fn(&Path) -> Result<Statvfs, Error> + Send + Sync + 'static) -> Self {
        Self(Arc::new(measure))
    }

    /// Measures the file system of `path`.
    ///
    /// # Errors
    /// The call fails, or times out.
    pub async fn measure(&self, path: &Path) -> Result<Statvfs, Error> {
        let (measure, owned) = (Arc::clone(&self.0), path.to_owned());
        let measured = blocking("measuring a file system", move || measure(&owned));
        tokio::time::timeout(DEADLINE, measured)
            .await
            .unwrap_or_else(|_| Err(Error::Hangs { path: path.to_owned(), after: DEADLINE }))
    }

    /// Measures the file system of `path`, blocking.
    ///
    /// # Errors
    /// The call fails.
    pub fn measure_now(&self, path: &Path) -> Result<Statvfs, Error> {
        (self.0)(path)
    }
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Space")
    }
}

/// Returns size and usage of the file system of `path`.
///
/// # Errors
/// The call fails.
pub fn statvfs(path: &Path) -> Result<Statvfs, Error> {
    let stat = rustix::fs::statvfs(path).map_err(|cause| Error::Measure { path: path.to_owned(), cause })?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Ok(Statvfs {
        bytes: FsUsage { capacity_bytes: bytes(stat.f_blocks), available_bytes: bytes(stat.f_bavail) },
        inodes: stat.f_files,
        inodes_free: stat.f_favail,
        read_only: stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY),
    })
}

/// Returns the mount point of the images' file system, as named by the runtime.
pub fn image_mountpoint(info: &cri::ImageFsInfoResponse) -> Option<&str> {
    mountpoint(&info.image_filesystems)
}

/// Returns the mount point of the file system of the containers' writable layers; that of the images if the
/// runtime does not distinguish them.
pub fn container_mountpoint(info: &cri::ImageFsInfoResponse) -> Option<&str> {
    mountpoint(&info.container_filesystems).or_else(|| image_mountpoint(info))
}

fn mountpoint(list: &[cri::FilesystemUsage]) -> Option<&str> {
    let path = &list.first()?.fs_id.as_ref()?.mountpoint;
    Some(path.as_str()).filter(|path| !path.is_empty())
}
