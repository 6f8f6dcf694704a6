//! Enforces pods' own limits on the node's disk (emptyDir sizes, ephemeral-storage), and measures pods' disk
//! usage for the ranking of victims.
//!
//! The kernel counts volumes on file systems with project quotas; other volumes, and logs always, are
//! measured by walks within a budget, over all pods in turn, a little of each at a time: a pod with ten
//! million files does not delay the measurement of others. A pod that exceeds its limit before its walk has
//! ended is evicted at once. The runtime reports writable layers; files of the node that are mounted into
//! containers are counted one by one. Must never act on the node's lack of space: that is the task of
//! eviction, which requests new measurements of all pods before it chooses one.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use beelet_policy::{
    eviction::local_storage::{PodStorage, violation},
    resources::{EPHEMERAL_STORAGE, PodDemand, critical::is_critical},
};
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    IMMEDIATE,
    disk::DiskUsages,
    files,
    metrics::Metrics,
    walk::{Budget, Measure},
};
use beelet_base::work::Work;
use beelet_base::{blocking::blocking, clock::processor_time};
use beelet_bpf::quota;
use beelet_cri::Runtime;
use beelet_model::{
    disk::{PodDisk, Taken},
    pressure::EVICTED,
    request::Request,
    status::runtime_id,
    table::{PodEntry, PodName, PodTable},
};

/// Maximum age of the measurement of a pod with limits, the kubelet's monitoring interval.
const LIMITED_PERIOD: Duration = Duration::from_secs(10);
/// Upper bound of a writable layer's bytes or inodes: larger reports are capped, so that the sum of many does
/// not overflow.
const MOST: u64 = 1 << 50;
/// Minimum time between two rounds over all pods.
const ROUND: Duration = Duration::from_secs(1);
/// Share of a core for walking, as one part in N.
const SHARE: u32 = 100;
/// The same while eviction waits for measurements, and the maximum time of that: slightly longer than
/// containerd's interval of ten seconds for measuring all writable layers.
const SHARE_ASKED: u32 = 4;
pub(super) const ASKED: Duration = Duration::from_secs(12);
/// Processor time and time of one pod's measurement per turn.
const TURN: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// Time for the runtime to report writable layers, while eviction waits.
const LAYERS: Duration = Duration::from_secs(2);
/// Interval of repeated requests while the runtime's report predates eviction's request.
const LAYERS_AGAIN: Duration = Duration::from_millis(500);

/// The task that measures the disk usage of all pods in turn, and evicts those above their limits.
#[derive(Debug)]
pub struct LocalStorage {
    /// All pods.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// The runtime, which reports writable layers.
    pub runtime: Runtime,
    /// The folder with a folder of volumes for each pod.
    pub pods_dir: PathBuf,
    /// Root of the containers' log files.
    pub pod_logs_dir: PathBuf,
    /// Maximum age of the measurement of a pod without limits.
    pub period: Duration,
    /// True if limits are enforced.
    pub enforce: bool,
    /// Results of the measurements.
    pub usages: DiskUsages,
    /// Channel to the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Counters.
    pub metrics: Metrics,
}

/// A measurement of a pod in progress.
#[derive(Debug)]
struct Measuring {
    began: Instant,
    found: PodDisk,
    todo: Vec<Part>,
    walk: Option<(Part, Measure)>,
    /// True once the runtime has measured the pod's writable layers since the request.
    layers_are_new: bool,
}

/// The runtime's report about writable layers, by container id.
#[derive(Debug, Default)]
struct Layers {
    /// Time of the last request.
    at: Option<Instant>,
    known: HashMap<String, Layer>,
    /// First answer since eviction requested measurements: the request's time, and the stamps.
    first: Option<(Instant, HashMap<String, i64>)>,
}

/// A writable layer.
#[derive(Debug, Clone, Copy)]
struct Layer {
    taken: Taken,
    /// Time of the runtime's measurement, in nanoseconds by its own clock; 0 before the first one.
    stamp: i64,
}

impl Layers {
    /// Returns true if the runtime must be asked again. `waiting` states that a newer answer is needed.
    fn is_due(&self, since: Option<Instant>, waiting: bool) -> bool {
        let period = if waiting { LAYERS_AGAIN } else { LIMITED_PERIOD };
        self.at.is_none_or(|at| at.elapsed() >= period || since.is_some_and(|since| at < since))
    }

    fn update(&mut self, at: Instant, since: Option<Instant>, known: HashMap<String, Layer>) {
        self.at = Some(at);
        self.known = known;
        if let Some(since) = since
            && self.first.as_ref().is_none_or(|(asked, _)| *asked != since)
        {
            let stamps = self.known.iter().map(|(id, layer)| (id.clone(), layer.stamp)).collect();
            self.first = Some((since, stamps));
        }
    }

    /// Returns true if the layer was measured by the runtime since eviction's request, or if no better answer
    /// will come. Compares stamps only with each other, so that clock changes do not matter.
    fn is_new(&self, id: &str, since: Option<Instant>) -> bool {
        let (Some(layer), Some(since)) = (self.known.get(id), since) else { return true };
        let first = self.first.as_ref().filter(|(asked, _)| *asked == since);
        layer.stamp != 0 && first.is_some_and(|(_, stamps)| stamps.get(id) != Some(&layer.stamp))
    }
}

/// An item of a pod to measure.
#[derive(Debug)]
enum Part {
    Volume(String, PathBuf),
    Log(String, PathBuf),
    /// All files of the node that containers of these names may write, in the pod's folder.
    Files(PathBuf, Vec<String>),
}

impl Measuring {
    /// Continues until the end or until the turn is over; returns true at the end, and the processor time
    /// used. Blocks.
    fn go_on(&mut self, (most, longest): (Duration, Duration)) -> (bool, Duration) {
        let (began, used) = (std::time::Instant::now(), processor_time());
        let mut enough = || processor_time().saturating_sub(used) >= most || began.elapsed() >= longest;
        let ended = loop {
            let (part, mut walk) = match self.walk.take() {
                Some(walking) => walking,
                None => match self.todo.pop() {
                    Some(part) => match self.begin(part) {
                        Some(begun) => begun,
                        None => continue,
                    },
                    None => break true,
                },
            };
            let ended = walk.go_on(&mut enough);
            self.record(&part, &walk);
            if !ended {
                self.walk = Some((part, walk));
                break false;
            }
            if !walk.is_whole() {
                debug!(?part, "measured only a part of this folder");
            }
            if enough() && !self.todo.is_empty() {
                break false;
            }
        };
        (ended, processor_time().saturating_sub(used))
    }

    /// Returns true if nothing is left to walk.
    fn is_walked(&self) -> bool {
        self.walk.is_none() && self.todo.is_empty()
    }

    /// Returns the necessary walk; `None` if the kernel counts, or if there are only a few files.
    fn begin(&mut self, part: Part) -> Option<(Part, Measure)> {
        let walk = match &part {
            Part::Volume(name, path) => match quota::measure(path) {
                Some(counted) => {
                    let taken = Taken { bytes: counted.bytes, inodes: counted.inodes };
                    self.found.volumes.insert(name.clone(), taken);
                    return None;
                }
                None => Measure::new(path),
            },
            Part::Log(_, path) => Measure::new(path),
            Part::Files(folder, containers) => {
                self.found.files = files::measure(folder, containers);
                return None;
            }
        };
        Some((part, walk))
    }

    fn record(&mut self, part: &Part, walk: &Measure) {
        let taken = walk.taken();
        match part {
            Part::Volume(name, _) => {
                if walk.is_too_deep() {
                    self.found.too_deep.insert(name.clone());
                }
                self.found.volumes.insert(name.clone(), taken)
            }
            Part::Log(name, _) => self.found.logs.insert(name.clone(), taken),
            // These files are never walked.
            Part::Files(..) => None,
        };
    }
}

/// State between rounds.
#[derive(Debug)]
struct Rounds {
    budget: Budget,
    budget_asked: Budget,
    /// Time of one pod per turn.
    turn: (Duration, Duration),
    /// Start and end of each pod's last measurement, and the interval before the next one.
    measured: HashMap<String, (Instant, Instant, Duration)>,
    under_way: HashMap<String, Measuring>,
    layers: Layers,
    /// Pods above a limit that have been reported.
    above: HashSet<String>,
    /// Pods with folders too deep to be measured that have been reported.
    deep: HashSet<String>,
}

impl Default for Rounds {
    fn default() -> Self {
        Self {
            budget: Budget::new(SHARE),
            budget_asked: Budget::new(SHARE_ASKED),
            turn: TURN,
            measured: HashMap::new(),
            under_way: HashMap::new(),
            layers: Layers::default(),
            above: HashSet::new(),
            deep: HashSet::new(),
        }
    }
}

impl LocalStorage {
    /// Runs until `shutdown`.
    pub fn run(self, shutdown: CancellationToken) -> Work {
        Box::pin(async move {
            let work = async {
                let (mut rounds, mut asked) = (Rounds::default(), self.usages.asked());
                loop {
                    self.round(&mut rounds, &mut asked).await;
                    if rounds.under_way.is_empty() {
                        pause(ROUND, &mut asked).await;
                    } else if rounds.under_way.values().all(Measuring::is_walked) {
                        pause(LAYERS_AGAIN, &mut asked).await;
                    }
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = work => {}
            }
        })
    }

    /// Gives a turn to each pod whose measurement is due or in progress; those with limits come first.
    async fn round(&self, rounds: &mut Rounds, asked: &mut watch::Receiver<Option<Instant>>) {
        let since = *asked.borrow_and_update();
        let mut pods = self.pods();
        let here: HashSet<&str> = pods.iter().map(|(uid, _)| uid.as_str()).collect();
        rounds.measured.retain(|uid, _| here.contains(uid.as_str()));
        rounds.under_way.retain(|uid, _| here.contains(uid.as_str()));
        rounds.above.retain(|uid| here.contains(uid.as_str()));
        rounds.deep.retain(|uid| here.contains(uid.as_str()));
        self.usages.keep_only(|uid| here.contains(uid));
        drop(here);
        // Measurements from before the request do not count.
        let too_early = |began: Instant| since.is_some_and(|since| began < since);
        rounds.under_way.retain(|_, measuring| !too_early(measuring.began));
        pods.retain(|(uid, _)| {
            rounds.under_way.contains_key(uid)
                || rounds
                    .measured
                    .get(uid)
                    .is_none_or(|(began, ended, period)| too_early(*began) || ended.elapsed() >= *period)
        });
        pods.sort_by_cached_key(|(_, entry)| !is_limited(&entry.pod));
        for (uid, entry) in &pods {
            let mut measuring = rounds.under_way.remove(uid).unwrap_or_else(|| self.begin(uid, &entry.pod));
            self.inspect_layers(&entry.pod, since, &mut measuring, &mut rounds.layers).await;
            let turn = rounds.turn;
            let advanced = blocking("measuring a pod's disk", move || {
                let mut measuring = measuring;
                let (ended, used) = measuring.go_on(turn);
                (measuring, ended, used)
            });
            let (measuring, walked, used) = advanced.await;
            // Eviction's wait for writable layers must not delay the pod's measurement further.
            let in_time = since.is_some_and(|since| since.elapsed() < ASKED);
            let ended = walked && (measuring.layers_are_new || !in_time);
            if let Some(volume) = measuring.found.too_deep.first()
                && rounds.deep.insert(uid.clone())
            {
                warn!(
                    pod = %PodName::of(&entry.pod), volume,
                    "cannot measure a volume fully, as its folders are too deep; the pod counts as above its \
                     limits, and is evicted first if the disk is low"
                );
            }
            self.enforce(uid, entry, &measuring.found, ended, &mut rounds.above).await;
            if ended {
                let period = if is_limited(&entry.pod) { LIMITED_PERIOD } else { self.period };
                rounds.measured.insert(uid.clone(), (measuring.began, Instant::now(), period));
                self.usages.record(uid, measuring.began, measuring.found);
            } else {
                self.usages.record_at_least(uid, measuring.began, measuring.found.clone());
                rounds.under_way.insert(uid.clone(), measuring);
            }
            let budget = if in_time { &mut rounds.budget_asked } else { &mut rounds.budget };
            budget.spend(used);
            let due = budget.due();
            if !due.is_zero() && pause(due, asked).await {
                // A request has arrived to measure all pods again.
                return;
            }
        }
    }

    /// Starts a measurement of the pod.
    fn begin(&self, uid: &str, pod: &core::Pod) -> Measuring {
        let logs = beelet_model::pod::log_folder(&self.pod_logs_dir, &PodName::of(pod), uid);
        let logs = container_names(pod).map(|name| Part::Log(name.to_owned(), logs.join(name)));
        let volumes =
            empty_dirs(pod, &self.pods_dir).into_iter().map(|(name, path)| Part::Volume(name, path));
        let names = container_names(pod).map(str::to_owned).collect();
        let files = Part::Files(self.pods_dir.join(uid), names);
        Measuring {
            began: Instant::now(),
            found: PodDisk::default(),
            todo: logs.chain(volumes).chain([files]).collect(),
            walk: None,
            layers_are_new: false,
        }
    }

    /// Records the runtime's report about the pod's writable layers, until it is new enough.
    async fn inspect_layers(
        &self,
        pod: &core::Pod,
        since: Option<Instant>,
        measuring: &mut Measuring,
        layers: &mut Layers,
    ) {
        if measuring.layers_are_new {
            return;
        }
        if layers.is_due(since, measuring.is_walked()) {
            let at = Instant::now();
            let known = tokio::time::timeout(LAYERS, self.layers()).await.unwrap_or_default();
            layers.update(at, since, known);
        }
        let ids = container_names(pod).filter_map(|name| Some((name, container_id(pod, name)?)));
        measuring.layers_are_new = true;
        for (name, id) in ids {
            measuring.layers_are_new &= layers.is_new(id, since);
            if let Some(layer) = layers.known.get(id) {
                measuring.found.rootfs.insert(name.to_owned(), layer.taken);
            }
        }
    }

    /// Returns the pods that hold resources, terminating ones included: their usage will become free.
    fn pods(&self) -> Vec<(String, Arc<PodEntry>)> {
        let table = self.table.borrow();
        let entries = table.pods.values().filter(|entry| !entry.is_gone());
        entries.filter_map(|entry| Some((entry.pod.metadata.uid.clone()?, Arc::clone(entry)))).collect()
    }

    /// Returns the writable layers of the agent's containers, by the runtime's id; empty if the runtime does
    /// not report them.
    async fn layers(&self) -> HashMap<String, Layer> {
        let stats = self.runtime.containers.stats_of_ours().await.unwrap_or_default();
        let layer = |stats: cri::ContainerStats| {
            let id = stats.attributes?.id;
            let layer = stats.writable_layer?;
            let value = |value: Option<cri::UInt64Value>| value.map_or(0, |value| value.value.min(MOST));
            let taken = Taken { bytes: value(layer.used_bytes), inodes: value(layer.inodes_used) };
            Some((id, Layer { taken, stamp: layer.timestamp }))
        };
        stats.into_iter().filter_map(layer).collect()
    }

    /// Evicts the pod if it is above a limit. A measurement that has not `ended` is a lower bound.
    async fn enforce(
        &self,
        uid: &str,
        entry: &PodEntry,
        disk: &PodDisk,
        ended: bool,
        above: &mut HashSet<String>,
    ) {
        // A terminating pod has been handled already.
        if !self.enforce || entry.ending {
            return;
        }
        let pod = &entry.pod;
        let bytes = |map: &BTreeMap<String, Taken>, name: &str| map.get(name).map_or(0, |taken| taken.bytes);
        let of_container =
            |name: &str| (name.to_owned(), bytes(&disk.rootfs, name).saturating_add(bytes(&disk.logs, name)));
        let storage = PodStorage {
            volumes: disk.volumes.iter().map(|(name, taken)| (name.clone(), taken.bytes)).collect(),
            containers: container_names(pod).map(of_container).collect(),
            files: disk.files.values().copied().sum::<Taken>().bytes,
            too_deep: disk.too_deep.clone(),
        };
        let Ok(Some(violation)) = violation(pod, &storage) else {
            if ended {
                above.remove(uid);
            }
            return;
        };
        if !above.insert(uid.to_owned()) {
            return;
        }
        let name = PodName::of(pod);
        if is_critical(pod) {
            warn!(pod = %name, "a critical pod exceeds its limit and is not evicted: {}", violation.message);
            return;
        }
        info!(pod = %name, signal = violation.signal, "evicting pod: {}", violation.message);
        self.metrics.evicted(violation.signal, Some(Duration::ZERO));
        let request = Request::Fail {
            uid: uid.to_owned(),
            reason: EVICTED.to_owned(),
            message: violation.message,
            grace: Some(IMMEDIATE),
        };
        // Sending fails only without the pods' manager, at the agent's end.
        let _ = self.requests.send(request).await;
    }
}

/// Returns the names of a pod's containers of every kind.
fn container_names(pod: &core::Pod) -> impl Iterator<Item = &str> {
    pod.spec.iter().flat_map(|spec| {
        let usual = spec.init_containers.iter().flatten().chain(&spec.containers).map(|c| c.name.as_str());
        usual.chain(spec.ephemeral_containers.iter().flatten().map(|c| c.name.as_str()))
    })
}

/// Returns true if the pod has any disk limit of its own.
fn is_limited(pod: &core::Pod) -> bool {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let sized =
        volumes.into_iter().any(|volume| volume.empty_dir.as_ref().is_some_and(|e| e.size_limit.is_some()));
    sized || PodDemand::read(pod).is_ok_and(|demand| demand.limits().get(EPHEMERAL_STORAGE).is_some())
}

/// Waits for this time, or until measurements are requested; returns true in the latter case.
async fn pause(time: Duration, asked: &mut watch::Receiver<Option<Instant>>) -> bool {
    tokio::select! {
        () = tokio::time::sleep(time) => false,
        changed = asked.changed() => {
            if changed.is_err() {
                std::future::pending::<()>().await;
            }
            true
        }
    }
}

/// Returns the pod's emptyDir volumes on disk, by name, as [`beelet_pods`] places them. The kernel enforces
/// the size of those in memory.
fn empty_dirs(pod: &core::Pod, pods_dir: &Path) -> Vec<(String, PathBuf)> {
    let folder = pods_dir.join(pod.metadata.uid.as_deref().unwrap_or_default()).join("volumes");
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes
        .filter(|volume| {
            volume
                .empty_dir
                .as_ref()
                .is_some_and(|empty| empty.medium.as_deref().unwrap_or_default().is_empty())
        })
        .map(|volume| (volume.name.clone(), place_of(&folder, &volume.name)))
        .collect()
}

/// Returns the folder of an emptyDir volume: the kubelet's, if a kubelet has set it up first.
fn place_of(volumes: &Path, name: &str) -> PathBuf {
    let (own, of_kubelet) = (volumes.join(name), volumes.join("kubernetes.io~empty-dir").join(name));
    if !own.exists() && of_kubelet.is_dir() { of_kubelet } else { own }
}

fn container_id<'p>(pod: &'p core::Pod, name: &str) -> Option<&'p str> {
    let status = pod.status.as_ref()?;
    let usual = status.init_container_statuses.iter().chain(&status.container_statuses);
    let mut all = usual.chain(&status.ephemeral_container_statuses).flatten();
    runtime_id(all.find(|status| status.name == name)?)
}

#[cfg(test)]
mod tests;
