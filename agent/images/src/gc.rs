//! Removes images: the kubelet's image garbage collection (`pkg/kubelet/images/image_gc_manager.go`) made to
//! act.
//!
//! `beelet_policy::images::gc` names one image at a time; here it is asked again whether the image is in use,
//! it is removed, and what that freed is measured on the file system. One task does it all, one removal at a
//! time. Must never remove an image without a [`super::lease::Removal`] in its hand and without having looked
//! for its users after that.

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

/// Between two looks at all images, and between two collections, as the kubelet's.
pub const PERIOD: Duration = Duration::from_secs(300);
/// How old the list of images may get that others are shown, as the kubelet's.
const LIST_PERIOD: Duration = Duration::from_secs(30);
/// Between the first look and the first collection: workers that start containers at the same time go first.
const SETTLING: Duration = Duration::from_secs(1);

/// Asks the collector of images; clones ask the same one.
pub type Handle = collector::Handle<ImageGcRequest, Collected>;

/// What image garbage collection needs from the rest of the node.
#[derive(Debug)]
pub struct Parts {
    /// The runtime.
    pub runtime: Runtime,
    /// Images that containers are about to be made from.
    pub leases: Leases,
    /// Where ages are kept.
    pub state: Arc<State>,
    /// All pods, for their volumes.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// When what goes.
    pub policy: ImageGcPolicy,
    /// How often it collects by itself; None: only when asked.
    pub period: Option<Duration>,
    /// How file systems are measured.
    pub space: Space,
    /// What people should know.
    pub events: NodeEvents,
    /// Counters and gauges.
    pub metrics: Metrics,
}

/// Options of one collection of images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageGcRequest {
    /// Remove everything that is unused and not too young, whatever space there is.
    pub all_unused: bool,
    /// Only say what would go.
    pub dry_run: bool,
}

/// The outcome of a collection of images.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// The policy's judgement of it.
    pub outcome: Outcome,
    /// The images that went (or would go), in order.
    pub images: Vec<CollectedImage>,
}

/// An image that went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectedImage {
    /// Its id.
    pub id: String,
    /// Its tags, or its digests where it has none.
    pub names: Vec<String>,
    /// Its size as the runtime said it, in bytes.
    pub size_bytes: u64,
    /// Bytes freed by its removal: measured, or in a dry run its size.
    pub freed_bytes: u64,
    /// `age` or `space`.
    pub reason: &'static str,
}

/// Ages and users of the images on this node, and their removal.
#[derive(Debug)]
pub struct ImageGc {
    parts: Parts,
    known: ImageRecords,
    /// When this life of the agent began to look.
    started: Instant,
    /// Ages are told by the wall's clock, for they outlive the machine's run. It may be set.
    clock: WallClock,
    /// Where images are, once the runtime has said it.
    mountpoint: Option<PathBuf>,
    sandbox_image: Option<String>,
    /// The last collection failed: the next failure is an event.
    failed_before: bool,
}

/// What became of one removal.
enum Removed {
    Freed(u64),
    InUse,
    Failed(String),
}

/// When images are looked at, collected and listed without a request.
#[derive(Debug)]
pub struct Timers {
    looks: Interval,
    /// None: only when asked.
    collections: Option<Interval>,
    lists: Interval,
}

/// What is due by the [`Timers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Bring ages up to date.
    Look,
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
        // The first look comes first.
        let first = |period: Duration| Instant::now().after(period.min(SETTLING));
        Timers {
            looks: often(interval(PERIOD)),
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
            _ = timers.looks.tick() => Due::Look,
            () = collection => Due::Collection,
            _ = timers.lists.tick() => Due::List,
        }
    }

    async fn work(&mut self, due: Due) {
        match due {
            Due::Look => self.look_around().await,
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
    /// Works until `shutdown`. Requests come before what is due.
    pub fn run(self, shutdown: CancellationToken) -> Work {
        self.working(shutdown)
    }
}

impl ImageGc {
    /// A collector that has not looked yet, and how to ask it.
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

    /// Brings ages up to date.
    async fn look_around(&mut self) {
        if let Err(error) = self.detect(Timestamp::now()).await {
            warn!(%error, "the images could not be looked at; their ages are as of the last time");
        }
    }

    async fn list(&mut self) {
        match self.parts.runtime.list_images().await {
            Ok(images) => self.note_list(&images),
            Err(error) => warn!(%error, "the images could not be listed"),
        }
    }

    fn note_list(&self, images: &[cri::Image]) {
        let bytes = images.iter().fold(0_u64, |sum, image| sum.saturating_add(image.size));
        self.parts.metrics.listed(images.len(), bytes);
    }

    /// As the kubelet reports it: a first failure is only logged, the next ones are events.
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
            warn!(error, "image garbage collection failed; it is tried again");
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

    /// Looks at all images and their users; brings the records up to date.
    async fn detect(&mut self, now: Timestamp) -> Result<(Vec<cri::Image>, Usage), Error> {
        self.learn_sandbox_image().await;
        // Use is asked for after the list: an image that came into use in between counts as used.
        let images = self.parts.runtime.list_images().await?;
        let usage = self.usage().await?;
        self.note_list(&images);
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
                "the ages of images could not be kept; after a restart of the agent they are older ones"
            );
        }
        Ok((images, usage))
    }

    async fn usage(&self) -> Result<Usage, Error> {
        let table = Arc::clone(&self.parts.table.borrow());
        Ok(Usage::look(&self.parts.runtime, &table, self.sandbox_image.as_deref()).await?)
    }

    /// Once: the runtime reads its configuration when it starts, and a restart of it is a restart of nothing
    /// here.
    async fn learn_sandbox_image(&mut self) {
        if self.sandbox_image.is_none()
            && let Ok(status) = self.parts.runtime.status(true).await
        {
            self.sandbox_image = sandbox_image(&status);
        }
    }

    /// One run, from the look at everything to the low mark.
    async fn collect_once(&mut self, request: ImageGcRequest) -> Result<Collected, Error> {
        // Nothing is younger than the run that looks for it.
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
                                info!(image, freed_bytes = bytes, ?reason, "image is removed");
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

    /// Removes one image, if really nobody has it: nobody can come to have it while this lasts.
    async fn remove(&mut self, listed: &cri::Image, freed: &mut Freed) -> Removed {
        // Its names as of now: it may have got others since it was listed.
        let current = match self.parts.runtime.image_status(&listed.id).await {
            Ok(Some(current)) => current,
            // Somebody else removed it.
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
        let removed = self.parts.runtime.remove_image(&listed.id).await;
        drop(removal);
        if let Err(error) = removed {
            return Removed::Failed(error.to_string());
        }
        self.known.images.remove(&listed.id);
        match self.measure().await {
            Ok(fs) => Removed::Freed(freed.more(fs)),
            Err(error) => {
                warn!(%error, "cannot measure what the removal freed; its size is taken for it");
                Removed::Freed(listed.size)
            }
        }
    }

    /// The images' file system, where the runtime says it is.
    async fn measure(&mut self) -> Result<FsUsage, Error> {
        let path = match &self.mountpoint {
            Some(path) => path.clone(),
            None => {
                let info = self.parts.runtime.image_fs_info().await?;
                let path = image_mountpoint(&info).map(PathBuf::from).ok_or(Error::NoMountpoint)?;
                self.mountpoint.insert(path).clone()
            }
        };
        let measured = self.parts.space.measure(&path).await;
        if measured.is_err() {
            // The runtime may have another place next time.
            self.mountpoint = None;
        }
        Ok(measured?.bytes)
    }
}

/// What a run has freed: the growth of what is available since its beginning. Others fill the disk meanwhile,
/// and what they take was not freed.
#[derive(Debug, Default)]
struct Freed {
    began_with: Option<u64>,
    told: u64,
}

impl Freed {
    fn begin(&mut self, fs: FsUsage) {
        *self = Self { began_with: Some(fs.available_bytes), told: 0 };
    }

    fn has_begun(&self) -> bool {
        self.began_with.is_some()
    }

    /// What is new since it was last asked.
    fn more(&mut self, fs: FsUsage) -> u64 {
        let Some(began_with) = self.began_with else { return 0 };
        let all = fs.available_bytes.saturating_sub(began_with);
        let more = all.saturating_sub(self.told);
        self.told = self.told.max(all);
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

/// What a collection removed, in a sentence.
fn summary(images: &[CollectedImage]) -> String {
    /// More names than this make no sentence.
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
        // Somebody wrote more than went.
        assert_eq!(freed.more(fs(25)), 0);
        assert_eq!(freed.more(fs(31)), 1);
        assert_eq!(freed.more(fs(40)), 9);
    }
}
