//! Rotates the logs of running containers by size and number, as the kubelet does
//! (`pkg/kubelet/logs/container_log_manager.go`): `0.log` becomes `0.log.20261121-190000`, the runtime
//! reopens its file, and older rotated files are compressed (`.gz`).
//!
//! If the agent is killed between the rename and the reopen request, the container writes to the renamed
//! file. If an expected log is missing, the request is repeated.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1 as core;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::Error;
use beelet_base::work::Work;
use beelet_base::{blocking::blocking, own_file, walk};
use beelet_cri::Runtime;
use beelet_model::pod::{log_folder, log_path};
use beelet_model::status::runtime_id;
use beelet_model::table::{PodName, PodTable};

/// Suffix of compressed logs.
pub(super) const COMPRESSED: &str = ".gz";
/// Suffix of incomplete compressed files.
const UNFINISHED: &str = ".tmp";
/// Maximum time by which a rotated file may be ahead of the clock and still keep its place in the order.
const AHEAD: SignedDuration = SignedDuration::from_hours(24);

/// Limits of logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size in bytes above which a log is rotated.
    pub max_size: u64,
    /// Maximum files per instance of a container, including the current one; at least 2.
    pub max_files: usize,
    /// Interval between two checks of the sizes.
    pub interval: Duration,
}

/// Rotates logs until it is cancelled.
#[derive(Debug)]
pub struct Rotator {
    runtime: Runtime,
    logs: PathBuf,
    limits: Limits,
    table: watch::Receiver<Arc<PodTable>>,
    /// Last errors, so that each one is logged once.
    failing: BTreeMap<PathBuf, String>,
}

/// A log being written.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Written {
    path: PathBuf,
    container_id: String,
}

impl Rotator {
    /// Returns a rotator for the logs below `logs`.
    pub fn new(
        runtime: Runtime,
        logs: PathBuf,
        limits: Limits,
        table: watch::Receiver<Arc<PodTable>>,
    ) -> Self {
        Self { runtime, logs, limits, table, failing: BTreeMap::new() }
    }

    /// Runs until `cancel`.
    pub fn run(mut self, cancel: CancellationToken) -> Work {
        Box::pin(async move {
            let mut check = tokio::time::interval(self.limits.interval.max(Duration::from_millis(100)));
            check.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            // A container's file may take hours to compress, which must not delay other rotations.
            let mut compressing = Compressing::default();
            loop {
                tokio::select! {
                    _ = check.tick() => {}
                    (log, compressed) = compressing.next() => {
                        self.record(&log, compressed);
                        continue;
                    }
                    () = cancel.cancelled() => return,
                }
                let written = written(&self.table.borrow(), &self.logs);
                let (max, logs) = (self.limits.max_size, self.logs.clone());
                let due = blocking("checking the sizes of logs", move || {
                    let is_due = |log: &Written| Log::open(&logs, &log.path).is_ok_and(|log| log.is_due(max));
                    written.into_iter().filter(is_due).collect::<Vec<_>>()
                });
                let due = due.await;
                self.failing.retain(|path, _| due.iter().any(|log| log.path == *path));
                for log in due {
                    let rotated = self.rotate(&log, compressing.is_at(&log.path)).await;
                    if rotated.is_ok() {
                        compressing.add(self.logs.clone(), log.path.clone());
                    }
                    self.record(&log.path, rotated);
                }
            }
        })
    }

    async fn rotate(&self, log: &Written, is_compressing: bool) -> Result<(), Error> {
        let (logs, path, max_files) = (self.logs.clone(), log.path.clone(), self.limits.max_files);
        let moved = blocking("rotating a log", move || {
            let log = Log::open(&logs, &path)?;
            if !is_compressing {
                log.clean()?;
            }
            let moved = log.make_room(max_files)?;
            Ok::<_, io::Error>((log, moved))
        });
        let moved = moved.await.map_err(|cause| Error::Rotate { log: log.path.clone(), cause });
        let (files, moved) = moved?;
        match self.runtime.containers.reopen_log(&log.container_id).await {
            Ok(()) => {
                debug!(log = %log.path.display(), "log rotated");
                Ok(())
            }
            Err(error) => {
                // The container still writes to the file, so the rename is undone.
                let back = blocking("renaming a log back", move || match moved {
                    Some(moved) if !files.has(&files.name) => files.rename(&moved, &files.name),
                    _ => Ok(()),
                });
                Err(Error::Reopen { error, back: back.await.err() })
            }
        }
    }

    fn record(&mut self, path: &Path, result: Result<(), Error>) {
        match result {
            Ok(()) => {
                self.failing.remove(path);
            }
            Err(error) => {
                let error = error.to_string();
                if self.failing.get(path) != Some(&error) {
                    warn!(log = %path.display(), "{error}; retrying at the next check");
                }
                self.failing.insert(path.to_owned(), error);
            }
        }
    }
}

/// Compresses rotated files, one log at a time.
#[derive(Debug, Default)]
struct Compressing {
    /// Queued logs with their logs directory.
    waiting: VecDeque<(PathBuf, PathBuf)>,
    current: Option<PathBuf>,
    work: JoinSet<Result<(), Error>>,
}

impl Compressing {
    fn is_at(&self, log: &Path) -> bool {
        self.current.as_deref() == Some(log)
    }

    /// Queues the rotated files of a log, except the newest one, for compression.
    fn add(&mut self, logs: PathBuf, log: PathBuf) {
        if self.waiting.iter().all(|(_, waiting)| *waiting != log) {
            self.waiting.push_back((logs, log));
        }
        self.start();
    }

    /// Waits until a log is done.
    async fn next(&mut self) -> (PathBuf, Result<(), Error>) {
        loop {
            let Some(done) = self.work.join_next().await else {
                std::future::pending::<()>().await;
                continue;
            };
            let log = self.current.take().unwrap_or_default();
            self.start();
            return (log, done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())));
        }
    }

    fn start(&mut self) {
        if self.current.is_some() {
            return;
        }
        let Some((logs, path)) = self.waiting.pop_front() else { return };
        self.current = Some(path.clone());
        self.work.spawn(async move {
            let log = path.clone();
            let compressed = blocking("compressing a log", move || Log::open(&logs, &path)?.compress_older());
            compressed.await.map_err(|cause| Error::Rotate { log, cause })
        });
    }
}

/// Returns the logs of all running containers.
fn written(table: &PodTable, logs: &Path) -> Vec<Written> {
    let mut found = Vec::new();
    for (name, entry) in &table.pods {
        let Some(status) = &entry.pod.status else { continue };
        let uid = entry.pod.metadata.uid.clone().unwrap_or_default();
        let usual = status.init_container_statuses.iter().chain(&status.container_statuses);
        for container in usual.chain(&status.ephemeral_container_statuses).flatten() {
            found.extend(log_of(container, logs, name, &uid));
        }
    }
    found
}

fn log_of(status: &core::ContainerStatus, logs: &Path, name: &PodName, uid: &str) -> Option<Written> {
    status.state.as_ref()?.running.as_ref()?;
    let id = runtime_id(status)?;
    let attempt = u32::try_from(status.restart_count).ok()?;
    let path = log_folder(logs, name, uid).join(log_path(&status.name, attempt));
    Some(Written { path, container_id: id.to_owned() })
}

/// A log and its rotated files: names in one open directory. A pod with the machine's directory of logs
/// mounted may create links there; this code never follows a link, and never writes to an existing file.
struct Log {
    folder: OwnedFd,
    /// Name of the log itself.
    name: OsString,
}

impl Log {
    /// Opens the log at `path`, below the directory `logs`.
    fn open(logs: &Path, path: &Path) -> io::Result<Self> {
        let inner = path.strip_prefix(logs).map_err(io::Error::other)?;
        let (Some(folder), Some(name)) = (inner.parent(), inner.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(logs, flags, Mode::empty())?;
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let folder = rustix::fs::openat2(root, folder, FOLDER, Mode::empty(), inside)?;
        Ok(Self { folder, name: name.to_owned() })
    }

    /// Returns true if the log is large enough, or if it is missing but should exist.
    fn is_due(&self, max_size: u64) -> bool {
        match rustix::fs::statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => u64::try_from(stat.st_size).is_ok_and(|size| size > max_size),
            // The directory shows whether a missing log was renamed or never created.
            Err(e) => e == Errno::NOENT && !self.rotated().unwrap_or_default().is_empty(),
        }
    }

    /// Removes the oldest rotated files and renames the log. Returns its new name if the log existed.
    /// Blocking.
    fn make_room(&self, max_files: usize) -> io::Result<Option<OsString>> {
        let old = self.rotated()?;
        // Reserves two places: for the log being rotated and for the next one.
        let excess = old.len().saturating_sub(max_files.saturating_sub(2));
        for name in &old[..excess] {
            self.remove(name)?;
        }
        if !self.has(&self.name) {
            return Ok(None);
        }
        let moved = self.next_name(&old[excess..], Timestamp::now());
        let taken = |end: &str| self.has(&with_end(&moved, end));
        if taken("") || taken(COMPRESSED) || taken(UNFINISHED) {
            return Err(io::Error::other(format!("the name {} already exists", moved.display())));
        }
        self.rename(&self.name, &moved)?;
        Ok(Some(moved))
    }

    /// Returns the name for the log that is rotated at `now`, later than all existing ones: names sort by
    /// time, but the clock may be set back, and a container may fill logs faster than one per second.
    fn next_name(&self, old: &[OsString], now: Timestamp) -> OsString {
        const FORM: &str = "%Y%m%d-%H%M%S";
        let prefix = with_end(&self.name, ".");
        let now = now.to_zoned(TimeZone::UTC).datetime();
        let time = |name: &OsString| {
            let time = stem(name).as_bytes().strip_prefix(prefix.as_bytes())?;
            DateTime::strptime(FORM, str::from_utf8(time).ok()?).ok()
        };
        // Names far in the future do not come from a clock.
        let horizon = now.saturating_add(AHEAD);
        let newest = old.iter().filter_map(time).filter(|time| *time < horizon).max();
        let after = newest.map_or(now, |newest| newest.saturating_add(SignedDuration::from_secs(1)));
        with_end(prefix, &now.max(after).strftime(FORM).to_string())
    }

    /// Compresses the rotated files except the newest one, to which the runtime may still write.
    fn compress_older(&self) -> io::Result<()> {
        let old = self.rotated()?;
        let older = old.split_last().map_or(&[][..], |(_, older)| older);
        older.iter().filter(|name| !is_compressed(name)).try_for_each(|name| self.compress(name))
    }

    /// Returns the rotated files, oldest first.
    fn rotated(&self) -> io::Result<Vec<OsString>> {
        let mut found = self.beside()?;
        found.retain(|name| !is_unfinished(name));
        let all = found.clone();
        found.retain(|name| !all.contains(&with_end(name, COMPRESSED)));
        Ok(found)
    }

    /// Removes the leftovers of interrupted compressions: incomplete files, and files whose compressed form
    /// is complete.
    fn clean(&self) -> io::Result<()> {
        let found = self.beside()?;
        let left = |name: &&OsString| is_unfinished(name) || found.contains(&with_end(name, COMPRESSED));
        found.iter().filter(left).try_for_each(|name| self.remove(name))
    }

    /// Returns all files whose name begins with the log's name and a dot.
    fn beside(&self) -> io::Result<Vec<OsString>> {
        let prefix = with_end(&self.name, ".");
        let mut found = Vec::new();
        for entry in Dir::read_from(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name.starts_with(prefix.as_bytes()) {
                found.push(OsStr::from_bytes(name).to_owned());
            }
        }
        found.sort();
        Ok(found)
    }

    fn compress(&self, name: &OsStr) -> io::Result<()> {
        let flags = own_file::FOUND.union(OFlags::NOFOLLOW);
        let found = rustix::fs::openat(&self.folder, name, flags, Mode::empty())?;
        if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) != FileType::RegularFile {
            // The runtime writes neither links nor devices nor sockets.
            return self.remove(name);
        }
        let from = own_file::reopen(&found, OFlags::RDONLY)?;
        let metadata = from.metadata()?;
        if has_hole(&from, metadata.len())? {
            // The runtime only appends. Reading a hole of terabytes would take hours.
            return self.remove(name);
        }
        let unfinished = with_end(name, UNFINISHED);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let to = rustix::fs::openat(&self.folder, &unfinished, flags, Mode::from_raw_mode(0o600))?;
        let mut to = GzEncoder::new(File::from(to), Compression::default());
        io::copy(&mut &from, &mut to)?;
        to.finish()?.set_permissions(metadata.permissions())?;
        self.rename(&unfinished, &with_end(name, COMPRESSED))?;
        self.remove(name)
    }

    fn has(&self, name: &OsStr) -> bool {
        rustix::fs::statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    fn rename(&self, from: &OsStr, to: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.folder, from, &self.folder, to)?)
    }

    /// Removes anything with this name: a pod may have created a directory.
    fn remove(&self, name: &OsStr) -> io::Result<()> {
        let name = CString::new(name.as_bytes())?;
        Ok(walk::remove(self.folder.as_fd(), &name)?)
    }
}

/// Flags for opening a directory to read.
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Returns true if a file has a hole before its end. A file system without holes reports data only.
fn has_hole(file: &File, length: u64) -> io::Result<bool> {
    if length == 0 {
        return Ok(false);
    }
    let hole = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(0))?;
    rustix::fs::seek(file, rustix::fs::SeekFrom::Start(0))?;
    Ok(hole < length)
}

pub(super) fn is_compressed(name: &OsStr) -> bool {
    name.as_bytes().ends_with(COMPRESSED.as_bytes())
}

/// Returns a rotated file's name without the suffix of compressed files.
pub(super) fn stem(name: &OsStr) -> &OsStr {
    let name = name.as_bytes();
    OsStr::from_bytes(name.strip_suffix(COMPRESSED.as_bytes()).unwrap_or(name))
}

fn is_unfinished(name: &OsStr) -> bool {
    name.as_bytes().ends_with(UNFINISHED.as_bytes())
}

/// Returns true for the name of a rotated, uncompressed log, to which the runtime may still write.
pub(super) fn is_rotated(name: &OsStr) -> bool {
    let has_time = name.to_str().is_some_and(|name| name.contains(".log."));
    has_time && !is_compressed(name) && !is_unfinished(name)
}

pub(super) fn with_end(name: impl Into<OsString>, end: &str) -> OsString {
    let mut name = name.into();
    name.push(end);
    name
}

/// Returns the rotated files of the log at `path`, oldest first.
pub(super) fn rotated(path: &Path) -> io::Result<Vec<PathBuf>> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return Ok(Vec::new()) };
    let log = match rustix::fs::open(folder, FOLDER, Mode::empty()) {
        Ok(open) => Log { folder: open, name: name.to_owned() },
        Err(Errno::NOENT) => return Ok(Vec::new()),
        Err(e) => return Err(e.into()),
    };
    Ok(log.rotated()?.into_iter().map(|name| folder.join(name)).collect())
}

/// Removes the logs of a container's instances before the previous one, which `beelet logs --previous` shows.
/// Leaving one behind is harmless. Blocking.
pub fn forget_older(folder: &Path, attempt: u32) {
    let Ok(folder) = rustix::fs::open(folder, FOLDER, Mode::empty()) else { return };
    for entry in Dir::read_from(&folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().ok().and_then(|name| name.split_once(".log"));
        let number = number.and_then(|(number, _)| number.parse::<u32>().ok());
        if number.is_some_and(|number| number.saturating_add(1) < attempt) {
            let _ = rustix::fs::unlinkat(&folder, name, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests;
