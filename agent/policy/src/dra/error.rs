//! Errors of resource claims. Displayed, each is the kubelet's sentence where it has one.

use super::{MAX_DEVICES, MAX_NAMES, MAX_NAMES_OF_CLAIM, SERVICES};

/// A claim, or a driver's answer, that the agent cannot use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// A prepared device has too many requests or CDI devices.
    #[error("a device has more than {max} requests or CDI devices", max = MAX_NAMES)]
    TooManyNames,
    /// A name is too long, or has characters that no name has; its beginning.
    #[error("{0:?} is not a name")]
    BadName(String),
    /// A CDI device has an empty name.
    #[error("a CDI device has no name")]
    NamelessCdiDevice,
    /// A driver prepared this many devices for one claim.
    #[error("{0} devices exceed a claim's maximum of {max}", max = MAX_DEVICES)]
    TooManyDevices(usize),
    /// The names of a claim's devices have this many bytes together.
    #[error("the devices' names have {0} bytes, more than a claim's maximum of {max}", max = MAX_NAMES_OF_CLAIM)]
    NamesTooLong(usize),
    /// A driver names no gRPC service.
    #[error("empty list of supported gRPC services (aka supported versions)")]
    NoServices,
    /// A driver names only services that the agent does not speak; the first of them.
    #[error("none of services supported by the plugin ({0:?}) are supported here ({known:?})", known = SERVICES)]
    UnknownServices(Vec<String>),
    /// A pod's entry for a claim cannot be resolved to a claim, or not yet.
    #[error("pod \"{namespace}/{pod}\", spec.resourceClaim {entry:?}: {reason}")]
    Unresolved {
        /// The pod's namespace.
        namespace: String,
        /// The pod.
        pod: String,
        /// The name of the entry in the pod's spec.
        entry: String,
        /// The reason.
        reason: &'static str,
    },
    /// The claim has no UID, or the pod has none.
    #[error("ResourceClaim {0} has no UID")]
    NoUid(String),
    /// The claim of a template belongs to another pod.
    #[error("ResourceClaim {namespace}/{name} was not created for pod {namespace}/{pod} (pod is not owner)")]
    NotOwner {
        /// The namespace of both.
        namespace: String,
        /// The claim.
        name: String,
        /// The pod.
        pod: String,
    },
    /// The claim is not reserved for the pod.
    #[error("pod {pod} ({pod_uid}) is not allowed to use ResourceClaim {name} ({uid})")]
    NotReserved {
        /// The pod.
        pod: String,
        /// The pod's UID.
        pod_uid: String,
        /// The claim.
        name: String,
        /// The claim's UID.
        uid: String,
    },
    /// The claim is not allocated.
    #[error("ResourceClaim {0}: not allocated")]
    NotAllocated(String),
    /// Pods still use an older claim of this name.
    #[error(
        "old ResourceClaim with same name {name} and different UID {uid} still exists (previous pod force-deleted?!)"
    )]
    OlderClaim {
        /// The claims' name.
        name: String,
        /// The UID of the older one.
        uid: String,
    },
}
