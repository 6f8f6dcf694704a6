//! Tier 2: the kernel program that looks up listeners and reads their accept queues, on this machine's
//! kernel.
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

use crate::place::{Place, Process, Socket, lists_sockets};
use beelet_bpf::{AcceptQueues, CheckTarget, CheckedNetns, Checker, Found, Kernel};
use beelet_tests::require;
use beelet_tests::workdir::{PATIENCE, wait_for};
use std::net::SocketAddr;

/// A namespace with a listening process, and the program that checks it.
struct Looking {
    place: Place,
    _kernel: Kernel,
    checker: Checker,
    netns: CheckedNetns,
}

impl Looking {
    fn new(name: &str) -> Looking {
        let place = Place::new(name);
        let kernel = place.start();
        let checker = kernel.checker().unwrap();
        let netns = CheckedNetns::open(&place.netns.path(), Some(&checker)).unwrap();
        Looking { place, _kernel: kernel, checker, netns }
    }

    fn target(&self, local: &str, remote: Option<SocketAddr>) -> CheckTarget {
        self.netns.target(local.parse().unwrap(), remote).unwrap()
    }

    fn find(&self, local: &str) -> Found {
        self.checker.lookup(&[self.target(local, None)]).unwrap()[0]
    }

    fn queues(&self, local: &str) -> AcceptQueues {
        match self.find(local) {
            Found::Listener(queues) => queues,
            other => panic!("{other:?} at {local}, not a listener"),
        }
    }
}

/// Returns the other end of one of the process's connections, as its listener sees it.
fn end_of(connection: Socket) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], connection.port))
}

#[test]
fn a_lookup_finds_the_listener_that_a_connection_reaches() {
    require!(bpf);
    let looking = Looking::new("bc-find");
    let mut process = looking.place.process();
    let check = |process: &mut Process, listen: &str, at: &[(&str, bool)]| {
        let socket = process.socket(listen);
        for (address, expected) in at {
            let found = looking.find(&format!("{address}:{}", socket.port));
            match found {
                Found::Listener(queues) if *expected => {
                    assert_eq!(
                        (queues.cookie, queues.listeners),
                        (socket.cookie, 1),
                        "{listen} at {address}"
                    );
                    assert_eq!(queues.cgroup_id, looking.place.cgroup_id(), "{listen} at {address}");
                    assert_eq!(queues.max_backlog, 16, "{listen} at {address}");
                }
                Found::Nothing if !*expected => {}
                other => panic!("{listen} at {address}: {other:?}"),
            }
        }
        process.close(socket);
        assert_eq!(looking.find(&format!("{}:{}", at[0].0, socket.port)), Found::Nothing, "{listen}");
    };
    check(&mut process, "listen 0.0.0.0:80", &[("127.0.0.1", true), ("10.9.8.7", true), ("[::1]", false)]);
    check(
        &mut process,
        "listen 127.0.0.1:80",
        &[("127.0.0.1", true), ("127.0.0.2", false), ("[::1]", false)],
    );
    check(&mut process, "listen [::]:80", &[("127.0.0.1", true), ("[::1]", true), ("[fd00::7]", true)]);
    check(&mut process, "listen [::]:80 v6only", &[("[::1]", true), ("127.0.0.1", false)]);
    check(&mut process, "listen [::1]:80", &[("[::1]", true), ("[fd00::7]", false), ("127.0.0.1", false)]);
    check(&mut process, "listen [::ffff:127.0.0.1]:80", &[("127.0.0.1", true), ("[::1]", false)]);
    assert_eq!(looking.find("127.0.0.1:81"), Found::Nothing);
}

#[test]
fn the_accept_queue_is_seen_filling_and_draining() {
    require!(bpf);
    let looking = Looking::new("bc-queue");
    let mut process = looking.place.process();
    let listener = process.socket("listen 127.0.0.1:80 backlog=1");
    let at = "127.0.0.1:80";
    let empty = looking.queues(at);
    assert_eq!((empty.waiting, empty.full, empty.heads, empty.backlog), (0, 0, 0, 0));
    process.socket("hold 127.0.0.1:80");
    let first = looking.queues(at);
    assert_eq!((first.waiting, first.full, first.backlog, first.max_backlog), (1, 0, 1, 1));
    assert_ne!(first.heads, 0);
    // The second connection waits behind the first one: the queue is full, its head unchanged.
    process.socket("hold 127.0.0.1:80");
    let full = looking.queues(at);
    assert_eq!((full.waiting, full.full, full.backlog, full.heads), (1, 1, 2, first.heads));
    process.send(&format!("accept {}", listener.id)).unwrap();
    let next = looking.queues(at);
    assert_eq!((next.waiting, next.full, next.backlog), (1, 0, 1));
    assert_ne!((next.heads, next.heads), (0, first.heads), "the head is unchanged after an accept");
    process.send(&format!("accept {}", listener.id)).unwrap();
    assert_eq!(looking.queues(at).heads, 0);
}

#[test]
fn every_accept_changes_the_head_although_memory_is_used_again() {
    require!(bpf);
    let looking = Looking::new("bc-heads");
    let mut process = looking.place.process();
    let listener = process.socket("listen 127.0.0.1:80");
    let mut seen = std::collections::BTreeSet::new();
    for round in 0..200 {
        let connection = process.socket("hold 127.0.0.1:80");
        assert!(
            seen.insert(looking.queues("127.0.0.1:80").heads),
            "round {round} has the head of an earlier round"
        );
        process.send(&format!("accept {}", listener.id)).unwrap();
        process.close(connection);
    }
}

#[test]
fn a_group_is_looked_at_as_a_whole() {
    require!(bpf);
    let looking = Looking::new("bc-group");
    let mut process = looking.place.process();
    let first = process.socket("listen 127.0.0.1:90 reuseport backlog=0");
    let second = process.socket("listen 127.0.0.1:90 reuseport backlog=0");
    let at = "127.0.0.1:90";
    assert_eq!(looking.queues(at).listeners, 2);
    // The kernel chooses a member for each connection by the connection's addresses alone, and each member's
    // queue has room for one. A connection that meets a full queue is not made, but after enough attempts
    // both members have one.
    process.socket("hold 127.0.0.1:90");
    let queues = looking.queues(at);
    assert_eq!((queues.listeners, queues.waiting, queues.full, queues.backlog), (2, 1, 1, 1), "{queues:?}");
    for _ in 0..64 {
        if looking.queues(at).waiting == 2 {
            break;
        }
        process.send("try 127.0.0.1:90").unwrap();
    }
    let queues = looking.queues(at);
    assert_eq!((queues.waiting, queues.full, queues.backlog), (2, 2, 2), "{queues:?}");
    process.close(second);
    assert_eq!(looking.queues(at).listeners, 1);
    assert_eq!(looking.queues(at).cookie, first.cookie);
    process.close(first);
    assert_eq!(looking.find(at), Found::Nothing);
}

#[test]
fn a_connection_is_seen_waiting_and_accepted_and_closed() {
    require!(bpf);
    let looking = Looking::new("bc-conn");
    let mut process = looking.place.process();
    let listener = process.socket("listen 127.0.0.1:80");
    let connection = process.socket("hold 127.0.0.1:80");
    let target = looking.target("127.0.0.1:80", Some(end_of(connection)));
    let look = || looking.checker.lookup(&[target]).unwrap()[0];
    // connect(2) returns after the handshake's second packet; the third may still be under way.
    wait_for("the handshake to be over", PATIENCE, || match look() {
        Found::HalfOpen => Err("the connection is half open".to_owned()),
        found => {
            assert_eq!(found, Found::Waiting);
            Ok(())
        }
    })
    .unwrap();
    process.send(&format!("serve {}", listener.id)).unwrap();
    // The accepting thread closes at once, so the connection may already be closing.
    wait_for("the connection to be accepted", PATIENCE, || match look() {
        Found::Waiting => Err("the connection waits".to_owned()),
        Found::Accepted | Found::Closing | Found::Nothing => Ok(()),
        other => panic!("{other:?}"),
    })
    .unwrap();
    let nobody = looking.target("127.0.0.1:80", Some("127.0.0.1:1".parse().unwrap()));
    let fallen_back = looking.checker.lookup(&[nobody]).unwrap()[0];
    assert!(
        matches!(fallen_back, Found::Listener(_)),
        "expected the listener for an unknown connection: {fallen_back:?}"
    );
}

#[test]
fn a_listener_older_than_the_programs_is_found() {
    require!(bpf);
    let place = Place::new("bc-old");
    let mut process = place.process();
    let old = process.socket("listen 127.0.0.1:62");
    let kernel = place.start();
    let checker = kernel.checker().unwrap();
    let netns = CheckedNetns::open(&place.netns.path(), Some(&checker)).unwrap();
    let found = checker.lookup(&[netns.target("127.0.0.1:62".parse().unwrap(), None).unwrap()]).unwrap();
    assert!(matches!(found[0], Found::Listener(queues) if queues.cookie == old.cookie), "{found:?}");
}

#[test]
fn a_listener_outlives_its_process_where_another_one_has_it() {
    require!(bpf);
    let looking = Looking::new("bc-move");
    let at = "127.0.0.1:80";
    let mut maker = looking.place.process();
    let socket = maker.socket("listen 127.0.0.1:80");
    // The descriptor is passed on to another process.
    let mut heir = looking.place.process();
    let fd = maker.send(&format!("fd {}", socket.id)).unwrap();
    let taken = heir.socket(&format!("take {} {fd}", maker.pid()));
    assert_eq!(taken.cookie, socket.cookie);
    maker.kill();
    assert_eq!(looking.queues(at).cookie, socket.cookie);
    // The descriptor is inherited over exec.
    assert_eq!(heir.socket("exec 0").cookie, socket.cookie);
    assert_eq!(looking.queues(at).cookie, socket.cookie);
    heir.kill();
    assert_eq!(looking.find(at), Found::Nothing);
}

#[test]
fn many_are_looked_up_in_order() {
    require!(bpf);
    let looking = Looking::new("bc-many");
    let mut process = looking.place.process();
    for port in (2000..2100).step_by(3) {
        process.socket(&format!("listen 127.0.0.1:{port}"));
    }
    let targets: Vec<CheckTarget> =
        (2000..2100).map(|port| looking.target(&format!("127.0.0.1:{port}"), None)).collect();
    let found = looking.checker.lookup(&targets).unwrap();
    assert_eq!(found.len(), 100);
    for (index, found) in found.iter().enumerate() {
        assert_eq!(matches!(found, Found::Listener(_)), index % 3 == 0, "port {}: {found:?}", 2000 + index);
    }
    assert_eq!(looking.checker.lookup(&[]).unwrap(), []);
}

#[test]
fn a_namespace_has_one_number_and_our_own_needs_none() {
    require!(bpf);
    let looking = Looking::new("bc-ns");
    let again = CheckedNetns::open(&looking.place.netns.path(), Some(&looking.checker)).unwrap();
    let target = |netns: &CheckedNetns| netns.target("127.0.0.1:80".parse().unwrap(), None);
    assert_eq!(target(&again), target(&looking.netns));
    let own = std::path::Path::new("/proc/self/ns/net");
    let own = CheckedNetns::open(own, Some(&looking.checker)).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let target = own.target(listener.local_addr().unwrap(), None).unwrap();
    assert!(matches!(looking.checker.lookup(&[target]).unwrap()[0], Found::Listener(_)));
    // The same port in the other namespace has no listener.
    let there = looking.netns.target(listener.local_addr().unwrap(), None).unwrap();
    assert_eq!(looking.checker.lookup(&[there]).unwrap(), [Found::Nothing]);
    assert!(
        CheckedNetns::open(&looking.place.netns.path(), None)
            .unwrap()
            .target(listener.local_addr().unwrap(), None)
            .is_none()
    );
}

#[test]
fn sock_diag_agrees_on_queues_but_has_no_heads() {
    require!(bpf);
    if !lists_sockets() {
        return;
    }
    let looking = Looking::new("bc-diag");
    let mut process = looking.place.process();
    process.socket("listen 127.0.0.1:80 backlog=0");
    process.socket("hold 127.0.0.1:80");
    let by_program = looking.queues("127.0.0.1:80");
    let by_diag = looking.netns.handle().accept_queues(80, "127.0.0.1".parse().unwrap()).unwrap().unwrap();
    assert_eq!((by_diag.listeners, by_diag.waiting, by_diag.full), (1, 1, 1));
    assert_eq!(by_diag.heads, 0);
    assert_eq!(AcceptQueues { heads: 0, cgroup_id: 0, ..by_program }, by_diag);
    assert_eq!(looking.netns.handle().accept_queues(81, "127.0.0.1".parse().unwrap()).unwrap(), None);
}
