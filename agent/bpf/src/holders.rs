//! The cgroups that made containers wait: those that had the CPUs during the waits (`HOLDERS`), and those
//! that needed the memory (`RECLAIMERS`).

use super::KernelError;
use super::measures::{Measures, WaitedFor};
use super::shares::Sum;
use beelet_ebpf_abi::{Counters, PRESSURE_FLOOR_NS};
use std::collections::BTreeMap;

/// Cgroups whose threads had to free memory because they needed some, in about the last minute, weighted as
/// in [`WaitedFor`]: cgroup2 ids and pages, in descending order of pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaimers {
    /// Pages freed while the machine was short of memory.
    pub direct: Vec<(u64, u64)>,
    /// Pages freed while their own cgroup, or one above it, was at its limit.
    pub memcg: Vec<(u64, u64)>,
}

/// The cgroups that made containers wait.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interfering {
    /// Holders of the CPUs, by the cgroup2 id of the waiting cgroup.
    pub waited_for: BTreeMap<u64, WaitedFor>,
    /// Reclaimers on the whole machine.
    pub reclaimers: Reclaimers,
}

/// Counts the waits in the buckets of [`Counters::run_queue_waits`] from that of [`PRESSURE_FLOOR_NS`] on.
fn long_waits(counters: &Counters) -> u64 {
    let first = super::measures::wait_bucket(PRESSURE_FLOOR_NS);
    counters.run_queue_waits[first..].iter().fold(0, |sum, count| sum.wrapping_add(*count))
}

/// Reads [`WaitedFor`] of the containers that had long waits since the last reading and caches the others,
/// and reads [`Reclaimers`] if any container reclaimed: on a quiet node it makes no system call.
#[derive(Debug)]
pub struct Interference {
    measures: Measures,
    /// By cgroup2 id: the count of long waits at the last reading, and its result.
    known: BTreeMap<u64, (u64, Option<Sum>)>,
    /// Count of reclaims at the last reading of `reclaimers`: direct reclaim plus that of cgroups.
    reclaims: u64,
    reclaimers: [Sum; 2],
}

impl Interference {
    /// Returns a reader with an empty cache.
    #[must_use]
    pub fn new(measures: Measures) -> Interference {
        Interference {
            measures,
            known: BTreeMap::new(),
            reclaims: 0,
            reclaimers: [Sum::default(), Sum::default()],
        }
    }

    /// Returns the cgroups that had the CPUs while these cgroups waited, and those that needed the memory.
    /// `counters` must come from a fresh [`Measures::snapshot`].
    ///
    /// # Errors
    /// The kernel refused to read a map.
    pub fn read(&mut self, counters: &BTreeMap<u64, Counters>) -> Result<Interfering, KernelError> {
        Ok(Interfering { waited_for: self.waited_for(counters)?, reclaimers: self.reclaimers(counters)? })
    }

    fn waited_for(
        &mut self,
        counters: &BTreeMap<u64, Counters>,
    ) -> Result<BTreeMap<u64, WaitedFor>, KernelError> {
        let waits: BTreeMap<u64, u64> = counters.iter().map(|(id, of)| (*id, long_waits(of))).collect();
        self.known.retain(|id, _| waits.contains_key(id));
        let is_new = |id: u64| {
            let count = waits.get(&id).copied().unwrap_or(0);
            count > 0 && self.known.get(&id).is_none_or(|(before, _)| *before != count)
        };
        let mut found =
            if waits.keys().any(|id| is_new(*id)) { self.measures.held(is_new)? } else { BTreeMap::new() };
        let now_ns = super::monotonic_ns();
        for (id, count) in waits {
            let known = self.known.entry(id).or_default();
            if known.0 != count {
                *known = (count, found.remove(&id));
            }
        }
        let known = self.known.iter();
        let known = known.filter_map(|(id, (_, sum))| Some((*id, WaitedFor::at(sum.as_ref()?, now_ns))));
        Ok(known.filter(|(_, waited)| waited.waited_ns > 0).collect())
    }

    fn reclaimers(&mut self, counters: &BTreeMap<u64, Counters>) -> Result<Reclaimers, KernelError> {
        let reclaims = counters
            .values()
            .fold(0_u64, |sum, of| sum.wrapping_add(of.direct_reclaims).wrapping_add(of.memcg_reclaims));
        if reclaims != self.reclaims {
            self.reclaimers = self.measures.freed()?;
            self.reclaims = reclaims;
        }
        let now_ns = super::monotonic_ns();
        let [direct, memcg] = self.reclaimers.each_ref().map(|sum| sum.at(now_ns).parts);
        Ok(Reclaimers { direct, memcg })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_waits_that_may_be_long_are_counted() {
        let mut counters = Counters::default();
        counters.run_queue_waits[6] = 5;
        assert_eq!(long_waits(&counters), 0, "up to 65 µs");
        counters.run_queue_waits[7] = 1;
        counters.run_queue_waits[20] = 2;
        assert_eq!(long_waits(&counters), 3);
    }
}
