//! Which of several devices are taken: what the plugin would rather give, else those that are near each other.

use std::collections::{BTreeMap, BTreeSet};

use super::Ids;

/// What to ask a plugin (`GetPreferredAllocation`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// What it may choose from, including `must_include`.
    pub available: BTreeSet<String>,
    /// What it must choose.
    pub must_include: BTreeSet<String>,
    /// How many in all.
    pub size: usize,
    pub(super) nodes: BTreeMap<String, Vec<i64>>,
}

impl Question {
    /// The devices to allocate, given the plugin's answer (best first; what wasn't offered is ignored; too few are made up for).
    #[must_use]
    pub fn answer<S: AsRef<str>>(self, preferred: &[S]) -> BTreeSet<String> {
        let mut chosen = self.must_include;
        for id in preferred.iter().map(AsRef::as_ref) {
            if chosen.len() < self.size && self.available.contains(id) {
                chosen.insert(id.to_owned());
            }
        }
        let left: BTreeSet<&str> =
            self.available.iter().map(String::as_str).filter(|id| !chosen.contains(*id)).collect();
        let more = near(&left, &self.nodes, &chosen, self.size.saturating_sub(chosen.len()));
        chosen.extend(more.into_iter().map(str::to_owned));
        chosen
    }
}

/// `count` of the devices in `left`, near each other: of the NUMA nodes that can give them all, one that already gave some of
/// `chosen`, or else the one with the fewest left (the others keep room for larger requests); if none can, from as few nodes
/// as possible; those near no node last.
fn near<'a>(
    left: &BTreeSet<&'a str>,
    nodes: &BTreeMap<String, Vec<i64>>,
    chosen: &Ids,
    count: usize,
) -> Vec<&'a str> {
    let near_nodes = |id: &str| nodes.get(id).map_or(&[][..], Vec::as_slice);
    let mut by_node: BTreeMap<i64, BTreeSet<&'a str>> = BTreeMap::new();
    for id in left {
        for node in near_nodes(id) {
            by_node.entry(*node).or_default().insert(id);
        }
    }
    let given = |node: i64| chosen.iter().filter(|id| near_nodes(id).contains(&node)).count();
    let mut taken: Vec<&'a str> = Vec::new();
    while taken.len() < count && !by_node.is_empty() {
        let wanted = count - taken.len();
        let best = by_node.iter().min_by_key(|(node, ids)| {
            let enough = ids.len() >= wanted;
            let order = if enough { ids.len() } else { usize::MAX - ids.len() };
            (!enough, std::cmp::Reverse(given(**node)), order, **node)
        });
        let Some((node, ids)) = best.map(|(node, ids)| (*node, ids.clone())) else { break };
        taken.extend(ids.iter().take(wanted));
        by_node.remove(&node);
        by_node.values_mut().for_each(|others| others.retain(|id| !taken.contains(id)));
        by_node.retain(|_, ids| !ids.is_empty());
    }
    let rest: Vec<&'a str> = left
        .iter()
        .copied()
        .filter(|id| !taken.contains(id))
        .take(count.saturating_sub(taken.len()))
        .collect();
    taken.extend(rest);
    taken
}
