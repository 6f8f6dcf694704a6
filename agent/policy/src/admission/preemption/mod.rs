//! Which pods make room for a critical one.
//!
//! [`Policy::Kubelet`] is the kubelet's algorithm (`pkg/kubelet/preemption`), choice for choice: fast, but it
//! looks at QoS only and takes what is nearest. [`Policy::Minimal`] finds the set that costs the important
//! pods least, and proves it. Must never kill anything: it names pods, in the order in which to evict them.

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

/// How the victims are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// As the kubelet chooses.
    #[default]
    Kubelet,
    /// The lexicographically smallest vector of victim counts by class (priority, then QoS), most important
    /// class first; ties by the least relative over-freeing, then by name.
    Minimal,
}

/// How much of a resource is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// The resource's name; `pods` counts pods.
    pub resource: String,
    /// Millicores for cpu, bytes or counts for the rest.
    pub amount: i64,
}

impl Requirement {
    /// A missing quantity in the unit that preemption counts in.
    pub fn new(resource: impl Into<String>, quantity: Quantity) -> Self {
        let resource = resource.into();
        let amount = in_unit_of(&resource, quantity);
        Self { resource, amount }
    }
}

/// Millicores for cpu, whole units for the rest, rounded up.
pub(crate) fn in_unit_of(resource: &str, quantity: Quantity) -> i64 {
    if resource == CPU { quantity.milli_value() } else { quantity.value() }
}

/// What was decided.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Preemption {
    /// Indices into the list of pods, in eviction order.
    pub victims: Vec<usize>,
    /// Why no set of pods will do; then there are no victims.
    pub error: Option<String>,
    /// Sentences for a person.
    pub why: Vec<String>,
}

/// A pod that may be preempted, reduced to what the choice depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// Its place in the caller's list.
    pub index: usize,
    /// Namespace and name, the last tie-break.
    pub name: (&'a str, &'a str),
    /// How important it is.
    pub priority: i32,
    /// How much the node has promised it.
    pub class: QosClass,
    /// What its going frees of each requirement's resource, in the requirements' order and units.
    pub frees: Vec<i64>,
    /// Bytes of memory that it requests.
    pub memory: i64,
    /// Millicores that it requests.
    pub cpu: i64,
}

impl<'a> Candidate<'a> {
    /// Reads a pod that `preemptor` may preempt; `None` if it may not.
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

/// Chooses the pods that must go so that `requirements` are met. None that `preemptor` may not preempt is
/// ever chosen.
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

/// [`preempt`] for candidates that have been read already.
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

/// The requirements that are not met already.
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

    /// What is still missing after all of these are gone, a text for each resource.
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

/// Longer lists of victims are not explained one by one.
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
