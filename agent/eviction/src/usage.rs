//! The usage of each pod: memory and processes from its cgroup, disk from the last measurement.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use beelet_policy::{
    eviction::{EvictionSwap, MemorySignal, PodUsage, Signal},
    resources::{
        EPHEMERAL_STORAGE, MEMORY, ResourceList,
        cgroups::{CgroupConfig, pod_path},
        qos::qos_class,
    },
};
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1 as core;
use tokio::{task::JoinHandle, time::Instant};
use tracing::{info, warn};

use super::{disk::DiskUsages, machine};
use beelet_base::blocking::{joined, spawn_blocking};
use beelet_cgroups::{Cgroups, MemoryUse, memory, search, stats};
use beelet_model::status::runtime_id;

/// The name of a round.
const ROUND: &str = "reading pod usage";
/// Maximum time for reading all pods' usage. Earlier values count after that.
const DEADLINE: Duration = Duration::from_millis(500);

/// A container with its usage of a resource and its request.
pub(super) type ContainerUse = (String, Quantity, Quantity);

/// A reader of pods' usage. Clones share their sources.
#[derive(Clone, Debug)]
pub struct PodUsages {
    /// The cgroup tree.
    pub cgroups: Arc<Cgroups>,
    /// Configuration of the cgroups' names.
    pub config: CgroupConfig,
    /// The number behind the memory signals.
    pub memory_signal: MemorySignal,
    /// The role of swap.
    pub swap: EvictionSwap,
    /// Results of disk measurements.
    pub disk: DiskUsages,
}

impl PodUsages {
    /// Returns the pod's current usage; `None` if it cannot be read. A pod without a cgroup uses nothing yet.
    /// With `measured`, only disk measurements since then count. Blocks for a moment.
    pub(super) fn of(&self, pod: &core::Pod, measured: Option<Instant>) -> Option<PodUsage> {
        let uid = pod.metadata.uid.as_deref()?;
        let path = pod_path(Some(uid), qos_class(pod).ok()?, &self.config).ok()?;
        let (memory, pids) = match memory::of(&self.cgroups, &path) {
            Some(memory) => (self.used(&memory), stats::pids(&self.cgroups, &path).unwrap_or(0)),
            None if self.cgroups.paths.exists(&path) => return None,
            None => (0, 0),
        };
        let disk = self.disk.of(uid, measured);
        let swap_bytes = self.swap_of(&path);
        Some(PodUsage { memory_working_set_bytes: memory, swap_bytes, pids, ..disk })
    }

    /// Returns the memory of a cgroup that only the end of its processes frees.
    fn used(&self, memory: &MemoryUse) -> u64 {
        self.memory_signal.used(memory.working_set, &machine::cache(&memory.parts))
    }

    /// Returns the swap of a cgroup in bytes, if swap counts.
    fn swap_of(&self, path: &str) -> u64 {
        match self.swap {
            EvictionSwap::Ignored => 0,
            EvictionSwap::Counted => memory::swap(&self.cgroups, path).unwrap_or(0),
        }
    }

    /// Returns each container with its usage of a signal's resource and its request; empty for a resource
    /// without usage per container. Blocks for a moment.
    fn containers(&self, pod: &core::Pod, signal: Signal) -> Vec<ContainerUse> {
        let Some(uid) = pod.metadata.uid.as_deref() else { return Vec::new() };
        let whole = |n: u64| Quantity::from_units(i64::try_from(n).unwrap_or(i64::MAX));
        let resource = signal.resource();
        let usage = |name: &str| match resource {
            MEMORY => {
                let path = pod_path(Some(uid), qos_class(pod).ok()?, &self.config).ok()?;
                let id = container_id(pod, name)?;
                let path = search::container(&self.cgroups, &path, id)?;
                Some(whole(self.used(&memory::of(&self.cgroups, &path)?).saturating_add(self.swap_of(&path))))
            }
            EPHEMERAL_STORAGE => Some(whole(self.disk.container(uid, name)?)),
            _ => None,
        };
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        containers
            .filter_map(|container| {
                let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
                let request = ResourceList::read(requests).ok()?.amount(resource);
                Some((container.name.clone(), usage(&container.name)?, request))
            })
            .collect()
    }
}

/// The last reading of a pod.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownUsage {
    /// Usage; `None` if it could not be read.
    pub(super) usage: Option<PodUsage>,
    /// Time of the reading; `None` before the first one.
    pub(super) read_at: Option<Instant>,
    /// The pod's containers, with the resource of the reading.
    containers: Option<(&'static str, Vec<ContainerUse>)>,
}

impl KnownUsage {
    /// Returns the pod's containers with their usage of the signal's resource; empty if that was not read.
    pub(super) fn containers(&self, signal: Signal) -> &[ContainerUse] {
        match &self.containers {
            Some((resource, containers)) if *resource == signal.resource() => containers,
            _ => &[],
        }
    }
}

/// A reader of all pods' usage, one round at a time on a thread that may block. A hanging round is awaited
/// once, and no other one starts meanwhile: results read so far, and earlier ones, count.
#[derive(Debug)]
pub(super) struct Survey {
    usage: PodUsages,
    known: Arc<Mutex<BTreeMap<String, KnownUsage>>>,
    round: Option<JoinHandle<()>>,
    hangs: bool,
}

impl Survey {
    pub(super) fn new(usage: PodUsages) -> Self {
        Self { usage, known: Arc::default(), round: None, hangs: false }
    }

    /// Returns the usage of `pods` (with their UIDs), read now if that does not take too long. With
    /// `measured`, only disk measurements since then count.
    pub(super) async fn read(
        &mut self,
        pods: &[(String, Arc<core::Pod>)],
        signal: Signal,
        measured: Option<Instant>,
    ) -> BTreeMap<String, KnownUsage> {
        if self.is_at_rest() {
            if let Some(late) = self.round.take() {
                joined(ROUND, late.await).await;
            }
            let (usage, known, asked) = (self.usage.clone(), Arc::clone(&self.known), pods.to_vec());
            let round = self.round.insert(spawn_blocking(move || {
                read_all(&usage, &asked, (signal, measured), &known);
            }));
            let ended = tokio::time::timeout(DEADLINE, round).await;
            let ended = match ended {
                Ok(round) => {
                    self.round = None;
                    joined(ROUND, round).await;
                    true
                }
                Err(_) => false,
            };
            if self.hangs && ended {
                info!("pod usage can be read again");
            } else if !self.hangs && !ended {
                warn!(
                    "reading pod usage takes longer than {} ms; eviction uses the last known values",
                    DEADLINE.as_millis()
                );
            }
            self.hangs = !ended;
        }
        self.known()
    }

    /// Returns the last readings.
    pub(super) fn known(&self) -> BTreeMap<String, KnownUsage> {
        lock(&self.known).clone()
    }

    /// Returns true if no reading is in progress.
    pub(super) fn is_at_rest(&self) -> bool {
        self.round.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

/// Reads all pods first, then their containers, which only the message needs. Each result counts as soon as
/// it is read: a hanging reading hides those after it, for this round.
fn read_all(
    usage: &PodUsages,
    pods: &[(String, Arc<core::Pod>)],
    (signal, measured): (Signal, Option<Instant>),
    known: &Mutex<BTreeMap<String, KnownUsage>>,
) {
    let here: HashSet<&str> = pods.iter().map(|(uid, _)| uid.as_str()).collect();
    lock(known).retain(|uid, _| here.contains(uid.as_str()));
    for (uid, pod) in pods {
        let used = usage.of(pod, measured);
        let mut known = lock(known);
        let entry = known.entry(uid.clone()).or_default();
        (entry.usage, entry.read_at) = (used, Some(Instant::now()));
    }
    for (uid, pod) in pods {
        let containers = usage.containers(pod, signal);
        lock(known).entry(uid.clone()).or_default().containers = Some((signal.resource(), containers));
    }
}

/// Locks the readings; the lock is never held during a reading.
fn lock(known: &Mutex<BTreeMap<String, KnownUsage>>) -> MutexGuard<'_, BTreeMap<String, KnownUsage>> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the runtime's id of a container, which is its cgroup's name.
fn container_id<'p>(pod: &'p core::Pod, name: &str) -> Option<&'p str> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    runtime_id(statuses.iter().find(|status| status.name == name)?)
}
