//! The programs' counters of each container: read on demand, never pushed.

use super::KernelError;
use super::containers::{Containers, add};
use super::shares::{Sum, over_ns};
use aya::maps::{Map, MapData, PerCpuArray, PerCpuValues};
use beelet_ebpf_abi::{Counters, FIRST_BUCKET_BITS, Running, Shares, WAIT_BUCKETS, reclaim};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Readings of one cgroup before its busy threads are left out of the sum.
const SETTLE_TRIES: u32 = 8;

/// The cgroups that had the CPUs while a container's threads waited for them, in about the last minute: time
/// older than 34 s counts half, and so on. Waits below 100 µs are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitedFor {
    /// Time waited, summed over all threads, in nanoseconds.
    pub waited_ns: u64,
    /// Length of the period in nanoseconds: `waited_ns / over_ns` threads waited on average.
    pub over_ns: u64,
    /// Cgroup2 ids of the cgroups that had the CPU during the waits ([`super::NOBODY`]: the CPU was idle, so
    /// a quota held the threads back), and the time of each in nanoseconds, in descending order. The sum may
    /// be less than `waited_ns`: a thread may have moved, and each CPU remembers only its last sixteen
    /// changes.
    pub held: Vec<(u64, u64)>,
}

impl WaitedFor {
    pub(super) fn at(sum: &Sum, now_ns: u64) -> WaitedFor {
        let sum = sum.at(now_ns);
        WaitedFor { waited_ns: sum.total, over_ns: over_ns(now_ns), held: sum.parts }
    }
}

/// Reads the counters of all cgroups below the pods' root. Cheap to clone; never blocks.
#[derive(Clone)]
pub struct Measures {
    maps: Arc<Maps>,
}

impl std::fmt::Debug for Measures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Measures").finish_non_exhaustive()
    }
}

struct Maps {
    containers: Containers,
    running: PerCpuArray<MapData, Running>,
    holders: PerCpuArray<MapData, Shares>,
    reclaimers: PerCpuArray<MapData, Shares>,
}

fn per_cpu<T: aya::Pod>(map: MapData, name: &str) -> Result<PerCpuArray<MapData, T>, KernelError> {
    Map::from_map_data(map).and_then(PerCpuArray::try_from).map_err(|error| KernelError::map(name, &error))
}

impl Measures {
    pub(super) fn new(
        containers: Containers,
        [running, holders, reclaimers]: [MapData; 3],
    ) -> Result<Measures, KernelError> {
        let maps = Maps {
            containers,
            running: per_cpu(running, "RUNNING")?,
            holders: per_cpu(holders, "HOLDERS")?,
            reclaimers: per_cpu(reclaimers, "RECLAIMERS")?,
        };
        Ok(Measures { maps: Arc::new(maps) })
    }

    /// Returns the counters of every active cgroup, by cgroup2 id: summed over all CPUs, including the
    /// unfinished runs of threads on a CPU now. Counters only grow, and a removed cgroup disappears after a
    /// while.
    ///
    /// # Errors
    /// The kernel refused to read a map.
    pub fn snapshot(&self) -> Result<BTreeMap<u64, Counters>, KernelError> {
        let mut found = BTreeMap::new();
        for taken in self.maps.containers.taken() {
            add(found.entry(taken.cgroup_id).or_default(), &self.maps.containers.read(taken)?);
        }
        for cpu in self.running()?.iter().filter(|cpu| cpu.cgroup_id != 0) {
            if let Some(counters) = self.of(cpu.cgroup_id)? {
                found.insert(cpu.cgroup_id, counters);
            }
        }
        Ok(found)
    }

    /// Returns the counters of one cgroup, as [`Measures::snapshot`] has them; `None` if it has none yet.
    ///
    /// # Errors
    /// The kernel refused to read a map.
    pub fn of(&self, cgroup_id: u64) -> Result<Option<Counters>, KernelError> {
        let mut tries = SETTLE_TRIES;
        loop {
            // A thread that leaves its CPU between two readings would be counted twice, or not at all.
            let before = self.running()?;
            let Some(mut counters) = self.counted(cgroup_id)? else { return Ok(None) };
            let after = self.running()?;
            let now_ns = super::monotonic_ns();
            let mut settled = true;
            for (before, after) in before.iter().zip(after.iter()) {
                if before == after && before.cgroup_id == cgroup_id {
                    add_running(&mut counters, before, now_ns);
                } else {
                    settled &= before.cgroup_id != cgroup_id && after.cgroup_id != cgroup_id;
                }
            }
            tries -= 1;
            if settled || tries == 0 {
                // A thread that keeps changing has just begun to run: there is next to nothing to add.
                return Ok(Some(counters));
            }
        }
    }

    /// Returns the cgroups that had the CPUs while the threads of the wanted cgroups waited for them,
    /// counting long waits (beyond 100 µs at a time) within the last minutes; by cgroup2 id.
    ///
    /// # Errors
    /// The kernel refused to read a map.
    pub fn waited_for(&self, wanted: impl Fn(u64) -> bool) -> Result<BTreeMap<u64, WaitedFor>, KernelError> {
        let now_ns = super::monotonic_ns();
        Ok(self.held(wanted)?.into_iter().map(|(id, sum)| (id, WaitedFor::at(&sum, now_ns))).collect())
    }

    pub(super) fn held(&self, wanted: impl Fn(u64) -> bool) -> Result<BTreeMap<u64, Sum>, KernelError> {
        let mut found: BTreeMap<u64, Sum> = BTreeMap::new();
        for taken in self.maps.containers.taken().filter(|taken| wanted(taken.cgroup_id)) {
            let cpus = self.maps.holders.get(&taken.slot, 0);
            let cpus = cpus.map_err(|error| KernelError::map("HOLDERS", &error))?;
            let now_ns = super::monotonic_ns();
            for cpu in cpus.iter().filter(|cpu| cpu.cgroup_id == taken.cgroup_id) {
                found.entry(taken.cgroup_id).or_insert_with(|| Sum::none(now_ns)).add(cpu, now_ns);
            }
        }
        found.values_mut().for_each(Sum::sort);
        Ok(found)
    }

    /// Returns the pages that the threads of each cgroup freed, in direct reclaim and in that of cgroups.
    pub(super) fn freed(&self) -> Result<[Sum; 2], KernelError> {
        let of = |kind: u32| {
            let cpus = self.maps.reclaimers.get(&kind, 0);
            let cpus = cpus.map_err(|error| KernelError::map("RECLAIMERS", &error))?;
            let now_ns = super::monotonic_ns();
            let mut sum = Sum::none(now_ns);
            cpus.iter().for_each(|cpu| sum.add(cpu, now_ns));
            sum.sort();
            Ok::<Sum, KernelError>(sum)
        };
        Ok([of(reclaim::DIRECT)?, of(reclaim::MEMCG)?])
    }

    /// Returns the pages that the threads of each cgroup freed lately because they needed some, by cgroup2
    /// id, in both kinds of reclaim.
    ///
    /// # Errors
    /// The map can't be read.
    pub fn freed_pages(&self) -> Result<BTreeMap<u64, u64>, KernelError> {
        let now_ns = super::monotonic_ns();
        let mut freed: BTreeMap<u64, u64> = BTreeMap::new();
        for (id, pages) in self.freed()?.iter().flat_map(|sum| sum.at(now_ns).parts) {
            let sum = freed.entry(id).or_default();
            *sum = sum.saturating_add(pages);
        }
        Ok(freed)
    }

    fn counted(&self, cgroup_id: u64) -> Result<Option<Counters>, KernelError> {
        let mut found = None;
        for taken in self.maps.containers.taken().filter(|taken| taken.cgroup_id == cgroup_id) {
            add(found.get_or_insert_default(), &self.maps.containers.read(taken)?);
        }
        Ok(found)
    }

    fn running(&self) -> Result<PerCpuValues<Running>, KernelError> {
        self.maps.running.get(&0, 0).map_err(|error| KernelError::map("RUNNING", &error))
    }
}

/// Returns the lower bound of a bucket of [`Counters::run_queue_waits`] in nanoseconds.
#[must_use]
pub fn wait_bucket_floor_ns(bucket: usize) -> u64 {
    match u32::try_from(bucket) {
        Ok(bucket @ 1..) => 1_u64.checked_shl(FIRST_BUCKET_BITS - 1 + bucket).unwrap_or(u64::MAX),
        _ => 0,
    }
}

/// Returns the bucket of a run-queue wait: the programs' own rule (`bucket` in ebpf/src/sched.rs).
pub(super) fn wait_bucket(wait_ns: u64) -> usize {
    let bits = wait_ns.checked_ilog2().unwrap_or(0) + 1;
    (bits.saturating_sub(FIRST_BUCKET_BITS) as usize).min(WAIT_BUCKETS - 1)
}

/// Adds the run and wait time of a CPU's current thread, which the programs add when it leaves the CPU.
/// `now_ns` is on `CLOCK_MONOTONIC`.
fn add_running(counters: &mut Counters, cpu: &Running, now_ns: u64) {
    counters.on_cpu_ns += now_ns.saturating_sub(cpu.since_ns.wrapping_add(cpu.ahead_ns));
    if cpu.waited != 0 {
        counters.run_queue_wait_ns += cpu.wait_ns;
        counters.run_queue_waits[wait_bucket(cpu.wait_ns)] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_in_the_bucket_of_its_length() {
        for (wait_ns, bucket) in
            [(0, 0), (1, 0), (1023, 0), (1024, 1), (2047, 1), (2048, 2), (1 << 32, 23), (u64::MAX, 31)]
        {
            assert_eq!(wait_bucket(wait_ns), bucket, "{wait_ns} ns");
            assert!(wait_bucket_floor_ns(bucket) <= wait_ns);
            assert!(bucket == WAIT_BUCKETS - 1 || wait_ns < wait_bucket_floor_ns(bucket + 1), "{wait_ns} ns");
        }
    }

    #[test]
    fn a_running_thread_is_counted_up_to_now() {
        let mut counters = Counters { on_cpu_ns: 5, ..Counters::default() };
        let cpu = Running { since_ns: 100, cgroup_id: 1, wait_ns: 2000, waited: 1, ..Running::default() };
        add_running(&mut counters, &cpu, 107);
        assert_eq!((counters.on_cpu_ns, counters.run_queue_wait_ns), (12, 2000));
        assert_eq!(counters.run_queue_waits[1], 1);
        add_running(&mut counters, &Running { waited: 0, ..cpu }, 90);
        assert_eq!((counters.on_cpu_ns, counters.run_queue_waits[1]), (12, 1));
        // The run queue's clock is ahead or behind.
        for ahead in [50, -50] {
            let ahead_ns = i64::cast_unsigned(ahead);
            let mut counters = Counters::default();
            add_running(&mut counters, &Running { ahead_ns, ..cpu }, 107_u64.wrapping_add(ahead_ns));
            assert_eq!(counters.on_cpu_ns, 7);
        }
    }
}
