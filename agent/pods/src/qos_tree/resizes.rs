//! When the new amounts of a running pod are in force: once its cgroup and those of its containers hold them.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1 as core;

use super::{Parts, Values, wanted::Wanted};
use beelet_base::blocking::blocking;
use beelet_cgroups::Cgroups;
use beelet_model::pod::running;
use beelet_model::{
    request::Request,
    table::{PodEntry, PodName, PodTable},
};
use beelet_spec::resize;

/// Returns true if any of the pods waits for its new amounts.
pub(super) fn any<'a>(mut pods: impl Iterator<Item = &'a Arc<PodEntry>>) -> bool {
    pods.any(|entry| resize::is_in_progress(&entry.pod))
}

/// Tells the pods' manager of each that waits, and has them, or can't have them now: `failed` says why.
pub(super) async fn report(parts: &Parts, table: &PodTable, wanted: &Wanted, failed: &[String]) {
    for entry in table.pods.values().filter(|entry| resize::is_in_progress(&entry.pod)) {
        let Some(uid) = entry.pod.metadata.uid.clone() else { continue };
        let amounts = if holds(&parts.cgroups, wanted, entry).await {
            let amounts =
                |(id, container): (&str, &core::Container)| (id.to_owned(), resize::amounts(container));
            let whole = (uid.clone(), resize::pod_amounts(&entry.pod));
            Ok(running(&entry.pod).map(amounts).chain([whole]).collect::<BTreeMap<_, _>>())
        } else {
            let of_container = format!("{} (", PodName::of(&entry.pod));
            let own = |error: &&String| error.starts_with(&of_container) || error.contains(&uid);
            // Without an error it has not been its turn yet.
            let Some(error) = failed.iter().find(own) else { continue };
            Err(error.clone())
        };
        // The manager is gone only when everything ends.
        let _ = parts.requests.send(Request::Enacted { uid, amounts }).await;
    }
}

/// Returns true if the cgroups of the pod and of its running containers hold what is wanted. One that isn't
/// there holds nobody to anything.
async fn holds(cgroups: &Arc<Cgroups>, wanted: &Wanted, entry: &PodEntry) -> bool {
    let mut levels = Values::new();
    let mut containers = Vec::new();
    for (id, _) in running(&entry.pod) {
        let Some(container) = wanted.containers.get(id) else { return false };
        if let Some(files) = wanted.levels.get(&container.parent) {
            levels.insert(container.parent.clone(), files.clone());
        }
        containers.push((id.to_owned(), container.parent.clone(), container.files.clone()));
    }
    let cgroups = Arc::clone(cgroups);
    let look = move || {
        let found = containers
            .into_iter()
            .filter_map(|(id, parent, files)| Some((cgroups.container_path(&parent, &id)?, files)));
        let all = levels.into_iter().chain(found);
        all.into_iter().all(|(path, files)| {
            let (changes, failed) = cgroups.differences(&path, &files);
            changes.is_empty() && failed.is_empty()
        })
    };
    blocking("comparing cgroups of a resize", look).await
}
