//! Kills the processes that a pod left behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{CgroupError, Cgroups, tree};

/// Maximum wait for the end of killed processes. A process stuck in the kernel (a dead disk) may take longer:
/// the caller tries its cgroup again later.
const GRACE: Duration = Duration::from_secs(2);
/// Maximum rounds of listing and killing the processes, if the kernel can't kill a cgroup as a whole.
const ROUNDS: usize = 10;
/// Pause before retrying a removal that the kernel refused: the last process has ended, but its task still
/// exists.
const PAUSE: Duration = Duration::from_millis(2);

/// Sends SIGKILL to every process left in a pod's cgroup `path`, and returns their ids. The processes may
/// take a moment to end. For the end of a pod, when the runtime has nothing more to stop.
///
/// # Errors
/// The path is not a pod's, or a list of processes cannot be read.
pub fn remaining(cgroups: &Cgroups, path: &str) -> Result<Vec<u32>, CgroupError> {
    Ok(all(cgroups, path)?.into_keys().collect())
}

/// Destroys a pod's cgroup `path`: sends SIGKILL to every process left in it, waits for their end (at most
/// two seconds), and removes the cgroup. Returns the ids of the processes.
///
/// # Errors
/// The path is not a pod's, or the processes don't end because they are stuck in the kernel.
pub fn destroy(cgroups: &Cgroups, path: &str) -> Result<Vec<u32>, CgroupError> {
    let deadline = Instant::now() + GRACE;
    let killed = all(cgroups, path)?;
    wait(killed.values(), deadline);
    loop {
        match cgroups.remove(path) {
            Err(error) if error.is_busy() && Instant::now() < deadline => std::thread::sleep(PAUSE),
            Ok(()) => return Ok(killed.into_keys().collect()),
            Err(error) => return Err(error),
        }
    }
}

/// Kills every process in `path` and below, including those forked during the kill.
fn all(cgroups: &Cgroups, path: &str) -> Result<BTreeMap<u32, OwnedFd>, CgroupError> {
    if !is_pod(path) {
        return Err(CgroupError::NotAPod(path.to_owned()));
    }
    let relative = cgroups.paths.relative(path)?;
    let mut killed = BTreeMap::new();
    for pid in cgroups.pids(path)? {
        killed.extend(in_cgroup(cgroups, &relative, pid).map(|process| (pid, process)));
    }
    if killed.is_empty() {
        return Ok(killed);
    }
    // Since 5.14 the kernel kills a whole cgroup at once, so that no process can escape by forking.
    let whole =
        cgroups.paths.cgroup2_path(path).is_some_and(|dir| fs::write(dir.join("cgroup.kill"), "1").is_ok());
    // Processes only in a version 1 hierarchy, or on an older kernel, are killed one by one; frozen processes
    // can't fork.
    let frozen = if whole { None } else { Frozen::new(cgroups, &relative) };
    for process in killed.values() {
        let _ = pidfd_send_signal(process, Signal::KILL);
    }
    for _ in 0..ROUNDS {
        let mut news = BTreeMap::new();
        for pid in cgroups.pids(path)?.into_iter().filter(|pid| !killed.contains_key(pid)) {
            news.extend(in_cgroup(cgroups, &relative, pid).map(|process| (pid, process)));
        }
        if news.is_empty() {
            break;
        }
        for process in news.values() {
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        killed.extend(news);
    }
    drop(frozen);
    Ok(killed)
}

/// A frozen pod; dropping the value thaws it. Signals wait until then.
struct Frozen<'a> {
    cgroups: &'a Cgroups,
    relative: &'a Path,
}

impl<'a> Frozen<'a> {
    /// Freezes the pod; `None` if the kernel has no freezer.
    fn new(cgroups: &'a Cgroups, relative: &'a Path) -> Option<Self> {
        let frozen = Self { cgroups, relative };
        frozen.set(true).then_some(frozen)
    }

    fn set(&self, frozen: bool) -> bool {
        let hierarchies = self.cgroups.paths.hierarchies();
        if let Some(v1) = hierarchies.iter().find(|hierarchy| hierarchy.controllers.contains("freezer")) {
            let state = if frozen { "FROZEN" } else { "THAWED" };
            return fs::write(v1.mount.join(self.relative).join("freezer.state"), state).is_ok();
        }
        let Some(v2) = hierarchies.iter().find(|hierarchy| hierarchy.is_v2) else { return false };
        let state = if frozen { "1" } else { "0" };
        fs::write(v2.mount.join(self.relative).join("cgroup.freeze"), state).is_ok()
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// Waits until all processes have ended, or until the deadline.
fn wait<'a>(processes: impl Iterator<Item = &'a OwnedFd>, deadline: Instant) {
    for process in processes {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(left) = Timespec::try_from(left) else { return };
        // The descriptor is readable once the process has ended.
        let _ = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left));
    }
}

/// Returns true if `path` is `/kubepods/[burstable/|besteffort/]pod<uid>`, or below one.
fn is_pod(path: &str) -> bool {
    let mut parts = path.split('/').skip(1);
    let mut next = || parts.next().unwrap_or_default();
    let is_pod = |name: &str| name.strip_prefix("pod").is_some_and(|uid| !uid.is_empty());
    match (next(), next()) {
        ("kubepods", "burstable" | "besteffort") => is_pod(next()),
        ("kubepods", name) => is_pod(name),
        _ => false,
    }
}

/// Returns a handle of the process `pid`, if the process is still in the cgroup after the handle was opened.
fn in_cgroup(cgroups: &Cgroups, relative: &Path, pid: u32) -> Option<OwnedFd> {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
    let process = pidfd_open(raw, PidfdFlags::empty()).ok()?;
    // From here on the kernel may reuse the pid, but the descriptor stays with this process.
    let mut now = BTreeSet::new();
    for hierarchy in cgroups.paths.hierarchies() {
        tree::pids(&hierarchy.mount.join(relative), &mut now).ok()?;
    }
    now.contains(&pid).then_some(process)
}

#[cfg(test)]
mod tests {
    use super::is_pod;

    #[test]
    fn only_cgroups_of_pods_are_accepted() {
        for path in ["/kubepods/podx", "/kubepods/burstable/pod1-2", "/kubepods/besteffort/podx/container"] {
            assert!(is_pod(path), "{path}");
        }
        for path in [
            "/",
            "",
            "/kubepods",
            "/kubepods/burstable",
            "/kubepods/burstable/",
            "/kubepods/pod",
            "/kubepods/other",
            "/system.slice/podx",
            "/kubepods/besteffort/x/podx",
            "kubepods/podx",
        ] {
            assert!(!is_pod(path), "{path}");
        }
    }
}
