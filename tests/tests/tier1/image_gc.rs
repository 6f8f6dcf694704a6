//! Garbage collection of images against a scripted runtime: removed images, kept images, and a guarantee that
//! images of a container, existing or about to start, are kept.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beelet_base::filesystem::{Space, Statvfs};
use beelet_cri::Runtime;
use beelet_images::access::Access;
use beelet_images::credentials::Keys;
use beelet_images::pull::{Limits, Puller, Wanted};
use beelet_images::{Handle, ImageGc, ImageGcRequest, Leases, Metrics, Parts};
use beelet_model::table::{PodEntry, PodName, PodTable, Pods};
use beelet_policy::images::{
    credentials::Verification,
    gc::{Collection, CollectionMode, CollectionStep, ImageGcPolicy, ImageRecord},
};
use beelet_proto::cri;
use beelet_state::State;
use beelet_state::events::{NodeEvents, Recorder};
use beelet_tests::cri::{Asked, FakeCri, Op};
use beelet_units::fs_usage::FsUsage;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Code;

const SIZE: u64 = 1_000_000;
const CAPACITY: u64 = 100 * SIZE;

/// A collector on a fake runtime, whose file system has less space with each image.
struct Node {
    cri: Arc<FakeCri>,
    runtime: Runtime,
    leases: Leases,
    gc: Handle,
    events: Recorder,
    table: watch::Sender<Arc<PodTable>>,
    life: Option<Life>,
    setup: Setup,
    dir: tempfile::TempDir,
}

/// Run of the collector.
struct Life {
    gc: Handle,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Life {
    fn begin(
        setup: &Setup,
        cri: &Arc<FakeCri>,
        runtime: &Runtime,
        leases: &Leases,
        (events, table): (&Recorder, &watch::Sender<Arc<PodTable>>),
        dir: &Path,
    ) -> Self {
        let (world, shared, capacity_bytes) = (Arc::clone(cri), setup.shared, setup.capacity);
        let space = Space::by(move |path: &Path| {
            assert_eq!(path, Path::new("/images"));
            let used: u64 = world.world().images.values().map(|image| shared(image.size)).sum();
            let bytes = FsUsage { capacity_bytes, available_bytes: capacity_bytes.saturating_sub(used) };
            Ok(Statvfs { bytes, inodes: 0, inodes_free: 0, read_only: false })
        });
        let (gc, handle) = ImageGc::new(Parts {
            runtime: runtime.clone(),
            leases: leases.clone(),
            state: Arc::new(State::open(&dir.join("state")).unwrap()),
            table: table.subscribe(),
            policy: ImageGcPolicy::new(setup.high, setup.low, setup.min_age, setup.max_age).unwrap(),
            period: setup.period,
            space,
            events: NodeEvents::new(events.clone(), "n1"),
            metrics: Metrics::default(),
        });
        let shutdown = CancellationToken::new();
        Self { gc: handle, task: tokio::spawn(gc.run(shutdown.clone())), shutdown }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(life) = &self.life {
            life.shutdown.cancel();
        }
    }
}

/// Settings of a node.
struct Setup {
    high: i64,
    low: i64,
    min_age: Duration,
    max_age: Duration,
    period: Option<Duration>,
    /// Returns the bytes that an image takes on disk, from the size that the runtime reports.
    shared: fn(u64) -> u64,
    capacity: u64,
}

impl Default for Setup {
    fn default() -> Self {
        // With the shortest possible age, every image is old enough.
        let min_age = Duration::from_nanos(1);
        Self {
            high: 85,
            low: 80,
            min_age,
            max_age: Duration::ZERO,
            period: None,
            shared: |size| size,
            capacity: CAPACITY,
        }
    }
}

impl Node {
    fn new(setup: Setup) -> Self {
        let cri = Arc::new(FakeCri::start());
        let fs_id = Some(cri::FilesystemIdentifier { mountpoint: "/images".to_owned() });
        cri.change(|world| {
            world.image_fs.image_filesystems = vec![cri::FilesystemUsage { fs_id, ..Default::default() }];
        });
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime::new(&cri.endpoint(), Duration::from_secs(60)).unwrap();
        let (leases, events) = (Leases::default(), Recorder::default());
        let table = watch::Sender::new(Arc::new(PodTable::default()));
        let life = Life::begin(&setup, &cri, &runtime, &leases, (&events, &table), dir.path());
        let gc = life.gc.clone();
        Self { cri, runtime, leases, gc, events, table, life: Some(life), setup, dir }
    }

    /// Ends the agent and starts it again.
    async fn restart(&mut self) {
        let life = self.life.take().unwrap();
        life.shutdown.cancel();
        life.task.await.unwrap();
        let seen = (&self.events, &self.table);
        let life = Life::begin(&self.setup, &self.cri, &self.runtime, &self.leases, seen, self.dir.path());
        self.gc = life.gc.clone();
        self.life = Some(life);
    }

    /// Adds images `i0`, `i1`, … of one size.
    fn images(&self, count: usize) {
        for i in 0..count {
            self.cri.add_image(&format!("i{i:03}"));
        }
        self.cri.change(|world| world.images.values_mut().for_each(|image| image.size = SIZE));
    }

    fn left(&self) -> usize {
        self.cri.world().images.len()
    }

    async fn sandbox(&self) -> String {
        let metadata =
            cri::PodSandboxMetadata { name: "p".to_owned(), uid: "u".to_owned(), ..Default::default() };
        let config = cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() };
        self.runtime.sandboxes.run(config, "").await.unwrap()
    }

    /// Creates a container, as a worker does once it has the image.
    async fn create(&self, sandbox: &str, name: &str, image: &str) -> Result<String, String> {
        let spec = cri::ImageSpec { image: image.to_owned(), ..Default::default() };
        let config = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
            image: Some(spec),
            ..Default::default()
        };
        let of = cri::PodSandboxConfig::default();
        self.runtime.containers.create(sandbox, config, &of).await.map_err(|error| error.to_string())
    }

    /// Sets the node's only pod, with this image as a volume and this phase.
    fn mounts(&self, image: &str, phase: &str) {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": "p", "namespace": "default", "uid": "u" },
            "spec": { "containers": [], "volumes": [{ "name": "v", "image": { "reference": image } }] },
            "status": { "phase": phase },
        }))
        .unwrap();
        let name = PodName::of(&pod);
        let entry = Arc::new(PodEntry::of(pod));
        self.table.send_modify(|table| Arc::make_mut(table).pods = Pods::unit(name, entry));
    }

    fn reasons(&self) -> Vec<String> {
        self.events.subscribe().borrow().all().iter().map(|event| event.reason.clone()).collect()
    }
}

#[tokio::test]
async fn below_the_high_mark_no_image_is_removed() {
    let node = Node::new(Setup::default());
    node.images(84);
    let collected = node.gc.collect(ImageGcRequest::default()).await.unwrap();
    assert_eq!((collected.outcome.usage_percent, collected.images.len()), (Some(84), 0));
    assert_eq!(node.left(), 84);
}

#[tokio::test]
async fn a_run_follows_its_plan_and_ends_at_the_low_mark() {
    let node = Node::new(Setup::default());
    node.images(90);
    let sandbox = node.sandbox().await;
    node.create(&sandbox, "c", "i000").await.unwrap();
    let planned =
        node.gc.collect(ImageGcRequest { dry_run: true, ..ImageGcRequest::default() }).await.unwrap();
    assert_eq!(node.left(), 90, "the dry run removed images");
    let collected = node.gc.collect(ImageGcRequest::default()).await.unwrap();
    let ids = |images: &[beelet_images::gc::CollectedImage]| -> Vec<String> {
        images.iter().map(|image| image.id.clone()).collect()
    };
    assert_eq!(ids(&collected.images), ids(&planned.images));
    assert_eq!((collected.images.len(), node.left()), (10, 80));
    assert!(
        node.cri.world().images.contains_key("docker.io/library/i000:latest"),
        "an image in use was removed"
    );
    assert_eq!(collected.outcome.freed_bytes, 10 * SIZE);
}

/// The order of the daemon is that of `policy`.
#[tokio::test]
async fn the_daemon_and_the_policy_choose_alike() {
    let node = Node::new(Setup::default());
    node.images(95);
    let records: Vec<ImageRecord> = node
        .cri
        .world()
        .images
        .values()
        .map(|image| ImageRecord {
            id: image.id.clone(),
            size_bytes: image.size,
            pinned: false,
            first_detected: None,
            last_used: None,
        })
        .collect();
    let policy = ImageGcPolicy::new(85, 80, Duration::from_nanos(1), Duration::ZERO).unwrap();
    let none = std::collections::HashSet::<&str>::new();
    let mode = CollectionMode::Policy { began: None };
    let mut plan = Collection::new(&policy, mode, "2026-11-21T12:00:00Z".parse().unwrap(), &records, &none);
    loop {
        match plan.step() {
            CollectionStep::Remove(image, _) => plan.removed(image.size_bytes),
            CollectionStep::Measure => {
                plan.measured(FsUsage { capacity_bytes: CAPACITY, available_bytes: 5 * SIZE });
            }
            CollectionStep::Done => break,
        }
    }
    let collected = node.gc.collect(ImageGcRequest::default()).await.unwrap();
    assert_eq!(collected.outcome.removed, plan.outcome().removed);
}

#[tokio::test]
async fn a_run_removes_only_the_computed_size_and_the_next_run_continues() {
    // Nine tenths of each image are layers that other images share.
    let node = Node::new(Setup { shared: |size| size / 10, high: 8, low: 5, ..Setup::default() });
    node.images(90);
    let collected = node.gc.collect(ImageGcRequest::default()).await.unwrap();
    assert_eq!(
        (collected.images.len(), node.left()),
        (4, 86),
        "4 % are over, and each image is reported as 1 %"
    );
    assert!(collected.outcome.error.is_none());
    let freed: u64 = collected.images.iter().map(|image| image.freed_bytes).sum();
    assert_eq!(freed, collected.outcome.freed_bytes, "the reported bytes differ from the measured ones");
    assert_eq!(freed, 4 * SIZE / 10);
    // The disk is still above the high mark.
    while node.left() > 79 {
        let left = node.left();
        node.gc.collect(ImageGcRequest::default()).await.unwrap();
        assert!(node.left() < left);
    }
}

#[tokio::test]
async fn a_leased_image_stays_and_a_removal_that_fails_does_not_end_the_run() {
    let node = Node::new(Setup::default());
    node.images(90);
    let lease = node.leases.acquire("i089").await;
    let refused = |asked: &Asked| matches!(asked, Asked::RemoveImage(_));
    node.cri.on(Op::RemoveImage).when(refused).fail(Code::Unknown, "image is busy");
    let collected =
        node.gc.collect(ImageGcRequest { all_unused: true, ..ImageGcRequest::default() }).await.unwrap();
    assert_eq!(node.left(), 2, "left: the leased image and the one that could not be removed");
    assert!(collected.outcome.error.unwrap().contains("image is busy"));
    assert!(node.cri.world().images.contains_key("docker.io/library/i089:latest"));
    drop(lease);
    node.gc.collect(ImageGcRequest { all_unused: true, ..ImageGcRequest::default() }).await.unwrap();
    assert_eq!(node.left(), 0);
}

#[tokio::test]
async fn an_image_that_a_pod_has_as_a_volume_stays_until_the_pod_has_ended() {
    let node = Node::new(Setup::default());
    node.images(2);
    let all = ImageGcRequest { all_unused: true, ..ImageGcRequest::default() };
    node.mounts("i001", "Running");
    node.gc.collect(all).await.unwrap();
    assert_eq!(node.cri.world().images.into_keys().collect::<Vec<_>>(), ["docker.io/library/i001:latest"]);
    node.mounts("i001", "Succeeded");
    node.gc.collect(all).await.unwrap();
    assert_eq!(node.left(), 0);
}

#[tokio::test]
async fn an_image_that_becomes_a_volume_after_the_plan_is_spared() {
    let node = Arc::new(Node::new(Setup::default()));
    node.images(1);
    let held = node.cri.on(Op::ImageStatus).hold();
    let collecting = tokio::spawn({
        let gc = node.gc.clone();
        async move { gc.collect(ImageGcRequest { all_unused: true, ..ImageGcRequest::default() }).await }
    });
    held.reached().await;
    node.mounts("docker.io/library/i000", "Pending");
    held.release();
    assert_eq!(collecting.await.unwrap().unwrap().images.len(), 0);
}

#[tokio::test]
async fn an_image_that_comes_into_use_after_the_plan_is_spared() {
    let node = Arc::new(Node::new(Setup::default()));
    node.images(3);
    let sandbox = node.sandbox().await;
    // The collection has decided and is about to inspect the first image.
    let held = node.cri.on(Op::ImageStatus).hold();
    let collecting = tokio::spawn({
        let gc = node.gc.clone();
        async move { gc.collect(ImageGcRequest { all_unused: true, ..ImageGcRequest::default() }).await }
    });
    held.reached().await;
    for i in 0..3 {
        node.create(&sandbox, &format!("c{i}"), &format!("i{i:03}")).await.unwrap();
    }
    held.release();
    let collected = collecting.await.unwrap().unwrap();
    assert_eq!((collected.images.len(), node.left()), (0, 3));
}

#[tokio::test]
async fn ages_survive_a_restart_and_young_images_stay() {
    let mut node = Node::new(Setup { min_age: Duration::from_secs(3600), ..Setup::default() });
    // Images that exist at the first collection count as old.
    node.images(2);
    let look = ImageGcRequest { dry_run: true, ..ImageGcRequest::default() };
    node.gc.collect(look).await.unwrap();
    node.cri.add_image("young");
    node.gc.collect(look).await.unwrap();
    node.restart().await;
    let all = ImageGcRequest { all_unused: true, ..ImageGcRequest::default() };
    assert_eq!(node.gc.collect(all).await.unwrap().images.len(), 2);
    let left: Vec<String> = node.cri.world().images.into_keys().collect();
    assert_eq!(left, ["docker.io/library/young:latest"]);
    // Without the record all images count as old again.
    let record = node.dir.path().join("state/images.json");
    std::fs::write(&record, "half a rec").unwrap();
    node.restart().await;
    assert_eq!(node.gc.collect(all).await.unwrap().images.len(), 1);
}

/// As in the kubelet's own test: a restart must not remove images that were in use just before.
#[tokio::test]
async fn after_a_restart_no_image_is_removed_for_its_age_too_early() {
    let max_age = Duration::from_secs(2);
    let mut started = Instant::now();
    let mut node = Node::new(Setup { max_age, ..Setup::default() });
    let gone = async |node: &Node| node.gc.collect(ImageGcRequest::default()).await.unwrap().images.len();
    for life in 0..2 {
        node.images(2);
        assert_eq!(gone(&node).await, 0, "run {life}");
        while gone(&node).await == 0 {
            assert!(started.elapsed() < Duration::from_secs(60), "run {life}: the images were not removed");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(
            started.elapsed() >= max_age,
            "run {life}: the images were removed after {:?}",
            started.elapsed()
        );
        // After that time, images are removed without further delay.
        node.images(2);
        assert_eq!(gone(&node).await, 2, "run {life}");
        started = Instant::now();
        node.restart().await;
    }
}

#[tokio::test]
async fn a_first_failure_is_only_logged_and_the_next_ones_are_events() {
    let period = Some(Duration::from_millis(20));
    let node = Node::new(Setup { period, ..Setup::default() });
    node.images(1);
    node.cri.on(Op::ListImages).always().fail(Code::Unavailable, "the store is locked");
    let mut log = node.events.subscribe();
    let failed = tokio::time::timeout(
        beelet_tests::cri::PATIENCE,
        log.wait_for(|log| log.all().iter().any(|event| event.reason == "ImageGCFailed" && event.count >= 2)),
    );
    failed.await.unwrap().unwrap();
    drop(log);
    assert_eq!(node.reasons(), ["ImageGCFailed"]);
}

#[tokio::test]
async fn a_store_without_capacity_and_one_that_can_not_be_freed_are_events() {
    let node = Node::new(Setup::default());
    node.images(90);
    let sandbox = node.sandbox().await;
    for i in 0..90 {
        node.create(&sandbox, &format!("c{i}"), &format!("i{i:03}")).await.unwrap();
    }
    let collected = node.gc.collect(ImageGcRequest::default()).await.unwrap();
    assert!(collected.outcome.error.unwrap().starts_with("Insufficient free disk space"));
    assert_eq!(node.reasons(), ["FreeDiskSpaceFailed"]);
    let node = Node::new(Setup { capacity: 0, ..Setup::default() });
    node.images(1);
    assert!(node.gc.collect(ImageGcRequest::default()).await.unwrap().outcome.error.is_some());
    assert_eq!(node.reasons(), ["InvalidDiskCapacity"]);
    assert_eq!(node.left(), 1);
}

/// The decisive race: containers start from old and new images while unused ones are removed as fast as
/// possible.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_ten_thousand_starts_no_image_is_removed_before_its_container_exists() {
    const STARTS: usize = 10_000;
    const WORKERS: usize = 8;
    const IMAGES: usize = 12;
    let node = Arc::new(Node::new(Setup::default()));
    for i in 0..IMAGES {
        node.cri.add_to_registry(&format!("i{i:03}"));
    }
    let sandbox = node.sandbox().await;
    let over = CancellationToken::new();
    let collecting = tokio::spawn({
        let (gc, over) = (node.gc.clone(), over.clone());
        async move {
            let mut removed = 0;
            while !over.is_cancelled() {
                let request = ImageGcRequest { all_unused: true, dry_run: false };
                removed += gc.collect(request).await.unwrap().images.len();
            }
            removed
        }
    });
    // The removals are not throttled: only their order is as on a real node.
    let unlimited = Limits { parallel: None, per_second: 0.0, burst: 1 };
    let records = tempfile::tempdir().unwrap();
    let access = Arc::new(Access::new(records.path(), Verification::default(), Metrics::default().pulls));
    let puller = Arc::new(Puller::new(node.runtime.clone(), unlimited, Keys::default(), access));
    let workers: Vec<_> = (0..WORKERS)
        .map(|worker| {
            let (node, puller, sandbox) = (Arc::clone(&node), Arc::clone(&puller), sandbox.clone());
            tokio::spawn(async move {
                let mut random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(worker as u64 + 1);
                for start in 0..STARTS / WORKERS {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let image = format!("i{:03}", random % IMAGES as u64);
                    start_one(&node, &puller, &sandbox, &format!("w{worker}-{start}"), &image).await;
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    over.cancel();
    let removed = collecting.await.unwrap();
    let failed = node.cri.calls().iter().filter(|c| c.op() == Op::CreateContainer && !c.succeeded()).count();
    assert_eq!(failed, 0);
    let pulls = node.cri.count(Op::PullImage);
    assert!(
        pulls > STARTS / 100,
        "only {pulls} pulls: hardly any images were removed: the test shows nothing"
    );
    println!("{STARTS} starts, {pulls} pulls, {removed} removals");
}

/// Acts as a pod's worker: leases the image until the container exists, and then removes the container.
async fn start_one(node: &Node, puller: &Puller, sandbox: &str, name: &str, image: &str) {
    let of = cri::PodSandboxConfig::default();
    let policy = "IfNotPresent";
    let wanted =
        Wanted { image, policy, sandbox: &of, secrets: Vec::new(), service_account: "", tell: &|_| {} };
    let leased = puller.leased(&node.leases, &wanted).await;
    let (image, lease) = leased.unwrap_or_else(|error| panic!("{name}: {}", error.message));
    let container =
        node.create(sandbox, name, &image.id).await.unwrap_or_else(|error| panic!("{name}: {error}"));
    drop(lease);
    node.runtime.containers.remove(&container).await.unwrap();
}
