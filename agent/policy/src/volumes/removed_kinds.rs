//! Kinds of volumes that Kubernetes has removed. The API keeps their fields, so that pods may still name
//! them; a kubelet finds no plugin for them, and such a pod waits forever.

use k8s_openapi::api::core::v1::{PersistentVolume, Volume};

/// The fields of a volume, each with the first version of Kubernetes that lacks it.
pub const REMOVED: [(&str, &str); 9] = [
    ("cephfs", "1.31"),
    ("flocker", "1.25"),
    ("gitRepo", "1.36"),
    ("glusterfs", "1.26"),
    ("photonPersistentDisk", "1.16"),
    ("quobyte", "1.25"),
    ("rbd", "1.31"),
    ("scaleIO", "1.22"),
    ("storageos", "1.25"),
];

/// A 1.36 kubelet's message about a volume from a git repository: its plugin exists, but is permanently
/// disabled.
pub const GIT_REPO: &str = "git-repo volume plugin has been disabled; if necessary, it may be re-enabled by \
                            enabling the feature-gate `GitRepoVolumeDriver`";

/// Returns true if a pod's own volume is of a removed kind.
#[must_use]
pub fn is_removed(volume: &Volume) -> bool {
    volume.cephfs.is_some()
        || volume.flocker.is_some()
        || volume.glusterfs.is_some()
        || volume.photon_persistent_disk.is_some()
        || volume.quobyte.is_some()
        || volume.rbd.is_some()
        || volume.scale_io.is_some()
        || volume.storageos.is_some()
}

/// Returns true if a PersistentVolume is of a removed kind.
#[must_use]
pub fn is_removed_of_claim(volume: &PersistentVolume) -> bool {
    volume.spec.as_ref().is_some_and(|spec| {
        spec.cephfs.is_some()
            || spec.flocker.is_some()
            || spec.glusterfs.is_some()
            || spec.photon_persistent_disk.is_some()
            || spec.quobyte.is_some()
            || spec.rbd.is_some()
            || spec.scale_io.is_some()
            || spec.storageos.is_some()
    })
}

/// Returns a kubelet's message about a volume without a plugin (`AddPodToVolume`), with the volume's name, or
/// its PersistentVolume's.
#[must_use]
pub fn no_plugin(name: &str) -> String {
    format!("failed to get Plugin from volumeSpec for volume {name:?} err=no volume plugin matched")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_removed_kind_has_no_plugin() {
        let check = |source: Value, expected: bool| {
            let mut volume = source.clone();
            volume["name"] = json!("v");
            let volume = serde_json::from_value(volume).unwrap();
            assert_eq!(is_removed(&volume), expected, "{source}");
            let found = serde_json::from_value(json!({ "spec": source })).unwrap();
            assert_eq!(is_removed_of_claim(&found), expected, "{source}");
        };
        check(json!({"cephfs": {"monitors": ["m"]}}), true);
        check(json!({"flocker": {"datasetName": "d"}}), true);
        check(json!({"glusterfs": {"endpoints": "e", "path": "p"}}), true);
        check(json!({"photonPersistentDisk": {"pdID": "i"}}), true);
        check(json!({"quobyte": {"registry": "r", "volume": "v"}}), true);
        check(json!({"rbd": {"monitors": ["m"], "image": "i"}}), true);
        check(json!({"scaleIO": {"gateway": "g", "system": "s", "secretRef": {"name": "n"}}}), true);
        check(json!({"storageos": {"volumeName": "v"}}), true);
        check(json!({"nfs": {"server": "s", "path": "/"}}), false);
        check(json!({}), false);
        let git = json!({"name": "v", "gitRepo": {"repository": "r"}});
        assert!(!is_removed(&serde_json::from_value(git).unwrap()), "a kubelet still has its plugin");
    }
}
