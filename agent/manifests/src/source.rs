//! The folder of static pods, watched: whenever a manifest comes, changes or goes, readers get the new
//! [`Desired`] set, within milliseconds, without polling.
//!
//! Events only say where to look; what is there is always read anew, and read whole again where events were
//! lost (an overflow), the folder was replaced, and every `check_frequency` in any case. A file is read when
//! its writing ends; one that is half written nevertheless is reported, and read again when it is closed. One
//! that is not there is looked for again before it counts as removed: many editors move a file away before
//! they put the new one in its place, and a pod must not end for that.
//!
//! This module must never decide what becomes of a pod, and never write into the folder.

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

/// How long after a file was missed it is looked for again. An editor needs some 100 us between moving the
/// old one away and making the new one; on a busy machine it may lose the CPU in between.
const SECOND_LOOK: Duration = Duration::from_millis(200);

/// What the manifests of a folder add up to depends on.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Whether pods are marked as the kubelet marks static pods, which makes them critical.
    pub critical_static_pods: bool,
    /// Kernel settings that pods may have besides the safe ones (`allowedUnsafeSysctls`).
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Where it is kept which file has which name.
    pub state: Option<Arc<State>>,
}

impl Rules {
    /// A folder of which nothing was read yet.
    fn folder(&self, path: &Path, node_name: &str) -> Folder {
        let mut folder = Folder::new(path.to_owned(), node_name.to_owned(), self.critical_static_pods);
        folder.allow_sysctls(self.allowed_unsafe_sysctls.clone());
        if let Some(state) = &self.state {
            folder.remember(owners::load(state));
        }
        folder
    }
}

/// How the folder is watched.
#[derive(Clone, Debug)]
pub struct Options {
    /// How often the folder is read whole even if nothing was told (`fileCheckFrequency`, 20 s by default).
    pub check_frequency: Duration,
    /// What counts in it.
    pub rules: Rules,
    /// Whether a manifest that is deleted and put back ends the pod that runs by it, as under the kubelet,
    /// also if there is nothing new in it. One that is renamed away or over never does.
    pub put_back_restarts: bool,
    /// Records what is rejected.
    pub events: Recorder,
    /// Ends the watching.
    pub cancel: CancellationToken,
}

/// The pods and objects of the manifests in the folder at `path`, read once, with `changes` made in thought:
/// files with another text, or without one. May block.
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

/// The manifests of a folder (or of one file), watched.
pub struct ManifestSource {
    path: PathBuf,
    folder: Folder,
    watcher: Option<Watcher>,
    watch_failed: Option<String>,
    /// Files, or the folder itself, that were there and are not now, and when they are looked for again.
    missing: BTreeMap<PathBuf, Instant>,
    put_back_restarts: bool,
    /// Which file has which name, for those who keep it.
    owners: watch::Sender<Owners>,
}

impl ManifestSource {
    /// Reads the folder at `path` and goes on watching it until `options.cancel`, or until nobody listens.
    /// What the receiver holds at first is what was read. Never fails: what is wrong with the folder is among
    /// the rejected, and mended without help when it is.
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
        let node = Object::node(&node_name);
        let (rules, place) = (options.rules.clone(), path.clone());
        let made = tokio::task::spawn_blocking(move || rules.folder(&place, &node_name)).await;
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

    /// Watches, then reads, the whole folder.
    async fn read_everything(&mut self) {
        self.arm();
        let (path, known) = (self.path.clone(), self.folder.digests());
        let look = move || {
            let scan = scan(&path);
            (scan.standing, read_all(scan.files, &known))
        };
        let (standing, files) = match tokio::task::spawn_blocking(look).await {
            Ok(read) => read,
            Err(error) => (FolderState::Unreadable(error.to_string()), Vec::new()),
        };
        let was_there = *self.folder.standing() == FolderState::Read;
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
            files.into_iter().for_each(|(path, reading)| self.take(path, reading));
        }
    }

    /// What is to be looked for again now.
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

    /// A file is not there.
    fn not_there(&mut self, file: &Path) {
        if !self.folder.miss(file) {
            self.missing.remove(file);
        } else if self.is_gone(file) {
            self.folder.forget(file);
        }
    }

    /// Returns true if a path that isn't there is gone: it wasn't there either when it was first missed.
    fn is_gone(&mut self, path: &Path) -> bool {
        let now = Instant::now();
        let gone = *self.missing.entry(path.to_owned()).or_insert(now + SECOND_LOOK) <= now;
        if gone {
            self.missing.remove(path);
        }
        gone
    }

    /// What the manifests add up to.
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

    /// Reads the files that events named.
    async fn read_files(&mut self, changes: Changes) {
        let folder = self.path.clone();
        if self.put_back_restarts {
            changes.deleted.iter().for_each(|name| self.folder.note_deleted(&folder.join(name)));
        }
        let known = self.folder.digests();
        let read = tokio::task::spawn_blocking(move || {
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
                files.into_iter().for_each(|(path, reading)| self.take(path, reading));
                absent.iter().for_each(|path| self.not_there(path));
            }
            Err(error) => tracing::error!("cannot read the changed manifests: {error}; the next check does"),
        }
    }

    fn take(&mut self, path: PathBuf, reading: Reading) {
        self.missing.remove(&path);
        let now = jiff::Timestamp::now().to_string();
        for warning in self.folder.take(path, reading, &now) {
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

/// Waits for that instant; for ever where there is none.
async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
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

/// Reports, once each, what is rejected and what no longer is: to the log, and as events of the node.
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

/// A look at the whole folder.
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
        // One file instead of a folder, as the kubelet has it too.
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
            // Half a folder must not pass for the whole.
            Err(error) => return failed(&error),
        }
    }
    Scan { standing: FolderState::Read, files }
}

/// Returns true if a file with a new name is not just being made: a link to one that was there before.
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
            unreadable(format!("has more than {most} bytes, the most that a manifest may have"))
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
        /// A folder with the pod `web` in `a.yaml`, watched; what was read is seen.
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

        /// Half the time after which a missing file is looked for again. The clock goes on only when all that
        /// the kernel told has been heard.
        async fn half_a_look(&self) {
            tokio::time::sleep(SECOND_LOOK / 2).await;
        }

        /// Long after all that was missed was looked for again.
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
        // Deleted and made again, as install(1) does it.
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
