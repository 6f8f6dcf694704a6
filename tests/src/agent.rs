//! Agent as a child process on a private containerd: configured, started, killed, restarted, and observed
//! through its own API.

use crate::confine::{Handover, Installed, Supervisor};
use crate::containerd::{Containerd, block_on, write_pid};
use crate::guards::{self, CgroupRoot, MountsBelow, Process};
use crate::pods::Watch;
use crate::ports;
use crate::workdir::{self, PATIENCE, stretched, wait_for};
use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal};
use serde_json::{Map, Value, json};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

/// Name of the node in tests, which is part of every static pod's name.
pub const NODE: &str = "testnode";

/// Options of an agent.
#[derive(Debug, Clone)]
pub struct Options {
    /// Fields of the KubeletConfiguration.
    pub kubelet: Map<String, Value>,
    /// Fields of the BeeletConfiguration.
    pub beelet: Map<String, Value>,
    /// Additional arguments of `beelet run`.
    pub arguments: Vec<String>,
    /// Additional environment variables.
    pub environment: Vec<(String, String)>,
    /// Binary; None: `BEELET_BIN`, or else the one that cargo builds.
    pub binary: Option<PathBuf>,
    /// Mount a bpffs for the agent before its start.
    pub mount_bpffs: bool,
    /// Unit whose settings apply to the agent; None: the agent has the test's own permissions.
    pub installed: Option<Installed>,
    /// Mounts in the agent's folder are removed with the instance instead of with the agent.
    instance_unmounts: bool,
    dir: PathBuf,
    instance: PathBuf,
}

impl Options {
    /// Returns the configuration of an agent on `containerd`: all its files are in the instance's folder and
    /// its cgroups below the instance's; no HTTP server; pods stop quickly.
    pub fn on(containerd: &Containerd) -> Options {
        Options::named(containerd, "agent")
    }

    /// Like [`Options::on`], in a folder of another name, for a second agent on the same containerd.
    pub fn named(containerd: &Containerd, name: &str) -> Options {
        let options = Options::at(containerd.dir(), name, &containerd.endpoint(), containerd.cgroup());
        Options { instance_unmounts: true, ..options }
    }

    /// Returns the configuration of an agent on any runtime: all its files are in the folder `name` of
    /// `instance`, and its cgroups below `cgroup`.
    pub fn at(instance: &Path, name: &str, endpoint: &str, cgroup: &CgroupRoot) -> Options {
        let instance = instance.to_path_buf();
        let dir = instance.join(name);
        let kubelet = json!({
            "staticPodPath": dir.join("manifests"),
            "containerRuntimeEndpoint": endpoint,
            "cgroupRoot": cgroup.path(),
            "cgroupDriver": cgroup.driver(),
            "podLogsDir": dir.join("logs"),
            "healthzPort": 0,
            "port": 0,
            "oomScoreAdj": 0,
            // The free space of the test machine must not matter; tests of pressure set their own thresholds.
            "evictionHard": { "memory.available": "16Mi" },
            "imageGCHighThresholdPercent": 100,
        });
        let beelet = json!({
            "nodeName": NODE,
            "stateDir": dir.join("state"),
            "runDir": dir.join("run"),
            "podsDir": dir.join("pods"),
            "bpffs": dir.join("bpf"),
            "kubeletDir": dir.join("kubelet"),
        });
        let fields = |value: Value| value.as_object().cloned().unwrap_or_default();
        Options {
            kubelet: fields(kubelet),
            beelet: fields(beelet),
            arguments: Vec::new(),
            environment: Vec::new(),
            binary: None,
            mount_bpffs: true,
            installed: None,
            instance_unmounts: false,
            dir,
            instance,
        }
    }

    /// Sets a field of the KubeletConfiguration.
    pub fn kubelet(mut self, field: &str, value: impl Into<Value>) -> Options {
        self.kubelet.insert(field.to_owned(), value.into());
        self
    }

    /// Sets a field of the BeeletConfiguration.
    pub fn beelet(mut self, field: &str, value: impl Into<Value>) -> Options {
        self.beelet.insert(field.to_owned(), value.into());
        self
    }

    /// Applies the settings of a unit. A system call that the unit denies fails the test, with its name.
    pub fn as_installed(mut self, installed: Installed) -> Options {
        self.installed = Some(installed);
        self
    }

    /// Enables the HTTP server, on a free port.
    pub fn http(self) -> Result<Options> {
        let [port] = ports::free()?;
        Ok(self.kubelet("healthzPort", port))
    }

    /// Returns the folder of the agent's manifests.
    pub fn manifests(&self) -> PathBuf {
        self.dir.join("manifests")
    }

    /// Writes the configuration and creates the folders.
    fn prepare(&self) -> Result<PathBuf> {
        let mut kubelet = self.kubelet.clone();
        kubelet.insert("apiVersion".into(), "kubelet.config.k8s.io/v1beta1".into());
        kubelet.insert("kind".into(), "KubeletConfiguration".into());
        let mut beelet = self.beelet.clone();
        beelet.insert("apiVersion".into(), "beelet.dev/v1alpha1".into());
        beelet.insert("kind".into(), "BeeletConfiguration".into());
        // JSON is valid YAML.
        let text = format!("{:#}\n---\n{:#}\n", Value::Object(kubelet), Value::Object(beelet));
        let config = self.dir.join("config.yaml");
        workdir::write(&config, text)?;
        std::fs::create_dir_all(self.manifests()).context("cannot create the manifest folder")?;
        let bpffs = self.dir.join("bpf");
        if self.mount_bpffs && !guards::mounts()?.iter().any(|mount| mount.path == bpffs) {
            // Unmounted with all other mounts of the agent.
            std::mem::forget(guards::Mount::bpffs(&bpffs)?);
        }
        Ok(config)
    }
}

/// Running agent, killed on drop; the pods are removed with their containerd.
#[derive(Debug)]
pub struct Agent {
    options: Options,
    binary: PathBuf,
    child: Option<Process>,
    /// Supervisors, one per start under a unit. Dropped after the child, for whose end they wait.
    supervisors: Vec<Supervisor>,
    /// Mounts of the agent or the test in the instance's folder, dropped after the child.
    _mounts: Option<MountsBelow>,
}

impl Agent {
    /// Starts the agent and waits until its API answers.
    pub fn start(options: Options) -> Result<Agent> {
        let mut agent = Agent::spawn(options)?;
        agent.wait_until_up()?;
        Ok(agent)
    }

    /// Starts the agent without waiting, for starts that should fail or hang.
    pub fn spawn(options: Options) -> Result<Agent> {
        let binary = options.binary.clone().map_or_else(binary, Ok)?;
        let mounts = (!options.instance_unmounts).then(|| MountsBelow(options.instance.clone()));
        let mut agent = Agent { options, binary, child: None, supervisors: Vec::new(), _mounts: mounts };
        agent.launch()?;
        Ok(agent)
    }

    fn launch(&mut self) -> Result<()> {
        let config = self.options.prepare()?;
        let log = self.log_path();
        let log = std::fs::OpenOptions::new().append(true).create(true).open(&log);
        let log = log.context("cannot open the agent's log")?;
        let (mut command, handover) = self.command()?;
        let child = command
            .args(["run", "--config"])
            .arg(config)
            .args(&self.options.arguments)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("BEELET_CONFIG")
            .envs(self.options.environment.iter().cloned())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0) // Ctrl-C in the demo's terminal must reach only the demo
            .spawn()
            .with_context(|| format!("cannot start {}", self.binary.display()))?;
        // A process that ended at once needs no record.
        let _ = write_pid(&self.options.instance, &self.name(), child.id());
        let pid = child.id();
        self.child = Some(Process(child));
        drop(command); // closes its copy of the socket's other end
        if let Some(handover) = handover {
            self.supervisors.push(handover.supervise(pid).with_context(|| self.log())?);
        }
        Ok(())
    }

    /// Returns the command that starts the agent: its unit's wrapper, or a shell that sets the unit's umask.
    fn command(&self) -> Result<(Command, Option<Handover>)> {
        let Some(installed) = &self.options.installed else {
            let mut command = Command::new("sh");
            command.args(["-c", "umask 077; exec \"$0\" \"$@\""]).arg(&self.binary).stdin(Stdio::null());
            return Ok((command, None));
        };
        let (command, handover) = installed.command(&self.binary)?;
        Ok((command, Some(handover)))
    }

    fn name(&self) -> String {
        self.options.dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Returns the path of the agent's log.
    pub fn log_path(&self) -> PathBuf {
        self.options.instance.join(format!("{}.log", self.name()))
    }

    /// Returns the agent's log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Returns the socket of the agent's API.
    pub fn socket(&self) -> PathBuf {
        self.options.dir.join("run/beelet.sock")
    }

    /// Returns the agent's configuration file.
    pub fn config(&self) -> PathBuf {
        self.options.dir.join("config.yaml")
    }

    /// Returns the folder with all of the agent's files.
    pub fn dir(&self) -> &Path {
        &self.options.dir
    }

    /// Returns the agent's record of that name on disk; None if it does not exist.
    pub fn record(&self, name: &str) -> Option<Value> {
        let text = std::fs::read_to_string(self.dir().join("state").join(format!("{name}.json"))).ok()?;
        // The record has a line with a checksum, then the envelope.
        let mut envelope: Value = serde_json::from_str(text.split_once('\n')?.1).ok()?;
        Some(envelope["value"].take())
    }

    /// Returns the folder of the agent's manifests.
    pub fn manifests(&self) -> PathBuf {
        self.options.manifests()
    }

    /// Returns the process id if the agent is running.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(|child| child.0.id())
    }

    /// Waits until the API answers. If the agent ended instead, the error contains its log.
    pub fn wait_until_up(&mut self) -> Result<()> {
        let socket = self.socket();
        let waited = wait_for("the agent's API", PATIENCE, || {
            if let Some(child) = &mut self.child
                && let Ok(Some(status)) = child.0.try_wait()
            {
                return Ok(Err(status));
            }
            block_on(async { Watch::start(&socket).await.map(drop) }).map(Ok)
        })?;
        match waited {
            Ok(()) => Ok(()),
            Err(status) => bail!("the agent exited with {status}:\n{}", self.log()),
        }
    }

    /// Waits until the agent ends by itself.
    pub fn wait_for_exit(&mut self) -> Result<ExitStatus> {
        let mut child = self.child.take().context("the agent is not running")?;
        wait_for("the agent to end", PATIENCE, || match child.0.try_wait() {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err("still running".to_owned()),
            Err(error) => Err(error.to_string()),
        })
    }

    /// Sends SIGTERM, as a service manager does, and waits for the end.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        let child = self.child.as_ref().context("the agent is not running")?;
        rustix::process::kill_process(Pid::from_child(&child.0), Signal::TERM)
            .context("cannot stop the agent")?;
        self.wait_for_exit()
    }

    /// Kills the agent with SIGKILL.
    pub fn kill9(&mut self) {
        self.child = None; // dropping the guard kills the process and waits
    }

    /// Restarts the agent with the same configuration, and waits until the API answers.
    pub fn resume(&mut self) -> Result<()> {
        if self.child.is_none() {
            self.launch()?;
        }
        self.wait_until_up()
    }

    /// Writes or replaces a manifest in the folder, atomically.
    pub fn apply(&self, file: &str, manifest: impl AsRef<[u8]>) -> Result<()> {
        let temporary = self.manifests().join(format!(".{file}"));
        workdir::write(&temporary, manifest)?;
        std::fs::rename(&temporary, self.manifests().join(file))
            .with_context(|| format!("cannot write {file}"))
    }

    /// Removes a manifest from the folder.
    pub fn remove(&self, file: &str) -> Result<()> {
        std::fs::remove_file(self.manifests().join(file)).with_context(|| format!("cannot remove {file}"))
    }

    /// Watches the pods until `found` returns a value.
    pub fn until<T: Send>(&self, what: &str, found: impl FnMut(&Watch) -> Option<T> + Send) -> Result<T> {
        let socket = self.socket();
        block_on(async { Watch::start(&socket).await?.until(what, PATIENCE, found).await })
    }

    /// Applies `query` to the current pods.
    pub fn inspect<T: Send>(&self, query: impl FnOnce(&Watch) -> T + Send) -> Result<T> {
        let socket = self.socket();
        block_on(async { Ok(query(&Watch::start(&socket).await?)) })
    }

    /// Returns the `beelet` command with these arguments for this agent.
    pub fn cli(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).env("BEELET_CONFIG", self.config()).env("BEELET_SOCKET", self.socket());
        command
    }

    /// Sends a GET to the agent's HTTP server; returns status and body.
    pub fn get(&self, path: &str) -> Result<(u16, String)> {
        self.get_as(path, "*/*")
    }

    /// Like [`Agent::get`], for a client that accepts these media types.
    pub fn get_as(&self, path: &str, accept: &str) -> Result<(u16, String)> {
        let port = self.options.kubelet.get("healthzPort").and_then(Value::as_u64).unwrap_or(0);
        get_as(&format!("127.0.0.1:{port}"), path, accept)
    }

    /// Leaves the agent running when the value is dropped; the instance's teardown ends it.
    pub fn keep(&mut self) {
        if let Some(child) = self.child.take() {
            std::mem::forget(child);
        }
        self.supervisors.drain(..).for_each(std::mem::forget);
    }
}

/// Sends a plain HTTP GET; returns status and body.
pub fn http_get(address: &str, path: &str) -> Result<(u16, String)> {
    get_as(address, path, "*/*")
}

fn get_as(address: &str, path: &str, accept: &str) -> Result<(u16, String)> {
    use std::io::{Read as _, Write as _};
    let mut stream =
        std::net::TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
    stream.set_read_timeout(Some(stretched(PATIENCE)))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer
        .split(' ')
        .nth(1)
        .and_then(|word| word.parse().ok())
        .context("the response has no HTTP status")?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    Ok((status, if chunked { dechunk(body) } else { body.to_owned() }))
}

/// Decodes a chunked body (RFC 9112 §7.1).
fn dechunk(mut body: &str) -> String {
    let mut content = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        let Some(chunk) = rest.get(..size).filter(|_| size > 0) else { break };
        content.push_str(chunk);
        body = rest.get(size + 2..).unwrap_or_default();
    }
    content
}

/// Returns the agent's binary: `BEELET_BIN`, or else the one that cargo builds now.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("BEELET_BIN") {
        return Ok(PathBuf::from(path));
    }
    build("beelet")
}

/// Builds the program of the package of the same name, and returns its path.
///
/// # Errors
/// Cargo fails.
pub(crate) fn build(name: &str) -> Result<PathBuf> {
    let target = workdir::target_dir();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(workdir::repository())
        .args(["build", "--quiet", "--package", name, "--bin", name, "--target-dir"])
        .arg(&target)
        .output()
        .with_context(|| format!("cannot start cargo to build {name}"))?;
    if !output.status.success() {
        bail!("building {name} failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(target.join("debug").join(name))
}

/// Connection to a test app's control port.
#[derive(Debug)]
pub struct Control {
    stream: std::io::BufReader<std::net::TcpStream>,
}

impl Control {
    /// Waits until the app in the pod at `ip` listens, and connects.
    pub fn connect(ip: &str, port: u16) -> Result<Control> {
        let stream = wait_for(&format!("the test app at {ip}:{port}"), PATIENCE, || {
            std::net::TcpStream::connect((ip, port))
        })?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(stretched(PATIENCE)))?;
        Ok(Control { stream: std::io::BufReader::new(stream) })
    }

    /// Sends a command; returns CLOCK_MONOTONIC in nanoseconds right before its execution.
    pub fn send(&mut self, command: &str) -> Result<u64> {
        use std::io::{BufRead as _, Write as _};
        self.stream.get_mut().write_all(format!("{command}\n").as_bytes())?;
        let mut answer = String::new();
        self.stream.read_line(&mut answer)?;
        let at = answer.trim().strip_prefix("ok ").and_then(|text| text.parse().ok());
        at.with_context(|| format!("the test app answered {command:?} with {:?}", answer.trim()))
    }
}

/// Returns CLOCK_MONOTONIC in nanoseconds: the clock of the test app's answers and of
/// [`crate::pods::PodView::edge`].
pub fn monotonic_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunked_bodies_are_put_together() {
        assert_eq!(dechunk("3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"), "abcde");
        assert_eq!(dechunk("0\r\n\r\n"), "");
    }
}
