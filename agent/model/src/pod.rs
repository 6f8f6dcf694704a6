//! Values derived from a pod's spec alone, and the folders and names that all parts use for a pod.

use std::{
    fmt, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use beelet_policy::node::addresses;
use beelet_proto::cri;
use beelet_units::{bounds, quantity::Quantity};
use k8s_openapi::api::core::v1 as core;
use serde::{Deserialize, Serialize};

use crate::{status::runtime_id, table::PodName};

/// Finds the container or init container of this name.
pub fn container_of<'a>(pod: &'a core::Pod, name: &str) -> Option<&'a core::Container> {
    let spec = pod.spec.as_ref()?;
    spec.init_containers.iter().flatten().chain(&spec.containers).find(|c| c.name == name)
}

/// Annotation with a pod's default container, as for kubectl.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Returns the default container: the one of kubectl's annotation, else the first. Empty for a pod without
/// any.
#[must_use]
pub fn default_container(pod: &core::Pod) -> &str {
    let annotated = pod.metadata.annotations.as_ref().and_then(|all| all.get(DEFAULT_CONTAINER));
    let first = || pod.spec.as_ref()?.containers.first().map(|container| &container.name);
    annotated.or_else(first).map_or("", String::as_str)
}

/// Returns the names of a pod's containers of every kind, in the order in which they start.
#[must_use]
pub fn container_names(spec: &core::PodSpec) -> Vec<&str> {
    let usual = spec.init_containers.iter().flatten().chain(&spec.containers);
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| container.name.as_str());
    usual.map(|container| container.name.as_str()).chain(ephemeral).collect()
}

/// Returns true for a pod with a host port and a network of its own.
#[must_use]
pub fn has_host_port(pod: &core::Pod) -> bool {
    let Some(spec) = pod.spec.as_ref().filter(|spec| spec.host_network != Some(true)) else { return false };
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    ports.any(|port| port.host_port.is_some_and(|port| port > 0))
}

/// List of a pod's spec that contains a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ContainerKind {
    /// `spec.containers`.
    #[default]
    Own,
    /// `spec.initContainers`.
    Init,
    /// `spec.ephemeralContainers`.
    Ephemeral,
}

impl ContainerKind {
    /// Returns the list with the container of this name.
    #[must_use]
    pub fn of(pod: &core::Pod, name: &str) -> Self {
        let Some(spec) = &pod.spec else { return Self::Own };
        if spec.init_containers.iter().flatten().any(|c| c.name == name) {
            Self::Init
        } else if spec.ephemeral_containers.iter().flatten().any(|c| c.name == name) {
            Self::Ephemeral
        } else {
            Self::Own
        }
    }

    /// Returns the list's name in a pod's spec.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Own => "containers",
            Self::Init => "initContainers",
            Self::Ephemeral => "ephemeralContainers",
        }
    }
}

/// Returns the running containers, with the runtime's identifiers.
pub fn running(pod: &core::Pod) -> impl Iterator<Item = (&str, &core::Container)> {
    let status = pod.status.as_ref();
    let all = status.into_iter().flat_map(|status| {
        status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten())
    });
    all.filter(|one| one.state.as_ref().is_some_and(|state| state.running.is_some()))
        .filter_map(|one| Some((runtime_id(one)?, container_of(pod, &one.name)?)))
}

/// Default grace period of a pod, in seconds: the API's own default.
pub const USUAL_GRACE_SECONDS: i64 = 30;

/// Returns a pod's grace period, within the bounds of [`bounds::grace`].
pub fn grace_period(pod: &core::Pod) -> Duration {
    let seconds = pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds);
    bounds::grace(seconds.unwrap_or(USUAL_GRACE_SECONDS))
}

/// Returns the folder of a pod's logs: `<namespace>_<name>_<uid>`, as in the kubelet.
pub fn log_folder(logs: &Path, name: &PodName, uid: &str) -> PathBuf {
    logs.join(format!("{}_{}_{uid}", name.namespace, name.name))
}

/// Returns the path of a container's log inside the pod's folder.
pub fn log_path(container: &str, attempt: u32) -> String {
    format!("{container}/{attempt}.log")
}

/// Addresses of the node: one, or one of each family, or none. The addresses may change while the node runs,
/// or appear late, so each use reads them.
#[derive(Clone)]
pub struct HostIps {
    /// True if pods' IPv6 addresses come before IPv4 ones.
    pub is_ipv6_first: bool,
    ask: Arc<dyn Fn() -> Vec<IpAddr> + Send + Sync>,
}

impl HostIps {
    /// Creates addresses that `ask` returns, which must be quick: async tasks call it.
    pub fn new(is_ipv6_first: bool, ask: impl Fn() -> Vec<IpAddr> + Send + Sync + 'static) -> Self {
        Self { is_ipv6_first, ask: Arc::new(ask) }
    }

    /// Creates fixed addresses.
    pub fn fixed(ips: Vec<IpAddr>) -> Self {
        Self::new(ips.first().is_some_and(IpAddr::is_ipv6), move || ips.clone())
    }

    /// Returns the present addresses, the primary one first.
    pub fn now(&self) -> Vec<IpAddr> {
        (self.ask)()
    }

    /// Sorts a pod's addresses from the runtime.
    pub fn sorted(&self, of_pod: &[String]) -> Vec<String> {
        addresses::sort_pod_ips(of_pod, self.is_ipv6_first)
    }
}

impl fmt::Debug for HostIps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostIps").field(&self.now()).finish()
    }
}

/// Name resolution of the node. Read again for each sandbox: network daemons rewrite its file.
#[derive(Clone)]
pub struct HostDns {
    last: Arc<RwLock<cri::DnsConfig>>,
    read: Arc<dyn Fn() -> io::Result<cri::DnsConfig> + Send + Sync>,
}

impl HostDns {
    /// Creates a name resolution that `read` reads; empty until the first reading.
    pub fn new(read: impl Fn() -> io::Result<cri::DnsConfig> + Send + Sync + 'static) -> Self {
        Self { last: Arc::default(), read: Arc::new(read) }
    }

    /// Creates a fixed name resolution.
    pub fn fixed(dns: cri::DnsConfig) -> Self {
        Self { last: Arc::new(RwLock::new(dns.clone())), read: Arc::new(move || Ok(dns.clone())) }
    }

    /// Reads the name resolution again. The call may block.
    ///
    /// # Errors
    /// Fails with a remedy if the file is unreadable. The last result is kept.
    pub fn read(&self) -> io::Result<()> {
        let dns = (self.read)()?;
        *self.last.write().unwrap_or_else(PoisonError::into_inner) = dns;
        Ok(())
    }

    /// Returns the last result.
    pub fn last(&self) -> cri::DnsConfig {
        self.last.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl fmt::Debug for HostDns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostDns").field(&self.last()).finish()
    }
}

/// Values that the node adds to a pod's spec.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    /// Name of the node.
    pub node_name: String,
    /// Addresses of the node, `status.hostIPs`.
    pub host: HostIps,
    /// Folder with a folder of logs per pod.
    pub pod_logs_dir: PathBuf,
    /// Name resolution of the node, for pods with dnsPolicy `Default`.
    pub host_dns: HostDns,
    /// Name servers for pods with dnsPolicy `ClusterFirst`; without any these pods get the node's.
    pub cluster_dns: Vec<IpAddr>,
    /// Domain of the search list of pods with dnsPolicy `ClusterFirst`.
    pub cluster_domain: String,
    /// Folder of the profiles that `seccompProfile: {type: Localhost}` names.
    pub seccomp_root: PathBuf,
    /// True if containers without a seccompProfile get the runtime's.
    pub seccomp_default: bool,
    /// Kernel settings that pods may set in addition to the safe ones; a final `*` matches the rest of a
    /// name.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// True if the kernel enforces AppArmor profiles.
    pub app_armor: bool,
    /// Masked folders of this machine, in addition to those that every machine masks.
    pub masked: Vec<String>,
    /// Resources of the node for pods.
    pub allocatable: Allocatable,
}

/// Resources of a node for pods: capacity minus reservations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocatable {
    /// Millicores.
    pub cpu_millis: i64,
    /// Bytes of memory.
    pub memory_bytes: i64,
    /// Bytes of local storage in the pods' file system.
    pub storage_bytes: i64,
}

/// User of an image, for pods that do not set one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageUser {
    /// Number of the user.
    pub uid: Option<i64>,
    /// Name of the user, if it has no number.
    pub name: String,
}

/// Returns true if the text is an IP address.
pub fn is_address(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok()
}

impl NodeFacts {
    /// Returns the node's amount of a resource for pods: the value of an unset limit.
    pub fn allocatable(&self, resource: &str) -> Quantity {
        match resource {
            "cpu" => Quantity::from_millis(self.allocatable.cpu_millis),
            "memory" => Quantity::from_units(self.allocatable.memory_bytes),
            "ephemeral-storage" => Quantity::from_units(self.allocatable.storage_bytes),
            _ => Quantity::ZERO,
        }
    }
}
