//! Removes dead containers and sandboxes with their logs: executes the kubelet's container garbage collection
//! (`pkg/kubelet/kuberuntime/kuberuntime_gc.go`). `beelet_policy::images::containers` chooses them.
//!
//! A pod's own worker removes the containers that the pod no longer needs. This collector enforces the node's
//! limits (dead containers per container and in total) and frees space when the disk is full. Resources of a
//! removed pod are left to its worker. Must never remove a running container, nor anything without beelet's
//! label.

use std::{
    collections::{BTreeMap, HashSet},
    ffi::OsStr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_policy::images::containers::{
    ContainerGcPolicy, ContainerRecord, ContainerState, PodState, SandboxRecord, removable_containers,
    removable_sandboxes,
};
use beelet_proto::cri;
use futures::stream::{self, StreamExt};
use jiff::Timestamp;
use prometheus_client::registry::Registry;
use tokio::{
    sync::watch,
    time::{Instant, Interval, MissedTickBehavior, interval_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, trace_span};

use super::{
    Error,
    collector::{self, Collector, Garbage},
};
use beelet_base::{
    blocking::blocking, kubelet_counter::KubeletCounter, shared_folder::Folder, spans::TARGET, work::Work,
};
use beelet_cri::Runtime;
use beelet_model::{
    labels,
    status::timestamp,
    table::{PodName, PodTable},
};
use beelet_state::events::NodeEvents;

/// Interval between collections, equal to the kubelet's.
pub const PERIOD: Duration = Duration::from_secs(60);
/// Concurrent removals. Further ones would only queue in the runtime.
const AT_ONCE: usize = 8;

/// Sends requests to the container collector; clones share it.
pub type Handle = collector::Handle<ContainerGcRequest, Collected>;

/// Dependencies of container garbage collection.
#[derive(Debug)]
pub struct Parts {
    /// The runtime.
    pub runtime: Runtime,
    /// All pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Number of dead containers that are kept.
    pub policy: ContainerGcPolicy,
    /// Interval between collections.
    pub period: Duration,
    /// Root of the containers' log files.
    pub pod_logs_dir: PathBuf,
    /// Records events about the node.
    pub events: NodeEvents,
    /// Counters.
    pub metrics: Metrics,
}

/// Counters; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    containers: KubeletCounter,
    sandboxes: KubeletCounter,
    failures: KubeletCounter,
}

impl Metrics {
    /// Adds all of them to `registry`.
    pub fn register(&self, registry: &mut Registry) {
        let mut add = |name: &str, help: &str, counter: &KubeletCounter| {
            registry.register(name, help, counter.clone());
        };
        add(
            "beelet_container_gc_containers_total",
            "Dead containers removed to hold the node's numbers",
            &self.containers,
        );
        add(
            "beelet_container_gc_sandboxes_total",
            "Dead sandboxes removed to hold the node's numbers",
            &self.sandboxes,
        );
        add(
            "beelet_container_gc_failures_total",
            "Dead containers and sandboxes that could not be removed",
            &self.failures,
        );
    }
}

/// Options of one collection of containers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerGcRequest {
    /// Also remove all dead containers of terminated pods.
    pub terminated: bool,
    /// Only report what would be removed.
    pub dry_run: bool,
}

/// The outcome of a collection of containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Containers that were (or would be) removed, in order.
    pub containers: Vec<CollectedContainer>,
    /// Sandboxes that were (or would be) removed, in order.
    pub sandboxes: Vec<String>,
    /// Messages of failed removals.
    pub errors: Vec<String>,
}

/// A removed container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectedContainer {
    /// The runtime's id.
    pub id: String,
    /// Its pod.
    pub pod: PodName,
    /// Its name in the pod.
    pub name: String,
    /// Number of earlier starts.
    pub attempt: u32,
}

/// Removes the dead containers and sandboxes of beelet's pods.
#[derive(Debug)]
pub struct ContainerGc {
    parts: Parts,
}

impl Garbage for ContainerGc {
    type GcRequest = ContainerGcRequest;
    type Collected = Collected;
    type Timers = Interval;
    type Due = ();

    async fn begin(&mut self) -> Interval {
        let mut ticks = interval_at(Instant::now().after(self.parts.period), self.parts.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    }

    async fn due(ticks: &mut Interval) {
        ticks.tick().await;
    }

    async fn work(&mut self, (): ()) {
        self.collect_by_itself().await;
    }

    async fn collect(&mut self, request: ContainerGcRequest) -> Result<Collected, Error> {
        self.collect_once(request).await
    }
}

impl Collector<ContainerGc> {
    /// Works until `shutdown`. Requests take precedence over timers.
    pub fn run(self, shutdown: CancellationToken) -> Work {
        self.working(shutdown)
    }
}

impl ContainerGc {
    /// Creates an idle collector and its handle.
    #[must_use]
    pub fn new(parts: Parts) -> (Collector<Self>, Handle) {
        Collector::new(Self { parts })
    }

    async fn collect_by_itself(&self) {
        let span = trace_span!(target: TARGET, "gc", otel.name = "Containers/GarbageCollect");
        let error = match self.collect_once(ContainerGcRequest::default()).instrument(span).await {
            Ok(collected) if collected.errors.is_empty() => return,
            Ok(collected) => collected.errors.join("; "),
            Err(error) => error.to_string(),
        };
        self.parts.events.warning("ContainerGCFailed", &error);
    }

    async fn collect_once(&self, request: ContainerGcRequest) -> Result<Collected, Error> {
        let runtime = &self.parts.runtime;
        let (sandboxes, containers) = tokio::try_join!(runtime.sandboxes.ours(), runtime.containers.ours())?;
        let ended = ended_pods(&self.parts.table.borrow());
        let chosen = choose(&self.parts.policy, Timestamp::now(), request, &ended, &containers, &sandboxes);
        if request.dry_run {
            return Ok(chosen);
        }
        let mut done = Collected::default();
        for container in self.remove_containers(chosen.containers, &mut done.errors).await {
            self.parts.metrics.containers.inc();
            done.containers.push(container);
        }
        done.sandboxes = self.remove_sandboxes(chosen.sandboxes, &mut done.errors).await;
        if !done.containers.is_empty() || !done.sandboxes.is_empty() {
            let (containers, sandboxes) = (done.containers.len(), done.sandboxes.len());
            let message = format!("Removed {containers} dead containers and {sandboxes} dead sandboxes");
            self.parts.events.normal("ContainersCollected", &message);
        }
        self.parts.metrics.failures.add(done.errors.len() as u64);
        Ok(done)
    }

    async fn remove_containers(
        &self,
        chosen: Vec<CollectedContainer>,
        errors: &mut Vec<String>,
    ) -> Vec<CollectedContainer> {
        let removals = chosen.into_iter().map(|container| async move {
            let removed = self.parts.runtime.containers.remove(&container.id).await;
            match removed {
                Err(error) if !error.is_not_found() => Err(error.to_string()),
                _ => {
                    self.remove_log(&container).await;
                    Ok(container)
                }
            }
        });
        let results: Vec<_> = stream::iter(removals).buffered(AT_ONCE).collect().await;
        results.into_iter().filter_map(|result| result.map_err(|error| errors.push(error)).ok()).collect()
    }

    async fn remove_sandboxes(&self, chosen: Vec<String>, errors: &mut Vec<String>) -> Vec<String> {
        let removals = chosen.into_iter().map(|id| async move {
            // CRI wants a sandbox stopped first: its network may still exist.
            let removed = match self.parts.runtime.sandboxes.stop(&id).await {
                Ok(()) => self.parts.runtime.sandboxes.remove(&id).await,
                Err(error) => Err(error),
            };
            match removed {
                Err(error) if !error.is_not_found() => Err(error.to_string()),
                _ => Ok(id),
            }
        });
        let results: Vec<_> = stream::iter(removals).buffered(AT_ONCE).collect().await;
        let removed: Vec<String> = results
            .into_iter()
            .filter_map(|result| result.map_err(|error| errors.push(error)).ok())
            .collect();
        self.parts.metrics.sandboxes.add(removed.len() as u64);
        removed
    }

    /// Removes the log of one attempt, with its rotated parts. A log that cannot be removed is removed with
    /// its pod.
    async fn remove_log(&self, container: &CollectedContainer) {
        let table = Arc::clone(&self.parts.table.borrow());
        let Some(uid) = table.pods.get(&container.pod).and_then(|entry| entry.pod.metadata.uid.clone())
        else {
            return;
        };
        let folder = beelet_model::pod::log_folder(&self.parts.pod_logs_dir, &container.pod, &uid)
            .join(&container.name);
        let prefix = format!("{}.log", container.attempt);
        if let Err(error) = blocking("removing logs", move || remove_logs(&folder, &prefix)).await {
            debug!(%error, container = container.name, "cannot remove the log of a dead container");
        }
    }
}

fn remove_logs(folder: &Path, prefix: &str) -> std::io::Result<()> {
    // A container with a hostPath may have replaced the folder by a link.
    let folder = Folder::open(folder)?;
    let is_log = |name: &OsStr| {
        let rest = name.to_str().and_then(|name| name.strip_prefix(prefix));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    folder.names(is_log)?.iter().try_for_each(|name| folder.remove(name))
}

/// Returns the UIDs of pods whose containers have all terminated.
fn ended_pods(table: &PodTable) -> HashSet<String> {
    let ended = table.pods.values().filter(|entry| entry.ended().is_some());
    ended.filter_map(|entry| entry.pod.metadata.uid.clone()).collect()
}

/// Applies `policy` to the containers and sandboxes of the runtime.
fn choose(
    policy: &ContainerGcPolicy,
    now: Timestamp,
    request: ContainerGcRequest,
    ended: &HashSet<String>,
    containers: &[cri::Container],
    sandboxes: &[cri::PodSandbox],
) -> Collected {
    let uid = |labels: &std::collections::HashMap<String, String>| -> String {
        labels.get(labels::POD_UID).cloned().unwrap_or_default()
    };
    let pod_state = |uid: &str| if ended.contains(uid) { PodState::Terminated } else { PodState::Running };
    let uids: Vec<String> = containers.iter().map(|c| uid(&c.labels)).collect();
    let records: Vec<ContainerRecord<'_>> = containers
        .iter()
        .zip(&uids)
        .filter(|(_, uid)| !uid.is_empty())
        .map(|(container, uid)| ContainerRecord {
            id: &container.id,
            pod_uid: uid,
            name: container.metadata.as_ref().map_or("", |metadata| &metadata.name),
            attempt: container.metadata.as_ref().map_or(0, |metadata| metadata.attempt),
            // A creation time in the future means that the clock was set back: count the container as just
            // created.
            created_at: timestamp(container.created_at).map_or(now, |at| at.min(now)),
            state: match container.state() {
                cri::ContainerState::ContainerExited => ContainerState::Exited,
                // The pod's worker will start a created container next.
                _ => ContainerState::Running,
            },
            pod_state: pod_state(uid),
        })
        .collect();
    let going = removable_containers(policy, now, request.terminated, &records);
    let gone: HashSet<&str> = going.iter().copied().collect();
    let with_containers: HashSet<&str> = containers
        .iter()
        .filter(|container| !gone.contains(container.id.as_str()))
        .map(|container| container.pod_sandbox_id.as_str())
        .collect();
    let sandbox_uids: Vec<String> = sandboxes.iter().map(|sandbox| uid(&sandbox.labels)).collect();
    let sandbox_records: Vec<SandboxRecord<'_>> = sandboxes
        .iter()
        .zip(&sandbox_uids)
        .filter(|(_, uid)| !uid.is_empty())
        .map(|(sandbox, uid)| SandboxRecord {
            id: &sandbox.id,
            pod_uid: uid,
            attempt: sandbox.metadata.as_ref().map_or(0, |metadata| metadata.attempt),
            created_at: timestamp(sandbox.created_at).unwrap_or(now),
            ready: sandbox.state() == cri::PodSandboxState::SandboxReady,
            pod_state: pod_state(uid),
        })
        .collect();
    let by_id: BTreeMap<&str, &cri::Container> = containers.iter().map(|c| (c.id.as_str(), c)).collect();
    Collected {
        containers: going.iter().filter_map(|id| by_id.get(id)).map(|c| collected(c)).collect(),
        sandboxes: removable_sandboxes(request.terminated, &sandbox_records, &with_containers)
            .into_iter()
            .map(str::to_owned)
            .collect(),
        errors: Vec::new(),
    }
}

fn collected(container: &cri::Container) -> CollectedContainer {
    let label = |key: &str| container.labels.get(key).cloned().unwrap_or_default();
    CollectedContainer {
        id: container.id.clone(),
        pod: PodName { namespace: label(labels::POD_NAMESPACE), name: label(labels::POD_NAME) },
        name: container.metadata.as_ref().map(|metadata| metadata.name.clone()).unwrap_or_default(),
        attempt: container.metadata.as_ref().map_or(0, |metadata| metadata.attempt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(id: &str, uid: &str, attempt: u32, state: cri::ContainerState) -> cri::Container {
        cri::Container {
            id: id.to_owned(),
            pod_sandbox_id: format!("s-{uid}"),
            metadata: Some(cri::ContainerMetadata { name: "main".to_owned(), attempt }),
            state: state.into(),
            created_at: i64::from(attempt) + 1,
            labels: [(labels::POD_UID.to_owned(), uid.to_owned())].into(),
            ..Default::default()
        }
    }

    fn sandbox(id: &str, uid: &str, attempt: u32, ready: bool) -> cri::PodSandbox {
        let state =
            if ready { cri::PodSandboxState::SandboxReady } else { cri::PodSandboxState::SandboxNotready };
        cri::PodSandbox {
            id: id.to_owned(),
            metadata: Some(cri::PodSandboxMetadata { attempt, ..Default::default() }),
            state: state.into(),
            labels: [(labels::POD_UID.to_owned(), uid.to_owned())].into(),
            ..Default::default()
        }
    }

    #[test]
    fn the_newest_dead_ones_stay_and_ended_pods_lose_theirs_only_when_asked() {
        use cri::ContainerState::{
            ContainerCreated as Created, ContainerExited as Exited, ContainerRunning as Running,
        };
        let containers = [
            container("a0", "a", 0, Exited),
            container("a1", "a", 1, Exited),
            container("a2", "a", 2, Running),
            container("b0", "b", 0, Exited),
            container("c0", "c", 0, Exited),
            container("c1", "c", 1, Created),
        ];
        let sandboxes =
            [sandbox("s-a", "a", 0, true), sandbox("s-b", "b", 0, false), sandbox("s-old", "a", 0, false)];
        let policy =
            ContainerGcPolicy { min_age: Duration::ZERO, max_per_pod_container: 1, max_containers: -1 };
        let ended = HashSet::from(["b".to_owned()]);
        let check = |terminated: bool, expect: &[&str], sandboxes_expected: &[&str]| {
            let request = ContainerGcRequest { terminated, dry_run: false };
            let chosen = choose(&policy, Timestamp::now(), request, &ended, &containers, &sandboxes);
            let ids: Vec<&str> = chosen.containers.iter().map(|c| c.id.as_str()).collect();
            assert_eq!(ids, expect);
            assert_eq!(chosen.sandboxes, sandboxes_expected);
        };
        check(false, &["a0"], &[]);
        check(true, &["b0", "a0"], &["s-b"]);
    }

    #[test]
    fn a_clock_that_was_set_back_keeps_no_dead_container() {
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        let in_an_hour = (now.as_second() + 3600) * 1_000_000_000;
        let made = |attempt| cri::Container {
            created_at: in_an_hour,
            ..container(&format!("a{attempt}"), "a", attempt, cri::ContainerState::ContainerExited)
        };
        let policy =
            ContainerGcPolicy { min_age: Duration::ZERO, max_per_pod_container: 1, max_containers: -1 };
        let chosen =
            choose(&policy, now, ContainerGcRequest::default(), &HashSet::new(), &[made(0), made(1)], &[]);
        assert_eq!(chosen.containers.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), ["a0"]);
    }

    #[test]
    fn only_the_logs_of_that_attempt_go() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["1.log", "1.log.20261121", "11.log", "1.logs", "0.log"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        remove_logs(dir.path(), "1.log").unwrap();
        let mut left: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["0.log", "1.logs", "11.log"]);
        // A link that a container put in the folder's place is not followed.
        std::os::unix::fs::symlink(dir.path(), dir.path().join("planted")).unwrap();
        assert!(remove_logs(&dir.path().join("planted"), "0.log").is_err());
        assert!(dir.path().join("0.log").exists());
    }
}
