//! One plugin, as its client sees it: every call has a deadline, every answer a largest size.

use std::{collections::BTreeSet, time::Duration};

use beelet_policy::devices::{Device, Health, PluginOptions, Question};
use beelet_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreferredAllocationRequest, device_plugin_client::DevicePluginClient,
};
use prost::Message as _;
use tonic::{Code, Status, Streaming, transport::Channel};

/// Time that a plugin gets to take a connection and to say what it can do: the kubelet's time for dialling.
pub(super) const CONNECT_TIMEOUT: Duration = beelet_serve::client::CONNECT_TIMEOUT;
/// Time that it gets to choose devices, and to prepare them. The kubelet waits for ever, and all pods with
/// it.
pub(super) const ALLOCATE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time that it gets before a container is started: the kubelet's.
const PRE_START_TIMEOUT: Duration = Duration::from_secs(30);
/// The largest list of devices: some 100,000 of them.
const MAX_LIST: usize = 16 << 20;
/// The largest answer to anything else.
const MAX_ANSWER: usize = 1 << 20;
/// More devices than this of one resource aren't taken in.
pub(super) const MAX_DEVICES: usize = 1 << 17;
/// More NUMA nodes of a device aren't looked at.
const MAX_NODES: usize = 64;

/// A connection to a plugin; clones share it.
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

    /// What it can do. One that doesn't implement the question has said so when it registered.
    pub(super) async fn options(&self, said: Option<DevicePluginOptions>) -> Result<PluginOptions, Status> {
        let mut client = self.small();
        let asked = within(CONNECT_TIMEOUT, client.get_device_plugin_options(Empty {})).await;
        let options = match asked {
            Err(status) if status.code() == Code::Unimplemented => said.unwrap_or_default(),
            asked => asked?,
        };
        Ok(PluginOptions {
            pre_start_required: options.pre_start_required,
            get_preferred_allocation_available: options.get_preferred_allocation_available,
        })
    }

    /// Its devices, each time they change.
    pub(super) async fn list_and_watch(&self) -> Result<Streaming<ListAndWatchResponse>, Status> {
        // No deadline: many servers say nothing at all before they have a first list.
        self.client.clone().list_and_watch(Empty {}).await.map(tonic::Response::into_inner)
    }

    /// The devices that the plugin prefers to give, best first.
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

    /// Has devices prepared for a container; the encoded answer for it.
    pub(super) async fn allocate(&self, ids: &BTreeSet<String>) -> Result<Vec<u8>, Status> {
        let request = ContainerAllocateRequest { devices_ids: ids.iter().cloned().collect() };
        let request = AllocateRequest { container_requests: vec![request] };
        let mut client = self.small();
        let answer = within(ALLOCATE_TIMEOUT, client.allocate(request)).await?;
        let first: Option<ContainerAllocateResponse> = answer.container_responses.into_iter().next();
        let first = first.ok_or_else(|| Status::internal("no containers return in allocation response"))?;
        Ok(first.encode_to_vec())
    }

    /// A container with these devices is about to start.
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
        Err(_) => Err(Status::deadline_exceeded(format!("it gave no answer within {} s", limit.as_secs()))),
    }
}

/// A plugin's list as the ledger takes it. Anything but "Healthy" is unhealthy.
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

/// A failed call in words, as the kubelet's (Go's) users know it.
pub(super) fn in_words(status: &Status) -> String {
    format!("rpc error: code = {:?} desc = {}", status.code(), status.message())
}
