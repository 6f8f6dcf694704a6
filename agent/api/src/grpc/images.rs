//! `service Images` (`images.proto`): lists, pulls, removes, imports and exports images.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use beelet_base::pieces;
use beelet_cri::{Runtime, sandbox_image};
use beelet_images::export::{ExportError, export};
use beelet_images::import::{ImportError, Wanted as Asked, import};
use beelet_model::table::PodTable;
use beelet_proto::beelet as proto;
use beelet_proto::beelet::images_server::{Images, ImagesServer};
use beelet_proto::beelet::import_input::Input;
use beelet_proto::cri;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Queued pieces of an archive.
const QUEUE: usize = 4;

/// Returns the service.
#[must_use]
pub fn service(pods: watch::Receiver<Arc<PodTable>>, runtime: Runtime) -> ImagesServer<impl Images> {
    ImagesServer::new(Service { pods, runtime })
}

struct Service {
    pods: watch::Receiver<Arc<PodTable>>,
    runtime: Runtime,
}

#[tonic::async_trait]
impl Images for Service {
    async fn list_images(
        &self,
        _request: Request<proto::ListImagesRequest>,
    ) -> Result<Response<proto::ListImagesResponse>, Status> {
        let images = self.runtime.images.list().await.map_err(unavailable)?;
        let (users, sandboxes) = (self.users().await?, self.of_sandboxes().await);
        Ok(Response::new(listed(images, users, sandboxes.as_deref())))
    }

    async fn pull_image(
        &self,
        request: Request<proto::PullImageRequest>,
    ) -> Result<Response<proto::PullImageResponse>, Status> {
        let image = request.into_inner().image;
        let pulled = self.runtime.images.pull(&image, None, &cri::PodSandboxConfig::default()).await;
        let reference = pulled.map_err(unavailable)?;
        Ok(Response::new(proto::PullImageResponse { reference }))
    }

    async fn remove_image(
        &self,
        request: Request<proto::RemoveImageRequest>,
    ) -> Result<Response<proto::RemoveImageResponse>, Status> {
        let request = request.into_inner();
        let found = self.runtime.images.status(&request.image).await.map_err(unavailable)?;
        let found = found.ok_or_else(|| {
            Status::not_found(format!(
                "image {:?} not found; `beelet images ls` lists all images",
                request.image
            ))
        })?;
        let (users, sandboxes) = (self.users().await?, self.of_sandboxes().await);
        let mut listed = listed(vec![found], users, sandboxes.as_deref()).images;
        let image = listed.pop().unwrap_or_default();
        if !request.force && image.sandboxes {
            return Err(Status::failed_precondition(format!(
                "{} is the image of every pod's sandbox: without it pods cannot start unless a registry has it; \
                 use `--force` to remove it",
                request.image
            )));
        }
        if !request.force && !image.used_by.is_empty() {
            return Err(Status::failed_precondition(format!(
                "{} is in use by {}: delete the pods first, or use `--force`",
                request.image,
                image.used_by.join(", ")
            )));
        }
        self.runtime.images.remove(&image.id).await.map_err(unavailable)?;
        Ok(Response::new(proto::RemoveImageResponse { image: Some(image) }))
    }

    async fn import_images(
        &self,
        request: Request<Streaming<proto::ImportInput>>,
    ) -> Result<Response<proto::ImportImagesResponse>, Status> {
        let mut inputs = request.into_inner();
        let first = inputs.message().await?.and_then(|input| input.input);
        let Some(Input::Start(start)) = first else {
            return Err(Status::invalid_argument("the first input must contain the import's parameters"));
        };
        let asked =
            Asked { what: start.what, name: Some(start.name).filter(|name| !name.is_empty()), pinned: false };
        let (pieces, archive) = mpsc::channel(QUEUE);
        let receiving = tokio::spawn(receive(inputs, pieces));
        let imported = import(&self.runtime, asked, pieces::Reader::new(archive)).await;
        receiving.abort();
        let image = |image: beelet_images::import::Imported| proto::ImportedImage {
            name: image.name,
            is_new: image.is_new,
        };
        let images = imported.map_err(not_imported)?.into_iter().map(image).collect();
        Ok(Response::new(proto::ImportImagesResponse { images }))
    }

    type ExportImagesStream = ReceiverStream<Result<proto::ExportPiece, Status>>;

    async fn export_images(
        &self,
        request: Request<proto::ExportImagesRequest>,
    ) -> Result<Response<Self::ExportImagesStream>, Status> {
        let images = request.into_inner().images;
        if images.is_empty() {
            return Err(Status::invalid_argument("no image given"));
        }
        let (sender, receiver) = mpsc::channel(QUEUE);
        let runtime = self.runtime.clone();
        tokio::spawn(async move {
            let (pieces, mut archive) = mpsc::channel(QUEUE);
            let to_client = sender.clone();
            // Ends after the client has disconnected, and thereby ends the export.
            let sending = async move {
                while let Some(data) = archive.recv().await {
                    if to_client.send(Ok(proto::ExportPiece { data })).await.is_err() {
                        return;
                    }
                }
            };
            let exporting = async move { export(&runtime, &images, &pieces).await };
            let (exported, ()) = tokio::join!(exporting, sending);
            if let Err(error) = exported {
                // The client may have disconnected.
                let _ = sender.send(Err(not_exported(error))).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

impl Service {
    /// Returns the images that pods name, with their IDs if present; only the runtime can resolve a name.
    async fn users(&self) -> Result<Vec<Wanted>, Status> {
        let wanted = wanted(&self.pods.borrow());
        let mut found = Vec::new();
        for (name, pods) in wanted {
            let image = self.runtime.images.status(&name).await.map_err(unavailable)?;
            found.push(Wanted { name, id: image.map(|image| image.id), pods });
        }
        Ok(found)
    }

    /// Returns the ID of the sandbox image. The runtime is asked every time, because its restart, which the
    /// agent outlives, may change the image. Without an answer the list is still shown.
    async fn of_sandboxes(&self) -> Option<String> {
        let name = sandbox_image(&self.runtime.status(true).await.ok()?)?;
        Some(self.runtime.images.status(&name).await.ok()??.id)
    }
}

/// Forwards an archive's pieces, and finally the error, if any.
async fn receive(mut inputs: Streaming<proto::ImportInput>, pieces: mpsc::Sender<io::Result<Vec<u8>>>) {
    while let Some(input) = inputs.next().await {
        let piece = match input.map(|input| input.input) {
            Ok(Some(Input::Data(data))) => Ok(data),
            Ok(_) => continue,
            Err(status) => Err(io::Error::other(format!("the client disconnected: {}", status.message()))),
        };
        let is_last = piece.is_err();
        if pieces.send(piece).await.is_err() || is_last {
            return;
        }
    }
}

#[allow(clippy::needless_pass_by_value)] // as map_err has it
fn not_imported(error: ImportError) -> Status {
    match error {
        ImportError::Runtime(error) => of_store(error),
        error => Status::invalid_argument(error.to_string()),
    }
}

#[allow(clippy::needless_pass_by_value)] // as map_err has it
fn not_exported(error: ExportError) -> Status {
    match error {
        ExportError::Runtime(error) => of_store(error),
        ExportError::NotFound(_) => Status::not_found(error.to_string()),
        error => Status::failed_precondition(error.to_string()),
    }
}

#[allow(clippy::needless_pass_by_value)] // as map_err has it
fn of_store(error: beelet_cri::Error) -> Status {
    match error.kind {
        beelet_cri::Kind::Unimplemented => Status::unimplemented(error.to_string()),
        _ => Status::unavailable(error.to_string()),
    }
}

/// An image named by pods.
struct Wanted {
    name: String,
    id: Option<String>,
    pods: Vec<String>,
}

#[allow(clippy::needless_pass_by_value)] // as map_err has it
fn unavailable(error: beelet_cri::Error) -> Status {
    Status::unavailable(error.to_string())
}

/// Returns the images with their users, and the missing images that pods name. `sandboxes` is the ID of the
/// sandbox image.
fn listed(
    images: Vec<cri::Image>,
    wanted: Vec<Wanted>,
    sandboxes: Option<&str>,
) -> proto::ListImagesResponse {
    let users = |id: &str| {
        let of_image = wanted.iter().filter(|one| one.id.as_deref() == Some(id));
        of_image.flat_map(|one| one.pods.iter().cloned()).collect::<BTreeSet<_>>().into_iter().collect()
    };
    let image = |image: cri::Image| proto::NodeImage {
        used_by: users(&image.id),
        sandboxes: sandboxes == Some(image.id.as_str()),
        id: image.id,
        tags: image.repo_tags,
        digests: image.repo_digests,
        size_bytes: image.size,
        pinned: image.pinned,
    };
    let mut images: Vec<proto::NodeImage> = images.into_iter().map(image).collect();
    images.sort_by(|a, b| (a.tags.is_empty(), &a.tags, &a.id).cmp(&(b.tags.is_empty(), &b.tags, &b.id)));
    let absent = wanted.into_iter().filter(|one| one.id.is_none());
    let missing = absent.map(|one| proto::MissingImage { name: one.name, used_by: one.pods });
    proto::ListImagesResponse { images, missing: missing.collect() }
}

/// Returns the images named by pods that have not terminated, with the pods.
fn wanted(table: &PodTable) -> BTreeMap<String, Vec<String>> {
    let mut wanted: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, entry) in table.pods.iter().filter(|(_, entry)| entry.ended().is_none()) {
        let Some(spec) = &entry.pod.spec else { continue };
        let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
        let of_containers = containers.filter_map(|container| container.image.as_deref());
        let volumes = spec.volumes.iter().flatten();
        let of_volumes = volumes.filter_map(|volume| volume.image.as_ref()?.reference.as_deref());
        for image in of_containers.chain(of_volumes) {
            let users = wanted.entry(image.to_owned()).or_default();
            if !users.contains(&name.to_string()) {
                users.push(name.to_string());
            }
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use beelet_model::table::{PodEntry, PodName};
    use serde_json::json;

    use super::*;

    fn image(id: &str, tag: &str) -> cri::Image {
        cri::Image { id: format!("sha256:{id}"), repo_tags: vec![tag.to_owned()], ..Default::default() }
    }

    fn table(pods: &[(&str, &str, &str)]) -> PodTable {
        let mut table = PodTable::default();
        for (name, image, phase) in pods {
            let pod = json!({
                "metadata": {"name": name},
                "spec": {"containers": [{"name": "c", "image": image}]},
                "status": {"phase": phase},
            });
            let entry = PodEntry::of(serde_json::from_value(pod).unwrap());
            table.pods.insert(PodName::of(&entry.pod), Arc::new(entry));
        }
        table
    }

    #[test]
    fn an_image_has_its_users_and_what_is_not_here_is_told() {
        let pods = table(&[
            ("one", "example.com/web:1", "Running"),
            ("two", "db", "Pending"),
            ("three", "example.com/none:2", "Pending"),
            ("four", "example.com/web:1", "Failed"),
        ]);
        let here = |name: &str| match name {
            "db" => Some("sha256:b".to_owned()),
            "example.com/web:1" => Some("sha256:a".to_owned()),
            _ => None,
        };
        let wanted = wanted(&pods).into_iter().map(|(name, pods)| Wanted { id: here(&name), name, pods });
        let pause = image("p", "registry.k8s.io/pause:3.9");
        let images = vec![image("b", "library/db:latest"), image("a", "example.com/web:1"), pause];
        let listed = listed(images, wanted.collect(), Some("sha256:p"));
        let users: Vec<_> =
            listed.images.iter().map(|one| (one.tags[0].as_str(), one.used_by.join(" "))).collect();
        let expected = [
            ("example.com/web:1", "default/one"),
            ("library/db:latest", "default/two"),
            ("registry.k8s.io/pause:3.9", ""),
        ];
        assert_eq!(users, expected.map(|(tag, users)| (tag, users.to_owned())));
        let sandboxes: Vec<bool> = listed.images.iter().map(|one| one.sandboxes).collect();
        assert_eq!(sandboxes, [false, false, true]);
        assert_eq!(listed.missing.len(), 1);
        assert_eq!(
            (listed.missing[0].name.as_str(), listed.missing[0].used_by.len()),
            ("example.com/none:2", 1)
        );
    }
}
