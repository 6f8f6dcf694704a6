//! In-place changes: pods that change only their cpu and memory, or their containers', keep running with new
//! amounts (KEP-1287, KEP-5419), and so do pods that change only their probes (KEP-6318).
//!
//! A changed manifest is another pod, with another UID. Its [`shape`] shows whether it is the running pod
//! with other amounts: a digest of all other fields, which the sandbox carries as an annotation, so that a
//! restart of the agent during a resize changes nothing. Pure.

use std::{collections::BTreeMap, fmt::Write as _};

use beelet_codec::ApiType as _;
use beelet_policy::{probe::settings, resources::qos::qos_class};
use k8s_openapi::{
    api::core::v1::{Container, Pod, PodStatus, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use beelet_model::{
    labels::{ANNOTATION_HASH, ANNOTATION_SEEN, MANIFEST_HASH},
    status::runtime_id,
};

/// Resources that may change.
const RESIZABLE: [&str; 2] = ["cpu", "memory"];

/// Condition of a pod whose new amounts are not in force in all of its containers.
pub const IN_PROGRESS: &str = "PodResizeInProgress";
/// Condition of a pod that cannot have the amounts of its manifest.
pub const PENDING: &str = "PodResizePending";

/// Progress of a running pod's resize.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResizeFacts {
    /// Reason for keeping the old amounts.
    pub pending: Option<Pending>,
    /// Reason why accepted amounts are not in force yet, if known.
    pub error: Option<String>,
}

/// Reason why a pod cannot have the amounts of its manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pending {
    /// `Deferred` until another pod ends, or `Infeasible` on this node.
    pub reason: &'static str,
    /// Message, a sentence.
    pub message: String,
}

/// Returns a container's amounts for a status, as in its manifest; None if it has none.
pub fn amounts(container: &Container) -> Option<ResourceRequirements> {
    named(container.resources.as_ref()?)
}

/// Returns the amounts of the pod as a whole (KEP-2837).
pub fn pod_amounts(pod: &Pod) -> Option<ResourceRequirements> {
    named(pod.spec.as_ref()?.resources.as_ref()?)
}

fn named(resources: &ResourceRequirements) -> Option<ResourceRequirements> {
    let some = |list: &Option<BTreeMap<String, Quantity>>| list.clone().filter(|list| !list.is_empty());
    let (requests, limits) = (some(&resources.requests), some(&resources.limits));
    (requests.is_some() || limits.is_some()).then(|| ResourceRequirements {
        requests,
        limits,
        ..Default::default()
    })
}

/// Returns true if two states of one pod request the same amounts.
pub fn same_amounts(one: &Pod, other: &Pod) -> bool {
    let amounts = |pod: &Pod| -> Vec<_> { containers(pod).map(|c| (c.name.clone(), amounts(c))).collect() };
    amounts(one) == amounts(other) && pod_amounts(one) == pod_amounts(other)
}

/// Accepted resources of a pod and its containers: the desired ones may exceed the room.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Accepted {
    /// Resources of the pod as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod: Option<ResourceRequirements>,
    /// Resources by container.
    containers: BTreeMap<String, Option<ResourceRequirements>>,
}

impl Accepted {
    /// Returns the resources of `pod`.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        Self {
            pod: pod.spec.as_ref().and_then(|spec| spec.resources.clone()),
            containers: containers(pod).map(|c| (c.name.clone(), c.resources.clone())).collect(),
        }
    }

    /// Sets the resources of `pod`.
    pub fn apply_to(&self, pod: &mut Pod) {
        let Some(spec) = &mut pod.spec else { return };
        spec.resources.clone_from(&self.pod);
        for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
            if let Some(resources) = self.containers.get(&container.name) {
                container.resources.clone_from(resources);
            }
        }
    }
}

/// Copies the amounts of `other` and its containers to `pod` and its containers.
pub fn copy_amounts(pod: &mut Pod, other: &Pod) {
    Accepted::of(other).apply_to(pod);
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

/// Returns true if a pod's status has amounts that are not in force yet.
pub fn is_in_progress(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == IN_PROGRESS && condition.status == "True")
}

/// Returns the reason for which a pod's resize waits, if it does.
#[must_use]
pub fn pending_reason(pod: &Pod) -> Option<&str> {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let pending = conditions.find(|condition| condition.type_ == PENDING && condition.status == "True");
    pending?.reason.as_deref()
}

/// Records the amounts in force: of the pod as a whole by its `uid`, of containers by the runtime's
/// identifiers.
pub fn enact(status: &mut PodStatus, uid: &str, enacted: &BTreeMap<String, Option<ResourceRequirements>>) {
    if let Some(amounts) = enacted.get(uid) {
        status.resources.clone_from(amounts);
    }
    let all = status.init_container_statuses.iter_mut().chain(&mut status.container_statuses);
    for container in all.flatten() {
        if let Some(amounts) = runtime_id(container).and_then(|id| enacted.get(id)) {
            container.resources.clone_from(amounts);
        }
    }
}

/// Copies the probes of `other`, another state of the same pod, and their annotations to `pod`.
pub fn copy_probes(pod: &mut Pod, other: &Pod) {
    if let Some(annotations) = &mut pod.metadata.annotations {
        annotations.retain(|key, _| !settings::is_of_probes(key));
    }
    for (key, value) in
        other.metadata.annotations.iter().flatten().filter(|(key, _)| settings::is_of_probes(key))
    {
        pod.metadata.annotations.get_or_insert_default().insert(key.clone(), value.clone());
    }
    let Some(spec) = &mut pod.spec else { return };
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        if let Some(new) = containers(other).find(|new| new.name == container.name) {
            container.liveness_probe.clone_from(&new.liveness_probe);
            container.readiness_probe.clone_from(&new.readiness_probe);
            container.startup_probe.clone_from(&new.startup_probe);
        }
    }
}

/// Computes a digest of a pod without the parts that may change while it runs: its probes; cpu and memory of
/// its containers, which restart for a change if their `resizePolicy` requires it. The QoS class may not
/// change, and no amount may be added or removed.
pub fn shape(pod: &Pod) -> String {
    let class = qos_class(pod).map(beelet_policy::resources::qos::QosClass::as_str).unwrap_or_default();
    let mut rest = pod.clone();
    rest.status = None;
    // The manifest's identity and reading time follow from its content.
    rest.metadata.uid = None;
    rest.metadata.deletion_timestamp = None;
    rest.metadata.deletion_grace_period_seconds = None;
    if let Some(annotations) = &mut rest.metadata.annotations {
        annotations.retain(|key, _| {
            ![ANNOTATION_HASH, ANNOTATION_SEEN, MANIFEST_HASH].contains(&key.as_str())
                && !settings::is_of_probes(key)
        });
        if annotations.is_empty() {
            rest.metadata.annotations = None;
        }
    }
    if let Some(spec) = &mut rest.spec {
        // The priority has another source, and its change does not replace the pod.
        spec.priority = None;
        // Ephemeral containers are added to a running pod.
        spec.ephemeral_containers = None;
        blank(&mut spec.resources);
        let containers = spec.init_containers.iter_mut().flatten().chain(&mut spec.containers);
        for container in containers {
            blank(&mut container.resources);
            (container.liveness_probe, container.readiness_probe, container.startup_probe) =
                (None, None, None);
        }
    }
    let digest = Sha256::new().chain_update(class).chain_update(rest.to_json()).finalize();
    digest[..16].iter().fold(String::with_capacity(32), |mut text, byte| {
        // Writing to a String can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Removes the amounts that may change.
fn blank(resources: &mut Option<ResourceRequirements>) {
    let Some(ResourceRequirements { requests, limits, .. }) = resources else { return };
    for (name, amount) in requests.iter_mut().flatten().chain(limits.iter_mut().flatten()) {
        if RESIZABLE.contains(&name.as_str()) {
            *amount = Quantity(String::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(change: impl FnOnce(&mut Value)) -> Pod {
        let mut pod = json!({
            "metadata": {"name": "a", "namespace": "default", "uid": "1", "annotations": {ANNOTATION_HASH: "1"}},
            "spec": {"containers": [{"name": "main", "image": "x", "resources": {
                "requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "128Mi"},
            }}]},
        });
        change(&mut pod);
        serde_json::from_value(pod).unwrap()
    }

    #[track_caller]
    fn check(same: bool, what: &str, change: impl FnOnce(&mut Value)) {
        assert_eq!(shape(&pod(|_| {})) == shape(&pod(change)), same, "{what}");
    }

    fn resources(pod: &mut Value) -> &mut Value {
        &mut pod["spec"]["containers"][0]["resources"]
    }

    #[test]
    fn other_amounts_of_cpu_and_memory_are_the_same_pod() {
        check(true, "a request", |pod| resources(pod)["requests"]["cpu"] = json!("200m"));
        check(true, "a limit", |pod| resources(pod)["limits"]["memory"] = json!("256Mi"));
        let whole = |cpu: &str| {
            shape(&pod(|pod| pod["spec"]["resources"] = json!({"limits": {"cpu": cpu, "memory": "1Gi"}})))
        };
        assert_eq!(whole("2"), whole("3"));
        check(true, "the manifest's identity", |pod| {
            pod["metadata"]["uid"] = json!("2");
            pod["metadata"]["annotations"][ANNOTATION_HASH] = json!("2");
            pod["spec"]["priority"] = json!(7);
        });
        check(true, "a probe", |pod| {
            pod["spec"]["containers"][0]["livenessProbe"] = json!({"tcpSocket": {"port": 80}});
            pod["metadata"]["annotations"]["beelet.dev/probes"] = json!("period=1s");
        });
        check(true, "a debugger", |pod| pod["spec"]["ephemeralContainers"] = json!([{"name": "debugger"}]));
    }

    #[test]
    fn accepted_amounts_are_kept_as_text_and_given_to_the_pod_that_wants_others() {
        let whole = json!({"limits": {"cpu": "2"}});
        let accepted = Accepted::of(&pod(|pod| pod["spec"]["resources"] = whole.clone()));
        let text = serde_json::to_string(&accepted).unwrap();
        let kept: Accepted = serde_json::from_str(&text).unwrap();
        assert_eq!(kept, accepted);
        let mut wanted = pod(|pod| {
            resources(pod)["requests"]["cpu"] = json!("64");
            let more = json!({"name": "more", "resources": {"limits": {"cpu": "1"}}});
            pod["spec"]["containers"].as_array_mut().unwrap().push(more);
        });
        kept.apply_to(&mut wanted);
        let spec = wanted.spec.unwrap();
        assert_eq!(serde_json::to_value(&spec.resources).unwrap(), whole);
        let request = |c: &Container| c.resources.clone().unwrap().requests.map(|all| all["cpu"].0.clone());
        assert_eq!(request(&spec.containers[0]).as_deref(), Some("100m"));
        assert!(spec.containers[1].resources.is_some(), "of this one nothing was accepted yet");
    }

    #[test]
    fn probes_and_their_annotations_are_copied() {
        let mut has = pod(|pod| {
            pod["spec"]["containers"][0]["livenessProbe"] = json!({"tcpSocket": {"port": 80}});
            pod["metadata"]["annotations"]["beelet.dev/probes"] = json!("period=1s");
        });
        let wanted = pod(|pod| {
            pod["spec"]["containers"][0]["startupProbe"] = json!({"tcpSocket": {"port": 81}});
            pod["metadata"]["annotations"]["probes.beelet.dev/main"] = json!("period=2s");
            resources(pod)["requests"]["cpu"] = json!("200m");
        });
        copy_probes(&mut has, &wanted);
        assert!(!same_amounts(&has, &wanted));
        copy_amounts(&mut has, &wanted);
        assert_eq!(has, wanted);
    }

    #[test]
    fn anything_else_is_another_pod() {
        check(false, "the image", |pod| pod["spec"]["containers"][0]["image"] = json!("y"));
        check(false, "a label", |pod| pod["metadata"]["labels"] = json!({"a": "b"}));
        check(false, "an amount more", |pod| resources(pod)["requests"]["ephemeral-storage"] = json!("1Gi"));
        check(false, "an amount less", |pod| {
            resources(pod)["limits"].as_object_mut().unwrap().remove("cpu");
        });
        check(false, "the QoS class", |pod| resources(pod)["requests"] = resources(pod)["limits"].clone());
    }
}
