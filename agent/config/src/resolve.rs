//! Resolves both documents: defaults and checks.
//!
//! Source of the defaults and of the rule that an empty value is unset:
//! pkg/kubelet/apis/config/v1beta1/defaults.go.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use beelet_policy::{
    images::credentials::{Policy, Verification, wrong_entry},
    node::repair::Convention,
    probe::listener::QueueRule,
    resources::{
        cgroups::{MemoryQos, MemoryReservationPolicy, SwapBehavior},
        user_namespaces,
    },
};
use beelet_units::{bpf_settings::BpfMode, cgroup_driver::CgroupDriver, quantity::Quantity};

use super::beelet::{AutonomyWire, BeeletWire};
use super::documents::Documents;
use super::error::Problem;
use super::kubelet::{CrashLoopBackOffWire, KubeletWire, TracingWire, UserNamespacesWire};
use super::values::{Amounts, GoDuration};
use super::words::{duration, duration_or_zero, nonzero, number, path, path_or, path_or_empty, text, word};
use super::{Autonomy, Beelet, Config, TcpProbes, Tracing, pressure, reservations};

/// The first of each is the default.
const VERIFICATION_POLICIES: [(&str, Policy); 4] = [
    ("NeverVerifyPreloadedImages", Policy::NeverVerifyPreloadedImages),
    ("NeverVerify", Policy::NeverVerify),
    ("NeverVerifyAllowlistedImages", Policy::NeverVerifyAllowlistedImages),
    ("AlwaysVerify", Policy::AlwaysVerify),
];
const SWAP_BEHAVIORS: [(&str, SwapBehavior); 2] =
    [("NoSwap", SwapBehavior::NoSwap), ("LimitedSwap", SwapBehavior::LimitedSwap)];

/// Maximum value of 32 bits.
const MOST: i64 = u32::MAX as i64;
const FLEX_VOLUME_DRIVERS: &str = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec";
const DEFAULT_ENDPOINT: &str = "unix:///run/containerd/containerd.sock";

/// Returns the effective values, and writes them back into the documents. Adds settings with a partial effect
/// to `partly`: a kubelet starts with them, so beelet does, too.
pub(super) fn kubelet(
    wire: &mut KubeletWire,
    node_name: String,
    beelet: Beelet,
    partly: &mut Vec<Problem>,
) -> Result<Config, Problem> {
    reservations::check_enforcement(wire, partly)?;
    let [system_reserved, kube_reserved] = reservations::amounts(wire)?;
    let runtime_endpoint =
        endpoint("containerRuntimeEndpoint", &mut wire.container_runtime_endpoint, DEFAULT_ENDPOINT)?;
    let config = Config {
        node_name,
        static_pod_path: path_or_empty("staticPodPath", &mut wire.static_pod_path)?,
        file_check_frequency: duration(&mut wire.file_check_frequency, Duration::from_secs(20)),
        pod_logs_dir: path_or("podLogsDir", &mut wire.pod_logs_dir, Path::new("/var/log/pods"))?,
        image_endpoint: endpoint(
            "imageServiceEndpoint",
            &mut wire.image_service_endpoint,
            &runtime_endpoint,
        )?,
        runtime_endpoint,
        runtime_request_timeout: duration(&mut wire.runtime_request_timeout, Duration::from_secs(120)),
        healthz_address: healthz_address(&mut wire.healthz_bind_address, partly)?,
        healthz_port: number("healthzPort", &mut wire.healthz_port, 10248, 0, i64::from(u16::MAX))?,
        cgroup_root: cgroup_root(&mut wire.cgroup_root)?,
        cgroup_driver: cgroup_driver(&mut wire.cgroup_driver)?,
        fail_cgroup_v1: *wire.fail_cgroup_v1.get_or_insert(false),
        cpu_cfs_quota: *wire.cpu_cfs_quota.get_or_insert(true),
        cpu_cfs_quota_period: cfs_period(&mut wire.cpu_cfs_quota_period)?,
        pod_pids_limit: number("podPidsLimit", &mut wire.pod_pids_limit, -1, -1, i64::MAX)?,
        system_reserved,
        kube_reserved,
        reserved_system_cpus: wire.reserved_system_cpus.clone().unwrap_or_default(),
        system_reserved_cgroup: reservations::cgroup(wire, "system", partly)?,
        kube_reserved_cgroup: reservations::cgroup(wire, "kube", partly)?,
        memory_qos: memory_qos(wire)?,
        single_process_oom_kill: wire.single_process_oom_kill,
        qos_reserved: qos_reserved(wire.qos_reserved.get_or_insert_default())?,
        cluster_dns: cluster_dns(wire.cluster_dns.get_or_insert_default(), partly),
        cluster_domain: text(&mut wire.cluster_domain),
        resolv_conf: resolv_conf(&mut wire.resolv_conf)?,
        fail_swap_on: *wire.fail_swap_on.get_or_insert(false),
        protect_kernel_defaults: *wire.protect_kernel_defaults.get_or_insert(false),
        swap_behavior: word(
            "memorySwap.swapBehavior",
            &mut wire.memory_swap.get_or_insert_default().swap_behavior,
            SWAP_BEHAVIORS,
        )?,
        user_ids_per_pod: user_ids_per_pod(wire.user_namespaces.get_or_insert_default())?,
        max_container_restart_period: restart_period(wire.crash_loop_back_off.get_or_insert_default())?,
        pinning: super::pinning::resolve(wire, partly)?,
        parallel_image_pulls: parallel_pulls(wire)?,
        image_verification: image_verification(wire)?,
        credential_providers: None,
        registry_pull_qps: number("registryPullQPS", &mut wire.registry_pull_qps, 5, 0, MOST)?,
        registry_burst: number("registryBurst", nonzero(&mut wire.registry_burst), 10, 1, MOST)?,
        container_log_max_size: log_size(&mut wire.container_log_max_size)?,
        container_log_max_files: number(
            "containerLogMaxFiles",
            &mut wire.container_log_max_files,
            5,
            2,
            1000,
        )?,
        container_log_monitor_interval: log_interval(&mut wire.container_log_monitor_interval)?,
        seccomp_default: *wire.seccomp_default.get_or_insert(false),
        allowed_unsafe_sysctls: unsafe_sysctls(wire.allowed_unsafe_sysctls.get_or_insert_default())?,
        oom_score_adj: number("oomScoreAdj", &mut wire.oom_score_adj, -999, -1000, 1000)?,
        max_open_files: number("maxOpenFiles", nonzero(&mut wire.max_open_files), 1_000_000, 0, i64::MAX)?,
        max_pods: number("maxPods", nonzero(&mut wire.max_pods), 110, 0, i64::from(i32::MAX))?,
        pod_cidr: text(&mut wire.pod_cidr),
        pods_per_core: number("podsPerCore", &mut wire.pods_per_core, 0, 0, i64::from(i32::MAX))?,
        image_gc: pressure::image_gc(wire)?,
        eviction: pressure::eviction(wire)?,
        shutdown: super::shutdown::resolve(wire)?,
        local_storage_isolation: *wire.local_storage_capacity_isolation.get_or_insert(true),
        volume_stats_period: duration(&mut wire.volume_stats_agg_period, Duration::from_secs(60)),
        volume_plugin_dir: path_or(
            "volumePluginDir",
            &mut wire.volume_plugin_dir,
            Path::new(FLEX_VOLUME_DRIVERS),
        )?,
        log_links: None,
        put_back_restarts: false,
        unread: serde_json::Map::new(),
        node: super::node::resolve(wire)?,
        server: super::server::resolve(wire, partly)?,
        tracing: wire.tracing.as_mut().map(tracing).transpose()?,
        beelet,
        documents: Documents::default(),
    };
    wire.enforce_node_allocatable = Some(reservations::enforced(&config));
    Ok(config)
}

/// Returns the effective values of beelet's own document, and writes them back into it.
pub(super) fn beelet(wire: &mut BeeletWire) -> Result<Beelet, Problem> {
    let folder =
        |field: &str, value: &mut Option<String>, default: &str| path_or(field, value, Path::new(default));
    let state_dir = folder("stateDir", &mut wire.state_dir, "/var/lib/beelet")?;
    Ok(Beelet {
        pods_dir: path_or("podsDir", &mut wire.pods_dir, &state_dir.join("pods"))?,
        image_archives: path_or_empty("imageArchives", &mut wire.image_archives)?,
        seccomp_profile_root: folder(
            "seccompProfileRoot",
            &mut wire.seccomp_profile_root,
            "/var/lib/kubelet/seccomp",
        )?,
        state_dir,
        run_dir: folder("runDir", &mut wire.run_dir, "/run/beelet")?,
        bpf: *wire.bpf.get_or_insert(BpfMode::Auto),
        bpffs: folder("bpffs", &mut wire.bpffs, "/sys/fs/bpf")?,
        pin_name: pin_name(&mut wire.pin_name)?,
        pressure_edges: super::pressure_edges::resolve(&mut wire.pressure_edges),
        bpf_log: None,
        tcp_probes: *wire.tcp_probes.get_or_insert(TcpProbes::Kernel),
        edge_policy: *wire.edge_policy.get_or_insert_default(),
        // Zero is a value: never.
        liveness_canary: duration_or_zero(&mut wire.liveness_canary),
        liveness_stalled: *wire.liveness_stalled.get_or_insert(QueueRule::Room),
        exec_probes: *wire.exec_probes.get_or_insert_default(),
        exec_socket: folder("execSocket", &mut wire.exec_socket, "/run/beelet-exec/exec.sock")?,
        probe_connections: *wire.probe_connections.get_or_insert_default(),
        critical_static_pods: *wire.critical_static_pods.get_or_insert(false),
        cpu_weight_formula: *wire.cpu_weight_formula.get_or_insert_default(),
        kubelet_dir: folder("kubeletDir", &mut wire.kubelet_dir, "/var/lib/kubelet")?,
        // Zero is a value: no pod waits, as under the kubelet.
        device_plugin_wait: wire.device_plugin_wait.get_or_insert(GoDuration(crate::defaults::PLUGIN_WAIT)).0,
        stop_pods_on_exit: *wire.stop_pods_on_exit.get_or_insert(false),
        adopt_kubelet_pods: *wire.adopt_kubelet_pods.get_or_insert(false),
        preemption: *wire.preemption.get_or_insert_default(),
        eviction_memory_signal: *wire.eviction_memory_signal.get_or_insert_default(),
        eviction_swap: *wire.eviction_swap.get_or_insert_default(),
        container_gc: pressure::container_gc(wire)?,
        pressure_interval: pressure_interval(&mut wire.pressure_interval)?,
        max_measured_containers: number(
            "maxMeasuredContainers",
            &mut wire.max_measured_containers,
            2048,
            0,
            100_000,
        )?,
        metrics_pod_uid: *wire.metrics_pod_uid.get_or_insert(false),
        unauthenticated_pods: *wire.unauthenticated_pods.get_or_insert(false),
        tuner: super::tuner::resolve(wire.tuner.get_or_insert_default())?,
        autonomy: autonomy(wire.autonomy.get_or_insert_default())?,
        node_conditions: node_conditions(wire.node_conditions.get_or_insert_default())?,
    })
}

/// Resolves `tracing`. Source of defaults and bounds: component-base/tracing/api/v1.
fn tracing(wire: &mut TracingWire) -> Result<Tracing, Problem> {
    let given = wire.endpoint.clone().filter(|text| !text.is_empty());
    let given = given.unwrap_or_else(|| "localhost:4317".to_owned());
    // The gRPC name schemes (https://github.com/grpc/grpc/blob/master/doc/naming.md) that the kubelet
    // accepts.
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
    wire.endpoint = Some(endpoint.clone());
    let rate = &mut wire.sampling_rate_per_million;
    let per_million = number("tracing.samplingRatePerMillion", rate, 0, 0, 1_000_000)?;
    Ok(Tracing { endpoint, per_million })
}

/// Resolves `nodeConditions`: each convention once.
fn node_conditions(names: &mut Vec<String>) -> Result<Vec<Convention>, Problem> {
    let mut seen = BTreeSet::new();
    names.retain(|name| seen.insert(name.clone()));
    let known = |name: &String| {
        let found = Convention::NAMES.into_iter().find(|(word, _)| word == name);
        found.map(|(_, convention)| convention).ok_or_else(|| {
            let all = Convention::NAMES.map(|(word, _)| word).join(", ");
            Problem::new("nodeConditions", format!("{name:?} is not one of {all}"))
        })
    };
    names.iter().map(known).collect()
}

fn autonomy(wire: &mut AutonomyWire) -> Result<Autonomy, Problem> {
    let after = duration(&mut wire.after, crate::defaults::AUTONOMY);
    if !(Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&after) {
        return Err(Problem::new("autonomy.after", format!("{after:?} is out of range: 1s to 24h")));
    }
    let key_file = path("autonomy.keyFile", &mut wire.key_file)?;
    let stateful_sets = *wire.stateful_sets.get_or_insert(false);
    Ok(Autonomy { enabled: *wire.enabled.get_or_insert(true), after, key_file, stateful_sets })
}

/// Resolves `pressureInterval`: readings below a tenth of a second cost more than they are worth, and above
/// ten seconds, windows of ten seconds would be empty.
fn pressure_interval(value: &mut Option<GoDuration>) -> Result<Duration, Problem> {
    let interval = duration(value, Duration::from_secs(1));
    if (Duration::from_millis(100)..=Duration::from_secs(10)).contains(&interval) {
        return Ok(interval);
    }
    Err(Problem::new("pressureInterval", format!("{interval:?} is out of range: 100ms to 10s")))
}

/// Returns the node's name: the configured one, or the hostname in lower case, as in the kubelet.
pub(super) fn node_name(wire: &mut BeeletWire) -> Result<String, Problem> {
    let name = match wire.node_name.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => name.to_owned(),
        None => rustix::system::uname().nodename().to_string_lossy().trim().to_lowercase(),
    };
    let label = |label: &str| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !label.is_empty() && label.chars().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    if name.len() <= 253 && name.split('.').all(label) {
        wire.node_name = Some(name.clone());
        return Ok(name);
    }
    Err(Problem::new(
        "nodeName",
        format!(
            "{name:?} cannot name a node: use lower case letters, digits, '-' and '.' (RFC 1123), at most 253"
        ),
    ))
}

fn endpoint(field: &str, value: &mut Option<String>, default: &str) -> Result<String, Problem> {
    let given = value.as_deref().filter(|value| !value.is_empty()).unwrap_or(default);
    let path = given.strip_prefix("unix://").unwrap_or(given);
    if !path.starts_with('/') {
        let message =
            format!("{given:?} is not a unix socket; use e.g. unix:///run/containerd/containerd.sock");
        return Err(Problem::new(field, message));
    }
    Ok(value.insert(format!("unix://{path}")).clone())
}

fn healthz_address(value: &mut Option<String>, partly: &mut Vec<Problem>) -> Result<IpAddr, Problem> {
    let field = "healthzBindAddress";
    let given: IpAddr = match value.as_deref().filter(|value| !value.is_empty()) {
        None => Ipv4Addr::LOCALHOST.into(),
        Some(value) => {
            value.parse().map_err(|_| Problem::new(field, format!("{value:?} is not an IP address")))?
        }
    };
    let loopback: IpAddr =
        if given.is_ipv6() { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
    let address = if given.is_loopback() { given } else { loopback };
    if address != given {
        partly.push(Problem::new(
            field,
            format!(
                "{loopback} is used instead of {given}: beelet serves this port, which has no authentication, on loopback \
                 addresses only; use an authenticating proxy for access from elsewhere"
            ),
        ));
    }
    *value = Some(address.to_string());
    Ok(address)
}

/// Resolves the verification of a pod's right to use an image (KEP-2535).
fn image_verification(wire: &mut KubeletWire) -> Result<Verification, Problem> {
    let field = "imagePullCredentialsVerificationPolicy";
    let policy = word(field, &mut wire.image_pull_credentials_verification_policy, VERIFICATION_POLICIES)?;
    wire.preloaded_images_verification_allowlist.take_if(|list| list.is_empty());
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

/// Resolves `userNamespaces.idsPerPod` by the kubelet's rule: a multiple of 65,536 within 32 bits.
fn user_ids_per_pod(wire: &mut UserNamespacesWire) -> Result<u32, Problem> {
    let field = "userNamespaces.idsPerPod";
    let unit = i64::from(user_namespaces::UNIT);
    let ids: u32 = number(field, nonzero(&mut wire.ids_per_pod), unit, unit, MOST)?;
    if !ids.is_multiple_of(user_namespaces::UNIT) {
        return Err(Problem::new(field, format!("{ids} is not a multiple of {unit}")));
    }
    Ok(ids)
}

fn cgroup_root(value: &mut Option<String>) -> Result<String, Problem> {
    let given = value.as_deref().unwrap_or_default();
    let path: PathBuf = Path::new("/").join(given).components().collect();
    if Path::new(given).components().any(|part| part == Component::ParentDir) {
        return Err(Problem::new("cgroupRoot", format!("{given:?} may not contain '..'")));
    }
    Ok(value.insert(path.to_string_lossy().into_owned()).clone())
}

fn cgroup_driver(value: &mut Option<String>) -> Result<Option<CgroupDriver>, Problem> {
    value.take_if(|value| value.is_empty());
    match value.as_deref() {
        None => Ok(None),
        Some("cgroupfs") => Ok(Some(CgroupDriver::Cgroupfs)),
        Some("systemd") => Ok(Some(CgroupDriver::Systemd)),
        Some(other) => {
            Err(Problem::new("cgroupDriver", format!("{other:?} is neither cgroupfs nor systemd")))
        }
    }
}

fn cfs_period(value: &mut Option<GoDuration>) -> Result<Duration, Problem> {
    let period = duration(value, Duration::from_millis(100));
    if (Duration::from_millis(1)..=Duration::from_secs(1)).contains(&period) {
        return Ok(period);
    }
    let message = format!("{period:?} is out of range: the kernel takes 1ms to 1s");
    Err(Problem::new("cpuCFSQuotaPeriod", message))
}

/// Resolves memory QoS, which is on if one of its two fields is set: beelet has no feature gates.
fn memory_qos(wire: &mut KubeletWire) -> Result<Option<MemoryQos>, Problem> {
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
    if factor.is_none() && wire.memory_reservation_policy.is_none() {
        return Ok(None);
    }
    let word = match reservation {
        MemoryReservationPolicy::None => "None",
        MemoryReservationPolicy::TieredReservation => "TieredReservation",
    };
    wire.memory_reservation_policy = Some(word.to_owned());
    Ok(Some(MemoryQos { throttling_factor: factor, reservation }))
}

/// Returns the maximum number of concurrent image pulls; None: no limit. The default is five; the kubelet's
/// is one.
fn parallel_pulls(wire: &mut KubeletWire) -> Result<Option<usize>, Problem> {
    let field = "maxParallelImagePulls";
    let most = &mut wire.max_parallel_image_pulls;
    let most: Option<usize> = if most.is_some() { Some(number(field, most, 0, 0, MOST)?) } else { None };
    let pulls = match (wire.serialize_image_pulls, most) {
        (Some(true), Some(2..)) => {
            let message = "is more than 1, but serializeImagePulls is true; remove one of them";
            return Err(Problem::new(field, message));
        }
        (Some(true), _) => Some(1),
        // As in the kubelet, `serializeImagePulls: false` without a maximum means no limit.
        (Some(false), None) | (_, Some(0)) => None,
        (_, Some(most)) => Some(most),
        (None, None) => Some(5),
    };
    wire.serialize_image_pulls = Some(pulls == Some(1));
    wire.max_parallel_image_pulls = Some(pulls.map_or(0, |pulls| i64::try_from(pulls).unwrap_or(MOST)));
    Ok(pulls)
}

fn log_size(value: &mut Option<String>) -> Result<u64, Problem> {
    let field = "containerLogMaxSize";
    let text = value.as_deref().filter(|text| !text.is_empty()).unwrap_or("10Mi");
    let size = Quantity::parse(text).map_err(|error| Problem::new(field, error.to_string()))?;
    match u64::try_from(size.value()) {
        Ok(bytes) if bytes > 0 => {
            *value = Some(bytes.to_string());
            Ok(bytes)
        }
        _ => Err(Problem::new(field, format!("{text} must be more than 0"))),
    }
}

fn log_interval(value: &mut Option<GoDuration>) -> Result<Duration, Problem> {
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
            let message = format!("{pattern:?} is not a sysctl's name or a prefix with a final '*'");
            return Err(Problem::new(format!("allowedUnsafeSysctls[{index}]"), message));
        }
    }
    Ok(list.to_vec())
}

fn qos_reserved(wire: &mut Amounts) -> Result<BTreeMap<String, u8>, Problem> {
    let mut reserved = BTreeMap::new();
    for (name, value) in &mut wire.0 {
        let field = format!("qosReserved.{name}");
        if name != "memory" {
            return Err(Problem::new(field, "only memory can be reserved for a QoS class"));
        }
        let whole = value.strip_suffix('%').and_then(|digits| digits.trim().parse::<u8>().ok());
        let percent = whole.filter(|percent| *percent <= 100).ok_or_else(|| {
            Problem::new(field, format!("{value:?} is not a whole percentage; use e.g. \"50%\""))
        })?;
        *value = format!("{percent}%");
        reserved.insert(name.clone(), percent);
    }
    Ok(reserved)
}

/// Parses the list. As in the kubelet, an entry that is not an address is dropped with a warning.
fn cluster_dns(list: &mut Vec<String>, partly: &mut Vec<Problem>) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for (index, text) in list.iter().enumerate() {
        match text.parse() {
            Ok(address) => addresses.push(address),
            Err(_) => partly.push(Problem::new(
                format!("clusterDNS[{index}]"),
                format!("{text:?} is ignored: not an IP address"),
            )),
        }
    }
    *list = addresses.iter().map(ToString::to_string).collect();
    addresses
}

fn resolv_conf(value: &mut Option<String>) -> Result<Option<PathBuf>, Problem> {
    value.get_or_insert_with(|| "/etc/resolv.conf".to_owned());
    path_or_empty("resolvConf", value)
}

fn restart_period(wire: &mut CrashLoopBackOffWire) -> Result<Duration, Problem> {
    let most = Duration::from_secs(300);
    let period = wire.max_container_restart_period.get_or_insert(GoDuration(most));
    if (Duration::from_secs(1)..=most).contains(&period.0) {
        return Ok(period.0);
    }
    let message = format!("{:?} is out of range: 1s to 300s", period.0);
    Err(Problem::new("crashLoopBackOff.maxContainerRestartPeriod", message))
}

fn pin_name(value: &mut Option<String>) -> Result<String, Problem> {
    value.take_if(|name| name.is_empty());
    let name = value.get_or_insert_with(|| "beelet".to_owned());
    // bpffs refuses names with a dot.
    if name.len() <= 64 && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
        return Ok(name.clone());
    }
    Err(Problem::new("pinName", format!("{name:?} must be letters, digits, '-' and '_', at most 64")))
}
