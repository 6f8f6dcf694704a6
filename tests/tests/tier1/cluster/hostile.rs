//! Tests of an API server with invalid responses: not an object, another kind, impossible fields.

use beelet_proto::cri::ContainerState;
use beelet_tests::apiserver::hostile::{self, Hostile};
use beelet_tests::apiserver::{FakeApi, Verb};
use beelet_tests::{manifests, require};
use serde_json::{Value, json};

use super::scene::{LEASE, Member};
use super::workload::{path, pod};

/// Number of requests that get each hostile response: enough for one round of all of the agent's requests.
const REQUESTS: usize = 20;
const NAMESPACE: &str = "/api/v1/namespaces/default";

/// Returns a node with a static pod and a pod of the API server that refers to objects.
async fn node() -> Member {
    let member = Member::start(FakeApi::start(), |options| options).await;
    member.scene.apply(&manifests::pod("file", &["/bin/testapp"]));
    member.api.put(&format!("{NAMESPACE}/configmaps/m"), json!({ "data": { "a": "1" } }));
    member.api.put(&format!("{NAMESPACE}/secrets/s"), json!({ "data": { "a": "MQ==" } }));
    let mut web = pod("web");
    web["spec"]["volumes"] = json!([
        { "name": "m", "configMap": { "name": "m" } },
        { "name": "s", "secret": { "secretName": "s" } },
    ]);
    member.api.put(&path("web"), web);
    member.until_running("web").await;
    member.scene.until_ready("file");
    member
}

/// Returns the containers of both pods, which must not change.
fn containers(member: &Member) -> Vec<(String, bool)> {
    let world = member.scene.cri.world();
    let all = world.containers.values();
    let mut all: Vec<_> =
        all.map(|one| (one.id.clone(), one.state == ContainerState::ContainerRunning)).collect();
    all.sort();
    all
}

/// Returns the statuses that the agent has written for pods that are not ready.
fn unready(member: &Member, first: usize) -> Vec<Value> {
    let asked = member.api.asked();
    let written = asked.iter().skip(first).filter(|asked| asked.is(Verb::Patch, &path("*/status")));
    let unready = |body: &&Value| {
        let conditions = body["status"]["conditions"].as_array().into_iter().flatten();
        conditions.into_iter().any(|one| one["type"] == "Ready" && one["status"] != "True")
    };
    written.map(|asked| &asked.body).filter(unready).cloned().collect()
}

async fn survives(member: &Member, answer: &Hostile) {
    let (before, first) = (containers(member), member.api.asked().len());
    member.api.on_any().always().answer_hostile(answer);
    // The agent requests all of its watches again.
    member.api.sever();
    let what = format!("{REQUESTS} requests to be answered with {}", answer.name);
    let enough = |api: &FakeApi| (api.asked().len() >= first + REQUESTS).then_some(());
    member.api.wait_until(&what, enough).await;
    member.scene.until_relisted();
    member.scene.is_well();
    member.api.heal();
    member.api.sever();
    let healed = member.api.asked().len();
    member.until_done(healed, Verb::Update, LEASE).await;
    member.scene.is_well();
    assert_eq!(containers(member), before, "after {}", answer.name);
    assert_eq!(unready(member, first), Vec::<Value>::new(), "after {}", answer.name);
}

/// Checks that the node works after all hostile responses.
async fn goes_on(member: &Member) {
    // The last hostile Node may make the agent refuse pods, so the agent must read the Node again first.
    let first = member.api.asked().len();
    member.api.sever();
    let of_node = |api: &FakeApi| {
        api.asked().iter().skip(first).any(|asked| asked.path.starts_with("/api/v1/nodes")).then_some(())
    };
    member.api.wait_until("a request for the Node", of_node).await;
    // The test replaces a pod that is still refused, as a controller would.
    for number in 0.. {
        let name = format!("late-{number}");
        member.api.put(&path(&name), pod(&name));
        let end = |api: &FakeApi| {
            let phase = api.get(&path(&name))?["status"]["phase"].as_str()?.to_owned();
            ["Running", "Failed"].contains(&phase.as_str()).then_some(phase)
        };
        if member.api.wait_until("a later pod to run or to be refused", end).await == "Running" {
            break;
        }
        assert!(number < 20, "every later pod is refused");
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
    member.api.delete(&path("web"));
    member.until_stopped("web");
    member.scene.until_ready("file");
    member.scene.is_well();
}

#[tokio::test]
async fn responses_that_are_not_objects_end_neither_the_agent_nor_a_pod() {
    require!(root);
    let member = node().await;
    for answer in hostile::bodies() {
        survives(&member, &answer).await;
    }
    goes_on(&member).await;
}

#[tokio::test]
async fn objects_with_impossible_fields_end_neither_the_agent_nor_a_pod() {
    require!(root);
    let member = node().await;
    for answer in hostile::alterations() {
        survives(&member, &answer).await;
    }
    goes_on(&member).await;
}
