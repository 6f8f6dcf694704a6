//! The objects of the control plane that pods refer to, and static manifests.

use std::fs;

use beelet_tests::kubelet::NODE;
use beelet_tests::manifests;
use serde_json::json;

use super::kinds::{CLAIMS, DRIVER};
use super::scene::Scene;

/// Creates the objects that pods refer to.
pub(super) fn create(scene: &Scene) {
    let default = "/api/v1/namespaces/default";
    let settings = json!({"metadata": {"name": "settings"}, "data": {"color": "red"}});
    scene.cluster.create(&format!("{default}/configmaps"), &settings).unwrap();
    let word = json!({"metadata": {"name": "word"}, "stringData": {"pass": "sesame"}});
    scene.cluster.create(&format!("{default}/secrets"), &word).unwrap();
    let account = json!({"metadata": {"name": "default"}});
    scene.cluster.create(&format!("{default}/serviceaccounts"), &account).unwrap();
    let driver = json!({"metadata": {"name": DRIVER}, "spec": {
        "attachRequired": false, "podInfoOnMount": true, "volumeLifecycleModes": ["Persistent", "Ephemeral"],
    }});
    scene.cluster.create("/apis/storage.k8s.io/v1/csidrivers", &driver).unwrap();
    if scene.facts.has_claims() {
        CLAIMS.iter().for_each(|claim| bind(scene, claim));
    }
}

/// Creates a claim that is bound to a volume of the driver, as controllers would.
fn bind(scene: &Scene, claim: &str) {
    let (modes, amount) = (json!(["ReadWriteOnce"]), json!({"storage": "1Gi"}));
    let claims = "/api/v1/namespaces/default/persistentvolumeclaims";
    let wanted = json!({"metadata": {"name": claim}, "spec": {
        "volumeName": claim, "storageClassName": "", "accessModes": modes, "resources": {"requests": amount},
    }});
    let made = scene.cluster.create(claims, &wanted).unwrap();
    let volume = json!({"metadata": {"name": claim}, "spec": {
        "csi": {"driver": DRIVER, "volumeHandle": claim}, "accessModes": modes, "capacity": amount,
        "claimRef": {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "default", "name": claim,
            "uid": made["metadata"]["uid"],
        },
    }});
    scene.cluster.create("/api/v1/persistentvolumes", &volume).unwrap();
    let bound = json!({"status": {"phase": "Bound", "accessModes": modes, "capacity": amount}});
    scene.cluster.patch(&format!("{claims}/{claim}/status"), &bound).unwrap();
}

/// Writes a manifest of a serving static pod. Returns the name of its mirror.
pub(super) fn write_static(scene: &Scene, name: &str) -> String {
    let manifest = manifests::serving(name).to_string();
    let dir = scene.root.with_file_name("manifests");
    fs::write(dir.join(format!(".{name}")), manifest).unwrap();
    fs::rename(dir.join(format!(".{name}")), dir.join(format!("{name}.yaml"))).unwrap();
    format!("{name}-{NODE}")
}
