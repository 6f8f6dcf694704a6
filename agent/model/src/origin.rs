//! Source of a pod, from an annotation that its sandboxes carry too, so that the source is known after a
//! restart.

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::labels::{ANNOTATION_SOURCE, SOURCE_API};

/// Source that wants a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// A static manifest: only the node decides on the pod.
    #[default]
    File,
    /// The API server, which has the pod's UID, status and deletion.
    Api,
}

impl Origin {
    /// Returns the source of `pod`. The reader of the API server's pods must have set the annotation.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let annotations = pod.metadata.annotations.as_ref();
        Self::of_annotation(annotations.and_then(|all| all.get(ANNOTATION_SOURCE)).map(String::as_str))
    }

    /// Returns the origin of a value of the annotation [`ANNOTATION_SOURCE`].
    #[must_use]
    pub fn of_annotation(source: Option<&str>) -> Self {
        if source == Some(SOURCE_API) { Self::Api } else { Self::File }
    }

    /// Returns true for a pod of the API server.
    #[must_use]
    pub fn is_api(self) -> bool {
        self == Self::Api
    }
}
