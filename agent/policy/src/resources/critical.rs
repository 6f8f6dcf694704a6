//! Which pods are critical, and who may preempt whom (`pkg/kubelet/types/pod_update.go` of the kubelet).
//!
//! Every decision that spares or favours critical pods asks here. Must never look at anything but the two
//! pods.

use k8s_openapi::api::core::v1::Pod;

/// The priority from which on a pod is critical (`scheduling.SystemCriticalPriority`).
pub(crate) const SYSTEM_CRITICAL_PRIORITY: i32 = 2_000_000_000;

const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

/// A pod that did not come from the API server, by its annotation.
pub fn is_static(pod: &Pod) -> bool {
    annotation(pod, CONFIG_SOURCE).is_some_and(|source| source != "api")
}

/// The API server's image of a static pod.
pub fn is_mirror(pod: &Pod) -> bool {
    annotation(pod, CONFIG_MIRROR).is_some()
}

/// A pod's priority; 0 if it has none.
pub fn priority(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)
}

/// Static pods, mirror pods and pods of a system priority are critical: they are admitted even where others
/// must go.
pub fn is_critical(pod: &Pod) -> bool {
    is_static(pod) || is_mirror(pod) || priority(pod) >= SYSTEM_CRITICAL_PRIORITY
}

/// May `preemptor` take the place of `victim`? A critical pod may take a non-critical one's, and a pod of
/// higher priority one of lower priority, if both have one.
pub(crate) fn may_preempt(preemptor: &Pod, victim: &Pod) -> bool {
    let own = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.priority);
    (is_critical(preemptor) && !is_critical(victim))
        || own(preemptor).zip(own(victim)).is_some_and(|(ours, theirs)| ours > theirs)
}

fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}
