//! Joins the node to a cluster: connects the parts of [`beelet_cluster`] with those of the agent.

mod late;
mod report;

use std::{net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use beelet_policy::node::status::Registration;
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use tokio::{
    sync::{SetOnce, watch},
    time::sleep,
};
use tracing::warn;

use self::{
    late::{LateAccounts, LateReviews, LateStorage, Session},
    report::{Repair, RuntimeFacts},
};
use crate::{
    node::{Builder, node_repair},
    pod_cidr,
};
use beelet_base::blocking::blocking;
use beelet_cluster::{
    autonomy::Settings,
    client::Client,
    connect, csi_node, events, identity, kubeconfig, lease, machine, node,
    presence::Presence,
    resource_slices,
    rotation::Identity,
    serving,
    workload::{self, Workload},
};
use beelet_config::{Config, NodeConfig};
use beelet_kubelet_api::auth::Reviewers;

/// Pause between two attempts to read the kubeconfig.
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

/// Files of a node's identity in a cluster.
#[derive(Debug)]
pub struct Membership {
    /// Kubeconfig of the node.
    pub kubeconfig: PathBuf,
    /// Kubeconfig that requests the node's certificate if `kubeconfig` does not exist.
    pub bootstrap: Option<PathBuf>,
    /// Folder of the node's certificates.
    pub cert_dir: PathBuf,
}

impl ClusterArgs {
    /// Applies the flags to the configuration. Returns None for a standalone node.
    ///
    /// # Errors
    /// Conflicting flags, or an unusable kubeconfig.
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
        kubeconfig::check(needed).map_err(|error| error.to_string())?;
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

/// Adds all parts of the cluster to `builder`.
#[must_use]
pub fn join(builder: Builder, config: &Config, membership: Membership) -> Builder {
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

/// State that the parts share.
struct Shared {
    /// Set once the node has connected.
    session: Arc<SetOnce<Session>>,
    presence: Presence,
    /// The Node as last read or written.
    node: watch::Receiver<Option<Arc<core::Node>>>,
}

/// Adds clients of the API server that other parts use, possibly before the node has connected.
fn answer_late(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    let session = || Arc::clone(&shared.session);
    let reviews = Arc::new(LateReviews { session: session(), node: config.node_name.clone() });
    let reviewers = Reviewers { tokens: Some(reviews.clone()), access: Some(reviews) };
    let accounts = LateAccounts { session: session(), ..LateAccounts::default() };
    let storage = LateStorage { session: session(), node: shared.node.clone() };
    builder.reviewers(reviewers).accounts(Arc::new(accounts)).storage(Arc::new(storage))
}

/// Connects, and maintains the node's client certificate.
fn connect_as(builder: Builder, config: &Config, membership: Membership, shared: &Shared) -> Builder {
    let (session, presence) = (Arc::clone(&shared.session), shared.presence.clone());
    let (node_name, rotate) = (config.node_name.clone(), config.node.rotate_certificates);
    builder.attach("cluster identity", move |handles, stop| async move {
        let options = identity::Options {
            kubeconfig: membership.kubeconfig,
            bootstrap: membership.bootstrap,
            cert_dir: membership.cert_dir,
            node_name,
            rotate,
            metrics: handles.services.metrics.cluster.identity,
            requests: handles.services.metrics.cluster.requests,
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
        let inputs =
            lease::Inputs { node_name, duration, node, metrics: handles.services.metrics.cluster.lease };
        let Some(session) = stop.run_until_cancelled(session.wait()).await else { return };
        lease::keep(session.connections.clone(), inputs, stop).await;
    })
}

/// Follows the pods that the API server assigns to the node, and writes their status.
fn follow_pods(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    let (workload, assigned) = Workload::new();
    let (session, node) = (Arc::clone(&shared.session), shared.node.clone());
    let (node_name, autonomy) = (config.node_name.clone(), autonomy(config));
    let presence = shared.presence.clone();
    builder.source(assigned).attach("pods of the API server", move |handles, stop| async move {
        let inputs = workload::Inputs {
            node_name,
            node,
            table: handles.services.table,
            requests: handles.requests,
            complete: handles.services.complete,
            events: handles.services.events,
            statuses: handles.services.metrics.cluster.statuses,
            mirrors: handles.services.metrics.cluster.mirrors,
            state: handles.services.state,
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
        let metrics = handles.services.metrics.cluster.events;
        events::send(session.client.clone(), handles.services.events.subscribe(), source, metrics, stop)
            .await;
    })
}

/// Maintains the node's CSINode.
fn keep_csi_node(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    let (session, node) = (Arc::clone(&shared.session), shared.node.clone());
    let node_name = config.node_name.clone();
    builder.attach("CSINode", move |handles, stop| async move {
        let Some(session) = stop.run_until_cancelled(session.wait()).await else { return };
        let inputs = csi_node::Inputs { node_name, node, drivers: handles.services.csi.drivers() };
        csi_node::keep(session.client.clone(), inputs, stop).await;
    })
}

/// Removes the ResourceSlices of absent drivers.
fn keep_resource_slices(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    let (session, node) = (Arc::clone(&shared.session), shared.node.clone());
    let node_name = config.node_name.clone();
    builder.attach("ResourceSlices", move |handles, stop| async move {
        let Some(session) = stop.run_until_cancelled(session.wait()).await else { return };
        let inputs = resource_slices::Inputs { node_name, node, drivers: handles.services.dra.drivers() };
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
    let (builder, repair) = watch_faults(builder, config, changes_out.clone());
    let (settings, name) = (config.node.clone(), config.node_name.clone());
    // A Node without a server has the port 0.
    let port = beelet_kubelet_api::port(&config.server, true).unwrap_or(0);
    let (every, most) = (settings.status_update_frequency, settings.status_max_images);
    let builder = builder.attach("runtime facts", move |handles, stop| async move {
        let following = report::follow(handles, facts_out, changes_out, every, most);
        stop.run_until_cancelled(following).await;
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
            events: handles.services.events.clone(),
            metrics: handles.services.metrics.cluster.node.clone(),
            report: report::reporter(handles, facts, repair, info, port),
            changes,
            node,
        };
        node::keep(session.client.clone(), inputs, stop).await;
    })
}

/// Measures the machine's faults if the Node gets conditions for node repair. Notifies `changes` of each
/// change.
fn watch_faults(builder: Builder, config: &Config, changes: watch::Sender<()>) -> (Builder, Repair) {
    let (faults_out, faults) = watch::channel(None);
    let conventions = config.beelet.node_conditions.clone();
    let repair = Repair { conventions, faults: faults.clone() };
    if repair.conventions.is_empty() {
        return (builder, repair);
    }
    let builder = builder.attach("node repair", move |handles, stop| async move {
        let keeping = beelet_repair::keep(node_repair(&handles.services, faults_out), stop);
        let mut faults = faults;
        let notifying = async move {
            while faults.changed().await.is_ok() {
                changes.send_replace(());
            }
        };
        tokio::join!(keeping, notifying);
    });
    (builder, repair)
}

/// Returns the settings of the cache for a start without the API server.
fn autonomy(config: &Config) -> Settings {
    let beelet_config::Autonomy { enabled, after, key_file, stateful_sets } = config.beelet.autonomy.clone();
    Settings { enabled, after, key_file, stateful_sets }
}

/// Requests the node's serving certificate from the cluster's signer, if configured.
fn serve_signed(builder: Builder, config: &Config, shared: &Shared) -> Builder {
    if !config.server.tls_bootstrap || config.server.tls_files.is_some() {
        return builder;
    }
    let (session, node) = (Arc::clone(&shared.session), shared.node.clone());
    let (cert_dir, node_name) = (config.cert_dir(), config.node_name.clone());
    builder.attach("serving certificate", move |handles, stop| async move {
        let metrics = handles.services.metrics.cluster.serving;
        let Some(session) = stop.run_until_cancelled(session.wait()).await else { return };
        let inputs = serving::Inputs { cert_dir, node_name, node, metrics };
        serving::keep(session.client.clone(), inputs, stop).await;
    })
}

/// Connects to the API server. Retries without end, as the kubeconfig may be replaced.
async fn open(options: identity::Options) -> (Client, Identity) {
    loop {
        match connect::connect(options.clone()).await {
            Ok(connected) => return connected,
            Err(error) => {
                warn!("cannot connect to the API server, retrying in {} s: {error}", AGAIN.as_secs());
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
