//! The labels and annotations that tie sandboxes and containers to pods. The first group is the
//! kubelet's, so that crictl and every other tool shows our pods as it shows a kubelet's.

/// Label: the pod's name.
pub const POD_NAME: &str = "io.kubernetes.pod.name";
/// Label: the pod's namespace.
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label: the pod's UID.
pub const POD_UID: &str = "io.kubernetes.pod.uid";
/// Label: the container's name in the pod's spec.
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";
/// Container annotation: a digest of what it was made from.
pub const CONTAINER_HASH: &str = "io.kubernetes.container.hash";
/// Container annotation: the restart count.
pub const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Container and sandbox annotation: seconds a pod gets to end by itself.
pub const GRACE_PERIOD: &str = "io.kubernetes.pod.terminationGracePeriod";
/// Container annotation: where in the container its last words are.
pub const TERMINATION_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Container annotation: whether the log's end will do for them.
pub const TERMINATION_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";

/// Label on everything the agent creates. Nothing without it is ever touched.
pub const MANAGED_BY: &str = "beelet.dev/managed-by";
/// The value of [`MANAGED_BY`].
pub const MANAGED_BY_BEELET: &str = "beelet";
/// Sandbox annotation: the manifest's path.
pub const MANIFEST: &str = "beelet.dev/manifest";
/// Sandbox annotation: a digest of the pod without the amounts that may change while it runs.
pub const SHAPE: &str = "beelet.dev/shape";
/// Container annotation: the restart delay in whole seconds that went before this start.
pub const RESTART_DELAY: &str = "beelet.dev/restart-delay-seconds";
/// Container annotation: how often all containers of the pod had been restarted together before this start.
pub const ROUND: &str = "beelet.dev/round";
/// Container annotation: its amounts of cpu and memory that can't change while it runs.
pub const AMOUNTS: &str = "beelet.dev/amounts";
/// Container annotation: the devices it was given, from which a lost checkpoint is rebuilt.
pub const DEVICES: &str = "beelet.dev/devices";

/// What the manifest said when it became this pod; changes with the manifest even where the UID is written in
/// it.
pub const ANNOTATION_HASH: &str = "kubernetes.io/config.hash";

/// When the agent first read the manifest with this content, RFC 3339.
pub const ANNOTATION_SEEN: &str = "kubernetes.io/config.seen";

/// `file` where static pods are to be critical, as they are to the kubelet; [`SOURCE_API`] for pods of the
/// API server; else absent.
pub const ANNOTATION_SOURCE: &str = "kubernetes.io/config.source";

/// The value of [`ANNOTATION_SOURCE`] for pods of the API server.
pub const SOURCE_API: &str = "api";

/// The UID of the pod of the same name that this one waits for: that one was deleted by force, and has not
/// gone yet.
pub const ANNOTATION_WAITS_FOR: &str = "beelet.dev/waits-for";

/// The manifest's path. Sandboxes carry it too: see [`super::Desired::may_remove`].
pub const ANNOTATION_MANIFEST: &str = "beelet.dev/manifest";
