//! The folder of static pods, watched: whenever a manifest comes, changes or goes, readers get the new
//! [`Desired`] set, within milliseconds, without polling.
//!
//! Events only say where to look; what is there is always read anew, and read whole again where events were lost
//! (an overflow), the folder was replaced, and every `check_frequency` in any case. A file is read when its
//! writing ends; one that is half written nevertheless is reported, and read again when it is closed.
//!
//! This module must never decide what becomes of a pod, and never write into the folder.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::folder::{Content, Desired, Folder, Standing};
use super::watch::{Changes, Watcher, is_manifest_name};
use crate::document::Limits;

/// How the folder is watched.
#[derive(Clone, Debug)]
pub struct Options {
    /// How often the folder is read whole even if nothing was told (`fileCheckFrequency`, 20 s by default).
    pub check_frequency: Duration,
    /// Whether pods are marked as the kubelet marks static pods, which makes them critical.
    pub critical_static_pods: bool,
    /// Kernel settings that pods may have besides the safe ones (`allowedUnsafeSysctls`).
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Ends the watching.
    pub cancel: CancellationToken,
}

/// The manifests of a folder (or of one file), watched.
pub struct ManifestSource {
    path: PathBuf,
    folder: Folder,
    watcher: Option<Watcher>,
    watch_failed: Option<String>,
}

impl ManifestSource {
    /// Reads the folder at `path` and goes on watching it until `options.cancel`, or until nobody listens. What
    /// the receiver holds at first is what was read. Never fails: what is wrong with the folder is among the
    /// rejected, and mended without help when it is.
    pub async fn start(path: PathBuf, node_name: String, options: Options) -> watch::Receiver<Arc<Desired>> {
        let (desired, watching) = Self::open(path, node_name, options).await;
        tokio::spawn(watching);
        desired
    }

    /// The same, with the watching as a task for the caller to run.
    pub async fn open(
        path: PathBuf,
        node_name: String,
        options: Options,
    ) -> (watch::Receiver<Arc<Desired>>, impl Future<Output = ()> + Send + use<>) {
        let mut folder = Folder::new(path.clone(), node_name, options.critical_static_pods);
        folder.allow_sysctls(options.allowed_unsafe_sysctls.clone());
        let mut source = ManifestSource { path, folder, watcher: None, watch_failed: None };
        source.read_everything().await;
        let desired = source.folder.desired();
        log_changes(&Desired::default(), &desired);
        let (sender, receiver) = watch::channel(Arc::new(desired));
        (receiver, source.run(sender, options))
    }

    async fn run(mut self, sender: watch::Sender<Arc<Desired>>, options: Options) {
        let period = options.check_frequency.max(Duration::from_millis(10));
        let mut check = tokio::time::interval_at(tokio::time::Instant::now() + period, period);
        check.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let changes = tokio::select! {
                () = options.cancel.cancelled() => return,
                () = sender.closed() => return,
                changes = next_changes(&mut self.watcher) => changes,
                _ = check.tick() => Changes { everything: true, ..Changes::default() },
            };
            if changes.everything {
                self.read_everything().await;
            } else {
                self.read_files(changes).await;
            }
            let desired = self.folder.desired();
            sender.send_if_modified(|current| {
                let modified = **current != desired;
                if modified {
                    log_changes(current, &desired);
                    *current = Arc::new(desired);
                }
                modified
            });
        }
    }

    /// Watches, then reads, the whole folder.
    async fn read_everything(&mut self) {
        self.arm();
        let path = self.path.clone();
        let scan = match tokio::task::spawn_blocking(move || scan(&path)).await {
            Ok(scan) => scan,
            Err(error) => Scan { standing: Standing::Unreadable(error.to_string()), files: Vec::new() },
        };
        let read = scan.standing == Standing::Read;
        self.folder.set_standing(scan.standing);
        if read {
            let there: BTreeSet<PathBuf> = scan.files.iter().map(|(path, _)| path.clone()).collect();
            self.folder.keep_only(&there);
            scan.files.into_iter().for_each(|(path, content)| self.update(path, content));
        }
    }

    /// Reads the files that events named.
    async fn read_files(&mut self, changes: Changes) {
        let folder = self.path.clone();
        let read = tokio::task::spawn_blocking(move || {
            let complete = changes.created.into_iter().filter(|name| is_complete(&folder.join(name)));
            let names: BTreeSet<OsString> = complete.chain(changes.files).collect();
            let read = |name| {
                let path = folder.join(name);
                let content = read_file(&path);
                (path, content)
            };
            names.into_iter().map(read).collect::<Vec<_>>()
        });
        match read.await {
            Ok(files) => {
                for (path, content) in files {
                    match content {
                        Some(content) => self.update(path, content),
                        None => self.folder.forget(&path),
                    }
                }
            }
            Err(error) => tracing::error!("cannot read the changed manifests: {error}; the next check does"),
        }
    }

    fn update(&mut self, path: PathBuf, content: Content) {
        let now = jiff::Timestamp::now().to_string();
        for warning in self.folder.update(path, content, &now) {
            tracing::warn!("{warning}");
        }
    }

    /// Sets the watches up, or again. Without them the periodic check is all there is.
    fn arm(&mut self) {
        let armed = match &mut self.watcher {
            Some(watcher) => watcher.arm(&self.path),
            None => Watcher::new().and_then(|mut watcher| {
                watcher.arm(&self.path)?;
                self.watcher = Some(watcher);
                Ok(())
            }),
        };
        let failed = armed.err().map(|error| error.to_string());
        if let Some(why) = failed.as_ref().filter(|why| self.watch_failed.as_ref() != Some(*why)) {
            tracing::warn!(
                "cannot watch {} ({why}); its manifests are only looked at every fileCheckFrequency (is \
                 fs.inotify.max_user_instances or max_user_watches reached?)",
                self.path.display()
            );
        }
        self.watch_failed = failed;
    }
}

/// The next changes; never any without watches. Watches that fail are dropped, and set up again at once.
async fn next_changes(watcher: &mut Option<Watcher>) -> Changes {
    let Some(watching) = watcher else { return std::future::pending().await };
    match watching.next().await {
        Ok(changes) => changes,
        Err(error) => {
            tracing::warn!("cannot read inotify events: {error}; watching anew");
            *watcher = None;
            Changes { everything: true, ..Changes::default() }
        }
    }
}

/// Tells, once each, what is rejected and what no longer is.
fn log_changes(before: &Desired, after: &Desired) {
    for rejected in after.rejected.iter().filter(|rejected| !before.rejected.contains(rejected)) {
        for line in rejected.message.lines() {
            tracing::warn!(file = %rejected.file.display(), "manifest rejected: {line}");
        }
    }
    let still = |file: &Path| after.rejected.iter().any(|rejected| rejected.file == file);
    for mended in before.rejected.iter().filter(|rejected| !still(&rejected.file)) {
        tracing::info!(file = %mended.file.display(), "manifest no longer rejected");
    }
}

/// A look at the whole folder.
struct Scan {
    standing: Standing,
    files: Vec<(PathBuf, Content)>,
}

fn scan(path: &Path) -> Scan {
    let failed = |error: &io::Error| {
        let standing = match error.kind() {
            io::ErrorKind::NotFound => Standing::Missing,
            _ => Standing::Unreadable(format!("cannot be read ({error})")),
        };
        Scan { standing, files: Vec::new() }
    };
    match fs::metadata(path) {
        Err(error) => return failed(&error),
        // One file instead of a folder, as the kubelet has it too.
        Ok(metadata) if !metadata.is_dir() => {
            let files = read_file(path).map(|content| (path.to_owned(), content)).into_iter().collect();
            return Scan { standing: Standing::Read, files };
        }
        Ok(_) => {}
    }
    let mut files = Vec::new();
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) => return failed(&error),
    };
    for entry in entries {
        match entry {
            Ok(entry) if is_manifest_name(&entry.file_name()) => {
                let path = entry.path();
                files.extend(read_file(&path).map(|content| (path, content)));
            }
            Ok(_) => {}
            // Half a folder must not pass for the whole.
            Err(error) => return failed(&error),
        }
    }
    Scan { standing: Standing::Read, files }
}

/// Whether a file with a new name is not just being made: a link to one that was there before.
fn is_complete(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink() || metadata.nlink() > 1)
}

/// What is in a file; None where there is none, or a folder.
fn read_file(path: &Path) -> Option<Content> {
    let unreadable = |why: String| Some(Content::Unreadable(why));
    // Without waiting: a named pipe must not hold up the others.
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY;
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    let mut file = match fs::OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let dangling = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink());
            return dangling.then(|| Content::Unreadable("is a link that leads to nothing".to_owned()));
        }
        Err(error) => return unreadable(format!("cannot be opened ({error})")),
    };
    match file.metadata() {
        Ok(metadata) if metadata.is_dir() => return None,
        Ok(metadata) if !metadata.is_file() => {
            return unreadable("is not a regular file; move it out of the folder".to_owned());
        }
        Ok(_) => {}
        Err(error) => return unreadable(format!("cannot be read ({error})")),
    }
    let most = Limits::MANIFEST.bytes;
    let mut bytes = Vec::new();
    match file.by_ref().take(most as u64 + 1).read_to_end(&mut bytes) {
        Ok(read) if read > most => {
            unreadable(format!("has more than {most} bytes, the most that a manifest may have"))
        }
        Ok(_) => Some(Content::Bytes(bytes)),
        Err(error) => unreadable(format!("cannot be read ({error})")),
    }
}
