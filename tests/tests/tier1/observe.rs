//! The observer against a runtime in memory: its calls, its view for clients, and its actions if they are
//! permitted.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

use beelet::node::Builder;
use beelet::node::observe::{Collecting, Options};
use beelet_cgroups::{Cgroups, Files, Version};
use beelet_client::Client;
use beelet_policy::{
    images::gc::ImageGcPolicy,
    tuner::{CpuCaps, Law, TunerMode},
};
use beelet_proto::{beelet as api, cri as proto};
use beelet_state::State;
use beelet_tests::cri::{Asked, Container, FakeCri, Op, PATIENCE, Sandbox};
use beelet_tests::guards::{CgroupRoot, Process};
use beelet_tests::requires::{self, Missing};
use beelet_tests::{require, workdir};
use beelet_tuner::{ColdSettings, Settings};
use beelet_units::{bpf_settings::BpfMode, cgroup_driver::CgroupDriver};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Calls that an observer may make.
const MAY_ASK: [Op; 5] =
    [Op::Version, Op::ListPodSandbox, Op::ListContainers, Op::PodSandboxStatus, Op::ContainerStatus];

/// An observer on a runtime, without kernel programs.
struct Node {
    cri: FakeCri,
    socket: PathBuf,
    shutdown: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
    _dir: tempfile::TempDir,
}

impl Node {
    fn start(cri: FakeCri) -> Node {
        Node::start_with(cri, |_| {})
    }

    fn start_with(cri: FakeCri, change: impl FnOnce(&mut Options)) -> Node {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("run/beelet.sock");
        let mut options = Options {
            runtime_endpoint: cri.endpoint(),
            node_name: "n".into(),
            cgroup_root: "/".into(),
            socket: socket.clone(),
            listen: None,
            bpf: BpfMode::Off,
            bpffs: dir.path().join("bpf"),
            pin_name: "none".into(),
            keep_pins: false,
            interval: Duration::from_millis(100),
            most: 100,
            pod_uid: false,
            state_dir: dir.path().join("state"),
            image_gc: None,
            tune: None,
        };
        change(&mut options);
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(Builder::default().observe(options, shutdown.clone()));
        Node { cri, socket, shutdown, task, _dir: dir }
    }

    async fn client(&self) -> Client {
        let connected = async {
            loop {
                match Client::connect(&self.socket).await {
                    Ok(client) => break client,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        tokio::time::timeout(PATIENCE, connected).await.unwrap()
    }

    async fn stop(self) {
        self.shutdown.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.unwrap().unwrap().unwrap();
    }

    /// Waits until the pods have these names and phases.
    async fn wait_for(&self, expected: &[(&str, &str)]) {
        let seen = async {
            let mut watch = self.client().await.pods.watch().await.unwrap();
            let mut table = beelet_model::table::PodTable::default();
            while let Some(event) = watch.next().await.unwrap() {
                event.apply(&mut table);
                let pods: Vec<(String, String)> = table
                    .pods
                    .iter()
                    .map(|(name, entry)| {
                        (name.name.clone(), entry.pod.status.clone().unwrap().phase.unwrap())
                    })
                    .collect();
                let all = pods.len() == expected.len()
                    && pods
                        .iter()
                        .zip(expected)
                        .all(|(pod, expected)| (pod.0.as_str(), pod.1.as_str()) == *expected);
                if all {
                    return;
                }
            }
        };
        let waited = tokio::time::timeout(PATIENCE, seen).await;
        assert!(waited.is_ok(), "waited for {expected:?}\n{}", self.cri.transcript());
    }
}

/// Adds a pod with one container, as a kubelet would have created it.
fn add(cri: &FakeCri, pod: &str, running: bool) {
    let labels: HashMap<String, String> = [
        ("io.kubernetes.pod.name", pod),
        ("io.kubernetes.pod.namespace", "default"),
        ("io.kubernetes.pod.uid", pod),
        ("io.kubernetes.container.name", "main"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into();
    cri.change(|world| {
        let sandbox = Sandbox {
            id: format!("sandbox-of-{pod}"),
            config: proto::PodSandboxConfig { labels: labels.clone(), ..Default::default() },
            state: if running {
                proto::PodSandboxState::SandboxReady
            } else {
                proto::PodSandboxState::SandboxNotready
            },
            created_at: 1,
            ip: "10.0.0.1".into(),
            info: serde_json::Value::Null,
            runtime_handler: String::new(),
        };
        world.sandboxes.insert(sandbox.id.clone(), sandbox);
        let config = proto::ContainerConfig { labels, ..Default::default() };
        let mut container =
            Container::running(format!("container-of-{pod}"), format!("sandbox-of-{pod}"), config);
        if !running {
            (container.state, container.finished_at) = (proto::ContainerState::ContainerExited, 1);
        }
        world.containers.insert(container.id.clone(), container);
    });
}

fn remove(cri: &FakeCri, pod: &str) {
    cri.change(|world| {
        world.containers.remove(&format!("container-of-{pod}"));
        world.sandboxes.remove(&format!("sandbox-of-{pod}"));
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn an_observer_shows_foreign_pods_and_calls_only_lists_and_statuses() {
    let cri = FakeCri::start();
    cri.change(|world| world.streams_events = true);
    add(&cri, "web", true);
    add(&cri, "job", false);
    let node = Node::start(cri);
    node.wait_for(&[("job", "Succeeded"), ("web", "Running")]).await;
    // This pod has no cgroup, so no event reports it: the next list does.
    add(&node.cri, "late", true);
    remove(&node.cri, "job");
    node.wait_for(&[("late", "Running"), ("web", "Running")]).await;
    let asked: Vec<Op> = node.cri.calls().iter().map(beelet_tests::cri::Call::op).collect();
    assert!(asked.iter().all(|op| MAY_ASK.contains(op)), "{}", node.cri.transcript());
    let status = node.client().await.tuner.status().await.unwrap();
    assert_eq!(status.mode, "off");
    let socket = node.socket.clone();
    node.stop().await;
    assert!(!socket.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_observer_outlives_its_runtime() {
    let cri = FakeCri::start();
    add(&cri, "web", true);
    let node = Node::start(cri);
    node.wait_for(&[("web", "Running")]).await;
    node.cri.crash();
    add(&node.cri, "after", true);
    node.cri.come_back();
    node.wait_for(&[("after", "Running"), ("web", "Running")]).await;
    node.stop().await;
}

// ---- Images ----

/// Further calls that the collection of images may make.
const MAY_ASK_OF_IMAGES: [Op; 5] =
    [Op::Status, Op::ListImages, Op::ImageStatus, Op::ImageFsInfo, Op::RemoveImage];

#[tokio::test(flavor = "multi_thread")]
async fn with_permission_unused_images_are_removed_without_other_calls() {
    let cri = FakeCri::start();
    let [unused, used, pinned] = ["unused", "used", "pinned"].map(|name| cri.add_image(name));
    add(&cri, "web", true);
    let mountpoint = std::env::temp_dir().display().to_string();
    cri.change(|world| {
        world.containers.values_mut().for_each(|container| container.image_ref.clone_from(&used));
        let keep = |image: &&mut proto::Image| image.id == pinned;
        world.images.values_mut().filter(keep).for_each(|image| image.pinned = true);
        let fs_id = Some(proto::FilesystemIdentifier { mountpoint });
        world.image_fs.image_filesystems = vec![proto::FilesystemUsage { fs_id, ..Default::default() }];
    });
    // Every unused image is too old at once, however full the disk is.
    let moment = Duration::from_nanos(1);
    let policy = ImageGcPolicy::new(100, 80, moment, moment).unwrap();
    let collecting = Collecting { policy, period: Duration::from_millis(200) };
    let node = Node::start_with(cri, |options| options.image_gc = Some(collecting));
    let removed = || -> Vec<String> {
        let images = node.cri.calls().into_iter().filter_map(|call| match call.asked {
            Asked::RemoveImage(request) => Some(request.image.unwrap().image),
            _ => None,
        });
        images.collect()
    };
    until("the unused image to be removed", async || {
        let left: Vec<String> = node.cri.world().images.values().map(|image| image.id.clone()).collect();
        if left.contains(&unused) { Err(format!("{left:?}")) } else { Ok(()) }
    })
    .await;
    // The collector has inspected the other images as well, and does so again.
    let looks = node.cri.count(Op::ListImages);
    until("another list of images", async || {
        let now = node.cri.count(Op::ListImages);
        if now > looks + 1 { Ok(()) } else { Err(now.to_string()) }
    })
    .await;
    let left: Vec<String> = node.cri.world().images.values().map(|image| image.id.clone()).collect();
    assert!(left.contains(&used) && left.contains(&pinned) && left.len() == 2, "{left:?}");
    assert!(removed().iter().all(|name| *name == unused), "{:?}", removed());
    let may = |call: &beelet_tests::cri::Call| {
        MAY_ASK.contains(&call.op()) || MAY_ASK_OF_IMAGES.contains(&call.op())
    };
    assert!(node.cri.calls().iter().all(may), "{}", node.cri.transcript());
    node.stop().await;
}

/// Repeats a check until it passes.
async fn until<T>(what: &str, mut so: impl AsyncFnMut() -> Result<T, String>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let why_not = match so().await {
            Ok(value) => return value,
            Err(why_not) => why_not,
        };
        assert!(tokio::time::Instant::now() < deadline, "waited for {what}: {why_not}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

// ---- The tuner ----

const BEST_EFFORT: &str = "/kubepods/besteffort";
const SERVER: &str = "/kubepods/burstable/podserver/container-of-server";
const HOG: &str = "/kubepods/besteffort/podhog/container-of-hog";

/// Cgroups as a kubelet would have created them, with a server that always waits and a hog.
struct Owned {
    root: CgroupRoot,
    cgroups: Cgroups,
    state: tempfile::TempDir,
    _processes: Vec<Process>,
}

impl Owned {
    fn new() -> Owned {
        let root = CgroupRoot::new(&workdir::unique("beelet-observe-tune")).unwrap();
        let cgroups = Cgroups::discover(root.path(), CgroupDriver::Cgroupfs).unwrap();
        let (file, value) = match cgroups.paths.version() {
            Version::V2 => ("cpu.weight", "4"),
            _ => ("cpu.shares", "102"),
        };
        let requested: Files = [(file.to_owned(), value.to_owned())].into();
        cgroups.ensure("/kubepods/burstable/podserver", &requested).unwrap();
        cgroups.ensure(SERVER, &Files::new()).unwrap();
        cgroups.ensure(HOG, &Files::new()).unwrap();
        // Two tasks share one CPU, so one of them always waits; the hog has the others.
        let allowed = workdir::read(Path::new("/proc/self/status")).unwrap();
        let allowed = allowed.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        let first = allowed.trim().split([',', '-']).next().unwrap();
        let mut processes: Vec<Process> = (0..2).map(|_| busy(&root, SERVER, first)).collect();
        let cpus = std::thread::available_parallelism().unwrap().get();
        processes.extend((0..cpus).map(|_| busy(&root, HOG, allowed.trim())));
        Owned { root, cgroups, state: tempfile::tempdir().unwrap(), _processes: processes }
    }

    /// Returns the file with BestEffort pods' cap.
    fn cap(&self) -> PathBuf {
        let file = match self.cgroups.paths.version() {
            Version::V2 => "cpu.max",
            _ => "cpu.cfs_quota_us",
        };
        self.root.dir("cpu").unwrap().join(&BEST_EFFORT[1..]).join(file)
    }

    fn observer(&self, mode: TunerMode) -> Node {
        let cri = FakeCri::start();
        add(&cri, "server", true);
        add(&cri, "hog", true);
        // Any signal is worth a step here.
        let law = Law {
            cpu_wait_permille: 1,
            quiet_percent: 0,
            hot_ticks: 1,
            best_effort_floor_percent: 1,
            helpless_steps: 0,
            cpu_caps: CpuCaps::Always,
            ..Law::default()
        };
        let (interval, back_off) = (Duration::from_millis(100), Duration::from_secs(600));
        Node::start_with(cri, |options| {
            self.root.path().clone_into(&mut options.cgroup_root);
            self.state.path().clone_into(&mut options.state_dir);
            options.tune = Some(Settings { mode, interval, back_off, law, cold: ColdSettings::default() });
        })
    }
}

/// Starts a process that is always busy, in a cgroup and on some CPUs.
fn busy(root: &CgroupRoot, path: &str, cpus: &str) -> Process {
    let mut shell = Command::new("taskset");
    let shell = shell.args(["-c", cpus, "sh", "-c", "while :; do :; done"]).stdout(Stdio::null());
    let child = Process(shell.spawn().unwrap());
    for dir in root.dirs() {
        workdir::write(&dir.join(&path[1..]).join("cgroup.procs"), child.0.id().to_string()).unwrap();
    }
    child
}

fn read(path: &Path) -> String {
    workdir::read(path).unwrap().trim().to_owned()
}

/// Waits until `so` is true for the tuner's status.
async fn tuner(node: &Node, what: &str, so: impl Fn(&api::TunerStatus) -> bool) -> api::TunerStatus {
    let mut client = node.client().await;
    until(what, async || {
        let status = client.tuner.status().await.map_err(|error| error.to_string())?;
        if so(&status) { Ok(status) } else { Err(format!("{status:#?}")) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn with_permission_the_hog_is_capped_and_the_owners_value_is_restored_at_stop_and_after_kill() {
    require!(root, psi);
    let owned = Owned::new();
    let owners = read(&owned.cap());

    let node = owned.observer(TunerMode::Enforce);
    let status = tuner(&node, "a cap", |status| !status.held.is_empty()).await;
    let held = &status.held[0];
    assert_eq!((status.mode.as_str(), held.cgroup.as_str()), ("enforce", BEST_EFFORT), "{status:#?}");
    assert!(held.reason.contains("default/server (main) waits for a CPU"), "{status:#?}");
    // Other settings could make a kubelet's writes fail.
    assert!(status.held.iter().all(|held| held.setting == "cpu.max"), "{status:#?}");
    assert_ne!(read(&owned.cap()), owners);
    node.stop().await;
    assert_eq!(read(&owned.cap()), owners, "the stop did not restore the value");

    // The second observer dies while it holds the cap.
    let node = owned.observer(TunerMode::Enforce);
    tuner(&node, "a cap", |status| !status.held.is_empty()).await;
    node.task.abort();
    let _ = node.task.await;
    until("the observer's last thread to end", async || {
        State::open(owned.state.path()).map(|_| ()).map_err(|error| error.to_string())
    })
    .await;
    assert_ne!(read(&owned.cap()), owners);
    let node = owned.observer(TunerMode::Advise);
    let status = tuner(&node, "advice", |status| !status.held.is_empty()).await;
    assert_eq!(status.mode, "advise");
    assert_eq!(read(&owned.cap()), owners, "the next start did not restore the value, or advice wrote one");
    let history = node.client().await.tuner.history().await.unwrap();
    let outcomes: Vec<&str> = history.steps.iter().map(|step| step.outcome.as_str()).collect();
    assert_eq!(outcomes.last(), Some(&"advised"), "{history:#?}");
    assert!(outcomes.contains(&"done"), "steps of earlier runs are missing: {history:#?}");
    node.stop().await;
    assert!(!owned.state.path().join("tuner.json").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tuner_gives_way_to_a_value_that_the_owner_overwrites() {
    require!(root, psi);
    let owned = Owned::new();
    let node = owned.observer(TunerMode::Enforce);
    tuner(&node, "a cap", |status| !status.held.is_empty()).await;
    let theirs = match owned.cgroups.paths.version() {
        Version::V2 => "77000 100000",
        _ => "77000",
    };
    workdir::write(&owned.cap(), theirs).unwrap();
    let status = tuner(&node, "the setting to be left alone", |status| !status.blocked.is_empty()).await;
    assert_eq!(status.blocked[0].cgroup, BEST_EFFORT, "{status:#?}");
    let history = node.client().await.tuner.history().await.unwrap();
    assert!(history.steps.iter().any(|step| step.outcome == "overwritten"), "{history:#?}");
    // The trouble persists, and so do the tuner's ticks.
    tuner(&node, "more ticks", |now| now.looked_ns > status.looked_ns + 1_000_000_000).await;
    assert_eq!(read(&owned.cap()), theirs);
    node.stop().await;
    assert_eq!(read(&owned.cap()), theirs);
}

// ---- beelet top ----

/// Ways to end `beelet top`. Ctrl-C is a byte that a terminal in raw mode passes on unchanged.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    CtrlC,
    Quit,
    Signal(Signal),
    /// The terminal is lost: the process at its other end dies.
    Lost,
}

/// `beelet top` at a terminal of script(1).
struct Top {
    script: Process,
    keys: ChildStdin,
    dir: tempfile::TempDir,
}

impl Top {
    fn start(socket: &Path) -> Top {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        let (pid, status, screen) = (at("pid"), at("status"), at("screen"));
        let program = beelet_tests::agent::binary().unwrap();
        // The outer shell outlives the terminal, to record the exit status.
        let inner = format!("echo $$ > {pid}; exec {} top --socket {}", program.display(), socket.display());
        let shell = format!("trap : HUP INT TERM; stty rows 24 cols 80; sh -c '{inner}'; echo $? > {status}");
        let mut script = Command::new("script");
        script.args(["-q", "-f", "-c", &shell, "/dev/null"]).env("TERM", "xterm").env("SHELL", "/bin/sh");
        let output = std::fs::File::create(&screen).unwrap();
        let mut script =
            Process(script.stdin(Stdio::piped()).stdout(output).stderr(Stdio::null()).spawn().unwrap());
        let keys = script.0.stdin.take().unwrap();
        Top { script, keys, dir }
    }

    fn file(&self, name: &str) -> String {
        let bytes = std::fs::read(self.dir.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn end(&mut self, how: End) {
        let pid = || Pid::from_raw(self.file("pid").trim().parse().unwrap()).unwrap();
        match how {
            End::CtrlC => self.keys.write_all(b"\x03").unwrap(),
            End::Quit => self.keys.write_all(b"q").unwrap(),
            End::Signal(signal) => kill_process(pid(), signal).unwrap(),
            End::Lost => self.script.0.kill().unwrap(),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn top_restores_the_terminal_after_every_kind_of_end() {
    require!(root);
    if requires::find_program("script").is_none() {
        let (what, remedy) = ("script(1) is not installed", "install util-linux (bsdutils)");
        requires::skip(&Missing { what: what.into(), remedy: remedy.into() });
        return;
    }
    let cri = FakeCri::start();
    add(&cri, "web", true);
    let node = Node::start(cri);
    node.wait_for(&[("web", "Running")]).await;
    let signals = [Signal::TERM, Signal::INT, Signal::HUP].map(End::Signal);
    for how in [End::CtrlC, End::Quit, End::Lost].into_iter().chain(signals) {
        let mut top = Top::start(&node.socket);
        until("the pod to be on the screen", async || {
            let screen = top.file("screen");
            if screen.contains("\x1b[?1049h") && screen.contains("web") { Ok(()) } else { Err(screen) }
        })
        .await;
        top.end(how);
        let status = until("`beelet top` to end", async || match top.file("status") {
            status if status.is_empty() => Err(format!("{how:?}: {}", top.file("screen"))),
            status => Ok(status),
        })
        .await;
        assert_eq!(status.trim(), "0", "{how:?}");
        if how != End::Lost {
            // The alternate screen is left, and the last output restores the terminal.
            until("the terminal to be restored", async || {
                let screen = top.file("screen");
                let last = screen.rfind("\x1b[?1049l");
                if last > screen.rfind("\x1b[?1049h") { Ok(()) } else { Err(format!("{how:?}: {screen:?}")) }
            })
            .await;
        }
    }
    node.stop().await;
}
