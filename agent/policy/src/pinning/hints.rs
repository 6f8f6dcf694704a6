//! Hints: the sets of NUMA nodes that could satisfy a container's request, and the best combination of one
//! hint per resource (`HintMerger`).
//!
//! The kubelet tries every combination. The order of results is total, so this module finds the best result
//! directly: preferred results are the sets that every resource prefers, and the others are the reachable
//! intersections.

use std::collections::{BTreeMap, BTreeSet};

use super::nodes::{NodeSet, Subsets};

/// A set of nodes that could satisfy a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hint {
    /// The nodes; None means any nodes.
    pub nodes: Option<NodeSet>,
    /// True if no smaller set could ever satisfy the request.
    pub preferred: bool,
}

/// The hints of a provider by resource. None means no preference for this resource; an empty list,
/// impossible; an empty map, no preference at all.
pub type ProviderHints = BTreeMap<String, Option<Vec<Hint>>>;

/// Distances between nodes, by the number of one node and the position of the other, as in the firmware's
/// list.
pub type Distances = BTreeMap<u32, Vec<u64>>;

/// Returns a list for each resource of each provider (`filterProvidersHints`).
pub(crate) fn lists(providers: &[ProviderHints]) -> Vec<Vec<Hint>> {
    let any = |preferred: bool| vec![Hint { nodes: None, preferred }];
    let mut lists = Vec::new();
    for provider in providers {
        if provider.is_empty() {
            lists.push(any(true));
        }
        lists.extend(provider.values().map(|hints| match hints {
            None => any(true),
            Some(hints) if hints.is_empty() => any(false),
            Some(hints) => hints.clone(),
        }));
    }
    lists
}

/// Returns the best combination of one hint per list; if no hint has a node, returns all nodes, not
/// preferred.
pub(crate) fn merge(lists: &[Vec<Hint>], all: NodeSet, distances: Option<&Distances>) -> Hint {
    // A narrower set comes first; of equally wide sets the closest, if distance counts, then the one with
    // lower numbers.
    let fitness = |set: &NodeSet| (set.len(), distances.map_or(0, |d| distance(d, *set)), *set);
    let preferred = preferred_by_all(lists, all);
    if let Some(best) = preferred.into_iter().min_by_key(fitness) {
        return Hint { nodes: Some(best), preferred: true };
    }
    // The target width is that of the list that needs most nodes. Sets up to this width come first, the
    // widest first; then wider sets, the narrowest first.
    let width = lists.iter().filter_map(|list| narrowest(list)).max().unwrap_or(0);
    let order = |set: &NodeSet| {
        let (length, ..) = fitness(set);
        (length > width, if length > width { length } else { width.saturating_sub(length) }, fitness(set))
    };
    let best = reachable(lists, all).into_iter().filter(|set| !set.is_empty()).min_by_key(order);
    Hint { nodes: Some(best.unwrap_or(all)), preferred: false }
}

/// Returns the number of nodes of a list's narrowest hint; None if no hint names nodes.
fn narrowest(list: &[Hint]) -> Option<u32> {
    list.iter().filter_map(|hint| hint.nodes).map(NodeSet::len).min()
}

/// Returns the sets of existing nodes that every list has as a preferred hint. A preferred hint without nodes
/// matches any set.
fn preferred_by_all(lists: &[Vec<Hint>], all: NodeSet) -> BTreeSet<NodeSet> {
    let mut sets: BTreeSet<NodeSet> = BTreeSet::new();
    // True while all lists so far have a hint without nodes.
    let mut any = true;
    for list in lists {
        let preferred = || list.iter().filter(|hint| hint.preferred);
        let own: BTreeSet<NodeSet> = preferred().filter_map(|hint| hint.nodes).collect();
        let goes_with_any = preferred().any(|hint| hint.nodes.is_none());
        let mut next = &sets & &own;
        if goes_with_any {
            next.append(&mut sets);
        }
        if any {
            next.extend(own);
        }
        sets = next;
        any &= goes_with_any;
    }
    let mut sets: BTreeSet<NodeSet> = sets.into_iter().map(|set| set.intersection(all)).collect();
    if any {
        sets.insert(all);
    }
    sets.retain(|set| !set.is_empty());
    sets
}

/// Returns the intersections of one hint per list and of all nodes.
///
/// Counts, for every set, the hints of each list that contain the set: the intersection of a pair contains a
/// set if both hints do. The products give the pairs with exactly that intersection (Möbius inversion), in a
/// time that depends only on the number of nodes.
fn reachable(lists: &[Vec<Hint>], all: NodeSet) -> Vec<NodeSet> {
    let subsets = Subsets::of(all.iter());
    let mut reached = vec![0_u64; subsets.count()];
    if let Some(full) = reached.last_mut() {
        *full = 1;
    }
    for list in lists {
        let mut own = vec![0_u64; subsets.count()];
        for hint in list {
            own[subsets.index(hint.nodes.unwrap_or(all))] = 1;
        }
        over_supersets(&mut reached, u64::wrapping_add);
        over_supersets(&mut own, u64::wrapping_add);
        reached.iter_mut().zip(own).for_each(|(count, own)| *count = count.wrapping_mul(own));
        over_supersets(&mut reached, u64::wrapping_sub);
        reached.iter_mut().for_each(|count| *count = (*count).min(1));
    }
    let there = |(index, _): &(usize, NodeSet)| reached.get(*index).is_some_and(|count| *count > 0);
    subsets.iter().filter(there).map(|(_, set)| set).collect()
}

/// Replaces each set's value by the sum over all its supersets if `step` adds; restores the values if `step`
/// subtracts (Möbius inversion).
fn over_supersets(values: &mut [u64], step: impl Fn(u64, u64) -> u64) {
    let mut bit = 1_usize;
    while bit < values.len() {
        for index in 0..values.len() {
            if index & bit == 0 {
                values[index] = step(values[index], values[index | bit]);
            }
        }
        bit = bit.saturating_mul(2);
    }
}

/// Returns the sum of the distances between all nodes of a set (`CalculateAverageFor`; for sets with equal
/// numbers of nodes, the sum and the average have the same order).
fn distance(distances: &Distances, set: NodeSet) -> u64 {
    let between = |a: u32, b: u32| {
        let row = distances.get(&a);
        row.and_then(|row| row.get(usize::try_from(b).ok()?)).copied().unwrap_or(0)
    };
    let pairs = set.iter().flat_map(|a| set.iter().map(move |b| (a, b)));
    pairs.fold(0_u64, |sum, (a, b)| sum.saturating_add(between(a, b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tries every combination, as the kubelet does.
    fn by_all_combinations(lists: &[Vec<Hint>], all: NodeSet) -> Hint {
        let mut combinations = vec![Vec::new()];
        for list in lists {
            let with = |combination: &Vec<Hint>, hint: &Hint| {
                let mut longer: Vec<Hint> = combination.clone();
                longer.push(*hint);
                longer
            };
            combinations =
                combinations.iter().flat_map(|c| list.iter().map(move |hint| with(c, hint))).collect();
        }
        let width = lists.iter().filter_map(|list| narrowest(list)).max().unwrap_or(0);
        let mut best: Option<Hint> = None;
        for combination in combinations {
            let nodes: Vec<NodeSet> = combination.iter().filter_map(|hint| hint.nodes).collect();
            let preferred =
                combination.iter().all(|hint| hint.preferred) && nodes.iter().all(|set| *set == nodes[0]);
            let merged = nodes.iter().fold(all, |merged, set| merged.intersection(*set));
            let candidate = Hint { nodes: Some(merged), preferred };
            if !merged.is_empty() && best.is_none_or(|best| is_better(best, candidate, width)) {
                best = Some(candidate);
            }
        }
        best.unwrap_or(Hint { nodes: Some(all), preferred: false })
    }

    fn is_better(current: Hint, candidate: Hint, width: u32) -> bool {
        let (now, new) = (current.nodes.unwrap(), candidate.nodes.unwrap());
        let narrower = new.width() < now.width();
        match (current.preferred, candidate.preferred) {
            (false, true) => true,
            (true, false) => false,
            (true, true) => narrower,
            (false, false) if now.len() > width => narrower,
            (false, false) if now.len() == width => new.len() == width && narrower,
            (false, false) if new.len() > width => false,
            (false, false) if new.len() == width || new.len() > now.len() => true,
            (false, false) => new.len() == now.len() && narrower,
        }
    }

    fn hint() -> impl Strategy<Value = Hint> {
        let nodes = prop::option::weighted(0.9, prop::collection::btree_set(0_u32..5, 0..4));
        (nodes, any::<bool>()).prop_map(|(nodes, preferred)| Hint {
            nodes: nodes.map(|nodes| nodes.into_iter().collect()),
            preferred,
        })
    }

    proptest! {
        #[test]
        fn pinning_merge_is_the_best_of_all_combinations(
            lists in prop::collection::vec(prop::collection::vec(hint(), 0..5), 0..4),
            nodes in 0_u32..5,
        ) {
            let all: NodeSet = (0..nodes).collect();
            prop_assert_eq!(merge(&lists, all, None), by_all_combinations(&lists, all));
        }
    }

    #[test]
    fn pinning_merge_prefers_what_is_close() {
        let set = |nodes: [u32; 2]| nodes.into_iter().collect::<NodeSet>();
        let hint = |nodes: [u32; 2]| Hint { nodes: Some(set(nodes)), preferred: true };
        let rows = [vec![10, 21, 11], vec![21, 10, 21], vec![11, 21, 10]];
        let distances: Distances = (0..).zip(rows).collect();
        let lists = [vec![hint([0, 1]), hint([0, 2])]];
        let all: NodeSet = (0..3).collect();
        assert_eq!(merge(&lists, all, None).nodes, Some(set([0, 1])));
        assert_eq!(merge(&lists, all, Some(&distances)).nodes, Some(set([0, 2])));
    }
}
