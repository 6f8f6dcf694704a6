//! Holds pods to their own limits on the node's disk (emptyDir sizes, ephemeral-storage), and keeps what pods have on disk
//! for the ranking of victims.
//!
//! Volumes are counted by the kernel where the file system has project quotas; otherwise, and logs always, they are
//! measured by a budgeted walk, one pod after the other; writable layers are the runtime's to say. Must
//! never act on a node's lack of space: that is eviction's.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use beelet_policy::{
    critical::is_critical,
    local_storage::{PodStorage, violation},
    resources::{EPHEMERAL_STORAGE, PodDemand},
};
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    decide::{IMMEDIATE, is_evictable},
    disk::{DiskUsages, PodDisk, Taken},
    metrics::Metrics,
    walk::{Budget, measure},
};
use crate::{
    admission::EVICTED,
    kernel::quota,
    pods::{
        cri_config,
        manager::Request,
        observe::managed,
        status::runtime_id,
        table::{PodEntry, PodName, PodTable},
    },
    runtime::Runtime,
};

/// How old the measurement of a pod with limits may get, as the kubelet's monitoring interval.
const LIMITED_PERIOD: Duration = Duration::from_secs(10);
/// More than any writable layer has, of bytes or inodes: a runtime that says more than this of one says nothing, and the sum
/// of many is a number all the same.
const MOST: u64 = 1 << 50;
/// Least time between two rounds over all pods.
const ROUND: Duration = Duration::from_secs(1);

/// See the module's head.
#[derive(Debug)]
pub struct LocalStorage {
    /// All pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// The runtime, which knows writable layers.
    pub runtime: Runtime,
    /// The folder with a folder of volumes for each pod.
    pub pods_dir: PathBuf,
    /// Root of the containers' log files.
    pub pod_logs_dir: PathBuf,
    /// How old the measurement of a pod without limits may get.
    pub period: Duration,
    /// Whether limits are enforced.
    pub enforce: bool,
    /// Where measurements go.
    pub usages: DiskUsages,
    /// To the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Counters.
    pub metrics: Metrics,
}

impl LocalStorage {
    /// Works until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let cancelled = Arc::new(AtomicBool::new(false));
        let work = self.work(&cancelled);
        tokio::select! {
            () = shutdown.cancelled() => cancelled.store(true, Ordering::Relaxed),
            () = work => {}
        }
    }

    async fn work(&self, cancelled: &Arc<AtomicBool>) {
        let mut budget = Some(Budget::new(Arc::clone(cancelled)));
        // When, and when again.
        let mut measured: HashMap<String, (Instant, Duration)> = HashMap::new();
        let mut layers: Option<(Instant, HashMap<String, Taken>)> = None;
        loop {
            let pods = self.pods();
            let here: HashSet<&str> = pods.iter().map(|(uid, _)| uid.as_str()).collect();
            measured.retain(|uid, _| here.contains(uid.as_str()));
            self.usages.keep_only(|uid| here.contains(uid));
            for (uid, entry) in &pods {
                if measured.get(uid).is_some_and(|(at, period)| at.elapsed() < *period) {
                    continue;
                }
                let pod = &entry.pod;
                if layers.as_ref().is_none_or(|(at, _)| at.elapsed() >= LIMITED_PERIOD) {
                    layers = Some((Instant::now(), self.layers().await));
                }
                let known = layers.as_ref().map(|(_, layers)| layers);
                let Some(spent) = budget.take() else { return };
                match self.measure(uid, pod, known, spent).await {
                    Some((disk, rest)) => {
                        budget = Some(rest);
                        self.enforce(uid, pod, &disk).await;
                        self.usages.put(uid, disk);
                    }
                    // Cancelled.
                    None => return,
                }
                let period = if is_limited(pod) { LIMITED_PERIOD } else { self.period };
                measured.insert(uid.clone(), (Instant::now(), period));
            }
            tokio::time::sleep(ROUND).await;
        }
    }

    fn pods(&self) -> Vec<(String, Arc<PodEntry>)> {
        let table = self.table.borrow();
        let entries = table.pods.values().filter(|entry| is_evictable(&entry.pod));
        entries.filter_map(|entry| Some((entry.pod.metadata.uid.clone()?, Arc::clone(entry)))).collect()
    }

    /// The writable layers of our containers, by the runtime's id. A runtime that can't say has none.
    async fn layers(&self) -> HashMap<String, Taken> {
        let filter = cri::ContainerStatsFilter { label_selector: managed(), ..Default::default() };
        let stats = self.runtime.list_container_stats(filter).await.unwrap_or_default();
        let layer = |stats: cri::ContainerStats| {
            let id = stats.attributes?.id;
            let layer = stats.writable_layer?;
            let value = |value: Option<cri::UInt64Value>| value.map_or(0, |value| value.value.min(MOST));
            Some((id, Taken { bytes: value(layer.used_bytes), inodes: value(layer.inodes_used) }))
        };
        stats.into_iter().filter_map(layer).collect()
    }

    /// What the pod has on disk now; None once cancelled.
    async fn measure(
        &self,
        uid: &str,
        pod: &core::Pod,
        layers: Option<&HashMap<String, Taken>>,
        mut budget: Budget,
    ) -> Option<(PodDisk, Budget)> {
        let volumes = empty_dirs(pod, &self.pods_dir);
        let logs = cri_config::log_folder(&self.pod_logs_dir, &PodName::of(pod), uid);
        let names: Vec<String> = containers(pod).map(|container| container.name.clone()).collect();
        let rootfs = names
            .iter()
            .filter_map(|name| Some((name.clone(), *layers?.get(container_id(pod, name)?)?)))
            .collect();
        let walked = spawn_blocking(move || -> std::io::Result<(PodDisk, Budget)> {
            let mut disk = PodDisk { rootfs, ..PodDisk::default() };
            for (name, path) in volumes {
                let taken = match quota::measure(&path) {
                    Some(counted) => Taken { bytes: counted.bytes, inodes: counted.inodes },
                    None => measure(&path, &mut budget)?,
                };
                disk.volumes.insert(name, taken);
            }
            for name in names {
                let taken = measure(&logs.join(&name), &mut budget)?;
                disk.logs.insert(name, taken);
            }
            Ok((disk, budget))
        });
        walked.await.ok()?.ok()
    }

    async fn enforce(&self, uid: &str, pod: &core::Pod, disk: &PodDisk) {
        if !self.enforce {
            return;
        }
        let bytes = |map: &BTreeMap<String, Taken>, name: &str| map.get(name).map_or(0, |taken| taken.bytes);
        let of_container = |container: &core::Container| {
            let name = &container.name;
            (name.clone(), bytes(&disk.rootfs, name) + bytes(&disk.logs, name))
        };
        let storage = PodStorage {
            volumes: disk.volumes.iter().map(|(name, taken)| (name.clone(), taken.bytes)).collect(),
            containers: containers(pod).map(of_container).collect(),
        };
        let Ok(Some(violation)) = violation(pod, &storage) else { return };
        let name = PodName::of(pod);
        if is_critical(pod) {
            warn!(pod = %name, "a critical pod is above its limit, and stays: {}", violation.message);
            return;
        }
        info!(pod = %name, signal = violation.signal, "evicts a pod: {}", violation.message);
        self.metrics.evicted(violation.signal, Some(Duration::ZERO));
        let request = Request::Fail {
            uid: uid.to_owned(),
            reason: EVICTED.to_owned(),
            message: violation.message,
            grace: Some(IMMEDIATE),
        };
        // Without a manager there are no pods.
        let _ = self.requests.send(request).await;
    }
}

fn containers(pod: &core::Pod) -> impl Iterator<Item = &core::Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

/// Whether it has any limit on disk of its own.
fn is_limited(pod: &core::Pod) -> bool {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let sized =
        volumes.into_iter().any(|volume| volume.empty_dir.as_ref().is_some_and(|e| e.size_limit.is_some()));
    sized || PodDemand::read(pod).is_ok_and(|demand| demand.limits().get(EPHEMERAL_STORAGE).is_some())
}

/// The pod's emptyDir volumes on disk, by name, where [`crate::pods`] puts them. Those in memory are held to their size by
/// the kernel.
fn empty_dirs(pod: &core::Pod, pods_dir: &Path) -> Vec<(String, PathBuf)> {
    let folder = pods_dir.join(pod.metadata.uid.as_deref().unwrap_or_default()).join("volumes");
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes
        .filter(|volume| {
            volume.empty_dir.as_ref().is_some_and(|empty| empty.medium.as_deref() != Some("Memory"))
        })
        .map(|volume| (volume.name.clone(), folder.join(&volume.name)))
        .collect()
}

fn container_id<'p>(pod: &'p core::Pod, name: &str) -> Option<&'p str> {
    let status = pod.status.as_ref()?;
    let all = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    runtime_id(all.into_iter().find(|status| status.name == name)?)
}
