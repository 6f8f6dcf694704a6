//! Volumes that the agent itself mounts: a container gets them only if the runtime sees these mounts.

use k8s_openapi::api::core::v1::{Container, Pod, Volume};

/// Returns the first volume of a pod that the agent mounts on this machine.
///
/// A folder of the machine, an emptyDir on the disk and a ConfigMap's files are not mounts, and the runtime
/// mounts images.
#[must_use]
pub fn first_mounted(pod: &Pod) -> Option<&str> {
    let volumes = pod.spec.as_ref()?.volumes.as_deref().unwrap_or_default();
    volumes.iter().find(|volume| is_mounted(volume)).map(|volume| volume.name.as_str())
}

/// Returns the first volume of which a container uses a part: the agent mounts the part in place.
#[must_use]
pub fn first_part(container: &Container) -> Option<&str> {
    let mut mounts = container.volume_mounts.iter().flatten();
    let is_set = |path: &Option<String>| path.as_ref().is_some_and(|path| !path.is_empty());
    mounts
        .find(|mount| is_set(&mount.sub_path) || is_set(&mount.sub_path_expr))
        .map(|mount| mount.name.as_str())
}

fn is_mounted(volume: &Volume) -> bool {
    let on_disk =
        volume.empty_dir.as_ref().is_some_and(|dir| dir.medium.as_deref().unwrap_or_default().is_empty());
    !(on_disk || volume.config_map.is_some() || volume.host_path.is_some() || volume.image.is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn folders_of_the_machine_and_on_its_disk_are_no_mounts() {
        let check = |volumes: serde_json::Value, expected: Option<&str>| {
            let pod: Pod =
                serde_json::from_value(json!({"spec": {"containers": [], "volumes": volumes}})).unwrap();
            assert_eq!(first_mounted(&pod), expected);
        };
        check(json!([]), None);
        check(json!([{"name": "a", "hostPath": {"path": "/a"}}, {"name": "b", "emptyDir": {}}]), None);
        check(json!([{"name": "a", "image": {"reference": "b"}}, {"name": "b", "configMap": {}}]), None);
        check(
            json!([{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {"medium": "Memory"}}]),
            Some("b"),
        );
        for kind in ["secret", "projected", "downwardAPI", "ephemeral"] {
            check(json!([{"name": "a", kind: {}}]), Some("a"));
        }
        check(json!([{"name": "a", "persistentVolumeClaim": {"claimName": "c"}}]), Some("a"));
        check(json!([{"name": "a", "csi": {"driver": "d"}}]), Some("a"));
    }

    #[test]
    fn a_part_of_a_volume_is_a_mount() {
        let check = |mounts: serde_json::Value, expected: Option<&str>| {
            let container: Container =
                serde_json::from_value(json!({"name": "c", "volumeMounts": mounts})).unwrap();
            assert_eq!(first_part(&container), expected);
        };
        check(
            json!([{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/b", "subPath": ""}]),
            None,
        );
        check(json!([{"name": "a", "mountPath": "/a", "subPath": "x"}]), Some("a"));
        check(json!([{"name": "a", "mountPath": "/a", "subPathExpr": "x"}]), Some("a"));
    }
}
