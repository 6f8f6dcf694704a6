//! Why a pod's spec can't be said in the words of CRI.

use beelet_policy::pod::variables::TooLong;
use beelet_units::quantity::QuantityError;

/// What a pod asks for that can't be, or what it refers to that isn't there. Displayed, it is a sentence that
/// names the field. No such error passes by itself: the pod, or an object that it names, has to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A field of the downward API that there isn't.
    #[error("fieldPath {0:?} is not known")]
    UnknownField(String),
    /// The node's address, while the node has none.
    #[error("the node has no address")]
    NoHostIp,
    /// A resource of the downward API that there isn't.
    #[error("resource {0:?} is not known")]
    UnknownResource(String),
    /// A resource of a container that the pod doesn't have.
    #[error("resourceFieldRef: the pod has no container {0:?}")]
    NoContainer(String),
    /// A resource of no container.
    #[error("resourceFieldRef: containerName must say whose resource is meant")]
    NoContainerName,
    /// An item of the downward API without a source.
    #[error("needs a fieldRef or a resourceFieldRef")]
    NoReference,
    /// An amount that is no quantity.
    #[error(transparent)]
    Amount(#[from] QuantityError),
    /// The same, with where it stands.
    #[error("{field}: {cause}")]
    AmountOf {
        /// The field, or what it is for.
        field: String,
        /// What is wrong with its text.
        cause: QuantityError,
    },
    /// A stop signal that there isn't.
    #[error("lifecycle.stopSignal: {0:?} is no signal of Linux")]
    StopSignal(String),
    /// A variable's source of another kind than those that there are.
    #[error("its source is not one that beelet knows")]
    UnknownSource,
    /// A ConfigMap or Secret that isn't there, in the words of [`crate::env::missing`].
    #[error("{0}")]
    NoObject(String),
    /// A ConfigMap or Secret without the key that a variable names.
    #[error("the {kind} {name} has no key {key}")]
    NoKey {
        /// The object's kind.
        kind: &'static str,
        /// Its name.
        name: String,
        /// The key.
        key: String,
    },
    /// A container's variable that can't be made.
    #[error("environment variable {variable} of container {container}: {cause}")]
    Variable {
        /// The variable.
        variable: String,
        /// The container.
        container: String,
        /// Why.
        cause: Box<Error>,
    },
    /// A value that is too long for a container.
    #[error("its value {0}")]
    TooLong(#[from] TooLong),
    /// The variables of services, which are too long for a container.
    #[error(
        "the variables of services of container {container}: the last one {cause}; set enableServiceLinks: false"
    )]
    Services {
        /// The container.
        container: String,
        /// What is too long.
        cause: TooLong,
    },
    /// A part of a container's command or arguments that is too long.
    #[error("{field}[{index}] of container {container} {cause}")]
    Word {
        /// `command` or `args`.
        field: &'static str,
        /// Which one, from 0.
        index: usize,
        /// The container.
        container: String,
        /// What is too long.
        cause: TooLong,
    },
    /// Variables that a container takes as a whole and that can't be made.
    #[error("envFrom of container {container}: {cause}")]
    EnvFrom {
        /// The container.
        container: String,
        /// Why.
        cause: Box<Error>,
    },
    /// A host name that is longer than Linux takes.
    #[error(
        "failed to construct FQDN from pod hostname and cluster domain, FQDN {name} is too long ({most} characters \
         is the max, {} characters requested); shorten the pod's name or subdomain",
        .name.len()
    )]
    LongHostName {
        /// The name.
        name: String,
        /// Most characters that Linux takes.
        most: usize,
    },
    /// A container that its own pod forbids to run as it would.
    #[error("runAsNonRoot is true, but runAsUser is 0: take one of them back")]
    Contradiction,
    /// An image that runs as root where that is forbidden.
    #[error("runAsNonRoot is true, but the image runs as root: set runAsUser, or use another image")]
    RootImage,
    /// An image whose user may be root where that is forbidden.
    #[error(
        "runAsNonRoot is true, and the image's user {0:?} has no number, so that it may be root: set runAsUser"
    )]
    NamedUser(String),
    /// A policy for groups that the runtime can't follow.
    #[error("supplementalGroupsPolicy: Strict needs a runtime that has it (containerd 2.0 or newer)")]
    StrictGroups,
}
