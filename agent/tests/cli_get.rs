//! Tests of `beelet get pods` against an API that the test serves.
#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use assert_cmd::assert::OutputAssertExt;
use beelet_api::grpc;
use beelet_model::table::{Complete, PodEntry, PodName, PodTable, RejectedManifest};
use beelet_state::events::Object;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

struct Api {
    dir: TempDir,
    table: watch::Sender<Arc<PodTable>>,
    events: beelet_state::events::Recorder,
    shutdown: CancellationToken,
    _runtime: tokio::runtime::Runtime,
}

fn start() -> Api {
    start_in(TempDir::new().unwrap())
}

fn start_in(dir: TempDir) -> Api {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (table, receiver) = watch::channel(Arc::default());
    let shutdown = CancellationToken::new();
    let listener = runtime.block_on(beelet_serve::grpc::bind(&dir.path().join("beelet.sock"))).unwrap();
    let complete = Complete::default();
    complete.set(()).unwrap();
    let outlook = grpc::Outlook::new(complete, || None);
    let events = beelet_state::events::Recorder::default();
    let services = tonic::service::Routes::new(grpc::node_service(receiver, outlook, shutdown.clone()))
        .add_service(grpc::events::service(&events, "node", shutdown.clone()));
    runtime.spawn(beelet_serve::grpc::serve(listener, services, shutdown.clone()));
    let api = Api { dir, table, events, shutdown, _runtime: runtime };
    api.set("default", "web-node", "Running", true);
    api.set("default", "job-node", "Pending", false);
    api.set("kube-system", "dns-node", "Running", true);
    api
}

impl Api {
    /// Stops the API; the folder with its socket is kept.
    fn stop(self) -> TempDir {
        self.shutdown.cancel();
        self.dir
    }

    fn set(&self, namespace: &str, name: &str, phase: &str, ready: bool) {
        let running = if ready { serde_json::json!({"running": {}}) } else { serde_json::json!({}) };
        let pod = serde_json::from_value(serde_json::json!({
            "metadata": {"namespace": namespace, "name": name, "uid": "u"},
            "spec": {"nodeName": "node", "containers": [{"name": "c"}]},
            "status": {"phase": phase, "podIP": "10.0.0.7", "qosClass": "BestEffort", "containerStatuses": [
                {"name": "c", "image": "", "imageID": "", "ready": ready, "restartCount": 0, "state": running}]},
        }))
        .unwrap();
        let entry = Arc::new(PodEntry::of(pod));
        let name = PodName { namespace: namespace.into(), name: name.into() };
        self.table.send_modify(|table| {
            Arc::make_mut(table).pods.insert(name, entry);
        });
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("beelet.sock")
    }

    fn get(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_beelet"));
        command.args(["get", "pods"]).args(args).env("BEELET_SOCKET", self.socket());
        command
    }

    /// Returns the output of `beelet get pods`.
    fn text(&self, args: &[&str]) -> String {
        String::from_utf8(self.get(args).assert().success().get_output().stdout.clone()).unwrap()
    }
}

#[test]
fn pods_are_shown_in_kubectls_columns() {
    let api = start();
    assert_eq!(
        api.text(&[]),
        "\
NAMESPACE     NAME       READY   STATUS    RESTARTS   AGE
default       job-node   0/1     Pending   0          <unknown>
default       web-node   1/1     Running   0          <unknown>
kube-system   dns-node   1/1     Running   0          <unknown>
"
    );
    assert_eq!(
        api.text(&["-n", "kube-system", "-o", "wide"]),
        "\
NAMESPACE     NAME       READY   STATUS    RESTARTS   AGE         IP         NODE   QOS          READINESS GATES   READINESS EDGE   WHY
kube-system   dns-node   1/1     Running   0          <unknown>   10.0.0.7   node   BestEffort   <none>            <none>
"
    );
    let table = api.table.borrow().clone();
    let (_, job) = table.find("default", "job").unwrap();
    api.events.warning(Object::pod(&job.pod), "FailedMount", "configmap \"app\" is not there");
    let wide = api.text(&["job-node", "-o", "wide"]);
    assert!(wide.ends_with("<none>           configmap \"app\" is not there\n"), "{wide}");
    assert_eq!(api.text(&["web-node"]).lines().count(), 2);
}

#[test]
fn json_and_yaml_are_pod_lists() {
    let api = start();
    let json: serde_json::Value = serde_json::from_str(&api.text(&["-o", "json"])).unwrap();
    assert_eq!((&json["kind"], json["items"].as_array().unwrap().len()), (&"PodList".into(), 3));
    let yaml = beelet_codec::document::parse(&api.text(&["-o", "yaml"])).unwrap();
    assert_eq!(yaml[0].value, json);
}

#[test]
fn one_named_pod_is_the_object_itself() {
    let api = start();
    let json: serde_json::Value = serde_json::from_str(&api.text(&["web", "-o", "json"])).unwrap();
    assert_eq!((&json["kind"], &json["metadata"]["name"]), (&"Pod".into(), &"web-node".into()));
    assert_eq!(api.text(&["web", "-o", "jsonpath={.status.podIP}"]), "10.0.0.7");
    let json: serde_json::Value = serde_json::from_str(&api.text(&["web", "job", "-o", "json"])).unwrap();
    assert_eq!(json["kind"], "PodList");
}

#[test]
fn kubectls_options_choose_the_lines_and_their_order() {
    let api = start();
    let sorted = ["--sort-by", ".metadata.name", "-o", "name"];
    assert_eq!(api.text(&sorted), "pod/dns-node\npod/job-node\npod/web-node\n");
    assert_eq!(
        api.text(&["-n", "default", "--no-headers", "--show-labels", "--sort-by={.status.phase}"]),
        "\
default   job-node   0/1   Pending   0   <unknown>   <none>
default   web-node   1/1   Running   0   <unknown>   <none>
"
    );
    assert_eq!(
        api.text(&["job", "-o", "custom-columns=NAME:.metadata.name,NODE:.spec.nodeName"]),
        "NAME       NODE\njob-node   node\n"
    );
}

#[test]
fn a_missing_pod_is_an_error_and_an_empty_list_a_message() {
    let api = start();
    let output = api.get(&["nosuch"]).assert().failure().code(1).get_output().clone();
    assert!(String::from_utf8_lossy(&output.stderr).contains("pod \"nosuch\" not found"), "{output:?}");
    let output = api.get(&["-n", "empty"]).assert().success().get_output().clone();
    assert_eq!((output.stdout.len(), &*output.stderr), (0, &b"No pods found.\n"[..]));
}

#[test]
fn rejected_manifests_are_on_standard_error() {
    let api = start();
    let manifest = RejectedManifest { file: "/m/web.yaml".into(), message: "3:1: not a pod".into() };
    api.table.send_modify(|table| Arc::make_mut(table).rejected = Arc::new(vec![manifest]));
    let output = api.get(&[]).assert().success().get_output().clone();
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "Rejected manifests:\n  /m/web.yaml: 3:1: not a pod\n"
    );
}

#[test]
fn without_an_agent_the_error_has_a_remedy() {
    let dir = TempDir::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_beelet"));
    let output =
        command.args(["get", "pods", "--socket"]).arg(dir.path().join("none")).assert().failure().code(1);
    let text = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(text.starts_with("error: no agent answers at") && text.contains("beelet run"), "{text}");
}

struct Watching {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Watching {
    fn start(api: &Api, args: &[&str]) -> Self {
        let mut child =
            api.get(args).arg("--watch").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended by itself
        let _ = self.child.wait();
    }
}

#[test]
fn a_watch_shows_each_change_and_ends_with_ctrl_c() {
    let api = start();
    let mut watching = Watching::start(&api, &["-n", "default"]);
    assert!(watching.line().starts_with("NAMESPACE"));
    assert!(watching.line().contains("job-node"));
    assert!(watching.line().contains("web-node"));
    api.set("kube-system", "dns-node", "Failed", false);
    api.set("default", "job-node", "Running", true);
    let line = watching.line();
    assert!(line.contains("job-node   1/1     Running"), "{line}");

    let pid = rustix::process::Pid::from_child(&watching.child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(watching.child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_watch_continues_when_the_agent_is_back_and_shows_only_changes() {
    let api = start();
    let mut watching = Watching::start(&api, &["-o", "json"]);
    (0..3).for_each(|_| drop(watching.line()));
    let api = start_in(api.stop());
    api.set("default", "job-node", "Running", true);
    let pod: serde_json::Value = serde_json::from_str(&watching.line()).unwrap();
    assert_eq!((&pod["metadata"]["name"], &pod["status"]["phase"]), (&"job-node".into(), &"Running".into()));
}

#[test]
fn a_closed_standard_output_is_not_an_error() {
    let api = start();
    let mut child = api.get(&["-o", "yaml"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
