//! Choice among several devices: the plugin's preferred ones, else those near each other.

use std::collections::{BTreeMap, BTreeSet};

use super::Ids;

/// A request for a plugin's preference (`GetPreferredAllocation`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Devices to choose from, including `must_include`.
    pub available: BTreeSet<String>,
    /// Devices that the plugin must choose.
    pub must_include: BTreeSet<String>,
    /// Number of devices in all.
    pub size: usize,
    pub(super) nodes: Nodes,
}

impl Question {
    /// Returns the devices to allocate, given the plugin's answer (best first). Ignores ids that were not
    /// offered and fills up an answer that is too short.
    #[must_use]
    pub fn answer<S: AsRef<str>>(self, preferred: &[S]) -> BTreeSet<String> {
        let mut chosen = self.must_include;
        for id in preferred.iter().map(AsRef::as_ref) {
            if chosen.len() < self.size && self.available.contains(id) {
                chosen.insert(id.to_owned());
            }
        }
        let left: Vec<(&str, &[i64])> = with_nodes(&self.available, &self.nodes).collect();
        fill(chosen, self.size, &left, &self.nodes)
    }
}

/// Fills `chosen` up to `size` with devices of `left` that are [`near`] each other.
pub(super) fn fill(mut chosen: Ids, size: usize, left: &[(&str, &[i64])], nodes: &Nodes) -> Ids {
    let more = near(left, nodes, &chosen, size.saturating_sub(chosen.len()));
    chosen.extend(more.into_iter().map(str::to_owned));
    chosen
}

/// NUMA nodes of devices, by id; an empty list for a device near no node.
pub(super) type Nodes = BTreeMap<String, Vec<i64>>;

/// Pairs each id with the NUMA nodes near it: one pass through both lists, which are sorted.
pub(super) fn with_nodes<'a, S: AsRef<str> + ?Sized + 'a>(
    ids: impl IntoIterator<Item = &'a S>,
    nodes: &'a Nodes,
) -> impl Iterator<Item = (&'a str, &'a [i64])> {
    let mut nodes = nodes.iter().peekable();
    ids.into_iter().map(move |id| {
        let id = id.as_ref();
        while nodes.next_if(|(other, _)| other.as_str() < id).is_some() {}
        let near = nodes.next_if(|(other, _)| other.as_str() == id);
        (id, near.map_or(&[][..], |(_, near)| near.as_slice()))
    })
}

/// Returns `count` devices of `left` (in the order of their ids, without those in `chosen`) near each other:
/// of the NUMA nodes that have enough, a node that already provides some of `chosen`, or else the node with
/// the fewest left (the others keep room for larger requests); if no node has enough, from as few nodes as
/// possible; devices near no node come last.
fn near<'a>(left: &[(&'a str, &[i64])], nodes: &Nodes, chosen: &Ids, count: usize) -> Vec<&'a str> {
    let mut by_node: BTreeMap<i64, Vec<&'a str>> = BTreeMap::new();
    let is_left = |id: &str| !chosen.contains(id);
    for (id, near) in left.iter().filter(|(id, near)| !near.is_empty() && is_left(id)) {
        for node in *near {
            let ids = by_node.entry(*node).or_default();
            // A plugin may name a node twice.
            if ids.last() != Some(id) {
                ids.push(id);
            }
        }
    }
    let given =
        |node: i64| chosen.iter().filter(|id| nodes.get(*id).is_some_and(|n| n.contains(&node))).count();
    let mut taken: Vec<&'a str> = Vec::new();
    while taken.len() < count && !by_node.is_empty() {
        let wanted = count - taken.len();
        let best = by_node.iter().min_by_key(|(node, ids)| {
            let enough = ids.len() >= wanted;
            let order = if enough { ids.len() } else { usize::MAX - ids.len() };
            (!enough, std::cmp::Reverse(given(**node)), order, **node)
        });
        let Some(node) = best.map(|(node, _)| *node) else { break };
        taken.extend(by_node.remove(&node).unwrap_or_default().into_iter().take(wanted));
        if taken.len() < count {
            by_node.values_mut().for_each(|others| others.retain(|id| !taken.contains(id)));
            by_node.retain(|_, ids| !ids.is_empty());
        }
    }
    let wanted = count.saturating_sub(taken.len());
    let rest = left.iter().map(|(id, _)| *id).filter(|id| is_left(id) && !taken.contains(id));
    let rest: Vec<&'a str> = rest.take(wanted).collect();
    taken.extend(rest);
    taken
}
