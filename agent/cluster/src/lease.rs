//! The node's lease, its heartbeat in the cluster.
//!
//! A separate thread with its own runtime and connection renews the lease, so that renewals never wait for
//! the rest of the agent (a hung container runtime, a full disk, a thousand pods that start). The runtime's
//! blocking thread, which resolves host names, is started first and never exits.
//!
//! The lease's content follows `k8s.io/component-helpers/apimachinery/lease` and the kubelet's
//! `setNodeOwnerFunc`.

use std::{sync::Arc, thread, time::Duration};

use beelet_base::{clock::After as _, simulation, work::Work};
use beelet_codec::ApiType;
use jiff::Timestamp;
use k8s_openapi::{
    api::{
        coordination::v1::{Lease, LeaseSpec},
        core::v1::Node,
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference},
};
use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};
use tokio::{
    runtime,
    sync::{oneshot, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    backoff::Backoff,
    client::{Client, Error},
    identity::Connections,
};

/// Namespace of the nodes' leases.
const NAMESPACE: &str = "kube-node-lease";
/// Renewals per duration of the lease.
const PART: u32 = 4;
/// Maximum pause between two attempts while the server is away, before jitter.
const TRIES: Duration = Duration::from_secs(5);
/// The thread's niceness: ahead of the threads that run pods.
const NICENESS: i32 = -10;
/// Keep-alive of the blocking thread: practically forever.
const FOR_GOOD: Duration = Duration::from_secs(u32::MAX as u64);

/// Counters.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    renewals: Counter,
    failures: Counter,
    renewed: Gauge<f64, std::sync::atomic::AtomicU64>,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("beelet_lease_renewals", "Renewals of the node's lease", self.renewals.clone());
        registry.register(
            "beelet_lease_failures",
            "Failed requests to renew the node's lease",
            self.failures.clone(),
        );
        registry.register(
            "beelet_lease_renewed_timestamp_seconds",
            "Time of the last renewal of the node's lease, in seconds since 1970",
            self.renewed.clone(),
        );
    }
}

/// Inputs of the thread.
#[derive(Debug)]
pub struct Inputs {
    /// The node's name.
    pub node_name: String,
    /// Duration of the lease.
    pub duration: Duration,
    /// The Node, which owns the lease.
    pub node: watch::Receiver<Option<Arc<Node>>>,
    /// Metrics.
    pub metrics: Metrics,
}

/// Renews the lease until `stop`. Returns early only if the thread ends, which is a bug.
pub fn keep(connections: Connections, inputs: Inputs, stop: CancellationToken) -> Work {
    Box::pin(async move {
        if simulation::is_on() {
            stop.run_until_cancelled(renew(connections, inputs)).await;
            return;
        }
        let (ending, ended) = oneshot::channel::<()>();
        let spawned = thread::Builder::new().name("node-lease".to_owned()).spawn(move || {
            // Dropped when the thread ends, also by a panic.
            let _ending = ending;
            work(connections, inputs, &stop);
        });
        if let Err(cause) = spawned {
            warn!(%cause, "cannot start the thread that renews the node's lease");
            return;
        }
        let _ = ended.await;
    })
}

fn work(connections: Connections, inputs: Inputs, stop: &CancellationToken) {
    // Without the permission, the thread keeps its niceness.
    let _ = rustix::process::setpriority_process(None, NICENESS);
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .thread_keep_alive(FOR_GOOD)
        .build();
    match runtime {
        Ok(runtime) => runtime.block_on(async {
            // Start the blocking thread before it is needed, since threads may be scarce then.
            let _ = tokio::task::spawn_blocking(|| ()).await;
            stop.run_until_cancelled(renew(connections, inputs)).await;
        }),
        Err(cause) => warn!(%cause, "cannot start the runtime that renews the node's lease"),
    }
}

/// Renews the lease in a loop; reconnects when the identity changes.
async fn renew(mut connections: Connections, inputs: Inputs) {
    let interval = inputs.duration / PART;
    let mut keeper = Keeper { inputs, newest: None, failing: false };
    // Other tasks wait for the server through these attempts' results: attempts are frequent and small.
    let mut backoff = Backoff::new(Duration::from_millis(200), interval.min(TRIES));
    let mut at = Instant::now();
    loop {
        let opened = match connections.open().await {
            Ok(opened) => opened,
            Err(error) => {
                keeper.record(Some(&error.to_string()));
                sleep(backoff.next(None)).await;
                continue;
            }
        };
        // The sender must outlive the client.
        let (_kept, receiver) = watch::channel(opened);
        let client = Client::with_presence(receiver, connections.presence());
        let outdated = connections.outdated();
        tokio::pin!(outdated);
        loop {
            tokio::select! {
                () = &mut outdated => break,
                next = turn(&mut keeper, &client, &mut backoff, at, interval) => at = next,
            }
        }
    }
}

/// Sleeps until `at`, makes one attempt, and returns the time of the next one.
async fn turn(
    keeper: &mut Keeper,
    client: &Client,
    backoff: &mut Backoff,
    at: Instant,
    interval: Duration,
) -> Instant {
    sleep_until(at).await;
    // The Node owns the lease and must exist first.
    if keeper.inputs.node.wait_for(Option::is_some).await.is_err() {
        std::future::pending::<()>().await;
    }
    let began = Instant::now();
    // An answer after the next renewal is due is useless.
    let tried = timeout(interval, keeper.once(client)).await;
    let (error, asked) = match &tried {
        Ok(Ok(())) => (None, None),
        Ok(Err(error)) => (Some(error.to_string()), error.retry_after()),
        Err(_) => (Some(format!("no answer within {} s", interval.as_secs_f64())), None),
    };
    keeper.record(error.as_deref());
    if error.is_none() {
        backoff.reset();
        return began.after(interval);
    }
    keeper.newest = None;
    Instant::now().after(backoff.next(asked))
}

struct Keeper {
    inputs: Inputs,
    /// The server's last version.
    newest: Option<Lease>,
    failing: bool,
}

impl Keeper {
    /// Renews the lease: creates it, or adopts the existing one.
    async fn once(&mut self, client: &Client) -> Result<(), Error> {
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases");
        let own = format!("{path}/{}", self.inputs.node_name);
        let Some(node) = self.inputs.node.borrow().clone() else { return Ok(()) };
        let now = Timestamp::now;
        if let Some(newest) = self.newest.take() {
            let wanted = renewed(newest, &self.inputs, &node, now());
            match client.replace(&own, &wanted.to_value()).await {
                Ok(answer) => return self.keep(&own, &answer),
                Err(error) if error.is_conflict() || error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        let answer = match client.get(&own).await {
            Ok(found) => {
                let wanted = renewed(lease(&own, &found)?, &self.inputs, &node, now());
                client.replace(&own, &wanted.to_value()).await?
            }
            Err(error) if error.is_not_found() => {
                let wanted = renewed(Lease::default(), &self.inputs, &node, now());
                client.create(&path, &wanted.to_value()).await?
            }
            Err(error) => return Err(error),
        };
        self.keep(&own, &answer)
    }

    fn keep(&mut self, request: &str, answer: &serde_json::Value) -> Result<(), Error> {
        self.newest = Some(lease(request, answer)?);
        self.inputs.metrics.renewals.inc();
        self.inputs.metrics.renewed.set(Timestamp::now().as_millisecond() as f64 / 1000.0);
        Ok(())
    }

    /// Counts each failure, and logs the first failure and the recovery.
    fn record(&mut self, error: Option<&str>) {
        match error {
            None if self.failing => info!("renewing the node's lease again"),
            Some(error) => {
                self.inputs.metrics.failures.inc();
                if !self.failing {
                    warn!("cannot renew the node's lease, retrying: {error}");
                }
            }
            None => {}
        }
        self.failing = error.is_some();
    }
}

fn lease(request: &str, value: &serde_json::Value) -> Result<Lease, Error> {
    Lease::from_value(value).map_err(|problem| Error::unreachable(request, &problem))
}

/// Returns the lease with this node as holder and `now` as the time of renewal.
fn renewed(mut lease: Lease, inputs: &Inputs, node: &Node, now: Timestamp) -> Lease {
    let name = &inputs.node_name;
    let ObjectMeta { name: lease_name, namespace, owner_references, managed_fields, .. } =
        &mut lease.metadata;
    *managed_fields = None;
    lease_name.get_or_insert_with(|| name.clone());
    namespace.get_or_insert_with(|| NAMESPACE.to_owned());
    let owner = node.metadata.uid.clone().map(|uid| OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: name.clone(),
        uid,
        ..OwnerReference::default()
    });
    if let Some(owner) = owner {
        let owners = owner_references.get_or_insert_default();
        // With an earlier Node of the same name as owner, the garbage collector would delete the lease.
        owners.retain(|other| other.kind != "Node" || other.uid == owner.uid);
        if owners.iter().all(|other| other.uid != owner.uid) {
            owners.push(owner);
        }
    }
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    spec.holder_identity = Some(name.clone());
    spec.lease_duration_seconds = i32::try_from(inputs.duration.as_secs()).ok();
    spec.renew_time = Some(MicroTime(now));
    lease
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Server, node};

    fn inputs(node: Option<Node>) -> Inputs {
        let (_, node) = watch::channel(node.map(Arc::new));
        Inputs {
            node_name: "n1".to_owned(),
            duration: Duration::from_secs(40),
            node,
            metrics: Metrics::default(),
        }
    }

    fn keeper() -> Keeper {
        Keeper { inputs: inputs(Some(node("n1", "uid-1"))), newest: None, failing: false }
    }

    #[test]
    fn a_lease_of_an_earlier_node_is_taken_over() {
        let first = renewed(Lease::default(), &inputs(None), &node("n1", "uid-1"), Timestamp::UNIX_EPOCH);
        let second = renewed(first.clone(), &inputs(None), &node("n1", "uid-2"), Timestamp::UNIX_EPOCH);
        let owners = second.metadata.owner_references.unwrap();
        assert_eq!(owners.iter().map(|owner| owner.uid.as_str()).collect::<Vec<_>>(), ["uid-2"]);
        assert_eq!(first.metadata.namespace.as_deref(), Some(NAMESPACE));
        let spec = first.spec.unwrap();
        assert_eq!((spec.holder_identity.as_deref(), spec.lease_duration_seconds), (Some("n1"), Some(40)));
    }

    #[tokio::test]
    async fn a_lease_is_made_once_and_then_renewed_by_one_request_each() {
        let server = Server::default();
        let client = server.client();
        let mut keeper = keeper();
        keeper.once(&client).await.unwrap();
        keeper.once(&client).await.unwrap();
        keeper.once(&client).await.unwrap();
        let own = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1";
        let collection = own.strip_suffix("/n1").unwrap();
        assert_eq!(
            server.requests(),
            [format!("GET {own}"), format!("POST {collection}"), format!("PUT {own}"), format!("PUT {own}")]
        );
    }

    #[tokio::test]
    async fn a_lease_that_somebody_changed_or_deleted_is_adopted_or_made_again() {
        let server = Server::default();
        let client = server.client();
        let own = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1";
        let mut keeper = keeper();
        keeper.once(&client).await.unwrap();
        server.touch(own);
        keeper.once(&client).await.unwrap();
        server.remove(own);
        keeper.once(&client).await.unwrap();
        assert_eq!(server.object(own).unwrap()["spec"]["holderIdentity"], "n1");
        assert_eq!(keeper.inputs.metrics.renewals.get(), 3);
    }
}
