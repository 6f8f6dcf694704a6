//! Adoption: which pods of a kubelet the agent takes over at its start.
//!
//! The agent touches nothing without the label of an agent. Adoption must be requested, and a source of the
//! agent must be able to name the pod: otherwise the next step would be to stop the pod.

use super::found::{Found, Maker, Source};

/// The sources of pods that the agent has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// An API server.
    pub api: bool,
    /// A folder of static manifests.
    pub manifests: bool,
}

/// The agent's decision about a pod of the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Adoption {
    /// The agent created all of the pod.
    Own,
    /// The agent takes the pod over.
    Adopted,
    /// The agent never touches the pod.
    LeftAlone(LeftAlone),
    /// A kubelet and the agent created parts of the pod. Without adoption the agent would start the kubelet's
    /// containers a second time, so the agent must not start.
    Divided,
}

/// Reason why the agent leaves a pod of a kubelet alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeftAlone {
    /// Adoption is not requested.
    #[error("the agent runs without --adopt")]
    NotRequested,
    /// The agent could not know whether the pod is still wanted.
    #[error("the pod is the API server's, and the agent runs without --kubeconfig")]
    NoApiServer,
    /// The agent could not know whether the pod is still wanted.
    #[error("the pod is static, and the configuration has no staticPodPath")]
    NoManifests,
    /// The agent has no source of this kind.
    #[error("the pod's source is neither the API server nor a file")]
    UnknownSource,
}

/// Decides on a pod of the runtime. `requested` is true if the agent was started to adopt pods, or had
/// adopted this pod before.
#[must_use]
pub fn adoption(found: &Found, requested: bool, sources: Sources) -> Adoption {
    if !found.has_any_of(Maker::Kubelet) {
        return Adoption::Own;
    }
    let has_own = found.has_any_of(Maker::Beelet);
    if !requested {
        let is_divided = has_own && found.runs();
        return if is_divided { Adoption::Divided } else { Adoption::LeftAlone(LeftAlone::NotRequested) };
    }
    let why = match found.source {
        // The agent ran the pod before, and so it has the pod's source.
        _ if has_own => return Adoption::Adopted,
        Source::Api if sources.api => return Adoption::Adopted,
        Source::File if sources.manifests => return Adoption::Adopted,
        Source::Api => LeftAlone::NoApiServer,
        Source::File => LeftAlone::NoManifests,
        Source::Unnamed | Source::Other => LeftAlone::UnknownSource,
    };
    Adoption::LeftAlone(why)
}

/// Returns true if the static pod with a sandbox of this age runs the current content of its manifest, which
/// changed last at `changed`, by the file's ctime (both in nanoseconds since the epoch). The kubelet's digest
/// of a manifest covers Go's in-memory form, which the agent cannot compute. But a kubelet creates a new
/// sandbox for any new content, so a sandbox that is newer than the file has the file's content.
#[must_use]
pub fn is_same_manifest(changed: Option<i64>, sandbox_created: i64) -> bool {
    changed.is_some_and(|changed| changed <= sandbox_created)
}
