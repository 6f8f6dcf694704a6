//! The import of images into the runtime's store and their export. CRI has no call for them, so this module
//! uses containerd's own API on the same socket. Other runtimes serve no API for them.
//!
//! Everything happens in containerd's namespace `k8s.io`, which containerd's CRI uses.

use std::collections::HashMap;
use std::time::Duration;

use beelet_proto::containerd::services::content::v1 as content;
use beelet_proto::containerd::services::images::v1 as images;
use beelet_proto::containerd::services::leases::v1 as leases;
pub use beelet_proto::containerd::types::Descriptor;
use content::content_client::ContentClient;
use images::images_client::ImagesClient;
use leases::leases_client::LeasesClient;
use prost_types::FieldMask;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

use super::call::within;
use super::error::Failure;
use super::subject::image_subject;
use super::{Error, Kind, MAX_MESSAGE, Operation, Runtime};

/// The namespace of containerd that its CRI uses.
const NAMESPACE: &str = "k8s.io";
/// The label that CRI sets on the images that it manages.
const MANAGED: (&str, &str) = ("io.cri-containerd.image", "managed");
/// The label that protects an image from every collection of unused images.
const PINNED: (&str, &str) = ("io.cri-containerd.pinned", "pinned");
/// The prefix of the labels from which containerd's garbage collection knows the children of a blob.
const REFERENCE: &str = "containerd.io/gc.ref.content.";
/// The label with the time at which a lease ends that the agent has not released.
const LEASE_ENDS: &str = "containerd.io/gc.expire";
/// The limit of queued pieces of a blob.
const QUEUE: usize = 2;

/// The store of a containerd. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Store(Connection);

/// The connection of one import or export.
#[derive(Clone, Debug)]
struct Connection {
    channel: Channel,
    endpoint: String,
    timeout: Duration,
    operation: Operation,
    subject: String,
}

/// A lease that protects new blobs from garbage collection until it is released.
#[derive(Clone, Debug)]
pub struct Lease(MetadataValue<tonic::metadata::Ascii>);

/// A blob that is being written.
#[derive(Debug)]
pub struct Writer {
    store: Store,
    requests: mpsc::Sender<content::WriteContentRequest>,
    answers: Streaming<content::WriteContentResponse>,
    written: i64,
}

/// A blob that is to be written.
#[derive(Clone, Copy, Debug)]
pub struct Blob<'a> {
    /// The name of its ingestion, unique among those in progress.
    pub reference: &'a str,
    /// Its digest; empty if the digest is known only after the last byte.
    pub digest: &'a str,
    /// Its length in bytes.
    pub size: u64,
}

impl Runtime {
    /// Returns the runtime's own store, for importing or exporting (`operation`) an image or an archive
    /// (`what`).
    ///
    /// # Errors
    /// The runtime is not containerd, or doesn't answer.
    pub async fn store(&self, operation: Operation, what: &str) -> Result<Store, Error> {
        let version = self.version().await?;
        if version.runtime_name != "containerd" {
            let name = &version.runtime_name;
            return Err(Error {
                operation,
                subject: image_subject(what),
                kind: Kind::Unimplemented,
                rpc: Failure::Answer(Status::unimplemented("unknown service")).rpc(),
                message: format!(
                    "{name} has no call for it; use the tools of {name} (for CRI-O: skopeo copy \
                     docker-archive:FILE containers-storage:NAME)"
                ),
            });
        }
        Ok(Store(Connection {
            channel: self.door.images.channel(),
            endpoint: self.door.images.path.display().to_string(),
            timeout: self.door.request_timeout,
            operation,
            subject: image_subject(what),
        }))
    }
}

impl Store {
    /// Creates a lease that protects the blobs written under it from collection, at most until `ends` (RFC
    /// 3339).
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn lease(&self, id: &str, ends: &str) -> Result<Lease, Error> {
        let labels = HashMap::from([(LEASE_ENDS.to_owned(), ends.to_owned())]);
        let request = self.0.request(leases::CreateRequest { id: id.to_owned(), labels });
        let mut client = LeasesClient::new(self.0.channel.clone());
        let made = self.0.within(client.create(request)).await?;
        let id = made.lease.unwrap_or_default().id;
        let id = id
            .parse()
            .map_err(|_| self.0.error(Failure::Answer(Status::internal("its lease has no name"))))?;
        Ok(Lease(id))
    }

    /// Releases a lease: containerd may then collect the written blobs that belong to no image.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn release(&self, lease: Lease) -> Result<(), Error> {
        let id = lease.0.to_str().unwrap_or_default().to_owned();
        let request = self.0.request(leases::DeleteRequest { id, sync: false });
        let mut client = LeasesClient::new(self.0.channel.clone());
        self.0.within(client.delete(request)).await
    }

    /// Returns the length of a blob in bytes; None if the store lacks it.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn size(&self, digest: &str) -> Result<Option<u64>, Error> {
        let request = self.0.request(content::InfoRequest { digest: digest.to_owned() });
        let answer = self.0.within(self.content().info(request)).await;
        found(answer.map(|info| u64::try_from(info.info.unwrap_or_default().size).unwrap_or_default()))
    }

    /// Returns the whole of a small blob.
    ///
    /// # Errors
    /// The blob is larger than `most` bytes, or the call fails.
    pub async fn read(&self, digest: &str, most: usize) -> Result<Vec<u8>, Error> {
        let mut pieces = self.pieces(digest).await?;
        let mut blob = Vec::new();
        while let Some(piece) = self.next(&mut pieces).await? {
            if blob.len().saturating_add(piece.len()) > most {
                let status = Status::out_of_range(format!("{digest} is larger than {most} bytes"));
                return Err(self.0.error(Failure::Answer(status)));
            }
            blob.extend(piece);
        }
        Ok(blob)
    }

    /// Begins to read a blob in pieces, with [`Store::next`].
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn pieces(&self, digest: &str) -> Result<Streaming<content::ReadContentResponse>, Error> {
        let request = content::ReadContentRequest { digest: digest.to_owned(), offset: 0, size: 0 };
        let request = self.0.request(request);
        self.0.within(self.content().read(request)).await
    }

    /// Returns the next piece of a blob; None at its end.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn next(
        &self,
        pieces: &mut Streaming<content::ReadContentResponse>,
    ) -> Result<Option<Vec<u8>>, Error> {
        let piece = self.0.answer(pieces.message()).await?;
        Ok(piece.map(|piece| piece.data))
    }

    /// Begins to write a blob with its first bytes; returns None if the store has the blob.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn write(
        &self,
        lease: &Lease,
        blob: Blob<'_>,
        first: Vec<u8>,
    ) -> Result<Option<Writer>, Error> {
        let (requests, receiver) = mpsc::channel(QUEUE);
        let begin = content::WriteContentRequest {
            action: content::WriteAction::Write.into(),
            r#ref: blob.reference.to_owned(),
            total: i64::try_from(blob.size).unwrap_or(i64::MAX),
            expected: blob.digest.to_owned(),
            data: first,
            ..Default::default()
        };
        let written = i64::try_from(begin.data.len()).unwrap_or(i64::MAX);
        let _ = requests.try_send(begin);
        let request = self.0.leased(ReceiverStream::new(receiver), lease);
        let began = self.0.within(self.content().write(request)).await;
        let Some(mut answers) = exists(began)? else { return Ok(None) };
        let answer = self.0.answer(answers.message()).await;
        let Some(_) = exists(answer)? else { return Ok(None) };
        Ok(Some(Writer { store: self.clone(), requests, answers, written }))
    }

    /// Records the children of a blob: `children` are pairs of a kind, in one word, and a digest.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn refer(&self, digest: &str, children: &[(String, String)]) -> Result<(), Error> {
        let labels: HashMap<String, String> =
            children.iter().map(|(what, child)| (format!("{REFERENCE}{what}"), child.clone())).collect();
        let paths = labels.keys().map(|label| format!("labels.{label}")).collect();
        let info = content::Info { digest: digest.to_owned(), labels, ..Default::default() };
        let request = content::UpdateRequest { info: Some(info), update_mask: Some(FieldMask { paths }) };
        let request = self.0.request(request);
        self.0.within(self.content().update(request)).await.map(drop)
    }

    /// Returns the descriptor of the image with this name; None if the store lacks the image.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn image(&self, name: &str) -> Result<Option<Descriptor>, Error> {
        let request = self.0.request(images::GetImageRequest { name: name.to_owned() });
        let answer = found(self.0.within(self.images().get(request)).await)?;
        Ok(answer.and_then(|answer| answer.image?.target))
    }

    /// Assigns a name to an image and replaces an earlier assignment. A pinned image is never removed as
    /// unused.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn name(&self, name: &str, target: Descriptor, pinned: bool) -> Result<(), Error> {
        let labels = [Some(MANAGED), pinned.then_some(PINNED)].into_iter().flatten();
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let image =
            images::Image { name: name.to_owned(), target: Some(target), labels, ..Default::default() };
        let request = images::CreateImageRequest { image: Some(image.clone()), source_date_epoch: None };
        let made = self.0.within(self.images().create(self.0.request(request))).await;
        if exists(made)?.is_some() {
            return Ok(());
        }
        let request =
            images::UpdateImageRequest { image: Some(image), update_mask: None, source_date_epoch: None };
        self.0.within(self.images().update(self.0.request(request))).await.map(drop)
    }

    fn content(&self) -> ContentClient<Channel> {
        ContentClient::new(self.0.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE)
    }

    fn images(&self) -> ImagesClient<Channel> {
        ImagesClient::new(self.0.channel.clone())
    }
}

impl Connection {
    fn request<Q>(&self, message: Q) -> Request<Q> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
        request
    }

    fn leased<Q>(&self, message: Q, lease: &Lease) -> Request<Q> {
        let mut request = self.request(message);
        request.metadata_mut().insert("containerd-lease", lease.0.clone());
        request
    }

    async fn within<A>(&self, call: impl Future<Output = Result<Response<A>, Status>>) -> Result<A, Error> {
        within(Some(self.timeout), || call).await.map_err(|failure| self.error(failure))
    }

    async fn answer<A>(&self, call: impl Future<Output = Result<A, Status>>) -> Result<A, Error> {
        self.within(async { call.await.map(Response::new) }).await
    }

    #[allow(clippy::needless_pass_by_value)] // as map_err has it
    fn error(&self, failure: Failure) -> Error {
        Error {
            operation: self.operation,
            subject: self.subject.clone(),
            kind: failure.kind(),
            message: failure.message(&self.endpoint),
            rpc: failure.rpc(),
        }
    }
}

impl Writer {
    /// Writes the next bytes of the blob.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn write(&mut self, data: Vec<u8>) -> Result<(), Error> {
        let length = i64::try_from(data.len()).unwrap_or(i64::MAX);
        let request = content::WriteContentRequest {
            action: content::WriteAction::Write.into(),
            offset: self.written,
            data,
            ..Default::default()
        };
        self.written = self.written.saturating_add(length);
        self.send(request).await.map(drop)
    }

    /// Ends the blob; the store compares it with `digest`.
    ///
    /// # Errors
    /// The blob differs from the announced one, or the call fails.
    pub async fn commit(mut self, digest: &str) -> Result<(), Error> {
        let request = content::WriteContentRequest {
            action: content::WriteAction::Commit.into(),
            offset: self.written,
            total: self.written,
            expected: digest.to_owned(),
            ..Default::default()
        };
        exists(self.send(request).await).map(drop)
    }

    async fn send(
        &mut self,
        request: content::WriteContentRequest,
    ) -> Result<content::WriteContentResponse, Error> {
        // If the receiver has ended, the answer contains the reason.
        let _ = self.requests.send(request).await;
        let answer = self.store.0.answer(self.answers.message()).await?;
        answer.ok_or_else(|| {
            self.store.0.error(Failure::Broken("containerd ended the writing of a blob".to_owned()))
        })
    }
}

fn found<A>(answer: Result<A, Error>) -> Result<Option<A>, Error> {
    match answer {
        Err(error) if error.is_not_found() => Ok(None),
        answer => answer.map(Some),
    }
}

/// Returns None if the runtime has the object already.
fn exists<A>(answer: Result<A, Error>) -> Result<Option<A>, Error> {
    match answer {
        Err(error) if error.kind == Kind::AlreadyExists => Ok(None),
        answer => answer.map(Some),
    }
}
