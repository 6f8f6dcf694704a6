//! The pod resources API v1 (KEP-606, KEP-2403, KEP-3695): devices by pod, for monitors, on the kubelet's
//! socket.
//!
//! The same socket serves v1alpha1 (devices by pod and container only) for older monitors.
//!
//! The API lists individually assigned resources: devices from plugins and from claims (KEP-3695), and the
//! CPUs and the memory that containers have for themselves.

use std::collections::BTreeMap;
use std::sync::Arc;

use beelet_base::blocking::spawn_blocking;
use beelet_proto::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, CdiDevice, ClaimResource, ContainerDevices,
    ContainerMemory, ContainerResources, DynamicResource, GetPodResourcesRequest, GetPodResourcesResponse,
    ListPodResourcesRequest, ListPodResourcesResponse, NumaNode, PodResources, TopologyInfo,
    pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer},
};
use beelet_proto::podresources_v1alpha1 as v1alpha1;
use prometheus_client::{encoding::EncodeLabelSet, metrics::family::Family, registry::Registry};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use beelet_base::kubelet_counter::KubeletCounter;
use beelet_base::work::Work;
use beelet_devices::Devices;
use beelet_dra::{ClaimView, DeviceView, Dra};
use beelet_model::table::{PodEntry, PodName, PodTable};
use beelet_pinning::{Held, MemoryBlock, Pinning};
use beelet_serve::grpc;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Version {
    server_api_version: &'static str,
}

type Calls = Family<Version, KubeletCounter>;

/// Counters of calls and errors, under the kubelet's names. Clones share the counters.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    all: Calls,
    list: Calls,
    get: Calls,
    get_allocatable: Calls,
    list_errors: Calls,
    get_errors: Calls,
    get_allocatable_errors: Calls,
}

impl Metrics {
    /// Registers all counters.
    pub fn register(&self, registry: &mut Registry) {
        for (what, help, calls) in [
            ("requests_total", "Calls of the pod resources API", &self.all),
            ("requests_list", "List calls of the pod resources API", &self.list),
            ("requests_get", "Get calls of the pod resources API", &self.get),
            (
                "requests_get_allocatable",
                "GetAllocatableResources calls of the pod resources API",
                &self.get_allocatable,
            ),
            ("errors_list", "Failed List calls of the pod resources API", &self.list_errors),
            ("errors_get", "Failed Get calls of the pod resources API", &self.get_errors),
            (
                "errors_get_allocatable",
                "Failed GetAllocatableResources calls of the pod resources API",
                &self.get_allocatable_errors,
            ),
        ] {
            registry.register(format!("kubelet_pod_resources_endpoint_{what}"), help, calls.clone());
        }
    }

    /// Counts a call by its result.
    fn count<T>(
        &self,
        server_api_version: &'static str,
        (calls, errors): (&Calls, &Calls),
        answer: Result<T, Status>,
    ) -> Result<T, Status> {
        let version = Version { server_api_version };
        for counter in [Some(&self.all), Some(calls), answer.is_err().then_some(errors)].into_iter().flatten()
        {
            counter.get_or_create(&version).inc();
        }
        answer
    }
}

/// Serves until `shutdown`. A failure to create the socket is logged and affects only monitors.
pub fn serve(
    handed_out: (Devices, Dra, Pinning),
    pods: watch::Receiver<Arc<PodTable>>,
    metrics: Metrics,
    shutdown: CancellationToken,
) -> Work {
    Box::pin(async move {
        let socket = handed_out.0.settings().pod_resources_socket();
        let listener = match grpc::bind(&socket).await {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!("cannot serve pod resources: {error:#}");
                return shutdown.cancelled().await;
            }
        };
        let lister = Lister { handed_out, pods, metrics };
        let routes =
            Routes::new(v1alpha1::pod_resources_lister_server::PodResourcesListerServer::new(lister.clone()));
        let routes = routes.add_service(PodResourcesListerServer::new(lister));
        if let Err(error) = grpc::serve_others(listener, routes, shutdown).await {
            tracing::error!("the pod resources server failed: {error:#}");
        }
    })
}

#[derive(Clone, Debug)]
struct Lister {
    /// Devices of plugins, devices of claims, CPUs and memory.
    handed_out: (Devices, Dra, Pinning),
    pods: watch::Receiver<Arc<PodTable>>,
    metrics: Metrics,
}

impl Lister {
    async fn listed(&self) -> Result<Vec<PodResources>, Status> {
        let table = Arc::clone(&self.pods.borrow());
        let handed_out = self.handed_out.clone();
        let listed = spawn_blocking(move || {
            let active = table.pods.iter().filter(|(_, entry)| entry.ended().is_none());
            active.map(|(name, entry)| pod_resources(&handed_out, name, entry)).collect()
        });
        listed.await.map_err(|error| Status::internal(error.to_string()))
    }

    async fn allocatable(&self) -> Result<AllocatableResourcesResponse, Status> {
        let (devices, _, pinning) = self.handed_out.clone();
        let listed = spawn_blocking(move || container_devices(devices.view().allocatable())).await;
        let devices = listed.map_err(|error| Status::internal(error.to_string()))?;
        let (cpu_ids, memory) = pinned(pinning.allocatable());
        Ok(AllocatableResourcesResponse { devices, cpu_ids, memory })
    }

    fn found(&self, request: GetPodResourcesRequest) -> Result<GetPodResourcesResponse, Status> {
        let GetPodResourcesRequest { pod_name, pod_namespace } = request;
        let name = PodName { namespace: pod_namespace, name: pod_name };
        let table = Arc::clone(&self.pods.borrow());
        let entry = table.pods.get(&name).filter(|entry| entry.ended().is_none());
        let missing =
            || Status::not_found(format!("pod {} in namespace {} not found", name.name, name.namespace));
        let entry = entry.ok_or_else(missing)?;
        let pod_resources = Some(pod_resources(&self.handed_out, &name, entry));
        Ok(GetPodResourcesResponse { pod_resources })
    }
}

/// NUMA nodes by device ID.
type Ids = BTreeMap<String, Vec<i64>>;

/// Returns one entry per device, as the kubelet does.
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

/// Converts CPUs and memory.
fn pinned(held: Held) -> (Vec<i64>, Vec<ContainerMemory>) {
    let memory = |MemoryBlock { resource, size, nodes }| {
        let nodes = nodes.into_iter().map(|id| NumaNode { id: id.into() }).collect();
        ContainerMemory { memory_type: resource, size, topology: Some(TopologyInfo { nodes }) }
    };
    (held.cpus.into_iter().map(i64::from).collect(), held.memory.into_iter().map(memory).collect())
}

/// Returns a pod with all its containers, including those without devices.
fn pod_resources(
    (devices, dra, pinning): &(Devices, Dra, Pinning),
    name: &PodName,
    entry: &PodEntry,
) -> PodResources {
    let uid = entry.pod.metadata.uid.as_deref().unwrap_or_default();
    let (mut held, mut pins) = (devices.view().held_by(uid), pinning.held_by(uid));
    let spec = entry.pod.spec.as_ref();
    let sidecars = spec.into_iter().flat_map(|s| s.init_containers.iter().flatten());
    let sidecars = sidecars.filter(|c| beelet_policy::pod::is_sidecar(c));
    let all = sidecars.chain(spec.into_iter().flat_map(|s| &s.containers));
    let containers = all.map(|container| {
        let (cpu_ids, memory) = pinned(pins.remove(&container.name).unwrap_or_default());
        ContainerResources {
            name: container.name.clone(),
            devices: container_devices(held.remove(&container.name).unwrap_or_default()),
            cpu_ids,
            memory,
            dynamic_resources: dra
                .claims_of(&entry.pod, container)
                .into_iter()
                .map(dynamic_resource)
                .collect(),
        }
    });
    PodResources {
        name: name.name.clone(),
        namespace: name.namespace.clone(),
        containers: containers.collect(),
    }
}

/// Converts a claim with its devices and their CDI devices.
fn dynamic_resource(claim: ClaimView) -> DynamicResource {
    let resource = |DeviceView { driver, device }| ClaimResource {
        cdi_devices: device.cdi.into_iter().map(|name| CdiDevice { name }).collect(),
        driver_name: driver,
        pool_name: device.pool,
        device_name: device.name,
        share_id: device.share,
    };
    DynamicResource {
        claim_name: claim.name,
        claim_namespace: claim.namespace,
        claim_resources: claim.devices.into_iter().map(resource).collect(),
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _request: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let counters = (&self.metrics.list, &self.metrics.list_errors);
        let pod_resources = self.metrics.count("v1", counters, self.listed().await)?;
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _request: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let counters = (&self.metrics.get_allocatable, &self.metrics.get_allocatable_errors);
        self.metrics.count("v1", counters, self.allocatable().await).map(Response::new)
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        let counters = (&self.metrics.get, &self.metrics.get_errors);
        self.metrics.count("v1", counters, self.found(request.into_inner())).map(Response::new)
    }
}

#[tonic::async_trait]
impl v1alpha1::pod_resources_lister_server::PodResourcesLister for Lister {
    async fn list(
        &self,
        _request: Request<v1alpha1::ListPodResourcesRequest>,
    ) -> Result<Response<v1alpha1::ListPodResourcesResponse>, Status> {
        let counters = (&self.metrics.list, &self.metrics.list_errors);
        let listed = self.metrics.count("v1alpha1", counters, self.listed().await)?;
        let pod_resources = listed.into_iter().map(without_topology).collect();
        Ok(Response::new(v1alpha1::ListPodResourcesResponse { pod_resources }))
    }
}

/// Converts a pod to v1alpha1: devices by container and resource, one entry per device as in v1.
fn without_topology(pod: PodResources) -> v1alpha1::PodResources {
    let devices = |one: ContainerDevices| v1alpha1::ContainerDevices {
        resource_name: one.resource_name,
        device_ids: one.device_ids,
    };
    let container = |one: ContainerResources| v1alpha1::ContainerResources {
        name: one.name,
        devices: one.devices.into_iter().map(devices).collect(),
    };
    v1alpha1::PodResources {
        name: pod.name,
        namespace: pod.namespace,
        containers: pod.containers.into_iter().map(container).collect(),
    }
}
