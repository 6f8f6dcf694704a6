//! What can go wrong with cgroups, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use super::Version;

/// Why a cgroup could not be read or made what it should be.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No usable hierarchy.
    #[error(
        "no cgroup file system is mounted as a whole: mount cgroup2 at /sys/fs/cgroup, or run beelet outside the \
         container it is in"
    )]
    NotMounted,
    /// A controller we cannot do without.
    #[error(
        "the kernel's {controller} controller is not available to cgroups: mount its hierarchy, or enable it in the \
         root's cgroup.subtree_control{}",
        if *.controller == "memory" { "; boot with cgroup_enable=memory where a board turns it off" } else { "" }
    )]
    NoController {
        /// Its name.
        controller: &'static str,
    },
    /// The systemd driver without systemd.
    #[error(
        "the cgroup driver is systemd, but systemd is not this machine's process 1 (there is no /run/systemd/system): set \
         SystemdCgroup = false in the runtime's configuration and cgroupDriver: cgroupfs in ours, or mount that folder and \
         /run/dbus where beelet runs in a container"
    )]
    NoSystemd,
    /// The systemd driver on version 1.
    #[error(
        "the cgroup driver is systemd, which beelet drives on cgroup v2 alone, and this machine's cgroups are {version}: \
         boot with systemd.unified_cgroup_hierarchy=1, or set SystemdCgroup = false in the runtime's configuration and \
         cgroupDriver: cgroupfs in ours"
    )]
    SystemdNeedsV2 {
        /// What they are.
        version: Version,
    },
    /// systemd refused, or gave no answer.
    #[error(transparent)]
    Systemd(#[from] beelet_systemd::Error),
    /// The cgroup root is not there.
    #[error(
        "cgroupRoot: there is no cgroup {root} ({} is missing): beelet makes only what is below it. Correct the path, or make \
         the cgroup first, in every hierarchy",
        .missing.display()
    )]
    NoRoot {
        /// As configured.
        root: String,
        /// Where it should be.
        missing: PathBuf,
    },
    /// A path that leads somewhere else.
    #[error("{0:?} is not a cgroup path below the cgroup root")]
    Path(String),
    /// A path that is no pod's.
    #[error("{0} is not a pod's cgroup: nothing in it is killed")]
    NotAPod(String),
    /// A file whose controller is nowhere.
    #[error("{cgroup}: {file} cannot be set to {value:?}: no mounted hierarchy has its controller")]
    NoHierarchy {
        /// The cgroup.
        cgroup: String,
        /// The file.
        file: String,
        /// What it should have held.
        value: String,
    },
    /// The kernel kept another value than the one written.
    #[error("{}: wrote {wrote:?} but the kernel keeps {kept:?}: something else writes there too", .file.display())]
    Refused {
        /// The file.
        file: PathBuf,
        /// What was written.
        wrote: String,
        /// What it holds.
        kept: String,
    },
    /// A limit below what is in use would kill at once.
    #[error(
        "{}: {limit} bytes are below the {used} in use: not written, because the kernel would kill processes at once; \
         it is tried again when they fit",
        .file.display()
    )]
    WouldKill {
        /// The file.
        file: PathBuf,
        /// The limit that was wanted.
        limit: u64,
        /// What is in use.
        used: u64,
    },
    /// Processes are still there.
    #[error("{cgroup} still has processes: {}", listed(.pids))]
    NotEmpty {
        /// The cgroup.
        cgroup: String,
        /// Their ids.
        pids: Vec<u32>,
    },
    /// The kernel or the file system said no.
    #[error("cannot {action} {}: {source}{}", .path.display(), hint(.source, .path))]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl CgroupError {
    /// Returns true if it only says that the cgroup or its file is not there (any more).
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Io { source, .. } if super::is_gone(source))
    }

    /// Returns true if a removal failed because of processes that have not gone yet.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        match self {
            Self::NotEmpty { .. } => true,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::ResourceBusy,
            _ => false,
        }
    }

    pub(super) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}

fn listed(pids: &[u32]) -> String {
    let shown: Vec<String> = pids.iter().take(10).map(u32::to_string).collect();
    let more = if pids.len() > 10 { format!(" and {} more", pids.len() - 10) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// What the kernel means by an error number here.
fn hint(error: &io::Error, path: &Path) -> &'static str {
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match (error.kind(), file) {
        (io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem, _) => {
            " (beelet must be root, and cgroups mounted writable)"
        }
        (io::ErrorKind::ResourceBusy, "cgroup.subtree_control") => {
            " (a cgroup with processes of its own cannot have controllers for its children: make one below it, and \
             write each line of its cgroup.procs into that one's)"
        }
        (io::ErrorKind::ResourceBusy, "memory.limit_in_bytes") => {
            " (more than that is in use and cannot be reclaimed)"
        }
        (io::ErrorKind::InvalidInput, "cpu.cfs_quota_us" | "cpu.cfs_period_us") => {
            " (a cgroup cannot have a larger share of CPU than its parent, nor a smaller one than its children)"
        }
        _ => "",
    }
}
