//! Converts a cgroup's files to properties of its unit. Pure.
//!
//! systemd rewrites a unit's known values at some events (a `daemon-reload`, a change of another property),
//! and the unknown ones with their defaults. So each value with a property is also set as one, as in
//! libcontainer (cgroups/systemd/v2.go, `genV2ResourcesProperties`). Unlike there, a quota is not rounded up
//! to a whole percent: systemd would overwrite the value in the file with that. Only a `daemon-reload` rounds
//! it to whole percents (systemd 252), until the next comparison corrects it.

use beelet_systemd::manager::{Property, Value};

use super::super::Files;

/// No limit, in all properties that are amounts (`CGROUP_LIMIT_MAX`, `USEC_INFINITY`).
const NO_LIMIT: u64 = u64::MAX;
/// Weight of a cgroup that stops being idle, until a weight is written (kernel/sched/fair.c,
/// `sched_group_set_idle`).
const DEFAULT_WEIGHT: u64 = 100;
/// `CGROUP_WEIGHT_IDLE`, since systemd 252.
const IDLE: u64 = 0;

fn property(name: &'static str, value: Value) -> Property {
    Property { name, value }
}

/// Returns the properties of every new slice (libcontainer: `UnifiedManager.Apply`). The accounting
/// properties select the slice's controllers.
pub(crate) fn of_slice(parent: Option<&str>) -> Vec<Property> {
    let counted = ["CPUAccounting", "MemoryAccounting", "IOAccounting", "TasksAccounting"];
    let mut properties = vec![
        property("Description", Value::Text("beelet: pods of this node".to_owned())),
        property("DefaultDependencies", Value::Bool(false)),
    ];
    properties.extend(parent.map(|parent| property("Wants", Value::Units(vec![parent.to_owned()]))));
    properties.extend(counted.map(|name| property(name, Value::Bool(true))));
    properties
}

/// Returns the properties for these files.
pub(crate) fn of_files(files: &Files) -> Vec<Property> {
    files.iter().flat_map(|(file, value)| of_file(file, value)).collect()
}

/// Returns the properties for a file of cgroup v2 with this content; none for a file without a property,
/// which systemd leaves alone.
pub(crate) fn of_file(file: &str, value: &str) -> Vec<Property> {
    let value = value.trim();
    let one =
        |name, value: Option<u64>| value.map(|n| property(name, Value::Amount(n))).into_iter().collect();
    let bits = |name| bits(value).map(|bits| property(name, Value::Bits(bits))).into_iter().collect();
    match file {
        "cpu.weight" => one("CPUWeight", value.parse().ok()),
        "cpu.idle" => one("CPUWeight", Some(if value == "0" { DEFAULT_WEIGHT } else { IDLE })),
        "cpu.max" => cpu_max(value).into_iter().flatten().collect(),
        "memory.min" => one("MemoryMin", amount(value)),
        "memory.low" => one("MemoryLow", amount(value)),
        "memory.high" => one("MemoryHigh", amount(value)),
        "memory.max" => one("MemoryMax", amount(value)),
        "memory.swap.max" => one("MemorySwapMax", amount(value)),
        // The weight of all devices; lines of single devices have no property.
        "io.weight" => one("IOWeight", value.strip_prefix("default ").and_then(|weight| weight.parse().ok())),
        "pids.max" => one("TasksMax", amount(value)),
        "cpuset.cpus" => bits("AllowedCPUs"),
        "cpuset.mems" => bits("AllowedMemoryNodes"),
        _ => Vec::new(),
    }
}

fn amount(value: &str) -> Option<u64> {
    if value == "max" { Some(NO_LIMIT) } else { value.parse().ok() }
}

/// Returns the quota in microseconds per second, and the period. The quota is rounded up, since systemd
/// rounds down when it converts it back.
fn cpu_max(value: &str) -> Option<[Property; 2]> {
    let (quota, period) = value.split_once(' ').unwrap_or((value, "100000"));
    let period: u64 = period.parse().ok().filter(|period| *period > 0)?;
    let per_second = match amount(quota)? {
        NO_LIMIT => NO_LIMIT,
        quota => u64::try_from((u128::from(quota) * 1_000_000).div_ceil(u128::from(period))).ok()?,
    };
    Some([
        property("CPUQuotaPerSecUSec", Value::Amount(per_second)),
        property("CPUQuotaPeriodUSec", Value::Amount(period)),
    ])
}

/// Converts `0-3,8` to bits, the lowest first (libcontainer: `RangeToBits`).
fn bits(list: &str) -> Option<Vec<u8>> {
    /// Upper bound, above any kernel's CONFIG_NR_CPUS.
    const MOST: usize = 1 << 16;
    let mut bytes = Vec::new();
    for range in list.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if last < first || last >= MOST {
            return None;
        }
        bytes.resize(bytes.len().max(last / 8 + 1), 0u8);
        for bit in first..=last {
            bytes[bit / 8] |= 1 << (bit % 8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(file: &str, value: &str, expected: &[(&'static str, u64)]) {
        let expected: Vec<Property> =
            expected.iter().map(|(name, amount)| property(name, Value::Amount(*amount))).collect();
        assert_eq!(of_file(file, value), expected, "{file}: {value}");
    }

    #[test]
    fn amounts_have_the_names_that_systemd_gives_them() {
        check("cpu.weight", "39", &[("CPUWeight", 39)]);
        check("cpu.idle", "1", &[("CPUWeight", 0)]);
        check("cpu.idle", "0", &[("CPUWeight", 100)]);
        check("memory.max", "134217728", &[("MemoryMax", 134_217_728)]);
        check("memory.max", "max", &[("MemoryMax", u64::MAX)]);
        check("memory.high", "max", &[("MemoryHigh", u64::MAX)]);
        check("memory.low", "0", &[("MemoryLow", 0)]);
        check("memory.min", "4096", &[("MemoryMin", 4096)]);
        check("memory.swap.max", "0", &[("MemorySwapMax", 0)]);
        check("pids.max", "max", &[("TasksMax", u64::MAX)]);
        check("pids.max", "1024\n", &[("TasksMax", 1024)]);
        check("io.weight", "default 10", &[("IOWeight", 10)]);
        check("io.weight", "8:0 10", &[]);
    }

    #[test]
    fn a_quota_is_per_second_and_never_less_than_in_the_file() {
        let quota = |value, per_second, period| {
            check("cpu.max", value, &[("CPUQuotaPerSecUSec", per_second), ("CPUQuotaPeriodUSec", period)]);
        };
        quota("50000 100000", 500_000, 100_000);
        quota("25500 100000", 255_000, 100_000);
        quota("100 100000", 1000, 100_000);
        quota("1000 3000", 333_334, 3000);
        quota("400000 100000", 4_000_000, 100_000);
        quota("max 10000", u64::MAX, 10_000);
        quota("max", u64::MAX, 100_000);
        check("cpu.max", "1 0", &[]);
        check("cpu.max", "x 100000", &[]);
    }

    #[test]
    fn lists_of_cpus_are_bits() {
        let cpus = |value: &str, expected: Option<&[u8]>| {
            let expected = expected.map(|bits| property("AllowedCPUs", Value::Bits(bits.to_vec())));
            assert_eq!(of_file("cpuset.cpus", value), expected.into_iter().collect::<Vec<_>>(), "{value}");
        };
        cpus("0", Some(&[1]));
        cpus("0-3,8", Some(&[0b1111, 1]));
        cpus("9,1", Some(&[2, 2]));
        cpus("", Some(&[]));
        cpus("3-1", None);
        cpus("0-99999999", None);
        cpus("x", None);
    }

    #[test]
    fn files_unknown_to_systemd_have_no_property() {
        for file in ["cpu.max.burst", "memory.oom.group", "hugetlb.2MB.max", "cgroup.freeze"] {
            check(file, "1", &[]);
        }
        check("memory.max", "much", &[]);
    }

    #[test]
    fn a_slice_wants_the_one_above_it_and_counts_everything() {
        let names = |parent| of_slice(parent).iter().map(|property| property.name).collect::<Vec<_>>();
        let counted = ["CPUAccounting", "MemoryAccounting", "IOAccounting", "TasksAccounting"];
        assert_eq!(names(None), [&["Description", "DefaultDependencies"][..], &counted].concat());
        let wants = property("Wants", Value::Units(vec!["kubepods.slice".to_owned()]));
        assert!(of_slice(Some("kubepods.slice")).contains(&wants));
    }
}
