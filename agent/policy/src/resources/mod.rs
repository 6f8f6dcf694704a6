//! A pod's demand on its node: requests and limits summed by the rules of Kubernetes.
//!
//! Containers add up; a restartable init container (sidecar) adds to them and to every init container after
//! it; a plain init container counts only if it needs more than all that (KEP-753). Pod-level cpu, memory and
//! hugepages replace the sum (KEP-2837); overhead comes on top. Follows `k8s.io/component-helpers/resource`.
//! Must never apply API defaults: a pod counts as it is.

pub mod cgroups;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod critical;
pub mod huge_pages;
pub mod qos;
pub mod resize_order;
#[cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
pub mod user_namespaces;

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Container, Pod, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity as ApiQuantity,
};

use beelet_units::{field::FieldError, quantity::Quantity};

/// The resource name of processor time.
pub const CPU: &str = "cpu";
/// The resource name of memory.
pub const MEMORY: &str = "memory";
/// The resource name of the node's local scratch space.
pub const EPHEMERAL_STORAGE: &str = "ephemeral-storage";
/// The resource name of the number of pods on a node.
pub const PODS: &str = "pods";

/// Amounts by resource name, sorted by name. Kubernetes distinguishes a missing resource from an amount of
/// zero. A pod may name a huge number of resources: no operation takes longer than a search for each name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResourceList<'a> {
    entries: BTreeMap<&'a str, Quantity>,
}

impl<'a> ResourceList<'a> {
    /// Reads the API's map; an absent map is an empty list.
    ///
    /// # Errors
    /// The path of the first amount that is not a quantity (`cpu`, `nvidia.com/gpu`).
    pub fn read(map: Option<&'a BTreeMap<String, ApiQuantity>>) -> Result<Self, FieldError> {
        let read = |(name, text): (&'a String, &ApiQuantity)| match Quantity::try_from(text) {
            Ok(quantity) => Ok((name.as_str(), quantity)),
            Err(error) => Err(FieldError::new(name, error.to_string())),
        };
        Ok(Self { entries: map.into_iter().flatten().map(read).collect::<Result<_, _>>()? })
    }

    /// Returns the amount of a resource, if the list has it.
    pub fn get(&self, name: &str) -> Option<Quantity> {
        self.entries.get(name).copied()
    }

    /// Returns the amount of a resource, or zero if the list lacks it.
    pub fn amount(&self, name: &str) -> Quantity {
        self.get(name).unwrap_or_default()
    }

    /// Returns every resource in the list, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, Quantity)> {
        self.entries.iter().map(|(name, quantity)| (*name, *quantity))
    }

    /// Returns true if the list has no resource at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Sets one amount.
    pub fn set(&mut self, name: &'a str, quantity: Quantity) {
        self.entries.insert(name, quantity);
    }

    /// Adds every amount of another list.
    pub fn add(&mut self, other: &Self) {
        for (name, quantity) in other.iter() {
            let sum = self.entries.entry(name).or_default();
            *sum = *sum + quantity;
        }
    }

    /// Raises every amount to that of another list if that is higher.
    pub(crate) fn raise_to(&mut self, other: &Self) {
        other.iter().for_each(|(name, quantity)| self.raise(name, quantity));
    }

    fn raise(&mut self, name: &'a str, quantity: Quantity) {
        let highest = self.entries.entry(name).or_insert(quantity);
        *highest = quantity.max(*highest);
    }
}

/// The requests and limits of one container, or of a pod as a whole.
#[derive(Debug, Clone, Default)]
pub struct Demand<'a> {
    /// Reserved amounts.
    pub requests: ResourceList<'a>,
    /// Maximum amounts.
    pub limits: ResourceList<'a>,
}

impl<'a> Demand<'a> {
    /// Reads the `resources` field of a container or of a pod's spec; an absent one is empty.
    ///
    /// # Errors
    /// The path (`requests.cpu`) of the first amount that is not a quantity.
    pub(crate) fn read(resources: Option<&'a ResourceRequirements>) -> Result<Self, FieldError> {
        let Some(resources) = resources else { return Ok(Self::default()) };
        Ok(Self {
            requests: ResourceList::read(resources.requests.as_ref()).map_err(|e| e.under("requests"))?,
            limits: ResourceList::read(resources.limits.as_ref()).map_err(|e| e.under("limits"))?,
        })
    }
}

/// An init container's demand.
#[derive(Debug, Clone)]
pub struct InitDemand<'a> {
    /// The init container's own requests and limits.
    pub demand: Demand<'a>,
    /// True for a sidecar: it keeps running with everything after it.
    pub restartable: bool,
}

/// Every amount that a pod's spec names, read once; all sums derive from it.
#[derive(Debug, Clone)]
pub struct PodDemand<'a> {
    /// The containers, in the spec's order.
    pub containers: Vec<Demand<'a>>,
    /// The init containers, in the spec's order.
    pub init_containers: Vec<InitDemand<'a>>,
    /// Pod-level resources (`spec.resources`); `None` if the field is absent.
    pub pod_level: Option<Demand<'a>>,
    /// Cost of running the pod in addition to its containers; `None` if the field is absent.
    pub overhead: Option<ResourceList<'a>>,
}

impl<'a> PodDemand<'a> {
    /// Reads every amount of a pod.
    ///
    /// # Errors
    /// The path (`spec.containers[0].resources.requests.cpu`) of the first amount that is not a quantity.
    pub fn read(pod: &'a Pod) -> Result<Self, FieldError> {
        let Some(spec) = &pod.spec else {
            return Ok(Self {
                containers: Vec::new(),
                init_containers: Vec::new(),
                pod_level: None,
                overhead: None,
            });
        };
        let read = |kind: &str, index: usize, container: &'a Container| {
            Demand::read(container.resources.as_ref())
                .map_err(|e| e.under(&format!("spec.{kind}[{index}].resources")))
        };
        let containers = spec
            .containers
            .iter()
            .enumerate()
            .map(|(i, c)| read("containers", i, c))
            .collect::<Result<_, _>>()?;
        let init_containers = spec
            .init_containers
            .iter()
            .flatten()
            .enumerate()
            .map(|(i, c)| {
                Ok(InitDemand { demand: read("initContainers", i, c)?, restartable: is_restartable(c) })
            })
            .collect::<Result<_, _>>()?;
        let pod_level = match &spec.resources {
            Some(resources) => Some(Demand::read(Some(resources)).map_err(|e| e.under("spec.resources"))?),
            None => None,
        };
        let overhead = match &spec.overhead {
            Some(overhead) => Some(ResourceList::read(Some(overhead)).map_err(|e| e.under("spec.overhead"))?),
            None => None,
        };
        Ok(Self { containers, init_containers, pod_level, overhead })
    }

    /// Returns the pod's requests: containers, sidecars and init containers, pod-level resources, overhead.
    pub fn requests(&self) -> ResourceList<'a> {
        let mut total = self.container_requests();
        if let Some(pod_level) = &self.pod_level {
            replace_supported(&mut total, &pod_level.requests);
        }
        if let Some(overhead) = &self.overhead {
            total.add(overhead);
        }
        total
    }

    /// Returns the pod's limits: as [`Self::requests`], but adds overhead only to existing limits above zero.
    pub fn limits(&self) -> ResourceList<'a> {
        let mut total = self.aggregate(|demand| &demand.limits);
        if let Some(pod_level) = &self.pod_level {
            replace_supported(&mut total, &pod_level.limits);
        }
        for (name, cost) in self.overhead.iter().flat_map(ResourceList::iter) {
            if let Some(limit) = total.get(name).filter(|limit| !limit.is_zero()) {
                total.set(name, limit + cost);
            }
        }
        total
    }

    /// Returns the sum of the containers' requests alone, without pod-level resources and overhead.
    pub fn container_requests(&self) -> ResourceList<'a> {
        self.aggregate(|demand| &demand.requests)
    }

    /// Returns the request of one resource as preemption and eviction count it
    /// (`GetResourceRequestQuantity`): pod-level requests alone if pod-level resources are set, and overhead
    /// only if the request is not zero.
    pub(crate) fn counted_request(&self, name: &str) -> Quantity {
        let pod_level = self.pod_level.as_ref().filter(|_| self.has_pod_level());
        let request = match pod_level {
            Some(pod_level) if is_pod_level_resource(name) => pod_level.requests.amount(name),
            Some(_) => Quantity::ZERO,
            None => self.container_request(name),
        };
        match &self.overhead {
            Some(overhead) if !request.is_zero() => request + overhead.amount(name),
            _ => request,
        }
    }

    /// Returns true if pod-level resources are in force: the spec names a resource that can be set for a pod.
    pub(crate) fn has_pod_level(&self) -> bool {
        let names_one = |list: &ResourceList<'_>| list.iter().any(|(name, _)| is_pod_level_resource(name));
        self.pod_level.as_ref().is_some_and(|pod| names_one(&pod.requests) || names_one(&pod.limits))
    }

    /// Returns one resource of [`Self::container_requests`], without building the list.
    fn container_request(&self, name: &str) -> Quantity {
        let mut total: Quantity = self.containers.iter().map(|c| c.requests.amount(name)).sum();
        let (mut sidecars, mut highest) = (Quantity::ZERO, Quantity::ZERO);
        for init in &self.init_containers {
            let own = init.demand.requests.amount(name);
            if init.restartable {
                total = total + own;
                sidecars = sidecars + own;
            }
            highest = highest.max(if init.restartable { sidecars } else { sidecars + own });
        }
        total.max(highest)
    }

    /// Returns the sum of one kind of list. Visits each amount of the pod once: `highest` is never below
    /// `sidecars`, so that an init container raises only the names of its own list.
    fn aggregate(&self, of: impl for<'d> Fn(&'d Demand<'a>) -> &'d ResourceList<'a>) -> ResourceList<'a> {
        let mut total = ResourceList::default();
        self.containers.iter().for_each(|container| total.add(of(container)));
        let (mut sidecars, mut highest) = (ResourceList::default(), ResourceList::default());
        for init in &self.init_containers {
            let own = of(&init.demand);
            if init.restartable {
                total.add(own);
                sidecars.add(own);
            }
            for (name, amount) in own.iter() {
                let beside = sidecars.amount(name);
                highest.raise(name, if init.restartable { beside } else { amount + beside });
            }
        }
        total.raise_to(&highest);
        total
    }
}

fn replace_supported<'a>(total: &mut ResourceList<'a>, pod_level: &ResourceList<'a>) {
    pod_level
        .iter()
        .filter(|(name, _)| is_pod_level_resource(name))
        .for_each(|(name, quantity)| total.set(name, quantity));
}

/// Returns true for the resources that `spec.resources` of a pod may name: cpu, memory and hugepages.
pub fn is_pod_level_resource(name: &str) -> bool {
    name == CPU || name == MEMORY || name.starts_with("hugepages-")
}

/// Returns true for an init container that keeps running (a sidecar).
pub(crate) fn is_restartable(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// Returns a pod's requests; see [`PodDemand::requests`].
///
/// # Errors
/// The path of the first amount in the pod that is not a quantity.
pub fn pod_requests(pod: &Pod) -> Result<ResourceList<'_>, FieldError> {
    Ok(PodDemand::read(pod)?.requests())
}

/// Returns a pod's limits; see [`PodDemand::limits`].
///
/// # Errors
/// The path of the first amount in the pod that is not a quantity.
pub fn pod_limits(pod: &Pod) -> Result<ResourceList<'_>, FieldError> {
    Ok(PodDemand::read(pod)?.limits())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(spec: &Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
    }

    fn requests(cpu: &str) -> Value {
        json!({"requests": {"cpu": cpu}, "limits": {"cpu": cpu}})
    }

    fn check(spec: &Value, request: i64, limit: i64) {
        let pod = pod(spec);
        assert_eq!(pod_requests(&pod).unwrap().amount(CPU).milli_value(), request);
        assert_eq!(pod_limits(&pod).unwrap().amount(CPU).milli_value(), limit);
    }

    #[test]
    fn containers_add_up_and_init_containers_count_by_the_largest() {
        check(
            &json!({"containers": [{"name": "a", "resources": requests("1")}, {"name": "b", "resources": requests("250m")}]}),
            1250,
            1250,
        );
        check(
            &json!({"containers": [{"name": "a", "resources": requests("1")}], "initContainers": [{"name": "i", "resources": requests("3")}]}),
            3000,
            3000,
        );
    }

    #[test]
    fn a_sidecar_counts_together_with_everything_after_it() {
        let sidecar = json!({"name": "s", "restartPolicy": "Always", "resources": requests("1")});
        let init = json!({"name": "i", "resources": requests("3")});
        let main = json!([{"name": "a", "resources": requests("1")}]);
        check(&json!({"containers": main, "initContainers": [sidecar]}), 2000, 2000);
        check(&json!({"containers": main, "initContainers": [sidecar, init]}), 4000, 4000);
        check(&json!({"containers": main, "initContainers": [init, sidecar]}), 3000, 3000);
    }

    #[test]
    fn pod_level_resources_replace_the_sum_and_overhead_comes_on_top() {
        let main = json!([{"name": "a", "resources": requests("1")}]);
        check(
            &json!({"containers": main, "resources": {"requests": {"cpu": "5"}}, "overhead": {"cpu": "100m"}}),
            5100,
            1100,
        );
        check(&json!({"containers": main, "resources": {"limits": {"cpu": "5"}}}), 1000, 5000);
        check(&json!({"containers": [{"name": "a"}], "overhead": {"cpu": "100m"}}), 100, 0);
    }

    #[test]
    fn the_counted_request_has_overhead_only_on_a_request_and_pod_level_alone() {
        let counted = |spec: &Value, name: &str| {
            PodDemand::read(&pod(spec)).unwrap().counted_request(name).milli_value()
        };
        let main = json!([{"name": "a", "resources": {"requests": {"cpu": "1", "example.com/x": "2"}}}]);
        assert_eq!(
            counted(&json!({"containers": main, "overhead": {"cpu": "100m", "memory": "1"}}), CPU),
            1100
        );
        assert_eq!(
            counted(&json!({"containers": main, "overhead": {"cpu": "100m", "memory": "1"}}), MEMORY),
            0
        );
        assert_eq!(counted(&json!({"containers": main, "resources": {"requests": {"memory": "1"}}}), CPU), 0);
        assert_eq!(
            counted(
                &json!({"containers": main, "resources": {"requests": {"memory": "1"}}}),
                "example.com/x"
            ),
            0
        );
        assert_eq!(counted(&json!({"containers": main, "resources": {}}), "example.com/x"), 2000);
    }

    #[test]
    fn a_bad_amount_is_named_by_its_path() {
        let bad = |resources: &Value| {
            let pod = pod(
                &json!({"containers": [{"name": "a"}], "initContainers": [{"name": "i", "resources": resources}]}),
            );
            pod_requests(&pod).unwrap_err().to_string()
        };
        assert_eq!(
            bad(&json!({"requests": {"cpu": "abc"}})),
            r#"spec.initContainers[0].resources.requests.cpu: "abc" is not a quantity (use e.g. 250m, 1.5 or 512Mi)"#
        );
        assert!(
            bad(&json!({"limits": {"nvidia.com/gpu": "x"}}))
                .starts_with("spec.initContainers[0].resources.limits.nvidia.com/gpu: ")
        );
    }

    #[test]
    fn the_request_of_one_resource_agrees_with_the_whole_list() {
        let spec = json!({
            "containers": [{"name": "a", "resources": requests("1")}],
            "initContainers": [
                {"name": "s", "restartPolicy": "Always", "resources": requests("1")},
                {"name": "i", "resources": requests("3")},
                {"name": "t", "restartPolicy": "Always", "resources": requests("500m")}]});
        let pod = pod(&spec);
        let demand = PodDemand::read(&pod).unwrap();
        assert_eq!(demand.container_request(CPU), demand.container_requests().amount(CPU));
    }

    /// Returns a list of this many resources, one unit of each.
    fn many(names: usize) -> BTreeMap<String, ApiQuantity> {
        (0..names).map(|n| (format!("example.com/r{n:07}"), ApiQuantity("1".to_owned()))).collect()
    }

    #[test]
    fn lists_of_very_many_resources_are_added_raised_and_searched() {
        // A scan for each name would visit 20 thousand million names.
        let count = 200_000;
        let (names, mut sum) = (many(count), ResourceList::default());
        let list = ResourceList::read(Some(&names)).unwrap();
        sum.add(&list);
        sum.add(&list);
        sum.raise_to(&list);
        names.keys().rev().for_each(|name| sum.set(name, sum.amount(name) + Quantity::from_units(1)));
        assert_eq!(sum.iter().count(), count);
        assert!(sum.iter().all(|(_, amount)| amount == Quantity::from_units(3)));
    }

    #[test]
    fn each_of_very_many_init_containers_costs_its_own_amounts_alone() {
        // A sum over all names for each init container would visit over a thousand million names.
        let names = many(50_000);
        let sidecar = Demand { requests: ResourceList::read(Some(&names)).unwrap(), ..Demand::default() };
        let sidecar = InitDemand { demand: sidecar, restartable: true };
        let mut init_containers = vec![sidecar];
        let empty = |restartable| InitDemand { demand: Demand::default(), restartable };
        init_containers.extend((0..20_000).map(|n| empty(n % 2 == 0)));
        let pod = PodDemand { containers: Vec::new(), init_containers, pod_level: None, overhead: None };
        assert_eq!(pod.requests().iter().count(), names.len());
        assert!(pod.requests().iter().all(|(_, amount)| amount == Quantity::from_units(1)));
    }

    #[test]
    fn an_init_container_counts_with_the_sidecars_before_it_name_by_name() {
        let container = |name: &str, restart: Option<&str>, amounts: Value| json!({"name": name, "restartPolicy": restart, "resources": {"requests": amounts}});
        let spec = json!({"containers": [container("main", None, json!({"example.com/a": "1"}))], "initContainers": [
            container("first", None, json!({"example.com/a": "9", "example.com/z": "0"})),
            container("sidecar", Some("Always"), json!({"example.com/a": "2", "example.com/b": "3"})),
            container("second", None, json!({"example.com/b": "4", "example.com/c": "5"})),
        ]});
        let pod = pod(&spec);
        let found: Vec<String> =
            pod_requests(&pod).unwrap().iter().map(|(name, amount)| format!("{name}={amount}")).collect();
        assert_eq!(found, ["example.com/a=9", "example.com/b=7", "example.com/c=5", "example.com/z=0"]);
    }
}
