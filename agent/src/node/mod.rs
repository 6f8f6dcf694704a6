//! Builds the parts, connects them, runs them, stops them. Nothing else knows them all.

mod alive;
mod conditions;
mod devices;
#[cfg(test)]
mod docs;
pub mod facts;
pub mod observe;
mod parts;
pub mod process;
mod signals;
pub mod systemd;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use beelet_base::folder::{PRIVATE, make_folder};
use beelet_policy::cgroups::{CgroupConfig, CgroupValues};
use beelet_proto::cri;
use jiff::Timestamp;
use prometheus_client::registry::Registry;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{SetOnce, mpsc, watch},
    task::spawn_blocking,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::{error, info, warn};

use self::{
    alive::Alive,
    parts::{Failures, Parts},
    signals::Signals,
};
use beelet_api::{
    grpc::{self, Outlook, manifests::Running},
    http::{self, ApiState},
    podresources,
    signals::Mode,
};
use beelet_bpf::{Kernel, KernelOptions};
use beelet_cgroups::{Cgroups, Version};
use beelet_config::{BpfMode, Config, EdgePolicy, TcpProbes};
use beelet_cri::Runtime;
use beelet_cri::ownership::Ownership;
use beelet_devices::{Devices, cdi_by_annotation};
use beelet_images::pull::{self, Puller};
use beelet_logs::rotate::{self, Rotator};
use beelet_manifests::source::{ManifestSource, Options};
use beelet_model::{
    desired::Desired,
    table::{Complete, PodTable},
};
use beelet_pleg::{
    Pace,
    exits::{self, Exits},
    relist::{self, NOTICED_AFTER, Pulse, Relist, UNHEALTHY_AFTER},
    stream,
};
use beelet_pods::{
    launch::Launcher,
    manager::{self, Manager},
    qos_tree,
    records::Records,
};
use beelet_policy::cgroups::CgroupDriver;
use beelet_probes::Probes;
use beelet_state::{State, events::Recorder};

/// Requests under way to the pods' manager. A sender waits while the manager is behind by this many.
const REQUESTS: usize = 1024;
/// How often the runtime is asked how it is configured before the agent gives up, and how long it waits between.
const CONFIG_TRIES: usize = 30;
const CONFIG_RETRY: Duration = Duration::from_secs(1);
/// The program that tells of exits, as the table of capabilities names it.
const EXIT_PROGRAM: &str = "task_exited";
/// A signal that comes again within this time is the same wish: timeout(1) tells both its child and its
/// group.
const SAME_WISH: Duration = Duration::from_secs(1);
/// What stopping a pod may take beyond its grace period, before the service manager may lose its patience.
const STOP_MARGIN: Duration = Duration::from_secs(30);
/// How long the parts get to end after they were told to.
const FAREWELL: Duration = Duration::from_secs(10);
/// How often folders of pods that nobody knows are looked for, and how long they must have been that.
const ORPHANS: Duration = Duration::from_secs(60);
/// How often freed memory goes back to the system.
const MEMORY_PERIOD: Duration = Duration::from_secs(60);

/// Runs the node until SIGTERM or SIGINT.
///
/// # Errors
/// Something that the agent can't do without isn't to be had; the sentence says what, and what to do.
pub async fn run(config: Config) -> Result<()> {
    let shutdown = CancellationToken::new();
    // Killed or ended at once, it leaves the kernel programs to the next start, as it is meant to.
    stop_on_signals(&shutdown, || {})?;
    run_until(config, shutdown).await
}

/// Runs the node until `shutdown`.
///
/// # Errors
/// As for [`run`].
pub async fn run_until(config: Config, shutdown: CancellationToken) -> Result<()> {
    // The locks come first: a second agent must not get as far as touching anything.
    let state = Arc::new(State::open(&config.beelet.state_dir)?);
    // Several parts make folders in it: it has one mode, whichever comes first.
    let kubelet_dir = config.beelet.kubelet_dir.clone();
    let made =
        spawn_blocking(move || make_folder(&kubelet_dir, PRIVATE)).await.context("the kubelet's folder")?;
    made.map_err(anyhow::Error::msg)?;
    let runtime = Runtime::new(&config.runtime_endpoint, config.runtime_request_timeout)?
        .with_image_endpoint(&config.image_endpoint)?;
    let ownership = own(&runtime).await?;
    for trouble in process::prepare(config.oom_score_adj, config.max_open_files) {
        warn!("{trouble}");
    }
    let cgroups = Arc::new(Cgroups::discover(&config.cgroup_root, CgroupDriver::Cgroupfs)?);
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

    let metrics = Metrics::default();
    let (signals, inbox) = Signals::new();
    let mut registry = metrics.registry(&runtime, &cgroups);
    signals.register(&mut registry, config.beelet.metrics_pod_uid);
    let (table_out, table) = watch::channel(Arc::new(PodTable::default()));
    let health = Health::new(&config.runtime_endpoint);
    let failures = Failures::default();
    // The others end before these two: what they do last can still be seen.
    let serving = CancellationToken::new();
    let (events, tuner) = (Recorder::load(&state), metrics.tuner_view.subscribe());
    let late = Late::default();
    let (probing, probe_commands) = beelet_probes::handle();
    let services = services(&config, &table, &runtime, (&events, &late, &health), &serving)
        .add_service(grpc::garbage::service(Arc::clone(&metrics.alive.collectors)))
        .add_service(grpc::tuner::service(tuner))
        .add_service(grpc::probes::service(probing))
        .add_service(signals.service(Mode::Run, &serving));
    let mut servers = Parts::new(&serving, &failures);
    serve(
        &config,
        table.clone(),
        (Arc::new(registry), &signals),
        services,
        &health,
        (&mut servers, &serving),
    )
    .await?;
    servers.spawn("event log", events.writer(Arc::clone(&state), serving.clone()));
    let patience = stopping_time(config.beelet.stop_pods_on_exit, table.clone());
    servers.spawn("service manager", systemd::follow(shutdown.clone(), serving.clone(), patience));

    let answered = tokio::select! {
        version = runtime.wait_ready(&shutdown) => Ok(version),
        failed = failures.first() => Err(failed),
    };
    let ran = match answered {
        Err(failed) => Err(failed),
        Ok(None) => Ok(()),
        Ok(Some(version)) => {
            info!(
                name = version.runtime_name,
                version = version.runtime_version,
                "container runtime answers"
            );
            // A kubelet that waited for the runtime as we did is seen only now.
            ownership.refuse_kubelet(runtime.socket())?;
            match Node::build(config, runtime, version, cgroups, state, events, metrics).await {
                Ok(node) => {
                    let inputs = (signals, inbox, probe_commands);
                    node.run((table_out, table), inputs, (&health, &late, &failures), shutdown).await
                }
                Err(error) => Err(error),
            }
        }
    };
    serving.cancel();
    // The event log writes once more.
    servers.ended().await;
    drop(ownership);
    ran
}

/// Makes sure that nobody else drives the runtime, as long as the value lives.
async fn own(runtime: &Runtime) -> Result<Ownership> {
    let socket = runtime.socket().to_owned();
    Ok(spawn_blocking(move || Ownership::take(&socket)).await.context("the runtime could not be taken")??)
}

/// How long pods may take to stop with the agent, as of when it is told to end; nothing where they go on
/// without it.
fn stopping_time(stop_pods: bool, table: watch::Receiver<Arc<PodTable>>) -> impl Fn() -> Duration {
    move || {
        let table = table.borrow();
        let graces = table.pods.values().map(|entry| beelet_model::pod::grace_period(&entry.pod));
        graces.max().filter(|_| stop_pods).map_or(Duration::ZERO, |longest| longest + STOP_MARGIN)
    }
}

/// The first signal ends the agent in order. One that comes later ends it at once, after `at_once`.
fn stop_on_signals(shutdown: &CancellationToken, at_once: impl Fn() + Send + 'static) -> Result<()> {
    let mut term = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut int = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let shutdown = shutdown.clone();
    tokio::spawn(async move {
        let mut told: Option<Instant> = None;
        loop {
            let name = tokio::select! {
                _ = term.recv() => "SIGTERM",
                _ = int.recv() => "SIGINT",
            };
            match told {
                Some(at) if at.elapsed() < SAME_WISH => continue,
                Some(_) => {
                    warn!("{name} again: ending at once");
                    at_once();
                    std::process::exit(130);
                }
                None => {}
            }
            told = Some(Instant::now());
            info!("{name}: ending");
            shutdown.cancel();
        }
    });
    Ok(())
}

/// Every part's counters.
#[derive(Default)]
struct Metrics {
    pods: beelet_pods::metrics::Metrics,
    qos_tree: qos_tree::Metrics,
    tuner: beelet_tuner::Metrics,
    /// What the tuner shows: the API is there before the tuner is.
    tuner_view: watch::Sender<Arc<beelet_tuner::View>>,
    probes: beelet_probes::Metrics,
    relist: relist::Metrics,
    devices: beelet_devices::Metrics,
    exits: exits::Metrics,
    alive: alive::Early,
}

impl Metrics {
    fn registry(&self, runtime: &Runtime, cgroups: &Cgroups) -> Registry {
        let mut registry = Registry::default();
        self.pods.register(&mut registry);
        self.qos_tree.register(&mut registry);
        self.tuner.register(&mut registry);
        self.probes.register(&mut registry);
        self.relist.register(&mut registry);
        self.devices.register(&mut registry);
        self.exits.register(&mut registry);
        self.alive.register(&mut registry);
        runtime.register_metrics(&mut registry);
        cgroups.metrics().register(&mut registry);
        registry
    }
}

/// Whether the agent is well: once the runtime has answered, the relist's pulse tells.
#[derive(Clone)]
struct Health {
    endpoint: Arc<str>,
    pulse: Arc<OnceLock<Pulse>>,
    began: Instant,
    complete: Complete,
}

impl Health {
    fn new(endpoint: &str) -> Self {
        let (pulse, complete) = (Arc::default(), Arc::default());
        Self { endpoint: endpoint.into(), pulse, began: Instant::now(), complete }
    }

    fn check(&self) -> Result<(), String> {
        self.check_within(UNHEALTHY_AFTER)
    }

    /// An error sentence once the runtime has been silent for so long.
    fn check_within(&self, patience: Duration) -> Result<(), String> {
        let endpoint = &self.endpoint;
        let Some(pulse) = self.pulse.get() else {
            return Err(format!("the container runtime at {endpoint} has not answered yet"));
        };
        let silent = pulse.silence();
        if silent < patience {
            return Ok(());
        }
        let since = Timestamp::now().saturating_sub(silent).map(|at| format!(" since {at:.0}"));
        Err(format!(
            "the container runtime at {endpoint} has not answered{} ({} s): is it running?",
            since.unwrap_or_default(),
            silent.as_secs()
        ))
    }

    /// What clients are told beside the pods.
    fn outlook(&self) -> Outlook {
        let health = self.clone();
        Outlook::new(Arc::clone(&self.complete), move || health.check_within(NOTICED_AFTER).err())
    }

    /// For how long [`Health::check`] has said what it says now.
    fn lasted(&self) -> Duration {
        self.pulse.get().map_or_else(|| self.began.elapsed(), Pulse::lasted)
    }
}

/// What services need that is there only when the node runs.
#[derive(Default)]
struct Late {
    devices: grpc::devices::Slot,
    running: Arc<SetOnce<Running>>,
}

/// All services of the gRPC socket.
fn services(
    config: &Config,
    table: &watch::Receiver<Arc<PodTable>>,
    runtime: &Runtime,
    (events, late, health): (&Recorder, &Late, &Health),
    serving: &CancellationToken,
) -> Routes {
    let logs = config.pod_logs_dir.clone();
    let (folder, node_name) = (config.static_pod_path.clone(), config.node_name.clone());
    Routes::new(grpc::node_service(table.clone(), health.outlook(), serving.clone()))
        .add_service(grpc::events::service(events, serving.clone()))
        .add_service(grpc::containers::service(table.clone(), runtime.clone(), logs, serving.clone()))
        .add_service(grpc::devices::service(Arc::clone(&late.devices), table.clone()))
        .add_service(grpc::manifests::service(folder, node_name, Arc::clone(&late.running)))
}

/// Starts both servers. They are there before the runtime is, so that somebody can be told what is missing.
async fn serve(
    config: &Config,
    pods: watch::Receiver<Arc<PodTable>>,
    (registry, signals): (Arc<Registry>, &Signals),
    services: Routes,
    health: &Health,
    (servers, serving): (&mut Parts, &CancellationToken),
) -> Result<()> {
    let socket = beelet_serve::grpc::bind(&config.socket()).await?;
    let until = serving.clone();
    servers.spawn("gRPC server", async move {
        if let Err(error) = beelet_serve::grpc::serve(socket, services, until).await {
            error!("{error:#}");
        }
    });
    if config.healthz_port != 0 {
        let listener = http::bind(SocketAddr::new(config.healthz_address, config.healthz_port)).await?;
        let health = health.clone();
        let state = ApiState {
            pods,
            registry,
            pressure: signals.pressure.clone(),
            specs: config.beelet.unauthenticated_pods,
            summary: true,
            health: Arc::new(move || health.check()),
        };
        servers.spawn("HTTP server", http::serve(listener, state, serving.clone()));
    }
    Ok(())
}

/// All parts that the runtime's presence allows to be built, not running yet.
struct Node {
    config: Config,
    runtime: Runtime,
    version: cri::VersionResponse,
    cgroups: Arc<Cgroups>,
    cgroup_config: CgroupConfig,
    reserved: Vec<CgroupValues>,
    kernel: Kernel,
    state: Arc<State>,
    events: Recorder,
    metrics: Metrics,
}

impl Node {
    async fn build(
        config: Config,
        runtime: Runtime,
        version: cri::VersionResponse,
        cgroups: Arc<Cgroups>,
        state: Arc<State>,
        events: Recorder,
        metrics: Metrics,
    ) -> Result<Self> {
        if cgroup_driver(&runtime).await? == Some(beelet_cri::CgroupDriver::Systemd) {
            bail!(
                "the container runtime uses the systemd cgroup driver, which beelet can't drive yet: set \
                 SystemdCgroup = false in the runtime's configuration and restart it"
            );
        }
        let cgroup_config = facts::cgroup_config(&config, cgroups.version())?;
        let (held, journal) = (Arc::clone(&cgroups), Arc::clone(&state));
        spawn_blocking(move || beelet_tuner::recover(&held, &journal))
            .await
            .context("the tuner's journal")?;
        let values = qos_tree::values(&[], &cgroup_config).map_err(anyhow::Error::msg)?;
        qos_tree::write(&cgroups, values).await.map_err(anyhow::Error::msg)?;
        let reserved = facts::reserved_cgroups(&config, &cgroups, &cgroup_config)?;
        let kernel = start_kernel(&config, &cgroups).await?;
        Ok(Self {
            config,
            runtime,
            version,
            cgroups,
            cgroup_config,
            reserved,
            kernel,
            state,
            events,
            metrics,
        })
    }

    /// Connects the parts and runs them until `shutdown`.
    async fn run(
        self,
        (table_out, table): (watch::Sender<Arc<PodTable>>, watch::Receiver<Arc<PodTable>>),
        (signals, inbox, probe_commands): (Signals, beelet_stats::Inbox, beelet_probes::Commands),
        (health, late, failures): (&Health, &Late, &Failures),
        shutdown: CancellationToken,
    ) -> Result<()> {
        // The manager may take its time to end (pods that stop with the agent); all others serve it till then.
        let working = CancellationToken::new();
        let (requests_out, requests) = mpsc::channel(REQUESTS);
        let pace = Pace::default();
        let (relist, pulse) = Relist::new(
            self.runtime.clone(),
            requests_out.clone(),
            pace.clone(),
            self.metrics.relist.clone(),
        );
        let (processes_out, processes) = watch::channel(beelet_model::processes::Shared::default());
        let _ = health.pulse.set(pulse);
        let (active_out, active) = watch::channel(None);
        let (devices, device_tasks) = self.open_devices(active, requests_out.clone()).await?;
        let records = Records::load(&self.state);
        let mut tasks = Parts::new(&working, failures);
        // It ends when the manager has.
        tasks.spawn_optional("records", records.writer(Arc::clone(&self.state), self.metrics.pods.clone()));
        let alive = Alive::build(alive::Parts {
            config: &self.config,
            runtime: &self.runtime,
            cgroups: &self.cgroups,
            cgroup_config: &self.cgroup_config,
            kernel: &self.kernel,
            state: &self.state,
            table: &table,
            requests: &requests_out,
            events: &self.events,
            early: &self.metrics.alive,
        })
        .await?;
        let resources = facts::node_resources(&self.config, alive.admission.resources());
        let conditions = alive.conditions(health, &mut tasks);
        let _ = late.devices.set(grpc::devices::Known { devices: devices.clone(), resources, conditions });
        let desired = self.manifests(&mut tasks, &working).await;
        let launcher = Arc::new(self.launcher(desired.clone(), &devices, &alive)?);
        let _ = late.running.set(Running { desired: desired.clone(), requests: requests_out.clone() });
        let sweep = beelet_pods::orphans::Sweep {
            pods_dir: self.config.beelet.pods_dir.clone(),
            table: table.clone(),
            known: records.known(),
            desired: desired.clone(),
            runtime: self.runtime.clone(),
            period: ORPHANS,
        };
        let manager = Manager::new(manager::Parts {
            launcher: Arc::clone(&launcher),
            runtime_name: self.version.runtime_name.clone(),
            desired,
            requests,
            table: table_out,
            processes: processes_out,
            records,
            active: active_out,
            metrics: self.metrics.pods.clone(),
            stop_pods_on_exit: self.config.beelet.stop_pods_on_exit,
            complete: Arc::clone(&health.complete),
        });
        let exit_requests = requests_out.clone();
        let probes = Probes::new(beelet_probes::Parts {
            table: table.clone(),
            requests: requests_out,
            runtime: Some(self.runtime.clone()),
            listeners: self.kernel.listeners(),
            checker: self.kernel.checker(),
            edges: self.kernel.subscribe(beelet_bpf::Interest::LISTENERS),
            commands: probe_commands,
            settings: self.probe_settings(),
            events: self.events.clone(),
            metrics: self.metrics.probes.clone(),
            asking: tokio::runtime::Handle::current(),
        });
        let tuning = self.tuning(table.clone());
        let keeper = qos_tree::Parts {
            table: table.clone(),
            cgroups: Arc::clone(&self.cgroups),
            config: self.cgroup_config.clone(),
            runtime: self.runtime.clone(),
            reserved: self.reserved.clone(),
            requests: exit_requests.clone(),
            metrics: self.metrics.qos_tree.clone(),
            check: qos_tree::CHECK,
        };
        self.follow_exits(&mut tasks, exit_requests, processes, &pace, &working);
        alive.spawn(&mut tasks, &working);
        let measuring = (Arc::clone(&self.cgroups), table.clone(), &self.kernel);
        signals.start(inbox, self.measuring(), measuring, &mut tasks, &working);
        tasks.spawn("relist", relist.run(working.clone()));
        tasks.spawn("probes", probes.run(working.clone()));
        for (name, part) in device_tasks.named(&working) {
            tasks.spawn(name, part);
        }
        tasks.spawn("pod resources", podresources::serve(devices, table.clone(), working.clone()));
        tasks.spawn("volumes", beelet_pods::refresh::follow(table.clone(), launcher, working.clone()));
        tasks.spawn("pod folders", beelet_pods::orphans::sweep(sweep, working.clone()));
        tasks.spawn("log rotation", self.rotator(table).run(working.clone()));
        tasks.spawn_optional("tuner", beelet_tuner::run(tuning, working.clone()));
        tasks.spawn("cgroup keeper", qos_tree::follow(keeper, working.clone()));
        tasks.spawn("memory", give_memory_back(working.clone()));
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
        if let Err(error) = self.kernel.stop(keep_pins) {
            warn!(%error, "the kernel half was not left in order");
        }
        info!("ended");
        failed.map_or(Ok(()), Err)
    }

    /// Starts what hears of containers' ends before the relist does.
    fn follow_exits(
        &self,
        tasks: &mut Parts,
        requests: mpsc::Sender<beelet_model::request::Request>,
        processes: watch::Receiver<beelet_model::processes::Shared>,
        pace: &Pace,
        working: &CancellationToken,
    ) {
        let (signals_out, signals) = mpsc::channel(beelet_pleg::SIGNALS);
        let tells = |c: &beelet_bpf::Capability| c.program == EXIT_PROGRAM && c.have.is_ok();
        pace.set_kernel(self.kernel.capabilities().iter().any(tells));
        let edges = self.kernel.subscribe(beelet_bpf::Interest::EXITS | beelet_bpf::Interest::OOM_KILLS);
        tasks.spawn("kernel exits", beelet_pleg::forward(edges, signals_out.clone(), working.clone()));
        let runtime = self.runtime.clone();
        let stream = stream::follow(runtime, signals_out, pace.clone(), working.clone());
        tasks.spawn_optional("runtime events", stream);
        let exits = Exits::new(exits::Parts {
            runtime: self.runtime.clone(),
            requests,
            processes,
            signals,
            pace: pace.clone(),
            cgroups: Arc::clone(&self.cgroups),
            metrics: self.metrics.exits.clone(),
        });
        tasks.spawn("exits", exits.run(working.clone()));
    }

    /// The desired pods. Without a static pod path there are none, and none that runs is unwanted either.
    async fn manifests(
        &self,
        tasks: &mut Parts,
        working: &CancellationToken,
    ) -> watch::Receiver<Arc<Desired>> {
        let Some(path) = &self.config.static_pod_path else {
            warn!("staticPodPath is not set: no pods are started, and those that run are left alone");
            let nothing = Desired { folder_unread: true, ..Desired::default() };
            return watch::channel(Arc::new(nothing)).1;
        };
        let options = Options {
            check_frequency: self.config.file_check_frequency,
            critical_static_pods: self.config.beelet.critical_static_pods,
            allowed_unsafe_sysctls: self.config.allowed_unsafe_sysctls.clone(),
            state: Some(Arc::clone(&self.state)),
            cancel: working.clone(),
        };
        let (desired, watching) =
            ManifestSource::open(path.clone(), self.config.node_name.clone(), options).await;
        tasks.spawn_optional("manifests", watching);
        desired
    }

    fn measuring(&self) -> signals::Options {
        let beelet = &self.config.beelet;
        signals::Options {
            node: self.config.node_name.clone(),
            interval: beelet.pressure_interval,
            most: beelet.max_measured_containers,
        }
    }

    fn tuning(&self, table: watch::Receiver<Arc<PodTable>>) -> beelet_tuner::Parts {
        let configured = &self.config.beelet.tuner;
        beelet_tuner::Parts {
            table,
            cgroups: Arc::clone(&self.cgroups),
            owner: beelet_tuner::Owner::Us(self.cgroup_config.clone()),
            state: Arc::clone(&self.state),
            waits: self.kernel.measures().map(waits),
            settings: beelet_tuner::Settings {
                mode: configured.mode,
                interval: configured.interval,
                back_off: configured.back_off,
                law: configured.law,
            },
            metrics: self.metrics.tuner.clone(),
            view: self.metrics.tuner_view.clone(),
        }
    }

    fn probe_settings(&self) -> beelet_probes::Settings {
        beelet_probes::Settings {
            tcp_by_kernel: self.config.beelet.tcp_probes == TcpProbes::Kernel,
            edge_policy: match self.config.beelet.edge_policy {
                EdgePolicy::Immediate => beelet_policy::probe::EdgePolicy::Immediate,
                EdgePolicy::Threshold => beelet_policy::probe::EdgePolicy::Threshold,
            },
            canary: self.config.beelet.liveness_canary,
        }
    }

    fn rotator(&self, table: watch::Receiver<Arc<PodTable>>) -> Rotator {
        let limits = rotate::Limits {
            max_size: self.config.container_log_max_size,
            max_files: self.config.container_log_max_files,
            interval: self.config.container_log_monitor_interval,
        };
        Rotator::new(self.runtime.clone(), self.config.pod_logs_dir.clone(), limits, table)
    }

    fn launcher(
        &self,
        desired: watch::Receiver<Arc<Desired>>,
        devices: &Devices,
        alive: &Alive,
    ) -> Result<Launcher> {
        let limits = pull::Limits {
            parallel: self.config.parallel_image_pulls,
            per_second: self.config.registry_pull_qps.into(),
            burst: self.config.registry_burst,
        };
        Ok(Launcher {
            runtime: self.runtime.clone(),
            puller: Puller::new(self.runtime.clone(), limits),
            desired,
            cgroups: Arc::clone(&self.cgroups),
            cgroup_config: self.cgroup_config.clone(),
            node: facts::node_facts(&self.config, &self.cgroup_config.node)?,
            pods_dir: self.config.beelet.pods_dir.clone(),
            max_restart_delay: self.config.max_container_restart_period,
            events: self.events.clone(),
            devices: devices.clone(),
            cdi_by_annotation: cdi_by_annotation(&self.version.runtime_name, &self.version.runtime_version),
            admission: Arc::clone(&alive.admission),
            leases: alive.leases.clone(),
        })
    }
}

/// What the kernel programs measure, as the tuner takes it.
pub(crate) fn waits(measures: beelet_bpf::Measures) -> beelet_tuner::Source {
    Arc::new(move || {
        let counters = measures.snapshot().unwrap_or_else(|error| {
            warn!(%error, "the kernel's measures can't be read; the tuner does without");
            BTreeMap::new()
        });
        let of = |counters: beelet_ebpf_abi::Counters| beelet_tuner::Waits {
            run_queue_ns: counters.run_queue_wait_ns,
            histogram: counters.run_queue_waits.to_vec(),
            reclaim_ns: counters.memcg_reclaim_ns.saturating_add(counters.direct_reclaim_ns),
        };
        counters.into_iter().map(|(id, counters)| (id, of(counters))).collect()
    })
}

/// What the runtime says of its cgroup driver; one that has just come up may need a moment to say it.
async fn cgroup_driver(runtime: &Runtime) -> Result<Option<beelet_cri::CgroupDriver>> {
    for _ in 0..CONFIG_TRIES {
        match runtime.runtime_config().await {
            Ok(driver) => return Ok(driver),
            Err(error) => warn!("{error}; asked again in {} s", CONFIG_RETRY.as_secs()),
        }
        tokio::time::sleep(CONFIG_RETRY).await;
    }
    Ok(runtime.runtime_config().await?)
}

/// Brings up the kernel half as far as it goes, and says what doesn't.
async fn start_kernel(config: &Config, cgroups: &Cgroups) -> Result<Kernel> {
    let options = KernelOptions {
        bpffs: config.beelet.bpffs.clone(),
        pin_name: config.beelet.pin_name.clone(),
        cgroup: cgroups.cgroup2_path("/kubepods").unwrap_or_default(),
        mode: match config.beelet.bpf {
            BpfMode::Auto => beelet_bpf::Mode::Auto,
            BpfMode::Off => beelet_bpf::Mode::Off,
        },
        object: config.beelet.bpf_log.clone(),
        thresholds: config.beelet.pressure_edges,
        without: &[],
    };
    let kernel =
        spawn_blocking(move || Kernel::start(&options)).await.context("the kernel half could not start")?;
    for capability in kernel.capabilities() {
        if let Err(missing) = &capability.have {
            warn!(
                program = capability.program,
                missing,
                fallback = capability.fallback,
                "not available here"
            );
        }
    }
    if kernel.adopted() {
        info!("the kernel half went on while the agent was away; it is taken over");
    }
    Ok(kernel)
}

/// Once a minute the memory that a burst needed (a hundred pods that start at once) and nobody uses any more.
async fn give_memory_back(shutdown: CancellationToken) {
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(MEMORY_PERIOD) => {}
        }
        // It may take a moment.
        if spawn_blocking(beelet_bpf::give_memory_back).await.is_err() {
            return;
        }
    }
}

/// Lets the parts end by themselves, but not for ever.
async fn farewell(mut tasks: Parts) {
    if tokio::time::timeout(FAREWELL, tasks.ended()).await.is_err() {
        warn!("some parts did not end within {} s and are dropped", FAREWELL.as_secs());
    }
}
