//! Imports the image archives that appear in a folder. Images stay until they are removed by hand. For nodes
//! without a registry, as the manifest folder is for nodes without an API server.
//!
//! No state survives a restart: a repeated import changes nothing, or restores removed images. Must never
//! delete a file or an image.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use beelet_base::work::Work;
use beelet_base::{blocking::blocking, own_file};
use beelet_cri::Runtime;
use beelet_state::events::NodeEvents;
use futures::StreamExt as _;
use inotify::{EventStream, Inotify, WatchMask};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::import::{ImportError, Wanted, import};

/// Interval of scans without an event: the folder may have been created, and transient failures are retried.
const PERIOD: Duration = Duration::from_secs(30);
/// Maximum number of archives.
const MOST: usize = 1000;
/// Size of the buffer for inotify events, in bytes.
const BUFFER: usize = 16 << 10;
/// File name extensions of archives. An archive in an unsupported compression causes an event that names the
/// compression.
const ENDINGS: [&[u8]; 8] =
    [b".tar", b".tar.gz", b".tgz", b".tar.zst", b".tzst", b".tar.xz", b".tar.bz2", b".tar.lz4"];

/// Dependencies of the import from a folder.
#[derive(Debug)]
pub struct Folder {
    /// Path of the folder, which may be created or removed at any time.
    pub path: PathBuf,
    /// Runtime that receives the images.
    pub runtime: Runtime,
    /// Records events about the node.
    pub events: NodeEvents,
}

/// Inode, size and modification time, which identify one content of a file.
type Version = (u64, u64, i64, i64);

/// State of the archives in the folder.
#[derive(Default)]
struct Known {
    done: BTreeMap<OsString, Version>,
    /// Last error per archive, so that a repeated one is reported once.
    failed: BTreeMap<OsString, String>,
}

impl Folder {
    /// Imports present and new archives until `cancel`.
    pub fn run(self, cancel: CancellationToken) -> Work {
        Box::pin(async move {
            let mut known = Known::default();
            let mut events = None;
            loop {
                // The watch is added first, so that no change during the scan is missed.
                if events.is_none() {
                    events = watch(&self.path);
                }
                if cancel.run_until_cancelled(self.scan(&mut known)).await.is_none() {
                    return;
                }
                let next = async {
                    match &mut events {
                        Some(stream) => stream.next().await.is_some_and(|event| event.is_ok()),
                        None => std::future::pending().await,
                    }
                };
                let waited = cancel.run_until_cancelled(tokio::time::timeout(PERIOD, next)).await;
                match waited {
                    None => return,
                    Some(Ok(true)) => {}
                    // The folder may have been replaced.
                    Some(Ok(false) | Err(_)) => events = None,
                }
            }
        })
    }

    async fn scan(&self, known: &mut Known) {
        let path = self.path.clone();
        let archives = match blocking("listing image archives", move || list(&path)).await {
            Ok(archives) => archives,
            Err(error) => {
                warn!("cannot read the image archive folder {}: {error}", self.path.display());
                return;
            }
        };
        known.done.retain(|name, _| archives.contains_key(name));
        known.failed.retain(|name, _| archives.contains_key(name));
        for (name, version) in archives {
            if known.done.get(&name) != Some(&version) {
                self.import_version(known, name, version).await;
            }
        }
    }

    async fn import_version(&self, known: &mut Known, name: OsString, version: Version) {
        let path = self.path.join(&name);
        match self.import(&path).await {
            Ok(names) => {
                if !names.is_empty() {
                    let message = format!("Imported {} from {}", names.join(", "), path.display());
                    self.events.normal("ImagesImported", &message);
                }
                known.failed.remove(&name);
                known.done.insert(name, version);
            }
            Err(error) => {
                let is_transient = error.is_transient();
                let message = format!("Failed to import {}: {error}", path.display());
                if known.failed.insert(name.clone(), message.clone()).as_ref() != Some(&message) {
                    self.events.warning("FailedToImportImages", &message);
                }
                if !is_transient {
                    known.done.insert(name, version);
                }
            }
        }
    }

    /// Imports an archive and returns the names of new images.
    async fn import(&self, path: &Path) -> Result<Vec<String>, ImportError> {
        let archive = path.to_owned();
        let file = blocking("opening an image archive", move || own_file::read(&archive)).await?;
        let wanted = Wanted { what: path.display().to_string(), name: None, pinned: true };
        let imported = import(&self.runtime, wanted, file).await?;
        Ok(imported.into_iter().filter(|image| image.is_new).map(|image| image.name).collect())
    }
}

fn watch(path: &Path) -> Option<EventStream<Vec<u8>>> {
    let inotify = Inotify::init().ok()?;
    let mask = WatchMask::CLOSE_WRITE | WatchMask::MOVED_TO | WatchMask::DELETE_SELF | WatchMask::MOVE_SELF;
    // A missing folder is watched later: `run` retries.
    inotify.watches().add(path, mask | WatchMask::ONLYDIR).ok()?;
    inotify.into_event_stream(vec![0; BUFFER]).ok()
}

/// Lists the archives with their versions; empty if the folder does not exist.
fn list(path: &Path) -> io::Result<BTreeMap<OsString, Version>> {
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        entries => entries?,
    };
    let mut archives = BTreeMap::new();
    for entry in entries.take(MOST) {
        let entry = entry?;
        let name = entry.file_name();
        let is_archive = ENDINGS.iter().any(|ending| name.as_bytes().ends_with(ending));
        if !is_archive || name.as_bytes().starts_with(b".") {
            continue;
        }
        // Skips an archive that has just been deleted.
        if let Ok(found) = entry.metadata()
            && found.is_file()
        {
            archives.insert(name, (found.ino(), found.size(), found.mtime(), found.mtime_nsec()));
        }
    }
    Ok(archives)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_are_files_with_such_names() {
        let dir = tempfile::tempdir().unwrap();
        assert!(list(&dir.path().join("none")).unwrap().is_empty());
        for name in ["a.tar", "b.tar.gz", ".c.tar", "d.tar.part", "README.md"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        std::fs::create_dir(dir.path().join("folder.tar")).unwrap();
        std::os::unix::fs::symlink("a.tar", dir.path().join("link.tar")).unwrap();
        let names: Vec<OsString> = list(dir.path()).unwrap().into_keys().collect();
        assert_eq!(names, ["a.tar", "b.tar.gz"]);
    }

    #[test]
    fn another_content_is_another_version() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tar");
        std::fs::write(&path, "one").unwrap();
        let before = list(dir.path()).unwrap();
        std::fs::write(&path, "three").unwrap();
        assert_ne!(list(dir.path()).unwrap(), before);
    }
}
