//! Computes the desired pods from the contents of a folder's manifests, without I/O; [`super::source`] reads
//! the files.

use beelet_model::desired::Desired;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::file::{Described, Digest, File, Good, GoodPod, Overhead};
use super::identity::{self, Origin};
use super::owners::{Claims, Owners};
use super::priority::{Classes, Priority, Written};
use super::reading::Reading;
use super::standing::Standing;
use super::{Manifest, Object};
use beelet_codec::error::ManifestError;
use beelet_model::objects::Objects;
use beelet_model::pod::log_folder;
use beelet_model::table::{PodName, RejectedManifest};
use beelet_spec::sysctls;

pub use super::{file::Content, standing::FolderState};

/// Maximum length of a file name, in bytes, on the file systems in use (NAME_MAX).
const FILE_NAME_MAX: usize = 255;

/// The manifests of a folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    rules: Rules,
    files: BTreeMap<PathBuf, File>,
    owners: Owners,
    standing: Standing,
}

/// Settings for the validity and identity of pods.
#[derive(Debug)]
struct Rules {
    node_name: String,
    critical: bool,
    allowed_unsafe_sysctls: Vec<String>,
}

impl Folder {
    /// Creates an unread folder.
    pub fn new(path: PathBuf, node_name: String, critical: bool) -> Self {
        let rules = Rules { node_name, critical, allowed_unsafe_sysctls: Vec::new() };
        let standing = Standing::default();
        Folder { path, rules, files: BTreeMap::new(), owners: Owners::new(), standing }
    }

    /// Sets the owners of names that an earlier instance of the agent recorded.
    pub(super) fn remember(&mut self, owners: Owners) {
        self.owners = owners;
    }

    /// Returns the owner of each name, by the last [`Self::desired`].
    pub(super) fn owners(&self) -> &Owners {
        &self.owners
    }

    /// Allows these kernel settings in addition to the safe ones.
    pub(super) fn allow_sysctls(&mut self, allowed: Vec<String>) {
        self.rules.allowed_unsafe_sysctls = allowed;
    }

    /// Records the result of reading the folder itself. As in the kubelet, removing the folder removes its
    /// pods; a folder that never existed, or is unreadable, does not.
    pub fn set_standing(&mut self, state: FolderState) {
        if state == FolderState::Missing {
            self.files.clear();
        }
        self.standing.set(state);
    }

    /// Returns the state of the folder itself.
    pub(super) fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Returns the known files.
    pub(super) fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.keys().map(PathBuf::as_path)
    }

    /// Marks a file as missing, without removing its pod yet: an editor may be about to restore the file.
    /// Returns true if the file was known.
    pub(super) fn miss(&mut self, file: &Path) -> bool {
        self.files.get_mut(file).map(|file| file.missing = true).is_some()
    }

    /// Counts a deletion of a file, even if another file already has its name.
    pub(super) fn record_deletion(&mut self, file: &Path) {
        if let Some(file) = self.files.get_mut(file) {
            file.deletions += 1;
        }
    }

    /// Removes a file.
    pub(super) fn forget(&mut self, file: &Path) {
        self.files.remove(file);
    }

    /// Records a file's current content; `now` is the time, RFC 3339. Returns warnings for the log. Unchanged
    /// content costs only a digest.
    pub fn update(&mut self, path: PathBuf, content: Content, now: &str) -> Vec<String> {
        let known = self.files.get(&path).and_then(|file| file.digest);
        let reading = Reading::of(&path, content, known);
        self.record(path, reading, now)
    }

    /// Returns the digests of all readable files.
    pub(super) fn digests(&self) -> BTreeMap<PathBuf, Digest> {
        self.files.iter().filter_map(|(path, file)| Some((path.clone(), file.digest?))).collect()
    }

    /// Records a reading of a file, like [`Self::update`].
    pub(super) fn record(&mut self, path: PathBuf, reading: Reading, now: &str) -> Vec<String> {
        let Reading { digest, modified, manifest } = reading;
        if let Some(known) = self.files.get_mut(&path) {
            known.missing = false;
            known.modified = modified.or(known.modified);
        }
        let Some(result) = manifest else { return Vec::new() };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let result = result.and_then(|manifest| self.rules.admit(manifest, &path, &name, now));
        let (warnings, error, good) = match result {
            Ok((warnings, good)) => (warnings, None, Some(good)),
            Err(error) => (Vec::new(), Some(error.to_string()), None),
        };
        let new = File { digest, modified, error: None, good: None, missing: false, deletions: 0 };
        let file = self.files.entry(path).or_insert(new);
        (file.digest, file.error) = (digest, error);
        match (good, &file.good) {
            // Only comments or layout changed: keep the pod and the time at which it was first seen.
            (Some(Good::Pod(new)), Some(Good::Pod(old))) if new.content == old.content => {}
            (Some(new), _) => file.good = Some(new),
            (None, _) => {}
        }
        warnings.into_iter().map(|warning| format!("{name}: {warning}")).collect()
    }

    /// Returns the pods and objects of all manifests.
    pub fn desired(&mut self) -> Desired {
        let mut desired = Desired { folder_unread: self.standing.is_unread(), ..Desired::default() };
        desired.rejected.extend(self.standing.complaint(&self.path));
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
            // A file that is just being renamed does not conflict with its new name.
            if self.files.get(&winner).is_none_or(|file| !file.missing) {
                reject(&mut desired, &path, with_file(&path, &sentence));
            }
        }
        desired.rejected.sort_by(|a, b| a.file.cmp(&b.file));
        // An unread folder does not change the owners of names.
        if !desired.folder_unread {
            self.owners = claims.owners;
        }
        desired.objects = Arc::new(objects);
        desired
    }

    /// Returns the objects of files that own their names, by the last [`Self::desired`], in the order of the
    /// files.
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
}

impl Rules {
    /// Checks a manifest against the rules and assigns a pod's identity.
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
}

/// Returns an error if the name of the pod's log folder, which contains the pod's namespace, name and UID, is
/// too long.
fn too_long_for_logs(pod: &Pod) -> Option<String> {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let folder = log_folder(Path::new(""), &PodName::of(pod), uid);
    let excess = folder.as_os_str().len().checked_sub(FILE_NAME_MAX).filter(|excess| *excess > 0)?;
    Some(format!(
        "metadata.name: the name of the pod's log folder, <namespace>_<name>-<node>_<uid>, has {} characters, and file \
         systems allow {FILE_NAME_MAX}; shorten the pod's name by {excess}",
        folder.as_os_str().len()
    ))
}

fn reject(desired: &mut Desired, file: &Path, message: String) {
    desired.rejected.push(RejectedManifest { file: file.to_owned(), message });
}

fn with_file(path: &Path, sentence: &str) -> String {
    format!("{}: {sentence}", path.file_name().unwrap_or_default().to_string_lossy())
}

/// Returns the priority of each file's pod, in the files' order; files without a pod have the default one.
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

/// Returns all objects that pods refer to by name, except priority classes.
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

/// Sets a pod's priority and overhead. On an error the pod keeps both: as in the API server, removing a class
/// does not affect existing pods.
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
mod tests;
