use std::sync::Arc;

use beelet_policy::pod::{Container, ContainerState, Observed, Sandbox, why};
use beelet_proto::cri;
use beelet_spec::resize;
use serde_json::json;

use super::{containers::FORGOTTEN, *};
use crate::runtime_view::SandboxDetail;
use beelet_model::{ended::Ended, pod::HostIps, status::OomKill};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

mod ended;

const NOW: i64 = 1_700_000_100;

fn node() -> NodeFacts {
    beelet_spec::fixtures::node()
}

#[allow(clippy::needless_pass_by_value)] // callers pass the value of json!
fn pod(spec: serde_json::Value) -> core::Pod {
    serde_json::from_value(
        json!({"metadata": {"name": "web", "namespace": "shop", "uid": "u1"}, "spec": spec}),
    )
    .unwrap()
}

/// Containers as `name attempt state`, where state is `running`, `created` or `exit CODE`.
fn seen(containers: &[&str]) -> Observation {
    let sandbox = Sandbox { id: "s0".to_owned(), attempt: 0, ready: true };
    let mut seen = Observation {
        pod: Observed { sandboxes: vec![sandbox], containers: Vec::new() },
        sandbox: Some(SandboxDetail { id: "s0".to_owned(), ips: vec!["10.0.0.7".to_owned()], netns: None }),
        containers: BTreeMap::new(),
        processes: BTreeMap::new(),
    };
    for text in containers {
        let words: Vec<&str> = text.split(' ').collect();
        let id = format!("{}-{}", words[0], words[1]);
        let started = (NOW - 50) * 1_000_000_000;
        let mut status = cri::ContainerStatus { id: id.clone(), started_at: started, ..Default::default() };
        let started_at = Timestamp::from_second(NOW - 50).unwrap();
        let state = match words[2] {
            "running" => ContainerState::Running { started_at },
            "created" => ContainerState::Created,
            _ => {
                status.exit_code = words[3].parse().unwrap();
                status.finished_at = (NOW - 1) * 1_000_000_000;
                ContainerState::Exited {
                    exit_code: status.exit_code,
                    started_at: Some(started_at),
                    finished_at: Timestamp::from_second(NOW - 1).unwrap(),
                }
            }
        };
        seen.containers.insert(id.clone(), status.into());
        seen.pod.containers.push(Container {
            id,
            name: words[0].to_owned(),
            attempt: words[1].parse().unwrap(),
            sandbox_id: "s0".to_owned(),
            state,
            restart_delay: std::time::Duration::ZERO,
            round: 0,
        });
    }
    seen
}

#[derive(Default)]
struct Case {
    waiting: BTreeMap<String, Waiting>,
    condemned: BTreeMap<String, KillReason>,
    last_codes: BTreeMap<String, i32>,
    probes: BTreeMap<String, ProbeFacts>,
    previous: Option<core::PodStatus>,
    failure: Option<PodFailure>,
    holds_claims: bool,
    oom: BTreeMap<String, OomFacts>,
    now: Option<i64>,
    resize: ResizeFacts,
    node: Option<NodeFacts>,
}

impl Case {
    fn status(&self, pod: &core::Pod, seen: &Observation) -> core::PodStatus {
        self.with(pod, seen, |inputs| inputs.status())
    }

    fn with<T>(&self, pod: &core::Pod, seen: &Observation, work: impl FnOnce(Inputs<'_>) -> T) -> T {
        work(Inputs {
            pod,
            seen,
            waiting: &self.waiting,
            condemned: &self.condemned,
            last_codes: &self.last_codes,
            probes: &self.probes,
            previous: self.previous.as_ref(),
            failure: self.failure.as_ref(),
            holds_claims: self.holds_claims,
            resize: &self.resize,
            oom: &self.oom,
            node: &self.node.clone().unwrap_or_else(node),
            runtime_name: "containerd",
            now: Timestamp::from_second(self.now.unwrap_or(NOW)).unwrap(),
        })
    }
}

fn condition<'a>(status: &'a core::PodStatus, kind: &str) -> &'a core::PodCondition {
    status.conditions.as_ref().unwrap().iter().find(|c| c.type_ == kind).unwrap()
}

/// `phase Ready=… a: word` with a word for each container's state.
fn line(status: &core::PodStatus) -> String {
    let word = |c: &core::ContainerStatus| {
        let state = c.state.as_ref().unwrap();
        let word = if state.running.is_some() {
            "running".to_owned()
        } else if let Some(t) = &state.terminated {
            t.reason.clone().unwrap()
        } else {
            state.waiting.as_ref().and_then(|w| w.reason.clone()).unwrap()
        };
        format!("{}: {word}{}", c.name, if c.ready { " ready" } else { "" })
    };
    let all =
        status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    let words: Vec<String> = all.map(word).collect();
    format!(
        "{} Ready={} {}",
        status.phase.as_deref().unwrap(),
        condition(status, "Ready").status,
        words.join(", ")
    )
}

fn check(spec: serde_json::Value, containers: &[&str], case: &Case, expect: &str) {
    assert_eq!(line(&case.status(&pod(spec), &seen(containers))), expect);
}

fn one() -> serde_json::Value {
    json!({"containers": [{"name": "a", "image": "i"}]})
}

fn probed() -> serde_json::Value {
    json!({"containers": [{"name": "a", "image": "i", "readinessProbe": {"tcpSocket": {"port": 80}}}]})
}

#[test]
fn a_pod_without_probes_is_ready_as_soon_as_it_runs() {
    check(one(), &[], &Case::default(), "Pending Ready=False a: ContainerCreating");
    check(one(), &["a 0 created"], &Case::default(), "Pending Ready=False a: ContainerCreating");
    check(one(), &["a 0 running"], &Case::default(), "Running Ready=True a: running ready");
}

#[test]
fn a_probed_container_is_ready_when_its_probe_succeeds() {
    let with = |ready| Case {
        probes: [("a-0".to_owned(), ProbeFacts { ready, started: None })].into(),
        ..Case::default()
    };
    check(probed(), &["a 0 running"], &with(None), "Running Ready=False a: running");
    check(probed(), &["a 0 running"], &with(Some(false)), "Running Ready=False a: running");
    check(probed(), &["a 0 running"], &with(Some(true)), "Running Ready=True a: running ready");
    // A probe result of the previous instance does not apply to this one.
    check(probed(), &["a 0 exit 1", "a 1 running"], &with(Some(true)), "Running Ready=False a: running");
}

#[test]
fn a_probe_result_before_the_first_observation_changes_readiness() {
    let facts = |ready| [("a-0".to_owned(), ProbeFacts { ready: Some(ready), started: None })].into();
    let (pod, runs) = (pod(probed()), seen(&["a 0 running"]));
    let before = Case { probes: facts(false), ..Case::default() }.status(&pod, &runs);
    let after = |ready, known: &core::PodStatus| {
        let case = Case {
            probes: facts(ready),
            previous: Some(known.clone()),
            now: Some(NOW + 9),
            ..Case::default()
        };
        case.with(&pod, &Observation::default(), |inputs| inputs.known(known))
    };
    assert_eq!(after(false, &before), before);
    let open = after(true, &before);
    assert_eq!(line(&open), "Running Ready=True a: running ready");
    let changed = condition(&open, "ContainersReady");
    assert_eq!((changed.status.as_str(), &changed.reason), ("True", &None));
    assert_eq!(changed.last_transition_time.as_ref().unwrap().0.as_second(), NOW + 9);
    assert_eq!(condition(&open, "Initialized"), condition(&before, "Initialized"));
    assert_eq!(line(&after(false, &open)), "Running Ready=False a: running");
}

#[test]
fn a_crashed_container_waits_and_shows_its_end_as_the_last_state() {
    let waiting = Waiting { reason: "CrashLoopBackOff".to_owned(), message: "back-off".to_owned() };
    let case = Case { waiting: [("a".to_owned(), waiting)].into(), ..Case::default() };
    let status = case.status(&pod(one()), &seen(&["a 0 exit 3", "a 1 exit 7"]));
    assert_eq!(line(&status), "Running Ready=False a: CrashLoopBackOff");
    let container = &status.container_statuses.unwrap()[0];
    assert_eq!(container.restart_count, 1);
    assert_eq!(container.last_state.as_ref().unwrap().terminated.as_ref().unwrap().exit_code, 7);
}

#[test]
fn a_restarted_container_shows_how_the_one_before_it_ended() {
    let status = Case::default().status(&pod(one()), &seen(&["a 0 exit 3", "a 1 running"]));
    let last = status.container_statuses.unwrap()[0].last_state.clone().unwrap().terminated.unwrap();
    assert_eq!((last.exit_code, last.reason.as_deref()), (3, Some("Error")));
    assert_eq!(last.container_id.as_deref(), Some("containerd://a-0"));
}

#[test]
fn a_container_stopped_by_a_probe_ends_its_pod_only_if_it_never_restarts() {
    let phase = |policy: &str, reason: KillReason| {
        let spec = json!({"restartPolicy": policy, "containers": [{"name": "a", "image": "i"}]});
        let case = Case { condemned: [("a-0".to_owned(), reason)].into(), ..Case::default() };
        case.status(&pod(spec), &seen(&["a 0 exit 0"])).phase.unwrap()
    };
    assert_eq!(phase("OnFailure", KillReason::Liveness), "Running");
    assert_eq!(phase("OnFailure", KillReason::Startup), "Running");
    assert_eq!(phase("OnFailure", KillReason::PostStartHook), "Succeeded");
    assert_eq!(phase("Never", KillReason::Liveness), "Succeeded");
}

#[test]
fn a_pod_that_ended_is_not_ready_for_that_reason() {
    let spec = |policy: &str| json!({"restartPolicy": policy, "containers": [{"name": "a", "image": "i"}]});
    check(spec("Never"), &["a 0 exit 0"], &Case::default(), "Succeeded Ready=False a: Completed");
    check(spec("Never"), &["a 0 exit 1"], &Case::default(), "Failed Ready=False a: Error");
    check(spec("OnFailure"), &["a 0 exit 1"], &Case::default(), "Running Ready=False a: Error");
    let status = Case::default().status(&pod(spec("Never")), &seen(&["a 0 exit 0"]));
    assert_eq!(condition(&status, "Ready").reason.as_deref(), Some("PodCompleted"));
}

#[test]
fn containers_wait_for_their_init_containers() {
    let spec = || json!({"initContainers": [{"name": "i", "image": "i"}], "containers": [{"name": "a", "image": "i"}]});
    check(spec(), &["i 0 running"], &Case::default(), "Pending Ready=False i: running, a: PodInitializing");
    check(
        spec(),
        &["i 0 exit 0"],
        &Case::default(),
        "Pending Ready=False i: Completed ready, a: ContainerCreating",
    );
    check(
        spec(),
        &["i 0 exit 0", "a 0 running"],
        &Case::default(),
        "Running Ready=True i: Completed ready, a: running ready",
    );
}

#[test]
fn a_forgotten_init_container_counts_as_completed() {
    let spec = json!({
        "initContainers": [{"name": "init", "image": "i"}],
        "containers": [{"name": "a", "image": "i"}],
    });
    let check = |source: &str, previous: Option<core::PodStatus>, id: Option<&str>, message: Option<&str>| {
        let mut pod = pod(spec.clone());
        pod.metadata.annotations =
            Some([("kubernetes.io/config.source".to_owned(), source.to_owned())].into());
        let status = Case { previous, ..Case::default() }.status(&pod, &seen(&["a 0 running"]));
        assert_eq!(line(&status), "Running Ready=True init: Completed ready, a: running ready");
        let init = &status.init_container_statuses.unwrap()[0];
        let ended = init.state.as_ref().unwrap().terminated.as_ref().unwrap();
        assert_eq!(ended.container_id.as_deref(), id);
        assert_eq!(ended.message.as_deref(), message);
    };
    let before = || Case::default().status(&pod(spec.clone()), &seen(&["init 0 exit 0", "a 0 running"]));
    check("file", None, None, Some(FORGOTTEN));
    check("api", None, None, Some(FORGOTTEN));
    check("file", Some(before()), Some("containerd://init-0"), Some(FORGOTTEN));
    check("api", Some(before()), Some("containerd://init-0"), None);
}

#[test]
fn a_sidecar_counts_for_readiness() {
    let spec = || {
        json!({
            "initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always", "readinessProbe": {"tcpSocket": {"port": 1}}}],
            "containers": [{"name": "a", "image": "i"}]
        })
    };
    let ready = Case {
        probes: [("s-0".to_owned(), ProbeFacts { ready: Some(true), started: None })].into(),
        ..Case::default()
    };
    check(
        spec(),
        &["s 0 running", "a 0 running"],
        &Case::default(),
        "Running Ready=False s: running, a: running ready",
    );
    check(
        spec(),
        &["s 0 running", "a 0 running"],
        &ready,
        "Running Ready=True s: running ready, a: running ready",
    );
}

#[test]
fn a_resize_of_the_pod_as_a_whole_is_in_progress_until_its_cgroup_has_it() {
    let p = |cpu: &str| {
        pod(
            json!({"resources": {"limits": {"cpu": cpu}, "requests": {"cpu": "1"}}, "containers": [{"name": "a", "image": "i"}]}),
        )
    };
    let limit = |status: &core::PodStatus| status.resources.clone().unwrap().limits.unwrap()["cpu"].0.clone();
    let in_progress = |status: &core::PodStatus| {
        status.conditions.iter().flatten().any(|one| one.type_ == resize::IN_PROGRESS)
    };
    let seen = seen(&["a 0 running"]);
    let first = Case::default().status(&p("2"), &seen);
    assert_eq!((limit(&first).as_str(), in_progress(&first)), ("2", false));
    assert_eq!(first.allocated_resources.as_ref().unwrap()["cpu"].0, "1");
    let mut second = Case { previous: Some(first), ..Case::default() }.status(&p("3"), &seen);
    assert_eq!((limit(&second).as_str(), in_progress(&second)), ("2", true));
    resize::enact(&mut second, "u1", &BTreeMap::from([("u1".to_owned(), pod_amounts(&p("3")))]));
    let third = Case { previous: Some(second), ..Case::default() }.status(&p("3"), &seen);
    assert_eq!((limit(&third).as_str(), in_progress(&third)), ("3", false));
}

#[test]
fn a_restart_of_all_containers_does_not_end_the_pod() {
    let spec = json!({
        "restartPolicy": "Never",
        "initContainers": [{"name": "i", "image": "i"}],
        "containers": [
            {"name": "a", "image": "i", "restartPolicy": "Never", "restartPolicyRules": [
                {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}
            ]},
            {"name": "b", "image": "i"},
        ]
    });
    let p = pod(spec);
    let condition_of = |status: &core::PodStatus| {
        let one = condition(status, "AllContainersRestarting");
        (one.status.clone(), one.reason.clone().unwrap_or_default())
    };
    let seen_with = |containers: &[&str]| Case::default().status(&p, &seen(containers));
    let before = seen_with(&["i 0 exit 0", "a 0 running", "b 0 running"]);
    assert_eq!(condition_of(&before), ("False".to_owned(), String::new()));
    let during = seen_with(&["i 0 exit 0", "a 0 exit 42", "b 0 exit 137"]);
    assert_eq!(during.phase.as_deref(), Some("Running"));
    assert_eq!(condition_of(&during), ("True".to_owned(), "RestartAllContainersStarted".to_owned()));
    assert_eq!(condition(&during, "Initialized").status, "True");
    let waiting = |status: &core::ContainerStatus| {
        status.state.as_ref().unwrap().waiting.as_ref().unwrap().reason.clone().unwrap()
    };
    let own = during.container_statuses.unwrap();
    let init = during.init_container_statuses.unwrap();
    assert!(
        own.iter().chain(&init).all(|status| waiting(status) == "RestartingAllContainers" && !status.ready)
    );
    assert_eq!(own[0].last_state.as_ref().unwrap().terminated.as_ref().unwrap().exit_code, 42);
}

#[test]
fn an_ephemeral_container_has_a_status_of_its_own() {
    let spec = json!({
        "containers": [{"name": "a", "image": "i"}],
        "ephemeralContainers": [{"name": "e", "image": "tools"}, {"name": "f", "image": "tools"}]
    });
    let status = Case::default().status(&pod(spec), &seen(&["a 0 running", "e 0 exit 1"]));
    assert_eq!(
        (status.phase.as_deref(), condition(&status, "Ready").status.as_str()),
        (Some("Running"), "True")
    );
    let all = status.ephemeral_container_statuses.unwrap();
    let state = |index: usize| all[index].state.clone().unwrap();
    assert_eq!(state(0).terminated.unwrap().exit_code, 1);
    assert_eq!(state(1).waiting.unwrap().reason.as_deref(), Some("ContainerCreating"));
    assert!(all.iter().all(|one| !one.ready && one.started.is_none()));
}

#[test]
fn a_container_shows_its_user_and_its_volume_mounts() {
    let mount = |path: &str, read_only: bool, recursive: &str| json!({"name": "v", "mountPath": path, "readOnly": read_only, "recursiveReadOnly": recursive});
    let spec = json!({"containers": [{"name": "a", "image": "i", "volumeMounts": [
        {"name": "v", "mountPath": "/rw"}, mount("/ro", true, "Disabled"), mount("/asked", true, "Enabled"),
        mount("/possible", true, "IfPossible"),
    ]}]});
    let shown = |seen: &Observation| {
        let status = Case::default().status(&pod(spec.clone()), seen);
        let status = status.container_statuses.unwrap().remove(0);
        let mounts = status.volume_mounts.unwrap().into_iter();
        (mounts.map(|mount| mount.recursive_read_only).collect::<Vec<_>>(), status.user)
    };
    let word = |word: &str| Some(word.to_owned());
    let asked = [None, word("Disabled"), word("Enabled"), word("Disabled")].to_vec();
    assert_eq!(shown(&seen(&[])), (asked, None));
    let mut made = seen(&["a 0 running"]);
    let status = made.containers.get_mut("a-0").and_then(Arc::get_mut).unwrap();
    for container_path in ["/asked", "/possible"] {
        let container_path = container_path.to_owned();
        status.mounts.push(cri::Mount { container_path, recursive_read_only: true, ..Default::default() });
    }
    let linux = cri::LinuxContainerUser { uid: 1000, gid: 1001, supplemental_groups: vec![1001, 7] };
    status.user = Some(cri::ContainerUser { linux: Some(linux) });
    let (mounts, user) = shown(&made);
    assert_eq!(mounts, [None, word("Disabled"), word("Enabled"), word("Enabled")]);
    let linux = user.unwrap().linux.unwrap();
    assert_eq!((linux.uid, linux.gid, linux.supplemental_groups), (1000, 1001, Some(vec![1001, 7])));
}

#[test]
fn a_condition_keeps_its_time_while_its_status_stays() {
    let p = pod(probed());
    let first = Case::default().status(&p, &seen(&["a 0 running"]));
    let later = Case { previous: Some(first.clone()), now: Some(NOW + 60), ..Case::default() };
    let same = later.status(&p, &seen(&["a 0 running"]));
    assert_eq!(same, first);
    let ready = Case {
        probes: [("a-0".to_owned(), ProbeFacts { ready: Some(true), started: None })].into(),
        ..later
    };
    let changed = ready.status(&p, &seen(&["a 0 running"]));
    let time = |status: &core::PodStatus, kind: &str| {
        condition(status, kind).last_transition_time.clone().unwrap().0.as_second()
    };
    assert_eq!(time(&changed, "Ready"), NOW + 60);
    assert_eq!(time(&changed, "Initialized"), NOW);
    assert_eq!(changed.start_time, first.start_time);
}

#[test]
fn a_pod_keeps_its_last_address_until_it_has_another() {
    let first = Case::default().status(&pod(one()), &seen(&["a 0 running"]));
    let ip = |seen: &Observation| {
        let case = Case { previous: Some(first.clone()), ..Case::default() };
        let status = case.status(&pod(one()), seen);
        assert_eq!(status.pod_ips.map(|ips| ips.len()), Some(1));
        status.pod_ip.unwrap()
    };
    assert_eq!(first.pod_ip.as_deref(), Some("10.0.0.7"));
    let mut changed = seen(&["a 0 exit 0"]);
    changed.sandbox = None;
    assert_eq!(ip(&changed), "10.0.0.7");
    changed.sandbox =
        Some(SandboxDetail { id: "s1".to_owned(), ips: vec!["10.0.0.8".to_owned()], netns: None });
    assert_eq!(ip(&changed), "10.0.0.8");
}

#[test]
fn a_host_network_pod_has_the_nodes_address() {
    let spec = json!({"hostNetwork": true, "containers": [{"name": "a", "image": "i"}]});
    let status = Case::default().status(&pod(spec), &seen(&["a 0 running"]));
    assert_eq!(status.pod_ip.as_deref(), Some("192.0.2.1"));
}

#[test]
fn a_node_of_both_families_shows_both_and_its_own_first() {
    let mut node = node();
    node.host = HostIps::fixed(vec!["fd00::1".parse().unwrap(), [192, 0, 2, 1].into()]);
    let ips = |spec: serde_json::Value| {
        let case = Case { node: Some(node.clone()), ..Case::default() };
        let mut told = seen(&["a 0 running"]);
        told.sandbox.as_mut().unwrap().ips = ["10.0.0.7", "10.0.0.8", "fd00::7"].map(str::to_owned).to_vec();
        let status = case.status(&pod(spec), &told);
        let hosts: Vec<String> = status.host_ips.unwrap().into_iter().map(|host| host.ip).collect();
        assert_eq!(
            (status.host_ip.as_deref(), hosts.join(" ").as_str()),
            (Some("fd00::1"), "fd00::1 192.0.2.1")
        );
        status.pod_ips.unwrap().into_iter().map(|pod| pod.ip).collect::<Vec<_>>().join(" ")
    };
    let containers = json!([{"name": "a", "image": "i"}]);
    assert_eq!(ips(json!({"containers": containers})), "fd00::7 10.0.0.7");
    assert_eq!(ips(json!({"hostNetwork": true, "containers": containers})), "fd00::1 192.0.2.1");
}
