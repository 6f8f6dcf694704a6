//! The node's devices and capacity for clients.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use beelet_base::blocking::spawn_blocking;
use beelet_proto::beelet as proto;
use beelet_proto::beelet::devices_server::{Devices as Service, DevicesServer};
use k8s_openapi::api::core::v1 as core;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use beelet_devices::{Devices, Holder, ResourceView};
use beelet_model::table::PodTable;

/// Resources of the node other than devices, as Kubernetes quantities by resource.
#[derive(Debug, Clone, Default)]
pub struct NodeResources {
    /// Name of the node.
    pub name: String,
    /// Total amounts.
    pub capacity: BTreeMap<String, String>,
    /// Amounts available to pods.
    pub allocatable: BTreeMap<String, String>,
}

/// Facts about the node, available once the runtime answers.
pub struct Known {
    /// Devices and the containers that hold them.
    pub devices: Devices,
    /// Resources other than devices.
    pub resources: NodeResources,
    /// Returns the current conditions of the node, as in the status of a v1.Node.
    pub conditions: Arc<dyn Fn() -> Vec<core::NodeCondition> + Send + Sync>,
}

/// Filled once the runtime answers, later than the start of the API.
pub type Slot = Arc<OnceLock<Known>>;

/// Returns the service.
#[must_use]
pub fn service(devices: Slot, pods: watch::Receiver<Arc<PodTable>>) -> DevicesServer<impl Service + use<>> {
    DevicesServer::new(DevicesService { devices, pods })
}

struct DevicesService {
    devices: Slot,
    pods: watch::Receiver<Arc<PodTable>>,
}

impl DevicesService {
    #[allow(clippy::result_large_err)] // tonic's own error type
    fn known(&self) -> Result<&Known, Status> {
        let waiting = || Status::unavailable("the agent is still waiting for the container runtime");
        self.devices.get().ok_or_else(waiting)
    }
}

#[tonic::async_trait]
impl Service for DevicesService {
    async fn list_devices(
        &self,
        _request: Request<proto::ListDevicesRequest>,
    ) -> Result<Response<proto::ListDevicesResponse>, Status> {
        let devices = self.known()?.devices.clone();
        let pods = Arc::clone(&self.pods.borrow());
        // 100,000 devices take some time.
        let encoded = spawn_blocking(move || encode(&devices, &pods)).await;
        encoded.map(Response::new).map_err(|error| Status::internal(error.to_string()))
    }

    async fn get_node(
        &self,
        _request: Request<proto::GetNodeRequest>,
    ) -> Result<Response<proto::GetNodeResponse>, Status> {
        let Known { devices, resources: node, conditions } = self.known()?;
        let known = Arc::clone(&devices.node().borrow());
        let with = |own: &BTreeMap<String, String>, devices: &BTreeMap<String, usize>| {
            let devices = devices.iter().map(|(name, count)| (name.clone(), count.to_string()));
            own.clone().into_iter().chain(devices).collect()
        };
        Ok(Response::new(proto::GetNodeResponse {
            name: node.name.clone(),
            capacity: with(&node.capacity, &known.capacity),
            allocatable: with(&node.allocatable, &known.allocatable),
            conditions: conditions().into_iter().map(condition).collect(),
        }))
    }
}

fn condition(condition: core::NodeCondition) -> proto::NodeCondition {
    let since = condition.last_transition_time.map_or(0, |time| time.0.as_nanosecond());
    proto::NodeCondition {
        r#type: condition.type_,
        status: condition.status == "True",
        reason: condition.reason.unwrap_or_default(),
        message: condition.message.unwrap_or_default(),
        since_ns: i64::try_from(since).unwrap_or_default(),
    }
}

fn encode(devices: &Devices, pods: &PodTable) -> proto::ListDevicesResponse {
    let names: BTreeMap<&str, (&str, &str)> = pods
        .pods
        .iter()
        .filter_map(|(name, entry)| {
            Some((entry.pod.metadata.uid.as_deref()?, (name.namespace.as_str(), name.name.as_str())))
        })
        .collect();
    let waiting = devices.view().waiting().into_iter().map(|waiting| {
        let (namespace, pod) = waiting.pod.split_once('/').unwrap_or(("", &waiting.pod));
        proto::WaitingPod {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            message: waiting.message,
            seconds: waiting.seconds,
        }
    });
    let resources = devices.view().resources().into_iter().map(|(name, view)| resource(name, view, &names));
    proto::ListDevicesResponse {
        resources: resources.collect(),
        waiting: waiting.collect(),
        trouble: devices.view().trouble().unwrap_or_default(),
    }
}

fn resource(name: String, view: ResourceView, pods: &BTreeMap<&str, (&str, &str)>) -> proto::DeviceResource {
    let holder = |holder: Holder| {
        let (namespace, pod) = pods.get(holder.pod_uid.as_str()).copied().unwrap_or_default();
        let (namespace, pod) = (namespace.to_owned(), pod.to_owned());
        proto::Holder { pod_uid: holder.pod_uid, namespace, pod, container: holder.container }
    };
    let devices = view.devices.into_iter().map(|(id, device)| proto::Device {
        id,
        healthy: device.healthy,
        numa_nodes: device.numa_nodes,
        holders: device.holders.into_iter().map(holder).collect(),
        unlisted: device.unlisted,
    });
    proto::DeviceResource {
        name,
        connected: view.connected,
        socket: view.socket.unwrap_or_default(),
        devices: devices.collect(),
        gone_seconds: view.gone_seconds,
    }
}
