//! A node with real cgroups and faked gauges.

use super::*;

/// The state of a gauge.
#[derive(Clone, Debug)]
pub(super) enum Shows {
    /// This many MiB of the capacity.
    Mib(i64),
    /// Any numbers.
    Numbers(i64, i64),
    /// An error.
    Error,
    /// No answer until the sender is dropped.
    Hangs(Arc<Mutex<std::sync::mpsc::Receiver<()>>>),
}

pub(super) type Dial = Arc<Mutex<Shows>>;

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

/// The effect of a reclaim, and its end.
pub(super) type OnReclaim =
    Arc<Mutex<Option<Box<dyn Fn(Reclaim) -> BoxFuture<'static, Reclaimed> + Send + Sync>>>>;

/// A node of plain folders: its dials, its pods, and eviction's requests.
pub(super) struct Node {
    pub(super) memory: Dial,
    pub(super) disk: Dial,
    /// The images' file system, if it is a separate one.
    pub(super) images: Dial,
    pub(super) table: watch::Sender<Arc<PodTable>>,
    pub(super) requests: mpsc::Receiver<Request>,
    pub(super) conditions: watch::Receiver<Conditions>,
    /// Requested reclaims.
    pub(super) reclaims: watch::Receiver<Vec<Reclaim>>,
    /// Effect of a reclaim.
    pub(super) on_reclaim: OnReclaim,
    pub(super) hints: Hints,
    pub(super) metrics: Metrics,
    /// Disk usage of pods.
    pub(super) disks: DiskUsages,
    pub(super) dir: tempfile::TempDir,
    pub(super) running: Option<(CancellationToken, tokio::task::JoinHandle<()>)>,
}

/// A node that does not run yet.
trait Built {
    fn run(self) -> Node;
}

impl Built for (Node, Eviction) {
    fn run(self) -> Node {
        let (mut node, eviction) = self;
        let shutdown = CancellationToken::new();
        node.running = Some((shutdown.clone(), tokio::spawn(eviction.run(shutdown))));
        node
    }
}

impl Node {
    /// Starts a node of one disk with these thresholds and pods `(name, spec, MiB of memory in use)`.
    pub(super) fn start(thresholds: Vec<Threshold>, pods: &[(&str, Value, i64)]) -> Self {
        Self::start_on(DiskLayout::Single, thresholds, pods)
    }

    pub(super) fn start_on(
        layout: DiskLayout,
        thresholds: Vec<Threshold>,
        pods: &[(&str, Value, i64)],
    ) -> Self {
        Self::build(layout, thresholds, pods).run()
    }

    /// Starts a node of one disk, whose swap has this number of free MiB. A request moves `per_mille` of the
    /// requested memory, which becomes available.
    pub(super) fn start_with_swap(free: i64, per_mille: i64, pods: &[(&str, Value, i64)]) -> Self {
        let (node, mut eviction) = Self::build(DiskLayout::Single, hard(), pods);
        let left = Arc::new(Mutex::new(free * MIB));
        let (shown, memory) = (Arc::clone(&left), Arc::clone(&node.memory));
        let door = SwapDoor {
            free: Arc::new(move || shown.lock().unwrap().unsigned_abs()),
            fill: Arc::new(move |bytes| {
                let moved = i64::try_from(bytes).unwrap() * per_mille / 1000;
                *left.lock().unwrap() -= moved;
                if let Shows::Mib(available) = &mut *memory.lock().unwrap() {
                    *available += moved / MIB;
                }
                moved.unsigned_abs()
            }),
        };
        eviction.swap_outs = SwapOuts::new(Some(door));
        (node, eviction).run()
    }

    /// Builds the same node without running eviction.
    pub(super) fn build(
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
            usage: PodUsages {
                cgroups,
                config,
                memory_signal: MemorySignal::default(),
                swap: EvictionSwap::default(),
                disk: disks.clone(),
            },
            table: table.subscribe(),
            requests: requests_out,
            reclaimer,
            swap: None,
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

    pub(super) fn add(&self, name: &str, spec: &Value, mib: i64) {
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

    /// Returns the memory cgroup of a BestEffort pod.
    pub(super) fn memory_of(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("memory/kubepods/besteffort/pod{name}"))
    }

    /// Adds a container with a cgroup of its own and this id to the pod.
    pub(super) fn add_container(&self, name: &str, id: &str) -> PathBuf {
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

    pub(super) fn pod(&self, name: &str) -> core::Pod {
        let name = PodName { namespace: "default".to_owned(), name: name.to_owned() };
        self.table.borrow().pods[&name].pod.clone()
    }

    pub(super) fn publish(&self, pod: core::Pod) {
        self.publish_entry(PodEntry::of(pod));
    }

    pub(super) fn publish_entry(&self, entry: PodEntry) {
        self.table.send_modify(|table| {
            let mut pods = table.pods.clone();
            pods.insert(PodName::of(&entry.pod), Arc::new(entry));
            *table = Arc::new(PodTable { pods, rejected: Arc::clone(&table.rejected) });
        });
    }

    /// Records that a measurement begun at `began` found this many MiB in the pod's volumes.
    pub(super) fn measured(&self, name: &str, began: Instant, mib: u64) {
        let taken = Taken { bytes: mib << 20, inodes: 1 };
        let disk = PodDisk { volumes: [("v".to_owned(), taken)].into(), ..PodDisk::default() };
        self.disks.record(name, began, disk);
    }

    /// Waits for a request to measure all pods again; returns the time from which measurements count.
    pub(super) async fn asked(&self, asked: &mut watch::Receiver<Option<Instant>>) -> Instant {
        tokio::time::timeout(600 * SECOND, asked.changed()).await.unwrap().unwrap();
        asked.borrow_and_update().unwrap()
    }

    /// Deletes the pod as another client does.
    pub(super) fn delete(&self, name: &str) {
        let mut pod = self.pod(name);
        let now = jiff::Timestamp::now();
        pod.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now));
        self.publish(pod);
    }

    /// Marks the pod as fully released.
    pub(super) fn gone(&self, name: &str) {
        let mut pod = self.pod(name);
        pod.status.as_mut().unwrap().phase = Some("Failed".to_owned());
        self.publish_entry(PodEntry { ending: true, stopped: true, cleared: true, ..PodEntry::of(pod) });
    }

    pub(super) fn set(&self, dial: &Dial, shows: Shows) {
        *dial.lock().unwrap_or_else(PoisonError::into_inner) = shows;
        self.hints.notify();
    }

    /// Returns the next evicted pod, with its grace period in seconds.
    pub(super) async fn evicted(&mut self) -> (String, u64, String) {
        let Some(Request::Fail { uid, reason, message, grace }) = self.requests.recv().await else {
            panic!("eviction has ended");
        };
        assert_eq!(reason, "Evicted");
        (uid, grace.unwrap().as_secs(), message)
    }

    /// Returns the pods evicted within this many seconds.
    pub(super) async fn within(&mut self, seconds: u32) -> Vec<String> {
        let mut names = Vec::new();
        let deadline = Instant::now() + seconds * SECOND;
        while let Ok((name, ..)) = tokio::time::timeout_at(deadline, self.evicted()).await {
            names.push(name);
        }
        names
    }

    pub(super) async fn until_condition(&mut self, condition: NodeCondition, holds: bool) {
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
