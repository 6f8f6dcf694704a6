//! A machine of a cluster: a network, a mount and a UTS namespace with its own /etc, /run and /var/lib, its
//! own containerd, and a cgroup. A process that only sleeps holds the namespaces. The machines are joined by
//! a bridge in a network namespace of its own, so they reach neither the host nor its network.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use beelet_tests::guards::CgroupRoot;
use beelet_tests::workdir;
use rustix::process::{Pid, Signal, kill_process};

use super::disk;
use super::programs::{Programs, output};

/// Time for a machine's daemons to answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Variable in the environment of a holder, with its machine's folder: the proof that a process is one.
const MARK: &str = "BEELET_MACHINE";
/// Name under which this program is a machine's `systemctl`.
pub(super) const SYSTEMCTL: &str = "systemctl";
const BOOT: &str = include_str!("boot.sh");

/// Returns the name of a machine's cgroup.
pub(super) fn cgroup(name: &str) -> String {
    format!("beelet-node-{name}")
}

/// Returns the folder of all machines.
pub(super) fn folder() -> PathBuf {
    workdir::target_dir().join("machines")
}

/// Maximum number of control-plane machines.
pub(super) const CONTROLS: u8 = 3;

/// A machine, by its name.
#[derive(Debug, Clone)]
pub(super) struct Machine {
    pub(super) name: String,
    pub(super) address: Ipv4Addr,
    dir: PathBuf,
}

impl Machine {
    /// Returns the control-plane machine with this number: `cp` is number 0, then follow `cp2` and `cp3`.
    pub(super) fn control(number: u8) -> Self {
        match number {
            0 => machine("cp".to_owned(), 11),
            _ => machine(format!("cp{}", number.saturating_add(1)), 200_u8.saturating_add(number)),
        }
    }

    /// Returns the worker with this number, from 1: `w1`, `w2`, ….
    pub(super) fn worker(number: u8) -> Self {
        machine(format!("w{number}"), 11_u8.saturating_add(number))
    }

    /// Returns true for a machine of the control plane.
    pub(super) fn is_control(&self) -> bool {
        self.name.starts_with("cp")
    }

    /// Returns the machines that exist, those of the control plane first.
    pub(super) fn all() -> Vec<Self> {
        let all = (0..CONTROLS).map(Self::control).chain((1..100).map(Self::worker));
        all.filter(|machine| machine.dir.join("holder").exists()).collect()
    }

    /// Returns the existing machine of this name.
    pub(super) fn named(name: &str) -> Result<Self> {
        let all = Self::all();
        let names = all.iter().map(|machine| machine.name.clone()).collect::<Vec<_>>().join(", ");
        let found = all.into_iter().find(|machine| machine.name == name);
        found.with_context(|| {
            format!("no machine {name}; there are: {names}. `cargo xtask cluster up` makes some")
        })
    }

    /// Returns the folder with all files of the machine, which is a file system of its own.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the process that holds the machine's namespaces.
    pub(super) fn holder(&self) -> Result<Pid> {
        holder(&self.dir).with_context(|| format!("the machine {} is not up", self.name))
    }

    /// Returns true if the machine's namespaces exist.
    pub(super) fn is_up(&self) -> bool {
        holder(&self.dir).is_some()
    }

    /// Returns a path of this machine as the host sees it: only for folders that boot.sh binds.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.dir.join(path.trim_start_matches('/'))
    }

    /// Writes a file that the host and the machine see at the returned path.
    pub(super) fn file(&self, name: &str, text: &str) -> Result<String> {
        let path = self.dir.join(name);
        workdir::write(&path, text)?;
        Ok(path.display().to_string())
    }

    /// Creates the machine and starts its containerd. `controls` are the machines of the control plane,
    /// which all have the name `control-plane`.
    pub(super) fn create(
        &self,
        programs: &Programs,
        agent: &Path,
        pause: &str,
        controls: &[Self],
    ) -> Result<()> {
        disk::create(&self.dir)?;
        for part in ["bin", "sys"] {
            let part = self.dir.join(part);
            fs::create_dir_all(&part).with_context(|| format!("cannot create {}", part.display()))?;
        }
        let own = std::env::current_exe().context("cannot find this program")?;
        let beside = |name: &str| programs.containerd.with_file_name(name);
        for (name, program) in [
            ("kubelet", agent.to_owned()),
            ("beelet", agent.to_owned()),
            ("kubeadm", programs.kubeadm.clone()),
            ("kubectl", programs.kubectl.clone()),
            ("containerd", programs.containerd.clone()),
            ("ctr", beside("ctr")),
            ("containerd-shim-runc-v2", beside("containerd-shim-runc-v2")),
            (SYSTEMCTL, own),
        ] {
            link(&self.dir.join("bin").join(name), &program)?;
        }
        let switch = switch()?;
        hold(&self.dir, &["--net", "--mount", "--uts", "--propagation", "private"])?;
        let mut boot = self.enter();
        boot.args(["sh", "-c", BOOT]);
        boot.env("NAME", &self.name).env("ADDRESS", self.address.to_string());
        boot.env("DIR", &self.dir).env("SWITCH", switch.as_raw_nonzero().to_string());
        let controls: Vec<String> = controls.iter().map(|one| one.address.to_string()).collect();
        boot.env("CONTROLS", controls.join(" "));
        output(&mut boot).with_context(|| format!("cannot boot the machine {}", self.name))?;
        // The value would remove the cgroup at its end.
        std::mem::forget(CgroupRoot::new(&cgroup(&self.name))?);
        let config = self.file("containerd.toml", &containerd_config(pause))?;
        self.run(&["mkdir", "-p", "/etc/containerd"])?;
        self.run(&["cp", &config, "/etc/containerd/config.toml"])?;
        self.start_containerd()
    }

    /// Starts containerd and waits until it answers.
    pub(super) fn start_containerd(&self) -> Result<()> {
        self.run(&["systemctl", "start", "containerd"])?;
        workdir::wait_for("containerd to answer", PATIENCE, || self.run(&["ctr", "version"])).map(drop)
    }

    /// Returns a command that enters the machine; its program and arguments follow.
    fn enter(&self) -> Command {
        let mut command = Command::new("nsenter");
        let pid = self.holder().map(|pid| pid.as_raw_nonzero().to_string()).unwrap_or_default();
        command.args(["-t", &pid, "-n", "-m", "-u", "--wd=/", "--"]);
        command
    }

    /// Returns a command on this machine.
    pub(super) fn command<S: AsRef<str>>(&self, words: &[S]) -> Result<Command> {
        self.holder()?;
        let mut command = self.enter();
        let path = format!("PATH={}:/usr/sbin:/sbin:/usr/bin:/bin", self.dir.join("bin").display());
        command.args(["env", "-i", &path, "HOME=/root", "TERM=dumb"]);
        command.args(words.iter().map(AsRef::as_ref));
        Ok(command)
    }

    /// Runs a command on this machine, and returns what it wrote.
    pub(super) fn run<S: AsRef<str>>(&self, words: &[S]) -> Result<String> {
        output(self.command(words)?.stdin(Stdio::null()))
    }
}

/// Returns the machine with this name and this last part of its address.
fn machine(name: String, address: u8) -> Machine {
    let dir = folder().join(&name);
    Machine { name, address: Ipv4Addr::new(10, 88, 0, address), dir }
}

/// Removes the switch, which must have no machines.
pub(super) fn remove_switch() -> Result<()> {
    end(&folder().join("switch"))
}

/// Returns the holder of the switch, which joins the machines; creates it if it is missing.
pub(super) fn switch() -> Result<Pid> {
    let dir = folder().join("switch");
    if let Some(pid) = holder(&dir) {
        return Ok(pid);
    }
    let pid = hold(&dir, &["--net"])?;
    let script = "ip link set lo up; ip link add br0 type bridge; ip addr add 10.88.0.254/24 dev br0; ip link set br0 up";
    let number = pid.as_raw_nonzero().to_string();
    output(Command::new("nsenter").args(["-t", &number, "-n", "--", "sh", "-ec", script]))?;
    Ok(pid)
}

/// Starts a process that holds new namespaces, and records it in `dir`.
fn hold(dir: &Path, namespaces: &[&str]) -> Result<Pid> {
    let mut command = Command::new("unshare");
    command.args(namespaces).args(["sleep", "infinity"]).env(MARK, dir).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    let child = command.spawn().context("cannot start unshare")?;
    workdir::write(&dir.join("holder"), child.id().to_string())?;
    let ready = || {
        let name = fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap_or_default();
        if name.trim() == "sleep" { Ok(()) } else { Err("the namespaces do not exist yet") }
    };
    workdir::wait_for("new namespaces (root is required)", Duration::from_secs(10), ready)?;
    holder(dir).context("the holder of the namespaces has ended")
}

/// Starts a helper of a machine, and records it in `dir`; [`end`] ends it.
pub(super) fn help(dir: &Path, command: &mut Command) -> Result<()> {
    command.env(MARK, dir).current_dir("/").process_group(0);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let child = child.context("cannot start a helper")?;
    workdir::write(&dir.join("holder"), child.id().to_string())
}

/// Ends the process that is recorded in `dir`, and removes the record.
pub(super) fn end(dir: &Path) -> Result<()> {
    if let Some(pid) = holder(dir) {
        let _ = kill_process(pid, Signal::KILL);
    }
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Returns the recorded holder if it runs and is one.
fn holder(dir: &Path) -> Option<Pid> {
    let pid = fs::read_to_string(dir.join("holder")).ok()?.trim().parse().ok().and_then(Pid::from_raw)?;
    let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).ok()?;
    let mark = format!("{MARK}={}", dir.display());
    environment.split(|byte| *byte == 0).any(|one| one == mark.as_bytes()).then_some(pid)
}

fn link(place: &Path, target: &Path) -> Result<()> {
    if place.symlink_metadata().is_ok() {
        fs::remove_file(place).with_context(|| format!("cannot replace {}", place.display()))?;
    }
    let target = target.canonicalize().with_context(|| format!("cannot find {}", target.display()))?;
    std::os::unix::fs::symlink(&target, place).with_context(|| format!("cannot create {}", place.display()))
}

/// Returns the configuration of a machine's containerd (2.x).
fn containerd_config(pause: &str) -> String {
    let runtime = "plugins.'io.containerd.cri.v1.runtime'";
    format!(
        "version = 3\n\
         disabled_plugins = ['io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.devmapper', \
         'io.containerd.snapshotter.v1.zfs', 'io.containerd.nri.v1.nri']\n\
         [plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = '{pause}'\n\
         [plugins.'io.containerd.grpc.v1.cri']\ndisable_tcp_service = true\nstream_server_port = '0'\n\
         [{runtime}]\nrestrict_oom_score_adj = true\n\
         [{runtime}.cni]\nbin_dirs = ['/usr/lib/cni', '/opt/cni/bin']\nconf_dir = '/etc/cni/net.d'\n\
         [{runtime}.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n\
         [{runtime}.containerd.runtimes.runc.options]\nSystemdCgroup = false\n"
    )
}
