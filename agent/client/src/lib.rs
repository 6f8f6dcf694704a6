//! The other end of the gRPC socket: for the command line, the demo and the tests.

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

/// Larger than any list of a node's pods.
pub const MAX_MESSAGE: usize = 256 << 20;

/// How often an agent that says nothing is asked whether it is there, and how long it may take to say so. A
/// call may take as long as it takes: the agent has deadlines of its own for the runtime's.
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

/// Why the agent gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody is there.
    #[error(
        "no agent answers at {}: {}; is `beelet run` up? Name its socket with --socket (or BEELET_SOCKET) if its runDir is \
         another one",
        .path.display(), .error
    )]
    NotRunning {
        /// The socket.
        path: PathBuf,
        /// What connecting gave. It is in the sentence, and so no source: those are printed behind it.
        error: io::Error,
    },
    /// Not for this user.
    #[error("the agent's socket {} is for root only: run the command as root", .0.display())]
    Denied(PathBuf),
    /// The agent answered with an error.
    #[error("the agent: {}", .0.message())]
    Status(Box<Status>),
    /// The connection ended before the answer.
    #[error(
        "the agent stopped, or was started anew, before it answered: ask again (`journalctl -u beelet` has its log)"
    )]
    Gone,
    /// Nothing comes back from it.
    #[error(
        "the agent does not answer: it hangs, or the machine is too busy for it; `systemctl status beelet` shows \
         its process, `journalctl -u beelet` its log"
    )]
    Hangs,
    /// It does not have this call.
    #[error(
        "this agent does not have this: if it is `beelet observe`, it measures and changes nothing \
         (get pods, top and tune ask it); for the rest ask whoever runs the pods: kubectl, or crictl on this machine"
    )]
    NotServed,
    /// The agent sent something else than a pod.
    #[error("the agent sent a pod that cannot be read: {0}; is it of another version?")]
    Malformed(JsonError),
}

impl ClientError {
    /// Why a container's log can't be read yet: it has not started. None if it is something else.
    #[must_use]
    pub fn not_started(&self) -> Option<&str> {
        match self {
            Self::Status(status) if status.code() == Code::FailedPrecondition => Some(status.message()),
            _ => None,
        }
    }

    /// Returns true if the same call may succeed later: the agent starts, or is started again.
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
        // An answer of the agent's has no source; what happened on the way has one.
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

/// Something that happened to the agent's pods.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A pod is there that was not.
    Added(PodName, Arc<PodEntry>),
    /// A pod changed; it may also be another one of the same name.
    Modified(PodName, Arc<PodEntry>),
    /// A pod is gone. This was its last state.
    Deleted(PodName, Arc<PodEntry>),
    /// All that was there when the watch began has been told.
    Synced,
    /// These manifests, and only these, cannot become pods.
    Rejected(Arc<Vec<RejectedManifest>>),
    /// Why pods may not be as they were told; empty: they are again.
    Notice(String),
}

impl Client {
    /// Connects to the agent's socket at `path`.
    ///
    /// # Errors
    /// Nobody listens there, or this user may not connect.
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

    /// Collects images now, or says what would go.
    ///
    /// # Errors
    /// The agent can't, and says why.
    pub async fn collect_images(
        &mut self,
        all_unused: bool,
        dry_run: bool,
    ) -> Result<proto::CollectImagesResponse, ClientError> {
        let request = proto::CollectImagesRequest { dry_run, all_unused };
        Ok(self.garbage.collect_images(request).await?.into_inner())
    }

    /// Collects dead containers and sandboxes now, or says what would go.
    ///
    /// # Errors
    /// The agent can't, and says why.
    pub async fn collect_containers(
        &mut self,
        terminated: bool,
        dry_run: bool,
    ) -> Result<proto::CollectContainersResponse, ClientError> {
        let request = proto::CollectContainersRequest { dry_run, terminated };
        Ok(self.garbage.collect_containers(request).await?.into_inner())
    }

    /// The runtime's images, with the pods that use them.
    ///
    /// # Errors
    /// The agent or the runtime doesn't answer.
    pub async fn images(&mut self) -> Result<proto::ListImagesResponse, ClientError> {
        Ok(self.images.list_images(proto::ListImagesRequest {}).await?.into_inner())
    }

    /// Fetches an image; the reference to run it by.
    ///
    /// # Errors
    /// It can't be fetched, and why.
    pub async fn pull_image(&mut self, image: &str) -> Result<String, ClientError> {
        let request = proto::PullImageRequest { image: image.to_owned() };
        Ok(self.images.pull_image(request).await?.into_inner().reference)
    }

    /// Removes an image, with `force` also one that pods use.
    ///
    /// # Errors
    /// There is none, it is in use, or it can't be removed.
    pub async fn remove_image(
        &mut self,
        image: &str,
        force: bool,
    ) -> Result<Option<proto::NodeImage>, ClientError> {
        let request = proto::RemoveImageRequest { image: image.to_owned(), force };
        Ok(self.images.remove_image(request).await?.into_inner().image)
    }

    /// Takes the images of an archive. The first input says how.
    ///
    /// # Errors
    /// The archive is none, or the runtime does not take it.
    pub async fn import_images(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::ImportInput> + Send + 'static,
    ) -> Result<Vec<proto::ImportedImage>, ClientError> {
        Ok(self.images.import_images(inputs).await?.into_inner().images)
    }

    /// An archive of images, in pieces.
    ///
    /// # Errors
    /// There is no such image, or the runtime does not hand it out.
    pub async fn export_images(
        &mut self,
        images: Vec<String>,
    ) -> Result<Streaming<proto::ExportPiece>, ClientError> {
        let request = proto::ExportImagesRequest { images };
        Ok(self.images.export_images(request).await?.into_inner())
    }

    /// All pods as they are now, and why they may not be as they are shown; empty if there is no reason.
    ///
    /// # Errors
    /// The agent stopped or refused, or knows nothing yet.
    pub async fn pods(&mut self) -> Result<(PodTable, String), ClientError> {
        let list = self.node.list_pods(proto::ListPodsRequest {}).await?.into_inner();
        let pods = list.pods.into_iter().map(decode_pod).collect::<Result<_, _>>()?;
        Ok((PodTable { pods, rejected: decode_rejected(list.rejected) }, list.notice))
    }

    /// The pods, as namespace/name, that were deleted by force and have not ended yet.
    ///
    /// # Errors
    /// As for [`Client::pods`].
    pub async fn deleted_by_force(&mut self) -> Result<Vec<String>, ClientError> {
        Ok(self.node.list_pods(proto::ListPodsRequest {}).await?.into_inner().deleted_by_force)
    }

    /// All pods as they are now, and then every change.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn watch(&mut self) -> Result<Watch, ClientError> {
        Ok(Watch { events: self.node.watch_pods(proto::WatchPodsRequest {}).await?.into_inner() })
    }

    /// The node's devices, and who holds them.
    ///
    /// # Errors
    /// The agent stopped or refused, or still waits for the runtime.
    pub async fn devices(&mut self) -> Result<proto::ListDevicesResponse, ClientError> {
        Ok(self.devices.list_devices(proto::ListDevicesRequest {}).await?.into_inner())
    }

    /// The node's resources, and the part of them that pods may have.
    ///
    /// # Errors
    /// As for [`Client::devices`].
    pub async fn node(&mut self) -> Result<proto::GetNodeResponse, ClientError> {
        Ok(self.devices.get_node(proto::GetNodeRequest {}).await?.into_inner())
    }

    /// The tuner's status.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn tuner_status(&mut self) -> Result<proto::TunerStatus, ClientError> {
        Ok(self.tuner.get_tuner_status(proto::GetTunerStatusRequest {}).await?.into_inner())
    }

    /// The steps that the tuner took or advised.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn tuner_history(&mut self) -> Result<proto::TunerHistory, ClientError> {
        Ok(self.tuner.get_tuner_history(proto::GetTunerHistoryRequest {}).await?.into_inner())
    }

    /// Every probe of every container.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn probes(&mut self) -> Result<Vec<proto::Probe>, ClientError> {
        Ok(self.probes.list_probes(proto::ListProbesRequest {}).await?.into_inner().probes)
    }

    /// Runs a probe once, now.
    ///
    /// # Errors
    /// There is no such probe; the agent stopped or refused.
    pub async fn run_probe(
        &mut self,
        wanted: proto::RunProbeRequest,
    ) -> Result<proto::RunProbeResponse, ClientError> {
        Ok(self.probes.run_probe(wanted).await?.into_inner())
    }

    /// The node's events, the last one at the end; with `watch`, then those that come.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn events(
        &mut self,
        wanted: proto::ListEventsRequest,
    ) -> Result<Streaming<proto::Event>, ClientError> {
        Ok(self.events.list_events(wanted).await?.into_inner())
    }

    /// The events that the agent keeps, the one that happened last at the end.
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

/// The connection to the agent's socket at `path`: one for any of its services.
pub async fn connect(path: &Path) -> Result<Channel, ClientError> {
    // The transport's own error hides why; this asks the kernel first.
    UnixStream::connect(path).await.map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => ClientError::Denied(path.to_owned()),
        _ => ClientError::NotRunning { path: path.to_owned(), error: source },
    })?;
    let socket = path.to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // The address is a formality: the connector knows the way.
    let channel = Endpoint::from_static("http://localhost")
        .http2_keep_alive_interval(ASKED)
        .keep_alive_timeout(ANSWERS)
        .connect_with_connector(connector)
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    Ok(channel)
}

impl Client {
    /// A container's log.
    ///
    /// # Errors
    /// There is no such container or log, or the agent stopped or refused.
    pub async fn logs(
        &mut self,
        request: proto::LogsRequest,
    ) -> Result<Streaming<proto::LogsPiece>, ClientError> {
        Ok(self.containers.logs(request).await?.into_inner())
    }

    /// Runs a command in a container. The first input says which and where.
    ///
    /// # Errors
    /// There is no such container, it doesn't run, or the agent stopped or refused.
    pub async fn exec(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::ExecInput> + Send + 'static,
    ) -> Result<Streaming<proto::ExecOutput>, ClientError> {
        Ok(self.containers.exec(inputs).await?.into_inner())
    }

    /// The streams of a container's own first process. The first input says which container.
    ///
    /// # Errors
    /// As for [`Client::exec`].
    pub async fn attach(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::ExecInput> + Send + 'static,
    ) -> Result<Streaming<proto::ExecOutput>, ClientError> {
        Ok(self.containers.attach(inputs).await?.into_inner())
    }

    /// A connection to a port of a pod. The first piece says which.
    ///
    /// # Errors
    /// There is no such pod, it doesn't run, or the agent stopped or refused.
    pub async fn port_forward(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::PortInput> + Send + 'static,
    ) -> Result<Streaming<proto::PortOutput>, ClientError> {
        Ok(self.containers.port_forward(inputs).await?.into_inner())
    }

    /// Starts containers again at once.
    ///
    /// # Errors
    /// There is none that can be, or the agent stopped or refused.
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
    /// There is no such pod, it can't have such a container, or the agent stopped or refused.
    pub async fn debug(&mut self, request: proto::DebugRequest) -> Result<proto::DebugResponse, ClientError> {
        Ok(self.containers.debug(request).await?.into_inner())
    }

    /// Puts manifests into the agent's folder, or says what that would do.
    ///
    /// # Errors
    /// One is wrong, can't be written, or the agent stopped or refused.
    pub async fn apply(&mut self, request: proto::ApplyRequest) -> Result<proto::ApplyResponse, ClientError> {
        Ok(self.manifests.apply(request).await?.into_inner())
    }

    /// The objects that the folder's manifests describe.
    ///
    /// # Errors
    /// The selector is wrong, or the agent stopped or refused.
    pub async fn list(&mut self, request: proto::ListRequest) -> Result<Vec<proto::Described>, ClientError> {
        Ok(self.manifests.list(request).await?.into_inner().objects)
    }

    /// Takes a manifest out of the agent's folder.
    ///
    /// # Errors
    /// There is none, it can't be taken out, or the agent stopped or refused.
    pub async fn delete(
        &mut self,
        request: proto::DeleteRequest,
    ) -> Result<proto::DeleteResponse, ClientError> {
        Ok(self.manifests.delete(request).await?.into_inner())
    }
}

/// Changes as they come.
#[derive(Debug)]
pub struct Watch {
    events: Streaming<proto::PodEvent>,
}

impl Watch {
    /// The next one; None when the agent has ended the stream. Safe to be dropped while it waits.
    ///
    /// # Errors
    /// The agent stopped, or sent what cannot be read.
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
                // A newer agent may have events that we don't know.
                _ => {}
            }
        }
        Ok(None)
    }
}

impl Event {
    /// Makes `table` what it is after this event.
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
    // The namespace's path is the agent's own business and not sent.
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
