//! What each pod uses: memory and processes from its cgroup, disk from the last time it was measured.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use beelet_policy::{
    eviction::{PodUsage, Signal},
    resources::{
        EPHEMERAL_STORAGE, MEMORY, ResourceList,
        cgroups::{CgroupConfig, pod_path},
        qos::qos_class,
    },
};
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1 as core;
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::Instant,
};
use tracing::{info, warn};

use super::disk::DiskUsages;
use beelet_base::blocking::joined;
use beelet_cgroups::Cgroups;
use beelet_model::status::runtime_id;

/// The name of a round.
const ROUND: &str = "reading what pods use";
/// How long it may take to ask what all pods use. What is known from before counts then.
const DEADLINE: Duration = Duration::from_millis(500);

/// A container with what it uses of a resource and what it requested.
pub(super) type ContainerUse = (String, Quantity, Quantity);

/// Asks for what pods use. Clones ask the same.
#[derive(Clone, Debug)]
pub struct PodUsages {
    /// The cgroup tree.
    pub cgroups: Arc<Cgroups>,
    /// How cgroups are named.
    pub config: CgroupConfig,
    /// What was measured of disks.
    pub disk: DiskUsages,
}

impl PodUsages {
    /// What the pod uses now; None if that can't be read. A pod without a cgroup uses nothing yet. Of disks
    /// counts what was measured since `measured`, where that is given. Blocks for a moment.
    pub(super) fn of(&self, pod: &core::Pod, measured: Option<Instant>) -> Option<PodUsage> {
        let uid = pod.metadata.uid.as_deref()?;
        let path = pod_path(Some(uid), qos_class(pod).ok()?, &self.config).ok()?;
        let (memory, pids) = match self.cgroups.memory_use(&path) {
            Some(memory) => (memory.working_set, self.cgroups.pids_use(&path).unwrap_or(0)),
            None if self.cgroups.exists(&path) => return None,
            None => (0, 0),
        };
        let disk = self.disk.of(uid, measured);
        Some(PodUsage { memory_working_set_bytes: memory, pids, ..disk })
    }

    /// Each container with what it uses of a signal's resource and what it requested. Empty where that isn't
    /// told apart. Blocks for a moment.
    fn containers(&self, pod: &core::Pod, signal: Signal) -> Vec<ContainerUse> {
        let Some(uid) = pod.metadata.uid.as_deref() else { return Vec::new() };
        let whole = |n: u64| Quantity::from_units(i64::try_from(n).unwrap_or(i64::MAX));
        let resource = signal.resource();
        let usage = |name: &str| match resource {
            MEMORY => {
                let path = pod_path(Some(uid), qos_class(pod).ok()?, &self.config).ok()?;
                let id = container_id(pod, name)?;
                let path = self.cgroups.container_path(&path, id)?;
                Some(whole(self.cgroups.memory_use(&path)?.working_set))
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

/// What was last read of a pod.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownUsage {
    /// None if it could not be read.
    pub(super) usage: Option<PodUsage>,
    /// By when it had been; None: never.
    pub(super) read_at: Option<Instant>,
    /// Its containers, by the resource they were read for.
    containers: Option<(&'static str, Vec<ContainerUse>)>,
}

impl KnownUsage {
    /// The pod's containers with what they use of the signal's resource; none where that wasn't read.
    pub(super) fn containers(&self, signal: Signal) -> &[ContainerUse] {
        match &self.containers {
            Some((resource, containers)) if *resource == signal.resource() => containers,
            _ => &[],
        }
    }
}

/// Asks for what all pods use, a round at a time on a thread that may block. A round that hangs is waited for
/// once, and no other is begun beside it: what was read until then, and before, is what is known.
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

    /// What is known of `pods` (with their UIDs), read now if that doesn't take too long. Of disks counts
    /// what was measured since `measured`, where that is given.
    pub(super) async fn look(
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
                info!("what pods use can be read again");
            } else if !self.hangs && !ended {
                warn!(
                    "reading what pods use takes longer than {} ms; eviction goes by what was read before",
                    DEADLINE.as_millis()
                );
            }
            self.hangs = !ended;
        }
        self.known()
    }

    /// What was read last.
    pub(super) fn known(&self) -> BTreeMap<String, KnownUsage> {
        lock(&self.known).clone()
    }

    /// Returns true if nothing is being read.
    pub(super) fn is_at_rest(&self) -> bool {
        self.round.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

/// All pods first, then their containers, which are only for the message. Each is known as soon as it is
/// read: one that hangs hides those after it, for this round.
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

/// Never held while anything is read.
fn lock(known: &Mutex<BTreeMap<String, KnownUsage>>) -> MutexGuard<'_, BTreeMap<String, KnownUsage>> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The runtime's id of a container, which is its cgroup's name.
fn container_id<'p>(pod: &'p core::Pod, name: &str) -> Option<&'p str> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    runtime_id(statuses.iter().find(|status| status.name == name)?)
}
