//! The pods that the API server assigns to this node: the API server's objects, and the pods to run that
//! follow from these.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use beelet_codec::ApiType;
use beelet_model::{
    desired::{Desired, EarlierStatuses},
    labels::{ANNOTATION_HASH, ANNOTATION_SEEN, ANNOTATION_SOURCE, SOURCE_API},
    status::has_ended,
    table::PodName,
};
use beelet_policy::{node::fit::NodeView, pod::mirror};
use beelet_state::events::{Object, Recorder};
use imbl::OrdMap;
use k8s_openapi::api::core::v1 as core;
use serde_json::Value;
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::{
    client::{Client, Error},
    url::field_selector,
    watch::{Collection, Sink, key_of},
};

/// Prefix of the agent's own annotations. They are removed from pods of the API server, except those in
/// [`USERS`].
const OWN: &str = "beelet.dev/";
/// Annotations with the prefix [`OWN`] that a pod's author sets.
const USERS: &[&str] = &[beelet_policy::probe::settings::POD_ANNOTATION];

/// An assigned pod.
#[derive(Clone, Debug)]
pub(crate) struct Pod {
    /// The API server's object.
    pub(crate) object: Arc<core::Pod>,
    /// The pod to run; None for the mirror of a static pod.
    pub(crate) wanted: Option<Arc<core::Pod>>,
}

/// All assigned pods. None before the first list. Copies share unchanged parts.
pub(crate) type Pods = Option<OrdMap<PodName, Pod>>;

/// The assigned pods without mirrors.
#[derive(Debug, Default)]
pub(crate) struct Assignment {
    /// The pods to run.
    pub(crate) pods: BTreeMap<PodName, Arc<core::Pod>>,
    /// UIDs of the pods that can't be read and were unknown before: their running containers are left alone.
    pub(crate) unreadable: BTreeSet<String>,
    /// Statuses in the first list since the agent's start, by UID.
    pub(crate) earlier_statuses: EarlierStatuses,
}

/// The assignment. None before the first list.
pub(crate) type Wanted = Option<Arc<Assignment>>;

/// Returns the collection of this node's pods.
pub(crate) fn collection(node: &str) -> Collection {
    let field = Some(("spec.nodeName", node.to_owned()));
    Collection { path: "/api/v1/pods".to_owned(), field, streamed: false }
}

/// Returns the pods that the API server assigns to a node, from a single list: for commands.
///
/// # Errors
/// See [`Error`]. An answer without a list, or with a pod that cannot be read, is an error too.
pub async fn pods_of(client: &Client, node: &str) -> Result<Vec<core::Pod>, Error> {
    let path = format!("/api/v1/pods?{}", field_selector("spec.nodeName", node));
    let answer = client.get(&path).await?;
    // Go also encodes an empty list as null.
    let items = answer.get("items").filter(|items| items.is_array() || items.is_null());
    let items = items.ok_or_else(|| Error::unreachable(&path, &"the answer has no list of pods"))?.as_array();
    let read = |item: &Value| {
        let (namespace, name) = key_of(item);
        core::Pod::from_value(item).map_err(|cause| {
            Error::unreachable(&path, &format_args!("cannot read pod {namespace}/{name}: {cause}"))
        })
    };
    items.into_iter().flatten().map(read).collect()
}

/// Returns the desired pods of an assignment.
pub(crate) fn desired(wanted: &Wanted) -> Desired {
    match wanted {
        Some(wanted) => Desired {
            pods: wanted.pods.clone(),
            unreadable_uids: wanted.unreadable.clone(),
            earlier_statuses: Arc::clone(&wanted.earlier_statuses),
            ..Desired::default()
        },
        None => Desired { api_unread: true, ..Desired::default() },
    }
}

/// Returns the node's properties that pods can select.
pub(crate) fn view(node: &core::Node) -> NodeView {
    NodeView {
        name: node.metadata.name.clone().unwrap_or_default(),
        labels: node.metadata.labels.clone().unwrap_or_default(),
        taints: node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default(),
        strict_groups: node
            .status
            .as_ref()
            .and_then(|status| status.features.as_ref()?.supplemental_groups_policy)
            .unwrap_or(false),
    }
}

/// Collects the watched pods and publishes them.
pub(crate) struct Assigned {
    node: String,
    pods: OrdMap<PodName, Pod>,
    /// UIDs of this node's pods that can't be read and were unknown before.
    unreadable: BTreeSet<String>,
    /// Statuses in the first list, by UID.
    earlier_statuses: EarlierStatuses,
    out: watch::Sender<Pods>,
    /// Sent only if a pod to run changes: most events are echoes of this node's statuses.
    wanted: watch::Sender<Wanted>,
    events: Recorder,
    /// Number of pods that an earlier run of the agent knew.
    remembered: usize,
    /// True if the last list was unexpectedly empty.
    doubtful: bool,
}

impl Assigned {
    pub(crate) fn new(
        node: String,
        (out, wanted): (watch::Sender<Pods>, watch::Sender<Wanted>),
        events: Recorder,
        remembered: usize,
    ) -> Self {
        let (pods, unreadable, earlier_statuses) = Default::default();
        Self { node, pods, unreadable, earlier_statuses, out, wanted, events, remembered, doubtful: false }
    }

    fn publish(&self, is_other_wanted: bool) {
        self.out.send_replace(Some(self.pods.clone()));
        if is_other_wanted {
            let wanted = self.pods.iter().filter_map(|(name, pod)| Some((name.clone(), pod.wanted.clone()?)));
            self.wanted.send_replace(Some(Arc::new(Assignment {
                pods: wanted.collect(),
                unreadable: self.unreadable.clone(),
                earlier_statuses: Arc::clone(&self.earlier_statuses),
            })));
        }
    }

    /// Returns true if a list is credible. A list that removes every pod must come twice: the API server may
    /// have been restored from a backup, and right after a restart the agent does not know yet which pods
    /// run.
    fn is_credible(&mut self, listed: &OrdMap<PodName, Pod>) -> bool {
        let own = |pods: &OrdMap<PodName, Pod>| pods.values().filter(|pod| pod.wanted.is_some()).count();
        let first = self.out.borrow().is_none();
        let before = if first { self.remembered } else { own(&self.pods) };
        let empty = own(listed) == 0 && (before > 0 || first);
        let doubtful = std::mem::replace(&mut self.doubtful, empty);
        if !empty {
            return true;
        }
        if before > 0 {
            let message = if doubtful {
                format!(
                    "the API server assigns no pod to this node in a second list: terminating {before} pods"
                )
            } else {
                format!(
                    "the API server assigns no pod to this node, {before} before; listing once more before terminating \
                     them (was the API server restored from a backup?)"
                )
            };
            error!(node = self.node, "{message}");
            self.events.warning(Object::node(&self.node), "NoPodsAssigned", message);
        }
        doubtful
    }

    fn of_uid(&self, uid: &str) -> Option<(&PodName, &Pod)> {
        self.pods.iter().find(|(_, pod)| pod.object.metadata.uid.as_deref() == Some(uid))
    }

    fn read(&self, object: &Value) -> Option<(PodName, Pod)> {
        let read = core::Pod::from_value(object).map_err(|problem| problem.to_string());
        let pod = match read.and_then(|pod| unsound(&pod).map_or(Ok(pod), Err)) {
            Ok(pod) => pod,
            Err(why) => {
                let (namespace, name) = key_of(object);
                error!(
                    pod = format!("{namespace}/{name}"),
                    why, "cannot read a pod of the API server; leaving its running containers alone"
                );
                return None;
            }
        };
        let name = PodName::of(&pod);
        let known = self.pods.get(&name);
        let wanted = (!mirror::is_mirror(&pod)).then(|| {
            let wanted = wanted(&pod);
            // An unchanged pod keeps its address: subscribers compare addresses.
            let same = known.and_then(|known| known.wanted.clone()).filter(|known| **known == wanted);
            same.unwrap_or_else(|| Arc::new(wanted))
        });
        Some((name, Pod { object: Arc::new(pod), wanted }))
    }
}

impl Sink for Assigned {
    fn listed(&mut self, objects: Vec<Value>) -> bool {
        let (mut listed, mut unreadable) = (OrdMap::new(), BTreeSet::new());
        for object in &objects {
            if let Some((name, pod)) = self.read(object) {
                listed.insert(name, pod);
                continue;
            }
            // Only the UID identifies an unreadable pod. A list with an unidentified pod may not remove pods.
            let Some(uid) = uid_of(object) else { return false };
            match self.of_uid(uid) {
                Some((name, known)) => drop(listed.insert(name.clone(), known.clone())),
                None => drop(unreadable.insert(uid.to_owned())),
            }
        }
        if !self.is_credible(&listed) {
            return false;
        }
        self.unreadable = unreadable;
        if self.out.borrow().is_none() {
            self.earlier_statuses =
                Arc::new(listed.values().filter_map(|pod| status_of(&pod.object)).collect());
        }
        info!(
            node = self.node,
            pods = listed.len(),
            "received the list of this node's pods from the API server"
        );
        self.pods = listed;
        self.publish(true);
        true
    }

    fn applied(&mut self, object: &Value) {
        if let Some((name, pod)) = self.read(object) {
            let was_unreadable = uid_of(object).is_some_and(|uid| self.unreadable.remove(uid));
            let wanted = pod.wanted.clone();
            let before = self.pods.insert(name, pod).and_then(|before| before.wanted);
            // `read` reuses the known value if the pod is unchanged.
            let is_other = before.as_ref().map(Arc::as_ptr) != wanted.as_ref().map(Arc::as_ptr);
            self.publish(was_unreadable || is_other);
        } else if let Some(uid) = uid_of(object).filter(|uid| self.of_uid(uid).is_none()) {
            self.unreadable.insert(uid.to_owned());
            self.publish(true);
        }
    }

    fn deleted(&mut self, object: &Value) {
        // Only the UID counts: another pod of the same name may have replaced the deleted one.
        let uid = uid_of(object).unwrap_or_default();
        let known = self.of_uid(uid).map(|(name, pod)| (name.clone(), pod.wanted.is_some()));
        if let Some((name, is_wanted)) = known {
            self.pods.remove(&name);
            self.publish(is_wanted);
        } else if self.unreadable.remove(uid) {
            self.publish(true);
        } else {
            let (namespace, name) = key_of(object);
            warn!(pod = format!("{namespace}/{name}"), "the API server deleted an unknown pod");
        }
    }
}

/// Returns an object's UID, if present.
fn uid_of(object: &Value) -> Option<&str> {
    object["metadata"]["uid"].as_str().filter(|uid| !uid.is_empty())
}

/// Returns a pod's UID and status, if the pod has both.
fn status_of(pod: &core::Pod) -> Option<(String, Arc<core::PodStatus>)> {
    Some((pod.metadata.uid.clone()?, Arc::new(pod.status.clone()?)))
}

/// Returns the pod to run: without server-side metadata and the agent's own annotations, marked as an API
/// pod.
fn wanted(pod: &core::Pod) -> core::Pod {
    let mut pod = pod.clone();
    let metadata = &mut pod.metadata;
    (metadata.managed_fields, metadata.resource_version, metadata.self_link) = (None, None, None);
    let annotations = metadata.annotations.get_or_insert_default();
    let is_ours = |key: &str| {
        key.starts_with(OWN) && !USERS.contains(&key) || key == ANNOTATION_HASH || key == ANNOTATION_SEEN
    };
    annotations.retain(|key, _| !is_ours(key));
    annotations.insert(ANNOTATION_SOURCE.to_owned(), SOURCE_API.to_owned());
    // The API server is the authority for three parts of the status: that a pod has ended, the conditions of
    // its readiness gates, and the claims made for the pod.
    let status = pod.status.take();
    pod.status = status.and_then(|status| {
        if has_ended(Some(&status)) {
            return Some(status);
        }
        let gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
        let gates: BTreeSet<&str> = gates.map(|gate| gate.condition_type.as_str()).collect();
        let mut conditions = status.conditions.unwrap_or_default();
        conditions.retain(|condition| gates.contains(condition.type_.as_str()));
        let kept = core::PodStatus {
            conditions: (!conditions.is_empty()).then_some(conditions),
            resource_claim_statuses: status.resource_claim_statuses.filter(|claims| !claims.is_empty()),
            extended_resource_claim_status: status.extended_resource_claim_status,
            ..core::PodStatus::default()
        };
        (kept != core::PodStatus::default()).then_some(kept)
    });
    pod
}

/// Returns the reason why this node can't run a pod: names become folders.
fn unsound(pod: &core::Pod) -> Option<String> {
    let is_name = |text: &str| {
        let sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        !text.is_empty() && text.len() <= 253 && !text.starts_with('.') && text.chars().all(sound)
    };
    let metadata = &pod.metadata;
    let Some(spec) = &pod.spec else { return Some("the pod has no spec".to_owned()) };
    let of_pod = [&metadata.uid, &metadata.namespace, &metadata.name].into_iter();
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers).map(|c| c.name.as_str());
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| c.name.as_str());
    let volumes = spec.volumes.iter().flatten().map(|volume| volume.name.as_str());
    let of_pod = of_pod.map(|name| name.as_deref().unwrap_or_default());
    let mut all = of_pod.chain(containers).chain(ephemeral).chain(volumes);
    all.find(|name| !is_name(name)).map(|name| format!("{name:?} is not a name"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, uid: &str) -> Value {
        json!({
            "metadata": {
                "name": name, "namespace": "shop", "uid": uid, "resourceVersion": "1",
                "annotations": {
                    "beelet.dev/manifest": "/m", "beelet.dev/probes": "mode=connect",
                    "kubernetes.io/config.source": "file", "own": "x",
                },
            },
            "spec": {"containers": [{"name": "c"}]},
            "status": {"phase": "Running"},
        })
    }

    fn assigned() -> (Assigned, watch::Receiver<Pods>, watch::Receiver<Wanted>) {
        let ((out, pods), (wanted_out, wanted)) = (watch::channel(None), watch::channel(None));
        (Assigned::new("n1".to_owned(), (out, wanted_out), Recorder::default(), 0), pods, wanted)
    }

    fn uids(pods: &watch::Receiver<Pods>) -> Vec<String> {
        let pods = pods.borrow().clone().unwrap();
        pods.values().map(|pod| pod.object.metadata.uid.clone().unwrap()).collect()
    }

    #[test]
    fn a_pod_is_what_the_api_server_wants_and_not_what_it_says_of_this_node() {
        let (mut assigned, _, wanted) = assigned();
        assert!(desired(&wanted.borrow()).api_unread);
        assert!(assigned.listed(vec![pod("a", "u1")]));
        let desired = desired(&wanted.borrow());
        assert!(!desired.api_unread);
        let (name, a) = desired.pods.first_key_value().unwrap();
        assert_eq!(name.to_string(), "shop/a");
        let annotations = a.metadata.annotations.as_ref().unwrap();
        let kept = ["beelet.dev/probes", "kubernetes.io/config.source", "own"];
        assert_eq!(annotations.keys().collect::<Vec<_>>(), kept);
        assert_eq!(annotations[ANNOTATION_SOURCE], SOURCE_API);
        assert!(a.status.is_none() && a.metadata.resource_version.is_none());
    }

    #[test]
    fn a_status_alone_changes_nothing_that_is_wanted_unless_it_is_an_end() {
        let (mut assigned, mut pods, mut wanted) = assigned();
        assigned.listed(vec![pod("a", "u1")]);
        wanted.mark_unchanged();
        let mut changed = pod("a", "u1");
        changed["metadata"]["resourceVersion"] = json!("2");
        changed["status"]["phase"] = json!("Pending");
        pods.mark_unchanged();
        assigned.applied(&changed);
        assert!(pods.has_changed().unwrap() && !wanted.has_changed().unwrap());
        changed["status"]["phase"] = json!("Failed");
        assigned.applied(&changed);
        assert!(wanted.has_changed().unwrap());
        let pod = desired(&wanted.borrow()).pods.into_values().next().unwrap();
        assert!(has_ended(pod.status.as_ref()));
    }

    #[test]
    fn the_statuses_of_the_first_list_are_kept_and_no_later_ones() {
        let (mut assigned, _, wanted) = assigned();
        let phase = |wanted: &watch::Receiver<Wanted>| {
            let statuses = desired(&wanted.borrow()).earlier_statuses;
            statuses.iter().map(|(uid, status)| (uid.clone(), status.phase.clone())).collect::<Vec<_>>()
        };
        let expected = [("u1".to_owned(), Some("Running".to_owned()))];
        assigned.listed(vec![pod("a", "u1")]);
        assert_eq!(phase(&wanted), expected);
        let mut changed = pod("a", "u1");
        changed["status"]["phase"] = json!("Pending");
        assigned.listed(vec![changed, pod("b", "u2")]);
        assert_eq!(phase(&wanted), expected);
    }

    #[test]
    fn the_conditions_of_readiness_gates_are_wanted_and_no_others() {
        let (mut assigned, _, wanted) = assigned();
        let conditions = |wanted: &watch::Receiver<Wanted>| {
            let pod = desired(&wanted.borrow()).pods.into_values().next().unwrap();
            let conditions =
                pod.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
            conditions.into_iter().map(|one| (one.type_, one.status)).collect::<Vec<_>>()
        };
        let mut gated = pod("a", "u1");
        gated["spec"]["readinessGates"] = json!([{"conditionType": "shop/open"}]);
        assigned.listed(vec![gated.clone()]);
        assert_eq!(conditions(&wanted), []);
        for status in ["True", "False"] {
            gated["status"]["conditions"] =
                json!([{"type": "Ready", "status": "True"}, {"type": "shop/open", "status": status}]);
            assigned.applied(&gated);
            assert_eq!(conditions(&wanted), [("shop/open".to_owned(), status.to_owned())]);
        }
    }

    #[test]
    fn a_deletion_is_of_a_uid() {
        let (mut assigned, pods, wanted) = assigned();
        assigned.listed(vec![pod("a", "u1")]);
        assigned.applied(&pod("a", "u2"));
        assigned.deleted(&pod("a", "u1"));
        assert_eq!(uids(&pods), ["u2"]);
        let uids_wanted = || -> Vec<Option<String>> {
            let wanted = wanted.borrow();
            wanted.iter().flat_map(|all| all.pods.values()).map(|pod| pod.metadata.uid.clone()).collect()
        };
        assert_eq!(uids_wanted(), [Some("u2".to_owned())]);
        assigned.deleted(&pod("a", "u2"));
        assert!(uids(&pods).is_empty() && uids_wanted().is_empty());
    }

    #[test]
    fn a_list_that_takes_all_pods_away_is_believed_the_second_time() {
        let (mut assigned, pods, _) = assigned();
        assert!(!assigned.listed(Vec::new()));
        assert!(pods.borrow().is_none());
        assert!(assigned.listed(vec![pod("a", "u1")]));
        assert!(!assigned.listed(Vec::new()));
        assert_eq!(uids(&pods), ["u1"]);
        // Pods in the next list reset the suspicion: a later empty list must come twice again.
        assert!(assigned.listed(vec![pod("a", "u1")]));
        assert!(!assigned.listed(Vec::new()));
        assert!(assigned.listed(Vec::new()));
        assert!(uids(&pods).is_empty());
        // The node has no pods now: an empty list is credible at once.
        assert!(assigned.listed(Vec::new()));
    }

    #[test]
    fn names_that_lead_elsewhere_and_mirrors_are_not_wanted() {
        let (mut assigned, pods, wanted) = assigned();
        let mut mirror = pod("m", "u2");
        mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"] = json!("h");
        let mut container = pod("c", "u3");
        container["spec"]["containers"][0]["name"] = json!("../up");
        assigned.listed(vec![pod("../../etc", "u1"), pod("a", ".."), container, mirror, pod("b", "u4")]);
        assert_eq!(uids(&pods), ["u4", "u2"]);
        assert_eq!(desired(&wanted.borrow()).pods.len(), 1);
    }

    #[test]
    fn a_pod_that_can_not_be_read_is_as_it_was_and_ends_with_its_uid() {
        let (mut assigned, pods, wanted) = assigned();
        let broken = |uid: &str| {
            let mut broken = pod("a", uid);
            broken["spec"]["containers"] = json!("ok");
            broken
        };
        // After a restart the pod is unknown: its running containers are left alone.
        assert!(assigned.listed(vec![broken("u1"), pod("b", "u2")]));
        let unreadable = || desired(&wanted.borrow()).unreadable_uids.into_iter().collect::<Vec<_>>();
        assert_eq!((uids(&pods), unreadable()), (vec!["u2".to_owned()], vec!["u1".to_owned()]));
        assigned.applied(&pod("a", "u1"));
        assert_eq!((uids(&pods).len(), unreadable().len()), (2, 0));
        // A known pod keeps its last readable state, in events and in lists.
        assigned.applied(&broken("u1"));
        assert!(assigned.listed(vec![broken("u1"), pod("b", "u2")]));
        assert_eq!((uids(&pods), unreadable().len()), (vec!["u1".to_owned(), "u2".to_owned()], 0));
        // A list with an unreadable pod that has no UID changes nothing.
        let mut nameless = broken("u1");
        nameless["metadata"] = json!(null);
        assert!(!assigned.listed(vec![nameless]));
        assert_eq!(uids(&pods).len(), 2);
        // The UID alone identifies a deleted pod.
        assigned.deleted(&broken("u1"));
        assert_eq!(uids(&pods), ["u2"]);
        assigned.applied(&broken("u3"));
        assert_eq!(unreadable(), ["u3"]);
        assigned.deleted(&broken("u3"));
        assert_eq!((uids(&pods), unreadable().len()), (vec!["u2".to_owned()], 0));
    }

    #[test]
    fn a_mirror_that_comes_changes_or_goes_changes_nothing_that_is_wanted() {
        let (mut assigned, pods, mut wanted) = assigned();
        assigned.listed(vec![pod("a", "u1")]);
        wanted.mark_unchanged();
        let mut mirror = pod("m", "u2");
        mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"] = json!("h");
        assigned.applied(&mirror);
        assert_eq!(uids(&pods), ["u1", "u2"]);
        mirror["status"]["phase"] = json!("Succeeded");
        assigned.applied(&mirror);
        assigned.deleted(&mirror);
        assert!(uids(&pods) == ["u1"] && !wanted.has_changed().unwrap());
        // A pod that replaces a mirror is wanted.
        assigned.applied(&mirror);
        assigned.applied(&pod("m", "u3"));
        assert_eq!(desired(&wanted.borrow_and_update()).pods.len(), 2);
    }
}
