//! Test of a credential plugin of the kubeconfig (`exec`) that hangs, and recovers.

use std::fs;
use std::path::PathBuf;

use beelet_tests::agent::Options;
use beelet_tests::apiserver::{FakeApi, Verb};
use beelet_tests::{require, workdir};
use serde_json::{Value, json};

use super::scene::{LEASE, Member};

/// Program that prints short-lived tokens, or hangs: then each of its processes hangs until the end of the
/// test.
struct Plugin(tempfile::TempDir);

impl Plugin {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let plugin = Self(dir);
        fs::write(plugin.file("test"), "").unwrap();
        let script = r#"#!/bin/sh
cd "$(dirname "$0")"
if [ -e hangs ]; then
    echo $$ >>hung
    while [ -e test ]; do sleep 0.2; done
    exit 1
fi
cat <<END
{ "kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "spec": {},
  "status": { "token": "plugin", "expirationTimestamp": "$(date -u -d '+4 seconds' +%Y-%m-%dT%H:%M:%SZ)" } }
END
"#;
        workdir::write(&plugin.file("plugin"), script).unwrap();
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(plugin.file("plugin"), executable).unwrap();
        plugin
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Replaces the token in the agent's kubeconfig with the plugin.
    fn configure(&self, options: Options) -> Options {
        let at = options.arguments.iter().position(|one| one == "--kubeconfig").unwrap() + 1;
        let path = &options.arguments[at];
        let mut kubeconfig: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        kubeconfig["users"][0]["user"] = json!({ "exec": {
            "apiVersion": "client.authentication.k8s.io/v1", "command": self.file("plugin"),
            "interactiveMode": "Never",
        }});
        fs::write(path, kubeconfig.to_string()).unwrap();
        options
    }

    /// Returns the number of processes that hung, and of those that still run.
    fn hung(&self) -> (usize, usize) {
        let text = fs::read_to_string(self.file("hung")).unwrap_or_default();
        let all: Vec<&str> = text.lines().collect();
        let is_there = |pid: &&&str| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.contains("(plugin)") && !stat.contains(") Z ")
        };
        (all.len(), all.iter().filter(is_there).count())
    }
}

#[tokio::test]
async fn a_credential_plugin_that_hangs_is_killed_and_the_lease_is_renewed_later() {
    require!(root);
    let plugin = Plugin::new();
    let member = Member::start(FakeApi::start(), |options| plugin.configure(options)).await;
    let renewed = member.until_done(0, Verb::Update, LEASE).await;
    assert_eq!(renewed.authorization.as_deref(), Some("Bearer plugin"));

    fs::write(plugin.file("hangs"), "").unwrap();
    member.scene.until_logged("cannot renew the node's lease");
    // All requests wait for the same runs of the plugin: one for the lease, one for the rest.
    for _ in 0..3 {
        member.scene.until_relisted();
        let (_, there) = plugin.hung();
        assert!((1..=2).contains(&there), "{there} processes hang");
    }
    fs::remove_file(plugin.file("hangs")).unwrap();
    workdir::wait_for("the hung plugins to be killed", workdir::PATIENCE, || match plugin.hung() {
        (all, 0) if all <= 2 => Ok(()),
        (all, there) => Err(format!("{there} of {all} still run")),
    })
    .unwrap();
    let first = member.api.asked().len();
    member.until_done(first, Verb::Update, LEASE).await;
    member.until_ready().await;
    member.scene.is_well();
}
