//! The values of a container: the CRI request, and the runtime's result in the container's cgroup
//! (`generateLinuxContainerResources` of the kubelet, `opencontainers/cgroups` of the runtime).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};

use crate::resources::{
    CPU, Demand, MEMORY, PodDemand, ResourceList,
    cgroups::{
        CgroupConfig, CgroupValues, CgroupVersion, CpuWeightFormula, Level, MemoryReservationPolicy,
        Settings,
        cpu::{millis_to_quota, millis_to_shares, proportional_weight},
        names::pod_path,
        swap::swap_max,
    },
    critical::is_critical,
    huge_pages, is_restartable,
    qos::{QosClass, qos_class_of},
};
use beelet_units::field::FieldError;

/// Page size: `memory.high` is a multiple of it.
const PAGE: f64 = 4096.0;
/// The quota of a container without a limit.
const NO_QUOTA: i64 = -1;
/// The switch that makes an OOM kill take the whole cgroup; the memory controller's other files hold bytes.
pub const OOM_GROUP: &str = "memory.oom.group";
/// The file with the maximum bytes of swap.
const SWAP_MAX: &str = "memory.swap.max";
/// `oom_score_adj` of Guaranteed and node-critical pods.
const GUARANTEED_OOM_SCORE_ADJ: i64 = -997;
/// `oom_score_adj` of BestEffort pods.
const BESTEFFORT_OOM_SCORE_ADJ: i64 = 1000;

/// The numbers of CRI's `LinuxContainerResources`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerResources {
    /// Relative CPU time; on v2 the runtime converts it to a weight.
    pub cpu_shares: u64,
    /// Microseconds per period; 0 without a limit or if limits are not enforced.
    pub cpu_quota: i64,
    /// Microseconds; 0 if limits are not enforced.
    pub cpu_period: u64,
    /// Bytes; 0 without a limit.
    pub memory_limit_bytes: i64,
    /// Adjustment for the kernel's OOM killer: -1000 (never) … 1000 (first).
    pub oom_score_adj: i64,
    /// Bytes of memory and swap together on version 1; 0 if not written.
    pub memory_swap_limit_bytes: i64,
    /// Maximum bytes of huge pages by page size (`2MB`): an entry for each size that the machine supports.
    pub huge_page_limits: BTreeMap<String, u64>,
    /// Files of cgroup v2 without a field in CRI, set through `unified`.
    pub unified: BTreeMap<String, String>,
}

/// Returns the resources for the CRI request that creates a container. `container` may be any (init)
/// container of the pod.
///
/// # Errors
/// The path of the first amount in the pod, or in the container, that is not a quantity.
pub fn container_resources(
    pod: &Pod,
    container: &Container,
    config: &CgroupConfig,
) -> Result<ContainerResources, FieldError> {
    let facts = Facts::read(pod, container)?;
    let settings = facts.settings(config, config.has_exclusive_cpus(pod, Some(&container.name)));
    let mut unified = BTreeMap::new();
    let mut put = |name: &str, bytes: Option<i64>| {
        if let Some(bytes) = bytes {
            unified.insert(name.to_owned(), bytes.to_string());
        }
    };
    put("memory.min", settings.memory_min);
    put("memory.low", settings.memory_low);
    put("memory.high", settings.memory_high);
    let swap = swap_max(pod, facts.class, &facts.own, config);
    put(SWAP_MAX, swap.filter(|_| config.version == CgroupVersion::V2));
    if kills_as_group(config) {
        unified.insert(OOM_GROUP.to_owned(), "1".to_owned());
    }
    if config.version == CgroupVersion::V2 && config.cpu_weight_formula == CpuWeightFormula::Proportional {
        unified.insert("cpu.weight".to_owned(), proportional_weight(facts.cpu_millis()).to_string());
    }
    Ok(ContainerResources {
        cpu_shares: millis_to_shares(facts.cpu_millis()),
        cpu_quota: settings.quota.unwrap_or(0),
        cpu_period: settings.period.unwrap_or(0),
        memory_limit_bytes: settings.memory_max.unwrap_or(0),
        oom_score_adj: facts.oom_score_adj(pod, container, config.node.memory_capacity),
        // Equal limits for memory and for memory with swap disable swap.
        memory_swap_limit_bytes: match config.version {
            CgroupVersion::V1 if swap.is_some() => settings.memory_max.unwrap_or(0),
            _ => 0,
        },
        huge_page_limits: config.huge_pages.keys().map(|size| facts.huge_page_limit(*size)).collect(),
        unified,
    })
}

/// Returns the values that the container's cgroup must have once the runtime has created it. The last part of
/// the path is the container's name, in place of the folder that the runtime chooses.
///
/// # Errors
/// As [`container_resources`], and at `metadata.uid` if the pod's cannot name a cgroup.
pub fn container_cgroup(
    pod: &Pod,
    container: &Container,
    config: &CgroupConfig,
) -> Result<CgroupValues, FieldError> {
    let facts = Facts::read(pod, container)?;
    let parent = pod_path(pod.metadata.uid.as_deref(), facts.class, config)?;
    let exclusive = config.has_exclusive_cpus(pod, Some(&container.name));
    let mut files = facts.settings(config, exclusive).files(Level::Container, config);
    if kills_as_group(config) {
        // Enforced, not only requested from the runtime: systemd reverts it on a reload.
        files.insert(OOM_GROUP.to_owned(), "1".to_owned());
    }
    let swap = swap_max(pod, facts.class, &facts.own, config);
    if let Some(bytes) = swap.filter(|_| config.version == CgroupVersion::V2) {
        files.insert(SWAP_MAX.to_owned(), bytes.to_string());
    }
    files.extend(
        config.huge_page_files(|size| i64::try_from(facts.huge_page_limit(size).1).unwrap_or(i64::MAX)),
    );
    Ok(CgroupValues { path: format!("{parent}/{}", container.name), files })
}

/// Returns true if an OOM kill takes whole containers.
pub(super) fn kills_as_group(config: &CgroupConfig) -> bool {
    config.version == CgroupVersion::V2 && config.oom_group
}

/// Returns the OOM killer's adjustment for a container's processes (`GetContainerOOMScoreAdjust`).
///
/// # Errors
/// The path of the first amount in the pod, or in the container, that is not a quantity.
pub fn oom_score_adj(pod: &Pod, container: &Container, memory_capacity: i64) -> Result<i64, FieldError> {
    Ok(Facts::read(pod, container)?.oom_score_adj(pod, container, memory_capacity))
}

/// The demands of a container and of its pod.
struct Facts<'a> {
    pod: PodDemand<'a>,
    own: Demand<'a>,
    class: QosClass,
}

impl<'a> Facts<'a> {
    fn read(pod: &'a Pod, container: &'a Container) -> Result<Self, FieldError> {
        let demand = PodDemand::read(pod)?;
        let own = Demand::read(container.resources.as_ref()).map_err(|error| error.under("resources"))?;
        Ok(Self { class: qos_class_of(pod, &demand), pod: demand, own })
    }

    /// Returns a container's own limit, else the pod-level one.
    fn limit(&self, name: &str) -> beelet_units::quantity::Quantity {
        let own = self.own.limits.amount(name);
        match self.pod.pod_level.as_ref().filter(|_| own.is_zero() && self.pod.has_pod_level()) {
            Some(pod_level) => pod_level.limits.amount(name),
            None => own,
        }
    }

    /// Returns the name of a huge page size, and the bytes of those pages that the container may have: its
    /// own limit, else its pod's (`GetHugepageLimitsFromResources`).
    fn huge_page_limit(&self, size: i64) -> (String, u64) {
        let of = |list: &ResourceList<'_>| {
            let mut all = list.iter().filter(|(name, _)| huge_pages::size_of_resource(name) == Some(size));
            all.next().map(|(_, amount)| amount.value())
        };
        let of_pod = self.pod.pod_level.as_ref().filter(|_| self.pod.has_pod_level());
        let limit = of(&self.own.limits).or_else(|| of(&of_pod?.limits)).unwrap_or(0);
        (huge_pages::unit_name(size), u64::try_from(limit).unwrap_or(0))
    }

    /// Returns the cpu request, or the limit if there is none, as the API server would default it.
    fn cpu_millis(&self) -> i64 {
        self.own.requests.get(CPU).unwrap_or_else(|| self.limit(CPU)).milli_value()
    }

    fn settings(&self, config: &CgroupConfig, has_exclusive_cpus: bool) -> Settings {
        let quota = match has_exclusive_cpus {
            true => NO_QUOTA,
            false => millis_to_quota(self.limit(CPU).milli_value(), config.cpu_cfs_quota_period_us),
        };
        let mut settings = Settings {
            cpu_millis: Some(self.cpu_millis()),
            quota: config.cpu_cfs_quota.then_some(quota),
            period: config.cpu_cfs_quota.then_some(config.cpu_cfs_quota_period_us),
            memory_max: Some(self.limit(MEMORY).value()),
            ..Settings::default()
        };
        self.memory_qos(&mut settings, config);
        settings
    }

    /// Applies KEP-2570: requests are protected, and a container near its limit is throttled before it is
    /// killed.
    fn memory_qos(&self, settings: &mut Settings, config: &CgroupConfig) {
        let Some(qos) = config.memory_qos() else { return };
        let request = self.own.requests.amount(MEMORY).value();
        let limit = self.own.limits.amount(MEMORY).value();
        let tiered = qos.reservation == MemoryReservationPolicy::TieredReservation && request != 0;
        match self.class {
            QosClass::Guaranteed if tiered => settings.memory_min = Some(request),
            QosClass::Burstable if tiered => settings.memory_low = Some(request),
            _ => (settings.memory_min, settings.memory_low) = (Some(0), Some(0)),
        }
        if let Some(factor) = qos.throttling_factor.filter(|_| request != limit) {
            let bound = if limit != 0 { limit } else { config.node.allocatable_memory };
            settings.memory_high =
                Some(memory_high(request, bound, factor)).filter(|high| *high != 0 && *high > request);
        }
    }

    fn oom_score_adj(&self, pod: &Pod, container: &Container, memory_capacity: i64) -> i64 {
        let node_critical = pod.spec.as_ref().and_then(|spec| spec.priority_class_name.as_deref())
            == Some("system-node-critical");
        match self.class {
            _ if node_critical && is_critical(pod) => GUARANTEED_OOM_SCORE_ADJ,
            QosClass::Guaranteed => GUARANTEED_OOM_SCORE_ADJ,
            QosClass::BestEffort => BESTEFFORT_OOM_SCORE_ADJ,
            // The score is above every Guaranteed pod's when it uses all memory, and below BestEffort's.
            QosClass::Burstable => self
                .burstable_score(container, memory_capacity)
                .clamp(1000 + GUARANTEED_OOM_SCORE_ADJ, BESTEFFORT_OOM_SCORE_ADJ - 1),
        }
    }

    /// Returns 1000 less the requested thousandths of the node's memory; a sidecar's score is at most that of
    /// the containers it serves.
    fn burstable_score(&self, container: &Container, memory_capacity: i64) -> i64 {
        let score = |request: i64| {
            let capacity = i128::from(memory_capacity.max(1));
            i64::try_from(1000 - 1000 * i128::from(request) / capacity).unwrap_or(i64::MIN)
        };
        let spare = self.unclaimed_pod_memory();
        let own = score(self.own.requests.amount(MEMORY).value().saturating_add(spare));
        if !is_restartable(container) {
            return own;
        }
        let least = self.pod.containers.iter().map(|c| c.requests.amount(MEMORY).value()).min();
        least.map_or(own, |request| own.min(score(request.saturating_add(spare))))
    }

    /// Returns each container's share of the pod-level memory request that no container claims (KEP-2837).
    fn unclaimed_pod_memory(&self) -> i64 {
        let Some(pod_level) = &self.pod.pod_level else { return 0 };
        let containers =
            i64::try_from(self.pod.containers.len() + self.pod.init_containers.len()).unwrap_or(i64::MAX);
        match pod_level.requests.amount(MEMORY) {
            request if request.is_zero() || containers == 0 => 0,
            request => {
                request.value().saturating_sub(self.pod.container_requests().amount(MEMORY).value())
                    / containers
            }
        }
    }
}

/// Returns a point between the request and the bound at this fraction, in whole pages; computed in floats, as
/// in the kubelet.
fn memory_high(request: i64, bound: i64, factor: f64) -> i64 {
    let high = request as f64 + (bound as f64 - request as f64) * factor;
    (high.floor() / PAGE) as i64 * 4096 // as: saturates, and no i64 of bytes loses more than the kubelet's own float64
}
