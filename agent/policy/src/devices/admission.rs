//! Admission of a pod with its devices: one container after the other, one resource after the other, in the
//! kubelet's order.
//!
//! [`Admission::next`] returns the next question for a plugin; the caller asks the plugin and passes the
//! answer back. Several admissions may be in progress as long as no two have a resource of [`contended`] in
//! common: the ledger learns of a choice only once the plugin has answered. [`Admission::abort`] ends a
//! failed admission whose allocations must not remain.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use super::{
    AllocateError, ContainerRequest, Devices, Question, Request, Selection, Serving,
    registration::is_extended_resource_name,
    topology::{TopologyError, TopologyPolicy, TopologyScope},
};
use crate::pinning::{Hint, NodeSet, Refusal, hints::ProviderHints};

/// The merger of the hints of devices, CPUs and memory, which gives CPUs and memory away by the result.
pub trait Aligner: fmt::Debug + Send {
    /// Returns the NUMA nodes of the machine.
    fn nodes(&self) -> NodeSet;

    /// Returns true if all containers of a pod are aligned together.
    fn is_per_pod(&self) -> bool;

    /// Gives a container (of containers that are aligned together: all) CPUs and memory, and returns the
    /// nodes that its devices should come from; `None`: any.
    ///
    /// # Errors
    /// The providers don't agree, or too little is free.
    fn align(&mut self, container: &str, devices: &ProviderHints) -> Result<Option<NodeSet>, Refusal>;
}

/// Facts about the pod other than its requests.
#[derive(Debug, Clone, Default)]
pub struct Circumstances {
    /// Containers that have been running since before this agent: they keep their devices, even if a plugin
    /// is missing.
    pub running: BTreeSet<String>,
    /// Init containers that have ended for good: they need no devices any more.
    pub ended: BTreeSet<String>,
    /// Policy that decides how strictly devices must be near each other.
    pub policy: TopologyPolicy,
    /// Unit whose devices are aligned together.
    pub scope: TopologyScope,
}

/// An error that keeps a pod from its devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// The devices can't be allocated.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// The devices can't be allocated near each other.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// Devices, CPUs and memory can't be had together.
    #[error(transparent)]
    Aligned(#[from] Refusal),
}

/// The caller's next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Free the devices of terminated pods now ([`Devices::free_inactive`]), if all active pods are known.
    Free,
    /// The plugin has a preference: ask the plugin, then call [`Admission::preferred`].
    Ask {
        /// The resource.
        resource: String,
        /// The question for the plugin.
        question: Question,
    },
    /// Have the plugin allocate these to the container; then call [`Admission::allocated`].
    Allocate {
        /// The resource.
        resource: String,
        /// The container's name.
        container: String,
        /// The devices.
        ids: BTreeSet<String>,
    },
    /// The pod has all devices that it requests.
    Done,
}

/// Admission of one pod, in progress.
#[derive(Debug)]
pub struct Admission<'a> {
    pod_uid: &'a str,
    wishes: Vec<ContainerRequest<'a>>,
    circumstances: Circumstances,
    /// Indices of the container and the resource in progress.
    at: (usize, usize),
    begun: bool,
    freed: bool,
    chosen: Option<BTreeSet<String>>,
    /// NUMA nodes for the whole pod, once decided.
    of_pod: Option<Option<BTreeSet<i64>>>,
    serving: Serving,
    /// Allocations committed so far: containers and resources.
    committed: Vec<(String, String)>,
    /// Takes the place of the policy of the circumstances.
    aligner: Option<Box<dyn Aligner>>,
}

/// Returns the resources that a pod's admission chooses from, and those that the pod holds devices of: of two
/// pods with a resource in common only one may be admitted at a time.
#[must_use]
pub fn contended(devices: &Devices, pod_uid: &str, wishes: &[ContainerRequest<'_>]) -> BTreeSet<String> {
    let wished = wishes.iter().flat_map(|wish| &wish.limits).map(|(resource, _)| *resource);
    let wished = wished.filter(|resource| is_extended_resource_name(resource) || devices.knows(resource));
    let held = devices.holders.held(pod_uid).into_iter().flatten().flat_map(|(_, held)| held.keys());
    wished.chain(held.map(String::as_str)).map(str::to_owned).collect()
}

impl<'a> Admission<'a> {
    /// Creates the admission of a pod with these requests ([`super::container_requests`]).
    #[must_use]
    pub fn new(
        pod_uid: &'a str,
        mut wishes: Vec<ContainerRequest<'a>>,
        circumstances: Circumstances,
    ) -> Self {
        wishes.retain(|wish| !circumstances.ended.contains(wish.container));
        Self {
            pod_uid,
            wishes,
            circumstances,
            at: (0, 0),
            begun: false,
            freed: false,
            chosen: None,
            of_pod: None,
            serving: Serving::default(),
            committed: Vec::new(),
            aligner: None,
        }
    }

    /// Aligns devices with CPUs and memory. Each container that does not run yet is aligned in its turn,
    /// whether it wants devices or not.
    #[must_use]
    pub fn aligned_by(self, aligner: Option<Box<dyn Aligner>>) -> Self {
        Self { aligner, ..self }
    }

    /// Advances to the next step that needs the caller.
    ///
    /// # Errors
    /// The pod cannot have its devices.
    pub fn next(&mut self, devices: &mut Devices) -> Result<Next, AdmissionError> {
        if let Some(ids) = &self.chosen {
            let (_, container, resource) = self.current();
            return Ok(Next::Allocate { resource, container, ids: ids.clone() });
        }
        loop {
            let Some(wish) = self.wishes.get(self.at.0) else { return Ok(Next::Done) };
            if self.aligner.is_some() && !self.begun {
                if !std::mem::replace(&mut self.freed, true) {
                    return Ok(Next::Free);
                }
                self.begin(devices)?;
                continue;
            }
            let Some((resource, _)) = wish.limits.get(self.at.1).copied() else {
                if self.begun {
                    self.serving.finish(devices, self.pod_uid, wish.container, wish.kind);
                }
                self.at = (self.at.0 + 1, 0);
                self.begun = false;
                continue;
            };
            if !devices.knows(resource) {
                self.at.1 += 1;
                continue;
            }
            if !std::mem::replace(&mut self.freed, true) {
                return Ok(Next::Free);
            }
            if !self.begun {
                self.begin(devices)?;
            }
            let (request, ..) = self.current();
            match devices.select(&request, &self.serving)? {
                Selection::Nothing => self.at.1 += 1,
                Selection::Chosen(ids) => {
                    self.chosen = Some(ids.clone());
                    let container = request.container.to_owned();
                    return Ok(Next::Allocate { resource: resource.to_owned(), container, ids });
                }
                Selection::Ask(question) => return Ok(Next::Ask { resource: resource.to_owned(), question }),
            }
        }
    }

    /// Begins to serve the container in progress.
    fn begin(&mut self, devices: &Devices) -> Result<(), AdmissionError> {
        self.begun = true;
        let wish = &self.wishes[self.at.0];
        let after = self.wishes.iter().skip(self.at.0 + 1).map(|wish| wish.container);
        let runs = |container: &str| self.circumstances.running.contains(container);
        self.serving.begin(devices, self.pod_uid, wish.kind, after, runs);
        let nodes = match self.aligner.take() {
            Some(mut aligner) => {
                let nodes = self.align(devices, &mut *aligner);
                self.aligner = Some(aligner);
                nodes?
            }
            None => self.affinity(devices)?,
        };
        self.serving.align(nodes);
        Ok(())
    }

    /// Returns the nodes for the container in progress by the aligner; `None`: any.
    fn align(
        &mut self,
        devices: &Devices,
        aligner: &mut dyn Aligner,
    ) -> Result<Option<BTreeSet<i64>>, AdmissionError> {
        let wish = &self.wishes[self.at.0];
        if self.circumstances.running.contains(wish.container) {
            return Ok(None);
        }
        let (of, limits) = match aligner.is_per_pod() {
            true => (None, limits_of_pod(&self.wishes)),
            false => (Some(wish.container), wish.limits.clone()),
        };
        if let Some(nodes) = self.of_pod.as_ref().filter(|_| of.is_none()) {
            return Ok(nodes.clone());
        }
        let machine: Vec<i64> = aligner.nodes().iter().map(i64::from).collect();
        let wanted = limits.into_iter().filter(|(resource, count)| *count > 0 && devices.knows(resource));
        let hints: ProviderHints = wanted
            .map(|(resource, count)| {
                let sets = devices.node_sets(&self.serving, (self.pod_uid, of), resource, count, &machine);
                let hint = |(nodes, preferred): (Vec<i64>, bool)| {
                    let nodes = nodes.into_iter().filter_map(|node| u32::try_from(node).ok()).collect();
                    Hint { nodes: Some(nodes), preferred }
                };
                (resource.to_owned(), sets.map(|sets| sets.into_iter().map(hint).collect()))
            })
            .collect();
        if hints.values().any(|hints| hints.as_ref().is_some_and(Vec::is_empty)) {
            // Too few devices: `select` reports that with its own error.
            return Ok(None);
        }
        let nodes = aligner.align(wish.container, &hints)?;
        let nodes = nodes.map(|nodes| nodes.iter().map(i64::from).collect::<BTreeSet<i64>>());
        if of.is_none() {
            self.of_pod = Some(nodes.clone());
        }
        Ok(nodes)
    }

    /// Records the plugin's answer to the last question, best first.
    pub fn preferred<S: AsRef<str>>(&mut self, question: Question, answer: &[S]) {
        self.chosen = Some(question.answer(answer));
    }

    /// Records that the plugin has allocated the chosen devices; `response` is its encoded answer.
    pub fn allocated(&mut self, devices: &mut Devices, response: Vec<u8>) {
        if let Some(ids) = self.chosen.take() {
            let (request, container, resource) = self.current();
            devices.commit(&request, &ids, response);
            self.committed.push((container, resource));
            self.at.1 += 1;
        }
    }

    /// Ends the admission: the pod holds the devices that it held before, except those freed since.
    pub fn abort(self, devices: &mut Devices) {
        devices.holders.revert(self.pod_uid, &self.committed);
    }

    /// Returns the request in progress, its container and its resource.
    fn current(&self) -> (Request<'a>, String, String) {
        let (pod_uid, wish) = (self.pod_uid, &self.wishes[self.at.0]);
        let (resource, count) = wish.limits[self.at.1];
        let already_running = self.circumstances.running.contains(wish.container);
        let request = Request { pod_uid, container: wish.container, resource, count, already_running };
        (request, wish.container.to_owned(), resource.to_owned())
    }

    fn affinity(&mut self, devices: &Devices) -> Result<Option<BTreeSet<i64>>, TopologyError> {
        let Circumstances { running, policy, scope, .. } = &self.circumstances;
        let wish = &self.wishes[self.at.0];
        let held = devices.holders.held(self.pod_uid).and_then(|pod| pod.get(wish.container));
        let has = |(resource, count): &(&str, usize)| {
            *count == 0 || !devices.knows(resource) || held.is_some_and(|held| held.contains_key(*resource))
        };
        // A container keeps the devices that it holds, wherever they are.
        if running.contains(wish.container) || wish.limits.iter().all(has) {
            return Ok(None);
        }
        if *scope == TopologyScope::Container {
            return devices.affinity(
                &self.serving,
                self.pod_uid,
                Some(wish.container),
                &wish.limits,
                *policy,
            );
        }
        if let Some(nodes) = &self.of_pod {
            return Ok(nodes.clone());
        }
        let nodes =
            devices.affinity(&self.serving, self.pod_uid, None, &limits_of_pod(&self.wishes), *policy)?;
        self.of_pod = Some(nodes.clone());
        Ok(nodes)
    }
}

/// Returns the pod's peak demand: its containers together, or its largest init container.
pub(crate) fn limits_of_pod<'a>(wishes: &[ContainerRequest<'a>]) -> Vec<(&'a str, usize)> {
    let (mut lasting, mut largest): (BTreeMap<&str, usize>, BTreeMap<&str, usize>) = Default::default();
    for wish in wishes {
        for (resource, count) in &wish.limits {
            let together = lasting.get(resource).copied().unwrap_or(0).saturating_add(*count);
            match wish.kind {
                super::ContainerKind::Lasting => drop(lasting.insert(resource, together)),
                super::ContainerKind::Init => {
                    let largest = largest.entry(resource).or_default();
                    *largest = (*largest).max(together);
                }
            }
        }
    }
    for (resource, count) in largest {
        let sum = lasting.entry(resource).or_default();
        *sum = (*sum).max(count);
    }
    lasting.into_iter().collect()
}
