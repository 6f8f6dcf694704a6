//! Desired pods of the node, from a source of pods for the pods' manager.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use beelet_policy::node::fit::NodeView;
use k8s_openapi::api::core::v1::{Pod, PodStatus};

use crate::labels;
use crate::objects::Objects;
use crate::origin::Origin;
use crate::table::{PodName, RejectedManifest};

/// Statuses by the UID of their pod, shared by all values of [`Desired`] with the same list.
pub type EarlierStatuses = Arc<BTreeMap<String, Arc<PodStatus>>>;

/// Pods that should run: from the folder's manifests, from the API server, or from both.
///
/// A manifest that becomes invalid does not stop its pod: while the agent runs, the pod of its last valid
/// content stays in `pods`. After a restart that content is unknown, so the file is in `unreadable`, and a
/// pod that runs from it must be left alone: check [`Desired::may_remove`] before stopping a pod that is not
/// in `pods`.
#[derive(Clone, Debug, Default)]
pub struct Desired {
    /// Complete, valid pods with their identity on this node and their priority.
    pub pods: BTreeMap<PodName, Arc<Pod>>,
    /// Rejected manifests, with the reason. The earlier pod of a file may still be in `pods`.
    pub rejected: Vec<RejectedManifest>,
    /// Existing manifests with an unknown pod: never valid since the agent's start.
    pub unreadable: BTreeSet<PathBuf>,
    /// UIDs of unreadable pods that the API server assigns to this node; their running containers are left
    /// alone.
    pub unreadable_uids: BTreeSet<String>,
    /// True if the folder itself is unreadable (or never existed since the agent's start): `pods` may lack
    /// pods.
    pub folder_unread: bool,
    /// True until the API server has listed the pods of this node: `pods` may lack some of them.
    pub api_unread: bool,
    /// True without a configured folder. Pods from files of an earlier configuration are left alone.
    pub without_folder: bool,
    /// The API server's Node, as far as pods may select it.
    pub node: Option<Arc<NodeView>>,
    /// Objects that pods refer to by name: ConfigMaps, Secrets, RuntimeClasses.
    pub objects: Arc<Objects>,
    /// Number of times that a pod's manifest was deleted and restored, by UID, if that ends the running pod.
    pub put_back: BTreeMap<String, u64>,
    /// Files of priority classes, by name.
    pub class_files: BTreeMap<String, PathBuf>,
    /// Statuses in the first list of the API server since the agent's start, by UID: an earlier agent wrote
    /// them.
    pub earlier_statuses: EarlierStatuses,
}

impl PartialEq for Desired {
    /// Compares shared pods and objects by pointer.
    fn eq(&self, other: &Self) -> bool {
        let Self {
            pods,
            rejected,
            unreadable,
            unreadable_uids,
            folder_unread,
            api_unread,
            without_folder,
            node,
            objects,
            put_back,
            class_files,
            earlier_statuses,
        } = self;
        let mut in_both = pods.iter().zip(&other.pods);
        pods.len() == other.pods.len()
            && in_both.all(|((name, pod), (other_name, other))| {
                name == other_name && (Arc::ptr_eq(pod, other) || pod == other)
            })
            && *rejected == other.rejected
            && *unreadable == other.unreadable
            && *unreadable_uids == other.unreadable_uids
            && (*folder_unread, *api_unread, *without_folder)
                == (other.folder_unread, other.api_unread, other.without_folder)
            && *node == other.node
            && Objects::are_same(objects, &other.objects)
            && *put_back == other.put_back
            && *class_files == other.class_files
            && (Arc::ptr_eq(earlier_statuses, &other.earlier_statuses)
                || *earlier_statuses == other.earlier_statuses)
    }
}

impl Desired {
    /// Joins the desired pods of several sources. If two name the same pod or object, the first source
    /// counts.
    #[must_use]
    pub fn joined(sources: &[Arc<Self>]) -> Self {
        let mut all = Self::default();
        for one in sources {
            for (name, pod) in &one.pods {
                all.pods.entry(name.clone()).or_insert_with(|| Arc::clone(pod));
            }
            all.rejected.extend(one.rejected.iter().cloned());
            all.unreadable.extend(one.unreadable.iter().cloned());
            all.unreadable_uids.extend(one.unreadable_uids.iter().cloned());
            all.put_back.extend(one.put_back.clone());
            all.folder_unread |= one.folder_unread;
            all.api_unread |= one.api_unread;
            all.without_folder |= one.without_folder;
            all.node = all.node.or_else(|| one.node.clone());
            // Only one source has an API server.
            if all.earlier_statuses.is_empty() {
                all.earlier_statuses = Arc::clone(&one.earlier_statuses);
            }
            for (name, file) in &one.class_files {
                all.class_files.entry(name.clone()).or_insert_with(|| file.clone());
            }
        }
        all.objects = joined_objects(sources.iter().map(|one| &one.objects));
        all
    }

    /// Returns the file of an object, if it has one: `kind` as in the manifest, a pod's name as on this node.
    #[must_use]
    pub fn file(&self, kind: &str, namespace: &str, name: &str) -> Option<PathBuf> {
        match kind {
            "Pod" => {
                let pod =
                    self.pods.get(&PodName { namespace: namespace.to_owned(), name: name.to_owned() })?;
                let annotations = pod.metadata.annotations.as_ref()?;
                annotations.get(labels::ANNOTATION_MANIFEST).map(PathBuf::from)
            }
            "PriorityClass" => self.class_files.get(name).cloned(),
            _ => self.objects.file(kind, namespace, name).map(Path::to_owned),
        }
    }

    /// Returns true if some desired pods are unknown.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        self.folder_unread || self.api_unread || !self.unreadable_uids.is_empty()
    }

    /// Returns true if the source of this origin has not been listed yet.
    #[must_use]
    pub fn is_unread(&self, origin: Origin) -> bool {
        match origin {
            Origin::Api => self.api_unread,
            Origin::File => self.folder_unread,
        }
    }

    /// Returns true if a running pod of a manifest that is not in `pods` may be stopped. `manifest` is the
    /// pod's file, from its annotation ([`super::ANNOTATION_MANIFEST`]).
    #[must_use]
    pub fn may_remove(&self, manifest: Option<&Path>) -> bool {
        let is_known = !self.folder_unread && !self.without_folder;
        is_known && manifest.is_none_or(|file| !self.unreadable.contains(file))
    }

    /// Returns true if the running pod with this UID, of any origin, may be stopped.
    #[must_use]
    pub fn may_remove_of(&self, origin: Origin, uid: &str, manifest: Option<&Path>) -> bool {
        match origin {
            Origin::Api => !self.api_unread && !self.unreadable_uids.contains(uid),
            Origin::File => self.may_remove(manifest),
        }
    }
}

/// Joins all objects. If only one source has any, as usual, its set is not copied.
fn joined_objects<'a>(sources: impl Iterator<Item = &'a Arc<Objects>>) -> Arc<Objects> {
    let some: Vec<&Arc<Objects>> = sources.filter(|objects| !objects.is_empty()).collect();
    if let [only] = some.as_slice() {
        return Arc::clone(only);
    }
    let mut all = Objects::default();
    some.into_iter().for_each(|objects| all.add_missing(objects));
    Arc::new(all)
}

#[cfg(test)]
mod tests {
    use beelet_policy::pod::references::{Kind, Reference};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    fn wanting(name: &str) -> Desired {
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let pod = Pod { metadata, ..Pod::default() };
        let key = PodName { namespace: "default".to_owned(), name: name.to_owned() };
        Desired { pods: BTreeMap::from([(key, Arc::new(pod))]), ..Desired::default() }
    }

    fn objects(unread: &[&str]) -> Arc<Objects> {
        let mut objects = Objects::default();
        for name in unread {
            let (namespace, name) = ("default".to_owned(), (*name).to_owned());
            objects.add_unread(Reference { kind: Kind::ConfigMap, namespace, name });
        }
        Arc::new(objects)
    }

    #[test]
    fn two_are_the_same_by_content_and_differ_by_each_field() {
        let one = wanting("a");
        assert_eq!(one, wanting("a"), "other pods in memory, with the same content");
        let with = |change: fn(&mut Desired)| {
            let mut other = wanting("a");
            change(&mut other);
            other
        };
        let others = [
            wanting("b"),
            with(|other| other.pods.clear()),
            with(|other| other.pods.values_mut().for_each(|pod| *pod = Arc::new(Pod::default()))),
            with(|other| {
                let (file, message) = (PathBuf::from("/m/x"), "no YAML".to_owned());
                other.rejected.push(RejectedManifest { file, message });
            }),
            with(|other| {
                other.unreadable.insert(PathBuf::from("/m/x"));
            }),
            with(|other| {
                other.unreadable_uids.insert("u".to_owned());
            }),
            with(|other| other.folder_unread = true),
            with(|other| other.api_unread = true),
            with(|other| other.without_folder = true),
            with(|other| other.node = Some(Arc::new(NodeView::default()))),
            with(|other| other.objects = objects(&["m"])),
            with(|other| {
                other.put_back.insert("u".to_owned(), 1);
            }),
            with(|other| drop(other.class_files.insert("high".to_owned(), PathBuf::from("/m/c")))),
            with(|other| other.earlier_statuses = Arc::new([("u".to_owned(), Arc::default())].into())),
        ];
        for (n, other) in others.iter().enumerate() {
            assert_ne!(one, *other, "{n}");
        }
    }

    #[test]
    fn a_pod_of_the_api_server_that_can_not_be_read_is_left_alone_and_no_other() {
        let desired = Desired { unreadable_uids: ["u".to_owned()].into(), ..Desired::default() };
        let joined = Desired::joined(&[Arc::new(Desired::default()), Arc::new(desired)]);
        assert!(joined.is_incomplete());
        assert!(!joined.may_remove_of(Origin::Api, "u", None));
        assert!(joined.may_remove_of(Origin::Api, "v", None));
        assert!(joined.may_remove_of(Origin::File, "u", None));
    }

    #[test]
    fn the_objects_of_one_source_are_not_copied_and_those_of_two_are_joined() {
        let with =
            |objects: &Arc<Objects>| Arc::new(Desired { objects: Arc::clone(objects), ..Desired::default() });
        let (none, m) = (objects(&[]), objects(&["m"]));
        assert!(Desired::joined(&[with(&none), with(&none)]).objects.is_empty());
        assert!(Arc::ptr_eq(&Desired::joined(&[with(&none), with(&m)]).objects, &m));
        let both = Desired::joined(&[with(&objects(&["n"])), with(&m)]);
        assert_eq!(both.objects, objects(&["m", "n"]));
    }
}
