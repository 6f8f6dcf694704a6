//! The machine's memory and process ids, from procfs and the pods' cgroup.

use beelet_base::kernel_file;
use beelet_policy::{eviction::Observation, quantity::Quantity};

use super::Error;
use beelet_cgroups::Cgroups;

/// The cgroup of all pods.
const PODS: &str = "/kubepods";

/// The machine's memory: available is what isn't in use, and file pages that nobody touched lately. This is
/// the kubelet's `memory.available`: capacity less the working set of the root cgroup, for which version 2
/// has no file of its own.
pub(super) fn memory() -> Result<Observation, Error> {
    meminfo(&read("/proc/meminfo")?).ok_or(Error::NoMemory)
}

/// The machine's available memory and its size, from `/proc/meminfo`; `None` if it lacks a line.
pub fn meminfo(text: &str) -> Option<Observation> {
    let kib = |name: &str| -> Option<i64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<i64>().ok()?.checked_mul(1024)
    };
    let available = kib("MemFree")?.saturating_add(kib("Inactive(file)")?);
    Some(observation(available, kib("MemTotal")?))
}

/// Memory that the pods may use together: their cgroup's limit, less their working set. None before the
/// cgroup is there.
pub(super) fn pods_memory(cgroups: &Cgroups) -> Option<Observation> {
    let used = cgroups.memory_use(PODS)?;
    let limit = used.limit?;
    let whole = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    Some(observation(whole(limit.saturating_sub(used.working_set)), whole(limit)))
}

/// Process ids: the kernel's most, by number and by threads, less the threads there are.
pub(super) fn pids() -> Result<Observation, Error> {
    let number =
        |file| -> Result<i64, Error> { read(file)?.trim().parse().map_err(|_| Error::NotANumber(file)) };
    let most = number("/proc/sys/kernel/pid_max")?.min(number("/proc/sys/kernel/threads-max")?);
    let load = read("/proc/loadavg")?;
    let threads = threads(&load).ok_or(Error::NoThreads)?;
    Ok(observation(most.saturating_sub(threads), most))
}

/// proc_loadavg(5): `0.20 0.18 0.12 1/80 11206`, the fourth field is running/all.
pub fn threads(load: &str) -> Option<i64> {
    load.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()
}

fn observation(available: i64, capacity: i64) -> Observation {
    Observation { available: Quantity::from_units(available), capacity: Quantity::from_units(capacity) }
}

fn read(file: &'static str) -> Result<String, Error> {
    kernel_file::read_to_string(file).map_err(|source| Error::Read { file, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_what_is_free_and_what_nobody_touched() {
        let text = "MemTotal:       1000 kB\nMemFree:   100 kB\nMemAvailable: 500 kB\nInactive:  90 kB\nInactive(file):  20 kB\n";
        assert_eq!(meminfo(text), Some(observation(120 * 1024, 1000 * 1024)));
        assert_eq!(meminfo("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn threads_are_the_fourth_field_of_loadavg() {
        assert_eq!(threads("0.20 0.18 0.12 1/80 11206\n"), Some(80));
        assert_eq!(threads("0.20"), None);
    }

    #[test]
    fn this_machine_has_memory_and_process_ids() {
        for seen in [memory().unwrap(), pids().unwrap()] {
            assert!(seen.available > Quantity::ZERO && seen.available < seen.capacity, "{seen:?}");
        }
    }
}
