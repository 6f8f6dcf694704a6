//! From what is written to what is meant: defaults and checks.
//!
//! Defaults and the rule that an empty value is no value: pkg/kubelet/apis/config/v1beta1/defaults.go.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use beelet_policy::{
    devices::topology::{TopologyPolicy, TopologyScope},
    images::credentials::{Policy, Verification, wrong_entry},
    resources::{
        cgroups::{MemoryQos, MemoryReservationPolicy, SwapBehavior},
        user_namespaces,
    },
};
use beelet_units::{bpf_settings::BpfMode, cgroup_driver::CgroupDriver, cpu_list, quantity::Quantity};

use super::beelet::{AutonomyWire, BeeletWire};
use super::error::Problem;
use super::kubelet::{KubeletWire, TracingWire};
use super::values::{Amounts as AmountsWire, GoDuration};
use super::words::{duration, number, path, word};
use super::{Autonomy, Beelet, Config, ReservedCgroup, TcpProbes, Tracing, pressure};

/// The first of each is the default.
const TOPOLOGY_POLICIES: [(&str, TopologyPolicy); 4] = [
    ("none", TopologyPolicy::None),
    ("best-effort", TopologyPolicy::BestEffort),
    ("restricted", TopologyPolicy::Restricted),
    ("single-numa-node", TopologyPolicy::SingleNumaNode),
];
const VERIFICATION_POLICIES: [(&str, Policy); 4] = [
    ("NeverVerifyPreloadedImages", Policy::NeverVerifyPreloadedImages),
    ("NeverVerify", Policy::NeverVerify),
    ("NeverVerifyAllowlistedImages", Policy::NeverVerifyAllowlistedImages),
    ("AlwaysVerify", Policy::AlwaysVerify),
];
const SWAP_BEHAVIORS: [(&str, SwapBehavior); 2] =
    [("NoSwap", SwapBehavior::NoSwap), ("LimitedSwap", SwapBehavior::LimitedSwap)];
const TOPOLOGY_SCOPES: [(&str, TopologyScope); 2] =
    [("container", TopologyScope::Container), ("pod", TopologyScope::Pod)];

pub(super) const DEFAULT_ENDPOINT: &str = "unix:///run/containerd/containerd.sock";
/// What enforceNodeAllocatable may name.
const ENFORCEABLE: [&str; 5] = [
    "pods",
    "system-reserved",
    "kube-reserved",
    "system-reserved-compressible",
    "kube-reserved-compressible",
];
/// Said where nothing is to be enforced.
const ALWAYS_ENFORCED: &str =
    "\"none\" has no effect: the cgroup of all pods always has what the node does not reserve as its limit";
const RESERVABLE: [&str; 4] = ["cpu", "memory", "ephemeral-storage", "pid"];

/// What the documents mean. `partly` gets the settings of which beelet honours a part only: a kubelet starts
/// with them, so they keep no node from starting.
pub(super) fn kubelet(
    wire: &KubeletWire,
    node_name: String,
    beelet: Beelet,
    partly: &mut Vec<Problem>,
) -> Result<Config, Problem> {
    check_enforcement(wire, partly)?;
    let [system_reserved, kube_reserved] = reserves(wire)?;
    let runtime_endpoint =
        endpoint("containerRuntimeEndpoint", &wire.container_runtime_endpoint, DEFAULT_ENDPOINT)?;
    Ok(Config {
        node_name,
        static_pod_path: path("staticPodPath", &wire.static_pod_path)?,
        file_check_frequency: duration(wire.file_check_frequency, Duration::from_secs(20)),
        pod_logs_dir: path("podLogsDir", &wire.pod_logs_dir)?.unwrap_or_else(|| "/var/log/pods".into()),
        image_endpoint: endpoint("imageServiceEndpoint", &wire.image_service_endpoint, &runtime_endpoint)?,
        runtime_endpoint,
        runtime_request_timeout: duration(wire.runtime_request_timeout, Duration::from_secs(120)),
        healthz_address: healthz_address(wire.healthz_bind_address.as_deref(), partly)?,
        healthz_port: number("healthzPort", wire.healthz_port, 10248, 0, i64::from(u16::MAX))?,
        cgroup_root: cgroup_root(wire.cgroup_root.as_deref().unwrap_or_default())?,
        cgroup_driver: cgroup_driver(wire.cgroup_driver.as_deref().unwrap_or_default())?,
        fail_cgroup_v1: wire.fail_cgroup_v1.unwrap_or(false),
        cpu_cfs_quota: wire.cpu_cfs_quota.unwrap_or(true),
        cpu_cfs_quota_period: cfs_period(duration(wire.cpu_cfs_quota_period, Duration::from_millis(100)))?,
        pod_pids_limit: number("podPidsLimit", wire.pod_pids_limit, -1, -1, i64::MAX)?,
        system_reserved,
        kube_reserved,
        reserved_system_cpus: wire.reserved_system_cpus.clone().unwrap_or_default(),
        system_reserved_cgroup: reserved_cgroup(
            wire,
            "system",
            wire.system_reserved_cgroup.as_deref(),
            partly,
        )?,
        kube_reserved_cgroup: reserved_cgroup(wire, "kube", wire.kube_reserved_cgroup.as_deref(), partly)?,
        memory_qos: memory_qos(wire)?,
        single_process_oom_kill: wire.single_process_oom_kill,
        qos_reserved: qos_reserved(wire.qos_reserved.as_ref())?,
        cluster_dns: cluster_dns(wire.cluster_dns.as_deref().unwrap_or_default(), partly),
        cluster_domain: wire.cluster_domain.clone().unwrap_or_default(),
        resolv_conf: resolv_conf(wire.resolv_conf.as_deref())?,
        fail_swap_on: wire.fail_swap_on.unwrap_or(false),
        protect_kernel_defaults: wire.protect_kernel_defaults.unwrap_or(false),
        swap_behavior: word(
            "memorySwap.swapBehavior",
            wire.memory_swap.as_ref().and_then(|swap| swap.swap_behavior.as_deref()),
            SWAP_BEHAVIORS,
        )?,
        user_ids_per_pod: user_ids_per_pod(wire)?,
        max_container_restart_period: restart_period(wire)?,
        topology: (
            word("topologyManagerPolicy", wire.topology_manager_policy.as_deref(), TOPOLOGY_POLICIES)?,
            word("topologyManagerScope", wire.topology_manager_scope.as_deref(), TOPOLOGY_SCOPES)?,
        ),
        parallel_image_pulls: parallel_pulls(wire)?,
        image_verification: image_verification(wire)?,
        credential_providers: None,
        registry_pull_qps: number("registryPullQPS", wire.registry_pull_qps, 5, 0, i64::from(u32::MAX))?,
        registry_burst: number(
            "registryBurst",
            wire.registry_burst.filter(|burst| *burst != 0),
            10,
            1,
            i64::from(u32::MAX),
        )?,
        container_log_max_size: log_size(wire.container_log_max_size.as_deref())?,
        container_log_max_files: number("containerLogMaxFiles", wire.container_log_max_files, 5, 2, 1000)?,
        container_log_monitor_interval: log_interval(wire.container_log_monitor_interval)?,
        seccomp_default: wire.seccomp_default.unwrap_or(false),
        allowed_unsafe_sysctls: unsafe_sysctls(wire.allowed_unsafe_sysctls.as_deref().unwrap_or_default())?,
        oom_score_adj: number("oomScoreAdj", wire.oom_score_adj, -999, -1000, 1000)?,
        max_open_files: number(
            "maxOpenFiles",
            wire.max_open_files.filter(|files| *files != 0),
            1_000_000,
            0,
            i64::MAX,
        )?,
        max_pods: number("maxPods", wire.max_pods.filter(|most| *most != 0), 110, 0, i64::from(i32::MAX))?,
        pod_cidr: wire.pod_cidr.clone().unwrap_or_default(),
        pods_per_core: number("podsPerCore", wire.pods_per_core, 0, 0, i64::from(i32::MAX))?,
        image_gc: pressure::image_gc(wire)?,
        eviction: pressure::eviction(wire)?,
        shutdown: super::shutdown::resolve(wire)?,
        local_storage_isolation: wire.local_storage_capacity_isolation.unwrap_or(true),
        volume_stats_period: duration(wire.volume_stats_agg_period, Duration::from_secs(60)),
        volume_plugin_dir: path("volumePluginDir", &wire.volume_plugin_dir)?
            .unwrap_or_else(|| "/usr/libexec/kubernetes/kubelet-plugins/volume/exec".into()),
        log_links: None,
        put_back_restarts: false,
        unread: serde_json::Map::new(),
        node: super::node::resolve(wire)?,
        server: super::server::resolve(wire, partly)?,
        tracing: wire.tracing.as_ref().map(tracing).transpose()?,
        beelet,
    })
}

pub(super) fn beelet(wire: &BeeletWire) -> Result<Beelet, Problem> {
    let folder = |field: &str, value: &Option<String>, default: &str| {
        Ok::<_, Problem>(path(field, value)?.unwrap_or_else(|| default.into()))
    };
    let state_dir = folder("stateDir", &wire.state_dir, "/var/lib/beelet")?;
    Ok(Beelet {
        pods_dir: path("podsDir", &wire.pods_dir)?.unwrap_or_else(|| state_dir.join("pods")),
        image_archives: path("imageArchives", &wire.image_archives)?,
        seccomp_profile_root: folder(
            "seccompProfileRoot",
            &wire.seccomp_profile_root,
            "/var/lib/kubelet/seccomp",
        )?,
        state_dir,
        run_dir: folder("runDir", &wire.run_dir, "/run/beelet")?,
        bpf: wire.bpf.unwrap_or(BpfMode::Auto),
        bpffs: folder("bpffs", &wire.bpffs, "/sys/fs/bpf")?,
        pin_name: pin_name(wire.pin_name.as_deref())?,
        pressure_edges: super::pressure_edges::read(wire.pressure_edges.as_ref()),
        bpf_log: None,
        tcp_probes: wire.tcp_probes.unwrap_or(TcpProbes::Kernel),
        edge_policy: wire.edge_policy.unwrap_or_default(),
        // Zero is a value here: never.
        liveness_canary: wire.liveness_canary.map_or(crate::defaults::CANARY, |every| every.0),
        critical_static_pods: wire.critical_static_pods.unwrap_or(false),
        cpu_weight_formula: wire.cpu_weight_formula.unwrap_or_default(),
        kubelet_dir: folder("kubeletDir", &wire.kubelet_dir, "/var/lib/kubelet")?,
        device_plugin_wait: duration(wire.device_plugin_wait, crate::defaults::PLUGIN_WAIT),
        stop_pods_on_exit: wire.stop_pods_on_exit.unwrap_or(false),
        preemption: wire.preemption.unwrap_or_default(),
        container_gc: pressure::container_gc(wire)?,
        pressure_interval: pressure_interval(duration(wire.pressure_interval, Duration::from_secs(1)))?,
        max_measured_containers: number(
            "maxMeasuredContainers",
            wire.max_measured_containers,
            2048,
            0,
            100_000,
        )?,
        metrics_pod_uid: wire.metrics_pod_uid.unwrap_or(false),
        unauthenticated_pods: wire.unauthenticated_pods.unwrap_or(false),
        tuner: super::tuner::resolve(wire.tuner.as_ref())?,
        autonomy: autonomy(wire.autonomy.as_ref())?,
    })
}

/// Defaults and bounds: component-base/tracing/api/v1.
fn tracing(wire: &TracingWire) -> Result<Tracing, Problem> {
    let given = wire.endpoint.clone().filter(|text| !text.is_empty());
    let given = given.unwrap_or_else(|| "localhost:4317".to_owned());
    // gRPC's names (https://github.com/grpc/grpc/blob/master/doc/naming.md), of those that the kubelet takes.
    let endpoint = given.strip_prefix("dns:///").or(given.strip_prefix("dns:")).unwrap_or(&given);
    let is_socket = endpoint.strip_prefix("unix://").is_some_and(|path| path.starts_with('/'));
    let is_address = endpoint.rsplit_once(':').is_some_and(|(host, port)| {
        !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    if !is_socket && !is_address {
        let sentence = format!("{given:?} is neither HOST:PORT nor unix:///PATH");
        return Err(Problem::new("tracing.endpoint", sentence));
    }
    let endpoint = endpoint.to_owned();
    let per_million =
        number("tracing.samplingRatePerMillion", wire.sampling_rate_per_million, 0, 0, 1_000_000)?;
    Ok(Tracing { endpoint, per_million })
}

fn autonomy(wire: Option<&AutonomyWire>) -> Result<Autonomy, Problem> {
    let nothing = AutonomyWire::default();
    let wire = wire.unwrap_or(&nothing);
    let after = duration(wire.after, crate::defaults::AUTONOMY);
    if !(Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&after) {
        return Err(Problem::new("autonomy.after", format!("{after:?} is out of range: 1s to 24h")));
    }
    let key_file = path("autonomy.keyFile", &wire.key_file)?;
    Ok(Autonomy { enabled: wire.enabled.unwrap_or(true), after, key_file })
}

/// Below a tenth of a second reading would cost more than it tells; above ten, windows of ten seconds would
/// be empty.
fn pressure_interval(interval: Duration) -> Result<Duration, Problem> {
    if (Duration::from_millis(100)..=Duration::from_secs(10)).contains(&interval) {
        return Ok(interval);
    }
    Err(Problem::new("pressureInterval", format!("{interval:?} is out of range: 100ms to 10s")))
}

/// The node's name: configured, or the hostname in lower case as the kubelet takes it.
pub(super) fn node_name(wire: &BeeletWire) -> Result<String, Problem> {
    let name = match wire.node_name.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => name.to_owned(),
        None => rustix::system::uname().nodename().to_string_lossy().trim().to_lowercase(),
    };
    let label = |label: &str| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !label.is_empty() && label.chars().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    if name.len() <= 253 && name.split('.').all(label) {
        return Ok(name);
    }
    Err(Problem::new(
        "nodeName",
        format!(
            "{name:?} cannot name a node: use lower case letters, digits, '-' and '.' (RFC 1123), at most 253"
        ),
    ))
}

fn endpoint(field: &str, value: &Option<String>, default: &str) -> Result<String, Problem> {
    let value = value.as_deref().filter(|value| !value.is_empty()).unwrap_or(default);
    match value.strip_prefix("unix://").unwrap_or(value) {
        path if path.starts_with('/') => Ok(format!("unix://{path}")),
        _ => Err(Problem::new(
            field,
            format!(
                "{value:?} is not a unix socket: write unix:///run/containerd/containerd.sock, for example"
            ),
        )),
    }
}

fn healthz_address(value: Option<&str>, partly: &mut Vec<Problem>) -> Result<IpAddr, Problem> {
    let field = "healthzBindAddress";
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(Ipv4Addr::LOCALHOST.into()) };
    let address: IpAddr =
        value.parse().map_err(|_| Problem::new(field, format!("{value:?} is not an IP address")))?;
    if !address.is_loopback() {
        let loopback: IpAddr =
            if address.is_ipv6() { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
        partly.push(Problem::new(
            field,
            format!(
                "{loopback} is used instead of {address}: the port has no authentication, so beelet serves it on \
                 loopback addresses only; put an authenticating proxy before it to reach it from elsewhere"
            ),
        ));
        return Ok(loopback);
    }
    Ok(address)
}

/// Whose right to use an image is verified (KEP-2535).
fn image_verification(wire: &KubeletWire) -> Result<Verification, Problem> {
    let field = "imagePullCredentialsVerificationPolicy";
    let policy =
        word(field, wire.image_pull_credentials_verification_policy.as_deref(), VERIFICATION_POLICIES)?;
    let allowlist = wire.preloaded_images_verification_allowlist.clone().unwrap_or_default();
    let field = "preloadedImagesVerificationAllowlist";
    if !allowlist.is_empty() && policy != Policy::NeverVerifyAllowlistedImages {
        let message = "needs imagePullCredentialsVerificationPolicy: NeverVerifyAllowlistedImages";
        return Err(Problem::new(field, message));
    }
    for (index, entry) in allowlist.iter().enumerate() {
        if let Some(why) = wrong_entry(entry) {
            return Err(Problem::new(format!("{field}[{index}]"), format!("{entry:?} {why}")));
        }
    }
    Ok(Verification { policy, allowlist })
}

/// The kubelet's rule: a multiple of 65,536, of which there may be many, but not all.
fn user_ids_per_pod(wire: &KubeletWire) -> Result<u32, Problem> {
    let field = "userNamespaces.idsPerPod";
    let unit = i64::from(user_namespaces::UNIT);
    let written = wire.user_namespaces.as_ref().and_then(|namespaces| namespaces.ids_per_pod);
    let ids: u32 = number(field, written.filter(|ids| *ids != 0), unit, unit, i64::from(u32::MAX))?;
    if !ids.is_multiple_of(user_namespaces::UNIT) {
        return Err(Problem::new(field, format!("{ids} is not a multiple of {unit}")));
    }
    Ok(ids)
}

fn cgroup_root(value: &str) -> Result<String, Problem> {
    let path: PathBuf = Path::new("/").join(value).components().collect();
    if Path::new(value).components().any(|part| part == Component::ParentDir) {
        return Err(Problem::new("cgroupRoot", format!("{value:?} may not have '..'")));
    }
    Ok(path.to_string_lossy().into_owned())
}

fn cgroup_driver(value: &str) -> Result<Option<CgroupDriver>, Problem> {
    match value {
        "" => Ok(None),
        "cgroupfs" => Ok(Some(CgroupDriver::Cgroupfs)),
        "systemd" => Ok(Some(CgroupDriver::Systemd)),
        other => Err(Problem::new("cgroupDriver", format!("{other:?} is neither cgroupfs nor systemd"))),
    }
}

fn cfs_period(period: Duration) -> Result<Duration, Problem> {
    if (Duration::from_millis(1)..=Duration::from_secs(1)).contains(&period) {
        return Ok(period);
    }
    let message = format!("{period:?} is out of range: the kernel takes 1ms to 1s");
    Err(Problem::new("cpuCFSQuotaPeriod", message))
}

fn quantity(field: String, text: &str) -> Result<Quantity, Problem> {
    match Quantity::parse(text) {
        Ok(quantity) if quantity >= Quantity::default() => Ok(quantity),
        Ok(_) => Err(Problem::new(field, format!("{text:?} is below zero"))),
        Err(error) => Err(Problem::new(field, error.to_string())),
    }
}

fn reserved(field: &str, wire: Option<&AmountsWire>) -> Result<BTreeMap<String, Quantity>, Problem> {
    let mut amounts = BTreeMap::new();
    for (name, amount) in wire.map(|wire| &wire.0).into_iter().flatten() {
        if !RESERVABLE.contains(&name.as_str()) {
            let message = format!("cannot be reserved; {} can", RESERVABLE.join(", "));
            return Err(Problem::new(format!("{field}.{name}"), message));
        }
        amounts.insert(name.clone(), quantity(format!("{field}.{name}"), amount)?);
    }
    Ok(amounts)
}

/// `systemReserved` and `kubeReserved`. `reservedSystemCPUs` says all that is reserved of CPUs, by their
/// numbers.
fn reserves(wire: &KubeletWire) -> Result<[BTreeMap<String, Quantity>; 2], Problem> {
    let mut system = reserved("systemReserved", wire.system_reserved.as_ref())?;
    let mut kube = reserved("kubeReserved", wire.kube_reserved.as_ref())?;
    if let Some(list) = wire.reserved_system_cpus.as_deref().filter(|list| !list.is_empty()) {
        let cpus = cpu_list::parse(list).ok_or_else(|| {
            Problem::new("reservedSystemCPUs", format!("{list:?} is no list of CPUs, such as 0-3,8"))
        })?;
        let count = i64::try_from(cpus.len()).unwrap_or(i64::MAX);
        system.insert("cpu".to_owned(), Quantity::from_units(count));
        kube.remove("cpu");
    }
    Ok([system, kube])
}

/// Pods always live in cgroups by QoS class, and together have what is not reserved.
fn check_enforcement(wire: &KubeletWire, partly: &mut Vec<Problem>) -> Result<(), Problem> {
    if wire.cgroups_per_qos == Some(false) {
        let message = "false has no effect: pods always live in cgroups by QoS class";
        partly.push(Problem::new("cgroupsPerQOS", message));
    }
    let enforced = wire.enforce_node_allocatable.as_deref().unwrap_or_default();
    if wire.enforce_node_allocatable.as_ref().is_some_and(Vec::is_empty) {
        partly.push(Problem::new("enforceNodeAllocatable", ALWAYS_ENFORCED));
    }
    for (index, item) in enforced.iter().enumerate() {
        let message = match item.as_str() {
            item if ENFORCEABLE.contains(&item) => continue,
            "none" => {
                partly.push(Problem::new(format!("enforceNodeAllocatable[{index}]"), ALWAYS_ENFORCED));
                continue;
            }
            other => format!("{other:?} can't be enforced; {} can", ENFORCEABLE.join(", ")),
        };
        return Err(Problem::new(format!("enforceNodeAllocatable[{index}]"), message));
    }
    let both = |name: &str| {
        enforced.iter().any(|item| item == name)
            && enforced.iter().any(|item| *item == format!("{name}-compressible"))
    };
    if let Some(name) = ["system-reserved", "kube-reserved"].into_iter().find(|name| both(name)) {
        let message = format!("{name} and {name}-compressible exclude each other; keep one");
        return Err(Problem::new("enforceNodeAllocatable", message));
    }
    Ok(())
}

/// The cgroup whose daemons are held to what is reserved for them, if that is enforced. The kubelet takes a
/// name with or without slashes around it (`ParseCgroupfsToCgroupName`), and looks at none that nothing uses.
fn reserved_cgroup(
    wire: &KubeletWire,
    whose: &str,
    path: Option<&str>,
    partly: &mut Vec<Problem>,
) -> Result<Option<ReservedCgroup>, Problem> {
    let field = format!("{whose}ReservedCgroup");
    let path = path.filter(|path| !path.is_empty());
    let wrong = path
        .filter(|path| cgroup_path(path).is_none())
        .map(|path| format!("{path:?} must be a path below the cgroup root, like /{whose}.slice"));
    let mut enforced = wire.enforce_node_allocatable.iter().flatten();
    let Some(item) = enforced
        .find(|item| item.strip_suffix("-compressible").unwrap_or(item) == format!("{whose}-reserved"))
    else {
        // No setting uses the name.
        partly.extend(wrong.map(|message| Problem::new(field, message)));
        return Ok(None);
    };
    if let Some(message) = wrong {
        return Err(Problem::new(field, message));
    }
    let Some(path) = path.and_then(cgroup_path) else {
        let message = format!("must be set, because enforceNodeAllocatable has {item}");
        return Err(Problem::new(field, message));
    };
    Ok(Some(ReservedCgroup { path, compressible_only: item.ends_with("-compressible") }))
}

/// The path with one slash before each part; None for the root, and for a path that leads upwards.
fn cgroup_path(path: &str) -> Option<String> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let is_below = !parts.is_empty() && parts.iter().all(|part| !matches!(*part, "." | ".."));
    is_below.then(|| format!("/{}", parts.join("/")))
}

/// Memory QoS is on where one of its two fields is there: there are no feature gates here.
fn memory_qos(wire: &KubeletWire) -> Result<Option<MemoryQos>, Problem> {
    let factor = wire.memory_throttling_factor;
    if let Some(factor) = factor.filter(|factor| !(*factor > 0.0 && *factor <= 1.0)) {
        let message = format!("{factor} must be above 0 and at most 1");
        return Err(Problem::new("memoryThrottlingFactor", message));
    }
    let reservation = match wire.memory_reservation_policy.as_deref() {
        None | Some("" | "None") => MemoryReservationPolicy::None,
        Some("TieredReservation") => MemoryReservationPolicy::TieredReservation,
        Some(other) => {
            let message = format!("{other:?} is neither None nor TieredReservation");
            return Err(Problem::new("memoryReservationPolicy", message));
        }
    };
    let on = factor.is_some() || wire.memory_reservation_policy.is_some();
    Ok(on.then_some(MemoryQos { throttling_factor: factor, reservation }))
}

/// How many images are pulled at a time. The kubelet's default is one; ours is five.
fn parallel_pulls(wire: &KubeletWire) -> Result<Option<usize>, Problem> {
    let field = "maxParallelImagePulls";
    let most: Option<usize> = match wire.max_parallel_image_pulls {
        None => None,
        Some(_) => Some(number(field, wire.max_parallel_image_pulls, 0, 0, i64::from(u32::MAX))?),
    };
    match (wire.serialize_image_pulls, most) {
        (Some(true), Some(2..)) => {
            Err(Problem::new(field, "is more than 1, but serializeImagePulls is true: take one of them out"))
        }
        (Some(true), _) => Ok(Some(1)),
        // As to the kubelet, nothing says no limit where pulls aren't to be one by one.
        (Some(false), None) | (_, Some(0)) => Ok(None),
        (_, Some(most)) => Ok(Some(most)),
        (None, None) => Ok(Some(5)),
    }
}

fn log_size(value: Option<&str>) -> Result<u64, Problem> {
    let field = "containerLogMaxSize";
    let text = value.filter(|text| !text.is_empty()).unwrap_or("10Mi");
    let size = Quantity::parse(text).map_err(|error| Problem::new(field, error.to_string()))?;
    match u64::try_from(size.value()) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(Problem::new(field, format!("{text} must be more than 0"))),
    }
}

fn log_interval(value: Option<GoDuration>) -> Result<Duration, Problem> {
    let interval = duration(value, Duration::from_secs(10));
    if interval < Duration::from_secs(1) {
        let message = format!("{interval:?} is out of range: 1s at least");
        return Err(Problem::new("containerLogMonitorInterval", message));
    }
    Ok(interval)
}

fn unsafe_sysctls(list: &[String]) -> Result<Vec<String>, Problem> {
    for (index, pattern) in list.iter().enumerate() {
        let name = pattern.strip_suffix('*').unwrap_or(pattern);
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_./".contains(c);
        if name.is_empty() || !name.chars().all(allowed) {
            let message = format!("{pattern:?} is not a sysctl's name, nor its beginning and a '*'");
            return Err(Problem::new(format!("allowedUnsafeSysctls[{index}]"), message));
        }
    }
    Ok(list.to_vec())
}

fn qos_reserved(wire: Option<&AmountsWire>) -> Result<BTreeMap<String, u8>, Problem> {
    let mut reserved = BTreeMap::new();
    for (name, value) in wire.map(|wire| &wire.0).into_iter().flatten() {
        let field = format!("qosReserved.{name}");
        if name != "memory" {
            return Err(Problem::new(field, "only memory can be reserved for a QoS class"));
        }
        let whole = value.strip_suffix('%').and_then(|digits| digits.trim().parse::<u8>().ok());
        let percent = whole.filter(|percent| *percent <= 100).ok_or_else(|| {
            Problem::new(field, format!("{value:?} is not a whole percentage: write \"50%\", for example"))
        })?;
        reserved.insert(name.clone(), percent);
    }
    Ok(reserved)
}

/// The addresses of the list. As to the kubelet, an entry that is no address is left out with a warning.
fn cluster_dns(list: &[String], partly: &mut Vec<Problem>) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for (index, text) in list.iter().enumerate() {
        match text.parse() {
            Ok(address) => addresses.push(address),
            Err(_) => partly.push(Problem::new(
                format!("clusterDNS[{index}]"),
                format!("{text:?} is left out: not an IP address"),
            )),
        }
    }
    addresses
}

fn resolv_conf(value: Option<&str>) -> Result<Option<PathBuf>, Problem> {
    match value {
        None => Ok(Some("/etc/resolv.conf".into())),
        Some(value) => path("resolvConf", &Some(value.to_owned())),
    }
}

fn restart_period(wire: &KubeletWire) -> Result<Duration, Problem> {
    let most = Duration::from_secs(300);
    let Some(period) = wire.crash_loop_back_off.as_ref().and_then(|c| c.max_container_restart_period) else {
        return Ok(most);
    };
    if (Duration::from_secs(1)..=most).contains(&period.0) {
        return Ok(period.0);
    }
    let message = format!("{:?} is out of range: 1s to 300s", period.0);
    Err(Problem::new("crashLoopBackOff.maxContainerRestartPeriod", message))
}

fn pin_name(value: Option<&str>) -> Result<String, Problem> {
    let name = value.filter(|name| !name.is_empty()).unwrap_or("beelet");
    // bpffs refuses names with a dot.
    if name.len() <= 64 && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
        return Ok(name.to_owned());
    }
    Err(Problem::new("pinName", format!("{name:?} must be letters, digits, '-' and '_', at most 64")))
}
