//! A pod's spec in the runtime's words: the CRI configurations of its sandbox and its containers.
//! Pure: everything that must be looked up (addresses, images, mounts) comes in.

mod network;
mod security;

pub use security::{MASKED_PATHS, READONLY_PATHS};

use std::{
    collections::HashMap,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use beelet_policy::{
    cgroups::{self as values, ContainerResources},
    expand::expand,
    quantity::Quantity,
};
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;

use super::{env::Environment, labels, resize, table::PodName};

pub(super) use self::network::HostName;
pub(super) use self::security::with_dots;

/// The period of a quota that isn't the node's own business.
const CFS_PERIOD_US: i64 = 100_000;

/// What the node adds to a pod's spec.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    /// The node's name.
    pub node_name: String,
    /// The node's own address, `status.hostIP`.
    pub host_ip: IpAddr,
    /// The folder that holds a folder of logs for each pod.
    pub pod_logs_dir: PathBuf,
    /// The node's own name resolution, for pods with dnsPolicy `Default`.
    pub host_dns: cri::DnsConfig,
    /// Name servers for pods with dnsPolicy `ClusterFirst`; without any they get the node's.
    pub cluster_dns: Vec<IpAddr>,
    /// The domain that those pods' search list is made of.
    pub cluster_domain: String,
    /// The folder of the profiles that `seccompProfile: {type: Localhost}` names.
    pub seccomp_root: PathBuf,
    /// Containers without a seccompProfile get the runtime's.
    pub seccomp_default: bool,
    /// What the node has for pods.
    pub allocatable: Allocatable,
}

/// What a node has for pods: capacity less what is reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocatable {
    /// Millicores.
    pub cpu_millis: i64,
    /// Bytes of memory.
    pub memory_bytes: i64,
    /// Bytes of local storage, where the pods' folder is.
    pub storage_bytes: i64,
}

/// The seconds that a pod's containers get to end by themselves.
pub fn grace_period(pod: &core::Pod) -> Duration {
    let seconds = pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds).unwrap_or(30);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// The folder of a pod's logs: `<namespace>_<name>_<uid>`, as the kubelet lays it out.
pub fn log_folder(logs: &Path, name: &PodName, uid: &str) -> PathBuf {
    logs.join(format!("{}_{}_{uid}", name.namespace, name.name))
}

/// A container's log inside the pod's folder.
pub(super) fn log_path(container: &str, attempt: u32) -> String {
    format!("{container}/{attempt}.log")
}

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

/// The configuration of a pod's sandbox. Fails, with a sentence, where its names make none that Linux takes.
pub fn sandbox(
    pod: &core::Pod,
    attempt: u32,
    cgroup_parent: String,
    node: &NodeFacts,
) -> Result<cri::PodSandboxConfig, String> {
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
            ..Default::default()
        }),
        metadata: Some(cri::PodSandboxMetadata { name: name.name, uid, namespace: name.namespace, attempt }),
        ..Default::default()
    })
}

/// What the pod's runtime class costs by itself, for runtimes that size a virtual machine by it.
fn overhead(spec: &core::PodSpec) -> Result<Option<cri::LinuxContainerResources>, String> {
    let Some(costs) = spec.overhead.as_ref().filter(|costs| !costs.is_empty()) else { return Ok(None) };
    let amount = |name: &str| -> Result<Option<Quantity>, String> {
        let parsed = costs.get(name).map(|text| Quantity::parse(&text.0)).transpose();
        parsed.map_err(|e| format!("spec.overhead.{name}: {e}"))
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

/// Who an image runs as where nobody says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageUser {
    /// The number of its user.
    pub uid: Option<i64>,
    /// The name of its user, where it has no number.
    pub name: String,
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
    /// The image as the runtime identifies it.
    pub image_ref: String,
    /// Who the image runs as.
    pub image_user: ImageUser,
    /// What the runtime can do.
    pub features: Features,
    /// Volumes and files, already looked up.
    pub mounts: Vec<cri::Mount>,
    /// Cgroup values, as decided.
    pub resources: ContainerResources,
}

/// The configuration of one container. Fails, with a sentence, where it can't be confined as it says.
pub(super) fn container(
    pod: &core::Pod,
    spec: &core::Container,
    env: Environment,
    facts: ContainerFacts,
    node: &NodeFacts,
) -> Result<cri::ContainerConfig, String> {
    let default_spec = core::PodSpec::default();
    let pod_spec = pod.spec.as_ref().unwrap_or(&default_spec);
    let confinement = security::of_container(pod_spec, spec, &facts, node)?;
    let expanded = |words: &Option<Vec<String>>| -> Vec<String> {
        words.iter().flatten().map(|word| expand(word, |name| env.get(name))).collect()
    };
    let mut all_labels = pod_labels(pod);
    all_labels.insert(labels::CONTAINER_NAME.to_owned(), spec.name.clone());
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let annotations = HashMap::from([
        (labels::TERMINATION_PATH.to_owned(), text(&spec.termination_message_path)),
        (labels::TERMINATION_POLICY.to_owned(), text(&spec.termination_message_policy)),
        (labels::RESTART_COUNT.to_owned(), facts.attempt.to_string()),
        (labels::RESTART_DELAY.to_owned(), facts.restart_delay.as_secs().to_string()),
        (labels::GRACE_PERIOD.to_owned(), grace_period(pod).as_secs().to_string()),
    ]);
    Ok(cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: spec.name.clone(), attempt: facts.attempt }),
        image: Some(cri::ImageSpec {
            image: facts.image_ref,
            user_specified_image: spec.image.clone().unwrap_or_default(),
            ..Default::default()
        }),
        command: expanded(&spec.command),
        args: expanded(&spec.args),
        working_dir: spec.working_dir.clone().unwrap_or_default(),
        envs: env.into_pairs().map(|(key, value)| cri::KeyValue { key, value }).collect(),
        mounts: facts.mounts,
        labels: all_labels,
        annotations,
        log_path: log_path(&spec.name, facts.attempt),
        stdin: spec.stdin.unwrap_or(false),
        stdin_once: spec.stdin_once.unwrap_or(false),
        tty: spec.tty.unwrap_or(false),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(resources(facts.resources)),
            security_context: Some(confinement),
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
        unified: decided.unified.into_iter().collect(),
        ..Default::default()
    }
}

/// The same for a container that is there: what has no limit now says so, because 0 would leave it as it is.
pub(super) fn update(decided: ContainerResources) -> cri::LinuxContainerResources {
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
pub(super) mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    /// A node to test with.
    pub(in crate::pods) fn node() -> NodeFacts {
        let host_dns = cri::DnsConfig {
            servers: vec!["192.0.2.53".to_owned()],
            searches: vec!["host.test".to_owned()],
            options: vec!["rotate".to_owned()],
        };
        NodeFacts {
            node_name: "n1".to_owned(),
            host_ip: [192, 0, 2, 1].into(),
            pod_logs_dir: "/logs".into(),
            host_dns,
            cluster_dns: vec![[10, 96, 0, 10].into()],
            cluster_domain: "cluster.test".to_owned(),
            seccomp_root: "/seccomp".into(),
            seccomp_default: false,
            allocatable: Allocatable { cpu_millis: 4000, memory_bytes: 8 << 30, storage_bytes: 100 << 30 },
        }
    }

    /// Facts of a container to test with.
    pub(in crate::pods) fn facts() -> ContainerFacts {
        ContainerFacts {
            attempt: 2,
            restart_delay: Duration::from_secs(10),
            image_ref: "sha256:1".to_owned(),
            image_user: ImageUser { uid: Some(0), name: String::new() },
            features: Features::default(),
            mounts: Vec::new(),
            resources: ContainerResources {
                cpu_shares: 2,
                cpu_quota: 0,
                cpu_period: 0,
                memory_limit_bytes: 0,
                oom_score_adj: 1000,
                unified: BTreeMap::new(),
            },
        }
    }

    #[test]
    fn a_runtime_classs_overhead_is_told_to_the_runtime() {
        let pod: core::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1"},
            "spec": {"containers": [], "overhead": {"cpu": "250m", "memory": "64Mi"}}
        }))
        .unwrap();
        let config = sandbox(&pod, 0, "/kubepods/x".to_owned(), &node()).unwrap();
        let overhead = config.linux.unwrap().overhead.unwrap();
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
        let (objects, node) = (crate::pods::objects::Objects::default(), node());
        let sources = crate::pods::env::Sources { pod: &pod, pod_ips: &[], objects: &objects, node: &node };
        let env = sources.environment(&spec).unwrap();
        let config = container(&pod, &spec, env, facts(), &node).unwrap();
        assert_eq!(
            (config.command, config.args),
            (vec!["run".to_owned(), "1".to_owned()], vec!["$(B)".to_owned()])
        );
        assert_eq!(config.log_path, "c/2.log");
    }
}
