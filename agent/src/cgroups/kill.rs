//! The end of what a pod left behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{CgroupError, Cgroups, tree};

pub(super) fn pod(cgroups: &Cgroups, path: &str) -> Result<Vec<u32>, CgroupError> {
    if !is_pod(path) {
        return Err(CgroupError::NotAPod(path.to_owned()));
    }
    let pids = cgroups.pids(path)?;
    let relative = cgroups.relative(path)?;
    // Since 5.14 the kernel kills a whole cgroup at once, so that nothing can fork its way out.
    if let Some(dir) = cgroups.cgroup2_path(path) {
        let _ = fs::write(dir.join("cgroup.kill"), "1");
    }
    // What is in a version 1 hierarchy alone, or on an older kernel, one by one.
    Ok(pids.into_iter().filter(|pid| kill(cgroups, &relative, *pid)).collect())
}

/// Whether `path` is `/kubepods/[burstable/|besteffort/]pod<uid>`, or below one.
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

/// Kills the process `pid` if it is still in the cgroup once it cannot be mistaken for another any more. Whether it was.
fn kill(cgroups: &Cgroups, relative: &Path, pid: u32) -> bool {
    let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    let Ok(process) = pidfd_open(raw, PidfdFlags::empty()) else { return false };
    // From here on the number may be given to another process, but the descriptor stays with this one.
    let mut now = BTreeSet::new();
    for hierarchy in cgroups.hierarchies() {
        if tree::pids(&hierarchy.mount.join(relative), &mut now).is_err() {
            return false;
        }
    }
    // One that cgroup.kill reached may have gone meanwhile; it was there, and it is dead.
    !now.contains(&pid) || pidfd_send_signal(&process, Signal::KILL).is_ok()
}

#[cfg(test)]
mod tests {
    use super::is_pod;

    #[test]
    fn only_a_pods_own_cgroup_is_one() {
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
