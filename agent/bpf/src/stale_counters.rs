//! Removes what the programs counted for cgroups that are gone.
//!
//! The programs take a slot for a cgroup when it first does something, and can't know when it will do nothing
//! more. It is freed when its cgroup was found gone twice, so that a reader of the counters still sees the
//! last ones; at once if the programs have found the map full.

use super::KernelError;
use super::containers::{Containers, Taken};
use aya::maps::{HashMap, Map, MapData};
use beelet_ebpf_abi::{CgroupKey, Pressure};
use std::collections::BTreeSet;
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};

/// The entries of cgroups that are gone.
pub(super) struct StaleCounters {
    containers: Containers,
    pressure: HashMap<MapData, CgroupKey, Pressure>,
    /// The pods' root.
    pods: PathBuf,
    /// Found gone once.
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

    /// Removes what was gone the last time already; with `force`, everything that is gone. Returns how many
    /// entries.
    pub(super) fn sweep(&mut self, force: bool) -> Result<usize, KernelError> {
        // Before the cgroups: one that is made meanwhile is in neither.
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

/// The ids of the cgroups below `root`, and its own.
fn alive(root: &Path) -> std::io::Result<BTreeSet<u64>> {
    use std::os::unix::fs::MetadataExt as _;
    let mut found = BTreeSet::from([std::fs::metadata(root)?.ino()]);
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            // It went while we walked.
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
