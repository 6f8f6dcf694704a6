//! Rules for a container, and between the containers of a pod.

use std::collections::{BTreeMap, BTreeSet};

use beelet_policy::resources::{PodDemand, huge_pages, is_pod_level_resource};
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1::{
    Container, ContainerPort, EnvFromSource, EnvVar, FileKeySelector, Pod, PodSpec, ResourceFieldSelector,
    SecurityContext, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;

use super::super::names;
use super::{Problems, lifecycle, probes};

/// Position of a container in its pod.
pub(super) struct Place {
    /// Path, e.g. `spec.containers[0]`.
    pub(super) path: String,
    /// True for an init container.
    pub(super) init: bool,
}

/// Values that must be unique in a pod.
#[derive(Default)]
pub(super) struct Seen {
    names: BTreeSet<String>,
    host_ports: BTreeSet<(i32, String, String)>,
}

/// Checks one container.
pub(super) fn container(
    place: &Place,
    container: &Container,
    spec: &PodSpec,
    volumes: &BTreeSet<&str>,
    seen: &mut Seen,
    problems: &mut Problems,
) {
    let path = &place.path;
    problems.extend(names::label(&format!("{path}.name"), &container.name));
    if !container.name.is_empty() && !seen.names.insert(container.name.clone()) {
        problems
            .add(format!("{path}.name"), format!("{:?} is the name of an earlier container", container.name));
    }
    image(path, container, problems);
    for (i, port) in container.ports.iter().flatten().enumerate() {
        let host_network = spec.host_network == Some(true);
        check_port(&format!("{path}.ports[{i}]"), port, host_network, seen, problems);
    }
    port_names(path, container, problems);
    for (i, variable) in container.env.iter().flatten().enumerate() {
        check_variable(&format!("{path}.env[{i}]"), variable, problems);
        let file = variable.value_from.as_ref().and_then(|source| source.file_key_ref.as_ref());
        if let Some(file) = file {
            file_key(&format!("{path}.env[{i}].valueFrom.fileKeyRef"), file, spec, problems);
        }
    }
    for (i, source) in container.env_from.iter().flatten().enumerate() {
        check_env_from(&format!("{path}.envFrom[{i}]"), source, problems);
    }
    resources(path, container, problems);
    mounts(path, container, volumes, problems);
    security(&format!("{path}.securityContext"), container, spec, problems);
    let sidecar = container.restart_policy.as_deref() == Some("Always");
    lifecycle::restarts(path, container, problems);
    lifecycle::hooks(path, container, spec, place.init && !sidecar, problems);
    probes::all(path, container, place.init && !sidecar, problems);
}

fn image(path: &str, container: &Container, problems: &mut Problems) {
    let image = container.image.as_deref().unwrap_or_default();
    if image.is_empty() {
        problems.add(format!("{path}.image"), "must be set");
    } else if image.contains(|c: char| c.is_whitespace() || c.is_control()) {
        problems.add(format!("{path}.image"), format!("{} contains blanks", names::quoted(image)));
    }
    let policies = ["Always", "IfNotPresent", "Never"];
    problems.one_of(&format!("{path}.imagePullPolicy"), container.image_pull_policy.as_deref(), &policies);
    let policies = ["File", "FallbackToLogsOnError"];
    let policy = container.termination_message_policy.as_deref();
    problems.one_of(&format!("{path}.terminationMessagePolicy"), policy, &policies);
}

fn check_port(
    path: &str,
    port: &ContainerPort,
    host_network: bool,
    seen: &mut Seen,
    problems: &mut Problems,
) {
    problems.within(&format!("{path}.containerPort"), Some(port.container_port.into()), 1..=65535);
    problems.one_of(&format!("{path}.protocol"), port.protocol.as_deref(), &["TCP", "UDP", "SCTP"]);
    let host_ip = port.host_ip.as_deref().unwrap_or_default();
    if !host_ip.is_empty() && host_ip.parse::<std::net::IpAddr>().is_err() {
        problems.add(format!("{path}.hostIP"), format!("{} is not an IP address", names::quoted(host_ip)));
    }
    let Some(host_port) = port.host_port.filter(|port| *port != 0) else { return };
    problems.within(&format!("{path}.hostPort"), Some(host_port.into()), 1..=65535);
    if host_network && host_port != port.container_port {
        problems.add(
            format!("{path}.hostPort"),
            format!("must be the containerPort {} in a pod with hostNetwork", port.container_port),
        );
    }
    let key = (host_port, port.protocol.clone().unwrap_or_default(), host_ip.to_owned());
    if !seen.host_ports.insert(key) {
        problems
            .add(format!("{path}.hostPort"), format!("{host_port} is taken by an earlier port of the pod"));
    }
}

fn port_names(path: &str, container: &Container, problems: &mut Problems) {
    let mut seen = BTreeSet::new();
    for (i, port) in container.ports.iter().flatten().enumerate() {
        let Some(name) = port.name.as_deref().filter(|name| !name.is_empty()) else { continue };
        let path = format!("{path}.ports[{i}].name");
        problems.extend(names::port(&path, name));
        if !seen.insert(name) {
            problems.add(path, format!("{name:?} is the name of an earlier port"));
        }
    }
}

/// Fields that `fieldRef` of a variable may refer to, in addition to `metadata.labels['key']` and
/// `metadata.annotations['key']`.
const FIELDS: [&str; 9] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

fn check_variable(path: &str, variable: &EnvVar, problems: &mut Problems) {
    problems.extend(names::variable(&format!("{path}.name"), &variable.name));
    let Some(source) = &variable.value_from else { return };
    if variable.value.as_deref().is_some_and(|value| !value.is_empty()) {
        problems.add(format!("{path}.valueFrom"), "can't be set together with a value");
    }
    let sources = [
        source.config_map_key_ref.is_some(),
        source.field_ref.is_some(),
        source.file_key_ref.is_some(),
        source.resource_field_ref.is_some(),
        source.secret_key_ref.is_some(),
    ];
    if sources.into_iter().filter(|there| *there).count() != 1 {
        problems.add(format!("{path}.valueFrom"), "must have exactly one source, e.g. fieldRef");
    }
    if let Some(selector) = &source.resource_field_ref {
        resource_field(&format!("{path}.valueFrom.resourceFieldRef"), selector, problems);
    }
    let keyed = [
        ("configMapKeyRef", source.config_map_key_ref.as_ref().map(|r| (&r.name, &r.key))),
        ("secretKeyRef", source.secret_key_ref.as_ref().map(|r| (&r.name, &r.key))),
    ];
    for (field, reference) in keyed {
        let Some((name, key)) = reference else { continue };
        problems.extend(names::subdomain(&format!("{path}.valueFrom.{field}.name"), name));
        if key.is_empty() {
            problems.add(format!("{path}.valueFrom.{field}.key"), "must be set");
        }
    }
    let Some(field) = &source.field_ref else { return };
    problems.one_of(&format!("{path}.valueFrom.fieldRef.apiVersion"), field.api_version.as_deref(), &["v1"]);
    if !FIELDS.contains(&field.field_path.as_str()) && !is_subscript(&field.field_path) {
        let rule = "is not supported in a variable; use metadata.name, metadata.namespace, metadata.uid, \
                    metadata.labels['key'], metadata.annotations['key'], spec.nodeName, status.hostIP or status.podIP";
        let path = format!("{path}.valueFrom.fieldRef.fieldPath");
        problems.add(path, format!("{} {rule}", names::quoted(&field.field_path)));
    }
}

/// Checks a variable from a file of an emptyDir volume (KEP-3721).
fn file_key(path: &str, file: &FileKeySelector, spec: &PodSpec, problems: &mut Problems) {
    problems.extend(names::variable(&format!("{path}.key"), &file.key));
    match file.path.as_str() {
        "" => problems.add(format!("{path}.path"), "must be set to the file in the volume"),
        inner => problems.extend(names::inner_path(&format!("{path}.path"), inner)),
    }
    let volume = spec.volumes.iter().flatten().find(|volume| volume.name == file.volume_name);
    if volume.is_none_or(|volume| volume.empty_dir.is_none()) {
        let name = names::quoted(&file.volume_name);
        problems.add(format!("{path}.volumeName"), format!("the pod has no emptyDir volume {name}"));
    }
}

/// Checks a source of `envFrom`.
fn check_env_from(path: &str, source: &EnvFromSource, problems: &mut Problems) {
    let named = [
        ("configMapRef", source.config_map_ref.as_ref().map(|r| &r.name)),
        ("secretRef", source.secret_ref.as_ref().map(|r| &r.name)),
    ];
    for (field, name) in named.iter().filter_map(|(field, name)| Some((field, (*name)?))) {
        problems.extend(names::subdomain(&format!("{path}.{field}.name"), name));
    }
    if named.iter().filter(|(_, name)| name.is_some()).count() != 1 {
        problems.add(path, "must have exactly one of configMapRef and secretRef");
    }
    if let Some(prefix) = source.prefix.as_deref().filter(|prefix| !prefix.is_empty()) {
        problems.extend(names::variable(&format!("{path}.prefix"), prefix));
    }
}

/// Checks a `resourceFieldRef`.
pub(super) fn resource_field(path: &str, selector: &ResourceFieldSelector, problems: &mut Problems) {
    let known = selector.resource.split_once('.').is_some_and(|(list, name)| {
        (list == "limits" || list == "requests")
            && (matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-"))
    });
    if !known {
        let rule = "is not supported; use limits or requests of cpu, memory or ephemeral-storage";
        problems.add(
            format!("{path}.resource"),
            format!("{} {rule}, e.g. limits.cpu", names::quoted(&selector.resource)),
        );
    }
    if let Some(divisor) = &selector.divisor {
        match Quantity::parse(&divisor.0) {
            Ok(divisor) if divisor < Quantity::ZERO => problems.add(format!("{path}.divisor"), "is negative"),
            Ok(_) => {}
            Err(error) => problems.add(format!("{path}.divisor"), error.to_string()),
        }
    }
}

pub(super) fn is_subscript(path: &str) -> bool {
    let rest = path.strip_prefix("metadata.labels['").or_else(|| path.strip_prefix("metadata.annotations['"));
    rest.and_then(|rest| rest.strip_suffix("']")).is_some_and(|key| !key.is_empty() && !key.contains('\''))
}

/// Checks that quantities are valid and not negative, and requests within their limits.
fn resources(path: &str, container: &Container, problems: &mut Problems) {
    let Some(resources) = &container.resources else { return };
    let limits = quantities(&format!("{path}.resources.limits"), resources.limits.as_ref(), None, problems);
    let requests = resources.requests.as_ref();
    let requests =
        quantities(&format!("{path}.resources.requests"), requests, resources.limits.as_ref(), problems);
    for (name, (limit, text)) in limits.iter().filter(|(name, _)| is_exact(name)) {
        let path = beelet_codec::field(&format!("{path}.resources.limits"), name);
        if Quantity::from_units(limit.value()) != *limit {
            problems.add(&path, format!("{text} is not a whole number: devices aren't divided"));
        }
        if requests.get(name).is_some_and(|(request, _)| request < limit) {
            problems.add(&path, format!("must equal the request: {} overcommitted", never(name)));
        }
    }
    for name in requests.keys().filter(|name| is_exact(name) && !limits.contains_key(*name)) {
        let path = beelet_codec::field(&format!("{path}.resources.limits"), name);
        problems.add(&path, format!("must be set and equal the request: {} overcommitted", never(name)));
    }
    whole_pages(&format!("{path}.resources"), &limits, &requests, problems);
    for (name, (request, text)) in &requests {
        if let Some((limit, limit_text)) = limits.get(name)
            && request > limit
        {
            let path = beelet_codec::field(&format!("{path}.resources.requests"), name);
            problems.add(path, format!("{text} is more than the limit {limit_text}"));
        }
    }
}

/// Returns true if a resource's request must equal its limit: devices and huge pages are not overcommitted.
fn is_exact(name: &str) -> bool {
    name.contains('/') || name.starts_with(huge_pages::PREFIX)
}

fn never(name: &str) -> &'static str {
    if name.contains('/') { "devices aren't" } else { "huge pages aren't" }
}

/// Quantities by resource, with their texts.
type Amounts<'c> = BTreeMap<&'c str, (Quantity, &'c str)>;

/// Checks that huge pages are whole pages of a valid size, and requested together with cpu or memory, which
/// determine the pod's QoS class.
fn whole_pages(path: &str, limits: &Amounts<'_>, requests: &Amounts<'_>, problems: &mut Problems) {
    let all = || limits.iter().chain(requests);
    let mut asked = all().filter(|(name, _)| name.starts_with(huge_pages::PREFIX)).peekable();
    if asked.peek().is_some() && !all().any(|(name, _)| matches!(*name, "cpu" | "memory")) {
        problems.add(path, "huge pages also need cpu or memory");
    }
    let mut reported = BTreeSet::new();
    for (name, (amount, text)) in asked {
        let whole = huge_pages::size_of_resource(name).is_some_and(|size| {
            Quantity::from_units(amount.value()) == *amount && amount.value() % size == 0
        });
        if !whole && reported.insert(*name) {
            let path = beelet_codec::field(&format!("{path}.limits"), name);
            problems.add(path, format!("{text} is not a multiple of the page size in the resource's name"));
        }
    }
}

/// Checks the resources of the pod as a whole against themselves and those of its containers (KEP-2837).
pub(super) fn pod_resources(spec: &PodSpec, problems: &mut Problems) {
    let Some(resources) = &spec.resources else { return };
    let limits = quantities("spec.resources.limits", resources.limits.as_ref(), None, problems);
    let requests = resources.requests.as_ref();
    let requests = quantities("spec.resources.requests", requests, resources.limits.as_ref(), problems);
    for (list, amounts) in [("limits", &limits), ("requests", &requests)] {
        for name in amounts.keys().filter(|name| !is_pod_level_resource(name)) {
            let path = beelet_codec::field(&format!("spec.resources.{list}"), name);
            problems.add(path, "is not a pod-level resource; cpu and memory are");
        }
    }
    let pod = Pod { spec: Some(spec.clone()), ..Pod::default() };
    // Unreadable amounts have been reported above.
    let demand = PodDemand::read(&pod).ok();
    let of_containers = demand.as_ref().map(PodDemand::container_requests).unwrap_or_default();
    for (name, (request, text)) in &requests {
        let path = beelet_codec::field("spec.resources.requests", name);
        if let Some((limit, limit_text)) = limits.get(name)
            && request > limit
        {
            problems.add(&path, format!("{text} is more than the limit {limit_text}"));
        }
        let together = of_containers.amount(name);
        if together > *request {
            problems
                .add(&path, format!("{text} is less than {together}, the sum of its containers' requests"));
        }
    }
    for (i, demand) in demand.iter().flat_map(|demand| demand.containers.iter().enumerate()) {
        for (name, limit) in demand.limits.iter() {
            if let Some((most, text)) = limits.get(name)
                && limit > *most
            {
                let path = beelet_codec::field(&format!("spec.containers[{i}].resources.limits"), name);
                problems.add(path, format!("is more than the pod's limit {text}"));
            }
        }
    }
}

/// Reads a list of quantities. Problems of values that are equal in `reported` have been reported already: a
/// request that defaults to its limit.
fn quantities<'c>(
    path: &str,
    list: Option<&'c BTreeMap<String, Text>>,
    reported: Option<&BTreeMap<String, Text>>,
    problems: &mut Problems,
) -> Amounts<'c> {
    let mut read = BTreeMap::new();
    for (name, Text(text)) in list.into_iter().flatten() {
        let path = beelet_codec::field(path, name);
        let mut problem = |message: String| {
            if reported.and_then(|reported| reported.get(name)).is_none_or(|Text(other)| other != text) {
                problems.add(&path, message);
            }
        };
        if !is_resource_name(name) {
            problem(
                "unknown resource; use cpu, memory, or a device's full name, e.g. example.com/gpu".to_owned(),
            );
        }
        match Quantity::parse(text) {
            Ok(quantity) if quantity < Quantity::ZERO => problem(format!("{text} is negative")),
            Ok(quantity) => {
                read.insert(name.as_str(), (quantity, text.as_str()));
            }
            Err(error) => problem(error.to_string()),
        }
    }
    read
}

fn is_resource_name(name: &str) -> bool {
    matches!(name, "cpu" | "memory" | "ephemeral-storage")
        || name.starts_with("hugepages-")
        || (name.contains('/') && names::qualified("", name).is_none())
}

fn mounts(path: &str, container: &Container, volumes: &BTreeSet<&str>, problems: &mut Problems) {
    let mut seen = BTreeSet::new();
    for (i, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let path = format!("{path}.volumeMounts[{i}]");
        if mount.name.is_empty() {
            problems.add(format!("{path}.name"), "must be set to the name of one of the pod's volumes");
        } else if !volumes.contains(mount.name.as_str()) {
            let message = format!("the pod has no volume {}", names::quoted(&mount.name));
            problems.add(format!("{path}.name"), message);
        }
        let target = &mount.mount_path;
        if target.is_empty() {
            problems.add(format!("{path}.mountPath"), "must be set");
        } else if target.contains('\0') {
            let message = format!("{} must not contain a zero byte", names::quoted(target));
            problems.add(format!("{path}.mountPath"), message);
        } else if !seen.insert(target.as_str()) {
            problems.add(format!("{path}.mountPath"), format!("{target:?} is the path of an earlier mount"));
        }
        parts(&path, mount, problems);
        let kinds = ["None", "HostToContainer", "Bidirectional"];
        let propagation = mount.mount_propagation.as_deref();
        problems.one_of(&format!("{path}.mountPropagation"), propagation, &kinds);
        let privileged = container.security_context.as_ref().and_then(|context| context.privileged);
        if propagation == Some("Bidirectional") && privileged != Some(true) {
            problems.add(format!("{path}.mountPropagation"), "Bidirectional needs a privileged container");
        }
    }
}

/// Checks a mount's subPath and its recursive read-only mode.
fn parts(path: &str, mount: &VolumeMount, problems: &mut Problems) {
    let part = mount.sub_path.as_deref().unwrap_or_default();
    let expression = mount.sub_path_expr.as_deref().unwrap_or_default();
    problems.extend(names::inner_path(&format!("{path}.subPath"), part));
    problems.extend(names::inner_path(&format!("{path}.subPathExpr"), expression));
    if !part.is_empty() && !expression.is_empty() {
        problems.add(format!("{path}.subPathExpr"), "can't be set together with subPath");
    }
    let recursive = mount.recursive_read_only.as_deref();
    let path = format!("{path}.recursiveReadOnly");
    problems.one_of(&path, recursive, &["Disabled", "Enabled", "IfPossible"]);
    if matches!(recursive, Some("Enabled" | "IfPossible")) {
        if mount.read_only != Some(true) {
            problems.add(&path, "needs readOnly: true");
        }
        if !matches!(mount.mount_propagation.as_deref(), None | Some("" | "None")) {
            problems.add(&path, "can't be set together with mountPropagation");
        }
    }
}

fn security(path: &str, container: &Container, spec: &PodSpec, problems: &mut Problems) {
    let own = container.security_context.clone().unwrap_or_default();
    let of_pod = spec.security_context.clone().unwrap_or_default();
    for (field, id) in [("runAsUser", own.run_as_user), ("runAsGroup", own.run_as_group)] {
        problems.within(&format!("{path}.{field}"), id, 0..=i32::MAX.into());
    }
    // The image's own user is known only after the pull; the container's start checks it then.
    let user = own.run_as_user.or(of_pod.run_as_user);
    if own.run_as_non_root.or(of_pod.run_as_non_root) == Some(true) && user == Some(0) {
        problems.add(format!("{path}.runAsUser"), "is root, but runAsNonRoot is true");
    }
    let (proc_mount, path_of_mount) = (own.proc_mount.as_deref(), format!("{path}.procMount"));
    problems.one_of(&path_of_mount, proc_mount, &["Default", "Unmasked"]);
    if proc_mount == Some("Unmasked") && spec.host_users != Some(false) {
        problems.add(path_of_mount, "can be Unmasked only if spec.hostUsers is false");
    }
    privileges(path, &own, problems);
}

fn privileges(path: &str, own: &SecurityContext, problems: &mut Problems) {
    if own.allow_privilege_escalation == Some(false) {
        let adds = own.capabilities.as_ref().and_then(|c| c.add.as_ref());
        if own.privileged == Some(true) {
            problems
                .add(format!("{path}.allowPrivilegeEscalation"), "can't be false in a privileged container");
        } else if adds.into_iter().flatten().any(|c| c == "SYS_ADMIN" || c == "CAP_SYS_ADMIN") {
            problems.add(
                format!("{path}.allowPrivilegeEscalation"),
                "can't be false with the capability SYS_ADMIN",
            );
        }
    }
    super::seccomp(&format!("{path}.seccompProfile"), own.seccomp_profile.as_ref(), problems);
    super::app_armor(&format!("{path}.appArmorProfile"), own.app_armor_profile.as_ref(), problems);
}
