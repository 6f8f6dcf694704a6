//! What the programs counted for each container: read on demand, never pushed.

use super::KernelError;
use aya::maps::{Map, MapData, MapError, PerCpuArray, PerCpuHashMap, PerCpuValues};
use beelet_ebpf_abi::{CgroupKey, Counters, FIRST_BUCKET_BITS, Running, WAIT_BUCKETS};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Readings of one cgroup before its busy threads are left out of the sum.
const SETTLE_TRIES: u32 = 8;

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
    containers: PerCpuHashMap<MapData, CgroupKey, Counters>,
    running: PerCpuArray<MapData, Running>,
}

impl Measures {
    pub(super) fn new(containers: MapData, running: MapData) -> Result<Measures, MapError> {
        let maps = Maps {
            containers: PerCpuHashMap::try_from(Map::PerCpuHashMap(containers))?,
            running: PerCpuArray::try_from(Map::PerCpuArray(running))?,
        };
        Ok(Measures { maps: Arc::new(maps) })
    }

    /// The counters of every cgroup that did anything yet, by cgroup2 id: all CPUs added up, with what its threads that
    /// run right now have run so far. Counters only grow, and a cgroup that is gone is missing after a while.
    ///
    /// # Errors
    /// The kernel refused to read a map.
    pub fn snapshot(&self) -> Result<BTreeMap<u64, Counters>, KernelError> {
        let mut found = BTreeMap::new();
        for entry in &self.maps.containers {
            // Where a key is removed under the walk, the kernel begins again: some come twice.
            let (key, cpus) = entry.map_err(|error| KernelError::map("CONTAINERS", &error))?;
            found.insert(key.cgroup_id, sum(&cpus));
        }
        for cpu in self.running()?.iter().filter(|cpu| cpu.cgroup_id != 0) {
            if let Some(counters) = self.of(cpu.cgroup_id)? {
                found.insert(cpu.cgroup_id, counters);
            }
        }
        Ok(found)
    }

    /// The counters of one cgroup, as [`Measures::snapshot`] has them; `None` if it did nothing yet.
    ///
    /// # Errors
    /// The kernel refused to read a map.
    pub fn of(&self, cgroup_id: u64) -> Result<Option<Counters>, KernelError> {
        let mut tries = SETTLE_TRIES;
        loop {
            // A thread that leaves its CPU between two readings would be counted twice, or not at all.
            let before = self.running()?;
            let key = CgroupKey { cgroup_id };
            let Some(cpus) =
                super::listeners::absent_is_none(self.maps.containers.get(&key, 0), "CONTAINERS")?
            else {
                return Ok(None);
            };
            let after = self.running()?;
            let now_ns = super::monotonic_ns();
            let mut counters = sum(&cpus);
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
                // Who would not hold still has just begun to run: there is next to nothing to add.
                return Ok(Some(counters));
            }
        }
    }

    fn running(&self) -> Result<PerCpuValues<Running>, KernelError> {
        self.maps.running.get(&0, 0).map_err(|error| KernelError::map("RUNNING", &error))
    }
}

/// The length of a run-queue wait that a bucket of [`Counters::run_queue_waits`] begins with, nanoseconds.
#[must_use]
pub fn wait_bucket_floor_ns(bucket: usize) -> u64 {
    match u32::try_from(bucket) {
        Ok(bucket @ 1..) => 1_u64.checked_shl(FIRST_BUCKET_BITS - 1 + bucket).unwrap_or(u64::MAX),
        _ => 0,
    }
}

/// The bucket of a run-queue wait: the programs' own rule (`bucket` in ebpf/src/sched.rs).
fn wait_bucket(wait_ns: u64) -> usize {
    let bits = wait_ns.checked_ilog2().unwrap_or(0) + 1;
    (bits.saturating_sub(FIRST_BUCKET_BITS) as usize).min(WAIT_BUCKETS - 1)
}

fn sum(cpus: &PerCpuValues<Counters>) -> Counters {
    let mut sum = Counters::default();
    for cpu in cpus.iter() {
        add(&mut sum, cpu);
    }
    sum
}

/// Adds each field. Taken apart, so that the compiler finds one that is missing.
fn add(sum: &mut Counters, other: &Counters) {
    let Counters {
        on_cpu_ns,
        switches,
        preempted_by_same_pod,
        preempted_by_other_pod,
        preempted_by_system,
        run_queue_wait_ns,
        run_queue_waits,
        memcg_reclaim_ns,
        memcg_reclaims,
        direct_reclaim_ns,
        direct_reclaims,
        oom_kills,
        established,
        retransmits,
        rtt_us,
        rtt_samples,
        rx_bytes,
        rx_packets,
        tx_bytes,
        tx_packets,
    } = sum;
    for (own, more) in [
        (on_cpu_ns, other.on_cpu_ns),
        (switches, other.switches),
        (preempted_by_same_pod, other.preempted_by_same_pod),
        (preempted_by_other_pod, other.preempted_by_other_pod),
        (preempted_by_system, other.preempted_by_system),
        (run_queue_wait_ns, other.run_queue_wait_ns),
        (memcg_reclaim_ns, other.memcg_reclaim_ns),
        (memcg_reclaims, other.memcg_reclaims),
        (direct_reclaim_ns, other.direct_reclaim_ns),
        (direct_reclaims, other.direct_reclaims),
        (oom_kills, other.oom_kills),
        (established, other.established),
        (retransmits, other.retransmits),
        (rtt_us, other.rtt_us),
        (rtt_samples, other.rtt_samples),
        (rx_bytes, other.rx_bytes),
        (rx_packets, other.rx_packets),
        (tx_bytes, other.tx_bytes),
        (tx_packets, other.tx_packets),
    ] {
        *own = own.wrapping_add(more);
    }
    for (own, more) in run_queue_waits.iter_mut().zip(other.run_queue_waits) {
        *own = own.wrapping_add(more);
    }
}

/// Adds what a CPU's current thread has run and waited, which the programs add when it leaves the CPU. `now_ns` is on
/// `CLOCK_MONOTONIC`.
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
    fn a_wait_is_in_the_bucket_that_its_length_says() {
        for (wait_ns, bucket) in
            [(0, 0), (1, 0), (1023, 0), (1024, 1), (2047, 1), (2048, 2), (1 << 32, 23), (u64::MAX, 31)]
        {
            assert_eq!(wait_bucket(wait_ns), bucket, "{wait_ns} ns");
            assert!(wait_bucket_floor_ns(bucket) <= wait_ns);
            assert!(bucket == WAIT_BUCKETS - 1 || wait_ns < wait_bucket_floor_ns(bucket + 1), "{wait_ns} ns");
        }
    }

    #[test]
    fn every_field_is_added() {
        let one = Counters {
            on_cpu_ns: 1,
            switches: 2,
            preempted_by_same_pod: 3,
            preempted_by_other_pod: 4,
            preempted_by_system: 5,
            run_queue_wait_ns: 6,
            run_queue_waits: std::array::from_fn(|index| index as u64),
            memcg_reclaim_ns: 7,
            memcg_reclaims: 8,
            direct_reclaim_ns: 9,
            direct_reclaims: 10,
            oom_kills: 11,
            established: 12,
            retransmits: 13,
            rtt_us: 14,
            rtt_samples: 15,
            rx_bytes: 16,
            rx_packets: 17,
            tx_bytes: 18,
            tx_packets: 19,
        };
        let mut two = Counters::default();
        add(&mut two, &one);
        assert_eq!(two, one);
        add(&mut two, &one);
        assert_eq!((two.on_cpu_ns, two.tx_packets, two.run_queue_waits[23]), (2, 38, 46));
    }

    #[test]
    fn who_runs_now_is_counted_up_to_now() {
        let mut counters = Counters { on_cpu_ns: 5, ..Counters::default() };
        let cpu = Running { since_ns: 100, cgroup_id: 1, wait_ns: 2000, waited: 1, ..Running::default() };
        add_running(&mut counters, &cpu, 107);
        assert_eq!((counters.on_cpu_ns, counters.run_queue_wait_ns), (12, 2000));
        assert_eq!(counters.run_queue_waits[1], 1);
        add_running(&mut counters, &Running { waited: 0, ..cpu }, 90);
        assert_eq!((counters.on_cpu_ns, counters.run_queue_waits[1]), (12, 1));
        // On the run queue's clock it is another time, before or behind.
        for ahead in [50, -50] {
            let ahead_ns = i64::cast_unsigned(ahead);
            let mut counters = Counters::default();
            add_running(&mut counters, &Running { ahead_ns, ..cpu }, 107_u64.wrapping_add(ahead_ns));
            assert_eq!(counters.on_cpu_ns, 7);
        }
    }
}
