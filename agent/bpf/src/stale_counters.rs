//! Removes the programs' counters of removed cgroups.
//!
//! The programs allocate a slot for a cgroup at its first event, and can't know which event is its last. A
//! slot is freed when its cgroup was found missing twice, so that a reader of the counters still sees the
//! last ones; at once if the programs have found the map full.

use super::KernelError;
use super::containers::{Containers, Taken};
use aya::maps::{HashMap, Map, MapData};
use beelet_ebpf_abi::{CgroupKey, Pressure};
use std::collections::BTreeSet;
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};

/// Finds and removes the entries of removed cgroups.
pub(super) struct StaleCounters {
    containers: Containers,
    pressure: HashMap<MapData, CgroupKey, Pressure>,
    /// The pods' root.
    pods: PathBuf,
    /// Cgroups found missing once.
    gone: BTreeSet<u64>,
}

impl StaleCounters {
    pub(super) fn new(
        containers: Containers,
        pressure: MapData,
        pods: &Path,
    ) -> Result<StaleCounters, KernelError> {
        Ok(StaleCounters {
            containers,
            pressure: Map::from_map_data(pressure)
                .and_then(HashMap::try_from)
                .map_err(|error| KernelError::map("PRESSURE", &error))?,
            pods: pods.to_owned(),
            gone: BTreeSet::new(),
        })
    }

    /// Removes the entries of cgroups that were also missing the last time; with `force`, of all missing
    /// cgroups. Returns the number of entries removed.
    pub(super) fn sweep(&mut self, force: bool) -> Result<usize, KernelError> {
        // Read before listing the cgroups, so that a cgroup made in between is not taken for a removed one.
        let taken: Vec<Taken> = self.containers.taken().collect();
        let mut counted: BTreeSet<u64> = taken.iter().map(|taken| taken.cgroup_id).collect();
        for key in self.pressure.keys() {
            counted.insert(key.map_err(|error| KernelError::map("PRESSURE", &error))?.cgroup_id);
        }
        if counted.is_empty() {
            self.gone.clear();
            return Ok(0);
        }
        let alive = alive(&self.pods)
            .map_err(|error| KernelError::new(format!("could not list the cgroups of pods: {error}")))?;
        let gone: BTreeSet<u64> = counted.difference(&alive).copied().collect();
        let removable = |id: &u64| gone.contains(id) && (force || self.gone.contains(id));
        let mut removed = 0;
        for taken in taken.into_iter().filter(|taken| removable(&taken.cgroup_id)) {
            self.containers.free(taken)?;
            removed += 1;
        }
        for id in gone.iter().filter(|id| removable(id)) {
            let _ = self.pressure.remove(&CgroupKey { cgroup_id: *id }); // most have none
        }
        self.gone = gone;
        Ok(removed)
    }
}

/// Returns the ids of `root` and the cgroups below it.
fn alive(root: &Path) -> std::io::Result<BTreeSet<u64>> {
    use std::os::unix::fs::MetadataExt as _;
    let mut found = BTreeSet::from([std::fs::metadata(root)?.ino()]);
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            // The cgroup was removed during the walk.
            Err(error) if folder != root && error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(_) if folder != root => break,
                Err(error) => return Err(error),
            };
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                found.insert(entry.ino());
                folders.push(entry.path());
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_folder_below_the_root_is_alive() {
        use std::os::unix::fs::MetadataExt as _;
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("burstable/pod1/container");
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("cgroup.procs"), "").unwrap();
        let found = alive(root.path()).unwrap();
        assert_eq!(found.len(), 4);
        assert!(found.contains(&std::fs::metadata(&deep).unwrap().ino()));
        assert!(alive(&root.path().join("missing")).is_err());
    }
}
