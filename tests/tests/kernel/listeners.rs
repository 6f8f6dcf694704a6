//! Tier 2: listeners, as the kernel programs see them on this machine's kernel.
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

use crate::place::{LOOPBACK, Place, Process, Seen, Socket, listener_edges, lists_sockets};
use aya::maps::{HashMap, Map, MapData};
use beelet_bpf::{Edge, Listener};
use beelet_ebpf_abi::{Address, AddressCount};
use beelet_tests::{require, workdir::PATIENCE};
use proptest::prelude::{Strategy as _, any};
use proptest::strategy::ValueTree as _;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

fn fits(listener: &Listener, socket: Socket, address: &str) {
    assert_eq!((listener.cookie, listener.port), (socket.cookie, socket.port), "{listener:?}");
    assert_eq!(listener.address, address.parse::<IpAddr>().unwrap(), "{listener:?}");
}

#[test]
fn open_and_close_are_seen_once_each_with_cgroup_and_times() {
    require!(bpf);
    let place = Place::new("bk-open");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let socket = process.socket("listen 127.0.0.1:8080");
    let (listener, opened_ns) = place.next(&edges).opened();
    fits(&listener, socket, "127.0.0.1");
    assert_eq!(listener.cgroup_id, place.cgroup_id());
    assert_eq!(listener.netns_cookie, place.handle.cookie());
    assert_eq!(listener.family, 2);
    assert!(place.listens(&kernel, 8080, LOOPBACK));
    assert!(!place.listens(&kernel, 8081, LOOPBACK));
    assert!(!place.listens(&kernel, 8080, "127.0.0.2".parse().unwrap()));
    assert_eq!(place.snapshot(&kernel), std::slice::from_ref(&listener));
    process.close(socket);
    let (closed, closed_ns) = place.next(&edges).closed();
    assert_eq!(closed, listener);
    assert!(closed_ns > opened_ns);
    assert!(!place.listens(&kernel, 8080, LOOPBACK));
    assert_eq!(place.snapshot(&kernel), []);
    // A second report of the close would arrive before this one.
    let again = process.socket("listen 127.0.0.1:8080");
    fits(&place.next(&edges).opened().0, again, "127.0.0.1");
    kernel.stop(false).unwrap();
}

#[test]
fn a_listener_that_is_killed_with_its_process_is_closed() {
    require!(bpf);
    let place = Place::new("bk-kill");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let socket = process.socket("listen 0.0.0.0:81");
    place.next(&edges).opened();
    assert!(place.listens(&kernel, 81, LOOPBACK));
    process.kill();
    fits(&place.next(&edges).closed().0, socket, "0.0.0.0");
    assert!(!place.listens(&kernel, 81, LOOPBACK));
}

#[test]
fn a_listener_that_is_shut_down_is_closed() {
    require!(bpf);
    let place = Place::new("bk-shut");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let socket = process.socket("listen 0.0.0.0:81");
    place.next(&edges).opened();
    process.send(&format!("shutdown {}", socket.id)).unwrap();
    fits(&place.next(&edges).closed().0, socket, "0.0.0.0");
    assert_eq!(place.snapshot(&kernel), []);
}

#[test]
fn one_of_two_reuseport_listeners_may_close() {
    require!(bpf);
    let place = Place::new("bk-reuse");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let first = process.socket("listen 127.0.0.1:90 reuseport");
    let second = process.socket("listen 127.0.0.1:90 reuseport");
    place.next(&edges).opened();
    place.next(&edges).opened();
    // The listener that was opened last closes first: the lookup must find its sibling.
    process.close(second);
    fits(&place.next(&edges).closed().0, second, "127.0.0.1");
    let found = kernel.listeners().unwrap().is_listening(place.handle.cookie(), 90, &[LOOPBACK]).unwrap();
    assert_eq!(found.map(|listener| listener.cookie), Some(first.cookie));
    process.close(first);
    place.next(&edges).closed();
    assert!(!place.listens(&kernel, 90, LOOPBACK));
}

#[test]
fn ipv6_listeners_answer_for_the_addresses_they_accept() {
    require!(bpf);
    if !lists_sockets() {
        return;
    }
    let place = Place::new("bk-v6");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let v6: IpAddr = Ipv6Addr::LOCALHOST.into();
    let check = |process: &mut Process, listen: &str, at_v4: bool, at_v6: bool| {
        let socket = process.socket(listen);
        let (listener, _) = place.next(&edges).opened();
        assert_eq!((listener.cookie, listener.family), (socket.cookie, 10), "{listen}");
        for (ip, expected) in [(LOOPBACK, at_v4), (v6, at_v6)] {
            assert_eq!(place.listens(&kernel, socket.port, ip), expected, "{listen} at {ip}");
            // sock_diag agrees with the map.
            assert_eq!(place.handle.is_listening(socket.port, &[ip]).unwrap(), expected, "{listen} at {ip}");
        }
        process.close(socket);
        place.next(&edges).closed();
        assert!(!place.listens(&kernel, socket.port, v6), "{listen}");
    };
    check(&mut process, "listen [::]:80", true, true);
    check(&mut process, "listen [::]:80 v6only", false, true);
    check(&mut process, "listen [::1]:80", false, true);
    check(&mut process, "listen [::ffff:127.0.0.1]:80", true, false);
}

#[test]
fn a_listener_reopened_at_once_is_listening() {
    require!(bpf);
    let place = Place::new("bk-again");
    let kernel = place.start();
    let mut process = place.process();
    for _ in 0..50 {
        let socket = process.socket("listen 127.0.0.1:99 reuseport");
        // The successor opens before the predecessor closes, as in a seamless reload.
        let next = process.socket("listen 127.0.0.1:99 reuseport");
        process.close(socket);
        assert!(place.listens(&kernel, 99, LOOPBACK));
        process.close(next);
        assert!(!place.listens(&kernel, 99, LOOPBACK));
    }
    assert_eq!(place.snapshot(&kernel), []);
}

#[test]
fn listening_without_bind_is_seen_with_the_port_the_kernel_chose() {
    require!(bpf);
    let place = Place::new("bk-auto");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let socket = process.socket("listen-unbound");
    assert_ne!(socket.port, 0);
    fits(&place.next(&edges).opened().0, socket, "0.0.0.0");
    assert!(place.listens(&kernel, socket.port, LOOPBACK));
    process.close(socket);
    // The kernel has already released the port; the record still has it.
    fits(&place.next(&edges).closed().0, socket, "0.0.0.0");
    assert!(!place.listens(&kernel, socket.port, LOOPBACK));
    assert_eq!(place.snapshot(&kernel), []);
}

#[test]
fn a_listen_that_fails_leaves_nothing() {
    require!(bpf);
    let place = Place::new("bk-fail");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let first = process.socket("bind 127.0.0.1:70 reuseaddr");
    let second = process.socket("bind 127.0.0.1:70 reuseaddr");
    process.socket(&format!("listen-bound {}", first.id));
    place.next(&edges).opened();
    let refused = process.send(&format!("listen-bound {}", second.id)).unwrap_err();
    assert!(refused.contains("in use"), "{refused}");
    // The tracepoint fires before the kernel knows whether the port is free.
    assert_eq!(place.next(&edges).opened().0.cookie, second.cookie);
    assert_eq!(place.next(&edges).closed().0.cookie, second.cookie);
    assert!(place.listens(&kernel, 70, LOOPBACK));
    let left: Vec<u64> = place.snapshot(&kernel).iter().map(|listener| listener.cookie).collect();
    assert_eq!(left, [first.cookie]);
}

#[test]
fn accepted_connections_change_nothing() {
    require!(bpf);
    let place = Place::new("bk-accept");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let socket = process.socket("listen 127.0.0.1:60");
    place.next(&edges).opened();
    for _ in 0..10 {
        process.send("connect 127.0.0.1:60").unwrap();
    }
    assert!(place.listens(&kernel, 60, LOOPBACK));
    process.close(socket);
    // The next edge is the listener's own close: the connections made none.
    fits(&place.next(&edges).closed().0, socket, "127.0.0.1");
}

#[test]
fn a_listener_outside_the_cgroup_is_seen_by_the_tracepoint() {
    require!(bpf);
    let place = Place::new("bk-out");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = Process::start(None, &place.netns);
    let socket = process.socket("listen 127.0.0.1:61");
    let (listener, _) = place.next(&edges).opened();
    fits(&listener, socket, "127.0.0.1");
    assert_ne!(listener.cgroup_id, place.cgroup_id());
    process.kill();
    fits(&place.next(&edges).closed().0, socket, "127.0.0.1");
}

#[test]
fn the_end_of_a_listener_older_than_the_programs_is_reported_once_and_counted_nowhere() {
    require!(bpf);
    if !lists_sockets() {
        return;
    }
    let place = Place::new("bk-old");
    let mut process = place.process();
    let old = process.socket("listen 127.0.0.1:62 reuseport");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    assert_eq!(place.snapshot(&kernel), []);
    // The agent seeds its view from sock_diag, which lists the listener.
    let seeded = place.handle.listening(None).unwrap();
    assert_eq!(seeded.iter().map(|socket| socket.cookie).collect::<Vec<_>>(), [old.cookie]);
    let young = process.socket("listen 127.0.0.1:62 reuseport");
    place.next(&edges).opened();
    process.close(old);
    let (listener, _) = place.next(&edges).closed();
    fits(&listener, old, "127.0.0.1");
    assert_eq!(listener.since_ns, 0);
    assert!(place.listens(&kernel, 62, LOOPBACK));
    process.close(young);
    fits(&place.next(&edges).closed().0, young, "127.0.0.1");
    assert!(!place.listens(&kernel, 62, LOOPBACK));
}

#[test]
fn two_hundred_random_listeners_match_the_model() {
    require!(bpf);
    let place = Place::new("bk-model");
    let kernel = place.start();
    let mut process = place.process();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let steps = proptest::collection::vec((any::<bool>(), 0_usize..200, 1_u16..40), 600);
    let steps = steps.new_tree(&mut runner).unwrap().current();
    let mut model: BTreeMap<u64, Socket> = BTreeMap::new();
    for (open, index, port) in steps {
        if (open && model.len() < 200) || model.is_empty() {
            let socket = process.socket(&format!("listen 127.0.0.1:{} reuseport", 2000 + port));
            model.insert(socket.cookie, socket);
        } else {
            let cookie = *model.keys().nth(index % model.len()).unwrap();
            process.close(model.remove(&cookie).unwrap());
        }
    }
    let seen: Vec<(u64, u16)> = place.snapshot(&kernel).iter().map(|l| (l.cookie, l.port)).collect();
    let expected: Vec<(u64, u16)> = model.values().map(|socket| (socket.cookie, socket.port)).collect();
    assert_eq!(seen, expected);
    assert!(!model.is_empty());
    for port in 2000..2040 {
        let expected = model.values().any(|socket| socket.port == port);
        assert_eq!(place.listens(&kernel, port, LOOPBACK), expected, "port {port}");
    }
    let edges = listener_edges(&kernel);
    process.kill();
    let mut open = model.len();
    // The loop waits for the last close, and accepts all edges before it.
    while open > 0 {
        if let Seen::Closed(listener, _) = place.next(&edges)
            && model.contains_key(&listener.cookie)
        {
            open -= 1;
        }
    }
    assert_eq!(place.snapshot(&kernel), []);
}

#[test]
fn a_slow_subscriber_is_notified_of_the_loss_and_the_maps_are_right() {
    require!(bpf);
    let place = Place::new("bk-lost");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    // The edges are not read.
    let mut rounds = 0;
    while kernel.channel_full() == 0 {
        let socket = process.socket("listen 127.0.0.1:50");
        process.close(socket);
        rounds += 1;
        assert!(rounds < 200_000, "the channel never filled");
    }
    let stays = process.socket("listen 127.0.0.1:51");
    while edges.recv_deadline(Instant::now() + PATIENCE).unwrap() != Edge::Lost {}
    let left: Vec<u64> = place.snapshot(&kernel).iter().map(|listener| listener.cookie).collect();
    assert_eq!(left, [stays.cookie]);
    assert!(!place.listens(&kernel, 50, LOOPBACK));
    assert!(place.listens(&kernel, 51, LOOPBACK));
}

#[test]
fn a_listener_that_finds_the_addresses_full_is_counted_once_they_are_swept() {
    require!(bpf);
    let place = Place::new("bk-full");
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let early = process.socket("listen 127.0.0.1:40");
    place.next(&edges).opened();
    // The map is filled with addresses that were released long ago, as after years of pods.
    let pinned = MapData::from_pin(place.pins().join("ADDRESSES")).unwrap();
    let mut addresses: HashMap<MapData, Address, AddressCount> =
        HashMap::try_from(Map::from_map_data(pinned).unwrap()).unwrap();
    let unused = AddressCount { listeners: 0, last_cookie: 1, changed_ns: 0 };
    let full = (0..).find(|number: &u64| {
        let address =
            Address { netns_cookie: 1 << 60 | number, address: [0; 16], port: 1, family: 2, dual_stack: 0 };
        addresses.insert(address, unused, 0).is_err()
    });
    assert!(full.unwrap() > 1000, "{full:?}");
    let late = process.socket("listen 127.0.0.1:41");
    place.next(&edges).opened();
    assert_eq!(place.next(&edges), Seen::Lost);
    assert!(kernel.drops().unwrap().unwrap().addresses_full > 0);
    assert!(place.listens(&kernel, 40, LOOPBACK));
    assert!(place.listens(&kernel, 41, LOOPBACK));
    assert!(addresses.iter().count() < 1000);
    process.close(late);
    place.next(&edges).closed();
    assert!(!place.listens(&kernel, 41, LOOPBACK));
    process.close(early);
    place.next(&edges).closed();
    assert!(!place.listens(&kernel, 40, LOOPBACK));
}

#[test]
fn a_namespace_handle_works_without_any_bpf() {
    require!(root);
    if !lists_sockets() {
        return;
    }
    let place = Place::new("bk-diag");
    let mut process = Process::start(None, &place.netns);
    let mut check = |listen: &str, ips: &[&str], expected: bool| {
        let socket = process.socket(listen);
        let ips: Vec<IpAddr> = ips.iter().map(|ip| ip.parse().unwrap()).collect();
        assert_eq!(place.handle.is_listening(socket.port, &ips).unwrap(), expected, "{listen} at {ips:?}");
        assert!(!place.handle.is_listening(socket.port + 1, &ips).unwrap());
        process.close(socket);
        assert!(!place.handle.is_listening(socket.port, &ips).unwrap());
    };
    check("listen 127.0.0.1:80", &["127.0.0.1"], true);
    check("listen 127.0.0.1:80", &["10.0.0.1"], false);
    check("listen 127.0.0.1:80", &["10.0.0.1", "127.0.0.1"], true);
    check("listen 0.0.0.0:80", &["10.0.0.1"], true);
    check("listen 0.0.0.0:80", &["fd00::1"], false);
    check("listen [::]:80", &["10.0.0.1"], true);
    check("listen [::]:80 v6only", &["10.0.0.1"], false);
    check("listen [::]:80 v6only", &["fd00::1"], true);
    let own = beelet_bpf::NetnsHandle::of_process(std::process::id()).unwrap();
    assert_ne!(own.cookie(), place.handle.cookie());
}

#[test]
fn a_namespace_that_is_none_is_named() {
    let error =
        beelet_bpf::NetnsHandle::open(std::path::Path::new("/no/such/netns")).unwrap_err().to_string();
    assert!(error.starts_with("could not open the network namespace /no/such/netns: "), "{error}");
}
