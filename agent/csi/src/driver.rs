//! Client of a driver: each call has a deadline, each answer a maximum size, and the number of concurrent
//! calls is limited.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use beelet_policy::volumes::csi::DriverNode;
use beelet_proto::csi::{
    NodeExpandVolumeRequest, NodeGetCapabilitiesRequest, NodeGetInfoRequest, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest,
    node_client::NodeClient,
    node_service_capability::{Type, rpc},
};
use tokio::sync::{OnceCell, Semaphore};
use tonic::{Code, Response, Status, transport::Channel};

use crate::{Error, Metrics};

/// Time limit for each call: the kubelet's.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum size of an answer in bytes.
const MAX_ANSWER: usize = 1 << 20;
/// Maximum number of concurrent calls per driver.
const CALLS: usize = 32;
/// Maximum number of characters kept of a driver's message.
const WORDS: usize = 1024;

/// A registered driver. Clones share the connection.
#[derive(Clone, Debug)]
pub(crate) struct Driver {
    name: String,
    socket: PathBuf,
    client: NodeClient<Channel>,
    calls: Arc<Semaphore>,
    abilities: Arc<OnceCell<Abilities>>,
    metrics: Metrics,
}

/// Capabilities of a driver on a node that the agent uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Abilities {
    /// The driver stages volumes once per node.
    pub(crate) stages: bool,
    /// The driver changes the group of volumes itself.
    pub(crate) gives_to_group: bool,
    /// The driver distinguishes volumes for one pod from volumes for one node.
    pub(crate) knows_single_pods: bool,
    /// The driver reports the capacity and use of volumes.
    pub(crate) measures: bool,
    /// The driver reports abnormal conditions of volumes.
    pub(crate) says_condition: bool,
    /// The driver expands volumes on the node.
    pub(crate) expands: bool,
}

impl Driver {
    /// Connects to a driver.
    ///
    /// # Errors
    /// The socket does not accept the connection.
    pub(crate) async fn dial(name: &str, socket: &Path, metrics: Metrics) -> Result<Self, Error> {
        let channel = beelet_serve::client::dial(socket).await;
        let channel = channel.map_err(|error| Error::Unmet(error.to_string()))?;
        Ok(Self {
            name: name.to_owned(),
            socket: socket.to_owned(),
            client: NodeClient::new(channel).max_decoding_message_size(MAX_ANSWER),
            calls: Arc::new(Semaphore::new(CALLS)),
            abilities: Arc::default(),
            metrics,
        })
    }

    /// Returns the path of the driver's socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Reads the driver's facts about this node.
    pub(crate) async fn node(&self) -> Result<DriverNode, Error> {
        let mut client = self.client.clone();
        let info = self.call("NodeGetInfo", client.node_get_info(NodeGetInfoRequest {})).await?;
        let topology = info.accessible_topology.map(|topology| topology.segments).unwrap_or_default();
        Ok(DriverNode {
            node_id: info.node_id,
            max_volumes: info.max_volumes_per_node,
            topology: topology.into_iter().collect(),
        })
    }

    /// Returns the driver's capabilities, which are read once.
    pub(crate) async fn abilities(&self) -> Result<Abilities, Error> {
        let ask = || async {
            let mut client = self.client.clone();
            let asked = client.node_get_capabilities(NodeGetCapabilitiesRequest {});
            let answer = self.call("NodeGetCapabilities", asked).await?;
            let mut found = Abilities::default();
            for capability in answer.capabilities {
                let Some(Type::Rpc(one)) = capability.r#type else { continue };
                match one.r#type() {
                    rpc::Type::StageUnstageVolume => found.stages = true,
                    rpc::Type::VolumeMountGroup => found.gives_to_group = true,
                    rpc::Type::SingleNodeMultiWriter => found.knows_single_pods = true,
                    rpc::Type::GetVolumeStats => found.measures = true,
                    rpc::Type::VolumeCondition => found.says_condition = true,
                    rpc::Type::ExpandVolume => found.expands = true,
                    _ => {}
                }
            }
            Ok(found)
        };
        self.abilities.get_or_try_init(ask).await.copied()
    }

    pub(crate) async fn stage(&self, request: NodeStageVolumeRequest) -> Result<(), Error> {
        let mut client = self.client.clone();
        self.call("NodeStageVolume", client.node_stage_volume(request)).await.map(drop)
    }

    pub(crate) async fn publish(&self, request: NodePublishVolumeRequest) -> Result<(), Error> {
        let mut client = self.client.clone();
        self.call("NodePublishVolume", client.node_publish_volume(request)).await.map(drop)
    }

    pub(crate) async fn unpublish(&self, request: NodeUnpublishVolumeRequest) -> Result<(), Error> {
        let mut client = self.client.clone();
        self.call("NodeUnpublishVolume", client.node_unpublish_volume(request)).await.map(drop)
    }

    pub(crate) async fn unstage(&self, request: NodeUnstageVolumeRequest) -> Result<(), Error> {
        let mut client = self.client.clone();
        self.call("NodeUnstageVolume", client.node_unstage_volume(request)).await.map(drop)
    }

    pub(crate) async fn expand(&self, request: NodeExpandVolumeRequest) -> Result<(), Error> {
        let mut client = self.client.clone();
        self.call("NodeExpandVolume", client.node_expand_volume(request)).await.map(drop)
    }

    pub(crate) async fn volume_stats(
        &self,
        request: NodeGetVolumeStatsRequest,
    ) -> Result<NodeGetVolumeStatsResponse, Error> {
        let mut client = self.client.clone();
        self.call("NodeGetVolumeStats", client.node_get_volume_stats(request)).await
    }

    async fn call<T>(
        &self,
        method: &str,
        asking: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Error> {
        let began = Instant::now();
        let whole = async {
            // The semaphore is never closed.
            let _turn = self.calls.acquire().await;
            asking.await
        };
        let answer = tokio::time::timeout(TIMEOUT, whole).await;
        let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("the driver did not answer")));
        let code = answer.as_ref().map_or_else(Status::code, |_| Code::Ok);
        self.metrics.called(&self.name, method, code, began.elapsed());
        answer.map(Response::into_inner).map_err(|status| {
            let message = status.message().chars().take(WORDS).collect();
            Error::Driver { code: status.code(), message }
        })
    }
}
