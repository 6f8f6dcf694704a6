//! Errors of the conversion of a pod's spec into CRI requests.

use beelet_policy::pod::variables::TooLong;
use beelet_units::quantity::QuantityError;

/// An impossible request of a pod, or a missing object. The display is a sentence that names the field. These
/// errors are permanent until the pod, or an object that it names, changes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Unknown field of the downward API.
    #[error("fieldPath {0:?} is not known")]
    UnknownField(String),
    /// Missing address of the node.
    #[error("the node has no address")]
    NoHostIp,
    /// Unknown resource of the downward API.
    #[error("resource {0:?} is not known")]
    UnknownResource(String),
    /// Resource of an unknown container.
    #[error("resourceFieldRef: the pod has no container {0:?}")]
    NoContainer(String),
    /// Resource without a container name.
    #[error("resourceFieldRef: containerName must say whose resource is meant")]
    NoContainerName,
    /// Item of the downward API without a source.
    #[error("needs a fieldRef or a resourceFieldRef")]
    NoReference,
    /// Invalid quantity.
    #[error(transparent)]
    Amount(#[from] QuantityError),
    /// Invalid quantity of a field.
    #[error("{field}: {cause}")]
    AmountOf {
        /// Name of the field or its purpose.
        field: String,
        /// Cause.
        cause: QuantityError,
    },
    /// Unknown stop signal.
    #[error("lifecycle.stopSignal: unknown signal {0:?}")]
    StopSignal(String),
    /// Unknown kind of a variable's source.
    #[error("its source is not one that beelet knows")]
    UnknownSource,
    /// Missing ConfigMap or Secret, with the message of [`crate::env::missing`].
    #[error("{0}")]
    NoObject(String),
    /// ConfigMap or Secret without the key of a variable.
    #[error("the {kind} {name} has no key {key}")]
    NoKey {
        /// The object's kind.
        kind: &'static str,
        /// Its name.
        name: String,
        /// The key.
        key: String,
    },
    /// Container's variable without a value.
    #[error("environment variable {variable} of container {container}: {cause}")]
    Variable {
        /// The variable.
        variable: String,
        /// The container.
        container: String,
        /// Cause.
        cause: Box<Error>,
    },
    /// Value that is too long for a container.
    #[error("its value {0}")]
    TooLong(#[from] TooLong),
    /// Variables of services that are too long for a container.
    #[error(
        "the variables of services of container {container}: the last one {cause}; set enableServiceLinks: false"
    )]
    Services {
        /// The container.
        container: String,
        /// Excess of the limit.
        cause: TooLong,
    },
    /// Part of a container's command or arguments that is too long.
    #[error("{field}[{index}] of container {container} {cause}")]
    Word {
        /// `command` or `args`.
        field: &'static str,
        /// Index of the part, from 0.
        index: usize,
        /// The container.
        container: String,
        /// Excess of the limit.
        cause: TooLong,
    },
    /// Source of `envFrom` without values.
    #[error("envFrom of container {container}: {cause}")]
    EnvFrom {
        /// The container.
        container: String,
        /// Cause.
        cause: Box<Error>,
    },
    /// Host name that is too long for Linux.
    #[error(
        "failed to construct FQDN from pod hostname and cluster domain, FQDN {name} is too long ({most} characters \
         is the max, {} characters requested); shorten the pod's name or subdomain",
        .name.len()
    )]
    LongHostName {
        /// The name.
        name: String,
        /// Limit of characters.
        most: usize,
    },
    /// Container with contradictory settings for its user.
    #[error("runAsNonRoot is true, but runAsUser is 0: take one of them back")]
    Contradiction,
    /// Image that runs as root, although that is forbidden.
    #[error("runAsNonRoot is true, but the image runs as root: set runAsUser, or use another image")]
    RootImage,
    /// Image whose user may be root, although that is forbidden.
    #[error(
        "runAsNonRoot is true, and the image's user {0:?} has no number, so that it may be root: set runAsUser"
    )]
    NamedUser(String),
    /// Group policy that the runtime does not support.
    #[error("supplementalGroupsPolicy: Strict needs a runtime that has it (containerd 2.0 or newer)")]
    StrictGroups,
}
