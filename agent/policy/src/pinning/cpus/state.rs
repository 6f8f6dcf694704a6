//! The kubelet's state file of the CPU manager: parsed, checked and written (`cpumanager/state`).
//!
//! The checksum of the file is FNV-1a over the output of go-spew for the checkpoint. Of the three versions,
//! V3 has pod-level entries and is written with the gate on, V2 is written with the gate off, and V1 names
//! containers by the runtime's ids.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::super::{cpu_set::CpuSet, error::PinningError, state_file};
use crate::devices::checkpoint::fnv1a;

/// CPUs by pod uid and container.
pub type Assignments = BTreeMap<String, BTreeMap<String, CpuSet>>;

/// The content of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuState {
    /// The CPUs of all containers without exclusive CPUs.
    pub shared: CpuSet,
    /// The exclusive CPUs of containers, or of their pods.
    pub containers: Assignments,
    /// The CPUs of pods with pod-level resources.
    pub pods: BTreeMap<String, CpuSet>,
}

impl CpuState {
    /// Records the exclusive CPUs of a container.
    pub(super) fn assign(&mut self, uid: &str, container: &str, cpus: CpuSet) {
        self.containers.entry(uid.to_owned()).or_default().insert(container.to_owned(), cpus);
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    policy_name: String,
    default_cpu_set: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pod_entries: BTreeMap<String, PodEntry>,
    #[serde(default)]
    checksum: u64,
}

const KEYS: &[&str] = &["policyName", "defaultCpuSet", "entries", "podEntries", "checksum"];

/// A file of Kubernetes before 1.18.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OldFile {
    policy_name: String,
    default_cpu_set: String,
    #[serde(default)]
    entries: BTreeMap<String, String>,
    #[serde(default)]
    checksum: u64,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase")]
struct PodEntry {
    #[serde(default)]
    cpu_set: String,
}

fn unreadable(cause: impl std::fmt::Display) -> PinningError {
    PinningError::new(format!("could not restore state from checkpoint: {cause}"))
}

fn corrupt() -> PinningError {
    unreadable("checkpoint is corrupted")
}

fn read_set(list: &str) -> Result<CpuSet, PinningError> {
    CpuSet::parse(list).ok_or_else(|| unreadable(format!("could not parse cpu set {list:?}")))
}

impl CpuState {
    /// Parses a file (`restoreState`).
    ///
    /// # Errors
    /// The text is not a state file, has a wrong checksum, or is from another policy.
    pub(crate) fn read(file: &str, policy: &str, pod_level: bool) -> Result<Self, PinningError> {
        let (other, state) = Self::read_of_any(file, pod_level)?;
        if other != policy {
            let message =
                format!("configured policy {policy:?} differs from state checkpoint policy {other:?}");
            return Err(unreadable(message));
        }
        Ok(state)
    }

    /// Reads a file of any policy, and the policy's name.
    ///
    /// # Errors
    /// The text is not a state file, or was changed since it was written.
    pub(crate) fn read_of_any(file: &str, pod_level: bool) -> Result<(String, Self), PinningError> {
        let read = state_file::read::<File>(file, KEYS).ok();
        let file = match read.and_then(|read| read.intact(pod_level)) {
            Some(read) => read,
            // A file without containers is also valid as the old version.
            None => read_old(file)?,
        };
        let containers = file.entries.iter().map(|(uid, containers)| {
            let sets = containers.iter().map(|(name, list)| Ok((name.clone(), read_set(list)?)));
            Ok((uid.clone(), sets.collect::<Result<_, PinningError>>()?))
        });
        let pods = file.pod_entries.iter().map(|(uid, entry)| Ok((uid.clone(), read_set(&entry.cpu_set)?)));
        let state = Self {
            shared: read_set(&file.default_cpu_set)?,
            containers: containers.collect::<Result<_, PinningError>>()?,
            pods: pods.collect::<Result<_, PinningError>>()?,
        };
        Ok((file.policy_name, state))
    }

    /// Returns the file's content.
    #[must_use]
    pub(crate) fn write(&self, policy: &str, pod_level: bool) -> String {
        let lists = |sets: &BTreeMap<String, CpuSet>| {
            sets.iter().map(|(name, set)| (name.clone(), set.to_string())).collect()
        };
        let pods = self.pods.iter().filter(|_| pod_level);
        let mut file = File {
            policy_name: policy.to_owned(),
            default_cpu_set: self.shared.to_string(),
            entries: self.containers.iter().map(|(uid, sets)| (uid.clone(), lists(sets))).collect(),
            pod_entries: pods
                .map(|(uid, set)| (uid.clone(), PodEntry { cpu_set: set.to_string() }))
                .collect(),
            checksum: 0,
        };
        let text =
            if pod_level { file.text_v3(&self.pods) } else { Some(file.text_v2("CPUManagerCheckpoint")) };
        file.checksum = u64::from(fnv1a(&text.unwrap_or_default()));
        serde_json::to_string(&file).unwrap_or_default()
    }
}

impl File {
    /// Returns the file as V3 if its checksum is that of V3, otherwise as V2, which has no pods and needs no
    /// checksum; None if the file is neither.
    fn intact(mut self, pod_level: bool) -> Option<Self> {
        let is = |text: &str| self.checksum == u64::from(fnv1a(text));
        if pod_level && self.pods().and_then(|pods| self.text_v3(&pods)).is_some_and(|text| is(&text)) {
            return Some(self);
        }
        let newer = (!pod_level).then_some("CPUManagerCheckpointV2");
        let mut names = ["CPUManagerCheckpoint"].into_iter().chain(newer);
        let intact = self.checksum == 0 || names.any(|name| is(&self.text_v2(name)));
        self.pod_entries.clear();
        intact.then_some(self)
    }

    fn pods(&self) -> Option<BTreeMap<String, CpuSet>> {
        self.pod_entries
            .iter()
            .map(|(uid, entry)| Some((uid.clone(), CpuSet::parse(&entry.cpu_set)?)))
            .collect()
    }

    fn text_v2(&self, name: &str) -> String {
        let entries = self.entries_text();
        let (policy, shared) = (&self.policy_name, &self.default_cpu_set);
        format!(
            "(*state.{name}){{PolicyName:(string){policy} DefaultCPUSet:(string){shared} \
             Entries:(map[string]map[string]string){entries} Checksum:(checksum.Checksum)0}}"
        )
    }

    fn text_v3(&self, pods: &BTreeMap<String, CpuSet>) -> Option<String> {
        let pod = |(uid, set): (&String, &CpuSet)| {
            let cpus: Vec<String> = set.iter().map(|cpu| format!("{cpu}:{{}}")).collect();
            let cpus = cpus.join(" ");
            format!("{uid}:{{CPUSet:(cpuset.CPUSet){{elems:(map[int]struct {{}})map[{cpus}]}}}}")
        };
        let pods: Vec<String> = pods.iter().map(pod).collect();
        let text = self.text_v2("CPUManagerCheckpoint");
        let (front, back) = text.rsplit_once(" Checksum:")?;
        Some(format!("{front} PodEntries:(state.PodCPUAssignments)map[{}] Checksum:{back}", pods.join(" ")))
    }

    fn entries_text(&self) -> String {
        let pod = |(uid, containers): (&String, &BTreeMap<String, String>)| {
            format!("{uid}:{}", map_text(containers.iter().map(|(name, list)| format!("{name}:{list}"))))
        };
        map_text(self.entries.iter().map(pod))
    }
}

fn map_text(entries: impl Iterator<Item = String>) -> String {
    format!("map[{}]", entries.collect::<Vec<_>>().join(" "))
}

/// Parses a file of V1, whose containers are named by the runtime's ids, which this module does not know.
fn read_old(file: &str) -> Result<File, PinningError> {
    let old: OldFile = state_file::read(file, KEYS).map_err(unreadable)?;
    let entries = map_text(old.entries.iter().map(|(id, list)| format!("{id}:{list}")));
    let (policy, shared) = (&old.policy_name, &old.default_cpu_set);
    let text = format!(
        "(*state.CPUManagerCheckpoint){{PolicyName:(string){policy} DefaultCPUSet:(string){shared} \
         Entries:(map[string]string){entries} Checksum:(checksum.Checksum)0}}"
    );
    if old.checksum != 0 && old.checksum != u64::from(fnv1a(&text)) {
        return Err(corrupt());
    }
    if let Some(id) = old.entries.keys().next() {
        return Err(unreadable(format!("containerID '{id}' not found in initial containers list")));
    }
    Ok(File {
        policy_name: old.policy_name,
        default_cpu_set: old.default_cpu_set,
        entries: BTreeMap::new(),
        pod_entries: BTreeMap::new(),
        checksum: old.checksum,
    })
}
