//! The agent as a child process, on a private containerd: configured, started, killed, started again, and
//! seen through its own API.

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

/// The node's name in tests: part of every static pod's name.
pub const NODE: &str = "testnode";

/// What the agent is started with.
#[derive(Debug, Clone)]
pub struct Options {
    /// The fields of the KubeletConfiguration.
    pub kubelet: Map<String, Value>,
    /// The fields of the BeeletConfiguration.
    pub beelet: Map<String, Value>,
    /// More arguments of `beelet run`.
    pub arguments: Vec<String>,
    /// More of its environment.
    pub environment: Vec<(String, String)>,
    /// The binary; else `BEELET_BIN`, else the one that cargo builds.
    pub binary: Option<PathBuf>,
    /// Whether a bpffs is mounted for it before it starts.
    pub mount_bpffs: bool,
    /// The unit whose settings it runs under; none for an agent that may do all that the test may.
    pub installed: Option<Installed>,
    /// Whether the instance's end unmounts what is mounted in its folder; else the agent's does.
    instance_unmounts: bool,
    dir: PathBuf,
    instance: PathBuf,
}

impl Options {
    /// The configuration for an agent on `containerd`: all that it writes is in the instance's folder and
    /// below the instance's cgroup; no HTTP server; pods stop quickly.
    pub fn on(containerd: &Containerd) -> Options {
        Options::named(containerd, "agent")
    }

    /// The same, in a folder of another name: a second agent on the same containerd.
    pub fn named(containerd: &Containerd, name: &str) -> Options {
        let options = Options::at(containerd.dir(), name, &containerd.endpoint(), containerd.cgroup());
        Options { instance_unmounts: true, ..options }
    }

    /// The configuration for an agent on any runtime: all that it writes is in the folder `name` of
    /// `instance`, and below `cgroup`.
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
            // What the machine of a test has on its disk is no reason for anything; tests of pressure set
            // their own.
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

    /// Starts it under the settings of its unit. A system call that the unit refuses fails the test, by its
    /// name.
    pub fn as_installed(mut self, installed: Installed) -> Options {
        self.installed = Some(installed);
        self
    }

    /// Turns the HTTP server on, at a port that was free a moment ago.
    pub fn http(self) -> Result<Options> {
        let [port] = ports::free()?;
        Ok(self.kubelet("healthzPort", port))
    }

    /// The folder that the agent reads manifests from.
    pub fn manifests(&self) -> PathBuf {
        self.dir.join("manifests")
    }

    /// Writes the configuration and makes the folders.
    fn prepare(&self) -> Result<PathBuf> {
        let mut kubelet = self.kubelet.clone();
        kubelet.insert("apiVersion".into(), "kubelet.config.k8s.io/v1beta1".into());
        kubelet.insert("kind".into(), "KubeletConfiguration".into());
        let mut beelet = self.beelet.clone();
        beelet.insert("apiVersion".into(), "beelet.dev/v1alpha1".into());
        beelet.insert("kind".into(), "BeeletConfiguration".into());
        // YAML takes JSON as it is.
        let text = format!("{:#}\n---\n{:#}\n", Value::Object(kubelet), Value::Object(beelet));
        let config = self.dir.join("config.yaml");
        workdir::write(&config, text)?;
        std::fs::create_dir_all(self.manifests()).context("could not make the manifests' folder")?;
        let bpffs = self.dir.join("bpf");
        if self.mount_bpffs && !guards::mounts()?.iter().any(|mount| mount.path == bpffs) {
            // Unmounted with everything else that is mounted there.
            std::mem::forget(guards::Mount::bpffs(&bpffs)?);
        }
        Ok(config)
    }
}

/// A running agent. Dropped, it is killed; its pods go with the containerd they are on.
#[derive(Debug)]
pub struct Agent {
    options: Options,
    binary: PathBuf,
    child: Option<Process>,
    /// Of each of its lives under a unit. After the child: they wait for its end.
    supervisors: Vec<Supervisor>,
    /// What it, or the test, has mounted in the instance's folder. After the child.
    _mounts: Option<MountsBelow>,
}

impl Agent {
    /// Starts it and waits until its API answers.
    pub fn start(options: Options) -> Result<Agent> {
        let mut agent = Agent::spawn(options)?;
        agent.wait_until_up()?;
        Ok(agent)
    }

    /// Starts it and waits for nothing: for starts that are to fail, or to wait themselves.
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
        let log = log.context("could not open the agent's log")?;
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
            .process_group(0) // Ctrl-C at the demo's terminal is for the demo alone
            .spawn()
            .with_context(|| format!("could not start {}", self.binary.display()))?;
        // One that ended at once has nothing to be written down.
        let _ = write_pid(&self.options.instance, &self.name(), child.id());
        let pid = child.id();
        self.child = Some(Process(child));
        drop(command); // it has the other end of the socket too
        if let Some(handover) = handover {
            self.supervisors.push(handover.supervise(pid).with_context(|| self.log())?);
        }
        Ok(())
    }

    /// What starts it: its unit's wrapper, or a shell that sets the umask that its unit gives it.
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

    /// The file that its output goes to.
    pub fn log_path(&self) -> PathBuf {
        self.options.instance.join(format!("{}.log", self.name()))
    }

    /// Everything that it has printed so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The socket of its API.
    pub fn socket(&self) -> PathBuf {
        self.options.dir.join("run/beelet.sock")
    }

    /// Its configuration file.
    pub fn config(&self) -> PathBuf {
        self.options.dir.join("config.yaml")
    }

    /// The folder that all of its own files are in.
    pub fn dir(&self) -> &Path {
        &self.options.dir
    }

    /// The agent's record of that name on disk; None while there is nothing.
    pub fn record(&self, name: &str) -> Option<Value> {
        let text = std::fs::read_to_string(self.dir().join("state").join(format!("{name}.json"))).ok()?;
        // A line with a checksum, then the envelope.
        let mut envelope: Value = serde_json::from_str(text.split_once('\n')?.1).ok()?;
        Some(envelope["value"].take())
    }

    /// The folder that it reads manifests from.
    pub fn manifests(&self) -> PathBuf {
        self.options.manifests()
    }

    /// The process's id, if it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(|child| child.0.id())
    }

    /// Waits until the API answers. The error has the log, if the agent ended instead.
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
            Err(status) => bail!("the agent ended with {status}:\n{}", self.log()),
        }
    }

    /// Waits until it ends by itself.
    pub fn wait_for_exit(&mut self) -> Result<ExitStatus> {
        let mut child = self.child.take().context("the agent does not run")?;
        wait_for("the agent to end", PATIENCE, || match child.0.try_wait() {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err("it still runs".to_owned()),
            Err(error) => Err(error.to_string()),
        })
    }

    /// Tells it to stop, as a service manager does, and waits.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        let child = self.child.as_ref().context("the agent does not run")?;
        rustix::process::kill_process(Pid::from_child(&child.0), Signal::TERM)
            .context("could not stop the agent")?;
        self.wait_for_exit()
    }

    /// Kills it at once.
    pub fn kill9(&mut self) {
        self.child = None; // dropping a guarded process kills it and waits
    }

    /// Starts it again, with the same configuration, and waits until its API answers.
    pub fn resume(&mut self) -> Result<()> {
        if self.child.is_none() {
            self.launch()?;
        }
        self.wait_until_up()
    }

    /// Puts a manifest into the folder, whole at once, or replaces it.
    pub fn apply(&self, file: &str, manifest: impl AsRef<[u8]>) -> Result<()> {
        let temporary = self.manifests().join(format!(".{file}"));
        workdir::write(&temporary, manifest)?;
        std::fs::rename(&temporary, self.manifests().join(file))
            .with_context(|| format!("could not write {file}"))
    }

    /// Takes a manifest out of the folder.
    pub fn remove(&self, file: &str) -> Result<()> {
        std::fs::remove_file(self.manifests().join(file)).with_context(|| format!("could not remove {file}"))
    }

    /// Watches the pods until `found` finds something.
    pub fn until<T: Send>(&self, what: &str, found: impl FnMut(&Watch) -> Option<T> + Send) -> Result<T> {
        let socket = self.socket();
        block_on(async { Watch::start(&socket).await?.until(what, PATIENCE, found).await })
    }

    /// The pods as they are now.
    pub fn look<T: Send>(&self, look: impl FnOnce(&Watch) -> T + Send) -> Result<T> {
        let socket = self.socket();
        block_on(async { Ok(look(&Watch::start(&socket).await?)) })
    }

    /// The `beelet` command with these arguments, pointed at this agent.
    pub fn cli(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).env("BEELET_CONFIG", self.config()).env("BEELET_SOCKET", self.socket());
        command
    }

    /// The answer of its HTTP server to a GET: status and body.
    pub fn get(&self, path: &str) -> Result<(u16, String)> {
        self.get_as(path, "*/*")
    }

    /// The same for a client that accepts these media types.
    pub fn get_as(&self, path: &str, accept: &str) -> Result<(u16, String)> {
        let port = self.options.kubelet.get("healthzPort").and_then(Value::as_u64).unwrap_or(0);
        get_as(&format!("127.0.0.1:{port}"), path, accept)
    }

    /// Leaves it running when the value is dropped; the instance's teardown ends it.
    pub fn keep(&mut self) {
        if let Some(child) = self.child.take() {
            std::mem::forget(child);
        }
        self.supervisors.drain(..).for_each(std::mem::forget);
    }
}

/// A plain HTTP GET: status and body.
pub fn http_get(address: &str, path: &str) -> Result<(u16, String)> {
    get_as(address, path, "*/*")
}

fn get_as(address: &str, path: &str, accept: &str) -> Result<(u16, String)> {
    use std::io::{Read as _, Write as _};
    let mut stream =
        std::net::TcpStream::connect(address).with_context(|| format!("could not connect to {address}"))?;
    stream.set_read_timeout(Some(stretched(PATIENCE)))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status =
        answer.split(' ').nth(1).and_then(|word| word.parse().ok()).context("no HTTP status came back")?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    Ok((status, if chunked { dechunk(body) } else { body.to_owned() }))
}

/// The content of a chunked body (RFC 9112 §7.1).
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

/// The agent's binary: `BEELET_BIN`, else what cargo builds now.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("BEELET_BIN") {
        return Ok(PathBuf::from(path));
    }
    let target = workdir::target_dir();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(workdir::repository())
        .args(["build", "--quiet", "--package", "beelet", "--bin", "beelet", "--target-dir"])
        .arg(&target)
        .output()
        .context("could not start cargo to build the agent")?;
    if !output.status.success() {
        bail!("building the agent failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(target.join("debug/beelet"))
}

/// A connection to a test app's control port.
#[derive(Debug)]
pub struct Control {
    stream: std::io::BufReader<std::net::TcpStream>,
}

impl Control {
    /// Connects to the app in the pod at `ip`, when it is up.
    pub fn connect(ip: &str, port: u16) -> Result<Control> {
        let stream = wait_for(&format!("the test app at {ip}:{port}"), PATIENCE, || {
            std::net::TcpStream::connect((ip, port))
        })?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(stretched(PATIENCE)))?;
        Ok(Control { stream: std::io::BufReader::new(stream) })
    }

    /// Sends a command; hands back CLOCK_MONOTONIC, in nanoseconds, right before it was done.
    pub fn send(&mut self, command: &str) -> Result<u64> {
        use std::io::{BufRead as _, Write as _};
        self.stream.get_mut().write_all(format!("{command}\n").as_bytes())?;
        let mut answer = String::new();
        self.stream.read_line(&mut answer)?;
        let at = answer.trim().strip_prefix("ok ").and_then(|text| text.parse().ok());
        at.with_context(|| format!("the test app answered {command:?} with {:?}", answer.trim()))
    }
}

/// CLOCK_MONOTONIC in nanoseconds: the clock of the test app's answers and of [`crate::pods::PodView::edge`].
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
