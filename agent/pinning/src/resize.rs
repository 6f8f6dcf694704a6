//! In-place resizes of pods whose amounts are pinned.

use beelet_policy::{
    pinning::{Needs, resize::ResizeRefusal},
    resources::{CPU, MEMORY, PodDemand},
};
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1::Pod;

use super::Pinning;

/// The kubelet's label and message of a CPU manager that does not allow a resize.
const OF_CPUS: (&str, &str) = (
    "guaranteed_pod_cpu_manager_static_policy",
    "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\"",
);
/// The same of the memory manager.
const OF_MEMORY: (&str, &str) = (
    "guaranteed_pod_memory_manager_static_policy",
    "Resize is infeasible for Guaranteed Pods alongside Memory Manager policy \"Static\"",
);

/// Refusal of a resize.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoResize<E> {
    /// Impossible while the pod runs.
    Never {
        /// The kubelet's label of the cause.
        detail: &'static str,
        /// Cause.
        message: String,
    },
    /// Impossible at present.
    Later(String),
    /// Refused by the other side.
    Other(E),
}

impl Pinning {
    /// Gives a running pod the CPUs that `pod` requests instead of `before`, if `admit` agrees. Both happen,
    /// or neither. Containers that run are updated later.
    ///
    /// # Errors
    /// The pod keeps its CPUs.
    pub fn resize<E>(
        &self,
        pod: &Pod,
        before: &Pod,
        admit: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), NoResize<E>> {
        let Some(desk) = &self.0 else { return admit().map_err(NoResize::Other) };
        let read = |pod| Needs::read(pod, desk.gates).ok().filter(|needs| needs.guaranteed);
        let Some((needs, old)) = read(pod).zip(read(before)) else {
            return admit().map_err(NoResize::Other);
        };
        if desk.free_inactive(&needs.uid) {
            desk.changed();
        }
        let changed = desk.with(|book| {
            let has_static = (!book.pins.cpus.allocatable().is_empty(), book.pins.memory.is_static());
            let changes = (differ(pod, before, CPU), differ(pod, before, MEMORY));
            let never = |(detail, message): (&'static str, &str)| {
                Err(NoResize::Never { detail, message: message.to_owned() })
            };
            if has_static.0 && changes.0 && !desk.gates.resize_exclusive_cpus {
                return never(OF_CPUS);
            }
            if has_static.1 && changes.1 {
                return never(OF_MEMORY);
            }
            let mut pins = book.pins.clone();
            match pins.resize(&needs, &old) {
                Ok(()) => {}
                Err(ResizeRefusal::Never(message)) => return never((OF_CPUS.0, &message)),
                Err(ResizeRefusal::Later(message)) => return Err(NoResize::Later(message)),
            }
            admit().map_err(NoResize::Other)?;
            let changed = pins.cpus.state() != book.pins.cpus.state();
            book.freed |= changed;
            book.pins = pins;
            Ok(changed)
        })?;
        if changed {
            desk.changed();
        }
        Ok(())
    }
}

/// Returns true if the amounts of a resource differ between two versions of a pod.
fn differ(pod: &Pod, before: &Pod, name: &str) -> bool {
    let amounts = |pod: &Pod| -> Option<Vec<(Quantity, Quantity)>> {
        let demand = PodDemand::read(pod).ok()?;
        let inits = demand.init_containers.iter().map(|init| &init.demand);
        let all = inits.chain(&demand.containers).chain(&demand.pod_level);
        Some(all.map(|one| (one.requests.amount(name), one.limits.amount(name))).collect())
    };
    amounts(pod) != amounts(before)
}
