//! Pods and their state survive the end of the agent and of containerd.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use crate::node::{as_installed, installed};
use anyhow::Result;
use beelet_proto::cri;
use beelet_tests::agent::{Agent, Control, Options};
use beelet_tests::cgroup_values::pod_path;
use beelet_tests::containerd::{Containerd, Cri, block_on};
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::pages::Format;
use beelet_tests::pods::PodView;
use beelet_tests::{require, workdir};

fn start() -> (Containerd, Agent) {
    let containerd = Containerd::start_for_test().unwrap();
    let agent = Agent::start(installed(&containerd)).unwrap();
    (containerd, agent)
}

fn ready(agent: &Agent, name: &str) -> PodView {
    agent
        .until(&format!("{name} to be ready"), |watch| watch.pod(name).filter(|pod| pod.ready()).cloned())
        .unwrap()
}

/// Returns the parts of a pod that must not change: its identity, its containers, and the times of its
/// conditions.
fn identity(pod: &PodView) -> serde_json::Value {
    let status = pod.pod.status.clone().unwrap();
    serde_json::json!({
        "uid": pod.uid(),
        "ip": pod.ip(),
        "conditions": status.conditions,
        "containers": pod.containers().iter().map(|one| (&one.container_id, one.restart_count, one.ready)).collect::<Vec<_>>(),
    })
}

/// Returns the runtime's sandboxes and containers, by id, with their states.
fn runtime_view(containerd: &Containerd) -> Vec<(String, i32)> {
    let socket = containerd.socket();
    let view = block_on(async {
        let mut cri = Cri::connect(&socket).await?;
        let sandboxes = cri.runtime.list_pod_sandbox(cri::ListPodSandboxRequest { filter: None }).await?;
        let containers = cri.runtime.list_containers(cri::ListContainersRequest { filter: None }).await?;
        let sandboxes = sandboxes.into_inner().items.into_iter().map(|one| (one.id, one.state));
        let mut all: Vec<_> = sandboxes
            .chain(containers.into_inner().containers.into_iter().map(|one| (one.id, one.state)))
            .collect();
        all.sort();
        Result::Ok(all)
    });
    view.unwrap()
}

/// Waits until the pods' last state, which is recorded after it was published, is on disk.
fn until_recorded(agent: &Agent, pods: &[PodView]) {
    let recorded = |pod: &PodView| {
        let status = agent.record("pods")?[pod.uid()]["status"].take();
        let wanted = serde_json::to_value(pod.pod.status.as_ref()?.conditions.as_ref()?).ok()?;
        (status["conditions"] == wanted).then_some(())
    };
    workdir::wait_for("the pods' records", workdir::PATIENCE, || {
        pods.iter().try_for_each(|pod| recorded(pod).ok_or_else(|| format!("{} is not recorded", pod.uid())))
    })
    .unwrap();
}

/// Kills the agent, runs `meanwhile`, starts the agent again, and checks that no pod was affected.
fn adopts(containerd: &mut Containerd, agent: &mut Agent, meanwhile: impl FnOnce(&mut Containerd)) {
    agent.apply("web.yaml", manifests::serving("web").to_string()).unwrap();
    agent.apply("http.yaml", manifests::answering("http").to_string()).unwrap();
    let before = [ready(agent, "web"), ready(agent, "http")];
    let runtime_before = runtime_view(containerd);
    until_recorded(agent, &before);
    agent.kill9();
    meanwhile(containerd);
    agent.resume().unwrap();
    // The first state that a client receives of a pod with a readiness probe is already ready.
    for (name, before) in [("web", &before[0]), ("http", &before[1])] {
        let first = agent.until(&format!("{name} to be known"), |watch| watch.pod(name).cloned()).unwrap();
        assert_eq!(identity(&first), identity(before), "{name}");
    }
    assert_eq!(runtime_view(containerd), runtime_before);
}

#[test]
fn an_agent_killed_and_started_again_adopts_its_pods() {
    require!(containerd);
    let (mut containerd, mut agent) = start();
    adopts(&mut containerd, &mut agent, |_| ());
    // The agent still probes the adopted pods.
    let pod = ready(&agent, "web");
    Control::connect(pod.ip().unwrap(), CONTROL).unwrap().send(&format!("close {PORT}")).unwrap();
    agent
        .until("web to be not ready", |watch| watch.pod("web").filter(|pod| !pod.ready()).map(drop))
        .unwrap();
}

#[test]
fn a_listener_that_closed_while_the_agent_was_away_is_seen_at_its_start() {
    require!(containerd);
    let (_containerd, mut agent) = start();
    agent.apply("web.yaml", manifests::serving("web").to_string()).unwrap();
    let pod = ready(&agent, "web");
    let mut control = Control::connect(pod.ip().unwrap(), CONTROL).unwrap();
    agent.kill9();
    control.send(&format!("close {PORT}")).unwrap();
    agent.resume().unwrap();
    agent
        .until("web to be not ready", |watch| watch.pod("web").filter(|pod| !pod.ready()).map(drop))
        .unwrap();
}

#[test]
fn leftovers_of_a_pod_from_the_agents_absence_are_removed() {
    require!(containerd);
    let (containerd, mut agent) = start();
    let mut manifest = manifests::serving("web");
    manifest["spec"]["volumes"] = serde_json::json!([{"name": "scratch", "emptyDir": {}}]);
    agent.apply("web.yaml", manifest.to_string()).unwrap();
    let pod = ready(&agent, "web");
    let folder = agent.dir().join("pods").join(pod.uid());
    let of_pod = pod_path(pod.qos(), pod.uid());
    let cgroup = containerd.cgroup().folder("memory", &of_pod).unwrap();
    assert!(folder.exists(), "{}", folder.display());
    assert!(cgroup.exists(), "{}", cgroup.display());
    agent.kill9();
    agent.remove("web.yaml").unwrap();
    // A third party removes the pod from the runtime: only folders, cgroups and the agent's records are left.
    let socket = containerd.socket();
    block_on(async {
        let mut cri = Cri::connect(&socket).await?;
        let list = cri.runtime.list_pod_sandbox(cri::ListPodSandboxRequest { filter: None }).await?;
        for sandbox in list.into_inner().items {
            let id = sandbox.id;
            cri.runtime.stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: id.clone() }).await?;
            cri.runtime.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: id }).await?;
        }
        Result::Ok(())
    })
    .unwrap();
    agent.resume().unwrap();
    workdir::wait_for("the pod's folder and cgroup to be removed", workdir::PATIENCE, || {
        if folder.exists() || cgroup.exists() {
            Err("the folder or the cgroup still exists".to_owned())
        } else {
            Ok(())
        }
    })
    .unwrap();
}

#[test]
fn an_agent_and_a_containerd_both_killed_adopt_their_pods() {
    require!(containerd);
    let (mut containerd, mut agent) = start();
    adopts(&mut containerd, &mut agent, |containerd| {
        containerd.kill9();
        containerd.resume().unwrap();
    });
}

#[test]
fn on_containerd_2_it_adopts_too() {
    require!(containerd_2);
    let mut containerd = Containerd::start_version_2_for_test().unwrap();
    let mut agent = Agent::start(installed(&containerd)).unwrap();
    adopts(&mut containerd, &mut agent, |_| ());
}

#[test]
fn containerd_stopped_and_started_again_costs_no_pod_its_readiness() {
    require!(containerd);
    let (mut containerd, agent) = start();
    agent.apply("web.yaml", manifests::serving("web").to_string()).unwrap();
    let before = ready(&agent, "web");
    containerd.stop().unwrap();
    let while_away = agent.inspect(|watch| watch.pod("web").cloned()).unwrap().unwrap();
    assert_eq!(identity(&while_away), identity(&before));
    // A manifest that is added during the outage runs when the runtime is back.
    agent.apply("late.yaml", manifests::serving("late").to_string()).unwrap();
    containerd.resume().unwrap();
    ready(&agent, "late");
    assert_eq!(identity(&ready(&agent, "web")), identity(&before));
}

#[test]
fn an_agent_that_finds_no_containerd_waits_for_it() {
    require!(containerd);
    let mut containerd = Containerd::start_for_test().unwrap();
    containerd.stop().unwrap();
    let agent = Agent::start(installed(&containerd)).unwrap();
    agent.apply("web.yaml", manifests::serving("web").to_string()).unwrap();
    containerd.resume().unwrap();
    ready(&agent, "web");
}

#[test]
fn a_stopped_agent_leaves_pods_running() {
    require!(containerd);
    let (containerd, mut agent) = start();
    agent.apply("web.yaml", manifests::serving("web").to_string()).unwrap();
    ready(&agent, "web");
    let before = runtime_view(&containerd);
    let status = agent.terminate().unwrap();
    assert!(status.success(), "{status}: {}", agent.log());
    assert_eq!(runtime_view(&containerd), before);
    assert!(!agent.socket().exists(), "the socket outlived the agent");
}

#[test]
fn a_stopping_agent_with_the_flag_stops_its_pods_first() {
    require!(containerd);
    let containerd = Containerd::start_for_test().unwrap();
    let mut options = installed(&containerd);
    options.arguments.push("--stop-pods-on-exit".to_owned());
    let mut agent = Agent::start(options).unwrap();
    agent.apply("web.yaml", manifests::serving("web").to_string()).unwrap();
    ready(&agent, "web");
    let status = agent.terminate().unwrap();
    assert!(status.success(), "{status}: {}", agent.log());
    let running = |(_, state): &(String, i32)| *state == cri::ContainerState::ContainerRunning as i32;
    // A sandbox's READY is 0, a container's RUNNING is 1: only running containers match.
    let left: Vec<_> = runtime_view(&containerd).into_iter().filter(running).collect();
    assert_eq!(left, []);
    let processes = beelet_tests::guards::processes_below(&containerd.cgroup().dir("cpu").unwrap());
    assert!(processes.is_empty(), "{processes:?}");
}

#[test]
fn a_second_agent_on_the_same_state_or_the_same_runtime_is_refused() {
    require!(containerd);
    let (containerd, agent) = start();
    let pid = agent.pid().unwrap().to_string();
    let same_state = as_installed(Options::named(&containerd, "second"))
        .beelet("stateDir", agent.dir().join("state").display().to_string())
        .kubelet(
            "containerRuntimeEndpoint",
            format!("unix://{}", containerd.dir().join("other.sock").display()),
        );
    let same_runtime = as_installed(Options::named(&containerd, "third"));
    for (what, options) in [("state", same_state), ("runtime", same_runtime)] {
        let mut second = Agent::spawn(options).unwrap();
        let status = second.wait_for_exit().unwrap();
        assert!(!status.success(), "same {what}");
        assert!(
            second.log().contains(&pid),
            "same {what}: the error lacks the first agent's pid: {}",
            second.log()
        );
    }
    // The first agent is unaffected.
    agent.apply("web.yaml", manifests::serving("web").to_string()).unwrap();
    ready(&agent, "web");
}

#[test]
fn health_metrics_and_pods_are_served_over_http() {
    require!(containerd);
    let containerd = Containerd::start_for_test().unwrap();
    let options = installed(&containerd).http().unwrap().beelet("unauthenticatedPods", true);
    let agent = Agent::start(options).unwrap();
    agent.apply("web.yaml", manifests::serving("web").to_string()).unwrap();
    ready(&agent, "web");
    let (status, body) = workdir::wait_for("healthz to be ok", workdir::PATIENCE, || {
        agent
            .get("/healthz")
            .and_then(|answer| if answer.0 == 200 { Ok(answer) } else { anyhow::bail!("{answer:?}") })
    })
    .unwrap();
    assert_eq!((status, body.trim()), (200, "ok"));
    let (status, body) = agent.get("/pods").unwrap();
    let list: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &list["kind"]), (200, &serde_json::json!("PodList")));
    assert_eq!(list["items"][0]["status"]["phase"], "Running");
    let (status, body) = agent.get_as("/metrics", Format::OpenMetrics.accept()).unwrap();
    assert_eq!(status, 200);
    assert!(
        body.contains("kubelet_runtime_operations_total") && body.trim_end().ends_with("# EOF"),
        "{body}"
    );
    // The socket, too, is closed to other users than root.
    use std::os::unix::fs::MetadataExt as _;
    assert_eq!(std::fs::metadata(agent.socket()).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn a_containerd_that_hangs_or_dies_makes_the_node_not_ready_and_costs_no_pod_anything() {
    require!(containerd);
    let mut containerd = Containerd::start_for_test().unwrap();
    let agent = Agent::start(installed(&containerd).http().unwrap()).unwrap();
    agent.apply("web.yaml", manifests::serving("web").to_string()).unwrap();
    let before = identity(&ready(&agent, "web"));
    let until_health_is = |wanted: u16, words: &str| {
        let look = || match agent.get("/healthz") {
            Ok((status, body)) if status == wanted && body.contains(words) => Ok(()),
            other => Err(format!("{other:?}")),
        };
        workdir::wait_for(&format!("/healthz to say {words:?}"), workdir::PATIENCE, look).unwrap();
    };
    let silent = format!("the container runtime at {} has not answered since", containerd.endpoint());
    until_health_is(200, "ok");
    let hanging = containerd.hang().unwrap();
    until_health_is(500, &silent);
    drop(hanging);
    until_health_is(200, "ok");
    containerd.kill9();
    until_health_is(500, &silent);
    containerd.resume().unwrap();
    until_health_is(200, "ok");
    assert_eq!(identity(&ready(&agent, "web")), before);
}
