//! `beelet observe`: the measuring half beside somebody else's kubelet. The same parts as in `run`, without any of those
//! that act: nothing is written to cgroups, nothing asked of the runtime but lists and statuses, no state kept. What it
//! loads into the kernel only counts, and goes when it ends. Two things act where they are allowed by name: the tuner, and
//! the collection of images.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use beelet_policy::image_gc::ImageGcPolicy;
use prometheus_client::registry::Registry;
use tokio::{sync::watch, task::spawn_blocking};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::{error, info, warn};

use super::{
    parts::{Failures, Parts},
    process, signals,
    signals::Signals,
    stop_on_signals, systemd,
};
use beelet_api::{
    grpc::{self, Outlook},
    http::{self, ApiState},
    signals::Mode,
};
use beelet_bpf::{Kernel, KernelOptions, Thresholds};
use beelet_cgroups::Cgroups;
use beelet_config::{Config, TunerMode};
use beelet_cri::Runtime;
use beelet_foreign::{Observer, Pulse};
use beelet_images::{ImageGc, Leases};
use beelet_model::table::{Complete, PodTable};
use beelet_state::{
    State,
    events::{NodeEvents, Recorder},
};

/// What is observed, and how it is told.
#[derive(Debug, Clone)]
pub struct Options {
    /// The runtime's socket, as `unix:///path`.
    pub runtime_endpoint: String,
    /// The node's name, as metrics' consumers know it.
    pub node_name: String,
    /// The cgroup below which pods are looked for.
    pub cgroup_root: String,
    /// The gRPC socket.
    pub socket: PathBuf,
    /// Where HTTP is served; `None`: nowhere.
    pub listen: Option<SocketAddr>,
    /// Whether kernel programs are used.
    pub bpf: beelet_bpf::Mode,
    /// Where a BPF file system is.
    pub bpffs: PathBuf,
    /// Our folder in it.
    pub pin_name: String,
    /// Leave programs and maps running when it ends.
    pub keep_pins: bool,
    /// Between two readings while somebody looks.
    pub interval: Duration,
    /// The counters of more containers are not read.
    pub most: usize,
    /// Whether metrics of containers carry their pod's UID.
    pub pod_uid: bool,
    /// What of this must survive is kept here; without `image_gc` and `tune` nothing is.
    pub state_dir: PathBuf,
    /// Remove unused images as the kubelet's image garbage collection would.
    pub image_gc: Option<Collecting>,
    /// Tune the pods' cgroups, or say how they would be.
    pub tune: Option<beelet_tuner::Settings>,
}

/// When images are removed.
#[derive(Debug, Clone)]
pub struct Collecting {
    /// Thresholds and ages.
    pub policy: ImageGcPolicy,
    /// Between two collections.
    pub period: Duration,
}

impl Collecting {
    /// With the kubelet's defaults.
    ///
    /// # Errors
    /// Never, unless the defaults contradict each other.
    pub fn by_default() -> Result<Self> {
        let (defaults, _) = Config::with_defaults()?;
        Ok(Self { policy: defaults.image_gc.policy, period: beelet_images::gc::PERIOD })
    }
}

/// Deadline of a list or a status.
const REQUEST: Duration = Duration::from_secs(30);
/// Each measured container has up to six directories open.
const OPEN_FILES: u64 = 65_536;

/// Observes until SIGTERM or SIGINT.
///
/// # Errors
/// Something that can't be done without isn't to be had; the sentence says what, and what to do.
pub async fn run(options: Options) -> Result<()> {
    let shutdown = CancellationToken::new();
    let (bpffs, pin_name, keep_pins) = (options.bpffs.clone(), options.pin_name.clone(), options.keep_pins);
    // However it ends, kernel programs must not stay without an owner.
    let at_once = move || {
        if !keep_pins && let Err(error) = Kernel::remove_pins(&bpffs, &pin_name) {
            warn!(%error, "what was loaded into the kernel could not be taken back");
        }
    };
    stop_on_signals(&shutdown, at_once)?;
    run_until(options, shutdown).await
}

/// Observes until `shutdown`.
///
/// # Errors
/// As for [`run`].
pub async fn run_until(options: Options, shutdown: CancellationToken) -> Result<()> {
    let runtime = Runtime::new(&options.runtime_endpoint, REQUEST)?;
    for trouble in process::allow_open_files(OPEN_FILES) {
        warn!("{trouble}");
    }
    let cgroups = Arc::new(Cgroups::for_reading(&options.cgroup_root)?);
    let (signals, inbox) = Signals::new();
    let metrics = beelet_foreign::Metrics::default();
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    runtime.register_metrics(&mut registry);
    signals.register(&mut registry, options.pod_uid);
    let (table_out, table) = watch::channel(Arc::new(PodTable::default()));
    let failures = Failures::default();
    let mut tasks = Parts::new(&shutdown, &failures);
    let allowed = Allowed::new(&options, &mut registry);
    let pulse = Pulse::default();
    let serving = CancellationToken::new();
    let mut servers = Parts::new(&serving, &failures);
    let complete = Complete::default();
    let outlook = outlook(&complete, &pulse);
    let registry = Arc::new(registry);
    serve(
        &options,
        table.clone(),
        (registry, &signals),
        (&allowed, &pulse, outlook),
        (&mut servers, &serving),
    )
    .await?;
    // Nothing stops with it.
    let patience = || Duration::ZERO;
    servers.spawn("service manager", systemd::follow(shutdown.clone(), serving.clone(), patience));

    let answered = tokio::select! {
        version = runtime.wait_ready(&shutdown) => Ok(version),
        failed = failures.first() => Err(failed),
    };
    let mut failed = None;
    match answered {
        Err(error) => failed = Some(error),
        Ok(None) => {}
        Ok(Some(version)) => {
            info!(
                name = version.runtime_name,
                version = version.runtime_version,
                "container runtime answers"
            );
            let kernel = start_kernel(&options, &cgroups).await?;
            let seen = (&runtime, &cgroups, &kernel, table.clone());
            allowed.start(&options, seen, &mut tasks, &shutdown).await?;
            let measuring = signals::Options {
                node: options.node_name.clone(),
                interval: options.interval,
                most: options.most,
            };
            signals.start(inbox, measuring, (Arc::clone(&cgroups), table, &kernel), &mut tasks, &shutdown);
            let observer = Observer::new(
                beelet_foreign::Parts {
                    runtime,
                    runtime_name: version.runtime_name,
                    node: options.node_name,
                    cgroups,
                    table: table_out,
                    complete,
                    metrics,
                },
                pulse,
            );
            tasks.watch("kernel events", kernel.failed());
            tokio::select! {
                () = observer.run(shutdown.clone()) => {}
                error = failures.first() => failed = Some(error),
            }
            shutdown.cancel();
            super::farewell(tasks).await;
            let stopped = spawn_blocking(move || kernel.stop(options.keep_pins)).await;
            if let Err(error) = stopped.context("the kernel half was dropped")? {
                warn!(%error, "what was loaded into the kernel could not be taken back");
            }
        }
    }
    serving.cancel();
    servers.ended().await;
    info!("ended");
    failed.map_or(Ok(()), Err)
}

/// What clients are told beside the pods.
fn outlook(complete: &Complete, pulse: &Pulse) -> Outlook {
    let pulse = pulse.clone();
    Outlook::new(Arc::clone(complete), move || pulse.check().err())
}

/// What acts, where it is allowed by name.
struct Allowed {
    images: beelet_images::Metrics,
    tuner: beelet_tuner::Metrics,
    view: watch::Sender<Arc<beelet_tuner::View>>,
}

impl Allowed {
    /// Nothing is done yet.
    fn new(options: &Options, registry: &mut Registry) -> Self {
        let allowed = Self {
            images: beelet_images::Metrics::default(),
            tuner: beelet_tuner::Metrics::default(),
            view: watch::channel(Arc::new(beelet_tuner::View::default())).0,
        };
        if options.image_gc.is_some() {
            allowed.images.register(registry);
        }
        match options.tune {
            Some(_) => allowed.tuner.register(registry),
            None => {
                let off = beelet_tuner::View { mode: Some(TunerMode::Off), ..beelet_tuner::View::default() };
                allowed.view.send_replace(Arc::new(off));
            }
        }
        allowed
    }

    async fn start(
        self,
        options: &Options,
        (runtime, cgroups, kernel, table): (&Runtime, &Arc<Cgroups>, &Kernel, watch::Receiver<Arc<PodTable>>),
        tasks: &mut Parts,
        shutdown: &CancellationToken,
    ) -> Result<()> {
        if options.tune.is_none() && options.state_dir.join("tuner.json").exists() {
            warn!(
                "an earlier observer ended without giving back what it had tuned: start once with --allow tune, which puts \
                 it back first"
            );
        }
        if options.image_gc.is_none() && options.tune.is_none() {
            return Ok(());
        }
        let state = Arc::new(State::open(&options.state_dir)?);
        if let Some(collecting) = &options.image_gc {
            let parts = (runtime, table.clone(), self.images);
            collect_images(collecting, &options.node_name, &state, parts, tasks, shutdown);
        }
        if let Some(settings) = options.tune {
            let (held, journal) = (Arc::clone(cgroups), Arc::clone(&state));
            spawn_blocking(move || beelet_tuner::recover(&held, &journal))
                .await
                .context("the tuner's journal")?;
            let parts = beelet_tuner::Parts {
                table,
                cgroups: Arc::clone(cgroups),
                owner: beelet_tuner::Owner::Kubelet,
                state,
                waits: kernel.measures().map(super::waits),
                settings,
                metrics: self.tuner,
                view: self.view,
            };
            info!(mode = ?settings.mode, state = %options.state_dir.display(), "pods' cgroups are tuned, as allowed");
            tasks.spawn_optional("tuner", beelet_tuner::run(parts, shutdown.clone()));
        }
        Ok(())
    }
}

/// On all images that no container of the runtime uses, whoever made it.
fn collect_images(
    collecting: &Collecting,
    node: &str,
    state: &Arc<State>,
    (runtime, table, metrics): (&Runtime, watch::Receiver<Arc<PodTable>>, beelet_images::Metrics),
    tasks: &mut Parts,
    shutdown: &CancellationToken,
) {
    let recorder = Recorder::load(state);
    let (image_gc, _) = ImageGc::new(beelet_images::Parts {
        runtime: runtime.clone(),
        leases: Leases::default(),
        state: Arc::clone(state),
        table,
        policy: collecting.policy,
        period: Some(collecting.period),
        space: beelet_images::Space::by_statvfs(),
        events: NodeEvents::new(recorder.clone(), node),
        metrics,
    });
    info!(state = %state.dir().display(), "unused images are removed, as allowed");
    tasks.spawn("image collection", image_gc.run(shutdown.clone()));
    tasks.spawn("event log", recorder.writer(Arc::clone(state), shutdown.clone()));
}

async fn serve(
    options: &Options,
    pods: watch::Receiver<Arc<PodTable>>,
    (registry, signals): (Arc<Registry>, &Signals),
    (allowed, pulse, outlook): (&Allowed, &Pulse, Outlook),
    (servers, serving): (&mut Parts, &CancellationToken),
) -> Result<()> {
    let socket = beelet_serve::grpc::bind(&options.socket).await?;
    let services = Routes::new(grpc::node_service(pods.clone(), outlook, serving.clone()))
        .add_service(signals.service(Mode::Observe, serving))
        .add_service(grpc::tuner::service(allowed.view.subscribe()));
    let until = serving.clone();
    servers.spawn("gRPC server", async move {
        if let Err(error) = beelet_serve::grpc::serve(socket, services, until).await {
            error!("{error:#}");
        }
    });
    if let Some(address) = options.listen {
        let listener = http::bind(address).await?;
        let pulse = pulse.clone();
        let state = ApiState {
            pods,
            registry,
            pressure: signals.pressure.clone(),
            health: Arc::new(move || pulse.check()),
            specs: false,
            // Metrics may be scraped from elsewhere where somebody asked for that; the rest is for this
            // machine.
            summary: address.ip().is_loopback(),
        };
        servers.spawn("HTTP server", http::serve(listener, state, serving.clone()));
    }
    Ok(())
}

/// The counting programs, for everything below the pods' root.
async fn start_kernel(options: &Options, cgroups: &Arc<Cgroups>) -> Result<Kernel> {
    let reading = Arc::clone(cgroups);
    let roots = spawn_blocking(move || reading.pods_roots()).await.context("cgroups can't be looked at")?;
    let root = match roots.as_slice() {
        [] => {
            info!("there is no kubepods cgroup yet: everything below {} is measured", options.cgroup_root);
            "/"
        }
        [root] => root,
        [root, others @ ..] => {
            warn!(
                "{} and {} both look like the pods' root: programs measure the first",
                root,
                others.join(", ")
            );
            root
        }
    };
    let options = KernelOptions {
        bpffs: options.bpffs.clone(),
        pin_name: options.pin_name.clone(),
        cgroup: cgroups.cgroup2_path(root).unwrap_or_default(),
        mode: options.bpf,
        object: None,
        thresholds: Thresholds::default(),
        without: &[],
    };
    let kernel = spawn_blocking(move || Kernel::start(&options)).await;
    let kernel = kernel.context("the kernel half could not start")?;
    info!(by_kernel = kernel.measures().is_some(), root, "measuring");
    Ok(kernel)
}
