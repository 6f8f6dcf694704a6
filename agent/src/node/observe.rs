//! `beelet observe`: the measuring parts of `run` for the pods of another kubelet, without the parts that
//! act. The observer writes no cgroups, calls only lists and statuses of the runtime, and keeps no state. The
//! loaded BPF programs only count, and are removed at the end. Two parts act if allowed by name: the tuner,
//! and the collection of images.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use beelet_base::blocking::spawn_blocking;
use beelet_policy::{images::gc::ImageGcPolicy, tuner::TunerMode};
use beelet_proto::cri;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::{info, warn};

use super::{
    builder::Builder,
    doors::Doors,
    frame::Frame,
    kernel, process,
    stats::{self, Stats},
    stop_on_signals,
    tasks::Tasks,
};
use beelet_api::{
    grpc::{self, Outlook},
    http::{ApiState, slis::Slis},
    signals::Mode,
};
use beelet_base::filesystem::Space;
use beelet_bpf::{Kernel, KernelOptions};
use beelet_cgroups::{Cgroups, search};
use beelet_config::Config;
use beelet_cri::Runtime;
use beelet_foreign::{Observer, Pulse};
use beelet_images::{ImageGc, Leases};
use beelet_model::{
    disk::Unmeasured,
    table::{Complete, PodTable},
};
use beelet_state::{
    State,
    events::{NodeEvents, Recorder},
};
use beelet_units::bpf_settings::BpfMode;

/// Options of `beelet observe`.
#[derive(Debug, Clone)]
pub struct Options {
    /// The runtime's socket, as `unix:///path`.
    pub runtime_endpoint: String,
    /// The node's name in metrics.
    pub node_name: String,
    /// Root cgroup of the search for pods.
    pub cgroup_root: String,
    /// The gRPC socket.
    pub socket: PathBuf,
    /// HTTP address; `None`: off.
    pub listen: Option<SocketAddr>,
    /// Use of BPF programs.
    pub bpf: BpfMode,
    /// Mount point of the BPF file system.
    pub bpffs: PathBuf,
    /// Folder of the agent's pins in the BPF file system.
    pub pin_name: String,
    /// True to keep programs and maps running at the end.
    pub keep_pins: bool,
    /// Interval of readings while a client is present.
    pub interval: Duration,
    /// Maximum number of measured containers.
    pub most: usize,
    /// True to add the pod's UID to the metrics of containers.
    pub pod_uid: bool,
    /// Folder of durable state; unused without `image_gc` and `tune`.
    pub state_dir: PathBuf,
    /// Settings for removing unused images like the kubelet's image garbage collection; None: off.
    pub image_gc: Option<Collecting>,
    /// Settings for tuning the pods' cgroups, or only reporting the intended values; None: off.
    pub tune: Option<beelet_tuner::Settings>,
}

/// Settings of the collection of images.
#[derive(Debug, Clone)]
pub struct Collecting {
    /// Thresholds and ages.
    pub policy: ImageGcPolicy,
    /// Interval of collections.
    pub period: Duration,
}

impl Collecting {
    /// Returns the kubelet's defaults.
    ///
    /// # Errors
    /// Never, unless the defaults contradict each other.
    pub fn by_default() -> Result<Self> {
        let (defaults, _) = Config::with_defaults()?;
        Ok(Self { policy: defaults.image_gc.policy, period: beelet_images::gc::PERIOD })
    }
}

/// Timeout of a list or a status.
const REQUEST: Duration = Duration::from_secs(30);
/// Limit of open files: each measured container has up to six open directories.
const OPEN_FILES: u64 = 65_536;

/// Observes until SIGTERM or SIGINT.
///
/// # Errors
/// A required resource is unavailable; the message names it and the remedy.
pub async fn run(options: Options) -> Result<()> {
    let shutdown = CancellationToken::new();
    let (bpffs, pin_name, keep_pins) = (options.bpffs.clone(), options.pin_name.clone(), options.keep_pins);
    // BPF programs must not outlive the observer.
    let at_once = move || {
        if !keep_pins && let Err(error) = beelet_bpf::remove_pins(&bpffs, &pin_name) {
            warn!(%error, "cannot remove the BPF programs");
        }
    };
    stop_on_signals(&shutdown, at_once)?;
    Builder::default().observe(options, shutdown).await
}

impl Builder {
    /// Observes the pods of another kubelet until `shutdown`. Ignores sources and attached parts.
    ///
    /// # Errors
    /// As for [`Builder::run`].
    pub async fn observe(self, options: Options, shutdown: CancellationToken) -> Result<()> {
        observe(self.doors, options, shutdown).await
    }
}

async fn observe(doors: Doors, options: Options, shutdown: CancellationToken) -> Result<()> {
    let runtime = match doors.runtime {
        Some(runtime) => runtime,
        None => Runtime::new(&options.runtime_endpoint, REQUEST)?,
    };
    if doors.own_process {
        for trouble in process::allow_open_files(OPEN_FILES) {
            warn!("{trouble}");
        }
    }
    let cgroups = match doors.cgroups {
        Some(cgroups) => cgroups,
        None => Arc::new(Cgroups::for_reading(&options.cgroup_root)?),
    };
    let (stats, inbox) = Stats::new();
    let metrics = beelet_foreign::Metrics::default();
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    runtime.register_metrics(&mut registry);
    stats.register(&mut registry, options.pod_uid);
    let allowed = Allowed::new(&options, doors.space, &mut registry);
    let (table_out, table) = watch::channel(Arc::new(PodTable::default()));
    let (pulse, complete) = (Pulse::default(), Complete::default());
    let watched = Watched { options, runtime, cgroups, stats, table, pulse, complete };
    let mut frame = Frame::new(&shutdown);
    let services = watched.services(&allowed, &frame.serving);
    frame.serve(&watched.options.socket, services, watched.http(registry)).await?;
    // No pod stops with the observer.
    frame.notify_service_manager(|| Duration::ZERO);
    let ran = match frame.wait_for(&watched.runtime).await {
        Err(failed) => Err(failed),
        Ok(None) => Ok(()),
        Ok(Some(version)) => {
            let outputs = (table_out, metrics, inbox);
            watched.observe(version, allowed, outputs, &frame, shutdown).await
        }
    };
    frame.end().await;
    info!("ended");
    ran
}

/// State that exists before the runtime answers.
struct Watched {
    options: Options,
    runtime: Runtime,
    cgroups: Arc<Cgroups>,
    stats: Stats,
    table: watch::Receiver<Arc<PodTable>>,
    pulse: Pulse,
    complete: Complete,
}

impl Watched {
    fn services(&self, allowed: &Allowed, serving: &CancellationToken) -> Routes {
        let pulse = self.pulse.clone();
        let outlook =
            Outlook::new(Arc::clone(&self.complete), move || pulse.check().err().map(|e| e.to_string()));
        Routes::new(grpc::node_service(self.table.clone(), outlook, serving.clone()))
            .add_service(self.stats.service(Mode::Observe, serving))
            .add_service(grpc::tuner::service(allowed.view.subscribe(), self.stats.pinned.subscribe()))
    }

    fn http(&self, registry: Registry) -> Option<(&'static str, SocketAddr, ApiState)> {
        let (address, pulse) = (self.options.listen?, self.pulse.clone());
        let state = ApiState {
            pods: self.table.clone(),
            registry: Arc::new(registry),
            pressure: self.stats.pressure.clone(),
            health: Arc::new(move || pulse.check().err().map(|e| e.to_string())),
            slis: Slis::default(),
            specs: false,
            // A configured non-loopback address serves only metrics; all other pages are for this machine.
            summary: address.ip().is_loopback(),
        };
        Some(("--listen", address, state))
    }

    /// Starts the measuring and all allowed parts, and observes until `shutdown`.
    async fn observe(
        self,
        version: cri::VersionResponse,
        allowed: Allowed,
        (table_out, metrics, inbox): (
            watch::Sender<Arc<PodTable>>,
            beelet_foreign::Metrics,
            beelet_stats::Inbox,
        ),
        frame: &Frame,
        shutdown: CancellationToken,
    ) -> Result<()> {
        let mut tasks = Tasks::new(&shutdown, &frame.failures);
        let kernel = start_kernel(&self.options, &self.runtime, &self.cgroups).await?;
        let seen = (&self.runtime, &self.cgroups, &kernel, self.table.clone());
        allowed.start(&self.options, seen, &mut tasks).await?;
        let measuring = stats::Options {
            node: self.options.node_name.clone(),
            interval: self.options.interval,
            most: self.options.most,
            disk: Box::new(Unmeasured),
            volumes: watch::channel(Arc::default()).1,
        };
        let measured = (Arc::clone(&self.cgroups), self.table, &kernel);
        self.stats.start(inbox, measuring, measured, &mut tasks);
        let parts = beelet_foreign::Parts {
            runtime: self.runtime,
            runtime_name: version.runtime_name,
            node: self.options.node_name,
            cgroups: self.cgroups,
            table: table_out,
            complete: self.complete,
            metrics,
        };
        let observer = Observer::new(parts, self.pulse);
        tasks.watch("kernel events", kernel.failed());
        let failed = tokio::select! {
            () = observer.run(shutdown.clone()) => None,
            failed = frame.failures.first() => Some(failed),
        };
        shutdown.cancel();
        super::farewell(tasks).await;
        kernel::stop(kernel, self.options.keep_pins).await;
        failed.map_or(Ok(()), Err)
    }
}

/// The acting parts, which need permission by name.
struct Allowed {
    images: beelet_images::Metrics,
    tuner: beelet_tuner::Metrics,
    view: watch::Sender<Arc<beelet_tuner::View>>,
    space: Space,
}

impl Allowed {
    /// Registers the metrics of allowed parts, without starting the parts.
    fn new(options: &Options, space: Space, registry: &mut Registry) -> Self {
        let allowed = Self {
            images: beelet_images::Metrics::default(),
            tuner: beelet_tuner::Metrics::default(),
            view: watch::channel(Arc::new(beelet_tuner::View::default())).0,
            space,
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
        tasks: &mut Tasks,
    ) -> Result<()> {
        if options.tune.is_none() && options.state_dir.join("tuner.json").exists() {
            warn!(
                "an earlier observer ended without restoring the tuned cgroup settings: start once with --allow tune to \
                 restore them"
            );
        }
        if options.image_gc.is_none() && options.tune.is_none() {
            return Ok(());
        }
        let state = Arc::new(State::open(&options.state_dir)?);
        if let Some(collecting) = &options.image_gc {
            let parts = (runtime, table.clone(), self.images, self.space);
            collect_images(collecting, &options.node_name, &state, parts, tasks);
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
                scheduler: None,
                state,
                kernel: kernel.measures().map(kernel::for_tuner),
                settings,
                metrics: self.tuner,
                view: self.view,
            };
            info!(mode = ?settings.mode, state = %options.state_dir.display(), "tuning pods' cgroups (--allow tune)");
            tasks.spawn_optional("tuner", beelet_tuner::run(parts, tasks.stop()));
        }
        Ok(())
    }
}

/// Starts the collection of all images that no container of the runtime uses, regardless of the container's
/// creator.
fn collect_images(
    collecting: &Collecting,
    node: &str,
    state: &Arc<State>,
    (runtime, table, metrics, space): (
        &Runtime,
        watch::Receiver<Arc<PodTable>>,
        beelet_images::Metrics,
        Space,
    ),
    tasks: &mut Tasks,
) {
    let recorder = Recorder::load(state);
    let (image_gc, _) = ImageGc::new(beelet_images::Parts {
        runtime: runtime.clone(),
        leases: Leases::default(),
        state: Arc::clone(state),
        table,
        policy: collecting.policy,
        period: Some(collecting.period),
        space,
        events: NodeEvents::new(recorder.clone(), node),
        metrics,
    });
    info!(state = %state.dir().display(), "removing unused images (--allow image-gc)");
    tasks.spawn("image collection", image_gc.run(tasks.stop()));
    tasks.spawn("event log", recorder.writer(Arc::clone(state), tasks.stop()));
}

/// Starts the counting programs for all cgroups below the pods' root.
async fn start_kernel(options: &Options, runtime: &Runtime, cgroups: &Arc<Cgroups>) -> Result<Kernel> {
    let reading = Arc::clone(cgroups);
    let roots =
        spawn_blocking(move || search::pods_roots(&reading)).await.context("cannot read the cgroups")?;
    let root = match roots.as_slice() {
        [] => {
            info!("found no kubepods cgroup yet; measuring all cgroups below {}", options.cgroup_root);
            "/".to_owned()
        }
        [root] => root.clone(),
        several => {
            let reading = Arc::clone(cgroups);
            let ids = running(runtime).await?;
            let cgroups = spawn_blocking(move || {
                search::containers(&reading, &ids.iter().map(String::as_str).collect())
            });
            let cgroups = cgroups.await.context("cannot read the cgroups")?;
            let ours = root_of(several, &cgroups.into_values().collect::<Vec<_>>());
            if ours.is_none() {
                info!(
                    "found several candidates for the pods' root ({}), none with a running container of this runtime; \
                     measuring all cgroups below {}",
                    several.join(", "),
                    options.cgroup_root
                );
            }
            ours.unwrap_or("/").to_owned()
        }
    };
    let root = root.as_str();
    let options = KernelOptions {
        bpffs: options.bpffs.clone(),
        pin_name: options.pin_name.clone(),
        cgroup: cgroups.paths.cgroup2_path(root).unwrap_or_default(),
        mode: options.bpf,
        ..KernelOptions::default()
    };
    let kernel = kernel::start(options).await?;
    info!(by_kernel = kernel.measures().is_some(), root, "measuring");
    Ok(kernel)
}

/// Returns the ids of the runtime's running containers.
async fn running(runtime: &Runtime) -> Result<Vec<String>> {
    let containers = runtime.containers.list(None).await?;
    let runs = |container: &cri::Container| container.state() == cri::ContainerState::ContainerRunning;
    Ok(containers.into_iter().filter(runs).map(|container| container.id).collect())
}

/// Returns the candidate for the pods' root with the most containers' cgroups below it.
fn root_of<'a>(roots: &'a [String], cgroups: &[String]) -> Option<&'a str> {
    let below = |root: &str| {
        let is_below = |cgroup: &&String| cgroup.strip_prefix(root).is_some_and(|rest| rest.starts_with('/'));
        cgroups.iter().filter(is_below).count()
    };
    let counted = roots.iter().map(|root| (below(root), root)).filter(|(count, _)| *count > 0);
    counted.max_by_key(|(count, _)| *count).map(|(_, root)| root.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_the_one_that_the_runtimes_containers_are_below() {
        let roots = ["/a/kubepods", "/kubepods", "/kubepods2"].map(str::to_owned);
        let check = |cgroups: &[&str], expected: Option<&str>| {
            let cgroups: Vec<String> = cgroups.iter().map(|cgroup| (*cgroup).to_owned()).collect();
            assert_eq!(root_of(&roots, &cgroups), expected, "{cgroups:?}");
        };
        check(&["/kubepods/burstable/pod1/c"], Some("/kubepods"));
        check(&["/a/kubepods/pod1/c", "/a/kubepods/pod2/c", "/kubepods/pod3/c"], Some("/a/kubepods"));
        check(&["/system.slice/c"], None);
        check(&[], None);
    }
}
