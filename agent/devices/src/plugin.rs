//! Client of a plugin: every call has a deadline and every response a size limit.

use std::{collections::BTreeSet, time::Duration};

use beelet_policy::devices::{Device, Health, PluginOptions, Question};
use beelet_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreferredAllocationRequest, device_plugin_client::DevicePluginClient,
};
use prost::Message as _;
use tonic::{Code, Status, Streaming, transport::Channel};

/// Deadline for connecting and for options: the kubelet's dial timeout.
pub(super) const CONNECT_TIMEOUT: Duration = beelet_serve::client::CONNECT_TIMEOUT;
/// Deadline for choosing and for preparing devices. The kubelet waits forever, and all pods with it.
pub(super) const ALLOCATE_TIMEOUT: Duration = Duration::from_secs(60);
/// Deadline for a call before a container's start: the kubelet's.
const PRE_START_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a device list: about 100,000 devices.
const MAX_LIST: usize = 16 << 20;
/// Maximum size of other responses.
const MAX_ANSWER: usize = 1 << 20;
/// Maximum number of devices per resource. Longer lists are refused.
pub(super) const MAX_DEVICES: usize = 1 << 17;
/// Maximum number of NUMA nodes per device. Further ones are ignored.
const MAX_NODES: usize = 64;

/// Connection to a plugin; clones share it.
#[derive(Clone, Debug)]
pub(super) struct Plugin {
    client: DevicePluginClient<Channel>,
}

impl Plugin {
    pub(super) fn new(channel: Channel) -> Self {
        Self { client: DevicePluginClient::new(channel).max_decoding_message_size(MAX_LIST) }
    }

    fn small(&self) -> DevicePluginClient<Channel> {
        self.client.clone().max_decoding_message_size(MAX_ANSWER)
    }

    /// Returns the plugin's options; those of its registration if it does not implement the call.
    pub(super) async fn options(
        &self,
        registered: Option<DevicePluginOptions>,
    ) -> Result<PluginOptions, Status> {
        let mut client = self.small();
        let asked = within(CONNECT_TIMEOUT, client.get_device_plugin_options(Empty {})).await;
        let options = match asked {
            Err(status) if status.code() == Code::Unimplemented => registered.unwrap_or_default(),
            asked => asked?,
        };
        Ok(PluginOptions {
            pre_start_required: options.pre_start_required,
            get_preferred_allocation_available: options.get_preferred_allocation_available,
        })
    }

    /// Streams the plugin's devices, once per change.
    pub(super) async fn list_and_watch(&self) -> Result<Streaming<ListAndWatchResponse>, Status> {
        // No deadline: many servers are silent until they have a first list.
        self.client.clone().list_and_watch(Empty {}).await.map(tonic::Response::into_inner)
    }

    /// Returns the devices that the plugin prefers to allocate, best first.
    pub(super) async fn preferred(&self, question: &Question) -> Result<Vec<String>, Status> {
        let request = ContainerPreferredAllocationRequest {
            available_device_i_ds: question.available.iter().cloned().collect(),
            must_include_device_i_ds: question.must_include.iter().cloned().collect(),
            allocation_size: i32::try_from(question.size).unwrap_or(i32::MAX),
        };
        let mut client = self.small();
        let request = PreferredAllocationRequest { container_requests: vec![request] };
        let answer = within(ALLOCATE_TIMEOUT, client.get_preferred_allocation(request)).await?;
        Ok(answer.container_responses.into_iter().next().map(|first| first.device_i_ds).unwrap_or_default())
    }

    /// Allocates devices for a container; returns the encoded response for it.
    pub(super) async fn allocate(&self, ids: &BTreeSet<String>) -> Result<Vec<u8>, Status> {
        let request = ContainerAllocateRequest { devices_ids: ids.iter().cloned().collect() };
        let request = AllocateRequest { container_requests: vec![request] };
        let mut client = self.small();
        let answer = within(ALLOCATE_TIMEOUT, client.allocate(request)).await?;
        let first: Option<ContainerAllocateResponse> = answer.container_responses.into_iter().next();
        let first = first.ok_or_else(|| Status::internal("no containers return in allocation response"))?;
        Ok(first.encode_to_vec())
    }

    /// Prepares these devices for the start of a container.
    pub(super) async fn pre_start(&self, ids: BTreeSet<String>) -> Result<(), Status> {
        let request = PreStartContainerRequest { devices_ids: ids.into_iter().collect() };
        let mut client = self.small();
        within(PRE_START_TIMEOUT, client.pre_start_container(request)).await.map(drop)
    }
}

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => {
            Err(Status::deadline_exceeded(format!("the plugin did not answer within {} s", limit.as_secs())))
        }
    }
}

/// Converts a plugin's list for the ledger. Any health other than "Healthy" is unhealthy.
pub fn devices(list: ListAndWatchResponse) -> impl Iterator<Item = Device> {
    list.devices.into_iter().map(|device| Device {
        id: device.id,
        health: if device.health == "Healthy" { Health::Healthy } else { Health::Unhealthy },
        numa_nodes: device
            .topology
            .map(|topology| topology.nodes.into_iter().take(MAX_NODES).map(|node| node.id).collect())
            .unwrap_or_default(),
    })
}

/// Formats a failed call in the form of Go, which kubelet users know.
pub(super) fn in_words(status: &Status) -> String {
    format!("rpc error: code = {:?} desc = {}", status.code(), status.message())
}
