//! The parts of a pod that admission counts, for the record of an admitted pod.

use k8s_openapi::{
    api::core::v1::{Container, Pod, PodSpec},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

/// Returns the pod's name, containers, host ports and overhead, without the amounts of the pod and its
/// containers, which a resize changes. With these amounts the outline counts in [`super::admit`] as the pod.
#[must_use]
pub fn outline(pod: &Pod) -> Pod {
    let of = |container: &Container| Container {
        name: container.name.clone(),
        restart_policy: container.restart_policy.clone(),
        ports: container.ports.as_ref().and_then(|ports| {
            let on_host = ports.iter().filter(|port| port.host_port.is_some_and(|port| port > 0));
            Some(on_host.cloned().collect::<Vec<_>>()).filter(|ports| !ports.is_empty())
        }),
        ..Container::default()
    };
    let spec = pod.spec.as_ref().map(|spec| PodSpec {
        containers: spec.containers.iter().map(of).collect(),
        init_containers: spec.init_containers.as_ref().map(|inits| inits.iter().map(of).collect()),
        overhead: spec.overhead.clone(),
        ..PodSpec::default()
    });
    let metadata = ObjectMeta {
        name: pod.metadata.name.clone(),
        namespace: pod.metadata.namespace.clone(),
        uid: pod.metadata.uid.clone(),
        ..ObjectMeta::default()
    };
    Pod { metadata, spec, status: None }
}

#[cfg(test)]
mod tests {
    use super::super::{Policy, admit};
    use super::*;
    use crate::resources::ResourceList;
    use beelet_units::quantity::Quantity;
    use serde_json::{Value, json};

    /// Copies the amounts, as `resize::Accepted` does.
    fn with_amounts(mut outline: Pod, pod: &Pod) -> Pod {
        let (Some(spec), Some(of)) = (&mut outline.spec, &pod.spec) else { return outline };
        spec.resources.clone_from(&of.resources);
        let all = spec.init_containers.iter_mut().flatten().chain(&mut spec.containers);
        let known = of.init_containers.iter().flatten().chain(&of.containers);
        all.zip(known).for_each(|(container, known)| container.resources.clone_from(&known.resources));
        outline
    }

    #[test]
    fn an_outline_counts_as_its_pod() {
        let amounts = |cpu: &str| json!({"requests": {"cpu": cpu, "memory": "64Mi", "example.com/gpu": "1"}});
        let port = json!([{"containerPort": 80, "hostPort": 8080}, {"containerPort": 81}]);
        let specs = [
            json!({"containers": [{"name": "a", "image": "i", "resources": amounts("1")}]}),
            json!({
                "overhead": {"cpu": "250m"},
                "initContainers": [
                    {"name": "init", "resources": amounts("3")},
                    {"name": "side", "restartPolicy": "Always", "resources": amounts("500m"), "ports": port},
                ],
                "containers": [{"name": "a", "resources": amounts("1")}, {"name": "b"}],
            }),
            json!({"resources": {"requests": {"cpu": "2"}}, "containers": [{"name": "a", "ports": port}]}),
            Value::Null,
        ];
        let asking = json!({"metadata": {"name": "new"}, "spec": {"containers": [
            {"name": "c", "ports": port, "resources": {"requests": {"cpu": "9", "memory": "9Gi", "example.com/gpu": "9"}}},
        ]}});
        let asking: Pod = serde_json::from_value(asking).unwrap();
        let mut node = ResourceList::default();
        for (name, text) in [("cpu", "4"), ("memory", "1Gi"), ("pods", "1"), ("example.com/gpu", "2")] {
            node.set(name, Quantity::parse(text).unwrap());
        }
        for spec in specs {
            let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
            let pod: Pod = serde_json::from_value(pod).unwrap();
            let outline = with_amounts(outline(&pod), &pod);
            let [of_pod, of_outline] =
                [&pod, &outline].map(|held| admit(&asking, &[held], &node, Policy::Kubelet).unwrap());
            assert_eq!(of_pod, of_outline, "{spec}");
            assert!(!of_pod.admitted);
        }
    }
}
