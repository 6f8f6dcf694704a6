//! Tier 2: the object does not depend on aya. libbpf loads and attaches the same object, and reads the same
//! records from it.
#![cfg(all(test, feature = "libbpf"))]
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

#[path = "../../tests/kernel/place.rs"]
mod place;

use beelet_ebpf_abi::{ListenerEvent, ListenerRecord, kind};
use beelet_tests::require;
use beelet_tests::workdir::PATIENCE;
use libbpf_rs::{MapCore as _, MapFlags, ObjectBuilder, RingBufferBuilder};
use object::{Object as _, ObjectSymbol as _};
use place::Place;
use std::cell::RefCell;
use std::os::fd::AsRawFd as _;
use std::rc::Rc;

/// Returns the content of `.rodata` with this kernel's offsets in it.
fn read_only_data(bytes: &[u8], mut data: Vec<u8>) -> Vec<u8> {
    let elf = object::File::parse(bytes).unwrap();
    for (name, value) in beelet_bpf::globals().unwrap() {
        let symbol = elf.symbols().find(|symbol| symbol.name() == Ok(name)).unwrap();
        let at = symbol.address() as usize;
        data[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
    data
}

#[test]
fn libbpf_loads_the_object_without_knowing_its_globals() {
    require!(bpf);
    let object = ObjectBuilder::default().open_memory(beelet_bpf::built_in_object()).unwrap().load().unwrap();
    let programs: Vec<String> = object.progs().map(|p| p.name().to_string_lossy().into_owned()).collect();
    assert_eq!(programs.len(), 15, "{programs:?}");
    for name in ["pod_socket", "listener_state", "sched_switch", "task_exited", "traffic_in"] {
        assert!(programs.iter().any(|program| program == name), "{name} is not in {programs:?}");
    }
}

#[test]
fn libbpf_attaches_the_programs_and_reads_their_maps() {
    require!(bpf);
    let place = Place::new("bk-libbpf");
    let bytes = beelet_bpf::built_in_object();
    let mut open = ObjectBuilder::default().open_memory(bytes).unwrap();
    for mut map in open.maps_mut() {
        if map.name().to_string_lossy().ends_with(".rodata") {
            let data = map.initial_value().unwrap().to_vec();
            map.set_initial_value(&read_only_data(bytes, data)).unwrap();
        }
    }
    let object = open.load().unwrap();
    let cgroup = std::fs::File::open(place.cgroup_dir()).unwrap();
    let mut links = Vec::new();
    for program in object.progs_mut() {
        let link = match program.name().to_str() {
            Some("pod_socket" | "traffic_in" | "traffic_out") => program.attach_cgroup(cgroup.as_raw_fd()),
            _ => program.attach(),
        };
        links.push(link.unwrap());
    }
    let mut process = place.process();
    let socket = process.socket("listen 127.0.0.1:80");

    let listeners = object.maps().find(|map| map.name() == "LISTENERS").unwrap();
    let record = listeners.lookup(&socket.cookie.to_ne_bytes(), MapFlags::ANY).unwrap().unwrap();
    assert_eq!(record.len(), size_of::<ListenerRecord>());
    assert_eq!(record[..8], place.handle.cookie().to_ne_bytes());
    assert_eq!(record[8..12], [127, 0, 0, 1]);
    assert_eq!(record[24..26], 80_u16.to_ne_bytes());
    assert_eq!(record[32..40], place.cgroup_id().to_ne_bytes());

    let events = object.maps().find(|map| map.name() == "EVENTS").unwrap();
    let seen = Rc::new(RefCell::new(Vec::new()));
    let sink = Rc::clone(&seen);
    let mut ring = RingBufferBuilder::new();
    ring.add(&events, move |record: &[u8]| {
        sink.borrow_mut().push(record.to_vec());
        0
    })
    .unwrap();
    let ring = ring.build().unwrap();
    let ours = |record: &Vec<u8>| {
        record.len() == size_of::<ListenerEvent>()
            && record[..4] == kind::LISTENER_OPENED.to_ne_bytes()
            && record[24..32] == socket.cookie.to_ne_bytes()
    };
    let deadline = std::time::Instant::now() + PATIENCE;
    while !seen.borrow().iter().any(ours) {
        assert!(std::time::Instant::now() < deadline, "no event for the listener arrived");
        ring.poll(std::time::Duration::from_secs(1)).unwrap();
    }
}
