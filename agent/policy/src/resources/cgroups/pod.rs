//! The values of a pod's cgroup (`ResourceConfigForPod` of the kubelet).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

use crate::resources::{
    CPU, MEMORY, PodDemand, ResourceList,
    cgroups::{
        CgroupConfig, CgroupValues, ContainerResources, Level, MemoryReservationPolicy, Settings,
        container::{OOM_GROUP, kills_as_group},
        cpu::{millis_to_quota, millis_to_shares},
        names::pod_path,
    },
    huge_pages,
    qos::{QosClass, qos_class_of},
};
use beelet_units::{field::FieldError, quantity::Quantity};

/// Returns the path of a pod's cgroup and the values of its files.
///
/// # Errors
/// The path of an amount in the pod that is not a quantity, or of a UID that cannot name a cgroup.
pub fn pod_cgroup(pod: &Pod, config: &CgroupConfig) -> Result<CgroupValues, FieldError> {
    let demand = PodDemand::read(pod)?;
    let class = qos_class_of(pod, &demand);
    let path = pod_path(pod.metadata.uid.as_deref(), class, config)?;
    let enforced = config.cpu_cfs_quota && !config.has_exclusive_cpus(pod, None);
    let mut files = settings(&demand, (class, enforced), config).files(Level::Above, config);
    files.extend(config.huge_page_files(|size| huge_pages(&demand, size)));
    Ok(CgroupValues { path, files })
}

/// Returns the resources of a pod's sandbox for the runtime: those of its containers together, without the
/// overhead, which has a field of its own. Runtimes that size a virtual machine use them
/// (`calculateSandboxResources`).
///
/// # Errors
/// The path of the first amount in the pod that is not a quantity.
pub fn sandbox_resources(pod: &Pod, config: &CgroupConfig) -> Result<ContainerResources, FieldError> {
    let demand = PodDemand { overhead: None, ..PodDemand::read(pod)? };
    let (requests, limits) = (demand.requests(), demand.limits());
    // Without a request the limit counts, as the API server would default it.
    let request = requests.get(CPU).unwrap_or_else(|| limits.amount(CPU));
    let quota = millis_to_quota(limits.amount(CPU).milli_value(), config.cpu_cfs_quota_period_us);
    Ok(ContainerResources {
        cpu_shares: millis_to_shares(request.milli_value()),
        cpu_quota: if config.cpu_cfs_quota { quota } else { 0 },
        cpu_period: if config.cpu_cfs_quota { config.cpu_cfs_quota_period_us } else { 0 },
        memory_limit_bytes: limits.amount(MEMORY).value(),
        oom_score_adj: 0,
        memory_swap_limit_bytes: 0,
        huge_page_limits: BTreeMap::new(),
        unified: kills_as_group(config).then(|| (OOM_GROUP.to_owned(), "1".to_owned())).into_iter().collect(),
    })
}

fn settings(
    demand: &PodDemand<'_>,
    (class, is_cpu_enforced): (QosClass, bool),
    config: &CgroupConfig,
) -> Settings {
    let (requests, limits) = (demand.requests(), demand.limits());
    let declared = LimitsDeclared::of(demand);
    let quota = match is_cpu_enforced {
        true => millis_to_quota(limits.amount(CPU).milli_value(), config.cpu_cfs_quota_period_us),
        false => -1,
    };
    let (with_quota, with_memory) = match class {
        QosClass::Guaranteed => (true, true),
        QosClass::Burstable => (declared.cpu, declared.memory),
        QosClass::BestEffort => (false, false),
    };
    let request = requests.get(MEMORY).map(Quantity::value).filter(|bytes| *bytes > 0);
    let tiered =
        config.memory_qos().is_some_and(|qos| qos.reservation == MemoryReservationPolicy::TieredReservation);
    Settings {
        cpu_millis: Some(if class == QosClass::BestEffort { 0 } else { requests.amount(CPU).milli_value() }),
        quota: with_quota.then_some(quota),
        period: with_quota.then_some(config.cpu_cfs_quota_period_us),
        memory_max: with_memory.then(|| limits.amount(MEMORY).value()),
        memory_min: request.filter(|_| tiered && class == QosClass::Guaranteed),
        // A BestEffort pod requests memory if its runtime class has an overhead.
        memory_low: request.filter(|_| tiered && class != QosClass::Guaranteed),
        memory_high: None,
        pids_max: config.pod_pids_limit.filter(|limit| *limit > 0),
    }
}

/// Returns the bytes of huge pages of this size that a pod requests; the request is the limit.
fn huge_pages(demand: &PodDemand<'_>, size: i64) -> i64 {
    let requests = demand.requests();
    let of_size = requests.iter().filter(|(name, _)| huge_pages::size_of_resource(name) == Some(size));
    of_size.fold(0, |sum, (_, amount)| sum.saturating_add(amount.value()))
}

/// True for each resource that every container limits: only then a Burstable pod has a limit.
struct LimitsDeclared {
    cpu: bool,
    memory: bool,
}

impl LimitsDeclared {
    fn of(demand: &PodDemand<'_>) -> Self {
        let mut declared = Self { cpu: true, memory: true };
        demand.containers.iter().for_each(|container| declared.require(&Self::by(&container.limits)));
        // An init container is checked together with the sidecars that run at the same time, as in the
        // kubelet's callback.
        let mut sidecars = Self { cpu: false, memory: false };
        for init in &demand.init_containers {
            let own = Self::by(&init.demand.limits);
            let running = Self { cpu: own.cpu || sidecars.cpu, memory: own.memory || sidecars.memory };
            declared.require(&running);
            if init.restartable {
                sidecars = running;
            }
        }
        if let Some(pod_level) = demand.pod_level.as_ref().filter(|_| demand.has_pod_level()) {
            declared.cpu |= !pod_level.limits.amount(CPU).is_zero();
            declared.memory |= !pod_level.limits.amount(MEMORY).is_zero();
        }
        declared
    }

    /// Returns the limits of a list; zero counts as none.
    fn by(limits: &ResourceList<'_>) -> Self {
        Self { cpu: !limits.amount(CPU).is_zero(), memory: !limits.amount(MEMORY).is_zero() }
    }

    fn require(&mut self, limits: &Self) {
        self.cpu &= limits.cpu;
        self.memory &= limits.memory;
    }
}
