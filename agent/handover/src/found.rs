//! Pods in the runtime, with the agents that created their sandboxes and containers.
//!
//! A kubelet writes no label of its own, so that its objects are recognized by all of its marks: the labels
//! with the pod's name, namespace and UID, and an annotation (of a sandbox the source of the pod, of a
//! container the digest). Other programs' objects have no place here.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use beelet_cri::{Error, Runtime};
use beelet_model::{
    labels::{ANNOTATION_SOURCE, CONTAINER_HASH, CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID, is_own},
    request::is_sound,
    table::PodName,
};
use beelet_policy::handover::{Found, FoundContainer, FoundSandbox, Maker, Source};
use beelet_proto::cri;

/// Reads all pods of the runtime, by UID.
///
/// # Errors
/// The runtime does not list its objects.
pub async fn read(runtime: &Runtime) -> Result<BTreeMap<String, Found>, Error> {
    let lists = tokio::try_join!(runtime.sandboxes.list(None), runtime.containers.list(None));
    lists.map(|(sandboxes, containers)| group(&sandboxes, &containers))
}

/// Reads all pods of the runtime, by UID, with the exit codes of the ended containers of each pod in which a
/// container ended that ran `before`, or whose sandbox was stopped.
///
/// # Errors
/// The runtime does not list its objects, or has no status of a container.
pub async fn read_after(
    runtime: &Runtime,
    before: &BTreeMap<String, Found>,
) -> Result<BTreeMap<String, Found>, Error> {
    let lists = tokio::try_join!(runtime.sandboxes.list(None), runtime.containers.list(None));
    let (sandboxes, containers) = lists?;
    let mut pods = group(&sandboxes, &containers);
    let has_ended = |(uid, before): &(&String, &Found)| {
        let Some(now) = pods.get(*uid) else { return false };
        let mut ran = before.containers.iter().filter(|one| one.running);
        // A container of a pod that has just started may begin and end in between.
        ran.any(|one| !now.runs_on(one)) || before.is_ready() && !now.is_ready()
    };
    let changed: BTreeSet<String> = before.iter().filter(has_ended).map(|(uid, _)| uid.clone()).collect();
    for container in containers.iter().filter(|one| one.state() == cri::ContainerState::ContainerExited) {
        let Some(uid) = container.labels.get(POD_UID).filter(|uid| changed.contains(*uid)) else { continue };
        let Some(name) = container.labels.get(CONTAINER_NAME) else { continue };
        let attempt = container.metadata.as_ref().map_or(0, |metadata| metadata.attempt);
        let status = runtime.containers.status(&container.id, false).await?.status;
        let made = pods.get_mut(uid).into_iter().flat_map(|pod| &mut pod.containers);
        for one in made.filter(|one| (&one.name, one.attempt) == (name, attempt)) {
            one.exit_code = status.as_ref().map(|status| status.exit_code);
        }
    }
    Ok(pods)
}

/// Groups the sandboxes and containers of agents by their pod's UID.
#[must_use]
pub fn group(sandboxes: &[cri::PodSandbox], containers: &[cri::Container]) -> BTreeMap<String, Found> {
    let mut pods: BTreeMap<String, Found> = BTreeMap::new();
    let mut newest: HashMap<String, i64> = HashMap::new();
    for sandbox in sandboxes {
        let source = sandbox.annotations.get(ANNOTATION_SOURCE).map(String::as_str);
        let maker = maker(&sandbox.labels, source.is_some());
        let (Some((uid, name)), Some(maker)) = (pod_of(&sandbox.labels), maker) else { continue };
        let pod = pods.entry(uid.clone()).or_insert_with(|| named(&uid, &name));
        let is_newest = newest.get(&uid).is_none_or(|newest| *newest <= sandbox.created_at);
        if is_newest {
            newest.insert(uid, sandbox.created_at);
            pod.source = Source::of(source);
        }
        pod.sandboxes.push(FoundSandbox {
            ready: sandbox.state() == cri::PodSandboxState::SandboxReady,
            created_at: sandbox.created_at,
            maker,
        });
    }
    for container in containers {
        let hash = container.annotations.get(CONTAINER_HASH).cloned();
        let maker = maker(&container.labels, hash.is_some());
        let (Some((uid, name)), Some(maker)) = (pod_of(&container.labels), maker) else { continue };
        let pod = pods.entry(uid.clone()).or_insert_with(|| named(&uid, &name));
        pod.containers.push(FoundContainer {
            name: container.labels.get(CONTAINER_NAME).cloned().unwrap_or_default(),
            attempt: container.metadata.as_ref().map_or(0, |metadata| metadata.attempt),
            running: container.state() == cri::ContainerState::ContainerRunning,
            maker,
            hash,
            exit_code: None,
        });
    }
    pods
}

fn named(uid: &str, name: &PodName) -> Found {
    Found {
        uid: uid.to_owned(),
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        ..Found::default()
    }
}

/// Returns the UID and the name of the pod of these labels, if all are there and can name folders.
fn pod_of(labels: &HashMap<String, String>) -> Option<(String, PodName)> {
    let label = |key: &str| labels.get(key).cloned();
    let name = PodName { namespace: label(POD_NAMESPACE)?, name: label(POD_NAME)? };
    let uid = label(POD_UID)?;
    is_sound(&name, &uid).then_some((uid, name))
}

/// Returns the agent that created an object; None for another program.
fn maker(labels: &HashMap<String, String>, has_mark: bool) -> Option<Maker> {
    if is_own(labels) { Some(Maker::Beelet) } else { has_mark.then_some(Maker::Kubelet) }
}

#[cfg(test)]
mod tests {
    use beelet_model::labels::{MANAGED_BY, MANAGED_BY_BEELET};

    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn only_objects_with_all_marks_of_an_agent_are_found() {
        let pod = [(POD_UID, "u"), (POD_NAME, "web"), (POD_NAMESPACE, "default")];
        let own = [&pod[..], &[(MANAGED_BY, MANAGED_BY_BEELET)]].concat();
        let sandbox = |labels: &[(&str, &str)], annotations: &[(&str, &str)], created_at| cri::PodSandbox {
            labels: map(labels),
            annotations: map(annotations),
            created_at,
            ..Default::default()
        };
        let api = [(ANNOTATION_SOURCE, "api")];
        let check = |sandboxes: &[cri::PodSandbox], expected: &[Maker], source| {
            let found = group(sandboxes, &[]);
            let makers: Vec<_> = found.values().flat_map(|pod| &pod.sandboxes).map(|one| one.maker).collect();
            assert_eq!(makers, expected);
            assert_eq!(found.get("u").map(|pod| pod.source), source);
        };
        check(&[sandbox(&pod, &api, 1)], &[Maker::Kubelet], Some(Source::Api));
        check(&[sandbox(&own, &[], 1)], &[Maker::Beelet], Some(Source::Unnamed));
        // crictl writes no source; other programs write no labels.
        check(&[sandbox(&pod, &[], 1), sandbox(&[], &api, 1), sandbox(&pod[..2], &api, 1)], &[], None);
        let hostile = [(POD_UID, "../u"), (POD_NAME, "web"), (POD_NAMESPACE, "default")];
        check(&[sandbox(&hostile, &api, 1)], &[], None);
        // The newest sandbox names the source, in any order.
        let file = [(ANNOTATION_SOURCE, "file")];
        let (old, new) = (sandbox(&pod, &api, 1), sandbox(&pod, &file, 2));
        check(&[new.clone(), old.clone()], &[Maker::Kubelet; 2], Some(Source::File));
        check(&[old, new], &[Maker::Kubelet; 2], Some(Source::File));
    }

    #[test]
    fn a_container_belongs_to_its_pod_and_to_its_maker() {
        let pod = [(POD_UID, "u"), (POD_NAME, "web"), (POD_NAMESPACE, "default"), (CONTAINER_NAME, "main")];
        let container = |annotations: &[(&str, &str)]| cri::Container {
            labels: map(&pod),
            annotations: map(annotations),
            state: cri::ContainerState::ContainerRunning.into(),
            metadata: Some(cri::ContainerMetadata { name: "main".to_owned(), attempt: 3 }),
            ..Default::default()
        };
        let found = group(&[], &[container(&[(CONTAINER_HASH, "ab")]), container(&[])]);
        let expected = FoundContainer {
            name: "main".to_owned(),
            attempt: 3,
            running: true,
            maker: Maker::Kubelet,
            hash: Some("ab".to_owned()),
            exit_code: None,
        };
        assert_eq!(found["u"].containers, [expected]);
    }
}
