//! A node with a kubelet and beelet, a control plane, and what pods need: devices and a CSI driver.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use beelet_cri::Runtime;
use beelet_proto::cri;
use beelet_tests::cluster::{Cluster, condition};
use beelet_tests::containerd::{Containerd, block_on};
use beelet_tests::csi_driver::{CsiDriver, Settings};
use beelet_tests::guards::Process;
use beelet_tests::kubelet::{self, Kubelet, Member, NODE};
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{guards, ports, requires};
use serde_json::Value;

use super::agents::Agents;
use super::kinds::{DRIVER, Facts, Kind, Then};

/// A running container: its process, and the start time of the process in clock ticks since the boot.
pub(super) type Task = (u32, u64);

/// The node. The parts that use the runtime are dropped before it.
pub(super) struct Scene {
    pub agents: Agents,
    pub plugin: Option<Process>,
    pub driver: CsiDriver,
    _first: Kubelet,
    pub cluster: Cluster,
    pub containerd: Containerd,
    /// The root folder of both agents.
    pub root: PathBuf,
    /// The pods of the API server.
    pub pods: Vec<Kind>,
    pub facts: Facts,
}

impl Scene {
    /// Starts a node that the kubelet runs.
    pub(super) fn start(binary: &Path) -> Self {
        let said = kubelet::version(binary).unwrap();
        // A kubelet that was built without its version says v0.0.0: the tests' own is 1.20.
        let version = if said.contains(" v0.") { "Kubernetes v1.20.2".to_owned() } else { said };
        let minor = version.split('.').nth(1).and_then(|minor| minor.parse().ok()).unwrap();
        let is_new = minor >= 36 && requires::containerd_2().is_ok();
        let containerd =
            if is_new { Containerd::start_version_2_for_test() } else { Containerd::start_for_test() };
        let containerd = containerd.unwrap();
        let cluster = Cluster::start(containerd.dir()).unwrap();
        let kubeconfig = cluster.node_kubeconfig(NODE).unwrap();
        let [port] = ports::free().unwrap();
        let keys = cluster.serving_files(NODE).unwrap();
        let member = Member { kubeconfig: kubeconfig.clone(), port, keys };
        let running = Kubelet::join(binary, &containerd, &member).unwrap();
        let (dir, kubeconfig) = (containerd.dir().to_path_buf(), kubeconfig.display().to_string());
        let root = dir.join("kubelet/root");
        let driver = CsiDriver::start(&root, &dir.join("shelf"), Settings::named(DRIVER)).unwrap();
        let agents = Agents::new(&containerd, &running, kubeconfig, version);
        let host = dir.join("host");
        fs::create_dir(&host).unwrap();
        let has_csi = std::env::var_os("BEELET_HANDOVER_CSI").is_some();
        // The plugin does not register with kubelets that announce the end of this registration.
        let has_devices = minor > 20 && requires::device_plugin().is_ok();
        let facts = Facts { minor, has_devices, has_csi, host };
        Scene {
            agents,
            plugin: None,
            driver,
            _first: running,
            cluster,
            containerd,
            root,
            pods: Vec::new(),
            facts,
        }
    }

    /// Starts Kubernetes' own sample plugin, which registers once: like a DaemonSet's, it starts again with
    /// each agent.
    pub(super) fn start_plugin(&mut self) {
        let Some(binary) = requires::given_device_plugin().filter(|_| self.facts.has_devices) else { return };
        self.plugin = None;
        let sockets = self.root.join("device-plugins");
        let is_ready = || {
            let there = sockets.join("kubelet.sock").exists();
            if there { Ok(()) } else { Err("the socket is missing".to_owned()) }
        };
        wait_for("the registration socket", PATIENCE, is_ready).unwrap();
        let script = "mount --make-rprivate / && mount -t tmpfs none /var/lib && \
                      mkdir -p /var/lib/kubelet/device-plugins && \
                      mount --bind \"$1\" /var/lib/kubelet/device-plugins && exec \"$0\"";
        let log = fs::File::create(self.containerd.dir().join("plugin.log")).unwrap();
        let plugin = Command::new("unshare")
            .args(["--mount", "sh", "-c", script])
            .arg(binary)
            .arg(&sockets)
            .env("PLUGIN_SOCK_DIR", "/var/lib/kubelet/device-plugins/")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn();
        self.plugin = Some(Process(plugin.unwrap()));
        let has_two =
            |node: &Value| (node["status"]["allocatable"]["example.com/resource"] == "2").then_some(());
        self.until("the devices", &format!("/api/v1/nodes/{NODE}"), has_two);
    }

    /// Creates a pod and remembers it.
    pub(super) fn run(&mut self, kind: Kind) {
        self.cluster.run(NODE, &kind.pod).unwrap();
        self.pods.push(kind);
    }

    /// Returns the names of the serving pods.
    pub(super) fn serving(&self) -> Vec<String> {
        let serving = self.pods.iter().filter(|kind| kind.then == Then::Serves);
        serving.map(|kind| kind.name().to_owned()).collect()
    }

    /// Follows an object of the API server.
    pub(super) fn until<T: Send>(
        &self,
        what: &str,
        path: &str,
        found: impl FnMut(&Value) -> Option<T> + Send,
    ) -> T {
        let waited = self.cluster.until(what, path, found);
        waited.unwrap_or_else(|error| panic!("{error:#}\n{}", self.agents.logs()))
    }

    pub(super) fn until_ready(&self, name: &str) {
        let ready = |pod: &Value| (pod.is_object() && condition(pod, "Ready")).then_some(());
        self.until(&format!("{name} to be ready"), &Cluster::pod(name), ready);
    }

    /// Returns a file as a pod's container sees it.
    pub(super) fn inside(&self, pod: &str, path: &str) -> Option<String> {
        let all = tasks(&self.containerd);
        let (pid, _) = all.iter().find(|(container, _)| container.starts_with(&format!("{pod}/")))?.1;
        fs::read_to_string(format!("/proc/{pid}/root{path}")).ok()
    }

    /// Returns the mounts of pods' volumes and of CSI volumes.
    pub(super) fn mounts(&self) -> Vec<PathBuf> {
        let all = guards::mounts().unwrap().into_iter().map(|mount| mount.path);
        all.filter(|path| path.starts_with(&self.root) && *path != self.root).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.agents.logs());
        }
        self.agents.kubelet.kill9();
        self.agents.beelet.kill9();
    }
}

/// Returns the processes of all running containers, by the container's identifier, except those of the pod in
/// back-off.
pub(super) fn tasks(containerd: &Containerd) -> BTreeMap<String, Task> {
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
