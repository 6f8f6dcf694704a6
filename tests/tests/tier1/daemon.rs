//! `beelet run` as on a node, on a fake runtime, with faults of the kernel half: BPF is forbidden, the bpf
//! file system is missing, pins are of another version. The tests' pod is on the host's network, so the test
//! itself listens at the pod's port. Also tests the notifications to the service manager.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use beelet_ebpf_abi::ABI_VERSION;
use beelet_proto::cri::CgroupDriver;
use beelet_tests::agent::{Agent, Options, binary};
use beelet_tests::cri::FakeCri;
use beelet_tests::guards::{CgroupRoot, Process, mounts};
use beelet_tests::pods::PodView;
use beelet_tests::{images, manifests, require, workdir};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// An agent and its surroundings, dropped in this order at the end of the test.
struct Daemon {
    agent: Agent,
    _cri: FakeCri,
    _cgroup: CgroupRoot,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start(change: impl FnOnce(&Path, Options) -> Options) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let cri = FakeCri::start();
        cri.add_image(images::APP);
        let cgroup = CgroupRoot::new(&workdir::unique("bd")).unwrap();
        let options = Options::at(dir.path(), "agent", &cri.endpoint(), &cgroup);
        let agent = Agent::start(change(dir.path(), options)).unwrap();
        Daemon { agent, _cri: cri, _cgroup: cgroup, dir }
    }

    fn wait(&self, what: &str, wanted: impl Fn(&PodView) -> bool + Sync) -> PodView {
        let found = self.agent.until(what, |watch| watch.pod("web").filter(|pod| wanted(pod)).cloned());
        found.unwrap_or_else(|error| panic!("{error:#}\n{}", self.agent.log()))
    }

    fn bpffs(&self) -> PathBuf {
        self.dir.path().join("agent/bpf")
    }

    /// Applies a pod whose readiness follows a port. Returns the ready pod, and the same pod after it has
    /// become unready.
    fn follows_a_port(&self) -> (PodView, PodView) {
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut pod = manifests::pod("web", &["/bin/testapp"]);
        pod["spec"]["hostNetwork"] = true.into();
        let probe = json!({ "tcpSocket": { "port": port }, "periodSeconds": 1, "failureThreshold": 1 });
        self.agent.apply("web.yaml", manifests::with(pod, "readinessProbe", probe).to_string()).unwrap();
        let ready = self.wait("the pod to be ready", PodView::ready);
        drop(listener);
        let unready = self.wait("the pod to be not ready", |pod| !pod.ready());
        (ready, unready)
    }

    /// Returns the findings of `beelet doctor`.
    fn doctor(&self) -> Vec<Value> {
        let output = self.agent.cli(&["doctor", "-o", "json"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let report: Value = serde_json::from_str(&text).unwrap_or_else(|error| {
            panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr));
        });
        report["findings"].as_array().unwrap().clone()
    }

    /// Waits until the kernel half is up; the API answers before that.
    fn wait_for_pins(&self) {
        let meta = self.pins().join("META");
        let there = || if meta.exists() { Ok(()) } else { Err(self.agent.log()) };
        workdir::wait_for("the pins", workdir::PATIENCE, there).unwrap();
    }

    /// Returns the folder of this version's pins.
    fn pins(&self) -> PathBuf {
        self.bpffs().join(format!("beelet/v{ABI_VERSION}"))
    }
}

fn without_mount(mut options: Options) -> Options {
    options.mount_bpffs = false;
    options
}

/// Returns the finding of this name.
fn finding<'a>(findings: &'a [Value], check: &str) -> &'a Value {
    let found = findings.iter().find(|finding| finding["check"] == check);
    found.unwrap_or_else(|| panic!("{check} is missing in {findings:#?}"))
}

#[test]
fn with_bpf_turned_off_readiness_follows_by_probes_and_nothing_is_pinned() {
    require!(root);
    let daemon = Daemon::start(|_, options| {
        let options = without_mount(options);
        options.beelet("bpf", "off")
    });
    let (ready, unready) = daemon.follows_a_port();
    assert_eq!((ready.edge, unready.edge), (None, None));
    assert!(!mounts().unwrap().iter().any(|mount| mount.path.starts_with(daemon.dir.path())));
    let findings = daemon.doctor();
    assert_eq!(finding(&findings, "BPF")["detail"], "turned off by the configuration");
}

#[test]
fn without_permission_for_bpf_all_fallbacks_work_and_the_doctor_names_them() {
    require!(root);
    let wrapper = |dir: &Path, options: Options| {
        let path = dir.join("beelet");
        let script = format!(
            "#!/bin/sh\nexec setpriv --bounding-set=-bpf,-perfmon,-sys_admin {} \"$@\"\n",
            binary().unwrap().display()
        );
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut options = without_mount(options);
        options.binary = Some(path);
        options
    };
    let daemon = Daemon::start(wrapper);
    let (ready, unready) = daemon.follows_a_port();
    assert_eq!((ready.edge, unready.edge), (None, None));
    let log = daemon.agent.log();
    assert_eq!(log.matches("BPF is not available here").count(), 1, "{log}");
    assert!(log.contains("every fallback is in use") && log.contains("CAP_BPF"), "{log}");
    let findings = daemon.doctor();
    let program = finding(&findings, "listener_state");
    assert_eq!(program["state"], "degraded", "{program:#}");
    assert!(program["remedy"].as_str().unwrap().contains("CAP_BPF"), "{program:#}");
    assert!(!program["consequence"].as_str().unwrap().is_empty());
    // The finding names the fallback and its effect.
    let lookup = finding(&findings, "socket_check");
    assert_eq!(lookup["state"], "degraded", "{lookup:#}");
    assert!(lookup["consequence"].as_str().unwrap().contains("connect() for TCP probes"), "{lookup:#}");
    assert!(lookup["remedy"].as_str().unwrap().contains("CAP_BPF"), "{lookup:#}");
    let probes = daemon.agent.cli(&["probe", "ls", "-o", "json"]).output().unwrap();
    let probes: Vec<Value> = serde_json::from_slice(&probes.stdout).unwrap();
    assert_eq!((probes.len(), &probes[0]["mode"]), (1, &json!("connect")), "{probes:#?}");
    let why = probes[0]["fallback"].as_str().unwrap();
    assert!(why.contains("beelet doctor"), "{why}");
}

#[test]
fn without_a_bpf_file_system_the_agent_mounts_one() {
    require!(bpf);
    let daemon = Daemon::start(|_, options| without_mount(options));
    daemon.wait_for_pins();
    assert!(mounts().unwrap().iter().any(|mount| mount.path == daemon.bpffs() && mount.kind == "bpf"));
    let (_, unready) = daemon.follows_a_port();
    assert!(unready.edge.is_some_and(|edge| !edge.ready), "the change did not come from the kernel");
}

#[test]
fn pins_of_another_version_give_way_to_the_agents_own() {
    require!(bpf);
    let mut daemon = Daemon::start(|_, options| options);
    daemon.wait_for_pins();
    daemon.agent.kill9();
    let old = daemon.pins().with_file_name("v999");
    std::fs::rename(daemon.pins(), &old).unwrap();
    daemon.agent.resume().unwrap();
    daemon.wait_for_pins();
    let (_, unready) = daemon.follows_a_port();
    assert!(unready.edge.is_some_and(|edge| !edge.ready), "the change did not come from the kernel");
    assert!(!old.exists());
}

/// The service manager's end of the notification socket.
struct Manager(UnixDatagram);

/// Period of the watchdog, in microseconds.
const WATCHDOG_USEC: &str = "200000";

impl Manager {
    fn at(path: &Path) -> Manager {
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_read_timeout(Some(workdir::PATIENCE)).unwrap();
        Manager(socket)
    }

    /// Reads until this notification. Returns the earlier ones.
    fn wait_for(&self, wanted: &str) -> Vec<String> {
        let mut earlier = Vec::new();
        loop {
            let mut buffer = [0; 4096];
            let read = self.0.recv(&mut buffer);
            let length =
                read.unwrap_or_else(|error| panic!("waited for {wanted}: {error}, received {earlier:?}"));
            let lines =
                String::from_utf8_lossy(&buffer[..length]).lines().map(str::to_owned).collect::<Vec<_>>();
            if lines.iter().any(|line| line == wanted) {
                return earlier;
            }
            earlier.extend(lines);
        }
    }

    /// Checks the notifications of a whole run of the agent, which `stop` ends.
    fn follow(&self, stop: impl FnOnce()) {
        let before = self.wait_for("READY=1");
        assert!(before.is_empty(), "{before:?}");
        for _ in 0..3 {
            let before = self.wait_for("WATCHDOG=1");
            assert!(before.is_empty(), "{before:?}");
        }
        stop();
        let before = self.wait_for("STOPPING=1");
        assert!(before.iter().all(|line| line == "WATCHDOG=1"), "{before:?}");
    }
}

#[test]
fn the_service_manager_gets_ready_watchdog_and_stopping_notifications() {
    require!(root);
    let dir = tempfile::tempdir().unwrap();
    let manager = Manager::at(&dir.path().join("notify"));
    let socket = dir.path().join("notify").display().to_string();
    let mut daemon = Daemon::start(|_, options| {
        let mut options = without_mount(options).beelet("bpf", "off");
        options.environment = vec![
            ("NOTIFY_SOCKET".to_owned(), socket),
            ("WATCHDOG_USEC".to_owned(), WATCHDOG_USEC.to_owned()),
        ];
        options
    });
    let pid = daemon.agent.pid().and_then(|pid| Pid::from_raw(pid.try_into().ok()?)).unwrap();
    manager.follow(|| kill_process(pid, Signal::TERM).unwrap());
    assert!(daemon.agent.wait_for_exit().unwrap().success());
}

#[test]
fn the_service_manager_gets_the_same_notifications_from_an_observer() {
    require!(root);
    let dir = tempfile::tempdir().unwrap();
    let manager = Manager::at(&dir.path().join("notify"));
    // No runtime answers, which is not a reason for a restart.
    let cri = FakeCri::absent_at(&dir.path().join("cri.sock"));
    let child = Command::new(binary().unwrap())
        .args([
            "observe",
            "--bpf",
            "off",
            "--listen",
            "off",
            "--runtime-endpoint",
            &cri.endpoint(),
            "--socket",
        ])
        .arg(dir.path().join("beelet.sock"))
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .env("WATCHDOG_USEC", WATCHDOG_USEC)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut observer = Process(child);
    let pid = Pid::from_child(&observer.0);
    manager.follow(|| kill_process(pid, Signal::TERM).unwrap());
    assert!(observer.0.wait().unwrap().success());
}

#[test]
fn the_runtimes_cgroup_driver_replaces_the_configured_one() {
    require!(root);
    let dir = tempfile::tempdir().unwrap();
    let cri = FakeCri::start();
    cri.change(|world| world.cgroup_driver = Some(CgroupDriver::Cgroupfs));
    let cgroup = CgroupRoot::new(&workdir::unique("bd")).unwrap();
    let options = without_mount(Options::at(dir.path(), "agent", &cri.endpoint(), &cgroup));
    // As kubeadm writes it for every node.
    let options = options.kubelet("cgroupDriver", "systemd").beelet("bpf", "off");
    let agent = Agent::start(options).unwrap();
    let sentence = "the container runtime's cgroup driver, cgroupfs, replaces `cgroupDriver: systemd` of the configuration: \
                    remove the field";
    let warned = || if agent.log().contains(sentence) { Ok(()) } else { Err(agent.log()) };
    workdir::wait_for("the warning", workdir::PATIENCE, warned).unwrap();
    let made = || cgroup.dirs().iter().any(|dir| dir.join("kubepods").exists());
    let made = || if made() { Ok(()) } else { Err(agent.log()) };
    workdir::wait_for("the cgroups of the cgroupfs driver", workdir::PATIENCE, made).unwrap();
}
