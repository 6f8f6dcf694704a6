//! The node: the agent on a simulated machine, its users and its API server, from the first boot to the end
//! of a plan. The agent's async runtime is dropped at each kill: all its tasks end where they wait.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use beelet::cluster::{self, Membership};
use beelet::node::{Builder, Doors, Handles, Machine as Hardware};
use beelet_base::filesystem::{Space, Statvfs};
use beelet_base::simulation::{self, Stream};
use beelet_cgroups::{Cgroups, Hierarchy, Layout, Version};
use beelet_config::{Config, ConfigFaults, TcpProbes};
use beelet_cri::{Connect, Runtime};
use beelet_eviction::gauges::Gauge;
use beelet_judge::trace::{ContainerStatus, End, Fact, State, Status};
use beelet_model::pod::HostIps;
use beelet_model::table::PodChanges;
use beelet_policy::eviction::{Observation, Signal};
use beelet_units::{bpf_settings::BpfMode, fs_usage::FsUsage, quantity::Quantity};
use k8s_openapi::api::core::v1 as core;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::api_server::ApiServer;
use crate::cable::Cable;
use crate::machine::{CPU, Machine};
use crate::plan::{Action, Plan, Scenario};
use crate::seam;
use crate::shapes::{NODE, Pod};

/// Bytes of memory and of disk of the machine.
const MEMORY: u64 = 8 << 30;
const STORAGE: u64 = 10 << 30;
/// File of the agent's kubeconfig.
const KUBECONFIG: &str = "kubeconfig";
/// Time after which systemd starts an agent that ended by itself.
const RESTART: Duration = Duration::from_secs(2);

/// The reason for which a life of the agent ends.
enum Turn {
    /// The agent died; it starts again after this time.
    Died(Duration),
    /// The plan is over.
    Over,
}

/// A node.
pub(crate) struct Node<'a> {
    plan: &'a Plan,
    pub(crate) machine: Machine,
    dir: PathBuf,
    /// Index of the next action.
    next: usize,
    faults_ended: bool,
    /// Existing pods by name.
    pods: BTreeMap<String, Pod>,
    api_server: ApiServer,
    booted: Duration,
}

impl<'a> Node<'a> {
    /// Creates the node of a plan, with its files in `dir`.
    pub(crate) fn new(plan: &'a Plan, dir: &Path) -> std::io::Result<Self> {
        for folder in ["manifests", "logs", "pods"] {
            std::fs::create_dir_all(dir.join(folder))?;
        }
        let cpu = [("cpu.shares", "1024"), ("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", "100000")];
        let memory = [("memory.limit_in_bytes", "9223372036854771712")];
        for (hierarchy, files) in [("cpu", &cpu[..]), ("memory", &memory[..])] {
            let mount = dir.join("cgroup").join(hierarchy);
            std::fs::create_dir_all(&mount)?;
            for (file, content) in files {
                std::fs::write(mount.join(file), content)?;
            }
        }
        let api_server = ApiServer::new(plan.seed);
        api_server.write_kubeconfig(&dir.join(KUBECONFIG))?;
        Ok(Self {
            plan,
            machine: Machine::new(plan, dir.join("cgroup")),
            dir: dir.to_owned(),
            next: 0,
            faults_ended: false,
            pods: BTreeMap::new(),
            api_server,
            booted: Duration::ZERO,
        })
    }

    /// Runs the plan to its end.
    pub(crate) fn run(&mut self) -> std::io::Result<()> {
        let mut down = Duration::ZERO;
        loop {
            let uptime = Duration::from_secs(30) + seam::elapsed().saturating_sub(self.booted);
            let (fake, core) = (Arc::clone(&self.api_server.fake), Arc::clone(&self.machine.core));
            let _simulated = simulation::begin(uptime).with_network(move |_| {
                let token =
                    core.disturbances.api_server_link().ok_or(std::io::ErrorKind::ConnectionRefused)?;
                Ok(Box::new(Cable::new(fake.connect(), token)))
            });
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .start_paused(true)
                .event_interval(self.plan.event_interval)
                .build()?;
            let turn = runtime.block_on(async {
                seam::follow_runtime();
                let turn = self.live(down).await;
                seam::leave_runtime();
                turn
            });
            drop(runtime);
            self.machine.core.forget_agent();
            match turn {
                Turn::Died(away) => down = away,
                Turn::Over => break,
            }
        }
        self.inspect();
        Ok(())
    }

    /// Runs the world without an agent for a while, then with one until its end.
    async fn live(&mut self, down: Duration) -> Turn {
        let start = seam::elapsed() + down;
        if !down.is_zero()
            && let Some(turn) = self.drive(Some(start)).await
        {
            return turn;
        }
        self.machine.core.record(Fact::AgentStarted);
        let (hints_out, hints) = mpsc::unbounded_channel();
        self.machine.core.send_hints(hints_out);
        let core = Arc::clone(&self.machine.core);
        let builder = Builder::default()
            .doors(self.doors())
            .attach("simulation", move |handles: Handles, working| follow(core, handles, hints, working));
        let config = match self.config() {
            Ok(config) => config,
            Err(error) => {
                self.machine.core.record(Fact::AgentFailed { why: format!("{error:?}") });
                return Turn::Over;
            }
        };
        let builder = match membership(self.plan, &self.dir) {
            Some(membership) => cluster::join(builder, &config, membership),
            None => builder,
        };
        let mut agent = tokio::spawn(builder.run(config, CancellationToken::new()));
        let killed = Arc::clone(&self.machine.core.killed);
        let turn = tokio::select! {
            biased;
            () = killed.notified() => None,
            ended = &mut agent => {
                let why = match ended {
                    Ok(Ok(())) => "ended".to_owned(),
                    Ok(Err(error)) => format!("{error:#}"),
                    Err(panic) => format!("{panic}"),
                };
                self.machine.core.record(Fact::AgentFailed { why });
                return Turn::Died(RESTART);
            }
            turn = self.drive(None) => turn,
        };
        turn.unwrap_or_else(|| {
            self.machine.core.record(Fact::AgentKilled);
            Turn::Died(self.machine.core.disturbances.away())
        })
    }

    /// Drives the world: processes that end, actions that are due, objects that the agent releases. Returns
    /// None at `until`.
    async fn drive(&mut self, until: Option<Duration>) -> Option<Turn> {
        loop {
            let now = seam::elapsed();
            self.machine.core.end_due();
            self.notice_removals();
            while let Some((_, action)) = self.plan.actions.get(self.next).filter(|(at, _)| *at <= now) {
                self.next += 1;
                if let Some(turn) = self.act(&action.clone()) {
                    return Some(turn);
                }
            }
            if !self.faults_ended && now >= self.plan.faults_end() {
                self.faults_ended = true;
                self.machine.core.record(Fact::FaultsEnded);
            }
            if now >= self.plan.end {
                return Some(Turn::Over);
            }
            if until.is_some_and(|until| now >= until) {
                return None;
            }
            let times = [
                self.machine.core.next_end(),
                self.plan.actions.get(self.next).map(|(at, _)| *at),
                (!self.faults_ended).then(|| self.plan.faults_end()),
                Some(self.plan.end),
                until,
            ];
            let next = times.into_iter().flatten().min().unwrap_or(self.plan.end);
            let sleep = tokio::time::sleep(next.saturating_sub(now).max(Duration::from_millis(1)));
            tokio::select! {
                biased;
                () = self.machine.core.changed.notified() => {}
                () = self.api_server.changed() => {}
                () = sleep => {}
            }
        }
    }

    /// Records the pods whose objects are gone.
    fn notice_removals(&mut self) {
        for uid in self.api_server.gone() {
            self.machine.core.record(Fact::Unwanted { uid });
        }
    }

    // ---- Users ----

    fn act(&mut self, action: &Action) -> Option<Turn> {
        let core = Arc::clone(&self.machine.core);
        match action {
            Action::Create(pod) => self.create(pod),
            Action::Delete { pod, grace } => self.delete(pod, *grace),
            Action::Resize { pod, cpu } => self.resize(pod, *cpu),
            Action::Exit { pod, container, code, oom } => {
                if let Some(id) = self.running(pod, *container) {
                    core.end(&id, *code, if *oom { End::Oom } else { End::Itself });
                }
            }
            Action::Sick { pod, container, seconds } => {
                if let Some((uid, name)) = self.named(pod, *container) {
                    core.disturbances.sicken(&uid, &name, *seconds);
                }
            }
            Action::SandboxDies { pod } => {
                if let Some(pod) = self.pods.get(pod) {
                    core.crash(Some(&pod.uid));
                }
            }
            Action::Fault(fault) => core.disturbances.disturb(fault.clone()),
            Action::ApiFault(fault) => {
                core.record(Fact::ApiServerDisturbed { seconds: fault.lasts() });
                self.api_server.disturb(fault);
            }
            Action::ApiServerAway { seconds } => {
                core.record(Fact::ApiServerDisturbed { seconds: *seconds });
                core.disturbances.stop_api_server(*seconds);
            }
            Action::WatchesEnd { broken, compacted } => {
                core.record(Fact::ApiServerDisturbed { seconds: 0 });
                self.api_server.end_watches(*broken, *compacted);
            }
            Action::RuntimeRestarts { seconds } => core.disturbances.restart_runtime(*seconds),
            Action::Kill { calls, after_effect, seconds } => {
                core.disturbances.kill_at(*calls, *after_effect, Duration::from_secs(*seconds));
            }
            Action::KillNow { seconds } => {
                core.record(Fact::AgentKilled);
                return Some(Turn::Died(Duration::from_secs(*seconds)));
            }
            Action::ClockSteps { seconds } => {
                core.record(Fact::ClockStepped { seconds: *seconds });
                seam::step_wall_clock(*seconds);
            }
            Action::Reboot { seconds } => {
                core.record(Fact::Rebooted);
                core.crash(None);
                let away = Duration::from_secs(*seconds);
                self.booted = seam::elapsed() + away;
                return Some(Turn::Died(away));
            }
        }
        None
    }

    fn named(&self, pod: &str, container: usize) -> Option<(String, String)> {
        let pod = self.pods.get(pod)?;
        Some((pod.uid.clone(), pod.containers.get(container)?.name.clone()))
    }

    fn running(&self, pod: &str, container: usize) -> Option<String> {
        let (uid, name) = self.named(pod, container)?;
        self.machine.core.running(&uid, &name)
    }

    fn create(&mut self, pod: &Pod) {
        let mut pod = pod.clone();
        if !pod.is_static {
            pod.uid = self.api_server.create(&pod);
        }
        self.machine.core.record(Fact::Wanted(pod.judged()));
        if pod.is_static {
            let file = self.manifest(&pod.name);
            let temporary = file.with_extension("part");
            // The disk of the simulation's own machine is not simulated.
            let _ = std::fs::write(&temporary, pod.object().to_string());
            let _ = std::fs::rename(temporary, file);
        }
        self.pods.insert(pod.name.clone(), pod);
    }

    fn delete(&mut self, name: &str, grace: Option<u64>) {
        let Some(pod) = self.pods.remove(name) else { return };
        if pod.is_static {
            self.machine.core.record(Fact::Unwanted { uid: pod.uid });
            let _ = std::fs::remove_file(self.manifest(name));
            return;
        }
        let grace = grace.unwrap_or(pod.grace);
        if self.api_server.delete(name, grace) {
            self.machine.core.record(Fact::Deleting { uid: pod.uid, grace });
        }
    }

    fn resize(&mut self, name: &str, cpu: u64) {
        let Some(pod) = self.pods.get_mut(name).filter(|pod| !pod.is_static) else { return };
        let Some(first) = pod.containers.iter_mut().find(|c| c.role == beelet_judge::trace::Role::Main)
        else {
            return;
        };
        first.cpu = cpu;
        self.machine.core.record(Fact::Wanted(pod.judged()));
        self.api_server.update(pod);
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.dir.join("manifests").join(format!("{name}.yaml"))
    }

    // ---- The agent ----

    fn doors(&self) -> Doors {
        let memory = || {
            let of = |bytes: u64| Quantity::from_units(i64::try_from(bytes).unwrap_or(i64::MAX));
            let observation = Observation { available: of(MEMORY / 2), capacity: of(MEMORY) };
            Ok([(Signal::MemoryAvailable, observation)].into())
        };
        let half_full = Statvfs {
            bytes: FsUsage { capacity_bytes: STORAGE, available_bytes: STORAGE / 2 },
            inodes: 1 << 20,
            inodes_free: 1 << 19,
            read_only: false,
        };
        let (cri, core) = (Arc::clone(&self.machine.cri), Arc::clone(&self.machine.core));
        let connect = Connect(Arc::new(move || {
            let (cri, core) = (Arc::clone(&cri), Arc::clone(&core));
            Box::pin(async move {
                let token = core.disturbances.runtime_link().ok_or(std::io::ErrorKind::ConnectionRefused)?;
                Ok(Box::new(Cable::new(cri.connect(), token)) as Box<dyn Stream>)
            })
        }));
        Doors {
            runtime: Some(Runtime::over(Path::new("/run/simulated.sock"), connect, Duration::from_secs(120))),
            cgroups: cgroups(&self.dir),
            machine: Some(Hardware {
                cpus: usize::try_from(CPU / 1000).unwrap_or(1),
                memory_bytes: MEMORY,
                storage_bytes: Some(STORAGE),
                swap_bytes: 0,
                hugepages: BTreeMap::new(),
                topology: None,
                host: HostIps::fixed(vec![Ipv4Addr::LOCALHOST.into()]),
            }),
            space: Space::by(move |_| Ok(half_full)),
            gauges: Some(vec![Gauge::new("memory", Duration::from_secs(3600), memory).of_memory()]),
            own_process: false,
            ..Doors::default()
        }
    }

    fn config(&self) -> Result<Config, ConfigFaults> {
        let (mut config, _) = Config::with_defaults()?;
        let path = |name: &str| self.dir.join(name);
        config.node_name = NODE.to_owned();
        config.static_pod_path = Some(path("manifests"));
        config.pod_logs_dir = path("logs");
        config.healthz_port = 0;
        config.server.port = Some(0);
        config.resolv_conf = None;
        let beelet = &mut config.beelet;
        beelet.state_dir = path("state");
        beelet.run_dir = path("run");
        beelet.pods_dir = path("pods");
        beelet.kubelet_dir = path("kubelet");
        beelet.seccomp_profile_root = path("seccomp");
        beelet.bpf = BpfMode::Off;
        beelet.tcp_probes = TcpProbes::Connect;
        beelet.liveness_canary = Duration::ZERO;
        Ok(config)
    }

    /// Records what the API server shows, and the folders and files of ended pods.
    fn inspect(&mut self) {
        self.notice_removals();
        for pod in self.api_server.objects() {
            self.machine.core.record(Fact::Stored(status_of(&pod)));
        }
        if self.plan.scenario != Scenario::Standalone {
            let ready = self.api_server.node_is_ready(NODE);
            self.machine.core.record(Fact::Node { ready });
        }
        self.machine.core.read_cgroups();
        let mut found = Vec::new();
        let mut todo: Vec<PathBuf> =
            ["cgroup", "pods", "logs"].iter().map(|name| self.dir.join(name)).collect();
        while let Some(folder) = todo.pop() {
            let Ok(entries) = std::fs::read_dir(&folder) else { continue };
            for entry in entries.flatten() {
                if entry.path().is_dir() {
                    todo.push(entry.path());
                }
                found.push(entry.path());
            }
        }
        found.sort();
        for place in found {
            let Ok(place) = place.strip_prefix(&self.dir) else { continue };
            let text = place.to_string_lossy().replace('_', "-");
            if let Some(at) = text.find("00000000-0000-4000-8000-") {
                let uid: String = text.chars().skip(at).take(36).collect();
                self.machine.core.record(Fact::Left { uid, place: place.display().to_string() });
            }
        }
    }
}

/// Returns the files of the node's identity; None for a standalone node.
fn membership(plan: &Plan, dir: &Path) -> Option<Membership> {
    (plan.scenario != Scenario::Standalone).then(|| Membership {
        kubeconfig: dir.join(KUBECONFIG),
        bootstrap: None,
        cert_dir: dir.join("pki"),
    })
}

fn cgroups(dir: &Path) -> Option<Arc<Cgroups>> {
    let hierarchy = |name: &str| Hierarchy {
        mount: dir.join("cgroup").join(name),
        is_v2: false,
        controllers: [name.to_owned()].into(),
    };
    let layout = Layout { version: Version::V1, hierarchies: vec![hierarchy("cpu"), hierarchy("memory")] };
    Cgroups::over_folders(layout, "/").ok().map(Arc::new)
}

/// Follows the agent's pod table and passes on the kernel's hints, until the agent ends.
async fn follow(
    core: Arc<crate::machine::Core>,
    handles: Handles,
    mut hints: mpsc::UnboundedReceiver<beelet_pleg::ExitHint>,
    working: CancellationToken,
) {
    let mut table = handles.services.table.clone();
    let mut before = beelet_model::table::Pods::new();
    loop {
        let now = Arc::clone(&table.borrow_and_update());
        for (_, entry) in PodChanges::between(&before, &now.pods).changed {
            core.record_status(status_of(&entry.pod));
        }
        before = now.pods.clone();
        tokio::select! {
            () = working.cancelled() => return,
            changed = table.changed() => if changed.is_err() { return working.cancelled().await },
            Some(hint) = hints.recv() => { let _ = handles.exits.send(hint).await; }
        }
    }
}

fn status_of(pod: &core::Pod) -> Status {
    let status = pod.status.clone().unwrap_or_default();
    let all =
        status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    let containers = all.map(|one| {
        let state = one.state.as_ref();
        let waiting = || state.and_then(|state| state.waiting.as_ref()?.reason.clone()).unwrap_or_default();
        ContainerStatus {
            name: one.name.clone(),
            id: one.container_id.as_deref().map(|id| id.rsplit('/').next().unwrap_or(id).to_owned()),
            state: match state {
                Some(state) if state.running.is_some() => State::Running,
                Some(core::ContainerState { terminated: Some(end), .. }) => State::Terminated(end.exit_code),
                _ => State::Waiting(waiting()),
            },
            restarts: u32::try_from(one.restart_count).unwrap_or(0),
            ready: one.ready,
        }
    });
    Status {
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        containers: containers.collect(),
        phase: status.phase.unwrap_or_default(),
        reason: status.reason,
    }
}
