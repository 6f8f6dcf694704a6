//! Usage of the images' file system. The runtime names it and the kernel measures it: the runtime's own
//! figure is up to 10 s old, and only the file system shows the bytes that a removal freed (layers are
//! shared).

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use beelet_proto::cri;
use beelet_units::fs_usage::FsUsage;

use crate::Error;
use crate::blocking::blocking;

/// Timeout of measuring a file system: a hanging one (a dead network mount) must not block the caller.
const DEADLINE: Duration = Duration::from_secs(5);

/// Measures the file system of a path.
#[derive(Clone)]
pub struct Space {
    measure: Arc<Measure>,
    hanging: Arc<Hanging>,
}

/// Paths whose last measurement has not returned in time, and has not returned since: a second one would cost
/// another thread.
#[derive(Default)]
struct Hanging(Mutex<BTreeSet<PathBuf>>);

impl Hanging {
    fn paths(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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
        Self { measure: Arc::new(measure), hanging: Arc::default() }
    }

    /// Measures the file system of `path`.
    ///
    /// # Errors
    /// The call fails or times out, or an earlier call still hangs.
    pub async fn measure(&self, path: &Path) -> Result<Statvfs, Error> {
        let hangs = || Error::Hangs { path: path.to_owned(), after: DEADLINE };
        if self.hanging.paths().contains(path) {
            return Err(hangs());
        }
        let (measure, hanging, owned) =
            (Arc::clone(&self.measure), Arc::clone(&self.hanging), path.to_owned());
        let returned = Arc::new(AtomicBool::new(false));
        let has_returned = Arc::clone(&returned);
        let measured = blocking("measuring a file system", move || {
            let result = measure(&owned);
            let mut paths = hanging.paths();
            has_returned.store(true, Ordering::Relaxed);
            paths.remove(&owned);
            result
        });
        if let Ok(result) = tokio::time::timeout(DEADLINE, measured).await {
            return result;
        }
        let mut paths = self.hanging.paths();
        // The lock orders this with the end of the measurement.
        if !returned.load(Ordering::Relaxed) {
            paths.insert(path.to_owned());
        }
        Err(hangs())
    }

    /// Measures the file system of `path`, blocking.
    ///
    /// # Errors
    /// The call fails.
    pub fn measure_now(&self, path: &Path) -> Result<Statvfs, Error> {
        (self.measure)(path)
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_file_system_that_hangs_costs_one_thread_until_it_answers() {
        let (go_on, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let calls = Arc::new(Mutex::new(0));
        let counted = Arc::clone(&calls);
        let space = Space::by(move |_| {
            *counted.lock().unwrap() += 1;
            let _ = wait.lock().unwrap().recv(); // returns at once when the sender is dropped
            statvfs(Path::new("/"))
        });
        // The paused clock does not move on by itself while a thread works.
        let deadline = async {
            while *calls.lock().unwrap() == 0 {
                tokio::task::yield_now().await;
            }
            tokio::time::advance(DEADLINE + Duration::from_millis(1)).await;
        };
        let (first, ()) = tokio::join!(space.measure(Path::new("/nfs")), deadline);
        assert!(matches!(first, Err(Error::Hangs { .. })));
        assert!(matches!(space.measure(Path::new("/nfs")).await, Err(Error::Hangs { .. })));
        assert_eq!(*calls.lock().unwrap(), 1);
        drop(go_on);
        while space.hanging.paths().contains(Path::new("/nfs")) {
            tokio::task::yield_now().await;
        }
        space.measure(Path::new("/nfs")).await.unwrap();
    }
}
