//! The target for a manifest's bytes, with the code that reads the folder's files.

use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use beelet_policy::{
    devices,
    probe::{ProbeKind, settings},
    resources::{
        self,
        cgroups::{CgroupConfig, CgroupVersion, NodeAmounts, pod_cgroup},
        qos,
    },
};
use beelet_units::cgroup_driver::CgroupDriver;
use k8s_openapi::api::core::v1::Pod;

use beelet_manifests::Object;
use beelet_manifests::folder::{Content, Folder, FolderState};

const NOW: &str = "2026-01-01T00:00:00Z";

/// Tests a manifest: an accepted pod is itself an acceptable manifest, which reads back unchanged; every
/// decision about the pod succeeds; the same bytes a second time change nothing in the folder.
pub fn manifest(input: &[u8]) {
    let mut folder = Folder::new("/manifests".into(), "node".to_owned(), false);
    folder.set_standing(FolderState::Read);
    let file = PathBuf::from("/manifests/a.yaml");
    folder.update(file.clone(), Content::Bytes(input.to_vec(), UNIX_EPOCH), NOW);
    let desired = folder.desired();
    assert!(desired.pods.len() <= 1 && desired.rejected.len() <= 1);
    for rejected in &desired.rejected {
        assert!(!rejected.message.contains("please report it as a bug"), "{}", rejected.message);
    }
    assert!(folder.update(file, Content::Bytes(input.to_vec(), UNIX_EPOCH), NOW).is_empty());
    assert_eq!(folder.desired(), desired);
    desired.pods.values().for_each(|pod| decisions(pod));

    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(beelet_manifests::Manifest { object: Object::Pod(pod), .. }) =
        beelet_manifests::read(text, "a.yaml")
    else {
        return;
    };
    let completed = serde_json::to_string(&pod).unwrap();
    match beelet_manifests::read(&completed, "a.json") {
        Ok(again) => assert_eq!(again.object, Object::Pod(pod), "{completed}"),
        Err(error) => panic!("the completed pod is rejected: {error}\n{completed}"),
    }
}

/// Makes the decisions that the agent makes about every pod.
fn decisions(pod: &Pod) {
    let demand = resources::PodDemand::read(pod).unwrap();
    let class = qos::qos_class_of(pod, &demand);
    assert_eq!(qos::qos_class(pod), Ok(class));
    let _ = devices::container_requests(pod);
    let node =
        NodeAmounts { memory_capacity: 16 << 30, allocatable_millis: 4000, allocatable_memory: 15 << 30 };
    for version in [CgroupVersion::V1, CgroupVersion::V2] {
        for driver in [CgroupDriver::Cgroupfs, CgroupDriver::Systemd] {
            let config = CgroupConfig { driver, ..CgroupConfig::new(version, node) };
            pod_cgroup(pod, &config).unwrap();
        }
    }
    let annotations = pod.metadata.annotations.clone().unwrap_or_default();
    for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
        let _ = settings::read(&annotations, &container.name, ProbeKind::Liveness);
    }
}
