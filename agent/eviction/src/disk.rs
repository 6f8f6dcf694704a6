//! The node's file systems, their usage, and each pod's usage of them.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use beelet_policy::{
    eviction::{DiskLayout, DiskPart, Observation, PodUsage, Signal},
    resources::EPHEMERAL_STORAGE,
};
use beelet_proto::cri;
use beelet_units::{bounds, quantity::Quantity};
use tokio::{sync::watch, time::Instant};
use tracing::info;

use super::{Readings, gauges::Gauge};
use beelet_base::blocking::blocking;
use beelet_base::filesystem::{Space, container_mountpoint, image_mountpoint};
use beelet_base::work::Work;
use beelet_cri::Runtime;
use beelet_model::disk::{DiskUse, Places, PodDisk, Taken};

/// Interval of asking the runtime for its file systems, which may change.
const ASK_PERIOD: Duration = Duration::from_secs(60);
/// The interval until the first answer.
const ASK_FIRST: Duration = Duration::from_secs(2);
/// Maximum age of a file system's state.
const STALE: Duration = Duration::from_secs(30);

/// The node's file systems. Clones share their state.
#[derive(Clone, Debug)]
pub struct Filesystems {
    places: Arc<Mutex<Places>>,
    space: Space,
}

impl Filesystems {
    /// Creates the state with only the file system of volumes and logs known.
    #[must_use]
    pub fn new(node: PathBuf, space: Space) -> Self {
        let places = Places { node: Some(node), ..Places::default() };
        Self { places: Arc::new(Mutex::new(places)), space }
    }

    /// Returns a gauge of the node's own file system, and one of the runtime's.
    #[must_use]
    pub fn gauges(&self) -> Vec<Gauge> {
        type Place = fn(&Places) -> Option<PathBuf>;
        let read = |place: Place, bytes: Signal, inodes: Signal| {
            let this = self.clone();
            move || match place(&this.places()) {
                Some(path) => this.read(&path, bytes, inodes),
                None => Ok(BTreeMap::new()),
            }
        };
        let node = read(|p| p.node.clone(), Signal::NodeFsAvailable, Signal::NodeFsInodesFree);
        let images = read(|p| p.images.clone(), Signal::ImageFsAvailable, Signal::ImageFsInodesFree);
        let containers =
            read(|p| p.containers.clone(), Signal::ContainerFsAvailable, Signal::ContainerFsInodesFree);
        vec![
            Gauge::new("nodefs", STALE, node),
            Gauge::new("imagefs and containerfs", STALE, images).and(containers),
        ]
    }

    fn read(&self, path: &std::path::Path, bytes: Signal, inodes: Signal) -> Readings {
        let whole = |n: u64| Quantity::from_units(i64::try_from(n).unwrap_or(i64::MAX));
        let measured = self.space.measure_now(path)?;
        let observation =
            |available, capacity| Observation { available: whole(available), capacity: whole(capacity) };
        let fs = measured.bytes;
        let mut seen = BTreeMap::from([(bytes, observation(fs.available_bytes, fs.capacity_bytes))]);
        // Some file systems (btrfs) do not count inodes.
        if measured.inodes > 0 {
            seen.insert(inodes, observation(measured.inodes_free, measured.inodes));
        }
        Ok(seen)
    }

    /// Asks the runtime for the places of images and containers, and compares their file systems.
    pub fn follow(self, runtime: Runtime, layout: watch::Sender<DiskLayout>) -> Work {
        Box::pin(async move {
            loop {
                let known = match runtime.images.fs_info().await {
                    Ok(answer) => {
                        let place = |path: Option<&str>| path.map(PathBuf::from);
                        let mut places = self.places();
                        places.images = place(image_mountpoint(&answer));
                        places.containers = place(container_mountpoint(&answer));
                        places.all_images = image_use(&answer);
                        *self.places.lock().unwrap_or_else(PoisonError::into_inner) = places.clone();
                        let found = blocking("comparing file systems", move || layout_of(&places)).await;
                        if let Some(found) = found {
                            layout.send_if_modified(|known| {
                            let new = *known != found;
                            if new {
                                info!(layout = ?found, "detected the file systems of images, containers and volumes");
                            }
                            *known = found;
                            new
                        });
                        }
                        found.is_some()
                    }
                    Err(_) => false,
                };
                tokio::time::sleep(if known { ASK_PERIOD } else { ASK_FIRST }).await;
            }
        })
    }

    fn places(&self) -> Places {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Returns the images' usage of their file system; a runtime may not report it.
fn image_use(answer: &cri::ImageFsInfoResponse) -> Option<Taken> {
    let images = answer.image_filesystems.first()?;
    let inodes = images.inodes_used.map_or(0, |inodes| inodes.value);
    Some(Taken { bytes: images.used_bytes?.value, inodes })
}

/// Returns the sharing of file systems; `None` while unknown.
fn layout_of(places: &Places) -> Option<DiskLayout> {
    let device = |path: &PathBuf| std::fs::metadata(path).ok().map(|metadata| metadata.dev());
    let (node, images) = (device(places.node.as_ref()?)?, device(places.images.as_ref()?)?);
    let containers = places.containers.as_ref().and_then(device).unwrap_or(images);
    Some(match (images == node, containers == node) {
        (true, _) => DiskLayout::Single,
        (false, true) => DiskLayout::SplitImageFs,
        (false, false) => DiskLayout::DedicatedImageFs,
    })
}

/// Disk usage of pods, by UID. Clones share it.
#[derive(Clone, Debug)]
pub struct DiskUsages {
    pods: Arc<Mutex<HashMap<String, Measured>>>,
    /// The last request: only measurements that began at this time or later are wanted.
    asked: watch::Sender<Option<Instant>>,
}

/// The measurements of a pod.
#[derive(Debug, Default)]
struct Measured {
    /// The last completed one, with its start time.
    ended: Option<(Instant, PodDisk)>,
    /// The result of the one before it.
    before: Option<(Instant, PodUsage)>,
    /// The one in progress, with the amount found so far.
    at_least: Option<(Instant, PodDisk)>,
}

impl Measured {
    /// Returns the best known result; with `since`, of measurements since then.
    fn best(&self, since: Option<Instant>) -> Option<&PodDisk> {
        let all = self.ended.iter().chain(&self.at_least);
        all.filter(|(began, _)| since.is_none_or(|since| *began >= since)).map(|(_, disk)| disk).next()
    }
}

impl Default for DiskUsages {
    fn default() -> Self {
        Self { pods: Arc::default(), asked: watch::Sender::new(None) }
    }
}

impl DiskUsages {
    fn pods(&self) -> MutexGuard<'_, HashMap<String, Measured>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests new measurements of all pods: those that began before `since` no longer count.
    pub(super) fn ask(&self, since: Instant) {
        self.asked.send_if_modified(|asked| {
            let new = asked.is_none_or(|before| before < since);
            if new {
                *asked = Some(since);
            }
            new
        });
    }

    /// Returns the last request.
    pub(super) fn asked(&self) -> watch::Receiver<Option<Instant>> {
        self.asked.subscribe()
    }

    /// Records the result of a measurement that began at `began`.
    pub(super) fn record(&self, uid: &str, began: Instant, disk: PodDisk) {
        let mut pods = self.pods();
        let measured = pods.entry(uid.to_owned()).or_default();
        let before = measured.ended.take().map(|(began, disk)| (began, usage_of(&disk)));
        *measured = Measured { ended: Some((began, disk)), before, at_least: None };
    }

    /// Records the result so far of an unfinished measurement that began at `began`.
    pub(super) fn record_at_least(&self, uid: &str, began: Instant, disk: PodDisk) {
        self.pods().entry(uid.to_owned()).or_default().at_least = Some((began, disk));
    }

    pub(super) fn keep_only(&self, here: impl Fn(&str) -> bool) {
        self.pods().retain(|uid, _| here(uid));
    }

    /// Returns true if a measurement of the pod has completed that began at `since` or later.
    pub(super) fn is_measured(&self, uid: &str, since: Instant) -> bool {
        let pods = self.pods();
        pods.get(uid).and_then(|pod| pod.ended.as_ref()).is_some_and(|(began, _)| *began >= since)
    }

    /// Returns the disk part of a pod's usage. With `since`, earlier measurements do not count: a pod that
    /// could not be measured in time has at least the amount found so far.
    pub(super) fn of(&self, uid: &str, since: Option<Instant>) -> PodUsage {
        let pods = self.pods();
        pods.get(uid).and_then(|pod| pod.best(since)).map(usage_of).unwrap_or_default()
    }

    /// Returns the same from the last measurement that began before `since`; `None` without one.
    pub(super) fn before(&self, uid: &str, since: Instant) -> Option<PodUsage> {
        let pods = self.pods();
        let pod = pods.get(uid)?;
        let last = pod.ended.as_ref().filter(|(began, _)| *began < since).map(|(_, disk)| usage_of(disk));
        last.or_else(|| pod.before.filter(|(began, _)| *began < since).map(|(_, usage)| usage))
    }

    /// Returns each item of the pod's disk usage that [`Self::of`] counts for the signal, the largest first;
    /// empty for a signal that does not concern a disk.
    pub(super) fn largest(
        &self,
        uid: &str,
        since: Option<Instant>,
        signal: Signal,
        layout: DiskLayout,
    ) -> Vec<(String, Quantity)> {
        let pods = self.pods();
        let disk = pods.get(uid).and_then(|pod| pod.best(since));
        disk.map(|disk| largest(disk, signal, layout)).unwrap_or_default()
    }

    /// Returns the writable layer and logs of a container, in bytes.
    pub(super) fn container(&self, uid: &str, name: &str) -> Option<u64> {
        let pods = self.pods();
        let disk = pods.get(uid)?.best(None)?;
        let bytes = |map: &BTreeMap<String, Taken>| map.get(name).map(|taken| taken.bytes);
        match (bytes(&disk.rootfs), bytes(&disk.logs)) {
            (None, None) => None,
            (rootfs, logs) => Some(bounds::total(rootfs.into_iter().chain(logs))),
        }
    }
}

/// Suffix of the name of a volume that was not measured fully. Such a volume comes first.
const TOO_DEEP: &str = " (with folders too deep to be measured)";

/// Returns each item of a pod's disk usage that counts when the signal is low, with its amount; the largest
/// first.
fn largest(disk: &PodDisk, signal: Signal, layout: DiskLayout) -> Vec<(String, Quantity)> {
    let named = |words: &str, map: &BTreeMap<String, Taken>| -> Vec<(String, Taken)> {
        map.iter().map(|(name, taken)| (format!("{words} {name}"), *taken)).collect()
    };
    let of_part = |part: &DiskPart| match part {
        DiskPart::Rootfs => named("writable layer of container", &disk.rootfs),
        DiskPart::Logs => named("logs of container", &disk.logs),
        DiskPart::Volumes => disk
            .volumes
            .iter()
            .map(|(name, taken)| match disk.too_deep.contains(name) {
                true => (format!("volume {name}{TOO_DEEP}"), *taken),
                false => (format!("volume {name}"), *taken),
            })
            .collect(),
        DiskPart::Files => disk.files.iter().map(|(kind, taken)| (kind.label().to_owned(), *taken)).collect(),
    };
    let of_inodes = signal.resource() != EPHEMERAL_STORAGE;
    let amount = |taken: Taken| {
        let amount = if of_inodes { taken.inodes } else { taken.bytes };
        Quantity::from_units(i64::try_from(amount).unwrap_or(i64::MAX))
    };
    let all = DiskPart::counted(signal, layout).iter().flat_map(of_part);
    let mut all: Vec<_> = all.map(|(name, taken)| (name, amount(taken))).collect();
    all.retain(|(_, amount)| *amount > Quantity::ZERO);
    all.sort_by_key(|(name, amount)| (!name.ends_with(TOO_DEEP), Reverse(*amount)));
    all
}

/// Returns the disk part of a pod's usage.
fn usage_of(disk: &PodDisk) -> PodUsage {
    let bytes = |map: &BTreeMap<String, Taken>| map.values().copied().sum::<Taken>().bytes;
    PodUsage {
        rootfs_bytes: bytes(&disk.rootfs),
        logs_bytes: bytes(&disk.logs),
        volumes_bytes: bytes(&disk.volumes),
        files_bytes: disk.files.values().copied().sum::<Taken>().bytes,
        inodes: disk.whole().inodes,
        hides_disk: !disk.too_deep.is_empty(),
        ..PodUsage::default()
    }
}

/// Disk usage for the node's pages.
#[derive(Clone, Debug)]
pub struct DiskView {
    /// Usage of pods.
    pub usages: DiskUsages,
    /// The node's file systems.
    pub filesystems: Filesystems,
}

impl DiskUse for DiskView {
    fn of(&self, uid: &str) -> Option<PodDisk> {
        let pods = self.usages.pods();
        pods.get(uid)?.ended.as_ref().map(|(_, disk)| disk.clone())
    }

    fn places(&self) -> Places {
        self.filesystems.places()
    }
}

#[cfg(test)]
mod tests {
    use beelet_model::disk::WritableFile;

    use super::*;

    #[test]
    fn the_largest_items_are_those_that_count_for_the_signal() {
        let one = |name: &str, bytes, inodes| [(name.to_owned(), Taken { bytes, inodes })].into();
        let disk = PodDisk {
            volumes: one("scratch", 50, 9),
            logs: one("main", 0, 1),
            rootfs: one("main", 70, 2),
            files: [(WritableFile::Hosts, Taken { bytes: 60, inodes: 1 })].into(),
            ..PodDisk::default()
        };
        let check = |signal, layout, expected: &str| {
            let all = largest(&disk, signal, layout);
            let all: Vec<String> = all.iter().map(|(name, amount)| format!("{name} {amount}")).collect();
            assert_eq!(all.join(", "), expected, "{signal:?} {layout:?}");
        };
        let node = Signal::NodeFsAvailable;
        let all = "writable layer of container main 70, /etc/hosts 60, volume scratch 50";
        check(node, DiskLayout::Single, all);
        check(node, DiskLayout::DedicatedImageFs, "/etc/hosts 60, volume scratch 50");
        let rootfs = "writable layer of container main 70";
        check(Signal::ImageFsAvailable, DiskLayout::DedicatedImageFs, rootfs);
        let inodes =
            "volume scratch 9, writable layer of container main 2, logs of container main 1, /etc/hosts 1";
        check(Signal::NodeFsInodesFree, DiskLayout::Single, inodes);
        check(Signal::MemoryAvailable, DiskLayout::Single, "");
        let deep = PodDisk { too_deep: ["scratch".to_owned()].into(), ..disk.clone() };
        let found = largest(&deep, node, DiskLayout::Single).swap_remove(0).0;
        assert_eq!(found, "volume scratch (with folders too deep to be measured)");
        assert!(usage_of(&deep).hides_disk && !usage_of(&disk).hides_disk);
    }

    #[tokio::test(start_paused = true)]
    async fn measurements_from_before_the_request_do_not_count() {
        let (usages, began) = (DiskUsages::default(), Instant::now());
        let disk = |bytes| PodDisk {
            volumes: [("v".to_owned(), Taken { bytes, inodes: 1 })].into(),
            ..PodDisk::default()
        };
        let bytes = |since| usages.of("a", since).volumes_bytes;
        usages.record("a", began, disk(10));
        assert_eq!((bytes(None), bytes(Some(began))), (10, 10));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let since = Instant::now();
        assert_eq!((bytes(None), bytes(Some(since))), (10, 0));
        usages.record_at_least("a", since, disk(7));
        assert_eq!((bytes(None), bytes(Some(since)), usages.is_measured("a", since)), (10, 7, false));
        let before = || usages.before("a", since).map(|usage| usage.volumes_bytes);
        assert_eq!(before(), Some(10));
        usages.record("a", since, disk(20));
        assert_eq!((bytes(None), bytes(Some(since)), usages.is_measured("a", since)), (20, 20, true));
        assert_eq!(before(), Some(10));
        usages.record("b", since, disk(20));
        assert_eq!(usages.before("b", since), None);
    }
}
