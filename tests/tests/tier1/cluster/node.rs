//! Tests of the Node object and its lease.

use beelet_tests::apiserver::{FakeApi, Verb};
use beelet_tests::cri::Asked;
use beelet_tests::require;
use serde_json::{Value, json};

use super::scene::{LEASE, Member, NODES, node, own_node, status_of};

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";

#[tokio::test]
async fn a_node_is_registered_once_with_its_status_and_keeps_a_lease() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let found = member.api.get(&own_node()).unwrap();
    assert_eq!(member.api.count(Verb::Create, NODES), 1);
    assert_eq!(found["metadata"]["labels"]["kubernetes.io/os"], "linux");
    assert_eq!(found["metadata"]["labels"]["kubernetes.io/hostname"], "testnode");
    for resource in ["cpu", "memory", "pods", "ephemeral-storage"] {
        for list in ["capacity", "allocatable"] {
            assert!(found["status"][list][resource].is_string(), "{list} {resource}: {found:#}");
        }
    }
    for kind in ["MemoryPressure", "DiskPressure", "PIDPressure"] {
        assert_eq!(status_of(&found, kind).as_deref(), Some("False"), "{kind}: {found:#}");
    }
    let addresses = found["status"]["addresses"].as_array().unwrap();
    assert!(addresses.contains(&json!({ "type": "InternalIP", "address": "192.0.2.7" })), "{addresses:?}");

    // The lease is created once, then renewed with one request each.
    member.until_done(0, Verb::Create, LEASES).await;
    let first = member.until_done(0, Verb::Update, LEASE).await;
    member.until_done(first.number + 1, Verb::Update, LEASE).await;
    let lease = member.api.get(LEASE).unwrap();
    assert_eq!(lease["spec"]["holderIdentity"], "testnode");
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 4);
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], found["metadata"]["uid"]);
    assert_eq!(member.api.count(Verb::Create, LEASES), 1);
    member.scene.is_well();
}

#[tokio::test]
async fn an_existing_node_is_adopted_with_the_fields_of_others() {
    require!(root);
    let api = FakeApi::start();
    let theirs = json!({ "type": "Theirs", "status": "True" });
    let metadata = json!({ "name": "testnode", "labels": { "theirs": "yes" }, "annotations": { "a": "b" } });
    let mut before = node(&metadata, &json!({ "conditions": [theirs] }));
    before["spec"]["taints"] = json!([{ "key": "theirs", "effect": "NoSchedule" }]);
    let before = api.put(&own_node(), before);
    let member = Member::start(api, |options| options).await;
    let after = member.api.get(&own_node()).unwrap();
    assert_eq!(after["metadata"]["uid"], before["metadata"]["uid"]);
    assert_eq!(after["metadata"]["labels"]["theirs"], "yes");
    assert_eq!(after["metadata"]["labels"]["kubernetes.io/os"], "linux");
    assert_eq!(after["metadata"]["annotations"]["a"], "b");
    assert_eq!(after["spec"]["taints"], before["spec"]["taints"]);
    assert_eq!(status_of(&after, "Theirs").as_deref(), Some("True"));
    assert_eq!(member.api.count(Verb::Create, NODES), 0);
}

#[tokio::test]
async fn a_deleted_node_is_registered_again_with_its_own_lease() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    member.until_done(0, Verb::Create, LEASES).await;
    let before = member.api.remove(&own_node());
    let after = member.until_ready().await;
    assert_ne!(after["metadata"]["uid"], before["metadata"]["uid"]);
    let owner = |api: &FakeApi| Some(api.get(LEASE)?["metadata"]["ownerReferences"][0]["uid"].clone());
    let wanted = Some(after["metadata"]["uid"].clone());
    member.api.wait_until("the lease to be the new Node's", |api| (owner(api) == wanted).then_some(())).await;
    // The lease itself may be deleted, too.
    let first = member.api.asked().len();
    member.api.remove(LEASE);
    member.until_done(first, Verb::Create, LEASES).await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_lease_is_renewed_while_no_other_request_is_answered() {
    require!(root);
    let api = FakeApi::start();
    // From the Node's first change after its registration on, no other request succeeds.
    let member = Member::start(api, |options| options).await;
    let held = member.api.on(Verb::Patch, "/api/v1/nodes/*/status").hold();
    member.api.on(Verb::Get, "/api/v1/nodes/*").always().refuse(500, "etcd is away");
    member.api.patch(&format!("{}/status", own_node()), &json!({ "status": { "conditions": null } }));
    held.reached().await;
    let mut next = member.api.asked().len();
    for _ in 0..4 {
        next = member.until_done(next, Verb::Update, LEASE).await.number + 1;
    }
    held.release();
    member.api.heal();
    member.until_ready().await;
}

#[tokio::test]
async fn a_lease_that_another_client_changed_is_taken_over() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    member.until_done(0, Verb::Update, LEASE).await;
    member.api.patch(LEASE, &json!({ "spec": { "holderIdentity": "other" } }));
    let held = |api: &FakeApi| (api.get(LEASE)?["spec"]["holderIdentity"] == "testnode").then_some(());
    member.api.wait_until("the node to hold the lease", held).await;
    member.api.on(Verb::Update, LEASE).times(2).refuse(409, "the object has been modified");
    let first = member.api.asked().len();
    member.until_done(first, Verb::Update, LEASE).await;
    assert_eq!(member.api.count(Verb::Create, LEASES), 1);
}

#[tokio::test]
async fn a_registration_survives_every_kind_of_refusal() {
    require!(root);
    let api = FakeApi::start();
    api.on(Verb::Get, "/api/v1/nodes/*").refuse(500, "etcd is away");
    api.on(Verb::Get, "/api/v1/nodes/*").throttle(1);
    api.on(Verb::Get, "/api/v1/nodes/*").answer_body("no JSON");
    api.on(Verb::Get, "/api/v1/nodes/*").drop_connection();
    api.on(Verb::Create, NODES).refuse(500, "etcd is away");
    api.on(Verb::Create, NODES).throttle(1);
    // The server creates the Node, and its response is lost.
    api.on(Verb::Create, NODES).lose_reply();
    let member = Member::start(api, |options| options).await;
    assert_eq!(member.api.all(NODES).len(), 1);
    member.until_done(0, Verb::Create, LEASES).await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_status_is_written_again_after_a_refusal_and_after_foreign_changes() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let status = format!("{}/status", own_node());
    member.api.on(Verb::Patch, "/api/v1/nodes/*/status").refuse(409, "the object has been modified");
    member.api.on(Verb::Patch, "/api/v1/nodes/*/status").refuse(500, "etcd is away");
    member.api.on(Verb::Patch, "/api/v1/nodes/*/status").throttle(1);
    let first = member.api.asked().len();
    member.api.patch(&status, &json!({ "status": { "conditions": null } }));
    member.until_done(first, Verb::Patch, "/api/v1/nodes/*/status").await;
    let node = member.until_ready().await;
    assert_eq!(node["status"]["conditions"].as_array().unwrap().len(), 4, "{node:#}");
}

#[tokio::test]
async fn a_node_is_followed_through_watches_that_break_lie_and_are_too_old() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let first = std::cell::Cell::new(0);
    let deleted = async |what: &str, harm: &dyn Fn(&FakeApi)| {
        // The previous watch may not have ended yet.
        member.until_done(first.get(), Verb::Watch, NODES).await;
        harm(&member.api);
        first.set(member.api.asked().len());
        let before: Value = member.api.remove(&own_node());
        let after = member.until_ready().await;
        assert_ne!(after["metadata"]["uid"], before["metadata"]["uid"], "{what}");
    };
    let everywhere = ["/api/v1/nodes", "/api/v1/nodes/testnode"];
    let to_all = |act: &dyn Fn(&str)| everywhere.iter().for_each(|pattern| act(pattern));
    deleted("ended", &|api| to_all(&|pattern| api.end_watches(pattern))).await;
    deleted("cut within an event", &|api| {
        to_all(&|pattern| api.say(pattern, r#"{"type":"MODIFIED","obj"#));
        to_all(&|pattern| api.break_watches(pattern));
    })
    .await;
    deleted("too old", &|api| {
        to_all(&|pattern| api.break_watches(pattern));
        api.patch(&own_node(), &json!({ "metadata": { "labels": { "new": "yes" } } }));
        api.compact();
    })
    .await;
    deleted("noise", &|api| to_all(&|pattern| api.say(pattern, "noise\n"))).await;
    deleted("bookmarks of the past", &|api| {
        let bookmark = r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"1"}}}"#;
        to_all(&|pattern| api.say(pattern, format!("{bookmark}\n")));
        to_all(&|pattern| api.end_watches(pattern));
    })
    .await;
    member.scene.is_well();
}

#[tokio::test]
async fn a_cordon_is_an_event_and_the_pod_cidrs_reach_the_runtime_also_after_its_restart() {
    require!(root);
    let member = Member::start(FakeApi::start(), |options| options).await;
    let cidrs = |asked: &Asked| match asked {
        Asked::UpdateRuntimeConfig(request) => {
            request.runtime_config.as_ref()?.network_config.as_ref().map(|network| network.pod_cidr.clone())
        }
        _ => None,
    };
    let sent =
        || -> Vec<String> { member.scene.cri.calls().iter().filter_map(|call| cidrs(&call.asked)).collect() };
    member.until_event("NodeAllocatableEnforced", "Updated Node Allocatable limit across pods").await;
    assert_eq!(sent(), Vec::<String>::new());
    let change = json!({"spec": {"unschedulable": true, "podCIDRs": ["10.244.1.0/24", "fd00:1::/64"]}});
    member.api.patch(&own_node(), &change);
    member.until_event("NodeNotSchedulable", "Node testnode status is now: NodeNotSchedulable").await;
    let until = |times: usize| {
        member.scene.poll_until("the pod CIDRs at the runtime", || {
            let sent = sent();
            if sent == vec!["10.244.1.0/24,fd00:1::/64"; times] { Ok(()) } else { Err(format!("{sent:?}")) }
        });
    };
    until(1);
    member.scene.cri.crash();
    member.scene.cri.come_back();
    until(2);
    member.api.patch(&own_node(), &json!({"spec": {"unschedulable": false}}));
    member.until_event("NodeSchedulable", "Node testnode status is now: NodeSchedulable").await;
}
