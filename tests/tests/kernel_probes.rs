//! Tier 2: the probes' task on this machine's kernel. Pods are told to it as the manager would tell them; listeners are
//! real processes in a network namespace and a cgroup of the test's own.
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

mod kernel;

use beelet::events::Recorder;
use beelet::kernel::{Interest, Kernel, KernelOptions, Mode};
use beelet::pods::manager::{ProbeUpdate, Request};
use beelet::pods::table::{PodEntry, PodName, PodTable};
use beelet::probes::{self, Handle, ProbeView, Probes, Settings, Wanted};
use beelet_policy::probe::{EdgePolicy, Outcome, ProbeKind, ProbeResult};
use beelet_tests::require;
use beelet_tests::workdir::{PATIENCE, wait_for};
use kernel::{Place, Process, Socket};
use proptest::prelude::{Strategy as _, any};
use proptest::strategy::ValueTree as _;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// No look in this time: whatever happens sooner, an edge did.
const NEVER: &str = "period=1h";
/// The port that only says: all before has been seen.
const MARKER: u16 = 9999;

/// The probes of some pods, and what they say.
struct Scene {
    place: Place,
    kernel: Option<Kernel>,
    table: watch::Sender<Arc<PodTable>>,
    updates: mpsc::Receiver<Request>,
    handle: Handle,
    events: Recorder,
    shutdown: CancellationToken,
    runtime: tokio::runtime::Runtime,
}

/// A pod in the making.
#[derive(Clone)]
struct Pod {
    json: Value,
    netns: Option<PathBuf>,
}

impl Pod {
    /// One pod whose container `main` runs and has these probes.
    fn new(name: &str, place: &Place, probes: &[(&str, Value)], annotation: &str) -> Pod {
        let mut main = json!({ "name": "main", "image": "x" });
        for (kind, probe) in probes {
            main[format!("{kind}Probe")] = probe.clone();
        }
        let json = json!({
            "metadata": {
                "name": name, "namespace": "default", "uid": format!("uid-{name}"),
                "annotations": { "beelet.dev/probes": annotation },
            },
            "spec": { "containers": [main] },
            "status": {
                "podIPs": [{ "ip": "127.0.0.1" }],
                "containerStatuses": [status("main", "c1", false)],
            },
        });
        Pod { json, netns: Some(place.netns.path()) }
    }

    /// In the host's own network namespace.
    fn on_host(mut self) -> Pod {
        self.json["spec"]["hostNetwork"] = true.into();
        self.netns = None;
        self
    }

    /// As a status from before a restart of the agent has it.
    fn ready(mut self) -> Pod {
        self.json["status"]["containerStatuses"][0]["ready"] = true.into();
        self
    }

    fn entry(&self) -> Arc<PodEntry> {
        let pod = serde_json::from_value(self.json.clone()).unwrap();
        Arc::new(PodEntry { netns: self.netns.clone(), ..PodEntry::of(pod) })
    }
}

fn status(name: &str, id: &str, ready: bool) -> Value {
    json!({
        "name": name, "containerID": format!("fake://{id}"), "image": "x", "imageID": "x", "restartCount": 0,
        "ready": ready, "started": true, "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } },
    })
}

/// A tcpSocket probe that believes the first answer.
fn tcp(port: u16) -> Value {
    json!({ "tcpSocket": { "port": port }, "failureThreshold": 1 })
}

fn settings() -> Settings {
    Settings { tcp_by_kernel: true, edge_policy: EdgePolicy::Immediate, canary: Duration::ZERO }
}

impl Scene {
    fn new(name: &str) -> Scene {
        let place = Place::new(name);
        let kernel = place.start();
        Scene::with(place, kernel)
    }

    fn with(place: Place, kernel: Kernel) -> Scene {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let table = watch::Sender::new(Arc::new(PodTable::default()));
        let shutdown = CancellationToken::new();
        let events = Recorder::default();
        let (handle, updates) = start(&runtime, &kernel, &table, &events, &shutdown);
        Scene { place, kernel: Some(kernel), table, updates, handle, events, shutdown, runtime }
    }

    /// Ends the task and the reader of the kernel's events, as the end of the agent does, and starts both again.
    fn restart(&mut self, between: impl FnOnce()) {
        self.shutdown.cancel();
        self.kernel.take().unwrap().stop(true).unwrap();
        between();
        let kernel = self.place.start();
        assert!(kernel.adopted());
        self.shutdown = CancellationToken::new();
        (self.handle, self.updates) =
            start(&self.runtime, &kernel, &self.table, &self.events, &self.shutdown);
        self.kernel = Some(kernel);
    }

    fn show(&self, pods: &[Pod]) {
        let entries = pods.iter().map(|pod| {
            let entry = pod.entry();
            (PodName::of(&entry.pod), entry)
        });
        let table = PodTable { pods: entries.collect(), ..PodTable::default() };
        self.table.send_replace(Arc::new(table));
    }

    /// The next change of any probe's state.
    fn next(&mut self) -> ProbeUpdate {
        let next = async { tokio::time::timeout(PATIENCE, self.updates.recv()).await };
        match self.runtime.block_on(next) {
            Ok(Some(Request::Probe(update))) => update,
            other => panic!("no change of a probe's state came: {other:?}"),
        }
    }

    /// The next change must be this one.
    fn expect(&mut self, pod: &str, kind: ProbeKind, result: ProbeResult) -> ProbeUpdate {
        let update = self.next();
        let seen = (update.uid.as_str(), update.kind, update.result);
        assert_eq!(seen, (format!("uid-{pod}").as_str(), kind, result), "{update:?}");
        update
    }

    fn list(&self) -> Vec<ProbeView> {
        self.runtime.block_on(self.handle.list()).unwrap()
    }

    fn view(&self, pod: &str, kind: ProbeKind) -> ProbeView {
        self.list().into_iter().find(|probe| probe.pod == pod && probe.kind == kind).unwrap()
    }

    /// Waits until a probe looks as `wanted` says.
    fn until(
        &self,
        pod: &str,
        kind: ProbeKind,
        what: &str,
        wanted: impl Fn(&ProbeView) -> bool,
    ) -> ProbeView {
        wait_for(what, PATIENCE, || {
            let view = self.view(pod, kind);
            if wanted(&view) { Ok(view) } else { Err(format!("{view:?}")) }
        })
        .unwrap()
    }

    /// One look now, as `beelet probe run` does.
    fn run(&self, pod: &str, container: &str, kind: ProbeKind) -> Outcome {
        let wanted =
            Wanted { namespace: String::new(), pod: pod.to_owned(), container: container.to_owned(), kind };
        self.runtime.block_on(self.handle.run(wanted)).unwrap().look.outcome
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.shutdown.cancel();
        if let Some(kernel) = self.kernel.take() {
            let _ = kernel.stop(false);
        }
    }
}

fn start(
    runtime: &tokio::runtime::Runtime,
    kernel: &Kernel,
    table: &watch::Sender<Arc<PodTable>>,
    events: &Recorder,
    shutdown: &CancellationToken,
) -> (Handle, mpsc::Receiver<Request>) {
    let (requests, updates) = mpsc::channel(1024);
    let (handle, commands) = probes::handle();
    let task = Probes::new(probes::Parts {
        table: table.subscribe(),
        requests,
        runtime: None,
        listeners: kernel.listeners(),
        checker: kernel.checker(),
        edges: kernel.subscribe(Interest::LISTENERS),
        commands,
        settings: settings(),
        events: events.clone(),
        metrics: probes::Metrics::default(),
    });
    runtime.spawn(task.run(shutdown.clone()));
    (handle, updates)
}

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
    // At another address, or for IPv6 only: not reached, and nothing is said.
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
    // Nothing was said between.
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
        // Two commands on a pipe: far below 5 ms.
        process.close(socket);
        socket = process.socket("listen 127.0.0.1:80");
        let marker = process.socket(&format!("listen 127.0.0.1:{MARKER}"));
        let mut last = Success;
        loop {
            let update = scene.next();
            match update.uid.as_str() {
                "uid-marker" => break,
                "uid-now" => {
                    assert_ne!(update.result, last, "a state is told once");
                    last = update.result;
                }
                _ => panic!("by threshold nothing has failed: {update:?}"),
            }
        }
        process.close(marker);
        scene.expect("marker", Readiness, Failure);
        assert_eq!(last, Success);
    }
    assert_eq!(scene.view("now", Readiness).result, Success);
}

#[test]
fn connections_that_nobody_accepts_fail_a_probe_until_somebody_does() {
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
    assert_eq!(update.kernel_ns, None, "no edge says that");
    let told: Vec<String> =
        scene.events.subscribe().borrow().all().iter().map(|event| event.message.clone()).collect();
    let expected = "Readiness probe failed: connections wait on port 80 and the application accepts none";
    assert!(told.iter().any(|message| message == expected), "{told:?}");
    let view = scene.view("web", Readiness);
    assert!(view.last.unwrap().detail.contains("accepts none"), "{:?}", scene.view("web", Readiness));
    process.tell(&format!("accept {}", listener.id)).unwrap();
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
    // The timeout would be far away.
    scene.expect("web", Readiness, Failure);
    process.tell(&format!("accept {}", listener.id)).unwrap();
    scene.expect("web", Readiness, Success);
}

#[test]
fn a_canary_tells_an_idle_application_that_hangs_from_one_that_works() {
    require!(bpf);
    let mut scene = Scene::new("bp-canary");
    // The agent must be able to connect: the host's own network.
    let host = Path::new("/proc/self/ns/net");
    let mut hung = Process::start_at(Some(&scene.place.cgroup_dir()), host);
    let mut working = Process::start_at(Some(&scene.place.cgroup_dir()), host);
    let hanging = hung.socket("listen 127.0.0.1:0");
    let serving = working.socket("listen 127.0.0.1:0");
    working.tell(&format!("serve {}", serving.id)).unwrap();
    let annotation = "period=100ms timeout=300ms canary=200ms";
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
        |view: &ProbeView| view.last.as_ref().is_some_and(|look| look.detail.contains("accepted a canary"));
    scene.until("works", Liveness, "an accepted canary", accepted);
    // Without canaries an idle application shows nothing.
    assert_eq!(scene.view("works", Liveness).result, Success);
}

#[test]
fn a_listener_moves_to_another_process_without_a_word() {
    require!(bpf);
    let mut scene = Scene::new("bp-move");
    let marker = Pod::new("marker", &scene.place, &[("readiness", tcp(MARKER))], NEVER);
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(80))], NEVER), marker]);
    scene.next();
    scene.next();
    let (mut maker, mut heir) = (scene.place.process(), scene.place.process());
    let socket = maker.socket("listen 127.0.0.1:80");
    scene.expect("web", Readiness, Success);
    let fd = maker.tell(&format!("fd {}", socket.id)).unwrap();
    heir.socket(&format!("take {} {fd}", maker.pid()));
    maker.kill();
    let mut other = scene.place.process();
    other.socket(&format!("listen 127.0.0.1:{MARKER}"));
    scene.expect("marker", Readiness, Success);
    heir.kill();
    scene.expect("web", Readiness, Failure);
}

#[test]
fn a_port_that_another_container_takes_over_is_ready_as_a_connection_would_find_it() {
    require!(bpf);
    let mut scene = Scene::new("bp-reuse");
    scene.show(&[Pod::new("web", &scene.place, &[("readiness", tcp(80))], NEVER)]);
    scene.expect("web", Readiness, Failure);
    let mut one = scene.place.process();
    one.socket("listen 127.0.0.1:80");
    scene.expect("web", Readiness, Success);
    one.kill();
    scene.expect("web", Readiness, Failure);
    // Another cgroup, the same namespace.
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
fn who_answers_is_chosen_by_annotation_and_what_stands_in_is_named() {
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
    assert_eq!((odd.mode, odd.fallback), ("connect", None), "a host of its own is always connected to");
    assert!(odd.problems[0].contains("\"mode=fast\" is neither kernel nor connect"), "{:?}", odd.problems);

    let options = KernelOptions { mode: Mode::Off, ..scene.place.options() };
    let off = Scene::with(Place::new("bp-off"), Kernel::start(&options));
    let mut process = Process::start_at(None, Path::new("/proc/self/ns/net"));
    let listener = process.socket("listen 127.0.0.1:0");
    off.show(&[Pod::new("web", &off.place, &[("readiness", tcp(listener.port))], "period=100ms").on_host()]);
    let view = off.until("web", Readiness, "to be ready by connecting", |view| view.result == Success);
    assert_eq!(view.mode, "connect");
    assert!(view.fallback.unwrap().contains("the kernel half is off"));
}

#[test]
fn two_hundred_listeners_opened_and_closed_at_random_are_as_the_model_says() {
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
    let mut said: BTreeMap<String, ProbeResult> = BTreeMap::new();
    wait_for("every probe to say what the model says", PATIENCE, || {
        while let Ok(Request::Probe(update)) = scene.updates.try_recv() {
            said.insert(update.uid, update.result);
        }
        let wrong = (0..200).find(|n| *said.get(&format!("uid-p{n}")).unwrap_or(&Failure) != expected(*n));
        wrong.map_or(Ok(()), |n| Err(format!("p{n} is not {:?}", expected(n))))
    })
    .unwrap();
    for view in scene.list() {
        let n: u16 = view.pod[1..].parse().unwrap();
        assert_eq!(view.result, expected(n), "{view:?}");
    }
}

/// What the application does with its port.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Behaviour {
    Closed,
    Serves,
    /// Listens, accepts nothing, and nobody calls.
    HangsIdle,
    /// Listens, accepts nothing, and a connection waits.
    HangsWaiting,
    /// Listens, accepts nothing, and the queue is full.
    HangsFull,
    /// Listens at another address.
    Elsewhere,
    /// Listens for IPv6 only.
    SixOnly,
}

#[test]
fn the_kernels_verdict_is_connects_but_for_what_the_docs_name() {
    require!(bpf);
    use Behaviour::{Closed, Elsewhere, HangsFull, HangsIdle, HangsWaiting, Serves, SixOnly};
    let scene = Scene::new("bp-same");
    let host = Path::new("/proc/self/ns/net");
    let mut keeper = Process::start_at(None, host);
    let port = keeper.socket("bind 127.0.0.1:0 reuseaddr").port;
    drop(keeper);
    let pod = |name: &str, mode: &str| {
        let annotation = format!("period=1h timeout=300ms mode={mode}");
        Pod::new(name, &scene.place, &[("readiness", tcp(port))], &annotation).on_host()
    };
    scene.show(&[pod("knows", "kernel"), pod("asks", "connect")]);
    wait_for("both probes", PATIENCE, || {
        if scene.list().len() == 2 { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .unwrap();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let all = [Closed, Serves, HangsIdle, HangsWaiting, HangsFull, Elsewhere, SixOnly];
    let order = proptest::collection::vec(0..all.len(), 25).new_tree(&mut runner).unwrap().current();
    let mut seen = BTreeMap::new();
    for behaviour in order.into_iter().map(|index| all[index]).chain(all) {
        let mut process = Process::start_at(Some(&scene.place.cgroup_dir()), host);
        match behaviour {
            Closed => {}
            Serves => {
                let socket = process.socket(&format!("listen 127.0.0.1:{port} reuseaddr"));
                process.tell(&format!("serve {}", socket.id)).unwrap();
            }
            HangsIdle => {
                process.socket(&format!("listen 127.0.0.1:{port} reuseaddr"));
            }
            HangsWaiting => {
                process.socket(&format!("listen 127.0.0.1:{port} reuseaddr"));
                process.socket(&format!("hold 127.0.0.1:{port}"));
            }
            HangsFull => {
                process.socket(&format!("listen 127.0.0.1:{port} reuseaddr backlog=0"));
                process.socket(&format!("hold 127.0.0.1:{port}"));
            }
            Elsewhere => {
                process.socket(&format!("listen 127.0.0.2:{port} reuseaddr"));
            }
            SixOnly => {
                process.socket(&format!("listen [::]:{port} reuseaddr v6only"));
            }
        }
        let kernel = scene.run("knows", "main", Readiness);
        let connect = scene.run("asks", "main", Readiness);
        process.kill();
        seen.insert(format!("{behaviour:?}"), (kernel, connect));
        if behaviour == HangsWaiting {
            // The one difference: connect() is answered by the kernel while the queue has room.
            assert_eq!((kernel, connect), (Outcome::Failure, Outcome::Success), "{behaviour:?}");
        } else {
            assert_eq!(kernel, connect, "{behaviour:?}");
        }
    }
    assert_eq!(seen.len(), all.len(), "{seen:?}");
    assert_eq!(seen["Serves"].0, Outcome::Success);
    assert_eq!(seen["HangsIdle"].0, Outcome::Success, "nothing waits: only a canary can tell");
    for refused in ["Closed", "HangsFull", "Elsewhere", "SixOnly"] {
        assert_eq!(seen[refused].0, Outcome::Failure, "{refused}");
    }
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
        scene.restart(|| {});
        scene.until("stays", Readiness, "a look", |view| view.last.is_some());
        while let Ok(Request::Probe(update)) = scene.updates.try_recv() {
            let fine = update.result == Success || update.uid == "uid-comes";
            assert!(fine, "round {round}: {update:?}");
        }
        assert_eq!(scene.view("stays", Readiness).result, Success, "round {round}");
    }
    // What came and went while nobody looked is known at once.
    scene.restart(|| {
        process.close(goes);
        process.socket("listen 127.0.0.1:82");
    });
    let mut said = BTreeMap::new();
    while said.get("uid-closes") != Some(&Failure) || said.get("uid-comes") != Some(&Success) {
        let update = scene.next();
        if update.kind == Readiness {
            assert_ne!((update.uid.as_str(), update.result), ("uid-stays", Failure));
            said.insert(update.uid, update.result);
        }
    }
}
