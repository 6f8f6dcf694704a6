//! Keeps volumes of ConfigMaps and Secrets current: when an object changes, the volumes of running pods show
//! the change at once, not at the next periodic check as under a kubelet. A check for volumes that were
//! removed from the node's disk runs periodically and whenever a container starts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{self as core, Pod};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    error::Error,
    plugin::{Prepared, Sources},
    plugins::Plugins,
    pod_volumes::PodVolumes,
};
use beelet_base::blocking::blocking;
use beelet_base::clock::After as _;
use beelet_base::work::Work;
use beelet_model::desired::Desired;
use beelet_model::objects::Objects;
use beelet_model::pod::NodeFacts;
use beelet_model::table::{PodChanges, PodEntry, PodName, PodTable, Pods};
use beelet_state::events::{Object, Recorder};

/// Time between two checks for lost volumes: as often as a kubelet makes volumes again (`syncFrequency`).
pub const CHECK_PERIOD: Duration = Duration::from_secs(60);

/// Parts that the task needs.
#[derive(Clone, Debug)]
pub(crate) struct Deps {
    pub(crate) table: watch::Receiver<Arc<PodTable>>,
    pub(crate) desired: watch::Receiver<Arc<Desired>>,
    pub(crate) events: Recorder,
    pub(crate) node: NodeFacts,
    pub(crate) pods_dir: PathBuf,
    pub(crate) plugins: Plugins,
}

/// Follows the objects until `cancel`, and checks for lost volumes once per `period`. A change that a volume
/// cannot show (a required key was removed) is logged and leaves the volume as it was.
pub(crate) fn follow(deps: Deps, period: Duration, cancel: CancellationToken) -> Work {
    Box::pin(async move {
        let (mut table, mut desired, deps) = (deps.table.clone(), deps.desired.clone(), Arc::new(deps));
        let mut shown = Arc::clone(&desired.borrow_and_update().objects);
        // Pods whose volumes are up to date. Adopted pods are not: their objects may have changed while the
        // agent was not running.
        let mut current = Pods::new();
        // Pods with a volume that could not show its objects, and the warnings about them.
        let (mut failing, mut warned) = (BTreeSet::new(), BTreeSet::new());
        let mut checks = tokio::time::interval_at(Instant::now().after(period), period);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let objects = Arc::clone(&desired.borrow_and_update().objects);
            let here = table.borrow_and_update().pods.clone();
            let mut due = due(&current, &here);
            if !Objects::are_same(&shown, &objects) {
                due.extend(concerned((&shown, &objects), &current, &here, &failing));
                warned.clear();
            }
            shown = Arc::clone(&objects);
            if !due.is_empty() {
                failing.retain(|name| !due.contains_key(name));
                let worker = Arc::clone(&deps);
                let failures =
                    blocking("refreshing volumes", move || refresh_all(&due, &worker, &objects)).await;
                let sentences = failures.iter().map(|(name, error)| sentence(name, error)).collect();
                failing.extend(failures.into_keys());
                warned = warn_of_new(&sentences, &warned);
            }
            current = here;
            tokio::select! {
                // Without a source of pods no object changes.
                Ok(()) = desired.changed() => {}
                changed = table.changed() => if changed.is_err() { return },
                _ = checks.tick() => {
                    let (worker, objects) = (Arc::clone(&deps), Arc::clone(&shown));
                    let here = current.clone();
                    blocking("looking for lost volumes", move || check_all(&here, &worker, &objects)).await;
                }
                () = cancel.cancelled() => return,
            }
        }
    })
}

/// Makes lost volumes of running pods again.
fn check_all(pods: &Pods, deps: &Deps, objects: &Objects) {
    for (name, entry) in pods.iter().filter(|(_, entry)| runs(entry)) {
        let volumes = PodVolumes::of(&entry.pod, &deps.pods_dir, &deps.plugins);
        if !volumes.any(|plugin| plugin.is_restorable()) || objects.is_unread(&entry.pod) {
            continue;
        }
        if let Err(error) = restore((&entry.pod, &volumes), &deps.node, objects, &deps.events) {
            let message = format!("MountVolume.SetUp failed: {error}");
            deps.events.warning(Object::pod(&entry.pod), "FailedMount", message);
        }
        // An object that a volume can no longer show was logged when the object changed.
        if let Ok(changed @ 1..) = refresh(entry, deps, objects) {
            info!(pod = %name, volumes = changed, "restored volumes that were modified on the node");
        }
    }
}

/// Returns true if a container of the pod runs: the pod's volumes are set up then and are not being removed.
fn runs(entry: &PodEntry) -> bool {
    let Some(status) = entry.pod.status.as_ref().filter(|_| !entry.ending) else { return false };
    let all = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    let mut states = all.filter_map(|container| container.state.as_ref());
    states.any(|state| state.running.is_some())
}

/// Makes lost volumes of a pod again and records an event for each. The pod's volumes must be set up.
pub(crate) fn restore(
    (pod, volumes): (&Pod, &PodVolumes),
    node: &NodeFacts,
    objects: &Objects,
    events: &Recorder,
) -> Result<(), Error> {
    let sources = Sources { pod, objects, node, prepared: &Prepared::default() };
    for restored in volumes.restore(&sources)? {
        warn!(pod = %PodName::of(pod), "{restored}");
        events.warning(Object::pod(pod), restored.reason(), restored.to_string());
    }
    Ok(())
}

type Due = BTreeMap<PodName, Arc<PodEntry>>;

/// Returns pods that are new (a pod with the name of a known one, too), and pods whose fields for downward
/// API volumes have changed.
fn due(known: &Pods, here: &Pods) -> Due {
    let is_new = |name: &PodName, entry: &PodEntry| {
        known.get(name).is_none_or(|known| !says_the_same(&known.pod, &entry.pod))
    };
    let changed = PodChanges::between(known, here).changed.into_iter();
    let new = changed.filter(|(name, entry)| is_new(name, entry));
    new.map(|(name, entry)| (name.clone(), Arc::clone(entry))).collect()
}

/// Returns known pods whose objects or tokens have changed, and failing ones. In a cluster some pod's token
/// changes every few seconds, and checking a pod's volumes takes some dozens of system calls.
fn concerned(
    (before, now): (&Objects, &Objects),
    known: &Pods,
    here: &Pods,
    failing: &BTreeSet<PodName>,
) -> Due {
    let is_concerned = |name: &PodName, entry: &PodEntry| {
        failing.contains(name) || !before.show_the_same_to(now, &entry.pod)
    };
    let known = here.iter().filter(|(name, _)| known.contains_key(*name));
    let all = known.filter(|(name, entry)| is_concerned(name, entry));
    all.map(|(name, entry)| (name.clone(), Arc::clone(entry))).collect()
}

/// Returns true if both are the same pod, and the downward API shows the same for both.
fn says_the_same(one: &Pod, other: &Pod) -> bool {
    let (a, b) = (&one.metadata, &other.metadata);
    (&a.uid, &a.labels, &a.annotations) == (&b.uid, &b.labels, &b.annotations)
        && resources(one).eq(resources(other))
}

fn resources(pod: &Pod) -> impl Iterator<Item = Option<&core::ResourceRequirements>> {
    let spec = pod.spec.iter();
    let containers = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    containers.map(|container| container.resources.as_ref())
}

/// Updates the volumes of pods. Returns the failures by pod.
fn refresh_all(pods: &Due, deps: &Deps, objects: &Objects) -> BTreeMap<PodName, String> {
    let mut failures = BTreeMap::new();
    for (name, entry) in pods {
        match refresh(entry, deps, objects) {
            Ok(0) => {}
            Ok(changed) => {
                info!(pod = %name, volumes = changed, "updated volumes after a change of their objects");
            }
            Err(error) => {
                failures.insert(name.clone(), error.to_string());
            }
        }
    }
    failures
}

fn sentence(name: &PodName, error: &str) -> String {
    format!("pod {name}: {error}; the volume keeps its old content")
}

fn refresh(entry: &PodEntry, deps: &Deps, objects: &Objects) -> Result<usize, Error> {
    let pod: &Pod = &entry.pod;
    let volumes = PodVolumes::of(pod, &deps.pods_dir, &deps.plugins);
    if pod.metadata.deletion_timestamp.is_some()
        || !volumes.any(|plugin| plugin.has_content())
        || objects.is_unread(pod)
    {
        return Ok(0);
    }
    // Volumes of objects need no claims.
    volumes.refresh(&Sources { pod, objects, node: &deps.node, prepared: &Prepared::default() })
}

/// Logs the failures that were not logged before for the same objects.
fn warn_of_new(failures: &BTreeSet<String>, before: &BTreeSet<String>) -> BTreeSet<String> {
    for failure in failures.difference(before) {
        warn!("{failure}");
    }
    failures.union(before).cloned().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn new_and_changed_pods_are_due() {
        let entry = |more: serde_json::Value| {
            let mut pod = json!({
                "metadata": {"name": "a", "namespace": "n", "uid": "1", "labels": {"tier": "web"}},
                "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "1"}}}]},
                "status": {"phase": "Running"},
            });
            for (path, value) in more.as_object().unwrap() {
                *pod.pointer_mut(path).unwrap() = value.clone();
            }
            Arc::new(PodEntry::of(serde_json::from_value(pod).unwrap()))
        };
        let pods = |entry: &Arc<PodEntry>| -> Pods {
            [(PodName::of(&entry.pod), Arc::clone(entry))].into_iter().collect()
        };
        let first = entry(json!({}));
        assert_eq!(due(&Pods::new(), &pods(&first)).len(), 1);
        let check = |more: serde_json::Value, expected: usize| {
            assert_eq!(due(&pods(&first), &pods(&entry(more.clone()))).len(), expected, "{more}");
        };
        check(json!({}), 0);
        check(json!({"/status/phase": "Succeeded"}), 0);
        check(json!({"/metadata/uid": "2"}), 1);
        check(json!({"/metadata/labels/tier": "db"}), 1);
        check(json!({"/spec/containers/0/resources/limits/cpu": "2"}), 1);
    }
}
