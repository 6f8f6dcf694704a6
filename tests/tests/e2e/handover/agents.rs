//! The two agents of the node: the programs that start and stop them, and `beelet handover`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use beelet_tests::agent::{self, Agent, Options};
use beelet_tests::containerd::Containerd;
use beelet_tests::kubelet::{Kubelet, NODE};
use beelet_tests::workdir::{PATIENCE, wait_for};
use rustix::process::{Pid, Signal, kill_process};

/// A program that starts and stops an agent for `beelet handover`.
pub(super) struct Control {
    program: PathBuf,
    pid: PathBuf,
}

impl Control {
    /// Writes the program. `start` is a command line for a shell.
    fn new(dir: &Path, name: &str, start: &str) -> Self {
        let (program, pid) = (dir.join(name), dir.join(format!("{name}.pid")));
        let text = format!(
            "#!/bin/sh\npid={pid}\ncase $1 in\n\
             start) test -s $pid && kill -0 $(cat $pid) 2>/dev/null && exit 0\n\
             setsid {start} </dev/null >>{log} 2>&1 & echo $! >$pid ;;\n\
             stop) test -s $pid && kill $(cat $pid); : >$pid ;;\nesac\n",
            pid = pid.display(),
            log = dir.join(format!("{name}.log")).display(),
        );
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Self { program, pid }
    }

    /// Runs the program.
    pub(super) fn run(&self, word: &str) {
        let status = Command::new(&self.program).arg(word).stdin(Stdio::null()).status().unwrap();
        assert!(status.success() || word == "stop", "{word}: {status}");
    }

    /// Kills the agent with SIGKILL, if it runs, and waits for its end.
    pub(super) fn kill9(&self) {
        let pid = fs::read_to_string(&self.pid).unwrap_or_default();
        let Some(pid) = pid.trim().parse().ok().and_then(Pid::from_raw) else { return };
        let _ = kill_process(pid, Signal::KILL); // the agent may have ended
        let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
        let has_ended = || match fs::read_to_string(&stat) {
            Ok(stat) if !stat.contains(") Z ") => Err(stat),
            _ => Ok(()),
        };
        wait_for("the killed agent to end", PATIENCE, has_ended).unwrap();
        fs::write(&self.pid, "").unwrap();
    }
}

/// Both agents. beelet's configuration is in the kubelet's folders.
pub(super) struct Agents {
    pub kubelet: Control,
    pub beelet: Control,
    /// beelet, which has only refused to start beside the kubelet.
    pub refused: Agent,
    dir: PathBuf,
    kubeconfig: String,
    version: String,
}

impl Agents {
    /// Takes over the running kubelet, beside which beelet refuses to start.
    pub(super) fn new(
        containerd: &Containerd,
        running: &Kubelet,
        kubeconfig: String,
        version: String,
    ) -> Self {
        let dir = containerd.dir().to_path_buf();
        let refused = refuse_beside_the_kubelet(containerd, options(containerd, &kubeconfig));
        let program = agent::binary().unwrap().display().to_string();
        let config = refused.config().display().to_string();
        let of_beelet =
            [program.as_str(), "run", "--config", config.as_str()].into_iter().chain(arguments(&kubeconfig));
        let kubelet = Control::new(&dir, "kubelet-control", &quoted(running.words().iter().cloned()));
        let beelet = Control::new(&dir, "beelet-control", &quoted(of_beelet.map(str::to_owned)));
        fs::write(&kubelet.pid, running.pid().to_string()).unwrap();
        Self { kubelet, beelet, refused, dir, kubeconfig, version }
    }

    /// Returns the log of beelet under its control program.
    pub(super) fn beelet_log(&self) -> String {
        fs::read_to_string(self.dir.join("beelet-control.log")).unwrap_or_default()
    }

    /// Runs `beelet handover`, and returns its output if it succeeds.
    pub(super) fn handover(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = self.handover_command();
        let output = command.args(arguments).output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        println!("beelet handover {arguments:?}:\n{}", text.concat());
        if output.status.success() { Ok(text.concat()) } else { Err(text.concat()) }
    }

    /// Hands over, which must succeed.
    pub(super) fn must_handover(&self, arguments: &[&str]) -> String {
        self.handover(arguments).unwrap_or_else(|refused| panic!("{refused}\n{}", self.logs()))
    }

    /// Returns the arguments of a hand-over to the kubelet.
    pub(super) fn to_kubelet(&self) -> [&str; 3] {
        ["--to-kubelet", "--kubelet-version", &self.version]
    }

    pub(super) fn handover_command(&self) -> Command {
        let mut command = self.refused.cli(&["handover", "--kubeconfig", &self.kubeconfig]);
        command.arg("--root-dir").arg(self.dir.join("kubelet/root")).args([
            "--settle",
            "10s",
            "--timeout",
            "120s",
        ]);
        command.arg("--kubelet-control").arg(&self.kubelet.program);
        command.arg("--beelet-control").arg(&self.beelet.program);
        command
    }

    /// Returns the last lines of both agents' logs.
    pub(super) fn logs(&self) -> String {
        let last = |name: &str| {
            let text = fs::read_to_string(self.dir.join(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().rev().take(40).collect();
            format!("{name}:\n{}\n", lines.into_iter().rev().collect::<Vec<_>>().join("\n"))
        };
        ["kubelet/kubelet.log", "kubelet-control.log", "beelet-control.log"].map(last).concat()
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

/// Returns the configuration of beelet in the kubelet's folders.
fn options(containerd: &Containerd, kubeconfig: &str) -> Options {
    let dir = containerd.dir().join("kubelet");
    let path = |path: PathBuf| path.display().to_string();
    let mut options = Options::on(containerd)
        .kubelet("staticPodPath", path(dir.join("manifests")))
        .kubelet("podLogsDir", "/var/log/pods")
        .beelet("nodeName", NODE)
        .beelet("criticalStaticPods", true)
        .beelet("adoptKubeletPods", true)
        .beelet("podsDir", path(dir.join("root/pods")))
        .beelet("kubeletDir", path(dir.join("root")));
    options.arguments.extend(arguments(kubeconfig).map(str::to_owned));
    options
}

/// Starts beelet beside the kubelet, which it refuses; only its configuration remains.
fn refuse_beside_the_kubelet(containerd: &Containerd, options: Options) -> Agent {
    until_driven(containerd);
    let mut agent = Agent::spawn(options).unwrap();
    assert!(!agent.wait_for_exit().unwrap().success(), "beelet started beside a kubelet");
    assert!(agent.log().contains("drives the runtime"), "{}", agent.log());
    agent
}

/// Waits until a kubelet drives the runtime.
pub(super) fn until_driven(containerd: &Containerd) {
    let driven = || match beelet_cri::ownership::kubelet_on(&containerd.socket()) {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err("not yet".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    wait_for("the kubelet to drive the runtime", PATIENCE, driven).unwrap();
}
