//! An agent as a separate process on a fake runtime, and the checks that these tests share.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use beelet_proto::cri::ContainerState;
use beelet_tests::agent::{Agent, Options, binary};
use beelet_tests::cri::{Asked, CHANGES, FakeCri};
use beelet_tests::guards::CgroupRoot;
use beelet_tests::pods::{PodView, Watch};
use beelet_tests::{images, manifests, workdir};
use serde_json::{Value, json};

/// The agent with its resources, dropped in this order.
pub(crate) struct Scene {
    pub(crate) agent: Agent,
    pub(crate) cri: FakeCri,
    _cgroup: CgroupRoot,
    pub(crate) dir: tempfile::TempDir,
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.describe());
        }
    }
}

impl Scene {
    /// Starts an agent and waits until it is up.
    pub(crate) fn start(change: impl FnOnce(&Path, Options) -> Options) -> Scene {
        let mut scene = Scene::spawn(change);
        scene.agent.wait_until_up().unwrap();
        scene
    }

    /// Starts an agent.
    pub(crate) fn spawn(change: impl FnOnce(&Path, Options) -> Options) -> Scene {
        Scene::spawn_on(FakeCri::start(), change)
    }

    /// Starts an agent on a runtime that the test has prepared.
    pub(crate) fn spawn_on(cri: FakeCri, change: impl FnOnce(&Path, Options) -> Options) -> Scene {
        let dir = tempfile::tempdir().unwrap();
        cri.add_image(images::APP);
        let cgroup = CgroupRoot::new(&workdir::unique("bh")).unwrap();
        let mut options = Options::at(dir.path(), "agent", &cri.endpoint(), &cgroup).beelet("bpf", "off");
        options.mount_bpffs = false;
        let agent = Agent::spawn(change(dir.path(), options)).unwrap();
        Scene { agent, cri, _cgroup: cgroup, dir }
    }

    // ---- Pods ----

    pub(crate) fn apply(&self, pod: &Value) {
        let name = pod["metadata"]["name"].as_str().unwrap();
        self.agent.apply(&format!("{name}.yaml"), pod.to_string()).unwrap();
    }

    pub(crate) fn remove(&self, name: &str) {
        self.agent.remove(&format!("{name}.yaml")).unwrap();
    }

    /// Waits until `found` returns a value for the pods.
    pub(crate) fn until<T: Send>(&self, what: &str, found: impl FnMut(&Watch) -> Option<T> + Send) -> T {
        let found = self.agent.until(what, found);
        found.unwrap_or_else(|error| panic!("{error:#}"))
    }

    pub(crate) fn until_pod(
        &self,
        name: &str,
        what: &str,
        wanted: impl Fn(&PodView) -> bool + Send + Sync,
    ) -> PodView {
        self.until(&format!("{name} {what}"), |watch| watch.pod(name).filter(|pod| wanted(pod)).cloned())
    }

    pub(crate) fn until_ready(&self, name: &str) -> PodView {
        self.until_pod(name, "to be ready", PodView::ready)
    }

    /// Waits until the table and the runtime have dropped a pod.
    pub(crate) fn until_gone(&self, name: &str) {
        self.until(&format!("{name} to be gone"), |watch| watch.pod(name).is_none().then_some(()));
        self.poll_until(&format!("{name} to leave the runtime"), || match self.sandbox(name) {
            None => Ok(()),
            Some(id) => Err(format!("{id} still exists")),
        });
    }

    /// Makes a pod's running container exit with this code.
    pub(crate) fn exit(&self, pod: &str, code: i32) {
        let container = self.cri.container(&on_node(pod), "main").unwrap();
        self.cri.exit(&container.id, code);
    }

    // ---- The runtime ----

    /// Returns the id of a pod's newest sandbox.
    pub(crate) fn sandbox(&self, pod: &str) -> Option<String> {
        self.cri.sandbox(&on_node(pod)).map(|sandbox| sandbox.id)
    }

    /// Returns the containers of a pod: name, attempt, and `+` if it runs.
    pub(crate) fn containers(&self, pod: &str) -> String {
        let world = self.cri.world();
        let of_pod = |id: &String| world.sandboxes.get(id).is_some_and(|s| s.pod_name() == on_node(pod));
        let mut all: Vec<String> = world
            .containers
            .values()
            .filter(|container| of_pod(&container.sandbox_id))
            .map(|container| {
                let mark = if container.state == ContainerState::ContainerRunning { "+" } else { "-" };
                format!("{}/{}{mark}", container.name(), container.attempt())
            })
            .collect();
        all.sort();
        all.join(" ")
    }

    /// Returns the number of successful calls that change the runtime's state.
    pub(crate) fn changes(&self) -> usize {
        self.cri.calls().iter().filter(|call| CHANGES.contains(&call.op()) && call.succeeded()).count()
    }

    /// Waits until the agent has listed all containers twice from now on.
    pub(crate) fn until_relisted(&self) {
        for _ in 0..2 {
            let first = self.cri.calls().len();
            self.until_called("a relist", first, 1, is_relist);
        }
    }

    /// Waits until `times` calls that `wanted` accepts have ended, from number `first` on.
    pub(crate) fn until_called(
        &self,
        what: &str,
        first: usize,
        times: usize,
        wanted: impl Fn(&Asked) -> bool,
    ) {
        self.poll_until(what, || {
            let calls = self.cri.calls();
            let ended = |call: &&beelet_tests::cri::Call| {
                wanted(&call.asked) && call.outcome != beelet_tests::cri::Outcome::Pending
            };
            let count = calls.iter().skip(first).filter(ended).count();
            if count >= times { Ok(()) } else { Err(format!("{count} of {times}")) }
        });
    }

    // ---- The agent's output ----

    /// Polls until `check` succeeds; the agent must be alive all the time.
    pub(crate) fn poll_until<T>(&self, what: &str, check: impl Fn() -> Result<T, String>) -> T {
        workdir::wait_for(what, workdir::PATIENCE, || {
            check().map_err(
                |wrong| if self.is_alive() { wrong } else { format!("{wrong}; the agent has ended") },
            )
        })
        .unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Returns true if the agent's process runs.
    fn is_alive(&self) -> bool {
        let Some(pid) = self.agent.pid() else { return false };
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The state follows the name, which may contain any character; a zombie has ended.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    }

    /// Asserts that the agent runs and has not panicked.
    pub(crate) fn is_well(&self) {
        assert!(self.is_alive(), "the agent has ended:");
        let log = self.agent.log();
        assert!(!log.contains("panicked at"), "{log}");
    }

    /// Waits until the log contains this text.
    pub(crate) fn until_logged(&self, what: &str) {
        self.poll_until(&format!("the log to contain {what:?}"), || {
            if self.agent.log().contains(what) { Ok(()) } else { Err("not logged".to_owned()) }
        });
    }

    /// Runs `beelet` with these arguments, as a user on the node does.
    pub(crate) fn cli(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(binary().unwrap());
        command.args(arguments);
        command.env("BEELET_CONFIG", self.agent.config()).env("BEELET_SOCKET", self.agent.socket());
        command.output().unwrap()
    }

    /// Returns the standard output of `beelet` with these arguments.
    pub(crate) fn stdout_of(&self, arguments: &[&str]) -> String {
        let output = self.cli(arguments);
        let (text, error) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {error}");
        text.into_owned()
    }

    /// Returns the status of a condition of the node.
    pub(crate) fn condition(&self, name: &str) -> String {
        let node: Value = serde_json::from_str(&self.stdout_of(&["get", "node", "-o", "json"])).unwrap();
        let conditions = node["status"]["conditions"].as_array().unwrap();
        let found = conditions.iter().find(|condition| condition["type"] == name);
        found.unwrap_or_else(|| panic!("{name} is not among {conditions:#?}"))["status"]
            .as_str()
            .unwrap()
            .to_owned()
    }

    /// Waits until a condition of the node has this status. An agent that still waits for its runtime has no
    /// conditions.
    pub(crate) fn until_condition(&self, name: &str, status: &str) {
        self.poll_until(&format!("{name} to be {status}"), || {
            let asked = self.cli(&["get", "node"]);
            if !asked.status.success() {
                return Err(String::from_utf8_lossy(&asked.stderr).into_owned());
            }
            let found = self.condition(name);
            if found == status { Ok(()) } else { Err(found) }
        });
    }

    /// Returns a path below the agent's folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.agent.dir().join(name)
    }

    /// Returns the ends of the log and of the call list, for failed tests.
    pub(crate) fn describe(&self) -> String {
        let mut text = self.agent.log();
        let lines = text.lines().count();
        if lines > 200 {
            text = text.lines().skip(lines - 200).map(|line| format!("{line}\n")).collect();
        }
        let calls = self.cri.calls();
        for call in calls.iter().skip(calls.len().saturating_sub(40)) {
            let asked: String = format!("{:?}", call.asked).chars().take(160).collect();
            let _ = writeln!(text, "{:4} {:?}: {asked}", call.number, call.outcome);
        }
        text
    }
}

/// Returns the name of a manifest's pod on this node.
pub(crate) fn on_node(pod: &str) -> String {
    format!("{pod}-{}", beelet_tests::agent::NODE)
}

/// Returns true if a listing covers all containers of the agent, not only one pod.
pub(crate) fn is_relist(asked: &Asked) -> bool {
    let Asked::ListContainers(request) = asked else { return false };
    let filter = request.filter.clone().unwrap_or_default();
    let labels = &filter.label_selector;
    labels.contains_key("beelet.dev/managed-by") && !labels.contains_key("io.kubernetes.pod.uid")
}

/// Returns a pod with one container that runs forever.
pub(crate) fn pod(name: &str) -> Value {
    manifests::pod(name, &["/bin/testapp"])
}

/// Returns a pod with an emptyDir, a ConfigMap volume and a downward API volume.
pub(crate) fn with_volumes(name: &str) -> Value {
    let mut pod = pod(name);
    let label = json!({ "path": "name", "fieldRef": { "fieldPath": "metadata.name" } });
    pod["spec"]["volumes"] = json!([
        { "name": "scratch", "emptyDir": {} },
        { "name": "conf", "configMap": { "name": "conf" } },
        { "name": "about", "downwardAPI": { "items": [label] } },
    ]);
    let mount = |name: &str| json!({ "name": name, "mountPath": format!("/{name}") });
    pod["spec"]["containers"][0]["volumeMounts"] = json!([mount("scratch"), mount("conf"), mount("about")]);
    pod
}

/// Returns the ConfigMap of [`with_volumes`].
pub(crate) fn config_map() -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "conf" }, "data": { "greeting": "hello" },
    })
}

/// Starts the agent through a shell: the shell runs `prelude` and then becomes `command`, in which the
/// agent's command line replaces `{}`.
pub(crate) fn through(dir: &Path, mut options: Options, prelude: &str, command: &str) -> Options {
    let path = dir.join("beelet");
    let agent = format!("'{}' \"$@\"", binary().unwrap().display());
    let script = format!("#!/bin/sh\nset -e\n{prelude}\nexec {}\n", command.replace("{}", &agent));
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    options.binary = Some(path);
    options
}

/// Runs the agent in its own mount namespace, like a container whose pods' folder is mounted with
/// mountPropagation `Bidirectional`: only mounts below that folder are visible outside. `inner` runs there
/// before the agent.
pub(crate) fn in_own_mounts(dir: &Path, options: Options, inner: &str) -> Options {
    let set = options.beelet.get("podsDir").and_then(Value::as_str).map(str::to_owned);
    let pods = set.unwrap_or_else(|| dir.join("agent/pods").display().to_string());
    let prelude = format!(
        "mkdir -p {pods}; mountpoint -q {pods} || {{ mount --bind {pods} {pods}; mount --make-shared {pods}; }}"
    );
    let alone = format!(
        "while read -r _ _ _ _ point _; do [ \"$point\" = {pods} ] || mount --make-slave \"$point\" 2>/dev/null || :; \
         done </proc/self/mountinfo"
    );
    let command =
        format!("unshare --mount --propagation unchanged sh -ec '{alone}; {inner}; exec \"$@\"' sh {{}}");
    through(dir, options, &prelude, &command)
}

/// Returns all paths below a folder, sorted for comparisons.
pub(crate) fn files_below(dir: &Path) -> Vec<PathBuf> {
    let (mut found, mut todo) = (Vec::new(), vec![dir.to_path_buf()]);
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                todo.push(entry.path());
            }
            found.push(entry.path());
        }
    }
    found.sort();
    found
}

/// Returns the sorted names in a folder.
pub(crate) fn names_in(dir: &Path) -> Vec<OsString> {
    let entries = std::fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}
