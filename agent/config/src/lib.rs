//! The configuration: a YAML (or JSON) stream of at most one `KubeletConfiguration`
//! (kubelet.config.k8s.io/v1beta1) and at most one `BeeletConfiguration` (beelet.dev/v1alpha1).
//!
//! This crate reads it once, at the start, into validated values; no other crate reads a configuration file.
//! Defaults are the kubelet's. A field of v1beta1 that beelet does not use causes a warning; an unknown field
//! of a `BeeletConfiguration` or a bad value is an error with its line. Must never inspect the machine except
//! for its hostname: callers check that the runtime answers or that a folder exists.

pub mod defaults;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use beelet_policy::{
    admission::preemption,
    eviction::{EvictionSwap, MemorySignal},
    images::{containers::ContainerGcPolicy, credentials::Verification},
    node::{repair::Convention, shutdown::Periods},
    probe::{
        EdgePolicy,
        listener::QueueRule,
        settings::{Connections, ExecMode},
    },
    resources::cgroups::{CpuWeightFormula, MemoryQos, SwapBehavior},
    tuner::{Law, TunerMode, cold::ColdLaw, scheduler::SchedulerKind},
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
mod gates;
mod kubelet;
pub mod load;
mod node;
mod pinning;
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
pub use pinning::Pinning;
pub use pressure::{Eviction, ImageGc};
pub use server::{Authorization, CIPHER_SUITES, Server, TlsFiles, TlsVersion};

/// Configuration of this node.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The node's name, with which every static pod's name ends. Default: the hostname in lower case.
    pub node_name: String,
    /// Folder or single file of static pods. None: no static pods.
    pub static_pod_path: Option<PathBuf>,
    /// Interval of reading the folder without a reported change.
    pub file_check_frequency: Duration,
    /// Root of the containers' log files.
    pub pod_logs_dir: PathBuf,
    /// The runtime's socket, as `unix:///path`.
    pub runtime_endpoint: String,
    /// The image service's socket, as `unix:///path`.
    pub image_endpoint: String,
    /// Timeout of short runtime calls.
    pub runtime_request_timeout: Duration,
    /// Loopback address of `/healthz`, `/metrics` and the like.
    pub healthz_address: IpAddr,
    /// Port of `/healthz`, `/metrics` and the like; 0: not served.
    pub healthz_port: u16,
    /// Parent cgroup of `kubepods`, from the hierarchy's root: `/` or `/some/path`.
    pub cgroup_root: String,
    /// The cgroup driver, if configured. Must equal the runtime's, if the runtime reports one.
    pub cgroup_driver: Option<CgroupDriver>,
    /// True to refuse to run if cgroup v1 controllers are in use. The default is false, unlike the kubelet's.
    pub fail_cgroup_v1: bool,
    /// True to enforce CPU limits by CFS quota.
    pub cpu_cfs_quota: bool,
    /// Period of the CFS quota, 1 ms to 1 s.
    pub cpu_cfs_quota_period: Duration,
    /// Maximum number of processes and threads per pod; -1: no limit.
    pub pod_pids_limit: i64,
    /// Amounts reserved for the operating system.
    pub system_reserved: BTreeMap<String, Quantity>,
    /// Amounts reserved for the node's own agents.
    pub kube_reserved: BTreeMap<String, Quantity>,
    /// `reservedSystemCPUs` as written. `system_reserved` has the number of these CPUs. With
    /// `cpuManagerPolicy: static` no container gets one of them for itself.
    pub reserved_system_cpus: String,
    /// Cgroup with `system_reserved` as its limit; None: not enforced.
    pub system_reserved_cgroup: Option<ReservedCgroup>,
    /// Cgroup with `kube_reserved` as its limit; None: not enforced.
    pub kube_reserved_cgroup: Option<ReservedCgroup>,
    /// Protection of memory requests and throttling below the memory limit (cgroup v2 only); None: off.
    pub memory_qos: Option<MemoryQos>,
    /// True if an out-of-memory kill ends a single process instead of its container. None: the default of the
    /// machine's cgroup version, i.e. a single process on version 1 and the container on version 2.
    pub single_process_oom_kill: Option<bool>,
    /// Percentages (0 to 100) of a resource's requests that lower QoS classes may not use; only `memory`.
    pub qos_reserved: BTreeMap<String, u8>,
    /// Name servers for pods with `dnsPolicy: ClusterFirst`.
    pub cluster_dns: Vec<IpAddr>,
    /// Domain added to these pods' search list; empty: none.
    pub cluster_domain: String,
    /// Base resolver configuration of pods; None: an empty one.
    pub resolv_conf: Option<PathBuf>,
    /// True to refuse to run on a machine with swap. The default is false, unlike the kubelet's: no container
    /// gets swap.
    pub fail_swap_on: bool,
    /// True to refuse to run if kernel settings differ from those that a kubelet sets.
    pub protect_kernel_defaults: bool,
    /// Use of swap by containers.
    pub swap_behavior: SwapBehavior,
    /// Number of user and group ids of each pod with its own user namespace; a multiple of 65,536.
    pub user_ids_per_pod: u32,
    /// Maximum delay between two restarts of a crashing container.
    pub max_container_restart_period: Duration,
    /// Policies of exclusive CPUs and memory, and of the alignment of these and of devices.
    pub pinning: Pinning,
    /// Maximum number of concurrent image pulls; None: no limit.
    pub parallel_image_pulls: Option<usize>,
    /// Verification of a pod's right to use an image that the node already has.
    pub image_verification: Verification,
    /// From the command line only: programs that return credentials of image registries.
    pub credential_providers: Option<CredentialProviders>,
    /// Average number of pulls per second; 0: no limit.
    pub registry_pull_qps: u32,
    /// Maximum number of pulls at once after a quiet time.
    pub registry_burst: u32,
    /// Size at which a container's log is rotated, in bytes.
    pub container_log_max_size: u64,
    /// Number of log files per container instance, at least 2.
    pub container_log_max_files: usize,
    /// Interval of checks of the logs' sizes.
    pub container_log_monitor_interval: Duration,
    /// True if containers without a seccompProfile get the runtime's.
    pub seccomp_default: bool,
    /// Kernel settings that pods may have in addition to the safe ones; a final `*` matches any suffix.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// The agent's own oom_score_adj, -1000 to 1000.
    pub oom_score_adj: i32,
    /// The agent's own limit of open files.
    pub max_open_files: u64,
    /// Maximum number of pods; [`Config::pod_limit`] takes `podsPerCore` into account.
    pub max_pods: u32,
    /// Pod addresses on a node without an API server, for a runtime that builds its network from them; empty:
    /// none. In a cluster they come from the Node.
    pub pod_cidr: String,
    /// Maximum number of pods per CPU; 0: only `max_pods` counts.
    pub pods_per_core: u32,
    /// Image garbage collection.
    pub image_gc: ImageGc,
    /// Eviction thresholds and times.
    pub eviction: Eviction,
    /// Grace periods of pods at the machine's shutdown.
    pub shutdown: Periods,
    /// True to enforce ephemeral-storage limits and sizes of emptyDir volumes.
    pub local_storage_isolation: bool,
    /// Maximum age of a volume's measured size.
    pub volume_stats_period: Duration,
    /// Folder with the drivers of `flexVolume`.
    pub volume_plugin_dir: PathBuf,
    /// Only as a kubelet replacement: folder of links to containers' logs. None: no links.
    pub log_links: Option<PathBuf>,
    /// Only as a kubelet replacement: true if deleting and restoring a manifest ends its running pod.
    pub put_back_restarts: bool,
    /// Fields of the `KubeletConfiguration` without an effect, as written, for `/configz`.
    pub unread: serde_json::Map<String, serde_json::Value>,
    /// Settings of a cluster's node; without an API server they have no effect.
    pub node: NodeConfig,
    /// HTTPS server for the API server and monitors.
    pub server: Server,
    /// Export of spans; None: off.
    pub tracing: Option<Tracing>,
    /// beelet's own settings.
    pub beelet: Beelet,
    documents: documents::Documents,
}

/// Settings of a cluster's node.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeConfig {
    /// True to create a missing Node object.
    pub register: bool,
    /// Taints of a created Node.
    pub taints: Vec<Taint>,
    /// The cloud's name for the machine; empty: none.
    pub provider_id: String,
    /// Interval of checks of the Node's status.
    pub status_update_frequency: Duration,
    /// Interval of writes of an unchanged status.
    pub status_report_frequency: Duration,
    /// Maximum number of images in the status; None: all.
    pub status_max_images: Option<usize>,
    /// Duration of the node's lease.
    pub lease_duration: Duration,
    /// Maximum number of events per second to the API server; 0: no limit.
    pub event_qps: u32,
    /// Maximum number of events at once after a quiet time.
    pub event_burst: u32,
    /// True to renew the client certificate before it expires.
    pub rotate_certificates: bool,
    /// From the command line only: labels of a created Node.
    pub labels: BTreeMap<String, String>,
    /// From the command line only: the node's addresses. Empty: the source address of the default route.
    pub ips: Vec<IpAddr>,
    /// From the command line only: true if a cloud's controller sets the Node's addresses and removes the
    /// initial taint of the Node.
    pub external_cloud: bool,
}

/// A taint of a Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    /// The taint's key.
    pub key: String,
    /// The taint's value; may be empty.
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// The part of the configuration that the kubelet does not have.
#[derive(Debug, Clone, PartialEq)]
pub struct Beelet {
    /// Folder of durable state and its lock.
    pub state_dir: PathBuf,
    /// Folder of the socket.
    pub run_dir: PathBuf,
    /// Volumes and hosts files of pods, one folder per pod.
    pub pods_dir: PathBuf,
    /// Folder of image archives to import; None: no import. Default: a folder next to the static manifests.
    pub image_archives: Option<PathBuf>,
    /// Folder of the profiles of `seccompProfile: {type: Localhost}`.
    pub seccomp_profile_root: PathBuf,
    /// Use of BPF programs.
    pub bpf: BpfMode,
    /// Mount point of the BPF file system, which is mounted if missing.
    pub bpffs: PathBuf,
    /// Folder of the agent's pins in the BPF file system.
    pub pin_name: String,
    /// Wait of a container per second at which BPF programs emit an event, by QoS class; 0: never.
    pub pressure_edges: PressureEdges,
    /// From the command line only, for development: a BPF object to load instead of the built-in one, e.g.
    /// one that logs.
    pub bpf_log: Option<PathBuf>,
    /// Implementation of tcpSocket probes.
    pub tcp_probes: TcpProbes,
    /// Effect of added and removed listeners on readiness.
    pub edge_policy: EdgePolicy,
    /// Interval of real connections of a liveness probe that the kernel answers otherwise, to check that the
    /// application still accepts; zero: never.
    pub liveness_canary: Duration,
    /// State of the accept queues that fails liveness and startup probes that the kernel answers.
    pub liveness_stalled: QueueRule,
    /// The part of the node that runs the commands of exec probes.
    pub exec_probes: ExecMode,
    /// Socket of the helper `beelet-exec`.
    pub exec_socket: PathBuf,
    /// Connections of httpGet and grpc probes.
    pub probe_connections: Connections,
    /// True for the kubelet's rule that every static pod is critical.
    pub critical_static_pods: bool,
    /// Formula from shares to cpu.weight on cgroup v2.
    pub cpu_weight_formula: CpuWeightFormula,
    /// Folder in which device plugins and monitors expect the kubelet's `device-plugins`, `plugins_registry`
    /// and `pod-resources`.
    pub kubelet_dir: PathBuf,
    /// Time that a pod waits for a missing device plugin; zero: the pod fails, as under the kubelet.
    pub device_plugin_wait: Duration,
    /// True to stop all pods when the agent stops.
    pub stop_pods_on_exit: bool,
    /// True to take over the pods of a kubelet at the agent's start.
    pub adopt_kubelet_pods: bool,
    /// Policy for the choice of pods to preempt for a critical one.
    pub preemption: preemption::Policy,
    /// The number behind the memory signals of eviction.
    pub eviction_memory_signal: MemorySignal,
    /// The role of swap in eviction.
    pub eviction_swap: EvictionSwap,
    /// Number and minimum age of retained dead containers.
    pub container_gc: ContainerGcPolicy,
    /// Interval of readings of the containers' counters while a subscriber is present.
    pub pressure_interval: Duration,
    /// Maximum number of containers whose counters are read.
    pub max_measured_containers: usize,
    /// True to add the pod's UID to the metrics of containers.
    pub metrics_pod_uid: bool,
    /// True to serve `/pods`, with all specs, on the port without authentication.
    pub unauthenticated_pods: bool,
    /// The closed loop that protects latency.
    pub tuner: Tuner,
    /// Cache for a start without the API server.
    pub autonomy: Autonomy,
    /// Conventions whose conditions for node repair the Node gets.
    pub node_conditions: Vec<Convention>,
}

/// Export of spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tracing {
    /// Host and port, or `unix://` and a path, of a collector that speaks OTLP over gRPC, without encryption.
    pub endpoint: String,
    /// Number of exported traces per million; 0: none.
    pub per_million: u32,
}

/// Cache of the API server's objects for a start without it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Autonomy {
    /// True to write and use the cache.
    pub enabled: bool,
    /// Time without an answer of the API server after which pods start from the cache.
    pub after: Duration,
    /// File with the key that seals Secrets and tokens; without a key they are not cached.
    pub key_file: Option<PathBuf>,
    /// True if the pods of StatefulSets start from the cache after a reboot, too.
    pub stateful_sets: bool,
}

/// A cgroup of daemons with their reservation as its limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservedCgroup {
    /// Path from the cgroup root.
    pub path: String,
    /// True to enforce only CPU, which is compressible, and not memory and process ids.
    pub compressible_only: bool,
}

/// Settings of the tuner.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuner {
    /// Off, advise or enforce.
    pub mode: TunerMode,
    /// The CPU scheduler.
    pub scheduler: SchedulerKind,
    /// Interval of the tuner's rounds.
    pub interval: Duration,
    /// Time for which the tuner leaves a setting alone after another program has overwritten it.
    pub back_off: Duration,
    /// Bounds, step sizes and delays.
    pub law: Law,
    /// Off, advise or enforce: proactive reclaim.
    pub reclaim: TunerMode,
    /// Bounds and step sizes of proactive reclaim.
    pub cold: ColdLaw,
}

/// Default path of the configuration.
pub const DEFAULT_PATH: &str = "/etc/beelet/beelet.yaml";

/// Implementation of tcpSocket probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TcpProbes {
    /// From the kernel's listeners, if possible.
    Kernel,
    /// By connecting, as the kubelet does.
    Connect,
}

impl Config {
    /// Returns the folder of the node's certificates and keys.
    #[must_use]
    pub fn cert_dir(&self) -> PathBuf {
        self.server.cert_dir.clone().unwrap_or_else(|| self.beelet.kubelet_dir.join("pki"))
    }

    /// Reads `path`. Missing documents and fields get their defaults.
    ///
    /// # Errors
    /// The file cannot be read, is not YAML or JSON, or has a document of another kind, an unknown field of a
    /// `BeeletConfiguration` or a bad value. As in the kubelet, an unknown field of a `KubeletConfiguration`
    /// is only a warning.
    pub fn load(path: &Path) -> Result<(Self, Vec<Warning>), ConfigFaults> {
        load::load(path)
    }

    /// Reads a file, drop-in files that override it, and command-line settings that override both.
    ///
    /// # Errors
    /// As for [`Config::load`], for each source.
    pub fn layered(sources: Sources) -> Result<(Self, Vec<Warning>), ConfigFaults> {
        load::layered(sources)
    }

    /// Returns the configuration of an empty file.
    ///
    /// # Errors
    /// This machine's hostname cannot name a node.
    pub fn with_defaults() -> Result<(Self, Vec<Warning>), ConfigFaults> {
        load::parse(Path::new("the defaults"), "")
    }

    /// Returns both documents as YAML with all effective values. Reading them gives the same configuration.
    #[must_use]
    pub fn effective(&self) -> String {
        self.documents.print()
    }

    /// Returns the `KubeletConfiguration` as the JSON object of `/configz`: all effective values, and the
    /// fields without an effect as written or with the kubelet's default.
    #[must_use]
    pub fn effective_kubelet(&self) -> serde_json::Value {
        self.documents.kubelet(&self.unread)
    }

    /// Returns the sum of `systemReserved` and `kubeReserved` for `resource` (`cpu` in cores, `memory` in
    /// bytes).
    #[must_use]
    pub fn reserved(&self, resource: &str) -> Quantity {
        [&self.system_reserved, &self.kube_reserved]
            .into_iter()
            .filter_map(|amounts| amounts.get(resource))
            .copied()
            .sum()
    }

    /// Returns the maximum number of pods on a machine with `cpus` CPUs.
    #[must_use]
    pub fn pod_limit(&self, cpus: usize) -> u32 {
        let by_cpus = u64::from(self.pods_per_core) * cpus as u64;
        match u32::try_from(by_cpus) {
            Ok(limit) if limit > 0 => limit.min(self.max_pods),
            _ => self.max_pods,
        }
    }

    /// Returns the path of the gRPC socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.beelet.run_dir.join("beelet.sock")
    }
}

#[cfg(test)]
mod tests;
