//! CRI configurations of a pod's sandbox and its containers.
//! Pure: values that need a lookup (addresses, images, mounts) are arguments.

pub use beelet_model::pod::{Allocatable, ImageUser, NodeFacts, grace_period, log_folder, log_path};
mod network;
mod security;
mod users;

pub use security::{MASKED_PATHS, READONLY_PATHS};

use std::{collections::HashMap, time::Duration};

use beelet_codec::data::to_json;
use beelet_policy::resources::cgroups::{self as values, ContainerResources};
use beelet_proto::cri;
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1 as core;

use super::{Error, app_armor, definition, env::Environment, resize, signals};
use beelet_model::{labels, table::PodName};

pub use self::network::{HostName, dns_warnings, name_resolution};
pub(crate) use self::security::with_dots;
pub use self::users::UserNamespace;

/// Period of quotas outside the node's own configuration.
const CFS_PERIOD_US: i64 = 100_000;

fn pod_labels(pod: &core::Pod) -> HashMap<String, String> {
    let name = PodName::of(pod);
    let mut all: HashMap<String, String> =
        pod.metadata.labels.clone().unwrap_or_default().into_iter().collect();
    all.insert(labels::POD_NAME.to_owned(), name.name);
    all.insert(labels::POD_NAMESPACE.to_owned(), name.namespace);
    all.insert(labels::POD_UID.to_owned(), pod.metadata.uid.clone().unwrap_or_default());
    all.insert(labels::MANAGED_BY.to_owned(), labels::MANAGED_BY_BEELET.to_owned());
    all
}

/// Returns the configuration of a pod's sandbox. `wanted` is the total of its containers.
///
/// # Errors
/// Fails if the hostname is too long for Linux, or the overhead is unreadable.
pub fn sandbox(
    pod: &core::Pod,
    attempt: u32,
    cgroup_parent: String,
    wanted: ContainerResources,
    node: &NodeFacts,
) -> Result<cri::PodSandboxConfig, Error> {
    let name = PodName::of(pod);
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    let default_spec = core::PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&default_spec);
    let mut annotations: HashMap<String, String> =
        pod.metadata.annotations.clone().unwrap_or_default().into_iter().collect();
    annotations.insert(labels::GRACE_PERIOD.to_owned(), grace_period(pod).as_secs().to_string());
    annotations.insert(labels::SHAPE.to_owned(), resize::shape(pod));
    Ok(cri::PodSandboxConfig {
        hostname: network::hostname(spec, &name, node)?,
        log_directory: log_folder(&node.pod_logs_dir, &name, &uid).to_string_lossy().into_owned(),
        dns_config: Some(network::dns(spec, &name.namespace, node)),
        port_mappings: network::port_mappings(spec),
        labels: pod_labels(pod),
        annotations,
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent,
            security_context: Some(security::of_sandbox(spec)),
            sysctls: security::sysctls(spec),
            overhead: overhead(spec)?,
            resources: Some(resources(wanted)),
        }),
        metadata: Some(cri::PodSandboxMetadata { name: name.name, uid, namespace: name.namespace, attempt }),
        ..Default::default()
    })
}

/// Returns the overhead of the pod's runtime class, for runtimes that size a virtual machine by it.
fn overhead(spec: &core::PodSpec) -> Result<Option<cri::LinuxContainerResources>, Error> {
    let Some(costs) = spec.overhead.as_ref().filter(|costs| !costs.is_empty()) else { return Ok(None) };
    let amount = |name: &str| -> Result<Option<Quantity>, Error> {
        let parsed = costs.get(name).map(|text| Quantity::parse(&text.0)).transpose();
        parsed.map_err(|cause| Error::AmountOf { field: format!("spec.overhead.{name}"), cause })
    };
    let (cpu, memory) = (amount("cpu")?, amount("memory")?);
    Ok(Some(cri::LinuxContainerResources {
        cpu_period: CFS_PERIOD_US,
        cpu_shares: cpu
            .map_or(0, |cpu| i64::try_from(values::millis_to_shares(cpu.milli_value())).unwrap_or(i64::MAX)),
        cpu_quota: cpu
            .map_or(0, |cpu| values::millis_to_quota(cpu.milli_value(), CFS_PERIOD_US.unsigned_abs())),
        memory_limit_in_bytes: memory.map_or(0, Quantity::value),
        ..Default::default()
    }))
}

/// Optional features of the runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Exactly the requested supplemental groups.
    pub supplemental_groups_policy: bool,
    /// Mounts that are read-only including all mounts below them.
    pub recursive_read_only: bool,
}

/// Inputs for the creation of a container, in addition to its spec.
#[derive(Clone, Debug)]
pub struct ContainerFacts {
    /// Restart count.
    pub attempt: u32,
    /// Restart delay before this start.
    pub restart_delay: Duration,
    /// Number of earlier restarts of all containers of the pod.
    pub round: u32,
    /// Identifier of the image at the runtime.
    pub image_ref: String,
    /// User and groups of the image.
    pub image_user: ImageUser,
    /// Features of the runtime.
    pub features: Features,
    /// Resolved volumes and files.
    pub mounts: Vec<cri::Mount>,
    /// Identifier at the runtime of the container whose processes this one shares.
    pub process_target: Option<String>,
    /// Decided cgroup values.
    pub resources: ContainerResources,
}

/// Returns the configuration of a container.
///
/// # Errors
/// Fails if the security settings are impossible, the stop signal is unknown, or the texts are too long.
pub fn container(
    pod: &core::Pod,
    spec: &core::Container,
    mut env: Environment,
    facts: ContainerFacts,
    node: &NodeFacts,
) -> Result<cri::ContainerConfig, Error> {
    let default_spec = core::PodSpec::default();
    let pod_spec = pod.spec.as_ref().unwrap_or(&default_spec);
    let confinement = security::of_container(pod_spec, spec, &facts, node)?;
    let apparmor = app_armor::of_container(pod, spec);
    let command = env.expand_words((&spec.name, "command"), spec.command.as_ref())?;
    let args = env.expand_words((&spec.name, "args"), spec.args.as_ref())?;
    let mut all_labels = pod_labels(pod);
    all_labels.insert(labels::CONTAINER_NAME.to_owned(), spec.name.clone());
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let mut annotations = HashMap::from([
        (labels::CONTAINER_HASH.to_owned(), definition::digest(spec)),
        (labels::TERMINATION_PATH.to_owned(), text(&spec.termination_message_path)),
        (labels::TERMINATION_POLICY.to_owned(), text(&spec.termination_message_policy)),
        (labels::RESTART_COUNT.to_owned(), facts.attempt.to_string()),
        (labels::RESTART_DELAY.to_owned(), facts.restart_delay.as_secs().to_string()),
        (labels::ROUND.to_owned(), facts.round.to_string()),
        (labels::GRACE_PERIOD.to_owned(), grace_period(pod).as_secs().to_string()),
    ]);
    annotations.extend(definition::amounts(spec).map(|amounts| (labels::AMOUNTS.to_owned(), amounts)));
    annotations.extend(for_kubelets(spec));
    Ok(cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: spec.name.clone(), attempt: facts.attempt }),
        image: Some(cri::ImageSpec {
            image: facts.image_ref,
            user_specified_image: spec.image.clone().unwrap_or_default(),
            ..Default::default()
        }),
        command,
        args,
        working_dir: spec.working_dir.clone().unwrap_or_default(),
        envs: env.into_pairs().map(|(key, value)| cri::KeyValue { key, value }).collect(),
        mounts: facts.mounts,
        labels: all_labels,
        annotations,
        log_path: log_path(&spec.name, facts.attempt),
        stdin: spec.stdin.unwrap_or(false),
        stdin_once: spec.stdin_once.unwrap_or(false),
        tty: spec.tty.unwrap_or(false),
        stop_signal: signals::of_container(spec)?.into(),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(resources(facts.resources)),
            security_context: Some(cri::LinuxContainerSecurityContext { apparmor, ..confinement }),
        }),
        ..Default::default()
    })
}

/// Returns the annotations from which a kubelet restores a container of a pod that it no longer knows: the
/// ports and the preStop hook.
fn for_kubelets(spec: &core::Container) -> impl Iterator<Item = (String, String)> {
    let ports = spec.ports.as_ref().filter(|ports| !ports.is_empty()).and_then(|ports| to_json(ports).ok());
    let pre_stop = spec.lifecycle.as_ref().and_then(|lifecycle| to_json(lifecycle.pre_stop.as_ref()?).ok());
    let named = |name: &str, text: Option<String>| text.map(|text| (name.to_owned(), text));
    [named(labels::PORTS, ports), named(labels::PRE_STOP, pre_stop)].into_iter().flatten()
}

/// Converts the decided cgroup values to CRI.
fn resources(decided: ContainerResources) -> cri::LinuxContainerResources {
    cri::LinuxContainerResources {
        cpu_shares: i64::try_from(decided.cpu_shares).unwrap_or(i64::MAX),
        cpu_quota: decided.cpu_quota,
        cpu_period: i64::try_from(decided.cpu_period).unwrap_or(i64::MAX),
        memory_limit_in_bytes: decided.memory_limit_bytes,
        oom_score_adj: decided.oom_score_adj,
        memory_swap_limit_in_bytes: decided.memory_swap_limit_bytes,
        hugepage_limits: decided
            .huge_page_limits
            .into_iter()
            .map(|(page_size, limit)| cri::HugepageLimit { page_size, limit })
            .collect(),
        unified: decided.unified.into_iter().collect(),
        ..Default::default()
    }
}

/// Converts the values for an existing container: a missing limit is explicit, because 0 would keep the old
/// one.
pub fn update(decided: ContainerResources) -> cri::LinuxContainerResources {
    let mut wanted = resources(decided);
    if wanted.memory_limit_in_bytes == 0 {
        wanted.memory_limit_in_bytes = -1;
    }
    if wanted.cpu_quota == 0 && wanted.cpu_period != 0 {
        wanted.cpu_quota = -1;
    }
    wanted
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixtures::{facts, node};

    #[test]
    fn what_the_containers_need_and_a_runtime_classs_overhead_are_told_to_the_runtime() {
        let pod: core::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1"},
            "spec": {"containers": [], "overhead": {"cpu": "250m", "memory": "64Mi"}}
        }))
        .unwrap();
        let wanted = ContainerResources { memory_limit_bytes: 1 << 30, ..facts().resources };
        let config = sandbox(&pod, 0, "/kubepods/x".to_owned(), wanted, &node()).unwrap();
        let linux = config.linux.unwrap();
        assert_eq!(linux.resources.unwrap().memory_limit_in_bytes, 1 << 30);
        let overhead = linux.overhead.unwrap();
        assert_eq!(
            (overhead.cpu_shares, overhead.cpu_quota, overhead.memory_limit_in_bytes),
            (256, 25_000, 64 << 20)
        );
    }

    #[test]
    fn commands_are_expanded_with_the_environment() {
        let pod: core::Pod =
            serde_json::from_value(json!({"metadata": {"name": "web", "uid": "u1"}})).unwrap();
        let spec: core::Container = serde_json::from_value(json!({
            "name": "c", "env": [{"name": "A", "value": "1"}], "command": ["run", "$(A)"], "args": ["$(B)"],
        }))
        .unwrap();
        let (objects, node) = (beelet_model::objects::Objects::default(), node());
        let sources = crate::env::Sources { pod: &pod, pod_ips: &[], objects: &objects, node: &node };
        let env = sources.environment(&spec).unwrap();
        let config = container(&pod, &spec, env, facts(), &node).unwrap();
        assert_eq!(
            (config.command, config.args),
            (vec!["run".to_owned(), "1".to_owned()], vec!["$(B)".to_owned()])
        );
        assert_eq!(config.log_path, "c/2.log");
    }

    #[test]
    fn words_that_grow_are_refused_by_their_place() {
        let pod: core::Pod =
            serde_json::from_value(json!({"metadata": {"name": "web", "uid": "u1"}})).unwrap();
        let check = |command: serde_json::Value, args: serde_json::Value, expected: &str| {
            let env = json!([{"name": "A", "value": "x".repeat(512 << 10)}]);
            let spec = json!({"name": "c", "env": env, "command": command, "args": args});
            let spec: core::Container = serde_json::from_value(spec).unwrap();
            let (objects, node) = (beelet_model::objects::Objects::default(), node());
            let sources = crate::env::Sources { pod: &pod, pod_ips: &[], objects: &objects, node: &node };
            let env = sources.environment(&spec).unwrap();
            let failed = container(&pod, &spec, env, facts(), &node).map(|_| ()).unwrap_err();
            assert_eq!(failed.to_string(), expected);
        };
        let alone = "is longer than 1048576 bytes once its references are replaced";
        let together = "makes the total longer than 16777216 bytes";
        check(json!(["run", "$(A)$(A)$(A)"]), json!([]), &format!("command[1] of container c {alone}"));
        check(json!(["run"]), json!(["$(A)".repeat(190_000)]), &format!("args[0] of container c {alone}"));
        // Half a MiB is environment, fifteen are the command.
        let many = |words: usize| vec!["$(A)$(A)"; words];
        check(json!(many(15)), json!(many(1)), &format!("args[0] of container c {together}"));
        check(json!(many(16)), json!([]), &format!("command[15] of container c {together}"));
    }
}
