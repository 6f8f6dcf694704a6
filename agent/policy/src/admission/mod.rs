//! Admission of pods by resource requests, and the victims that make room for a critical pod.
//!
//! A pod is checked against the requests of the admitted pods, as in the kubelet's admission
//! (`pkg/kubelet/lifecycle/predicate.go` with the scheduler's `noderesources.Fits` and `nodeports.Fits`):
//! pods, cpu, memory, ephemeral-storage, hugepages and extended resources. An extended resource that the node
//! lacks altogether is ignored in containers: something outside the node provides it. Must never consider
//! usage, only requests.

mod outline;
#[allow(clippy::arithmetic_side_effects)] // counts and indices of its own search, not numbers from outside
pub mod preemption;

use std::{
    borrow::Borrow,
    collections::{BTreeMap, BTreeSet},
};

use k8s_openapi::api::core::v1::{Container, Pod};

use crate::{
    admission::preemption::{Policy, Preemption, Requirement, in_unit_of, preempt},
    resources::{
        CPU, EPHEMERAL_STORAGE, MEMORY, PODS, PodDemand, ResourceList, critical::is_critical, is_restartable,
    },
};
use beelet_units::field::FieldError;

pub use self::outline::outline;

/// A resource that the node lacks enough of. Millicores for cpu, bytes or counts for the rest.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Insufficient {
    /// The resource's name.
    pub resource: String,
    /// Amount that the pod requests.
    pub requested: i64,
    /// Sum of the admitted pods' requests.
    pub used: i64,
    /// Amount that the node has for pods; for extended resources at least `used`.
    pub capacity: i64,
}

impl Insufficient {
    /// The amount that would have to be freed.
    pub fn missing(&self) -> i64 {
        self.requested.saturating_sub(self.capacity.saturating_sub(self.used))
    }
}

/// A reason against a pod other than a lack of resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The pod is for another operating system.
    Os,
    /// Another pod uses a host port that the pod requests.
    Ports,
    /// The pod is critical, but no set of victims frees enough.
    NoVictims,
}

/// The decision about one pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Admission {
    /// The pod may run once the victims have terminated.
    pub admitted: bool,
    /// Resources that the node lacks: the reason for a refusal or for the victims.
    pub reasons: Vec<Insufficient>,
    /// Indices into the list of admitted pods, in eviction order.
    pub victims: Vec<usize>,
    /// Refusal for a reason other than resources, or preemption's failure to find victims.
    pub error: Option<String>,
    /// Kind of `error`.
    pub refusal: Option<Refusal>,
    /// Explanations for users.
    pub why: Vec<String>,
}

/// Decides whether `pod` may run in addition to `pods` on a node that has `allocatable` for pods.
///
/// # Errors
/// The path (`pod.spec.…`, `pods[3].spec.…`) of the first amount that is not a quantity.
pub fn admit<P: Borrow<Pod>>(
    pod: &Pod,
    pods: &[P],
    allocatable: &ResourceList<'_>,
    policy: Policy,
) -> Result<Admission, FieldError> {
    let demand = PodDemand::read(pod).map_err(|error| error.under("pod"))?;
    let used = Used::by(pods)?;
    let reasons = used.insufficient(&demand, allocatable);
    let (refusal, sentence) = foreign_os(pod)
        .map(|sentence| (Refusal::Os, sentence))
        .or_else(|| Some((Refusal::Ports, used.port_in_use(pod)?)))
        .unzip();
    if reasons.is_empty() && refusal.is_none() {
        return Ok(Admission { admitted: true, ..Admission::default() });
    }
    // Preemption frees only resources: a pod with any other conflict must not cost victims.
    if refusal.is_some() || !is_critical(pod) {
        return Ok(Admission { reasons, error: sentence, refusal, ..Admission::default() });
    }
    let missing: Vec<Requirement> = reasons
        .iter()
        .map(|reason| Requirement { resource: reason.resource.clone(), amount: reason.missing() })
        .collect();
    let Preemption { victims, error, why } =
        preempt(pod, pods, &missing, policy).map_err(|error| error.under("pods"))?;
    let refusal = error.is_some().then_some(Refusal::NoVictims);
    Ok(Admission { admitted: error.is_none(), reasons, victims, error, refusal, why })
}

/// Amounts that the admitted pods use.
struct Used {
    pods: i64,
    /// Each pod's request rounded up, then summed, as the scheduler does.
    requests: BTreeMap<String, i64>,
    ports: Vec<(HostPort, String)>,
}

impl Used {
    fn by<P: Borrow<Pod>>(pods: &[P]) -> Result<Self, FieldError> {
        let mut used = Self {
            pods: i64::try_from(pods.len()).unwrap_or(i64::MAX),
            requests: BTreeMap::new(),
            ports: Vec::new(),
        };
        for (index, pod) in pods.iter().enumerate() {
            let pod = pod.borrow();
            let demand = PodDemand::read(pod).map_err(|error| error.under(&format!("pods[{index}]")))?;
            for (resource, quantity) in demand.requests().iter() {
                let amount = in_unit_of(resource, quantity);
                match used.requests.get_mut(resource) {
                    Some(sum) => *sum = sum.saturating_add(amount),
                    None => drop(used.requests.insert(resource.to_owned(), amount)),
                }
            }
            used.ports.extend(host_ports(pod).map(|port| (port, name_of(pod))));
        }
        Ok(used)
    }

    /// Returns every resource that the node lacks: pods, cpu, memory, ephemeral-storage, then the others by
    /// name.
    fn insufficient(&self, demand: &PodDemand<'_>, allocatable: &ResourceList<'_>) -> Vec<Insufficient> {
        let mut reasons = Vec::new();
        let pods = in_unit_of(PODS, allocatable.amount(PODS));
        if self.pods.saturating_add(1) > pods {
            reasons.push(Insufficient {
                resource: PODS.to_owned(),
                requested: 1,
                used: self.pods,
                capacity: pods,
            });
        }
        let requests = self.requests_of(demand, allocatable);
        let first = [CPU, MEMORY, EPHEMERAL_STORAGE];
        let others = requests.keys().copied().filter(|name| !first.contains(name) && is_scalar(name));
        for resource in first.into_iter().chain(others) {
            let requested = requests.get(resource).copied().unwrap_or(0);
            let used = self.requests.get(resource).copied().unwrap_or(0);
            let available = in_unit_of(resource, allocatable.amount(resource));
            // Pods keep the extended resources that a plugin no longer offers.
            let capacity = if is_extended(resource) { available.max(used) } else { available };
            if requested > 0 && requested > capacity.saturating_sub(used) {
                reasons.push(Insufficient { resource: resource.to_owned(), requested, used, capacity });
            }
        }
        reasons
    }

    /// Returns the pod's requests without its containers' extended resources that this node does not know.
    fn requests_of<'d>(
        &self,
        demand: &PodDemand<'d>,
        allocatable: &ResourceList<'_>,
    ) -> BTreeMap<&'d str, i64> {
        let known = |name: &str| {
            !is_extended(name)
                || allocatable.get(name).is_some()
                || self.requests.get(name).is_some_and(|sum| *sum > 0)
        };
        let overhead: BTreeSet<&str> =
            demand.overhead.iter().flat_map(ResourceList::iter).map(|(name, _)| name).collect();
        let amount = |(name, quantity)| match known(name) || overhead.contains(name) {
            // Only the pod's overhead can name an unknown resource here, and the overhead counts.
            true if !known(name) => (
                name,
                in_unit_of(name, demand.overhead.as_ref().map(|list| list.amount(name)).unwrap_or_default()),
            ),
            true => (name, in_unit_of(name, quantity)),
            false => (name, 0),
        };
        demand.requests().iter().map(amount).collect()
    }

    fn port_in_use(&self, pod: &Pod) -> Option<String> {
        let conflict = |port: HostPort| {
            let (_, holder) = self.ports.iter().find(|(other, _)| port.conflicts_with(other))?;
            Some(format!("host port {}/{} is in use by {holder}", port.port, port.protocol))
        };
        host_ports(pod).find_map(conflict)
    }
}

/// Returns a message if the pod is for another operating system: the kubelet of a Linux node rejects such
/// pods.
fn foreign_os(pod: &Pod) -> Option<String> {
    let os = pod.spec.as_ref()?.os.as_ref()?;
    (os.name != "linux").then(|| format!("the pod is for {}, and this node runs linux", os.name))
}

/// A host port that a pod claims.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostPort {
    address: String,
    protocol: String,
    port: i32,
}

impl HostPort {
    fn conflicts_with(&self, other: &Self) -> bool {
        let any = |address: &str| address == "0.0.0.0";
        let same_address = self.address == other.address || any(&self.address) || any(&other.address);
        self.port == other.port && self.protocol == other.protocol && same_address
    }
}

fn host_ports(pod: &Pod) -> impl Iterator<Item = HostPort> {
    let spec = pod.spec.iter();
    let containers = spec.flat_map(|spec| {
        let sidecars = spec.init_containers.iter().flatten().filter(|container| is_restartable(container));
        spec.containers.iter().chain(sidecars)
    });
    containers.flat_map(|container: &Container| container.ports.iter().flatten()).filter_map(|port| {
        let or = |value: &Option<String>, default: &str| match value.as_deref() {
            None | Some("") => default.to_owned(),
            Some(value) => value.to_owned(),
        };
        let claimed = port.host_port.filter(|port| *port > 0)?;
        Some(HostPort {
            address: or(&port.host_ip, "0.0.0.0"),
            protocol: or(&port.protocol, "TCP"),
            port: claimed,
        })
    })
}

fn name_of(pod: &Pod) -> String {
    let meta = &pod.metadata;
    format!("{}/{}", meta.namespace.as_deref().unwrap_or("default"), meta.name.as_deref().unwrap_or_default())
}

/// Returns true for a resource outside the kubernetes.io domain (`v1helper.IsExtendedResourceName`).
fn is_extended(name: &str) -> bool {
    name.split_once('/').is_some_and(|_| !name.contains("kubernetes.io/") && !name.starts_with("requests."))
}

/// Returns true for resources other than cpu, memory and ephemeral storage
/// (`schedutil.IsScalarResourceName`).
fn is_scalar(name: &str) -> bool {
    is_extended(name)
        || name.starts_with("hugepages-")
        || name.contains("kubernetes.io/")
        || name.starts_with("attachable-volumes-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_units::quantity::Quantity;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn pod(name: &str, spec: &Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
    }

    fn with_requests(name: &str, requests: &Value) -> Pod {
        pod(name, &json!({"containers": [{"name": "c", "resources": {"requests": requests}}]}))
    }

    fn critical(requests: &Value) -> Pod {
        pod(
            "critical",
            &json!({"priority": 2_000_000_000, "containers": [{"name": "c", "resources": {"requests": requests}}]}),
        )
    }

    fn node<'a>(amounts: &[(&'a str, &str)]) -> ResourceList<'a> {
        let mut list = ResourceList::default();
        amounts.iter().for_each(|(name, text)| list.set(name, Quantity::parse(text).unwrap()));
        list
    }

    const NODE: [(&str, &str); 4] =
        [("cpu", "2"), ("memory", "1Gi"), ("pods", "3"), ("example.com/gpu", "1")];

    /// Expects reasons as `resource requested used capacity`.
    fn check(pod: &Pod, pods: &[Pod], reasons: &[&str]) -> Admission {
        let admission = admit(pod, pods, &node(&NODE), Policy::Kubelet).unwrap();
        let got: Vec<String> = admission
            .reasons
            .iter()
            .map(|reason| {
                format!("{} {} {} {}", reason.resource, reason.requested, reason.used, reason.capacity)
            })
            .collect();
        assert_eq!(got, reasons);
        admission
    }

    #[test]
    fn a_pod_fits_by_requests() {
        let half = with_requests("half", &json!({"cpu": "1", "memory": "512Mi"}));
        assert!(check(&half, &[], &[]).admitted);
        assert!(check(&half, std::slice::from_ref(&half), &[]).admitted);
        let refused = check(
            &half,
            &[half.clone(), half.clone()],
            &["cpu 1000 2000 2000", "memory 536870912 1073741824 1073741824"],
        );
        assert!(!refused.admitted && refused.victims.is_empty() && refused.error.is_none());
        let nothing = with_requests("nothing", &json!({}));
        assert!(!check(&nothing, &[half.clone(), half.clone(), half.clone()], &["pods 1 3 3"]).admitted);
        assert!(check(&nothing, &[half.clone(), half], &[]).admitted);
    }

    #[test]
    fn extended_resources_count_where_the_node_has_them() {
        let one = with_requests("one", &json!({"example.com/gpu": "1"}));
        assert!(check(&one, &[], &[]).admitted);
        check(&one, std::slice::from_ref(&one), &["example.com/gpu 1 1 1"]);
        assert!(check(&with_requests("else", &json!({"example.com/tpu": "5"})), &[], &[]).admitted);
        check(&with_requests("huge", &json!({"hugepages-2Mi": "2Mi"})), &[], &["hugepages-2Mi 2097152 0 0"]);
        let two = with_requests("two", &json!({"example.com/gpu": "2"}));
        check(&one, &[two], &["example.com/gpu 1 2 2"]);
    }

    #[test]
    fn a_critical_pod_preempts_for_resources_only() {
        let small = |name: &str| with_requests(name, &json!({"cpu": "1"}));
        let admission =
            check(&critical(&json!({"cpu": "1"})), &[small("a"), small("b")], &["cpu 1000 2000 2000"]);
        assert!(admission.admitted);
        assert_eq!(admission.victims, [1]);
        let port = json!([{"containerPort": 1, "hostPort": 80}]);
        let holder = pod(
            "holder",
            &json!({"containers": [{"name": "c", "ports": port, "resources": {"requests": {"cpu": "2"}}}]}),
        );
        let claimer = pod(
            "claimer",
            &json!({"priority": 2_000_000_000, "containers": [{"name": "c", "ports": port, "resources": {"requests": {"cpu": "1"}}}]}),
        );
        let admission = check(&claimer, &[holder], &["cpu 1000 2000 2000"]);
        assert_eq!(admission.error.as_deref(), Some("host port 80/TCP is in use by default/holder"));
        assert!(!admission.admitted && admission.victims.is_empty());
    }

    #[test]
    fn a_critical_pod_without_victims_is_refused_with_the_reason() {
        let admission = check(&critical(&json!({"cpu": "3"})), &[], &["cpu 3000 0 2000"]);
        assert!(
            !admission.admitted && admission.error.unwrap().contains("1000 of cpu would still be missing")
        );
    }

    #[test]
    fn ports_conflict_by_address_and_protocol() {
        let claim =
            |name: &str, port: &Value| pod(name, &json!({"containers": [{"name": "c", "ports": [port]}]}));
        let conflict = |a: &Value, b: &Value| {
            admit(&claim("a", a), &[claim("b", b)], &node(&NODE), Policy::Kubelet).unwrap().error.is_some()
        };
        let any = json!({"containerPort": 1, "hostPort": 80});
        let one = json!({"containerPort": 1, "hostPort": 80, "hostIP": "10.0.0.1"});
        let two = json!({"containerPort": 1, "hostPort": 80, "hostIP": "10.0.0.2"});
        let udp = json!({"containerPort": 1, "hostPort": 80, "protocol": "UDP"});
        assert!(conflict(&any, &any) && conflict(&any, &one) && conflict(&one, &any) && conflict(&one, &one));
        assert!(!conflict(&one, &two) && !conflict(&any, &udp));
        assert!(!conflict(&json!({"containerPort": 80}), &json!({"containerPort": 80})));
    }

    #[test]
    fn a_pod_for_another_system_is_refused() {
        let windows =
            pod("w", &json!({"os": {"name": "windows"}, "priority": 2_000_000_000, "containers": []}));
        let admission = admit(&windows, &[] as &[Pod], &node(&NODE), Policy::Kubelet).unwrap();
        assert_eq!(admission.error.as_deref(), Some("the pod is for windows, and this node runs linux"));
    }

    #[test]
    fn bad_amounts_are_named_from_the_scenarios_root() {
        let bad = with_requests("bad", &json!({"cpu": "x"}));
        let path = |pod: &Pod, pods: &[Pod]| {
            admit(pod, pods, &node(&NODE), Policy::Kubelet).unwrap_err().path().to_owned()
        };
        assert_eq!(path(&bad, &[]), "pod.spec.containers[0].resources.requests.cpu");
        assert_eq!(path(&critical(&json!({})), &[bad]), "pods[0].spec.containers[0].resources.requests.cpu");
    }

    proptest! {
        #[test]
        fn an_admitted_pod_fits_once_its_victims_have_terminated(
            requests in prop::collection::vec((0..1500_i64, 0..800_i64), 0..8), cpu in 0..2500_i64, memory in 0..1200_i64, minimal in any::<bool>(),
        ) {
            let amounts = |cpu: i64, memory: i64| json!({"cpu": format!("{cpu}m"), "memory": format!("{memory}Mi")});
            let pods: Vec<Pod> = requests.iter().enumerate().map(|(index, (cpu, memory))| with_requests(&format!("p{index}"), &amounts(*cpu, *memory))).collect();
            let pod = critical(&amounts(cpu, memory));
            let policy = if minimal { Policy::Minimal } else { Policy::Kubelet };
            let node = node(&[("cpu", "4"), ("memory", "2Gi"), ("pods", "6")]);
            let admission = admit(&pod, &pods, &node, policy).unwrap();
            if admission.admitted {
                let left: Vec<&Pod> = pods.iter().enumerate().filter(|(index, _)| !admission.victims.contains(index)).map(|(_, pod)| pod).collect();
                // The plan is idempotent: the pod fits, and no further pod is evicted. (Admission does not
                // repair a node that was overcommitted before, so the test checks only the pod's own
                // resources.)
                let again = admit(&pod, &left, &node, policy).unwrap();
                prop_assert_eq!((again.admitted, again.victims.len(), again.reasons.len()), (true, 0, 0));
            } else {
                prop_assert!(admission.victims.is_empty() && !admission.reasons.is_empty());
            }
        }
    }
}
