//! Decisions about volumes of storage plugins (CSI): a driver's lifecycle modes, a volume's attachment, its
//! ownership by the pod's group, and the node's CSINode. Follows `pkg/volume/csi` of Kubernetes 1.36 and uses
//! its messages.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        core::v1::{Node, Pod},
        storage::v1::{CSIDriver, CSINode, CSINodeDriver, VolumeAttachment, VolumeNodeResources},
    },
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};

use crate::volumes::migration;

/// The name of CSI in the paths of volumes.
pub const PLUGIN: &str = "kubernetes.io~csi";
/// The annotation of a Node with its id for each driver.
pub const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";
/// Maximum bytes of a driver's node id.
const NODE_ID: usize = 192;
/// Maximum number of labels that a driver may request.
const SEGMENTS: usize = 64;

/// A driver's report about this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverNode {
    /// The driver's id for the node.
    pub node_id: String,
    /// Maximum number of volumes on the node; 0 if unknown.
    pub max_volumes: i64,
    /// Topology segments of the node.
    pub topology: BTreeMap<String, String>,
}

/// A driver, or an attachment, that a volume cannot use. Displayed, each is the kubelet's sentence where it
/// has one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CsiError {
    /// The driver gave the node no id.
    #[error("error adding CSI driver node info: driverNodeID must not be empty")]
    NoNodeId,
    /// The driver's id of the node is too long.
    #[error("the driver's node id has more than {max} bytes", max = NODE_ID)]
    LongNodeId,
    /// The driver's topology is too large.
    #[error("the driver's topology has more than {max} segments", max = SEGMENTS)]
    LargeTopology,
    /// A segment of the driver's topology cannot become a label of the Node.
    #[error("the driver's topology segment {key:?}={value:?} is not a valid label")]
    BadSegment {
        /// The segment's key.
        key: String,
        /// Its value.
        value: String,
    },
    /// A pod's own volume needs a driver's object that names this lifecycle.
    #[error("volume mode {mode:?} not supported by driver {driver} (no CSIDriver object)")]
    NoDriverObject {
        /// The lifecycle.
        mode: &'static str,
        /// The driver.
        driver: String,
    },
    /// The driver has volumes of other lifecycles alone.
    #[error("volume mode {mode:?} not supported by driver {driver} (only supports {modes:?})")]
    OtherModes {
        /// The lifecycle.
        mode: &'static str,
        /// The driver.
        driver: String,
        /// The lifecycles that it has.
        modes: Vec<String>,
    },
    /// The attachment is about to go.
    #[error("volume attachment is being deleted")]
    AttachmentDeleted,
    /// The attacher failed; its words.
    #[error("{0}")]
    AttachFailed(String),
    /// The volume is not attached, or not yet.
    #[error("volume {handle} is not attached for volume attachment {attachment}")]
    NotAttached {
        /// The driver's name of the volume.
        handle: String,
        /// The name of the attachment.
        attachment: String,
    },
}

/// Registered drivers, by name; `None` for one that has unregistered.
pub type Drivers = BTreeMap<String, Option<DriverNode>>;

impl DriverNode {
    /// Checks the driver's report.
    ///
    /// # Errors
    /// The report cannot be written to the API server.
    pub fn check(&self) -> Result<(), CsiError> {
        if self.node_id.is_empty() {
            return Err(CsiError::NoNodeId);
        }
        if self.node_id.len() > NODE_ID {
            return Err(CsiError::LongNodeId);
        }
        if self.topology.len() > SEGMENTS {
            return Err(CsiError::LargeTopology);
        }
        match self.topology.iter().find(|(key, value)| !is_label(key, value)) {
            Some((key, value)) => Err(CsiError::BadSegment { key: key.clone(), value: value.clone() }),
            None => Ok(()),
        }
    }
}

/// Returns true for a valid label of an object.
fn is_label(key: &str, value: &str) -> bool {
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let is_name = |text: &str, inner: &[char], most: usize| {
        text.len() <= most
            && is_end(text.chars().next())
            && is_end(text.chars().last())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || inner.contains(&c))
    };
    let (prefix, name) = key.rsplit_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    prefix.is_none_or(|prefix| is_name(prefix, &['-', '.'], 253))
        && is_name(name, &['-', '_', '.'], 63)
        && (value.is_empty() || is_name(value, &['-', '_', '.'], 63))
}

/// Returns true if any of these versions is a version of CSI 1.
#[must_use]
pub fn is_supported(versions: &[String]) -> bool {
    let major = |version: &String| version.trim_start_matches('v').split('.').next().map(str::to_owned);
    versions.iter().any(|version| major(version).as_deref() == Some("1"))
}

/// Prefix of the unique names of CSI volumes.
const UNIQUE: &str = "kubernetes.io/csi/";

/// Returns the unique name of a volume in a Node's status.
#[must_use]
pub fn unique_name(driver: &str, handle: &str) -> String {
    format!("{UNIQUE}{driver}^{handle}")
}

/// Returns true for the unique name of a CSI volume.
#[must_use]
pub fn is_unique_name(name: &str) -> bool {
    name.starts_with(UNIQUE)
}

/// Returns the device of a volume on the node, empty if it has none, once the Node's status lists the volume
/// as attached and in use. Also works for volumes of other kinds.
#[must_use]
pub fn attached_device<'n>(node: &'n Node, name: &str) -> Option<&'n str> {
    let status = node.status.as_ref()?;
    let is_known = status.volumes_in_use.iter().flatten().any(|one| one == name);
    let attached = status.volumes_attached.iter().flatten().find(|one| one.name == name)?;
    is_known.then_some(attached.device_path.as_str())
}

/// Returns true if a controller must attach a driver's volumes to the node. An unknown driver's volumes must
/// be attached.
#[must_use]
pub fn is_attached(driver: Option<&CSIDriver>) -> bool {
    driver.is_none_or(|driver| driver.spec.attach_required != Some(false))
}

/// Returns true if a driver requests information about a volume's pod.
#[must_use]
pub fn wants_pod(driver: Option<&CSIDriver>) -> bool {
    driver.is_some_and(|driver| driver.spec.pod_info_on_mount == Some(true))
}

/// Returns true if a driver's volumes must be published repeatedly, for expiring tokens.
#[must_use]
pub fn is_republished(driver: Option<&CSIDriver>) -> bool {
    driver.is_some_and(|driver| driver.spec.requires_republish == Some(true))
}

/// Checks that a driver supports volumes of this lifecycle: a pod's own (inline), or those of claims.
///
/// # Errors
/// The driver does not support it.
pub fn check_lifecycle(name: &str, driver: Option<&CSIDriver>, inline: bool) -> Result<(), CsiError> {
    let mode = if inline { "Ephemeral" } else { "Persistent" };
    let Some(driver) = driver else {
        let missing = CsiError::NoDriverObject { mode, driver: name.to_owned() };
        return if inline { Err(missing) } else { Ok(()) };
    };
    let has = match driver.spec.volume_lifecycle_modes.as_deref() {
        None | Some([]) => !inline,
        Some(modes) => modes.iter().any(|one| one == mode),
    };
    if has {
        return Ok(());
    }
    let modes = driver.spec.volume_lifecycle_modes.clone().unwrap_or_default();
    Err(CsiError::OtherModes { mode, driver: name.to_owned(), modes })
}

/// Returns the metadata of a volume's attachment for the driver on the node.
///
/// # Errors
/// The volume is not attached.
pub fn attached(found: &VolumeAttachment, handle: &str) -> Result<BTreeMap<String, String>, CsiError> {
    let name = found.metadata.name.as_deref().unwrap_or_default();
    if found.metadata.deletion_timestamp.is_some() {
        return Err(CsiError::AttachmentDeleted);
    }
    let status = found.status.as_ref();
    if status.is_some_and(|status| status.attached) {
        return Ok(status.and_then(|status| status.attachment_metadata.clone()).unwrap_or_default());
    }
    if let Some(error) = status.and_then(|status| status.attach_error.as_ref()) {
        return Err(CsiError::AttachFailed(error.message.clone().unwrap_or_default()));
    }
    Err(CsiError::NotAttached { handle: handle.to_owned(), attachment: name.to_owned() })
}

/// Returns the volume context that describes the pod to a driver.
#[must_use]
pub fn pod_context(pod: &Pod, inline: bool) -> BTreeMap<String, String> {
    let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
    let metadata = &pod.metadata;
    let said = [
        ("pod.name", metadata.name.clone()),
        ("pod.namespace", metadata.namespace.clone()),
        ("pod.uid", metadata.uid.clone()),
        ("serviceAccount.name", account),
        ("ephemeral", Some(inline.to_string())),
    ];
    let said = said.into_iter();
    said.map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value.unwrap_or_default())).collect()
}

/// The inputs of the decision about a volume's group.
#[derive(Clone, Copy, Debug)]
pub struct Ownership<'a> {
    /// The driver.
    pub driver: Option<&'a CSIDriver>,
    /// The requested file system.
    pub file_system: &'a str,
    /// The PersistentVolume's access modes; None for a pod's own volume.
    pub modes: Option<&'a [String]>,
    /// True if no container writes to the volume.
    pub read_only: bool,
}

/// Returns true if the agent changes the volume's ownership to the pod's group (`supportsFSGroup`).
#[must_use]
pub fn is_given_to_group(of: &Ownership<'_>) -> bool {
    let policy = of.driver.and_then(|driver| driver.spec.fs_group_policy.as_deref());
    match policy.unwrap_or("ReadWriteOnceWithFSType") {
        _ if of.read_only => false,
        "None" => false,
        "File" => true,
        _ if of.file_system.is_empty() => false,
        _ => of.modes.is_none_or(|modes| {
            modes.iter().any(|mode| mode == "ReadWriteOnce" || mode == "ReadWriteOncePod")
        }),
    }
}

/// Returns the CSINode of a Node, without drivers.
#[must_use]
pub fn new_node(name: &str, uid: &str) -> CSINode {
    let mut node = CSINode::default();
    let migrated = migration::changed_annotation(&node);
    node.metadata.annotations =
        migrated.map(|kinds| BTreeMap::from([(migration::ANNOTATION.to_owned(), kinds)]));
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: name.to_owned(),
        uid: uid.to_owned(),
        ..OwnerReference::default()
    };
    node.metadata.name = Some(name.to_owned());
    node.metadata.owner_references = Some(vec![owner]);
    node
}

/// Returns true if a CSINode belongs to the Node with this UID, and not to an earlier one of the same name.
#[must_use]
pub fn is_of(found: &CSINode, uid: &str) -> bool {
    found.metadata.owner_references.iter().flatten().any(|owner| owner.kind == "Node" && owner.uid == uid)
}

/// Returns the new drivers of a CSINode; `None` if unchanged. Drivers unknown to this agent stay.
#[must_use]
pub fn changed_drivers(found: &CSINode, drivers: &Drivers) -> Option<Vec<CSINodeDriver>> {
    let mut wanted: Vec<CSINodeDriver> =
        found.spec.drivers.iter().filter(|known| !drivers.contains_key(&known.name)).cloned().collect();
    let mut ours: Vec<CSINodeDriver> = Vec::new();
    for (name, node) in drivers {
        let Some(node) = node else { continue };
        let count = i32::try_from(node.max_volumes).unwrap_or(i32::MAX);
        let keys: Vec<String> = node.topology.keys().cloned().collect();
        ours.push(CSINodeDriver {
            name: name.clone(),
            node_id: node.node_id.clone(),
            topology_keys: (!keys.is_empty()).then_some(keys),
            allocatable: (count > 0).then_some(VolumeNodeResources { count: Some(count) }),
        });
    }
    wanted.extend(ours);
    let sorted = |drivers: &[CSINodeDriver]| {
        let mut drivers = drivers.to_vec();
        drivers.sort_by(|a, b| a.name.cmp(&b.name));
        for driver in &mut drivers {
            driver.topology_keys = driver.topology_keys.take().filter(|keys| !keys.is_empty());
        }
        drivers
    };
    (sorted(&found.spec.drivers) != sorted(&wanted)).then_some(wanted)
}

/// Returns the new value of the annotation [`NODE_IDS`], keeping other drivers' entries; `None` if unchanged,
/// and `Some(None)` to remove the annotation.
#[must_use]
pub fn changed_ids(
    known: &BTreeMap<String, String>,
    drivers: &Drivers,
) -> Option<Option<BTreeMap<String, String>>> {
    let mut wanted = known.clone();
    for (name, node) in drivers {
        match node {
            Some(node) => drop(wanted.insert(name.clone(), node.node_id.clone())),
            None => drop(wanted.remove(name)),
        }
    }
    (wanted != *known).then(|| (!wanted.is_empty()).then_some(wanted))
}

/// Returns the drivers' labels that the Node lacks, and the first one with a conflicting value, which stays.
#[must_use]
pub fn missing_labels(
    known: &BTreeMap<String, String>,
    drivers: &Drivers,
) -> (BTreeMap<String, String>, Option<String>) {
    let (mut missing, mut collision) = (BTreeMap::new(), None);
    for (key, value) in drivers.values().flatten().flat_map(|node| &node.topology) {
        match known.get(key) {
            None => drop(missing.insert(key.clone(), value.clone())),
            Some(existing) if existing != value => {
                collision.get_or_insert(format!(
                    "detected topology value collision: driver reported {key:?}:{value:?} but existing label is {key:?}:{existing:?}"
                ));
            }
            Some(_) => {}
        }
    }
    (missing, collision)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn driver(spec: &Value) -> CSIDriver {
        serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": spec})).unwrap()
    }

    #[test]
    fn a_driver_of_any_version_1_is_supported() {
        let check = |versions: &[&str], expected: bool| {
            let versions: Vec<String> = versions.iter().map(ToString::to_string).collect();
            assert_eq!(is_supported(&versions), expected, "{versions:?}");
        };
        check(&["1.0.0"], true);
        check(&["0.3.0", "v1.11.0"], true);
        check(&["0.3.0"], false);
        check(&["10.0.0", "2.1.0", ""], false);
        check(&[], false);
    }

    #[test]
    fn a_driver_is_used_by_its_object_and_attached_without_one() {
        assert!(is_attached(None) && is_attached(Some(&driver(&json!({})))));
        assert!(!is_attached(Some(&driver(&json!({"attachRequired": false})))));
        assert!(!wants_pod(None) && wants_pod(Some(&driver(&json!({"podInfoOnMount": true})))));
        let check = |spec: Option<Value>, inline: bool, expected: bool| {
            let found = spec.map(|spec| driver(&spec));
            assert_eq!(check_lifecycle("d", found.as_ref(), inline).is_ok(), expected);
        };
        check(None, false, true);
        check(None, true, false);
        check(Some(json!({})), false, true);
        check(Some(json!({})), true, false);
        check(Some(json!({"volumeLifecycleModes": ["Ephemeral"]})), true, true);
        check(Some(json!({"volumeLifecycleModes": ["Ephemeral"]})), false, false);
    }

    #[test]
    fn an_attachment_has_the_drivers_metadata_or_an_error() {
        let check = |status: Value, expected: Result<&str, &str>| {
            let found = json!({"metadata": {"name": "csi-1"}, "spec": {"attacher": "d", "nodeName": "n", "source": {}}, "status": status});
            let found = serde_json::from_value(found).unwrap();
            let said = attached(&found, "h").map(|metadata| metadata.get("lun").cloned().unwrap_or_default());
            let said = said.map_err(|error| error.to_string());
            assert_eq!(said.as_deref().map_err(String::as_str), expected);
        };
        check(json!({"attached": true, "attachmentMetadata": {"lun": "7"}}), Ok("7"));
        check(json!({"attached": true}), Ok(""));
        check(json!({"attached": false, "attachError": {"message": "no room"}}), Err("no room"));
        check(json!({"attached": false}), Err("volume h is not attached for volume attachment csi-1"));
        check(Value::Null, Err("volume h is not attached for volume attachment csi-1"));
    }

    #[test]
    fn the_driver_decides_about_ownership_by_the_group() {
        let once = ["ReadWriteOnce".to_owned()];
        let many = ["ReadWriteMany".to_owned()];
        let check =
            |policy: Value, file_system: &str, modes: Option<&[String]>, read_only: bool, expected: bool| {
                let driver = driver(&json!({"fsGroupPolicy": policy}));
                let of = Ownership { driver: Some(&driver), file_system, modes, read_only };
                assert_eq!(is_given_to_group(&of), expected, "{of:?}");
            };
        check(json!("File"), "", Some(&many), false, true);
        check(json!("File"), "", Some(&many), true, false);
        check(json!("None"), "ext4", Some(&once), false, false);
        check(json!("ReadWriteOnceWithFSType"), "ext4", Some(&once), false, true);
        check(json!("ReadWriteOnceWithFSType"), "ext4", Some(&many), false, false);
        check(Value::Null, "", Some(&once), false, false);
        check(Value::Null, "ext4", None, false, true);
    }

    #[test]
    fn a_csi_node_keeps_unknown_drivers() {
        let node = |id: &str, max: i64, zone: &str| DriverNode {
            node_id: id.to_owned(),
            max_volumes: max,
            topology: [("zone".to_owned(), zone.to_owned())].into(),
        };
        let mut found = new_node("n1", "u1");
        assert!(is_of(&found, "u1") && !is_of(&found, "u2"));
        let drivers: Drivers = [("a".to_owned(), Some(node("ida", 5, "z1")))].into();
        found.spec.drivers = changed_drivers(&found, &drivers).unwrap();
        let shown = format!("{:?}", found.spec.drivers);
        assert!(
            shown.contains("\"ida\"") && shown.contains("count: Some(5)") && shown.contains("\"zone\""),
            "{shown}"
        );
        assert_eq!(changed_drivers(&found, &drivers), None);
        assert_eq!(changed_drivers(&found, &Drivers::new()), None, "the driver has not registered again yet");
        let gone: Drivers = [("a".to_owned(), None), ("b".to_owned(), Some(node("idb", 0, "z1")))].into();
        let changed = changed_drivers(&found, &gone).unwrap();
        assert_eq!(changed.iter().map(|driver| driver.name.as_str()).collect::<Vec<_>>(), ["b"]);
        assert!(changed[0].allocatable.is_none());

        let ids =
            |text: &[(&str, &str)]| text.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        assert_eq!(
            changed_ids(&ids(&[("c", "idc")]), &drivers),
            Some(Some(ids(&[("a", "ida"), ("c", "idc")])))
        );
        assert_eq!(changed_ids(&ids(&[("a", "ida")]), &drivers), None);
        assert_eq!(changed_ids(&ids(&[("a", "ida")]), &[("a".to_owned(), None)].into()), Some(None));

        assert_eq!(missing_labels(&ids(&[]), &drivers).0, ids(&[("zone", "z1")]));
        assert_eq!(missing_labels(&ids(&[("zone", "z1")]), &drivers), (ids(&[]), None));
        let (missing, collision) = missing_labels(&ids(&[("zone", "z2")]), &drivers);
        assert!(missing.is_empty() && collision.unwrap().contains("collision"));
    }

    #[test]
    fn a_drivers_report_about_the_node_is_bounded() {
        let check = |node_id: String, segments: usize, expected: bool| {
            let topology = (0..segments).map(|i| (format!("example.com/k{i}"), String::new())).collect();
            let said = DriverNode { node_id, max_volumes: 0, topology };
            assert_eq!(said.check().is_ok(), expected);
        };
        check("n".to_owned(), 2, true);
        check(String::new(), 0, false);
        check("n".repeat(193), 0, false);
        check("n".to_owned(), 65, false);
        let label = |key: &str, value: &str| assert!(!is_label(key, value), "{key}={value}");
        label("", "a");
        label("a/b/c", "a");
        label("a b", "a");
        label("a", "a b");
        label("a", "-a");
        label("a", &"a".repeat(64));
        assert!(is_label("topology.example.com/zone", "z_1.a"));
    }
}
