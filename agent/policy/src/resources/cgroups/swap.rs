//! Swap limits of containers (KEP-2400; `configureContainerSwapResources` of the kubelet).

use k8s_openapi::api::core::v1::{Container, Pod};
use serde::{Deserialize, Serialize};

use crate::resources::{
    Demand, MEMORY,
    cgroups::{CgroupConfig, CgroupVersion},
    critical::is_critical,
    qos::QosClass,
};
use beelet_units::{field::FieldError, quantity::Quantity};

/// The rule for using swap; the values have the names of KubeletConfiguration's `memorySwap.swapBehavior`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum SwapBehavior {
    /// No container uses swap.
    #[default]
    NoSwap,
    /// Containers of Burstable pods use swap, in proportion to their memory request.
    LimitedSwap,
}

/// The machine's swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swap {
    /// The rule for its use.
    pub behavior: SwapBehavior,
    /// Total size in bytes.
    pub capacity: i64,
}

/// Returns true if a container may use swap (`GetContainerSwapBehavior`).
fn uses_swap(pod: &Pod, container: &Container, config: &CgroupConfig) -> Result<bool, FieldError> {
    let own = Demand::read(container.resources.as_ref()).map_err(|error| error.under("resources"))?;
    let class = crate::resources::qos::qos_class(pod)?;
    Ok(config.swap.is_some_and(|swap| may_swap(pod, class, &own, swap, config.version)))
}

/// Returns true if a resize would change the swap limit of a running container, which is impossible
/// (`disallowResizeForSwappableContainers`). A container that restarts for a memory resize does not count.
#[must_use]
pub fn resize_changes_swap(before: &Pod, after: &Pod, config: &CgroupConfig) -> bool {
    let changes = |now: &Container| {
        let earlier = containers(before).find(|container| container.name == now.name);
        earlier.is_some_and(|earlier| {
            request(earlier) != request(now)
                && !restarts_for_memory(earlier)
                && [(before, earlier), (after, now)]
                    .iter()
                    .any(|(pod, container)| uses_swap(pod, container, config).unwrap_or(false))
        })
    };
    containers(after).any(changes)
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

fn request(container: &Container) -> Quantity {
    let demand = Demand::read(container.resources.as_ref());
    demand.map_or(Quantity::ZERO, |demand| demand.requests.amount(MEMORY))
}

fn restarts_for_memory(container: &Container) -> bool {
    let mut policies = container.resize_policy.iter().flatten();
    policies.any(|policy| policy.resource_name == MEMORY && policy.restart_policy == "RestartContainer")
}

fn may_swap(pod: &Pod, class: QosClass, own: &Demand<'_>, swap: Swap, version: CgroupVersion) -> bool {
    let (request, limit) = (own.requests.amount(MEMORY), own.limits.amount(MEMORY));
    swap.behavior == SwapBehavior::LimitedSwap
        && version == CgroupVersion::V2
        && class == QosClass::Burstable
        && !is_critical(pod)
        // A container with neither request nor limit does not use swap either.
        && request != limit
}

/// Returns the bytes of swap that a container of a pod of this class may use on version 2; `None` if swap
/// cannot be limited.
pub(super) fn swap_max(pod: &Pod, class: QosClass, own: &Demand<'_>, config: &CgroupConfig) -> Option<i64> {
    let swap = config.swap?;
    let request = own.requests.amount(MEMORY);
    let memory = config.node.memory_capacity;
    if !may_swap(pod, class, own, swap, config.version)
        || memory <= 0
        || request > Quantity::from_units(memory)
    {
        return Some(0);
    }
    // Computed in floats, as in the kubelet.
    let part = request.value() as f64 / memory as f64;
    Some((part * swap.capacity as f64) as i64) // as: saturates, and both factors are not negative
}
