//! Counts of everything that pods can leave behind on the machine, in the runtime's shims, and in the agent
//! itself, for comparison before and after.

use crate::agent::Agent;
use crate::containerd::{Containerd, is_logged_as_gone};
use crate::guards;
use crate::machine;
use crate::workdir::{PATIENCE, wait_for};
use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Leftovers of pods on the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traces {
    cgroups: Vec<PathBuf>,
    processes: usize,
    /// Shims and their child processes, each with its pod and its container.
    shims: Vec<String>,
    /// Includes network namespaces, which the runtime binds to files.
    mounts: Vec<PathBuf>,
    interfaces: usize,
    /// Addresses assigned by the network plugin.
    leases: usize,
    /// Pods in the agent's durable records.
    uids: usize,
    /// Pods' folders and logs, and the pins of kernel programs.
    files: Vec<PathBuf>,
}

impl Traces {
    /// Returns the current state of a containerd and the agent on it.
    ///
    /// # Errors
    /// The machine's tables cannot be read.
    pub fn of(containerd: &Containerd, agent: &Agent) -> Result<Traces> {
        let root = containerd.cgroup();
        let links = guards::ip(&["-o", "link", "show", "master", &containerd.bridge()]).unwrap_or_default();
        let mut files: Vec<_> =
            ["pods", "logs", "bpf"].iter().flat_map(|one| entries(&agent.dir().join(one))).collect();
        files.sort();
        let mut cgroups: Vec<_> =
            root.dirs().iter().flat_map(|dir| entries(dir)).filter(|path| path.is_dir()).collect();
        cgroups.sort();
        let mut mounts: Vec<_> = guards::mounts()?.into_iter().map(|mount| mount.path).collect();
        mounts.retain(|path| path.starts_with(containerd.dir()));
        mounts.sort();
        Ok(Traces {
            cgroups,
            processes: root.dirs().iter().map(|dir| guards::processes_below(dir).len()).sum(),
            shims: containerd.shims(),
            mounts,
            interfaces: links.lines().count(),
            leases: containerd.leases().len(),
            uids: agent.record("pods").and_then(|pods| Some(pods.as_object()?.len())).unwrap_or(0),
            files,
        })
    }

    /// Returns the numbers of assigned addresses and of interfaces that have them.
    pub fn network(&self) -> (usize, usize) {
        (self.leases, self.interfaces)
    }

    /// Returns the count of each kind, for a table.
    pub fn counts(&self) -> [(&'static str, usize); 8] {
        [
            ("cgroups", self.cgroups.len()),
            ("processes", self.processes),
            ("shims and their children", self.shims.len()),
            ("mounts (with network namespaces)", self.mounts.len()),
            ("interfaces", self.interfaces),
            ("addresses", self.leases),
            ("records of pods", self.uids),
            ("files and pins", self.files.len()),
        ]
    }

    /// Waits until the state equals this one: the runtime's cleanup may follow the pods a moment later.
    ///
    /// # Errors
    /// A difference remains. The error lists what is new and what is missing.
    pub fn wait_as_before(&self, containerd: &Containerd, agent: &Agent) -> Result<()> {
        wait_for("the machine to be as before", PATIENCE, || -> Result<()> {
            let now = Traces::of(containerd, agent)?;
            let differences: Vec<String> = self
                .difference(&now)
                .into_iter()
                .map(|line| format!("{line}{}", containerd.whose(&line)))
                .collect();
            if differences.is_empty() { Ok(()) } else { anyhow::bail!("{}", differences.join("\n")) }
        })
    }

    /// Removes objects that the runtime has lost: shims and mounts of containers that it reports as removed.
    /// The runtime then has no record by which an agent could request their removal.
    pub fn remove_lost(&mut self, containerd: &Containerd) -> Vec<String> {
        let log = containerd.log();
        let is_gone = |text: &str| is_logged_as_gone(&log, text);
        let mut lost: Vec<String> = self.shims.extract_if(.., |shim| is_gone(shim)).collect();
        let mounts = self.mounts.extract_if(.., |mount| is_gone(&mount.to_string_lossy()));
        lost.extend(mounts.map(|mount| mount.display().to_string()));
        lost
    }

    /// Returns what `now` has more and less, one per line.
    pub fn difference(&self, now: &Traces) -> Vec<String> {
        let mut lines = Vec::new();
        for ((what, before), (_, after)) in self.counts().into_iter().zip(now.counts()) {
            if before != after {
                lines.push(format!("{what}: {before} before, {after} now"));
            }
        }
        let lists = [
            ("cgroup", &self.cgroups, &now.cgroups),
            ("mount", &self.mounts, &now.mounts),
            ("file", &self.files, &now.files),
        ];
        for (what, before, after) in lists {
            lines.extend(
                after.iter().filter(|one| !before.contains(one)).map(|one| format!("new {what} {one:?}")),
            );
            lines.extend(
                before.iter().filter(|one| !after.contains(one)).map(|one| format!("lost {what} {one:?}")),
            );
        }
        // A new shim in place of an old one is not a leftover.
        if now.shims.len() > self.shims.len() {
            let shims = now.shims.iter().filter(|shim| !self.shims.contains(shim));
            lines.extend(shims.map(|shim| format!("new shim {shim}")));
        }
        lines.truncate(200);
        lines
    }
}

/// Returns everything below a folder.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(entries(&entry.path()));
        }
        found.push(entry.path());
    }
    found
}

/// Resources that the agent itself holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Number of descriptors per open file, except files of existing cgroups, which the agent keeps open
    /// after the first measurement. Sockets and pipes are counted by kind.
    open: BTreeMap<String, usize>,
    /// Resident memory in KiB.
    pub resident: u64,
}

impl Held {
    /// Returns the files and the memory that the agent holds now.
    ///
    /// # Errors
    /// The agent is not running.
    pub fn by(agent: &Agent) -> Result<Held> {
        let pid = agent.pid().context("the agent is not running")?;
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).context("the agent has ended")?;
        let mut open = BTreeMap::new();
        // A descriptor closed in the meantime has no link.
        for path in descriptors.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok()) {
            if !is_measured(&path) {
                let name = path.to_string_lossy();
                let numbered = name.starts_with("socket:") || name.starts_with("pipe:");
                let kind = name.split_once(':').filter(|_| numbered).map_or(&*name, |(kind, _)| kind);
                *open.entry(kind.to_owned()).or_default() += 1;
            }
        }
        Ok(Held { open, resident: machine::resident_kib(pid)? })
    }

    /// Returns the number of open files.
    pub fn files(&self) -> usize {
        self.open.values().sum()
    }

    /// Returns the files of which more are open `later`, with the numbers, for a message.
    pub fn opened(&self, later: &Held) -> String {
        let before = |name: &String| self.open.get(name).copied().unwrap_or_default();
        let more = later.open.iter().filter(|(name, count)| **count > before(name));
        let lines: Vec<String> =
            more.map(|(name, count)| format!("{name}: {} before, {count} now", before(name))).collect();
        lines.join("; ")
    }
}

/// Returns true if an open file belongs to an existing cgroup.
fn is_measured(path: &Path) -> bool {
    path.starts_with("/sys/fs/cgroup") && path.exists()
}
