//! What pods can leave behind: on the machine, in the runtime's shims, and in the agent itself. Counted
//! before and after.

use crate::agent::Agent;
use crate::containerd::{Containerd, says_it_is_gone};
use crate::guards;
use crate::machine;
use crate::workdir::{PATIENCE, wait_for};
use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What pods can leave behind on the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traces {
    cgroups: Vec<PathBuf>,
    processes: usize,
    /// Shims and what they started, each with its pod and its container.
    shims: Vec<String>,
    /// Network namespaces are among them: the runtime binds them to files.
    mounts: Vec<PathBuf>,
    interfaces: usize,
    /// Addresses that the network plugin has given away.
    leases: usize,
    /// Of pods that the agent's durable records know.
    uids: usize,
    /// Pods' folders and logs, and the kernel programs' pins.
    files: Vec<PathBuf>,
}

impl Traces {
    /// All that is there now, of a containerd and the agent on it.
    ///
    /// # Errors
    /// The machine's tables can't be read.
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

    /// Addresses that are given away, and interfaces that have them.
    pub fn network(&self) -> (usize, usize) {
        (self.leases, self.interfaces)
    }

    /// The count of each kind, for a table.
    pub fn counts(&self) -> [(&'static str, usize); 8] {
        [
            ("cgroups", self.cgroups.len()),
            ("processes", self.processes),
            ("shims and theirs", self.shims.len()),
            ("mounts (network namespaces too)", self.mounts.len()),
            ("interfaces", self.interfaces),
            ("addresses", self.leases),
            ("records of pods", self.uids),
            ("files and pins", self.files.len()),
        ]
    }

    /// Waits until all is as it was: some goes a moment after the pods, by the runtime's own cleaning up.
    ///
    /// # Errors
    /// Something stays. The error says what is there that wasn't, or the other way round.
    pub fn wait_as_before(&self, containerd: &Containerd, agent: &Agent) -> Result<()> {
        wait_for("all to be as before", PATIENCE, || -> Result<()> {
            let now = Traces::of(containerd, agent)?;
            let told: Vec<String> = self
                .difference(&now)
                .into_iter()
                .map(|line| format!("{line}{}", containerd.whose(&line)))
                .collect();
            if told.is_empty() { Ok(()) } else { anyhow::bail!("{}", told.join("\n")) }
        })
    }

    /// Takes out what the runtime itself has lost: shims and mounts of containers that it says are gone. It
    /// keeps nothing by which an agent could ask for their removal.
    pub fn take_lost(&mut self, containerd: &Containerd) -> Vec<String> {
        let log = containerd.log();
        let is_gone = |text: &str| says_it_is_gone(&log, text);
        let mut lost: Vec<String> = self.shims.extract_if(.., |shim| is_gone(shim)).collect();
        let mounts = self.mounts.extract_if(.., |mount| is_gone(&mount.to_string_lossy()));
        lost.extend(mounts.map(|mount| mount.display().to_string()));
        lost
    }

    /// What `now` has more and less, a line each.
    pub fn difference(&self, now: &Traces) -> Vec<String> {
        let mut told = Vec::new();
        for ((what, before), (_, after)) in self.counts().into_iter().zip(now.counts()) {
            if before != after {
                told.push(format!("{what}: {before} before, {after} now"));
            }
        }
        let lists = [
            ("cgroup", &self.cgroups, &now.cgroups),
            ("mount", &self.mounts, &now.mounts),
            ("file", &self.files, &now.files),
        ];
        for (what, before, after) in lists {
            told.extend(
                after.iter().filter(|one| !before.contains(one)).map(|one| format!("new {what} {one:?}")),
            );
            told.extend(
                before.iter().filter(|one| !after.contains(one)).map(|one| format!("lost {what} {one:?}")),
            );
        }
        // Another one in an old one's place is no trace.
        if now.shims.len() > self.shims.len() {
            let shims = now.shims.iter().filter(|shim| !self.shims.contains(shim));
            told.extend(shims.map(|shim| format!("new shim {shim}")));
        }
        told.truncate(200);
        told
    }
}

/// Everything below a folder.
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

/// What the agent itself holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// How many descriptors it has of each open file, but those of cgroups that are there: what was measured
    /// once is kept open for the next time. Sockets and pipes are counted by their kind.
    open: BTreeMap<String, usize>,
    /// Resident memory in KiB.
    pub resident: u64,
}

impl Held {
    /// The files and the memory that it holds now.
    ///
    /// # Errors
    /// It does not run.
    pub fn by(agent: &Agent) -> Result<Held> {
        let pid = agent.pid().context("the agent does not run")?;
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).context("the agent has ended")?;
        let mut open = BTreeMap::new();
        // One that is closed meanwhile has no link any more.
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

    /// Number of open files.
    pub fn files(&self) -> usize {
        self.open.values().sum()
    }

    /// The files of which more are open `later`, with the numbers, for a message.
    pub fn opened(&self, later: &Held) -> String {
        let before = |name: &String| self.open.get(name).copied().unwrap_or_default();
        let more = later.open.iter().filter(|(name, count)| **count > before(name));
        let told: Vec<String> =
            more.map(|(name, count)| format!("{name}: {} before, {count} now", before(name))).collect();
        told.join("; ")
    }
}

/// Returns true if an open file is that of a cgroup that still is there.
fn is_measured(path: &Path) -> bool {
    path.starts_with("/sys/fs/cgroup") && path.exists()
}
