//! Services that all workers share, each created once from a part of [`Deps`].

use std::{sync::Arc, time::Duration};

use beelet_admission::Admission;
use beelet_cri::Runtime;
use beelet_devices::Devices;
use beelet_model::pod::NodeFacts;
use beelet_pinning::Pinning;

use crate::{
    call_queue::CallQueue,
    container::Containers,
    container_images::ImagePulls,
    deps::{Deps, PodDeps, Reports},
    plan::Planner,
    pod_users::PodUsers,
    resource_claims::ResourceClaims,
    sandbox::Sandboxes,
    teardown::Teardown,
};

/// Services of all workers.
#[derive(Debug)]
pub(crate) struct Services {
    pub(crate) planner: Planner,
    pub(crate) observations: Arc<ObservationServices>,
    pub(crate) starts: Arc<StartServices>,
    pub(crate) stops: Arc<StopServices>,
    pub(crate) ends: Arc<EndServices>,
    pub(crate) reports: Reports,
}

/// Services for the observation of a pod.
#[derive(Debug)]
pub(crate) struct ObservationServices {
    pub(crate) runtime: Runtime,
    pub(crate) calls: CallQueue,
    pub(crate) max_restart_delay: Duration,
}

/// Services for the start of sandboxes and containers.
#[derive(Debug)]
pub(crate) struct StartServices {
    pub(crate) sandboxes: Sandboxes,
    pub(crate) containers: Containers,
    pub(crate) admission: Arc<Admission>,
    pub(crate) devices: Devices,
    pub(crate) pinning: Pinning,
    pub(crate) pods: PodDeps,
    pub(crate) node: NodeFacts,
    pub(crate) reports: Reports,
}

/// Services for the stop of sandboxes and containers.
#[derive(Debug)]
pub(crate) struct StopServices {
    pub(crate) runtime: Runtime,
    pub(crate) reports: Reports,
}

/// Services for the termination of a pod.
#[derive(Debug)]
pub(crate) struct EndServices {
    pub(crate) teardown: Teardown,
    pub(crate) claims: ResourceClaims,
    pub(crate) reports: Reports,
}

impl Services {
    /// Creates the services of a node.
    pub(crate) fn new(deps: &Deps) -> Self {
        let Deps { runtime, node, images, devices, pinning, volumes, admission, pods, reports } = deps;
        let (calls, cri) = (CallQueue::default(), runtime.cri.clone());
        let users = PodUsers { runtime: cri.clone(), users: Arc::clone(&runtime.users) };
        let claims = ResourceClaims {
            dra: devices.claims.clone(),
            storage: devices.storage.clone(),
            table: pods.table.clone(),
            events: reports.events.clone(),
        };
        let sandboxes = Sandboxes {
            runtime: runtime.clone(),
            node: node.clone(),
            pods: pods.clone(),
            volumes: volumes.clone(),
            users: users.clone(),
            claims: claims.clone(),
            calls: calls.clone(),
            reports: reports.clone(),
        };
        let pulls = ImagePulls { runtime: cri.clone(), images: images.clone(), reports: reports.clone() };
        let containers = Containers {
            runtime: runtime.clone(),
            node: node.clone(),
            pods: pods.clone(),
            images: pulls,
            devices: devices.clone(),
            pinning: pinning.clone(),
            volumes: volumes.clone(),
            users: users.clone(),
            calls: calls.clone(),
            reports: reports.clone(),
        };
        let teardown = Teardown {
            volumes: volumes.clone(),
            cgroups: Arc::clone(&node.cgroups),
            devices: devices.plugins.clone(),
            users,
        };
        Self {
            planner: Planner { node: node.clone(), volumes: volumes.clone() },
            observations: Arc::new(ObservationServices {
                runtime: cri.clone(),
                calls,
                max_restart_delay: runtime.max_restart_delay,
            }),
            starts: Arc::new(StartServices {
                sandboxes,
                containers,
                admission: Arc::clone(admission),
                devices: devices.plugins.clone(),
                pinning: pinning.clone(),
                pods: pods.clone(),
                node: node.facts.clone(),
                reports: reports.clone(),
            }),
            stops: Arc::new(StopServices { runtime: cri, reports: reports.clone() }),
            ends: Arc::new(EndServices { teardown, claims, reports: reports.clone() }),
            reports: reports.clone(),
        }
    }
}
