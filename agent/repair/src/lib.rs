//! Faults of the machine that node repair acts on, measured every few seconds: the container runtime's
//! silence, the agent's file systems, and the kernel's log. `beelet_policy::node::repair` judges them and
//! names the conditions; `agent/src/cluster` writes these to the Node.
//!
//! This crate only reads. Its work is optional: the configuration's `nodeConditions` starts it.

mod kernel_log;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_base::{
    Error,
    blocking::blocking,
    filesystem::{Space, Statvfs},
    mountinfo,
    work::Work,
};
use beelet_policy::node::repair::{Disk, DiskState, Fault, KernelLog, disk, runtime};
use futures::future::join_all;
use rustix::io::Errno;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use kernel_log::Reader;

/// Path of the kernel's log.
pub const KERNEL_LOG: &str = "/dev/kmsg";
/// Path of the kernel's own marks of faults since boot.
pub const TAINTED: &str = "/proc/sys/kernel/tainted";
/// Interval of measurements.
const PERIOD: Duration = Duration::from_secs(5);

/// Inputs of [`keep`].
pub struct Inputs {
    /// Returns the time since the container runtime's last answer.
    pub silence: Arc<dyn Fn() -> Duration + Send + Sync>,
    /// Measures file systems.
    pub space: Space,
    /// The agent's own folders: their file systems must take writes.
    pub folders: Vec<PathBuf>,
    /// The kernel's log, usually [`KERNEL_LOG`].
    pub kernel_log: PathBuf,
    /// The kernel's own marks of faults, usually [`TAINTED`].
    pub tainted: PathBuf,
    /// Publishes the faults; None before the first measurement.
    pub faults: watch::Sender<Option<Vec<Fault>>>,
}

impl std::fmt::Debug for Inputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inputs").field("folders", &self.folders).finish_non_exhaustive()
    }
}

/// Measures and publishes the faults until `stop`.
pub fn keep(inputs: Inputs, stop: CancellationToken) -> Work {
    Box::pin(async move {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut kernel = Kernel::default();
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let (read, of_kernel) = kernel.read_on(&inputs).await;
            kernel = read;
            let disks = measure(&inputs.space, &inputs.folders).await;
            let mut faults: Vec<Fault> = runtime((inputs.silence)()).into_iter().collect();
            faults.extend(disks.iter().filter_map(|one| disk(one, &kernel.log)));
            faults.extend(of_kernel);
            publish(&inputs.faults, faults);
        }
    })
}

/// Publishes the faults if they changed, and logs the new and the ended ones.
fn publish(known: &watch::Sender<Option<Vec<Fault>>>, faults: Vec<Fault>) {
    known.send_if_modified(|published| {
        let known = published.as_deref().unwrap_or_default();
        let has = |all: &[Fault], one: &Fault| all.iter().any(|fault| fault.reason == one.reason);
        faults.iter().filter(|fault| !has(known, fault)).for_each(|fault| {
            warn!(reason = ?fault.reason, "fault of the machine: {}", fault.message);
        });
        known.iter().filter(|fault| !has(&faults, fault)).for_each(|fault| {
            info!(reason = ?fault.reason, "fault of the machine has ended");
        });
        let differ = published.as_ref() != Some(&faults);
        *published = Some(faults);
        differ
    });
}

/// The kernel's log, read up to now.
#[derive(Default)]
struct Kernel {
    /// None before the log is opened, and after a failure: each look tries again.
    reader: Option<Reader>,
    log: KernelLog,
}

impl Kernel {
    /// Reads the new records, and checks the hung tasks. Returns the kernel's faults, too.
    async fn read_on(self, inputs: &Inputs) -> (Self, Vec<Fault>) {
        let (path, tainted) = (inputs.kernel_log.clone(), inputs.tainted.clone());
        blocking("reading the kernel's log", move || {
            let Self { reader, mut log } = self;
            let read = reader.map_or_else(|| Reader::open(&path), Ok).and_then(|mut reader| {
                reader.read(|record| log.add(record))?;
                Ok(reader)
            });
            log.retain_hung(kernel_log::hangs);
            let unreadable = read.as_ref().err().map(|error| format!("{}: {error}", path.display()));
            let has_oopsed = kernel_log::has_oopsed(&tainted);
            let faults = log.faults(kernel_log::since_boot(), has_oopsed, unreadable.as_deref());
            (Self { reader: read.ok(), log }, faults)
        })
        .await
    }
}

/// Measures the file systems of `folders`, all at once: one of them may hang.
async fn measure(space: &Space, folders: &[PathBuf]) -> Vec<Disk> {
    let one = async |folder: &PathBuf| {
        let state = state(space.measure(folder).await)?;
        let (folder, place) = (folder.display().to_string(), folder.clone());
        let device = blocking("finding a file system's device", move || device(&place)).await;
        Some(Disk { folder, device: device.unwrap_or_default(), state })
    };
    join_all(folders.iter().map(one)).await.into_iter().flatten().collect()
}

/// Returns the state of a measured file system; None for a folder that does not exist yet.
fn state(measured: Result<Statvfs, Error>) -> Option<DiskState> {
    match measured {
        Ok(found) => Some(DiskState::Measured {
            read_only: found.read_only,
            capacity: found.bytes.capacity_bytes,
            available: found.bytes.available_bytes,
            inodes: found.inodes,
            inodes_free: found.inodes_free,
        }),
        Err(Error::Measure { cause: Errno::NOENT, .. }) => None,
        Err(Error::Hangs { .. }) => Some(DiskState::Hangs),
        Err(error) => Some(DiskState::Fails(error.to_string())),
    }
}

/// Returns the name of the device of a folder's file system, as the kernel's messages have it: `sda1`,
/// `dm-0`.
fn device(folder: &Path) -> Option<String> {
    let table = mountinfo::read().ok()?;
    let source = mountinfo::mount_of(&table, folder)?.source;
    let path = Path::new(std::str::from_utf8(source).ok()?);
    // Logical volumes have links to their devices.
    let device = std::fs::canonicalize(path).ok()?;
    Some(device.strip_prefix("/dev").ok()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Mutex};

    use beelet_policy::node::repair::Reason;
    use beelet_units::fs_usage::FsUsage;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_fault_is_published_within_the_next_look_and_withdrawn() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("kmsg");
        let silence = Arc::new(Mutex::new(Duration::ZERO));
        let read_only = Arc::new(Mutex::new(false));
        let tainted = dir.path().join("tainted");
        fs::write(&tainted, "0\n").unwrap();
        let (out, mut faults) = watch::channel(None);
        let (asked, ro) = (Arc::clone(&silence), Arc::clone(&read_only));
        let inputs = Inputs {
            silence: Arc::new(move || *asked.lock().unwrap()),
            space: Space::by(move |path| {
                if path.ends_with("missing") {
                    return Err(Error::Measure { path: path.to_owned(), cause: Errno::NOENT });
                }
                let bytes = FsUsage { capacity_bytes: 1000, available_bytes: 500 };
                Ok(Statvfs { bytes, inodes: 0, inodes_free: 0, read_only: *ro.lock().unwrap() })
            }),
            folders: vec![dir.path().to_owned(), dir.path().join("missing")],
            kernel_log: log.clone(),
            tainted: tainted.clone(),
            faults: out,
        };
        let stop = CancellationToken::new();
        let keeping = tokio::spawn(keep(inputs, stop.clone()));
        let reasons = |faults: &Option<Vec<Fault>>| {
            faults.iter().flatten().map(|fault| fault.reason).collect::<Vec<_>>()
        };
        // A log that appears later, or becomes readable, is read from then on.
        faults.wait_for(|faults| reasons(faults) == [Reason::KernelLogUnreadable]).await.unwrap();
        fs::write(&log, "6,1,1,-;booted\n").unwrap();
        faults.wait_for(|faults| faults.as_ref().is_some_and(Vec::is_empty)).await.unwrap();
        *silence.lock().unwrap() = Duration::from_secs(20);
        faults.wait_for(|faults| reasons(faults) == [Reason::ContainerRuntimeNotAnswering]).await.unwrap();
        *silence.lock().unwrap() = Duration::ZERO;
        *read_only.lock().unwrap() = true;
        faults.wait_for(|faults| reasons(faults) == [Reason::FilesystemIsReadOnly]).await.unwrap();
        *read_only.lock().unwrap() = false;
        let mut records = fs::read_to_string(&log).unwrap();
        records.push_str("4,2,2,-;Oops: 0000 [#1] SMP\n");
        fs::write(&log, records).unwrap();
        fs::write(&tainted, "128\n").unwrap();
        faults.wait_for(|faults| reasons(faults) == [Reason::KernelOops]).await.unwrap();
        stop.cancel();
        keeping.await.unwrap();
    }
}
