//! Parses the files of cgroups and of /proc: text in, numbers out. Pure. Missing or invalid numbers are left
//! out: kernels add lines, and omit those that their configuration lacks.

use std::collections::BTreeMap;

use beelet_base::mountinfo::device_numbers;

use super::model::{DeviceTraffic, Disk, DiskWork, Net, Stalls};

/// Parses numbers by name, one per line (`memory.stat`, `cpu.stat`, `memory.events`).
pub fn keyed(text: &str) -> impl Iterator<Item = (&str, u64)> {
    text.lines().filter_map(|line| {
        let (name, value) = line.split_once(' ')?;
        Some((name, value.trim().parse().ok()?))
    })
}

/// Parses a single number.
pub(super) fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// Parses a limit: `max`, and version 1's numbers near the maximum, mean no limit.
pub fn limit(text: &str) -> Option<u64> {
    // PAGE_COUNTER_MAX in bytes, rounded down to pages (mm/page_counter.c); cpu.cfs_quota_us and pids.max
    // never come near.
    const NO_LIMIT: u64 = i64::MAX as u64 - 65_536;
    number(text).filter(|bytes| *bytes < NO_LIMIT)
}

/// Returns the CPUs that `cpu.max` allows: quota and period in microseconds.
pub fn cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    quota_cores(quota.parse().ok()?, period.parse().ok()?)
}

/// Returns the CPUs that a quota allows; -1 means no quota.
pub(super) fn quota_cores(quota: i64, period: u64) -> Option<f64> {
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

/// Parses a PSI file: the totals of its two lines.
pub fn stalls(text: &str) -> Option<Stalls> {
    let line = |kind: &str| text.lines().find_map(|line| line.strip_prefix(kind));
    let total = |line: &str| line.rsplit_once("total=")?.1.trim().parse().ok();
    let averages = |line: &str| {
        let mut fields = line.split(' ').filter_map(|field| hundredths(field.split_once('=')?.1));
        std::array::from_fn(|_| fields.next().unwrap_or(0))
    };
    // The machine's CPU line has no `full` before Linux 5.13.
    let (some, full) = (line("some ")?, line("full ").unwrap_or_default());
    let averages = [averages(some), averages(full)];
    Some(Stalls { some_us: total(some)?, full_us: total(full).unwrap_or(0), averages })
}

/// Parses `27.69`: the kernel always prints two decimals.
fn hundredths(text: &str) -> Option<u16> {
    let (whole, rest) = text.split_once('.')?;
    whole.parse::<u16>().ok()?.checked_mul(100)?.checked_add(rest.parse().ok()?)
}

/// Parses `io.stat` of version 2: bytes and operations, read and written, over all devices. Sums saturate:
/// the kernel's numbers never come near the maximum, but a file system in user space may be mounted over any
/// of these files.
pub fn io_stat(text: &str) -> ([u64; 2], [u64; 2]) {
    let (mut bytes, mut operations) = ([0; 2], [0; 2]);
    let fields = text.lines().flat_map(|line| line.split(' ').skip(1));
    for (name, value) in fields.filter_map(|field| field.split_once('=')) {
        let Ok(value) = value.parse::<u64>() else { continue };
        match name {
            "rbytes" => add(&mut bytes[0], value),
            "wbytes" => add(&mut bytes[1], value),
            "rios" => add(&mut operations[0], value),
            "wios" => add(&mut operations[1], value),
            _ => {}
        }
    }
    (bytes, operations)
}

fn add(sum: &mut u64, value: u64) {
    *sum = sum.saturating_add(value);
}

/// Parses `blkio.throttle.io_service_bytes` or `…io_serviced` of version 1: read and written, over all
/// devices.
pub fn blkio(text: &str) -> [u64; 2] {
    let mut sums = [0; 2];
    for line in text.lines() {
        let mut words = line.split_whitespace().skip(1);
        let (Some(kind), Some(Ok(value))) = (words.next(), words.next().map(str::parse::<u64>)) else {
            continue;
        };
        match kind {
            "Read" => add(&mut sums[0], value),
            "Write" => add(&mut sums[1], value),
            _ => {}
        }
    }
    sums
}

/// Parses `io.stat` of version 2, by device.
pub fn io_stat_devices(text: &str) -> Vec<DeviceTraffic> {
    let devices = text.lines().filter_map(|line| {
        let device = device_numbers(line.split(' ').next()?)?;
        let (bytes, operations) = io_stat(line);
        Some(DeviceTraffic { device, bytes, operations })
    });
    devices.collect()
}

/// Parses the two files that [`blkio`] reads, bytes and operations, by device.
pub fn blkio_devices(bytes: &str, operations: &str) -> Vec<DeviceTraffic> {
    let mut found: BTreeMap<(u32, u32), DeviceTraffic> = BTreeMap::new();
    for (text, is_bytes) in [(bytes, true), (operations, false)] {
        for line in text.lines() {
            let Some(device) = line.split(' ').next().and_then(device_numbers) else { continue };
            let entry = found.entry(device).or_insert(DeviceTraffic { device, ..DeviceTraffic::default() });
            let sums = if is_bytes { &mut entry.bytes } else { &mut entry.operations };
            for (sum, value) in sums.iter_mut().zip(blkio(line)) {
                add(sum, value);
            }
        }
    }
    found.into_values().collect()
}

/// Parses `/proc/diskstats` (Documentation/admin-guide/iostats.rst).
pub fn disks(text: &str) -> Vec<Disk> {
    let disk = |line: &str| {
        let mut words = line.split_whitespace();
        let device = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let name = words.next()?.to_owned();
        let mut next = || words.next()?.parse::<u64>().ok();
        let mut work =
            || Some(DiskWork { completed: next()?, merged: next()?, sectors: next()?, ms: next()? });
        let (read, written) = (work()?, work()?);
        Some(Disk { device, name, read, written, in_flight: next()?, busy_ms: next()?, weighted_ms: next()? })
    };
    text.lines().filter_map(disk).collect()
}

/// Returns the soft limit of open files in `/proc/PID/limits`; -1 means no limit.
pub fn descriptors_limit(text: &str) -> Option<i64> {
    let soft =
        text.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace().next()?;
    if soft == "unlimited" { Some(-1) } else { soft.parse().ok() }
}

/// Returns the page faults and major page faults since boot in `/proc/vmstat`.
pub fn faults(text: &str) -> Option<[u64; 2]> {
    let of =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    Some([of("pgfault")?, of("pgmajfault")?])
}

/// Parses `/proc/PID/net/dev`: every interface but loopback, up to a maximum number.
pub fn interfaces(text: &str, most: usize) -> Vec<(String, Net)> {
    let interface = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        let numbers: Vec<u64> = numbers.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let [
            rx_bytes,
            rx_packets,
            rx_errors,
            rx_dropped,
            _,
            _,
            _,
            _,
            tx_bytes,
            tx_packets,
            tx_errors,
            tx_dropped,
            ..,
        ] = numbers[..]
        else {
            return None;
        };
        let net = Net {
            rx_bytes,
            rx_packets,
            rx_errors,
            rx_dropped,
            tx_bytes,
            tx_packets,
            tx_errors,
            tx_dropped,
            retransmits: 0,
        };
        Some((name.trim().to_owned(), net))
    };
    text.lines().filter_map(interface).filter(|(name, _)| name != "lo").take(most).collect()
}

/// Returns `RetransSegs` of `/proc/PID/net/snmp`: two lines, names and values.
pub fn retransmits(text: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (lines.next()?, lines.next()?);
    let at = names.split(' ').position(|name| name == "RetransSegs")?;
    values.split(' ').nth(at)?.parse().ok()
}

/// Returns the busy time of all CPUs in nanoseconds, and the boot time in seconds since the epoch, from
/// `/proc/stat`. Idle and I/O wait are not busy; a guest's time is already part of the user time.
pub fn machine_cpu(text: &str, ticks_per_second: u64) -> (Option<u64>, Option<i64>) {
    let busy = text.lines().find_map(|line| line.strip_prefix("cpu ")).map(|line| {
        let ticks: Vec<u64> = line.split_whitespace().take(8).filter_map(|word| word.parse().ok()).collect();
        let busy = ticks.iter().enumerate().filter(|(at, _)| !matches!(at, 3 | 4)).map(|(_, ticks)| *ticks);
        busy.fold(0, u64::saturating_add).saturating_mul(1_000_000_000 / ticks_per_second.max(1))
    });
    let booted = text.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok());
    (busy, booted)
}

/// Returns the time of all CPUs in user mode and in the kernel in nanoseconds, from `/proc/stat`.
pub fn machine_modes(text: &str, ticks_per_second: u64) -> [u64; 2] {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    let ticks: Vec<u64> = line.split_whitespace().take(8).filter_map(|word| word.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    [&[0, 1][..], &[2, 5, 6]].map(|fields| {
        let sum =
            fields.iter().filter_map(|at| ticks.get(*at)).fold(0_u64, |sum, one| sum.saturating_add(*one));
        sum.saturating_mul(1_000_000_000 / ticks_per_second.max(1))
    })
}

/// Parses `/proc/loadavg`.
pub fn load(text: &str) -> [f64; 3] {
    let mut words = text.split(' ').map(|word| word.parse().unwrap_or(0.0));
    std::array::from_fn(|_| words.next().unwrap_or(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_by_name_and_what_is_none_is_left_out() {
        let text = "usage_usec 12\nnice\nuser_usec -1\n\nnr_periods 3\n";
        assert_eq!(keyed(text).collect::<Vec<_>>(), [("usage_usec", 12), ("nr_periods", 3)]);
    }

    #[test]
    fn no_limit_has_several_spellings() {
        for text in ["max\n", "9223372036854771712\n", "9223372036854710272", ""] {
            assert_eq!(limit(text), None, "{text:?}");
        }
        assert_eq!(limit("67108864\n"), Some(67_108_864));
        assert_eq!((cpu_max("max 100000\n"), cpu_max("50000 100000\n")), (None, Some(0.5)));
        assert_eq!((quota_cores(-1, 100_000), quota_cores(150_000, 100_000)), (None, Some(1.5)));
    }

    #[test]
    fn stalls_are_the_totals_of_both_lines() {
        let text = "some avg10=27.69 avg60=18.10 avg300=11.66 total=7640785323\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=5\n";
        let averages = [[2769, 1810, 1166], [0; 3]];
        assert_eq!(stalls(text), Some(Stalls { some_us: 7_640_785_323, full_us: 5, averages }));
        let some = "some avg10=0.00 avg60=0.00 avg300=0.00 total=9\n";
        assert_eq!(stalls(some), Some(Stalls { some_us: 9, ..Stalls::default() }));
        assert_eq!(stalls(""), None);
    }

    #[test]
    fn devices_are_added_up() {
        let v2 = "8:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0\n8:16 rbytes=5 wbytes=0 rios=1 wios=0 dbytes=0 dios=0\n7:0 \n";
        assert_eq!(io_stat(v2), ([15, 20], [2, 2]));
        let v1 = "8:0 Read 10\n8:0 Write 20\n8:0 Sync 30\n8:0 Total 30\n8:16 Read 5\nTotal 35\n";
        assert_eq!(blkio(v1), [15, 20]);
    }

    #[test]
    fn both_versions_say_the_same_of_each_device() {
        let v2 = "8:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0\n8:16 rbytes=5 wbytes=0 rios=1 wios=0\n7:0 \nx\n";
        let bytes =
            "8:0 Read 10\n8:0 Write 20\n8:0 Sync 30\n8:0 Total 30\n8:16 Read 5\n7:0 Read 0\nTotal 35\n";
        let operations = "8:0 Read 1\n8:0 Write 2\n8:16 Read 1\nTotal 4\n";
        let one = |device, bytes, operations| DeviceTraffic { device, bytes, operations };
        let expected =
            [one((7, 0), [0, 0], [0, 0]), one((8, 0), [10, 20], [1, 2]), one((8, 16), [5, 0], [1, 0])];
        let mut found = io_stat_devices(v2);
        found.sort_by_key(|one| one.device);
        assert_eq!(found, expected);
        assert_eq!(blkio_devices(bytes, operations), expected);
    }

    #[test]
    fn a_disk_is_a_line_of_diskstats_and_a_short_line_is_none() {
        let text = " 254       0 vda 7 2 4657 166 54 39 96 88 3 16 263 32 9 8 5 5 9\n   7 0 loop0 1 2\n";
        let [disk] = &disks(text)[..] else { panic!("{:?}", disks(text)) };
        assert_eq!((disk.device, disk.name.as_str(), disk.in_flight), ((254, 0), "vda", 3));
        assert_eq!(disk.read, DiskWork { completed: 7, merged: 2, sectors: 4657, ms: 166 });
        assert_eq!(disk.written, DiskWork { completed: 54, merged: 39, sectors: 96, ms: 88 });
        assert_eq!((disk.busy_ms, disk.weighted_ms), (16, 263));
    }

    #[test]
    fn the_limit_of_open_files_is_the_soft_one() {
        let of = |soft: &str| {
            descriptors_limit(&format!(
                "Limit  Soft Limit  Hard Limit  Units\nMax open files   {soft}   1048576   files\n"
            ))
        };
        assert_eq!(
            (of("1024"), of("unlimited"), of("x"), descriptors_limit("")),
            (Some(1024), Some(-1), None, None)
        );
    }

    #[test]
    fn numbers_near_the_largest_are_no_overflow() {
        let most = u64::MAX;
        let v2 = format!("8:0 rbytes={most} wios={most}\n8:16 rbytes={most} wios=1\n");
        assert_eq!(io_stat(&v2), ([most, 0], [0, most]));
        assert_eq!(blkio(&format!("8:0 Read {most}\n8:16 Read 1\n")), [most, 0]);
        assert_eq!(machine_cpu(&format!("cpu  {most} 1\n"), 100), (Some(most), None));
    }

    #[test]
    fn faults_are_counted_by_their_whole_names() {
        assert_eq!(faults("pgfault_x 1\npgfault 20\npgmajfault 3\n"), Some([20, 3]));
        assert_eq!(faults("pgfault 20\n"), None);
    }

    #[test]
    fn the_network_is_every_interface_but_the_loopback_one() {
        let text = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     500       5    0    0    0     0          0         0      500       5    0    0    0     0       0          0
  eth0:    1000      10    1    2    0     0          0         0     2000      20    3    4    0     0       0          0
";
        let found = interfaces(text, 8);
        assert_eq!(found.len(), 1);
        let (name, net) = &found[0];
        assert_eq!(
            (name.as_str(), net.rx_bytes, net.rx_dropped, net.tx_packets, net.tx_errors),
            ("eth0", 1000, 2, 20, 3)
        );
        let many: String =
            (0..99).map(|n| format!("v{n}: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n")).collect();
        assert_eq!(interfaces(&many, 8).len(), 8);
        let snmp = "Ip: A B\nIp: 1 2\nTcp: RtoAlgorithm InSegs RetransSegs InErrs\nTcp: 1 -1 42 0\n";
        assert_eq!((retransmits(snmp), retransmits("Tcp: a\n")), (Some(42), None));
    }

    #[test]
    fn the_machine_is_busy_when_it_is_neither_idle_nor_waiting() {
        let stat = "cpu  100 10 50 5000 700 1 2 3 40 0\ncpu0 1 1 1 1\nbtime 1700000000\n";
        assert_eq!(machine_cpu(stat, 100), (Some(1_660_000_000), Some(1_700_000_000)));
        assert_eq!(machine_cpu("", 100), (None, None));
        assert_eq!(machine_modes(stat, 100), [1_100_000_000, 530_000_000]);
        assert_eq!(machine_modes("", 0), [0, 0]);
        assert_eq!(load("0.50 1.25 2.00 1/200 1234\n"), [0.5, 1.25, 2.0]);
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_them_panic(text in "([a-z_:=0-9 .-]|\n|\\PC){0,200}") {
            let _ = (keyed(&text).count(), limit(&text), cpu_max(&text), stalls(&text), io_stat(&text), blkio(&text));
            let _ = (io_stat_devices(&text), blkio_devices(&text, &text), disks(&text), descriptors_limit(&text));
            let _ = machine_modes(&text, 0);
            let _ = (interfaces(&text, 8), retransmits(&text), machine_cpu(&text, 0), load(&text));
        }
    }
}
