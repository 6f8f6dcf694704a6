//! Statistics of the pods' claims' and storage plugins' volumes, measured once per period as under the
//! kubelet (`volumeStatsAggPeriod`): with the plugin's NodeGetVolumeStats, or by the kernel for volumes that
//! the agent mounted. A container or a plugin can only delay the statistics of its own volumes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use beelet_base::{blocking::blocking, work::Work};
use beelet_csi::Usage;
use beelet_model::disk::{VolumeUse, VolumesUse};
use beelet_policy::volumes::claims;
use beelet_state::events::{Object, Recorder};
use futures::{StreamExt, future::join_all, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Volume};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, family::Family, gauge::ConstGauge, histogram::Histogram},
    registry::Registry,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::{
    plugin::Location,
    plugins::Plugins,
    pod_volumes::PodVolumes,
    resync::{Resync, has, uid},
    room::room,
};

/// Time limit for the measurement of a volume. A slower volume has no statistics.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum number of pods that are measured at the same time.
const AT_A_TIME: usize = 16;
/// Upper bounds of the buckets of durations, in seconds: the kubelet's (`prometheus.DefBuckets`).
const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Parts that the statistics need.
#[derive(Debug)]
pub(crate) struct Deps {
    pub(crate) pods_dir: PathBuf,
    pub(crate) plugins: Plugins,
    pub(crate) events: Recorder,
    pub(crate) metrics: StatsMetrics,
}

/// Measures the volumes of all pods once per period, and the volumes of a new pod at once, until `cancel`.
pub(crate) fn follow(deps: Deps, mut resync: Resync, cancel: CancellationToken) -> Work {
    Box::pin(async move {
        let metrics = &deps.metrics;
        let mut warned: Warned = BTreeMap::new();
        let work = async {
            loop {
                let pods = resync.next().await;
                let found = stream::iter(pods).map(|pod| of_pod(&deps, pod)).buffer_unordered(AT_A_TIME);
                let found: Vec<_> = found.collect().await;
                warned.retain(|(uid, _), _| resync.knows(uid));
                record_conditions(&deps.events, &mut warned, &found);
                let mut usage = (**metrics.usage.borrow()).clone();
                usage.retain(|uid, _| resync.knows(uid));
                usage.extend(found.into_iter().map(|(pod, volumes)| {
                    (uid(&pod).to_owned(), volumes.into_iter().map(|(volume, _)| volume).collect())
                }));
                metrics.usage.send_replace(Arc::new(usage));
            }
        };
        cancel.run_until_cancelled(work).await;
    })
}

/// Returns true if a pod has volumes outside of its folder's own file system.
pub(crate) fn is_measured(pod: &Pod) -> bool {
    has(pod, |volume| {
        let is_attached = volume.flex_volume.is_some() || volume.fc.is_some() || volume.iscsi.is_some();
        claims::may_be_of_driver(volume) || volume.nfs.is_some() || is_attached
    })
}

/// Abnormal conditions that have an event, by the pod's UID and the volume.
type Warned = BTreeMap<(String, String), String>;

/// Use of a volume of a pod, and the message of its plugin if its condition is abnormal.
type Found = (VolumeUse, String);

async fn of_pod(deps: &Deps, pod: Arc<Pod>) -> (Arc<Pod>, Vec<Found>) {
    let volumes = PodVolumes::of(&pod, &deps.pods_dir, &deps.plugins);
    let places = blocking("looking for volumes", move || places(&volumes)).await;
    let measure = places.into_iter().map(async |(volume, place)| {
        let began = Instant::now();
        let asked = async {
            for plugin in deps.plugins.all() {
                if let Some((source, stats)) = plugin.stats(uid(&pod), &place).await {
                    return (source, stats.await);
                }
            }
            ("statfs".to_owned(), deps.metrics.room(&deps.pods_dir, place.clone()).await)
        };
        let Ok((source, asked)) = tokio::time::timeout(PATIENCE, asked).await else {
            debug!(pod = uid(&pod), volume, "a volume did not report its size within {PATIENCE:?}");
            return None;
        };
        deps.metrics.record_duration(source, began.elapsed());
        match asked {
            Ok(usage) => {
                let (room, condition) = usage?;
                let (abnormal, message) =
                    condition.map_or((None, String::new()), |(is, why)| (Some(is), why));
                let claim = claim_of(&pod, &volume);
                Some((VolumeUse { volume, claim, at: Timestamp::now(), room, abnormal }, message))
            }
            Err(why) => {
                debug!(pod = uid(&pod), volume, "cannot read the size of a volume: {why}");
                None
            }
        }
    });
    let found = join_all(measure).await.into_iter().flatten().collect();
    (pod, found)
}

fn text(error: impl fmt::Display) -> String {
    error.to_string()
}

/// Returns the namespace and name of a volume's claim.
fn claim_of(pod: &Pod, name: &str) -> Option<(String, String)> {
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let claim = claims::claim_of(pod, volumes.find(|volume| volume.name == name)?)?;
    Some((pod.metadata.namespace.clone().unwrap_or_default(), claim.name))
}

/// Records an event for each volume whose condition is abnormal, once per message.
fn record_conditions(events: &Recorder, warned: &mut Warned, found: &[(Arc<Pod>, Vec<Found>)]) {
    for (pod, volumes) in found {
        for (volume, message) in volumes {
            let key = (uid(pod).to_owned(), volume.volume.clone());
            if volume.abnormal != Some(true) {
                warned.remove(&key);
            } else if warned.insert(key, message.clone()).as_ref() != Some(message) {
                let message = format!("Volume {}: {message}", volume.volume);
                events.warning(Object::pod(pod), "VolumeConditionAbnormal", message);
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Source {
    metric_source: String,
}

fn durations() -> Histogram {
    Histogram::new(BUCKETS)
}

/// Use of the volumes, and the durations of the measurements. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct StatsMetrics {
    usage: watch::Sender<VolumesUse>,
    took: Family<Source, Histogram, fn() -> Histogram>,
    /// File systems that are being measured.
    asked: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl Default for StatsMetrics {
    fn default() -> Self {
        let took = Family::new_with_constructor(durations as fn() -> Histogram);
        Self { usage: watch::Sender::default(), took, asked: Arc::default() }
    }
}

impl StatsMetrics {
    /// Returns the use of all measured volumes.
    pub(crate) fn usage(&self) -> watch::Receiver<VolumesUse> {
        self.usage.subscribe()
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Duration of measuring a volume, in seconds";
        registry.register("kubelet_volume_metric_collection_duration_seconds", help, self.took.clone());
        registry.register_collector(Box::new(Claims(self.usage())));
    }

    fn record_duration(&self, metric_source: String, took: Duration) {
        self.took.get_or_create(&Source { metric_source }).observe(took.as_secs_f64());
    }

    /// Measures a volume by the kernel. Skips a file system whose last measurement hangs: each call would
    /// occupy a thread.
    async fn room(&self, pods: &Path, place: PathBuf) -> Result<Option<Usage>, String> {
        if !self.asked().insert(place.clone()) {
            return Err("the previous measurement has not finished".to_owned());
        }
        let (metrics, pods) = (self.clone(), pods.to_owned());
        let measure = move || {
            let room = room(&pods, &place);
            metrics.asked().remove(&place);
            room
        };
        let room = blocking("measuring a volume", measure).await.map_err(text)?;
        Ok(room.map(|room| (room, None)))
    }

    fn asked(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The metrics of claims, under the kubelet's names.
#[derive(Debug)]
struct Claims(watch::Receiver<VolumesUse>);

/// Name, meaning, value.
type Row = (&'static str, &'static str, fn(&VolumeUse) -> Option<u64>);

const ROWS: [Row; 7] = [
    ("kubelet_volume_stats_capacity_bytes", "Size of a claim's volume", |v| Some(v.room.capacity_bytes)),
    ("kubelet_volume_stats_available_bytes", "Bytes available in a claim's volume", |v| {
        Some(v.room.available_bytes)
    }),
    ("kubelet_volume_stats_used_bytes", "Bytes used in a claim's volume", |v| Some(v.room.used_bytes)),
    ("kubelet_volume_stats_inodes", "Inodes of a claim's volume", |v| Some(v.room.inodes)),
    ("kubelet_volume_stats_inodes_free", "Free inodes of a claim's volume", |v| Some(v.room.inodes_free)),
    ("kubelet_volume_stats_inodes_used", "Used inodes of a claim's volume", |v| Some(v.room.inodes_used)),
    (
        "kubelet_volume_stats_health_status_abnormal",
        "1 if the storage plugin reports an abnormal condition of a claim's volume, otherwise 0",
        |v| v.abnormal.map(u64::from),
    ),
];

impl Collector for Claims {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let seen = Arc::clone(&self.0.borrow());
        // Several pods may share a claim.
        let claims: BTreeMap<&(String, String), &VolumeUse> =
            seen.values().flatten().filter_map(|volume| Some((volume.claim.as_ref()?, volume))).collect();
        for (name, help, value) in ROWS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for ((namespace, claim), volume) in &claims {
                let Some(value) = value(volume) else { continue };
                let labels = [("namespace", namespace.as_str()), ("persistentvolumeclaim", claim.as_str())];
                let value = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
                value.encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// Returns the measurable volumes that are set up outside their own path, with their places.
fn places(volumes: &PodVolumes) -> Vec<(String, PathBuf)> {
    let linked =
        volumes.volumes.iter().filter(|volume| volumes.plugin(volume).location(volume) == Location::Linked);
    let place =
        |volume: &Volume| Some((volume.name.clone(), std::fs::read_link(volumes.path(&volume.name)).ok()?));
    let is_measured = |(_, place): &(String, PathBuf)| {
        volumes.plugins.all().all(|plugin| plugin.is_measured(&volumes.folder, place))
    };
    linked.filter_map(place).filter(is_measured).collect()
}
