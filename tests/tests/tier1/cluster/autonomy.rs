//! Tests of a node that starts without its API server.

use std::path::Path;

use beelet_tests::agent::Options;
use beelet_tests::apiserver::FakeApi;
use beelet_tests::guards::unmount_below;
use beelet_tests::require;
use serde_json::{Value, json};

use super::scene::Member;
use super::workload::{path, pod};

/// Shortens the wait for the API server to one second.
fn soon(options: Options) -> Options {
    options.beelet("autonomy", json!({ "after": "1s" }))
}

/// Returns a pod with a token and a ConfigMap volume, like most pods.
fn usual(name: &str) -> Value {
    let mut pod = pod(name);
    pod["spec"]["volumes"] = json!([
        { "name": "conf", "configMap": { "name": "conf" } },
        { "name": "access", "projected": { "sources": [{ "serviceAccountToken": { "path": "token" } }] } },
    ]);
    pod
}

impl Member {
    /// Waits until a record contains `wanted`; returns the record.
    fn until_kept(&self, record: &str, wanted: &str) -> String {
        let read = || self.scene.agent.record(record).map(|value| value.to_string()).unwrap_or_default();
        self.scene.poll_until(&format!("the record {record} to have {wanted:?}"), || {
            if read().contains(wanted) { Ok(()) } else { Err(read()) }
        });
        read()
    }

    /// Reboots the machine while its API server is away.
    fn reboot_alone(&mut self) {
        self.api.crash();
        self.scene.agent.kill9();
        self.scene.cri.reboot();
        unmount_below(self.scene.agent.dir()).unwrap();
        self.scene.agent.resume().unwrap();
    }

    /// Returns the content of a file in a volume of the pod.
    fn volume(&self, pod: &Value, file: &str) -> Option<String> {
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        let folder = self.scene.agent.dir().join("pods").join(uid).join("volumes");
        std::fs::read_to_string(folder.join(Path::new(file))).ok()
    }

    /// Waits until a file in a volume of the pod has the content `wanted`.
    fn until_volume(&self, pod: &Value, file: &str, wanted: &str) {
        self.scene.poll_until(&format!("{file} to have the content {wanted:?}"), || {
            match self.volume(pod, file) {
                Some(text) if text == wanted => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }
}

fn config_map() -> Value {
    json!({ "metadata": { "name": "conf", "namespace": "default" }, "data": { "color": "red" } })
}

#[tokio::test]
async fn a_node_that_starts_without_its_api_server_runs_its_pods_and_obeys_once_it_is_back() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), soon).await;
    member.api.put("/api/v1/namespaces/default/serviceaccounts/default", json!({}));
    member.api.put("/api/v1/namespaces/default/configmaps/conf", config_map());
    let web = member.api.put(&path("web"), usual("web"));
    member.api.put(&path("goes"), pod("goes"));
    member.until_running("web").await;
    member.until_running("goes").await;
    member.until_kept("assigned", "\"goes\"");
    let kept = member.until_kept("assigned", "red");
    assert!(kept.contains("\"goes\"") && !kept.contains("\"token\":"), "{kept}");

    member.reboot_alone();
    for name in ["web", "goes"] {
        member.scene.until(&format!("{name} to run again"), |watch| {
            watch.pod(name).filter(|pod| pod.phase() == "Running").map(drop)
        });
    }
    member.scene.until_logged("the API server has not answered for 1 s: running 2 pods from the cache of ");
    member.until_volume(&web, "conf/color", "red");
    // The token's file exists, and is empty until the API server issues a token.
    member.until_volume(&web, "access/token", "");

    member.api.remove(&path("goes"));
    member.api.come_back();
    member.until_stopped("goes");
    member.until_running("web").await;
    member.scene.poll_until("the token", || match member.volume(&web, "access/token") {
        Some(token) if !token.is_empty() => Ok(()),
        other => Err(format!("{other:?}")),
    });
    member.scene.is_well();
}

#[tokio::test]
async fn without_autonomy_no_pod_starts_before_the_api_server_answers() {
    require!(root);
    let mut member = Member::start(FakeApi::start(), |options| {
        options.beelet("autonomy", json!({ "enabled": false, "after": "1s" }))
    })
    .await;
    member.api.put(&path("web"), pod("web"));
    member.until_running("web").await;
    member.reboot_alone();
    member.scene.until_relisted();
    assert!(!member.runs("web"), "the pod runs without the API server");
    assert!(member.scene.agent.record("assigned").is_none());
    member.api.remove(&path("web"));
    member.api.put(&path("other"), pod("other"));
    member.api.come_back();
    member.until_running("other").await;
    assert!(!member.runs("web"));
    member.scene.is_well();
}

#[tokio::test]
async fn secrets_are_kept_only_sealed_and_without_a_key_their_pods_wait() {
    require!(root);
    for with_key in [false, true] {
        let mut member = Member::start(FakeApi::start(), |options| {
            let key = options.manifests().parent().unwrap().join("key");
            beelet_tests::workdir::write(&key, [7; 32]).unwrap();
            let key = if with_key { json!(key) } else { Value::Null };
            options.beelet("autonomy", json!({ "after": "1s", "keyFile": key }))
        })
        .await;
        let secret = json!({
            "metadata": { "name": "hush", "namespace": "default" }, "data": { "word": "eHl6enk=" },
        });
        member.api.put("/api/v1/namespaces/default/secrets/hush", secret);
        let mut web = pod("web");
        web["spec"]["volumes"] = json!([{ "name": "hush", "secret": { "secretName": "hush" } }]);
        let web = member.api.put(&path("web"), web);
        member.until_running("web").await;
        member.until_kept("assigned", "\"web\"");
        if with_key {
            // Sealed, an empty list is 56 characters long.
            member.scene.poll_until("the sealed Secret", || {
                let sealed = member.scene.agent.record("assigned-secrets").unwrap_or_default();
                let length = sealed["content"].as_str().unwrap_or_default().len();
                if length > 100 { Ok(()) } else { Err(format!("{length} characters")) }
            });
        }
        // No record contains plain text.
        for record in ["assigned", "assigned-secrets"] {
            let text = member.scene.agent.record(record).unwrap_or_default().to_string();
            assert!(!text.contains("eHl6enk") && !text.contains("xyzzy"), "{text}");
        }
        member.reboot_alone();
        member.scene.until_logged(" pods from the cache of ");
        if with_key {
            member.scene.until("web to run again", |watch| {
                watch.pod("web").filter(|pod| pod.phase() == "Running").map(drop)
            });
            member.until_volume(&web, "hush/word", "xyzzy");
        } else {
            member.scene.until_logged("the pod waits for the API server");
            assert!(!member.runs("web"));
        }
        member.api.come_back();
        member.until_running("web").await;
        member.scene.is_well();
    }
}
