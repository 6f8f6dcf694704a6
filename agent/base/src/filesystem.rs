//! How full the images' file system is. The runtime names it, the kernel measures it: the runtime's own
//! figure is up to 10 s old, and what a removal really freed can only be seen in the file system (layers are
//! shared).

use std::{path::Path, sync::Arc, time::Duration};

use beelet_proto::cri;
use beelet_units::fs_usage::FsUsage;

use crate::Error;
use crate::blocking::blocking;

/// How long a file system may take to tell its size. One that hangs (a dead network mount) must hold nothing
/// up.
const DEADLINE: Duration = Duration::from_secs(5);

/// Measures a file system by the path of something in it.
#[derive(Clone)]
pub struct Space(Arc<Measure>);

type Measure = dyn Fn(&Path) -> Result<Statvfs, Error> + Send + Sync;

/// What statvfs(2) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statvfs {
    /// Size and free space for us, in bytes.
    pub bytes: FsUsage,
    /// Inodes in all.
    pub inodes: u64,
    /// Inodes that are free.
    pub inodes_free: u64,
}

impl Space {
    /// By statvfs(2).
    #[must_use]
    pub fn by_statvfs() -> Self {
        Self::by(statvfs)
    }

    /// By a function that may block: for tests.
    pub fn by(measure: impl Fn(&Path) -> Result<Statvfs, Error> + Send + Sync + 'static) -> Self {
        Self(Arc::new(measure))
    }

    /// How full the file system of `path` is.
    ///
    /// # Errors
    /// It can't be asked, or doesn't answer in time.
    pub async fn measure(&self, path: &Path) -> Result<Statvfs, Error> {
        let (measure, owned) = (Arc::clone(&self.0), path.to_owned());
        let measured = blocking("measuring a file system", move || measure(&owned));
        tokio::time::timeout(DEADLINE, measured)
            .await
            .unwrap_or_else(|_| Err(Error::Hangs { path: path.to_owned(), after: DEADLINE }))
    }

    /// The same where blocking does no harm.
    ///
    /// # Errors
    /// It can't be asked.
    pub fn measure_now(&self, path: &Path) -> Result<Statvfs, Error> {
        (self.0)(path)
    }
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Space")
    }
}

/// Size and use of the file system of `path`.
///
/// # Errors
/// The kernel doesn't say it.
pub fn statvfs(path: &Path) -> Result<Statvfs, Error> {
    let stat = rustix::fs::statvfs(path).map_err(|cause| Error::Measure { path: path.to_owned(), cause })?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Ok(Statvfs {
        bytes: FsUsage { capacity_bytes: bytes(stat.f_blocks), available_bytes: bytes(stat.f_bavail) },
        inodes: stat.f_files,
        inodes_free: stat.f_favail,
    })
}

/// The mount point of the images' file system, as the runtime names it.
pub fn image_mountpoint(info: &cri::ImageFsInfoResponse) -> Option<&str> {
    mountpoint(&info.image_filesystems)
}

/// The mount point of the file system of the containers' writable layers; the images' own where the runtime
/// doesn't tell them apart.
pub fn container_mountpoint(info: &cri::ImageFsInfoResponse) -> Option<&str> {
    mountpoint(&info.container_filesystems).or_else(|| image_mountpoint(info))
}

fn mountpoint(list: &[cri::FilesystemUsage]) -> Option<&str> {
    let path = &list.first()?.fs_id.as_ref()?.mountpoint;
    Some(path.as_str()).filter(|path| !path.is_empty())
}
