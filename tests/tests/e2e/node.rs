//! A node for tests of real pods: an agent on a containerd of its own, and the output of its pods.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::path::{Path, PathBuf};

use beelet_tests::agent::{Agent, Options};
use beelet_tests::confine::Installed;
use beelet_tests::containerd::Containerd;
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{guards, images, requires};
use serde_json::{Value, json};

/// Runs `check` on both containerd versions; on the first only if the second is not configured.
pub(crate) fn on_every_containerd(check: impl Fn(Containerd)) {
    check(Containerd::start_for_test().unwrap());
    if let Err(missing) = requires::containerd_2() {
        requires::skip(&missing);
        return;
    }
    check(Containerd::start_version_2_for_test().unwrap());
}

/// Returns the options of an agent on `containerd`, confined as by its systemd unit, as all agents here are.
pub(crate) fn installed(containerd: &Containerd) -> Options {
    as_installed(Options::on(containerd))
}

/// Adds the settings of the systemd unit to existing options.
pub(crate) fn as_installed(options: Options) -> Options {
    options.as_installed(Installed::new(env!("CARGO_BIN_EXE_confined"), "beelet.service"))
}

/// An agent on a containerd of its own. The agent is dropped first.
pub(crate) struct Node {
    pub(crate) agent: Agent,
    pub(crate) containerd: Containerd,
}

impl Node {
    pub(crate) fn start(change: impl FnOnce(Options) -> Options) -> Node {
        Node::on(Containerd::start_for_test().unwrap(), change)
    }

    pub(crate) fn on(containerd: Containerd, change: impl FnOnce(Options) -> Options) -> Node {
        let agent = Agent::start(change(installed(&containerd))).unwrap();
        Node { agent, containerd }
    }

    /// Writes a manifest of any kind to the folder.
    pub(crate) fn apply(&self, manifest: &Value) {
        let (kind, name) =
            (manifest["kind"].as_str().unwrap(), manifest["metadata"]["name"].as_str().unwrap());
        self.agent.apply(&format!("{}-{name}.yaml", kind.to_lowercase()), manifest.to_string()).unwrap();
    }

    pub(crate) fn remove(&self, name: &str) {
        self.agent.remove(&format!("pod-{name}.yaml")).unwrap();
    }

    pub(crate) fn wait(
        &self,
        name: &str,
        what: &str,
        condition: impl Fn(&PodView) -> bool + Send + Sync,
    ) -> PodView {
        let what = format!("{name} {what}");
        self.agent.until(&what, |watch| watch.pod(name).filter(|pod| condition(pod)).cloned()).unwrap()
    }

    pub(crate) fn wait_gone(&self, name: &str) {
        self.agent
            .until(&format!("{name} to be removed"), |watch| watch.pod(name).is_none().then_some(()))
            .unwrap();
    }

    /// Waits until the pod has succeeded. Returns the output of its containers, `main`'s first.
    pub(crate) fn output(&self, name: &str) -> String {
        let pod = self.wait(name, "to end", |pod| matches!(pod.phase(), "Succeeded" | "Failed"));
        let text = self.log(&pod, "main", 0);
        assert_eq!(pod.phase(), "Succeeded", "{name} printed:\n{text}\n{:?}", pod.pod.status);
        text
    }

    /// Returns the output of one attempt of a container.
    pub(crate) fn log(&self, pod: &PodView, container: &str, attempt: u32) -> String {
        let path = self.log_path(pod, container, attempt);
        let text = std::fs::read_to_string(&path)
            .inspect_err(|error| eprintln!("{}: {error}", path.display()))
            .unwrap();
        text.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).map(|line| format!("{line}\n")).collect()
    }

    pub(crate) fn log_path(&self, pod: &PodView, container: &str, attempt: u32) -> PathBuf {
        self.pod_logs(pod).join(container).join(format!("{attempt}.log"))
    }

    pub(crate) fn pod_logs(&self, pod: &PodView) -> PathBuf {
        let name = pod.name().replace('/', "_");
        self.agent.dir().join("logs").join(format!("{name}_{}", pod.uid()))
    }

    /// Returns the pod's folder.
    pub(crate) fn folder(&self, pod: &PodView) -> PathBuf {
        self.agent.dir().join("pods").join(pod.uid())
    }

    /// Returns the mounts below a folder.
    pub(crate) fn mounts_below(&self, folder: &Path) -> Vec<PathBuf> {
        let all = guards::mounts().unwrap().into_iter().map(|mount| mount.path);
        all.filter(|path| path.starts_with(folder)).collect()
    }

    /// Waits until a container of the pod waits for this reason. Returns the message.
    pub(crate) fn waiting(&self, name: &str, container: &str, reason: &str) -> String {
        let waits = |pod: &PodView| {
            let state = pod.container(container)?.state.clone()?.waiting?;
            (state.reason.as_deref() == Some(reason)).then(|| state.message.unwrap_or_default())
        };
        let what = format!("{container} to wait for {reason}");
        waits(&self.wait(name, &what, |pod| waits(pod).is_some())).unwrap()
    }

    /// Waits until `wanted` is true for a file's content. Returns the content.
    pub(crate) fn wait_file(&self, path: &Path, wanted: impl Fn(&str) -> bool) -> String {
        wait_for(&format!("{} to change", path.display()), PATIENCE, || {
            let text = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
            if wanted(&text) { Ok(text) } else { Err(text) }
        })
        .unwrap()
    }

    /// Runs the `beelet` command. Returns its exit code, standard output and standard error.
    pub(crate) fn cli(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = self.agent.cli(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    }
}

/// Returns a pod that runs a script once.
pub(crate) fn script(name: &str, script: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "labels": { "app": name } },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [container("main", script)],
        },
    })
}

/// Returns a container that runs a script.
pub(crate) fn container(name: &str, script: &str) -> Value {
    json!({ "name": name, "image": images::APP, "command": ["/bin/sh", "-c", script] })
}

/// Returns an object with data.
pub(crate) fn object(kind: &str, name: &str, data: &Value) -> Value {
    let field = if kind == "Secret" { "stringData" } else { "data" };
    json!({ "apiVersion": "v1", "kind": kind, "metadata": { "name": name }, field: data })
}

/// Checks that a text has all of these lines.
pub(crate) fn check_lines(text: &str, lines: &[&str]) {
    for line in lines {
        assert!(text.lines().any(|found| found == *line), "no line {line:?} in:\n{text}");
    }
}
