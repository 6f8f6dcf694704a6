use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use futures::future::join_all;
use serde_json::json;

use super::*;

/// A plugin that counts its runs in a file.
struct Script {
    dir: tempfile::TempDir,
    plugin: Arc<Plugin>,
}

/// Shell commands in `body` print the credential's status, as JSON, or do something else.
fn script(body: &str, patience: Duration) -> Script {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plugin");
    let runs = dir.path().join("runs");
    let head = r#"{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","status":"#;
    let text = format!(
        "#!/bin/sh\ncd {}\necho $$ >>{}\nsay() {{ echo '{head}'\"$1\"'}}'; }}\n{body}\n",
        dir.path().display(),
        runs.display()
    );
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let exec = json!({ "apiVersion": "client.authentication.k8s.io/v1", "command": path });
    let mut exec = Exec::new(serde_json::from_value(exec).unwrap()).unwrap();
    exec.patience = patience;
    Script { dir, plugin: Plugin::new(exec) }
}

impl Script {
    /// Returns the PIDs of all started processes.
    fn runs(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.dir.path().join("runs")).unwrap_or_default();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn token(&self) -> Result<String, Error> {
        let credential = self.plugin.credential().await?;
        Ok(credential.token.as_ref().unwrap().to_str().unwrap().to_owned())
    }
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn many_requests_share_one_run_and_what_it_gave() {
    let script = script(r#"say '{"token":"t"}'"#, LONG);
    let tokens = join_all((0..50).map(|_| script.token())).await;
    assert!(tokens.iter().all(|token| token.as_ref().unwrap() == "Bearer t"));
    assert_eq!(script.token().await.unwrap(), "Bearer t");
    assert_eq!(script.runs().len(), 1);
}

#[tokio::test]
async fn a_plugin_that_hangs_is_killed_with_all_that_it_started_and_is_asked_again() {
    let body = r#"if [ -e well ]; then say '{"token":"t"}'; else sleep 1000 & echo $! >>runs; wait; fi"#;
    let script = script(body, Duration::from_millis(500));
    // Cancelled requests start no other process.
    for _ in 0..5 {
        let _ = tokio::time::timeout(Duration::from_millis(20), script.token()).await;
    }
    let error = script.token().await.unwrap_err();
    assert!(error.to_string().contains("took longer than"), "{error}");
    let runs = script.runs();
    assert_eq!(runs.len(), 2, "the plugin and its child: {runs:?}");
    fs::write(script.file("well"), "").unwrap();
    let answered = async {
        while script.token().await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LONG, answered).await.unwrap();
    let gone = async {
        for pid in runs {
            while fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    };
    tokio::time::timeout(LONG, gone).await.unwrap();
}

#[tokio::test]
async fn a_credential_is_used_to_its_end_while_the_plugin_hangs() {
    let body = r#"if [ -e hung ]; then exec sleep 1000; fi
        say '{"token":"t","expirationTimestamp":"'"$(date -u -d '+1 hour' +%Y-%m-%dT%H:%M:%SZ)"'"}'"#;
    let script = script(body, LONG);
    assert_eq!(script.token().await.unwrap(), "Bearer t");
    fs::write(script.file("hung"), "").unwrap();
    script.plugin.lock().refused = true;
    for _ in 0..20 {
        assert_eq!(script.token().await.unwrap(), "Bearer t");
    }
    // After the pause that follows the last run, all requests share one more run.
    let started = async {
        while script.runs().len() < 2 {
            assert_eq!(script.token().await.unwrap(), "Bearer t");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONG, started).await.unwrap();
    for _ in 0..20 {
        assert_eq!(script.token().await.unwrap(), "Bearer t");
    }
    assert_eq!(script.runs().len(), 2);
}

#[tokio::test]
async fn a_refused_credential_is_replaced_but_not_one_that_was_just_given() {
    let script = script(r#"say '{"token":"t"}'"#, LONG);
    let first = script.plugin.credential().await.unwrap();
    script.plugin.refused(&first);
    assert!(!script.plugin.lock().refused);
    let old = Credential {
        token: first.token.clone(),
        pair: None,
        expires: None,
        given: (Timestamp::now(), Instant::now().checked_sub(YOUNG).unwrap()),
    };
    let old = Arc::new(old);
    script.plugin.lock().newest = Some(Arc::clone(&old));
    script.plugin.refused(&first);
    assert!(!script.plugin.lock().refused, "the newest credential is another one by now");
    script.plugin.refused(&old);
    assert!(script.plugin.lock().refused);
}

#[tokio::test]
async fn a_plugin_that_fails_says_why_and_one_that_shouts_is_bounded() {
    let error = script("echo no >&2; exit 3", LONG).token().await.unwrap_err().to_string();
    assert!(error.contains("exit status: 3") && error.ends_with("no"), "{error}");
    let error = script("head -c 3000000 /dev/zero", LONG).token().await.unwrap_err().to_string();
    assert!(error.contains("more than 1 MiB"), "{error}");
    let none = script("", LONG);
    fs::remove_file(none.file("plugin")).unwrap();
    let error = none.token().await.unwrap_err().to_string();
    assert!(error.contains("cannot run") && error.contains("No such file"), "{error}");
}

#[tokio::test]
async fn a_plugin_gets_the_kubeconfigs_environment_and_the_question() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plugin");
    let text = format!("#!/bin/sh\nenv >{}\n", dir.path().join("env").display());
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let config = json!({
        "apiVersion": "client.authentication.k8s.io/v1beta1", "command": path, "provideClusterInfo": true,
        "env": [{ "name": "WHO", "value": "me" }, { "name": "HALF" }],
    });
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        "clusters": [{ "name": "c", "cluster": { "server": "https://127.0.0.1:1" } }],
        "users": [{ "name": "u", "user": { "exec": config } }],
    });
    let file = dir.path().join("kubeconfig");
    fs::write(&file, kubeconfig.to_string()).unwrap();
    let exec = extract_plugin(&mut crate::kubeconfig::config(&file).unwrap()).unwrap().unwrap();
    let error = Plugin::new(exec).credential().await.err().unwrap().to_string();
    assert!(error.contains("did not answer"), "{error}");
    let env = fs::read_to_string(dir.path().join("env")).unwrap();
    let value = |name: &str| env.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    assert_eq!((value("WHO"), value("HALF")), (Some("me"), None));
    let info: serde_json::Value = serde_json::from_str(value("KUBERNETES_EXEC_INFO").unwrap()).unwrap();
    assert_eq!(info["kind"], "ExecCredential");
    assert_eq!(info["apiVersion"], "client.authentication.k8s.io/v1beta1");
    assert_eq!(info["spec"]["interactive"], false);
    assert!(info["spec"]["cluster"]["server"].as_str().unwrap().starts_with("https://127.0.0.1:1"));
}
