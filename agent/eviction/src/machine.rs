//! The machine's memory and process ids, from procfs and cgroups.

use beelet_base::kernel_file;
use beelet_policy::eviction::Observation;
use beelet_units::quantity::Quantity;

use super::Error;
use beelet_cgroups::{Cgroups, memory};

/// The cgroup of all pods.
const PODS: &str = "/kubepods";

/// Returns the machine's memory: the kubelet's `memory.available`, capacity less the working set of the root
/// cgroup.
pub(super) fn memory(cgroups: &Cgroups) -> Result<Observation, Error> {
    let memory = memory::of_machine(cgroups, &read("/proc/meminfo")?).ok_or(Error::NoMemory)?;
    Ok(observation(whole(memory.available()), whole(memory.total)))
}

/// Returns the memory available to all pods together: their cgroup's limit less their working set. `None`
/// before the cgroup exists.
pub(super) fn pods_memory(cgroups: &Cgroups) -> Option<Observation> {
    let used = memory::of(cgroups, PODS)?;
    let limit = used.limit?;
    Some(observation(whole(limit.saturating_sub(used.working_set)), whole(limit)))
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
