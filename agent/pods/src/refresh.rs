//! Keeps volumes made of ConfigMaps and Secrets up to date: when one changes, the volumes of the pods that
//! run show it at once, not at the next of a kubelet's periodic checks. Volumes that somebody has removed
//! from the node's disk are looked for periodically, and when a container starts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{self as core, Pod};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::launch::Launcher;
use beelet_base::blocking::blocking;
use beelet_base::clock::After as _;
use beelet_base::work::Work;
use beelet_model::objects::Objects;
use beelet_model::pod::NodeFacts;
use beelet_model::table::{PodChanges, PodEntry, PodName, PodTable, Pods};
use beelet_state::events::{Object, Recorder};
use beelet_volumes::Volumes;

/// How often it is looked whether volumes are whole: as often as a kubelet makes them again (syncFrequency).
pub const CHECKED: Duration = Duration::from_secs(60);

/// Follows the objects until `cancel`, and looks each `period` whether volumes are whole. A change that can't
/// be shown (a key that a volume needs is gone) is told, and leaves the volume as it was.
pub fn follow(
    mut table: watch::Receiver<Arc<PodTable>>,
    launcher: Arc<Launcher>,
    period: Duration,
    cancel: CancellationToken,
) -> Work {
    Box::pin(async move {
        let mut desired = launcher.desired.clone();
        let mut shown = Arc::clone(&desired.borrow_and_update().objects);
        // The pods that were brought up to date. One that was adopted wasn't: its objects may have changed
        // while the agent was away.
        let mut current = Pods::new();
        // Those of which something could not be shown, and what was told of that.
        let (mut failing, mut told) = (BTreeSet::new(), BTreeSet::new());
        let mut checks = tokio::time::interval_at(Instant::now().after(period), period);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let objects = Arc::clone(&desired.borrow_and_update().objects);
            let here = table.borrow_and_update().pods.clone();
            let mut due = due(&current, &here);
            if !Objects::are_same(&shown, &objects) {
                due.extend(concerned((&shown, &objects), &current, &here, &failing));
                told.clear();
            }
            shown = Arc::clone(&objects);
            if !due.is_empty() {
                failing.retain(|name| !due.contains_key(name));
                let worker = Arc::clone(&launcher);
                let failures =
                    blocking("refreshing volumes", move || refresh_all(&due, &worker, &objects)).await;
                let sentences = failures.iter().map(|(name, error)| sentence(name, error)).collect();
                failing.extend(failures.into_keys());
                told = warn_of_new(&sentences, &told);
            }
            current = here;
            tokio::select! {
                // Without a source of pods there is nobody to say anything.
                Ok(()) = desired.changed() => {}
                changed = table.changed() => if changed.is_err() { return },
                _ = checks.tick() => {
                    let (worker, objects) = (Arc::clone(&launcher), Arc::clone(&shown));
                    let here = current.clone();
                    blocking("looking for lost volumes", move || check_all(&here, &worker, &objects)).await;
                }
                () = cancel.cancelled() => return,
            }
        }
    })
}

/// Looks whether the volumes of the pods that run are whole.
fn check_all(pods: &Pods, launcher: &Launcher, objects: &Objects) {
    for (name, entry) in pods.iter().filter(|(_, entry)| has_volumes(entry)) {
        let volumes = Volumes::of(&entry.pod, &launcher.pods_dir);
        if !volumes.are_restorable() || objects.is_unread(&entry.pod) {
            continue;
        }
        if let Err(error) = restore(&entry.pod, &volumes, &launcher.node, objects, &launcher.events) {
            let message = format!("MountVolume.SetUp failed: {error}");
            launcher.events.warning(Object::pod(&entry.pod), "FailedMount", message);
        }
        // That an object can't be shown any more was told when it changed.
        if let Ok(changed @ 1..) = refresh(entry, launcher, objects) {
            info!(pod = %name, volumes = changed, "volumes that were changed on the node are as they were");
        }
    }
}

/// Returns true if a pod's volumes are made, and are not being given back: one of its containers runs.
fn has_volumes(entry: &PodEntry) -> bool {
    let Some(status) = entry.pod.status.as_ref().filter(|_| !entry.ending) else { return false };
    let all = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    let mut states = all.filter_map(|container| container.state.as_ref());
    states.any(|state| state.running.is_some())
}

/// Makes again what is gone of a pod's volumes, and tells it. For a pod whose volumes were made.
pub(crate) fn restore(
    pod: &Pod,
    volumes: &Volumes,
    node: &NodeFacts,
    objects: &Objects,
    events: &Recorder,
) -> Result<(), beelet_volumes::Error> {
    let (claims, published, attached) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let (claims, published, attached) = (&claims, &published, &attached);
    let sources = beelet_volumes::Sources { pod, objects, node, claims, published, attached };
    for restored in volumes.restore(&sources)? {
        warn!(pod = %PodName::of(pod), "{restored}");
        events.warning(Object::pod(pod), restored.reason(), restored.to_string());
    }
    Ok(())
}

type Due = BTreeMap<PodName, Arc<PodEntry>>;

/// The pods that have come since, by name (another one of the same name is one, too), and those that say
/// something else of themselves, which volumes of the downward API show.
fn due(known: &Pods, here: &Pods) -> Due {
    let is_new = |name: &PodName, entry: &PodEntry| {
        known.get(name).is_none_or(|known| !says_the_same(&known.pod, &entry.pod))
    };
    let changed = PodChanges::between(known, here).changed.into_iter();
    let new = changed.filter(|(name, entry)| is_new(name, entry));
    new.map(|(name, entry)| (name.clone(), Arc::clone(entry))).collect()
}

/// The pods that were here before and to which other objects, or tokens, say something else now. In a cluster
/// some pod's token changes every few seconds, and looking at a pod's volumes is some dozens of system calls.
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

/// Returns true if both are the same pod, and the downward API would tell the same of both.
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

/// Brings pods up to date. What went wrong, by pod.
fn refresh_all(pods: &Due, launcher: &Launcher, objects: &Objects) -> BTreeMap<PodName, String> {
    let mut failures = BTreeMap::new();
    for (name, entry) in pods {
        match refresh(entry, launcher, objects) {
            Ok(0) => {}
            Ok(changed) => {
                info!(pod = %name, volumes = changed, "volumes show their objects as they are now");
            }
            Err(error) => {
                failures.insert(name.clone(), error.to_string());
            }
        }
    }
    failures
}

fn sentence(name: &PodName, error: &str) -> String {
    format!("pod {name}: {error}; the volume stays as it was")
}

fn refresh(entry: &PodEntry, launcher: &Launcher, objects: &Objects) -> Result<usize, beelet_volumes::Error> {
    let pod: &Pod = &entry.pod;
    let volumes = Volumes::of(pod, &launcher.pods_dir);
    if pod.metadata.deletion_timestamp.is_some() || !volumes.have_content() || objects.is_unread(pod) {
        return Ok(0);
    }
    // Only what is made of objects is brought up to date.
    let (claims, published, attached) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let (node, claims, published, attached) = (&launcher.node, &claims, &published, &attached);
    volumes.refresh(&beelet_volumes::Sources { pod, objects, node, claims, published, attached })
}

/// Tells what wasn't told of the same objects before.
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
    fn a_pod_is_due_once_it_is_new_or_says_something_else_of_itself() {
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
