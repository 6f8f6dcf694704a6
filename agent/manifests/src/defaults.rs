//! Defaults that the API server sets before a pod reaches a kubelet (`pkg/apis/core/v1/defaults.go`), for
//! manifests of a folder, which pass through no API server. As there, zero and empty values count as unset in
//! fields that are not pointers in the Kubernetes API.

use beelet_policy::resources::{CPU, MEMORY, PodDemand, is_pod_level_resource};
use k8s_openapi::api::core::v1::{
    Container, DownwardAPIVolumeFile, EmptyDirVolumeSource, Pod, PodSpec, Probe, Volume,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;

/// Default tag of an image reference without tag and digest.
const LATEST: &str = "latest";

/// Default mode of files in volumes of objects.
const FILE_MODE: i32 = 0o644;

/// Sets all defaults.
pub(super) fn apply(pod: &mut Pod) {
    let metadata = &mut pod.metadata;
    if metadata.namespace.as_deref().unwrap_or_default().is_empty() {
        metadata.namespace = Some("default".to_owned());
    }
    let Some(spec) = &mut pod.spec else { return };
    apply_to_spec(spec);
    let host_network = spec.host_network == Some(true);
    let containers = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
    for container in containers {
        apply_to_container(container, host_network);
    }
    default_pod_requests(pod);
}

/// Sets missing pod-level requests of limited resources: the sum of the containers' requests, or else the
/// limit (KEP-2837). The validation reports unreadable amounts.
fn default_pod_requests(pod: &mut Pod) {
    let Ok(demand) = PodDemand::read(pod) else { return };
    let of_containers: Vec<(String, Text)> = demand
        .container_requests()
        .iter()
        .filter(|(name, _)| *name == CPU || *name == MEMORY)
        .map(|(name, amount)| (name.to_owned(), Text(amount.to_string())))
        .collect();
    let Some(resources) = pod.spec.as_mut().and_then(|spec| spec.resources.as_mut()) else { return };
    let Some(limits) = resources.limits.clone().filter(|limits| !limits.is_empty()) else { return };
    let requests = resources.requests.get_or_insert_default();
    for (name, amount) in of_containers.into_iter().chain(limits) {
        if is_pod_level_resource(&name) {
            requests.entry(name).or_insert(amount);
        }
    }
}

fn or_text(field: &mut Option<String>, default: &str) {
    if field.as_deref().unwrap_or_default().is_empty() {
        *field = Some(default.to_owned());
    }
}

fn or_number(field: &mut Option<i32>, default: i32) {
    if field.unwrap_or_default() == 0 {
        *field = Some(default);
    }
}

fn apply_to_spec(spec: &mut PodSpec) {
    or_text(&mut spec.restart_policy, "Always");
    or_text(&mut spec.dns_policy, "ClusterFirst");
    or_text(&mut spec.scheduler_name, "default-scheduler");
    or_text(&mut spec.preemption_policy, "PreemptLowerPriority");
    spec.termination_grace_period_seconds.get_or_insert(30);
    spec.enable_service_links.get_or_insert(true);
    spec.security_context.get_or_insert_default();
    for volume in spec.volumes.iter_mut().flatten() {
        let mut source = volume.clone();
        source.name.clear();
        // A volume without a source is an emptyDir.
        if source == Volume::default() {
            volume.empty_dir = Some(EmptyDirVolumeSource::default());
        }
        apply_to_volume(volume);
    }
}

fn apply_to_volume(volume: &mut Volume) {
    if let Some(host_path) = &mut volume.host_path {
        host_path.type_.get_or_insert_default();
    }
    if let Some(source) = &mut volume.config_map {
        source.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(source) = &mut volume.secret {
        source.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(source) = &mut volume.downward_api {
        source.default_mode.get_or_insert(FILE_MODE);
        source.items.iter_mut().flatten().for_each(apply_to_file);
    }
    if let Some(source) = &mut volume.projected {
        source.default_mode.get_or_insert(FILE_MODE);
        let projections =
            source.sources.iter_mut().flatten().filter_map(|source| source.downward_api.as_mut());
        projections.flat_map(|source| source.items.iter_mut().flatten()).for_each(apply_to_file);
    }
    if let Some(source) = &mut volume.image {
        let policy = pull_policy(source.reference.as_deref().unwrap_or_default());
        or_text(&mut source.pull_policy, policy);
    }
}

fn apply_to_file(file: &mut DownwardAPIVolumeFile) {
    if let Some(field) = &mut file.field_ref {
        or_text(&mut field.api_version, "v1");
    }
}

fn apply_to_container(container: &mut Container, host_network: bool) {
    or_text(&mut container.termination_message_path, "/dev/termination-log");
    or_text(&mut container.termination_message_policy, "File");
    let policy = pull_policy(container.image.as_deref().unwrap_or_default());
    or_text(&mut container.image_pull_policy, policy);
    for port in container.ports.iter_mut().flatten() {
        or_text(&mut port.protocol, "TCP");
        if host_network && port.host_port.unwrap_or_default() == 0 {
            port.host_port = Some(port.container_port);
        }
    }
    for variable in container.env.iter_mut().flatten() {
        let field = variable.value_from.as_mut().and_then(|source| source.field_ref.as_mut());
        if let Some(field) = field {
            or_text(&mut field.api_version, "v1");
        }
    }
    default_requests(container);
    let probes =
        [&mut container.liveness_probe, &mut container.readiness_probe, &mut container.startup_probe];
    probes.into_iter().flatten().for_each(apply_to_probe);
}

/// Sets missing requests of limited resources to the limit.
fn default_requests(container: &mut Container) {
    let Some(resources) = &mut container.resources else { return };
    let Some(limits) = resources.limits.clone().filter(|limits| !limits.is_empty()) else { return };
    let requests = resources.requests.get_or_insert_default();
    for (name, limit) in limits {
        requests.entry(name).or_insert(limit);
    }
}

fn apply_to_probe(probe: &mut Probe) {
    or_number(&mut probe.timeout_seconds, 1);
    or_number(&mut probe.period_seconds, 10);
    or_number(&mut probe.success_threshold, 1);
    or_number(&mut probe.failure_threshold, 3);
    if let Some(http) = &mut probe.http_get {
        or_text(&mut http.path, "/");
        or_text(&mut http.scheme, "HTTP");
    }
}

/// Returns Always for the tag `latest` or no tag, and IfNotPresent for any other tag and for a digest.
#[must_use]
pub fn pull_policy(image: &str) -> &'static str {
    let (name, digest) = image.split_once('@').map_or((image, false), |(name, _)| (name, true));
    // A colon before the last slash belongs to a registry's port.
    let tag = name.rsplit('/').next().and_then(|last| last.split_once(':')).map(|(_, tag)| tag);
    match tag {
        Some(LATEST) => "Always",
        None if !digest => "Always",
        _ => "IfNotPresent",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pull_policy_follows_the_tag() {
        let check = |image: &str, expected: &str| assert_eq!(pull_policy(image), expected, "{image}");
        check("busybox", "Always");
        check("busybox:latest", "Always");
        check("busybox:1.36", "IfNotPresent");
        check("localhost:5000/busybox", "Always");
        check("localhost:5000/busybox:1.36", "IfNotPresent");
        check("localhost:5000/a/busybox:latest", "Always");
        check("busybox@sha256:0123", "IfNotPresent");
        check("busybox:1.36@sha256:0123", "IfNotPresent");
        check("busybox:latest@sha256:0123", "Always");
    }
}
