//! Removes unused images: executes the kubelet's image garbage collection
//! (`pkg/kubelet/images/image_gc_manager.go`).
//!
//! `beelet_policy::images::gc` chooses one image at a time; this module checks again that the image is
//! unused, removes it, and measures on the file system how many bytes that freed. A single task does all of
//! this, one removal at a time. Must never remove an image without holding a [`super::lease::Removal`] and
//! checking for users of the image after acquiring it.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_policy::images::gc::{
    self, Collection, CollectionMode, CollectionStep, ImageGcPolicy, ImageRecord, ListedImage, Outcome,
    Reason,
};
use beelet_proto::cri;
use beelet_units::fs_usage::FsUsage;
use jiff::Timestamp;
use tokio::{
    select,
    sync::watch,
    time::{Instant, Interval, MissedTickBehavior, interval, interval_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, info, trace_span, warn};

use super::{
    Error,
    collector::{self, Collector, Garbage},
    lease::Leases,
    metrics::Metrics,
    records::{self, ImageRecords},
    usage::{Usage, names},
};
use beelet_base::clock::WallClock;
use beelet_base::filesystem::{Space, image_mountpoint};
use beelet_base::spans::TARGET;
use beelet_base::work::Work;
use beelet_cri::{Runtime, sandbox_image};
use beelet_model::table::PodTable;
use beelet_state::{State, events::NodeEvents};

/// Interval between scans of all images and between collections, equal to the kubelet's.
pub const PERIOD: Duration = Duration::from_secs(300);
/// Maximum age of the image list shown to other parts, equal to the kubelet's.
const LIST_PERIOD: Duration = Duration::from_secs(30);
/// Delay of the first collection after the first scan, so that workers that start containers at that time
/// come first.
const SETTLING: Duration = Duration::from_secs(1);

/// Sends requests to the image collector; clones share it.
pub type Handle = collector::Handle<ImageGcRequest, Collected>;

/// Dependencies of image garbage collection.
#[derive(Debug)]
pub struct Parts {
    /// The runtime.
    pub runtime: Runtime,
    /// Leases of images that containers are about to be created from.
    pub leases: Leases,
    /// Store of image ages.
    pub state: Arc<State>,
    /// All pods, for their volumes.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Thresholds and minimum ages.
    pub policy: ImageGcPolicy,
    /// Interval between collections; None: only on request.
    pub period: Option<Duration>,
    /// Measures file systems.
    pub space: Space,
    /// Records events about the node.
    pub events: NodeEvents,
    /// Counters and gauges.
    pub metrics: Metrics,
}

/// Options of one collection of images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageGcRequest {
    /// Remove all unused images that are old enough, regardless of free space.
    pub all_unused: bool,
    /// Only report what would be removed.
    pub dry_run: bool,
}

/// The outcome of a collection of images.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// The policy's verdict on the collection.
    pub outcome: Outcome,
    /// Images that were (or would be) removed, in order.
    pub images: Vec<CollectedImage>,
}

/// A removed image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectedImage {
    /// Its id.
    pub id: String,
    /// Its tags, or its digests if it has no tag.
    pub names: Vec<String>,
    /// Its size as reported by the runtime, in bytes.
    pub size_bytes: u64,
    /// Bytes freed by its removal; in a dry run, its size.
    pub freed_bytes: u64,
    /// `age` or `space`.
    pub reason: &'static str,
}

/// Tracks ages and users of the node's images and removes unused ones.
#[derive(Debug)]
pub struct ImageGc {
    parts: Parts,
    known: ImageRecords,
    /// Start of tracking in this run of the agent.
    started: Instant,
    /// Ages use the wall clock, because they outlast a reboot. The clock may be set.
    clock: WallClock,
    /// Mount point of the images, once the runtime has reported it.
    mountpoint: Option<PathBuf>,
    sandbox_image: Option<String>,
    /// The last collection failed, so the next failure becomes an event.
    failed_before: bool,
}

/// Result of one removal.
enum Removed {
    Freed(u64),
    InUse,
    Failed(String),
}

/// Timers of scans, collections and lists.
#[derive(Debug)]
pub struct Timers {
    ages: Interval,
    /// None: only on request.
    collections: Option<Interval>,
    lists: Interval,
}

/// Work that the [`Timers`] make due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Update ages.
    Ages,
    /// Collect.
    Collection,
    /// List the images.
    List,
}

impl Garbage for ImageGc {
    type GcRequest = ImageGcRequest;
    type Collected = Collected;
    type Timers = Timers;
    type Due = Due;

    async fn begin(&mut self) -> Timers {
        self.known = records::load(&self.parts.state).await;
        self.started = Instant::now();
        let often = |mut ticks: Interval| {
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            ticks
        };
        // The first scan precedes the first collection.
        let first = |period: Duration| Instant::now().after(period.min(SETTLING));
        Timers {
            ages: often(interval(PERIOD)),
            collections: self.parts.period.map(|period| often(interval_at(first(period), period))),
            lists: often(interval(LIST_PERIOD)),
        }
    }

    async fn due(timers: &mut Timers) -> Due {
        let collection = async {
            match &mut timers.collections {
                Some(collections) => drop(collections.tick().await),
                None => std::future::pending().await,
            }
        };
        select! {
            biased;
            _ = timers.ages.tick() => Due::Ages,
            () = collection => Due::Collection,
            _ = timers.lists.tick() => Due::List,
        }
    }

    async fn work(&mut self, due: Due) {
        match due {
            Due::Ages => self.refresh_ages().await,
            Due::Collection => self.collect_by_itself().await,
            Due::List => self.list().await,
        }
    }

    async fn collect(&mut self, request: ImageGcRequest) -> Result<Collected, Error> {
        let collected = self.collect_once(request).await?;
        if !request.dry_run {
            self.record_events(&collected);
        }
        Ok(collected)
    }
}

impl Collector<ImageGc> {
    /// Works until `shutdown`. Requests take precedence over timers.
    pub fn run(self, shutdown: CancellationToken) -> Work {
        self.working(shutdown)
    }
}

impl ImageGc {
    /// Creates an idle collector and its handle.
    #[must_use]
    pub fn new(parts: Parts) -> (Collector<Self>, Handle) {
        Collector::new(Self {
            parts,
            known: ImageRecords::default(),
            started: Instant::now(),
            clock: WallClock::default(),
            mountpoint: None,
            sandbox_image: None,
            failed_before: false,
        })
    }

    /// Updates ages.
    async fn refresh_ages(&mut self) {
        if let Err(error) = self.detect(Timestamp::now()).await {
            warn!(%error, "cannot update image ages; keeping the previous ones");
        }
    }

    async fn list(&mut self) {
        match self.parts.runtime.images.list().await {
            Ok(images) => self.publish_list(&images),
            Err(error) => warn!(%error, "cannot list images"),
        }
    }

    fn publish_list(&self, images: &[cri::Image]) {
        let bytes = images.iter().fold(0_u64, |sum, image| sum.saturating_add(image.size));
        self.parts.metrics.listed(images.len(), bytes);
    }

    /// Reports failures as the kubelet does: the first is only logged, the next ones are events.
    async fn collect_by_itself(&mut self) {
        let span = trace_span!(target: TARGET, "gc", otel.name = "Images/GarbageCollect");
        let error = match self.collect_once(ImageGcRequest::default()).instrument(span).await {
            Ok(collected) => {
                self.record_events(&collected);
                collected.outcome.error
            }
            Err(error) => Some(error.to_string()),
        };
        let Some(error) = error else {
            if std::mem::take(&mut self.failed_before) {
                info!("image garbage collection succeeds again");
            }
            return;
        };
        self.parts.metrics.failed();
        if std::mem::replace(&mut self.failed_before, true) {
            self.event("ImageGCFailed", &error);
        } else {
            warn!(error, "image garbage collection failed; retrying at the next interval");
        }
    }

    fn record_events(&self, collected: &Collected) {
        if !collected.images.is_empty() {
            self.parts.events.normal("ImagesCollected", &summary(&collected.images));
        }
        collected.outcome.events.iter().for_each(|event| self.event(event.reason, &event.message));
    }

    fn event(&self, reason: &str, message: &str) {
        self.parts.events.warning(reason, message);
    }

    /// Lists all images and their users; updates the records.
    async fn detect(&mut self, now: Timestamp) -> Result<(Vec<cri::Image>, Usage), Error> {
        self.learn_sandbox_image().await;
        // Use is queried after the list, so that an image that came into use in between counts as used.
        let images = self.parts.runtime.images.list().await?;
        let usage = self.usage().await?;
        self.publish_list(&images);
        let first = self.known.began.is_none();
        let before = self.known.clone();
        gc::follow_clock(self.known.times(), self.clock.step(now), now);
        self.known.began.get_or_insert(now);
        let listed = images.iter().map(|image| ListedImage {
            id: &image.id,
            size_bytes: image.size,
            pinned: image.pinned,
        });
        let used: HashSet<&str> =
            images.iter().filter(|image| usage.has(image)).map(|image| image.id.as_str()).collect();
        gc::detect(&mut self.known.images, listed, &used, now, first);
        if self.known != before
            && let Err(error) = records::store(&self.parts.state, &self.known).await
        {
            warn!(
                %error,
                "cannot store image ages; a restart of the agent restores older ones"
            );
        }
        Ok((images, usage))
    }

    async fn usage(&self) -> Result<Usage, Error> {
        let table = Arc::clone(&self.parts.table.borrow());
        Ok(Usage::query(&self.parts.runtime, &table, self.sandbox_image.as_deref()).await?)
    }

    /// Reads the name of the sandbox image once: the runtime reads its configuration only at its start.
    async fn learn_sandbox_image(&mut self) {
        if self.sandbox_image.is_none()
            && let Ok(status) = self.parts.runtime.status(true).await
        {
            self.sandbox_image = sandbox_image(&status);
        }
    }

    /// Runs one collection, from the scan of all images to the low threshold.
    async fn collect_once(&mut self, request: ImageGcRequest) -> Result<Collected, Error> {
        // Read after the scan, so that no image is younger than `now`.
        let (images, usage) = self.detect(Timestamp::now()).await?;
        let now = Timestamp::now();
        let records: Vec<ImageRecord> = self.known.images.values().cloned().collect();
        let listed: HashMap<&str, &cri::Image> =
            images.iter().map(|image| (image.id.as_str(), image)).collect();
        let in_use: HashSet<&str> = images
            .iter()
            .filter(|image| usage.has(image) || self.parts.leases.any_held(names(image)))
            .map(|image| image.id.as_str())
            .collect();
        let mode = if request.all_unused {
            CollectionMode::AllUnused
        } else {
            let up = self.started.elapsed();
            CollectionMode::Policy { began: self.parts.policy.began(self.known.began, up, PERIOD, now) }
        };
        let policy = self.parts.policy;
        let mut run = Collection::new(&policy, mode, now, &records, &in_use);
        let mut gone = Vec::new();
        let mut freed = Freed::default();
        loop {
            match run.step() {
                CollectionStep::Measure => {
                    let fs = self.measure().await?;
                    freed.begin(fs);
                    run.measured(fs);
                }
                CollectionStep::Remove(image, reason) => {
                    let listed = listed.get(image.id.as_str()).copied();
                    let removed = match listed {
                        _ if request.dry_run => Removed::Freed(image.size_bytes),
                        Some(listed) => self.remove(listed, &mut freed).await,
                        None => Removed::InUse,
                    };
                    match removed {
                        Removed::Freed(bytes) => {
                            gone.push(collected(image, listed, reason, bytes));
                            if !request.dry_run {
                                let image = gone.last().map(|image| image.names.join(", "));
                                info!(image, freed_bytes = bytes, ?reason, "removed an image");
                                self.parts.metrics.collected(word(reason), bytes);
                            }
                            run.removed(bytes);
                        }
                        Removed::InUse => run.spared(),
                        Removed::Failed(message) => run.failed(&message),
                    }
                }
                CollectionStep::Done => return Ok(Collected { outcome: run.outcome(), images: gone }),
            }
        }
    }

    /// Removes one image if it is really unused. The removal lease keeps new users away until it is done.
    async fn remove(&mut self, listed: &cri::Image, freed: &mut Freed) -> Removed {
        // The image may have got other names since it was listed.
        let current = match self.parts.runtime.images.status(&listed.id).await {
            Ok(Some(current)) => current,
            // Another client has removed the image.
            Ok(None) => return Removed::InUse,
            Err(error) => return Removed::Failed(error.to_string()),
        };
        let Some(removal) = self.parts.leases.begin_removal(names(&current)) else { return Removed::InUse };
        match self.usage().await {
            Ok(usage) if usage.has(&current) => return Removed::InUse,
            Ok(_) => {}
            Err(error) => return Removed::Failed(error.to_string()),
        }
        let before = if freed.has_begun() { None } else { self.measure().await.ok() };
        if let Some(fs) = before {
            freed.begin(fs);
        }
        let removed = self.parts.runtime.images.remove(&listed.id).await;
        drop(removal);
        if let Err(error) = removed {
            return Removed::Failed(error.to_string());
        }
        self.known.images.remove(&listed.id);
        match self.measure().await {
            Ok(fs) => Removed::Freed(freed.more(fs)),
            Err(error) => {
                warn!(%error, "cannot measure how much a removal freed; counting the image's size");
                Removed::Freed(listed.size)
            }
        }
    }

    /// Measures the images' file system at the path that the runtime reports.
    async fn measure(&mut self) -> Result<FsUsage, Error> {
        let path = match &self.mountpoint {
            Some(path) => path.clone(),
            None => {
                let info = self.parts.runtime.images.fs_info().await?;
                let path = image_mountpoint(&info).map(PathBuf::from).ok_or(Error::NoMountpoint)?;
                self.mountpoint.insert(path).clone()
            }
        };
        let measured = self.parts.space.measure(&path).await;
        if measured.is_err() {
            // The runtime may report another path next time.
            self.mountpoint = None;
        }
        Ok(measured?.bytes)
    }
}

/// Space freed by a run: the growth of the available bytes since its beginning. Space that other processes
/// take in the meantime does not count as freed.
#[derive(Debug, Default)]
struct Freed {
    began_with: Option<u64>,
    reported: u64,
}

impl Freed {
    fn begin(&mut self, fs: FsUsage) {
        *self = Self { began_with: Some(fs.available_bytes), reported: 0 };
    }

    fn has_begun(&self) -> bool {
        self.began_with.is_some()
    }

    /// Returns the bytes freed since the last call.
    fn more(&mut self, fs: FsUsage) -> u64 {
        let Some(began_with) = self.began_with else { return 0 };
        let all = fs.available_bytes.saturating_sub(began_with);
        let more = all.saturating_sub(self.reported);
        self.reported = self.reported.max(all);
        more
    }
}

fn collected(
    image: &ImageRecord,
    listed: Option<&cri::Image>,
    reason: Reason,
    freed_bytes: u64,
) -> CollectedImage {
    let names = listed.map_or(&[][..], |listed| match listed.repo_tags.as_slice() {
        [] => &listed.repo_digests,
        tags => tags,
    });
    CollectedImage {
        id: image.id.clone(),
        names: names.to_vec(),
        size_bytes: image.size_bytes,
        freed_bytes,
        reason: word(reason),
    }
}

fn word(reason: Reason) -> &'static str {
    match reason {
        Reason::Age => "age",
        Reason::Space => "space",
    }
}

/// Summarizes a collection in one sentence.
fn summary(images: &[CollectedImage]) -> String {
    /// Maximum number of names in the sentence.
    const MOST: usize = 5;
    let freed = images.iter().fold(0_u64, |sum, image| sum.saturating_add(image.freed_bytes));
    let name = |image: &CollectedImage| image.names.first().unwrap_or(&image.id).clone();
    let names: Vec<String> = images.iter().take(MOST).map(name).collect();
    let more = match images.len().saturating_sub(MOST) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("Removed unused images and freed {} MiB: {}{more}", freed >> 20, names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fs(available_bytes: u64) -> FsUsage {
        FsUsage { capacity_bytes: 100, available_bytes }
    }

    #[test]
    fn only_growth_of_what_is_available_counts_as_freed() {
        let mut freed = Freed::default();
        assert_eq!(freed.more(fs(50)), 0);
        freed.begin(fs(10));
        assert_eq!(freed.more(fs(30)), 20);
        // Another process wrote more than was freed.
        assert_eq!(freed.more(fs(25)), 0);
        assert_eq!(freed.more(fs(31)), 1);
        assert_eq!(freed.more(fs(40)), 9);
    }
}
