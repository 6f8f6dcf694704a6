//! The machine's memory and process ids, from procfs and cgroups.

use beelet_base::{kernel_file, machine_memory};
use beelet_policy::eviction::{FileCache, MemoryReading, NeededCache, Observation};
use beelet_units::{moment::Moment, quantity::Quantity};

use super::Error;
use beelet_cgroups::{Cgroups, MemoryParts, memory};

/// The cgroup of all pods.
pub(super) const PODS: &str = "/kubepods";

/// Returns the machine's memory: the kubelet's `memory.available`, capacity less the working set of the root
/// cgroup.
pub(super) fn memory(cgroups: &Cgroups) -> Result<Observation, Error> {
    let memory = memory::of_machine(cgroups, &read("/proc/meminfo")?).ok_or(Error::NoMemory)?;
    Ok(observation(whole(memory.available()), whole(memory.total)))
}

/// Returns the machine's memory by the opt-in signal `reclaimable`, with the cache in use so far.
pub(super) fn reclaimable_memory(
    cgroups: &Cgroups,
    needed: &mut NeededCache,
    now: Moment,
) -> Result<Observation, Error> {
    let meminfo = read("/proc/meminfo")?;
    let memory = memory::of_machine(cgroups, &meminfo).ok_or(Error::NoMemory)?;
    let reading = reading(memory.available(), &meminfo, &read("/proc/vmstat")?);
    Ok(observation(whole(needed.available(now, &reading)), whole(memory.total)))
}

/// Returns the machine's reading for the signal `reclaimable`, from the texts of `/proc/meminfo` and
/// `/proc/vmstat`.
fn reading(available: u64, meminfo: &str, vmstat: &str) -> MemoryReading {
    let of_meminfo = |name| machine_memory::meminfo(meminfo, name);
    let unwritten = [of_meminfo("Dirty"), of_meminfo("Writeback")].into_iter().flatten();
    let pages = machine_memory::memory_stat(vmstat, "workingset_refault_file");
    MemoryReading {
        available,
        cache: FileCache {
            active: of_meminfo("Active(file)").unwrap_or(0),
            unwritten: unwritten.fold(0, u64::saturating_add),
            refaulted: pages.map(|pages| pages.saturating_mul(rustix::param::page_size() as u64)),
        },
        kernels_estimate: of_meminfo("MemAvailable"),
    }
}

/// Returns the page cache of a cgroup.
pub(super) fn cache(parts: &MemoryParts) -> FileCache {
    FileCache { active: parts.active_file, unwritten: parts.unwritten_file, refaulted: parts.refaulted_file }
}

/// Returns the memory available to all pods together: their cgroup's limit less their working set. With
/// `needed`, by the signal `reclaimable`. `None` before the cgroup exists.
pub(super) fn pods_memory(
    cgroups: &Cgroups,
    needed: Option<(&mut NeededCache, Moment)>,
) -> Option<Observation> {
    let used = memory::of(cgroups, PODS)?;
    let limit = used.limit?;
    let available = limit.saturating_sub(used.working_set);
    let available = match needed {
        None => available,
        Some((needed, now)) => {
            let reading = MemoryReading { available, cache: cache(&used.parts), kernels_estimate: None };
            needed.available(now, &reading)
        }
    };
    Some(observation(whole(available), whole(limit)))
}

/// Returns the machine's free swap in bytes; `None` without swap.
pub(super) fn free_swap() -> Option<u64> {
    let meminfo = read("/proc/meminfo").ok()?;
    machine_memory::meminfo(&meminfo, "SwapFree").filter(|free| *free > 0)
}

/// Returns the process ids: the kernel's maximum, by number and by threads, less the existing threads.
pub(super) fn pids() -> Result<Observation, Error> {
    let number =
        |file| -> Result<i64, Error> { read(file)?.trim().parse().map_err(|_| Error::NotANumber(file)) };
    let most = number("/proc/sys/kernel/pid_max")?.min(number("/proc/sys/kernel/threads-max")?);
    let load = read("/proc/loadavg")?;
    let threads = threads(&load).ok_or(Error::NoThreads)?;
    Ok(observation(most.saturating_sub(threads), most))
}

/// Parses proc_loadavg(5): `0.20 0.18 0.12 1/80 11206`, the fourth field is running/all.
pub fn threads(load: &str) -> Option<i64> {
    load.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()
}

fn whole(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn observation(available: i64, capacity: i64) -> Observation {
    Observation { available: Quantity::from_units(available), capacity: Quantity::from_units(capacity) }
}

fn read(file: &'static str) -> Result<String, Error> {
    kernel_file::read_to_string(file).map_err(|source| Error::Read { file, source })
}

#[cfg(test)]
mod tests {
    use beelet_cgroups::{Hierarchy, Layout, Version};

    use super::*;

    #[test]
    fn threads_are_the_fourth_field_of_loadavg() {
        assert_eq!(threads("0.20 0.18 0.12 1/80 11206\n"), Some(80));
        assert_eq!(threads("0.20"), None);
    }

    #[test]
    fn the_reclaimable_reading_has_the_cache_and_its_refaults() {
        let meminfo = "MemAvailable: 80 kB\nActive(file): 50 kB\nDirty: 2 kB\nWriteback: 1 kB\n";
        let seen = reading(7, meminfo, "workingset_refault_anon 9\nworkingset_refault_file 3\n");
        let refaulted = Some(3 * rustix::param::page_size() as u64);
        let cache = FileCache { active: 50 << 10, unwritten: 3 << 10, refaulted };
        assert_eq!(seen, MemoryReading { available: 7, cache, kernels_estimate: Some(80 << 10) });
        let older = reading(7, "MemTotal: 9 kB\n", "workingset_refault 3\n");
        assert_eq!(older, MemoryReading { available: 7, ..MemoryReading::default() });
    }

    #[test]
    fn the_reclaimable_number_of_this_machine_is_not_below_the_kubelets() {
        let cgroups = Cgroups::over_folders(
            Layout {
                version: Version::V1,
                hierarchies: vec![Hierarchy {
                    mount: "/none".into(),
                    is_v2: false,
                    controllers: ["cpu".to_owned(), "memory".to_owned()].into(),
                }],
            },
            "/",
        )
        .unwrap();
        let mut needed = NeededCache::default();
        let seen = reclaimable_memory(&cgroups, &mut needed, Moment::default()).unwrap();
        assert!(seen.available > Quantity::ZERO && seen.available < seen.capacity, "{seen:?}");
        assert!(needed != NeededCache::default(), "this kernel counts refaults");
    }

    #[test]
    fn this_machine_has_memory_and_process_ids() {
        let controllers = ["cpu".to_owned(), "memory".to_owned()].into();
        let hierarchies = vec![Hierarchy { mount: "/none".into(), is_v2: false, controllers }];
        let layout = Layout { version: Version::V1, hierarchies };
        let cgroups = Cgroups::over_folders(layout, "/").unwrap();
        for seen in [memory(&cgroups).unwrap(), pids().unwrap()] {
            assert!(seen.available > Quantity::ZERO && seen.available < seen.capacity, "{seen:?}");
        }
    }
}
