//! A pod's spec in the runtime's words: the CRI configurations of its sandbox and its containers.
//! Pure: everything that must be looked up (addresses, images, mounts) comes in.

use std::{collections::HashMap, net::IpAddr, path::Path, time::Duration};

use beelet_policy::{cgroups::ContainerResources, expand::expand};
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;

use super::{labels, resize, table::PodName};

/// Paths that Docker's default profile hides from a container, as the kubelet asks for them.
const MASKED_PATHS: &[&str] = &[
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
/// Paths that it makes read-only.
const READONLY_PATHS: &[&str] = &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
/// The longest hostname Linux takes, less its final zero.
const HOSTNAME_MAX: usize = 63;

/// What the node adds to a pod's spec.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    /// The node's name.
    pub node_name: String,
    /// The node's own address, `status.hostIP`.
    pub host_ip: IpAddr,
    /// The folder that holds a folder of logs for each pod.
    pub pod_logs_dir: std::path::PathBuf,
    /// The node's own name resolution, for pods with dnsPolicy `Default`.
    pub host_dns: cri::DnsConfig,
    /// Name servers for pods with dnsPolicy `ClusterFirst`; without any they get the node's.
    pub cluster_dns: Vec<IpAddr>,
    /// The domain that those pods' search list is made of.
    pub cluster_domain: String,
}

/// The seconds that a pod's containers get to end by themselves.
pub fn grace_period(pod: &core::Pod) -> Duration {
    let seconds = pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds).unwrap_or(30);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// The folder of a pod's logs: `<namespace>_<name>_<uid>`, as the kubelet lays it out.
pub fn log_folder(logs: &Path, name: &PodName, uid: &str) -> std::path::PathBuf {
    logs.join(format!("{}_{}_{uid}", name.namespace, name.name))
}

/// A container's log inside the pod's folder.
fn log_path(container: &str, attempt: u32) -> String {
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

/// The configuration of a pod's sandbox.
pub fn sandbox(
    pod: &core::Pod,
    attempt: u32,
    cgroup_parent: String,
    node: &NodeFacts,
) -> cri::PodSandboxConfig {
    let name = PodName::of(pod);
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    let default_spec = core::PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&default_spec);
    let mut annotations: HashMap<String, String> =
        pod.metadata.annotations.clone().unwrap_or_default().into_iter().collect();
    annotations.insert(labels::GRACE_PERIOD.to_owned(), grace_period(pod).as_secs().to_string());
    annotations.insert(labels::SHAPE.to_owned(), resize::shape(pod));
    cri::PodSandboxConfig {
        hostname: hostname(spec, &name, node),
        log_directory: log_folder(&node.pod_logs_dir, &name, &uid).to_string_lossy().into_owned(),
        dns_config: Some(dns(spec, &name.namespace, node)),
        port_mappings: port_mappings(spec),
        labels: pod_labels(pod),
        annotations,
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent,
            security_context: Some(sandbox_security(spec)),
            sysctls: sysctls(spec),
            ..Default::default()
        }),
        metadata: Some(cri::PodSandboxMetadata { name: name.name, uid, namespace: name.namespace, attempt }),
        ..Default::default()
    }
}

fn hostname(spec: &core::PodSpec, name: &PodName, node: &NodeFacts) -> String {
    if spec.host_network == Some(true) {
        return node.node_name.clone();
    }
    let wanted = spec.hostname.clone().unwrap_or_else(|| name.name.clone());
    let short: String = wanted.chars().take(HOSTNAME_MAX).collect();
    short.trim_end_matches(['-', '.']).to_owned()
}

/// Name resolution by dnsPolicy, with dnsConfig's additions.
fn dns(spec: &core::PodSpec, namespace: &str, node: &NodeFacts) -> cri::DnsConfig {
    let on_host_network = spec.host_network == Some(true);
    let mut dns = match spec.dns_policy.as_deref().unwrap_or("ClusterFirst") {
        "None" => cri::DnsConfig::default(),
        "ClusterFirst" if !on_host_network => cluster_dns(namespace, node),
        "ClusterFirstWithHostNet" => cluster_dns(namespace, node),
        _ => node.host_dns.clone(),
    };
    let Some(extra) = &spec.dns_config else { return dns };
    dns.servers.extend(extra.nameservers.iter().flatten().cloned());
    dns.searches.extend(extra.searches.iter().flatten().cloned());
    dns.options.extend(extra.options.iter().flatten().filter_map(|option| {
        let name = option.name.as_ref()?;
        Some(option.value.as_ref().map_or_else(|| name.clone(), |value| format!("{name}:{value}")))
    }));
    dns
}

/// A cluster's name servers and search list, or the node's own where it has no cluster.
fn cluster_dns(namespace: &str, node: &NodeFacts) -> cri::DnsConfig {
    if node.cluster_dns.is_empty() {
        return node.host_dns.clone();
    }
    let domain = &node.cluster_domain;
    let mut searches = Vec::new();
    if !domain.is_empty() {
        searches.extend([format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.clone()]);
    }
    searches.extend(node.host_dns.searches.iter().cloned());
    cri::DnsConfig {
        servers: node.cluster_dns.iter().map(ToString::to_string).collect(),
        searches,
        options: vec!["ndots:5".to_owned()],
    }
}

fn port_mappings(spec: &core::PodSpec) -> Vec<cri::PortMapping> {
    if spec.host_network == Some(true) {
        return Vec::new();
    }
    let ports = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .flat_map(|c| c.ports.iter().flatten());
    ports
        .filter(|p| p.host_port.unwrap_or(0) > 0)
        .map(|p| cri::PortMapping {
            protocol: match p.protocol.as_deref() {
                Some("UDP") => cri::Protocol::Udp,
                Some("SCTP") => cri::Protocol::Sctp,
                _ => cri::Protocol::Tcp,
            }
            .into(),
            container_port: p.container_port,
            host_port: p.host_port.unwrap_or(0),
            host_ip: p.host_ip.clone().unwrap_or_default(),
        })
        .collect()
}

fn namespaces(spec: &core::PodSpec) -> cri::NamespaceOption {
    let mode = |host: Option<bool>, own: cri::NamespaceMode| {
        if host == Some(true) { cri::NamespaceMode::Node } else { own }
    };
    let own_pid = if spec.share_process_namespace == Some(true) {
        cri::NamespaceMode::Pod
    } else {
        cri::NamespaceMode::Container
    };
    cri::NamespaceOption {
        network: mode(spec.host_network, cri::NamespaceMode::Pod).into(),
        pid: mode(spec.host_pid, own_pid).into(),
        ipc: mode(spec.host_ipc, cri::NamespaceMode::Pod).into(),
        ..Default::default()
    }
}

fn sandbox_security(spec: &core::PodSpec) -> cri::LinuxSandboxSecurityContext {
    let context = spec.security_context.clone().unwrap_or_default();
    let privileged =
        |c: &core::Container| c.security_context.as_ref().and_then(|s| s.privileged) == Some(true);
    cri::LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces(spec)),
        // The kubelet lets a sandbox be privileged as soon as one of its containers is.
        privileged: spec.containers.iter().chain(spec.init_containers.iter().flatten()).any(privileged),
        run_as_user: context.run_as_user.map(|value| cri::Int64Value { value }),
        run_as_group: context.run_as_group.map(|value| cri::Int64Value { value }),
        supplemental_groups: supplemental_groups(&context),
        seccomp: Some(seccomp(context.seccomp_profile.as_ref())),
        ..Default::default()
    }
}

fn supplemental_groups(context: &core::PodSecurityContext) -> Vec<i64> {
    context.fs_group.into_iter().chain(context.supplemental_groups.iter().flatten().copied()).collect()
}

fn seccomp(profile: Option<&core::SeccompProfile>) -> cri::SecurityProfile {
    use cri::security_profile::ProfileType;
    let kind = match profile.map(|p| p.type_.as_str()) {
        Some("RuntimeDefault") => ProfileType::RuntimeDefault,
        Some("Localhost") => ProfileType::Localhost,
        _ => ProfileType::Unconfined,
    };
    let localhost = profile.and_then(|p| p.localhost_profile.clone()).unwrap_or_default();
    cri::SecurityProfile { profile_type: kind.into(), localhost_ref: localhost }
}

fn sysctls(spec: &core::PodSpec) -> HashMap<String, String> {
    let listed = spec.security_context.as_ref().and_then(|c| c.sysctls.as_ref());
    listed.into_iter().flatten().map(|s| (s.name.clone(), s.value.clone())).collect()
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
    /// The pod's addresses; the node's own for host network pods.
    pub pod_ips: Vec<String>,
    /// Volumes and files, already looked up.
    pub mounts: Vec<cri::Mount>,
    /// Cgroup values, as decided.
    pub resources: ContainerResources,
}

/// The configuration of one container. Fails, with a sentence, where the environment refers to
/// something that isn't there.
pub fn container(
    pod: &core::Pod,
    spec: &core::Container,
    facts: ContainerFacts,
    node: &NodeFacts,
) -> Result<cri::ContainerConfig, String> {
    let default_spec = core::PodSpec::default();
    let pod_spec = pod.spec.as_ref().unwrap_or(&default_spec);
    let env = super::env::environment(pod, spec, &facts.pod_ips, node)?;
    let expanded = |words: &Option<Vec<String>>| -> Vec<String> {
        words.iter().flatten().map(|word| expand(word, |name| env.get(name))).collect()
    };
    let mut all_labels = pod_labels(pod);
    all_labels.insert(labels::CONTAINER_NAME.to_owned(), spec.name.clone());
    let annotations = HashMap::from([
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
            security_context: Some(container_security(pod_spec, spec)),
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

fn container_security(
    pod_spec: &core::PodSpec,
    spec: &core::Container,
) -> cri::LinuxContainerSecurityContext {
    let of_pod = pod_spec.security_context.clone().unwrap_or_default();
    let own = spec.security_context.clone().unwrap_or_default();
    let privileged = own.privileged == Some(true);
    let unmasked = privileged || own.proc_mount.as_deref() == Some("Unmasked");
    let paths =
        |list: &[&str]| if unmasked { Vec::new() } else { list.iter().map(|p| (*p).to_owned()).collect() };
    let capabilities = own.capabilities.unwrap_or_default();
    cri::LinuxContainerSecurityContext {
        capabilities: Some(cri::Capability {
            add_capabilities: capabilities.add.unwrap_or_default(),
            drop_capabilities: capabilities.drop.unwrap_or_default(),
            ..Default::default()
        }),
        privileged,
        namespace_options: Some(namespaces(pod_spec)),
        run_as_user: own.run_as_user.or(of_pod.run_as_user).map(|value| cri::Int64Value { value }),
        run_as_group: own.run_as_group.or(of_pod.run_as_group).map(|value| cri::Int64Value { value }),
        readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
        supplemental_groups: supplemental_groups(&of_pod),
        no_new_privs: own.allow_privilege_escalation == Some(false) && !privileged,
        masked_paths: paths(MASKED_PATHS),
        readonly_paths: paths(READONLY_PATHS),
        seccomp: Some(seccomp(own.seccomp_profile.as_ref().or(of_pod.seccomp_profile.as_ref()))),
        ..Default::default()
    }
}
