//! The services of the agent, one value each.

use beelet_proto::beelet as proto;
use beelet_proto::beelet::containers_client::ContainersClient;
use beelet_proto::beelet::devices_client::DevicesClient;
use beelet_proto::beelet::events_client::EventsClient;
use beelet_proto::beelet::garbage_client::GarbageClient;
use beelet_proto::beelet::images_client::ImagesClient;
use beelet_proto::beelet::manifests_client::ManifestsClient;
use beelet_proto::beelet::probes_client::ProbesClient;
use beelet_proto::beelet::tuner_client::TunerClient;
use tonic::Streaming;
use tonic::transport::Channel;

use super::ClientError;

/// The node's devices and resources.
#[derive(Debug, Clone)]
pub struct Devices(pub(super) DevicesClient<Channel>);

impl Devices {
    /// Returns the node's devices and their holders.
    ///
    /// # Errors
    /// The agent stopped, refused, or still waits for the runtime.
    pub async fn list(&mut self) -> Result<proto::ListDevicesResponse, ClientError> {
        Ok(self.0.list_devices(proto::ListDevicesRequest {}).await?.into_inner())
    }

    /// Returns the node's capacity and allocatable resources.
    ///
    /// # Errors
    /// As for [`Self::list`].
    pub async fn node(&mut self) -> Result<proto::GetNodeResponse, ClientError> {
        Ok(self.0.get_node(proto::GetNodeRequest {}).await?.into_inner())
    }
}

/// The node's events.
#[derive(Debug, Clone)]
pub struct Events(pub(super) EventsClient<Channel>);

impl Events {
    /// Returns the node's events, latest last; with `watch`, new events follow.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn list(
        &mut self,
        wanted: proto::ListEventsRequest,
    ) -> Result<Streaming<proto::Event>, ClientError> {
        Ok(self.0.list_events(wanted).await?.into_inner())
    }

    /// Returns the recorded events, latest last.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn kept(&mut self, wanted: proto::ListEventsRequest) -> Result<Vec<proto::Event>, ClientError> {
        let mut stream = self.list(proto::ListEventsRequest { watch: false, ..wanted }).await?;
        let mut events = Vec::new();
        while let Some(event) = stream.message().await? {
            events.push(event);
        }
        Ok(events)
    }
}

/// The collection of unused images and dead containers.
#[derive(Debug, Clone)]
pub struct Garbage(pub(super) GarbageClient<Channel>);

impl Garbage {
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
        Ok(self.0.collect_images(request).await?.into_inner())
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
        Ok(self.0.collect_containers(request).await?.into_inner())
    }
}

/// The images of the runtime.
#[derive(Debug, Clone)]
pub struct Images(pub(super) ImagesClient<Channel>);

impl Images {
    /// Returns the runtime's images with the pods that use them.
    ///
    /// # Errors
    /// The agent or the runtime does not answer.
    pub async fn list(&mut self) -> Result<proto::ListImagesResponse, ClientError> {
        Ok(self.0.list_images(proto::ListImagesRequest {}).await?.into_inner())
    }

    /// Pulls an image and returns its reference for containers.
    ///
    /// # Errors
    /// The reason why the image cannot be pulled.
    pub async fn pull(&mut self, image: &str) -> Result<String, ClientError> {
        let request = proto::PullImageRequest { image: image.to_owned() };
        Ok(self.0.pull_image(request).await?.into_inner().reference)
    }

    /// Removes an image; with `force` also an image in use.
    ///
    /// # Errors
    /// The image is missing, in use, or cannot be removed.
    pub async fn remove(
        &mut self,
        image: &str,
        force: bool,
    ) -> Result<Option<proto::NodeImage>, ClientError> {
        let request = proto::RemoveImageRequest { image: image.to_owned(), force };
        Ok(self.0.remove_image(request).await?.into_inner().image)
    }

    /// Imports the images of an archive. The first input has the parameters.
    ///
    /// # Errors
    /// The archive is invalid, or the runtime rejects it.
    pub async fn import(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::ImportInput> + Send + 'static,
    ) -> Result<Vec<proto::ImportedImage>, ClientError> {
        Ok(self.0.import_images(inputs).await?.into_inner().images)
    }

    /// Exports images as an archive, in pieces.
    ///
    /// # Errors
    /// An image is missing, or the runtime cannot export it.
    pub async fn export(
        &mut self,
        images: Vec<String>,
    ) -> Result<Streaming<proto::ExportPiece>, ClientError> {
        let request = proto::ExportImagesRequest { images };
        Ok(self.0.export_images(request).await?.into_inner())
    }
}

/// The tuner.
#[derive(Debug, Clone)]
pub struct Tuner(pub(super) TunerClient<Channel>);

impl Tuner {
    /// Returns the tuner's status.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn status(&mut self) -> Result<proto::TunerStatus, ClientError> {
        Ok(self.0.get_tuner_status(proto::GetTunerStatusRequest {}).await?.into_inner())
    }

    /// Returns the steps that the tuner took or advised.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn history(&mut self) -> Result<proto::TunerHistory, ClientError> {
        Ok(self.0.get_tuner_history(proto::GetTunerHistoryRequest {}).await?.into_inner())
    }
}

/// Containers: logs, streams, restarts.
#[derive(Debug, Clone)]
pub struct Containers(pub(super) ContainersClient<Channel>);

impl Containers {
    /// Streams a container's log.
    ///
    /// # Errors
    /// The container or the log is missing, or the agent stopped or refused.
    pub async fn logs(
        &mut self,
        request: proto::LogsRequest,
    ) -> Result<Streaming<proto::LogsPiece>, ClientError> {
        Ok(self.0.logs(request).await?.into_inner())
    }

    /// Runs a command in a container. The first input has the command and the container.
    ///
    /// # Errors
    /// The container is missing or not running, or the agent stopped or refused.
    pub async fn exec(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::ExecInput> + Send + 'static,
    ) -> Result<Streaming<proto::ExecOutput>, ClientError> {
        Ok(self.0.exec(inputs).await?.into_inner())
    }

    /// Attaches to a container's main process. The first input names the container.
    ///
    /// # Errors
    /// As for [`Self::exec`].
    pub async fn attach(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::ExecInput> + Send + 'static,
    ) -> Result<Streaming<proto::ExecOutput>, ClientError> {
        Ok(self.0.attach(inputs).await?.into_inner())
    }

    /// Connects to a port of a pod. The first piece names the pod and the port.
    ///
    /// # Errors
    /// The pod is missing or not running, or the agent stopped or refused.
    pub async fn port_forward(
        &mut self,
        inputs: impl tokio_stream::Stream<Item = proto::PortInput> + Send + 'static,
    ) -> Result<Streaming<proto::PortOutput>, ClientError> {
        Ok(self.0.port_forward(inputs).await?.into_inner())
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
        Ok(self.0.restart(request).await?.into_inner())
    }

    /// Adds an ephemeral container to a static pod.
    ///
    /// # Errors
    /// The pod is missing or cannot have an ephemeral container, or the agent stopped or refused.
    pub async fn debug(&mut self, request: proto::DebugRequest) -> Result<proto::DebugResponse, ClientError> {
        Ok(self.0.debug(request).await?.into_inner())
    }
}

/// The agent's manifest directory.
#[derive(Debug, Clone)]
pub struct Manifests(pub(super) ManifestsClient<Channel>);

impl Manifests {
    /// Writes manifests to the agent's manifest directory, or reports the changes with a dry run.
    ///
    /// # Errors
    /// A manifest is invalid or cannot be written, or the agent stopped or refused.
    pub async fn apply(&mut self, request: proto::ApplyRequest) -> Result<proto::ApplyResponse, ClientError> {
        Ok(self.0.apply(request).await?.into_inner())
    }

    /// Returns the objects in the manifest directory.
    ///
    /// # Errors
    /// The selector is invalid, or the agent stopped or refused.
    pub async fn list(&mut self, request: proto::ListRequest) -> Result<Vec<proto::Described>, ClientError> {
        Ok(self.0.list(request).await?.into_inner().objects)
    }

    /// Removes a manifest from the agent's manifest directory.
    ///
    /// # Errors
    /// The manifest is missing or cannot be removed, or the agent stopped or refused.
    pub async fn delete(
        &mut self,
        request: proto::DeleteRequest,
    ) -> Result<proto::DeleteResponse, ClientError> {
        Ok(self.0.delete(request).await?.into_inner())
    }
}

/// The probes of containers.
#[derive(Debug, Clone)]
pub struct Probes(pub(super) ProbesClient<Channel>);

impl Probes {
    /// Returns all probes of all containers.
    ///
    /// # Errors
    /// The agent stopped or refused.
    pub async fn list(&mut self) -> Result<Vec<proto::Probe>, ClientError> {
        Ok(self.0.list_probes(proto::ListProbesRequest {}).await?.into_inner().probes)
    }

    /// Runs a probe once, immediately.
    ///
    /// # Errors
    /// The probe is missing, or the agent stopped or refused.
    pub async fn run(
        &mut self,
        wanted: proto::RunProbeRequest,
    ) -> Result<proto::RunProbeResponse, ClientError> {
        Ok(self.0.run_probe(wanted).await?.into_inner())
    }
}
