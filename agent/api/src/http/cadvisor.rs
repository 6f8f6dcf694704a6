//! `/metrics/cadvisor`: `container_*` and `machine_*`, as cAdvisor inside the kubelet names them.
//!
//! The samples belong to cgroups: containers, pods, all pods together, and the machine as `/`. Queries that
//! sum containers select `container!=""`, as with a kubelet's page.

use std::collections::{BTreeMap, HashSet};

use axum::extract::State;
use axum::response::Response;
use jiff::Timestamp;

use super::ApiState;
use super::numbers::{Metric, Of, START_TIME, at_ms, page};
use super::summary::{Fs, Sizes, fs};
use beelet_base::mountinfo;
use beelet_model::disk::Taken;
use beelet_stats::Scope;
use beelet_stats::metrics::{CADVISOR, Kind, LabelText, Page};
use beelet_stats::model::{ContainerStats, DeviceTraffic, Disk, DiskWork, Net, NodeStats, PodStats, Reading};

/// Maximum file systems of the machine on the page; each one costs a system call.
const MOST_FILE_SYSTEMS: usize = 64;

/// Serves the page.
pub(super) async fn cadvisor(State(state): State<ApiState>) -> Response {
    let pressure = state.pressure.now(Scope::Everything).await;
    page(
        beelet_base::blocking::spawn_blocking(move || {
            let mounted = match mountinfo::read() {
                Ok(table) => FileSystem::all(&table, &pressure.machine.disks),
                Err(_) => Vec::new(),
            };
            cadvisor_page(&pressure, &Sizes::measure(&pressure.places), &mounted)
        })
        .await,
    )
}

const NETWORK: [Of<Net, u64>; 8] = {
    use Kind::Counter;
    [
        (("container_network_receive_bytes_total", Counter, "Bytes received"), |net| net.rx_bytes),
        (("container_network_receive_errors_total", Counter, "Errors while receiving"), |net| net.rx_errors),
        (
            ("container_network_receive_packets_dropped_total", Counter, "Packets dropped while receiving"),
            |net| net.rx_dropped,
        ),
        (("container_network_receive_packets_total", Counter, "Packets received"), |net| net.rx_packets),
        (("container_network_transmit_bytes_total", Counter, "Bytes sent"), |net| net.tx_bytes),
        (("container_network_transmit_errors_total", Counter, "Errors while sending"), |net| net.tx_errors),
        (
            ("container_network_transmit_packets_dropped_total", Counter, "Packets dropped while sending"),
            |net| net.tx_dropped,
        ),
        (("container_network_transmit_packets_total", Counter, "Packets sent"), |net| net.tx_packets),
    ]
};
/// Value of a container's disk usage and its file system.
type OfContainer = fn(Taken, Option<&Fs>) -> Option<u64>;

/// A disk metric: of a container with its file system, and of each file system of the machine.
struct OfDisk {
    metric: Metric,
    container: Option<OfContainer>,
    machine: Option<fn(&Fs) -> u64>,
}

/// Disk metrics. A container's disk usage is its writable layer and its logs. As in cAdvisor, containers have
/// no sample of the file system's inodes, which are not the container's.
const DISK: [OfDisk; 5] = {
    use Kind::Gauge;
    [
        OfDisk {
            metric: (
                "container_fs_usage_bytes",
                Gauge,
                "Bytes used by the writable layer and the logs; for `/`, by each file system",
            ),
            container: Some(|taken, _| Some(taken.bytes)),
            machine: Some(|fs| fs.used_bytes),
        },
        OfDisk {
            metric: ("container_fs_inodes_used", Gauge, "Inodes used by the writable layer and the logs"),
            container: Some(|taken, _| Some(taken.inodes)),
            machine: None,
        },
        OfDisk {
            metric: (
                "container_fs_limit_bytes",
                Gauge,
                "Size of the writable layer's file system in bytes; for `/`, of each file system",
            ),
            container: Some(|_, fs| fs.map(|fs| fs.capacity_bytes)),
            machine: Some(|fs| fs.capacity_bytes),
        },
        OfDisk {
            metric: ("container_fs_inodes_total", Gauge, "Inodes of each file system of the machine"),
            container: None,
            machine: Some(|fs| fs.inodes),
        },
        OfDisk {
            metric: ("container_fs_inodes_free", Gauge, "Free inodes of each file system of the machine"),
            container: None,
            machine: Some(|fs| fs.inodes_free),
        },
    ]
};

/// Traffic of a cgroup with a block device, and of a file system's device.
type OfDevice = (Metric, fn(&DeviceTraffic) -> u64, fn(&Disk) -> u64);
const TRAFFIC: [OfDevice; 4] = {
    use Kind::Counter;
    [
        (
            ("container_fs_reads_bytes_total", Counter, "Bytes read from block devices"),
            |one| one.bytes[0],
            |disk| disk.read.sectors.saturating_mul(SECTOR),
        ),
        (
            ("container_fs_writes_bytes_total", Counter, "Bytes written to block devices"),
            |one| one.bytes[1],
            |disk| disk.written.sectors.saturating_mul(SECTOR),
        ),
        (
            ("container_fs_reads_total", Counter, "Reads from block devices"),
            |one| one.operations[0],
            |disk| disk.read.completed,
        ),
        (
            ("container_fs_writes_total", Counter, "Writes to block devices"),
            |one| one.operations[1],
            |disk| disk.written.completed,
        ),
    ]
};
/// Unit of /proc/diskstats in bytes.
const SECTOR: u64 = 512;

/// Metrics of the machine's own devices only.
const DEVICE: [Of<Disk, f64>; 9] = {
    use Kind::{Counter, Gauge};
    const fn of(name: &'static str, help: &'static str, value: fn(&Disk) -> f64) -> Of<Disk, f64> {
        ((name, Counter, help), value)
    }
    [
        of("container_fs_sector_reads_total", "Sectors read", |disk| disk.read.sectors as f64),
        of("container_fs_sector_writes_total", "Sectors written", |disk| disk.written.sectors as f64),
        of("container_fs_reads_merged_total", "Merged reads", |disk| disk.read.merged as f64),
        of("container_fs_writes_merged_total", "Merged writes", |disk| disk.written.merged as f64),
        of("container_fs_read_seconds_total", "Time spent on reads, in seconds", |disk| took(disk.read)),
        of("container_fs_write_seconds_total", "Time spent on writes, in seconds", |disk| took(disk.written)),
        of("container_fs_io_time_seconds_total", "Time in which the device was busy, in seconds", |disk| {
            disk.busy_ms as f64 / 1e3
        }),
        of(
            "container_fs_io_time_weighted_seconds_total",
            "Total time of all requests in flight, in seconds",
            |disk| disk.weighted_ms as f64 / 1e3,
        ),
        (("container_fs_io_current", Gauge, "Requests in flight"), |disk| disk.in_flight as f64),
    ]
};

fn took(work: DiskWork) -> f64 {
    work.ms as f64 / 1e3
}

const BLKIO: Metric =
    ("container_blkio_device_usage_total", Kind::Counter, "Bytes read from and written to each block device");
const LAST_SEEN: Metric =
    ("container_last_seen", Kind::Gauge, "Time of the container's last reading, in seconds since the epoch");
/// Metrics of the whole machine.
const MACHINE: [Of<NodeStats, f64>; 3] = {
    use Kind::Gauge;
    [
        (("machine_cpu_cores", Gauge, "CPUs of the machine"), |node| f64::from(node.machine.cpus)),
        (("machine_memory_bytes", Gauge, "Memory of the machine, in bytes"), |node| {
            node.machine.memory_total as f64
        }),
        (("machine_swap_bytes", Gauge, "Swap of the machine, in bytes"), |node| {
            node.machine.swap.map_or(0.0, |[total, _]| total as f64)
        }),
    ]
};
const VERSION: Metric = ("cadvisor_version_info", Kind::Gauge, "1, with the kernel's version");
const ERRORS: [Metric; 2] = [
    ("container_scrape_error", Kind::Gauge, "1 if containers could not be read yet, else 0"),
    ("machine_scrape_error", Kind::Gauge, "1 if the machine could not be read yet, else 0"),
];

/// Returns all metrics of the page that are not in [`CADVISOR`], with their labels, for docs/metrics.md.
#[cfg(any(test, feature = "test-util"))]
pub(super) fn documented() -> Vec<(&'static str, Metric, &'static str)> {
    let container = "container, id, image, name, namespace, pod";
    let device = "container, device, id, image, name, namespace, pod";
    let disk =
        DISK.iter().map(|one| (one.metric, if one.container.is_some() { device } else { "device, id" }));
    let traffic = TRAFFIC.iter().map(|(metric, ..)| (*metric, device));
    let devices = DEVICE.iter().map(|(metric, _)| (*metric, "device, id"));
    let blkio = (BLKIO, "container, device, id, image, major, minor, name, namespace, operation, pod");
    let network = NETWORK.iter().map(|(metric, _)| (*metric, "id, interface, namespace, pod"));
    let machine = MACHINE.iter().map(|(metric, _)| (*metric, ""));
    let errors = ERRORS.map(|metric| (metric, ""));
    disk.chain(traffic)
        .chain(devices)
        .chain([blkio, (LAST_SEEN, container), (START_TIME, container)])
        .chain(network)
        .chain(machine)
        .chain([(VERSION, "kernelVersion")])
        .chain(errors)
        .map(|(metric, labels)| ("/metrics/cadvisor", metric, labels))
        .collect()
}

/// A file system of the machine on a device.
struct FileSystem<'a> {
    /// Mount source: `/dev/sda1`.
    device: String,
    size: Fs,
    /// Statistics of its device; None for a file system without a block device of its own (btrfs over
    /// several).
    disk: Option<&'a Disk>,
}

impl<'a> FileSystem<'a> {
    /// Returns one file system per device. Blocking.
    fn all(table: &[u8], disks: &'a [Disk]) -> Vec<Self> {
        let by_device: BTreeMap<(u32, u32), &Disk> = disks.iter().map(|disk| (disk.device, disk)).collect();
        let mut seen = HashSet::new();
        let of = |mount: mountinfo::Mount<'_>| {
            let on_disk =
                mount.fs_type.starts_with(b"ext") || [&b"xfs"[..], b"btrfs"].contains(&mount.fs_type);
            let device = mount.device.filter(|device| on_disk && !seen.contains(device))?;
            let stat = rustix::fs::stat(&mount.point).ok()?;
            // Another file system may be mounted over it.
            if (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)) != device {
                return None;
            }
            let size = fs(&mount.point)?;
            seen.insert(device);
            let disk = by_device.get(&device).copied();
            // `/dev/root` does not exist as a device.
            let named =
                disk.map(|disk| format!("/dev/{}", disk.name)).filter(|_| mount.source == b"/dev/root");
            let source = || String::from_utf8_lossy(mount.source).into_owned();
            Some(Self { device: named.unwrap_or_else(source), size, disk })
        };
        mountinfo::mounts(table).filter_map(of).take(MOST_FILE_SYSTEMS).collect()
    }
}

/// A cgroup with cAdvisor's labels.
struct Line<'a> {
    labels: LabelText,
    started: Option<Timestamp>,
    reading: &'a Reading,
}

/// Returns all cgroups, containers first.
fn lines(stats: &NodeStats) -> Vec<Line<'_>> {
    let containers = stats.readings().map(|(pod, container, reading)| Line {
        labels: of_container(pod, container),
        started: container.started_at,
        reading,
    });
    let pods = stats.pods.iter().filter_map(|pod| {
        let (id, reading) = (pod.cgroup.as_deref()?, pod.reading.as_ref()?);
        Some(Line { labels: of_pod(pod, id), started: pod.started_at, reading })
    });
    let machine = &stats.machine;
    let all_pods = machine.all_pods.as_ref().map(|(id, reading)| Line {
        labels: labels("", id, "", "", ["", ""]),
        started: None,
        reading,
    });
    let root = machine.reading.as_ref().map(|reading| Line {
        labels: of_machine(),
        started: machine.booted_at,
        reading,
    });
    containers.chain(pods).chain(all_pods).chain(root).collect()
}

/// Returns the labels in cAdvisor's order; `name` is the container's ID there.
fn labels(container: &str, id: &str, image: &str, name: &str, [namespace, pod]: [&str; 2]) -> LabelText {
    LabelText::new(&[
        ("container", container),
        ("id", id),
        ("image", image),
        ("name", name),
        ("namespace", namespace),
        ("pod", pod),
    ])
}

fn of_machine() -> LabelText {
    labels("", "/", "", "", ["", ""])
}

fn of_container(pod: &PodStats, container: &ContainerStats) -> LabelText {
    let id = container.cgroup.as_deref().unwrap_or_default();
    labels(&container.name, id, &container.image, &container.id, [&pod.name.namespace, &pod.name.name])
}

fn of_pod(pod: &PodStats, id: &str) -> LabelText {
    labels("", id, "", "", [&pod.name.namespace, &pod.name.name])
}

fn cadvisor_page(stats: &NodeStats, sizes: &Sizes, mounted: &[FileSystem<'_>]) -> String {
    let mut page = Page::default();
    let (at, lines) = (at_ms(stats), lines(stats));
    for metric in CADVISOR {
        for line in &lines {
            let Some(value) = (metric.value)(line.reading) else { continue };
            page.sample_of((metric.name, metric.kind, metric.help), &line.labels, metric.labels, value, at);
        }
    }
    for line in &lines {
        let Some(started) = line.started else { continue };
        page.sample_of(START_TIME, &line.labels, &[], started.as_nanosecond() as f64 / 1e9, None);
    }
    for line in &lines {
        page.sample_of(LAST_SEEN, &line.labels, &[], stats.at.as_second() as f64, at);
    }
    on_disk(&mut page, stats, sizes, mounted);
    traffic(&mut page, stats, &lines, mounted);
    network(&mut page, stats);
    for (metric, value) in MACHINE {
        page.sample(metric, &[], value(stats), None);
    }
    let kernel = rustix::system::uname();
    page.sample(VERSION, &[("kernelVersion", &kernel.release().to_string_lossy())], 1.0, None);
    for metric in ERRORS {
        page.sample(metric, &[], f64::from(u8::from(stats.at_ns == 0)), None);
    }
    page.finish()
}

/// Writes the disk usage of containers and of the machine's file systems.
fn on_disk(page: &mut Page, stats: &NodeStats, sizes: &Sizes, mounted: &[FileSystem<'_>]) {
    let (at, root) = (at_ms(stats), of_machine());
    let taken: Vec<_> =
        taken(stats).map(|(pod, container, taken)| (of_container(pod, container), taken)).collect();
    for OfDisk { metric, container: of_one, machine } in DISK {
        for (labels, taken) in &taken {
            let value = of_one.and_then(|value| value(*taken, sizes.containers.as_ref()));
            let Some(value) = value else { continue };
            page.sample_of(metric, labels, &[("device", "")], value as f64, at);
        }
        let Some(value) = machine else { continue };
        for one in mounted {
            page.sample_of(metric, &root, &[("device", &one.device)], value(&one.size) as f64, at);
        }
    }
}

/// Returns containers whose writable layer or logs were measured.
fn taken(stats: &NodeStats) -> impl Iterator<Item = (&PodStats, &ContainerStats, Taken)> {
    stats.readings().filter_map(|(pod, container, _)| {
        let disk = pod.disk.as_ref()?;
        let (rootfs, logs) = (disk.rootfs.get(&container.name), disk.logs.get(&container.name));
        let both = rootfs.into_iter().chain(logs).copied().reduce(|a, b| Taken {
            bytes: a.bytes.saturating_add(b.bytes),
            inodes: a.inodes.saturating_add(b.inodes),
        });
        Some((pod, container, both?))
    })
}

/// Writes the traffic with block devices.
fn traffic(page: &mut Page, stats: &NodeStats, lines: &[Line<'_>], mounted: &[FileSystem<'_>]) {
    let (at, root) = (at_ms(stats), of_machine());
    let names: BTreeMap<(u32, u32), String> =
        stats.machine.disks.iter().map(|disk| (disk.device, format!("/dev/{}", disk.name))).collect();
    let name_of = |device| names.get(&device).map(String::as_str).unwrap_or_default();
    let disks: Vec<_> = mounted.iter().filter_map(|one| Some((one.device.as_str(), one.disk?))).collect();
    for (metric, of_cgroup, of_disk) in TRAFFIC {
        for line in lines {
            for one in devices(line.reading) {
                let own = [("device", name_of(one.device))];
                page.sample_of(metric, &line.labels, &own, of_cgroup(one) as f64, at);
            }
        }
        for (device, disk) in &disks {
            page.sample_of(metric, &root, &[("device", device)], of_disk(disk) as f64, at);
        }
    }
    for line in lines {
        for one in devices(line.reading) {
            let [major, minor] = [one.device.0, one.device.1].map(|number| number.to_string());
            for (operation, bytes) in ["Read", "Write"].into_iter().zip(one.bytes) {
                let own = [
                    ("device", name_of(one.device)),
                    ("major", &major),
                    ("minor", &minor),
                    ("operation", operation),
                ];
                page.sample_of(BLKIO, &line.labels, &own, bytes as f64, at);
            }
        }
    }
    for (metric, value) in DEVICE {
        for (device, disk) in &disks {
            page.sample_of(metric, &root, &[("device", device)], value(disk), at);
        }
    }
}

/// Returns a cgroup's block devices. A cgroup without traffic has a sample of zeroes with an empty device
/// name: a counter that appears with its first value has no rate.
fn devices(reading: &Reading) -> &[DeviceTraffic] {
    const UNUSED: &[DeviceTraffic] = &[DeviceTraffic { device: (0, 0), bytes: [0; 2], operations: [0; 2] }];
    let devices = reading.details.as_ref().map(|details| &details.devices[..]).unwrap_or_default();
    if devices.is_empty() && reading.counters.io_bytes.is_some() { UNUSED } else { devices }
}

fn network(page: &mut Page, stats: &NodeStats) {
    let at = at_ms(stats);
    for (metric, value) in NETWORK {
        let pods = stats.pods.iter().map(|pod| {
            (pod.cgroup.as_deref().unwrap_or_default(), &pod.name.namespace[..], &pod.name.name[..], &pod.net)
        });
        for (id, namespace, pod, interfaces) in pods.chain([("/", "", "", &stats.machine.net)]) {
            for (interface, net) in interfaces {
                let labels =
                    [("id", id), ("interface", interface.as_str()), ("namespace", namespace), ("pod", pod)];
                page.sample(metric, &labels, value(net) as f64, at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::fixtures;

    fn disk() -> Disk {
        let work = |sectors| DiskWork { completed: 3, merged: 1, sectors, ms: 1500 };
        Disk { device: (254, 0), name: "vda".into(), read: work(2), written: work(4), ..Disk::default() }
    }

    fn text() -> String {
        let mut stats = fixtures::pressure();
        let disk = disk();
        stats.machine.disks = vec![disk.clone()];
        let size = fs(std::path::Path::new("/")).unwrap();
        let mounted = [FileSystem { device: "/dev/vda".into(), size, disk: Some(&disk) }];
        cadvisor_page(&stats, &Sizes::default(), &mounted)
    }

    fn check(text: &str, lines: &[String]) {
        for line in lines {
            assert!(text.lines().any(|one| one == line), "no {line} in\n{text}");
        }
    }

    const APP: &str =
        r#"container="app",id="/kubepods/podu/aa",image="img",name="aa",namespace="shop",pod="web""#;
    const POD: &str = r#"container="",id="/kubepods/podu",image="",name="",namespace="shop",pod="web""#;
    const ALL_PODS: &str = r#"container="",id="/kubepods",image="",name="",namespace="",pod="""#;
    const NODE: &str = r#"container="",id="/",image="",name="",namespace="",pod="""#;
    const AT: &str = "1700000000000";

    #[test]
    fn the_page_has_cadvisors_labels_and_each_family_once() {
        let text = text();
        check(
            &text,
            &[
                format!("container_cpu_usage_seconds_total{{{APP},cpu=\"total\"}} 2.5 {AT}"),
                format!(
                    "container_memory_failures_total{{{APP},failure_type=\"pgmajfault\",scope=\"hierarchy\"}} 3 {AT}"
                ),
                format!("container_pressure_cpu_waiting_seconds_total{{{APP}}} 0.25 {AT}"),
                format!("container_spec_memory_limit_bytes{{{APP}}} 4096 {AT}"),
                format!("container_last_seen{{{APP}}} 1700000000 {AT}"),
                format!("container_fs_usage_bytes{{{APP},device=\"\"}} 12288 {AT}"),
                format!(
                    "container_network_receive_bytes_total{{id=\"/kubepods/podu\",interface=\"eth0\",namespace=\"shop\",pod=\"web\"}} 10 {AT}"
                ),
                "machine_cpu_cores 2".to_owned(),
                "container_scrape_error 0".to_owned(),
            ],
        );
        assert!(!text.contains("container_cpu_cfs_periods_total"), "there is no quota");
        let mut types: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE ")).collect();
        let all = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), all);
        let mut samples: Vec<&str> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split("} ").next())
            .collect();
        let all = samples.len();
        samples.sort_unstable();
        samples.dedup();
        assert_eq!(samples.len(), all, "duplicate sample");
    }

    /// Expectations of test/e2e_node/container_metrics_test.go for each container, and the samples outside
    /// them.
    #[test]
    fn a_container_has_what_kubernetes_own_suite_asks_for() {
        let text = text();
        check(
            &text,
            &[
                format!("container_memory_failcnt{{{APP}}} 0 {AT}"),
                format!("container_memory_max_usage_bytes{{{APP}}} 1200 {AT}"),
                format!("container_ulimits_soft{{{APP},ulimit=\"max_open_files\"}} 1024 {AT}"),
                format!("container_spec_cpu_period{{{APP}}} 100000 {AT}"),
                format!(
                    "container_blkio_device_usage_total{{{APP},device=\"/dev/vda\",major=\"254\",minor=\"0\",operation=\"Write\"}} 9 {AT}"
                ),
                format!("container_fs_reads_bytes_total{{{APP},device=\"/dev/vda\"}} 8 {AT}"),
            ],
        );
        for family in ["container_fs_inodes_total", "container_fs_inodes_free"] {
            assert!(!text.lines().any(|line| line.starts_with(family) && line.contains("shop")), "{family}");
        }
        let families = ["sector_reads", "sector_writes", "reads_merged", "writes_merged"]
            .map(|name| format!("{name}_total"));
        for family in families.iter().map(String::as_str).chain([
            "read_seconds_total",
            "write_seconds_total",
            "io_current",
            "io_time_seconds_total",
            "io_time_weighted_seconds_total",
        ]) {
            assert!(
                text.contains(&format!("\ncontainer_fs_{family}{{{NODE},device=\"/dev/vda\"}} ")),
                "{family}"
            );
        }
    }

    #[test]
    fn pods_all_pods_and_the_machine_have_lines_of_their_own() {
        check(
            &text(),
            &[
                format!("container_cpu_usage_seconds_total{{{POD},cpu=\"total\"}} 3 {AT}"),
                format!("container_memory_working_set_bytes{{{ALL_PODS}}} 900 {AT}"),
                format!("container_memory_working_set_bytes{{{NODE}}} 2147483648 {AT}"),
                format!("container_start_time_seconds{{{NODE}}} 1500000000"),
                format!("container_fs_writes_bytes_total{{{NODE},device=\"/dev/vda\"}} 2048 {AT}"),
                format!("container_fs_read_seconds_total{{{NODE},device=\"/dev/vda\"}} 1.5 {AT}"),
                format!(
                    "container_network_receive_bytes_total{{id=\"/\",interface=\"eth0\",namespace=\"\",pod=\"\"}} 30 {AT}"
                ),
            ],
        );
    }

    #[test]
    fn a_container_that_used_no_device_has_zeroes_and_one_that_is_not_counted_has_none() {
        let mut reading = Reading::default();
        assert_eq!(devices(&reading), []);
        reading.counters.io_bytes = Some([0, 0]);
        assert_eq!(devices(&reading), [DeviceTraffic::default()]);
    }

    #[test]
    fn a_device_is_shown_once_and_only_where_its_own_file_system_is_seen() {
        let root = rustix::fs::stat("/").unwrap().st_dev;
        let (major, minor) = (rustix::fs::major(root), rustix::fs::minor(root));
        let line = |point: &str, kind: &str, source: &str| {
            format!("1 2 {major}:{minor} / {point} rw - {kind} {source} rw\n")
        };
        let disks = [Disk { device: (major, minor), name: "x".into(), ..Disk::default() }];
        let of = |table: &str| -> Vec<String> {
            FileSystem::all(table.as_bytes(), &disks).into_iter().map(|one| one.device).collect()
        };
        let table =
            line("/proc", "ext4", "/dev/y") + &line("/", "ext4", "/dev/y") + &line("/", "xfs", "/dev/z");
        assert_eq!(of(&table), ["/dev/y"]);
        assert_eq!(of(&line("/", "tmpfs", "/dev/y")), Vec::<String>::new());
        assert_eq!(of(&line("/", "ext4", "/dev/root")), ["/dev/x"]);
    }
}
