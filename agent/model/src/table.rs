//! What the node runs, as everyone else sees it: one value, replaced whole at each change and shared by
//! reference. Two of them share all that is the same in both, so that a new one costs what has changed, and
//! so does comparing it with the one before, however many pods there are. Readers hold a
//! `watch::Receiver<Arc<PodTable>>` and never see half a change.

use std::{fmt, path::PathBuf, sync::Arc};

use beelet_units::selector::Selector;
use imbl::ordmap::DiffItem;
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use tokio::sync::SetOnce;

use crate::{ended::Ended, failure::Refusal};

/// A pod's full name, unique on a node. Prints as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodName {
    /// The pod's namespace; `default` where the manifest names none.
    pub namespace: String,
    /// The pod's name, with the node's name behind it for static pods.
    pub name: String,
}

impl PodName {
    /// The name in a pod's metadata; a missing name is empty, a missing namespace `default`.
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

/// Set once all that runs is in the table. Before that a pod that is missing in it may only not have been
/// looked at.
pub type Complete = Arc<SetOnce<()>>;

/// Pods by name.
pub type Pods = imbl::OrdMap<PodName, Arc<PodEntry>>;

/// What is different between two [`Pods`].
#[derive(Debug, Default)]
pub struct PodChanges<'a> {
    /// Those that are new or not the same any more, as they are now.
    pub changed: Vec<(&'a PodName, &'a Arc<PodEntry>)>,
    /// Those that are gone, as they were.
    pub gone: Vec<(&'a PodName, &'a Arc<PodEntry>)>,
}

impl<'a> PodChanges<'a> {
    /// What came and went from `before` to `now`; what both share is passed over.
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

/// All pods of the node, and the manifests that could not become one.
#[derive(Clone, Debug, Default)]
pub struct PodTable {
    /// Every pod, terminating ones included. An entry stays the same `Arc` while nothing in it changes.
    pub pods: Pods,
    /// Manifests that could not be read, with the reason.
    pub rejected: Arc<Vec<RejectedManifest>>,
}

impl PodTable {
    /// The pods that people see: in the place of one that was deleted by force, the pod that waits for it.
    pub fn shown(&self) -> impl Iterator<Item = (&PodName, &Arc<PodEntry>)> {
        self.pods.iter().filter_map(|(name, entry)| Some((name, PodEntry::shown(entry)?)))
    }

    /// The pods with such labels. An empty namespace means any.
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

    /// The pod that somebody calls `name`: by its whole name, or by its manifest's, without the node's name
    /// at its end. An empty namespace means any.
    ///
    /// # Errors
    /// There is none, or more than one.
    pub fn find(&self, namespace: &str, name: &str) -> Result<(&PodName, &Arc<PodEntry>), FindError> {
        let of_namespace = |known: &&PodName| namespace.is_empty() || known.namespace == namespace;
        let is_meant = |known: &PodName, entry: &PodEntry| entry.is_called(known, name);
        let mut found: Vec<_> =
            self.pods.iter().filter(|(known, entry)| of_namespace(known) && is_meant(known, entry)).collect();
        // A whole name goes before another pod's short one.
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

/// Why no pod is the one that a person named.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    /// No pod is called so.
    #[error("there is no pod {0:?}; `beelet get pods` shows all")]
    NoPod(String),
    /// More than one is.
    #[error("{name:?} may be {first} or {second}: say which by --namespace")]
    Several {
        /// What was asked for.
        name: String,
        /// One of them.
        first: PodName,
        /// Another one.
        second: PodName,
    },
}

/// A pod with its status, and what a `v1.Pod` has no field for.
#[derive(Clone, Debug, PartialEq)]
pub struct PodEntry {
    /// Spec and status, as the kubelet serves it.
    pub pod: Pod,
    /// The last readiness change that a kernel event caused.
    pub readiness_edge: Option<ReadinessEdge>,
    /// The pod's network namespace; `None` for host network pods and before the sandbox runs.
    pub netns: Option<PathBuf>,
    /// It is on its way out, or out: deleted, or ended for good (evicted, preempted, past its deadline,
    /// refused).
    pub ending: bool,
    /// It was ended, and nothing of it runs any more.
    pub stopped: bool,
    /// It was ended, and has given back everything that it had: containers, volumes, cgroup.
    pub cleared: bool,
    /// It was deleted by force: it is not shown to people any more, while what is left of it is ended.
    pub abandoned: bool,
    /// The pod of the same name that waits until this one, which was deleted by force, is gone.
    pub successor: Option<Arc<Self>>,
    /// Says when another try may succeed, if the pod was not let in.
    pub refusal: Option<Refusal>,
}

/// Every entry equals itself: no part of a pod is a floating-point number. With it two pointers to the same
/// entry are equal without a look at it.
impl Eq for PodEntry {}

impl PodEntry {
    /// A pod of which nothing is known but what the object says.
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

    /// What people see under the pod's name, if anything.
    #[must_use]
    pub fn shown(entry: &Arc<Self>) -> Option<&Arc<Self>> {
        if entry.abandoned { entry.successor.as_ref() } else { Some(entry) }
    }

    /// The proof that nothing of it runs any more. One that was ended may still have volumes and a cgroup.
    #[must_use]
    pub fn ended(&self) -> Option<Ended> {
        Ended::of(self.pod.status.as_ref(), self.stopped || self.cleared)
    }

    /// The proof that its room is free: it has given everything back, or ended by itself before anybody told
    /// it to.
    #[must_use]
    pub fn gone(&self) -> Option<Ended> {
        self.ended().filter(|_| self.cleared || !self.ending)
    }

    /// Returns true if its room is free.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.gone().is_some()
    }

    /// Returns true if somebody who says `name` may mean this pod: it is its whole name, or its manifest's,
    /// without the node's name at its end.
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
    /// The container whose readiness changed.
    pub container: String,
    /// What it changed to.
    pub ready: bool,
    /// When the kernel saw the listener come or go.
    pub kernel_ns: u64,
    /// When the status that says so was published.
    pub published_ns: u64,
}

/// A manifest that could not become a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedManifest {
    /// The file in the static pod folder.
    pub file: PathBuf,
    /// Line and column where known, the field, the cause.
    pub message: String,
}

impl RejectedManifest {
    /// A line for each reason, each with the file's whole path, which the message abbreviates to its name.
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
            "web.yaml:3:1: metadata.name: must be there\nweb.yaml: and 3 more",
            &["/m/web.yaml:3:1: metadata.name: must be there", "/m/web.yaml: and 3 more"],
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
        assert!(!stopped.is_gone(), "it may still have volumes");
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
        // The same once more is no change.
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
        check("b", "db", Err("there is no pod \"db\""));
        check("", "w", Err("there is no pod"));
    }
}
