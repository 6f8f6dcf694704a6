//! What should run on the node: made by a source of pods, read by their manager.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use beelet_policy::node_fit::NodeView;
use k8s_openapi::api::core::v1::Pod;

use crate::labels;
use crate::objects::Objects;
use crate::origin::Origin;
use crate::table::{PodName, RejectedManifest};

/// The pods that should run: by the folder's manifests, by the API server, or by both.
///
/// A manifest that becomes invalid takes nothing away: while the agent runs, the pod of its last valid
/// content stays in `pods`. After a restart there is no such content, so the file is in `unreadable`, and a
/// pod that runs from it must be left alone: ask [`Desired::may_remove`] before a pod that isn't in `pods` is
/// stopped.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Desired {
    /// Complete, valid pods with their identity on this node and their priority.
    pub pods: BTreeMap<PodName, Arc<Pod>>,
    /// What became no pod, and why. A file can be here and its earlier pod in `pods`.
    pub rejected: Vec<RejectedManifest>,
    /// Manifests that are there, but whose pod isn't known: never valid since the agent started.
    pub unreadable: BTreeSet<PathBuf>,
    /// The folder itself couldn't be read (or was never there since the agent started): `pods` may lack pods
    /// that should run.
    pub folder_unread: bool,
    /// The API server has not said yet which pods it assigns to this node: `pods` may lack some of them.
    pub api_unread: bool,
    /// No folder is configured. What runs from a file of an earlier configuration is left alone.
    pub without_folder: bool,
    /// The node as the API server has it, as far as pods may choose it.
    pub node: Option<Arc<NodeView>>,
    /// What pods refer to by name: ConfigMaps, Secrets, RuntimeClasses.
    pub objects: Arc<Objects>,
    /// How often a pod's manifest was deleted and put back, by UID, where that ends the pod that ran by it.
    pub put_back: BTreeMap<String, u64>,
    /// The files of priority classes, by name.
    pub class_files: BTreeMap<String, PathBuf>,
}

impl Desired {
    /// Joins what several sources want. If two name the same pod or object, the first source counts.
    #[must_use]
    pub fn joined(sources: &[Arc<Self>]) -> Self {
        let mut all = Self::default();
        let mut objects = Objects::default();
        for one in sources {
            for (name, pod) in &one.pods {
                all.pods.entry(name.clone()).or_insert_with(|| Arc::clone(pod));
            }
            all.rejected.extend(one.rejected.iter().cloned());
            all.unreadable.extend(one.unreadable.iter().cloned());
            all.put_back.extend(one.put_back.clone());
            all.folder_unread |= one.folder_unread;
            all.api_unread |= one.api_unread;
            all.without_folder |= one.without_folder;
            all.node = all.node.or_else(|| one.node.clone());
            objects.add_missing(&one.objects);
            for (name, file) in &one.class_files {
                all.class_files.entry(name.clone()).or_insert_with(|| file.clone());
            }
        }
        all.objects = Arc::new(objects);
        all
    }

    /// The file that describes an object, if any does: `kind` as it is written, a pod's name as on this node.
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

    /// Returns true if not all that should run is known.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        self.folder_unread || self.api_unread
    }

    /// Returns true if a running pod of a manifest that isn't in `pods` may be stopped. `manifest` is the
    /// file it was made from, by its annotation ([`super::ANNOTATION_MANIFEST`]).
    #[must_use]
    pub fn may_remove(&self, manifest: Option<&Path>) -> bool {
        let is_known = !self.folder_unread && !self.without_folder;
        is_known && manifest.is_none_or(|file| !self.unreadable.contains(file))
    }

    /// The same for a running pod of any origin.
    #[must_use]
    pub fn may_remove_of(&self, origin: Origin, manifest: Option<&Path>) -> bool {
        match origin {
            Origin::Api => !self.api_unread,
            Origin::File => self.may_remove(manifest),
        }
    }
}
