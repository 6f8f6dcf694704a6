//! Exec probes through the helper `beelet-exec`, next to what the runtime's `ExecSync` does in the same
//! container.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::time::Duration;

use beelet_proto::cri;
use beelet_tests::agent::Options;
use beelet_tests::containerd::{Containerd, Cri, block_on};
use beelet_tests::helper::Helper;
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{manifests, require};
use serde_json::{Value, json};

use crate::node::{Node, as_installed};

/// A node whose exec probes go through the helper. The node is dropped first.
pub(crate) struct Direct {
    pub(crate) node: Node,
    pub(crate) helper: Helper,
}

impl Direct {
    pub(crate) fn start() -> Direct {
        Direct::on(Containerd::start_for_test().unwrap())
    }

    fn on(containerd: Containerd) -> Direct {
        let helper = Helper::start(containerd.dir()).unwrap();
        let options = directly(Options::on(&containerd), &helper);
        let agent = beelet_tests::agent::Agent::start(as_installed(options)).unwrap();
        Direct { node: Node { agent, containerd }, helper }
    }

    /// Returns the probe of a pod once its last check satisfies `wanted`.
    pub(crate) fn probe(&self, pod: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        probe_of(&self.node, pod, wanted)
    }
}

/// Adds the settings of a node with a helper.
pub(crate) fn directly(options: Options, helper: &Helper) -> Options {
    options.beelet("execProbes", "direct").beelet("execSocket", helper.socket().to_str().unwrap())
}

/// Returns the probe of a pod once it satisfies `wanted`.
pub(crate) fn probe_of(node: &Node, pod: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    wait_for(&format!("the probe of {pod}"), PATIENCE, || {
        let (code, out, error) = node.cli(&["probe", "ls", "-o", "json"]);
        assert_eq!(code, Some(0), "{error}");
        let all: Vec<Value> = serde_json::from_str(&out).unwrap();
        let prefix = format!("{pod}-");
        let found = all.into_iter().find(|probe| probe["pod"].as_str().unwrap().starts_with(&prefix));
        found.filter(&wanted).ok_or_else(|| format!("{out}\n{}", node.agent.log()))
    })
    .unwrap()
}

/// Returns a pod with a readiness probe by command, every second.
pub(crate) fn probed(name: &str, command: &[&str]) -> Value {
    let probe = json!({
        "exec": { "command": command }, "timeoutSeconds": 30, "periodSeconds": 1, "failureThreshold": 1,
    });
    manifests::with(manifests::pod(name, &["/bin/testapp", "pause"]), "readinessProbe", probe)
}

/// Runs a command by the runtime; returns its output.
fn by_runtime(containerd: &Containerd, pod: &PodView, command: &[&str]) -> String {
    let id = pod.container("main").unwrap().container_id.clone().unwrap();
    let id = id.rsplit('/').next().unwrap().to_owned();
    let socket = containerd.socket();
    let cmd = command.iter().map(ToString::to_string).collect();
    block_on(async move {
        let request = cri::ExecSyncRequest { container_id: id, cmd, timeout: 60 };
        let answer = Cri::connect(&socket).await?.runtime.exec_sync(request).await?.into_inner();
        Ok(String::from_utf8(answer.stdout)?)
    })
    .unwrap()
}

/// Lines of a report that differ, from the runtime's and from the helper's.
fn differences(runtime: &str, direct: &str) -> Vec<String> {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let (runtime, direct) = (lines(runtime), lines(direct));
    let only = |these: &[String], others: &[String], whose: &str| -> Vec<String> {
        these.iter().filter(|line| !others.contains(line)).map(|line| format!("{whose}: {line}")).collect()
    };
    [only(&runtime, &direct, "runtime"), only(&direct, &runtime, "direct")].concat()
}

#[test]
fn a_command_has_the_identity_that_the_runtime_would_give_it() {
    require!(containerd);
    check_identity(&Direct::start());
}

#[test]
fn a_command_has_that_identity_on_containerd_2_too() {
    require!(containerd_2);
    check_identity(&Direct::on(Containerd::start_version_2_for_test().unwrap()));
}

/// Compares a command's report about itself with that of the same command under `ExecSync`, in containers of
/// several kinds.
fn check_identity(direct: &Direct) {
    let report = ["/bin/testapp", "report"];
    let security = |context: Value| manifests::with(probed("x", &report), "securityContext", context);
    let user = json!({
        "runAsUser": 1000, "runAsGroup": 2000, "allowPrivilegeEscalation": false,
        "seccompProfile": { "type": "RuntimeDefault" },
        "capabilities": { "drop": ["ALL"], "add": ["NET_BIND_SERVICE", "CHOWN"] },
    });
    let mut as_user = security(user);
    as_user["spec"]["securityContext"] = json!({ "supplementalGroups": [7, 8], "fsGroup": 9 });
    let as_user = manifests::with(as_user, "workingDir", json!("/bin"));
    let as_user = manifests::with(
        as_user,
        "env",
        json!([{ "name": "A", "value": "b c=d" }, { "name": "E", "value": "" }]),
    );
    let limited = manifests::with_resources(probed("x", &report), ("200m", "32Mi"), ("200m", "32Mi"));
    let mut on_host = security(json!({ "privileged": true }));
    for field in ["hostPID", "hostIPC", "hostNetwork"] {
        on_host["spec"][field] = json!(true);
    }
    let mut shared = probed("x", &report);
    shared["spec"]["shareProcessNamespace"] = json!(true);
    let variants = [
        ("plain", probed("x", &report)),
        ("user", as_user),
        ("seccomp", security(json!({ "seccompProfile": { "type": "RuntimeDefault" } }))),
        ("nobody", security(json!({ "runAsUser": 65534, "seccompProfile": { "type": "RuntimeDefault" } }))),
        ("limited", limited),
        ("host", on_host),
        ("shared", shared),
    ];
    let mut all = Vec::new();
    for (name, mut pod) in variants {
        pod["metadata"]["name"] = json!(name);
        direct.node.apply(&pod);
        let probe = direct.probe(name, |probe| !probe["last"].is_null());
        assert_eq!(
            (&probe["mode"], &probe["fallback"]),
            (&json!("direct"), &Value::Null),
            "{name}: {probe:#}"
        );
        assert_eq!(probe["last"]["outcome"], "success", "{name}: {probe:#}");
        let pod = direct.node.wait(name, "to be ready", PodView::ready);
        let runtime = by_runtime(&direct.node.containerd, &pod, &report);
        let found = differences(&runtime, probe["last"]["detail"].as_str().unwrap());
        all.extend(found.into_iter().map(|line| format!("{name}: {line}")));
        direct.node.remove(name);
    }
    assert_eq!(all, Vec::<String>::new());
}

#[test]
fn a_container_that_the_helper_cannot_reproduce_uses_the_runtime_and_says_why() {
    require!(containerd);
    let direct = Direct::start();
    let helper_gone = {
        let pod = probed("good", &["/bin/testapp", "probe", "ok"]);
        direct.node.apply(&pod);
        direct.probe("good", |probe| probe["mode"] == "direct" && probe["last"]["outcome"] == "success");
        let Direct { node, helper } = direct;
        drop(helper);
        let probe = probe_of(&node, "good", |probe| probe["mode"] == "exec" && !probe["fallback"].is_null());
        node.wait("good", "to be ready", PodView::ready);
        probe
    };
    let why = helper_gone["fallback"].as_str().unwrap();
    assert!(why.starts_with("the helper `beelet-exec` does not answer"), "{why}");
}

#[test]
fn results_of_commands_are_those_of_the_runtime() {
    require!(containerd);
    let direct = Direct::start();
    let cases: [(&str, &[&str], &str, &str); 6] = [
        ("fails", &["/bin/testapp", "probe", "fail"], "failure", "went wrong"),
        ("killed", &["/bin/sh", "-c", "kill -9 $$$$"], "failure", "exit code 137"),
        ("quiet", &["/bin/sh", "-c", "exit 3"], "failure", "exit code 3"),
        ("by-path", &["testapp", "probe", "ok"], "success", ""),
        ("missing", &["no-such-program"], "error", "cannot execute the command"),
        ("streams", &["/bin/sh", "-c", "echo out; echo err >&2; exit 1"], "failure", "out\nerr"),
    ];
    for (name, command, _, _) in &cases {
        direct.node.apply(&probed(name, command));
    }
    for (name, _, outcome, detail) in &cases {
        let probe = direct.probe(name, |probe| !probe["last"].is_null());
        assert_eq!(probe["mode"], "direct", "{probe:#}");
        assert_eq!(probe["last"]["outcome"], *outcome, "{name}: {probe:#}");
        assert!(probe["last"]["detail"].as_str().unwrap().contains(detail), "{name}: {probe:#}");
    }
    // A container that was replaced is entered again.
    direct.node.apply(&probed("again", &["/bin/testapp", "probe", "ok"]));
    let before = direct.node.wait("again", "to be ready", PodView::ready);
    let (code, _, error) = direct.node.cli(&["restart", "again"]);
    assert_eq!(code, Some(0), "{error}");
    direct.node.wait("again", "to be ready in its next container", |pod| {
        pod.ready() && pod.restarts() > before.restarts()
    });
    assert_eq!(direct.probe("again", |_| true)["mode"], "direct");
}

#[test]
fn a_command_is_killed_with_its_descendants_at_its_timeout() {
    require!(containerd);
    let direct = Direct::start();
    let words = ["hang", "leave", "bomb"].map(beelet_tests::workdir::unique);
    let commands = [
        ("hang", vec!["/bin/testapp", "probe", "hang", &words[0]]),
        ("leave", vec!["/bin/testapp", "probe", "leave", &words[1]]),
    ];
    for (name, command) in &commands {
        let mut pod = probed(name, command);
        pod["spec"]["containers"][0]["readinessProbe"]["timeoutSeconds"] = json!(2);
        pod["spec"]["containers"][0]["readinessProbe"]["periodSeconds"] = json!(600);
        direct.node.apply(&pod);
    }
    for (name, _) in &commands {
        let probe = direct.probe(name, |probe| !probe["last"].is_null());
        assert!(probe["last"]["detail"].as_str().unwrap().contains("timed out after 2 s"), "{probe:#}");
    }
    for word in &words[..2] {
        assert_eq!(processes(word), 0, "{word}");
    }
    assert_eq!(leaves(&direct.node), Vec::<std::path::PathBuf>::new());
}

/// Returns the number of the machine's processes whose command line has this word.
pub(crate) fn processes(word: &str) -> usize {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| line.split(|byte| *byte == 0).any(|one| one == word.as_bytes())).count()
}

/// Returns the cgroups of commands that are left after all commands have ended.
pub(crate) fn leaves(node: &Node) -> Vec<std::path::PathBuf> {
    fn below(dir: &std::path::Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                if entry.file_name().to_string_lossy().starts_with("beelet-exec-") {
                    found.push(path.clone());
                }
                below(&path, found);
            }
        }
    }
    std::thread::sleep(Duration::from_millis(200));
    let mut found = Vec::new();
    node.containerd.cgroup().dirs().iter().for_each(|dir| below(dir, &mut found));
    found
}
