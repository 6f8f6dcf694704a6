//! Conditions of the pods before, during and after a hand-over.

use std::collections::BTreeMap;

use beelet_tests::cluster::{Cluster, Watcher, condition};
use serde_json::{Value, json};

use super::kinds::Then;
use super::scene::{Scene, Task, tasks};

/// Waits until every pod does what it is for.
pub(super) fn until_settled(scene: &Scene) {
    for kind in &scene.pods {
        let status = |pod: &Value| pod["status"].clone();
        let settled = |pod: &Value| match kind.then {
            Then::Serves => pod.is_object() && condition(pod, "Ready"),
            Then::Starts => status(pod)["initContainerStatuses"][0]["state"]["running"].is_object(),
            Then::Ended(phase) => pod["status"]["phase"] == phase,
            Then::Crashes => status(pod)["containerStatuses"][0]["restartCount"].as_u64() > Some(0),
            Then::Waits => status(pod)["containerStatuses"][0]["state"]["waiting"].is_object(),
            Then::Leaves => status(pod)["containerStatuses"][0]["state"]["running"].is_object(),
        };
        let what = format!("{} to be as it should ({:?})", kind.name(), kind.then);
        scene.until(&what, &Cluster::pod(kind.name()), |pod| settled(pod).then_some(()));
    }
}

/// Follows the serving pods from now on.
pub(super) fn watch(scene: &Scene) -> Vec<(String, Watcher)> {
    let watch = |name: String| {
        let watcher = scene.cluster.watch(&Cluster::pod(&name)).unwrap();
        (name, watcher)
    };
    scene.serving().into_iter().map(watch).collect()
}

/// Asserts that the pods were ready in each state until now, whose end an annotation marks.
pub(super) fn ready_throughout(scene: &Scene, watchers: &[(String, Watcher)], mark: &str) {
    for (name, watcher) in watchers {
        let end = json!({"metadata": {"annotations": {"handover": mark}}});
        scene.cluster.patch(&Cluster::pod(name), &end).unwrap();
        let is_end_or_flip =
            |pod: &Value| !condition(pod, "Ready") || pod["metadata"]["annotations"]["handover"] == mark;
        let (_, pod) = watcher.until(&format!("the end of {name}"), is_end_or_flip).unwrap();
        assert!(condition(&pod, "Ready"), "{name} lost its readiness: {pod:#}\n{}", scene.agents.logs());
    }
}

/// Asserts that everything runs on as `before`, without restarts.
pub(super) fn same(scene: &Scene, before: &BTreeMap<String, Task>, what: &str) {
    let now = tasks(&scene.containerd);
    for (container, task) in before {
        assert_eq!(now.get(container), Some(task), "{what}: {container}\n{}", scene.agents.logs());
    }
    assert_eq!(now.len(), before.len(), "{what}: {now:?}");
    for kind in &scene.pods {
        let pod = scene.cluster.get(&Cluster::pod(kind.name())).unwrap();
        let statuses = ["initContainerStatuses", "containerStatuses"].map(|list| pod["status"][list].clone());
        let mut statuses = statuses.iter().flat_map(|list| list.as_array().into_iter().flatten());
        if kind.then != Then::Crashes {
            assert!(statuses.all(|one| one["restartCount"] == 0), "{what}: {pod:#}\n{}", scene.agents.logs());
        }
        if kind.then == Then::Serves {
            assert!(condition(&pod, "Ready"), "{what}: {pod:#}\n{}", scene.agents.logs());
        }
        if let Then::Ended(phase) = kind.then {
            assert_eq!(pod["status"]["phase"], phase, "{what}: {pod:#}");
        }
    }
}
