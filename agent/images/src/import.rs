//! Imports images from an archive into the runtime's store, without a registry. Archives are those of `docker
//! save`, `podman save`, `skopeo copy`, `ctr images export` and `beelet images export`, plain or compressed
//! with gzip or zstd.
//!
//! The archive is read once, from front to back: blobs are written to the store as they arrive and linked
//! into images at the end. Its content is hostile: names, counts and memory use are bounded, and no part of
//! it becomes a file of the node. An image is named only when it is complete.

mod blobs;
mod compression;

use std::collections::{BTreeMap, HashSet};
use std::io::{self, Read};

use beelet_base::archive::{self, ArchiveError, Kind, Reader};
use serde::de::DeserializeOwned;

use crate::layout::{
    self, Descriptor, DockerImage, INDEX, Index, Manifest, OCI_CONFIG, OCI_MANIFEST, Platform,
};
use crate::reference;

pub use self::blobs::{Wanted, import};

/// Maximum size of a file or blob that is parsed as JSON: the distribution specification allows registries to
/// refuse manifests above 4 MiB.
pub(crate) const MOST_JSON: usize = 4 << 20;
/// Maximum number of images and platforms under one name.
const MOST_MANIFESTS: usize = 1000;
/// Maximum number of files and links in an archive in docker's own format.
const MOST_FILES: usize = 10_000;
/// Maximum length of a chain of links.
const MOST_LINKS: usize = 8;

/// Error of an import.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file is not an archive or is truncated.
    #[error("cannot read the archive: {0}")]
    Archive(#[from] ArchiveError),
    /// The archive cannot be read.
    #[error("cannot read the archive: {0}")]
    Read(#[from] io::Error),
    /// A call to the runtime failed.
    #[error(transparent)]
    Runtime(#[from] beelet_cri::Error),
    /// A file in the archive cannot be parsed.
    #[error("cannot parse {file} in the archive: {error}")]
    Json {
        /// Name of the file.
        file: String,
        /// Cause.
        error: serde_json::Error,
    },
    /// A file or blob that is parsed as JSON is too large.
    #[error("{0} in the archive is larger than {MOST_JSON} bytes")]
    Large(String),
    /// The archive has too many files, images or links.
    #[error("the archive has more than {0}")]
    Many(String),
    /// The archive contains something else.
    #[error(
        "the archive contains no image: it has neither index.json (an OCI layout) nor manifest.json (docker save)"
    )]
    NoImage,
    /// The archive does not name an image.
    #[error(
        "an image in the archive has no name; run `beelet images import --name NAME`, or save the image by its name"
    )]
    NoName,
    /// A single name for several images.
    #[error("`--name` needs an archive with one image; this one has {0}")]
    ManyForName(usize),
    /// The name is invalid.
    #[error("the name {name:?} {error}")]
    BadName {
        /// The name.
        name: String,
        /// Fault of the name.
        error: reference::NotAReference,
    },
    /// A part of an image is missing.
    #[error("the archive lacks {0}, which is part of its image")]
    Missing(String),
    /// The image is for another platform.
    #[error("the image is for {is}, this machine is {wanted}")]
    Platform {
        /// Platform of the image.
        is: String,
        /// Platform of this machine.
        wanted: String,
    },
    /// The runtime stored the image but does not list it.
    #[error("the runtime stored the image {0} but does not list it; see the runtime's log")]
    NotShown(String),
}

impl ImportError {
    /// Returns true if a later import of the same archive may succeed without any change by a user.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Runtime(error) if error.is_transient())
    }
}

/// An image that was imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Its whole name.
    pub name: String,
    /// The name is new, or denoted another image before.
    pub is_new: bool,
}

/// Blocking access to the store that receives the blobs.
trait Blobs {
    /// Writes a blob unless it exists. Verifies the digest if it is given, and returns it.
    fn write(
        &mut self,
        digest: Option<&str>,
        size: u64,
        content: &mut dyn Read,
    ) -> Result<String, ImportError>;
    /// Returns true if the blob exists.
    fn has(&mut self, digest: &str) -> Result<bool, ImportError>;
    /// Reads a blob of at most [`MOST_JSON`] bytes.
    fn read(&mut self, digest: &str) -> Result<Vec<u8>, ImportError>;
    /// Records the children of a blob, each with its role.
    fn refer(&mut self, digest: &str, children: &[(String, String)]) -> Result<(), ImportError>;
    /// Names an image; returns true if the name is new or denoted another image.
    fn name(&mut self, name: &str, target: &Descriptor) -> Result<bool, ImportError>;
}

/// Contents of an archive.
#[derive(Default)]
struct Found {
    /// JSON files that list the images.
    index: Option<Vec<u8>>,
    docker: Option<Vec<u8>>,
    /// Files in docker's own format, by name: their blobs and first bytes.
    files: BTreeMap<String, (Descriptor, Vec<u8>)>,
    links: BTreeMap<String, String>,
    /// Sizes of the blobs, by digest.
    sizes: BTreeMap<String, u64>,
}

/// Reads an archive into `blobs` and names its images; `name` applies to its only image.
fn read(
    archive: impl Read,
    name: Option<&str>,
    platform: &Platform,
    blobs: &mut dyn Blobs,
) -> Result<Vec<Imported>, ImportError> {
    let found = Found::read(archive, blobs)?;
    let images = found.images(blobs)?;
    let targets = named(images, name)?;
    for target in targets.values() {
        complete(target, platform, blobs)?;
    }
    let mut imported = Vec::new();
    for (name, target) in targets {
        let is_new = blobs.name(&name, &target)?;
        imported.push(Imported { name, is_new });
    }
    Ok(imported)
}

impl Found {
    fn read(archive: impl Read, blobs: &mut dyn Blobs) -> Result<Self, ImportError> {
        let mut found = Self::default();
        let mut reader = Reader::new(archive);
        while let Some(member) = reader.next_member()? {
            let Some(parts) = archive::parts(&member.name) else { continue };
            let Ok(name) = String::from_utf8(parts.join(&b'/')) else { continue };
            match member.kind {
                Kind::File => found.file(name, member.size, &mut reader, blobs)?,
                Kind::Link(target) | Kind::HardLink(target) => {
                    let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
                    if let Ok(target) = String::from_utf8(target) {
                        found.links.insert(name.clone(), resolve(folder, &target));
                    }
                }
                Kind::Folder | Kind::Other => {}
            }
            if found.files.len() + found.links.len() + found.sizes.len() > MOST_FILES {
                return Err(ImportError::Many(format!("{MOST_FILES} files")));
            }
        }
        // Bytes after the archive's end are read too: the sender waits for that.
        io::copy(&mut reader.into_inner(), &mut io::sink())?;
        Ok(found)
    }

    fn file(
        &mut self,
        name: String,
        size: u64,
        content: &mut dyn Read,
        blobs: &mut dyn Blobs,
    ) -> Result<(), ImportError> {
        match name.as_str() {
            INDEX => self.index = Some(small(&name, content)?),
            layout::DOCKER_MANIFEST => self.docker = Some(small(&name, content)?),
            layout::LAYOUT => {}
            _ => match layout::blob_digest(&name) {
                Some(digest) => {
                    blobs.write(Some(&digest), size, content)?;
                    self.sizes.insert(digest, size);
                }
                None => {
                    let mut begin = Vec::new();
                    content.take(8).read_to_end(&mut begin)?;
                    let digest = blobs.write(None, size, &mut begin.as_slice().chain(content))?;
                    self.files.insert(name, (Descriptor { digest, size, ..Descriptor::default() }, begin));
                }
            },
        }
        Ok(())
    }

    /// Returns the images with the names in the archive.
    fn images(&self, blobs: &mut dyn Blobs) -> Result<Vec<(Vec<String>, Descriptor)>, ImportError> {
        if let Some(text) = &self.index {
            let index: Index = json(INDEX, text)?;
            return Ok(index.manifests.into_iter().map(|one| (names_of(&one), one)).collect());
        }
        let text = self.docker.as_ref().ok_or(ImportError::NoImage)?;
        let images: Vec<DockerImage> = json(layout::DOCKER_MANIFEST, text)?;
        images.iter().map(|image| self.docker_image(image, blobs)).collect()
    }

    /// Creates the manifest that an image in docker's own format lacks.
    fn docker_image(
        &self,
        image: &DockerImage,
        blobs: &mut dyn Blobs,
    ) -> Result<(Vec<String>, Descriptor), ImportError> {
        let (config, _) = self.at(&image.config)?;
        let layer = |file: &String| {
            // A layer that docker stores as a blob of a layout is not compressed.
            let (blob, begin) = self.at(file)?;
            Ok(Descriptor { media_type: layout::layer_type(&begin), ..blob })
        };
        let manifest = Manifest {
            schema_version: 2,
            media_type: OCI_MANIFEST.to_owned(),
            config: Descriptor { media_type: OCI_CONFIG.to_owned(), ..config },
            layers: image.layers.iter().map(layer).collect::<Result<_, ImportError>>()?,
        };
        let text = serde_json::to_vec(&manifest).map_err(|error| bad(layout::DOCKER_MANIFEST, error))?;
        let size = text.len() as u64;
        let digest = blobs.write(None, size, &mut text.as_slice())?;
        let target = Descriptor { media_type: manifest.media_type, digest, size, ..Descriptor::default() };
        Ok((image.repo_tags.clone().unwrap_or_default(), target))
    }

    /// Returns the blob of a file, following links.
    fn at(&self, file: &str) -> Result<(Descriptor, Vec<u8>), ImportError> {
        let mut name = resolve("", file);
        for _ in 0..MOST_LINKS {
            if let Some(found) = self.files.get(&name) {
                return Ok(found.clone());
            }
            if let Some(digest) = layout::blob_digest(&name) {
                let missing = || ImportError::Missing(digest.clone());
                let size = *self.sizes.get(&digest).ok_or_else(missing)?;
                return Ok((Descriptor { digest, size, ..Descriptor::default() }, Vec::new()));
            }
            match self.links.get(&name) {
                Some(target) => name.clone_from(target),
                None => break,
            }
        }
        Err(ImportError::Missing(file.to_owned()))
    }
}

/// Resolves a link in `folder` to a name in the archive, without touching any file.
fn resolve(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = if target.starts_with('/') { Vec::new() } else { folder.split('/').collect() };
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.retain(|part| !part.is_empty());
    parts.join("/")
}

/// Returns the names that an index gives to an image. A bare tag is not a name.
fn names_of(image: &Descriptor) -> Vec<String> {
    let full = image.annotations.get(layout::IMAGE_NAME);
    let reference = image.annotations.get(layout::REFERENCE_NAME).filter(|name| name.contains(['/', ':']));
    full.or(reference).into_iter().cloned().collect()
}

/// Maps full names to images.
fn named(
    images: Vec<(Vec<String>, Descriptor)>,
    name: Option<&str>,
) -> Result<BTreeMap<String, Descriptor>, ImportError> {
    if images.is_empty() {
        return Err(ImportError::NoImage);
    }
    if images.len() > MOST_MANIFESTS {
        return Err(ImportError::Many(format!("{MOST_MANIFESTS} images")));
    }
    let whole = |name: &str| {
        reference::whole(name).map_err(|error| ImportError::BadName { name: name.to_owned(), error })
    };
    let mut targets = BTreeMap::new();
    if let Some(name) = name {
        let mut different: Vec<&Descriptor> = images.iter().map(|(_, image)| image).collect();
        different.dedup_by(|a, b| a.digest == b.digest);
        let [image] = different.as_slice() else { return Err(ImportError::ManyForName(different.len())) };
        targets.insert(whole(name)?, (*image).clone());
        return Ok(targets);
    }
    for (names, image) in images {
        if names.is_empty() {
            return Err(ImportError::NoName);
        }
        for name in names {
            targets.insert(whole(&name)?, image.clone());
        }
    }
    Ok(targets)
}

/// Checks that an image is complete and records its parts. An index may be incomplete, but must contain a
/// complete image for this machine.
fn complete(target: &Descriptor, platform: &Platform, blobs: &mut dyn Blobs) -> Result<(), ImportError> {
    let mut waiting = vec![target.clone()];
    let mut seen = HashSet::new();
    let mut fits = false;
    let mut trouble = None;
    while let Some(one) = waiting.pop() {
        if !seen.insert(one.digest.clone()) {
            continue;
        }
        if seen.len() > MOST_MANIFESTS {
            return Err(ImportError::Many(format!("{MOST_MANIFESTS} images of one name")));
        }
        if !layout::is_digest(&one.digest) || !blobs.has(&one.digest)? {
            trouble.get_or_insert(ImportError::Missing(one.digest));
            continue;
        }
        let text = blobs.read(&one.digest)?;
        if one.is_index() || (one.media_type.is_empty() && is_index(&text)) {
            let children = json::<Index>(&one.digest, &text)?.manifests;
            let mut references = Vec::new();
            for (number, child) in children.iter().enumerate().take(MOST_MANIFESTS) {
                if layout::is_digest(&child.digest) && blobs.has(&child.digest)? {
                    references.push((format!("m.{number}"), child.digest.clone()));
                }
            }
            blobs.refer(&one.digest, &references)?;
            waiting.extend(children.into_iter().take(MOST_MANIFESTS));
            continue;
        }
        match manifest(&one, &text, platform, blobs)? {
            Ok(()) => fits = true,
            Err(why) => {
                trouble.get_or_insert(why);
            }
        }
    }
    if fits { Ok(()) } else { Err(trouble.unwrap_or(ImportError::NoImage)) }
}

/// Checks one image for one platform; the inner error says why the image is unusable.
fn manifest(
    one: &Descriptor,
    text: &[u8],
    platform: &Platform,
    blobs: &mut dyn Blobs,
) -> Result<Result<(), ImportError>, ImportError> {
    let manifest: Manifest = json(&one.digest, text)?;
    let layers = manifest.layers.iter().enumerate();
    let layers = layers.map(|(number, layer)| (format!("l.{number}"), layer.digest.clone()));
    let config = ("config".to_owned(), manifest.config.digest.clone());
    let references: Vec<(String, String)> = std::iter::once(config).chain(layers).collect();
    for (_, digest) in &references {
        if !layout::is_digest(digest) || !blobs.has(digest)? {
            return Ok(Err(ImportError::Missing(digest.clone())));
        }
    }
    blobs.refer(&one.digest, &references)?;
    let is: Platform = json(&manifest.config.digest, &blobs.read(&manifest.config.digest)?)?;
    if is == *platform {
        return Ok(Ok(()));
    }
    Ok(Err(ImportError::Platform { is: is.to_string(), wanted: platform.to_string() }))
}

fn is_index(text: &[u8]) -> bool {
    serde_json::from_slice::<Index>(text).is_ok()
}

fn small(name: &str, content: &mut dyn Read) -> Result<Vec<u8>, ImportError> {
    let mut text = Vec::new();
    content.take(MOST_JSON as u64 + 1).read_to_end(&mut text)?;
    if text.len() > MOST_JSON { Err(ImportError::Large(name.to_owned())) } else { Ok(text) }
}

fn json<T: DeserializeOwned>(file: &str, text: &[u8]) -> Result<T, ImportError> {
    serde_json::from_slice(text).map_err(|error| bad(file, error))
}

fn bad(file: &str, error: serde_json::Error) -> ImportError {
    ImportError::Json { file: file.to_owned(), error }
}

#[cfg(test)]
mod tests;
