//! Choice of the pods to evict for a critical pod.
//!
//! [`Policy::Kubelet`] is the kubelet's algorithm (`pkg/kubelet/preemption`), choice for choice: fast, but it
//! considers only QoS and the nearest amounts. [`Policy::Minimal`] finds the set that costs the important
//! pods least, and proves that it does. Must never kill anything: preemption only names pods, in eviction
//! order.

mod kubelet;
mod minimal;
mod search;

use std::borrow::Borrow;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::resources::{
    CPU, MEMORY, PODS, PodDemand,
    critical::{may_preempt, priority},
    qos::{QosClass, qos_class_of},
};
use beelet_units::{field::FieldError, quantity::Quantity};

/// The algorithm that chooses the victims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The kubelet's algorithm.
    #[default]
    Kubelet,
    /// The lexicographically smallest vector of victim counts by class (priority, then QoS), most important
    /// class first; ties by the least relative over-freeing, then by name.
    Minimal,
}

/// A missing amount of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// The resource's name; `pods` counts pods.
    pub resource: String,
    /// Millicores for cpu, bytes or counts for the rest.
    pub amount: i64,
}

impl Requirement {
    /// Converts a missing quantity to the unit that preemption counts in.
    pub fn new(resource: impl Into<String>, quantity: Quantity) -> Self {
        let resource = resource.into();
        let amount = in_unit_of(&resource, quantity);
        Self { resource, amount }
    }
}

/// Converts to millicores for cpu and to whole units for the rest, rounded up.
pub(crate) fn in_unit_of(resource: &str, quantity: Quantity) -> i64 {
    if resource == CPU { quantity.milli_value() } else { quantity.value() }
}

/// The victims, or the reason for having none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Preemption {
    /// Indices into the list of pods, in eviction order.
    pub victims: Vec<usize>,
    /// Reason why no set of pods frees enough; `victims` is then empty.
    pub error: Option<String>,
    /// Explanations for users.
    pub why: Vec<String>,
}

/// A pod that may be preempted, reduced to the inputs of the choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// Index of the pod in the caller's list.
    pub index: usize,
    /// Namespace and name, the last tie-break.
    pub name: (&'a str, &'a str),
    /// The pod's priority.
    pub priority: i32,
    /// The pod's QoS class.
    pub class: QosClass,
    /// Amounts that evicting the pod frees of each requirement's resource, in the requirements' order and
    /// units.
    pub frees: Vec<i64>,
    /// Bytes of memory that the pod requests.
    pub memory: i64,
    /// Millicores that the pod requests.
    pub cpu: i64,
}

impl<'a> Candidate<'a> {
    /// Reads a pod as a candidate; `None` if `preemptor` may not preempt it.
    ///
    /// # Errors
    /// The path of the first amount in the pod that is not a quantity.
    pub fn read(
        index: usize,
        pod: &'a Pod,
        preemptor: &Pod,
        requirements: &[Requirement],
    ) -> Result<Option<Self>, FieldError> {
        let demand = PodDemand::read(pod)?;
        if !may_preempt(preemptor, pod) {
            return Ok(None);
        }
        let request = |resource: &str| in_unit_of(resource, demand.counted_request(resource));
        let (memory, cpu) = (request(MEMORY), request(CPU));
        let frees = requirements.iter().map(|requirement| match requirement.resource.as_str() {
            PODS => 1,
            MEMORY => memory,
            CPU => cpu,
            other => request(other),
        });
        let meta = &pod.metadata;
        let name = (meta.namespace.as_deref().unwrap_or("default"), meta.name.as_deref().unwrap_or_default());
        let class = qos_class_of(pod, &demand);
        Ok(Some(Self { index, name, priority: priority(pod), class, frees: frees.collect(), memory, cpu }))
    }
}

/// Chooses the pods to evict so that `requirements` are met. Never chooses a pod that `preemptor` may not
/// preempt.
///
/// # Errors
/// The path (`[3].spec.…`) of the first amount in the pods that is not a quantity.
pub fn preempt<P: Borrow<Pod>>(
    preemptor: &Pod,
    pods: &[P],
    requirements: &[Requirement],
    policy: Policy,
) -> Result<Preemption, FieldError> {
    let mut candidates = Vec::with_capacity(pods.len());
    for (index, pod) in pods.iter().enumerate() {
        let candidate = Candidate::read(index, pod.borrow(), preemptor, requirements);
        candidates.extend(candidate.map_err(|error| error.under(&format!("[{index}]")))?);
    }
    Ok(choose(&candidates, requirements, policy))
}

/// Works like [`preempt`] for candidates that have been read already.
pub fn choose(candidates: &[Candidate<'_>], requirements: &[Requirement], policy: Policy) -> Preemption {
    let needs = Needs::new(requirements);
    let left = needs.left_after(candidates);
    if !left.is_empty() {
        let error = format!(
            "no set of pods that may be preempted frees enough: {} would still be missing",
            left.join(", ")
        );
        return Preemption { error: Some(error), ..Preemption::default() };
    }
    let (victims, mut why) = match policy {
        Policy::Kubelet => (kubelet::choose(candidates, &needs), Vec::new()),
        Policy::Minimal => minimal::choose(candidates, &needs),
    };
    why.extend(explain(&victims, &needs));
    Preemption { victims: victims.iter().map(|victim| victim.index).collect(), error: None, why }
}

/// The requirements that are not met yet.
struct Needs<'r> {
    /// Column in [`Candidate::frees`], resource, amount above zero.
    open: Vec<(usize, &'r str, i64)>,
}

impl<'r> Needs<'r> {
    fn new(requirements: &'r [Requirement]) -> Self {
        let open = requirements.iter().enumerate().filter(|(_, requirement)| requirement.amount > 0);
        Self {
            open: open
                .map(|(column, requirement)| (column, requirement.resource.as_str(), requirement.amount))
                .collect(),
        }
    }

    /// Returns the amounts that are still missing after evicting all of these, one text per resource.
    fn left_after(&self, candidates: &[Candidate<'_>]) -> Vec<String> {
        let left = |&(column, resource, amount): &(usize, &str, i64)| {
            let left = candidates
                .iter()
                .fold(amount, |left, candidate| left.saturating_sub(candidate.frees[column]));
            (left > 0).then(|| format!("{left} of {resource}"))
        };
        self.open.iter().filter_map(left).collect()
    }
}

/// Maximum number of victims for which each victim gets an explanation.
const EXPLAINED_VICTIMS: usize = 20;

fn explain(victims: &[&Candidate<'_>], needs: &Needs<'_>) -> Vec<String> {
    if victims.is_empty() || victims.len() > EXPLAINED_VICTIMS {
        return Vec::new();
    }
    let sentence = |victim: &&Candidate<'_>| {
        let frees =
            needs.open.iter().map(|&(column, resource, _)| format!("{} of {resource}", victim.frees[column]));
        let frees = frees.collect::<Vec<_>>().join(", ");
        let (namespace, name) = victim.name;
        format!("{namespace}/{name} ({}, priority {}) frees {frees}", victim.class, victim.priority)
    };
    let needed = needs.open.iter().map(|(_, resource, amount)| format!("{amount} of {resource}"));
    let needed = format!("needed: {}", needed.collect::<Vec<_>>().join(", "));
    std::iter::once(needed).chain(victims.iter().map(sentence)).collect()
}

#[cfg(test)]
mod tests;
