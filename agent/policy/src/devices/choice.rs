//! Which of several devices are taken: what the plugin would rather give, else those that are near each
//! other.

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
    pub(super) nodes: Nodes,
}

impl Question {
    /// The devices to allocate, given the plugin's answer (best first; what wasn't offered is ignored; too
    /// few are made up for).
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

/// `chosen`, and as many of those in `left` as make it `size`, [`near`] each other.
pub(super) fn fill(mut chosen: Ids, size: usize, left: &[(&str, &[i64])], nodes: &Nodes) -> Ids {
    let more = near(left, nodes, &chosen, size.saturating_sub(chosen.len()));
    chosen.extend(more.into_iter().map(str::to_owned));
    chosen
}

/// The NUMA nodes of devices, by id; none for one that is near no node.
pub(super) type Nodes = BTreeMap<String, Vec<i64>>;

/// Each of the ids with the NUMA nodes that it is near: one walk through both, since both are in order.
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

/// `count` of the devices in `left` (in the order of their ids, those in `chosen` don't count), near each
/// other: of the NUMA nodes that can give them all, one that already gave some of `chosen`, or else the one
/// with the fewest left (the others keep room for larger requests); if none can, from as few nodes as
/// possible; those near no node last.
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
