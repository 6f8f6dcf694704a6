//! Sets right what a container's cgroup holds: through the runtime, so that it knows, and by our own hand
//! where it can't or doesn't.

use std::{collections::BTreeMap, sync::Arc};

use tracing::{debug, info};

use super::{
    Parts, Values,
    wanted::{Wanted, WantedContainer},
};
use beelet_base::blocking::blocking;
use beelet_cgroups::{
    Adjust, Adjusted, CgroupError, Cgroups,
    order::{self, Change},
};
use beelet_model::table::PodName;
use beelet_spec::cri_config;

/// The limits of memory, which are only lowered to where they kill nobody.
const MEMORY_LIMITS: [&str; 2] = ["memory.max", "memory.limit_in_bytes"];

/// What became of comparing containers.
#[derive(Debug, Default)]
pub(super) struct Compared {
    /// Those whose cgroups are not as wanted, with their cgroups.
    pub(super) differing: Vec<(String, String)>,
    /// Those without a cgroup (yet, or any more).
    pub(super) absent: Vec<String>,
}

/// Compares these containers' cgroups with what is wanted.
pub(super) async fn compare(cgroups: &Arc<Cgroups>, wanted: &Wanted, ids: &[&String]) -> Compared {
    let asked: Vec<(String, String, BTreeMap<String, String>)> = ids
        .iter()
        .filter_map(|id| {
            let container = wanted.containers.get(*id)?;
            Some(((*id).clone(), container.parent.clone(), container.files.clone()))
        })
        .collect();
    let cgroups = Arc::clone(cgroups);
    let look = move || {
        let mut compared = Compared::default();
        for (id, parent, files) in asked {
            let Some(path) = cgroups.container_path(&parent, &id) else {
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
    blocking("comparing cgroups of containers", look).await
}

/// A container's cgroup does not hold what it should.
#[derive(Debug, thiserror::Error)]
#[error("{pod} ({container}): {cause}")]
pub(super) struct NotCorrected {
    pod: PodName,
    container: String,
    cause: CgroupError,
}

/// Makes a container's cgroup hold what it should; how many values were changed, or why not all of them could
/// be.
pub(super) async fn correct(
    parts: &Parts,
    id: &str,
    path: &str,
    container: &WantedContainer,
) -> Result<usize, NotCorrected> {
    let (changes, _) = differences(parts, path, &container.files).await;
    let because = |cause: CgroupError| NotCorrected {
        pod: container.pod.clone(),
        container: container.name.clone(),
        cause,
    };
    let mut failed = None;
    let mut update = cri_config::update(container.resources.clone());
    // A limit of memory is lowered by the agent, which looks at what is in use; a runtime may just do it and
    // have processes killed.
    for change in changes.iter().filter(|c| MEMORY_LIMITS.contains(&c.file.as_str()) && order::tightens(c)) {
        let lower = BTreeMap::from([(change.file.clone(), change.to.clone())]);
        if let Some(error) = adjust(parts, path, &lower).await.failed.into_iter().next() {
            failed = Some(because(error));
            update.memory_limit_in_bytes = 0; // stays as it is
        }
    }
    clear_burst(parts, path, &changes).await;
    if let Some(weight) = container.files.get("cpu.weight") {
        update.unified.insert("cpu.weight".to_owned(), weight.clone());
    }
    match parts.runtime.update_container_resources(id, update).await {
        Ok(()) => {}
        // It has ended: its cgroup goes with it.
        Err(error) if error.is_not_found() => return Ok(0),
        Err(error) => debug!(%error, "the runtime doesn't change a container; its cgroup is set without it"),
    }
    let mut files = container.files.clone();
    if failed.is_some() {
        files.retain(|file, _| !MEMORY_LIMITS.contains(&file.as_str()));
    }
    let left = adjust(parts, path, &files).await;
    if !left.changed.is_empty() {
        let files: Vec<&str> = left.changed.iter().map(|change| change.file.as_str()).collect();
        info!(pod = %container.pod, container = container.name, ?files, "set by hand: the runtime keeps other values");
    }
    let error = left.failed.into_iter().find(|error| !error.is_gone()).map(because).or(failed);
    error.map_or(Ok(changes.len()), Err)
}

/// The kernel takes no quota below the burst that was allowed on top of it.
async fn clear_burst(parts: &Parts, path: &str, changes: &[Change]) {
    if !changes.iter().any(|change| change.file == "cpu.max" && order::tightens(change)) {
        return;
    }
    let (cgroups, path) = (Arc::clone(&parts.cgroups), path.to_owned());
    let cleared = blocking("taking a burst back", move || cgroups.clear_burst(&path)).await;
    if let Err(error) = cleared {
        debug!(%error, "a burst could not be taken back before the quota is lowered");
    }
}

async fn differences(
    parts: &Parts,
    path: &str,
    files: &BTreeMap<String, String>,
) -> (Vec<Change>, Vec<CgroupError>) {
    let (cgroups, path, files) = (Arc::clone(&parts.cgroups), path.to_owned(), files.clone());
    blocking("comparing a cgroup", move || cgroups.differences(&path, &files)).await
}

async fn adjust(parts: &Parts, path: &str, files: &BTreeMap<String, String>) -> Adjusted {
    let (cgroups, values) = (Arc::clone(&parts.cgroups), Values::from([(path.to_owned(), files.clone())]));
    blocking("setting a cgroup", move || cgroups.adjust(&values, Adjust::All)).await
}
