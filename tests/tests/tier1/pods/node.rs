//! A node without a kernel and without a container runtime: the whole agent as `beelet::node` builds it
//! (eviction, garbage collection, tuner and API included), on a [`FakeCri`], with plain folders for cgroups
//! and with test doubles for its doors to the machine.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use beelet::node::{Builder, Doors, Handles, Machine};
use beelet_base::filesystem::{Space, Statvfs};
use beelet_cgroups::{Cgroups, Hierarchy, Layout, Version};
use beelet_config::{Config, Server, TcpProbes};
use beelet_cri::Runtime;
use beelet_devices::{Devices, Store, StoreError};
use beelet_eviction::gauges::Gauge;
use beelet_kubelet_api::auth::Reviewers;
use beelet_model::desired::Desired;
use beelet_model::labels;
use beelet_model::pod::HostIps;
use beelet_model::request::Request;
use beelet_model::table::{PodEntry, PodName, PodTable};
use beelet_pinning::machine::{MachineTopology, Source};
use beelet_pleg::ExitHint;
use beelet_pods::metrics::Metrics;
use beelet_pods::qos_tree;
use beelet_policy::eviction::{Observation, Signal as EvictionSignal};
use beelet_probes::ProbeView;
use beelet_proto::cri;
use beelet_state::ForeignFile;
use beelet_tests::cri::{FakeCri, Op, PATIENCE, World};
use beelet_units::{bpf_settings::BpfMode, fs_usage::FsUsage, quantity::Quantity};
use k8s_openapi::api::core::v1::ContainerStatus;
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The image of every pod here, on the node from the start.
pub(crate) const IMAGE: &str = "busybox:1.36";
/// Size of a container's log, in bytes, from which on the log is rotated.
pub(crate) const LOG_MAX: u64 = 4096;
/// Interval of a check that never runs within a test.
const NEVER: Duration = Duration::from_secs(3600);
/// Bytes of memory and of disk of the machine, which is a small one.
const MEMORY: u64 = 8 << 30;
const STORAGE: u64 = 10 << 30;

/// Settings of a node's agent.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) request_timeout: Duration,
    pub(crate) max_restart_delay: Duration,
    pub(crate) stop_pods_on_exit: bool,
    /// Time that a pod waits for a device plugin; `None`: the default.
    pub(crate) plugin_wait: Option<Duration>,
    /// Time without a shortage before an evicted pod may run again.
    pub(crate) pressure_transition: Duration,
    /// True if a folder of static manifests is configured.
    pub(crate) static_pods: bool,
    /// Time between two checks that volumes are complete.
    pub(crate) volume_check: Duration,
    /// CPUs and NUMA nodes of the machine, for a node that pins.
    pub(crate) topology: Option<fn() -> MachineTopology>,
    /// Further changes to the configuration.
    pub(crate) configure: fn(&mut Config),
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            request_timeout: Duration::from_secs(120),
            max_restart_delay: Duration::from_secs(300),
            stop_pods_on_exit: false,
            plugin_wait: None,
            pressure_transition: NEVER,
            static_pods: true,
            volume_check: Duration::from_millis(200),
            topology: None,
            configure: |_| {},
        }
    }
}

/// A node: the parts that outlive its agent, and the agent while it runs.
pub(crate) struct Node {
    pub(crate) cri: FakeCri,
    pub(crate) settings: Settings,
    /// Store of the device checkpoint.
    pub(crate) store: Arc<TestStore>,
    /// Sources of pods in addition to the manifests.
    pub(crate) sources: Vec<watch::Receiver<Arc<Desired>>>,
    /// HTTPS server of the node, and the reviewers that authorize its clients.
    pub(crate) server: Option<(Server, Reviewers)>,
    /// True if the agent searches for the pods of a kubelet without a request.
    pub(crate) search_kubelet: bool,
    /// Available bytes of memory, as eviction reads them.
    memory_available: Arc<Mutex<u64>>,
    agent: Option<Agent>,
    dir: tempfile::TempDir,
}

/// Run of the agent.
struct Agent {
    // The agent's tasks have a runtime of their own, so that a test can drop all of them at once.
    runtime: Option<tokio::runtime::Runtime>,
    /// Handles of the agent's parts, once these are connected.
    handles: Option<Handles>,
    connected: Option<oneshot::Receiver<Handles>>,
    shutdown: CancellationToken,
    ended: JoinHandle<anyhow::Result<()>>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        // A test ends inside an async runtime of its own, where nothing may block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Node {
    /// Creates a node whose agent doesn't run yet.
    pub(crate) fn new(settings: Settings) -> Self {
        let cri = FakeCri::start();
        cri.add_image(IMAGE);
        cri.change(|world| {
            world.ends_at_once = ["init".to_owned()].into();
            let fs_id = Some(cri::FilesystemIdentifier { mountpoint: "/images".to_owned() });
            world.image_fs.image_filesystems = vec![cri::FilesystemUsage { fs_id, ..Default::default() }];
        });
        let dir = tempfile::tempdir().unwrap();
        for folder in ["manifests", "logs", "pods"] {
            std::fs::create_dir(dir.path().join(folder)).unwrap();
        }
        let cpu = [("cpu.shares", "1024"), ("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", "100000")];
        let memory = [("memory.limit_in_bytes", "9223372036854771712")];
        for (hierarchy, files) in [("cpu", &cpu[..]), ("memory", &memory[..])] {
            let mount = dir.path().join("cgroup").join(hierarchy);
            std::fs::create_dir_all(&mount).unwrap();
            for (file, content) in files {
                std::fs::write(mount.join(file), content).unwrap();
            }
        }
        let checkpoint = beelet_devices::Settings::new(dir.path().join("kubelet")).checkpoint();
        let store = Arc::new(TestStore::new(checkpoint));
        let memory_available = Arc::new(Mutex::new(MEMORY / 2));
        Node {
            cri,
            settings,
            store,
            sources: Vec::new(),
            server: None,
            search_kubelet: false,
            memory_available,
            agent: None,
            dir,
        }
    }

    /// Creates a node with these manifests and starts its agent.
    pub(crate) async fn with(pods: &[Value]) -> Self {
        Self::with_settings(Settings::default(), pods).await
    }

    pub(crate) async fn with_settings(settings: Settings, pods: &[Value]) -> Self {
        let mut node = Self::new(settings);
        pods.iter().for_each(|pod| node.apply(pod));
        node.start().await;
        node
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    // ---- Manifests ----

    /// Writes a pod's manifest to the folder, or replaces it.
    pub(crate) fn apply(&self, pod: &Value) {
        self.apply_text(pod["metadata"]["name"].as_str().unwrap(), &pod.to_string());
    }

    /// Writes any text to the folder, as the manifest of that pod.
    pub(crate) fn apply_text(&self, name: &str, text: &str) {
        let temporary = self.path(&format!("manifests/.{name}"));
        std::fs::write(&temporary, text).unwrap();
        std::fs::rename(temporary, self.manifest(name)).unwrap();
    }

    pub(crate) fn remove(&self, name: &str) {
        std::fs::remove_file(self.manifest(name)).unwrap();
    }

    pub(crate) fn manifest(&self, name: &str) -> PathBuf {
        self.path(&format!("manifests/{name}.yaml"))
    }

    // ---- The agent ----

    /// Starts the agent, as after a boot or a kill, and waits until its parts are connected.
    pub(crate) async fn start(&mut self) {
        self.launch();
        self.until_connected().await;
    }

    /// Starts the agent. The container runtime need not answer yet.
    pub(crate) fn launch(&mut self) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (handles_out, handles) = oneshot::channel();
        let builder = Builder::default().doors(self.doors()).attach("test", |handles, working| async move {
            let _ = handles_out.send(handles);
            working.cancelled().await;
        });
        let builder = self.sources.iter().fold(builder, |builder, source| builder.source(source.clone()));
        let builder = match &self.server {
            Some((_, reviewers)) => builder.reviewers(reviewers.clone()),
            None => builder,
        };
        let shutdown = CancellationToken::new();
        let ended = runtime.spawn(builder.run(self.config(), shutdown.clone()));
        let (runtime, connected) = (Some(runtime), Some(handles));
        self.agent = Some(Agent { runtime, handles: None, connected, shutdown, ended });
    }

    /// Waits until the runtime has answered and the agent's parts are connected.
    pub(crate) async fn until_connected(&mut self) {
        let agent = self.agent.as_mut().unwrap();
        match tokio::time::timeout(PATIENCE, agent.connected.take().unwrap()).await {
            Ok(Ok(handles)) => agent.handles = Some(handles),
            Ok(Err(_)) => panic!("the agent ended: {:?}", (&mut agent.ended).await),
            Err(_) => {
                panic!("the agent does not connect its parts; the calls so far:\n{}", self.cri.transcript())
            }
        }
    }

    fn doors(&self) -> Doors {
        let available = Arc::clone(&self.memory_available);
        let memory = move || {
            let available = Quantity::from_units(i64::try_from(*available.lock().unwrap()).unwrap());
            let capacity = Quantity::from_units(i64::try_from(MEMORY).unwrap());
            Ok([(EvictionSignal::MemoryAvailable, Observation { available, capacity })].into())
        };
        let half_full = Statvfs {
            bytes: FsUsage { capacity_bytes: STORAGE, available_bytes: STORAGE / 2 },
            inodes: 1 << 20,
            inodes_free: 1 << 19,
            read_only: false,
        };
        Doors {
            runtime: Some(Runtime::new(&self.cri.endpoint(), self.settings.request_timeout).unwrap()),
            search_kubelet: self.search_kubelet,
            cgroups: Some(cgroups(self.dir.path(), self.settings.topology.is_some())),
            machine: Some(Machine {
                cpus: 4,
                memory_bytes: MEMORY,
                storage_bytes: Some(STORAGE),
                swap_bytes: 0,
                hugepages: BTreeMap::new(),
                topology: self.settings.topology.map(|read| Source::new(move || Ok(read()))),
                host: HostIps::fixed(vec![Ipv4Addr::LOCALHOST.into()]),
            }),
            checkpoint: Some(Arc::clone(&self.store) as Arc<dyn Store>),
            space: Space::by(move |_| Ok(half_full)),
            gauges: Some(vec![Gauge::new("memory", NEVER, memory).of_memory()]),
            own_process: false,
            cgroup_check: Duration::from_millis(50),
            orphan_check: Duration::from_millis(200),
            volume_check: self.settings.volume_check,
        }
    }

    fn config(&self) -> Config {
        let (mut config, _) = Config::with_defaults().unwrap();
        config.node_name = "n1".to_owned();
        config.static_pod_path = self.settings.static_pods.then(|| self.path("manifests"));
        config.file_check_frequency = NEVER;
        config.pod_logs_dir = self.path("logs");
        config.healthz_port = 0;
        config.resolv_conf = None;
        config.max_container_restart_period = self.settings.max_restart_delay;
        config.eviction.pressure_transition = self.settings.pressure_transition;
        config.container_log_max_size = LOG_MAX;
        config.container_log_monitor_interval = Duration::from_millis(200);
        if let Some((server, _)) = &self.server {
            config.server = server.clone();
        }
        let beelet = &mut config.beelet;
        beelet.state_dir = self.path("state");
        beelet.run_dir = self.path("run");
        beelet.pods_dir = self.path("pods");
        beelet.kubelet_dir = self.path("kubelet");
        beelet.seccomp_profile_root = self.path("seccomp");
        beelet.bpf = BpfMode::Off;
        beelet.tcp_probes = TcpProbes::Connect;
        beelet.liveness_canary = Duration::ZERO;
        beelet.stop_pods_on_exit = self.settings.stop_pods_on_exit;
        if let Some(wait) = self.settings.plugin_wait {
            beelet.device_plugin_wait = wait;
        }
        (self.settings.configure)(&mut config);
        config
    }

    /// Sets the available memory, as eviction reads it.
    pub(crate) fn set_memory_available(&self, bytes: u64) {
        *self.memory_available.lock().unwrap() = bytes;
    }

    /// Returns the handles for parts that are built elsewhere.
    pub(crate) fn handles(&self) -> &Handles {
        self.agent.as_ref().unwrap().handles.as_ref().unwrap()
    }

    /// Ends the agent as kill -9 does: unfinished work stays unfinished.
    pub(crate) async fn kill(&mut self) {
        let Some(mut agent) = self.agent.take() else { return };
        let runtime = agent.runtime.take();
        // All tasks are dropped in the middle of their work; the drop blocks until their threads have ended.
        tokio::task::spawn_blocking(move || drop(runtime)).await.unwrap();
    }

    /// Kills the agent in the midst of a write of the device checkpoint.
    pub(crate) async fn kill_in_write(&mut self) {
        let Some(runtime) = self.agent.take().and_then(|mut agent| agent.runtime.take()) else { return };
        let (alive, dead) = oneshot::channel::<()>();
        runtime.spawn(async move {
            let _alive = alive;
            std::future::pending::<()>().await;
        });
        let dropped = tokio::task::spawn_blocking(move || drop(runtime));
        // Once one task is dropped none continues; only then may the write return.
        let _ = dead.await;
        self.store.let_go();
        dropped.await.unwrap();
    }

    pub(crate) fn devices(&self) -> &Devices {
        &self.handles().devices
    }

    pub(crate) async fn kill_and_start(&mut self) {
        self.kill().await;
        self.start().await;
    }

    /// Stops the agent and waits until it has ended.
    pub(crate) async fn stop(&mut self) {
        let mut agent = self.agent.take().unwrap();
        agent.shutdown.cancel();
        let ended = tokio::time::timeout(PATIENCE, &mut agent.ended).await;
        let Ok(ended) = ended else {
            panic!("the agent does not end; the calls so far:\n{}", self.cri.transcript());
        };
        ended.unwrap().unwrap();
        let runtime = agent.runtime.take();
        tokio::task::spawn_blocking(move || drop(runtime)).await.unwrap();
    }

    /// Returns the number of cgroup values that the agent restored after an outside change.
    pub(crate) fn drifted(&self, level: qos_tree::Level) -> u64 {
        self.handles().services.metrics.qos_tree.drifted(level)
    }

    /// Waits until the agent has restored a cgroup value after an outside change.
    pub(crate) async fn until_drifted(&self, level: qos_tree::Level) {
        until_seen("a restored value", || {
            (self.drifted(level) > 0).then_some(()).ok_or("no value was restored")
        })
        .await;
    }

    /// Waits until the agent has compared all cgroups with the pods' requests from now on: differences that
    /// it finds later come from outside changes.
    pub(crate) async fn until_cgroups_compared(&self) {
        let keeping = &self.handles().services.metrics.qos_tree;
        // The first comparison that ends may have begun before this call.
        let wanted = keeping.syncs() + 2;
        let done = || (keeping.syncs() >= wanted).then_some(()).ok_or("not yet");
        until_seen("two comparisons of the cgroups", done).await;
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.handles().services.metrics.pods
    }

    /// Sends a request to the pods' manager, as the node's other parts do.
    pub(crate) async fn request(&self, request: Request) {
        self.handles().requests.send(request).await.unwrap();
    }

    /// Sends the agent a hint, as the kernel's programs would.
    pub(crate) async fn signal(&self, hint: ExitHint) {
        self.handles().exits.send(hint).await.unwrap();
    }

    /// Returns the agent's events so far, as `reason: message`.
    pub(crate) fn events(&self) -> Vec<String> {
        let log = self.handles().services.events.subscribe();
        let all = log.borrow().all();
        all.iter().map(|event| format!("{}: {}", event.reason, event.message)).collect()
    }

    /// Returns the probes, as `beelet probe ls` shows them.
    pub(crate) async fn probes(&self) -> Vec<ProbeView> {
        self.handles().services.probes.list().await.unwrap()
    }

    pub(crate) fn table(&self) -> Arc<PodTable> {
        self.handles().services.table.borrow().clone()
    }

    /// Returns true if the agent reports that the table has everything that runs.
    pub(crate) fn is_complete(&self) -> bool {
        self.handles().services.complete.initialized()
    }

    /// Returns a receiver of its own, for tests that must see every change.
    pub(crate) fn watch(&self) -> watch::Receiver<Arc<PodTable>> {
        self.handles().services.table.clone()
    }

    // ---- Waiting ----

    /// Waits until `found` returns a value for the table.
    pub(crate) async fn until<T>(&self, what: &str, found: impl Fn(&PodTable) -> Option<T>) -> T {
        let mut table = self.watch();
        let waited = tokio::time::timeout(PATIENCE, async {
            loop {
                let result = found(&table.borrow_and_update().clone());
                if let Some(result) = result {
                    return result;
                }
                table.changed().await.unwrap();
            }
        });
        match waited.await {
            Ok(found) => found,
            Err(_) => panic!("waited for {what}; the table:\n{}\n{}", self.describe(), self.cri.transcript()),
        }
    }

    /// Waits until `wanted` is true for a pod.
    pub(crate) async fn until_pod(&self, name: &str, what: &str, wanted: impl Fn(&View) -> bool) -> View {
        self.until(&format!("{name}: {what}"), |table| view(table, name).filter(&wanted)).await
    }

    pub(crate) async fn until_ready(&self, name: &str) -> View {
        self.until_pod(name, "to be ready", View::ready).await
    }

    /// Waits until a pod has left the table.
    pub(crate) async fn until_gone(&self, name: &str) {
        self.until(&format!("{name} to be gone"), |table| view(table, name).is_none().then_some(())).await;
    }

    /// Waits until two more relists are complete: the results of the earlier ones have been published.
    pub(crate) async fn until_relisted(&self) {
        for _ in 0..2 {
            let first = self.cri.calls().len();
            let whole = |call: &beelet_tests::cri::Call| is_relist(&call.asked) && call.succeeded();
            self.cri.wait_for_after("a relist", first, whole).await;
        }
    }

    /// Waits until a pod has left the runtime, the cgroups and the disk.
    pub(crate) async fn until_nothing_is_left(&self, pod: &View) {
        let (name, uid) = (pod.name(), pod.uid());
        self.cri
            .wait_until(&format!("{name} to be gone from the runtime"), |world| sandboxes(world, &uid) == 0)
            .await;
        until_seen(&format!("{name} to leave nothing behind"), || {
            let files = self.files();
            let left = files.iter().any(|path| path.to_string_lossy().contains(&uid));
            if left { Err(format!("{files:#?}\n{}", self.cri.transcript())) } else { Ok(()) }
        })
        .await;
        let of_uid = |entry: &Arc<PodEntry>| entry.pod.metadata.uid.as_ref() == Some(&uid);
        if self.agent.is_some() {
            self.until("the pod to leave the table", |table| {
                (!table.pods.values().any(of_uid)).then_some(())
            })
            .await;
        }
    }

    /// Returns the folders and files of pods and cgroups.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut todo = vec![self.path("cgroup"), self.path("pods"), self.path("logs")];
        while let Some(dir) = todo.pop() {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    todo.push(entry.path());
                }
                found.push(entry.path());
            }
        }
        found
    }

    /// Describes the table, for failed tests.
    fn describe(&self) -> String {
        let table = self.table();
        let line =
            |(name, entry): (&PodName, &Arc<PodEntry>)| format!("{name}: {}\n", json!(entry.pod.status));
        let pods: String = table.pods.iter().map(line).collect();
        format!("{pods}rejected: {:?}", table.rejected)
    }

    // ---- The state of the runtime ----

    /// Returns names and attempts of a pod's containers, in order; running ones are marked with `+`, ended
    /// ones with `-`: `init/0- main/1+`.
    pub(crate) fn containers(&self, name: &str) -> String {
        containers(&self.cri.world(), name)
    }

    /// Returns the number of calls of these kinds that succeeded.
    pub(crate) fn done(&self, ops: &[Op]) -> usize {
        self.cri.calls().iter().filter(|call| ops.contains(&call.op()) && call.succeeded()).count()
    }
}

/// Returns true if a listing is the relist's, of all pods instead of one.
pub(crate) fn is_relist(asked: &beelet_tests::cri::Asked) -> bool {
    let beelet_tests::cri::Asked::ListContainers(request) = asked else { return false };
    request.filter.as_ref().is_some_and(|filter| !filter.label_selector.contains_key(labels::POD_UID))
}

pub(crate) fn containers(world: &World, name: &str) -> String {
    let pod = format!("{name}-n1");
    let of_pod = |c: &&beelet_tests::cri::Container| {
        world.sandboxes.get(&c.sandbox_id).is_some_and(|sandbox| sandbox.pod_name() == pod)
    };
    let mut all: Vec<String> = world
        .containers
        .values()
        .filter(of_pod)
        .map(|c| {
            let mark = match c.state {
                cri::ContainerState::ContainerCreated => "?",
                cri::ContainerState::ContainerRunning => "+",
                cri::ContainerState::ContainerExited => "-",
                cri::ContainerState::ContainerUnknown => "!",
            };
            format!("{}/{}{mark}", c.name(), c.attempt())
        })
        .collect();
    all.sort();
    all.join(" ")
}

fn sandboxes(world: &World, uid: &str) -> usize {
    let of_pod = |s: &&beelet_tests::cri::Sandbox| s.config.metadata.as_ref().is_some_and(|m| m.uid == uid);
    world.sandboxes.values().filter(of_pod).count()
}

/// Repeats a check until it passes, for files and counters, which send no events.
pub(crate) async fn until_seen<E: std::fmt::Display>(what: &str, check: impl Fn() -> Result<(), E>) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while let Err(last) = check() {
        assert!(tokio::time::Instant::now() < deadline, "waited in vain for {what}: {last}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until a file has this content.
pub(crate) async fn until_file(path: impl AsRef<Path>, content: &str) {
    let path = path.as_ref();
    until_seen(&format!("{} to be {content:?}", path.display()), || match std::fs::read_to_string(path) {
        Ok(found) if found == content => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

/// Creates a cgroup tree of plain folders, with the controller of CPU sets where anything is pinned.
fn cgroups(dir: &Path, has_cpusets: bool) -> Arc<Cgroups> {
    let hierarchy = |name: &str| Hierarchy {
        mount: dir.join("cgroup").join(name),
        is_v2: false,
        controllers: [name.to_owned()].into(),
    };
    let cpusets = has_cpusets.then(|| hierarchy("cpuset"));
    if let Some(Hierarchy { mount, .. }) = &cpusets {
        std::fs::create_dir_all(mount).unwrap();
        std::fs::write(mount.join("cpuset.cpus"), "0-3").unwrap();
        std::fs::write(mount.join("cpuset.mems"), "0-1").unwrap();
    }
    let hierarchies = [hierarchy("cpu"), hierarchy("memory")].into_iter().chain(cpusets).collect();
    let layout = Layout { version: Version::V1, hierarchies };
    Arc::new(Cgroups::over_folders(layout, "/").unwrap())
}

/// Store of the device checkpoint, in whose writes the agent can be killed.
#[derive(Debug)]
pub(crate) struct TestStore {
    file: ForeignFile,
    at: Mutex<Option<InWrite>>,
    reached: watch::Sender<bool>,
    changed: Condvar,
}

/// Moment in a write at which the agent is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum InWrite {
    /// Before anything is written.
    Before,
    /// Half of the temporary file is written.
    Half,
    /// The temporary file is complete, but not yet renamed.
    BeforeRename,
    /// The file is renamed to its final path.
    After,
}

impl TestStore {
    fn new(file: ForeignFile) -> Self {
        Self { file, at: Mutex::default(), reached: watch::Sender::new(false), changed: Condvar::new() }
    }

    pub(crate) fn file(&self) -> &ForeignFile {
        &self.file
    }

    /// Returns the path of the temporary file that replaces the checkpoint.
    pub(crate) fn temporary(&self) -> PathBuf {
        self.file.path().with_extension("tmp")
    }

    /// Stops the next write that changes the content; wait for [`TestStore::until_reached`].
    pub(crate) fn stop_at(&self, at: InWrite) {
        self.reached.send_replace(false);
        *self.at.lock().unwrap() = Some(at);
    }

    pub(crate) async fn until_reached(&self) {
        let mut reached = self.reached.subscribe();
        tokio::time::timeout(PATIENCE, reached.wait_for(|reached| *reached)).await.unwrap().unwrap();
    }

    /// Releases the stopped write; the agent that made it is dead.
    fn let_go(&self) {
        *self.at.lock().unwrap() = None;
        self.changed.notify_all();
    }

    fn stop(&self) {
        self.reached.send_replace(true);
        let guard = self.at.lock().unwrap();
        drop(self.changed.wait_while(guard, |at| at.is_some()).unwrap());
    }
}

impl Store for TestStore {
    fn read(&self) -> Result<Option<Vec<u8>>, StoreError> {
        self.file.read()
    }

    fn replace(&self, bytes: &[u8]) -> Result<(), StoreError> {
        let at = *self.at.lock().unwrap();
        // The pod's allocation, not a plugin's list.
        let at = at.filter(|_| String::from_utf8_lossy(bytes).contains("PodUID"));
        if at == Some(InWrite::Before) {
            self.stop();
            return Ok(()); // the caller is dead
        }
        if let Some(InWrite::Half | InWrite::BeforeRename) = at {
            let length = if at == Some(InWrite::Half) { bytes.len() / 2 } else { bytes.len() };
            std::fs::write(self.temporary(), &bytes[..length]).unwrap();
            self.stop();
            return Ok(()); // the caller is dead
        }
        self.file.replace(bytes)?;
        if at == Some(InWrite::After) {
            self.stop();
        }
        Ok(())
    }

    fn settle(&self) -> Result<(), StoreError> {
        self.file.settle()
    }

    fn set_aside(&self) -> Result<PathBuf, StoreError> {
        self.file.set_aside()
    }
}

/// A pod's entry in the table.
#[derive(Clone)]
pub(crate) struct View(pub(crate) Arc<PodEntry>);

/// Returns the pod of this manifest.
pub(crate) fn view(table: &PodTable, name: &str) -> Option<View> {
    let name = PodName { namespace: "default".to_owned(), name: format!("{name}-n1") };
    table.pods.get(&name).map(|entry| View(Arc::clone(entry)))
}

impl View {
    pub(crate) fn name(&self) -> String {
        self.0.pod.metadata.name.clone().unwrap()
    }

    pub(crate) fn uid(&self) -> String {
        self.0.pod.metadata.uid.clone().unwrap()
    }

    pub(crate) fn phase(&self) -> String {
        self.0.pod.status.as_ref().unwrap().phase.clone().unwrap()
    }

    pub(crate) fn ready(&self) -> bool {
        let conditions = self.0.pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
        conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
    }

    pub(crate) fn terminating(&self) -> bool {
        self.0.pod.metadata.deletion_timestamp.is_some()
    }

    pub(crate) fn container(&self, name: &str) -> ContainerStatus {
        let status = self.0.pod.status.as_ref().unwrap();
        let inits = status.init_container_statuses.iter().flatten();
        let mut all = inits.chain(status.container_statuses.iter().flatten());
        all.find(|c| c.name == name).unwrap().clone()
    }

    /// Restart counts by container.
    pub(crate) fn restarts(&self) -> BTreeMap<String, i32> {
        let status = self.0.pod.status.as_ref().unwrap();
        let inits = status.init_container_statuses.iter().flatten();
        inits
            .chain(status.container_statuses.iter().flatten())
            .map(|c| (c.name.clone(), c.restart_count))
            .collect()
    }

    pub(crate) fn running(&self, name: &str) -> bool {
        self.container(name).state.is_some_and(|state| state.running.is_some())
    }

    /// Returns the reason and the message of a waiting container.
    pub(crate) fn waiting(&self, name: &str) -> Option<(String, String)> {
        let waiting = self.container(name).state?.waiting?;
        Some((waiting.reason.unwrap_or_default(), waiting.message.unwrap_or_default()))
    }

    pub(crate) fn waits_for(&self, name: &str, reason: &str) -> bool {
        self.waiting(name).is_some_and(|(found, _)| found == reason)
    }
}

/// Returns a pod with one container, `main`, and a grace period of 7 seconds.
pub(crate) fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": { "terminationGracePeriodSeconds": 7, "containers": [container("main")] },
    })
}

/// Returns the pod with one field of its spec replaced.
pub(crate) fn with(mut pod: Value, field: &str, value: Value) -> Value {
    pod["spec"][field] = value;
    pod
}

pub(crate) fn container(name: &str) -> Value {
    json!({ "name": name, "image": IMAGE })
}

/// Returns a pod with a volume, an init container, a sidecar and two containers.
pub(crate) fn of_everything(name: &str) -> Value {
    let pod = with(pod(name), "containers", json!([container("a"), container("b")]));
    let mut sidecar = container("side");
    sidecar["restartPolicy"] = json!("Always");
    let pod = with(pod, "initContainers", json!([container("init"), sidecar]));
    with(pod, "volumes", json!([{ "name": "scratch", "emptyDir": {} }]))
}

/// Returns [`of_everything`] with hooks on the sidecar and the first container.
pub(crate) fn hooked(name: &str) -> Value {
    let mut pod = of_everything(name);
    let hook = |word: &str| json!({ "exec": { "command": [word] } });
    pod["spec"]["initContainers"][1]["lifecycle"] = json!({ "preStop": hook("side-stop") });
    pod["spec"]["containers"][0]["lifecycle"] =
        json!({ "postStart": hook("a-start"), "preStop": hook("a-stop") });
    pod
}
