//! Client of the agent's gRPC socket, for the command line, the demo and the tests.

pub mod signals;

use std::error::Error as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use beelet_proto::beelet as proto;
use beelet_proto::beelet::containers_client::ContainersClient;
use beelet_proto::beelet::devices_client::DevicesClient;
use beelet_proto::beelet::events_client::EventsClient;
use beelet_proto::beelet::garbage_client::GarbageClient;
use beelet_proto::beelet::images_client::ImagesClient;
use beelet_proto::beelet::manifests_client::ManifestsClient;
use beelet_proto::beelet::node_client::NodeClient;
use beelet_proto::beelet::pod_event::Type;
use beelet_proto::beelet::probes_client::ProbesClient;
use beelet_proto::beelet::tuner_client::TunerClient;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use beelet_codec::{ApiType as _, JsonError};
use beelet_model::table::{PodEntry, PodName, PodTable, ReadinessEdge, RejectedManifest};

/// Maximum size of a message, larger than any list of a node's pods.
pub const MAX_MESSAGE: usize = 256 << 20;

/// Keep-alive interval of a silent connection, and the maximum time for its answer. Calls have no deadline of
/// their own, because the agent limits its calls to the runtime.
const ASKED: Duration = Duration::from_secs(5);
const ANSWERS: Duration = Duration::from_secs(10);

/// A connection to a running agent.
#[derive(Debug, Clone)]
pub struct Client {
    node: NodeClient<Channel>,
    events: EventsClient<Channel>,
    devices: DevicesClient<Channel>,
    garbage: GarbageClient<Channel>,
    images: ImagesClient<Channel>,
    tuner: TunerClient<Channel>,
    containers: ContainersClient<Channel>,
    manifests: ManifestsClient<Channel>,
    probes: ProbesClient<Channel>,
}

/// Reason why the agent gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens on the socket.
    #[error(
        "no agent answers at {}: {}; is `beelet run` up? Set `--socket` or `BEELET_SOCKET` if its `runDir` is \
         not the default",
        .path.display(), .error
    )]
    NotRunning {
        /// The socket.
        path: PathBuf,
        /// Error of the connection. The text contains it, so it is not a source, which would be printed
        /// again.
        error: io::Error,
    },
    /// This user may not connect.
    #[error("permission denied for the agent's socket {}: run the command as root", .0.display())]
    Denied(PathBuf),
    /// The agent returned an error.
    #[error("the agent: {}", .0.message())]
    Status(Box<Status>),
    /// The connection ended before the answer.
    #[error(
        "the agent stopped or was restarted before it answered: run the command again (`journalctl -u beelet` has the log)"
    )]
    Gone,
    /// The agent does not answer.
    #[error(
        "the agent does not answer: it hangs, or the machine is overloaded; `systemctl status beelet` shows \
         its process, `journalctl -u beelet` its log"
    )]
    Hangs,
    /// The agent does not implement this call.
    #[error(
        "this agent does not support this command: `beelet observe` only measures \
         (`get pods`, `top` and `tune`); for the rest, use kubectl, or crictl on this machine"
    )]
    NotServed,
    /// The agent sent a malformed pod.
    #[error("cannot parse the agent's pod: {0}; does the agent have another version?")]
    Malformed(JsonError),
}

impl ClientError {
    /// Returns the reason why a container's log cannot be read yet, if the container has not started.
    #[must_use]
    pub fn not_started(&self) -> Option<&str> {
        match self {
            Self::Status(status) if status.code() == Code::FailedPrecondition => Some(status.message()),
            _ => None,
        }
    }

    /// Returns true if the same call may succeed later, after the agent has started or restarted.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::NotRunning { .. } | Self::Gone | Self::Hangs => true,
            Self::Status(status) => matches!(
                status.code(),
                Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Aborted | Code::DeadlineExceeded
            ),
            Self::Denied(_) | Self::Malformed(_) | Self::NotServed => false,
        }
    }
}

impl From<Status> for ClientError {
    fn from(status: Status) -> Self {
        // An error from the agent has no source; a transport error has one.
        let mut source = status.source();
        if source.is_none() {
            let is_unknown_call = status.code() == Code::Unimplemented && status.message().is_empty();
            return if is_unknown_call { Self::NotServed } else { Self::Status(Box::new(status)) };
        }
        while let Some(error) = source {
            if error.to_string().contains("timed out") {
                return Self::Hangs;
            }
            source = error.source();
        }
        Self::Gone
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

impl Client {
    /// Connects to the agent's socket at `path`.
    ///
    /// # Errors
    /// No process listens there, or this user may not connect.
    pub async fn connect(path: &Path) -> Result<Self, ClientError> {
        let channel = connect(path).await?;
        Ok(Self {
            node: NodeClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            events: EventsClient::new(channel.clone()),
            devices: DevicesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            tuner: TunerClient::new(channel.clone()),
            probes: ProbesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            garbage: GarbageClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            images: ImagesClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            containers: ContainersClient::new(channel.clone()),
            manifests: ManifestsClient::new(channel).max_decoding_message_size(MAX_MESSAGE),
        })
    }

    /// Collects images now, or lists candidates with `dry_run`.
    ///
    /// # Errors
    /// The agent's error.
    pub async fn collect_images(
        &mut self,
        all_unused: bool,
        dry_run: bool,
    ) -> Result<proto::CollectImagesResponse, ClientError> {
        let request = proto::CollectImagesRequest { dry_run, all_unused };
        Ok(self.garbage.collect_images(request).await?.into_inner())
    }

    /// Collects dead containers and sandboxes now, or lists candidates with `dry_run`.
    ///
    /// # Errors
    /// The agent's error.
    pub async fn collect_containers(
        &mut self,
        terminated: bool,
        dry_run: bool,
    ) -> Result<proto::CollectContainersResponse, ClientError> {
        let request = proto::CollectContainersRequest { dry_run, terminated };
        Ok(self.garbage.collect_containers(request).await?.into_inner())
    }

    /// Returns the runtime's images with the pods that use them.
    ///
    /// # Errors
    /// The agent or the runtime does not answer.
    pub async fn images(&mut self) -> Result<proto::ListImagesResponse, ClientError> {
        Ok(self.images.list_images(proto::ListImagesRequest {}).await?.into_inner())
    }

    /// Pulls an image and returns its reference for containers.
    ///
    /// # Errors
    /// The reason why the image cannot be pulled.
    pub async fn pull_image(&mut self, image: &str) -> Result<String, ClientError> {
        let request = proto::PullImageRequest { image: image.to_owned() };
        Ok(self.images.pull_image(request).await?.into_inner().reference)
    }

    /// Removes an image; with `force` also an image in use.
    ///
    /// # Errors
    /// The image is missing, in use, or cannot be removed.
    pub async fn remove_image(
        &mut self,
        image: &str,
        force: bool,
    ) -> Result<Option<proto::NodeImage>, ClientError> {
        let request = proto::RemoveImageRequest { image: image.to_owned(), force };
        Ok(self.images.remove_image(request).await?.into_inner().image)
    }

    /// Imports the images of an archive. The first input has the parameters.
    ///
    /// # Errors
    /// The archive is invalid, or the runtime rejects it.
    pub async fn import_images(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::ImportInput> + Send + 'static,
    ) -> Result<Vec<proto::ImportedImage>, ClientError> {
        Ok(self.images.import_images(inputs).await?.into_inner().images)
    }

    /// Exports images as an archive, in pieces.
    ///
    /// # Errors
    /// An image is missing, or the runtime cannot export it.
    pub async fn export_images(
        &mut self,
        images: Vec<String>,
    ) -> Result<Streaming<proto::ExportPiece>, ClientError> {
        let request = proto::ExportImagesRequest { images };
        Ok(self.images.export_images(request).await?.into_inner())
    }

    /// Returns all current pods, and the reason why they may be outdated, or an empty text.
    ///
    /// # Errors
    /// The agent stopped, refused, or does not know its pods yet.
    pub async fn pods(&mut self) -> Result<(PodTable, String), ClientError> {
        let list = self.node.list_pods(proto::ListPodsRequest {}).await?.into_inner();
        let pods = list.pods.into_iter().map(decode_pod).collect::<Result<_, _>>()?;
        Ok((PodTable { pods, rejected: decode_rejected(list.rejected) }, list.notice))
    }

    /// Returns the force-deleted pods that have not terminated yet, as namespace/name.
    ///
    /// # Errors
    /// As for [`Client::pods`].
    pub async fn deleted_by_force(&mut self) -> Result<Vec<String>, ClientError> {
        Ok(self.node.list_pods(proto::ListPodsRequest {}).await?.into_inner().deleted_by_force)
    }

    /// Lists all current pods and then watches for changes.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn watch(&mut self) -> Result<Watch, ClientError> {
        Ok(Watch { events: self.node.watch_pods(proto::WatchPodsRequest {}).await?.into_inner() })
    }

    /// Returns the node's devices and their holders.
    ///
    /// # Errors
    /// The agent stopped, refused, or still waits for the runtime.
    pub async fn devices(&mut self) -> Result<proto::ListDevicesResponse, ClientError> {
        Ok(self.devices.list_devices(proto::ListDevicesRequest {}).await?.into_inner())
    }

    /// Returns the node's capacity and allocatable resources.
    ///
    /// # Errors
    /// As for [`Client::devices`].
    pub async fn node(&mut self) -> Result<proto::GetNodeResponse, ClientError> {
        Ok(self.devices.get_node(proto::GetNodeRequest {}).await?.into_inner())
    }

    /// Returns the tuner's status.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn tuner_status(&mut self) -> Result<proto::TunerStatus, ClientError> {
        Ok(self.tuner.get_tuner_status(proto::GetTunerStatusRequest {}).await?.into_inner())
    }

    /// Returns the steps that the tuner took or advised.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn tuner_history(&mut self) -> Result<proto::TunerHistory, ClientError> {
        Ok(self.tuner.get_tuner_history(proto::GetTunerHistoryRequest {}).await?.into_inner())
    }

    /// Returns all probes of all containers.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn probes(&mut self) -> Result<Vec<proto::Probe>, ClientError> {
        Ok(self.probes.list_probes(proto::ListProbesRequest {}).await?.into_inner().probes)
    }

    /// Runs a probe once, immediately.
    ///
    /// # Errors
    /// The probe is missing, or the agent stopped or refused.
    pub async fn run_probe(
        &mut self,
        wanted: proto::RunProbeRequest,
    ) -> Result<proto::RunProbeResponse, ClientError> {
        Ok(self.probes.run_probe(wanted).await?.into_inner())
    }

    /// Returns the node's events, latest last; with `watch`, new events follow.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn events(
        &mut self,
        wanted: proto::ListEventsRequest,
    ) -> Result<Streaming<proto::Event>, ClientError> {
        Ok(self.events.list_events(wanted).await?.into_inner())
    }

    /// Returns the recorded events, latest last.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn kept_events(
        &mut self,
        wanted: proto::ListEventsRequest,
    ) -> Result<Vec<proto::Event>, ClientError> {
        let mut stream = self.events(proto::ListEventsRequest { watch: false, ..wanted }).await?;
        let mut events = Vec::new();
        while let Some(event) = stream.message().await? {
            events.push(event);
        }
        Ok(events)
    }
}

/// Connects to the agent's socket at `path`; every service can use the connection.
pub async fn connect(path: &Path) -> Result<Channel, ClientError> {
    // The transport's own error hides the cause, so a plain connection comes first.
    UnixStream::connect(path).await.map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => ClientError::Denied(path.to_owned()),
        _ => ClientError::NotRunning { path: path.to_owned(), error: source },
    })?;
    let socket = path.to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // The connector ignores this address.
    let channel = Endpoint::from_static("http://localhost")
        .http2_keep_alive_interval(ASKED)
        .keep_alive_timeout(ANSWERS)
        .connect_with_connector(connector)
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    Ok(channel)
}

impl Client {
    /// Streams a container's log.
    ///
    /// # Errors
    /// The container or the log is missing, or the agent stopped or refused.
    pub async fn logs(
        &mut self,
        request: proto::LogsRequest,
    ) -> Result<Streaming<proto::LogsPiece>, ClientError> {
        Ok(self.containers.logs(request).await?.into_inner())
    }

    /// Runs a command in a container. The first input has the command and the container.
    ///
    /// # Errors
    /// The container is missing or not running, or the agent stopped or refused.
    pub async fn exec(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::ExecInput> + Send + 'static,
    ) -> Result<Streaming<proto::ExecOutput>, ClientError> {
        Ok(self.containers.exec(inputs).await?.into_inner())
    }

    /// Attaches to a container's main process. The first input names the container.
    ///
    /// # Errors
    /// As for [`Client::exec`].
    pub async fn attach(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::ExecInput> + Send + 'static,
    ) -> Result<Streaming<proto::ExecOutput>, ClientError> {
        Ok(self.containers.attach(inputs).await?.into_inner())
    }

    /// Connects to a port of a pod. The first piece names the pod and the port.
    ///
    /// # Errors
    /// The pod is missing or not running, or the agent stopped or refused.
    pub async fn port_forward(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::PortInput> + Send + 'static,
    ) -> Result<Streaming<proto::PortOutput>, ClientError> {
        Ok(self.containers.port_forward(inputs).await?.into_inner())
    }

    /// Restarts containers immediately.
    ///
    /// # Errors
    /// No container can be restarted, or the agent stopped or refused.
    pub async fn restart(
        &mut self,
        target: proto::ContainerTarget,
    ) -> Result<proto::RestartResponse, ClientError> {
        let request = proto::RestartRequest { target: Some(target) };
        Ok(self.containers.restart(request).await?.into_inner())
    }

    /// Adds an ephemeral container to a static pod.
    ///
    /// # Errors
    /// The pod is missing or cannot have an ephemeral container, or the agent stopped or refused.
    pub async fn debug(&mut self, request: proto::DebugRequest) -> Result<proto::DebugResponse, ClientError> {
        Ok(self.containers.debug(request).await?.into_inner())
    }

    /// Writes manifests to the agent's manifest directory, or reports the changes with a dry run.
    ///
    /// # Errors
    /// A manifest is invalid or cannot be written, or the agent stopped or refused.
    pub async fn apply(&mut self, request: proto::ApplyRequest) -> Result<proto::ApplyResponse, ClientError> {
        Ok(self.manifests.apply(request).await?.into_inner())
    }

    /// Returns the objects in the manifest directory.
    ///
    /// # Errors
    /// The selector is invalid, or the agent stopped or refused.
    pub async fn list(&mut self, request: proto::ListRequest) -> Result<Vec<proto::Described>, ClientError> {
        Ok(self.manifests.list(request).await?.into_inner().objects)
    }

    /// Removes a manifest from the agent's manifest directory.
    ///
    /// # Errors
    /// The manifest is missing or cannot be removed, or the agent stopped or refused.
    pub async fn delete(
        &mut self,
        request: proto::DeleteRequest,
    ) -> Result<proto::DeleteResponse, ClientError> {
        Ok(self.manifests.delete(request).await?.into_inner())
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_have_no_gaps() {
        for error in [ClientError::Hangs, ClientError::NotServed, ClientError::Gone] {
            assert!(!error.to_string().contains("  "), "{error}");
        }
    }

    #[test]
    fn an_agent_that_is_away_may_come_back_and_one_that_refuses_does_not() {
        let path = PathBuf::from("/s");
        for (error, expected) in [
            (ClientError::from(Status::unavailable("it starts")), true),
            (ClientError::from(Status::not_found("no such pod")), false),
            (ClientError::from(Status::unimplemented("")), false),
            (ClientError::Gone, true),
            (ClientError::NotRunning { path: path.clone(), error: io::ErrorKind::NotFound.into() }, true),
            (ClientError::Denied(path), false),
        ] {
            assert_eq!(error.is_transient(), expected, "{error}");
        }
    }

    #[test]
    fn a_cause_is_said_once_when_all_causes_are_printed() {
        let path = PathBuf::from("/s");
        for error in [
            ClientError::from(Status::unavailable("it sleeps")),
            ClientError::NotRunning { path, error: io::ErrorKind::NotFound.into() },
            ClientError::Malformed(Pod::from_json(b"x").unwrap_err()),
        ] {
            let cause = match &error {
                ClientError::Status(status) => status.message().to_owned(),
                ClientError::NotRunning { error, .. } => error.to_string(),
                ClientError::Malformed(error) => error.to_string(),
                _ => continue,
            };
            let printed = format!("{:#}", anyhow::Error::from(error));
            assert_eq!(printed.matches(&cause).count(), 1, "{printed}");
            assert!(!printed.contains("status:"), "{printed}");
        }
    }
}
