//! What the tuner has set, kept durably before it is set: how everything is put back after whatever happens
//! to the agent.

use std::collections::{BTreeMap, BTreeSet};

use beelet_policy::tuner::Knob;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use beelet_cgroups::{CgroupError, Cgroups, order};
use beelet_state::{Loaded, State, StateError};

/// The name of the durable record.
const NAME: &str = "tuner";

/// A file that was taken from its owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// Its owner's value.
    pub(super) owners: String,
    /// What we wrote last, and before that: after a sudden end it may hold either, or still the owner's.
    /// Empty: nothing was written, but what we wrote elsewhere changed it.
    pub(super) ours: Vec<String>,
}

/// All of them, by cgroup and file. Files are put back in the order of their names, which is the right one:
/// `cpu.idle` comes before `cpu.shares` and `cpu.weight`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Journal {
    entries: BTreeMap<String, BTreeMap<String, Entry>>,
}

/// What became of a file that was to be put back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Restored {
    /// It holds its owner's value again.
    Done,
    /// It is gone.
    Gone,
    /// Something else wrote it meanwhile: it is left as it is.
    Foreign,
}

impl Journal {
    /// What an earlier agent left; nothing after a reboot, when the cgroups are gone with their settings.
    pub(super) fn load(state: &State) -> Self {
        match state.load::<Self>(NAME) {
            Ok(Loaded::Value { value, same_boot: true }) => value,
            Ok(Loaded::Value { same_boot: false, .. } | Loaded::Absent) => Self::default(),
            Ok(Loaded::Quarantined { moved_to, reason }) => {
                warn!(?moved_to, %reason, "the tuner's journal was damaged and set aside: what it had set can't be put back by \
                    it; the values of the QoS classes and pods are written anew, cpu.idle and caps of BestEffort pods may stay");
                Self::default()
            }
            Err(error) => {
                warn!(%error, "the tuner's journal can't be read");
                Self::default()
            }
        }
    }

    /// Keeps it. Not waiting for the disk: after a reboot there is nothing to put back.
    pub(super) fn store(&self, state: &State) -> Result<(), StateError> {
        if self.entries.is_empty() {
            return state.remove_for_this_boot(NAME);
        }
        state.store_for_this_boot(NAME, self)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Notes that a file is about to be set. The owner's value is what it was when it was first taken.
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

    /// The files that are not among `these`.
    pub(super) fn without(&self, these: &BTreeSet<(String, &str)>) -> Vec<(String, String, Entry)> {
        let all = self.entries.iter().flat_map(|(cgroup, files)| {
            files.iter().map(move |(file, entry)| (cgroup.clone(), file.clone(), entry.clone()))
        });
        all.filter(|(cgroup, file, _)| !these.contains(&(cgroup.clone(), file.as_str()))).collect()
    }

    /// The owner's value behind a knob's first file, for people.
    pub(super) fn owners_of(&self, knob: &Knob, file: &str) -> Option<&str> {
        Some(&self.entry(&knob.cgroup, file)?.owners)
    }

    /// Puts everything back; what can't be put back stays in the journal. How many files were.
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
                        warn!(%error, "a setting of the tuner can't be put back now; it is tried again by the tuner, if it \
                            isn't off, and at the next start");
                    }
                }
            }
        }
        restored
    }
}

/// Puts one file back.
pub(super) fn restore(
    cgroups: &Cgroups,
    cgroup: &str,
    file: &str,
    entry: &Entry,
) -> Result<Restored, CgroupError> {
    let Some(now) = cgroups.read(cgroup, file) else {
        cgroups.let_go(cgroup, file);
        return Ok(Restored::Gone);
    };
    if !is_ours(file, &now, entry) {
        info!(cgroup, file, now, "somebody else has set this since: it is left as it is");
        cgroups.let_go(cgroup, file);
        return Ok(Restored::Foreign);
    }
    cgroups.release(cgroup, file, &entry.owners)?;
    Ok(Restored::Done)
}

/// Returns true if a file may hold what it holds because of us.
pub(super) fn is_ours(file: &str, now: &str, entry: &Entry) -> bool {
    let page = rustix::param::page_size() as u64;
    let same = |value: &String| order::same(file, now, value, page);
    entry.ours.is_empty() || same(&entry.owners) || entry.ours.iter().any(same)
}
