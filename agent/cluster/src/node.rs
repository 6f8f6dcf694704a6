//! The Node object: registers or adopts it, keeps it current, and registers it again if it is deleted.
//!
//! Reads only through a watch of this single object. Writes the status at a change, otherwise once per
//! `nodeStatusReportFrequency`. `policy::node::status` decides on the status.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_base::work::Work;
use beelet_codec::ApiType;
use beelet_model::pod::HostIps;
use beelet_policy::node::status::{self, Change, NodeReport, Registration};
use beelet_state::events::{Object, Recorder};
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeAddress, NodeStatus};
use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};
use serde_json::{Map, Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

mod startup;

use self::startup::Startup;
use crate::{
    backoff::{Backoff, jittered},
    client::{Client, Error, Event, Kind, Patch},
    url::escaped,
};

/// `kubeletVersion` of the Node: the version of the kubelet whose contract the agent implements, by which
/// controllers and `kubeadm` judge the skew. The part after the plus sign names the agent (semver: build
/// metadata has no precedence).
pub const KUBELET_VERSION: &str = concat!("v1.36.2+beelet-", env!("CARGO_PKG_VERSION"));
/// Path of the nodes.
const NODES: &str = "/api/v1/nodes";
/// Interval of status checks on a node that is not ready yet.
const SOON: Duration = Duration::from_millis(500);
/// Minimum time between two writes after changes.
const BREATH: Duration = Duration::from_secs(1);
/// Duration of a watch, at whose end the server closes it.
const WATCH: Duration = Duration::from_secs(420);

/// Counters.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    writes: Counter,
    failures: Counter,
    written: Gauge<f64, AtomicU64>,
    startup: Startup,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Writes of the Node and its status";
        registry.register("beelet_node_status_writes", help, self.writes.clone());
        let help = "Failed requests for the Node";
        registry.register("beelet_node_status_failures", help, self.failures.clone());
        let help = "Time of the last write of the Node's status, in seconds since 1970";
        registry.register("beelet_node_status_written_timestamp_seconds", help, self.written.clone());
        self.startup.register(registry);
    }
}

/// Inputs of [`keep`].
pub struct Inputs {
    /// The node's registration.
    pub registration: Registration,
    /// The processor architecture, in Go's terms.
    pub arch: String,
    /// The machine's own addresses.
    pub host: HostIps,
    /// Returns the machine's current state, without the node's addresses.
    pub report: Arc<dyn Fn() -> NodeReport + Send + Sync>,
    /// Signal that the report may have changed.
    pub changes: watch::Receiver<()>,
    /// True to create a missing Node.
    pub register: bool,
    /// Interval of status checks.
    pub update: Duration,
    /// Interval of writes of an unchanged status.
    pub report_every: Duration,
    /// Publishes the API server's Node.
    pub node: watch::Sender<Option<Arc<Node>>>,
    /// The node's events.
    pub events: Recorder,
    /// Metrics.
    pub metrics: Metrics,
}

impl fmt::Debug for Inputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inputs").field("registration", &self.registration).finish_non_exhaustive()
    }
}

/// Maintains the Node until `stop`.
pub fn keep(client: Client, inputs: Inputs, stop: CancellationToken) -> Work {
    Box::pin(async move {
        let labels = status::labels(&inputs.registration, &inputs.arch);
        let path = format!("{NODES}/{}", inputs.registration.name);
        let keeper = Keeper {
            client,
            inputs,
            labels,
            path,
            version: None,
            written: None,
            ignored: None,
            ready: None,
            unschedulable: false,
            rebooted: false,
            failing: false,
        };
        stop.run_until_cancelled(keeper.run()).await;
    })
}

/// Reason for the end of a watch.
enum Fate {
    /// The Node was deleted.
    Deleted,
    /// The watch must restart from the current state.
    Unknown,
}

/// Parts of a change other than the conditions.
type Rest = (NodeStatus, BTreeSet<String>);

struct Keeper {
    client: Client,
    inputs: Inputs,
    labels: BTreeMap<String, String>,
    path: String,
    /// Resource version at which the next watch starts; None for the current state.
    version: Option<String>,
    /// Time of the last write of the status.
    written: Option<Instant>,
    /// Parts of the last write that the server dropped: an older server doesn't know all fields. This
    /// difference alone causes no further write.
    ignored: Option<Rest>,
    /// Last recorded readiness.
    ready: Option<bool>,
    /// Last recorded state of `spec.unschedulable`.
    unschedulable: bool,
    /// True after the event of a reboot.
    rebooted: bool,
    failing: bool,
}

impl Keeper {
    async fn run(mut self) {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(7));
        loop {
            // Write the status at once: earlier writes may have gone to another Node of the same name.
            (self.written, self.version, self.ignored) = (None, None, None);
            let found = self.obtain().await;
            self.record(found.as_ref().err());
            match found {
                Ok(node) => {
                    backoff.reset();
                    // The watch starts at this version and so shows a deletion before its start.
                    self.version.clone_from(&node.metadata.resource_version);
                    self.publish(node);
                    if matches!(self.follow().await, Fate::Deleted) {
                        warn!(node = self.inputs.registration.name, "the Node was deleted");
                        self.inputs.node.send_replace(None);
                    }
                }
                Err(error) => self.client.presence().pause(&mut backoff, &error).await,
            }
        }
    }

    /// Returns the existing Node, or creates it.
    async fn obtain(&mut self) -> Result<Node, Error> {
        match self.client.get(&self.path).await {
            Ok(found) => return read(&self.path, &found),
            Err(error) if error.is_not_found() && self.inputs.register => {}
            Err(error) => return Err(error),
        }
        self.inputs.metrics.startup.attempt();
        let mut node = status::initial(&self.inputs.registration, &self.inputs.arch);
        let change = self.change(&NodeStatus::default());
        self.say_ready(&change);
        node.status = Some(change.status);
        match self.client.create(NODES, &node.to_value()).await {
            Ok(made) => {
                info!(node = self.inputs.registration.name, "registered the Node");
                self.inputs.metrics.startup.registered();
                if self.ready == Some(true) {
                    self.inputs.metrics.startup.ready();
                }
                self.wrote();
                read(&self.path, &made)
            }
            // Another client has just created the Node.
            Err(error) if error.is_conflict() => read(&self.path, &self.client.get(&self.path).await?),
            Err(error) => Err(error),
        }
    }

    /// Writes and watches until the Node is deleted or the watch must restart.
    async fn follow(&mut self) -> Fate {
        let mut due = Instant::now();
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
        loop {
            let seconds = jittered(WATCH).as_secs();
            let name = &self.inputs.registration.name;
            let from = self.version.as_ref().map(|version| format!("&resourceVersion={}", escaped(version)));
            let query = format!(
                "{NODES}?watch=true&allowWatchBookmarks=true&fieldSelector=metadata.name%3D{name}&timeoutSeconds={seconds}{}",
                from.unwrap_or_default()
            );
            let client = self.client.clone();
            let opening = client.watch(&query);
            tokio::pin!(opening);
            // A server that is slow to answer must not delay writes.
            let opened = loop {
                tokio::select! {
                    opened = &mut opening => break opened,
                    () = sleep_until(due) => match self.sync().await {
                        Ok(next) => due = next,
                        Err(fate) => return fate,
                    },
                }
            };
            let mut events = match opened {
                Ok(events) => events,
                // An invalid resource version can't start a watch.
                Err(error) if error.is_expired() || error.kind == Kind::Unaskable => return Fate::Unknown,
                Err(error) => {
                    self.record(Some(&error));
                    // Writes continue: a write may succeed where a watch doesn't.
                    let presence = self.client.presence().clone();
                    let pause = presence.pause(&mut backoff, &error);
                    tokio::pin!(pause);
                    loop {
                        tokio::select! {
                            () = &mut pause => break,
                            () = sleep_until(due) => match self.sync().await {
                                Ok(next) => due = next,
                                Err(fate) => return fate,
                            },
                        }
                    }
                    continue;
                }
            };
            loop {
                tokio::select! {
                    event = events.next() => match event {
                        Some(Ok(Event::Applied(value))) => {
                            backoff.reset();
                            match read(&self.path, &value) {
                                Ok(node) => {
                                    self.version.clone_from(&node.metadata.resource_version);
                                    self.publish(node);
                                    // Another client may have overwritten the agent's fields.
                                    due = due.min(Instant::now() + BREATH);
                                }
                                Err(error) => self.record(Some(&error)),
                            }
                        }
                        Some(Ok(Event::Deleted(_))) => return Fate::Deleted,
                        Some(Ok(Event::Bookmark(version) | Event::Complete(version))) => self.version = Some(version),
                        Some(Err(error)) if error.is_expired() => return Fate::Unknown,
                        Some(Err(_)) | None => break,
                    },
                    () = sleep_until(due) => match self.sync().await {
                        Ok(next) => due = next,
                        Err(fate) => return fate,
                    },
                    Ok(()) = self.inputs.changes.changed() => due = due.min(Instant::now() + BREATH),
                }
            }
            // A server may end each watch at once: wait before the next one.
            sleep(BREATH.min(backoff.next(None))).await;
        }
    }

    /// Compares the Node with the machine, writes the differences, and returns the time of the next check.
    async fn sync(&mut self) -> Result<Instant, Fate> {
        let Some(node) = self.inputs.node.borrow().clone() else { return Err(Fate::Unknown) };
        let change = self.change(node.status.as_ref().unwrap_or(&NodeStatus::default()));
        self.say_schedulable(&node);
        self.say_rebooted(&node, &change);
        let existing = node.metadata.labels.clone().unwrap_or_default();
        let stale = status::stale_labels(&existing, &self.labels);
        let reported = self.written.is_some_and(|at| at.elapsed() < self.inputs.report_every);
        let next = if self.ready == Some(true) { self.inputs.update } else { SOON.min(self.inputs.update) };
        self.say_ready(&change);
        let rest = change.rest();
        let news = change.conditions || (rest.is_some() && rest != self.ignored);
        if !news && stale.is_empty() && reported {
            return Ok(Instant::now().after(next));
        }
        let listed = node.status.as_ref().and_then(|status| status.addresses.as_ref());
        let body = patch(&change, &stale, listed.is_some_and(|addresses| !addresses.is_empty()));
        match self.client.patch(&format!("{}/status", self.path), Patch::StrategicMerge, &body).await {
            Ok(answer) => {
                self.wrote();
                self.record(None);
                match read(&self.path, &answer) {
                    Ok(node) => {
                        self.ignored =
                            self.change(node.status.as_ref().unwrap_or(&NodeStatus::default())).rest();
                        self.publish(node);
                    }
                    Err(error) => self.record(Some(&error)),
                }
                Ok(Instant::now().after(next.max(BREATH)))
            }
            Err(error) if error.is_not_found() => Err(Fate::Deleted),
            Err(error) => {
                self.record(Some(&error));
                let wait = error.retry_after().unwrap_or(BREATH).max(BREATH);
                Ok(Instant::now().after(jittered(wait.min(self.inputs.update))))
            }
        }
    }

    fn change(&self, existing: &NodeStatus) -> Change {
        let mut report = (self.inputs.report)();
        let before: &[NodeAddress] = existing.addresses.as_deref().unwrap_or_default();
        report.addresses = status::addresses(&self.inputs.registration, &self.inputs.host.now(), before);
        status::change(existing, &report, Timestamp::now())
    }

    /// Records an event when the node becomes ready or stops being ready.
    fn say_ready(&mut self, change: &Change) {
        let conditions = change.status.conditions.as_deref().unwrap_or_default();
        let ready =
            conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True");
        if self.ready == Some(ready) {
            return;
        }
        // A node that was never ready gets no NodeNotReady event.
        if ready || self.ready == Some(true) {
            let word = if ready { "NodeReady" } else { "NodeNotReady" };
            let name = &self.inputs.registration.name;
            self.inputs.events.normal(Object::node(name), word, format!("Node {name} status is now: {word}"));
        }
        if ready {
            self.inputs.metrics.startup.ready();
        }
        self.ready = Some(ready);
    }

    /// Records an event when the node is cordoned or uncordoned (`recordNodeSchedulableEvent`).
    fn say_schedulable(&mut self, node: &Node) {
        let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true);
        if std::mem::replace(&mut self.unschedulable, unschedulable) != unschedulable {
            let word = if unschedulable { "NodeNotSchedulable" } else { "NodeSchedulable" };
            let name = &self.inputs.registration.name;
            self.inputs.events.normal(Object::node(name), word, format!("Node {name} status is now: {word}"));
        }
    }

    /// Records one event if the machine has rebooted since the last write of the Node (`MachineInfo` of the
    /// kubelet's setters).
    fn say_rebooted(&mut self, node: &Node, change: &Change) {
        let before = node.status.as_ref().and_then(|status| status.node_info.as_ref());
        let before = before.map(|info| info.boot_id.as_str()).filter(|id| !id.is_empty());
        // A change contains only differences.
        let Some((before, info)) = before.zip(change.status.node_info.as_ref()) else { return };
        if info.boot_id == before || std::mem::replace(&mut self.rebooted, true) {
            return;
        }
        let name = &self.inputs.registration.name;
        let message = format!("Node {name} has been rebooted, boot id: {}", info.boot_id);
        self.inputs.events.warning(Object::node(name), "Rebooted", message);
    }

    /// Publishes the Node unless a newer version is known: an answer and a watch event may arrive in either
    /// order.
    fn publish(&self, node: Node) {
        let number = |node: &Node| node.metadata.resource_version.as_ref()?.parse::<u64>().ok();
        self.inputs.node.send_if_modified(|newest| {
            let older = newest.as_ref().is_some_and(|newest| {
                newest.metadata.uid == node.metadata.uid
                    && matches!((number(newest), number(&node)), (Some(known), Some(got)) if got <= known)
            });
            if !older {
                *newest = Some(Arc::new(node));
            }
            !older
        });
    }

    fn wrote(&mut self) {
        self.written = Some(Instant::now());
        self.inputs.metrics.writes.inc();
        self.inputs.metrics.written.set(Timestamp::now().as_millisecond() as f64 / 1000.0);
    }

    /// Counts each failure, and logs the first failure and the recovery.
    fn record(&mut self, error: Option<&Error>) {
        if let Some(error) = error {
            self.inputs.metrics.failures.inc();
            if !self.failing {
                let hint = if error.is_not_found() {
                    "; `registerNode` is false: create the Node by hand"
                } else {
                    ""
                };
                warn!("cannot update the Node, retrying: {error}{hint}");
            }
        } else if self.failing {
            info!("updating the Node again");
        }
        self.failing = error.is_some();
    }
}

fn read(path: &str, value: &Value) -> Result<Node, Error> {
    let mut node = Node::from_value(value).map_err(|problem| Error::unreachable(path, &problem))?;
    node.metadata.managed_fields = None;
    Ok(node)
}

/// Returns the strategic merge patch for a change. `has_addresses` is true if the Node has addresses now.
fn patch(change: &Change, labels: &BTreeMap<String, String>, has_addresses: bool) -> Value {
    let node = Node { status: Some(change.status.clone()), ..Node::default() };
    let mut status = node.to_value().get_mut("status").map(Value::take).unwrap_or_default();
    for list in ["capacity", "allocatable"] {
        for name in &change.removed {
            status[list][name] = Value::Null;
        }
    }
    // Without the directive, two addresses of one type would be merged (the kubelet's
    // `fixupPatchForNodeStatusAddresses`). If the Node has no list yet, older servers take it for an address.
    let addresses = status.get_mut("addresses").and_then(Value::as_array_mut);
    if let Some(addresses) = addresses.filter(|_| has_addresses) {
        addresses.push(json!({ "$patch": "replace" }));
    }
    let mut body = Map::new();
    if !labels.is_empty() {
        body.insert("metadata".to_owned(), json!({ "labels": labels }));
    }
    body.insert("status".to_owned(), status);
    Value::Object(body)
}

#[cfg(test)]
mod tests;
