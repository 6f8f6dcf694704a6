//! How much room the pods' volumes of claims and of storage plugins have, asked once per period as by the
//! kubelet (`volumeStatsAggPeriod`): plugins by NodeGetVolumeStats, the kernel for what the agent mounted.
//! What a container or a plugin does can only hold up the numbers of its own volumes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use beelet_base::blocking::blocking;
use beelet_base::work::Work;
use beelet_csi::Usage;
use beelet_model::{
    disk::{VolumeUse, VolumesUse},
    table::PodTable,
};
use beelet_policy::volumes::claims;
use beelet_state::events::Object;
use beelet_volumes::Volumes;
use futures::{StreamExt, future::join_all, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
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
    launch::Launcher,
    rounds::{Rounds, has, uid},
};

/// How long a volume may take to answer; the numbers of its pod are missing then.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pods at a time.
const AT_A_TIME: usize = 16;
/// Bounds of durations, in seconds: the kubelet's (`prometheus.DefBuckets`).
const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// What asking needs.
#[derive(Debug)]
pub struct Asking {
    /// The pods of the node.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Knows the plugins, and where the pods' folders are.
    pub launcher: Arc<Launcher>,
    /// Between two rounds.
    pub period: Duration,
}

/// Asks once per period, and as soon as a pod has its volumes, until `cancel`.
pub fn follow(asking: Asking, cancel: CancellationToken) -> Work {
    Box::pin(async move {
        let Asking { table, launcher, period } = asking;
        let metrics = &launcher.metrics.volume_stats;
        let mut rounds = Rounds::new(table, &launcher.csi, period, is_asked);
        let mut told: Told = BTreeMap::new();
        let work = async {
            loop {
                let pods = rounds.next().await;
                let found = stream::iter(pods).map(|pod| of_pod(&launcher, pod)).buffer_unordered(AT_A_TIME);
                let found: Vec<_> = found.collect().await;
                told.retain(|(uid, _), _| rounds.knows(uid));
                tell(&launcher, &mut told, &found);
                let mut seen = (**metrics.seen.borrow()).clone();
                seen.retain(|uid, _| rounds.knows(uid));
                seen.extend(found.into_iter().map(|(pod, volumes)| {
                    (uid(&pod).to_owned(), volumes.into_iter().map(|(volume, _)| volume).collect())
                }));
                metrics.seen.send_replace(Arc::new(seen));
            }
        };
        cancel.run_until_cancelled(work).await;
    })
}

/// Returns true if a pod has volumes of claims or of storage plugins.
fn is_asked(pod: &Pod) -> bool {
    has(pod, |volume| {
        let is_attached = volume.flex_volume.is_some() || volume.fc.is_some() || volume.iscsi.is_some();
        claims::may_be_of_driver(volume) || volume.nfs.is_some() || is_attached
    })
}

/// What was told to be wrong, by the pod's UID and the volume.
type Told = BTreeMap<(String, String), String>;

/// What a volume of a pod has, and what its plugin says is wrong with it.
type Found = (VolumeUse, String);

async fn of_pod(launcher: &Launcher, pod: Arc<Pod>) -> (Arc<Pod>, Vec<Found>) {
    let volumes = Volumes::of(&pod, &launcher.pods_dir).on(&launcher.metrics.operations, &launcher.disks);
    let places = blocking("looking for volumes", move || volumes.places()).await;
    let brought = launcher.csi.volumes_of(uid(&pod)).await;
    let ask = places.into_iter().map(async |(volume, place)| {
        let began = Instant::now();
        let asked = async {
            match brought.iter().find(|one| one.path == place) {
                Some(one) => (one.driver().to_owned(), launcher.csi.usage(one).await.map_err(text)),
                None => (
                    "statfs".to_owned(),
                    launcher.metrics.volume_stats.room(&launcher.pods_dir, place.clone()).await,
                ),
            }
        };
        let Ok((source, asked)) = tokio::time::timeout(PATIENCE, asked).await else {
            debug!(pod = uid(&pod), volume, "no answer within {PATIENCE:?} to how much room a volume has");
            return None;
        };
        launcher.metrics.volume_stats.took(source, began.elapsed());
        match asked {
            Ok(usage) => {
                let (room, condition) = usage?;
                let (abnormal, message) =
                    condition.map_or((None, String::new()), |(is, why)| (Some(is), why));
                let claim = claim_of(&pod, &volume);
                Some((VolumeUse { volume, claim, at: Timestamp::now(), room, abnormal }, message))
            }
            Err(why) => {
                debug!(pod = uid(&pod), volume, "a volume does not say how much room it has: {why}");
                None
            }
        }
    });
    let found = join_all(ask).await.into_iter().flatten().collect();
    (pod, found)
}

fn text(error: impl fmt::Display) -> String {
    error.to_string()
}

/// The namespace and name of a volume's claim.
fn claim_of(pod: &Pod, name: &str) -> Option<(String, String)> {
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let claim = claims::claim_of(pod, volumes.find(|volume| volume.name == name)?)?;
    Some((pod.metadata.namespace.clone().unwrap_or_default(), claim.name))
}

/// Events of volumes in which something is wrong, once for each thing.
fn tell(launcher: &Launcher, told: &mut Told, found: &[(Arc<Pod>, Vec<Found>)]) {
    for (pod, volumes) in found {
        for (volume, message) in volumes {
            let key = (uid(pod).to_owned(), volume.volume.clone());
            if volume.abnormal != Some(true) {
                told.remove(&key);
            } else if told.insert(key, message.clone()).as_ref() != Some(message) {
                let message = format!("Volume {}: {message}", volume.volume);
                launcher.events.warning(Object::pod(pod), "VolumeConditionAbnormal", message);
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

/// What was found, and how long that took; clones share it.
#[derive(Clone, Debug)]
pub struct Metrics {
    seen: watch::Sender<VolumesUse>,
    took: Family<Source, Histogram, fn() -> Histogram>,
    /// File systems that are being asked.
    asked: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let took = Family::new_with_constructor(durations as fn() -> Histogram);
        Self { seen: watch::Sender::default(), took, asked: Arc::default() }
    }
}

impl Metrics {
    /// What the volumes have.
    #[must_use]
    pub fn seen(&self) -> watch::Receiver<VolumesUse> {
        self.seen.subscribe()
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "How long it took to find out how much room a volume has, in seconds";
        registry.register("kubelet_volume_metric_collection_duration_seconds", help, self.took.clone());
        registry.register_collector(Box::new(Claims(self.seen())));
    }

    fn took(&self, metric_source: String, took: Duration) {
        self.took.get_or_create(&Source { metric_source }).observe(took.as_secs_f64());
    }

    /// Asks the kernel. One that hangs is not asked a second time meanwhile: each would hold a thread.
    async fn room(&self, pods: &Path, place: PathBuf) -> Result<Option<Usage>, String> {
        if !self.asked().insert(place.clone()) {
            return Err("it still has not answered the last time".to_owned());
        }
        let (metrics, pods) = (self.clone(), pods.to_owned());
        let measure = move || {
            let room = beelet_volumes::room(&pods, &place);
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
    ("kubelet_volume_stats_available_bytes", "Bytes that may still be written to a claim's volume", |v| {
        Some(v.room.available_bytes)
    }),
    ("kubelet_volume_stats_used_bytes", "Bytes that are taken of a claim's volume", |v| {
        Some(v.room.used_bytes)
    }),
    ("kubelet_volume_stats_inodes", "Inodes of a claim's volume", |v| Some(v.room.inodes)),
    ("kubelet_volume_stats_inodes_free", "Inodes of a claim's volume that are free", |v| {
        Some(v.room.inodes_free)
    }),
    ("kubelet_volume_stats_inodes_used", "Inodes of a claim's volume that are taken", |v| {
        Some(v.room.inodes_used)
    }),
    (
        "kubelet_volume_stats_health_status_abnormal",
        "1 if its storage plugin says that something is wrong with a claim's volume, 0 if not",
        |v| v.abnormal.map(u64::from),
    ),
];

impl Collector for Claims {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let seen = Arc::clone(&self.0.borrow());
        // Several pods may have one claim.
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
