//! A start although the state file is of another policy, another machine or other settings. The kubelet
//! refuses to start there until an administrator deletes the file.

use super::{
    super::error::PinningError,
    MemoryManager, MemoryState,
    ledger::{Block, Ledger},
};

/// Starts a manager with an empty state, and gives pods back the memory of the file that is still there.
/// Returns the pods that lose theirs. A file that can't be read has no pods.
///
/// # Errors
/// The settings leave nothing to start with.
pub fn recover(manager: &mut MemoryManager, file: &str) -> Result<Vec<String>, PinningError> {
    let old = MemoryState::read_of_any(file, manager.pod_level)
        .or_else(|_| MemoryState::read_of_any(file, !manager.pod_level))
        .map(|(_, old)| old)
        .unwrap_or_default();
    manager.start(None)?;
    let mut lost = Vec::new();
    for (uid, containers) in old.containers {
        let of_pod = old.pods.get(&uid).filter(|blocks| manager.pod_level && !blocks.is_empty());
        let blocks: Vec<Block> = match of_pod {
            Some(blocks) => blocks.clone(),
            None => containers.values().flatten().cloned().collect(),
        };
        let kept = if manager.is_static() { with(&manager.state.ledger, &blocks) } else { None };
        if let Some(ledger) = kept {
            manager.state.ledger = ledger;
            manager.state.pods.extend(of_pod.map(|blocks| (uid.clone(), blocks.clone())));
            manager.state.containers.insert(uid, containers);
        } else if !blocks.is_empty() {
            lost.push(uid);
        }
    }
    Ok(lost)
}

/// The ledger with these blocks given away; `None` if a node is missing, has too little, or serves another
/// group.
fn with(ledger: &Ledger, blocks: &[Block]) -> Option<Ledger> {
    let mut ledger = ledger.clone();
    for block in blocks {
        let mut tables = block.nodes.iter().map(|node| ledger.nodes.get(&node).map(|node| &node.tables));
        let known = tables.all(|tables| tables.is_some_and(|tables| tables.contains_key(&block.resource)));
        let fits = ledger.free(block.nodes, &block.resource) >= block.size && !ledger.violates(block.nodes);
        if !known || !fits || block.nodes.is_empty() {
            return None;
        }
        ledger.reserve(block.nodes, &block.resource, block.size);
    }
    Some(ledger)
}
