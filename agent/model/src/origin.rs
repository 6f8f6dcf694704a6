//! Where a pod comes from. Its annotation says it, and its sandboxes carry that annotation: it is known after
//! a restart too.

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::labels::{ANNOTATION_SOURCE, SOURCE_API};

/// The source that wants a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// A static manifest: the node alone decides on it.
    #[default]
    File,
    /// The API server, where it has a UID, a status and an end of its own.
    Api,
}

impl Origin {
    /// The source of `pod`. A source of pods that reads them from the API server must have set the
    /// annotation.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let annotations = pod.metadata.annotations.as_ref();
        Self::of_annotation(annotations.and_then(|all| all.get(ANNOTATION_SOURCE)).map(String::as_str))
    }

    /// The origin that the annotation [`ANNOTATION_SOURCE`] says.
    #[must_use]
    pub fn of_annotation(source: Option<&str>) -> Self {
        if source == Some(SOURCE_API) { Self::Api } else { Self::File }
    }

    /// Returns true if the API server wants it.
    #[must_use]
    pub fn is_api(self) -> bool {
        self == Self::Api
    }
}
