//! beelet's own API (`agent/proto/proto/beelet/beelet.proto`) on a unix socket of mode 0600. In addition, the
//! peer of every request must be root or the agent's own user.

pub mod garbage;

use std::sync::Arc;
use std::time::Duration;

use beelet_codec::ApiType as _;
use beelet_proto::beelet as proto;
use beelet_proto::beelet::node_server::{Node, NodeServer};
use beelet_proto::beelet::pod_event::Type;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use beelet_model::table::{Complete, PodChanges, PodEntry, PodName, PodTable, Pods, RejectedManifest};

pub mod containers;
pub mod devices;
pub mod events;
pub mod images;
pub mod manifests;
pub mod probes;
pub mod tuner;

/// Maximum time for a client to wait for the first list from the runtime before it receives partial results.
const FIRST_LOOK: Duration = Duration::from_secs(5);
/// Interval between two checks whether a watcher's pods may be outdated.
const NOTICE_PERIOD: Duration = Duration::from_secs(2);
/// Events queued for one watcher. A slower watcher receives the newest state of each pod once it has caught
/// up.
const WATCH_QUEUE: usize = 16;

/// Trustworthiness of the known pods.
#[derive(Clone)]
pub struct Outlook {
    complete: Complete,
    notice: Arc<dyn Fn() -> Option<String> + Send + Sync>,
}

impl std::fmt::Debug for Outlook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outlook").finish_non_exhaustive()
    }
}

impl Outlook {
    /// Returns an outlook; `notice` returns the reason why pods may be outdated, if any.
    #[must_use]
    pub fn new(complete: Complete, notice: impl Fn() -> Option<String> + Send + Sync + 'static) -> Self {
        Self { complete, notice: Arc::new(notice) }
    }

    /// Waits briefly until all pods are known, unless a notice says that this takes longer.
    async fn settled(&self) {
        if (self.notice)().is_none() {
            let _ = tokio::time::timeout(FIRST_LOOK, self.complete.wait()).await;
        }
    }

    /// Returns the reason why pods may be missing or outdated; empty without one.
    fn notice(&self) -> String {
        let early = "not all running pods have been inspected yet";
        let incomplete = (!self.complete.initialized()).then(|| early.to_owned());
        (self.notice)().or(incomplete).unwrap_or_default()
    }
}

/// Returns the service for pods, which every agent that runs pods offers. Other parts add their services to
/// it.
#[must_use]
pub fn node_service(
    pods: watch::Receiver<Arc<PodTable>>,
    outlook: Outlook,
    shutdown: CancellationToken,
) -> NodeServer<impl Node> {
    NodeServer::new(NodeService { pods, outlook, shutdown })
}

#[derive(Debug)]
struct NodeService {
    pods: watch::Receiver<Arc<PodTable>>,
    outlook: Outlook,
    shutdown: CancellationToken,
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn list_pods(
        &self,
        _request: Request<proto::ListPodsRequest>,
    ) -> Result<Response<proto::ListPodsResponse>, Status> {
        self.outlook.settled().await;
        let notice = self.outlook.notice();
        let table = Arc::clone(&self.pods.borrow());
        if table.pods.is_empty() && !self.outlook.complete.initialized() {
            return Err(Status::unavailable(format!("running pods are not known yet: {notice}")));
        }
        let encode = move || {
            let pods = table.shown().map(|(name, entry)| encode_pod(name, entry)).collect();
            let forced = table.pods.iter().filter(|(_, entry)| entry.abandoned);
            let deleted_by_force = forced.map(|(name, _)| name.to_string()).collect();
            let rejected = encode_rejected(&table.rejected);
            proto::ListPodsResponse { pods, rejected, notice, deleted_by_force }
        };
        let encoded = beelet_base::blocking::spawn_blocking(encode).await;
        encoded.map(Response::new).map_err(|error| Status::internal(error.to_string()))
    }

    type WatchPodsStream = ReceiverStream<Result<proto::PodEvent, Status>>;

    async fn watch_pods(
        &self,
        _request: Request<proto::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let (events, receiver) = mpsc::channel(WATCH_QUEUE);
        let mut watcher = Watcher {
            pods: self.pods.clone(),
            outlook: self.outlook.clone(),
            events,
            sent: Pods::new(),
            rejected: Arc::default(),
            noticed: false,
        };
        let shutdown = self.shutdown.clone();
        tokio::spawn(async move {
            tokio::select! {
                // The watcher ends with the client or the table.
                _ = watcher.run() => {}
                () = shutdown.cancelled() => {
                    let _ = watcher.events.try_send(Err(Status::unavailable("the agent is shutting down")));
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

/// A client's view of the table, and the state to update it.
struct Watcher {
    pods: watch::Receiver<Arc<PodTable>>,
    events: mpsc::Sender<Result<proto::PodEvent, Status>>,
    sent: Pods,
    rejected: Arc<Vec<RejectedManifest>>,
    /// True if the client was notified that its pods may be outdated.
    noticed: bool,
    outlook: Outlook,
}

/// The client disconnected, or the agent is shutting down.
struct Over;

impl Watcher {
    async fn run(&mut self) -> Result<(), Over> {
        self.outlook.settled().await;
        self.catch_up().await?;
        self.send(|_| Some(event(Type::Synced))).await?;
        let mut ticks = tokio::time::interval(NOTICE_PERIOD);
        loop {
            tokio::select! {
                changed = self.pods.changed() => changed.map_err(|_| Over)?,
                () = self.events.closed() => return Err(Over),
                _ = ticks.tick() => {}
            }
            self.catch_up().await?;
            self.send_notice().await?;
        }
    }

    /// Notifies the client when its pods may be outdated, and when they are current again.
    async fn send_notice(&mut self) -> Result<(), Over> {
        let notice = self.outlook.notice();
        if notice.is_empty() == self.noticed {
            self.noticed = !self.noticed;
            self.send(|_| Some(proto::PodEvent { notice, ..event(Type::Notice) })).await?;
        }
        Ok(())
    }

    /// Sends the difference between the client's view and the table. Each pod's state is read when the queue
    /// has room for its event, so that a slow client skips outdated states.
    async fn catch_up(&mut self) -> Result<(), Over> {
        let table = Arc::clone(&self.pods.borrow_and_update());
        let PodChanges { gone, changed } = PodChanges::between(&self.sent, &table.pods);
        let names: Vec<PodName> = gone.into_iter().chain(changed).map(|(name, _)| name.clone()).collect();
        drop(table);
        for name in names {
            self.send(|watcher| watcher.next_of(&name)).await?;
        }
        self.share_with_table();
        self.send(Self::next_rejected).await
    }

    /// Replaces an up-to-date view by the table's own map: the next comparison skips shared parts.
    fn share_with_table(&mut self) {
        let now = self.pods.borrow().pods.clone();
        let PodChanges { gone, changed } = PodChanges::between(&self.sent, &now);
        if gone.is_empty() && changed.is_empty() {
            self.sent = now;
        }
    }

    /// Waits for room in the queue, then sends the event that `next` returns, if any.
    async fn send(&mut self, next: impl FnOnce(&mut Self) -> Option<proto::PodEvent>) -> Result<(), Over> {
        let room = self.events.clone().reserve_owned().await.map_err(|_| Over)?;
        if let Some(event) = next(self) {
            room.send(Ok(event));
        }
        Ok(())
    }

    fn next_of(&mut self, name: &PodName) -> Option<proto::PodEvent> {
        let now = self.pods.borrow().pods.get(name).and_then(PodEntry::shown).cloned();
        let sent = self.sent.get(name).cloned();
        let (kind, entry) = match (now, sent) {
            (Some(now), Some(sent)) if Arc::ptr_eq(&now, &sent) => return None,
            (Some(now), Some(_)) => (Type::Modified, now),
            (Some(now), None) => (Type::Added, now),
            (None, Some(sent)) => (Type::Deleted, sent),
            (None, None) => return None,
        };
        let pod = encode_pod(name, &entry);
        match kind {
            Type::Deleted => self.sent.remove(name),
            _ => self.sent.insert(name.clone(), entry),
        };
        Some(proto::PodEvent { pod: Some(pod), ..event(kind) })
    }

    fn next_rejected(&mut self) -> Option<proto::PodEvent> {
        let now = Arc::clone(&self.pods.borrow().rejected);
        if now == self.rejected {
            return None;
        }
        self.rejected = now;
        Some(proto::PodEvent { rejected: encode_rejected(&self.rejected), ..event(Type::Rejected) })
    }
}

fn event(kind: Type) -> proto::PodEvent {
    proto::PodEvent { r#type: kind.into(), pod: None, rejected: Vec::new(), notice: String::new() }
}

fn encode_pod(name: &PodName, entry: &PodEntry) -> proto::Pod {
    let edge = entry.readiness_edge.as_ref().map(|edge| proto::ReadinessEdge {
        container: edge.container.clone(),
        ready: edge.ready,
        kernel_ns: edge.kernel_ns,
        published_ns: edge.published_ns,
    });
    proto::Pod {
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        uid: entry.pod.metadata.uid.clone().unwrap_or_default(),
        json: entry.pod.to_json(),
        readiness_edge: edge,
    }
}

fn encode_rejected(rejected: &[RejectedManifest]) -> Vec<proto::RejectedManifest> {
    rejected
        .iter()
        .map(|manifest| proto::RejectedManifest {
            file: manifest.file.to_string_lossy().into_owned(),
            message: manifest.message.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests;
