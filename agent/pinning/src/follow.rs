//! Updates running containers: the shared pool shrinks and grows with every pinned pod.
//!
//! A container is updated through the runtime when its CPUs change, when it is seen for the first time (as
//! by the kubelet after its start), and, each reconcile period, when its cgroup shows other CPUs than were
//! asked for.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::{blocking::blocking, clock::After as _};
use beelet_cgroups::{Cgroups, search};
use beelet_cri::Runtime;
use beelet_model::{
    pod::running,
    request::Request,
    table::{PodName, PodTable},
};
use beelet_policy::{
    pinning::CpuSet,
    resources::cgroups::{CgroupConfig, pod_cgroup},
};
use beelet_proto::cri::LinuxContainerResources;
use beelet_state::events::{Object, Recorder};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::Desk;

/// Maximum number of concurrent updates of containers.
const AT_ONCE: usize = 4;
/// Pause after each round, since a storm of starts changes the pool continuously.
const PAUSE: Duration = Duration::from_millis(50);

/// The task that keeps the pins.
#[derive(Debug)]
pub struct Task {
    pub(super) desk: Arc<Desk>,
    pub(super) runtime: Runtime,
    pub(super) cgroups: Arc<Cgroups>,
    pub(super) cgroup_config: CgroupConfig,
    pub(super) table: watch::Receiver<Arc<PodTable>>,
}

/// A running container, and the CPUs that it should have.
#[derive(Debug, Clone)]
struct Wanted {
    pod: PodName,
    container: String,
    /// The pod's cgroup.
    parent: String,
    cpus: String,
}

impl Task {
    /// Runs until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut changes = self.desk.changes.subscribe();
        let mut active = self.desk.active.clone();
        // The CPUs that each container was last given, by the runtime's identifier.
        let mut given: BTreeMap<String, String> = BTreeMap::new();
        // The running containers whose CPUs were looked up, by the runtime's identifier.
        let mut known = BTreeSet::new();
        let mut check = Instant::now().after(self.desk.period);
        loop {
            if self.desk.free_inactive("") {
                self.desk.changed();
            }
            self.retry_refused().await;
            if let Err(error) = self.desk.write().await {
                warn!(%error, "the state of CPUs and memory can't be written; tried again");
            }
            let table = Arc::clone(&self.table.borrow_and_update());
            self.record_losses(&table);
            self.reclaim(&table, &mut known).await;
            let wanted = self.wanted(&table);
            given.retain(|id, _| wanted.contains_key(id));
            known.retain(|id| wanted.contains_key(id));
            if Instant::now() >= check {
                self.desk.follow_hardware().await;
                self.forget_drifted(&wanted, &mut given).await;
                check = Instant::now().after(self.desk.period);
            }
            self.update(wanted, &mut given).await;
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(PAUSE) => {}
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = self.table.changed() => if changed.is_err() { return },
                _ = changes.changed() => {}
                Ok(()) = active.changed() => {}
                () = tokio::time::sleep_until(check) => {}
            }
        }
    }

    /// The running containers with their CPUs; empty if CPUs are not managed.
    fn wanted(&self, table: &PodTable) -> BTreeMap<String, Wanted> {
        self.desk.with(|book| {
            let cpus = &book.pins.cpus;
            let shared = cpus.state().shared.to_string();
            if shared.is_empty() && cpus.allocatable().is_empty() {
                return BTreeMap::new();
            }
            let here = table.pods.iter().filter(|(_, entry)| entry.ended().is_none());
            let mut wanted = BTreeMap::new();
            for (name, entry) in here {
                let uid = entry.pod.metadata.uid.as_deref().unwrap_or_default();
                let Ok(cgroup) = pod_cgroup(&entry.pod, &self.cgroup_config) else { continue };
                for (id, container) in running(&entry.pod) {
                    let own = cpus.of(uid, &container.name).map(ToString::to_string);
                    let one = Wanted {
                        pod: name.clone(),
                        container: container.name.clone(),
                        parent: cgroup.path.clone(),
                        cpus: own.unwrap_or_else(|| shared.clone()),
                    };
                    // The runtime ignores an empty list.
                    if !one.cpus.is_empty() {
                        wanted.insert(id.to_owned(), one);
                    }
                }
            }
            wanted
        })
    }

    /// Forgets the containers whose cgroups show other CPUs than were asked for: they are updated again.
    async fn forget_drifted(&self, wanted: &BTreeMap<String, Wanted>, given: &mut BTreeMap<String, String>) {
        let (cgroups, wanted) = (Arc::clone(&self.cgroups), wanted.clone());
        let look = move || {
            let drifted = |(id, wanted): &(String, Wanted)| {
                let found = cpus_of_cgroup(&cgroups, &wanted.parent, id)?;
                Some(found != CpuSet::parse(&wanted.cpus)?)
            };
            wanted.into_iter().filter(|one| drifted(one) == Some(true)).map(|(id, _)| id).collect::<Vec<_>>()
        };
        for id in blocking("comparing the CPUs of containers", look).await {
            if given.remove(&id).is_some() {
                info!(
                    container = id,
                    "the CPUs of a container were changed by another program, and are set again"
                );
            }
        }
    }

    /// Has the runtime give containers their CPUs.
    async fn update(&self, wanted: BTreeMap<String, Wanted>, given: &mut BTreeMap<String, String>) {
        let due = wanted.into_iter().filter(|(id, wanted)| given.get(id) != Some(&wanted.cpus));
        let due: Vec<(String, Wanted)> = due.collect();
        let update = |(id, wanted): (String, Wanted)| async move {
            let resources =
                LinuxContainerResources { cpuset_cpus: wanted.cpus.clone(), ..Default::default() };
            let updated = self.runtime.containers.update_resources(&id, resources).await;
            (id, wanted, updated)
        };
        let mut updates = stream::iter(due).map(update).buffer_unordered(AT_ONCE);
        while let Some((id, wanted, updated)) = updates.next().await {
            match updated {
                Ok(()) => {
                    debug!(pod = %wanted.pod, container = wanted.container, cpus = wanted.cpus, "CPUs given");
                    given.insert(id, wanted.cpus);
                }
                Err(error) if error.is_not_found() => {}
                Err(error) => warn!(pod = %wanted.pod, container = wanted.container, %error,
                    "the runtime does not change the CPUs of a container; tried again"),
            }
        }
    }

    /// Records the events of pods that lost their assignments of the state files.
    fn record_losses(&self, table: &PodTable) {
        let lost: BTreeSet<String> = self.desk.with(|book| book.lost.clone());
        if lost.is_empty() {
            return;
        }
        for entry in table.pods.values() {
            let uid = entry.pod.metadata.uid.as_deref().unwrap_or_default();
            if lost.contains(uid) {
                record_loss(&self.desk.events, &entry.pod);
                self.desk.with(|book| book.lost.remove(uid));
            }
        }
    }

    /// Tries refused pods again after a release.
    async fn retry_refused(&self) {
        for uid in self.desk.with(super::book::Book::drain_refused) {
            info!(uid, "CPUs or memory are free; retrying a refused pod");
            if self.desk.requests.send(Request::Retry { uid }).await.is_err() {
                return;
            }
        }
    }
}

/// Records the event of a pod that lost its assignments.
fn record_loss(events: &Recorder, pod: &Pod) {
    let message = "The CPUs or the memory that the pod had for itself can't be kept: the policy, the settings or the \
                   machine changed. The pod runs on in the shared pool; a new pod is pinned by the present settings.";
    events.warning(Object::pod(pod), "PinsLost", message.to_owned());
}

/// Returns the CPUs of a container's cgroup in the pod's cgroup `parent`. Blocks.
pub(super) fn cpus_of_cgroup(cgroups: &Cgroups, parent: &str, id: &str) -> Option<CpuSet> {
    let path = search::container(cgroups, parent, id)?;
    CpuSet::parse(&cgroups.read(&path, "cpuset.cpus")?)
}
