//! The machines' stand-in for systemd: `systemctl` for the two units that kubeadm knows, kubelet and
//! containerd, and the process that keeps a unit running. Both run inside a machine. The state is in its
//! /run/units: `NAME.want` exists while the unit is wanted, `NAME.keeper` and `NAME.pid` have the process
//! ids.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use beelet_tests::guards;
use beelet_tests::workdir;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// Units with the pauses before their next start: `RestartSec` of kubeadm's drop-in, and of containerd's
/// unit.
const UNITS: [(&str, Duration); 2] =
    [("kubelet", Duration::from_secs(10)), ("containerd", Duration::from_secs(5))];
/// Time for a unit to end after SIGTERM, as systemd's `TimeoutStopSec`.
const STOP: Duration = Duration::from_secs(90);
/// The command of kubeadm's unit and drop-in for the kubelet.
const KUBELET: &str = "\
for file in /var/lib/kubelet/kubeadm-flags.env /etc/default/kubelet; do if [ -f $file ]; then . $file; fi; done
exec kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf \
--config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS";

fn state(unit: &str, part: &str) -> PathBuf {
    PathBuf::from(format!("/run/units/{unit}.{part}"))
}

/// Returns the process in a file of the state, if it is alive.
fn process(unit: &str, part: &str) -> Option<Pid> {
    let pid = fs::read_to_string(state(unit, part)).ok()?.trim().parse().ok().and_then(Pid::from_raw)?;
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    (!stat.contains(") Z ") && test_kill_process(pid).is_ok()).then_some(pid)
}

/// Answers a call of `systemctl`.
pub(crate) fn systemctl(arguments: &[String]) -> ExitCode {
    let mut words = arguments.iter().filter(|one| !one.starts_with('-'));
    let verb = words.next().map_or("", String::as_str);
    let unit = words.next().map_or("", String::as_str).trim_end_matches(".service");
    let known = UNITS.iter().any(|(name, _)| *name == unit);
    let done = match verb {
        "daemon-reload" | "reset-failed" | "enable" | "disable" | "mask" | "unmask" | "list-units" => Ok(()),
        "is-enabled" if known => {
            println!("enabled");
            Ok(())
        }
        "status" if known => {
            let active = if process(unit, "pid").is_some() { "active (running)" } else { "inactive (dead)" };
            println!("{unit}.service\n   Loaded: loaded\n   Active: {active}");
            if process(unit, "pid").is_some() { Ok(()) } else { return ExitCode::from(3) }
        }
        "is-active" if known => {
            let is_active = process(unit, "pid").is_some();
            println!("{}", if is_active { "active" } else { "inactive" });
            if is_active { Ok(()) } else { return ExitCode::from(3) }
        }
        "start" if known => start(unit),
        "stop" if known => stop(unit),
        "restart" if known => stop(unit).and_then(|()| start(unit)),
        _ => {
            eprintln!("Unit {unit}.service could not be found.");
            return ExitCode::from(4);
        }
    };
    xtask::shell::finish(done)
}

fn start(unit: &str) -> Result<()> {
    if process(unit, "keeper").is_some() {
        return Ok(());
    }
    workdir::write(&state(unit, "want"), "")?;
    let log = fs::OpenOptions::new().create(true).append(true).open(format!("/var/log/{unit}.log"))?;
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(program);
    command.args(["cluster", "unit", unit]).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // A process group of its own: a signal to the caller's group must not reach the unit.
    let child = command.process_group(0).spawn().context("cannot start the unit's keeper")?;
    workdir::write(&state(unit, "keeper"), child.id().to_string())
}

fn stop(unit: &str) -> Result<()> {
    if fs::remove_file(state(unit, "want")).is_err() && process(unit, "pid").is_none() {
        return Ok(());
    }
    if let Some(pid) = process(unit, "pid") {
        // The process may have ended just now.
        let _ = kill_process(pid, Signal::TERM);
        let gone = || if process(unit, "pid").is_none() { Ok(()) } else { Err("the process still runs") };
        if workdir::wait_regardless("the unit to end", STOP, gone).is_err() {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
    if let Some(keeper) = process(unit, "keeper") {
        let _ = kill_process(keeper, Signal::KILL);
    }
    // A start that follows at once must not take the killed keeper for a running one.
    let gone = || if process(unit, "keeper").is_none() { Ok(()) } else { Err("the keeper still runs") };
    workdir::wait_regardless("the unit's keeper to end", STOP, gone)
}

/// Keeps a unit running while it is wanted, in the machine's cgroup.
pub(super) fn keep(unit: &str) -> Result<()> {
    let Some((_, pause)) = UNITS.iter().find(|(name, _)| *name == unit) else {
        bail!("unknown unit {unit}; a machine has kubelet and containerd");
    };
    join_cgroup()?;
    while state(unit, "want").exists() {
        let mut command = match unit {
            "kubelet" => Command::new("sh"),
            _ => Command::new("containerd"),
        };
        match unit {
            "kubelet" => command.args(["-c", KUBELET]),
            _ => command.args(["--config", "/etc/containerd/config.toml"]),
        };
        println!("=== {unit} starts");
        let mut child = command.spawn().with_context(|| format!("cannot start {unit}"))?;
        workdir::write(&state(unit, "pid"), child.id().to_string())?;
        let ended = child.wait().with_context(|| format!("cannot wait for {unit}"))?;
        println!("=== {unit} ended with {ended}");
        let wanted = || if state(unit, "want").exists() { Err("wanted") } else { Ok(()) };
        let _ = workdir::wait_regardless("the pause", *pause, wanted);
    }
    Ok(())
}

/// Moves this process into the cgroup of its machine's daemons, in every hierarchy.
fn join_cgroup() -> Result<()> {
    let host = rustix::system::uname();
    let name = super::machine::cgroup(&host.nodename().to_string_lossy());
    for hierarchy in guards::hierarchies()? {
        let folder = hierarchy.mount.join(&name).join("daemons");
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(value) = fs::read_to_string(hierarchy.mount.join(&name).join(file)) {
                // Only the cpuset hierarchy of version 1 needs the values.
                let _ = fs::write(folder.join(file), value);
            }
        }
        workdir::write(&folder.join("cgroup.procs"), std::process::id().to_string())?;
    }
    Ok(())
}
