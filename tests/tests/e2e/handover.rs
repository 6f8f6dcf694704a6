//! The change of agents under running pods, with the kubelet that `KUBELET` names: kubelet, beelet, kubelet,
//! beelet. `beelet handover` stops and starts both. No process of a pod may end, no restart count may grow,
//! and no pod may lose its readiness under beelet. A pod in back-off and a pod with a hook are among the
//! pods.
//!
//! The kubelet runs in a mount namespace of its own, whose tmpfs mounts the runtime does not see: there are
//! no Secrets among the volumes.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use beelet_cri::Runtime;
use beelet_proto::cri;
use beelet_tests::agent::{Agent, Options};
use beelet_tests::cluster::{Cluster, Watcher, condition};
use beelet_tests::containerd::{Containerd, block_on};
use beelet_tests::kubelet::{self, Kubelet, Member, NODE};
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{manifests, ports, require, requires};
use serde_json::{Value, json};

/// Number of serving pods of the API server.
const SERVING: usize = 8;

/// A running container: its process, and the start time of the process in clock ticks since the boot.
type Process = (u32, u64);

/// Returns the processes of all running containers, by the container's identifier, except those of the pod in
/// back-off.
fn processes(containerd: &Containerd) -> BTreeMap<String, Process> {
    let endpoint = containerd.endpoint();
    block_on(async move {
        let runtime = Runtime::new(&endpoint, Duration::from_secs(30))?;
        let mut found = BTreeMap::new();
        for container in runtime.containers.list(None).await? {
            let pod = container.labels.get("io.kubernetes.pod.name").cloned().unwrap_or_default();
            if container.state() != cri::ContainerState::ContainerRunning || pod.starts_with("crashing") {
                continue;
            }
            let Some(pid) = runtime.containers.pid(&container.id).await? else { continue };
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
            // The fields after the program's name, in parentheses: the 20th is the start time.
            let rest = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
            let started = rest.split_whitespace().nth(19).and_then(|ticks| ticks.parse().ok());
            found.insert(format!("{pod}/{}", container.id), (pid, started.unwrap_or_default()));
        }
        Ok(found)
    })
    .unwrap()
}

/// Returns a pod of the API server. Without a token: the control plane has no controller that issues one.
fn tokenless(mut pod: Value) -> Value {
    pod["spec"]["automountServiceAccountToken"] = false.into();
    pod["spec"]["enableServiceLinks"] = false.into();
    pod
}

/// Returns a serving pod of the QoS class that its number selects, with volumes, an init container and a
/// hook.
fn serving(number: usize) -> Value {
    let mut pod = tokenless(manifests::serving(&format!("web{number}")));
    pod = match number % 3 {
        0 => manifests::with_resources(pod, ("100m", "32Mi"), ("100m", "32Mi")),
        1 => manifests::with_resources(pod, ("50m", "16Mi"), ("", "64Mi")),
        _ => pod,
    };
    let image = pod["spec"]["containers"][0]["image"].clone();
    let init = json!({"name": "init", "image": image, "command": ["/bin/sh", "-c", "echo made > /data/file"],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}]});
    pod["spec"]["initContainers"] = json!([init]);
    pod["spec"]["volumes"] = json!([
        {"name": "data", "emptyDir": {}}, {"name": "settings", "configMap": {"name": "settings"}},
        {"name": "names", "downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
    ]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([
        {"name": "data", "mountPath": "/data"}, {"name": "settings", "mountPath": "/settings"},
        {"name": "names", "mountPath": "/names"},
    ]);
    main["lifecycle"] =
        json!({"postStart": {"exec": {"command": ["/bin/sh", "-c", "echo x >> /data/hooks"]}}});
    pod
}

/// A program that starts and stops an agent for `beelet handover`, which is killed with the value.
struct Control {
    program: PathBuf,
    pid: PathBuf,
}

impl Control {
    /// Writes the program. `start` is a command line for a shell.
    fn new(dir: &Path, name: &str, start: &str) -> Self {
        let (program, pid) = (dir.join(name), dir.join(format!("{name}.pid")));
        let text = format!(
            "#!/bin/sh\npid={pid}\ncase $1 in\nstart) setsid {start} </dev/null >>{log} 2>&1 & echo $! >$pid ;;\n\
             stop) test -s $pid && kill $(cat $pid); : >$pid ;;\nesac\n",
            pid = pid.display(),
            log = dir.join(format!("{name}.log")).display(),
        );
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Self { program, pid }
    }

    /// Makes the program stop the process with this id.
    fn set(&self, pid: u32) {
        fs::write(&self.pid, pid.to_string()).unwrap();
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = Command::new(&self.program).arg("stop").status();
    }
}

/// Quotes words for a shell.
fn quoted(words: impl IntoIterator<Item = String>) -> String {
    words.into_iter().map(|word| format!("'{}'", word.replace('\'', "'\\''"))).collect::<Vec<_>>().join(" ")
}

/// Returns the arguments of `beelet run` in addition to its configuration.
fn arguments(kubeconfig: &str) -> [&str; 5] {
    ["--kubeconfig", kubeconfig, "--node-ip", "192.0.2.7", "--adopt"]
}

struct Scene {
    agent: Agent,
    cluster: Cluster,
    kubelet: Option<Kubelet>,
    kubeconfig: String,
    containerd: Containerd,
    root: PathBuf,
    version: String,
}

impl Scene {
    fn start(binary: &Path) -> Self {
        let containerd = Containerd::start_for_test().unwrap();
        let cluster = Cluster::start(containerd.dir()).unwrap();
        let kubeconfig = cluster.node_kubeconfig(NODE).unwrap();
        let [port] = ports::free().unwrap();
        let keys = cluster.serving_files(NODE).unwrap();
        let member = Member { kubeconfig: kubeconfig.clone(), port, keys };
        let kubelet = Kubelet::join(binary, &containerd, &member).unwrap();
        let dir = containerd.dir().join("kubelet");
        let root = dir.join("root");
        let path = |path: PathBuf| path.display().to_string();
        let mut options = Options::on(&containerd)
            .kubelet("staticPodPath", path(dir.join("manifests")))
            .kubelet("podLogsDir", "/var/log/pods")
            .beelet("nodeName", NODE)
            .beelet("criticalStaticPods", true)
            .beelet("adoptKubeletPods", true)
            .beelet("podsDir", path(root.join("pods")))
            .beelet("kubeletDir", path(root.clone()));
        let kubeconfig = kubeconfig.display().to_string();
        options.arguments.extend(arguments(&kubeconfig).map(str::to_owned));
        // Beside the kubelet, beelet refuses to start; only its configuration remains.
        wait_for("the kubelet to drive the runtime", PATIENCE, || {
            match beelet_cri::ownership::kubelet_on(&containerd.socket()) {
                Ok(Some(_)) => Ok(()),
                Ok(None) => Err("not yet".to_owned()),
                Err(error) => Err(error.to_string()),
            }
        })
        .unwrap();
        let mut agent = Agent::spawn(options).unwrap();
        assert!(!agent.wait_for_exit().unwrap().success(), "beelet started beside a kubelet");
        assert!(agent.log().contains("drives the runtime"), "{}", agent.log());
        let said = kubelet::version(binary).unwrap();
        // A kubelet that was built without its version says v0.0.0: the tests' own is 1.20.
        let version = if said.contains(" v0.") { "1.20".to_owned() } else { said };
        Scene { agent, cluster, kubelet: Some(kubelet), kubeconfig, containerd, root, version }
    }

    fn until_ready(&self, name: &str) {
        let ready = |pod: &Value| (pod.is_object() && condition(pod, "Ready")).then_some(());
        let waited = self.cluster.until(&format!("{name} to be ready"), &Cluster::pod(name), ready);
        waited.unwrap_or_else(|error| panic!("{error:#}\n{}\n{}", self.agent.log(), self.kubelet_log()));
    }

    fn kubelet_log(&self) -> String {
        let log = self.kubelet.as_ref().map(Kubelet::log).unwrap_or_default();
        let last: Vec<&str> = log.lines().rev().take(40).collect();
        last.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    /// Runs `beelet handover`, and returns its output if it succeeds.
    fn handover(&self, controls: &[Control; 2], arguments: &[&str]) -> Result<String, String> {
        let mut command = self.agent.cli(&["handover", "--kubeconfig", &self.kubeconfig]);
        command.arg("--root-dir").arg(&self.root).args(["--settle", "10s", "--timeout", "120s"]);
        command.arg("--kubelet-control").arg(&controls[0].program);
        command.arg("--beelet-control").arg(&controls[1].program).args(arguments);
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        println!("beelet handover {arguments:?}:\n{}", text.concat());
        if output.status.success() { Ok(text.concat()) } else { Err(text.concat()) }
    }

    /// Follows the serving pods from now on.
    fn watch(&self) -> Vec<Watcher> {
        (0..SERVING)
            .map(|number| self.cluster.watch(&Cluster::pod(&format!("web{number}"))).unwrap())
            .collect()
    }

    /// Asserts that the pods were ready in each state until now, whose end an annotation marks.
    fn assert_ready_throughout(&self, watchers: &[Watcher], mark: &str) {
        for (number, watcher) in watchers.iter().enumerate() {
            let name = format!("web{number}");
            let end = json!({"metadata": {"annotations": {"handover": mark}}});
            self.cluster.patch(&Cluster::pod(&name), &end).unwrap();
            let is_end_or_flip =
                |pod: &Value| !condition(pod, "Ready") || pod["metadata"]["annotations"]["handover"] == mark;
            let (_, pod) = watcher.until(&format!("the end of {name}"), is_end_or_flip).unwrap();
            assert!(condition(&pod, "Ready"), "{name} lost its readiness: {pod}");
        }
    }

    /// Asserts that everything runs on as `before`, without restarts.
    fn assert_same(&self, before: &BTreeMap<String, Process>, what: &str) {
        let now = processes(&self.containerd);
        for (container, process) in before {
            assert_eq!(now.get(container), Some(process), "{what}: {container}\n{}", self.kubelet_log());
        }
        for number in 0..SERVING {
            let pod = self.cluster.get(&Cluster::pod(&format!("web{number}"))).unwrap();
            let status = &pod["status"]["containerStatuses"][0];
            assert_eq!(
                (&status["restartCount"], &status["ready"]),
                (&json!(0), &json!(true)),
                "{what}: {pod}"
            );
        }
    }
}

#[test]
fn pods_run_on_from_a_kubelet_to_beelet_and_back() {
    require!(containerd, bpf, apiserver);
    let binary = match kubelet::given() {
        Ok(binary) => binary,
        Err(missing) => return requires::skip(&missing),
    };
    let mut scene = Scene::start(&binary);
    let settings = json!({"metadata": {"name": "settings"}, "data": {"a": "1"}});
    scene.cluster.create("/api/v1/namespaces/default/configmaps", &settings).unwrap();
    for number in 0..SERVING {
        scene.cluster.run(NODE, &serving(number)).unwrap();
    }
    let crashing = tokenless(manifests::pod("crashing", &["/bin/sh", "-c", "exit 3"]));
    scene.cluster.run(NODE, &crashing).unwrap();
    scene.kubelet.as_ref().unwrap().apply(&manifests::serving("static")).unwrap();
    (0..SERVING).for_each(|number| scene.until_ready(&format!("web{number}")));
    let mirror = format!("static-{NODE}");
    scene.until_ready(&mirror);
    let mirror_uid = scene.cluster.get(&Cluster::pod(&mirror)).unwrap()["metadata"]["uid"].clone();
    let before = processes(&scene.containerd);
    assert_eq!(before.len(), SERVING + 1, "{before:?}");
    let watchers = scene.watch();

    // The control programs take over the processes of the test.
    let running = scene.kubelet.take().unwrap();
    let line = fs::read(format!("/proc/{}/cmdline", running.pid())).unwrap();
    let words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    let words = quoted(words.map(|word| String::from_utf8(word.to_vec()).unwrap()));
    let namespace = "mkdir -p /var/lib/kubelet && mount -t tmpfs none /var/lib/kubelet && exec \"$@\"";
    let of_kubelet = format!("unshare --mount sh -c '{namespace}' sh {words}");
    let program = beelet_tests::agent::binary().unwrap().display().to_string();
    let config = scene.agent.config().display().to_string();
    let of_beelet = [program.as_str(), "run", "--config", config.as_str()]
        .into_iter()
        .chain(arguments(&scene.kubeconfig));
    let dir = scene.containerd.dir().to_path_buf();
    let controls = [
        Control::new(&dir, "kubelet-control", &of_kubelet),
        Control::new(&dir, "beelet-control", &quoted(of_beelet.map(str::to_owned))),
    ];
    controls[0].set(running.pid());

    let check = scene.handover(&controls, &["--check"]).unwrap();
    assert!(check.contains("default/web0: is taken over"), "{check}");
    assert!(check.contains(&format!("default/{mirror}: is taken over")), "{check}");
    scene.handover(&controls, &["--from-kubelet"]).unwrap();
    drop(running);
    scene.assert_same(&before, "under beelet");
    // SIGKILL at any moment changes nothing: the next start knows its pods.
    let pid = fs::read_to_string(&controls[1].pid).unwrap();
    let killed = Command::new("kill").args(["-9", pid.trim()]).status().unwrap();
    assert!(killed.success());
    scene.handover(&controls, &["--from-kubelet"]).unwrap();
    scene.assert_same(&before, "under beelet again");
    let mirror_now = scene.cluster.get(&Cluster::pod(&mirror)).unwrap()["metadata"]["uid"].clone();
    assert_eq!(mirror_now, mirror_uid, "the mirror was replaced");

    scene.assert_ready_throughout(&watchers, "first");

    // Kubelets before 1.35 forget the readiness at their start, also at a start of their own.
    scene.handover(&controls, &["--to-kubelet", "--kubelet-version", &scene.version]).unwrap();
    // A pod that the kubelet starts now proves that it has looked at all others.
    scene.cluster.run(NODE, &serving(SERVING)).unwrap();
    scene.until_ready(&format!("web{SERVING}"));
    (0..SERVING).for_each(|number| scene.until_ready(&format!("web{number}")));
    scene.assert_same(&before, "under the kubelet again");
    let watchers = scene.watch();
    scene.handover(&controls, &["--from-kubelet"]).unwrap();
    scene.assert_same(&before, "under beelet at the end");
    scene.assert_ready_throughout(&watchers, "second");
    for number in 0..SERVING {
        let pod = scene.cluster.get(&Cluster::pod(&format!("web{number}"))).unwrap();
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        let hooks = scene.root.join("pods").join(uid).join("volumes/kubernetes.io~empty-dir/data/hooks");
        assert_eq!(fs::read_to_string(hooks).unwrap(), "x\n", "the hook of web{number} ran again");
    }
    // A container that beelet starts has a digest of newer kubelets: the check names it for this one.
    let pid = before.iter().find(|(container, _)| container.starts_with("web0/")).unwrap().1.0;
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
    let again = |pod: &Value| (pod["status"]["containerStatuses"][0]["restartCount"] == 1).then_some(());
    scene.cluster.until("web0 to run again", &Cluster::pod("web0"), again).unwrap();
    scene.until_ready("web0");
    let check = |version| {
        let checked = scene.handover(&controls, &["--check", "--to-kubelet", "--kubelet-version", version]);
        checked.unwrap_or_else(|refused| refused)
    };
    let old = check("1.20");
    assert!(old.contains("default/web0: would restart: beelet created container main"), "{old}");
    assert!(old.contains("default/web1: is taken over"), "{old}");
    assert!(check("1.36").contains("default/web0: is taken over"));
}
