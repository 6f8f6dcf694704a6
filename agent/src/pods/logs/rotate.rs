//! Rotates the logs of containers that run, by size and number, as the kubelet does
//! (`pkg/kubelet/logs/container_log_manager.go`): `0.log` becomes `0.log.20261121-190000`, the runtime is asked to open
//! its file anew, and what was rotated before is compressed (`.gz`).
//!
//! An agent killed between renaming and asking leaves a container that writes to the renamed file: where a log is
//! missing that should be there, the runtime is asked again.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::pods::cri_config::{log_folder, log_path};
use crate::pods::status::runtime_id;
use crate::pods::table::{PodName, PodTable};
use crate::runtime::Runtime;

/// What ends the name of a compressed log.
pub(super) const COMPRESSED: &str = ".gz";
/// What an interrupted compression leaves.
const UNFINISHED: &str = ".tmp";

/// When logs are rotated, and what is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes from which on a log is rotated.
    pub max_size: u64,
    /// Files of a container's instance, the one that is written included; at least 2.
    pub max_files: usize,
    /// How often sizes are looked at.
    pub interval: Duration,
}

/// Rotates until `cancel`.
#[derive(Debug)]
pub struct Rotator {
    runtime: Runtime,
    logs: PathBuf,
    limits: Limits,
    table: watch::Receiver<Arc<PodTable>>,
    /// What failed the last time, so that it is told once.
    failing: BTreeMap<PathBuf, String>,
}

/// A log that is being written.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Written {
    path: PathBuf,
    container_id: String,
}

impl Rotator {
    /// A rotator for the logs below `logs`.
    pub fn new(
        runtime: Runtime,
        logs: PathBuf,
        limits: Limits,
        table: watch::Receiver<Arc<PodTable>>,
    ) -> Self {
        Self { runtime, logs, limits, table, failing: BTreeMap::new() }
    }

    /// Rotates until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut check = tokio::time::interval(self.limits.interval.max(Duration::from_millis(100)));
        check.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = check.tick() => {}
                () = cancel.cancelled() => return,
            }
            let written = written(&self.table.borrow(), &self.logs);
            let max = self.limits.max_size;
            let large = tokio::task::spawn_blocking(move || {
                written.into_iter().filter(|log| is_due(&log.path, max)).collect::<Vec<_>>()
            });
            let due = large.await.unwrap_or_default();
            self.failing.retain(|path, _| due.iter().any(|log| log.path == *path));
            for log in due {
                let rotated = self.rotate(&log).await;
                self.note(&log.path, rotated);
            }
        }
    }

    async fn rotate(&self, log: &Written) -> Result<(), String> {
        let (path, max_files) = (log.path.clone(), self.limits.max_files);
        let moved = tokio::task::spawn_blocking(move || make_room(&path, max_files));
        let moved = moved.await.unwrap_or_else(|e| Err(io::Error::other(e)));
        let moved = moved.map_err(|e| format!("cannot rotate {}: {e}", log.path.display()))?;
        match self.runtime.reopen_container_log(&log.container_id).await {
            Ok(()) => {
                debug!(log = %log.path.display(), "log rotated");
                Ok(())
            }
            Err(error) => {
                // The container goes on writing to the file by its descriptor: give it its name back.
                let path = log.path.clone();
                let back = tokio::task::spawn_blocking(move || match moved {
                    Some(moved) if !path.exists() => fs::rename(moved, path),
                    _ => Ok(()),
                });
                let back = back.await.unwrap_or_else(|e| Err(io::Error::other(e)));
                let also = back.err().map(|e| format!("; nor can it get its name back: {e}"));
                Err(format!("{error}{}", also.unwrap_or_default()))
            }
        }
    }

    fn note(&mut self, path: &Path, result: Result<(), String>) {
        match result {
            Ok(()) => {
                self.failing.remove(path);
            }
            Err(error) => {
                if self.failing.get(path) != Some(&error) {
                    warn!(log = %path.display(), "{error}; tried again at the next check");
                }
                self.failing.insert(path.to_owned(), error);
            }
        }
    }
}

/// The logs of all containers that run.
fn written(table: &PodTable, logs: &Path) -> Vec<Written> {
    let mut found = Vec::new();
    for (name, entry) in &table.pods {
        let Some(status) = &entry.pod.status else { continue };
        let uid = entry.pod.metadata.uid.clone().unwrap_or_default();
        let all = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
        for container in all {
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

/// Whether a log is large enough, or isn't there though it should be.
fn is_due(path: &Path, max_size: u64) -> bool {
    match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.len() > max_size,
        // Its folder tells a log that was renamed from one that was never made.
        Err(e) => e.kind() == io::ErrorKind::NotFound && !rotated(path).unwrap_or_default().is_empty(),
    }
}

/// Compresses what was rotated before, removes the oldest, and gives the log another name: what it is called now, if
/// it was there. Blocking.
fn make_room(log: &Path, max_files: usize) -> io::Result<Option<PathBuf>> {
    clean(log)?;
    let mut old = rotated(log)?;
    // One more is about to come, and one is being written.
    let excess = old.len().saturating_sub(max_files.saturating_sub(2));
    for path in old.drain(..excess) {
        fs::remove_file(path)?;
    }
    for path in old.iter().filter(|path| !is_compressed(path)) {
        compress(path)?;
    }
    if !log.exists() {
        return Ok(None);
    }
    let mut name = log.as_os_str().to_owned();
    name.push(Timestamp::now().strftime(".%Y%m%d-%H%M%S").to_string());
    let moved = PathBuf::from(name);
    if moved.exists() {
        // Two in a second: the container writes faster than names can tell apart.
        return Err(io::Error::other("it was rotated less than a second ago"));
    }
    fs::rename(log, &moved)?;
    Ok(Some(moved))
}

fn is_compressed(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(COMPRESSED.as_bytes())
}

/// The rotated files of a log, oldest first.
pub(super) fn rotated(log: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = beside(log)?;
    found.retain(|path| !is_unfinished(path));
    let all = found.clone();
    found.retain(|path| !all.contains(&with_end(path, COMPRESSED)));
    Ok(found)
}

/// Removes what interrupted compressions left: unfinished files, and those whose compressed form is whole.
fn clean(log: &Path) -> io::Result<()> {
    let found = beside(log)?;
    let left = |path: &&PathBuf| is_unfinished(path) || found.contains(&with_end(path, COMPRESSED));
    found.iter().filter(left).try_for_each(fs::remove_file)
}

fn is_unfinished(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(UNFINISHED.as_bytes())
}

pub(super) fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    PathBuf::from(name)
}

/// All files that are called as a log is, and something more.
fn beside(log: &Path) -> io::Result<Vec<PathBuf>> {
    let (Some(folder), Some(name)) = (log.parent(), log.file_name()) else { return Ok(Vec::new()) };
    let prefix = format!("{}.", name.to_string_lossy());
    let mut found = Vec::new();
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(found),
        Err(e) => return Err(e),
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(&prefix) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn compress(path: &Path) -> io::Result<()> {
    let unfinished = with_end(path, UNFINISHED);
    let mut from = fs::File::open(path)?;
    let mut to = GzEncoder::new(fs::File::create(&unfinished)?, Compression::default());
    io::copy(&mut from, &mut to)?;
    let to = to.finish()?;
    to.set_permissions(from.metadata()?.permissions())?;
    fs::rename(unfinished, with_end(path, COMPRESSED))?;
    fs::remove_file(path)
}

/// Removes the logs of a container's instances before the last one: `beelet logs --previous` shows that. It is no harm
/// if one stays. Blocking.
pub(in crate::pods) fn forget_older(folder: &Path, attempt: u32) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let number = name.split_once(".log").and_then(|(number, _)| number.parse::<u32>().ok());
        if number.is_some_and(|number| number.saturating_add(1) < attempt) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_oldest_go_the_others_are_compressed_and_the_log_gets_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        for name in [
            "0.log.20260101-000001",
            "0.log.20260101-000002",
            "0.log.20260101-000003.gz",
            "0.log.20260101-000004",
            "1.log",
            "0.log.20260101-000009.tmp",
        ] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        fs::write(&log, "now").unwrap();
        let moved = make_room(&log, 4).unwrap().unwrap();
        let left = names(dir.path());
        assert_eq!(left[..2], ["0.log.20260101-000003.gz", "0.log.20260101-000004.gz"]);
        assert_eq!(left[3..], ["1.log"]);
        assert_eq!(fs::read_to_string(&moved).unwrap(), "now");
        assert_eq!(dir.path().join(&left[2]), moved);
        let mut text = String::new();
        let file = fs::File::open(dir.path().join(&left[1])).unwrap();
        flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
        assert_eq!(text, "0.log.20260101-000004");
    }

    #[test]
    fn with_two_files_only_the_last_rotated_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        fs::write(dir.path().join("0.log.20260101-000001"), "").unwrap();
        fs::write(&log, "").unwrap();
        make_room(&log, 2).unwrap();
        assert_eq!(names(dir.path()).len(), 1);
    }

    #[test]
    fn a_compression_that_was_cut_short_is_done_again() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["0.log.20260101-000001", "0.log.20260101-000001.gz"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let found = rotated(&dir.path().join("0.log")).unwrap();
        assert_eq!(found, [dir.path().join("0.log.20260101-000001.gz")]);
    }

    #[test]
    fn a_log_is_due_by_its_size_or_when_it_lost_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        assert!(!is_due(&log, 10), "never made");
        fs::write(&log, [0; 10]).unwrap();
        assert!(!is_due(&log, 10));
        fs::write(&log, [0; 11]).unwrap();
        assert!(is_due(&log, 10));
        fs::rename(&log, dir.path().join("0.log.20260101-000001")).unwrap();
        assert!(is_due(&log, 10), "renamed, and the runtime not told");
    }

    #[test]
    fn logs_of_older_instances_go() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["0.log", "0.log.20260101-000001.gz", "1.log", "2.log", "other"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        forget_older(dir.path(), 2);
        assert_eq!(names(dir.path()), ["1.log", "2.log", "other"]);
    }
}
