//! Detection of the kernel's OOM killer acting because all pods together reached their limit, which eviction
//! must prevent.

use crate::workdir;
use anyhow::{Context as _, Result};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

/// OOM counter, which starts at 0. Version 2 counts the processes killed in the cgroup and below, for
/// any limit. On version 1 a kill is counted only in the victim's own cgroup, which is removed with it; so
/// there the counter is the number of times that the cgroup itself ran out of memory, by its own limit or one
/// above.
#[derive(Debug)]
pub enum OomWatch {
    /// By `memory.events`.
    V2 {
        /// The file.
        events: PathBuf,
        /// Initial value.
        before: u64,
    },
    /// By a notification (Documentation/admin-guide/cgroup-v1/memory.rst, "OOM Control").
    V1 {
        /// Its eventfd.
        event: OwnedFd,
        /// Sum of the values read so far.
        seen: u64,
    },
}

impl OomWatch {
    /// Watches the cgroup with this folder in the memory controller's hierarchy.
    ///
    /// # Errors
    /// The kernel does not report OOM kills.
    pub fn start(memory_dir: &Path) -> Result<OomWatch> {
        let events = memory_dir.join("memory.events");
        if events.exists() {
            let before = oom_kills(&workdir::read(&events)?);
            return Ok(OomWatch::V2 { events, before });
        }
        let path = memory_dir.join("memory.oom_control");
        let control = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let line = format!("{} {}", event.as_raw_fd(), control.as_raw_fd());
        workdir::write(&memory_dir.join("cgroup.event_control"), line)?;
        Ok(OomWatch::V1 { event, seen: 0 })
    }

    /// Returns the count so far.
    ///
    /// # Errors
    /// The cgroup has been removed.
    pub fn count(&mut self) -> Result<u64> {
        match self {
            OomWatch::V2 { events, before } => Ok(oom_kills(&workdir::read(events)?).saturating_sub(*before)),
            OomWatch::V1 { event, seen } => {
                let mut number = [0; 8];
                match rustix::io::read(&*event, &mut number) {
                    Ok(_) => *seen += u64::from_ne_bytes(number),
                    Err(rustix::io::Errno::AGAIN) => {}
                    Err(error) => return Err(error.into()),
                }
                Ok(*seen)
            }
        }
    }
}

fn oom_kills(events: &str) -> u64 {
    let line = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guards::CgroupRoot;
    use crate::require;
    use std::process::Command;

    #[test]
    fn a_kill_for_the_limit_of_all_is_counted() {
        require!(root);
        let root = CgroupRoot::new(&workdir::unique("beelet-oom")).unwrap();
        let dir = root.dir("memory").unwrap();
        let is_v2 = dir.join("cgroup.subtree_control").exists();
        if is_v2 {
            workdir::write(&dir.parent().unwrap().join("cgroup.subtree_control"), "+memory").unwrap();
        }
        let (limit, below) =
            (if is_v2 { "memory.max" } else { "memory.limit_in_bytes" }, dir.join("container"));
        if is_v2 {
            workdir::write(&dir.join("cgroup.subtree_control"), "+memory").unwrap();
        }
        std::fs::create_dir(&below).unwrap();
        workdir::write(&dir.join(limit), (16 << 20).to_string()).unwrap();
        let mut watch = OomWatch::start(&dir).unwrap();
        assert_eq!(watch.count().unwrap(), 0);
        // The buffer is touched completely when it is filled.
        let script = format!(
            "echo $$ > {}/cgroup.procs; exec dd if=/dev/zero of=/dev/null bs=64M count=1",
            below.display()
        );
        let ended = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert!(!ended.status.success(), "{ended:?}");
        assert!(watch.count().unwrap() > 0);
    }

    #[test]
    fn kills_are_distinguished_from_group_kills() {
        assert_eq!(oom_kills("low 0\nhigh 1\nmax 2\noom 3\noom_kill 4\noom_group_kill 5\n"), 4);
    }
}
