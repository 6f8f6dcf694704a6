//! `beelet run` and `beelet observe` on a fake runtime, in trouble: a part panics, the runtime dies or hangs,
//! signals come twice, the cgroup root is missing. The tests check the messages, the exit, and the remains.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::io::Write as _;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use beelet_tests::agent::{Agent, Options, binary};
use beelet_tests::cri::{FakeCri, Op};
use beelet_tests::guards::{CgroupRoot, Mount, Process};
use beelet_tests::pages::{Format, PAGES, families};
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{PATIENCE, wait_for};
use beelet_tests::{images, manifests, require, requires, workdir};
use beelet_units::cgroup_driver::CgroupDriver;
use rustix::process::{Pid, Signal, kill_process};

/// An agent and its surroundings, dropped in this order at the end of the test.
struct Daemon {
    agent: Agent,
    cri: FakeCri,
    cgroup: CgroupRoot,
    _dir: tempfile::TempDir,
}

impl Daemon {
    /// Starts an agent without waiting for it, without kernel programs, and with an HTTP server.
    fn spawn(change: impl FnOnce(&Path, Options) -> Options) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let cri = FakeCri::start();
        cri.add_image(images::APP);
        let cgroup = CgroupRoot::new(&workdir::unique("bt")).unwrap();
        let mut options = Options::at(dir.path(), "agent", &cri.endpoint(), &cgroup);
        options.mount_bpffs = false;
        let options = options.beelet("bpf", "off").http().unwrap();
        let agent = Agent::spawn(change(dir.path(), options)).unwrap();
        Daemon { agent, cri, cgroup, _dir: dir }
    }

    /// Starts an agent with a running pod.
    fn with_a_pod(change: impl FnOnce(&Path, Options) -> Options) -> Daemon {
        let mut daemon = Daemon::spawn(change);
        daemon.agent.wait_until_up().unwrap();
        daemon.agent.apply("web.yaml", manifests::pod("web", &["/bin/testapp"]).to_string()).unwrap();
        daemon.until_ready();
        daemon
    }

    fn until_ready(&self) {
        let ready = self.agent.until("the pod to be ready", |watch| {
            watch.pod("web").filter(|pod| pod.ready()).map(PodView::name)
        });
        ready.unwrap_or_else(|error| panic!("{error:#}\n{}", self.agent.log()));
    }

    fn pid(&self) -> Pid {
        self.agent.pid().and_then(|pid| Pid::from_raw(pid.try_into().ok()?)).unwrap()
    }

    /// Returns the answer of `/healthz`, once it has this status.
    fn until_health_is(&self, wanted: u16) -> String {
        let look = || match self.agent.get("/healthz") {
            Ok((status, body)) if status == wanted => Ok(body),
            other => Err(format!("{other:?}")),
        };
        wait_for("the status of `/healthz`", PATIENCE, look).unwrap()
    }

    fn beelet(&self, arguments: &[&str]) -> (Output, String) {
        let output = self.agent.cli(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
        (output, text)
    }
}

// ---- Parts ----

#[test]
fn a_part_that_panics_ends_the_agent_with_its_name_and_message() {
    require!(root);
    let parts = [
        "relist",
        "probes",
        "exits",
        "records",
        "event log",
        "eviction",
        "cgroup keeper",
        "manifests",
        "volume contents",
        "log rotation",
        "device plugins",
        "HTTP server",
    ];
    for part in parts {
        let mut daemon = Daemon::spawn(|_, mut options| {
            options.environment = vec![("BEELET_PANIC".to_owned(), part.to_owned())];
            options
        });
        let status = daemon.agent.wait_for_exit().unwrap();
        let log = daemon.agent.log();
        assert_eq!(status.code(), Some(1), "{part}:\n{log}");
        let message = format!("part {part:?} panicked: BEELET_PANIC has its name");
        assert!(log.contains(&message), "{part}:\n{log}");
    }
}

#[test]
fn pods_survive_a_panic_of_the_agent_and_the_next_agent_adopts_them() {
    require!(root);
    let mut daemon = Daemon::with_a_pod(|_, options| options);
    daemon.agent.terminate().unwrap();
    let started = daemon.cri.count(Op::StartContainer);
    // The service manager would restart the agent: the same part panics each time.
    let config = daemon.agent.config();
    for _ in 0..2 {
        let failed = Command::new(binary().unwrap())
            .args(["run", "--config"])
            .arg(&config)
            .env("BEELET_PANIC", "relist")
            .env_remove("NOTIFY_SOCKET")
            .output()
            .unwrap();
        assert_eq!(failed.status.code(), Some(1), "{}", String::from_utf8_lossy(&failed.stderr));
    }
    daemon.agent.resume().unwrap();
    daemon.until_ready();
    assert_eq!((daemon.cri.count(Op::StartContainer), daemon.cri.count(Op::StopContainer)), (started, 0));
}

#[test]
fn an_observers_part_that_panics_ends_it_with_its_name_and_message() {
    require!(root);
    for part in ["sampling", "gRPC server", "HTTP server", "service manager"] {
        let cri = FakeCri::start();
        let dir = tempfile::tempdir().unwrap();
        let output = observer(&cri, dir.path(), &["--bpf", "off", "--listen", "127.0.0.1:0"])
            .env("BEELET_PANIC", part)
            .output()
            .unwrap();
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{part}:\n{log}");
        assert!(log.contains(&format!("part {part:?} panicked: BEELET_PANIC")), "{part}:\n{log}");
    }
}

// ---- The runtime ----

#[test]
fn a_runtime_that_dies_is_reported_everywhere_and_the_node_recovers() {
    require!(root);
    let daemon = Daemon::with_a_pod(|_, options| options);
    daemon.cri.crash();
    is_reported_everywhere(&daemon);
    daemon.cri.come_back();
    all_recovers(&daemon);
}

#[test]
fn a_runtime_that_hangs_is_reported_everywhere_and_the_node_recovers() {
    require!(root);
    let daemon = Daemon::with_a_pod(|_, options| options);
    let held = daemon.cri.on_any().always().hold();
    is_reported_everywhere(&daemon);
    daemon.cri.heal();
    held.release();
    all_recovers(&daemon);
}

fn is_reported_everywhere(daemon: &Daemon) {
    let silent = format!("the container runtime at {} has not answered since", daemon.cri.endpoint());
    // A new pod waits, and so does a delete command.
    daemon.agent.apply("late.yaml", manifests::pod("late", &["/bin/testapp"]).to_string()).unwrap();
    let watched = daemon.agent.until("the new pod", |watch| watch.pod("late").map(PodView::name));
    watched.unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.agent.log()));
    let deleting = daemon
        .agent
        .cli(&["delete", "pod", "web", "--keep-manifest"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deleting = Process(deleting);
    assert!(daemon.until_health_is(500).contains(&silent), "{}", daemon.until_health_is(500));
    let (node, text) = daemon.beelet(&["get", "node"]);
    let ready = text.lines().find(|line| line.starts_with("Ready")).unwrap_or_default();
    assert!(node.status.success() && ready.contains("False") && text.contains(&silent), "{text}");
    for arguments in [&["get", "pods"][..], &["describe", "pod", "late"]] {
        let (output, text) = daemon.beelet(arguments);
        assert!(output.status.success() && text.contains("late") && text.contains(&silent), "{text}");
    }
    let text = first_line_with(deleting, &silent);
    assert!(text.starts_with("waiting: "), "{text}");
}

/// Returns the first line of a process's standard error that has these words.
fn first_line_with(mut process: Process, words: &str) -> String {
    use std::io::{BufRead as _, BufReader};
    let lines = BufReader::new(process.0.stderr.take().unwrap()).lines();
    lines.map_while(Result::ok).find(|line| line.contains(words)).unwrap_or_default()
}

fn all_recovers(daemon: &Daemon) {
    assert_eq!(daemon.until_health_is(200), "ok");
    let recovered = daemon.agent.until("the waiting pod to be ready, and the deleted one removed", |watch| {
        (watch.pod("late").is_some_and(PodView::ready) && watch.pod("web").is_none()).then_some(())
    });
    recovered
        .unwrap_or_else(|error| panic!("{error:#}\n{}\n{}", daemon.agent.log(), daemon.cri.transcript()));
    let (_, text) = daemon.beelet(&["get", "pods"]);
    assert!(text.contains("late") && !text.contains("has not answered"), "{text}");
}

#[test]
fn the_list_reports_that_running_pods_are_unknown_before_the_runtime_answers() {
    require!(root);
    let mut daemon = Daemon::spawn(|_, options| options);
    daemon.cri.crash();
    // The agent starts again, without the runtime.
    daemon.agent.kill9();
    let config = daemon.agent.config();
    let log = daemon.agent.dir().join("second.log");
    let child = Command::new(binary().unwrap())
        .args(["run", "--config"])
        .arg(config)
        .env_remove("NOTIFY_SOCKET")
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let _running = Process(child);
    let reported = || {
        let (output, text) = daemon.beelet(&["get", "pods"]);
        if text.contains("running pods are not known yet") && text.contains("has not answered yet") {
            assert!(!output.status.success());
            Ok(())
        } else {
            Err(text)
        }
    };
    wait_for("a list that reports missing knowledge", PATIENCE, reported).unwrap();
}

// ---- Starting ----

#[test]
fn a_missing_cgroup_root_is_refused_and_not_created() {
    require!(root);
    let name = workdir::unique("bt-nosuchroot");
    let mut daemon = Daemon::spawn(|_, options| options.kubelet("cgroupRoot", format!("/{name}")));
    let status = daemon.agent.wait_for_exit().unwrap();
    let log = daemon.agent.log();
    assert!(!status.success() && log.contains(&format!("cgroupRoot: there is no cgroup /{name}")), "{log}");
    let made = CgroupRoot::existing(&name, CgroupDriver::Cgroupfs).unwrap();
    assert!(made.dirs().iter().all(|dir| !dir.exists()), "the missing cgroup was created");
    let (doctor, text) = daemon.beelet(&["doctor"]);
    assert!(!doctor.status.success() && text.contains(&format!("there is no cgroup /{name}")), "{text}");
}

#[test]
fn an_observer_and_an_agent_share_a_node_but_no_socket() {
    require!(root);
    let daemon = Daemon::with_a_pod(|_, options| options);
    let dir = tempfile::tempdir().unwrap();
    let refused = observer(&daemon.cri, dir.path(), &["--bpf", "off", "--listen", "off"])
        .arg("--socket")
        .arg(daemon.agent.socket())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("another process serves"), "{text}");
    let socket = dir.path().join("own.sock");
    let mut command = observer(&daemon.cri, dir.path(), &["--bpf", "off", "--listen", "off"]);
    let _observing = Process(command.arg("--socket").arg(&socket).spawn().unwrap());
    let seen = || {
        let output = Command::new(binary().unwrap()).args(["get", "pods", "--socket"]).arg(&socket).output();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        text.map_err(|error| error.to_string())
            .and_then(|text| if text.contains("web-") { Ok(()) } else { Err(text) })
    };
    wait_for("the observer's view of the pod", PATIENCE, seen).unwrap();
    daemon.until_ready();
}

// ---- Metrics pages ----

#[test]
fn every_page_of_metrics_is_taken_by_prometheus_own_parser() {
    require!(root, python_prometheus);
    let daemon = Daemon::with_a_pod(|_, options| options);
    // Results of checks are known after the first request.
    assert_eq!(daemon.agent.get("/healthz").unwrap().0, 200);
    for (page, format) in PAGES.iter().flat_map(|(page, formats)| formats.iter().map(move |f| (*page, *f))) {
        let (status, body) = daemon.agent.get_as(page, format.accept()).unwrap();
        let families =
            families(&body, format).unwrap_or_else(|error| panic!("{page} {format:?}: {error:#}\n{body}"));
        assert!(status == 200 && !families.is_empty(), "{page} {format:?}: {status}");
        // Go's parser lacks the type `unknown`, and Kubernetes' tests never end on a page with it.
        let text_only = matches!(format, Format::OpenMetrics) || !body.contains(" unknown\n");
        assert!(text_only && body.ends_with("# EOF\n") == matches!(format, Format::OpenMetrics), "{body}");
    }
}

#[test]
fn promtool_takes_every_page_and_the_alert_rules() {
    require!(root, promtool);
    let promtool = requires::PROMTOOL.given().unwrap();
    let daemon = Daemon::with_a_pod(|_, options| options);
    assert_eq!(daemon.agent.get("/healthz").unwrap().0, 200);
    for (page, _) in PAGES {
        let (status, body) = daemon.agent.get(page).unwrap();
        assert_eq!(status, 200, "{page}");
        let mut check = Command::new(&promtool);
        check.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut check = check.spawn().unwrap();
        check.stdin.take().unwrap().write_all(body.as_bytes()).unwrap();
        let output = check.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        // Exit code 3: promtool has read all lines, and reports those with style problems. The kubelet's
        // names are exempt.
        assert!(matches!(output.status.code(), Some(0 | 3)), "{page}: {text}");
        let about_ours: Vec<_> = text.lines().filter(|line| line.starts_with("beelet_")).collect();
        assert!(about_ours.is_empty(), "{page}: {about_ours:#?}");
    }
    let folder = workdir::repository().join("packaging/prometheus");
    for arguments in [["check", "rules", "beelet.rules.yaml"], ["test", "rules", "beelet.rules.test.yaml"]] {
        let output = Command::new(&promtool).args(arguments).current_dir(&folder).output().unwrap();
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{arguments:?}: {text}");
    }
}

// ---- Ending ----

fn observer(cri: &FakeCri, dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary().unwrap());
    command.args(["observe", "--runtime-endpoint", &cri.endpoint()]).args(arguments);
    if !arguments.contains(&"--socket") {
        command.env("BEELET_SOCKET", dir.join("beelet.sock"));
    }
    command.env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
    command
}

fn wait(child: &mut Child) -> ExitStatus {
    wait_for("the end of a process", PATIENCE, || match child.try_wait() {
        Ok(Some(status)) => Ok(status),
        other => Err(format!("{other:?}")),
    })
    .unwrap()
}

#[test]
fn an_observer_leaves_no_kernel_programs_behind_after_repeated_signals() {
    require!(bpf);
    let dir = tempfile::tempdir().unwrap();
    let bpffs = Mount::bpffs(&dir.path().join("bpf")).unwrap();
    let cri = FakeCri::start();
    let pins = dir.path().join("bpf/watching");
    // The signals are sent twice at once, as by timeout(1), and once more during the exit.
    for pauses in [&[0][..], &[500], &[0, 1100], &[1100, 0]] {
        let arguments = ["--pin-name", "watching", "--listen", "off", "--bpffs"];
        let mut command = observer(&cri, dir.path(), &arguments);
        let mut observing =
            Process(command.arg(dir.path().join("bpf")).stderr(Stdio::null()).spawn().unwrap());
        let pinned = || {
            if pins.read_dir().is_ok_and(|mut all| all.next().is_some()) { Ok(()) } else { Err("no pins") }
        };
        wait_for("the pins", PATIENCE, pinned).unwrap();
        let pid = Pid::from_child(&observing.0);
        kill_process(pid, Signal::TERM).unwrap();
        for pause in pauses {
            std::thread::sleep(Duration::from_micros(500 + pause * 1000));
            // The observer may have ended; it is not reaped yet, so the id is still its own.
            let _ = kill_process(pid, Signal::TERM);
        }
        let status = wait(&mut observing.0);
        assert!(status.signal().is_none(), "{status}");
        assert!(!pins.exists(), "after {pauses:?}: {:?}", std::fs::read_dir(&pins).map(Iterator::count));
    }
    drop(bpffs);
}

#[test]
fn while_pods_stop_with_the_agent_it_requests_more_time_from_the_service_manager() {
    require!(root);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut daemon = Daemon::with_a_pod(|_, mut options| {
        options.environment = vec![("NOTIFY_SOCKET".to_owned(), path.display().to_string())];
        options.beelet("stopPodsOnExit", true)
    });
    let held = daemon.cri.on(Op::StopContainer).hold();
    kill_process(daemon.pid(), Signal::TERM).unwrap();
    let mut received = Vec::new();
    while !received.iter().any(|line: &String| line.starts_with("EXTEND_TIMEOUT_USEC=")) {
        let mut buffer = [0; 4096];
        let length =
            manager.recv(&mut buffer).unwrap_or_else(|error| panic!("{error}: received {received:?}"));
        received.extend(String::from_utf8_lossy(&buffer[..length]).lines().map(str::to_owned));
    }
    assert!(received.contains(&"STOPPING=1".to_owned()), "{received:?}");
    held.release();
    assert!(daemon.agent.wait_for_exit().unwrap().success());
}

/// Returns the uninstall commands of docs/operating.md, with this test's folders and cgroups for the real
/// ones.
fn uninstall_commands(daemon: &Daemon) -> Vec<String> {
    let page = workdir::read(&workdir::repository().join("docs/operating.md")).unwrap();
    let section = page.split_once("\n## Uninstall\n").unwrap().1;
    let section = section.split_once("\n## ").unwrap().0;
    let dir = daemon.agent.dir().display().to_string();
    let commands = section.lines().filter_map(|line| line.strip_prefix("    "));
    let ours = commands.filter(|line| {
        ["/manifests/", "systemctl", "/usr/bin/beelet"].iter().all(|other| !line.contains(other))
    });
    ours.map(|line| {
        line.replace("/sys/fs/bpf/beelet", &format!("{dir}/bpf/beelet"))
            .replace("/var/lib/beelet", &format!("{dir}/state"))
            .replace("/run/beelet", &format!("{dir}/run"))
            .replace("/var/lib/kubelet", &format!("{dir}/kubelet"))
            .replace("/etc/beelet", &format!("{dir}/config.yaml"))
            .replace("/kubepods", &format!("{}/kubepods", daemon.cgroup.path()))
            .replace("/run/lock/beelet", &format!("{dir}/lock"))
    })
    .collect()
}

#[test]
fn the_documented_commands_leave_nothing_of_the_agent() {
    require!(root);
    let mut daemon = Daemon::with_a_pod(|dir, options| {
        options.beelet("podsDir", dir.join("agent/state/pods").display().to_string())
    });
    daemon.agent.remove("web.yaml").unwrap();
    let gone = daemon.agent.until("the pod to be removed", |watch| watch.pods.is_empty().then_some(()));
    gone.unwrap_or_else(|error| panic!("{error:#}"));
    daemon.agent.terminate().unwrap();
    let left = |daemon: &Daemon| -> Vec<PathBuf> {
        let cgroups = daemon.cgroup.dirs().into_iter().map(|dir| dir.join("kubepods"));
        let folders = ["state", "run", "kubelet"].map(|name| daemon.agent.dir().join(name));
        cgroups.chain(folders).filter(|path| path.exists()).collect()
    };
    assert!(left(&daemon).len() > 3, "{:?}", left(&daemon));
    let commands = uninstall_commands(&daemon);
    assert!(commands.len() >= 3, "{commands:?}");
    for command in &commands {
        let output = Command::new("sh").args(["-c", command]).output().unwrap();
        println!("{command}\n{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(left(&daemon), Vec::<PathBuf>::new(), "{commands:#?}");
}
