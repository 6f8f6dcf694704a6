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

/// A part that is built elsewhere, by name.
pub(super) type Attached =
    (&'static str, Box<dyn FnOnce(Handles, CancellationToken) -> BoxFuture<'static, ()> + Send>);

/// Services of a running node for parts that are built elsewhere. Clones share them.
#[derive(Clone)]
pub struct Handles {
    /// Services that exist from the start.
    pub services: Services,
    /// Desired pods, of all sources together.
    pub desired: watch::Receiver<Arc<Desired>>,
    /// The inbox of the pods' manager.
    pub requests: mpsc::Sender<Request>,
    /// The node's own addresses.
    pub host: HostIps,
    /// Capacity and allocatable, without devices.
    pub resources: NodeResources,
    /// The devices of the node.
    pub devices: Devices,
    /// The node's present conditions, as a v1.Node's status has them.
    pub conditions: Arc<dyn Fn() -> Vec<core::NodeCondition> + Send + Sync>,
    /// Signs that a container may have ended, beside the kernel's and the runtime's.
    pub exits: mpsc::Sender<beelet_pleg::ExitHint>,
    /// The time since when the machine has been going down, if it is.
    pub shutdown: watch::Receiver<beelet_shutdown::Since>,
    /// The newest table of which all statuses are written elsewhere, published by the part that writes them:
    /// a shutdown waits for it. None: no part writes any.
    pub written: watch::Sender<Option<Arc<PodTable>>>,
}
