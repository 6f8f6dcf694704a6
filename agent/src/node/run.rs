//! `beelet run`: starts the parts of a node that runs pods, in order. The servers start first, so that
//! clients can see the node's state; all other parts are built once the container runtime answers.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    builder::Builder,
    cgroup_keepers, devices,
    doors::Doors,
    exits, facts, farewell, folders,
    frame::Frame,
    handles::{Attached, Handles},
    kernel,
    opened::Node,
    pinning, preflight, process,
    protection::NodeProtection,
    servers,
    services::{Ends, Late, Services},
    sources, stats,
    tasks::{Failures, Tasks},
    upkeep::{self, Locks},
};
use beelet_api::grpc::{self, manifests::Running};
use beelet_base::blocking::{blocking, spawn_blocking};
use beelet_bpf::Interest;
use beelet_cgroups::{Cgroups, Version};
use beelet_config::{Config, TcpProbes};
use beelet_cri::{Runtime, ownership::Ownership};
use beelet_devices::{Devices, cdi_by_annotation};
use beelet_handover::{adoption, manifest_changes};
use beelet_model::{
    desired::Desired, origin::Origin, pod::NodeFacts, processes::Shared as Processes, table::PodName,
};
use beelet_pinning::Pinning;
use beelet_pods::{
    deps as pods,
    manager::{self, Manager},
    records::{Records, WrittenRecords},
    user_namespaces::UserNamespaces,
};
use beelet_policy::handover;
use beelet_probes::Probes;
use beelet_shutdown::Shutdown;
use beelet_state::State;
use beelet_volumes::VolumeManager;

/// Capacity of the queue of requests to the pods' manager. A sender waits while the queue is full.
const REQUESTS: usize = 1024;
/// Time in addition to a pod's grace period that the service manager must allow for the pod's stop.
const STOP_MARGIN: Duration = Duration::from_secs(30);
/// Folder of logind's volatile configuration, which the next boot removes (logind.conf(5)).
const LOGIND_DROP_INS: &str = "/run/systemd/logind.conf.d";

/// Inputs that each belong to a single part.
struct Inputs {
    ends: Ends,
    sources: Vec<watch::Receiver<Arc<Desired>>>,
    attached: Vec<Attached>,
    /// See [`manager::Dependencies::manifest_changes`].
    manifest_changes: BTreeMap<PathBuf, i64>,
    /// See [`manager::Dependencies::left_alone`].
    left_alone: LeftAlone,
}

/// Pods of a kubelet that the agent leaves alone, by UID.
type LeftAlone = BTreeMap<String, (PodName, Origin)>;

impl Builder {
    /// Runs the pods of a node until `shutdown`.
    ///
    /// # Errors
    /// A required resource is unavailable, or a part failed; the message names it and the remedy.
    pub async fn run(self, config: Config, shutdown: CancellationToken) -> Result<()> {
        let Self { doors, sources, attached, reviewers, verbosity, api_server } = self;
        preflight::require(&config, reviewers.access.is_some())?;
        // Acquire the locks first: a second agent must not touch anything.
        let state = Arc::new(State::open(&config.beelet.state_dir)?);
        let (runtime, ownership) = open_runtime(&doors, &config).await?;
        folders::make_kubelet_dir(&config).await?;
        if doors.own_process {
            for trouble in process::prepare(config.oom_score_adj, config.max_open_files) {
                warn!("{trouble}");
            }
        }
        let cgroups = open_cgroups(&doors, &config)?;
        let search = doors.search_kubelet;
        let (services, ends) = Services::open(config, doors, (state, runtime), api_server).await?;
        let late = Late::default();
        let mut frame = Frame::new(&shutdown);
        servers::start(&mut frame, &services, &late, &cgroups, (reviewers, verbosity)).await?;
        let ownership = ownership.map(Arc::new);
        start_keepers(&mut frame, &services, ownership.clone());
        let ran = async {
            let Some(version) = frame.wait_for(&services.runtime).await? else { return Ok(()) };
            if let Some(ownership) = &ownership {
                refuse_others(ownership, &services).await?;
            }
            let look = ownership.is_some() || search;
            let (manifest_changes, left_alone) = adopt(&services, look, !sources.is_empty()).await?;
            let inputs = Inputs { ends, sources, attached, manifest_changes, left_alone };
            let node = Node::open(services, late, cgroups, version).await?;
            run_parts(node, inputs, &frame.failures, shutdown).await
        };
        let ran = ran.await;
        frame.end().await;
        drop(ownership);
        ran
    }
}

/// Opens the runtime and acquires its lock, which the second value holds.
async fn open_runtime(doors: &Doors, config: &Config) -> Result<(Runtime, Option<Ownership>)> {
    if let Some(runtime) = &doors.runtime {
        return Ok((runtime.clone(), None));
    }
    let runtime = Runtime::new(&config.runtime_endpoint, config.runtime_request_timeout)?
        .with_image_endpoint(&config.image_endpoint)?;
    let socket = runtime.socket().to_owned();
    let acquired = spawn_blocking(move || Ownership::acquire(&socket)).await;
    Ok((runtime, Some(acquired.context("cannot acquire the runtime's lock")??)))
}

/// Opens the cgroup tree, if it satisfies the configuration.
fn open_cgroups(doors: &Doors, config: &Config) -> Result<Arc<Cgroups>> {
    let cgroups = match &doors.cgroups {
        Some(cgroups) => Arc::clone(cgroups),
        // The driver follows once the runtime answers: see `Node::open`.
        None => Arc::new(Cgroups::discover(
            &config.cgroup_root,
            beelet_units::cgroup_driver::CgroupDriver::Cgroupfs,
        )?),
    };
    if config.fail_cgroup_v1 && cgroups.paths.version() != Version::V2 {
        bail!(
            "this machine's cgroups are {}, but failCgroupV1 is true; boot with systemd.unified_cgroup_hierarchy=1, or \
             remove failCgroupV1 from the configuration",
            cgroups.paths.version()
        );
    }
    cgroups.paths.require_root()?;
    if config.single_process_oom_kill == Some(false) && cgroups.paths.version() != Version::V2 {
        bail!(
            "this machine's cgroups are {}, but singleProcessOOMKill is false, which needs version 2 to kill a whole \
             container at once; remove singleProcessOOMKill from the configuration",
            cgroups.paths.version()
        );
    }
    Ok(cgroups)
}

/// Starts the parts that serve the agent itself from its start to its end: readiness events, the event log,
/// the service manager, the locks.
fn start_keepers(frame: &mut Frame, services: &Services, ownership: Option<Arc<Ownership>>) {
    let stop = || frame.serving.clone();
    let log = services.events.writer(Arc::clone(&services.state), stop());
    let locks = Locks { state: Arc::clone(&services.state), runtime: ownership };
    let locks = locks.keep(services.node_events(), stop());
    // On a cluster's node, the writer of the Node's status records the readiness, which includes the network.
    if services.accounts.is_none() {
        let readiness = services.health.clone().record_readiness(services.node_events(), stop());
        frame.servers.spawn("node readiness", readiness);
    }
    frame.servers.spawn("event log", log);
    frame.notify_service_manager(stopping_time(services));
    frame.servers.spawn("locks", locks);
}

/// Returns a function that computes the maximum time for the pods to stop with the agent; zero if pods keep
/// running without the agent.
fn stopping_time(services: &Services) -> impl Fn() -> Duration + use<> {
    let (stop_pods, table) = (services.config.beelet.stop_pods_on_exit, services.table.clone());
    move || {
        let table = table.borrow();
        let graces = table.pods.values().map(|entry| beelet_model::pod::grace_period(&entry.pod));
        graces.max().filter(|_| stop_pods).map_or(Duration::ZERO, |longest| longest + STOP_MARGIN)
    }
}

/// Refuses a runtime that a kubelet drives as well, or that does not see the pods' mounts.
async fn refuse_others(ownership: &Ownership, services: &Services) -> Result<()> {
    let (pods, socket) = (&services.config.beelet.pods_dir, services.runtime.socket());
    // Only now a kubelet is visible that waited for the runtime, too.
    ownership.refuse_kubelet(socket)?;
    services.health.follow_mounts(folders::refuse_lost_mounts(pods, socket).await?);
    Ok(())
}

/// Adopts the pods of a kubelet, if requested. Returns the times of the last change of the manifests if any
/// pod is adopted, and the pods left alone. `look` is true to search for a kubelet's pods without a request.
async fn adopt(services: &Services, look: bool, api: bool) -> Result<(BTreeMap<PathBuf, i64>, LeftAlone)> {
    let config = &services.config;
    let sources = handover::Sources { api, manifests: config.static_pod_path.is_some() };
    let how = (config.beelet.adopt_kubelet_pods, look);
    let adopted = adoption::adopt(&services.runtime, &services.state, how, sources).await?;
    if adopted.new > 0 {
        let message = format!("Took over {} pods that a kubelet had started", adopted.new);
        services.node_events().normal("PodsAdopted", &message);
    }
    let changes = match config.static_pod_path.clone().filter(|_| !adopted.pods.is_empty()) {
        Some(at) => blocking("looking at the manifests", move || manifest_changes(&at)).await,
        None => BTreeMap::new(),
    };
    Ok((changes, adopted.left_alone))
}

/// Connects the parts of `node` and runs them until `shutdown`.
async fn run_parts(
    node: Node,
    inputs: Inputs,
    failures: &Failures,
    shutdown: CancellationToken,
) -> Result<()> {
    let services = &node.services;
    // All other parts must serve the manager until it ends, which may take long (pods that stop with the
    // agent).
    let working = CancellationToken::new();
    let mut tasks = Tasks::new(&working, failures);
    let (requests, requested) = mpsc::channel(REQUESTS);
    let goes_down = watch::Sender::new(None);
    let (processes_out, processes) = watch::channel(Processes::default());
    let (active_out, active) = watch::channel(None);
    let (pinning, keeper) = pinning::open(&node, active.clone(), requests.clone()).await?;
    let (devices, device_tasks) = devices::open(services, active, requests.clone()).await?;
    let protection = NodeProtection::build(&node, &requests, goes_down.subscribe()).await;
    let state = Arc::clone(&services.state);
    let loading = blocking("reading the records of pods", move || Records::load(&state));
    // Concurrently, since both are slow with a thousand pods.
    let (records, desired) = tokio::join!(loading, sources::start(services, inputs.sources, &mut tasks));
    // The writer ends after the manager.
    let writer = records.writer(Arc::clone(&services.state), services.metrics.pods.clone());
    tasks.spawn_optional("records", writer);
    let granted = (&devices, &pinning);
    let deps = pod_deps(&node, desired.clone(), records.written(), granted, &protection)?;
    let volumes = deps.volumes.clone();
    let exits = exits::follow(&node, &mut tasks, &requests, processes);
    let handles = Handles {
        services: services.clone(),
        desired,
        requests,
        host: node.machine.host.clone(),
        resources: protection.resources(&services.config),
        devices,
        pinning,
        conditions: protection.conditions(&services.health, &mut tasks),
        exits,
        shutdown: protection.shutdown.clone(),
        written: watch::Sender::new(None),
    };
    tasks.spawn_optional("node shutdown", node_shutdown(&handles, goes_down).run(tasks.stop()));
    fill_cells(&node.late, &handles);
    let orphans = upkeep::orphan_sweep(&node, &records, &handles, volumes.clone());
    let manager = Manager::new(manager::Dependencies {
        deps,
        runtime_name: node.version.runtime_name.clone(),
        desired: handles.desired.clone(),
        requests: requested,
        table: inputs.ends.table,
        processes: processes_out,
        records,
        active: active_out,
        stop_pods_on_exit: services.config.beelet.stop_pods_on_exit,
        complete: Arc::clone(&services.complete),
        manifest_changes: inputs.manifest_changes,
        left_alone: inputs.left_alone,
    });
    for (name, part) in device_tasks.named(&working) {
        tasks.spawn(name, part);
    }
    if let Some(keeper) = keeper {
        tasks.spawn("pinning", keeper.run(tasks.stop()));
    }
    tasks.spawn("use of exclusive CPUs", pinning::watcher(&node, &handles.pinning).run(tasks.stop()));
    let disk = protection.disk.clone();
    protection.spawn(&mut tasks);
    tasks.spawn("probes", probes(&node, inputs.ends.probes, &handles).run(tasks.stop()));
    measure(&node, &mut tasks, inputs.ends.stats, disk);
    cgroup_keepers::start(&node, &mut tasks, handles.requests.clone());
    upkeep::keep_volumes(&node, &mut tasks, &volumes, orphans);
    upkeep::keep_images(&node, &mut tasks);
    upkeep::keep_logs(&node, &mut tasks);
    upkeep::serve_local_sockets(&node, &mut tasks, &handles);
    tasks.spawn("memory", upkeep::release_memory(tasks.stop()));
    for (name, part) in inputs.attached {
        tasks.spawn(name, part(handles.clone(), tasks.stop()));
    }
    drop(handles);
    tasks.watch("kernel events", node.kernel.failed());
    let failed = tokio::select! {
        () = manager.run(shutdown) => None,
        failed = failures.first() => Some(failed),
    };
    working.cancel();
    farewell(tasks).await;
    // Running pods need the kernel's listener table, which stays if it is pinned.
    let keep_pins = failed.is_some() || !node.services.config.beelet.stop_pods_on_exit;
    kernel::stop(node.kernel, keep_pins).await;
    info!("ended");
    failed.map_or(Ok(()), Err)
}

/// Builds the part that ends the pods before the machine goes down.
fn node_shutdown(handles: &Handles, since: watch::Sender<beelet_shutdown::Since>) -> Shutdown {
    let services = &handles.services;
    Shutdown::new(beelet_shutdown::Parts {
        periods: services.config.shutdown.clone(),
        bus: None,
        logind_drop_ins: LOGIND_DROP_INS.into(),
        table: services.table.clone(),
        requests: handles.requests.clone(),
        written: handles.written.subscribe(),
        since,
        events: services.node_events(),
        file: beelet_state::ForeignFile::new(
            services.config.beelet.kubelet_dir.join(beelet_shutdown::STATE_FILE),
        ),
        metrics: services.metrics.shutdown.clone(),
    })
}

/// Sets the cells for which the servers of the API wait.
fn fill_cells(late: &Late, handles: &Handles) {
    let _ = late.devices.set(grpc::devices::Known {
        devices: handles.devices.clone(),
        resources: handles.resources.clone(),
        conditions: Arc::clone(&handles.conditions),
    });
    let (desired, requests) = (handles.desired.clone(), handles.requests.clone());
    let table = handles.services.table.clone();
    let _ = late.running.set(Running { desired, requests, table });
}

/// Builds the probes.
fn probes(node: &Node, commands: beelet_probes::Commands, handles: &Handles) -> Probes {
    let Services { config, table, runtime, events, metrics, .. } = &node.services;
    Probes::new(beelet_probes::Parts {
        table: table.clone(),
        requests: handles.requests.clone(),
        runtime: Some(runtime.clone()),
        listeners: node.kernel.listeners(),
        checker: node.kernel.checker(),
        edges: node.kernel.subscribe(Interest::LISTENERS),
        commands,
        settings: beelet_probes::Settings {
            tcp_by_kernel: config.beelet.tcp_probes == TcpProbes::Kernel,
            edge_policy: config.beelet.edge_policy,
            canary: config.beelet.liveness_canary,
            queue_rule: config.beelet.liveness_stalled,
            exec: config.beelet.exec_probes,
            connections: config.beelet.probe_connections,
        },
        exec_socket: config.beelet.exec_socket.clone(),
        events: events.clone(),
        metrics: metrics.probes.clone(),
        asking: tokio::runtime::Handle::current(),
    })
}

/// Starts the measuring of containers.
fn measure(node: &Node, tasks: &mut Tasks, inbox: beelet_stats::Inbox, disk: beelet_eviction::DiskView) {
    let Services { config, table, metrics, stats, .. } = &node.services;
    let options = stats::Options {
        node: config.node_name.clone(),
        interval: config.beelet.pressure_interval,
        most: config.beelet.max_measured_containers,
        disk: Box::new(disk),
        volumes: metrics.volumes.usage(),
    };
    stats.clone().start(inbox, options, (Arc::clone(&node.cgroups), table.clone(), &node.kernel), tasks);
}

/// Builds the volume manager.
fn volumes(node: &Node, facts: NodeFacts, desired: watch::Receiver<Arc<Desired>>) -> VolumeManager {
    let services = &node.services;
    VolumeManager::new(beelet_volumes::Deps {
        node: facts,
        pods_dir: services.config.beelet.pods_dir.clone(),
        desired,
        table: services.table.clone(),
        storage: services.storage.clone(),
        disks: services.disks.clone(),
        csi: services.csi.clone(),
        events: services.events.clone(),
        metrics: services.metrics.volumes.clone(),
    })
}

/// Parts of the node that pods run with.
fn pod_deps(
    node: &Node,
    desired: watch::Receiver<Arc<Desired>>,
    written: WrittenRecords,
    (devices, pinning): (&Devices, &Pinning),
    protection: &NodeProtection,
) -> Result<pods::Deps> {
    let Services { config, table, runtime, health, storage, dra, events, metrics, .. } = &node.services;
    let facts = facts::node_facts(config, &node.machine, &node.cgroup_config.node)?;
    let pods_dir = config.beelet.pods_dir.clone();
    Ok(pods::Deps {
        volumes: volumes(node, facts.clone(), desired.clone()),
        runtime: pods::RuntimeDeps {
            cri: runtime.clone(),
            mounts: health.mounts(),
            users: Arc::new(UserNamespaces::new(node.user_ids, pods_dir.clone())),
            max_restart_delay: config.max_container_restart_period,
        },
        node: pods::NodeDeps {
            facts,
            cgroups: Arc::clone(&node.cgroups),
            cgroup_config: node.cgroup_config.clone(),
            pods_dir,
        },
        images: pods::ImageDeps { puller: Arc::clone(&node.puller), leases: protection.leases.clone() },
        devices: pods::DeviceDeps {
            plugins: devices.clone(),
            claims: dra.clone(),
            storage: storage.clone(),
            cdi_by_annotation: cdi_by_annotation(&node.version.runtime_name, &node.version.runtime_version),
        },
        pinning: pinning.clone(),
        admission: Arc::clone(&protection.admission),
        pods: pods::PodDeps { desired, table: table.clone(), written },
        reports: pods::Reports { events: events.clone(), metrics: metrics.pods.clone() },
    })
}
