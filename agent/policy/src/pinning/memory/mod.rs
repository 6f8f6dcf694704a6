//! The memory manager, which assigns NUMA nodes to containers' memory and huge pages
//! (`memorymanager/policy_static.go`).
//!
//! A container of a Guaranteed pod gets a *block* of each resource that it names: a number of bytes from one
//! node, or from a group of nodes. A node in a group serves only that group. Later containers reuse the
//! memory of an init container, which becomes free when they start.

pub mod ledger;
mod pod;
pub mod restart;
mod settings;
mod state;

use std::collections::BTreeMap;

use super::{
    error::{PinningError, Refusal},
    gates::Gates,
    hints::{Hint, ProviderHints},
    needs::{Bytes, ContainerNeeds, Kind, Needs},
    nodes::NodeSet,
};
use crate::resources::MEMORY;
use ledger::{Block, Ledger};
pub use settings::{MemoryNode, MemorySettings, Reservation};
pub use state::{Assignments, MemoryState};

/// The memory manager.
#[derive(Debug, Clone)]
pub struct MemoryManager {
    /// The machine without assignments; None: the policy is `None`.
    machine: Option<Ledger>,
    pod_level: bool,
    state: MemoryState,
    /// Memory that init containers leave to later containers, by pod: admissions of pods may interleave.
    reuse: Reuse,
}

/// Bytes by pod, and by nodes and resource.
#[derive(Debug, Clone, Default)]
struct Reuse(BTreeMap<String, BTreeMap<(NodeSet, String), u64>>);

impl Reuse {
    fn of(&self, uid: &str, nodes: NodeSet, resource: &str) -> u64 {
        let of_pod = self.0.get(uid);
        of_pod.and_then(|left| left.get(&(nodes, resource.to_owned()))).copied().unwrap_or(0)
    }

    /// Adds the memory of an init container to the reusable memory; subtracts the amounts that other
    /// containers need (`updatePodReusableMemory`).
    fn update(&mut self, uid: &str, kind: Kind, blocks: &[Block]) {
        let of_pod = self.0.entry(uid.to_owned()).or_default();
        for block in blocks {
            let left = of_pod.entry((block.nodes, block.resource.clone())).or_default();
            *left = if kind == Kind::Init { block.size.max(*left) } else { left.saturating_sub(block.size) };
        }
    }
}

/// Returns the rejection for too little memory, in the kubelet's words.
fn refuse(cause: &str) -> Refusal {
    Refusal::unexpected(format!("[memorymanager] {cause}"))
}

impl MemoryManager {
    /// Creates the manager for these settings; its state is empty until [`Self::start`].
    ///
    /// # Errors
    /// A setting is invalid, or invalid on this machine.
    pub fn new(settings: &MemorySettings, nodes: &[MemoryNode], gates: Gates) -> Result<Self, PinningError> {
        let machine = settings.machine(nodes)?;
        let pod_level = gates.pod_level_managers;
        Ok(Self { machine, pod_level, state: MemoryState::default(), reuse: Reuse::default() })
    }

    /// Starts with the content of the state file, if the file exists (`validateState`).
    ///
    /// # Errors
    /// The file is unreadable, is from another policy, or does not match the machine and the settings.
    pub fn start(&mut self, file: Option<&str>) -> Result<(), PinningError> {
        self.reuse = Reuse::default();
        self.state = match file {
            Some(file) => MemoryState::read(file, policy_name(self.machine.as_ref()), self.pod_level)?,
            None => MemoryState::default(),
        };
        let Some(machine) = &self.machine else { return Ok(()) };
        if self.state.ledger.nodes.is_empty() {
            if !self.state.containers.is_empty() {
                let message = "[memorymanager] machine state can not be empty when it has memory assignments";
                return Err(PinningError::new(message));
            }
            self.state.ledger = machine.clone();
            return Ok(());
        }
        let blocks = self.state.blocks();
        let mut expected = machine.clone();
        blocks.iter().try_for_each(|(uid, block)| reserve(&mut expected, uid, block))?;
        let sets: Vec<NodeSet> = blocks.iter().map(|(_, block)| block.nodes).collect();
        if !self.state.ledger.agrees(&expected, &sets) {
            let message = "[memorymanager] the expected machine state is different from the real one";
            return Err(PinningError::new(message));
        }
        Ok(())
    }

    /// Returns the state file's content.
    #[must_use]
    pub fn file(&self) -> String {
        self.state.write(policy_name(self.machine.as_ref()), self.pod_level)
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> &MemoryState {
        &self.state
    }

    /// Returns true if memory is managed.
    #[must_use]
    pub fn is_static(&self) -> bool {
        self.machine.is_some()
    }

    /// Returns the sets of nodes that could provide a container's memory (`GetTopologyHints`).
    #[must_use]
    pub fn hints(&self, needs: &Needs, container: &ContainerNeeds) -> ProviderHints {
        let Ok(wanted) = &container.memory else { return ProviderHints::new() };
        if self.machine.is_none() || !needs.guaranteed || needs.ignored {
            return ProviderHints::new();
        }
        match self.state.held(&needs.uid, &container.name) {
            Some(blocks) => hints_of_blocks(blocks, wanted),
            None => for_each(wanted, &self.possible(&needs.uid, wanted)),
        }
    }

    fn possible(&self, uid: &str, wanted: &Bytes) -> Vec<Hint> {
        self.state.ledger.hints(wanted, |nodes, resource| self.reuse.of(uid, nodes, resource))
    }

    /// Assigns memory to a container, from these nodes and more nodes if they have too little (`Allocate`).
    /// Does nothing if the container already has its memory.
    ///
    /// # Errors
    /// Too little memory is free, or no valid group of nodes has enough.
    pub fn allocate(
        &mut self,
        needs: &Needs,
        container: &ContainerNeeds,
        affinity: Hint,
    ) -> Result<(), Refusal> {
        if self.machine.is_none() || !needs.guaranteed || needs.ignored {
            return Ok(());
        }
        if let Some(blocks) = self.state.held(&needs.uid, &container.name) {
            let blocks = blocks.clone();
            self.reuse.update(&needs.uid, container.kind, &blocks);
            return Ok(());
        }
        let wanted = container.memory.as_ref().map_err(Refusal::unexpected)?;
        let nodes = self.choose(&needs.uid, wanted, affinity)?;
        let blocks: Vec<Block> = blocks(nodes, wanted);
        for block in &blocks {
            let reused = self.reuse.of(&needs.uid, nodes, &block.resource);
            self.state.ledger.reserve(nodes, &block.resource, block.size.saturating_sub(reused));
        }
        self.reuse.update(&needs.uid, container.kind, &blocks);
        self.state.shrink_inits(needs, container, &blocks);
        let pod = self.state.containers.entry(needs.uid.clone()).or_default();
        pod.insert(container.name.clone(), blocks);
        Ok(())
    }

    /// Returns the nodes for the memory: those of the affinity if they have enough, otherwise more nodes; the
    /// best nodes without an affinity.
    fn choose(&self, uid: &str, wanted: &Bytes, affinity: Hint) -> Result<NodeSet, Refusal> {
        let ledger = &self.state.ledger;
        let best = |within: NodeSet| {
            // If the resources lack `memory`, the kubelet finds no hint.
            let hints = if wanted.contains_key(MEMORY) { self.possible(uid, wanted) } else { Vec::new() };
            let sets = hints.into_iter().filter_map(|hint| Some((hint.nodes?, hint.preferred)));
            let wider = sets.filter(|(nodes, _)| within.is_subset(*nodes));
            wider.min_by_key(|(nodes, preferred)| (!preferred, nodes.width()))
        };
        let (nodes, preferred) = match affinity.nodes {
            Some(nodes) => (nodes, affinity.preferred),
            None => best(NodeSet::default()).ok_or_else(|| {
                refuse(
                    "failed to get the default NUMA affinity, no NUMA nodes with enough memory is available",
                )
            })?,
        };
        if affinity.preferred && !preferred {
            return Err(refuse("failed to find the default preferred hint"));
        }
        // The kubelet takes memory of a single node out of a group, and loses count of the group's memory
        // when the blocks are freed. Here such a block comes out of the whole group.
        let nodes = if ledger.satisfies(nodes, wanted) && !ledger.splits_group(nodes) {
            nodes
        } else {
            let wider = best(nodes)
                .ok_or_else(|| refuse("failed to find NUMA nodes to extend the current topology hint"))?;
            match wider {
                (_, false) if preferred => return Err(refuse("failed to find the extended preferred hint")),
                (nodes, _) => nodes,
            }
        };
        if ledger.violates(nodes) {
            return Err(refuse("preferred hint violates NUMA node allocation"));
        }
        Ok(nodes)
    }

    /// Frees the memory of the init containers before a starting container, because they have ended
    /// (`AddContainer`). Memory of a pod with pod-level resources stays with the pod.
    pub fn container_starts(&mut self, needs: &Needs, container: &str) {
        let ended: Vec<String> = needs.ended_before(container).map(|init| init.name.clone()).collect();
        self.retain(&needs.uid, |name| !ended.iter().any(|ended| ended == name));
    }

    /// Frees all memory of a pod.
    pub fn release(&mut self, uid: &str) {
        self.retain(uid, |_| false);
    }

    /// Frees the memory of containers of the pod that are no longer active.
    pub fn retain(&mut self, uid: &str, wanted: impl Fn(&str) -> bool) {
        if self.machine.is_none() {
            return;
        }
        let of_pod = self.state.pods.contains_key(uid);
        let mut containers = self.state.containers.remove(uid).unwrap_or_default();
        for (name, blocks) in &containers {
            // The pod's memory becomes free with its last container.
            if !of_pod && !wanted(name) {
                self.state.ledger.release(blocks);
            }
        }
        containers.retain(|name, _| wanted(name));
        if containers.is_empty() {
            let of_pod = self.state.pods.remove(uid);
            self.state.ledger.release(&of_pod.unwrap_or_default());
            self.reuse.0.remove(uid);
        } else {
            self.state.containers.insert(uid.to_owned(), containers);
        }
    }
}

fn policy_name(machine: Option<&Ledger>) -> &'static str {
    if machine.is_some() { "Static" } else { "None" }
}

/// Reserves a block of a state file (`updateExpectedMachineState`).
fn reserve(machine: &mut Ledger, uid: &str, block: &Block) -> Result<(), PinningError> {
    let mut tables = block.nodes.iter().map(|node| machine.nodes.get(&node).map(|node| &node.tables));
    if !tables.all(|tables| tables.is_some_and(|tables| tables.contains_key(&block.resource))) {
        let message = format!(
            "[memorymanager] (pod: {uid}) the memory assignment uses a NUMA node or a memory resource that does not exist"
        );
        return Err(PinningError::new(message));
    }
    machine.reserve(block.nodes, &block.resource, block.size);
    Ok(())
}

fn blocks(nodes: NodeSet, sizes: &Bytes) -> Vec<Block> {
    sizes.iter().map(|(resource, size)| Block { nodes, resource: resource.clone(), size: *size }).collect()
}

/// Returns the same hints for every resource; an empty map, which means no preference, without a hint.
fn for_each(wanted: &Bytes, hints: &[Hint]) -> ProviderHints {
    if hints.is_empty() {
        return ProviderHints::new();
    }
    wanted.keys().map(|resource| (resource.clone(), Some(hints.to_vec()))).collect()
}

/// Returns the hints for assigned memory: its nodes if the amounts match the request, otherwise no preference
/// (`regenerateHints`).
fn hints_of_blocks(blocks: &[Block], wanted: &Bytes) -> ProviderHints {
    let as_wanted = |block: &Block| wanted.get(&block.resource) == Some(&block.size);
    if blocks.len() != wanted.len() || !blocks.iter().all(as_wanted) {
        return ProviderHints::new();
    }
    let mut hints: ProviderHints =
        wanted.keys().map(|resource| (resource.clone(), Some(Vec::new()))).collect();
    for block in blocks {
        let hint = Hint { nodes: Some(block.nodes), preferred: true };
        hints.entry(block.resource.clone()).or_default().get_or_insert_default().push(hint);
    }
    hints
}
