//! Labels and annotations that connect sandboxes and containers to pods. The first group is the
//! kubelet's, so that crictl and other tools show our pods like a kubelet's, and a kubelet recognizes them.

use std::collections::HashMap;

/// Label: the pod's name.
pub const POD_NAME: &str = "io.kubernetes.pod.name";
/// Label: the pod's namespace.
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label: the pod's UID.
pub const POD_UID: &str = "io.kubernetes.pod.uid";
/// Label: the container's name in the pod's spec.
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";
/// Container annotation: a digest of the container's definition.
pub const CONTAINER_HASH: &str = "io.kubernetes.container.hash";
/// Container annotation: the restart count.
pub const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Container and sandbox annotation: the pod's grace period in seconds.
pub const GRACE_PERIOD: &str = "io.kubernetes.pod.terminationGracePeriod";
/// Container annotation: path of the termination message in the container.
pub const TERMINATION_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Container annotation: whether the log's end may replace the termination message.
pub const TERMINATION_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";

/// Label on every sandbox and container that the agent creates. The agent never touches others, except those
/// of pods that it has adopted.
pub const MANAGED_BY: &str = "beelet.dev/managed-by";
/// The value of [`MANAGED_BY`].
pub const MANAGED_BY_BEELET: &str = "beelet";
/// Sandbox annotation: the manifest's path.
pub const MANIFEST: &str = "beelet.dev/manifest";
/// Sandbox annotation: a digest of the pod without the amounts that may change while it runs.
pub const SHAPE: &str = "beelet.dev/shape";
/// Annotation of an adopted static pod: the hash that the agent derives from the pod's manifest. The pod
/// keeps the UID and the hash that a kubelet derived.
pub const MANIFEST_HASH: &str = "beelet.dev/manifest-hash";
/// Container annotation: the restart delay before this start, in whole seconds.
pub const RESTART_DELAY: &str = "beelet.dev/restart-delay-seconds";
/// Container annotation: number of restarts of all containers of the pod before this start.
pub const ROUND: &str = "beelet.dev/round";
/// Container annotation: the amounts of cpu and memory that cannot change while the container runs.
pub const AMOUNTS: &str = "beelet.dev/amounts";
/// Container annotation: the container's devices, from which a lost checkpoint is rebuilt.
pub const DEVICES: &str = "beelet.dev/devices";

/// Hash of the manifest's content for this pod; changes with the manifest even if that contains the UID.
pub const ANNOTATION_HASH: &str = "kubernetes.io/config.hash";

/// Time at which the agent first read the manifest with this content, RFC 3339.
pub const ANNOTATION_SEEN: &str = "kubernetes.io/config.seen";

/// `file` if static pods are critical, as in the kubelet; [`SOURCE_API`] for pods of the API server; else
/// absent.
pub const ANNOTATION_SOURCE: &str = "kubernetes.io/config.source";

/// The value of [`ANNOTATION_SOURCE`] for pods of the API server.
pub const SOURCE_API: &str = "api";

/// UID of the pod with the same name that this one waits for: it was deleted by force, and has not
/// ended yet.
pub const ANNOTATION_WAITS_FOR: &str = "beelet.dev/waits-for";

/// Path of the manifest. Sandboxes carry it too: see [`super::Desired::may_remove`].
pub const ANNOTATION_MANIFEST: &str = "beelet.dev/manifest";

/// Container annotation of a kubelet: the ports of the container's spec, as JSON.
pub const PORTS: &str = "io.kubernetes.container.ports";
/// Container annotation of a kubelet: the preStop hook of the container's spec, as JSON.
pub const PRE_STOP: &str = "io.kubernetes.container.preStopHandler";

/// Returns true if these are the labels of a sandbox or container that the agent created.
#[must_use]
pub fn is_own(labels: &HashMap<String, String>) -> bool {
    labels.get(MANAGED_BY).is_some_and(|by| by == MANAGED_BY_BEELET)
}
