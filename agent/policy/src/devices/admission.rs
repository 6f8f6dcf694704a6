//! A pod is admitted with its devices: one container after the other, one resource after the other, as the
//! kubelet serves them.
//!
//! The conversation itself: [`Admission::next`] says what to ask a plugin, the caller asks, and hands back
//! the answer. Several may be under way, as long as no two have a resource of [`contended`] in common: what
//! one has chosen isn't in the ledger before its plugin has answered. A failed one is ended by
//! [`Admission::abort`] if nothing of it may stay.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    AllocateError, ContainerRequest, Devices, Question, Request, Selection, Serving,
    registration::is_extended_resource_name,
    topology::{TopologyError, TopologyPolicy, TopologyScope},
};

/// What is known of the pod beside its wishes.
#[derive(Debug, Clone, Default)]
pub struct Circumstances {
    /// Containers that have been running since before this agent: they have what they have, whatever a plugin
    /// says.
    pub running: BTreeSet<String>,
    /// Init containers that have ended for good: they need nothing any more.
    pub ended: BTreeSet<String>,
    /// How strictly devices must be near each other.
    pub policy: TopologyPolicy,
    /// What is aligned together.
    pub scope: TopologyScope,
}

/// Why a pod can't have its devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// The devices can't be allocated.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// The devices can't be allocated near each other.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Devices of pods that are gone are to be freed now ([`Devices::free_inactive`]), if it is known who is
    /// gone.
    Free,
    /// The plugin has a preference: ask it, then call [`Admission::preferred`].
    Ask {
        /// The resource.
        resource: String,
        /// What to ask.
        question: Question,
    },
    /// The plugin is to allocate these to the container; then call [`Admission::allocated`].
    Allocate {
        /// The resource.
        resource: String,
        /// The container's name.
        container: String,
        /// The devices.
        ids: BTreeSet<String>,
    },
    /// The pod has all it asked for.
    Done,
}

/// One pod's admission under way.
#[derive(Debug)]
pub struct Admission<'a> {
    pod_uid: &'a str,
    wishes: Vec<ContainerRequest<'a>>,
    circumstances: Circumstances,
    /// The container and the resource that are served.
    at: (usize, usize),
    begun: bool,
    freed: bool,
    chosen: Option<BTreeSet<String>>,
    /// The nodes for the whole pod, once they are decided.
    of_pod: Option<Option<BTreeSet<i64>>>,
    serving: Serving,
    /// What it got so far: containers and resources.
    committed: Vec<(String, String)>,
}

/// The resources that a pod's admission chooses from, and those that it holds something of: of two pods that
/// have one of them in common only one may be admitted at a time.
#[must_use]
pub fn contended(devices: &Devices, pod_uid: &str, wishes: &[ContainerRequest<'_>]) -> BTreeSet<String> {
    let wished = wishes.iter().flat_map(|wish| &wish.limits).map(|(resource, _)| *resource);
    let wished = wished.filter(|resource| is_extended_resource_name(resource) || devices.knows(resource));
    let held = devices.held(pod_uid).into_iter().flatten().flat_map(|(_, held)| held.keys());
    wished.chain(held.map(String::as_str)).map(str::to_owned).collect()
}

impl<'a> Admission<'a> {
    /// The admission of a pod with these wishes ([`super::container_requests`]).
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
        }
    }

    /// Goes on to where the caller is needed.
    ///
    /// # Errors
    /// The pod can't have its devices.
    pub fn next(&mut self, devices: &mut Devices) -> Result<Next, AdmissionError> {
        if let Some(ids) = &self.chosen {
            let (_, container, resource) = self.current();
            return Ok(Next::Allocate { resource, container, ids: ids.clone() });
        }
        loop {
            let Some(wish) = self.wishes.get(self.at.0) else { return Ok(Next::Done) };
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
            if !std::mem::replace(&mut self.begun, true) {
                let after = self.wishes.iter().skip(self.at.0 + 1).map(|wish| wish.container);
                let runs = |container: &str| self.circumstances.running.contains(container);
                self.serving.begin(devices, self.pod_uid, wish.kind, after, runs);
                let nodes = self.affinity(devices)?;
                self.serving.align(nodes);
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

    /// The plugin's answer to the last question, best first.
    pub fn preferred<S: AsRef<str>>(&mut self, question: Question, answer: &[S]) {
        self.chosen = Some(question.answer(answer));
    }

    /// The plugin has allocated what it was to; `response` is its encoded answer.
    pub fn allocated(&mut self, devices: &mut Devices, response: Vec<u8>) {
        if let Some(ids) = self.chosen.take() {
            let (request, container, resource) = self.current();
            devices.commit(&request, &ids, response);
            self.committed.push((container, resource));
            self.at.1 += 1;
        }
    }

    /// Nothing comes of it: the pod holds what it held before, but for what was freed meanwhile.
    pub fn abort(self, devices: &mut Devices) {
        devices.take_back(self.pod_uid, &self.committed);
    }

    /// The request that is served; its container and resource.
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
        let held = devices.held(self.pod_uid).and_then(|pod| pod.get(wish.container));
        let has = |(resource, count): &(&str, usize)| {
            *count == 0 || !devices.knows(resource) || held.is_some_and(|held| held.contains_key(*resource))
        };
        // What it has it keeps, wherever that is.
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
        let nodes = devices.affinity(&self.serving, self.pod_uid, None, &self.limits_of_pod(), *policy)?;
        self.of_pod = Some(nodes.clone());
        Ok(nodes)
    }

    /// What the pod needs at a time: its containers together, or its largest init container.
    fn limits_of_pod(&self) -> Vec<(&'a str, usize)> {
        let (mut lasting, mut largest): (BTreeMap<&str, usize>, BTreeMap<&str, usize>) = Default::default();
        for wish in &self.wishes {
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
}
