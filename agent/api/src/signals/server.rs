//! The server reads the newest value, never waits for the runtime and changes nothing.

use std::sync::Arc;

use beelet_proto::beelet as proto;
use beelet_proto::beelet::signal_edge::Type;
use beelet_proto::beelet::signals_server::{Signals, SignalsServer};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::convert;
use super::feed::Feed;
use beelet_pinning::PinningReport;
use beelet_stats::Stats;

/// Edges queued for one watcher. A slower watcher is notified of lost edges ([`Feed`] has a longer queue).
const WATCH_QUEUE: usize = 64;

/// Mode of the agent, as in a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The agent runs the pods.
    Run,
    /// A kubelet runs the pods.
    Observe,
}

/// Returns the service, which runs until `shutdown`.
#[must_use]
pub fn service(
    (pressure, pinned, feed): (Stats, watch::Receiver<Arc<PinningReport>>, Feed),
    mode: Mode,
    shutdown: CancellationToken,
) -> SignalsServer<impl Signals> {
    let mode = match mode {
        Mode::Run => "run",
        Mode::Observe => "observe",
    };
    SignalsServer::new(Service { pressure, pinned, feed, mode, shutdown })
}

#[derive(Debug)]
struct Service {
    pressure: Stats,
    pinned: watch::Receiver<Arc<PinningReport>>,
    feed: Feed,
    mode: &'static str,
    shutdown: CancellationToken,
}

#[tonic::async_trait]
impl Signals for Service {
    async fn snapshot(
        &self,
        request: Request<proto::SignalSnapshotRequest>,
    ) -> Result<Response<proto::SignalSnapshot>, Status> {
        let namespace = request.into_inner().namespace;
        let pressure = self.pressure.with_traffic().await;
        if pressure.at_ns == 0 {
            return Err(Status::unavailable(
                "no measurements yet: the agent is waiting for the container runtime",
            ));
        }
        let pinned = Arc::clone(&self.pinned.borrow());
        Ok(Response::new(convert::snapshot((&pressure, &pinned), self.mode, &namespace)))
    }

    type WatchSnapshotsStream = ReceiverStream<Result<proto::SignalSnapshot, Status>>;

    async fn watch_snapshots(
        &self,
        request: Request<proto::SignalSnapshotRequest>,
    ) -> Result<Response<Self::WatchSnapshotsStream>, Status> {
        let namespace = request.into_inner().namespace;
        let mut values = self.pressure.subscribe();
        let (mode, pinned, shutdown) = (self.mode, self.pinned.clone(), self.shutdown.clone());
        // A single queued snapshot: a slower client receives the newest one next.
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let snapshot = tokio::select! {
                    changed = values.changed() => match changed {
                        Ok(()) => Ok(Arc::clone(&values.borrow_and_update())),
                        Err(_) => return,
                    },
                    () = sender.closed() => return,
                    () = shutdown.cancelled() => Err(Status::unavailable("the agent is shutting down")),
                };
                let over = snapshot.is_err();
                let of_pins = Arc::clone(&pinned.borrow());
                let message =
                    snapshot.map(|pressure| convert::snapshot((&pressure, &of_pins), mode, &namespace));
                if sender.send(message).await.is_err() || over {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type WatchStream = ReceiverStream<Result<proto::SignalEdge, Status>>;

    async fn watch(
        &self,
        request: Request<proto::SignalWatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let wanted = request.into_inner();
        let mut edges = self.feed.subscribe();
        let (sender, receiver) = mpsc::channel(WATCH_QUEUE);
        let shutdown = self.shutdown.clone();
        tokio::spawn(async move {
            loop {
                let edge = tokio::select! {
                    edge = edges.recv() => match edge {
                        Ok(edge) if !wants(&wanted, &edge) => continue,
                        Ok(edge) => Ok((*edge).clone()),
                        Err(RecvError::Lagged(_)) => {
                            Ok(proto::SignalEdge { r#type: Type::Lost.into(), ..Default::default() })
                        }
                        Err(RecvError::Closed) => return,
                    },
                    () = sender.closed() => return,
                    () = shutdown.cancelled() => Err(Status::unavailable("the agent is shutting down")),
                };
                let over = edge.is_err();
                if sender.send(edge).await.is_err() || over {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

fn wants(request: &proto::SignalWatchRequest, edge: &proto::SignalEdge) -> bool {
    edge.r#type() == Type::Lost
        || (request.types.is_empty() || request.types.contains(&edge.r#type))
            && (request.namespace.is_empty() || request.namespace == edge.namespace)
}
