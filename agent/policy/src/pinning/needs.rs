//! The exclusive CPUs and the memory that a pod requests, parsed once (`guaranteedCPUs`,
//! `getContainerRequestedResources` and their helpers).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};

use crate::resources::{
    CPU, Demand, MEMORY, PodDemand, ResourceList,
    huge_pages::PREFIX,
    is_restartable,
    qos::{QosClass, qos_class_of},
};
use beelet_units::{field::FieldError, quantity::Quantity};

use super::gates::Gates;

/// Bytes by resource: `memory`, `hugepages-2Mi`, …
pub type Bytes = BTreeMap<String, u64>;

/// The error for an amount of memory with a fraction of a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("[memorymanager] failed to represent quantity as int64")]
pub struct NotWhole;

/// The way in which a container shares time with later containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Ends before the next container starts.
    Init,
    /// Starts among the init containers, and keeps running.
    Sidecar,
    /// Runs with all others.
    App,
}

/// The needs of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerNeeds {
    /// Its name.
    pub name: String,
    /// The way in which the container shares time with others.
    pub kind: Kind,
    /// Number of exclusive CPUs; zero if the container runs in the shared pool.
    pub cpus: usize,
    /// Memory, for each resource that the container names.
    pub memory: Result<Bytes, NotWhole>,
}

/// The needs of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Identity of the pod in the state files.
    pub uid: String,
    /// True for a Guaranteed pod; only these pods get exclusive resources.
    pub guaranteed: bool,
    /// True if the pod has managed pod-level resources (KEP-5526).
    pub pod_level: bool,
    /// True if the pod has pod-level resources that are not managed: the pod gets no exclusive resources.
    pub ignored: bool,
    /// Exclusive CPUs of the pod as a whole (`podGuaranteedCPUs`).
    pub cpus: usize,
    /// Memory of the pod as a whole (`getPodRequestedResources`).
    pub memory: Result<Bytes, NotWhole>,
    /// Init containers and containers, in the spec's order.
    pub containers: Vec<ContainerNeeds>,
}

impl Needs {
    /// Parses a pod's needs.
    ///
    /// # Errors
    /// The path of the first amount in the pod that is not a quantity.
    pub fn read(pod: &Pod, gates: Gates) -> Result<Self, FieldError> {
        let mut demand = PodDemand::read(pod)?;
        let set = demand.has_pod_level();
        let pod_demand = demand.pod_level.clone();
        if !gates.pod_level_resources {
            demand.pod_level = None;
        }
        let guaranteed = qos_class_of(pod, &demand) == QosClass::Guaranteed;
        let pod_level = set && gates.pod_level_managers;
        let need = |container: &Container, kind: Kind, own: &Demand<'_>| {
            // In a pod with pod-level resources, a container must be Guaranteed by itself.
            let counts = !pod_level || is_guaranteed(own);
            ContainerNeeds {
                name: container.name.clone(),
                kind,
                cpus: if guaranteed && counts { whole_cpus(&own.requests) } else { 0 },
                memory: if counts { memory(&own.requests) } else { Ok(Bytes::new()) },
            }
        };
        let spec = pod.spec.as_ref();
        let inits = spec.into_iter().flat_map(|spec| spec.init_containers.iter().flatten());
        let inits = inits.zip(&demand.init_containers).map(|(container, init)| {
            let kind = if is_restartable(container) { Kind::Sidecar } else { Kind::Init };
            need(container, kind, &init.demand)
        });
        let apps = spec.into_iter().flat_map(|spec| &spec.containers).zip(&demand.containers);
        let apps = apps.map(|(container, own)| need(container, Kind::App, own));
        let containers: Vec<ContainerNeeds> = inits.chain(apps).collect();
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let uid = pod.metadata.uid.as_deref().filter(|uid| !uid.is_empty()).unwrap_or(name);
        let (cpus, memory) = match pod_demand.filter(|_| pod_level) {
            Some(own) => {
                let cpus = if guaranteed { whole_cpus(&own.requests) } else { 0 };
                let positive = |mut memory: Bytes| {
                    memory.retain(|_, size| *size > 0);
                    memory
                };
                (cpus, memory(&own.requests).map(positive))
            }
            None => (sum_of_cpus(&containers), sum_of_memory(&containers)),
        };
        let ignored = set && !(gates.pod_level_managers && gates.pod_level_resources);
        Ok(Self { uid: uid.to_owned(), guaranteed, pod_level, ignored, cpus, memory, containers })
    }

    /// Returns the init containers that have ended when this container starts: all of them for a container
    /// that is not an init container.
    pub fn ended_before<'a>(&'a self, container: &'a str) -> impl Iterator<Item = &'a ContainerNeeds> {
        let before = self.containers.iter().take_while(move |other| other.name != container);
        before.filter(|other| other.kind == Kind::Init)
    }
}

/// Returns true if requests equal limits for CPU and memory (`IsContainerEquivalentQOSGuaranteed`).
fn is_guaranteed(own: &Demand<'_>) -> bool {
    [CPU, MEMORY].iter().all(|name| {
        let request = own.requests.amount(name);
        !request.is_zero() && request == own.limits.amount(name)
    })
}

/// Returns the request for CPUs if it is a whole number, otherwise zero.
fn whole_cpus(requests: &ResourceList<'_>) -> usize {
    let cpus = requests.amount(CPU);
    let whole = cpus.value().checked_mul(1000) == Some(cpus.milli_value());
    if whole { usize::try_from(cpus.value()).unwrap_or(0) } else { 0 }
}

fn memory(requests: &ResourceList<'_>) -> Result<Bytes, NotWhole> {
    let kinds = requests.iter().filter(|(name, _)| *name == MEMORY || name.starts_with(PREFIX));
    kinds
        .map(|(name, amount)| match Quantity::from_units(amount.value()) == amount {
            true => Ok((name.to_owned(), u64::try_from(amount.value()).unwrap_or(0))),
            false => Err(NotWhole),
        })
        .collect()
}

/// Returns the maximum of all containers and sidecars together, and of each init container with the sidecars
/// before it.
fn sum_of_cpus(containers: &[ContainerNeeds]) -> usize {
    let (mut sidecars, mut apps, mut largest) = (0_usize, 0_usize, 0_usize);
    for container in containers {
        match container.kind {
            Kind::Init => largest = largest.max(sidecars.saturating_add(container.cpus)),
            Kind::Sidecar => sidecars = sidecars.saturating_add(container.cpus),
            Kind::App => apps = apps.saturating_add(container.cpus),
        }
    }
    largest.max(sidecars.saturating_add(apps))
}

/// Returns the same for each resource that a container names.
fn sum_of_memory(containers: &[ContainerNeeds]) -> Result<Bytes, NotWhole> {
    let (mut sidecars, mut apps, mut largest) = (Bytes::new(), Bytes::new(), Bytes::new());
    for container in containers {
        for (name, size) in container.memory.as_ref().map_err(|error| *error)? {
            let beside = sidecars.get(name).copied().unwrap_or(0);
            let together = beside.saturating_add(*size);
            match container.kind {
                Kind::Init => {
                    let largest = largest.entry(name.clone()).or_default();
                    *largest = (*largest).max(together);
                }
                Kind::Sidecar => drop(sidecars.insert(name.clone(), together)),
                Kind::App => {
                    let sum = apps.entry(name.clone()).or_default();
                    *sum = sum.saturating_add(*size);
                }
            }
        }
    }
    for (name, sum) in &mut apps {
        let of = |list: &Bytes| list.get(name).copied().unwrap_or(0);
        *sum = sum.saturating_add(of(&sidecars)).max(of(&largest));
    }
    Ok(apps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn both(cpu: &str, memory: &str) -> Value {
        json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
    }

    fn needs(spec: &Value) -> Needs {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap();
        let gates = Gates { pod_level_managers: true, ..Gates::default() };
        Needs::read(&pod, gates).unwrap()
    }

    #[test]
    fn pinning_needs_are_whole_cpus_of_guaranteed_pods() {
        let check = |cpu: &str, expected: usize| {
            let needs = needs(&json!({"containers": [{"name": "c", "resources": both(cpu, "1Gi")}]}));
            assert_eq!(needs.cpus, expected, "{cpu}");
        };
        check("2", 2);
        check("2000m", 2);
        check("1500m", 0);
        check("0.9999", 1); // both accessors of the kubelet round up
        check("9223372036854775807", 0);
        let burstable =
            needs(&json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}]}));
        assert_eq!((burstable.cpus, burstable.guaranteed), (0, false));
    }

    #[test]
    fn pinning_needs_count_sidecars_with_everything_after_them() {
        let needs = needs(&json!({
            "initContainers": [
                {"name": "a", "resources": both("4", "1Gi")},
                {"name": "s", "resources": both("1", "1Gi"), "restartPolicy": "Always"},
                {"name": "b", "resources": both("4", "3Gi")},
            ],
            "containers": [{"name": "c", "resources": both("2", "1Gi")}],
        }));
        assert_eq!(needs.cpus, 5);
        assert_eq!(needs.memory.as_ref().unwrap()[MEMORY], 4 << 30);
        let ended =
            |name: &'static str| needs.ended_before(name).map(|c| c.name.as_str()).collect::<Vec<_>>();
        assert_eq!((ended("a"), ended("b"), ended("c")), (vec![], vec!["a"], vec!["a", "b"]));
    }

    #[test]
    fn pinning_needs_of_a_pod_level_pod_are_the_pods_own() {
        let needs = needs(&json!({
            "resources": both("4", "4Gi"),
            "containers": [{"name": "c", "resources": both("1", "1Gi")}, {"name": "d"},
                {"name": "e", "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}}],
        }));
        assert!(needs.pod_level && !needs.ignored && needs.guaranteed);
        assert_eq!(needs.cpus, 4);
        assert_eq!(needs.containers.iter().map(|c| c.cpus).collect::<Vec<_>>(), [1, 0, 0]);
    }

    #[test]
    fn pinning_memory_must_be_whole_bytes() {
        let needs = needs(&json!({"containers": [{"name": "c", "resources": both("1", "0.1Gi")}]}));
        assert_eq!(needs.memory, Err(NotWhole));
    }
}
