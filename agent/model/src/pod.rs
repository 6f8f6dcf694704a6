//! What follows from a pod's spec alone, and the folders and names that all parts use for it.

use std::{
    collections::HashMap,
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

use crate::{labels, status::runtime_id, table::PodName};

/// The container or init container of this name.
pub fn container_of<'a>(pod: &'a core::Pod, name: &str) -> Option<&'a core::Container> {
    let spec = pod.spec.as_ref()?;
    spec.init_containers.iter().flatten().chain(&spec.containers).find(|c| c.name == name)
}

/// The annotation that says which of a pod's containers is meant by default, as to kubectl.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// The container that is meant where nobody named one: the one of the annotation that kubectl knows, else the
/// first. Empty for a pod without any.
#[must_use]
pub fn default_container(pod: &core::Pod) -> &str {
    let annotated = pod.metadata.annotations.as_ref().and_then(|all| all.get(DEFAULT_CONTAINER));
    let first = || pod.spec.as_ref()?.containers.first().map(|container| &container.name);
    annotated.or_else(first).map_or("", String::as_str)
}

/// The names of a pod's containers of every kind, in the order in which they begin.
#[must_use]
pub fn container_names(spec: &core::PodSpec) -> Vec<&str> {
    let usual = spec.init_containers.iter().flatten().chain(&spec.containers);
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| container.name.as_str());
    usual.map(|container| container.name.as_str()).chain(ephemeral).collect()
}

/// Returns true if a port of the machine is to lead to a pod that has a network of its own.
#[must_use]
pub fn has_host_port(pod: &core::Pod) -> bool {
    let Some(spec) = pod.spec.as_ref().filter(|spec| spec.host_network != Some(true)) else { return false };
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    ports.any(|port| port.host_port.is_some_and(|port| port > 0))
}

/// Which of a pod's lists a container is in.
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
    /// The list with the container of this name.
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

    /// The list's name in a pod's spec.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Own => "containers",
            Self::Init => "initContainers",
            Self::Ephemeral => "ephemeralContainers",
        }
    }
}

/// The containers that run, with the runtime's identifiers.
pub fn running(pod: &core::Pod) -> impl Iterator<Item = (&str, &core::Container)> {
    let status = pod.status.as_ref();
    let all = status.into_iter().flat_map(|status| {
        status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten())
    });
    all.filter(|one| one.state.as_ref().is_some_and(|state| state.running.is_some()))
        .filter_map(|one| Some((runtime_id(one)?, container_of(pod, &one.name)?)))
}

/// What a pod's containers get to end by themselves where the pod says nothing, in seconds: the API's own
/// default.
pub const USUAL_GRACE_SECONDS: i64 = 30;

/// The time that a pod's containers get to end by themselves, within the bounds of [`bounds::grace`].
pub fn grace_period(pod: &core::Pod) -> Duration {
    let seconds = pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds);
    bounds::grace(seconds.unwrap_or(USUAL_GRACE_SECONDS))
}

/// The folder of a pod's logs: `<namespace>_<name>_<uid>`, as the kubelet lays it out.
pub fn log_folder(logs: &Path, name: &PodName, uid: &str) -> PathBuf {
    logs.join(format!("{}_{}_{uid}", name.namespace, name.name))
}

/// A container's log inside the pod's folder.
pub fn log_path(container: &str, attempt: u32) -> String {
    format!("{container}/{attempt}.log")
}

/// The node's own addresses: one, or one of each family, or none. They may change while the node runs, or
/// come late, so they are asked for each time.
#[derive(Clone)]
pub struct HostIps {
    /// Pods' addresses of IPv6 come before those of IPv4.
    pub is_ipv6_first: bool,
    ask: Arc<dyn Fn() -> Vec<IpAddr> + Send + Sync>,
}

impl HostIps {
    /// Those that `ask` answers, which must be quick: it is called from async tasks.
    pub fn new(is_ipv6_first: bool, ask: impl Fn() -> Vec<IpAddr> + Send + Sync + 'static) -> Self {
        Self { is_ipv6_first, ask: Arc::new(ask) }
    }

    /// These, for good.
    pub fn fixed(ips: Vec<IpAddr>) -> Self {
        Self::new(ips.first().is_some_and(IpAddr::is_ipv6), move || ips.clone())
    }

    /// The addresses as of now, the primary one first.
    pub fn now(&self) -> Vec<IpAddr> {
        (self.ask)()
    }

    /// A pod's addresses of those that the runtime told.
    pub fn sorted(&self, of_pod: &[String]) -> Vec<String> {
        addresses::sort_pod_ips(of_pod, self.is_ipv6_first)
    }
}

impl fmt::Debug for HostIps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostIps").field(&self.now()).finish()
    }
}

/// The node's own name resolution. Read again for each sandbox: the network's daemons rewrite its file.
#[derive(Clone)]
pub struct HostDns {
    last: Arc<RwLock<cri::DnsConfig>>,
    read: Arc<dyn Fn() -> io::Result<cri::DnsConfig> + Send + Sync>,
}

impl HostDns {
    /// The one that `read` reads; empty until it has been read.
    pub fn new(read: impl Fn() -> io::Result<cri::DnsConfig> + Send + Sync + 'static) -> Self {
        Self { last: Arc::default(), read: Arc::new(read) }
    }

    /// This one, for good.
    pub fn fixed(dns: cri::DnsConfig) -> Self {
        Self { last: Arc::new(RwLock::new(dns.clone())), read: Arc::new(move || Ok(dns.clone())) }
    }

    /// Reads it anew. It may block.
    ///
    /// # Errors
    /// It can't be read; the sentence says what to do. What was read last stays known.
    pub fn read(&self) -> io::Result<()> {
        let dns = (self.read)()?;
        *self.last.write().unwrap_or_else(PoisonError::into_inner) = dns;
        Ok(())
    }

    /// As it was read last.
    pub fn last(&self) -> cri::DnsConfig {
        self.last.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl fmt::Debug for HostDns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostDns").field(&self.last()).finish()
    }
}

/// What the node adds to a pod's spec.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    /// The node's name.
    pub node_name: String,
    /// The node's own addresses, `status.hostIPs`.
    pub host: HostIps,
    /// The folder that holds a folder of logs for each pod.
    pub pod_logs_dir: PathBuf,
    /// The node's own name resolution, for pods with dnsPolicy `Default`.
    pub host_dns: HostDns,
    /// Name servers for pods with dnsPolicy `ClusterFirst`; without any they get the node's.
    pub cluster_dns: Vec<IpAddr>,
    /// The domain that those pods' search list is made of.
    pub cluster_domain: String,
    /// The folder of the profiles that `seccompProfile: {type: Localhost}` names.
    pub seccomp_root: PathBuf,
    /// Containers without a seccompProfile get the runtime's.
    pub seccomp_default: bool,
    /// Kernel settings that pods may have beside the safe ones; a `*` at the end stands for the rest of a
    /// name.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// The kernel enforces AppArmor profiles.
    pub app_armor: bool,
    /// Folders of this machine that containers don't see, beside those that no machine shows.
    pub masked: Vec<String>,
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

/// User and groups of an image, where the pod does not set them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageUser {
    /// The number of its user.
    pub uid: Option<i64>,
    /// The name of its user, where it has no number.
    pub name: String,
}

/// The labels of everything we created.
pub fn managed() -> HashMap<String, String> {
    HashMap::from([(labels::MANAGED_BY.to_owned(), labels::MANAGED_BY_BEELET.to_owned())])
}

/// The labels of everything we created for a pod.
pub fn selector(uid: &str) -> HashMap<String, String> {
    let mut selector = managed();
    selector.insert(labels::POD_UID.to_owned(), uid.to_owned());
    selector
}

/// Returns true if an alias is one: an address, and names for it.
pub fn is_address(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok()
}

impl NodeFacts {
    /// The amount of a resource that the node has for pods: the value of a limit that isn't set.
    pub fn allocatable(&self, resource: &str) -> Quantity {
        match resource {
            "cpu" => Quantity::from_millis(self.allocatable.cpu_millis),
            "memory" => Quantity::from_units(self.allocatable.memory_bytes),
            "ephemeral-storage" => Quantity::from_units(self.allocatable.storage_bytes),
            _ => Quantity::ZERO,
        }
    }
}
