//! `beelet run`: a node that runs pods. The servers come first, so that somebody can see what is missing; all
//! else is built once the container runtime answers.

use std::{net::SocketAddr, ops::Deref, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use beelet_base::blocking::blocking;
use beelet_policy::{
    resources::{
        cgroups::{CgroupConfig, CgroupValues},
        user_namespaces::IdPool,
    },
    tuner::scheduler::SchedulerKind,
};
use beelet_proto::cri;
use beelet_units::cgroup_driver::CgroupDriver;
use tokio::{
    sync::{SetOnce, mpsc, watch},
    task::spawn_blocking,
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::{info, warn};

use super::{
    builder::{Attached, Builder, Doors, Handles},
    facts::{self, Machine},
    farewell,
    frame::Frame,
    health::Health,
    kernel, kernel_settings,
    metrics::Metrics,
    parts::{Failures, Parts},
    preflight, process,
    protection::NodeProtection,
    sources,
    stats::{self, Stats},
    subordinate_ids,
};
use beelet_api::{
    grpc::{self, manifests::Running},
    http::{self, ApiState},
    signals::Mode,
};
use beelet_bpf::{Interest, Kernel, KernelOptions};
use beelet_cgroups::{Cgroups, Version};
use beelet_config::{Config, TcpProbes};
use beelet_cri::{Runtime, ownership::Ownership};
use beelet_csi::Csi;
use beelet_devices::{Devices, cdi_by_annotation};
use beelet_dra::Dra;
use beelet_images::{
    access::Access,
    credentials::Keys,
    providers::Providers,
    pull::{self, Puller},
};
use beelet_kubelet_api::{Verbosity, auth::Reviewers};
use beelet_logs::rotate::{self, Rotator};
use beelet_manifests::source::{ManifestSource, Options, Rules};
use beelet_model::{
    accounts::ServiceAccounts,
    desired::Desired,
    processes::Shared as Processes,
    request::Request,
    storage::{Storage, VolumesInUse},
    table::PodTable,
};
use beelet_pleg::{
    Pace,
    exits::{self, Exits},
    relist::Relist,
    stream,
};
use beelet_pods::{
    launch::Launcher,
    manager::{self, Manager},
    qos_tree,
    records::{Records, WrittenRecords},
    user_namespaces::UserNamespaces,
};
use beelet_probes::Probes;
use beelet_shutdown::Shutdown;
use beelet_state::{
    State,
    events::{NodeEvents, Recorder},
};
use beelet_volumes::{Disks, FlexVolumes, LocalDisks, RemoteDisks};

mod folders;
mod upkeep;

/// Requests under way to the pods' manager. A sender waits while the manager is behind by this many.
const REQUESTS: usize = 1024;
/// How often the runtime is asked how it is configured before the agent gives up, and how long it waits
/// between.
const CONFIG_TRIES: usize = 30;
const CONFIG_RETRY: Duration = Duration::from_secs(1);
/// The kernel program that reports exits, by its name in the table of capabilities.
const EXIT_PROGRAM: &str = "task_exited";
/// What stopping a pod may take beyond its grace period, before the service manager may lose its patience.
const STOP_MARGIN: Duration = Duration::from_secs(30);
/// Where logind looks for pieces of its configuration that are gone with the next boot (logind.conf(5)).
const LOGIND_DROP_INS: &str = "/run/systemd/logind.conf.d";
/// The machine's own logs.
const SYSTEM_LOGS: &str = "/var/log";
/// How often freed memory goes back to the system.
const MEMORY_PERIOD: Duration = Duration::from_secs(60);

/// What is there before the runtime answers.
pub(super) struct Base {
    pub(super) config: Config,
    pub(super) doors: Doors,
    pub(super) state: Arc<State>,
    pub(super) runtime: Runtime,
    pub(super) cgroups: Arc<Cgroups>,
    pub(super) events: Recorder,
    pub(super) metrics: Metrics,
    pub(super) table: watch::Receiver<Arc<PodTable>>,
    health: Health,
    stats: Stats,
    probes: beelet_probes::Handle,
    accounts: Option<Arc<dyn ServiceAccounts>>,
    pub(super) storage: Option<Arc<dyn Storage>>,
    disks: Disks,
    pub(super) csi: Csi,
    pub(super) dra: Dra,
    late: LateServices,
}

/// What only one part takes, each of it.
struct Inputs {
    table: watch::Sender<Arc<PodTable>>,
    stats: beelet_stats::Inbox,
    probes: beelet_probes::Commands,
    sources: Vec<watch::Receiver<Arc<Desired>>>,
    attached: Vec<Attached>,
}

/// What services of the API use that is there only once the node runs.
#[derive(Default)]
struct LateServices {
    devices: grpc::devices::Slot,
    running: Arc<SetOnce<Running>>,
}

/// Runs the node until `shutdown`.
pub(super) async fn run(builder: Builder, config: Config, shutdown: CancellationToken) -> Result<()> {
    let Builder { doors, sources, attached, reviewers, verbosity, accounts, storage } = builder;
    preflight::require(&config, reviewers.access.is_some())?;
    // The locks come first: a second agent must not get as far as touching anything.
    let state = Arc::new(State::open(&config.beelet.state_dir)?);
    let (runtime, ownership) = open_runtime(&doors, &config).await?;
    folders::make_kubelet_dir(&config).await?;
    if doors.own_process {
        for trouble in process::prepare(config.oom_score_adj, config.max_open_files) {
            warn!("{trouble}");
        }
    }
    let cgroups = open_cgroups(&doors, &config)?;
    let (table_out, table) = watch::channel(Arc::new(PodTable::default()));
    let (stats, inbox) = Stats::new();
    let (probes, commands) = beelet_probes::handle();
    let metrics = Metrics::of_node(&config.node_name);
    let (csi, disks) = open_volumes(&config, &metrics).await?;
    let events = Recorder::load(&state);
    let dra = open_dra(&config, &metrics, events.clone()).await?;
    let base = Base {
        events,
        health: Health::new(&config.runtime_endpoint),
        metrics,
        csi,
        dra,
        late: LateServices::default(),
        accounts,
        storage,
        disks,
        config,
        doors,
        state,
        runtime,
        cgroups,
        table,
        stats,
        probes,
    };
    let inputs = Inputs { table: table_out, stats: inbox, probes: commands, sources, attached };
    let mut frame = Frame::new(&shutdown);
    let services = base.services(&frame.serving);
    let (pages, plain) = base.http();
    frame.serve(&base.config.socket(), services, plain).await?;
    if let Some(port) = beelet_kubelet_api::port(&base.config.server, reviewers.access.is_some()) {
        let parts = base.kubelet_api(pages, (reviewers, verbosity), &frame.serving);
        frame.serve_kubelet_api(parts, port).await?;
    }
    let told = NodeEvents::new(base.events.clone(), &base.config.node_name);
    frame.servers.spawn("node readiness", base.health.clone().tell(told, frame.serving.clone()));
    frame.servers.spawn("event log", base.events.writer(Arc::clone(&base.state), frame.serving.clone()));
    frame.notify_service_manager(stopping_time(base.config.beelet.stop_pods_on_exit, base.table.clone()));
    let ownership = ownership.map(Arc::new);
    let locks = upkeep::Locks { state: Arc::clone(&base.state), runtime: ownership.clone() };
    let told = NodeEvents::new(base.events.clone(), &base.config.node_name);
    frame.servers.spawn("locks", locks.keep(told, frame.serving.clone()));
    let ran = base.run(inputs, &frame, ownership.as_deref(), shutdown).await;
    frame.end().await;
    drop(ownership);
    ran
}

/// The runtime, and the right to drive it as long as the second value lives.
async fn open_runtime(doors: &Doors, config: &Config) -> Result<(Runtime, Option<Ownership>)> {
    if let Some(runtime) = &doors.runtime {
        return Ok((runtime.clone(), None));
    }
    let runtime = Runtime::new(&config.runtime_endpoint, config.runtime_request_timeout)?
        .with_image_endpoint(&config.image_endpoint)?;
    let socket = runtime.socket().to_owned();
    let taken = spawn_blocking(move || Ownership::acquire(&socket)).await;
    Ok((runtime, Some(taken.context("the runtime could not be taken")??)))
}

/// Storage plugins, and disks and drivers, with what is on disk of their volumes.
async fn open_volumes(config: &Config, metrics: &Metrics) -> Result<(Csi, Disks)> {
    let (node, metrics) = (config.node_name.clone(), metrics.csi.clone());
    let (kubelet_dir, pods_dir) = (config.beelet.kubelet_dir.clone(), config.beelet.pods_dir.clone());
    let drivers = config.volume_plugin_dir.clone();
    let open = move || {
        let (dirs, in_use) = ((&*kubelet_dir, &*pods_dir), VolumesInUse::default());
        let csi = Csi::open(&node, dirs, in_use.clone(), metrics);
        let flex = FlexVolumes::open(&node, dirs, &drivers, in_use.clone());
        let remote = RemoteDisks::open(dirs, in_use);
        (csi, Disks::new(LocalDisks::new(&kubelet_dir, &pods_dir), flex, remote))
    };
    spawn_blocking(open).await.context("the volumes of storage plugins")
}

/// Drivers, with what is on disk of the claims that they have prepared.
async fn open_dra(config: &Config, metrics: &Metrics, events: Recorder) -> Result<Dra> {
    let (dir, metrics) = (config.beelet.kubelet_dir.clone(), metrics.dra.clone());
    let events = NodeEvents::new(events, &config.node_name);
    let open = move || Dra::open(&dir, metrics, |reason, message| events.warning(reason, &message));
    spawn_blocking(open).await.context("the record of resource claims")
}

/// The cgroup tree, if it can do what the configuration asks for.
fn open_cgroups(doors: &Doors, config: &Config) -> Result<Arc<Cgroups>> {
    let cgroups = match &doors.cgroups {
        Some(cgroups) => Arc::clone(cgroups),
        // The runtime may know better, once it answers.
        None => Arc::new(Cgroups::discover(&config.cgroup_root, config.cgroup_driver.unwrap_or_default())?),
    };
    if config.fail_cgroup_v1 && cgroups.version() != Version::V2 {
        bail!(
            "this machine's cgroups are {}, and failCgroupV1 is true: boot with systemd.unified_cgroup_hierarchy=1, or \
             take failCgroupV1 out of the configuration",
            cgroups.version()
        );
    }
    cgroups.require_root()?;
    if config.single_process_oom_kill == Some(false) && cgroups.version() != Version::V2 {
        bail!(
            "this machine's cgroups are {}, and singleProcessOOMKill is false: the kernel kills a whole container for want \
             of memory on version 2 alone; take singleProcessOOMKill out of the configuration",
            cgroups.version()
        );
    }
    Ok(cgroups)
}

/// What the manifests add up to depends on.
fn manifest_rules(config: &Config, state: &Arc<State>) -> Rules {
    Rules {
        critical_static_pods: config.beelet.critical_static_pods,
        allowed_unsafe_sysctls: config.allowed_unsafe_sysctls.clone(),
        state: Some(Arc::clone(state)),
    }
}

/// How long pods may take to stop with the agent, as of when it is told to end; zero where they go on without
/// it.
fn stopping_time(stop_pods: bool, table: watch::Receiver<Arc<PodTable>>) -> impl Fn() -> Duration {
    move || {
        let table = table.borrow();
        let graces = table.pods.values().map(|entry| beelet_model::pod::grace_period(&entry.pod));
        graces.max().filter(|_| stop_pods).map_or(Duration::ZERO, |longest| longest + STOP_MARGIN)
    }
}

impl Base {
    /// Waits for the runtime, builds the node and runs it until `shutdown`.
    async fn run(
        self,
        inputs: Inputs,
        frame: &Frame,
        ownership: Option<&Ownership>,
        shutdown: CancellationToken,
    ) -> Result<()> {
        let Some(version) = frame.wait_for(&self.runtime).await? else { return Ok(()) };
        if let Some(ownership) = ownership {
            // A kubelet that waited for the runtime as we did is seen only now.
            ownership.refuse_kubelet(self.runtime.socket())?;
            let (pods, socket) = (&self.config.beelet.pods_dir, self.runtime.socket());
            self.health.follow_mounts(folders::refuse_lost_mounts(pods, socket).await?);
        }
        let node = Node::build(self, version).await?;
        node.run(inputs, &frame.failures, shutdown).await
    }

    /// All services of the gRPC socket.
    fn services(&self, serving: &CancellationToken) -> Routes {
        let (table, config) = (&self.table, &self.config);
        let logs = config.pod_logs_dir.clone();
        let folder = grpc::manifests::Folder {
            path: config.static_pod_path.clone(),
            node_name: config.node_name.clone(),
            rules: manifest_rules(config, &self.state),
            runtime: self.runtime.clone(),
        };
        let outlook = self.health.outlook();
        let running = || Arc::clone(&self.late.running);
        Routes::new(grpc::node_service(table.clone(), outlook, serving.clone()))
            .add_service(grpc::events::service(&self.events, &config.node_name, serving.clone()))
            .add_service(grpc::containers::service(
                table.clone(),
                self.runtime.clone(),
                logs,
                running(),
                serving.clone(),
            ))
            .add_service(grpc::images::service(table.clone(), self.runtime.clone()))
            .add_service(grpc::devices::service(Arc::clone(&self.late.devices), table.clone()))
            .add_service(grpc::manifests::service(folder, running()))
            .add_service(grpc::garbage::service(Arc::clone(&self.metrics.protection.collectors)))
            .add_service(grpc::tuner::service(self.metrics.tuner_view.subscribe()))
            .add_service(grpc::probes::service(self.probes.clone()))
            .add_service(self.stats.service(Mode::Run, serving))
    }

    /// What is served without encryption, with the setting that says where; and all pages, for those who may
    /// see them.
    fn http(&self) -> (ApiState, Vec<(&'static str, SocketAddr, ApiState)>) {
        let config = &self.config;
        let mut registry = self.metrics.registry(&self.runtime, &self.cgroups);
        self.stats.register(&mut registry, config.beelet.metrics_pod_uid);
        let health = self.health.clone();
        let all = ApiState {
            pods: self.table.clone(),
            registry: Arc::new(registry),
            pressure: self.stats.pressure.clone(),
            specs: true,
            summary: true,
            health: Arc::new(move || health.check().err()),
            slis: http::slis::Slis::default(),
        };
        let local = ApiState { specs: config.beelet.unauthenticated_pods, ..all.clone() };
        let healthz = SocketAddr::new(config.healthz_address, config.healthz_port);
        // As the kubelet's: whoever can connect sees the pods too.
        let read_only = SocketAddr::new(config.server.address, config.server.read_only_port);
        let mut plain = vec![("healthzPort", healthz, local)];
        if config.server.enabled {
            plain.push(("readOnlyPort", read_only, all.clone()));
        }
        plain.retain(|(_, address, _)| address.port() != 0);
        (all, plain)
    }

    /// What the HTTPS server needs.
    fn kubelet_api(
        &self,
        pages: ApiState,
        (reviewers, verbosity): (Reviewers, Option<Verbosity>),
        serving: &CancellationToken,
    ) -> beelet_kubelet_api::Parts {
        beelet_kubelet_api::Parts {
            config: self.config.server.clone(),
            node_name: self.config.node_name.clone(),
            certificates: self.config.cert_dir(),
            reviewers,
            pages: http::router(pages),
            verbosity,
            metrics: self.metrics.kubelet_api.clone(),
            configz: self.config.effective_kubelet(),
            table: self.table.clone(),
            runtime: self.runtime.clone(),
            logs: self.config.pod_logs_dir.clone(),
            system_logs: SYSTEM_LOGS.into(),
            checkpoints: self.config.beelet.kubelet_dir.join("checkpoints"),
            shutdown: serving.clone(),
        }
    }
}

impl Base {
    /// Gets images, with the node's keys to registries.
    async fn puller(&self) -> Result<Puller> {
        let config = &self.config;
        let (providers, accounts) = (config.credential_providers.clone(), self.accounts.clone());
        let metrics = self.metrics.protection.images.clone();
        let opened = spawn_blocking(move || Providers::open(providers.as_ref(), accounts, metrics)).await;
        let home = std::env::var_os("HOME").map(PathBuf::from);
        let keys = Keys {
            providers: opened.context("the credential providers")??,
            files: Keys::files_of(&config.beelet.kubelet_dir, home.as_deref()),
        };
        let limits = pull::Limits {
            parallel: config.parallel_image_pulls,
            per_second: config.registry_pull_qps.into(),
            burst: config.registry_burst,
        };
        let access = Access::new(&config.beelet.kubelet_dir, config.image_verification.clone());
        Ok(Puller::new(self.runtime.clone(), limits, keys, Arc::new(access)))
    }
}

/// All that the runtime's presence allows to be opened.
pub(super) struct Node {
    base: Base,
    version: cri::VersionResponse,
    pub(super) machine: Machine,
    pub(super) cgroup_config: CgroupConfig,
    user_ids: IdPool,
    puller: Arc<Puller>,
    reserved: Vec<CgroupValues>,
    pub(super) kernel: Kernel,
}

impl Deref for Node {
    type Target = Base;

    fn deref(&self) -> &Base {
        &self.base
    }
}

/// Records whether the pods together are held to what the node has for them
/// (`enforceNodeAllocatableCgroups`).
fn say_enforced(events: &NodeEvents, error: Option<&beelet_pods::error::Error>) {
    match error {
        None => {
            events.normal("NodeAllocatableEnforced", "Updated Node Allocatable limit across pods");
        }
        Some(error) => {
            let message = format!("Failed to update Node Allocatable Limits \"/kubepods\": {error}");
            events.warning("FailedNodeAllocatableEnforcement", &message);
        }
    }
}

impl Node {
    async fn build(base: Base, version: cri::VersionResponse) -> Result<Self> {
        let told = runtimes_cgroup_driver(&base.runtime).await?;
        let mut base = base;
        if let Some(driver) = common_driver(base.config.cgroup_driver, told)? {
            base.cgroups = Arc::new(Cgroups::clone(&base.cgroups).with_driver(driver)?);
            base.cgroups.require_root()?;
        }
        let machine = match &base.doors.machine {
            Some(machine) => machine.clone(),
            None => Machine::inspect(&base.config).await?,
        };
        facts::check_reservations(&base.config, &machine)?;
        preflight::swap(&base.config, machine.swap_bytes)?;
        kernel_settings::check(base.config.protect_kernel_defaults)?;
        let mut cgroup_config = facts::cgroup_config(&base.config, &machine, &base.cgroups);
        let (held, journal) = (Arc::clone(&base.cgroups), Arc::clone(&base.state));
        spawn_blocking(move || beelet_tuner::recover(&held, &journal))
            .await
            .context("the tuner's journal")?;
        let values = qos_tree::values(&[], &cgroup_config)?;
        let written = qos_tree::write(&base.cgroups, values).await;
        say_enforced(&NodeEvents::new(base.events.clone(), &base.config.node_name), written.as_ref().err());
        written?;
        cgroup_config.swap = facts::swap(&base.config, &machine, &base.cgroups);
        let (per_pod, pods) = (base.config.user_ids_per_pod, base.config.pod_limit(machine.cpus));
        let ids = spawn_blocking(move || subordinate_ids::pool(per_pod, pods)).await;
        let user_ids = ids.context("the ids of user namespaces")??;
        let reserved = facts::reserved_cgroups(&base.config, &base.cgroups, &cgroup_config)?;
        let kernel = kernel::start(kernel_options(&base.config, &base.cgroups)).await?;
        let puller = Arc::new(base.puller().await?);
        Ok(Self { base, version, machine, cgroup_config, user_ids, puller, reserved, kernel })
    }

    /// Connects the parts and runs them until `shutdown`.
    async fn run(self, inputs: Inputs, failures: &Failures, shutdown: CancellationToken) -> Result<()> {
        // The manager may take its time to end (pods that stop with the agent); all others serve it till
        // then.
        let working = CancellationToken::new();
        let mut tasks = Parts::new(&working, failures);
        let (requests, requested) = mpsc::channel(REQUESTS);
        let goes_down = watch::Sender::new(None);
        let (processes_out, processes) = watch::channel(Processes::default());
        let (active_out, active) = watch::channel(None);
        let (devices, device_tasks) = self.open_devices(active, requests.clone()).await?;
        let protection = NodeProtection::build(&self, &requests, goes_down.subscribe()).await;
        let state = Arc::clone(&self.state);
        let loading = blocking("reading the records of pods", move || Records::load(&state));
        // With a thousand pods each takes its time.
        let (records, desired) = tokio::join!(loading, self.desired(inputs.sources, &mut tasks, &working));
        // It ends when the manager has.
        tasks.spawn_optional("records", records.writer(Arc::clone(&self.state), self.metrics.pods.clone()));
        let launcher = self.launcher(desired.clone(), records.written(), &devices, &protection)?;
        let launcher = Arc::new(launcher);
        let exits = self.follow_exits(&mut tasks, &requests, processes, &working);
        let handles = self.handles(desired, requests, devices, exits, &protection, &mut tasks);
        tasks.spawn_optional("node shutdown", self.shutdown(&handles, goes_down).run(working.clone()));
        self.open_services(&handles);
        let sweep = self.sweep(&records, &handles);
        let manager = Manager::new(manager::Parts {
            launcher: Arc::clone(&launcher),
            runtime_name: self.version.runtime_name.clone(),
            desired: handles.desired.clone(),
            requests: requested,
            table: inputs.table,
            processes: processes_out,
            records,
            active: active_out,
            metrics: self.metrics.pods.clone(),
            stop_pods_on_exit: self.config.beelet.stop_pods_on_exit,
            complete: Arc::clone(&self.health.complete),
        });
        for (name, part) in device_tasks.named(&working) {
            tasks.spawn(name, part);
        }
        let disk = protection.disk.clone();
        protection.spawn(&mut tasks, &working);
        self.probe(&mut tasks, inputs.probes, &handles, &working);
        self.measure(&mut tasks, (inputs.stats, disk), &working);
        self.keep_cgroups(&mut tasks, &handles, &working);
        self.keep_volumes(&mut tasks, &launcher, sweep, &working);
        self.keep_images(&mut tasks, &working);
        self.keep_logs(&mut tasks, &working);
        self.serve_beside(&mut tasks, &handles, &working);
        tasks.spawn("memory", give_memory_back(working.clone()));
        for (name, part) in inputs.attached {
            tasks.spawn(name, part(handles.clone(), working.clone()));
        }
        drop(handles);
        tasks.watch("kernel events", self.kernel.failed());
        let failed = tokio::select! {
            () = manager.run(shutdown) => None,
            failed = failures.first() => Some(failed),
        };
        working.cancel();
        farewell(tasks).await;
        // Pinned, the kernel's listener table goes on while the agent is away. Pods that were not stopped
        // need it.
        let keep_pins = failed.is_some() || !self.config.beelet.stop_pods_on_exit;
        kernel::stop(self.kernel, keep_pins).await;
        info!("ended");
        failed.map_or(Ok(()), Err)
    }

    /// What should run: the static manifests, and the other sources of pods.
    async fn desired(
        &self,
        mut sources: Vec<watch::Receiver<Arc<Desired>>>,
        tasks: &mut Parts,
        working: &CancellationToken,
    ) -> watch::Receiver<Arc<Desired>> {
        let manifests = self.manifests(tasks, working).await;
        if sources.is_empty() {
            return manifests;
        }
        sources.insert(0, manifests);
        let (joined, joining) = sources::join(sources);
        // The API's services listen until the very end.
        let working = working.clone();
        tasks.spawn_optional("sources of pods", async move {
            working.run_until_cancelled(joining).await;
        });
        joined
    }

    /// The pods of static manifests. Without a static pod path there are none, and none that runs is unwanted
    /// either.
    async fn manifests(
        &self,
        tasks: &mut Parts,
        working: &CancellationToken,
    ) -> watch::Receiver<Arc<Desired>> {
        let Some(path) = &self.config.static_pod_path else {
            warn!("staticPodPath is not set: no static pods are started, and those that run are left alone");
            let nothing = Desired { without_folder: true, ..Desired::default() };
            return watch::channel(Arc::new(nothing)).1;
        };
        let options = Options {
            check_frequency: self.config.file_check_frequency,
            rules: manifest_rules(&self.config, &self.state),
            put_back_restarts: self.config.put_back_restarts,
            events: self.events.clone(),
            cancel: working.clone(),
        };
        let (desired, watching) =
            ManifestSource::open(path.clone(), self.config.node_name.clone(), options).await;
        tasks.spawn_optional("manifests", watching);
        desired
    }

    /// Starts what learns of containers' ends: the kernel, the runtime's events and the relist. Other signs
    /// of an end can be sent where it returns.
    fn follow_exits(
        &self,
        tasks: &mut Parts,
        requests: &mpsc::Sender<Request>,
        processes: watch::Receiver<Processes>,
        working: &CancellationToken,
    ) -> mpsc::Sender<beelet_pleg::ExitHint> {
        let pace = Pace::default();
        let (relist, pulse) =
            Relist::new(self.runtime.clone(), requests.clone(), pace.clone(), self.metrics.relist.clone());
        self.health.follow(pulse);
        tasks.spawn("relist", relist.run(working.clone()));
        let (hints_out, hints) = mpsc::channel(beelet_pleg::HINTS);
        let reports = |c: &beelet_bpf::Capability| c.program == EXIT_PROGRAM && c.have.is_ok();
        pace.set_kernel(self.kernel.capabilities().iter().any(reports));
        let edges = self.kernel.subscribe(Interest::EXITS | Interest::OOM_KILLS);
        tasks.spawn("kernel exits", beelet_pleg::forward(edges, hints_out.clone(), working.clone()));
        let runtime = self.runtime.clone();
        let stream = stream::follow(runtime, hints_out.clone(), pace.clone(), working.clone());
        tasks.spawn_optional("runtime events", stream);
        let exits = Exits::new(exits::Parts {
            runtime: self.runtime.clone(),
            requests: requests.clone(),
            processes,
            hints,
            pace,
            cgroups: Arc::clone(&self.cgroups),
            metrics: self.metrics.exits.clone(),
        });
        tasks.spawn("exits", exits.run(working.clone()));
        hints_out
    }

    /// What the API and attached parts may use.
    fn handles(
        &self,
        desired: watch::Receiver<Arc<Desired>>,
        requests: mpsc::Sender<Request>,
        devices: Devices,
        exits: mpsc::Sender<beelet_pleg::ExitHint>,
        protection: &NodeProtection,
        tasks: &mut Parts,
    ) -> Handles {
        Handles {
            table: self.table.clone(),
            complete: Arc::clone(&self.health.complete),
            desired,
            requests,
            events: self.events.clone(),
            state: Arc::clone(&self.state),
            runtime: self.runtime.clone(),
            host: self.machine.host.clone(),
            resources: protection.resources(&self.config),
            devices,
            csi: self.csi.clone(),
            dra: self.dra.clone(),
            conditions: protection.conditions(&self.health, tasks),
            probes: self.probes.clone(),
            exits,
            shutdown: protection.shutdown.clone(),
            written: watch::Sender::new(None),
            metrics: self.metrics.clone(),
        }
    }

    /// What ends the pods before the machine goes down.
    fn shutdown(&self, handles: &Handles, since: watch::Sender<beelet_shutdown::Since>) -> Shutdown {
        Shutdown::new(beelet_shutdown::Parts {
            periods: self.config.shutdown.clone(),
            bus: None,
            logind_drop_ins: LOGIND_DROP_INS.into(),
            table: self.table.clone(),
            requests: handles.requests.clone(),
            written: handles.written.subscribe(),
            since,
            events: NodeEvents::new(self.events.clone(), &self.config.node_name),
            state: Arc::clone(&self.state),
            metrics: self.metrics.shutdown.clone(),
        })
    }

    /// Hands the API's services what they have waited for.
    fn open_services(&self, handles: &Handles) {
        let _ = self.late.devices.set(grpc::devices::Known {
            devices: handles.devices.clone(),
            resources: handles.resources.clone(),
            conditions: Arc::clone(&handles.conditions),
        });
        let (desired, requests) = (handles.desired.clone(), handles.requests.clone());
        let table = self.table.clone();
        let _ = self.late.running.set(Running { desired, requests, table });
    }

    fn probe(
        &self,
        tasks: &mut Parts,
        commands: beelet_probes::Commands,
        handles: &Handles,
        working: &CancellationToken,
    ) {
        let probes = Probes::new(beelet_probes::Parts {
            table: self.table.clone(),
            requests: handles.requests.clone(),
            runtime: Some(self.runtime.clone()),
            listeners: self.kernel.listeners(),
            checker: self.kernel.checker(),
            edges: self.kernel.subscribe(Interest::LISTENERS),
            commands,
            settings: beelet_probes::Settings {
                tcp_by_kernel: self.config.beelet.tcp_probes == TcpProbes::Kernel,
                edge_policy: self.config.beelet.edge_policy,
                canary: self.config.beelet.liveness_canary,
                queue_rule: self.config.beelet.liveness_stalled,
            },
            events: self.events.clone(),
            metrics: self.metrics.probes.clone(),
            asking: tokio::runtime::Handle::current(),
        });
        tasks.spawn("probes", probes.run(working.clone()));
    }

    fn measure(
        &self,
        tasks: &mut Parts,
        (inbox, disk): (beelet_stats::Inbox, beelet_eviction::DiskView),
        working: &CancellationToken,
    ) {
        let beelet = &self.config.beelet;
        let options = stats::Options {
            node: self.config.node_name.clone(),
            interval: beelet.pressure_interval,
            most: beelet.max_measured_containers,
            disk: Box::new(disk),
            volumes: self.metrics.pods.volume_stats.seen(),
        };
        let measured = (Arc::clone(&self.cgroups), self.table.clone(), &self.kernel);
        self.stats.clone().start(inbox, options, measured, tasks, working);
    }

    /// Starts what writes cgroups beside the workers: the keeper of the pods' tree, and the tuner.
    fn keep_cgroups(&self, tasks: &mut Parts, handles: &Handles, working: &CancellationToken) {
        let keeper = qos_tree::Parts {
            table: self.table.clone(),
            cgroups: Arc::clone(&self.cgroups),
            config: self.cgroup_config.clone(),
            runtime: self.runtime.clone(),
            reserved: self.reserved.clone(),
            requests: handles.requests.clone(),
            metrics: self.metrics.qos_tree.clone(),
            check: self.doors.cgroup_check,
        };
        tasks.spawn("cgroup keeper", qos_tree::follow(keeper, working.clone()));
        let configured = &self.config.beelet.tuner;
        let tuner = beelet_tuner::Parts {
            table: self.table.clone(),
            cgroups: Arc::clone(&self.cgroups),
            owner: beelet_tuner::Owner::Us(self.cgroup_config.clone()),
            scheduler: (configured.scheduler == SchedulerKind::SchedExt)
                .then(|| kernel::scheduler(Arc::clone(&self.cgroups))),
            state: Arc::clone(&self.state),
            kernel: self.kernel.measures().map(kernel::for_tuner),
            settings: beelet_tuner::Settings {
                mode: configured.mode,
                interval: configured.interval,
                back_off: configured.back_off,
                law: configured.law,
            },
            metrics: self.metrics.tuner.clone(),
            view: self.metrics.tuner_view.clone(),
        };
        let (view, node) = (self.metrics.tuner_view.subscribe(), self.config.node_name.clone());
        let telling = beelet_tuner::record_events(view, self.events.clone(), node, working.clone());
        tasks.spawn_optional("tuner's events", telling);
        tasks.spawn_optional("tuner", beelet_tuner::run(tuner, working.clone()));
    }

    fn rotator(&self) -> Rotator {
        let limits = rotate::Limits {
            max_size: self.config.container_log_max_size,
            max_files: self.config.container_log_max_files,
            interval: self.config.container_log_monitor_interval,
        };
        Rotator::new(self.runtime.clone(), self.config.pod_logs_dir.clone(), limits, self.table.clone())
    }

    fn launcher(
        &self,
        desired: watch::Receiver<Arc<Desired>>,
        written: WrittenRecords,
        devices: &Devices,
        protection: &NodeProtection,
    ) -> Result<Launcher> {
        Ok(Launcher {
            runtime: self.runtime.clone(),
            puller: Arc::clone(&self.puller),
            desired,
            table: self.table.clone(),
            cgroups: Arc::clone(&self.cgroups),
            cgroup_config: self.cgroup_config.clone(),
            node: facts::node_facts(&self.config, &self.machine, &self.cgroup_config.node)?,
            pods_dir: self.config.beelet.pods_dir.clone(),
            max_restart_delay: self.config.max_container_restart_period,
            events: self.events.clone(),
            devices: devices.clone(),
            cdi_by_annotation: cdi_by_annotation(&self.version.runtime_name, &self.version.runtime_version),
            storage: self.storage.clone(),
            disks: self.disks.clone(),
            csi: self.csi.clone(),
            mounts: self.health.mounts(),
            dra: self.dra.clone(),
            users: Arc::new(UserNamespaces::new(self.user_ids, self.config.beelet.pods_dir.clone())),
            admission: Arc::clone(&protection.admission),
            leases: protection.leases.clone(),
            written,
            turns: beelet_pods::turns::Turns::default(),
            metrics: self.metrics.pods.clone(),
        })
    }
}

/// The driver that both sides use; none if neither says so.
///
/// # Errors
/// They say different things: the runtime would put containers where nobody keeps their cgroups.
fn common_driver(
    configured: Option<CgroupDriver>,
    told: Option<CgroupDriver>,
) -> Result<Option<CgroupDriver>> {
    match (configured, told) {
        (Some(CgroupDriver::Cgroupfs), Some(CgroupDriver::Systemd)) => bail!(
            "the container runtime's cgroup driver is systemd, and ours is cgroupfs: set cgroupDriver: systemd in the \
             configuration (or leave it out), or SystemdCgroup = false in the runtime's and restart it"
        ),
        (Some(CgroupDriver::Systemd), Some(CgroupDriver::Cgroupfs)) => bail!(
            "the container runtime's cgroup driver is cgroupfs, and ours is systemd: set SystemdCgroup = true in the \
             runtime's configuration and restart it, or cgroupDriver: cgroupfs in ours (or leave it out)"
        ),
        (configured, told) => Ok(told.or(configured)),
    }
}

/// The runtime's cgroup driver; a runtime that has just come up may need a moment to tell it.
async fn runtimes_cgroup_driver(runtime: &Runtime) -> Result<Option<CgroupDriver>> {
    for _ in 0..CONFIG_TRIES {
        match runtime.runtime_config().await {
            Ok(driver) => return Ok(driver),
            Err(error) => warn!("{error}; asked again in {} s", CONFIG_RETRY.as_secs()),
        }
        tokio::time::sleep(CONFIG_RETRY).await;
    }
    Ok(runtime.runtime_config().await?)
}

fn kernel_options(config: &Config, cgroups: &Cgroups) -> KernelOptions {
    KernelOptions {
        bpffs: config.beelet.bpffs.clone(),
        pin_name: config.beelet.pin_name.clone(),
        cgroup: cgroups.cgroup2_path("/kubepods").unwrap_or_default(),
        mode: config.beelet.bpf,
        object: config.beelet.bpf_log.clone(),
        pressure_edges: config.beelet.pressure_edges,
        pods: usize::try_from(config.max_pods).unwrap_or(usize::MAX),
        ..KernelOptions::default()
    }
}

/// Gives the memory back, every [`MEMORY_PERIOD`], that the start or a burst needed (a hundred pods that
/// start at once) and nothing uses any more.
async fn give_memory_back(shutdown: CancellationToken) {
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(MEMORY_PERIOD) => {}
        }
        // It may take a moment.
        if spawn_blocking(beelet_bpf::release_memory).await.is_err() {
            return;
        }
    }
}
