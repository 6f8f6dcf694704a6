//! Tests of the effects of probes on pods. Most probes check a port of this machine that the test opens and
//! closes.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use beelet_model::request::Request;
use beelet_model::table::PodTable;
use beelet_policy::probe::{ProbeKind, ProbeResult};
use beelet_tests::cri::{Asked, Call, FakeCri, Op};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::node::{Node, View, container, pod, view, with};

/// Port of this machine that is closed until the test opens it.
struct Port(u16);

impl Port {
    fn free() -> Self {
        Port(TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port())
    }

    fn open(&self) -> TcpListener {
        TcpListener::bind(("127.0.0.1", self.0)).unwrap()
    }

    /// Returns a probe of the port, once per second, whose first answer counts.
    fn probe(&self) -> Value {
        let socket = json!({ "host": "127.0.0.1", "port": self.0 });
        json!({ "tcpSocket": socket, "periodSeconds": 1, "failureThreshold": 1 })
    }
}

/// Returns a pod whose container has these probes.
fn probed(probes: &[(&str, Value)]) -> Value {
    let mut main = container("main");
    for (kind, probe) in probes {
        main[format!("{kind}Probe")] = probe.clone();
    }
    with(pod("web"), "containers", json!([main]))
}

/// Returns the grace periods with which containers were stopped, in seconds.
fn graces(cri: &FakeCri) -> Vec<i64> {
    let grace = |call: Call| match call.asked {
        Asked::StopContainer(request) => Some(request.timeout),
        _ => None,
    };
    cri.calls().into_iter().filter_map(grace).collect()
}

/// Asserts that the pod `web` is ready in every published table until `end` completes.
async fn stays_ready_until(
    table: &mut watch::Receiver<Arc<PodTable>>,
    end: impl Future<Output = Call>,
    otherwise: &str,
) {
    tokio::pin!(end);
    loop {
        if let Some(pod) = view(&table.borrow_and_update(), "web") {
            assert!(pod.ready(), "{otherwise}");
        }
        tokio::select! {
            changed = table.changed() => changed.unwrap(),
            _ = &mut end => break,
        }
    }
}

#[tokio::test]
async fn readiness_follows_its_probe_and_restarts_nothing() {
    let port = Port::free();
    let node = Node::with(&[probed(&[("readiness", port.probe())])]).await;
    node.until_pod("web", "to run unready", |pod| pod.running("main") && !pod.ready()).await;
    let listener = port.open();
    node.until_ready("web").await;
    drop(listener);
    let pod = node.until_pod("web", "to be unready", |pod| !pod.ready()).await;
    assert_eq!(pod.restarts()["main"], 0);
    assert_eq!(graces(&node.cri), Vec::<i64>::new());
}

#[tokio::test]
async fn after_a_restart_of_the_agent_readiness_does_not_flip() {
    let port = Port::free();
    let _listener = port.open();
    let mut node = Node::with(&[probed(&[("readiness", port.probe())])]).await;
    node.until_ready("web").await;
    let record = || std::fs::read_to_string(node.path("state/pods.json")).unwrap_or_default();
    // The last record may not be written yet.
    beelet_tests::workdir::wait_for("the record", beelet_tests::workdir::PATIENCE, || {
        if record().contains("\"ready\":true") { Ok(()) } else { Err("not yet") }
    })
    .unwrap();
    node.kill_and_start().await;
    let mut table = node.watch();
    let first = node.cri.calls().len();
    let looked = node.cri.wait_for_after("a second call", first, |_| true);
    stays_ready_until(&mut table, looked, "it flipped").await;
    node.until_relisted().await;
    assert!(view(&node.table(), "web").unwrap().ready());
}

#[tokio::test]
async fn a_liveness_failure_restarts_with_the_probes_own_grace() {
    let port = Port::free();
    let listener = port.open();
    let mut probe = port.probe();
    probe["terminationGracePeriodSeconds"] = 5.into();
    let node = Node::with(&[probed(&[("liveness", probe)])]).await;
    node.until_ready("web").await;
    drop(listener);
    node.until_pod("web", "to be restarted", |pod| pod.restarts()["main"] == 1).await;
    assert_eq!(graces(&node.cri)[0], 5);
    let ended = node.containers("web");
    assert!(ended.starts_with("main/0-"), "{ended}");
}

#[tokio::test]
async fn a_probes_own_grace_is_at_most_a_year() {
    let port = Port::free();
    let mut pod = super::assigned::assigned(super::assigned::UID);
    let mut probe = port.probe();
    probe["terminationGracePeriodSeconds"] = i64::MAX.into();
    pod["spec"]["containers"][0]["livenessProbe"] = probe;
    let (node, _source) = super::assigned::node_with(&[pod]).await;
    node.until_pod("api", "to be restarted", |pod| pod.restarts()["main"] == 1).await;
    assert_eq!(graces(&node.cri)[0], 366 * 24 * 3600);
}

#[tokio::test]
async fn a_liveness_failure_without_its_own_grace_uses_the_pods() {
    let port = Port::free();
    let node = Node::with(&[probed(&[("liveness", port.probe())])]).await;
    node.until_pod("web", "to be restarted", |pod| pod.restarts()["main"] == 1).await;
    assert_eq!(graces(&node.cri)[0], 7);
}

/// Checks a terminating pod while its StopContainer hangs: the liveness probe, which would fail, has stopped,
/// and the readiness probe continues.
async fn check_ending(end: impl AsyncFnOnce(&Node, &View)) {
    let (ready, live) = (Port::free(), Port::free());
    let (readiness, liveness) = (ready.open(), live.open());
    let pod = with(
        probed(&[("readiness", ready.probe()), ("liveness", live.probe())]),
        "terminationGracePeriodSeconds",
        json!(600),
    );
    let node = Node::with(&[pod]).await;
    let web = node.until_ready("web").await;
    let held = node.cri.on(Op::StopContainer).hold();
    end(&node, &web).await;
    held.reached().await;
    drop(liveness);
    drop(readiness);
    let is = |expected| move |pod: &View| pod.container("main").ready == expected;
    // Three results, a period apart: in this time, the liveness probe would have failed.
    node.until_pod("web", "to be unready while it ends", is(false)).await;
    let readiness = ready.open();
    node.until_pod("web", "to be ready while it ends", is(true)).await;
    drop(readiness);
    let pod = node.until_pod("web", "to be unready again", is(false)).await;
    assert!(pod.running("main"), "{:?}", pod.0.pod.status);
    let events = node.events();
    let about = |kind: &str| events.iter().filter(|e| e.contains(&format!("Unhealthy: {kind}"))).count();
    assert_eq!((about("Liveness"), pod.restarts()["main"]), (0, 0), "{events:?}");
    assert!(about("Readiness") > 0, "{events:?}");
    let probes = node.probes().await;
    let liveness = probes.iter().find(|probe| probe.kind == ProbeKind::Liveness).unwrap();
    assert_eq!(liveness.result, ProbeResult::Success);
    assert_eq!(liveness.held.as_deref(), Some("the pod is terminating"));
    held.release();
    // A pod that was removed or has ended permanently has no probes.
    let gone = |table: &PodTable| view(table, "web").is_none_or(|pod| pod.phase() == "Failed").then_some(());
    node.until("the pod to have ended", gone).await;
    assert!(node.probes().await.is_empty(), "{:?}", node.probes().await);
    assert_eq!(graces(&node.cri).len(), 1, "{}", node.cri.transcript());
}

#[tokio::test]
async fn liveness_stops_when_a_pod_is_deleted_and_readiness_continues() {
    check_ending(async |node, _| node.remove("web")).await;
}

#[tokio::test]
async fn liveness_stops_when_a_pod_is_evicted_and_readiness_continues() {
    let evict = async |node: &Node, web: &View| {
        let request = Request::Fail {
            uid: web.uid(),
            reason: "Evicted".to_owned(),
            message: "The node was low on resource: memory.".to_owned(),
            grace: Some(Duration::from_secs(300)),
        };
        node.request(request).await;
    };
    check_ending(evict).await;
}

#[tokio::test]
async fn a_pod_that_runs_again_after_an_eviction_is_probed_as_a_new_one() {
    let port = Port::free();
    let listener = port.open();
    let node = Node::with(&[probed(&[("liveness", port.probe())])]).await;
    let web = node.until_ready("web").await;
    let (uid, reason) = (web.uid(), "Evicted".to_owned());
    node.request(Request::Fail { uid: uid.clone(), reason, message: String::new(), grace: None }).await;
    node.until_pod("web", "to have failed", |pod| pod.phase() == "Failed").await;
    node.request(Request::Retry { uid }).await;
    node.until_ready("web").await;
    drop(listener);
    node.until_pod("web", "to be restarted", |pod| pod.restarts()["main"] == 1).await;
}

#[tokio::test]
async fn an_invalid_probe_annotation_is_an_event() {
    let port = Port::free();
    let _listener = port.open();
    let mut pod = probed(&[("readiness", port.probe())]);
    pod["metadata"]["annotations"] = json!({ "beelet.dev/probes": "mode=fast" });
    let node = Node::with(&[pod]).await;
    node.until_ready("web").await;
    let expected = "ProbeWarning: Readiness probe warning: annotation beelet.dev/probes: \"mode=fast\" is neither kernel \
                    nor connect; it is ignored";
    assert!(node.events().iter().any(|event| event == expected), "{:?}", node.events());
    assert_eq!(node.probes().await[0].problems.len(), 1);
}

#[tokio::test]
async fn a_probe_that_starts_processes_runs_at_most_once_per_second() {
    let mut pod = probed(&[("readiness", json!({ "exec": { "command": ["true"] } }))]);
    pod["metadata"]["annotations"] =
        json!({ "probes.beelet.dev/main": "period=10ms timeout=50ms canary=10ms" });
    let node = Node::with(&[pod]).await;
    node.until_ready("web").await;
    let probe = node.probes().await.remove(0);
    assert_eq!((probe.period, probe.timeout), (Duration::from_secs(1), Duration::from_millis(50)));
    let problems = probe.problems.join("; ");
    assert!(problems.contains("period of 10 ms is only for tcpSocket probes"), "{problems}");
    assert!(problems.contains("\"canary=10ms\" is shorter than 1000 ms"), "{problems}");
    let warns = |event: &String| event.starts_with("ProbeWarning") && event.contains("once per second");
    assert!(node.events().iter().any(warns), "{:?}", node.events());
}

#[tokio::test]
async fn a_redirect_to_another_host_is_a_success_with_a_warning() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut request = [0; 4096];
            // The probe may already have timed out.
            let _ = stream.read(&mut request);
            let _ = stream.write_all(
                b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere.invalid/\r\nContent-Length: 10\r\n\r\nover there",
            );
        }
    });
    let get = json!({ "host": "127.0.0.1", "port": port, "path": "/" });
    let node = Node::with(&[probed(&[("readiness", json!({ "httpGet": get, "periodSeconds": 1 }))])]).await;
    node.until_ready("web").await;
    let events = node.events();
    let expected =
        "ProbeWarning: Readiness probe warning: Probe terminated redirects, Response body: over there";
    assert!(events.iter().any(|event| event == expected), "{events:?}");
}

#[tokio::test]
async fn until_its_startup_probe_succeeds_a_container_is_neither_ready_nor_restarted() {
    let (slow, live) = (Port::free(), Port::free());
    let mut startup = slow.probe();
    startup["failureThreshold"] = 1000.into();
    let pod = probed(&[("startup", startup), ("liveness", live.probe())]);
    let node = Node::with(&[pod]).await;
    let pod = node.until_pod("web", "to run", |pod| pod.running("main")).await;
    assert_eq!((pod.container("main").started, pod.ready()), (Some(false), false));
    // The liveness probe would have failed within a few relists.
    node.until_relisted().await;
    node.until_relisted().await;
    assert_eq!(graces(&node.cri), Vec::<i64>::new());
    let _started = slow.open();
    let pod = node.until_pod("web", "to have started", View::ready).await;
    assert_eq!(pod.container("main").started, Some(true));
    // From now on the liveness probe counts.
    node.until_pod("web", "to be restarted", |pod| pod.restarts()["main"] == 1).await;
}

#[tokio::test]
async fn a_startup_probe_that_gives_up_restarts_its_container() {
    let port = Port::free();
    let mut startup = port.probe();
    startup["terminationGracePeriodSeconds"] = 4.into();
    let node = Node::with(&[probed(&[("startup", startup)])]).await;
    node.until_pod("web", "to be restarted", |pod| pod.restarts()["main"] == 1).await;
    assert_eq!(graces(&node.cri)[0], 4);
}

#[tokio::test]
async fn a_sidecars_startup_probe_holds_the_pods_containers_back() {
    let port = Port::free();
    let mut side = container("side");
    side["restartPolicy"] = "Always".into();
    side["startupProbe"] = port.probe();
    side["startupProbe"]["failureThreshold"] = 1000.into();
    let mut node = Node::with(&[with(pod("web"), "initContainers", json!([side]))]).await;
    node.until_pod("web", "to run its sidecar", |pod| pod.running("side")).await;
    node.until_relisted().await;
    assert_eq!(node.containers("web"), "side/0+");
    let listener = port.open();
    node.until_ready("web").await;
    assert_eq!(node.containers("web"), "main/0+ side/0+");
    drop(listener);
    // The startup probe has succeeded once, and does not run again after a restart of the agent.
    node.kill_and_start().await;
    node.until_relisted().await;
    node.until_ready("web").await;
    assert_eq!(node.containers("web"), "main/0+ side/0+");
}

/// Returns an exec probe, once per second, whose first answer counts.
fn command(word: &str) -> Value {
    json!({ "exec": { "command": [word, "$(WHAT)"] }, "periodSeconds": 1, "failureThreshold": 1 })
}

#[tokio::test]
async fn a_commands_exit_code_decides() {
    let mut pod = probed(&[("readiness", command("check"))]);
    pod["spec"]["containers"][0]["env"] = json!([{ "name": "WHAT", "value": "all" }]);
    let mut node = Node::new(super::node::Settings::default());
    let exits = |node: &Node, code| {
        node.cri.change(|world| {
            world.exec_codes.insert("check".to_owned(), code);
        });
    };
    exits(&node, 1);
    node.apply(&pod);
    node.start().await;
    node.until_pod("web", "to run unready", |pod| pod.running("main") && !pod.ready()).await;
    let asked = node.cri.wait_for("a probe", |call| matches!(&call.asked, Asked::ExecSync(_))).await;
    let Asked::ExecSync(request) = asked.asked else { panic!("{asked:?}") };
    assert_eq!(request.cmd, ["check", "all"]);
    // The probe's second, and a safety margin.
    assert_eq!(request.timeout, 3);
    exits(&node, 0);
    node.until_ready("web").await;
    exits(&node, 2);
    let pod = node.until_pod("web", "to be unready", |pod| !pod.ready()).await;
    assert_eq!(pod.restarts()["main"], 0);
}

#[tokio::test]
async fn a_command_that_cannot_run_is_tried_three_times_and_does_not_count() {
    let node = Node::with(&[probed(&[("liveness", command("check"))])]).await;
    node.until_ready("web").await;
    node.cri.on(Op::ExecSync).times(6).fail(tonic::Code::Unknown, "no such file");
    let failed = |cri: &FakeCri| {
        cri.calls()
            .iter()
            .filter(|call| matches!(call.asked, Asked::ExecSync(_)) && !call.succeeded())
            .count()
    };
    let from = node.cri.calls().len();
    // Two probes with three attempts each, and one that succeeds.
    let fine = |call: &Call| matches!(call.asked, Asked::ExecSync(_)) && call.succeeded();
    while failed(&node.cri) < 6 {
        node.cri.wait_for_after("a probe", from, |call| matches!(call.asked, Asked::ExecSync(_))).await;
        tokio::task::yield_now().await;
    }
    node.cri.wait_for_after("a successful probe", from, fine).await;
    assert_eq!(graces(&node.cri), Vec::<i64>::new(), "an error restarts nothing");
    assert_eq!(view(&node.table(), "web").unwrap().restarts()["main"], 0);
}

#[tokio::test]
async fn over_a_hundred_restarts_of_the_agent_readiness_never_flips() {
    let port = Port::free();
    let _listener = port.open();
    let mut node = Node::with(&[probed(&[("readiness", port.probe())])]).await;
    node.until_ready("web").await;
    let record = || std::fs::read_to_string(node.path("state/pods.json")).unwrap_or_default();
    // The last record may not be written yet.
    beelet_tests::workdir::wait_for("the record", beelet_tests::workdir::PATIENCE, || {
        if record().contains("\"ready\":true") { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .unwrap();
    for round in 0..100 {
        // The count is taken before the agent's start: the first calls may precede the watch of its table.
        let first = node.cri.calls().len();
        node.kill_and_start().await;
        let mut table = node.watch();
        let looked = node.cri.wait_for_after("an inspection of the pod", first, |call| {
            matches!(call.asked, Asked::ContainerStatus(_))
        });
        stays_ready_until(&mut table, looked, &format!("it flipped in round {round}")).await;
    }
    node.until_relisted().await;
    assert!(view(&node.table(), "web").unwrap().ready());
}
