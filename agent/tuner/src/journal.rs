//! A durable record of the tuner's settings, written before each change, so that everything can be restored
//! however the agent ends.

use std::collections::{BTreeMap, BTreeSet};

use beelet_policy::tuner::Knob;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use beelet_cgroups::{CgroupError, Cgroups, held, order};
use beelet_state::{Loaded, State, StateError};

/// The name of the durable record.
const NAME: &str = "tuner";

/// A file whose value the tuner has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The owner's value.
    pub(super) owners: String,
    /// The tuner's last two values: after a sudden end the file may hold either, or still the owner's. Empty
    /// if the tuner wrote nothing itself, but changed the file through another one.
    pub(super) ours: Vec<String>,
}

/// All entries, by cgroup and file. Files are restored in the order of their names, which is the required
/// one: `cpu.idle` comes before `cpu.shares` and `cpu.weight`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Journal {
    entries: BTreeMap<String, BTreeMap<String, Entry>>,
}

/// The result of restoring a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Restored {
    /// The file holds its owner's value again.
    Done,
    /// The file no longer exists.
    Gone,
    /// Another process has written the file since: it stays as it is.
    Foreign,
}

impl Journal {
    /// Loads the journal of an earlier agent; empty after a reboot, which removed the cgroups and their
    /// settings.
    pub(super) fn load(state: &State) -> Self {
        match state.load::<Self>(NAME) {
            Ok(Loaded::Value { value, same_boot: true }) => value,
            Ok(Loaded::Value { same_boot: false, .. } | Loaded::Absent) => Self::default(),
            Ok(Loaded::Quarantined { moved_to, reason }) => {
                warn!(?moved_to, %reason, "the tuner's journal was damaged; moved it aside, so the earlier settings cannot be restored from \
                    it: the values of QoS classes and pods are rewritten, but cpu.idle and caps of BestEffort pods may stay");
                Self::default()
            }
            Err(error) => {
                warn!(%error, "cannot read the tuner's journal");
                Self::default()
            }
        }
    }

    /// Stores the journal. Does not wait for the disk: after a reboot there is nothing to restore.
    pub(super) fn store(&self, state: &State) -> Result<(), StateError> {
        if self.entries.is_empty() {
            return state.remove_for_this_boot(NAME);
        }
        state.store_for_this_boot(NAME, self)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Records that a file is about to be set, with its owner's value.
    pub(super) fn record(&mut self, cgroup: &str, file: &str, owners: &str, value: Option<&str>) {
        let files = self.entries.entry(cgroup.to_owned()).or_default();
        let entry = files
            .entry(file.to_owned())
            .or_insert_with(|| Entry { owners: owners.to_owned(), ours: Vec::new() });
        owners.clone_into(&mut entry.owners);
        if let Some(value) = value {
            entry.ours.push(value.to_owned());
            let old = entry.ours.len().saturating_sub(2);
            entry.ours.drain(..old);
        }
    }

    pub(super) fn forget(&mut self, cgroup: &str, file: &str) {
        if let Some(files) = self.entries.get_mut(cgroup) {
            files.remove(file);
            if files.is_empty() {
                self.entries.remove(cgroup);
            }
        }
    }

    pub(super) fn entry(&self, cgroup: &str, file: &str) -> Option<&Entry> {
        self.entries.get(cgroup)?.get(file)
    }

    /// Returns the files that are not among `these`.
    pub(super) fn without(&self, these: &BTreeSet<(String, &str)>) -> Vec<(String, String, Entry)> {
        let all = self.entries.iter().flat_map(|(cgroup, files)| {
            files.iter().map(move |(file, entry)| (cgroup.clone(), file.clone(), entry.clone()))
        });
        all.filter(|(cgroup, file, _)| !these.contains(&(cgroup.clone(), file.as_str()))).collect()
    }

    /// Returns the owner's value of a knob's first file, for display.
    pub(super) fn owners_of(&self, knob: &Knob, file: &str) -> Option<&str> {
        Some(&self.entry(&knob.cgroup, file)?.owners)
    }

    /// Restores every file and returns the number restored; files that cannot be restored stay in the
    /// journal.
    pub(super) fn restore(&mut self, cgroups: &Cgroups) -> usize {
        let mut restored = 0;
        for (cgroup, files) in self.entries.clone() {
            for (file, entry) in files {
                match restore(cgroups, &cgroup, &file, &entry) {
                    Ok(what) => {
                        restored += usize::from(what == Restored::Done);
                        self.forget(&cgroup, &file);
                    }
                    Err(error) => {
                        warn!(%error, "cannot restore a setting of the tuner now; the tuner, unless it is off, and the next \
                            start will try again");
                    }
                }
            }
        }
        restored
    }
}

/// Restores one file.
pub(super) fn restore(
    cgroups: &Cgroups,
    cgroup: &str,
    file: &str,
    entry: &Entry,
) -> Result<Restored, CgroupError> {
    let Some(now) = cgroups.read(cgroup, file) else {
        held::let_go(cgroups, cgroup, file);
        return Ok(Restored::Gone);
    };
    if !is_ours(file, &now, entry) {
        info!(cgroup, file, now, "another process has set this file since; leaving it as it is");
        held::let_go(cgroups, cgroup, file);
        return Ok(Restored::Foreign);
    }
    held::release(cgroups, cgroup, file, &entry.owners)?;
    Ok(Restored::Done)
}

/// Returns true if a file's value may come from the tuner.
pub(super) fn is_ours(file: &str, now: &str, entry: &Entry) -> bool {
    let page = rustix::param::page_size() as u64;
    let same = |value: &String| order::same(file, now, value, page);
    entry.ours.is_empty() || same(&entry.owners) || entry.ours.iter().any(same)
}
