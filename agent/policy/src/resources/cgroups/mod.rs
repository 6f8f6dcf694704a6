//! The cgroups of node, QoS classes, pods and containers, and the contents of their files, on v1 and v2.
//!
//! The kubelet's values (`pkg/kubelet/cm`, `pkg/kubelet/kuberuntime`, 1.36) by default;
//! [`CpuWeightFormula::Proportional`] is the agent's own. Paths are below the cgroup mount. Must never read
//! or write a cgroup: the agent's `cgroups/` is the only writer.

mod container;
mod cpu;
mod names;
mod node;
mod pod;
mod swap;

use beelet_units::{cgroup_driver::CgroupDriver, quantity::Quantity};
use std::collections::BTreeMap;

pub use container::{ContainerResources, OOM_GROUP, container_cgroup, container_resources, oom_score_adj};
pub use cpu::{
    millis_to_quota, millis_to_shares, shares_to_millis, shares_to_weight_linear, shares_to_weight_quadratic,
    weight_to_millis,
};
pub use names::{pod_path, slice_path};
pub use node::{node_cgroups, reserved_cgroup};
pub use pod::{pod_cgroup, sandbox_resources};
pub use swap::{Swap, SwapBehavior, resize_changes_swap};

use cpu::proportional_weight;
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::{
    pinning::{Gates, Needs},
    resources::huge_pages,
};

/// The kernel interface of the controllers. A hybrid machine keeps them on v1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupVersion {
    /// `cpu.shares`, `cpu.cfs_quota_us`, `memory.limit_in_bytes`.
    V1,
    /// `cpu.weight`, `cpu.max`, `memory.max`, `memory.min`, `memory.low`, `memory.high`.
    V2,
}

/// The conversion of requests to `cpu.weight` on v2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuWeightFormula {
    /// The conversion of the kubelet and the runtime: linear above the container, quadratic at it.
    #[default]
    Kubelet,
    /// Millicores / 10 at every level: siblings share exactly by their requests, and one CPU yields the
    /// kernel's default 100.
    Proportional,
}

/// Protection of memory requests from reclaim (KEP-2570).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum MemoryReservationPolicy {
    /// No protection; values written earlier are reverted.
    #[default]
    None,
    /// `memory.min` for Guaranteed pods, `memory.low` for the others.
    TieredReservation,
}

/// Memory QoS (v2 only).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryQos {
    /// Position of `memory.high` between request and limit, above 0 and at most 1; `None` if it is not set.
    pub throttling_factor: Option<f64>,
    /// Protection of requests.
    pub reservation: MemoryReservationPolicy,
}

/// The amounts of the node that cgroups depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeAmounts {
    /// Total memory of the machine, in bytes (for `oom_score_adj`).
    pub memory_capacity: i64,
    /// Millicores left after kube-reserved and system-reserved.
    pub allocatable_millis: i64,
    /// Bytes of memory left after kube-reserved and system-reserved; the eviction threshold is *not*
    /// subtracted.
    pub allocatable_memory: i64,
}

impl NodeAmounts {
    /// Subtracts reservations from the capacity, never going below zero (`GetNodeAllocatableAbsolute`).
    pub fn new(cpus: Quantity, memory: Quantity, reserved_cpu: Quantity, reserved_memory: Quantity) -> Self {
        Self {
            memory_capacity: memory.value(),
            allocatable_millis: cpus.saturating_sub(reserved_cpu).milli_value().max(0),
            allocatable_memory: memory.saturating_sub(reserved_memory).value().max(0),
        }
    }
}

/// The inputs other than pods that decide a cgroup's name and values.
#[derive(Debug, Clone, PartialEq)]
pub struct CgroupConfig {
    /// v1 (hybrid too) or v2.
    pub version: CgroupVersion,
    /// The driver, which determines the names of folders.
    pub driver: CgroupDriver,
    /// `cgroupRoot`: the parent of kubepods, `/` or a path in cgroupfs form.
    pub root: String,
    /// `cpuCFSQuota`: true if CPU limits are enforced.
    pub cpu_cfs_quota: bool,
    /// `cpuCFSQuotaPeriod` in microseconds.
    pub cpu_cfs_quota_period_us: u64,
    /// Under `cpuManagerPolicy: static` the gates by which containers have CPUs for themselves: these have
    /// no CPU quota, and neither has their pod.
    pub exclusive_cpus: Option<Gates>,
    /// `qosReserved.memory` in percent.
    pub qos_reserved_memory_percent: Option<u8>,
    /// Memory QoS, if enabled (without effect on v1).
    pub memory_qos: Option<MemoryQos>,
    /// Conversion of requests to weights on v2.
    pub cpu_weight_formula: CpuWeightFormula,
    /// `podPidsLimit`, if set.
    pub pod_pids_limit: Option<i64>,
    /// True if an OOM kill takes the whole container, not one of its processes (v2; not with
    /// `singleProcessOOMKill`).
    pub oom_group: bool,
    /// The machine's huge pages in bytes, by page size in bytes; includes sizes without any page.
    pub huge_pages: BTreeMap<i64, i64>,
    /// True if huge pages can be limited (the `hugetlb` controller).
    pub limit_huge_pages: bool,
    /// The machine's swap and the rule for its use; `None` if swap cannot be limited.
    pub swap: Option<Swap>,
    /// Maximum processes and threads of all pods together, if limited.
    pub node_pids: Option<i64>,
    /// The node's amounts.
    pub node: NodeAmounts,
}

impl CgroupConfig {
    /// Returns the kubelet's defaults for a node of this version and size.
    pub fn new(version: CgroupVersion, node: NodeAmounts) -> Self {
        Self {
            version,
            driver: CgroupDriver::default(),
            root: "/".to_owned(),
            cpu_cfs_quota: true,
            cpu_cfs_quota_period_us: 100_000,
            exclusive_cpus: None,
            qos_reserved_memory_percent: None,
            memory_qos: None,
            cpu_weight_formula: CpuWeightFormula::default(),
            pod_pids_limit: None,
            oom_group: false,
            huge_pages: BTreeMap::new(),
            limit_huge_pages: false,
            swap: None,
            node_pids: None,
            node,
        }
    }

    /// Returns true if a container (`None`: any container of the pod) has CPUs for itself: a quota could
    /// only take time from it that no other container may have (`DisableCPUQuotaWithExclusiveCPUs`).
    fn has_exclusive_cpus(&self, pod: &Pod, container: Option<&str>) -> bool {
        let Some(gates) = self.exclusive_cpus else { return false };
        let Ok(needs) = Needs::read(pod, gates) else { return false };
        let meant = |name: &str| container.is_none_or(|container| container == name);
        !needs.ignored && needs.containers.iter().any(|own| own.cpus > 0 && meant(&own.name))
    }

    /// Returns memory QoS if it is in force: v2 only.
    fn memory_qos(&self) -> Option<MemoryQos> {
        self.memory_qos.filter(|_| self.version == CgroupVersion::V2)
    }

    /// Returns the files that limit huge pages, as libcontainer writes them; `limit` returns the limit of a
    /// page size.
    fn huge_page_files(&self, limit: impl Fn(i64) -> i64) -> BTreeMap<String, String> {
        let end = if self.version == CgroupVersion::V2 { "max" } else { "limit_in_bytes" };
        let sizes = self.huge_pages.keys().filter(|_| self.limit_huge_pages);
        let file = |size: &i64| {
            (format!("hugetlb.{}.{end}", huge_pages::unit_name(*size)), limit(*size).max(0).to_string())
        };
        sizes.map(file).collect()
    }
}

/// A cgroup's place below the cgroup mount, and the contents of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupValues {
    /// `/kubepods/burstable/pod<uid>`.
    pub path: String,
    /// Contents by file name, without a newline, as the kernel accepts them. Other files stay unchanged.
    pub files: BTreeMap<String, String>,
}

/// The level of a cgroup, which decides the kubelet's weight formula.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Above,
    Container,
}

/// A cgroup's settings before their conversion to files. `None` for those not written.
#[derive(Debug, Clone, Copy, Default)]
struct Settings {
    cpu_millis: Option<i64>,
    /// Microseconds per period; -1 for no limit; 0 if not written.
    quota: Option<i64>,
    period: Option<u64>,
    memory_max: Option<i64>,
    memory_min: Option<i64>,
    memory_low: Option<i64>,
    memory_high: Option<i64>,
    pids_max: Option<i64>,
}

impl Settings {
    /// Returns the files of the configured version, as libcontainer (`opencontainers/cgroups`) writes them.
    fn files(&self, level: Level, config: &CgroupConfig) -> BTreeMap<String, String> {
        let mut files = BTreeMap::new();
        let mut put = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                files.insert(name.to_owned(), value);
            }
        };
        let quota = self.quota.filter(|quota| *quota != 0);
        let memory_max = self.memory_max.filter(|bytes| *bytes != 0);
        match config.version {
            CgroupVersion::V1 => {
                put("cpu.shares", self.cpu_millis.map(|millis| millis_to_shares(millis).to_string()));
                put("cpu.cfs_quota_us", quota.map(|us| us.to_string()));
                put("cpu.cfs_period_us", self.period.map(|us| us.to_string()));
                put("memory.limit_in_bytes", memory_max.map(|bytes| bytes.to_string()));
            }
            CgroupVersion::V2 => {
                put(
                    "cpu.weight",
                    self.cpu_millis
                        .map(|millis| weight(millis, level, config.cpu_weight_formula).to_string()),
                );
                put("cpu.max", cpu_max(quota, self.period));
                put("memory.max", memory_max.map(max_or_bytes));
                put("memory.min", self.memory_min.map(|bytes| bytes.to_string()));
                put("memory.low", self.memory_low.map(|bytes| bytes.to_string()));
                put("memory.high", self.memory_high.map(|bytes| bytes.to_string()));
            }
        }
        put("pids.max", self.pids_max.map(|pids| pids.to_string()));
        files
    }
}

fn weight(millis: i64, level: Level, formula: CpuWeightFormula) -> u64 {
    match (formula, level) {
        (CpuWeightFormula::Proportional, _) => proportional_weight(millis),
        (CpuWeightFormula::Kubelet, Level::Above) => shares_to_weight_linear(millis_to_shares(millis)),
        (CpuWeightFormula::Kubelet, Level::Container) => shares_to_weight_quadratic(millis_to_shares(millis)),
    }
}

fn cpu_max(quota: Option<i64>, period: Option<u64>) -> Option<String> {
    if quota.is_none() && period.is_none() {
        return None;
    }
    let quota = quota.filter(|us| *us > 0).map_or_else(|| "max".to_owned(), |us| us.to_string());
    Some(format!("{quota} {}", period.unwrap_or(100_000)))
}

/// Formats a limit; only -1 means no limit. If reservations exceed the total, a class has a limit below zero,
/// as with the kubelet; the kernel refuses it, which is better than a limit without effect.
fn max_or_bytes(bytes: i64) -> String {
    if bytes == -1 { "max".to_owned() } else { bytes.to_string() }
}

#[cfg(test)]
mod tests;
