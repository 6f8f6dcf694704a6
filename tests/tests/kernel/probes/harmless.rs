//! The defaults of kernel mode fail no pod that a connection would find well.

use super::scene::{End, NEVER, Pod, Scene, tcp};
use crate::place::{Process, Socket};
use beelet_policy::probe::ProbeKind::{Liveness, Readiness, Startup};
use beelet_policy::probe::ProbeResult::{Failure, Success, Unknown};
use beelet_policy::probe::{Outcome, ProbeKind};
use beelet_probes::ProbeView;
use beelet_tests::require;
use serde_json::json;
use std::path::Path;

/// A process that listens in the host's network namespace. To a pod whose own namespace is another one and
/// whose address is 127.0.0.1, this is a listener in a network stack of its own: a connection reaches the
/// process, and the kernel has no listener in the pod's namespace.
fn out_of_sight(scene: &Scene) -> (Process, Socket) {
    let mut process = Process::start_at(Some(&scene.place.cgroup_dir()), Path::new("/proc/self/ns/net"));
    let listener = process.socket("listen 127.0.0.1:0");
    process.send(&format!("serve {}", listener.id)).unwrap();
    (process, listener)
}

fn fell_back(scene: &Scene) -> Vec<String> {
    let events = scene.events.subscribe().borrow().all();
    events.iter().filter(|event| event.reason == "ProbeFellBack").map(|event| event.message.clone()).collect()
}

fn connects(view: &ProbeView) -> bool {
    view.mode == "connect"
        && view.fallback.as_ref().is_some_and(|why| why.contains("has no listener on port"))
}

#[test]
fn a_pod_with_a_network_stack_of_its_own_is_ready_and_lives() {
    require!(bpf);
    let mut scene = Scene::new("bp-stack");
    let (_process, listener) = out_of_sight(&scene);
    let kinds = ["readiness", "liveness", "startup"];
    let probes = kinds.map(|kind| (kind, tcp(listener.port)));
    let mut pod = Pod::new("gvisor", &scene.place, &probes, "period=1s");
    pod.json["status"]["containerStatuses"][0]["started"] = false.into();
    scene.show(std::slice::from_ref(&pod));
    // Readiness starts as not ready, liveness as well, startup as unknown.
    let mut results: Vec<_> =
        (0..4).map(|_| scene.next()).map(|update| (update.kind, update.result)).collect();
    results.sort_unstable_by_key(|(kind, result)| (kind.name(), format!("{result:?}")));
    let expected = [(Liveness, Success), (Readiness, Failure), (Startup, Success), (Startup, Unknown)];
    assert_eq!(results, expected);
    pod.json["status"]["containerStatuses"][0]["started"] = true.into();
    scene.show(&[pod]);
    scene.expect("gvisor", Readiness, Success);
    for kind in [Liveness, Readiness, Startup] {
        let view = scene.until("gvisor", kind, "to connect", connects);
        assert_eq!(view.result, Success, "{view:?}");
    }
    let messages = fell_back(&scene);
    assert_eq!(messages.len(), 3, "{messages:?}");
    let expected =
        format!("Readiness probe connects from now on: the kernel has no listener on port {}", listener.port);
    assert!(messages.iter().any(|message| message.starts_with(&expected)), "{messages:?}");
}

#[test]
fn a_pod_with_a_network_stack_of_its_own_stays_ready_over_a_restart_of_the_agent() {
    require!(bpf);
    let mut scene = Scene::new("bp-stack2");
    let (_process, listener) = out_of_sight(&scene);
    let probes = [("readiness", tcp(listener.port)), ("liveness", tcp(listener.port))];
    let pod = Pod::new("gvisor", &scene.place, &probes, "period=1s").ready();
    for end in [End::Stop, End::Kill] {
        scene.show(std::slice::from_ref(&pod));
        for kind in [Readiness, Liveness] {
            scene.until("gvisor", kind, "to connect", connects);
            assert_eq!(scene.view("gvisor", kind).result, Success);
        }
        scene.restart(end, || {});
    }
    while let Ok(update) = scene.updates.try_recv() {
        assert!(!format!("{update:?}").contains("Failure"), "{update:?}");
    }
}

#[test]
fn where_the_kernel_has_had_a_listener_its_end_counts_at_once_and_no_connection_is_made() {
    require!(bpf);
    let mut scene = Scene::new("bp-seen");
    // A connection would succeed, and is not asked for.
    let (_process, listener) = out_of_sight(&scene);
    let mut own = scene.place.process();
    let mine = own.socket(&format!("listen 127.0.0.1:{}", listener.port));
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(listener.port))], NEVER)]);
    scene.expect("web", Readiness, Failure);
    scene.expect("web", Readiness, Success);
    own.close(mine);
    let update = scene.expect("web", Readiness, Failure);
    assert!(update.kernel_ns.is_some(), "{update:?}");
    assert_eq!(scene.view("web", Readiness).mode, "kernel");
    assert_eq!(fell_back(&scene), Vec::<String>::new());
}

#[test]
fn a_pod_of_a_runtime_class_connects_unless_it_asks_for_the_kernel() {
    require!(bpf);
    let mut scene = Scene::new("bp-class");
    let (_process, listener) = out_of_sight(&scene);
    let of_class = |name: &str, annotation: &str| {
        let mut pod = Pod::new(name, &scene.place, &[("readiness", tcp(listener.port))], annotation);
        pod.json["spec"]["runtimeClassName"] = "kata".into();
        pod
    };
    scene.show(&[of_class("vm", ""), of_class("plain", "mode=kernel")]);
    for _ in 0..4 {
        scene.next();
    }
    let vm = scene.view("vm", Readiness);
    assert_eq!((vm.mode, vm.result), ("connect", Success));
    assert!(vm.fallback.as_ref().is_some_and(|why| why.contains("runtime class `kata`")), "{vm:?}");
    // The kernel is asked first, and a connection decides all the same.
    assert!(connects(&scene.view("plain", Readiness)));
}

#[test]
fn an_application_with_one_worker_that_is_busy_keeps_its_liveness_and_loses_its_readiness() {
    require!(bpf);
    let mut scene = Scene::new("bp-worker");
    let probe = |port| json!({ "tcpSocket": { "port": port }, "failureThreshold": 3 });
    let kinds = [("liveness", probe(80)), ("startup", probe(80)), ("readiness", tcp(80))];
    let fast = "period=100ms timeout=200ms";
    let mut process = scene.place.process();
    let listener = process.socket("listen 127.0.0.1:80");
    let mut strict =
        Pod::new("strict", &scene.place, &[("liveness", probe(80))], &format!("{fast} stalled=fail"));
    strict.json["status"]["containerStatuses"][0]["containerID"] = "fake://c2".into();
    scene.show(&[Pod::new("web", &scene.place, &kinds, fast), strict]);
    let good = |kind: ProbeKind, pod: &str, scene: &Scene| {
        scene.until(pod, kind, "to be well", |view| view.result == Success);
    };
    good(Liveness, "web", &scene);
    good(Readiness, "web", &scene);
    good(Liveness, "strict", &scene);
    // A second client waits while the only worker is busy with the first.
    process.socket("hold 127.0.0.1:80");
    scene.until("web", Readiness, "to be not ready", |view| view.result == Failure);
    scene.until("strict", Liveness, "to fail", |view| view.result == Failure);
    let tolerated = |view: &ProbeView| view.tolerated.is_some_and(|stalls| stalls.failures == 1);
    let view = scene.until("web", Liveness, "a stall that the stricter rule would fail", tolerated);
    assert_eq!(view.result, Success);
    assert!(view.tolerated.is_some_and(|stalls| stalls.checks >= 3), "{view:?}");
    assert_eq!(scene.run("web", "main", Liveness), Outcome::Success);
    assert_eq!(scene.run("strict", "main", Liveness), Outcome::Failure);
    process.send(&format!("accept {}", listener.id)).unwrap();
    good(Readiness, "web", &scene);
    let mut restarts = Vec::new();
    while let Ok(update) = scene.updates.try_recv() {
        if let beelet_model::request::Request::Probe(update) = update
            && update.restart
        {
            restarts.push((update.uid, update.kind));
        }
    }
    assert_eq!(restarts, [("uid-strict".to_owned(), Liveness)]);
}
