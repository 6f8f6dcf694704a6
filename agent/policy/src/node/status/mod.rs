//! The Node object of this machine: the values for its registration, the corrections to an existing one, and
//! the part of its status that must be written.
//!
//! Follows `pkg/kubelet/kubelet_node_status.go` and `pkg/kubelet/nodestatus/setters.go` of Kubernetes 1.36.
//! Must never change fields that are not a kubelet's: labels, conditions and resources that others set on the
//! Node stay.

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{
        ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeFeatures,
        NodeRuntimeHandler, NodeSpec, NodeStatus, NodeSystemInfo, Taint,
    },
    apimachinery::pkg::{
        api::resource::Quantity as Text,
        apis::meta::v1::{ObjectMeta, Time},
    },
};

use crate::node::addresses::configured;
use beelet_units::quantity::Quantity;

/// Labels that a kubelet corrects on an existing Node (`updateDefaultLabels`), those that beelet knows.
const DEFAULT_LABELS: [&str; 9] = [
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
];
/// The taint that a cloud's controller removes once it has set up the Node (`cloudproviderapi`).
const UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";
/// Features of Kubernetes that a scheduler may rely on, sorted (KEP-5328): it places pods that need another
/// one elsewhere.
const DECLARED_FEATURES: [&str; 3] = [
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "RestartAllContainersOnContainerExits",
];
/// Maximum number of names per image in a Node's status (`MaxNamesPerImageInNodeStatus`).
const NAMES_PER_IMAGE: usize = 5;
/// Maximum bytes of an image's name: longer ones come from a damaged store.
const NAME_BYTES: usize = 1024;

/// The values for registering a Node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Registration {
    /// The Node's name.
    pub name: String,
    /// The machine's name, for its label and address.
    pub hostname: String,
    /// Labels in addition to the default ones.
    pub labels: BTreeMap<String, String>,
    /// Taints.
    pub taints: Vec<Taint>,
    /// The cloud's name for the machine.
    pub provider_id: Option<String>,
    /// True if a cloud's controller sets the addresses.
    pub external_cloud: bool,
    /// The configured addresses.
    pub ips: Vec<IpAddr>,
}

/// A kubelet's current report about its machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeReport {
    /// Total amount of each resource.
    pub capacity: BTreeMap<String, String>,
    /// Amount of each resource available to pods.
    pub allocatable: BTreeMap<String, String>,
    /// Pressure and readiness conditions.
    pub conditions: Vec<NodeCondition>,
    /// The addresses.
    pub addresses: Vec<NodeAddress>,
    /// System information about the machine.
    pub info: NodeSystemInfo,
    /// Images on the machine.
    pub images: Vec<ContainerImage>,
    /// The runtime's handlers.
    pub handlers: Vec<NodeRuntimeHandler>,
    /// Features of the runtime.
    pub features: Option<NodeFeatures>,
    /// The port of the kubelet's server.
    pub port: i32,
    /// Volumes that no controller may detach.
    pub volumes_in_use: Vec<String>,
}

/// The part of a status that must be written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change {
    /// The changed fields; maps hold only the changed entries.
    pub status: NodeStatus,
    /// Resources that no longer exist.
    pub removed: BTreeSet<String>,
    /// True if the conditions changed.
    pub conditions: bool,
}

impl Change {
    /// Returns the changes other than conditions; `None` without any.
    #[must_use]
    pub fn rest(&self) -> Option<(NodeStatus, BTreeSet<String>)> {
        let status = NodeStatus { conditions: None, ..self.status.clone() };
        let some = status != NodeStatus::default() || !self.removed.is_empty();
        some.then(|| (status, self.removed.clone()))
    }
}

/// Returns the processor architecture in Go's terms.
#[must_use]
pub fn architecture(machine: &str) -> &str {
    match machine {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

/// Returns the labels that a kubelet sets on its Node.
#[must_use]
pub fn labels(registration: &Registration, arch: &str) -> BTreeMap<String, String> {
    let default = [
        ("kubernetes.io/hostname", registration.hostname.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", arch),
    ];
    let default = default.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
    default.chain(registration.labels.clone()).collect()
}

/// Returns the Node to create, without a status.
#[must_use]
pub fn initial(registration: &Registration, arch: &str) -> Node {
    let mut taints = registration.taints.clone();
    if registration.external_cloud && taints.iter().all(|taint| taint.key != UNINITIALIZED) {
        taints.push(Taint {
            key: UNINITIALIZED.to_owned(),
            value: Some("true".to_owned()),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        });
    }
    Node {
        metadata: ObjectMeta {
            name: Some(registration.name.clone()),
            labels: Some(labels(registration, arch)),
            annotations: Some(annotations(registration)),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            taints: (!taints.is_empty()).then_some(taints),
            provider_id: registration.provider_id.clone(),
            ..NodeSpec::default()
        }),
        status: None,
    }
}

/// The annotation that assigns attaching volumes to the controller.
pub const CONTROLLER_ATTACHES: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// Returns the annotations of a new Node: that a controller attaches volumes, and, for a cloud's controller,
/// the configured addresses.
fn annotations(registration: &Registration) -> BTreeMap<String, String> {
    let mut all = BTreeMap::from([(CONTROLLER_ATTACHES.to_owned(), "true".to_owned())]);
    // `0.0.0.0` and `::` only select the family: a controller cannot look for them.
    let named = registration.ips.first().is_some_and(|ip| !ip.is_unspecified());
    if registration.external_cloud && named {
        let ips: Vec<String> = configured(&registration.ips).iter().map(ToString::to_string).collect();
        all.insert("alpha.kubernetes.io/provided-node-ip".to_owned(), ips.join(","));
    }
    all
}

/// Returns the labels of an existing Node that must be corrected. Labels other than the default ones belong
/// to the cluster once the Node exists, as with the kubelet.
#[must_use]
pub fn stale_labels(
    existing: &BTreeMap<String, String>,
    wanted: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let stale = DEFAULT_LABELS.iter().filter_map(|name| wanted.get_key_value(*name));
    stale
        .filter(|(name, value)| existing.get(*name) != Some(*value))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// Returns the Node's addresses: the machine's own, and its name. While the machine has none (no route, no
/// setting), the Node keeps its addresses, as under the kubelet.
#[must_use]
pub fn addresses(registration: &Registration, own: &[IpAddr], existing: &[NodeAddress]) -> Vec<NodeAddress> {
    let address = |kind: &str, address: String| NodeAddress { type_: kind.to_owned(), address };
    let name = address("Hostname", registration.hostname.clone());
    if registration.external_cloud {
        if !existing.is_empty() {
            return existing.to_vec();
        }
        if registration.ips.is_empty() {
            return vec![name];
        }
    }
    if own.is_empty() && !existing.is_empty() {
        return existing.to_vec();
    }
    own.iter().map(|ip| address("InternalIP", ip.to_string())).chain([name]).collect()
}

/// Returns the images for a status: the largest first, at most `most`, each with few names.
#[must_use]
pub fn images(mut all: Vec<ContainerImage>, most: Option<usize>) -> Vec<ContainerImage> {
    // Equal sizes are sorted by name: the order must not change between reports.
    all.sort_by(|a, b| b.size_bytes.cmp(&a.size_bytes).then_with(|| a.names.cmp(&b.names)));
    all.truncate(most.unwrap_or(usize::MAX));
    for names in all.iter_mut().filter_map(|image| image.names.as_mut()) {
        names.retain(|name| name.len() <= NAME_BYTES);
        names.truncate(NAMES_PER_IMAGE);
    }
    all
}

/// Returns the changes that bring `existing` up to `report`.
#[must_use]
pub fn change(existing: &NodeStatus, report: &NodeReport, now: Timestamp) -> Change {
    let mut change = Change::default();
    let status = &mut change.status;
    let (conditions, differ) = conditions(existing.conditions.as_deref().unwrap_or_default(), report, now);
    if existing.addresses.as_deref().unwrap_or_default() != report.addresses {
        status.addresses = Some(report.addresses.clone());
    }
    if existing.node_info.as_ref() != Some(&report.info) {
        status.node_info = Some(report.info.clone());
    }
    if existing.images.as_deref().unwrap_or_default() != report.images {
        status.images = Some(report.images.clone());
    }
    if existing.runtime_handlers.as_deref().unwrap_or_default() != report.handlers {
        status.runtime_handlers = Some(report.handlers.clone());
    }
    if report.features.is_some() && existing.features != report.features {
        status.features.clone_from(&report.features);
    }
    if existing.volumes_in_use.as_deref().unwrap_or_default() != report.volumes_in_use {
        status.volumes_in_use = Some(report.volumes_in_use.clone());
    }
    if existing.declared_features.as_deref().unwrap_or_default() != DECLARED_FEATURES {
        status.declared_features = Some(DECLARED_FEATURES.map(str::to_owned).to_vec());
    }
    let endpoints = NodeDaemonEndpoints { kubelet_endpoint: Some(DaemonEndpoint { port: report.port }) };
    if existing.daemon_endpoints.as_ref() != Some(&endpoints) {
        status.daemon_endpoints = Some(endpoints);
    }
    let capacity = existing.capacity.clone().unwrap_or_default();
    let allocatable = existing.allocatable.clone().unwrap_or_default();
    // Page sizes that the machine no longer has (`reconcileHugePageResource`).
    change.removed = capacity
        .keys()
        .chain(allocatable.keys())
        .filter(|name| name.starts_with("hugepages-") && !report.capacity.contains_key(*name))
        .cloned()
        .collect();
    status.capacity = differing(&capacity, &report.capacity);
    // Resources that other components set on the Node belong to pods entirely.
    let others = capacity.iter().filter(|(name, _)| {
        !report.capacity.contains_key(*name) && !change.removed.contains(*name) && name.contains('/')
    });
    let others = others.map(|(name, amount)| (name.clone(), amount.0.clone()));
    status.allocatable = differing(&allocatable, &others.chain(report.allocatable.clone()).collect());
    status.conditions = Some(conditions);
    change.conditions = differ;
    change
}

/// Returns the report's conditions with the times of their last change, and true if any differ from
/// `existing`.
fn conditions(existing: &[NodeCondition], report: &NodeReport, now: Timestamp) -> (Vec<NodeCondition>, bool) {
    let mut differ = false;
    let dated = report.conditions.iter().map(|condition| {
        let before = existing.iter().find(|before| before.type_ == condition.type_);
        let same = |before: &&NodeCondition| before.status == condition.status;
        differ |= before.is_none_or(|before| {
            before.status != condition.status
                || before.reason != condition.reason
                || before.message != condition.message
        });
        let since = before.filter(same).and_then(|before| before.last_transition_time.clone());
        NodeCondition {
            last_heartbeat_time: Some(Time(now)),
            last_transition_time: since.or(Some(Time(now))),
            ..condition.clone()
        }
    });
    let dated = dated.collect();
    (dated, differ)
}

/// Returns the entries of `wanted` whose amounts differ in `existing`.
fn differing(
    existing: &BTreeMap<String, Text>,
    wanted: &BTreeMap<String, String>,
) -> Option<BTreeMap<String, Text>> {
    let worth = |text: &str| Quantity::parse(text).ok();
    let differ = wanted.iter().filter(|(name, amount)| {
        existing.get(*name).is_none_or(|before| before.0 != **amount && worth(&before.0) != worth(amount))
    });
    let differ: BTreeMap<_, _> = differ.map(|(name, amount)| (name.clone(), Text(amount.clone()))).collect();
    (!differ.is_empty()).then_some(differ)
}

#[cfg(test)]
mod tests;
