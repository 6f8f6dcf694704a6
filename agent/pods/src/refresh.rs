//! Keeps volumes made of ConfigMaps and Secrets up to date: when one changes, the volumes of the pods that
//! run show it at once, not at the next of a kubelet's periodic checks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::launch::Launcher;
use beelet_base::blocking::blocking;
use beelet_base::work::Work;
use beelet_model::objects::Objects;
use beelet_model::table::{PodChanges, PodEntry, PodName, PodTable, Pods};
use beelet_volumes::Volumes;

/// Follows the objects until `cancel`. A change that can't be shown (a key that a volume needs is gone) is
/// told, and leaves the volume as it was.
pub fn follow(
    mut table: watch::Receiver<Arc<PodTable>>,
    launcher: Arc<Launcher>,
    cancel: CancellationToken,
) -> Work {
    Box::pin(async move {
        let mut desired = launcher.desired.clone();
        let mut shown = Arc::clone(&desired.borrow_and_update().objects);
        // The pods that were brought up to date. One that was adopted wasn't: its objects may have changed
        // while the agent was away.
        let mut current = Pods::new();
        let mut told: BTreeSet<String> = BTreeSet::new();
        loop {
            let objects = Arc::clone(&desired.borrow_and_update().objects);
            if shown != objects {
                current = Pods::new();
                told.clear();
            }
            shown = Arc::clone(&objects);
            let here = table.borrow_and_update().pods.clone();
            let due = due(&current, &here);
            if !due.is_empty() {
                let worker = Arc::clone(&launcher);
                let failures =
                    blocking("refreshing volumes", move || refresh_all(&due, &worker, &objects)).await;
                told = warn_of_new(&failures, &told);
            }
            current = here;
            tokio::select! {
                // Without a source of pods there is nobody to say anything.
                Ok(()) = desired.changed() => {}
                changed = table.changed() => if changed.is_err() { return },
                () = cancel.cancelled() => return,
            }
        }
    })
}

/// The pods that have come since, by name: another one of the same name is one, too.
fn due(known: &Pods, here: &Pods) -> Vec<(PodName, Arc<PodEntry>)> {
    let is_new = |name: &PodName, entry: &PodEntry| {
        known.get(name).is_none_or(|known| known.pod.metadata.uid != entry.pod.metadata.uid)
    };
    let changed = PodChanges::between(known, here).changed.into_iter();
    let new = changed.filter(|(name, entry)| is_new(name, entry));
    new.map(|(name, entry)| (name.clone(), Arc::clone(entry))).collect()
}

/// Brings pods up to date. What went wrong, a sentence each.
fn refresh_all(
    pods: &[(PodName, Arc<PodEntry>)],
    launcher: &Launcher,
    objects: &Objects,
) -> BTreeSet<String> {
    let mut failures = BTreeSet::new();
    for (name, entry) in pods {
        match refresh(entry, launcher, objects) {
            Ok(0) => {}
            Ok(changed) => {
                info!(pod = %name, volumes = changed, "volumes show their objects as they are now");
            }
            Err(error) => {
                failures.insert(sentence(name, &error.to_string()));
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
    let (claims, published) = (BTreeMap::new(), BTreeMap::new());
    let node = &launcher.node;
    volumes.refresh(&beelet_volumes::Sources { pod, objects, node, claims: &claims, published: &published })
}

/// Tells what wasn't told of the same objects before.
fn warn_of_new(failures: &BTreeSet<String>, before: &BTreeSet<String>) -> BTreeSet<String> {
    for failure in failures.difference(before) {
        warn!("{failure}");
    }
    failures.union(before).cloned().collect()
}
