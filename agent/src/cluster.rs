//! Makes a node of a cluster of the node: connects the parts of [`beelet_cluster`] with those of the agent.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_policy::{
    node::{
        access::Access,
        status::{self, NodeReport, Registration},
    },
    pod::references::TokenReference,
    volumes::growth::StatusPatch,
};
use beelet_proto::cri;
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::{
    core::v1 as core,
    resource::v1::ResourceClaim,
    storage::v1::{CSIDriver, VolumeAttachment},
};
use tokio::{
    sync::{SetOnce, watch},
    time::{Instant, sleep, sleep_until},
};
use tracing::warn;

use crate::{
    node::{Builder, Handles},
    pod_cidr,
};
use beelet_base::blocking::blocking;
use beelet_cluster::{
    accounts::Accounts,
    autonomy::Settings,
    client::Client,
    connect::{self, Connections},
    csi_node, events, lease, machine, node,
    presence::Presence,
    resource_slices,
    reviews::Reviews,
    rotation::Identity,
    serving, storage,
    workload::{self, Workload},
};
use beelet_config::{Config, NodeConfig};
use beelet_cri::Runtime;
use beelet_kubelet_api::auth::Reviewers;
use beelet_model::{
    accounts::{Account, AccountError, Asked, ServiceAccounts},
    review::{AccessReviewer, Review, ReviewError, TokenReviewer, User},
    storage::{Answer, Storage, StorageError, Token},
};

/// How often a runtime whose network is not ready is asked again.
const NETWORK: Duration = Duration::from_secs(1);
/// How often images are listed.
const IMAGES: Duration = Duration::from_secs(60);
/// How long the agent waits between two tries to read the kubeconfig.
const AGAIN: Duration = Duration::from_secs(10);

/// Flags for a node of a cluster.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Node of a cluster")]
pub(crate) struct ClusterArgs {
    /// Kubeconfig for the API server; joins this node to that cluster. Default: run standalone.
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Kubeconfig for requesting the node's certificate, used if --kubeconfig does not exist.
    #[arg(long, value_name = "FILE", requires = "kubeconfig")]
    pub(crate) bootstrap_kubeconfig: Option<PathBuf>,
    /// Directory for requested and generated certificates. Default: pki in the kubelet's directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) cert_dir: Option<PathBuf>,
    /// Addresses of the node, at most one IPv4 and one IPv6. Default: the source address of the default
    /// route.
    #[arg(long, value_name = "IP[,IP]", value_delimiter = ',')]
    pub(crate) node_ip: Vec<IpAddr>,
    /// Labels to register the Node with.
    #[arg(long, value_name = "KEY=VALUE,...", value_delimiter = ',', value_parser = label)]
    pub(crate) node_labels: Vec<(String, String)>,
}

/// How this node is one of a cluster.
#[derive(Debug)]
pub(crate) struct Membership {
    kubeconfig: PathBuf,
    bootstrap: Option<PathBuf>,
    cert_dir: PathBuf,
}

impl ClusterArgs {
    /// Puts what the flags say into the configuration. None: the node is on its own.
    ///
    /// # Errors
    /// Flags that can't be together, or a kubeconfig that can't be used.
    pub(crate) fn resolve(&self, config: &mut Config) -> Result<Option<Membership>, String> {
        let families = self.node_ip.iter().map(IpAddr::is_ipv4);
        match families.collect::<Vec<_>>()[..] {
            [] | [_] => {}
            [first, second] if first != second => {}
            _ => return Err("`--node-ip` accepts one address, or one IPv4 and one IPv6 address".to_owned()),
        }
        config.node.ips.clone_from(&self.node_ip);
        config.node.labels = self.node_labels.iter().cloned().collect();
        config.server.cert_dir.clone_from(&self.cert_dir);
        let Some(kubeconfig) = self.kubeconfig.clone() else { return Ok(None) };
        let bootstrap = self.bootstrap_kubeconfig.clone();
        let needed = bootstrap.as_ref().filter(|_| !kubeconfig.exists()).unwrap_or(&kubeconfig);
        connect::check(needed).map_err(|error| error.to_string())?;
        Ok(Some(Membership { kubeconfig, bootstrap, cert_dir: config.cert_dir() }))
    }
}

pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected `key=value`")?;
    if key.is_empty() || key.len() > 317 || value.len() > 63 {
        return Err(format!("{text:?} is not a label: a key has 1 to 317 characters, a value at most 63"));
    }
    Ok((key.to_owned(), value.to_owned()))
}

/// What the parts share once there is a connection.
#[derive(Clone)]
struct Session {
    client: Client,
    connections: Connections,
}

/// Asks the API server who may use the node's server, once there is a connection.
struct LateReviews {
    session: Arc<SetOnce<Session>>,
    node: String,
}

impl LateReviews {
    fn reviews(&self) -> Result<Reviews, ReviewError> {
        let none = || ReviewError("not connected to the API server yet".to_owned());
        let session = self.session.get().ok_or_else(none)?;
        Ok(Reviews::new(session.client.clone(), self.node.clone()))
    }
}

impl TokenReviewer for LateReviews {
    fn review<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>> {
        Box::pin(async move { TokenReviewer::review(&self.reviews()?, token).await })
    }
}

impl AccessReviewer for LateReviews {
    fn review<'a>(&'a self, user: &'a User, access: Access) -> Review<'a, bool> {
        Box::pin(async move { AccessReviewer::review(&self.reviews()?, user, access).await })
    }
}

/// Asks the API server for service accounts, once there is a connection.
#[derive(Default)]
struct LateAccounts {
    session: Arc<SetOnce<Session>>,
    accounts: OnceLock<Accounts>,
}

impl std::fmt::Debug for LateAccounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LateAccounts").finish_non_exhaustive()
    }
}

impl LateAccounts {
    fn accounts(&self) -> Result<&Accounts, AccountError> {
        let none = || AccountError("not connected to the API server yet".to_owned());
        let session = self.session.get().ok_or_else(none)?;
        Ok(self.accounts.get_or_init(|| Accounts::new(session.client.clone())))
    }
}

impl ServiceAccounts for LateAccounts {
    fn account<'a>(&'a self, namespace: &'a str, name: &'a str) -> Asked<'a, Account> {
        Box::pin(async move { self.accounts()?.account(namespace, name).await })
    }

    fn token<'a>(&'a self, of: &'a TokenReference) -> Asked<'a, Arc<str>> {
        Box::pin(async move { self.accounts()?.token(of).await })
    }
}

/// Asks the API server for storage, once there is a connection.
struct LateStorage {
    session: Arc<SetOnce<Session>>,
    node: watch::Receiver<Option<Arc<core::Node>>>,
}

impl std::fmt::Debug for LateStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LateStorage").finish_non_exhaustive()
    }
}

impl LateStorage {
    fn storage(&self) -> Result<storage::Storage, StorageError> {
        let none = || StorageError {
            message: "not connected to the API server yet".to_owned(),
            is_not_found: false,
        };
        Ok(storage::Storage::new(self.session.get().ok_or_else(none)?.client.clone()))
    }
}

impl Storage for LateStorage {
    fn claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, core::PersistentVolumeClaim> {
        Box::pin(async move { self.storage()?.claim(namespace, name).await })
    }

    fn patch_claim<'a>(
        &'a self,
        claim: &'a core::PersistentVolumeClaim,
        status: &'a StatusPatch,
    ) -> Answer<'a, core::PersistentVolumeClaim> {
        Box::pin(async move { self.storage()?.patch_claim(claim, status).await })
    }

    fn volume<'a>(&'a self, name: &'a str) -> Answer<'a, core::PersistentVolume> {
        Box::pin(async move { self.storage()?.volume(name).await })
    }

    fn attachment<'a>(&'a self, name: &'a str) -> Answer<'a, VolumeAttachment> {
        Box::pin(async move { self.storage()?.attachment(name).await })
    }

    fn driver<'a>(&'a self, name: &'a str) -> Answer<'a, Option<CSIDriver>> {
        Box::pin(async move { self.storage()?.driver(name).await })
    }

    fn resource_claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, ResourceClaim> {
        Box::pin(async move { self.storage()?.resource_claim(namespace, name).await })
    }

    fn secret<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, core::Secret> {
        Box::pin(async move { self.storage()?.secret(namespace, name).await })
    }

    fn token<'a>(&'a self, of: &'a TokenReference) -> Answer<'a, Token> {
        Box::pin(async move { self.storage()?.token(of).await })
    }

    fn node(&self) -> watch::Receiver<Option<Arc<core::Node>>> {
        self.node.clone()
    }
}

/// Adds all parts to `builder`.
pub(crate) fn join(builder: Builder, config: &Config, membership: Membership) -> Builder {
    let (node_out, node) = watch::channel(None);
    let shared = Shared { session: Arc::default(), presence: Presence::default(), node };
    let builder = answer_late(builder, config, &shared);
    let builder = serve_signed(builder, config, &shared);
    let builder = connect_as(builder, config, membership, &shared);
    let builder = keep_lease(builder, config, &shared);
    let builder = follow_pods(builder, config, &shared);
    let builder = send_events(builder, config, &shared);
    let builder = keep_csi_node(builder, config, &shared);
    let builder = keep_resource_slices(builder, config, &shared);
    let builder = pod_cidr::keep(builder, pod_cidr::Source::Node(shared.node.clone()));
    keep_node(builder, config, shared, node_out)
}

/// What the parts have in common.
struct Shared {
    /// There once the node has connected.
    session: Arc<SetOnce<Session>>,
    presence: Presence,
    /// The Node, as it was last read or written.
    node: watch::Receiver<Option<Arc<core::Node>>>,
}

/// Others ask the API server through these before the node has connected.
fn answer_late(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    let session = || Arc::clone(&shared.session);
    let reviews = Arc::new(LateReviews { session: session(), node: config.node_name.clone() });
    let reviewers = Reviewers { tokens: Some(reviews.clone()), access: Some(reviews) };
    let accounts = LateAccounts { session: session(), ..LateAccounts::default() };
    let storage = LateStorage { session: session(), node: shared.node.clone() };
    builder.reviewers(reviewers).accounts(Arc::new(accounts)).storage(Arc::new(storage))
}

/// Connects, and keeps the certificate that the node connects with.
fn connect_as(builder: Builder, config: &Config, membership: Membership, shared: &Shared) -> Builder {
    let (session, presence) = (Arc::clone(&shared.session), shared.presence.clone());
    let (node_name, rotate) = (config.node_name.clone(), config.node.rotate_certificates);
    builder.attach("cluster identity", move |handles, stop| async move {
        let options = connect::Options {
            kubeconfig: membership.kubeconfig,
            bootstrap: membership.bootstrap,
            cert_dir: membership.cert_dir,
            node_name,
            rotate,
            metrics: handles.metrics.cluster.identity,
            requests: handles.metrics.cluster.requests,
            presence,
        };
        let Some((client, identity)) = stop.run_until_cancelled(open(options)).await else { return };
        let _ = session.set(Session { client: client.clone(), connections: identity.connections() });
        identity.keep(client, stop).await;
    })
}

/// Renews the node's lease.
fn keep_lease(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    let (session, node) = (Arc::clone(&shared.session), shared.node.clone());
    let (node_name, duration) = (config.node_name.clone(), config.node.lease_duration);
    builder.attach("node lease", move |handles, stop| async move {
        let inputs = lease::Inputs { node_name, duration, node, metrics: handles.metrics.cluster.lease };
        let Some(session) = stop.run_until_cancelled(session.wait()).await else { return };
        lease::keep(session.connections.clone(), inputs, stop).await;
    })
}

/// Runs what the API server assigns to the node, and writes how it is.
fn follow_pods(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    let (workload, assigned) = Workload::new();
    let (session, node) = (Arc::clone(&shared.session), shared.node.clone());
    let (node_name, autonomy) = (config.node_name.clone(), autonomy(config));
    let presence = shared.presence.clone();
    builder.source(assigned).attach("pods of the API server", move |handles, stop| async move {
        let inputs = workload::Inputs {
            node_name,
            node,
            table: handles.table,
            requests: handles.requests,
            complete: handles.complete,
            events: handles.events,
            mirrors: handles.metrics.cluster.mirrors,
            state: handles.state,
            autonomy,
            presence,
            written: handles.written,
        };
        let client = Box::pin(async move { session.wait().await.client.clone() });
        workload.run(client, inputs, stop).await;
    })
}

/// Sends the node's events to the API server.
fn send_events(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    let session = Arc::clone(&shared.session);
    let source = events::Source {
        node_name: config.node_name.clone(),
        began: Timestamp::now(),
        per_second: config.node.event_qps,
        burst: config.node.event_burst,
    };
    builder.attach("events to the API server", move |handles, stop| async move {
        let Some(session) = stop.run_until_cancelled(session.wait()).await else { return };
        let metrics = handles.metrics.cluster.events;
        events::send(session.client.clone(), handles.events.subscribe(), source, metrics, stop).await;
    })
}

/// Writes which storage plugins the node has.
fn keep_csi_node(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    let (session, node) = (Arc::clone(&shared.session), shared.node.clone());
    let node_name = config.node_name.clone();
    builder.attach("CSINode", move |handles, stop| async move {
        let Some(session) = stop.run_until_cancelled(session.wait()).await else { return };
        let inputs = csi_node::Inputs { node_name, node, drivers: handles.csi.drivers() };
        csi_node::keep(session.client.clone(), inputs, stop).await;
    })
}

/// Removes what drivers that are away say they have here.
fn keep_resource_slices(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    let (session, node) = (Arc::clone(&shared.session), shared.node.clone());
    let node_name = config.node_name.clone();
    builder.attach("ResourceSlices", move |handles, stop| async move {
        let Some(session) = stop.run_until_cancelled(session.wait()).await else { return };
        let inputs = resource_slices::Inputs { node_name, node, drivers: handles.dra.drivers() };
        resource_slices::keep(session.client.clone(), inputs, stop).await;
    })
}

/// Registers the Node, and writes its status.
fn keep_node(
    builder: Builder,
    config: &Config,
    shared: Shared,
    node: watch::Sender<Option<Arc<core::Node>>>,
) -> Builder {
    let (facts_out, facts) = watch::channel(RuntimeFacts::default());
    let (changes_out, changes) = watch::channel(());
    let (settings, name) = (config.node.clone(), config.node_name.clone());
    // A Node gives 0 where there is no server to reach.
    let port = beelet_kubelet_api::port(&config.server, true).unwrap_or(0);
    let (every, most) = (settings.status_update_frequency, settings.status_max_images);
    let builder = builder.attach("runtime facts", move |handles, stop| async move {
        stop.run_until_cancelled(follow(handles, facts_out, changes_out, every, most)).await;
    });
    builder.attach("node status", move |handles, stop| async move {
        let info = blocking("the machine's files", machine::inspect).await;
        let Some(session) = stop.run_until_cancelled(shared.session.wait()).await else { return };
        let inputs = node::Inputs {
            arch: info.architecture.clone(),
            registration: registration(&name, &settings),
            host: handles.host.clone(),
            register: settings.register,
            update: settings.status_update_frequency,
            report_every: settings.status_report_frequency,
            events: handles.events.clone(),
            metrics: handles.metrics.cluster.node.clone(),
            report: reporter(handles, facts, info, port),
            changes,
            node,
        };
        node::keep(session.client.clone(), inputs, stop).await;
    })
}

/// How the node does without its API server.
fn autonomy(config: &Config) -> Settings {
    let beelet_config::Autonomy { enabled, after, key_file } = config.beelet.autonomy.clone();
    Settings { enabled, after, key_file }
}

/// Where the certificate of the node's server is to be signed in the cluster, asks for it.
fn serve_signed(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    if !config.server.tls_bootstrap || config.server.tls_files.is_some() {
        return builder;
    }
    let (session, node) = (Arc::clone(&shared.session), shared.node.clone());
    let (cert_dir, node_name) = (config.cert_dir(), config.node_name.clone());
    builder.attach("serving certificate", move |handles, stop| async move {
        let metrics = handles.metrics.cluster.serving;
        let Some(session) = stop.run_until_cancelled(session.wait()).await else { return };
        let inputs = serving::Inputs { cert_dir, node_name, node, metrics };
        serving::keep(session.client.clone(), inputs, stop).await;
    })
}

/// Connects; a kubeconfig that has become unusable is read again and again.
async fn open(options: connect::Options) -> (Client, Identity) {
    loop {
        match connect::connect(options.clone()).await {
            Ok(connected) => return connected,
            Err(error) => {
                warn!("cannot connect to the API server: {error}; retrying in {} s", AGAIN.as_secs());
            }
        }
        sleep(AGAIN).await;
    }
}

fn registration(name: &str, settings: &NodeConfig) -> Registration {
    let taint = |taint: &beelet_config::Taint| core::Taint {
        key: taint.key.clone(),
        value: (!taint.value.is_empty()).then(|| taint.value.clone()),
        effect: taint.effect.clone(),
        ..core::Taint::default()
    };
    Registration {
        name: name.to_owned(),
        hostname: name.to_owned(),
        labels: settings.labels.clone(),
        taints: settings.taints.iter().map(taint).collect(),
        provider_id: (!settings.provider_id.is_empty()).then(|| settings.provider_id.clone()),
        external_cloud: settings.external_cloud,
        ips: settings.ips.clone(),
    }
}

/// What the container runtime says of itself, for the Node's status.
#[derive(Clone, Debug, Default, PartialEq)]
struct RuntimeFacts {
    version: String,
    handlers: Vec<core::NodeRuntimeHandler>,
    features: Option<core::NodeFeatures>,
    images: Vec<core::ContainerImage>,
    /// Why its network is not ready.
    network: Option<String>,
}

/// Asks the runtime, so that whoever writes the status never waits for it.
async fn follow(
    handles: Handles,
    facts: watch::Sender<RuntimeFacts>,
    changes: watch::Sender<()>,
    every: Duration,
    most_images: Option<usize>,
) {
    let (runtime, mut devices) = (handles.runtime.clone(), handles.devices.node());
    let (mut shutdown, mut volumes) = (handles.shutdown.clone(), handles.csi.in_use());
    let mut images_due = Instant::now();
    loop {
        let mut new = facts.borrow().clone();
        ask(&runtime, &mut new).await;
        if images_due <= Instant::now() {
            if let Ok(images) = runtime.list_images().await {
                new.images = status::images(images.into_iter().map(image).collect(), most_images);
            }
            images_due = Instant::now() + IMAGES;
        }
        let next = Instant::now().after(if new.network.is_some() { NETWORK.min(every) } else { every });
        let changed = facts.send_if_modified(|known| {
            let differ = *known != new;
            *known = new;
            differ
        });
        if changed {
            changes.send_replace(());
        }
        loop {
            tokio::select! {
                () = sleep_until(next) => break,
                Ok(()) = devices.changed() => { changes.send_replace(()); }
                Ok(()) = shutdown.changed() => { changes.send_replace(()); }
                Ok(()) = volumes.changed() => { changes.send_replace(()); }
            }
        }
    }
}

/// Asks for what changes while the runtime runs, or when it is replaced. What it does not answer stays as it
/// was.
async fn ask(runtime: &Runtime, facts: &mut RuntimeFacts) {
    if let Ok(version) = runtime.version().await {
        facts.version = format!("{}://{}", version.runtime_name, version.runtime_version);
    }
    let Ok(status) = runtime.status(false).await else { return };
    facts.handlers = status.runtime_handlers.into_iter().map(handler).collect();
    facts.handlers.sort_by(|a, b| a.name.cmp(&b.name));
    facts.features = status.features.map(|features| core::NodeFeatures {
        supplemental_groups_policy: Some(features.supplemental_groups_policy),
    });
    let conditions = status.status.map(|status| status.conditions).unwrap_or_default();
    let network = conditions.into_iter().find(|condition| condition.r#type == "NetworkReady");
    facts.network = network.filter(|condition| !condition.status).map(|condition| {
        let (reason, message) = (shortened(&condition.reason), shortened(&condition.message));
        format!("container runtime network not ready: NetworkReady=false reason:{reason} message:{message}")
    });
}

/// A condition is for people; a runtime may say anything.
fn shortened(words: &str) -> String {
    words.chars().take(1024).collect()
}

fn handler(handler: cri::RuntimeHandler) -> core::NodeRuntimeHandler {
    let features = handler.features.map(|features| core::NodeRuntimeHandlerFeatures {
        recursive_read_only_mounts: Some(features.recursive_read_only_mounts),
        user_namespaces: Some(features.user_namespaces),
    });
    core::NodeRuntimeHandler { name: Some(handler.name), features }
}

fn image(image: cri::Image) -> core::ContainerImage {
    core::ContainerImage {
        names: Some(image.repo_digests.into_iter().chain(image.repo_tags).collect()),
        size_bytes: i64::try_from(image.size).ok(),
    }
}

/// Says how the machine is, as of now; waits for nothing.
fn reporter(
    handles: Handles,
    facts: watch::Receiver<RuntimeFacts>,
    info: core::NodeSystemInfo,
    port: u16,
) -> Arc<dyn Fn() -> NodeReport + Send + Sync> {
    let (devices, volumes) = (handles.devices.node(), handles.csi.in_use());
    Arc::new(move || {
        let (facts, devices) = (facts.borrow().clone(), Arc::clone(&devices.borrow()));
        let with = |own: &BTreeMap<String, String>, devices: &BTreeMap<String, usize>, gone: &[String]| {
            let gone = gone.iter().map(|name| (name.clone(), "0".to_owned()));
            let devices = devices.iter().map(|(name, count)| (name.clone(), count.to_string()));
            own.clone().into_iter().chain(gone).chain(devices).collect()
        };
        let gone: Vec<String> = devices.removed.iter().cloned().collect();
        let mut conditions = (handles.conditions)();
        if let Some(why) = &facts.network {
            not_ready(&mut conditions, why);
        }
        NodeReport {
            capacity: with(&handles.resources.capacity, &devices.capacity, &gone),
            allocatable: with(&handles.resources.allocatable, &devices.allocatable, &gone),
            conditions,
            info: core::NodeSystemInfo { container_runtime_version: facts.version, ..info.clone() },
            images: facts.images,
            handlers: facts.handlers,
            features: facts.features,
            volumes_in_use: volumes.borrow().keys().cloned().collect(),
            port: port.into(),
            ..NodeReport::default()
        }
    })
}

/// A node without a network is not ready, whatever else it is.
fn not_ready(conditions: &mut [core::NodeCondition], why: &str) {
    let ready = conditions.iter_mut().find(|condition| condition.type_ == "Ready");
    let Some(ready) = ready else { return };
    let message = match (&ready.message, ready.status.as_str()) {
        (Some(other), "False") => format!("[{other}, {why}]"),
        _ => why.to_owned(),
    };
    ready.status = "False".to_owned();
    ready.reason = Some("KubeletNotReady".to_owned());
    ready.message = Some(message);
}
