//! Tests of postStart and preStop hooks, and of the grace period that all steps of a pod's end share.

use std::time::{Duration, Instant};

use beelet_tests::cri::{Asked, Call, Op};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::node::{Node, container, hooked, of_everything, pod, with};

/// Returns the operations on containers, in order: `+a` created, `!word` executed, `-a/5` stopped with 5
/// seconds.
fn story(node: &Node) -> Vec<String> {
    let world = node.cri.world();
    let name = |id: &str| {
        world.containers.get(id).map_or_else(|| "removed".to_owned(), |container| container.name().to_owned())
    };
    let line = |call: &Call| match &call.asked {
        Asked::CreateContainer(request) => {
            Some(format!("+{}", request.config.as_ref()?.metadata.as_ref()?.name))
        }
        Asked::ExecSync(request) => Some(format!("!{}", request.cmd.first()?)),
        Asked::StopContainer(request) => {
            Some(format!("-{}/{}", name(&request.container_id), request.timeout))
        }
        _ => None,
    };
    node.cri.calls().iter().filter_map(line).collect()
}

#[tokio::test]
async fn a_post_start_hook_holds_the_later_containers_back_and_runs_once() {
    let mut node = Node::with(&[]).await;
    let held = node.cri.on(Op::ExecSync).hold();
    node.apply(&hooked("web"));
    held.reached().await;
    assert_eq!(node.containers("web"), "a/0+ init/0- side/0+");
    held.release();
    node.until_ready("web").await;
    assert_eq!(story(&node), ["+init", "+side", "+a", "!a-start", "+b"]);
    let record = node.path("state/pods.json");
    let id = node.cri.container("web-n1", "a").unwrap().id;
    let written = || {
        let text = std::fs::read_to_string(&record).unwrap_or_default();
        let hooked = text.split("\"hooked\":").nth(1).is_some_and(|rest| rest.contains(&id));
        if hooked { Ok(()) } else { Err("the record lacks the hook") }
    };
    beelet_tests::workdir::wait_for("the record", beelet_tests::workdir::PATIENCE, written).unwrap();
    node.kill_and_start().await;
    node.until_relisted().await;
    node.until_ready("web").await;
    assert_eq!(node.cri.count(Op::ExecSync), 1, "{}", node.cri.transcript());
}

#[tokio::test]
async fn a_container_whose_post_start_hook_fails_is_stopped_and_retried() {
    let node = Node::with(&[]).await;
    node.cri.change(|world| world.exec_codes = [("a-start".to_owned(), 3)].into());
    node.apply(&hooked("web"));
    let failed = |pod: &super::node::View| pod.waits_for("a", "CrashLoopBackOff") && pod.running("b");
    let pod = node.until_pod("web", "to back off while the other runs", failed).await;
    assert_eq!(pod.restarts()["a"], 1);
    let events = node.events();
    let hook =
        "FailedPostStartHook: postStart hook failed: command \"a-start\" exited with code 3: it went wrong";
    assert!(events.iter().any(|event| event == hook), "{events:#?}");
    assert!(events.iter().any(|event| event == "Killing: Container a failed postStart hook"), "{events:#?}");
    assert!(events.iter().any(|event| event.starts_with("BackOff: Back-off restarting failed container a")));
}

/// Answers every request in HTTP, also TLS handshakes.
async fn speak_http(listener: TcpListener) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let mut asked = [0; 4096];
        // The client may have closed the connection.
        let _ = stream.read(&mut asked).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        let _ = stream.shutdown().await;
    }
}

#[tokio::test]
async fn an_https_hook_with_an_http_answer_is_reported_and_counted() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = tokio::spawn(speak_http(listener));
    let mut web = pod("web");
    let get = json!({ "host": "127.0.0.1", "port": port, "scheme": "HTTPS" });
    web["spec"]["containers"][0]["lifecycle"] = json!({ "postStart": { "httpGet": get } });
    let node = Node::with(&[web]).await;
    node.until_ready("web").await;
    let wanted = format!(
        "LifecycleHTTPFallback: request to HTTPS lifecycle hook 127.0.0.1:{port} got HTTP response, retry with HTTP succeeded"
    );
    let events = node.events();
    assert!(events.contains(&wanted), "{events:#?}");
    assert_eq!(node.metrics().downgraded_hooks.get(), 1);
    server.abort();
}

#[tokio::test]
async fn an_agent_that_is_killed_during_a_hook_runs_it_again_and_restarts_nothing() {
    let mut node = Node::with(&[]).await;
    let held = node.cri.on(Op::ExecSync).hold();
    node.apply(&hooked("web"));
    held.reached().await;
    node.kill_and_start().await;
    node.until_ready("web").await;
    drop(held);
    assert_eq!(node.containers("web"), "a/0+ b/0+ init/0- side/0+");
    assert_eq!(story(&node), ["+init", "+side", "+a", "!a-start", "!a-start", "+b"]);
}

#[tokio::test]
async fn pre_stop_hooks_run_before_the_end_and_sidecars_outlive_the_others() {
    let node = Node::with(&[hooked("web")]).await;
    let web = node.until_ready("web").await;
    let world = node.cri.world();
    let before = node.cri.calls().len();
    node.remove("web");
    node.until_nothing_is_left(&web).await;
    let calls = node.cri.calls();
    let place = |wanted: &dyn Fn(&Asked) -> bool| {
        calls.iter().skip(before).position(|call| wanted(&call.asked)).expect("the call is missing")
    };
    let runs = |word: &'static str| move |asked: &Asked| matches!(asked, Asked::ExecSync(request) if request.cmd == [word]);
    let stop = |name: &'static str| {
        let world = world.clone();
        move |asked: &Asked| match asked {
            Asked::StopContainer(request) => world.containers[&request.container_id].name() == name,
            _ => false,
        }
    };
    let (a, b, side) = (place(&stop("a")), place(&stop("b")), place(&stop("side")));
    assert!(
        place(&runs("a-stop")) < a && place(&runs("side-stop")) < side && side > a.max(b),
        "{}",
        node.cri.transcript()
    );
    // Each stop has the rest of the seven seconds.
    let timeouts = calls.iter().filter_map(|call| match &call.asked {
        Asked::StopContainer(request) => Some(request.timeout),
        _ => None,
    });
    assert!(timeouts.clone().all(|seconds| (2..=7).contains(&seconds)), "{:?}", timeouts.collect::<Vec<_>>());
}

#[tokio::test]
async fn several_sidecars_are_stopped_in_reverse_one_after_the_other() {
    let mut web = with(of_everything("web"), "terminationGracePeriodSeconds", json!(60));
    for name in ["second", "third"] {
        let mut sidecar = container(name);
        sidecar["restartPolicy"] = json!("Always");
        web["spec"]["initContainers"].as_array_mut().unwrap().push(sidecar);
    }
    let node = Node::with(&[web]).await;
    let web = node.until_ready("web").await;
    let world = node.cri.world();
    let held = node.cri.on(Op::StopContainer).always().hold();
    node.remove("web");
    held.reached().await;
    let stops = || -> Vec<String> {
        let of = |call: &Call| match &call.asked {
            Asked::StopContainer(request) => Some(world.containers[&request.container_id].name().to_owned()),
            _ => None,
        };
        node.cri.calls().iter().filter_map(of).collect()
    };
    // No sidecar is stopped before the other containers have ended.
    node.until_relisted().await;
    let mut first = stops();
    first.sort();
    assert_eq!(first, ["a", "b"]);
    let calls = node.cri.calls().len();
    held.release();
    node.cri.wait_for_after("the last sidecar's end", calls, |call| call.op() == Op::StopPodSandbox).await;
    assert_eq!(stops()[2..], ["third", "second", "side"]);
    node.until_nothing_is_left(&web).await;
}

#[tokio::test]
async fn a_pre_stop_hook_gets_the_grace_period_and_no_more() {
    let mut web = with(pod("web"), "terminationGracePeriodSeconds", json!(3));
    web["spec"]["containers"][0]["lifecycle"] = json!({ "preStop": { "exec": { "command": ["hang"] } } });
    let node = Node::with(&[web]).await;
    let web = node.until_ready("web").await;
    let held = node.cri.on(Op::ExecSync).hold();
    let began = Instant::now();
    node.remove("web");
    held.reached().await;
    let stop = node.cri.wait_for("the end", |call| call.op() == Op::StopContainer).await;
    assert!(began.elapsed() >= Duration::from_millis(2900), "{:?}", began.elapsed());
    assert!(matches!(&stop.asked, Asked::StopContainer(request) if request.timeout == 2), "{stop:?}");
    drop(held);
    node.until_nothing_is_left(&web).await;
    assert!(
        node.events().iter().any(|e| e.starts_with("FailedPreStopHook: ") && e.contains("timed out after")),
        "{:#?}",
        node.events()
    );
}

#[tokio::test]
async fn a_sleep_hook_delays_the_stop() {
    let mut web = pod("web");
    web["spec"]["containers"][0]["lifecycle"] = json!({ "preStop": { "sleep": { "seconds": 2 } } });
    let node = Node::with(&[web]).await;
    let web = node.until_ready("web").await;
    let began = Instant::now();
    node.remove("web");
    let stop = node.cri.wait_for("the end", |call| call.op() == Op::StopContainer).await;
    assert!(began.elapsed() >= Duration::from_secs(2));
    assert!(matches!(&stop.asked, Asked::StopContainer(request) if request.timeout == 5), "{stop:?}");
    node.until_nothing_is_left(&web).await;
}

#[tokio::test]
async fn the_end_of_a_container_with_restart_policy_never_leaves_the_others_running() {
    let mut once = container("once");
    once["restartPolicy"] = json!("Never");
    let mut coded = container("coded");
    coded["restartPolicy"] = json!("Never");
    coded["restartPolicyRules"] =
        json!([{ "action": "Restart", "exitCodes": { "operator": "In", "values": [42] } }]);
    let node = Node::with(&[with(pod("web"), "containers", json!([container("main"), once, coded]))]).await;
    node.until_ready("web").await;
    let exit = |name: &str, code| node.cri.exit(&node.cri.container("web-n1", name).unwrap().id, code);
    exit("once", 1);
    exit("coded", 42);
    node.until_pod("web", "to restart the container with a rule", |pod| {
        pod.restarts()["coded"] == 1 && pod.running("coded") && !pod.running("once")
    })
    .await;
    exit("coded", 7);
    let pod = node.until_pod("web", "to leave the container stopped", |pod| !pod.running("coded")).await;
    assert_eq!((pod.phase().as_str(), pod.restarts()["once"]), ("Running", 0));
    node.until_relisted().await;
    assert_eq!(node.containers("web"), "coded/0- coded/1- main/0+ once/0-");
}

#[tokio::test]
async fn created_and_started_containers_have_events() {
    let node = Node::with(&[of_everything("web")]).await;
    node.until_ready("web").await;
    let events = node.events();
    for name in ["init", "side", "a", "b"] {
        for expected in
            [format!("Created: Created container: {name}"), format!("Started: Started container {name}")]
        {
            assert!(events.contains(&expected), "{expected} is missing in {events:#?}");
        }
    }
}
