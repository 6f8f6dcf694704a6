//! The configuration: a YAML (or JSON) stream of at most one `KubeletConfiguration`
//! (kubelet.config.k8s.io/v1beta1) and at most one `BeeletConfiguration` (beelet.dev/v1alpha1).
//!
//! It is read once, at the start, into values that cannot be wrong; nothing else in the agent reads a
//! configuration file. Defaults are the kubelet's. A field that v1beta1 has and beelet does not use yet is a
//! warning that names it; an unknown field or a bad value is an error with its line. This module must never
//! look at the machine beyond its hostname: whether the runtime answers or a folder exists is for its users.

pub mod defaults;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use beelet_policy::{
    admission::preemption,
    devices::topology::{TopologyPolicy, TopologyScope},
    images::{containers::ContainerGcPolicy, credentials::Verification},
    node::shutdown::Periods,
    probe::{EdgePolicy, listener::QueueRule},
    resources::cgroups::{CpuWeightFormula, MemoryQos, SwapBehavior},
    tuner::{Law, TunerMode, scheduler::SchedulerKind},
};
use beelet_units::{
    bpf_settings::{BpfMode, PressureEdges},
    cgroup_driver::CgroupDriver,
    quantity::Quantity,
};
use serde::{Deserialize, Serialize};

mod beelet;
mod credential_providers;
mod documents;
mod error;
mod fields;
mod kubelet;
pub mod load;
mod node;
mod pressure;
mod pressure_edges;
mod reservations;
mod resolve;
mod server;
mod shutdown;
mod tuner;
mod unsupported;
mod values;
mod words;

pub use credential_providers::{CredentialProvider, CredentialProviders, ProviderVersion, TokenAttributes};
pub use error::{ConfigError, ConfigFaults, FilePlace, Warning};
pub use load::{Setting, Sources};
pub use pressure::{Eviction, ImageGc};
pub use server::{Authorization, CIPHER_SUITES, Server, TlsFiles, TlsVersion};

/// What this node is to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The node's name: the end of every static pod's name. Default: the hostname in lower case.
    pub node_name: String,
    /// The folder (or the one file) static pods come from. None: no pods.
    pub static_pod_path: Option<PathBuf>,
    /// How often the folder is read again although no change was reported.
    pub file_check_frequency: Duration,
    /// Root of the containers' log files.
    pub pod_logs_dir: PathBuf,
    /// The runtime's socket, as `unix:///path`.
    pub runtime_endpoint: String,
    /// The image service's socket, as `unix:///path`.
    pub image_endpoint: String,
    /// Deadline of a runtime call that should be quick.
    pub runtime_request_timeout: Duration,
    /// Where `/healthz`, `/metrics` and the like are served. A loopback address.
    pub healthz_address: IpAddr,
    /// The port for it; 0: not served.
    pub healthz_port: u16,
    /// The cgroup under which `kubepods` lives, from the hierarchy's root: `/` or `/some/path`.
    pub cgroup_root: String,
    /// What manages cgroups, if that is said. The runtime's own answer, where it gives one, must be the same.
    pub cgroup_driver: Option<CgroupDriver>,
    /// Refuse to run where cgroup v1 controllers are in use. Unlike the kubelet's, our default is false.
    pub fail_cgroup_v1: bool,
    /// Whether CPU limits are enforced by CFS quota.
    pub cpu_cfs_quota: bool,
    /// The period of that quota, 1 ms to 1 s.
    pub cpu_cfs_quota_period: Duration,
    /// Most processes and threads in a pod; -1: no limit.
    pub pod_pids_limit: i64,
    /// Kept for the operating system: not for pods.
    pub system_reserved: BTreeMap<String, Quantity>,
    /// Kept for the node's own agents: not for pods.
    pub kube_reserved: BTreeMap<String, Quantity>,
    /// `reservedSystemCPUs` as it was written: their number is in `system_reserved`. They are not kept from
    /// pods.
    pub reserved_system_cpus: String,
    /// The cgroup that is held to `system_reserved`; None: it is not enforced.
    pub system_reserved_cgroup: Option<ReservedCgroup>,
    /// The cgroup that is held to `kube_reserved`; None: it is not enforced.
    pub kube_reserved_cgroup: Option<ReservedCgroup>,
    /// Whether memory requests are protected and use is throttled before its limit (cgroup v2 only); None:
    /// not at all.
    pub memory_qos: Option<MemoryQos>,
    /// The kernel kills one process for want of memory, not its container. None: as the machine's cgroups
    /// have it, which is one process on version 1 and the container on version 2.
    pub single_process_oom_kill: Option<bool>,
    /// Percentages (0 to 100) of a resource's requests that lower QoS classes may not touch; only `memory`.
    pub qos_reserved: BTreeMap<String, u8>,
    /// Name servers for pods with `dnsPolicy: ClusterFirst`.
    pub cluster_dns: Vec<IpAddr>,
    /// The domain added to those pods' search list; empty: none.
    pub cluster_domain: String,
    /// The resolver configuration that pods start from; None: an empty one.
    pub resolv_conf: Option<PathBuf>,
    /// Refuse to run on a machine with swap. Unlike the kubelet's, our default is false: no container gets
    /// any.
    pub fail_swap_on: bool,
    /// Does the agent refuse to run where the kernel is not set as a kubelet sets it?
    pub protect_kernel_defaults: bool,
    /// Which containers may use swap.
    pub swap_behavior: SwapBehavior,
    /// User and group ids of each pod with a user namespace of its own; a multiple of 65,536.
    pub user_ids_per_pod: u32,
    /// Longest delay between two restarts of a crashing container.
    pub max_container_restart_period: Duration,
    /// How strictly a container's devices must be near each other, and what is aligned together.
    pub topology: (TopologyPolicy, TopologyScope),
    /// Images pulled at a time; None: as many as pods ask for.
    pub parallel_image_pulls: Option<usize>,
    /// Which pods must show that they may use an image that is here.
    pub image_verification: Verification,
    /// From the command line alone: the programs that are asked for credentials of image registries.
    pub credential_providers: Option<CredentialProviders>,
    /// Pulls per second, on average; 0: no limit.
    pub registry_pull_qps: u32,
    /// Pulls that may begin at once after a quiet time.
    pub registry_burst: u32,
    /// Bytes from which on a container's log is rotated.
    pub container_log_max_size: u64,
    /// Log files kept of a container's instance, at least 2.
    pub container_log_max_files: usize,
    /// How often the sizes of logs are looked at.
    pub container_log_monitor_interval: Duration,
    /// Containers without a seccompProfile get the runtime's.
    pub seccomp_default: bool,
    /// Kernel settings that pods may have besides the safe ones; a `*` at the end stands for any end.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// The agent's own oom_score_adj, -1000 to 1000.
    pub oom_score_adj: i32,
    /// The agent's own limit of open files.
    pub max_open_files: u64,
    /// Most pods at a time, `podsPerCore` taken into account by [`Config::pod_limit`].
    pub max_pods: u32,
    /// The addresses of pods, for a runtime that makes its network of them, on a node without an API server;
    /// empty: they are nobody's business here. In a cluster the Node says them.
    pub pod_cidr: String,
    /// Most pods for each CPU; 0: only `max_pods` counts.
    pub pods_per_core: u32,
    /// When images go.
    pub image_gc: ImageGc,
    /// When the node is short of something, and what then.
    pub eviction: Eviction,
    /// What pods get when the machine goes down.
    pub shutdown: Periods,
    /// Whether ephemeral-storage limits and sizes of emptyDir volumes are enforced.
    pub local_storage_isolation: bool,
    /// How old the measured size of a volume may get before it is measured again.
    pub volume_stats_period: Duration,
    /// The folder with the drivers of `flexVolume`.
    pub volume_plugin_dir: PathBuf,
    /// In the kubelet's place alone: where links to containers' logs are kept. None: nowhere.
    pub log_links: Option<PathBuf>,
    /// In the kubelet's place alone: a manifest that is deleted and put back ends the pod that runs by it.
    pub put_back_restarts: bool,
    /// Fields of the `KubeletConfiguration` that have no effect, as they were written: `/configz` shows them.
    pub unread: serde_json::Map<String, serde_json::Value>,
    /// How this machine is a node of a cluster; without an API server it has no effect.
    pub node: NodeConfig,
    /// The HTTPS server that the API server and monitors talk to.
    pub server: Server,
    /// Where spans go; None: nowhere.
    pub tracing: Option<Tracing>,
    /// What is ours.
    pub beelet: Beelet,
    documents: documents::Documents,
}

/// How a machine is a node of a cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeConfig {
    /// Make the Node object where there is none.
    pub register: bool,
    /// Taints that the Node is made with.
    pub taints: Vec<Taint>,
    /// The cloud's name for the machine; empty: none.
    pub provider_id: String,
    /// How often the Node's status is looked at.
    pub status_update_frequency: Duration,
    /// How often it is written although nothing changed.
    pub status_report_frequency: Duration,
    /// Most images in it; None: all.
    pub status_max_images: Option<usize>,
    /// How long the node's lease holds.
    pub lease_duration: Duration,
    /// Events per second that are sent to the API server; 0: no limit.
    pub event_qps: u32,
    /// Events that may be sent at once after a quiet time.
    pub event_burst: u32,
    /// Ask for a new client certificate before the old one expires.
    pub rotate_certificates: bool,
    /// From the command line alone: labels that the Node is made with.
    pub labels: BTreeMap<String, String>,
    /// From the command line alone: the node's addresses. None given: the one that the default route leaves
    /// from.
    pub ips: Vec<IpAddr>,
    /// From the command line alone: a cloud's controller sets the Node's addresses and takes away the taint
    /// with which it is made.
    pub external_cloud: bool,
}

/// A taint of a Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    /// Its key.
    pub key: String,
    /// Its value; may be empty.
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// The part of the configuration that the kubelet does not have.
#[derive(Debug, Clone, PartialEq)]
pub struct Beelet {
    /// Durable state and its lock.
    pub state_dir: PathBuf,
    /// Where the socket is.
    pub run_dir: PathBuf,
    /// Volumes and hosts files of pods, one folder per pod.
    pub pods_dir: PathBuf,
    /// The folder of image archives that are imported; None: none. Where nobody names one, it is beside the
    /// static manifests.
    pub image_archives: Option<PathBuf>,
    /// The folder of the profiles that `seccompProfile: {type: Localhost}` names.
    pub seccomp_profile_root: PathBuf,
    /// Whether the kernel half is used.
    pub bpf: BpfMode,
    /// Where a BPF file system is or is to be mounted.
    pub bpffs: PathBuf,
    /// The folder of our pins below it.
    pub pin_name: String,
    /// How long a container may wait within a second before the kernel half tells of it, by QoS class; 0:
    /// never.
    pub pressure_edges: PressureEdges,
    /// Development, from the command line alone: the BPF object to load instead of the built-in one, as one
    /// that logs.
    pub bpf_log: Option<PathBuf>,
    /// How tcpSocket probes are answered.
    pub tcp_probes: TcpProbes,
    /// What a listener's coming and going does to readiness.
    pub edge_policy: EdgePolicy,
    /// Time between two connections of a liveness probe that the kernel answers, by which the probe sees that
    /// the application still accepts; zero: never.
    pub liveness_canary: Duration,
    /// The state of the accept queues that fails liveness and startup probes that the kernel answers.
    pub liveness_stalled: QueueRule,
    /// The kubelet's rule that every static pod is critical.
    pub critical_static_pods: bool,
    /// How shares become cpu.weight on cgroup v2.
    pub cpu_weight_formula: CpuWeightFormula,
    /// Where device plugins and monitors look for a kubelet: `device-plugins`, `plugins_registry`,
    /// `pod-resources`.
    pub kubelet_dir: PathBuf,
    /// How long a pod waits for a device plugin that isn't there.
    pub device_plugin_wait: Duration,
    /// Stop all pods when the agent is told to stop.
    pub stop_pods_on_exit: bool,
    /// How the pods are chosen that make room for a critical one.
    pub preemption: preemption::Policy,
    /// How many dead containers stay, and for how long at least.
    pub container_gc: ContainerGcPolicy,
    /// The time between two readings of the containers' counters while somebody looks.
    pub pressure_interval: Duration,
    /// The counters of more containers than this are not read.
    pub max_measured_containers: usize,
    /// Whether metrics of containers carry their pod's UID.
    pub metrics_pod_uid: bool,
    /// Whether `/pods` is served beside the numbers: all specs, to whoever can connect.
    pub unauthenticated_pods: bool,
    /// The closed loop that protects latency.
    pub tuner: Tuner,
    /// What a node of a cluster does at a start without its API server.
    pub autonomy: Autonomy,
}

/// Where spans go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tracing {
    /// Host and port, or `unix://` and a path, of a collector that speaks OTLP over gRPC, without encryption.
    pub endpoint: String,
    /// How many of a million traces are sent; 0: none.
    pub per_million: u32,
}

/// What is kept of the API server's words for a start without it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Autonomy {
    /// Whether anything is.
    pub enabled: bool,
    /// How long the API server may be silent before pods start without it.
    pub after: Duration,
    /// The file of the key that seals Secrets and tokens; without one they are not kept.
    pub key_file: Option<PathBuf>,
}

/// A cgroup of daemons that are held to what is reserved for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservedCgroup {
    /// Its path, from the cgroup root.
    pub path: String,
    /// Only CPU, which can be taken back, is enforced; memory and process ids are not.
    pub compressible_only: bool,
}

/// What of the tuner can be configured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuner {
    /// How far it goes.
    pub mode: TunerMode,
    /// Who decides which thread runs.
    pub scheduler: SchedulerKind,
    /// The time between two looks.
    pub interval: Duration,
    /// How long a setting that somebody else overwrote is left to them.
    pub back_off: Duration,
    /// Bounds, step sizes, patience.
    pub law: Law,
}

/// Where the configuration is if nobody says where.
pub const DEFAULT_PATH: &str = "/etc/beelet/beelet.yaml";

/// How tcpSocket probes are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TcpProbes {
    /// From the kernel's listeners, where that is possible.
    Kernel,
    /// By connecting, as the kubelet does.
    Connect,
}

impl Config {
    /// The folder of the node's certificates and keys.
    #[must_use]
    pub fn cert_dir(&self) -> PathBuf {
        self.server.cert_dir.clone().unwrap_or_else(|| self.beelet.kubelet_dir.join("pki"))
    }

    /// Reads `path`. An empty file, or one with only one of the two documents, is the defaults for the rest.
    ///
    /// # Errors
    /// The file cannot be read, is not YAML or JSON, has a document of another kind, an unknown field of a
    /// `BeeletConfiguration` or a bad value. An unknown field of a `KubeletConfiguration` is a warning, as to
    /// the kubelet.
    pub fn load(path: &Path) -> Result<(Self, Vec<Warning>), ConfigFaults> {
        load::load(path)
    }

    /// Reads a file, the drop-in files over it, and the command line's settings over them.
    ///
    /// # Errors
    /// As for [`Config::load`], of any of them.
    pub fn layered(sources: Sources) -> Result<(Self, Vec<Warning>), ConfigFaults> {
        load::layered(sources)
    }

    /// The configuration of an empty file.
    ///
    /// # Errors
    /// This machine's hostname cannot name a node.
    pub fn with_defaults() -> Result<(Self, Vec<Warning>), ConfigFaults> {
        load::parse(Path::new("the defaults"), "")
    }

    /// Both documents as YAML, with every value that is in effect. Reading it gives the same configuration.
    #[must_use]
    pub fn effective(&self) -> String {
        self.documents.print()
    }

    /// The `KubeletConfiguration` alone, as a JSON object, as `/configz` shows it: every value that is in
    /// effect, and the fields that have none as they were written, or with the kubelet's default.
    #[must_use]
    pub fn effective_kubelet(&self) -> serde_json::Value {
        self.documents.kubelet(&self.unread)
    }

    /// The amount that `systemReserved` and `kubeReserved` keep of `resource` (`cpu` in cores, `memory` in
    /// bytes) together.
    #[must_use]
    pub fn reserved(&self, resource: &str) -> Quantity {
        [&self.system_reserved, &self.kube_reserved]
            .into_iter()
            .filter_map(|amounts| amounts.get(resource))
            .copied()
            .sum()
    }

    /// Most pods at a time on a machine with so many CPUs.
    #[must_use]
    pub fn pod_limit(&self, cpus: usize) -> u32 {
        let by_cpus = u64::from(self.pods_per_core) * cpus as u64;
        match u32::try_from(by_cpus) {
            Ok(limit) if limit > 0 => limit.min(self.max_pods),
            _ => self.max_pods,
        }
    }

    /// The gRPC socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.beelet.run_dir.join("beelet.sock")
    }
}

#[cfg(test)]
mod tests;
