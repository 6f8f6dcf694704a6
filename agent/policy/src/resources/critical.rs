//! Critical pods, and the right to preempt others (`pkg/kubelet/types/pod_update.go` of the kubelet).
//!
//! Every decision that spares or favours critical pods uses this module. Must never consider anything but the
//! two pods.

use k8s_openapi::api::core::v1::Pod;

/// The minimum priority of a critical pod (`scheduling.SystemCriticalPriority`).
pub(crate) const SYSTEM_CRITICAL_PRIORITY: i32 = 2_000_000_000;

const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

/// Returns true for a pod that did not come from the API server, by its annotation.
pub fn is_static(pod: &Pod) -> bool {
    annotation(pod, CONFIG_SOURCE).is_some_and(|source| source != "api")
}

/// Returns true for the API server's image of a static pod.
pub fn is_mirror(pod: &Pod) -> bool {
    annotation(pod, CONFIG_MIRROR).is_some()
}

/// Returns a pod's priority; 0 if it has none.
pub fn priority(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)
}

/// Returns true for static pods, mirror pods and pods of a system priority: they are admitted even if others
/// must be evicted.
pub fn is_critical(pod: &Pod) -> bool {
    is_static(pod) || is_mirror(pod) || priority(pod) >= SYSTEM_CRITICAL_PRIORITY
}

/// Returns true if `preemptor` may replace `victim`: a critical pod may replace a non-critical one, and a pod
/// of higher priority one of lower priority, if both have one.
pub(crate) fn may_preempt(preemptor: &Pod, victim: &Pod) -> bool {
    let own = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.priority);
    (is_critical(preemptor) && !is_critical(victim))
        || own(preemptor).zip(own(victim)).is_some_and(|(ours, theirs)| ours > theirs)
}

fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}
