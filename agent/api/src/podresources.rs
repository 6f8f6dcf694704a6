//! The pod resources API v1 (KEP-606, KEP-2403, KEP-3695): which pod has which device, for monitors, on the
//! kubelet's socket.
//!
//! Only what is handed out one by one is told: devices. No container has CPUs or memory of its own here, as
//! with the kubelet's default policies.

use std::collections::BTreeMap;
use std::sync::Arc;

use beelet_proto::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    NumaNode, PodResources, TopologyInfo,
    pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer},
};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use beelet_devices::Devices;
use beelet_model::status::has_ended;
use beelet_model::table::{PodEntry, PodName, PodTable};
use beelet_serve::grpc;

/// Serves until `shutdown`. Without the socket monitors see nothing; everything else goes on, and it is said
/// why.
pub async fn serve(devices: Devices, pods: watch::Receiver<Arc<PodTable>>, shutdown: CancellationToken) {
    let socket = devices.settings().pod_resources_socket();
    let listener = match grpc::bind(&socket).await {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!("pod resources are not served: {error:#}");
            return shutdown.cancelled().await;
        }
    };
    let service = PodResourcesListerServer::new(Lister { devices, pods });
    if let Err(error) = grpc::serve_others(listener, Routes::new(service), shutdown).await {
        tracing::error!("pod resources are not served any more: {error:#}");
    }
}

#[derive(Debug)]
struct Lister {
    devices: Devices,
    pods: watch::Receiver<Arc<PodTable>>,
}

/// Ids with the NUMA nodes that each is near.
type Ids = BTreeMap<String, Vec<i64>>;

/// One entry per device, as the kubelet does.
fn container_devices(of_resource: BTreeMap<String, Ids>) -> Vec<ContainerDevices> {
    let all = of_resource.into_iter().flat_map(|(resource, ids)| {
        ids.into_iter().map(move |(id, nodes)| {
            let nodes: Vec<NumaNode> = nodes.into_iter().map(|id| NumaNode { id }).collect();
            ContainerDevices {
                resource_name: resource.clone(),
                device_ids: vec![id],
                topology: (!nodes.is_empty()).then_some(TopologyInfo { nodes }),
            }
        })
    });
    all.collect()
}

/// A pod with all its containers, those without devices too.
fn pod_resources(devices: &Devices, name: &PodName, entry: &PodEntry) -> PodResources {
    let uid = entry.pod.metadata.uid.as_deref().unwrap_or_default();
    let mut held = devices.held_by(uid);
    let spec = entry.pod.spec.as_ref();
    let sidecars = spec.into_iter().flat_map(|s| s.init_containers.iter().flatten());
    let sidecars = sidecars.filter(|c| beelet_policy::pod::is_sidecar(c));
    let all = sidecars.chain(spec.into_iter().flat_map(|s| &s.containers));
    let containers = all.map(|container| ContainerResources {
        name: container.name.clone(),
        devices: container_devices(held.remove(&container.name).unwrap_or_default()),
        ..ContainerResources::default()
    });
    PodResources {
        name: name.name.clone(),
        namespace: name.namespace.clone(),
        containers: containers.collect(),
    }
}

/// Returns true if a pod still has anything: it hasn't ended.
fn is_active(entry: &PodEntry) -> bool {
    !has_ended(entry.pod.status.as_ref())
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _request: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let table = Arc::clone(&self.pods.borrow());
        let devices = self.devices.clone();
        let listed = spawn_blocking(move || {
            let active = table.pods.iter().filter(|(_, entry)| is_active(entry));
            active.map(|(name, entry)| pod_resources(&devices, name, entry)).collect()
        });
        let pod_resources = listed.await.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _request: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let devices = self.devices.clone();
        let listed = spawn_blocking(move || container_devices(devices.allocatable())).await;
        let devices = listed.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(AllocatableResourcesResponse { devices, ..Default::default() }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        let GetPodResourcesRequest { pod_name, pod_namespace } = request.into_inner();
        let name = PodName { namespace: pod_namespace, name: pod_name };
        let table = Arc::clone(&self.pods.borrow());
        let entry = table.pods.get(&name).filter(|entry| is_active(entry));
        let missing =
            || Status::not_found(format!("pod {} in namespace {} not found", name.name, name.namespace));
        let entry = entry.ok_or_else(missing)?;
        let pod_resources = Some(pod_resources(&self.devices, &name, entry));
        Ok(Response::new(GetPodResourcesResponse { pod_resources }))
    }
}
