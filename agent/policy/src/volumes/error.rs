//! Errors of volumes.

/// A volume, a claim or a PersistentVolume that a pod cannot use, or not yet. The texts are the kubelet's
/// where the kubelet has one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// No plugin of the node supports the kind of a volume.
    #[error("{0}")]
    NoPlugin(String),
    /// The claim is being deleted.
    #[error("PVC is being deleted")]
    ClaimDeleted,
    /// The claim has no volume yet.
    #[error("PVC is not bound")]
    Unbound,
    /// The bound claim names no volume.
    #[error("PVC has empty pvc.Spec.VolumeName")]
    NoVolumeName,
    /// The claim has the name of the pod's ephemeral claim and another owner.
    #[error("PVC {namespace}/{claim} was not created for pod {namespace}/{pod} (pod is not owner)")]
    NotOwner {
        /// Namespace of both.
        namespace: String,
        /// Name of the claim.
        claim: String,
        /// Name of the pod.
        pod: String,
    },
    /// The volume is not bound to any claim.
    #[error(
        "found PV object {volume} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
    )]
    NoClaimRef {
        /// Name of the PersistentVolume.
        volume: String,
    },
    /// The volume is bound to another claim.
    #[error(
        "found PV object {volume} but its pv.Spec.ClaimRef.UID {of} does not point to claim.UID {wanted}"
    )]
    OtherClaim {
        /// Name of the PersistentVolume.
        volume: String,
        /// UID of the claim that the volume is bound to.
        of: String,
        /// UID of the pod's claim.
        wanted: String,
    },
    /// Containers use the volume in another mode than its own.
    #[error("volume {volume} has volumeMode {mode}, but is specified in {field}")]
    OtherMode {
        /// Name of the volume in the pod.
        volume: String,
        /// Mode of the PersistentVolume.
        mode: String,
        /// Field of the containers.
        field: &'static str,
    },
    /// The volume belongs to other nodes.
    #[error("no matching NodeSelectorTerms")]
    OtherNode,
    /// The volume of an in-tree kind has no form for its storage plugin.
    #[error("failed to translate in-tree pv to CSI: {0}")]
    Translation(String),
    /// A value is invalid for a network disk.
    #[error("{0}")]
    Disk(String),
    /// A flexVolume is a file system.
    #[error("a flexVolume cannot be a block device")]
    FlexBlock,
    /// A flexVolume has options of its own.
    #[error("Mount options are not supported by flexVolume")]
    FlexOptions,
    /// The output of `iscsiadm` has a malformed line.
    #[error("error: invalid iface setting: {0:?}")]
    Interface(String),
}
