//! Images from an archive into the runtime's store, without a registry: what `docker save`, `podman save`,
//! `skopeo copy`, `ctr images export` and `beelet images export` write, plain or compressed by gzip or zstd.
//!
//! The archive is read once, from front to back: blobs go to the store as they come, and what belongs
//! together is known at its end. What is in it is hostile: names, counts and what is kept in memory are
//! bounded, and nothing is written to any path. No image gets a name before all of it is there.

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

/// Most bytes of a file or blob that is read as JSON: the distribution specification lets a registry refuse
/// manifests above 4 MiB.
pub(crate) const MOST_JSON: usize = 4 << 20;
/// Most images and platforms that belong to one name.
const MOST_MANIFESTS: usize = 1000;
/// Most files and links of an archive in docker's own form.
const MOST_FILES: usize = 10_000;
/// Most links in a row.
const MOST_LINKS: usize = 8;

/// Why an archive can't be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// It is no archive, or is cut off.
    #[error("cannot read the archive: {0}")]
    Archive(#[from] ArchiveError),
    /// It can't be read.
    #[error("cannot read the archive: {0}")]
    Read(#[from] io::Error),
    /// The runtime does not take it.
    #[error(transparent)]
    Runtime(#[from] beelet_cri::Error),
    /// A file in it is not what it should be.
    #[error("{file} in the archive is not as it should be: {error}")]
    Json {
        /// Which.
        file: String,
        /// Why.
        error: serde_json::Error,
    },
    /// A file or blob that should be small is not.
    #[error("{0} in the archive is larger than {MOST_JSON} bytes")]
    Large(String),
    /// It has too many files, images or links.
    #[error("the archive has more than {0}")]
    Many(String),
    /// It is an archive of something else.
    #[error(
        "the archive holds no image: neither index.json (an OCI layout) nor manifest.json (docker save) is in it"
    )]
    NoImage,
    /// Nobody says what an image is called.
    #[error(
        "an image in the archive has no name: say --name NAME to `beelet images import`, or save it by its name"
    )]
    NoName,
    /// A name for several images.
    #[error("the archive holds {0} images: a name can be given to one alone")]
    ManyForName(usize),
    /// A name that is none.
    #[error("the name {name:?} {error}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong with it.
        error: reference::NotAReference,
    },
    /// A part of an image is not in it.
    #[error("the archive lacks {0}, which its image consists of")]
    Missing(String),
    /// It is for another kind of machine.
    #[error("the image is for {is}, this machine is {wanted}")]
    Platform {
        /// What it is for.
        is: String,
        /// What this machine is.
        wanted: String,
    },
    /// The runtime has it, and does not show it.
    #[error("the runtime took the image {0} and does not show it: see its log")]
    NotShown(String),
}

impl ImportError {
    /// Returns true if the same archive may be imported later, with nothing changed by anybody.
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
    /// The name stood for nothing, or for another image, before.
    pub is_new: bool,
}

/// Where blobs go, and what can be asked of it. Blocking.
trait Blobs {
    /// Writes a blob, unless it is there. Its digest is compared where it is known, and returned.
    fn put(&mut self, digest: Option<&str>, size: u64, content: &mut dyn Read)
    -> Result<String, ImportError>;
    /// Whether it is there.
    fn has(&mut self, digest: &str) -> Result<bool, ImportError>;
    /// A blob of at most [`MOST_JSON`] bytes.
    fn read(&mut self, digest: &str) -> Result<Vec<u8>, ImportError>;
    /// Notes what belongs to a blob, each with what it is.
    fn refer(&mut self, digest: &str, children: &[(String, String)]) -> Result<(), ImportError>;
    /// Names an image; true if the name stood for something else.
    fn name(&mut self, name: &str, target: &Descriptor) -> Result<bool, ImportError>;
}

/// What was found in an archive.
#[derive(Default)]
struct Found {
    /// Small files that say what there is.
    index: Option<Vec<u8>>,
    docker: Option<Vec<u8>>,
    /// The files of docker's own form, by name: their blobs, and what they begin with.
    files: BTreeMap<String, (Descriptor, Vec<u8>)>,
    links: BTreeMap<String, String>,
    /// The size of each blob.
    sizes: BTreeMap<String, u64>,
}

/// Reads an archive into `blobs`, and names what is in it; `name` is for the only image of it.
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
                        found.links.insert(name.clone(), beside(folder, &target));
                    }
                }
                Kind::Folder | Kind::Other => {}
            }
            if found.files.len() + found.links.len() + found.sizes.len() > MOST_FILES {
                return Err(ImportError::Many(format!("{MOST_FILES} files")));
            }
        }
        // What stands behind the archive's end is read too: whoever sends it waits for that.
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
                    blobs.put(Some(&digest), size, content)?;
                    self.sizes.insert(digest, size);
                }
                None => {
                    let mut begin = Vec::new();
                    content.take(8).read_to_end(&mut begin)?;
                    let digest = blobs.put(None, size, &mut begin.as_slice().chain(content))?;
                    self.files.insert(name, (Descriptor { digest, size, ..Descriptor::default() }, begin));
                }
            },
        }
        Ok(())
    }

    /// The images with the names that the archive gives them.
    fn images(&self, blobs: &mut dyn Blobs) -> Result<Vec<(Vec<String>, Descriptor)>, ImportError> {
        if let Some(text) = &self.index {
            let index: Index = json(INDEX, text)?;
            return Ok(index.manifests.into_iter().map(|one| (names_of(&one), one)).collect());
        }
        let text = self.docker.as_ref().ok_or(ImportError::NoImage)?;
        let images: Vec<DockerImage> = json(layout::DOCKER_MANIFEST, text)?;
        images.iter().map(|image| self.docker_image(image, blobs)).collect()
    }

    /// An image in docker's own form, with the manifest that it lacks.
    fn docker_image(
        &self,
        image: &DockerImage,
        blobs: &mut dyn Blobs,
    ) -> Result<(Vec<String>, Descriptor), ImportError> {
        let (config, _) = self.at(&image.config)?;
        let layer = |file: &String| {
            // What docker keeps as a blob of a layout is not compressed.
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
        let digest = blobs.put(None, size, &mut text.as_slice())?;
        let target = Descriptor { media_type: manifest.media_type, digest, size, ..Descriptor::default() };
        Ok((image.repo_tags.clone().unwrap_or_default(), target))
    }

    /// A file's blob, through links.
    fn at(&self, file: &str) -> Result<(Descriptor, Vec<u8>), ImportError> {
        let mut name = beside("", file);
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

/// What a link in `folder` leads to; names only, no files.
fn beside(folder: &str, target: &str) -> String {
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

/// The names that an index gives an image: a tag alone is none.
fn names_of(image: &Descriptor) -> Vec<String> {
    let full = image.annotations.get(layout::IMAGE_NAME);
    let reference = image.annotations.get(layout::REFERENCE_NAME).filter(|name| name.contains(['/', ':']));
    full.or(reference).into_iter().cloned().collect()
}

/// The images by their whole names.
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

/// Checks that all of an image is there, and notes what belongs to it. Of an index only what is there counts,
/// and one image of it has to be for this machine.
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

/// One image for one kind of machine; the inner error says why it doesn't count.
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
