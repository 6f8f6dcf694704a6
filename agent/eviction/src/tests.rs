use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use beelet_policy::{
    eviction::{NodeCondition, Observation, Signal, ThresholdValue},
    resources::{
        cgroups::{CgroupConfig, CgroupVersion, NodeAmounts},
        qos::{QosClass, qos_class},
    },
};
use beelet_units::quantity::Quantity;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1 as core;
use serde_json::{Value, json};

use super::{local_storage::ASKED, *};
use beelet_cgroups::{Cgroups, Hierarchy, Layout, Version};
use beelet_model::{
    disk::{PodDisk, Taken, WritableFile},
    table::{PodEntry, PodName},
};
use beelet_state::events::Recorder;

const MIB: i64 = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);
/// The machine of the tests: memory and disk in MiB.
const CAPACITY: i64 = 1000;

fn threshold(signal: Signal, text: &str, grace: u64) -> Threshold {
    let value = ThresholdValue::threshold(text).unwrap().unwrap();
    Threshold { signal, value, grace: Duration::from_secs(grace), min_reclaim: None }
}

/// What a gauge shows.
#[derive(Clone, Debug)]
enum Shows {
    /// So many MiB of the capacity.
    Mib(i64),
    /// Any numbers.
    Numbers(i64, i64),
    /// It can't be read.
    Error,
    /// It doesn't answer until the sender is gone.
    Hangs(Arc<Mutex<std::sync::mpsc::Receiver<()>>>),
}

type Dial = Arc<Mutex<Shows>>;

fn gauge(name: &'static str, signal: Signal, dial: &Dial) -> Gauge {
    let dial = Arc::clone(dial);
    Gauge::new(name, 5 * SECOND, move || {
        let shows = dial.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let units = Quantity::from_units;
        let seen = |available, capacity| {
            Ok([(signal, Observation { available: units(available), capacity: units(capacity) })].into())
        };
        match shows {
            Shows::Mib(available) => seen(available * MIB, CAPACITY * MIB),
            Shows::Numbers(available, capacity) => seen(available, capacity),
            Shows::Error => Err(Error::NoMemory),
            Shows::Hangs(until) => {
                let _ = until.lock().unwrap_or_else(PoisonError::into_inner).recv();
                Err(Error::NoMemory)
            }
        }
    })
}

/// What giving back does, and when it ends.
type OnReclaim = Arc<Mutex<Option<Box<dyn Fn(Reclaim) -> BoxFuture<'static, Reclaimed> + Send + Sync>>>>;

/// A node of plain folders: its dials, its pods, and what eviction asked for.
struct Node {
    memory: Dial,
    disk: Dial,
    /// The images' file system, where it is another one.
    images: Dial,
    table: watch::Sender<Arc<PodTable>>,
    requests: mpsc::Receiver<Request>,
    conditions: watch::Receiver<Conditions>,
    /// What was asked to be given back.
    reclaims: watch::Receiver<Vec<Reclaim>>,
    /// What giving back does.
    on_reclaim: OnReclaim,
    hints: Hints,
    metrics: Metrics,
    /// What pods have on disk.
    disks: DiskUsages,
    dir: tempfile::TempDir,
    running: Option<(CancellationToken, tokio::task::JoinHandle<()>)>,
}

impl Node {
    /// A node of one disk with these thresholds and pods `(name, spec, MiB of memory in use)`.
    fn start(thresholds: Vec<Threshold>, pods: &[(&str, Value, i64)]) -> Self {
        Self::start_on(DiskLayout::Single, thresholds, pods)
    }

    fn start_on(layout: DiskLayout, thresholds: Vec<Threshold>, pods: &[(&str, Value, i64)]) -> Self {
        let (mut node, eviction) = Self::build(layout, thresholds, pods);
        let shutdown = CancellationToken::new();
        node.running = Some((shutdown.clone(), tokio::spawn(eviction.run(shutdown))));
        node
    }

    /// The same whose eviction doesn't run by itself.
    fn build(
        file_systems: DiskLayout,
        thresholds: Vec<Threshold>,
        pods: &[(&str, Value, i64)],
    ) -> (Self, Eviction) {
        let dir = tempfile::tempdir().unwrap();
        for hierarchy in ["cpu", "memory"] {
            std::fs::create_dir_all(dir.path().join(hierarchy)).unwrap();
        }
        let hierarchy = |name: &str| Hierarchy {
            mount: dir.path().join(name),
            is_v2: false,
            controllers: [name.to_owned()].into(),
        };
        let layout =
            Layout { version: Version::V1, hierarchies: vec![hierarchy("cpu"), hierarchy("memory")] };
        let cgroups = Arc::new(Cgroups::over_folders(layout, "/").unwrap());
        let amount = Quantity::from_units(4);
        let config = CgroupConfig::new(
            CgroupVersion::V1,
            NodeAmounts::new(amount, Quantity::from_units(CAPACITY * MIB), Quantity::ZERO, Quantity::ZERO),
        );
        let dial = || Arc::new(Mutex::new(Shows::Mib(CAPACITY)));
        let (memory, disk, images) = (dial(), dial(), dial());
        let (requests_out, requests) = mpsc::channel(64);
        let (conditions_out, conditions) = watch::channel(Conditions::new());
        let (asked, reclaims) = watch::channel(Vec::new());
        let on_reclaim: OnReclaim = Arc::default();
        let effect = Arc::clone(&on_reclaim);
        let reclaimer: Reclaimer = Arc::new(move |step| {
            let effect = effect.lock().unwrap_or_else(PoisonError::into_inner);
            let work = effect.as_ref().map(|effect| effect(step));
            asked.send_modify(|steps| steps.push(step));
            Box::pin(async move {
                Ok(match work {
                    Some(work) => work.await,
                    None => Reclaimed::Now,
                })
            })
        });
        let (hints, metrics, disks) = (Hints::default(), Metrics::default(), DiskUsages::default());
        let table = watch::Sender::new(Arc::new(PodTable::default()));
        let eviction = Eviction::new(Parts {
            thresholds,
            transition: 300 * SECOND,
            max_pod_grace: None,
            gauges: vec![
                gauge("memory", Signal::MemoryAvailable, &memory).of_memory(),
                gauge("disk", Signal::NodeFsAvailable, &disk),
                gauge("images", Signal::ImageFsAvailable, &images),
            ],
            layout: watch::channel(file_systems).1,
            hints: hints.clone(),
            usage: PodUsages { cgroups, config, disk: disks.clone() },
            table: table.subscribe(),
            requests: requests_out,
            reclaimer,
            conditions: conditions_out,
            events: NodeEvents::new(Recorder::default(), "n1"),
            metrics: metrics.clone(),
        });
        let node = Self {
            memory,
            disk,
            images,
            table,
            requests,
            conditions,
            reclaims,
            on_reclaim,
            hints,
            metrics,
            disks,
            dir,
            running: None,
        };
        pods.iter().for_each(|(name, spec, mib)| node.add(name, spec, *mib));
        (node, eviction)
    }

    fn add(&self, name: &str, spec: &Value, mib: i64) {
        let mut all = json!({ "terminationGracePeriodSeconds": 40, "containers": [{ "name": "c" }] });
        for (field, value) in spec.as_object().into_iter().flatten() {
            all[field] = value.clone();
        }
        let pod: core::Pod = serde_json::from_value(json!({
            "metadata": { "name": name, "namespace": "default", "uid": name },
            "spec": all,
            "status": { "phase": "Running" },
        }))
        .unwrap();
        let class = match qos_class(&pod).unwrap() {
            QosClass::Guaranteed => "",
            QosClass::Burstable => "burstable/",
            QosClass::BestEffort => "besteffort/",
        };
        let folder = self.dir.path().join(format!("memory/kubepods/{class}pod{name}"));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::create_dir_all(self.dir.path().join(format!("cpu/kubepods/{class}pod{name}"))).unwrap();
        std::fs::write(folder.join("memory.usage_in_bytes"), (mib * MIB).to_string()).unwrap();
        std::fs::write(folder.join("memory.stat"), "total_inactive_file 0\n").unwrap();
        self.publish(pod);
    }

    /// The memory cgroup of a BestEffort pod.
    fn memory_of(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("memory/kubepods/besteffort/pod{name}"))
    }

    /// The pod has a container with a cgroup of its own, of this id.
    fn add_container(&self, name: &str, id: &str) -> PathBuf {
        let mut pod = self.pod(name);
        let status = json!({ "name": "c", "containerID": format!("containerd://{id}"), "image": "", "imageID": "", "ready": true, "restartCount": 0 });
        pod.status.as_mut().unwrap().container_statuses = Some(vec![serde_json::from_value(status).unwrap()]);
        self.publish(pod);
        let folder = self.memory_of(name).join(id);
        std::fs::create_dir_all(&folder).unwrap();
        let of_cpu = self.dir.path().join(format!("cpu/kubepods/besteffort/pod{name}/{id}"));
        std::fs::create_dir_all(of_cpu).unwrap();
        std::fs::write(folder.join("memory.usage_in_bytes"), MIB.to_string()).unwrap();
        std::fs::write(folder.join("memory.stat"), "total_inactive_file 0\n").unwrap();
        folder
    }

    fn pod(&self, name: &str) -> core::Pod {
        let name = PodName { namespace: "default".to_owned(), name: name.to_owned() };
        self.table.borrow().pods[&name].pod.clone()
    }

    fn publish(&self, pod: core::Pod) {
        self.publish_entry(PodEntry::of(pod));
    }

    fn publish_entry(&self, entry: PodEntry) {
        self.table.send_modify(|table| {
            let mut pods = table.pods.clone();
            pods.insert(PodName::of(&entry.pod), Arc::new(entry));
            *table = Arc::new(PodTable { pods, rejected: Arc::clone(&table.rejected) });
        });
    }

    /// So many MiB are found in the pod's volumes by a measurement that began at `began`.
    fn measured(&self, name: &str, began: Instant, mib: u64) {
        let taken = Taken { bytes: mib << 20, inodes: 1 };
        let disk = PodDisk { volumes: [("v".to_owned(), taken)].into(), ..PodDisk::default() };
        self.disks.put(name, began, disk);
    }

    /// Waits until all pods are to be measured anew; from when on that counts.
    async fn asked(&self, asked: &mut watch::Receiver<Option<Instant>>) -> Instant {
        tokio::time::timeout(600 * SECOND, asked.changed()).await.unwrap().unwrap();
        asked.borrow_and_update().unwrap()
    }

    /// Somebody has deleted the pod.
    fn delete(&self, name: &str) {
        let mut pod = self.pod(name);
        let now = jiff::Timestamp::now();
        pod.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now));
        self.publish(pod);
    }

    /// The pod has given everything back.
    fn gone(&self, name: &str) {
        let mut pod = self.pod(name);
        pod.status.as_mut().unwrap().phase = Some("Failed".to_owned());
        self.publish_entry(PodEntry { ending: true, stopped: true, cleared: true, ..PodEntry::of(pod) });
    }

    fn set(&self, dial: &Dial, shows: Shows) {
        *dial.lock().unwrap_or_else(PoisonError::into_inner) = shows;
        self.hints.notify();
    }

    /// The next pod that is told to go, with its grace period in seconds.
    async fn evicted(&mut self) -> (String, u64, String) {
        let Some(Request::Fail { uid, reason, message, grace }) = self.requests.recv().await else {
            panic!("eviction has ended");
        };
        assert_eq!(reason, "Evicted");
        (uid, grace.unwrap().as_secs(), message)
    }

    /// Whoever is told to go within so many seconds.
    async fn within(&mut self, seconds: u32) -> Vec<String> {
        let mut names = Vec::new();
        let deadline = Instant::now() + seconds * SECOND;
        while let Ok((name, ..)) = tokio::time::timeout_at(deadline, self.evicted()).await {
            names.push(name);
        }
        names
    }

    async fn until_condition(&mut self, condition: NodeCondition, holds: bool) {
        let wanted = |conditions: &Conditions| conditions.contains(&condition) == holds;
        tokio::time::timeout(600 * SECOND, self.conditions.wait_for(wanted)).await.unwrap().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some((shutdown, task)) = self.running.take() {
            shutdown.cancel();
            task.abort();
        }
    }
}

fn hard() -> Vec<Threshold> {
    vec![threshold(Signal::MemoryAvailable, "100Mi", 0), threshold(Signal::NodeFsAvailable, "100Mi", 0)]
}

fn three() -> [(&'static str, Value, i64); 3] {
    [("small", json!({}), 10), ("big", json!({}), 200), ("critical", json!({"priority": 2_000_000_000}), 500)]
}

#[tokio::test(start_paused = true)]
async fn low_memory_costs_the_pod_that_is_furthest_above_its_request() {
    let mut node = Node::start(hard(), &three());
    assert_eq!(node.within(30).await, Vec::<String>::new());
    node.set(&node.memory, Shows::Mib(90));
    let (name, grace, message) = node.evicted().await;
    assert_eq!((name.as_str(), grace), ("big", 1));
    assert_eq!(message, "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. ");
    node.until_condition(NodeCondition::MemoryPressure, true).await;
    assert_eq!(node.metrics.evictions(Signal::MemoryAvailable), 1);
    // What it frees is on its way: nobody else goes for it.
    assert_eq!(node.within(5).await, Vec::<String>::new());
    node.gone("big");
    node.set(&node.memory, Shows::Mib(290));
    assert_eq!(node.within(60).await, Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn conditions_last_for_the_transition_period() {
    let mut node = Node::start(hard(), &[]);
    node.set(&node.memory, Shows::Mib(90));
    node.until_condition(NodeCondition::MemoryPressure, true).await;
    node.set(&node.memory, Shows::Mib(500));
    tokio::time::sleep(295 * SECOND).await;
    assert!(node.conditions.borrow().contains(&NodeCondition::MemoryPressure));
    let fine = Instant::now();
    node.until_condition(NodeCondition::MemoryPressure, false).await;
    assert!(fine.elapsed() < 10 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn as_many_go_at_once_as_it_takes_and_never_a_critical_one() {
    let pods = [
        ("a", json!({}), 50),
        ("b", json!({}), 40),
        ("c", json!({}), 30),
        ("critical", json!({"priority": 2_000_000_000}), 500),
    ];
    let mut node = Node::start(hard(), &pods);
    node.set(&node.memory, Shows::Mib(20));
    assert_eq!(node.within(3).await, ["a", "b"]);
}

#[tokio::test(start_paused = true)]
async fn a_victim_that_will_not_go_is_replaced() {
    let mut node = Node::start(hard(), &three());
    node.set(&node.memory, Shows::Mib(90));
    assert_eq!(node.within(10).await, ["big"]);
    // A second of grace and ten of patience.
    assert_eq!(node.within(5).await, ["small"]);
}

#[tokio::test]
async fn what_a_victim_has_freed_since_the_number_was_read_costs_nobody_else_anything() {
    let (mut node, mut eviction) = Node::build(DiskLayout::Single, hard(), &three());
    let read = |eviction: &Eviction, available: i64| {
        let units = |mib: i64| Quantity::from_units(mib * MIB);
        let seen = Observation { available: units(available), capacity: units(CAPACITY) };
        eviction.board.put(&[(Signal::MemoryAvailable, seen)].into(), Instant::now(), 60 * SECOND);
    };
    read(&eviction, 90);
    eviction.decide().await;
    assert_eq!(node.evicted().await.0, "big");
    // Its processes have ended; its cgroup is still there, and the number is from before.
    std::fs::write(node.memory_of("big").join("memory.usage_in_bytes"), (MIB / 4).to_string()).unwrap();
    eviction.decide().await;
    eviction.decide().await;
    assert!(node.requests.try_recv().is_err(), "another goes for what is free already");
    // What was freed is in the number now, and is not enough.
    read(&eviction, 95);
    eviction.decide().await;
    assert_eq!(node.evicted().await.0, "small");
}

#[tokio::test(start_paused = true)]
async fn a_hard_threshold_acts_at_once_beside_a_soft_one_that_waits() {
    let mut thresholds = hard();
    thresholds.push(threshold(Signal::MemoryAvailable, "300Mi", 3600));
    let mut node = Node::start(thresholds, &three());
    node.set(&node.memory, Shows::Mib(200));
    node.until_condition(NodeCondition::MemoryPressure, true).await;
    assert_eq!(node.within(60).await, Vec::<String>::new(), "the soft one waits");
    node.set(&node.memory, Shows::Mib(90));
    let (name, grace, message) = node.evicted().await;
    assert_eq!((name.as_str(), grace), ("big", 1));
    assert!(message.contains("Threshold quantity: 100Mi"), "{message}");
}

#[tokio::test]
async fn under_a_soft_threshold_a_pod_gets_its_own_grace_period() {
    let mut node = Node::start(vec![threshold(Signal::MemoryAvailable, "300Mi", 1)], &three());
    node.set(&node.memory, Shows::Mib(200));
    let (name, grace, _) = node.evicted().await;
    assert_eq!((name.as_str(), grace), ("big", 40));
}

fn soft_and_hard() -> Vec<Threshold> {
    vec![threshold(Signal::MemoryAvailable, "300Mi", 1), threshold(Signal::MemoryAvailable, "100Mi", 0)]
}

#[tokio::test(start_paused = true)]
async fn a_hard_threshold_hastens_who_leaves_gently_under_a_soft_one() {
    let mut node = Node::start(soft_and_hard(), &three());
    node.set(&node.memory, Shows::Mib(200));
    let (name, grace, _) = node.evicted().await;
    assert_eq!((name.as_str(), grace), ("big", 40));
    assert_eq!(node.within(10).await, Vec::<String>::new());
    node.set(&node.memory, Shows::Mib(90));
    let (name, grace, message) = node.evicted().await;
    assert_eq!((name.as_str(), grace), ("big", 1));
    assert!(message.contains("Threshold quantity: 100Mi"), "{message}");
    assert_eq!(node.metrics.evictions(Signal::MemoryAvailable), 1, "it was evicted once");
    // Once is enough; and if it doesn't go now, others must.
    assert_eq!(node.within(10).await, Vec::<String>::new());
    assert_eq!(node.within(5).await, ["small"]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_deleted_counts_as_coming_and_is_hastened_by_a_hard_threshold() {
    let mut node = Node::start(soft_and_hard(), &three());
    node.delete("big");
    node.delete("critical");
    node.set(&node.memory, Shows::Mib(200));
    assert_eq!(node.within(10).await, Vec::<String>::new());
    node.set(&node.memory, Shows::Mib(90));
    let (name, grace, _) = node.evicted().await;
    assert_eq!((name.as_str(), grace), ("big", 1));
    assert_eq!(node.within(5).await, Vec::<String>::new());
    node.gone("big");
    assert_eq!(node.within(5).await, ["small"], "what was missing still is");
}

#[tokio::test(start_paused = true)]
async fn a_hard_threshold_hastens_no_more_deleted_pods_than_it_takes() {
    let pods = [("a", json!({}), 60), ("b", json!({}), 80), ("c", json!({}), 70)];
    let mut node = Node::start(hard(), &pods);
    pods.iter().for_each(|(name, ..)| node.delete(name));
    node.set(&node.memory, Shows::Mib(30));
    let (name, grace, _) = node.evicted().await;
    assert_eq!((name.as_str(), grace), ("b", 1));
    assert_eq!(node.within(5).await, Vec::<String>::new(), "the others keep their grace");
    node.gone("b");
    node.set(&node.memory, Shows::Mib(110));
    assert_eq!(node.within(30).await, Vec::<String>::new());
    // Memory is low again: pods are looked at again.
    node.set(&node.memory, Shows::Mib(90));
    assert_eq!(node.within(5).await, ["c"]);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_pod_below_its_request_keeps_its_grace_while_one_above_its_own_is_there() {
    let amounts = json!({"cpu": "1", "memory": "500Mi"});
    let container = json!({"name": "c", "resources": {"requests": amounts, "limits": amounts}});
    let guaranteed = json!({"containers": [container]});
    let mut node = Node::start(hard(), &[("deleted", guaranteed, 300), ("besteffort", json!({}), 200)]);
    node.delete("deleted");
    node.set(&node.memory, Shows::Mib(30));
    let (name, grace, _) = node.evicted().await;
    assert_eq!((name.as_str(), grace), ("besteffort", 1));
    assert_eq!(node.within(5).await, Vec::<String>::new());
    node.gone("besteffort");
    // That was not enough.
    node.set(&node.memory, Shows::Mib(60));
    assert_eq!(node.within(5).await, ["deleted"]);
}

#[tokio::test(start_paused = true)]
async fn numbers_that_lie_or_vanish_cost_nobody_anything() {
    let mut node = Node::start(hard(), &three());
    for shows in
        [Shows::Numbers(0, 0), Shows::Numbers(-1, -1), Shows::Numbers(i64::MAX, CAPACITY * MIB), Shows::Error]
    {
        node.set(&node.memory, shows.clone());
        assert_eq!(node.within(10).await, Vec::<String>::new(), "{shows:?}");
        assert!(node.conditions.borrow().is_empty(), "{shows:?}");
    }
    node.set(&node.memory, Shows::Mib(90));
    assert_eq!(node.evicted().await.0, "big");
}

#[tokio::test]
async fn a_number_that_hangs_hides_only_itself() {
    let mut node = Node::start(hard(), &three());
    let (release, hangs) = std::sync::mpsc::channel();
    node.set(&node.disk, Shows::Hangs(Arc::new(Mutex::new(hangs))));
    node.set(&node.memory, Shows::Mib(90));
    let evicted = tokio::time::timeout(60 * SECOND, node.evicted()).await.unwrap();
    assert_eq!(evicted.0, "big");
    drop(release);
}

#[tokio::test(start_paused = true)]
async fn the_disk_is_given_back_before_a_pod_goes() {
    let mut node = Node::start(hard(), &three());
    let (disk, hints) = (Arc::clone(&node.disk), node.hints.clone());
    *node.on_reclaim.lock().unwrap() = Some(Box::new(move |_| {
        *disk.lock().unwrap() = Shows::Mib(500);
        hints.notify();
        Box::pin(std::future::ready(Reclaimed::Now))
    }));
    node.set(&node.disk, Shows::Mib(50));
    node.until_condition(NodeCondition::DiskPressure, true).await;
    assert_eq!(node.within(120).await, Vec::<String>::new());
    assert_eq!(*node.reclaims.borrow(), [Reclaim::DeleteUnusedContainers, Reclaim::DeleteUnusedImages]);
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_was_relieved_and_is_short_again_is_given_back_again_before_a_pod_goes() {
    let mut node = Node::start(hard(), &three());
    let disk = Arc::clone(&node.disk);
    *node.on_reclaim.lock().unwrap() = Some(Box::new(move |step| {
        if step == Reclaim::DeleteUnusedImages {
            *disk.lock().unwrap() = Shows::Mib(500);
        }
        Box::pin(std::future::ready(Reclaimed::Now))
    }));
    // Images come again and again, each time soon after others were removed.
    for times in 1..=3 {
        node.set(&node.disk, Shows::Mib(50));
        node.reclaims.wait_for(|steps| steps.len() == 2 * times).await.unwrap();
        assert_eq!(node.within(5).await, Vec::<String>::new());
    }
    assert_eq!(node.reclaims.borrow().len(), 6);
    // What is short all the time after it was given back costs a pod; it is not tried again and again.
    *node.on_reclaim.lock().unwrap() = None;
    node.set(&node.disk, Shows::Mib(50));
    assert_eq!(node.within(20).await, ["big"]);
    assert_eq!(node.reclaims.borrow().len(), 8);
}

#[tokio::test(start_paused = true)]
async fn where_giving_back_is_not_enough_a_pod_goes() {
    let mut node = Node::start(hard(), &three());
    node.set(&node.disk, Shows::Mib(50));
    let (name, grace, message) = node.evicted().await;
    // Nobody has anything on the disk that was measured; by priority and name then.
    assert_eq!((name.as_str(), grace), ("big", 1));
    assert!(
        message.starts_with(
            "The node was low on resource: ephemeral-storage. Threshold quantity: 100Mi, available: 50Mi. "
        ),
        "{message}"
    );
    assert_eq!(node.reclaims.borrow().len(), 2);
}

fn four() -> [(&'static str, Value, i64); 4] {
    [("nginx", json!({}), 0), ("postgres", json!({}), 0), ("redis", json!({}), 0), ("writer", json!({}), 0)]
}

#[tokio::test(start_paused = true)]
async fn nobody_goes_for_the_disk_by_what_was_measured_before_it_was_low() {
    let mut node = Node::start(hard(), &four());
    let mut asked = node.disks.asked();
    for (name, ..) in four() {
        node.measured(name, Instant::now(), if name == "nginx" { 60 } else { 0 });
    }
    tokio::time::sleep(SECOND).await;
    node.set(&node.disk, Shows::Mib(50));
    let since = node.asked(&mut asked).await;
    assert_eq!(node.within(5).await, Vec::<String>::new());
    for (name, mib) in [("nginx", 1), ("postgres", 0), ("redis", 0), ("writer", 400)] {
        node.measured(name, since, mib);
    }
    let (name, _, message) = node.evicted().await;
    assert_eq!(name, "writer", "it has what is missing, and was not known to");
    assert!(message.ends_with("The pod's use of ephemeral-storage was: volume v 400Mi. "), "{message}");
}

#[tokio::test(start_paused = true)]
async fn files_that_are_mounted_into_containers_rank_a_pod_like_volumes() {
    let mut node = Node::start(hard(), &four());
    let mut asked = node.disks.asked();
    node.set(&node.disk, Shows::Mib(50));
    let since = node.asked(&mut asked).await;
    for name in ["nginx", "postgres", "redis"] {
        node.measured(name, since, 20);
    }
    let taken = Taken { bytes: 200 << 20, inodes: 1 };
    let files = [(WritableFile::TerminationMessage, taken)].into();
    node.disks.put("writer", since, PodDisk { files, ..PodDisk::default() });
    let (name, _, message) = node.evicted().await;
    assert_eq!(name, "writer");
    assert!(message.contains("termination messages 200Mi"), "{message}");
    assert_eq!(node.within(5).await, Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn who_has_gained_what_is_missing_goes_before_all_are_measured() {
    let mut node = Node::start(hard(), &four());
    let mut asked = node.disks.asked();
    for (name, mib) in [("nginx", 90), ("postgres", 0), ("redis", 0), ("writer", 10)] {
        node.measured(name, Instant::now(), mib);
    }
    tokio::time::sleep(SECOND).await;
    node.set(&node.disk, Shows::Mib(50));
    let since = node.asked(&mut asked).await;
    let found = |mib: u64| PodDisk {
        volumes: [("v".to_owned(), Taken { bytes: mib << 20, inodes: 1 })].into(),
        ..PodDisk::default()
    };
    // One had all of it before, the other has not gained enough.
    node.disks.put_at_least("nginx", since, found(90));
    node.disks.put_at_least("writer", since, found(50));
    assert_eq!(node.within(2).await, Vec::<String>::new());
    node.measured("nginx", since, 1);
    node.measured("writer", since, 70);
    assert_eq!(node.within(2).await, ["writer"]);
}

#[tokio::test(start_paused = true)]
async fn where_the_disk_is_filled_by_no_pod_one_goes_at_a_time() {
    let mut node = Node::start(hard(), &four());
    let mut asked = node.disks.asked();
    node.set(&node.disk, Shows::Mib(50));
    let measure = |node: &Node, since| {
        for (name, mib) in [("nginx", 4), ("postgres", 3), ("redis", 2), ("writer", 0)] {
            node.measured(name, since, mib);
        }
    };
    let since = node.asked(&mut asked).await;
    measure(&node, since);
    assert_eq!(node.within(5).await, ["nginx"]);
    node.gone("nginx");
    // Looked at again, pods too, before the next one.
    let since = node.asked(&mut asked).await;
    assert_eq!(node.within(5).await, Vec::<String>::new());
    measure(&node, since);
    assert_eq!(node.within(10).await, ["postgres"]);
    node.set(&node.disk, Shows::Mib(500));
    node.gone("postgres");
    assert_eq!(node.within(60).await, Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn nobody_goes_while_the_room_of_one_that_is_gone_may_still_come() {
    let mut node = Node::start(hard(), &four());
    let mut asked = node.disks.asked();
    node.set(&node.disk, Shows::Mib(50));
    let measure = |node: &Node, since| {
        for (name, mib) in [("nginx", 1), ("postgres", 1), ("redis", 20), ("writer", 400)] {
            node.measured(name, since, mib);
        }
    };
    let since = node.asked(&mut asked).await;
    measure(&node, since);
    assert_eq!(node.within(5).await, ["writer"]);
    node.gone("writer");
    let since = node.asked(&mut asked).await;
    measure(&node, since);
    // The runtime collects its writable layer seconds after the container.
    assert_eq!(node.within(8).await, Vec::<String>::new());
    node.set(&node.disk, Shows::Mib(450));
    assert_eq!(node.within(60).await, Vec::<String>::new());
    // It came, and others have filled the disk since: nothing holds the next one up.
    node.set(&node.disk, Shows::Mib(50));
    let since = node.asked(&mut asked).await;
    measure(&node, since);
    assert_eq!(node.within(5).await, ["redis"]);
}

#[tokio::test(start_paused = true)]
async fn room_that_has_come_and_is_not_enough_holds_nobody_up() {
    let mut node = Node::start(hard(), &four());
    let mut asked = node.disks.asked();
    node.set(&node.disk, Shows::Mib(50));
    let measure = |node: &Node, since| {
        for (name, mib) in [("nginx", 0), ("postgres", 0), ("redis", 10), ("writer", 30)] {
            node.measured(name, since, mib);
        }
    };
    let since = node.asked(&mut asked).await;
    measure(&node, since);
    assert_eq!(node.within(5).await, ["writer"]);
    node.set(&node.disk, Shows::Mib(80));
    node.gone("writer");
    let since = node.asked(&mut asked).await;
    measure(&node, since);
    assert_eq!(node.within(5).await, ["redis"]);
}

#[tokio::test(start_paused = true)]
async fn nobody_goes_while_the_room_of_what_was_given_back_may_still_come() {
    let mut node = Node::start(hard(), &three());
    *node.on_reclaim.lock().unwrap() = Some(Box::new(|step| {
        let late = step == Reclaim::DeleteUnusedContainers;
        Box::pin(std::future::ready(if late { Reclaimed::Later } else { Reclaimed::Now }))
    }));
    node.set(&node.disk, Shows::Mib(50));
    assert_eq!(node.within(8).await, Vec::<String>::new());
    assert_eq!(node.reclaims.borrow().len(), 2);
    node.set(&node.disk, Shows::Mib(500));
    assert_eq!(node.within(60).await, Vec::<String>::new());
    // What doesn't come is not waited for any longer.
    node.set(&node.disk, Shows::Mib(50));
    assert_eq!(node.within(8).await, Vec::<String>::new());
    assert_eq!(node.within(6).await, ["big"]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_can_not_be_measured_in_time_has_at_least_what_was_found() {
    let mut node = Node::start(hard(), &four());
    let mut asked = node.disks.asked();
    node.measured("nginx", Instant::now(), 90);
    tokio::time::sleep(SECOND).await;
    node.set(&node.disk, Shows::Mib(50));
    let since = node.asked(&mut asked).await;
    for name in ["postgres", "redis"] {
        node.measured(name, since, 0);
    }
    let found = PodDisk {
        volumes: [("v".to_owned(), Taken { bytes: 70 << 20, inodes: 9 })].into(),
        ..PodDisk::default()
    };
    node.disks.put_at_least("writer", since, found);
    assert_eq!(node.within(u32::try_from(ASKED.as_secs()).unwrap() - 2).await, Vec::<String>::new());
    assert_eq!(node.within(5).await, ["writer"]);
}

#[tokio::test(start_paused = true)]
async fn what_the_volumes_disk_gave_back_is_nothing_that_the_images_disk_had() {
    let thresholds =
        vec![threshold(Signal::NodeFsAvailable, "100Mi", 0), threshold(Signal::ImageFsAvailable, "100Mi", 0)];
    let mut node = Node::start_on(DiskLayout::SplitImageFs, thresholds, &three());
    let (disk, images) = (Arc::clone(&node.disk), Arc::clone(&node.images));
    *node.on_reclaim.lock().unwrap() = Some(Box::new(move |step| {
        let dial = if step == Reclaim::DeleteUnusedContainers { &disk } else { &images };
        *dial.lock().unwrap() = Shows::Mib(500);
        Box::pin(std::future::ready(Reclaimed::Now))
    }));
    node.set(&node.disk, Shows::Mib(50));
    node.reclaims.wait_for(|steps| *steps == [Reclaim::DeleteUnusedContainers]).await.unwrap();
    // Soon after, so that nothing would be tried again on the first disk.
    node.set(&node.images, Shows::Mib(50));
    assert_eq!(node.within(20).await, Vec::<String>::new());
    assert_eq!(*node.reclaims.borrow(), [Reclaim::DeleteUnusedContainers, Reclaim::DeleteUnusedImages]);
}

#[tokio::test(start_paused = true)]
async fn of_two_signals_at_once_memory_waits_for_no_disk() {
    let mut node = Node::start(hard(), &three());
    // Giving back goes on for ever.
    *node.on_reclaim.lock().unwrap() = Some(Box::new(|_| Box::pin(std::future::pending())));
    node.set(&node.disk, Shows::Mib(50));
    node.reclaims.wait_for(|steps| !steps.is_empty()).await.unwrap();
    node.set(&node.memory, Shows::Mib(90));
    let (name, _, message) = node.evicted().await;
    assert_eq!(name, "big");
    assert!(message.starts_with("The node was low on resource: memory."), "{message}");
    node.until_condition(NodeCondition::DiskPressure, true).await;
    node.until_condition(NodeCondition::MemoryPressure, true).await;
    assert_eq!(*node.reclaims.borrow(), [Reclaim::DeleteUnusedContainers], "the first step hasn't ended");
}

/// The name of the threads that may block; the kernel keeps 15 characters.
const BLOCKING: &str = "may-block";

fn blocking_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == BLOCKING).count()
}

/// `memory.stat` in `folder` hangs whoever reads it, until the pipe that it is now is written to.
fn hang(folder: &std::path::Path) -> PathBuf {
    let (file, pipe) = (folder.join("memory.stat"), folder.join("pipe"));
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    std::fs::remove_file(&file).unwrap();
    std::fs::hard_link(&pipe, &file).unwrap();
    pipe
}

/// Decides again and again while the statistics in the folder that `hangs` names hang; who goes first.
fn decide_while(hangs: impl FnOnce(&Node) -> PathBuf, first: &str) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let builder = builder.enable_all().thread_name(BLOCKING);
    // One that has nothing to do doesn't stay.
    let runtime = builder.thread_keep_alive(Duration::from_millis(1)).build().unwrap();
    let work = async {
        let (mut node, mut eviction) = Node::build(DiskLayout::Single, hard(), &three());
        let folder = hangs(&node);
        let pipe = hang(&folder);
        let low = Observation {
            available: Quantity::from_units(90 * MIB),
            capacity: Quantity::from_units(CAPACITY * MIB),
        };
        for _ in 0..10 {
            eviction.board.put(&[(Signal::MemoryAvailable, low)].into(), Instant::now(), 60 * SECOND);
            eviction.decide().await;
        }
        assert_eq!(node.evicted().await.0, first);
        // The one that hangs; with others the time runs out.
        while blocking_threads() != 1 {
            tokio::time::sleep(SECOND / 100).await;
        }
        // Once it goes on, so does everything.
        std::fs::remove_file(folder.join("memory.stat")).unwrap();
        std::fs::write(folder.join("memory.stat"), "total_inactive_file 0\n").unwrap();
        std::fs::write(pipe, "total_inactive_file 0\n").unwrap();
        while !eviction.survey.is_at_rest() {
            tokio::time::sleep(SECOND / 100).await;
        }
        eviction.decide().await;
        let known = eviction.survey.known();
        assert!(known.values().all(|pod| pod.usage.is_some()) && known.len() == 3, "{known:?}");
    };
    let all = || runtime.block_on(async { tokio::time::timeout(60 * SECOND, work).await.unwrap() });
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(all));
    // Where the test fails the thread hangs still, and nobody is to wait for it.
    runtime.shutdown_timeout(SECOND);
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn statistics_that_hang_hold_up_no_decision_and_pile_nothing_up() {
    // Nothing is known of it: it goes first, as the kubelet has it.
    decide_while(|node| node.memory_of("small"), "small");
    decide_while(|node| node.add_container("big", "c1"), "big");
}

#[tokio::test(start_paused = true)]
async fn a_hint_alone_costs_nobody_anything() {
    let mut node = Node::start(hard(), &three());
    for _ in 0..100 {
        node.hints.notify();
        tokio::time::sleep(SECOND / 10).await;
    }
    assert_eq!(node.within(1).await, Vec::<String>::new());
}

#[test]
fn thresholds_of_allocatable_memory_and_of_containers_are_derived() {
    let all = derived(&hard(), DiskLayout::Single);
    let signals: Vec<Signal> = all.iter().map(|threshold| threshold.signal).collect();
    assert_eq!(
        signals,
        [
            Signal::MemoryAvailable,
            Signal::NodeFsAvailable,
            Signal::ContainerFsAvailable,
            Signal::AllocatableMemoryAvailable
        ]
    );
}
