//! Distributes CPUs evenly over the smallest number of NUMA nodes that allows this
//! (`takeByTopologyNUMADistributed`, KEP-2902).
//!
//! The search tries combinations of 1, 2, 3, … nodes. A combination is fit if each of its nodes has an even
//! share of free CPUs; some of the nodes take the remainder, in groups (single CPUs, or whole cores). The
//! winner is the fit combination that leaves the machine's nodes with the most equal numbers of free CPUs.
//!
//! The search follows 1.38 in two points: it uses all nodes that the topology manager has chosen (k/k
//! 139456), and with `align-by-socket` a combination on fewer sockets is better for any balance (k/k 139778,
//! 141238).

use super::super::{
    cpu_set::CpuSet,
    machine::{CpuTopology, Level},
};
use super::packed::{self, Claim, ClaimError, Manner};

/// Maximum number of compared distributions: all distributions for eight nodes. On a machine with more nodes,
/// the best distribution so far wins.
const MOST_TRIALS: usize = 1 << 16;

/// The request, in addition to the number of CPUs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Distribution {
    /// Size of the groups in which CPUs are claimed.
    pub(crate) group: usize,
    /// True if fewer sockets are better than a better balance.
    pub(crate) align_by_socket: bool,
    /// Minimum number of nodes, if the machine has that many: those of the affinity.
    pub(crate) nodes: usize,
}

/// Claims `count` of the free CPUs.
pub(crate) fn claim(
    topology: &CpuTopology,
    free: &CpuSet,
    count: usize,
    wanted: Distribution,
) -> Result<CpuSet, ClaimError> {
    let manner = Manner::default();
    if count.checked_rem(wanted.group) != Some(0) {
        return packed::claim(topology, free, count, manner);
    }
    let mut claim = Claim::new(topology, free, count)?;
    if count == 0 {
        return Ok(claim.claimed);
    }
    let mut search = Search::new(topology, &claim, count, wanted);
    let Some(best) = search.best() else { return packed::claim(topology, free, count, manner) };
    for (node, share) in best {
        if let Some(group) = topology.groups(Level::Node).get(&node) {
            let here = claim.free.intersection(group);
            claim.add(&packed::claim(topology, &here, share, manner)?);
        }
    }
    if claim.needed > 0 { Err(ClaimError::Failed) } else { Ok(claim.claimed) }
}

/// A NUMA node with free CPUs.
#[derive(Debug, Clone, Copy)]
struct Place {
    node: u32,
    free: usize,
}

/// The search for the best distribution.
struct Search<'t> {
    topology: &'t CpuTopology,
    /// Nodes in the order of the search.
    places: Vec<Place>,
    count: usize,
    wanted: Distribution,
    trials: usize,
}

/// A distribution: the number of CPUs of each place, and its rank (lower is better).
struct Found {
    shares: Vec<usize>,
    /// Number of sockets, if sockets count; thousandths of the standard deviation of the free CPUs that
    /// remain.
    score: (usize, u64),
}

impl<'t> Search<'t> {
    fn new(topology: &'t CpuTopology, claim: &Claim<'_>, count: usize, wanted: Distribution) -> Self {
        let nodes = claim.nested(Level::Node).into_iter();
        let places = nodes.map(|(node, group)| Place { node, free: claim.free.common(group) }).collect();
        Self { topology, places, count, wanted, trials: 0 }
    }

    /// Returns the CPUs of each node; None if no combination is fit.
    fn best(&mut self) -> Option<Vec<(u32, usize)>> {
        let (least, most) = self.range();
        let floor = if self.wanted.nodes <= most { self.wanted.nodes.max(least) } else { least };
        let found = (floor..=most).chain(least..floor).find_map(|nodes| self.best_of(nodes))?;
        let given = self.places.iter().zip(found.shares).filter(|(_, share)| *share > 0);
        Some(given.map(|(place, share)| (place.node, share)).collect())
    }

    /// Returns the smallest and the largest number of nodes to try (`rangeNUMANodesNeededToSatisfy`).
    fn range(&self) -> (usize, usize) {
        let group = self.wanted.group.max(1);
        let groups = self.topology.all().len().div_ceil(group);
        let per_node = groups.div_ceil(self.topology.groups(Level::Node).len().max(1)).max(1);
        let needed = self.count.div_ceil(group);
        (needed.div_ceil(per_node), needed.min(self.places.len()))
    }

    /// Returns the best distribution over this number of nodes.
    fn best_of(&mut self, nodes: usize) -> Option<Found> {
        let mut best: Option<Found> = None;
        let all: Vec<usize> = (0..self.places.len()).collect();
        each_choice(&all, nodes, &mut |chosen| {
            let sockets = self.sockets(chosen);
            if let Some((shares, balance)) = self.distribute(chosen) {
                let score = (sockets, balance);
                if best.as_ref().is_none_or(|best| score < best.score) {
                    best = Some(Found { shares, score });
                }
            }
            self.trials < MOST_TRIALS
        });
        best
    }

    /// Returns the number of sockets of these places; zero if sockets do not count.
    fn sockets(&self, chosen: &[usize]) -> usize {
        if !self.wanted.align_by_socket {
            return 0;
        }
        let nodes = chosen.iter().filter_map(|place| self.places.get(*place)).map(|place| place.node);
        self.topology.touched(Level::Socket, &self.topology.of_nodes(nodes.collect())).count()
    }

    /// Returns the shares of these places, and the balance after them; None if the combination is not fit.
    fn distribute(&mut self, chosen: &[usize]) -> Option<(Vec<usize>, u64)> {
        self.trials = self.trials.saturating_add(1);
        let group = self.wanted.group.max(1);
        let free = |place: &usize| self.places.get(*place).map_or(0, |place| place.free);
        let groups = |cpus: usize| cpus.checked_div(group).unwrap_or(0);
        let in_groups: usize = chosen.iter().map(|place| groups(free(place))).fold(0, usize::saturating_add);
        if in_groups.saturating_mul(group) < self.count {
            return None;
        }
        let mut even = groups(self.count.checked_div(chosen.len())?).saturating_mul(group);
        let least = chosen.iter().map(free).min()?;
        if least < even {
            // As few sockets as possible come before equal parts.
            if !self.wanted.align_by_socket {
                return None;
            }
            even = groups(least).saturating_mul(group);
        }
        let mut shares = vec![0; self.places.len()];
        chosen.iter().for_each(|place| shares[*place] = even);
        let rest = self.count.saturating_sub(even.saturating_mul(chosen.len()));
        if rest == 0 {
            let balance = self.balance(&shares);
            return Some((shares, balance));
        }
        self.distribute_rest(chosen, &shares, rest)
    }

    /// Distributes the remainder, group by group, to those of the places that leave the best balance: tries
    /// larger numbers of places first.
    fn distribute_rest(
        &mut self,
        chosen: &[usize],
        even: &[usize],
        rest: usize,
    ) -> Option<(Vec<usize>, u64)> {
        let group = self.wanted.group.max(1);
        let left = |place: &usize| self.places[*place].free.saturating_sub(even[*place]);
        let with_room: Vec<usize> = chosen.iter().copied().filter(|place| left(place) >= group).collect();
        let mut best: Option<(Vec<usize>, u64)> = None;
        for places in (1..=with_room.len()).rev() {
            each_choice(&with_room, places, &mut |some| {
                self.trials = self.trials.saturating_add(1);
                if let Some(shares) = self.in_turn(some, even, rest) {
                    let balance = self.balance(&shares);
                    if best.as_ref().is_none_or(|(_, least)| balance < *least) {
                        best = Some((shares, balance));
                    }
                }
                self.trials < MOST_TRIALS
            });
        }
        best
    }

    /// Distributes the remainder to these places in turn; returns None if they have too few CPUs.
    fn in_turn(&self, some: &[usize], even: &[usize], mut rest: usize) -> Option<Vec<usize>> {
        let group = self.wanted.group.max(1);
        let mut shares = even.to_vec();
        while rest > 0 {
            let before = rest;
            for place in some {
                let left = self.places[*place].free.saturating_sub(shares[*place]);
                if rest > 0 && left >= group {
                    shares[*place] = shares[*place].saturating_add(group);
                    rest = rest.saturating_sub(group);
                }
            }
            if rest == before {
                return None;
            }
        }
        Some(shares)
    }

    /// Returns thousandths of the standard deviation of the free CPUs that remain, rounded as in the kubelet
    /// (`standardDeviation`).
    fn balance(&self, shares: &[usize]) -> u64 {
        let left = self.places.iter().zip(shares).map(|(place, share)| place.free.saturating_sub(*share));
        let left: Vec<f64> = left.map(|cpus| cpus as f64).collect();
        let thousandths = |value: f64| (value * 1000.0).round();
        let count = left.len() as f64;
        let mean = thousandths(left.iter().sum::<f64>() / count) / 1000.0;
        let squares: f64 = left.iter().map(|cpus| (cpus - mean) * (cpus - mean)).sum();
        thousandths((squares / count).sqrt()) as u64
    }
}

/// Calls the function for each choice of `count` items, in order, until the function returns false.
fn each_choice(items: &[usize], count: usize, call: &mut impl FnMut(&[usize]) -> bool) {
    fn more(
        items: &[usize],
        count: usize,
        chosen: &mut Vec<usize>,
        call: &mut impl FnMut(&[usize]) -> bool,
    ) -> bool {
        let missing = count.saturating_sub(chosen.len());
        if missing == 0 {
            return call(chosen);
        }
        let last = items.len().saturating_sub(missing);
        (0..=last).filter(|_| items.len() >= missing).all(|first| {
            chosen.push(items[first]);
            let go_on = more(items.get(first.saturating_add(1)..).unwrap_or_default(), count, chosen, call);
            chosen.pop();
            go_on
        })
    }
    if count > 0 {
        more(items, count, &mut Vec::new(), call);
    }
}
