//! Confirmation of in-place resizes: the new amounts of a running pod are in force once its cgroup and those
//! of its containers have them.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1 as core;

use super::{Dependencies, Values, wanted::Wanted};
use crate::status::pod_amounts;
use beelet_base::blocking::blocking;
use beelet_cgroups::{Cgroups, search};
use beelet_model::pod::running;
use beelet_model::{
    request::Request,
    table::{PodEntry, PodName, PodTable},
};
use beelet_spec::resize;

/// Returns true if a resize of any of the pods is in progress.
pub(super) fn any<'a>(mut pods: impl Iterator<Item = &'a Arc<PodEntry>>) -> bool {
    pods.any(|entry| resize::is_in_progress(&entry.pod))
}

/// Notifies the pods' manager of each resize in progress that is in force now, or that failed with an error
/// in `failed`.
pub(super) async fn report(deps: &Dependencies, table: &PodTable, wanted: &Wanted, failed: &[String]) {
    for entry in table.pods.values().filter(|entry| resize::is_in_progress(&entry.pod)) {
        let Some(uid) = entry.pod.metadata.uid.clone() else { continue };
        let amounts = if holds(&deps.cgroups, wanted, entry).await {
            let amounts =
                |(id, container): (&str, &core::Container)| (id.to_owned(), resize::amounts(container));
            let whole = (uid.clone(), pod_amounts(&entry.pod));
            Ok(running(&entry.pod).map(amounts).chain([whole]).collect::<BTreeMap<_, _>>())
        } else {
            let of_container = format!("{} (", PodName::of(&entry.pod));
            let own = |error: &&String| error.starts_with(&of_container) || error.contains(&uid);
            // Without an error, the keeper has not written the new amounts yet.
            let Some(error) = failed.iter().find(own) else { continue };
            Err(error.clone())
        };
        // The manager ends only with the agent.
        let _ = deps.requests.send(Request::Enacted { uid, amounts }).await;
    }
}

/// Returns true if the cgroups of the pod and of its running containers have the wanted values. Missing
/// cgroups are ignored.
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
    let compare = move || {
        let found = containers
            .into_iter()
            .filter_map(|(id, parent, files)| Some((search::container(&cgroups, &parent, &id)?, files)));
        let all = levels.into_iter().chain(found);
        all.into_iter().all(|(path, files)| {
            let (changes, failed) = cgroups.differences(&path, &files);
            changes.is_empty() && failed.is_empty()
        })
    };
    blocking("comparing cgroups of a resize", compare).await
}
