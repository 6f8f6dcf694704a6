//! What the manifests of a folder add up to. Pure: contents come in, the desired pods come out;
//! [`super::source`] does the reading.

use beelet_model::desired::Desired;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;

use super::identity::{self, Origin};
use super::owners::{Claims, Owners};
use super::priority::{Classes, Priority, Written};
use super::reading::{Digest, Reading};
use super::source::Described;
use super::{Manifest, Object};
use beelet_codec::error::ManifestError;
use beelet_model::objects::{self, Objects};
use beelet_model::pod::log_folder;
use beelet_model::table::{PodName, RejectedManifest};
use beelet_spec::sysctls;

/// Bytes of the longest name that a file may have, on any file system in use (NAME_MAX).
const FILE_NAME_MAX: usize = 255;

/// What came of reading a file.
#[derive(Clone, Debug)]
pub enum Content {
    /// Its bytes, all of them, and when they were last changed.
    Bytes(Vec<u8>, SystemTime),
    /// It's there, but can't be read or isn't to be read: a sentence that says why.
    Unreadable(String),
}

/// What came of reading the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FolderState {
    /// It was read.
    Read,
    /// It isn't there.
    Missing,
    /// It's there but can't be read: a sentence that says why.
    Unreadable(String),
}

/// The manifests of a folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    node_name: String,
    critical: bool,
    allowed_unsafe_sysctls: Vec<String>,
    files: BTreeMap<PathBuf, File>,
    owners: Owners,
    standing: FolderState,
    was_read: bool,
}

/// One manifest.
#[derive(Debug)]
pub(super) struct File {
    /// Of the bytes; None where they couldn't be read.
    digest: Option<Digest>,
    /// When the bytes were last changed.
    pub(super) modified: Option<SystemTime>,
    /// Why what is in it now can't be used.
    error: Option<String>,
    /// The last valid content.
    pub(super) good: Option<Good>,
    /// It wasn't there when it was last looked for, and is looked for again before that counts.
    missing: bool,
    /// How often it was deleted, where that counts.
    deletions: u64,
}

#[derive(Debug)]
pub(super) enum Good {
    Pod(Box<GoodPod>),
    Class(Box<PriorityClass>),
    Other(objects::Object),
}

#[derive(Debug)]
pub(super) struct GoodPod {
    content: [u8; 32],
    /// With the priority and the overhead that were last found for it, once any were.
    pub(super) pod: Arc<Pod>,
    written: Written,
    resolved: Option<(Priority, Overhead)>,
}

/// What a pod's runtime class costs.
type Overhead = Option<BTreeMap<String, Amount>>;

impl Folder {
    /// A folder of which nothing was read yet.
    pub fn new(path: PathBuf, node_name: String, critical: bool) -> Self {
        let standing = FolderState::Missing;
        let (allowed_unsafe_sysctls, files, owners) = (Vec::new(), BTreeMap::new(), Owners::new());
        Folder { path, node_name, critical, allowed_unsafe_sysctls, files, owners, standing, was_read: false }
    }

    /// Says which files had which names before, as an earlier instance of the agent knew it.
    pub(super) fn remember(&mut self, owners: Owners) {
        self.owners = owners;
    }

    /// The file of each name, by the last [`Self::desired`].
    pub(super) fn owners(&self) -> &Owners {
        &self.owners
    }

    /// Lets pods have these kernel settings besides the safe ones.
    pub(super) fn allow_sysctls(&mut self, allowed: Vec<String>) {
        self.allowed_unsafe_sysctls = allowed;
    }

    /// Notes what came of reading the folder itself. One that is taken away takes its pods along, as under
    /// the kubelet; one that was never there, or can't be read, says nothing about them.
    pub fn set_standing(&mut self, standing: FolderState) {
        self.was_read |= standing == FolderState::Read;
        if standing == FolderState::Missing {
            self.files.clear();
        }
        self.standing = standing;
    }

    /// What came of reading the folder itself, at last.
    pub(super) fn standing(&self) -> &FolderState {
        &self.standing
    }

    /// The files that are known.
    pub(super) fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.keys().map(PathBuf::as_path)
    }

    /// Notes that a file isn't there now. It takes nothing away yet: an editor may be about to put it back.
    /// Whether it was known.
    pub(super) fn miss(&mut self, file: &Path) -> bool {
        self.files.get_mut(file).map(|file| file.missing = true).is_some()
    }

    /// Notes that a file was deleted, whether or not another has its name by now.
    pub(super) fn note_deleted(&mut self, file: &Path) {
        if let Some(file) = self.files.get_mut(file) {
            file.deletions += 1;
        }
    }

    /// Forgets a file that is gone.
    pub(super) fn forget(&mut self, file: &Path) {
        self.files.remove(file);
    }

    /// Takes in what a file holds now; `now` is the time, RFC 3339. Returns warnings for the log. The same
    /// content again costs a digest.
    pub fn update(&mut self, path: PathBuf, content: Content, now: &str) -> Vec<String> {
        let known = self.files.get(&path).and_then(|file| file.digest);
        let reading = Reading::of(&path, content, known);
        self.take(path, reading, now)
    }

    /// The digests of what the files hold, as far as they could be read.
    pub(super) fn digests(&self) -> BTreeMap<PathBuf, Digest> {
        self.files.iter().filter_map(|(path, file)| Some((path.clone(), file.digest?))).collect()
    }

    /// Takes in what a file was read to hold; as [`Self::update`].
    pub(super) fn take(&mut self, path: PathBuf, reading: Reading, now: &str) -> Vec<String> {
        let Reading { digest, modified, manifest } = reading;
        if let Some(known) = self.files.get_mut(&path) {
            known.missing = false;
            known.modified = modified.or(known.modified);
        }
        let Some(result) = manifest else { return Vec::new() };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let result = result.and_then(|manifest| self.admit(manifest, &path, &name, now));
        let (warnings, error, good) = match result {
            Ok((warnings, good)) => (warnings, None, Some(good)),
            Err(error) => (Vec::new(), Some(error.to_string()), None),
        };
        let new = File { digest, modified, error: None, good: None, missing: false, deletions: 0 };
        let file = self.files.entry(path).or_insert(new);
        (file.digest, file.error) = (digest, error);
        match (good, &file.good) {
            // Only comments or layout changed: it is the same pod, seen when it was first seen.
            (Some(Good::Pod(new)), Some(Good::Pod(old))) if new.content == old.content => {}
            (Some(new), _) => file.good = Some(new),
            (None, _) => {}
        }
        warnings.into_iter().map(|warning| format!("{name}: {warning}")).collect()
    }

    /// Gives a pod its identity.
    fn admit(
        &self,
        manifest: Manifest,
        path: &Path,
        name: &str,
        now: &str,
    ) -> Result<(Vec<String>, Good), ManifestError> {
        let content = manifest.content;
        let good = match manifest.object {
            Object::PriorityClass(class) => Good::Class(class),
            Object::Other(object) => Good::Other(object),
            Object::Pod(mut pod) => {
                let origin =
                    Origin { node_name: &self.node_name, file: path, seen: now, critical: self.critical };
                identity::assign(&mut pod, &content, &origin);
                if let Some(why) = too_long_for_logs(&pod) {
                    return Err(ManifestError::whole(name, why));
                }
                let spec = pod.spec.as_ref();
                if let Some(why) = spec.and_then(|spec| sysctls::refused(spec, &self.allowed_unsafe_sysctls))
                {
                    return Err(ManifestError::whole(name, why));
                }
                let (written, pod) = (Written::of(&pod), Arc::new(*pod));
                Good::Pod(Box::new(GoodPod { content, pod, written, resolved: None }))
            }
        };
        Ok((manifest.warnings, good))
    }

    /// The pods and objects that the manifests add up to.
    pub fn desired(&mut self) -> Desired {
        let mut desired = Desired { folder_unread: self.folder_unread(), ..Desired::default() };
        desired.rejected.extend(self.complaint());
        let mut claims = Claims::of(&self.files, &self.owners);
        let objects = gather(&self.files, &claims);
        let priorities = resolve_all(&self.files, &claims, &mut desired);
        for ((path, file), priority) in self.files.iter_mut().zip(priorities) {
            if let Some(error) = &file.error {
                reject(&mut desired, path, error.clone());
            }
            let Some(Good::Pod(good)) = &mut file.good else {
                if file.good.is_none() {
                    desired.unreadable.insert(path.clone());
                }
                continue;
            };
            let resolved = priority.and_then(|priority| Ok((priority, overhead_of(good, &objects)?)));
            if let Err(sentence) = apply(good, resolved) {
                reject(&mut desired, path, with_file(path, &sentence));
            }
            if good.resolved.is_none() {
                desired.unreadable.insert(path.clone());
                continue;
            }
            let pod = &good.pod;
            if !claims.refused.contains_key(path) {
                if file.deletions > 0 && !file.missing {
                    let uid = pod.metadata.uid.clone().unwrap_or_default();
                    desired.put_back.insert(uid, file.deletions);
                }
                desired.pods.insert(PodName::of(pod), Arc::clone(pod));
            }
        }
        for (path, (winner, sentence)) in std::mem::take(&mut claims.refused) {
            // A file that is just being renamed is not another one of the same name.
            if self.files.get(&winner).is_none_or(|file| !file.missing) {
                reject(&mut desired, &path, with_file(&path, &sentence));
            }
        }
        desired.rejected.sort_by(|a, b| a.file.cmp(&b.file));
        // What was not read says nothing about who has a name.
        if !desired.folder_unread {
            self.owners = claims.owners;
        }
        desired.objects = Arc::new(objects);
        desired
    }

    /// The objects whose names their files have, by the last [`Self::desired`], in the order of their files.
    pub(super) fn described(&self) -> Vec<Described> {
        let claims = Claims::of(&self.files, &self.owners);
        let counts = |path: &PathBuf| !claims.refused.contains_key(path);
        let good = self.files.iter().filter(|(path, _)| counts(path));
        let described = good.filter_map(|(path, file)| {
            let object = match file.good.as_ref()? {
                Good::Pod(good) => {
                    let mut pod = Pod::clone(&good.pod);
                    good.written.apply_to(&mut pod);
                    Object::Pod(Box::new(pod))
                }
                Good::Class(class) => Object::PriorityClass(class.clone()),
                Good::Other(object) => Object::Other(object.clone()),
            };
            Some(Described { file: path.clone(), object })
        });
        described.collect()
    }

    fn folder_unread(&self) -> bool {
        match self.standing {
            FolderState::Read => false,
            FolderState::Missing => !self.was_read,
            FolderState::Unreadable(_) => true,
        }
    }

    fn complaint(&self) -> Option<RejectedManifest> {
        let path = self.path.display();
        let message = match (&self.standing, self.was_read) {
            (FolderState::Read, _) => return None,
            (FolderState::Missing, false) => {
                format!("{path}: the folder of static pods is not there; create it, or set staticPodPath")
            }
            (FolderState::Missing, true) => {
                format!("{path}: the folder of static pods was taken away; its pods are stopped")
            }
            (FolderState::Unreadable(why), _) => format!("{path}: {why}; what runs goes on as it is"),
        };
        Some(RejectedManifest { file: self.path.clone(), message })
    }
}

/// Why no file system has a folder for a pod's logs, if so: its name has the pod's name, namespace and UID in
/// it.
fn too_long_for_logs(pod: &Pod) -> Option<String> {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let folder = log_folder(Path::new(""), &PodName::of(pod), uid);
    let excess = folder.as_os_str().len().checked_sub(FILE_NAME_MAX).filter(|excess| *excess > 0)?;
    Some(format!(
        "metadata.name: the folder of the pod's logs is called <namespace>_<name>_<uid>, with the node's name behind the \
         pod's; that is {} characters, and file systems allow {FILE_NAME_MAX}: make the name shorter by {excess}",
        folder.as_os_str().len()
    ))
}

fn reject(desired: &mut Desired, file: &Path, message: String) {
    desired.rejected.push(RejectedManifest { file: file.to_owned(), message });
}

fn with_file(path: &Path, sentence: &str) -> String {
    format!("{}: {sentence}", path.file_name().unwrap_or_default().to_string_lossy())
}

/// The priority of each file's pod, in the files' order; files that hold no pod have the default one.
fn resolve_all(
    files: &BTreeMap<PathBuf, File>,
    claims: &Claims,
    desired: &mut Desired,
) -> Vec<Result<Priority, String>> {
    let mut classes = Classes::default();
    for (path, file) in files.iter().filter(|(path, _)| !claims.refused.contains_key(*path)) {
        if let Some(Good::Class(class)) = &file.good {
            let name = class.metadata.name.as_deref().unwrap_or_default();
            classes.add(class);
            desired.class_files.insert(name.to_owned(), path.clone());
        }
    }
    let none = Written::default();
    let pods = files.values().map(|file| match &file.good {
        Some(Good::Pod(good)) => &good.written,
        _ => &none,
    });
    pods.map(|pod| classes.resolve(pod)).collect()
}

/// What pods refer to by name, but priority classes.
fn gather(files: &BTreeMap<PathBuf, File>, claims: &Claims) -> Objects {
    let mut objects = Objects::default();
    for (path, file) in files.iter().filter(|(path, _)| !claims.refused.contains_key(*path)) {
        if let Some(Good::Other(object)) = &file.good {
            objects.add(path, object);
        }
    }
    objects
}

fn overhead_of(good: &GoodPod, objects: &Objects) -> Result<Overhead, String> {
    let class = good.pod.spec.as_ref().and_then(|spec| spec.runtime_class_name.as_deref());
    let class = class.and_then(|name| objects.runtime_class(name));
    super::objects::overhead(good.written.overhead.as_ref(), class)
}

/// Gives a pod its priority and its overhead. Where there is none, it keeps what it had: a class that goes
/// away takes nothing from the pods that came before, as in the API server.
fn apply(good: &mut GoodPod, resolved: Result<(Priority, Overhead), String>) -> Result<(), String> {
    let resolved = resolved?;
    if good.resolved.as_ref() != Some(&resolved) {
        let pod = Arc::make_mut(&mut good.pod);
        good.written.apply_to(pod);
        resolved.0.apply_to(pod);
        pod.spec.get_or_insert_default().overhead.clone_from(&resolved.1);
        good.resolved = Some(resolved);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_model::labels;

    fn folder() -> Folder {
        let mut folder = Folder::new("/m".into(), "Node1".to_owned(), false);
        folder.set_standing(FolderState::Read);
        folder
    }

    fn pod(name: &str, more: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  {more}\n  containers: [{{name: c, image: 'x:1'}}]\n"
        )
    }

    #[test]
    fn a_name_that_is_too_long_for_the_folder_of_its_logs_is_refused() {
        let mut folder = folder();
        // "default", "-node1", the UID's 32 digits and two "_".
        let longest = 255 - 7 - 6 - 32 - 2;
        put(&mut folder, "fits.yaml", &pod(&"a".repeat(longest), ""));
        put(&mut folder, "long.yaml", &pod(&"b".repeat(longest + 12), ""));
        let desired = folder.desired();
        assert_eq!((desired.pods.len(), desired.rejected.len()), (1, 1));
        let message = &desired.rejected[0].message;
        assert!(message.starts_with("long.yaml: metadata.name: "), "{message}");
        assert!(message.ends_with("make the name shorter by 12"), "{message}");
    }

    fn class(name: &str, value: i32) -> String {
        format!(
            "apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {{name: {name}}}\nvalue: {value}\n"
        )
    }

    fn put(folder: &mut Folder, name: &str, text: &str) {
        put_at(folder, name, text, 0);
    }

    /// A file that was changed so many seconds after another.
    fn put_at(folder: &mut Folder, name: &str, text: &str, seconds: u64) {
        let modified = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        let content = Content::Bytes(text.into(), modified);
        folder.update(Path::new("/m").join(name), content, "2026-11-21T00:00:00Z");
    }

    fn unread(folder: &mut Folder, name: &str) {
        folder.update(
            Path::new("/m").join(name),
            Content::Unreadable("no".to_owned()),
            "2026-11-21T00:00:00Z",
        );
    }

    /// Pods as `name@file`, rejected as `file: message`.
    fn shown(desired: &Desired) -> (Vec<String>, Vec<String>) {
        let file =
            |pod: &Arc<Pod>| pod.metadata.annotations.as_ref().unwrap()[labels::ANNOTATION_MANIFEST].clone();
        let pods = desired.pods.iter().map(|(name, pod)| format!("{}@{}", name.name, file(pod))).collect();
        (pods, desired.rejected.iter().map(|r| r.message.clone()).collect())
    }

    fn check(folder: &mut Folder, pods: &[&str], rejected: &[&str]) -> Desired {
        let desired = folder.desired();
        let (have, messages) = shown(&desired);
        assert_eq!(have, pods, "{messages:?}");
        assert_eq!(messages.len(), rejected.len(), "{messages:?}");
        for (message, part) in messages.iter().zip(rejected) {
            assert!(message.contains(part), "{message}");
        }
        desired
    }

    fn uid(folder: &mut Folder) -> String {
        folder.desired().pods.values().next().unwrap().metadata.uid.clone().unwrap()
    }

    #[test]
    fn a_pod_gets_its_identity_on_the_node() {
        let mut folder = folder();
        put(&mut folder, "a.yaml", &pod("web", ""));
        let desired = check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
        let pod = desired.pods.values().next().unwrap();
        let annotations = pod.metadata.annotations.as_ref().unwrap();
        let uid = pod.metadata.uid.clone().unwrap();
        assert_eq!(uid.len(), 32);
        assert_eq!(annotations[labels::ANNOTATION_HASH], uid);
        assert_eq!(annotations[labels::ANNOTATION_SEEN], "2026-11-21T00:00:00Z");
        assert!(!annotations.contains_key(labels::ANNOTATION_SOURCE));
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!(spec.node_name.as_deref(), Some("Node1"));
        assert_eq!(spec.priority, Some(0));
        assert_eq!(spec.tolerations.as_ref().unwrap()[0].effect.as_deref(), Some("NoExecute"));
    }

    #[test]
    fn static_pods_are_critical_on_request_only() {
        let mut folder = Folder::new("/m".into(), "n".to_owned(), true);
        folder.set_standing(FolderState::Read);
        put(&mut folder, "a.yaml", &pod("web", ""));
        let desired = folder.desired();
        let annotations = desired.pods.values().next().unwrap().metadata.annotations.clone().unwrap();
        assert_eq!(annotations[labels::ANNOTATION_SOURCE], "file");
    }

    #[test]
    fn the_uid_changes_with_the_content_the_file_and_the_node_only() {
        let mut one = folder();
        put(&mut one, "a.yaml", &pod("web", ""));
        let first = uid(&mut one);
        put(&mut one, "a.yaml", &format!("# a comment\n{}", pod("web", "")));
        assert_eq!(uid(&mut one), first);
        put(&mut one, "a.yaml", &pod("web", "hostNetwork: true"));
        assert_ne!(uid(&mut one), first);
        let mut other_file = folder();
        put(&mut other_file, "b.yaml", &pod("web", ""));
        assert_ne!(uid(&mut other_file), first);
        let mut other_node = Folder::new("/m".into(), "n2".to_owned(), false);
        put(&mut other_node, "a.yaml", &pod("web", ""));
        assert_ne!(uid(&mut other_node), first);
    }

    #[test]
    fn a_uid_that_is_written_is_kept_and_the_hash_still_tells_a_change() {
        let mut folder = folder();
        let text = pod("web", "").replace("name: web", "name: web, uid: my-own");
        put(&mut folder, "a.yaml", &text);
        let hash = |folder: &mut Folder| {
            let desired = folder.desired();
            desired.pods.values().next().unwrap().metadata.annotations.clone().unwrap()
                [labels::ANNOTATION_HASH]
                .clone()
        };
        let first = hash(&mut folder);
        assert_eq!(uid(&mut folder), "my-own");
        put(&mut folder, "a.yaml", &text.replace("x:1", "x:2"));
        assert_eq!(uid(&mut folder), "my-own");
        assert_ne!(hash(&mut folder), first);
    }

    #[test]
    fn an_unchanged_pod_stays_the_same_value() {
        let mut folder = folder();
        put(&mut folder, "a.yaml", &pod("web", ""));
        let before = folder.desired().pods.into_values().next().unwrap();
        put(&mut folder, "a.yaml", &format!("{}\n# later\n", pod("web", "")));
        put(&mut folder, "b.yaml", &pod("other", ""));
        let after = folder.desired().pods.into_values().last().unwrap();
        assert!(Arc::ptr_eq(&before, &after));
    }

    #[test]
    fn a_copy_does_not_take_the_name_from_the_pod_that_runs() {
        let mut folder = folder();
        put_at(&mut folder, "b.yaml", &pod("web", ""), 9);
        check(&mut folder, &["web-node1@/m/b.yaml"], &[]);
        // Whatever its name and its time say.
        put_at(&mut folder, "a.yaml", &pod("web", ""), 1);
        let clash =
            "a.yaml: metadata.name: the Pod default/web-node1 is in /m/b.yaml already: only one of the two";
        let desired = check(&mut folder, &["web-node1@/m/b.yaml"], &[clash]);
        assert!(desired.unreadable.is_empty());
        put(&mut folder, "b.yaml", "kind: [");
        check(&mut folder, &["web-node1@/m/b.yaml"], &[clash, "b.yaml:1:7:"]);
        put(&mut folder, "b.yaml", &pod("web", "hostNetwork: true"));
        check(&mut folder, &["web-node1@/m/b.yaml"], &[clash]);
        folder.forget(Path::new("/m/b.yaml"));
        check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
        put(&mut folder, "b.yaml", &pod("web", ""));
        check(
            &mut folder,
            &["web-node1@/m/a.yaml"],
            &["b.yaml: metadata.name: the Pod default/web-node1 is in /m/a.yaml"],
        );
    }

    #[test]
    fn a_file_with_another_ending_never_has_the_name_before_a_manifest() {
        let mut folder = folder();
        put_at(&mut folder, "shop.yaml.v1", &pod("web", ""), 1);
        put_at(&mut folder, "shop.yaml", &pod("web", ""), 9);
        let clash = "shop.yaml.v1: metadata.name: the Pod default/web-node1 is in /m/shop.yaml already";
        check(&mut folder, &["web-node1@/m/shop.yaml"], &[clash]);
        // Also where the other file had the name: `mv shop.yaml shop.yaml.v1`, then a new shop.yaml.
        folder.forget(Path::new("/m/shop.yaml"));
        check(&mut folder, &["web-node1@/m/shop.yaml.v1"], &[]);
        put(&mut folder, "shop.yaml", &pod("web", ""));
        check(&mut folder, &["web-node1@/m/shop.yaml"], &[clash]);
    }

    #[test]
    fn after_a_restart_the_recorded_file_has_the_name_else_the_shortest_and_first() {
        let files = |recorded: Option<&str>| {
            let mut folder = folder();
            let owner = recorded.map(|file| ("Pod default/web-node1".to_owned(), Path::new("/m").join(file)));
            folder.remember(owner.into_iter().collect());
            put_at(&mut folder, "a-copy.yaml", &pod("web", ""), 1);
            put_at(&mut folder, "a.yaml", &pod("web", ""), 5);
            put_at(&mut folder, "b.yaml", &pod("web", ""), 2);
            put_at(&mut folder, "c.yaml", &pod("web", ""), 2);
            folder
        };
        let check = |recorded, owner: &str| {
            let pods = shown(&files(recorded).desired()).0;
            assert_eq!(pods, [format!("web-node1@/m/{owner}")], "{recorded:?}");
        };
        check(Some("c.yaml"), "c.yaml");
        check(Some("a.yaml"), "a.yaml");
        check(Some("a-copy.yaml"), "a-copy.yaml");
        check(None, "a.yaml");
        check(Some("gone.yaml"), "a.yaml");
    }

    #[test]
    fn a_file_that_can_not_be_read_after_a_restart_still_has_its_pods_name() {
        let mut folder = folder();
        let owner = ("Pod default/web-node1".to_owned(), "/m/b.yaml".into());
        folder.remember([owner].into());
        put(&mut folder, "a.yaml", &pod("web", ""));
        put(&mut folder, "b.yaml", "kind: [");
        let desired = check(
            &mut folder,
            &[],
            &["a.yaml: metadata.name: the Pod default/web-node1 is in /m/b.yaml", "b.yaml:1:7:"],
        );
        assert!(!desired.may_remove(Some(Path::new("/m/b.yaml"))));
        put(&mut folder, "b.yaml", &pod("other", ""));
        check(&mut folder, &["other-node1@/m/b.yaml", "web-node1@/m/a.yaml"], &[]);
    }

    #[test]
    fn a_folder_that_was_not_read_does_not_change_who_has_a_name() {
        let mut folder = Folder::new("/m".into(), "Node1".to_owned(), false);
        let owners: Owners = [("Pod default/web-node1".to_owned(), "/m/b.yaml".into())].into();
        folder.remember(owners.clone());
        folder.set_standing(FolderState::Unreadable("no".to_owned()));
        folder.desired();
        assert_eq!(folder.owners(), &owners);
    }

    #[test]
    fn a_file_that_is_being_renamed_clashes_with_nothing() {
        let mut folder = folder();
        put(&mut folder, "a.yaml", &pod("web", ""));
        check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
        assert!(folder.miss(Path::new("/m/a.yaml")) && !folder.miss(Path::new("/m/never.yaml")));
        put(&mut folder, "z.yaml", &pod("web", ""));
        check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
        put(&mut folder, "a.yaml", &pod("web", ""));
        check(&mut folder, &["web-node1@/m/a.yaml"], &["z.yaml: metadata.name"]);
        folder.forget(Path::new("/m/a.yaml"));
        check(&mut folder, &["web-node1@/m/z.yaml"], &[]);
    }

    #[test]
    fn a_uid_is_had_once() {
        let mut folder = folder();
        put(&mut folder, "a.yaml", &pod("web", "").replace("name: web", "name: web, uid: u"));
        put(&mut folder, "b.yaml", &pod("other", "").replace("name: other", "name: other, uid: u"));
        check(&mut folder, &["web-node1@/m/a.yaml"], &["b.yaml: metadata.uid: u is in /m/a.yaml already"]);
    }

    #[test]
    fn a_manifest_that_becomes_invalid_takes_nothing_away() {
        let mut folder = folder();
        put(&mut folder, "a.yaml", &pod("web", ""));
        let before = uid(&mut folder);
        for broken in ["kind: [", "", "apiVersion: v1\nkind: List\n"] {
            put(&mut folder, "a.yaml", broken);
            let desired = check(&mut folder, &["web-node1@/m/a.yaml"], &["a.yaml:"]);
            assert!(desired.unreadable.is_empty());
        }
        unread(&mut folder, "a.yaml");
        check(&mut folder, &["web-node1@/m/a.yaml"], &["a.yaml: no"]);
        put(&mut folder, "a.yaml", &pod("web", ""));
        check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
        assert_eq!(uid(&mut folder), before);
    }

    #[test]
    fn a_file_that_was_never_valid_protects_what_runs_from_it() {
        let mut folder = folder();
        put(&mut folder, "a.yaml", "kind: [");
        let desired = check(&mut folder, &[], &["a.yaml:1:7:"]);
        assert!(!desired.may_remove(Some(Path::new("/m/a.yaml"))));
        assert!(desired.may_remove(Some(Path::new("/m/b.yaml"))));
        assert!(desired.may_remove(None));
        folder.forget(Path::new("/m/a.yaml"));
        assert!(folder.desired().may_remove(Some(Path::new("/m/a.yaml"))));
    }

    #[test]
    fn a_folder_that_was_never_read_says_nothing_about_its_pods() {
        let mut folder = Folder::new("/m".into(), "n".to_owned(), false);
        folder.set_standing(FolderState::Missing);
        let desired = check(&mut folder, &[], &["/m: the folder of static pods is not there; create it"]);
        assert!(!desired.may_remove(None));
        folder.set_standing(FolderState::Unreadable("cannot be read (EIO)".to_owned()));
        let desired = check(&mut folder, &[], &["/m: cannot be read (EIO); what runs goes on"]);
        assert!(!desired.may_remove(None));
    }

    #[test]
    fn a_folder_that_is_taken_away_takes_its_pods_along() {
        let mut folder = folder();
        put(&mut folder, "a.yaml", &pod("web", ""));
        folder.set_standing(FolderState::Unreadable("cannot be read (EIO)".to_owned()));
        let desired = check(&mut folder, &["web-node1@/m/a.yaml"], &["cannot be read"]);
        assert!(!desired.may_remove(None));
        folder.set_standing(FolderState::Missing);
        let desired =
            check(&mut folder, &[], &["/m: the folder of static pods was taken away; its pods are stopped"]);
        assert!(desired.may_remove(Some(Path::new("/m/a.yaml"))));
    }

    #[test]
    fn priority_classes_beside_the_pods_count() {
        let mut folder = folder();
        let priority = |folder: &mut Folder| {
            folder.desired().pods.values().next().and_then(|p| p.spec.as_ref()?.priority)
        };
        put(&mut folder, "web.yaml", &pod("web", "priorityClassName: high"));
        let desired = check(
            &mut folder,
            &[],
            &["web.yaml: spec.priorityClassName: there is no PriorityClass \"high\""],
        );
        assert!(!desired.may_remove(Some(Path::new("/m/web.yaml"))));
        put(&mut folder, "z.yaml", &class("high", 1000));
        check(&mut folder, &["web-node1@/m/web.yaml"], &[]);
        assert_eq!(priority(&mut folder), Some(1000));
        let before = uid(&mut folder);
        put(&mut folder, "z.yaml", &class("high", 2000));
        assert_eq!(priority(&mut folder), Some(2000));
        assert_eq!(uid(&mut folder), before);
        put(&mut folder, "zz.yaml", &class("high", 3000));
        check(
            &mut folder,
            &["web-node1@/m/web.yaml"],
            &["zz.yaml: metadata.name: the PriorityClass high is in /m/z.yaml already"],
        );
        folder.forget(Path::new("/m/z.yaml"));
        folder.forget(Path::new("/m/zz.yaml"));
        check(&mut folder, &["web-node1@/m/web.yaml"], &["there is no PriorityClass"]);
        assert_eq!(priority(&mut folder), Some(2000));
    }

    #[test]
    fn objects_beside_the_pods_are_theirs_to_refer_to() {
        let map = |name: &str, value: &str| {
            format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata: {{k: '{value}'}}\n")
        };
        let value = |folder: &mut Folder| {
            let objects = folder.desired().objects;
            objects.config_map("default", "m").and_then(|map| map.data.clone()?.get("k").cloned())
        };
        let mut folder = folder();
        put(&mut folder, "b.yaml", &map("m", "1"));
        assert_eq!(value(&mut folder).as_deref(), Some("1"));
        put(&mut folder, "b.yaml", &map("m", "2"));
        assert_eq!(value(&mut folder).as_deref(), Some("2"));
        // One that can't be read takes nothing away; of two of a name that of the file which had it counts.
        put(&mut folder, "b.yaml", "kind: [");
        assert_eq!(value(&mut folder).as_deref(), Some("2"));
        put(&mut folder, "b.yaml", &map("m", "3"));
        put(&mut folder, "a.yaml", &map("m", "4"));
        let clash = "a.yaml: metadata.name: the ConfigMap default/m is in /m/b.yaml already";
        let desired = check(&mut folder, &[], &[clash]);
        assert_eq!(desired.file("ConfigMap", "default", "m"), Some("/m/b.yaml".into()));
        assert_eq!(value(&mut folder).as_deref(), Some("3"));
        folder.forget(Path::new("/m/b.yaml"));
        assert_eq!(value(&mut folder).as_deref(), Some("4"));
    }

    #[test]
    fn a_pod_costs_what_its_runtime_class_says() {
        let class = "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: vm}\nhandler: kata\noverhead: {podFixed: {memory: 64Mi}}\n";
        let overhead = |folder: &mut Folder| {
            let desired = folder.desired();
            let spec = desired.pods.values().next().and_then(|pod| pod.spec.clone());
            spec.and_then(|spec| spec.overhead).map(|costs| costs["memory"].0.clone())
        };
        let mut folder = folder();
        put(&mut folder, "a.yaml", &pod("web", "runtimeClassName: vm"));
        let before = uid(&mut folder);
        assert_eq!(overhead(&mut folder), None);
        put(&mut folder, "z.yaml", class);
        assert_eq!((overhead(&mut folder).as_deref(), uid(&mut folder)), (Some("64Mi"), before));
        put(&mut folder, "b.yaml", &pod("other", "runtimeClassName: vm\n  overhead: {memory: 1Gi}"));
        check(
            &mut folder,
            &["web-node1@/m/a.yaml"],
            &["b.yaml: spec.overhead: is not what its runtime class costs"],
        );
    }

    #[test]
    fn kernel_settings_that_reach_beyond_the_pod_are_refused() {
        let sysctl =
            |name: &str| pod("web", &format!("securityContext: {{sysctls: [{{name: {name}, value: '1'}}]}}"));
        let mut folder = folder();
        put(&mut folder, "a.yaml", &sysctl("net.core.somaxconn"));
        check(
            &mut folder,
            &[],
            &["a.yaml: spec.securityContext.sysctls[0].name: net.core.somaxconn is not one of"],
        );
        folder.allow_sysctls(vec!["net.core.*".to_owned()]);
        put(&mut folder, "a.yaml", &format!("{}\n", sysctl("net.core.somaxconn")));
        check(&mut folder, &["web-node1@/m/a.yaml"], &[]);
    }

    #[test]
    fn the_same_bytes_are_not_parsed_again() {
        let mut folder = folder();
        let warned = pod("web", "nodeSelector: {a: b}");
        let update = |folder: &mut Folder, text: &str| {
            folder
                .update("/m/a.yaml".into(), Content::Bytes(text.into(), SystemTime::UNIX_EPOCH), "now")
                .len()
        };
        assert_eq!(update(&mut folder, &warned), 1);
        assert_eq!(update(&mut folder, &warned), 0);
        assert_eq!(update(&mut folder, &format!("{warned}\n")), 1);
    }

    #[test]
    fn bytes_that_are_no_text_are_rejected() {
        let mut folder = folder();
        let content = Content::Bytes(vec![b'a', 0xff], SystemTime::UNIX_EPOCH);
        folder.update("/m/a.yaml".into(), content, "now");
        check(&mut folder, &[], &["a.yaml: is not UTF-8 text (byte 1)"]);
    }
}
