//! The agent's pods and their changes.

use std::sync::Arc;

use beelet_proto::beelet as proto;
use beelet_proto::beelet::node_client::NodeClient;
use beelet_proto::beelet::pod_event::Type;
use k8s_openapi::api::core::v1::Pod;
use tonic::Streaming;
use tonic::transport::Channel;

use beelet_codec::ApiType as _;
use beelet_model::table::{PodEntry, PodName, PodTable, ReadinessEdge, RejectedManifest};

use super::ClientError;

/// The agent's pods.
#[derive(Debug, Clone)]
pub struct Pods(pub(super) NodeClient<Channel>);

impl Pods {
    /// Returns all current pods, and the reason why they may be outdated, or an empty text.
    ///
    /// # Errors
    /// The agent stopped, refused, or does not know its pods yet.
    pub async fn list(&mut self) -> Result<(PodTable, String), ClientError> {
        let list = self.0.list_pods(proto::ListPodsRequest {}).await?.into_inner();
        let pods = list.pods.into_iter().map(decode_pod).collect::<Result<_, _>>()?;
        Ok((PodTable { pods, rejected: decode_rejected(list.rejected) }, list.notice))
    }

    /// Returns the force-deleted pods that have not terminated yet, as namespace/name.
    ///
    /// # Errors
    /// As for [`Self::list`].
    pub async fn deleted_by_force(&mut self) -> Result<Vec<String>, ClientError> {
        Ok(self.0.list_pods(proto::ListPodsRequest {}).await?.into_inner().deleted_by_force)
    }

    /// Lists all current pods and then watches for changes.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn watch(&mut self) -> Result<Watch, ClientError> {
        Ok(Watch { events: self.0.watch_pods(proto::WatchPodsRequest {}).await?.into_inner() })
    }
}

/// A change of the agent's pods.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A pod was added.
    Added(PodName, Arc<PodEntry>),
    /// A pod changed, or was replaced by another pod of the same name.
    Modified(PodName, Arc<PodEntry>),
    /// A pod was removed. The entry has its last state.
    Deleted(PodName, Arc<PodEntry>),
    /// The initial list is complete.
    Synced,
    /// The complete list of manifests that cannot become pods.
    Rejected(Arc<Vec<RejectedManifest>>),
    /// Reason why the reported pods may be outdated; empty once they are current again.
    Notice(String),
}

/// A stream of changes.
#[derive(Debug)]
pub struct Watch {
    events: Streaming<proto::PodEvent>,
}

impl Watch {
    /// Returns the next change, or None once the agent has closed the stream. Cancel safe.
    ///
    /// # Errors
    /// The agent stopped, or sent a malformed pod.
    pub async fn next(&mut self) -> Result<Option<Event>, ClientError> {
        while let Some(event) = self.events.message().await? {
            let kind = event.r#type();
            let pod = event.pod.map(decode_pod).transpose()?;
            match (kind, pod) {
                (Type::Added, Some((name, entry))) => return Ok(Some(Event::Added(name, entry))),
                (Type::Modified, Some((name, entry))) => return Ok(Some(Event::Modified(name, entry))),
                (Type::Deleted, Some((name, entry))) => return Ok(Some(Event::Deleted(name, entry))),
                (Type::Synced, _) => return Ok(Some(Event::Synced)),
                (Type::Notice, _) => return Ok(Some(Event::Notice(event.notice))),
                (Type::Rejected, _) => return Ok(Some(Event::Rejected(decode_rejected(event.rejected)))),
                // A newer agent may send unknown events.
                _ => {}
            }
        }
        Ok(None)
    }
}

impl Event {
    /// Applies this event to `table`.
    pub fn apply(&self, table: &mut PodTable) {
        match self {
            Self::Added(name, entry) | Self::Modified(name, entry) => {
                table.pods.insert(name.clone(), Arc::clone(entry));
            }
            Self::Deleted(name, _) => {
                table.pods.remove(name);
            }
            Self::Rejected(rejected) => table.rejected = Arc::clone(rejected),
            Self::Synced | Self::Notice(_) => {}
        }
    }
}

fn decode_pod(pod: proto::Pod) -> Result<(PodName, Arc<PodEntry>), ClientError> {
    let name = PodName { namespace: pod.namespace, name: pod.name };
    let readiness_edge = pod.readiness_edge.map(|edge| ReadinessEdge {
        container: edge.container,
        ready: edge.ready,
        kernel_ns: edge.kernel_ns,
        published_ns: edge.published_ns,
    });
    // The namespace's path is private to the agent and not sent.
    let entry = PodEntry {
        readiness_edge,
        ..PodEntry::of(Pod::from_json(&pod.json).map_err(ClientError::Malformed)?)
    };
    Ok((name, Arc::new(entry)))
}

fn decode_rejected(rejected: Vec<proto::RejectedManifest>) -> Arc<Vec<RejectedManifest>> {
    let decode = |manifest: proto::RejectedManifest| RejectedManifest {
        file: manifest.file.into(),
        message: manifest.message,
    };
    Arc::new(rejected.into_iter().map(decode).collect())
}
