//! The published state of all pods: an immutable value, replaced at each change and shared by reference. Two
//! tables share their equal parts, so that building a new one, and comparing it with the previous one, costs
//! as much as the change, regardless of the number of pods. Readers hold a `watch::Receiver<Arc<PodTable>>`
//! and never see half a change.

use std::{fmt, path::PathBuf, sync::Arc};

use beelet_units::selector::Selector;
use imbl::ordmap::DiffItem;
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use tokio::sync::SetOnce;

use crate::{ended::Ended, failure::Refusal};

/// Full name of a pod, unique on a node. Prints as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodName {
    /// Namespace of the pod; `default` if the manifest names none.
    pub namespace: String,
    /// Name of the pod; static pods have the node's name as suffix.
    pub name: String,
}

impl PodName {
    /// Returns the name in a pod's metadata; a missing name is empty, a missing namespace `default`.
    pub fn of(pod: &Pod) -> Self {
        let meta = &pod.metadata;
        Self {
            namespace: meta.namespace.clone().unwrap_or_else(|| "default".to_owned()),
            name: meta.name.clone().unwrap_or_default(),
        }
    }
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Set once the table has all running pods. Before that a missing pod may only be unobserved.
pub type Complete = Arc<SetOnce<()>>;

/// Pods by name.
pub type Pods = imbl::OrdMap<PodName, Arc<PodEntry>>;

/// Difference between two [`Pods`].
#[derive(Debug, Default)]
pub struct PodChanges<'a> {
    /// New or changed pods, in their new state.
    pub changed: Vec<(&'a PodName, &'a Arc<PodEntry>)>,
    /// Removed pods, in their last state.
    pub gone: Vec<(&'a PodName, &'a Arc<PodEntry>)>,
}

impl<'a> PodChanges<'a> {
    /// Computes the difference from `before` to `now`, without visiting shared parts.
    #[must_use]
    pub fn between(before: &'a Pods, now: &'a Pods) -> Self {
        let mut changes = Self::default();
        for item in before.diff(now) {
            match item {
                DiffItem::Add(name, entry) | DiffItem::Update { new: (name, entry), .. } => {
                    changes.changed.push((name, entry));
                }
                DiffItem::Remove(name, entry) => changes.gone.push((name, entry)),
            }
        }
        changes
    }
}

/// All pods of the node, and the rejected manifests.
#[derive(Clone, Debug, Default)]
pub struct PodTable {
    /// All pods, terminating ones included. An unchanged entry keeps its `Arc`.
    pub pods: Pods,
    /// Rejected manifests, with the reason.
    pub rejected: Arc<Vec<RejectedManifest>>,
}

impl PodTable {
    /// Returns the visible pods: the waiting successor replaces a pod that was deleted by force.
    pub fn shown(&self) -> impl Iterator<Item = (&PodName, &Arc<PodEntry>)> {
        self.pods.iter().filter_map(|(name, entry)| Some((name, PodEntry::shown(entry)?)))
    }

    /// Returns the pods with matching labels. An empty namespace means any.
    pub fn chosen(
        &self,
        namespace: &str,
        selector: &Selector,
    ) -> impl Iterator<Item = (&PodName, &Arc<PodEntry>)> {
        self.pods.iter().filter(move |(name, entry)| {
            (namespace.is_empty() || name.namespace == namespace)
                && selector.matches(entry.pod.metadata.labels.as_ref())
        })
    }

    /// Finds a pod by its whole name, or by its manifest's name without the node's suffix. An empty namespace
    /// means any.
    ///
    /// # Errors
    /// Fails if no pod or several pods match.
    pub fn find(&self, namespace: &str, name: &str) -> Result<(&PodName, &Arc<PodEntry>), FindError> {
        let of_namespace = |known: &&PodName| namespace.is_empty() || known.namespace == namespace;
        let is_meant = |known: &PodName, entry: &PodEntry| entry.is_called(known, name);
        let mut found: Vec<_> =
            self.pods.iter().filter(|(known, entry)| of_namespace(known) && is_meant(known, entry)).collect();
        // A whole name has precedence over another pod's short name.
        if found.iter().any(|(known, _)| known.name == name) {
            found.retain(|(known, _)| known.name == name);
        }
        match found.as_slice() {
            [one] => Ok(*one),
            [] => Err(FindError::NoPod(name.to_owned())),
            [(first, _), (second, _), ..] => Err(FindError::Several {
                name: name.to_owned(),
                first: (*first).clone(),
                second: (*second).clone(),
            }),
        }
    }
}

/// Error of the search for a pod by name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    /// No pod has this name.
    #[error("pod {0:?} not found; `beelet get pods` lists all pods")]
    NoPod(String),
    /// Several pods match.
    #[error("{name:?} may be {first} or {second}: choose one with `--namespace`")]
    Several {
        /// Searched name.
        name: String,
        /// A match.
        first: PodName,
        /// Another match.
        second: PodName,
    },
}

/// A pod with its status, and state that a `v1.Pod` has no field for.
#[derive(Clone, Debug, PartialEq)]
pub struct PodEntry {
    /// Spec and status, as the kubelet serves it.
    pub pod: Pod,
    /// Last readiness change that a kernel event caused.
    pub readiness_edge: Option<ReadinessEdge>,
    /// Network namespace of the pod; `None` for host network pods and before the sandbox runs.
    pub netns: Option<PathBuf>,
    /// True for a terminating or terminated pod: deleted, or ended permanently (evicted, preempted, past its
    /// deadline, rejected).
    pub ending: bool,
    /// True if the pod was terminated, and all containers have ended.
    pub stopped: bool,
    /// True if the pod was terminated, and has released everything: containers, volumes, cgroup.
    pub cleared: bool,
    /// True if the pod was deleted by force: it is hidden while its remains are stopped.
    pub abandoned: bool,
    /// Pod with the same name that waits for the end of this one, which was deleted by force.
    pub successor: Option<Arc<Self>>,
    /// Condition for another try, if the pod was rejected.
    pub refusal: Option<Refusal>,
}

/// Every entry equals itself, since no part of a pod is a floating-point number. So two pointers to the same
/// entry are equal without comparing their contents.
impl Eq for PodEntry {}

impl PodEntry {
    /// Creates an entry from the object alone.
    #[must_use]
    pub fn of(pod: Pod) -> Self {
        let ending = pod.metadata.deletion_timestamp.is_some();
        Self {
            pod,
            readiness_edge: None,
            netns: None,
            ending,
            stopped: false,
            cleared: false,
            abandoned: false,
            successor: None,
            refusal: None,
        }
    }

    /// Returns the visible entry under the pod's name, if any.
    #[must_use]
    pub fn shown(entry: &Arc<Self>) -> Option<&Arc<Self>> {
        if entry.abandoned { entry.successor.as_ref() } else { Some(entry) }
    }

    /// Returns the proof that no container of the pod runs any more. A terminated pod may still have volumes
    /// and a cgroup.
    #[must_use]
    pub fn ended(&self) -> Option<Ended> {
        Ended::of(self.pod.status.as_ref(), self.stopped || self.cleared)
    }

    /// Returns the proof that the pod's room is free: it has released everything, or ended by itself before
    /// it was terminated.
    #[must_use]
    pub fn gone(&self) -> Option<Ended> {
        self.ended().filter(|_| self.cleared || !self.ending)
    }

    /// Returns true if the pod's room is free.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.gone().is_some()
    }

    /// Returns true if `name` may mean this pod: its whole name, or its manifest's without the node's suffix.
    #[must_use]
    pub fn is_called(&self, whole: &PodName, name: &str) -> bool {
        let node = self.pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
        let short = whole.name.strip_suffix(&node.to_lowercase()).and_then(|short| short.strip_suffix('-'));
        whole.name == name || short == Some(name)
    }
}

/// A readiness change that the kernel reported. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadinessEdge {
    /// Container with the change.
    pub container: String,
    /// New readiness.
    pub ready: bool,
    /// Time of the listener's change in the kernel.
    pub kernel_ns: u64,
    /// Time at which the changed status was published.
    pub published_ns: u64,
}

/// A manifest that could not become a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedManifest {
    /// File in the static pod folder.
    pub file: PathBuf,
    /// Line and column if known, the field, the cause.
    pub message: String,
}

impl RejectedManifest {
    /// Returns one line per reason, each with the file's whole path, which the message abbreviates to its
    /// name.
    #[must_use]
    pub fn reasons(&self) -> Vec<String> {
        let path = self.file.display().to_string();
        let name = self.file.file_name().unwrap_or_default().to_string_lossy();
        let one = |line: &str| match line.strip_prefix(&*name) {
            Some(rest) if rest.starts_with(':') => format!("{path}{rest}"),
            _ if line.starts_with(&format!("{path}:")) => line.to_owned(),
            _ => format!("{path}: {line}"),
        };
        self.message.lines().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_reason_of_a_rejected_manifest_is_a_line_that_names_the_path_once() {
        let check = |message: &str, expected: &[&str]| {
            let rejected = RejectedManifest { file: "/m/web.yaml".into(), message: message.to_owned() };
            assert_eq!(rejected.reasons(), expected);
        };
        check(
            "web.yaml:3:1: metadata.name: must be set\nweb.yaml: and 3 more",
            &["/m/web.yaml:3:1: metadata.name: must be set", "/m/web.yaml: and 3 more"],
        );
        check("/m/web.yaml: was taken away", &["/m/web.yaml: was taken away"]);
        check("3:1: not a pod", &["/m/web.yaml: 3:1: not a pod"]);
    }

    #[test]
    fn one_that_was_deleted_by_force_is_seen_no_more_but_the_one_that_waits_for_it_is() {
        let entry = |uid: &str| {
            let pod = json!({"metadata": {"name": "web", "uid": uid}, "spec": {"containers": []}});
            PodEntry::of(serde_json::from_value(pod).unwrap())
        };
        let check = |entry: PodEntry, expected: Option<&str>| {
            let name = PodName::of(&entry.pod);
            let table = PodTable { pods: Pods::unit(name, Arc::new(entry)), ..PodTable::default() };
            let seen: Vec<_> =
                table.shown().filter_map(|(_, entry)| entry.pod.metadata.uid.as_deref()).collect();
            assert_eq!(seen, expected.into_iter().collect::<Vec<_>>());
        };
        check(entry("1"), Some("1"));
        let abandoned = PodEntry { abandoned: true, ..entry("1") };
        check(abandoned.clone(), None);
        check(PodEntry { successor: Some(Arc::new(entry("2"))), ..abandoned }, Some("2"));
    }

    #[test]
    fn a_pod_that_was_ended_is_gone_once_it_has_given_everything_back() {
        let entry = |phase: &str| {
            let pod =
                json!({"metadata": {"uid": "1"}, "spec": {"containers": []}, "status": {"phase": phase}});
            PodEntry::of(serde_json::from_value(pod).unwrap())
        };
        assert!(!entry("Running").is_gone() && entry("Succeeded").is_gone());
        let stopped = PodEntry { ending: true, stopped: true, ..entry("Failed") };
        assert!(!stopped.is_gone(), "the pod may still have volumes");
        assert!(stopped.ended().is_some(), "and yet nothing of it runs");
        assert!(PodEntry { cleared: true, ..stopped }.is_gone());
    }

    #[test]
    fn what_changed_between_two_tables_is_found_among_what_both_share() {
        let entry = |uid: u32| {
            let pod = json!({"metadata": {"uid": uid.to_string()}, "spec": {"containers": []}});
            Arc::new(PodEntry::of(serde_json::from_value(pod).unwrap()))
        };
        let name = |n: u32| PodName { namespace: "default".to_owned(), name: format!("pod{n:04}") };
        let before: Pods = (0..1000).map(|n| (name(n), entry(n))).collect();
        let mut now = before.clone();
        now.insert(name(7), entry(1007));
        now.insert(name(1000), entry(1000));
        now.remove(&name(999));
        // Inserting the same entry again changes nothing.
        let same = Arc::clone(&now[&name(500)]);
        now.insert(name(500), same);
        let changes = PodChanges::between(&before, &now);
        let names =
            |found: Vec<(&PodName, _)>| found.into_iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(names(changes.changed), [name(7), name(1000)]);
        assert_eq!(names(changes.gone), [name(999)]);
        assert!(PodChanges::between(&now, &now.clone()).changed.is_empty());
    }

    #[test]
    fn pods_are_found_by_their_manifests_name_too() {
        let mut table = PodTable::default();
        for (namespace, name) in
            [("a", "web-n1"), ("b", "web-n1"), ("a", "db-n1"), ("a", "db"), ("a", "x-n1-n1")]
        {
            let pod = json!({"metadata": {"namespace": namespace, "name": name}, "spec": {"nodeName": "N1", "containers": []}});
            let pod: Pod = serde_json::from_value(pod).unwrap();
            let entry = PodEntry::of(pod);
            table.pods.insert(PodName::of(&entry.pod), Arc::new(entry));
        }
        let check = |namespace: &str, name: &str, expected: Result<&str, &str>| match (
            table.find(namespace, name),
            expected,
        ) {
            (Ok((found, _)), Ok(expected)) => assert_eq!(found.to_string(), expected),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, _) => panic!("{namespace} {name}: {found:?}"),
        };
        check("a", "web", Ok("a/web-n1"));
        check("b", "web-n1", Ok("b/web-n1"));
        check("", "web", Err("may be a/web-n1 or b/web-n1"));
        check("", "db", Ok("a/db"));
        check("", "db-n1", Ok("a/db-n1"));
        check("", "x-n1", Ok("a/x-n1-n1"));
        check("b", "db", Err("pod \"db\" not found"));
        check("", "w", Err("pod \"w\" not found"));
    }
}
