//! The values of the cgroups above the pods: kubepods and the QoS classes (`qosContainerManagerImpl`,
//! `enforceNodeAllocatableCgroups` of the kubelet), and of the folders of reserved daemons.

use std::borrow::Borrow;

use k8s_openapi::api::core::v1::Pod;

use crate::resources::{
    CPU, MEMORY, PodDemand, ResourceList,
    cgroups::{
        CgroupConfig, CgroupValues, Level, MemoryReservationPolicy, Settings,
        names::{kubepods_path, qos_path},
    },
    qos::{QosClass, qos_class_of},
};
use beelet_units::{field::FieldError, quantity::Quantity};

/// Bytes of huge pages that a QoS class may use: only the limits of its pods bound them
/// (`setHugePagesUnbounded`).
const UNBOUNDED: i64 = 1 << 62;

/// Sums of the node's pods' requests that the cgroups above them depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct QosTotals {
    /// Millicores that the Burstable pods request, each pod rounded up.
    pub burstable_millis: i64,
    /// Bytes of memory that the Burstable pods request.
    pub burstable_memory: i64,
    /// Bytes of memory that the Guaranteed pods request.
    pub guaranteed_memory: i64,
}

impl QosTotals {
    /// Returns the sums over all pods of the node.
    ///
    /// # Errors
    /// The path (`[3].spec.…`) of the first amount that is not a quantity.
    pub(crate) fn of<P: Borrow<Pod>>(pods: &[P]) -> Result<Self, FieldError> {
        let mut totals = Self::default();
        for (index, pod) in pods.iter().enumerate() {
            let demand = PodDemand::read(pod.borrow()).map_err(|error| error.under(&format!("[{index}]")))?;
            totals.add(qos_class_of(pod.borrow(), &demand), &demand);
        }
        Ok(totals)
    }

    /// Adds a pod.
    fn add(&mut self, class: QosClass, demand: &PodDemand<'_>) {
        if class == QosClass::BestEffort {
            return;
        }
        let requests = demand.requests();
        let memory = requests.amount(MEMORY).value();
        if class == QosClass::Guaranteed {
            self.guaranteed_memory = self.guaranteed_memory.saturating_add(memory);
        } else {
            self.burstable_memory = self.burstable_memory.saturating_add(memory);
            self.burstable_millis = self.burstable_millis.saturating_add(requests.amount(CPU).milli_value());
        }
    }
}

/// Returns the cgroups of kubepods, burstable and besteffort, in this order, for the node's pods.
///
/// # Errors
/// The path (`[3].spec.…`) of the first amount that is not a quantity.
pub fn node_cgroups<P: Borrow<Pod>>(
    pods: &[P],
    config: &CgroupConfig,
) -> Result<[CgroupValues; 3], FieldError> {
    let totals = QosTotals::of(pods)?;
    Ok([
        kubepods_cgroup(&totals, config),
        qos_cgroup(QosClass::Burstable, &totals, config),
        qos_cgroup(QosClass::BestEffort, &totals, config),
    ])
}

/// Returns the cgroup of all pods: the node's amounts less its reservations, and the protection of the pods'
/// requests.
pub(crate) fn kubepods_cgroup(totals: &QosTotals, config: &CgroupConfig) -> CgroupValues {
    let requested = totals.guaranteed_memory.saturating_add(totals.burstable_memory);
    let settings = Settings {
        cpu_millis: Some(config.node.allocatable_millis),
        memory_max: Some(config.node.allocatable_memory),
        memory_min: reserved(requested, config),
        pids_max: config.node_pids,
        ..Settings::default()
    };
    let mut files = settings.files(Level::Above, config);
    files.extend(config.huge_page_files(|size| config.huge_pages.get(&size).copied().unwrap_or(0)));
    CgroupValues { path: kubepods_path(config), files }
}

/// Returns the cgroup of a QoS class. Guaranteed pods have no class cgroup: they are in kubepods itself.
pub(crate) fn qos_cgroup(class: QosClass, totals: &QosTotals, config: &CgroupConfig) -> CgroupValues {
    let (burstable_limit, besteffort_limit) = memory_limits(totals, config).unzip();
    let settings = match class {
        QosClass::Guaranteed => return kubepods_cgroup(totals, config),
        QosClass::Burstable => Settings {
            cpu_millis: Some(totals.burstable_millis),
            memory_max: burstable_limit,
            memory_low: reserved(totals.burstable_memory, config),
            ..Settings::default()
        },
        QosClass::BestEffort => {
            Settings { cpu_millis: Some(0), memory_max: besteffort_limit, ..Settings::default() }
        }
    };
    let mut files = settings.files(Level::Above, config);
    files.extend(config.huge_page_files(|_| UNBOUNDED));
    CgroupValues { path: qos_path(class, config), files }
}

/// Returns the folder of daemons with a reservation (`kubeReservedCgroup`, `systemReservedCgroup`).
pub fn reserved_cgroup(path: &str, reserve: &ResourceList<'_>, config: &CgroupConfig) -> CgroupValues {
    let settings = Settings {
        cpu_millis: reserve.get(CPU).map(Quantity::milli_value),
        memory_max: reserve.get(MEMORY).map(Quantity::value),
        pids_max: reserve.get("pid").map(Quantity::value),
        ..Settings::default()
    };
    CgroupValues { path: path.to_owned(), files: settings.files(Level::Above, config) }
}

/// Returns the memory that memory QoS protects: zero unless requests are reserved, which reverts an earlier
/// value.
fn reserved(requested: i64, config: &CgroupConfig) -> Option<i64> {
    config.memory_qos().map(|qos| match qos.reservation {
        MemoryReservationPolicy::None => 0,
        MemoryReservationPolicy::TieredReservation => requested.max(0),
    })
}

/// Applies `qosReserved`: the limit of a class excludes this share of the requests of the classes above it.
fn memory_limits(totals: &QosTotals, config: &CgroupConfig) -> Option<(i64, i64)> {
    let percent = i128::from(config.qos_reserved_memory_percent?);
    let allocatable = Some(config.node.allocatable_memory).filter(|bytes| *bytes != 0)?;
    let share = |requested: i64| i64::try_from(i128::from(requested) * percent / 100).unwrap_or(i64::MAX);
    let burstable = allocatable.saturating_sub(share(totals.guaranteed_memory));
    Some((burstable, burstable.saturating_sub(share(totals.burstable_memory))))
}
