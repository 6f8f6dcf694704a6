//! The PersistentVolume of a pod's volume, and the pod's right to use it on this node: the kubelet's checks
//! (`pkg/kubelet/volumemanager/populator`, `operation_generator.go`) and messages.
//!
//! Must never do I/O: callers pass in the claim and its volume.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Volume};

use crate::{
    node::fit::{NodeView, selects},
    volumes::{VolumeError, migration, removed_kinds},
};

/// The finalizer that keeps a claim while a pod uses it; a deleted claim without it is about to be removed.
const PROTECTED: &str = "kubernetes.io/pvc-protection";

/// A pod's reference to a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimName {
    /// The claim's name, in the pod's own namespace.
    pub name: String,
    /// True if the pod only reads the volume.
    pub read_only: bool,
    /// True if the claim was created for this pod, and is deleted with it (`ephemeral`).
    pub is_ephemeral: bool,
}

/// Returns the claim that a volume of a pod names; `None` for a volume of another kind.
#[must_use]
pub fn claim_of(pod: &Pod, volume: &Volume) -> Option<ClaimName> {
    if let Some(source) = &volume.persistent_volume_claim {
        let read_only = source.read_only == Some(true);
        return Some(ClaimName { name: source.claim_name.clone(), read_only, is_ephemeral: false });
    }
    volume.ephemeral.as_ref()?;
    let of = pod.metadata.name.as_deref().unwrap_or_default();
    Some(ClaimName { name: format!("{of}-{}", volume.name), read_only: false, is_ephemeral: true })
}

/// Returns true if a volume names a claim.
#[must_use]
pub fn is_claim(volume: &Volume) -> bool {
    volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some()
}

/// Returns true if a storage plugin may provide a volume: a claim's, or a pod's own.
#[must_use]
pub fn may_be_of_driver(volume: &Volume) -> bool {
    is_claim(volume) || volume.csi.is_some() || migration::is_migrated(volume)
}

/// Checks that the node supports a pod's own volume.
///
/// # Errors
/// No plugin supports the kind, or the volume cannot be translated for its storage plugin: the kubelet's
/// message.
pub fn check_kind(volume: &Volume, namespace: &str) -> Result<(), VolumeError> {
    if removed_kinds::is_removed(volume) {
        return Err(VolumeError::NoPlugin(removed_kinds::no_plugin(&volume.name)));
    }
    migration::of_pod(volume, namespace).transpose().map(drop)
}

/// Returns the volumes of a pod that containers use: as file systems, and as block devices. A pod does not
/// wait for its other volumes.
#[must_use]
pub fn used(pod: &Pod) -> (BTreeSet<&str>, BTreeSet<&str>) {
    let (mut mounts, mut devices) = (BTreeSet::new(), BTreeSet::new());
    let Some(spec) = &pod.spec else { return (mounts, devices) };
    for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
        mounts.extend(container.volume_mounts.iter().flatten().map(|mount| mount.name.as_str()));
        devices.extend(container.volume_devices.iter().flatten().map(|device| device.name.as_str()));
    }
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    for container in ephemeral {
        mounts.extend(container.volume_mounts.iter().flatten().map(|mount| mount.name.as_str()));
        devices.extend(container.volume_devices.iter().flatten().map(|device| device.name.as_str()));
    }
    (mounts, devices)
}

/// Returns the name of the PersistentVolume that a claim is bound to.
///
/// # Errors
/// The pod may not use it, or not yet; the kubelet's message.
pub fn bound_volume<'c>(
    pod: &Pod,
    name: &ClaimName,
    claim: &'c PersistentVolumeClaim,
) -> Result<&'c str, VolumeError> {
    let finalizers = claim.metadata.finalizers.as_deref().unwrap_or_default();
    if claim.metadata.deletion_timestamp.is_some() && !finalizers.iter().any(|one| one == PROTECTED) {
        return Err(VolumeError::ClaimDeleted);
    }
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
    if phase != Some("Bound") {
        return Err(VolumeError::Unbound);
    }
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    if volume.is_empty() {
        return Err(VolumeError::NoVolumeName);
    }
    if name.is_ephemeral && !is_made_for(pod, claim) {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        return Err(VolumeError::NotOwner {
            namespace: text(&pod.metadata.namespace),
            claim: name.name.clone(),
            pod: text(&pod.metadata.name),
        });
    }
    Ok(volume)
}

/// Returns true if the pod is the claim's controller.
fn is_made_for(pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    let owners = claim.metadata.owner_references.iter().flatten();
    let mut controllers = owners.filter(|owner| owner.controller == Some(true));
    controllers.next().is_some_and(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref())
}

/// Checks that a PersistentVolume is bound to this claim, is used in its own mode, and may be used on the
/// node.
///
/// # Errors
/// The pod may not use it, or not yet; the kubelet's message.
pub fn check_volume(
    pod: &Pod,
    volume: &Volume,
    claim: &PersistentVolumeClaim,
    found: &PersistentVolume,
) -> Result<(), VolumeError> {
    let name = found.metadata.name.as_deref().unwrap_or_default();
    let spec = found.spec.as_ref();
    let Some(of) = spec.and_then(|spec| spec.claim_ref.as_ref()) else {
        return Err(VolumeError::NoClaimRef { volume: name.to_owned() });
    };
    let (of, wanted) = (of.uid.as_deref().unwrap_or_default(), claim.metadata.uid.as_deref());
    if Some(of) != wanted {
        let (volume, of) = (name.to_owned(), of.to_owned());
        return Err(VolumeError::OtherClaim { volume, of, wanted: wanted.unwrap_or_default().to_owned() });
    }
    let mode = spec.and_then(|spec| spec.volume_mode.as_deref()).unwrap_or("Filesystem");
    let (mounts, devices) = used(pod);
    let misused = |field| {
        let (volume, mode) = (volume.name.clone(), mode.to_owned());
        Err(VolumeError::OtherMode { volume, mode, field })
    };
    if mounts.contains(volume.name.as_str()) && mode != "Filesystem" {
        return misused("volumeMounts");
    }
    if devices.contains(volume.name.as_str()) && mode != "Block" {
        return misused("volumeDevices");
    }
    Ok(())
}

/// Checks that a PersistentVolume is accessible from the node.
///
/// # Errors
/// The volume belongs to other nodes.
pub fn check_node(found: &PersistentVolume, node: &NodeView) -> Result<(), VolumeError> {
    let affinity = found.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    match affinity.and_then(|affinity| affinity.required.as_ref()) {
        Some(required) if !selects(required, node) => Err(VolumeError::OtherNode),
        _ => Ok(()),
    }
}

/// Returns true if a PersistentVolume allows only one pod at a time.
#[must_use]
pub fn is_for_one_pod(found: &PersistentVolume) -> bool {
    let modes = found.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default();
    matches!(modes, [only] if only == "ReadWriteOncePod")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod() -> Pod {
        serde_json::from_value(json!({
            "metadata": {"namespace": "shop", "name": "web", "uid": "u1"},
            "spec": {
                "containers": [{"name": "c", "volumeMounts": [{"name": "files", "mountPath": "/f"}],
                    "volumeDevices": [{"name": "disk", "devicePath": "/d"}]}],
                "volumes": [
                    {"name": "files", "persistentVolumeClaim": {"claimName": "data", "readOnly": true}},
                    {"name": "disk", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
                    {"name": "idle", "emptyDir": {}},
                ],
            },
        }))
        .unwrap()
    }

    fn volume(name: &str) -> Volume {
        pod().spec.unwrap().volumes.unwrap().into_iter().find(|volume| volume.name == name).unwrap()
    }

    fn claim(change: &Value) -> PersistentVolumeClaim {
        let mut claim = json!({
            "metadata": {"namespace": "shop", "name": "data", "uid": "c1"},
            "spec": {"volumeName": "pv1"}, "status": {"phase": "Bound"},
        });
        for (key, value) in change.as_object().unwrap() {
            for (inner, value) in value.as_object().unwrap() {
                claim[key][inner] = value.clone();
            }
        }
        serde_json::from_value(claim).unwrap()
    }

    #[test]
    fn a_volume_names_its_claim_or_one_of_its_own() {
        let named =
            |name: &str| claim_of(&pod(), &volume(name)).map(|of| (of.name, of.read_only, of.is_ephemeral));
        assert_eq!(named("files"), Some(("data".to_owned(), true, false)));
        assert_eq!(named("disk"), Some(("web-disk".to_owned(), false, true)));
        assert_eq!(named("idle"), None);
        let pod = pod();
        let (mounts, devices) = used(&pod);
        assert_eq!(
            (mounts.into_iter().collect::<Vec<_>>(), devices.into_iter().collect::<Vec<_>>()),
            (vec!["files"], vec!["disk"])
        );
    }

    #[test]
    fn a_claim_must_be_bound_and_an_ephemeral_one_the_pods_own() {
        let check = |name: &str, change: Value, expected: Result<&str, &str>| {
            let (pod, claim) = (pod(), claim(&change));
            let of = claim_of(&pod, &volume(name)).unwrap();
            let found = bound_volume(&pod, &of, &claim);
            assert_eq!(found.map_err(|why| why.to_string()), expected.map_err(str::to_owned), "{change}");
        };
        check("files", json!({}), Ok("pv1"));
        check("files", json!({"status": {"phase": "Pending"}}), Err("PVC is not bound"));
        check("files", json!({"spec": {"volumeName": ""}}), Err("PVC has empty pvc.Spec.VolumeName"));
        let going = "2026-01-01T00:00:00Z";
        check("files", json!({"metadata": {"deletionTimestamp": going}}), Err("PVC is being deleted"));
        let held =
            json!({"metadata": {"deletionTimestamp": going, "finalizers": ["kubernetes.io/pvc-protection"]}});
        check("files", held, Ok("pv1"));
        let not_ours = "PVC shop/web-disk was not created for pod shop/web (pod is not owner)";
        check("disk", json!({}), Err(not_ours));
        let owner = |uid: &str, controller: bool| {
            let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid, "controller": controller}]);
            json!({"metadata": {"ownerReferences": owner}})
        };
        check("disk", owner("u1", true), Ok("pv1"));
        check("disk", owner("u1", false), Err(not_ours));
        check("disk", owner("u0", true), Err(not_ours));
    }

    #[test]
    fn a_volume_must_be_the_claims_and_used_in_its_own_mode() {
        let check = |name: &str, spec: Value, expected: Result<(), &str>| {
            let found = serde_json::from_value(json!({"metadata": {"name": "pv1"}, "spec": spec})).unwrap();
            let checked = check_volume(&pod(), &volume(name), &claim(&json!({})), &found);
            assert_eq!(checked.map_err(|why| why.to_string()), expected.map_err(str::to_owned), "{spec}");
        };
        let to = |uid: &str, mode: &str| json!({"claimRef": {"uid": uid}, "volumeMode": mode});
        check("files", to("c1", "Filesystem"), Ok(()));
        check("disk", to("c1", "Block"), Ok(()));
        check("files", json!({"claimRef": {"uid": "c1"}}), Ok(()));
        check(
            "files",
            to("c1", "Block"),
            Err("volume files has volumeMode Block, but is specified in volumeMounts"),
        );
        check(
            "disk",
            json!({"claimRef": {"uid": "c1"}}),
            Err("volume disk has volumeMode Filesystem, but is specified in volumeDevices"),
        );
        check(
            "files",
            to("c0", "Filesystem"),
            Err("found PV object pv1 but its pv.Spec.ClaimRef.UID c0 does not point to claim.UID c1"),
        );
        check(
            "files",
            json!({}),
            Err(
                "found PV object pv1 but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim",
            ),
        );
    }

    #[test]
    fn a_volume_belongs_to_the_nodes_that_it_selects() {
        let node = NodeView { labels: [("zone".to_owned(), "a".to_owned())].into(), ..NodeView::default() };
        let check = |affinity: Value, expected: bool| {
            let found: PersistentVolume =
                serde_json::from_value(json!({"spec": {"nodeAffinity": affinity}})).unwrap();
            assert_eq!(check_node(&found, &node).is_ok(), expected, "{affinity}");
        };
        let zone = |zone: &str| {
            let term = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]});
            json!({"required": {"nodeSelectorTerms": [term]}})
        };
        check(Value::Null, true);
        check(json!({}), true);
        check(zone("a"), true);
        check(zone("b"), false);
        check(json!({"required": {"nodeSelectorTerms": []}}), false);
    }

    #[test]
    fn only_a_volume_with_that_one_mode_is_for_one_pod() {
        let check = |modes: Value, expected: bool| {
            let found = serde_json::from_value(json!({"spec": {"accessModes": modes}})).unwrap();
            assert_eq!(is_for_one_pod(&found), expected, "{modes}");
        };
        check(json!(["ReadWriteOncePod"]), true);
        check(json!(["ReadWriteOncePod", "ReadWriteOnce"]), false);
        check(json!(["ReadWriteOnce"]), false);
        check(Value::Null, false);
    }
}
