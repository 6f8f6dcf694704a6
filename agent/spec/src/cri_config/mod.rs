//! A pod's spec in the runtime's words: the CRI configurations of its sandbox and its containers.
//! Pure: everything that must be looked up (addresses, images, mounts) comes in.

pub use beelet_model::pod::{Allocatable, ImageUser, NodeFacts, grace_period, log_folder, log_path};
mod network;
mod security;
mod users;

pub use security::{MASKED_PATHS, READONLY_PATHS};

use std::{collections::HashMap, time::Duration};

use beelet_policy::resources::cgroups::{self as values, ContainerResources};
use beelet_proto::cri;
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1 as core;

use super::{Error, app_armor, definition, env::Environment, resize, signals};
use beelet_model::{labels, table::PodName};

pub use self::network::{HostName, dns_warnings, name_resolution};
pub(crate) use self::security::with_dots;
pub use self::users::UserNamespace;

/// The period of a quota that isn't the node's own business.
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

/// The configuration of a pod's sandbox. `wanted` is what its containers need together.
///
/// # Errors
/// Its names make none that Linux takes, or its overhead can't be read.
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

/// What the pod's runtime class costs by itself, for runtimes that size a virtual machine by it.
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

/// What not every runtime can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Groups that are exactly those asked for.
    pub supplemental_groups_policy: bool,
    /// Mounts that are read-only with all that is mounted below them.
    pub recursive_read_only: bool,
}

/// What is known of a container when it is about to be created, beside its spec.
#[derive(Clone, Debug)]
pub struct ContainerFacts {
    /// The restart count.
    pub attempt: u32,
    /// The delay that went before this start.
    pub restart_delay: Duration,
    /// How often all containers of the pod had been restarted together before.
    pub round: u32,
    /// The image as the runtime identifies it.
    pub image_ref: String,
    /// User and groups of the image.
    pub image_user: ImageUser,
    /// What the runtime can do.
    pub features: Features,
    /// Volumes and files, already looked up.
    pub mounts: Vec<cri::Mount>,
    /// The runtime's identifier of the container whose processes this one shares.
    pub process_target: Option<String>,
    /// Cgroup values, as decided.
    pub resources: ContainerResources,
}

/// The configuration of one container.
///
/// # Errors
/// It can't be confined as it says, asks for a stop signal that there isn't, or its texts are too long.
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

/// The decided cgroup values as CRI takes them.
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

/// The same for a container that is there: what has no limit now says so, because 0 would leave it as it is.
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
        // Half a MiB is the environment, fifteen are the command.
        let many = |words: usize| vec!["$(A)$(A)"; words];
        check(json!(many(15)), json!(many(1)), &format!("args[0] of container c {together}"));
        check(json!(many(16)), json!([]), &format!("command[15] of container c {together}"));
    }
}
