//! The pods that the API server assigns to this node: desired state, status and deletion.

use std::sync::Arc;

use beelet_base::work::Work;
use beelet_model::{
    desired::Desired,
    request::Request,
    table::{Complete, PodTable},
};
use beelet_state::{State, events::Recorder};
use k8s_openapi::api::core::v1 as core;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    assigned::{self, Assigned, Wanted},
    autonomy::{Memory, Remembered, Settings},
    client::Client,
    held::Held,
    mirrors::Mirrors,
    objects,
    presence::Presence,
    status::Writer,
    status_metrics,
    watch::follow,
};

/// The pods that the API server assigns to this node.
#[derive(Debug)]
pub struct Workload {
    desired: watch::Sender<Arc<Desired>>,
}

/// Inputs of the workload.
pub struct Inputs {
    /// The node's name.
    pub node_name: String,
    /// The watched Node; None until the Node is registered.
    pub node: watch::Receiver<Option<Arc<core::Node>>>,
    /// The pod table.
    pub table: watch::Receiver<Arc<PodTable>>,
    /// Requests to the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// Set once all running pods are in the table.
    pub complete: Complete,
    /// Records events.
    pub events: Recorder,
    /// Writes of pods' statuses.
    pub statuses: status_metrics::Metrics,
    /// Number of mirrors.
    pub mirrors: Gauge,
    /// State folder with the cached objects.
    pub state: Arc<State>,
    /// Settings of the cache.
    pub autonomy: Settings,
    /// Record of the API server's answers.
    pub presence: Presence,
    /// Publishes the newest table whose statuses the API server has completely.
    pub written: watch::Sender<Option<Arc<PodTable>>>,
}

impl std::fmt::Debug for Inputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inputs").field("node_name", &self.node_name).finish_non_exhaustive()
    }
}

impl Workload {
    /// Creates a workload and the receiver of its desired pods, which are unknown at first.
    #[must_use]
    pub fn new() -> (Self, watch::Receiver<Arc<Desired>>) {
        let (desired, receiver) = watch::channel(Arc::new(assigned::desired(&None)));
        (Self { desired }, receiver)
    }

    /// Follows the pods, writes their status and maintains mirrors of static pods as soon as `client` is
    /// ready. Uses the cache of an earlier run until the API server has answered. Ends after `stop` and one
    /// attempt to write the last statuses.
    pub fn run(self, client: Work<Client>, inputs: Inputs, stop: CancellationToken) -> Work {
        Box::pin(async move {
            let memory = Memory::open(inputs.state, inputs.autonomy, inputs.node_name.clone()).await;
            let remembered = memory.load().await;
            let (out, pods) = watch::channel(None);
            let (wanted_out, wanted) = watch::channel(None);
            let (held_out, held) = watch::channel(Held::default());
            let (released_out, released) = watch::channel(None);
            let collection = assigned::collection(&inputs.node_name);
            let known = remembered.as_ref().map_or(0, Remembered::count);
            let outs = (out, wanted_out);
            let mut sink = Assigned::new(inputs.node_name.clone(), outs, inputs.events.clone(), known);
            let before = remembered.as_ref().map(Remembered::held).unwrap_or_default();
            let events = inputs.events.clone();
            let release = async {
                if let Some(remembered) = remembered {
                    memory
                        .release(remembered, inputs.presence, wanted.clone(), released_out, inputs.events)
                        .await;
                }
            };
            let asking = async {
                let Some(client) = stop.run_until_cancelled(client).await else { return };
                let mirrors = Mirrors {
                    client: client.clone(),
                    node_name: inputs.node_name.clone(),
                    node: inputs.node.clone(),
                    table: inputs.table.clone(),
                    pods: pods.clone(),
                    complete: inputs.complete.clone(),
                    count: inputs.mirrors,
                };
                let table = inputs.table.clone();
                let writer =
                    Writer::new(client.clone(), pods.clone(), table, inputs.written, inputs.statuses);
                let following = async {
                    tokio::join!(
                        follow(&client, &collection, &mut sink),
                        objects::keep(client.clone(), wanted.clone(), held_out, events),
                        mirrors.keep(),
                    );
                };
                tokio::join!(stop.run_until_cancelled(following), writer.run(stop.clone()));
            };
            let publishing = self.publish(wanted.clone(), held.clone(), inputs.node.clone(), released);
            tokio::join!(
                asking,
                stop.run_until_cancelled(async { tokio::join!(release, publishing) }),
                memory.keep(before, wanted.clone(), held, inputs.node.clone(), stop.clone()),
            );
        })
    }

    /// Keeps the desired pods current.
    async fn publish(
        &self,
        mut wanted: watch::Receiver<Wanted>,
        mut held: watch::Receiver<Held>,
        mut node: watch::Receiver<Option<Arc<core::Node>>>,
        mut released: watch::Receiver<Option<Arc<Remembered>>>,
    ) {
        loop {
            let assigned = wanted.borrow_and_update().clone();
            let held_now = held.borrow_and_update().clone();
            let node_view = node.borrow_and_update().as_deref().map(assigned::view);
            let remembered = released.borrow_and_update().clone().filter(|_| assigned.is_none());
            let desired = match remembered {
                Some(remembered) => remembered.desired(node_view),
                None => Desired {
                    objects: Arc::new(held_now.objects(&assigned)),
                    node: node_view.map(Arc::new),
                    ..assigned::desired(&assigned)
                },
            };
            self.desired.send_if_modified(|known| {
                let changed = **known != desired;
                if changed {
                    *known = Arc::new(desired);
                }
                changed
            });
            let changed = tokio::select! {
                changed = wanted.changed() => changed,
                changed = held.changed() => changed,
                changed = node.changed() => changed,
                Ok(()) = released.changed() => Ok(()),
            };
            if changed.is_err() {
                return;
            }
        }
    }
}
