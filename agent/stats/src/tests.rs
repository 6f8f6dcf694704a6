use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;

use super::model::KernelCounters;
use super::*;
use beelet_cgroups::{Hierarchy, Layout, Version};
use beelet_model::table::{PodEntry, PodName};

const LONG: Duration = Duration::from_secs(30);

/// A node of plain folders: containers' cgroups with files written by the test.
struct Node {
    dir: tempfile::TempDir,
    table: watch::Sender<Arc<PodTable>>,
    pressure: Stats,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
    /// Number of readings: each reads the kernel half once.
    readings: Arc<AtomicU64>,
}

impl Node {
    fn start(kernel: Option<BTreeMap<u64, KernelCounters>>, most: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cgroup.controllers"), "cpu memory io pids").unwrap();
        let hierarchies =
            vec![Hierarchy { mount: dir.path().to_owned(), is_v2: true, controllers: [].into() }];
        let layout = Layout { version: Version::V2, hierarchies };
        let cgroups = Arc::new(Cgroups::over_folders(layout, "/").unwrap());
        let (table, receiver) = watch::channel(Arc::new(PodTable::default()));
        let readings = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&readings);
        let snapshot: Snapshot = Box::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            kernel.clone().map(|counters| KernelReading { counters, ..KernelReading::default() })
        });
        let (pressure, inbox) = channel();
        let parts = Parts {
            cgroups,
            table: receiver,
            snapshot,
            node: "n".into(),
            interval: Duration::from_millis(20),
            most,
            disk: Box::new(beelet_model::disk::Unmeasured),
            volumes: watch::channel(Arc::default()).1,
            metrics: metrics::Metrics::default(),
        };
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(Sampling::new(parts, inbox).run(shutdown.clone()));
        Self { dir, table, pressure, shutdown, task, readings }
    }

    /// Sets the running containers, one per pod.
    fn run(&self, ids: &[&str]) {
        let pods = ids.iter().map(|id| {
            let pod = serde_json::from_value(json!({
                "metadata": {"name": format!("pod-{id}"), "uid": format!("uid{id}z")},
                "spec": {"hostNetwork": true, "containers": [{"name": "app"}]},
                "status": {"phase": "Running", "containerStatuses": [
                    {"name": "app", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
                     "containerID": format!("containerd://{id}"), "state": {"running": {}}}]},
            }))
            .unwrap();
            let entry = PodEntry::of(pod);
            (PodName::of(&entry.pod), Arc::new(entry))
        });
        self.table.send_replace(Arc::new(PodTable { pods: pods.collect(), ..Default::default() }));
    }

    fn cgroup(&self, id: &str) -> std::path::PathBuf {
        self.dir.path().join(format!("kubepods/poduid{id}z/{id}"))
    }

    fn write(&self, id: &str, cpu_us: u64) {
        let dir = self.cgroup(id);
        fs::create_dir_all(&dir).unwrap();
        write(&dir, "cpu.stat", &format!("usage_usec {cpu_us}\n"));
        write(&dir, "memory.current", "4096\n");
        write(&dir, "memory.stat", "anon 4096\n");
        write(&dir, "memory.max", "8192\n");
        write(dir.parent().unwrap(), "cpu.stat", "usage_usec 7\n");
    }

    /// Empties the open files, as the kernel does with those of a removed cgroup.
    fn remove(&self, id: &str) {
        let dir = self.cgroup(id);
        fs::read_dir(&dir).unwrap().for_each(|file| fs::write(file.unwrap().path(), "").unwrap());
        fs::remove_dir_all(dir).unwrap();
    }
}

fn write(dir: &Path, file: &str, text: &str) {
    fs::write(dir.join(file), text).unwrap();
}

async fn until(
    values: &mut watch::Receiver<Arc<NodeStats>>,
    found: impl FnMut(&Arc<NodeStats>) -> bool,
) -> Arc<NodeStats> {
    Arc::clone(&timeout(LONG, values.wait_for(found)).await.unwrap().unwrap())
}

#[tokio::test]
async fn a_subscriber_gets_values_with_rates_and_nothing_is_read_after_its_drop() {
    let node = Node::start(None, 100);
    node.write("a1", 1000);
    node.run(&["a1"]);
    let mut values = node.pressure.subscribe();
    let first = until(&mut values, |value| !value.pods.is_empty()).await;
    let container = &first.pods[0].containers[0];
    assert_eq!(container.cgroup.as_deref(), Some("/kubepods/poduida1z/a1"));
    assert_eq!(container.reading.as_ref().unwrap().counters.cpu_ns, 1_000_000);
    assert_eq!(container.reading.as_ref().unwrap().gauges.memory_limit, Some(8192));
    assert!(container.cgroup_id.is_some() && !first.by_kernel);
    node.write("a1", 1_001_000);
    let busy =
        |value: &Arc<NodeStats>| value.pods[0].containers[0].windows[0].is_some_and(|rates| rates.cpu > 0.0);
    until(&mut values, busy).await;
    drop(values);
    // A reading may be in progress; after that no further one must follow.
    timeout(LONG, async {
        loop {
            let before = node.readings.load(Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(200)).await;
            if node.readings.load(Ordering::SeqCst) == before {
                return;
            }
        }
    })
    .await
    .unwrap();
    node.shutdown.cancel();
    timeout(LONG, node.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_request_is_answered_by_one_full_reading_without_subscribers() {
    let node = Node::start(None, 100);
    node.write("a1", 1000);
    node.run(&["a1"]);
    let all = || node.pressure.now(Scope::Everything);
    let (one, two, less) = tokio::join!(all(), all(), node.pressure.now(Scope::Usage));
    assert_eq!((one.at_ns, one.at_ns), (two.at_ns, less.at_ns));
    assert_eq!(node.readings.load(Ordering::SeqCst), 1);
    assert_eq!(one.pods[0].reading.as_ref().unwrap().counters.cpu_ns, 7000, "the pod's own cgroup");
    assert_eq!(one.pods[0].cgroup.as_deref(), Some("/kubepods/poduida1z"));
    assert!(one.machine.cpus > 0 && one.machine.memory_total > 0 && &*one.node == "n");
}

#[tokio::test]
async fn a_request_for_usage_reads_only_the_usage_of_pods() {
    let node = Node::start(None, 100);
    node.write("a1", 1000);
    let pod = node.cgroup("a1").parent().unwrap().to_owned();
    for (file, text) in
        [("memory.current", "4096\n"), ("memory.stat", "anon 4096\n"), ("memory.max", "8192\n")]
    {
        write(&pod, file, text);
    }
    write(&pod, "memory.swap.current", "512\n");
    write(&pod, "pids.current", "3\n");
    node.run(&["a1"]);
    let of = async |scope| {
        let value = node.pressure.now(scope).await;
        let pod = &value.pods[0];
        let is_full = pod.containers[0].reading.as_ref().unwrap().details.is_some();
        (pod.reading.as_ref().unwrap().gauges, is_full, value.machine.all_pods.is_some())
    };
    let (usage, is_full, all_pods) = of(Scope::Usage).await;
    assert_eq!((usage.working_set, usage.memory_limit, usage.swap), (4096, Some(8192), Some(512)));
    assert_eq!((usage.pids, is_full, all_pods), (None, false, false));
    // The last reading is not enough for a request for everything.
    let (all, is_full, _) = of(Scope::Everything).await;
    assert_eq!((all.swap, all.pids, is_full), (Some(512), Some(3), true));
}

#[tokio::test]
async fn containers_come_and_go_and_those_without_a_cgroup_are_counted() {
    let node = Node::start(None, 100);
    node.write("a1", 1);
    node.run(&["a1", "b2"]);
    let mut values = node.pressure.subscribe();
    let value = until(&mut values, |value| value.readings().count() == 1).await;
    assert_eq!(value.left_out, 1);
    // The runtime had announced the container before it made the cgroup.
    node.write("b2", 1);
    assert_eq!(until(&mut values, |value| value.readings().count() == 2).await.left_out, 0);
    node.remove("a1");
    until(&mut values, |value| value.readings().count() == 1).await;
    node.run(&["b2"]);
    let value = until(&mut values, |value| value.pods.len() == 1).await;
    assert_eq!((value.readings().count(), value.left_out), (1, 0));
}

#[tokio::test]
async fn directories_of_removed_pods_are_closed_without_subscribers() {
    let node = Node::start(None, 100);
    node.write("a1", 1);
    node.write("b2", 1);
    node.run(&["a1", "b2"]);
    node.pressure.now(Scope::Everything).await;
    let open = |id: &str| {
        let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let links = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
        links.filter(|path| path.starts_with(node.cgroup(id).parent().unwrap())).count()
    };
    assert!(open("a1") > 0 && open("b2") > 0);
    node.run(&["b2"]);
    timeout(LONG, async {
        while open("a1") > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
    assert!(open("b2") > 0);
    assert_eq!(node.readings.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn no_more_containers_are_read_than_are_allowed() {
    let node = Node::start(None, 2);
    ["a1", "b2", "c3"].iter().for_each(|id| node.write(id, 1));
    node.run(&["a1", "b2", "c3"]);
    let value = node.pressure.now(Scope::Everything).await;
    assert_eq!((value.readings().count(), value.left_out), (2, 1));
}

#[tokio::test]
async fn the_kernels_counters_are_found_by_the_cgroups_id() {
    let node = Node::start(Some(BTreeMap::new()), 100);
    node.write("a1", 1);
    node.run(&["a1"]);
    let value = node.pressure.now(Scope::Everything).await;
    let (_, container, reading) = value.readings().next().unwrap();
    assert!(value.by_kernel);
    assert_eq!(reading.counters.kernel, Some(Box::default()), "no run since the attach");
    let id = container.cgroup_id.unwrap();
    let counters = KernelCounters { on_cpu_ns: 5, ..KernelCounters::default() };
    let other = Node::start(Some([(id, counters), (id + 1, KernelCounters::default())].into()), 100);
    let link = other.dir.path().join("kubepods");
    std::os::unix::fs::symlink(node.dir.path().join("kubepods"), &link).unwrap();
    // Folders elsewhere are not followed: the cgroup is not found, and its counters belong to none.
    other.run(&["a1"]);
    assert_eq!(other.pressure.now(Scope::Everything).await.left_out, 1);
    fs::remove_file(&link).unwrap();
    fs::rename(node.dir.path().join("kubepods"), &link).unwrap();
    let mut values = other.pressure.subscribe();
    let value = until(&mut values, |value| value.readings().count() == 1).await;
    assert_eq!(value.readings().next().unwrap().2.counters.kernel, Some(Box::new(counters)));
}

#[tokio::test]
async fn before_sampling_runs_requests_get_an_empty_value_soon() {
    let (pressure, inbox) = channel();
    drop(inbox);
    assert_eq!(*pressure.now(Scope::Usage).await, NodeStats::nothing_yet());
}
