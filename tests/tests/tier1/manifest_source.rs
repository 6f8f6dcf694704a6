//! The source of static pods watches its folder: real files, real inotify.
//!
//! The periodic check runs every hour, so every change that a test sees came by an event.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use beelet_manifests::source::{ManifestSource, Options};
use beelet_model::desired::Desired;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Time limit of waits, generous for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Interval of a check that never runs within a test.
const NEVER: Duration = Duration::from_secs(3600);

struct Watched {
    dir: PathBuf,
    desired: watch::Receiver<Arc<Desired>>,
    cancel: CancellationToken,
    // Removed at the end.
    _root: tempfile::TempDir,
}

impl Watched {
    /// Creates a watched folder with some files.
    async fn with(files: &[(&str, &str)]) -> Self {
        let (root, dir) = Self::folder();
        fs::create_dir(&dir).unwrap();
        for (name, text) in files {
            fs::write(dir.join(name), text).unwrap();
        }
        Self::start(root, dir, NEVER).await
    }

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("manifests");
        (root, dir)
    }

    async fn start(root: tempfile::TempDir, dir: PathBuf, check_frequency: Duration) -> Self {
        let cancel = CancellationToken::new();
        let options = Options {
            check_frequency,
            rules: beelet_manifests::source::Rules::default(),
            events: beelet_state::events::Recorder::default(),
            put_back_restarts: false,
            cancel: cancel.clone(),
        };
        let desired = ManifestSource::start(dir.clone(), "n1".to_owned(), options).await;
        Watched { dir, desired, cancel, _root: root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Renames a complete file to its final path, as careful tools do.
    fn rename_into(&self, name: &str, text: &str) {
        let temporary = self.path(&format!(".{name}.new"));
        fs::write(&temporary, text).unwrap();
        fs::rename(temporary, self.path(name)).unwrap();
    }

    fn now(&self) -> Arc<Desired> {
        self.desired.borrow().clone()
    }

    /// Waits until `wanted` is true for the desired pods.
    async fn until(&self, what: &str, wanted: impl Fn(&Desired) -> bool) -> Arc<Desired> {
        let mut receiver = self.desired.clone();
        let seen = tokio::time::timeout(PATIENCE, receiver.wait_for(|desired| wanted(desired))).await;
        match seen {
            Ok(Ok(desired)) => Arc::clone(&desired),
            _ => panic!("waited for {what}; last state: {:#?}", summary(&self.now())),
        }
    }

    async fn until_pods(&self, names: &[&str]) -> Arc<Desired> {
        self.until(&format!("the pods {names:?}"), |desired| pods(desired) == names).await
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

fn pod(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  containers:\n  - name: main\n    image: busybox:1.36\n"
    )
}

/// Returns the names of all pods, without the node's.
fn pods(desired: &Desired) -> Vec<String> {
    desired.pods.keys().map(|name| name.name.trim_end_matches("-n1").to_owned()).collect()
}

fn rejected(desired: &Desired) -> Vec<String> {
    desired.rejected.iter().map(|rejected| rejected.message.clone()).collect()
}

fn is_rejected(part: &'static str) -> impl Fn(&Desired) -> bool {
    move |desired| rejected(desired).iter().any(|message| message.contains(part))
}

fn summary(desired: &Desired) -> (Vec<String>, Vec<String>, bool) {
    (pods(desired), rejected(desired), desired.folder_unread)
}

fn uid(desired: &Desired, name: &str) -> String {
    let pod = desired.pods.iter().find(|(key, _)| key.name == format!("{name}-n1")).unwrap().1;
    pod.metadata.uid.clone().unwrap()
}

#[tokio::test]
async fn manifests_that_exist_at_the_start_are_published_at_once() {
    let watched =
        Watched::with(&[("a.yaml", &pod("a")), ("b.json", "{\"apiVersion\": \"v1\""), ("c", &pod("c"))])
            .await;
    let desired = watched.now();
    assert_eq!(pods(&desired), ["a", "c"]);
    assert_eq!(rejected(&desired).len(), 1);
    assert!(!desired.folder_unread);
    assert!(!desired.may_remove(Some(&watched.path("b.json"))));
    assert!(desired.may_remove(Some(&watched.path("a.yaml"))));
}

#[tokio::test]
async fn a_manifest_is_added_changed_and_removed() {
    let watched = Watched::with(&[]).await;
    watched.write("a.yaml", &pod("a"));
    let first = uid(&*watched.until_pods(&["a"]).await, "a");
    watched.write("a.yaml", &pod("a").replace("1.36", "1.37"));
    let desired =
        watched.until("another pod", |desired| pods(desired) == ["a"] && uid(desired, "a") != first).await;
    assert!(rejected(&desired).is_empty());
    watched.rename_into("b.yaml", &pod("b"));
    watched.until_pods(&["a", "b"]).await;
    fs::rename(watched.path("a.yaml"), watched.path("z.yaml")).unwrap();
    let before = uid(&desired, "a");
    watched
        .until("the pod from another file", |desired| {
            pods(desired) == ["a", "b"] && uid(desired, "a") != before
        })
        .await;
    fs::rename(watched.path("z.yaml"), watched.path("../away.yaml")).unwrap();
    watched.until_pods(&["b"]).await;
    fs::remove_file(watched.path("b.yaml")).unwrap();
    watched.until_pods(&[]).await;
}

#[tokio::test]
async fn a_broken_manifest_is_reported_and_touches_nothing_else() {
    let watched = Watched::with(&[("a.yaml", &pod("a")), ("b.yaml", &pod("b"))]).await;
    let before = watched.now();
    watched.write("b.yaml", &pod("b").replace("image:", "image: ["));
    let desired = watched.until("the rejection", is_rejected("b.yaml:8:12: ")).await;
    assert_eq!(desired.pods, before.pods);
    watched.write("b.yaml", &format!("{}    resources: {{requests: {{cpu: lots}}}}\n", pod("b")));
    let desired = watched
        .until(
            "the rejection",
            is_rejected("b.yaml:9:33: spec.containers[0].resources.requests.cpu: \"lots\" is not a quantity"),
        )
        .await;
    assert_eq!(desired.pods, before.pods);
    watched.write("b.yaml", &pod("b"));
    let desired = watched.until("the rejection to end", |desired| desired.rejected.is_empty()).await;
    assert_eq!(desired.pods, before.pods);
}

#[tokio::test]
async fn a_half_written_file_is_read_when_it_is_closed() {
    use std::io::Write;
    let watched = Watched::with(&[]).await;
    let text = pod("a");
    let (first, second) = text.split_at(40);
    let mut file = fs::File::create(watched.path("a.yaml")).unwrap();
    file.write_all(first.as_bytes()).unwrap();
    // Another manifest shows that events were read in the meantime.
    watched.write("b.yaml", &pod("b"));
    let desired = watched.until_pods(&["b"]).await;
    assert!(rejected(&desired).is_empty(), "{:?}", rejected(&desired));
    file.write_all(second.as_bytes()).unwrap();
    drop(file);
    watched.until_pods(&["a", "b"]).await;
}

#[tokio::test]
async fn a_file_that_was_half_written_at_the_start_is_read_again() {
    use std::io::Write;
    let (root, dir) = Watched::folder();
    fs::create_dir(&dir).unwrap();
    let text = pod("a");
    let (first, second) = text.split_at(40);
    let mut file = fs::File::create(dir.join("a.yaml")).unwrap();
    file.write_all(first.as_bytes()).unwrap();
    let watched = Watched::start(root, dir, NEVER).await;
    assert_eq!(rejected(&watched.now()).len(), 1);
    file.write_all(second.as_bytes()).unwrap();
    drop(file);
    let desired = watched.until_pods(&["a"]).await;
    assert!(rejected(&desired).is_empty());
}

#[tokio::test]
async fn hidden_files_editors_leftovers_and_folders_are_ignored() {
    let watched = Watched::with(&[(".hidden.yaml", &pod("hidden")), ("a.yaml~", &pod("old"))]).await;
    fs::create_dir(watched.path("folder.yaml")).unwrap();
    fs::create_dir(watched.path("..data")).unwrap();
    watched.write("folder.yaml/x.yaml", &pod("inside"));
    for name in [".a.yaml.swp", "#a.yaml#", "4913", "a.yaml.bak", "a.yaml.tmp"] {
        watched.write(name, "not yaml: [");
    }
    watched.write("z.yaml", &pod("z"));
    let desired = watched.until_pods(&["z"]).await;
    assert!(rejected(&desired).is_empty(), "{:?}", rejected(&desired));
}

#[tokio::test]
async fn links_are_followed() {
    let watched = Watched::with(&[]).await;
    let target = watched.path("../target.yaml");
    fs::write(&target, pod("a")).unwrap();
    symlink(&target, watched.path("a.yaml")).unwrap();
    watched.until_pods(&["a"]).await;
    fs::write(watched.path("../hard.yaml"), pod("b")).unwrap();
    fs::hard_link(watched.path("../hard.yaml"), watched.path("b.yaml")).unwrap();
    watched.until_pods(&["a", "b"]).await;
    symlink(watched.path("../nowhere"), watched.path("c.yaml")).unwrap();
    watched.until("the rejection", is_rejected("c.yaml: is a dangling symlink")).await;
}

#[tokio::test]
async fn irregular_and_too_large_files_are_rejected() {
    let watched = Watched::with(&[]).await;
    rustix::fs::mknodat(
        rustix::fs::CWD,
        watched.path("pipe.yaml"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    watched.write("large.yaml", &format!("{}#{}", pod("large"), "x".repeat(1 << 20)));
    watched.until("the rejection", is_rejected("large.yaml: has more than 1048576 bytes")).await;
    // The creation of a pipe sends no event; any event of the pipe makes the source inspect it, without
    // waiting for a writer.
    fs::rename(watched.path("pipe.yaml"), watched.path("pipe2.yaml")).unwrap();
    watched.until("the rejection", is_rejected("pipe2.yaml: is not a regular file")).await;
}

#[tokio::test]
async fn a_manifest_of_ten_thousand_lines_is_a_pod() {
    let lines: String = (0..5_000).map(|i| format!("    - name: V{i}\n      value: 'x'\n")).collect();
    let watched = Watched::with(&[]).await;
    watched.write("a.yaml", &format!("{}    env:\n{lines}", pod("a")));
    watched.until_pods(&["a"]).await;
}

#[tokio::test]
async fn a_copy_is_rejected_and_takes_over_when_the_original_is_removed() {
    let watched = Watched::with(&[("b.yaml", &pod("web"))]).await;
    let before = watched.now();
    watched.write("a.yaml", &pod("web"));
    let desired =
        watched.until("the clash", is_rejected("a.yaml: metadata.name: the Pod default/web-n1 is in")).await;
    assert!(rejected(&desired)[0].contains("/b.yaml already"), "{:?}", rejected(&desired));
    assert_eq!(desired.pods, before.pods);
    fs::remove_file(watched.path("b.yaml")).unwrap();
    let copy = Some(watched.path("a.yaml"));
    let desired = watched
        .until("the copy to take over", |desired| desired.file("Pod", "default", "web-n1") == copy)
        .await;
    assert!(rejected(&desired).is_empty(), "{:?}", rejected(&desired));
}

#[tokio::test]
async fn a_missing_folder_rejects_no_manifest_and_is_watched_for() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("a/b/manifests");
    let watched = Watched::start(root, dir.clone(), NEVER).await;
    let desired = watched.now();
    assert!(desired.folder_unread && !desired.may_remove(None));
    assert!(rejected(&desired).is_empty(), "{:?}", rejected(&desired));
    // All levels are created at once: the watch is still on the first one's parent when the last one exists.
    for level in [dir.parent().and_then(Path::parent), dir.parent(), Some(&*dir)].into_iter().flatten() {
        fs::create_dir(level).unwrap();
    }
    watched.until("the folder", |desired| !desired.folder_unread && desired.rejected.is_empty()).await;
    watched.write("a.yaml", &pod("a"));
    watched.until_pods(&["a"]).await;
}

#[tokio::test]
async fn a_folder_that_is_moved_away_removes_its_pods_and_returns_with_them() {
    let watched = Watched::with(&[("a.yaml", &pod("a"))]).await;
    let away = watched.dir.with_file_name("away");
    fs::rename(&watched.dir, &away).unwrap();
    let desired = watched.until_pods(&[]).await;
    assert!(!desired.folder_unread && is_rejected("was removed")(&desired));
    fs::rename(&away, &watched.dir).unwrap();
    watched.until_pods(&["a"]).await;
    watched.write("b.yaml", &pod("b"));
    watched.until_pods(&["a", "b"]).await;
}

#[tokio::test]
async fn a_folder_that_is_deleted_and_created_again_is_watched_again() {
    let watched = Watched::with(&[("a.yaml", &pod("a"))]).await;
    for round in ["b", "c", "d"] {
        fs::remove_dir_all(&watched.dir).unwrap();
        fs::create_dir(&watched.dir).unwrap();
        watched.write("x.yaml", &pod(round));
        watched.until_pods(&[round]).await;
    }
}

#[tokio::test]
async fn a_folder_behind_a_link_is_watched_and_so_is_the_link() {
    let (root, dir) = Watched::folder();
    for name in ["one", "two"] {
        let folder = root.path().join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("x.yaml"), pod(name)).unwrap();
    }
    symlink("one", &dir).unwrap();
    let watched = Watched::start(root, dir.clone(), NEVER).await;
    watched.until_pods(&["one"]).await;
    let other = dir.with_extension("new");
    symlink("two", &other).unwrap();
    fs::rename(&other, &dir).unwrap();
    watched.until_pods(&["two"]).await;
    watched.write("y.yaml", &pod("more"));
    watched.until_pods(&["more", "two"]).await;
}

#[tokio::test]
async fn one_file_may_stand_for_the_folder() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("pod.yaml");
    fs::write(&file, pod("a")).unwrap();
    fs::write(root.path().join("other.yaml"), pod("other")).unwrap();
    let watched = Watched::start(root, file.clone(), NEVER).await;
    watched.until_pods(&["a"]).await;
    fs::write(&file, pod("b")).unwrap();
    watched.until_pods(&["b"]).await;
}

/// Returns the length of the kernel's queue of events, per watcher.
fn queue_length() -> Option<usize> {
    fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").ok()?.trim().parse().ok()
}

#[tokio::test]
async fn nothing_is_missed_when_the_kernels_queue_overflows() {
    let limit = queue_length().unwrap_or(16_384);
    assert!(limit <= 1 << 20, "fs.inotify.max_queued_events is {limit}: too many to fill");
    let watched = Watched::with(&[("gone.yaml", &pod("gone"))]).await;
    // Only this test's thread reads events, and it doesn't await here, so the queue fills. Equal events in a
    // row are merged into one, so they alternate.
    let names = [watched.path("x.yaml"), watched.path("y.yaml")];
    fs::write(&names[0], pod("x")).unwrap();
    for i in 0..limit {
        fs::rename(&names[i % 2], &names[(i + 1) % 2]).unwrap();
    }
    // These changes happen when the queue is full: no event reports them.
    watched.write("late.yaml", &pod("late"));
    fs::remove_file(watched.path("gone.yaml")).unwrap();
    watched.until_pods(&["late", "x"]).await;
}

#[tokio::test]
async fn the_periodic_check_finds_changes_without_events() {
    let (root, dir) = Watched::folder();
    fs::create_dir(&dir).unwrap();
    let target = root.path().join("target.yaml");
    fs::write(&target, pod("a")).unwrap();
    symlink(&target, dir.join("a.yaml")).unwrap();
    let watched = Watched::start(root, dir, Duration::from_millis(50)).await;
    watched.until_pods(&["a"]).await;
    // A link's target lies outside the folder, so its change sends no event.
    fs::write(&target, pod("b")).unwrap();
    watched.until_pods(&["b"]).await;
}

#[tokio::test]
async fn an_unchanged_folder_causes_no_update() {
    let (root, dir) = Watched::folder();
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("a.yaml"), pod("a")).unwrap();
    let mut watched = Watched::start(root, dir, Duration::from_millis(10)).await;
    watched.desired.mark_unchanged();
    watched.write("a.yaml", &format!("# a comment\n{}", pod("a")));
    watched.write("marker.yaml", &pod("marker"));
    tokio::time::timeout(PATIENCE, watched.desired.changed()).await.unwrap().unwrap();
    assert_eq!(pods(&watched.now()), ["a", "marker"], "the first change is the marker's");
}

#[tokio::test]
async fn watching_ends_when_it_is_cancelled() {
    let mut watched = Watched::with(&[]).await;
    watched.cancel.cancel();
    let closed = tokio::time::timeout(PATIENCE, watched.desired.changed()).await.unwrap();
    assert!(closed.is_err(), "the sender must be dropped");
}
