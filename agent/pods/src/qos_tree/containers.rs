//! Corrects the values of a container's cgroup through the runtime, so that the runtime knows them, and
//! writes the remaining values directly.

use std::{collections::BTreeMap, sync::Arc};

use tracing::{debug, info};

use super::{
    Dependencies, Values,
    wanted::{Wanted, WantedContainer},
};
use beelet_base::blocking::blocking;
use beelet_cgroups::{
    Adjust, Adjusted, CgroupError, Cgroups,
    order::{self, Change},
    search,
};
use beelet_model::table::PodName;
use beelet_spec::cri_config;

/// Memory limits, which the agent lowers only as far as no process is killed.
const MEMORY_LIMITS: [&str; 2] = ["memory.max", "memory.limit_in_bytes"];

/// Result of a comparison of containers' cgroups.
#[derive(Debug, Default)]
pub(super) struct Compared {
    /// Containers whose cgroups differ from the wanted values, with the paths of their cgroups.
    pub(super) differing: Vec<(String, String)>,
    /// Containers whose cgroup does not exist yet or is removed.
    pub(super) absent: Vec<String>,
}

/// Compares these containers' cgroups with the wanted values.
pub(super) async fn compare(cgroups: &Arc<Cgroups>, wanted: &Wanted, ids: &[&String]) -> Compared {
    let asked: Vec<(String, String, BTreeMap<String, String>)> = ids
        .iter()
        .filter_map(|id| {
            let container = wanted.containers.get(*id)?;
            Some(((*id).clone(), container.parent.clone(), container.files.clone()))
        })
        .collect();
    let cgroups = Arc::clone(cgroups);
    let compare = move || {
        let mut compared = Compared::default();
        for (id, parent, files) in asked {
            let Some(path) = search::container(&cgroups, &parent, &id) else {
                compared.absent.push(id);
                continue;
            };
            let (changes, failed) = cgroups.differences(&path, &files);
            if !changes.is_empty() || !failed.is_empty() {
                compared.differing.push((id, path));
            }
        }
        compared
    };
    blocking("comparing cgroups of containers", compare).await
}

/// A value of a container's cgroup could not be corrected.
#[derive(Debug, thiserror::Error)]
#[error("{pod} ({container}): {cause}")]
pub(super) struct NotCorrected {
    pod: PodName,
    container: String,
    cause: CgroupError,
}

/// Corrects the values of a container's cgroup. Returns the number of differing values.
pub(super) async fn correct(
    deps: &Dependencies,
    id: &str,
    path: &str,
    container: &WantedContainer,
) -> Result<usize, NotCorrected> {
    let (changes, _) = differences(deps, path, &container.files).await;
    let because = |cause: CgroupError| NotCorrected {
        pod: container.pod.clone(),
        container: container.name.clone(),
        cause,
    };
    let mut failed = None;
    let mut update = cri_config::update(container.resources.clone());
    // The agent lowers memory limits itself, because it checks the current usage; a runtime may write the
    // limit without a check and cause OOM kills.
    for change in changes.iter().filter(|c| MEMORY_LIMITS.contains(&c.file.as_str()) && order::tightens(c)) {
        let lower = BTreeMap::from([(change.file.clone(), change.to.clone())]);
        if let Some(error) = adjust(deps, path, &lower).await.failed.into_iter().next() {
            failed = Some(because(error));
            update.memory_limit_in_bytes = 0; // unchanged
        }
    }
    clear_burst(deps, path, &changes).await;
    if let Some(weight) = container.files.get("cpu.weight") {
        update.unified.insert("cpu.weight".to_owned(), weight.clone());
    }
    match deps.runtime.containers.update_resources(id, update).await {
        Ok(()) => {}
        // The container has ended, and its cgroup is removed with it.
        Err(error) if error.is_not_found() => return Ok(0),
        Err(error) => debug!(%error, "the runtime cannot update a container, writing its cgroup directly"),
    }
    let mut files = container.files.clone();
    if failed.is_some() {
        files.retain(|file, _| !MEMORY_LIMITS.contains(&file.as_str()));
    }
    let left = adjust(deps, path, &files).await;
    if !left.changed.is_empty() {
        let files: Vec<&str> = left.changed.iter().map(|change| change.file.as_str()).collect();
        info!(pod = %container.pod, container = container.name, ?files, "wrote cgroup directly because the runtime set other values");
    }
    let error = left.failed.into_iter().find(|error| !error.is_gone()).map(because).or(failed);
    error.map_or(Ok(changes.len()), Err)
}

/// Removes the CPU burst before the quota is lowered: the kernel rejects a quota below the burst.
async fn clear_burst(deps: &Dependencies, path: &str, changes: &[Change]) {
    if !changes.iter().any(|change| change.file == "cpu.max" && order::tightens(change)) {
        return;
    }
    let (cgroups, path) = (Arc::clone(&deps.cgroups), path.to_owned());
    let cleared = blocking("removing a CPU burst", move || cgroups.clear_burst(&path)).await;
    if let Err(error) = cleared {
        debug!(%error, "cannot remove the CPU burst before the quota is lowered");
    }
}

async fn differences(
    deps: &Dependencies,
    path: &str,
    files: &BTreeMap<String, String>,
) -> (Vec<Change>, Vec<CgroupError>) {
    let (cgroups, path, files) = (Arc::clone(&deps.cgroups), path.to_owned(), files.clone());
    blocking("comparing a cgroup", move || cgroups.differences(&path, &files)).await
}

async fn adjust(deps: &Dependencies, path: &str, files: &BTreeMap<String, String>) -> Adjusted {
    let (cgroups, values) = (Arc::clone(&deps.cgroups), Values::from([(path.to_owned(), files.clone())]));
    blocking("setting a cgroup", move || cgroups.adjust(&values, Adjust::All)).await
}
