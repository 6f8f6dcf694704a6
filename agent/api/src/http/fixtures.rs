//! A node with one pod and known measurements, for tests of the pages.

use jiff::Timestamp;

use beelet_model::disk::{Places, PodDisk, Room, Taken, VolumeUse, WritableFile};
use beelet_model::table::PodName;
use beelet_stats::NodeStats;
use beelet_stats::model::{
    ContainerStats, Counters, Details, DeviceTraffic, Gauges, Machine, Net, PodStats, Rates, Reading, Stalls,
    State,
};

fn disk() -> PodDisk {
    let one = |name: &str, bytes, inodes| [(name.to_owned(), Taken { bytes, inodes })].into();
    PodDisk {
        volumes: one("cache", 100, 3),
        logs: one("app", 8192, 1),
        rootfs: one("app", 4096, 2),
        files: [(WritableFile::Hosts, Taken { bytes: 1000, inodes: 1 })].into(),
        ..PodDisk::default()
    }
}

pub(super) fn pressure() -> NodeStats {
    let reading = Reading {
        at_ns: 5_000_000_000,
        counters: Counters {
            cpu_ns: 2_500_000_000,
            page_faults: 7,
            major_faults: 3,
            cpu_stalls: Some(Stalls {
                some_us: 250_000,
                averages: [[1250, 0, 0], [0; 3]],
                ..Stalls::default()
            }),
            ..Counters::default()
        },
        gauges: Gauges {
            memory_usage: 1000,
            working_set: 900,
            rss: 500,
            memory_limit: Some(4096),
            pids: Some(2),
            cpu_period: Some(100_000),
            ..Gauges::default()
        },
        details: Some(Box::new(Details {
            limit_hits: Some(0),
            memory_peak: Some(1200),
            devices: vec![DeviceTraffic { device: (254, 0), bytes: [8, 9], operations: [1, 2] }],
            descriptors_limit: Some(1024),
            ..Details::default()
        })),
    };
    let container = ContainerStats {
        name: "app".into(),
        id: "aa".into(),
        image: "img".into(),
        state: State::Running,
        ready: Some(true),
        started_at: Timestamp::from_second(1_600_000_000).ok(),
        cgroup: Some("/kubepods/podu/aa".into()),
        cgroup_id: Some(42),
        reading: Some(reading.clone()),
        windows: [Some(Rates { cpu: 0.5, ..Rates::default() }); 3],
        ..ContainerStats::default()
    };
    let all_pods = ("/kubepods".to_owned(), reading.clone());
    let mut machine = reading.clone();
    (machine.gauges.working_set, machine.details) = (2 << 30, None);
    let mut whole = reading;
    whole.counters.cpu_ns = 3_000_000_000;
    let pod = PodStats {
        name: PodName { namespace: "shop".into(), name: "web".into() },
        uid: "u".into(),
        qos: "Guaranteed".into(),
        phase: "Running".into(),
        ready: Some(true),
        not_ready: String::new(),
        started_at: Timestamp::from_second(1_600_000_000).ok(),
        host_network: false,
        netns: None,
        cgroup: Some("/kubepods/podu".into()),
        reading: Some(whole),
        net: vec![("eth0".into(), Net { rx_bytes: 10, tx_bytes: 20, ..Net::default() })],
        net_windows: [None; 3],
        containers: vec![container],
        disk: Some(disk()),
        volumes: vec![VolumeUse {
            volume: "data".into(),
            claim: Some(("shop".into(), "books".into())),
            at: Timestamp::from_second(1_700_000_000).unwrap_or_default(),
            room: Room { capacity_bytes: 1000, available_bytes: 600, used_bytes: 400, ..Room::default() },
            abnormal: Some(false),
        }],
    };
    NodeStats {
        at: Timestamp::from_second(1_700_000_000).unwrap_or_default(),
        at_ns: 5_000_000_000,
        node: "node-1".into(),
        machine: Machine {
            cpus: 2,
            cpu_ns: 100_000_000_000,
            cpu: [Some(1.5); 3],
            memory_total: 8 << 30,
            memory_available: 6 << 30,
            working_set: 2 << 30,
            memory_usage: 3 << 30,
            booted_at: Timestamp::from_second(1_500_000_000).ok(),
            rss: Some(1 << 30),
            faults: Some([9, 4]),
            net: vec![("eth0".into(), Net { rx_bytes: 30, tx_bytes: 40, ..Net::default() })],
            all_pods: Some(all_pods),
            reading: Some(machine),
            swap: Some([10, 4]),
            ..Machine::default()
        },
        pods: vec![pod],
        places: Places { all_images: Some(Taken { bytes: 1 << 20, inodes: 40 }), ..Places::default() },
        ..NodeStats::nothing_yet()
    }
}
