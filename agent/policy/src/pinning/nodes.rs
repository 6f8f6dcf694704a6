//! A set of NUMA nodes, as the kubelet's bit mask (`topologymanager/bitmask`).

use std::fmt;

use beelet_units::cpu_list;

/// Nodes with this number or a higher one do not fit into a mask.
pub const NODE_NUMBERS: u32 = u64::BITS;

/// Maximum number of nodes: the managers compare all sets of them.
pub const MOST_NODES: usize = 16;

/// NUMA nodes by their numbers, all below [`NODE_NUMBERS`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct NodeSet(u64);

impl NodeSet {
    /// Returns a set of one node; the empty set if the number is too large.
    #[must_use]
    pub fn of(node: u32) -> Self {
        Self(1_u64.checked_shl(node).unwrap_or(0))
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns true if the set has no node.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns true if the node is in the set.
    #[must_use]
    pub fn contains(self, node: u32) -> bool {
        self.0 & Self::of(node).0 != 0
    }

    /// Returns the nodes of either set.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the nodes of both sets.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns true if the other set has all nodes of this one.
    #[must_use]
    pub fn is_subset(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// Returns the nodes, in ascending order.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        (0..NODE_NUMBERS).filter(move |node| self.contains(*node))
    }

    /// Compares two sets: the narrower one has fewer nodes, or the same number and the lower numbers
    /// (`IsNarrowerThan`).
    #[must_use]
    pub fn width(self) -> (u32, Self) {
        (self.len(), self)
    }
}

impl FromIterator<u32> for NodeSet {
    fn from_iter<T: IntoIterator<Item = u32>>(nodes: T) -> Self {
        nodes.into_iter().fold(Self::default(), |set, node| set.union(Self::of(node)))
    }
}

impl fmt::Display for NodeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&cpu_list::format(self.iter()))
    }
}

impl fmt::Debug for NodeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

/// All sets of at most [`MOST_NODES`] nodes except the empty one, with sums over their nodes.
#[derive(Debug)]
pub(crate) struct Subsets {
    nodes: Vec<u32>,
}

impl Subsets {
    /// Returns the sets of these nodes; of more than [`MOST_NODES`], the sets of the first ones.
    pub(crate) fn of(nodes: impl IntoIterator<Item = u32>) -> Self {
        Self { nodes: nodes.into_iter().take(MOST_NODES).collect() }
    }

    /// Returns the number of nodes.
    pub(crate) fn nodes(&self) -> u32 {
        u32::try_from(self.nodes.len()).unwrap_or(u32::MAX)
    }

    /// Returns every set, with its index in [`Self::sums`].
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, NodeSet)> + '_ {
        (1..self.count()).map(|index| (index, self.set(index)))
    }

    /// Returns the number of sets, including the empty one.
    pub(crate) fn count(&self) -> usize {
        1_usize.checked_shl(self.nodes()).unwrap_or(1)
    }

    /// Returns the index of a set; ignores unknown nodes.
    pub(crate) fn index(&self, set: NodeSet) -> usize {
        let own = self.nodes.iter().zip(0_u32..).filter(|(node, _)| set.contains(**node));
        own.fold(0, |index, (_, bit)| index | 1_usize.checked_shl(bit).unwrap_or(0))
    }

    fn set(&self, index: usize) -> NodeSet {
        let chosen = self.nodes.iter().zip(0_u32..);
        chosen
            .filter(|(_, bit)| index.checked_shr(*bit).unwrap_or(0) & 1 == 1)
            .map(|(node, _)| *node)
            .collect()
    }

    /// Returns the sum of its nodes' values for every set, modulo 2^64.
    pub(crate) fn sums(&self, of: impl Fn(u32) -> u64) -> Vec<u64> {
        let mut sums = vec![0_u64];
        for node in &self.nodes {
            let own = of(*node);
            let with: Vec<u64> = sums.iter().map(|sum| sum.wrapping_add(own)).collect();
            sums.extend(with);
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinning_nodes_are_ordered_by_width_then_number() {
        let set = |nodes: &[u32]| nodes.iter().copied().collect::<NodeSet>();
        assert!(set(&[3]).width() < set(&[0, 1]).width());
        assert!(set(&[0, 1]).width() < set(&[0, 2]).width());
        assert_eq!(set(&[0, 2, 3]).to_string(), "0,2-3");
        assert_eq!(NodeSet::of(64), NodeSet::default());
        assert!(set(&[2]).is_subset(set(&[0, 2])) && !set(&[1]).is_subset(set(&[0, 2])));
    }

    #[test]
    fn pinning_subsets_have_the_sums_of_their_nodes() {
        let subsets = Subsets::of([1, 5, 9]);
        let sums = subsets.sums(u64::from);
        assert_eq!(subsets.iter().count(), 7);
        for (index, set) in subsets.iter() {
            assert_eq!(sums[index], set.iter().map(u64::from).sum::<u64>(), "{set}");
        }
    }
}
