//! Private containerd of a test: root, state, socket, network and cgroups have their own folder and name,
//! separate from everything else on the machine. The machine's own containerd stays untouched.
//!
//! A drop takes the instance down without its cooperation ([`teardown`]): containers and shims are killed by
//! pid, mounts and network namespaces (in the instance's folder) are removed, as are bridge and cgroups. The
//! same function removes the remains of a killed test before the next instance starts in the same folder.

mod config;
mod teardown;

pub(crate) use teardown::is_logged_as_gone;
pub use teardown::{Leftovers, teardown};
pub(crate) use teardown::{MARKER, keep_logs, write_pid};

use crate::guards::{CgroupRoot, chosen_driver};
use crate::images::{self, ImageTar};
use crate::workdir::{self, PATIENCE, wait_for};
use crate::{guards, requires};
use anyhow::{Context as _, Result, bail};
use beelet_proto::cri;
use beelet_proto::cri::image_service_client::ImageServiceClient;
use beelet_proto::cri::runtime_service_client::RuntimeServiceClient;
use hyper_util::rt::TokioIo;
use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest as _, Sha256};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tonic::transport::{Channel, Endpoint, Uri};

/// The address of a unix socket has 108 bytes including the final zero, and containerd adds `.ttrpc` to one
/// of the sockets.
const SOCKET_PATH_MAX: usize = 107 - ".ttrpc".len();

/// Both services of the container runtime interface.
#[derive(Debug, Clone)]
pub struct Cri {
    /// Service for sandboxes and containers.
    pub runtime: RuntimeServiceClient<Channel>,
    /// Service for images.
    pub images: ImageServiceClient<Channel>,
}

impl Cri {
    /// Connects to the runtime at `socket`.
    pub async fn connect(socket: &Path) -> Result<Cri> {
        let channel = connect(socket).await?;
        Ok(Cri {
            runtime: RuntimeServiceClient::new(channel.clone()),
            images: ImageServiceClient::new(channel),
        })
    }
}

/// Opens a gRPC channel over a unix socket.
pub async fn connect(socket: &Path) -> Result<Channel> {
    let path = socket.to_path_buf();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(tokio::net::UnixStream::connect(path).await?)) }
    });
    // The address is unused: the connector knows the socket.
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .with_context(|| format!("cannot connect to {}", socket.display()))
}

/// Runs `future` on its own thread, so that this works both inside and outside an async test.
pub fn block_on<T: Send>(future: impl Future<Output = Result<T>> + Send) -> Result<T> {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("cannot start an async runtime")?.block_on(future)
    };
    std::thread::scope(|scope| {
        scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Names of an instance's objects outside its folder, derived from the folder's path.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    dir: PathBuf,
    id: String,
}

impl Names {
    pub(crate) fn of(dir: &Path) -> Names {
        let digest = Sha256::new().chain_update(dir.as_os_str().as_encoded_bytes()).finalize();
        Names { dir: dir.to_path_buf(), id: digest[..4].iter().map(|byte| format!("{byte:02x}")).collect() }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("containerd.sock")
    }

    pub(crate) fn cdi_dir(&self) -> PathBuf {
        self.dir.join("cdi")
    }

    /// An interface name has at most 15 characters.
    pub(crate) fn bridge(&self) -> String {
        format!("bee{}", self.id)
    }

    pub(crate) fn network(&self) -> String {
        format!("beelet-{}", self.id)
    }

    pub(crate) fn cgroup(&self) -> String {
        format!("beelet-{}", self.id)
    }
}

/// Handle of a hanging containerd, which continues on drop.
#[derive(Debug)]
pub struct Hanging(Pid);

impl Drop for Hanging {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT); // the process may have ended
    }
}

/// Running private containerd.
#[derive(Debug)]
pub struct Containerd {
    names: Names,
    binary: PathBuf,
    version: (u32, u32),
    child: Option<guards::Process>,
    cgroup: CgroupRoot,
    keep: bool,
    /// Lock of the running instance: one per parent folder at a time.
    _lock: std::fs::File,
}

impl Containerd {
    /// Starts an instance for a test in its own folder under the target folder, with the standard images.
    /// Waits until no other test, in any process, has one.
    pub fn start_for_test() -> Result<Containerd> {
        Containerd::start(&workdir::target_dir().join("e2e").join(workdir::unique("node")))
    }

    /// Like [`Containerd::start_for_test`], with the containerd 2 that `CONTAINERD` names: see
    /// [`requires::containerd_2`].
    pub fn start_version_2_for_test() -> Result<Containerd> {
        let dir = workdir::target_dir().join("e2e").join(workdir::unique("node"));
        Containerd::start_binary(&dir, given().context("CONTAINERD is not set")??)
    }

    /// Starts an instance with the standard images in `dir`, which becomes its own. The binary is the
    /// machine's, or else the one that `CONTAINERD` names. Only one at a time runs in the folders of one
    /// parent; an existing one is taken down first.
    pub fn start(dir: &Path) -> Result<Containerd> {
        let binary = match requires::find_program("containerd") {
            Some(installed) => installed,
            None => given().context("containerd is not installed: `cargo xtask setup`")??,
        };
        Containerd::start_binary(dir, binary)
    }

    fn start_binary(dir: &Path, binary: PathBuf) -> Result<Containerd> {
        let parent = dir.parent().context("the folder of a containerd must have a parent")?;
        std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        let lock = lock(parent)?;
        sweep(parent)?;
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let dir = dir.canonicalize().with_context(|| format!("cannot resolve {}", dir.display()))?;
        let names = Names::of(&dir);
        if names.socket().as_os_str().len() > SOCKET_PATH_MAX {
            bail!(
                "{} is too long for a unix socket (at most {SOCKET_PATH_MAX} characters): move the checkout \
                 closer to the root, or set CARGO_TARGET_DIR",
                names.socket().display()
            );
        }
        let version = version_of(&binary)?;
        // Written before the first object that needs a teardown.
        workdir::write(&dir.join(MARKER), "")?;
        let cgroup = CgroupRoot::of_driver(&names.cgroup(), chosen_driver()?)?;
        let mut containerd =
            Containerd { names, binary, version, child: None, cgroup, keep: false, _lock: lock };
        config::write(&containerd.names, version, containerd.cgroup.driver())?;
        containerd.resume()?;
        for image in images::standard()? {
            containerd.import(&image)?;
        }
        Ok(containerd)
    }

    /// Returns the instance's folder, which contains all of its files.
    pub fn dir(&self) -> &Path {
        &self.names.dir
    }

    /// Returns the folder where a containerd 2 finds specifications of CDI devices; older versions are
    /// configured without one here.
    pub fn cdi_dir(&self) -> PathBuf {
        self.names.cdi_dir()
    }

    /// Returns the CRI socket.
    pub fn socket(&self) -> PathBuf {
        self.names.socket()
    }

    /// Returns the socket as a `containerRuntimeEndpoint`.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// Returns the shims and their child processes, with the pod and container of each.
    pub fn shims(&self) -> Vec<String> {
        teardown::shims(&self.names)
    }

    /// Describes the pods and containers whose ids are in a text (a path, a command); empty if there are
    /// none.
    pub fn whose(&self, text: &str) -> String {
        teardown::whose(self.dir(), text)
    }

    /// Returns containerd's log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir().join("containerd.log")).unwrap_or_default()
    }

    /// Returns the bridge of the pod network.
    pub fn bridge(&self) -> String {
        self.names.bridge()
    }

    /// Returns the cgroup, in every hierarchy, under which the agent creates its pods.
    pub fn cgroup(&self) -> &CgroupRoot {
        &self.cgroup
    }

    /// Returns the major and minor version.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Returns true if the process is running.
    pub fn is_running(&self) -> bool {
        self.child.is_some()
    }

    /// Returns the process id, if it is running.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(|child| child.0.id())
    }

    /// Returns clients of the two services.
    pub async fn cri(&self) -> Result<Cri> {
        Cri::connect(&self.socket()).await
    }

    /// Stops containerd with SIGTERM and waits; containers keep running.
    pub fn stop(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        let pid = Pid::from_child(&child.0);
        kill_process(pid, Signal::TERM).context("cannot stop containerd")?;
        wait_for("containerd to stop", PATIENCE, || match child.0.try_wait() {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err("still running".to_owned()),
            Err(error) => Err(error.to_string()),
        })
    }

    /// Makes containerd hang as a debugger does (SIGSTOP): its socket still accepts connections, without
    /// answers. Dropping the returned value lets containerd continue.
    pub fn hang(&self) -> Result<Hanging> {
        let pid = self.pid().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
        let pid = pid.context("containerd is not running")?;
        kill_process(pid, Signal::STOP).context("cannot stop containerd")?;
        Ok(Hanging(pid))
    }

    /// Kills containerd immediately; containers keep running.
    pub fn kill9(&mut self) {
        self.child = None; // dropping the process kills it and waits
    }

    /// Simulates a reboot of the machine while the agent is not running: containerd, all shims and containers
    /// are killed, and mounts, network namespaces, cgroups and state folders are removed. The files on disk
    /// stay. [`Containerd::resume`] starts containerd again.
    pub fn reboot(&mut self) -> Result<()> {
        self.kill9();
        teardown::lose_memory(&self.names)?;
        self.cgroup.clear()
    }

    /// Returns the addresses that the network plugin has allocated.
    pub fn leases(&self) -> Vec<std::net::IpAddr> {
        let dir = self.dir().join("ipam").join(self.names.network());
        let names = std::fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
        // The folder also contains a lock and the last allocated address.
        let mut leases: Vec<_> =
            names.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok()).collect();
        leases.sort();
        leases
    }

    /// Starts containerd again after [`Containerd::stop`] or [`Containerd::kill9`]; waits until it is ready.
    pub fn resume(&mut self) -> Result<()> {
        if self.child.is_some() {
            return Ok(());
        }
        let log = self.open_log()?;
        let bin_dir = self.binary.parent().unwrap_or(Path::new("/"));
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::iter::once(bin_dir.to_path_buf())
            .chain(std::env::split_paths(&path))
            .chain(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from));
        let child = Command::new(&self.binary)
            .arg("--config")
            .arg(self.dir().join("config.toml"))
            .env("PATH", std::env::join_paths(path)?) // its shim is in the same folder
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0) // Ctrl-C in the demo's terminal only stops the demo
            .spawn()
            .with_context(|| format!("cannot start {}", self.binary.display()))?;
        write_pid(self.dir(), "containerd", child.id())?;
        self.child = Some(guards::Process(child));
        self.wait_until_ready()
    }

    /// Restarts containerd.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.resume()
    }

    /// Imports an image.
    pub fn import(&self, image: &ImageTar) -> Result<()> {
        let output = self
            .ctr()
            .args(["--namespace", "k8s.io", "images", "import"])
            .arg(&image.path)
            .output()
            .context("cannot start ctr")?;
        if !output.status.success() {
            bail!("cannot import {}: {}", image.name, String::from_utf8_lossy(&output.stderr).trim());
        }
        // An event notifies the CRI plugin of the image.
        wait_for(&format!("the image {}", image.name), PATIENCE, || {
            let (socket, name) = (self.socket(), image.name.clone());
            block_on(async move {
                let spec = cri::ImageSpec { image: name, ..Default::default() };
                let request = cri::ImageStatusRequest { image: Some(spec), verbose: false };
                let status = Cri::connect(&socket).await?.images.image_status(request).await?;
                status.into_inner().image.context("not listed yet").map(drop)
            })
        })
    }

    /// Returns a `ctr` command for this instance.
    pub fn ctr(&self) -> Command {
        let beside = self.binary.with_file_name("ctr");
        let ctr = if beside.exists() { Some(beside) } else { requires::find_program("ctr") };
        let mut command = Command::new(ctr.unwrap_or_else(|| "ctr".into()));
        command.arg("--address").arg(self.socket());
        command
    }

    /// Leaves containerd running when the value is dropped; [`teardown`] takes it down later.
    pub fn keep(&mut self) {
        self.keep = true;
        self.cgroup.keep();
    }

    fn open_log(&self) -> Result<std::fs::File> {
        let path = self.dir().join("containerd.log");
        let opened = std::fs::OpenOptions::new().append(true).create(true).open(&path);
        opened.with_context(|| format!("cannot open {}", path.display()))
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let waited = wait_for("containerd to be ready", PATIENCE, || {
            if let Some(child) = &mut self.child
                && let Ok(Some(status)) = child.0.try_wait()
            {
                return Ok(Err(status));
            }
            let socket = self.names.socket();
            block_on(async move {
                let mut cri = Cri::connect(&socket).await?;
                let status = cri.runtime.status(cri::StatusRequest { verbose: false }).await?.into_inner();
                let conditions = status.status.unwrap_or_default().conditions;
                match conditions.iter().find(|condition| !condition.status) {
                    Some(not_yet) => bail!("{}: {}", not_yet.r#type, not_yet.message),
                    None => Ok(Ok(())),
                }
            })
        });
        let failure = match waited {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(status)) => format!("containerd exited with {status}"),
            Err(error) => format!("{error:#}"),
        };
        self.child = None;
        let log = self.log();
        let relevant: Vec<&str> = log.lines().filter(|line| !line.contains("level=info")).collect();
        keep_logs(self.dir());
        bail!("containerd did not start: {failure}. From its log:\n{}", relevant.join("\n"))
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if self.keep {
            if let Some(child) = self.child.take() {
                std::mem::forget(child); // outlives this process
            }
            return;
        }
        if std::thread::panicking() {
            keep_logs(self.dir());
        }
        self.child = None;
        if let Err(error) = teardown(self.dir()) {
            eprintln!("cannot take down the containerd in {}: {error:#}", self.dir().display());
        }
    }
}

/// Locks the folders of `parent`, for one instance at a time: waits while another process has the lock.
pub(crate) fn lock(parent: &Path) -> Result<std::fs::File> {
    let path = parent.join("lock");
    let file = std::fs::File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
    file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}

/// Takes down the remains of killed tests in the folders of `parent`, whose lock is held.
pub(crate) fn sweep(parent: &Path) -> Result<()> {
    for entry in std::fs::read_dir(parent).with_context(|| format!("cannot list {}", parent.display()))? {
        let dir = entry?.path();
        if dir.join(MARKER).exists() {
            teardown(&dir)?;
        }
    }
    Ok(())
}

/// Returns the binary that `CONTAINERD` names, if set.
pub(crate) fn given() -> Option<Result<PathBuf>> {
    let path = PathBuf::from(std::env::var_os("CONTAINERD")?);
    Some(path.canonicalize().with_context(|| format!("cannot find CONTAINERD={}", path.display())))
}

/// Returns the major and minor version, from `containerd github.com/containerd/containerd v1.6.20 …`.
pub(crate) fn version_of(binary: &Path) -> Result<(u32, u32)> {
    let output = Command::new(binary).arg("--version").output();
    let output = output.with_context(|| format!("cannot start {}", binary.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    parse_version(&text)
        .with_context(|| format!("cannot parse the output of `{} --version`: {text}", binary.display()))
}

fn parse_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_whitespace().nth(2)?.trim_start_matches('v').split(['.', '~', '-', '+']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_distributions_and_upstream_write_them() {
        let check = |text: &str, expected| assert_eq!(parse_version(text), expected, "{text}");
        check("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3\n", Some((1, 6)));
        check("containerd github.com/containerd/containerd/v2 2.1.9+unknown \n", Some((2, 1)));
        check(
            "containerd github.com/containerd/containerd/v2 v2.0.5 fb4c30d4ede3531652d86197bf3fc9515e5276d9",
            Some((2, 0)),
        );
        check("containerd", None);
    }

    #[test]
    fn names_fit_where_they_go() {
        let names = Names::of(Path::new("/some/folder"));
        assert!(names.bridge().len() <= 15, "{}", names.bridge());
        assert_ne!(names.bridge(), Names::of(Path::new("/some/other")).bridge());
    }
}
