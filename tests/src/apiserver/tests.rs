//! Tests of the fake API server, through the agent's own client.

use std::time::Duration;

use beelet_cluster::client::{Client, Event, Patch};
use futures::{Stream, StreamExt as _};
use serde_json::{Value, json};

use super::{FakeApi, Verb};

const POD: &str = "/api/v1/namespaces/default/pods/web";
const PODS: &str = "/api/v1/pods";

fn client(api: &FakeApi) -> Client {
    let mut config = kube::Config::new(api.url().parse().unwrap());
    // No retries: every request must appear once.
    config.default_retry = false;
    let client = kube::Client::try_from(config).unwrap();
    Client::new(tokio::sync::watch::channel(client).1)
}

fn pod(node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "web" },
        "spec": { "nodeName": node, "terminationGracePeriodSeconds": 7, "containers": [{ "name": "main" }] },
    })
}

async fn next(
    watch: &mut (impl Stream<Item = Result<Event, beelet_cluster::client::Error>> + Unpin),
) -> Result<Event, beelet_cluster::client::Error> {
    let next = tokio::time::timeout(super::PATIENCE, watch.next()).await;
    next.expect("no event arrived").expect("the watch has ended")
}

fn applied(event: Result<Event, beelet_cluster::client::Error>) -> Value {
    match event {
        Ok(Event::Applied(object)) => object,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn objects_are_made_read_changed_and_listed() {
    let api = FakeApi::start();
    let client = client(&api);
    let made = client.create("/api/v1/namespaces/default/pods", &pod("n")).await.unwrap();
    assert_eq!(made["metadata"]["namespace"], "default");
    assert_eq!(made["metadata"]["generation"], 1);
    assert_eq!(made["status"]["phase"], "Pending");
    let twice = client.create("/api/v1/namespaces/default/pods", &pod("n")).await.unwrap_err();
    assert!(twice.is_conflict(), "{twice}");

    let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
    let patched = client.patch(&format!("{POD}/status"), Patch::StrategicMerge, &ready).await.unwrap();
    assert_eq!(patched["status"]["phase"], "Pending");
    assert_ne!(patched["metadata"]["resourceVersion"], made["metadata"]["resourceVersion"]);
    assert_eq!(patched["metadata"]["generation"], 1);
    // A change that changes nothing creates no new version.
    let again = client.patch(&format!("{POD}/status"), Patch::StrategicMerge, &ready).await.unwrap();
    assert_eq!(again, patched);
    // Only the subresource changes the status.
    let ignored = client.patch(POD, Patch::Merge, &json!({ "status": { "phase": "Failed" } })).await.unwrap();
    assert_eq!(ignored, patched);

    // `made` is outdated now.
    let conflict = client.replace(&format!("{POD}/status"), &made).await.unwrap_err();
    assert!(conflict.is_conflict(), "{conflict}");
    let of_node = |node: &str| format!("{PODS}?fieldSelector=spec.nodeName%3D{node}");
    assert_eq!(client.get(&of_node("n")).await.unwrap()["items"], json!([patched]));
    assert_eq!(client.get(&of_node("other")).await.unwrap()["items"], json!([]));
    assert!(client.get("/api/v1/nodes/n").await.unwrap_err().is_not_found());
}

#[tokio::test]
async fn a_pod_is_deleted_gracefully_and_then_for_good() {
    let api = FakeApi::start();
    let client = client(&api);
    let uid = api.put(POD, pod("n"))["metadata"]["uid"].as_str().unwrap().to_owned();
    let deleted = api.delete(POD);
    assert_eq!(deleted["metadata"]["deletionGracePeriodSeconds"], 7);
    assert!(deleted["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(api.delete(POD), deleted, "a second deletion changes nothing");
    let other = client.delete(POD, Some("another")).await.unwrap_err();
    assert!(other.is_conflict(), "{other}");
    client.delete(POD, Some(&uid)).await.unwrap();
    assert_eq!(api.get(POD), None);
    // A pod without a node is removed immediately.
    api.put(POD, json!({ "spec": {} }));
    api.delete(POD);
    assert_eq!(api.get(POD), None);
}

#[tokio::test]
async fn a_watch_follows_resumes_and_ends_when_too_old() {
    let api = FakeApi::start();
    let client = client(&api);
    let version = client.get(PODS).await.unwrap()["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let path =
        |version: &str| format!("{PODS}?watch=1&fieldSelector=spec.nodeName%3Dn&resourceVersion={version}");
    let mut watch = client.watch(&path(&version)).await.unwrap();
    api.put("/api/v1/namespaces/default/pods/other", pod("m"));
    let made = api.put(POD, pod("n"));
    assert_eq!(applied(next(&mut watch).await), made);
    api.bookmark(PODS);
    let expected = made["metadata"]["resourceVersion"].as_str().unwrap();
    assert_eq!(next(&mut watch).await, Ok(Event::Bookmark(expected.to_owned())));
    api.end_watches(PODS);
    assert!(watch.next().await.is_none());

    // Changes made in the meantime are not lost.
    let changed = api.patch(POD, &json!({ "metadata": { "labels": { "a": "b" } } }));
    let mut watch = client.watch(&path(expected)).await.unwrap();
    assert_eq!(applied(next(&mut watch).await), changed);
    api.remove(POD);
    assert!(matches!(next(&mut watch).await, Ok(Event::Deleted(_))));
    api.say(PODS, r#"{"type":"MODI"#);
    api.break_watches(PODS);
    assert!(next(&mut watch).await.is_err());

    api.compact();
    let mut watch = client.watch(&path(expected)).await.unwrap();
    assert!(next(&mut watch).await.unwrap_err().is_expired());
    assert!(watch.next().await.is_none());
    api.wait_until("no watch", |api| api.watched().is_empty().then_some(())).await;
}

#[tokio::test]
async fn requests_fail_on_demand() {
    let api = FakeApi::start();
    let client = client(&api);
    let node = "/api/v1/nodes/n";
    api.put(node, json!({ "metadata": { "name": "n" } }));

    api.on(Verb::Get, "/api/v1/nodes/*").throttle(3);
    let error = client.get(node).await.unwrap_err();
    assert_eq!((error.code(), error.retry_after()), (Some(429), Some(Duration::from_secs(3))));
    api.on(Verb::Get, node).times(2).refuse(500, "etcd is away");
    for _ in 0..2 {
        assert_eq!(client.get(node).await.unwrap_err().code(), Some(500));
    }
    client.get(node).await.unwrap();

    api.on(Verb::Patch, node).lose_reply();
    let label = json!({ "metadata": { "labels": { "a": "b" } } });
    assert!(client.patch(node, Patch::Merge, &label).await.unwrap_err().is_transient());
    assert_eq!(api.get(node).unwrap()["metadata"]["labels"]["a"], "b");
    api.on(Verb::Get, node).drop_connection();
    assert_eq!(client.get(node).await.unwrap_err().code(), None);

    let held = api.on(Verb::Get, node).hold();
    let asking = tokio::spawn({
        let client = client.clone();
        async move { client.get(node).await }
    });
    held.reached().await;
    held.release();
    asking.await.unwrap().unwrap();

    api.on(Verb::List, "/api/v1/nodes").answer_empty_list();
    assert_eq!(client.get("/api/v1/nodes").await.unwrap()["items"], json!([]));
    assert_eq!(client.get("/api/v1/nodes").await.unwrap()["items"].as_array().unwrap().len(), 1);
    let failed = api.asked().iter().filter(|asked| asked.is(Verb::Get, node) && !asked.succeeded()).count();
    assert_eq!(failed, 4);
}

#[tokio::test]
async fn a_crashed_server_returns_with_its_objects() {
    let api = FakeApi::absent();
    let client = client(&api);
    assert_eq!(client.get(PODS).await.unwrap_err().code(), None);
    api.come_back();
    api.put(POD, pod("n"));
    let mut watch = client.watch(&format!("{PODS}?watch=1")).await.unwrap();
    applied(next(&mut watch).await);
    api.crash();
    assert!(next(&mut watch).await.is_err());
    assert_eq!(client.get(POD).await.unwrap_err().code(), None);
    api.come_back();
    client.get(POD).await.unwrap();
    let mut watch = client.watch(&format!("{PODS}?watch=1")).await.unwrap();
    applied(next(&mut watch).await);
    api.sever();
    assert!(next(&mut watch).await.is_err());
    client.get(POD).await.unwrap();
}

#[tokio::test]
async fn tokens_and_certificates_are_issued() {
    let api = FakeApi::start();
    let client = client(&api);
    let account = "/api/v1/namespaces/default/serviceaccounts/default";
    let ask = json!({ "spec": { "audiences": ["a"], "expirationSeconds": 600 } });
    let missing = client.create(&format!("{account}/token"), &ask).await.unwrap_err();
    assert!(missing.is_not_found());
    api.put(account, json!({}));
    let first = client.create(&format!("{account}/token"), &ask).await.unwrap();
    let second = client.create(&format!("{account}/token"), &ask).await.unwrap();
    assert!(first["status"]["token"].as_str().unwrap().ends_with("-of-default-default"), "{first}");
    assert_ne!(first["status"]["token"], second["status"]["token"]);

    api.sign_certificates(Duration::from_secs(3600));
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["n".to_owned()]).unwrap();
    let request = params.serialize_request(&key).unwrap().pem().unwrap();
    let encoded = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, request);
    let requests = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
    let object = json!({ "metadata": { "generateName": "csr-" }, "spec": { "request": encoded } });
    let signed = client.create(requests, &object).await.unwrap();
    assert_eq!(signed["kind"], "CertificateSigningRequest");
    assert_eq!(signed["status"]["conditions"][0]["type"], "Approved");
    assert!(signed["status"]["certificate"].is_string());
}
