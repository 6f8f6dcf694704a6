//! Hooks, deadlines, ends and events of pods on a real containerd.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use crate::node::installed;
use beelet_tests::agent::{Agent, Control};
use beelet_tests::containerd::Containerd;
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::pods::PodView;
use beelet_tests::require;
use beelet_tests::workdir::{self, PATIENCE};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn start() -> (Containerd, Agent) {
    let containerd = Containerd::start_for_test().unwrap();
    let agent = Agent::start(installed(&containerd)).unwrap();
    (containerd, agent)
}

fn apply(agent: &Agent, manifest: &Value) {
    let name = manifest["metadata"]["name"].as_str().unwrap();
    agent.apply(&format!("{name}.yaml"), manifest.to_string()).unwrap();
}

fn wait(
    agent: &Agent,
    name: &str,
    what: &str,
    condition: impl Fn(&PodView) -> bool + Send + Sync,
) -> PodView {
    let what = format!("{name} {what}");
    agent.until(&what, |watch| watch.pod(name).filter(|pod| condition(pod)).cloned()).unwrap()
}

fn wait_gone(agent: &Agent, name: &str) {
    agent.until(&format!("{name} to be removed"), |watch| watch.pod(name).is_none().then_some(())).unwrap();
}

/// Returns the output of the command line.
fn shown(agent: &Agent, arguments: &[&str]) -> String {
    let output = agent.cli(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn waits_for(pod: &PodView, reason: &str) -> bool {
    let state = pod.container("main").and_then(|main| main.state.clone());
    state.and_then(|state| state.waiting?.reason).is_some_and(|found| found == reason)
}

#[test]
fn hooks_run_in_and_around_real_containers() {
    require!(containerd);
    let (_containerd, agent) = start();
    // The agent waits for the pauses, and sends the request to the app before the app's end.
    let pauses =
        json!({ "postStart": { "sleep": { "seconds": 1 } }, "preStop": { "sleep": { "seconds": 1 } } });
    apply(&agent, &manifests::with(manifests::answering("hooked"), "lifecycle", pauses));
    let asked = json!({ "preStop": { "httpGet": { "path": "/stop", "port": PORT } } });
    apply(&agent, &manifests::with(manifests::answering("asked"), "lifecycle", asked));
    let failing = json!({ "postStart": { "exec": { "command": ["/bin/testapp", "nonsense"] } } });
    apply(
        &agent,
        &manifests::with(manifests::pod("failing", &["/bin/testapp", "pause"]), "lifecycle", failing),
    );
    wait(&agent, "hooked", "to be ready", PodView::ready);
    wait(&agent, "failing", "to back off", |pod| waits_for(pod, "CrashLoopBackOff"));
    let began = Instant::now();
    agent.remove("hooked.yaml").unwrap();
    wait_gone(&agent, "hooked");
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    wait(&agent, "asked", "to be ready", PodView::ready);
    agent.remove("asked.yaml").unwrap();
    wait_gone(&agent, "asked");
    let events = shown(&agent, &["events", "--for", "asked-testnode"]);
    assert!(events.contains("Stopping container main") && !events.contains("FailedPreStopHook"), "{events}");
    let events = shown(&agent, &["events", "--for", "failing-testnode"]);
    for expected in ["FailedPostStartHook", "usage: testapp", "Started container main", "BackOff"] {
        assert!(events.contains(expected), "{expected} is missing in\n{events}");
    }
    let described = shown(&agent, &["describe", "pod", "failing"]);
    for expected in ["CrashLoopBackOff", "FailedPostStartHook", "Restart Count:", "QoS Class:"] {
        assert!(described.contains(expected), "{expected} is missing in\n{described}");
    }
}

#[test]
fn a_pod_past_its_deadline_fails_permanently_and_releases_everything() {
    require!(containerd);
    let (containerd, mut agent) = start();
    let mut pod = manifests::pod("late", &["/bin/testapp", "pause"]);
    pod["spec"]["activeDeadlineSeconds"] = json!(3);
    apply(&agent, &pod);
    let failed = |pod: &PodView| {
        pod.phase() == "Failed"
            && pod.pod.status.as_ref().unwrap().reason.as_deref() == Some("DeadlineExceeded")
    };
    let pod = wait(&agent, "late", "to fail", failed);
    let path = beelet_tests::cgroup_values::pod_path("BestEffort", pod.uid());
    // The pod fails once none of its processes runs, and releases the rest then.
    let cgroup = containerd.cgroup().folder("pids", &path).unwrap();
    let is_gone = || if cgroup.exists() { Err("the cgroup still exists") } else { Ok(()) };
    workdir::wait_for("the pod's cgroup to be removed", PATIENCE, is_gone).unwrap();
    agent.kill9();
    agent.resume().unwrap();
    wait(&agent, "late", "to stay failed", failed);
    let described = shown(&agent, &["describe", "pod", "late"]);
    assert!(described.contains("Reason:               DeadlineExceeded"), "{described}");
}

#[test]
fn a_killed_container_is_restarted_and_its_end_reported() {
    require!(containerd);
    let containerd = Containerd::start_for_test().unwrap();
    let agent = Agent::start(installed(&containerd).http().unwrap()).unwrap();
    apply(&agent, &manifests::serving("web"));
    let pod = wait(&agent, "web", "to be ready", PodView::ready);
    let before = ends_reported_by_the_kernel(&agent);
    let path = beelet_tests::cgroup_values::pod_path(pod.qos(), pod.uid());
    let id = pod.container("main").unwrap().container_id.clone().unwrap();
    let id = id.split("//").nth(1).unwrap();
    let dir = containerd.cgroup().folder("pids", &format!("{path}/{id}")).unwrap();
    for process in beelet_tests::guards::processes_below(&dir) {
        rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    }
    let again = wait(&agent, "web", "to run again", |pod| pod.restarts() == 1 && pod.ready());
    let last = again.container("main").unwrap().last_state.clone().unwrap().terminated.unwrap();
    assert_eq!((last.exit_code, last.reason.as_deref()), (137, Some("Error")));
    // The kernel is the first to report exits, on machines with the programs.
    if let Err(missing) = beelet_tests::requires::bpf() {
        beelet_tests::requires::skip(&missing);
        return;
    }
    assert_eq!(ends_reported_by_the_kernel(&agent), before + 1, "{}", agent.get("/metrics").unwrap().1);
}

/// Returns the number of containers' ends that the kernel reported first.
fn ends_reported_by_the_kernel(agent: &Agent) -> u64 {
    let (_, metrics) = agent.get("/metrics").unwrap();
    let series = "beelet_container_exits_total{source=\"kernel\"} ";
    metrics.lines().find_map(|line| line.strip_prefix(series)?.parse().ok()).unwrap_or(0)
}

#[test]
fn a_rule_restarts_the_whole_pod_in_its_sandbox() {
    require!(containerd);
    let (_containerd, agent) = start();
    let mut pod = manifests::serving("whole");
    pod["spec"]["restartPolicy"] = json!("Never");
    pod["spec"]["initContainers"] = json!([{
        "name": "first", "image": beelet_tests::images::APP, "command": ["/bin/testapp", "probe", "ok"],
    }]);
    pod["spec"]["containers"][0]["restartPolicy"] = json!("Never");
    pod["spec"]["containers"][0]["restartPolicyRules"] =
        json!([{ "action": "RestartAllContainers", "exitCodes": { "operator": "In", "values": [42] } }]);
    pod["spec"]["containers"].as_array_mut().unwrap().push(json!({
        "name": "other", "image": beelet_tests::images::APP, "command": ["/bin/testapp", "pause"],
    }));
    apply(&agent, &pod);
    let before = wait(&agent, "whole", "to be ready", PodView::ready);
    // The process ends before it can answer.
    let _ = Control::connect(before.ip().unwrap(), CONTROL).unwrap().send("exit 42");
    let restarted = |pod: &PodView| {
        let status = pod.pod.status.as_ref().unwrap();
        let all = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
        pod.ready() && all.into_iter().all(|container| container.restart_count == 1)
    };
    let after = wait(&agent, "whole", "to run again as a whole", restarted);
    assert_eq!((after.ip(), after.phase()), (before.ip(), "Running"));
}

#[test]
fn a_real_container_is_resized_by_a_restart_if_its_policy_requires_it() {
    require!(containerd);
    let (containerd, agent) = start();
    let sized = |memory: &str| {
        let pod = manifests::with_resources(manifests::serving("sized"), ("", "16Mi"), ("", memory));
        let policy = json!([{ "resourceName": "memory", "restartPolicy": "RestartContainer" }]);
        manifests::with(pod, "resizePolicy", policy)
    };
    apply(&agent, &sized("64Mi"));
    let before = wait(&agent, "sized", "to be ready", PodView::ready);
    apply(&agent, &sized("96Mi"));
    let after = wait(&agent, "sized", "to be restarted", |pod| pod.restarts() == 1 && pod.ready());
    assert_eq!((after.uid(), after.ip()), (before.uid(), before.ip()));
    assert_eq!(memory_limit(&containerd, &after), 96 << 20);
}

#[test]
fn a_real_pod_is_held_to_its_resources_as_a_whole() {
    require!(containerd);
    let (containerd, agent) = start();
    let mut pod = manifests::pod("shared", &["/bin/testapp", "pause"]);
    pod["spec"]["resources"] = json!({ "limits": { "cpu": "500m", "memory": "64Mi" } });
    apply(&agent, &pod);
    let pod = wait(&agent, "shared", "to be ready", PodView::ready);
    assert_eq!(pod.qos(), "Guaranteed");
    assert_eq!(memory_limit(&containerd, &pod), 64 << 20);
}

/// Returns the memory limit of a pod's cgroup.
fn memory_limit(containerd: &Containerd, pod: &PodView) -> u64 {
    let path = beelet_tests::cgroup_values::pod_path(pod.qos(), pod.uid());
    let dir = containerd.cgroup().folder("memory", &path).unwrap();
    let files = ["memory.max", "memory.limit_in_bytes"].map(|file| std::fs::read_to_string(dir.join(file)));
    files.into_iter().flatten().find_map(|text| text.trim().parse().ok()).unwrap()
}
