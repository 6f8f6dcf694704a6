//! The programs' table of counters: `SLOTS` has the cgroup of each element of `CONTAINERS`.

use super::KernelError;
use aya::maps::{Map, MapData, PerCpuArray, PerCpuValues};
use beelet_ebpf_abi::{Counters, Slot};
use memmap2::{MmapOptions, MmapRaw};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// The programs' table. The programs allocate slots; only this value frees them.
pub(super) struct Containers {
    /// The map's own memory, so that finding the slots in use takes no system call per slot.
    slots: MmapRaw,
    entries: usize,
    counters: PerCpuArray<MapData, Counters>,
}

/// A slot in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) slot: u32,
    /// Cgroup2 id of the slot's owner.
    pub(super) cgroup_id: u64,
}

impl Containers {
    pub(super) fn open(slots: &MapData, counters: MapData) -> Result<Containers, KernelError> {
        let info = slots.info().map_err(|error| KernelError::map("SLOTS", &error))?;
        let entries = info.max_entries() as usize;
        let slots = MmapOptions::new()
            .len(entries * size_of::<Slot>())
            .map_raw(slots.fd().as_fd().as_raw_fd())
            .map_err(|error| KernelError::map("SLOTS", &error))?;
        let counters = Map::from_map_data(counters)
            .and_then(PerCpuArray::try_from)
            .map_err(|error| KernelError::map("CONTAINERS", &error))?;
        Ok(Containers { slots, entries, counters })
    }

    fn owners(&self) -> &[AtomicU64] {
        // SAFETY: mapped with this length for as long as `self` lives, and aligned to a page; a `Slot` is one
        // word, which the programs and this process change as a whole.
        unsafe { std::slice::from_raw_parts(self.slots.as_ptr().cast(), self.entries) }
    }

    /// Returns the slots in use. A cgroup may have two, if a slot nearer to its home became free while it
    /// allocated its own.
    pub(super) fn taken(&self) -> impl Iterator<Item = Taken> {
        let owners = (0..).zip(self.owners());
        owners
            .map(|(slot, owner)| Taken { slot, cgroup_id: owner.load(Ordering::Relaxed) })
            .filter(|taken| taken.cgroup_id != 0)
    }

    /// Returns the counters of a slot, summed over all CPUs.
    pub(super) fn read(&self, taken: Taken) -> Result<Counters, KernelError> {
        let cpus =
            self.counters.get(&taken.slot, 0).map_err(|error| KernelError::map("CONTAINERS", &error))?;
        let mut sum = Counters { cgroup_id: taken.cgroup_id, ..Counters::default() };
        for cpu in cpus.iter().filter(|cpu| cpu.cgroup_id == taken.cgroup_id) {
            add(&mut sum, cpu);
        }
        Ok(sum)
    }

    /// Frees the slot of a removed cgroup.
    pub(super) fn free(&mut self, taken: Taken) -> Result<(), KernelError> {
        let failed = |error: &dyn std::fmt::Display| KernelError::map("CONTAINERS", error);
        let cpus = aya::util::nr_cpus().map_err(|(what, error)| failed(&format!("{what}: {error}")))?;
        let nothing =
            PerCpuValues::try_from(vec![Counters::default(); cpus]).map_err(|error| failed(&error))?;
        self.counters.set(taken.slot, nothing, 0).map_err(|error| failed(&error))?;
        self.owners()[taken.slot as usize].store(0, Ordering::Relaxed);
        Ok(())
    }
}

/// Adds `other` to `sum`. The pattern names every field, so the compiler reports a missing one.
pub(super) fn add(sum: &mut Counters, other: &Counters) {
    let Counters {
        cgroup_id,
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
    *cgroup_id = other.cgroup_id;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_added() {
        let one = Counters {
            cgroup_id: 20,
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
}
