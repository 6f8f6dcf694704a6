//! `service Garbage` (`garbage.proto`): forwards requests to the collectors.

use std::sync::{Arc, OnceLock};

use beelet_proto::beelet as proto;
use beelet_proto::beelet::garbage_server::{Garbage, GarbageServer};
use tonic::{Request, Response, Status};

use beelet_images::{
    Error, ImageGcRequest,
    containers::{self, ContainerGcRequest},
};

/// Handles of both collectors.
#[derive(Clone, Debug)]
pub struct Collectors {
    /// Collector of images.
    pub images: beelet_images::Handle,
    /// Collector of containers and sandboxes.
    pub containers: containers::Handle,
}

/// Returns the service, which answers "unavailable" until `collectors` is set.
#[must_use]
pub fn service(collectors: Arc<OnceLock<Collectors>>) -> GarbageServer<impl Garbage> {
    GarbageServer::new(Service { collectors })
}

#[derive(Debug)]
struct Service {
    collectors: Arc<OnceLock<Collectors>>,
}

impl Service {
    #[allow(clippy::result_large_err)] // tonic's own error type
    fn collectors(&self) -> Result<&Collectors, Status> {
        let waits = "the agent is still waiting for the container runtime; try again later";
        self.collectors.get().ok_or_else(|| Status::unavailable(waits))
    }
}

fn status(error: &Error) -> Status {
    if error.is_transient() {
        Status::unavailable(error.to_string())
    } else {
        Status::internal(error.to_string())
    }
}

#[tonic::async_trait]
impl Garbage for Service {
    async fn collect_images(
        &self,
        request: Request<proto::CollectImagesRequest>,
    ) -> Result<Response<proto::CollectImagesResponse>, Status> {
        let request = request.into_inner();
        let wanted = ImageGcRequest { all_unused: request.all_unused, dry_run: request.dry_run };
        let collected = self.collectors()?.images.collect(wanted).await.map_err(|e| status(&e))?;
        let image = |image: beelet_images::gc::CollectedImage| proto::CollectedImage {
            id: image.id,
            names: image.names,
            size_bytes: image.size_bytes,
            freed_bytes: image.freed_bytes,
            reason: image.reason.to_owned(),
        };
        Ok(Response::new(proto::CollectImagesResponse {
            images: collected.images.into_iter().map(image).collect(),
            usage_percent: collected.outcome.usage_percent.map(u32::from),
            bytes_to_free: collected.outcome.bytes_to_free,
            freed_bytes: collected.outcome.freed_bytes,
            error: collected.outcome.error.unwrap_or_default(),
            why: collected.outcome.why,
        }))
    }

    async fn collect_containers(
        &self,
        request: Request<proto::CollectContainersRequest>,
    ) -> Result<Response<proto::CollectContainersResponse>, Status> {
        let request = request.into_inner();
        let wanted = ContainerGcRequest { terminated: request.terminated, dry_run: request.dry_run };
        let collected = self.collectors()?.containers.collect(wanted).await.map_err(|e| status(&e))?;
        let container = |container: containers::CollectedContainer| proto::CollectedContainer {
            id: container.id,
            namespace: container.pod.namespace,
            pod: container.pod.name,
            name: container.name,
            attempt: container.attempt,
        };
        Ok(Response::new(proto::CollectContainersResponse {
            containers: collected.containers.into_iter().map(container).collect(),
            sandboxes: collected.sandboxes,
            errors: collected.errors,
        }))
    }
}
