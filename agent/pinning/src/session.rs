//! The admission of one pod: its containers one after the other, each with the hints of its devices.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use beelet_model::{
    ended::Ended, failure::Refusal as Waits, origin::Origin, request::Request, table::PodName,
};
use beelet_policy::{
    devices::admission::Aligner,
    pinning::{
        Needs, NodeSet, Refusal, devices::DeviceProvider, error::Reason, explain, hints::ProviderHints,
        pins::Alignment,
    },
};
use beelet_proto::cri::LinuxContainerResources;
use beelet_state::events::Object;
use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::{Desk, Pinning};

/// Delay before a pod may retry after a failed write of a state file.
const WRITE_RETRY: Duration = Duration::from_secs(5);
/// The reason of the event of a pod that runs in the shared pool although it asks for CPUs of its own.
const UNPINNED: &str = "NotPinned";

/// State of the pod's containers.
#[derive(Clone, Debug, Default)]
pub struct Circumstances {
    /// Init containers that have terminated permanently.
    pub ended: BTreeSet<String>,
    /// Containers of the pod run: the pod is never refused, it runs on in the shared pool.
    pub runs: bool,
}

/// Refusal to let a pod start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinRefusal {
    /// Not at present; retry at `until`.
    Wait {
        /// The obstacle.
        message: String,
        /// Time at which to ask again.
        until: Instant,
    },
    /// The pods' manager was asked to end the pod.
    Failed {
        /// Cause.
        message: String,
    },
}

/// The admission of a pod, in progress. A drop before [`Session::finish`] releases the pod's pins.
#[derive(Debug)]
pub struct Session {
    inner: Arc<Inner>,
    is_finished: bool,
}

#[derive(Debug)]
struct Inner {
    desk: Arc<Desk>,
    pod: Arc<core::Pod>,
    needs: Needs,
    circumstances: Circumstances,
    /// Containers that held pins before.
    before: BTreeSet<String>,
    began: Instant,
    progress: Mutex<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    /// Containers that were aligned.
    aligned: BTreeSet<String>,
    /// The result for all containers, where they are aligned together.
    of_pod: Option<Option<NodeSet>>,
    /// The pod waits for the session no more.
    is_over: bool,
}

impl Pinning {
    /// Begins the admission of a pod; `None` if nothing is to be decided, or if the pod has all that it
    /// needs.
    #[must_use]
    pub fn begin(&self, pod: &Arc<core::Pod>, circumstances: Circumstances) -> Option<Session> {
        let desk = self.0.as_ref()?;
        // A pod whose amounts can't be read is refused by the admission before this one.
        let needs = Needs::read(pod, desk.gates).ok()?;
        if desk.with(|book| book.pins.has_something_for(&needs) && book.pins.holds(&needs)) {
            return None;
        }
        if desk.free_inactive(&needs.uid) {
            desk.changed();
        }
        let before = desk.with(|book| {
            book.enter(&needs.uid, &desk.active);
            book.holders(&needs.uid)
        });
        desk.metrics.topology_requests.inc();
        let (desk, pod, progress) = (Arc::clone(desk), Arc::clone(pod), Mutex::default());
        let inner = Inner { desk, pod, needs, circumstances, before, began: Instant::now(), progress };
        Some(Session { inner: Arc::new(inner), is_finished: false })
    }

    /// Frees the CPUs and the memory of an ended pod.
    pub fn released(&self, uid: &str, _: Ended) {
        let Some(desk) = &self.0 else { return };
        if desk.with(|book| book.release(uid)) {
            desk.changed();
        }
    }

    /// Adds the CPUs and the memory nodes of a container that is about to be created; init containers that
    /// end before it give their memory back.
    pub fn apply(&self, pod: &core::Pod, container: &str, resources: &mut LinuxContainerResources) {
        let Some(desk) = &self.0 else { return };
        let Ok(needs) = Needs::read(pod, desk.gates) else { return };
        let (cpus, nodes) = desk.with(|book| {
            book.pins.container_starts(&needs, container);
            let cpus = book.pins.cpus.of(&needs.uid, container);
            let cpus = cpus.unwrap_or(&book.pins.cpus.state().shared).to_string();
            let blocks = book.pins.memory.state().of(&needs.uid, container).iter();
            (cpus, blocks.fold(NodeSet::default(), |nodes, block| nodes.union(block.nodes)))
        });
        if !cpus.is_empty() {
            resources.cpuset_cpus = cpus;
        }
        if !nodes.is_empty() {
            resources.cpuset_mems = nodes.to_string();
        }
    }
}

impl Session {
    /// Returns the part that devices are aligned by.
    #[must_use]
    pub fn aligner(&self) -> Box<dyn Aligner> {
        Box::new(PodAligner(Arc::clone(&self.inner)))
    }

    /// Aligns the containers that devices have not aligned, and ends the admission once the state files
    /// have its result.
    ///
    /// # Errors
    /// The pod has to wait, or was refused.
    pub async fn finish(mut self) -> Result<(), PinRefusal> {
        let inner = Arc::clone(&self.inner);
        let no_devices = ProviderHints::new();
        let mut names = inner.needs.containers.iter().map(|container| container.name.as_str());
        if let Err(refusal) = names.try_for_each(|name| inner.align(name, &no_devices).map(drop)) {
            drop(self);
            return Err(inner.refuse(refusal).await);
        }
        if let Err(message) = inner.desk.write().await {
            let until = Instant::now() + WRITE_RETRY;
            let message = format!("the CPUs and the memory of the pod can't be recorded: {message}");
            return Err(PinRefusal::Wait { message, until });
        }
        self.is_finished = true;
        inner.desk.metrics.admitted(inner.began.elapsed());
        if inner.desk.with(|book| book.holders(&inner.needs.uid)) != inner.before {
            debug!(pod = %PodName::of(&inner.pod), "gave a pod its CPUs and its memory");
            inner.desk.changed();
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let Inner { desk, needs, before, .. } = &*self.inner;
        self.inner.progress().is_over = true;
        let given = desk.with(|book| {
            let held = book.holders(&needs.uid);
            book.pins.retain(|uid, container| uid != needs.uid || before.contains(container));
            held != *before
        });
        if given {
            desk.changed();
        }
    }
}

impl Inner {
    fn progress(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a container its CPUs and its memory, once; the nodes that its devices should come from.
    fn align(&self, container: &str, devices: &ProviderHints) -> Result<Option<NodeSet>, Refusal> {
        let mut progress = self.progress();
        if progress.is_over {
            return Err(Refusal::unexpected("the pod no longer waits"));
        }
        if let Some(nodes) = progress.of_pod {
            return Ok(nodes);
        }
        if self.circumstances.ended.contains(container) || !progress.aligned.insert(container.to_owned()) {
            return Ok(None);
        }
        let (aligned, is_per_pod) = self.desk.with(|book| {
            let mut known = Known { hints: devices.clone(), nodes: None };
            let mut alignment = Alignment::default();
            let admitted = book.pins.admit_next(&self.needs, container, &mut known, &mut alignment);
            self.desk.metrics.count(&book.pins, &self.needs, container, &admitted);
            let aligned = admitted.map(|()| known.nodes).map_err(|refusal| {
                if self.circumstances.runs {
                    // Half of what a container needs is of no use in the shared pool.
                    book.pins.retain(|uid, name| uid != self.needs.uid || name != container);
                }
                let hints = alignment.hints.last();
                let why = hints.filter(|_| refusal.reason == Reason::TopologyAffinity);
                let why = why.map(|(name, hints)| explain::disagreement(&book.pins, name, hints));
                let free = Some(explain::free(&book.pins)).filter(|free| !free.is_empty());
                match why.or_else(|| Some(format!("free: {}", free?))) {
                    Some(more) => Refusal { message: format!("{}: {more}", refusal.message), ..refusal },
                    None => refusal,
                }
            });
            (aligned, book.pins.is_per_pod())
        });
        let nodes = match aligned {
            Ok(nodes) => nodes,
            Err(refusal) if self.circumstances.runs => {
                let message =
                    format!("container {container} runs on without CPUs and memory of its own: {refusal}");
                warn!(pod = %PodName::of(&self.pod), "{message}");
                self.desk.events.warning(Object::pod(&self.pod), UNPINNED, message);
                None
            }
            Err(refusal) => return Err(refusal),
        };
        if is_per_pod {
            progress.of_pod = Some(nodes);
        }
        Ok(nodes)
    }

    /// Asks for the pod's end. The pod is tried again once another pod has given something back.
    async fn refuse(&self, refusal: Refusal) -> PinRefusal {
        let message = refusal.to_string();
        self.record_refusal(&refusal);
        let request = Request::Refuse {
            uid: self.needs.uid.clone(),
            reason: refusal.reason.as_str().to_owned(),
            message: message.clone(),
            refusal: Waits::Other,
        };
        // Sending fails only if the agent is stopping, when the request is pointless.
        let _ = self.desk.requests.send(request).await;
        PinRefusal::Failed { message }
    }

    fn record_refusal(&self, refusal: &Refusal) {
        let pod = PodName::of(&self.pod);
        warn!(%pod, reason = refusal.reason.as_str(), "cannot pin the pod: {refusal}");
        self.desk.metrics.topology_errors.inc();
        // In a cluster a controller creates a replacement.
        if !Origin::of(&self.pod).is_api() {
            self.desk.with(|book| book.refuse(&self.needs.uid));
        }
    }
}

/// Aligns a pod's devices.
#[derive(Debug)]
struct PodAligner(Arc<Inner>);

impl Aligner for PodAligner {
    fn nodes(&self) -> NodeSet {
        self.0.desk.with(|book| book.pins.topology.nodes())
    }

    fn is_per_pod(&self) -> bool {
        self.0.desk.with(|book| book.pins.is_per_pod())
    }

    fn align(&mut self, container: &str, devices: &ProviderHints) -> Result<Option<NodeSet>, Refusal> {
        self.0.align(container, devices).inspect_err(|refusal| self.0.record_refusal(refusal))
    }
}

/// Devices whose hints are known, and which are allocated elsewhere.
struct Known {
    hints: ProviderHints,
    nodes: Option<NodeSet>,
}

impl DeviceProvider for Known {
    fn hints(&mut self, _: Option<&str>) -> ProviderHints {
        self.hints.clone()
    }

    fn allocate(&mut self, _: &str, nodes: Option<NodeSet>) -> Result<(), Refusal> {
        self.nodes = nodes;
        Ok(())
    }

    fn allocate_pod(&mut self, nodes: Option<NodeSet>) -> Result<(), Refusal> {
        self.nodes = nodes;
        Ok(())
    }
}
