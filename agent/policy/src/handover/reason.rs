//! The agent that takes over, and the reasons for which it does not keep a pod as it is.

use super::adopt;

/// The agent that takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// beelet, with these sources of pods.
    Beelet(adopt::Sources),
    /// A kubelet of Kubernetes 1.x.
    Kubelet {
        /// The minor version.
        minor: u32,
    },
}

/// Reason for a restart, or for the loss of a volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// The image in the pod's spec is not the one of the running container. The old agent restarts it too.
    #[error("container {0} runs another image than the pod now names; any agent restarts it")]
    OtherImage(String),
    /// An older kubelet digests the whole container.
    #[error(
        "beelet created container {0}, and kubelets before 1.31 compare a digest of the whole container, which \
         beelet does not write"
    )]
    WholeDigest(String),
    /// The digest is one that newer kubelets don't know.
    #[error(
        "the digest of container {0} is not that of kubelets since 1.31 (a beelet of an older version or a \
         kubelet before 1.31 created it), so that the kubelet restarts it"
    )]
    OldDigest(String),
    /// The file of a static pod is newer than the pod.
    #[error("the pod's manifest was changed after the pod started")]
    ManifestChanged,
    /// The kubelet would choose another UID.
    #[error(
        "the pod is static, and a kubelet derives another UID from its manifest than beelet; write the UID into the \
         manifest (metadata.uid) to keep the pod"
    )]
    OtherUid,
    /// The volumes of the pod are elsewhere.
    #[error("the next agent's folder of pods has no folder of the pod; both agents must use the same one")]
    OtherFolder,
    /// Only one sandbox may be ready.
    #[error("the pod has more than one ready sandbox; any agent replaces them")]
    ManySandboxes,
    /// The kubelet takes the amounts in force for 0.
    #[error(
        "the resizePolicy of container {0} requires a restart for new amounts, and the kubelet has no record of those in \
         force"
    )]
    UnknownAmounts(String),
    /// A resize is not finished, and only the old agent knows the amounts that it has accepted.
    #[error("a resize of the pod is not finished, and the next agent does not know the accepted amounts")]
    Resizing,
    /// The next agent makes an empty folder for each of these emptyDir volumes.
    #[error(
        "the next agent has the emptyDir volumes {0} in other folders, so that the next container of the pod that starts \
         finds them empty; save their content, pass --force and replace the pod after the change"
    )]
    EmptyDirElsewhere(String),
    /// The next agent updates other folders than the containers have.
    #[error(
        "the next agent has the volumes {0} in other folders, so that running containers see no change of their \
         ConfigMaps, Secrets and fields and no renewed token, which expires (mostly within an hour); pass --force and \
         replace the pod after the change"
    )]
    ObjectsElsewhere(String),
}
