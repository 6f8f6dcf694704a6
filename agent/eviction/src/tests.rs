mod node;
mod swap;

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use beelet_policy::{
    eviction::{EvictionSwap, MemorySignal, NodeCondition, Observation, Signal, ThresholdValue},
    resources::{
        cgroups::{CgroupConfig, CgroupVersion, NodeAmounts},
        qos::{QosClass, qos_class},
    },
};
use beelet_units::quantity::Quantity;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1 as core;
use serde_json::{Value, json};

use self::node::{Node, Shows};
use super::{local_storage::ASKED, *};
use beelet_cgroups::{Cgroups, Hierarchy, Layout, Version};
use beelet_model::{
    disk::{PodDisk, Taken, WritableFile},
    table::{PodEntry, PodName},
};
use beelet_state::events::Recorder;

const MIB: i64 = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);
/// The test machine's capacity: memory and disk in MiB.
const CAPACITY: i64 = 1000;

fn threshold(signal: Signal, text: &str, grace: u64) -> Threshold {
    let value = ThresholdValue::threshold(text).unwrap().unwrap();
    Threshold { signal, value, grace: Duration::from_secs(grace), min_reclaim: None }
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
    // The pod's memory is about to be freed: no other pod is evicted for it.
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
async fn as_many_pods_as_necessary_are_evicted_at_once_and_never_a_critical_one() {
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
async fn a_victim_that_does_not_terminate_is_replaced() {
    let mut node = Node::start(hard(), &three());
    node.set(&node.memory, Shows::Mib(90));
    assert_eq!(node.within(10).await, ["big"]);
    // A grace period of one second and ten of patience.
    assert_eq!(node.within(5).await, ["small"]);
}

#[tokio::test]
async fn memory_freed_by_a_victim_since_the_last_reading_costs_no_other_pod() {
    let (mut node, mut eviction) = Node::build(DiskLayout::Single, hard(), &three());
    let read = |eviction: &Eviction, available: i64| {
        let units = |mib: i64| Quantity::from_units(mib * MIB);
        let seen = Observation { available: units(available), capacity: units(CAPACITY) };
        eviction.board.publish(&[(Signal::MemoryAvailable, seen)].into(), Instant::now(), 60 * SECOND);
    };
    read(&eviction, 90);
    eviction.decide().await;
    assert_eq!(node.evicted().await.0, "big");
    // The victim's processes have ended; its cgroup still exists, and the number is older.
    std::fs::write(node.memory_of("big").join("memory.usage_in_bytes"), (MIB / 4).to_string()).unwrap();
    eviction.decide().await;
    eviction.decide().await;
    assert!(node.requests.try_recv().is_err(), "another pod is evicted for memory that is already free");
    // The number includes the freed memory now, which is not enough.
    read(&eviction, 95);
    eviction.decide().await;
    assert_eq!(node.evicted().await.0, "small");
}

#[tokio::test(start_paused = true)]
async fn a_hard_threshold_acts_at_once_while_a_soft_one_waits() {
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
async fn a_hard_threshold_shortens_the_grace_of_a_pod_evicted_under_a_soft_one() {
    let mut node = Node::start(soft_and_hard(), &three());
    node.set(&node.memory, Shows::Mib(200));
    let (name, grace, _) = node.evicted().await;
    assert_eq!((name.as_str(), grace), ("big", 40));
    assert_eq!(node.within(10).await, Vec::<String>::new());
    node.set(&node.memory, Shows::Mib(90));
    let (name, grace, message) = node.evicted().await;
    assert_eq!((name.as_str(), grace), ("big", 1));
    assert!(message.contains("Threshold quantity: 100Mi"), "{message}");
    assert_eq!(node.metrics.evictions(Signal::MemoryAvailable), 1, "the pod was evicted once");
    // A single request is enough; if the pod does not terminate then, others are evicted.
    assert_eq!(node.within(10).await, Vec::<String>::new());
    assert_eq!(node.within(5).await, ["small"]);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_pods_usage_counts_as_soon_free_and_a_hard_threshold_shortens_its_grace() {
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
    assert_eq!(node.within(5).await, ["small"], "the same amount is still missing");
}

#[tokio::test(start_paused = true)]
async fn a_hard_threshold_shortens_the_grace_of_only_the_necessary_deleted_pods() {
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
    // Memory is low again: another pod is chosen.
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
    // The freed memory was not enough.
    node.set(&node.memory, Shows::Mib(60));
    assert_eq!(node.within(5).await, ["deleted"]);
}

#[tokio::test(start_paused = true)]
async fn implausible_or_missing_numbers_evict_no_pod() {
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
async fn disk_space_is_reclaimed_before_a_pod_is_evicted() {
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
async fn a_disk_that_is_low_again_is_reclaimed_again_before_a_pod_is_evicted() {
    let mut node = Node::start(hard(), &three());
    let disk = Arc::clone(&node.disk);
    *node.on_reclaim.lock().unwrap() = Some(Box::new(move |step| {
        if step == Reclaim::DeleteUnusedImages {
            *disk.lock().unwrap() = Shows::Mib(500);
        }
        Box::pin(std::future::ready(Reclaimed::Now))
    }));
    // Images come repeatedly, each time soon after others were removed.
    for times in 1..=3 {
        node.set(&node.disk, Shows::Mib(50));
        node.reclaims.wait_for(|steps| steps.len() == 2 * times).await.unwrap();
        assert_eq!(node.within(5).await, Vec::<String>::new());
    }
    assert_eq!(node.reclaims.borrow().len(), 6);
    // A disk that stays low after a reclaim leads to an eviction; the reclaim is not repeated endlessly.
    *node.on_reclaim.lock().unwrap() = None;
    node.set(&node.disk, Shows::Mib(50));
    assert_eq!(node.within(20).await, ["big"]);
    assert_eq!(node.reclaims.borrow().len(), 8);
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_evicted_if_reclaim_is_not_enough() {
    let mut node = Node::start(hard(), &three());
    node.set(&node.disk, Shows::Mib(50));
    let (name, grace, message) = node.evicted().await;
    // Every pod's measured disk usage is zero; priority and name decide.
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
async fn measurements_from_before_the_disk_was_low_evict_no_pod() {
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
    assert_eq!(name, "writer", "the writer has the missing amount, unknown before");
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
    node.disks.record("writer", since, PodDisk { files, ..PodDisk::default() });
    let (name, _, message) = node.evicted().await;
    assert_eq!(name, "writer");
    assert!(message.contains("termination messages 200Mi"), "{message}");
    assert_eq!(node.within(5).await, Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_growth_is_the_missing_amount_is_evicted_before_all_are_measured() {
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
    // The first pod had all of it before, the other has not grown enough.
    node.disks.record_at_least("nginx", since, found(90));
    node.disks.record_at_least("writer", since, found(50));
    assert_eq!(node.within(2).await, Vec::<String>::new());
    node.measured("nginx", since, 1);
    node.measured("writer", since, 70);
    assert_eq!(node.within(2).await, ["writer"]);
}

#[tokio::test(start_paused = true)]
async fn one_pod_at_a_time_is_evicted_if_no_pod_fills_the_disk() {
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
    // Another reading, of pods too, precedes the next eviction.
    let since = node.asked(&mut asked).await;
    assert_eq!(node.within(5).await, Vec::<String>::new());
    measure(&node, since);
    assert_eq!(node.within(10).await, ["postgres"]);
    node.set(&node.disk, Shows::Mib(500));
    node.gone("postgres");
    assert_eq!(node.within(60).await, Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn no_pod_is_evicted_while_a_terminated_pods_space_may_become_free() {
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
    // The runtime collects the writable layer seconds after the container.
    assert_eq!(node.within(8).await, Vec::<String>::new());
    node.set(&node.disk, Shows::Mib(450));
    assert_eq!(node.within(60).await, Vec::<String>::new());
    // The space became free, and others have filled the disk since: nothing delays the next eviction.
    node.set(&node.disk, Shows::Mib(50));
    let since = node.asked(&mut asked).await;
    measure(&node, since);
    assert_eq!(node.within(5).await, ["redis"]);
}

#[tokio::test(start_paused = true)]
async fn freed_space_that_is_not_enough_delays_no_eviction() {
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
async fn no_pod_is_evicted_while_reclaimed_space_may_become_free() {
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
    // Space that does not become free is not awaited any longer.
    node.set(&node.disk, Shows::Mib(50));
    assert_eq!(node.within(8).await, Vec::<String>::new());
    assert_eq!(node.within(6).await, ["big"]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_cannot_be_measured_in_time_has_at_least_the_amount_found() {
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
    node.disks.record_at_least("writer", since, found);
    assert_eq!(node.within(u32::try_from(ASKED.as_secs()).unwrap() - 2).await, Vec::<String>::new());
    assert_eq!(node.within(5).await, ["writer"]);
}

#[tokio::test(start_paused = true)]
async fn a_reclaim_on_the_volumes_disk_does_not_count_for_the_images_disk() {
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
    // Shortly after the reclaim, so that it would not be repeated on the first disk.
    node.set(&node.images, Shows::Mib(50));
    assert_eq!(node.within(20).await, Vec::<String>::new());
    assert_eq!(*node.reclaims.borrow(), [Reclaim::DeleteUnusedContainers, Reclaim::DeleteUnusedImages]);
}

#[tokio::test(start_paused = true)]
async fn of_two_signals_at_once_memory_does_not_wait_for_a_disk() {
    let mut node = Node::start(hard(), &three());
    // The reclaim never ends.
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

/// Makes `memory.stat` in `folder` hang every reader, until data is written to the pipe that replaces it.
fn hang(folder: &std::path::Path) -> PathBuf {
    let (file, pipe) = (folder.join("memory.stat"), folder.join("pipe"));
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    std::fs::remove_file(&file).unwrap();
    std::fs::hard_link(&pipe, &file).unwrap();
    pipe
}

/// Decides repeatedly while the statistics in the folder that `hangs` returns hang; `first` must be evicted
/// first.
fn decide_while(hangs: impl FnOnce(&Node) -> PathBuf, first: &str) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let builder = builder.enable_all().thread_name(BLOCKING);
    // An idle thread ends at once.
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
            eviction.board.publish(&[(Signal::MemoryAvailable, low)].into(), Instant::now(), 60 * SECOND);
            eviction.decide().await;
        }
        assert_eq!(node.evicted().await.0, first);
        // The hanging thread remains; decisions with further ones would time out.
        while blocking_threads() != 1 {
            tokio::time::sleep(SECOND / 100).await;
        }
        // Once the thread continues, so does everything else.
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
    // If the test fails, the thread still hangs, and the runtime must not wait for it.
    runtime.shutdown_timeout(SECOND);
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn hanging_statistics_delay_no_decision_and_block_one_thread_only() {
    // The pod has no statistics: it is evicted first, as in the kubelet.
    decide_while(|node| node.memory_of("small"), "small");
    decide_while(|node| node.add_container("big", "c1"), "big");
}

#[tokio::test(start_paused = true)]
async fn a_hint_alone_evicts_no_pod() {
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
