//! Tier 2: the probes' task on this machine's kernel. The tests send pods to the task as the manager would;
//! listeners are real processes in a network namespace and a cgroup of the test's own.
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

mod harmless;
mod scene;
mod schedule;

use crate::place::{LOOPBACK, Place, Process, Socket, lists_sockets};
use beelet_bpf::{CheckedNetns, Found, Kernel, KernelOptions, NetnsHandle};
use beelet_model::request::Request;
use beelet_policy::probe::{Outcome, ProbeKind, ProbeResult};
use beelet_probes::ProbeView;
use beelet_tests::guards::ip;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{require, requires};
use beelet_units::bpf_settings::BpfMode;
use proptest::prelude::{Strategy as _, any};
use proptest::strategy::ValueTree as _;
use scene::{End, NEVER, Pod, Scene, status, tcp};
use serde_json::json;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Port whose update shows that all earlier edges have been handled.
const MARKER: u16 = 9999;

use ProbeKind::{Liveness, Readiness, Startup};
use ProbeResult::{Failure, Success, Unknown};

#[test]
fn readiness_follows_the_listener_without_a_look() {
    require!(bpf);
    let mut scene = Scene::new("bp-edge");
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(80))], NEVER)]);
    scene.expect("web", Readiness, Failure);
    let mut process = scene.place.process();
    for address in ["0.0.0.0:80", "127.0.0.1:80", "[::]:80", "[::ffff:127.0.0.1]:80"] {
        let socket = process.socket(&format!("listen {address}"));
        let update = scene.expect("web", Readiness, Success);
        assert!(update.kernel_ns.is_some(), "{address}: {update:?}");
        process.close(socket);
        assert!(scene.expect("web", Readiness, Failure).kernel_ns.is_some(), "{address}");
    }
    // A listener at another address, or for IPv6 only, is not reached: no update arrives.
    for address in ["127.0.0.2:80", "[::1]:80", "[::]:80 v6only", "0.0.0.0:81"] {
        let socket = process.socket(&format!("listen {address}"));
        process.close(socket);
    }
    process.socket("listen 0.0.0.0:80");
    scene.expect("web", Readiness, Success);
    process.kill();
    scene.expect("web", Readiness, Failure);
}

#[test]
fn a_listener_older_than_the_agent_is_ready_at_the_first_look() {
    require!(bpf);
    let place = Place::new("bp-old");
    let mut process = place.process();
    process.socket("listen 127.0.0.1:80");
    let kernel = place.start();
    let mut scene = Scene::with(place, kernel);
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(80))], NEVER)]);
    scene.expect("web", Readiness, Failure);
    scene.expect("web", Readiness, Success);
    process.kill();
    scene.expect("web", Readiness, Failure);
}

#[test]
fn one_of_a_reuseport_pair_may_close() {
    require!(bpf);
    let mut scene = Scene::new("bp-pair");
    let marker = Pod::new("marker", &scene.place, &[("readiness", tcp(MARKER))], NEVER);
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(80))], NEVER), marker]);
    scene.next();
    scene.next();
    let mut process = scene.place.process();
    let first = process.socket("listen 127.0.0.1:80 reuseport");
    scene.expect("web", Readiness, Success);
    let second = process.socket("listen 127.0.0.1:80 reuseport");
    process.close(first);
    process.socket(&format!("listen 127.0.0.1:{MARKER}"));
    // No update arrives between.
    scene.expect("marker", Readiness, Success);
    process.close(second);
    scene.expect("web", Readiness, Failure);
}

#[test]
fn a_listener_reopened_at_once_is_ready_in_the_end_and_never_failed_by_threshold() {
    require!(bpf);
    let mut scene = Scene::new("bp-reopen");
    let patient = json!({ "tcpSocket": { "port": 80 }, "failureThreshold": 3 });
    let threshold = format!("{NEVER} edgePolicy=threshold");
    scene.show(&[
        Pod::new("now", &scene.place, &[("readiness", tcp(80))], NEVER),
        Pod::new("patient", &scene.place, &[("readiness", patient)], &threshold),
        Pod::new("marker", &scene.place, &[("readiness", tcp(MARKER))], NEVER),
    ]);
    for _ in 0..3 {
        assert_eq!(scene.next().result, Failure);
    }
    let mut process = scene.place.process();
    let mut socket = process.socket("listen 127.0.0.1:80");
    for _ in 0..2 {
        assert_eq!(scene.next().result, Success);
    }
    for _ in 0..10 {
        // Two commands on a pipe take far less than 5 ms.
        process.close(socket);
        socket = process.socket("listen 127.0.0.1:80");
        let marker = process.socket(&format!("listen 127.0.0.1:{MARKER}"));
        let (mut last, mut marked) = (Success, false);
        // The marker comes later; but a listener that is not in the socket table yet is checked again in a
        // moment.
        while !marked || last != Success {
            let update = scene.next();
            match update.uid.as_str() {
                "uid-marker" => marked = true,
                "uid-now" => {
                    assert_ne!(update.result, last, "a state was reported twice");
                    last = update.result;
                }
                _ => panic!("failed below the threshold: {update:?}"),
            }
        }
        process.close(marker);
        scene.expect("marker", Readiness, Failure);
    }
    assert_eq!(scene.view("now", Readiness).result, Success);
}

#[test]
fn unaccepted_connections_fail_a_probe_until_they_are_accepted() {
    require!(bpf);
    let mut scene = Scene::new("bp-hung");
    let fast = "period=100ms timeout=200ms";
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(80))], fast)]);
    scene.expect("web", Readiness, Failure);
    let mut process = scene.place.process();
    let listener = process.socket("listen 127.0.0.1:80");
    scene.expect("web", Readiness, Success);
    process.socket("hold 127.0.0.1:80");
    let update = scene.expect("web", Readiness, Failure);
    assert_eq!(update.kernel_ns, None, "the failure came from an edge");
    let messages: Vec<String> =
        scene.events.subscribe().borrow().all().iter().map(|event| event.message.clone()).collect();
    let expected = "Readiness probe failed: connections wait on port 80 and the application accepts none";
    assert!(messages.iter().any(|message| message == expected), "{messages:?}");
    let view = scene.view("web", Readiness);
    assert!(view.last.unwrap().detail.contains("accepts none"), "{:?}", scene.view("web", Readiness));
    process.send(&format!("accept {}", listener.id)).unwrap();
    scene.expect("web", Readiness, Success);
}

#[test]
fn a_full_queue_fails_a_probe_at_once() {
    require!(bpf);
    let mut scene = Scene::new("bp-full");
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(80))], "period=100ms timeout=1h")]);
    scene.expect("web", Readiness, Failure);
    let mut process = scene.place.process();
    let listener = process.socket("listen 127.0.0.1:80 backlog=0");
    scene.expect("web", Readiness, Success);
    process.socket("hold 127.0.0.1:80");
    // The timeout is far away.
    scene.expect("web", Readiness, Failure);
    process.send(&format!("accept {}", listener.id)).unwrap();
    scene.expect("web", Readiness, Success);
}

#[test]
fn a_canary_distinguishes_a_stalled_idle_application_from_a_healthy_one() {
    require!(bpf);
    let mut scene = Scene::new("bp-canary");
    // The agent must be able to connect: the listeners are in the host's own network.
    let host = Path::new("/proc/self/ns/net");
    let mut hung = Process::start_at(Some(&scene.place.cgroup_dir()), host);
    let mut working = Process::start_at(Some(&scene.place.cgroup_dir()), host);
    let hanging = hung.socket("listen 127.0.0.1:0");
    let serving = working.socket("listen 127.0.0.1:0");
    working.send(&format!("serve {}", serving.id)).unwrap();
    let annotation = "period=100ms timeout=300ms canary=1s";
    let pod = |name: &str, socket: Socket| {
        let pod = Pod::new(name, &scene.place, &[("liveness", tcp(socket.port))], annotation);
        pod.on_host()
    };
    scene.show(&[pod("hangs", hanging), pod("works", serving)]);
    assert_eq!(scene.next().result, Success);
    assert_eq!(scene.next().result, Success);
    let update = scene.expect("hangs", Liveness, Failure);
    assert!(update.restart);
    let accepted =
        |view: &ProbeView| view.last.as_ref().is_some_and(|check| check.detail.contains("accepted a canary"));
    scene.until("works", Liveness, "an accepted canary", accepted);
    // Without canaries, an idle application gives no sign.
    assert_eq!(scene.view("works", Liveness).result, Success);
}

#[test]
fn a_listener_moves_to_another_process_without_an_edge() {
    require!(bpf);
    let mut scene = Scene::new("bp-move");
    let marker = Pod::new("marker", &scene.place, &[("readiness", tcp(MARKER))], NEVER);
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(80))], NEVER), marker]);
    scene.next();
    scene.next();
    let (mut maker, mut heir) = (scene.place.process(), scene.place.process());
    let socket = maker.socket("listen 127.0.0.1:80");
    scene.expect("web", Readiness, Success);
    let fd = maker.send(&format!("fd {}", socket.id)).unwrap();
    heir.socket(&format!("take {} {fd}", maker.pid()));
    maker.kill();
    let mut other = scene.place.process();
    other.socket(&format!("listen 127.0.0.1:{MARKER}"));
    scene.expect("marker", Readiness, Success);
    heir.kill();
    scene.expect("web", Readiness, Failure);
}

#[test]
fn a_port_taken_over_by_another_container_is_ready_like_for_a_connection() {
    require!(bpf);
    let mut scene = Scene::new("bp-reuse");
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(80))], NEVER)]);
    scene.expect("web", Readiness, Failure);
    let mut one = scene.place.process();
    one.socket("listen 127.0.0.1:80");
    scene.expect("web", Readiness, Success);
    one.kill();
    scene.expect("web", Readiness, Failure);
    // The other process is in another cgroup and the same namespace.
    let mut other = Process::start(None, &scene.place.netns);
    other.socket("listen 127.0.0.1:80");
    scene.expect("web", Readiness, Success);
}

#[test]
fn sidecars_and_host_network_pods_are_probed_too() {
    require!(bpf);
    let mut scene = Scene::new("bp-side");
    let mut side = Pod::new("side", &scene.place, &[], NEVER);
    let patient = json!({ "tcpSocket": { "port": 80 }, "failureThreshold": 1000 });
    side.json["spec"]["initContainers"] =
        json!([{ "name": "proxy", "image": "x", "restartPolicy": "Always", "startupProbe": patient }]);
    side.json["status"]["initContainerStatuses"] = json!([status("proxy", "c2", false)]);
    side.json["status"]["initContainerStatuses"][0]["started"] = false.into();
    let mut outside = Process::start_at(Some(&scene.place.cgroup_dir()), Path::new("/proc/self/ns/net"));
    let bound = outside.socket("bind 127.0.0.1:0");
    let host = Pod::new("host", &scene.place, &[("readiness", tcp(bound.port))], NEVER).on_host();
    scene.show(&[side, host]);
    scene.expect("host", Readiness, Failure);
    scene.expect("side", Startup, Unknown);
    let mut process = scene.place.process();
    process.socket("listen 127.0.0.1:80");
    scene.expect("side", Startup, Success);
    outside.socket(&format!("listen-bound {}", bound.id));
    scene.expect("host", Readiness, Success);
    assert_eq!(scene.view("host", Readiness).mode, "kernel");
}

#[test]
fn an_annotation_selects_the_probes_mode_and_a_fallback_is_named() {
    require!(bpf);
    let mut scene = Scene::new("bp-mode");
    let mut odd = Pod::new("odd", &scene.place, &[("readiness", tcp(80))], "mode=fast");
    odd.json["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]["host"] = "127.0.0.1".into();
    scene.show(&[
        Pod::new("asks", &scene.place, &[("readiness", tcp(80))], "mode=connect"),
        Pod::new("knows", &scene.place, &[("readiness", tcp(80))], ""),
        odd,
    ]);
    scene.next();
    let mode = |scene: &Scene, pod: &str| scene.view(pod, Readiness).mode;
    assert_eq!((mode(&scene, "asks"), mode(&scene, "knows")), ("connect", "kernel"));
    let odd = scene.view("odd", Readiness);
    assert_eq!((odd.mode, odd.fallback), ("connect", None), "a probe with a `host` always connects");
    assert!(odd.problems[0].contains("\"mode=fast\" is neither kernel nor connect"), "{:?}", odd.problems);

    let options = KernelOptions { mode: BpfMode::Off, ..scene.place.options() };
    let off = Scene::with(Place::new("bp-off"), Kernel::start(&options));
    let mut process = Process::start_at(None, Path::new("/proc/self/ns/net"));
    let listener = process.socket("listen 127.0.0.1:0");
    off.show(&[Pod::new("web", &off.place, &[("readiness", tcp(listener.port))], "period=100ms").on_host()]);
    let view = off.until("web", Readiness, "to be ready by connecting", |view| view.result == Success);
    assert_eq!(view.mode, "connect");
    assert!(view.fallback.unwrap().contains("the kernel half is off"));
}

#[test]
fn without_lookups_listeners_are_confirmed_by_the_socket_list_and_no_canary_is_sent() {
    require!(bpf);
    if !lists_sockets() {
        return;
    }
    let mut scene = Scene::without_lookups("bp-diag");
    let host = Path::new("/proc/self/ns/net");
    let mut idle = Process::start_at(Some(&scene.place.cgroup_dir()), host);
    let listener = idle.socket("listen 127.0.0.1:0");
    let own = NetnsHandle::open(host).unwrap();
    let queue = |port| own.accept_queues(port, LOOPBACK).unwrap().unwrap();
    let often = "period=100ms timeout=300ms canary=1s";
    scene.show(&[
        Pod::new("idle", &scene.place, &[("liveness", tcp(listener.port))], often).on_host(),
        Pod::new("web", &scene.place, &[("readiness", tcp(80))], "period=100ms timeout=300ms"),
    ]);
    let mut first = BTreeMap::new();
    for _ in 0..2 {
        let update = scene.next();
        first.insert(update.uid, update.result);
    }
    assert_eq!(first, BTreeMap::from([("uid-idle".to_owned(), Success), ("uid-web".to_owned(), Failure)]));
    // Enough probes run for canaries to be due among them.
    let checks = RefCell::new(BTreeSet::new());
    let view = scene.until("idle", Liveness, "twenty probes", |view| {
        checks.borrow_mut().extend(view.last.as_ref().map(|check| check.at));
        checks.borrow().len() >= 20
    });
    assert_eq!((view.mode, view.result), ("sock_diag", Success));
    assert_eq!(queue(listener.port).backlog, 0, "the probe has connected");
    assert_eq!(scene.run("idle", "main", Liveness), Outcome::Success);
    assert_eq!(queue(listener.port).backlog, 0, "the probe has connected");
    // Edges arrive as before.
    let mut process = scene.place.process();
    let listener = process.socket("listen 127.0.0.1:80 backlog=0");
    scene.expect("web", Readiness, Success);
    // A single waiting connection is not detected here, but a full queue is.
    process.socket("hold 127.0.0.1:80");
    scene.expect("web", Readiness, Failure);
    process.send(&format!("accept {}", listener.id)).unwrap();
    scene.expect("web", Readiness, Success);
    process.kill();
    scene.expect("web", Readiness, Failure);
}

/// Adds a device `dev0` with the address 10.99.0.7 to the network. Returns false, and prints a skip, on
/// kernels that can't.
fn has_device(place: &Place) -> bool {
    let netns = place.netns.path();
    let netns = netns.file_name().unwrap().to_str().unwrap();
    let link: [&[&str]; 3] = [
        &["link", "add", "dev0", "type", "veth", "peer", "name", "dev1"],
        &["link", "set", "dev0", "up"],
        &["address", "add", "10.99.0.7/24", "dev", "dev0"],
    ];
    for arguments in link {
        if let Err(error) = ip(&[&["-n", netns][..], arguments].concat()) {
            let remedy = "modprobe veth, or use a kernel built with CONFIG_VETH".to_owned();
            requires::skip(&requires::Missing { what: format!("{error:#}"), remedy });
            return false;
        }
    }
    true
}

#[test]
fn a_listener_bound_to_a_device_before_the_agent_began_fails_no_probe() {
    require!(bpf);
    let place = Place::new("bp-old-device");
    if !lists_sockets() || !has_device(&place) {
        return;
    }
    let mut process = place.process();
    process.socket("listen 10.99.0.7:80 device=dev0");
    let kernel = place.start();
    let mut scene = Scene::with(place, kernel);
    let mut pod = Pod::new("web", &scene.place, &[("readiness", tcp(80))], NEVER);
    pod.json["status"]["podIPs"][0]["ip"] = "10.99.0.7".into();
    scene.show(&[pod]);
    scene.expect("web", Readiness, Failure);
    scene.expect("web", Readiness, Success);
    assert_eq!(scene.run("web", "main", Readiness), Outcome::Success);
    process.kill();
    scene.expect("web", Readiness, Failure);
}

#[test]
fn a_listener_bound_to_a_device_that_lookups_pass_over_is_found_in_the_socket_list() {
    require!(bpf);
    if !lists_sockets() {
        return;
    }
    let mut scene = Scene::new("bp-device");
    if !has_device(&scene.place) {
        return;
    }
    // The pod's address is one that the host has too: a connection to it is refused, wherever else packets
    // go.
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(80))], NEVER)]);
    scene.expect("web", Readiness, Failure);
    let mut process = scene.place.process();
    process.socket("listen 127.0.0.1:80 device=dev0");
    // The lookup itself does not find the listener.
    let kernel = scene.kernel.as_ref().unwrap();
    let checker = kernel.checker().unwrap();
    let checked = CheckedNetns::open(&scene.place.netns.path(), Some(&checker)).unwrap();
    let target = checked.target("127.0.0.1:80".parse().unwrap(), None).unwrap();
    assert_eq!(checker.lookup(&[target]).unwrap(), [Found::Nothing]);
    scene.expect("web", Readiness, Success);
    assert_eq!(scene.run("web", "main", Readiness), Outcome::Success);
    process.kill();
    scene.expect("web", Readiness, Failure);
}

#[test]
fn two_hundred_random_listeners_match_the_model() {
    require!(bpf);
    let mut scene = Scene::new("bp-model");
    let pods: Vec<Pod> = (0..200_u16)
        .map(|n| Pod::new(&format!("p{n}"), &scene.place, &[("readiness", tcp(2000 + n))], NEVER))
        .collect();
    scene.show(&pods);
    for _ in 0..200 {
        assert_eq!(scene.next().result, Failure);
    }
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let steps = proptest::collection::vec((any::<bool>(), 0_u16..200), 1000);
    let steps = steps.new_tree(&mut runner).unwrap().current();
    let mut process = scene.place.process();
    let mut model: BTreeMap<u16, Vec<Socket>> = BTreeMap::new();
    for (open, n) in steps {
        let sockets = model.entry(n).or_default();
        if open || sockets.is_empty() {
            sockets.push(process.socket(&format!("listen 127.0.0.1:{} reuseport", 2000 + n)));
        } else {
            process.close(sockets.pop().unwrap());
        }
    }
    let expected =
        |n: u16| if model.get(&n).is_some_and(|sockets| !sockets.is_empty()) { Success } else { Failure };
    let number = |view: &ProbeView| view.pod[1..].parse().unwrap();
    let mut results: BTreeMap<String, ProbeResult> = BTreeMap::new();
    // An earlier update may agree with the model by chance: the table must agree too.
    wait_for("every probe to agree with the model", PATIENCE, || {
        while let Ok(Request::Probe(update)) = scene.updates.try_recv() {
            results.insert(update.uid, update.result);
        }
        if let Some(view) = scene.list().iter().find(|view| view.result != expected(number(view))) {
            return Err(format!("the table has {view:?}"));
        }
        let wrong = (0..200).find(|n| *results.get(&format!("uid-p{n}")).unwrap_or(&Failure) != expected(*n));
        wrong.map_or(Ok(()), |n| Err(format!("p{n} is not {:?}", expected(n))))
    })
    .unwrap();
}

#[test]
fn over_a_hundred_restarts_of_the_agent_no_pod_flips_and_none_is_falsely_ready() {
    require!(bpf);
    let mut scene = Scene::new("bp-restart");
    let mut process = scene.place.process();
    process.socket("listen 127.0.0.1:80");
    let goes = process.socket("listen 127.0.0.1:81");
    let stays =
        Pod::new("stays", &scene.place, &[("readiness", tcp(80)), ("liveness", tcp(80))], NEVER).ready();
    let closes = Pod::new("closes", &scene.place, &[("readiness", tcp(81))], NEVER).ready();
    let comes = Pod::new("comes", &scene.place, &[("readiness", tcp(82))], NEVER);
    scene.show(&[stays.clone(), closes.clone(), comes.clone()]);
    for round in 0..100 {
        scene.restart(if round % 2 == 0 { End::Stop } else { End::Kill }, || {});
        for pod in ["stays", "closes", "comes"] {
            scene.until(pod, Readiness, "a first result", |view| view.last.is_some());
        }
        while let Ok(Request::Probe(update)) = scene.updates.try_recv() {
            // Two pods are ready and stay so; the third one has no listener.
            let fine = (update.result == Success) != (update.uid == "uid-comes");
            assert!(fine, "round {round}: {update:?}");
        }
        for (pod, expected) in [("stays", Success), ("closes", Success), ("comes", Failure)] {
            assert_eq!(scene.view(pod, Readiness).result, expected, "round {round}: {pod}");
        }
    }
    // Changes during the agent's absence are known at once.
    scene.restart(End::Kill, || {
        process.close(goes);
        process.socket("listen 127.0.0.1:82");
    });
    let mut results = BTreeMap::new();
    while results.get("uid-closes") != Some(&Failure) || results.get("uid-comes") != Some(&Success) {
        let update = scene.next();
        if update.kind == Readiness {
            assert_ne!((update.uid.as_str(), update.result), ("uid-stays", Failure));
            results.insert(update.uid, update.result);
        }
    }
}
