//! Resources that the node has for pods.
//!
//! Allocatable is the machine's capacity, less the reservations for the system and the node's own agents,
//! less the hard eviction thresholds (`pkg/kubelet/cm/node_container_manager_linux.go`,
//! `GetNodeAllocatableReservation`).

use std::{collections::BTreeMap, fs, path::Path};

use beelet_base::{cpus, filesystem, machine_memory::meminfo};
use beelet_policy::{
    eviction::Threshold,
    node::reservations::{Excess, excesses, hard_eviction},
    resources::{CPU, EPHEMERAL_STORAGE, MEMORY, ResourceList},
};
use beelet_units::quantity::Quantity;

/// Kernel folder with one subfolder per huge page size.
const HUGEPAGES: &str = "/sys/kernel/mm/hugepages";
/// Kernel file of memory amounts.
const MEMINFO: &str = "/proc/meminfo";
/// Resource name of processes and threads, which can be reserved.
pub const PID: &str = "pid";

/// Amounts by resource: cores, bytes or counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeResources {
    /// Resources of the machine.
    pub capacity: BTreeMap<String, Quantity>,
    /// Resources that pods may request in total.
    pub allocatable: BTreeMap<String, Quantity>,
}

impl NodeResources {
    /// Computes the part of `capacity` that is left for pods. `reserved` is the sum of the reservations for
    /// the system and the agents; only hard `thresholds` count.
    #[must_use]
    pub fn new(
        capacity: BTreeMap<String, Quantity>,
        reserved: &BTreeMap<String, Quantity>,
        thresholds: &[Threshold],
    ) -> Self {
        let mut allocatable = capacity.clone();
        let mut subtract = |name: &str, amount: Quantity| {
            if let Some(left) = allocatable.get_mut(name) {
                *left = left.saturating_sub(amount).max(Quantity::ZERO);
            }
        };
        reserved.iter().for_each(|(name, amount)| subtract(name, *amount));
        hard_eviction(&capacity, thresholds).iter().for_each(|(name, amount)| subtract(name, *amount));
        // Memory set aside as huge pages is not available as memory.
        for (_, pages) in capacity.iter().filter(|(name, _)| name.starts_with("hugepages-")) {
            subtract(MEMORY, *pages);
        }
        Self { capacity, allocatable }
    }

    /// Returns the allocatable amounts in the form that `policy` uses.
    #[must_use]
    pub fn list(&self) -> ResourceList<'_> {
        let mut list = ResourceList::default();
        self.allocatable.iter().for_each(|(name, amount)| list.set(name, *amount));
        list
    }
}

/// Returns the resources of which the settings reserve more than this machine has; pods' volumes are in the
/// file system of the folder `volumes`. Skips a resource that cannot be measured. Blocking.
#[must_use]
pub fn over_reserved(
    volumes: &Path,
    (system, kube): (&BTreeMap<String, Quantity>, &BTreeMap<String, Quantity>),
    thresholds: &[Threshold],
) -> Vec<Excess> {
    let units = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
    let memory = meminfo(&fs::read_to_string(MEMINFO).unwrap_or_default(), "MemTotal");
    let storage = volumes.ancestors().find_map(|folder| filesystem::statvfs(folder).ok());
    let amounts = [
        (CPU, i64::try_from(cpus::count()).ok()),
        (MEMORY, memory.map(units)),
        (EPHEMERAL_STORAGE, storage.map(|disk| units(disk.bytes.capacity_bytes))),
        (PID, pids()),
    ];
    let of = |(name, amount): (&str, Option<i64>)| Some((name.to_owned(), Quantity::from_units(amount?)));
    excesses(&amounts.into_iter().filter_map(of).collect(), system, kube, thresholds)
}

/// Returns the maximum number of processes and threads: the lower of the kernel's two limits
/// (pkg/kubelet/stats/pidlimit).
#[must_use]
pub fn pids() -> Option<i64> {
    let number = |file: &str| fs::read_to_string(file).ok()?.trim().parse::<i64>().ok();
    let limits = [number("/proc/sys/kernel/pid_max"), number("/proc/sys/kernel/threads-max")];
    limits.into_iter().flatten().min()
}

/// Returns the huge pages of this machine in bytes, by resource name (`hugepages-2Mi`).
#[must_use]
pub fn hugepages() -> BTreeMap<String, Quantity> {
    hugepages_below(Path::new(HUGEPAGES))
}

fn hugepages_below(folder: &Path) -> BTreeMap<String, Quantity> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let of_size = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let kib: i64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let pages: i64 = fs::read_to_string(entry.path().join("nr_hugepages")).ok()?.trim().parse().ok()?;
        let bytes = kib.checked_mul(1024)?;
        let size = Quantity::from_units(bytes).binary();
        Some((format!("hugepages-{size}"), Quantity::from_units(bytes.checked_mul(pages)?)))
    };
    entries.filter_map(of_size).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use beelet_policy::eviction::{Signal, ThresholdValue};

    use super::*;

    fn amounts(list: &[(&str, &str)]) -> BTreeMap<String, Quantity> {
        list.iter().map(|(name, text)| ((*name).to_owned(), Quantity::parse(text).unwrap())).collect()
    }

    fn threshold(signal: Signal, text: &str, grace: u64) -> Threshold {
        let value = ThresholdValue::threshold(text).unwrap().unwrap();
        Threshold { signal, value, grace: Duration::from_secs(grace), min_reclaim: None }
    }

    #[test]
    fn reserves_hard_thresholds_and_huge_pages_are_taken_off() {
        let capacity = amounts(&[
            ("cpu", "4"),
            ("memory", "8Gi"),
            ("ephemeral-storage", "100Gi"),
            ("pods", "110"),
            ("hugepages-2Mi", "1Gi"),
        ]);
        let thresholds = [
            threshold(Signal::MemoryAvailable, "512Mi", 0),
            threshold(Signal::MemoryAvailable, "4Gi", 30),
            threshold(Signal::NodeFsAvailable, "25%", 0),
            threshold(Signal::ImageFsAvailable, "15%", 0),
        ];
        let reserved = amounts(&[("cpu", "250m"), ("memory", "512Mi"), ("pid", "1000")]);
        let node = NodeResources::new(capacity, &reserved, &thresholds);
        assert_eq!(
            node.allocatable,
            amounts(&[
                ("cpu", "3750m"),
                ("memory", "6Gi"),
                ("ephemeral-storage", "75Gi"),
                ("pods", "110"),
                ("hugepages-2Mi", "1Gi"),
            ])
        );
    }

    #[test]
    fn nothing_is_ever_less_than_nothing() {
        let node = NodeResources::new(amounts(&[("memory", "1Gi")]), &amounts(&[("memory", "2Gi")]), &[]);
        assert_eq!(node.allocatable["memory"], Quantity::ZERO);
    }

    #[test]
    fn huge_pages_are_named_by_their_size() {
        let dir = tempfile::tempdir().unwrap();
        for (size, pages) in [("2048kB", "512"), ("1048576kB", "3")] {
            let folder = dir.path().join(format!("hugepages-{size}"));
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("nr_hugepages"), pages).unwrap();
        }
        assert_eq!(
            hugepages_below(dir.path()),
            amounts(&[("hugepages-2Mi", "1Gi"), ("hugepages-1Gi", "3Gi")])
        );
    }
}
