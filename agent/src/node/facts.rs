//! Facts of the machine: size, address, name resolution.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use super::{addresses, topology};
use anyhow::{Context, Result, bail};
use beelet_policy::node::reservations::{Excess, excesses};
use beelet_policy::resources::{
    CPU, EPHEMERAL_STORAGE, MEMORY, PODS, ResourceList,
    cgroups::{CgroupConfig, CgroupValues, CgroupVersion, NodeAmounts, Swap, reserved_cgroup},
    huge_pages,
};
use beelet_proto::cri;
use beelet_units::quantity::Quantity;
use tracing::warn;

use beelet_api::grpc::devices::NodeResources;
use beelet_base::{blocking::blocking, filesystem, machine_memory::meminfo};
use beelet_cgroups::{Cgroups, Hierarchy, Version};
use beelet_config::Config;
use beelet_model::pod::{Allocatable, HostDns, HostIps, NodeFacts};
use beelet_pinning::machine::Source;

/// Maximum size of a resolver configuration, in bytes: the kubelet's bound.
const RESOLVER_MAX: u64 = 10 << 20;
/// The kernel's file of memory statistics.
const MEMINFO: &str = "/proc/meminfo";

/// The machine's resources and addresses.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Number of online CPUs.
    pub cpus: usize,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Size of the file system of pods' volumes, in bytes, as eviction measures it; `None` if unknown.
    pub storage_bytes: Option<u64>,
    /// Swap, in bytes.
    pub swap_bytes: u64,
    /// Huge pages by resource name.
    pub hugepages: BTreeMap<String, Quantity>,
    /// CPUs and NUMA nodes; `None` where nothing is pinned.
    pub topology: Option<Source>,
    /// The node's own addresses, `status.hostIPs`.
    pub host: HostIps,
}

impl Machine {
    /// Inspects this machine.
    pub(super) async fn inspect(config: &Config) -> Result<Self> {
        let dir = volumes_folder(config);
        let storage = blocking("measuring the folder of volumes", move || filesystem::statvfs(&dir)).await;
        let storage_bytes = storage.map(|disk| disk.bytes.capacity_bytes).inspect_err(|error| {
            warn!(%error, "cannot measure the file system of pods' volumes; rejecting pods that request ephemeral-storage");
        });
        Ok(Self {
            cpus: beelet_base::cpus::count(),
            memory_bytes: memory()?,
            swap_bytes: meminfo(&fs::read_to_string(MEMINFO).unwrap_or_default(), "SwapTotal").unwrap_or(0),
            storage_bytes: storage_bytes.ok(),
            hugepages: beelet_admission::hugepages(),
            topology: topology::inspect(config, memory()?),
            host: addresses::of(&config.node.ips),
        })
    }
}

/// Returns a folder on the file system of pods' volumes, for the node's disk pressure: the volumes' folder,
/// or its nearest existing ancestor.
pub(super) fn volumes_folder(config: &Config) -> PathBuf {
    let folder = &config.beelet.pods_dir;
    folder.ancestors().find(|there| there.exists()).unwrap_or(folder).to_owned()
}

/// Returns a quantity of whole units.
fn whole(units: u64) -> Quantity {
    Quantity::from_units(i64::try_from(units).unwrap_or(i64::MAX))
}

/// Returns the node's capacity and allocatable resources.
pub(super) fn capacity(config: &Config, machine: &Machine) -> beelet_admission::NodeResources {
    let mut capacity = machine.hugepages.clone();
    capacity.insert(CPU.to_owned(), whole(machine.cpus as u64));
    capacity.insert(MEMORY.to_owned(), whole(machine.memory_bytes));
    capacity.insert(PODS.to_owned(), whole(config.pod_limit(machine.cpus).into()));
    if let Some(bytes) = machine.storage_bytes {
        capacity.insert(EPHEMERAL_STORAGE.to_owned(), whole(bytes));
    }
    let mut reserved = BTreeMap::new();
    for name in config.system_reserved.keys().chain(config.kube_reserved.keys()) {
        reserved.insert(name.clone(), config.reserved(name));
    }
    beelet_admission::NodeResources::new(capacity, &reserved, &config.eviction.thresholds)
}

/// Refuses a configuration that reserves more of a resource than the machine has, as a kubelet does.
/// Otherwise every pod would be rejected for a misleading reason.
pub(super) fn check_reservations(config: &Config, machine: &Machine) -> Result<()> {
    let mut capacity = capacity(config, machine).capacity;
    if let Some(pids) = beelet_admission::pids() {
        capacity.insert(beelet_admission::PID.to_owned(), Quantity::from_units(pids));
    }
    let (system, kube) = (&config.system_reserved, &config.kube_reserved);
    refuse_excesses(&excesses(&capacity, system, kube, &config.eviction.thresholds))
}

/// Like `check_reservations`, for the machine before the agent's start.
pub(crate) fn check_reservations_here(config: &Config) -> Result<()> {
    let reserved = (&config.system_reserved, &config.kube_reserved);
    let volumes = &config.beelet.pods_dir;
    refuse_excesses(&beelet_admission::over_reserved(volumes, reserved, &config.eviction.thresholds))
}

fn refuse_excesses(excesses: &[Excess]) -> Result<()> {
    let sentences: Vec<String> = excesses.iter().map(Excess::to_string).collect();
    if sentences.is_empty() { Ok(()) } else { bail!("{}", sentences.join("; ")) }
}

/// Returns the facts from which cgroup values are computed on this machine.
pub(super) fn cgroup_config(config: &Config, machine: &Machine, cgroups: &Cgroups) -> CgroupConfig {
    let version = match cgroups.paths.version() {
        Version::V1 | Version::Hybrid => CgroupVersion::V1,
        Version::V2 => CgroupVersion::V2,
    };
    let node = NodeAmounts::new(
        whole(machine.cpus as u64),
        whole(machine.memory_bytes),
        config.reserved("cpu"),
        config.reserved("memory"),
    );
    CgroupConfig {
        // `beelet_cgroups` prefixes every path with the configured root, and converts paths to slices for
        // systemd.
        cpu_cfs_quota: config.cpu_cfs_quota,
        cpu_cfs_quota_period_us: u64::try_from(config.cpu_cfs_quota_period.as_micros()).unwrap_or(100_000),
        exclusive_cpus: config.pinning.has_exclusive_cpus().then_some(config.pinning.gates),
        qos_reserved_memory_percent: config.qos_reserved.get("memory").copied(),
        cpu_weight_formula: config.beelet.cpu_weight_formula,
        memory_qos: config.memory_qos,
        oom_group: config.single_process_oom_kill != Some(true),
        pod_pids_limit: (config.pod_pids_limit > 0).then_some(config.pod_pids_limit),
        huge_pages: machine
            .hugepages
            .iter()
            .filter_map(|(name, bytes)| Some((huge_pages::size_of_resource(name)?, bytes.value())))
            .collect(),
        limit_huge_pages: has_controller(cgroups, "hugetlb"),
        node_pids: beelet_admission::pids()
            .filter(|_| has_controller(cgroups, "pids"))
            .map(|pids| pids.saturating_sub(config.reserved("pid").value()).max(0)),
        ..CgroupConfig::new(version, node)
    }
}

/// Returns true if pods can use a controller: a hybrid machine may have it in cgroup2, where pods have none
/// of its files.
fn has_controller(cgroups: &Cgroups, controller: &str) -> bool {
    let of_version_1 = |hierarchy: &Hierarchy| !hierarchy.is_v2 && hierarchy.controllers.contains(controller);
    match cgroups.paths.version() {
        Version::V2 => cgroups.paths.controllers().contains(controller),
        Version::V1 | Version::Hybrid => cgroups.paths.hierarchies().iter().any(of_version_1),
    }
}

/// Returns the machine's swap and its allowed use; None if swap can't be limited. The cgroup `kubepods` must
/// exist: its file shows if the kernel can limit swap.
pub(super) fn swap(config: &Config, machine: &Machine, cgroups: &Cgroups) -> Option<Swap> {
    let file = if cgroups.paths.version() == Version::V2 {
        "memory.swap.max"
    } else {
        "memory.memsw.limit_in_bytes"
    };
    let capacity = i64::try_from(machine.swap_bytes).unwrap_or(i64::MAX);
    cgroups.read("/kubepods", file).map(|_| Swap { behavior: config.swap_behavior, capacity })
}

/// Returns capacity and allocatable, without devices, in Kubernetes' format.
pub(super) fn node_resources(config: &Config, resources: &beelet_admission::NodeResources) -> NodeResources {
    let text = |(name, amount): (&String, &Quantity)| {
        let bytes = name == "memory" || name == "ephemeral-storage" || name.starts_with("hugepages-");
        (name.clone(), if bytes { amount.binary() } else { amount.to_string() })
    };
    NodeResources {
        name: config.node_name.clone(),
        capacity: resources.capacity.iter().map(text).collect(),
        allocatable: resources.allocatable.iter().map(text).collect(),
    }
}

/// Returns the machine's memory, in bytes.
fn memory() -> Result<u64> {
    meminfo(&fs::read_to_string(MEMINFO).context("cannot read /proc/meminfo")?, "MemTotal")
        .context("/proc/meminfo has no MemTotal")
}

/// Returns the values of the daemons' cgroups whose reservations are enforced.
///
/// # Errors
/// One of these cgroups is missing: like the kubelet, the agent limits them but doesn't create them.
pub(super) fn reserved_cgroups(
    config: &Config,
    cgroups: &Cgroups,
    values: &CgroupConfig,
) -> Result<Vec<CgroupValues>> {
    require_reserved_cgroups(config, cgroups)?;
    let daemons = [
        (&config.system_reserved_cgroup, &config.system_reserved),
        (&config.kube_reserved_cgroup, &config.kube_reserved),
    ];
    let mut reserved = Vec::new();
    for (cgroup, amounts) in daemons {
        let Some(cgroup) = cgroup else { continue };
        let mut list = ResourceList::default();
        for (name, amount) in amounts.iter().filter(|(name, _)| !cgroup.compressible_only || *name == "cpu") {
            list.set(name, *amount);
        }
        reserved.push(reserved_cgroup(&cgroup.path, &list, values));
    }
    Ok(reserved)
}

/// Refuses a machine that lacks a cgroup of daemons whose reservation is enforced.
pub(super) fn require_reserved_cgroups(config: &Config, cgroups: &Cgroups) -> Result<()> {
    let daemons = [
        ("systemReservedCgroup", &config.system_reserved_cgroup),
        ("kubeReservedCgroup", &config.kube_reserved_cgroup),
    ];
    for (field, cgroup) in daemons {
        let Some(cgroup) = cgroup.as_ref().filter(|cgroup| !cgroups.paths.exists_anywhere(&cgroup.path))
        else {
            continue;
        };
        bail!(
            "{field}: cgroup {} does not exist; create it and start the daemons in it, or remove its part from \
             enforceNodeAllocatable",
            cgroups.paths.cri_parent(&cgroup.path)
        );
    }
    Ok(())
}

/// Returns the node's facts for all pods.
pub(super) fn node_facts(config: &Config, machine: &Machine, amounts: &NodeAmounts) -> Result<NodeFacts> {
    let host_dns = match config.resolv_conf.clone() {
        Some(path) => HostDns::new(move || resolver(&path)),
        None => HostDns::fixed(no_resolver(machine.host.is_ipv6_first)),
    };
    if let Err(error) = host_dns.read() {
        warn!(%error, "pods wait for the machine's name resolution");
    }
    let storage = whole(machine.storage_bytes.unwrap_or(0));
    Ok(NodeFacts {
        node_name: config.node_name.clone(),
        host: machine.host.clone(),
        pod_logs_dir: config.pod_logs_dir.clone(),
        host_dns,
        cluster_dns: config.cluster_dns.clone(),
        cluster_domain: config.cluster_domain.clone(),
        seccomp_root: config.beelet.seccomp_profile_root.clone(),
        seccomp_default: config.seccomp_default,
        allowed_unsafe_sysctls: config.allowed_unsafe_sysctls.clone(),
        app_armor: app_armor_enabled(),
        masked: throttle_folders(Path::new("/sys/devices/system/cpu")),
        allocatable: Allocatable {
            cpu_millis: amounts.allocatable_millis,
            memory_bytes: amounts.allocatable_memory,
            storage_bytes: storage.saturating_sub(config.reserved(EPHEMERAL_STORAGE)).value().max(0),
        },
    })
}

/// Returns the folders of the CPUs' thermal throttling, which containers could use as a side channel.
fn throttle_folders(cpus: &Path) -> Vec<String> {
    let entries = fs::read_dir(cpus).into_iter().flatten().flatten();
    let folders = entries.map(|cpu| cpu.path().join("thermal_throttle")).filter(|folder| folder.is_dir());
    let mut folders: Vec<String> = folders.map(|folder| folder.display().to_string()).collect();
    folders.sort();
    folders
}

/// Returns true if the kernel enforces AppArmor profiles and its interface is mounted, so that the runtime
/// can load profiles.
fn app_armor_enabled() -> bool {
    let enabled = fs::read_to_string("/sys/module/apparmor/parameters/enabled");
    enabled.is_ok_and(|text| text.starts_with('Y')) && Path::new("/sys/kernel/security/apparmor").exists()
}

/// Returns the resolver configuration without a file: the machine itself, even if it does not answer
/// (`GetPodDNS`).
fn no_resolver(is_ipv6: bool) -> cri::DnsConfig {
    let server = if is_ipv6 { "::1" } else { "127.0.0.1" };
    cri::DnsConfig { servers: vec![server.to_owned()], searches: vec![".".to_owned()], ..Default::default() }
}

/// Reads a resolver configuration. As in the kubelet (`getHostDNSConfig`), a missing file is an error: a pod
/// that starts without name servers would be broken for its whole life.
fn resolver(path: &Path) -> io::Result<cri::DnsConfig> {
    let read = || {
        let mut bytes = Vec::new();
        File::open(path)?.take(RESOLVER_MAX + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > RESOLVER_MAX {
            return Err(io::Error::other(format!("the file has more than {RESOLVER_MAX} bytes")));
        }
        Ok(parse_resolver(&String::from_utf8_lossy(&bytes)))
    };
    let with_path = |error: io::Error| {
        let words = format!("cannot read resolvConf {}: {error}", path.display());
        io::Error::new(error.kind(), format!("{words}; set resolvConf to another file, or to \"\" for none"))
    };
    read().map_err(with_path)
}

/// Parses resolv.conf(5): all name servers, the last search line, all options.
pub fn parse_resolver(text: &str) -> cri::DnsConfig {
    let mut dns = cri::DnsConfig::default();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => dns.servers.extend(words.next().map(str::to_owned)),
            Some("search") => {
                let named = words.filter(|word| *word != ".");
                dns.searches = named.map(|word| word.trim_end_matches('.').to_owned()).collect();
            }
            Some("options") => dns.options.extend(words.map(str::to_owned)),
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_with_less_than_is_reserved_is_refused_before_it_runs_pods() {
        let (mut config, _) = Config::with_defaults().unwrap();
        let machine = Machine {
            cpus: 4,
            memory_bytes: 8 << 30,
            storage_bytes: Some(100 << 30),
            swap_bytes: 0,
            hugepages: BTreeMap::new(),
            topology: None,
            host: HostIps::fixed(Vec::new()),
        };
        check_reservations(&config, &machine).unwrap();
        check_reservations_here(&config).unwrap();
        config.system_reserved.insert(MEMORY.to_owned(), Quantity::parse("900Ti").unwrap());
        for refused in [check_reservations(&config, &machine), check_reservations_here(&config)] {
            let error = refused.unwrap_err().to_string();
            assert!(
                error.contains("900Ti by systemReserved") || error.contains("921600Gi by systemReserved"),
                "{error}"
            );
            assert!(error.contains("lower systemReserved"), "{error}");
        }
    }

    #[test]
    fn what_cpus_tell_of_their_throttling_is_hidden_where_there_is_any() {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["cpu1/thermal_throttle", "cpu0/thermal_throttle", "cpu2", "cpufreq"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        let found = throttle_folders(dir.path());
        let expected = ["cpu0", "cpu1"].map(|cpu| dir.path().join(cpu).join("thermal_throttle"));
        assert_eq!(found, expected.map(|folder| folder.display().to_string()));
        assert_eq!(throttle_folders(Path::new("/none")), Vec::<String>::new());
    }

    #[test]
    fn the_resolver_configuration_is_read_again_and_one_that_is_gone_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("resolv.conf");
        let read = file.clone();
        let dns = HostDns::new(move || resolver(&read));
        let error = dns.read().unwrap_err().to_string();
        assert!(error.starts_with("cannot read resolvConf /") && error.contains("No such file"), "{error}");
        for server in ["10.0.0.1", "10.0.0.2"] {
            fs::write(&file, format!("nameserver {server}\n")).unwrap();
            dns.read().unwrap();
            assert_eq!(dns.last().servers, [server]);
        }
        File::create(&file).unwrap().set_len(RESOLVER_MAX + 1).unwrap();
        assert!(dns.read().unwrap_err().to_string().contains("more than"));
        assert_eq!(dns.last().servers, ["10.0.0.2"]);
    }

    #[test]
    fn of_several_search_lines_the_last_one_counts() {
        let dns = parse_resolver(
            "# a comment\nnameserver 10.0.0.1\nsearch a b\nsearch c. .\nnameserver ::1\noptions ndots:2 rotate\n",
        );
        assert_eq!(dns.servers, ["10.0.0.1", "::1"]);
        assert_eq!(dns.searches, ["c"]);
        assert_eq!(dns.options, ["ndots:2", "rotate"]);
    }
}
