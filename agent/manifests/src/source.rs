//! Watches the folder of static pods and publishes the new [`Desired`] set within milliseconds when a
//! manifest is added, changed or removed, without polling.
//!
//! Events are only hints: the files are always read again, and the whole folder after lost events (an
//! overflow), after a replacement of the folder, and every `check_frequency`. A file is read when its writer
//! closes it; a half-written file that is read earlier is rejected and read again at its close. A missing
//! file is checked a second time before it counts as removed: many editors move a file away before they
//! create the new one, and its pod must not end for that.
//!
//! Must never decide on a pod's fate, and never write into the folder.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::folder::{Content, Folder, FolderState};
use super::owners::{self, Owners};
use super::reading::{Reading, read_all};
use super::watch::{Changes, Watcher, is_manifest_name};
use beelet_codec::document::Limits;
use beelet_model::desired::Desired;
use beelet_state::{
    State,
    events::{Object, Recorder},
};

pub use super::file::Described;

/// Delay of the second check of a missing file. An editor needs some 100 us between moving the old file away
/// and creating the new one; on a busy machine it may lose the CPU in between.
const SECOND_LOOK: Duration = Duration::from_millis(200);

/// Settings for the pods of a folder.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// True to add the kubelet's mark of static pods, which makes pods critical.
    pub critical_static_pods: bool,
    /// Kernel settings that pods may have in addition to the safe ones (`allowedUnsafeSysctls`).
    pub allowed_unsafe_sysctls: Vec<String>,
    /// State folder with the record of the owners of names.
    pub state: Option<Arc<State>>,
}

impl Rules {
    /// Creates an unread folder.
    fn folder(&self, path: &Path, node_name: &str) -> Folder {
        let mut folder = Folder::new(path.to_owned(), node_name.to_owned(), self.critical_static_pods);
        folder.allow_sysctls(self.allowed_unsafe_sysctls.clone());
        if let Some(state) = &self.state {
            folder.remember(owners::load(state));
        }
        folder
    }
}

/// Options of watching a folder.
#[derive(Clone, Debug)]
pub struct Options {
    /// Interval of reading the whole folder without events (`fileCheckFrequency`, 20 s by default).
    pub check_frequency: Duration,
    /// Settings for the pods.
    pub rules: Rules,
    /// True if deleting and restoring a manifest ends its running pod even with unchanged content, as in the
    /// kubelet. Renaming never does.
    pub put_back_restarts: bool,
    /// Records rejected manifests.
    pub events: Recorder,
    /// Stops the watch.
    pub cancel: CancellationToken,
}

/// Reads the folder at `path` once and returns its pods and objects as if `changes` had been made: files with
/// another text, or removed ones. May block.
#[must_use]
pub fn preview(
    path: &Path,
    node_name: &str,
    rules: &Rules,
    changes: &BTreeMap<PathBuf, Option<String>>,
) -> (Desired, Vec<Described>) {
    let mut folder = rules.folder(path, node_name);
    let scan = scan(path);
    folder.set_standing(scan.standing);
    let (now, time) = (jiff::Timestamp::now().to_string(), SystemTime::now());
    let unchanged = scan.files.into_iter().filter(|(file, _)| !changes.contains_key(file));
    let changed = changes
        .iter()
        .filter_map(|(file, text)| Some((file.clone(), Content::Bytes(text.clone()?.into_bytes(), time))));
    for (file, content) in unchanged.chain(changed) {
        folder.update(file, content, &now);
    }
    let desired = folder.desired();
    (desired, folder.described())
}

/// Watches the manifests of a folder, or a single file.
pub struct ManifestSource {
    path: PathBuf,
    folder: Folder,
    watcher: Option<Watcher>,
    watch_failed: Option<String>,
    /// Missing files, possibly the folder itself, with the time of the second check.
    missing: BTreeMap<PathBuf, Instant>,
    put_back_restarts: bool,
    /// Publishes the owners of names to the task that records them.
    owners: watch::Sender<Owners>,
}

impl ManifestSource {
    /// Reads the folder at `path` and watches it until `options.cancel`, or until all receivers are dropped.
    /// The receiver's first value is the read folder. Never fails: a fault of the folder is among the
    /// rejections, and disappears with its cause.
    pub async fn start(path: PathBuf, node_name: String, options: Options) -> watch::Receiver<Arc<Desired>> {
        let (desired, watching) = Self::open(path, node_name, options).await;
        tokio::spawn(watching);
        desired
    }

    /// Like [`Self::start`], but returns the watch as a future for the caller to run.
    pub async fn open(
        path: PathBuf,
        node_name: String,
        options: Options,
    ) -> (watch::Receiver<Arc<Desired>>, impl Future<Output = ()> + Send + use<>) {
        let node = Object::node(&node_name);
        let (rules, place) = (options.rules.clone(), path.clone());
        let made = beelet_base::blocking::spawn_blocking(move || rules.folder(&place, &node_name)).await;
        let folder = made.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        let (owners, kept) = watch::channel(folder.owners().clone());
        if let Some(state) = options.rules.state.clone() {
            tokio::spawn(owners::keep(kept, state));
        }
        let (watch_failed, missing) = (None, BTreeMap::new());
        let put_back_restarts = options.put_back_restarts;
        let mut source =
            ManifestSource { path, folder, watcher: None, watch_failed, missing, put_back_restarts, owners };
        source.read_everything().await;
        let desired = source.desired();
        report_changes(&options.events, &node, &Desired::default(), &desired);
        if let Some(notice) = source.folder.standing().absence(&source.path) {
            tracing::info!("{notice}");
        }
        let (sender, receiver) = watch::channel(Arc::new(desired));
        (receiver, source.run(sender, options, node))
    }

    async fn run(mut self, sender: watch::Sender<Arc<Desired>>, options: Options, node: Object) {
        let period = options.check_frequency.max(Duration::from_millis(10));
        let mut check = tokio::time::interval(period);
        check.reset();
        check.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let second_look = self.missing.values().min().copied();
            let changes = tokio::select! {
                () = options.cancel.cancelled() => return,
                () = sender.closed() => return,
                changes = next_changes(&mut self.watcher) => changes,
                _ = check.tick() => Changes { everything: true, ..Changes::default() },
                () = until(second_look) => self.missed(),
            };
            if changes.everything {
                self.read_everything().await;
            } else {
                self.read_files(changes).await;
            }
            let desired = self.desired();
            sender.send_if_modified(|current| {
                let modified = **current != desired;
                if modified {
                    report_changes(&options.events, &node, current, &desired);
                    *current = Arc::new(desired);
                }
                modified
            });
        }
    }

    /// Sets up the watches and then reads the whole folder.
    async fn read_everything(&mut self) {
        self.arm();
        let (path, known) = (self.path.clone(), self.folder.digests());
        let look = move || {
            let scan = scan(&path);
            (scan.standing, read_all(scan.files, &known))
        };
        let (standing, files) = match beelet_base::blocking::spawn_blocking(look).await {
            Ok(read) => read,
            Err(error) => (FolderState::Unreadable(error.to_string()), Vec::new()),
        };
        let was_there = *self.folder.standing().state() == FolderState::Read;
        if standing == FolderState::Missing && was_there && !self.is_gone(&self.path.clone()) {
            return;
        }
        self.missing.remove(&self.path);
        let read = standing == FolderState::Read;
        self.folder.set_standing(standing);
        if read {
            let there: BTreeSet<&Path> = files.iter().map(|(path, _)| path.as_path()).collect();
            let absent = self.folder.files().filter(|file| !there.contains(file)).map(Path::to_owned);
            absent.collect::<Vec<_>>().iter().for_each(|file| self.not_there(file));
            files.into_iter().for_each(|(path, reading)| self.record(path, reading));
        }
    }

    /// Returns the missing files whose second check is due.
    fn missed(&self) -> Changes {
        let now = Instant::now();
        let mut changes = Changes::default();
        for (path, _) in self.missing.iter().filter(|(_, due)| **due <= now) {
            match path.file_name() {
                Some(name) if *path != self.path => drop(changes.files.insert(name.to_owned())),
                _ => changes.everything = true,
            }
        }
        changes
    }

    /// Records that a file is missing.
    fn not_there(&mut self, file: &Path) {
        if !self.folder.miss(file) {
            self.missing.remove(file);
        } else if self.is_gone(file) {
            self.folder.forget(file);
        }
    }

    /// Returns true if a missing path counts as removed: this is its second check.
    fn is_gone(&mut self, path: &Path) -> bool {
        let now = Instant::now();
        let gone = *self.missing.entry(path.to_owned()).or_insert(now + SECOND_LOOK) <= now;
        if gone {
            self.missing.remove(path);
        }
        gone
    }

    /// Returns the desired pods and publishes the owners of names.
    fn desired(&mut self) -> Desired {
        let desired = self.folder.desired();
        let owners = self.folder.owners();
        self.owners.send_if_modified(|known| {
            let modified = known != owners;
            if modified {
                known.clone_from(owners);
            }
            modified
        });
        desired
    }

    /// Reads the files of events.
    async fn read_files(&mut self, changes: Changes) {
        let folder = self.path.clone();
        if self.put_back_restarts {
            changes.deleted.iter().for_each(|name| self.folder.record_deletion(&folder.join(name)));
        }
        let known = self.folder.digests();
        let read = beelet_base::blocking::spawn_blocking(move || {
            let complete = changes.created.into_iter().filter(|name| is_complete(&folder.join(name)));
            let names: BTreeSet<OsString> = complete.chain(changes.files).collect();
            let (mut files, mut absent) = (Vec::new(), Vec::new());
            for path in names.into_iter().map(|name| folder.join(name)) {
                match read_file(&path) {
                    Some(content) => files.push((path, content)),
                    None => absent.push(path),
                }
            }
            (read_all(files, &known), absent)
        });
        match read.await {
            Ok((files, absent)) => {
                files.into_iter().for_each(|(path, reading)| self.record(path, reading));
                absent.iter().for_each(|path| self.not_there(path));
            }
            Err(error) => {
                tracing::error!("cannot read the changed manifests; retrying at the next check: {error}");
            }
        }
    }

    fn record(&mut self, path: PathBuf, reading: Reading) {
        self.missing.remove(&path);
        let now = jiff::Timestamp::now().to_string();
        for warning in self.folder.record(path, reading, &now) {
            tracing::warn!("{warning}");
        }
    }

    /// Sets up the watches, possibly again. Without watches only the periodic check finds changes.
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
                "cannot watch {} ({why}); reading its manifests only every `fileCheckFrequency` (is \
                 fs.inotify.max_user_instances or max_user_watches reached?)",
                self.path.display()
            );
        }
        self.watch_failed = failed;
    }
}

/// Waits for an instant, or forever without one.
async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

/// Returns the next changes; never returns without watches. Drops failed watches, which are set up again at
/// once.
async fn next_changes(watcher: &mut Option<Watcher>) -> Changes {
    let Some(watching) = watcher else { return std::future::pending().await };
    match watching.next().await {
        Ok(changes) => changes,
        Err(error) => {
            tracing::warn!("cannot read inotify events; setting up the watches again: {error}");
            *watcher = None;
            Changes { everything: true, ..Changes::default() }
        }
    }
}

/// Reports each new and each ended rejection once, to the log and as an event of the node.
fn report_changes(events: &Recorder, node: &Object, before: &Desired, after: &Desired) {
    for rejected in after.rejected.iter().filter(|rejected| !before.rejected.contains(rejected)) {
        for reason in rejected.reasons() {
            tracing::warn!("manifest rejected: {reason}");
            events.warning(node.clone(), "ManifestRejected", reason);
        }
    }
    let still = |file: &Path| after.rejected.iter().any(|rejected| rejected.file == file);
    for mended in before.rejected.iter().filter(|rejected| !still(&rejected.file)) {
        tracing::info!(file = %mended.file.display(), "manifest no longer rejected");
        events.normal(
            node.clone(),
            "ManifestAccepted",
            format!("{} is no longer rejected", mended.file.display()),
        );
    }
}

/// Result of reading the whole folder.
struct Scan {
    standing: FolderState,
    files: Vec<(PathBuf, Content)>,
}

fn scan(path: &Path) -> Scan {
    let failed = |error: &io::Error| {
        let standing = match error.kind() {
            io::ErrorKind::NotFound => FolderState::Missing,
            _ => FolderState::Unreadable(format!("cannot be read ({error})")),
        };
        Scan { standing, files: Vec::new() }
    };
    match fs::metadata(path) {
        Err(error) => return failed(&error),
        // A single file instead of a folder, as in the kubelet.
        Ok(metadata) if !metadata.is_dir() => {
            let files = read_file(path).map(|content| (path.to_owned(), content)).into_iter().collect();
            return Scan { standing: FolderState::Read, files };
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
            // A partly read folder must not count as the whole.
            Err(error) => return failed(&error),
        }
    }
    Scan { standing: FolderState::Read, files }
}

/// Returns true if a created file is already complete, i.e. a link to an existing file.
fn is_complete(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink() || metadata.nlink() > 1)
}

/// Reads a file; None if it is missing or a folder.
fn read_file(path: &Path) -> Option<Content> {
    let unreadable = |why: String| Some(Content::Unreadable(why));
    // Non-blocking: a named pipe must not delay other files.
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY;
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    let mut file = match fs::OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let dangling = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink());
            return dangling.then(|| Content::Unreadable("is a dangling symlink".to_owned()));
        }
        Err(error) => return unreadable(format!("cannot be opened ({error})")),
    };
    let modified = match file.metadata() {
        Ok(metadata) if metadata.is_dir() => return None,
        Ok(metadata) if !metadata.is_file() => {
            return unreadable("is not a regular file; move it out of the folder".to_owned());
        }
        Ok(metadata) => metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
        Err(error) => return unreadable(format!("cannot be read ({error})")),
    };
    let most = Limits::MANIFEST.bytes;
    let mut bytes = Vec::new();
    match file.by_ref().take(most as u64 + 1).read_to_end(&mut bytes) {
        Ok(read) if read > most => {
            unreadable(format!("has more than {most} bytes, the maximum size of a manifest"))
        }
        Ok(_) => Some(Content::Bytes(bytes, modified)),
        Err(error) => unreadable(format!("cannot be read ({error})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Watched {
        folder: tempfile::TempDir,
        desired: watch::Receiver<Arc<Desired>>,
        cancel: CancellationToken,
    }

    impl Drop for Watched {
        fn drop(&mut self) {
            self.cancel.cancel();
        }
    }

    impl Watched {
        /// Returns a watched folder with the pod `web` in `a.yaml`, marked as seen.
        async fn with_a_pod() -> Self {
            Self::with(false).await
        }

        async fn with(put_back_restarts: bool) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let manifests = folder.path().join("manifests");
            fs::create_dir(&manifests).unwrap();
            fs::write(manifests.join("a.yaml"), pod("")).unwrap();
            let cancel = CancellationToken::new();
            let options = Options {
                check_frequency: Duration::from_secs(3600),
                rules: Rules::default(),
                put_back_restarts,
                events: Recorder::default(),
                cancel: cancel.clone(),
            };
            let desired = ManifestSource::start(manifests, "n1".to_owned(), options).await;
            assert_eq!(desired.borrow().pods.len(), 1);
            Watched { folder, desired, cancel }
        }

        fn file(&self, name: &str) -> PathBuf {
            self.folder.path().join("manifests").join(name)
        }

        /// Advances the clock by half the delay of a second check, after handling all pending events of the
        /// kernel.
        async fn half_a_look(&self) {
            tokio::time::sleep(SECOND_LOOK / 2).await;
        }

        /// Advances the clock until long after all second checks.
        async fn settle(&self) {
            tokio::time::sleep(SECOND_LOOK * 10).await;
        }

        fn has_changed(&self) -> bool {
            self.desired.has_changed().unwrap()
        }
    }

    fn pod(more: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  containers: [{{name: c, image: 'x:1'}}]\n{more}"
        )
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_an_editor_moves_away_and_makes_anew_was_never_gone() {
        let watched = Watched::with_a_pod().await;
        fs::rename(watched.file("a.yaml"), watched.file("a.yaml~")).unwrap();
        watched.half_a_look().await;
        assert!(!watched.has_changed());
        fs::write(watched.file("a.yaml"), pod("# only a comment\n")).unwrap();
        watched.settle().await;
        assert!(!watched.has_changed(), "{:?}", watched.desired.borrow());
        // Deleted and created again, as install(1) does.
        fs::remove_file(watched.file("a.yaml")).unwrap();
        watched.half_a_look().await;
        fs::write(watched.file("a.yaml"), pod("")).unwrap();
        watched.settle().await;
        assert!(!watched.has_changed());
    }

    #[tokio::test(start_paused = true)]
    async fn in_the_kubelets_place_a_file_that_is_deleted_and_put_back_is_counted() {
        let mut watched = Watched::with(true).await;
        let uid = |desired: &Desired| desired.pods.values().next().unwrap().metadata.uid.clone().unwrap();
        let known = uid(&watched.desired.borrow());
        fs::remove_file(watched.file("a.yaml")).unwrap();
        fs::write(watched.file("a.yaml"), pod("")).unwrap();
        watched.settle().await;
        {
            let desired = watched.desired.borrow_and_update();
            assert_eq!(uid(&desired), known);
            assert_eq!(desired.put_back.get(&known), Some(&1));
        }
        // Editors and package managers rename.
        fs::rename(watched.file("a.yaml"), watched.file("a.yaml~")).unwrap();
        fs::write(watched.file("a.yaml.tmp"), pod("")).unwrap();
        fs::rename(watched.file("a.yaml.tmp"), watched.file("a.yaml")).unwrap();
        watched.settle().await;
        assert!(!watched.has_changed(), "{:?}", watched.desired.borrow());
    }

    #[tokio::test(start_paused = true)]
    async fn each_absence_is_given_its_own_time() {
        let watched = Watched::with_a_pod().await;
        for _ in 0..5 {
            fs::rename(watched.file("a.yaml"), watched.file("a.yaml~")).unwrap();
            watched.half_a_look().await;
            fs::rename(watched.file("a.yaml~"), watched.file("a.yaml")).unwrap();
            watched.half_a_look().await;
        }
        assert!(!watched.has_changed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_manifest_that_is_removed_is_gone_after_the_second_look() {
        let mut watched = Watched::with_a_pod().await;
        let began = Instant::now();
        fs::remove_file(watched.file("a.yaml")).unwrap();
        watched.desired.changed().await.unwrap();
        assert!(watched.desired.borrow().pods.is_empty());
        assert!(began.elapsed() >= SECOND_LOOK && began.elapsed() < SECOND_LOOK * 2, "{:?}", began.elapsed());
        assert!(watched.desired.borrow().may_remove(Some(&watched.file("a.yaml"))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_manifest_under_another_name_is_another_pod_and_no_clash() {
        let mut watched = Watched::with_a_pod().await;
        fs::rename(watched.file("a.yaml"), watched.file("z.yaml")).unwrap();
        watched.desired.changed().await.unwrap();
        let desired = watched.desired.borrow_and_update().clone();
        assert!(desired.rejected.is_empty(), "{:?}", desired.rejected);
        assert_eq!(desired.file("Pod", "default", "web-n1"), Some(watched.file("z.yaml")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_folder_that_is_put_back_at_once_was_never_gone() {
        let mut watched = Watched::with_a_pod().await;
        let (folder, away) = (watched.folder.path().join("manifests"), watched.folder.path().join("away"));
        fs::rename(&folder, &away).unwrap();
        watched.half_a_look().await;
        fs::rename(&away, &folder).unwrap();
        watched.settle().await;
        assert!(!watched.has_changed());
        fs::rename(&folder, &away).unwrap();
        watched.desired.changed().await.unwrap();
        assert!(watched.desired.borrow().pods.is_empty());
    }
}
