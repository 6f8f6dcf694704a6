//! Bounds of the number and length of a pod's values for which the API has none: names of resources, amounts,
//! mounts, paths. A pod of 1.5 MB can name a huge number of each, which the agent would process for each pod
//! on the node, or mount in a table that all programs of the machine share.
//!
//! All bounds are far above those of any working pod. Must be checked before the node accepts a pod: callers
//! of [`check`] are the validation of manifests, and the planning of a pod from the API server.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, PodSpec, SeccompProfile, Volume};

use beelet_units::field::FieldError;

use super::ephemeral_containers;
use crate::volumes::content::check_path;

/// Maximum number of distinct resource names in the requests, limits and overhead of one pod.
pub const RESOURCE_NAMES: usize = 256;
/// Maximum number of amounts in the requests, limits and overhead of one pod together.
pub const AMOUNTS: usize = 10_000;
/// Maximum number of mounts that the agent creates for one pod: its volumes, the parts of volumes (`subPath`)
/// and the block devices of its containers. Linux allows 100,000 in one mount namespace (`fs.mount-max`),
/// which is the machine's own.
pub const MOUNTS: usize = 1000;

/// Checks the pod against all bounds.
///
/// # Errors
/// The path of the first field above its bound, from the pod (`spec.volumes[0].hostPath.path`).
pub fn check(spec: &PodSpec) -> Result<(), FieldError> {
    amounts(spec)?;
    mounts(spec)?;
    for (path, text) in paths(spec) {
        check_path(text).map_err(|error| FieldError::new(path, error.to_string()))?;
    }
    Ok(())
}

/// Counts the resources of the pod by name, and all its amounts.
fn amounts(spec: &PodSpec) -> Result<(), FieldError> {
    let of_containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let resources = of_containers.filter_map(|c| c.resources.as_ref()).chain(&spec.resources);
    let lists = resources.flat_map(|resources| resources.requests.iter().chain(&resources.limits));
    let lists = || lists.clone().chain(&spec.overhead);
    let amounts = lists().map(std::collections::BTreeMap::len).fold(0, usize::saturating_add);
    if amounts > AMOUNTS {
        return Err(FieldError::new(
            "spec",
            format!(
                "has {amounts} amounts of resources in its requests, limits and overhead; the agent \
                 supports at most {AMOUNTS} per pod: name fewer resources"
            ),
        ));
    }
    let names = lists().flat_map(|list| list.keys()).collect::<BTreeSet<_>>().len();
    if names > RESOURCE_NAMES {
        return Err(FieldError::new(
            "spec",
            format!(
                "names {names} different resources in its requests, limits and overhead; the agent \
                 supports at most {RESOURCE_NAMES} per pod: name fewer resources"
            ),
        ));
    }
    Ok(())
}

/// Counts the mounts that the agent creates for the pod.
fn mounts(spec: &PodSpec) -> Result<(), FieldError> {
    let volumes = spec.volumes.as_ref().map_or(0, Vec::len);
    let debuggers = ephemeral_containers(spec);
    let of_containers = all_containers(spec).chain(&debuggers).map(mounts_of);
    let mounts = of_containers.fold(volumes, usize::saturating_add);
    if mounts <= MOUNTS {
        return Ok(());
    }
    Err(FieldError::new(
        "spec",
        format!(
            "needs {mounts} mounts for its volumes, subPaths and block devices; the agent \
             supports at most {MOUNTS} per pod: use fewer"
        ),
    ))
}

/// Counts the mounts that the agent creates for one container in addition to the pod's volumes.
fn mounts_of(container: &Container) -> usize {
    let is_part = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let parts = container.volume_mounts.iter().flatten();
    let parts = parts.filter(|mount| is_part(&mount.sub_path) || is_part(&mount.sub_path_expr)).count();
    parts.saturating_add(container.volume_devices.as_ref().map_or(0, Vec::len))
}

fn all_containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten().chain(&spec.containers)
}

/// Returns each file path in the pod, with its field. Creating the volumes of objects checks the number and
/// length of their paths (`volumes::content::Allowance`); the expansion of `subPathExpr` checks its result.
fn paths(spec: &PodSpec) -> impl Iterator<Item = (String, &str)> {
    let volumes = spec.volumes.iter().flatten().enumerate().flat_map(|(i, volume)| {
        let paths = volume_paths(volume).into_iter();
        paths.filter_map(move |(field, text)| Some((format!("spec.volumes[{i}].{field}"), text?)))
    });
    let kinds = [("initContainers", spec.init_containers.as_deref()), ("containers", Some(&spec.containers))];
    let containers = kinds.into_iter().flat_map(|(kind, all)| {
        let all = all.unwrap_or_default().iter().enumerate();
        all.flat_map(move |(i, container)| {
            let paths = container_paths(container);
            paths.map(move |(field, text)| (format!("spec.{kind}[{i}].{field}"), text))
        })
    });
    let profile = spec.security_context.as_ref().and_then(|context| context.seccomp_profile.as_ref());
    let profile = local_profile(profile).map(|text| ("spec.securityContext.seccompProfile".to_owned(), text));
    volumes.chain(containers).chain(profile)
}

fn volume_paths(volume: &Volume) -> [(&'static str, Option<&str>); 2] {
    [
        ("hostPath.path", volume.host_path.as_ref().map(|source| source.path.as_str())),
        ("nfs.path", volume.nfs.as_ref().map(|source| source.path.as_str())),
    ]
}

fn container_paths(container: &Container) -> impl Iterator<Item = (String, &str)> {
    let mounts = container.volume_mounts.iter().flatten().enumerate().flat_map(|(i, mount)| {
        let part = mount.sub_path.as_deref().map(|text| (format!("volumeMounts[{i}].subPath"), text));
        [(format!("volumeMounts[{i}].mountPath"), mount.mount_path.as_str())].into_iter().chain(part)
    });
    let devices = container.volume_devices.iter().flatten().enumerate();
    let devices =
        devices.map(|(i, device)| (format!("volumeDevices[{i}].devicePath"), device.device_path.as_str()));
    let context = container.security_context.as_ref();
    let own = [
        ("workingDir", container.working_dir.as_deref()),
        ("terminationMessagePath", container.termination_message_path.as_deref()),
        (
            "securityContext.seccompProfile",
            local_profile(context.and_then(|context| context.seccomp_profile.as_ref())),
        ),
    ];
    let own = own.into_iter().filter_map(|(field, text)| Some((field.to_owned(), text?)));
    mounts.chain(devices).chain(own)
}

fn local_profile(profile: Option<&SeccompProfile>) -> Option<&str> {
    profile?.localhost_profile.as_deref()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A function that creates a spec with this path in it.
    type SpecOf = fn(&str) -> Value;

    /// Expects the start of the message about a pod's spec; empty if the spec is within all bounds.
    fn check_spec(spec: &Value, expected: &str) {
        let spec: PodSpec = serde_json::from_value(spec.clone()).unwrap();
        let found = check(&spec).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(found.starts_with(expected) && found.is_empty() == expected.is_empty(), "{found}");
    }

    fn names(range: std::ops::Range<usize>) -> Value {
        range.map(|n| (format!("example.com/r{n}"), json!("0"))).collect::<serde_json::Map<_, _>>().into()
    }

    #[test]
    fn the_resources_of_a_pod_are_bounded_in_every_field() {
        let spec = |init: Value, main: Value, overhead: Value| {
            json!({"containers": [{"name": "c", "resources": {"limits": main}}], "overhead": overhead,
                   "initContainers": [{"name": "i", "resources": {"requests": init}}]})
        };
        check_spec(&spec(names(0..256), names(0..256), names(0..256)), "");
        check_spec(&spec(names(0..100), names(100..200), names(200..256)), "");
        let too_many = "spec: names 257 different resources in its requests, limits and overhead; the agent \
                        supports at most 256 per pod: name fewer resources";
        check_spec(&spec(names(0..100), names(100..200), names(200..257)), too_many);
        check_spec(&spec(json!({}), names(0..9000), json!({})), "spec: names 9000 different resources");
        check_spec(&spec(json!({}), names(0..12_000), json!({})), "spec: has 12000 amounts of resources");
        let container = json!({"name": "c", "resources": {"limits": names(0..200)}});
        check_spec(&json!({"containers": vec![container.clone(); 50]}), "");
        check_spec(&json!({"containers": vec![container; 51]}), "spec: has 10200 amounts of resources");
    }

    #[test]
    fn volumes_subpaths_and_block_devices_are_counted_together() {
        let part = |n: usize| json!({"name": "v", "mountPath": format!("/{n}"), "subPath": n.to_string()});
        let spec = |volumes: usize, parts: usize, expressions: usize, devices: usize| {
            let volumes: Vec<_> = (0..volumes).map(|n| json!({"name": n.to_string()})).collect();
            let parts: Vec<_> = (0..parts).map(part).collect();
            let expression = json!({"name": "v", "mountPath": "/x", "subPathExpr": "$(A)"});
            let device = json!({"name": "v", "devicePath": "/dev/x"});
            // The runtime mounts whole volumes, in the container's own namespace.
            let whole = json!({"name": "v", "mountPath": "/y", "subPath": ""});
            json!({"volumes": volumes, "containers": [
                {"name": "a", "volumeMounts": parts, "volumeDevices": vec![device; devices]},
                {"name": "b", "volumeMounts": vec![whole; 2000]},
            ], "initContainers": [{"name": "i", "volumeMounts": vec![expression; expressions]}]})
        };
        check_spec(&spec(400, 300, 200, 100), "");
        let too_many = "spec: needs 1001 mounts for its volumes, subPaths and block devices; the agent \
                        supports at most 1000 per pod: use fewer";
        check_spec(&spec(401, 300, 200, 100), too_many);
        check_spec(&spec(0, 5000, 0, 0), "spec: needs 5000 mounts");
    }

    #[test]
    fn every_path_of_a_pod_has_a_length_that_linux_allows() {
        let paths: [(&str, SpecOf); 9] = [
            (
                "spec.volumes[0].hostPath.path",
                |p| json!({"volumes": [{"name": "v", "hostPath": {"path": p}}]}),
            ),
            (
                "spec.volumes[0].nfs.path",
                |p| json!({"volumes": [{"name": "v", "nfs": {"path": p, "server": "s"}}]}),
            ),
            (
                "spec.containers[0].volumeMounts[0].mountPath",
                |p| json!({"containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": p}]}]}),
            ),
            (
                "spec.containers[0].volumeMounts[0].subPath",
                |p| json!({"containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/", "subPath": p}]}]}),
            ),
            (
                "spec.containers[0].volumeDevices[0].devicePath",
                |p| json!({"containers": [{"name": "c", "volumeDevices": [{"name": "v", "devicePath": p}]}]}),
            ),
            (
                "spec.initContainers[0].workingDir",
                |p| json!({"initContainers": [{"name": "c", "workingDir": p}]}),
            ),
            (
                "spec.containers[0].terminationMessagePath",
                |p| json!({"containers": [{"name": "c", "terminationMessagePath": p}]}),
            ),
            ("spec.containers[0].securityContext.seccompProfile", |p| {
                json!({"containers": [{"name": "c", "securityContext": {
                    "seccompProfile": {"type": "Localhost", "localhostProfile": p}}}]})
            }),
            (
                "spec.securityContext.seccompProfile",
                |p| json!({"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": p}}}),
            ),
        ];
        for (field, spec) in paths {
            let spec = |levels: usize| {
                let mut spec = spec(&"/a".repeat(levels));
                spec.as_object_mut().unwrap().entry("containers").or_insert(json!([]));
                spec
            };
            check_spec(&spec(2048), "");
            check_spec(&spec(2049), &format!("{field}: the path "));
            check_spec(&spec(500_000), &format!("{field}: the path "));
        }
    }
}
