//! Exports images from the runtime's store into an archive: an OCI layout that `beelet images import`, `ctr`,
//! `podman load` and `skopeo` read, with docker's `manifest.json` for `docker load`.

use std::collections::BTreeMap;

use beelet_cri::store::Store;
use beelet_cri::{Operation, Runtime};
use serde::Serialize;
use tar::Header;
use tokio::sync::mpsc;

use crate::import::MOST_JSON;
use crate::layout::{self, Descriptor, DockerImage, Index, Manifest, Platform};
use crate::reference;

/// Block size of a tar archive.
const BLOCK: usize = 512;

/// Error of an export.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// A call to the runtime failed.
    #[error(transparent)]
    Runtime(#[from] beelet_cri::Error),
    /// The image does not exist.
    #[error("image {0:?} not found; `beelet images ls` lists all images")]
    NotFound(String),
    /// The image has no name to export it under.
    #[error("cannot export image {0}: the image has no name")]
    NoName(String),
    /// Some layers are missing from the runtime's store.
    #[error(
        "cannot export {0}: the runtime does not store all of its layers (containerd deletes unpacked layers if \
         `discard_unpacked_layers` is true)"
    )]
    Incomplete(String),
    /// A manifest or configuration cannot be parsed.
    #[error("cannot parse the manifest {digest} of {image}: {error}")]
    Json {
        /// Name of the image.
        image: String,
        /// Digest of the manifest.
        digest: String,
        /// Cause.
        error: serde_json::Error,
    },
    /// The receiver of the archive has disconnected.
    #[error("the receiver of the archive has disconnected")]
    Closed,
}

/// Contents of the archive.
#[derive(Default)]
struct Archive {
    index: Vec<Descriptor>,
    docker: Vec<DockerImage>,
    /// Sizes of the blobs, by digest.
    blobs: BTreeMap<String, u64>,
}

/// Writes an archive of `images` (names or ids) to `out`, piece by piece. All images are checked before the
/// first piece is sent.
///
/// # Errors
/// See [`ExportError`].
pub async fn export(
    runtime: &Runtime,
    images: &[String],
    out: &mpsc::Sender<Vec<u8>>,
) -> Result<(), ExportError> {
    let store = runtime.store(Operation::ExportImage, &images.join(", ")).await?;
    let mut archive = Archive::default();
    for image in images {
        archive.add(runtime, &store, image).await?;
    }
    let index = Index { schema_version: 2, manifests: archive.index };
    let texts = [
        (layout::LAYOUT, layout::LAYOUT_TEXT.to_owned()),
        (layout::INDEX, text(&index)),
        (layout::DOCKER_MANIFEST, text(&archive.docker)),
    ];
    for (file, text) in texts {
        let mut bytes = header(file, text.len() as u64);
        bytes.extend(text.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        send(out, bytes).await?;
    }
    for (digest, size) in archive.blobs {
        send(out, header(&layout::blob_file(&digest), size)).await?;
        let mut pieces = store.pieces(&digest).await?;
        let mut sent = 0;
        while let Some(piece) = store.next(&mut pieces).await? {
            sent += piece.len() as u64;
            send(out, piece).await?;
        }
        if sent != size {
            return Err(ExportError::Incomplete(digest));
        }
        let padding = usize::try_from(size.next_multiple_of(BLOCK as u64) - size).unwrap_or_default();
        send(out, vec![0; padding]).await?;
    }
    send(out, vec![0; 2 * BLOCK]).await
}

impl Archive {
    async fn add(&mut self, runtime: &Runtime, store: &Store, image: &str) -> Result<(), ExportError> {
        let name = full_name(runtime, image).await?;
        let target = store.image(&name).await?.ok_or_else(|| ExportError::NotFound(image.to_owned()))?;
        let chosen = self.complete(store, &name, target.into()).await?;
        let mut chosen = chosen.ok_or_else(|| ExportError::Incomplete(name.clone()))?;
        let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        chosen.annotations = BTreeMap::from([
            (layout::IMAGE_NAME.to_owned(), name.clone()),
            (layout::REFERENCE_NAME.to_owned(), tag.to_owned()),
        ]);
        self.index.push(chosen);
        Ok(())
    }

    /// Adds the image that is stored completely: the first one for this machine's platform, or else any.
    async fn complete(
        &mut self,
        store: &Store,
        name: &str,
        target: Descriptor,
    ) -> Result<Option<Descriptor>, ExportError> {
        let mut waiting = vec![target];
        let mut other = None;
        // The limit stops at an endless chain of indexes, which no image of a runtime has.
        for _ in 0..1000 {
            let Some(one) = waiting.pop() else { break };
            let Some(size) = store.size(&one.digest).await? else { continue };
            let blob = store.read(&one.digest, MOST_JSON).await?;
            if one.is_index() {
                let children = parse::<Index>(name, &one.digest, &blob)?.manifests;
                waiting.extend(children.into_iter().rev());
                continue;
            }
            let manifest: Manifest = parse(name, &one.digest, &blob)?;
            let mut blobs = BTreeMap::from([(one.digest.clone(), size)]);
            let mut lacks = false;
            for part in std::iter::once(&manifest.config).chain(&manifest.layers) {
                match store.size(&part.digest).await? {
                    Some(size) => drop(blobs.insert(part.digest.clone(), size)),
                    None => lacks = true,
                }
            }
            if lacks {
                continue;
            }
            let config = store.read(&manifest.config.digest, MOST_JSON).await?;
            let platform: Platform = parse(name, &manifest.config.digest, &config)?;
            if platform == Platform::own() {
                return Ok(Some(self.add_blobs(name, one, &manifest, blobs)));
            }
            other.get_or_insert((one, manifest, blobs));
        }
        Ok(other.map(|(one, manifest, blobs)| self.add_blobs(name, one, &manifest, blobs)))
    }

    fn add_blobs(
        &mut self,
        name: &str,
        image: Descriptor,
        manifest: &Manifest,
        blobs: BTreeMap<String, u64>,
    ) -> Descriptor {
        self.blobs.extend(blobs);
        self.docker.push(DockerImage {
            config: layout::blob_file(&manifest.config.digest),
            repo_tags: Some(vec![name.to_owned()]),
            layers: manifest.layers.iter().map(|layer| layout::blob_file(&layer.digest)).collect(),
        });
        image
    }
}

/// Returns the name of an image in the store: the requested one if the store has it, otherwise the first.
async fn full_name(runtime: &Runtime, image: &str) -> Result<String, ExportError> {
    let found = runtime.images.status(image).await?.ok_or_else(|| ExportError::NotFound(image.to_owned()))?;
    let asked = reference::whole(image).ok();
    let names = || found.repo_tags.iter().chain(&found.repo_digests);
    let exact = names().find(|name| asked.as_ref() == Some(name));
    exact.or_else(|| names().next()).cloned().ok_or_else(|| ExportError::NoName(image.to_owned()))
}

fn parse<T: serde::de::DeserializeOwned>(image: &str, digest: &str, text: &[u8]) -> Result<T, ExportError> {
    serde_json::from_slice(text).map_err(|error| ExportError::Json {
        image: image.to_owned(),
        digest: digest.to_owned(),
        error,
    })
}

/// Serializes plain data, which cannot fail.
fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// The header of a file.
fn header(name: &str, size: u64) -> Vec<u8> {
    let mut header = Header::new_ustar();
    // The archive's own file names are short and plain, so tar accepts them.
    let _ = header.set_path(name);
    header.set_size(size);
    header.set_mode(0o644);
    header.set_mtime(0);
    header.set_cksum();
    header.as_bytes().to_vec()
}

async fn send(out: &mpsc::Sender<Vec<u8>>, bytes: Vec<u8>) -> Result<(), ExportError> {
    if bytes.is_empty() {
        return Ok(());
    }
    out.send(bytes).await.map_err(|_| ExportError::Closed)
}
