//! Claims free CPUs as near to each other as possible (`takeByTopologyNUMAPacked`): whole NUMA nodes and
//! sockets first, then whole L3 caches if requested, then whole cores, then single CPUs.

use std::collections::BTreeSet;

use super::super::{
    cpu_set::CpuSet,
    machine::{CpuTopology, Level},
};

/// The error of a failed claim.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ClaimError {
    /// Too few CPUs are free.
    #[error("not enough cpus available to satisfy request: requested={requested}, available={available}")]
    TooFew {
        /// Number of requested CPUs.
        requested: usize,
        /// Number of free CPUs.
        available: usize,
    },
    /// The search failed.
    #[error("failed to allocate cpus")]
    Failed,
}

/// The policy options that change how CPUs are claimed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Manner {
    /// Claims from as many cores as possible, and no whole cores (`distribute-cpus-across-cores`).
    pub(crate) spread: bool,
    /// Claims from as few L3 caches as possible (`prefer-align-cpus-by-uncorecache`).
    pub(crate) uncore: bool,
}

/// Claims `count` of the free CPUs.
pub(crate) fn claim(
    topology: &CpuTopology,
    free: &CpuSet,
    count: usize,
    manner: Manner,
) -> Result<CpuSet, ClaimError> {
    let mut claim = Claim::new(topology, free, count)?;
    let [first, second] = claim.outer();
    claim.whole(first);
    claim.whole(second);
    if manner.uncore {
        claim.uncores();
    }
    if !manner.spread {
        claim.whole(Level::Core);
    }
    claim.single(manner.spread);
    if claim.needed > 0 { Err(ClaimError::Failed) } else { Ok(claim.claimed) }
}

/// The CPUs of a claim in progress (`cpuAccumulator`).
#[derive(Debug)]
pub(crate) struct Claim<'t> {
    topology: &'t CpuTopology,
    pub(crate) free: CpuSet,
    pub(crate) claimed: CpuSet,
    /// Number of CPUs still to be claimed.
    pub(crate) needed: usize,
}

impl<'t> Claim<'t> {
    pub(crate) fn new(topology: &'t CpuTopology, free: &CpuSet, needed: usize) -> Result<Self, ClaimError> {
        let available = free.intersection(topology.all());
        if needed > available.len() {
            return Err(ClaimError::TooFew { requested: needed, available: free.len() });
        }
        Ok(Self { topology, free: available, claimed: CpuSet::default(), needed })
    }

    pub(crate) fn add(&mut self, cpus: &CpuSet) {
        self.needed = self.needed.saturating_sub(cpus.len());
        self.free = self.free.difference(cpus);
        self.claimed = self.claimed.union(cpus);
    }

    /// Returns the kinds of groups, the larger one first: a socket may have several NUMA nodes, or a node
    /// several sockets.
    fn outer(&self) -> [Level; 2] {
        if self.topology.groups(Level::Socket).len() >= self.topology.groups(Level::Node).len() {
            [Level::Node, Level::Socket]
        } else {
            [Level::Socket, Level::Node]
        }
    }

    /// Returns the groups of a kind that have free CPUs in `within`, those with the fewest free CPUs first,
    /// so that other groups stay whole.
    fn sorted(&self, level: Level, within: &CpuSet) -> Vec<(u32, &'t CpuSet)> {
        let here = self.free.intersection(within);
        let mut groups: Vec<(usize, u32, &CpuSet)> = self
            .topology
            .touched(level, &here)
            .map(|(number, group)| (self.free.common(group), number, group))
            .collect();
        groups.sort_unstable_by_key(|(free, number, _)| (*free, *number));
        groups.into_iter().map(|(_, number, group)| (number, group)).collect()
    }

    /// Returns all groups of a kind that have free CPUs, sorted by the enclosing groups of larger kinds.
    pub(crate) fn nested(&self, level: Level) -> Vec<(u32, &'t CpuSet)> {
        let [first, second] = self.outer();
        let around: &[Level] = match level {
            Level::Core => &[first, second],
            Level::Uncore if first == Level::Node => &[Level::Node],
            Level::Uncore => &[first, second],
            level if level == first => &[],
            _ => &[first],
        };
        let mut groups = vec![(0, self.topology.all())];
        for kind in around.iter().chain([&level]) {
            groups = groups.iter().flat_map(|(_, within)| self.sorted(*kind, within)).collect();
        }
        let mut seen = BTreeSet::new();
        groups.retain(|(number, _)| seen.insert(*number));
        groups
    }

    /// Claims whole groups while the claim needs them.
    fn whole(&mut self, level: Level) {
        if self.needed == 0 {
            return;
        }
        // For the kubelet, cores and sockets whose size differs from the average never count as whole.
        let average = matches!(level, Level::Core | Level::Socket).then(|| self.topology.average(level));
        let is_free = |(_, group): &(u32, &CpuSet)| {
            group.is_subset(&self.free) && average.is_none_or(|average| average == group.len())
        };
        let groups: Vec<_> = self.nested(level).into_iter().filter(is_free).collect();
        for (_, group) in groups {
            if self.needed >= group.len() && group.is_subset(&self.free) {
                self.add(group);
            }
        }
    }

    /// Claims whole L3 caches, then a part of one (`takeUncoreCache`).
    fn uncores(&mut self) {
        let size = self.topology.average(Level::Uncore);
        for (_, uncore) in self.nested(Level::Uncore) {
            if self.needed >= size {
                self.whole(Level::Uncore);
            }
            if self.needed > 0 {
                self.part_of(uncore);
            }
            if self.needed == 0 {
                return;
            }
        }
    }

    /// Claims all remaining CPUs from one L3 cache, if that cache has enough free CPUs on as few cores as
    /// possible (`takePartialUncore`).
    fn part_of(&mut self, uncore: &CpuSet) {
        let per_core = self.topology.average(Level::Core).max(1);
        let cores = self.needed.div_ceil(per_core);
        let here = self.free.intersection(uncore);
        let groups = self.topology.touched(Level::Core, &here).take(cores);
        let on_cores = groups.fold(CpuSet::default(), |all, (_, core)| all.union(core));
        let mut cpus = on_cores.intersection(&self.free);
        let odd = self.needed.checked_rem(2) == Some(1);
        if odd && per_core > 1 && cpus.len() > self.needed {
            cpus = cpus.first(cpus.len().saturating_sub(1));
        }
        if cpus.len() == self.needed {
            self.add(&cpus);
        }
    }

    /// Claims single CPUs.
    fn single(&mut self, spread: bool) {
        if self.needed == 0 {
            return;
        }
        let order = if spread { self.spread() } else { self.packed() };
        let cpus: CpuSet = order.into_iter().take(self.needed).collect();
        self.add(&cpus);
    }

    /// Returns the CPUs core by core (`sortAvailableCPUsPacked`).
    fn packed(&self) -> Vec<u32> {
        let free_of = |(_, core): (u32, &CpuSet)| core.intersection(&self.free).iter().collect::<Vec<_>>();
        self.nested(Level::Core).into_iter().flat_map(free_of).collect()
    }

    /// Returns the CPUs socket by socket, and within each socket one CPU of every core in turn
    /// (`sortAvailableCPUsSpread` as of 1.38, k/k 140766; before, CPUs were in the order of their numbers).
    fn spread(&self) -> Vec<u32> {
        let mut order = Vec::new();
        for (_, socket) in self.nested(Level::Socket) {
            let cores = self.sorted(Level::Core, socket);
            let mut cores: Vec<_> = cores
                .iter()
                .map(|(_, core)| core.intersection(&self.free).iter().collect::<Vec<_>>().into_iter())
                .collect();
            while !cores.is_empty() {
                cores.retain_mut(|core| core.next().map(|cpu| order.push(cpu)).is_some());
            }
        }
        order
    }
}
