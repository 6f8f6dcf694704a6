//! A node for tests of real pods: an agent on a containerd of its own, and what its pods print.

#![allow(clippy::unwrap_used)] // a test's helpers may panic as the test itself may

use std::path::{Path, PathBuf};

use beelet_tests::agent::{Agent, Options};
use beelet_tests::confine::Installed;
use beelet_tests::containerd::Containerd;
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{guards, images, requires};
use serde_json::{Value, json};

/// Runs `check` on both containerds; without the second one if none is given.
pub(crate) fn on_every_containerd(check: impl Fn(Containerd)) {
    check(Containerd::start_for_test().unwrap());
    if let Err(missing) = requires::containerd_2() {
        requires::skip(&missing);
        return;
    }
    check(Containerd::start_version_2_for_test().unwrap());
}

/// The configuration for an agent on `containerd` that runs under the settings of its unit, as all agents
/// here do.
pub(crate) fn installed(containerd: &Containerd) -> Options {
    as_installed(Options::on(containerd))
}

/// The same of a configuration that is there.
pub(crate) fn as_installed(options: Options) -> Options {
    options.as_installed(Installed::new(env!("CARGO_BIN_EXE_confined"), "beelet.service"))
}

/// An agent on a containerd of its own. The agent ends first.
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

    /// Puts a manifest of any kind into the folder.
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
            .until(&format!("{name} to be gone"), |watch| watch.pod(name).is_none().then_some(()))
            .unwrap();
    }

    /// Waits until the pod has ended well; what its containers printed, `main`'s first.
    pub(crate) fn output(&self, name: &str) -> String {
        let pod = self.wait(name, "to end", |pod| matches!(pod.phase(), "Succeeded" | "Failed"));
        let text = self.log(&pod, "main", 0);
        assert_eq!(pod.phase(), "Succeeded", "{name} printed:\n{text}\n{:?}", pod.pod.status);
        text
    }

    /// What a container's instance has printed.
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

    /// The pod's folder.
    pub(crate) fn folder(&self, pod: &PodView) -> PathBuf {
        self.agent.dir().join("pods").join(pod.uid())
    }

    /// The mounts below a folder.
    pub(crate) fn mounts_below(&self, folder: &Path) -> Vec<PathBuf> {
        let all = guards::mounts().unwrap().into_iter().map(|mount| mount.path);
        all.filter(|path| path.starts_with(folder)).collect()
    }

    /// Why a container of the pod waits, once it waits for this reason.
    pub(crate) fn waiting(&self, name: &str, container: &str, reason: &str) -> String {
        let waits = |pod: &PodView| {
            let state = pod.container(container)?.state.clone()?.waiting?;
            (state.reason.as_deref() == Some(reason)).then(|| state.message.unwrap_or_default())
        };
        let what = format!("{container} to wait for {reason}");
        waits(&self.wait(name, &what, |pod| waits(pod).is_some())).unwrap()
    }

    /// Waits until a file says what is wanted.
    pub(crate) fn wait_file(&self, path: &Path, wanted: impl Fn(&str) -> bool) -> String {
        wait_for(&format!("{} to change", path.display()), PATIENCE, || {
            let text = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
            if wanted(&text) { Ok(text) } else { Err(text) }
        })
        .unwrap()
    }

    /// The `beelet` command: its exit code, its standard output and its standard error.
    pub(crate) fn cli(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = self.agent.cli(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    }
}

/// A pod that runs a script once.
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

/// A container that runs a script.
pub(crate) fn container(name: &str, script: &str) -> Value {
    json!({ "name": name, "image": images::APP, "command": ["/bin/sh", "-c", script] })
}

/// An object with data.
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
