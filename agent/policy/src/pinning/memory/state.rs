//! The kubelet's state file of the memory manager: parsed, checked and written (`memorymanager/state`).
//!
//! The checksum of the file is FNV-1a over the output of go-spew for the checkpoint. V2 has pod-level entries
//! and is written with the gate on, V1 with the gate off.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::super::{
    error::PinningError,
    needs::{ContainerNeeds, Needs},
    nodes::{NODE_NUMBERS, NodeSet},
    state_file,
};
use super::ledger::{Block, Ledger, NodeMemory, Table};
use crate::devices::checkpoint::fnv1a;

const KEYS: &[&str] = &["policyName", "machineState", "entries", "podEntries", "checksum"];

/// Blocks by pod uid and container.
pub type Assignments = BTreeMap<String, BTreeMap<String, Vec<Block>>>;

/// The content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryState {
    /// The memory of all nodes.
    pub ledger: Ledger,
    /// The memory of containers.
    pub containers: Assignments,
    /// The memory of pods with pod-level resources.
    pub pods: BTreeMap<String, Vec<Block>>,
}

impl MemoryState {
    /// Returns the blocks of all pods with the pods' uids: a pod's own if it has pod-level resources, else
    /// those of its containers. Narrow blocks come first, so that a wide one leaves them room on their nodes.
    pub(super) fn blocks(&self) -> Vec<(&str, &Block)> {
        let blocks = self.containers.iter().flat_map(|(uid, containers)| {
            let own = self.pods.get(uid).filter(|blocks| !blocks.is_empty());
            let of_containers = containers.values().filter(move |_| own.is_none()).flatten();
            own.into_iter().flatten().chain(of_containers).map(move |block| (uid.as_str(), block))
        });
        let mut blocks: Vec<(&str, &Block)> = blocks.collect();
        blocks.sort_by_key(|(_, block)| block.nodes.len());
        blocks
    }

    /// Returns the memory of a container; empty if it has none.
    #[must_use]
    pub fn of(&self, uid: &str, container: &str) -> &[Block] {
        self.held(uid, container).map_or(&[], Vec::as_slice)
    }

    /// Returns the memory of a container; `None` if the container has none.
    pub(super) fn held(&self, uid: &str, container: &str) -> Option<&Vec<Block>> {
        self.containers.get(uid)?.get(container)
    }

    /// Returns the memory of a pod as a whole; None if the pod has none.
    pub(super) fn held_by_pod(&self, needs: &Needs) -> Option<Vec<Block>> {
        if let Some(blocks) = self.pods.get(&needs.uid) {
            return Some(blocks.clone());
        }
        let containers = self.containers.get(&needs.uid)?;
        let mut sum: Vec<Block> = Vec::new();
        for block in containers.values().flatten().filter(|block| block.size > 0) {
            let same = |other: &&mut Block| other.resource == block.resource && other.nodes == block.nodes;
            match sum.iter_mut().find(same) {
                Some(other) => other.size = other.size.saturating_add(block.size),
                None => sum.push(block.clone()),
            }
        }
        Some(sum)
    }

    /// Shrinks the blocks of init containers by the amounts that a container reuses, so that the sum of all
    /// blocks is the pod's memory (`updateInitContainersMemoryBlocks`).
    pub(super) fn shrink_inits(&mut self, needs: &Needs, container: &ContainerNeeds, blocks: &[Block]) {
        let Some(pod) = self.containers.get_mut(&needs.uid) else { return };
        for block in blocks {
            let mut size = block.size;
            for init in needs.ended_before(&container.name) {
                let own = pod.get_mut(&init.name).into_iter().flatten();
                let same = |own: &&mut Block| own.resource == block.resource && own.nodes == block.nodes;
                for own in own.filter(same) {
                    let taken = own.size.min(size);
                    own.size = own.size.saturating_sub(taken);
                    size = size.saturating_sub(taken);
                }
            }
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    policy_name: String,
    #[serde(default)]
    machine_state: BTreeMap<u32, FileNode>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, BTreeMap<String, Vec<FileBlock>>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pod_entries: BTreeMap<String, PodEntry>,
    #[serde(default)]
    checksum: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileNode {
    #[serde(default)]
    number_of_assignments: i64,
    #[serde(default)]
    memory_map: BTreeMap<String, Table>,
    #[serde(default)]
    cells: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileBlock {
    #[serde(default)]
    numa_affinity: Vec<u32>,
    #[serde(rename = "type", default)]
    resource: String,
    #[serde(default)]
    size: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodEntry {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    memory_blocks: Vec<FileBlock>,
}

fn unreadable(cause: impl std::fmt::Display) -> PinningError {
    PinningError::new(format!("could not restore state from checkpoint: {cause}"))
}

impl MemoryState {
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
        let file: File = state_file::read(file, KEYS).map_err(unreadable)?;
        let file = file.intact(pod_level).ok_or_else(|| unreadable("checkpoint is corrupted"))?;
        let node = |(number, node): (u32, FileNode)| {
            let FileNode { number_of_assignments, memory_map, cells } = node;
            let cells = nodes(cells)?;
            Ok((number, NodeMemory { assignments: number_of_assignments, tables: memory_map, cells }))
        };
        let containers = |(uid, containers): (String, BTreeMap<String, Vec<FileBlock>>)| {
            let blocks = containers.into_iter().map(|(name, list)| Ok((name, blocks(list)?)));
            Ok((uid, blocks.collect::<Result<_, PinningError>>()?))
        };
        let pod = |(uid, entry): (String, PodEntry)| Ok((uid, blocks(entry.memory_blocks)?));
        let read: Result<_, PinningError> = file.machine_state.into_iter().map(node).collect();
        let state = Self {
            ledger: Ledger { nodes: read? },
            containers: file.entries.into_iter().map(containers).collect::<Result<_, PinningError>>()?,
            pods: file.pod_entries.into_iter().map(pod).collect::<Result<_, PinningError>>()?,
        };
        Ok((file.policy_name, state))
    }

    /// Returns the file's content.
    #[must_use]
    pub(crate) fn write(&self, policy: &str, pod_level: bool) -> String {
        let node = |(number, node): (&u32, &NodeMemory)| {
            let file = FileNode {
                number_of_assignments: node.assignments,
                memory_map: node.tables.clone(),
                cells: node.cells.iter().collect(),
            };
            (*number, file)
        };
        let containers = |(uid, containers): (&String, &BTreeMap<String, Vec<Block>>)| {
            let lists = containers.iter().map(|(name, blocks)| (name.clone(), file_blocks(blocks)));
            (uid.clone(), lists.collect())
        };
        let pod = |(uid, blocks): (&String, &Vec<Block>)| {
            (uid.clone(), PodEntry { memory_blocks: file_blocks(blocks) })
        };
        let mut file = File {
            policy_name: policy.to_owned(),
            machine_state: self.ledger.nodes.iter().map(node).collect(),
            entries: self.containers.iter().map(containers).collect(),
            pod_entries: self.pods.iter().filter(|_| pod_level).map(pod).collect(),
            checksum: 0,
        };
        file.checksum = u64::from(fnv1a(&file.text("MemoryManagerCheckpoint", pod_level)));
        serde_json::to_string(&file).unwrap_or_default()
    }
}

/// Returns the nodes of a list, each of which must fit into a mask.
fn nodes(list: Vec<u32>) -> Result<NodeSet, PinningError> {
    match list.iter().find(|node| **node >= NODE_NUMBERS) {
        Some(node) => Err(unreadable(format!("NUMA node {node}: 63 is the highest"))),
        None => Ok(list.into_iter().collect()),
    }
}

fn blocks(list: Vec<FileBlock>) -> Result<Vec<Block>, PinningError> {
    let block = |FileBlock { numa_affinity, resource, size }| {
        Ok(Block { nodes: nodes(numa_affinity)?, resource, size })
    };
    list.into_iter().map(block).collect()
}

fn file_blocks(blocks: &[Block]) -> Vec<FileBlock> {
    let block = |block: &Block| FileBlock {
        numa_affinity: block.nodes.iter().collect(),
        resource: block.resource.clone(),
        size: block.size,
    };
    blocks.iter().map(block).collect()
}

impl File {
    /// Returns the file as V2 if its checksum is that of V2, otherwise as V1, which has no pods and needs no
    /// checksum; None if the file is neither.
    fn intact(mut self, pod_level: bool) -> Option<Self> {
        let is = |text: &str| self.checksum == u64::from(fnv1a(text));
        if pod_level && is(&self.text("MemoryManagerCheckpoint", true)) {
            return Some(self);
        }
        let newer = (!pod_level).then_some("MemoryManagerCheckpointV1");
        let mut names = ["MemoryManagerCheckpoint"].into_iter().chain(newer);
        let intact = self.checksum == 0 || names.any(|name| is(&self.text(name, false)));
        self.pod_entries.clear();
        intact.then_some(self)
    }

    fn text(&self, name: &str, pod_level: bool) -> String {
        let nodes = map_text(self.machine_state.iter().map(node_text));
        let pod = |(uid, containers): (&String, &BTreeMap<String, Vec<FileBlock>>)| {
            let containers = containers.iter().map(|(name, list)| format!("{name}:[{}]", block_text(list)));
            format!("{uid}:{}", map_text(containers))
        };
        let entries = map_text(self.entries.iter().map(pod));
        let pod_entry = |(uid, entry): (&String, &PodEntry)| {
            format!("{uid}:{{MemoryBlocks:([]state.Block)[{}]}}", block_text(&entry.memory_blocks))
        };
        let pods = map_text(self.pod_entries.iter().map(pod_entry));
        let pods =
            if pod_level { format!(" PodEntries:(state.PodMemoryAssignments){pods}") } else { String::new() };
        let policy = &self.policy_name;
        format!(
            "(*state.{name}){{PolicyName:(string){policy} MachineState:(state.NUMANodeMap){nodes} \
             Entries:(state.ContainerMemoryAssignments){entries}{pods} Checksum:(checksum.Checksum)0}}"
        )
    }
}

fn node_text((number, node): (&u32, &FileNode)) -> String {
    let table = |(name, table): (&String, &Table)| {
        let Table { total, system_reserved, allocatable, reserved, free } = table;
        format!(
            "{name}:<*>{{TotalMemSize:(uint64){total} SystemReserved:(uint64){system_reserved} \
             Allocatable:(uint64){allocatable} Reserved:(uint64){reserved} Free:(uint64){free}}}"
        )
    };
    let tables = map_text(node.memory_map.iter().map(table));
    let (assignments, cells) = (node.number_of_assignments, list_text(&node.cells));
    format!(
        "{number}:<*>{{NumberOfAssignments:(int){assignments} \
         MemoryMap:(map[v1.ResourceName]*state.MemoryTable){tables} Cells:([]int)[{cells}]}}"
    )
}

fn block_text(blocks: &[FileBlock]) -> String {
    let block = |block: &FileBlock| {
        let (nodes, resource, size) = (list_text(&block.numa_affinity), &block.resource, block.size);
        format!("{{NUMAAffinity:([]int)[{nodes}] Type:(v1.ResourceName){resource} Size:(uint64){size}}}")
    };
    blocks.iter().map(block).collect::<Vec<_>>().join(" ")
}

fn list_text(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

fn map_text(entries: impl Iterator<Item = String>) -> String {
    format!("map[{}]", entries.collect::<Vec<_>>().join(" "))
}
