//! CPU and resident memory of `beelet observe` with 110 and with 500 single-container pods whose processes
//! wake up twice per second: without a client, while it is scraped, and while a client watches every second.
//!
//! The pods come from an in-memory runtime, their cgroups and processes are real: this measures the observer,
//! not containerd.

use super::Row;
use super::owner::pause;
use anyhow::{Context as _, Result};
use beelet_cgroups::{Cgroups, Files};
use beelet_client::signals::Client;
use beelet_proto::cri;
use beelet_tests::agent::http_get;
use beelet_tests::containerd::block_on;
use beelet_tests::cri::{Container, FakeCri, Sandbox};
use beelet_tests::guards::{CgroupRoot, Mount, Process};
use beelet_tests::images;
use beelet_tests::machine::{cpu_of, resident_kib};
use beelet_tests::workdir::{self, PATIENCE, interrupted, wait_for};
use beelet_units::cgroup_driver::CgroupDriver;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use xtask::progress::Step;

/// Bounds by number of pods: per cent of one core, MiB. The second line limits 500 pods; no promise is made
/// for it elsewhere.
const SIZES: [(usize, f64, f64, [&str; 4]); 2] = [
    (110, 1.0, 40.0, ["observe_110_idle", "observe_110_scraped", "observe_110_watched", "observe_110_rss"]),
    (500, 5.0, 80.0, ["observe_500_idle", "observe_500_scraped", "observe_500_watched", "observe_500_rss"]),
];
/// Pages of a scrape, and the scrape interval.
const PAGES: [&str; 3] = ["/metrics", "/metrics/cadvisor", "/metrics/resource"];
const SCRAPE: Duration = Duration::from_secs(15);

/// Adds the rows for both sizes, and for `top`.
pub(super) fn run(binary: &Path, quick: bool, rows: &mut Vec<Row>) -> Result<()> {
    for (pods, cpu, memory, names) in SIZES {
        let step = Step::start(format!("footprint: observe with {pods} pods"));
        let node = Node::start(binary, pods)?;
        let long = if quick { SCRAPE / 2 } else { 4 * SCRAPE };
        step.detail("without a client");
        let idle = node.cpu_percent(|| pause(long))?;
        step.detail("scraped");
        // The first scrape attaches the counter of socket bytes once.
        node.pages()?;
        let scraped = node.cpu_percent(|| node.scrape(if quick { 1 } else { 4 }))?;
        step.detail("watched");
        let watched = node.cpu_percent(|| node.watch(long))?;
        let resident = node.resident()?;
        for (name, unit, value, bound) in [
            (names[0], "% core", idle, cpu),
            (names[1], "% core", scraped, cpu),
            (names[2], "% core", watched, cpu),
            (names[3], "MiB", resident, memory),
        ] {
            rows.push(Row::one("footprint", name, unit, value, bound));
        }
        step.done("");
    }
    rows.extend(top(binary, quick)?);
    Ok(())
}

/// Measures `beelet top` in a terminal while five of 200 pods are replaced every second: its CPU and the
/// number of full redraws (one, at the start; redrawing flickers).
fn top(binary: &Path, quick: bool) -> Result<Vec<Row>> {
    let step = Step::start("footprint: top while 200 pods churn");
    let mut node = Node::start(binary, 200)?;
    let typescript = node.dir.path().join("typescript");
    let command = format!(
        "stty cols 200 rows 60; exec {} top --expand --socket {}",
        binary.display(),
        node.socket.display()
    );
    let script = Command::new("script")
        .args(["--quiet", "--flush", "--return", "--command", &command])
        .arg(&typescript)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start script(1) for a terminal (Debian: bsdutils)")?;
    let mut script = Process(script);
    let drawn = || std::fs::read_to_string(&typescript).unwrap_or_default();
    let top = wait_for("top to draw", PATIENCE, || {
        let text = drawn();
        // Any pod: which ones are above the screen's end varies, and later only changes are drawn.
        let start: String = text.chars().take(400).collect();
        anyhow::ensure!(text.contains("/pod-"), "its terminal got {} bytes, the first {start:?}", text.len());
        let children = workdir::read(Path::new(&format!("/proc/{0}/task/{0}/children", script.0.id())))?;
        children.split_whitespace().next().and_then(|pid| pid.parse::<u32>().ok()).context("no process")
    })?;
    let (start, before) = (Instant::now(), cpu_of(top)?);
    let rounds = if quick { 50 } else { 300 };
    for round in 0..rounds {
        if interrupted() {
            break;
        }
        step.detail(&format!("{round} of {rounds} pods replaced"));
        node.replace(round)?;
        std::thread::sleep(Duration::from_millis(200));
    }
    let used = cpu_of(top)?.saturating_sub(before).as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
    let pid = rustix::process::Pid::from_raw(i32::try_from(top)?).context("no process")?;
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
    let status = script.0.wait()?;
    let text = drawn();
    anyhow::ensure!(status.success(), "top ended with {status}");
    // Erase in display, and the return from the alternate screen: the terminal is restored.
    anyhow::ensure!(text.contains("\u{1b}[?1049l"), "top did not restore the terminal");
    let cleared = text.matches("\u{1b}[2J").count();
    step.done("");
    Ok(vec![
        Row::one("footprint", "top_200_churning", "% core", used, 2.0),
        Row::one("footprint", "top_200_full_redraws", "", cleared as f64, 1.0),
    ])
}

/// Node with pods and an observer. Fields are dropped from the first to the last.
struct Node {
    observer: Process,
    loads: Vec<Process>,
    _bpffs: Mount,
    cgroups: Cgroups,
    root: CgroupRoot,
    runtime: FakeCri,
    address: String,
    socket: PathBuf,
    dir: tempfile::TempDir,
}

impl Node {
    fn start(binary: &Path, pods: usize) -> Result<Node> {
        let dir = tempfile::tempdir().context("cannot create a folder for the bench")?;
        let runtime = FakeCri::start();
        let root = CgroupRoot::new(&workdir::unique("beelet-bench"))?;
        let cgroups = Cgroups::discover(root.path(), CgroupDriver::Cgroupfs)?;
        let mut loads = Vec::new();
        for index in 0..pods {
            let path = add_pod(&runtime, index);
            cgroups.ensure(&path, &Files::new())?;
            loads.push(load(&root, &path)?);
        }
        let bpffs = Mount::bpffs(&dir.path().join("bpf"))?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let (address, socket) = (format!("127.0.0.1:{port}"), dir.path().join("run/beelet.sock"));
        let child = Command::new(binary)
            .args(["observe", "--runtime-endpoint", &runtime.endpoint(), "--cgroup-root", root.path()])
            .args(["--listen", &address, "--pin-name", "bench", "--bpffs"])
            .arg(dir.path().join("bpf"))
            .arg("--socket")
            .arg(&socket)
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start the observer")?;
        let node = Node {
            observer: Process(child),
            loads,
            _bpffs: bpffs,
            cgroups,
            root,
            runtime,
            address,
            socket,
            dir,
        };
        wait_for("all containers to be measured", PATIENCE, || {
            let (_, page) = http_get(&node.address, "/metrics/resource")?;
            let measured =
                page.lines().filter(|line| line.starts_with("container_cpu_usage_seconds_total{")).count();
            anyhow::ensure!(measured == pods, "{measured} of {pods} are");
            Ok(())
        })?;
        Ok(node)
    }

    /// Replaces a pod by another one.
    fn replace(&mut self, index: usize) -> Result<()> {
        let old = self.loads.remove(0);
        drop(old);
        let (sandbox, container) = ids(index);
        self.runtime.change(|world| {
            world.sandboxes.remove(&sandbox);
            world.containers.remove(&container);
        });
        self.cgroups.remove(&pod_path(index))?;
        let index = index + self.loads.len() + 1;
        let path = add_pod(&self.runtime, index);
        self.cgroups.ensure(&path, &Files::new())?;
        self.loads.push(load(&self.root, &path)?);
        Ok(())
    }

    /// Returns the CPU time in per cent of one core during `work`.
    fn cpu_percent(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let (start, before) = (Instant::now(), self.cpu()?);
        work()?;
        let used = self.cpu()?.saturating_sub(before);
        Ok(used.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0)
    }

    fn cpu(&self) -> Result<Duration> {
        cpu_of(self.observer.0.id())
    }

    fn resident(&self) -> Result<f64> {
        Ok(resident_kib(self.observer.0.id())? as f64 / 1024.0)
    }

    fn pages(&self) -> Result<()> {
        for page in PAGES {
            let (status, _) = http_get(&self.address, page)?;
            anyhow::ensure!(status == 200, "{page} answered {status}");
        }
        Ok(())
    }

    fn scrape(&self, times: usize) -> Result<()> {
        for _ in 0..times {
            self.pages()?;
            pause(SCRAPE)?;
        }
        Ok(())
    }

    /// Reads a snapshot every second, as `beelet top` does.
    fn watch(&self, long: Duration) -> Result<()> {
        block_on(async {
            let mut snapshots = Client::connect(&self.socket).await?.snapshots("").await?;
            let until = Instant::now() + long;
            while Instant::now() < until && !interrupted() {
                snapshots.message().await?.context("the observer ended")?;
            }
            Ok(())
        })
    }
}

/// Returns the ids of a pod's sandbox and container.
fn ids(index: usize) -> (String, String) {
    (format!("{index:064x}"), format!("{:064x}", index + 1_000_000))
}

fn uid(index: usize) -> String {
    format!("0000-{index:08}")
}

fn pod_path(index: usize) -> String {
    format!("/kubepods/burstable/pod{}", uid(index))
}

/// Adds a pod with one running container, as a kubelet would have created it; returns its container's cgroup.
fn add_pod(runtime: &FakeCri, index: usize) -> String {
    let (name, uid) = (format!("pod-{index}"), uid(index));
    let (sandbox, container) = ids(index);
    let labels = [
        ("io.kubernetes.pod.name", name.clone()),
        ("io.kubernetes.pod.namespace", "bench".to_owned()),
        ("io.kubernetes.pod.uid", uid.clone()),
        ("io.kubernetes.container.name", "main".to_owned()),
    ];
    let labels: std::collections::HashMap<String, String> =
        labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let path = format!("{}/{container}", pod_path(index));
    runtime.change(|world| {
        let config = cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata { name, uid, namespace: "bench".into(), attempt: 0 }),
            labels: labels.clone(),
            ..Default::default()
        };
        let made = Sandbox {
            id: sandbox.clone(),
            config,
            state: cri::PodSandboxState::SandboxReady,
            created_at: 1,
            ip: "10.0.0.1".into(),
            info: serde_json::Value::Null,
            runtime_handler: String::new(),
        };
        world.sandboxes.insert(sandbox.clone(), made);
        let config = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "main".into(), attempt: 0 }),
            labels,
            ..Default::default()
        };
        let made =
            Container { started_at: 1_000_000_000, ..Container::running(container.clone(), sandbox, config) };
        world.containers.insert(container, made);
    });
    path
}

/// Starts a process in the cgroup, in every hierarchy, that wakes up twice per second.
fn load(root: &CgroupRoot, path: &str) -> Result<Process> {
    let child = Command::new(images::busybox()?)
        .args(["ash", "-c", "while :; do read -t 0.5 nothing; done"])
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot start a load")?;
    let process = Process(child);
    for dir in root.dirs() {
        let procs = dir.join(path.trim_start_matches('/')).join("cgroup.procs");
        workdir::write(&procs, process.0.id().to_string())?;
    }
    Ok(process)
}
