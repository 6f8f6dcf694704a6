//! Takes down an instance, knowing only its folder: after a test, after a killed test, after `demo --keep`.

use super::Names;
use crate::guards::{self, CONTAINER_ID, CgroupRoot, chosen_driver};
use crate::workdir::{self, wait_regardless};
use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// File that marks a folder as an instance's.
pub(crate) const MARKER: &str = "beelet-test-instance";

/// Folder of libcni's cached results, for all networks of the machine.
const CNI_CACHE: &str = "/var/lib/cni/results";

/// Most time for killed processes to end.
const PATIENCE: Duration = Duration::from_secs(120);

/// Records a process of the instance, so that [`teardown`] ends it: its pid and its start time, which
/// distinguishes it from a later process with the same pid.
pub(crate) fn write_pid(dir: &Path, name: &str, pid: u32) -> Result<()> {
    let started = start_time(pid).with_context(|| format!("{name} ended at once"))?;
    workdir::write(&dir.join(format!("{name}.pid")), format!("{pid} {started}\n"))
}

/// Returns the start time of a process in clock ticks since boot: field 22 of /proc/PID/stat (proc(5)).
fn start_time(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = stat.rsplit_once(") ")?.1;
    after_name.split(' ').nth(19).map(ToOwned::to_owned)
}

/// Ends every process of the instance in `dir`, unmounts its mounts, and removes its network, its cgroups,
/// and then the folder. Needs no cooperation of any process. Has no effect without an instance.
pub fn teardown(dir: &Path) -> Result<()> {
    let names = Names::of(dir);
    end_written_down(dir)?;
    kill_shims(&names)?;
    for socket in shim_sockets(dir) {
        let _ = std::fs::remove_file(socket); // the shim may have removed the socket
    }
    // Network namespaces are removed with their mounts, and their veth pairs with them.
    guards::unmount_below(dir)?;
    if bridge_exists(&names) {
        guards::ip(&["link", "del", &names.bridge()])?;
    }
    for file in cni_results(&names) {
        let _ = std::fs::remove_file(file); // only a cache
    }
    CgroupRoot::existing(&names.cgroup(), chosen_driver()?)?.remove()?;
    // `rm` instead of the standard library, which recurses: a container may have created a tree of any depth.
    let removed = Command::new("rm").arg("-rf").arg("--").arg(dir).output().context("cannot start rm")?;
    if !removed.status.success() {
        bail!("cannot remove {}: {}", dir.display(), String::from_utf8_lossy(&removed.stderr).trim());
    }
    Ok(())
}

/// Removes the parts of an instance that a reboot of the machine would remove: processes, mounts, network
/// namespaces, and the folders that are in memory on a real machine. The disk stays: images, container
/// records, leases of the network plugins.
pub(super) fn lose_memory(names: &Names) -> Result<()> {
    kill_shims(names)?;
    for socket in shim_sockets(&names.dir) {
        let _ = std::fs::remove_file(socket); // the shim may have removed the socket
    }
    guards::unmount_below(&names.dir)?;
    for dir in ["state", "runc"].map(|name| names.dir.join(name)) {
        match std::fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", dir.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Remains of an instance on the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leftovers(pub Vec<String>);

impl Leftovers {
    /// Finds all objects that [`teardown`] removes, and the instance's network namespaces.
    pub fn of(dir: &Path) -> Result<Leftovers> {
        let names = Names::of(dir);
        let mut found = Vec::new();
        let processes = processes_of(&names);
        found.extend(
            processes.iter().map(|process| format!("process {}: {}", process.pid, process.command.join(" "))),
        );
        let mounts = guards::mounts()?.into_iter().filter(|mount| mount.path.starts_with(dir));
        found.extend(mounts.map(|mount| format!("mount {}", mount.path.display())));
        if bridge_exists(&names) {
            found.push(format!("network interface {}", names.bridge()));
        }
        found.extend(cni_results(&names).iter().map(|file| format!("file {}", file.display())));
        let cgroups = CgroupRoot::existing(&names.cgroup(), chosen_driver()?)?.dirs();
        found
            .extend(cgroups.iter().filter(|dir| dir.exists()).map(|dir| format!("cgroup {}", dir.display())));
        if dir.exists() {
            found.push(format!("folder {}", dir.display()));
        }
        Ok(Leftovers(found))
    }
}

/// Copies the logs of the instance in `dir` to a permanent folder, and prints their paths.
pub(crate) fn keep_logs(dir: &Path) {
    let Some(name) = dir.file_name() else { return };
    let kept = workdir::target_dir().join("test-logs").join(name);
    let entries = std::fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    for entry in entries.filter(|entry| entry.path().extension().is_some_and(|extension| extension == "log"))
    {
        let copied = std::fs::create_dir_all(&kept)
            .and_then(|()| std::fs::copy(entry.path(), kept.join(entry.file_name())).map(drop));
        match copied {
            Ok(()) => eprintln!("log kept: {}", kept.join(entry.file_name()).display()),
            Err(error) => eprintln!("cannot keep the log {}: {error}", entry.path().display()),
        }
    }
}

/// Process of the machine.
struct Running {
    pid: i32,
    parent: i32,
    command: Vec<String>,
}

/// Returns all processes of the machine.
fn processes() -> Vec<Running> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut after_name = stat.rsplit_once(") ")?.1.split(' ');
        if after_name.next()? == "Z" {
            return None; // a zombie: only its parent can reap it
        }
        let parent = after_name.next()?.parse().ok()?;
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let command =
            command.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        Some(Running { pid, parent, command })
    })
    .collect()
}

/// Ends the recorded processes that still exist.
fn end_written_down(dir: &Path) -> Result<()> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    for entry in entries.filter(|entry| entry.path().extension().is_some_and(|extension| extension == "pid"))
    {
        let text = workdir::read(&entry.path())?;
        let Some((pid, started)) = text.trim().split_once(' ') else { continue };
        let Ok(pid) = pid.parse::<u32>() else { continue };
        let same = || start_time(pid).is_some_and(|now| now == started);
        if same()
            && let Some(process) = i32::try_from(pid).ok().and_then(Pid::from_raw)
        {
            rustix::process::kill_process(process, Signal::KILL)
                .with_context(|| format!("cannot kill {} ({pid})", entry.path().display()))?;
            wait_regardless("a killed process to end", PATIENCE, || {
                let gone = !same() || processes().iter().all(|running| running.pid.unsigned_abs() != pid);
                if gone { Ok(()) } else { Err(format!("process {pid} still exists")) }
            })?;
        }
    }
    Ok(())
}

/// Returns the shims of this instance's socket, and their children, the containers' first processes.
fn processes_of(names: &Names) -> Vec<Running> {
    let socket = names.socket().display().to_string();
    let all = processes();
    let is_shim = |running: &Running| {
        running.command.first().is_some_and(|program| program.contains("containerd-shim"))
            && running.command.contains(&socket)
    };
    let shims: Vec<i32> = all.iter().filter(|running| is_shim(running)).map(|running| running.pid).collect();
    all.into_iter()
        .filter(|running| shims.contains(&running.pid) || shims.contains(&running.parent))
        .collect()
}

/// Describes the shims of the instance and their child processes, with the pod and container of each.
pub(super) fn shims(names: &Names) -> Vec<String> {
    let running = processes_of(names);
    let id_of = |pid: i32| {
        let shim = running.iter().find(|other| other.pid == pid)?;
        let at = shim.command.iter().position(|word| word == "-id")?;
        shim.command.get(at + 1)
    };
    let lines = running.iter().map(|process| {
        let id = id_of(process.pid).or_else(|| id_of(process.parent));
        let whose = id.map(|id| format!(" for {id}{}", whose(&names.dir, id))).unwrap_or_default();
        format!("{} ({}){whose}", process.pid, process.command.first().map_or("", String::as_str))
    });
    lines.collect()
}

/// Describes the pods and containers whose ids are in a text (a path, a command); empty without any ids.
pub(super) fn whose(dir: &Path, text: &str) -> String {
    let bundles = std::fs::read_dir(dir.join("state/io.containerd.runtime.v2.task/k8s.io"));
    let bundles = bundles.into_iter().flatten().flatten();
    let of = bundles.filter(|bundle| bundle.file_name().to_str().is_some_and(|id| text.contains(id)));
    let descriptions = of.map(|bundle| {
        let config = std::fs::read(bundle.path().join("config.json")).unwrap_or_default();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap_or_default();
        let annotation = |name: &str| {
            let value = config["annotations"][format!("io.kubernetes.cri.{name}")].as_str();
            value.unwrap_or("?").to_owned()
        };
        format!(
            ", {} of pod {} {} in sandbox {}",
            if annotation("container-type") == "sandbox" {
                "the sandbox".to_owned()
            } else {
                annotation("container-name")
            },
            annotation("sandbox-name"),
            annotation("sandbox-uid"),
            annotation("sandbox-id"),
        )
    });
    descriptions.collect()
}

/// Returns true if containerd's log reports an object, whose id is in the text (a path, a command), as
/// removed or ended: its remains were then lost by the runtime itself. Under heavy load, containerd 1.6
/// abandons shims that answer late.
pub(crate) fn is_logged_as_gone(log: &str, text: &str) -> bool {
    let words = text.split(|c: char| !c.is_ascii_hexdigit());
    let ids: Vec<&str> = words.filter(|word| word.len() == CONTAINER_ID).collect();
    let reports_removal = |line: &&str| {
        line.contains("shim disconnected")
            || (line.contains("Remove") && line.contains("returns successfully"))
    };
    log.lines().filter(reports_removal).any(|line| ids.iter().any(|id| line.contains(id)))
}

/// Kills the containers and then their shims, and waits until they have ended.
fn kill_shims(names: &Names) -> Result<()> {
    wait_regardless("shims and containers to end", PATIENCE, || {
        let running = processes_of(names);
        // Killing a container's first process kills its pid namespace. The shims are last: without its shim,
        // a container cannot be recognized as one of this instance.
        let (shims, containers): (Vec<_>, Vec<_>) = running.iter().partition(|running| {
            running.command.first().is_some_and(|program| program.contains("containerd-shim"))
        });
        let next = if containers.is_empty() { &shims } else { &containers };
        for pid in next.iter().filter_map(|running| Pid::from_raw(running.pid)) {
            let _ = rustix::process::kill_process(pid, Signal::KILL); // the process may have ended
        }
        if running.is_empty() { Ok(()) } else { Err(format!("{} are still running", running.len())) }
    })
}

/// Returns the sockets of the shims under the machine-wide /run/containerd, read from each task's folder.
fn shim_sockets(dir: &Path) -> Vec<PathBuf> {
    let tasks = dir.join("state/io.containerd.runtime.v2.task/k8s.io");
    let entries = std::fs::read_dir(tasks).into_iter().flatten().filter_map(Result::ok);
    let mut sockets = Vec::new();
    for task in entries.map(|entry| entry.path()) {
        // 1.6 writes only the address, 2.x a JSON document.
        let address = std::fs::read_to_string(task.join("address")).ok().or_else(|| {
            let text = std::fs::read_to_string(task.join("bootstrap.json")).ok()?;
            let document: serde_json::Value = serde_json::from_str(&text).ok()?;
            Some(document["address"].as_str()?.to_owned())
        });
        let path =
            address.as_deref().and_then(|address| address.trim().strip_prefix("unix://")).map(PathBuf::from);
        sockets.extend(path.filter(|path| path.starts_with("/run/containerd/s")));
    }
    sockets
}

fn bridge_exists(names: &Names) -> bool {
    Path::new("/sys/class/net").join(names.bridge()).exists()
}

/// Returns libcni's cached results of this instance's sandboxes: `<network>-<sandbox>-<interface>`, and the
/// results of the same sandboxes for the loopback network, whose name is the same on the whole machine.
fn cni_results(names: &Names) -> Vec<PathBuf> {
    let entries = || std::fs::read_dir(CNI_CACHE).into_iter().flatten().filter_map(Result::ok);
    let prefix = format!("{}-", names.network());
    let name_of = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let sandboxes: Vec<String> = entries()
        .filter_map(|entry| Some(name_of(&entry).strip_prefix(&prefix)?.split('-').next()?.to_owned()))
        .collect();
    let ours = |entry: &std::fs::DirEntry| {
        let name = name_of(entry);
        name.starts_with(&prefix)
            || sandboxes.iter().any(|sandbox| name == format!("cni-loopback-{sandbox}-lo"))
    };
    entries().filter(ours).map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::is_logged_as_gone;

    #[test]
    fn objects_that_the_runtime_removed_are_left_to_it() {
        let [removed, ended, runs] = ["a", "b", "c"].map(|digit| digit.repeat(64));
        let log = format!(
            "msg=\"RemovePodSandbox \\\"{removed}\\\" returns successfully\"\n\
             msg=\"shim disconnected\" id={ended}\n\
             msg=\"StartContainer for \\\"{runs}\\\" returns successfully\"\n"
        );
        assert!(is_logged_as_gone(
            &log,
            &format!("3799 (/usr/bin/containerd-shim-runc-v2) for {removed}, of a pod")
        ));
        assert!(is_logged_as_gone(&log, &format!("/state/k8s.io/{ended}/rootfs")));
        assert!(!is_logged_as_gone(&log, &format!("/state/k8s.io/{runs}/rootfs")));
        assert!(!is_logged_as_gone(&log, "/state/k8s.io"));
    }
}
