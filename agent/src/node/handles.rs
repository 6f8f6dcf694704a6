//! The interface of a running node for parts that are built elsewhere (a cluster's).

use std::sync::Arc;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1 as core;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::services::Services;
use beelet_api::grpc::devices::NodeResources;
use beelet_devices::Devices;
use beelet_model::{desired::Desired, pod::HostIps, request::Request, table::PodTable};
use beelet_pinning::Pinning;

/// A part that is built elsewhere, by name.
pub(super) type Attached =
    (&'static str, Box<dyn FnOnce(Handles, CancellationToken) -> BoxFuture<'static, ()> + Send>);

/// Services of a running node for parts that are built elsewhere. Clones share them.
#[derive(Clone)]
pub struct Handles {
    /// Services that exist from the start.
    pub services: Services,
    /// Desired pods of all sources.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// The inbox of the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// The node's own addresses.
    pub host: HostIps,
    /// Capacity and allocatable, without devices.
    pub resources: NodeResources,
    /// The devices of the node.
    pub devices: Devices,
    /// Exclusive CPUs and memory of containers.
    pub pinning: Pinning,
    /// Returns the node's current conditions in the form of a v1.Node's status.
    pub conditions: Arc<dyn Fn() -> Vec<core::NodeCondition> + Send + Sync>,
    /// Hints of a container's exit, in addition to those of the kernel and the runtime.
    pub exits: mpsc::Sender<beelet_pleg::ExitHint>,
    /// Start of the machine's shutdown, if it is shutting down.
    pub shutdown: watch::Receiver<beelet_shutdown::Since>,
    /// The newest table whose statuses the API server has completely, published by the writer of statuses. A
    /// shutdown waits for it. None without a writer.
    pub written: watch::Sender<Option<Arc<PodTable>>>,
}
