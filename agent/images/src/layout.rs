//! JSON of image archives: OCI's image layout (github.com/opencontainers/image-spec, image-layout.md), and
//! docker's `manifest.json`, the only list in older archives.

use std::collections::BTreeMap;

use beelet_cri::store;
use serde::{Deserialize, Serialize};

/// List of an archive's images.
pub(crate) const INDEX: &str = "index.json";
/// Docker's list of an archive's images.
pub(crate) const DOCKER_MANIFEST: &str = "manifest.json";
/// File that marks an archive as an OCI layout.
pub(crate) const LAYOUT: &str = "oci-layout";
/// Content of [`LAYOUT`].
pub(crate) const LAYOUT_TEXT: &str = r#"{"imageLayoutVersion":"1.0.0"}"#;
/// Annotation with an image's full name (containerd, docker, nerdctl).
pub(crate) const IMAGE_NAME: &str = "io.containerd.image.name";
/// Annotation with an image's name or tag (the specification; podman, skopeo).
pub(crate) const REFERENCE_NAME: &str = "org.opencontainers.image.ref.name";

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Type, digest and size of a blob.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// Returns true if the blob is an index of images for several platforms.
    pub(crate) fn is_index(&self) -> bool {
        self.media_type == OCI_INDEX || self.media_type == DOCKER_LIST
    }
}

impl From<&Descriptor> for store::Descriptor {
    fn from(descriptor: &Descriptor) -> Self {
        Self {
            media_type: descriptor.media_type.clone(),
            digest: descriptor.digest.clone(),
            size: i64::try_from(descriptor.size).unwrap_or(i64::MAX),
            annotations: Default::default(),
        }
    }
}

impl From<store::Descriptor> for Descriptor {
    fn from(descriptor: store::Descriptor) -> Self {
        Self {
            media_type: descriptor.media_type,
            digest: descriptor.digest,
            size: u64::try_from(descriptor.size).unwrap_or_default(),
            annotations: BTreeMap::new(),
        }
    }
}

/// List of images.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Index {
    #[serde(default)]
    pub(crate) schema_version: u32,
    pub(crate) manifests: Vec<Descriptor>,
}

/// Image for one platform.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    #[serde(default)]
    pub(crate) schema_version: u32,
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

/// Part of an image's configuration that names its platform.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Platform {
    #[serde(default)]
    pub(crate) os: String,
    #[serde(default)]
    pub(crate) architecture: String,
}

impl Platform {
    /// Returns this machine's platform.
    pub(crate) fn own() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            "loongarch64" => "loong64",
            "powerpc64" => "ppc64le",
            other => other,
        };
        Self { os: "linux".to_owned(), architecture: architecture.to_owned() }
    }
}

impl std::fmt::Display for Platform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)
    }
}

/// Image in docker's own list.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct DockerImage {
    pub(crate) config: String,
    #[serde(default)]
    pub(crate) repo_tags: Option<Vec<String>>,
    pub(crate) layers: Vec<String>,
}

/// Returns the media type of a layer, given its first bytes.
pub(crate) fn layer_type(begin: &[u8]) -> String {
    let compression = match begin {
        [0x1f, 0x8b, ..] => "+gzip",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "+zstd",
        _ => "",
    };
    format!("{OCI_LAYER}{compression}")
}

/// Returns true if a file of the layout may have this digest: `sha256:` and 64 digits.
pub(crate) fn is_digest(digest: &str) -> bool {
    let hex = digest.strip_prefix("sha256:").unwrap_or_default();
    hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Returns the path of a blob in an archive.
pub(crate) fn blob_file(digest: &str) -> String {
    format!("blobs/{}", digest.replacen(':', "/", 1))
}

/// Returns the digest in a blob's path; None for another file.
pub(crate) fn blob_digest(file: &str) -> Option<String> {
    let digest = file.strip_prefix("blobs/")?.replacen('/', ":", 1);
    is_digest(&digest).then_some(digest)
}
