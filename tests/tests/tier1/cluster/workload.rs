//! Tests of the API server's pods on the node, with every fault of the server.

use beelet_proto::cri::ContainerState;
use beelet_tests::agent::{NODE, Options};
use beelet_tests::apiserver::{FakeApi, Verb};
use beelet_tests::cri::Op;
use beelet_tests::{manifests, require};
use serde_json::{Value, json};

use super::scene::{Member, status_of};

const PODS: &str = "/api/v1/pods";
const STATUS: &str = "/api/v1/namespaces/default/pods/*/status";

pub(crate) fn path(name: &str) -> String {
    format!("/api/v1/namespaces/default/pods/{name}")
}

/// Returns a pod with the defaults that an API server sets.
pub(crate) fn pod(name: &str) -> Value {
    let mut pod = manifests::pod(name, &["/bin/testapp"]);
    pod["spec"]["nodeName"] = NODE.into();
    pod["spec"]["restartPolicy"] = "Always".into();
    pod["spec"]["dnsPolicy"] = "ClusterFirst".into();
    pod["spec"]["schedulerName"] = "default-scheduler".into();
    pod["spec"]["enableServiceLinks"] = false.into();
    pod["spec"]["securityContext"] = json!({});
    let container = &mut pod["spec"]["containers"][0];
    container["imagePullPolicy"] = "IfNotPresent".into();
    container["terminationMessagePath"] = "/dev/termination-log".into();
    container["terminationMessagePolicy"] = "File".into();
    container["resources"] = json!({});
    pod
}

impl Member {
    /// Waits until `wanted` accepts the API server's pod.
    async fn until_pod(&self, name: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let what = format!("{name} {what}");
        self.api.wait_until(&what, |api| api.get(&path(name)).filter(|pod| wanted(pod))).await
    }

    pub(crate) async fn until_running(&self, name: &str) -> Value {
        let is_ready = |pod: &Value| status_of(pod, "Ready").as_deref() == Some("True");
        self.until_pod(name, "to be ready", is_ready).await
    }

    pub(crate) async fn until_forgotten(&self, name: &str) {
        let gone = |api: &FakeApi| api.get(&path(name)).is_none().then_some(());
        self.api.wait_until(&format!("{name} to be forgotten"), gone).await;
    }

    /// Waits until no container of the pod runs.
    pub(crate) fn until_stopped(&self, name: &str) {
        self.scene.poll_until(&format!("{name} to be stopped"), || {
            if self.runs(name) { Err("still running".to_owned()) } else { Ok(()) }
        });
    }

    pub(crate) fn runs(&self, name: &str) -> bool {
        let container = self.scene.cri.container(name, "main");
        container.is_some_and(|container| container.state == ContainerState::ContainerRunning)
    }

    fn container(&self, name: &str) -> String {
        self.scene.cri.container(name, "main").unwrap().id
    }
}

#[tokio::test]
async fn a_pod_runs_is_reported_and_is_deleted_after_its_containers() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let made = member.api.put(&path("web"), pod("web"));
    let found = member.until_running("web").await;
    let status = &found["status"];
    assert_eq!(status["phase"], "Running");
    assert_eq!(status["containerStatuses"][0]["name"], "main");
    assert!(status["containerStatuses"][0]["state"]["running"]["startedAt"].is_string(), "{status:#}");
    assert!(status["podIP"].is_string() && status["startTime"].is_string(), "{status:#}");
    assert_eq!(status["qosClass"], "BestEffort");
    let container = member.container("web");

    let first = member.api.asked().len();
    member.api.delete(&path("web"));
    let last = member.until_done(first, Verb::Delete, &path("web")).await;
    assert_eq!(last.body["gracePeriodSeconds"], 0);
    assert_eq!(last.body["preconditions"]["uid"], made["metadata"]["uid"]);
    member.until_forgotten("web").await;
    // The container was stopped with its grace period, not killed.
    let stopped =
        member.scene.cri.calls().into_iter().any(|call| call.op() == Op::StopContainer && call.succeeded());
    assert!(stopped, "{container} was never stopped");
    assert!(!member.runs("web"), "{container} runs on");
    // The name can be used again.
    member.api.put(&path("web"), pod("web"));
    member.until_running("web").await;
    member.scene.is_well();
}

#[tokio::test]
async fn each_pod_gets_the_resolv_conf_at_its_start_and_waits_while_it_is_missing() {
    require!(root);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("resolv.conf");
    let options = |options: Options| options.kubelet("resolvConf", file.display().to_string());
    let member = Member::start(FakeApi::start(), options).await;
    member.api.put(&path("first"), pod("first"));
    member
        .until_event("FailedCreatePodSandBox", "Failed to create pod sandbox: cannot read resolvConf /")
        .await;
    for (name, server) in [("first", "10.9.8.1"), ("second", "10.9.8.2")] {
        std::fs::write(&file, format!("nameserver {server}\n")).unwrap();
        if member.api.get(&path(name)).is_none() {
            member.api.put(&path(name), pod(name));
        }
        member.until_running(name).await;
        let sandbox = member.scene.cri.sandbox(name).unwrap();
        assert_eq!(sandbox.config.dns_config.unwrap().servers, [server]);
    }
    member.scene.is_well();
}

#[tokio::test]
async fn a_pod_that_was_deleted_by_force_is_stopped() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    member.api.put(&path("web"), pod("web"));
    member.until_running("web").await;
    member.api.remove(&path("web"));
    member.until_stopped("web");
    // The agent sends no status of the deleted pod.
    member.api.put(&path("other"), pod("other"));
    member.until_running("other").await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_status_arrives_after_the_server_was_away() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    member.api.put(&path("web"), pod("web"));
    member.until_running("web").await;
    member.api.crash();
    member.scene.cri.exit(&member.container("web"), 3);
    let restarted = |api: &Value| api["status"]["containerStatuses"][0]["restartCount"] == 1;
    member
        .scene
        .until("web to be restarted", |watch| watch.pod("web").filter(|pod| pod.restarts() == 1).map(drop));
    assert!(!restarted(&member.api.get(&path("web")).unwrap()));
    member.api.come_back();
    let pod = member.until_pod("web", "to show the restart", restarted).await;
    let last = &pod["status"]["containerStatuses"][0]["lastState"]["terminated"];
    assert_eq!(last["exitCode"], 3, "{pod:#}");
    member.scene.is_well();
}

#[tokio::test]
async fn a_status_arrives_through_every_kind_of_refusal() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    member.api.on(Verb::Patch, STATUS).refuse(500, "etcd is away");
    member.api.on(Verb::Patch, STATUS).throttle(1);
    member.api.on(Verb::Patch, STATUS).refuse(409, "the object has been modified");
    member.api.on(Verb::Patch, STATUS).drop_connection();
    member.api.on(Verb::Patch, STATUS).lose_reply();
    member.api.put(&path("web"), pod("web"));
    member.until_running("web").await;
    // The faults of this pod's requests do not delay another pod.
    let held = member.api.on(Verb::Patch, STATUS).when(|asked| asked.path.contains("/slow/")).hold();
    member.api.put(&path("slow"), pod("slow"));
    held.reached().await;
    member.api.put(&path("other"), pod("other"));
    member.until_running("other").await;
    held.release();
    member.until_running("slow").await;
    member.api.on(Verb::Delete, &path("web")).times(2).refuse(500, "etcd is away");
    member.api.delete(&path("web"));
    member.until_forgotten("web").await;
    member.scene.is_well();
}

#[tokio::test]
async fn pods_are_followed_through_watches_that_break_and_are_too_old() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let watched = |api: &FakeApi| api.watched().iter().any(|path| path == PODS).then_some(());
    let api = &member.api;
    let through = async |what: &str, harm: &dyn Fn()| {
        let (gone, new) = (format!("{what}-gone"), format!("{what}-new"));
        api.wait_until("a watch of the pods", watched).await;
        api.put(&path(&gone), pod(&gone));
        member.until_running(&gone).await;
        api.wait_until("a watch of the pods", watched).await;
        harm();
        // The changes happen without a watch, or arrive through the new watch.
        api.remove(&path(&gone));
        api.put(&path(&new), pod(&new));
        if what == "old" {
            api.compact();
        }
        member.until_stopped(&gone);
        member.until_running(&new).await;
    };
    through("ended", &|| api.end_watches(PODS)).await;
    through("cut", &|| {
        api.say(PODS, r#"{"type":"MODIFIED","obj"#);
        api.break_watches(PODS);
    })
    .await;
    through("old", &|| api.break_watches(PODS)).await;
    through("noise", &|| api.say(PODS, "noise\n")).await;
    through("past", &|| {
        api.say(PODS, "{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"1\"}}}\n");
        api.end_watches(PODS);
    })
    .await;
    member.scene.is_well();
}

#[tokio::test]
async fn an_empty_list_by_mistake_stops_nothing() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    member.api.put(&path("web"), pod("web"));
    member.until_running("web").await;
    let container = member.container("web");
    let first = member.api.asked().len();
    member.api.on(Verb::List, PODS).answer_empty_list();
    member.api.put("/api/v1/nodes/other", json!({ "metadata": { "name": "other" } }));
    member.api.compact();
    member.api.break_watches(PODS);
    let empty = member.until_done(first, Verb::List, PODS).await;
    member.until_done(empty.number + 1, Verb::List, PODS).await;
    // The agent continues with the second list.
    member.api.put(&path("other"), pod("other"));
    member.until_running("other").await;
    assert_eq!(member.container("web"), container);
    assert_eq!(member.scene.cri.count(Op::StopContainer), 0, "{}", member.scene.cri.transcript());
    member.scene.is_well();
}

#[tokio::test]
async fn an_agent_that_starts_without_its_server_stops_nothing() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| options).await;
    member.api.put(&path("web"), pod("web"));
    member.until_running("web").await;
    let container = member.container("web");
    member.scene.agent.kill9();
    member.api.crash();
    member.scene.agent.resume().unwrap();
    member.scene.until_relisted();
    assert_eq!(member.scene.cri.count(Op::StopContainer), 0, "{}", member.scene.cri.transcript());
    member.api.come_back();
    // The agent has the pods again, and follows them.
    member.api.put(&path("other"), pod("other"));
    member.until_running("other").await;
    assert_eq!(member.container("web"), container);
    member.api.delete(&path("web"));
    member.until_forgotten("web").await;
    member.scene.is_well();
}
